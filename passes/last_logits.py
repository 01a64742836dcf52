"""Runs the final norm and the head only on the rows whose logits are used.

Before -> after::

    n = rms_norm(x, w)                 x' = slice(x, 1, -1, end)
    s = slice(n, 1, -1, end)     ->    s  = rms_norm(x', w)
    y = linear(s, head)                y  = linear(s, head)

and the same for ``slice(linear(n))``. transformers slices the hidden states itself (``logits_to_keep``), but behind the
norm. Preconditions: the slice is the only reader of what it cuts and cuts along the tokens (dim 1 of a 3-D tensor).
Numerics: exact, every row is computed as before.
"""

from __future__ import annotations

import torch
from torch import fx

from . import Context
from .matching import insert_call

aten = torch.ops.aten
NAME = "last_logits"


def _row_wise(node: object) -> bool:
    if not isinstance(node, fx.Node):
        return False
    return node.target in (aten.linear.default, torch.ops.futransformer.rms_norm.default)


def run(gm: fx.GraphModule, ctx: Context) -> None:
    """Moves token slices above the row-wise operators that feed them."""
    work = [n for n in gm.graph.nodes if n.target is aten.slice.Tensor]
    while work:
        cut = work.pop()
        source = cut.args[0]
        if not _row_wise(source) or cut.meta["val"].dim() != 3 or len(cut.args) < 2 or cut.args[1] != 1:
            continue
        if len(source.users) != 1:
            ctx.missed(NAME, cut, f"{source.name} has {len(source.users)} readers: all its rows are needed")
            continue
        early = insert_call(gm, cut, aten.slice.Tensor, (source.args[0], *cut.args[1:]))
        late = insert_call(gm, cut, source.target, (early, *source.args[1:]), like=source)
        cut.replace_all_uses_with(late)
        gm.graph.erase_node(cut)
        gm.graph.erase_node(source)
        ctx.fired(NAME, late)
        work.append(early)
