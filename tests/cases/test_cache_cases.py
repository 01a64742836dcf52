"""Field cases about caches: reuse, overflow, masked rows, dirty slots, chunks, chats, reordering, cropping."""

import copy

import pytest
import torch
from field import (
    EXACT,
    caches,
    compiled,
    counters,
    crop,
    dynamic_cache,
    forced,
    generate,
    left_pad,
    operators,
    prompt,
    rms,
    static_cache,
    step,
    steps,
)  # fmt: skip

from fu_compile import formats
from fu_compile.caches import COPIES
from fu_compile.errors import CacheLengthError, CacheMismatchError

HISTORY = 0.05
"""J2 budget of a repeated call, as a share of E: FP8's scales are powers of two, so their history changes only values
under the subnormal step; weights and cache are quantised to the same codes."""


def state(cache):
    """What a refused call must leave alone."""
    return [(layer.keys.clone(), layer.values.clone(), int(layer.cumulative_length)) for layer in cache.layers]


def unchanged(cache, before):
    return all(
        torch.equal(layer.keys, k) and torch.equal(layer.values, v) and int(layer.cumulative_length) == n
        for layer, (k, v, n) in zip(cache.layers, before, strict=True)
    )


# ---- B12: the first prompt's answer ----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["exact", pytest.param("default", marks=pytest.mark.slow)])
def test_b12_a_reset_cache_has_forgotten(llama, mode):
    """B12, huggingface/transformers#30351: a second, different prompt continues as if the first were still cached."""
    eager = copy.deepcopy(llama)
    compiled(llama, mode=mode)
    a, b = prompt(1, 70), prompt(1, 7, seed=1)
    cache = static_cache(llama, 96)
    first = generate(llama, a, 10, cache=cache)[1]
    cache.reset()
    assert int(cache.get_seq_length()) == 0
    after = generate(llama, b, 10, cache=cache)[1]
    cache.reset()
    for layer in cache.layers:  # old slots do not matter, whatever they hold
        layer.keys.fill_(1e4)
        layer.values.fill_(-1e4)
    dirty = generate(llama, b, 10, cache=cache)[1]
    cache.reset()
    again = generate(llama, a, 10, cache=cache)[1]
    fresh = generate(llama, b, 10, cache_implementation="static")[1]

    alone = eager  # J1; for J2 another process's state
    if mode == "default":
        torch._dynamo.reset()
        alone = compiled(copy.deepcopy(eager))
    for ids, found in ((a, (first, again)), (b, (after, dirty, fresh))):
        tokens, want = generate(alone, ids, 10, cache=static_cache(alone, 96))
        error = rms(want - forced(eager, ids, tokens))
        for logits in found:
            if mode == "exact":
                assert (logits - want).abs().max() < EXACT
            else:
                assert rms(logits - want) <= HISTORY * error
    assert ("attention_int4" in operators(llama, "decode")) == (mode == "default")


# ---- B14: past the end, another batch --------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["exact", "default"])
def test_b14_past_the_end_of_the_cache(llama, mode):
    """B14, huggingface/transformers#39593: a cache sized to the first prompt is written past its end, and all dies."""
    eager = copy.deepcopy(llama)
    compiled(llama, mode=mode)
    cache = static_cache(llama, 32, batch=4)
    before = state(cache)
    with pytest.raises(CacheLengthError, match=r"32 slots.*40 long"):
        step(llama, prompt(4, 40), cache)
    assert unchanged(cache, before)
    step(llama, prompt(4, 30), cache)
    steps(llama, prompt(4, 2), cache)
    before = state(cache)
    with pytest.raises(CacheLengthError, match=r"32 slots.*33 long"):
        step(llama, prompt(4, 1), cache)
    assert unchanged(cache, before)
    cache.reset()  # a good call right after works
    good = step(llama, prompt(4, 30), cache)
    want = step(eager, prompt(4, 30), static_cache(eager, 32))
    assert rms(good - want) <= (EXACT if mode == "exact" else 0.5 * rms(want))


def test_b14_the_first_prompt_does_not_fit_a_cache_not_yet_made(llama):
    """B14, dropbox/hqq#103: a prompt of 1873 tokens into a static cache of 256, whose tensors the call itself makes."""
    compiled(llama)
    with pytest.raises(CacheLengthError, match=r"32 slots.*40 long") as error:
        step(llama, prompt(1, 40), static_cache(llama, 32))
    assert "max_cache_len" in error.value.advice
    cache = static_cache(llama, 64)
    assert step(llama, prompt(1, 40), cache).isfinite().all()
    assert int(cache.get_seq_length()) == 40


def test_b14_what_does_not_fit_the_cache(llama):
    """B14, meta-pytorch/gpt-fast#14: another batch size, head count or dtype than the cache was made for."""
    compiled(llama)
    cache = static_cache(llama, 32, batch=4)
    other_heads, other_dtype = static_cache(llama, 32), static_cache(llama, 32)
    other_heads.early_initialization(4, 4, 64, torch.float32, torch.device("cpu"))
    other_dtype.early_initialization(4, 2, 64, torch.bfloat16, torch.device("cpu"))
    step(llama, prompt(4, 5), cache)
    for bad, batch, text in (
        (cache, 2, "batch size 4.* 2"),
        (cache, 5, "batch size 4.* 5"),
        (other_heads, 4, "heads 4.* 2"),
        (other_dtype, 4, "bfloat16.*float32"),
    ):
        before = state(bad)
        with pytest.raises(CacheMismatchError, match=text):
            step(llama, prompt(batch, 3), bad)
        assert unchanged(bad, before)
    assert step(llama, prompt(4, 5), cache).isfinite().all()


def test_b14_more_positions_than_the_model_was_made_for(llama):
    """B14, huggingface/transformers#37269: beyond ``max_position_embeddings`` the answer is eager's."""
    llama.config.max_position_embeddings = 32
    want = step(llama, prompt(1, 40), static_cache(llama, 64))
    compiled(llama, mode="exact")
    assert (step(llama, prompt(1, 40), static_cache(llama, 64)) - want).abs().max() < EXACT


# ---- B17: masked rows and dirty slots --------------------------------------------------------------------------------


def test_b17_masked_rows(llama):
    """B17, huggingface/transformers#47651: NaN logits on left-padded rows, or a jump at certain padded lengths."""
    eager = copy.deepcopy(llama)
    compiled(llama)
    ids = prompt(5, 40)
    mask = torch.ones_like(ids)
    for row, pads in enumerate((1, 31, 32, 33, 40)):  # the last row is all padding
        mask[row, :pads] = 0
    tokens = prompt(5, 4, seed=1)
    ours, theirs = (served(made, ids, mask, tokens) for made in (llama, eager))
    assert ours.isfinite().all()
    # Without the row that sees nothing the others are what they were.
    short = served(llama, ids[:4], mask[:4], tokens[:4])
    for row in range(4):
        real = torch.cat((mask[row], mask.new_ones(4))).bool()
        error = rms((ours - theirs)[row][real])
        assert error < 0.5 * rms(theirs[row][real])  # quantisation noise, no jump (measured: 0.1 to 0.2)
        assert rms((ours[row] - short[row])[real]) <= 0.1 * error  # the batch's FP8 scale has another power of two


def served(made, ids, mask, tokens):
    """Logits of a prefill and of one step for each of ``tokens``, [B, S + T, V]."""
    cache = static_cache(made, 48)
    found = [step(made, ids, cache, attention_mask=mask)]
    for i in range(tokens.shape[1]):
        mask = torch.cat((mask, mask.new_ones(len(mask), 1)), 1)
        found.append(step(made, tokens[:, i : i + 1], cache, attention_mask=mask))
    return torch.cat(found, 1)


def test_b17_dirty_slots(llama):
    """B17, Dao-AILab/flash-attention#1745: NaN in slots and scales that were never written reaches the output."""
    compiled(llama)
    ids, tokens = prompt(2, 66), prompt(2, 4, seed=1)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    cache = static_cache(llama, 192, batch=2)
    found = []
    for dirty in (False, True):
        cache.reset()
        if dirty:
            for layer in cache.layers:
                layer.keys.fill_(torch.nan)
                layer.values.fill_(torch.nan)
                for t in COPIES.find(layer.keys, layer.values).store:
                    t.fill_(255 if t.dtype == torch.uint8 else torch.nan)
        logits = [step(llama, ids, cache, attention_mask=mask)[:, 5:]]
        longer = mask
        for i in range(4):
            longer = torch.cat((longer, longer.new_ones(2, 1)), 1)
            logits.append(step(llama, tokens[:, i : i + 1], cache, attention_mask=longer))
        found.append(torch.cat(logits, 1))
    assert found[1].isfinite().all()
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)  # the same codes: float32 sums only


# ---- B20: chunks and chats -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("padded", "chunks", "kinds"),
    [
        (False, (16,), ("static",)),
        pytest.param(True, (None, 16, 1, 64), ("static", "dynamic"), marks=pytest.mark.slow),
    ],
)
def test_b20_chunked_prefill(llama, padded, chunks, kinds):
    """B20, huggingface/transformers#43082: scores drop as soon as ``prefill_chunk_size`` is set."""
    ids = prompt(2, 50)
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :19] = 0  # a chunk of 16 is all padding
    want, logits = generate(llama, ids, 4, attention_mask=mask)
    compiled(llama, mode="exact")
    for chunk in chunks:
        for kind in kinds:
            cache = caches(llama, 64)[kind]
            got, found = generate(llama, ids, 4, attention_mask=mask, prefill_chunk_size=chunk, cache=cache)
            assert torch.equal(got, want), (chunk, kind)
            assert (found - logits).abs().max() < EXACT


def test_b20_the_cache_length_changes_nothing(llama):
    """B20, huggingface/transformers#30400: text differs with the size of the static cache."""
    want, logits = generate(llama, prompt(1, 50), 4)
    compiled(llama, mode="exact")
    for length in (54, 64, 200):
        got, found = generate(llama, prompt(1, 50), 4, cache=static_cache(llama, length))
        assert torch.equal(got, want)
        assert (found - logits).abs().max() < EXACT


def test_b20_quantised_chunks(llama):
    """B20, huggingface/transformers#43082: the same, quantised: only chunks after a full page read INT4 keys."""
    eager = copy.deepcopy(llama)
    compiled(llama)
    ids = prompt(1, 128)
    exact, coded = in_chunks(eager, ids, code=False), in_chunks(eager, ids, code=True)
    whole = step(llama, ids, static_cache(llama, 192, batch=1))
    parts = in_chunks(llama, ids, code=False)
    error = rms(whole - exact)
    # Chunks 1 and 2 see exact keys, as the whole prefill does; FP8's scales have another history.
    assert rms((parts - whole)[:, :64]) <= 0.1 * error
    # Chunks 3 and 4 read the first page in INT4. What that costs is measured with eager projections; on top of it the
    # roundings of FP8, whose inputs now differ, are drawn anew: at most E, and independent of it.
    page = rms((coded - exact)[:, 64:])
    assert 0.7 * page <= rms((parts - whole)[:, 64:]) <= (page**2 + error**2) ** 0.5


def in_chunks(made, ids, code):
    """Logits of a prefill in chunks of 32; ``code``: the first page goes through INT4 when it is full."""
    cache = static_cache(made, 192, batch=1)
    found = []
    for i in range(0, ids.shape[1], 32):
        if code and i == 64:
            for layer in cache.layers:
                tables = formats.kv_tables(2, 64, layer.keys.device)
                keys = formats.encode_keys(layer.keys[:, :, :64], *tables)
                layer.keys[:, :, :64] = formats.decode_keys(*keys, *tables)
                layer.values[:, :, :64] = formats.decode_rows(*formats.encode_rows(layer.values[:, :, :64]))
        found.append(step(made, ids[:, i : i + 32], cache))
    return torch.cat(found, 1)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_b20_two_turn_chat(llama, kind):
    """B20, vllm-project/vllm#4381: a prefilled cache and a longer prompt are handed to ``generate``."""
    eager = copy.deepcopy(llama)
    compiled(llama, mode="exact")
    answers = []
    for made, how in ((llama, kind), (eager, "dynamic")):
        cache = caches(made, 64)[how]
        first, _ = generate(made, prompt(1, 20), 8, cache=cache)
        history = torch.cat((prompt(1, 20), first, prompt(1, 15, seed=1)), 1)
        answers.append((first, *generate(made, history, 8, cache=cache)))
    (first, second, logits), (want_first, want_second, want_logits) = answers
    assert torch.equal(first, want_first)
    assert torch.equal(second, want_second)
    assert (logits - want_logits).abs().max() < EXACT


# ---- B21: the batch is reordered -------------------------------------------------------------------------------------


def test_b21_reordered_cache(llama):
    """B21, huggingface/transformers PR#45510: a reorder reaches one of the two stores, and beams mix their history."""
    eager = copy.deepcopy(llama)
    compiled(llama)
    ids, token = prompt(3, 130), prompt(3, 1, seed=1)
    order = torch.tensor([2, 0, 0])
    moved, built, exact = static_cache(llama, 192, batch=3), static_cache(llama, 192, batch=3), static_cache(eager, 192)
    step(llama, ids, moved)
    step(llama, token, moved)
    moved.reorder_cache(order)
    found = step(llama, token, moved)
    step(llama, ids[order], built)
    step(llama, token[order], built)
    want = step(llama, token, built)
    step(eager, ids[order], exact)
    step(eager, token[order], exact)
    error = rms(want - step(eager, token, exact))
    assert rms(found - want) <= HISTORY * error
    assert counters(llama)["imports"] + counters(llama)["reimports"] == 2  # one for each layer
    assert "attention_int4" in operators(llama, "decode")


def test_b21_repeated_and_selected_rows(llama):
    """B21, huggingface/transformers#46612: repeat and select of batch rows; a static cache refuses at once."""
    eager = copy.deepcopy(llama)
    compiled(llama, mode="exact")
    found = []
    for made in (llama, eager):
        cache = dynamic_cache(made)
        step(made, prompt(2, 9), cache)
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([3, 0]))
        found.append(step(made, prompt(2, 1), cache))
    assert (found[0] - found[1]).abs().max() < EXACT
    cache = static_cache(llama, 16, batch=2)
    for refused in (lambda: cache.batch_repeat_interleave(2), lambda: cache.batch_select_indices(torch.tensor([1]))):
        with pytest.raises(AttributeError, match="StaticLayer"):  # transformers' own refusal
            refused()


# ---- B22: crop -------------------------------------------------------------------------------------------------------


def test_b22_cropped_static_cache(llama):
    """B22, huggingface/transformers#32946: rejected tokens stay visible after a static cache is cropped."""
    compiled(llama)
    ids, tail = prompt(1, 60), prompt(1, 10, seed=2)
    clean, cropped = static_cache(llama, 192, batch=1), static_cache(llama, 192, batch=1)
    want = torch.cat((step(llama, ids, clean)[:, -1:], steps(llama, tail, clean)), 1)
    first = step(llama, ids, cropped)[:, -1:]
    steps(llama, prompt(1, 8, seed=3), cropped)  # rejected; they complete the first page, in INT4 as well
    crop(cropped, 8)
    assert int(cropped.get_seq_length()) == 60
    found = torch.cat((first, steps(llama, tail, cropped)), 1)
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)  # the same codes: float32 sums only


def test_b22_cropped_dynamic_cache(llama):
    """B22, huggingface/transformers#32946: the same where the cache really becomes shorter."""
    want = torch.cat((prompt(1, 20), prompt(1, 1, seed=2)), 1)
    want = step(llama, want, dynamic_cache(llama))[:, -1:]
    compiled(llama, mode="exact")
    cache = dynamic_cache(llama)
    step(llama, torch.cat((prompt(1, 20), prompt(1, 5, seed=3)), 1), cache)
    cache.crop(-5)
    assert (step(llama, prompt(1, 1, seed=2), cache) - want).abs().max() < EXACT


def test_b22_transformers_own_refusals_reach_the_user():
    """B22, huggingface/transformers PR#45745: a sliding window cannot get back what has left it."""
    from transformers import MistralConfig, MistralForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = MistralConfig(num_hidden_layers=1, vocab_size=1003, sliding_window=16, **sizes)
    made = compiled(MistralForCausalLM(config).eval().requires_grad_(False), mode="exact")
    cache = dynamic_cache(made)
    step(made, prompt(1, 20), cache)
    with pytest.raises(RuntimeError, match="window"):
        cache.crop(-2)


# ---- the other fixtures ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smol", "qwen2", "phi_dim"])
def test_b12_b16_of_the_other_models(name, request):
    """B12, B16: 9/3 heads with a tied head, q/k/v biases, head_dim 96: a padded batch over a reused cache."""
    made = request.getfixturevalue(name)
    rows = [prompt(1, n, seed=n)[0] for n in (5, 20)]
    singles = [generate(made, row[None], 6) for row in rows]
    compiled(made, mode="exact")
    ids, mask = left_pad(rows)
    cache = static_cache(made, 32)
    for _ in range(2):
        got, found = generate(made, ids, 6, attention_mask=mask, cache=cache)
        for i, (want, logits) in enumerate(singles):
            assert torch.equal(got[i], want[0])
            assert (found[i] - logits[0]).abs().max() < EXACT
        cache.reset()
