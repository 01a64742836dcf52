"""GPTQ of an 8B-shaped model on one GPU, decoder layer by decoder layer: seconds and the most memory.

    python benchmarks/gptq_8b.py                 # all 32 layers
    python benchmarks/gptq_8b.py --blocks 4      # the first four; 32 take eight times as long
    python benchmarks/gptq_8b.py --device cpu --blocks 1 --shape tiny --samples 2 --length 32   # a dry run

Random weights in the shapes of Llama-3.1-8B (bfloat16) and random token ids: what is measured is time, not quality. The
default calibration (8 sequences of 2048 tokens) and the default solver, groups of 128. Only the layers that are asked
for exist; each is done and then dropped, so memory is that of one layer's work and the weights that are left.

Prints a line per layer and writes ``benchmarks/results/gptq-8b-<date>-<commit>.json``. Fewer layers than 32 are
scaled: the first, which warms up, and 31 times the mean of the others. Exit code 1: more than the bar of 20 minutes.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from overhead import ROOT, commit
from transformers import LlamaConfig, LlamaForCausalLM

from fu_compile.calibration import LENGTH, SAMPLES
from fu_compile.gptq import quantize_blocks

LAYERS = 32
MINUTES = 20.0
"""Bar of all layers."""
SHAPES = {
    "8b": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
        "vocab_size": 128256, "max_position_embeddings": 131072,
    },
    "tiny": {
        "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
        "vocab_size": 128, "max_position_embeddings": 4096,
    },
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Quantises, prints, writes; 1 where the bar was missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=LAYERS, help="decoder layers")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--weights", help="where the weights lie: default there; cpu: each layer visits the device")
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--samples", type=int, default=SAMPLES)
    parser.add_argument("--length", type=int, default=LENGTH)
    parser.add_argument("--group-size", type=int, default=128)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder for the JSON file")
    args = parser.parse_args(argv)
    cuda = torch.device(args.device).type == "cuda"
    at = commit()
    home = args.weights or args.device

    def memory() -> float:
        """The most GB held on the GPU since the last call."""
        if not cuda:
            return 0.0
        torch.cuda.synchronize()
        most = torch.cuda.max_memory_allocated() / 1e9
        torch.cuda.reset_peak_memory_stats()
        return most

    torch.manual_seed(0)
    config = LlamaConfig(**SHAPES[args.shape], num_hidden_layers=args.blocks, tie_word_embeddings=True)
    with torch.device(home):
        model = LlamaForCausalLM(config).to(torch.bfloat16).eval().requires_grad_(False)
    ids = torch.randint(config.vocab_size, (args.samples, args.length))
    rows = []
    memory()
    start = time.perf_counter()
    blocks = quantize_blocks(
        model, ids, group_size=args.group_size, progress=False, device=None if home == args.device else args.device
    )
    for i, block in enumerate(blocks):
        most = memory()  # waits for the GPU
        seconds = time.perf_counter() - start
        rows.append({"block": block.name, "seconds": seconds, "memory, GB": most, "error": block.errors})
        print(f"{block.name}: {seconds:.1f} s, {most:.1f} GB, mean error {statistics.fmean(block.errors.values()):.2e}")
        model.model.layers[i].to("meta")
        start = time.perf_counter()
    each = statistics.fmean(r["seconds"] for r in (rows[1:] or rows))
    whole = rows[0]["seconds"] + (LAYERS - 1) * each if len(rows) < LAYERS else sum(r["seconds"] for r in rows)
    said = "measured" if len(rows) >= LAYERS else f"first layer + {LAYERS - 1} x the mean of the others"
    print(f"{each:.1f} s a layer; {LAYERS} layers: {whole / 60:.1f} minutes ({said}); bar {MINUTES:g}")
    is_bar = args.shape == "8b" and cuda and (args.samples, args.length) == (SAMPLES, LENGTH)
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    content = {
        "date": date,
        "commit": at,
        "machine": {
            "device": torch.cuda.get_device_name() if cuda else platform.processor(),
            "weights on": home,
            "torch": torch.__version__,
        },
        "shape": args.shape,
        "samples": args.samples,
        "length": args.length,
        "group size": args.group_size,
        "layers": rows,
        "seconds a layer": each,
        f"minutes for {LAYERS} layers": whole / 60,
        "how": said,
        "missed": whole / 60 > MINUTES if is_bar else None,
    }
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"gptq-8b-{date}-{at}.json"
    path.write_text(json.dumps(content, indent=2) + "\n")
    print(f"wrote {path}")
    return int(is_bar and whole / 60 > MINUTES)


if __name__ == "__main__":
    sys.exit(main())
