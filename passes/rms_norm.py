"""RMSNorm gets its name.

    pow = x32 ** 2;  mean = pow.mean(-1, True);  r = rsqrt(mean + eps);  y = weight * (x32 * r).to(x.dtype)
 -> y = futransformer::rms_norm(x, weight, eps)

Taken: with and without a gain; the gain before or after the cast back to 16 bits (after: the norm stays in float32 and
the cast stays in the graph); ``aten.rms_norm``. Roundings are eager's own.

Refused: a subtracted mean (LayerNorm), a gain that is computed (Gemma's ``1 + w``) or is not one number per column, a
mean over anything but the last dimension or not in float32, no eps.
"""

from __future__ import annotations

import torch
from torch import fx
from torch._inductor.pattern_matcher import MULTIPLE, CallFunction, Match

from fu_compile.capture import same, value

from . import Context
from .matching import (
    anchors,
    arg,
    argument,
    aten,
    calls,
    either,
    find,
    insert,
    insert_call,
    last,
    name_of_dtype,
    one_region,
    replace,
    shape,
    sole_user,
)  # fmt: skip

NAME = "rms_norm"
CAST = aten.to.dtype


def _squares() -> list[CallFunction]:
    return [
        CallFunction(aten.pow.Tensor_Scalar, arg("x"), arg("power")),
        CallFunction(aten.mul.Tensor, arg("x"), arg("x")),
    ]


def _patterns(with_eps: bool) -> list[CallFunction]:
    found = []
    for square in _squares():
        mean = CallFunction(aten.mean.dim, square, arg("dims"), arg("keepdim"))
        inner = CallFunction(aten.add.Tensor, mean, arg("eps")) if with_eps else mean
        found += either(aten.mul.Tensor, arg("x"), CallFunction(aten.rsqrt.default, inner, _users=MULTIPLE))
    return found


PATTERNS, NO_EPS = _patterns(with_eps=True), _patterns(with_eps=False)


def run(gm: fx.GraphModule, ctx: Context) -> None:
    """Recognises every RMSNorm of ``gm``."""
    for match in find(gm, PATTERNS):
        node = match.output_node()
        reason = _refused(match) or _rewrite(gm, ctx, match)
        if reason:
            ctx.missed(NAME, node, reason)
    for match in find(gm, NO_EPS):
        ctx.missed(NAME, match.output_node(), "no eps is added to the mean of squares")
    for node in anchors(gm, aten.rms_norm.default):
        _rewrite_aten(gm, ctx, node)
    for node in anchors(gm, aten.layer_norm.default):
        ctx.missed(NAME, node, "the mean is subtracted first: this is a LayerNorm")


def _refused(match: Match) -> str | None:
    k, x = match.kwargs, match.kwargs["x"]
    if k.get("power", 2) != 2:
        return f"the mean is of power {k['power']}, not of squares"
    if len(k["dims"]) != 1 or not last(k["dims"][0], x):
        return f"the mean is over dimensions {list(k['dims'])}, not the last one"
    if k["keepdim"] is not True:
        return "the mean drops its dimension"
    if not isinstance(k["eps"], (int, float)):
        return "eps is computed, not a constant"
    if calls(x, aten.sub.Tensor) and calls(x.args[1], aten.mean.dim):
        return "the mean is subtracted first: this is a LayerNorm"
    if value(x).dtype != torch.float32:
        return f"the mean is taken in {name_of_dtype(value(x).dtype)}, not in float32"
    return None


def _rewrite(gm: fx.GraphModule, ctx: Context, match: Match) -> str | None:
    x, out = match.kwargs["x"], match.output_node()
    user = sole_user(out)
    if calls(x, CAST) and calls(user, CAST) and user.args[1] == value(x.args[0]).dtype:  # type: ignore[union-attr]
        x, out = x.args[0], user
        user = sole_user(out)  # type: ignore[arg-type]
    weight = None
    if calls(user, aten.mul.Tensor):
        other = user.args[1] if user.args[0] is out else user.args[0]  # type: ignore[union-attr]
        weight, reason = _gain(other, shape(x)[-1])
        if reason:
            return reason
        out = out if weight is None else user
    if not one_region(gm, match.output_node(), out):  # type: ignore[arg-type]
        return "something is written in place between the norm and its gain"
    new = insert(gm, out, NAME, (x, weight, float(match.kwargs["eps"])))
    if value(new).dtype != value(out).dtype:
        gm.graph.erase_node(new)
        return f"the result is {name_of_dtype(value(out).dtype)} where x and the gain give another dtype"
    replace(out, new)
    ctx.fired(NAME, new)
    return None


def _gain(node: object, columns: int) -> tuple[fx.Node | None, str | None]:
    """The gain among the factors of a norm; none when the factor is data (a gate); or why it cannot be a gain."""
    if not isinstance(node, fx.Node):
        return None, None
    root, computed = node, ""
    while root.op == "call_function":
        if calls(root, aten.add.Tensor, aten.add.Scalar, aten.mul.Tensor, aten.exp.default, aten.rsub.Scalar):
            computed = computed or str(root.target).removeprefix("aten.")
        elif not calls(root, CAST):
            return None, None
        parents = root.all_input_nodes
        if len(parents) != 1:
            return None, None
        root = parents[0]
    if value(root).dim() >= 3 and not computed:
        return None, None  # an activation that happens to be a graph input
    if computed:
        return None, f"the gain is computed from a parameter ({computed}), such as Gemma's 1 + weight"
    if value(node).dim() != 1 or not same(shape(node)[0], columns):
        return None, f"the gain has shape {list(shape(node))}, not [{columns}]"
    return node, None


def _rewrite_aten(gm: fx.GraphModule, ctx: Context, node: fx.Node) -> None:
    x, size = node.args[:2]
    weight, eps = argument(node, 2, "weight"), argument(node, 3, "eps")
    dtype = value(x).dtype
    if len(size) != 1:  # type: ignore[arg-type]
        return ctx.missed(NAME, node, f"the mean is over the last {len(size)} dimensions, not the last one")  # type: ignore[arg-type]
    if eps is None:
        return ctx.missed(NAME, node, "no eps is given")
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return ctx.missed(NAME, node, f"x is {name_of_dtype(dtype)}")
    # aten multiplies by the gain in float32 and rounds once, so in 16 bits both casts stay visible
    wide = x if dtype == torch.float32 else insert_call(gm, node, CAST, (x, torch.float32))
    new = out = insert(gm, node, NAME, (wide, weight, float(eps)))
    if dtype != torch.float32:
        out = insert_call(gm, node, CAST, (new, dtype))
    replace(node, out)
    ctx.fired(NAME, new)
    return None
