"""Cache writes: StaticCache, sliding window, DynamicCache; results and the caches themselves against eager."""

import pytest
import torch
from expecttest import assert_expected_inline
from graphs import misses, recognise, same_as_eager, show
from hypothesis import given, settings
from hypothesis import strategies as st

NAMES = ("kv_write",)


def copied(cache, position, x):
    cache.index_copy_(2, position, x)
    return cache.sum(2)


def put(cache, position, x):
    cache[:, :, position] = x
    return cache.sum(2)


def rolled(cache, position, x):
    new = cache.roll(-1, dims=-2)
    new[:, :, torch.tensor([-1])] = x[:, :, :1]
    cache.copy_(new)
    return cache.sum(2)


def filled(cache, position, x):
    full = torch.cat((cache[:, :, 1:], x), dim=-2)
    cache.copy_(full[:, :, -cache.shape[2] :])
    return full.sum(2)


def joined(cache, position, x):
    return torch.cat([cache, x], dim=-2)


def first(cache, position, x):
    return torch.cat([torch.tensor([], dtype=x.dtype), x], dim=-2)


def scattered(cache, position, x):
    cache[:, position - 2, position] = x.new_zeros(())
    return cache.sum(2)


def summed(cache, position, x):
    torch.ops.aten.index_put_(cache, [None, None, position], x, True)
    return cache.sum(2)


def rolled_two(cache, position, x):
    new = cache.roll(-2, dims=-2)
    new[:, :, torch.tensor([-1])] = x[:, :, :1]
    cache.copy_(new)
    return cache.sum(2)


def rolled_to_front(cache, position, x):
    new = cache.roll(-1, dims=-2)
    new[:, :, torch.tensor([0])] = x[:, :, :1]
    cache.copy_(new)
    return cache.sum(2)


def rolled_and_read(cache, position, x):
    new = cache.roll(-1, dims=-2)
    new[:, :, torch.tensor([-1])] = x[:, :, :1]
    cache.copy_(new)
    return new.sum(2)


def touched(cache, position, x):
    new = cache.roll(-1, dims=-2)
    new[:, :, torch.tensor([-1])] = x[:, :, :1]
    x[:, :, 0].mul_(2)
    cache.copy_(new)
    return cache.sum(2)


def head(cache, position, x):
    full = torch.cat((cache[:, :, 1:], x), dim=-2)
    cache.copy_(full[:, :, : cache.shape[2]])
    return full.sum(2)


def heads_joined(cache, position, x):
    return torch.cat([cache, cache], dim=1)


def inputs(tokens=3, length=7, dtype=torch.float32):
    return (
        torch.randn(2, 3, length, 4, dtype=dtype),
        torch.arange(tokens) + 2,
        torch.randn(2, 3, tokens, 4, dtype=dtype),
    )


def test_golden_static():
    before, captured, _ = recognise(copied, *inputs(), names=NAMES)
    assert_expected_inline(
        before,
        """\
index_copy_ = index_copy_(cache, 2, position, x)
sum_1 = sum.dim_IntList(index_copy_, [2])
return sum_1
""",
    )
    assert_expected_inline(
        show(captured.gm),
        """\
kv_write_ = kv_write_(cache, position, x)
sum_1 = sum.dim_IntList(cache, [2])
return sum_1
""",
    )


def test_golden_window():
    _, captured, _ = recognise(rolled, *inputs(), names=NAMES)
    assert_expected_inline(
        show(captured.gm),
        """\
slice_1 = slice.Tensor(x, 2, 0, 1)
kv_roll_ = kv_roll_(cache, slice_1)
sum_1 = sum.dim_IntList(cache, [2])
return sum_1
""",
    )


def test_golden_overflow():
    _, captured, _ = recognise(filled, *inputs(), names=NAMES)
    assert_expected_inline(
        show(captured.gm),
        """\
slice_1 = slice.Tensor(cache, 2, 1, 9223372036854775807)
kv_cat = kv_cat(slice_1, x)
kv_fill_ = kv_fill_(cache, kv_cat)
sum_1 = sum.dim_IntList(kv_cat, [2])
return sum_1
""",
    )


def test_golden_dynamic():
    _, captured, _ = recognise(joined, *inputs(), names=NAMES)
    assert_expected_inline(
        show(captured.gm),
        """\
kv_cat = kv_cat(cache, x)
return kv_cat
""",
    )
    _, captured, _ = recognise(first, *inputs(), names=NAMES)
    assert_expected_inline(
        show(captured.gm),
        """\
kv_cat = kv_cat(None, x)
return kv_cat
""",
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fn", [copied, put, rolled, filled, joined, first], ids=lambda f: f.__name__)
def test_taken(fn, dtype):
    ctx = same_as_eager(fn, *inputs(dtype=dtype), names=NAMES)  # bytes move, nothing is computed: exact
    assert ctx.count("kv_write") == (2 if fn is filled else 1)


@settings(max_examples=6, deadline=None)
@given(st.integers(1, 5), st.integers(7, 12))
def test_any_length(tokens, length):
    assert same_as_eager(copied, *inputs(tokens, length), names=NAMES).count("kv_write") == 1


def test_symbolic_past():
    _, _, ctx = recognise(joined, *inputs(), names=NAMES, dynamic=[(0, 2)])
    assert ctx.count("kv_write") == 1


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (scattered, "the cache is written at several indices or summed into"),
        (summed, "the cache is written at several indices or summed into"),
        (rolled_two, "the window does not roll by one token"),
        (rolled_to_front, "the new token does not go to the last slot"),
        (rolled_and_read, "the rolled window has other readers"),
        (touched, "the window or the new token is written between the roll and the copy"),
        (head, "what is kept is not the last tokens of the window"),
        (heads_joined, "a graph input is joined along dimension 1, not along the tokens"),
    ],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_refused(fn, reason):
    _, captured, ctx = recognise(fn, *inputs(), names=NAMES)
    assert misses(ctx, "kv_write") == [reason]
    assert not any(op in show(captured.gm) for op in ("kv_write_(", "kv_roll_(", "kv_fill_("))
    same_as_eager(fn, *inputs(), names=NAMES)


def test_refuses_other_dimensions():
    cache, x = torch.randn(2, 5, 3, 4), torch.randn(2, 3, 3, 4)

    def write(cache, position, x):
        cache.index_copy_(1, position, x)
        return cache.sum(2)

    _, _, ctx = recognise(write, cache, torch.arange(3), x, names=NAMES)
    assert misses(ctx, "kv_write") == ["the cache is written along dimension 1, not along the tokens"]


def test_a_copy_that_is_then_written_stays_a_copy():
    """The clean-up may not let a write to a copy reach the cache."""

    def fork(cache, position, x):
        new = cache + 0
        new.index_copy_(2, position, x)
        return new, cache.sum(2)

    same_as_eager(fork, *inputs(), names=NAMES)
