"""What the INT4 cache costs in perplexity: every format, with and without calibration, on SmolLM2's real weights.

    python benchmarks/cache_accuracy.py                        # all rows; under an hour on two idle cores
    python benchmarks/cache_accuracy.py --only plain packed    # some groups; rows of the same commit are kept
    python benchmarks/cache_accuracy.py --only channel --merge OLD.json   # the others from an earlier run
    python benchmarks/cache_accuracy.py --packed DIR           # weights that fu_compile.save left there, not GPTQ now

Protocol: WikiText-2 raw (test), windows of 2,048 tokens (fu_compile/evaluate.py). Everything goes through an Int4Cache
in eager, float32. With an exact unfinished page a window is read in calls of 64 tokens, one page: each token sees what
it would see decoded on its own. The row without an exact page decodes token by token. Values are rotated
(fu_compile.rotate_values), keys calibrated on windows of the validation split.

The biased model is SmolLM2 with a bias added to every k_proj, as Qwen2-like models have them (see BIAS). Its own
uncompiled run is the baseline of its rows.

Prints a table and writes ``benchmarks/results/cache-accuracy-<date>-<commit>.json`` (with other windows than the gate's
their numbers behind). Exit code 1: a bar was missed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from fu_compile.lowerings.pages import keeping_decoded
from overhead import ROOT, commit, machine
from torch import Tensor, nn

import fu_compile
from fu_compile import evaluate, formats, keys, models

BARS = {
    # row: (unit, at most)
    "every": ("ppl", 0.45),
    "page": ("ppl", 0.25),
    "packed page": ("ppl", 1.25),
    "biased page": ("%", 4.0),
    "biased channel": ("%", 0.5),
}
BIAS = {"boundary": (300.0, 150.0), "inner": (20.0, 10.0), "rest": 0.3}
"""Added to k_proj: in each key head two slowly turning channels (of the slowest and the second slowest RoPE pair) get a
constant of random sign, larger in the first and the last layer; all others get normal noise of size ``rest``. Reported
of Qwen2.5-7B (huggingface/transformers#35185): norms of 600 to 900 at the boundary layers, a median of 22; here 581 and
39."""
GROUPS = ("plain", "packed", "channel", "biased", "every", "encode")
"""What --only takes: tables on SmolLM2, INT4 weights beside, keys per channel (of both models), tables on the biased
model, no exact page, and the time that encoding keys takes."""
RANDOM = (4, 512)
"""Sequences and length of the random token ids that stand in for calibration text."""


def biased(model: Any) -> None:
    """Gives every k_proj of the model its bias, always the same one."""
    generator = torch.Generator().manual_seed(0)
    _, heads, dim = models.heads_of(model.config)
    layers = model.model.layers
    for i, layer in enumerate(layers):
        bias = torch.randn(heads, dim, generator=generator) * BIAS["rest"]
        large = BIAS["boundary" if i in (0, len(layers) - 1) else "inner"]
        sign = torch.where(torch.rand(heads, 2, generator=generator) < 0.5, -1.0, 1.0)
        bias[:, dim - 1], bias[:, dim // 2 - 2] = large[0] * sign[:, 0], large[1] * sign[:, 1]
        layer.self_attn.k_proj.bias = nn.Parameter(bias.flatten(), requires_grad=False)


class Bench:
    """The rows, and what they are measured on."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.rows: list[dict[str, Any]] = []
        self.notes: dict[str, Any] = {}
        self.commit = commit()  # of what was imported: others may commit before the last row is done
        _, tokenizer = models.smollm2()
        self.tokenizer = tokenizer
        text = evaluate.encode(tokenizer, evaluate.wikitext("test")[0])
        self.batch, self.windows = evaluate.cut(text, args.windows, args.length)
        valid = evaluate.encode(tokenizer, evaluate.wikitext("valid")[0])
        self.valid = [w[None] for w in evaluate.cut(valid, range(evaluate.CALIBRATION_WINDOWS), args.length)[0]]
        others = "".join(f"-{w}" for w in args.windows) if tuple(args.windows) != tuple(evaluate.GATE_WINDOWS) else ""
        name = f"cache-accuracy-{datetime.date.today()}-{self.commit}{others}.json"
        self.file = ROOT / "benchmarks/results" / name
        if not args.quick:
            self._merge()

    def run(self) -> None:
        """The groups that were asked for."""
        only = self.args.only
        plain = models.smollm2()[0]
        if set(only) != {"biased"} and not self._base(""):
            self._eager("eager", plain)
        if "packed" in only:
            self._packed()
        fu_compile.rotate_values(plain)
        if "plain" in only:
            self._model("", plain)
        if "channel" in only:
            self._channel("", plain)
        if {"biased", "channel"} & set(only):
            model, _ = models.smollm2()
            biased(model)
            if not self._base("biased "):
                self._eager("biased eager", model)
            fu_compile.rotate_values(model)
            if "channel" in only:
                self._channel("biased ", model)
            if "biased" in only:
                self._model("biased ", model)
        if "every" in only:
            tables = self._calibrated(plain, self.valid)
            self._cache("every", plain, "every cached token in INT4, calibrated", tables=tables, exact_page=False)
        if "encode" in only:
            self._encode()

    def _encode(self) -> None:
        """CPU time of encoding the keys of one layer, in µs per token: one thread, the best of some runs, one sequence.

        Twice per format: one page, as decoding fills it, and 32, as a prefill of 2,048 tokens does.
        """
        found: dict[str, dict[str, float]] = {}
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        for heads, dim in ((3, 64), (8, 128)):
            mean, reads = torch.zeros(heads, dim), torch.randn(heads, dim)
            ways: dict[str, Callable[[Tensor], Any]] = {
                "int4": lambda k, m=mean, r=reads: formats.encode_keys(k, m, torch.ones_like(r)),
                "int4-channel, nearest codes": lambda k, m=mean: formats.encode_key_pages(k, m, 1),
                "int4-channel": lambda k, m=mean, r=reads: formats.encode_key_pages(k, m, 1, r),
            }
            for pages in (1, 32):
                k = torch.randn(1, heads, pages * formats.PAGE, dim)
                for name, way in ways.items():
                    times = []
                    for _ in range(10):
                        start = time.process_time()
                        way(k)
                        times.append(time.process_time() - start)
                    of = found.setdefault(f"{heads} heads of {dim}, {k.shape[2]} tokens", {})
                    of[name] = round(1e6 * min(times) / k.shape[2], 1)
        torch.set_num_threads(threads)
        self.notes["encoding keys, CPU us per token and layer"] = found
        self._say(json.dumps(found, indent=1))
        self.save()

    def _model(self, name: str, model: Any) -> None:
        """Rows of one float model whose values are rotated: formats and sources of the key tables, exact page."""
        config = model.config
        heads, dim = models.heads_of(config)[1:]
        self._cache(name + "page, no tables", model, "no key tables")
        tables = keys.tables_of(model, heads, dim)
        self._cache(name + "page, uncalibrated", model, "tables from weights and single tokens", tables=tables)
        ids = torch.randint(config.vocab_size, RANDOM, generator=torch.Generator().manual_seed(1))
        tables = self._calibrated(model, [ids])
        self._cache(
            name + "page, random ids", model, f"calibrated on {RANDOM[0]} x {RANDOM[1]} random ids", tables=tables
        )
        tables = self._calibrated(model, self.valid)
        self.notes[name + "tables"] = str(tables)
        self.notes[name + "attention errors"] = [round(e, 4) for e in tables.errors]
        self._cache(name + "page", model, "calibrated on text", tables=tables)

    def _channel(self, name: str, model: Any) -> None:
        """Keys per channel, with the means and directions that the model gives without calibration."""
        tables = keys.tables_of(model, *models.heads_of(model.config)[1:], formats.CHANNEL)
        self._cache(name + "channel", model, "keys per channel and page", kv_cache=formats.CHANNEL, tables=tables)

    def _calibrated(self, model: Any, batches: list[Tensor]) -> keys.KeyTables:
        start = time.perf_counter()
        tables = keys.calibrate_keys(model, batches)
        self._say(f"{tables} ({time.perf_counter() - start:.0f} s)")
        return tables

    def _packed(self) -> None:
        """INT4 weights (GPTQ, groups of 64) and INT4 cache together."""
        if self.args.packed:
            model = fu_compile.load(self.args.packed)
            model = model[0] if isinstance(model, tuple) else model
        else:
            model = fu_compile.quantize(models.smollm2()[0], "gptq", group_size=64, tokenizer=self.tokenizer)
        self._score(
            "packed", model, "GPTQ g64, float cache", lambda bar: evaluate.score_prefill(model, self.batch, bar)
        )
        tables = self._calibrated(model, self.valid)
        self._cache("packed page", model, "GPTQ g64 and INT4 cache, calibrated on text", tables=tables)

    def _eager(self, name: str, model: Any) -> None:
        self._score(name, model, "uncompiled", lambda bar: evaluate.score_prefill(model, self.batch, bar))

    def _cache(self, name: str, model: Any, how: str, **more: Any) -> None:
        rows, length = self.batch.shape
        cache = fu_compile.Int4Cache(model.config, length, rows, dtype=torch.float32, **more)
        step = formats.PAGE if more.get("exact_page", True) else 1
        self._score(name, model, how, lambda bar: evaluate.score_decode(model, self.batch, bar, cache, step))

    def _score(self, name: str, model: Any, how: str, score: Callable[[Any], list[float]]) -> None:
        start, rows = time.perf_counter(), self.batch.shape[0]
        with self._bar(name, rows * (self.batch.shape[1] - 1)) as bar, models.uncompiled(model), keeping_decoded():
            nll = score(bar.update)
        row: dict[str, Any] = {"row": name, "how": how, "nll": nll, "perplexity": math.exp(statistics.fmean(nll))}
        row["commit"] = self.commit
        row["seconds"] = round(time.perf_counter() - start, 1)
        base = self._base("biased " * name.startswith("biased"))
        if base is not None:
            change = [a - b for a, b in zip(nll, base["nll"], strict=True)]
            row["added"] = row["perplexity"] - base["perplexity"]
            row["percent"] = 100 * row["added"] / base["perplexity"]
            row["difference"] = statistics.fmean(change)
            row["standard_error"] = statistics.stdev(change) / math.sqrt(rows) if rows > 1 else None
        if name in BARS:
            unit, most = BARS[name]
            row["bar"], row["ok"] = f"<= {most} {unit}", row["added" if unit == "ppl" else "percent"] <= most
        self.rows = [r for r in self.rows if r["row"] != name] + [row]  # one of an earlier run was merged in
        self._say(self.line(row))
        self.save()

    def _base(self, prefix: str) -> dict[str, Any] | None:
        return next((r for r in self.rows if r["row"] == prefix + "eager"), None)

    def _merge(self) -> None:
        """Takes in the rows that this run has not: of another run of the same day and commit, and of ``--merge``."""
        for file in filter(None, (self.file if self.file.exists() else None, self.args.merge)):
            there = json.loads(file.read_text())
            mine = {r["row"] for r in self.rows}
            self.rows = [r for r in there["rows"] if r["row"] not in mine] + self.rows
            self.notes = {**there["notes"], **self.notes}

    @staticmethod
    def line(row: dict[str, Any]) -> str:
        """One row of the table."""
        added = f"{row['added']:+8.3f} {row['percent']:+6.2f} %" if "added" in row else " " * 17
        bar = f"  {row['bar']}: {'ok' if row['ok'] else 'MISSED'}" if "bar" in row else ""
        return f"{row['row']:26s} {row['perplexity']:9.3f} {added} {row['seconds']:7.1f} s  {row['how']}{bar}"

    @contextmanager
    def _bar(self, name: str, total: int) -> Iterator[Any]:
        from tqdm.auto import tqdm

        with torch.no_grad(), tqdm(total=total, desc=name, unit="tok", smoothing=0.05, leave=False) as bar:
            yield bar

    def _say(self, text: str) -> None:
        from tqdm.auto import tqdm

        tqdm.write(text, file=sys.stdout)
        sys.stdout.flush()

    def save(self) -> None:
        """Writes what there is: a run that is broken off leaves its rows."""
        if self.args.quick:
            return
        self._merge()
        facts = {
            "benchmark": "cache_accuracy", "date": str(datetime.date.today()), "commit": self.commit,
            "machine": machine(), "dtype": "float32", "length": self.args.length, "windows": list(self.windows),
            "calibration": f"{len(self.valid)} windows of the validation split", "bias": BIAS,
            "random_ids": list(RANDOM), "notes": self.notes, "rows": self.rows,
        }  # fmt: skip
        self.file.parent.mkdir(exist_ok=True)
        self.file.write_text(json.dumps(facts, indent=1) + "\n")


def main() -> int:
    """Runs the rows; 1 where a bar was missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--windows", type=int, nargs="+", default=evaluate.GATE_WINDOWS)
    parser.add_argument("--length", type=int, default=evaluate.LENGTH)
    parser.add_argument("--packed", type=Path, help="a folder of fu_compile.save (GPTQ, groups of 64)")
    parser.add_argument("--only", nargs="+", default=GROUPS, choices=GROUPS)
    parser.add_argument("--merge", type=Path, help="an earlier result: rows that are not measured now come from it")
    parser.add_argument("--quick", action="store_true", help="two windows of 256 tokens, nothing is written")
    args = parser.parse_args()
    if args.quick:
        args.windows, args.length = (14, 56), 256
    bench = Bench(args)
    bench.run()
    missed = [r["row"] for r in bench.rows if r.get("ok") is False]
    print(f"missed: {', '.join(missed)}" if missed else "all bars met", "" if args.quick else f"-> {bench.file}")
    return int(bool(missed) and not args.quick)


if __name__ == "__main__":
    sys.exit(main())
