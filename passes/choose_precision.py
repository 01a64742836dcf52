"""Applies the decision: the precision of each projection, left in ``ctx.data["choose_precision"]`` for the packing.

Before -> after: the graph is unchanged; ``ctx.data["choose_precision"]`` maps each ``linear_exact`` node to its
``plan.Choice``. Projections that were fused into one (q, k, v; gate, up) get the most faithful precision that any of
them asks for, so ``overrides`` never makes a layer worse than it was told to be. A weight that is computed in the
graph (LoRA merged on the fly, weight normalisation) stays exact, and so do two projections in a row: the low-rank
branch of an adapter, which is small to read and may be all that was trained. Weights that the model brings packed
(fu_compile.quantize) keep their precision, whatever the options say. Numerics: none here.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from ..plan import Choice
from . import Context, layer_of
from .linears import decide_group, is_op
from .packed_linear import rows_of

NAME = "choose_precision"


def run(gm: fx.GraphModule, ctx: Context) -> None:
    """Chooses for every ``linear_exact`` of ``gm``."""
    chosen = {}
    for node in gm.graph.nodes:
        if is_op(node, "linear_exact"):
            choice = decide_group(ctx, node.args[1], layer_of(node), "swiglu" in node.args[8])
            if choice.value != "exact" and rows_of(node.args[1][0]) is None and low_rank(node):
                choice = Choice("exact", "a low-rank branch (adapter) keeps the model's dtype")
            chosen[node] = choice
            ctx.fired(NAME, node, f"{choice.value}: {choice.reason}")
    ctx.data[NAME] = chosen


def low_rank(node: fx.Node) -> bool:
    """Whether ``node`` is one of two projections in a row, the first of which narrows: y = B(A(x))."""
    for first in (node, node.args[0]):
        second: Any = next(iter(first.users), None) if is_op(first, "linear_exact") else None
        if not is_op(second, "linear_exact") or len(first.users) != 1 or second.args[0] is not first or first.args[8]:
            continue
        if first.args[1][0].meta["val"].shape[0] < first.args[0].meta["val"].shape[-1]:
            return True
    return False
