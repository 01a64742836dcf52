// Y = E(X W^T): prefill's projections. e4m3 or 16-bit operands, float32 accumulators, the epilogue on the accumulators.
//
//     X [M, K]   TILE_M rows x 128 bytes of K   --TMA-->  ring of STAGES  --wgmma-->  accumulators in registers
//     W [N, K]   TILE_N rows x 128 bytes of K   --TMA-->  (128-byte swizzle)
//     Y [M, COLUMNS]                            <--TMA--  staging tile  <--stmatrix--  epilogue
//
// 132 persistent blocks of three warpgroups. The first one loads: warp 0 fills the ring, warps 1 and 2 empty the
// staging tile of consumer 0 and 1, fetch the residual of its next tile into it, and write that tile's factors. The
// other two multiply; together on one tile, TILE_M / 2 rows each, or (PINGPONG) each on a tile of its own, so that
// one's epilogue runs under the other's main loop. With CLUSTER == 2 two blocks whose tiles lie below each other load
// half of their common W tile each and multicast it: from L2 come 128 (TILE_M + TILE_N / 2) bytes a step. Tiles go down
// GROUP rows before they go right, so that X of a group and the current W stay in L2.
//
// SWIGLU: the left half of a tile's columns are gate rows of W, the right half their up rows; both come to lie in one
// thread. Any M; W's rows and Y's columns outside are zeros on the way in and dropped on the way out.
//
// Work: 2 M N K operations; bytes from memory at least M K + N K + 2 M COLUMNS. At 8192 tokens every shape of an 8B
// layer is bound by arithmetic (and by the card's power) by a factor of 8 or more.
#include "gemm_epilogue.cuh"

constexpr int N = FU_N, K = FU_K, TILE_M = FU_TILE_M, TILE_N = FU_TILE_N, STAGES = FU_STAGES, CLUSTER = FU_CLUSTER;
constexpr int GROUP = FU_GROUP;
constexpr bool PINGPONG = FU_PINGPONG, SWIGLU = FU_SWIGLU, RESIDUAL = FU_RESIDUAL, PROMOTE = FU_PROMOTE;
constexpr Operand TYPE = Operand(FU_TYPE);
constexpr int CONSUMERS = 2, TOGETHER = PINGPONG ? 1 : 2;  // warpgroups that work on one tile
constexpr int BLOCKS = TILE_M / 64 / TOGETHER;             // of 64 rows, for one warpgroup
constexpr int DEPTH = TYPE == E4M3 ? 128 : 64;             // of K in a stage: 128 bytes
constexpr int STEPS = (K + DEPTH - 1) / DEPTH;
constexpr int A_BYTES = TILE_M * 128, B_BYTES = TILE_N * 128, STAGE_BYTES = A_BYTES + B_BYTES;
constexpr int B_PARTS = SWIGLU || CLUSTER == 2 ? 2 : 1;  // copies that bring one W tile
using Out = Epilogue<BLOCKS>;
constexpr int STAGING = STAGES * STAGE_BYTES, FACTORS = STAGING + CONSUMERS * Out::BYTES;
constexpr int BARRIERS = FACTORS + CONSUMERS * Out::FACTORS;
constexpr int DECISION = BARRIERS + 8 * (2 * STAGES + 2 * CONSUMERS), TOTAL = DECISION + 8;
static_assert(TOTAL == FU_SMEM && TOTAL <= 232448, "shared memory as the lowering computes it");
static_assert(BLOCKS * TILE_N <= 384, "accumulators of a thread");

// Boxes of a staging tile go, and those of the next residual come, one after the other over three fifths of the next
// tile's multiplications (TILE_M TILE_N / 32 clocks a step): all at once, and from all multiprocessors, they are in the
// way of what feeds the tensor cores. In turns they are hidden anyway.
constexpr int PAUSE =
    PINGPONG ? 0 : STEPS * (TILE_M * TILE_N / 32) * 3 / 5 / (BLOCKS * Out::BOXES * (RESIDUAL ? 2 : 1));

constexpr bool FEW = PINGPONG && Out::FULL;  // registers for loading warps: the epilogue needs the others
constexpr int TURN = 1;                      // named barriers TURN, TURN + 1: consumer 0, 1 may multiply

struct Tile {
    int row, column;  // first row of X, column tile
};
struct Schedule {
    int down, count;  // tiles (of clusters) below each other, and in all
    DEVICE explicit Schedule(int m) {
        down = (m + TILE_M * CLUSTER - 1) / (TILE_M * CLUSTER);
        count = down * Out::TILES;
    }
    DEVICE Tile at(int t, int rank) const {
        const int group = t / (GROUP * Out::TILES), first = group * GROUP, rows = min(GROUP, down - first);
        const int rest = t - first * Out::TILES;
        return {((first + rest % rows) * CLUSTER + rank) * TILE_M, rest / rows};
    }
};

struct Ring {
    int slot = 0;
    u32 phase = 0;
    DEVICE void next() {
        if (++slot == STAGES) slot = 0, phase ^= 1;
    }
    DEVICE void skip(int steps) {
        const int to = slot + steps;
        phase ^= (to / STAGES) & 1, slot = to % STAGES;
    }
};

extern "C" __global__ void __launch_bounds__(384, 1)
    FU_KERNEL(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b,
              const __grid_constant__ TensorMap y, const __grid_constant__ TensorMap added, const float* step,
              const float* channel, const float* rstd, const u16* bias, float* squares, float* act, float* out_step,
              float scale, int m, int scaling, int again) {
    extern __shared__ __align__(1024) u8 memory[];
    const u32 ring = cvta_to_shared(memory), full = ring + BARRIERS, empty = full + 8 * STAGES;
    const u32 ready = empty + 8 * STAGES, staged = ready + 8 * CONSUMERS;  // of the staging tiles
    const int group = threadIdx.x / 128, warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
    const u32 rank = CLUSTER == 1 ? 0 : cluster_ctarank();
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {
            mbarrier_init(full + 8 * s, 1);
            mbarrier_init(empty + 8 * s, 4 * TOGETHER * CLUSTER);
        }
        for (int c = 0; c < CONSUMERS; ++c) {
            mbarrier_init(ready + 8 * c, 32);
            mbarrier_init(staged + 8 * c, 128);
        }
        fence_mbarrier_init();
        prefetch_tensormap(&a), prefetch_tensormap(&b), prefetch_tensormap(&y);
    }
    if constexpr (CLUSTER == 1)
        __syncthreads();
    else
        barrier_cluster();
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();

    Schedule schedule(m);
#if FU_OUT8
    if (!fp8_decide(act, out_step, ring + DECISION, scaling, again).run) schedule.count = 0;
#endif
    const int first = blockIdx.x / CLUSTER, stride = gridDim.x / CLUSTER;
    if (group == 0) {
        setmaxnreg_dec<FEW ? 24 : 40>();
        if (warp == 0 && lane == 0) {
            Ring at;
            for (int t = first; t < schedule.count; t += stride) {
                const Tile tile = schedule.at(t, rank);
                for (int k = 0; k < STEPS; ++k, at.next()) {
                    const u32 bar = full + 8 * at.slot, to = ring + at.slot * STAGE_BYTES;
                    mbarrier_wait_parity(empty + 8 * at.slot, at.phase ^ 1);
                    mbarrier_arrive_expect_tx(bar, STAGE_BYTES);
                    cp_async_bulk_tensor_load(to, &a, k * DEPTH, tile.row, bar);
#pragma unroll
                    for (int p = 0; p < B_PARTS; ++p) {
                        const int row = SWIGLU ? p * (N / 2) + tile.column * Out::WIDTH
                                               : tile.column * TILE_N + p * (TILE_N / B_PARTS);
                        const u32 part = to + A_BYTES + p * (B_BYTES / B_PARTS);
                        if constexpr (CLUSTER == 1)
                            cp_async_bulk_tensor_load(part, &b, k * DEPTH, row, bar);
                        else if (p == rank)
                            cp_async_bulk_tensor_multicast(part, &b, k * DEPTH, row, bar, 3);
                    }
                }
            }
        } else if (warp == 1 || warp == 2) {
            const int c = warp - 1, from = first + (PINGPONG ? c * stride : 0), by = stride * (PINGPONG ? 2 : 1);
            const u32 tiles = ring + STAGING + c * Out::BYTES;
            float input = 1.0f;
            if constexpr (TYPE == E4M3) input = ld_global_cg_f32(step);
            u32 phase = 0;
            for (int t = from; t < schedule.count; t += by, phase ^= 1) {
                const Tile tile = schedule.at(t, rank);
                const int row = tile.row + (PINGPONG ? 0 : c * BLOCKS * 64), column = tile.column * Out::WIDTH;
                if constexpr (TYPE == E4M3)
                    Out::write_factors(ring + FACTORS + c * Out::FACTORS, tile.column, channel, input, scale, lane);
                // Every lane arrives and waits: it wrote factors, and will write the next ones.
                if (RESIDUAL && lane == 0) {
                    mbarrier_arrive_expect_tx(ready + 8 * c, Out::BYTES);
                    Out::each_box(tiles, row, column, [&](u32 box, int r, int col) {
                        cp_async_bulk_tensor_load(box, &added, col, r, ready + 8 * c);
                        if (PAUSE > 0 && t != from) wait_clocks(PAUSE);
                    });
                } else {
                    mbarrier_arrive(ready + 8 * c);
                }
                mbarrier_wait_parity(staged + 8 * c, phase);
                if (lane == 0) {
                    Out::each_box(tiles, row, column, [&](u32 box, int r, int col) {
                        cp_async_bulk_tensor_store(&y, col, r, box);
                        if (PAUSE > 0 && t + by < schedule.count) wait_clocks(PAUSE);
                    });
                    cp_async_bulk_commit_group();
                    cp_async_bulk_wait_group_read();
                }
                __syncwarp();
            }
            if (lane == 0) cp_async_bulk_wait_group();
        }
    } else {
        setmaxnreg_inc<FEW ? 240 : 232>();
        const int c = group - 1;
        const u32 release = CLUSTER == 1 ? empty : mapa(empty, lane % CLUSTER);
        const u64 da = wgmma_descriptor(ring + (PINGPONG ? 0 : c * BLOCKS * 64 * 128));
        const u64 db = wgmma_descriptor(ring + A_BYTES);
        Out out{rstd, bias, squares, scale, m};
#if FU_OUT8
        out.inverse = 1.0f / ld_shared_f2(ring + DECISION).x;
#endif
        const auto free_slot = [&](int slot) {
            if constexpr (CLUSTER == 1) {
                if (lane == 0) mbarrier_arrive(release + 8 * slot);
            } else {
                if (lane < CLUSTER) mbarrier_arrive_cluster(release + 8 * slot);
            }
        };
        Ring at;
        u32 phase = 0;
        if constexpr (PINGPONG) {
            if (c == 1) {
                at.skip(STEPS);
                bar_arrive<256>(TURN);  // consumer 0 begins
            }
        }
        for (int t = first + (PINGPONG ? c * stride : 0); t < schedule.count; t += stride * (PINGPONG ? 2 : 1)) {
            Tile tile = schedule.at(t, rank);
            // Two divisions: not behind the multiplications, unless the other consumer multiplies then.
            if constexpr (!PINGPONG) computed_here(tile.row), computed_here(tile.column);
            float sums[BLOCKS][TILE_N / 2];
            // In turns, also because the parity of a barrier tells only two rounds of the ring apart.
            if constexpr (PINGPONG) bar_sync<256>(TURN + c);
            if constexpr (PROMOTE) {
                float part[BLOCKS][TILE_N / 2];
#pragma unroll
                for (int block = 0; block < BLOCKS; ++block)
#pragma unroll
                    for (int i = 0; i < TILE_N / 2; ++i) sums[block][i] = 0.0f;
                for (int k = 0; k < STEPS; ++k, at.next()) {
                    mbarrier_wait_parity(full + 8 * at.slot, at.phase);
                    const u64 s = u64(at.slot * STAGE_BYTES / 16);
                    wgmma_fence();
#pragma unroll
                    for (int i = 0; i < 4; ++i)
#pragma unroll
                        for (int block = 0; block < BLOCKS; ++block)
                            wgmma<TILE_N, TYPE>(part[block], da + s + block * 512 + 2 * i, db + s + 2 * i, i);
                    wgmma_commit_group();
                    wgmma_wait_group<0>();
                    free_slot(at.slot);
#pragma unroll
                    for (int block = 0; block < BLOCKS; ++block)
#pragma unroll
                        for (int i = 0; i < TILE_N / 2; ++i) sums[block][i] += part[block][i];
                }
                if constexpr (PINGPONG) bar_arrive<256>(TURN + 1 - c);
            } else {
                int before = 0;
                for (int k = 0; k < STEPS; ++k, at.next()) {
                    mbarrier_wait_parity(full + 8 * at.slot, at.phase);
                    const u64 s = u64(at.slot * STAGE_BYTES / 16);
                    wgmma_fence();
#pragma unroll
                    for (int i = 0; i < 4; ++i)
#pragma unroll
                        for (int block = 0; block < BLOCKS; ++block)
                            wgmma<TILE_N, TYPE>(sums[block], da + s + block * 512 + 2 * i, db + s + 2 * i, k | i);
                    wgmma_commit_group();
                    wgmma_wait_group<1>();
                    if (k > 0) free_slot(before);
                    before = at.slot;
                }
                if constexpr (PINGPONG) bar_arrive<256>(TURN + 1 - c);
                wgmma_wait_group<0>();
                free_slot(before);
            }
            mbarrier_wait_parity(ready + 8 * c, phase);
            phase ^= 1;
            const u32 to = ring + STAGING + c * Out::BYTES, factors = ring + FACTORS + c * Out::FACTORS;
#pragma unroll
            for (int block = 0; block < BLOCKS; ++block)
                out.finish(to, factors, block, tile.row + (PINGPONG ? 0 : c * BLOCKS * 64) + block * 64, tile.column,
                           warp, lane, sums[block]);
            fence_proxy_async();
            mbarrier_arrive(staged + 8 * c);
            if (PINGPONG) at.skip(STEPS);
        }
#if FU_OUT8
        if (!again) out.report(act, lane);
#endif
    }
    if constexpr (CLUSTER == 2) {  // a block must not leave while its neighbour copies into it
        __syncwarp();
        barrier_cluster();
    }
}
