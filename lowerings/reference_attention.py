"""Reference: RoPE, the INT4 cache and attention over it. Float32 inside, one rounding at the end.

Rows and pages are found by a number that the host needs: the runtime says it once a call (``pages.calling``). Without
that it is read back, which stalls a GPU's stream.
"""

from __future__ import annotations

import torch
from fu_compile.lowerings.pages import (
    PAGE,
    Store,
    append,
    decode_keys,
    exact_rows,
    extend,
    first_position,
    keeps_decoded,
    paged,
    seen,
    unless_moved,
)
from fu_compile.lowerings.reference_block import check_length, merge_heads, rotate, sdpa
from torch import Tensor

from fu_compile import formats
from fu_compile.errors import CacheMismatchError

_HIDDEN = -65504.0 / 2
"""An additive mask below this hides the slot: transformers writes the lowest value of the dtype, float16 at most."""


def qkv_rope(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """qkv: [B, S, (Hq + 2 Hkv) * D], cos and sin: [1 or B, S, R] -> q: [B, Hq, S, D], k, v: [B, Hkv, S, D]."""
    q, k, v = _heads(qkv, cos, sin, q_norm, k_norm, eps, q_heads, kv_heads, head_dim)
    # Outputs of an operator must not share memory, so k and v are copied even where they already are contiguous.
    own = torch.contiguous_format
    return (
        q.to(qkv.dtype).contiguous(),
        k.to(qkv.dtype, copy=True, memory_format=own),
        v.clone(memory_format=own),
    )


def _heads(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The heads of ``qkv``, normed and turned: q and k in float32, v as it is (a view)."""
    b, s, _ = qkv.shape
    heads = qkv.view(b, s, q_heads + 2 * kv_heads, head_dim).transpose(1, 2)
    qk = heads[:, : q_heads + kv_heads].to(torch.float32)  # turned together: they stand side by side
    if q_norm is not None or k_norm is not None:
        parts = qk.split((q_heads, kv_heads), 1)
        qk = torch.cat([_normed(x, gain, eps) for x, gain in zip(parts, (q_norm, k_norm), strict=True)], 1)
    q, k = rotate(qk, cos.to(torch.float32), sin.to(torch.float32)).split((q_heads, kv_heads), 1)
    return q, k, heads[:, q_heads + kv_heads :]


def _normed(x: Tensor, gain: Tensor | None, eps: float) -> Tensor:
    if gain is None:
        return x
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * gain.to(torch.float32)


def span(position: Tensor, keys: Tensor, store: Store) -> tuple[int, int]:
    """First position of the call and tokens in the cache after it.

    Raises:
        CacheLengthError: more tokens than fit. CaptureError: see ``pages.first_position``.
    """
    first = first_position(position)
    live = first + position.shape[0]
    check_length(first, live - 1, store.k_codes.shape[2] * PAGE if paged(keys, store) else keys.shape[2])
    return first, live


def _check_store(keys: Tensor, codes: Tensor, batch: int) -> None:
    b, h, length, d = keys.shape
    if b != batch or codes.shape[:2] != (b, h) or codes.shape[-1] * 2 != d or codes.shape[2] * PAGE < length:
        raise CacheMismatchError(
            f"a call with batch {batch}, a cache {list(keys.shape)} and an INT4 store {list(codes.shape)}"
            " do not belong together"
        )


def qkv_append(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    keys: Tensor,
    values: Tensor,
    k_codes: Tensor,
    k_scales: Tensor,
    v_codes: Tensor,
    v_scales: Tensor,
    key_mean: Tensor,
    key_balance: Tensor,
    position: Tensor,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """qkv_rope, then the exact rows into keys and values, then the INT4 copy of every page that is now complete.

    Raises:
        CacheLengthError, CacheMismatchError: before anything is written.
    """
    store = Store(k_codes, k_scales, v_codes, v_scales, key_mean, key_balance)
    first, live = span(position, keys, store)
    _check_store(keys, k_codes, qkv.shape[0])
    q, k, v = qkv_rope(qkv, cos, sin, q_norm, k_norm, eps, q_heads, kv_heads, head_dim)
    v = unless_moved(v, position, first)
    _write(store, keys, values, k, v, first, live)
    return q, k, v


def _write(store: Store, keys: Tensor, values: Tensor, k: Tensor, v: Tensor, first: int, live: int) -> None:
    """The rows of a call into the exact rows, and every page that is now complete into the store."""
    if paged(keys, store):
        extend(store, keys, values, k, v, first)
        return
    keys[:, :, first:live].copy_(k)
    values[:, :, first:live].copy_(v)
    append(store, keys, values, first // PAGE, live // PAGE)


def attention_int4(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    keys: Tensor,
    values: Tensor,
    k_codes: Tensor,
    k_scales: Tensor,
    v_codes: Tensor,
    v_scales: Tensor,
    key_mean: Tensor,
    key_balance: Tensor,
    position: Tensor,
    mask: Tensor | None,
    scale: float,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
) -> Tensor:
    """qkv_append and attention in one: -> [B, S, Hq*D] in the dtype of qkv."""
    store = Store(k_codes, k_scales, v_codes, v_scales, key_mean, key_balance)
    first, live = span(position, keys, store)
    _check_store(keys, k_codes, qkv.shape[0])
    q, k, v = _heads(qkv, cos, sin, q_norm, k_norm, eps, q_heads, kv_heads, head_dim)
    v = unless_moved(v, position, first)
    if paged(keys, store):  # the unfinished page is read before a finished one makes room for the next
        y = _over_cache(q, k, v, keys, values, store, position, mask, scale, first)
        extend(store, keys, values, k, v, first)
    else:
        _write(store, keys, values, k, v, first, live)
        y = _over_cache(q, k, v, keys, values, store, position, mask, scale, first)
    return merge_heads(y.to(qkv.dtype))


def _over_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    store: Store,
    position: Tensor,
    mask: Tensor | None,
    scale: float,
    first: int,
) -> Tensor:
    """Attention of q: [B, Hq, S, D] f32 over the cache, -> the same shape. k, v: [B, Hkv, S, D], those of the call."""
    if not first and mask is None:  # an empty cache: the call sees itself alone
        k, v = (x.to(keys.dtype).to(torch.float32) for x in (k, unless_moved(v, position, first)))
        return _attend(q, k, v, None, scale, k.shape[2], causal=True, finite=False)
    k_exact, v_exact = exact_rows(store, keys, k, first), exact_rows(store, values, v, first)
    keep = keeps_decoded() or not paged(keys, store)
    k, v, finite = seen(store, k_exact, v_exact, first // PAGE, keep, check=mask is not None)
    v = unless_moved(v, position, first)
    live = k.shape[2]
    if mask is None and live - first > 1:
        mask = torch.arange(live, device=q.device) <= position[:, None]
    return _attend(q, k, v, mask, scale, live, causal=False, finite=finite)


def attention_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    k_codes: Tensor,
    k_scales: Tensor,
    v_codes: Tensor,
    v_scales: Tensor,
    key_mean: Tensor,
    key_balance: Tensor,
    position: Tensor,
    mask: Tensor | None,
    scale: float,
    fresh: bool,
) -> Tensor:
    """Attention after qkv_append (Int4Cache: before kv_extend_): q: [B, Hq, S, D] -> [B, S, Hq*D] in the dtype of q.

    ``fresh``: over k and v of this call only, causal (or under the first S columns of the mask). Otherwise over the
    cache: pages that were complete before position[0] as they decode, the rest exactly; without a mask, query i sees
    the slots 0 .. position[i].
    """
    q32 = q.to(torch.float32)
    if fresh:
        y = _attend(q32, k.to(torch.float32), v.to(torch.float32), mask, scale, q.shape[2], causal=True, finite=False)
    else:
        store = Store(k_codes, k_scales, v_codes, v_scales, key_mean, key_balance)
        first, _ = span(position, keys, store)
        y = _over_cache(q32, k, v, keys, values, store, position, mask, scale, first)
    return merge_heads(y.to(q.dtype))


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, live: int, causal: bool, finite: bool
) -> Tensor:
    """Attention in float32.

    mask: [.., S, >= live] bool or additive, or none; finite: K and V are known to hold no NaN and no infinity.
    """
    if mask is None:
        return sdpa(q, k, v, None, scale, causal)
    mask = mask[(None,) * (4 - mask.dim())][..., :live]
    if mask.dtype != torch.bool:
        mask = mask.to(torch.float32)
    if not finite:
        k, v = without_hidden(mask, k, v)
    y = sdpa(q, k, v, mask, scale)
    # The CPU kernels give zeros by themselves.
    return y if y.device.type == "cpu" else zeros_for_blind(y, mask)


def without_hidden(mask: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """k and v with zeros in the slots that no query of their sequence may see; mask: [.., S, L] bool or additive.

    Such a slot must not reach the result: its weight is 0, but 0 * NaN is NaN.
    """
    visible = mask if mask.dtype == torch.bool else mask > _HIDDEN
    used = visible.any(2).any(1)[:, None, :, None]
    return torch.where(used, k, 0.0), torch.where(used, v, 0.0)


def zeros_for_blind(y: Tensor, mask: Tensor) -> Tensor:
    """y: [B, H, S, D] with zeros for queries that may see nothing, for which kernels have given NaN."""
    sees = mask if mask.dtype == torch.bool else mask > float("-inf")
    return y.masked_fill(~sees.any(-1, keepdim=True), 0.0)


def kv_store(keys: Tensor, kv_format: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The empty store of a cache keys: [B, Hkv, L, D], in one of ``formats.KV_FORMATS``."""
    b, h, length, d = keys.shape
    return formats.kv_store(b, h, length, d, keys.device, kv_format)


def kv_append_(
    keys: Tensor,
    values: Tensor,
    k_codes: Tensor,
    k_scales: Tensor,
    v_codes: Tensor,
    v_scales: Tensor,
    key_mean: Tensor,
    key_balance: Tensor,
    first: int,
    last: int,
) -> None:
    """Quantises the pages first .. last-1 of keys and values: [B, Hkv, L, D] into the store.

    Raises:
        CacheMismatchError: the store is not one of this cache. CacheLengthError: it has fewer than ``last`` pages.
    """
    _check_store(keys, k_codes, keys.shape[0])
    check_length(first * PAGE, last * PAGE - 1, k_codes.shape[2] * PAGE)
    append(Store(k_codes, k_scales, v_codes, v_scales, key_mean, key_balance), keys, values, first, last)


def kv_extend_(
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    k_codes: Tensor,
    k_scales: Tensor,
    v_codes: Tensor,
    v_scales: Tensor,
    key_mean: Tensor,
    key_balance: Tensor,
    position: Tensor,
) -> None:
    """Appends k and v: [B, Hkv, S, D] to an INT4 cache whose exact rows, keys and values, are the unfinished page.

    Raises:
        CacheLengthError, CacheMismatchError: before anything is written.
    """
    store = Store(k_codes, k_scales, v_codes, v_scales, key_mean, key_balance)
    first, live = span(position, keys, store)
    _check_store(keys, k_codes, k.shape[0])
    _write(store, keys, values, k, unless_moved(v, position, first), first, live)


def kv_update(
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    k_codes: Tensor,
    k_scales: Tensor,
    v_codes: Tensor,
    v_scales: Tensor,
    key_mean: Tensor,
    key_balance: Tensor,
    position: Tensor,
    length: int,
) -> tuple[Tensor, Tensor]:
    """kv_extend_, and what attention sees of the cache afterwards: keys and values [B, Hkv, length, D] in k's dtype.

    Raises:
        CacheLengthError, CacheMismatchError: before anything is written.
    """
    store = Store(k_codes, k_scales, v_codes, v_scales, key_mean, key_balance)
    first, live = span(position, keys, store)
    check_length(first, live - 1, length)
    _check_store(keys, k_codes, k.shape[0])
    v = unless_moved(v, position, first)
    if not paged(keys, store):
        _write(store, keys, values, k, v, first, live)
    k_exact, v_exact = exact_rows(store, keys, k, first), exact_rows(store, values, v, first)
    out = [t.new_zeros((*t.shape[:2], length, t.shape[3])) for t in (k, v)]
    k_seen, v_seen, _ = seen(store, k_exact, v_exact, first // PAGE, keeps_decoded(), check=False)
    out[0][:, :, :live].copy_(k_seen)
    out[1][:, :, :live].copy_(v_seen)
    if paged(keys, store):
        extend(store, keys, values, k, v, first)
    return out[0], out[1]


def kv_round(k: Tensor, v: Tensor, key_mean: Tensor, key_balance: Tensor) -> tuple[Tensor, Tensor]:
    """k, v: [B, Hkv, S, D] through the codec of the cache and back."""
    keys = formats.decode_keys(*formats.encode_keys(k, key_mean, key_balance), key_mean, key_balance)
    return keys.to(k.dtype), formats.decode_rows(*formats.encode_rows(v)).to(v.dtype)


def kv_dequantize(codes: Tensor, scales: Tensor, mean: Tensor | None, balance: Tensor | None, pages: int) -> Tensor:
    """codes: [B, Hkv, P, 64, D/2], scales: [B, Hkv, P, 64] -> [B, Hkv, pages*64, D] f32, keys with mean and balance.

    Keys per channel: scales [B, Hkv, P, 2, D].
    """
    c, s = codes[:, :, :pages], scales[:, :, :pages]
    if mean is None or balance is None:
        return formats.decode_rows(c.flatten(2, 3), s.flatten(2, 3))
    return decode_keys(c, s, mean, balance)


LAUNCH = {
    "qkv_rope": qkv_rope,
    "qkv_append": qkv_append,
    "attention_int4": attention_int4,
    "attention_prefill": attention_prefill,
    "kv_store": kv_store,
    "kv_append_": kv_append_,
    "kv_extend_": kv_extend_,
    "kv_update": kv_update,
    "kv_round": kv_round,
    "kv_dequantize": kv_dequantize,
}
