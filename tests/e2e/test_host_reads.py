"""Where a call stands in its cache: read at most once a call, told to all layers, never wrong; and what a capture does.

A CPU has no CUDA graphs. The tests of captures say that one is running and execute what it would record; replays at
another position are calls of the operators at that position.
"""

import contextlib
import copy
import gc
from collections import Counter

import pytest
import torch
from field import build, compiled, crop, dynamo_warnings, generate, left_pad, prompt, static_cache, step
from fu_compile.lowerings import cublas_prefill, pages, reference_attention, reference_block

import fu_compile
from fu_compile import Int4Cache, caches, formats, int4_cache
from fu_compile.caches import COPIES, LENGTHS
from fu_compile.errors import CacheLengthError, CaptureError
from fu_compile.report import record_of

LAYERS, BATCH, SLOTS, PAGE = 3, 2, 200, formats.PAGE
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
SAME = 2e-5
"""Largest difference of logits of size 20 between two orders of the same float32 sums (measured: 6e-6)."""


@pytest.fixture(scope="module")
def model():
    torch._dynamo.reset()
    yield compiled(build(num_hidden_layers=LAYERS, **SIZES), prefill="bf16", decode="bf16")
    torch._dynamo.reset()


def made(model, kind, batch=BATCH):
    """A new cache of a kind; ``lazy``: a StaticCache whose tensors the first call makes."""
    if kind == "int4":
        return Int4Cache(model.config, SLOTS, batch)
    return static_cache(model, SLOTS, None if kind == "lazy" else batch)


KINDS = ("static", "lazy", "int4")


@contextlib.contextmanager
def counted():
    """The numbers that the host takes from int64 tensors inside: (method, shape), in order."""
    found, real = [], {}

    def watch(name):
        method = getattr(torch.Tensor, name)

        def watched(self, *args, **kwargs):
            # While Dynamo makes a graph it looks at tensors too.
            if self.dtype == torch.int64 and torch._guards.TracingContext.try_get() is None:
                found.append((name, tuple(self.shape)))
            return method(self, *args, **kwargs)

        real[name] = torch.Tensor.__dict__.get(name)
        setattr(torch.Tensor, name, watched)

    for name in ("item", "tolist", "__int__", "__index__", "__bool__"):
        watch(name)
    try:
        yield found
    finally:
        for name, method in real.items():
            if method is None:
                delattr(torch.Tensor, name)
            else:
                setattr(torch.Tensor, name, method)


@pytest.fixture
def truth(monkeypatch):
    """Every operator that asks where it stands is told the truth; counts who asked for what."""
    asked = Counter()

    def first_position(position):
        told = pages.first_position(position)
        assert told == int(position[0]), "an operator was told another position than it has"
        asked["told" if pages._call.get().first is not None else "read"] += 1
        return told

    monkeypatch.setattr(reference_attention, "first_position", first_position)
    return asked


# ---- how many reads --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_one_read_at_most(model, kind):
    """None where the host knows: after it was made or reset, after each call. One after somebody wrote to a counter."""
    cache, reads = made(model, kind), []
    for tokens in (70, 9, 1, 1, 9):
        with counted() as found:
            step(model, prompt(BATCH, tokens), cache)
        reads.append(len(found))
    # Where the call makes the tensors, the counter lies on the CPU until then: that is no read of a device.
    assert reads == [1 if kind == "lazy" else 0, 0, 0, 0, 0]

    cache.reset()
    with counted() as found:
        step(model, prompt(BATCH, 70), cache)
    assert found == []
    for tokens, length in ((9, 70), (1, 70), (70, 0)):
        for layer in cache.layers:
            layer.cumulative_length.fill_(length)
        with counted() as found:
            step(model, prompt(BATCH, tokens), cache)
        assert found == [("tolist", (LAYERS,))]
        with counted() as found:
            step(model, prompt(BATCH, tokens), cache)
        assert found == []


def test_a_graph_believes_what_another_left(model):
    """Prefill and decode are two graphs: what one knows the other need not read. Old code read once in each."""
    warm = made(model, "static")
    for tokens in (70, 1, 1):
        step(model, prompt(BATCH, tokens), warm)
    cache = made(model, "static")
    step(model, prompt(BATCH, 70), cache)
    with counted() as found:
        step(model, prompt(BATCH, 1), cache)
    assert found == []


def test_eager_updates_of_an_int4_cache_read_nothing(model):
    plain = build(num_hidden_layers=LAYERS, **SIZES)
    cache = made(model, "int4")
    with counted() as found:
        for tokens in (70, 1, 9):
            step(plain, prompt(BATCH, tokens), cache)
        cache.crop(-3)
        step(plain, prompt(BATCH, 1), cache)
    assert found == []
    assert int(cache.get_seq_length()) == 78


def test_inference_tensors_are_read(model):
    """They keep no version: what is in them can only be read, once a call."""
    with torch.inference_mode():
        cache = made(model, "static")
        for tokens in (70, 9, 1, 70, 9, 1):
            with counted() as found:
                step(model, prompt(BATCH, tokens), cache)
            if int(cache.get_seq_length()) > 80:
                assert found == [("tolist", (LAYERS,))]
            if int(cache.get_seq_length()) == 80:
                cache.reset()


# ---- the path of the attention ---------------------------------------------------------------------------------------


@pytest.fixture
def attended(monkeypatch):
    """(queries, keys, has a mask, is causal) of every product of attention."""
    calls, real = [], reference_block.sdpa

    def watched(q, k, v, mask, scale, causal=False):
        calls.append((q.shape[2], k.shape[2], mask is not None, causal))
        return real(q, k, v, mask, scale, causal)

    for module in (reference_block, reference_attention):
        monkeypatch.setattr(module, "sdpa", watched)
    return calls


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_cache_takes_the_path_without_one(model, attended, monkeypatch, kind):
    ids = prompt(BATCH, 70)
    with torch.no_grad():
        plain = model(ids, use_cache=False).logits
    without = attended.copy()
    assert without == [(70, 70, False, True)] * LAYERS
    step(model, ids, made(model, kind))
    cache = made(model, kind)
    gathered = []
    monkeypatch.setattr(
        reference_attention, "seen", lambda *args, **how: gathered.append(1) or pages.seen(*args, **how)
    )
    for _ in range(2):
        attended.clear()
        logits = step(model, ids, cache)
        assert attended == without
        assert gathered == []
        # The same products, with keys and values from the projection or from the cache's rows.
        torch.testing.assert_close(logits, plain, rtol=0, atol=SAME)
        attended.clear()
        step(model, ids[:, :9], cache)
        assert attended == [(9, 79, True, False)] * LAYERS
        assert len(gathered) == LAYERS
        gathered.clear()
        cache.reset()


def test_padding_keeps_its_mask(model, attended):
    """On an empty cache a padded batch sees its own rows under its mask, as without a cache."""
    ids, mask = left_pad([prompt(1, 70, seed=1)[0], prompt(1, 41, seed=2)[0]])
    with torch.no_grad():
        plain = model(ids, attention_mask=mask, use_cache=False).logits
    without = attended.copy()
    assert without == [(70, 70, True, False)] * LAYERS
    attended.clear()
    logits = step(model, ids, made(model, "int4"), attention_mask=mask)
    assert attended == without
    torch.testing.assert_close(logits[mask.bool()], plain[mask.bool()], rtol=0, atol=SAME)


# ---- always the truth ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_truth_through_every_operation(model, truth, kind):
    """Chunks, resets, crops, beams, copies, writes by hand: what is told is true, and the logits are a read cache's."""
    plain, cache = build(num_hidden_layers=LAYERS, **SIZES), made(model, kind)

    def call(tokens, seed):
        twin = copy.deepcopy(cache)  # its counters are unknown
        if all(layer.is_initialized for layer in twin.layers):
            assert all(LENGTHS.known(layer.cumulative_length) is None for layer in twin.layers)
        logits = step(model, prompt(BATCH, tokens, seed=seed), cache)
        assert torch.equal(logits, step(model, prompt(BATCH, tokens, seed=seed), twin))

    call(70, 0)
    call(9, 1)
    call(1, 2)
    cache.reorder_cache(torch.tensor([1, 0]))
    call(64, 3)
    if kind == "int4":
        cache.crop(torch.tensor(-20))  # so does assisted decoding
        cache.crop(100)
    else:
        crop(cache, 44)
    assert int(cache.get_seq_length()) == 100
    call(1, 4)
    call(30, 5)
    cache.reset()
    call(5, 6)
    step(plain, prompt(BATCH, 3), cache)  # the uncompiled model writes
    call(70, 7)
    for layer in cache.layers:
        layer.cumulative_length.sub_(70)
    call(64, 8)
    with torch.inference_mode():
        for layer in cache.layers:
            layer.cumulative_length.sub_(1)
        call(2, 9)
    cache = copy.deepcopy(cache)
    call(9, 10)
    assert not truth["read"]
    assert truth["told"]


def test_layers_of_different_length_read_their_own(model, truth):
    cache = made(model, "int4")
    step(model, prompt(BATCH, 70), cache)
    cache.layers[1].crop(-6)
    truth.clear()
    step(model, prompt(BATCH, 9), cache)
    assert truth == {"read": 2 * LAYERS}  # attention and write
    assert [int(layer.cumulative_length) for layer in cache.layers] == [79, 73, 79]


def test_generation_is_told_the_truth(model, truth):
    """Beams over two lengths reorder the cache, lookup crops it."""
    ids, mask = left_pad([prompt(1, 20, seed=1)[0], prompt(1, 13, seed=2)[0]])
    cases = [
        (ids, 2 * BATCH, {"num_beams": 2, "attention_mask": mask}),
        (ids[:1], 1, {"prompt_lookup_num_tokens": 3}),
    ]
    for inputs, rows, ask in cases:
        cache = Int4Cache(model.config, 96, batch_size=rows)
        tokens = generate(model, inputs, 8, cache=cache, **ask)[0]
        assert int(cache.get_seq_length()) == 20 + tokens.shape[1] - 1
        assert truth.pop("told")
    assert not truth["read"]


def test_an_overflow_needs_no_read(model):
    cache = made(model, "static")
    step(model, prompt(BATCH, 150), cache)
    with counted() as found, pytest.raises(CacheLengthError, match="150 are used and this call needs 60"):
        step(model, prompt(BATCH, 60), cache)
    assert found == []
    step(model, prompt(BATCH, 50), cache)
    assert int(cache.get_seq_length()) == 200


def test_what_is_remembered_dies_with_the_cache(model):
    gc.collect()
    before = len(LENGTHS._known)
    cache = made(model, "int4")
    step(model, prompt(BATCH, 9), cache)
    assert len(LENGTHS._known) == before + LAYERS
    del cache
    gc.collect()
    assert len(LENGTHS._known) == before


def test_a_moved_cache_is_still_known(model):
    cache = made(model, "int4")
    step(model, prompt(BATCH, 9), cache)
    old = [layer.cumulative_length for layer in cache.layers]
    cache.to("meta")
    assert all(a is not layer.cumulative_length for a, layer in zip(old, cache.layers, strict=True))
    assert [LENGTHS.known(layer.cumulative_length) for layer in cache.layers] == [9] * LAYERS


# ---- captures --------------------------------------------------------------------------------------------------------


@pytest.fixture
def captured(model, monkeypatch):
    """A context inside which everybody believes that a CUDA graph is being captured."""
    inside = [False]
    for module in (pages, caches, int4_cache):
        monkeypatch.setattr(module, "capturing", lambda t: inside[0])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: inside[0])

    @contextlib.contextmanager
    def capture():
        for graph in record_of(model).alive:
            monkeypatch.setattr(graph, "_capturable", True)
        inside[0] = True
        try:
            yield
        finally:
            inside[0] = False

    return capture


def warm(model, kind):
    """A cache after a prefill, a chunk and a step, all graphs compiled."""
    cache = made(model, kind)
    for tokens in (70, 9, 1):
        step(model, prompt(BATCH, tokens), cache)
    return cache


@pytest.mark.parametrize("where", ["inside", "before"])
@pytest.mark.parametrize("kind", ["static", "int4"])
def test_a_prefill_is_captured_for_an_empty_cache(model, captured, kind, where):
    cache = warm(model, kind)
    want = step(model, prompt(BATCH, 70), made(model, kind))
    if where == "before":
        cache.reset()
    with captured(), counted() as found:
        if where == "inside":
            cache.reset()
        got = step(model, prompt(BATCH, 70), cache)
    assert found == []
    assert torch.equal(got, want)
    # Replays move the counter and nobody counts them: from now on it is read.
    for tokens in (9, 9):
        with counted() as found:
            step(model, prompt(BATCH, tokens), cache)
        assert found == [("tolist", (LAYERS,))]
    if kind == "static":
        assert fu_compile.report(model).counters["reimports"]


def test_pages_of_a_captured_reset_are_imported_later(model, captured):
    """What a capture records has not happened: rows that were not imported before it still are not."""
    cache = warm(model, "static")
    cache.layers[0].values[:, :, :64] *= 2  # pages are stale
    before = [(layer.keys.clone(), layer.values.clone(), layer.cumulative_length.clone()) for layer in cache.layers]
    with captured():
        cache.reset()
        step(model, prompt(BATCH, 70), cache)
    copies = [COPIES.find(layer.keys, layer.values) for layer in cache.layers]
    assert not any(c.current(layer.keys, layer.values) for c, layer in zip(copies, cache.layers, strict=True))
    for layer, (keys, values, length) in zip(cache.layers, before, strict=True):  # as if nothing had been executed
        layer.keys.copy_(keys), layer.values.copy_(values), layer.cumulative_length.copy_(length)
    twin = copy.deepcopy(cache)
    assert torch.equal(step(model, prompt(BATCH, 1), cache), step(model, prompt(BATCH, 1), twin))


def test_chunks_are_captured_behind_a_prefill(model, captured):
    want = made(model, "int4")
    expected = [step(model, prompt(BATCH, n), want) for n in (70, 9)]
    cache = warm(model, "int4")
    with captured(), counted() as found:
        cache.reset()
        got = [step(model, prompt(BATCH, n), cache) for n in (70, 9)]
    assert found == []
    assert all(map(torch.equal, got, expected))


@pytest.mark.parametrize("kind", ["static", "int4"])
def test_what_nobody_knows_is_not_captured(model, captured, kind):
    """A counter that somebody wrote to, tokens in the cache, a decode step without a kernel: no read, a named error."""
    for spoil, tokens in (("written", 70), ("filled", 9), ("filled", 1), ("empty", 1)):
        cache = warm(model, kind)
        if spoil == "empty":
            cache.reset()
        if spoil == "written":
            for layer in cache.layers:
                layer.cumulative_length.fill_(0)
        keys = [name for name in ("keys", "key_rows") if isinstance(vars(cache.layers[0]).get(name), torch.Tensor)]
        before = [getattr(layer, keys[0]).clone() for layer in cache.layers]
        with captured(), counted() as found, pytest.raises(CaptureError, match="known on the device alone"):
            step(model, prompt(BATCH, tokens), cache)
        assert found == []
        assert all(torch.equal(a, getattr(layer, keys[0])) for a, layer in zip(before, cache.layers, strict=True))
        assert issubclass(CaptureError, RuntimeError)  # what PyTorch raises itself
        step(model, prompt(BATCH, tokens), cache)


def test_a_capture_within_the_call_believes_nothing(captured):
    """Inductor may record our operators into a graph of its own, and replay it at other positions."""
    position = torch.arange(5, 9)
    with pages.calling(5):
        assert pages.first_position(position) == 5
        with captured(), pytest.raises(CaptureError):
            pages.first_position(position)
    with captured(), pages.calling(5, captured=True):
        assert pages.first_position(position) == 5


@pytest.mark.parametrize("way", [reference_attention, cublas_prefill], ids=["reference", "cublas"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("first", "moved"), [(0, 5), (64, 0), (70, 64), (0, 64)])
@pytest.mark.parametrize("paged", [False, True])
def test_a_replay_elsewhere_gives_nan(way, masked, first, moved, paged):
    """What the graph was captured for is no longer so: nothing may look like a result."""
    batch, heads, kv, dim, tokens = 2, 4, 2, 32, 9
    q = torch.randn(batch, heads, tokens, dim).bfloat16()
    k, v = (torch.randn(batch, kv, tokens, dim).bfloat16() for _ in range(2))
    rows = [torch.randn(batch, kv, PAGE if paged else SLOTS, dim).bfloat16() for _ in range(2)]
    full = [torch.randn(batch, kv, 128, dim).bfloat16() for _ in range(2)]
    store, tables = formats.kv_store(batch, kv, SLOTS, dim), formats.kv_tables(kv, dim)
    reference_attention.kv_append_(*full, *store, *tables, 0, 2)
    position = first + torch.arange(tokens)
    mask = (torch.arange(SLOTS) <= position[:, None]).expand(batch, 1, -1, -1) if masked else None

    def run(position):
        return way.LAUNCH["attention_prefill"](q, k, v, *rows, *store, *tables, position, mask, 0.2, False)

    with pages.calling(first, captured=True):
        here, elsewhere = run(position), run(moved + torch.arange(tokens))
    assert torch.equal(here, run(position))
    assert torch.isfinite(here).all()
    assert elsewhere.isnan().all()


@pytest.mark.parametrize("paged", [False, True])
def test_a_replay_elsewhere_writes_nan(paged):
    """Rows that a reference lowering writes where the capture stood: whoever sees them sees that they are none."""
    kv, dim, tokens = 2, 16, 70
    store, tables = formats.kv_store(1, kv, SLOTS, dim), formats.kv_tables(kv, dim)
    rows = [torch.randn(1, kv, PAGE if paged else SLOTS, dim) for _ in range(2)]
    k, v = (torch.randn(1, kv, tokens, dim) for _ in range(2))
    extend = reference_attention.kv_extend_
    with pages.calling(0, captured=True):
        extend(k, v, *rows, *store, *tables, torch.arange(5, 5 + tokens))
    decoded = reference_attention.kv_dequantize(store[2], store[3], None, None, 1)
    assert decoded.isnan().all()
    at = slice(0, tokens % PAGE) if paged else slice(PAGE, tokens)
    assert rows[1][:, :, at].isnan().all()
    with pages.calling(0, captured=True):
        extend(k, v, *rows, *store, *tables, torch.arange(tokens))
    assert torch.equal(rows[1][:, :, at], v[:, :, PAGE:])
    assert torch.isfinite(reference_attention.kv_dequantize(store[2], store[3], None, None, 1)).all()


# ---- graphs of their own: last, because they reset Dynamo ------------------------------------------------------------


def test_two_calls_in_one_graph(truth):
    """The second stands behind the first: no number of the whole call may reach it."""
    torch._dynamo.reset()
    own = build(num_hidden_layers=1, **SIZES)
    a, b = prompt(1, 9), prompt(1, 5, seed=1)
    twice = torch.compile(
        lambda cache: (step(own, a, cache), step(own, b, cache)),
        backend="futransformer",
        fullgraph=True,
        options={"rest": "eager", "prefill": "bf16"},
    )
    with torch.no_grad():
        for _ in range(2):
            want = Int4Cache(own.config, 96)
            expected = step(own, a, want), step(own, b, want)
            for got, ours in zip(twice(Int4Cache(own.config, 96)), expected, strict=True):
                assert torch.equal(got.argmax(-1), ours.argmax(-1))
    assert truth["read"]
    torch._dynamo.reset()


def test_nothing_new_is_compiled():
    """The graphs of a conversation: as many as before the host remembered anything, and no break."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    own = compiled(build(num_hidden_layers=1, **SIZES), prefill="bf16", decode="bf16")
    with dynamo_warnings() as logged:
        for kind in KINDS:
            for _ in range(2):
                cache = made(own, kind)
                for tokens in (70, 1, 9, 1, 70):
                    step(own, prompt(BATCH, tokens), cache)
                cache.reset()
                for tokens in (70, 1):
                    step(own, prompt(BATCH, tokens), cache)
    assert logged == []
    assert not torch._dynamo.utils.counters["graph_break"]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == GRAPHS
    torch._dynamo.reset()


GRAPHS = 6
"""Measured before the host remembered anything, at both ends of the window: three for each kind of cache, but the
lazy one shares two with the static one."""
