"""Attention: SDPA and the spelled-out form, every mask, grouped heads; and what is refused."""

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from fu_compile.passes.matching import calls
from graphs import misses, recognise, same_as_eager, show
from hypothesis import given, settings
from hypothesis import strategies as st

NAMES = ("attention",)
SCALE = 0.3
# The reference may run other kernels than eager's chain of matmul and softmax: float32 sums in another order.
FLOAT = {"rtol": 1e-5, "atol": 1e-5}


def flat(o):
    return o.transpose(1, 2).reshape(o.shape[0], o.shape[2], -1)


def repeat(x, n):
    b, h, s, d = x.shape
    return x[:, :, None].expand(b, h, n, s, d).reshape(b, h * n, s, d)


def sdpa(q, k, v, mask):
    return flat(F.scaled_dot_product_attention(q, k, v, mask, scale=SCALE, enable_gqa=True))


def sdpa_repeat(q, k, v, mask):
    n = q.shape[1] // k.shape[1]
    return flat(F.scaled_dot_product_attention(q, repeat(k, n), repeat(v, n), mask).contiguous())


def sdpa_causal(q, k, v, mask):
    return flat(F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=SCALE, enable_gqa=True))


def eager(q, k, v, mask):
    n = q.shape[1] // k.shape[1]
    k, v = repeat(k, n), repeat(v, n)
    w = torch.matmul(q, k.transpose(2, 3)) * SCALE + mask
    w = F.softmax(w, dim=-1, dtype=torch.float32).to(q.dtype)
    return flat(torch.matmul(w, v).contiguous())


def eager_bare(q, k, v, mask):
    return flat(torch.matmul(F.softmax(torch.matmul(q, k.transpose(-1, -2)), dim=-1), v))


def dropout(q, k, v, mask):
    return flat(F.scaled_dot_product_attention(q, k, v, mask, dropout_p=0.1))


def softcap(q, k, v, mask):
    w = torch.tanh(torch.matmul(q, k.transpose(2, 3)) * SCALE / 50.0) * 50.0 + mask
    return flat(torch.matmul(F.softmax(w, dim=-1), v))


def sink(q, k, v, mask):
    w = torch.matmul(q, k.transpose(2, 3)) * SCALE + mask
    w = F.softmax(torch.cat([w, w[..., :1]], dim=-1), dim=-1)[..., :-1]
    return flat(torch.matmul(w, v))


def other_dim(q, k, v, mask):
    return flat(torch.matmul(F.softmax(torch.matmul(q, k.transpose(2, 3)) + mask, dim=-2), v))


def weights_returned(q, k, v, mask):
    w = F.softmax(torch.matmul(q, k.transpose(2, 3)) + mask, dim=-1)
    return flat(torch.matmul(w, v)), w


def not_flattened(q, k, v, mask):
    return F.scaled_dot_product_attention(q, k, v, mask)


def heads_last(q, k, v, mask):
    o = F.scaled_dot_product_attention(q, k, v, mask)
    return o.reshape(o.shape[0], o.shape[2], -1)


def narrow_values(q, k, v, mask):
    return flat(F.scaled_dot_product_attention(q, k, v[..., :3], mask))


def divided(q, k, v, mask):
    return flat(torch.matmul(F.softmax(torch.matmul(q, k.transpose(2, 3)) / 3.0, dim=-1), v))


def inputs(heads=4, kv_heads=2, tokens=5, keys=9, dim=8, dtype=torch.float32, boolean=False):
    q = torch.randn(2, heads, tokens, dim, dtype=dtype)
    k, v = (torch.randn(2, kv_heads, keys, dim, dtype=dtype) for _ in range(2))
    seen = torch.rand(2, 1, tokens, keys) < 0.7
    seen[..., 0] = True
    mask = seen if boolean else torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)
    return q, k, v, mask


def test_golden_sdpa():
    before, captured, _ = recognise(sdpa_repeat, *inputs(), names=NAMES)
    assert_expected_inline(
        before,
        """\
unsqueeze = unsqueeze(k, 2)
expand = expand(unsqueeze, [2, 2, 2, 9, 8])
reshape = reshape(expand, [2, 4, 9, 8])
unsqueeze_1 = unsqueeze(v, 2)
expand_1 = expand(unsqueeze_1, [2, 2, 2, 9, 8])
reshape_1 = reshape(expand_1, [2, 4, 9, 8])
scaled_dot_product_attention = scaled_dot_product_attention(q, reshape, reshape_1, mask)
transpose = transpose.int(scaled_dot_product_attention, 1, 2)
reshape_2 = reshape(transpose, [2, 5, -1])
return reshape_2
""",
    )
    assert_expected_inline(
        show(captured.gm),
        """\
attention = attention(q, k, v, mask, 0.35355339059327373, False)
return attention
""",
    )


def test_golden_eager():
    before, captured, _ = recognise(eager, *inputs(dtype=torch.bfloat16), names=NAMES)
    assert_expected_inline(
        before,
        """\
unsqueeze = unsqueeze(k, 2)
expand = expand(unsqueeze, [2, 2, 2, 9, 8])
reshape = reshape(expand, [2, 4, 9, 8])
unsqueeze_1 = unsqueeze(v, 2)
expand_1 = expand(unsqueeze_1, [2, 2, 2, 9, 8])
reshape_1 = reshape(expand_1, [2, 4, 9, 8])
transpose = transpose.int(reshape, 2, 3)
matmul = matmul(q, transpose)
mul = mul.Tensor(matmul, 0.3)
add = add.Tensor(mul, mask)
softmax = softmax.int(add, -1, torch.float32)
to = to.dtype(softmax, torch.bfloat16)
matmul_1 = matmul(to, reshape_1)
transpose_1 = transpose.int(matmul_1, 1, 2)
reshape_2 = reshape(transpose_1, [2, 5, -1])
return reshape_2
""",
    )
    assert_expected_inline(
        show(captured.gm),
        """\
attention = attention(q, k, v, mask, 0.3, False)
return attention
""",
    )


@pytest.mark.parametrize("boolean", [False, True])
@pytest.mark.parametrize("fn", [sdpa, sdpa_repeat])
def test_sdpa(fn, boolean):
    assert same_as_eager(fn, *inputs(boolean=boolean), names=NAMES, **FLOAT).count("attention") == 1


@pytest.mark.parametrize(("fn", "heads"), [(eager, 2), (eager_bare, 4), (sdpa_repeat, 4)])
def test_spelled_out(fn, heads):
    assert same_as_eager(fn, *inputs(kv_heads=heads), names=NAMES, **FLOAT).count("attention") == 1


def test_spelled_out_in_16_bits():
    # eager rounds the scores and the weights to bfloat16 (8 bits), the operator need not: two roundings of values <= 3
    ctx = same_as_eager(eager, *inputs(dtype=torch.bfloat16), names=NAMES, rtol=3e-2, atol=3e-2)
    assert ctx.count("attention") == 1


def test_causal():
    ctx = same_as_eager(sdpa_causal, *inputs(tokens=9), names=NAMES, **FLOAT)
    assert str(ctx.data["attention"][0].mask) == "causal"


def rows(n):
    return torch.arange(n)[None, None, :, None]


def columns(n):
    return torch.arange(n)[None, None, None]


def packed(q, k, v, mask):
    """As transformers writes it: every pair at once, and a check for packed sequences in positions of its own."""
    n = q.shape[2]
    positions = torch.arange(n).unsqueeze(0)
    first = positions[:, :1] - 1
    sequence = (torch.diff(positions, prepend=first, dim=-1) != 1).cumsum(-1)
    batch = torch.arange(1)[:, None, None, None]
    row, column = rows(n), columns(n)
    hidden = row.new_ones([], dtype=torch.bool) & (positions[batch, column] <= positions[batch, row])
    return sdpa(q, k, v, hidden & (sequence[batch, row] == sequence[batch, column]))


def by_range(f):
    """Attention under the mask ``f(row, column, given)``."""
    return lambda q, k, v, given: sdpa(q, k, v, f(rows(q.shape[2]), columns(k.shape[2]), given))


CAUSAL = {
    "packed": packed,
    "le": by_range(lambda r, c, _: c <= r),
    "ge": by_range(lambda r, c, _: r >= c),
    "expanded": by_range(lambda r, c, _: (c <= r).expand(2, 4, r.shape[2], c.shape[3])),
}
NOT_CAUSAL = {
    "strict": by_range(lambda r, c, _: c - 1 <= r),
    "less": by_range(lambda r, c, _: c < r + 2),
    "anti": by_range(lambda r, c, _: r <= c),
    "from one": by_range(lambda r, c, _: torch.arange(1, c.shape[3] + 1) <= r + 1),
    "steps of two": by_range(lambda r, c, _: torch.arange(0, 2 * c.shape[3], 2) <= 2 * r),
    "window": by_range(lambda r, c, _: (c <= r) & (c > r - 3)),
    "padding": by_range(lambda r, c, given: (c <= r) & given),
    "positions": by_range(lambda r, c, given: (c <= r) & (given.long().cumsum(-1)[..., :1] == 1)),
    "or": by_range(lambda r, c, _: (c <= r) | (c == 4)),
    "nothing": by_range(lambda r, c, _: (c <= r) & torch.zeros_like(c <= r)),
    "one axis": by_range(lambda r, c, _: (r[..., 0] <= r[..., 0])[..., None] & (r <= r)),
}


def square(n=9):
    """Inputs with as many keys as queries, and a boolean mask that every query sees a key of."""
    q, k, v, _ = inputs(tokens=n, keys=n)
    return q, k, v, torch.ones(1, 1, n, n, dtype=torch.bool).triu(2).logical_not()


def attention_of(gm):
    (node,) = [n for n in gm.graph.nodes if calls(n, "attention")]
    return node


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", CAUSAL)
def test_a_mask_that_is_causal_becomes_it(name, dynamic):
    fn = CAUSAL[name]
    # a key's and a query's length are one symbol only where the graph makes both from one tensor, as a model does
    sizes = [(0, 2), (1, 2), (2, 2)] if dynamic else []
    if dynamic:
        fn = lambda q, k, v, mask: CAUSAL[name](q, k.narrow(2, 0, q.shape[2]), v.narrow(2, 0, q.shape[2]), mask)  # noqa: E731
    _, captured, _ = recognise(fn, *square(), names=NAMES, dynamic=sizes)
    node = attention_of(captured.gm)
    assert node.args[3] is None
    assert node.args[5] is True
    same_as_eager(fn, *square(), names=NAMES, **FLOAT)


@pytest.mark.parametrize("name", NOT_CAUSAL)
def test_a_mask_that_hides_something_else_stays(name):
    fn = NOT_CAUSAL[name]
    _, captured, _ = recognise(fn, *square(), names=NAMES)
    node = attention_of(captured.gm)
    assert node.args[3] is not None
    assert node.args[5] is False
    if name != "nothing":  # which gives NaN
        same_as_eager(fn, *square(), names=NAMES, **FLOAT)


@pytest.mark.parametrize("keys", [8, 10])
def test_a_causal_mask_over_other_keys_stays(keys):
    """Queries and keys must be the same tokens: with a cache the ranges do not start together."""
    _, captured, _ = recognise(CAUSAL["le"], *inputs(tokens=9, keys=keys), names=NAMES)
    assert attention_of(captured.gm).args[3] is not None


@settings(max_examples=8, deadline=None)
@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 5), st.integers(1, 6), st.integers(1, 9))
def test_any_shape(kv_heads, groups, tokens, keys, dim):
    args = inputs(kv_heads * groups, kv_heads, tokens, keys, dim)
    assert same_as_eager(eager, *args, names=NAMES, **FLOAT).count("attention") == 1


def test_symbolic_keys():
    _, _, ctx = recognise(sdpa_repeat, *inputs(), names=NAMES, dynamic=[(1, 2), (2, 2), (3, 3)])
    assert ctx.count("attention") == 1


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (dropout, "dropout 0.1 is active"),
        (sink, "the softmax has an extra column (attention sink)"),
        (other_dim, "the softmax is over dimension -2, not over the keys"),
        (weights_returned, "the attention weights have other readers (output_attentions)"),
        (not_flattened, "the output is not transposed to [B, S, H, D]"),
        (heads_last, "the output is not transposed to [B, S, H, D]"),
        (narrow_values, "values have 3 columns, queries 8"),
        (divided, "the scores come from aten.div.Tensor, not from q @ k.T * scale"),
        (softcap, "the scores are capped (logit softcap)"),
    ],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_refused(fn, reason):
    before, captured, ctx = recognise(fn, *inputs(kv_heads=4), names=NAMES)
    assert ctx.count("attention") == 0
    assert misses(ctx, "attention") == [reason]
    assert show(captured.gm) == before


def test_refuses_causal_over_a_longer_cache():
    _, _, ctx = recognise(sdpa_causal, *inputs(kv_heads=4), names=NAMES)
    assert misses(ctx, "attention") == ["is_causal with 5 queries and 9 keys"]


def test_refuses_a_softmax_in_16_bits():
    def low(q, k, v, mask):
        return flat(torch.matmul(F.softmax(torch.matmul(q, k.transpose(2, 3)) + mask, dim=-1), v))

    _, _, ctx = recognise(low, *inputs(kv_heads=4, dtype=torch.bfloat16), names=NAMES)
    assert misses(ctx, "attention") == ["the softmax is in bfloat16, not in float32"]


def test_a_softmax_alone_is_no_attention():
    _, _, ctx = recognise(lambda q, k, v, mask: F.softmax(q, -1), *inputs(), names=NAMES)
    assert ctx.events == []


def test_a_write_between_the_products():
    def written(q, k, v, mask):
        w = F.softmax(torch.matmul(q, k.transpose(2, 3)) * SCALE, dim=-1)
        k.mul_(2)
        return flat(torch.matmul(w, v))

    ctx = same_as_eager(written, *inputs(kv_heads=4), names=NAMES)
    assert misses(ctx, "attention") == ["something is written in place between the two products"]


def test_a_write_behind_the_attention():
    """The operator stands where the product stood, not where its result is flattened."""

    def written(q, k, v, mask):
        o = F.scaled_dot_product_attention(q, k, v, mask)
        k.mul_(2)
        return flat(o)

    assert same_as_eager(written, *inputs(kv_heads=4), names=NAMES, **FLOAT).count("attention") == 1
