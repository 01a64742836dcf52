// y[m, K] = weight * round(x * rsqrt(mean(x^2) + eps)), rounded as eager rounds: once behind the norm, once behind the
// gain. A block a row, the row in registers; 16-byte loads and stores. Decode has few rows: what counts is one launch
// (eager: seven) inside a chain of programmatic dependent launches. It lets its successor in when it ends, as
// attention_int4_sm90.cu does and for the same reason.
//
// Rendered constants: FU_KERNEL (name), FU_K, FU_HALF.
#include "row.cuh"

namespace {
constexpr int K = FU_K, THREADS = 256, VECTORS = (K / 8 + THREADS - 1) / THREADS;
constexpr bool HALF = FU_HALF;
static_assert(K % 8 == 0, "16-byte loads");

DEVICE u32 scaled(u32 x, u32 w, float r) {
    u32 y = 0;
#pragma unroll
    for (int i = 0; i < 32; i += 16) {
        const float n = to_f32<HALF>(from_f32<HALF>(to_f32<HALF>(u16(x >> i)) * r));
        y |= u32(from_f32<HALF>(to_f32<HALF>(u16(w >> i)) * n)) << i;
    }
    return y;
}
}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS)
    FU_KERNEL(const u16* __restrict__ x, const u16* __restrict__ weight, u16* __restrict__ y, int ldx, float eps) {
    __shared__ float sums[THREADS / 32];
    const u16* const from = x + (long long)blockIdx.x * ldx;
    u16* const to = y + (long long)blockIdx.x * K;
    u32x4 v[VECTORS], w[VECTORS];
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        const int at = (i * THREADS + int(threadIdx.x)) * 8;
        w[i] = at < K ? ld_global_cg_v4(weight + at) : u32x4{0, 0, 0, 0};
    }
    griddepcontrol_wait();
    float sum = 0;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        const int at = (i * THREADS + int(threadIdx.x)) * 8;
        v[i] = at < K ? ld_global_cg_v4(from + at) : u32x4{0, 0, 0, 0};
    }
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) sum = squares<HALF>(v[i], sum);
    const float r = rsqrt_approx(block_sum<THREADS>(sum, sums) / K + eps);
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        const int at = (i * THREADS + int(threadIdx.x)) * 8;
        if (at < K)
            *reinterpret_cast<u32x4*>(to + at) = {scaled(v[i].x, w[i].x, r), scaled(v[i].y, w[i].y, r),
                                                  scaled(v[i].z, w[i].z, r), scaled(v[i].w, w[i].w, r)};
    }
}
