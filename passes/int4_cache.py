"""Fuses the reads of an Int4Cache into attention: nothing is dequantised to memory any more.

Before -> after, decode::

    q, k, v = qkv_rope(raw, cos, sin, ...)
    keys, values = kv_update(k, v, rows_k, rows_v, <store>, position, L)
    y = attention(q, keys, values, mask, scale, causal)
      ->
    y = attention_int4(raw, cos, sin, .., rows_k, rows_v, <store>, position, mask, scale, ..)

and in prefill ``y = attention_prefill(q, k, v, rows_k, ...)``, then ``kv_extend_(k, v, rows_k, ...)``: finished rows
make room for new ones, so they are read first. The store belongs to the caller; nothing has to be compared or imported.
Preconditions: q, k and v come from one fused projection, and only this attention reads what the update returns. What is
refused keeps ``kv_update``, which dequantises the whole cache; so does an exact projection, which keeps eager's own
roundings. Numerics: the same rule of what a query sees (quant.md decision 4); keys, values, scores and sums in float32
instead of the model's dtype.

``ctx.data["int4_cache"]``: (node that writes, slots of the cache) for each layer, fused or not.
"""

from __future__ import annotations

import operator

from torch import fx

from ..capture import same
from . import Context, layer_of
from .linears import is_op
from .matching import insert

NAME = "int4_cache"


def run(gm: fx.GraphModule, ctx: Context) -> None:
    """Fuses every attention of ``gm`` that reads an Int4Cache."""
    written: list[tuple[fx.Node, object]] = []
    for node in [n for n in gm.graph.nodes if is_op(n, "attention")]:
        update = _read(node.args[1])
        if update is None or _exact(node):
            continue
        if reason := _refuses(node, update):
            ctx.missed(NAME, node, reason)
        else:
            slots = _slots(update)
            written.append((_rewrite(gm, ctx, node, update), slots))
    unfused = [n for n in gm.graph.nodes if is_op(n, "kv_update")]
    ctx.data[NAME] = [*written, *((n, _slots(n)) for n in unfused)]


def _slots(update: fx.Node) -> object:
    """Tokens that the cache of an update takes: a number, or a symbol."""
    slots = update.args[-1]
    return slots.meta["val"] if isinstance(slots, fx.Node) else slots


def _read(keys: fx.Node) -> fx.Node | None:
    """The update whose keys these are, or none."""
    if keys.target is not operator.getitem or not is_op(keys.args[0], "kv_update"):
        return None
    return keys.args[0]


def _exact(node: fx.Node) -> bool:
    """Whether the queries of this attention are those of a projection that stayed exact, RoPE included."""
    q = node.args[0]
    return is_op(q, "rotary") and q.args[0].target is operator.getitem and is_op(q.args[0].args[0], "qkv")


def _refuses(node: fx.Node, update: fx.Node) -> str | None:
    """The first precondition that fails, or none."""
    q, k, v, _mask, _scale, causal = node.args
    rope = q.args[0] if q.op == "call_function" and q.args else None
    if not is_op(rope, "qkv_rope"):
        return "q does not come from a fused q/k/v projection"
    for i, x in enumerate(update.args[:2]):
        if x.target is not operator.getitem or x.args != (rope, i + 1):
            return "what is written to the cache does not come from the same projection"
    if v.target is not operator.getitem or v.args != (update, 1) or k.args != (update, 0):
        return "keys and values are not those of one update"
    if any(set(x.users) != {node} for x in (k, v)) or set(update.users) != {k, v}:
        return f"what {layer_of(update)} returns is also read by something else"
    if causal and not same(k.meta["val"].shape[2], q.meta["val"].shape[2]):
        return "causal attention over a cache longer than the call"
    return None


def _rewrite(gm: fx.GraphModule, ctx: Context, node: fx.Node, update: fx.Node) -> fx.Node:
    """The node that now writes to the cache."""
    q, _k, _v, mask, scale, causal = node.args
    k, v, *cache, _slots = update.args
    raw, cos, sin, q_norm, k_norm, eps, *heads = q.args[0].args
    if ctx.decision.phase.value == "decode":
        args = (raw, cos, sin, q_norm, k_norm, eps, *cache, mask, scale, *heads)
        new = writer = insert(gm, node, "attention_int4", args, like=node)
    else:
        new = insert(gm, node, "attention_prefill", (q, k, v, *cache, mask, scale, causal), like=node)
        writer = insert(gm, node, "kv_extend_", (k, v, *cache))
    node.replace_all_uses_with(new)
    for dead in (node, *list(update.users), update):
        gm.graph.erase_node(dead)
    ctx.fired(NAME, new)
    return writer
