"""csrc/gemm_rows_sm90.cu on the CPU: each thread of a block a thread of this machine, against fp8_quantize.

What a GPU does alone (the order in which blocks run, memory that another block wrote) is for tests/gpu; here are the
arithmetic, the exchange between lanes and warps, the state and which block moves it on.
"""

import ctypes
import subprocess
from pathlib import Path

import pytest
import torch
from fu_compile.lowerings import gemm_sm90, reference_linear

from fu_compile import formats, jit

CSRC = Path(__file__).parents[2] / "csrc"

PTX = r"""
#pragma once
#include <algorithm>
#include <atomic>
#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>
using u8 = uint8_t; using u16 = uint16_t; using u32 = uint32_t; using u64 = uint64_t;
#define DEVICE inline
#define __global__
#define __launch_bounds__(...)
#define __shared__ static
struct Index { unsigned x; };
static thread_local Index threadIdx, blockIdx;
static Index gridDim;
struct Warp { std::barrier<> turn{32}; u32 slot[32]; };
static thread_local Warp* warp_;
static std::barrier<>* block_;
static inline u32 bits(float v) { u32 r; std::memcpy(&r, &v, 4); return r; }
static inline float number(u32 v) { float r; std::memcpy(&r, &v, 4); return r; }
#define __float_as_uint bits
#define __uint_as_float number
#define __float_as_int(v) int(bits(v))
#define __int_as_float(v) number(u32(v))
static inline void __syncthreads() { block_->arrive_and_wait(); }
static inline void __threadfence() { std::atomic_thread_fence(std::memory_order_seq_cst); }
static inline u32 exchange(u32 v, int from) {
    warp_->slot[threadIdx.x % 32] = v;
    warp_->turn.arrive_and_wait();
    const u32 r = warp_->slot[from];
    warp_->turn.arrive_and_wait();
    return r;
}
static inline float __shfl_sync(u32, float v, int from) { return number(exchange(bits(v), from)); }
static inline float __shfl_xor_sync(u32, float v, int m) { return number(exchange(bits(v), threadIdx.x % 32 ^ m)); }
static inline float __shfl_up_sync(u32, float v, int d) {
    const int lane = threadIdx.x % 32;
    return number(exchange(bits(v), lane < d ? lane : lane - d));
}
static inline u32 redux_max(u32 v) {
    warp_->slot[threadIdx.x % 32] = v;
    warp_->turn.arrive_and_wait();
    const u32 most = *std::max_element(warp_->slot, warp_->slot + 32);
    warp_->turn.arrive_and_wait();
    return most;
}
struct u32x4 { u32 x, y, z, w; };
struct f32x2 { float x, y; };
static f32x2 memory_[4];
static inline void st_shared_f2(u32 a, f32x2 v) { memory_[a / 8] = v; }
static inline f32x2 ld_shared_f2(u32 a) { return memory_[a / 8]; }
static inline u32x4 ld_global_cg_v4(const void* p) { u32x4 v; std::memcpy(&v, p, 16); return v; }
static inline float ld_global_cg_f32(const float* p) { return *p; }
static inline void st_global_v2(void* p, u32 x, u32 y) { u32 v[2] = {x, y}; std::memcpy(p, v, 8); }
static inline void griddepcontrol_wait() {}
static inline void griddepcontrol_launch_dependents() {}
static inline void red_max(float* p, float v) {
    std::atomic_ref<u32> at(*reinterpret_cast<u32*>(p));
    for (u32 old = at; old < bits(v) && !at.compare_exchange_weak(old, bits(v));) {}
}
static inline u32 atom_count(float* p) { return std::atomic_ref<u32>(*reinterpret_cast<u32*>(p)).fetch_add(1); }
template <bool HALF> float to_f32(u16 v) {
    if constexpr (HALF) { _Float16 h; std::memcpy(&h, &v, 2); return float(h); }
    return number(u32(v) << 16);
}
static inline u8 e4m3(float v) {
    if (std::isnan(v)) return 0x7f;
    const float a = std::fabs(v);
    u32 code = 0x7e;
    if (a < 0x1p-6f) {
        code = u32(std::nearbyint(a * 512.0f));
    } else if (a < 448.0f) {
        int e;
        std::frexp(a, &e);
        code = u32(((e + 6) << 3) + int(std::nearbyint(std::ldexp(a, 4 - e))) - 8);
    }
    return u8(std::min(code, 0x7eu) | (std::signbit(v) ? 0x80 : 0));
}
static inline u16 cvt_e4m3x2(float x, float y) { return u16(e4m3(x) | e4m3(y) << 8); }
"""

RUN = r"""
template <class F> static void run(int grid, unsigned count, F kernel) {
    gridDim.x = grid;
    for (unsigned b = 0; b < gridDim.x; ++b) {
        std::barrier<> block(count);
        block_ = &block;
        std::vector<Warp> warps_of(count / 32);
        std::vector<std::thread> threads;
        for (unsigned t = 0; t < count; ++t)
            threads.emplace_back([&, t] {
                threadIdx.x = t, blockIdx.x = b, warp_ = &warps_of[t / 32];
                kernel();
            });
        for (auto& t : threads) t.join();
    }
}
"""

LAUNCH = r"""
extern "C" void launch(int grid, const u16* x, u8* codes, float* rstd, float* state, float* step, int ldx, float eps,
                       int scaling, int phase) {
    run(grid, THREADS, [&] { FU_KERNEL(x, codes, rstd, state, step, ldx, eps, scaling, phase); });
}
"""

DECIDE = r"""
#include "gemm_fp8_state.cuh"
extern "C" void decide(int grid, float* state, float* step, int scaling, int again, float* scales, int* runs) {
    run(grid, 64, [&] {
        const Fp8Decision d = fp8_decide(state, step, 8, scaling, again);
        if (threadIdx.x == 63) scales[blockIdx.x] = d.scale, runs[blockIdx.x] = d.run;
    });
}
extern "C" void seen(float* state, float amax, int bad) {
    red_max(state + AMAX, amax);
    if (bad) red_max(state + BAD, 1.0f);
}
"""


def build(folder: Path, name: str, text: str) -> ctypes.CDLL:
    """A shared library of device code. Without g++ this is an error: the code would go unchecked."""
    for header in ("ptx.cuh", "gemm_ptx.cuh"):
        (folder / header).write_text(PTX + RUN)
    (folder / "gemm_fp8_state.cuh").write_text((CSRC / "gemm_fp8_state.cuh").read_text())
    source = folder / f"{name}.cpp"
    source.write_text(text)
    so = source.with_suffix(".so")
    command = ["g++", "-std=c++20", "-O0", "-shared", "-fPIC", "-pthread", "-ffp-contract=off", "-Wno-unknown-pragmas"]
    done = subprocess.run([*command, source, "-o", so], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(so))


K, ROWS = 520, 4
"""65 vectors of 16 bytes for 64 threads: one of them has a second one."""


@pytest.fixture(scope="module")
def libraries(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    made = {}
    for rms, codes in ((True, True), (False, True), (True, False)):
        kernel = gemm_sm90.rows_kernel(K, rms, codes, False)
        _, text = jit.render(kernel.source, kernel.constants)
        made[rms, codes] = build(folder, f"rows_{rms}_{codes}", text + LAUNCH)
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
@pytest.mark.parametrize("scaling", formats.FP8_SCALINGS)
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


@pytest.mark.parametrize("scaling", ["delayed", "static"])
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
