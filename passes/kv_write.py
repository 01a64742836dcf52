"""Writes to the key/value cache get their names.

    keys.index_copy_(2, position, k)  or  keys[:, :, position] = k      ->  kv_write_(keys, position, k)   StaticCache
    new = keys.roll(-1, -2); new[:, :, [-1]] = k; keys.copy_(new)       ->  kv_roll_(keys, k)              full window
    keys.copy_(full[:, :, -L:])                                         ->  kv_fill_(keys, full)           overflow
    cat([past, k], -2)    (past empty: none)                            ->  kv_cat(past, k)                DynamicCache

Who read the result of the in-place operator reads the cache itself afterwards: the same memory. Refused: other
dimensions, positions of another shape, ``roll`` with anything else between it and the copy.

``ctx.data["kv_write"]`` gets one ``KvWrite`` for each layer, in the order of the graph.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import fx

from fu_compile.capture import Aliases, same, value

from . import Context, layer_of
from .kv_window import fits, window
from .matching import anchors, argument, aten, calls, insert, is_tensor, replace, shape

NAME = "kv_write"


@dataclass(frozen=True)
class KvWrite:
    """What one layer writes; all names are those of nodes in the graph."""

    layer: str
    """Module path, such as ``model.layers.0.self_attn``."""
    kind: str
    """``"write"``, ``"roll"``, ``"fill"`` or ``"cat"``."""
    keys: str
    """The node that writes the keys (its result, for ``cat``)."""
    values: str
    key_cache: str | None
    """The tensor that is written (``cat``: read), a placeholder or the node that made it; none for an empty cache."""
    value_cache: str | None
    position: str | None
    """[S] int64, for ``write`` only."""

    @property
    def index(self) -> int | None:
        """The layer's number, where its path has one."""
        found = re.search(r"layers\.(\d+)", self.layer)
        return int(found.group(1)) if found else None


def run(gm: fx.GraphModule, ctx: Context) -> None:
    """Recognises every cache write of ``gm`` and leaves the records in ``ctx.data["kv_write"]``."""
    written: list[tuple[fx.Node, str]] = []
    targets = (aten.copy_.default, aten.index_copy_.default, aten.index_put_.default, aten.cat.default)
    aliases = Aliases(gm.graph)
    for node in anchors(gm, *targets):
        if node._erased:
            continue
        kind, args, reason = _read(gm, node, aliases)
        if reason:
            ctx.missed(NAME, node, reason)
        if not kind:
            continue
        new = insert(gm, node, {"cat": "kv_cat"}.get(kind, f"kv_{kind}_"), args)
        if kind == "cat":
            replace(node, new)
        else:
            roll = node.args[1].args[0] if kind == "roll" else None  # type: ignore[union-attr]
            node.replace_all_uses_with(args[0])
            inner = node.args[1]
            gm.graph.erase_node(node)
            if roll is not None:
                gm.graph.erase_node(inner)  # type: ignore[arg-type]
        ctx.fired(NAME, new, kind)
        written.append((new, kind))
    for node in gm.graph.nodes:  # mutations moved: the matcher counts its regions anew
        node.meta.pop("mutation_region_id", None)
    ctx.data[NAME] = _records(written)


def _read(gm: fx.GraphModule, node: fx.Node, aliases: Aliases) -> tuple[str, tuple, str | None]:
    """Kind and arguments of the write that ``node`` is; or an empty kind, with a reason where it is a near miss."""
    if calls(node, aten.index_copy_.default):
        cache, dim, position, x = node.args
        return _write(cache, dim, position, x)  # type: ignore[arg-type]
    if calls(node, aten.index_put_.default):
        cache, indices, x = node.args[:3]
        if calls(cache, aten.roll.default) or not is_tensor(cache, 4):
            return "", (), None
        dims = [i for i, index in enumerate(indices) if index is not None]  # type: ignore[arg-type]
        if argument(node, 3, "accumulate", False) or len(dims) != 1:
            return "", (), "the cache is written at several indices or summed into"
        return _write(cache, dims[0], indices[dims[0]], x)  # type: ignore[arg-type, index]
    if calls(node, aten.copy_.default):
        return window(gm, node, aliases)
    return _cat(gm, node)


def _write(cache: fx.Node, dim: int, position: fx.Node, x: fx.Node) -> tuple[str, tuple, str | None]:
    if not is_tensor(cache, 4):
        return "", (), f"the cache has {value(cache).dim()} dimensions, not [B, H, L, D]"
    if dim not in (2, -2):
        return "", (), f"the cache is written along dimension {dim}, not along the tokens"
    if not is_tensor(position, 1) or value(position).dtype != torch.int64:
        return "", (), f"the positions are not one int64 for each token but {list(shape(position))}"
    if not is_tensor(x, 4) or not same(shape(x)[2], shape(position)[0]):
        return "", (), "the written rows and the positions differ in number"
    return ("write", (cache, position, x), None) if (r := fits(cache, x)) is None else ("", (), r)


def _cat(gm: fx.GraphModule, node: fx.Node) -> tuple[str, tuple, str | None]:
    parts = list(node.args[0])  # type: ignore[arg-type]
    dim = argument(node, 1, "dim", 0)
    if len(parts) != 2 or not is_tensor(node, 4) or not all(isinstance(p, fx.Node) for p in parts):
        return "", (), None
    past, x = parts
    if past.op == "get_attr" and same(value(past).numel(), 0):
        ok = is_tensor(x, 4) and dim in (2, -2) and value(x).dtype == value(node).dtype
        return ("cat", (None, x), None) if ok else ("", (), None)
    root = past
    while calls(root, aten.slice.Tensor):
        root = root.args[0]  # type: ignore[assignment]
    if root.op != "placeholder" or not is_tensor(past, 4):
        return "", (), None
    if dim not in (2, -2):
        return "", (), f"a graph input is joined along dimension {dim}, not along the tokens"
    return ("cat", (past, x), None) if (r := fits(past, x)) is None else ("", (), r)


def _records(written: list[tuple[fx.Node, str]]) -> list[KvWrite]:
    """Pairs the writes of each layer; keys are the rotated ones, else what is named so, else what comes first."""
    layers: dict[tuple[str, str], list[fx.Node]] = {}
    for node, kind in written:
        layers.setdefault((layer_of(node), kind), []).append(node)
    records = []
    for (layer, kind), nodes in layers.items():
        for pair in zip(nodes[::2], nodes[1::2], strict=False):
            k, v = sorted(pair, key=_is_value)
            k_cache, v_cache = (a.name if isinstance(a := n.args[0], fx.Node) else None for n in (k, v))
            position = k.args[1].name if kind == "write" else None  # type: ignore[union-attr]
            records.append(KvWrite(layer, kind, k.name, v.name, k_cache, v_cache, position))
    return records


def _is_value(write: fx.Node) -> bool:
    cache, x = write.args[0], write.args[-1]
    if calls(x, "rotary"):
        return False
    return not (isinstance(cache, fx.Node) and cache.name.endswith("_keys"))
