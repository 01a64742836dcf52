"""A script per graph: the graph as text with made-up data, run through the backend beside the graph as it was.

    fu_compile.report(model).graphs[0].repro("graph0.py")       # then: python graph0.py

What is written down is the graph that the passes read (``fu_compile/capture.py``): pre-dispatch ATen, one line per
node, with the module path of each in between, and shape, strides, dtype and origin of every input. Nothing of the
model's weights and nothing of its inputs is stored: the data are random, with a seed, by the rules of :func:`data`.

The script calls :func:`run`, which traces the text into a graph again, hands it to the backend with the options of the
report, and compares every result and every cache that was written with what the text itself computes.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

if TYPE_CHECKING:
    from .capture import Captured
    from .options import Options
    from .report import GraphReport


@dataclass(frozen=True)
class Input:
    """One argument of the graph. Sizes and strides are numbers, or expressions over :attr:`Source.sizes`."""

    kind: str
    """As in ``fu_compile.capture.Input``."""
    path: str
    dtype: str = ""
    """``float32``...; empty for a size, whose expression is then :attr:`shape`'s only entry."""
    shape: tuple[int | str, ...] = ()
    stride: tuple[int | str, ...] = ()


@dataclass(frozen=True)
class Source:
    """What is needed to write the script of one graph; small enough to be kept with every report."""

    model: str
    """Class name of the model."""
    options: dict[str, Any]
    """All of them, so that the environment does not change what the script does."""
    device: str
    sizes: dict[str, int]
    """Symbolic size -> its value in the first call."""
    inputs: list[Input]
    lines: list[str]
    """The body of the function."""
    names: list[str]
    """Parameters of the function."""
    refused: str = ""
    """Why no script can be written: what has no form as text."""


def write_down(captured: Captured, model: str, options: Options) -> Source:
    """The source of a captured graph. Call it before the passes change the graph."""
    placeholders = [n for n in captured.gm.graph.nodes if n.op == "placeholder"]
    values = [n.meta.get("val") for n in placeholders]
    device = next((v.device for v in values if isinstance(v, Tensor)), torch.device("cpu"))
    given = {f.name: getattr(options, f.name) for f in dataclasses.fields(options)}
    source = Source(model, given, str(device), {}, [], [], [n.name for n in placeholders])
    try:
        for i, v in zip(captured.inputs, values, strict=True):
            source.inputs.append(_input(i.kind, i.path, v, source.sizes))
        source.lines.extend(_lines(captured.gm, device))
    except (TypeError, AttributeError) as error:  # a report must never keep a graph from being compiled
        return dataclasses.replace(source, refused=str(error), inputs=[], lines=[])
    return source


def _input(kind: str, path: str, value: Any, sizes: dict[str, int]) -> Input:
    if not isinstance(value, Tensor):
        return Input("size", path, shape=(_size(value, sizes),))
    shape, stride = (tuple(_size(n, sizes) for n in numbers) for numbers in (value.shape, value.stride()))
    return Input(kind, path, str(value.dtype).removeprefix("torch."), shape, stride)


def _size(n: Any, sizes: dict[str, int]) -> int | str:
    if isinstance(n, int):
        return int(n)
    if not isinstance(n, torch.SymInt):
        raise TypeError(f"an input of type {type(n).__name__} has no form as text")
    for symbol in n.node.expr.free_symbols:
        # A size that depends on data has no value in the first call.
        sizes.setdefault(str(symbol), int(n.node.shape_env.backed_var_to_val.get(symbol, 2)))
    return str(n)


# ---- a node as a line ----------------------------------------------------------------------------------------------


def _lines(gm: fx.GraphModule, device: torch.device) -> list[str]:
    from . import passes

    lines, last = [], ""
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            continue
        if node.op == "output":
            returned = node.args[0] if isinstance(node.args[0], (tuple, list)) else (node.args[0],)
            lines.append(f"return ({', '.join(_text(a, device) for a in returned)}{',' * bool(returned)})")
            continue
        place = f"at({passes.layer_of(node)!r}, {_short(passes.where(node))!r})"
        if place != last:
            lines.append(place)
            last = place
        lines.append(f"{node.name} = {_call(gm, node, device)}")
    return lines


def _short(where: str) -> str:
    return re.split(r"(?:site|dist)-packages[/\\]", where)[-1]


def _call(gm: fx.GraphModule, node: fx.Node, device: torch.device) -> str:
    if node.op == "get_attr":
        found: Any = operator.attrgetter(str(node.target))(gm)
        if not isinstance(found, Tensor) or found.numel() > 64:
            raise TypeError(f"{node.target} is {type(found).__name__}, which has no form as text")
        # A constant of the graph; `clone` as in the graph, where lift_fresh_copy follows.
        return f"constant({_text(found.tolist(), device)}, {found.dtype}, {_text(found.device, device)})"
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload):
        name = f"torch.ops.{target}"
    elif str(getattr(target, "__module__", "")).partition(".")[0] in ("_operator", "operator", "math", "torch"):
        module = target.__module__.replace("_operator", "operator")
        name = f"{module}.{target.__qualname__}"
    else:
        raise TypeError(f"{target} has no form as text")
    given = [_text(a, device) for a in node.args] + [f"{k}={_text(v, device)}" for k, v in node.kwargs.items()]
    return f"{name}({', '.join(given)})"


def _text(value: Any, device: torch.device) -> str:
    if isinstance(value, fx.Node):
        return value.name
    if isinstance(value, (list, tuple)):
        inside = ", ".join(_text(v, device) for v in value)
        return f"[{inside}]" if isinstance(value, list) else f"({inside}{',' * (len(value) == 1)})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k!r}: {_text(v, device)}" for k, v in value.items()) + "}"
    if isinstance(value, slice):
        return f"slice({', '.join(_text(v, device) for v in (value.start, value.stop, value.step))})"
    if isinstance(value, float) and not math.isfinite(value):
        return f"float({str(value)!r})"
    if isinstance(value, torch.device):
        return "DEVICE" if value == device else f"torch.device({str(value)!r})"
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return str(value)
    raise TypeError(f"{value!r} of type {type(value).__name__} has no form as text")


# ---- the script ----------------------------------------------------------------------------------------------------

_SCRIPT = '''"""{title}

Run:  python {name}
It prints, for every result and every cache that the graph writes, the error of FuTransformer's graph against the graph
below, which is what Dynamo captured (torch {torch}). OPTIONS = {{"mode": "exact"}} quantises nothing.
Weights and inputs are random; see fu_compile/repro.py.
"""

import math
import operator

import torch

from fu_compile.repro import Input, at, constant, run

OPTIONS = {options}
DEVICE = torch.device({device!r})
SIZES = {sizes}
INPUTS = [
{inputs}
]


def graph(
{names},
):
    {body}


if __name__ == "__main__":
    run(graph, INPUTS, OPTIONS, SIZES, DEVICE, model={model!r}, seed=0)
'''


def script(graph: GraphReport, name: str = "graph.py") -> str:
    """The script of a graph as text.

    Raises:
        DataError: the graph holds something that has no form as text, or the report was not made by the backend.
    """
    from .errors import DataError
    from .report import title_of

    source = graph.source
    if source is None or source.refused:
        why = source.refused if source else "it was not made by the backend of this process"
        raise DataError(
            f"graph {graph.index} cannot be written as a script: {why}",
            where="repro",
            advice='TORCH_LOGS="+fu_compile" prints the graph.',
        )
    # On the meta device there are no values to compare.
    device = "cpu" if source.device == "meta" else source.device
    rows = []
    for i in source.inputs:
        given = [repr(v) for v in (i.kind, i.path, i.dtype, i.shape, i.stride)]
        rows.append(f"    Input({', '.join(given)}),")
    return _SCRIPT.format(
        title=f"{source.model}, {title_of(graph, calls=False)}",
        name=name,
        torch=torch.__version__,
        options=repr(source.options),
        device=device,
        sizes=repr(source.sizes),
        inputs="\n".join(rows),
        names=textwrap.fill(", ".join(source.names), 116, initial_indent=" " * 4, subsequent_indent=" " * 4),
        body="\n    ".join(source.lines),
        model=source.model,
    )


def write(graph: GraphReport, path: str | Path) -> Path:
    """Writes the script of a graph and returns its path; parent folders are made. Raises as :func:`script`."""
    target = Path(path)
    text = script(graph, target.name)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text, encoding="utf-8")
    return target


# ---- running one ---------------------------------------------------------------------------------------------------


def at(layer: str, where: str) -> None:
    """In a script: what follows belongs to module ``layer`` and was written at ``where`` (``file:line``)."""
    if not torch.fx.traceback.has_preserved_node_meta():
        return
    path, _, line = where.rpartition(":")
    meta = torch.fx.traceback.get_current_meta()
    meta.pop("nn_module_stack", None)
    if layer:
        meta["nn_module_stack"] = {layer: (layer, "module")}
    meta["stack_trace"] = f'  File "{path}", line {line}, in forward' if where else ""


def constant(values: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """In a script: a constant tensor of the graph."""
    return torch.tensor(values, dtype=dtype, device=device)


def run(
    graph: Callable[..., Any],
    inputs: Sequence[Input],
    options: Mapping[str, Any],
    sizes: Mapping[str, int],
    device: torch.device,
    model: str = "model",
    seed: int = 0,
) -> float:
    """Runs ``graph`` as it is and through the backend, on the same data, and prints the errors.

    Args:
        graph: a function of as many arguments as there are ``inputs``; returns a tuple.
        options: of the backend, as for ``torch.compile(options=...)``; the environment counts for what is left out.
        sizes: symbolic size -> value.
        seed: of the data.

    Returns:
        The largest absolute error over all results and written caches (NaN where a result is NaN on one side only).

    Raises:
        FuError: what compiling raises.
    """
    from .backend import compile_graph
    from .options import Options
    from .report import ModelReport, record_of

    chosen = Options.resolve(options=options)
    real = data(inputs, sizes, device, seed)
    gm = _traced(graph, inputs, sizes, device)
    # Only caches are written to. (A clone of an expanded mask would have other strides than the graph was made for.)
    ours, plain = ([v.clone() if i.kind == "cache" else v for i, v in zip(inputs, real, strict=True)] for _ in range(2))
    with torch.no_grad():
        compiled = compile_graph(gm, ours, chosen)
        found = compiled(*ours)
        want = graph(*plain)
    holder = torch.nn.Module()
    for n, v in enumerate(v for v in real if isinstance(v, torch.nn.Parameter)):
        holder.register_parameter(str(n), v)
    record = record_of(holder) or ModelReport(model, chosen)
    operators = record.graphs[-1].operators() if record.graphs else {}
    print(f"{model}, options: {chosen}")
    print("operators: " + (", ".join(f"{name} x{n}" for name, n in operators.items()) or "none, left to Inductor"))
    worst = 0.0
    written = [(i.path, a, b) for i, a, b in zip(inputs, ours, plain, strict=True) if i.kind == "cache"]
    results = [(f"result {n}", a, b) for n, (a, b) in enumerate(zip(found, want, strict=True))]
    for name, a, b in results + written:
        if not isinstance(b, Tensor):
            continue
        if b.dtype == torch.uint8:  # codes: a value halfway between two steps may go either way
            print(f"{name} {tuple(b.shape)}: {float((a != b).double().mean()):.3%} of the codes differ")
            continue
        largest, relative = error(a, b)
        worst = largest if math.isnan(largest) else max(worst, largest)
        print(f"{name} {tuple(b.shape)}: max error {largest:.3g}, relative rms {relative:.3g}")
    print(f"max error: {worst:.6g}")
    return worst


def error(found: Tensor, want: Tensor) -> tuple[float, float]:
    """(largest absolute error, rms of the error over rms of ``want``), in float64; equal infinities count as equal."""
    a, b = found.detach().double(), want.detach().double()
    if not a.numel():
        return 0.0, 0.0
    difference = torch.where(a == b, 0.0, (a - b).abs())
    scale = float(b.square().mean().sqrt()) or 1.0
    return float(difference.max()), float(difference.square().mean().sqrt()) / scale


def _traced(
    graph: Callable[..., Any], inputs: Sequence[Input], sizes: Mapping[str, int], device: torch.device
) -> fx.GraphModule:
    """The graph of the text, with the origin of every input and node where Dynamo would have put it."""
    from torch._dynamo.source import ConstantSource
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

    shapes = ShapeEnv()
    symbols: dict[str, Any] = {}
    for name, value in sizes.items():
        source = ConstantSource(name)
        symbol = shapes.create_symbol(value, source, DimDynamic.DYNAMIC, None)
        symbols[name] = shapes.create_symintnode(symbol, hint=value, source=source)
    fake_mode = FakeTensorMode(shape_env=shapes, allow_non_fake_inputs=True)
    fakes = []
    for i in inputs:
        shape = [_value(n, symbols) for n in i.shape]
        if not i.dtype:
            fakes.append(shape[0])
            continue
        with fake_mode:
            stride = [_value(n, symbols) for n in i.stride]
            fakes.append(torch.empty_strided(shape, stride, dtype=getattr(torch, i.dtype), device=device))
    with fake_mode, torch.fx.traceback.preserve_node_meta(), torch.no_grad():
        gm = make_fx(graph, pre_dispatch=True)(*fakes)
    for node, i, fake in zip((n for n in gm.graph.nodes if n.op == "placeholder"), inputs, fakes, strict=True):
        node.meta["example_value"] = fake
        node.meta["grapharg"] = SimpleNamespace(source=SimpleNamespace(name=_dynamo_name(i)))
    return gm


def _value(n: int | str, names: Mapping[str, Any]) -> Any:
    """A size: a number, or an expression over symbolic sizes as sympy prints it."""
    if isinstance(n, int):
        return n
    return eval(n, {"__builtins__": {}, "Max": torch.sym_max, "Min": torch.sym_min}, dict(names))


def _dynamo_name(i: Input) -> str:
    """A source name from which ``capture`` reads path and kind again."""
    *modules, last = i.path.split(".")
    if i.kind in ("parameter", "buffer"):
        inside = "".join(f"._modules['{m}']" for m in modules)
        return f"L['self']{inside}._{i.kind}s['{last}']"
    first, *steps = i.path.split(".")
    return f"L['kwargs']['{first}']" + "".join(f"[{s}]" if s.isdigit() else f".{s}" for s in steps)


# ---- data ----------------------------------------------------------------------------------------------------------


def data(inputs: Sequence[Input], sizes: Mapping[str, int], device: torch.device, seed: int = 0) -> list[Any]:
    """Random values for ``inputs`` that make sense to a Llama block.

    Weights have rows of norm 1, gains lie in 0.5...1.5, biases have deviation 0.1. A graph of one token per sequence
    finds its caches filled up to the last slot, any other graph finds static caches empty and dynamic ones full;
    positions, lengths and masks agree with that (causal, no padding). Token ids are below the size of the vocabulary.
    """
    generator = torch.Generator().manual_seed(seed)
    shapes = [tuple(int(_value(n, sizes)) for n in i.shape) for i in inputs]
    tokens = next((s[-1] for i, s in zip(inputs, shapes, strict=True) if i.path.endswith("input_ids") and s), 1)
    embeddings = (s[0] for i, s in zip(inputs, shapes, strict=True) if "embed" in i.path and i.kind == "parameter")
    vocabulary = next(embeddings, 2)
    start = _start(inputs, shapes, tokens)
    made: list[Any] = []
    for i, shape in zip(inputs, shapes, strict=True):
        if not i.dtype:
            made.append(shape[0])
            continue
        dtype = getattr(torch, i.dtype)
        value = _values(i, shape, dtype, start, vocabulary, generator)
        placed = torch.empty_strided(shape, tuple(int(_value(n, sizes)) for n in i.stride), dtype=dtype, device=device)
        # An expanded tensor has several elements in one place; what is written there agrees or is written twice.
        _dense(placed).copy_(_dense_like(value.to(dtype), placed))
        made.append(torch.nn.Parameter(placed, requires_grad=False) if i.kind == "parameter" else placed)
    return made


def _dense(t: Tensor) -> Tensor:
    for dim, (n, stride) in enumerate(zip(t.shape, t.stride(), strict=True)):
        if stride == 0 and n > 1:
            t = t.narrow(dim, 0, 1)
    return t


def _dense_like(value: Tensor, t: Tensor) -> Tensor:
    for dim, (n, stride) in enumerate(zip(t.shape, t.stride(), strict=True)):
        if stride == 0 and n > 1:
            value = value.narrow(dim, 0, 1)
    return value


def _start(inputs: Sequence[Input], shapes: Sequence[tuple[int, ...]], tokens: int) -> int:
    """Tokens in the cache before the call."""
    found = {i.path.rpartition(".")[2]: s for i, s in zip(inputs, shapes, strict=True) if i.kind == "cache"}
    # Of an Int4Cache only the number of pages is known: the last one may be cut short.
    slots = [(s[2] - 1) * 64 + 1 if "codes" in name else s[2] for name, s in found.items() if name in _SLOTS]
    if not slots:
        return 0
    if "cumulative_length" not in found:
        return min(slots)
    return max(min(slots) - 1, 0) if tokens == 1 else 0


_SLOTS = ("keys", "values", "k_codes", "v_codes")
"""Cache tensors whose third dimension is that of tokens, or of pages of 64 tokens."""


def _values(
    i: Input, shape: tuple[int, ...], dtype: torch.dtype, start: int, vocabulary: int, generator: torch.Generator
) -> Tensor:
    name = i.path.rpartition(".")[2]
    if i.kind == "tensor" and len(shape) == 4 and (dtype == torch.bool or dtype.is_floating_point):
        rows, columns = shape[2:]
        seen = torch.ones(rows, columns, dtype=torch.bool).tril(start)
        mask = seen if dtype == torch.bool else torch.where(seen, 0.0, torch.finfo(dtype).min)
        return mask.expand(shape)
    if not dtype.is_floating_point:
        if name == "cumulative_length":
            return torch.full(shape, start)
        if "position" in name:
            return torch.arange(start, start + (shape[-1] if shape else 1)).expand(shape)
        if "mask" in name:
            return torch.ones(shape)
        top = 256 if dtype == torch.uint8 else 2 if dtype == torch.bool else vocabulary
        return torch.randint(top, shape, generator=generator)
    if name == "inv_freq":
        return 10000.0 ** -torch.linspace(0, 1, shape[0] + 1)[:-1]
    if "mean" in name or "balance" in name:
        return torch.full(shape, float("balance" in name))
    if i.kind == "parameter" and "norm" in i.path:
        return torch.rand(shape, generator=generator) + 0.5
    value = torch.randn(shape, generator=generator)
    if i.kind == "parameter" and len(shape) > 1 and "embed" not in i.path:
        return value * shape[-1] ** -0.5
    return value * 0.1 if name == "bias" or "scale" in name else value


__all__ = ["Input", "Source", "at", "constant", "data", "error", "run", "script", "write", "write_down"]
