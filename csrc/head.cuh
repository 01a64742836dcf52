// One head of one token in the registers of a warp: norm, RoPE, rotation, and the row of the INT4 cache.
#pragma once
#include "layout.cuh"
#include "ptx.cuh"

namespace {
constexpr int D = FU_D, R = FU_ROTATED;
constexpr bool HALF = FU_HALF;
constexpr int NI = D / 32;  // columns of a head that a lane holds; words of a lane's part of a key
constexpr u32 ALL = 0xffffffffu;
static_assert(D % 32 == 0 && R % 2 == 0 && R <= D, "the lowering refuses everything else");
static_assert(fu::hadamard_block(D) == 32, "one butterfly over a warp");

DEVICE float infinity() { return __uint_as_float(0x7f800000u); }
DEVICE float nan() { return __uint_as_float(0x7fffffffu); }
DEVICE float warp_sum(float v) {
#pragma unroll
    for (int m = 16; m > 0; m /= 2) v += __shfl_xor_sync(ALL, v, m);
    return v;
}
DEVICE float warp_max(float v) {
#pragma unroll
    for (int m = 16; m > 0; m /= 2) v = fmaxf(v, __shfl_xor_sync(ALL, v, m));
    return v;
}

// ---- one head: columns 32 i + lane ---------------------------------------------------------------------------------

struct Head {
    float v[NI];
};

// As torch does: the first half turns against the second, every product and sum rounded by itself.
DEVICE Head turn(const Head& x, const Head& partner, const Head& cos, const Head& sin, int lane) {
    Head y;
#pragma unroll
    for (int i = 0; i < NI; ++i) {
        const int c = 32 * i + lane;
        const float p = c < R / 2 ? -partner.v[i] : partner.v[i];
        y.v[i] = c < R ? __fadd_rn(__fmul_rn(x.v[i], cos.v[i]), __fmul_rn(p, sin.v[i])) : x.v[i];
    }
    return y;
}
// The column that c turns with.
DEVICE int partner_of(int c) { return c < R / 2 ? c + R / 2 : c < R ? c - R / 2 : c; }

DEVICE Head load_head(const u16* from, int lane) {
    Head x;
#pragma unroll
    for (int i = 0; i < NI; ++i) x.v[i] = to_f32<HALF>(ld_global_cg_u16(from + 32 * i + lane));
    return x;
}
DEVICE Head load_partner(const Head& x, const u16* from, int lane) {
    Head p;
#pragma unroll
    for (int i = 0; i < NI; ++i) {
        if constexpr (R % 64 == 0)
            p.v[i] = x.v[i < R / 64 ? i + R / 64 : i < R / 32 ? i - R / 64 : i];
        else
            p.v[i] = to_f32<HALF>(ld_global_cg_u16(from + partner_of(32 * i + lane)));
    }
    return p;
}
DEVICE void normalise(Head& x, Head& partner, const u16* gain, float eps, int lane) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < NI; ++i) sum = fmaf(x.v[i], x.v[i], sum);
    const float r = rsqrt_approx(warp_sum(sum) / D + eps);
#pragma unroll
    for (int i = 0; i < NI; ++i) {
        x.v[i] = x.v[i] * r * to_f32<HALF>(gain[32 * i + lane]);
        partner.v[i] = partner.v[i] * r * to_f32<HALF>(gain[partner_of(32 * i + lane)]);
    }
}
DEVICE Head hadamard(Head x, int lane) {
#pragma unroll
    for (int m = 1; m < 32; m *= 2)
#pragma unroll
        for (int i = 0; i < NI; ++i) {
            const float other = __shfl_xor_sync(ALL, x.v[i], m);
            x.v[i] = lane & m ? other - x.v[i] : x.v[i] + other;
        }
#pragma unroll
    for (int i = 0; i < NI; ++i) x.v[i] *= 0.17677669529663687f;
    return x;
}

// ---- its row in the INT4 cache
// ---------------------------------------------------------------------------------------

// formats.encode_rows of one row; KEYS: formats.encode_keys.
template <bool KEYS>
DEVICE void encode(Head x, const float* mean, const float* balance, u8* codes, u16* scale, int lane) {
    if constexpr (KEYS) {
#pragma unroll
        for (int i = 0; i < NI; ++i) x.v[i] = __fdiv_rn(x.v[i] - mean[32 * i + lane], balance[32 * i + lane]);
        x = hadamard(x, lane);
    }
    float low = infinity(), high = -infinity();
    bool finite = true;
#pragma unroll
    for (int i = 0; i < NI; ++i) {
        low = fminf(low, x.v[i]), high = fmaxf(high, x.v[i]);
        finite = finite && fabsf(x.v[i]) < infinity();
    }
    finite = __all_sync(ALL, finite);
    low = -warp_max(-low), high = warp_max(high);
    float s = fminf(fmaxf((-low >= high ? low : high) * -0.125f, -65504.0f), 65504.0f);
    if (fabsf(s) < 0x1p-14f) s = copysignf(ceilf(fabsf(s) * 0x1p24f) * 0x1p-24f, s);  // away from zero
    const u16 bits = finite ? from_f32<true>(s) : u16(0x7fff);
    const float stored = to_f32<true>(bits), by = stored == 0.0f ? 1.0f : stored;
#pragma unroll
    for (int i = 0; i < NI; ++i) {
        const u32 q = finite ? u32(fminf(fmaxf(rintf(__fdiv_rn(x.v[i], by)) + 8.0f, 0.0f), 15.0f)) : 8u;
        const u32 next = __shfl_down_sync(ALL, q, 1);
        if (lane % 2 == 0) codes[fu::kv_nibble(32 * i + lane, D) / 2] = u8(q | next << 4);
    }
    if (lane == 0) *scale = bits;
}
}  // namespace
