// The state of delayed FP8 scaling (formats.fp8_state) as kernels read and write it.
#pragma once
#include "gemm_ptx.cuh"

// 0 .. 15: amax history, newest first. 21 .. 23 belong to a call in flight and are zero between calls.
enum Fp8Slot { HISTORY = 16, SCALE = 16, CALLS = 17, SATURATIONS = 18, FROZEN = 19, NON_FINITE = 20 };
enum Fp8Flight { AMAX = 21, BAD = 22, ARRIVED = 23 };  // of all blocks: largest |x|, blocks that saw no number, blocks
enum Fp8Scaling { DELAYED, STATIC, DYNAMIC, ROWS };    // ROWS: one scale per row, its largest value / 448
constexpr float E4M3_MAX = 448.0f;

// The smallest normal 2^k with amax * headroom <= 448 * 2^k; 1 where that is 0.
DEVICE float power_of_two(float amax, float headroom_over_max) {
    const float up = __int_as_float((__float_as_int(amax * headroom_over_max) + 0x007FFFFF) & 0xFF800000);
    return up == 0.0f ? 1.0f : up;
}

DEVICE float row_scale(float amax) { return amax == 0.0f ? 1.0f : fmaxf(amax / E4M3_MAX, 0x1p-126f); }

// formats._fp8_rule, in two steps: what a call plans before it has seen its input, and what follows from the input.
struct Fp8Plan {
    float scale;  // 0: not known before the input is
    bool frozen;
};
// The state in a warp, lane i its number i. One warp of a block reads it, with one load: the state is a single line of
// one slice of L2, and when each thread of 2,048 blocks asked it for seventeen numbers, that was most of their time.
struct Fp8State {
    float mine;
    DEVICE Fp8State(const float* state, int lane) { mine = lane <= ARRIVED ? ld_global_cg_f32(state + lane) : 0.0f; }
    DEVICE float at(int slot) const { return __shfl_sync(0xFFFFFFFF, mine, slot); }
    DEVICE Fp8Plan plan(int scaling, int lane) const {
        const float seen = __uint_as_float(redux_max(lane < HISTORY ? __float_as_uint(mine) : 0));  // none is negative
        const float scale = at(SCALE);
        const bool frozen = at(FROZEN) > 0.0f;
        if (scaling == DYNAMIC || scaling == ROWS) return {0.0f, frozen};
        if (scaling == STATIC && frozen) return {scale, frozen};
        return {seen > 0.0f ? power_of_two(seen, 2.0f / E4M3_MAX) : 0.0f, frozen};
    }
};
struct Fp8Choice {
    float scale;
    bool saturated, again;  // again: what was written with the plan does not count
};
DEVICE Fp8Choice fp8_choose(Fp8Plan plan, float amax, int scaling) {
    if (scaling == ROWS) return {row_scale(amax), false, false};
    if (scaling == DYNAMIC) return {power_of_two(amax, 1.0f / E4M3_MAX), false, true};
    if (plan.scale == 0.0f) return {power_of_two(amax, 2.0f / E4M3_MAX), false, true};
    const bool saturated = amax > plan.scale * E4M3_MAX;
    return {saturated ? power_of_two(amax, 2.0f / E4M3_MAX) : plan.scale, saturated, saturated};
}
// By one warp, when nobody reads the state any more. `old`: the state as it was when the call began.
DEVICE void fp8_record(float* state, const Fp8State& old, Fp8Choice c, bool frozen, float amax, bool bad, int scaling,
                       int lane) {
    float v = __shfl_up_sync(0xFFFFFFFF, old.mine, 1);  // the history moves by one
    if (lane == 0) v = amax;
    if (lane == SCALE) v = !frozen || scaling == DYNAMIC ? c.scale : old.mine;  // frozen outlives a saturated call
    if (lane == CALLS) v = old.mine + 1.0f;
    if (lane == SATURATIONS) v = old.mine + float(c.saturated);
    if (lane == FROZEN) v = old.mine;
    if (lane == NON_FINITE) v = old.mine + float(bad);
    if (lane >= AMAX) v = 0.0f;
    if (lane <= ARRIVED) state[lane] = v;
}
// What a kernel does that writes e4m3 with a planned scale, launched twice: the second launch (`again`) does nothing
// unless the first one's scale was wrong, or not known yet. Its last block to have read the state moves it on.
struct Fp8Decision {
    float scale;
    bool run;
};
// By all threads of all blocks; `smem`: 8 bytes. One warp reads, decides and tells the others.
DEVICE Fp8Decision fp8_decide(float* state, float* step, u32 smem, int scaling, bool again) {
    const int lane = threadIdx.x % 32;
    if (threadIdx.x < 32) {
        const Fp8State now(state, lane);
        const Fp8Plan plan = now.plan(scaling, lane);
        const float amax = now.at(AMAX), bad = now.at(BAD);
        const Fp8Choice choice = fp8_choose(plan, amax, scaling);
        const float scale = again ? choice.scale : plan.scale == 0.0f ? 1.0f : plan.scale;
        if (lane == 0) st_shared_f2(smem, {scale, !again || choice.again ? 1.0f : 0.0f});
        float last = 0.0f;
        if (again && lane == 0) last = atom_count(state + ARRIVED) == gridDim.x - 1 ? 1.0f : 0.0f;
        if (__shfl_sync(0xFFFFFFFF, last, 0) != 0.0f) {
            if (lane == 0) *step = scale;
            fp8_record(state, now, choice, plan.frozen, amax, bad > 0.0f, scaling, lane);
        }
    }
    __syncthreads();
    const f32x2 said = ld_shared_f2(smem);
    return {said.x, said.y != 0.0f};
}
// Infinities become NaN, which the conversion keeps; it would make 448 of them.
DEVICE float nan_unless_finite(float v) { return v + v * 0.0f; }
