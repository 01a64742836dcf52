// What a GEMM needs of its input rows. One block a row, the row in registers, one pass over memory.
//
//     RMS, no CODES    rstd[row] = 1 / sqrt(mean(x^2) + eps)                   read 2 K bytes a row
//     CODES            e4m3 of P(x) / scale, P = RMS normalisation or nothing   read 2 K, write K bytes a row
//
// The scale is delayed (formats.fp8_quantize): every block codes its row with the scale that the history plans. The
// last block to finish knows the largest value of the call; it records it, and where the plan was too small, or there
// was none, it codes everything again by itself. That is slow and happens once in the life of a history. With dynamic
// scales there is no plan: a first launch measures (phase 1), a second one codes (phase 2). With one scale per row
// (ROWS) every block knows its own; it is written in the place of rstd.
#include "gemm_fp8_state.cuh"
#include "gemm_ptx.cuh"

constexpr int K = FU_K, THREADS = FU_THREADS, VECTORS = (K / 8 + THREADS - 1) / THREADS;
constexpr bool RMS = FU_RMS, CODES = FU_CODES, HALF = FU_HALF;
static_assert(K % 8 == 0 && THREADS % 32 == 0 && THREADS <= 1024, "16-byte loads, whole warps");

struct Row {
    u32 words[VECTORS][4];  // as loaded: 16 bits a value, half of the registers that float32 would take
    float rstd = 1.0f;

    DEVICE void load(const u16* row) {
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            const int at = i * THREADS + threadIdx.x;
            u32x4 v = {};
            if (at < K / 8) v = ld_global_cg_v4(row + at * 8);
            words[i][0] = v.x, words[i][1] = v.y, words[i][2] = v.z, words[i][3] = v.w;
        }
    }
    DEVICE float raw(int i, int j) const { return to_f32<HALF>(u16(words[i][j / 2] >> (j % 2 * 16))); }
    // What is multiplied; infinities are NaN.
    DEVICE float value(int i, int j) const { return nan_unless_finite(raw(i, j) * rstd); }
    template <class F>
    DEVICE void each(F f) const {
#pragma unroll
        for (int i = 0; i < VECTORS; ++i)
#pragma unroll
            for (int j = 0; j < 8; ++j) f(i, j);
    }
    // x / scale as the reference rounds it: a reciprocal would move values off the middle between two codes, where many
    // are when the scale is a row's own. By a power of two both are the same.
    DEVICE void store(u8* row, float scale) const {
        if (__float_as_uint(scale) << 9) {
            write(row, [&](float v) { return v / scale; });
        } else {
            const float inverse = 1.0f / scale;
            write(row, [&](float v) { return v * inverse; });
        }
    }
    template <class F>
    DEVICE void write(u8* row, F scaled) const {
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            const int at = i * THREADS + threadIdx.x;
            u32 words[2];
#pragma unroll
            for (int j = 0; j < 2; ++j)
                words[j] = cvt_e4m3x2(scaled(value(i, 4 * j)), scaled(value(i, 4 * j + 1))) |
                           u32(cvt_e4m3x2(scaled(value(i, 4 * j + 2)), scaled(value(i, 4 * j + 3)))) << 16;
            if (at < K / 8) st_global_v2(row + at * 8, words[0], words[1]);
        }
    }
};

__shared__ float warps[32];
__shared__ float planned;  // the scale that this block codes with; 0: none yet
__shared__ float again;    // the scale that the last block codes everything with; 0: what is there is right
__shared__ bool last;

template <class F>
DEVICE float over_block(float v, F f) {
#pragma unroll
    for (int i = 16; i > 0; i /= 2) v = f(v, __shfl_xor_sync(0xFFFFFFFF, v, i));
    __syncthreads();
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = v;
    __syncthreads();
    v = warps[0];
#pragma unroll
    for (int i = 1; i < THREADS / 32; ++i) v = f(v, warps[i]);
    return v;
}

DEVICE void prepare(Row& row, const u16* x, float eps) {
    row.load(x);
    if constexpr (RMS) {
        float sum = 0.0f;
        row.each([&](int i, int j) { sum += row.raw(i, j) * row.raw(i, j); });
        sum = over_block(sum, [](float a, float b) { return a + b; });
        row.rstd = 1.0f / sqrtf(sum * (1.0f / K) + eps);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    FU_KERNEL(const u16* x, u8* codes, float* rstd, float* state, float* step, int ldx, float eps, int scaling,
              int phase) {
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    const u16* const in = x + (long long)blockIdx.x * ldx;
    Row row;
    if constexpr (!CODES) {
        prepare(row, in, eps);
        if (threadIdx.x == 0) rstd[blockIdx.x] = row.rstd;
    } else {
        const int lane = threadIdx.x % 32;
        const bool reads = threadIdx.x < 32;  // one warp deals with the state; in the others `before` is empty
        const Fp8State before(state, reads ? lane : 32);
        const Fp8Plan plan = before.plan(scaling, lane);
        const float measured = before.at(AMAX);
        if (threadIdx.x == 0) planned = phase == 2 ? fp8_choose(plan, measured, scaling).scale : plan.scale;
        prepare(row, in, eps);
        __syncthreads();
        u8* const out = codes + (long long)blockIdx.x * K;
        if (phase == 2) {
            row.store(out, planned);
        } else {
            float amax = 0.0f, bad = 0.0f;
            row.each([&](int i, int j) { amax = fmaxf(amax, fabsf(row.value(i, j))), bad += row.value(i, j) * 0.0f; });
            amax = over_block(amax, [](float a, float b) { return fmaxf(a, b); });
            if (threadIdx.x == 0) red_max(state + AMAX, amax);
            if (bad != bad) red_max(state + BAD, 1.0f);
            if (phase == 1) return;
            if (scaling == ROWS) {
                const float scale = row_scale(amax);
                row.store(out, scale);
                if (threadIdx.x == 0) rstd[blockIdx.x] = scale;
            } else if (planned != 0.0f) {
                row.store(out, planned);
            }
        }
        // Writes and maxima of this block before its arrival, those of all blocks before the last one goes on.
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) last = atom_count(state + ARRIVED) == gridDim.x - 1;
        __syncthreads();
        if (!last) return;
        __threadfence();
        if (reads) {
            const Fp8State after(state, lane);
            const float amax = after.at(AMAX), bad = after.at(BAD);
            const Fp8Choice choice = fp8_choose(plan, amax, scaling);
            if (lane == 0) {
                if (scaling != ROWS) *step = choice.scale;
                again = phase == 0 && choice.again ? choice.scale : 0.0f;
            }
            fp8_record(state, before, choice, plan.frozen, amax, bad > 0.0f, scaling, lane);
        }
        __syncthreads();
        if (again != 0.0f)
            for (int r = 0; r < int(gridDim.x); ++r) {
                prepare(row, x + (long long)r * ldx, eps);
                row.store(codes + (long long)r * K, again);
            }
    }
}
