"""The INT4 copy of a StaticCache, and the rule that keeps it honest.

The user's tensors stay true: kernels write them as well. The copy hangs on the pair (keys, values) of a layer; before
each call the runtime compares identity, address and ``_version`` with what it saw last. If anything else wrote to the
cache (eager prefill, ``reset``, ``crop``, beam reorder, the user), the finished pages are imported again. Where PyTorch
keeps no version (inference tensors) the copy is imported at every call: it is never trusted.

How many tokens a cache holds stands in a tensor on its device. ``LENGTHS`` remembers what the host knows of it, by the
same rule; where it knows nothing, the runtime reads once a call.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import guard_scalar

from . import formats, ops
from .errors import CacheLengthError, CacheMismatchError, through_dynamo
from .lowerings.pages import capturing

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


class _Length:
    """What the host knew of one counter when PyTorch had counted ``version`` writes to it."""

    __slots__ = ("captured", "counter", "replayed", "tokens", "version")

    def __init__(self, counter: weakref.ref[Tensor], replayed: bool) -> None:
        self.counter, self.replayed = counter, replayed
        self.version, self.tokens, self.captured = -1, 0, False


class Lengths:
    """What the host knows of the counters of caches (``cumulative_length``, 0-d int64), so that it need not read them.

    A counter is believed as long as it is the same tensor and PyTorch has counted no write to it. Replays of a CUDA
    graph are not counted: a counter that one may advance is marked, and from then on read at every call. During a
    capture the host knows of a cache that it is empty, and what calls and resets within captures have made of it.
    """

    def __init__(self) -> None:
        self._known: dict[int, _Length] = {}

    def know(self, counter: Tensor, tokens: int, captured: bool = False) -> None:
        """The counter holds ``tokens`` now; ``captured``: it will, at this place of the CUDA graph being captured."""
        key = id(counter)
        known = self._known.get(key)
        if known is None or known.counter() is not counter:
            if counter.is_inference():  # its writes are not counted
                return
            ref = weakref.ref(counter, functools.partial(self._forget, key))
            known = self._known[key] = _Length(ref, hasattr(counter, "_fu_replayed"))
        known.version, known.tokens, known.captured = counter._version, tokens, captured
        if captured:
            self.mark(counter)

    def known(self, counter: Tensor, captured: bool = False) -> int | None:
        """Tokens by the counter, or none where the host has to read it; ``captured``: during a capture."""
        known = self._known.get(id(counter))
        if known is None or known.counter() is not counter or known.version != counter._version:
            return None
        if captured:
            return known.tokens if known.captured or not known.tokens else None
        return None if known.captured or known.replayed else known.tokens

    def mark(self, counter: Tensor) -> None:
        """Replays of a CUDA graph may advance this counter from now on."""
        counter._fu_replayed = True  # type: ignore[attr-defined]  # what is known may be lost before the tensor is
        known = self._known.get(id(counter))
        if known is not None and known.counter() is counter:
            known.replayed = True

    def read(self, counters: Sequence[Tensor]) -> list[int]:
        """Tokens by each counter. What is not known is read, in one go for each device that counters lie on."""
        found = [self.known(c) for c in counters]
        if None not in found:
            return found  # type: ignore[return-value]
        places: dict[torch.device, list[int]] = {}
        for i, counter in enumerate(counters):
            places.setdefault(counter.device, []).append(i)
        for indices in places.values():
            # Those that are known too: the values of all cost a GPU no more than the value of one.
            if any(found[i] is None for i in indices):
                values = torch.stack([counters[i].reshape(()) for i in indices]).tolist()
                for i, value in zip(indices, values, strict=True):
                    found[i] = value
        return found  # type: ignore[return-value]

    def _forget(self, key: int, gone: weakref.ref[Tensor]) -> None:
        if (known := self._known.get(key)) is not None and known.counter is gone:
            del self._known[key]


LENGTHS = Lengths()


def starts_at_counter(ctx: Context, gm: fx.GraphModule, readers: dict[str, int], counters: set[int]) -> bool:
    """Whether every operator that stands at a position of a cache stands at ``arange(S) + cumulative_length``.

    The counter as it was when the call began: then one number tells all of them where they are.

    Args:
        ctx, gm: a graph after all passes.
        readers: name of an operator -> index of the position among its arguments.
        counters: which arguments are counters that the runtime looks at.
    """
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    for node in gm.graph.nodes:
        at = readers.get(ops.name_of(node.target) or "")
        if at is None:
            continue
        counter = counter_of(ctx, node.args[at], node, order)  # type: ignore[arg-type]
        if counter is None or ctx.index(counter) not in counters:
            return False
    return True


def counter_of(ctx: Context, position: fx.Node, reader: fx.Node, order: dict[fx.Node, int]) -> fx.Node | None:
    """The counter, not yet advanced, that ``position`` starts from: the placeholder, or none where it is not so.

    Args:
        ctx: of the graph.
        position: ``arange(S) + cumulative_length``, or a view of the counter as one position.
        reader: the operator that reads ``position``.
        order: position of every node in the graph.
    """
    aten = torch.ops.aten
    if position.target is aten.view.default:  # passes/positions.py: one token, the counter itself
        counter, moment = position.args[0], reader
    elif position.target is aten.add.Tensor and not position.kwargs and len(position.args) == 2:
        (counter, tokens), moment = position.args, position
        if getattr(counter, "target", None) is aten.arange.default:
            counter, tokens = tokens, counter
        if getattr(tokens, "target", None) is not aten.arange.default or len(tokens.args) != 1:
            return None
    else:
        return None
    while isinstance(counter, fx.Node) and counter.target in (aten.to.device, aten._to_copy.default):
        counter = counter.args[0]
    if not isinstance(counter, fx.Node) or not ctx.path(counter).endswith("cumulative_length"):
        return None
    advanced = any(order[user] < order[moment] for user in writers(counter))
    return None if advanced else counter


def writers(counter: fx.Node) -> list[fx.Node]:
    """The nodes that may write to a tensor, through views of it too."""
    found = []
    for user in counter.users:
        schema = getattr(user.target, "_schema", None)
        if schema is None or schema.is_mutable:
            if ops.name_of(user.target) is None:  # ours write to caches and to the states of linears
                found.append(user)
        elif user.op == "call_function" and any(r.alias_info is not None for r in schema.returns):
            found += writers(user)
    return found


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
    What empties or crops a layer tells ``LENGTHS`` how many tokens are left. Idempotent; correct calls are not changed.
    """
    try:
        from transformers import cache_utils
    except ImportError:  # without transformers there is no such cache, and the backend still runs other modules
        return
    torch._dynamo.assume_constant_result(refuse)
    for cls in (cache_utils.StaticLayer, cache_utils.StaticSlidingWindowLayer):
        if not getattr(cls.update, "_fu_checked", False):
            cls.update = _checked(cls.update)  # type: ignore[method-assign]
    layer: Any = cache_utils.StaticLayer
    for name in ("lazy_initialization", "reset", "crop"):
        method = getattr(layer, name, None)  # transformers 5.17 has no crop
        if method is not None and not getattr(method, "_fu_counted", False):
            setattr(layer, name, _counted(method))


def _counted(method: Callable[..., None]) -> Callable[..., None]:
    """A method of a static layer after which ``LENGTHS`` knows what the host can know."""

    @functools.wraps(method)
    def counted(self: Any, *args: Any, **kwargs: Any) -> None:
        counter = self.cumulative_length
        if torch.compiler.is_compiling() or not isinstance(counter, Tensor):
            return method(self, *args, **kwargs)
        captured = capturing(counter)
        if method.__name__ == "reset":
            left: int | None = 0
        elif method.__name__ == "crop":
            left = None if captured else LENGTHS.known(counter)
            if left is not None:  # assisted decoding may give a tensor
                left -= abs(int(args[0] if args else kwargs["tokens_to_remove"]))
        else:
            left = _on_host(counter)
        method(self, *args, **kwargs)
        if left is not None:
            LENGTHS.know(self.cumulative_length, left, captured)
        return None

    counted._fu_counted = True  # type: ignore[attr-defined]
    return counted


def _on_host(counter: Tensor) -> int | None:
    return int(counter) if counter.device.type == "cpu" else None


def _checked(update: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(update)
    def checked(self: Any, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        found = mismatch(self, key_states)
        if found is not None:
            refuse(type(self).__name__, *found)
        return update(self, key_states, value_states, *args, **kwargs)

    checked._fu_checked = True  # type: ignore[attr-defined]
    return checked
