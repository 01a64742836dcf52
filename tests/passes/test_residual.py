"""Residual additions: a stream plus a branch that ends in a linear."""

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from graphs import misses, recognise, same_as_eager, show

NAMES = ("rms_norm", "residual")


def plain(x, w):
    return x + F.linear(x, w)


def branch_first(x, w):
    return F.linear(x, w) + x


def scaled(x, w):
    return x + F.linear(x, w) * 0.22


def scaled_first(x, w):
    return 0.22 * F.linear(x, w) + x


def alpha(x, w):
    return torch.add(x, F.linear(x, w), alpha=2)


def broadcast(x, w):
    return x[:, :1] + F.linear(x, w)


def adapter(x, w):
    return x + (F.linear(x, w) + F.linear(x, w.mT) * 2.0)


def two_linears(x, w):
    return F.linear(x, w) + F.linear(x, w.mT)


def post_norm(x, w):
    y = F.linear(x, w)
    return x + y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)


def shared(x, w):
    y = F.linear(x, w)
    return x + y, y


def in_place(x, w):
    y = F.linear(x, w)
    y += x
    return y


def inputs(dtype=torch.float32):
    return torch.randn(2, 5, 7, dtype=dtype), torch.randn(7, 7, dtype=dtype)


def test_golden():
    before, captured, _ = recognise(scaled, *inputs(), names=NAMES)
    assert_expected_inline(
        before,
        """\
linear = linear(x, w)
mul = mul.Tensor(linear, 0.22)
add = add.Tensor(x, mul)
return add
""",
    )
    assert_expected_inline(
        show(captured.gm),
        """\
linear = linear(x, w)
residual = residual(x, linear, 0.22)
return residual
""",
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fn", [plain, branch_first, scaled, scaled_first], ids=lambda f: f.__name__)
def test_taken(fn, dtype):
    assert same_as_eager(fn, *inputs(dtype), names=NAMES).count("residual") == 1  # scale rounds first, as eager: exact


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (alpha, "the second term is scaled by alpha = 2"),
        (broadcast, "the terms broadcast: [2, 1, 7] and [2, 5, 7]"),
        (two_linears, "both terms are linears: neither is a residual stream"),
        (post_norm, "a norm stands between the linear and the sum (post-norm)"),
        (shared, "the branch has other readers"),
        (in_place, "the sum is written in place"),
    ],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_refused(fn, reason):
    _, captured, ctx = recognise(fn, *inputs(), names=NAMES)
    assert ctx.count("residual") == 0
    assert misses(ctx, "residual") == [reason]
    assert "residual(" not in show(captured.gm)


def test_an_adapter_is_not_a_stream():
    _, _, ctx = recognise(adapter, *inputs(), names=NAMES)
    assert ctx.count("residual") == 0
    assert "the branch is a sum of linears (an adapter, or a parallel block)" in misses(ctx, "residual")


def test_refuses_mixed_dtypes():
    x, w = inputs()
    _, _, ctx = recognise(lambda x, w: x.double() + F.linear(x, w), x, w, names=NAMES)
    assert misses(ctx, "residual") == ["the stream is float64, the branch is float32"]
