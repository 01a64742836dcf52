"""The writes of a sliding window that is full (``kv_roll_``) or overflows in this call (``kv_fill_``).

Both end in a ``copy_`` to the cache; ``passes/kv_write.py`` asks here what such a copy is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fu_compile.capture import Aliases, is_mutation, same, same_shape, value

from .matching import aten, calls, is_tensor, name_of_dtype, shape


def fits(cache: fx.Node, x: fx.Node) -> str | None:
    """Why rows ``x`` cannot be rows of ``cache``, or none."""
    if not is_tensor(x, 4) or any(not same(shape(cache)[i], shape(x)[i]) for i in (0, 1, 3)):
        return f"rows {list(shape(x))} do not fit a cache {list(shape(cache))}"
    if value(cache).dtype != value(x).dtype:
        return f"the cache is {name_of_dtype(value(cache).dtype)}, the rows are {name_of_dtype(value(x).dtype)}"
    return None


def window(gm: fx.GraphModule, node: fx.Node, aliases: Aliases) -> tuple[str, tuple, str | None]:
    """Kind and arguments of the write that a ``copy_`` is; an empty kind for others, with a reason for a near miss."""
    cache, source = node.args[:2]
    if not is_tensor(cache, 4) or not is_tensor(source, 4):
        return "", (), None
    if calls(source, aten.index_put_.default) and calls(source.args[0], aten.roll.default):  # type: ignore[union-attr]
        roll, indices, x = source.args[:3]  # type: ignore[union-attr]
        if roll.args[0] is not cache or list(roll.args[1]) != [-1] or next(iter(roll.args[2])) not in (2, -2):
            return "", (), "the window does not roll by one token"
        if not _last_slot(gm, indices) or not same(shape(x)[2], 1):
            return "", (), "the new token does not go to the last slot"
        if len(source.users) != 1 or set(roll.users) != {source}:  # type: ignore[union-attr]
            return "", (), "the rolled window has other readers"
        if reason := _touched(roll, node, aliases, (cache, x)):
            return "", (), reason
        return ("roll", (cache, x), None) if (r := fits(cache, x)) is None else ("", (), r)
    length = shape(cache)[2]
    full = source
    if calls(source, aten.slice.Tensor) and source.args[1] in (2, -2):  # type: ignore[union-attr]
        full, start = source.args[0], source.args[2]  # type: ignore[union-attr]
        tail = same(start, -length) or same(start, shape(full)[2] - length)
        if not tail or not same(shape(source)[2], length):
            return "", (), "what is kept is not the last tokens of the window"
    elif not same_shape(value(cache), value(source)):
        return "", (), None
    return ("fill", (cache, full), None) if (r := fits(cache, full)) is None else ("", (), r)  # type: ignore[arg-type]


def _last_slot(gm: fx.GraphModule, indices: Any) -> bool:
    """Whether the indices are ``[None, None, [-1]]``, the constant read from the graph."""
    before, index = list(indices[:-1]), indices[-1]
    if before != [None, None] or not isinstance(index, fx.Node) or index.op != "get_attr":
        return False
    return constant(gm, index) == [-1]


def constant(gm: fx.GraphModule, node: fx.Node) -> list | None:
    """The elements of a constant of the graph, where they are known."""
    tensor = getattr(gm, str(node.target), None)
    held = getattr(tensor, "constant", None)
    tensor = held if isinstance(held, torch.Tensor) else tensor
    if not isinstance(tensor, torch.Tensor) or tensor.device.type == "meta" or hasattr(tensor, "fake_mode"):
        return None
    return tensor.tolist()


def _touched(first: fx.Node, last: fx.Node, aliases: Aliases, watched: tuple[fx.Node, ...]) -> str | None:
    """A sentence when something between two nodes writes to the memory of one of the watched tensors."""
    roots = {aliases.root(n) for n in watched}
    node = first.next
    while node is not last:
        if is_mutation(node) and node.args and aliases.root(node.args[0]) in roots:  # type: ignore[arg-type]
            return "the window or the new token is written between the roll and the copy"
        node = node.next
    return None
