// y[m, N] = E(P(x)[m, K] . W[N, K]^T), INT4 weights, 3 to 32 tokens. Hopper (sm_90a).
//
//   cluster (of CLUSTER blocks)   owns strips of 16 rows; its blocks split K, their sums meet in shared memory
//   step                          WK x CHUNK tiles of K, for all strips of a pass (WN warps x S strips)
//   consumer warp (wn, wk)        S strips x CHUNK tiles of the step: a fragment of x read from shared memory serves S
//                                 strips, a dequantised word TOKENS / 8 mma. One lane refills the warp's own ring of
//                                 weights (SLOTS steps) by cp.async.bulk: no warp waits for another's weights
//   last warp                     rows of x by cp.async into a ring of XSLOTS steps, as they lie in memory; above 16
//                                 tokens their sums per group (mma with ones), what the zero points cost
//
// Nothing is done to x here: rows are read with 64 bytes between them so that 16-byte loads of a warp meet every bank
// once, and 16 bytes are the B operands of two steps of mma (layout.cuh, int4_nibble). A norm before the linear has
// been through rms_rows_sm90.cu: x times the gain, and the reciprocal root mean square of each row, which multiplies
// finished sums. (With every block doing that for itself it cost 15 of 48 us in gate_up of 8B at 32 tokens.)
//
// Bytes: every weight once from HBM; x from L2 once per block and pass: K / CLUSTER x TOKENS x 2 bytes each.
// Launch: weights of the first SLOTS steps, then PREFETCH more steps into L2, before griddepcontrol.wait. One order of
// summation whatever m and the token's position: same input, same bits.
//
// Rendered constants: FU_KERNEL, FU_N, FU_K, FU_GROUP, FU_TOKENS (multiple of 8), FU_GRID, FU_CLUSTER, FU_WN, FU_WK,
// FU_S, FU_CHUNK, FU_SLOTS, FU_XSLOTS, FU_PREFETCH, FU_DELAY, FU_SMEM, FU_HALF, FU_RMS, FU_BIAS, FU_SWIGLU,
// FU_RESIDUAL.
#include "epilogue.cuh"
#include "int4.cuh"
#include "parts.cuh"

namespace {
constexpr int N = FU_N, K = FU_K, GROUP = FU_GROUP, TOKENS = FU_TOKENS, NB = TOKENS / 8, CLUSTER = FU_CLUSTER;
constexpr int WN = FU_WN, WK = FU_WK, S = FU_S, CHUNK = FU_CHUNK, SLOTS = FU_SLOTS, XSLOTS = FU_XSLOTS;
constexpr int PREFETCH = FU_PREFETCH, DELAY = FU_DELAY;
constexpr bool HALF = FU_HALF, RMS = FU_RMS;
using F = Form<HALF, Codes::OFFSET>;
constexpr int WARPS = WN * WK, CONSUMERS = WARPS * 32, THREADS = CONSUMERS + 32, PASS = WN * S, STEP = WK * CHUNK;
constexpr int TILE = fu::int4_tile_bytes(GROUP), GROUPS = fu::kTileK / GROUP;
constexpr int STRIPS = (N + 15) / 16, TILES = (K + 127) / 128, UNITS = FU_GRID / CLUSTER, TAIL = K % 128;
// Few tokens: every warp takes the sums of x for itself, with tensor cores that have time; else the last warp does.
constexpr bool OWN_SUMS = NB <= 2;
constexpr bool ONE_PASS = (STRIPS + UNITS - 1) / UNITS <= PASS;
constexpr bool DIRECT = CLUSTER == 1 && WK == 1;  // a warp's registers hold finished sums
// Steps of the main loop that the compiler may interleave; more than these spill.
constexpr bool TIGHT = NB == 4 ? !(DIRECT && ONE_PASS) : NB == 2 && !(ONE_PASS && GROUPS == 1);
constexpr int HOISTED = S * NB <= 4 ? 4 : TIGHT ? 1 : 2;
static_assert(CLUSTER == 1 || ONE_PASS, "a cluster makes one pass");
static_assert(THREADS <= 384, "two blocks on a multiprocessor");
static_assert(TOKENS <= 32, "a lane has a row's rstd");

// shared memory: rings of weights and of x, then the sums (over the rings, when nothing follows)
constexpr int SLOT = S * CHUNK * TILE, X = (WARPS * SLOTS * SLOT + 127) / 128 * 128;
constexpr int PITCH = STEP * 256 + 64, XSUM = TOKENS * PITCH,
              XSLOT = XSUM + (OWN_SUMS ? 0 : STEP * GROUPS * TOKENS * 4);
constexpr int RINGS = X + XSLOTS * XSLOT, SUM_BYTES = DIRECT ? 0 : WK * PASS * NB * 512;
constexpr int SUMS = ONE_PASS ? 0 : RINGS;
constexpr int RSTD = ONE_PASS ? (SUM_BYTES > RINGS ? SUM_BYTES : RINGS) : SUMS + SUM_BYTES;
constexpr int BARS = RSTD + TOKENS * 4, WBARS = BARS + XSLOTS * 24, BYTES = WBARS + WARPS * SLOTS * 8;
static_assert(BYTES == FU_SMEM, "the lowering computes the same size");

struct Split {
    int strip_begin, strip_end, tile_begin, tile_end, steps;
};

DEVICE u32 x_full(u32 smem, int slot) { return smem + BARS + slot * 24; }
DEVICE u32 x_empty(u32 smem, int slot) { return smem + BARS + slot * 24 + 8; }
DEVICE u32 x_summed(u32 smem, int slot) { return smem + BARS + slot * 24 + 16; }

// ---- x --------------------------------------------------------------------------------------------------------------

// One step's part of every row: two rows an instruction; what K lacks in the last tile becomes zeros.
DEVICE void copy_rows(u32 to, u32 bar, const u16* x, int m, int ldx, const Split& p, int step, int lane) {
    const int tile = p.tile_begin + step * STEP, tiles = min(STEP, p.tile_end - tile);
    const int k = tile * 128 + (lane & 15) * 8;
    const u16* from = x + k;
    to += (lane >> 4) * PITCH + (lane & 15) * 16;
    for (int i = 0; i < tiles; ++i) {
        const u32 bytes = !TAIL || k + i * 128 < K ? 16 : 0;
#pragma unroll
        for (int pair = 0; pair < TOKENS / 2; ++pair) {
            const int row = min(pair * 2 + (lane >> 4), m - 1);  // of tokens that do not exist: the last one's
            cp_async_16(to + pair * 2 * PITCH + i * 256, bytes ? from + (long long)row * ldx + i * 128 : x, bytes);
        }
    }
    cp_async_mbarrier_arrive_noinc(bar);
}

// at: row g of x, 16 bytes of lane t
DEVICE void sum_groups(u32 at, u32 sums, int tiles, int lane) {
    for (int i = 0; i < tiles; ++i)
#pragma unroll
        for (int gi = 0; gi < GROUPS; ++gi) {
            f32x4 sum[NB] = {};
#pragma unroll
            for (int c = gi * 4 / GROUPS; c < (gi + 1) * 4 / GROUPS; ++c) {
                u32x4 v[NB];
#pragma unroll
                for (int nb = 0; nb < NB; ++nb) v[nb] = ld_shared_v4(at + nb * 8 * PITCH + i * 256 + c * 64);
#pragma unroll
                for (int nb = 0; nb < NB; ++nb)
                    mma_m16n8k16<HALF>(sum[nb], F::ONE_LOW, F::ONE_LOW, F::ONE_LOW, F::ONE_LOW, v[nb].x, v[nb].y);
#pragma unroll
                for (int nb = 0; nb < NB; ++nb)
                    mma_m16n8k16<HALF>(sum[nb], F::ONE_LOW, F::ONE_LOW, F::ONE_LOW, F::ONE_LOW, v[nb].z, v[nb].w);
            }
            if (lane < 4)
#pragma unroll
                for (int nb = 0; nb < NB; ++nb)
                    st_shared_f2(sums + ((i * GROUPS + gi) * TOKENS + nb * 8 + lane * 2) * 4, {sum[nb].x, sum[nb].y});
        }
}

DEVICE void feed(u32 smem, const u16* x, const float* rstd, int m, int ldx, const Split& p, int lane) {
    const int total = (p.strip_end - p.strip_begin + PASS - 1) / PASS * p.steps;
    griddepcontrol_wait();
    if (RMS && lane < TOKENS) st_shared_f32(smem + RSTD + lane * 4, lane < m ? ld_global_cg_f32(rstd + lane) : 0.0f);
    if (OWN_SUMS) mbarrier_arrive(x_summed(smem, 0));
    const u32 base = smem + X, at = base + (lane >> 2) * PITCH + (lane & 3) * 16;
    int slot = 0, step = 0, slot_s = 0, step_s = 0, n = 0;
    u32 parity = 1, parity_s = 0;  // the first round finds every slot empty
    auto ask = [&] {
        mbarrier_wait_parity(x_empty(smem, slot), parity);
        copy_rows(base + slot * XSLOT, x_full(smem, slot), x, m, ldx, p, step, lane);
        if (++step == p.steps) step = 0;
        if (++slot == XSLOTS) slot = 0, parity ^= 1;
    };
    for (; n < min(XSLOTS, total); ++n) ask();
    for (int s = 0; s < total; ++s) {
        if (!OWN_SUMS) {
            mbarrier_wait_parity(x_full(smem, slot_s), parity_s);
            sum_groups(at + slot_s * XSLOT, base + slot_s * XSLOT + XSUM,
                       min(STEP, p.tile_end - p.tile_begin - step_s * STEP), lane);
            mbarrier_arrive(x_summed(smem, slot_s));
            if (++step_s == p.steps) step_s = 0;
            if (++slot_s == XSLOTS) slot_s = 0, parity_s ^= 1;
        }
        // The slot of the step before: to wait for it first would hold up the consumers, who wait for these sums.
        if (s > 0 && n < total) ask(), ++n;
    }
}

// ---- consumers ------------------------------------------------------------------------------------------------------

// One tile of S strips (CHUNK * TILE apart); x: row g, 16 bytes of lane t; xsum: sums that the last warp has taken.
DEVICE void multiply(f32x4 (&acc)[S][NB], u32 weights, u32 x, u32 xsum, int lane) {
    const u32 at = weights + lane * 16, scales = weights + (lane >> 2) * 4, zeros = weights + (lane >> 2) * 2;
#pragma unroll 1
    for (int gi = 0; gi < GROUPS; ++gi) {
        f32x4 sum[S][NB] = {}, ones[NB] = {};
#pragma unroll HOISTED
        for (int i = 0; i < 4 / GROUPS; ++i) {
            const int c = gi * (4 / GROUPS) + i;
            u32 a[S][2][4];
#pragma unroll
            for (int s = 0; s < S; ++s) {
                u32 low, high;
                ld_shared_v2(at + s * CHUNK * TILE + c / 2 * fu::kVectorBytes + c % 2 * 8, low, high);
                F::dequantise(low, a[s][0]);
                F::dequantise(high, a[s][1]);
            }
            constexpr int PAIR = NB > 1 ? 2 : 1;  // neighbouring mma do not wait for each other's sums
#pragma unroll
            for (int first = 0; first < NB; first += PAIR) {
                u32x4 b[PAIR];
#pragma unroll
                for (int i = 0; i < PAIR; ++i) b[i] = ld_shared_v4(x + (first + i) * 8 * PITCH + c * 64);
#pragma unroll
                for (int half = 0; half < 2; ++half)
#pragma unroll
                    for (int i = 0; i < PAIR; ++i) {
                        const u32 b0 = half ? b[i].z : b[i].x, b1 = half ? b[i].w : b[i].y;
#pragma unroll
                        for (int s = 0; s < S; ++s)
                            mma_m16n8k16<HALF>(sum[s][first + i], a[s][half][0], a[s][half][1], a[s][half][2],
                                               a[s][half][3], b0, b1);
                        if (OWN_SUMS)
                            mma_m16n8k16<HALF>(ones[first + i], F::ONE_LOW, F::ONE_LOW, F::ONE_LOW, F::ONE_LOW, b0, b1);
                    }
            }
        }
        GroupScale q[S];
#pragma unroll
        for (int s = 0; s < S; ++s)
            q[s] = group_scale<GROUP, Codes::OFFSET>(scales + s * CHUNK * TILE, zeros + s * CHUNK * TILE, gi);
#pragma unroll
        for (int nb = 0; nb < NB; ++nb) {
            const f32x2 xs = OWN_SUMS ? f32x2{ones[nb].x, ones[nb].y}
                                      : ld_shared_f2(xsum + (gi * TOKENS + nb * 8 + 2 * (lane & 3)) * 4);
#pragma unroll
            for (int s = 0; s < S; ++s) add_group(acc[s][nb], sum[s][nb], q[s], xs);
        }
    }
}
}  // namespace

// Two blocks of up to 16 tokens leave room for a block of rms_rows.
extern "C" __global__ void __maxnreg__(THREADS > 256 ? 80
                                       : NB == 4     ? 128
                                                     : 112)
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

    const int wn = warp % WN, wk = warp / WN;
    const u32 ring = smem + warp * SLOTS * SLOT, bars = smem + WBARS + warp * SLOTS * 8;
    // The walk of the refills: my first strip of the pass, my first tile of the step.
    struct Walk {
        int strip, tile;
    } walk = {p.strip_begin + wn * S, p.tile_begin + wk * CHUNK};
    const u64 policy = createpolicy_evict_first();
    auto fill = [&](int slot) {  // by one lane; into L2 alone when there is no slot
        if (ONE_PASS ? walk.tile - wk * CHUNK >= p.tile_end : walk.strip - wn * S >= p.strip_end) return;
        const int bytes = min(CHUNK, p.tile_end - walk.tile) * TILE;
        const int count = bytes > 0 ? min(S, p.strip_end - walk.strip) : 0;
        const u8* from = weight + ((long long)walk.strip * TILES + walk.tile) * TILE;
        const u32 bar = bars + slot * 8;
        if (slot >= 0 && count <= 0) mbarrier_arrive(bar);
        if (slot >= 0 && count > 0) mbarrier_arrive_expect_tx(bar, count * bytes);
#pragma unroll
        for (int s = 0; s < S; ++s, from += (long long)TILES * TILE)
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
    if (warp == WARPS) {
        if (lane < XSLOTS) {
            mbarrier_init(x_full(smem, lane), 32);
            mbarrier_init(x_empty(smem, lane), WARPS);
            mbarrier_init(x_summed(smem, lane), 32);
            fence_mbarrier_init();
            fence_proxy_async();
        }
    } else if (elect_sync()) {
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

    if (warp == WARPS) {
        feed(smem, x, rstd, m, ldx, p, lane);
        if (CLUSTER > 1) {
            barrier_cluster();
            barrier_cluster();
        }
        return;
    }

    griddepcontrol_wait();
    const Epilogue<N, HALF, FU_BIAS, FU_SWIGLU, FU_RESIDUAL> epilogue = {bias, residual, y, m, ldr, scale};
    const u32 xs = smem + X + (lane >> 2) * PITCH + (lane & 3) * 16 + wk * CHUNK * 256;
    int slot = 0, xslot = 0;
    u32 parity = 0, xparity = 0;
    for (int first = p.strip_begin; first < p.strip_end; first += ONE_PASS ? N : PASS) {
        const int count = min(PASS, p.strip_end - first);
        f32x4 acc[S][NB] = {};
        for (int step = 0; step < p.steps; ++step) {
            mbarrier_wait_parity(bars + slot * 8, parity);
            mbarrier_wait_parity(x_full(smem, xslot), xparity);
            const int tiles = min(CHUNK, p.tile_end - (p.tile_begin + step * STEP + wk * CHUNK));
            if (!OWN_SUMS && tiles > 0) mbarrier_wait_parity(x_summed(smem, xslot), xparity);
#pragma unroll 1
            for (int i = 0; i < tiles; ++i)
                multiply(acc, ring + slot * SLOT + i * TILE, xs + xslot * XSLOT + i * 256,
                         smem + X + xslot * XSLOT + XSUM + (wk * CHUNK + i) * GROUPS * TOKENS * 4, lane);
            __syncwarp();
            if (elect_sync()) {
                fill(slot);
                mbarrier_arrive(x_empty(smem, xslot));
            }
            if (++slot == SLOTS) slot = 0, parity ^= 1;
            if (++xslot == XSLOTS) xslot = 0, xparity ^= 1;
        }
        if (RMS && OWN_SUMS) mbarrier_wait_parity(x_summed(smem, 0), 0);  // rstd
        if constexpr (DIRECT) {
#pragma unroll
            for (int nb = 0; nb < NB; ++nb)
#pragma unroll
                for (int s = 0; s < S; ++s)
                    if (wn * S + s < count)
                        epilogue(first + wn * S + s, nb * 8, lane,
                                 times_rstd<RMS>(acc[s][nb], smem + RSTD, nb * 8 + 2 * (lane & 3)),
                                 epilogue.fetch(first + wn * S + s, nb * 8, lane));
        } else {
            bar_sync<CONSUMERS>(1);  // the rings are read, or the sums of the pass before
#pragma unroll
            for (int s = 0; s < S; ++s)
#pragma unroll
                for (int nb = 0; nb < NB; ++nb)
                    st_shared_f4(smem + SUMS + (((wk * PASS + wn * S + s) * NB + nb) * 32 + lane) * 16, acc[s][nb]);
            finish_parts<CLUSTER, WK, PASS, NB, WARPS, RMS>(smem + SUMS, smem + RSTD, first, count, warp, rank, lane,
                                                            epilogue);
        }
    }
    if (CLUSTER > 1) barrier_cluster();  // nobody leaves while its shared memory is being read
}
