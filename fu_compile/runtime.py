"""What is called at each step: checks what the graph was compiled for, binds packed weights and caches, runs the graph.

The work per call is a fixed number of comparisons (identity and version of every packed parameter and every cache
tensor) and one list of arguments; ``benchmarks/overhead.py`` measures it. Everything expensive happens only when a
comparison fails: packing, importing a cache, reading a length from the device.
"""

from __future__ import annotations

import operator
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from . import formats
from .caches import COPIES, LENGTHS, Copy, KVSpec, too_short
from .errors import CacheMismatchError, MetaParameterError, WeightsChangedError
from .keys import on_grid
from .lowerings.dense import dense_bytes
from .lowerings.pages import calling
from .report import GraphReport
from .weights import STORE, PackSpec, Sample, key_risk, key_tables, measured_risk

PROGRESS = 200_000_000
"""Parameters from which packing shows a progress bar: less than that takes a few seconds."""


Size = int | tuple[int, int | None]
"""A size of a call: a number, or (argument index, dimension) of a tensor that has it, dimension none: the argument."""


def size(args: Sequence[Any], what: Size) -> int:
    """The size in this call."""
    if isinstance(what, int):
        return what
    index, dim = what
    return args[index] if dim is None else args[index].shape[dim]


@dataclass
class Signature:
    """How Dynamo's arguments and results map to those of the rewritten graph."""

    keep: list[int]
    """Dynamo's arguments that the rewritten graph still reads, in order."""
    kv: list[KVSpec]
    packs: list[PackSpec]
    extra_outputs: int
    limits: list[tuple[int, Size, str]]
    """(argument index of a cumulative_length, slots of its cache, layer) for every StaticCache that is written."""
    tokens: Size
    """Tokens per sequence of a call."""
    counted: bool = False
    """Whether every operator stands in its cache where the cumulative_length says (``caches.starts_at_counter``)."""
    names: dict[int, str] = field(default_factory=dict)
    """Argument index -> path, for messages."""
    caches: list[int] = field(default_factory=list)
    """Arguments that belong to a cache: all that a graph may write to."""


class Binding:
    """The packed constants for one set of parameter objects."""

    __slots__ = (
        "__weakref__",
        "_dead",
        "_refs",
        "constants",
        "generation",
        "ids",
        "pick",
        "sample",
        "tables",
        "uncounted",
        "versions",
    )

    def __init__(self, signature: Signature, args: Sequence[Any]) -> None:
        sources = sorted({i for spec in signature.packs for i in spec.sources})
        for i in sources:
            if args[i].is_meta:
                raise MetaParameterError(f"{signature.names.get(i, f'argument {i}')} has no values", where="packing")
        total = sum(spec.n * spec.k for spec in signature.packs)
        bar = tqdm(total=total, unit="weight", unit_scale=True, desc="packing", disable=total < PROGRESS, leave=False)
        self.constants: list[Tensor] = []
        with bar:
            for spec in signature.packs:
                found = [args[i] for i in spec.sources]
                key = (
                    spec.precision,
                    spec.group,
                    spec.interleave,
                    len(spec.weights),
                    len(spec.biases),
                    spec.gain is None,
                    spec.rows,
                )
                self.constants += STORE.get(key, found, lambda spec=spec, found=found: spec.pack(found))  # type: ignore[misc]
                bar.update(spec.n * spec.k)
        self.tables = [_tables(spec, args) for spec in signature.kv]
        # With two indices at least itemgetter gives a tuple.
        self.pick = operator.itemgetter(*sources, *sources[:1]) if sources else _no_sources
        packed = self.pick(args)
        self.ids = tuple(map(id, packed))
        self.uncounted = any(t.is_inference() for t in packed)
        self.versions = [0 if self.uncounted else t._version for t in packed]
        self._dead: list[Any] = []  # not a method of ours: a cycle would keep the constants until the next collection
        self._refs = [weakref.ref(t, self._dead.append) for t in packed]
        self.sample = Sample(packed)
        self.generation = STORE.generation
        STORE.holders.add(self)

    def release(self, ids: set[int]) -> None:
        """Lets go of the constants if a parameter they were made from is among ``ids``; the next call binds again."""
        if not ids.isdisjoint(self.ids):
            self.constants, self.ids = [], ()

    def current(self, args: Sequence[Any]) -> bool:
        """Whether these are the parameters that were packed, and nobody has found a write to them since."""
        found = self.pick(args)
        # Where a parameter has died, its id may have been given to another tensor.
        if self._dead or tuple(map(id, found)) != self.ids or self.generation != STORE.generation:
            return False
        return self.uncounted or [t._version for t in found] == self.versions


def _tables(spec: KVSpec, args: Sequence[Any]) -> tuple[Tensor, Tensor]:
    sources, biases = ([args[i] for i in indices] for indices in (spec.weights, spec.biases))
    rotated = spec.kv_format == "int4"  # a range per channel loses nothing, whatever the keys
    known = STORE.calibrated(sources)
    if known is not None:
        _refuse(spec, measured_risk(known) if rotated else None)
        device = sources[0].device
        return known.mean.to(device), (known.balance if rotated else known.reads).to(device)
    rows = spec.rows or (None,) * len(sources)
    # Packed weights are dequantised where they are read: the keys' rows for the risk, all of them for tables of a bias.
    read = range(len(sources)) if spec.biases else (min(1, len(sources) - 1),)
    weights = [
        w if r is None or i not in read else r.dense(w) for i, (w, r) in enumerate(zip(sources, rows, strict=True))
    ]
    inv_freq = None if spec.inv_freq is None else args[spec.inv_freq]
    if spec.biases:
        tables = STORE.get(
            ("tables", spec.heads, spec.rows),
            [*sources, *biases],
            lambda: key_tables(spec.heads, weights, biases, inv_freq),
        )
    else:
        device = next(a.device for a in args if isinstance(a, Tensor))
        tables = formats.kv_tables(spec.heads[1], spec.heads[2], device)
    norm = None if spec.key_norm is None else args[spec.key_norm]
    _refuse(spec, key_risk(weights, biases, norm, spec.heads, inv_freq, tables) if rotated else None)  # type: ignore[arg-type]
    mean, balance = tables
    key_weight = sources[min(1, len(sources) - 1)] if sources else None
    if not rotated:
        reads = None if key_weight is None else STORE.reads(key_weight)
        return mean, torch.zeros_like(balance) if reads is None else reads.to(balance)
    first = None if key_weight is None else STORE.first_key(key_weight)
    return (mean if first is None else on_grid(first.to(mean), mean, balance)), balance


def _refuse(spec: KVSpec, reason: str | None) -> None:
    if reason:  # the graph was made for other weights, of this model or of another of its kind
        raise WeightsChangedError(
            f"{reason}; the compiled graph does not",
            where=spec.layer,
            advice="Call torch._dynamo.reset() and run again.",
        )


def _none() -> None:
    return None


def _no_sources(args: Sequence[Any]) -> tuple[Any, ...]:
    return ()


class CompiledGraph:
    """One graph, ready to be called with Dynamo's arguments."""

    def __init__(
        self, inner: Callable[..., Sequence[Any]], signature: Signature, graph: GraphReport, counters: Counter[str]
    ) -> None:
        self.inner = inner
        self.signature = signature
        self.graph = graph
        self.counters = counters
        self._bindings: dict[int, Binding] = {}
        self._copies: weakref.WeakSet[Copy] = weakref.WeakSet()
        self._last: list[Callable[[], Copy | None]] = [_none] * len(signature.kv)  # weak: a store dies with its cache
        self._anchor = signature.packs[0].weights[0] if signature.packs else None
        self._phase = f"{graph.phase}_calls"
        self._prefill = graph.phase != "decode"
        self._capturable = torch.cuda.is_available()

    def __call__(self, *args: Any) -> Sequence[Any]:
        """Runs the graph. Raises a named error before anything is changed when the call cannot be right."""
        signature = self.signature
        capturing = self._capturable and torch.cuda.is_current_stream_capturing()
        if capturing:
            self._before_capture(args)
        lengths = self._lengths(args, capturing) if signature.limits else {}
        extras: list[Any] = []
        constants: list[Tensor] = []
        copies: list[Copy | None] = []
        if self._anchor is not None or signature.kv:
            binding = self.bind(args, sampled=not capturing)
            constants = binding.constants
            if signature.kv:
                copies = self._caches(args, binding, lengths, extras, capturing)
        inner = self._outside if self._prefill and torch.is_inference_mode_enabled() else self.inner
        # A decode step is captured once for every position.
        first = None if capturing and not self._prefill else self._first(lengths)
        with calling(first, capturing):
            out = inner(*[args[i] for i in signature.keep], *extras, *constants)
        if lengths:
            tokens = size(args, signature.tokens)
            for i, length in lengths.items():
                LENGTHS.know(args[i], length + tokens, capturing)
        if copies:
            out = self._seen(args, out, copies, binding)
        counters = self.counters
        counters["calls"] += 1
        counters[self._phase] += 1
        self.graph.calls += 1
        return out

    def _outside(self, *inputs: Any) -> Sequence[Any]:
        """Runs a prefill outside inference mode: the cache it makes can be reset anywhere, and its writes are counted.

        Where a cache already consists of inference tensors, the mode stays: they can be written to nowhere else.
        """
        caches = set(self.signature.caches)
        if any(i in caches and x.is_inference() for i, x in zip(self.signature.keep, inputs, strict=False)):
            return self.inner(*inputs)
        with torch.inference_mode(False), torch.no_grad():
            return self.inner(*inputs)

    def measure(self, seen: set[int]) -> dict[str, int]:
        """Bytes held and FP8 calls saturated, leaving out tensors whose ids are in ``seen`` (and adding to it)."""
        found = Counter(bytes_packed=0, bytes_dense=0, bytes_kv=0, saturations=0)
        for binding in self._bindings.values():
            for t in binding.constants:
                if id(t) in seen:
                    continue
                seen.add(id(t))
                found["bytes_packed"] += t.nbytes
                found["bytes_dense"] += dense_bytes(t)
                if t.dtype == torch.float32 and t.shape == (formats.FP8_STATE,):
                    found["saturations"] += int(formats.fp8_counters(t)["saturations"])
        for copy in self._copies:
            if id(copy) not in seen:
                seen.add(id(copy))
                found["bytes_kv"] += copy.bytes
        return dict(found)

    # ---- weights ---------------------------------------------------------------------------------------------------

    def bind(self, args: Sequence[Any], sampled: bool = True) -> Binding:
        """The constants for these arguments, packed now if the parameters are new or have changed.

        ``sampled``: uncounted writes are looked for too, which reads the device (not in a ``torch.cuda.graph``).
        """
        anchor = id(args[self._anchor]) if self._anchor is not None else 0
        binding = self._bindings.get(anchor)
        if binding is not None and binding.current(args):
            if not (sampled and (self._prefill or binding.uncounted) and binding.sample.changed()):
                return binding
            STORE.drop(binding.pick(args))
        packs, repacks = STORE.packs, STORE.repacks
        self._bindings.pop(anchor, None)  # its constants may be freed before new ones are made
        del binding
        start = time.perf_counter()
        fresh = self._bindings[anchor] = Binding(self.signature, args)
        seconds = self.graph.seconds
        seconds["packing"] = seconds.get("packing", 0.0) + time.perf_counter() - start
        if self._anchor is not None:
            weakref.finalize(args[self._anchor], self._bindings.pop, anchor, None)
        self.counters["packs"] += STORE.packs - packs
        self.counters["repacks"] += STORE.repacks - repacks
        return fresh

    # ---- capture ---------------------------------------------------------------------------------------------------

    def _before_capture(self, args: Sequence[Any]) -> None:
        """In a ``torch.cuda.graph``: refuses what would have to read the device.

        Whether the cache is long enough cannot be asked here; the kernels look at the position themselves, and past the
        end they write nothing and give NaN. A prefill is captured for the position that the host knows, and gives NaN
        where a replay starts at another.

        Raises:
            WeightsChangedError: parameters would have to be packed.
            CacheMismatchError: pages of the cache would have to be imported.
        """
        advice = "Call the model once in the same way before torch.cuda.graph."
        if self._anchor is not None:
            binding = self._bindings.get(id(args[self._anchor]))
            if binding is None or not binding.current(args):
                raise WeightsChangedError("packing weights cannot be captured in a CUDA graph", advice=advice)
        for spec in self.signature.kv:
            if spec.created:
                continue
            keys, values = args[spec.keys], args[spec.values]
            copy = COPIES.find(keys, values, spec.kv_format)
            empty = spec.length is not None and LENGTHS.known(args[spec.length], captured=True) == 0
            if copy is None or not (empty or copy.current(keys, values)):
                raise CacheMismatchError(
                    "the INT4 pages of this cache are not those of its rows, and importing them cannot be captured",
                    where=spec.layer,
                    advice=advice,
                )

    # ---- caches ----------------------------------------------------------------------------------------------------

    def _lengths(self, args: Sequence[Any], capturing: bool) -> dict[int, int]:
        """Argument index -> tokens by every cumulative_length before this call; an overflow is an error here.

        What the host does not know is read from the device, once for all of them; during a capture it is left out. A
        replay advances a length without moving its version: it is marked, and never believed again.
        """
        limits = self.signature.limits
        if capturing:
            found = {i: LENGTHS.known(args[i], captured=True) for i, _, _ in limits}
            for i in found:
                LENGTHS.mark(args[i])
            return {i: length for i, length in found.items() if length is not None}
        tokens = size(args, self.signature.tokens)
        before = LENGTHS.read([args[i] for i, _, _ in limits])
        for (_, slots, layer), used in zip(limits, before, strict=True):
            if used + tokens > (limit := size(args, slots)):
                raise too_short(limit, used, tokens, layer)
        return {i: used for (i, _, _), used in zip(limits, before, strict=True)}

    def _first(self, lengths: dict[int, int]) -> int | None:
        """The position of this call in all caches; none where they differ or not every one is known."""
        if not self.signature.counted or len(lengths) < len(self.signature.limits):
            return None
        found = set(lengths.values())
        return found.pop() if len(found) == 1 else None

    def _caches(
        self, args: Sequence[Any], binding: Binding, lengths: dict[int, int], extras: list[Any], capturing: bool
    ) -> list[Copy | None]:
        """Appends the store and the tables of every layer to ``extras``, importing what is new or was changed."""
        copies: list[Copy | None] = []
        last = self._last
        for n, (spec, tables) in enumerate(zip(self.signature.kv, binding.tables, strict=True)):
            if spec.created:
                copies.append(None)
                extras += tables
                continue
            keys, values = args[spec.keys], args[spec.values]
            copy = last[n]()
            if copy is None or not copy.current(keys, values):
                copy = COPIES.find(keys, values, spec.kv_format)
                last[n] = _none if copy is None else weakref.ref(copy)
            if capturing and copy is not None and not copy.current(keys, values):
                # Empty (_before_capture). A copy of its own: what the cache holds until a replay is still to import.
                copy = Copy(keys, values, copy.store, copy.tables)
            elif copy is None or not copy.current(keys, values):
                known = copy is not None
                tables = tuple(t.to(keys.device) for t in tables)  # type: ignore[assignment]
                store = copy.store if known else None  # type: ignore[union-attr]
                copy = COPIES.attach(keys, values, tables, store, spec.kv_format)
                # The whole cache where the graph does not say how many tokens are in it.
                used = keys.shape[2] if spec.length is None else lengths[spec.length]  # one of signature.limits
                last[n] = weakref.ref(copy)
                self._copies.add(copy)
                if used:
                    copy.fill(keys, values, used)
                    self.counters["reimports" if known else "imports"] += 1
            copies.append(copy)
            extras += copy.store
            extras += copy.tables
        return copies

    def _seen(
        self, args: Sequence[Any], out: Sequence[Any], copies: list[Copy | None], binding: Binding
    ) -> Sequence[Any]:
        """Takes the caches as they are now for ours; attaches the stores that this call created."""
        extra = self.signature.extra_outputs
        stores = list(out[len(out) - extra :]) if extra else []
        for spec, tables, copy in zip(self.signature.kv, binding.tables, copies, strict=True):
            if copy is None:
                keys, values = out[spec.keys], out[spec.values]
                copy = COPIES.attach(keys, values, tables, stores[:4])
                self._copies.add(copy)
                del stores[:4]
                copy.seen(keys, values)
            else:
                copy.seen(args[spec.keys], args[spec.values])
        return out[: len(out) - extra] if extra else out
