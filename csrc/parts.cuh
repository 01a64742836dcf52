// Strips whose sums are in parts: over the warps along K (WK) of every block of a cluster (CLUSTER).
#pragma once
#include "ptx.cuh"

// A fragment's sums times the factors of its two tokens.
DEVICE f32x4 times_tokens(f32x4 v, f32x2 factor) {
    return {v.x * factor.x, v.y * factor.y, v.z * factor.x, v.w * factor.y};
}

// Adds them up and ends the pass. sums: [wk][strip of the pass][8 tokens][lane] f32x4 in every block, written by the
// WARPS warps that call this; first, count: strips of the pass; held: what a warp's first fragment needs, asked for
// before the sums were made; factor: of a token and the next, when all blocks are here. One order of summation whatever
// the cluster does.
template <int CLUSTER, int WK, int PASS, int NB, int WARPS, class F, class E>
DEVICE void finish_parts(u32 sums, const F& factor, int first, int count, int warp, int rank, int lane,
                         const E& epilogue, typename E::Held held) {
    int i = warp * CLUSTER + rank;
    if (CLUSTER > 1)
        barrier_cluster();
    else
        bar_sync<WARPS * 32>(2);
    for (; i < count * NB; i += WARPS * CLUSTER) {
        f32x4 v = {0, 0, 0, 0};
        for (int r = 0; r < CLUSTER; ++r) {
            const u32 local = sums + (i * 32 + lane) * 16, base = CLUSTER > 1 ? mapa(local, r) : local;
#pragma unroll
            for (int k = 0; k < WK; ++k)
                v = v + (CLUSTER > 1 ? ld_cluster_f4(base + k * PASS * NB * 512)
                                     : ld_shared_f4(base + k * PASS * NB * 512));
        }
        epilogue(first + i / NB, i % NB * 8, lane, times_tokens(v, factor(i % NB * 8 + 2 * (lane & 3))), held);
        if (i + WARPS * CLUSTER < count * NB)
            held = epilogue.fetch(first + (i + WARPS * CLUSTER) / NB, (i + WARPS * CLUSTER) % NB * 8, lane);
    }
}
