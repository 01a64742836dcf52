// rstd[m] = 1 / sqrt(mean(x[m]^2) + eps), and y[m, K] = round(x[m] gain) where there is a gain: what a decode linear of
// many tokens needs of the norm before it. A block a row, the row in registers. The gain is read before
// griddepcontrol.wait: it is a packed weight's peer, finished before any graph runs.
//
// 128 threads, so that it fits beside two blocks of a linear; it lets the linear in at once, whose weights are on their
// way meanwhile.
//
// Rendered constants: FU_KERNEL, FU_K, FU_HALF, FU_GAIN.
#include "ptx.cuh"

namespace {
constexpr int K = FU_K, THREADS = 128, VECTORS = (K / 8 + THREADS - 1) / THREADS;
constexpr bool HALF = FU_HALF, GAIN = FU_GAIN;
static_assert(K % 8 == 0, "16-byte loads");

DEVICE float squares(u32 x, float sum) {
    const float a = to_f32<HALF>(u16(x)), b = to_f32<HALF>(u16(x >> 16));
    return fmaf(a, a, fmaf(b, b, sum));
}
DEVICE u32 product(u32 x, u32 gain) { return HALF ? mul_f16x2(x, gain) : mul_bf16x2(x, gain); }
}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS)
    FU_KERNEL(const u16* __restrict__ x, const u16* __restrict__ gain, u16* __restrict__ y, float* __restrict__ rstd,
              int ldx, float eps) {
    __shared__ float sums[THREADS / 32];
    griddepcontrol_launch_dependents();
    const u16* const from = x + (long long)blockIdx.x * ldx;
    u16* const to = y + (long long)blockIdx.x * K;
    griddepcontrol_wait();
    u32x4 v[VECTORS];
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        const int at = (i * THREADS + int(threadIdx.x)) * 8;
        v[i] = at < K ? ld_global_cg_v4(from + at) : u32x4{0, 0, 0, 0};
    }
    float sum = 0;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        const int at = (i * THREADS + int(threadIdx.x)) * 8;
        sum = squares(v[i].x, squares(v[i].y, squares(v[i].z, squares(v[i].w, sum))));
        if (GAIN && at < K) {
            const u32x4 g = ld_global_nc_v4(gain + at);
            *reinterpret_cast<u32x4*>(to + at) = {product(v[i].x, g.x), product(v[i].y, g.y), product(v[i].z, g.z),
                                                  product(v[i].w, g.w)};
        }
    }
#pragma unroll
    for (int m = 16; m > 0; m /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, m);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
        sum = 0;
#pragma unroll
        for (int i = 0; i < THREADS / 32; ++i) sum += sums[i];
        rstd[blockIdx.x] = rsqrt_approx(sum / K + eps);
    }
}
