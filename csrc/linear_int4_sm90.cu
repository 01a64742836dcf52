// y[m, N] = E(P(x)[m, K] . W[N, K]^T), INT4 weights, m <= 8 tokens. Hopper (sm_90a).
//
//   W: strips of 16 rows, each a row of 16 x 128 tiles of 1072 bytes (group 128)      x: the mma's B operand, 8 tokens
//
//   cluster (of CLUSTER blocks)   owns whole strips; its blocks split K, sums meet through distributed shared memory
//   stage                         WS strips x WK tiles, one tile for each of the 16 warps; SLOTS stages in a ring, each
//                                 WS copies of up to WK x 1072 contiguous bytes
//   warp (wk, ws)                 tiles wk, wk + WK, ... of its strips: x of those tiles only, in shared memory
//   refill                        by a warp that takes turns, once all 16 have arrived at the stage it refills
//   sums                          of PASS strip groups meet in shared memory, then a warp finishes a strip
//
// Sixteen warps with 64 registers rather than eight with 128: dequantising is chains of 4-cycle integer instructions,
// and two warps a scheduler leave it idle 61 % of the time (ncu; 3.2 TB/s). Bytes: every weight once from HBM, x once
// per block from L2. Roofline: N K (0.5 + 3/128) / 4.3 TB/s. Launch: all blocks are resident, at most 113 KB each, so
// the next kernel's blocks fit beside them; with programmatic dependent launch they fill their rings (weights depend on
// nothing) before griddepcontrol.wait. x is read only after it. Memory must not idle while one grid ends and the next
// waits and loads x, so the next grid comes in early (LEAD: stages before the last refill; -1: at once). But its first
// act is to ask for 11 MB of weights, and x of this grid would queue behind them (measured: 1.3 to 3.2 us instead of
// 0.3 to 0.6): it waits DELAY clocks first. One order of summation whatever m and the token's position: same input,
// same bits.
//
// Rendered constants: FU_KERNEL (name), FU_N, FU_K, FU_GROUP, FU_TOKENS (1, 2, 4 or 8), FU_GRID, FU_CLUSTER, FU_WK,
// FU_PASS, FU_SLOTS, FU_LEAD, FU_DELAY, FU_SMEM, FU_HALF, FU_RMS, FU_GAIN, FU_BIAS, FU_SWIGLU, FU_RESIDUAL.
#include "epilogue.cuh"
#include "int4.cuh"

namespace {
constexpr int N = FU_N, K = FU_K, GROUP = FU_GROUP, TOKENS = FU_TOKENS, CLUSTER = FU_CLUSTER;
constexpr int WARPS = 16, THREADS = WARPS * 32, WK = FU_WK, WS = WARPS / WK, PASS = FU_PASS, SLOTS = FU_SLOTS,
              LEAD = FU_LEAD, DELAY = FU_DELAY;
constexpr bool HALF = FU_HALF, RMS = FU_RMS, GAIN = FU_GAIN;
using F = Form<HALF, Codes::SUBNORMAL>;
constexpr int TILE = fu::int4_tile_bytes(GROUP), GROUPS = fu::kTileK / GROUP;
constexpr int STRIPS = (N + 15) / 16, TILES = (K + 127) / 128, UNITS = FU_GRID / CLUSTER;
constexpr int DEPTH = (TILES + CLUSTER - 1) / CLUSTER;  // tiles of a block along K
constexpr int CHUNKS = (DEPTH + WK - 1) / WK;           // stages of a strip group
constexpr bool EVEN = TILES % (CLUSTER * WK) == 0;      // every warp has a tile in every chunk
// Every warp multiplies by x that no other warp needs, and by so much that it prepares a tile when it first needs it.
constexpr bool LAZY = WS == 1 && CHUNKS > 2;
constexpr int LANES = TOKENS <= 2 ? 1 : TOKENS / 2;  // lanes of a quad whose accumulators are tokens
constexpr int SUM = 8 * LANES * 16;                  // bytes of one warp's sums of a strip

// shared memory
constexpr int SLOT = WS * WK * TILE;
constexpr int X = SLOTS * SLOT;  // [tile][c][token][64 bytes]
constexpr int XTILE = TOKENS * 256;
constexpr int XSUM = X + CHUNKS * WK * XTILE;           // [tile][group][8 tokens] f32
constexpr int SUMS = XSUM + CHUNKS * WK * GROUPS * 32;  // [strip group of the pass][ws][wk] sums
constexpr int SQUARES = SUMS + PASS * WARPS * SUM;      // [warp][8 tokens] f32
constexpr int BARS = SQUARES + WARPS * 32, BYTES = BARS + SLOTS * 16;
static_assert(BYTES == FU_SMEM, "the lowering computes the same size");

DEVICE u32 x_at(u32 smem, int tile, int c, int lane) {
    return smem + X + tile * XTILE + (c * TOKENS + (lane >> 2) % TOKENS) * 64 + (lane & 3) * 16;
}

// x of one tile from L2 to shared memory. k0: its first column.
DEVICE void load_x(u32 smem, const u16* x, int m, int ldx, int tile, int k0, int lane) {
    for (int i = lane; i < TOKENS * 16; i += 32) {
        const int c = i / (4 * TOKENS), token = i / 4 % TOKENS, k = k0 + 32 * c + 8 * (i & 3);
        const bool in = K % 128 == 0 || k < K;
        cp_async_16(smem + X + tile * XTILE + i * 16, in ? x + (long long)min(token, m - 1) * ldx + k : x, in ? 16 : 0);
    }
}

// Sums of squares of x as the diagonal of x x^T (in lane 4g + g/2); then x becomes the B operand, in place, and its
// sums over each group come from an A operand of ones.
DEVICE void prepare_x(u32 smem, const u16* gain, int tile, int k0, int warp, int lane) {
    constexpr int CHAINS = GROUPS == 1 ? 2 : GROUPS;  // an mma that waits for the one before it takes 33 cycles
    f32x4 sum[CHAINS] = {}, square[2] = {};
    u32x4 gains[4];
    if (GAIN)
#pragma unroll
        for (int c = 0; c < 4; ++c) gains[c] = load_gain<K>(gain, k0 + 32 * c + 8 * (lane & 3));
#pragma unroll
    for (int c = 0; c < 4; ++c) {
        const u32 at = x_at(smem, tile, c, lane);
        const u32x4 raw = ld_shared_v4(at), v = F::scaled(GAIN ? F::times_gain(raw, gains[c]) : raw);
        mma_m16n8k16<HALF>(sum[GROUPS == 1 ? c & 1 : c * GROUPS / 4], F::ONE_LOW, F::ONE_LOW, F::ONE_HIGH, F::ONE_HIGH,
                           v.x, v.y);
        if (RMS) mma_m16n8k16<HALF>(square[0], raw.x, 0, raw.y, 0, raw.x, raw.y);
        mma_m16n8k16<HALF>(sum[GROUPS == 1 ? c & 1 : c * GROUPS / 4], F::ONE_LOW, F::ONE_LOW, F::ONE_HIGH, F::ONE_HIGH,
                           v.z, v.w);
        if (RMS) mma_m16n8k16<HALF>(square[1], raw.z, 0, raw.w, 0, raw.z, raw.w);
        __syncwarp();  // lanes of tokens that do not exist read what another lane writes
        if (F::SCALED || GAIN) st_shared_v4(at, v);
    }
    if (GROUPS == 1) sum[0] = sum[0] + sum[1];
    if (lane < 4)
#pragma unroll
        for (int gi = 0; gi < GROUPS; ++gi)
            st_shared_f2(smem + XSUM + (tile * GROUPS + gi) * 32 + lane * 8,
                         {sum[gi].x * F::SUM_SCALE, sum[gi].y * F::SUM_SCALE});
    const int g = lane >> 2;
    if (RMS && (lane & 3) == g >> 1) {
        const u32 at = smem + SQUARES + warp * 32 + g * 4;
        const float total = g & 1 ? square[0].y + square[1].y : square[0].x + square[1].x;
        st_shared_f32(at, ld_shared_f32(at) + total);
    }
    __syncwarp();
}

// A lane's addresses in slot 0 and chunk 0.
struct Operands {
    u32 codes, scales, zeros, x, xsum;
};
// The value from here on, not how it was computed: else the compiler computes it again for every tile.
DEVICE u32 keep(u32 v) {
    asm volatile("" : "+r"(v));
    return v;
}

DEVICE void multiply(f32x4& acc, const Operands& at, u32 slot, int tile) {
    const u32 codes = at.codes + slot, x = at.x + tile * XTILE;
    u32x4 words;
#pragma unroll
    for (int gi = 0; gi < GROUPS; ++gi) {
        f32x4 sum = {0, 0, 0, 0}, odd = {0, 0, 0, 0};  // two chains of mma
#pragma unroll
        for (int c = gi * 4 / GROUPS; c < (gi + 1) * 4 / GROUPS; ++c) {
            if (c % 2 == 0) words = ld_shared_v4(codes + c / 2 * fu::kVectorBytes);
            const u32x4 b = ld_shared_v4(x + c * TOKENS * 64);
            u32 a[4];
            F::dequantise(c % 2 ? words.z : words.x, a);
            mma_m16n8k16<HALF>(sum, a[0], a[1], a[2], a[3], b.x, b.y);
            F::dequantise(c % 2 ? words.w : words.y, a);
            mma_m16n8k16<HALF>(odd, a[0], a[1], a[2], a[3], b.z, b.w);
        }
        add_group(acc, sum + odd, group_scale<GROUP, Codes::SUBNORMAL>(at.scales + slot, at.zeros + slot, gi),
                  ld_shared_f2(at.xsum + (tile * GROUPS + gi) * 32));
    }
}

// All threads whose sums meet.
DEVICE void meet() {
    if constexpr (CLUSTER > 1)
        barrier_cluster();
    else
        __syncthreads();
}
DEVICE f32x4 read_f4(u32 at, int rank) {
    if constexpr (CLUSTER > 1) return ld_cluster_f4(mapa(at, rank));
    return ld_shared_f4(at);
}
DEVICE f32x2 read_f2(u32 at, int rank) {
    if constexpr (CLUSTER > 1) return ld_cluster_f2(mapa(at, rank));
    return ld_shared_f2(at);
}
}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    FU_KERNEL(const u16* __restrict__ x, const u8* __restrict__ weight, const u16* __restrict__ gain,
              const u16* __restrict__ bias, const u16* __restrict__ residual, u16* __restrict__ y, int m, int ldx,
              int ldr, float eps, float scale) {
    extern __shared__ __align__(128) u8 shared[];
    const u32 smem = cvta_to_shared(shared);
    const int warp = warp_index(), lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const int wk = warp % WK, ws = warp / WK;
    const int rank = CLUSTER > 1 ? int(cluster_ctarank()) : 0, unit = int(blockIdx.x) / CLUSTER;
    const int tile_begin = TILES * rank / CLUSTER;
    const int depth = TILES % CLUSTER ? TILES * (rank + 1) / CLUSTER - tile_begin : DEPTH;
    const int strip_begin = int((long long)STRIPS * unit / UNITS),
              strip_end = int((long long)STRIPS * (unit + 1) / UNITS);
    const int chunks = TILES % CLUSTER ? (depth + WK - 1) / WK : CHUNKS;

    if (LEAD < 0) griddepcontrol_launch_dependents();
    const int stages = (strip_end - strip_begin + WS - 1) / WS * chunks;
    auto fill = [&](int slot,
                    int stage) {  // by lane 0 of one warp; stages: strip group by strip group, chunk by chunk of K
        const u32 bar = smem + BARS + slot * 16;
        const int strip = strip_begin + stage / chunks * WS, chunk = stage % chunks;
        const int bytes = min(WK, depth - chunk * WK) * TILE, count = min(WS, strip_end - strip);
        const u8* from = weight + ((long long)strip * TILES + tile_begin + chunk * WK) * TILE;
        const u64 policy = createpolicy_evict_first();
        mbarrier_arrive_expect_tx(bar, count * bytes);
        for (int s = 0; s < count; ++s)
            cp_async_bulk(smem + slot * SLOT + s * WK * TILE, from + (long long)s * TILES * TILE, bytes, bar, policy);
    };
    if (warp < SLOTS && elect_sync()) {  // a warp a slot
        mbarrier_init(smem + BARS + warp * 16, 1);
        mbarrier_init(smem + BARS + warp * 16 + 8, WARPS);
        fence_mbarrier_init();
        fence_proxy_async();
        if (DELAY > 0) wait_clocks(DELAY);
        if (warp < stages) fill(warp, warp);
    }
    if (lane < 8) st_shared_f32(smem + SQUARES + warp * 32 + lane * 4, 0.0f);
    __syncwarp();

    griddepcontrol_wait();
    // Each warp brings the tiles of x that it multiplies by; warps of other strips share them.
#pragma unroll 1
    for (int i = ws; i < chunks; i += WS) {
        if (i * WK + wk < depth) load_x(smem, x, m, ldx, i * WK + wk, (tile_begin + i * WK + wk) * 128, lane);
        if (i == ws) cp_async_commit_group();  // the first tile by itself: work on it hides the latency of the others
    }
    cp_async_commit_group();
    if (!LAZY) {
        cp_async_wait_group<0>();
        __syncwarp();
#pragma unroll 1
        for (int i = ws; i < chunks; i += WS)
            if (i * WK + wk < depth) prepare_x(smem, gain, i * WK + wk, (tile_begin + i * WK + wk) * 128, warp, lane);
    } else {
        cp_async_wait_group<1>();
    }
    __syncthreads();  // x is there; the barriers are initialised
    if (LEAD >= 0 && SLOTS + LEAD >= stages) griddepcontrol_launch_dependents();

    const Epilogue<N, HALF, FU_BIAS, FU_SWIGLU, FU_RESIDUAL> epilogue = {bias, residual, y, m, ldr, scale};
    const Operands at = {keep(smem + (ws * WK + wk) * TILE + lane * 16), keep(smem + (ws * WK + wk) * TILE + g * 4),
                         keep(smem + (ws * WK + wk) * TILE + g * 2), keep(x_at(smem, wk, 0, lane)),
                         keep(smem + XSUM + wk * GROUPS * 32 + t * 8)};
    f32x2 rstd = {F::UNIT, F::UNIT};
    int slot = 0, stage = 0;
    u32 parity = 0;
    for (int first = strip_begin; first < strip_end; first += PASS * WS) {
        bool read = first == strip_begin;  // the sums of the pass before
        const int count = min(PASS * WS, strip_end - first), last = warp * CLUSTER + rank;  // the strip I finish
        const auto held = epilogue.fetch(last < count ? first + last : STRIPS, 0, lane);
        u32 mine = smem + SUMS + warp * SUM + (g * LANES + t) * 16;
        for (int s = ws; s < count + ws; s += WS, mine += WARPS * SUM) {
            f32x4 acc = {0, 0, 0, 0};
            for (int chunk = 0; chunk < chunks; ++chunk) {
                // The slot of the stage before: refilled by a warp that takes turns.
                if ((stage - 1) % WARPS == warp && stage - 1 + SLOTS < stages) {
                    const int before = slot == 0 ? SLOTS - 1 : slot - 1;
                    mbarrier_wait_parity(smem + BARS + before * 16 + 8, slot == 0 ? parity ^ 1 : parity);
                    if (elect_sync()) fill(before, stage - 1 + SLOTS);
                    if (LEAD >= 0 && stage - 1 + SLOTS + LEAD >= stages) griddepcontrol_launch_dependents();
                    __syncwarp();
                }
                ++stage;
                if (LAZY && first == strip_begin && s == ws && (EVEN || chunk * WK + wk < depth)) {
                    if (chunk == 1) cp_async_wait_group<0>(), __syncwarp();
                    prepare_x(smem, gain, chunk * WK + wk, (tile_begin + chunk * WK + wk) * 128, warp, lane);
                }
                mbarrier_wait_parity(smem + BARS + slot * 16, parity);
                if ((EVEN || chunk * WK + wk < depth) && (WS == 1 || s < count))
                    multiply(acc, at, slot * SLOT, chunk * WK);
                __syncwarp();
                if (lane == 0) mbarrier_arrive(smem + BARS + slot * 16 + 8);
                if (++slot == SLOTS) slot = 0, parity ^= 1;
            }
            if (!read) meet(), read = true;  // late: a strip group of work hides the reduction
            if (t < LANES) st_shared_f4(mine, acc);
        }
        meet();
        static_assert(PASS * WS <= WARPS * CLUSTER, "a warp finishes one strip of a pass");
        if (last < count) {
            if (RMS && first == strip_begin) {
                f32x2 total = {0, 0};
                for (int r = 0; r < CLUSTER; ++r)
#pragma unroll 4
                    for (int i = 0; i < WARPS; ++i) {
                        const f32x2 v = read_f2(smem + SQUARES + i * 32 + t * 8, r);
                        total.x += v.x, total.y += v.y;
                    }
                rstd = {F::UNIT * rsqrt_approx(total.x / K + eps), F::UNIT * rsqrt_approx(total.y / K + eps)};
            }
            if (t < LANES) {
                f32x4 v = {0, 0, 0, 0};
                for (int r = 0; r < CLUSTER; ++r)
#pragma unroll 4
                    for (int i = 0; i < WK; ++i)
                        v = v + read_f4(smem + SUMS + (last * WK + i) * SUM + (g * LANES + t) * 16, r);
                epilogue(first + last, 0, lane, {v.x * rstd.x, v.y * rstd.y, v.z * rstd.x, v.w * rstd.y}, held);
            }
        }
    }
    if (CLUSTER > 1) barrier_cluster();  // nobody leaves while its shared memory is being read
}
