"""The three projections in front of an attention become one operator.

    q = linear(x, wq, bq).view(B, S, Hq, D).transpose(1, 2), the same for k and v
 -> q, k, v = futransformer::qkv(x, [wq, wk, wv], [bq, bk, bv], q_norm, k_norm, eps, Hq, Hkv, D)

    the same from the columns of one linear (Phi-3)  ->  futransformer::qkv(x, [w], [b], ...)

Found from the attention backwards: through RoPE, the cache and, for Qwen3, the RMSNorm per head on q and k, which is
absorbed. Head counts and widths are those of the nodes. Refused: linears with different inputs, a norm over the whole
projection (OLMo2), anything else between the projection and the heads (a clamp), other users of a projection.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from fu_compile.capture import same, value

from . import Context
from .kv_source import cache_writes, source
from .matching import (
    FLATTEN,
    PreconditionError,
    anchors,
    aten,
    calls,
    insert,
    is_tensor,
    last,
    name_of_dtype,
    one_region,
    outputs,
    replace,
    shape,
)  # fmt: skip

NAME = "qkv"


@dataclass
class _Projection:
    """One of q, k, v, from its heads back to its linear."""

    heads: fx.Node
    """[B, H, S, D]: what the qkv operator replaces."""
    linear: fx.Node
    start: object
    """First column of the linear, 0 for a linear of its own."""
    norm: fx.Node | None


def run(gm: fx.GraphModule, ctx: Context) -> None:
    """Recognises the projections of every attention of ``gm``."""
    from fu_compile import ops

    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    writes = cache_writes(gm)
    for attention in anchors(gm, ops.op("attention")):
        try:
            sources = [source(a, attention, writes, order) for a in attention.args[:3]]
            found = [_projection(s, name) for s, name in zip(sources, ("queries", "keys", "values"), strict=True)]
            args = _arguments(found)
            place = _place(gm, found, args, order)
        except PreconditionError as refused:
            ctx.missed(NAME, attention, str(refused))
            continue
        new = insert(gm, place, NAME, args)
        for p, item in zip(found, outputs(gm, new, 3), strict=True):
            replace(p.heads, item)
        ctx.fired(NAME, new)


def _projection(heads: fx.Node, name: str) -> _Projection:
    if not calls(heads, aten.transpose.int) or {i % 4 for i in heads.args[1:]} != {1, 2}:  # type: ignore[operator]
        raise PreconditionError(f"the {name} come from {_say(heads)}, not from heads transposed to [B, H, S, D]")
    node, norm = heads.args[0], None
    if calls(node, "rms_norm"):
        norm = node
        if norm.args[1] is None:  # type: ignore[union-attr]
            raise PreconditionError(f"the norm of the {name} has no gain")
        node = norm.args[0]  # type: ignore[union-attr]
    if not calls(node, *FLATTEN) or not is_tensor(node, 4):
        raise PreconditionError(f"the {name} come from {_say(node)}, not from a projection cut into heads")
    flat = node.args[0]  # type: ignore[union-attr]
    if not is_tensor(flat, 3) or not same(shape(flat)[-1], shape(heads)[1] * shape(heads)[3]):
        raise PreconditionError(f"the {name} are not all heads of a [B, S, H*D] projection")
    start: object = 0
    linear = flat
    if calls(flat, aten.slice.Tensor) and last(flat.args[1], flat):  # type: ignore[union-attr]
        linear, start = flat.args[0], flat.args[2] or 0  # type: ignore[union-attr]
    if calls(linear, "rms_norm"):
        raise PreconditionError(f"the norm of the {name} is over the whole projection, not per head (OLMo2)")
    if not calls(linear, aten.linear.default):
        raise PreconditionError(f"{_say(linear)} stands between the linear and the {name}")
    if len(flat.users) != 1 or len(heads.args[0].users) != 1:  # type: ignore[union-attr]
        raise PreconditionError(f"the projection of the {name} has other readers")
    return _Projection(heads, linear, start, norm)  # type: ignore[arg-type]


def _place(gm: fx.GraphModule, found: list[_Projection], args: tuple, order: dict[fx.Node, int]) -> fx.Node:
    """The first of the linears that stands behind every argument and in front of every reader of the heads."""
    linears = sorted({p.linear for p in found}, key=order.__getitem__)
    if not one_region(gm, *linears):
        raise PreconditionError("something is written in place between the projections")
    made = max(order[a] for a in torch.utils._pytree.tree_leaves(args) if isinstance(a, fx.Node))
    read = min(order[u] for p in found for u in p.heads.users if u in order)
    place = next((n for n in linears if made < order[n] < read), None)
    if place is None:
        raise PreconditionError("a projection is read before the weights of the others are there")
    return place


def _say(node: object) -> str:
    return str(node.target if isinstance(node, fx.Node) and node.op == "call_function" else node)


def _arguments(found: list[_Projection]) -> tuple:
    """The arguments of the operator, when the three projections belong together."""
    q, k, v = found
    q_heads, kv_heads, head_dim = shape(q.heads)[1], shape(k.heads)[1], shape(q.heads)[3]
    if not same(shape(v.heads)[1], kv_heads) or any(not same(shape(p.heads)[3], head_dim) for p in found):
        raise PreconditionError("queries, keys and values differ in head_dim, or keys and values in heads")
    if any(p.linear.args[0] is not q.linear.args[0] for p in found):
        raise PreconditionError("queries, keys and values are projections of different inputs")
    if v.norm is not None or (q.norm is None) != (k.norm is None):
        raise PreconditionError("not both, or not only, queries and keys are normalised")
    if q.norm is not None and q.norm.args[2] != k.norm.args[2]:  # type: ignore[union-attr]
        raise PreconditionError("the norms of queries and keys have different eps")
    linears = list(dict.fromkeys(p.linear for p in found))
    if len(linears) == 1:
        starts, widths = [p.start for p in found], [shape(p.heads)[1] * head_dim for p in found]
        expected = [0, widths[0], widths[0] + widths[1]]
        if starts != expected or not same(shape(q.linear)[-1], sum(widths)):
            raise PreconditionError(f"the columns of the fused projection are cut at {starts}, not at {expected}")
    elif len(linears) != 3 or any(p.start for p in found):
        raise PreconditionError("two of queries, keys and values share a linear")
    if any(len(n.users) != (3 if len(linears) == 1 else 1) for n in linears):
        raise PreconditionError("a projection has other readers")
    biases = [n.args[2] for n in linears if len(n.args) > 2 and n.args[2] is not None]
    if biases and len(biases) != len(linears):
        raise PreconditionError("only some of the projections have a bias")
    norms = [p.norm.args[1] if p.norm is not None else None for p in (q, k)]
    eps = float(q.norm.args[2]) if q.norm is not None else 0.0  # type: ignore[arg-type]
    x = value(q.linear.args[0]).dtype
    if other := next((value(p.heads).dtype for p in found if value(p.heads).dtype != x), None):
        raise PreconditionError(f"x is {name_of_dtype(x)}, its projections are {name_of_dtype(other)} (autocast)")
    return (q.linear.args[0], [n.args[1] for n in linears], biases, *norms, eps, q_heads, kv_heads, head_dim)
