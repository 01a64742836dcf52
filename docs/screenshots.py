"""The pictures of docs/report.md: two pages written by ``Report.to_html``, photographed by a headless Chromium.

SmolLM2-135M after it has answered a prompt, and an 8B configuration without weights.

python docs/screenshots.py
python docs/screenshots.py --model FOLDER --layers 4 --out /tmp/pictures
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import fu_compile
from fu_compile import models
from fu_compile.errors import MissingDependencyError

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
"""Looked for in this order, after ``$CHROME``."""

WIDTH = 1240
"""Pixels: the page's own width and a margin."""


def browser() -> str:
    """Path of a Chromium.

    Raises:
        MissingDependencyError: there is none.
    """
    wanted = os.environ.get("CHROME")
    found = [path for name in ((wanted,) if wanted else BROWSERS) if (path := shutil.which(name))]
    if not found:
        raise MissingDependencyError(
            f"no browser to take pictures with: looked for {wanted or ', '.join(BROWSERS)}",
            where="docs/screenshots.py",
            advice="apt-get install chromium, or CHROME=/path/to/chromium.",
        )
    return found[0]


def photograph(page: Path, picture: Path, height: int, dark: bool = False) -> None:
    """The top ``height`` pixels of a page as a PNG, in the light or the dark scheme."""
    with tempfile.TemporaryDirectory() as profile:
        command = [
            browser(), "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars",
            "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-quic",
            f"--user-data-dir={profile}", f"--window-size={WIDTH},{height}", f"--screenshot={picture}",
            *(["--force-dark-mode"] if dark else []), page.resolve().as_uri(),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if not picture.is_file():
        raise RuntimeError(f"{command[0]} took no picture: {done.stderr.strip()[-500:]}")


def of_a_run(model: str, page: Path) -> None:
    """The report of a model that has answered one prompt."""
    loaded, tokenizer = models.load(model, dtype=torch.bfloat16)
    loaded.compile(backend="futransformer")
    inputs = tokenizer("The capital of France is", return_tensors="pt")
    with torch.no_grad():
        for _ in range(2):
            loaded.generate(**inputs, max_new_tokens=16, do_sample=False, cache_implementation="static")
        with fu_compile.report.timed(loaded):
            loaded.generate(**inputs, max_new_tokens=16, do_sample=False, cache_implementation="static")
    fu_compile.report(loaded).to_html(page)


def of_an_explanation(layers: int, page: Path) -> None:
    """What the backend would do with a Llama 3.1 of 8B sizes, of which no weight exists; two layers kept exact."""
    config = LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=layers, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=128256, max_position_embeddings=131072,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    overrides = [("model.layers.0.*", "exact"), (f"model.layers.{layers - 1}.*down_proj", "fp8")]
    fu_compile.explain(model, options={"overrides": overrides}).to_html(page)


def main(argv: Sequence[str] | None = None) -> None:
    """Writes ``report.png`` and ``explain-8b.png``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="folder, hub id or .gguf file")
    parser.add_argument("--layers", type=int, default=32, help="layers of the explained configuration")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "images")
    args = parser.parse_args(argv)
    browser()  # before minutes of work
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        pages = Path(folder)
        of_a_run(args.model, pages / "report.html")
        photograph(pages / "report.html", args.out / "report.png", 1195)
        of_an_explanation(args.layers, pages / "explain.html")
        photograph(pages / "explain.html", args.out / "explain-8b.png", 1000, dark=True)


if __name__ == "__main__":
    main()
