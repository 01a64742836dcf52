"""Gives every projection its operator, with the RMS norm before it as prologue.

Before -> after::

    n = rms_norm(x, g, eps)
    y = linear(n, w, b)                   y = linear_exact(x, [w], [b], g, .., "rms", "bias")

    n = rms_norm(x, g, eps)               raw = linear_exact(x, [wq, wk, wv], [], g, .., "rms", "")
    q, k, v = qkv(n, [wq, wk, wv])   ->   q, k, v = qkv_rope(raw, cos, sin, q_norm, k_norm, ...)
    q = rotary(q, cos, sin) ...

``linear_exact`` is the common form: later passes give it epilogues and a precision. Preconditions: the norm is read by
projections only (a hidden state that is returned, or a LoRA branch, keeps the norm where it is); q and k are rotated
by the same cos and sin and read by nothing else. Where ``qkv`` stays exact it stays whole, with eager's own roundings.
"""

from __future__ import annotations

import torch
from torch import fx

from .. import ops
from . import Context
from .linears import decide_group, is_op
from .matching import insert, insert_call, outputs
from .packed_linear import group

aten = torch.ops.aten
NAME = "fuse_prologue"


def run(gm: fx.GraphModule, ctx: Context) -> None:
    """Rewrites the projections of ``gm`` in place."""
    for node in list(gm.graph.nodes):
        if node.target is aten.linear.default:
            _linear(gm, node)
        elif is_op(node, "qkv"):
            _qkv(gm, ctx, node)
    for norm in [n for n in gm.graph.nodes if is_op(n, "rms_norm")]:
        _norm(gm, ctx, norm)


def _linear(gm: fx.GraphModule, node: fx.Node) -> None:
    x, weight, bias = (*node.args, None)[:3]
    biases = [] if bias is None else [bias]
    args = (x, [weight], biases, None, None, 0.0, 1.0, "", ops.epilogue(*["bias"] * len(biases)))
    node.replace_all_uses_with(insert(gm, node, "linear_exact", args))
    gm.graph.erase_node(node)


def _qkv(gm: fx.GraphModule, ctx: Context, node: fx.Node) -> None:
    x, weights, biases, *rest = node.args
    apart = isinstance(group(weights), str)  # packed, but not as one run of rows: one linear each
    if not apart and decide_group(ctx, weights).value == "exact":
        return
    parts = {n.args[1]: n for n in node.users}
    rotaries = []
    for i, what in enumerate(("q", "k")):
        users = list(parts[i].users) if i in parts else []
        if len(users) != 1 or not is_op(users[0], "rotary"):
            ctx.missed(NAME, node, f"{what} is not read by one rotary embedding alone")
            return
        rotaries.append(users[0])
    if rotaries[0].args[1:] != rotaries[1].args[1:]:
        ctx.missed(NAME, node, "q and k are rotated by different cos and sin")
        return
    first = min(u for part in parts.values() for u in part.users)
    if first not in rotaries:
        ctx.missed(NAME, node, "v is read before q and k are rotated")
        return
    steps = (None, None, 0.0, 1.0, "", ops.epilogue(*["bias"] * bool(biases)))
    if apart:
        parts3 = [
            insert(gm, first, "linear_exact", (x, [w], biases[i : i + 1], *steps), like=node)
            for i, w in enumerate(weights)
        ]
        raw = insert_call(gm, first, aten.cat.default, (parts3, -1), like=node)
    else:
        raw = insert(gm, first, "linear_exact", (x, weights, biases, *steps), like=node)
    fused = insert(gm, first, "qkv_rope", (raw, *rotaries[0].args[1:], *rest), like=node)
    for old, new in zip((*rotaries, parts[2]), outputs(gm, fused, 3), strict=True):
        old.replace_all_uses_with(new)
        gm.graph.erase_node(old)
    for dead in (parts[0], parts[1], node):
        gm.graph.erase_node(dead)
    ctx.fired(NAME, fused, "qkv with RoPE")


def _norm(gm: fx.GraphModule, ctx: Context, norm: fx.Node) -> None:
    x, gain, eps = norm.args
    others = [u for u in norm.users if not (is_op(u, "linear_exact") and u.args[0] is norm and not u.args[7])]
    if others and all(is_op(u, "qkv") for u in others):
        return  # exact: the norm keeps its own roundings
    if others:
        ctx.missed(NAME, norm, f"the norm is also read by {others[0].name}, which is no projection")
        return
    if gain is None:
        ctx.missed(NAME, norm, "the norm has no gain")
        return
    if gain.meta["val"].dtype != x.meta["val"].dtype:
        ctx.missed(NAME, norm, f"the gain is {gain.meta['val'].dtype}, the stream {x.meta['val'].dtype}")
        return
    for user in list(norm.users):
        _, weights, biases, _, residual, _, scale, _, epilogue = user.args
        user.args = (x, weights, biases, gain, residual, eps, scale, "rms", epilogue)
        ctx.fired(NAME, user)
    gm.graph.erase_node(norm)
