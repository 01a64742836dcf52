"""Rotary position embedding gets its name.

    half = cat([-x[..., R/2:], x[..., :R/2]], -1);  y = x * cos.unsqueeze(1) + half * sin.unsqueeze(1)
 -> y = futransformer::rotary(x, cos, sin)                                             x: [B, H, S, R]

    partial:  y = cat([rotate(x[..., :R]), x[..., R:]], -1)  ->  futransformer::rotary(x, cos, sin)

``cos`` and ``sin`` ([1 or B, S, R]) are the graph's own nodes, never recomputed: whatever made them (llama3, linear,
dynamic, yarn with its attention factor) stays as it is.

Refused: interleaved pairs (GPT-J), swapped sign, other layouts than [B, H, S, D], cos and sin of another dtype than x.
"""

from __future__ import annotations

import itertools
import operator

from torch import fx
from torch._inductor.pattern_matcher import MULTIPLE, CallFunction, CallFunctionVarArgs, Match

from fu_compile.capture import same, value

from . import Context
from .matching import (
    FLATTEN,
    arg,
    aten,
    calls,
    find,
    insert,
    is_tensor,
    last,
    name_of_dtype,
    one_region,
    replace,
    shape,
    sole_user,
)  # fmt: skip

NAME = "rotary"
END = 9223372036854775807


def _halves() -> list[CallFunction]:
    low = CallFunction(aten.slice.Tensor, arg("x"), arg("dim_low"), arg("start_low"), arg("end_low"), _users=MULTIPLE)
    high = CallFunction(
        aten.slice.Tensor, arg("x"), arg("dim_high"), arg("start_high"), arg("end_high"), _users=MULTIPLE
    )
    chunk = CallFunction(aten.chunk.default, arg("x"), 2, arg("dim_chunk"), _users=MULTIPLE)
    first, second = (CallFunction(operator.getitem, chunk, i, _users=MULTIPLE) for i in (0, 1))
    pairs = [(high, low), (second, first)]
    return [
        CallFunction(aten.cat.default, [CallFunction(aten.neg.default, high), low], arg("dim")) for high, low in pairs
    ]


def _sums(turned: list) -> list[CallFunction]:
    """``x * cos + turned * sin`` with every order of factors and terms."""
    found = []
    for half, flip_cos, flip_sin, flip_sum in itertools.product(turned, *[(False, True)] * 3):
        direct = CallFunction(aten.mul.Tensor, *((arg("cos"), arg("x")) if flip_cos else (arg("x"), arg("cos"))))
        other = CallFunction(aten.mul.Tensor, *((arg("sin"), half) if flip_sin else (half, arg("sin"))))
        found.append(CallFunction(aten.add.Tensor, *((other, direct) if flip_sum else (direct, other))))
    return found


PATTERNS = _sums(_halves())
NEAR = _sums([CallFunctionVarArgs([aten.cat.default, aten.flatten.using_ints, *FLATTEN])])


def run(gm: fx.GraphModule, ctx: Context) -> None:
    """Recognises every rotation of queries and keys in ``gm``."""
    seen = set()
    for match in find(gm, PATTERNS):
        node = match.output_node()
        seen.add(node)
        reason = _refused(match)
        if reason:
            ctx.missed(NAME, node, reason)
            continue
        x, out = match.kwargs["x"], node
        cat = sole_user(node)
        if _is_partial(x, node, cat) and one_region(gm, node, cat):  # type: ignore[arg-type]
            x, out = x.args[0], cat  # type: ignore[assignment]
        new = insert(gm, out, NAME, (x, match.kwargs["cos"].args[0], match.kwargs["sin"].args[0]), like=node)
        replace(out, new)
        ctx.fired(NAME, new)
    for match in find(gm, NEAR):
        turned = next(n for n in match.nodes if calls(n, aten.cat.default, aten.flatten.using_ints, *FLATTEN))
        reason = _near_miss(turned)
        if match.output_node() not in seen and reason:
            ctx.missed(NAME, match.output_node(), reason)


def _refused(match: Match) -> str | None:
    k, x = match.kwargs, match.kwargs["x"]
    if not is_tensor(x, 4):
        return f"x has {value(x).dim()} dimensions, not [B, H, S, D]"
    columns = shape(x)[-1]
    dims = [k[d] for d in ("dim", "dim_low", "dim_high", "dim_chunk") if d in k]
    if not all(last(d, x) for d in dims):
        return "the halves are not halves of the last dimension"
    if columns % 2:
        return f"the {columns} rotated columns have no halves"
    if "dim_low" in k and (k["start_low"] or k["end_low"] != columns // 2 or k["start_high"] != columns // 2):
        return "x is not cut in the middle"
    if "dim_low" in k and k["end_high"] not in (END, columns):
        return "x is not cut in the middle"
    for name in ("cos", "sin"):
        node = k[name]
        if not calls(node, aten.unsqueeze.default) or not is_tensor(node.args[0], 3):
            return f"{name} is not a [B, S, R] tensor with a dimension for the heads"
        if node.args[1] not in (1, -3):
            return f"{name} gets its head dimension at {node.args[1]}: x is not [B, H, S, D]"
        if value(node).dtype != value(x).dtype:
            return f"{name} is {name_of_dtype(value(node).dtype)}, x is {name_of_dtype(value(x).dtype)}"
        if not same(shape(node)[-1], columns):
            return f"{name} has {shape(node)[-1]} columns, x has {columns}"
    return None


def _is_partial(x: fx.Node, rotated: fx.Node, cat: fx.Node | None) -> bool:
    """Whether ``cat`` joins the rotated first columns of a tensor with its other columns."""
    if not calls(x, aten.slice.Tensor) or not calls(cat, aten.cat.default) or not is_tensor(x.args[0], 4):
        return False
    parts, columns = cat.args[0], shape(x)[-1]  # type: ignore[union-attr]
    if len(parts) != 2 or parts[0] is not rotated or not last((*cat.args, 0)[1], cat):  # type: ignore[arg-type, index, union-attr]
        return False
    rest = parts[1]  # type: ignore[index]
    whole = shape(x.args[0])[-1]
    return (
        calls(rest, aten.slice.Tensor)
        and rest.args[0] is x.args[0]  # type: ignore[union-attr]
        and last(x.args[1], x) and last(rest.args[1], rest)  # type: ignore[union-attr, arg-type]
        and x.args[2] in (0, None)
        and same(rest.args[2], columns)  # type: ignore[union-attr]
        and same(shape(rest)[-1], whole - columns)
    )  # fmt: skip


def _near_miss(turned: fx.Node) -> str | None:
    if calls(turned, aten.cat.default):
        parts = list(turned.args[0])  # type: ignore[arg-type]
        negated = [calls(p, aten.neg.default) for p in parts]
        if negated == [False, True]:
            return "the sign is swapped: the first half is negated"
        if negated == [True, False]:
            return "the two halves are not halves of x"
        return None
    stack = turned.args[0]
    if calls(stack, aten.stack.default) and any(calls(p, aten.neg.default) for p in stack.args[0]):  # type: ignore[union-attr]
        return "pairs are interleaved (GPT-J), not halves"
    return None
