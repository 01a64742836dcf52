// y[m, N] = E(P(x)[m, K] . W[N, K]^T), INT4 weights in groups of 128, up to 32 tokens, on wgmma. Hopper (sm_90a).
//
//   cluster (of CLUSTER blocks)    owns strips of 16 rows; its blocks split K, their sums meet in shared memory
//   step                           WK x CHUNK tiles of K, for all strips of a pass (WN warpgroups x S x 4 strips)
//   consumer warpgroup (wn, wk)    S times 64 rows, one strip of each a warp: dequantised words are the A operand of
//                                  wgmma.m64nTOKENSk16 in registers, x is its B operand in shared memory; while one
//                                  step multiplies, the words of the next become operands
//   consumer warp                  one lane refills the warp's own ring of weights (SLOTS steps) by cp.async.bulk
//   last warpgroup                 rows of x by cp.async into a ring of XSLOTS steps, then in place into the operand's
//                                  order; sums of x per tile and token, what the zero points cost
//
// Order of the columns: lane t of a fragment owns columns 8t .. 8t+7 of 32 (layout.cuh, int4_nibble), so k of a step is
// not the column. A core matrix (8 rows x 16 bytes) q = 0..3 of 32 columns is made of the column pairs q, q + 4, q + 8,
// q + 12: a 4 x 4 transpose of 4-byte words, which 8 rows do in one load and four stores of a warp without a bank
// twice.
//
//   x of a tile: [32 columns c][8 rows rg][core matrix q][row][16 bytes]
//
// Sums in units of the group's scale: before a tile the accumulators are multiplied by (scale before) / (this scale),
// in float32, and at the end by the last one: a second set of accumulators would not fit. A scale of zero counts as
// 2^-60, far below any float16. A norm before the linear has been through rms_rows_sm90.cu.
//
// Rendered constants: FU_KERNEL, FU_N, FU_K, FU_GROUP (128), FU_TOKENS (8, 16, 32), FU_GRID, FU_CLUSTER, FU_WN, FU_WK,
// FU_S, FU_CHUNK, FU_SLOTS, FU_XSLOTS, FU_PREFETCH, FU_DELAY, FU_SMEM, FU_HALF, FU_RMS, FU_BIAS, FU_SWIGLU,
// FU_RESIDUAL.
#include "epilogue.cuh"
#include "gemm_ptx.cuh"
#include "int4.cuh"
#include "parts.cuh"

namespace {
constexpr int N = FU_N, K = FU_K, TOKENS = FU_TOKENS, NB = TOKENS / 8, CLUSTER = FU_CLUSTER;
constexpr int WN = FU_WN, WK = FU_WK, S = FU_S, CHUNK = FU_CHUNK, SLOTS = FU_SLOTS, XSLOTS = FU_XSLOTS;
constexpr int PREFETCH = FU_PREFETCH, DELAY = FU_DELAY;
constexpr bool HALF = FU_HALF, RMS = FU_RMS;
using F = Form<HALF, Codes::OFFSET>;
constexpr int GROUPS = WN * WK, WARPS = GROUPS * 4, CONSUMERS = WARPS * 32, THREADS = CONSUMERS + 128;
constexpr int PASS = WN * S * 4, STEP = WK * CHUNK, TILE = fu::int4_tile_bytes(FU_GROUP);
constexpr int STRIPS = (N + 15) / 16, TILES = (K + 127) / 128, UNITS = FU_GRID / CLUSTER;
constexpr bool ONE_PASS = (STRIPS + UNITS - 1) / UNITS <= PASS;
constexpr bool DIRECT = CLUSTER == 1 && WK == 1;  // a warp's registers hold finished sums
static_assert(FU_GROUP == 128, "one scale a tile");
static_assert(CLUSTER == 1 || ONE_PASS, "a cluster makes one pass");
static_assert(NB == 1 || NB == 2 || NB == 4, "four warps share the blocks of x evenly");
static_assert(XSLOTS >= 2, "a ring");

// shared memory: rings of weights and of x, then the sums (over the rings, when nothing follows)
constexpr int SLOT = S * CHUNK * TILE, X = (WARPS * SLOTS * SLOT + 127) / 128 * 128;
constexpr int PARTS = 4 / NB;  // partial sums of x a token and tile, one for each warp that has a part of the row
constexpr int XTILE = TOKENS * 256, XSUM = STEP * XTILE, XSLOT = XSUM + (STEP * PARTS * TOKENS * 4 + 127) / 128 * 128;
constexpr int RINGS = X + XSLOTS * XSLOT, SUM_BYTES = DIRECT ? 0 : WK * PASS * NB * 512;
constexpr int SUMS = ONE_PASS ? 0 : RINGS;
constexpr int RSTD = ONE_PASS ? (SUM_BYTES > RINGS ? SUM_BYTES : RINGS) : SUMS + SUM_BYTES;
constexpr int BARS = RSTD + TOKENS * 4, WBARS = BARS + XSLOTS * 16, BYTES = WBARS + WARPS * SLOTS * 8;
static_assert(BYTES == FU_SMEM, "the lowering computes the same size");

struct Split {
    int strip_begin, strip_end, tile_begin, tile_end, steps;
};

DEVICE u32 x_full(u32 smem, int slot) { return smem + BARS + slot * 16; }
DEVICE u32 x_empty(u32 smem, int slot) { return smem + BARS + slot * 16 + 8; }

// ---- x --------------------------------------------------------------------------------------------------------------

// Warp w has rows 8 (w % NB) .. + 7 and the 32 columns from 32 (w / NB) NB of every tile: NB blocks of 512 bytes.
// Lane 4r + j: row r, columns 8j .. 8j + 7 of each.
DEVICE u32 block_of(int w, int i) { return ((w / NB * NB + i) * NB + w % NB) * 512; }

// The block that has landed, in place: 16 bytes a lane, then word q of lane 4r + j to core matrix q, row r, place j.
// Returns the sum of the 8 values.
DEVICE float transpose(u32 block, int lane) {
    const u32x4 v = ld_shared_v4(block + lane * 16);
    __syncwarp();
    st_shared_u32(block + lane * 4, v.x), st_shared_u32(block + 128 + lane * 4, v.y);
    st_shared_u32(block + 256 + lane * 4, v.z), st_shared_u32(block + 384 + lane * 4, v.w);
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const u32 pair = i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
        sum += to_f32<HALF>(u16(pair)) + to_f32<HALF>(u16(pair >> 16));
    }
    return sum;
}

DEVICE void feed(u32 smem, const u16* x, const float* rstd, int m, int ldx, const Split& p, int w, int lane) {
    const int total = (p.strip_end - p.strip_begin + PASS - 1) / PASS * p.steps;
    griddepcontrol_wait();
    if (RMS && w == 0 && lane < TOKENS)
        st_shared_f32(smem + RSTD + lane * 4, lane < m ? ld_global_cg_f32(rstd + lane) : 0.0f);
    const int row = min(w % NB * 8 + (lane >> 2), m - 1), column = w / NB * NB * 32 + (lane & 3) * 8;
    const u16* from = x + (long long)row * ldx + column;  // of tokens that do not exist: the last one's
    int asked = 0, slot_a = 0, step_a = 0, slot = 0, step = 0;
    u32 parity = 1;  // the first round finds every slot empty
    auto ask = [&] {
        if (asked < total) {
            mbarrier_wait_parity(x_empty(smem, slot_a), parity);
            const int tile = p.tile_begin + step_a * STEP, tiles = min(STEP, p.tile_end - tile);
            for (int i = 0; i < tiles; ++i)
#pragma unroll
                for (int b = 0; b < NB; ++b) {
                    const int k = (tile + i) * 128 + b * 32;
                    const bool in = K % 128 == 0 || k + column < K;
                    cp_async_16(smem + X + slot_a * XSLOT + i * XTILE + block_of(w, b) + lane * 16, in ? from + k : x,
                                in ? 16 : 0);
                }
            if (++step_a == p.steps) step_a = 0;
            if (++slot_a == XSLOTS) slot_a = 0, parity ^= 1;
            ++asked;
        }
        cp_async_commit_group();
    };
    for (int i = 0; i < XSLOTS - 1; ++i) ask();
    for (int s = 0; s < total; ++s) {
        cp_async_wait_group<XSLOTS - 2>();
        __syncwarp();
        const int tiles = min(STEP, p.tile_end - p.tile_begin - step * STEP);
        const u32 at = smem + X + slot * XSLOT;
        for (int i = 0; i < tiles; ++i) {
            float sum = 0;
#pragma unroll
            for (int b = 0; b < NB; ++b) sum += transpose(at + i * XTILE + block_of(w, b), lane);
            sum += __shfl_xor_sync(0xffffffffu, sum, 1);
            sum += __shfl_xor_sync(0xffffffffu, sum, 2);
            if ((lane & 3) == 0)
                st_shared_f32(at + XSUM + ((i * PARTS + w / NB) * TOKENS + w % NB * 8 + (lane >> 2)) * 4, sum);
        }
        fence_proxy_async();  // tensor cores read what ordinary stores wrote
        mbarrier_arrive(x_full(smem, slot));
        if (++step == p.steps) step = 0;
        if (++slot == XSLOTS) slot = 0;
        ask();  // into the slot of the step before
    }
}

// ---- consumers ------------------------------------------------------------------------------------------------------

// d += a b: a 64 x 16 (16 rows a warp, as mma_m16n8k16 has them), b TOKENS x 16 in shared memory, k along 16 bytes.
DEVICE void wgmma_m64k16(f32x4 (&d)[NB], const u32 (&a)[4], u64 b) {
#define FU_RS(SHAPE, TYPE, REGS, A, B)                                                                               \
    "{\n .reg .pred p;\n setp.ne.b32 p, 1, 0;\n wgmma.mma_async.sync.aligned." SHAPE ".f32." TYPE "." TYPE " {" REGS \
    "}, {" A "}, " B ", p, 1, 1, 0;\n}"
#define FU_DF(i) "+f"(d[i].x), "+f"(d[i].y), "+f"(d[i].z), "+f"(d[i].w)
#define FU_AB "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)
#define FU_CASE(TYPE)                                                                                                 \
    if constexpr (NB == 1)                                                                                            \
        asm volatile(FU_RS("m64n8k16", TYPE, "%0, %1, %2, %3", "%4, %5, %6, %7", "%8") : FU_DF(0) : FU_AB);           \
    else if constexpr (NB == 2)                                                                                       \
        asm volatile(FU_RS("m64n16k16", TYPE, "%0, %1, %2, %3, %4, %5, %6, %7", "%8, %9, %10, %11", "%12")            \
                     : FU_DF(0), FU_DF(1)                                                                             \
                     : FU_AB);                                                                                        \
    else                                                                                                              \
        asm volatile(FU_RS("m64n32k16", TYPE, "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15", \
                           "%16, %17, %18, %19", "%20")                                                               \
                     : FU_DF(0), FU_DF(1), FU_DF(2), FU_DF(3)                                                         \
                     : FU_AB)
    if constexpr (HALF) {
        FU_CASE("f16");
    } else {
        FU_CASE("bf16");
    }
}

// x of 32 columns and one step: core matrices 128 bytes apart along k, 512 along the rows.
DEVICE u64 descriptor(u32 smem) { return u64((smem & 0x3FFFF) >> 4) | (u64(8) << 16) | (u64(32) << 32); }

// One tile of S strips of this warp (CHUNK * TILE apart).
DEVICE void multiply(f32x4 (&acc)[S][NB], f32x2 (&unit)[S], u32 weights, u32 x, u32 xsum, int lane) {
    const u32 scales = weights + fu::kNibbleBytes + (lane >> 2) * 4;
    const u32 zeros = weights + fu::kNibbleBytes + 32 + (lane >> 2) * 2;
#pragma unroll
    for (int s = 0; s < S; ++s) {
        const u32 pair = ld_shared_u32(scales + s * CHUNK * TILE);
        const float s0 = to_f32<true>(u16(pair)) + 0x1p-60f, s1 = to_f32<true>(u16(pair >> 16)) + 0x1p-60f;
        const float r0 = unit[s].x * rcp_approx(s0), r1 = unit[s].y * rcp_approx(s1);
        unit[s] = {s0, s1};
#pragma unroll
        for (int nb = 0; nb < NB; ++nb)
            acc[s][nb] = {acc[s][nb].x * r0, acc[s][nb].y * r0, acc[s][nb].z * r1, acc[s][nb].w * r1};
    }
    u32 a[2][4][4];
#pragma unroll
    for (int b = 0; b < 2 * S; ++b) {  // a vector of words: four steps
        const int s = b / 2, half = b % 2;
        const u32x4 v = ld_shared_v4(weights + s * CHUNK * TILE + half * fu::kVectorBytes + lane * 16);
        if (b >= 2) wgmma_wait_group<1>();  // whose operands stood here
        F::dequantise(v.x, a[b % 2][0]), F::dequantise(v.y, a[b % 2][1]);
        F::dequantise(v.z, a[b % 2][2]), F::dequantise(v.w, a[b % 2][3]);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 4; ++i)
            wgmma_m64k16(acc[s], a[b % 2][i], descriptor(x + (half * 2 + i / 2) * NB * 512 + i % 2 * 256));
        wgmma_commit_group();
    }
    f32x2 z[S], xs[NB];
#pragma unroll
    for (int s = 0; s < S; ++s) {
        const u32 z8 = prmt(ld_shared_u16(zeros + s * CHUNK * TILE), 0x58, 0x4140);  // 128 + z, as float16
        z[s] = {to_f32<true>(u16(z8)), to_f32<true>(u16(z8 >> 16))};
    }
#pragma unroll
    for (int nb = 0; nb < NB; ++nb) {
        xs[nb] = {0, 0};
#pragma unroll
        for (int i = 0; i < PARTS; ++i) {
            const f32x2 part = ld_shared_f2(xsum + (i * TOKENS + nb * 8 + 2 * (lane & 3)) * 4);
            xs[nb].x += part.x, xs[nb].y += part.y;
        }
    }
    wgmma_wait_group<0>();
#pragma unroll
    for (int s = 0; s < S; ++s)
#pragma unroll
        for (int nb = 0; nb < NB; ++nb) {
            f32x4& v = acc[s][nb];
            v = {fmaf(-z[s].x, xs[nb].x, v.x), fmaf(-z[s].x, xs[nb].y, v.y), fmaf(-z[s].y, xs[nb].x, v.z),
                 fmaf(-z[s].y, xs[nb].y, v.w)};
        }
}
}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    FU_KERNEL(const u16* __restrict__ x, const u8* __restrict__ weight, const float* __restrict__ rstd,
              const u16* __restrict__ bias, const u16* __restrict__ residual, u16* __restrict__ y, int m, int ldx,
              int ldr, float, float scale) {
    extern __shared__ __align__(128) u8 shared[];
    const u32 smem = cvta_to_shared(shared);
    const int warp = warp_index(), lane = threadIdx.x & 31;
    const int rank = int(blockIdx.x) % CLUSTER, unit_id = int(blockIdx.x) / CLUSTER;  // uniform: no register
    Split p = {int(u32(STRIPS * unit_id) / UNITS), int(u32(STRIPS * (unit_id + 1)) / UNITS), TILES * rank / CLUSTER,
               TILES * (rank + 1) / CLUSTER, 0};
    p.steps = (p.tile_end - p.tile_begin + STEP - 1) / STEP;
    griddepcontrol_launch_dependents();
    if (threadIdx.x == CONSUMERS) {
        for (int i = 0; i < XSLOTS; ++i)
            mbarrier_init(x_full(smem, i), 128), mbarrier_init(x_empty(smem, i), CONSUMERS);
        fence_mbarrier_init();
    }

    // Warp wi of warpgroup (wn, wk): strips (wn S + s) 4 + wi of a pass.
    const int wg = warp / 4, wn = wg % WN, wk = wg / WN, mine = wn * S * 4 + warp % 4;
    const u32 ring = smem + warp * SLOTS * SLOT, bars = smem + WBARS + warp * SLOTS * 8;
    struct Walk {
        int strip, tile;
    } walk = {p.strip_begin + mine, p.tile_begin + wk * CHUNK};
    const u64 policy = createpolicy_evict_first();
    auto fill = [&](int slot) {  // by one lane; into L2 alone when there is no slot
        if (ONE_PASS ? walk.tile - wk * CHUNK >= p.tile_end : walk.strip - mine >= p.strip_end) return;
        const int bytes = min(CHUNK, p.tile_end - walk.tile) * TILE;
        const int count = bytes > 0 ? min(S, (p.strip_end - walk.strip + 3) / 4) : 0;
        const u8* from = weight + ((long long)walk.strip * TILES + walk.tile) * TILE;
        const u32 bar = bars + slot * 8;
        if (slot >= 0 && count <= 0) mbarrier_arrive(bar);
        if (slot >= 0 && count > 0) mbarrier_arrive_expect_tx(bar, count * bytes);
#pragma unroll
        for (int s = 0; s < S; ++s, from += (long long)TILES * TILE * 4)
            if (s >= count)
                break;
            else if (slot < 0)
                cp_async_bulk_prefetch_l2(from, bytes);
            else
                cp_async_bulk(ring + slot * SLOT + s * CHUNK * TILE, from, bytes, bar, policy);
        walk.tile += STEP;
        if (!ONE_PASS && walk.tile - wk * CHUNK >= p.tile_end)
            walk.tile = p.tile_begin + wk * CHUNK, walk.strip += PASS;
    };
    if (warp < WARPS && elect_sync()) {
        for (int i = 0; i < SLOTS; ++i) mbarrier_init(bars + i * 8, 1);
        fence_mbarrier_init();
        fence_proxy_async();
        if (DELAY > 0) wait_clocks(DELAY);
        for (int i = 0; i < SLOTS; ++i) fill(i);
        const Walk filled = walk;
        for (int i = 0; i < PREFETCH; ++i) fill(-1);
        walk = filled;
    }
    __syncthreads();  // the barriers of x

    if (warp >= WARPS) {
        if (GROUPS > 1) setmaxnreg_dec<40>();
        feed(smem, x, rstd, m, ldx, p, warp - WARPS, lane);
        if (CLUSTER > 1) {
            barrier_cluster();
            barrier_cluster();
        }
    } else {
        if (GROUPS > 1) setmaxnreg_inc<96>();
        griddepcontrol_wait();
        const Epilogue<N, HALF, FU_BIAS, FU_SWIGLU, FU_RESIDUAL> epilogue = {bias, residual, y, m, ldr, scale};
        int slot = 0, xslot = 0;
        u32 parity = 0, xparity = 0;
        for (int first = p.strip_begin; first < p.strip_end; first += ONE_PASS ? N : PASS) {
            const int count = min(PASS, p.strip_end - first);
            f32x4 acc[S][NB] = {};
            f32x2 unit[S];
#pragma unroll
            for (int s = 0; s < S; ++s) unit[s] = {1.0f, 1.0f};
            for (int step = 0; step < p.steps; ++step) {
                mbarrier_wait_parity(bars + slot * 8, parity);
                mbarrier_wait_parity(x_full(smem, xslot), xparity);
                const int tiles = min(CHUNK, p.tile_end - (p.tile_begin + step * STEP + wk * CHUNK));
                const u32 at = smem + X + xslot * XSLOT;
#pragma unroll 1
                for (int i = 0; i < tiles; ++i)
                    multiply(acc, unit, ring + slot * SLOT + i * TILE, at + (wk * CHUNK + i) * XTILE,
                             at + XSUM + (wk * CHUNK + i) * PARTS * TOKENS * 4, lane);
                __syncwarp();
                if (elect_sync()) fill(slot);
                mbarrier_arrive(x_empty(smem, xslot));
                if (++slot == SLOTS) slot = 0, parity ^= 1;
                if (++xslot == XSLOTS) xslot = 0, xparity ^= 1;
            }
#pragma unroll
            for (int s = 0; s < S; ++s)
#pragma unroll
                for (int nb = 0; nb < NB; ++nb)
                    acc[s][nb] = {acc[s][nb].x * unit[s].x, acc[s][nb].y * unit[s].x, acc[s][nb].z * unit[s].y,
                                  acc[s][nb].w * unit[s].y};
            if constexpr (DIRECT) {
#pragma unroll
                for (int nb = 0; nb < NB; ++nb)
#pragma unroll
                    for (int s = 0; s < S; ++s)
                        if (mine + s * 4 < count)
                            epilogue(first + mine + s * 4, nb * 8, lane,
                                     times_rstd<RMS>(acc[s][nb], smem + RSTD, nb * 8 + 2 * (lane & 3)),
                                     epilogue.fetch(first + mine + s * 4, nb * 8, lane));
            } else {
                bar_sync<CONSUMERS>(1);  // the rings are read, or the sums of the pass before
#pragma unroll
                for (int s = 0; s < S; ++s)
#pragma unroll
                    for (int nb = 0; nb < NB; ++nb)
                        st_shared_f4(smem + SUMS + (((wk * PASS + mine + s * 4) * NB + nb) * 32 + lane) * 16,
                                     acc[s][nb]);
                finish_parts<CLUSTER, WK, PASS, NB, WARPS, RMS>(smem + SUMS, smem + RSTD, first, count, warp, rank,
                                                                lane, epilogue);
            }
        }
        if (CLUSTER > 1) barrier_cluster();  // nobody leaves while its shared memory is being read
    }
}
