"""From what an attention reads back to the tokens of its call: through RoPE, cache writes and slices of the cache."""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from .matching import PreconditionError, anchors, aten, calls

WRITES = ("kv_write_", "kv_roll_", "kv_fill_")


def cache_writes(gm: fx.GraphModule) -> dict[fx.Node, list[fx.Node]]:
    """The in-place cache writes by the tensor they write, in graph order."""
    from fu_compile import ops

    found: dict[fx.Node, list[fx.Node]] = {}
    for node in anchors(gm, *(ops.op(name) for name in WRITES)):
        found.setdefault(node.args[0], []).append(node)  # type: ignore[arg-type]
    return found


def source(node: Any, reader: fx.Node, writes: dict, order: dict) -> fx.Node:
    """The tokens of this call behind what an attention reads.

    Args:
        node: queries, keys or values of an attention.
        reader: the attention.
        writes: :func:`cache_writes` of the graph.
        order: position of every node in the graph.

    Raises:
        PreconditionError: the cache is read before this layer writes it.
    """
    while True:
        if calls(node, "rotary"):
            node = node.args[0]
        elif calls(node, "kv_cat"):
            node = node.args[1]
        elif calls(node, operator.getitem) and calls(node.args[0], "kv_update"):
            node = node.args[0].args[node.args[1]]
        elif calls(node, aten.slice.Tensor) and node.args[0] in writes:
            node = node.args[0]
        elif node in writes:
            before = [w for w in writes[node] if order.get(w, -1) < order[reader]]
            if not before:
                raise PreconditionError("the cache is read before this layer writes it")
            node = before[-1].args[-1]
        else:
            return node
