"""What INT4 weights cost in perplexity, by method, group size and grid, and how long GPTQ takes.

    python benchmarks/quantize_accuracy.py                     # SmolLM2-135M-Instruct, about half an hour on two cores
    python benchmarks/quantize_accuracy.py --samples 2 --length 512 --windows 14 56       # a quick look, no bars

Protocol of docs/numerics.md: WikiText-2 raw; calibration on its validation split, perplexity on its test split, windows
of 2048 tokens. All seven linears of every decoder layer are quantised; embedding and head stay float32. The weights
that the codes stand for replace the model's own (exact fake quantisation), so no kernel takes part.

All variants share one pass of the calibration text through the float model; its time counts for each GPTQ variant.
Times are wall and CPU seconds of this process: where other work shares the cores, the wall is the longer.

At the end the codes of GPTQ in groups of 64 are packed (fu_compile.quantize.pack), and the packed model is scored on
the same windows: in eager, and compiled (reference lowering, ``linear_int4``). Both must agree with the float32
simulation of the same codes within 0.001 perplexity. ``--save FOLDER`` keeps the packed model.

Prints a table with bars and writes ``benchmarks/results/quantize-accuracy-<date>-<commit>.json``. Exit code 1: a bar
was missed.
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
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from overhead import ROOT, commit
from tqdm.auto import tqdm

import fu_compile
from fu_compile import backend, evaluate, models
from fu_compile.calibration import LENGTH, SAMPLES, Walk, as_rows, token_batches
from fu_compile.formats import dequantize_int4
from fu_compile.gptq import Choice, Solver, block_linears, observe, quantize_block
from fu_compile.quantize import pack

MINUTES = 15.0
"""Bar of GPTQ over all layers, calibration pass included, on two cores."""
SAME_CODES = 0.001
"""Bar of a packed model's perplexity against the simulation of its codes."""
PACKED = Choice("gptq", 64, "asym")
"""The variant that is packed."""


@dataclass
class Variant:
    """One way to make codes, and what came out."""

    name: str
    choice: Choice
    calibrated: bool
    bar: float | None = None
    """Most perplexity that it may add."""
    solver: Solver = field(default_factory=Solver)
    nll: list[float] = field(default_factory=list)
    difference: float = 0.0
    standard_error: float | None = None
    perplexity: float = 0.0
    added: float = 0.0
    seconds: float = 0.0
    """Of quantising, without the calibration pass: wall."""
    cpu_seconds: float = 0.0
    error: float = 0.0
    """Mean over all linears of the relative output error that was minimised."""


def variants() -> list[Variant]:
    """In the order of the table."""
    return [
        Variant("RTN", Choice("rtn", 128, "sym8"), False, 5.2),
        Variant("RTN, calibrated ranges", Choice("rtn", 128, "asym"), True, 4.2),
        Variant("GPTQ", Choice("gptq", 128, "asym"), True, 1.3),
        Variant("GPTQ", Choice("gptq", 64, "asym"), True, 1.0),
        Variant("GPTQ", Choice("gptq", 64, "sym8"), True),
    ]


def clock() -> torch.Tensor:
    """Wall and CPU seconds."""
    return torch.tensor([time.perf_counter(), time.process_time()], dtype=torch.float64)


def quantise(model: Any, rows: list[torch.Tensor], found: list[Variant]) -> tuple[list[dict[str, Any]], list[float]]:
    """Codes of every variant by full name, and the wall and CPU seconds of the calibration pass."""
    codes: list[dict[str, Any]] = [{} for _ in found]
    errors: list[list[float]] = [[] for _ in found]
    blocks = block_linears(model)
    start = clock()
    walk = Walk(model, rows)
    passing = clock() - start
    for index, (block, linears) in enumerate(tqdm(blocks.items(), desc="quantising", unit="block")):
        start = clock()
        parts, _ = observe(model, walk, index, block, linears, full=True)
        passing += clock() - start
        for i, v in enumerate(found):
            start = clock()
            choices = dict.fromkeys(linears, v.choice)
            done = quantize_block(block, linears, choices, parts if v.calibrated else {}, v.solver)
            wall, cpu = (clock() - start).tolist()
            v.seconds, v.cpu_seconds = v.seconds + wall, v.cpu_seconds + cpu
            codes[i] |= done.layers
            errors[i] += done.errors.values()
    for v, e in zip(found, errors, strict=True):
        v.error = statistics.fmean(e)
    return codes, passing.tolist()


def packed(model: Any, batch: torch.Tensor, codes: dict[str, Any], folder: Path | None) -> dict[str, list[float]]:
    """NLL of each window of the packed model, eager and compiled; the model stays packed, and is saved if asked for."""
    assert backend.futransformer  # imported with this program, not after half an hour
    pack(model, codes)
    found = {"packed, eager": evaluate.score_prefill(model, batch)}
    with models.compiled(model, lowering="reference", kv_cache="model"):
        found["packed, compiled"] = evaluate.score_prefill(model, batch)
    if folder is not None:
        fu_compile.save(model, folder)
    return found


def score(model: Any, batch: torch.Tensor, codes: dict[str, Any]) -> list[float]:
    """NLL of each window with these codes' weights in the model, which is then as it was."""
    before = {n: model.get_submodule(n).weight.detach().clone() for n in codes}
    with torch.no_grad():
        try:
            for name, q in codes.items():
                model.get_submodule(name).weight.copy_(dequantize_int4(q))
            return evaluate.score_prefill(model, batch)
        finally:
            for name, weight in before.items():
                model.get_submodule(name).weight.copy_(weight)


def table(found: list[Variant], eager: float, passing: list[float], title: str) -> Any:
    """A ``rich`` table."""
    from rich.table import Table

    out = Table(title=title, title_justify="left")
    out.add_column("method")
    out.add_column("grid")
    for head in ("group", "added perplexity", "bar", "NLL - eager (± s.e.)", "seconds", "CPU s"):
        out.add_column(head, justify="right")
    out.add_row("float32", "", "", f"({eager:.3f})", "", "", "", "")
    for v in found:
        spread = "" if v.standard_error is None else f" ± {v.standard_error:.4f}"
        wall, cpu = (a + b * v.calibrated for a, b in zip((v.seconds, v.cpu_seconds), passing, strict=True))
        bar = "" if v.bar is None else f"{v.bar} {'ok' if v.added <= v.bar else 'MISSED'}"
        out.add_row(
            v.name,
            v.choice.grid,
            str(v.choice.group_size),
            f"{v.added:+.2f}",
            bar,
            f"{v.difference:+.4f}{spread}",
            f"{wall:.0f}",
            f"{cpu:.0f}",
        )
    return out


def main(argv: Sequence[str] | None = None) -> int:
    """Quantises, scores, prints, writes; 1 where a bar was missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="folder, hub id or smollm2 (the bars are for this one)")
    parser.add_argument("--samples", type=int, default=SAMPLES, help="calibration sequences")
    parser.add_argument("--length", type=int, default=LENGTH, help="tokens per sequence and per window")
    parser.add_argument("--windows", type=int, nargs="+", default=list(evaluate.GATE_WINDOWS))
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="keep the packed model with groups of 64")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder for the JSON file")
    args = parser.parse_args(argv)
    protocol = (args.model, args.samples, args.length, tuple(args.windows))
    is_protocol = protocol == ("smollm2", SAMPLES, LENGTH, evaluate.GATE_WINDOWS)

    at = commit()
    model, tokenizer = models.load(args.model, torch.float32)
    text, _ = evaluate.cut(evaluate.encode(tokenizer, evaluate.wikitext("test")[0]), args.windows, args.length)
    rows = as_rows(
        token_batches([evaluate.wikitext("valid")[0]], tokenizer, samples=args.samples, length=args.length),
        model.config.vocab_size,
    )
    found = variants()
    load = os.getloadavg()[0]
    codes, passing = quantise(model, rows, found)
    eager: list[float] = []
    for v, chosen in tqdm([(None, {}), *zip(found, codes, strict=True)], desc="scoring", unit="variant"):
        nll = score(model, text, chosen)
        if v is None:
            eager = nll
            base = math.exp(statistics.fmean(eager))
            continue
        v.nll = nll
        deltas = [a - b for a, b in zip(nll, eager, strict=True)]
        v.difference = statistics.fmean(deltas)
        v.standard_error = statistics.stdev(deltas) / math.sqrt(len(deltas)) if len(deltas) > 1 else None
        v.perplexity = math.exp(statistics.fmean(nll))
        v.added = v.perplexity - base

    simulated = next(v for v in found if v.choice == PACKED)
    same = {}
    for name, nll in packed(model, text, codes[found.index(simulated)], args.save).items():
        same[name] = {"nll": nll, "against the simulation": math.exp(statistics.fmean(nll)) - simulated.perplexity}

    from rich.console import Console

    title = (
        f"INT4 weights, {args.model}, float32, WikiText-2 raw: windows {', '.join(map(str, args.windows))} of test,"
        f" calibrated on {args.samples} x {args.length} tokens of valid\n"
        f"calibration pass {passing[0]:.0f} s, {passing[1]:.0f} s of CPU (in those of every calibrated variant),"
        f" {torch.get_num_threads()} threads"
    )
    Console(width=130).print(table(found, base, passing, title))
    for name, row in same.items():
        print(f"{name}, {simulated.name} {PACKED.group_size}: perplexity {row['against the simulation']:+.2e}")
    slowest = max((v.seconds + passing[0]) / 60 for v in found if v.choice.method == "gptq")
    missed = [v.name for v in found if v.bar is not None and v.added > v.bar]
    missed += [f"GPTQ took {slowest:.1f} minutes"] if slowest > MINUTES else []
    missed += [n for n, row in same.items() if abs(row["against the simulation"]) > SAME_CODES]
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    content = {
        "date": date,
        "commit": at,
        "machine": {
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "load average, start and end": [load, os.getloadavg()[0]],
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "model": args.model,
        "windows": args.windows,
        "length": args.length,
        "samples": args.samples,
        "eager": {"nll": eager, "perplexity": base},
        "calibration pass, seconds, wall and CPU": passing,
        "GPTQ, slowest, minutes": slowest,
        "variants": [asdict(v) for v in found],
        "same codes": same,
        "missed": missed if is_protocol else None,
    }
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"quantize-accuracy-{date}-{at}.json"
    path.write_text(json.dumps(content, indent=2) + "\n")
    print(f"wrote {path}")
    if is_protocol and missed:
        print(f"missed: {', '.join(missed)}")
    return int(is_protocol and bool(missed))


if __name__ == "__main__":
    sys.exit(main())
