// What follows a product, on the accumulators of wgmma: float32 until the one rounding of the store.
//
// The steps in order: row factor (1 / rms of the input row) x activation scale x channel scale, bias, SwiGLU, residual,
// sum of squares for the next norm, 16-bit or e4m3 output. Which of them a kernel has is compiled in (FU_ constants);
// each is one function below.
#pragma once
#include "gemm_fp8_state.cuh"
#include "gemm_ptx.cuh"

namespace epilogue {
constexpr bool HALF = FU_HALF;  // 16-bit values are float16 instead of bfloat16

// x / (1 + e^-x); e^-x may overflow to infinity, the product is then -0.
DEVICE float silu(float x) { return x * rcp_approx(1.0f + ex2_approx(-1.44269504f * x)); }

struct Pair {
    float x, y;
};
// The factors first: they are the same for both rows of a lane unless rows have factors of their own.
DEVICE Pair scaled(float x, float y, float row, Pair channel) { return {x * (row * channel.x), y * (row * channel.y)}; }
DEVICE Pair with_bias(Pair v, u32 bias) { return {v.x + to_f32<HALF>(u16(bias)), v.y + to_f32<HALF>(u16(bias >> 16))}; }
DEVICE Pair swiglu(Pair gate, Pair up) { return {silu(gate.x) * up.x, silu(gate.y) * up.y}; }
DEVICE Pair with_residual(Pair v, u32 added, float scale) {
    return {to_f32<HALF>(u16(added)) + scale * v.x, to_f32<HALF>(u16(added >> 16)) + scale * v.y};
}
DEVICE float squares(u32 rounded, float sum) {
    const float x = to_f32<HALF>(u16(rounded)), y = to_f32<HALF>(u16(rounded >> 16));
    return sum + (x * x + y * y);
}
}  // namespace epilogue

// Of one consumer warpgroup: BLOCKS x 64 rows and the columns of a tile. Its staging tile is a row of boxes for each
// block, 64 rows x BOX bytes in the swizzle of that width.
template <int BLOCKS>
struct Epilogue {
    static constexpr bool ROW = FU_ROW, SCALES = FU_TYPE == E4M3, BIAS = FU_BIAS, SWIGLU = FU_SWIGLU;
    static constexpr bool RESIDUAL = FU_RESIDUAL, SQUARES = FU_SQUARES;
#if FU_OUT8
    static constexpr bool OUT8 = true;
#else
    static constexpr bool OUT8 = false;
#endif
    static_assert(!OUT8 || (!RESIDUAL && !SQUARES), "what a residual stream needs is 16 bits wide");
    static constexpr int COLUMNS = SWIGLU ? FU_N / 2 : FU_N, WIDTH = SWIGLU ? FU_TILE_N / 2 : FU_TILE_N;
    static constexpr int TILES = (COLUMNS + WIDTH - 1) / WIDTH;  // beside each other
    static constexpr bool RAGGED = COLUMNS % WIDTH != 0;
    static constexpr int SIZE = OUT8 ? 1 : 2, ROW_BYTES = WIDTH * SIZE;
    static constexpr int BOX = ROW_BYTES % 128 == 0 ? 128 : ROW_BYTES % 64 == 0 ? 64 : 32, BOXES = ROW_BYTES / BOX;
    static constexpr int BYTES = BLOCKS * 64 * ROW_BYTES;
    static constexpr bool FULL = BLOCKS * FU_TILE_N > 256;  // no registers for operands that are loaded ahead

    float step;            // scale of the e4m3 input
    const float* channel;  // [N], scales of the e4m3 weight
    const float* rstd;     // [m]
    const u16* bias;       // [N]
    float* partial;        // [m, TILES], sums of squares of the output row over a tile's columns
    float scale;           // residual + scale * y
    int m;
    float inverse = 1.0f;  // OUT8: 1 / scale of the output
    float amax = 0.0f;
    float bad = 0.0f;  // NaN once an output was not finite

    template <class F>
    static DEVICE void each_box(u32 at, int row, int column, F f) {
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block)
#pragma unroll
            for (int i = 0; i < BOXES; ++i)
                f(at + (block * BOXES + i) * 64 * BOX, row + block * 64, column + i * (BOX / SIZE));
    }
    // Where 16 bytes of the staging tile are: row of the block, 16-byte column.
    static DEVICE u32 place(int row, int chunk) {
        constexpr int IN_BOX = BOX / 16;
        return (chunk / IN_BOX) * 64 * BOX + row * BOX + (((chunk % IN_BOX) ^ ((row * BOX / 128) & (IN_BOX - 1))) << 4);
    }
    // `inside`: the column exists. Not a clamped address: that would cost two registers a column.
    DEVICE epilogue::Pair channels(int column, bool inside) const {
        u64 v = 0;
        if (inside) v = FULL ? ld_global_nc_v2_here(channel + column) : ld_global_nc_v2(channel + column);
        return {__uint_as_float(u32(v)), __uint_as_float(u32(v >> 32))};
    }
    DEVICE u32 biases(int column, bool inside) const {
        if (!inside) return 0;
        return FULL ? ld_global_nc_u32_here(bias + column) : ld_global_nc_u32(bias + column);
    }

    // Columns 8j + 2t, + 1 of the output, both rows of the lane.
    DEVICE void columns(const float (&v)[FU_TILE_N / 2], int j, int column, float r0, float r1, epilogue::Pair& top,
                        epilogue::Pair& bottom) const {
        const bool inside = !RAGGED || column < COLUMNS;
        epilogue::Pair c = {1.0f, 1.0f};
        if constexpr (SCALES) c = channels(column, inside);
        top = epilogue::scaled(v[4 * j], v[4 * j + 1], r0, c);
        bottom = epilogue::scaled(v[4 * j + 2], v[4 * j + 3], r1, c);
        if constexpr (BIAS) {
            const u32 b = biases(column, inside);
            top = epilogue::with_bias(top, b), bottom = epilogue::with_bias(bottom, b);
        }
        if constexpr (SWIGLU) {
            constexpr int UP = FU_TILE_N / 4;
            if constexpr (SCALES) c = channels(FU_N / 2 + column, inside);
            epilogue::Pair u0 = epilogue::scaled(v[UP + 4 * j], v[UP + 4 * j + 1], r0, c);
            epilogue::Pair u1 = epilogue::scaled(v[UP + 4 * j + 2], v[UP + 4 * j + 3], r1, c);
            if constexpr (BIAS) {
                const u32 b = biases(FU_N / 2 + column, inside);
                u0 = epilogue::with_bias(u0, b), u1 = epilogue::with_bias(u1, b);
            }
            top = epilogue::swiglu(top, u0), bottom = epilogue::swiglu(bottom, u1);
        }
    }

    DEVICE void finish(u32 staging, int block, int row, int tile, int warp, int lane, const float (&v)[FU_TILE_N / 2]) {
        const int g = lane >> 2, t = lane & 3, top_row = row + warp * 16 + g;
        float r0 = step, r1 = step;
        if constexpr (ROW) {
            r0 *= ld_global_cg_f32(rstd + min(top_row, m - 1));
            r1 *= ld_global_cg_f32(rstd + min(top_row + 8, m - 1));
        }
        const u32 base = staging + block * 64 * ROW_BYTES;
        const int first = tile * WIDTH + 2 * t;
        float sum0 = 0.0f, sum1 = 0.0f;
#pragma unroll
        for (int j = 0; j < WIDTH / 8; j += 2) {
            epilogue::Pair p[4];  // rows top, bottom of columns 8j, the same of 8j + 8
            columns(v, j, first + 8 * j, r0, r1, p[0], p[1]);
            columns(v, j + 1, first + 8 * j + 8, r0, r1, p[2], p[3]);
            if constexpr (OUT8) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int local = warp * 16 + g + (i & 1) * 8;
                    // Without a bias what lies outside is zero already.
                    const bool inside =
                        !BIAS || (top_row + (i & 1) * 8 < m && (!RAGGED || first + 8 * (j + (i >> 1)) < COLUMNS));
                    const float x = inside ? nan_unless_finite(p[i].x) : 0.0f;
                    const float y = inside ? nan_unless_finite(p[i].y) : 0.0f;
                    amax = fmaxf(amax, fmaxf(fabsf(x), fabsf(y)));  // passes over NaN
                    bad += x * 0.0f + y * 0.0f;
                    const u16 q = cvt_e4m3x2(x * inverse, y * inverse);
                    st_shared_u16(base + place(local, j / 2) + 8 * (i >> 1) + 2 * t, q);
                }
            } else {
                const u32 at = base + place(warp * 16 + (lane & 15), j + (lane >> 4));
                if constexpr (RESIDUAL) {
                    u32 added[4];
                    ldmatrix_x4(at, added[0], added[1], added[2], added[3]);
#pragma unroll
                    for (int i = 0; i < 4; ++i) p[i] = epilogue::with_residual(p[i], added[i], scale);
                }
                u32 rounded[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) rounded[i] = from_f32x2<epilogue::HALF>(p[i].x, p[i].y);
                stmatrix_x4(at, rounded[0], rounded[1], rounded[2], rounded[3]);
                if constexpr (SQUARES) {
                    if (!RAGGED || first + 8 * j < COLUMNS) {
                        sum0 = epilogue::squares(rounded[0], sum0), sum1 = epilogue::squares(rounded[1], sum1);
                    }
                    if (!RAGGED || first + 8 * j + 8 < COLUMNS) {
                        sum0 = epilogue::squares(rounded[2], sum0), sum1 = epilogue::squares(rounded[3], sum1);
                    }
                }
            }
        }
        if constexpr (SQUARES) {
#pragma unroll
            for (int i = 1; i < 4; i *= 2) {
                sum0 += __shfl_xor_sync(0xFFFFFFFF, sum0, i);
                sum1 += __shfl_xor_sync(0xFFFFFFFF, sum1, i);
            }
            if (t == 0 && top_row < m) partial[(long long)top_row * TILES + tile] = sum0;
            if (t == 0 && top_row + 8 < m) partial[(long long)(top_row + 8) * TILES + tile] = sum1;
        }
    }

    DEVICE void report(float* act, int lane) const {
        const u32 most = redux_max(__float_as_uint(amax)), any = redux_max(bad != bad);
        if (lane == 0) {
            red_max(act + AMAX, __uint_as_float(most));
            if (any) red_max(act + BAD, 1.0f);
        }
    }
};
