"""The four linears of a decoder layer at decode: error, time and bandwidth beside the peers that are on the machine.

    python benchmarks/decode_linears.py                       # check, then time 8B and 70B at M = 1, 8, 32
    python benchmarks/decode_linears.py --models 8b --tokens 1 --seconds 0.2
    python benchmarks/decode_linears.py --tune 8b:32          # every configuration, alone and in the layer
    python benchmarks/decode_linears.py --timeline 8b:32      # where the time of each linear of a layer goes

What is timed: layer after layer in one CUDA graph with the real dependencies (qkv -> o + residual -> RMS, gate_up,
SwiGLU -> down + residual; o reads the first columns of qkv in the place of attention's output), on as many layers as
put every byte of a weight out of L2 before it is read again. Cases run interleaved (A B C A B C) on random data, each
for at least ``--seconds`` in all; us: the median over rounds. Every input of a check is fresh, every output poisoned.

bandwidth: bytes of the packed weights over the time, beside a copy (read + written) of 4 GiB in the same run.
error: largest |y - y64| over one bfloat16 rounding (2^-8 |y64|, at least 2^-8 of an eighth of the row's rms), y64 in
float64 from the same codes and scales.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import itertools
import json
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from fu_compile.lowerings import linear_fp8_sm90 as fp8
from fu_compile.lowerings import linear_int4_sm90 as int4
from fu_compile.lowerings import tuned_int4_sm90
from torch import Tensor

from fu_compile import formats, jit

MODELS = {"8b": (4096, 6144, 4096, 14336), "70b": (8192, 10240, 8192, 28672)}
"""hidden, rows of qkv, columns of o, intermediate"""
EPS = 1e-5
L2_BYTES = 60 << 20
ROUNDINGS = 2.0
"""Largest error of an output: one is the store, the other float32 summation and the hardware's rsqrt and exp."""


@dataclasses.dataclass(frozen=True)
class Linear:
    """One linear of a layer."""

    name: str
    n: int
    k: int
    prologue: str
    epilogue: str


def linears(model: str) -> list[Linear]:
    hidden, qkv, o, inner = MODELS[model]
    return [
        Linear("qkv", qkv, hidden, "rms", ""),
        Linear("o", hidden, o, "", "residual"),
        Linear("gate_up", 2 * inner, hidden, "rms", "swiglu"),
        Linear("down", hidden, inner, "", "residual"),
    ]


def random_codes(n: int, k: int, group: int, device: str = "cuda") -> formats.Int4Codes:
    """Codes over the whole range with signed scales and every zero point; rows of about unit gain."""
    groups = -(-k // group)
    scale = (torch.rand(n, groups, device=device) + 0.5) / (5.0 * k**0.5)
    sign = torch.randint(0, 2, (n, groups), device=device) * 2 - 1
    return formats.Int4Codes(
        torch.randint(0, 16, (n, k), device=device, dtype=torch.uint8),
        (scale * sign).half(),
        torch.randint(6, 10, (n, groups), device=device, dtype=torch.uint8),
        group,
    )


def reference(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    scale: float,
    prologue: str,
    epilogue: str,
    gain: Tensor | None = None,
) -> Tensor:
    """float64, nothing rounded but x * gain as the operator says. w: [n, k], gate rows before up rows."""
    row = x if gain is None else (x.double() * gain.double()).to(x.dtype)
    rstd = torch.rsqrt(x.double().square().mean(-1, keepdim=True) + EPS)
    x = row.double() * rstd if prologue else row.double()
    y = x @ w.double().T
    if bias is not None:
        y = y + bias.double()
    if "swiglu" in epilogue:
        gate, up = y.chunk(2, -1)
        y = torch.nn.functional.silu(gate) * up
    return y if residual is None else residual.double() + scale * y


def roundings(y: Tensor, y64: Tensor) -> float:
    """Largest error in bfloat16 roundings (NaN counts as infinity)."""
    floor = y64.square().mean(-1, keepdim=True).sqrt() / 8
    error = (y.double() - y64).abs() / (torch.maximum(y64.abs(), floor) * 2.0**-8)
    return float("inf") if not bool(torch.isfinite(error).all()) else float(error.max())


def ours(
    x: Tensor,
    packed: Tensor,
    lin: Linear,
    group: int,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    gain: Tensor | None = None,
) -> Tensor:
    return int4.launch(x, packed, lin.n, lin.k, group, bias, residual, EPS, 0.5, lin.prologue, lin.epilogue, gain)


def run_kernel(
    kernel: jit.Kernel,
    x: Tensor,
    packed: Tensor,
    lin: Linear,
    bias: Tensor | None,
    residual: Tensor | None,
    gain: Tensor | None,
) -> Tensor:
    """A given kernel in the place of the one that is chosen."""
    return int4.launch_with(kernel, x, packed, lin.n, lin.k, bias, residual, EPS, 0.5, lin.prologue, lin.epilogue, gain)


@functools.cache
def gain_of(lin: Linear) -> Tensor | None:
    """The gain of the norm before a linear, as a model has it: random, so that a lost one shows."""
    gain = torch.rand(lin.k, generator=torch.Generator().manual_seed(lin.k)) * 2 - 0.2
    return gain.bfloat16().cuda() if lin.prologue else None


def chosen_for(lin: Linear, tokens: int) -> int4.Config:
    """What runs so many tokens of a linear in groups of 128, bfloat16."""
    return int4.choose(lin.n, lin.k, 128, int4.bound(tokens))


def takes_gain(lin: Linear, dtype: torch.dtype) -> bool:
    """float16 models keep the norm before the linear."""
    return lin.prologue == "rms" and dtype == torch.bfloat16


def kernel(lin: Linear, tokens: int, group: int, dtype: torch.dtype) -> jit.Kernel:
    """What runs a case."""
    half = dtype == torch.float16
    return int4.kernel(lin.n, lin.k, group, tokens, half, lin.prologue, lin.epilogue, 132, takes_gain(lin, dtype))


def check_one(lin: Linear, tokens: int, group: int, dtype: torch.dtype, config: int4.Config | None = None) -> float:
    """Error of one call on fresh inputs; the memory the output will take is filled with NaN first.

    config: what runs it; what is chosen without one.
    """
    codes = random_codes(lin.n, lin.k, group)
    w = formats.dequantize_int4(codes)
    packed = formats.pack_int4(codes)
    columns = lin.n // 2 if "swiglu" in lin.epilogue else lin.n
    if "swiglu" in lin.epilogue:
        w = w[formats.deinterleave_gate_up(lin.n).to(w.device)]
    x = (torch.randn(tokens, lin.k, device="cuda") * 2 + 0.3).to(dtype)
    x[tokens // 2, :: max(1, lin.k // 3)] *= 50  # massive activations
    bias = torch.randn(lin.n, device="cuda").to(dtype) if "bias" in lin.epilogue else None
    residual = torch.randn(tokens, columns, device="cuda").to(dtype) if "residual" in lin.epilogue else None
    poison = torch.full((tokens, columns), float("nan"), device="cuda", dtype=dtype)
    del poison
    gain = gain_of(lin) if takes_gain(lin, dtype) else None
    run = functools.partial(ours, x, packed, lin, group, bias, residual, gain)
    if config is not None:
        half, gained = dtype == torch.float16, gain is not None
        kernel = int4.kernel_of(config, lin.n, lin.k, group, half, lin.prologue, lin.epilogue, gained)
        run = functools.partial(run_kernel, kernel, x, packed, lin, bias, residual, gain)
    y, again = run(), run()
    if not torch.equal(y, again):
        return float("inf")
    return roundings(y, reference(x, w, bias, residual, 0.5, lin.prologue, lin.epilogue, gain))


def check_fp8(lin: Linear, tokens: int, dtype: torch.dtype) -> float:
    """As check_one, for FP8 weights."""
    w = torch.randn(lin.n, lin.k, device="cuda") / lin.k**0.5
    codes, scales = formats.quantize_fp8(w)
    columns = lin.n // 2 if "swiglu" in lin.epilogue else lin.n
    x = (torch.randn(tokens, lin.k, device="cuda") * 2 + 0.3).to(dtype)
    bias = torch.randn(lin.n, device="cuda").to(dtype) if "bias" in lin.epilogue else None
    residual = torch.randn(tokens, columns, device="cuda").to(dtype) if "residual" in lin.epilogue else None
    poison = torch.full((tokens, columns), float("nan"), device="cuda", dtype=dtype)
    del poison
    y = fp8.launch(x, codes, scales, scales, bias, residual, EPS, 0.5, lin.prologue, lin.epilogue, "none")
    dense = codes.float() * scales[:, None]
    return roundings(y, reference(x, dense, bias, residual, 0.5, lin.prologue, lin.epilogue))


SMALL = [
    Linear("SmolLM2 qkv", 960, 576, "rms", ""),
    Linear("SmolLM2 gate_up", 3072, 576, "rms", "swiglu"),
    Linear("SmolLM2 down", 576, 1536, "", "residual"),
    Linear("Qwen2.5 qkv", 1152, 896, "rms", "bias"),
    Linear("Qwen2.5 gate_up", 9728, 896, "rms", "swiglu"),
    Linear("Qwen2.5 down", 896, 4864, "", "residual"),
    Linear("Qwen3 qkv", 4096, 1024, "rms", ""),
    Linear("Qwen3 o", 1024, 2048, "", "residual"),
    Linear("Phi-3 gate_up", 16384, 3072, "rms", "swiglu"),
    Linear("Phi-3 down", 3072, 8192, "", "residual"),
    Linear("odd", 37, 200, "rms", "bias|residual"),
    Linear("odd", 1000, 1032, "", "bias"),
    Linear("odd", 1, 8, "rms", ""),
    Linear("odd", 4112, 2056, "", "bias|swiglu|residual"),
]
"""Shapes beside those of MODELS."""


def cases_of(lin: Linear, quick: bool) -> list[tuple[int, int, torch.dtype]]:
    """(tokens, group, dtype) to check."""
    big = lin.n * lin.k > 1 << 26
    cases = [(t, 128, torch.bfloat16) for t in ((1, 8, 32) if big or quick else (1, 2, 3, 8, 9, 16, 17, 32, 33, 64))]
    if not big:
        cases += [(1, 64, torch.bfloat16), (5, 32, torch.float16), (32, 64, torch.float16), (20, 32, torch.bfloat16)]
    return cases


def check(models: list[str], quick: bool) -> float:
    """Prints the worst error of each shape; returns the worst of all in bfloat16 roundings."""
    worst = 0.0
    shapes = SMALL + [lin for m in models for lin in linears(m)]
    kernels = [kernel(lin, t, g, d) for lin in shapes for t, g, d in cases_of(lin, quick)]
    done = jit.warmup(kernels, progress=False)
    print(f"compiled {done.compiled} kernels in {done.seconds:.1f} s", flush=True)
    for lin in shapes:
        errors = {}
        for tokens, group, dtype in cases_of(lin, quick):
            e = check_one(lin, tokens, group, dtype)
            errors[f"{tokens}/{group}/{str(dtype)[6:]}"] = round(e, 3)
            worst = max(worst, e)
        if lin.k % 16 == 0:
            for tokens, dtype in ((1, torch.bfloat16), (8, torch.bfloat16), (11, torch.float16)):
                e = check_fp8(lin, tokens, dtype)
                errors[f"fp8 {tokens}/{str(dtype)[6:]}"] = round(e, 3)
                worst = max(worst, e)
        bad = {c: e for c, e in errors.items() if e > 2}
        print(f"check {lin.name:16s} {lin.n:6d} x {lin.k:5d}: worst {max(errors.values()):.3f} {bad or ''}", flush=True)
    return worst


# ---- timing ---------------------------------------------------------------------------------------------------------


def graph_of(body: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        body()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    return graph


def replay_us(graph: torch.cuda.CUDAGraph, seconds: float) -> float:
    """Microseconds of a replay, back to back for that long."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    graph.replay()
    torch.cuda.synchronize()
    t = time.perf_counter()
    graph.replay()
    torch.cuda.synchronize()
    count = max(3, int(seconds / (time.perf_counter() - t)))
    start.record()
    for _ in range(count):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / count


def interleaved(
    cases: dict[str, tuple[torch.cuda.CUDAGraph, int]], seconds: float, rounds: int = 3
) -> dict[str, float]:
    """Case -> microseconds a layer, the median over rounds of A B C A B C."""
    seen: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, (graph, layers) in cases.items():
            seen[name].append(replay_us(graph, seconds / rounds) / layers)
    return {name: statistics.median(v) for name, v in seen.items()}


def copy_bandwidth() -> float:
    """GB/s of a device copy, bytes read and written."""
    a = torch.randn(1 << 30, dtype=torch.float32, device="cuda")
    b = torch.empty_like(a)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for timed in (False, True):
        if timed:
            start.record()
        for _ in range(20):
            b.copy_(a)
    end.record()
    end.synchronize()
    return 20 * 8 * a.numel() / start.elapsed_time(end) / 1e6


class Card:
    """Clocks and power while something runs."""

    def __init__(self) -> None:
        try:
            import pynvml

            pynvml.nvmlInit()
            self.nvml, self.handle = pynvml, pynvml.nvmlDeviceGetHandleByIndex(0)
        except Exception:
            self.nvml = None

    def now(self) -> tuple[float, float, float, float]:
        """MHz of multiprocessors and of memory, watts, 1 where the power cap holds the clock. Of this instant:
        nvmlDeviceGetPowerUsage has the mean of a second."""
        nvml = self.nvml
        power = nvml.nvmlDeviceGetFieldValues(self.handle, [nvml.NVML_FI_DEV_POWER_INSTANT])[0].value.uiVal / 1000
        sm, memory = (nvml.nvmlDeviceGetClockInfo(self.handle, c) for c in (nvml.NVML_CLOCK_SM, nvml.NVML_CLOCK_MEM))
        return sm, memory, power, nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self.handle) >> 2 & 1

    def text(self, seen: list[tuple[float, float, float, float]]) -> str:
        """Means of what :meth:`now` has seen."""
        sm, memory, watts, capped = (statistics.mean(v) for v in zip(*seen, strict=True))
        limited = ", held by the power cap" if capped else ""
        return f"{sm:.0f} MHz SM, {memory:.0f} MHz memory, {watts:.0f} W{limited}"

    def read(self, graph: torch.cuda.CUDAGraph) -> str:
        """While the graph is replayed for a quarter of a second."""
        if self.nvml is None:
            return "clocks and power not readable"
        seen, done = [], torch.cuda.Event()
        for _ in range(max(3, int(0.25e6 / replay_us(graph, 0.02)))):
            graph.replay()
        done.record()
        while not seen or not done.query():
            seen.append(self.now())
            time.sleep(0.005)
        return self.text(seen)


def layer_body(model: str, call: Callable[[int, Linear, Tensor, Tensor | None], Tensor], layers: int, x: Tensor):
    """layers decoder layers' linears with their dependencies."""
    qkv, o, gate_up, down = linears(model)

    def body() -> Tensor:
        h = x
        for i in range(layers):
            a = call(i, qkv, h, None)
            h = call(i, o, a[:, : o.k], h)
            h = call(i, down, call(i, gate_up, h, None), h)
        return h

    return body


def our_case(model: str, layers: int, x: Tensor, weights: dict[str, list[Tensor]], group: int):
    def call(i: int, lin: Linear, v: Tensor, residual: Tensor | None) -> Tensor:
        return ours(v, weights[lin.name][i], lin, group, None, residual, gain_of(lin))

    return graph_of(layer_body(model, call, layers, x)), layers


def our_fp8_case(model: str, layers: int, x: Tensor):
    weights = {}
    for lin in linears(model):
        codes = (torch.randn(lin.n, lin.k, device="cuda") * 100).to(torch.float8_e4m3fn)
        scales = torch.full((lin.n,), 0.01 / lin.k**0.5, device="cuda")
        weights[lin.name] = [(codes.clone(), scales) for _ in range(layers)]

    def call(i: int, lin: Linear, v: Tensor, residual: Tensor | None) -> Tensor:
        codes, scales = weights[lin.name][i]
        return fp8.launch(v, codes, scales, scales, None, residual, EPS, 0.5, lin.prologue, lin.epilogue, "none")

    return graph_of(layer_body(model, call, layers, x)), layers


def packed_weights(model: str, group: int) -> tuple[dict[str, list[Tensor]], int, int]:
    """Linear -> one packed weight per layer; layers; bytes of a layer."""
    first = {lin.name: formats.pack_int4(random_codes(lin.n, lin.k, group)) for lin in linears(model)}
    size = sum(t.numel() for t in first.values())
    layers = max(3, -(-6 * L2_BYTES // size))
    return {name: [t] + [t.clone() for _ in range(layers - 1)] for name, t in first.items()}, layers, size


def peers(model: str, tokens: int, layers: int) -> dict[str, tuple[torch.cuda.CUDAGraph, int]]:
    """What PyTorch has: bfloat16, FP8 (scaled_mm, per tensor), tinygemm INT4. Linears only, no norm, no SwiGLU."""
    cases = {}
    shapes = linears(model)
    xs = {lin.k: torch.randn(tokens, lin.k, device="cuda", dtype=torch.bfloat16) for lin in shapes}
    ws = {
        lin.name: [torch.randn(lin.n, lin.k, device="cuda", dtype=torch.bfloat16) for _ in range(layers)]
        for lin in shapes
    }
    cases["torch bf16"] = (
        graph_of(lambda: [torch.mm(xs[lin.k], ws[lin.name][i].T) for i in range(layers) for lin in shapes]), layers
    )  # fmt: skip
    try:
        w8 = {name: [w.to(torch.float8_e4m3fn) for w in v] for name, v in ws.items()}
        pad = max(tokens, 16)
        x8 = {k: torch.randn(pad, k, device="cuda").to(torch.float8_e4m3fn) for k in xs}
        one = torch.ones((), device="cuda")

        def fp8() -> None:
            for i in range(layers):
                for lin in shapes:
                    torch._scaled_mm(
                        x8[lin.k], w8[lin.name][i].T, one, one, out_dtype=torch.bfloat16, use_fast_accum=True
                    )  # fmt: skip

        cases["torch fp8 scaled_mm"] = (graph_of(fp8), layers)
    except Exception as error:
        print("no scaled_mm:", str(error)[:200])
    try:
        tiny = {}
        for lin in shapes:
            q = torch.randint(0, 255, (lin.n, lin.k // 2), device="cuda", dtype=torch.uint8)
            p = torch.ops.aten._convert_weight_to_int4pack(q, 8)
            sz = torch.randn(lin.k // 128, lin.n, 2, device="cuda", dtype=torch.bfloat16)
            tiny[lin.name] = [(p.clone(), sz.clone()) for _ in range(layers)]

        def tinygemm() -> None:
            for i in range(layers):
                for lin in shapes:
                    p, sz = tiny[lin.name][i]
                    torch.ops.aten._weight_int4pack_mm(xs[lin.k], p, 128, sz)

        cases["tinygemm int4 g128"] = (graph_of(tinygemm), layers)
    except Exception as error:
        print("no tinygemm:", str(error)[:200])
    return cases


def bench(models: list[str], tokens: list[int], seconds: float, with_peers: bool) -> dict[str, Any]:
    card, copy = Card(), copy_bandwidth()
    print(f"copy {copy:.0f} GB/s", flush=True)
    out: dict[str, Any] = {"device": torch.cuda.get_device_name(), "copy GB/s": copy, "rows": []}
    for model in models:
        weights, layers, size = packed_weights(model, 128)
        for m in tokens:
            x = torch.randn(m, MODELS[model][0], device="cuda", dtype=torch.bfloat16)
            cases = {"int4 (ours)": our_case(model, layers, x, weights, 128)}
            if m <= 8:
                cases["fp8 (ours)"] = our_fp8_case(model, 3, x)
            if with_peers:
                cases |= peers(model, m, 3)
            times = interleaved(cases, seconds)
            state = card.read(cases["int4 (ours)"][0])
            errors = {
                "int4 (ours)": max(check_one(lin, m, 128, torch.bfloat16) for lin in linears(model)),
                "fp8 (ours)": max(check_fp8(lin, m, torch.bfloat16) for lin in linears(model)),
            }
            base = times["int4 (ours)"]
            for name, us in times.items():
                row = {"model": model, "M": m, "case": name, "us": round(us, 2), "x ours": round(us / base, 2)}
                if name in errors:
                    row["error"] = round(errors[name], 3)
                if name == "int4 (ours)":
                    row |= {"GB/s": round(size / us / 1e3), "of copy": round(size / us / 1e3 / copy, 3), "card": state}
                    row["configurations"] = {lin.name: dataclasses.asdict(chosen_for(lin, m)) for lin in linears(model)}
                out["rows"].append(row)
                print(json.dumps({k: v for k, v in row.items() if k != "configurations"}), flush=True)
            del cases
            gc.collect()
            torch.cuda.empty_cache()
        for m in tokens:
            for lin in linears(model):
                x = torch.randn(m, lin.k, device="cuda", dtype=torch.bfloat16)
                r = torch.randn(m, lin.n, device="cuda", dtype=torch.bfloat16) if "residual" in lin.epilogue else None
                case = graph_of(
                    lambda lin=lin, x=x, r=r, ws=weights[lin.name]: [
                        ours(x, w, lin, 128, None, r, gain_of(lin)) for w in ws * 4
                    ]
                )
                us = interleaved({"": (case, 4 * layers)}, seconds / 4)[""]
                bytes_ = weights[lin.name][0].numel()
                row = {"model": model, "M": m, "case": lin.name, "us": round(us, 2), "GB/s": round(bytes_ / us / 1e3)}
                out["rows"].append(row)
                print(json.dumps(row), flush=True)
        weights.clear()
        gc.collect()
        torch.cuda.empty_cache()
    return out


def beginnings(c: int4.Config) -> list[dict[str, int]]:
    """Requests for weights: all at once or late, one after another as fast as memory answers (16 bytes a clock and
    multiprocessor) and slower, or so many at a time."""
    bytes_ = c.strips * c.chunk * formats.int4_tile_bytes(128)
    starts = [{"delay": 0}, {"delay": 700}, {"pace": bytes_ // 16}]
    if c.kind == "integer":
        starts += [{"delay": 2000}, {"pace": bytes_ // 6}]
    else:
        flights = dict.fromkeys(b // c.stage(128) for b in (40_000, 56_000, 72_000, 96_000, 128_000))
        starts += [{"pace": bytes_ // 10}, *({"flight": f} for f in flights if 0 < f < c.slots)]
    return [{"delay": 0, "pace": 0, "flight": 0} | start for start in starts]


def variants(lin: Linear, tokens: int, each: int) -> list[int4.Config]:
    """Configurations worth timing for one linear, the ``each`` cheapest of every kind (a quarter of those that should
    not win); the one that is chosen now stands first and is tried in the layer in any case."""
    n, k, bound, sms = lin.n, lin.k, int4.bound(tokens), 132
    found = [chosen_for(lin, tokens)]
    share = int4.ceil_div(n, 16) / sms
    if bound <= 2:
        for cluster, warps, warps_k, strips, chunk in itertools.product(
            (1, 2), (8, 12, 16), (1, 4, 8, 16), (1, 2), (1, 2, 3, 4)
        ):
            if warps // warps_k * strips <= 1.3 * max(1, share * cluster) and not (cluster > 1 and share > 3):
                found.append(int4.integer(n, k, 128, bound, sms, cluster, warps, warps_k, strips, chunk))
    tried: Counter[tuple[Any, ...]] = Counter()
    for c in int4.configs(n, k, 128, bound, sms, rings=(2, 3, 4, 6)):
        tried[c.way] += 1
        if tried[c.way] <= (each if c.wgmma == (bound > 8) else each // 4):
            found.append(c)
    fits = [c for c in found if c is not None and c.smem(n, k, 128) <= c.limit]
    return list(dict.fromkeys(fits))


def tune(model: str, tokens: int, seconds: float, rounds: int, each: int) -> dict[str, Any]:
    """Every variant of each linear by itself, then the fastest of each in the whole layer, where it counts: a
    neighbour's loads overlap with it. Coordinate descent over those and over the delays of the first request."""
    weights, layers, _ = packed_weights(model, 128)
    x = torch.randn(tokens, MODELS[model][0], device="cuda", dtype=torch.bfloat16)
    shapes, out = linears(model), {"model": model, "M": tokens, "alone": [], "layer": []}
    kernels: dict[tuple[str, int4.Config], jit.Kernel] = {}

    def prepare(wanted: list[tuple[Linear, int4.Config]]) -> None:
        for lin, c in wanted:
            if (lin.name, c) not in kernels:
                gain = lin.prologue == "rms"
                kernels[lin.name, c] = int4.kernel_of(c, lin.n, lin.k, 128, False, lin.prologue, lin.epilogue, gain)
        jit.warmup([kernels[lin.name, c] for lin, c in wanted], progress=False)

    def run(lin: Linear, c: int4.Config, v: Tensor, w: Tensor, residual: Tensor | None) -> Tensor:
        return run_kernel(kernels[lin.name, c], v, w, lin, None, residual, gain_of(lin))

    best: dict[str, list[int4.Config]] = {}
    for lin in shapes:
        v = torch.randn(tokens, lin.k, device="cuda", dtype=torch.bfloat16)
        r = torch.randn(tokens, lin.n, device="cuda", dtype=torch.bfloat16) if "residual" in lin.epilogue else None
        configs = variants(lin, tokens, each)
        prepare([(lin, c) for c in configs])
        used = {c: kernels[lin.name, c].cubin.resources for c in configs}
        configs = [c for c in configs if not used[c].spill_stores and not used[c].serialized]
        want = ours(v, weights[lin.name][0], lin, 128, None, r, gain_of(lin)).float()
        times = {}
        for c in configs:
            got = run(lin, c, v, weights[lin.name][0], r).float()
            if not torch.allclose(got, want, rtol=2e-2, atol=2e-2):
                print(f"WRONG {lin.name} {c} {float((got - want).abs().max())}", flush=True)
                continue
            graph = graph_of(lambda lin=lin, c=c, v=v, r=r: [run(lin, c, v, w, r) for w in weights[lin.name] * 2])
            times[c] = replay_us(graph, seconds) / (2 * layers)
            out["alone"].append({"case": lin.name, "us": round(times[c], 2), **dataclasses.asdict(c)})
        first = [c for c in configs[:1] if c in times]
        kinds: Counter[str] = Counter()
        few = []
        for c in sorted(times, key=lambda c: times[c]):
            kinds[c.kind] += 1
            if kinds[c.kind] <= 3:
                few.append(c)
        best[lin.name] = list(dict.fromkeys(few + first))
        for c in best[lin.name][:3]:
            print(f"{model} M={tokens} {lin.name}: {times[c]:.2f} us  {c}", flush=True)

    def measure(configs: dict[str, int4.Config]) -> float:
        def call(i: int, lin: Linear, v: Tensor, residual: Tensor | None) -> Tensor:
            return run(lin, configs[lin.name], v, weights[lin.name][i], residual)

        return replay_us(graph_of(layer_body(model, call, layers, x)), seconds * 2) / layers

    chosen = {name: configs[0] for name, configs in best.items()}
    us = measure(chosen)
    options = {
        lin.name: [
            dataclasses.replace(c, prefetch=p * c.slots, batch=batch, **start)
            for c in best[lin.name]
            for start in beginnings(c)
            for p in (0, 1)
            for batch in ((1, 4) if c.kind == "integer" else (1,))
        ]
        for lin in shapes
    }
    prepare([(lin, c) for lin in shapes for c in options[lin.name]])
    for _ in range(rounds):
        for lin in sorted(shapes, key=lambda v: -v.n * v.k):
            for c in options[lin.name]:
                now = measure(chosen | {lin.name: c})
                if now < us * 0.998:
                    us, chosen = now, chosen | {lin.name: c}
    for name, c in chosen.items():
        print(f"{model} M={tokens} layer {us:.2f} us {name} {c}", flush=True)
        out["layer"].append({"case": name, "layer us": round(us, 2), **dataclasses.asdict(c)})
    for lin in shapes:
        int4.TUNED[lin.n, lin.k, int4.bound(tokens)] = chosen[lin.name]
    return out


def write_tuned() -> None:
    """Writes lowerings/tuned_int4_sm90.py with what :func:`tune` put into TUNED."""
    rows = []
    for key, c in sorted(int4.TUNED.items()):
        fields = {f.name: getattr(c, f.name) for f in dataclasses.fields(c) if getattr(c, f.name) != f.default}
        rows.append(f"    {key}: {fields!r},\n")
    head = '"""Written by ``benchmarks/decode_linears.py --tune``: (n, k, tokens) -> fields of a Config."""\n'
    text = (
        head
        + "\nfrom typing import Any\n\nTUNED: dict[tuple[int, int, int], dict[str, Any]] = {\n"
        + "".join(rows)
        + "}\n"
    )
    Path(tuned_int4_sm90.__file__).write_text(text)


MOMENTS = ("block runs", "weights asked for", "grid before has ended", "x has come", "multiplied", "stored")
"""``Moment`` of csrc/stamp.cuh: x has come when a block has all of it prepared, or the first step in a ring."""


def timeline(model: str, tokens: int) -> list[dict[str, Any]]:
    """Of the linears of one layer, in the middle of a graph of several: microseconds since the last block of the linear
    before had ended, of the first, the median and the last block. Prints the medians as a table."""
    weights, layers, _ = packed_weights(model, 128)
    x = torch.randn(tokens, MODELS[model][0], device="cuda", dtype=torch.bfloat16)
    kernels, times = {}, {}
    for lin in linears(model):
        config = chosen_for(lin, tokens)
        gain = lin.prologue == "rms"
        kernels[lin.name] = int4.kernel_of(
            config, lin.n, lin.k, 128, False, lin.prologue, lin.epilogue, gain, stamps=True
        )
        times[lin.name] = [torch.zeros(config.grid, 8, dtype=torch.int64, device="cuda") for _ in range(layers)]
    jit.warmup(kernels.values(), progress=False)

    def call(i: int, lin: Linear, v: Tensor, residual: Tensor | None) -> Tensor:
        return run_kernel(kernels[lin.name], v, weights[lin.name][i], lin, times[lin.name][i], residual, gain_of(lin))

    graph = graph_of(layer_body(model, call, layers, x))
    for _ in range(20):
        graph.replay()
    torch.cuda.synchronize()
    middle = layers - 2  # behind the last layer no kernel fetches weights
    rows, before = [], times["down"][middle - 1][:, len(MOMENTS) - 1].max()
    print(f"{model} M={tokens}, us " + "".join(f"{m:>22}" for m in MOMENTS))
    for lin in linears(model):
        seen = times[lin.name][middle][:, : len(MOMENTS)]
        since = ((seen - before).double() / 1e3).sort(0).values.cpu()
        before = seen[:, -1].max()
        each = {m: [round(float(since[i, c]), 1) for i in (0, len(since) // 2, -1)] for c, m in enumerate(MOMENTS)}
        rows.append({"case": lin.name, **each})
        print(f"{lin.name:12s}" + "".join(f"{each[m][1]:22.1f}" for m in MOMENTS), flush=True)
    return rows


def compile_times() -> dict[str, float]:
    """Seconds to compile every decode kernel of an 8B model into an empty folder, and to find them there."""
    config = SimpleNamespace(
        model_type="llama", hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, intermediate_size=14336
    )
    before, found = os.environ.get("FU_CACHE_DIR"), {}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["FU_CACHE_DIR"] = folder
        for name in ("cold", "warm"):
            jit._memory.clear()
            done = jit.warmup(jit.kernels_of(config), progress=False)
            found |= {f"{name} s": round(done.seconds, 2), "kernels": done.compiled + done.from_disk}
    jit._memory.clear()
    del os.environ["FU_CACHE_DIR"]
    if before is not None:
        os.environ["FU_CACHE_DIR"] = before
    return found | {"threads": os.cpu_count() or 1}


def case(text: str) -> tuple[str, int]:
    """``model:tokens`` of the command line."""
    model, tokens = text.split(":")
    if model not in MODELS:
        raise argparse.ArgumentTypeError(f"there is no model {model!r}; there are {', '.join(MODELS)}")
    return model, int(tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--tokens", nargs="*", type=int, default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--seconds", type=float, default=0.6)
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--no-check", action="store_true")
    parser.add_argument("--quick-check", action="store_true")
    parser.add_argument("--only-check", action="store_true", help="exit code 1: an error above 2 roundings")
    parser.add_argument("--tune", type=case, nargs="*", default=[], help="model:tokens")
    parser.add_argument("--timeline", type=case, nargs="*", default=[], help="model:tokens")
    parser.add_argument("--rounds", type=int, default=2, help="of --tune in the layer")
    parser.add_argument("--each", type=int, default=40, help="of --tune: divisions of every kind")
    parser.add_argument("--commit", default="", help="noted in the results")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "decode_linears.json")
    args = parser.parse_args()
    torch.manual_seed(0)
    result: dict[str, Any] = {}
    if not args.no_check:
        result["worst error in bf16 roundings"] = worst = check(args.models, args.quick_check)
        if args.only_check:
            raise SystemExit(int(worst > ROUNDINGS))
    if args.timeline:
        result = {"commit": args.commit, "date": time.strftime("%Y-%m-%d"), "device": torch.cuda.get_device_name()}
        for model, tokens in args.timeline:
            result[f"timeline {model}:{tokens}, us: first, median, last block"] = timeline(model, tokens)
        args.out.write_text(json.dumps(result, indent=1))
        return
    if args.tune:
        for model, tokens in args.tune:
            result[f"tune {model}:{tokens}"] = tune(model, tokens, args.seconds, args.rounds, args.each)
            write_tuned()
            args.out.write_text(json.dumps(result))
        return
    result |= {"commit": args.commit, "date": time.strftime("%Y-%m-%d"), "compile": compile_times()}
    print(json.dumps(result["compile"]), flush=True)
    result |= bench(args.models, args.tokens, args.seconds, not args.no_peers)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
