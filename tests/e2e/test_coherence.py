"""The coherence rule of design.md section 5: a StaticCache stays true, its INT4 copy is never stale.

One compiled model serves the file. After each change by somebody else, the next step must equal the step over a
*twin*: a copy of the cache that nothing of ours hangs on, so everything is imported from the tensors as they are. One
test holds the import itself against the state of another process (fresh model, fresh Dynamo).
"""

import copy

import pytest
import torch
from field import compiled, counters, crop, generate, model, prompt, rms, static_cache, step, steps

from fu_compile.caches import COPIES
from fu_compile.errors import CacheLengthError, CacheMismatchError

pytestmark = pytest.mark.filterwarnings("error::fu_compile.errors.FuWarning")  # nothing falls back silently

LENGTH = 192
"""Three pages of 64 tokens."""
TOKENS = 130
"""Two finished pages and two tokens of the third."""
LAYERS = 2

SAME = {"rtol": 1e-4, "atol": 1e-4}
"""The same codes, scales and exact rows: only float32 sums in another order remain (logits are about 10)."""


@pytest.fixture(scope="module")
def served():
    """F-llama, quantised, its graphs built."""
    torch._dynamo.reset()
    made = compiled(model("llama"))
    cache = static_cache(made, LENGTH, batch=2)
    step(made, prompt(2, 5), cache)
    step(made, prompt(2, 6), cache)
    step(made, prompt(2, 1), cache)
    yield made
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def eager():
    return model("llama")


@pytest.fixture
def filled(served):
    """A cache that one prefill of ours has filled."""
    cache = static_cache(served, LENGTH, batch=2)
    step(served, prompt(2, TOKENS), cache)
    return cache


TOKEN = prompt(2, 1, seed=9)


def imports(made):
    """(first imports, re-imports) so far, over all layers."""
    return counters(made)["imports"], counters(made)["reimports"]


def check_next_step(made, cache, reimported, imported=0):
    """The next step equals the twin's, and costs so many imports."""
    twin = copy.deepcopy(cache)
    before = imports(made)
    found = step(made, TOKEN, cache)
    after = imports(made)
    assert (after[0] - before[0], after[1] - before[1]) == (imported, reimported)
    want = step(made, TOKEN, twin)
    assert imports(made)[0] == after[0] + LAYERS  # the twin really was imported
    torch.testing.assert_close(found, want, **SAME)
    return found


def test_our_own_calls_import_nothing(served):
    before = imports(served)
    cache = static_cache(served, LENGTH, batch=2)
    step(served, prompt(2, TOKENS), cache)
    steps(served, prompt(2, 3), cache)
    assert imports(served) == before
    check_next_step(served, cache, reimported=0)


def test_eager_prefill_then_compiled_decode(served, eager):
    cache = static_cache(eager, LENGTH)
    step(eager, prompt(2, TOKENS), cache)
    exact = copy.deepcopy(cache)
    found = check_next_step(served, cache, reimported=0, imported=LAYERS)
    error = rms(found - step(eager, TOKEN, exact))
    assert 0 < error < 0.5 * rms(found)  # quantisation noise (measured: 0.1 to 0.2), no other text


def write_keys(cache):
    cache.layers[1].keys[:, :, 3] += 2.0


def write_values_through_a_view(cache):
    cache.layers[0].values.view(-1)[: 64 * 70].mul_(-1)


def replace_a_tensor(cache):
    cache.layers[0].keys = cache.layers[0].keys.flip(0)


def swap_two_layers(cache):
    a, b = cache.layers
    a.keys, b.keys = b.keys, a.keys


@pytest.mark.parametrize(
    ("write", "again"),
    [
        (write_keys, (0, 1)),
        (write_values_through_a_view, (0, 1)),
        (replace_a_tensor, (1, 0)),  # a tensor never seen: a first import
        (swap_two_layers, (2, 0)),  # keys with other values than before: pairs never seen
    ],
)
def test_user_writes(served, filled, write, again):
    before = step(served, TOKEN, copy.deepcopy(filled))
    write(filled)
    imported, reimported = again
    found = check_next_step(served, filled, reimported=reimported, imported=imported)
    assert rms(found - before) > 1e-3  # the write did matter
    check_next_step(served, filled, reimported=0)


def test_eager_step_in_between(served, eager, filled):
    step(eager, prompt(2, 3, seed=4), filled)
    check_next_step(served, filled, reimported=LAYERS)


def test_eager_step_that_finishes_a_page(served, eager):
    cache = static_cache(served, LENGTH, batch=2)
    step(served, prompt(2, 60), cache)
    step(eager, prompt(2, 10, seed=4), cache)
    check_next_step(served, cache, reimported=LAYERS)


def test_reset(served, filled):
    filled.reset()
    assert int(filled.get_seq_length()) == 0
    found = step(served, prompt(2, 70, seed=3), filled)
    want = step(served, prompt(2, 70, seed=3), static_cache(served, LENGTH, batch=2))
    torch.testing.assert_close(found, want, **SAME)
    check_next_step(served, filled, reimported=0)


@pytest.mark.parametrize("extreme", [None, 1e4, torch.inf])
@pytest.mark.parametrize(("keep", "rejected"), [(60, 10), (64, 70), (100, 30), (127, 1)])
def test_crop_forgets(served, keep, rejected, extreme):
    """After ``crop`` into a finished page the cache is one that never held the tokens, whatever they were."""
    clean, cropped = static_cache(served, LENGTH, batch=2), static_cache(served, LENGTH, batch=2)
    for cache in (clean, cropped):
        step(served, prompt(2, keep), cache)
    step(served, prompt(2, rejected, seed=5), cropped)
    if extreme is not None:
        for layer in cropped.layers:
            layer.keys[:, :, keep : keep + rejected] = extreme
            layer.values[:, :, keep : keep + rejected] = -extreme
        copy_of = [COPIES.find(layer.keys, layer.values) for layer in cropped.layers]
        for layer, held in zip(cropped.layers, copy_of, strict=True):  # as if a call of ours had quantised them
            held.fill(layer.keys, layer.values, keep + rejected)
            held.seen(layer.keys, layer.values)
    crop(cropped, rejected)
    tail = prompt(2, 6, seed=6)
    torch.testing.assert_close(steps(served, tail, cropped), steps(served, tail, clean), **SAME)
    # One long call as well: it passes the end of the page that was cropped.
    more = prompt(2, 40, seed=7)
    torch.testing.assert_close(step(served, more, cropped), step(served, more, clean), **SAME)


def test_beam_reorder(served, filled):
    order = torch.tensor([1, 0])
    before = copy.deepcopy(filled)
    filled.reorder_cache(order)
    found = check_next_step(served, filled, reimported=0, imported=LAYERS)
    torch.testing.assert_close(step(served, TOKEN[order], before)[order], found, **SAME)


def test_deepcopies_live_on_their_own(served, filled):
    other = copy.deepcopy(filled)
    want = steps(served, prompt(2, 4, seed=2), filled)
    write_keys(filled)
    torch.testing.assert_close(steps(served, prompt(2, 4, seed=2), other), want, **SAME)
    check_next_step(served, filled, reimported=1)


def test_two_caches_of_one_model_take_turns(served):
    a, b = (static_cache(served, LENGTH, batch=2) for _ in range(2))
    step(served, prompt(2, TOKENS), a)
    alone = copy.deepcopy(a)
    step(served, prompt(2, 70, seed=3), b)
    before = imports(served)
    turns = []
    for i in range(3):
        turns.append(step(served, prompt(2, 1, seed=i), a))
        step(served, prompt(2, 1, seed=i + 10), b)
    assert imports(served) == before
    want = [step(served, prompt(2, 1, seed=i), alone) for i in range(3)]
    torch.testing.assert_close(torch.cat(turns), torch.cat(want), **SAME)


def test_dirty_slots(served, filled):
    """NaN beyond the live length, in the user's tensors and in the store, is never read."""
    want = step(served, TOKEN, copy.deepcopy(filled))
    for layer in filled.layers:
        layer.keys[:, :, TOKENS:] = torch.nan
        layer.values[:, :, TOKENS:] = torch.nan
        for t in COPIES.find(layer.keys, layer.values).store:
            t[:, :, 2:] = 255 if t.dtype == torch.uint8 else torch.nan
    torch.testing.assert_close(step(served, TOKEN, filled), want, **SAME)


def test_the_stores_die_with_the_cache(served):
    held = COPIES.bytes
    cache = static_cache(served, LENGTH, batch=2)
    step(served, prompt(2, 5), cache)
    assert COPIES.bytes > held
    del cache
    assert COPIES.bytes == held


def test_inference_tensors_are_never_trusted(eager):
    """Inference tensors keep no version: a write between two steps must be seen all the same."""
    made = compiled(model("llama"))
    with torch.inference_mode():
        ids, token = prompt(1, 70), prompt(1, 1, seed=1)
        cache = static_cache(made, 96, batch=1)
        assert cache.layers[0].keys.is_inference()
        step(made, ids, cache)
        clean = step(made, token, copy.deepcopy(cache))
        for layer in cache.layers:
            layer.values[:, :, :64] *= -1
        twin = copy.deepcopy(cache)
        before = imports(made)
        found = step(made, token, cache)
        assert imports(made)[1] - before[1] == LAYERS
        torch.testing.assert_close(found, step(made, token, twin), **SAME)
        assert rms(found - clean) > 1e-3
        error = rms(clean - step(eager, torch.cat((ids, token), 1), static_cache(eager, 96))[:, -1:])
        assert error < 0.5 * rms(clean)
        _, logits = generate(made, ids, 4, cache_implementation="static")  # the usual way to serve
        assert logits.isfinite().all()


# ---- refusals: before anything is changed ----------------------------------------------------------------------------


def state(cache):
    """Everything that a refused call must leave alone: the tensors, their lengths, the INT4 stores."""
    found = []
    for layer in cache.layers:
        held = COPIES.find(layer.keys, layer.values)
        found += [layer.keys, layer.values, layer.cumulative_length, *(held.store if held is not None else ())]
    return [t.clone() for t in found]


def check_refused(made, cache, ids, error, text):
    before = state(cache)
    with pytest.raises(error, match=text) as raised:
        step(made, ids, cache)
    assert raised.value.advice
    assert all(map(torch.equal, before, state(cache)))


def test_overflow_is_refused_before_anything_changes(served, filled):
    check_refused(served, filled, prompt(2, 63), CacheLengthError, r"192 slots, 130 .*193 long")
    step(served, prompt(2, 62), filled)  # to the last slot
    check_refused(served, filled, TOKEN, CacheLengthError, r"192 slots, 192 .*193 long")
    crop(filled, 1)
    check_next_step(served, filled, reimported=0)


@pytest.mark.parametrize("batch", [1, 3])
def test_another_batch_size_is_refused(served, filled, batch):
    check_refused(served, filled, prompt(batch, 1), CacheMismatchError, f"batch size 2.* {batch}")
    check_next_step(served, filled, reimported=0)


@pytest.mark.parametrize(
    ("heads", "dim", "dtype", "text"),
    [(1, 64, torch.float32, "heads 1"), (2, 32, torch.float32, "head_dim 32"), (2, 64, torch.float16, "float16")],
)
def test_another_geometry_is_refused(served, heads, dim, dtype, text):
    cache = static_cache(served, LENGTH)
    cache.early_initialization(2, heads, dim, dtype, torch.device("cpu"))
    check_refused(served, cache, TOKEN, CacheMismatchError, text)
    assert step(served, TOKEN, static_cache(served, LENGTH, batch=2)).isfinite().all()


def test_the_import_equals_that_of_a_fresh_process(served, eager):
    """Last in the file: it empties Dynamo, after which the shared model would have to be compiled again."""
    cache = static_cache(eager, LENGTH)
    step(eager, prompt(2, TOKENS), cache)
    twin = copy.deepcopy(cache)
    found = steps(served, prompt(2, 3, seed=8), cache)
    torch._dynamo.reset()
    fresh = compiled(model("llama"))
    assert counters(fresh)["calls"] == 0
    want = steps(fresh, prompt(2, 3, seed=8), twin)
    torch.testing.assert_close(found, want, **SAME)
