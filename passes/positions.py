"""Takes the bookkeeping of a decode step's positions out of the layers: every layer counts its own tokens.

Before -> after, for each layer of a decode graph with one token::

    p = add(arange(1), length)                p = view(length, [1])
    add_(length, 1)                     ->    ...
    y = attention_int4(.., p, ..)             y = attention_int4(.., p, ..)
                                              _foreach_add_([length, ..., length of the last layer], 1)

and ``mask = le(arange(L), p)`` becomes none where attention_int4 is the reader: it sees no slot behind its position
anyway. So it does for attention_prefill, with any number of tokens, which on an empty cache then is as fast as without
one. An INT4 decode step is five kernels a layer; more of them for a counter or a mask (Inductor makes one for each
reader), between two that would otherwise overlap, cost what attention costs. Preconditions: nothing but the additions
reads or writes the length after ``add_``, which then is as good at the end of the graph; ``arange(1)`` is zero; the
counter behind the mask, which transformers takes from the first layer, is one that this graph advances like the
reader's own (the counters of one cache are equal). Numerics: exact, integers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..caches import counter_of, writers
from ..capture import same
from . import Context
from .causal_mask import only_causal, query_positions
from .linears import is_op
from .matching import insert_call

aten = torch.ops.aten
NAME = "positions"


def run(gm: fx.GraphModule, ctx: Context) -> None:
    """Replaces the positions of every counter of ``gm`` and advances all counters at its end."""
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    steps: dict[Any, list[fx.Node]] = {}
    for node in gm.graph.nodes:
        if node.op != "placeholder" or not ctx.path(node).endswith("cumulative_length"):
            continue
        writes = [u for u in node.users if u.target is aten.add_.Tensor and u.args[0] is node]
        if len(writes) != 1 or ctx.decision.query_length.value != "1":
            continue
        (write,) = writes
        late = [u for u in node.users if u is not write and order[u] > order[write]]
        if late or write.users or not isinstance(write.args[1], int) or write.kwargs:
            ctx.missed(NAME, write, "the counter is read again behind its advance")
            continue
        positions = [u for u in node.users if _is_position(u, node)]
        views = [u for u in node.users if u is not write and u not in positions and u.target in _VIEWS]
        if views:
            ctx.missed(NAME, write, f"{views[0].name} may be the counter itself")
            continue
        for position in positions:
            view = insert_call(gm, position, aten.view.default, (node, [1]), like=position)
            position.replace_all_uses_with(view)
            gm.graph.erase_node(position)
        steps.setdefault(write.args[1], []).append(write)
    counters = {w.args[0] for writes in steps.values() for w in writes} if len(steps) == 1 else set()
    for node in gm.graph.nodes:
        decode = is_op(node, "attention_int4")
        if not decode and not is_op(node, "attention_prefill"):
            continue
        at = 15 if decode else 12
        position, mask = node.args[at - 1 : at + 1]
        behind = query_positions(mask) if isinstance(mask, fx.Node) else None
        if behind is None or not only_causal(mask, behind):
            continue
        if decode:
            alike = {_counter(position), _counter(behind)} <= counters
        else:
            alike = _at_start(node, behind) or _advance_alike(ctx, behind, position, node, order)
        if alike:
            node.update_arg(at, None)
            ctx.fired(NAME, node, "the mask hides only what is behind the position")
    end = next(n for n in reversed(gm.graph.nodes) if n.op == "output")
    for amount, writes in steps.items():
        if len(writes) > 1:
            with gm.graph.inserting_before(end):
                new = gm.graph.call_function(aten._foreach_add_.Scalar, ([w.args[0] for w in writes], amount))
            new.meta["val"] = None
            ctx.fired(NAME, new)
        else:  # to the end, where the views have been read
            end.prepend(writes[0])
            continue
        for write in writes:
            gm.graph.erase_node(write)


_VIEWS = (aten.view.default, aten.unsqueeze.default, aten.expand.default, aten.reshape.default, aten.alias.default)


def _is_position(node: fx.Node, length: fx.Node) -> bool:
    """Whether ``node`` is ``arange(1) + length``: the length, as one position."""
    if node.target is not aten.add.Tensor or node.kwargs or len(node.args) != 2 or length not in node.args:
        return False
    other = node.args[1] if node.args[0] is length else node.args[0]
    return (
        isinstance(other, fx.Node)
        and other.target is aten.arange.default
        and other.args == (1,)
        and node.meta["val"].dtype == torch.int64
        and node.meta["val"].shape == (1,)
    )


def _counter(position: fx.Node) -> Any:
    """The counter that a position of :func:`run` is a view of, or none."""
    return position.args[0] if position.target is aten.view.default and position.args[1] == [1] else None


def _at_start(node: fx.Node, position: fx.Node) -> bool:
    """Whether the positions are ``arange(S)``, in a cache that this graph makes: it is empty."""
    return node.args[3].op != "placeholder" and position.target is aten.arange.default and len(position.args) == 1


def _advance_alike(ctx: Context, a: fx.Node, b: fx.Node, reader: fx.Node, order: dict[fx.Node, int]) -> bool:
    """Whether two positions start from counters that this graph advances by the same number of tokens, once."""
    steps = []
    for position in (a, b):
        counter = counter_of(ctx, position, reader, order)
        writes = [] if counter is None else writers(counter)
        if len(writes) != 1 or writes[0].target is not aten.add_.Tensor or writes[0].kwargs:
            return False
        steps.append(writes[0].args[1])
    values = [n.meta["val"] if isinstance(n, fx.Node) else n for n in steps]
    return same(*values) and same(*(n.meta["val"].shape[0] for n in (a, b)))
