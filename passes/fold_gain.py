"""Folds the RMSNorm gain into the weight behind it: g * norm(x) @ W.T == norm(x) @ (W * diag(g)).T

Before -> after (``ctx.data["fold_gain"]`` then maps the node to the gain that its packed weight takes in)::

    linear_exact(x, [w], .., norm=g, "rms")    ->    linear_exact(x, [w], .., norm=None, "rms")

The product is computed in float32 when the weight is packed, before it is rounded, into the packed copy: the user's
parameters keep their values, so a tied head and an embedding may share them, and a gain of zero is as good as any
other. Preconditions: ``bf16`` or ``fp8``, whose rounding is relative, and a gain that is a parameter.

Never before INT4: a group of 128 columns shares one scale, so the largest gain among them sets everybody's step
(SmolLM2, round to nearest, WikiText-2: +0.80 NLL with the gain folded, +0.27 without). There the gain stays an operand
of the linear (pack_weights). ``exact`` keeps eager's order. Weights that come packed with the
model are what they are: there the norm stays an operator before them (FP8) or an operand (INT4).
"""

from __future__ import annotations

from torch import fx

from . import Context
from .packed_linear import rows_of

NAME = "fold_gain"
FOLDED = ("bf16", "fp8")
"""Precisions whose weights take the gain in."""


def run(gm: fx.GraphModule, ctx: Context) -> None:
    """Folds every gain of ``gm`` that may be folded."""
    folded: dict[fx.Node, fx.Node] = {}
    for node, choice in ctx.data["choose_precision"].items():
        gain = node.args[3]
        if gain is None or choice.value not in FOLDED or rows_of(node.args[1][0]) is not None:
            continue
        if not ctx.is_parameter(gain):
            ctx.missed(NAME, node, f"the gain {gain.name} is no parameter of the model")
        else:
            folded[node] = gain
            node.update_arg(3, None)
            ctx.fired(NAME, node)
    ctx.data[NAME] = folded
