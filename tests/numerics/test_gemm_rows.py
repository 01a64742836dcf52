"""csrc/gemm_rows_sm90.cu on the CPU (tests/device_code.py), against fp8_quantize.

What a GPU does alone (the order in which blocks run, memory that another block wrote) is for tests/gpu; here are the
arithmetic, the exchange between lanes and warps, the state and which block moves it on.
"""

import ctypes

import pytest
import torch
from device_code import build, slow_but, source_of
from fu_compile.lowerings import gemm_sm90, reference_linear

from fu_compile import formats

LAUNCH = r"""
extern "C" void launch(int grid, const u16* x, u8* codes, float* rstd, float* state, float* step, int ldx, float eps,
                       int scaling, int phase) {
    run(grid, THREADS, 1, 0, 0, [&] { FU_KERNEL(x, codes, rstd, state, step, ldx, eps, scaling, phase); });
}
"""

DECIDE = r"""
#include "gemm_fp8_state.cuh"
extern "C" void decide(int grid, float* state, float* step, int scaling, int again, float* scales, int* runs) {
    run(grid, 64, 1, 8, 0, [&] {
        const Fp8Decision d = fp8_decide(state, step, BASE, scaling, again);
        if (threadIdx.x == 63) scales[blockIdx.x] = d.scale, runs[blockIdx.x] = d.run;
    });
}
extern "C" void seen(float* state, float amax, int bad) {
    red_max(state + AMAX, amax);
    if (bad) red_max(state + BAD, 1.0f);
}
"""


K, ROWS = 520, 4
"""65 vectors of 16 bytes for 64 threads: one of them has a second one."""


@pytest.fixture(scope="module")
def libraries(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    made = {}
    for rms, codes in ((True, True), (False, True), (True, False)):
        kernel = gemm_sm90.rows_kernel(K, rms, codes, False)
        made[rms, codes] = build(folder, f"rows_{rms}_{codes}", source_of(kernel) + LAUNCH)
    assert gemm_sm90.rows_kernel(K, True, True, False).shape.block == 64
    return made


def pointer(t):
    return None if t is None else ctypes.c_void_p(t.data_ptr())


def launch(lib, x, codes, rstd, state, step, scaling, phase):
    lib.launch(
        x.shape[0], pointer(x), pointer(codes), pointer(rstd), pointer(state), pointer(step), x.stride(0),
        ctypes.c_float(1e-5), gemm_sm90._SCALINGS[scaling], phase,
    )  # fmt: skip


def code_bytes(t):
    """Codes as bytes; NaN and zero have no sign."""
    return torch.where(t.isnan(), 127, torch.where(t.float() == 0.0, 0, t.view(torch.uint8).int()))


@pytest.mark.parametrize("rms", [True, False])
@pytest.mark.parametrize("scaling", slow_but(["delayed"], formats.FP8_SCALINGS))
def test_codes_scale_and_state(libraries, scaling, rms):
    """Over calls that measure first, saturate, are zero, and are not finite; rows lie apart."""
    ours, theirs = formats.fp8_state(), formats.fp8_state()
    for call, size in enumerate((1.0, 1.0, 40.0, 1e-3, 0.0, 1.0)):
        x = (torch.randn(ROWS, K + 8) * size).bfloat16()[:, :K]
        if call == 2:
            x[2, 9] = 3000.0
        if call == 5:
            x[1, 5], x[3, 7] = float("inf"), float("nan")
        codes = torch.full((ROWS, K), 17, dtype=torch.uint8).view(torch.float8_e4m3fn)
        step = torch.full((ROWS,) if scaling == "row" else (), float("nan"))
        where = (step, None) if scaling == "row" else (None, step)
        for phase in (1, 2) if scaling == "dynamic" else (0,):
            launch(libraries[rms, True], x, codes, where[0], ours, where[1], scaling, phase)
        row = x.float()
        row = reference_linear.normalized(row, 1e-5) if rms else row
        want, want_step = formats.fp8_quantize(row, theirs, scaling)
        torch.testing.assert_close(step.view(-1), want_step.view(-1), rtol=1e-6, atol=0.0)
        if scaling == "row":  # what the report shows as the scale: a row of zeros among others counts as 1 there only
            ours[formats.FP8_SLOTS["scale"]] = theirs[formats.FP8_SLOTS["scale"]]
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0.0)
        # The last bit of rstd moves a value over the boundary of a code. With a row's own scale rstd cancels, and
        # 16-bit values over another one are often exactly between two codes.
        differ = code_bytes(codes) != code_bytes(want)
        assert float(differ.float().mean()) <= (0.0 if not rms else 2e-3 if scaling != "row" else 2e-2)
        if call == 1 and scaling == "static":
            for state in (ours, theirs):
                formats.fp8_freeze(state, float(state[0]) / 448.0 * 1.5)  # no power of two
    assert ours[21:].tolist() == [0.0, 0.0, 0.0]
    assert float(ours[formats.FP8_SLOTS["calls"]]) == 6
    if scaling in ("delayed", "static") and not rms:
        assert float(ours[formats.FP8_SLOTS["saturations"]]) == 1


def test_rstd(libraries):
    x = (torch.randn(ROWS, K + 8) * 3).bfloat16()[:, :K]
    rstd = torch.full((ROWS,), float("nan"))
    launch(libraries[True, False], x, None, rstd, None, None, "delayed", 0)
    torch.testing.assert_close(rstd, reference_linear.rstd(x.float(), 1e-5)[:, 0], rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("scaling", slow_but(["delayed"], ["delayed", "static"]))
def test_an_output_is_written_again_only_if_its_scale_was_wrong(tmp_path, scaling):
    """The GEMM with e4m3 output, launched twice: scale, state and decision of every block."""
    lib, grid = build(tmp_path, "decide", DECIDE), 3
    ours, theirs = formats.fp8_state(), formats.fp8_state()
    number = gemm_sm90._SCALINGS[scaling]
    for call, amax in enumerate((3.0, 2.5, 900.0, 1.0, 0.0, 5e4, 7.0)):
        bad = call == 3
        x = torch.tensor([amax / 2, -amax, float("nan") if bad else 0.0])
        step = torch.full((), float("nan"))
        scales, runs = torch.zeros(2, grid), torch.zeros(2, grid, dtype=torch.int32)
        lib.decide(grid, pointer(ours), pointer(step), number, 0, pointer(scales[0]), pointer(runs[0]))
        lib.seen(pointer(ours), ctypes.c_float(amax), int(bad))
        lib.decide(grid, pointer(ours), pointer(step), number, 1, pointer(scales[1]), pointer(runs[1]))
        _, want = formats.fp8_quantize(x, theirs, scaling)
        assert torch.equal(step, want)
        assert scales[1].tolist() == [float(want)] * grid
        assert runs[0].tolist() == [1] * grid
        wrong = call == 0 or float(scales[0, 0]) != float(want)
        assert runs[1].tolist() == [int(wrong)] * grid
        assert torch.equal(ours, theirs)
        if call == 1 and scaling == "static":
            for state in (ours, theirs):
                formats.fp8_freeze(state)
