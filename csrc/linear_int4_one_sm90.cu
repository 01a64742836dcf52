// y[m, N] = E(P(x)[m, K] . W[N, K]^T), INT4 weights, 1 or 2 tokens, in integers. Hopper (sm_90a).
//
//   block                owns strips of 16 rows (a cluster of CLUSTER blocks shares strips and splits K); keeps its
//                        part of x in shared memory as signed 8-bit digits, the B operand of mma.m16n8k32 (u8 x s8)
//   warp (wn, wk)        S strips at a time, tiles wk of WK along K; a ring of SLOTS chunks of S x CHUNK tiles that its
//                        lane 0 refills with cp.async.bulk: until the sums of a pass meet, no warp waits for another
//                        but for x, of which warps with the same wk prepare what they multiply
//
// The packed bytes are the A operand as they stand. A byte is n0 + 16 n1, two codes of one row, so
//     16 (n0 x0 + n1 x1)  =  byte x1  +  n0 (16 x0 - x1)
// and 8 codes cost one mask and one permutation instead of five integer instructions, and half an mma instead of one.
// x is a fixed point number in each group: x = X 2^(e-17), |X| < 2^18, 2^e <= max |x| < 2^(e+1); X and 16 X0 - X1 are
// three digits of base 256, in three of a token's four columns.
// Digits and sums are exact; X is exact for bfloat16 down to 2^-10 of the group's largest value, and off by 2^-19 of
// that below.
//
// Bytes: every weight once from HBM, x once per block from L2. Roofline: N K (0.5 + 3/128) / 4.3 TB/s.
// Launch: at most 113 KB a block, so that the next kernel's blocks fit beside it; with programmatic dependent launch
// they fill their rings (weights depend on nothing) before griddepcontrol.wait. Their first act would be to ask for 11
// MB of weights, and x of this grid would queue behind them: they wait DELAY clocks. One order of summation whatever m
// and the token's position: same input, same bits.
//
// Rendered constants: FU_KERNEL, FU_N, FU_K, FU_GROUP, FU_TOKENS (1 or 2), FU_GRID, FU_CLUSTER, FU_WN, FU_WK, FU_S,
// FU_CHUNK, FU_BATCH, FU_SLOTS, FU_PREFETCH, FU_DELAY, FU_PACE, FU_SMEM, FU_HALF, FU_RMS, FU_GAIN, FU_BIAS, FU_SWIGLU,
// FU_RESIDUAL, FU_STAMPS (`bias` then takes the times of Moment).
#include "epilogue.cuh"
#include "int4.cuh"
#include "stamp.cuh"

namespace {
constexpr int N = FU_N, K = FU_K, GROUP = FU_GROUP, TOKENS = FU_TOKENS, CLUSTER = FU_CLUSTER;
constexpr int WN = FU_WN, WK = FU_WK, WARPS = WN * WK, THREADS = WARPS * 32, S = FU_S;
constexpr int CHUNK = FU_CHUNK, SLOTS = FU_SLOTS, DELAY = FU_DELAY, PACE = FU_PACE, PREFETCH = FU_PREFETCH;
constexpr int PASS = WN * S;
constexpr bool HALF = FU_HALF, RMS = FU_RMS, GAIN = FU_GAIN;
constexpr int TILE = fu::int4_tile_bytes(GROUP), GROUPS = fu::kTileK / GROUP;
constexpr int STRIPS = (N + 15) / 16, TILES = (K + 127) / 128, UNITS = FU_GRID / CLUSTER;
// Tiles of x that a warp prepares side by side.
constexpr int BATCH = FU_BATCH;
constexpr bool EVEN = TILES % (CLUSTER * WARPS * BATCH) == 0;
constexpr int DEPTH = (TILES + CLUSTER - 1) / CLUSTER;  // most tiles of a block along K

// shared memory
constexpr int RING = 0, SLOT = S * CHUNK * TILE, X = (WARPS * SLOTS * SLOT + 127) / 128 * 128;
// [tile][bytes, masked][token][digit][t][4 words of 4 digits]; before that the row of x as it stands, and the gain
constexpr bool STAGED = TOKENS == 2 || DEPTH <= 64;  // there is room for the gain
constexpr int XTILE = TOKENS == 1 && STAGED ? 512 : TOKENS * 384, GAINS = TOKENS * 256;
constexpr int XSCALE = X + DEPTH * XTILE;            // [tile][group][t]: unit, sum of x
constexpr int SUMS = XSCALE + DEPTH * GROUPS * 32;   // three passes: [wk][strip][g] f32x4
constexpr int SQUARES = SUMS + 3 * WK * PASS * 128;  // [warp][token]
constexpr int BARS = SQUARES + WARPS * 8, BYTES = BARS + WARPS * SLOTS * 8;
static_assert(BYTES == FU_SMEM, "the lowering computes the same size");

struct Range {
    int begin, end;
};
// Part i of n of a range.
DEVICE Range part(Range r, int i, int n) {
    const int length = r.end - r.begin;
    return {r.begin + length * i / n, r.begin + length * (i + 1) / n};
}

// Two neighbouring digits D (0: the highest) of two fixed point numbers, as bytes.
template <int D>
DEVICE u16 digits(u32 a, u32 b) {
    return u16(prmt(a, b, (2 - D) | (6 - D) << 4));
}
// The three signed digits of a number below 2^23 - 2^15 - 2^7: bytes 2, 1, 0.
DEVICE u32 signed_digits(int v) { return (u32(v) + 0x808080u) ^ 0x808080u; }

// One tile of one token: lane 8p + 2t + h takes columns 32p + 8t + 4h .. + 3, which are the low (0, 1) and high (2, 3)
// codes of bytes 2h and 2h + 1 of word p. raw: those four values; gain: likewise. Returns the sum of their squares.
DEVICE float prepare_x(u32 smem, u64 raw, u64 gain, int i, int token, int lane) {
    float v[4], square = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        v[j] = to_f32<HALF>(u16(raw >> 16 * j));
        if (RMS) square = fmaf(v[j], v[j], square);
        if (GAIN) v[j] = to_f32<HALF>(from_f32<HALF>(v[j] * to_f32<HALF>(u16(gain >> 16 * j))));
    }
    u32 most = 0;  // of the group, as bits: they order like the numbers
#pragma unroll
    for (int j = 0; j < 4; ++j) most = max(most, __float_as_uint(v[j]) & 0x7fffffffu);
    if (GROUPS == 1) {
        most = redux_max(most);
    } else {
#pragma unroll
        for (int k = 16 / GROUPS; k; k >>= 1) most = max(most, __shfl_xor_sync(0xffffffffu, most, k));
    }
    const u32 e = min(max(most >> 23, 40u), 254u);  // biased; of tiny groups nothing is left
    const float scale = __uint_as_float((271 - e) << 23);
    int f[4], sum = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        f[j] = int(__float_as_uint(fmaf(v[j], scale, 12582912.0f)) - 0x4b400000u);  // to nearest, |f| < 2^18
        sum += f[j];
    }
    if (GROUPS == 1) {
        sum = redux_add(sum);
    } else {
#pragma unroll
        for (int k = 16 / GROUPS; k; k >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, k);
    }
    const u32 a = signed_digits(f[2]), b = signed_digits(f[3]);
    const u32 c = signed_digits(16 * f[0] - f[2]), d = signed_digits(16 * f[1] - f[3]);
    const u32 to = smem + X + i * XTILE + token * 192 + (lane >> 1 & 3) * 16 + (lane >> 3) * 4 + (lane & 1) * 2;
    st_shared_u16(to, digits<0>(a, b)), st_shared_u16(to + 64, digits<1>(a, b));
    st_shared_u16(to + 128, digits<2>(a, b)), st_shared_u16(to + TOKENS * 192, digits<0>(c, d));
    st_shared_u16(to + TOKENS * 192 + 64, digits<1>(c, d)), st_shared_u16(to + TOKENS * 192 + 128, digits<2>(c, d));
    // Lane 2 token of a quad has the first two digits, in units of 256, and the zero point's part; lane 2 token + 1 the
    // third. Sums are 16 n X; x 2^21 for zeros that are read as 8 z 2^-24. Infinities and NaNs come through as NaN.
    if (lane % (32 / GROUPS) < 2) {
        const bool low = lane & 1;
        const float unit = __uint_as_float(most >= 0x7f800000u ? 0x7fffffffu : (e - 21 + (low ? 0 : 8)) << 23);
        st_shared_f2(smem + XSCALE + (i * GROUPS + lane / (32 / GROUPS)) * 32 + (2 * token + low) * 8,
                     {unit, low ? 0.0f : float(sum) * 0x1p17f});
    }
    return square;
}

// One tile of S strips, SLOT / S apart.
DEVICE void multiply(f32x2 (&acc)[S], u32 tile, u32 x, u32 xscale, int lane) {
    const int g = lane >> 2;
    const u32x4 bytes = ld_shared_v4(x), masked = ld_shared_v4(x + TOKENS * 192);
    u32 a[S][8];
#pragma unroll
    for (int s = 0; s < S; ++s) {
        const u32 at = tile + s * (SLOT / S) + lane * 16;
        const u32x4 low = ld_shared_v4(at), high = ld_shared_v4(at + fu::kVectorBytes);
        a[s][0] = prmt(low.x, low.y, 0x6420), a[s][1] = prmt(low.x, low.y, 0x7531);
        a[s][2] = prmt(low.z, low.w, 0x6420), a[s][3] = prmt(low.z, low.w, 0x7531);
        a[s][4] = prmt(high.x, high.y, 0x6420), a[s][5] = prmt(high.x, high.y, 0x7531);
        a[s][6] = prmt(high.z, high.w, 0x6420), a[s][7] = prmt(high.z, high.w, 0x7531);
    }
    constexpr u32 LOW = 0x0f0f0f0fu;
    const int factor = lane & 1 ? 1 : 256, second = lane & 1 ? 0 : -1;  // the fourth column repeats the third
#pragma unroll
    for (int gi = 0; gi < GROUPS; ++gi) {
        const f32x2 unit = ld_shared_f2(xscale + gi * 32);
#pragma unroll
        for (int s = 0; s < S; ++s) {
            s32x4 c = {0, 0, 0, 0}, d = {0, 0, 0, 0};  // two chains
            const u32* q = a[s];
            if (GROUPS == 1) {
                mma_m16n8k32(c, q[0], q[1], q[2], q[3], bytes.x, bytes.y);
                mma_m16n8k32(d, q[0] & LOW, q[1] & LOW, q[2] & LOW, q[3] & LOW, masked.x, masked.y);
                mma_m16n8k32(c, q[4], q[5], q[6], q[7], bytes.z, bytes.w);
                mma_m16n8k32(d, q[4] & LOW, q[5] & LOW, q[6] & LOW, q[7] & LOW, masked.z, masked.w);
            } else if (GROUPS == 2) {
                const u32* h = q + 4 * gi;
                mma_m16n8k32(c, h[0], h[1], h[2], h[3], gi ? bytes.z : bytes.x, gi ? bytes.w : bytes.y);
                mma_m16n8k32(d, h[0] & LOW, h[1] & LOW, h[2] & LOW, h[3] & LOW, gi ? masked.z : masked.x,
                             gi ? masked.w : masked.y);
            } else {
                const u32* h = q + 2 * gi;
                const u32 b = gi == 0 ? bytes.x : gi == 1 ? bytes.y : gi == 2 ? bytes.z : bytes.w;
                const u32 l = gi == 0 ? masked.x : gi == 1 ? masked.y : gi == 2 ? masked.z : masked.w;
                mma_m16n8k32(c, h[0], h[1], h[0] & LOW, h[1] & LOW, b, l);
            }
            const u32 at = tile + s * (SLOT / S);
            const GroupScale w = group_scale<GROUP>(at + g * 4, at + g * 2, gi);
            const float low = float((c.x + d.x) * factor + ((c.y + d.y) & second)),
                        high = float((c.z + d.z) * factor + ((c.w + d.w) & second));
            acc[s].x = fmaf(w.s0 * unit.x, fmaf(-w.z0, unit.y, low), acc[s].x);
            acc[s].y = fmaf(w.s1 * unit.x, fmaf(-w.z1, unit.y, high), acc[s].y);
        }
    }
}

// By a whole warp: lanes of a quad add up a quarter of the squares each.
DEVICE f32x2 rstd_of(u32 smem, float eps, int lane) {
    if constexpr (!RMS) return {1.0f, 1.0f};
    f32x2 sum = {0, 0};
    for (int r = 0; r < CLUSTER; ++r)
#pragma unroll
        for (int i = 0; i < (WARPS + 3) / 4; ++i)
            if (WARPS % 4 == 0 || 4 * i + (lane & 3) < WARPS) {
                const u32 at = smem + SQUARES + (4 * i + (lane & 3)) * 8;
                const f32x2 v = CLUSTER > 1 ? ld_cluster_f2(mapa(at, r)) : ld_shared_f2(at);
                sum.x += v.x, sum.y += v.y;
            }
#pragma unroll
    for (int n = 1; n < 4; n *= 2)
        sum.x += __shfl_xor_sync(0xffffffffu, sum.x, n), sum.y += __shfl_xor_sync(0xffffffffu, sum.y, n);
    return {rsqrt_approx(sum.x / K + eps), rsqrt_approx(sum.y / K + eps)};
}
DEVICE f32x4 from_quad(f32x4 v, int mask) {
    return v + f32x4{__shfl_xor_sync(0xffffffffu, v.x, mask), __shfl_xor_sync(0xffffffffu, v.y, mask),
                     __shfl_xor_sync(0xffffffffu, v.z, mask), __shfl_xor_sync(0xffffffffu, v.w, mask)};
}
}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    FU_KERNEL(const u16* __restrict__ x, const u8* __restrict__ weight, const u16* __restrict__ gain,
              const u16* __restrict__ bias, const u16* __restrict__ residual, u16* __restrict__ y, int m, int ldx,
              int ldr, float eps, float scale) {
    extern __shared__ __align__(128) u8 shared[];
    const u32 smem = cvta_to_shared(shared);
    stamp(bias, START, 0);
    const int warp = warp_index(), lane = threadIdx.x & 31, wn = warp % WN, wk = WK == 1 ? 0 : warp / WN;
    const int rank = CLUSTER > 1 ? int(cluster_ctarank()) : 0, unit = int(blockIdx.x) / CLUSTER;
    const Range strips = {int((long long)STRIPS * unit / UNITS), int((long long)STRIPS * (unit + 1) / UNITS)};
    const Range tiles = part({0, TILES}, rank, CLUSTER);
    const u32 ring = smem + RING + warp * SLOTS * SLOT, bars = smem + BARS + warp * SLOTS * 8;
    griddepcontrol_launch_dependents();

    // The walk of the refills: my first strip of the pass, chunk.
    const Range mine = part(tiles, wk, WK);
    struct {
        int strip, tile;
    } walk = {mine.begin < mine.end ? strips.begin + wn * S : strips.end, mine.begin};
    const u64 policy = createpolicy_evict_first();
    auto fill = [&](int slot) {  // by lane 0; into L2 alone when there is no slot
        if (walk.strip >= strips.end) return;
        const int bytes = min(CHUNK, mine.end - walk.tile) * TILE, count = min(S, strips.end - walk.strip);
        if (slot >= 0) mbarrier_arrive_expect_tx(bars + slot * 8, count * bytes);
        const u8* from = weight + ((long long)walk.strip * TILES + walk.tile) * TILE;
#pragma unroll
        for (int s = 0; s < S; ++s, from += (long long)TILES * TILE)
            if (s >= count)
                break;
            else if (slot < 0)
                cp_async_bulk_prefetch_l2(from, bytes);
            else
                cp_async_bulk(ring + slot * SLOT + s * (SLOT / S), from, bytes, bars + slot * 8, policy);
        walk.tile += CHUNK;
        if (walk.tile >= mine.end) walk.tile = mine.begin, walk.strip += PASS;
    };
    if (elect_sync()) {
        for (int i = 0; i < SLOTS; ++i) mbarrier_init(bars + i * 8, 1);
        fence_mbarrier_init();
        fence_proxy_async();
        if (DELAY + PACE > 0) wait_clocks(DELAY + warp * PACE);
        for (int i = 0; i < SLOTS; ++i) {
            if (PACE > 0 && i > 0) wait_clocks(WARPS * PACE);
            fill(i);
        }
        const auto filled = walk;
        for (int i = 0; i < PREFETCH; ++i) fill(-1);
        walk = filled;
    }
    __syncwarp();
    stamp(bias, ASKED, 0);

    const int first_x = mine.begin - tiles.begin + wn, last_x = mine.end - tiles.begin;  // this warp's tiles of x
    if (GAIN && STAGED && lane < 16)  // a parameter: it comes while the grid before ends
        for (int i = first_x; i < last_x; i += WN) {
            const int k = (tiles.begin + i) * 128 + 8 * lane;
            const bool exists = K % 128 == 0 || k < K;
            cp_async_16(smem + X + i * XTILE + GAINS + lane * 16, exists ? gain + k : gain, exists ? 16 : 0);
        }
    griddepcontrol_wait();
    stamp(bias, RELEASED, 0);
    const Epilogue<N, HALF, FU_BIAS, FU_SWIGLU, FU_RESIDUAL> epilogue = {bias, residual, y, m, ldr, scale};
    auto held = epilogue.fetch(strips.begin + warp * CLUSTER + rank, 0, lane);  // of this warp's first strip
    {
        // x: all requests first
        const int k = tiles.begin * 128 + 8 * (lane & 15), token = lane >> 4;
        const u16* row = x + (long long)min(token, m - 1) * ldx;
        if (token < TOKENS)
            for (int i = first_x; i < last_x; i += WN) {
                const bool exists = K % 128 == 0 || k + i * 128 < K;
                cp_async_16(smem + X + i * XTILE + lane * 16, exists ? row + k + i * 128 : x, exists ? 16 : 0);
            }
        cp_async_commit_group();
        cp_async_wait_group<0>();
        __syncwarp();
        float square[TOKENS] = {};
#pragma unroll 1
        for (int first = first_x; first < last_x; first += WN * BATCH) {
            u64 raw[BATCH][TOKENS], gains[BATCH] = {};
#pragma unroll
            for (int j = 0; j < BATCH; ++j) {
                const int i = first + j * WN;
                if (!EVEN && i >= last_x) break;
                if (GAIN && STAGED) gains[j] = ld_shared_u64(smem + X + i * XTILE + GAINS + lane * 8);
                if (GAIN && !STAGED && (K % 128 == 0 || (tiles.begin + i) * 128 + 4 * lane < K))
                    gains[j] = ld_global_nc_v2(gain + (tiles.begin + i) * 128 + 4 * lane);
#pragma unroll
                for (int token = 0; token < TOKENS; ++token)
                    raw[j][token] = ld_shared_u64(smem + X + i * XTILE + token * 256 + lane * 8);
            }
            __syncwarp();
#pragma unroll
            for (int j = 0; j < BATCH; ++j) {
                const int i = first + j * WN;
                if (!EVEN && i >= last_x) break;
#pragma unroll
                for (int token = 0; token < TOKENS; ++token)
                    square[token] += prepare_x(smem, raw[j][token], gains[j], i, token, lane);
            }
        }
        if (RMS) {
#pragma unroll
            for (int token = 0; token < TOKENS; ++token)
#pragma unroll
                for (int k = 16; k; k >>= 1) square[token] += __shfl_xor_sync(0xffffffffu, square[token], k);
            if (lane == 0) st_shared_f2(smem + SQUARES + warp * 8, {square[0], square[TOKENS - 1]});
        }
        if (WN == 1)
            __syncwarp();
        else
            bar_sync<WN * 32>(1 + wk);
    }
    stamp(bias, X_CAME, 0);
    // Column g of B: token g / 4, digit g % 4 (the last twice).
    const u32 xs = smem + X + (lane >> 4) % TOKENS * 192 + min(lane >> 2 & 3, 2) * 64 + (lane & 3) * 16;
    const u32 xscales = smem + XSCALE + (lane & 3) * 8;
    const int passes = (strips.end - strips.begin + PASS - 1) / PASS;
    int slot = 0;
    u32 parity = 0;
    for (int pass = 0; pass <= passes; ++pass) {
        const int first = strips.begin + pass * PASS;
        f32x2 acc[S] = {};
        if (pass < passes && first + wn * S < strips.end)
            for (int tile = mine.begin; tile < mine.end; tile += CHUNK) {
                mbarrier_wait_parity(bars + slot * 8, parity);
                const int count = min(CHUNK, mine.end - tile), i = tile - tiles.begin;
#pragma unroll
                for (int j = 0; j < CHUNK; ++j)
                    if (CHUNK == 1 || j < count)
                        multiply(acc, ring + slot * SLOT + j * TILE, xs + (i + j) * XTILE,
                                 xscales + (i + j) * GROUPS * 32, lane);
                __syncwarp();
                if (elect_sync()) fill(slot);
                if (++slot == SLOTS) slot = 0, parity ^= 1;
                __syncwarp();
            }
        if (pass == passes - 1) stamp(bias, MULTIPLIED, 0);
        if (pass > 0) {  // the sums of the pass before are there
            if (CLUSTER > 1)
                barrier_cluster_wait();
            else
                __syncthreads();
        }
        if (pass < passes) {
            const u32 sums = smem + SUMS + pass % 3 * (WK * PASS * 128) + (wk * PASS + wn * S) * 128 + (lane >> 2) * 16;
#pragma unroll
            for (int s = 0; s < S; ++s) {
                float low = acc[s].x, high = acc[s].y;  // digits of lanes 2 token and 2 token + 1
                low += __shfl_xor_sync(0xffffffffu, low, 1), high += __shfl_xor_sync(0xffffffffu, high, 1);
                const float other_low = __shfl_xor_sync(0xffffffffu, low, 2),
                            other_high = __shfl_xor_sync(0xffffffffu, high, 2);
                if ((lane & 3) == 0) st_shared_f4(sums + s * 128, {low, other_low, high, other_high});
            }
            if (CLUSTER > 1) barrier_cluster_arrive();
        }
        if (pass > 0) {  // the sums of the pass before
            const int before = first - PASS, count = min(PASS, strips.end - before);
            const u32 sums = smem + SUMS + (pass - 1) % 3 * (WK * PASS * 128) + (lane >> 2) * 16;
            for (int i = warp * CLUSTER + rank; i < count; i += WARPS * CLUSTER) {
                if (pass > 1 || i >= WARPS * CLUSTER) held = epilogue.fetch(before + i, 0, lane);
                f32x4 v = {0, 0, 0, 0};
                for (int r = 0; r < CLUSTER; ++r) {
                    const u32 base = CLUSTER > 1 ? mapa(sums + i * 128, r) : sums + i * 128;
#pragma unroll
                    for (int k = 0; k < (WK + 3) / 4; ++k)
                        if (WK % 4 == 0 || 4 * k + (lane & 3) < WK) {
                            const u32 at = base + (4 * k + (lane & 3)) * (PASS * 128);
                            v = v + (CLUSTER > 1 ? ld_cluster_f4(at) : ld_shared_f4(at));
                        }
                }
                v = from_quad(from_quad(v, 1), 2);
                const f32x2 rstd = rstd_of(smem, eps, lane);
                if ((lane & 3) == 0)
                    epilogue(before + i, 0, lane, {v.x * rstd.x, v.y * rstd.y, v.z * rstd.x, v.w * rstd.y}, held);
            }
        }
    }
    stamp(bias, END, 0);
    if (CLUSTER > 1) barrier_cluster();  // nobody leaves while its shared memory is being read
}
