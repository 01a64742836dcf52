// One INT4 weight tile (16 rows x 128 columns, formats.pack_int4) times tokens, on mma.m16n8k16.
//
// A code becomes a 16-bit float by a mask alone. Exponent fields 0 and 1 of a float mean the same spacing, so the low
// 8 bits of a bfloat16 are a linear number: nibble 0 is q 2^-133 and nibble 1 is 16 q 2^-133, both exact, both without
// a shift (tensor cores take subnormals at full speed; float16: 2^-24). The other operand makes up for it: activations
// times 2^100, those of the 16 q times 2^96, exact as well for |x| < 2^27. The zero point is not subtracted from the
// weights:
//     sum_k s (q - z) x  =  s (sum_k q x  -  z sum_k x)
// so a group costs 2 fused multiply-adds per accumulator instead of one subtraction per weight pair, and the scale
// multiplies float32 sums instead of rounding weights. 5 integer instructions and one mma per 8 weights of a lane.
#pragma once
#include "layout.cuh"
#include "ptx.cuh"

// How activations and codes meet.
template <bool HALF>
struct Form {
    static constexpr bool SCALED = !HALF;  // activations carry 2^100 and 2^96
    // A operand whose product with x is the sum of x in the unit of the codes' products
    static constexpr u32 ONE_LOW = 0x00010001u, ONE_HIGH = SCALED ? 0x00100010u : ONE_LOW;
    // sums of x are stored times this, to meet zeros that are read as 8 z 2^-24
    static constexpr float SUM_SCALE = 0x1p21f;
    // finished sums are in this unit
    static constexpr float UNIT = HALF ? 0x1p24f : 0x1p33f;

    // A fragment of one word
    static DEVICE void dequantise(u32 word, u32 (&a)[4]) {
        if constexpr (SCALED) {
            const u32 high = word >> 8;
            a[0] = word & 0x000f000fu, a[1] = high & 0x000f000fu, a[2] = word & 0x00f000f0u, a[3] = high & 0x00f000f0u;
        } else {
            a[0] = word & 0x000f000fu, a[1] = (word >> 8) & 0x000f000fu;
            a[2] = (word >> 4) & 0x000f000fu, a[3] = (word >> 12) & 0x000f000fu;
        }
    }
    // 16 bytes of activations times the gain, rounded to their type
    static DEVICE u32x4 times_gain(u32x4 v, u32x4 g) {
        if constexpr (HALF) return {mul_f16x2(v.x, g.x), mul_f16x2(v.y, g.y), mul_f16x2(v.z, g.z), mul_f16x2(v.w, g.w)};
        return {mul_bf16x2(v.x, g.x), mul_bf16x2(v.y, g.y), mul_bf16x2(v.z, g.z), mul_bf16x2(v.w, g.w)};
    }
    // 16 bytes of activations as the B operands of two steps: (x, y) and (z, w)
    static DEVICE u32x4 scaled(u32x4 v) {
        if constexpr (!SCALED) return v;
        return {mul_bf16x2(v.x, 0x71807180u), mul_bf16x2(v.y, 0x6f806f80u), mul_bf16x2(v.z, 0x71807180u),
                mul_bf16x2(v.w, 0x6f806f80u)};
    }
};

// Scale and zero of rows g and g + 8: the zero as 8 z 2^-24.
struct GroupScale {
    float s0, s1, z0, z1;
};
// For group `gi` of a tile; scales: shared address of the tile + 4 g, zeros: + 2 g.
template <int GROUP>
DEVICE GroupScale group_scale(u32 scales, u32 zeros, int gi) {
    constexpr int GROUPS = fu::kTileK / GROUP;
    const u32 s = ld_shared_u32(scales + fu::kNibbleBytes + gi * 32);
    const u32 z8 = ld_shared_u16(zeros + fu::kNibbleBytes + GROUPS * 32 + gi * 16);
    const u32 z = prmt(z8, 0, 0x4140);
    return {to_f32<true>(u16(s)), to_f32<true>(u16(s >> 16)), to_f32<true>(u16(z)), to_f32<true>(u16(z >> 16))};
}
