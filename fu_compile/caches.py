"""The INT4 copy of a StaticCache, and the rule that keeps it honest.

The user's tensors stay true: kernels write them as well. The copy hangs on the pair (keys, values) of a layer; before
each call the runtime compares identity, address and ``_version`` with what it saw last. If anything else wrote to the
cache (eager prefill, ``reset``, ``crop``, beam reorder, the user), the finished pages are imported again. Where PyTorch
keeps no version (inference tensors) the copy is imported at every call: it is never trusted.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import guard_scalar

from . import formats, ops
from .errors import CacheLengthError, CacheMismatchError, through_dynamo

if TYPE_CHECKING:
    from .packed import Rows
    from .passes import Context


@dataclass(frozen=True)
class KVSpec:
    """One redirected layer of one graph: where its tensors are found at a call."""

    layer: str
    keys: int
    """Index in Dynamo's arguments; for a created cache the index in the graph's outputs."""
    values: int
    length: int | None
    """Index of the layer's ``cumulative_length`` in Dynamo's arguments."""
    created: bool
    """The cache is made by this very graph (a first prefill)."""
    weights: tuple[int, ...]
    biases: tuple[int, ...]
    """q/k/v projection in Dynamo's arguments, for the key tables; empty where it is computed in the graph."""
    key_norm: int | None
    """Gain of the norm over the keys in Dynamo's arguments (Qwen3)."""
    inv_freq: int | None
    heads: tuple[int, int, int]
    """Query heads, key/value heads, head_dim."""
    kv_format: str = "int4"
    """One of ``formats.KV_FORMATS``."""
    rows: tuple[Rows | None, ...] = ()
    """For each weight: the rows of it that count, where it is a packed block; empty: no weight is packed."""

    @classmethod
    def of(
        cls,
        ctx: Context,
        layer: str,
        keys: fx.Node,
        values: fx.Node,
        position: fx.Node,
        created: bool,
        rope: fx.Node,
        kv_format: str,
    ) -> KVSpec:
        """The spec of a layer whose cache nodes, positions and ``qkv_rope`` node these are."""
        from .passes.packed_linear import rows_of

        weights, biases = projections(rope.args[0])
        k_norm = rope.args[4]
        rows = [rows_of(w) for w in weights]
        weights = [w if r is None else w.args[0] for w, r in zip(weights, rows, strict=True)]
        known = all(r or ctx.is_parameter(w) for w, r in zip(weights, rows, strict=True))
        known = known and all(ctx.is_parameter(b) for b in biases)
        if created:
            output = next(n for n in reversed(keys.graph.nodes) if n.op == "output").args[0]
            where = [next(i for i, n in enumerate(output) if n is node) for node in (keys, values)]
        else:
            where = [ctx.index(node) for node in (keys, values)]
        inv_freq = next((i.index for i in ctx.inputs if i.path.endswith("inv_freq")), None)
        return cls(
            layer=layer,
            keys=where[0],
            values=where[1],
            length=length_input(ctx, position),
            created=created,
            weights=tuple(ctx.index(w) for w in weights) if known else (),
            biases=tuple(ctx.index(b) for b in biases) if known else (),
            rows=tuple(rows) if known and any(rows) else (),
            key_norm=ctx.index(k_norm) if k_norm is not None and ctx.is_parameter(k_norm) else None,
            inv_freq=inv_freq,
            heads=tuple(rope.args[-3:]),
            kv_format=kv_format,
        )


def projections(raw: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
    """Weights and biases behind a fused q/k/v projection, or behind the concatenation of three."""
    if raw.target is torch.ops.aten.cat.default:
        parts = [projections(p) for p in raw.args[0]]  # type: ignore[union-attr]
        return [w for ws, _ in parts for w in ws], [b for _, bs in parts for b in bs]
    return list(raw.args[1]), list(raw.args[2])  # type: ignore[arg-type]


def length_input(ctx: Context, position: fx.Node) -> int | None:
    """Index of the ``cumulative_length`` that a position node (``arange(S) + cumulative_length``) starts from."""
    seen = [position]
    while seen:
        node = seen.pop()
        if node.op == "placeholder":
            found = ctx.by_name.get(node.name)
            if found is not None and found.path.endswith("cumulative_length"):
                return found.index
        else:
            seen += node.all_input_nodes
    return None


def version(t: Tensor) -> int | None:
    """``t._version``, or none for an inference tensor, which has none."""
    return None if t.is_inference() else t._version


class Copy:
    """The INT4 store that hangs on one (keys, values) pair.

    keys, values: [B, Hkv, L, D]; ``store``: k_codes, k_scales, v_codes, v_scales of ``formats.kv_store``.
    """

    __slots__ = ("__weakref__", "address", "keys", "store", "tables", "values", "versions")

    def __init__(self, keys: Tensor, values: Tensor, store: tuple[Tensor, ...], tables: tuple[Tensor, Tensor]) -> None:
        self.keys, self.values = weakref.ref(keys), weakref.ref(values)
        self.store, self.tables = store, tables
        self.address = (keys.data_ptr(), values.data_ptr())
        self.versions: tuple[int | None, int | None] = (None, None)

    def current(self, keys: Tensor, values: Tensor) -> bool:
        """Whether nobody but us has written to, moved or replaced the pair since ``seen``."""
        k, v = self.versions
        return (
            k is not None
            and v is not None
            and self.keys() is keys
            and self.values() is values
            and keys._version == k
            and values._version == v
            and (keys.data_ptr(), values.data_ptr()) == self.address
        )

    def seen(self, keys: Tensor, values: Tensor) -> None:
        """Takes the pair as it is now for ours."""
        self.versions = (
            None if keys.is_inference() else keys._version,
            None if values.is_inference() else values._version,
        )

    def fill(self, keys: Tensor, values: Tensor, length: int) -> None:
        """Imports the finished pages of the first ``length`` tokens from the user's tensors."""
        ops.op("kv_append_")(keys, values, *self.store, *self.tables, 0, length // ops.PAGE)

    @property
    def kv_format(self) -> str:
        """One of ``formats.KV_FORMATS``."""
        return formats.CHANNEL if formats.per_channel(self.store[1]) else "int4"

    @property
    def bytes(self) -> int:
        """Bytes of the store and its tables."""
        return sum(t.nbytes for t in (*self.store, *self.tables))


class Copies:
    """All INT4 copies of the process: one for each living (keys, values) pair."""

    def __init__(self) -> None:
        self._copies = torch.utils.weak.WeakTensorKeyDictionary()

    def find(self, keys: Tensor, values: Tensor, kv_format: str | None = None) -> Copy | None:
        """The copy of this pair, current or not; none where there is none, or it is of other values or format."""
        copy = self._copies.get(keys)
        if copy is None or copy.values() is not values:
            return None
        return copy if kv_format in (None, copy.kv_format) else None

    def attach(
        self, keys: Tensor, values: Tensor, tables: tuple[Tensor, Tensor], store=None, kv_format: str = "int4"
    ) -> Copy:
        """A new copy of the pair, empty unless a ``store`` that already mirrors it is given."""
        b, h, length, d = keys.shape
        store = formats.kv_store(b, h, length, d, keys.device, kv_format) if store is None else tuple(store)
        copy = Copy(keys, values, store, tables)
        self._copies[keys] = copy
        return copy

    @property
    def bytes(self) -> int:
        """Bytes of all living stores."""
        return sum(c.bytes for c in self._copies.values())


COPIES = Copies()


def mismatch(layer: Any, keys: Tensor) -> tuple[str, Any, Any] | None:
    """(what, the cache's, this call's) of the first thing in which keys: [B, Hkv, S, D] do not fit a static layer."""
    if not layer.is_sliding and keys.shape[2] > layer.max_cache_len:
        return "slots", guard_scalar(layer.max_cache_len), guard_scalar(keys.shape[2])
    if not layer.is_initialized:
        return None
    have = layer.keys
    named = (("batch size", 0), ("key/value heads", 1), ("head_dim", 3))
    sizes = [(what, have.shape[i], keys.shape[i]) for what, i in named]
    return difference(sizes, (("dtype", have.dtype, keys.dtype), ("device", have.device, keys.device)))


def difference(
    sizes: Iterable[tuple[str, Any, Any]], others: Iterable[tuple[str, Any, Any]]
) -> tuple[str, Any, Any] | None:
    """The first of (what, the cache's, this call's) in which the two differ. Dynamo traces this."""
    for what, cache, call in sizes:
        if cache != call:
            # A symbolic size becomes the number that it is in this call: the call is refused anyway.
            return what, guard_scalar(cache), guard_scalar(call)
    for what, cache, call in others:
        if cache != call:
            return what, cache, call
    return None


def too_short(slots: int, used: int, more: int, where: str) -> CacheLengthError:
    """The error of a call that needs ``more`` slots of a cache in which ``used`` of ``slots`` are taken."""
    return CacheLengthError(
        f"the cache has {slots} slots, {used} are used and this call needs {more} more: make it at least"
        f" {used + more} long",
        where=where,
    )


def refuse(where: str, what: str, cache: Any, call: Any) -> None:
    """Raises the error for a :func:`mismatch`. Dynamo runs this while it traces, so nothing of the call has run yet."""
    with through_dynamo():
        if what == "slots":
            raise CacheLengthError(
                f"the cache has {cache} slots and this call alone needs {call}: make it at least {call} long",
                where=where,
            )
        raise CacheMismatchError(f"the cache was made for {what} {cache}, this call has {call}", where=where)


def guard_static_caches() -> None:
    """Lets transformers' static cache layers refuse, by name and before they write, what does not fit them.

    Dynamo meets such a call inside ``StaticLayer.update``, long before a backend sees a graph, and would report it as
    an internal error of a fake tensor; so the check stands there. A ``raise`` that Dynamo traces would cut the model
    into pieces and run those before it, so the error is raised by a function that Dynamo calls instead of tracing it.
    Idempotent; correct calls are not changed.
    """
    try:
        from transformers import cache_utils
    except ImportError:  # without transformers there is no such cache, and the backend still runs other modules
        return
    torch._dynamo.assume_constant_result(refuse)
    for cls in (cache_utils.StaticLayer, cache_utils.StaticSlidingWindowLayer):
        if not getattr(cls.update, "_fu_checked", False):
            cls.update = _checked(cls.update)  # type: ignore[method-assign]


def _checked(update: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(update)
    def checked(self: Any, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        found = mismatch(self, key_states)
        if found is not None:
            refuse(type(self).__name__, *found)
        return update(self, key_states, value_states, *args, **kwargs)

    checked._fu_checked = True  # type: ignore[attr-defined]
    return checked
