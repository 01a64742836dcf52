// What the norms need of rows of 16-bit values: sums of squares, and sums over a block.
#pragma once
#include "ptx.cuh"

template <bool HALF>
DEVICE float squares(u32 pair, float sum) {
    const float a = to_f32<HALF>(u16(pair)), b = to_f32<HALF>(u16(pair >> 16));
    return fmaf(a, a, fmaf(b, b, sum));
}
template <bool HALF>
DEVICE float squares(u32x4 v, float sum) {
    return squares<HALF>(v.x, squares<HALF>(v.y, squares<HALF>(v.z, squares<HALF>(v.w, sum))));
}

// By all THREADS threads, which all get it; sums: shared, one for each warp.
template <int THREADS>
DEVICE float block_sum(float v, float* sums) {
#pragma unroll
    for (int m = 16; m > 0; m /= 2) v += __shfl_xor_sync(0xffffffffu, v, m);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = v;
    __syncthreads();
    v = 0;
#pragma unroll
    for (int i = 0; i < THREADS / 32; ++i) v += sums[i];
    return v;
}
