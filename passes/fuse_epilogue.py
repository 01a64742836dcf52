"""Moves what follows a projection into it: SwiGLU and the residual addition (its bias is there already).

Before -> after::

    g = linear_exact(x, [wg]); u = linear_exact(x, [wu])
    s = swiglu(g, u)                                       s = linear_exact(x, [wg, wu], .., "swiglu")
    y = linear_exact(s, [wd])                         ->   r = linear_exact(s, [wd], .., residual, scale, "residual")
    r = residual(h, y, scale)

A fused gate_up projection whose output is halved (Phi-3: chunk, split or two slices) is taken too. Preconditions: the
projections are read by nothing else, share input, prologue and gain; the first half is the gate; the two biases are
both there or both absent. The tuple is written in the order of ``ops.EPILOGUE_ORDER``. Numerics: unchanged in
``linear_exact``, which rounds after every step as eager does.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from .. import ops
from . import Context
from .linears import is_op
from .matching import PreconditionError, insert
from .packed_linear import group

aten = torch.ops.aten
NAME = "fuse_epilogue"


def run(gm: fx.GraphModule, ctx: Context) -> None:
    """Fuses the epilogues of ``gm`` in place."""
    for node in list(gm.graph.nodes):
        for name, fuse in (("swiglu", _swiglu), ("residual", _residual)):
            if is_op(node, name):
                try:
                    ctx.fired(NAME, fuse(gm, node), name)
                except PreconditionError as refused:
                    ctx.missed(NAME, node, str(refused))


def _halves(gate: fx.Node, up: fx.Node) -> fx.Node | str:
    """The node that ``gate`` and ``up`` are the first and second half of, or why they are not."""
    if gate.target is operator.getitem and up.target is operator.getitem:
        split = gate.args[0]
        if split is not up.args[0] or (gate.args[1], up.args[1]) != (0, 1) or len(split.users) != 2:
            return "gate and up are not the first and second half of one projection"
        if split.target is aten.chunk.default and split.args[1] == 2:
            return split.args[0]
        if split.target in (aten.split.Tensor, aten.split_with_sizes.default):
            sizes = {n.meta["val"].shape[-1] for n in split.users}
            return split.args[0] if len(sizes) == 1 else "the halves differ in size"
    if gate.target is aten.slice.Tensor and up.target is aten.slice.Tensor and gate.args[0] is up.args[0]:
        half = gate.meta["val"].shape[-1]
        n = gate.args[0].meta["val"].shape[-1]
        if n == 2 * half and (*gate.args, 0)[2] == 0 and up.args[2] == half and len(gate.args[0].users) == 2:
            return gate.args[0]
    return "gate and up are no projections of one input"


def _swiglu(gm: fx.GraphModule, node: fx.Node) -> fx.Node:
    gate, up = node.args
    if is_op(gate, "linear_exact") and is_op(up, "linear_exact"):
        if len(gate.users) != 1 or len(up.users) != 1:
            raise PreconditionError("gate or up is also read by something else")
        x, wg, bg, norm, res, eps, scale, prologue, epilogue = gate.args
        xu, wu, bu, norm_u, res_u, eps_u, _, prologue_u, epilogue_u = up.args
        if (x, norm, eps, prologue) != (xu, norm_u, eps_u, prologue_u):
            raise PreconditionError("gate and up do not share input and norm")
        if res or res_u or epilogue != epilogue_u or bool(bg) != bool(bu):
            raise PreconditionError("gate and up have different epilogues")
        if wg[0].meta["val"].shape != wu[0].meta["val"].shape or len(wg) != 1 or len(wu) != 1:
            raise PreconditionError("gate and up have different shapes")
        weights, biases = [*wg, *wu], [*bg, *bu]
        if isinstance(packed := group(weights), str):
            raise PreconditionError(packed)
        if packed and (reason := packed.refuses(swiglu=True)):
            raise PreconditionError(reason)
    else:
        whole = _halves(gate, up)
        if isinstance(whole, str) or not is_op(whole, "linear_exact"):
            raise PreconditionError(whole if isinstance(whole, str) else "gate and up come from no projection")
        x, weights, biases, norm, res, eps, scale, prologue, epilogue = whole.args
        if res or len(weights) != 1:
            raise PreconditionError("the gate_up projection already has an epilogue")
    fused = ops.epilogue(*filter(None, epilogue.split("|")), "swiglu")
    new = insert(gm, node, "linear_exact", (x, weights, biases, norm, None, eps, scale, prologue, fused))
    node.replace_all_uses_with(new)
    gm.graph.erase_node(node)
    return new


def _residual(gm: fx.GraphModule, node: fx.Node) -> fx.Node:
    stream, y, scale = node.args
    if not is_op(y, "linear_exact"):
        raise PreconditionError(f"{y.name} is no projection")
    x, weights, biases, norm, res, eps, _, prologue, epilogue = y.args
    if len(y.users) != 1:
        raise PreconditionError("the projection is also read by something else")
    if res is not None or "swiglu" in epilogue:
        raise PreconditionError(f"the projection already has the epilogue {epilogue}")
    if stream.meta["val"].dtype != y.meta["val"].dtype:
        raise PreconditionError(f"the stream is {stream.meta['val'].dtype}, the projection {y.meta['val'].dtype}")
    fused = ops.epilogue(*filter(None, epilogue.split("|")), "residual")
    new = insert(gm, node, "linear_exact", (x, weights, biases, norm, stream, eps, scale, prologue, fused), like=y)
    node.replace_all_uses_with(new)
    gm.graph.erase_node(node)
    gm.graph.erase_node(y)
    return new
