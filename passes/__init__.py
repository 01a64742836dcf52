"""The graph passes: one file, one rewrite.

A pass is a module with a docstring that shows before -> after, and ``run(gm, ctx)`` that rewrites ``gm.graph`` in
place. It tells ``ctx`` what fired and what nearly did: the node and the first precondition that failed. A pass knows
graphs and ``fu_compile.ops``; it never knows a kernel.

``RECOGNISE`` gives every piece of a Llama block its name and keeps eager's numerics; ``REWRITE`` applies the decision.
"""

from __future__ import annotations

import importlib
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from torch import Tensor, dtype, fx

from ..capture import Input, drop_dead

if TYPE_CHECKING:
    from ..plan import Decision

RECOGNISE = ("packed_linear", "rms_norm", "rotary", "swiglu", "kv_write", "attention", "qkv", "residual")
REWRITE = (
    "last_logits",
    "fuse_prologue",
    "redirect_kv",
    "int4_cache",
    "positions",
    "fuse_epilogue",
    "choose_precision",
    "fold_gain",
    "pack_weights",
    "fuse_mlp",
)


@dataclass(frozen=True)
class Event:
    """One rewrite that fired, or one near miss."""

    name: str
    """The pass."""
    layer: str
    """Module path of the node, such as ``model.layers.3.self_attn``; empty where the graph does not say."""
    where: str
    """``file:line`` of the Python code that made the node; empty where the graph does not say."""
    fired: bool
    note: str = ""
    """For a near miss the first precondition that failed, as a sentence."""
    node: str = ""


@dataclass
class Context:
    """What the passes share for one graph, and what they report."""

    decision: Decision = None  # type: ignore[assignment]
    """The ``fu_compile.plan.Decision`` (rewrites only; recognising needs none)."""
    events: list[Event] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    """Facts one pass leaves for a later one, by pass name."""
    inputs: Sequence[Input] = ()
    """Where each of Dynamo's arguments comes from (``Captured.inputs``)."""
    extra: list[str] = field(default_factory=list)
    """Placeholders that passes added behind Dynamo's own, in order."""
    extra_outputs: int = 0
    """Outputs that passes added behind the graph's own."""
    _last: fx.Node | None = field(default=None, repr=False)

    @cached_property
    def by_name(self) -> dict[str, Input]:
        """Placeholder name -> input."""
        return {i.name: i for i in self.inputs}

    def path(self, node: fx.Node) -> str:
        """Dotted origin of a placeholder (``model.norm.weight``), or an empty string."""
        found = self.by_name.get(node.name)
        return found.path if found else ""

    def is_parameter(self, node: fx.Node) -> bool:
        """Whether ``node`` is a parameter of the model."""
        found = self.by_name.get(node.name)
        return found is not None and found.kind == "parameter"

    def index(self, node: fx.Node) -> int:
        """Position of a placeholder in Dynamo's argument list."""
        return self.by_name[node.name].index

    def placeholder(self, gm: fx.GraphModule, name: str, like: Tensor, shape: Sequence[Any], dtype: dtype) -> fx.Node:
        """A new input behind all others, on the device of ``like``, that the runtime binds at every call."""
        last = self._last or [n for n in gm.graph.nodes if n.op == "placeholder"][-1]
        with gm.graph.inserting_after(last):
            node = gm.graph.placeholder(name)
        node.meta["val"] = like.new_empty(tuple(shape), dtype=dtype)
        self.extra.append(node.name)
        self._last = node
        return node

    def add_outputs(self, gm: fx.GraphModule, nodes: Sequence[fx.Node]) -> None:
        """Appends ``nodes`` to what the graph returns; the runtime takes them off again."""
        output = next(n for n in reversed(gm.graph.nodes) if n.op == "output")
        output.args = ((*output.args[0], *nodes),)
        self.extra_outputs += len(nodes)

    def fired(self, name: str, node: fx.Node, note: str = "") -> None:
        """Records that pass ``name`` rewrote ``node``."""
        self.events.append(Event(name, layer_of(node), where(node), True, note, node.name))

    def missed(self, name: str, node: fx.Node, reason: str) -> None:
        """Records that pass ``name`` nearly took ``node``, and the first precondition that failed."""
        self.events.append(Event(name, layer_of(node), where(node), False, reason, node.name))

    def count(self, name: str) -> int:
        """How often pass ``name`` fired."""
        return sum(e.fired for e in self.events if e.name == name)


def run(gm: fx.GraphModule, ctx: Context, names: Iterable[str]) -> None:
    """Runs the named passes in order on ``gm`` in place, then removes dead nodes and recompiles."""
    for name in names:
        start = time.perf_counter()
        importlib.import_module(f"{__name__}.{name}").run(gm, ctx)
        drop_dead(gm.graph)
        ctx.seconds[name] = ctx.seconds.get(name, 0.0) + time.perf_counter() - start
    gm.graph.lint()
    gm.recompile()


_STEP = re.compile(r"\[['\"]?([^\]'\"]+)['\"]?\]|\.?([A-Za-z_0-9]+)")


def layer_of(node: fx.Node) -> str:
    """Module path of ``node`` from its ``nn_module_stack`` (``model.layers.0.mlp``), or an empty string."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path = str(next(reversed(stack.values()))[0])
    path = re.sub(r"L\[[^\]]*\](\[\d+\])?", "", path)
    path = path.replace("._modules", "").replace("._parameters", "").replace("._buffers", "")
    steps = [a or b for a, b in _STEP.findall(path)]
    return ".".join(s for s in steps if s not in ("self", "args", "L"))


def where(node: fx.Node) -> str:
    """``file:line`` of the innermost Python frame that made ``node``, or an empty string."""
    frames = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    return f"{frames[-1][0]}:{frames[-1][1]}" if frames else ""
