"""SwiGLU gets its name.

    y = silu(gate) * up      or      y = up * silu(gate)
 -> y = futransformer::swiglu(gate, up)

``gate`` and ``up`` are whatever the model computes: two linears, or the chunks of one (Phi-3).

Refused: another activation, ``silu`` of a product, factors of different shapes or dtypes, a ``silu`` that others read.
"""

from __future__ import annotations

from torch import fx
from torch._inductor.pattern_matcher import MULTIPLE, CallFunction

from fu_compile.capture import same_shape, value

from . import Context
from .matching import arg, aten, calls, either, find, insert, is_tensor, name_of_dtype, replace, shape

NAME = "swiglu"
PATTERNS = either(aten.mul.Tensor, CallFunction(aten.silu.default, arg("gate"), _users=MULTIPLE), arg("up"))
OTHERS = (aten.gelu.default, aten.relu.default, aten.sigmoid.default, aten.tanh.default)
_LINEAR = CallFunction(aten.linear.default, arg("x"), arg("w"))
NEAR = [
    *(pattern for f in OTHERS for pattern in either(aten.mul.Tensor, CallFunction(f, _LINEAR), arg("up"))),
    CallFunction(aten.silu.default, CallFunction(aten.mul.Tensor, arg("gate"), arg("up"))),
]


def run(gm: fx.GraphModule, ctx: Context) -> None:
    """Recognises every SwiGLU of ``gm``."""
    for match in find(gm, PATTERNS):
        node, gate, up = match.output_node(), match.kwargs["gate"], match.kwargs["up"]
        reason = _refused(node, gate, up)
        if reason:
            ctx.missed(NAME, node, reason)
            continue
        new = insert(gm, node, NAME, (gate, up))
        replace(node, new)
        ctx.fired(NAME, new)
    for match in find(gm, NEAR):
        node = match.output_node()
        if calls(node, aten.silu.default):
            if is_tensor(match.kwargs["gate"]) and is_tensor(match.kwargs["up"]):
                ctx.missed(NAME, node, "silu is taken of the product, not of one factor")
        elif is_tensor(match.kwargs["up"]) and same_shape(value(match.kwargs["up"]), value(node)):
            activation = next(n for n in match.nodes if calls(n, *OTHERS))
            ctx.missed(NAME, node, f"the activation is {activation.target._schema.name.split('::')[1]}, not silu")


def _refused(node: fx.Node, gate: object, up: object) -> str | None:
    silu = next(n for n in node.all_input_nodes if calls(n, aten.silu.default) and n.args[0] is gate)
    if not is_tensor(up):
        return "silu is scaled by a number: there is no second factor"
    if len(silu.users) != 1:
        return "silu of the gate has other readers"
    if not same_shape(value(gate), value(up)):
        return f"gate {list(shape(gate))} and up {list(shape(up))} have different shapes"
    if value(gate).dtype != value(up).dtype:
        return f"gate is {name_of_dtype(value(gate).dtype)}, up is {name_of_dtype(value(up).dtype)}"
    return None
