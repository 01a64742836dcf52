// y[m, N] = E(P(x)[m, K] . W[N, K]^T), INT4 weights, up to 32 tokens. Hopper (sm_90a).
//
//   cluster (of CLUSTER blocks)   owns strips of 16 rows; its blocks split K, their sums meet in shared memory
//   step                          WK x CHUNK tiles of K, for all strips of a pass (WN warps x S strips)
//   consumer warp (wn, wk)        S strips x CHUNK tiles of the step, from a ring of SLOTS steps; a slot has its strips
//                                 one behind the other, so that a strip's part of a step is one copy
//   one warp more                 asks for the weights of all warps by cp.async.bulk (consumers that did it themselves
//                                 stood still while memory had no room for their requests)
//   another one, not with PREPARE asks for x: a ring of XSLOTS steps; SHARE blocks with strips of their own ask for a
//                                 part each, which goes to all of them
//
// How x becomes the B operand, with powers of two that let a mask make a weight of a code (int4.cuh), and with its sums
// over the groups, what the zero points cost:
//   PREPARE   (to 8 tokens)  every block for itself, as soon as the kernel before has ended; all of it stays in shared
//                            memory, the norm's rstd with it
//   else      (8 and more)   arrange_rows_sm90.cu has done it once for all blocks: one more kernel to wait for, 3 us of
//                            which the rings fill for 2
// WGMMA (4 WN WK warps, S strips of 64 rows each): weights are the A operand in registers, x the B operand in shared
// memory; the zero points are a step of k more. Else mma.sync: at 32 tokens bound by the tensor cores (6.1 clocks an
// instruction and quarter of a multiprocessor, against 16 for four of them at once with wgmma).
//
// Sums in units of the group's scale: before a group the accumulators are multiplied by (scale before) / (this scale),
// in float32, and at the end by the last one: a second set of accumulators would not fit. A scale of zero counts as
// 2^-60, far below any float16.
//
// With 16 warps of 96 registers and up to 224 KB, one block has a multiprocessor; only arrange_rows fits beside it.
// Bytes: every weight once from HBM; x from L2 once per block and pass: K / CLUSTER x TOKENS x 2 bytes each.
// Launch: weights of the first SLOTS steps, never more than FLIGHT steps on their way, with PACE as many clocks for
// each warp's part (x behind all of them at once would wait for all of them), then PREFETCH more steps into L2, before
// griddepcontrol.wait. One order of summation whatever m and the token's position: same input, same bits.
//
// Rendered constants: FU_KERNEL, FU_N, FU_K, FU_GROUP, FU_TOKENS (1, 2, 4, 8 with PREPARE, 8, 16, 32 without), FU_GRID,
// FU_CLUSTER, FU_WN, FU_WK, FU_S, FU_CHUNK, FU_SLOTS, FU_XSLOTS, FU_SHARE, FU_FLIGHT, FU_PREFETCH, FU_DELAY, FU_PACE,
// FU_SMEM, FU_REGISTERS, FU_WG (WGMMA), FU_PREPARE, FU_GAIN (with PREPARE), FU_HALF, FU_RMS, FU_BIAS, FU_SWIGLU,
// FU_RESIDUAL, FU_STAMPS (`bias` then takes the times of Moment, u64 [grid, 8]).
#include "epilogue.cuh"
#include "gemm_ptx.cuh"
#include "int4.cuh"
#include "parts.cuh"
#include "row.cuh"
#include "stamp.cuh"

namespace {
constexpr int N = FU_N, K = FU_K, GROUP = FU_GROUP, TOKENS = FU_TOKENS, NB = TOKENS < 8 ? 1 : TOKENS / 8;
constexpr int CLUSTER = FU_CLUSTER, SHARE = FU_SHARE;
constexpr int WN = FU_WN, WK = FU_WK, S = FU_S, CHUNK = FU_CHUNK, SLOTS = FU_SLOTS, XSLOTS = FU_XSLOTS;
constexpr int FLIGHT = FU_FLIGHT, PREFETCH = FU_PREFETCH, DELAY = FU_DELAY, PACE = FU_PACE;
constexpr bool HALF = FU_HALF, RMS = FU_RMS;
constexpr bool WGMMA = FU_WG, PREPARE = FU_PREPARE, GAIN = FU_GAIN;
using F = Form<HALF>;
constexpr int W = WGMMA ? 4 : 1;  // warps that multiply together
constexpr int WARPS = WN * WK * W, CONSUMERS = WARPS * 32, PASS = WN * S * W;
constexpr int STEP = WK * CHUNK, TILE = fu::int4_tile_bytes(GROUP), GROUPS = fu::kTileK / GROUP;
constexpr int BLOCK = PREPARE ? TOKENS * 64 + 64 : NB * 512;  // of 32 columns
constexpr int XTILE = PREPARE ? 4 * BLOCK : TOKENS * (256 + (WGMMA ? 16 : GROUPS * 4));
constexpr int STRIPS = (N + 15) / 16, TILES = (K + 127) / 128, UNITS = FU_GRID / CLUSTER;
constexpr int PASSES = ((STRIPS + UNITS - 1) / UNITS + PASS - 1) / PASS;
constexpr bool ONE_PASS = PASSES == 1;
constexpr int NEXT_PASS = ONE_PASS ? N : PASS;    // no loop where there is one
constexpr bool DIRECT = CLUSTER == 1 && WK == 1;  // a warp's registers hold finished sums
static_assert(CLUSTER == 1 || ONE_PASS, "a cluster makes one pass");
static_assert(SHARE == 1 || (SHARE == 2 && CLUSTER == 1 && !PREPARE), "one copy of x for two blocks");
static_assert(TOKENS <= 32, "a lane fetches a token's rstd");
static_assert(!PREPARE || (TOKENS <= 8 && !WGMMA), "a block's x, on mma.sync");
static_assert(!WGMMA || (GROUP == 128 && !HALF && (NB == 1 || NB == 2 || NB == 4)), "one scale a tile, bfloat16");

// shared memory: rings of weights and of x, then the sums (over the rings, when nothing follows)
constexpr int STRIP = STEP * TILE, SLOT = PASS * STRIP, X = (SLOTS * SLOT + 127) / 128 * 128, XSLOT = STEP * XTILE;
constexpr int NEXT = W * STRIP;  // from one strip of a warp to its next
constexpr int DEPTH = (TILES + CLUSTER - 1) / CLUSTER;
constexpr int RINGS = X + (PREPARE ? DEPTH * XTILE : XSLOTS * XSLOT), SUM_BYTES = DIRECT ? 0 : WK * PASS * NB * 512;
constexpr int SUMS = ONE_PASS ? 0 : RINGS;
constexpr int RSTD = ONE_PASS ? (SUM_BYTES > RINGS ? SUM_BYTES : RINGS) : SUMS + SUM_BYTES;
constexpr int SQUARES = RSTD + (TOKENS < 8 ? 8 : TOKENS) * 4, BARS = SQUARES + (PREPARE ? WARPS * 32 : 0);
constexpr int WBARS = BARS + (PREPARE ? 0 : XSLOTS * (SHARE == 1 ? 16 : 24)), BYTES = WBARS + SLOTS * 16;
static_assert(BYTES == FU_SMEM, "the lowering computes the same size");

struct Split {
    int strip_begin, strip_end, tile_begin, tile_end;
    int pass_end;  // of passes that begin before: blocks that share x make as many
};

DEVICE u32 w_full(u32 smem, int slot) { return smem + WBARS + slot * 16; }
DEVICE u32 w_empty(u32 smem, int slot) { return smem + WBARS + slot * 16 + 8; }
DEVICE u32 x_full(u32 smem, int slot) { return smem + BARS + slot * 16; }
DEVICE u32 x_empty(u32 smem, int slot) { return smem + BARS + slot * 16 + 8; }
DEVICE u32 x_both(u32 smem, int slot) { return smem + BARS + XSLOTS * 16 + slot * 8; }  // empty at the other block, too

// By one thread; a step's records follow each other.
DEVICE void feed(u32 smem, const u8* x, const Split& p, const u16* times) {
    griddepcontrol_wait();
    stamp(times, RELEASED);
    const u64 policy = createpolicy_evict_normal();
    const u32 rank = SHARE > 1 ? cluster_ctarank() : 0;
    int slot = 0;
    u32 parity = 1;  // the first round finds every slot empty
    for (int first = p.strip_begin; first < p.pass_end; first += NEXT_PASS)
        for (int step = p.tile_begin; step < p.tile_end; step += STEP) {
            const int bytes = min(STEP, p.tile_end - step) * XTILE, part = bytes / SHARE;
            const u32 to = smem + X + slot * XSLOT + rank * part, full = x_full(smem, slot);
            const u8* const from = x + (long long)step * XTILE + rank * part;
            mbarrier_wait_parity(x_empty(smem, slot), parity);
            mbarrier_arrive_expect_tx(full, bytes);
            if constexpr (SHARE == 1) {
                cp_async_bulk(to, from, part, full, policy);
            } else {
                mbarrier_arrive_cluster(mapa(x_both(smem, slot), rank ^ 1));
                mbarrier_wait_parity(x_both(smem, slot), parity ^ 1);
                cp_async_bulk_multicast(to, from, part, full, 3, policy);
            }
            if (++slot == XSLOTS) slot = 0, parity ^= 1;
        }
}

// All of this block's weights, by one thread.
DEVICE void stream(u32 smem, const u8* weight, const Split& p, const u16* times) {
    const u64 policy = createpolicy_evict_first();
    const u32 began = clock_now();
    struct Walk {
        int pass, step;
    } walk = {p.strip_begin, p.tile_begin};
    auto advance = [&](Walk& at) {
        at.step += STEP;
        if (at.step >= p.tile_end) at = {at.pass + NEXT_PASS, p.tile_begin};
    };
    auto strips_of = [&](Walk at) { return max(0, min(PASS, p.strip_end - at.pass)); };
    // Of all warps of a step, a copy for each strip. Copies follow each other without a branch that waits for the one
    // before.
    auto request = [&](Walk at, int slot) {
        const int strips = strips_of(at), bytes = min(STEP, p.tile_end - at.step) * TILE;
        const u32 bar = w_full(smem, slot), to = smem + slot * SLOT;
        const u8* const from = weight + ((long long)at.pass * TILES + at.step) * TILE;
        mbarrier_arrive_expect_tx(bar, strips * bytes);
#pragma unroll
        for (int j = 0; j < PASS; ++j) {
            if (j >= strips) break;
            cp_async_bulk(to + j * STRIP, from + j * TILES * TILE, bytes, bar, policy);
        }
    };
    // The same, slowly: x behind more requests than memory needs to be busy would wait for all of them.
    auto request_paced = [&](Walk at, int slot) {
        const int strips = strips_of(at), bytes = min(STEP, p.tile_end - at.step) * TILE;
        const u32 bar = w_full(smem, slot), to = smem + slot * SLOT;
        const u8* const from = weight + ((long long)at.pass * TILES + at.step) * TILE;
        mbarrier_arrive_expect_tx(bar, strips * bytes);
#pragma unroll 1
        for (int j = 0; j < strips; ++j) {
            while (clock_now() - began < u32(DELAY + (slot * PASS + j) * (PACE * WK / S)) &&
                   (PREPARE || !mbarrier_test_parity(x_full(smem, 0), 0)));
            cp_async_bulk(to + j * STRIP, from + (long long)j * TILES * TILE, bytes, bar, policy);
        }
    };
    auto into_l2 = [&](Walk at) {
        const int strips = strips_of(at), tiles = min(STEP, p.tile_end - at.step);
        for (int j = 0; j < strips; ++j)
            cp_async_bulk_prefetch_l2(weight + ((long long)(at.pass + j) * TILES + at.step) * TILE, tiles * TILE);
    };
    if (PACE == 0 && DELAY > 0) wait_clocks(DELAY);
    int slot = 0, round = 0;
    for (; walk.pass < p.pass_end; advance(walk)) {
        if (round > 0) mbarrier_wait_parity(w_empty(smem, slot), (round - 1) & 1);
        if (FLIGHT < SLOTS) {  // the stage asked for FLIGHT stages ago has landed
            if (slot >= FLIGHT)
                mbarrier_wait_parity(w_full(smem, slot - FLIGHT), round & 1);
            else if (round > 0)
                mbarrier_wait_parity(w_full(smem, slot - FLIGHT + SLOTS), (round - 1) & 1);
        }
        if (PACE > 0 && round == 0)
            request_paced(walk, slot);
        else
            request(walk, slot);
        if (++slot < SLOTS) continue;
        slot = 0;
        if (round++ == 0) {
            stamp(times, ASKED);
            Walk later = walk;
            for (int i = 0; i < PREFETCH; ++i) {
                advance(later);
                if (later.pass < p.pass_end) into_l2(later);
            }
        }
    }
}

// All of this block's x, by all of its warps, where one block's share is small: no kernel before this one. In a record,
// 64 bytes behind each 32 columns let stores meet every bank once; they hold the sums of a group.
DEVICE void prepare(u32 smem, const u16* x, const u16* gain, int m, int ldx, const Split& p, int warp, int lane,
                    const u16* times) {
    constexpr int R = (DEPTH * 16 + CONSUMERS - 1) / CONSUMERS;
    const int chunks = (p.tile_end - p.tile_begin) * 16;
    u32x4 v[R][TOKENS], g[R];
#pragma unroll
    for (int r = 0; r < R; ++r) {
        const int chunk = r * CONSUMERS + int(threadIdx.x), k = p.tile_begin * 128 + chunk * 8;
        if (GAIN) g[r] = chunk < chunks && k < K ? ld_global_nc_v4(gain + k) : u32x4{0, 0, 0, 0};
    }
    griddepcontrol_wait();
    stamp(times, RELEASED, 0);
#pragma unroll
    for (int r = 0; r < R; ++r)
#pragma unroll
        for (int t = 0; t < TOKENS; ++t) {
            const int chunk = r * CONSUMERS + int(threadIdx.x), k = p.tile_begin * 128 + chunk * 8;
            v[r][t] =
                chunk < chunks && k < K && t < m ? ld_global_cg_v4(x + (long long)t * ldx + k) : u32x4{0, 0, 0, 0};
        }
    float square[8] = {};
#pragma unroll
    for (int r = 0; r < R; ++r) {
        const int chunk = r * CONSUMERS + int(threadIdx.x);
        const u32 to = smem + X + chunk / 16 * XTILE + chunk % 16 / 4 * BLOCK + chunk % 4 * 16;
#pragma unroll
        for (int t = 0; t < TOKENS; ++t) {
            if (RMS)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const u32 pair = i == 0 ? v[r][t].x : i == 1 ? v[r][t].y : i == 2 ? v[r][t].z : v[r][t].w;
                    square[t] = squares<HALF>(pair, square[t]);
                }
            if (GAIN) v[r][t] = F::times_gain(v[r][t], g[r]);
            if (chunk < chunks) st_shared_v4(to + t * 64, F::scaled(v[r][t]));
        }
    }
    if (RMS) {  // token 4 (lane / 16) + 2 (lane / 8 % 2) + lane / 4 % 2 ends in lane
#pragma unroll
        for (int n = 4; n; n /= 2)
#pragma unroll
            for (int i = 0; i < n; ++i) {
                const bool upper = lane & n * 4;
                const float sent = upper ? square[i] : square[i + n], kept = upper ? square[i + n] : square[i];
                square[i] = kept + __shfl_xor_sync(0xffffffffu, sent, n * 4);
            }
        square[0] += __shfl_xor_sync(0xffffffffu, square[0], 2);
        square[0] += __shfl_xor_sync(0xffffffffu, square[0], 1);
        if (lane % 4 == 0) st_shared_f32(smem + SQUARES + warp * 32 + lane, square[0]);
    }
    bar_sync<CONSUMERS>(3);
    const int row = min(lane >> 2, TOKENS - 1) * 64 + (lane & 3) * 16;
    for (int i = warp; i < p.tile_end - p.tile_begin; i += WARPS)
#pragma unroll
        for (int gi = 0; gi < GROUPS; ++gi) {
            f32x4 sum[2] = {};
#pragma unroll
            for (int c = gi * 4 / GROUPS; c < (gi + 1) * 4 / GROUPS; ++c) {
                const u32x4 b = ld_shared_v4(smem + X + i * XTILE + c * BLOCK + row);
                mma_m16n8k16<HALF>(sum[0], F::ONE_LOW, F::ONE_LOW, F::ONE_HIGH, F::ONE_HIGH, b.x, b.y);
                mma_m16n8k16<HALF>(sum[1], F::ONE_LOW, F::ONE_LOW, F::ONE_HIGH, F::ONE_HIGH, b.z, b.w);
            }
            if (lane < 4)
                st_shared_f2(smem + X + i * XTILE + gi * BLOCK + TOKENS * 64 + lane * 8,
                             {(sum[0].x + sum[1].x) * F::SUM_SCALE, (sum[0].y + sum[1].y) * F::SUM_SCALE});
        }
    bar_sync<CONSUMERS>(3);
}

// Sums of rows g (x, y) and g + 8 (z, w).
DEVICE void times(f32x4 (&sums)[NB], float top, float bottom) {
#pragma unroll
    for (f32x4& v : sums) v = {v.x * top, v.y * top, v.z * bottom, v.w * bottom};
}
// From the unit before to this group's scales.
DEVICE void in_units_of(float top, float bottom, f32x4 (&sums)[NB], f32x2& unit) {
    top += 0x1p-60f, bottom += 0x1p-60f;
    const float from_top = unit.x * rcp_approx(top), from_bottom = unit.y * rcp_approx(bottom);
    unit = {top, bottom};
    times(sums, from_top, from_bottom);
}

// One tile of S strips (NEXT apart); x: the tile's record.
DEVICE void multiply(f32x4 (&acc)[S][NB], f32x2 (&unit)[S], u32 weights, u32 x, int lane) {
    const u32 at = weights + lane * 16, scales = weights + (lane >> 2) * 4, zeros = weights + (lane >> 2) * 2;
    const int row = min(lane >> 2, TOKENS - 1) * 64 + (lane & 3) * 16;
    u32x4 words[S];
    f32x2 zero[S];
#pragma unroll
    for (int c = 0; c < 4; ++c) {
        const int gi = c * GROUPS / 4;
        if (c % 2 == 0)
#pragma unroll
            for (int s = 0; s < S; ++s) words[s] = ld_shared_v4(at + s * NEXT + c / 2 * fu::kVectorBytes);
        if (c % (4 / GROUPS) == 0)
#pragma unroll
            for (int s = 0; s < S; ++s) {
                const GroupScale q = group_scale<GROUP>(scales + s * NEXT, zeros + s * NEXT, gi);
                zero[s] = {q.z0, q.z1};
                in_units_of(q.s0, q.s1, acc[s], unit[s]);
            }
        u32x4 b[NB];
#pragma unroll
        for (int nb = 0; nb < NB; ++nb) b[nb] = ld_shared_v4(x + c * BLOCK + (PREPARE ? row : nb * 512 + lane * 16));
#pragma unroll
        for (int s = 0; s < S; ++s)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                u32 a[4];
                F::dequantise(c % 2 ? half ? words[s].w : words[s].z : half ? words[s].y : words[s].x, a);
#pragma unroll
                for (int nb = 0; nb < NB; ++nb)
                    mma_m16n8k16<HALF>(acc[s][nb], a[0], a[1], a[2], a[3], half ? b[nb].z : b[nb].x,
                                       half ? b[nb].w : b[nb].y);
            }
        if ((c + 1) % (4 / GROUPS) == 0)
#pragma unroll
            for (int nb = 0; nb < NB; ++nb) {
                const u32 sums = PREPARE ? gi * BLOCK + TOKENS * 64 : TOKENS * 256 + (gi * TOKENS + nb * 8) * 4;
                const f32x2 xs = ld_shared_f2(x + sums + (lane & 3) * 8);
#pragma unroll
                for (int s = 0; s < S; ++s) {
                    f32x4& v = acc[s][nb];
                    v = {fmaf(-zero[s].x, xs.x, v.x), fmaf(-zero[s].x, xs.y, v.y), fmaf(-zero[s].y, xs.x, v.z),
                         fmaf(-zero[s].y, xs.y, v.w)};
                }
            }
    }
}

// ---- the same on wgmma ---------------------------------------------------------------------------------------------

// An operand's descriptor: `low` is its address in units of 16 bytes, with the distance of its core matrices (8 rows x
// 16 bytes) along k above 16 bits; they lie ROWS bytes apart along the rows. Only sums in uniform registers stay single
// instructions.
template <int ROWS>
DEVICE u64 descriptor(u32 low) {
    return u64(low) | u64(ROWS / 16) << 32;
}
DEVICE u32 uniform(u32 v) { return __shfl_sync(0xffffffffu, v, 0); }

// As multiply: a vector of words becomes operands while the one before multiplies. The zero points are one more step of
// k: the zero as bfloat16 (8 bits) times the sum of x in three parts, with that core matrix taken twice and a of its
// second half zero.
DEVICE void multiply_wgmma(f32x4 (&acc)[S][NB], f32x2 (&unit)[S], u32 weights, u32 x, int lane) {
    const u32 at = weights + lane * 16, scales = weights + (lane >> 2) * 4, zeros = weights + (lane >> 2) * 2;
#pragma unroll
    for (int s = 0; s < S; ++s) {
        const u32 pair = ld_shared_u32(scales + s * NEXT + fu::kNibbleBytes);
        in_units_of(to_f32<true>(u16(pair)), to_f32<true>(u16(pair >> 16)), acc[s], unit[s]);
    }
    const u32 units = uniform(x >> 4 & 0x3fff | 8 << 16), zeros_at = uniform((x + TOKENS * 256) >> 4 & 0x3fff);
    constexpr int AHEAD = S > 1 && WARPS > 12 ? 1 : 2;  // registers for two strips' sums or for operands of two vectors
    u32 operands[AHEAD][4][4];
#pragma unroll
    for (int b = 0; b < 2 * S; ++b) {  // a vector of words: four steps
        const int s = b / 2, half = b % 2;
        auto& a = operands[b % AHEAD];
        const u32x4 v = ld_shared_v4(at + s * NEXT + half * fu::kVectorBytes);
        if (b >= AHEAD) wgmma_wait_group<AHEAD - 1>();  // whose operands stood here
        F::dequantise(v.x, a[0]), F::dequantise(v.y, a[1]);
        F::dequantise(v.z, a[2]), F::dequantise(v.w, a[3]);
        u32 zero0 = 0, zero1 = 0;
        if (half == 0) {  // 8 z 2^-24, exact in bfloat16
            const u32 z8 = prmt(ld_shared_u16(zeros + s * NEXT + fu::kNibbleBytes + 32), 0, 0x4140);
            zero0 = prmt(__float_as_uint(to_f32<true>(u16(z8))), 0, 0x3232);
            zero1 = prmt(__float_as_uint(to_f32<true>(u16(z8 >> 16))), 0, 0x3232);
        }
        wgmma_fence();
        if (half == 0) wgmma_m64k16<NB>(acc[s], zero0, zero1, 0, 0, descriptor<128>(zeros_at));
#pragma unroll
        for (int i = 0; i < 4; ++i)
            wgmma_m64k16<NB>(acc[s], a[i][0], a[i][1], a[i][2], a[i][3],
                             descriptor<512>(units + (half * 2 + i / 2) * NB * 32 + i % 2 * 16));
        wgmma_commit_group();
    }
    wgmma_wait_group<0>();
}
}  // namespace

extern "C" __global__ void __maxnreg__(FU_REGISTERS)
    FU_KERNEL(const u8* __restrict__ x, const u8* __restrict__ weight, const void* __restrict__ norm,
              const u16* __restrict__ bias, const u16* __restrict__ residual, u16* __restrict__ y, int m, int ldx,
              int ldr, float eps, float scale) {
    extern __shared__ __align__(128) u8 shared[];
    const u32 smem = cvta_to_shared(shared);
    stamp(bias, START, 0);
    const int warp = warp_index(), lane = threadIdx.x & 31;
    const int rank = int(blockIdx.x) % CLUSTER, unit_id = int(blockIdx.x) / CLUSTER;  // uniform: no register
    Split p = {int(u32(STRIPS * unit_id) / UNITS), int(u32(STRIPS * (unit_id + 1)) / UNITS), TILES * rank / CLUSTER,
               TILES * (rank + 1) / CLUSTER};
    p.pass_end = SHARE == 1 ? p.strip_end : p.strip_begin + PASSES * PASS;
    griddepcontrol_launch_dependents();
    const int wk = warp / W / WN;

    // A warp's part: strips `mine` + s * W of a pass, tiles `first_tile` and on of a step.
    const int mine = warp / W % WN * S * W + warp % W, first_tile = wk * CHUNK;
    if (warp == WARPS) {
        if (!PREPARE && lane < XSLOTS) {
            mbarrier_init(x_full(smem, lane), 1);
            mbarrier_init(x_empty(smem, lane), WARPS);
            if (SHARE > 1) mbarrier_init(x_both(smem, lane), 1);
        }
        if (lane < SLOTS) {
            mbarrier_init(w_full(smem, lane), 1);
            mbarrier_init(w_empty(smem, lane), WARPS);
        }
    }
    fence_mbarrier_init();
    fence_proxy_async();
    if (SHARE > 1)
        barrier_cluster();
    else
        __syncthreads();

    if (warp >= WARPS) {
        if (elect_sync()) {
            if (!PREPARE && warp > WARPS)
                feed(smem, x, p, bias);
            else
                stream(smem, weight, p, bias);
        }
        __syncwarp();
        if (CLUSTER > 1) barrier_cluster();
        if (CLUSTER * SHARE > 1) barrier_cluster();
        return;
    }

    if constexpr (PREPARE) {
        prepare(smem, reinterpret_cast<const u16*>(x), static_cast<const u16*>(norm), m, ldx, p, warp, lane, bias);
        stamp(bias, X_CAME, 0);
        if (RMS && threadIdx.x < TOKENS) {  // a cluster's blocks have a part of a row each
            float sum = 0;
#pragma unroll
            for (int i = 0; i < WARPS; ++i) sum += ld_shared_f32(smem + SQUARES + i * 32 + threadIdx.x * 4);
            st_shared_f32(smem + RSTD + threadIdx.x * 4, CLUSTER > 1 ? sum : rsqrt_approx(sum / K + eps));
        }
    }

    griddepcontrol_wait();  // before what others wrote is read, and what they read is written
    if (RMS && !PREPARE && threadIdx.x < TOKENS)
        st_shared_f32(smem + RSTD + threadIdx.x * 4,
                      int(threadIdx.x) < m ? ld_global_cg_f32(static_cast<const float*>(norm) + threadIdx.x) : 0.0f);
    const auto rstd = [&](int token) -> f32x2 {
        const u32 at = smem + RSTD + token * 4;
        if (!RMS) return {1.0f, 1.0f};
        if (!PREPARE || CLUSTER == 1) return ld_shared_f2(at);
        f32x2 sum = {0, 0};
#pragma unroll
        for (int r = 0; r < CLUSTER; ++r) {
            const f32x2 part = ld_cluster_f2(mapa(at, r));
            sum.x += part.x, sum.y += part.y;
        }
        return {rsqrt_approx(sum.x / K + eps), rsqrt_approx(sum.y / K + eps)};
    };
    const Epilogue<N, HALF, FU_BIAS, FU_SWIGLU, FU_RESIDUAL> epilogue = {bias, residual, y, m, ldr, scale};
    int slot = 0, xslot = 0;
    u32 parity = 0, xparity = 0;
    for (int first = p.strip_begin; first < p.pass_end; first += NEXT_PASS) {
        const int count = min(PASS, p.strip_end - first);
        const bool some = mine - warp % W < count;  // wgmma: four neighbours multiply or none
        const int end = warp * CLUSTER + rank;      // the fragment that this warp ends first, and what it needs by then
        const auto held =
            DIRECT ? decltype(epilogue.fetch(0, 0, 0)){} : epilogue.fetch(first + end / NB, end % NB * 8, lane);
        f32x4 acc[S][NB] = {};
        f32x2 unit[S];
#pragma unroll
        for (int s = 0; s < S; ++s) unit[s] = {1.0f, 1.0f};
        for (int step = p.tile_begin; step < p.tile_end; step += STEP) {
            const int tiles = some ? p.tile_end - step - first_tile : 0;
            mbarrier_wait_parity(w_full(smem, slot), parity);
            if (!PREPARE) mbarrier_wait_parity(x_full(smem, xslot), xparity);
            if (!PREPARE && step == p.tile_begin && first == p.strip_begin) stamp(bias, X_CAME, 0);
            const u32 weights = smem + slot * SLOT + mine * STRIP + first_tile * TILE;
            const u32 record =
                smem + X + (PREPARE ? step - p.tile_begin + first_tile : xslot * STEP + first_tile) * XTILE;
#pragma unroll
            for (int i = 0; i < CHUNK; ++i) {
                if (i >= tiles) break;
                if constexpr (WGMMA)
                    multiply_wgmma(acc, unit, weights + i * TILE, record + i * XTILE, lane);
                else
                    multiply(acc, unit, weights + i * TILE, record + i * XTILE, lane);
            }
            __syncwarp();
            if (elect_sync()) {
                mbarrier_arrive(w_empty(smem, slot));
                if (!PREPARE) mbarrier_arrive(x_empty(smem, xslot));
            }
            if (++slot == SLOTS) slot = 0, parity ^= 1;
            if (!PREPARE && ++xslot == XSLOTS) xslot = 0, xparity ^= 1;
        }
        stamp(bias, MULTIPLIED, 0);
#pragma unroll
        for (int s = 0; s < S; ++s) times(acc[s], unit[s].x * F::UNIT, unit[s].y * F::UNIT);
        if constexpr (DIRECT) {
            if (RMS) bar_sync<CONSUMERS>(1);  // rstd
#pragma unroll
            for (int nb = 0; nb < NB; ++nb)
#pragma unroll
                for (int s = 0; s < S; ++s)
                    if (mine + s * W < count)
                        epilogue(first + mine + s * W, nb * 8, lane,
                                 times_tokens(acc[s][nb], rstd(nb * 8 + 2 * (lane & 3))),
                                 epilogue.fetch(first + mine + s * W, nb * 8, lane));
        } else {
            bar_sync<CONSUMERS>(1);  // the rings are read, or the sums of the pass before
#pragma unroll
            for (int s = 0; s < S; ++s)
#pragma unroll
                for (int nb = 0; nb < NB; ++nb)
                    st_shared_f4(smem + SUMS + (((wk * PASS + mine + s * W) * NB + nb) * 32 + lane) * 16, acc[s][nb]);
            finish_parts<CLUSTER, WK, PASS, NB, WARPS>(smem + SUMS, rstd, first, count, warp, rank, lane, epilogue,
                                                       held);
        }
    }
    stamp(bias, END, 0);
    if (CLUSTER * SHARE > 1) barrier_cluster();  // nobody leaves while its shared memory is being read or written
}
