// One wrapper per PTX instruction, named after it. No CUDA header is needed, so NVRTC compiles a kernel from our
// sources alone. Addresses of shared memory are 32-bit (`smem`), of the same block unless the name says cluster.
#pragma once

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

#define DEVICE __device__ __forceinline__

DEVICE u32 cvta_to_shared(const void* p) {
    u64 a;
    asm("cvta.to.shared.u64 %0, %1;" : "=l"(a) : "l"(p));
    return u32(a);
}

// ---- programmatic dependent launch --------------------------------------------------------------------------------

// Blocks until every grid that this one depends on has completed and its writes are visible.
DEVICE void griddepcontrol_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Lets the next grid's blocks start as soon as there is room for them.
DEVICE void griddepcontrol_launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

DEVICE u32 clock_now() {
    u32 now;
    asm volatile("mov.u32 %0, %%clock;" : "=r"(now)::"memory");
    return now;
}
// Lets the clock of the multiprocessor advance by that much (0: no instruction).
DEVICE void wait_clocks(u32 clocks) {
    const u32 start = clock_now();
    do {
        asm volatile("nanosleep.u32 40;" ::: "memory");
    } while (clock_now() - start < clocks);
}

// Nanoseconds, the same clock on all multiprocessors.
DEVICE u64 globaltimer() {
    u64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
    return now;
}

// True in one lane of a converged warp. Behind it, bulk copies whose operands are the same in the whole warp (see
// warp_index) are one instruction each; behind a comparison of lanes the compiler loops over lanes, 15 instructions.
DEVICE bool elect_sync() {
    u32 one;
    asm volatile("{\n .reg .pred p;\n elect.sync _|p, 0xffffffff;\n selp.u32 %0, 1, 0, p;\n}" : "=r"(one));
    return one;
}
// Of this thread's warp, as a value that the compiler knows to be uniform.
DEVICE int warp_index() { return __shfl_sync(0xffffffffu, int(threadIdx.x) >> 5, 0); }

// ---- mbarrier and copies ------------------------------------------------------------------------------------------

DEVICE void mbarrier_init(u32 bar, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}
DEVICE void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEVICE void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
DEVICE void mbarrier_arrive_expect_tx(u32 bar, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
DEVICE void mbarrier_arrive(u32 bar) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory"); }
DEVICE void mbarrier_wait_parity(u32 bar, u32 parity) {
    asm volatile(
        "{\n .reg .pred p;\n"
        "again:\n mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n @p bra done;\n bra again;\n"
        "done:\n}" ::"r"(bar),
        "r"(parity)
        : "memory");
}

// Whether that phase has ended.
DEVICE bool mbarrier_test_parity(u32 bar, u32 parity) {
    u32 ended;
    asm volatile("{\n .reg .pred p;\n mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n selp.u32 %0, 1, 0, p;\n}"
                 : "=r"(ended)
                 : "r"(bar), "r"(parity)
                 : "memory");
    return ended;
}

DEVICE u64 createpolicy_evict_first() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
DEVICE u64 createpolicy_evict_normal() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
// `bytes` and both addresses are multiples of 16; completes on the mbarrier's transaction count.
DEVICE void cp_async_bulk(u32 dst, const void* src, u32 bytes, u32 bar, u64 policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
            "r"(dst),
        "l"(src), "r"(bytes), "r"(bar), "l"(policy)
        : "memory");
}
// To the same place in every block of the mask, and counted on the barrier at the same place there.
DEVICE void cp_async_bulk_multicast(u32 dst, const void* src, u32 bytes, u32 bar, u16 mask, u64 policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint [%0], "
        "[%1], %2, [%3], %4, %5;" ::"r"(dst),
        "l"(src), "r"(bytes), "r"(bar), "h"(mask), "l"(policy)
        : "memory");
}
DEVICE void cp_async_bulk_prefetch_l2(const void* src, u32 bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(src), "r"(bytes) : "memory");
}
// 16 bytes, of which the last 16 - bytes are filled with zeros.
DEVICE void cp_async_16(u32 dst, const void* src, u32 bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(bytes) : "memory");
}
DEVICE void cp_async_commit_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
DEVICE void cp_async_wait_group() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// ---- barriers ------------------------------------------------------------------------------------------------------

template <int THREADS>
DEVICE void bar_sync(int id) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(THREADS) : "memory");
}
template <int THREADS>
DEVICE void bar_arrive(int id) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "n"(THREADS) : "memory");
}
// The two halves of barrier_cluster: what is between them need not wait.
DEVICE void barrier_cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
DEVICE void barrier_cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
DEVICE void barrier_cluster() {
    barrier_cluster_arrive();
    barrier_cluster_wait();
}
DEVICE u32 cluster_ctarank() {
    u32 r;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
    return r;
}
DEVICE u32 mapa(u32 smem, u32 rank) {
    u32 a;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(a) : "r"(smem), "r"(rank));
    return a;
}

// ---- loads and stores ----------------------------------------------------------------------------------------------

struct alignas(16) u32x4 {
    u32 x, y, z, w;
};
struct alignas(16) f32x4 {
    float x, y, z, w;
};
struct alignas(16) s32x4 {
    int x, y, z, w;
};
struct alignas(8) f32x2 {
    float x, y;
};

DEVICE u32x4 ld_shared_v4(u32 a) {
    u32x4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(a));
    return v;
}
DEVICE f32x4 ld_shared_f4(u32 a) {
    f32x4 v;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(a));
    return v;
}
DEVICE f32x4 ld_cluster_f4(u32 a) {
    f32x4 v;
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(a));
    return v;
}
DEVICE f32x2 ld_shared_f2(u32 a) {
    f32x2 v;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(a));
    return v;
}
DEVICE f32x2 ld_cluster_f2(u32 a) {
    f32x2 v;
    asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(a));
    return v;
}
DEVICE float ld_shared_f32(u32 a) {
    float v;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(a));
    return v;
}
DEVICE u32 ld_shared_u32(u32 a) {
    u32 v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(a));
    return v;
}
DEVICE u64 ld_shared_u64(u32 a) {
    u64 v;
    asm volatile("ld.shared.u64 %0, [%1];" : "=l"(v) : "r"(a));
    return v;
}
DEVICE u32 ld_shared_u16(u32 a) {
    u16 v;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(a));
    return v;
}
DEVICE void st_shared_v4(u32 a, u32x4 v) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(a), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}
DEVICE void st_shared_f4(u32 a, f32x4 v) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(a), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
                 : "memory");
}
DEVICE void st_shared_f2(u32 a, f32x2 v) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(a), "f"(v.x), "f"(v.y) : "memory");
}
DEVICE void st_shared_f32(u32 a, float v) { asm volatile("st.shared.f32 [%0], %1;" ::"r"(a), "f"(v) : "memory"); }
DEVICE void st_shared_u16(u32 a, u16 v) { asm volatile("st.shared.u16 [%0], %1;" ::"r"(a), "h"(v) : "memory"); }
DEVICE void st_cluster_f32(u32 a, float v) {
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(a), "f"(v) : "memory");
}
DEVICE void st_cluster_f2(u32 a, f32x2 v) {
    asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(a), "f"(v.x), "f"(v.y) : "memory");
}
// Through L2: another grid wrote it, perhaps while this one was already resident.
DEVICE u32x4 ld_global_cg_v4(const void* p) {
    u32x4 v;
    asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}
DEVICE void ld_global_cg_v2(const void* p, u32& x, u32& y) {
    asm volatile("ld.global.cg.v2.u32 {%0, %1}, [%2];" : "=r"(x), "=r"(y) : "l"(p));
}
DEVICE u32 ld_global_cg_u32(const void* p) {
    u32 v;
    asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(v) : "l"(p));
    return v;
}
DEVICE float ld_global_cg_f32(const void* p) {
    float v;
    asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(v) : "l"(p));
    return v;
}
DEVICE u64 ld_global_cg_v2(const void* p) {
    u64 v;
    asm volatile("ld.global.cg.u64 %0, [%1];" : "=l"(v) : "l"(p));
    return v;
}
// Nobody writes it while the grid runs.
DEVICE u64 ld_global_nc_v2(const void* p) {
    u64 v;
    asm("ld.global.nc.u64 %0, [%1];" : "=l"(v) : "l"(p));
    return v;
}
DEVICE u32x4 ld_global_nc_v4(const void* p) {
    u32x4 v;
    asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}
DEVICE u16 ld_global_cg_u16(const void* p) {
    u16 v;
    asm volatile("ld.global.cg.u16 %0, [%1];" : "=h"(v) : "l"(p));
    return v;
}

// ---- arithmetic ----------------------------------------------------------------------------------------------------

// (a & b) | c
DEVICE u32 lop3_and_or(u32 a, u32 b, u32 c) {
    u32 r;
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
    return r;
}
// bytes of (b:a) picked by the nibbles of the selector
DEVICE u32 prmt(u32 a, u32 b, u32 selector) {
    u32 r;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(selector));
    return r;
}
DEVICE u32 mul_bf16x2(u32 a, u32 b) {
    u32 r;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}
DEVICE u32 mul_f16x2(u32 a, u32 b) {
    u32 r;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}
// Transposes an 8 x 8 matrix of 16-bit values; lane 4g + t holds row g, columns 2t, 2t+1, before and after.
DEVICE u32 movmatrix_trans(u32 v) {
    u32 r;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(v));
    return r;
}
DEVICE float ex2_approx(float x) {
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}
DEVICE float rsqrt_approx(float x) {
    float r;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

// c += a b: a 16 x 16 row-major, b 16 x 8 column-major, float32 accumulators. Lane 4g + t holds
//   a0: row g, k 2t, 2t+1   a1: row g+8   a2: row g, k 2t+8, 2t+9   a3: row g+8
//   b0: column g, k 2t, 2t+1   b1: k 2t+8, 2t+9        c0 c1: row g, columns 2t, 2t+1   c2 c3: row g+8
template <bool HALF>
DEVICE void mma_m16n8k16(f32x4& c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    if constexpr (HALF)
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, "
            "%2, %3};"
            : "+f"(c.x), "+f"(c.y), "+f"(c.z), "+f"(c.w)
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    else
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, "
            "%1, %2, "
            "%3};"
            : "+f"(c.x), "+f"(c.y), "+f"(c.z), "+f"(c.w)
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// The same for bytes, a unsigned and b signed, k32, exact. Lane 4g + t holds
//   a0: row g, k 4t .. 4t+3   a1: row g+8   a2: row g, k 4t+16 ..   a3: row g+8      b0: column g, k 4t ..   b1: k
//   4t+16 ..
DEVICE void mma_m16n8k32(s32x4& c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
        "%3};"
        : "+r"(c.x), "+r"(c.y), "+r"(c.z), "+r"(c.w)
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// Of all 32 lanes.
DEVICE u32 redux_max(u32 v) {
    u32 r;
    asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(r) : "r"(v));
    return r;
}
DEVICE int redux_add(int v) {
    int r;
    asm volatile("redux.sync.add.s32 %0, %1, 0xffffffff;" : "=r"(r) : "r"(v));
    return r;
}

// The 16-bit activation type: bfloat16, or float16 when HALF.
template <bool HALF>
DEVICE float to_f32(u16 v) {
    if constexpr (HALF) {
        float r;
        asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(v));
        return r;
    } else {
        return __uint_as_float(u32(v) << 16);
    }
}
template <bool HALF>
DEVICE u16 from_f32(float v) {
    u16 r;
    if constexpr (HALF)
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r) : "f"(v));
    else
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(v));
    return r;
}
// Two of them: x in the low half.
template <bool HALF>
DEVICE u32 from_f32x2(float x, float y) {
    u32 r;
    if constexpr (HALF)
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(y), "f"(x));
    else
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(y), "f"(x));
    return r;
}
