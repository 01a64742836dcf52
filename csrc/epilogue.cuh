// The end of a decode linear, on the accumulators of one fragment: float32 until the one rounding of the store.
#pragma once
#include "ptx.cuh"

// What the fragment's lane 4g + t holds: rows g (x, y) and g + 8 (z, w) of a strip of 16, tokens 2t (x, z), 2t + 1 (y,
// w). With SWIGLU those rows are a gate row and its up row (formats.interleave_gate_up), so the product needs no
// exchange.
template <int N, bool HALF, bool BIAS, bool SWIGLU, bool RESIDUAL>
struct Epilogue {
    const u16* bias;      // [N], in the order of the unpacked rows
    const u16* residual;  // [m, N or N/2], rows ldr apart
    u16* y;               // [m, N or N/2], contiguous
    int m;                // tokens
    int ldr;
    float scale;  // residual + scale * y

    static constexpr int COLUMNS = SWIGLU ? N / 2 : N;

    // What a lane needs beside its sums, as stored: asked for early, 0.5 us before it is used.
    struct Held {
        u16 residual[4], bias[2];
    };
    DEVICE Held fetch(int strip, int first_token, int lane) const {
        Held h = {};
        const int g = lane >> 2, token = first_token + 2 * (lane & 3);
        const int column = SWIGLU ? strip * 8 + g : strip * 16 + g, row = SWIGLU ? N / 2 + column : column + 8;
        if constexpr (BIAS) {
            if (column < N) h.bias[0] = bias[column];
            if (row < N) h.bias[1] = bias[row];
        }
        if constexpr (RESIDUAL)
#pragma unroll
            for (int i = 0; i < (SWIGLU ? 2 : 4); ++i) {
                const int at = column + (i >> 1) * 8;
                if (token + (i & 1) < m && at < COLUMNS)
                    h.residual[i] = ld_global_cg_u16(residual + (long long)(token + (i & 1)) * ldr + at);
            }
        return h;
    }
    DEVICE void put(int token, int column, float v, u16 add) const {
        if (token >= m || column >= COLUMNS) return;
        if constexpr (RESIDUAL) v = to_f32<HALF>(add) + scale * v;
        y[(long long)token * COLUMNS + column] = from_f32<HALF>(v);
    }
    // v: sums of one fragment, already scaled by rstd
    DEVICE void operator()(int strip, int first_token, int lane, f32x4 v, const Held& h) const {
        const int g = lane >> 2, token = first_token + 2 * (lane & 3);
        if constexpr (BIAS) {
            const float b0 = to_f32<HALF>(h.bias[0]), b1 = to_f32<HALF>(h.bias[1]);
            v = {v.x + b0, v.y + b0, v.z + b1, v.w + b1};
        }
        if constexpr (SWIGLU) {
            put(token, strip * 8 + g, silu(v.x) * v.z, h.residual[0]);
            put(token + 1, strip * 8 + g, silu(v.y) * v.w, h.residual[1]);
        } else {
            const int row = strip * 16 + g;
            put(token, row, v.x, h.residual[0]);
            put(token + 1, row, v.y, h.residual[1]);
            put(token, row + 8, v.z, h.residual[2]);
            put(token + 1, row + 8, v.w, h.residual[3]);
        }
    }
    // x / (1 + e^-x); e^-x may overflow to infinity, the quotient is then -0
    static DEVICE float silu(float x) { return __fdividef(x, 1.0f + ex2_approx(-1.44269504f * x)); }
};

DEVICE f32x4 operator+(f32x4 a, f32x4 b) { return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w}; }
