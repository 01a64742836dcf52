"""Residual additions get their name.

    h = x + linear(...)            ->  h = futransformer::residual(x, linear(...), 1.0)
    h = x + linear(...) * 0.22     ->  h = futransformer::residual(x, linear(...), 0.22)       (Granite)

``x`` is the stream, ``y`` ends in a linear (o_proj, down_proj); both orders of the sum.

Refused: broadcasting, ``alpha``, two linears (LoRA: a branch, not a stream), a norm between the linear and the sum.
"""

from __future__ import annotations

from typing import Any

from torch import fx
from torch._inductor.pattern_matcher import CallFunctionVarArgs

from fu_compile.capture import same_shape, value

from . import Context
from .matching import aten, calls, find, insert, is_tensor, name_of_dtype, replace, shape

NAME = "residual"
PATTERNS = [CallFunctionVarArgs([aten.add.Tensor, aten.add_.Tensor])]


def run(gm: fx.GraphModule, ctx: Context) -> None:
    """Recognises every residual addition of ``gm``."""
    for match in find(gm, PATTERNS):
        node = match.output_node()
        if len(node.args) != 2 or not all(is_tensor(a) for a in node.args):
            continue
        branches = [_branch(a) for a in node.args]
        if branches == [None, None]:
            if reason := _near_miss(node):
                ctx.missed(NAME, node, reason)
            continue
        index = 1 if branches[1] is not None else 0
        stream, (y, scale) = node.args[1 - index], branches[index]  # type: ignore[misc]
        reason = _refused(node, stream, y, branches)
        if reason:
            ctx.missed(NAME, node, reason)
            continue
        new = insert(gm, node, NAME, (stream, y, scale))
        replace(node, new)
        ctx.fired(NAME, new)


def _branch(node: Any) -> tuple[fx.Node, float] | None:
    """The linear at the end of a branch and the number it is scaled by."""
    scale = 1.0
    if calls(node, aten.mul.Tensor, aten.mul.Scalar) and len(node.users) == 1:  # type: ignore[union-attr]
        a, b = node.args  # type: ignore[union-attr]
        a, b = (b, a) if isinstance(a, (int, float)) else (a, b)
        if not isinstance(b, (int, float)):
            return None
        node, scale = a, float(b)
    return (node, scale) if calls(node, aten.linear.default) else None  # type: ignore[return-value]


def _refused(node: fx.Node, stream: object, y: fx.Node, branches: list) -> str | None:
    if node.target is aten.add_.Tensor:
        return "the sum is written in place"
    if node.kwargs.get("alpha", 1) != 1:
        return f"the second term is scaled by alpha = {node.kwargs['alpha']}"
    if None not in branches:
        return "both terms are linears: neither is a residual stream"
    if not same_shape(value(stream), value(y)):
        return f"the terms broadcast: {list(shape(stream))} and {list(shape(y))}"
    if value(stream).dtype != value(y).dtype:
        return f"the stream is {name_of_dtype(value(stream).dtype)}, the branch is {name_of_dtype(value(y).dtype)}"
    if len(y.users) != 1:
        return "the branch has other readers"
    return None


def _near_miss(node: fx.Node) -> str | None:
    """Sums whose one term is a linear behind something that a residual may not hold."""
    for term in node.args:
        if calls(term, "rms_norm") and calls(term.args[0], aten.linear.default):  # type: ignore[union-attr]
            return "a norm stands between the linear and the sum (post-norm)"
        if calls(term, aten.add.Tensor) and all(_branch(a) for a in term.args):  # type: ignore[union-attr]
            return "the branch is a sum of linears (an adapter, or a parallel block)"
        if calls(term, aten.dropout.default) and calls(term.args[0], aten.linear.default):  # type: ignore[union-attr]
            return "dropout is active"
    return None
