"""What ``make demo`` runs: a real, trained model through the backend, and what quantising costs it.

1. SmolLM2-135M-Instruct answers a chat prompt through the compiled model, with a progress bar; tokens per second,
   compilation apart, beside the uncompiled model's.
2. The report: what was recognised, what was decided, and why.
3. Perplexity on a stated slice of WikiText-2, side by side: uncompiled, exact, FP8 prefill, INT4 decode.

On a machine without a GPU, FP8 and INT4 run the quantised reference: the numbers are those of the formats, the speed is
not that of the kernels.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console
from tqdm.auto import tqdm
from transformers.generation.streamers import BaseStreamer

import fu_compile
from fu_compile import evaluate, models
from fu_compile.errors import DataError


class Progress(BaseStreamer):
    """Shows generation as a bar and keeps the time of every token: the first carries compilation and packing."""

    def __init__(self, total: int, description: str, shown: bool = True) -> None:
        self.bar = tqdm(total=total, desc=description, unit="tok", disable=not shown)
        self.times: list[float] = []
        self._prompt = True

    def put(self, value: Any) -> None:
        """Called by ``generate`` with the prompt and then with every new token."""
        if self._prompt:
            self._prompt = False
            return
        self.times.append(time.perf_counter())
        self.bar.update()

    def end(self) -> None:
        """Called by ``generate`` when it has finished."""
        self.bar.close()

    def tokens_per_second(self) -> float:
        """Median decode speed: from the third token on, when prefill and decode graph are compiled."""
        steps = [b - a for a, b in zip(self.times[1:], self.times[2:], strict=False)]
        return 1.0 / statistics.median(steps) if steps else float("nan")


def chat(model: Any, tokenizer: Any, prompt: str, tokens: int, description: str, shown: bool) -> tuple[str, float]:
    """Greedy answer of ``model`` to ``prompt``, and its decode speed in tokens per second."""
    if getattr(tokenizer, "chat_template", None):
        messages = [{"role": "user", "content": prompt}]
        prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
    progress = Progress(tokens, description, shown)
    with torch.no_grad():
        out = model.generate(
            **inputs,
            max_new_tokens=tokens,
            do_sample=False,
            cache_implementation="static",
            disable_compile=True,  # transformers' own torch.compile, which it starts on a GPU for static caches
            streamer=progress,
        )
    answer = tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return answer.strip(), progress.tokens_per_second()


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the three parts; every setting that takes time can be made smaller."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="folder, hub id or .gguf file")
    parser.add_argument("--prompt", default="What is the capital of France, and what is it known for?")
    parser.add_argument("--tokens", type=int, default=48, help="tokens to generate")
    parser.add_argument("--windows", type=int, nargs="*", default=[14, 56, 98, 140], help="windows of the text")
    parser.add_argument("--length", type=int, default=256, help="tokens per window")
    parser.add_argument("--file", help="another text than WikiText-2")
    parser.add_argument("--json", help="write the perplexities to this file")
    parser.add_argument("--quiet", action="store_true", help="no progress bars")
    args = parser.parse_args(argv)
    console = Console()

    model, tokenizer = models.load(args.model, device="cuda" if torch.cuda.is_available() else "cpu")
    with models.uncompiled(model):
        _, eager = chat(model, tokenizer, args.prompt, args.tokens, "uncompiled", not args.quiet)
    with models.compiled(model):
        answer, speed = chat(model, tokenizer, args.prompt, args.tokens, "futransformer", not args.quiet)
        report = fu_compile.report(model)
    console.rule("chat, through the backend: FP8 prefill, INT4 decode, INT4 key/value cache")
    print(f"user:      {args.prompt}\nassistant: {answer}")
    print(f"\n{speed:.1f} tokens/s (uncompiled {eager:.1f}), {model.device.type}, {model.dtype}, batch 1")
    console.rule("report")
    print(report)

    console.rule("perplexity")
    try:
        result = evaluate.perplexity(
            model, tokenizer, windows=args.windows, length=args.length, file=args.file, progress=not args.quiet
        )
    except DataError as error:
        # The text is not part of the repository: a stranger without it still gets the rest of the demo, and the reason.
        print(error)
        return
    console.print(result.table())
    if args.json:
        result.save(args.json)


if __name__ == "__main__":
    main()
