"""What the CUDA decode linears share: which calls they take, their parameters, and the launch.

Not a lowering by itself: ``linear_int4_sm90`` and ``linear_fp8_sm90`` choose a configuration and launch through here.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from fu_compile import jit
from fu_compile.ops import EPILOGUE_ORDER

MAX_TOKENS = 64
"""Above this a prefill kernel (one that is bound by arithmetic) is the right one."""
SMEM = 115_712
"""Shared memory of one block, in bytes, such that two fit an SM: (228 KB - 2 x 1 KB) / 2. The next kernel's blocks then
fill their rings beside the running one (measured: 1.18 -> 1.35 ms a step without)."""
SMEM_MAX = 232_448
"""Shared memory that one block can have on Hopper: 227 KB."""
SMS = 132
"""Multiprocessors of an H100 or H200 SXM: what kernels are compiled for where no GPU is there to ask."""

SIGNATURE = "pppppiiiff"
"""x, weight, bias, residual, y, tokens, row stride of x, row stride of the residual, eps, scale"""

_ORDERED = {"|".join(c) for r in range(4) for c in itertools.combinations(EPILOGUE_ORDER, r)}


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


@functools.cache
def capability(device: int) -> tuple[int, int]:
    """Compute capability of the device with this ordinal; (0, 0) without a GPU."""
    return torch.cuda.get_device_capability(device) if torch.cuda.is_available() else (0, 0)


@functools.cache
def multiprocessors(device: int) -> int:
    """Of the device with this ordinal."""
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def one(device: torch.device) -> Tensor:
    """The number 1, f32, where a kernel wants a scale that the call does not have."""
    with torch.inference_mode(False):
        return torch.ones((), device=device)


@functools.cache
def unavailable(device: int) -> str | None:
    """Why no kernel of ours runs on the device with this ordinal, or none."""
    if capability(device) != (9, 0):
        return "written for Hopper (compute capability 9.0)"
    return jit.unavailable()


Reason = tuple[bool, Callable[[], str]]
"""Whether a call is refused for this, and the sentence that says so."""


def input_reasons(x: Tensor, k: int) -> tuple[Reason, ...]:
    """What is wrong with the activations of a 16-bit linear with k input features."""
    return (
        (x.dtype not in (torch.bfloat16, torch.float16), lambda: f"activations are {x.dtype}, not 16 bits"),
        (x.dim() == 0 or x.shape[-1] != k, lambda: f"the input has {x.shape[-1]} features, the weight {k}"),
    )


def operand_reasons(x: Tensor, columns: int, bias: Tensor | None, residual: Tensor | None) -> tuple[Reason, ...]:
    """What is wrong with the epilogue's operands beside an output of this many columns."""
    return (
        (bias is not None and bias.dtype != x.dtype, lambda: "the bias has another dtype than the activations"),
        (
            residual is not None and (residual.dtype != x.dtype or residual.shape != (*x.shape[:-1], columns)),
            lambda: "the residual does not look like the output",
        ),
    )


def columns_of(n: int, epilogue: str) -> int:
    """Columns of the output of a linear with n rows: SwiGLU makes one of two."""
    return n // 2 if "swiglu" in epilogue else n


def first_of(reasons: Iterable[Reason]) -> str | None:
    """The first reason that holds, or none."""
    return next((say() for wrong, say in reasons if wrong), None)


def refuses(
    x: Tensor, n: int, k: int, bias: Tensor | None, residual: Tensor | None, prologue: str, epilogue: str
) -> str | None:
    """Why no CUDA decode linear runs this call, or none. Works on fake tensors."""
    tokens = x.numel() // k if k else 0
    columns = columns_of(n, epilogue)
    reasons: tuple[Reason, ...] = (
        *input_reasons(x, k),
        (not 1 <= tokens <= MAX_TOKENS, lambda: f"{tokens} tokens; decode kernels take 1 to {MAX_TOKENS}"),
        (k % 8 != 0, lambda: f"{k} input features are not a multiple of 8 (16-byte loads)"),
        ("swiglu" in epilogue and columns % 8 != 0, lambda: f"{columns} gate rows are not a multiple of 8"),
        (prologue not in ("", "rms") or epilogue not in _ORDERED, lambda: f"unknown steps {prologue!r}, {epilogue!r}"),
        *operand_reasons(x, columns, bias, residual),
    )
    return first_of(reasons) or unavailable(x.device.index or 0)


def rows(t: Tensor, columns: int) -> tuple[Tensor, int]:
    """The tensor as rows that start on 16 bytes, ``stride`` elements apart; copied only if it is not that already."""
    if t.is_contiguous():
        return (t, columns) if t.data_ptr() % 16 == 0 else (t.clone(), columns)
    flat = t.reshape(-1, columns)
    if flat.stride(1) == 1 and flat.stride(0) % 8 == 0 and flat.data_ptr() % 16 == 0:
        return flat, flat.stride(0)
    return flat.contiguous(), columns


_finished: set[int] = set()
"""Addresses of weights that are known to be written: a kernel reads weights before it waits for the one before it."""


def _finish(weight: Tensor, device: int) -> None:
    if not torch.cuda.is_current_stream_capturing():
        torch.cuda.current_stream(device).synchronize()
        _finished.add(weight.data_ptr())


def launch(
    kernel: jit.Kernel,
    x: Tensor,
    weight: Tensor,
    n: int,
    k: int,
    bias: Tensor | None,
    residual: Tensor | None,
    eps: float,
    scale: float,
    epilogue: str,
    y: Tensor | None = None,
    scales: tuple[Tensor | None, ...] = (),
) -> Tensor:
    """Runs a kernel with SIGNATURE on the current stream; ``scales`` are the parameters between the weight and
    the bias.

    Returns:
        [..., N], or [..., N/2] with swiglu, in x's dtype; ``y`` when it is given.
    """
    columns = columns_of(n, epilogue)
    if y is None:
        y = x.new_empty((*x.shape[:-1], columns))
    x, ldx = rows(x, k)
    ldr = 0
    if "residual" in epilogue and residual is not None:
        residual, ldr = rows(residual, columns)
    device = y.device.index
    if weight.data_ptr() not in _finished:
        _finish(weight, device)
    kernel(
        device,
        torch.cuda.current_stream(device).cuda_stream,
        x.data_ptr(),
        weight.data_ptr(),
        *(None if s is None else s.data_ptr() for s in scales),
        bias.data_ptr() if bias is not None else None,
        residual.data_ptr() if residual is not None else None,
        y.data_ptr(),
        y.numel() // columns,
        ldx,
        ldr,
        eps,
        scale,
    )
    return y


def in_parts(
    x: Tensor,
    n: int,
    k: int,
    residual: Tensor | None,
    epilogue: str,
    most: int,
    run: Callable[[Tensor, Tensor | None, Tensor | None], Tensor],
) -> Tensor:
    """``run(x, residual, y)`` for at most ``most`` tokens at a time; with more, y is its part of the output.

    Returns:
        [..., N], or [..., N/2] with swiglu, in x's dtype.
    """
    tokens, columns = x.numel() // k, columns_of(n, epilogue)
    if tokens <= most:
        return run(x, residual, None)
    y = x.new_empty((*x.shape[:-1], columns))
    parts = [x.reshape(tokens, k).split(most), y.view(tokens, columns).split(most)]
    added = [None] * len(parts[0])
    if residual is not None and "residual" in epilogue:
        added = residual.reshape(tokens, columns).split(most)
    for part, out, more in zip(*parts, added, strict=True):
        run(part, more, out)
    return y


def flags(half: bool, prologue: str, epilogue: str) -> dict[str, int]:
    """The constants that every decode linear has."""
    steps = epilogue.split("|")
    return {
        "HALF": int(half),
        "RMS": int(prologue == "rms"),
        "BIAS": int("bias" in steps),
        "SWIGLU": int("swiglu" in steps),
        "RESIDUAL": int("residual" in steps),
    }
