"""``attention_int4`` for one token per sequence on Hopper: csrc/attention_int4_sm90.cu, one launch, no host reads.

``config`` turns a shape into a grid: one cluster for each sequence, key/value head and up to eight of the query heads
that share it; the blocks of a cluster split the tokens. How many tokens there are is read on the device.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from fu_compile.lowerings import decode_linear as common
from fu_compile.lowerings.decode_linear import SMS, ceil_div
from torch import Tensor

from fu_compile import jit
from fu_compile.errors import CacheMismatchError
from fu_compile.formats import PAGE

WARPS = 8
MAX_HEADS = 8
"""Query heads of a block: the N of mma.m16n8k16."""
MAX_HEAD_DIM = 256
MAX_CLUSTER = 8
"""Blocks of a cluster that every Hopper GPU runs."""
EXACT_SLICES = 4
"""Slices of 16 tokens in an unfinished page."""
SIGNATURE = "p" * 16 + "iiiiiii" + "ff"
"""qkv, cos, sin, q_norm, k_norm, keys, values, k_codes, k_scales, v_codes, v_scales, key_mean, key_balance, position,
mask, y; strides of a sequence in qkv and cos, slots, pages, limit, stride of a sequence in the mask, its columns; eps,
scale"""


@dataclass(frozen=True)
class Config:
    """How one shape is run."""

    head_dim: int
    group: int
    """query heads of a key/value head"""
    kv_heads: int
    cluster: int
    """blocks that split the tokens of a sequence"""
    grid: int
    """blocks"""

    @property
    def heads(self) -> int:
        """Query heads of a block."""
        return ceil_div(self.group, ceil_div(self.group, MAX_HEADS))

    @property
    def smem(self) -> int:
        """Bytes of shared memory: the sum at the top of the kernel."""
        d, heads = self.head_dim, self.heads
        sets = 1 if heads <= 4 else 2
        received = heads * d * 4 if self.cluster > 1 else 0
        used = 2 * sets * (d // 32) * 512 + 128 + 4 * d + received + (self.cluster + WARPS) * heads * 8
        rows = ceil_div(EXACT_SLICES, self.cluster) * 2 * 16 * (2 * d + 16)
        return ceil_div(used, 16) * 16 + WARPS * heads * d * 4 + rows


@functools.cache
def config(batch: int, q_heads: int, kv_heads: int, head_dim: int, pages: int, sms: int = SMS) -> Config:
    """The configuration for a cache of ``pages`` pages: as many blocks as there are multiprocessors.

    Two on each measured slower in a layer (8B, batch 8: 108 us with 256 blocks, 106 with 128).
    """
    group = q_heads // kv_heads
    units = batch * kv_heads * ceil_div(group, MAX_HEADS)
    cluster = 1
    while cluster < min(MAX_CLUSTER, pages) and units * cluster * 2 <= sms:
        cluster *= 2
    return Config(head_dim, group, kv_heads, cluster, units * cluster)


@functools.cache
def kernel(c: Config, rotated: int, half: bool, cos32: bool, q_norm: bool, k_norm: bool, mask: int) -> jit.Kernel:
    """The kernel that runs this configuration; compiled at its first launch. mask: as FU_MASK."""
    constants = {"D": c.head_dim, "ROTATED": rotated, "GROUP": c.group, "HEADS": c.heads, "KV_HEADS": c.kv_heads}
    constants |= {"CLUSTER": c.cluster, "SMEM": c.smem, "HALF": int(half), "COS32": int(cos32)}
    constants |= {"QNORM": int(q_norm), "KNORM": int(k_norm), "MASK": mask}
    return jit.Kernel("attention_int4_sm90.cu", constants, SIGNATURE, jit.Shape(c.grid, WARPS * 32, c.smem, c.cluster))


def kernels_of(model: Any, batches: Iterable[int] = (1, 8, 32), length: int = 4096, half: bool = False) -> list:
    """The kernels of a model's decode step, without and with a bool mask.

    Args:
        model: a transformers configuration of the Llama kind, or one that holds it as ``text_config``.
        batches: sequences of a decode call.
        length: tokens of the cache; from 512 on it makes no difference.
        half: float16 activations instead of bfloat16.
    """
    from fu_compile.models import heads_of

    model = getattr(model, "text_config", None) or model
    heads, kv, dim = heads_of(model)
    norm = model.model_type.startswith("qwen3")
    rotated = int(dim * (getattr(model, "partial_rotary_factor", None) or 1.0))
    found = {}
    for batch in batches:
        c = config(batch, heads, kv, dim, ceil_div(length, PAGE))
        for mask in (0, 1):
            found[c, mask] = kernel(c, rotated, half, False, norm, norm, mask)
    return list(found.values())


def _mask_kind(mask: Tensor | None, dtype: torch.dtype) -> int | None:
    """FU_MASK of a mask, or none where there is no such kind."""
    if mask is None:
        return 0
    return {torch.bool: 1, dtype: 2, torch.float32: 3}.get(mask.dtype)


def accepts(
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
) -> str | None:
    """Why this call is not ours, or none."""
    dtype, rotated = qkv.dtype, cos.shape[-1]
    if dtype not in (torch.bfloat16, torch.float16):
        return f"activations are {dtype}, not 16 bits"
    if qkv.shape[1] != 1:
        return f"{qkv.shape[1]} tokens of a sequence; this kernel decodes one"
    if head_dim % 32 or head_dim > MAX_HEAD_DIM:
        return f"head_dim {head_dim} is not a multiple of 32 up to {MAX_HEAD_DIM}"
    if q_heads % kv_heads:
        return f"{q_heads} query heads do not share {kv_heads} key/value heads evenly"
    if cos.dim() != 3 or rotated % 2 or rotated > head_dim or cos.dtype not in (dtype, torch.float32):
        return f"cos is {cos.dtype} {list(cos.shape)}"
    if sin.dtype != cos.dtype or sin.shape[-1] != rotated:
        return "cos and sin do not look alike"
    if (q_norm is not None and q_norm.dtype != dtype) or (k_norm is not None and k_norm.dtype != dtype):
        return "a norm per head has another dtype than the activations"
    if keys.dtype != dtype or values.dtype != dtype:
        return f"the cache is {keys.dtype}, the activations {dtype}"
    cache = (keys, values, k_codes, k_scales, v_codes, v_scales, key_mean, key_balance)
    if k_scales.dim() != 4:
        return "keys are quantised per channel (int4-channel); this kernel reads one scale per token"
    if not all(t.is_contiguous() for t in cache):
        return "the cache or its store is not contiguous"
    if mask is not None and _mask_kind(mask, dtype) is None:
        return f"a mask of dtype {mask.dtype}"
    if mask is not None and (mask.dim() != 4 or mask.shape[1] != 1 or mask.shape[2] != 1):
        return f"a mask {list(mask.shape)}; this kernel takes [1 or B, 1, 1, L]"
    if position.dtype != torch.int64:
        return f"positions are {position.dtype}"
    return common.unavailable(qkv.device.index or 0)


def _per_sequence(t: Tensor) -> tuple[Tensor, int]:
    """The tensor with contiguous columns, and the stride between its sequences (0: all share one)."""
    if t.shape[-1] > 1 and t.stride(-1) != 1:
        t = t.contiguous()
    return t, 0 if t.shape[0] == 1 else t.stride(0)


def launch(
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
    """The operator ``attention_int4`` on the current CUDA stream.

    A position outside the cache is found on the device: nothing is written then, and the output is NaN. The runtime has
    checked the length before; only a captured graph that is replayed too often gets there.

    Raises:
        CacheMismatchError: the cache, its store and the call do not belong together.
    """
    batch, slots, pages = qkv.shape[0], keys.shape[2], k_codes.shape[2]
    paged = slots == PAGE and pages > 1  # as in lowerings/pages.py: keys hold the unfinished page alone
    if (
        keys.shape != (batch, kv_heads, slots, head_dim)
        or values.shape != keys.shape
        or k_codes.shape != (batch, kv_heads, pages, PAGE, head_dim // 2)
        or v_codes.shape != k_codes.shape
        or not (paged or slots <= pages * PAGE)
    ):
        raise CacheMismatchError(
            f"a call with batch {batch}, a cache {list(keys.shape)} and an INT4 store {list(k_codes.shape)}"
            " do not belong together"
        )
    device = qkv.device.index
    c = config(batch, q_heads, kv_heads, head_dim, pages, common.multiprocessors(device))
    kind = _mask_kind(mask, qkv.dtype)
    run = kernel(
        c, cos.shape[-1], qkv.dtype == torch.float16, cos.dtype == torch.float32 != qkv.dtype, q_norm is not None,
        k_norm is not None, kind or 0,
    )  # fmt: skip
    y = qkv.new_empty((batch, 1, q_heads * head_dim))
    qkv, ldqkv = _per_sequence(qkv)
    cos, ldcos = _per_sequence(cos)
    sin, ldsin = _per_sequence(sin)
    if ldsin != ldcos:
        sin = sin.expand(cos.shape).contiguous()
        cos = cos.expand(sin.shape).contiguous()
        ldcos = cos.shape[-1]
    ldmask, columns = 0, 0
    if mask is not None:
        mask, ldmask = _per_sequence(mask)
        columns = mask.shape[-1]
    run(
        device,
        torch.cuda.current_stream(device).cuda_stream,
        qkv.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        None if q_norm is None else q_norm.data_ptr(),
        None if k_norm is None else k_norm.data_ptr(),
        keys.data_ptr(),
        values.data_ptr(),
        k_codes.data_ptr(),
        k_scales.data_ptr(),
        v_codes.data_ptr(),
        v_scales.data_ptr(),
        key_mean.data_ptr(),
        key_balance.data_ptr(),
        position.data_ptr(),
        None if mask is None else mask.data_ptr(),
        y.data_ptr(),
        ldqkv,
        ldcos,
        slots,
        pages,
        pages * PAGE if paged else slots,
        ldmask,
        columns,
        eps,
        scale,
    )
    return y
