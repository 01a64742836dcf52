// What a decode linear of many tokens needs of its input, once for all of its blocks: x[m, K] (times the gain of a
// norm, rounded to x's type) in the order in which mma.m16n8k16 takes it, sums of x over the groups of the weight,
// which the zero points cost, and the norm's rstd[m] = 1 / sqrt(mean(x^2) + eps).
//
//   record of 128 columns:  [32 columns][8 tokens][lane 4g + t: token g, columns 8t .. 8t + 7][16 bytes]
//                           [group][token] float32 sums, in the unit of the codes' products (int4.cuh)
//   the same for wgmma:     [32 columns][8 tokens][word q of those 16 bytes: a core matrix][token g][word of lane t]
//                           [token] the sum with its sign turned, in three bfloat16 parts of a row of 16 bytes
//
// bfloat16 values carry the powers of two of Form::scaled. Columns behind K are zeros, tokens behind m are left out: no
// sum of a token that exists meets them.
//
// A block takes one of PARTS parts of a row; with a norm one block more takes the row's squares. 128 threads of 32
// registers, so that it fits beside a block of a linear: it waits there when the kernel before ends, and lets its own
// linear in, whose weights are on their way meanwhile.
//
// Rendered constants: FU_KERNEL, FU_K, FU_GROUP, FU_TOKENS, FU_PARTS, FU_HALF, FU_RMS, FU_GAIN, FU_WG.
#include "int4.cuh"
#include "row.cuh"

namespace {
constexpr int K = FU_K, TOKENS = FU_TOKENS, NB = TOKENS / 8, PARTS = FU_PARTS, THREADS = 128;
constexpr int TILES = (K + 127) / 128, CHUNKS = TILES * 16, GROUPS = fu::kTileK / FU_GROUP, LANES = FU_GROUP / 8;
constexpr bool WGMMA = FU_WG;
constexpr int RECORD = TOKENS * (256 + (WGMMA ? 16 : GROUPS * 4));
constexpr int BLOCKS = PARTS + FU_RMS, EACH = (CHUNKS + PARTS * THREADS - 1) / (PARTS * THREADS);  // of a thread
constexpr int MOST = FU_GAIN ? 3 : 4, BATCHES = (EACH + MOST - 1) / MOST, VECTORS = (EACH + BATCHES - 1) / BATCHES;
constexpr bool HALF = FU_HALF, RMS = FU_RMS, GAIN = FU_GAIN;
using F = Form<HALF>;
static_assert(K % 8 == 0, "16-byte loads");

DEVICE float total(u32 pair) { return to_f32<HALF>(u16(pair)) + to_f32<HALF>(u16(pair >> 16)); }
}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 16)
    FU_KERNEL(const u16* __restrict__ x, const u16* __restrict__ gain, u8* __restrict__ records,
              float* __restrict__ rstd, int ldx, float eps) {
    __shared__ float sums[THREADS / 32];
    griddepcontrol_launch_dependents();
    const int row = int(blockIdx.x) / BLOCKS, part = int(blockIdx.x) % BLOCKS;
    const u16* const from = x + (long long)row * ldx;
    if (RMS && part == PARTS) {
        griddepcontrol_wait();
        float sum = 0;
#pragma unroll 4
        for (int chunk = threadIdx.x; chunk * 8 < K; chunk += THREADS)
            sum = squares<HALF>(ld_global_cg_v4(from + chunk * 8), sum);
        sum = block_sum<THREADS>(sum, sums);
        if (threadIdx.x == 0) rstd[row] = rsqrt_approx(sum / K + eps);
        return;
    }
    int first = part * (BATCHES * VECTORS * THREADS) + int(threadIdx.x);
    if (GAIN) {  // into L1: registers do not hold it beside x
        u32 seen = 0;
#pragma unroll
        for (int i = 0; i < BATCHES * VECTORS; ++i)
            if ((first + i * THREADS) * 8 < K) seen |= ld_global_nc_v4(gain + (first + i * THREADS) * 8).x;
        if (seen == 1) griddepcontrol_wait();  // a use, without which the compiler drops the loads
    }
    griddepcontrol_wait();
#pragma unroll
    for (int batch = 0; batch < BATCHES; ++batch, first += VECTORS * THREADS) {
        u32x4 v[VECTORS];
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            const int chunk = first + i * THREADS;
            v[i] = chunk * 8 < K ? ld_global_cg_v4(from + chunk * 8) : u32x4{0, 0, 0, 0};
        }
        const int place = threadIdx.x % 16;
        u8* const records_here = records + (long long)(first / 16) * RECORD;
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            const int chunk = first + i * THREADS;
            if (GAIN) v[i] = F::times_gain(v[i], chunk * 8 < K ? ld_global_nc_v4(gain + chunk * 8) : u32x4{0, 0, 0, 0});
            float group = total(v[i].x) + total(v[i].y) + (total(v[i].z) + total(v[i].w));
#pragma unroll
            for (int m = 1; m < LANES; m *= 2) group += __shfl_xor_sync(0xffffffffu, group, m);
            if (chunk >= CHUNKS) continue;
            u8* const to = records_here + i * (THREADS / 16 * RECORD);
            const u32x4 w = F::scaled(v[i]);
            u8* const block = to + (place / 4 * NB + row / 8) * 512;
            group *= F::SUM_SCALE / F::UNIT;
            if constexpr (WGMMA) {
                u32* const words = reinterpret_cast<u32*>(block + row % 8 * 16 + place % 4 * 4);
                words[0] = w.x, words[32] = w.y, words[64] = w.z, words[96] = w.w;
                if (place == 0) {
                    const u16 high = from_f32<false>(-group);
                    float rest = -group - to_f32<false>(high);
                    const u16 middle = from_f32<false>(rest);
                    rest -= to_f32<false>(middle);
                    *reinterpret_cast<u32x4*>(to + TOKENS * 256 + row * 16) = {high | u32(middle) << 16,
                                                                               from_f32<false>(rest), 0, 0};
                }
            } else {
                *reinterpret_cast<u32x4*>(block + (row % 8 * 4 + place % 4) * 16) = w;
                if (place % LANES == 0)
                    *reinterpret_cast<float*>(to + TOKENS * 256 + (place / LANES * TOKENS + row) * 4) = group;
            }
        }
    }
}
