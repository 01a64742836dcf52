"""Weights that were packed before the model was compiled (fu_compile.quantize) go to the front of the graph.

    w = packed_weight(block, "int4", n, k, 128, ...)        in front of each linear
 ->                                                          all of them behind the inputs, each block's rows once

``PackedLinear`` traces as ``aten.linear`` of a ``packed_weight``: the recognising passes see ordinary linears, and no
such weight stands between the projections of one attention. Later passes ask here which weights are packed
(:func:`rows_of`), and which of them one kernel can read together as they stand (:func:`group`). Nothing is ever packed
again: projections that are not one run of one block stay apart. Numerics: none here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from ..packed import Rows
from . import Context
from .linears import is_op

NAME = "packed_linear"


def run(gm: fx.GraphModule, ctx: Context) -> None:
    """Moves the packed weights of ``gm`` to the front; equal ones become one."""
    seen: dict[tuple[Any, ...], fx.Node] = {}
    packed = [n for n in gm.graph.nodes if is_op(n, "packed_weight")]
    if not packed:
        return
    last = [n for n in gm.graph.nodes if n.op == "placeholder"][-1]
    for node in packed:
        if node.args[0].op != "placeholder":
            ctx.missed(NAME, node, f"the packed block {node.args[0].name} is computed in the graph")
            continue
        first = seen.setdefault(node.args, node)
        if first is not node:
            node.replace_all_uses_with(first)
            gm.graph.erase_node(node)
            continue
        last.append(node)
        last = node
        ctx.fired(NAME, node, f"{node.args[1]}, {node.args[7]} x {node.args[3]}")


def rows_of(weight: object) -> Rows | None:
    """The rows that a ``packed_weight`` node reads, or none for any other weight."""
    if not is_op(weight, "packed_weight") or weight.args[0].op != "placeholder":  # type: ignore[attr-defined]
        return None
    return Rows(*weight.args[1:8])  # type: ignore[attr-defined]


def group(weights: Sequence[fx.Node]) -> Rows | str | None:
    """The one run of rows that these weights are, or why they are none; none where nothing is packed."""
    rows = [rows_of(w) for w in weights]
    if not any(rows):
        return None
    if not all(rows) or len({w.args[0] for w in weights}) > 1:
        return "only some of the weights are packed, or not into the same block"
    joined = rows[0].joined(tuple(rows[1:]))  # type: ignore[union-attr,arg-type]
    return joined or "the weights are packed in another order"
