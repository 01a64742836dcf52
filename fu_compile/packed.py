"""Where the rows of a projection stand in a packed block, and how to read them. Pure layout: no modules, no graphs.

A *block* is one [bytes] u8 tensor with the weights of projections that are read together, in the very form that the
kernels read, so nothing is packed again at run time:

::

    int4            formats.pack_int4 of the joined rows [q; k; v], or of one projection
    int4, paired    the same of [gate; up] in formats.interleave_gate_up order, for linears that end in SwiGLU
    fp8             N * K bytes of e4m3 codes, zeros up to a multiple of 16, then N float32 scales

Bytes, whatever the format: ``model.to(dtype)`` and a loader that casts floating tensors leave them alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from . import formats
from .errors import FormatError

PRECISIONS = ("int4", "fp8")
"""Of a block."""


@dataclass(frozen=True)
class Rows:
    """Rows ``first .. first + rows - 1`` of a packed block of ``n`` rows and ``k`` columns."""

    precision: str
    """``"int4"`` or ``"fp8"``"""
    n: int
    k: int
    group: int
    """Columns that share an INT4 scale; 0 for FP8."""
    paired: bool
    """Gate and up rows are interleaved in the packed order; row numbers here are those of [gate; up]."""
    first: int
    rows: int

    def check(self) -> None:
        """FormatError for numbers that describe no block."""
        sizes = min(self.n, self.k, self.rows, self.first + 1) > 0 and self.first + self.rows <= self.n
        groups = self.group in formats.GROUPS if self.precision == "int4" else self.group == 0 and not self.paired
        if self.precision not in PRECISIONS or not sizes or not groups or (self.paired and self.n % 2):
            raise FormatError(f"{self} describes no rows of a packed block")

    @property
    def bytes(self) -> int:
        """Bytes of the whole block."""
        if self.precision == "int4":
            return formats.int4_bytes(self.n, self.k, self.group)
        return _aligned(self.n * self.k) + 4 * self.n

    @property
    def whole(self) -> Rows:
        """All rows of the block."""
        return replace(self, first=0, rows=self.n)

    def joined(self, others: tuple[Rows, ...]) -> Rows | None:
        """These rows and the others as one run of the same block, or none where they are not one run."""
        end, total = self.first + self.rows, self.rows
        for other in others:
            if replace(other, first=0, rows=1) != replace(self, first=0, rows=1) or other.first != end:
                return None
            end, total = end + other.rows, total + other.rows
        return replace(self, rows=total)

    def refuses(self, swiglu: bool) -> str | None:
        """Why a kernel cannot read these rows as they stand, or none; ``swiglu``: the linear ends in SwiGLU."""
        if self.paired and (not swiglu or self.rows != self.n):
            return "gate and up rows are interleaved in this block, and this projection does not end in SwiGLU"
        if self.precision == "int4" and swiglu and not self.paired:
            return "gate and up rows are packed one after the other, and an INT4 SwiGLU reads them interleaved"
        if self.precision == "int4" and self.first % formats.TILE_N:
            return f"the rows start at {self.first}, inside a strip of {formats.TILE_N}"
        return None

    def operands(self, packed: Tensor) -> tuple[Tensor, ...]:
        """What ``linear_int4`` (packed) or ``linear_fp8`` (codes, scales) reads: views of the block, nothing is copied.

        FormatError for a block of another size.
        """
        self.verify(packed)
        if self.precision == "int4":
            if self.rows == self.n:
                return (packed,)
            strip = formats.int4_bytes(formats.TILE_N, self.k, self.group)
            start = self.first // formats.TILE_N * strip
            return (packed[start : start + formats.int4_bytes(self.rows, self.k, self.group)],)
        codes = packed[: self.n * self.k].view(torch.float8_e4m3fn).view(self.n, self.k)
        scales = packed[_aligned(self.n * self.k) :].view(torch.float32)
        if self.rows == self.n:
            return codes, scales
        here = slice(self.first, self.first + self.rows)
        return codes[here], scales[here]

    def dense(self, packed: Tensor) -> Tensor:
        """The rows dequantised: [rows, k] f32, exact (FP8: rounded once)."""
        if self.precision == "fp8":
            return formats.dequantize_fp8(*self.operands(packed))
        if self.paired or self.first % formats.TILE_N:
            self.verify(packed)
            w = formats.dequantize_int4(formats.unpack_int4(packed, self.n, self.k, self.group))
            here = slice(self.first, self.first + self.rows)
            return w[formats.deinterleave_gate_up(self.n).to(w.device)[here]] if self.paired else w[here]
        return formats.dequantize_int4(formats.unpack_int4(self.operands(packed)[0], self.rows, self.k, self.group))

    def verify(self, packed: Tensor) -> None:
        """FormatError unless ``packed`` has the bytes of this block."""
        if packed.dtype != torch.uint8 or packed.shape != (self.bytes,):
            raise FormatError(f"{self} lies in u8 [{self.bytes}]; this is {packed.dtype} {list(packed.shape)}")


def pack_codes(parts: list[formats.Int4Codes], paired: bool = False) -> Tensor:
    """An int4 block of these weights, rows joined in order. FormatError where their columns or groups differ."""
    first = parts[0]
    if any(p.codes.shape[1] != first.codes.shape[1] or p.group != first.group for p in parts):
        raise FormatError("projections of one block have the same columns and the same group size")
    codes, scales, zeros = (torch.cat([getattr(p, f) for p in parts]) for f in ("codes", "scales", "zeros"))
    if paired:
        order = formats.interleave_gate_up(codes.shape[0]).to(codes.device)
        codes, scales, zeros = codes[order], scales[order], zeros[order]
    return formats.pack_int4(formats.Int4Codes(codes, scales, zeros, first.group))


def pack_fp8(codes: Tensor, scales: Tensor) -> Tensor:
    """An fp8 block: codes [N, K] e4m3, scales [N] f32 -> [bytes] u8."""
    n, k = codes.shape
    packed = torch.zeros(_aligned(n * k) + 4 * n, dtype=torch.uint8, device=codes.device)
    packed[: n * k] = codes.contiguous().view(torch.uint8).view(-1)
    packed[_aligned(n * k) :] = scales.contiguous().view(torch.uint8)
    return packed


def _aligned(size: int) -> int:
    return -(-size // 16) * 16
