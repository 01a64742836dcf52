"""SwiGLU: silu(gate) * up in either order; other gates are refused."""

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from graphs import misses, recognise, same_as_eager, show
from hypothesis import given, settings
from hypothesis import strategies as st

NAMES = ("swiglu",)


def gate_first(x, w):
    gate, up = (x @ w.mT).chunk(2, -1)
    return F.silu(gate) * up


def up_first(x, w):
    gate, up = F.linear(x, w).chunk(2, -1)
    return up * F.silu(gate)


def of_linears(x, w):
    return F.silu(F.linear(x, w)) * F.linear(x, w + 1)


def gelu(x, w):
    return F.gelu(F.linear(x, w)) * F.linear(x, w + 1)


def of_product(x, w):
    return F.silu(F.linear(x, w) * F.linear(x, w + 1))


def by_number(x, w):
    return F.silu(F.linear(x, w)) * 0.5


def shared(x, w):
    s = F.silu(F.linear(x, w))
    return s * F.linear(x, w + 1), s


def broadcast(x, w):
    return F.silu(F.linear(x, w)) * F.linear(x, w + 1)[..., :1]


def inputs(dtype=torch.float32, tokens=5, k=6, n=8):
    return torch.randn(2, tokens, k, dtype=dtype), torch.randn(n, k, dtype=dtype)


def test_golden():
    before, captured, _ = recognise(up_first, *inputs(), names=NAMES)
    assert_expected_inline(
        before,
        """\
linear = linear(x, w)
chunk = chunk(linear, 2, -1)
getitem = getitem(chunk, 0)
getitem_1 = getitem(chunk, 1)
silu = silu(getitem)
mul = mul.Tensor(getitem_1, silu)
return mul
""",
    )
    assert_expected_inline(
        show(captured.gm),
        """\
linear = linear(x, w)
chunk = chunk(linear, 2, -1)
getitem = getitem(chunk, 0)
getitem_1 = getitem(chunk, 1)
swiglu = swiglu(getitem, getitem_1)
return swiglu
""",
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fn", [gate_first, up_first, of_linears], ids=lambda f: f.__name__)
def test_taken(fn, dtype):
    assert same_as_eager(fn, *inputs(dtype), names=NAMES).count("swiglu") == 1  # the same two operators: exact


@settings(max_examples=6, deadline=None)
@given(st.integers(1, 5), st.integers(1, 9), st.integers(1, 9))
def test_any_shape(tokens, k, n):
    assert same_as_eager(up_first, *inputs(torch.float32, tokens, k, 2 * n), names=NAMES).count("swiglu") == 1


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (gelu, "the activation is gelu, not silu"),
        (of_product, "silu is taken of the product, not of one factor"),
        (by_number, "silu is scaled by a number: there is no second factor"),
        (shared, "silu of the gate has other readers"),
        (broadcast, "gate [2, 5, 8] and up [2, 5, 1] have different shapes"),
    ],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_refused(fn, reason):
    before, captured, ctx = recognise(fn, *inputs(), names=NAMES)
    assert ctx.count("swiglu") == 0
    assert misses(ctx, "swiglu") == [reason]
    assert show(captured.gm) == before


def test_refuses_mixed_dtypes():
    def mixed(x, w):
        return F.silu(F.linear(x, w)) * F.linear(x, w).float()

    _, _, ctx = recognise(mixed, *inputs(torch.bfloat16), names=NAMES)
    assert misses(ctx, "swiglu") == ["gate is bfloat16, up is float32"]
