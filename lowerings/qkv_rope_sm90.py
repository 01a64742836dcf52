"""``qkv_rope`` and ``qkv_append`` on Hopper: csrc/qkv_rope_sm90.cu, one launch, no host reads.

What stands between prefill's projection of q, k, v and its attention: norms per head, RoPE, the split into heads, and
for ``qkv_append`` the rows of the cache and the INT4 copy of every page that the call completes.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from fu_compile.lowerings import decode_linear as common
from fu_compile.lowerings.decode_linear import ceil_div
from torch import Tensor

from fu_compile import jit
from fu_compile.errors import CacheMismatchError
from fu_compile.formats import PAGE

WARPS = 8
SHARE = 12
"""Heads that one warp takes of a token: four warps for the 48 heads of an 8B layer."""
MAX_HEAD_DIM = 256
SIGNATURE = "p" * 17 + "iiiiii" + "f"
"""qkv, cos, sin, q_norm, k_norm, q, k, v, keys, values, k_codes, k_scales, v_codes, v_scales, key_mean, key_balance,
position; batch, tokens, stride of a token in qkv and of a sequence in cos, slots, pages; eps"""


@functools.cache
def kernel(
    heads: tuple[int, int, int],
    rotated: int,
    half: bool,
    cos32: bool,
    norms: tuple[bool, bool],
    append: bool,
) -> jit.Kernel:
    """The kernel for ``heads`` = (q_heads, kv_heads, head_dim); compiled at its first launch."""
    q_heads, kv_heads, dim = heads
    constants = {
        "D": dim, "ROTATED": rotated, "HALF": int(half), "COS32": int(cos32), "Q_HEADS": q_heads,
        "KV_HEADS": kv_heads, "SHARE": SHARE, "QNORM": int(norms[0]), "KNORM": int(norms[1]), "APPEND": int(append),
    }  # fmt: skip
    return jit.Kernel("qkv_rope_sm90.cu", constants, SIGNATURE, jit.Shape(1, WARPS * 32, 0))


def refuses_heads(head_dim: int, rotated: int) -> str | None:
    """Why no kernel has heads of this size, or none."""
    if head_dim % 32 or head_dim > MAX_HEAD_DIM:
        return f"head_dim {head_dim} is not a multiple of 32 up to {MAX_HEAD_DIM}"
    if rotated % 2 or rotated > head_dim:
        return f"{rotated} rotated columns of {head_dim}"
    return None


def accepts(
    qkv: Tensor, cos: Tensor, sin: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, *rest: Any
) -> str | None:
    """Why this call of either operator is not ours, or none."""
    dtype, rotated, head_dim = qkv.dtype, cos.shape[-1], rest[-1]
    if dtype not in (torch.bfloat16, torch.float16):
        return f"activations are {dtype}, not 16 bits"
    if reason := refuses_heads(head_dim, rotated):
        return reason
    if cos.dim() != 3 or cos.dtype not in (dtype, torch.float32):
        return f"cos is {cos.dtype} {list(cos.shape)}"
    if sin.dtype != cos.dtype or sin.shape[-1] != rotated:
        return "cos and sin do not look alike"
    if any(norm is not None and norm.dtype != dtype for norm in (q_norm, k_norm)):
        return "a norm per head has another dtype than the activations"
    return common.unavailable(qkv.device.index or 0)


def accepts_append(*args: Any) -> str | None:
    """Why this call of ``qkv_append`` is not ours, or none."""
    qkv, (keys, values, k_codes, k_scales), position = args[0], args[6:10], args[14]
    if keys.dtype != qkv.dtype or values.dtype != qkv.dtype:
        return f"the cache is {keys.dtype}, the activations {qkv.dtype}"
    if k_scales.dim() != 4:
        return "keys are quantised per channel (int4-channel); this kernel writes one scale per token"
    if keys.shape[2] == PAGE and k_codes.shape[2] > 1:
        return "the cache keeps the unfinished page alone"
    if not all(t.is_contiguous() for t in args[6:14]):
        return "the cache or its store is not contiguous"
    if position.dtype != torch.int64:
        return f"positions are {position.dtype}"
    return accepts(*args)


def _launch(
    qkv: Tensor, angles: tuple[Tensor, Tensor], norms: tuple[Tensor | None, Tensor | None], eps: float,
    cache: tuple[Tensor, ...], heads: tuple[int, int, int],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    batch, tokens, columns = qkv.shape
    q_heads, kv_heads, dim = heads
    q, k, v = (qkv.new_empty((batch, h, tokens, dim)) for h in (q_heads, kv_heads, kv_heads))
    if not qkv.numel():
        return q, k, v
    qkv, ldqkv = common.rows(qkv, columns)
    cos, sin = (t.expand(t.shape[0], tokens, t.shape[2]).contiguous() for t in angles)
    if cos.shape[0] != sin.shape[0]:
        cos, sin = (t.expand(batch, -1, -1).contiguous() for t in (cos, sin))
    gains = [None if n is None else n.contiguous() for n in norms]
    parts = ceil_div(q_heads + 2 * kv_heads, SHARE)
    units = batch * (tokens + (PAGE - 1 if cache else 0)) * parts
    cos32 = cos.dtype == torch.float32
    run = kernel(
        heads, cos.shape[-1], qkv.dtype == torch.float16, cos32,
        (gains[0] is not None, gains[1] is not None), bool(cache),
    )  # fmt: skip
    device = qkv.device.index
    slots, pages = (cache[0].shape[2], cache[2].shape[2]) if cache else (0, 0)
    pointers = (*(None if t is None else t.data_ptr() for t in (qkv, cos, sin, *gains, q, k, v, *cache)),)
    run(
        device, torch.cuda.current_stream(device).cuda_stream, *pointers, *[None] * (17 - len(pointers)), batch, tokens,
        ldqkv, 0 if cos.shape[0] == 1 else tokens * cos.shape[2], slots, pages, eps, grid=ceil_div(units, WARPS),
    )  # fmt: skip
    return q, k, v


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
    return _launch(qkv, (cos, sin), (q_norm, k_norm), eps, (), (q_heads, kv_heads, head_dim))


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
    """qkv_rope, then the rows of the cache and the INT4 copy of every page that is now complete.

    Rows past the cache's end are found on the device and not written; the runtime has checked the length before.

    Raises:
        CacheMismatchError: the cache, its store and the call do not belong together.
    """
    batch, slots, pages = qkv.shape[0], keys.shape[2], k_codes.shape[2]
    if (
        keys.shape != (batch, kv_heads, slots, head_dim)
        or values.shape != keys.shape
        or k_codes.shape != (batch, kv_heads, pages, PAGE, head_dim // 2)
        or v_codes.shape != k_codes.shape
        or slots > pages * PAGE
    ):
        raise CacheMismatchError(
            f"a call with batch {batch}, a cache {list(keys.shape)} and an INT4 store {list(k_codes.shape)}"
            " do not belong together"
        )
    cache = (keys, values, k_codes, k_scales, v_codes, v_scales, key_mean, key_balance, position)
    return _launch(qkv, (cos, sin), (q_norm, k_norm), eps, cache, (q_heads, kv_heads, head_dim))


LAUNCH = {"qkv_rope": qkv_rope, "qkv_append": qkv_append}
ACCEPTS = {"qkv_rope": accepts, "qkv_append": accepts_append}
