"""``linear_fp8`` on Hopper for decode: csrc/linear_fp8_sm90.cu, e4m3 weights and unquantised activations.

Takes calls with ``scaling="none"``: at decode the time goes into reading weights, so rounding the activations to e4m3
as well would cost accuracy and save nothing. More than 8 tokens run 8 at a time.
"""

from __future__ import annotations

import functools

import torch
from fu_compile.lowerings import decode_linear as common
from fu_compile.lowerings.decode_linear import SMEM, SMS, ceil_div
from torch import Tensor

from fu_compile import jit

WARPS = 8
SLOTS = 5
"""2 KB tiles in each warp's ring: 80 KB a block."""
TOKENS = (2, 8)
DELAY = 1000
"""Clocks between a block's start and its first request for weights (csrc/linear_int4_one_sm90.cu says why)."""


def smem(tokens: int, strips: int) -> int:
    """Bytes of shared memory: the sum at the top of the kernel."""
    return WARPS * (SLOTS * 2048 + strips * (128 if tokens <= 2 else 512) + 32)


@functools.cache
def kernel(n: int, k: int, tokens: int, half: bool, prologue: str, epilogue: str, sms: int = SMS) -> jit.Kernel:
    """The kernel for an [n, k] weight and at most ``tokens`` tokens; compiled at its first launch."""
    strips = ceil_div(n, 16)
    grid = min(sms, strips)
    share = ceil_div(strips, grid)
    most = (SMEM - smem(tokens, 0)) // (WARPS * (128 if tokens <= 2 else 512))
    per_pass = ceil_div(share, ceil_div(share, most))
    size = smem(tokens, per_pass)
    constants = {"N": n, "K": k, "TOKENS": tokens, "GRID": grid, "PASS": per_pass, "SLOTS": SLOTS, "DELAY": DELAY}
    constants |= {"SMEM": size} | common.flags(half, prologue, epilogue)
    return jit.Kernel("linear_fp8_sm90.cu", constants, "p" + common.SIGNATURE, jit.Shape(grid, WARPS * 32, size))


def accepts(
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
) -> str | None:
    """Why this call is not ours, or none."""
    if scaling != "none":
        return f"scaling={scaling!r}: the activations are to be quantised, which decode kernels do not do"
    n, k = weight.shape
    if weight.dtype != torch.float8_e4m3fn or not weight.is_contiguous() or k % 16:
        return "the weight is not a contiguous e4m3 matrix with a multiple of 16 columns"
    return common.refuses(x, n, k, bias, residual, prologue, epilogue)


def launch(
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
    """The operator ``linear_fp8`` with ``scaling="none"`` on the current CUDA stream."""
    n, k = weight.shape
    sms, half = common.multiprocessors(x.device.index), x.dtype == torch.float16

    def run(x: Tensor, residual: Tensor | None, y: Tensor | None) -> Tensor:
        bound = next(b for b in TOKENS if x.numel() // k <= b)
        made = kernel(n, k, bound, half, prologue, epilogue, sms)
        return common.launch(made, x, weight, n, k, bias, residual, eps, scale, epilogue, y, (weight_scale,))

    return common.in_parts(x, n, k, residual, epilogue, TOKENS[-1], run)
