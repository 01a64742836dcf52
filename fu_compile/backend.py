"""The backend: a Dynamo graph in, a callable out.

``futransformer`` is what ``torch.compile(backend="futransformer")`` finds through the entry point. The life of a graph:
``capture`` -> recognising passes -> ``plan.decide`` -> rewriting passes -> the rest through Inductor -> ``runtime``.
A graph that cannot take this way is left to Inductor, counted, and said once; ``strict=True`` raises instead.
"""

from __future__ import annotations

import functools
import logging
import re
import shutil
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from . import ops, passes, plan, repro
from .caches import guard_static_caches, starts_at_counter
from .capture import Captured, capture
from .errors import (
    DtypeError,
    FuError,
    FuWarning,
    GradientError,
    LoweringError,
    MetaParameterError,
    MissingDependencyError,
    NoLlamaBlockError,
    through_dynamo,
)
from .lowerings import choose, using
from .models import DTYPES, check
from .options import Options
from .passes.packed_linear import rows_of
from .report import GraphReport, ModelReport, memory_of, new_record, store_of, unwrap
from .runtime import CompiledGraph, Signature, Size
from .weights import STORE, restore_scales

log = logging.getLogger(__name__)

GRAPHS = 64
"""Graphs that Dynamo may keep for a model. Its own limit of 8 counts per code object, and all models of transformers
share one (the wrapper around their forward): two models, two batch sizes and two caches would silently run in eager."""
torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, GRAPHS)
guard_static_caches()


def futransformer(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Options | Mapping[str, Any] | None = None,
    **keywords: Any,
) -> Callable[..., Any]:
    """The backend function. ``mode`` and ``options`` are those of ``torch.compile``; see :class:`Options`.

    Raises:
        OptionError: for an unknown option or value.
        FuError: with ``strict=True``, what would otherwise be left to Inductor with one warning.
    """
    with through_dynamo():
        return compile_graph(gm, example_inputs, Options.resolve(mode, options, **keywords))


def compile(  # the name torch uses
    model: torch.nn.Module,
    *,
    mode: str | None = None,
    options: Options | Mapping[str, Any] | None = None,
    dynamic: bool | None = None,
    fullgraph: bool = False,
    **keywords: Any,
) -> torch.nn.Module:
    """``model.compile(backend="futransformer", ...)`` in place, after the model itself has been checked.

    Args:
        model: a causal language model in evaluation mode, without offloaded parameters.
        mode, options, keywords: see :class:`Options`.
        dynamic, fullgraph: as for ``torch.compile``.

    Returns:
        ``model``.

    Raises:
        OptionError, TrainingModeError, MetaParameterError, OffloadedParameterError, DtypeError, HeadDimError: before
            anything is changed.
    """
    resolved = Options.resolve(mode, options, **keywords)
    model = unwrap(model)
    check(model)
    restore_scales(model)
    new_record(type(model).__name__, resolved, model, *model.parameters())
    STORE.adopt(model)
    model.compile(backend=futransformer, dynamic=dynamic, fullgraph=fullgraph, options=resolved)
    return model


# ---- one graph -----------------------------------------------------------------------------------------------------


@dataclass
class Rewritten:
    """A graph after all passes, and what is known of it."""

    captured: Captured
    ctx: passes.Context
    decision: plan.Decision
    report: GraphReport

    @property
    def gm(self) -> fx.GraphModule:
        """The rewritten graph."""
        return self.captured.gm


def analyse(gm: fx.GraphModule, example_inputs: Sequence[Any], options: Options, record: ModelReport) -> GraphReport:
    """Captures and rewrites a graph without compiling or packing anything (``explain``).

    Raises:
        NoLlamaBlockError: no attention was recognised in it.
    """
    return rewrite(gm, example_inputs, options, len(record.graphs)).report


def rewrite(gm: fx.GraphModule, example_inputs: Sequence[Any], options: Options, index: int) -> Rewritten:
    """All passes on one of Dynamo's graphs."""
    captured = capture(gm, example_inputs)
    source = repro.write_down(captured, name_of(gm), options)
    ctx = passes.Context(inputs=captured.inputs)
    passes.run(captured.gm, ctx, passes.RECOGNISE)
    if not plan.attentions(captured.gm):
        misses = [e for e in ctx.events if not e.fired and e.name == "attention"]
        why = f"; the nearest miss: {misses[0].note}" if misses else ""
        raise NoLlamaBlockError(
            f"no attention of a Llama block was recognised in this graph{why}", where=_where(captured)
        )
    check_dtypes(captured)
    ctx.decision = plan.decide(captured.gm, options)
    rotated = ctx.decision.cache.value == "int4"
    own = rotated and plan.has_int4_cache(captured.gm)
    ctx.data["keep_kv"] = keep_kv(captured, example_inputs) if rotated and not own else {}
    ctx.data["uncentred"] = keep_kv(captured, example_inputs, centred=False) if own else {}
    passes.run(captured.gm, ctx, passes.REWRITE)
    report = describe(captured, ctx, options, index)
    report.source = source
    return Rewritten(captured, ctx, ctx.decision, report)


def check_dtypes(captured: Captured) -> None:
    """Raises DtypeError for weights that are neither float32, bfloat16 nor float16."""
    values = {n.name: n.meta.get("val") for n in captured.gm.graph.nodes if n.op == "placeholder"}
    for i in captured.inputs:
        value = values.get(i.name)
        if i.kind == "parameter" and isinstance(value, Tensor) and value.dtype not in DTYPES:
            raise DtypeError(
                f"parameter {i.path} is {value.dtype}; possible: {', '.join(map(str, DTYPES))}", where=i.path
            )


def keep_kv(captured: Captured, example_inputs: Sequence[Any], centred: bool = True) -> dict[str, str]:
    """Layers whose keys INT4 would ruin, with the measured reason (B24: one channel above all).

    centred: with the key tables that the runtime would use, calibrated or from the weights; else without any.
    """
    from .weights import key_risk, key_tables, measured_risk

    kept = {}
    parameters: dict[str, Any] = {i.name: example_inputs[i.index] for i in captured.inputs if i.kind == "parameter"}
    blocks = {i.name: example_inputs[i.index] for i in captured.inputs}
    inv_freq = next((example_inputs[i.index] for i in captured.inputs if i.path.endswith("inv_freq")), None)
    for node in captured.gm.graph.nodes:
        if ops.name_of(node.target) != "qkv":
            continue
        weights, biases = ([parameters.get(n.name, n) for n in nodes] for nodes in node.args[1:3])
        sources = list(weights)
        for at, (w, rows) in enumerate(zip(node.args[1], map(rows_of, node.args[1]), strict=True)):
            block = None if rows is None else blocks[w.args[0].name]
            if rows is not None and isinstance(block, Tensor):  # without biases key_risk reads the keys' rows alone
                sources[at] = block
                read = not block.is_meta and (biases or at == min(1, len(weights) - 1))
                weights[at] = rows.dense(block) if read else block
        norm = None if node.args[4] is None else parameters.get(node.args[4].name)
        if not all(isinstance(t, Tensor) and not t.is_meta for t in (*weights, *biases)):
            continue
        heads = node.args[-3:]
        known = STORE.calibrated(sources) if centred else None
        if known is not None:
            reason = measured_risk(known)
        elif centred and biases and isinstance(inv_freq, Tensor):
            tables = key_tables(heads, weights, biases, inv_freq)
            reason = key_risk(weights, biases, norm, heads, inv_freq, tables)
        else:
            reason = key_risk(weights, biases, norm, heads)
        if reason:
            kept[passes.layer_of(node).rpartition(".")[0]] = reason
    return kept


def uncentred(done: Rewritten, example_inputs: Sequence[Any]) -> str:
    """What an Int4Cache without key tables loses with this model's keys, or an empty string."""
    for node, _slots in done.ctx.data["int4_cache"]:
        reason = done.ctx.data["uncentred"].get(passes.layer_of(node))
        mean = next(a for a in node.args if isinstance(a, fx.Node) and done.ctx.path(a).endswith("key_mean"))
        tables = example_inputs[done.ctx.index(mean)]
        if reason and not tables.is_meta and not bool(tables.any()):
            return (
                f"{passes.layer_of(node)}: {reason.partition(', so ')[0].partition(': without')[0]}; this Int4Cache has"
                " no key tables: make it with model=model, or tables=fu_compile.calibrate_keys(model, text)"
            )
    return ""


def describe(captured: Captured, ctx: passes.Context, options: Options, index: int) -> GraphReport:
    """The report of a rewritten graph."""
    decision = ctx.decision
    report = GraphReport(
        index=index,
        phase=decision.phase.value,
        batch=decision.batch.value,
        query_length=decision.query_length.value,
        decision=decision.as_dict(),
        reasons=decision.reasons(),
        events=ctx.events,
        seconds={"capture": captured.seconds, **ctx.seconds},
        memory=memory_of(captured, ctx),
        store=store_of(captured),
    )
    left: Counter[str] = Counter()
    for node in captured.gm.graph.nodes:
        name = ops.name_of(node.target)
        if name is not None:
            detail = " ".join(a for a in node.args if isinstance(a, str) and a)
            report.fused.append((passes.layer_of(node), name, detail.replace("|", " ")))
            if name not in report.lowerings:
                device = node.meta["val"].device if isinstance(node.meta.get("val"), Tensor) else _device(captured)
                operands = fx.map_arg(node.args, lambda n: n.meta.get("val"))
                chosen, passed = choose(name, device.type, *operands, lowering=options.lowering)
                why = "; ".join(f"{n}: {r}" for n, r in passed) or "first in the table"
                report.lowerings[name] = (chosen.name, why)
        elif node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            left[str(node.target)] += 1
    report.left_to_aten = dict(left)
    return report


def _device(captured: Captured) -> torch.device:
    for node in captured.gm.graph.nodes:
        if isinstance(node.meta.get("val"), Tensor):
            return node.meta["val"].device
    return torch.device("cpu")


def _where(captured: Captured) -> str:
    for node in captured.gm.graph.nodes:
        if node.op == "call_function" and passes.where(node):
            return passes.where(node)
    return ""


def compile_graph(gm: fx.GraphModule, example_inputs: Sequence[Any], options: Options) -> Callable[..., Any]:
    """The callable for one of Dynamo's graphs."""
    parameters = [x for x in example_inputs if isinstance(x, torch.nn.Parameter)]
    record = record_for(gm, parameters, options)
    for note in options.not_applicable(parameters[0].device.type if parameters else "cpu").values():
        if note not in record.notes:
            record.notes.append(note)
    for error in not_in_this_release(options, parameters[0].device.type if parameters else "cpu"):
        if options.strict:
            raise error
        leave(record, error)
    try:
        refuse(example_inputs)
        done = rewrite(gm, example_inputs, options, len(record.graphs))
    except FuError as error:
        if not (isinstance(error, NoLlamaBlockError) and around_layers(gm, example_inputs)):
            if options.strict or isinstance(error, (LoweringError, MetaParameterError)):
                raise
            leave(record, error)
        return compile_rest(gm, example_inputs, options, record)
    if (lost := uncentred(done, example_inputs)) and lost not in record.notes:
        record.notes.append(lost)
        warnings.warn(lost, FuWarning, stacklevel=2)
    start = time.perf_counter()
    signature = sign(done)
    inner = compile_rest(done.gm, None, options, record)
    if options.lowering != "auto":
        inner = using(options.lowering)(inner)
    done.report.seconds["rest"] = time.perf_counter() - start
    record.add_graph(done.report)
    record.counters["bytes_original"] = _bytes(record)
    log.debug("%s", done.gm.print_readable(print_output=False))
    compiled = CompiledGraph(inner, signature, done.report, record.counters)
    record.alive.add(compiled)
    return compiled


def record_for(gm: fx.GraphModule, parameters: Sequence[Tensor], options: Options) -> ModelReport:
    """The record of the model that owns these parameters, tied to them; a new one where there is none."""
    from .report import record_of

    holder = torch.nn.Module()
    for i, p in enumerate(parameters):  # all: the embedding may have been replaced since (resize_token_embeddings)
        holder.register_parameter(str(i), p)  # type: ignore[arg-type]
    record = record_of(holder) if parameters else None
    if record is None or record.options != options:
        record = new_record(name_of(gm), options)
    record.tie(*parameters)
    return record


def name_of(gm: fx.GraphModule) -> str:
    """Class name of the outermost module of a graph (``LlamaForCausalLM``), or ``model``."""
    for node in gm.graph.nodes:
        stack = node.meta.get("nn_module_stack")
        if stack:
            kind = next(iter(stack.values()))[1]
            return str(getattr(kind, "__name__", kind)).rsplit(".", 1)[-1]
    return "model"


def _bytes(record: ModelReport) -> int:
    found = [ref() for ref in record.ties]
    return sum(p.nbytes for p in found if isinstance(p, Tensor))


def not_in_this_release(options: Options, device_type: str) -> list[LoweringError]:
    """What the options ask for and no lowering exists yet; the nearest thing that does exist runs instead."""
    missing = []
    if options.cuda_graphs and device_type == "cuda":
        missing.append(("cuda_graphs=True", "decode steps run without CUDA graphs"))
    return [LoweringError(f"{what} has no implementation yet: {instead}", where="options") for what, instead in missing]


def refuse(example_inputs: Sequence[Any]) -> None:
    """Raises for a call that no rewritten graph can serve: gradients are wanted, or a parameter has no values."""
    for x in example_inputs:
        if isinstance(x, Tensor) and x.requires_grad and torch.is_grad_enabled():
            raise GradientError("gradients are enabled and the model's parameters require them")
        if isinstance(x, torch.nn.Parameter) and x.is_meta:
            raise MetaParameterError("a parameter is on the meta device: it has a shape and no values")


_AROUND = re.compile(r"_modules_(embed_tokens|wte|norm|lm_head)_parameters_")


def around_layers(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> bool:
    """Whether a graph has no parameters but those around the decoder layers: the embedding, the last norm, the head.

    Dynamo hands over such pieces where it has to cut a model (dynamic RoPE, output_hidden_states): they are exact, and
    nobody's disappointment.
    """
    inputs = zip((n for n in gm.graph.nodes if n.op == "placeholder"), example_inputs, strict=False)
    return all(_AROUND.search(str(n.target)) for n, x in inputs if isinstance(x, torch.nn.Parameter))


def leave(record: ModelReport, error: FuError) -> None:
    """Counts a graph that is left to the general path, and says so once per reason."""
    if record.fall_back(error.what, error.where):
        warnings.warn(f"left to {record.options.rest}: {error}", FuWarning, stacklevel=2)


# ---- the rest ------------------------------------------------------------------------------------------------------


def compile_rest(
    gm: fx.GraphModule, example_inputs: Sequence[Any] | None, options: Options, record: ModelReport
) -> Callable[..., Any]:
    """What runs a graph: Inductor, or the graph itself under ``rest="eager"``.

    ``example_inputs`` none: the graph is ours and carries its own fake values.
    """
    if options.rest == "eager":
        return gm.forward
    device = next((n.meta["val"].device.type for n in gm.graph.nodes if isinstance(n.meta.get("val"), Tensor)), "cpu")
    if device == "cpu" and not has_compiler():
        if options.strict:
            raise MissingDependencyError(
                "Inductor needs a C++ compiler on the CPU and there is none",
                advice='Install g++, or pass rest="eager".',
            )
        if record.fall_back("no C++ compiler: what is not ours runs in eager", "rest"):
            warnings.warn(
                "Inductor needs a C++ compiler on the CPU and there is none (g++, clang++ or $CXX):"
                " what is not ours runs in eager",
                FuWarning,
                stacklevel=2,
            )
        return gm.forward
    from torch._inductor.compile_fx import compile_fx

    known_to_inductor()
    if example_inputs is not None:
        return compile_fx(gm, list(example_inputs))  # type: ignore[return-value]
    values = [n.meta["val"] for n in gm.graph.nodes if n.op == "placeholder"]
    fake_mode = next(v.fake_mode for v in values if hasattr(v, "fake_mode"))
    # The graph's fake tensors belong to Dynamo's first fake mode, the current tracing context to its second; both share
    # one ShapeEnv, so guards that Inductor adds still reach Dynamo.
    with torch._guards.tracing(torch._guards.TracingContext(fake_mode)):
        return compile_fx(gm, values)  # type: ignore[return-value]


@functools.cache
def known_to_inductor() -> None:
    """Tells Inductor that our operators are called as they are, as it would find out by itself.

    When torch 2.11 meets an operator for the first time it formats the operator's arguments for a log line that nobody
    reads, and they print what they were computed from: twice as long with each residual. The head of a model of 32
    layers, the first ``linear_exact`` of its graph, never came to an end.
    """
    from torch._inductor.lowering import lowerings, make_fallback, tag_to_layout_constraint
    from torch._library.utils import get_layout_constraint_tag

    for target in map(ops.op, ops.SCHEMAS):
        if target not in lowerings:
            constraint = tag_to_layout_constraint(get_layout_constraint_tag(target, with_default=True))
            make_fallback(target, layout_constraint=constraint, warn=False)


def has_compiler() -> bool:
    """Whether Inductor finds a C++ compiler on this machine."""
    import os

    return any(shutil.which(c) for c in (os.environ.get("CXX", ""), "g++", "clang++", "c++") if c)


# ---- signature -----------------------------------------------------------------------------------------------------


def sign(done: Rewritten) -> Signature:
    """Drops inputs that the rewritten graph no longer reads, and says how to call it."""
    gm, ctx = done.gm, done.ctx
    limits = limits_of(done)
    tokens = tokens_of(done)
    keep = []
    for node in [n for n in gm.graph.nodes if n.op == "placeholder"]:
        found = ctx.by_name.get(node.name)
        if found is None:
            continue
        if node.users:
            keep.append(found.index)
        else:
            gm.graph.erase_node(node)
    gm.graph.lint()
    gm.recompile()
    return Signature(
        keep=keep,
        kv=ctx.data["redirect_kv"],
        packs=ctx.data["pack_weights"],
        extra_outputs=ctx.extra_outputs,
        limits=limits,
        tokens=tokens,
        counted=starts_at_counter(ctx, gm, _POSITIONS, {i for i, _, _ in limits}),
        names={i.index: i.path for i in ctx.inputs},
        caches=[i.index for i in ctx.inputs if i.kind == "cache"],
    )


_WRITES = {
    "kv_write_": (0, 1), "qkv_append": (6, 14), "attention_int4": (6, 14), "kv_extend_": (2, 10), "kv_update": (2, 10),
}  # fmt: skip
"""Operator -> positions of the cache and of the token positions among its arguments."""
_POSITIONS = {"qkv_append": 14, "attention_int4": 14, "attention_prefill": 11, "kv_extend_": 10, "kv_update": 10}
"""Operators that may ask the host where they stand (``pages.first_position``) -> position of the token positions."""


def limits_of(done: Rewritten) -> list[tuple[int, Size, str]]:
    """(index of the cumulative_length, slots, layer) of every cache that the graph writes; each length once."""
    from .caches import length_input

    int4 = dict(done.ctx.data["int4_cache"])  # there the cache's tensors are one page long
    found: dict[int, tuple[int, Size, str]] = {}
    for node in done.gm.graph.nodes:
        where = _WRITES.get(ops.name_of(node.target) or "")
        if where is None:
            continue
        cache, position = node.args[where[0]], node.args[where[1]]
        index = length_input(done.ctx, position)
        if index is not None and index not in found:
            limit = size_of(done, str(int4.get(node, cache.meta["val"].shape[2])))
            if limit is not None:
                found[index] = (index, limit, passes.layer_of(node))
    return list(found.values())


def tokens_of(done: Rewritten) -> Size:
    """Tokens per sequence of a call."""
    text = done.decision.query_length.value
    found = size_of(done, text)
    if found is None:
        raise NoLlamaBlockError(f"no input has the {text} tokens of this call", where="runtime")
    return found


def size_of(done: Rewritten, size: str) -> Size | None:
    """A size in the graph: its number, or where to read it from the arguments; none where no argument has it."""
    if re.fullmatch(r"\d+", size):
        return int(size)
    for node in done.gm.graph.nodes:
        value = node.meta.get("val")
        found = done.ctx.by_name.get(node.name) if node.op == "placeholder" else None
        if found is None:
            continue
        if isinstance(value, torch.SymInt) and str(value) == size:
            return found.index, None
        if isinstance(value, Tensor) and size in map(str, value.shape):
            return found.index, [str(n) for n in value.shape].index(size)
    return None
