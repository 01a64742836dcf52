"""kv_cache="int4-channel": keys with one range per channel and page, from the option to the report."""

import copy
import warnings

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, StaticCache

import fu_compile
from fu_compile import formats
from fu_compile.caches import COPIES
from fu_compile.errors import FuWarning
from fu_compile.models import cache_kwarg, static_cache

SIZES = {
    "vocab_size": 211, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.1,
}  # fmt: skip
ASK = {"prefill": "bf16", "decode": "bf16", "rest": "eager", "strict": True}


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    with torch.no_grad():
        yield
    torch._dynamo.reset()


def qwen2(bias=100.0):
    """Weights that bfloat16 holds; ``bias`` in a slowly turning channel of every key head of the first layer."""
    torch.manual_seed(11)
    made = Qwen2ForCausalLM(Qwen2Config(**SIZES)).eval().requires_grad_(False)
    for p in made.parameters():
        p.copy_(p.bfloat16())
    made.model.layers[0].self_attn.k_proj.bias[15::16] = bias
    return made


def steps(model, cache, ids, first):
    """Logits after a prefill of ``first`` tokens, and after each further token: [B, T - first + 1, V]."""
    given = {cache_kwarg(model): cache}
    out = [model(ids[:, :first], **given).logits[:, -1:]]
    out += [model(ids[:, i : i + 1], **given).logits for i in range(first, ids.shape[1])]
    return torch.cat(out, 1)


def rms(x):
    return float(x.square().mean().sqrt())


def served(model, **options):
    return fu_compile.compile(copy.deepcopy(model), **{**ASK, **options})


def test_a_static_cache_gets_a_copy_in_this_format():
    """No warning, no layer left out, the codes of the formats, and logits near eager's although a bias is huge."""
    model, ids = qwen2(), torch.randint(0, 211, (2, 150))
    want = steps(model, static_cache(model, 160, 2), ids, 140)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FuWarning)
        made = served(model, kv_cache="int4-channel")
        cache = static_cache(made, 160, 2)
        got = steps(made, cache, ids, 140)
    report = fu_compile.report(made)
    assert {g.decision["cache"] for g in report.graphs} == {"int4-channel"}
    assert all("keys per channel" in g.reasons["cache"] for g in report.graphs)
    assert "int4-channel" in str(report)
    assert not [m for g in report.graphs for m in g.near_misses()]
    assert "attention_int4" in {name for g in report.graphs for _, name, _ in g.fused}
    for layer in cache.layers:
        copy_of = COPIES.find(layer.keys, layer.values)
        assert copy_of.kv_format == "int4-channel"
        codes, ranges = formats.encode_key_pages(layer.keys[:, :, :128], copy_of.tables[0], 0, copy_of.tables[1])
        assert (copy_of.tables[1] != 0).any()  # the model was asked
        assert torch.equal(copy_of.store[0][:, :, :2], codes)
        assert torch.equal(copy_of.store[1][:, :, :2], ranges)
    # What these formats cost without the bias; measured 1.0 to 1.1 times that, rotated without calibration 2.5 times.
    torch._dynamo.reset()
    model = qwen2(0.0)
    plain = served(model, kv_cache="int4-channel")
    cost = steps(plain, static_cache(plain, 160, 2), ids, 140) - steps(model, static_cache(model, 160, 2), ids, 140)
    assert 0 < rms(got - want) < 1.5 * rms(cost)


def test_a_cache_that_a_graph_makes_itself():
    """generate() with cache_implementation="static": the first prefill creates the store in this format."""
    model, ids = qwen2(bias=1.0), torch.randint(1, 211, (2, 70))
    made = served(model, kv_cache="int4-channel", prefill="exact", decode="exact")
    options = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": "static", "pad_token_id": 0}
    text = made.generate(ids, attention_mask=torch.ones_like(ids), **options)
    assert text.shape == (2, 76)
    assert {g.decision["cache"] for g in fu_compile.report(made).graphs} == {"int4-channel"}


def test_one_cache_under_two_formats():
    """A StaticCache that is read in one format and then in the other: its copy is made anew, never misread."""
    torch.manual_seed(5)
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).eval().requires_grad_(False)
    ids = torch.randint(0, 211, (1, 80))
    cache = static_cache(model, 96)
    a, b = served(model, kv_cache="int4"), served(model, kv_cache="int4-channel")
    steps(a, cache, ids[:, :72], 72)  # one fresh call: exact keys in both formats
    got = steps(b, cache, ids[:, 72:74], 1)
    assert {COPIES.find(layer.keys, layer.values).kv_format for layer in cache.layers} == {"int4-channel"}
    alone = static_cache(model, 96)
    steps(b, alone, ids[:, :72], 72)
    # The prefills were compiled twice: float32 sums may differ in their order.
    torch.testing.assert_close(got, steps(b, alone, ids[:, 72:74], 1), rtol=1e-3, atol=1e-3)
    steps(a, cache, ids[:, 74:75], 1)
    assert {COPIES.find(layer.keys, layer.values).kv_format for layer in cache.layers} == {"int4"}


@pytest.mark.parametrize("bias", [0.0, 100.0])
def test_int4_cache(bias):
    """In eager: near the exact cache with and without a huge bias, without key tables and without a warning."""
    model, ids = qwen2(bias), torch.randint(0, 211, (2, 190))
    want = steps(model, StaticCache(model.config, max_cache_len=200), ids, 180)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FuWarning)
        cache = fu_compile.Int4Cache(model.config, 200, batch_size=2, kv_cache="int4-channel")
        got = steps(model, cache, ids, 180)
    assert all(layer.kv_format == "int4-channel" for layer in cache.layers)
    # Measured 0.06 to 0.08 on this model of random weights, with and without the bias; two pages are quantised.
    assert 0 < rms(got - want) < 0.12 * rms(want)
