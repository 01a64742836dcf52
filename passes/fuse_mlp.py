"""Joins the FP8 projections of an MLP, so that what lies between them never leaves e4m3.

Before -> after::

    s = linear_fp8(x, w, ws, act, b, .., "rms", "swiglu", "delayed")
    y = linear_fp8(s, d, ds, down_act, db, residual, .., "", "residual", "delayed")
      ->
    y = mlp_fp8(x, w, ws, act, b, d, ds, down_act, db, residual, .., "rms", "residual", "delayed")

Preconditions: the second is the only reader of the first and takes it as it is (no prologue), both quantise their
input by the same rule, and that rule knows the scale before the row is there (``delayed``, ``static``). Numerics: one
rounding less, that of the row between the two to the model's dtype.
"""

from __future__ import annotations

from torch import fx

from . import Context
from .linears import is_op
from .matching import insert

NAME = "fuse_mlp"


def run(gm: fx.GraphModule, ctx: Context) -> None:
    """Joins the MLPs of ``gm`` in place."""
    for node in list(gm.graph.nodes):
        if is_op(node, "linear_fp8") and is_op(node.args[0], "linear_fp8"):
            refused = _refuses(node.args[0], node)
            if refused:
                ctx.missed(NAME, node, refused)
            else:
                ctx.fired(NAME, _join(gm, node.args[0], node))


def _refuses(first: fx.Node, second: fx.Node) -> str | None:
    if "swiglu" not in first.args[9].split("|"):
        return "the row between the projections has no SwiGLU"
    if first.args[5] is not None:
        return "a residual is added between the projections"
    if len(first.users) != 1:
        return "the row between the projections is also read by something else"
    if second.args[8]:
        return "the row between the projections is normalised"
    if "swiglu" in second.args[9].split("|"):
        return "the second projection has a SwiGLU of its own"
    scalings = {first.args[10], second.args[10]}
    if len(scalings) != 1 or not scalings <= {"delayed", "static"}:
        return f"the inputs are scaled by the rules {' and '.join(sorted(scalings))}"
    return None


def _join(gm: fx.GraphModule, first: fx.Node, second: fx.Node) -> fx.Node:
    x, weight, weight_scale, act, bias, _, eps, _, prologue, _, scaling = first.args
    _, down, down_scale, down_act, down_bias, residual, _, scale, _, epilogue, _ = second.args
    args = (x, weight, weight_scale, act, bias, down, down_scale, down_act, down_bias, residual, eps, scale)
    new = insert(gm, second, "mlp_fp8", (*args, prologue, epilogue, scaling), like=first)
    second.replace_all_uses_with(new)
    gm.graph.erase_node(second)
    gm.graph.erase_node(first)
    return new
