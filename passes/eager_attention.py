"""Attention spelled out (``attn_implementation="eager"``): ``matmul(softmax(matmul(q, k.T) * scale + mask), v)``.

Walked backwards and forwards from the softmax; what it finds is checked and rewritten by ``passes/attention.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fu_compile.capture import value

from .matching import COPY, PreconditionError, aten, calls, is_tensor, kv_base, last, name_of_dtype, sole_user


@dataclass
class Parts:
    """The operands of one attention, and its result."""

    q: fx.Node
    k: fx.Node
    v: fx.Node
    mask: fx.Node | None
    scale: float
    causal: bool
    out: fx.Node
    """The [B, H, S, D] result."""
    first: fx.Node
    """The first node that reads an operand."""


def own_heads(q: object, k: object, v: object) -> tuple[fx.Node, fx.Node, fx.Node]:
    """q, and k and v with their own number of heads."""
    if not all(is_tensor(t, 4) for t in (q, k, v)):
        raise PreconditionError("queries, keys or values are not [B, H, S, D]")
    (k, k_times), (v, v_times) = kv_base(k), kv_base(v)  # type: ignore[arg-type]
    if k_times != v_times:
        raise PreconditionError(f"keys repeat {k_times} times, values {v_times} times")
    return q, k, v  # type: ignore[return-value]


def eager(softmax: fx.Node) -> Parts | None:
    """The parts of matmul-softmax-matmul; none for a softmax that is no attention at all."""
    out: Any = softmax
    while calls(user := sole_user(out), aten.to.dtype, aten.dropout.default, *COPY):
        out = user  # type: ignore[assignment]
        if calls(out, aten.dropout.default) and out.args[1] and out.args[2]:
            raise PreconditionError(f"dropout {out.args[1]} is active")
    readers = [u for u in out.users if calls(u, aten.matmul.default) and u.args[0] is out]
    if not is_tensor(softmax, 4):
        return None
    scores, mask, scale = softmax.args[0], None, 1.0
    if not readers:
        sliced = any(calls(u, aten.slice.Tensor) for u in out.users) and calls(
            scores, aten.cat.default, aten.sub.Tensor
        )
        if sliced:
            raise PreconditionError("the softmax has an extra column (attention sink)")
        return None
    if len(out.users) != 1 or any(len(n.users) != 1 for n in _path(softmax, out)):
        raise PreconditionError("the attention weights have other readers (output_attentions)")
    if not last(softmax.args[1], softmax):
        raise PreconditionError(f"the softmax is over dimension {softmax.args[1]}, not over the keys")
    dtype = softmax.args[2] if len(softmax.args) > 2 and calls(softmax, aten.softmax.int) else None
    if value(softmax).dtype != torch.float32 or dtype not in (None, torch.float32):
        raise PreconditionError(f"the softmax is in {name_of_dtype(value(softmax).dtype)}, not in float32")
    if calls(scores, aten.to.dtype):
        scores = scores.args[0]  # type: ignore[union-attr]
    if calls(scores, aten.cat.default, aten.sub.Tensor):
        raise PreconditionError("the scores are joined with another tensor before the softmax (attention sink)")
    if calls(scores, aten.add.Tensor):
        scores, mask = scores.args[:2]  # type: ignore[union-attr]
        if calls(mask, aten.mul.Tensor, aten.matmul.default) and not calls(
            scores, aten.mul.Tensor, aten.matmul.default
        ):
            scores, mask = mask, scores
    if calls(scores, aten.mul.Tensor) and isinstance(scores.args[1], (int, float)):  # type: ignore[union-attr]
        scores, scale = scores.args[0], float(scores.args[1])  # type: ignore[union-attr]
    if calls(scores, aten.tanh.default):
        raise PreconditionError("the scores are capped (logit softcap)")
    if not calls(scores, aten.matmul.default):
        raise PreconditionError(f"the scores come from {getattr(scores, 'target', scores)}, not from q @ k.T * scale")
    q, transposed = scores.args  # type: ignore[union-attr]
    dims = {d % 4 for d in transposed.args[1:]} if calls(transposed, aten.transpose.int) else None  # type: ignore[union-attr]
    if dims != {2, 3}:
        raise PreconditionError("the keys are not transposed to [B, H, D, L]")
    q, k, v = own_heads(q, transposed.args[0], readers[0].args[1])  # type: ignore[union-attr]
    if value(readers[0]).dtype != value(q).dtype:
        raise PreconditionError("the weights are not cast back to the dtype of the queries")
    return Parts(q, k, v, mask, scale, False, readers[0], scores)  # type: ignore[arg-type]


def _path(first: fx.Node, final: fx.Node) -> list[fx.Node]:
    path = [first]
    while path[-1] is not final:
        path.append(next(iter(path[-1].users)))
    return path[:-1]
