// One decode step of one layer's attention, in one launch: RoPE (and the norms per head), the new row of the cache, the
// INT4 copy of a page that fills, attention over INT4 pages and exact rows, the merge of its own splits. Hopper
// (sm_90a).
//
//   tokens    0 ............ 64 c | 64 c ... first-1 | first      c = first / 64 pages that were complete before this
//   call read as   INT4 pages          | exact rows       | this call's row, from shared memory
//
//   cluster (of CLUSTER blocks)   one sequence, one key/value head and HEADS of the query heads that share it
//   warp                          slices of 16 tokens: an INT4 slice is 16 x D/2 bytes, straight into registers in the
//                                 order in which they are stored; the next slice is in flight while this one is used
//   last warps of the cluster     first the exact slices, at most four, through shared memory (cp.async)
//   merge                         warps in shared memory, then every block pushes its sums of one CHUNK of the output
//                                 to the block that finishes it: one cluster barrier, no scratch, no atomics
//
// Scores are S = K Q^T on mma.m16n8k16: 16 tokens are the rows, query heads the 8 columns. A lane's 16 bytes of a token
// are the columns of its quad position (formats.encode_rows), and a dot product does not care for the order of columns,
// so a mask alone turns codes into subnormal float16 (c 2^-24, or 16 c 2^-24, for which Q is divided by 16). Q meets
// the codes as H (balance q), from which the mean's part stands apart: q k = s (sum_d (c - 8) q'_d) + q mean. Q and the
// softmax weights are split into two 16-bit numbers, so nothing is rounded to 8 bits: with up to four heads the second
// halves take the four columns that would be idle, with more they cost a second mma.
// O^T = V^T P^T: rows are columns of V. Tokens 2t, 2t+1, 2t+8, 2t+9 meet in a lane, prmt joins two of them, and the
// weights p s_v 2^100 (bfloat16) meet codes c 2^-133. P goes from accumulators to operands by movmatrix.
//
// Bytes: D + 4 per token and key/value head; roofline B Hkv L (D + 4) / 4.3 TB/s, 0.25 us at 8B, batch 1, 1K: what
// counts there is latency. With programmatic dependent launch the first slices are in registers before
// griddepcontrol.wait. What is read before it: tables, mask, position and pages older than the newest. None of these is
// written by one of our own kernels in the same step, and every other kernel ends before its successor starts.
// The next kernel is let in when this one ends, not earlier: linears are 132 blocks of half an SM each, and a grid that
// fills some SMs only makes the scheduler put two of their blocks on one SM and none on another, for several kernels on
// (measured, 8B layer at batch 1: 60 us with griddepcontrol.launch_dependents at any place, 45 us without).
// The number of tokens is read on the device; the grid depends on the batch alone. Past `limit` nothing is written and
// the output is NaN. One order of summation for a given number of tokens and grid: same input, same bits.
//
// Rendered constants: FU_KERNEL (name), FU_D, FU_ROTATED, FU_GROUP (query heads of a key/value head), FU_HEADS (of a
// block), FU_KV_HEADS, FU_CLUSTER, FU_SMEM, FU_HALF, FU_COS32, FU_QNORM, FU_KNORM, FU_MASK (0 none, 1 bool, 2 like
// the activations, 3 float32).
#include "head.cuh"

namespace {
constexpr int GROUP = FU_GROUP, HEADS = FU_HEADS, KV = FU_KV_HEADS, CLUSTER = FU_CLUSTER;
constexpr int WARPS = 8, THREADS = WARPS * 32, WORKERS = WARPS * CLUSTER, PARTS = (GROUP + HEADS - 1) / HEADS;
constexpr bool COS32 = FU_COS32, QNORM = FU_QNORM, KNORM = FU_KNORM;
constexpr int MASK = FU_MASK;
constexpr bool PAIRED = HEADS <= 4;  // both halves of Q and P stand in one operand
static_assert(HEADS <= 8, "the lowering refuses everything else");

constexpr int VW = D / 64;   // words of a lane's part of a value
constexpr bool VH = NI % 2;  // and a half word
constexpr int MT = D / 16;   // tiles of O^T
constexpr int SETS = PAIRED ? 1 : 2;
constexpr int PITCH = D * 2 + 16;  // bytes between exact rows in shared memory
constexpr int EXACT = (4 + CLUSTER - 1) / CLUSTER;
constexpr int CHUNK = HEADS * D / CLUSTER;  // outputs that one block finishes
constexpr float HIDDEN = -32752.0f;         // an additive mask below this hides the slot
constexpr float LOG2E = 1.4426950408889634f;
constexpr float UNIT_EVEN = 0x1p33f, UNIT_ODD = 0x1p29f;  // of the sums in even and odd tiles

// shared memory
constexpr int QCODES = 0;                                 // [set][i][lane] 16 bytes: Q as the operand beside codes
constexpr int QEXACT = QCODES + SETS * NI * 512;          // beside exact rows
constexpr int FACTORS = QEXACT + SETS * NI * 512;         // [8 heads] f32x4
constexpr int KROW = FACTORS + 128, VROW = KROW + D * 2;  // this call's row
constexpr int RECEIVED = VROW + D * 2;                    // [rank][CHUNK] f32
constexpr int SUMS = RECEIVED + (CLUSTER > 1 ? HEADS * D * 4 : 0);      // [rank][HEADS] (max, sum)
constexpr int WARPSUMS = SUMS + CLUSTER * HEADS * 8;                    // [warp][HEADS] (max, sum)
constexpr int PARTIAL = (WARPSUMS + WARPS * HEADS * 8 + 15) / 16 * 16;  // [warp][HEADS][D] f32
constexpr int ROWS = PARTIAL + WARPS * HEADS * D * 4;                   // [exact slice][k, v][16] rows
constexpr int BYTES = ROWS + EXACT * 2 * 16 * PITCH;
static_assert(BYTES == FU_SMEM, "the lowering computes the same size");

constexpr u32 LOW = 0x000f000fu, HIGH = 0x00f000f0u;

// Column of nibble n of a row: the inverse of fu::kv_nibble.
FU_HD constexpr int column(int n) { return n / 2 % (D / 8) * 8 + n / 2 / (D / 8) * 2 + n % 2; }
FU_HD constexpr bool inverse() {
    for (int n = 0; n < D; ++n)
        if (fu::kv_nibble(column(n), D) != n) return false;
    return true;
}
static_assert(inverse(), "column() inverts kv_nibble()");
// First nibble of the four (even tile: n, n + 2; odd tile: n + 1, n + 3) that lane g holds in tiles 2 pair, 2 pair + 1.
DEVICE int nibble_of(int pair, int g) {
    return pair < 2 * VW ? (g * VW + pair / 2) * 8 + pair % 2 * 4 : (VW * 16 + g) * 4;
}

// The power of two that brings the largest magnitude of a head to 1024 .. 2048, and its inverse.
struct Range {
    float up, down;
};
DEVICE Range range_of(const Head& x) {
    float most = 0;
#pragma unroll
    for (int i = 0; i < NI; ++i) most = fmaxf(most, fabsf(x.v[i]));
    const u32 e = max(__float_as_uint(warp_max(most)) >> 23, 11u);
    return {__uint_as_float((264 - e) << 23), __uint_as_float((e - 10) << 23)};
}

// Q as the operand beside codes; returns the sum of what was stored. EXACT_ROWS: beside exact rows.
template <bool EXACT_ROWS>
DEVICE float store_q(u32 base, const Head& q, float up, int h, int lane) {
    constexpr bool F16 = EXACT_ROWS ? HALF : true;
    // EXACT_ROWS: lane t of a quad holds 8 contiguous columns; else columns 2t, 2t+1 of each 8
    const int t = EXACT_ROWS ? lane >> 3 : lane >> 1 & 3, a = lane >> 3, r = lane & 7;
    const int word = EXACT_ROWS ? r >> 1 : (lane & 1) * 2 + (a & 1), half = EXACT_ROWS ? r & 1 : a >> 1;
    const float unit = !EXACT_ROWS && (lane & 1) ? 0.0625f : 1.0f;
    const u32 at = base + (4 * h + t) * 16 + word * 4 + half * 2;
    float sum = 0;
#pragma unroll
    for (int i = 0; i < NI; ++i) {
        const float v = q.v[i] * up, hi = to_f32<F16>(from_f32<F16>(v)), lo = to_f32<F16>(from_f32<F16>(v - hi));
        sum += hi + lo;
        st_shared_u16(at + i * 512, from_f32<F16>(hi * unit));
        st_shared_u16(at + i * 512 + (PAIRED ? 4 * 64 : NI * 512), from_f32<F16>(lo * unit));
    }
    return warp_sum(sum);
}

// ---- slices --------------------------------------------------------------------------------------------------------

template <int WORDS>
DEVICE void load_words(const u8* from, u32* to) {
    if constexpr (WORDS % 4 == 0) {
#pragma unroll
        for (int i = 0; i < WORDS; i += 4) {
            const u32x4 v = ld_global_cg_v4(from + i * 4);
            to[i] = v.x, to[i + 1] = v.y, to[i + 2] = v.z, to[i + 3] = v.w;
        }
    } else if constexpr (WORDS % 2 == 0) {
#pragma unroll
        for (int i = 0; i < WORDS; i += 2) ld_global_cg_v2(from + i * 4, to[i], to[i + 1]);
    } else {
#pragma unroll
        for (int i = 0; i < WORDS; ++i) to[i] = ld_global_cg_u32(from + i * 4);
    }
}

// What a lane needs of an INT4 slice: tokens g, g+8 of K, tokens 2t, 2t+1, 2t+8, 2t+9 of V.
struct Slice {
    u32 k[2][NI];
    u32 v[4][VW + VH];  // the last is a half word
    u16 ks[2], vs[2];
    float mask[2];
};

struct Cache {
    const u8 *k_codes, *v_codes;  // of this sequence and head
    const u16 *k_scales, *v_scales;
    const u8* mask;  // of this sequence
    int mask_columns;

    // What the mask adds to the score of a token, in powers of two; -infinity: hidden
    DEVICE float shown(int token) const {
        if constexpr (MASK == 0) {
            return 0;
        } else {
            if (token >= mask_columns) return -infinity();
            if constexpr (MASK == 1) return mask[token] ? 0 : -infinity();
            const float v = MASK == 2 ? to_f32<HALF>(((const u16*)mask)[token]) : ((const float*)mask)[token];
            return v > HIDDEN ? v * LOG2E : -infinity();
        }
    }
    DEVICE void load(Slice& s, int slice, int g, int t) const {
        const long long row = (long long)slice * 16;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            load_words<NI>(k_codes + (row + g + 8 * r) * (D / 2) + t * (D / 8), s.k[r]);
            s.ks[r] = ld_global_cg_u16(k_scales + row + g + 8 * r);
            s.vs[r] = ld_global_cg_u16(v_scales + row + g + 8 * r);
            s.mask[r] = shown(int(row) + g + 8 * r);
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const u8* from = v_codes + (row + 2 * t + (j & 1) + (j >> 1) * 8) * (D / 2);
            if constexpr (VW > 0) load_words<VW>(from + g * VW * 4, s.v[j]);
            if constexpr (VH) s.v[j][VW] = ld_global_cg_u16((const u16*)(from + VW * 32 + g * 2));
        }
    }
};

// What one lane keeps for its two heads: a (columns 2t) and b. With PAIRED lanes t and t^2 have the same heads.
struct State {
    float m[2], l[2], zero[2];  // maximum, sum of weights, sum of weights times scales
    f32x4 acc[MT];
};
// P as the second operand
struct Weights {
    u32 b0, b1, lo0, lo1;
};
DEVICE float times_two(float a, float b) { return a == -infinity() ? 0.0f : ex2_approx(a - b); }

// x: scores in powers of two of (token g, head a), (g, b), (g+8, a), (g+8, b), -infinity: hidden; f: what the weights
// of tokens g and g+8 are multiplied by. Brings the state to the new maximum.
template <bool INT4>
DEVICE Weights softmax(State& s, const float (&x)[4], float f0, float f1, int t) {
    constexpr bool F16 = INT4 ? false : HALF;
    float most[2] = {fmaxf(x[0], x[2]), fmaxf(x[1], x[3])};
#pragma unroll
    for (int m = 4; m < 32; m *= 2)
#pragma unroll
        for (int i = 0; i < 2; ++i) most[i] = fmaxf(most[i], __shfl_xor_sync(ALL, most[i], m));
    if (__any_sync(ALL, most[0] > s.m[0] || most[1] > s.m[1])) {
        float c[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            most[i] = fmaxf(most[i], s.m[i]);
            c[i] = times_two(s.m[i], most[i]);
            s.m[i] = most[i], s.l[i] *= c[i], s.zero[i] *= c[i];
        }
#pragma unroll
        for (int i = 0; i < MT; ++i) s.acc[i].x *= c[0], s.acc[i].y *= c[1], s.acc[i].z *= c[0], s.acc[i].w *= c[1];
    }
    float w[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float p = x[i] == -infinity() ? 0.0f : ex2_approx(x[i] - s.m[i & 1]);
        s.l[i & 1] += p;
        w[i] = x[i] == -infinity() ? 0.0f : p * (i < 2 ? f0 : f1);
    }
    const u32 h0 = from_f32x2<F16>(w[0], w[1]), h1 = from_f32x2<F16>(w[2], w[3]);
    const float r[4] = {to_f32<F16>(u16(h0)), to_f32<F16>(u16(h0 >> 16)), to_f32<F16>(u16(h1)),
                        to_f32<F16>(u16(h1 >> 16))};
    const u32 l0 = from_f32x2<F16>(w[0] - r[0], w[1] - r[1]), l1 = from_f32x2<F16>(w[2] - r[2], w[3] - r[3]);
    if constexpr (INT4) {
        s.zero[0] += r[0] + to_f32<F16>(u16(l0)) + r[2] + to_f32<F16>(u16(l1));
        s.zero[1] += r[1] + to_f32<F16>(u16(l0 >> 16)) + r[3] + to_f32<F16>(u16(l1 >> 16));
    }
    if constexpr (PAIRED) return {movmatrix_trans(t < 2 ? h0 : l0), movmatrix_trans(t < 2 ? h1 : l1), 0, 0};
    return {movmatrix_trans(h0), movmatrix_trans(h1), movmatrix_trans(l0), movmatrix_trans(l1)};
}

template <bool F16>
DEVICE void times_weights(f32x4& acc, u32 a0, u32 a1, u32 a2, u32 a3, const Weights& p) {
    mma_m16n8k16<F16>(acc, a0, a1, a2, a3, p.b0, p.b1);
    if constexpr (!PAIRED) mma_m16n8k16<F16>(acc, a0, a1, a2, a3, p.lo0, p.lo1);
}

// Both halves of Q: sums of heads a and b of tokens g and g+8.
DEVICE void scores_of(f32x4 even, f32x4 odd, float (&s)[4]) {
    s[0] = even.x + odd.x, s[1] = even.y + odd.y, s[2] = even.z + odd.z, s[3] = even.w + odd.w;
    if constexpr (PAIRED)
#pragma unroll
        for (int i = 0; i < 4; ++i) s[i] += __shfl_xor_sync(ALL, s[i], 2);
}

// Factors of one head: score = s (code_unit sum - code_zero) + mean, or exact sum; all in powers of two.
struct Factors {
    float code_unit, code_zero, mean, exact;
};

DEVICE void attend_codes(State& state, const Slice& c, u32 smem, const Factors (&f)[2], int lane) {
    f32x4 even = {0, 0, 0, 0}, odd = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < NI; ++i) {
        const u32 w0 = c.k[0][i], w1 = c.k[1][i], s0 = w0 >> 8, s1 = w1 >> 8;
#pragma unroll
        for (int set = 0; set < SETS; ++set) {
            const u32x4 q = ld_shared_v4(smem + QCODES + (set * NI + i) * 512 + lane * 16);
            mma_m16n8k16<true>(even, w0 & LOW, w1 & LOW, s0 & LOW, s1 & LOW, q.x, q.y);
            mma_m16n8k16<true>(odd, w0 & HIGH, w1 & HIGH, s0 & HIGH, s1 & HIGH, q.z, q.w);
        }
    }
    float s[4], x[4];
    scores_of(even, odd, s);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const Factors& h = f[i & 1];
        const float ks = to_f32<true>(c.ks[i >> 1]), m = c.mask[i >> 1];
        const float v = fmaf(ks, fmaf(h.code_unit, s[i], -h.code_zero), h.mean);
        x[i] = MASK == 0 ? v : m == -infinity() ? m : v + m;
    }
    const Weights p =
        softmax<true>(state, x, to_f32<true>(c.vs[0]) * 0x1p100f, to_f32<true>(c.vs[1]) * 0x1p100f, lane & 3);
    auto tiles = [&](f32x4& first, f32x4& second, u32 near, u32 far) {  // tokens 2t, 2t+1 and 2t+8, 2t+9
        const u32 n = near >> 8, o = far >> 8;
        times_weights<false>(first, near & LOW, n & LOW, far & LOW, o & LOW, p);
        times_weights<false>(second, near & HIGH, n & HIGH, far & HIGH, o & HIGH, p);
    };
#pragma unroll
    for (int i = 0; i < VW; ++i) {
        tiles(state.acc[4 * i], state.acc[4 * i + 1], prmt(c.v[0][i], c.v[1][i], 0x5410),
              prmt(c.v[2][i], c.v[3][i], 0x5410));
        tiles(state.acc[4 * i + 2], state.acc[4 * i + 3], prmt(c.v[0][i], c.v[1][i], 0x7632),
              prmt(c.v[2][i], c.v[3][i], 0x7632));
    }
    if constexpr (VH)
        tiles(state.acc[4 * VW], state.acc[4 * VW + 1], prmt(c.v[0][VW], c.v[1][VW], 0x5410),
              prmt(c.v[2][VW], c.v[3][VW], 0x5410));
}

// rows: shared address of this slice's 16 rows of K; V stands behind. current: its row that is this call's, or none.
// x: what the mask adds. Leaves the accumulators in the units of attend_codes.
DEVICE void attend_rows(State& state, u32 smem, u32 rows, int current, const float (&mask)[2], const Factors (&f)[2],
                        int lane) {
    const int g = lane >> 2, t = lane & 3;
    const u32 k0 = (g == current ? smem + KROW : rows + g * PITCH) + t * 16;
    const u32 k1 = (g + 8 == current ? smem + KROW : rows + (g + 8) * PITCH) + t * 16;
    f32x4 even = {0, 0, 0, 0}, odd = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < NI; ++i) {
        const u32x4 a = ld_shared_v4(k0 + i * 64), b = ld_shared_v4(k1 + i * 64);
#pragma unroll
        for (int set = 0; set < SETS; ++set) {
            const u32x4 q = ld_shared_v4(smem + QEXACT + (set * NI + i) * 512 + lane * 16);
            mma_m16n8k16<HALF>(even, a.x, b.x, a.y, b.y, q.x, q.y);
            mma_m16n8k16<HALF>(odd, a.z, b.z, a.w, b.w, q.z, q.w);
        }
    }
    float s[4], x[4];
    scores_of(even, odd, s);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float m = mask[i >> 1];
        x[i] = m == -infinity() ? m : s[i] * f[i & 1].exact + m;
    }
    const Weights p = softmax<false>(state, x, 1.0f, 1.0f, t);
    u32 v[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const int token = 2 * t + (j & 1) + (j >> 1) * 8;
        v[j] = token == current ? smem + VROW : rows + (16 + token) * PITCH;
    }
#pragma unroll
    for (int pair = 0; pair < MT / 2; ++pair) {
        const int at = column(nibble_of(pair, g)) * 2;  // two columns; the next two stand 8 columns on
        u32 a[4], b[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) a[j] = ld_shared_u32(v[j] + at), b[j] = ld_shared_u32(v[j] + at + 16);
        f32x4& first = state.acc[2 * pair];
        f32x4& second = state.acc[2 * pair + 1];
        times_weights<HALF>(first, prmt(a[0], a[1], 0x5410), prmt(b[0], b[1], 0x5410), prmt(a[2], a[3], 0x5410),
                            prmt(b[2], b[3], 0x5410), p);
        times_weights<HALF>(second, prmt(a[0], a[1], 0x7632), prmt(b[0], b[1], 0x7632), prmt(a[2], a[3], 0x7632),
                            prmt(b[2], b[3], 0x7632), p);
    }
#pragma unroll
    for (int i = 0; i < MT; ++i) {
        const float unit = i % 2 ? 1 / UNIT_ODD : 1 / UNIT_EVEN;
        state.acc[i].x *= unit, state.acc[i].y *= unit, state.acc[i].z *= unit, state.acc[i].w *= unit;
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, D > 128 ? 1 : 2)
    FU_KERNEL(const u16* __restrict__ qkv, const void* __restrict__ cos, const void* __restrict__ sin,
              const u16* __restrict__ q_norm, const u16* __restrict__ k_norm, u16* keys, u16* values, u8* k_codes,
              u16* k_scales, u8* v_codes, u16* v_scales, const float* __restrict__ mean,
              const float* __restrict__ balance, const long long* __restrict__ position, const u8* __restrict__ mask,
              u16* __restrict__ y, int ldqkv, int ldcos, int slots, int pages, int limit, int ldmask, int mask_columns,
              float eps, float scale) {
    extern __shared__ __align__(128) u8 shared[];
    const u32 smem = cvta_to_shared(shared);
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const int rank = CLUSTER > 1 ? int(cluster_ctarank()) : 0, unit = int(blockIdx.x) / CLUSTER;
    const int part = unit % PARTS, kv = unit / PARTS % KV, b = unit / (PARTS * KV);
    const int heads = PARTS == 1 ? HEADS : min(HEADS, GROUP - part * HEADS);
    u16* const out = y + ((long long)(b * KV + kv) * GROUP + part * HEADS) * D;

    if (CLUSTER > 1) barrier_cluster_arrive();  // pushes wait for it: every block has started
    const long long first = *position;
    if (first < 0 || first >= limit) {  // the same for all blocks
        griddepcontrol_wait();
        for (int i = rank * THREADS + int(threadIdx.x); i < heads * D; i += CLUSTER * THREADS)
            out[i] = from_f32<HALF>(nan());
        if (CLUSTER > 1) barrier_cluster_wait();
        return;
    }
    const int inside = int(first % fu::kPage), complete = int(first / fu::kPage), units = complete * 4;
    const int worker = warp * CLUSTER + rank, slice = WORKERS - 1 - worker;  // slice: of exact rows
    const bool exact = slice <= inside / 16;

    const long long head = b * KV + kv, page_row = head * pages * fu::kPage;
    const int page_slot = int((long long)complete * fu::kPage % slots);
    u16* const k_rows = keys + (head * slots + page_slot) * D;
    u16* const v_rows = values + (head * slots + page_slot) * D;
    const Cache cache = {k_codes + page_row * (D / 2),
                         v_codes + page_row * (D / 2),
                         k_scales + page_row,
                         v_scales + page_row,
                         mask + (long long)b * ldmask *
                                    (MASK == 3   ? 4
                                     : MASK == 2 ? 2
                                                 : 1),
                         mask_columns};

    Slice next;
    const bool early = worker < units && worker / 4 < complete - 1;  // the newest page may be the last call's
    if (early) cache.load(next, worker, g, t);
    float shown[2] = {-infinity(), -infinity()};
    if (exact) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int at = slice * 16 + g + 8 * r;
            if (at <= inside) shown[r] = cache.shown(complete * fu::kPage + at);
        }
    }
    for (int i = threadIdx.x; i < (KROW - QCODES) / 16; i += THREADS)
        st_shared_v4(smem + QCODES + i * 16, {0, 0, 0, 0});
    Head c, s, mu, lambda;
#pragma unroll
    for (int i = 0; i < NI; ++i) {
        const int at = 32 * i + lane;
        const long long angle = (long long)b * ldcos + min(at, R - 1);
        c.v[i] = COS32 ? ((const float*)cos)[angle] : to_f32<HALF>(((const u16*)cos)[angle]);
        s.v[i] = COS32 ? ((const float*)sin)[angle] : to_f32<HALF>(((const u16*)sin)[angle]);
        mu.v[i] = mean[kv * D + at], lambda.v[i] = balance[kv * D + at];
    }
    __syncthreads();

    griddepcontrol_wait();
    const u32 rows = smem + ROWS + (WARPS - 1 - warp) * 2 * 16 * PITCH;
    if (exact) {
        const u32 seen = __ballot_sync(ALL, shown[0] != -infinity()),
                  seen8 = __ballot_sync(ALL, shown[1] != -infinity());
        for (int i = lane; i < 16 * (D / 8); i += 32) {
            const int row = i / (D / 8), at = i % (D / 8), token = slice * 16 + row;
            const bool read = token < inside && ((row < 8 ? seen : seen8) >> (row % 8 * 4) & 1);
            const long long from = read ? (long long)token * D + at * 8 : 0;
            cp_async_16(rows + row * PITCH + at * 16, k_rows + from, read ? 16 : 0);
            cp_async_16(rows + (16 + row) * PITCH + at * 16, v_rows + from, read ? 16 : 0);
        }
        cp_async_commit_group();
    }
    if (!early && worker < units) cache.load(next, worker, g, t);

    // Every block turns its own query heads, a warp a head, and the new row.
    const u16* const row = qkv + (long long)b * ldqkv;
    const float power = scale * LOG2E;
#pragma unroll 1
    for (int h = warp; h < HEADS + 2; h += WARPS) {
        if (h < heads) {
            const u16* const from = row + (kv * GROUP + part * HEADS + h) * D;
            Head x = load_head(from, lane), partner = load_partner(x, from, lane);
            if (QNORM) normalise(x, partner, q_norm, eps, lane);
            const Head q = turn(x, partner, c, s, lane);
            float dot = 0;
#pragma unroll
            for (int i = 0; i < NI; ++i) dot = fmaf(q.v[i], mu.v[i], dot), x.v[i] = q.v[i] * lambda.v[i];
            const Head turned = hadamard(x, lane);
            const Range codes = range_of(turned), exact_rows = HALF ? range_of(q) : Range{1.0f, 1.0f};
            const float sum = store_q<false>(smem + QCODES, turned, codes.up, h, lane);
            store_q<true>(smem + QEXACT, q, exact_rows.up, h, lane);
            dot = warp_sum(dot);
            if (lane == 0) {
                const float unit = codes.down * power;
                st_shared_f4(smem + FACTORS + h * 16,
                             {unit * 0x1p24f, 8.0f * sum * unit, dot * power, exact_rows.down * power});
            }
        } else if (h >= HEADS) {
            const bool key = h == HEADS;
            const u16* const from = row + (KV * GROUP + (key ? 0 : KV) + kv) * D;
            Head x = load_head(from, lane);
            if (key) {
                Head partner = load_partner(x, from, lane);
                if (KNORM) normalise(x, partner, k_norm, eps, lane);
                x = turn(x, partner, c, s, lane);
            }
            u16* const to = (key ? k_rows : v_rows) + inside * D;
#pragma unroll
            for (int i = 0; i < NI; ++i) {
                const u16 v = from_f32<HALF>(x.v[i]);
                st_shared_u16(smem + (key ? KROW : VROW) + (32 * i + lane) * 2, v);
                if (rank == 0 && part == 0) to[32 * i + lane] = v;
            }
        }
    }
    __syncthreads();

    State state;
    state.m[0] = state.m[1] = -infinity();
    state.l[0] = state.l[1] = state.zero[0] = state.zero[1] = 0;
#pragma unroll
    for (int i = 0; i < MT; ++i) state.acc[i] = {0, 0, 0, 0};
    const int a = PAIRED ? 2 * (t & 1) : 2 * t;  // my heads: a, a + 1
    Factors factors[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const f32x4 f = ld_shared_f4(smem + FACTORS + (a + i) * 16);
        factors[i] = {f.x, f.y, f.z, f.w};
    }
    if (exact) {
        cp_async_wait_group<0>();
        __syncwarp();
        // A hidden row of this call is the row of zeros that was loaded in its place.
        const u32 mine = __ballot_sync(ALL, (slice * 16 + g == inside && shown[0] != -infinity()) ||
                                                (slice * 16 + g + 8 == inside && shown[1] != -infinity()));
        attend_rows(state, smem, rows, mine ? inside - slice * 16 : -1, shown, factors, lane);
    }
#pragma unroll 1
    for (int u = worker; u < units; u += WORKERS) {
        const Slice now = next;
        if (u + WORKERS < units) cache.load(next, u + WORKERS, g, t);
        attend_codes(state, now, smem, factors, lane);
    }

    // This warp's sums: of all its tokens, in true units, both halves of P together.
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int m = 4; m < 32; m *= 2) {
            state.l[i] += __shfl_xor_sync(ALL, state.l[i], m);
            state.zero[i] += __shfl_xor_sync(ALL, state.zero[i], m);
        }
    const float z[2] = {state.zero[0] * 0x1p-97f, state.zero[1] * 0x1p-97f};  // 8 times 2^-100
    auto put = [&](int h, int n, float v, float unit) {
        if (h < HEADS) st_shared_f32(smem + PARTIAL + ((warp * HEADS + h) * D + column(n)) * 4, v * unit - z[h - a]);
    };
#pragma unroll
    for (int i = 0; i < MT; ++i) {
        const float unit = i % 2 ? UNIT_ODD : UNIT_EVEN;
        const int n = nibble_of(i / 2, g) + i % 2;
        const f32x4 v = state.acc[i];
        if constexpr (PAIRED) {  // lanes t < 2 finish row g, the others row g + 8
            const float r0 = __shfl_xor_sync(ALL, t < 2 ? v.z : v.x, 2),
                        r1 = __shfl_xor_sync(ALL, t < 2 ? v.w : v.y, 2);
            put(a, n + (t < 2 ? 0 : 2), (t < 2 ? v.x : v.z) + r0, unit);
            put(a + 1, n + (t < 2 ? 0 : 2), (t < 2 ? v.y : v.w) + r1, unit);
        } else {
            put(a, n, v.x, unit), put(a + 1, n, v.y, unit);
            put(a, n + 2, v.z, unit), put(a + 1, n + 2, v.w, unit);
        }
    }
    if (g == 0 && (!PAIRED || t < 2))
#pragma unroll
        for (int i = 0; i < 2; ++i)
            if (a + i < HEADS) st_shared_f2(smem + WARPSUMS + (warp * HEADS + a + i) * 8, {state.m[i], state.l[i]});
    __syncthreads();

    // Sums of COUNT parties at `sums` (max, sum), `stride` bytes apart, for one head: their common maximum.
    auto common = [&](u32 sums, int count, float& total) {
        float most = -infinity();
        for (int i = 0; i < count; ++i) most = fmaxf(most, ld_shared_f2(sums + i * HEADS * 8).x);
        total = 0;
        for (int i = 0; i < count; ++i) {
            const f32x2 v = ld_shared_f2(sums + i * HEADS * 8);
            total = fmaf(v.y, times_two(v.x, most), total);
        }
        return most;
    };
    auto merged = [&](u32 sums, u32 values, int stride, int count, float most) {
        float v = 0;
#pragma unroll 8
        for (int i = 0; i < count; ++i) {
            const float by = times_two(ld_shared_f2(sums + i * HEADS * 8).x, most);
            v = fmaf(ld_shared_f32(values + i * stride), by, v);
        }
        return v;
    };
    auto finish = [&](int e, float v, float total) {  // no visible token: zeros
        if (e / D < heads) out[e] = from_f32<HALF>(total == 0.0f ? 0.0f : __fdividef(v, total));
    };
    if (CLUSTER > 1) barrier_cluster_wait();
    for (int e = threadIdx.x; e < HEADS * D; e += THREADS) {
        const u32 sums = smem + WARPSUMS + e / D * 8;
        float total;
        const float most = common(sums, WARPS, total);
        const float v = merged(sums, smem + PARTIAL + e * 4, HEADS * D * 4, WARPS, most);
        if constexpr (CLUSTER > 1)
            st_cluster_f32(mapa(smem + RECEIVED + (rank * CHUNK + e % CHUNK) * 4, e / CHUNK), v);
        else
            finish(e, v, total);
    }
    if constexpr (CLUSTER > 1) {
        if (int(threadIdx.x) < HEADS * CLUSTER) {
            const int h = int(threadIdx.x) % HEADS;
            float total;
            const float most = common(smem + WARPSUMS + h * 8, WARPS, total);
            st_cluster_f2(mapa(smem + SUMS + (rank * HEADS + h) * 8, int(threadIdx.x) / HEADS), {most, total});
        }
        barrier_cluster_arrive();
        barrier_cluster_wait();
        for (int i = threadIdx.x; i < CHUNK; i += THREADS) {
            const int e = rank * CHUNK + i;
            const u32 sums = smem + SUMS + e / D * 8;
            float total;
            const float most = common(sums, CLUSTER, total);
            finish(e, merged(sums, smem + RECEIVED + i * 4, CHUNK * 4, CLUSTER, most), total);
        }
    }

    if (inside == fu::kPage - 1 && part == 0) {  // this row completes a page: its INT4 copy, from the next call on
#pragma unroll 1
        for (int i = worker; i < 2 * fu::kPage; i += WORKERS) {
            const int token = i % fu::kPage;
            const bool key = i < fu::kPage;
            Head x;
#pragma unroll
            for (int j = 0; j < NI; ++j) {
                const int at = 32 * j + lane;
                x.v[j] = to_f32<HALF>(token == inside ? u16(ld_shared_u16(smem + (key ? KROW : VROW) + at * 2))
                                                      : ld_global_cg_u16((key ? k_rows : v_rows) + token * D + at));
            }
            const long long at = page_row + (long long)complete * fu::kPage + token;
            if (key)
                encode<true>(x, mean + kv * D, balance + kv * D, k_codes + at * (D / 2), k_scales + at, lane);
            else
                encode<false>(x, nullptr, nullptr, v_codes + at * (D / 2), v_scales + at, lane);
        }
    }
}
