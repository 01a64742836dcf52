"""passes/int4_cache.py: what it fuses, and what it must refuse."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from fu_compile.passes.matching import insert_call
from models import Recorder, cache_kwarg, compiled, config, model
from test_rewrites import Layer

from fu_compile import Int4Cache, ops, passes, plan
from fu_compile.backend import limits_of
from fu_compile.options import Options

aten = torch.ops.aten


class Int4Layer(Layer):
    """A recognised graph of a tiny model with one layer that was called with an Int4Cache."""

    def __init__(self, phase="decode", family="llama", options=None, dynamic=False, **changes):
        m = model(config(family, num_hidden_layers=1, **changes))
        recorder = Recorder()
        compiled(m, recorder, dynamic=dynamic)
        ids = torch.arange(3, 4 if phase == "decode" else 8)[None]
        with torch.no_grad():
            m(ids, **cache_kwarg(Int4Cache(m.config, 70)))
        self.captured = recorder.graphs[0]
        self.gm = self.captured.gm
        self.ctx = passes.Context(inputs=self.captured.inputs)
        passes.run(self.gm, self.ctx, passes.RECOGNISE)
        self.ctx.events.clear()
        self.ctx.decision = plan.decide(self.gm, Options.resolve(options=options or {}))


def test_decode():
    layer = Int4Layer().run()
    assert_expected_inline(
        "\n".join(line for line in layer.sketch().splitlines() if "linear" not in line),
        """model.layers.0.self_attn: attention_int4() -> [1, 1, 64]""",
    )
    args = [layer.ctx.path(a) for a in layer.only("attention_int4").args[6:14]]
    names = ("key_rows", "value_rows", "k_codes", "k_scales", "v_codes", "v_scales", "key_mean", "key_balance")
    assert [a.rsplit(".", 1)[-1] for a in args] == list(names)
    assert layer.ctx.decision.cache.reason == "the call's Int4Cache"


def test_prefill_reads_before_it_writes():
    assert_expected_inline(
        "\n".join(
            line for line in Int4Layer("prefill").run().sketch().splitlines() if "attn" in line and "linear" not in line
        ),
        """\
model.layers.0.self_attn.q_proj: qkv_rope() -> [[1, 4, 5, 16], [1, 2, 5, 16], [1, 2, 5, 16]]
model.layers.0.self_attn: attention_prefill() -> [1, 5, 64]
model.layers.0.self_attn: kv_extend_() -> None""",
    )


@pytest.mark.slow
def test_families_and_sizes():
    for family in ("qwen2", "qwen3", "phi3"):
        for phase in ("decode", "prefill"):
            layer = Int4Layer(phase, family).run()
            assert layer.misses("int4_cache") == []
            assert layer.nodes("kv_update") == []
    assert Int4Layer("prefill", dynamic=True).run().nodes("kv_update") == []


def test_the_users_choice_of_cache_stands():
    """kv_cache="model" is about caches of the model; an Int4Cache is INT4 whatever the option says."""
    layer = Int4Layer(options={"kv_cache": "model"}).run()
    assert len(layer.nodes("attention_int4")) == 1


def test_exact_projections_keep_the_update():
    layer = Int4Layer(options={"decode": "exact"}).run()
    assert len(layer.nodes("kv_update")) == 1
    assert layer.misses("int4_cache") == []
    assert layer.misses("redirect_kv") == []


@pytest.mark.parametrize("options", [{}, {"decode": "exact"}])
def test_limits(options):
    """The runtime knows the cache's slots, not its pages, fused or not."""
    layer = Int4Layer(options=options).run()
    layer.decision = layer.ctx.decision
    ((index, slots, where),) = limits_of(layer)
    assert slots == 70
    assert layer.ctx.inputs[index].path.endswith("cumulative_length")
    assert where.endswith("self_attn")


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        ("reader", "what model.layers.0.self_attn returns is also read by something else"),
        ("crossed", "what is written to the cache does not come from the same projection"),
        ("swapped", "keys and values are not those of one update"),
        ("query", "q does not come from a fused q/k/v projection"),
    ],
)
def test_refuses(spoil, why):
    layer = Int4Layer().run("last_logits", "fuse_prologue")
    update, attention = layer.only("kv_update"), layer.only("attention")
    if spoil == "reader":
        output = next(n for n in layer.gm.graph.nodes if n.op == "output")
        seen = insert_call(layer.gm, output, aten.abs.default, (attention.args[1],))
        output.args = ((*output.args[0], seen),)
    elif spoil == "crossed":
        update.update_arg(0, update.args[1])
    elif spoil == "swapped":
        attention.update_arg(2, attention.args[1])
    else:
        attention.update_arg(0, insert_call(layer.gm, attention, aten.abs.default, (attention.args[0],)))
    layer.run("int4_cache")
    assert layer.misses("int4_cache") == [why]
    assert layer.nodes("attention_int4") == []
    assert len(layer.nodes("kv_update")) == 1
    assert all(ops.name_of(n.target) != "kv_extend_" for n in layer.gm.graph.nodes)
