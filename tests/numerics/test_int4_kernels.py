"""csrc/linear_int4_sm90.cu, linear_int4_one_sm90.cu and arrange_rows_sm90.cu on the CPU (tests/device_code.py), against
float64 on the same codes: every way that x takes, clusters, rings that go round, several passes, groups, epilogues.

What a GPU does alone is for tests/gpu/test_decode_linears.py; bound and errors are those of that file.
"""

import ctypes
import dataclasses
import sys
from pathlib import Path

import pytest
import torch
from device_code import build, launch, slow_but, source_of
from fu_compile.lowerings import linear_int4_sm90 as int4

from fu_compile import formats

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import decode_linears as bench

EPS = bench.EPS


@dataclasses.dataclass(frozen=True)
class Case:
    """One kernel and a call of it."""

    n: int
    k: int
    tokens: int
    config: int4.Config
    group: int = 128
    dtype: torch.dtype = torch.bfloat16
    prologue: str = ""
    epilogue: str = ""
    rows: int = 0
    """tokens of the call; 0: all that the kernel takes"""


def floats(n, k, tokens, *division, group=128, units=2, **flags):
    """A configuration for so few multiprocessors that blocks have several strips."""
    config = int4.floats(n, k, group, tokens, units * division[0], *division, **flags)
    assert config is not None
    return config


CASES = {
    # two rounds of the ring, a tail of K, rows that do not fill a strip, a token less than the kernel takes
    "prepared, norm": Case(
        75, 520, 4, dataclasses.replace(floats(75, 520, 4, 1, 2, 2, 1, 1, prepare=True), slots=2, pace=16, prefetch=1),
        prologue="rms", epilogue="bias|residual", rows=3,
    ),
    "prepared, direct, swiglu": Case(
        96, 256, 8, floats(96, 256, 8, 1, 2, 1, 2, 1, prepare=True), prologue="rms", epilogue="swiglu"
    ),
    "prepared, cluster": Case(
        48, 896, 8, floats(48, 896, 8, 2, 1, 3, 3, 1, units=1, prepare=True), epilogue="residual", rows=5
    ),
    "prepared, norm, cluster": Case(
        48, 1160, 7, floats(48, 1160, 8, 2, 1, 3, 3, 1, units=1, prepare=True), prologue="rms", rows=6
    ),
    "prepared, one token, groups of 32": Case(
        64, 384, 1, floats(64, 384, 1, 1, 1, 3, 2, 1, prepare=True, group=32), group=32, prologue="rms"
    ),
    "arranged, float16, groups of 64": Case(
        64, 520, 16, floats(64, 520, 16, 1, 2, 2, 1, 2, 2, group=64, half=True), group=64, dtype=torch.float16, rows=11
    ),
    "arranged, cluster, several tiles a stage": Case(
        48, 1280, 8, dataclasses.replace(floats(48, 1280, 8, 2, 3, 1, 1, 2, 2, units=1), slots=2), prologue="rms",
        epilogue="bias",
    ),
    "arranged, passes": Case(
        128, 384, 32, dataclasses.replace(floats(128, 384, 32, 1, 1, 1, 1, 1, 2, units=1), slots=3), prologue="rms",
        epilogue="residual", rows=27,
    ),
    "wgmma": Case(
        112, 640, 32, dataclasses.replace(floats(112, 640, 32, 1, 1, 1, 1, 2, 3, units=1, wgmma=True), slots=2, pace=8),
        prologue="rms", epilogue="swiglu|residual", rows=31,
    ),
    "wgmma, cluster, two strips a warp": Case(
        112, 520, 16, floats(112, 520, 16, 2, 1, 1, 2, 1, 2, units=1, wgmma=True), epilogue="bias|residual"
    ),
    # more of a row than a thread of arrange_rows holds at once
    "arranged, a long row": Case(
        16, 9352, 32, floats(16, 9352, 32, 1, 1, 4, 1, 1, 2, units=1), prologue="rms", rows=29
    ),
    "arranged, cluster of four": Case(
        48, 1160, 16, floats(48, 1160, 16, 4, 3, 1, 1, 1, 2), prologue="rms", epilogue="residual", rows=15
    ),
    # 17 and 16 strips with passes of 4: blocks that share x make as many passes
    "wgmma, shared x, passes": Case(
        528, 640, 16, dataclasses.replace(floats(528, 640, 16, 1, 1, 1, 1, 2, 2, wgmma=True, share=2), slots=2),
        prologue="rms", epilogue="residual", rows=13,
    ),
    "arranged, shared x, split": Case(
        80, 904, 32, dataclasses.replace(floats(80, 904, 32, 1, 2, 2, 2, 1, 2, share=2), slots=3), epilogue="bias"
    ),
    "wgmma, 8 tokens, split": Case(64, 640, 8, floats(64, 640, 8, 1, 1, 2, 1, 2, 2, units=1, wgmma=True)),
    "integers": Case(
        64, 520, 2, int4.integer(64, 520, 128, 2, 2, 1, 4, 2, 1, 2), prologue="rms", epilogue="residual"
    ),
    "integers, cluster": Case(48, 640, 1, int4.integer(48, 640, 128, 1, 2, 2, 4, 2, 1, 1), epilogue="bias"),
}  # fmt: skip

LAUNCH = """
extern "C" void launch(int grid, int threads, int cluster, long smem, int seed, {parameters}) {{
    run(grid, threads, cluster, smem, seed, [&] {{ FU_KERNEL({names}); }});
}}
"""
LINEAR = "const {x}* x, const u8* w, const {norm}* norm, const u16* bias, const u16* residual, u16* y, int m, int ldx, int ldr, float eps, float scale"  # noqa: E501
ARRANGE = "const u16* x, const u16* gain, u8* records, float* rstd, int ldx, float eps"


def library(folder, name, kernel, parameters):
    names = ", ".join(p.split()[-1].lstrip("*") for p in parameters.split(","))
    return build(folder, name, source_of(kernel) + LAUNCH.format(parameters=parameters, names=names))


def linear_library(folder, kernel, config):
    integer = config.kind == "integer"
    types = {"x": "u16" if integer else "u8", "norm": "u16" if integer else "void"}
    return library(folder, "linear", kernel, LINEAR.format(**types))


QUICK = ("prepared, norm", "wgmma")


@pytest.mark.parametrize("name", slow_but(QUICK, CASES))
def test_against_float64(name, tmp_path):
    case = CASES[name]
    c, half, rows = case.config, case.dtype == torch.float16, case.rows or case.tokens
    gained = case.prologue == "rms" and not half
    kernel = int4.kernel_of(c, case.n, case.k, case.group, half, case.prologue, case.epilogue, gained)
    arrange = int4.arrange_kernel(kernel, gained)
    codes = bench.random_codes(case.n, case.k, case.group, device="cpu")
    codes.scales[case.n // 2] = 0.0
    w, packed = formats.dequantize_int4(codes), formats.pack_int4(codes)
    columns = case.n // 2 if "swiglu" in case.epilogue else case.n
    if "swiglu" in case.epilogue:
        w = w[formats.deinterleave_gate_up(case.n)]
    x = (torch.randn(rows, case.k + 8) * 2 + 0.3).to(case.dtype)[:, : case.k]
    x[rows // 2, :: case.k // 3] *= 50
    gain = (torch.rand(case.k) * 2 - 0.2).to(case.dtype) if gained else None
    bias = torch.randn(case.n).to(case.dtype) if "bias" in case.epilogue else None
    residual = torch.randn(rows, columns + 8).to(case.dtype)[:, :columns] if "residual" in case.epilogue else None
    y = torch.full((rows, columns), float("nan"), dtype=case.dtype).share_memory_()
    given, norm = x, gain
    if arrange is not None:
        lib = library(tmp_path, "arrange", arrange, ARRANGE)
        records = torch.full(
            (-(-case.k // 128) * int4.record(c.tokens, case.group, c.wgmma),), 0xFD, dtype=torch.uint8
        ).share_memory_()
        norm = torch.full((rows,), float("nan")).share_memory_() if case.prologue else None
        grid = rows * (arrange.constants["PARTS"] + arrange.constants["RMS"])
        launch(lib, arrange, grid, x, gain, records, norm, x.stride(0), ctypes.c_float(EPS))
        given = records
    lib = linear_library(tmp_path, kernel, c)
    tail = (rows, x.stride(0), 0 if residual is None else residual.stride(0), ctypes.c_float(EPS), ctypes.c_float(0.5))
    launch(lib, kernel, c.grid, given, packed, norm, bias, residual, y, *tail)
    want = bench.reference(x, w, bias, residual, 0.5, case.prologue, case.epilogue, gain)
    assert bench.roundings(y, want) <= bench.ROUNDINGS


@pytest.mark.slow
@pytest.mark.parametrize("name", ["prepared, direct, swiglu", "wgmma", "integers", "integers, cluster"])
def test_moments_are_in_order(name, tmp_path):
    """--timeline: a kernel without a bias leaves the times of its blocks."""
    case = CASES[name]
    c, steps = case.config, ("rms", "swiglu")
    kernel = int4.kernel_of(c, case.n, case.k, 128, False, *steps, True, stamps=True)
    packed = formats.pack_int4(bench.random_codes(case.n, case.k, 128, device="cpu"))
    whole = c.prepare or c.kind == "integer"  # x as it is, and the norm's gain
    x = torch.randn(case.tokens, case.k).bfloat16() if whole else torch.zeros(1 << 20, dtype=torch.uint8)
    norm = torch.ones(case.k).bfloat16() if whole else torch.ones(case.tokens)
    y = torch.empty(case.tokens, case.n // 2, dtype=torch.bfloat16).share_memory_()
    times = torch.zeros(c.grid, 8, dtype=torch.int64).share_memory_()
    lib = linear_library(tmp_path, kernel, c)
    tail = (case.tokens, case.k, 0, ctypes.c_float(EPS), ctypes.c_float(1.0))
    launch(lib, kernel, c.grid, x, packed, norm, times, None, y, *tail)
    moments = times[:, : len(bench.MOMENTS)]
    assert bool((moments > 0).all())
    later = moments[:, [0, 3, 4, 5]]  # those of one thread
    assert bool((later.diff(dim=1) >= 0).all())
