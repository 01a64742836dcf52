// Prefill between the projection of q, k, v and attention: norms per head, RoPE, the split into heads and, with APPEND,
// the rows of the cache and the INT4 copy of every page that is complete after the call. One pass over memory.
//
//   warp                one token, SHARE of its heads one after the other; cos and sin stay in registers
//   first warps         (APPEND) the tokens before this call in the page that it finishes, read back from the cache
//
// Bytes a token: 2 x 2 (Hq + 2 Hkv) D, with APPEND 2 (2 + 1/2) Hkv D more; at 8B and 2048 tokens 50 + 21 MB.
// `position` is read on the device. Rows past the end of the cache are not written.
#include "head.cuh"

namespace {
constexpr int Q = FU_Q_HEADS, KV = FU_KV_HEADS, HEADS = Q + 2 * KV, SHARE = FU_SHARE,
              PARTS = (HEADS + SHARE - 1) / SHARE;
constexpr bool COS32 = FU_COS32, QNORM = FU_QNORM, KNORM = FU_KNORM, APPEND = FU_APPEND;
constexpr int WARPS = 8;

DEVICE void store_head(u16* to, const Head& x, int lane) {
#pragma unroll
    for (int i = 0; i < NI; ++i) to[32 * i + lane] = from_f32<HALF>(x.v[i]);
}
DEVICE Head rounded(Head x) {
#pragma unroll
    for (int i = 0; i < NI; ++i) x.v[i] = to_f32<HALF>(from_f32<HALF>(x.v[i]));
    return x;
}
DEVICE Head load_angle(const void* from, long long at, int lane) {
    Head x;
#pragma unroll
    for (int i = 0; i < NI; ++i) {
        const long long c = at + min(32 * i + lane, R - 1);
        x.v[i] = COS32 ? ((const float*)from)[c] : to_f32<HALF>(((const u16*)from)[c]);
    }
    return x;
}
}  // namespace

extern "C" __global__ void __launch_bounds__(WARPS * 32)
    FU_KERNEL(const u16* qkv, const void* cos, const void* sin, const u16* q_norm, const u16* k_norm, u16* q, u16* k,
              u16* v, u16* keys, u16* values, u8* k_codes, u16* k_scales, u8* v_codes, u16* v_scales, const float* mean,
              const float* balance, const long long* position, int batch, int tokens, int ldqkv, int ldcos, int slots,
              int pages, float eps) {
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    const int lane = threadIdx.x % 32, unit = blockIdx.x * WARPS + threadIdx.x / 32, part = unit % PARTS;
    const int before = APPEND ? fu::kPage - 1 : 0;
    const int b = unit / PARTS / (tokens + before), at = unit / PARTS % (tokens + before) - before;
    if (b >= batch) return;
    const long long first = APPEND ? *position : 0, slot = first + at, live = first + tokens;
    const bool complete = APPEND && slot / fu::kPage < live / fu::kPage && slot < (long long)pages * fu::kPage;
    const int from = part * SHARE, to = min(HEADS, from + SHARE);
    if (at < 0 && (!complete || slot < first / fu::kPage * fu::kPage)) return;
    Head c, s;
    if (at >= 0) {
        const long long angle = (long long)b * ldcos + (long long)at * R;
        c = load_angle(cos, angle, lane), s = load_angle(sin, angle, lane);
    }
#pragma unroll 1
    for (int h = from; h < to; ++h) {
        const bool query = h < Q, key = !query && h < Q + KV;
        const int head = query ? h : key ? h - Q : h - Q - KV, heads = query ? Q : KV;
        if (at < 0 && query) continue;
        const long long row = (((long long)b * KV + head) * slots + slot) * D;  // of the cache
        Head x;
        if (at < 0) {
            x = load_head((key ? keys : values) + row, lane);
        } else {
            const u16* in = qkv + ((long long)b * tokens + at) * ldqkv + h * D;
            x = load_head(in, lane);
            if (query || key) {
                Head partner = load_partner(x, in, lane);
                if (QNORM && query) normalise(x, partner, q_norm, eps, lane);
                if (KNORM && key) normalise(x, partner, k_norm, eps, lane);
                x = rounded(turn(x, partner, c, s, lane));
            }
            store_head((query ? q : key ? k : v) + (((long long)b * heads + head) * tokens + at) * D, x, lane);
        }
        if (!APPEND || query) continue;
        if (at >= 0 && slot < slots) store_head((key ? keys : values) + row, x, lane);
        if (complete) {
            const long long place = ((long long)b * KV + head) * pages * fu::kPage + slot;
            if (key)
                encode<true>(x, mean + head * D, balance + head * D, k_codes + place * (D / 2), k_scales + place, lane);
            else
                encode<false>(x, nullptr, nullptr, v_codes + place * (D / 2), v_scales + place, lane);
        }
    }
}
