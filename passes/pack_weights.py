"""Replaces parameters by packed constants that the weight store owns.

Before -> after::

    y = linear_exact(x, [wq, wk, wv], [b..], .., "rms", "bias")
      ->
    y = linear_int4(x, packed, n, k, group, bias, .., "rms", "bias", gain)

``packed`` (for FP8: weight, weight_scale and act; and the joined bias) are new placeholders behind Dynamo's own; the
``PackSpec`` of each is left in ``ctx.data["pack_weights"]`` and the runtime binds them at every call, so a changed
parameter is packed again without a new graph. Preconditions: static weight shapes; the gain of a norm that is prologue
of a packed weight has been folded, or the operator takes it (``linear_int4``, except for float16: x * gain could leave
its range); otherwise the norm becomes an operator of its own again. Numerics: those of the precision.

Weights that the model brings packed (fu_compile.quantize) are bound as they are: views of the model's own bytes.
"""

from __future__ import annotations

import torch
from torch import fx

from .. import formats
from ..packed import Rows
from ..weights import PackSpec
from . import Context, layer_of
from .linears import weight_name
from .matching import insert
from .packed_linear import group

NAME = "pack_weights"


def run(gm: fx.GraphModule, ctx: Context) -> None:
    """Packs every projection whose precision is not exact."""
    specs: list[PackSpec] = []
    folded = ctx.data["fold_gain"]
    for node, choice in ctx.data["choose_precision"].items():
        if choice.value == "exact":
            continue
        specs.append(_pack(gm, ctx, node, choice.value, folded.get(node), len(specs)))
        ctx.fired(NAME, node, choice.value)
        gm.graph.erase_node(node)
    ctx.data[NAME] = specs


def _pack(
    gm: fx.GraphModule, ctx: Context, node: fx.Node, precision: str, gain: fx.Node | None, index: int
) -> PackSpec:
    x, weights, biases, norm, residual, eps, scale, prologue, epilogue = node.args
    if norm is not None and (precision != "int4" or x.meta["val"].dtype == torch.float16):  # neither folded nor taken
        x, norm, prologue = insert(gm, node, "rms_norm", (x, norm, eps), like=node), None, ""
    values = [w.meta["val"] for w in weights]
    n, k = sum(int(v.shape[0]) for v in values), int(values[0].shape[1])
    options = ctx.decision.options
    found = group(weights)
    rows = found if isinstance(found, Rows) else None
    if rows is not None:  # packed in the model: its bytes are the constant
        weights = [weights[0].args[0]]
    spec = PackSpec(
        name=weight_name(ctx, weights[0], layer_of(node)) if rows is None else layer_of(node),
        precision=precision,
        weights=tuple(ctx.index(w) for w in weights),
        biases=tuple(ctx.index(b) for b in biases),
        gain=None if gain is None else ctx.index(gain),
        group=(0 if rows is None else rows.group) or options.group_size,
        interleave=precision == "int4" and "swiglu" in epilogue.split("|"),
        n=n,
        k=k,
        rows=rows,
    )
    like = values[0]
    packed: dict[str, list[tuple[tuple[int, ...], torch.dtype]]] = {
        "bf16": [((n, k), like.dtype if like.dtype == torch.float16 else torch.bfloat16)],
        "fp8": [((n, k), torch.float8_e4m3fn), ((n,), torch.float32), ((formats.FP8_STATE,), torch.float32)],
        "int4": [((formats.int4_bytes(n, k, spec.group),), torch.uint8)],
    }
    shapes = packed[precision] + [((n,), like.dtype)] * bool(biases)
    tensors = [ctx.placeholder(gm, f"packed_{index}_{i}", like, s, dtype) for i, (s, dtype) in enumerate(shapes)]
    bias = tensors.pop() if biases else None
    common = (bias, residual, eps, scale, prologue, epilogue)
    # Decode reads weights and little else: there the activations stay as they are.
    quantised = ctx.decision.phase.value != "decode" and (rows is None or options.prefill == "fp8")
    scaling = options.fp8_scaling if quantised else "none"
    extra = {"bf16": (), "fp8": (scaling,), "int4": (norm,)}[precision]
    sizes = (n, k, spec.group) if precision == "int4" else ()
    new = insert(gm, node, f"linear_{precision}", (x, *tensors, *sizes, *common, *extra), like=node)
    node.replace_all_uses_with(new)
    return spec
