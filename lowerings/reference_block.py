"""Reference: the recognised operators, with the ATen calls and the roundings of the uncompiled model.

Nothing here is quantised and nothing is computed in another dtype than transformers' Llama code does, so a graph in
which these stand for their ATen nodes gives the eager result (bit for bit where the calls are the same).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fu_compile.errors import CacheLengthError


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x: [..., K], weight: [K] or none -> [..., K]; the mean is taken in float32, the gain multiplies in x's dtype."""
    x32 = x.to(torch.float32)
    y = (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)
    return y if weight is None else weight * y


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x: [B, H, S, D], cos and sin: [1 or B, S, R] -> [B, H, S, D]; the first R columns turn, in halves."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    rotated = cos.shape[-1]
    turn = x if rotated == x.shape[-1] else x[..., :rotated]
    first, second = turn.chunk(2, -1)
    y = (turn * cos) + (torch.cat((-second, first), -1) * sin)
    return y if turn is x else torch.cat((y, x[..., rotated:].to(y.dtype)), -1)


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """:func:`rotate`, contiguous and in the dtype of x."""
    return rotate(x, cos, sin).to(x.dtype).contiguous()


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, all [..., N]."""
    return F.silu(gate) * up


def residual(x: Tensor, y: Tensor, scale: float) -> Tensor:
    """x + scale * y; the product rounds to y's dtype first."""
    return x + (y if scale == 1.0 else y * scale)


def split_heads(qkv: Tensor, q_heads: int, kv_heads: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """[B, S, (Hq + 2 Hkv) * D] -> views [B, Hq, S, D] and twice [B, Hkv, S, D]."""
    b, s, _ = qkv.shape
    heads = qkv.view(b, s, q_heads + 2 * kv_heads, head_dim).transpose(1, 2)
    q, k, v = heads.split((q_heads, kv_heads, kv_heads), 1)
    return q, k, v


def qkv(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """x: [B, S, K] -> q: [B, Hq, S, D], k, v: [B, Hkv, S, D]; one linear for each weight, then the norms per head."""
    parts = _linears(x, weights, biases)
    if len(parts) == 1:
        q, k, v = split_heads(parts[0], q_heads, kv_heads, head_dim)
    else:
        q, k, v = (p.view(*x.shape[:2], -1, head_dim).transpose(1, 2) for p in parts)
    if q_norm is not None:
        q = rms_norm(q, q_norm, eps)
    if k_norm is not None:
        k = rms_norm(k, k_norm, eps)
    # Outputs of an operator must not share memory; three views of one projection would.
    own = Tensor.contiguous if len(parts) == 3 else _copy
    return own(q), own(k), own(v)


def _copy(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def _linears(x: Tensor, weights: list[Tensor], biases: list[Tensor]) -> list[Tensor]:
    return [F.linear(x, w, biases[i] if biases else None) for i, w in enumerate(weights)]


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, causal: bool = False) -> Tensor:
    """Scaled dot-product attention over grouped key/value heads.

    q: [B, Hq, S, D], k and v: [B, Hkv, L, D], mask: [B or 1, Hq or 1, S, L] bool or in the dtype of q -> [B, Hq, S, D].

    One query token: the Hq / Hkv query heads of a group become the rows of one problem, so K and V are read once and
    never repeated. A query that may see no key gives zeros.
    """
    repeat, s = q.shape[1] // k.shape[1], q.shape[2]
    if repeat == 1 or s > 1:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal and s > 1, scale=scale, enable_gqa=repeat > 1
        )
    b, hq, _, d = q.shape
    if mask is not None and mask.shape[1] > 1:
        mask = mask.reshape(mask.shape[0], k.shape[1], repeat, -1)
    return F.scaled_dot_product_attention(
        q.reshape(b, k.shape[1], repeat, d), k, v, attn_mask=mask, scale=scale
    ).reshape(b, hq, 1, v.shape[-1])  # fmt: skip


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    """q: [B, Hq, S, D], k, v: [B, Hkv, L, D], mask: bool or additive, or none -> [B, S, Hq*D]."""
    if mask is not None:
        mask = mask if mask.dtype == torch.bool else mask.to(q.dtype)
        mask = mask[(None,) * (4 - mask.dim())]
    return merge_heads(sdpa(q, k, v, mask, scale, causal))


def merge_heads(y: Tensor) -> Tensor:
    """[B, H, S, D] -> [B, S, H*D], contiguous."""
    return y.transpose(1, 2).flatten(2).contiguous()


def check_length(first: int, last: int, length: int) -> None:
    """Raises CacheLengthError unless the slots first..last lie in a cache of ``length`` slots."""
    if first < 0 or last >= length:
        raise CacheLengthError(
            f"the call writes the cache slots {first}..{last} of a cache of {length}; it needs {last + 1}"
        )


def kv_write_(cache: Tensor, position: Tensor, x: Tensor) -> None:
    """cache: [B, Hkv, L, D], position: [S] int64, x: [B, Hkv, S, D]; cache[:, :, position] = x.

    Raises:
        CacheLengthError: a position outside the cache, before anything is written. On a GPU reading the positions back
            would stall the stream: there the runtime checks before the call, and the device asserts.
    """
    if position.device.type == "cpu" and position.numel():
        low, high = position.aminmax()
        check_length(int(low), int(high), cache.shape[2])
    cache.index_copy_(2, position, x.to(cache.dtype))


def kv_roll_(cache: Tensor, x: Tensor) -> None:
    """A full sliding window takes one more token: cache: [B, Hkv, L, D] moves one to the left, x becomes its last."""
    moved = cache.roll(-1, 2)
    moved[:, :, -1:] = x
    cache.copy_(moved)


def kv_fill_(cache: Tensor, x: Tensor) -> None:
    """A sliding window that overflows in this call: cache: [B, Hkv, L, D] = the last L rows of x."""
    if x.shape[2] < cache.shape[2]:
        raise CacheLengthError(f"{x.shape[2]} tokens do not fill a sliding window of {cache.shape[2]} slots")
    cache.copy_(x[:, :, x.shape[2] - cache.shape[2] :])


def kv_cat(past: Tensor | None, x: Tensor) -> Tensor:
    """DynamicCache: [B, Hkv, T, D] ++ [B, Hkv, S, D] along the tokens; without a past a copy of x."""
    return _copy(x) if past is None else torch.cat((past, x), 2)


LAUNCH = {
    "rms_norm": rms_norm,
    "rotary": rotary,
    "swiglu": swiglu,
    "residual": residual,
    "qkv": qkv,
    "attention": attention,
    "kv_write_": kv_write_,
    "kv_roll_": kv_roll_,
    "kv_fill_": kv_fill_,
    "kv_cat": kv_cat,
}
