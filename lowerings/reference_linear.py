"""Reference: the projections. Dequantise to float32, compute in float32, round once to the dtype of x.

``linear_exact`` keeps eager's roundings instead. Packed weights are dequantised once (``dense``), so on a CPU a call
costs what the float32 model's linear costs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from fu_compile.lowerings.dense import dense
from fu_compile.lowerings.reference_block import residual as add_residual
from fu_compile.lowerings.reference_block import rms_norm, swiglu
from torch import Tensor

from fu_compile import formats
from fu_compile.errors import FormatError
from fu_compile.ops import EPILOGUE_ORDER
from fu_compile.packed import Rows

_PROLOGUES = ("", "rms")
_EPILOGUES = {
    "|".join(names): frozenset(names) for r in range(4) for names in itertools.combinations(EPILOGUE_ORDER, r)
}  # every ordered sub-sequence


def steps_of(prologue: str, epilogue: str) -> tuple[bool, frozenset[str]]:
    """(rms?, names in the epilogue); FormatError for a spelling that ops.py does not allow."""
    if prologue not in _PROLOGUES or epilogue not in _EPILOGUES:
        raise FormatError(f"prologue {prologue!r} with epilogue {epilogue!r} is not spelled as fu_compile.ops says")
    return prologue == "rms", _EPILOGUES[epilogue]


def rstd(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean(x^2) + eps): [..., K] f32 -> [..., 1]."""
    return torch.rsqrt((x * x).mean(-1, keepdim=True).add_(eps))


def normalized(x: Tensor, eps: float) -> Tensor:
    """The ``rms`` prologue: x / sqrt(mean(x^2) + eps), [..., K] f32 -> the same."""
    return x * rstd(x, eps)


def rounded_row(x: Tensor, rms: bool, eps: float, gain: Tensor | None = None) -> Tensor:
    """The row that a 16-bit product reads: normalised and times the gain in float32, rounded once to x's dtype."""
    if not rms:
        return x
    row = normalized(x.to(torch.float32), eps)
    return (row if gain is None else row.mul_(gain)).to(x.dtype)


def check_gain(gain: Tensor | None, k: int, rms: bool) -> None:
    """FormatError for a gain without ``rms``, or of another length than the weight's input features."""
    if gain is not None and (not rms or gain.shape != (k,)):
        raise FormatError(f"a gain of shape {list(gain.shape)} needs prologue 'rms' and {k} input features")


def finish(y: Tensor, steps: frozenset[str], bias: Tensor | None, residual: Tensor | None, scale: float) -> Tensor:
    """The epilogue in float32; y: [..., N] f32, owned by the caller."""
    if "bias" in steps:
        y = y.add_(_operand(bias, "bias"))
    if "swiglu" in steps:
        gate, up = y.chunk(2, -1)
        y = F.silu(gate).mul_(up)
    if "residual" in steps:
        y = torch.add(_operand(residual, "residual").to(torch.float32), y, alpha=scale)
    return y


def _operand(value: Tensor | None, name: str) -> Tensor:
    if value is None:
        raise FormatError(f"the epilogue names {name!r} and the call brings none")
    return value


def linear_exact(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    norm: Tensor | None,
    residual: Tensor | None,
    eps: float,
    scale: float,
    prologue: str,
    epilogue: str,
) -> Tensor:
    """Eager's own steps and roundings: rms_norm with its gain, one linear for each weight, SwiGLU, residual."""
    rms, steps = steps_of(prologue, epilogue)
    x = rms_norm(x, norm, eps) if rms else x
    if "bias" in steps and len(biases) != len(weights):
        raise FormatError(f"{len(weights)} weights with {len(biases)} biases")
    parts = [F.linear(x, w, biases[i] if "bias" in steps else None) for i, w in enumerate(weights)]
    if "swiglu" in steps:
        gate, up = parts if len(parts) == 2 else parts[0].chunk(2, -1)
        y = swiglu(gate, up)
    else:
        y = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
    return add_residual(_operand(residual, "residual"), y, scale) if "residual" in steps else y


def _linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    eps: float,
    scale: float,
    prologue: str,
    epilogue: str,
    gain: Tensor | None = None,
) -> Tensor:
    """The quantised reference for a dense float32 weight [N, K]."""
    rms, steps = steps_of(prologue, epilogue)
    check_gain(gain, weight.shape[1], rms)
    x32 = x.to(torch.float32)
    if gain is not None:
        row = (x32 * gain.to(torch.float32)).to(x.dtype).to(torch.float32) * rstd(x32, eps)
    else:
        row = normalized(x32, eps) if rms else x32
    return finish(F.linear(row, weight), steps, bias, residual, scale).to(x.dtype)


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
    """weight: [N, K] bf16 or f16."""
    full = dense(weight, (weight.shape, weight.storage_offset()), lambda: weight.detach().to(torch.float32))
    return _linear(x, full, bias, residual, eps, scale, prologue, epilogue)


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
    """packed: formats.pack_int4; its rows are interleaved gate/up rows when the epilogue has swiglu.

    Raises:
        FormatError: ``packed`` is not an [n, k] weight in this group size, or there is a gain and nothing to scale.
    """
    paired = "swiglu" in epilogue
    key = (n, k, group, paired, packed.storage_offset())
    full = dense(packed, key, lambda: dense_int4(packed, n, k, group, paired))
    return _linear(x, full, bias, residual, eps, scale, prologue, epilogue, gain)


def dense_int4(packed: Tensor, n: int, k: int, group: int, paired: bool) -> Tensor:
    """The [n, k] f32 weight of a packed tensor, gate rows before up rows when they were interleaved (``paired``)."""
    w = formats.dequantize_int4(formats.unpack_int4(packed, n, k, group))
    return w[formats.deinterleave_gate_up(n).to(w.device)] if paired else w


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
    """weight: [N, K] e4m3 with weight_scale: [N] f32; act: the state of this input, updated.

    ``scaling="none"``: the row stays as it is, ``act`` is not touched. Otherwise the normalised row is quantised.
    Quantising x as it stands, with rstd on the finished row, would let one massive token (quant.md: the sink) push all
    other rows into e4m3's subnormals: relative output error 0.19 against 0.037 with a sink 3000 times the rest.
    """
    rms, steps = steps_of(prologue, epilogue)
    full = dense(weight, (weight.shape, weight.storage_offset()), lambda: weight.detach().to(torch.float32))
    x32 = x.to(torch.float32)
    row = normalized(x32, eps) if rms else x32
    if scaling != "none":
        codes, step = formats.fp8_quantize(row, act, scaling)
        row = codes.to(torch.float32).mul_(step)
    y = F.linear(row, full).mul_(weight_scale)
    return finish(y, steps, bias, residual, scale).to(x.dtype)


def mlp_fp8(x: Tensor, *operands: Any) -> Tensor:
    """:func:`two_products` in float32; what lies between them is rounded to e4m3 alone."""
    return two_products(linear_fp8, x.to(torch.float32), *operands).to(x.dtype)


def inner_epilogue(bias: Tensor | None) -> str:
    """The epilogue of the first product of an MLP."""
    return "swiglu" if bias is None else "bias|swiglu"


def two_products(
    linear: Callable[..., Tensor],
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    act: Tensor,
    bias: Tensor | None,
    down: Tensor,
    down_scale: Tensor,
    down_act: Tensor,
    down_bias: Tensor | None,
    residual: Tensor | None,
    eps: float,
    scale: float,
    prologue: str,
    epilogue: str,
    scaling: str,
) -> Tensor:
    """``mlp_fp8`` as two calls of ``linear``, a linear_fp8; what lies between them is rounded to x's dtype."""
    inner = linear(x, weight, weight_scale, act, bias, None, eps, 1.0, prologue, inner_epilogue(bias), scaling)
    return linear(inner, down, down_scale, down_act, down_bias, residual, eps, scale, "", epilogue, scaling)


def packed_weight(
    packed: Tensor, precision: str, n: int, k: int, group: int, paired: bool, first: int, rows: int, dtype: torch.dtype
) -> Tensor:
    """packed: a block of fu_compile.packed -> [rows, k] in ``dtype``, new memory at every call."""
    return Rows(precision, n, k, group, paired, first, rows).dense(packed).to(dtype)


LAUNCH = {
    "packed_weight": packed_weight,
    "linear_exact": linear_exact,
    "linear_bf16": linear_bf16,
    "linear_fp8": linear_fp8,
    "mlp_fp8": mlp_fp8,
    "linear_int4": linear_int4,
}
