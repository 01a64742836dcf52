"""RMSNorm: what the pass takes, what it refuses, and that eager's roundings stay."""

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from graphs import misses, recognise, same_as_eager, show
from hypothesis import given, settings
from hypothesis import strategies as st

NAMES = ("rms_norm",)
EPS = 1e-5


def llama(x, w):
    h = x.to(torch.float32)
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)
    return w * h.to(x.dtype)


def cast_last(x, w):
    h = x.float()
    return (w * (h * torch.rsqrt((h * h).mean(dim=-1, keepdim=True) + EPS))).to(x.dtype)


def swapped(x, w):
    h = x.float()
    return (torch.rsqrt(h.pow(2).mean(-1, True) + EPS) * h).to(x.dtype) * w


def bare(x, w):
    h = x.float()
    return (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)


def gated(x, w):
    return bare(x, w) * x.sigmoid()


def builtin(x, w):
    return F.rms_norm(x, (x.shape[-1],), w, EPS)


TAKEN = [llama, cast_last, swapped, bare, gated, builtin]


def layer_norm(x, w):
    h = x - x.mean(-1, keepdim=True)
    return w * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS))


def gemma(x, w):
    h = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)
    return h * (1.0 + w)


def no_eps(x, w):
    return w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True)))


def other_dim(x, w):
    return w * (x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + EPS))


def cubes(x, w):
    return w * (x * torch.rsqrt(x.pow(3).mean(-1, keepdim=True) + EPS))


def tensor_eps(x, w):
    return w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + w.abs().mean()))


def builtin_no_eps(x, w):
    return F.rms_norm(x, (x.shape[-1],), w)


def builtin_layer_norm(x, w):
    return F.layer_norm(x, (x.shape[-1],), w, None, EPS)


REFUSED = [
    (layer_norm, "the mean is subtracted first: this is a LayerNorm"),
    (builtin_layer_norm, "the mean is subtracted first: this is a LayerNorm"),
    (gemma, "the gain is computed from a parameter (add.Tensor), such as Gemma's 1 + weight"),
    (no_eps, "no eps is added to the mean of squares"),
    (other_dim, "the mean is over dimensions [1], not the last one"),
    (cubes, "the mean is of power 3, not of squares"),
    (tensor_eps, "eps is computed, not a constant"),
    (builtin_no_eps, "no eps is given"),
]


def inputs(dtype=torch.float32, shape=(2, 5, 24)):
    return torch.randn(shape, dtype=dtype) * 3, torch.rand(shape[-1], dtype=dtype) + 0.5


def test_golden():
    before, captured, ctx = recognise(llama, *inputs(torch.bfloat16), names=NAMES)
    assert_expected_inline(
        before,
        """\
to = to.dtype(x, torch.float32)
pow_1 = pow.Tensor_Scalar(to, 2)
mean = mean.dim(pow_1, [-1], True)
add = add.Tensor(mean, 1e-05)
rsqrt = rsqrt(add)
mul = mul.Tensor(to, rsqrt)
to_1 = to.dtype(mul, torch.bfloat16)
mul_1 = mul.Tensor(w, to_1)
return mul_1
""",
    )
    assert_expected_inline(
        show(captured.gm),
        """\
rms_norm = rms_norm(x, w, 1e-05)
return rms_norm
""",
    )
    assert ctx.count("rms_norm") == 1


def test_golden_gain_before_the_cast():
    _, captured, _ = recognise(cast_last, *inputs(torch.bfloat16), names=NAMES)
    assert_expected_inline(
        show(captured.gm),
        """\
to = to.dtype(x, torch.float32)
rms_norm = rms_norm(to, w, 1e-05)
to_1 = to.dtype(rms_norm, torch.bfloat16)
return to_1
""",
    )


def test_golden_gate_is_no_gain():
    _, captured, _ = recognise(gated, *inputs(), names=NAMES)
    assert_expected_inline(
        show(captured.gm),
        """\
rms_norm = rms_norm(x, None, 1e-05)
sigmoid = sigmoid(x)
mul_1 = mul.Tensor(rms_norm, sigmoid)
return mul_1
""",
    )


@pytest.mark.parametrize("fn", TAKEN, ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_taken(fn, dtype):
    # float32: aten's own rms_norm sums in another order; a few ulps.  16 bits: the same roundings, bit for bit
    exact = {"rtol": 0.0, "atol": 0.0} if dtype != torch.float32 else {"rtol": 1e-6, "atol": 1e-6}
    assert same_as_eager(fn, *inputs(dtype), names=NAMES, **exact).count("rms_norm") == 1


@pytest.mark.parametrize(("fn", "reason"), REFUSED, ids=lambda v: getattr(v, "__name__", ""))
def test_refused(fn, reason):
    before, captured, ctx = recognise(fn, *inputs(), names=NAMES)
    assert ctx.count("rms_norm") == 0
    assert misses(ctx, "rms_norm") == [reason]
    assert show(captured.gm) == before


def test_refuses_a_gain_of_another_shape():
    x, w = torch.randn(2, 5, 24), torch.rand(5, 24)
    _, _, ctx = recognise(llama, x, w, names=NAMES)
    assert misses(ctx, "rms_norm") == ["the gain has shape [5, 24], not [24]"]


def test_refuses_a_mean_in_16_bits():
    def low(x, w):
        return w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS))

    _, _, ctx = recognise(low, *inputs(torch.bfloat16), names=NAMES)
    assert misses(ctx, "rms_norm") == ["the mean is taken in bfloat16, not in float32"]


def test_float32_gain_of_a_16_bit_model():
    x, w = inputs(torch.bfloat16)
    ctx = same_as_eager(llama, x, w.float(), names=NAMES)  # the result is float32, as in eager
    assert ctx.count("rms_norm") == 1


@settings(max_examples=8, deadline=None)
@given(st.integers(1, 3), st.integers(1, 7), st.integers(1, 65), st.sampled_from([1e-6, 1e-5, 0.25]))
def test_any_shape_and_eps(batch, tokens, columns, eps):
    def norm(x, w):
        h = x.float()
        return w * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)

    _, captured, ctx = recognise(norm, *inputs(torch.bfloat16, (batch, tokens, columns)), names=NAMES)
    node = next(n for n in captured.gm.graph.nodes if n.name.startswith("rms_norm"))
    assert ctx.count("rms_norm") == 1
    assert node.args[2] == eps
    assert node.meta["val"].shape == (batch, tokens, columns)


def test_refuses_a_write_between_norm_and_gain():
    def written(x, w):
        h = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)
        x.mul_(2)
        return w * h

    ctx = same_as_eager(written, *inputs(), names=NAMES)
    assert misses(ctx, "rms_norm") == ["something is written in place between the norm and its gain"]


def test_symbolic_sizes():
    _, captured, ctx = recognise(llama, *inputs(), names=NAMES, dynamic=[(0, 1)])
    assert ctx.count("rms_norm") == 1
    node = next(n for n in captured.gm.graph.nodes if n.name.startswith("rms_norm"))
    assert isinstance(node.meta["val"].shape[1], torch.SymInt)
