"""The operators: names, schemas, shapes and meaning. Nothing else lives here.

Passes write these operators into graphs, lowerings run them; neither knows the other. There are two levels:

*Recognised* operators stand for one piece of a Llama block with eager's own numerics, so a graph in which they
replace the ATen nodes gives the eager result: ``rms_norm``, ``rotary``, ``swiglu``, ``residual``, ``qkv``,
``attention`` and the cache writes ``kv_write_``, ``kv_roll_``, ``kv_fill_``, ``kv_cat``.

*Fused* operators are what kernels exist for: ``linear_exact | linear_bf16 | linear_fp8 | linear_int4`` with a prologue
and an epilogue spelled as strings, and the attention side ``qkv_rope``, ``qkv_append``, ``attention_int4``,
``attention_prefill``, ``kv_store``, ``kv_append_``, ``kv_extend_``, ``kv_update``, ``kv_round``, ``kv_dequantize``.

Shapes: B batch, S tokens of this call, L cache slots, Hq query heads, Hkv key/value heads, D head_dim, R rotated
columns (R <= D), N output and K input features, P pages of 64 tokens.

Meaning of the fused operators (the *quantised reference*): dequantise to float32, compute in float32, round once to
the dtype of ``x``. ``prologue`` is ``""`` or ``"rms"`` (x / sqrt(mean(x^2) + eps); the gain is folded into the weight,
except in ``linear_int4``). ``epilogue`` is the ``|``-joined sub-sequence of ``bias``, ``swiglu``, ``residual``:

    bias      y + bias                                  bias: [N]
    swiglu    silu(y[..., :N/2]) * y[..., N/2:]         the output has N/2 columns
    residual  residual + scale * y                      residual: like the output

``linear_exact`` keeps eager's own roundings instead: the norm is ``rms_norm`` with its gain, each weight is one
``linear``, and every step rounds to the dtype of ``x`` as the uncompiled model does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

NAMESPACE = "futransformer"
PAGE = 64
"""Tokens in one page of the INT4 cache."""

_STORE = "Tensor(c!) k_codes, Tensor(d!) k_scales, Tensor(e!) v_codes, Tensor(f!) v_scales"
_STORE_READ = "Tensor k_codes, Tensor k_scales, Tensor v_codes, Tensor v_scales"
_TABLES = "Tensor key_mean, Tensor key_balance"
_HEADS = "int q_heads, int kv_heads, int head_dim"
_NORMS = "Tensor? q_norm, Tensor? k_norm, float eps"
_EPILOGUE = "Tensor? bias, Tensor? residual, float eps, float scale, str prologue, str epilogue"

SCHEMAS: dict[str, str] = {
    # ---- recognised: eager's numerics -------------------------------------------------------------------------
    # x: [..., K], weight: [K] or none.  weight * (x32 * rsqrt(mean(x32^2) + eps)).to(x.dtype)
    "rms_norm": "(Tensor x, Tensor? weight, float eps) -> Tensor",
    # x: [B, H, S, D], cos and sin: [1 or B, S, R].  Rotates the first R columns (halves), passes the others through.
    "rotary": "(Tensor x, Tensor cos, Tensor sin) -> Tensor",
    # silu(gate) * up, all [..., N]
    "swiglu": "(Tensor gate, Tensor up) -> Tensor",
    # x + scale * y (scale is applied to y first, in y's dtype, as Granite does; 1.0: plain addition)
    "residual": "(Tensor x, Tensor y, float scale) -> Tensor",
    # x: [B, S, K]; weights: three of [H*D, K] or one of [(Hq + 2 Hkv) * D, K]; biases: as many as weights, or none;
    # q_norm, k_norm: [D] RMS gains per head (Qwen3).  -> q: [B, Hq, S, D], k, v: [B, Hkv, S, D]
    "qkv": f"(Tensor x, Tensor[] weights, Tensor[] biases, {_NORMS}, {_HEADS}) -> (Tensor, Tensor, Tensor)",
    # q: [B, Hq, S, D], k and v: [B, Hkv, L, D], mask: bool (true = may see) or additive, broadcastable to
    # [B, Hq, S, L], or none; causal: query i sees keys 0..i (only with L == S, mask none).  -> [B, S, Hq*D]
    "attention": "(Tensor q, Tensor k, Tensor v, Tensor? mask, float scale, bool causal) -> Tensor",
    # cache: [B, Hkv, L, D], position: [S] int64, x: [B, Hkv, S, D].  cache[:, :, position] = x  (StaticCache)
    "kv_write_": "(Tensor(a!) cache, Tensor position, Tensor x) -> ()",
    # a full sliding window: cache = roll(cache, -1), last slot = x, S == 1
    "kv_roll_": "(Tensor(a!) cache, Tensor x) -> ()",
    # a sliding window that overflows in this call: cache = the last L rows of x: [B, Hkv, >= L, D]
    "kv_fill_": "(Tensor(a!) cache, Tensor x) -> ()",
    # DynamicCache: past ++ x along the tokens; past none: a new copy of x
    "kv_cat": "(Tensor? past, Tensor x) -> Tensor",
    # ---- fused: projections -----------------------------------------------------------------------------------
    # x: [..., K], weights: one to three of [N_i, K] in x's dtype, N = sum N_i; biases: as many, or none
    "linear_exact": (
        "(Tensor x, Tensor[] weights, Tensor[] biases, Tensor? norm, Tensor? residual, float eps, float scale,"
        " str prologue, str epilogue) -> Tensor"
    ),
    # weight: [N, K] in 16 bits (bfloat16, or float16 for a float16 model), the norm gain folded
    "linear_bf16": f"(Tensor x, Tensor weight, {_EPILOGUE}) -> Tensor",
    # weight: [N, K] e4m3, weight_scale: [N] f32 (w = weight * weight_scale), act: f32 [formats.FP8_STATE], the delayed
    # scaling state of this linear's input, updated by the call; scaling: "delayed" | "static" | "dynamic" | "row", or
    # "none": the input is not quantised and act not touched (decode, where the time goes into reading weights).
    # What is quantised is P(x): behind the norm no massive token can push the other rows into e4m3's subnormals.
    "linear_fp8": f"(Tensor x, Tensor weight, Tensor weight_scale, Tensor(a!) act, {_EPILOGUE}, str scaling) -> Tensor",
    # linear_fp8 with SwiGLU and the linear_fp8 that alone reads its output, in one: what lies between them is rounded
    # once, to e4m3 with the state down_act, instead of to x's dtype first. prologue, bias and act are those of the
    # first, epilogue ("bias", "residual"), down_bias and scale those of the second; down: [M, N/2] e4m3.
    "mlp_fp8": (
        "(Tensor x, Tensor weight, Tensor weight_scale, Tensor(a!) act, Tensor? bias, Tensor down, Tensor down_scale,"
        " Tensor(b!) down_act, Tensor? down_bias, Tensor? residual, float eps, float scale, str prologue, str epilogue,"
        " str scaling) -> Tensor"
    ),
    # packed: [bytes] u8, formats.pack_int4 of an [n, k] weight with this group; with swiglu in the epilogue its rows
    # are in formats.interleave_gate_up order. gain: [K] in x's dtype, only with "rms": what is multiplied is x * gain
    # rounded to x's dtype, the operand of a tensor core; 1 / sqrt(mean(x^2) + eps) comes after, in float32.
    "linear_int4": f"(Tensor x, Tensor packed, int n, int k, int group, {_EPILOGUE}, Tensor? gain=None) -> Tensor",
    # ---- packed models ----------------------------------------------------------------------------------------
    # packed: [bytes] u8, a block of fu_compile.packed.  The rows first .. first+rows-1, dequantised: [rows, k] dtype.
    # Stands in a graph for the weight of an aten.linear until the passes give the packed bytes to a fused linear.
    "packed_weight": (
        "(Tensor packed, str precision, int n, int k, int group, bool paired, int first, int rows, ScalarType dtype)"
        " -> Tensor"
    ),
    # ---- fused: attention -------------------------------------------------------------------------------------
    # qkv: [B, S, (Hq + 2 Hkv) * D] -> q: [B, Hq, S, D], k, v: [B, Hkv, S, D]; q/k norm, then RoPE, in float32
    "qkv_rope": f"(Tensor qkv, Tensor cos, Tensor sin, {_NORMS}, {_HEADS}) -> (Tensor, Tensor, Tensor)",
    # qkv_rope, then keys/values[:, :, position] = k, v and the INT4 copy of every page that is now complete.
    # keys, values: [B, Hkv, L, D]; k_codes, v_codes: [B, Hkv, P, 64, D/2] u8; k_scales, v_scales: [B, Hkv, P, 64] f16;
    # key_mean, key_balance: [Hkv, D] f32 (mu and lambda of quant.md; of keys per channel the direction in which queries
    # read them, zero: unknown); position: [S] int64, consecutive. The shape of
    # k_scales tells the format: of keys per channel it is [B, Hkv, P, 2, D] (formats.encode_key_pages), here and below.
    "qkv_append": (
        f"(Tensor qkv, Tensor cos, Tensor sin, {_NORMS}, Tensor(a!) keys, Tensor(b!) values, {_STORE}, {_TABLES},"
        f" Tensor position, {_HEADS}) -> (Tensor, Tensor, Tensor)"
    ),
    # Decode: qkv_append and attention in one. What a query sees: pages that were complete before this call as they
    # decode, everything else (unfinished page, tokens of this call) exactly.  -> [B, S, Hq*D]
    "attention_int4": (
        f"(Tensor qkv, Tensor cos, Tensor sin, {_NORMS}, Tensor(a!) keys, Tensor(b!) values, {_STORE}, {_TABLES},"
        f" Tensor position, Tensor? mask, float scale, {_HEADS}) -> Tensor"
    ),
    # Prefill attention after qkv_append. fresh: the call attends to its own k, v only (causal, empty cache);
    # otherwise to the cache under the rule of attention_int4, with mask: [B, 1, S, L].  -> [B, S, Hq*D]
    "attention_prefill": (
        f"(Tensor q, Tensor k, Tensor v, Tensor keys, Tensor values, {_STORE_READ}, {_TABLES}, Tensor position,"
        " Tensor? mask, float scale, bool fresh) -> Tensor"
    ),
    # An empty store for a cache that a graph makes itself.  keys: [B, Hkv, L, D] -> k_codes, k_scales, v_codes, ...
    "kv_store": "(Tensor keys, str kv_format) -> (Tensor, Tensor, Tensor, Tensor)",
    # The cache on its own: quantise the pages first..last-1 of keys, values: [B, Hkv, L, D] into the store.
    "kv_append_": f"(Tensor keys, Tensor values, {_STORE}, {_TABLES}, int first, int last) -> ()",
    # An Int4Cache layer, keys and values: [B, Hkv, 64, D], its unfinished page (slot = position % 64): appends k, v:
    # [B, Hkv, S, D]; a page that becomes complete is quantised. In qkv_append, attention_int4 and attention_prefill
    # keys and values of 64 rows beside a store of more than one page mean the same; there attention_prefill stands
    # before kv_extend_, since finished rows make room for new ones.
    "kv_extend_": (
        f"(Tensor k, Tensor v, Tensor(a!) keys, Tensor(b!) values, {_STORE}, {_TABLES}, Tensor position) -> ()"
    ),
    # kv_extend_, and keys, values: [B, Hkv, length, D] as attention sees them: pages that were complete before the call
    # as they decode, the unfinished page and the tokens of the call exactly, zeros behind.
    "kv_update": (
        f"(Tensor k, Tensor v, Tensor(a!) keys, Tensor(b!) values, {_STORE}, {_TABLES}, Tensor position,"
        " SymInt length) -> (Tensor, Tensor)"
    ),
    # k, v: [B, Hkv, S, D] as the INT4 cache gives them back, in their own dtype; encoding the result changes nothing.
    "kv_round": f"(Tensor k, Tensor v, {_TABLES}) -> (Tensor, Tensor)",
    # codes: [B, Hkv, P, 64, D/2], scales: [B, Hkv, P, 64] -> [B, Hkv, pages*64, D] f32; with mean and balance (keys)
    # the rotation is undone: balance * H(codes * scale) + mean.
    "kv_dequantize": "(Tensor codes, Tensor scales, Tensor? mean, Tensor? balance, int pages) -> Tensor",
}

RECOGNISED = (
    "rms_norm", "rotary", "swiglu", "residual", "qkv", "attention", "kv_write_", "kv_roll_", "kv_fill_", "kv_cat",
)  # fmt: skip
LINEARS = ("linear_exact", "linear_bf16", "linear_fp8", "linear_int4")

EPILOGUE_ORDER = ("bias", "swiglu", "residual")

library = torch.library.Library(NAMESPACE, "DEF")
for _name, _schema in SCHEMAS.items():
    library.define(_name + _schema)


def op(name: str) -> torch._ops.OpOverload:
    """The default overload of ``futransformer::name`` (KeyError for a name that is not in SCHEMAS)."""
    if name not in SCHEMAS:
        raise KeyError(f"futransformer has no operator {name!r}; it has {', '.join(SCHEMAS)}")
    return getattr(torch.ops.futransformer, name).default


def name_of(target: object) -> str | None:
    """The short name of one of our operators, or none for any other call target."""
    if isinstance(target, torch._ops.OpOverload) and target.namespace == NAMESPACE:
        return target._schema.name.split("::")[1]
    return None


def epilogue(*names: str) -> str:
    """The epilogue string of these names, in the one order that is allowed."""
    unknown = set(names) - set(EPILOGUE_ORDER)
    if unknown:
        raise ValueError(f"unknown epilogue {sorted(unknown)}; there are {EPILOGUE_ORDER}")
    return "|".join(n for n in EPILOGUE_ORDER if n in names)


# ---- shapes, for tracing -------------------------------------------------------------------------------------------


def _out(x: Tensor, n: int, epilogue: str) -> Tensor:
    return x.new_empty((*x.shape[:-1], n // 2 if "swiglu" in epilogue.split("|") else n))


def _heads(x: Tensor, q_heads: int, kv_heads: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    b, s = x.shape[0], x.shape[1]
    return tuple(x.new_empty((b, h, s, head_dim)) for h in (q_heads, kv_heads, kv_heads))  # type: ignore[return-value]


def _nothing(*args: object, **kwargs: object) -> None:
    return None


def _kv_store(keys: Tensor, kv_format: str) -> tuple[Tensor, ...]:
    from .formats import kv_shapes

    b, h, length, d = keys.shape
    return tuple(keys.new_empty(shape, dtype=dtype) for shape, dtype in kv_shapes(b, h, length, d, kv_format))


def _kv_cat(past: Tensor | None, x: Tensor) -> Tensor:
    length = x.shape[2] + (0 if past is None else past.shape[2])
    return x.new_empty((x.shape[0], x.shape[1], length, x.shape[3]))


FAKES: dict[str, Callable[..., Any]] = {
    "rms_norm": lambda x, weight, eps: (
        torch.empty_like(x)
        if weight is None
        else x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, weight.dtype))
    ),
    "rotary": lambda x, cos, sin: x.new_empty(x.shape),
    "swiglu": lambda gate, up: gate.new_empty(gate.shape),
    "residual": lambda x, y, scale: x.new_empty(x.shape),
    "qkv": lambda x, weights, biases, q_norm, k_norm, eps, q_heads, kv_heads, head_dim: _heads(
        x, q_heads, kv_heads, head_dim
    ),
    "attention": lambda q, k, v, mask, scale, causal: q.new_empty((q.shape[0], q.shape[2], q.shape[1] * q.shape[3])),
    "kv_write_": _nothing,
    "kv_roll_": _nothing,
    "kv_fill_": _nothing,
    "kv_cat": _kv_cat,
    "linear_exact": lambda x, weights, biases, norm, residual, eps, scale, prologue, epilogue: _out(
        x, sum(w.shape[0] for w in weights), epilogue
    ),
    "linear_bf16": lambda x, weight, bias, residual, eps, scale, prologue, epilogue: _out(x, weight.shape[0], epilogue),
    "linear_fp8": lambda x, weight, weight_scale, act, bias, residual, eps, scale, prologue, epilogue, scaling: _out(
        x, weight.shape[0], epilogue
    ),
    "mlp_fp8": lambda x, weight, weight_scale, act, bias, down, *args: x.new_empty((*x.shape[:-1], down.shape[0])),
    "linear_int4": lambda x, packed, n, k, group, bias, residual, eps, scale, prologue, epilogue, gain=None: _out(
        x, n, epilogue
    ),
    "packed_weight": lambda packed, precision, n, k, group, paired, first, rows, dtype: packed.new_empty(
        (rows, k), dtype=dtype
    ),
    "qkv_rope": lambda qkv, cos, sin, q_norm, k_norm, eps, q_heads, kv_heads, head_dim: _heads(
        qkv, q_heads, kv_heads, head_dim
    ),
    "qkv_append": lambda qkv, *args: _heads(qkv, *args[-3:]),
    "attention_int4": lambda qkv, *args: qkv.new_empty((qkv.shape[0], qkv.shape[1], args[-3] * args[-1])),
    "attention_prefill": lambda q, *args: q.new_empty((q.shape[0], q.shape[2], q.shape[1] * q.shape[3])),
    "kv_store": _kv_store,
    "kv_append_": _nothing,
    "kv_extend_": _nothing,
    "kv_update": lambda k, v, *args: (
        k.new_empty((k.shape[0], k.shape[1], args[-1], k.shape[3])),
        v.new_empty((v.shape[0], v.shape[1], args[-1], v.shape[3])),
    ),
    "kv_round": lambda k, v, mean, balance: (k.new_empty(k.shape), v.new_empty(v.shape)),
    "kv_dequantize": lambda codes, scales, mean, balance, pages: codes.new_empty(
        (codes.shape[0], codes.shape[1], pages * PAGE, codes.shape[-1] * 2), dtype=torch.float32
    ),
}

for _name, _fake in FAKES.items():
    torch.library.register_fake(f"{NAMESPACE}::{_name}", _fake, lib=library)
