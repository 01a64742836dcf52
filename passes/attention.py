"""Attention gets its name, whichever way the model spells it.

    sdpa(q, repeat_kv(k), repeat_kv(v), mask, scale=s).transpose(1, 2).reshape(B, S, -1)
    matmul(softmax((matmul(q, k.T) * s + mask).float()).to(dtype), v).transpose(1, 2).reshape(B, S, -1)
 -> futransformer::attention(q, k, v, mask, s, causal)                                  -> [B, S, Hq*D]

``k`` and ``v`` keep their own heads: ``repeat_kv`` and ``enable_gqa`` disappear. ``causal`` only with as many keys as
queries and no mask; a mask that hides what lies behind each query and nothing else becomes it. Refused: dropout,
softcap, sinks, softmax over another dimension or not in float32, weights that are returned, values of another width.

``ctx.data["attention"]`` gets one ``Attention`` for each node: what its mask is, read from the nodes that make it.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from torch import fx

from fu_compile.capture import same, value

from . import Context, layer_of
from .causal_mask import only_causal
from .eager_attention import Parts, eager, own_heads
from .masks import Mask, classify
from .matching import (
    COPY,
    FLATTEN,
    PreconditionError,
    anchors,
    argument,
    aten,
    calls,
    insert,
    is_tensor,
    name_of_dtype,
    one_region,
    replace,
    shape,
    sole_user,
)  # fmt: skip

NAME = "attention"
SDPA = aten.scaled_dot_product_attention.default


@dataclass(frozen=True)
class Attention:
    """One recognised attention."""

    node: str
    layer: str
    mask: Mask


def run(gm: fx.GraphModule, ctx: Context) -> None:
    """Recognises every attention of ``gm`` and leaves the records in ``ctx.data["attention"]``."""
    found: list[Attention] = []
    # All layers share a mask or two.
    kind_of, is_causal = functools.cache(classify), functools.cache(only_causal)
    for node in anchors(gm, SDPA, aten.softmax.int, aten._softmax.default):
        try:
            parts = _sdpa(node) if calls(node, SDPA) else eager(node)
            if parts is None:
                continue
            if not one_region(gm, parts.first, parts.out):
                raise PreconditionError("something is written in place between the two products")
            flat = _check(parts)
        except PreconditionError as refused:
            ctx.missed(NAME, node, str(refused))
            continue
        mask, causal = parts.mask, parts.causal
        if mask is not None and same(shape(mask)[-1], shape(parts.k)[2]) and is_causal(mask):
            mask, causal = None, True  # kernels that know it leave half of the products out
        args = (parts.q, parts.k, parts.v, mask, parts.scale, causal)
        new = insert(gm, parts.out, NAME, args, like=node)
        replace(flat, new)
        kind = Mask("causal" if causal else "none") if mask is None else kind_of(mask)
        found.append(Attention(new.name, layer_of(new), kind))
        ctx.fired(NAME, new, f"mask: {kind}")
    ctx.data[NAME] = found


def _sdpa(node: fx.Node) -> Parts:
    q, k, v = node.args[:3]
    if dropout := argument(node, 4, "dropout_p", 0.0):
        raise PreconditionError(f"dropout {dropout} is active")
    scale = node.kwargs.get("scale")
    if scale is not None and not isinstance(scale, (int, float)):
        raise PreconditionError("the scale is computed, not a constant")
    if not is_tensor(q, 4):
        raise PreconditionError("the queries are not [B, H, S, D]")
    scale = 1 / math.sqrt(shape(q)[-1]) if scale is None else float(scale)
    mask, causal = argument(node, 3, "attn_mask"), bool(argument(node, 5, "is_causal", False))
    return Parts(*own_heads(q, k, v), mask, scale, causal, node, node)  # type: ignore[arg-type]


def _check(p: Parts) -> fx.Node:
    """The flattened [B, S, H*D] output of the attention, when every precondition holds."""
    (_, q_heads, s, d), (_, kv_heads, keys, _) = shape(p.q), shape(p.k)
    if not same(shape(p.v)[-1], d) or not same(shape(p.k)[-1], d):
        raise PreconditionError(f"values have {shape(p.v)[-1]} columns, queries {d}")
    if not same(shape(p.v)[1], kv_heads) or not same(q_heads % kv_heads, 0):
        raise PreconditionError(f"{q_heads} query heads do not share {kv_heads} key heads evenly")
    dtypes = [name_of_dtype(value(n).dtype) for n in (p.q, p.k, p.v, p.out)]
    if len(set(dtypes)) != 1:
        raise PreconditionError(f"queries, keys, values and result are {', '.join(dtypes)}")
    if p.causal and p.mask is not None:
        raise PreconditionError("both a mask and is_causal are given")
    if p.causal and not same(s, keys):
        raise PreconditionError(f"is_causal with {s} queries and {keys} keys")
    transposed = sole_user(p.out)
    if not calls(transposed, aten.transpose.int) or {i % 4 for i in transposed.args[1:]} != {1, 2}:  # type: ignore[union-attr, operator]
        raise PreconditionError("the output is not transposed to [B, S, H, D]")
    flat = sole_user(transposed)  # type: ignore[arg-type]
    while calls(flat, *COPY):
        flat = sole_user(flat)  # type: ignore[arg-type]
    if not calls(flat, *FLATTEN) or not is_tensor(flat, 3) or not same(shape(flat)[-1], q_heads * d):
        raise PreconditionError("the output is not flattened to [B, S, H*D]")
    return flat  # type: ignore[return-value]
