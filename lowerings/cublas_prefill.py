"""Prefill with what CUDA libraries have: cuBLASLt's FP8 product and the flash attention of PyTorch.

``linear_fp8`` keeps the meaning of the reference: the product of the same codes with float32 results, then scales and
epilogue in float32. ``attention_prefill``: queries, keys and values (decoded pages too) in the model's dtype, float32
sums, weights rounded to the model's dtype before they meet the values.

``linear_int4`` in prefill (a model that was packed has no other weights): the codes are dequantised to the model's
dtype at every call and freed behind it. The reference keeps a float32 copy instead, eight times the packed bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from fu_compile.lowerings.decode_linear import capability, one
from fu_compile.lowerings.pages import PAGE, Store, exact_rows, seen, unless_moved
from fu_compile.lowerings.reference_attention import span, without_hidden, zeros_for_blind
from fu_compile.lowerings.reference_block import merge_heads
from fu_compile.lowerings.reference_linear import (
    check_gain,
    dense_int4,
    finish,
    normalized,
    rounded_row,
    steps_of,
    two_products,
)
from torch import Tensor

from fu_compile import formats


def _accepts_linear(x: Tensor, weight: Tensor, *rest: Any) -> str | None:
    """Why this call is not ours, or none."""
    n, k = weight.shape
    if rest[-1] == "none":
        return "the activations are not quantised"
    if x.dtype not in (torch.bfloat16, torch.float16):
        return f"activations are {x.dtype}, not 16 bits"
    if weight.dtype != torch.float8_e4m3fn or n % 16 or k % 16:
        return "cuBLASLt takes e4m3 weights with multiples of 16 rows and columns"
    if capability(x.device.index or 0) < (8, 9):
        return "FP8 products need compute capability 8.9"
    return None


def linear_fp8(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    act: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    eps: float,
    scale: float,
    prologue: str,
    epilogue: str,
    scaling: str,
) -> Tensor:
    """weight: [N, K] e4m3 with weight_scale: [N] f32; act: the state of this input, updated. -> [..., N] like x."""
    rms, steps = steps_of(prologue, epilogue)
    row = x.to(torch.float32)
    codes, step = formats.fp8_quantize(normalized(row, eps) if rms else row, act, scaling)
    n, k = weight.shape
    rows = step.dim() > 0  # the library multiplies with scales of rows only where it also has one for each column
    y = torch._scaled_mm(
        codes.reshape(-1, k), weight.contiguous().t(), scale_a=one(x.device) if rows else step,
        scale_b=one(x.device), out_dtype=torch.float32, use_fast_accum=True,
    )  # fmt: skip
    y = y.mul_(weight_scale).view(*x.shape[:-1], n)
    if rows:
        y = y.mul_(step)
    return finish(y, steps, bias, residual, scale).to(x.dtype)


def _accepts_mlp(x: Tensor, *rest: Any) -> str | None:
    """Why this call is not ours, or none."""
    weight, weight_scale, act, _, down, down_scale, down_act = rest[:7]
    return _accepts_linear(x, weight, weight_scale, act, rest[-1]) or _accepts_linear(
        x, down, down_scale, down_act, rest[-1]
    )


mlp_fp8 = functools.partial(two_products, linear_fp8)
"""Two linear_fp8 one after the other; what lies between them is rounded to x's dtype on its way to e4m3."""


def _accepts_int4(x: Tensor, packed: Tensor, n: int, k: int, *rest: Any) -> str | None:
    """Why this call is not ours, or none."""
    if x.dtype not in (torch.bfloat16, torch.float16):
        return f"activations are {x.dtype}, not 16 bits"
    return None


def linear_int4(
    x: Tensor,
    packed: Tensor,
    n: int,
    k: int,
    group: int,
    bias: Tensor | None,
    residual: Tensor | None,
    eps: float,
    scale: float,
    prologue: str,
    epilogue: str,
    gain: Tensor | None = None,
) -> Tensor:
    """packed: formats.pack_int4, as for the reference; weight and row are rounded to x's dtype, sums are float32."""
    rms, steps = steps_of(prologue, epilogue)
    check_gain(gain, k, rms)
    y = F.linear(rounded_row(x, rms, eps, gain), dense_int4(packed, n, k, group, "swiglu" in steps).to(x.dtype))
    return finish(y.to(torch.float32), steps, bias, residual, scale).to(x.dtype)


def _accepts_attention(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> str | None:
    """Why this call is not ours, or none."""
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"queries are {q.dtype}, not 16 bits"
    return None


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
    """q: [B, Hq, S, D], k and v: [B, Hkv, S, D] -> [B, S, Hq*D]; what is seen is what the reference sees.

    A call on an empty cache sees its own keys and values alone: then no page is decoded, and without a mask it takes
    the path of a call without a cache.
    """
    first, live = 0, q.shape[2]
    if not fresh:
        store = Store(k_codes, k_scales, v_codes, v_scales, key_mean, key_balance)
        first, live = span(position, keys, store)
        if first:
            exact = exact_rows(store, keys, k, first), exact_rows(store, values, v, first)
            k, v = (t.to(q.dtype) for t in seen(store, *exact, first // PAGE, keep=False, check=False)[:2])
        v = unless_moved(v, position, first)
    grouped = q.shape[1] != k.shape[1]
    if mask is None and not first:
        causal = q.shape[2] > 1
        return merge_heads(F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=grouped))
    if mask is None:  # every slot is seen by the last query, and every query sees the first slot
        mask = torch.arange(live, device=q.device) <= position[:, None]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=grouped)
        return merge_heads(y)
    mask = mask[(None,) * (4 - mask.dim())][..., :live]
    k, v = without_hidden(mask, k, v)
    added = mask if mask.dtype == torch.bool else mask.to(q.dtype)
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=added, scale=scale, enable_gqa=grouped)
    return merge_heads(zeros_for_blind(y, mask))


LAUNCH: dict[str, Callable[..., Any]] = {
    "linear_fp8": linear_fp8,
    "mlp_fp8": mlp_fp8,
    "linear_int4": linear_int4,
    "attention_prefill": attention_prefill,
}
ACCEPTS: dict[str, Callable[..., str | None]] = {
    "linear_fp8": _accepts_linear,
    "mlp_fp8": _accepts_mlp,
    "linear_int4": _accepts_int4,
    "attention_prefill": _accepts_attention,
}
