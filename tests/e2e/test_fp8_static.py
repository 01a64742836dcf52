"""Static FP8 activation scales: found on text, frozen beside the packed weights, used by later calls and graphs."""

import math

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import fu_compile
from fu_compile import evaluate, formats, models
from fu_compile.errors import DataError, OptionError
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
    return [formats.fp8_counters(s) for s in STORE.fp8_states(model.parameters())]


def calibrate(model, batches):
    return fu_compile.calibrate_fp8(model, batches, progress=False)


def test_scales_hold_twice_the_largest_value_of_all_calls(model, monkeypatch):
    """Also of the first of more calls than the history remembers."""
    largest, plain = {}, formats.fp8_quantize

    def quantize(x, state, scaling):
        x = x * 1000 if state[formats.FP8_SLOTS["calls"]] == 0 else x  # the first call has the massive values
        largest[id(state)] = max(largest.get(id(state), 0.0), float(x.abs().max()))
        return plain(x, state, scaling)

    monkeypatch.setattr(formats, "fp8_quantize", quantize)
    fu_compile.compile(model, **STATIC)
    assert calibrate(model, ids(formats.FP8_HISTORY + 3, 9)) == 4  # qkv, o, gate_up, down
    for state in STORE.fp8_states(model.parameters()):
        found = formats.fp8_counters(state)
        assert (found["frozen"], found["calls"]) == (1, formats.FP8_HISTORY + 3)
        assert found["scale"] == 2.0 ** math.ceil(math.log2(2 * largest[id(state)] / 448))


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


def test_answer_is_that_of_fresh_scales_until_a_value_does_not_fit(model):
    """A power of two moves only the exponent: frozen and measured scales round alike, except for subnormal values."""
    fu_compile.compile(model, **STATIC)
    batch = ids(1, 40)
    calibrate(model, batch)
    frozen = model(input_ids=batch, use_cache=False).logits
    with models.compiled(model, **STATIC | {"fp8_scaling": "dynamic"}):
        dynamic = model(input_ids=batch, use_cache=False).logits
    with models.uncompiled(model):
        eager = model(input_ids=batch, use_cache=False).logits
    assert float((frozen - dynamic).norm() / dynamic.norm()) < 0.3 * float((dynamic - eager).norm() / eager.norm())
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
    fu_compile.quantize(model, overrides=[("*.mlp.*", "fp8"), ("*", "exact")], progress=False)
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
