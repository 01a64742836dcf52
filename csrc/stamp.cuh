// Times of a block, for benchmarks/decode_linears.py --timeline. Without FU_STAMPS: nothing.
#pragma once
#include "ptx.cuh"

enum Moment { START, ASKED, RELEASED, X_CAME, MULTIPLIED, END };
// times: u64 [grid, 8]. By one thread.
DEVICE void stamp(const u16* times, Moment moment) {
    if (FU_STAMPS) reinterpret_cast<u64*>(const_cast<u16*>(times))[blockIdx.x * 8 + moment] = globaltimer();
}
// By the first thread of a warp.
DEVICE void stamp(const u16* times, Moment moment, int warp) {
    if (int(threadIdx.x) == warp * 32) stamp(times, moment);
}
