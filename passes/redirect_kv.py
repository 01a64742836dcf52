"""Redirects a StaticCache to its rotated INT4 copy: writes fill both, reads of finished pages become reads of INT4.

Before -> after, decode::

    q, k, v = qkv_rope(raw, cos, sin, ...)
    kv_write_(keys, position, k); kv_write_(values, position, v)
    y = attention(q, keys, values, mask, scale, False)
      ->
    y = attention_int4(raw, cos, sin, .., keys, values, k_codes, k_scales, v_codes, v_scales, mean, balance, ..)

and in prefill ``q, k, v = qkv_append(...)`` with ``y = attention_prefill(q, k, v, ...)``. The user's keys and values
stay true. The store of a cache that exists before the call is four new placeholders; the store of a cache that this
graph creates (a first prefill) is created beside it and leaves as four new outputs; ``ctx.data["redirect_kv"]`` has a
``KVSpec`` for each layer. Preconditions: both writes are StaticCache writes at one position, nothing else reads the
cache between, head_dim is even, and no calibration verdict (``ctx.data["keep_kv"]``) speaks against it. The batch and
the length of the cache may be symbolic: one graph serves caches of every length. Numerics: quant.md decisions 3 and 4.
"""

from __future__ import annotations

import torch
from torch import fx

from .. import formats
from ..caches import KVSpec
from ..capture import same
from . import Context, layer_of
from .linears import is_op
from .matching import insert, outputs

aten = torch.ops.aten
NAME = "redirect_kv"


def run(gm: fx.GraphModule, ctx: Context) -> None:
    """Redirects every attention of ``gm`` whose cache can be redirected."""
    specs: list[KVSpec] = []
    if ctx.decision.cache.value not in formats.KV_FORMATS:
        ctx.data[NAME] = specs
        return
    for node in [n for n in gm.graph.nodes if is_op(n, "attention")]:
        if is_op(node.args[1].args[0] if node.args[1].args else None, "kv_update"):
            continue  # an Int4Cache: passes/int4_cache.py
        found = _match(ctx, node)
        if isinstance(found, str):
            ctx.missed(NAME, node, found)
            continue
        specs.append(_rewrite(gm, ctx, node, *found, index=len(specs)))
    ctx.data[NAME] = specs


def _base(node: fx.Node) -> fx.Node:
    """The cache behind a slice along the tokens, or the node itself."""
    return node.args[0] if node.target is aten.slice.Tensor and node.args[1] == 2 else node


def _match(ctx: Context, node: fx.Node) -> str | tuple[fx.Node, fx.Node, fx.Node]:
    """(qkv_rope, write of the keys, write of the values), or the first precondition that failed."""
    q, k, v, _mask, _scale, causal = node.args
    rope = q.args[0] if q.op == "call_function" and q.args else None
    if not is_op(rope, "qkv_rope"):
        return "q does not come from a fused q/k/v projection"
    writes = []
    for what, cache, i in (("keys", _base(k), 1), ("values", _base(v), 2)):
        write = [u for u in cache.users if is_op(u, "kv_write_") and u.args[0] is cache]
        if len(write) != 1:
            return f"the {what} are not one StaticCache that is written once"
        source = write[0].args[2]
        if source.args[0] is not rope or source.args[1] != i:
            return f"what is written to the {what} does not come from the same projection"
        readers = [u for u in cache.users if u not in (write[0], node) and _base(u) is not cache and u.op != "output"]
        if readers or any(u is not node for c in cache.users if _base(c) is cache and c is not cache for u in c.users):
            return f"the {what} are also read by something else"
        writes.append(write[0])
    if writes[0].args[1] is not writes[1].args[1]:
        return "keys and values are written at different positions"
    shape = writes[0].args[0].meta["val"].shape
    if not isinstance(shape[3], int):
        return "the cache has a symbolic head_dim"
    created = writes[0].args[0].op != "placeholder"
    if created and any(w.args[0].target is not aten.zeros.default for w in writes):
        return "the cache is neither an input nor made of zeros here"
    if shape[3] % 2:
        return f"head_dim {shape[3]} is odd"
    if layer_of(node) in ctx.data.get("keep_kv", {}):
        return ctx.data["keep_kv"][layer_of(node)]
    if causal and _base(k) is k and not same(k.meta["val"].shape[2], q.meta["val"].shape[2]):
        return "causal attention over a cache longer than the call"
    return rope, writes[0], writes[1]


def _rewrite(
    gm: fx.GraphModule, ctx: Context, node: fx.Node, rope: fx.Node, write_k: fx.Node, write_v: fx.Node, *, index: int
) -> KVSpec:
    _q, _k, _v, mask, scale, causal = node.args
    keys, position, values = write_k.args[0], write_k.args[1], write_v.args[0]
    raw, cos, sin, q_norm, k_norm, eps, *heads = rope.args
    val = keys.meta["val"]
    kv_heads, dim = val.shape[1], val.shape[3]
    created, kv_format = keys.op != "placeholder", ctx.decision.cache.value
    if created:
        store = outputs(gm, insert(gm, write_k, "kv_store", (keys, kv_format), like=keys), 4)
    else:
        shapes = formats.kv_shapes(val.shape[0], kv_heads, val.shape[2], dim, kv_format)
        store = [ctx.placeholder(gm, f"kv_{index}_{i}", val, *shape) for i, shape in enumerate(shapes)]
    tables = [ctx.placeholder(gm, f"kv_{index}_{4 + i}", val, (kv_heads, dim), torch.float32) for i in range(2)]
    cache = (keys, values, *store, *tables, position)
    if ctx.decision.phase.value == "decode":
        args = (raw, cos, sin, q_norm, k_norm, eps, *cache, mask, scale, *heads)
        new = insert(gm, node, "attention_int4", args, like=node)
    else:
        fused = insert(gm, node, "qkv_append", (raw, cos, sin, q_norm, k_norm, eps, *cache, *heads), like=rope)
        new = insert(gm, node, "attention_prefill", (*outputs(gm, fused, 3), *cache, mask, scale, causal), like=node)
    node.replace_all_uses_with(new)
    spec = KVSpec.of(ctx, layer_of(node), keys, values, position, created, rope, kv_format)
    for dead in (node, write_k, write_v):
        gm.graph.erase_node(dead)
    ctx.fired(NAME, new)
    if created:
        ctx.add_outputs(gm, store)
    return spec
