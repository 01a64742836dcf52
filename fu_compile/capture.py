"""From Dynamo's graph to the graph that the passes read: pre-dispatch ATen, cleaned, with the origin of every input.

``capture`` runs Dynamo's torch-level graph once more on its own fake tensors under ``make_fx(pre_dispatch=True)``.
That keeps ``aten.linear``, ``aten.silu``, ``aten.scaled_dot_product_attention``, in-place cache writes and symbolic
sizes, and gives one spelling to ``.float()``, ``.to()`` and ``x * y``; nothing is computed, so it works on every
device, meta included.

Then the clean-up, each step a function of its own:

- ``drop_markers``: autocast and grad-mode switches that change nothing for this graph;
- ``drop_no_ops``: casts, views, slices, dropouts, additions and products that return their input;
- ``share_views``: the same view of the same tensor is taken once (``cos.unsqueeze(1)`` of every layer).

Aliasing is kept. An operator that *aliases* its input when it changes nothing (``to``, ``view``, ``contiguous``,
``dropout``) can always be replaced by that input. One that *copies* (``x + 0``, ``clone``, ``_to_copy``, ``cat`` with
an empty tensor) is only dropped where nobody could see the difference: neither side is ever written to and the copy
does not leave the graph.
"""

from __future__ import annotations

import operator
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

aten = torch.ops.aten


@dataclass(frozen=True)
class Input:
    """One argument of the compiled graph and where it comes from."""

    name: str
    """Name of the placeholder in ``Captured.gm``."""
    index: int
    """Position in the argument list with which Dynamo calls the compiled function."""
    kind: str
    """``"parameter"``, ``"buffer"``, ``"cache"`` (anything inside a transformers cache), ``"tensor"`` or ``"size"``."""
    path: str
    """Dotted origin: ``model.layers.0.mlp.gate_proj.weight``, ``cache.layers.0.keys``, ``input_ids``."""


@dataclass
class Captured:
    """A cleaned graph and the origin of its inputs."""

    gm: fx.GraphModule
    """Pre-dispatch ATen; placeholders in the order of Dynamo's arguments; every node has ``meta["val"]``."""
    inputs: list[Input]
    seconds: float
    """Wall time of the capture, clean-up included."""
    cleaned: dict[str, int] = field(default_factory=dict)
    """Nodes removed by each clean-up step."""
    autocast: bool = False
    """Whether any operator runs under autocast, around the graph or inside it: dtypes then depend on that context."""

    def find(self, path: str) -> Input:
        """The input of this path (KeyError with the closest one when there is none)."""
        for item in self.inputs:
            if item.path == path:
                return item
        import difflib

        close = difflib.get_close_matches(path, [item.path for item in self.inputs], 1)
        raise KeyError(f"no input {path!r}" + (f"; the closest is {close[0]!r}" if close else ""))


def capture(gm: fx.GraphModule, example_inputs: Sequence[object]) -> Captured:
    """The cleaned pre-dispatch ATen graph of a graph that Dynamo hands to a backend.

    ``gm`` is not changed. ``example_inputs`` stand in where a placeholder carries no fake tensor of its own (a graph
    that does not come from Dynamo). Errors of tracing are not caught: the caller decides what runs instead.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    start = time.perf_counter()
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    values = _fake_values(placeholders, example_inputs)
    fake_mode = next((v.fake_mode for v in values if hasattr(v, "fake_mode")), None)
    if fake_mode is None:
        from torch._subclasses.fake_tensor import FakeTensorMode

        fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        values = [fake_mode.from_tensor(v) if isinstance(v, Tensor) else v for v in values]
    tracer = _Tracer(gm)
    with fake_mode, torch.fx.traceback.preserve_node_meta():
        traced = make_fx(tracer.run, pre_dispatch=True)(*values)
    inputs = _inputs(placeholders, values)
    _name_placeholders(traced, inputs)
    cleaned = clean(traced)
    names = [node.name for node in traced.graph.nodes if node.op == "placeholder"]
    inputs = [Input(name, i.index, i.kind, i.path) for name, i in zip(names, inputs, strict=True)]
    return Captured(traced, inputs, time.perf_counter() - start, cleaned, tracer.autocast)


class _Tracer(fx.Interpreter):
    """Runs Dynamo's graph for ``make_fx`` with its autocast regions in force.

    ``make_fx`` writes the switches of a region down without obeying them, so dtypes inside would be those without
    autocast and a cast behind the region would look like a no-op.
    """

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm)
        self.autocast = any(torch.is_autocast_enabled(device) for device in ("cpu", "cuda"))
        self._before: list[tuple[str, bool, torch.dtype]] = []

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is _ENTER:
            device, dtype, enabled = (*args, *kwargs.values())[:3]
            self._before.append((device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)))
            self._switch(device, enabled, dtype or torch.get_autocast_dtype(device))
            self.autocast |= bool(enabled)
        elif target is _EXIT and self._before:
            self._switch(*self._before.pop())
        return super().call_function(target, args, kwargs)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().run(*args, **kwargs)
        finally:
            while self._before:
                self._switch(*self._before.pop())

    @staticmethod
    def _switch(device: str, enabled: bool, dtype: torch.dtype) -> None:
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)


def clean(gm: fx.GraphModule) -> dict[str, int]:
    """Runs every clean-up step on ``gm`` in place; returns how many nodes each removed."""
    steps: tuple[Callable[[fx.Graph], int], ...] = (drop_markers, drop_no_ops, share_views, drop_dead)
    counts = {step.__name__: step(gm.graph) for step in steps}
    gm.graph.lint()
    gm.recompile()
    return counts


# ---- inputs --------------------------------------------------------------------------------------------------------


def _fake_values(placeholders: Sequence[fx.Node], example_inputs: Sequence[object]) -> list[Any]:
    """Dynamo's fake tensors, or the example where a placeholder has none."""
    values = []
    for i, node in enumerate(placeholders):
        value = node.meta.get("example_value", node.meta.get("val"))
        values.append(example_inputs[i] if value is None else value)
    return values


def _inputs(placeholders: Sequence[fx.Node], values: Sequence[Any]) -> list[Input]:
    found = []
    names = [_source_name(node) for node in placeholders]
    if any(name.startswith("L['args'][0].") for name in names):  # newer torch passes the module as the first argument
        names = [re.sub(r"^L\['args'\]\[(\d+)\]$", lambda m: f"L['args'][{int(m[1]) - 1}]", name) for name in names]
    for index, (node, value, name) in enumerate(zip(placeholders, values, names, strict=True)):
        path = source_path(name) if name else str(node.target)
        kind = _kind(name, path, value) if isinstance(value, Tensor) else "size"
        found.append(Input(str(node.target), index, kind, path))
    return found


def _source_name(node: fx.Node) -> str:
    name = getattr(getattr(node.meta.get("grapharg"), "source", None), "name", "")
    return str(name() if callable(name) else name)  # a method in older torch, a property in newer


def _kind(source: str, path: str, value: Tensor) -> str:
    if "_parameters" in source or isinstance(value, torch.nn.Parameter):
        return "parameter"
    if "_buffers" in source:
        return "buffer"
    steps = path.split(".")
    if any(step in ("cache", "past_key_values", "past_key_value") for step in steps):
        return "cache"
    # a cache under a name of the user's own: ``.layers[i].keys`` outside any module
    if re.search(r"\.layers\[\d+\]\.(keys|values|cumulative_length)$", source) and "_modules" not in source:
        return "cache"
    return "tensor"


_CALL = re.compile(r"\.size\(\)\[(\d+)\]")
_STEP = re.compile(r"\[\s*['\"]([^'\"]+)['\"]\s*\]|\[([^\]]+)\]|\.?([A-Za-z_][A-Za-z_0-9]*)")
_PLUMBING = frozenset({"L", "G", "self", "args", "kwargs", "_modules", "_parameters", "_buffers", "__dict__"})


def source_path(source: str) -> str:
    """The dotted path of a Dynamo source name.

    >>> source_path("L['args'][0]._modules['model']._modules['layers']._modules['0']._parameters['weight']")
    'model.layers.0.weight'
    >>> source_path("L['kwargs']['cache'].layers[0].keys")
    'cache.layers.0.keys'
    """
    text = _CALL.sub(r".size['\1']", source)
    text = re.sub(r"^L\['args'\]\[(\d+)\](?!\.)", r"L['arg']['\1']", text)  # a positional argument of the call
    text = re.sub(r"^(L\['args'\]\[\d+\]|L\['self'\])", "", text)
    steps = [a or b or c for a, b, c in _STEP.findall(text)]
    kept = [step for step in steps if step not in _PLUMBING]
    return ".".join(kept) if kept else source


def _name_placeholders(gm: fx.GraphModule, inputs: Sequence[Input]) -> None:
    """Gives every placeholder its path as its name: a printed graph then reads like the model's code."""
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    for node, item in zip(placeholders, inputs, strict=True):
        node._rename(re.sub(r"\W", "_", item.path).strip("_") or "input")
        node.target = node.name


# ---- what a node is ------------------------------------------------------------------------------------------------

VIEWS = frozenset(
    {
        aten.view.default, aten.reshape.default, aten.expand.default, aten.slice.Tensor, aten.alias.default,
        aten._unsafe_view.default, aten.view_as.default, aten.expand_as.default,
    }
)  # fmt: skip
"""View operators that return their input's elements in place when the shape does not change."""

CASTS = frozenset(
    {
        aten.to.dtype, aten.to.device, aten.to.dtype_layout, aten.to.other, aten.type_as.default,
        aten.contiguous.default, aten.dropout.default, aten.dropout_.default, aten.detach.default, aten.detach_.default,
    }
)  # fmt: skip
"""Operators that return their very input when there is nothing to do."""

COPIES = frozenset(
    {
        aten._to_copy.default, aten.clone.default, aten.lift_fresh_copy.default, aten.add.Tensor, aten.add.Scalar,
        aten.sub.Tensor, aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.cat.default,
    }
)  # fmt: skip
"""Operators that always return new memory, even when the values are those of an input."""

SHARED = frozenset(
    {
        aten.unsqueeze.default, aten.transpose.int, aten.slice.Tensor, aten.view.default, aten.select.int,
        aten.t.default, aten.expand.default, aten.permute.default, aten.squeeze.dim,
    }
)  # fmt: skip
"""Pure views: two with equal arguments are the same memory with the same strides, at any place of the graph."""


def value(node: object) -> Any:
    """The fake value of a node, or the object itself for a constant argument."""
    return node.meta.get("val") if isinstance(node, fx.Node) else node


def same(a: object, b: object) -> bool:
    """Whether two sizes are equal for every binding of the symbols (no guard is added)."""
    return a is b or bool(statically_known_true(a == b))  # type: ignore[arg-type]


def same_shape(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have equal shapes for every binding of the symbols."""
    return a.dim() == b.dim() and all(same(x, y) for x, y in zip(a.shape, b.shape, strict=True))


def same_tensor(a: object, b: object) -> bool:
    """Whether two fake tensors agree in shape, strides (of dimensions that have any), dtype, device and layout."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return False
    if a.dtype != b.dtype or a.device != b.device or a.layout != b.layout or not same_shape(a, b):
        return False
    return all(same(n, 1) or same(x, y) for n, x, y in zip(a.shape, a.stride(), b.stride(), strict=True))


def is_mutation(node: fx.Node) -> bool:
    """Whether a node writes to one of its arguments or switches a mode (autocast, grad)."""
    if node.op != "call_function":
        return False
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.is_mutable
    return node.target in _MARKERS


class Aliases:
    """Which nodes share memory, from the operators' schemas, and which of that memory is written to or leaves."""

    def __init__(self, graph: fx.Graph) -> None:
        self._root: dict[fx.Node, fx.Node] = {}
        self.written: set[fx.Node] = set()
        self.leaving: set[fx.Node] = set()
        for node in graph.nodes:
            self._add(node)

    def root(self, node: fx.Node) -> fx.Node:
        """The node that owns the memory of ``node``."""
        return self._root.get(node, node)

    def _add(self, node: fx.Node) -> None:
        if node.op == "output":
            self.leaving |= {self.root(n) for n in node.all_input_nodes}
            return
        self._root[node] = node
        if node.op != "call_function":
            return
        if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
            self._root[node] = self.root(node.args[0])
        if not isinstance(node.target, torch._ops.OpOverload):
            return
        schema = node.target._schema
        returned = {name for r in schema.returns if r.alias_info for name in r.alias_info.before_set}
        for i, argument in enumerate(schema.arguments):
            actual = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
            if argument.alias_info is None or not isinstance(actual, fx.Node):
                continue
            if argument.alias_info.is_write and node.target not in (aten.detach_.default, aten.dropout_.default):
                self.written.add(self.root(actual))
            if argument.alias_info.before_set & returned or "*" in argument.alias_info.after_set:
                self._root[node] = self.root(actual)
        # composite operators that alias without saying so in their schema
        if node.target in (aten.reshape.default, aten.contiguous.default, aten.dropout.default, aten.type_as.default):
            self._root[node] = self.root(node.args[0])  # type: ignore[arg-type]

    def copy_is_unseen(self, node: fx.Node, source: fx.Node) -> bool:
        """Whether nobody can tell ``node``, a copy of ``source``, from ``source`` itself."""
        a, b = self.root(node), self.root(source)
        return a not in self.written and b not in self.written and a not in self.leaving

    def merge(self, node: fx.Node, source: fx.Node) -> None:
        """Records that ``node`` was replaced by ``source``."""
        self._root[node] = self.root(source)


# ---- clean-up ------------------------------------------------------------------------------------------------------


def drop_no_ops(graph: fx.Graph) -> int:
    """Removes operators that return their input unchanged, where nobody could see the missing copy."""
    aliases = Aliases(graph)
    count = 0
    for node in list(graph.nodes):
        source = _unchanged(node)
        if source is None or (node.target in COPIES and not aliases.copy_is_unseen(node, source)):
            continue
        node.replace_all_uses_with(source)
        aliases.merge(node, source)
        graph.erase_node(node)
        count += 1
    return count


def _unchanged(node: fx.Node) -> fx.Node | None:
    """The argument that ``node`` returns unchanged (in values, shape, strides, dtype and device), or none."""
    if node.op != "call_function" or not node.args:
        return None
    source = node.args[0]
    if node.target is aten.cat.default:
        parts = [p for p in source if not same(value(p).numel(), 0)]  # type: ignore[union-attr]
        source = parts[0] if len(parts) == 1 else None
    if not isinstance(source, fx.Node):
        return None
    if node.target in VIEWS or node.target is aten.cat.default:
        ok = True
    elif node.target in CASTS:
        ok = _cast_is_no_op(node)
    elif node.target in COPIES:
        ok = _copy_is_no_op(node)
    else:
        return None
    if not ok:
        return None
    if node.target is aten.cat.default:  # a copy is contiguous; what it copies need not be
        return source if _same_but_strides(value(node), value(source)) else None
    return source if same_tensor(value(node), value(source)) else None


def _same_but_strides(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.device == b.device and same_shape(a, b)


def _cast_is_no_op(node: fx.Node) -> bool:
    if node.target in (aten.dropout.default, aten.dropout_.default):
        return node.args[1] == 0 or node.args[2] is False
    if node.target in (aten.detach.default, aten.detach_.default):
        return not value(node.args[0]).requires_grad
    position = {aten.to.dtype: 3, aten.to.device: 4, aten.to.dtype_layout: None, aten.to.other: 3}.get(node.target)  # type: ignore[arg-type]
    copy = node.kwargs.get("copy", node.args[position] if position and len(node.args) > position else False)
    return not copy


def _copy_is_no_op(node: fx.Node) -> bool:
    if node.target in (aten._to_copy.default, aten.clone.default, aten.lift_fresh_copy.default):
        return True
    neutral = 0 if node.target in (aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor) else 1
    other = node.args[1]
    return isinstance(other, (int, float)) and other == neutral


def share_views(graph: fx.Graph) -> int:
    """Takes each view of a tensor once: later views with equal arguments use the first."""
    seen: dict[object, fx.Node] = {}
    count = 0
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in SHARED:
            continue
        key = (node.target, _freeze(node.args), _freeze(node.kwargs))
        first = seen.setdefault(key, node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)
            count += 1
    return count


def _freeze(args: object) -> object:
    if isinstance(args, dict):
        return tuple(sorted((k, _freeze(v)) for k, v in args.items()))
    if isinstance(args, (list, tuple)):
        return tuple(_freeze(a) for a in args)
    return (type(args), args)  # 1, 1.0 and True are equal as keys, not as arguments


_ENTER, _EXIT = torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast
_GRAD = torch._C._set_grad_enabled
_MARKERS = frozenset({_ENTER, _EXIT, _GRAD})


def drop_markers(graph: fx.Graph) -> int:
    """Removes switches without effect: grad mode when no input requires grad, autocast off where it is off already."""
    dead: list[fx.Node] = []
    requires_grad = any(
        isinstance(value(n), Tensor) and value(n).requires_grad for n in graph.nodes if n.op == "placeholder"
    )
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if node.target is _GRAD and not requires_grad:
            dead.append(node)
        elif node.target is _ENTER and _switches_nothing(node):
            dead += [*(u for u in node.users if u.target is _EXIT), node]
    for node in dead:
        graph.erase_node(node)
    return len(dead)


def _switches_nothing(enter: fx.Node) -> bool:
    """Whether an autocast region that is switched off starts where autocast is off already."""
    device, _dtype, enabled = (*enter.args, *enter.kwargs.values())[:3]
    if enabled or torch.is_autocast_enabled(str(device)):
        return False
    inside = 0
    node = enter.prev
    while node.op != "root":  # an enclosing region of this graph
        inside += (node.target is _EXIT) - (node.target is _ENTER)
        if inside < 0:
            return False
        node = node.prev
    return True


def drop_dead(graph: fx.Graph) -> int:
    """Removes nodes that nobody reads and that write to nothing."""
    before = len(graph.nodes)
    graph.eliminate_dead_code(lambda n: n.op in ("placeholder", "output") or is_mutation(n) or _is_effect(n))
    return before - len(graph.nodes)


def _is_effect(node: fx.Node) -> bool:
    """Assertions and random operators stay; pure arithmetic, on tensors or on sizes, may go."""
    if node.target is aten.scaled_dot_product_attention.default:  # random only with dropout
        return bool(node.kwargs.get("dropout_p", node.args[4] if len(node.args) > 4 else 0.0))
    if isinstance(node.target, torch._ops.OpOverload):
        return torch.Tag.nondeterministic_seeded in node.target.tags or not node.target._schema.returns
    return node.op == "call_module" or (node.op == "call_function" and node.is_impure())
