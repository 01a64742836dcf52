"""``linear_fp8`` and ``linear_bf16`` on Hopper, where arithmetic is the bound: csrc/gemm_sm90.cu with any epilogue.

::

    x --rows--> e4m3 codes, scale     (csrc/gemm_rows_sm90.cu: RMS normalisation and quantisation, one pass)
                     |
    weight ------> gemm ------> epilogue ------> y

``linear_fp8`` quantises P(x) with the rule of ``formats.fp8_quantize``, on the device, one launch with delayed and
static scales. ``linear_bf16`` multiplies x as it is and the finished row by 1 / rms, which is more exact than
normalising first. A ``Config`` is chosen from the number of tokens and the weight's shape by :func:`choose`; kernels
are compiled for N, K, configuration and epilogue, never for a number of tokens.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from fu_compile.lowerings import decode_linear as common
from fu_compile.lowerings.decode_linear import SMEM_MAX, SMS, ceil_div
from fu_compile.lowerings.reference_linear import check_gain, dense_int4, inner_epilogue, steps_of
from torch import Tensor

from fu_compile import formats, jit
from fu_compile.errors import LoweringError

SIGNATURE = "tttt" + "ppppppp" + "fiii"
"""maps of x, weight, y, residual; step, channel, rstd, bias, squares, act, out step; scale, tokens, scaling, again"""
ROWS_SIGNATURE = "pppppifii"
"""x, codes, rstd, act, step; row stride, eps, scaling, phase"""
_SCALINGS = {"delayed": 0, "static": 1, "dynamic": 2, "row": 3}
"""Of ``formats.FP8_SCALINGS``, as csrc/gemm_fp8_state.cuh numbers them."""
_TYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float8_e4m3fn: 2}


class Config(NamedTuple):
    """How a product is cut (csrc/gemm_sm90.cu)."""

    tile_m: int
    """tokens of a tile"""
    tile_n: int
    """weight rows of a tile: 64, 128, 192 or 256"""
    cluster: int
    """blocks that share a weight tile: 1 or 2"""
    pingpong: bool
    """each consumer has a tile of its own"""
    group: int = 0
    """tiles (of clusters) that lie below each other before the raster goes right; 0: what X_BYTES says"""
    stages: int = 0
    """of the ring; 0: as many as fit"""
    promote: bool = False
    """e4m3: accumulators are added up in float32 every 128 of K"""


X_BYTES, X_ROWS = 16 << 20, 2048
"""Of X in a group of tiles. So many bytes stay in L2 beside what streams through it. With so many rows 132 tiles are
about as high as they are wide, and read the fewest rows of X and W from memory, whatever stays."""


def group(c: Config, k: int, dtype: torch.dtype) -> int:
    """Of the raster: what was asked for, or a power of two up to 16: at most X_BYTES of X, but at least X_ROWS rows."""
    rows = c.tile_m * c.cluster
    tiles = max(X_ROWS // rows, X_BYTES // (k * dtype.itemsize * rows))
    return c.group or min(16, 1 << (tiles.bit_length() - 1))


def staging(c: Config, swiglu: bool, out8: bool) -> int:
    """Bytes of both output tiles."""
    rows = c.tile_m * (2 if c.pingpong else 1)
    return rows * (c.tile_n // 2 if swiglu else c.tile_n) * (1 if out8 else 2)


def stages(c: Config, swiglu: bool, out8: bool) -> int:
    """Of the ring: what was asked for, or as many as shared memory holds beside the output tiles and their factors."""
    rest = SMEM_MAX - staging(c, swiglu, out8) - 8 * c.tile_n - 256
    return c.stages or min(8, rest // (128 * (c.tile_m + c.tile_n)))


def smem(c: Config, swiglu: bool, out8: bool, fp8: bool = True) -> int:
    """Bytes of shared memory of a block: the sum at the top of the kernel. ``fp8``: it has factors of columns."""
    depth = stages(c, swiglu, out8)
    factors = 8 * c.tile_n if fp8 else 0
    return depth * 128 * (c.tile_m + c.tile_n) + staging(c, swiglu, out8) + factors + 8 * (2 * depth + 5)


TOGETHER, PAIR = Config(128, 256, 1, False), Config(128, 256, 2, False)
TURNS = Config(128, 192, 2, True)
SMALL = (
    (Config(128, 128, 1, False), 0.8),
    (Config(64, 128, 1, True), 0.6),
    (Config(64, 64, 1, True), 0.35),
)
"""Tiles for few tokens, and their speed against the large ones': estimates from the bytes that a step copies."""
PROMOTED = ((Config(128, 128, 2, False, promote=True), 1.0), (Config(64, 128, 1, True, promote=True), 0.7))
"""Tiles with promoted accumulation, where a thread holds everything twice."""
LARGE: dict[tuple[str, bool], tuple[tuple[Config, float], ...]] = {
    ("swiglu", False): ((TURNS, 1.0), (PAIR, 0.94)),
    ("swiglu", True): ((TURNS, 1.0), (PAIR, 0.96)),
    ("", False): ((PAIR, 1.0), (TOGETHER, 0.98)),
    ("", True): ((TOGETHER, 1.0), (PAIR, 0.98)),
}
"""(epilogue, at least 4,096 tokens) -> large tiles and the speed of a whole GEMM with its epilogue, against each other.

From prefill_gemm_tune-2026-11-30-32aa583.json (H200, 8B shapes, 2,048 and 8,192 tokens; e4m3 and BF16 agree). SwiGLU is
long, so it wants to run under the other consumer's multiplications; what adds a residual gains more from wide tiles.
With a bias before SwiGLU the registers of TURNS do not hold what the epilogue loads.
"""


@functools.lru_cache(maxsize=4096)
def choose(m: int, n: int, swiglu: bool = False, promote: bool = False, sms: int = SMS) -> Config:
    """The configuration for m tokens and n weight rows: the one whose waves of tiles are done first.

    ``swiglu``: that is the epilogue, and all of it.
    """

    def cost(entry: tuple[Config, float]) -> float:
        c, speed = entry
        tiles = ceil_div(m, c.tile_m * c.cluster) * c.cluster * ceil_div(n, c.tile_n)
        return ceil_div(tiles, sms) * c.tile_m * c.tile_n / speed

    return min(PROMOTED if promote else LARGE["swiglu" if swiglu else "", m >= 4096] + SMALL, key=cost)[0]


@functools.cache
def kernel(
    n: int,
    k: int,
    config: Config,
    dtype: torch.dtype,
    epilogue: str = "",
    *,
    row: bool = False,
    squares: bool = False,
    half: bool = False,
    out8: bool = False,
    sms: int = SMS,
) -> jit.Kernel:
    """The kernel for an [n, k] weight of ``dtype`` (bf16, f16, e4m3); compiled at its first launch.

    Args:
        epilogue: as ``ops.EPILOGUE_ORDER`` has it.
        row: the finished row is multiplied by rstd[row].
        squares: sums of squares of the output are written, one per row and column tile.
        half: output, bias and residual are float16 instead of bfloat16.
        out8: the output is e4m3.
    """
    steps = epilogue.split("|")
    swiglu = "swiglu" in steps
    size = smem(config, swiglu, out8, dtype == torch.float8_e4m3fn)
    if size > SMEM_MAX:
        raise LoweringError(f"{config} needs {size} bytes of shared memory, a block has {SMEM_MAX}")
    constants = {
        "N": n, "K": k, "TILE_M": config.tile_m, "TILE_N": config.tile_n, "STAGES": stages(config, swiglu, out8),
        "CLUSTER": config.cluster, "GROUP": group(config, k, dtype), "PINGPONG": int(config.pingpong),
        "PROMOTE": int(config.promote), "TYPE": _TYPES[dtype], "HALF": int(half), "ROW": int(row),
        "SQUARES": int(squares), "SMEM": size, "BIAS": int("bias" in steps), "SWIGLU": int(swiglu),
        "RESIDUAL": int("residual" in steps), "OUT8": int(out8),
    }  # fmt: skip
    grid = sms // config.cluster * config.cluster
    return jit.Kernel("gemm_sm90.cu", constants, SIGNATURE, jit.Shape(grid, 384, size, config.cluster))


@functools.cache
def rows_kernel(k: int, rms: bool, codes: bool, half: bool) -> jit.Kernel:
    """What stands before a product: rstd of every row (not ``codes``), or its e4m3 codes. One block a row."""
    threads = min(1024, max(64, ceil_div(ceil_div(k, 16), 32) * 32))
    constants = {"K": k, "THREADS": threads, "RMS": int(rms), "CODES": int(codes), "HALF": int(half)}
    return jit.Kernel("gemm_rows_sm90.cu", constants, ROWS_SIGNATURE, jit.Shape(1, threads, 0))


TOKENS = (*range(1, 8193, 64), *range(8193, 32769, 1024))
"""Tokens of a prefill that :func:`kernels_of` compiles for: one of each number of tiles, up to 8,192."""


def kernels_of(
    model: Any, prefill: str = "fp8", half: bool = False, tokens: Iterable[int] = TOKENS
) -> list[jit.Kernel]:
    """Every kernel of a model's prefill but attention: its linears, what stands before them, RoPE and the cache.

    Args:
        model: a transformers configuration of the Llama kind, or one that holds it as ``text_config``.
        prefill: ``"fp8"`` or ``"bf16"``, as the option.
        half: float16 activations instead of bfloat16.
        tokens: of a prefill.
    """
    from fu_compile.lowerings import qkv_rope_sm90

    from fu_compile.models import heads_of, linears_of

    model = getattr(model, "text_config", None) or model
    heads, kv, dim = heads_of(model)
    hidden, fp8, tokens = model.hidden_size, prefill == "fp8", list(tokens)
    dtype = torch.float8_e4m3fn if fp8 else torch.float16 if half else torch.bfloat16
    found = [
        kernel(
            n,
            k,
            config,
            dtype,
            epilogue,
            row=prologue == "rms" and not fp8,
            half=half,
            out8=fp8 and epilogue == "swiglu",
        )
        for n, k, prologue, epilogue in linears_of(model)
        for config in dict.fromkeys(choose(m, n, epilogue == "swiglu") for m in tokens)
    ]
    found.append(rows_kernel(hidden, True, fp8, half))
    if fp8:
        found.append(rows_kernel(heads * dim, False, True, half))
    norm = model.model_type.startswith("qwen3")
    rotated = int(dim * (getattr(model, "partial_rotary_factor", None) or 1.0))
    shape = (heads, kv, dim), rotated, half, False, (norm, norm)
    if not qkv_rope_sm90.refuses_heads(dim, rotated):
        found += [qkv_rope_sm90.kernel(*shape, append) for append in (True, False)]
    return found


# ---- tensor maps -----------------------------------------------------------------------------------------------------


class _TensorMap:
    """The 128 bytes of a descriptor, where cuTensorMapEncodeTiled wants them: on a multiple of 64."""

    def __init__(self) -> None:
        self._memory = ctypes.create_string_buffer(192)
        self.address = -(-ctypes.addressof(self._memory) // 64) * 64


@functools.cache
def _encode() -> Any:
    # Not through cuda.bindings: it keeps the descriptor in a Python object, which is aligned to 16 bytes.
    encode = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled
    pointer, number = ctypes.c_void_p, ctypes.c_uint32
    encode.argtypes = (pointer, ctypes.c_int, number, *[pointer] * 5, *[ctypes.c_int] * 4)
    return encode


_KINDS = {torch.float8_e4m3fn: 0, torch.float16: 6, torch.bfloat16: 9}
"""CUtensorMapDataType: bytes, float16, bfloat16."""
_SWIZZLES = {32: 1, 64: 2, 128: 3}
"""CUtensorMapSwizzle, by the bytes of a row of a box."""
_L2_256B = 3
"""CUtensorMapL2promotion"""


@functools.lru_cache(maxsize=16384)
def _tensor_map(
    address: int, rows: int, columns: int, pitch: int, dtype: torch.dtype, box_rows: int, box_bytes: int
) -> _TensorMap:
    """The descriptor of a [rows, columns] matrix, ``pitch`` bytes from row to row, copied in boxes.

    Kept by address and shape: the allocator gives the same addresses call after call, and encoding costs more than the
    rest of a launch.
    """
    found = _TensorMap()
    sizes, pitches = (ctypes.c_uint64 * 2)(columns, rows), (ctypes.c_uint64 * 1)(pitch)
    box, ones = (ctypes.c_uint32 * 2)(box_bytes // dtype.itemsize, box_rows), (ctypes.c_uint32 * 2)(1, 1)
    error = _encode()(
        found.address, _KINDS[dtype], 2, address, sizes, pitches, box, ones, 0, _SWIZZLES[box_bytes], _L2_256B, 0
    )
    if error:
        raise LoweringError(f"the CUDA driver refuses a tensor map of {rows} x {columns} {dtype}: error {error}")
    return found


def _map(t: Tensor, columns: int, pitch: int, box_rows: int, box_bytes: int) -> int:
    pitch *= t.element_size()
    return _tensor_map(t.data_ptr(), t.shape[0], columns, pitch, t.dtype, box_rows, box_bytes).address


# ---- launching -------------------------------------------------------------------------------------------------------


def gemm(
    x: Tensor,
    weight: Tensor,
    y: Tensor,
    config: Config,
    epilogue: str = "",
    *,
    step: Tensor | None = None,
    channel: Tensor | None = None,
    rstd: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    scale: float = 1.0,
    squares: Tensor | None = None,
    act: Tensor | None = None,
    out_step: Tensor | None = None,
    scaling: str = "delayed",
    half: bool = False,
) -> Tensor:
    """y = E(x @ weight^T) on the current stream, with a given configuration.

    Args:
        x: [M, K], rows that start on 16 bytes: the dtype of the weight.
        weight: [N, K] e4m3, bf16 or f16, contiguous; with swiglu its gate rows before its up rows.
        y: [M, N], or [M, N/2] with swiglu, contiguous: 16 bits, or e4m3 (then ``act`` and ``out_step``).
        step: f32 scalar, scale of an e4m3 x.
        channel: [N] f32, scales of an e4m3 weight.
        rstd: [M] f32, a factor of each row.
        bias: [N] in y's 16-bit dtype. residual: like y, rows that start on 16 bytes. scale: residual + scale * y.
        squares: [M, tiles] f32, written: sums of squares of y's rows over the columns of a tile.
        act: the FP8 state of y, updated. out_step: f32 scalar, written: y's scale.
        scaling: ``"delayed"`` or ``"static"``, of y. half: the bias beside an e4m3 y is float16.

    Returns:
        ``y``.
    """
    m, (n, k) = x.shape[0], weight.shape
    swiglu, out8 = "swiglu" in epilogue, y.dtype == torch.float8_e4m3fn
    other = next((t for t in (bias, residual) if t is not None), y)
    half = half or torch.float16 in (x.dtype, other.dtype)
    device = y.device.index
    run = kernel(
        n, k, config, weight.dtype, epilogue, row=rstd is not None, squares=squares is not None, half=half, out8=out8,
        sms=common.multiprocessors(device),
    )  # fmt: skip
    width = config.tile_n // 2 if swiglu else config.tile_n
    row_bytes = width * y.element_size()
    box = next(b for b in (128, 64, 32) if row_bytes % b == 0)
    parts = 2 if swiglu or config.cluster == 2 else 1
    columns = y.shape[-1]
    to = _map(y, columns, columns, 64, box)
    maps = (
        _map(x, k, x.stride(0), config.tile_m, 128),
        _map(weight, k, k, config.tile_n // parts, 128),
        to,
        to if residual is None else _map(residual, columns, residual.stride(0), 64, box),
    )
    pointers = (None if t is None else t.data_ptr() for t in (step, channel, rstd, bias, squares, act, out_step))
    args = (*maps, *pointers, scale, m, _SCALINGS[scaling])
    stream = torch.cuda.current_stream(device).cuda_stream
    run(device, stream, *args, 0)
    if out8:  # does nothing unless the planned scale was too small for this call, or there was none
        run(device, stream, *args, 1)
    return y


def codes_of(x: Tensor, act: Tensor, scaling: str, rms: bool, eps: float) -> tuple[Tensor, Tensor]:
    """P(x) in e4m3: x: [M, K] bf16 or f16, rows that start on 16 bytes -> codes [M, K], and their scale, f32 scalar.

    With scaling ``"row"`` there is one for each row: [M] f32.
    """
    m, k = x.shape
    rows = scaling == "row"
    codes = torch.empty((m, k), dtype=torch.float8_e4m3fn, device=x.device)
    step = torch.empty((m,) if rows else (), dtype=torch.float32, device=x.device)
    run = rows_kernel(k, rms, True, x.dtype == torch.float16)
    device = x.device.index
    stream = torch.cuda.current_stream(device).cuda_stream
    for phase in (1, 2) if scaling == "dynamic" else (0,):
        run(
            device, stream, x.data_ptr(), codes.data_ptr(), step.data_ptr() if rows else None, act.data_ptr(),
            None if rows else step.data_ptr(), x.stride(0), eps,
            _SCALINGS[scaling], phase, grid=m,
        )  # fmt: skip
    return codes, step


def rstd_of(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean(x^2) + eps) of every row: x: [M, K] bf16 or f16 -> [M] f32."""
    m, k = x.shape
    rstd = torch.empty(m, dtype=torch.float32, device=x.device)
    device = x.device.index
    rows_kernel(k, True, False, x.dtype == torch.float16)(
        device, torch.cuda.current_stream(device).cuda_stream, x.data_ptr(), None, rstd.data_ptr(), None, None,
        x.stride(0), eps, 0, 0, grid=m,
    )  # fmt: skip
    return rstd


# ---- the operators ---------------------------------------------------------------------------------------------------


def _refuses(
    x: Tensor,
    shape: tuple[int, int],
    dtype: torch.dtype,
    bias: Tensor | None,
    residual: Tensor | None,
    epilogue: str,
) -> str | None:
    """Why no product with a weight of this shape and dtype runs this call, or none. Works on fake tensors."""
    n, k = shape
    columns = common.columns_of(n, epilogue)
    reasons: tuple[common.Reason, ...] = (
        *common.input_reasons(x, k),
        (
            k * dtype.itemsize % 16 != 0,
            lambda: f"rows of {k} {dtype} are no multiple of 16 bytes, which tensor copies need",
        ),
        (k % 8 != 0 or k > 32768, lambda: f"{k} input features are not a multiple of 8 up to 32768"),
        (columns % 8 != 0, lambda: f"{columns} output features are no multiple of 8 (16-byte rows)"),
        *common.operand_reasons(x, columns, bias, residual),
        ("swiglu|residual" in epilogue, lambda: "SwiGLU with a residual"),
    )
    return common.first_of(reasons) or common.unavailable(x.device.index or 0)


def _refuses_weight(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, epilogue: str
) -> str | None:
    if not weight.is_contiguous():
        return "the weight is not contiguous"
    n, k = weight.shape
    return _refuses(x, (n, k), weight.dtype, bias, residual, epilogue)


def accepts_fp8(x: Tensor, weight: Tensor, weight_scale: Tensor, act: Tensor, *rest: Any) -> str | None:
    """Why this call of ``linear_fp8`` is not ours, or none."""
    bias, residual, _eps, _scale, _prologue, epilogue, scaling = rest
    if scaling == "none":
        return "the activations are not quantised"
    if formats.fp8_is_observed():
        return "the inputs are observed while static scales are calibrated"
    if weight.dtype != torch.float8_e4m3fn:
        return f"the weight is {weight.dtype}, not e4m3"
    return _refuses_weight(x, weight, bias, residual, epilogue)


def accepts_mlp(x: Tensor, *rest: Any) -> str | None:
    """Why this call of ``mlp_fp8`` is not ours, or none."""
    weight, _, _, bias, down, _, _, down_bias, residual, _eps, _scale, _prologue, epilogue, scaling = rest
    if scaling not in ("delayed", "static"):
        return f"scaling={scaling!r}: the scale of the row between the products is not known before it"
    if formats.fp8_is_observed():
        return "the inputs are observed while static scales are calibrated"
    if weight.dtype != torch.float8_e4m3fn or down.dtype != torch.float8_e4m3fn:
        return f"the weights are {weight.dtype} and {down.dtype}, not e4m3"
    inner = weight.shape[0] // 2
    if down.shape[1] != inner or inner % 16:
        return f"{inner} inner features are no multiple of 16, or not those of a weight {list(down.shape)}"
    first = inner_epilogue(bias)
    between = x.new_empty((*x.shape[:-1], inner))
    return _refuses_weight(x, weight, bias, None, first) or _refuses_weight(
        between, down, down_bias, residual, epilogue
    )


def accepts_bf16(x: Tensor, weight: Tensor, *rest: Any) -> str | None:
    """Why this call of ``linear_bf16`` is not ours, or none."""
    bias, residual, _eps, _scale, _prologue, epilogue = rest
    if weight.dtype != x.dtype:
        return f"the weight is {weight.dtype}, the input {x.dtype}"
    return _refuses_weight(x, weight, bias, residual, epilogue)


def accepts_int4(x: Tensor, packed: Tensor, n: int, k: int, group: int, *rest: Any) -> str | None:
    """Why this call of ``linear_int4`` is not ours, or none."""
    bias, residual, _eps, _scale, _prologue, epilogue = rest[:6]
    return _refuses(x, (n, k), x.dtype, bias, residual, epilogue)


def _run(
    x: Tensor, flat: Tensor, weight: Tensor, residual: Tensor | None, epilogue: str, promote: bool, **operands: Any
) -> Tensor:
    n = weight.shape[0]
    columns = common.columns_of(n, epilogue)
    y = x.new_empty((*x.shape[:-1], columns))
    m = flat.shape[0]
    if m:
        if residual is not None and "residual" in epilogue:
            rows, ld = common.rows(residual, columns)
            operands["residual"] = rows.as_strided((m, columns), (ld, 1))
        config = choose(m, n, epilogue == "swiglu", promote, common.multiprocessors(x.device.index))
        gemm(flat, weight, y.view(m, columns), config, epilogue, **operands)
    return y


def _flat(x: Tensor, k: int) -> Tensor:
    rows, ld = common.rows(x, k)
    return rows.as_strided((x.numel() // k, k), (ld, 1))


PROMOTE_K = 1 << 30
"""From this many input features on e4m3 products are accumulated with promotion: none.

Measured (``benchmarks/prefill_gemm.py --depth``): at K = 28672 the tensor core's own sums are off by 4.4e-3 of the row,
the e4m3 codes by 3.7e-2; together 0.7 % more than the codes alone. Promotion costs half of the speed.
"""


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
    k = weight.shape[1]
    flat = _flat(x, k)
    if not flat.shape[0]:
        return x.new_empty((*x.shape[:-1], weight.shape[0] // (2 if "swiglu" in steps else 1)))
    codes, step = codes_of(flat, act, scaling, rms, eps)
    rstd = None
    if scaling == "row":
        step, rstd = common.one(x.device), step
    return _run(
        x, codes, weight, residual, epilogue, k >= PROMOTE_K, step=step, channel=weight_scale, rstd=rstd,
        bias=bias if "bias" in steps else None, scale=scale,
    )  # fmt: skip


def mlp_fp8(
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
    """linear_fp8 with SwiGLU, whose epilogue writes the e4m3 input of the second product. -> [..., M] like x."""
    rms, steps = steps_of(prologue, epilogue)
    flat = _flat(x, weight.shape[1])
    m, inner = flat.shape[0], weight.shape[0] // 2
    if not m:
        return x.new_empty((*x.shape[:-1], down.shape[0]))
    codes, step = codes_of(flat, act, scaling, rms, eps)
    row = torch.empty((m, inner), dtype=torch.float8_e4m3fn, device=x.device)
    row_step = torch.empty((), dtype=torch.float32, device=x.device)
    first = inner_epilogue(bias)
    sms = common.multiprocessors(x.device.index)
    config = choose(m, 2 * inner, bias is None, weight.shape[1] >= PROMOTE_K, sms)
    gemm(
        codes, weight, row, config, first, step=step, channel=weight_scale,
        bias=bias, half=x.dtype == torch.float16, act=down_act, out_step=row_step, scaling=scaling,
    )  # fmt: skip
    return _run(
        x, row, down, residual, epilogue, inner >= PROMOTE_K, step=row_step, channel=down_scale,
        bias=down_bias if "bias" in steps else None, scale=scale,
    )  # fmt: skip


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
    """weight: [N, K] in x's dtype -> [..., N] like x."""
    rms, steps = steps_of(prologue, epilogue)
    flat = _flat(x, weight.shape[1])
    rstd = rstd_of(flat, eps) if rms and flat.shape[0] else None
    return _run(
        x, flat, weight, residual, epilogue, False, rstd=rstd, bias=bias if "bias" in steps else None, scale=scale
    )


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
    """packed: formats.pack_int4; more tokens than decode has. The codes become x's dtype, at every call, and are freed.

    What is multiplied is x * gain rounded to x's dtype, and the finished row times 1 / rms, as the operator says.
    """
    rms, steps = steps_of(prologue, epilogue)
    check_gain(gain, k, rms)
    flat = _flat(x, k)
    rstd = rstd_of(flat, eps) if rms and flat.shape[0] else None
    if gain is not None:
        flat = (flat.float() * gain).to(x.dtype)
    weight = dense_int4(packed, n, k, group, "swiglu" in steps).to(x.dtype).contiguous()
    return _run(
        x, flat, weight, residual, epilogue, False, rstd=rstd, bias=bias if "bias" in steps else None, scale=scale
    )


LAUNCH: dict[str, Callable[..., Any]] = {
    "linear_fp8": linear_fp8,
    "linear_bf16": linear_bf16,
    "linear_int4": linear_int4,
    "mlp_fp8": mlp_fp8,
}
ACCEPTS: dict[str, Callable[..., str | None]] = {
    "linear_fp8": accepts_fp8,
    "linear_bf16": accepts_bf16,
    "linear_int4": accepts_int4,
    "mlp_fp8": accepts_mlp,
}
