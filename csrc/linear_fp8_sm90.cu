// y[m, N] = E(P(x)[m, K] . (W scale)[N, K]^T), e4m3 weights with a scale per row, m <= 8 tokens, activations as they
// are. Hopper (sm_90a).
//
//   W: [N, K] row-major, read as strips of 16 rows x tiles of 128 columns; lane 4g + t reads columns 64h + 16t .. + 15
//   of rows g and g + 8: four 16-byte vectors a tile, copied by cp.async into slots that no other lane reads
//
//   block (of GRID)   owns whole strips      warp (of 8)   owns a part of K: its x stays in registers, 4 tiles at a
//   time ring              of SLOTS tiles per warp; no barrier until the sums of PASS strips meet in shared memory
//
// An e4m3 number becomes a bfloat16 of 2^-120 times its value by moving bits (subnormals included); the activations are
// multiplied by 2^100 (exact for |x| < 2^27), the sums by 2^20. float16 activations: the hardware's conversion.
// Bytes: every weight once from HBM, x once per block from L2. Roofline: N K / 4.3 TB/s. Launch: as
// linear_int4_one_sm90.cu.
//
// Rendered constants: FU_KERNEL, FU_N, FU_K (multiple of 16), FU_TOKENS (2 or 8), FU_GRID, FU_PASS, FU_SLOTS, FU_DELAY,
// FU_SMEM, FU_HALF, FU_RMS, FU_BIAS, FU_SWIGLU (gate rows before up rows), FU_RESIDUAL.
#include "epilogue.cuh"

namespace {
constexpr int N = FU_N, K = FU_K, TOKENS = FU_TOKENS, PASS = FU_PASS, SLOTS = FU_SLOTS, DELAY = FU_DELAY;
constexpr bool HALF = FU_HALF, RMS = FU_RMS, SWIGLU = FU_SWIGLU;
constexpr int WARPS = 8, THREADS = WARPS * 32, TILE = 2048, BLOCK = 4;
constexpr int STRIPS = (N + 15) / 16, TILES = (K + 127) / 128, UNITS = FU_GRID;
constexpr int BLOCKS = ((TILES + WARPS - 1) / WARPS + BLOCK - 1) / BLOCK;
constexpr int SUM = TOKENS <= 2 ? 128 : 512;
constexpr float UNIT = HALF ? 1.0f : 0x1p20f;

constexpr int RING = 0, SUMS = RING + WARPS * SLOTS * TILE, SQUARES = SUMS + WARPS * PASS * SUM;
constexpr int BYTES = SQUARES + WARPS * 32;
static_assert(BYTES == FU_SMEM, "the lowering computes the same size");

// Row of W that stands at row r of a strip: with SWIGLU 8 gate rows and their 8 up rows, so that a lane has both.
DEVICE int source_row(int strip, int r) {
    if (SWIGLU) return min(strip * 8 + r % 8, N / 2 - 1) + r / 8 * (N / 2);
    return min(strip * 16 + r, N - 1);
}

// The order in which a warp walks its tiles: pass, block of x, strip, tile.
struct Walk {
    int strip, first, pass_end, last, tile, block, begin, end;
    DEVICE Walk(int strip_begin, int strip_end, int tile_begin, int tile_end)
        : strip(strip_begin),
          first(strip_begin),
          pass_end(min(strip_begin + PASS, strip_end)),
          last(strip_end),
          tile(tile_begin),
          block(tile_begin),
          begin(tile_begin),
          end(tile_end) {
        if (begin >= end) strip = last = strip_begin;
    }
    DEVICE bool done() const { return strip >= last; }
    DEVICE void next() {
        if (++tile < min(block + BLOCK, end)) return;
        tile = block;
        if (++strip < pass_end) return;
        strip = first;
        tile = block = block + BLOCK;
        if (block < end) return;
        tile = block = begin;
        strip = first = pass_end;
        pass_end = min(first + PASS, last);
    }
};

// Two neighbouring e4m3 numbers, bytes 2i and 2i + 1 of a word.
template <int I>
DEVICE u32 pair(u32 word) {
    if constexpr (HALF) {
        u32 r;
        const u16 two = u16(word >> 16 * I);
        asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(r) : "h"(two));
        return r;
    } else {
        const u32 p = prmt(word, 0, I ? 0x3424 : 0x1404);  // into the upper bytes of the two halves
        return lop3_and_or(p, 0x80008000u, (p >> 4) & 0x07f007f0u);
    }
}
DEVICE u32 scaled(u32 x) { return HALF ? x : mul_bf16x2(x, 0x71807180u); }

DEVICE void multiply(f32x4& acc, u32 slot, const u32 (&x)[16]) {
    u32x4 v[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = ld_shared_v4(slot + i * 512);  // (h 0, row g) (h 0, g + 8) (h 1, g) (h 1, g + 8)
    f32x4 odd = {0, 0, 0, 0};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const u32 low[4] = {v[2 * h].x, v[2 * h].y, v[2 * h].z, v[2 * h].w};
        const u32 high[4] = {v[2 * h + 1].x, v[2 * h + 1].y, v[2 * h + 1].z, v[2 * h + 1].w};
#pragma unroll
        for (int j = 0; j < 4; ++j)
            mma_m16n8k16<HALF>(j & 1 ? odd : acc, pair<0>(low[j]), pair<0>(high[j]), pair<1>(low[j]), pair<1>(high[j]),
                               x[8 * h + 2 * j], x[8 * h + 2 * j + 1]);
    }
    acc = acc + odd;
}
}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    FU_KERNEL(const u16* __restrict__ x, const u8* __restrict__ weight, const float* __restrict__ weight_scale,
              const u16* __restrict__ bias, const u16* __restrict__ residual, u16* __restrict__ y, int m, int ldx,
              int ldr, float eps, float scale) {
    extern __shared__ __align__(128) u8 shared[];
    const u32 smem = cvta_to_shared(shared);
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, unit = blockIdx.x;
    const u32 ring = smem + RING + warp * SLOTS * TILE + lane * 16, sums = smem + SUMS + warp * PASS * SUM;
    const int tile_begin = TILES * warp / WARPS, tile_end = TILES * (warp + 1) / WARPS;
    const int strip_begin = int((long long)STRIPS * unit / UNITS),
              strip_end = int((long long)STRIPS * (unit + 1) / UNITS);

    griddepcontrol_launch_dependents();
    if (DELAY > 0) wait_clocks(DELAY);
    Walk ahead(strip_begin, strip_end, tile_begin, tile_end);
    auto fill = [&](int slot) {
        if (!ahead.done()) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int k = ahead.tile * 128 + (i >> 1) * 64 + t * 16;
                const bool in = K % 128 == 0 || k < K;
                const u8* row = weight + (long long)source_row(ahead.strip, g + (i & 1) * 8) * K;
                cp_async_16(ring + slot * TILE + i * 512, in ? row + k : weight, in ? 16 : 0);
            }
            ahead.next();
        }
        cp_async_commit_group();
    };
    for (int i = 0; i < SLOTS; ++i) fill(i);

    griddepcontrol_wait();
    const u16* row = x + (long long)min(g, m - 1) * ldx;  // columns of tokens that do not exist repeat the last one
    const Epilogue<N, HALF, FU_BIAS, SWIGLU, FU_RESIDUAL> epilogue = {bias, residual, y, m, ldr, scale};
    u32 xr[BLOCK][16];
    f32x2 rstd = {UNIT, UNIT};
    int slot = 0;
    for (int first = strip_begin; first < strip_end; first += PASS) {
        const int count = min(PASS, strip_end - first);
        bool read = first == strip_begin;  // the sums of the pass before
        for (int block = 0; block < BLOCKS; ++block) {
            const int tile = tile_begin + block * BLOCK;
            if (BLOCKS > 1 || first == strip_begin) {
                f32x4 squares[BLOCK] = {};
#pragma unroll
                for (int j = 0; j < BLOCK; ++j)
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const int k = (tile + j) * 128 + (i >> 1) * 64 + t * 16 + (i & 1) * 8;
                        u32x4 v = {0, 0, 0, 0};
                        if (tile + j < tile_end && (K % 128 == 0 || k < K)) v = ld_global_cg_v4(row + k);
                        xr[j][4 * i] = v.x, xr[j][4 * i + 1] = v.y, xr[j][4 * i + 2] = v.z, xr[j][4 * i + 3] = v.w;
                    }
#pragma unroll
                for (int i = 0; i < 16; i += 2)
#pragma unroll
                    for (int j = 0; j < BLOCK; ++j) {
                        if (RMS && first == strip_begin)
                            mma_m16n8k16<HALF>(squares[j], xr[j][i], 0, xr[j][i + 1], 0, xr[j][i], xr[j][i + 1]);
                        xr[j][i] = scaled(xr[j][i]), xr[j][i + 1] = scaled(xr[j][i + 1]);
                    }
                if (RMS && first == strip_begin && t == g >> 1) {  // the diagonal of x x^T, added up in shared memory
                    const f32x4 all = (squares[0] + squares[1]) + (squares[2] + squares[3]);
                    const u32 at = smem + SQUARES + warp * 32 + g * 4;
                    st_shared_f32(at, (block > 0 ? ld_shared_f32(at) : 0.0f) + (g & 1 ? all.y : all.x));
                }
            }
            for (int s = 0; s < count; ++s) {
                const u32 mine = sums + s * SUM + (TOKENS <= 2 ? g : lane) * 16;
                f32x4 acc = {0, 0, 0, 0};
                if (BLOCKS > 1 && block > 0) acc = ld_shared_f4(mine);
#pragma unroll
                for (int j = 0; j < BLOCK; ++j) {
                    if (tile + j >= tile_end) break;
                    cp_async_wait_group<SLOTS - 1>();
                    multiply(acc, ring + slot * TILE, xr[j]);
                    fill(slot);
                    if (++slot == SLOTS) slot = 0;
                }
                if (!read) bar_sync<THREADS>(1), read = true;  // late: a strip of work hides the reduction
                if (TOKENS > 2 || t == 0) st_shared_f4(mine, acc);
            }
        }
        bar_sync<THREADS>(2);
        if (RMS && first == strip_begin) {
            f32x2 total = {0, 0};
#pragma unroll
            for (int i = 0; i < WARPS; ++i) {
                const f32x2 v = ld_shared_f2(smem + SQUARES + i * 32 + t * 8);
                total.x += v.x, total.y += v.y;
            }
            rstd = {UNIT * rsqrt_approx(total.x / K + eps), UNIT * rsqrt_approx(total.y / K + eps)};
        }
        for (int s = warp; s < count; s += WARPS) {
            const auto held = epilogue.fetch(first + s, 0, lane);
            const float low = weight_scale[source_row(first + s, g)], high = weight_scale[source_row(first + s, g + 8)];
            f32x4 v = {0, 0, 0, 0};
#pragma unroll
            for (int i = 0; i < WARPS; ++i)
                v = v + ld_shared_f4(smem + SUMS + (i * PASS + s) * SUM + (TOKENS <= 2 ? g : lane) * 16);
            v = {v.x * rstd.x * low, v.y * rstd.y * low, v.z * rstd.x * high, v.w * rstd.y * high};
            if (TOKENS > 2 || t == 0) epilogue(first + s, 0, lane, v, held);
        }
    }
    cp_async_wait_group<0>();
}
