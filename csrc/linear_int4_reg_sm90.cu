// y[m, N] = E(P(x)[m, K] . W[N, K]^T), INT4 weights, m <= 8 tokens. Hopper (sm_90a).
//
//   W: strips of 16 rows, each a row of 16 x 128 tiles of 1072 bytes (group 128)      x: the mma's B operand, 8 tokens
//
//   block (of GRID)   owns whole strips; a cluster of CLUSTER blocks shares strips and splits K between its blocks
//   warp (of 8)       owns a contiguous part of K in all of them: its x stays in registers (4 tiles = 64 registers)
//   ring              of SLOTS x 4 tiles *per warp*, filled by the warp's own lane 0 with cp.async.bulk: no producer
//   warp,
//                     no barrier between warps until the sums of PASS strips are added up in shared memory
//
// Bytes: every weight once from HBM, x once per block from L2. Roofline: N K (0.5 + 3/128) / 4.3 TB/s.
// Launch: all blocks are resident, at most 113 KB each, so the next kernel's blocks fit beside them; with programmatic
// dependent launch they fill their rings (up to 96 KB of weights, which depend on nothing) before griddepcontrol.wait.
// x is read only after it. One order of summation whatever m and the token's position: same input, same bits.
//
// Rendered constants: FU_KERNEL (name), FU_N, FU_K, FU_GROUP, FU_TOKENS (2 or 8: sizes the sums' buffer), FU_GRID,
// FU_CLUSTER, FU_PASS, FU_BLOCK, FU_SLOTS, FU_HALF, FU_RMS, FU_GAIN, FU_BIAS, FU_SWIGLU, FU_RESIDUAL.
#include "epilogue.cuh"
#include "int4.cuh"

namespace {
constexpr int N = FU_N, K = FU_K, GROUP = FU_GROUP, TOKENS = FU_TOKENS, CLUSTER = FU_CLUSTER, PASS = FU_PASS;
constexpr int SLOTS = FU_SLOTS, LEAD = FU_LEAD, DELAY = FU_DELAY;
constexpr bool HALF = FU_HALF, RMS = FU_RMS, GAIN = FU_GAIN;
using F = Form<HALF, Codes::SUBNORMAL>;
constexpr int WARPS = 8, THREADS = WARPS * 32;
constexpr int TILE = fu::int4_tile_bytes(GROUP), GROUPS = fu::kTileK / GROUP;
constexpr int STRIPS = (N + 15) / 16, TILES = (K + 127) / 128;
constexpr int UNITS = FU_GRID / CLUSTER;  // blocks, or clusters, that share the strips
constexpr int PARTS = CLUSTER * WARPS;    // warps that share K
constexpr int BLOCK = FU_BLOCK;           // tiles of a ring slot, and whose x is in registers: 2 or 4
constexpr int BLOCKS = ((TILES + PARTS - 1) / PARTS + BLOCK - 1) / BLOCK;
constexpr int SUM = TOKENS <= 2 ? 128 : 512;  // bytes of one strip's partial sums of one warp
static_assert(CLUSTER == 1 || (STRIPS + UNITS - 1) / UNITS <= PASS, "a cluster makes one pass");

// shared memory
constexpr int RING = 0;
constexpr int SUMS = RING + WARPS * SLOTS * BLOCK * TILE;    // [warp][strip of the pass] sums in fragment order
constexpr int XSUM = SUMS + WARPS * PASS * SUM;              // [warp][tile of the block][group][token] sum of x
constexpr int SQUARES = XSUM + WARPS * BLOCK * GROUPS * 32;  // [warp][token] sum of x^2
constexpr int WALKS = SQUARES + WARPS * 32;                  // [warp]
constexpr int BARS = WALKS + WARPS * 16;                     // [warp][slot]
constexpr int BYTES = BARS + WARPS * SLOTS * 8;
static_assert(BYTES == FU_SMEM, "the lowering computes the same size");

// The order in which a warp walks its slots: pass, block of x, strip. Between two refills it waits in shared memory:
// the registers are x's.
struct alignas(16) Walk {
    int strip, first, tile, unused;  // strip: current; first: of this pass; tile: first of the block

    DEVICE void next(int tile_begin, int tile_end, int strip_end) {
        if (++strip < min(first + PASS, strip_end)) return;
        if (BLOCKS > 1) {
            tile += BLOCK;
            strip = first;
            if (tile < tile_end) return;
            tile = tile_begin;
        }
        strip = first = first + PASS;
    }
};

struct Warp {
    u32 smem;
    int warp, lane, g, t;
};

// x of one tile: lane 4g + t holds token g, columns 32c + 8t .. 32c + 8t + 7 in registers 4c .. 4c + 3
DEVICE void load_x(u32 (&x)[16], const u16* row, int tile, int t) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
        const int k = tile * 128 + 32 * c + 8 * t;
        u32x4 v = {0, 0, 0, 0};
        if (K % 128 == 0 || k < K) v = ld_global_cg_v4(row + k);
        x[4 * c] = v.x, x[4 * c + 1] = v.y, x[4 * c + 2] = v.z, x[4 * c + 3] = v.w;
    }
}

// Sums of x over each group, by an A operand of ones: row g of the result is what lane 4g + t needs later. Sums of
// squares are the diagonal of x x^T: row g, column g, in lane 4g + g/2. x becomes the B operand on the way. The tiles
// of a block take turns: an mma that waits for the one before it takes 33 cycles.
template <bool SQUARE>
DEVICE void prepare_x(u32 (&x)[BLOCK][16], const u16* gain, int tile, int count, u32 out, const Warp& w,
                      f32x4& squares) {
    if (GAIN) gain += tile * 128 + 8 * w.t;
#pragma unroll
    for (int pair = 0; pair < BLOCK; pair += 2) {
        f32x4 square[2] = {};
#pragma unroll
        for (int gi = 0; gi < GROUPS; ++gi) {
            f32x4 sum[2] = {};
#pragma unroll
            for (int c = gi * 4 / GROUPS; c < (gi + 1) * 4 / GROUPS; ++c)
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    u32* r = x[pair + j] + 4 * c;
                    u32x4 v = {r[0], r[1], r[2], r[3]};
                    if (GAIN && pair + j < count) {  // beyond, x is zero
                        const int k = (pair + j) * 128 + 32 * c;
                        if (K % 128 == 0 || tile * 128 + 8 * w.t + k < K)
                            v = F::times_gain(v, ld_global_nc_v4(gain + k));
                    }
                    v = F::scaled(v);
                    if (SQUARE) {
                        mma_m16n8k16<HALF>(square[j], r[0], 0, r[1], 0, r[0], r[1]);
                        mma_m16n8k16<HALF>(square[j], r[2], 0, r[3], 0, r[2], r[3]);
                    }
                    mma_m16n8k16<HALF>(sum[j], F::ONE_LOW, F::ONE_LOW, F::ONE_HIGH, F::ONE_HIGH, v.x, v.y);
                    mma_m16n8k16<HALF>(sum[j], F::ONE_LOW, F::ONE_LOW, F::ONE_HIGH, F::ONE_HIGH, v.z, v.w);
                    r[0] = v.x, r[1] = v.y, r[2] = v.z, r[3] = v.w;
                }
            if (w.g == 0)
#pragma unroll
                for (int j = 0; j < 2; ++j)
                    st_shared_f2(out + ((pair + j) * GROUPS + gi) * 32 + w.t * 8,
                                 {sum[j].x * F::SUM_SCALE, sum[j].y * F::SUM_SCALE});
        }
        if (SQUARE) squares = squares + (square[0] + square[1]);
    }
}

template <int COUNT>
DEVICE void multiply(f32x4& acc, u32 slot, const u32 (*x)[16], u32 xsum, const Warp& w) {
    u32x4 words[COUNT];
#pragma unroll
    for (int gi = 0; gi < GROUPS; ++gi) {
        f32x4 c[COUNT] = {};
#pragma unroll
        for (int i = gi * 8 / GROUPS; i < (gi + 1) * 8 / GROUPS; ++i)
#pragma unroll
            for (int j = 0; j < COUNT; ++j) {
                u32 a[4];
                if (i % 4 == 0) words[j] = ld_shared_v4(slot + j * TILE + i / 4 * fu::kVectorBytes + w.lane * 16);
                F::dequantise(i % 4 == 0   ? words[j].x
                              : i % 4 == 1 ? words[j].y
                              : i % 4 == 2 ? words[j].z
                                           : words[j].w,
                              a);
                mma_m16n8k16<HALF>(c[j], a[0], a[1], a[2], a[3], x[j][2 * i], x[j][2 * i + 1]);
            }
#pragma unroll
        for (int j = 0; j < COUNT; ++j)
            add_group(acc, c[j],
                      group_scale<GROUP, Codes::SUBNORMAL>(slot + j * TILE + w.g * 4, slot + j * TILE + w.g * 2, gi),
                      ld_shared_f2(xsum + (j * GROUPS + gi) * 32 + w.t * 8));
    }
}
}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    FU_KERNEL(const u16* __restrict__ x, const u8* __restrict__ weight, const u16* __restrict__ gain,
              const u16* __restrict__ bias, const u16* __restrict__ residual, u16* __restrict__ y, int m, int ldx,
              int ldr, float eps, float scale) {
    extern __shared__ __align__(128) u8 shared[];
    const Warp w = {cvta_to_shared(shared), int(threadIdx.x >> 5), int(threadIdx.x & 31), int(threadIdx.x & 31) >> 2,
                    int(threadIdx.x & 3)};
    const u32 ring = w.smem + RING + w.warp * SLOTS * BLOCK * TILE, bars = w.smem + BARS + w.warp * SLOTS * 8;
    const u32 sums = w.smem + SUMS + w.warp * PASS * SUM, xsum = w.smem + XSUM + w.warp * BLOCK * GROUPS * 32;
    const int rank = CLUSTER > 1 ? int(cluster_ctarank()) : 0, unit = int(blockIdx.x) / CLUSTER;
    const int part = rank * WARPS + w.warp;
    const int tile_begin = TILES * part / PARTS, tile_end = TILES * (part + 1) / PARTS;
    const int strip_begin = int((long long)STRIPS * unit / UNITS),
              strip_end = int((long long)STRIPS * (unit + 1) / UNITS);
    if (LEAD < 0) griddepcontrol_launch_dependents();

    if (w.lane == 0) {
        for (int i = 0; i < SLOTS; ++i) mbarrier_init(bars + i * 8, 1);
        fence_mbarrier_init();
        fence_proxy_async();
    }
    __syncwarp();

    const u32 walk = w.smem + WALKS + w.warp * 16;
    auto fill = [&](int slot) {
        const u32x4 at = ld_shared_v4(walk);
        Walk ahead = {int(at.x), int(at.y), int(at.z), 0};
        if (ahead.strip >= strip_end) return;
        const int bytes = min(BLOCK, tile_end - ahead.tile) * TILE;
        mbarrier_arrive_expect_tx(bars + slot * 8, bytes);
        cp_async_bulk(ring + slot * BLOCK * TILE, weight + ((long long)ahead.strip * TILES + ahead.tile) * TILE, bytes,
                      bars + slot * 8, createpolicy_evict_first());
        ahead.next(tile_begin, tile_end, strip_end);
        st_shared_v4(walk, {u32(ahead.strip), u32(ahead.first), u32(ahead.tile), 0});
    };
    if (w.lane == 0) {
        const u32 first = u32(tile_begin < tile_end ? strip_begin : strip_end);
        st_shared_v4(walk, {first, first, u32(tile_begin), 0});
        if (DELAY > 0) wait_clocks(DELAY);
        for (int i = 0; i < SLOTS; ++i) fill(i);
    }
    __syncwarp();

    griddepcontrol_wait();
    const u16* row = x + (long long)min(w.g, m - 1) * ldx;  // columns of tokens that do not exist repeat the last one
    const Epilogue<N, HALF, FU_BIAS, FU_SWIGLU, FU_RESIDUAL> epilogue = {bias, residual, y, m, ldr, scale};

    u32 xr[BLOCK][16];
    const int stages = (strip_end - strip_begin) * ((tile_end - tile_begin + BLOCK - 1) / BLOCK);
    int slot = 0, done = 0;
    u32 parity = 0;
    for (int first = strip_begin; first < strip_end; first += PASS) {
        const int count = min(PASS, strip_end - first), finish = w.warp * CLUSTER + rank;  // the first strip I finish
        const auto held = epilogue.fetch(finish < count ? first + finish : STRIPS, 0, w.lane);
        bool read = first == strip_begin;  // the sums of the pass before
        for (int block = 0; block < BLOCKS; ++block) {
            const int tile = tile_begin + block * BLOCK;
            if (BLOCKS > 1 || first == strip_begin) {
                f32x4 squares = {0, 0, 0, 0};
                __syncwarp();
#pragma unroll
                for (int j = 0; j < BLOCK; ++j) {
                    if (tile + j < tile_end)
                        load_x(xr[j], row, tile + j, w.t);
                    else
                        for (u32& v : xr[j]) v = 0;
                }
                if (RMS && (BLOCKS == 1 || first == strip_begin))
                    prepare_x<true>(xr, gain, tile, tile_end - tile, xsum, w, squares);
                else
                    prepare_x<false>(xr, gain, tile, tile_end - tile, xsum, w, squares);
                if (LEAD >= 0 && first == strip_begin && block == 0 && SLOTS + LEAD >= stages)
                    griddepcontrol_launch_dependents();
                if (RMS && first == strip_begin && w.t == w.g >> 1) {  // the diagonal, added up in shared memory
                    const u32 at = w.smem + SQUARES + w.warp * 32 + w.g * 4;
                    const float before = block > 0 ? ld_shared_f32(at) : 0.0f;
                    st_shared_f32(at, before + (w.g & 1 ? squares.y : squares.x));
                }
                __syncwarp();
            }
            for (int s = 0; s < count; ++s) {
                const u32 mine = sums + s * SUM + (TOKENS <= 2 ? w.g : w.lane) * 16;
                f32x4 acc = {0, 0, 0, 0};
                if (BLOCKS > 1 && block > 0) acc = ld_shared_f4(mine);
                const int left = tile_end - tile;
                if (left > 0) {
                    mbarrier_wait_parity(bars + slot * 8, parity);
                    const u32 at = ring + slot * BLOCK * TILE;
                    if (left >= BLOCK) {
#pragma unroll
                        for (int j = 0; j < BLOCK; j += 2)
                            multiply<2>(acc, at + j * TILE, xr + j, xsum + j * GROUPS * 32, w);
                    } else {
#pragma unroll
                        for (int j = 0; j < BLOCK - 1; ++j)
                            if (j < left) multiply<1>(acc, at + j * TILE, xr + j, xsum + j * GROUPS * 32, w);
                    }
                    __syncwarp();
                    if (w.lane == 0) fill(slot);
                    if (LEAD >= 0 && w.warp == 0 && ++done + SLOTS + LEAD == stages) griddepcontrol_launch_dependents();
                    if (++slot == SLOTS) slot = 0, parity ^= 1;
                }
                if (!read) bar_sync<THREADS>(1), read = true;  // late: a strip of work hides the reduction
                if (TOKENS > 2 || w.t == 0) st_shared_f4(mine, acc);
            }
        }
        if (CLUSTER > 1)
            barrier_cluster();
        else
            bar_sync<THREADS>(2);
        f32x2 rstd = {F::UNIT, F::UNIT};
        if (RMS) {
            f32x2 total = {0, 0};
            for (int r = 0; r < CLUSTER; ++r) {
                const u32 base = CLUSTER > 1 ? mapa(w.smem + SQUARES, r) : w.smem + SQUARES;
#pragma unroll
                for (int i = 0; i < WARPS; ++i) {
                    const f32x2 v =
                        CLUSTER > 1 ? ld_cluster_f2(base + i * 32 + w.t * 8) : ld_shared_f2(base + i * 32 + w.t * 8);
                    total.x += v.x, total.y += v.y;
                }
            }
            rstd = {F::UNIT * rsqrt_approx(total.x / K + eps), F::UNIT * rsqrt_approx(total.y / K + eps)};
        }
        for (int s = finish; s < count; s += PARTS) {
            f32x4 v = {0, 0, 0, 0};
            for (int r = 0; r < CLUSTER; ++r) {
                const u32 local = w.smem + SUMS + s * SUM + (TOKENS <= 2 ? w.g : w.lane) * 16;
                const u32 base = CLUSTER > 1 ? mapa(local, r) : local;
#pragma unroll
                for (int i = 0; i < WARPS; ++i)
                    v = v + (CLUSTER > 1 ? ld_cluster_f4(base + i * PASS * SUM) : ld_shared_f4(base + i * PASS * SUM));
            }
            v = {v.x * rstd.x, v.y * rstd.y, v.z * rstd.x, v.w * rstd.y};
            if (TOKENS > 2 || w.t == 0)
                epilogue(first + s, 0, w.lane, v, s == finish ? held : epilogue.fetch(first + s, 0, w.lane));
        }
    }
    if (CLUSTER > 1) barrier_cluster();  // nobody leaves while its shared memory is being read
}
