"""Rotary embedding: halves of [B, H, S, D], whole or partial; every other rotation is refused."""

import pytest
import torch
from expecttest import assert_expected_inline
from graphs import misses, recognise, same_as_eager, show
from hypothesis import given, settings
from hypothesis import strategies as st

NAMES = ("rotary",)


def rotate_half(x):
    return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), dim=-1)


def whole(x, cos, sin):
    return x * cos.unsqueeze(1) + rotate_half(x) * sin.unsqueeze(1)


def flipped(x, cos, sin):
    return sin.unsqueeze(1) * rotate_half(x) + cos.unsqueeze(1) * x


def chunked(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return x * cos.unsqueeze(1) + torch.cat((-b, a), dim=-1) * sin.unsqueeze(1)


def partial(x, cos, sin):
    r = cos.shape[-1]
    return torch.cat([whole(x[..., :r], cos, sin), x[..., r:]], dim=-1)


def interleaved(x, cos, sin):
    turned = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    return x * cos.unsqueeze(1) + turned * sin.unsqueeze(1)


def swapped_sign(x, cos, sin):
    h = x.shape[-1] // 2
    return x * cos.unsqueeze(1) + torch.cat((x[..., h:], -x[..., :h]), dim=-1) * sin.unsqueeze(1)


def uneven(x, cos, sin):
    return x * cos.unsqueeze(1) + torch.cat((-x[..., 2:], x[..., :2]), dim=-1) * sin.unsqueeze(1)


def tokens_first(x, cos, sin):
    return whole_at(x, cos, sin, 2)


def whole_at(x, cos, sin, dim):
    return x * cos.unsqueeze(dim) + rotate_half(x) * sin.unsqueeze(dim)


def of_another_tensor(x, cos, sin):
    return x * cos.unsqueeze(1) + rotate_half(x.abs()) * sin.unsqueeze(1)


def inputs(dtype=torch.float32, columns=16, batch=2, heads=3, tokens=5, head_dim=16):
    x = torch.randn(batch, tokens, heads, head_dim, dtype=dtype).transpose(1, 2)
    angle = torch.randn(batch, tokens, columns)
    return x, angle.cos().to(dtype), angle.sin().to(dtype)


def test_golden():
    before, captured, _ = recognise(whole, *inputs(), names=NAMES)
    assert_expected_inline(
        before,
        """\
unsqueeze = unsqueeze(cos, 1)
mul = mul.Tensor(x, unsqueeze)
slice_1 = slice.Tensor(x, 3, 8, 9223372036854775807)
neg = neg(slice_1)
slice_2 = slice.Tensor(x, 3, 0, 8)
cat = cat([neg, slice_2], -1)
unsqueeze_1 = unsqueeze(sin, 1)
mul_1 = mul.Tensor(cat, unsqueeze_1)
add = add.Tensor(mul, mul_1)
return add
""",
    )
    assert_expected_inline(
        show(captured.gm),
        """\
rotary = rotary(x, cos, sin)
return rotary
""",
    )


def test_golden_partial():
    _, captured, ctx = recognise(partial, *inputs(columns=6), names=NAMES)
    assert_expected_inline(
        show(captured.gm),
        """\
rotary = rotary(x, cos, sin)
return rotary
""",
    )
    assert ctx.count("rotary") == 1


def test_golden_nothing_passes_through():
    """Phi-3 with a full rotation: the slice and the empty rest are cleaned away."""
    _, captured, _ = recognise(partial, *inputs(), names=NAMES)
    assert_expected_inline(
        show(captured.gm),
        """\
rotary = rotary(x, cos, sin)
slice_3 = slice.Tensor(x, 3, 16, 9223372036854775807)
cat_1 = cat([rotary, slice_3], -1)
return cat_1
""",
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fn", [whole, flipped, chunked], ids=lambda f: f.__name__)
def test_taken(fn, dtype):
    assert same_as_eager(fn, *inputs(dtype), names=NAMES).count("rotary") == 1  # the same products and sums: exact


@settings(max_examples=8, deadline=None)
@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 5), st.integers(1, 9), st.integers(0, 5))
def test_any_shape(batch, heads, tokens, half, rest):
    args = inputs(torch.float32, 2 * half, batch, heads, tokens, 2 * half + rest)
    fn = partial if rest else whole
    assert same_as_eager(fn, *args, names=NAMES).count("rotary") == 1


def test_symbolic_tokens():
    _, captured, ctx = recognise(whole, *inputs(), names=NAMES, dynamic=[(0, 2), (1, 1), (2, 1)])
    assert ctx.count("rotary") == 1
    assert any(
        isinstance(s, torch.SymInt) for n in captured.gm.graph.nodes if n.name == "rotary" for s in n.meta["val"].shape
    )


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (interleaved, "pairs are interleaved (GPT-J), not halves"),
        (swapped_sign, "the sign is swapped: the first half is negated"),
        (uneven, "x is not cut in the middle"),
        (of_another_tensor, "the two halves are not halves of x"),
    ],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_refused(fn, reason):
    before, captured, ctx = recognise(fn, *inputs(), names=NAMES)
    assert ctx.count("rotary") == 0
    assert misses(ctx, "rotary") == [reason]
    assert show(captured.gm) == before


def test_refuses_tokens_before_heads():
    x, cos, sin = inputs()
    _, _, ctx = recognise(tokens_first, x.transpose(1, 2).contiguous(), cos, sin, names=NAMES)
    assert misses(ctx, "rotary") == ["cos gets its head dimension at 2: x is not [B, H, S, D]"]


def test_refuses_mixed_dtypes():
    x, cos, sin = inputs()
    _, _, ctx = recognise(whole, x.bfloat16(), cos, sin, names=NAMES)
    assert misses(ctx, "rotary") == ["cos is float32, x is bfloat16"]


def test_refuses_a_table_without_batch():
    def flat(x, cos, sin):
        return x * cos + rotate_half(x) * sin

    x, cos, sin = inputs()
    _, _, ctx = recognise(flat, x, cos[0], sin[0], names=NAMES)
    assert misses(ctx, "rotary") == ["cos is not a [B, S, R] tensor with a dimension for the heads"]
