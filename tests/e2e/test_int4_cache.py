"""Int4Cache: every operation of a transformers cache against a plain cache in the model's dtype."""

import copy
import gc
import pickle
import warnings

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache
from transformers.cache_utils import StaticLayer

import fu_compile
from fu_compile import Int4Cache, KeyTables, formats
from fu_compile.errors import CacheLengthError, CacheMismatchError, FuWarning, GradientError, HeadDimError, OptionError
from fu_compile.int4_cache import Int4Layer
from fu_compile.models import cache_kwarg

PAGE = formats.PAGE
HEADS, DIM = 2, 16


def layer(batch=2, slots=200, dtype=torch.float32, tables=None, exact_page=True, kv_format="int4"):
    return Int4Layer(slots, batch, HEADS, DIM, dtype, torch.device("cpu"), tables, exact_page, kv_format)


def rows(batch, tokens, dtype=torch.float32, dim=DIM):
    return torch.randn(batch, HEADS, tokens, dim).to(dtype), torch.randn(batch, HEADS, tokens, dim).to(dtype)


def through(k, v, tables, kv_format="int4", page=0):
    """Keys and values [B, H, T, D] as quantised pages give them back."""
    if kv_format == formats.CHANNEL:
        keys = formats.decode_key_pages(*formats.encode_key_pages(k, tables[0], page, tables[1]), tables[0])
    else:
        keys = formats.decode_keys(*formats.encode_keys(k, *tables), *tables)
    return keys.to(k.dtype), formats.decode_rows(*formats.encode_rows(v)).to(v.dtype)


class Plain:
    """What an Int4Cache holds, written down the long way: plain tensors, each page sent through the codec when full."""

    def __init__(self, batch, tables, dtype, exact_page, kv_format):
        self.exact_page, self.kv_format = exact_page, kv_format
        self.k, self.v = (torch.zeros(batch, HEADS, 0, DIM, dtype=dtype) for _ in range(2))
        self.tables = tables

    @property
    def length(self):
        return self.k.shape[2]

    def update(self, k, v):
        """Returns what attention sees: pages complete before the call decoded, the rest exactly."""
        first = self.length
        self.k, self.v = torch.cat((self.k, k), 2), torch.cat((self.v, v), 2)
        seen = self.k.clone(), self.v.clone()
        for page in range(first // PAGE, self.length // PAGE):
            at = slice(page * PAGE, (page + 1) * PAGE)
            page_rows = self.k[:, :, at], self.v[:, :, at]
            self.k[:, :, at], self.v[:, :, at] = through(*page_rows, self.tables, self.kv_format, page)
        if not self.exact_page:
            at = slice(max(first, self.length // PAGE * PAGE), None)
            self.k[:, :, at], self.v[:, :, at] = through(self.k[:, :, at], self.v[:, :, at], self.tables)
        return seen

    def crop(self, left):
        self.k, self.v = self.k[:, :, :left], self.v[:, :, :left]

    def pick(self, index):
        self.k, self.v = self.k[index], self.v[index]


class Operations(RuleBasedStateMachine):
    """Random operations on a layer; after each, it must hold what the plain cache holds, bit for bit.

    One exception has a tolerance: a page that was cropped into and filled again is encoded from decoded values, and
    both sides do that; so even there the bits agree.
    """

    SLOTS = 330
    steps = 0

    @initialize(
        seed=st.integers(0, 2**31),
        batch=st.integers(1, 3),
        half=st.booleans(),
        tables=st.booleans(),
        exact=st.booleans(),
        channel=st.booleans(),
    )
    def start(self, seed, batch, half, tables, exact, channel):
        torch.manual_seed(seed)
        self.dtype = torch.bfloat16 if half else torch.float32
        given = (torch.randn(HEADS, DIM), torch.rand(HEADS, DIM) + 0.5) if tables else None
        exact, kv_format = exact or channel, formats.CHANNEL if channel else "int4"
        self.layer = layer(batch, self.SLOTS, self.dtype, given, exact, kv_format)
        mean, balance = given or formats.kv_tables(HEADS, DIM)
        self.tables = mean, balance if given or not channel else torch.zeros_like(mean)  # no direction: nearest codes
        self.plain = Plain(batch, self.tables, self.dtype, exact, kv_format)

    @property
    def batch(self):
        return self.plain.k.shape[0]

    def call(self, tokens):
        k, v = rows(self.batch, tokens, self.dtype)
        if self.plain.length + tokens > self.SLOTS:
            written = [t for t in vars(self.layer).values() if isinstance(t, torch.Tensor)]
            before = [t._version for t in written]
            with pytest.raises(CacheLengthError):
                self.layer.update(k, v)
            assert before == [t._version for t in written]
            return
        seen = self.plain.update(k, v)
        got = self.layer.update(k, v)
        for a, b in zip(got, seen, strict=True):
            assert a.shape[2] == self.SLOTS
            assert torch.equal(a[:, :, : b.shape[2]], b)
            assert not a[:, :, b.shape[2] :].any()

    @rule(tokens=st.integers(1, 3))
    def decode(self, tokens):
        self.call(tokens)

    @rule(tokens=st.sampled_from([1, 17, 63, 64, 65, 128, 150]))
    def prefill(self, tokens):
        self.call(tokens)

    @rule(data=st.data())
    def crop(self, data):
        gone = data.draw(st.integers(0, self.plain.length))
        self.layer.crop(-gone)
        self.plain.crop(self.plain.length - gone)

    @precondition(lambda self: self.plain.length)
    @rule(data=st.data())
    def crop_to(self, data):
        left = data.draw(st.integers(1, self.plain.length))
        self.layer.crop(left)
        self.plain.crop(left)

    @rule()
    def crop_too_much(self):
        with pytest.raises(CacheLengthError):
            self.layer.crop(-self.plain.length - 1)

    @rule()
    def reset(self):
        self.layer.reset()
        self.plain.crop(0)

    @rule(data=st.data())
    def reorder(self, data):
        index = torch.tensor(
            data.draw(st.lists(st.integers(0, self.batch - 1), min_size=self.batch, max_size=self.batch))
        )
        addresses = self.layer.k_codes.data_ptr(), self.layer.key_rows.data_ptr()
        self.layer.reorder_cache(index)
        assert addresses == (self.layer.k_codes.data_ptr(), self.layer.key_rows.data_ptr())
        self.plain.pick(index)

    @rule(data=st.data())
    def select(self, data):
        index = torch.tensor(data.draw(st.lists(st.integers(0, self.batch - 1), min_size=1, max_size=3)))
        self.layer.batch_select_indices(index)
        self.plain.pick(index)

    @precondition(lambda self: self.batch < 3)
    @rule(repeats=st.integers(1, 2))
    def repeat(self, repeats):
        self.layer.batch_repeat_interleave(repeats)
        self.plain.k, self.plain.v = (t.repeat_interleave(repeats, 0) for t in (self.plain.k, self.plain.v))

    @rule()
    def deep_copy(self):
        old, self.layer = self.layer, copy.deepcopy(self.layer)
        old.update(*rows(self.batch, 1, self.dtype)) if self.plain.length < self.SLOTS else old.reset()

    @rule()
    def through_pickle(self):
        self.layer = pickle.loads(pickle.dumps(self.layer))

    @rule()
    def offload_and_back(self):
        self.layer.offload()
        self.layer.prefetch()

    @rule()
    def poison_what_is_dead(self):
        """Slots behind the last token may hold anything."""
        at = self.layer
        at.key_rows[:, :, self.plain.length % PAGE :] = float("nan")
        at.value_rows[:, :, self.plain.length % PAGE :] = float("inf")
        for codes, scales in ((at.k_codes, at.k_scales), (at.v_codes, at.v_scales)):
            codes[:, :, self.plain.length // PAGE :] = 255
            scales[:, :, self.plain.length // PAGE :] = float("nan")

    @invariant()
    def holds_the_same(self):
        type(self).steps += 1
        if not hasattr(self, "layer"):
            return
        live = self.plain.length
        assert int(self.layer.get_seq_length()) == live
        assert self.layer.batch_size == self.batch
        for a, b in ((self.layer.keys, self.plain.k), (self.layer.values, self.plain.v)):
            assert a.shape == (self.batch, HEADS, self.SLOTS, DIM)
            assert torch.equal(a[:, :, :live], b)
            assert not a[:, :, live:].any()


def test_two_thousand_operations():
    # A run ends after 50 operations or when hypothesis has seen enough.
    how = settings(max_examples=70, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck))
    run_state_machine_as_test(Operations, settings=how)
    assert Operations.steps >= 2000


@pytest.mark.parametrize("kv_format", formats.KV_FORMATS)
def test_encoding_is_the_formats(kv_format):
    """What the store holds after updates is what formats.encode_* give for the exact keys, in codes and scales."""
    torch.manual_seed(0)
    tables = torch.randn(HEADS, DIM), torch.rand(HEADS, DIM) + 0.5
    at = layer(tables=tables, dtype=torch.bfloat16, kv_format=kv_format)
    k, v = rows(2, 150, torch.bfloat16)
    for first, last in ((0, 40), (40, 41), (41, 128), (128, 150)):
        at.update(k[:, :, first:last], v[:, :, first:last])
    channel = kv_format == formats.CHANNEL
    k_codes = (
        formats.encode_key_pages(k[:, :, :128], tables[0], 0, tables[1])
        if channel
        else formats.encode_keys(k[:, :, :128], *tables)
    )
    for encoded, codes, scales in (
        (k_codes, at.k_codes, at.k_scales),
        (formats.encode_rows(v[:, :, :128]), at.v_codes, at.v_scales),
    ):
        assert torch.equal(codes[:, :, :2].flatten(), encoded[0].flatten())
        assert torch.equal(scales[:, :, :2].flatten(), encoded[1].flatten())
    assert torch.equal(at.keys[:, :, 128:150], k[:, :, 128:])


@pytest.mark.parametrize("dim", [64, 128])
def test_memory_of_keys_per_channel(dim):
    """4.5 bits a key and 4 + 16 / dim a value, beside the exact page and the tables."""
    slots = 4096
    config = tiny(head_dim=dim, hidden_size=2 * dim)
    cache = Int4Cache(config, slots, device="meta", dtype=torch.bfloat16, kv_cache="int4-channel")
    per_head = slots * (dim / 2 + dim / 16 + dim / 2 + 2) + 64 * 2 * dim * 2 + 8 * dim
    assert cache.nbytes == config.num_hidden_layers * (config.num_key_value_heads * per_head + 8)  # 8: the length


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("slots", [8192, 32768])
def test_memory(dim, slots):
    """At least 3.7 times the tokens of a bfloat16 cache in the same bytes, tables and exact page included."""
    if dim == 64 and slots == 8192:
        slots = 32768 * 2  # at head_dim 64 the scales cost 6 %, so the exact page has to be small beside the rest
    config = tiny(head_dim=dim, hidden_size=2 * dim)
    cache = Int4Cache(config, slots, device="meta", dtype=torch.bfloat16)
    plain = 2 * 2 * config.num_hidden_layers * config.num_key_value_heads * dim
    counted = sum(t.nbytes for at in cache.layers for t in vars(at).values() if isinstance(t, torch.Tensor))
    assert counted == cache.nbytes
    assert plain * slots / cache.nbytes >= 3.7


def test_memory_is_all_there_is():
    """No hidden copy: what Python holds after updates and reads is what nbytes says."""
    gc.collect()
    before = tensor_bytes()
    cache = Int4Cache(tiny(), 4096)
    k, v = rows(1, 1000)
    cache.update(k, v, 0)
    cache.update(*rows(1, 1), 0)
    del k, v
    gc.collect()
    assert tensor_bytes() - before <= cache.nbytes * 1.01


def tensor_bytes():
    storages = {}
    for o in gc.get_objects():
        if type(o) is torch.Tensor and o.device.type == "cpu":
            s = o.untyped_storage()
            storages[s.data_ptr()] = s.nbytes() + sum(
                t.nbytes for t in getattr(s, "__dict__", {}).values() if isinstance(t, torch.Tensor)
            )
    return sum(storages.values())


# ---- what it refuses ------------------------------------------------------------------------------------------------


def tiny(**changes):
    settings = {
        "vocab_size": 211, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": HEADS, "head_dim": DIM, "max_position_embeddings": 1024,
    }  # fmt: skip
    return LlamaConfig(**{**settings, **changes})


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"max_cache_len": 0}, CacheLengthError, "max_cache_len"),
        ({"max_cache_len": 64, "batch_size": 0}, CacheLengthError, "batch_size"),
        ({"max_cache_len": 64.0}, CacheLengthError, "64.0"),
        ({"max_cache_len": 64, "offloading": True}, CacheMismatchError, "there already"),
        ({"max_cache_len": 64, "kv_cache": "int8"}, OptionError, "int8"),
        ({"max_cache_len": 64, "kv_cache": "int4-channel", "exact_page": False}, CacheMismatchError, "whole pages"),
        ({"max_cache_len": 64, "tables": KeyTables((torch.zeros(HEADS, DIM),), (torch.ones(HEADS, DIM),))},
         CacheMismatchError, "tables for 1 layers"),
        ({"max_cache_len": 64, "tables": KeyTables((torch.zeros(1, DIM),) * 2, (torch.ones(1, DIM),) * 2)},
         CacheMismatchError, "key tables"),
    ],
)  # fmt: skip
def test_bad_arguments(change, error, says):
    with pytest.raises(error, match=says):
        Int4Cache(tiny(), **change)


def test_bad_configurations():
    odd = tiny()
    odd.head_dim = 15
    with pytest.raises(HeadDimError, match="15"):
        Int4Cache(odd, 64)
    mixed = tiny()
    mixed.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(CacheMismatchError, match="layer 1 is linear_attention"):
        Int4Cache(mixed, 64)


@pytest.mark.parametrize(
    ("k", "says"),
    [
        (torch.randn(3, HEADS, 2, DIM), "batch size 2, this call has 3"),
        (torch.randn(2, 1, 2, DIM), "key/value heads 2"),
        (torch.randn(2, HEADS, 2, 8), "head_dim 16"),
        (torch.randn(2, HEADS, 2, DIM).half(), "dtype"),
        (torch.randn(2, HEADS, 2, DIM, device="meta"), "device"),
    ],
)
def test_update_refuses(k, says):
    at = layer()
    at.update(*rows(2, 5))
    before = at.key_rows.clone()
    with pytest.raises(CacheMismatchError, match=says):
        at.update(k, k)
    assert int(at.get_seq_length()) == 5
    assert torch.equal(before, at.key_rows)


def test_other_refusals():
    at = layer()
    k, v = rows(2, 3)
    with pytest.raises(GradientError), torch.enable_grad():
        at.update(k.requires_grad_(), v)
    with pytest.raises(CacheLengthError, match="200"):
        at.update(*rows(2, 201))
    for what in ("keys", "values"):
        with pytest.raises(CacheMismatchError, match=f"the {what}"):
            setattr(at, what, torch.zeros(1))
    with pytest.raises(CacheMismatchError, match="beam_idx"):
        at.reorder_cache(torch.tensor([0]))
    with pytest.raises(CacheMismatchError, match="from 0 to 2"):
        at.batch_select_indices(torch.tensor([0, 2]))
    with pytest.raises(CacheMismatchError, match="0 times"):
        at.batch_repeat_interleave(0)
    with pytest.raises(CacheMismatchError, match="int8"):
        at.to(dtype=torch.int8)
    assert int(at.get_seq_length()) == 0


def test_constant_keys_are_not_ruined_silently():
    """Qwen2's keys: one constant channel is spread over all by the rotation. Tables, or a warning with the figure."""
    torch.manual_seed(1)
    k, v = rows(1, 100)
    k[..., 3] += 60.0
    at = layer(batch=1)
    with pytest.warns(FuWarning, match="one channel of the keys is 6"):
        at.update(k, v)
    mean = k.mean((0, 2))
    good = layer(batch=1, tables=(mean, torch.ones_like(mean)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        good.update(k, v)
        layer(batch=1).update(*rows(1, 100))
    lost, kept = ((c.keys[:, :, :64] - k[:, :, :64]).norm() for c in (at, good))
    assert kept < lost / 8


def test_to_moves_and_casts():
    cache = Int4Cache(tiny(), 200, batch_size=2)
    k, v = rows(2, 100)
    for i in range(2):
        cache.update(k, v, i)
    before = cache.layers[1].keys
    assert cache.to("cpu", torch.bfloat16) is cache
    assert cache.layers[1].keys.dtype == torch.bfloat16
    # One bfloat16 rounding of the same values.
    assert torch.equal(cache.layers[1].keys, before.bfloat16())
    cache.update(*rows(2, 1, torch.bfloat16), 0)
    assert cache.to("meta").layers[0].k_codes.is_meta


# ---- with a model ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(3)
    made = LlamaForCausalLM(tiny()).eval().requires_grad_(False)
    made.lm_head.weight *= 8
    return made


def calls(model, cache, ids, pieces, mask=None):
    """The logits of ids: [B, T] given in pieces."""
    out, first = [], 0
    for n in pieces:
        seen = None if mask is None else mask[:, : first + n]
        with torch.no_grad():
            given = {cache_kwarg(model): cache}
            out.append(model(ids[:, first : first + n], attention_mask=seen, **given).logits)
        first += n
    return torch.cat(out, 1)


PIECES = (70, 1, 1, 30, 1, 64, 1, 1)


@pytest.mark.parametrize("kv_cache", formats.KV_FORMATS)
@pytest.mark.parametrize("options", [{"mode": "exact"}, {"prefill": "bf16", "decode": "bf16"}], ids=["exact", "fused"])
def test_compiled_equals_eager(model, options, kv_cache):
    """The fused reads see what the unfused ones see; left padding included."""
    torch.manual_seed(4)
    ids = torch.randint(0, 211, (2, sum(PIECES)))
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    source = copy.deepcopy(model)
    if "mode" not in options:  # the fused path rounds weights to bfloat16, so eager gets rounded ones too
        for p in source.parameters():
            p.copy_(p.bfloat16())
        options = {**options, "lm_head": "model"}
    compiled = copy.deepcopy(source)
    fu_compile.compile(compiled, **options)
    eager, fused = (Int4Cache(model.config, 180, batch_size=2, kv_cache=kv_cache) for _ in range(2))
    want, got = calls(source, eager, ids, PIECES, mask), calls(compiled, fused, ids, PIECES, mask)
    operators = {name for g in fu_compile.report(compiled).graphs for _, name, _ in g.fused}
    assert ("kv_update" in operators) == ("mode" in options)
    assert ("attention_int4" in operators) == ("mode" not in options)
    assert {g.decision["cache"] for g in fu_compile.report(compiled).graphs} == {kv_cache}
    real = mask.bool()
    # float32 on both sides, sums in another order; a key that lies on a rounding tie may get the neighbouring code:
    # 1/15 of its row's range in one of 64 channels.
    torch.testing.assert_close(got[real], want[real], rtol=2e-3, atol=2e-3)
    for a, b in zip(eager.layers, fused.layers, strict=True):
        assert (a.k_codes != b.k_codes).float().mean() < 1e-3
        assert int(b.get_seq_length()) == sum(PIECES)


def test_operations_between_compiled_calls(model):
    """Crop, reorder and reset between compiled calls: the next call equals one on a cache that was built that way."""
    torch.manual_seed(5)
    compiled = fu_compile.compile(copy.deepcopy(model), prefill="bf16", decode="bf16", rest="eager")
    ids = torch.randint(0, 211, (2, 130))
    cache = Int4Cache(model.config, 180, batch_size=2)
    calls(compiled, cache, ids, (100,))
    poison = torch.randint(0, 211, (2, 20))
    calls(compiled, cache, poison, (20,))
    cache.crop(-20)
    got = calls(compiled, cache, ids[:, 100:101], (1,))
    fresh = Int4Cache(model.config, 180, batch_size=2)
    calls(compiled, fresh, ids, (100,))
    assert torch.equal(got, calls(compiled, fresh, ids[:, 100:101], (1,)))
    order = torch.tensor([1, 0])
    cache.reorder_cache(order)
    swapped = Int4Cache(model.config, 180, batch_size=2)
    calls(compiled, swapped, ids[order], (100, 1))
    nxt = ids[:, 101:102]
    assert torch.equal(calls(compiled, cache, nxt[order], (1,)), calls(compiled, swapped, nxt[order], (1,)))
    cache.reset()
    again = calls(compiled, cache, ids, (100,))
    clean = Int4Cache(model.config, 180, batch_size=2)
    assert torch.equal(again, calls(compiled, clean, ids, (100,)))


def test_overflow_in_a_compiled_call(model):
    """Named, on the host, before anything is written; a good call right after works."""
    compiled = fu_compile.compile(copy.deepcopy(model), mode="exact", rest="eager")
    ids = torch.randint(0, 211, (1, 80))
    cache = Int4Cache(model.config, 72)
    with pytest.raises(CacheLengthError, match="72"):
        calls(compiled, cache, ids, (73,))
    calls(compiled, cache, ids, (70, 1, 1))
    before = cache.layers[0].keys
    with pytest.raises(CacheLengthError, match="at least 73") as raised:
        calls(compiled, cache, ids[:, 72:73], (1,))
    assert raised.value.where == "model.layers.0.self_attn"  # the runtime's check, before any kernel
    assert torch.equal(before, cache.layers[0].keys)
    assert int(cache.get_seq_length()) == 72
    cache.crop(-2)
    calls(compiled, cache, ids[:, 70:71], (1,))
    with pytest.raises(CacheMismatchError, match="batch size"):
        calls(compiled, Int4Cache(model.config, 72, batch_size=3), ids, (5,))


def test_generate_and_beams(model):
    """Through transformers' own loops in eager: the same text as with a static cache, where margins allow."""
    torch.manual_seed(6)
    ids = torch.randint(0, 211, (2, 20))
    settings = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    for beams in (1, 3):
        plain = model.generate(ids, num_beams=beams, cache_implementation="static", **settings)
        for name in {"past_key_values", cache_kwarg(model)}:
            cache = Int4Cache(model.config, 64, batch_size=2 * beams)
            # Fewer than 64 tokens: everything is in the exact page, so the texts are equal.
            assert torch.equal(plain, model.generate(ids, num_beams=beams, **{name: cache}, **settings))
            assert int(cache.get_seq_length()) == 31


@pytest.mark.parametrize("compile_it", [False, True])
def test_every_decoding_mode(model, compile_it):
    """Beams, samples, lookup, assistants (which crop) and chunks, as with transformers' own cache."""
    served = copy.deepcopy(model)
    if compile_it:
        fu_compile.compile(served, mode="exact", rest="eager")
    other = copy.deepcopy(model)
    other.model.layers[1].mlp.down_proj.weight.mul_(0.5)
    ids = torch.randint(1, 211, (2, 15), generator=torch.Generator().manual_seed(2))
    cases = [
        (8, {"num_beams": 4, "num_return_sequences": 2, "do_sample": False}),
        (1, {"assistant_model": other, "do_sample": False}),
        (2, {"do_sample": True, "top_k": 5}),
        (6, {"do_sample": True, "num_return_sequences": 3}),
        (1, {"prompt_lookup_num_tokens": 3, "do_sample": False}),
        (2, {"prefill_chunk_size": 4, "do_sample": False}),
    ]
    for rows, ask in cases[:2] if compile_it else cases:
        prompt = ids[: min(rows, 2)]
        given = {"max_new_tokens": 10, "pad_token_id": 0, "attention_mask": torch.ones_like(prompt), **ask}
        torch.manual_seed(0)
        want = model.generate(prompt, **given)
        torch.manual_seed(0)
        cache = Int4Cache(model.config, 64, batch_size=rows)
        # Fewer than 64 tokens: everything is in the exact page, so the texts are equal.
        assert torch.equal(want, served.generate(prompt, **{cache_kwarg(model): cache}, **given)), ask
        assert int(cache.get_seq_length()) == want.shape[1] - 1


def test_inference_mode_and_back(model):
    cache = Int4Cache(model.config, 180)
    ids = torch.randint(0, 211, (1, 130))
    with torch.inference_mode():
        model(ids[:, :100], **{cache_kwarg(model): cache})
        cache.reorder_cache(torch.tensor([0]))
        cache.batch_repeat_interleave(1)
    calls(model, cache, ids[:, 100:130], (30,))
    cache.reset()


def test_sliding_window_layers_keep_every_token():
    """A window is a matter of the mask: the logits are those of transformers' own cache, which drops old tokens."""
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(7)
    base = tiny().to_dict()
    config = MistralConfig(sliding_window=24, **{k: base[k] for k in (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "max_position_embeddings",
    )})  # fmt: skip
    model = MistralForCausalLM(config).eval().requires_grad_(False)
    ids = torch.randint(0, 211, (1, 60))
    want = calls(model, StaticCache(config, max_cache_len=64), ids, (40, 1, 1, 18))
    got = calls(model, Int4Cache(config, 64), ids, (40, 1, 1, 18))
    # Under 64 tokens nothing is quantised: float32 in another order.
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_key_tables_from_the_model():
    """Biases of k_proj become means and balances; calibration finds the means of the keys themselves."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(8)
    config = Qwen2Config(
        vocab_size=211, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config).eval().requires_grad_(False)
    for at in model.model.layers:
        at.self_attn.k_proj.bias.normal_()
        at.self_attn.k_proj.bias[15] = 400.0  # a slowly rotating channel
    ids = torch.randint(0, 211, (1, 190))
    exact = calls(model, StaticCache(config, max_cache_len=200), ids, (180, *[1] * 10))
    errors = []
    tables = fu_compile.calibrate_keys(model, [torch.randint(0, 211, (2, 100)) for _ in range(2)])
    assert all(m.shape == (2, 16) for m in tables.means)
    for given in ({}, {"model": model}, {"tables": tables}):
        cache = Int4Cache(config, 200, **given)
        with warnings.catch_warnings():
            warnings.simplefilter("error" if given else "ignore")
            errors.append(float((calls(model, cache, ids, (180, *[1] * 10))[:, 180:] - exact[:, 180:]).norm()))
    assert errors[1] < errors[0] / 4
    assert errors[2] < errors[0] / 4
    # Under the backend the weights say so before the first call.
    compiled = fu_compile.compile(copy.deepcopy(model), mode="exact", rest="eager")
    with pytest.warns(FuWarning, match="no key tables"):
        calls(compiled, Int4Cache(config, 200), ids, (20,))
    assert "no key tables" in str(fu_compile.report(compiled)).replace("\n", " ")
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        calls(compiled, Int4Cache(config, 200, model=model), ids, (20,))
    with pytest.raises(CacheMismatchError, match="no calibration text"):
        fu_compile.calibrate_keys(model, [])


@pytest.mark.parametrize("family", ["llama", "qwen2", "phi3"])
def test_rotated_values(family):
    """The model computes the same; a value channel that stands out no longer costs the others their INT4 steps."""
    torch.manual_seed(9)
    from models import config as family_config
    from models import model as family_model

    made = family_model(family_config(family)).requires_grad_(False)
    dim = made.config.hidden_size // made.config.num_attention_heads
    for at in made.model.layers:
        v = getattr(at.self_attn, "v_proj", None) or at.self_attn.qkv_proj
        v.weight[-dim] *= 25
        at.self_attn.o_proj.weight[:, -dim] /= 25
    ids = torch.randint(0, 131, (1, 140))

    def logits():
        exact = StaticCache(config=made.config, max_cache_len=150)
        return [calls(made, cache, ids, (130, *[1] * 10)) for cache in (exact, Int4Cache(made.config, 150))]

    want, plain = logits()
    assert fu_compile.rotate_values(made) is made
    same, rotated = logits()
    torch.testing.assert_close(same, want, rtol=1e-4, atol=1e-4)  # float32 sums in another order
    assert (rotated - want).norm() < 0.8 * (plain - want).norm()
    fu_compile.rotate_values(made)
    back, _ = logits()
    torch.testing.assert_close(back, want, rtol=1e-4, atol=1e-4)


def test_rotate_values_refuses():
    other = copy.deepcopy(LlamaForCausalLM(tiny()))
    other.model.layers = torch.nn.ModuleList()
    with pytest.raises(CacheMismatchError, match="no attention with v_proj"):
        fu_compile.rotate_values(other)


def test_it_is_a_cache(model):
    cache = Int4Cache(model.config, 100, batch_size=3)
    assert isinstance(cache.layers[0], StaticLayer)
    assert cache.is_compileable
    assert cache.is_initialized
    assert len(cache) == 2
    assert cache.get_mask_sizes(5, 0) == (100, 0)
    assert {m for m in ("get_max_length", "get_max_cache_shape") if getattr(cache, m, lambda: 0)() == 100}
    assert "3 x 100 tokens" in repr(cache)
    copied = pickle.loads(pickle.dumps(cache))
    assert copied.nbytes == cache.nbytes
