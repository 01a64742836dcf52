// PTX of the GEMM (csrc/gemm_sm90.cu): tensor maps, multicast, wgmma. One wrapper per instruction, named after it.
#pragma once
#include "ptx.cuh"

// What cuTensorMapEncodeTiled writes.
struct alignas(64) TensorMap {
    u64 opaque[16];
};

// ---- barriers over a cluster ---------------------------------------------------------------------------------------

// `bar` as `mapa` gives it. Without a scope: what arrives here are slots that only the async proxy has read, and
// `.release.cluster` would flush to the whole GPU before each (MEMBAR.ALL.GPU: a quarter of a GEMM's time).
DEVICE void mbarrier_arrive_cluster(u32 bar) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(bar) : "memory");
}
template <int N>
DEVICE void setmaxnreg_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N>
DEVICE void setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

// ---- tensor copies -------------------------------------------------------------------------------------------------

DEVICE void prefetch_tensormap(const TensorMap* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }
// c0: element within a row, c1: row. What lies outside the tensor arrives as zeros.
DEVICE void cp_async_bulk_tensor_load(u32 dst, const TensorMap* map, int c0, int c1, u32 bar) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
            dst),
        "l"(map), "r"(c0), "r"(c1), "r"(bar)
        : "memory");
}
// To the same place in every block of the mask, and counted on the barrier at the same place there.
DEVICE void cp_async_bulk_tensor_multicast(u32 dst, const TensorMap* map, int c0, int c1, u32 bar, u16 mask) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, "
        "{%2, %3}], [%4], %5;" ::"r"(dst),
        "l"(map), "r"(c0), "r"(c1), "r"(bar), "h"(mask)
        : "memory");
}
// What lies outside the tensor is not written.
DEVICE void cp_async_bulk_tensor_store(const TensorMap* map, int c0, int c1, u32 src) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(map), "r"(c0),
                 "r"(c1), "r"(src)
                 : "memory");
}
DEVICE void cp_async_bulk_commit_group() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
DEVICE void cp_async_bulk_wait_group_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
DEVICE void cp_async_bulk_wait_group() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// ---- fragments and shared memory -----------------------------------------------------------------------------------

// Four 8 x 8 matrices of 16 bits; lane 8i + r gives the address of row r of matrix i, and holds of each matrix what
// movmatrix_trans says.
DEVICE void stmatrix_x4(u32 a, u32 r0, u32 r1, u32 r2, u32 r3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(a), "r"(r0), "r"(r1), "r"(r2),
                 "r"(r3)
                 : "memory");
}
DEVICE void ldmatrix_x4(u32 a, u32& r0, u32& r1, u32& r2, u32& r3) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r0), "=r"(r1), "=r"(r2), "=r"(r3)
                 : "r"(a)
                 : "memory");
}
DEVICE u32 ld_global_nc_u32(const void* p) {
    u32 v;
    asm("ld.global.nc.u32 %0, [%1];" : "=r"(v) : "l"(p));
    return v;
}
// The same where they stand: the compiler does not load them ahead.
DEVICE u32 ld_global_nc_u32_here(const void* p) {
    u32 v;
    asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(v) : "l"(p));
    return v;
}
DEVICE void st_global_v2(void* p, u32 x, u32 y) {
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(p), "r"(x), "r"(y) : "memory");
}
// Computed where this stands: the compiler would move what leads to it to its first use.
DEVICE void computed_here(int& v) { asm volatile("" : "+r"(v)); }
DEVICE float rcp_approx(float x) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}
// Two e4m3 bytes, x in the low one; beyond 448 they saturate.
DEVICE u16 cvt_e4m3x2(float x, float y) {
    u16 r;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(y), "f"(x));
    return r;
}

// ---- over all blocks
// --------------------------------------------------------------------------------------------------

// v >= 0, where floats are ordered as their bits.
DEVICE void red_max(float* p, float v) {
    asm volatile("red.global.max.u32 [%0], %1;" ::"l"(p), "r"(__float_as_uint(v)) : "memory");
}
// How often it was called before, on a word that was zero.
DEVICE u32 atom_count(float* p) {
    u32 r;
    asm volatile("atom.global.acq_rel.gpu.add.u32 %0, [%1], 1;" : "=r"(r) : "l"(p) : "memory");
    return r;
}
DEVICE float ld_global_cg_f32(const float* p) { return __uint_as_float(ld_global_cg_u32(p)); }

// ---- wgmma ---------------------------------------------------------------------------------------------------------

DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N>
DEVICE void wgmma_wait_group() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

// Operand in shared memory, K-major, rows of 128 bytes in the 128-byte swizzle: groups of 8 rows are 1024 bytes apart.
DEVICE u64 wgmma_descriptor(u32 smem) {
    return u64((smem & 0x3FFFF) >> 4) | (u64(1) << 16) | (u64(64) << 32) | (u64(1) << 62);
}

// d += a b, bfloat16: a 64 x 16 (16 rows a warp, as mma_m16n8k16 has them), b 8 NB x 16 in shared memory.
template <int NB>
DEVICE void wgmma_m64k16(f32x4 (&d)[NB], u32 a0, u32 a1, u32 a2, u32 a3, u64 b) {
#define FU_RS(SHAPE, REGS, A, B)                                                                                      \
    "{\n .reg .pred p;\n setp.ne.b32 p, 1, 0;\n wgmma.mma_async.sync.aligned." SHAPE ".f32.bf16.bf16 {" REGS "}, {" A \
    "}, " B ", p, 1, 1, 0;\n}"
#define FU_DF(i) "+f"(d[i].x), "+f"(d[i].y), "+f"(d[i].z), "+f"(d[i].w)
#define FU_AB "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b)
    if constexpr (NB == 1)
        asm volatile(FU_RS("m64n8k16", "%0, %1, %2, %3", "%4, %5, %6, %7", "%8") : FU_DF(0) : FU_AB);
    else if constexpr (NB == 2)
        asm volatile(FU_RS("m64n16k16", "%0, %1, %2, %3, %4, %5, %6, %7", "%8, %9, %10, %11", "%12")
                     : FU_DF(0), FU_DF(1)
                     : FU_AB);
    else if constexpr (NB == 4)
        asm volatile(FU_RS("m64n32k16", "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15",
                           "%16, %17, %18, %19", "%20")
                     : FU_DF(0), FU_DF(1), FU_DF(2), FU_DF(3)
                     : FU_AB);
#undef FU_RS
#undef FU_DF
#undef FU_AB
}

#define FU_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define FU_D16(i) FU_D4(i), FU_D4(i + 4), FU_D4(i + 8), FU_D4(i + 12)
#define FU_D32(i) FU_D16(i), FU_D16(i + 16)

#define FU_REGS_64                                                                     \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, " \
    "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define FU_OPS_64 FU_D32(0)
#define FU_TAIL_64 "}, %32, %33, p, 1, 1"
#define FU_PRED_64 "setp.ne.b32 p, %34, 0;\n"
#define FU_REGS_128                                                                    \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, " \
    "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, " \
    "%34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, " \
    "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define FU_OPS_128 FU_D32(0), FU_D32(32)
#define FU_TAIL_128 "}, %64, %65, p, 1, 1"
#define FU_PRED_128 "setp.ne.b32 p, %66, 0;\n"
#define FU_REGS_192                                                                    \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, " \
    "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, " \
    "%34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, " \
    "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, " \
    "%66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, " \
    "%82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define FU_OPS_192 FU_D32(0), FU_D32(32), FU_D32(64)
#define FU_TAIL_192 "}, %96, %97, p, 1, 1"
#define FU_PRED_192 "setp.ne.b32 p, %98, 0;\n"
#define FU_REGS_256                                                                        \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "     \
    "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, "     \
    "%34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, "     \
    "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, "     \
    "%66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, "     \
    "%82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, "     \
    "%98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "   \
    "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, " \
    "%126, %127"
#define FU_OPS_256 FU_D32(0), FU_D32(32), FU_D32(64), FU_D32(96)
#define FU_TAIL_256 "}, %128, %129, p, 1, 1"
#define FU_PRED_256 "setp.ne.b32 p, %130, 0;\n"

#define FU_WGMMA(N, K, TYPE, MAJOR)                                                                     \
    asm volatile("{\n.reg .pred p;\n" FU_PRED_##N "wgmma.mma_async.sync.aligned.m64n" #N K ".f32." TYPE \
                                                  " {" FU_REGS_##N FU_TAIL_##N MAJOR ";\n}\n"           \
                 : FU_OPS_##N                                                                           \
                 : "l"(a), "l"(b), "r"(add))
#define FU_WGMMA_OF(N)                           \
    if constexpr (TYPE == E4M3)                  \
        FU_WGMMA(N, "k32", "e4m3.e4m3", "");     \
    else if constexpr (TYPE == F16)              \
        FU_WGMMA(N, "k16", "f16.f16", ", 0, 0"); \
    else                                         \
        FU_WGMMA(N, "k16", "bf16.bf16", ", 0, 0")

enum Operand { BF16, F16, E4M3 };

// d = a b^T (add == 0) or d + a b^T: a 64 rows, b N rows of 32 bytes each, float32 accumulators. Lane 4g + t of warp w
// holds rows 16w + g (d[4j], d[4j + 1]) and 16w + g + 8 (d[4j + 2], d[4j + 3]), columns 8j + 2t, 8j + 2t + 1.
template <int N, Operand TYPE>
DEVICE void wgmma(float (&d)[N / 2], u64 a, u64 b, int add) {
    if constexpr (N == 64) {
        FU_WGMMA_OF(64);
    } else if constexpr (N == 128) {
        FU_WGMMA_OF(128);
    } else if constexpr (N == 192) {
        FU_WGMMA_OF(192);
    } else {
        static_assert(N == 256, "a width that wgmma has");
        FU_WGMMA_OF(256);
    }
}
