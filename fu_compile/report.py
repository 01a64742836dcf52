"""What happened to a model: the data that the backend writes down, and its text, dictionary and page.

The backend makes one :class:`ModelReport` per compiled model (:func:`new_record`) and appends a :class:`GraphReport`
per graph; the runtime counts. ``fu_compile.report(model)`` reads them, ``fu_compile.explain(model)`` makes one without
compiling or packing anything.

The *layer map* is the short answer: one row per decoder layer, one column per piece of the Llama block, in each cell
the number format that the piece runs in. It is computed from the final operators of a graph by the tables below.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import io
import itertools
import math
import re
import shutil
import sys
import time
import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fu_compile.errors import OptionError, through_dynamo
from fu_compile.options import Options

if TYPE_CHECKING:
    import torch
    from rich.console import RenderableType

    from fu_compile.capture import Captured
    from fu_compile.passes import Context, Event
    from fu_compile.repro import Source

VERSION = 1
"""Version of the dictionary that :meth:`Report.as_dict` makes."""

COUNTERS: dict[str, str] = {
    "calls": "calls of a compiled graph",
    "prefill_calls": "calls with several tokens against a cache",
    "decode_calls": "calls with one token per sequence against a cache",
    "score_calls": "calls without a cache",
    "graphs": "graphs that Dynamo handed over",
    "captures": "CUDA graphs captured",
    "fallbacks": "times something was left to the uncompiled or general path",
    "reimports": "INT4 caches read again because something else wrote to the model's cache",
    "imports": "INT4 caches filled from the model's cache for the first time",
    "repacks": "weights packed again because a parameter changed",
    "packs": "weights packed",
    "saturations": "FP8 calls that were repeated because a value did not fit",
    "bytes_original": "bytes of the model's own parameters",
    "bytes_packed": "bytes of packed weights",
    "bytes_dense": "bytes of dequantised or folded copies of weights (reference lowerings)",
    "bytes_kv": "bytes of the INT4 copies of static caches (an Int4Cache has nbytes)",
}
"""Every counter and its meaning: the keys of ``report.counters``."""

MEMORY: dict[str, str] = {
    "parameters": "the model's own parameters",
    "int4": "packed INT4 weights, scales included",
    "fp8": "packed FP8 weights, scales included",
    "bf16": "16-bit weights with the gain folded",
    "kv_model": "the model's own cache",
    "kv_int4": "INT4 cache, tables included",
}
"""What memory goes to, and its meaning: the keys of ``GraphReport.memory``."""

STORES: dict[str, str] = {
    "none": "no cache",
    "DynamicCache": "a cache that grows with every token",
    "StaticCache": "the model's own StaticCache",
    "StaticCache + INT4": "the user's StaticCache, with an INT4 copy that attention reads",
    "Int4Cache": "the user's own INT4 store (fu_compile.Int4Cache)",
}
"""Which cache a graph works on: the values of ``GraphReport.store``."""

PIECES = ("norms", "qkv", "attention", "cache", "swiglu", "residual", "head")
"""Columns of the layer map."""

FORMATS: dict[str, str] = {
    "int4": "4-bit codes with a scale per group",
    "int4-channel": "4-bit codes, keys with a range per channel and page",
    "fp8": "8-bit floats (e4m3)",
    "bf16": "16 bit, gain folded",
    "exact": "eager's own numerics",
    "model": "the model's dtype",
    "missed": "not recognised: see the near misses",
}
"""What a cell of the layer map can say."""

STEPS = {"capture": "capture", "rest": "compile", "packing": "pack"}
"""Keys of ``GraphReport.seconds`` that are no passes, and how the tables call them."""

_OPERATORS: dict[str, tuple[tuple[str, str], ...]] = {
    "rms_norm": (("norms", "exact"),),
    "rotary": (("qkv", "exact"),),
    "swiglu": (("swiglu", "exact"),),
    "residual": (("residual", "exact"),),
    "qkv": (("qkv", "exact"),),
    "attention": (("attention", "exact"),),
    "kv_write_": (("cache", "model"),),
    "kv_roll_": (("cache", "model"),),
    "kv_fill_": (("cache", "model"),),
    "kv_cat": (("cache", "model"),),
    "qkv_rope": (("qkv", ""),),
    "qkv_append": (("qkv", ""), ("cache", "int4")),
    "attention_int4": (("attention", "int4"), ("cache", "int4")),
    "attention_prefill": (("attention", "model"),),
    "kv_store": (("cache", "int4"),),
    "kv_append_": (("cache", "int4"),),
    "kv_extend_": (("cache", "int4"),),
    "kv_update": (("cache", "int4"),),
    "kv_round": (("cache", "int4"),),
    "kv_dequantize": (("cache", "int4"),),
    "packed_weight": (),  # by the path of its projection
}
"""Operator -> the pieces it runs and their format; an empty format means: as the projection beside it."""

_LINEAR = {
    "linear_int4": "int4",
    "linear_fp8": "fp8",
    "mlp_fp8": "fp8",
    "linear_bf16": "bf16",
    "linear_exact": "exact",
}
_FUSED_PIECES = {"rms": "norms", "swiglu": "swiglu", "residual": "residual"}
_PATH_PIECES: tuple[tuple[str, str], ...] = (
    (r"(q_proj|k_proj|v_proj|qkv)\w*$", "qkv"),
    (r"(o_proj|out_proj|down_proj)\w*$", "residual"),
    (r"(gate|up|w1|w3)\w*$", "swiglu"),
    (r"head\w*$", "head"),
    (r"(norm\w*|ln_\w+)$", "norms"),
    (r"attn\w*$", "qkv"),
    (r"(mlp|feed_forward)$", "swiglu"),
)
"""End of a module path -> piece; the first that fits."""
_PASS_PIECES = {
    "rms_norm": "norms",
    "rotary": "qkv",
    "swiglu": "swiglu",
    "kv_write": "cache",
    "redirect_kv": "cache",
    "attention": "attention",
    "qkv": "qkv",
    "residual": "residual",
    "last_logits": "head",
    "fold_gain": "norms",
}


@dataclass
class GraphReport:
    """One graph: what was decided and why, what fired, what is left. Written by the backend."""

    index: int
    phase: str
    """``prefill``, ``decode`` or ``score``."""
    batch: str
    """A number, or the symbol of a size that changes."""
    query_length: str
    decision: dict[str, str] = field(default_factory=dict)
    """What was decided -> value."""
    reasons: dict[str, str] = field(default_factory=dict)
    """What was decided -> why, a sentence."""
    events: list[Event] = field(default_factory=list)
    """Rewrites that fired and near misses, in order."""
    fused: list[tuple[str, str, str]] = field(default_factory=list)
    """Final operators in graph order: (layer path, operator, detail). The words of ``detail`` name what is fused into a
    projection: ``rms``, ``bias``, ``swiglu``, ``residual``."""
    lowerings: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Operator -> (lowering, why this one)."""
    left_to_aten: dict[str, int] = field(default_factory=dict)
    """ATen operators that remain -> how many."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Step (``capture``, a pass, ``rest``: compiling, ``packing``) -> seconds. All of it is paid once."""
    calls: int = 0
    memory: dict[str, dict[str, int]] = field(default_factory=dict)
    """Layer -> key of :data:`MEMORY` -> bytes that a call of this graph needs; sizes as in the first call."""
    store: str = "none"
    """Which cache the graph reads and writes, a key of :data:`STORES`."""
    timed_calls: int = 0
    """Calls inside :func:`timed`."""
    timed_seconds: float = 0.0
    """Wall time of these calls."""
    source: Source | None = field(default=None, repr=False)
    """What :meth:`repro` writes down."""

    def operators(self) -> Counter[str]:
        """How many of each of our operators the final graph has."""
        return Counter(name for _, name, _ in self.fused)

    def fired(self) -> Counter[str]:
        """How often each pass fired."""
        return Counter(event.name for event in self.events if event.fired)

    def near_misses(self) -> list[Event]:
        """What a pass nearly took."""
        return [event for event in self.events if not event.fired]

    @property
    def mean_seconds(self) -> float | None:
        """Mean wall time of the calls inside :func:`timed`; none without any."""
        return self.timed_seconds / self.timed_calls if self.timed_calls else None

    def repro(self, path: str | Path) -> Path:
        """Writes a script that rebuilds this graph with random data and compares it with the unrewritten one.

        Raises:
            DataError: the graph holds something that has no form as text.
        """
        from fu_compile.repro import write

        return write(self, path)

    def as_dict(self) -> dict[str, Any]:
        """Everything but the source, in types that JSON has."""
        return {
            **{f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "source"},
            "events": [dataclasses.asdict(event) for event in self.events],
            "fused": [list(entry) for entry in self.fused],
            "lowerings": {name: list(pair) for name, pair in self.lowerings.items()},
            "operators": dict(self.operators()),
            "fired": dict(self.fired()),
            "layer_map": {
                layer: {piece: dataclasses.asdict(cell) for piece, cell in row.items()}
                for layer, row in layer_map(self).items()
            },
        }


@dataclass
class Cell:
    """One piece of one layer."""

    formats: list[str] = field(default_factory=list)
    """Keys of :data:`FORMATS`, without repetition."""
    lowerings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Operators with their lowering and its reason; near misses with their reason."""
    missed: bool = False

    def __str__(self) -> str:
        text = "+".join(self.formats) or ("missed" if self.missed else "-")
        return f"{text}!" if self.missed and self.formats else text


@dataclass
class ModelReport:
    """One compiled model. Written by the backend and the runtime, read by :class:`Report`."""

    name: str
    options: Options
    graphs: list[GraphReport] = field(default_factory=list)
    counters: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(COUNTERS, 0)))
    fallbacks: list[tuple[str, str]] = field(default_factory=list)
    """(reason, where), each pair once; ``counters["fallbacks"]`` counts every time."""
    notes: list[str] = field(default_factory=list)
    """What else a reader should know: options that do not apply on this device, for example."""
    ties: list[weakref.ref[Any]] = field(default_factory=list, repr=False)
    alive: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet, repr=False)
    """The compiled graphs, whose ``measure`` gives what is counted only when somebody asks: bytes, device counters."""

    def counted(self) -> Counter[str]:
        """The counters, with what the living graphs hold now; what they share is counted once."""
        total, seen = Counter(self.counters), set[int]()
        for graph in self.alive:
            total.update(graph.measure(seen))
        return total

    def tie(self, *objects: object) -> None:
        """Remembers (weakly) modules or parameters by which :func:`report` finds this record."""
        known = {id(ref()) for ref in self.ties}
        self.ties += [weakref.ref(o) for o in objects if id(o) not in known]

    def add_graph(self, graph: GraphReport) -> None:
        """Appends a graph and counts it."""
        self.graphs.append(graph)
        self.counters["graphs"] += 1

    def fall_back(self, reason: str, where: str = "") -> bool:
        """Counts a fallback. True if this reason and place are new, so that the caller warns once."""
        self.counters["fallbacks"] += 1
        if (reason, where) in self.fallbacks:
            return False
        self.fallbacks.append((reason, where))
        return True

    def as_dict(self) -> dict[str, Any]:
        """Everything, in types that JSON has."""
        return {
            "name": self.name,
            "options": self.options.as_dict(),
            "counters": dict(self.counted()),
            "fallbacks": [{"reason": reason, "where": where} for reason, where in self.fallbacks],
            "notes": list(self.notes),
            "memory": memory(self.graphs),
            "graphs": [graph.as_dict() for graph in self.graphs],
        }


# ---- the registry --------------------------------------------------------------------------------------------------

_records: list[ModelReport] = []
_UNTIED = 64
"""Records kept of compiled callables whose model is unknown; the oldest go first."""


def new_record(name: str, options: Options, *ties: object) -> ModelReport:
    """A new record in the registry, found later by any of ``ties`` (the model, or some of its parameters)."""
    record = ModelReport(name, options)
    record.tie(*ties)
    alive = [r for r in _records if not r.ties or any(ref() is not None for ref in r.ties)]
    untied = [r for r in alive if not r.ties][:-_UNTIED]
    _records[:] = [r for r in alive if r not in untied] + [record]
    return record


def record_of(model: torch.nn.Module) -> ModelReport | None:
    """The newest record that is tied to ``model``, to one of its modules or to one of its parameters."""
    parameters = {id(p) for p in model.parameters()}
    owned = parameters.union(map(id, model.modules()))
    for record in reversed(_records):
        tie: Any
        for tie in (ref() for ref in record.ties):
            if id(tie) in owned:
                return record
            # A model that was given other parameters since (load_state_dict(assign=True)) is still the same model.
            if hasattr(tie, "parameters") and not parameters.isdisjoint(map(id, tie.parameters())):
                return record
    return None


def records_of(model: torch.nn.Module) -> list[ModelReport]:
    """The newest record of ``model`` and those of its pieces with the same options: where Dynamo cuts a model (dynamic
    RoPE) nothing but the parameters tells that the pieces belong together."""
    newest = record_of(model)
    if newest is None:
        return []
    owned = {id(p) for p in model.parameters()}
    return [
        r
        for r in _records
        if r is newest
        or (r.options == newest.options and any((o := ref()) is not None and id(o) in owned for ref in r.ties))
    ]


def models_without_calls() -> list[str]:
    """Names of living models that ``fu_compile.compile`` was called with and none of whose calls arrived."""
    from torch import nn

    return [
        record.name
        for record in _records
        if not record.counters["calls"] and any(isinstance(ref(), nn.Module) for ref in record.ties)
    ]


# ---- what a user gets ----------------------------------------------------------------------------------------------


class Report:
    """What happened to one or several models. ``str()`` is text, :meth:`as_dict` JSON, :meth:`to_html` a page."""

    def __init__(self, models: Iterable[ModelReport], nothing: str = "") -> None:
        self.models = list(models)
        self._nothing = nothing or "nothing was compiled with backend 'futransformer' in this process"

    @property
    def graphs(self) -> list[GraphReport]:
        """The graphs of all models, in order."""
        return [graph for model in self.models for graph in model.graphs]

    @property
    def counters(self) -> dict[str, int]:
        """A flat dictionary with every key of :data:`COUNTERS`, summed over the models."""
        total = Counter(dict.fromkeys(COUNTERS, 0))
        for model in self.models:
            for name, value in model.counted().items():
                total[name] += int(value)
        return dict(total)

    @property
    def fallbacks(self) -> list[tuple[str, str]]:
        """(reason, where) of everything that was left to another path."""
        return [entry for model in self.models for entry in model.fallbacks]

    def as_dict(self) -> dict[str, Any]:
        """Everything, in types that JSON has, with a version."""
        return {"version": VERSION, "counters": self.counters, "models": [m.as_dict() for m in self.models]}

    def to_html(self, path: str | Path) -> Path:
        """Writes one self-contained page (no scripts or styles from elsewhere) and returns its path."""
        from fu_compile.report_html import page

        target = Path(path)
        target.write_text(page(self), encoding="utf-8")
        return target

    def repro(self, folder: str | Path) -> list[Path]:
        """Writes the script of every graph (:meth:`GraphReport.repro`): ``graph0.py``... in a folder, made if need be.

        Raises:
            DataError: a graph holds something that has no form as text.
        """
        return [graph.repro(Path(folder) / f"graph{n}.py") for n, graph in enumerate(self.graphs)]

    def to_text(self, width: int | None = None) -> str:
        """The text of ``str()``, at most ``width`` columns wide (default: the terminal's, 100 without one)."""
        if not self.models:
            return self._nothing
        return render(itertools.chain.from_iterable(_model_text(model) for model in self.models), width)

    def __str__(self) -> str:
        return self.to_text()

    def __repr__(self) -> str:
        return f"<Report: {len(self.models)} models, {len(self.graphs)} graphs>"


def report(model: torch.nn.Module | None = None) -> Report:
    """What the backend did with ``model``, or with every model of this process.

    Args:
        model: a model that was compiled in place, or its ``torch.compile`` wrapper; none: all of them.
    """
    if model is None:
        return Report(_records)
    model = unwrap(model)
    records = records_of(model)
    inside = {type(module).__name__ for module in model.modules()}
    for record in records:  # made from a graph, which only knows the modules inside the model
        record.name = type(model).__name__ if record.name in inside else record.name
    nothing = (
        f"no call of this {type(model).__name__} has reached backend 'futransformer' yet;"
        " print(fu_compile.doctor(model)) says whether one will"
    )
    return Report(records, nothing)


def unwrap(model: Any) -> torch.nn.Module:
    """The module inside a ``torch.compile`` wrapper; a module as it is.

    Raises:
        OptionError: for anything that is not a module.
    """
    from torch import nn

    inner = getattr(model, "_orig_mod", model)
    if not isinstance(inner, nn.Module):
        raise OptionError(f"expected a torch.nn.Module, got {type(model).__name__}", advice="Pass the model itself.")
    return inner


# ---- explain -------------------------------------------------------------------------------------------------------

PREFILL_TOKENS = 16
"""Length of the prompt that :func:`explain` makes up."""

_explained = itertools.count()


def explain(
    model: torch.nn.Module,
    *,
    mode: str | None = None,
    options: Options | Mapping[str, Any] | None = None,
    **inputs: Any,
) -> Report:
    """What the backend would do with ``model``: captures and rewrites its graphs, compiles and packs nothing.

    Works on the meta device (full-size configurations without weights). The model is left as it was.

    Args:
        model: a causal language model of transformers.
        mode, options: as for ``fu_compile.compile``.
        inputs: keyword inputs of one forward call. Without any, a prompt of 16 tokens and one decode step through a
            ``StaticCache`` are made up from the configuration.

    Raises:
        OptionError: for an unknown option.
        FuError: what compiling would raise, except that a graph without a Llama block is only reported.
    """
    import torch

    from fu_compile.backend import analyse
    from fu_compile.errors import NoLlamaBlockError

    model = unwrap(model)
    chosen = Options.resolve(mode, options)
    record = ModelReport(type(model).__name__, chosen)
    record.notes += chosen.not_applicable(_device_of(model).type).values()

    def backend(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        with through_dynamo():
            try:
                record.add_graph(analyse(gm, example_inputs, chosen, record))
            except NoLlamaBlockError as error:
                record.fall_back(error.what, error.where)
        return gm.forward

    # Dynamo keeps its entries and its knowledge of sizes per code object and function name: with a code object of its
    # own, an explanation neither uses up the model's recompilations nor makes the sizes of the next one dynamic.
    code = _call.__code__.replace(co_name=f"explain_{next(_explained)}")
    call = torch.compile(types.FunctionType(code, _call.__globals__), backend=backend)
    with _untouched(model), torch.no_grad():
        if inputs:
            # A cache is written to: the user's stays as it is.
            call(model, **{k: v if isinstance(v, torch.Tensor) else copy.deepcopy(v) for k, v in inputs.items()})
        else:
            for made_up in _made_up_inputs(model):
                call(model, **made_up)
    if not record.graphs and not record.fallbacks:
        record.fall_back("Dynamo captured no graph: the model's forward runs uncompiled code only", record.name)
    return Report([record])


def _call(self: torch.nn.Module, **kwargs: Any) -> Any:
    # Not self(...): that would run what model.compile() installed. The names are those of Module._call_impl, so that
    # parameters and inputs get the paths they have in a compiled model.
    return self._call_impl(**kwargs)  # type: ignore[operator]


@contextmanager
def _untouched(model: torch.nn.Module) -> Iterator[None]:
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _device_of(model: torch.nn.Module) -> torch.device:
    import torch

    first = next(itertools.chain(model.parameters(), model.buffers()), None)
    return torch.device("cpu") if first is None else first.device


def _made_up_inputs(model: torch.nn.Module) -> Iterator[dict[str, Any]]:
    """Inputs of a prefill and of one decode step, as ``generate`` prepares them with a static cache."""
    import torch

    config = getattr(model, "config", None)
    prepare = getattr(model, "prepare_inputs_for_generation", None)
    if config is None or prepare is None:
        raise OptionError(
            f"{type(model).__name__} has no config from which inputs could be made up",
            where="fu_compile.explain",
            advice="Pass the inputs of one forward call: fu_compile.explain(model, input_ids=...).",
        )
    from transformers import StaticCache

    from fu_compile.models import heads_of

    device, length = _device_of(model), PREFILL_TOKENS
    text = config.get_text_config(decoder=True)
    _, kv_heads, head_dim = heads_of(text)
    cache, twin = (StaticCache(config=config, max_cache_len=4 * length) for _ in range(2))
    dtype = next(model.parameters()).dtype
    cache.early_initialization(batch_size=1, num_heads=kv_heads, head_dim=head_dim, dtype=dtype, device=device)
    # The inputs are prepared on the CPU with a cache of one head and one column: masks read the length of the cache,
    # and meta tensors have no values.
    twin.early_initialization(batch_size=1, num_heads=1, head_dim=1, dtype=dtype, device=torch.device("cpu"))
    # transformers 5.24 calls it `cache`, earlier versions `past_key_values`.
    keyword = next(n for n in ("cache", "past_key_values") if n in inspect.signature(prepare).parameters)
    ids = torch.arange(length + 1).remainder(text.vocab_size).unsqueeze(0)
    for start, stop in ((0, length), (length, length + 1)):
        made = prepare(
            ids[:, start:stop],
            **{keyword: twin},
            attention_mask=torch.ones((1, stop), dtype=torch.long),
            position_ids=torch.arange(start, stop).unsqueeze(0),
            is_first_iteration=start == 0,
            use_cache=True,
            logits_to_keep=1,
        )
        yield {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in made.items()} | {keyword: cache}
        states = torch.zeros((1, 1, stop - start, 1), dtype=dtype)
        for layer in range(len(twin.layers)):
            twin.update(states, states, layer)


# ---- where the memory goes -----------------------------------------------------------------------------------------


def memory_of(captured: Captured, ctx: Context) -> dict[str, dict[str, int]]:
    """``GraphReport.memory`` of a rewritten graph, from the shapes of its inputs. Nothing is allocated for it."""
    from torch import Tensor

    from fu_compile.passes import layer_of

    found: dict[str, Counter[str]] = {}

    def add(path: str, kind: str, *values: Any) -> None:
        for v in values:
            if isinstance(v, Tensor) and v.dim():
                row = found.setdefault(_layer(path), Counter())
                row[kind] += math.prod(map(_hint, v.shape)) * v.element_size()

    nodes = captured.gm.graph.nodes
    values = {n.name: n.meta.get("val") for n in nodes if n.op == "placeholder"}
    own = "kv_int4" if store_of(captured) == "Int4Cache" else "kv_model"
    layers = {m[2]: m[1] for i in captured.inputs if i.kind == "parameter" and (m := _NUMBERED.match(i.path))}
    for i in captured.inputs:
        if i.kind == "parameter":
            add(i.path, "parameters", values.get(i.name))
        elif i.kind == "cache" and (number := re.search(r"\blayers\.(\d+)\.", i.path)):
            add(layers.get(number[1], ""), own, values.get(i.name))
    for name in ctx.extra:  # what the passes added: packed_<projection>_<tensor>, kv_<layer>_<tensor>
        if added := re.match(r"(packed|kv)_(\d+)_\d+", name):
            spec = ctx.data["pack_weights" if added[1] == "packed" else "redirect_kv"][int(added[2])]
            if added[1] == "packed":
                add(spec.name, spec.precision, values.get(name))
            else:
                add(spec.layer, "kv_int4", values.get(name))
    for node in nodes:
        if str(node.target) == "futransformer.kv_store.default":  # a cache that the graph makes itself
            keys = node.args[0].meta["val"]
            add(layer_of(node), "kv_model", keys, keys)
            add(layer_of(node), "kv_int4", *node.meta["val"])
    return {layer: dict(row) for layer, row in found.items()}


_NUMBERED = re.compile(r"^((?:.*\.)?(?:layers|h|blocks)\.(\d+))\.")


def _hint(n: Any) -> int:
    """A size as a number: that of the first call where it is symbolic, and no guard is added; 0 where it depends on
    data."""
    return n if isinstance(n, int) else int(n.node.hint or 0)


def _layer(path: str) -> str:
    """The decoder layer that a module path lies in, or :data:`REST`."""
    match = _LAYER.match(path)
    return match.group(1) if match else REST


def store_of(captured: Captured) -> str:
    """``GraphReport.store`` of a captured graph, before the passes decide about a copy."""
    import torch

    caches = {i.name for i in captured.inputs if i.kind == "cache"}
    nodes = captured.gm.graph.nodes
    if any(getattr(n.meta.get("val"), "dtype", None) == torch.uint8 for n in nodes if n.name in caches):
        return "Int4Cache"
    names = {str(n.target) for n in nodes}
    if any("kv_store" in n or "qkv_append" in n or "attention_int4" in n for n in names):
        return "StaticCache + INT4"
    if any("kv_cat" in n for n in names):
        return "DynamicCache"
    return "StaticCache" if any("kv_write_" in n or "kv_roll_" in n or "kv_fill_" in n for n in names) else "none"


def memory(graphs: Iterable[GraphReport]) -> dict[str, dict[str, int]]:
    """Layer -> key of :data:`MEMORY` -> bytes over several graphs of one model; layers in order, the rest last.

    Graphs share parameters and packed weights of equal precision: the largest counts. Caches belong to calls, so here
    too the largest of a layer counts.
    """
    found: dict[str, dict[str, int]] = {}
    for graph in graphs:
        for layer, row in graph.memory.items():
            known = found.setdefault(layer, {})
            for kind, size in row.items():
                known[kind] = max(known.get(kind, 0), size)
    return {layer: found[layer] for layer in sorted(found, key=_in_order)}


# ---- times ---------------------------------------------------------------------------------------------------------


@contextmanager
def timed(model: torch.nn.Module | None = None) -> Iterator[None]:
    """Inside, the wall time of every call of the graphs that exist by now is added up (``GraphReport.mean_seconds``).

    Outside nothing is timed: a decode step runs no line of this. A CUDA device is synchronised before and after each
    call inside, so the times are those of the work and not of its launch.

    Args:
        model: a compiled model; none: all models of this process.
    """
    import torch

    graphs = [compiled for record in report(model).models for compiled in record.alive]
    inner = [compiled.inner for compiled in graphs]

    def timer(graph: GraphReport, run: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            cuda = any(isinstance(a, torch.Tensor) and a.is_cuda for a in args)
            if cuda:
                torch.cuda.synchronize()
            start = time.perf_counter()
            out = run(*args)
            if cuda:
                torch.cuda.synchronize()
            graph.timed_calls += 1
            graph.timed_seconds += time.perf_counter() - start
            return out

        return call

    for compiled, run in zip(graphs, inner, strict=True):
        compiled.inner = timer(compiled.graph, run)
    try:
        yield
    finally:
        for compiled, run in zip(graphs, inner, strict=True):
            compiled.inner = run


# ---- the layer map -------------------------------------------------------------------------------------------------

_LAYER = re.compile(r"^(.*?\.?\d+)(\.|$)")
REST = "(model)"
"""Row of the layer map for what lies outside the decoder layers."""


def layer_map(graph: GraphReport) -> dict[str, dict[str, Cell]]:
    """Layer (``model.layers.0``; :data:`REST`) -> piece -> cell; layers in order, the rest last."""
    rows: dict[str, dict[str, Cell]] = {}

    def cell(path: str, piece: str) -> Cell:
        return rows.setdefault(_layer(path), {p: Cell() for p in PIECES})[piece]

    chosen = {event.layer: event.note for event in graph.events if event.fired and event.name == "choose_precision"}
    for path, name, detail in graph.fused:
        lowering, why = graph.lowerings.get(name, ("", ""))
        note = f"{path}: {name}" + f" [{detail}]" * bool(detail) + f" by {lowering} ({why})" * bool(lowering)
        note += f"; {chosen[path]}" if name in _LINEAR and path in chosen else ""
        for piece, form in _pieces_of(path, name, detail):
            target = cell(path, piece)
            if name not in _LINEAR and form == "int4" and graph.decision.get("cache") == "int4-channel":
                form = "int4-channel"
            _add(target.formats, form)
            _add(target.lowerings, lowering)
            _add(target.notes, note)
    for event in graph.near_misses():
        piece = _PASS_PIECES.get(event.name) or _piece_of_path(event.layer)
        target = cell(event.layer, piece)
        target.missed = True
        _add(
            target.notes, f"{event.name} did not take {event.layer or event.node}: {event.note} ({short(event.where)})"
        )
    return {layer: rows[layer] for layer in sorted(rows, key=_in_order)}


def _pieces_of(path: str, name: str, detail: str) -> list[tuple[str, str]]:
    if name == "packed_weight":
        return [(_piece_of_path(path), "exact")]
    if name not in _LINEAR:
        return list(_OPERATORS.get(name, ()))
    fused = [_FUSED_PIECES[word] for word in re.findall(r"[a-z]+", detail) if word in _FUSED_PIECES]
    own = _piece_of_path(path)
    if name == "mlp_fp8":  # both projections of the MLP
        return [(piece, "fp8") for piece in dict.fromkeys(["swiglu", *fused, "residual"])]
    # A projection that only says `self_attn` or `mlp` is the one before the block's output if it adds the residual.
    own = "residual" if "residual" in fused and own in ("qkv", "swiglu") else own
    return [(piece, _LINEAR[name]) for piece in dict.fromkeys([own, *fused])]


def _piece_of_path(path: str) -> str:
    return next((piece for pattern, piece in _PATH_PIECES if re.search(pattern, path)), "head")


def _in_order(layer: str) -> tuple[bool, list[Any]]:
    return layer == REST, _natural(layer)


def _natural(text: str) -> list[Any]:
    return [(1, int(part), "") if part.isdigit() else (0, 0, part) for part in re.split(r"(\d+)", text)]


def _add(entries: list[str], entry: str) -> None:
    if entry and entry not in entries:
        entries.append(entry)


def _same_rows(rows: Mapping[str, Mapping[str, Cell]]) -> list[tuple[str, list[str]]]:
    """Rows with their cells as text; neighbours that agree become one (``model.layers.0-31``)."""
    return _joined((layer, [str(row[piece]) for piece in PIECES]) for layer, row in rows.items())


def _joined(rows: Iterable[tuple[str, list[str]]]) -> list[tuple[str, list[str]]]:
    runs: list[tuple[str, str, list[str]]] = []
    for layer, texts in rows:
        if runs and runs[-1][2] == texts and REST not in (layer, runs[-1][0]):
            runs[-1] = (runs[-1][0], layer, texts)
        else:
            runs.append((layer, layer, texts))
    return [(a if a == b else f"{a}-{b.rpartition('.')[2]}", texts) for a, b, texts in runs]


# ---- text ----------------------------------------------------------------------------------------------------------


def human_bytes(number: float) -> str:
    """``1536`` -> ``"1.5 KiB"``."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(number) < 1024 or unit == "TiB":
            break
        number /= 1024
    return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"


def human_seconds(seconds: float) -> str:
    """``0.0123`` -> ``"12.3 ms"``."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"


def times(graphs: Iterable[GraphReport]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Headings and rows of the table of times: what is paid once per graph, calls, and their mean wall time."""
    rows = []
    for graph in graphs:
        once = {name: graph.seconds.get(key) for key, name in STEPS.items()}
        once["passes"] = sum(value for key, value in graph.seconds.items() if key not in STEPS)
        steps = (once[name] for name in ("capture", "passes", "compile", "pack"))
        mean = graph.mean_seconds
        rows.append(
            (
                f"{graph.index}: {graph.phase}",
                *("-" if seconds is None else human_seconds(seconds) for seconds in steps),
                str(graph.calls),
                "-" if mean is None else f"{human_seconds(mean)} (of {graph.timed_calls})",
            )
        )
    return ("graph", "capture", "passes", "compile", "pack", "calls", "mean call"), rows


def render(parts: Iterable[RenderableType], width: int | None = None) -> str:
    """Rich renderables as plain text, at most ``width`` columns (default: the terminal's, 100 without one)."""
    from rich.console import Console

    columns = width or shutil.get_terminal_size((100, 24)).columns
    buffer = io.StringIO()
    console = Console(
        file=buffer, width=max(columns, 40), force_terminal=False, color_system=None, highlight=False, markup=False,
        legacy_windows=False, emoji=False,
    )  # fmt: skip
    for part in parts:
        console.print(part)
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines())


def table(title: str, headings: Iterable[str], rows: Iterable[Iterable[Any]]) -> RenderableType:
    """A plain table: ASCII lines, columns that wrap instead of being cut off."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    # Text, not str: brackets in a reason or a layer pattern are no markup. ASCII: pipes and old consoles show it too.
    made = Table(title=Text(title), title_justify="left", box=box.ASCII2, show_edge=False, pad_edge=False)
    for heading in headings:
        made.add_column(Text(heading), overflow="fold")
    for row in rows:
        made.add_row(*(Text(str(value)) for value in row))
    return made


def grouped_misses(graph: GraphReport) -> list[tuple[str, int, str, str, str]]:
    """Near misses that share pass and reason: (pass, how many, first layer, its file:line, reason)."""
    groups: dict[tuple[str, str], list[Event]] = {}
    for event in graph.near_misses():
        groups.setdefault((event.name, event.note), []).append(event)
    return [(n, len(es), es[0].layer or es[0].node, short(es[0].where), note) for (n, note), es in groups.items()]


def short(where: str) -> str:
    """``file:line`` without the path of the environment: ``transformers/models/llama/modeling_llama.py:67``."""
    return re.split(r"(?:site|dist)-packages[/\\]", where)[-1]


def title_of(graph: GraphReport, calls: bool = True) -> str:
    """``graph 0: prefill, batch 1, query length 16, 3 calls``."""
    text = f"graph {graph.index}: {graph.phase}, batch {graph.batch}, query length {graph.query_length}"
    return text + (f", {graph.calls} call{'' if graph.calls == 1 else 's'}" if calls else "")


def _model_text(model: ModelReport) -> Iterator[RenderableType]:
    yield f"{model.name}: {len(model.graphs)} graphs; options: {model.options}"
    yield from (f"note: {note}" for note in model.notes)
    yield ""
    for graph in model.graphs:
        yield from _graph_text(graph)
    yield from _memory_text(model)
    if model.graphs:
        yield table("times", *times(model.graphs))
        for graph in model.graphs:
            passes = sorted(((n, v) for n, v in graph.seconds.items() if n not in STEPS), key=lambda entry: -entry[1])
            if passes:
                named = ", ".join(f"{name} {human_seconds(value)}" for name, value in passes)
                yield f"passes of graph {graph.index}: {named}"
        yield ""
    counts = [(name, value) for name, value in model.counted().items() if value and not name.startswith("bytes_")]
    sizes = [
        (name, human_bytes(value)) for name, value in model.counted().items() if value and name.startswith("bytes_")
    ]
    if counts or sizes:
        yield table("counters", ("counter", "value", "meaning"), [(*e, COUNTERS.get(e[0], "")) for e in counts + sizes])
        yield ""
    if model.fallbacks:
        yield table("fallbacks", ("reason", "where"), model.fallbacks)
        yield ""


def _memory_text(model: ModelReport) -> Iterator[RenderableType]:
    layers = memory(model.graphs)
    kinds = [kind for kind in MEMORY if any(row.get(kind) for row in layers.values())]
    if not kinds:
        return
    rows = _joined((layer, [human_bytes(row[k]) if k in row else "-" for k in kinds]) for layer, row in layers.items())
    total = [human_bytes(sum(row.get(kind, 0) for row in layers.values())) for kind in kinds]
    each = [(f"{layers} (each)" if "-" in layers else layers, *sizes) for layers, sizes in rows]
    yield table("memory", ("layers", *kinds), [*each, ("total", *total)])
    yield "; ".join(f"{kind}: {MEMORY[kind]}" for kind in kinds)
    yield ""


def _graph_text(graph: GraphReport) -> Iterator[RenderableType]:
    yield title_of(graph)
    yield f"cache: {graph.store}, {STORES.get(graph.store, '')}"
    if graph.decision:
        decided = [(what, value, graph.reasons.get(what, "")) for what, value in graph.decision.items()]
        yield table("decision", ("what", "value", "why"), decided)
        yield ""
    if rows_of := layer_map(graph):
        yield table("layer map", ("layers", *PIECES), [(layer, *cells) for layer, cells in _same_rows(rows_of)])
        used = {form for row in rows_of.values() for cell in row.values() for form in cell.formats}
        yield "; ".join(f"{form}: {text}" for form, text in FORMATS.items() if form in used)
        yield ""
    if operators := graph.operators():
        lowered = [(name, n, *graph.lowerings.get(name, ("", ""))) for name, n in operators.items()]
        yield table("operators", ("operator", "count", "lowering", "why"), lowered)
        yield ""
    if misses := grouped_misses(graph):
        yield table("near misses", ("pass", "count", "first layer", "file:line", "failed precondition"), misses)
        yield ""
    if graph.left_to_aten:
        rest = ", ".join(f"{name} x{n}" for name, n in sorted(graph.left_to_aten.items(), key=lambda e: -e[1]))
        yield f"left to ATen: {rest}"
    yield ""


class _CallableModule(types.ModuleType):
    """Lets ``fu_compile.report`` be the function and the module at once."""

    def __call__(self, model: torch.nn.Module | None = None) -> Report:
        return report(model)


_CallableModule.__call__.__doc__ = report.__doc__
sys.modules[__name__].__class__ = _CallableModule

__all__ = ["COUNTERS", "GraphReport", "ModelReport", "Report", "explain", "new_record", "report"]
