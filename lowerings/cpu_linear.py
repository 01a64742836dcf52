"""CPU, bfloat16 activations: the projections on weights that are dequantised once to bfloat16.

The reference multiplies float32 weights, twice the bytes of the model's own: measured on SmolLM2 at batch 1 it decodes
at 0.67 of eager's speed in bfloat16. Here a weight is rounded once more (2^-9 relative) and the product once before
the epilogue, as in the uncompiled model; both are below the step of the 4 or 8 bits they stand for.
``lowering="reference"`` keeps the specification's arithmetic. e4m3 codes and power-of-two steps are exact in bfloat16.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from fu_compile.lowerings.dense import dense
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


def accepts(x: Tensor, *args: object) -> str | None:
    """Why these arguments are not for this lowering, or none."""
    return None if x.dtype == torch.bfloat16 else f"x is {x.dtype}: for bfloat16 only"


def linear_bf16(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    eps: float,
    scale: float,
    prologue: str,
    epilogue: str,
) -> Tensor:
    """weight: [N, K] bf16."""
    rms, steps = steps_of(prologue, epilogue)
    y = F.linear(rounded_row(x, rms, eps), weight.to(torch.bfloat16))
    return finish(y.to(torch.float32), steps, bias, residual, scale).to(x.dtype)


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
    """packed: formats.pack_int4, as for the reference; the row is rounded once, normalised and times the gain."""
    rms, steps = steps_of(prologue, epilogue)
    check_gain(gain, k, rms)
    paired = "swiglu" in steps
    key = (n, k, group, paired, packed.storage_offset(), torch.bfloat16)
    weight = dense(packed, key, lambda: dense_int4(packed, n, k, group, paired).to(torch.bfloat16))
    y = F.linear(rounded_row(x, rms, eps, gain), weight)
    return finish(y.to(torch.float32), steps, bias, residual, scale).to(x.dtype)


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
    """weight: [N, K] e4m3 with weight_scale: [N] f32; act: the state of this input, updated."""
    rms, steps = steps_of(prologue, epilogue)
    key = (weight.shape, weight.storage_offset(), torch.bfloat16)
    full = dense(weight, key, lambda: weight.detach().to(torch.bfloat16))
    x32 = x.to(torch.float32)
    row = normalized(x32, eps) if rms else x32
    if scaling != "none":
        codes, step = formats.fp8_quantize(row, act, scaling)
        row = codes.to(torch.float32).mul_(step)
    y = F.linear(row.to(torch.bfloat16), full).to(torch.float32).mul_(weight_scale)
    return finish(y, steps, bias, residual, scale).to(x.dtype)


mlp_fp8 = functools.partial(two_products, linear_fp8)
"""Two linear_fp8 one after the other; what lies between them is rounded to bfloat16 on its way to e4m3."""


LAUNCH: dict[str, Callable[..., Tensor]] = {
    "linear_bf16": linear_bf16,
    "linear_fp8": linear_fp8,
    "mlp_fp8": mlp_fp8,
    "linear_int4": linear_int4,
}
