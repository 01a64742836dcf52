"""What the passes that handle projections share: their names, and the precision of a group of them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from .. import ops
from ..plan import PRECISIONS, Choice
from . import Context


def is_op(node: object, name: str) -> bool:
    """Whether ``node`` calls ``futransformer::name``."""
    return isinstance(node, fx.Node) and ops.name_of(node.target) == name


def weight_name(ctx: Context, weight: fx.Node, layer: str = "") -> str:
    """Module path of the projection that owns ``weight``: its parameter path without ``.weight``."""
    path = ctx.path(weight)
    tied = path.endswith(("embed_tokens.weight", "wte.weight"))
    return layer if (tied and layer) or not path else path.removesuffix(".weight")


def decide_group(ctx: Context, weights: Sequence[fx.Node], layer: str = "", swiglu: bool = False) -> Choice:
    """Precision of projections that are packed together: the most faithful that any of them asks for.

    Weights that a model brings packed have the precision they were packed in; ``swiglu``: the projections end in it.
    """
    from .packed_linear import group

    packed = group(weights)
    if isinstance(packed, str):
        return Choice("exact", packed)
    if packed is not None:
        refused = packed.refuses(swiglu)
        return Choice("exact", refused) if refused else Choice(packed.precision, "packed in the model")
    decision = ctx.decision
    for w in weights:
        if not ctx.is_parameter(w):
            return Choice("exact", f"{w.name} is computed in the graph: it cannot be packed")
    choices = [decision.precision(weight_name(ctx, w, layer)) for w in weights]
    return min(choices, key=lambda c: PRECISIONS.index(c.value))
