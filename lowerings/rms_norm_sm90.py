"""``rms_norm`` over the hidden states of a decode step on Hopper: csrc/rms_norm_sm90.cu, one launch.

Where it stands: in front of INT4 linears of a float16 model (``linear_int4`` takes the gain of a bfloat16 one). The
rounding is eager's; the sum of squares is taken in another order.
"""

from __future__ import annotations

import functools

import torch
from fu_compile.lowerings import decode_linear as common
from torch import Tensor

from fu_compile import jit

MIN, MAX = 512, 32768
"""Columns of a row. Below stand the norms per head, whose exact form must be eager's own to the bit."""


@functools.cache
def kernel(k: int, rows: int, half: bool) -> jit.Kernel:
    """The kernel for rows of k columns; compiled at its first launch."""
    return jit.Kernel("rms_norm_sm90.cu", {"K": k, "HALF": int(half)}, "pppif", jit.Shape(rows, 256, 0))


def accepts(x: Tensor, weight: Tensor | None, eps: float) -> str | None:
    """Why this call is not ours, or none."""
    k = x.shape[-1] if x.dim() else 0
    rows = x.numel() // max(k, 1)  # a symbol while a graph of any length is being described: then nothing is asked
    reasons: tuple[common.Reason, ...] = (
        (x.dtype not in (torch.bfloat16, torch.float16), lambda: f"activations are {x.dtype}, not 16 bits"),
        (not MIN <= k <= MAX or k % 8 != 0, lambda: f"{k} columns are not a multiple of 8 from {MIN} to {MAX}"),
        (
            isinstance(rows, int) and not 1 <= rows <= common.MAX_TOKENS,
            lambda: f"decode kernels take 1 to {common.MAX_TOKENS} rows",
        ),
        (weight is None or weight.dtype != x.dtype or weight.shape != (k,), lambda: "the gain does not fit the input"),
    )
    return common.first_of(reasons) or common.unavailable(x.device.index or 0)


def launch(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The operator ``rms_norm`` on the current CUDA stream."""
    k = x.shape[-1]
    y = x.new_empty(x.shape)
    rows, ldx = common.rows(x, k)
    gain, _ = common.rows(weight, k)
    device = y.device.index
    kernel(k, y.numel() // k, x.dtype == torch.float16)(
        device, torch.cuda.current_stream(device).cuda_stream, rows.data_ptr(), gain.data_ptr(), y.data_ptr(), ldx, eps
    )
    return y
