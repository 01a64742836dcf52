"""What FP8 prefill costs in perplexity, by where the activation scales come from.

    python benchmarks/fp8_accuracy.py                       # SmolLM2-135M-Instruct, about fifteen minutes on one core
    python benchmarks/fp8_accuracy.py --length 256 --windows 0 1     # a quick look, no bars

Protocol of docs/numerics.md: WikiText-2 raw, windows of 2048 tokens of the test split, one call per window. The model
is float32 and runs through the backend with the reference lowering: weights and projection inputs are rounded to e4m3,
everything else is exact. Static scales are calibrated on the first windows of the validation split
(fu_compile.calibrate_fp8) and reach the scored graphs as those of a loaded model do, through the manifest.

Prints a table with bars and writes ``benchmarks/results/fp8-accuracy-<date>-<commit>.json``. Exit code 1: a bar was
missed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from overhead import ROOT, commit
from tqdm.auto import tqdm

import fu_compile
from fu_compile import evaluate, formats, models
from fu_compile.weights import STORE

BARS = {"row": 0.40, "static": 0.55, "dynamic": None, "delayed": None}
"""Scaling -> most perplexity that it may add."""
OPTIONS = {"prefill": "fp8", "decode": "exact", "kv_cache": "model", "lowering": "reference", "rest": "eager"}


def score(model: Any, scaling: str, text: torch.Tensor, valid: torch.Tensor) -> dict[str, Any]:
    """NLL of each window, and what was counted."""
    start = time.perf_counter()
    if scaling == "static":
        with models.compiled(model, **OPTIONS, fp8_scaling="static"):
            fu_compile.calibrate_fp8(model, valid)
    with torch.no_grad(), models.compiled(model, **OPTIONS, fp8_scaling=scaling):
        before = counted(model)
        nll = evaluate.score_prefill(model, text)
        after = counted(model)
    return {
        "nll": nll,
        "seconds": time.perf_counter() - start,
        "projection inputs": len(after),
        "calls with a scale of their own": sum(after) - sum(before),
    }


def counted(model: Any) -> list[float]:
    """Saturated calls of every FP8 projection input."""
    return [formats.fp8_counters(s)["saturations"] for s in STORE.fp8_states(model.parameters())]


def main(argv: Sequence[str] | None = None) -> int:
    """Scores, prints, writes; 1 where a bar was missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="folder, hub id or smollm2 (the bars are for this one)")
    parser.add_argument("--length", type=int, default=evaluate.LENGTH, help="tokens per window")
    parser.add_argument("--windows", type=int, nargs="+", default=list(evaluate.GATE_WINDOWS))
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder for the JSON file")
    args = parser.parse_args(argv)
    is_protocol = (args.model, args.length, tuple(args.windows)) == ("smollm2", evaluate.LENGTH, evaluate.GATE_WINDOWS)

    at = commit()
    model, tokenizer = models.load(args.model, torch.float32)
    text, _ = evaluate.cut(evaluate.encode(tokenizer, evaluate.wikitext("test")[0]), args.windows, args.length)
    valid = evaluate._validation(tokenizer, args.length)
    with torch.no_grad():
        eager = evaluate.score_prefill(model, text)
    base = math.exp(statistics.fmean(eager))
    rows = {}
    for scaling in tqdm(BARS, desc="scoring", unit="scaling"):
        row = score(model, scaling, text, valid)
        deltas = [a - b for a, b in zip(row["nll"], eager, strict=True)]
        row["added"] = math.exp(statistics.fmean(row["nll"])) - base
        row["difference"] = statistics.fmean(deltas)
        row["standard_error"] = statistics.stdev(deltas) / math.sqrt(len(deltas)) if len(deltas) > 1 else None
        row["bar"] = BARS[scaling]
        rows[scaling] = row

    from rich.console import Console
    from rich.table import Table

    title = (
        f"FP8 prefill, {args.model}, float32, WikiText-2 raw: windows {', '.join(map(str, args.windows))} of test,"
        f" {args.length} tokens\nuncompiled: perplexity {base:.3f}"
    )
    table = Table(title=title, title_justify="left")
    table.add_column("fp8_scaling")
    for head in ("added perplexity", "bar", "NLL - eager (± s.e.)", "saturated calls", "seconds"):
        table.add_column(head, justify="right")
    for scaling, row in rows.items():
        bar = "" if row["bar"] is None else f"{row['bar']} {'ok' if row['added'] <= row['bar'] else 'MISSED'}"
        spread = "" if row["standard_error"] is None else f" ± {row['standard_error']:.4f}"
        table.add_row(
            scaling, f"{row['added']:+.3f}", bar, f"{row['difference']:+.4f}{spread}",
            f"{row['calls with a scale of their own']:.0f}", f"{row['seconds']:.0f}",
        )  # fmt: skip
    Console(width=120).print(table)
    missed = [s for s, row in rows.items() if row["bar"] is not None and row["added"] > row["bar"]]
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    content = {
        "date": date,
        "commit": at,
        "machine": {
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "model": args.model,
        "windows": args.windows,
        "length": args.length,
        "calibration": {"windows of the validation split": list(range(evaluate.CALIBRATION_WINDOWS))},
        "options": OPTIONS,
        "eager": {"nll": eager, "perplexity": base},
        "scalings": rows,
        "missed": missed if is_protocol else None,
    }
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"fp8-accuracy-{date}-{at}.json"
    path.write_text(json.dumps(content, indent=2) + "\n")
    print(f"wrote {path}")
    return int(is_protocol and bool(missed))


if __name__ == "__main__":
    sys.exit(main())
