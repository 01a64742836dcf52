"""Static FP8 activation scales: found on text, frozen beside the packed weights, used by later calls and graphs."""

import copy
import json

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import fu_compile
from fu_compile import evaluate, formats, models, weights
from fu_compile.errors import DataError, FormatError, OptionError
from fu_compile.weights import STORE

STATIC = {"fp8_scaling": "static", "kv_cache": "model", "rest": "eager"}


@pytest.fixture
def model():
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "vocab_size": 61, "max_position_embeddings": 128, "initializer_range": 0.2}
    yield LlamaForCausalLM(LlamaConfig(**sizes)).eval().requires_grad_(False)
    torch.compiler.reset()


def ids(*shape):
    return torch.randint(0, 61, shape)


def counters(model):
    return [formats.fp8_counters(s) for s in STORE.fp8_states([*model.parameters(), *model.buffers()])]


def calibrate(model, batches):
    return fu_compile.calibrate_fp8(model, batches, progress=False)


def test_scales_hold_all_calls_with_the_least_error(model, monkeypatch):
    """Also the first of more calls than the history remembers; of eight scales the best for the text."""
    seen, plain = {}, formats.fp8_quantize

    def quantize(x, state, scaling):
        x = x * 30 if state[formats.FP8_SLOTS["calls"]] == 0 else x  # the first call has the massive values
        seen.setdefault(id(state), []).append(x.clone())
        return plain(x, state, scaling)

    monkeypatch.setattr(formats, "fp8_quantize", quantize)
    fu_compile.compile(model, **STATIC)
    calls = formats.FP8_HISTORY + 3
    assert calibrate(model, ids(calls, 9)) == 4  # qkv, o, gate_up, down
    chosen = set()
    for state in STORE.fp8_states(model.parameters()):
        found, inputs = formats.fp8_counters(state), seen[id(state)]
        assert (found["frozen"], found["calls"], found["saturations"]) == (1, 2 * calls, 0)
        wide = 2 * max(float(x.abs().max()) for x in inputs) / 448

        def error(scale, inputs=inputs):
            return sum(
                float(((x / scale).to(torch.float8_e4m3fn).double() * scale - x).square().sum())
                for x in inputs[-calls:]
            )

        errors = {i: error(wide * 2 ** (-i / 8)) for i in range(8)}
        best = min(errors, key=errors.get)
        chosen.add(best)
        # sums of squares in float32 rows: scales whose errors are equal to 1e-5 may change places
        assert error(found["scale"]) <= errors[best] * (1 + 1e-5)
        assert wide / 2 < found["scale"] <= wide * (1 + 1e-6)
    assert chosen != {0}  # the search has found something


def test_frozen_scales_serve_every_later_graph_and_call(model):
    fu_compile.compile(model, **STATIC)
    calibrate(model, ids(2, 24))
    scales = [c["scale"] for c in counters(model)]
    small = model(input_ids=ids(1, 5), use_cache=False).logits
    assert small.isfinite().all()
    assert [c["scale"] for c in counters(model)] == scales
    torch.compiler.reset()
    fu_compile.compile(model, **STATIC)
    cache = {models.cache_kwarg(model): models.static_cache(model, 40)}
    model(input_ids=ids(1, 30), use_cache=True, **cache)
    after = counters(model)
    assert [c["scale"] for c in after] == scales
    assert all(c["frozen"] == 1 and c["calls"] >= 4 for c in after)


def test_answer_is_as_good_as_with_fresh_scales_until_a_value_does_not_fit(model):
    """Frozen scales round elsewhere than measured ones, but no worse."""
    fu_compile.compile(model, **STATIC)
    batch = ids(1, 40)
    calibrate(model, batch)
    frozen = model(input_ids=batch, use_cache=False).logits
    with models.compiled(model, **STATIC | {"fp8_scaling": "dynamic"}):
        dynamic = model(input_ids=batch, use_cache=False).logits
    with models.uncompiled(model):
        eager = model(input_ids=batch, use_cache=False).logits
    # Both err at random by e4m3's steps; 1.5: the spread of that over the handful of random layers here.
    assert float((frozen - eager).norm()) < 1.5 * float((dynamic - eager).norm())
    before = sum(c["saturations"] for c in counters(model))
    for state in STORE.fp8_states(model.parameters()):
        state[formats.FP8_SLOTS["scale"]] /= 64  # as if the calibration text had been tame
    assert model(input_ids=batch, use_cache=False).logits.isfinite().all()
    assert sum(c["saturations"] for c in counters(model)) == before + 4


def test_calibrating_again_starts_afresh_and_changed_weights_lose_their_scale(model):
    fu_compile.compile(model, **STATIC)
    calibrate(model, ids(1, 20))
    for state in STORE.fp8_states(model.parameters()):
        state[0] = state[formats.FP8_SLOTS["scale"]] = 1e6
    calibrate(model, ids(1, 20))
    assert max(c["scale"] for c in counters(model)) < 1e3
    model.model.layers[0].mlp.down_proj.weight.mul_(2)
    model(input_ids=ids(1, 20), use_cache=False)
    assert sorted(c["frozen"] for c in counters(model)) == [0] + [1] * 3


def scales_of(model):
    return {n: weights.input_scale(t) for n, t in [*model.named_parameters(), *model.named_buffers()]
            if weights.input_scale(t) is not None}  # fmt: skip


def pack_some(model):
    return fu_compile.quantize(model, overrides=[("*.mlp.*", "fp8"), ("*", "exact")], progress=False)


@pytest.mark.parametrize("prepare", [lambda m: m, pack_some], ids=["float", "packed"])
def test_scales_are_saved_with_the_model_and_used_after_loading(model, prepare, tmp_path):
    model = prepare(model)
    fu_compile.compile(model, **STATIC)
    count = calibrate(model, ids(2, 24))
    want, scales = scales_of(model), sorted(c["scale"] for c in counters(model))
    assert len(want) == count > 0
    batch = ids(1, 20)
    answer = model(input_ids=batch, use_cache=False).logits
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert scales_of(again) == want
    again.compile(backend="futransformer", options=STATIC)  # the plain way: no call of ours sees the model before
    assert torch.equal(again(input_ids=batch, use_cache=False).logits, answer)
    after = counters(again)
    assert sorted(c["scale"] for c in after) == scales
    assert all(c["frozen"] == 1 for c in after)
    torch.testing.assert_close(scales_of(fu_compile.load(tmp_path)), want)


def test_without_keeping_nothing_is_left_on_the_model(model):
    fu_compile.compile(model, **STATIC)
    assert fu_compile.calibrate_fp8(model, ids(1, 9), progress=False, keep=False) == 4
    assert all(c["frozen"] == 1 for c in counters(model))
    assert not scales_of(model)
    assert not hasattr(model.config, "quantization_config")


def test_scales_follow_the_model_and_not_other_weights(model):
    """A move or a copy keeps them; a weight that was written to since has none."""
    fu_compile.compile(model, **STATIC)
    calibrate(model, ids(1, 20))
    want = scales_of(model)
    twin = copy.deepcopy(model)
    fu_compile.compile(twin, **STATIC)
    assert scales_of(twin) == want
    model.to(torch.bfloat16)
    assert scales_of(model) == want
    model.model.layers[0].mlp.down_proj.weight.mul_(2)
    assert want.keys() - scales_of(model).keys() == {"model.layers.0.mlp.down_proj.weight"}
    fu_compile.compile(model, **STATIC)
    assert len(scales_of(model)) == len(want) - 1
    packed = pack_some(twin)
    assert scales_of(packed).keys() == {n for n in want if "self_attn" in n}  # what is as it was
    assert packed.config.quantization_config.fp8_scales == scales_of(packed)
    fu_compile.compile(packed, **STATIC)
    calibrate(packed, ids(1, 20))
    want = scales_of(packed)
    assert scales_of(packed.to(torch.bfloat16)) == want
    assert packed.state_dict().keys() >= want.keys()


@pytest.mark.parametrize(
    ("scales", "match"),
    [({"model.layers.7.mlp.down_proj.weight": 1.0}, "layers.7"), ({"model.norm.weight": -1.0}, "-1.0")],
)
def test_scales_that_do_not_fit_are_named(model, scales, match, tmp_path):
    fu_compile.compile(model, **STATIC)
    calibrate(model, ids(1, 9))
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["fp8_scales"] = scales
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(FormatError, match=match):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_what_cannot_be_calibrated_is_refused(model):
    fu_compile.compile(model, **STATIC)
    with pytest.raises(OptionError, match="single token"):
        calibrate(model, ids(3, 1))
    with pytest.raises(DataError, match="61 tokens"):
        calibrate(model, ids(1, 8) + 61)
    assert not counters(model)  # nothing has run
    with models.compiled(model, **STATIC | {"fp8_scaling": "delayed"}), pytest.raises(OptionError, match="no static"):
        calibrate(model, ids(1, 8))


def test_a_model_without_fp8_has_nothing_to_freeze(model):
    fu_compile.compile(model, **STATIC | {"prefill": "exact"})
    with pytest.raises(OptionError, match="no FP8 projection"):
        calibrate(model, ids(1, 8))


def test_packed_models_have_scales_too(model):
    pack_some(model)
    fu_compile.compile(model, **STATIC)
    assert calibrate(model, ids(2, 9)) == 2
    states = STORE.fp8_states(model.buffers())
    assert [formats.fp8_counters(s)["frozen"] for s in states] == [1, 1]


def test_the_fp8_path_of_perplexity_calibrates_static_scales(model, monkeypatch):
    class Tokenizer:
        model_max_length = 99

        def __call__(self, text, **more):
            return type("Encoded", (), {"input_ids": [int(w) for w in text.split()]})

    words = " ".join(map(str, ids(200).tolist()))
    asked = []
    monkeypatch.setattr(evaluate, "wikitext", lambda split="test": (asked.append(split) or words, split))
    options = {"fp8_scaling": "static", "rest": "eager"}
    result = evaluate.perplexity(model, Tokenizer(), ("eager", "fp8"), (0, 1), 40, options=options, progress=False)
    assert asked == ["test", "valid"]
    assert all(c["frozen"] == 1 for c in counters(model))
    assert 0 < abs(result["fp8"].difference) < 0.2
    # and leaves the model as it was, except where scales are stored: those are used
    assert not hasattr(model.config, "quantization_config")
    fu_compile.compile(model, **STATIC)
    calibrate(model, ids(1, 9))
    kept = scales_of(model)
    evaluate.perplexity(model, Tokenizer(), ("fp8",), (0,), 40, options=options, progress=False)
    assert asked == ["test", "valid", "test"]
    assert scales_of(model) == kept
