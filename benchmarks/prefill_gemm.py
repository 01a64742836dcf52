"""The GEMMs of prefill with their epilogues: error, TFLOP/s and ratios to the peers, on one Hopper GPU.

    python benchmarks/prefill_gemm.py                              # 8B: four GEMMs and gate_up + SwiGLU, FP8 and BF16
    python benchmarks/prefill_gemm.py --tokens 2048 --seconds 0.1  # a quick look
    python benchmarks/prefill_gemm.py --check                      # small odd shapes and every epilogue, no timing
    python benchmarks/prefill_gemm.py --tune                       # every configuration, beside each other
    python benchmarks/prefill_gemm.py --depth                      # FP8 accumulation error over K

Cases run interleaved (A B C C B A), each for at least ``--seconds`` in all; TFLOP/s: 2 M N K over the median over
rounds, in CUDA graphs. What is timed of ours is one launch with everything that the tuple names (two with e4m3 output).
Peers: cuBLASLt through torch.matmul and torch._scaled_mm (per tensor, per row), torch.compile of the product with
SwiGLU, and, in BF16 where it is installed, quack's gated GEMM, which CODA builds on; they get the same operands.

The card is limited by its power, and what toggles in it depends on the data: activations are N(0, 1), weights N(0, 1/K)
times a factor from 0.5 to 1.5 for each row; as BF16, or as e4m3 codes. Activations have one scale, 2^-6 (the delayed
rule picks 2^-5 for such values: the same codes, exponents one lower), weights one for each row (largest code 448).

error: largest |y - y64| in bfloat16 roundings (2^-8 |y64|, at least 2^-8 of an eighth of the row's rms), y64 in
float64 from the same operands; for e4m3 outputs in units of half their spacing (2^-4 |y64|, at least the same of an
eighth of the row's rms). Writes benchmarks/results/prefill_gemm-<date>-<commit>.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

from decode_linears import Card, roundings
from fu_compile.lowerings import gemm_sm90 as gemm
from overhead import ROOT, commit, machine

from fu_compile import formats, jit

Config = gemm.Config
FP8, BF16, F16 = torch.float8_e4m3fn, torch.bfloat16, torch.float16


@dataclasses.dataclass(frozen=True)
class Gemm:
    """One product and what follows it."""

    name: str
    n: int
    k: int
    epilogue: str = ""
    row: bool = False
    """the finished row is multiplied by rstd"""
    squares: bool = False
    out8: bool = False

    def columns(self) -> int:
        """Of the output."""
        return self.n // 2 if "swiglu" in self.epilogue else self.n


def gemms(model: str, fp8: bool) -> list[Gemm]:
    """The four of a decoder layer, with everything that stands in their epilogues."""
    hidden, qkv, o, inner = {"8b": (4096, 6144, 4096, 14336), "70b": (8192, 10240, 8192, 28672)}[model]
    return [
        Gemm("qkv", qkv, hidden, "", row=not fp8),
        Gemm("o", hidden, o, "residual", squares=not fp8),
        Gemm("gate_up", 2 * inner, hidden, "swiglu", row=not fp8, out8=fp8),
        Gemm("down", hidden, inner, "residual", squares=not fp8),
    ]


class Operands:
    """Random operands of one product, and its outputs, poisoned."""

    def __init__(self, g: Gemm, m: int, dtype: torch.dtype, out: torch.dtype = BF16, device: str = "cuda") -> None:
        self.gemm, self.m, self.dtype = g, m, dtype
        x = torch.randn(m, g.k, device=device)
        w = torch.randn(g.n, g.k, device=device) * (torch.rand(g.n, 1, device=device) + 0.5) / g.k**0.5
        self.step = self.channel = None
        if dtype == FP8:
            self.step = torch.tensor(2.0**-6, device=device)
            self.x = (x / self.step).to(FP8)
            self.weight, self.channel = formats.quantize_fp8(w)
        else:
            self.x, self.weight, out = x.to(dtype), w.to(dtype), dtype
        self.rstd = torch.rand(m, device=device) + 0.5 if g.row else None
        self.bias = torch.randn(g.n, device=device).to(out) if "bias" in g.epilogue else None
        self.residual = torch.randn(m, g.columns(), device=device).to(out) if "residual" in g.epilogue else None
        self.y = torch.full((m, g.columns()), float("nan"), device=device, dtype=FP8 if g.out8 else out)
        self.act = formats.fp8_state(device)
        self.out_step = torch.full((), float("nan"), device=device)
        self.squares: Tensor | None = None
        self.sums: dict[int, Tensor] = {}  # by width of a tile: graphs keep their addresses

    def run(self, config: Config) -> Tensor:
        """Ours."""
        g = self.gemm
        if g.squares:
            tiles = -(-g.n // config.tile_n)
            if tiles not in self.sums:
                self.sums[tiles] = torch.full((self.m, tiles), float("nan"), device=self.y.device)
            self.squares = self.sums[tiles]
        return gemm.gemm(
            self.x, self.weight, self.y, config, g.epilogue, step=self.step, channel=self.channel, rstd=self.rstd,
            bias=self.bias, residual=self.residual, scale=0.5, squares=self.squares, act=self.act,
            out_step=self.out_step,
        )  # fmt: skip

    def exact(self, first: int = 0, last: int | None = None) -> Tensor:
        """float64, rows first .. last-1."""
        rows = slice(first, last)
        y = self.x[rows].double() @ self.weight.double().T
        if self.step is not None and self.channel is not None:
            y = y * (self.step.double() * self.channel.double())
        if self.rstd is not None:
            y = y * self.rstd[rows, None].double()
        if self.bias is not None:
            y = y + self.bias.double()
        if "swiglu" in self.gemm.epilogue:
            gate, up = y.chunk(2, -1)
            y = torch.nn.functional.silu(gate) * up
        return y if self.residual is None else self.residual[rows].double() + 0.5 * y

    def error(self, first: int = 0, last: int | None = None) -> float:
        """Of the last run, in roundings of the output."""
        y64 = self.exact(first, last)
        if not self.gemm.out8:
            return roundings(self.y[first:last], y64)
        return roundings(self.y[first:last].double() * self.out_step.double(), y64) / 16

    def squares_error(self) -> float:
        """Largest relative error of the sums of squares of a row."""
        if self.squares is None:
            return 0.0
        want = self.y.double().square().sum(-1)
        return float(((self.squares.double().sum(-1) - want).abs() / want).max())


# ---- correctness -----------------------------------------------------------------------------------------------------

SMALL = (
    Gemm("plain", 512, 384),
    Gemm("ragged", 328, 208),
    Gemm("narrow", 64, 4096),
    Gemm("bias", 392, 256, "bias", row=True),
    Gemm("residual", 328, 512, "residual", squares=True),
    Gemm("all", 512, 272, "bias|residual", row=True, squares=True),
    Gemm("swiglu", 512, 384, "swiglu"),
    Gemm("swiglu, ragged", 464, 208, "bias|swiglu", row=True),
    Gemm("out8", 336, 384, out8=True),
    Gemm("swiglu, out8", 512, 384, "swiglu", out8=True),
    Gemm("swiglu, ragged, out8", 352, 208, "bias|swiglu", out8=True),
)
"""Odd shapes that between them have every epilogue."""
LONG = (
    Gemm("many tiles", 6144, 512, "residual", squares=True),
    Gemm("many tiles, out8", 6112, 256, "swiglu", out8=True),
)
"""At 2,300 tokens a block has several tiles one after the other."""
TOKENS = (1, 17, 127, 129, 300, 700)
CONFIGS = tuple(
    dict.fromkeys(
        [
            gemm.PAIR,
            *(entry[0] for entry in gemm.SMALL + gemm.PROMOTED),
            gemm.TOGETHER,
            gemm.TURNS,
            Config(128, 192, 1, True),
            Config(128, 128, 2, True),
            Config(64, 256, 2, True),
            Config(256, 128, 2, False),
            Config(256, 192, 2, False),
        ]
    )
)
"""Every way of cutting that the kernel has, beside those that are chosen."""
TOLERANCE = 2.0
"""Roundings: one is the store, the other float32 summation and the hardware's exp."""


def limit(g: Gemm, config: Config, dtype: torch.dtype) -> float:
    """Roundings that a case may be off.

    The tensor core sums e4m3 products with about 14 bits. ``--depth`` measures 1.3e-3 of the row's rms at K = 4096,
    growing as K^0.65; the largest of the 12 million outputs of an 8B qkv was eleven times that. Up to 18 times pass (in
    units of a rounding of an eighth of the rms); products of 32 columns that are lost would be 68 times that.
    SwiGLU: where the gate crosses zero (slope 1/2), up multiplies its error, at four times up's rms by 2, and the row's
    rms is 0.6 of gate's and up's: 3.5 times as many roundings.
    """
    if dtype != FP8:
        return TOLERANCE
    # Promotion adds up in float32, but the 128 products of one step are summed by the tensor core.
    sums = 2.0 if config.promote else 48.0 * (g.k / 4096) ** 0.65
    return TOLERANCE + sums * (3.5 if "swiglu" in g.epilogue else 1.0)


def fits(g: Gemm, c: Config, dtype: torch.dtype) -> bool:
    """Whether a block has the memory for a ring of three stages, and the dtype the option."""
    how = "swiglu" in g.epilogue, g.out8
    return gemm.smem(c, *how) <= gemm.SMEM_MAX and gemm.stages(c, *how) >= 3 and (not c.promote or dtype == FP8)


def small_cases() -> list[tuple[Gemm, Config, torch.dtype]]:
    """What a check runs: everything in the first configuration, what is ragged or long in every other."""
    ragged = [g for g in SMALL if "ragged" in g.name]
    return [
        (g, c, d)
        for c in CONFIGS
        for g in (*(SMALL if c == CONFIGS[0] else ragged), *LONG)
        for d in (BF16, FP8)
        if fits(g, c, d)
    ]


def kernels(cases: Sequence[tuple[Gemm, Config, torch.dtype]]) -> list[jit.Kernel]:
    return [
        gemm.kernel(
            g.n, g.k, c, dtype, g.epilogue, row=g.row, squares=g.squares, half=dtype == F16, out8=g.out8, sms=132
        )
        for g, c, dtype in cases
    ]


def check_one(g: Gemm, m: int, config: Config, dtype: torch.dtype) -> tuple[float, float]:
    """(error in roundings, error of the sums of squares) on fresh operands."""
    o = Operands(g, m, dtype)
    o.run(config)
    return o.error(), o.squares_error()


def check(args: argparse.Namespace) -> None:
    """Small shapes, all configurations; prints what is wrong and a line per configuration.

    ``--quick``: what is chosen for many tokens and the promoted tile, 300 tokens, for compute-sanitizer.
    """
    cases = small_cases()
    if args.quick:
        few = (gemm.PAIR, gemm.TOGETHER, gemm.TURNS, gemm.PROMOTED[0][0])
        cases = [(g, c, d) for g, c, d in cases if c in few and g not in LONG]
    jit.warmup(kernels(cases), progress=False)
    print(f"{len(cases)} kernels", flush=True)
    worst: dict[Any, float] = {}
    for g, c, d in cases:
        for m in (300,) if args.quick else (2300,) if g in LONG else TOKENS:
            error, squares = check_one(g, m, c, d)
            if not (error <= limit(g, c, d) and squares < 1e-5):
                print(f"WRONG {c} {g.name} {d} tokens {m}: {error:.3g} roundings, squares {squares:.2e}", flush=True)
            worst[(c, d)] = max(worst.get((c, d), 0.0), error if error == error else float("inf"))
    for (c, d), e in worst.items():
        print(f"{tuple(c)} {d}: {e:.2f} roundings")


# ---- timing ----------------------------------------------------------------------------------------------------------


def captured(run: Callable[[], Any], times: int) -> torch.cuda.CUDAGraph:
    """``times`` calls as one CUDA graph: nothing of the host is in the times."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            run()
    return graph


def interleaved(
    cases: dict[str, Callable[[], Any]], seconds: float, rounds: int, card: Card | None = None, inner: int = 1
) -> dict[str, dict[str, Any]]:
    """Name -> ms (median over rounds), and the card half-way; each case is timed for ``seconds`` in all.

    Before each part a case runs for a third of it untimed: the card's clock follows its power with a delay, and would
    be the case's before. Every other round goes backwards. ``inner``: how many of what is timed one call does.
    """
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    count: dict[str, int] = {}
    for name, run in cases.items():
        run()
        torch.cuda.synchronize()
        start.record()
        for _ in range(2):
            run()
        end.record()
        end.synchronize()
        count[name] = max(1, int(seconds / rounds * 2e3 / start.elapsed_time(end)))
    found: dict[str, list[float]] = {name: [] for name in cases}
    seen: dict[str, str] = {}
    for i in range(rounds):
        for name, run in list(cases.items())[:: -1 if i % 2 else 1]:
            for _ in range(max(1, count[name] // 3)):
                run()
            start.record()
            for _ in range(count[name]):
                run()
            end.record()
            if card is not None and card.nvml is not None:
                start.synchronize()
                time.sleep(0.5 * seconds / rounds)
                seen[name] = card.text([card.now()])
            end.synchronize()
            found[name].append(start.elapsed_time(end) / count[name] / inner)
    return {n: {"ms": statistics.median(t), "card": seen.get(n, "")} for n, t in found.items()}


INNER = 8
"""Calls in one CUDA graph."""


def graphs(cases: dict[str, Callable[[], Any]]) -> dict[str, Callable[[], Any]]:
    """The cases as graphs of INNER calls."""
    return {name: captured(run, INNER).replay for name, run in cases.items()}


def quack(o: Operands) -> dict[str, Callable[[], Any]]:
    """Its BF16 product with SwiGLU in two cuts; it takes gate and up rows of W in turns. (Its FP8 has no fast sums.)"""
    from quack.gemm_config import GemmConfig
    from quack.gemm_interface import gemm_act

    y = torch.empty_like(o.y)
    found: dict[str, Callable[[], Any]] = {}
    for rows, pingpong in (128, True), (256, False):
        config = GemmConfig(
            tile_m=rows, tile_n=192, pingpong=pingpong, cluster_m=2, cluster_n=1, is_dynamic_persistent=False,
            device_capacity=9,
        )  # fmt: skip
        found[f"quack {rows} x 192"] = functools.partial(
            gemm_act, o.x, o.weight.t(), activation="swiglu", store_preact=False, postact_out=y, tuned=False,
            config=config,
        )  # fmt: skip
    return found


def peers(o: Operands, compiled: bool) -> dict[str, Callable[[], Any]]:
    """cuBLASLt on the same operands, what torch.compile makes of the product with SwiGLU, and quack."""
    g = o.gemm
    installed = importlib.util.find_spec("quack") is not None
    return cublas(o, compiled) | (quack(o) if installed and o.dtype == BF16 and "swiglu" in g.epilogue else {})


def cublas(o: Operands, compiled: bool) -> dict[str, Callable[[], Any]]:
    """cuBLASLt, and torch.compile."""
    g = o.gemm
    if o.dtype != FP8:
        x, w = o.x, o.weight.t()
        found: dict[str, Callable[[], Any]] = {"cuBLASLt": lambda: torch.matmul(x, w)}
        if compiled and "swiglu" in g.epilogue:

            def body(x: Tensor, w: Tensor) -> Tensor:
                gate, up = torch.matmul(x, w).chunk(2, -1)
                return torch.nn.functional.silu(gate) * up

            fused = torch.compile(body, dynamic=False)
            found["torch.compile"] = lambda: fused(x, w)
        return found
    x, w = o.x, o.weight.t()
    one = torch.ones((), device=x.device)
    rows, columns = torch.ones(o.m, 1, device=x.device), o.channel.view(1, -1)
    tensor = lambda: torch._scaled_mm(x, w, scale_a=one, scale_b=one, out_dtype=BF16, use_fast_accum=True)  # noqa: E731
    row = lambda: torch._scaled_mm(x, w, scale_a=rows, scale_b=columns, out_dtype=BF16, use_fast_accum=True)  # noqa: E731
    return {"cuBLASLt per tensor": tensor, "cuBLASLt per row": row}


def measure(args: argparse.Namespace, save: Callable[[list[dict[str, Any]]], None]) -> None:
    """Every GEMM at every number of tokens, ours beside the peers."""
    card = Card()
    out: list[dict[str, Any]] = []
    todo = [(g, m, d) for m in args.tokens for d in (FP8, BF16) for g in gemms(args.model, d == FP8)]
    if args.bars:  # gate_up at every number of tokens, all four where most is known about the peers
        todo = [t for t in todo if t[0].name == "gate_up" or t[1] == 8192]
    config = {(g, m): gemm.choose(m, g.n, g.epilogue == "swiglu") for g, m, _ in todo}
    jit.warmup(kernels([(g, config[g, m], d) for g, m, d in todo]), progress=False)
    for g, m, dtype in todo:
        if args.only and g.name not in args.only:
            continue
        o = Operands(g, m, dtype)
        c = config[g, m]
        o.run(c)
        error = o.error(max(0, m - 512), m)
        compiled = not args.no_compile and not (args.bars and m != 8192)
        cases: dict[str, Callable[[], Any]] = {"ours": lambda o=o, c=c: o.run(c)} | peers(o, compiled)
        times = interleaved(graphs(cases), args.seconds, args.rounds, card, INNER)
        work = 2 * m * g.n * g.k
        row = {
            "gemm": g.name, "n": g.n, "k": g.k, "tokens": m, "dtype": str(dtype)[6:], "epilogue": g.epilogue,
            "out": str(o.y.dtype)[6:], "config": list(c), "error": error,
        }  # fmt: skip
        row["us"] = {n: t["ms"] * 1e3 for n, t in times.items()}
        row["TFLOP/s"] = {n: work / t["ms"] / 1e9 for n, t in times.items()}
        row["card"] = {n: t["card"] for n, t in times.items()}
        out.append(row)
        shown = "  ".join(f"{n} {v:.0f}" for n, v in row["TFLOP/s"].items())
        print(
            f"{row['dtype'][:8]:8} {m:6} {g.name:8} error {error:.2f}  TFLOP/s: {shown}  [{row['card']['ours']}]",
            flush=True,
        )
        save(out)
        del o, cases


def tune(args: argparse.Namespace, save: Callable[[list[dict[str, Any]]], None]) -> None:
    """Every configuration in ``candidates`` beside each other."""
    card = Card()
    out: list[dict[str, Any]] = []
    for m in args.tokens:
        for dtype in (FP8, BF16):
            for g in gemms(args.model, dtype == FP8):
                if args.only and g.name not in args.only:
                    continue
                o = Operands(g, m, dtype)
                cs = [c for c in candidates() if fits(g, c, dtype)]
                jit.warmup(kernels([(g, c, dtype) for c in cs]), progress=False)
                runs = {str(tuple(c)): (lambda o=o, c=c: o.run(c)) for c in cs}
                times = interleaved(graphs(runs | peers(o, False)), args.seconds, args.rounds, card, INNER)
                speed = {n: 2 * m * g.n * g.k / t["ms"] / 1e9 for n, t in times.items()}
                out.append({"gemm": g.name, "tokens": m, "dtype": str(dtype)[6:], "TFLOP/s": speed})
                print(f"{str(dtype)[6:]} {m} {g.name}", flush=True)
                for n in sorted(speed, key=lambda n: -speed[n]):
                    print(f"    {speed[n]:7.0f}  {n}  {times[n]['card']}", flush=True)
                save(out)
                del o, runs


def candidates() -> list[Config]:
    """What --tune compares."""
    pair, together = gemm.PAIR, gemm.TOGETHER
    return [
        *(c._replace(group=group) for c in (pair, together) for group in (8, 16)),
        pair._replace(group=4),
        gemm.TURNS,
        gemm.TURNS._replace(cluster=1),
        Config(128, 128, 2, True),
        Config(64, 256, 2, True),
        Config(256, 128, 2, False),
        Config(256, 192, 2, False),
    ]


def depth(args: argparse.Namespace, save: Callable[[list[dict[str, Any]]], None]) -> None:
    """e4m3 accumulation against float64 over K, fast and promoted, beside the rounding of the output and the codes."""
    out = []
    for k in (1024, 4096, 8192, 14336, 28672):
        g = Gemm("depth", 1024, k)
        o = Operands(g, 512, FP8)
        y64 = o.exact()
        row: dict[str, Any] = {"k": k, "bf16 rounding": relative(y64.bfloat16(), y64)}
        for name, c in (("fast", gemm.PAIR), ("promoted", gemm.PROMOTED[0][0])):
            o.run(c)
            row[name] = relative(o.y, y64)
        one = torch.ones((), device="cuda")
        mm = torch._scaled_mm(o.x, o.weight.t(), scale_a=one, scale_b=one, out_dtype=torch.float32, use_fast_accum=True)
        row["cuBLASLt fast"] = relative(mm.double() * (o.step.double() * o.channel.double()), y64)
        # What e4m3 itself costs: the same product of unrounded values.
        x, w = torch.randn(512, k, device="cuda"), torch.randn(1024, k, device="cuda") / k**0.5
        q, s = formats.quantize_fp8(w)
        xq = (x * 64).to(FP8).double() / 64
        row["e4m3 codes"] = relative(xq @ (q.double() * s.double()[:, None]).T, x.double() @ w.double().T)
        out.append(row)
        print({n: float(f"{v:.3g}") for n, v in row.items()}, flush=True)
        save(out)


def relative(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, prints, writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("8b", "70b"), default="8b")
    parser.add_argument("--tokens", nargs="*", type=int, default=[2048, 4096, 8192, 16384])
    parser.add_argument("--only", nargs="*", help="names of GEMMs")
    parser.add_argument("--seconds", type=float, default=0.6, help="of each case in all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--bars", action="store_true", help="gate_up alone but at 8192 tokens")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--quick", action="store_true", help="--check: a few configurations, 300 tokens")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--depth", action="store_true")
    parser.add_argument("--commit", default=None, help="what was measured, where there is no git")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder for the JSON file")
    args = parser.parse_args(argv)
    if args.check:
        check(args)
        return
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    version = args.commit or commit()
    about = {"date": date, "commit": version, "gpu": torch.cuda.get_device_name()} | machine()
    what = "tune" if args.tune else "depth" if args.depth else "rows"
    suffix = "" if what == "rows" else f"_{what}"
    path = args.out / f"prefill_gemm{suffix}-{date}-{version}.json"
    args.out.mkdir(parents=True, exist_ok=True)
    run = {"tune": tune, "depth": depth, "rows": measure}[what]
    run(args, lambda found: path.write_text(json.dumps(about | {what: found}, indent=1) + "\n") and None)
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
