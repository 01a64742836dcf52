"""Applies the decision: the precision of each projection, left in ``ctx.data["choose_precision"]`` for the packing.

Before -> after: the graph is unchanged; ``ctx.data["choose_precision"]`` maps each ``linear_exact`` node to its
``plan.Choice``. Projections that were fused into one (q, k, v; gate, up) get the most faithful precision that any of
them asks for, so ``overrides`` never makes a layer worse than it was told to be. A weight that is computed in the
graph (LoRA merged on the fly, weight normalisation) stays exact. Numerics: none here.
"""

from __future__ import annotations

from torch import fx

from . import Context, layer_of
from .linears import decide_group, is_op

NAME = "choose_precision"


def run(gm: fx.GraphModule, ctx: Context) -> None:
    """Chooses for every ``linear_exact`` of ``gm``."""
    chosen = {}
    for node in gm.graph.nodes:
        if is_op(node, "linear_exact"):
            chosen[node] = choice = decide_group(ctx, node.args[1], layer_of(node))
            ctx.fired(NAME, node, f"{choice.value}: {choice.reason}")
    ctx.data[NAME] = chosen
