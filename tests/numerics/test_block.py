"""The recognised operators against transformers' own Llama code: the same bits where the same ATen calls are made."""

import pytest
import torch
from transformers.models.llama import modeling_llama as llama

from fu_compile.errors import CacheLengthError

fu = torch.ops.futransformer
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


@dtypes
def test_rms_norm(dtype):
    norm = llama.LlamaRMSNorm(96, eps=1e-5).to(dtype)
    norm.weight.data = torch.randn(96).to(dtype)
    x = (torch.randn(2, 7, 96) * 5).to(dtype)
    assert torch.equal(fu.rms_norm(x, norm.weight, 1e-5), norm(x))
    norm.weight.data.fill_(1.0)
    assert torch.equal(fu.rms_norm(x, None, 1e-5), norm(x))
    assert not torch.equal(fu.rms_norm(x, None, 1e-1), norm(x))
    # A float32 gain on 16-bit rows promotes, as eager does and as the fake says.
    mixed = fu.rms_norm(x, torch.ones(96), 1e-5)
    assert mixed.dtype == torch.float32


@dtypes
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("tokens", [1, 5])
def test_rotary(dtype, batch, tokens):
    q, k = torch.randn(2, 4, tokens, 16).to(dtype), torch.randn(2, 2, tokens, 16).to(dtype)
    angle = torch.rand(batch, tokens, 8) * 6
    angle = torch.cat((angle, angle), -1)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    a, b = llama.apply_rotary_pos_emb(q, k, cos, sin)
    assert torch.equal(fu.rotary(q, cos, sin), a)
    assert torch.equal(fu.rotary(k, cos, sin), b)
    # Partial rotation: the columns behind R pass through.
    wide = torch.randn(2, 4, tokens, 24).to(dtype)
    y = fu.rotary(wide, cos, sin)
    assert torch.equal(y[..., :16], llama.apply_rotary_pos_emb(wide[..., :16], k, cos, sin)[0])
    assert torch.equal(y[..., 16:], wide[..., 16:])


@dtypes
def test_swiglu_and_residual(dtype):
    gate, up = torch.randn(2, 3, 40).to(dtype), torch.randn(2, 3, 40).to(dtype)
    assert torch.equal(fu.swiglu(gate, up), torch.nn.functional.silu(gate) * up)
    assert torch.equal(fu.residual(gate, up, 1.0), gate + up)
    assert torch.equal(fu.residual(gate, up, 0.22), gate + up * 0.22)


@dtypes
@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_qkv(dtype, tokens, norms, fused):
    hq, hkv, d, k = 4, 2, 8, 24
    x = torch.randn(2, tokens, k).to(dtype)
    ws = [torch.randn(h * d, k).to(dtype) for h in (hq, hkv, hkv)]
    bs = [torch.randn(h * d).to(dtype) for h in (hq, hkv, hkv)]
    gains = [torch.randn(d).to(dtype) for _ in range(2)] if norms else [None, None]
    if fused:
        y = torch.nn.functional.linear(x, torch.cat(ws), torch.cat(bs)).split([hq * d, hkv * d, hkv * d], -1)
        got = fu.qkv(x, [torch.cat(ws)], [torch.cat(bs)], *gains, 1e-6, hq, hkv, d)
    else:
        y = [torch.nn.functional.linear(x, w, b) for w, b in zip(ws, bs, strict=True)]
        got = fu.qkv(x, ws, bs, *gains, 1e-6, hq, hkv, d)
    for part, ours, gain in zip(y, got, [*gains, None], strict=True):
        heads = part.reshape(2, tokens, -1, d)
        if gain is not None:
            norm = llama.LlamaRMSNorm(d).to(dtype)
            norm.weight.data = gain
            heads = norm(heads)
        assert torch.equal(ours, heads.transpose(1, 2))
        assert ours.is_contiguous()
    assert len({t.untyped_storage().data_ptr() for t in got}) == 3  # outputs do not share memory


def eager_attention(q, k, v, mask, scale):
    """Matmul, softmax, matmul in float64; mask: bool, additive or none. Blind rows give zeros."""
    rep = q.shape[1] // k.shape[1]
    k, v = k.double().repeat_interleave(rep, 1), v.double().repeat_interleave(rep, 1)
    scores = q.double() @ k.transpose(-1, -2) * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask.double()
    p = torch.softmax(scores, -1).nan_to_num(0.0)
    return (p @ v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("heads", [(4, 4), (9, 3), (8, 1), (14, 2)])
@pytest.mark.parametrize("head_dim", [8, 16, 80, 96, 256])
@pytest.mark.parametrize("tokens", [1, 6])
@pytest.mark.parametrize("kind", ["none", "causal", "bool", "float", "per head", "blind"])
def test_attention(heads, head_dim, tokens, kind):
    hq, hkv = heads
    length = tokens if kind == "causal" else 11
    q, k, v = (torch.randn(2, h, n, head_dim) for h, n in ((hq, tokens), (hkv, length), (hkv, length)))
    bools = torch.rand(2, 1, tokens, length) > 0.4
    bools[..., 0] = True
    mask = {
        "none": None, "bool": bools, "float": torch.randn(1, 1, tokens, length),
        "per head": torch.randn(2, hq, tokens, length),
    }.get(kind)  # fmt: skip
    if kind == "blind":
        mask = bools.clone()
        mask[0, :, 0] = False
    shown = torch.ones(tokens, tokens).tril().bool()[None, None] if kind == "causal" else mask
    y = fu.attention(q, k, v, mask, 0.3, kind == "causal")
    # float32 softmax and sums over 11 keys: 1e-5 of unit-variance values is 50 times float32's rounding.
    torch.testing.assert_close(y.double(), eager_attention(q, k, v, shown, 0.3), rtol=0, atol=1e-5)
    assert y.is_contiguous()
    if kind == "blind":
        assert not y[0, 0].any()


@dtypes
@pytest.mark.parametrize("tokens", [1, 5])
def test_attention_is_sdpa(dtype, tokens):
    """The bits of SDPA with repeated heads, which is what transformers calls."""
    q, k, v = (torch.randn(2, h, n, 32).to(dtype) for h, n in ((6, tokens), (2, 9), (2, 9)))
    mask = torch.rand(2, 1, tokens, 9) > 0.3
    mask[..., 0] = True
    k3, v3 = llama.repeat_kv(k, 3), llama.repeat_kv(v, 3)
    y = torch.nn.functional.scaled_dot_product_attention(q, k3, v3, attn_mask=mask, scale=0.2)
    ours = fu.attention(q, k, v, mask, 0.2, False)
    if tokens > 1:
        assert torch.equal(ours, y.transpose(1, 2).flatten(2))
    else:  # heads as rows: another order of sums inside the kernel
        tolerance = {torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype]  # some units of the last place
        torch.testing.assert_close(ours, y.transpose(1, 2).flatten(2), rtol=0, atol=tolerance)


def test_cache_writes():
    cache = torch.randn(2, 2, 8, 4)
    before, x = cache.clone(), torch.randn(2, 2, 3, 4)
    fu.kv_write_(cache, torch.tensor([2, 3, 4]), x)
    assert torch.equal(cache[:, :, 2:5], x)
    assert torch.equal(cache[:, :, 5:], before[:, :, 5:])
    before = cache.clone()
    for position in ([6, 7, 8], [-1, 0, 1]):
        with pytest.raises(CacheLengthError):
            fu.kv_write_(cache, torch.tensor(position), x)
    assert torch.equal(cache, before)  # refused before anything was written

    one = torch.randn(2, 2, 1, 4)
    fu.kv_roll_(cache, one)
    assert torch.equal(cache, torch.cat((before[:, :, 1:], one), 2))
    long = torch.randn(2, 2, 11, 4)
    fu.kv_fill_(cache, long)
    assert torch.equal(cache, long[:, :, -8:])
    with pytest.raises(CacheLengthError):
        fu.kv_fill_(cache, x)

    grown = fu.kv_cat(cache, x)
    assert torch.equal(grown, torch.cat((cache, x), 2))
    first = fu.kv_cat(None, x.transpose(0, 1))
    assert torch.equal(first, x.transpose(0, 1))
    first.zero_()
    assert x.any()  # a copy
