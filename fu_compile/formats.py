"""Number formats: what every byte of a packed tensor means. Each format has an encode, a decode and a picture.

====================  ==========================================  ====================================
format                encode                                      decode
====================  ==========================================  ====================================
INT4 weights          ``quantize_int4`` then ``pack_int4``        ``unpack_int4`` then ``dequantize_int4``
gate/up strips        ``interleave_gate_up``                      ``deinterleave_gate_up``
FP8 weights           ``quantize_fp8``                            ``dequantize_fp8``
FP8 activations       ``fp8_quantize`` (with a state)             ``codes.float() * scale``
block Hadamard        ``hadamard``                                ``hadamard`` (its own inverse)
INT4 cache, values    ``encode_rows``                             ``decode_rows``
INT4 cache, keys      ``encode_keys``                             ``decode_keys``
keys per channel      ``encode_key_pages``                        ``decode_key_pages``
====================  ==========================================  ====================================

The same index functions are C++ in ``csrc/layout.cuh``; ``tests/numerics/test_layout.py`` compares the two bit for bit.
Everything here runs on any device, without reading a value back to the host unless the docstring says so. What was
measured and why these formats were chosen: docs/numerics.md.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fu_compile.errors import FormatError, HeadDimError

GROUPS = (128, 64, 32)
"""Allowed group sizes of INT4 weights, in columns."""
TILE_N = 16
"""Output rows of one weight tile: the M of ``mma.m16n8k16``."""
TILE_K = 128
"""Input columns of one weight tile: eight k16 steps."""
NIBBLE_BYTES = TILE_N * TILE_K // 2
"""Bytes of codes in one weight tile: 1024."""
PAGE = 64
"""Tokens in one page of the INT4 cache."""
HADAMARD_CAP = 32
"""Largest Hadamard block: measured best at head_dim 64 (blocks of 16 / 32 / 64: +1.55 / +1.11 / +1.17 ppl)."""

_F16_MAX = 65504.0
_F16_TINY = 2.0**-14  # smallest normal float16
_F16_STEP = 2.0**24  # 1 / the spacing of subnormal float16
_PAD_ZERO = 8  # zero point (and code) of groups that exist only as padding
_ROWS_AT_ONCE = 1 << 22  # weights quantised at a time, so that float32 temporaries stay below 100 MB


# ---- INT4 weights ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Int4Codes:
    """An INT4 weight before packing: ``w[n, k] = scales[n, k // group] * (codes[n, k] - zeros[n, k // group])``.

    ::

        K = 288, group = 128     |<---- group 0 ---->|<---- group 1 ---->|<-32->|     the last group may be ragged
        row n of codes           q q q q ... q q q q | q q q q ... q q q | q..q |     0..15
        row n of scales, zeros         s0, z0        |      s1, z1       | s2,z2|     f16 (any sign), 0..15
    """

    codes: Tensor
    """[N, K] u8, 0..15"""
    scales: Tensor
    """[N, G] f16, G = ceil(K / group); may be negative"""
    zeros: Tensor
    """[N, G] u8, 0..15"""
    group: int
    """columns that share a scale: 128, 64 or 32"""


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def _check_group(group: int) -> None:
    if group not in GROUPS:
        raise FormatError(f"INT4 group size {group}; there are {', '.join(map(str, GROUPS))}")


def _to_f16_scale(scale: Tensor) -> Tensor:
    """Rounds scales to float16, subnormal ones away from zero.

    To nearest, a subnormal scale can lose up to all of its magnitude, and the codes of its group would be clipped by as
    much. Rounded away from zero nothing is clipped, and only an all-zero group has the scale 0.
    """
    up = torch.sign(scale) * torch.ceil(scale.abs() * _F16_STEP) / _F16_STEP
    return torch.where(scale.abs() < _F16_TINY, up, scale).to(torch.float16)


def divide(x: Tensor, number: float) -> Tensor:
    """``x / number``, correctly rounded on every device: CUDA multiplies by the reciprocal of a Python number, which is
    another last bit in half of all cases."""
    return x / x.new_full((), number)


def _extreme(x: Tensor) -> Tensor:
    """The value of largest magnitude along the last dimension (the negative one of a tie; NaN if there is one)."""
    low, high = torch.aminmax(x, dim=-1)
    return torch.where(-low >= high, low, torch.where(torch.isnan(low), low, high))


def _quantize_groups(w: Tensor, grid: str) -> tuple[Tensor, Tensor, Tensor]:
    """w: [..., group] f32 -> codes (f32 integers) like w, scales [...] f16, zeros [...] f32 integers."""
    if grid == "sym8":
        scales = _to_f16_scale(_extreme(w) / -8.0)
        zeros = torch.full_like(scales, 8.0, dtype=torch.float32)
    else:
        low, high = torch.aminmax(w, dim=-1)
        low, high = low.clamp(max=0.0), high.clamp(min=0.0)  # zero is on the grid, so padding and pruning stay exact
        scales = _to_f16_scale(divide(high, 15.0) - divide(low, 15.0))
        zeros = torch.round(-low / _divisor(scales)).clamp_(0.0, 15.0)
    codes = torch.round(w / _divisor(scales)[..., None]).add_(zeros[..., None]).clamp_(0.0, 15.0)
    return codes, scales, zeros


def _divisor(scales: Tensor) -> Tensor:
    """float32 scales with 1 in the place of 0: an all-zero group then gives zero codes, not 0/0."""
    s = scales.float()
    return torch.where(s == 0.0, 1.0, s)


def quantize_int4(weight: Tensor, group: int = 128, grid: str = "sym8") -> Int4Codes:
    """Rounds a weight to the nearest point of a 16-level grid per group of columns.

    ::

        sym8   scale = -extreme / 8, zero = 8     extreme < 0:  -8s ... 0 ... 7s     extreme > 0:  -7|s| ... 0 ... 8|s|
        asym   scale = (max - min) / 15, zero = round(-min / scale)     the range always includes 0

    With sym8 the value of largest magnitude has the code 0, so all 16 levels are in use whatever its sign (the rule
    of ggml's Q4_0).

    Args:
        weight: [N, K], any floating dtype, any device; read as float32.
        group: columns that share a scale: 128, 64 or 32. The last group may be ragged.
        grid: ``"sym8"`` or ``"asym"``.

    Returns:
        Int4Codes. Half a step of error at most (asym: one step at the ends of the range); exact zeros stay zeros; a
        group whose scale is subnormal in float16 keeps half a step of 2^-24 or more.

    Raises:
        FormatError: a group size or grid that does not exist, a weight that is not two-dimensional or not finite
            (names the row; reads the device), a scale beyond float16.
    """
    _check_group(group)
    if grid not in ("sym8", "asym"):
        raise FormatError(f"INT4 grid {grid!r}; there are 'sym8' and 'asym'")
    if weight.dim() != 2 or not weight.is_floating_point():
        raise FormatError(f"an INT4 weight is a floating [N, K] matrix; this is {weight.dtype} {tuple(weight.shape)}")
    n, k = weight.shape
    groups = _ceil(k, group)
    codes = torch.empty((n, k), dtype=torch.uint8, device=weight.device)
    scales = torch.empty((n, groups), dtype=torch.float16, device=weight.device)
    zeros = torch.empty((n, groups), dtype=torch.uint8, device=weight.device)
    step = max(1, _ROWS_AT_ONCE // max(k, 1))
    for first in range(0, n, step):
        rows = slice(first, min(first + step, n))
        w = weight[rows].detach().to(torch.float32)
        _check_finite(w, first)
        w = torch.nn.functional.pad(w, (0, groups * group - k)).view(w.shape[0], groups, group)
        q, s, z = _quantize_groups(w, grid)
        if not bool(torch.isfinite(s).all()):
            row = first + int((~torch.isfinite(s)).any(-1).nonzero()[0])
            raise FormatError(f"row {row} of the weight needs an INT4 scale beyond float16 (magnitudes over 5e5)")
        codes[rows] = q.reshape(w.shape[0], -1)[:, :k].to(torch.uint8)
        scales[rows] = s
        zeros[rows] = z.to(torch.uint8)
    return Int4Codes(codes, scales, zeros, group)


def _check_finite(w: Tensor, first_row: int) -> None:
    bad = ~torch.isfinite(w).all(dim=-1)
    if bool(bad.any()):
        raise FormatError(f"row {first_row + int(bad.nonzero()[0])} of the weight is not finite (NaN or infinity)")


def dequantize_int4(q: Int4Codes) -> Tensor:
    """The weight that the codes stand for: [N, K] f32, exact (a 5-bit integer times an 11-bit scale)."""
    k = q.codes.shape[1]
    zeros = q.zeros.float().repeat_interleave(q.group, 1)[:, :k]
    scales = q.scales.float().repeat_interleave(q.group, 1)[:, :k]
    return q.codes.float().sub_(zeros).mul_(scales)


def int4_tile_bytes(group: int) -> int:
    """Bytes of one 16 x 128 tile record: 1072, 1120 or 1216 for groups of 128, 64 or 32 (multiples of 16)."""
    _check_group(group)
    return NIBBLE_BYTES + (TILE_K // group) * TILE_N * 3


def int4_bytes(n: int, k: int, group: int) -> int:
    """Bytes of a packed [n, k] weight: tile records of ``ceil(n / 16)`` strips by ``ceil(k / 128)`` tiles."""
    return _ceil(n, TILE_N) * _ceil(k, TILE_K) * int4_tile_bytes(group)


def pack_int4(q: Int4Codes) -> Tensor:
    """Stores codes in the order in which ``mma.m16n8k16`` wants its A operand.

    ::

        packed     strip 0 (rows 0..15):  tile 0 (columns 0..127) | tile 1 | ...   then strip 1, ...
        tile       1024 B codes | 128/group x 16 f16 scales | 128/group x 16 u8 zeros, times 8
        codes      512 B: vector 0 of lanes 0..31 (16 B each) | 512 B: vector 1 of lanes 0..31
        vector v   four 32-bit words: the A fragments of steps 4v .. 4v+3; steps 2c and 2c+1 cover columns 32c .. 32c+31
        word       bits 31      28      24      20      16      12       8       4       0
                      |   a7   |   a3   |   a5   |   a1   |   a6   |   a2   |   a4   |   a0   |

        lane l = 4g + t     a0 a1: row g,     columns b, b+1            a4 a5: row g,     columns b+2, b+3
        b = 32c + 8t + 4j   a2 a3: row g + 8, columns b, b+1            a6 a7: row g + 8, columns b+2, b+3
        scales, zeros       of rows 0, 8, 1, 9, ... 7, 15 (what one lane needs stands together), group after group
        zero                8 z: the low byte of 128 + z in float16

    Nibbles i and i + 4 are the halves of fragment register 0, 2, 1, 3 for i = 0, 1, 2, 3: a mask alone leaves registers
    0 and 2 (times 16) of ``word``, 1 and 3 of ``word >> 8``, as subnormal 16-bit floats (csrc/int4.cuh).
    The columns of step 2c + j are chosen so that the other operand of a lane (one token, steps 2c and 2c+1) is 16
    contiguous bytes of 16-bit activations: 32c + 8t .. 32c + 8t + 7. Any order will do, as long as both agree.
    Rows and columns are padded to whole tiles; padding decodes to 0 (inside a ragged group its code is the zero point,
    elsewhere the scale is 0) and no decode returns it.

    Returns:
        [int4_bytes(N, K, group)] u8 on the device of the codes.

    Raises:
        FormatError: codes, scales and zeros whose shapes or dtypes do not belong together.
    """
    n, k = q.codes.shape
    group, groups = q.group, _ceil(k, q.group)
    size = int4_tile_bytes(group)
    if q.scales.shape != (n, groups) or q.zeros.shape != (n, groups):
        raise FormatError(
            f"codes {n} x {k} in groups of {group} need scales and zeros {n} x {groups};"
            f" these are {tuple(q.scales.shape)} and {tuple(q.zeros.shape)}"
        )
    if (q.codes.dtype, q.scales.dtype, q.zeros.dtype) != (torch.uint8, torch.float16, torch.uint8):
        raise FormatError(f"Int4Codes are u8, f16, u8; these are {q.codes.dtype}, {q.scales.dtype}, {q.zeros.dtype}")
    strips, tiles, per_tile = _ceil(n, TILE_N), _ceil(k, TILE_K), TILE_K // group
    rows, all_groups, dev = strips * TILE_N, tiles * per_tile, q.codes.device

    zeros = torch.full((rows, all_groups), _PAD_ZERO, dtype=torch.uint8, device=dev)
    zeros[:n, :groups] = q.zeros
    scales = torch.zeros((rows, all_groups), dtype=torch.float16, device=dev)
    scales[:n, :groups] = q.scales
    codes = zeros.repeat_interleave(group, 1)
    codes[:n, :k] = q.codes

    # [strip, h8, g, tile, v, c, t, j, c2, e] -> [strip, tile, v, g, t, c, j, e, h8, c2]: nibble = 4 e + 2 h8 + c2
    nibbles = codes.view(strips, 2, 8, tiles, 2, 2, 4, 2, 2, 2).permute(0, 3, 4, 2, 6, 5, 7, 9, 1, 8)
    packed = torch.empty((strips, tiles, size), dtype=torch.uint8, device=dev)
    packed[..., :NIBBLE_BYTES] = (nibbles[..., 0] | (nibbles[..., 1] << 4)).reshape(strips, tiles, NIBBLE_BYTES)
    split = NIBBLE_BYTES + 2 * TILE_N * per_tile
    s = scales.view(strips, 2, 8, tiles, per_tile).permute(0, 3, 4, 2, 1).contiguous()
    packed[..., NIBBLE_BYTES:split] = s.view(torch.uint8).reshape(strips, tiles, -1)
    z = (zeros << 3).view(strips, 2, 8, tiles, per_tile).permute(0, 3, 4, 2, 1)
    packed[..., split:] = z.reshape(strips, tiles, -1)
    return packed.view(-1)


def unpack_int4(packed: Tensor, n: int, k: int, group: int) -> Int4Codes:
    """The inverse of :func:`pack_int4` without the padding.

    Args:
        packed: [int4_bytes(n, k, group)] u8.
        n: output rows.
        k: input columns.
        group: columns that share a scale.

    Raises:
        FormatError: ``packed`` has another size or dtype.
    """
    size = int4_tile_bytes(group)
    if packed.dtype != torch.uint8 or packed.numel() != int4_bytes(n, k, group):
        raise FormatError(
            f"a packed {n} x {k} INT4 weight in groups of {group} is u8 [{int4_bytes(n, k, group)}];"
            f" this is {packed.dtype} {list(packed.shape)}"
        )
    strips, tiles, per_tile = _ceil(n, TILE_N), _ceil(k, TILE_K), TILE_K // group
    rows, groups = strips * TILE_N, _ceil(k, group)
    records = packed.view(strips, tiles, size)
    b = records[..., :NIBBLE_BYTES].reshape(strips, tiles, 2, 8, 4, 2, 2, 2, 2)  # [strip, tile, v, g, t, c, j, e, h8]
    nibbles = torch.stack((b & 15, b >> 4), -1).permute(0, 8, 3, 1, 2, 5, 4, 6, 9, 7)
    split = NIBBLE_BYTES + 2 * TILE_N * per_tile
    s = records[..., NIBBLE_BYTES:split].contiguous().view(torch.float16).view(strips, tiles, per_tile, 8, 2)
    z = records[..., split:].reshape(strips, tiles, per_tile, 8, 2) >> 3
    return Int4Codes(
        nibbles.reshape(rows, tiles * TILE_K)[:n, :k].contiguous(),
        s.permute(0, 4, 3, 1, 2).reshape(rows, -1)[:n, :groups].contiguous(),
        z.permute(0, 4, 3, 1, 2).reshape(rows, -1)[:n, :groups].contiguous(),
        group,
    )


def interleave_gate_up(n: int) -> Tensor:
    """Row order in which one lane of a fragment holds a gate row and its up row (rows g and g + 8 of a strip).

    ::

        source    gate 0 .. h-1, up 0 .. h-1     (h = n / 2; the rows of [gate; up])
        strip s   gate 8s .. 8s+7, up 8s .. 8s+7
        last      r = h % 8 rows left:  gate h-r .. h-1, up h-r .. h-1   (r rows apart, not 8)

    Returns:
        [n] int64: ``weight[interleave_gate_up(n)]`` is what is packed, and row p of it is row ``result[p]`` of the
        source.

    Raises:
        FormatError: n is odd.
    """
    if n % 2:
        raise FormatError(f"gate and up projections have equally many rows; {n} rows cannot be halved")
    half, whole = n // 2, n // 2 // 8 * 8
    gate = torch.arange(half)
    blocks = torch.stack((gate[:whole].view(-1, 8), gate[:whole].view(-1, 8) + half), 1).reshape(-1)
    return torch.cat((blocks, gate[whole:], gate[whole:] + half))


def deinterleave_gate_up(n: int) -> Tensor:
    """[n] int64, the inverse: ``packed_rows[deinterleave_gate_up(n)]`` is [gate; up] again (FormatError: n is odd)."""
    return torch.argsort(interleave_gate_up(n))


# ---- FP8 weights -----------------------------------------------------------------------------------------------------

E4M3_MAX = 448.0
"""Largest finite ``float8_e4m3fn``; beyond it there is no infinity, only NaN."""


FP8_FRACTIONS = 8
"""Scales per octave that are tried for each row of an FP8 weight: 12 % less squared error than the first alone, 16 give
14 % (normal random weights)."""
_FP8_CHUNK = 1 << 18
"""Weights searched at a time on a CPU: the temporaries stay in its cache."""


def quantize_fp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 with one scale per output channel.

    ::

        weight row n    w w w ... w      ->   e4m3 row n   w / scale[n]
        scale[n]        max |w| / 448 * 2^(i/8), i = 0 .. 7: the one with the least squared error   (1 for zeros)

    Where a row falls between the steps of e4m3 is decided by the scale's mantissa; its exponent only matters to values
    under the subnormal step.

    Args:
        weight: [N, K], any floating dtype.

    Returns:
        [N, K] e4m3 and [N] f32; ``w = codes * scale[:, None]``, within 2^-4 of each weight relatively (normal codes).

    Raises:
        FormatError: not a floating matrix, or a row that is not finite (reads the device).
    """
    if weight.dim() != 2 or not weight.is_floating_point():
        raise FormatError(f"an FP8 weight is a floating [N, K] matrix; this is {weight.dtype} {tuple(weight.shape)}")
    w = weight.detach().to(torch.float32)
    _check_finite(w, 0)
    codes = torch.empty(w.shape, dtype=torch.float8_e4m3fn, device=w.device)
    scales = torch.empty(w.shape[0], dtype=torch.float32, device=w.device)
    step = max(1, _FP8_CHUNK // max(w.shape[1], 1)) if w.device.type == "cpu" else max(1, w.shape[0])
    for first in range(0, w.shape[0], step):
        rows = w[first : first + step]
        amax = rows.abs().amax(-1)
        # The smallest normal float32 keeps the division finite for rows of denormals, which decode to 0 or close to it.
        full = torch.where(amax == 0.0, 1.0, divide(amax, E4M3_MAX).clamp_(min=torch.finfo(torch.float32).tiny))
        best, scale = torch.full_like(full, torch.inf), full
        for i in range(FP8_FRACTIONS):
            tried = full * 2.0 ** (i / FP8_FRACTIONS)
            x = rows / tried[:, None]
            # In units of the first scale: squares of a row of tiny weights would vanish.
            error = x.to(torch.float8_e4m3fn).to(torch.float32).sub_(x).square_().sum(-1) * 4.0 ** (i / FP8_FRACTIONS)
            better = error < best
            best, scale = torch.where(better, error, best), torch.where(better, tried, scale)
        here = slice(first, first + rows.shape[0])
        # A maximum over a rounded scale may be a little more than 448.
        codes[here] = (rows / scale[:, None]).clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
        scales[here] = scale
    return codes, scales


def dequantize_fp8(codes: Tensor, scale: Tensor) -> Tensor:
    """codes: [N, K] e4m3, scale: [N] f32 -> [N, K] f32."""
    return codes.float().mul_(scale[:, None])


# ---- FP8 activations: delayed scaling with powers of two -------------------------------------------------------------

FP8_HISTORY = 16
"""Calls whose largest magnitudes decide the scale of the next."""
FP8_STATE = 24
"""Length of the f32 state vector of one linear's input."""
FP8_SLOTS: dict[str, int] = {"scale": 16, "calls": 17, "saturations": 18, "frozen": 19, "non_finite": 20}
"""Where the scalars stand in the state vector; 0..15 is the history of amaxes, 21..23 are unused."""
FP8_SCALINGS = ("delayed", "static", "dynamic", "row")


def fp8_state(device: torch.device | str | None = None) -> Tensor:
    """A fresh state: no call seen.

    ::

        0 ........ 15                | 16    | 17    | 18          | 19     | 20         | 21 22 23
        amax history, newest first   | scale | calls | saturations | frozen | non_finite | unused      all f32

    An empty place of the history is 0. ``scale`` is the scale of the last call, or the frozen one. Counts are exact up
    to 2^24.

    Returns:
        [FP8_STATE] f32 zeros.
    """
    # A state that was born in inference mode could not be updated by a call outside it.
    with torch.inference_mode(False):
        return torch.zeros(FP8_STATE, dtype=torch.float32, device=device)


def _power_of_two(amax: Tensor, headroom: float) -> Tensor:
    """amax: f32 >= 0 -> the smallest normal 2^k with ``amax * headroom <= 448 * 2^k``; 1 where that is 0."""
    bits = (amax * (headroom / E4M3_MAX)).view(torch.int32)
    up = torch.bitwise_and(bits + 0x007FFFFF, -0x00800000).view(torch.float32)  # carries unless the mantissa is 0
    return torch.where(up == 0.0, 1.0, up)


_fp8_observer: Callable[[Tensor, Tensor], None] | None = None


@contextmanager
def fp8_observed(see: Callable[[Tensor, Tensor], None]) -> Iterator[None]:
    """Inside, ``see(x32, state)`` is called with every input of :func:`fp8_quantize`, before it is quantised."""
    global _fp8_observer
    before, _fp8_observer = _fp8_observer, see
    try:
        yield
    finally:
        _fp8_observer = before


def fp8_is_observed() -> bool:
    """Whether every input has to pass :func:`fp8_quantize`: then kernels that quantise by themselves are not for it."""
    return _fp8_observer is not None


def fp8_quantize(x: Tensor, state: Tensor, scaling: str = "delayed") -> tuple[Tensor, Tensor]:
    """Quantises an activation to e4m3 with one scale (a power of two, unless frozen) or one per row; updates the state.

    ::

        delayed   scale = 2^k, the smallest with 2 * max(history) <= 448 * 2^k      (2x headroom)
                  history empty or all zeros: this call is measured first and then quantised
        static    scale = the frozen one (fp8_freeze); before that as delayed, so calls calibrate
        dynamic   scale = 2^k, the smallest with amax <= 448 * 2^k of this call
        row       one scale per row (token): amax of the row / 448, 1 for zeros; nothing can saturate
        always    amax of this call > 448 * scale:  saturations += 1, and this call uses the scale of its own amax with
                  2x headroom, so that nothing is ever clipped (a clipped massive activation destroys the answer)

    A power of two moves only the exponent: whatever the history, a value rounds to the same number unless it falls
    under the subnormal step (scale * 2^-9).

    Non-finite elements become NaN and are counted by call; history and scale see the finite ones only. On an
    accelerator nothing is read back to the host.

    Args:
        x: any shape, floating.
        state: [FP8_STATE] f32, on the device of x.
        scaling: ``"delayed"``, ``"static"``, ``"dynamic"`` or ``"row"``.

    Returns:
        e4m3 like x, and the scale: f32, a scalar or (``"row"``) [..., 1]; ``x ~ codes.float() * scale``.

    Raises:
        FormatError: a scaling that does not exist, or a state of another shape or dtype.
    """
    if scaling not in FP8_SCALINGS:
        raise FormatError(f"FP8 scaling {scaling!r}; there are {', '.join(FP8_SCALINGS)}")
    if state.shape != (FP8_STATE,) or state.dtype != torch.float32:
        raise FormatError(f"an FP8 state is f32 [{FP8_STATE}]; this is {state.dtype} {list(state.shape)}")
    x32 = x.detach().to(torch.float32)
    if _fp8_observer is not None:
        _fp8_observer(x32, state)
    if x.numel() == 0:
        return x32.to(torch.float8_e4m3fn), state.new_ones(() if scaling != "row" else (*x.shape[:-1], 1))
    if scaling == "row":
        return _fp8_rows(x32, state)
    if state.device.type == "cpu":
        return _fp8_on_host(x32, state, scaling)
    return _fp8_on_device(x32, state, scaling)


def _fp8_rule(scaling: str, amax: Any, seen: Any, before: Any, frozen: Any, power: Any, where: Any) -> Any:
    """(scale of this call, scale to record, saturated?), for numbers or tensors; seen: largest amax of the history."""
    if scaling == "dynamic":
        scale = power(amax, 1.0)
        return scale, scale, amax < 0.0
    planned = power(where(seen > 0.0, seen, amax), 2.0)
    if scaling == "static":
        planned = where(frozen > 0.0, before, planned)
    saturated = amax > planned * E4M3_MAX
    scale = where(saturated, power(amax, 2.0), planned)
    # A frozen scale outlives a saturated call; a delayed one is only a record of the call.
    return scale, where(frozen > 0.0, before, scale), saturated


def _fp8_on_device(x32: Tensor, state: Tensor, scaling: str) -> tuple[Tensor, Tensor]:
    """Without reading anything back: some thirty small kernels."""
    magnitude = x32.abs()
    bad = ~(magnitude.amax() < float("inf"))
    amax = magnitude.nan_to_num_(0.0, 0.0, 0.0).amax()
    history = state[:FP8_HISTORY]
    before, calls, saturations, frozen, non_finite = state[FP8_HISTORY : FP8_HISTORY + len(FP8_SLOTS)].unbind()
    rule = _fp8_rule(scaling, amax, history.amax(), before, frozen, _power_of_two, torch.where)
    scale, record, saturated = rule
    scalars = torch.stack((record, calls + 1.0, saturations + saturated, frozen, non_finite + bad))
    state[: FP8_HISTORY + len(FP8_SLOTS)] = torch.cat((amax.view(1), history[:-1], scalars))
    q = x32 / scale
    # An infinity must not be saturated to 448 by the conversion: 0 * inf makes it NaN and leaves finite values alone.
    return (q + q * 0.0).to(torch.float8_e4m3fn), scale


def _fp8_on_host(x32: Tensor, state: Tensor, scaling: str) -> tuple[Tensor, Tensor]:
    """On a CPU reading back is free, and numbers are six times faster than scalar tensors; the same bits."""
    magnitude = x32.abs()
    amax = float(magnitude.amax())
    bad = not amax < float("inf")
    if bad:
        amax = float(magnitude.nan_to_num_(0.0, 0.0, 0.0).amax())
    values = state.tolist()
    history = values[:FP8_HISTORY]
    before, calls, saturations, frozen, non_finite = values[FP8_HISTORY : FP8_HISTORY + len(FP8_SLOTS)]
    rule = _fp8_rule(scaling, amax, max(history), before, frozen, _power_of_two_number, _where_number)
    scale, record, saturated = rule
    scalars = [record, calls + 1.0, saturations + saturated, frozen, non_finite + bad]
    state.copy_(torch.tensor([amax, *history[:-1], *scalars, *values[FP8_HISTORY + len(FP8_SLOTS) :]]))
    q = x32 / scale
    return (q + q * 0.0 if bad else q).to(torch.float8_e4m3fn), torch.tensor(scale)


def _fp8_rows(x32: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """One scale per row, on any device; the state keeps the history, the counts, and the largest scale."""
    magnitude = x32.abs()
    bad = ~(magnitude.amax() < float("inf"))
    amax = magnitude.nan_to_num_(0.0, 0.0, 0.0).amax(-1, keepdim=True)
    scale = torch.where(amax == 0.0, 1.0, divide(amax, E4M3_MAX).clamp_(min=torch.finfo(torch.float32).tiny))
    history, counts = state[:FP8_HISTORY], state[FP8_SLOTS["calls"] : FP8_HISTORY + len(FP8_SLOTS)].clone()
    counts[0] += 1.0
    counts[-1] += bad
    frozen = counts[FP8_SLOTS["frozen"] - FP8_SLOTS["calls"]]
    record = torch.where(frozen > 0.0, state[FP8_SLOTS["scale"]], scale.amax())
    state[: FP8_HISTORY + len(FP8_SLOTS)] = torch.cat((amax.amax().view(1), history[:-1], record.view(1), counts))
    q = (x32 / scale).clamp(-E4M3_MAX, E4M3_MAX)  # keeps NaN; an infinity becomes NaN below
    return (q + (x32 - x32)).to(torch.float8_e4m3fn), scale


def _where_number(condition: bool, a: float, b: float) -> float:
    return a if condition else b


def _power_of_two_number(amax: float, headroom: float) -> float:
    """:func:`_power_of_two` for one number, with the same float32 rounding of the product."""
    mantissa, exponent = math.frexp(np.float32(amax) * np.float32(headroom / E4M3_MAX))
    return 1.0 if mantissa == 0.0 else 2.0 ** max(exponent - (mantissa == 0.5), -126)


def fp8_freeze(state: Tensor, scale: float | None = None) -> None:
    """Fixes the scale that ``"static"`` uses (reads the device).

    Args:
        state: [FP8_STATE] f32.
        scale: any that holds the largest amax in the history; none: the power of two with 2x headroom over it.

    Raises:
        FormatError: no call with a non-zero input was seen yet, or the scale does not hold it.
    """
    seen = state[:FP8_HISTORY].amax()
    if not float(seen) > 0.0:
        raise FormatError("there is nothing to freeze: this FP8 state has not seen a non-zero input yet")
    # 1.0001: a scale of exactly seen / 448 may be rounded down.
    if scale is not None and not float(seen) <= scale * E4M3_MAX * 1.0001 < float("inf"):
        raise FormatError(f"the FP8 scale {scale:g} does not hold inputs of up to {float(seen):g}")
    state[FP8_SLOTS["scale"]] = _power_of_two(seen, 2.0) if scale is None else scale
    state[FP8_SLOTS["frozen"]] = 1.0


def fp8_counters(state: Tensor) -> dict[str, float]:
    """What the report prints: calls, saturations, non_finite, frozen, scale and the amax of the history, as numbers."""
    values = state.tolist()
    return {name: values[at] for name, at in FP8_SLOTS.items()} | {"amax": max(values[:FP8_HISTORY])}


# ---- Hadamard rotation -----------------------------------------------------------------------------------------------


def hadamard_block(head_dim: int) -> int:
    """The block of the rotation: the largest power of two that divides head_dim, 32 at most.

    Raises:
        HeadDimError: head_dim is odd (or not positive): nothing to rotate, and nibbles could not be paired.
    """
    if head_dim < 2 or head_dim % 2:
        raise HeadDimError(f"head_dim {head_dim} is odd; the INT4 cache needs an even head_dim")
    return min(head_dim & -head_dim, HADAMARD_CAP)


@functools.cache
def _hadamard_matrix(block: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    with torch.inference_mode(False):
        h = torch.ones((1, 1), dtype=torch.float64)
        while h.shape[0] < block:
            h = torch.cat((torch.cat((h, h), 1), torch.cat((h, -h), 1)), 0)
        return (h * block**-0.5).to(dtype).to(device)


def hadamard(x: Tensor, block: int) -> Tensor:
    """Rotates each run of ``block`` columns by the orthonormal Hadamard matrix; symmetric, so its own inverse.

    ::

        D = 96, block = 32     | H32 | H32 | H32 |      H2 = 1/sqrt(2) [[1, 1], [1, -1]],   H2n = H2 (x) Hn  (Sylvester)

    Args:
        x: [..., D] floating. float64 stays float64, everything else is computed in float32.
        block: a power of two that divides D.

    Returns:
        Like x.

    Raises:
        HeadDimError: ``block`` is not a power of two or does not divide D.
    """
    if block < 1 or block & (block - 1) or x.shape[-1] % block:
        raise HeadDimError(f"a Hadamard block of {block} does not fit head_dim {x.shape[-1]}")
    work = torch.float64 if x.dtype == torch.float64 else torch.float32
    h = _hadamard_matrix(block, x.device, work)
    return (x.to(work).unflatten(-1, (-1, block)) @ h).flatten(-2).to(x.dtype)


# ---- INT4 cache rows -------------------------------------------------------------------------------------------------


def _chunked(head_dim: int) -> bool:
    return head_dim % 8 == 0


def encode_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """sym8 with one signed f16 scale per row, in the order of the quad lanes.

    ::

        byte       columns c (low nibble), c + 1 (high nibble), c even
        row        chunk 0        | chunk 1        | chunk 2        | chunk 3          head_dim / 8 bytes each
        chunk t    columns 2t, 2t+1, then 8 + 2t, 8 + 2t+1, then 16 + 2t, ...:         what lane t of a quad owns

    A head_dim that is even but not a multiple of 8 is stored in natural order. ``x ~ scale * (code - 8)``; the value of
    largest magnitude has the code 0. Magnitudes over 5e5 saturate (this runs inside graphs and cannot raise); a row
    with a non-finite value gets the scale NaN and decodes to NaN.

    Args:
        x: [..., D] floating, D even; read as float32.

    Returns:
        codes [..., D/2] u8 and scales [...] f16.

    Raises:
        HeadDimError: D is odd.
    """
    head_dim = x.shape[-1]
    hadamard_block(head_dim)
    x = x.detach().to(torch.float32)
    extreme = _extreme(x)
    scales = _to_f16_scale((extreme / -8.0).clamp_(-_F16_MAX, _F16_MAX))
    scales = torch.where(torch.isfinite(extreme), scales, float("nan"))
    q = torch.round(x / _divisor(scales)[..., None]).add_(8.0).nan_to_num_(8.0).clamp_(0.0, 15.0)
    return _pack_nibbles(q), scales


def decode_rows(codes: Tensor, scales: Tensor) -> Tensor:
    """codes: [..., D/2] u8, scales: [...] f16 -> [..., D] f32, the inverse order of :func:`encode_rows`."""
    return _unpack_nibbles(codes).sub_(8.0).mul_(scales.float()[..., None])


def _pack_nibbles(q: Tensor) -> Tensor:
    """[..., D] numbers 0..15 -> [..., D/2] u8 in the order of :func:`encode_rows`."""
    head_dim = q.shape[-1]
    q = q.to(torch.uint8)
    if _chunked(head_dim):
        q = q.unflatten(-1, (head_dim // 8, 4, 2)).transpose(-3, -2)
    else:
        q = q.unflatten(-1, (head_dim // 2, 2))
    low, high = q.unbind(-1)
    return (low | (high << 4)).reshape(*low.shape[: low.dim() - (2 if _chunked(head_dim) else 1)], head_dim // 2)


def _unpack_nibbles(codes: Tensor) -> Tensor:
    """The inverse of :func:`_pack_nibbles`, f32."""
    head_dim = codes.shape[-1] * 2
    q = torch.stack((codes & 15, codes >> 4), -1)
    if _chunked(head_dim):
        q = q.unflatten(-2, (4, head_dim // 8)).transpose(-3, -2)
    return q.reshape(*codes.shape[:-1], head_dim).to(torch.float32)


def encode_keys(k: Tensor, mean: Tensor, balance: Tensor) -> tuple[Tensor, Tensor]:
    """Keys after RoPE: centred, balanced, rotated, then :func:`encode_rows`.

    ::

        row = encode_rows( H( (k - mean) / balance ) )

    Args:
        k: [B, Hkv, T, D].
        mean: [Hkv, D] f32, mu of docs/numerics.md.
        balance: [Hkv, D] f32, lambda.

    Returns:
        codes [B, Hkv, T, D/2] u8, scales [B, Hkv, T] f16.

    Raises:
        HeadDimError: D is odd.
    """
    centred = (k.detach().to(torch.float32) - mean[:, None]) / balance[:, None]
    return encode_rows(hadamard(centred, hadamard_block(k.shape[-1])))


def decode_keys(codes: Tensor, scales: Tensor, mean: Tensor, balance: Tensor) -> Tensor:
    """``balance * H(rows) + mean``: codes [B, Hkv, T, D/2], scales [B, Hkv, T] -> [B, Hkv, T, D] f32."""
    rows = hadamard(decode_rows(codes, scales), hadamard_block(codes.shape[-1] * 2))
    return rows.mul_(balance[:, None]).add_(mean[:, None])


CHANNEL = "int4-channel"
"""``kv_cache`` of the format whose keys have one range per channel and page."""
KV_FORMATS = ("int4", CHANNEL)
"""The formats of the INT4 cache. Values are the same in both; a store tells its own by the shape of ``k_scales``."""


def per_channel(k_scales: Tensor) -> bool:
    """Whether the keys of this store (or of these ranges) are quantised per channel: ``k_scales`` [.., P, 2, D]."""
    return k_scales.dim() == 5


def encode_key_pages(
    k: Tensor, mean: Tensor, first_page: int = 0, reads: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Keys after RoPE, one range per channel and page of 64 tokens: the robust format.

    ::

        ranges of a page    D x f16 step | D x f16 minimum          code = round((k - mean - minimum) / step), 0..15
        codes of a token    as in encode_rows

    A channel that is large but nearly constant within a page costs the others nothing, so there is neither a rotation
    nor a balance (one factor per channel would change no code). The mean only keeps the float16 minima small. With the
    queries times the steps, a kernel multiplies bare codes: q k = (q step) code + q minimum, the latter once per page.

    In page 0 the step is a little larger (range / 14), so that the grid can be laid through the key of the sequence's
    first (finite) token, which every query reads: it decodes to itself but for the minimum's rounding.

    With ``reads``, the direction that most queries share, the roundings of a token are chosen together: what one
    channel adds to ``reads . key`` the next ones take back (:func:`_cancelling`). Without, or with zeros, every value
    goes to the nearest code.

    Within half a step of each value (with ``reads`` one and a half), beside the minimum's float16 rounding; magnitudes
    over 65504 saturate. A value that is not finite takes part in no range and decodes to some finite value: who writes
    keys marks the token in its values (``Store.encode``), since NaN here would spread over the 64 tokens of a channel.

    Args:
        k: [B, Hkv, P * 64, D] floating, D even.
        mean: [Hkv, D] f32.
        first_page: index in the cache of the first of these pages.
        reads: [Hkv, D] f32, the direction in which queries read the keys; its length is the root mean square of the
            queries along it in units of that across it (keys.common_reads).

    Returns:
        codes [B, Hkv, P, 64, D/2] u8, ranges [B, Hkv, P, 2, D] f16: steps, then minima.

    Raises:
        HeadDimError: D is odd. FormatError: the tokens are not whole pages.
    """
    hadamard_block(k.shape[-1])
    if k.shape[2] % PAGE:
        raise FormatError(f"keys per channel are whole pages of {PAGE} tokens; these are {k.shape[2]} tokens")
    x = (k.detach().to(torch.float32) - mean[:, None]).unflatten(2, (-1, PAGE))
    finite = torch.isfinite(x)
    low = torch.where(finite, x, float("inf")).amin(3)
    high = torch.where(finite, x, float("-inf")).amax(3)
    low, high = (torch.where(torch.isfinite(t), t, 0.0) for t in (low, high))  # no finite value in the channel
    minima = low.clamp(-_F16_MAX, _F16_MAX).to(torch.float16)
    steps = _to_f16_scale(divide(high - minima.float(), 15.0).clamp_(0.0, _F16_MAX))
    if first_page == 0 and x.shape[2]:
        low, high = low[:, :, 0], high[:, :, 0]
        at = finite[:, :, 0].to(torch.uint8).argmax(2, keepdim=True)  # padding may hold anything
        first = x[:, :, 0].gather(2, at)[:, :, 0]
        step = _to_f16_scale(divide(high - low, 14.0).clamp_(0.0, _F16_MAX))
        start = first - torch.ceil((first - low) / _divisor(step)) * step.float()  # at most one step below the lowest
        start = torch.where(torch.isfinite(first), start, low)
        steps[:, :, 0], minima[:, :, 0] = step, start.clamp_(-_F16_MAX, _F16_MAX).to(torch.float16)
    q = (x - minima.float()[..., None, :]) / _divisor(steps)[..., None, :]
    codes = torch.round(q).nan_to_num_(0.0).clamp_(0.0, 15.0)
    if reads is not None:
        codes = _cancelling(q.nan_to_num_(0.0).clamp_(0.0, 15.0), codes, steps.float(), reads)
    return _pack_nibbles(codes), torch.stack((steps, minima), 3)


def _cancelling(q: Tensor, codes: Tensor, steps: Tensor, reads: Tensor) -> Tensor:
    """Codes whose errors e = (code - q) step of a token nearly cancel along the direction u that queries share.

    ::

        least  (u . e)^2 + |e|^2        greedy: channels by falling |u|, each rounds  q - shift
        shift  of channel i             a u_i / (1 + the sum of u_j^2 over i and later) / step, at most one step
        a                               the sum of u_j e_j over earlier channels

    That shift is the share of channel i if the later channels took ``a`` back without rounding. (Error feedback, as
    GPTQ's, for second moments of the queries that are one direction beside equal noise.)

    Args:
        q: [B, Hkv, P, 64, D] f32, values in steps above the minimum, 0..15.
        codes: like q, the nearest ones; heads without a direction keep them.
        steps: [B, Hkv, P, D] f32.
        reads: [Hkv, D] f32, u.

    Returns:
        Like q, integers 0..15.
    """
    u, order = reads.to(device=q.device, dtype=torch.float32).nan_to_num(0.0).abs().sort(dim=-1, descending=True)
    u = u * reads.to(u).sign().gather(1, order)
    share = u / (1.0 + u.square().flip(1).cumsum(1).flip(1))
    u, share = (t.T[:, None, :, None, None] for t in (u, share))  # [D, 1, Hkv, 1, 1]
    columns = order[None, :, None, None]
    q = q.gather(-1, columns.expand_as(q)).movedim(-1, 0).contiguous()  # [D, B, Hkv, P, 64]
    widths = steps.gather(-1, columns[..., 0, :].expand_as(steps)).movedim(-1, 0)[..., None]
    weights, shares = u * widths, share / torch.where(widths == 0.0, 1.0, widths)
    chosen, error = torch.empty_like(q), torch.zeros_like(q[0])
    for i in range(q.shape[0]):
        chosen[i] = (q[i] - (error * shares[i]).clamp_(-1.0, 1.0)).round_().clamp_(0.0, 15.0)
        error = error + weights[i] * (chosen[i] - q[i])
    chosen = torch.empty_like(codes).scatter_(-1, columns.expand_as(codes), chosen.movedim(0, -1))
    return torch.where((reads != 0.0).any(-1).to(q.device)[:, None, None, None], chosen, codes)


def decode_key_pages(codes: Tensor, ranges: Tensor, mean: Tensor) -> Tensor:
    """``code * step + minimum + mean``: codes [B, Hkv, P, 64, D/2], ranges [B, Hkv, P, 2, D] -> [B, Hkv, P*64, D]."""
    steps, minima = ranges.float()[..., None, :].unbind(3)
    return _unpack_nibbles(codes).mul_(steps).add_(minima + mean[:, None, None]).flatten(2, 3)


def kv_pages(max_len: int) -> int:
    """Pages of 64 tokens that a cache of ``max_len`` tokens needs."""
    return _ceil(max_len, PAGE)


def kv_shapes(
    batch: Any, kv_heads: int, max_len: Any, head_dim: int, kv_format: str = "int4"
) -> tuple[tuple[tuple[Any, ...], torch.dtype], ...]:
    """Shape and dtype of k_codes, k_scales, v_codes and v_scales (:func:`kv_store`); sizes may be symbolic."""
    rows = (batch, kv_heads, (max_len + PAGE - 1) // PAGE, PAGE)
    codes, scales = ((*rows, head_dim // 2), torch.uint8), (rows, torch.float16)
    ranges = ((*rows[:3], 2, head_dim), torch.float16)
    return codes, ranges if kv_format == CHANNEL else scales, codes, scales


def kv_store(
    batch: int,
    kv_heads: int,
    max_len: int,
    head_dim: int,
    device: torch.device | str | None = None,
    kv_format: str = "int4",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """An empty INT4 store for one layer.

    ::

        codes    [sequence][kv head][page][token 0..63][D/2 bytes]       a page of one head is one run of 32 D bytes
        scales   [sequence][kv head][page][token 0..63] f16              and one of 128 bytes
        ranges   [sequence][kv head][page][step, minimum][D] f16         instead, of keys per channel: 4 D bytes

    Args:
        batch: B.
        kv_heads: Hkv.
        max_len: tokens that fit.
        head_dim: D.
        device: where the store lives.
        kv_format: one of KV_FORMATS.

    Returns:
        k_codes [B, Hkv, P, 64, D/2] u8, k_scales [B, Hkv, P, 64] f16 (``"int4-channel"``: [B, Hkv, P, 2, D]), v_codes,
        v_scales; P = ceil(max_len / 64). Contents are zeros, which decode to 0 for values and to the mean for keys.

    Raises:
        HeadDimError: head_dim is odd. FormatError: a format that does not exist.
    """
    hadamard_block(head_dim)
    if kv_format not in KV_FORMATS:
        raise FormatError(f"a cache in the format {kv_format!r}; there are {' and '.join(KV_FORMATS)}")
    shapes = kv_shapes(batch, kv_heads, max_len, head_dim, kv_format)
    # Born outside inference mode: only such tensors have the version by which foreign writes are noticed.
    with torch.inference_mode(False):
        return tuple(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype in shapes)  # type: ignore[return-value]


def kv_tables(
    kv_heads: int,
    head_dim: int,
    device: torch.device | str | None = None,
    key_bias: Tensor | None = None,
    inv_freq: Tensor | None = None,
    attention_scaling: float = 1.0,
    positions: int = 2048,
    kv_format: str = "int4",
) -> tuple[Tensor, Tensor]:
    """key_mean and key_balance of one layer before any calibration.

    The mean is what the bias of k_proj becomes after RoPE, averaged over the positions 0 .. positions-1: R(p) b keeps a
    constant part only in column pairs that rotate slowly; the fast ones average to nothing. Without a bias, or without
    the frequencies, it is zero. Subtracting any constant from all keys is neutral to softmax, so this only ever moves
    the quantiser's range. The balance is one; of keys per channel the second table is a direction
    (:func:`encode_key_pages`), and zero: none is known.

    Args:
        kv_heads: Hkv.
        head_dim: D.
        device: where the tables live.
        key_bias: [Hkv * D], the bias of k_proj, or none.
        inv_freq: [R/2] RoPE frequencies in radians per token, or none.
        attention_scaling: the factor on cos and sin (yarn).
        positions: tokens in the average.
        kv_format: one of KV_FORMATS.

    Returns:
        key_mean [Hkv, D] f32 and key_balance [Hkv, D] f32.

    Raises:
        FormatError: a bias or frequencies of another size.
    """
    with torch.inference_mode(False), torch.no_grad():
        value = float(kv_format != CHANNEL)
        balance = torch.full((kv_heads, head_dim), value, dtype=torch.float32, device=device)
        mean = torch.zeros_like(balance)
        if key_bias is None or inv_freq is None:
            return mean, balance
        half = inv_freq.numel()
        if key_bias.numel() != kv_heads * head_dim or 2 * half > head_dim:
            raise FormatError(
                f"a k_proj bias of {key_bias.numel()} and {half} frequencies do not fit {kv_heads} heads of {head_dim}"
            )
        b = key_bias.detach().to(device=mean.device, dtype=torch.float64).reshape(kv_heads, head_dim)
        freq = inv_freq.detach().to(device=mean.device, dtype=torch.float64).reshape(-1)
        angle = torch.arange(positions, device=mean.device, dtype=torch.float64)[:, None] * freq
        cos, sin = angle.cos().mean(0) * attention_scaling, angle.sin().mean(0) * attention_scaling
        first, second = b[:, :half], b[:, half : 2 * half]
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin, b[:, 2 * half :]), 1)
        return mean.copy_(turned), balance
