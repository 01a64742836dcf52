"""What the decoding loop costs outside of the model: ``fu_compile.generate`` beside transformers' own loop.

    python benchmarks/generate_overhead.py               # all cases, about a minute on one core
    python benchmarks/generate_overhead.py --rounds 3

Both loops call the same compiled tiny model (exact mode) in one process, a call of the one after a call of the other.
The times of the model's calls give two numbers: the time from the end of one model call to the start of the next
(median over all tokens: what a token costs), and the time of a whole ``generate`` call without its model calls, per
token (what preparing the call adds). Prints a table and writes
``benchmarks/results/generate-overhead-<date>-<commit>.json``. Exit code 1: a bar was missed. No GPU is used.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from overhead import ROOT, commit, machine

BAR = 1.0
"""Our microseconds per token over those of transformers, at most."""

EOS = 2
SAMPLING = {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9}
STATIC = {"cache_implementation": "static"}
CASES: dict[str, tuple[int, bool, dict[str, Any]]] = {
    "greedy": (1, False, {"do_sample": False, **STATIC}),
    "greedy, 4 left-padded": (4, True, {"do_sample": False, **STATIC}),
    "greedy, growing cache": (1, False, {"do_sample": False}),
    "sampling": (1, False, {**SAMPLING, **STATIC}),
    "sampling, 4 left-padded, repetition penalty": (4, True, {**SAMPLING, "repetition_penalty": 1.2, **STATIC}),
    "greedy, scores kept": (
        1, False, {"do_sample": False, "output_scores": True, "return_dict_in_generate": True, **STATIC},
    ),
}  # fmt: skip
"""Name -> (batch size, whether rows are padded, arguments of generate)."""


@dataclass
class Row:
    """One case: microseconds per token of both loops."""

    case: str
    ours: float
    theirs: float
    ours_whole: float
    theirs_whole: float
    tokens: int

    @property
    def ratio(self) -> float:
        """Ours over transformers', per token."""
        return self.ours / self.theirs

    @property
    def ok(self) -> bool:
        """Whether the bar is met."""
        return self.ratio <= BAR


def tiny_model() -> Any:
    """A Llama of one layer that takes the times of its calls, compiled in exact mode.

    What is not ours runs in eager: compiling it costs a minute and changes nothing outside of the model. ``spans`` of
    the model: [(start, end)] of its calls in nanoseconds.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    import fu_compile

    class TimedLlama(LlamaForCausalLM):
        spans: ClassVar[list[tuple[int, int]]] = []

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter_ns()
            out = super().__call__(*args, **kwargs)
            self.spans.append((start, time.perf_counter_ns()))
            return out

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=512, max_position_embeddings=512, pad_token_id=0, bos_token_id=1, eos_token_id=EOS,
    )  # fmt: skip
    model = TimedLlama(config).eval().requires_grad_(False)
    # The end token's logit is 0, never among the largest: every call checks for the end and none ends early.
    model.lm_head.weight[EOS] = 0
    return fu_compile.compile(model, mode="exact", rest="eager")


def measure(model: Any, case: str, rounds: int, tokens: int) -> Row:
    """One case: ``rounds`` calls of each loop for ``tokens`` new tokens, alternating, after two warm ones of each."""
    import fu_compile

    batch, padded, more = CASES[case]
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 512, (batch, 16), generator=generator)
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :9] = mask[1, :4] = 0
    given = {**more, "attention_mask": mask, "max_new_tokens": tokens}
    loops: dict[str, dict[str, Any]] = {"theirs": {}, "ours": {"custom_generate": fu_compile.generate}}
    gaps: dict[str, list[int]] = {name: [] for name in loops}
    whole: dict[str, list[float]] = {name: [] for name in loops}
    for i in range(-2, rounds):
        # The order alternates too: what the first leaves in the caches serves the second.
        for name in sorted(loops, reverse=i % 2 == 0):
            spans = model.spans
            spans.clear()
            torch.manual_seed(i)
            start = time.perf_counter_ns()
            model.generate(ids, **given, **loops[name])
            wall = time.perf_counter_ns() - start
            if len(spans) != tokens:
                raise RuntimeError(f"{case}: {len(spans)} model calls instead of {tokens}")
            if i < 0:
                continue
            # The first gap, after the prefill, sets the loop up; it counts in the whole call.
            gaps[name] += [b[0] - a[1] for a, b in itertools.pairwise(spans[1:])]
            whole[name].append((wall - sum(end - begin for begin, end in spans)) / tokens)
    per_token = {name: statistics.median(g) / 1e3 for name, g in gaps.items()}
    calls = {name: statistics.median(w) / 1e3 for name, w in whole.items()}
    return Row(case, per_token["ours"], per_token["theirs"], calls["ours"], calls["theirs"], tokens)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints, writes; 1 where a bar was missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="calls of each loop and case")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens a call")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder for the JSON file")
    args = parser.parse_args(argv)
    from rich.console import Console
    from rich.table import Table
    from tqdm.auto import tqdm

    torch.set_num_threads(1)
    info = machine()
    model = tiny_model()
    rows = [measure(model, case, args.rounds, args.tokens) for case in tqdm(CASES, desc="measuring", unit="case")]
    shown = Table(title=f"host time outside of the model, us per token; bar: ours / transformers <= {BAR}")
    for heading in ("case", "ours", "transformers", "ratio", "whole call: ours", "transformers", "bar"):
        shown.add_column(heading, justify="left" if heading == "case" else "right")
    for r in rows:
        numbers = (r.ours, r.theirs, r.ratio, r.ours_whole, r.theirs_whole)
        shown.add_row(r.case, *(f"{x:.2f}" if x is r.ratio else f"{x:.1f}" for x in numbers), "ok" if r.ok else "MISS")
    Console().print(shown)
    args.out.mkdir(parents=True, exist_ok=True)
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    path = args.out / f"generate-overhead-{date}-{commit()}.json"
    content = {"date": date, "commit": commit(), "machine": info, "threads": 1, "rounds": args.rounds, "bar": BAR}
    content["rows"] = [asdict(r) | {"ratio": r.ratio, "ok": r.ok} for r in rows]
    path.write_text(json.dumps(content, indent=2) + "\n")
    print(f"wrote {path}")
    return int(not all(r.ok for r in rows))


if __name__ == "__main__":
    sys.exit(main())
