"""Small graphs for the pass tests: trace a function as the backend would, print, rewrite, compare with eager."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import fu_compile.lowerings  # noqa: F401  (registers what the recognised operators mean)
import torch
from fu_compile.passes import Context, run
from models import Recorder
from torch import fx

from fu_compile import ops
from fu_compile.capture import Captured


def trace(fn: Callable, *args: torch.Tensor, dynamic: Sequence[tuple[int, int]] = ()) -> Captured:
    """The one graph of ``fn(*args)``, captured through Dynamo; ``dynamic``: (argument, dimension) of symbolic sizes."""
    torch._dynamo.reset()
    recorder = Recorder()
    args = clone(args)
    for index, dim in dynamic:
        torch._dynamo.mark_dynamic(args[index], dim)
    with torch.no_grad():
        torch.compile(fn, backend=recorder, dynamic=False if not dynamic else None, fullgraph=True)(*args)
    assert len(recorder.graphs) == 1
    return recorder.graphs[0]


def clone(args: Sequence) -> list:
    """Copies of tensors, other arguments as they are."""
    return [a.clone() if isinstance(a, torch.Tensor) else a for a in args]


def show(gm: fx.GraphModule) -> str:
    """The calls of a graph, one a line: ``name = operator(arguments)``."""
    lines = []
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            continue
        args = [*(_text(a) for a in node.args), *(f"{k}={_text(v)}" for k, v in node.kwargs.items())]
        if node.op == "output":
            results = node.args[0] if isinstance(node.args[0], (list, tuple)) else [node.args[0]]
            lines.append(f"return {', '.join(_text(a) for a in results)}")
            continue
        name = ops.name_of(node.target)
        target = name or str(node.target).removeprefix("aten.").removesuffix(".default")
        target = "getitem" if "getitem" in target else target
        lines.append(f"{node.name} = {target}({', '.join(args)})")
    return "\n".join(lines) + "\n"


def _text(a: object) -> str:
    if isinstance(a, (list, tuple)):
        return f"[{', '.join(_text(x) for x in a)}]"
    return str(a)


def recognise(fn: Callable, *args: torch.Tensor, names: Sequence[str], dynamic: Sequence = ()) -> tuple:
    """(graph before, the rewritten module, context) of ``fn`` after the named passes."""
    captured = trace(fn, *args, dynamic=dynamic)
    before = show(captured.gm)
    ctx = Context(inputs=captured.inputs)
    run(captured.gm, ctx, names)
    return before, captured, ctx


def misses(ctx: Context, name: str) -> list[str]:
    """The reasons with which a pass refused, each once, in order."""
    return list(dict.fromkeys(e.note for e in ctx.events if e.name == name and not e.fired))


def same_as_eager(
    fn: Callable, *args: torch.Tensor, names: Sequence[str], rtol: float = 0.0, atol: float = 0.0
) -> Context:
    """Rewrites ``fn`` and checks results *and* arguments that it writes to against eager on these inputs."""
    contexts: list[Context] = []

    def rewrite(captured: Captured) -> fx.GraphModule:
        contexts.append(Context(inputs=captured.inputs))
        run(captured.gm, contexts[-1], names)
        return captured.gm

    torch._dynamo.reset()
    eager, ours = clone(args), clone(args)
    with torch.no_grad():
        expected = fn(*eager)
        got = torch.compile(fn, backend=Recorder(rewrite), dynamic=False, fullgraph=True)(*ours)
    for a, b in zip([*_leaves(got), *ours], [*_leaves(expected), *eager], strict=True):
        if isinstance(a, torch.Tensor):
            assert a.dtype == b.dtype
            torch.testing.assert_close(a, b, rtol=rtol, atol=atol, equal_nan=True)
    return contexts[0]


def _leaves(x: object) -> list:
    return list(x) if isinstance(x, (tuple, list)) else [x]
