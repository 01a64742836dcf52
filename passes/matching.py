"""What the recognising passes share: finding structures with Inductor's pattern matcher, and inserting our operators.

Structures are written in the vocabulary of ``torch._inductor.pattern_matcher`` and matched by it, and a match that
crosses a mutation is refused by its mutation regions. ``PatternMatcherPass.apply`` itself is not used: it skips nodes
on the meta device, where whole models are examined without memory, and recounts the regions at every rewritten
mutation, which is quadratic in layers. A pass collects its matches first and rewrites afterwards, so no match sees a
half-rewritten graph.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._inductor.pattern_matcher import (
    CallFunction,
    CallFunctionVarArgs,
    KeywordArg,
    Match,
    compute_mutation_region_ids,
    get_mutation_region_id,
    is_match,
    should_compute_mutation_region_ids,
)

from fu_compile import ops
from fu_compile.capture import same, value

aten = torch.ops.aten

FLATTEN = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
_OWN = ("val", "tensor_meta", "example_value", "mutation_region_id")
"""Metadata that belongs to one node and is never inherited."""

COPY = (aten.contiguous.default, aten.clone.default)


class PreconditionError(Exception):
    """The first precondition that failed, as a sentence for the report; caught by the pass that raises it."""


def find(gm: fx.GraphModule, patterns: Sequence[CallFunction | CallFunctionVarArgs]) -> list[Match]:
    """All matches of the patterns in graph order, one for each output node; the first pattern that matches counts."""
    if should_compute_mutation_region_ids(gm.graph):
        compute_mutation_region_ids(gm.graph)
    matches: dict[fx.Node, Match] = {}
    for pattern in patterns:
        for target in pattern.fns:
            for node in gm.graph.find_nodes(op="call_function", target=target, sort=False):
                if node in matches:
                    continue
                match = pattern.match(node)
                if is_match(match) and one_region(gm, *match.nodes):
                    matches[node] = match
    return [matches[node] for node in sorted(matches)]


def one_region(gm: fx.GraphModule, *nodes: fx.Node) -> bool:
    """Whether nothing is written in place between the first and the last of the nodes."""
    return len({get_mutation_region_id(gm.graph, n) for n in nodes}) == 1


def anchors(gm: fx.GraphModule, *targets: object) -> list[fx.Node]:
    """All calls of the targets in graph order, whatever their arguments."""
    return [m.output_node() for m in find(gm, [CallFunctionVarArgs(list(targets))])]


def either(target: Any, a: Any, b: Any) -> list[CallFunction]:
    """``target(a, b)`` and ``target(b, a)``."""
    return [CallFunction(target, a, b), CallFunction(target, b, a)]


def arg(name: str) -> KeywordArg:
    """Any argument, bound to a name; the same name twice must bind to the same thing."""
    return KeywordArg(name)


def calls(node: object, *targets: object) -> bool:
    """Whether ``node`` calls one of the targets (an operator, or the short name of one of ours)."""
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return False
    return node.target in targets or ops.name_of(node.target) in targets


def argument(node: fx.Node, position: int, name: str, default: Any = None) -> Any:
    """An argument by position or keyword."""
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def shape(node: object) -> torch.Size:
    """The (possibly symbolic) shape of a node's value."""
    return value(node).shape


def is_tensor(node: object, dim: int | None = None) -> bool:
    """Whether a node has a tensor value, of ``dim`` dimensions where given."""
    v = value(node) if isinstance(node, fx.Node) else None
    return isinstance(v, Tensor) and (dim is None or v.dim() == dim)


def last(dim: object, node: fx.Node) -> bool:
    """Whether ``dim`` is the last dimension of ``node``."""
    return dim in (-1, value(node).dim() - 1)


def sole_user(node: fx.Node) -> fx.Node | None:
    """The one user of ``node``, or none when there are more or fewer."""
    return next(iter(node.users)) if len(node.users) == 1 else None


def insert(
    gm: fx.GraphModule, before: fx.Node, name: str, args: tuple[Any, ...], like: fx.Node | None = None
) -> fx.Node:
    """Puts ``futransformer::name(*args)`` in front of ``before``, with the origin of ``like`` (``before`` by default).

    ``meta["val"]`` comes from the operator's fake kernel, so later passes see the shape and dtype of the new node.
    """
    return insert_call(gm, before, ops.op(name), args, like)


def insert_call(
    gm: fx.GraphModule, before: fx.Node, target: Any, args: tuple[Any, ...], like: fx.Node | None = None
) -> fx.Node:
    """Like ``insert`` for any operator."""
    with gm.graph.inserting_before(before):
        node = gm.graph.create_node("call_function", target, args, name=ops.name_of(target))
    _describe(node, like or before)
    return node


def outputs(gm: fx.GraphModule, node: fx.Node, count: int) -> list[fx.Node]:
    """The ``count`` results of an operator that returns a tuple, as nodes behind it."""
    with gm.graph.inserting_before(node.next):
        items = [gm.graph.call_function(operator.getitem, (node, i)) for i in range(count)]
    for item, val in zip(items, node.meta["val"], strict=True):
        item.meta = {**{k: v for k, v in node.meta.items() if k not in _OWN}, "val": val}
    return items


def _describe(node: fx.Node, like: fx.Node) -> None:
    node.meta = {k: v for k, v in like.meta.items() if k not in _OWN}
    args, kwargs = fx.map_arg((node.args, node.kwargs), value)
    modes = {v.fake_mode for v in torch.utils._pytree.tree_leaves((args, kwargs)) if hasattr(v, "fake_mode")}
    with next(iter(modes)):
        node.meta["val"] = node.target(*args, **kwargs)  # type: ignore[operator]


def replace(old: fx.Node, new: fx.Node) -> None:
    """Lets every user of ``old`` read ``new``; ``old`` and what only it needed become dead."""
    old.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)


def kv_base(node: fx.Node) -> tuple[fx.Node, int]:
    """The keys or values under ``repeat_kv`` (unsqueeze, expand, reshape) and how often each head is repeated."""
    expand = node.args[0] if calls(node, *FLATTEN) else None
    unsqueeze = expand.args[0] if calls(expand, aten.expand.default) else None  # type: ignore[union-attr]
    if not calls(unsqueeze, aten.unsqueeze.default) or unsqueeze.args[1] != 2:  # type: ignore[union-attr]
        return node, 1
    base = unsqueeze.args[0]  # type: ignore[union-attr]
    wide, flat = shape(expand), shape(node)
    plain = is_tensor(base, 4) and len(wide) == 5 and len(flat) == 4
    if plain and isinstance(wide[2], int) and same(flat[1], wide[1] * wide[2]) and same(flat[2], wide[3]):
        return base, wide[2]  # type: ignore[return-value]
    return node, 1


def name_of_dtype(dtype: torch.dtype) -> str:
    """``bfloat16`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")
