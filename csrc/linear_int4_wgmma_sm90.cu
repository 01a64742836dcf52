// y[m, N] = E(P(x)[m, K] . W[N, K]^T), INT4 weights, up to 64 tokens, on wgmma. Hopper (sm_90a).
//
//   cluster (of CLUSTER blocks)   owns strips of 16 rows; its blocks split K, sums meet through distributed shared
//   memory block                         keeps its part of x in shared memory, as the B operand: prepared once for all
//   strips,
//                                 or PHASES parts of it one after another where it does not fit
//   warpgroup (wn, wk)            4 strips at a time (S times), tiles wk of WK along K: one m64nTOKENSk16 for 4 strips
//   warp                          dequantises its strip into the A fragments (registers); has a ring of SLOTS chunks of
//                                 up to CHUNK tiles that its lane 0 refills with cp.async.bulk: no warp waits for
//                                 another until the sums of a pass (WN x 4 x S strips) meet
//
// The tensor core reads x itself: no loads of x, one instruction for 64 x 16 weights and all tokens. Bytes: every
// weight once from HBM; x from L2 K / CLUSTER x m x 2 for each block. Roofline: N K (0.5 + 3/128) / 4.3 TB/s. Launch
// and summation order: as in linear_int4_sm90.cu. The sums of a pass are added up one pass later, so that the cluster's
// barrier is not waited for.
//
// Rendered constants: FU_KERNEL, FU_N, FU_K, FU_GROUP, FU_TOKENS (8, 16, 32, 64), FU_GRID, FU_CLUSTER, FU_WARPGROUPS,
// FU_WK, FU_S, FU_PHASES, FU_CHUNK, FU_SLOTS, FU_BLOCKS_PER_SM, FU_DELAY, FU_SMEM, FU_HALF, FU_RMS, FU_GAIN, FU_BIAS,
// FU_SWIGLU, FU_RESIDUAL.
#include "epilogue.cuh"
#include "int4.cuh"

namespace {
constexpr int N = FU_N, K = FU_K, GROUP = FU_GROUP, TOKENS = FU_TOKENS, CLUSTER = FU_CLUSTER, NB = TOKENS / 8;
constexpr int WARPS = FU_WARPGROUPS * 4, THREADS = WARPS * 32, WK = FU_WK, WN = FU_WARPGROUPS / WK, S = FU_S;
constexpr int PHASES = FU_PHASES, CHUNK = FU_CHUNK, SLOTS = FU_SLOTS, DELAY = FU_DELAY, PASS = WN * 4 * S;
constexpr bool HALF = FU_HALF, RMS = FU_RMS, GAIN = FU_GAIN;
using F = Form<HALF, Codes::SUBNORMAL>;
constexpr int TILE = fu::int4_tile_bytes(GROUP), GROUPS = fu::kTileK / GROUP;
constexpr int STRIPS = (N + 15) / 16, TILES = (K + 127) / 128, UNITS = FU_GRID / CLUSTER;
constexpr int DEPTH = (TILES + CLUSTER - 1) / CLUSTER;  // most tiles of a block along K
constexpr int PHASE = (DEPTH + PHASES - 1) / PHASES;    // and of a phase
constexpr bool ONE_PASS = (STRIPS + UNITS - 1) / UNITS <= PASS;
constexpr int PARTS = WARPS / NB;  // warps that share the tiles of x of 8 tokens
static_assert(WARPS % NB == 0 && FU_WARPGROUPS % WK == 0, "every warp has its 8 tokens and its tiles");

// shared memory
constexpr int RING = 0, X = (WARPS * SLOTS * CHUNK * TILE + 127) / 128 * 128, XTILE = TOKENS * 256;
constexpr int SUM = WK * PASS * NB * 512;  // of a pass: [wk][strip][nb][lane] f32x4
constexpr int XSUM = X + (ONE_PASS && SUM > PHASE * XTILE ? SUM : PHASE * XTILE);  // [tile][group][token] f32
constexpr int SUMS = ONE_PASS ? X : XSUM + PHASE * GROUPS * TOKENS * 4;
constexpr int SQUARES = ONE_PASS ? XSUM + PHASE * GROUPS * TOKENS * 4 : SUMS + 2 * SUM;  // [part][token] f32
constexpr int BARS = SQUARES + PARTS * TOKENS * 4, BYTES = BARS + WARPS * SLOTS * 8;
static_assert(BYTES == FU_SMEM, "the lowering computes the same size");

struct Range {
    int begin, end;
};
// Part i of n of a range.
DEVICE Range part(Range r, int i, int n) {
    const int length = r.end - r.begin;
    return {r.begin + length * i / n, r.begin + length * (i + 1) / n};
}

// x of `tiles` as the B operand, its sums over each group (an A operand of ones) and its sums of squares (the diagonal
// of x x^T). A warp takes 8 tokens and every PARTS-th tile: lane 4g + t columns 32c + 8t .. + 7 of token g, which are
// k 2t, 2t + 1, 2t + 8, 2t + 9 of steps 2c and 2c + 1. Tokens that do not exist are zeros.
DEVICE void load_x(u32x4 (&v)[4], const u16* row, bool exists, int tile, int t) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
        const int k = tile * 128 + 32 * c + 8 * t;
        v[c] = {0, 0, 0, 0};
        if (exists && (K % 128 == 0 || k < K)) v[c] = ld_global_cg_v4(row + k);
    }
}

template <bool SQUARE>
DEVICE void prepare_x(u32 smem, const u16* x, const u16* gain, int m, int ldx, Range tiles, int warp, int lane) {
    const int nb = warp % NB, first = warp / NB, g = lane >> 2, t = lane & 3, token = nb * 8 + g;
    const u16* row = x + (long long)min(token, m - 1) * ldx;
    const u32 to = smem + X + nb * 128 + lane * 4;
    f32x4 square[2] = {};
    u32x4 raw[4];
    load_x(raw, row, token < m && first < tiles.end - tiles.begin, tiles.begin + first, t);
    for (int i = first; i < tiles.end - tiles.begin; i += PARTS) {
        u32x4 next[4], gains[4];
        if (GAIN)
#pragma unroll
            for (int c = 0; c < 4; ++c) gains[c] = load_gain<K>(gain, (tiles.begin + i) * 128 + 32 * c + 8 * t);
        load_x(next, row, token < m && i + PARTS < tiles.end - tiles.begin, tiles.begin + i + PARTS, t);
        f32x4 sum[GROUPS == 1 ? 2 : GROUPS] = {};  // chains: an mma that waits for the one before takes 33 cycles
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            const u32x4 r = raw[c], v = F::scaled(GAIN ? F::times_gain(r, gains[c]) : r);
            f32x4& s = sum[GROUPS == 1 ? c & 1 : c * GROUPS / 4];
            mma_m16n8k16<HALF>(s, F::ONE_LOW, F::ONE_LOW, F::ONE_HIGH, F::ONE_HIGH, v.x, v.y);
            if (SQUARE) mma_m16n8k16<HALF>(square[0], r.x, 0, r.y, 0, r.x, r.y);
            mma_m16n8k16<HALF>(s, F::ONE_LOW, F::ONE_LOW, F::ONE_HIGH, F::ONE_HIGH, v.z, v.w);
            if (SQUARE) mma_m16n8k16<HALF>(square[1], r.z, 0, r.w, 0, r.z, r.w);
            const u32 at = to + i * XTILE + c * (4 * NB * 128);  // [tile][step][half][nb] cores of 128 bytes
            st_shared_u32(at, v.x), st_shared_u32(at + NB * 128, v.y);
            st_shared_u32(at + 2 * NB * 128, v.z), st_shared_u32(at + 3 * NB * 128, v.w);
            raw[c] = next[c];
        }
        if (GROUPS == 1) sum[0] = sum[0] + sum[1];
        if (g == 0)
#pragma unroll
            for (int gi = 0; gi < GROUPS; ++gi)
                st_shared_f2(smem + XSUM + ((i * GROUPS + gi) * TOKENS + nb * 8 + 2 * t) * 4,
                             {sum[gi].x * F::SUM_SCALE, sum[gi].y * F::SUM_SCALE});
    }
    if (SQUARE && t == g >> 1) {  // the diagonal; phases add up
        const u32 at = smem + SQUARES + (first * TOKENS + token) * 4;
        const float before = PHASES > 1 ? ld_shared_f32(at) : 0.0f;
        st_shared_f32(at, before + (g & 1 ? square[0].y + square[1].y : square[0].x + square[1].x));
    }
}

// One tile. x: descriptor of its first step; xsum: its sums, of tokens 2t and 2t + 1.
DEVICE void multiply(float (&acc)[NB * 4], u32 tile, u64 x, u32 xsum, int lane) {
    const int g = lane >> 2;
    const u32x4 low = ld_shared_v4(tile + lane * 16), high = ld_shared_v4(tile + fu::kVectorBytes + lane * 16);
    const u32 words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    constexpr int STEPS = 8 / GROUPS;
#pragma unroll
    for (int gi = 0; gi < GROUPS; ++gi) {
        u32 a[STEPS][4];
        float c[NB * 4];
#pragma unroll
        for (int i = 0; i < STEPS; ++i) F::dequantise(words[gi * STEPS + i], a[i]);
        wgmma_fence();
        wgmma<HALF, true>(c, a[0], x + gi * STEPS * (NB * 16));
#pragma unroll
        for (int i = 1; i < STEPS; ++i) wgmma<HALF, false>(c, a[i], x + (gi * STEPS + i) * (NB * 16));
        wgmma_commit_group();
        const GroupScale q = group_scale<GROUP, Codes::SUBNORMAL>(tile + g * 4, tile + g * 2, gi);
        f32x2 xs[NB];
#pragma unroll
        for (int nb = 0; nb < NB; ++nb) xs[nb] = ld_shared_f2(xsum + (gi * TOKENS + nb * 8) * 4);
        wgmma_wait_group<0>();
        pin(c);
#pragma unroll
        for (int nb = 0; nb < NB; ++nb) {
            float* o = acc + 4 * nb;
            o[0] = fmaf(q.s0, fmaf(-q.z0, xs[nb].x, c[4 * nb]), o[0]);
            o[1] = fmaf(q.s0, fmaf(-q.z0, xs[nb].y, c[4 * nb + 1]), o[1]);
            o[2] = fmaf(q.s1, fmaf(-q.z1, xs[nb].x, c[4 * nb + 2]), o[2]);
            o[3] = fmaf(q.s1, fmaf(-q.z1, xs[nb].y, c[4 * nb + 3]), o[3]);
        }
    }
}

DEVICE f32x2 rstd_of(u32 smem, int token, float eps) {
    if constexpr (!RMS) return {F::UNIT, F::UNIT};
    f32x2 sum = {0, 0};
    for (int r = 0; r < CLUSTER; ++r)
#pragma unroll
        for (int i = 0; i < PARTS; ++i) {
            const u32 at = smem + SQUARES + (i * TOKENS + token) * 4;
            const f32x2 v = CLUSTER > 1 ? ld_cluster_f2(mapa(at, r)) : ld_shared_f2(at);
            sum.x += v.x, sum.y += v.y;
        }
    return {F::UNIT * rsqrt_approx(sum.x / K + eps), F::UNIT * rsqrt_approx(sum.y / K + eps)};
}
}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, FU_BLOCKS_PER_SM)
    FU_KERNEL(const u16* __restrict__ x, const u8* __restrict__ weight, const u16* __restrict__ gain,
              const u16* __restrict__ bias, const u16* __restrict__ residual, u16* __restrict__ y, int m, int ldx,
              int ldr, float eps, float scale) {
    extern __shared__ __align__(128) u8 shared[];
    const u32 smem = cvta_to_shared(shared);
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, wn = warp / 4 % WN, wk = warp / 4 / WN;
    const int rank = CLUSTER > 1 ? int(cluster_ctarank()) : 0, unit = int(blockIdx.x) / CLUSTER;
    const Range strips = {int((long long)STRIPS * unit / UNITS), int((long long)STRIPS * (unit + 1) / UNITS)};
    const Range tiles = part({0, TILES}, rank, CLUSTER);
    const u32 ring = smem + RING + warp * SLOTS * CHUNK * TILE, bars = smem + BARS + warp * SLOTS * 8;
    const int place = wn * 4 + warp % 4;  // of my strips in a pass: place, place + 4 WN, ...
    griddepcontrol_launch_dependents();

    // The walk of the refills: pass, phase, strip of mine, chunk.
    struct {
        int first, phase, s, tile, end;
    } walk = {strips.begin, 0, -1, 0, 0};
    auto fill = [&](int slot) {  // by lane 0
        while (walk.tile >= walk.end) {
            if (++walk.s == S) {
                walk.s = 0;
                if (++walk.phase == PHASES) walk.phase = 0, walk.first += PASS;
            }
            if (walk.first >= strips.end) return;
            const Range r = part(part(tiles, walk.phase, PHASES), wk, WK);
            walk.tile = r.begin;
            walk.end = walk.first + walk.s * WN * 4 + place < strips.end ? r.end : r.begin;
        }
        const int bytes = min(CHUNK, walk.end - walk.tile) * TILE, strip = walk.first + walk.s * WN * 4 + place;
        mbarrier_arrive_expect_tx(bars + slot * 8, bytes);
        cp_async_bulk(ring + slot * CHUNK * TILE, weight + ((long long)strip * TILES + walk.tile) * TILE, bytes,
                      bars + slot * 8, createpolicy_evict_first());
        walk.tile += CHUNK;
    };
    if (lane == 0) {
        for (int i = 0; i < SLOTS; ++i) mbarrier_init(bars + i * 8, 1);
        fence_mbarrier_init();
        fence_proxy_async();
        if (DELAY > 0) wait_clocks(DELAY);
        for (int i = 0; i < SLOTS; ++i) fill(i);
    }
    if (RMS && PHASES > 1)
        for (int i = threadIdx.x; i < PARTS * TOKENS; i += THREADS) st_shared_f32(smem + SQUARES + i * 4, 0.0f);
    __syncwarp();

    griddepcontrol_wait();
    const Epilogue<N, HALF, FU_BIAS, FU_SWIGLU, FU_RESIDUAL> epilogue = {bias, residual, y, m, ldr, scale};
    const u64 descriptor = wgmma_descriptor(smem + X, NB * 128, 128);
    const u32 xsums = smem + XSUM + 2 * (lane & 3) * 4;
    const int passes = (strips.end - strips.begin + PASS - 1) / PASS;
    int slot = 0;
    u32 parity = 0;
    for (int pass = 0; pass <= passes; ++pass) {
        const int first = strips.begin + pass * PASS;
        float acc[S][NB * 4] = {};
        if (pass < passes)
            for (int phase = 0; phase < PHASES; ++phase) {
                const Range all = part(tiles, phase, PHASES), mine = part(all, wk, WK);
                if (PHASES > 1 || pass == 0) {
                    if (PHASES > 1) __syncthreads();  // x of the phase before is read
                    if (RMS && pass == 0)
                        prepare_x<true>(smem, x, gain, m, ldx, all, warp, lane);
                    else
                        prepare_x<false>(smem, x, gain, m, ldx, all, warp, lane);
                    fence_proxy_async();
                    __syncthreads();
                }
#pragma unroll
                for (int s = 0; s < S; ++s) {
                    if (S > 1 && first + (s * WN + wn) * 4 >= strips.end) break;  // none of the four warps has a strip
                    const bool exists = first + s * WN * 4 + place < strips.end;  // wgmma needs all four warps
                    for (int tile = mine.begin; tile < mine.end; tile += CHUNK) {
                        if (exists) mbarrier_wait_parity(bars + slot * 8, parity);
                        const u32 at = ring + slot * CHUNK * TILE;
                        const int count = min(CHUNK, mine.end - tile), i = tile - all.begin;
#pragma unroll 1
                        for (int j = 0; j < count; ++j)
                            multiply(acc[s], at + j * TILE, descriptor + u32(i + j) * (XTILE >> 4),
                                     xsums + (i + j) * GROUPS * TOKENS * 4, lane);
                        __syncwarp();
                        if (exists) {
                            if (lane == 0) fill(slot);
                            if (++slot == SLOTS) slot = 0, parity ^= 1;
                        }
                        __syncwarp();
                    }
                }
            }
        if (pass > 0) {  // the sums of the pass before
            if (CLUSTER > 1)
                barrier_cluster_wait();
            else
                __syncthreads();
            const int before = first - PASS, count = min(PASS, strips.end - before);
            const u32 sums = smem + SUMS + (ONE_PASS ? 0 : (pass - 1) % 2 * SUM);
            for (int i = warp * CLUSTER + rank; i < count * NB; i += WARPS * CLUSTER) {
                const auto held = epilogue.fetch(before + i / NB, i % NB * 8, lane);
                const f32x2 rstd = rstd_of(smem, i % NB * 8 + 2 * (lane & 3), eps);
                f32x4 v = {0, 0, 0, 0};
                for (int r = 0; r < CLUSTER; ++r) {
                    const u32 local = sums + (i * 32 + lane) * 16, base = CLUSTER > 1 ? mapa(local, r) : local;
#pragma unroll
                    for (int k = 0; k < WK; ++k)
                        v = v + (CLUSTER > 1 ? ld_cluster_f4(base + k * PASS * NB * 512)
                                             : ld_shared_f4(base + k * PASS * NB * 512));
                }
                epilogue(before + i / NB, i % NB * 8, lane, {v.x * rstd.x, v.y * rstd.y, v.z * rstd.x, v.w * rstd.y},
                         held);
            }
        }
        if (pass < passes) {
            if (ONE_PASS) __syncthreads();  // the sums take the place of x
            const u32 sums = smem + SUMS + (ONE_PASS ? 0 : pass % 2 * SUM);
#pragma unroll
            for (int s = 0; s < S; ++s)
#pragma unroll
                for (int nb = 0; nb < NB; ++nb)
                    st_shared_f4(sums + (((wk * PASS + s * WN * 4 + place) * NB + nb) * 32 + lane) * 16,
                                 {acc[s][4 * nb], acc[s][4 * nb + 1], acc[s][4 * nb + 2], acc[s][4 * nb + 3]});
            if (CLUSTER > 1) barrier_cluster_arrive();
        }
    }
    if (CLUSTER > 1) barrier_cluster();  // nobody leaves while its shared memory is being read
}
