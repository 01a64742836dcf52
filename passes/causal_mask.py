"""Whether a mask is causal and nothing else, proved from the nodes that make it.

``mask = arange(S)[key] <= arange(S)[query]``, and whatever else takes part is True for sure; over a cache
``arange(L)[slot] <= (arange(S) + length)[query]``. Where no proof is found the mask stays, which costs speed, never
correctness.
"""

from __future__ import annotations

import torch
from torch import fx

from fu_compile.capture import same, value

from .matching import argument, aten, calls, is_tensor, last, shape

_AND = (aten.__and__.Tensor, aten.bitwise_and.Tensor, aten.logical_and.default)
_BROADCAST = (aten.expand.default, aten.alias.default)


def only_causal(mask: fx.Node, position: fx.Node | None = None) -> bool:
    """Whether a boolean ``mask`` [.., S, S] is exactly ``key <= query``, whatever the sizes are.

    True only when the graph says so: two ranges that start at 0, and beside them nothing that is not True for sure
    (transformers also looks for packed sequences in its own positions, which are a range). Positions or padding that a
    caller gives may hide more.

    With ``position``: [S], a node: whether ``mask`` [.., S, L] is exactly ``slot <= position[query]``.
    """
    if not is_tensor(mask) or value(mask).dtype != torch.bool or value(mask).dim() < 2:
        return False
    if position is None and not same(*shape(mask)[-2:]):
        return False
    if calls(mask, *_BROADCAST):
        return _as_large(mask.args[0], mask) and only_causal(mask.args[0], position)  # type: ignore[arg-type]
    if calls(mask, *_AND):
        left, right = mask.args
        pairs = ((left, right), (right, left))
        return any(_constant(a) == 1 and _as_large(b, mask) and only_causal(b, position) for a, b in pairs)  # type: ignore[arg-type]
    if not calls(mask, aten.le.Tensor, aten.ge.Tensor):
        return False
    key, query = mask.args if calls(mask, aten.le.Tensor) else reversed(mask.args)
    keys, queries = shape(mask)[-1], shape(mask)[-2]
    return _is_index(key, -1, keys) and _is_index(query, -2, queries, position)


def _as_large(inner: object, mask: fx.Node) -> bool:
    """Whether the last two dimensions of ``inner`` are those of ``mask``: nothing is repeated along them."""
    return is_tensor(inner) and all(map(same, shape(inner)[-2:], shape(mask)[-2:]))  # type: ignore[arg-type]


def query_positions(mask: fx.Node) -> fx.Node | None:
    """The positions of the queries in a mask that may be ``slot <= position``, before they got other dimensions."""
    while calls(mask, *_BROADCAST):
        mask = mask.args[0]  # type: ignore[assignment]
    if calls(mask, *_AND):
        found = [query_positions(n) for n in mask.args if isinstance(n, fx.Node)]
        return next((n for n in found if n is not None), None)
    if not calls(mask, aten.le.Tensor, aten.ge.Tensor):
        return None
    node = mask.args[1 if calls(mask, aten.le.Tensor) else 0]
    while calls(node, aten.unsqueeze.default, *_BROADCAST):
        node = node.args[0]  # type: ignore[union-attr]
    return node if isinstance(node, fx.Node) else None


def _is_index(node: object, dim: int, size: object, base: fx.Node | None = None) -> bool:
    return _index_along(node, base) == dim and same(shape(node)[dim], size)


def _index_along(node: object, base: fx.Node | None = None) -> int | None:
    """The dimension, counted from the last (-1), along which the integers of ``node`` are their own index.

    With ``base``: [S], along which they are those of ``base``.
    """
    if not isinstance(node, fx.Node) or not is_tensor(node) or value(node).dtype not in (torch.int64, torch.int32):
        return None
    if base is not None and node is base:
        return -1 if value(node).dim() == 1 else None
    if calls(node, aten.arange.default):
        return -1 if base is None and len(node.args) == 1 else None
    if calls(node, aten.unsqueeze.default):
        inner, at = node.args
        dim = _index_along(inner, base)
        rank = value(node).dim()
        # Behind the index dimension the new one moves it away from the end.
        return dim if dim is None or at % rank < rank + dim else dim - 1  # type: ignore[operator]
    if calls(node, *_BROADCAST):
        dim = _index_along(node.args[0], base)
        return dim if dim is not None and same(shape(node)[dim], shape(node.args[0])[dim]) else None
    if calls(node, aten.index.Tensor):  # of a range, the index itself
        of, indices = node.args
        if _index_along(of) != -1 or len(indices) != value(of).dim() or None in indices:  # type: ignore[arg-type, operator]
            return None
        dim = _index_along(indices[-1], base)  # type: ignore[index]
        return dim if dim is not None and same(shape(node)[dim], shape(indices[-1])[dim]) else None  # type: ignore[index]
    return None


def _constant(node: object) -> int | None:
    """The number that every element of ``node`` is, where the graph says so."""
    if not isinstance(node, fx.Node):
        return None
    if calls(node, aten.new_ones.default, aten.ones.default):
        return 1
    if calls(node, aten.unsqueeze.default, aten.index.Tensor, *_BROADCAST):
        return _constant(node.args[0])
    if calls(node, aten.cumsum.default):
        return 0 if _constant(node.args[0]) == 0 else None
    if calls(node, aten.eq.Tensor):
        left, right = map(_constant, node.args)
        return None if left is None or right is None else int(left == right)
    if calls(node, aten.ne.Scalar) and node.args[1] == 1 and _rises_by_one(node.args[0]):
        return 0
    return None


def _rises_by_one(node: object) -> bool:
    """``diff(range, prepend=range[:1] - 1)``"""
    if not isinstance(node, fx.Node) or not calls(node, aten.diff.default):
        return False
    base, before = node.args[0], argument(node, 3, "prepend")
    if _index_along(base) != -1 or argument(node, 1, "n", 1) != 1 or not last(argument(node, 2, "dim", -1), base):  # type: ignore[arg-type]
        return False
    if argument(node, 4, "append") is not None or not calls(before, aten.sub.Tensor) or before.args[1:] != (1,):  # type: ignore[union-attr]
        return False
    first = before.args[0]  # type: ignore[union-attr]
    return (
        not before.kwargs  # type: ignore[union-attr]
        and calls(first, aten.slice.Tensor)
        and first.args[0] is base  # type: ignore[union-attr]
        and last(argument(first, 1, "dim", 0), base)  # type: ignore[arg-type]
        and argument(first, 2, "start") in (0, None)  # type: ignore[arg-type]
        and argument(first, 3, "end") == 1  # type: ignore[arg-type]
        and argument(first, 4, "step", 1) == 1  # type: ignore[arg-type]
    )
