// y[m, N] = E(P(x)[m, K] . W[N, K]^T), INT4 weights, 9 to 64 tokens. Hopper (sm_90a).
//
//   cluster (of CLUSTER blocks)   owns strips of 16 rows; its blocks split K, sums meet through distributed shared
//   memory step                          WK tiles of K: the weights of PASS = WN x S strips and x of all tokens, one
//   ring slot consumer warp (wn, wk)        S strips x tile wk of the step: every fragment of x read from shared memory
//   serves S
//                                 strips, every dequantised word serves TOKENS / 8 mma
//                                 its lane 0 refills its own tiles of the slot by cp.async.bulk
//   loader warp                   x by cp.async in the order of the mma's B operand; takes the sums of x per group and
//   of
//                                 x^2 on the way (mma with ones; diagonal of x x^T)
//
// Bytes: every weight once from HBM; x from L2 once per block and pass: K / CLUSTER x TOKENS x 2 bytes each. That is
// why K is split over a cluster where few strips share a block: at 32 tokens x would otherwise be more than the
// weights. Launch and summation order: as in linear_int4_sm90.cu (weights of the first slots before
// griddepcontrol.wait).
//
// Rendered constants: FU_KERNEL, FU_N, FU_K, FU_GROUP, FU_TOKENS (multiple of 8), FU_GRID, FU_CLUSTER, FU_WN, FU_WK,
// FU_S, FU_SLOTS, FU_BLOCKS_PER_SM, FU_SMEM, FU_HALF, FU_RMS, FU_GAIN, FU_BIAS, FU_SWIGLU, FU_RESIDUAL.
#include "epilogue.cuh"
#include "int4.cuh"

namespace {
constexpr int N = FU_N, K = FU_K, GROUP = FU_GROUP, TOKENS = FU_TOKENS, CLUSTER = FU_CLUSTER;
constexpr int WN = FU_WN, WK = FU_WK, S = FU_S, SLOTS = FU_SLOTS, LEAD = FU_LEAD, DELAY = FU_DELAY, NB = TOKENS / 8;
constexpr bool HALF = FU_HALF, RMS = FU_RMS, GAIN = FU_GAIN;
using F = Form<HALF, Codes::OFFSET>;
constexpr int WARPS = WN * WK, CONSUMERS = WARPS * 32, THREADS = CONSUMERS + 32, PASS = WN * S;
constexpr int TILE = fu::int4_tile_bytes(GROUP), GROUPS = fu::kTileK / GROUP;
constexpr int STRIPS = (N + 15) / 16, TILES = (K + 127) / 128, UNITS = FU_GRID / CLUSTER;
constexpr bool ONE_PASS = (STRIPS + UNITS - 1) / UNITS <= PASS;
constexpr bool DIRECT = CLUSTER == 1 && WK == 1;  // a warp's registers hold finished sums
constexpr int AHEAD = SLOTS > 3 ? SLOTS - 2 : 1;  // steps between the request for x and its use by the loader
static_assert(CLUSTER == 1 || ONE_PASS, "a cluster makes one pass");
static_assert(SLOTS >= 2, "a ring");

// shared memory: slots, then the sums (over the slots, when nothing follows)
constexpr int XOFF = PASS * WK * TILE, XSUM = XOFF + WK * NB * 2048;
constexpr int SLOT = (XSUM + WK * GROUPS * TOKENS * 4 + 127) / 128 * 128;
constexpr int SUM_BYTES = DIRECT ? 0 : WK * PASS * NB * 512;
constexpr int SUMS = ONE_PASS ? 0 : SLOTS * SLOT;
constexpr int RING_OR_SUMS =
    ONE_PASS ? (SLOTS * SLOT > SUM_BYTES ? SLOTS * SLOT : SUM_BYTES) : SLOTS * SLOT + SUM_BYTES;
constexpr int BAR = 16 + WARPS * 8;  // of a slot: x full, all empty, the weights of each warp full
constexpr int SQUARES = RING_OR_SUMS, BARS = SQUARES + TOKENS * 4, BYTES = BARS + SLOTS * BAR;
static_assert(BYTES == FU_SMEM, "the lowering computes the same size");

struct Split {
    int strip_begin, strip_end, tile_begin, tile_end, steps;
};

DEVICE u32 full(u32 smem, int slot) { return smem + BARS + slot * BAR; }
DEVICE u32 empty(u32 smem, int slot) { return smem + BARS + slot * BAR + 8; }
DEVICE u32 weights_full(u32 smem, int slot, int warp) { return smem + BARS + slot * BAR + 16 + warp * 8; }

// ---- loader ---------------------------------------------------------------------------------------------------------

// lane 4g + t: token 8 nb + g, columns 32c + 8t .. + 7. Rows of tokens that do not exist repeat the last one.
DEVICE void load_x(u32 slot_x, const u16* const (&rows)[NB], const Split& p, int step, int t) {
#pragma unroll
    for (int wk = 0; wk < WK; ++wk) {
        const int tile = p.tile_begin + step * WK + wk;
        if (WK > 1 && tile >= p.tile_end) break;
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            const int k = tile * 128 + 32 * c;
            const bool in = K % 128 == 0 || k + 8 * t < K;
#pragma unroll
            for (int nb = 0; nb < NB; ++nb)
                cp_async_16(slot_x + ((wk * NB + nb) * 4 + c) * 512, in ? rows[nb] + k : rows[0], in ? 16 : 0);
        }
    }
}

// Independent sums one after another: a chain of mma on one sum would take 8 x 33 cycles a tile and token block.
template <bool SQUARE>
DEVICE void sum_x(u32 slot_x, u32 slot_sum, const u16* gain, const Split& p, int step, int lane, f32x4 (&squares)[NB]) {
    constexpr u32 ONES = F::ONE_LOW;
#pragma unroll
    for (int wk = 0; wk < WK; ++wk) {
        if (WK > 1 && p.tile_begin + step * WK + wk >= p.tile_end) break;
#pragma unroll
        for (int gi = 0; gi < GROUPS; ++gi) {
            f32x4 sum[NB] = {};
#pragma unroll
            for (int c = gi * 4 / GROUPS; c < (gi + 1) * 4 / GROUPS; ++c) {
                u32x4 v[NB], g;
                if (GAIN) g = load_gain<K>(gain, (p.tile_begin + step * WK + wk) * 128 + 32 * c + 8 * (lane & 3));
#pragma unroll
                for (int nb = 0; nb < NB; ++nb) {
                    const u32 at = slot_x + ((wk * NB + nb) * 4 + c) * 512;
                    v[nb] = ld_shared_v4(at);
                    if (GAIN && SQUARE) {  // of x as it stands
                        mma_m16n8k16<HALF>(squares[nb], v[nb].x, 0, v[nb].y, 0, v[nb].x, v[nb].y);
                        mma_m16n8k16<HALF>(squares[nb], v[nb].z, 0, v[nb].w, 0, v[nb].z, v[nb].w);
                    }
                    if (GAIN) v[nb] = F::times_gain(v[nb], g), st_shared_v4(at, v[nb]);
                }
#pragma unroll
                for (int nb = 0; nb < NB; ++nb) {
                    mma_m16n8k16<HALF>(sum[nb], ONES, ONES, ONES, ONES, v[nb].x, v[nb].y);
                    if (SQUARE && !GAIN) mma_m16n8k16<HALF>(squares[nb], v[nb].x, 0, v[nb].y, 0, v[nb].x, v[nb].y);
                }
#pragma unroll
                for (int nb = 0; nb < NB; ++nb) {
                    mma_m16n8k16<HALF>(sum[nb], ONES, ONES, ONES, ONES, v[nb].z, v[nb].w);
                    if (SQUARE && !GAIN) mma_m16n8k16<HALF>(squares[nb], v[nb].z, 0, v[nb].w, 0, v[nb].z, v[nb].w);
                }
            }
            if (lane < 4)
#pragma unroll
                for (int nb = 0; nb < NB; ++nb)
                    st_shared_f2(slot_sum + ((wk * GROUPS + gi) * TOKENS + nb * 8 + lane * 2) * 4,
                                 {sum[nb].x, sum[nb].y});
        }
    }
}

DEVICE void load(u32 smem, const u16* x, const u16* gain, int m, int ldx, const Split& p, int lane) {
    const int passes = (p.strip_end - p.strip_begin + PASS - 1) / PASS, total = passes * p.steps;
    griddepcontrol_wait();
    const u16* rows[NB];
#pragma unroll
    for (int nb = 0; nb < NB; ++nb) rows[nb] = x + (long long)min(nb * 8 + (lane >> 2), m - 1) * ldx + 8 * (lane & 3);
    int slot = 0, step_x = 0, step_s = 0, slot_s = 0;
    u32 parity = 1;  // of the empty barriers: the first round passes at once
    f32x4 squares[NB] = {};
    for (int n = 0; n < total + AHEAD; ++n) {
        if (n < total) {
            mbarrier_wait_parity(empty(smem, slot), parity);
            load_x(smem + slot * SLOT + XOFF + lane * 16, rows, p, step_x, lane & 3);
            if (++step_x == p.steps) step_x = 0;
            if (++slot == SLOTS) slot = 0, parity ^= 1;
        }
        cp_async_commit_group();
        if (n < AHEAD) continue;
        cp_async_wait_group<AHEAD>();
        const u32 at = smem + slot_s * SLOT;
        if (RMS && n - AHEAD < p.steps)
            sum_x<true>(at + XOFF + lane * 16, at + XSUM, gain, p, step_s, lane, squares);
        else
            sum_x<false>(at + XOFF + lane * 16, at + XSUM, gain, p, step_s, lane, squares);
        mbarrier_arrive(full(smem, slot_s));
        if (LEAD >= 0 && n == max(AHEAD, total + AHEAD - 1 - SLOTS - LEAD)) griddepcontrol_launch_dependents();
        if (++slot_s == SLOTS) slot_s = 0;
        if (++step_s == p.steps) step_s = 0;
        if (RMS && n - AHEAD == p.steps - 1) {
#pragma unroll
            for (int nb = 0; nb < NB; ++nb)
                if ((lane & 3) == lane >> 3)
                    st_shared_f32(smem + SQUARES + (nb * 8 + (lane >> 2)) * 4,
                                  lane & 4 ? squares[nb].y : squares[nb].x);
            if (CLUSTER == 1) bar_arrive<THREADS>(3);
        }
    }
}

// ---- consumers ------------------------------------------------------------------------------------------------------

DEVICE void multiply(f32x4 (&acc)[S][NB], u32 weights, u32 x, u32 xsum, int lane) {
    const int g = lane >> 2, t = lane & 3;
    u32x4 words[S];
#pragma unroll
    for (int gi = 0; gi < GROUPS; ++gi) {
        f32x4 sum[S][NB] = {};
#pragma unroll
        for (int c = gi * 4 / GROUPS; c < (gi + 1) * 4 / GROUPS; ++c) {
            u32 a[S][2][4];
#pragma unroll
            for (int s = 0; s < S; ++s) {
                if (c % 2 == 0) words[s] = ld_shared_v4(weights + s * WK * TILE + c / 2 * fu::kVectorBytes + lane * 16);
                F::dequantise(c % 2 ? words[s].z : words[s].x, a[s][0]);
                F::dequantise(c % 2 ? words[s].w : words[s].y, a[s][1]);
            }
#pragma unroll
            for (int nb = 0; nb < NB; ++nb) {
                const u32x4 b = ld_shared_v4(x + (nb * 4 + c) * 512 + lane * 16);
#pragma unroll
                for (int s = 0; s < S; ++s) {
                    mma_m16n8k16<HALF>(sum[s][nb], a[s][0][0], a[s][0][1], a[s][0][2], a[s][0][3], b.x, b.y);
                    mma_m16n8k16<HALF>(sum[s][nb], a[s][1][0], a[s][1][1], a[s][1][2], a[s][1][3], b.z, b.w);
                }
            }
        }
        GroupScale q[S];
#pragma unroll
        for (int s = 0; s < S; ++s)
            q[s] =
                group_scale<GROUP, Codes::OFFSET>(weights + s * WK * TILE + g * 4, weights + s * WK * TILE + g * 2, gi);
#pragma unroll
        for (int nb = 0; nb < NB; ++nb) {
            const f32x2 xs = ld_shared_f2(xsum + (gi * TOKENS + nb * 8 + 2 * t) * 4);
#pragma unroll
            for (int s = 0; s < S; ++s) add_group(acc[s][nb], sum[s][nb], q[s], xs);
        }
    }
}

DEVICE f32x2 rstd_of(u32 smem, int token, float eps) {
    if constexpr (!RMS) return {1.0f, 1.0f};
    f32x2 sum = {0, 0};
    for (int r = 0; r < CLUSTER; ++r) {
        const u32 at = smem + SQUARES + token * 4;
        const f32x2 v = CLUSTER > 1 ? ld_cluster_f2(mapa(at, r)) : ld_shared_f2(at);
        sum.x += v.x, sum.y += v.y;
    }
    return {rsqrt_approx(sum.x / K + eps), rsqrt_approx(sum.y / K + eps)};
}
DEVICE f32x4 times(f32x4 v, f32x2 r) { return {v.x * r.x, v.y * r.y, v.z * r.x, v.w * r.y}; }
}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, FU_BLOCKS_PER_SM)
    FU_KERNEL(const u16* __restrict__ x, const u8* __restrict__ weight, const u16* __restrict__ gain,
              const u16* __restrict__ bias, const u16* __restrict__ residual, u16* __restrict__ y, int m, int ldx,
              int ldr, float eps, float scale) {
    extern __shared__ __align__(128) u8 shared[];
    const u32 smem = cvta_to_shared(shared);
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int rank = CLUSTER > 1 ? int(cluster_ctarank()) : 0, unit = int(blockIdx.x) / CLUSTER;
    Split p = {int((long long)STRIPS * unit / UNITS), int((long long)STRIPS * (unit + 1) / UNITS),
               TILES * rank / CLUSTER, TILES * (rank + 1) / CLUSTER, 0};
    p.steps = (p.tile_end - p.tile_begin + WK - 1) / WK;
    if (LEAD < 0) griddepcontrol_launch_dependents();

    if (threadIdx.x == CONSUMERS) {
        for (int i = 0; i < SLOTS; ++i) {
            mbarrier_init(full(smem, i), 32);
            for (int w = 0; w < WARPS; ++w) mbarrier_init(weights_full(smem, i, w), 1);
            mbarrier_init(empty(smem, i), WARPS);
        }
        fence_mbarrier_init();
        fence_proxy_async();
    }
    __syncthreads();

    if (warp == WARPS) {
        load(smem, x, gain, m, ldx, p, lane);
        if (CLUSTER > 1) {
            barrier_cluster();
            barrier_cluster();
        }
        return;
    }

    const int wn = warp % WN, wk = warp / WN;
    // The walk of the refills: pass (its first strip of this warp), step.
    int fill_first = p.strip_begin + wn * S, fill_step = 0;
    auto fill = [&](int slot) {  // by lane 0
        if (fill_first - wn * S >= p.strip_end) return;
        const u32 bar = weights_full(smem, slot, warp);
        const int tile = p.tile_begin + fill_step * WK + wk, pass_end = min(fill_first - wn * S + PASS, p.strip_end);
        const int count = tile < p.tile_end ? min(S, pass_end - fill_first) : 0;
        if (count > 0) {
            const u64 policy = createpolicy_evict_first();
            mbarrier_arrive_expect_tx(bar, count * TILE);
            for (int s = 0; s < count; ++s)
                cp_async_bulk(smem + slot * SLOT + ((wn * S + s) * WK + wk) * TILE,
                              weight + ((long long)(fill_first + s) * TILES + tile) * TILE, TILE, bar, policy);
        } else {
            mbarrier_arrive(bar);
        }
        if (++fill_step == p.steps) fill_step = 0, fill_first += PASS;
    };
    if (lane == 0) {
        if (DELAY > 0) wait_clocks(DELAY);
        for (int i = 0; i < SLOTS; ++i) fill(i);
    }
    __syncwarp();

    griddepcontrol_wait();
    const Epilogue<N, HALF, FU_BIAS, FU_SWIGLU, FU_RESIDUAL> epilogue = {bias, residual, y, m, ldr, scale};
    int slot = 0;
    u32 parity = 0;
    for (int first = p.strip_begin; first < p.strip_end; first += PASS) {
        const int count = min(PASS, p.strip_end - first);
        f32x4 acc[S][NB] = {};
        for (int step = 0; step < p.steps; ++step) {
            mbarrier_wait_parity(weights_full(smem, slot, warp), parity);
            mbarrier_wait_parity(full(smem, slot), parity);
            const u32 at = smem + slot * SLOT;
            if (p.tile_begin + step * WK + wk < p.tile_end)
                multiply(acc, at + (wn * S * WK + wk) * TILE, at + XOFF + wk * NB * 2048,
                         at + XSUM + wk * GROUPS * TOKENS * 4, lane);
            __syncwarp();
            if (lane == 0) {
                mbarrier_arrive(empty(smem, slot));
                fill(slot);
            }
            __syncwarp();
            if (++slot == SLOTS) slot = 0, parity ^= 1;
        }
        if (RMS && CLUSTER == 1 && first == p.strip_begin) bar_sync<THREADS>(3);
        if constexpr (DIRECT) {
#pragma unroll
            for (int nb = 0; nb < NB; ++nb) {
                const f32x2 rstd = rstd_of(smem, nb * 8 + 2 * (lane & 3), eps);
#pragma unroll
                for (int s = 0; s < S; ++s)
                    if (wn * S + s < count)
                        epilogue(first + wn * S + s, nb * 8, lane, times(acc[s][nb], rstd),
                                 epilogue.fetch(first + wn * S + s, nb * 8, lane));
            }
        } else {
            bar_sync<CONSUMERS>(1);  // the ring is read, or the sums of the pass before
#pragma unroll
            for (int s = 0; s < S; ++s)
#pragma unroll
                for (int nb = 0; nb < NB; ++nb)
                    st_shared_f4(smem + SUMS + (((wk * PASS + wn * S + s) * NB + nb) * 32 + lane) * 16, acc[s][nb]);
            if (CLUSTER > 1)
                barrier_cluster();
            else
                bar_sync<CONSUMERS>(2);
            for (int i = warp * CLUSTER + rank; i < count * NB; i += WARPS * CLUSTER) {
                const auto held = epilogue.fetch(first + i / NB, i % NB * 8, lane);
                f32x4 v = {0, 0, 0, 0};
                for (int r = 0; r < CLUSTER; ++r) {
                    const u32 local = smem + SUMS + (i * 32 + lane) * 16, base = CLUSTER > 1 ? mapa(local, r) : local;
#pragma unroll
                    for (int k = 0; k < WK; ++k)
                        v = v + (CLUSTER > 1 ? ld_cluster_f4(base + k * PASS * NB * 512)
                                             : ld_shared_f4(base + k * PASS * NB * 512));
                }
                epilogue(first + i / NB, i % NB * 8, lane, times(v, rstd_of(smem, i % NB * 8 + 2 * (lane & 3), eps)),
                         held);
            }
        }
    }
    if (CLUSTER > 1) barrier_cluster();  // nobody leaves while its shared memory is being read
}
