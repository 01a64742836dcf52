"""Kernels of csrc on the CPU: a thread of this machine for each thread of a block, clusters whole, bulk copies late.

``PTX`` stands in the place of ``csrc/ptx.cuh`` and ``gemm_ptx.cuh``: instructions as PTX defines them, one by one.
What it cannot show is time, and memory that another grid wrote.

- Shared memory is poisoned before a block runs, and addresses have the block's rank above 24 bits, as on a device.
- A bulk copy lands at once or when somebody waits for it, at random: what does not wait for it reads poison, what is
  still being read is overwritten.
- Sums of mma and wgmma are float64, rounded once: their order is not the device's.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from fu_compile import jit

CSRC = Path(__file__).parents[1] / "csrc"

PTX = r"""
#pragma once
#include <algorithm>
#include <atomic>
#include <barrier>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <thread>
#include <utility>
#include <vector>
using u8 = uint8_t; using u16 = uint16_t; using u32 = uint32_t; using u64 = uint64_t;
using std::max; using std::min;
#define DEVICE inline
#define __global__
#define __shared__ static
#define __restrict__
#define __launch_bounds__(...)
#define __maxnreg__(...)
#define REQUIRE(what) do { if (!(what)) { std::fprintf(stderr, "device code: %s\n", #what); std::abort(); } } while (0)

struct alignas(16) u32x4 { u32 x, y, z, w; };
struct alignas(16) f32x4 { float x, y, z, w; };
struct alignas(16) s32x4 { int x, y, z, w; };
struct alignas(8) f32x2 { float x, y; };
struct Index { unsigned x; };
static thread_local Index threadIdx, blockIdx;
static Index gridDim;

// ---- a block, its warps, its cluster
constexpr u32 BASE = 0x1000;  // shared memory does not begin at zero
struct Mbarrier {  // of its own lock: what no barrier orders is not ordered here either (ThreadSanitizer)
    std::mutex lock;
    std::condition_variable moved;
    long count = 0, pending = 0, bytes = 0;
    u32 phase = 0;
    std::vector<std::function<void()>> copies;  // on their way
    void settle() {
        if (pending == 0 && bytes == 0) phase ^= 1, pending = count, moved.notify_all();
    }
};
struct Warp { std::barrier<> turn{32}; u32 slot[32][8]; };
struct Block {
    std::vector<u8> smem;
    std::vector<Warp> warps;
    std::barrier<> all;
    std::map<int, std::unique_ptr<std::barrier<>>> named;
    std::unique_ptr<Mbarrier[]> bars;
    std::mutex lock;  // of the named barriers
    Block(unsigned threads, size_t bytes)
        : smem(bytes + 256, 0xfd), warps(threads / 32), all(threads), bars(new Mbarrier[bytes / 8 + 1]) {}
};
struct Cluster {
    std::vector<std::unique_ptr<Block>> blocks;
    std::optional<std::barrier<>> all;
};
static unsigned seed_;
static thread_local Cluster* cluster_;
static thread_local u32 rank_;
static thread_local Block* block_;
static thread_local std::optional<std::barrier<>::arrival_token> token_;
static inline u8* at(u32 a, u32 bytes) {
    REQUIRE(a >> 24 < cluster_->blocks.size() && a % std::min(bytes, 16u) == 0);
    std::vector<u8>& memory = cluster_->blocks[a >> 24]->smem;
    const u32 offset = (a & 0xffffff) - BASE;
    REQUIRE(offset + bytes <= memory.size());
    return (u8*)((uintptr_t(memory.data()) + 127) / 128 * 128) + offset;
}
template <class T> static inline T load(u32 a) { T v; std::memcpy(&v, at(a, sizeof(T)), sizeof(T)); return v; }
template <class T> static inline void store(u32 a, T v) { std::memcpy(at(a, sizeof(T)), &v, sizeof(T)); }
static inline u32 cvta_to_shared(const void*) { return BASE | rank_ << 24; }
static inline u32 mapa(u32 a, u32 rank) { return (a & 0xffffff) | rank << 24; }
static inline u32 cluster_ctarank() { return rank_; }

// ---- meeting
static inline void __syncthreads() { block_->all.arrive_and_wait(); }
static inline Warp& warp_of() { return block_->warps[threadIdx.x / 32]; }
static inline void __threadfence() { std::atomic_thread_fence(std::memory_order_seq_cst); }
static inline void __syncwarp() { warp_of().turn.arrive_and_wait(); }
template <int THREADS> static inline void bar_sync(int id) {
    std::barrier<>* b;
    {
        std::lock_guard g(block_->lock);
        auto& found = block_->named[id];
        if (!found) found = std::make_unique<std::barrier<>>(THREADS);
        b = found.get();
    }
    b->arrive_and_wait();
}
static inline void barrier_cluster_arrive() { token_ = cluster_->all->arrive(); }
static inline void barrier_cluster_wait() { cluster_->all->wait(std::move(*token_)); token_.reset(); }
static inline void barrier_cluster() { cluster_->all->arrive_and_wait(); }
static inline void griddepcontrol_wait() {}
static inline void griddepcontrol_launch_dependents() {}
static inline u32 clock_now() { static thread_local u32 now = 0; return now += 1000; }
static inline void wait_clocks(u32) {}
static inline u64 globaltimer() {
    using namespace std::chrono;
    return duration_cast<nanoseconds>(steady_clock::now().time_since_epoch()).count();
}
static inline bool elect_sync() { return threadIdx.x % 32 == 0; }
template <class T> static inline T exchange(T v, int from) {
    static_assert(sizeof(T) == 4);
    std::memcpy(&warp_of().slot[threadIdx.x % 32][0], &v, 4);
    __syncwarp();
    T r;
    std::memcpy(&r, &warp_of().slot[from][0], 4);
    __syncwarp();
    return r;
}
template <class T> static inline T __shfl_sync(u32, T v, int from) { return exchange(v, from); }
template <class T> static inline T __shfl_up_sync(u32, T v, int d) {
    const int lane = threadIdx.x % 32;
    return exchange(v, lane < d ? lane : lane - d);
}
template <class T> static inline T __shfl_xor_sync(u32, T v, int m) { return exchange(v, threadIdx.x % 32 ^ m); }
static inline int warp_index() { return exchange(int(threadIdx.x / 32), 0); }
template <class T, class F> static inline T reduce(T v, F f) {
    T r = exchange(v, 0);
    for (int i = 1; i < 32; ++i) r = f(r, exchange(v, i));
    return r;
}
static inline u32 redux_max(u32 v) { return reduce(v, [](u32 a, u32 b) { return max(a, b); }); }
static inline int redux_add(int v) { return reduce(v, [](int a, int b) { return a + b; }); }

// ---- mbarriers and copies
static inline Mbarrier& barrier_in(Block& block, u32 bar) {
    REQUIRE(bar % 8 == 0 && (bar & 0xffffff) < BASE + block.smem.size());
    return block.bars[((bar & 0xffffff) - BASE) / 8];
}
static inline Mbarrier& barrier_at(u32 bar) {
    REQUIRE(bar >> 24 == rank_);
    return barrier_in(*block_, bar);
}
static inline void mbarrier_init(u32 bar, u32 count) {
    Mbarrier& m = barrier_at(bar);
    std::lock_guard g(m.lock);
    REQUIRE(m.count == 0 && count > 0);
    m.count = m.pending = count;
}
static inline void fence_mbarrier_init() {}
static inline void fence_proxy_async() {}
static inline void arrive(Mbarrier& m, long bytes) {
    std::lock_guard g(m.lock);
    REQUIRE(m.count > 0 && m.pending > 0);
    m.bytes += bytes, m.pending -= 1;
    m.settle();
}
static inline void arrive(u32 bar, long bytes) { arrive(barrier_at(bar), bytes); }
static inline void mbarrier_arrive_cluster(u32 bar) { arrive(barrier_in(*cluster_->blocks[bar >> 24], bar), 0); }
static inline void mbarrier_arrive(u32 bar) { arrive(bar, 0); }
static inline void mbarrier_arrive_expect_tx(u32 bar, u32 bytes) { arrive(bar, bytes); }
static inline bool mbarrier_test_parity(u32 bar, u32 parity) {
    Mbarrier& m = barrier_at(bar);
    std::lock_guard g(m.lock);
    REQUIRE(m.count > 0);
    return m.phase != parity;
}
static inline void mbarrier_wait_parity(u32 bar, u32 parity) {
    Mbarrier& m = barrier_at(bar);
    std::unique_lock g(m.lock);
    REQUIRE(m.count > 0);
    m.moved.wait(g, [&] {
        // The copies of a phase that is over have all landed: these belong to the one that is waited for.
        if (m.phase == parity)
            for (auto& copy : std::exchange(m.copies, {})) copy();
        return m.phase != parity;
    });
}
static inline u64 createpolicy_evict_first() { return 0; }
static inline u64 createpolicy_evict_normal() { return 0; }
static inline void copy_late(Mbarrier& m, u8* target, const void* from, u32 bytes) {
    REQUIRE(uintptr_t(from) % 16 == 0 && bytes % 16 == 0 && bytes > 0);
    const auto copy = [=, &m] {
        std::memcpy(target, from, bytes);
        m.bytes -= bytes;
        m.settle();
    };
    static thread_local std::mt19937 random(seed_ + threadIdx.x + 1024 * blockIdx.x);
    std::lock_guard g(m.lock);
    if (random() % 2)
        copy();
    else
        m.copies.push_back(copy), m.moved.notify_all();
}
static inline void cp_async_bulk(u32 to, const void* from, u32 bytes, u32 bar, u64) {
    REQUIRE(to % 16 == 0);
    copy_late(barrier_at(bar), at(to, bytes), from, bytes);
}
static inline void cp_async_bulk_multicast(u32 to, const void* from, u32 bytes, u32 bar, u16 mask, u64) {
    REQUIRE(to % 16 == 0 && to >> 24 == rank_ && bar >> 24 == rank_ && mask >> cluster_->blocks.size() == 0);
    for (u32 r = 0; r < cluster_->blocks.size(); ++r)
        if (mask >> r & 1)
            copy_late(barrier_in(*cluster_->blocks[r], bar), at((to & 0xffffff) | r << 24, bytes), from, bytes);
}
static inline void cp_async_bulk_prefetch_l2(const void* from, u32 bytes) {
    REQUIRE(uintptr_t(from) % 16 == 0 && bytes % 16 == 0);
}
static inline void cp_async_16(u32 to, const void* from, u32 bytes) {
    u8* const target = at(to, 16);
    std::memset(target, 0, 16);
    std::memcpy(target, from, bytes);
}
static inline void cp_async_commit_group() {}
template <int N> static inline void cp_async_wait_group() {}

// ---- loads and stores
static inline u32x4 ld_shared_v4(u32 a) { return load<u32x4>(a); }
static inline f32x4 ld_shared_f4(u32 a) { return load<f32x4>(a); }
static inline f32x2 ld_shared_f2(u32 a) { return load<f32x2>(a); }
static inline float ld_shared_f32(u32 a) { return load<float>(a); }
static inline u32 ld_shared_u32(u32 a) { return load<u32>(a); }
static inline u64 ld_shared_u64(u32 a) { return load<u64>(a); }
static inline u32 ld_shared_u16(u32 a) { return load<u16>(a); }
static inline f32x4 ld_cluster_f4(u32 a) { return load<f32x4>(a); }
static inline f32x2 ld_cluster_f2(u32 a) { return load<f32x2>(a); }
static inline void st_shared_v4(u32 a, u32x4 v) { store(a, v); }
static inline void st_shared_f4(u32 a, f32x4 v) { store(a, v); }
static inline void st_shared_f2(u32 a, f32x2 v) { store(a, v); }
static inline void st_shared_f32(u32 a, float v) { store(a, v); }
static inline void st_shared_u16(u32 a, u32 v) { store(a, u16(v)); }
template <class T> static inline T global(const void* p) {
    REQUIRE(uintptr_t(p) % sizeof(T) == 0);
    T v;
    std::memcpy(&v, p, sizeof(T));
    return v;
}
static inline u32x4 ld_global_cg_v4(const void* p) { return global<u32x4>(p); }
static inline u32x4 ld_global_nc_v4(const void* p) { return global<u32x4>(p); }
static inline u64 ld_global_nc_v2(const void* p) { return global<u64>(p); }
static inline float ld_global_cg_f32(const void* p) { return global<float>(p); }
static inline void st_global_v2(void* p, u32 x, u32 y) { const u32 v[2] = {x, y}; std::memcpy(p, v, 8); }
static inline u16 ld_global_cg_u16(const void* p) { return global<u16>(p); }

// ---- arithmetic
static inline u32 __float_as_uint(float v) { u32 r; std::memcpy(&r, &v, 4); return r; }
static inline float __uint_as_float(u32 v) { float r; std::memcpy(&r, &v, 4); return r; }
static inline float __fdividef(float a, float b) { return a / b; }
static inline float ex2_approx(float v) { return std::exp2(v); }
static inline float rsqrt_approx(float v) { return 1.0f / std::sqrt(v); }
static inline float rcp_approx(float v) { return 1.0f / v; }
static inline u32 prmt(u32 a, u32 b, u32 selector) {
    const u64 both = u64(b) << 32 | a;
    u32 r = 0;
    for (int i = 0; i < 4; ++i) {
        REQUIRE((selector >> 4 * i & 8) == 0);
        r |= u32(both >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
    }
    return r;
}
template <bool HALF> static inline float to_f32(u16 v) {
    if constexpr (HALF) { _Float16 h; std::memcpy(&h, &v, 2); return float(h); }
    return __uint_as_float(u32(v) << 16);
}
template <bool HALF> static inline u16 from_f32(float v) {
    if constexpr (HALF) { const _Float16 h = _Float16(v); u16 r; std::memcpy(&r, &h, 2); return r; }
    const u32 b = __float_as_uint(v);
    return std::isnan(v) ? 0x7fff : u16((b + 0x7fff + (b >> 16 & 1)) >> 16);
}
template <bool HALF> static inline u32 product(u32 a, u32 b) {
    const u16 low = from_f32<HALF>(to_f32<HALF>(u16(a)) * to_f32<HALF>(u16(b)));
    return low | u32(from_f32<HALF>(to_f32<HALF>(u16(a >> 16)) * to_f32<HALF>(u16(b >> 16)))) << 16;
}
static inline u32 mul_bf16x2(u32 a, u32 b) { return product<false>(a, b); }
static inline u32 mul_f16x2(u32 a, u32 b) { return product<true>(a, b); }

#define __float_as_int(v) int(__float_as_uint(v))
#define __int_as_float(v) __uint_as_float(u32(v))
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
static inline void red_max(float* p, float v) {
    std::atomic_ref<u32> at(*reinterpret_cast<u32*>(p));
    const u32 bits = __float_as_uint(v);
    for (u32 old = at; old < bits && !at.compare_exchange_weak(old, bits);) {}
}
static inline u32 atom_count(float* p) { return std::atomic_ref<u32>(*reinterpret_cast<u32*>(p)).fetch_add(1); }

// ---- tensor cores: fragments as in csrc/ptx.cuh
struct Fragments {
    u32 v[32][8];
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    Fragments(u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
        u32* mine = warp_of().slot[threadIdx.x % 32];
        mine[0] = a0, mine[1] = a1, mine[2] = a2, mine[3] = a3, mine[4] = b0, mine[5] = b1;
        __syncwarp();
        std::memcpy(v, warp_of().slot, sizeof v);
        __syncwarp();
    }
    // 16-bit element (row, k) of a, (k, column) of b
    u16 a(int row, int k) const { return u16(v[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2] >> k % 2 * 16); }
    u16 b(int k, int column) const { return u16(v[column * 4 + k % 8 / 2][4 + k / 8] >> k % 2 * 16); }
};
template <bool HALF> static inline void mma_m16n8k16(f32x4& c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    const Fragments f(a0, a1, a2, a3, b0, b1);
    double sum[4] = {c.x, c.y, c.z, c.w};
    for (int i = 0; i < 4; ++i)
        for (int k = 0; k < 16; ++k)
            sum[i] += double(to_f32<HALF>(f.a(f.g + i / 2 * 8, k))) * to_f32<HALF>(f.b(k, f.t * 2 + i % 2));
    c = {float(sum[0]), float(sum[1]), float(sum[2]), float(sum[3])};
}
static inline void mma_m16n8k32(s32x4& c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    const Fragments f(a0, a1, a2, a3, b0, b1);
    int sum[4] = {c.x, c.y, c.z, c.w};
    for (int i = 0; i < 4; ++i)
        for (int k = 0; k < 32; ++k) {
            const int row = f.g + i / 2 * 8, column = f.t * 2 + i % 2;
            sum[i] += int(u8(f.v[row % 8 * 4 + k % 16 / 4][row / 8 + k / 16 * 2] >> k % 4 * 8)) *
                      int(int8_t(f.v[column * 4 + k % 16 / 4][4 + k / 16] >> k % 4 * 8));
        }
    c = {sum[0], sum[1], sum[2], sum[3]};
}
static inline void wgmma_fence() {}
static inline void wgmma_commit_group() {}
template <int N> static inline void wgmma_wait_group() {}
// 18 bits of an address in units of 16 bytes, then the distances of core matrices along k and along the rows.
template <int NB> static inline void wgmma_m64k16(f32x4 (&d)[NB], u32 a0, u32 a1, u32 a2, u32 a3, u64 b) {
    const Fragments f(a0, a1, a2, a3, 0, 0);
    REQUIRE((b & ~(u64(0x3fff) | u64(0x3fff) << 16 | u64(0x3fff) << 32)) == 0);
    const u32 from = u32(b & 0x3fff) * 16 | rank_ << 24, along_k = u32(b >> 16 & 0x3fff) * 16, rows = u32(b >> 32) * 16;
    for (int n = 0; n < NB; ++n) {
        double sum[4] = {d[n].x, d[n].y, d[n].z, d[n].w};
        for (int i = 0; i < 4; ++i)
            for (int k = 0; k < 16; ++k) {
                const u32 where = from + k / 8 * along_k + n * rows + (f.t * 2 + i % 2) * 16 + k % 8 * 2;
                sum[i] += double(to_f32<false>(f.a(f.g + i / 2 * 8, k))) * to_f32<false>(load<u16>(where));
            }
        d[n] = {float(sum[0]), float(sum[1]), float(sum[2]), float(sum[3])};
    }
}

// ---- launch
template <class F>
static void run(unsigned grid, unsigned threads, unsigned clusters, size_t smem, unsigned seed, F f) {
    gridDim.x = grid, seed_ = seed;
    for (unsigned first = 0; first < grid; first += clusters) {
        Cluster c;
        for (unsigned r = 0; r < clusters; ++r)
            c.blocks.push_back(std::make_unique<Block>(threads, smem));
        c.all.emplace(clusters * threads);
        std::vector<std::thread> all;
        for (unsigned r = 0; r < clusters; ++r)
            for (unsigned t = 0; t < threads; ++t)
                all.emplace_back([&, r, t] {
                    threadIdx.x = t, blockIdx.x = first + r, cluster_ = &c, rank_ = r, block_ = c.blocks[r].get();
                    f();
                });
        for (auto& t : all) t.join();
    }
}
"""


def slow_but(quick: Iterable[str], choices: Iterable[str]) -> list[Any]:
    """Parameters of a test; all but the quick are slow, since a kernel on this machine's threads takes seconds."""
    return [c if c in quick else pytest.param(c, marks=pytest.mark.slow) for c in choices]


def source_of(kernel: jit.Kernel) -> str:
    """A rendered kernel as C++: its dynamic shared memory is the block's."""
    _, text = jit.render(kernel.source, kernel.constants)
    return text.replace("extern __shared__ __align__(128) u8 shared[];", "const void* const shared = nullptr;")


def build(folder: Path, name: str, text: str) -> ctypes.CDLL:
    """A shared library of device code. Without g++ this is an error: the code would go unchecked."""
    # one copy: of two, g++ takes `#pragma once` for the same file only when both were written in the same second
    ours = {"ptx.cuh": PTX, "gemm_ptx.cuh": '#include "ptx.cuh"\n'}
    for header in CSRC.glob("*.cuh"):
        (folder / header.name).write_text(ours.get(header.name) or header.read_text())
    source = folder / f"{name}.cpp"
    source.write_text(text)
    so = source.with_suffix(".so")
    command = ["g++", "-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", "-ffp-contract=off", "-w"]
    done = subprocess.run([*command, source, "-o", so], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:4000]
    return ctypes.CDLL(str(so))


def launch(lib: ctypes.CDLL, kernel: jit.Kernel, grid: int, *args: object, seconds: int = 60) -> None:
    """``lib.launch(grid, threads, cluster, bytes of shared memory, seed, *args)`` in a process of its own.

    Device code that breaks a rule, or waits for ever, ends its process. What it writes must be in ``share_memory_()``.
    """
    shape = kernel.shape
    values = [ctypes.c_void_p(a.data_ptr()) if isinstance(a, Tensor) else a for a in args]
    child = os.fork()
    if child == 0:
        signal.alarm(seconds)
        lib.launch(grid, shape.block, shape.cluster, ctypes.c_long(shape.smem), os.getpid(), *values)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status == 0, (
        f"{kernel.source}: {signal.strsignal(os.WTERMSIG(status)) if os.WIFSIGNALED(status) else status}"
    )
