"""Key tables of the INT4 cache: measured on text, kept with the model, from single tokens where nobody calibrated."""

import copy
import math

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM, Qwen2Config, Qwen2ForCausalLM

import fu_compile
from fu_compile import calibration, evaluate, formats, keys
from fu_compile.caches import COPIES
from fu_compile.errors import CacheMismatchError, WeightsChangedError
from fu_compile.models import cache_kwarg, static_cache
from fu_compile.weights import RISK, STORE, key_risk, key_tables

SIZES = {
    "vocab_size": 211, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 4096, "initializer_range": 0.1,
}  # fmt: skip
ASK = {"prefill": "bf16", "decode": "bf16", "rest": "eager"}


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    torch.manual_seed(9)
    with torch.no_grad():
        yield
    torch._dynamo.reset()


def llama(**more):
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, **more})).eval().requires_grad_(False)


def qwen2(**more):
    return Qwen2ForCausalLM(Qwen2Config(**{**SIZES, **more})).eval().requires_grad_(False)


def text(*shape):
    return torch.randint(0, 211, shape)


def keys_of(model, ids):
    """Keys after RoPE of every layer, [B, Hkv, S, D], from transformers' own cache."""
    cache = static_cache(model, ids.shape[1], ids.shape[0])
    model(ids, **{cache_kwarg(model): cache})
    return [layer.keys for layer in cache.layers]


def decoded(k, mean, balance):
    return formats.decode_keys(*formats.encode_keys(k, mean, balance), mean, balance)


# ---- calibration -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [llama, qwen2])
def test_means_and_balances_are_those_of_the_text(make):
    model, batches = make(), [text(2, 100), text(1, 70)]
    tables = fu_compile.calibrate_keys(model, batches)
    seen = [keys_of(model, b) for b in batches]
    for layer in range(2):
        k = torch.cat([s[layer].transpose(0, 1).flatten(1, 2) for s in seen], 1).double()
        first = torch.cat([s[layer][:, :, 0] for s in seen]).mean(0)
        step = formats.encode_keys(first[None, :, None], k.mean(1).float(), tables.balances[layer])[1].abs().float()
        moved = (tables.means[layer] - k.mean(1)) / tables.balances[layer]
        # Half a step in every rotated channel; a whole one at the end of the range that has seven steps.
        assert (formats.hadamard(moved.float(), 16).abs() <= 1.001 * step[0] + 1e-4).all()
        # Equal on RoPE pairs, which turning mixes.
        assert torch.equal(*tables.balances[layer].chunk(2, 1))
    assert tables.exponent == min(tables.tried, key=tables.tried.get)
    assert set(tables.tried) == set(keys.EXPONENTS)
    assert all(0 < e < 0.2 for e in tables.errors)
    assert f"exponent {tables.exponent:g}" in str(tables)


def test_the_measured_balance_pays():
    """Queries that are large in some channels and keys in others: the choice is not 1, and errors fall."""
    model = llama(num_hidden_layers=1)
    at = model.model.layers[0].self_attn
    for head in range(4):  # RoPE pairs stay together
        at.q_proj.weight[head * 16 : head * 16 + 16] *= torch.tensor([6.0, 1, 1, 1, 1, 1, 1, 0.1] * 2)[:, None]
    for head in range(2):
        at.k_proj.weight[head * 16 : head * 16 + 16] *= torch.tensor([0.2, 1, 1, 1, 1, 1, 1, 6.0] * 2)[:, None]
    tables = fu_compile.calibrate_keys(model, [text(2, 300)])
    assert tables.exponent > 0
    assert tables.tried[tables.exponent] < tables.tried[0.0] / 1.5


def test_the_first_token_is_on_the_grid():
    model = llama(num_hidden_layers=1)
    ids = text(1, 200)
    tables = fu_compile.calibrate_keys(model, [ids])
    k = keys_of(model, ids)[0]
    error = (decoded(k, tables.means[0], tables.balances[0]) - k).square().mean((0, 1, 3)).sqrt()
    # float32 rounding of the mean and the rotation, against 4 bits everywhere else
    assert error[0] < 1e-5 < error[1:].min() / 100


def test_what_is_too_short_or_missing():
    model = llama()
    tables = fu_compile.calibrate_keys(model, [text(3, 40)])  # no page is ever complete
    assert tables.exponent == 0.0
    assert set(tables.tried.values()) == {0.0}
    with pytest.raises(CacheMismatchError, match="no calibration text"):
        fu_compile.calibrate_keys(model, [])
    before = model.config._attn_implementation
    with pytest.raises(IndexError):
        fu_compile.calibrate_keys(model, [torch.full((1, 80), 999)])
    assert model.config._attn_implementation == before


# ---- kept with the model ---------------------------------------------------------------------------------------------


def step(model, cache, ids):
    return model(ids, **{cache_kwarg(model): cache}).logits


@pytest.mark.parametrize("joined", [False, True])
def test_static_caches_use_them(joined):
    """The INT4 copy of a StaticCache is made with the calibrated tables; a changed weight starts without."""
    if joined:
        config = Phi3Config(**SIZES, pad_token_id=0, bos_token_id=1, eos_token_id=2)
        model = Phi3ForCausalLM(config).eval().requires_grad_(False)
    else:
        model = qwen2()
    tables = fu_compile.calibrate_keys(model, [text(2, 150)])
    fu_compile.compile(model, **ASK)
    cache = static_cache(model, 140)
    step(model, cache, text(1, 130))
    step(model, cache, text(1, 1))
    for layer, mean, balance in zip(cache.layers, tables.means, tables.balances, strict=True):
        held = COPIES.find(layer.keys, layer.values)
        assert torch.equal(held.tables[0], mean)
        assert torch.equal(held.tables[1], balance)
        assert torch.equal(
            held.store[0][:, :, :2].flatten(2, 3), formats.encode_keys(layer.keys[:, :, :128], mean, balance)[0]
        )
    at = model.model.layers[0].self_attn
    weight = at.qkv_proj.weight if joined else at.k_proj.weight
    assert STORE.calibrated([weight]) is not None
    weight.mul_(1.01)
    assert STORE.calibrated([weight]) is None


def test_calibrating_later_reaches_new_caches():
    model = fu_compile.compile(llama(), **ASK)
    old = static_cache(model, 100)
    step(model, old, text(1, 70))
    tables = fu_compile.calibrate_keys(model, [text(2, 150)])
    new = static_cache(model, 100)
    step(model, new, text(1, 70))
    step(model, old, text(1, 3))
    step(model, new, text(1, 3))
    found = [COPIES.find(c.layers[1].keys, c.layers[1].values).tables[0] for c in (old, new)]
    assert torch.equal(found[1], tables.means[1])
    assert not torch.equal(found[0], tables.means[1])  # its pages were encoded with the old ones


def test_int4_cache_takes_them_from_the_model():
    model = qwen2()
    tables = fu_compile.calibrate_keys(model, [text(2, 150)])
    cache = fu_compile.Int4Cache(model.config, 100, model=model)
    assert all(map(torch.equal, [layer.key_mean for layer in cache.layers], tables.means))
    assert all(map(torch.equal, [layer.key_balance for layer in cache.layers], tables.balances))


def test_packed_models_too():
    """The keys of a packed model are known by their block."""
    model = fu_compile.quantize(llama(), progress=False)
    tables = fu_compile.calibrate_keys(model, [text(2, 150)])
    fu_compile.compile(model, rest="eager")
    cache = static_cache(model, 100)
    step(model, cache, text(1, 70))
    step(model, cache, text(1, 1))
    for layer, mean in zip(cache.layers, tables.means, strict=True):
        assert torch.equal(COPIES.find(layer.keys, layer.values).tables[0], mean)


def test_a_layer_that_calibration_cannot_save_keeps_its_cache(monkeypatch):
    """Refused with the measured figure, before the first call and in a graph that was made before."""
    model, ids = llama(), text(2, 150)
    served = fu_compile.compile(copy.deepcopy(model), **ASK)
    step(served, static_cache(served, 160, 2), ids)
    monkeypatch.setattr("fu_compile.weights.RUINED", 1e-4)
    errors = fu_compile.calibrate_keys(served, [ids]).errors
    with pytest.raises(WeightsChangedError, match="the attention through INT4 keys was off by"):
        step(served, static_cache(served, 160, 2), ids)
    torch._dynamo.reset()
    step(served, static_cache(served, 160, 2), ids)
    misses = [m for g in fu_compile.report(served).graphs[-1:] for m in g.near_misses()]
    assert [m.layer for m in misses] == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    assert f"off by {100 * errors[0]:.0f} %" in misses[0].note


# ---- nobody calibrated -----------------------------------------------------------------------------------------------


def test_single_tokens_find_the_first_key():
    """A model whose first token is a sink: the key at position 0 is nearly constant, and is on the grid in any text."""
    model = llama()
    # The norm in front of the attention drowns what differs between tokens in a constant.
    model.model.embed_tokens.weight[:, 5] = 50.0
    tables = keys.tables_of(model, 2, 16)
    again = keys.tables_of(model, 2, 16)
    assert all(map(torch.equal, tables.means, again.means))
    k = keys_of(model, text(1, 100))
    plain = formats.kv_tables(2, 16)
    for layer in range(2):
        error = (decoded(k[layer], tables.means[layer], tables.balances[layer]) - k[layer])[:, :, 0].norm()
        without = (decoded(k[layer], *plain) - k[layer])[:, :, 0].norm()
        assert error < without / 2


def test_compiled_models_are_asked_when_their_weights_are_packed():
    """fu_compile.compile knows the model: the copies of its static caches have the first token's key on the grid."""
    model = fu_compile.compile(llama(), **ASK)
    cache = static_cache(model, 100)
    step(model, cache, text(1, 70))
    step(model, cache, text(1, 1))
    want = keys.tables_of(model, 2, 16)
    for layer, mean in zip(cache.layers, want.means, strict=True):
        assert mean.any()
        assert torch.equal(COPIES.find(layer.keys, layer.values).tables[0], mean)
    assert model._compiled_call_impl is not None
    # Under the plain backend string nobody knows the model: tables come from the weights alone.
    other = llama()
    other.compile(backend="futransformer", options=ASK)
    cache = static_cache(other, 100)
    step(other, cache, text(1, 70))
    step(other, cache, text(1, 1))
    assert not any(COPIES.find(layer.keys, layer.values).tables[0].any() for layer in cache.layers)


def test_a_changed_weight_is_asked_again():
    model = llama()
    weight = model.model.layers[1].self_attn.k_proj.weight
    before = STORE.first_key(weight, model)
    assert torch.equal(STORE.first_key(weight), before)  # remembered
    weight.mul_(2.0)
    torch.testing.assert_close(STORE.first_key(weight, model), 2 * before)
    assert STORE.first_key(torch.zeros(3)) is None


@pytest.mark.parametrize("calibrated", [False, True])
def test_keys_per_channel_know_what_queries_share(calibrated):
    """The direction is the largest axis of the queries' second moments; the cache gets it and scores gain by it."""
    model, ids = llama(), text(1, 128)
    found = []

    def queries(module, query, key, *args, **kwargs):
        found.append(query[0].unflatten(0, (2, -1))[:, :, 1:].flatten(1, 2).double())
        return calibration._attention(module, query, key, *args, **kwargs)

    if calibrated:
        tables = keys.calibrate_keys(model, [ids])
    else:
        ids = torch.randint(model.config.vocab_size, (1, keys.READS), generator=torch.Generator().manual_seed(0))
        tables = keys.tables_of(model, 2, 16, formats.CHANNEL)
    with keys._probing(calibration.decoder_layers(model)[0], queries):
        model(ids)
    cache = fu_compile.Int4Cache(model.config, 200, model=model, kv_cache=formats.CHANNEL)
    for q, reads, layer in zip(found, tables.reads, cache.layers, strict=True):
        values, axes = torch.linalg.eigh(q.transpose(1, 2) @ q)
        along = (reads.double() * axes[..., -1]).sum(-1).abs()
        torch.testing.assert_close(along, (values[:, -1] / values[:, :-1].mean(1)).sqrt(), rtol=1e-4, atol=0.0)
        torch.testing.assert_close(reads.double().norm(dim=-1), along, rtol=1e-6, atol=0.0)  # nothing across it
        assert torch.equal(layer.key_balance, reads)
        k = torch.randn(1, 2, 128, 16)

        def error(second, k=k, q=q):
            e = formats.decode_key_pages(
                *formats.encode_key_pages(k, torch.zeros(2, 16), 0, second), torch.zeros(2, 16)
            )
            return float(((e - k)[0].double() @ q.transpose(1, 2)).square().mean())

        assert error(reads) < error(None)
    assert not keys.tables_of(llama(), 2, 16).reads  # of the other format nobody asks


def test_models_without_values_have_tables_too():
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**SIZES))
    assert not any(bool(m.is_meta) and m.numel() == 0 for m in keys.tables_of(model, 2, 16).means)


# ---- risk ------------------------------------------------------------------------------------------------------------


def test_a_turning_bias_is_followed_exactly():
    from fu_compile.weights import HORIZON, _left

    bias, mean = torch.randn(2, 16) * 10, torch.randn(2, 16)
    inv_freq = 1.0 / 10000 ** (torch.arange(0, 12, 2) / 12)  # 12 of 16 columns turn
    angle = torch.arange(HORIZON, dtype=torch.float64)[:, None] * inv_freq.double()
    angle = torch.cat((angle, angle), 1)
    x = bias.double()[:, None, :12]
    turned = x * angle.cos() + torch.cat((-x[..., 6:], x[..., :6]), -1) * angle.sin()
    turned = torch.cat((turned, bias.double()[:, None, 12:].expand(-1, HORIZON, -1)), -1)
    want = (turned - mean.double()[:, None]).square().mean(1).sqrt()
    torch.testing.assert_close(_left(bias, mean, inv_freq).double(), want, rtol=1e-5, atol=1e-5)


def test_only_what_centring_leaves_of_a_bias_counts():
    """A slowly turning constant is subtracted and no reason to refuse; a fast one is."""
    heads, dim = (4, 2, 64), 64
    weights = [torch.randn(4 * dim, 128) / 8, torch.randn(2 * dim, 128) / 8, torch.randn(2 * dim, 128) / 8]
    inv_freq = 1.0 / 1e6 ** (torch.arange(0, dim, 2) / dim)
    for column, refused in ((63, False), (3, True)):
        biases = [torch.zeros(4 * dim), torch.zeros(2 * dim), torch.zeros(2 * dim)]
        biases[1][column] = 200.0
        tables = key_tables(heads, weights, biases, inv_freq)
        reason = key_risk(weights, biases, None, heads, inv_freq, tables)
        assert bool(reason) == refused, reason
        if reason:
            assert "after centring" in reason
            assert float(reason.split(", ")[1].split()[0]) > RISK
        assert key_risk(weights, biases, None, heads) is not None  # without tables both are


# ---- evaluation ------------------------------------------------------------------------------------------------------


def test_page_by_page_is_token_by_token():
    """The protocol's shortcut: calls of one page show every token what it would see decoded alone."""
    model, ids = llama(), text(2, 200)
    scores = []
    for size in (1, formats.PAGE):
        cache = fu_compile.Int4Cache(model.config, 200, batch_size=2)
        scores.append(evaluate.score_decode(model, ids, kept=cache, step=size))
    # The same numbers up to the order of float32 sums; a key on a rounding tie may move one of them a little.
    assert scores[0] == pytest.approx(scores[1], abs=1e-4)
    exact = evaluate.score_prefill(model, ids)
    assert all(math.fabs(a - b) > 1e-4 for a, b in zip(scores[0], exact, strict=True))
