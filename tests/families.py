"""What the tests of whole models share: how often each pass fires, calls, models that run their rewritten graphs."""

from __future__ import annotations

import copy

import fu_compile.lowerings  # noqa: F401  (registers what the recognised operators mean)
import torch
from fu_compile.passes import RECOGNISE, Context, run
from models import Recorder, compiled, config, model

aten = torch.ops.aten
PLUMBING = {
    aten.linear.default, aten.chunk.default, aten.slice.Tensor, aten.arange.default, aten.zeros.default,
    aten.add.Tensor, aten.add_.Tensor,
}  # fmt: skip
"""What may be left of a decoder layer: linears, the cut of a fused gate_up, the cache's length and its first zeros."""


def expected(family: str, layers: int, cache: str) -> dict[str, int]:
    """How often each pass fires, as a function of the number of layers."""
    norms = 2 * layers + 1 + (2 * layers if family == "qwen3" else 0)
    writes = 0 if cache == "none" else 2 * layers
    return {"rms_norm": norms, "rotary": 2 * layers, "swiglu": layers, "kv_write": writes, "attention": layers,
            "qkv": layers, "residual": 2 * layers, "packed_linear": 0}  # fmt: skip


def call(m, ids, mask, cache: str, steps: int = 6):
    with torch.no_grad():
        if cache == "none":
            return [m(ids, attention_mask=mask, use_cache=False).logits]
        kwargs = {"cache_implementation": "static"} if cache == "static" else {}
        out = m.generate(ids, attention_mask=mask, max_new_tokens=steps, do_sample=False, eos_token_id=None,
                         return_dict_in_generate=True, output_logits=True, **kwargs)  # fmt: skip
        return list(out.logits)


def prompt(padded: bool):
    ids = torch.randint(3, 131, (2, 12))
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :4] = 0
    return ids, mask


def rewritten(m, contexts: list, graphs: list) -> torch.nn.Module:
    def rewrite(captured):
        ctx = Context(inputs=captured.inputs)
        run(captured.gm, ctx, RECOGNISE)
        contexts.append(ctx)
        graphs.append(captured.gm)
        return captured.gm

    return compiled(copy.deepcopy(m), Recorder(rewrite))


def left_of_layers(gm) -> set:
    """ATen operators that are left inside the decoder layers."""
    nodes = [n for n in gm.graph.nodes if "layers" in str(n.meta.get("nn_module_stack")) and n.op == "call_function"]
    return {n.target for n in nodes if getattr(n.target, "namespace", "") == "aten"}


def check(family: str, attn: str, calls: list[tuple[str, bool]], layers: int = 1) -> None:
    """Every (cache, padded) call: all pieces are found, nothing is refused or left over, results are eager's."""
    m = model(config(family, attn=attn, num_hidden_layers=layers))
    for cache, padded in calls:
        contexts, graphs = [], []
        ids, mask = prompt(padded)
        eager = call(m, ids, mask, cache, steps=3)
        ours = call(rewritten(m, contexts, graphs), ids, mask, cache, steps=3)
        assert len(contexts) >= (1 if cache == "none" else 2)  # prefill and decode
        for ctx, gm in zip(contexts, graphs, strict=True):
            assert {n: ctx.count(n) for n in RECOGNISE} == expected(family, layers, cache)
            assert [e for e in ctx.events if not e.fired] == []
            assert left_of_layers(gm) <= PLUMBING
            assert len(ctx.data["kv_write"]) == (0 if cache == "none" else layers)
        for a, b in zip(eager, ours, strict=True):  # float32; attention may sum in another order
            torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-5)
