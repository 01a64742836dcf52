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

struct Pair {
    float x, y;
};
// The factors first: they are the same for both rows of a lane unless rows have factors of their own.
DEVICE Pair scaled(float x, float y, float row, Pair channel) { return {x * (row * channel.x), y * (row * channel.y)}; }
DEVICE Pair times(Pair v, float f) { return {v.x * f, v.y * f}; }
DEVICE Pair with_bias(Pair v, u32 bias) { return {v.x + to_f32<HALF>(u16(bias)), v.y + to_f32<HALF>(u16(bias >> 16))}; }
// silu(x) = x / (1 + e^-x) = -ln 2 z / (1 + 2^z) with z = GATE x; the factor UP = -ln 2 is the other operand's. 2^z may
// overflow to infinity, the product is then -0.
constexpr float GATE = -1.44269504f, UP = -0.693147181f;
DEVICE float silu(float z) { return z * rcp_approx(1.0f + ex2_approx(z)); }
DEVICE Pair swiglu(Pair gate, Pair up) { return {silu(gate.x) * up.x, silu(gate.y) * up.y}; }
DEVICE Pair with_residual(Pair v, u32 added) {
    return {to_f32<HALF>(u16(added)) + v.x, to_f32<HALF>(u16(added >> 16)) + v.y};
}
DEVICE float squares(u32 rounded, float sum) {
    const float x = to_f32<HALF>(u16(rounded)), y = to_f32<HALF>(u16(rounded >> 16));
    return sum + (x * x + y * y);
}
}  // namespace epilogue

// Of one consumer warpgroup: BLOCKS x 64 rows and the columns of a tile. Its staging tile is a row of boxes for each
// block, 64 rows x BOX bytes in the swizzle of that width. Beside it lie the tile's factors: for each row of W,
// float32, activation scale x channel scale x what else every value of the column is multiplied by. Another warp puts
// them there while the tile is multiplied: loads from L2 would be waited for with idle tensor cores.
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

    static constexpr int FACTORS = SCALES ? FU_TILE_N * 4 : 0;  // bytes

    const float* rstd;  // [m]
    const u16* bias;    // [N]
    float* partial;     // [m, TILES], sums of squares of the output row over a tile's columns
    float scale;        // residual + scale * y
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
    // Multiplies gate (or all), up: at once with the other factors, or behind the bias.
    static DEVICE float gate_factor(float scale) { return SWIGLU ? epilogue::GATE : RESIDUAL ? scale : 1.0f; }
    static constexpr float UP_FACTOR = epilogue::UP;
    static constexpr int UP_AT = FU_TILE_N / 16;  // of 8 columns of a tile, where up begins

    // By one warp, into `to`: of 16 columns, columns 2t, 2t + 1, 2t + 8, 2t + 9 lie beside each other (t = 0 .. 3).
    static DEVICE void write_factors(u32 to, int tile, const float* channel, float step, float scale, int lane) {
#pragma unroll 1
        for (int i = 2 * lane; i < FU_TILE_N; i += 64) {
            const bool up = SWIGLU && i >= WIDTH;
            const int column = tile * WIDTH + i - (up ? WIDTH : 0);
            const float factor = BIAS ? step : step * (up ? UP_FACTOR : gate_factor(scale));
            u64 v = 0;
            if (column < COLUMNS) v = ld_global_nc_v2(channel + (up ? FU_N / 2 : 0) + column);
            st_shared_f2(to + i / 16 * 64 + i / 2 % 4 * 16 + i / 8 % 2 * 8,
                         {__uint_as_float(u32(v)) * factor, __uint_as_float(u32(v >> 32)) * factor});
        }
    }
    // `inside`: the column exists. Not a clamped address: that would cost two registers a column.
    DEVICE u32 biases(int column, bool inside) const {
        if (!inside) return 0;
        return FULL ? ld_global_nc_u32_here(bias + column) : ld_global_nc_u32(bias + column);
    }

    // Of columns 8j + 2t, + 1 and 8j + 8 + 2t, + 1 of the tile: `factors` of this lane, even j.
    struct Factors {
        f32x4 gate = {1.0f, 1.0f, 1.0f, 1.0f}, up = {1.0f, 1.0f, 1.0f, 1.0f};
        DEVICE Factors(u32 factors, int j) {
            if constexpr (SCALES) gate = ld_shared_f4(factors + j * 32);
            if constexpr (SCALES && SWIGLU) up = ld_shared_f4(factors + (j + UP_AT) * 32);
        }
    };
    // Accumulators, both rows of the lane, columns 8j + 2t, + 1 of the tile -> times all factors, with the bias of
    // W's row `row`. `behind`: what gate_factor or UP_FACTOR says. `inside`: the column exists.
    DEVICE void product(const float (&v)[FU_TILE_N / 2], int j, int row, bool inside, float r0, float r1,
                        epilogue::Pair c, float behind, epilogue::Pair& top, epilogue::Pair& bottom) const {
        if constexpr (!SCALES && !BIAS) r0 *= behind, r1 *= behind;
        top = epilogue::scaled(v[4 * j], v[4 * j + 1], r0, c);
        bottom = epilogue::scaled(v[4 * j + 2], v[4 * j + 3], r1, c);
        if constexpr (BIAS) {
            const u32 b = biases(row, inside);
            top = epilogue::times(epilogue::with_bias(top, b), behind);
            bottom = epilogue::times(epilogue::with_bias(bottom, b), behind);
        }
    }
    // The same of the output.
    DEVICE void columns(const float (&v)[FU_TILE_N / 2], int j, int column, float r0, float r1, epilogue::Pair gate,
                        epilogue::Pair up, epilogue::Pair& top, epilogue::Pair& bottom) const {
        const bool inside = !RAGGED || column < COLUMNS;
        product(v, j, column, inside, r0, r1, gate, gate_factor(scale), top, bottom);
        if constexpr (SWIGLU) {
            epilogue::Pair u0, u1;
            product(v, j + UP_AT, column + FU_N / 2, inside, r0, r1, up, UP_FACTOR, u0, u1);
            top = epilogue::swiglu(top, u0), bottom = epilogue::swiglu(bottom, u1);
        }
    }

    DEVICE void finish(u32 staging, u32 factors, int block, int row, int tile, int warp, int lane,
                       const float (&v)[FU_TILE_N / 2]) {
        const int g = lane >> 2, t = lane & 3, top_row = row + warp * 16 + g;
        float r0 = 1.0f, r1 = 1.0f;
        if constexpr (ROW) {
            r0 = ld_global_cg_f32(rstd + min(top_row, m - 1));
            r1 = ld_global_cg_f32(rstd + min(top_row + 8, m - 1));
        }
        factors += 16 * t;
        const u32 base = staging + block * 64 * ROW_BYTES;
        const int first = tile * WIDTH + 2 * t;
        const auto staged = [&](int j) { return base + place(warp * 16 + (lane & 15), j + (lane >> 4)); };
        float sum0 = 0.0f, sum1 = 0.0f;
        // What the next columns need is loaded while those before them are finished.
        Factors ahead(factors, 0);
        u32 next[4];  // of the residual
        if constexpr (RESIDUAL) ldmatrix_x4(staged(0), next[0], next[1], next[2], next[3]);
#pragma unroll
        for (int j = 0; j < WIDTH / 8; j += 2) {
            const u32 added[4] = {next[0], next[1], next[2], next[3]};
            if constexpr (RESIDUAL)
                if (j + 2 < WIDTH / 8) ldmatrix_x4(staged(j + 2), next[0], next[1], next[2], next[3]);
            const Factors f = ahead;
            if (j + 2 < WIDTH / 8) ahead = Factors(factors, j + 2);
            epilogue::Pair p[4];  // rows top, bottom of columns 8j, the same of 8j + 8
            columns(v, j, first + 8 * j, r0, r1, {f.gate.x, f.gate.y}, {f.up.x, f.up.y}, p[0], p[1]);
            columns(v, j + 1, first + 8 * j + 8, r0, r1, {f.gate.z, f.gate.w}, {f.up.z, f.up.w}, p[2], p[3]);
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
                if constexpr (RESIDUAL) {
#pragma unroll
                    for (int i = 0; i < 4; ++i) p[i] = epilogue::with_residual(p[i], added[i]);
                }
                u32 rounded[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) rounded[i] = from_f32x2<epilogue::HALF>(p[i].x, p[i].y);
                stmatrix_x4(staged(j), rounded[0], rounded[1], rounded[2], rounded[3]);
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
