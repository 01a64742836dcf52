"""The rewriting passes on a Llama layer: what each takes, and what each must refuse."""

from __future__ import annotations

import operator

import pytest
import torch
from expecttest import assert_expected_inline
from fu_compile.passes.matching import insert, insert_call
from models import Recorder, cache_kwarg, compiled, config, model, static_cache

from fu_compile import ops, passes, plan
from fu_compile.options import Options

aten = torch.ops.aten


class Layer:
    """A recognised graph of a tiny model with one layer, and the rewriting passes on it."""

    def __init__(
        self, phase="decode", family="llama", options=None, fresh=False, use_cache=True, dtype=torch.float32, **changes
    ):
        m = model(config(family, num_hidden_layers=1, **changes), dtype)
        recorder = Recorder()
        compiled(m, recorder, dynamic=False)
        tokens = 1 if phase == "decode" else 5
        ids = torch.arange(3, 3 + tokens)[None]
        if not use_cache:
            extra = {"use_cache": False}
        elif fresh:
            from transformers import StaticCache

            extra = cache_kwarg(StaticCache(config=m.config, max_cache_len=70))
        else:
            extra = cache_kwarg(static_cache(m, 70, 1))
        with torch.no_grad():
            m(ids, **extra)
        assert len(recorder.graphs) == 1
        self.captured = recorder.graphs[0]
        self.gm = self.captured.gm
        self.ctx = passes.Context(inputs=self.captured.inputs)
        passes.run(self.gm, self.ctx, passes.RECOGNISE)
        self.ctx.events.clear()
        self.ctx.decision = plan.decide(self.gm, Options.resolve(options=options or {}))

    def run(self, *names):
        passes.run(self.gm, self.ctx, names or passes.REWRITE)
        return self

    def nodes(self, name):
        return [n for n in self.gm.graph.nodes if ops.name_of(n.target) == name]

    def only(self, name):
        (node,) = self.nodes(name)
        return node

    def misses(self, name):
        return [e.note for e in self.ctx.events if e.name == name and not e.fired]

    def sketch(self):
        """Our operators with the strings and sizes that make them a sentence."""
        lines = []
        for n in self.gm.graph.nodes:
            name = ops.name_of(n.target)
            if name is not None:
                said = [repr(a) for a in n.args if isinstance(a, str)]
                lines.append(f"{passes.layer_of(n)}: {name}({', '.join(said)}) -> {_shape(n.meta['val'])}")
        return "\n".join(lines)


def _shape(val):
    if isinstance(val, tuple):
        return [list(v.shape) for v in val]
    return list(val.shape) if val is not None else None


# ---- whole graphs --------------------------------------------------------------------------------------------------


def test_decode_reads_like_a_sentence():
    assert_expected_inline(
        Layer("decode").run().sketch(),
        """\
model.layers.0.self_attn.q_proj: linear_int4('rms', '') -> [1, 1, 128]
model.layers.0.self_attn: attention_int4() -> [1, 1, 64]
model.layers.0.self_attn.o_proj: linear_int4('', 'residual') -> [1, 1, 64]
model.layers.0.mlp: linear_int4('rms', 'swiglu') -> [1, 1, 112]
model.layers.0.mlp.down_proj: linear_int4('', 'residual') -> [1, 1, 64]
lm_head: linear_exact('rms', '') -> [1, 1, 131]""",
    )


def test_prefill_reads_like_a_sentence():
    assert_expected_inline(
        Layer("prefill").run().sketch(),
        """\
model.layers.0.self_attn.q_proj: linear_fp8('rms', '', 'delayed') -> [1, 5, 128]
model.layers.0.self_attn.q_proj: qkv_append() -> [[1, 4, 5, 16], [1, 2, 5, 16], [1, 2, 5, 16]]
model.layers.0.self_attn: attention_prefill() -> [1, 5, 64]
model.layers.0.self_attn.o_proj: linear_fp8('', 'residual', 'delayed') -> [1, 5, 64]
model.layers.0.mlp: mlp_fp8('rms', 'residual', 'delayed') -> [1, 5, 64]
lm_head: linear_exact('rms', '') -> [1, 5, 131]""",
    )


def test_exact_keeps_the_projections_whole():
    assert_expected_inline(
        Layer("decode", options={"mode": "exact"}).run().sketch(),
        """\
model.layers.0.input_layernorm: rms_norm() -> [1, 1, 64]
model.layers.0.self_attn.q_proj: qkv() -> [[1, 4, 1, 16], [1, 2, 1, 16], [1, 2, 1, 16]]
model.layers.0.self_attn: rotary() -> [1, 4, 1, 16]
model.layers.0.self_attn: rotary() -> [1, 2, 1, 16]
model.layers.0.self_attn: kv_write_() -> None
model.layers.0.self_attn: kv_write_() -> None
model.layers.0.self_attn: attention() -> [1, 1, 64]
model.layers.0.self_attn.o_proj: linear_exact('', 'residual') -> [1, 1, 64]
model.layers.0.mlp: linear_exact('rms', 'swiglu') -> [1, 1, 112]
model.layers.0.mlp.down_proj: linear_exact('', 'residual') -> [1, 1, 64]
lm_head: linear_exact('rms', '') -> [1, 1, 131]""",
    )


def test_bias_and_fused_projections():
    assert_expected_inline(
        Layer("decode", "qwen2").run().sketch(),
        """\
model.layers.0.self_attn.q_proj: linear_int4('rms', 'bias') -> [1, 1, 128]
model.layers.0.self_attn: attention_int4() -> [1, 1, 64]
model.layers.0.self_attn.o_proj: linear_int4('', 'residual') -> [1, 1, 64]
model.layers.0.mlp: linear_int4('rms', 'swiglu') -> [1, 1, 112]
model.layers.0.mlp.down_proj: linear_int4('', 'residual') -> [1, 1, 64]
lm_head: linear_exact('rms', '') -> [1, 1, 131]""",
    )
    assert_expected_inline(
        Layer("decode", "phi3").run().sketch(),
        """\
model.layers.0.self_attn.qkv_proj: linear_int4('rms', '') -> [1, 1, 288]
model.layers.0.self_attn: attention_int4() -> [1, 1, 96]
model.layers.0.self_attn.o_proj: linear_int4('', 'residual') -> [1, 1, 96]
model.layers.0.mlp: linear_int4('rms', 'swiglu') -> [1, 1, 112]
model.layers.0.mlp.down_proj: linear_int4('', 'residual') -> [1, 1, 96]
lm_head: linear_exact('rms', '') -> [1, 1, 131]""",
    )


def test_nothing_of_the_block_is_left_and_inputs_stay_in_order():
    layer = Layer("decode").run()
    # transformers 5.17 multiplies frequencies and positions by matmul, in the rotary embedding before the layers
    nodes = [n for n in layer.gm.graph.nodes if not passes.layer_of(n).endswith("rotary_emb")]
    left = {str(n.target) for n in nodes if isinstance(n.target, torch._ops.OpOverload)}
    block = ("linear", "silu", "softmax", "scaled_dot", "index_copy", "rsqrt", "matmul")
    assert not {x for x in left if x.startswith("aten") and any(b in x for b in block)}
    # six tensors of the cache (two of them tables), then four packed weights: the order in which the runtime binds
    assert [n.split("_")[0] for n in layer.ctx.extra] == ["kv"] * 6 + ["packed"] * 4
    names = [n.name for n in layer.gm.graph.nodes if n.op == "placeholder"]
    assert names[-10:] == layer.ctx.extra


# ---- last_logits ---------------------------------------------------------------------------------------------------


def slice_last(layer, node):
    with layer.gm.graph.inserting_after(node):
        cut = layer.gm.graph.call_function(aten.slice.Tensor, (node, 1, -1, 2**63 - 1))
    cut.meta = {**node.meta, "val": node.meta["val"][:, -1:]}
    return cut


def test_last_logits_moves_above_head_and_norm():
    layer = Layer("prefill", use_cache=False)
    output = next(n for n in layer.gm.graph.nodes if n.op == "output")
    logits = next(n for n in layer.gm.graph.nodes if n.target is aten.linear.default and n.meta["val"].shape[-1] == 131)
    cut = slice_last(layer, logits)
    output.args = ((cut,),)
    layer.run("last_logits")
    norm = layer.nodes("rms_norm")[-1]
    assert norm.meta["val"].shape == (1, 1, 64)
    assert layer.ctx.count("last_logits") == 2


def test_last_logits_needs_a_sole_reader_and_the_token_dimension():
    layer = Layer("prefill", use_cache=False)
    output = next(n for n in layer.gm.graph.nodes if n.op == "output")
    logits = next(n for n in layer.gm.graph.nodes if n.target is aten.linear.default and n.meta["val"].shape[-1] == 131)
    output.args = ((slice_last(layer, logits), logits),)
    layer.run("last_logits")
    assert layer.ctx.count("last_logits") == 0
    assert layer.misses("last_logits") == [f"{logits.name} has 2 readers: all its rows are needed"]

    layer = Layer("prefill", use_cache=False)
    output = next(n for n in layer.gm.graph.nodes if n.op == "output")
    logits = next(n for n in layer.gm.graph.nodes if n.target is aten.linear.default and n.meta["val"].shape[-1] == 131)
    cut = slice_last(layer, logits)
    cut.args = (logits, 2, 0, 7)
    cut.meta["val"] = logits.meta["val"][..., :7]
    output.args = ((cut,),)
    layer.run("last_logits")
    assert layer.ctx.count("last_logits") == 0


# ---- fuse_prologue -------------------------------------------------------------------------------------------------


def test_a_norm_with_another_reader_stays():
    layer = Layer("decode")
    norm = layer.nodes("rms_norm")[1]
    output = next(n for n in layer.gm.graph.nodes if n.op == "output")
    output.args = ((*output.args[0], norm),)  # output_hidden_states
    layer.run("last_logits", "fuse_prologue")
    assert norm in layer.nodes("rms_norm")
    assert layer.misses("fuse_prologue") == ["the norm is also read by output, which is no projection"]
    gate = next(n for n in layer.nodes("linear_exact") if n.args[0] is norm)
    assert gate.args[3] is None
    assert gate.args[7] == ""


def test_q_and_k_must_be_rotated_alike():
    layer = Layer("decode")
    rotary = layer.nodes("rotary")[1]
    rotary.args = (rotary.args[0], rotary.args[2], rotary.args[1])
    layer.run("last_logits", "fuse_prologue")
    assert layer.misses("fuse_prologue")[0] == "q and k are rotated by different cos and sin"
    assert len(layer.nodes("qkv")) == 1


def test_q_without_rotary_is_refused():
    layer = Layer("decode")
    rotary = layer.nodes("rotary")[0]
    rotary.replace_all_uses_with(rotary.args[0])
    layer.gm.graph.erase_node(rotary)
    layer.run("last_logits", "fuse_prologue")
    assert layer.misses("fuse_prologue")[0] == "q is not read by one rotary embedding alone"


# ---- fuse_epilogue -------------------------------------------------------------------------------------------------


def test_gate_with_another_reader_is_refused():
    layer = Layer("decode").run("last_logits", "fuse_prologue")
    gate = layer.only("swiglu").args[0]
    output = next(n for n in layer.gm.graph.nodes if n.op == "output")
    output.args = ((*output.args[0], gate),)
    layer.run("fuse_epilogue")
    assert layer.misses("fuse_epilogue")[0] == "gate or up is also read by something else"
    assert len(layer.nodes("swiglu")) == 1


def test_gate_and_up_of_different_inputs_are_refused():
    layer = Layer("decode").run("last_logits", "fuse_prologue")
    up = layer.only("swiglu").args[1]
    up.args = (layer.only("residual" if len(layer.nodes("residual")) == 1 else "attention"), *up.args[1:])
    layer.run("fuse_epilogue")
    assert "gate and up do not share input and norm" in layer.misses("fuse_epilogue")


def test_swapped_halves_are_refused():
    layer = Layer("decode", "phi3").run("last_logits", "fuse_prologue")
    swiglu = layer.only("swiglu")
    swiglu.args = (swiglu.args[1], swiglu.args[0])
    layer.run("fuse_epilogue")
    assert len(layer.nodes("swiglu")) == 1
    assert any("half" in note or "input" in note for note in layer.misses("fuse_epilogue"))


def test_a_projection_takes_one_residual_only():
    layer = Layer("decode").run("last_logits", "fuse_prologue")
    second = layer.nodes("residual")[1]
    again = insert(layer.gm, second.next, "residual", (second.args[0], second, 1.0), like=second)
    second.replace_all_uses_with(again, delete_user_cb=lambda user: user is not again)
    layer.run("fuse_epilogue")
    assert any("already has the epilogue residual" in note for note in layer.misses("fuse_epilogue"))
    assert len(layer.nodes("residual")) == 1


def test_mixed_dtypes_keep_the_residual_apart():
    layer = Layer("decode").run("last_logits", "fuse_prologue")
    first = layer.nodes("residual")[0]
    wide = insert_call(layer.gm, first, aten.to.dtype, (first.args[0], torch.float64))
    first.update_arg(0, wide)
    layer.run("fuse_epilogue")
    assert "the stream is torch.float64, the projection torch.float32" in layer.misses("fuse_epilogue")


# ---- choose_precision, fold_gain, pack_weights ---------------------------------------------------------------------


def test_overrides_and_the_most_faithful_of_a_group():
    options = {"overrides": [("*.v_proj", "bf16"), ("*.down_proj", "exact")]}
    layer = Layer("decode", options=options).run()
    assert len(layer.nodes("linear_bf16")) == 1  # q, k and v are packed together
    exact = [n for n in layer.nodes("linear_exact") if "residual" in n.args[8]]
    assert len(exact) == 1
    assert len(layer.nodes("linear_int4")) == 2


def test_a_computed_weight_stays_exact():
    layer = Layer("decode")
    linear = next(n for n in layer.gm.graph.nodes if n.target is aten.linear.default)
    merged = insert_call(layer.gm, linear, aten.mul.Tensor, (linear.args[1], 2.0))
    linear.update_arg(1, merged)
    layer.run()
    notes = [e.note for e in layer.ctx.events if e.name == "choose_precision"]
    assert sum("computed in the graph" in n for n in notes) == 1


def test_a_gain_that_is_no_parameter_is_not_folded():
    layer = Layer("decode", options={"decode": "fp8"})
    norm = layer.nodes("rms_norm")[1]
    computed = insert_call(layer.gm, norm, aten.mul.Tensor, (norm.args[1], 2.0))
    norm.update_arg(1, computed)
    layer.run()
    assert layer.misses("fold_gain") == [f"the gain {computed.name} is no parameter of the model"]
    (norm,) = layer.nodes("rms_norm")
    packed = next(iter(norm.users))
    assert ops.name_of(packed.target) == "linear_fp8"
    assert "rms" not in packed.args


def test_a_gain_is_never_folded_into_int4():
    """Groups share one scale: SmolLM2 lost 0.80 NLL with folded gains, 0.27 without."""
    layer = Layer("decode").run()
    assert layer.ctx.data["fold_gain"] == {}
    assert [s.gain for s in layer.ctx.data["pack_weights"]] == [None] * 4
    assert layer.nodes("rms_norm") == []
    taken = {layer.ctx.path(n.args[11]) for n in layer.nodes("linear_int4") if n.args[11] is not None}
    norms = ("input_layernorm", "post_attention_layernorm")
    assert taken == {f"model.layers.0.{name}.weight" for name in norms}
    assert all((n.args[9] == "rms") == (n.args[11] is not None) for n in layer.nodes("linear_int4"))


def test_float16_keeps_the_norm_before_int4():
    """x * gain of a massive activation can leave float16's range, so the norm runs first."""
    layer = Layer("decode", dtype=torch.float16).run()
    assert len(layer.nodes("rms_norm")) == 2
    assert all(n.args[9] == "" and n.args[11] is None for n in layer.nodes("linear_int4"))


@pytest.mark.parametrize("precision", ["fp8", "bf16"])
def test_pack_specs_name_their_sources(precision):
    layer = Layer("decode", "qwen2", options={"decode": precision}).run()
    specs = layer.ctx.data["pack_weights"]
    paths = {i.index: i.path for i in layer.captured.inputs}
    qkv = specs[0]
    assert [paths[i] for i in qkv.weights] == [f"model.layers.0.self_attn.{p}_proj.weight" for p in "qkv"]
    assert [paths[i] for i in qkv.biases] == [f"model.layers.0.self_attn.{p}_proj.bias" for p in "qkv"]
    assert paths[qkv.gain] == "model.layers.0.input_layernorm.weight"
    assert (qkv.n, qkv.k, qkv.interleave) == (128, 64, False)
    assert [s.gain is None for s in specs] == [False, True, False, True]
    int4 = Layer("decode", "qwen2").run().ctx.data["pack_weights"]
    assert [s.interleave for s in int4] == [False, False, True, False]


# ---- redirect_kv ---------------------------------------------------------------------------------------------------


def test_a_fresh_cache_brings_its_store_as_outputs():
    layer = Layer("prefill", fresh=True).run()
    (spec,) = layer.ctx.data["redirect_kv"]
    assert spec.created
    assert layer.ctx.extra_outputs == 4
    output = next(n for n in layer.gm.graph.nodes if n.op == "output").args[0]
    assert output[spec.keys].meta["val"].shape == (1, 2, 70, 16)
    assert output[-4].meta["val"].shape == (1, 2, 2, 64, 8)
    assert output[-4].meta["val"].dtype == torch.uint8


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        ("reader", "the keys are also read by something else"),
        ("position", "keys and values are written at different positions"),
        ("twice", "the keys are not one StaticCache that is written once"),
        ("crossed", "what is written to the keys does not come from the same projection"),
        ("kept", "because of a test"),
    ],
)
def test_redirect_refuses(spoil, why):
    layer = Layer("decode").run("last_logits", "fuse_prologue")
    keys, values = layer.nodes("kv_write_")
    output = next(n for n in layer.gm.graph.nodes if n.op == "output")
    if spoil == "reader":
        seen = insert_call(layer.gm, output, aten.abs.default, (keys.args[0],))
        output.args = ((*output.args[0], seen),)
    elif spoil == "position":
        values.update_arg(1, insert_call(layer.gm, keys, aten.abs.default, (keys.args[1],)))
    elif spoil == "twice":
        insert(layer.gm, keys, "kv_write_", keys.args)
    elif spoil == "crossed":
        keys.update_arg(2, values.args[2])
        values.prepend(keys)
    else:
        layer.ctx.data["keep_kv"] = {"model.layers.0.self_attn": why}
    layer.run("redirect_kv")
    assert layer.misses("redirect_kv") == [why]
    assert layer.nodes("attention_int4") == []
    assert len(layer.nodes("kv_write_")) >= 2


def test_growing_caches_and_options_are_left_alone():
    layer = Layer("decode", options={"kv_cache": "model"}).run()
    assert layer.ctx.decision.cache.reason == "option kv_cache"
    assert len(layer.nodes("kv_write_")) == 2
    assert len(layer.nodes("qkv_rope")) == 1
    none = Layer("prefill", use_cache=False)
    assert none.ctx.decision.phase.value == "score"
    assert none.run().ctx.data["redirect_kv"] == []


def test_getitem_order_of_qkv_rope():
    layer = Layer("decode", options={"kv_cache": "model"}).run()
    rope = layer.only("qkv_rope")
    items = {n.args[1]: n for n in rope.users if n.target is operator.getitem}
    attention = layer.only("attention")
    assert attention.args[0] is items[0]
    assert {w.args[2] for w in layer.nodes("kv_write_")} == {items[1], items[2]}
