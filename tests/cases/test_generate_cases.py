"""Field cases about ``generate``: calls that miss the backend, recompiles, overwritten results, batches, beams."""

import copy
import gc
import re

import pytest
import torch
from field import (
    EXACT,
    caches,
    compiled,
    counters,
    forced,
    generate,
    left_pad,
    model,
    operators,
    prompt,
    rms,
    static_cache,
    step,
    steps,
)  # fmt: skip
from transformers import CompileConfig, pipeline

import fu_compile

EAGER_REST = {"mode": "exact", "rest": "eager"}


# ---- B01: calls that never reach the backend -------------------------------------------------------------------------


def in_place(made):
    made.compile(backend="futransformer", options=EAGER_REST)


def by_compile(made):
    fu_compile.compile(made, **EAGER_REST)


def by_forward(made):
    made.forward = torch.compile(made.forward, backend="futransformer", options=EAGER_REST)


@pytest.mark.parametrize("wire", [in_place, by_compile, by_forward])
def test_b01_generate_reaches_the_backend(llama, wire):
    """B01, pytorch/pytorch#141473: a compiled model generates at eager speed because its calls miss the backend."""
    ids = prompt(2, 9)
    want, _ = generate(llama, ids, 8)
    wire(llama)
    got, _ = generate(llama, ids, 8, cache_implementation="static")
    assert torch.equal(got, want)
    assert (counters(llama)["prefill_calls"], counters(llama)["decode_calls"]) == (1, 7)
    assert fu_compile.doctor(llama)["reaches the backend"].status == "ok"


def test_b01_doctor_finds_the_wrapper_that_generates_uncompiled(llama):
    """B01, pytorch/pytorch#141473: ``torch.compile(model).generate`` runs the inner model uncompiled."""
    wrapper = torch.compile(llama, backend="futransformer", options=EAGER_REST)
    generate(wrapper, prompt(1, 5), 3, cache_implementation="static")
    assert counters(llama)["calls"] == 0
    check = fu_compile.doctor(wrapper)["reaches the backend"]
    assert check.status == "problem"
    assert "model.compile" in check.advice
    step(wrapper, prompt(1, 5), static_cache(llama, 16))  # calls of the wrapper itself do count
    assert counters(llama)["calls"] == 1


def test_b01_pipeline_of_a_model_compiled_in_place(llama):
    """B01, huggingface/transformers#28190: a text-generation pipeline hides which model it calls."""
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({f"w{i}": i for i in range(1003)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0")
    made = pipeline("text-generation", compiled(llama, mode="exact"), tokenizer=tokenizer)
    made("w3 w5 w7", max_new_tokens=4, do_sample=False)
    assert (counters(llama)["prefill_calls"], counters(llama)["decode_calls"]) == (1, 3)


# ---- B02: recompiles, two compilers ----------------------------------------------------------------------------------


def test_b02_generating_again_builds_nothing_and_repeats_itself(llama):
    """B02, huggingface/transformers#36725: every ``generate`` recompiles, because the backend is another object."""
    eager = copy.deepcopy(llama)
    ids = prompt(1, 9)
    llama.compile(backend="futransformer", options={"rest": "eager"})
    tokens, first = generate(llama, ids, 6, cache_implementation="static")
    error = rms(first - forced(eager, ids, tokens))
    built = counters(llama)["graphs"]
    for _ in range(2):
        _, again = generate(llama, ids, 6, cache_implementation="static")
        # The first call measures its FP8 scales, later ones use them: only values under the subnormal step can differ.
        assert rms(again - first) <= 0.01 * error
    assert counters(llama)["graphs"] == built == 2
    assert counters(llama)["imports"] == counters(llama)["reimports"] == 0


def test_b02_compile_config_by_name(llama):
    """B02, huggingface/transformers#36725: the same through ``CompileConfig``, a new one for every call."""
    ids = prompt(1, 9)
    want, logits = generate(llama, ids, 6)
    for _ in range(3):
        config = CompileConfig(backend="futransformer", mode=None, options=EAGER_REST)
        config._compile_all_devices = True  # what a GPU does without being asked
        got, found = generate(llama, ids, 6, cache_implementation="static", compile_config=config)
        assert torch.equal(got, want)
        assert (found - logits).abs().max() < EXACT
        assert counters(llama)["graphs"] == 1  # transformers does not compile the prefill
    assert counters(llama)["decode_calls"] == 3 * 5


def test_b02_one_compiler_owns_each_forward(llama):
    """B02, pytorch/pytorch#168373: ``generate`` compiles decode by itself, around the user's own compile."""
    other = []
    config = CompileConfig(backend=lambda gm, inputs: other.append(gm) or gm.forward, mode=None)
    config._compile_all_devices = True
    compiled(llama, mode="exact")
    generate(llama, prompt(1, 9), 6, cache_implementation="static", compile_config=config)
    assert (counters(llama)["prefill_calls"], counters(llama)["decode_calls"]) == (1, 5)
    assert other == []


# ---- B05, B06: one graph for every length ----------------------------------------------------------------------------

LENGTHS = (3, 5, 7, 11, 17, 31, 33, 64, 65, 100, 127, 128)


@pytest.mark.slow
def test_b05_static_cache_lengths(llama):
    """B05, huggingface/transformers#37908: every new prompt length recompiles until the limit, then runs eager."""
    eager = copy.deepcopy(llama)
    compiled(llama)
    found = {}
    for _ in range(2):
        for n in LENGTHS:
            found[n] = generate(llama, prompt(1, n, seed=n), 4, cache=static_cache(llama, 160))
        # A prompt of the first length, one of every other length, one decode step.
        assert counters(llama)["graphs"] == 3
    assert counters(llama)["calls"] == 2 * 4 * len(LENGTHS)
    assert "attention_int4" in operators(llama, "decode")

    torch._dynamo.reset()
    fresh = compiled(copy.deepcopy(eager))
    for n in (65, 64):  # in another order, so other graphs serve them
        ids = prompt(1, n, seed=n)
        tokens, logits = found[n]
        error = rms(logits - forced(eager, ids, tokens))
        alone = generate(fresh, ids, 4, cache=static_cache(fresh, 160))[1]
        # Both quantise the same values with the same scales but for FP8's history: far below what quantising costs.
        assert rms(alone - logits) <= 0.05 * error


def test_b05_dynamic_cache_lengths(llama):
    """B05, huggingface/transformers#37908: the same with a cache that grows with every token."""
    eager = copy.deepcopy(llama)
    compiled(llama, mode="exact")
    for _ in range(2):
        for n in LENGTHS:
            want, logits = generate(eager, prompt(1, n, seed=n), 4)
            got, found = generate(llama, prompt(1, n, seed=n), 4)
            assert torch.equal(got, want)
            assert (found - logits).abs().max() < EXACT
        # As above, and the very first decode step, before Dynamo knows that the length changes.
        assert counters(llama)["graphs"] == 4


def test_b06_graphs_do_not_grow_with_the_mask(llama):
    """B06, pytorch/pytorch#119640: a 2-D mask that grows by one each step costs a graph each step."""
    ids, mask = left_pad([prompt(1, n, seed=n)[0] for n in (3, 11)])
    compiled(llama)
    generate(llama, ids, 64, attention_mask=mask, cache=static_cache(llama, 128))
    assert counters(llama)["graphs"] == 2
    lengths = torch.randint(1, 101, (60,), generator=torch.Generator().manual_seed(6)).tolist()
    for n in lengths:
        generate(llama, prompt(2, n, seed=n), 2, cache=static_cache(llama, 128))
        ours = counters(llama)["graphs"]
        assert ours <= 4  # ... and a prompt of any length, and a prompt of one token into a new cache
    assert counters(llama)["calls"] == 64 + 2 * len(lengths)


def test_b06_growing_mask_in_a_loop_of_ones_own(llama):
    """B06, huggingface/transformers#29165: the same mask handed to the model by hand, step by step."""
    ids, mask = left_pad([prompt(1, n, seed=n)[0] for n in (3, 11)])
    eager = copy.deepcopy(llama)
    compiled(llama, mode="exact")
    ours, theirs = static_cache(llama, 128, batch=2), static_cache(eager, 128, batch=2)
    token = ids
    for _ in range(12):
        logits = step(llama, token, ours, attention_mask=mask)[:, -1:]
        assert (logits - step(eager, token, theirs, attention_mask=mask)[:, -1:]).abs().max() < EXACT
        token = logits.argmax(-1)
        mask = torch.cat((mask, mask.new_ones(2, 1)), 1)
    assert counters(llama)["graphs"] <= 3  # a prefill, the first decode step, every other decode step


# ---- B09: results overwritten by the next step -----------------------------------------------------------------------


def check_results_stay(made, rest):
    eager = copy.deepcopy(made)
    compiled(made, rest=rest)
    ids, tokens = prompt(1, 60), prompt(1, 16, seed=1)
    cache = static_cache(made, 96, batch=1)
    kept = [step(made, ids, cache)]
    saved = [kept[0].clone()]
    for i in range(tokens.shape[1]):  # across the end of the first page
        kept.append(step(made, tokens[:, i : i + 1], cache))
        saved.append(kept[-1].clone())
    assert all(torch.equal(a, b) for a, b in zip(kept, saved, strict=True))
    again = static_cache(made, 96, batch=1)
    step(made, ids, again)
    error = rms(torch.cat(kept[1:], 1) - steps_after(eager, ids, tokens))
    assert rms(torch.cat(kept[1:], 1) - steps(made, tokens, again)) <= 0.05 * error  # FP8's history only
    # An output goes straight into the next call.
    a = step(made, kept[-1].argmax(-1), cache)
    b = step(made, a.argmax(-1), cache)
    assert a.isfinite().all()
    assert not torch.equal(a, b)


def steps_after(made, ids, tokens):
    cache = static_cache(made, 96, batch=1)
    step(made, ids, cache)
    return steps(made, tokens, cache)


def test_b09_kept_results_are_not_overwritten(llama):
    """B09, pytorch/pytorch#170604: logits kept from call 1 show call 2's values."""
    check_results_stay(llama, "eager")


@pytest.mark.slow
def test_b09_kept_results_are_not_overwritten_by_inductor(llama):
    """B09, pytorch/pytorch#170604: the same where Inductor plans the memory of the rest."""
    check_results_stay(llama, "inductor")


def test_b09_stored_logits_are_those_of_each_step(llama):
    """B09, meta-pytorch/gpt-fast#232: ``output_logits`` and ``output_scores`` all show the last step."""
    compiled(llama)
    ids = prompt(2, 9)
    out = llama.generate(
        ids, max_new_tokens=16, do_sample=False, output_logits=True, output_scores=True, return_dict_in_generate=True,
        cache_implementation="static", repetition_penalty=1.5,
    )  # fmt: skip
    logits, scores = torch.stack(out.logits, 1), torch.stack(out.scores, 1)
    assert torch.equal(scores.argmax(-1), out.sequences[:, 9:])
    cache = static_cache(llama, 25)
    first = step(llama, ids, cache)[:, -1:]
    reference = torch.cat((first, steps(llama, out.sequences[:, 9:-1], cache)), 1)
    # The same numbers through the same graphs; the last row of a prefill may be computed alone or with the others.
    assert (logits - reference).abs().max() < EXACT
    assert rms(scores - logits) > 0  # the penalty changed the scores and not the logits


# ---- B13: the second call --------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [None, 8])
def test_b13_second_generate(llama, chunk):
    """B13, huggingface/transformers#46858, #46424, #46421: the second ``generate`` crashes, or compiles again."""
    eager = copy.deepcopy(llama)
    compiled(llama, mode="exact")
    more = {"cache_implementation": "static", "prefill_chunk_size": chunk}
    built = []
    for length, new in ((8, 1), (8, 1), (8, 16), (8, 48), (8, 16), (40, 16), (8, 48)):
        ids = prompt(1, length)
        want, logits = generate(eager, ids, new)
        got, found = generate(llama, ids, new, **more)
        assert torch.equal(got, want)
        assert (found - logits).abs().max() < EXACT
        built.append(counters(llama)["graphs"])
    assert built[1] == built[0]
    assert built[4] == built[3]  # shorter than a call before
    assert built[6] == built[5]


def test_b13_a_longer_call_grows_the_store_and_says_so(llama):
    """B13, huggingface/transformers#46424: a longer second call re-allocates silently."""
    eager = copy.deepcopy(llama)
    compiled(llama)
    sizes, built = [], []
    for new in (16, 80, 16):
        ids = prompt(1, 8)
        cache = static_cache(llama, 8 + new)
        tokens, found = generate(llama, ids, new, cache=cache)
        gc.collect()  # the cache of the call before may hang in a cycle
        sizes.append(counters(llama)["bytes_kv"])
        built.append(counters(llama)["graphs"])
    page = 2 * 2 * 2 * 64 * (64 // 2 + 2)  # layers, keys and values, heads, tokens, codes and scale
    assert sizes[0] >= page  # and two tables a layer
    assert sizes == [sizes[0], sizes[0] + page, sizes[0]]  # 88 slots are two pages, and go with their cache
    assert built[2] == built[1]
    assert not [e for g in fu_compile.report(llama).graphs for e in g.near_misses() if e.name == "redirect_kv"]
    torch._dynamo.reset()
    fresh = compiled(copy.deepcopy(eager))
    _, alone = generate(fresh, ids, 16, cache=static_cache(fresh, 24))
    assert rms(alone - found) <= 0.05 * rms(found - forced(eager, ids, tokens))


# ---- B16: left padding -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_b16_left_padded_rows_equal_their_single_runs(llama, kind):
    """B16, huggingface/transformers#30670, unslothai/unsloth#3699: short prompts of a batch turn into garbage."""
    eager = copy.deepcopy(llama)
    rows = [prompt(1, n, seed=n)[0] for n in (3, 9, 20)]
    compiled(llama, mode="exact")
    found = []
    for pad in (0, 7):
        ids, mask = left_pad(rows, pad)
        found.append(generate(llama, ids, 12, attention_mask=mask, cache=caches(llama, 64)[kind]))
        for i, row in enumerate(rows):
            want, logits = generate(eager, row[None], 12)
            assert torch.equal(found[-1][0][i], want[0])
            assert (found[-1][1][i] - logits[0]).abs().max() < EXACT
    assert torch.equal(found[0][1], found[1][1])  # what stands in the padding reaches nothing


@pytest.mark.parametrize("positions", [True, False])
def test_b16_left_padded_loop_of_ones_own(llama, positions):
    """B16, huggingface/transformers#30670: a hand-written decode loop with mask and positions, or the mask only."""
    eager = copy.deepcopy(llama)
    compiled(llama, mode="exact")
    ids, mask = left_pad([prompt(1, n, seed=n)[0] for n in (3, 9, 20)])
    pair = [(llama, static_cache(llama, 64, batch=3)), (eager, static_cache(eager, 64, batch=3))]
    token = ids
    for _ in range(5):
        more = {"attention_mask": mask}
        if positions:
            more["position_ids"] = (mask.cumsum(1) - 1).clamp_min(0)[:, -token.shape[1] :]
        ours, theirs = (step(made, token, cache, **more) for made, cache in pair)
        seen = mask[:, -token.shape[1] :].bool()
        assert (ours - theirs)[seen].abs().max() < EXACT
        token = theirs[:, -1:].argmax(-1)
        mask = torch.cat((mask, mask.new_ones(3, 1)), 1)


def test_b16_quantised_batch_of_33(llama):
    """B16, unslothai/unsloth#3699: text changes with batch mates (33 rows of mixed lengths, quantised)."""
    eager = copy.deepcopy(llama)
    compiled(llama)
    rows = [prompt(1, 1 + n % 23, seed=n)[0] for n in range(33)]
    ids, mask = left_pad(rows)
    tokens, found = generate(llama, ids, 4, attention_mask=mask, cache=static_cache(llama, 32))
    for i in (3, 7, 22, 32):
        single = rows[i][None]
        cache = static_cache(llama, 32)
        alone = torch.cat((step(llama, single, cache)[:, -1:], steps(llama, tokens[i : i + 1, :-1], cache)), 1)
        error = rms(alone - forced(eager, single, tokens[i : i + 1]))
        # A row's own weights, scales and cache; only FP8's power-of-two scale is that of the whole batch.
        assert rms(found[i] - alone[0]) <= 0.1 * error


# ---- B21, B22: beams, several results, assistants --------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_b21_beams(llama, kind):
    """B21, huggingface/transformers#46612: beams mix each other's history."""
    ids, mask = left_pad([prompt(1, n, seed=n)[0] for n in (9, 14)])
    more = {"num_beams": 4, "num_return_sequences": 2, "attention_mask": mask, "max_new_tokens": 8, "do_sample": False}
    want = llama.generate(ids, **more)
    compiled(llama, mode="exact")
    got = llama.generate(ids, **more, **({"cache_implementation": "static"} if kind == "static" else {}))
    assert torch.equal(got, want)
    assert counters(llama)["decode_calls"] == 7


def test_b21_several_samples(llama):
    """B21, huggingface/transformers#46612: the prompt's cache is repeated for ``num_return_sequences``."""
    ids = prompt(2, 9)
    more = {"num_return_sequences": 3, "do_sample": True, "top_k": 8, "max_new_tokens": 8}
    torch.manual_seed(5)
    want = llama.generate(ids, **more)
    compiled(llama, mode="exact")
    torch.manual_seed(5)
    got = llama.generate(ids, **more, cache_implementation="static")
    assert torch.equal(got, want)
    assert len({tuple(row) for row in got.tolist()}) == 6


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("assistant", ["other", "same", "lookup"])
def test_b22_assisted_decoding(llama, kind, assistant):
    """B22, huggingface/transformers#32946: a static cache cannot forget the draft's rejected tokens."""
    eager = copy.deepcopy(llama)
    ids = prompt(1, 6).repeat(1, 2)  # something to look up
    want, _ = generate(llama, ids, 12)
    compiled(llama, mode="exact")
    more = {"prompt_lookup_num_tokens": 3} if assistant == "lookup" else {}
    if assistant != "lookup":
        more["assistant_model"] = model("llama", seed=0 if assistant == "same" else 1)
    if kind == "static":
        more["cache_implementation"] = "static"
    try:
        assert torch.equal(generate(eager, ids, 12, **more)[0], want)
    except ValueError as refusal:  # transformers 5.17 refuses a static cache here: the user must see just that
        with pytest.raises(ValueError, match=re.escape(str(refusal))):
            generate(llama, ids, 12, **more)
        return
    assert torch.equal(generate(llama, ids, 12, **more)[0], want)
    assert counters(llama)["calls"] > 0
