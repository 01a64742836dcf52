"""The projections in front of an attention: three linears or one, biases, norms per head; and what is refused."""

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from graphs import misses, recognise, same_as_eager, show

NAMES = ("rms_norm", "rotary", "kv_write", "attention", "qkv")
HQ, HKV, D, K = 4, 2, 6, 10
FLOAT = {"rtol": 1e-5, "atol": 1e-5}  # float32; attention may sum in another order


def heads(y):
    return y.view(y.shape[0], y.shape[1], -1, D)


def attend(q, k, v):
    o = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    return o.transpose(1, 2).reshape(q.shape[0], q.shape[2], -1)


def norm(x, w, eps=1e-6):
    return w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))


def three(x, wq, wk, wv, b, g):
    q, k, v = (heads(F.linear(x, w)).transpose(1, 2) for w in (wq, wk, wv))
    return attend(q, k, v)


def biased(x, wq, wk, wv, b, g):
    q, k, v = (heads(F.linear(x, w, b[: w.shape[0]])).transpose(1, 2) for w in (wq, wk, wv))
    return attend(q, k, v)


def fused(x, wq, wk, wv, b, g):
    y = F.linear(x, torch.cat([wq, wk, wv]))
    q, k, v = y[..., : HQ * D], y[..., HQ * D : (HQ + HKV) * D], y[..., (HQ + HKV) * D :]
    return attend(*(heads(t).transpose(1, 2) for t in (q, k, v)))


def normed_params(x, wq, wk, wv, b, g):
    q, k, v = (heads(F.linear(x, w)) for w in (wq, wk, wv))
    return attend(norm(q, b).transpose(1, 2), norm(k, g).transpose(1, 2), v.transpose(1, 2))


def other_inputs(x, wq, wk, wv, b, g):
    q, k, v = (heads(F.linear(y, w)).transpose(1, 2) for y, w in ((x, wq), (x + 1, wk), (x, wv)))
    return attend(q, k, v)


def clamped(x, wq, wk, wv, b, g):
    q, k, v = (heads(F.linear(x, w).clamp(-1, 1)).transpose(1, 2) for w in (wq, wk, wv))
    return attend(q, k, v)


def shared_projection(x, wq, wk, wv, b, g):
    y = F.linear(x, wk)
    return attend(
        heads(F.linear(x, wq)).transpose(1, 2), heads(y).transpose(1, 2), heads(F.linear(x, wv)).transpose(1, 2)
    ), y


def some_biases(x, wq, wk, wv, b, g):
    q, k, v = heads(F.linear(x, wq, b[: HQ * D])), heads(F.linear(x, wk)), heads(F.linear(x, wv))
    return attend(*(t.transpose(1, 2) for t in (q, k, v)))


def crossed(x, wq, wk, wv, b, g):
    y = F.linear(x, torch.cat([wq, wk, wv]))
    q, v, k = y[..., : HQ * D], y[..., HQ * D : (HQ + HKV) * D], y[..., (HQ + HKV) * D :]
    return attend(*(heads(t).transpose(1, 2) for t in (q, k, v)))


def key_norm_only(x, wq, wk, wv, b, g):
    q, k, v = (heads(F.linear(x, w)) for w in (wq, wk, wv))
    return attend(q.transpose(1, 2), norm(k, g).transpose(1, 2), v.transpose(1, 2))


def two_eps(x, wq, wk, wv, b, g):
    q, k, v = (heads(F.linear(x, w)) for w in (wq, wk, wv))
    return attend(norm(q, g, 1e-6).transpose(1, 2), norm(k, g, 1e-5).transpose(1, 2), v.transpose(1, 2))


def inputs(norms=False):
    wq, wk, wv = (torch.randn(n * D, K) for n in (HQ, HKV, HKV))
    if norms:
        return torch.randn(2, 5, K), wq, wk, wv, torch.rand(D) + 0.5, torch.rand(D) + 0.5
    return torch.randn(2, 5, K), wq, wk, wv, torch.randn(HQ * D), torch.rand(D) + 0.5


def test_golden_three():
    before, captured, _ = recognise(biased, *inputs(), names=NAMES)
    assert_expected_inline(
        before,
        """\
linear = linear(x, wq, b)
view = view(linear, [2, 5, -1, 6])
transpose = transpose.int(view, 1, 2)
slice_2 = slice.Tensor(b, 0, 0, 12)
linear_1 = linear(x, wk, slice_2)
view_1 = view(linear_1, [2, 5, -1, 6])
transpose_1 = transpose.int(view_1, 1, 2)
linear_2 = linear(x, wv, slice_2)
view_2 = view(linear_2, [2, 5, -1, 6])
transpose_2 = transpose.int(view_2, 1, 2)
scaled_dot_product_attention = scaled_dot_product_attention(transpose, transpose_1, transpose_2, enable_gqa=True)
transpose_3 = transpose.int(scaled_dot_product_attention, 1, 2)
reshape = reshape(transpose_3, [2, 5, -1])
return reshape
""",
    )
    assert_expected_inline(
        show(captured.gm),
        """\
slice_2 = slice.Tensor(b, 0, 0, 12)
qkv = qkv(x, [wq, wk, wv], [b, slice_2, slice_2], None, None, 0.0, 4, 2, 6)
getitem = getitem(qkv, 0)
getitem_1 = getitem(qkv, 1)
getitem_2 = getitem(qkv, 2)
attention = attention(getitem, getitem_1, getitem_2, None, 0.4082482904638631, False)
return attention
""",
    )


def test_golden_fused():
    _, captured, _ = recognise(fused, *inputs(), names=NAMES)
    assert_expected_inline(
        show(captured.gm),
        """\
cat = cat([wq, wk, wv])
qkv = qkv(x, [cat], [], None, None, 0.0, 4, 2, 6)
getitem = getitem(qkv, 0)
getitem_1 = getitem(qkv, 1)
getitem_2 = getitem(qkv, 2)
attention = attention(getitem, getitem_1, getitem_2, None, 0.4082482904638631, False)
return attention
""",
    )


def test_golden_norms():
    _, captured, _ = recognise(normed_params, *inputs(norms=True), names=NAMES)
    assert_expected_inline(
        show(captured.gm),
        """\
qkv = qkv(x, [wq, wk, wv], [], b, g, 1e-06, 4, 2, 6)
getitem = getitem(qkv, 0)
getitem_1 = getitem(qkv, 1)
getitem_2 = getitem(qkv, 2)
attention = attention(getitem, getitem_1, getitem_2, None, 0.4082482904638631, False)
return attention
""",
    )


@pytest.mark.parametrize("fn", [three, biased, fused], ids=lambda f: f.__name__)
def test_taken(fn):
    assert same_as_eager(fn, *inputs(), names=NAMES, **FLOAT).count("qkv") == 1


def test_norms_are_absorbed():
    assert same_as_eager(normed_params, *inputs(norms=True), names=NAMES, **FLOAT).count("qkv") == 1


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (other_inputs, "queries, keys and values are projections of different inputs"),
        (clamped, "aten.clamp.default stands between the linear and the queries"),
        (shared_projection, "the projection of the keys has other readers"),
        (some_biases, "only some of the projections have a bias"),
        (crossed, "the columns of the fused projection are cut at [0, 36, 24], not at [0, 24, 36]"),
        (key_norm_only, "not both, or not only, queries and keys are normalised"),
        (two_eps, "the norms of queries and keys have different eps"),
    ],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_refused(fn, reason):
    _, captured, ctx = recognise(fn, *inputs(), names=NAMES)
    assert ctx.count("attention") == 1
    assert misses(ctx, "qkv") == [reason]
    assert "qkv(" not in show(captured.gm)


def test_refuses_a_norm_over_the_whole_projection():
    x, wq, wk, wv, _, _ = inputs()

    def olmo2(x, wq, wk, wv, gq, gk):
        q, k, v = norm(F.linear(x, wq), gq), norm(F.linear(x, wk), gk), F.linear(x, wv)
        return attend(*(heads(t).transpose(1, 2) for t in (q, k, v)))

    _, _, ctx = recognise(olmo2, x, wq, wk, wv, torch.rand(HQ * D), torch.rand(HKV * D), names=NAMES)
    assert misses(ctx, "qkv") == ["the norm of the queries is over the whole projection, not per head (OLMo2)"]


def test_refuses_a_write_between_the_projections():
    def written(x, wq, wk, wv, b, g):
        q = heads(F.linear(x, wq)).transpose(1, 2)
        x.mul_(2)
        k, v = (heads(F.linear(x, w)).transpose(1, 2) for w in (wk, wv))
        return attend(q, k, v)

    assert same_as_eager(written, *inputs(), names=NAMES, **FLOAT).count("qkv") == 0
