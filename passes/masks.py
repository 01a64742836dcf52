"""What an attention mask is, read from the nodes that make it.

For the report and for the decision which kernel may run. The mask itself is passed on as it is, unless
causal_mask.py proves that it hides what lies behind each query and nothing else; a mask that is not understood costs
speed, never correctness.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from .matching import aten, calls, is_tensor

LIMIT = 200
"""Nodes that are looked at for one mask: far more than any mask of transformers needs."""


@dataclass(frozen=True)
class Mask:
    """The kind of one mask."""

    kind: str
    """``"none"``, ``"causal"``, ``"sliding"``, ``"given"`` (a 4-D mask from the caller) or ``"other"``."""
    padding: bool = False
    """A [B, L] mask of real tokens takes part."""
    window: int | None = None
    """Keys that a query sees, itself included, for ``"sliding"``."""

    def __str__(self) -> str:
        kind = f"sliding window {self.window}" if self.kind == "sliding" else self.kind
        return f"{kind} + padding" if self.padding else kind


def classify(mask: fx.Node) -> Mask:
    """The kind of the mask that ``mask`` holds."""
    producers = _producers(mask)
    causal = any(calls(n, aten.le.Tensor, aten.ge.Tensor, aten.tril.default, aten.triu.default) for n in producers)
    padding = any(n.op == "placeholder" and is_tensor(n, 2) for n in producers)
    window = next((w for n in producers if (w := _window(n)) is not None), None)
    if window is not None:
        return Mask("sliding", padding, window)
    if causal:
        return Mask("causal", padding)
    if any(n.op == "placeholder" and is_tensor(n, 4) for n in producers):
        return Mask("given")
    return Mask("other", padding)


def _producers(node: fx.Node) -> list[fx.Node]:
    """The nodes that a mask is made of, tensors only, up to ``LIMIT``."""
    seen: dict[fx.Node, None] = {}
    queue = [node]
    while queue and len(seen) < LIMIT:
        item = queue.pop()
        if item not in seen and is_tensor(item):
            seen[item] = None
            queue += item.all_input_nodes
    return list(seen)


def _window(node: fx.Node) -> int | None:
    """W of ``key > query - W`` (or ``query - W < key``)."""
    if calls(node, aten.gt.Tensor, aten.lt.Tensor):
        for side in node.args:
            if calls(side, aten.sub.Tensor) and isinstance(side.args[1], int):  # type: ignore[union-attr]
                return side.args[1]  # type: ignore[union-attr, return-value]
            if calls(side, aten.add.Tensor) and isinstance(side.args[1], int) and side.args[1] < 0:  # type: ignore[union-attr]
                return -side.args[1]  # type: ignore[union-attr, operator]
    return None
