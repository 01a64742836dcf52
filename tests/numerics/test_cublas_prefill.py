"""The prefill lowerings that call CUDA libraries, run on the CPU, where PyTorch has the same functions."""

import pytest
import torch
from fu_compile.lowerings import TABLE, cublas_prefill, pages, reference_attention, reference_linear, rms_norm_sm90
from fu_compile.lowerings.dense import dense_bytes

from fu_compile import formats, jit


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("epilogue", ["", "bias", "residual", "swiglu"])
def test_fp8_linear_is_the_reference(dtype, epilogue):
    n, k = 96, 64
    codes, scales = formats.quantize_fp8(torch.randn(n, k) / k**0.5)
    bias = torch.randn(n).to(dtype) if epilogue == "bias" else None
    states = [torch.zeros(formats.FP8_STATE) for _ in range(2)]
    for tokens in (1, 17, 40):
        x = torch.randn(2, tokens, k).to(dtype)
        residual = torch.randn(2, tokens, n).to(dtype) if epilogue == "residual" else None
        args = (bias, residual, 1e-5, 0.5, "rms", epilogue, "delayed")
        y = cublas_prefill.linear_fp8(x, codes, scales, states[0], *args)
        want = reference_linear.linear_fp8(x, codes, scales, states[1], *args)
        # float32 sums of the same products in another order, then one rounding
        torch.testing.assert_close(y, want, rtol=2**-7 if dtype == torch.bfloat16 else 2**-10, atol=1e-5)
        assert torch.equal(states[0], states[1])


@pytest.mark.parametrize("bias", [False, True])
def test_fp8_mlp_is_the_reference(bias):
    n, k, out = 96, 64, 48
    weights, down = formats.quantize_fp8(torch.randn(n, k) / k**0.5), formats.quantize_fp8(torch.randn(out, n // 2) / 7)
    states = [torch.zeros(formats.FP8_STATE) for _ in range(4)]
    b = torch.randn(n).bfloat16() if bias else None
    for tokens in (1, 40):
        # so many rows that the codes which differ average out, at one token too
        x, residual = torch.randn(32, tokens, k).bfloat16(), torch.randn(32, tokens, out).bfloat16()
        tail = (None, residual, 1e-5, 0.5, "rms", "residual", "delayed")
        y = cublas_prefill.mlp_fp8(x, *weights, states[0], b, *down, states[1], *tail)
        want = reference_linear.mlp_fp8(x, *weights, states[2], b, *down, states[3], *tail)
        # the row between is rounded to bfloat16 first, which moves some of its codes by a step of 2^-3 at most
        assert float((y.float() - want.float()).norm() / want.float().norm()) < 2e-2
        torch.testing.assert_close(states[1], states[3], rtol=2**-8, atol=0.0)
    refuses = cublas_prefill.ACCEPTS["mlp_fp8"]
    assert "multiples of 16" in refuses(x, weights[0][:31], weights[1], states[0], b, *down, states[1], *tail)
    assert "16 bits" in refuses(x.float(), *weights, states[0], b, *down, states[1], *tail)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("epilogue", ["", "bias|swiglu", "residual"])
def test_int4_linear_is_the_reference_and_keeps_no_copy(dtype, epilogue):
    n, k = 96, 200
    packed = formats.pack_int4(formats.quantize_int4(torch.randn(n, k) / k**0.5, 64))
    bias = torch.randn(n).to(dtype) if "bias" in epilogue else None
    x = torch.randn(2, 70, k).to(dtype)
    residual = torch.randn(2, 70, n).to(dtype) if "residual" in epilogue else None
    gain = None if dtype == torch.float16 else torch.rand(k).to(dtype) + 0.5
    args = (n, k, 64, bias, residual, 1e-5, 0.5, "rms", epilogue, gain)
    y = cublas_prefill.linear_int4(x, packed, *args)
    assert dense_bytes(packed) == 0
    want = reference_linear.linear_int4(x, packed, *args)
    # weight, row and product are each rounded once more than in the reference
    assert float((y.float() - want.float()).norm() / want.float().norm()) < (6e-3 if gain is not None else 8e-4)
    assert "16 bits" in cublas_prefill.ACCEPTS["linear_int4"](x.float(), packed, n, k)


@pytest.mark.parametrize("heads", [(8, 2), (4, 4)])
@pytest.mark.parametrize("tokens", [1, 50])
def test_fresh_attention(heads, tokens):
    q, k, v = (torch.randn(2, h, tokens, 32).bfloat16() for h in (*heads, heads[1]))
    rest = (None,) * 9 + (None, 0.2, True)
    y = cublas_prefill.attention_prefill(q, k, v, *rest)
    want = reference_attention.attention_prefill(q, k, v, *rest)
    assert y.shape == want.shape
    # softmax weights in bfloat16 and one rounding of the output
    assert float((y.float() - want.float()).norm() / want.float().norm()) < 4e-3


def test_an_empty_cache_is_the_call_alone(monkeypatch):
    """Told where it stands it reads nothing, decodes nothing and takes the causal path: the bits of a fresh call."""
    q, k, v = (torch.randn(2, h, 70, 32).bfloat16() for h in (8, 2, 2))
    keys, values = (torch.randn(2, 2, 200, 32).bfloat16() for _ in range(2))
    store, tables = formats.kv_store(2, 2, 200, 32), formats.kv_tables(2, 32)
    nowhere = torch.empty(70, dtype=torch.int64, device="meta")  # reading it raises
    calls, real = [], torch.nn.functional.scaled_dot_product_attention

    def watched(*args, **how):
        calls.append((how.get("is_causal", False), how.get("attn_mask") is not None))
        return real(*args, **how)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    monkeypatch.setattr(cublas_prefill, "seen", None)
    with pages.calling(0):
        y = cublas_prefill.attention_prefill(q, k, v, keys, values, *store, *tables, nowhere, None, 0.2, False)
    assert calls == [(True, False)]
    assert torch.equal(y, cublas_prefill.attention_prefill(q, k, v, *(None,) * 9, None, 0.2, True))
    with pytest.raises(RuntimeError, match="meta"):
        cublas_prefill.attention_prefill(q, k, v, keys, values, *store, *tables, nowhere, None, 0.2, False)


@pytest.mark.parametrize("kv_format", formats.KV_FORMATS)
@pytest.mark.parametrize("kind", ["none", "bool", "added"])
@pytest.mark.parametrize(("first", "tokens"), [(0, 1), (0, 70), (64, 5), (100, 40)])
def test_attention_over_a_cache(kv_format, kind, first, tokens):
    """Pages as they decode, the rest exactly; padding, a query that sees nothing, NaN in a slot that nobody sees."""
    batch, heads, kv, dim, length = 2, 8, 2, 32, 200
    q = torch.randn(batch, heads, tokens, dim).bfloat16()
    k, v = (torch.randn(batch, kv, tokens, dim).bfloat16() for _ in range(2))
    keys, values = (torch.randn(batch, kv, length, dim).bfloat16() for _ in range(2))
    store = formats.kv_store(batch, kv, length, dim, kv_format=kv_format)
    tables = formats.kv_tables(kv, dim)
    reference_attention.kv_append_(keys, values, *store, *tables, 0, length // 64)
    position = torch.arange(first, first + tokens)
    keys[:, :, position], values[:, :, position] = k, v
    mask = None
    if kind != "none":
        mask = (torch.arange(length) <= position[:, None]).expand(batch, 1, -1, -1).clone()
        mask[1, :, :, : min(first + tokens - 1, 3)] = False  # left padding
        if first + tokens > 3:
            for cached, own in ((keys, k), (values, v)):
                cached[1, :, 0] = float("nan")
                if not first:
                    own[1, :, 0] = float("nan")
        if tokens > 1:
            mask[0, :, 1] = False
        if kind == "added":
            mask = torch.zeros(mask.shape).masked_fill(~mask, float("-inf"))
    args = (q, k, v, keys, values, *store, *tables, position, mask, 0.2, False)
    y, want = cublas_prefill.attention_prefill(*args), reference_attention.attention_prefill(*args)
    assert torch.isfinite(want).all()
    # decoded pages and softmax weights in bfloat16, and one rounding of the output
    assert float((y.float() - want.float()).norm() / want.float().norm()) < 6e-3


def test_what_is_refused_says_why():
    linear, attention = cublas_prefill.ACCEPTS["linear_fp8"], cublas_prefill.ACCEPTS["attention_prefill"]
    codes, scales = formats.quantize_fp8(torch.randn(32, 64))
    x, rest = torch.zeros(3, 64).bfloat16(), (scales, scales, None, None, 0.0, 1.0, "", "")
    assert "not quantised" in linear(x, codes, *rest, "none")
    assert "16 bits" in linear(x.float(), codes, *rest, "delayed")
    assert "multiples of 16" in linear(x, codes[:31], *rest, "delayed")
    q = torch.zeros(1, 2, 5, 8).bfloat16()
    nine = (None,) * 9
    assert "16 bits" in attention(q.float(), q, q, *nine, None, 0.1, True)
    assert attention(q, q, q, *nine, None, 0.1, True) is None
    gain = torch.zeros(4096).bfloat16()
    assert "Hopper" in rms_norm_sm90.accepts(torch.zeros(2, 4096).bfloat16(), gain, 1e-5) or torch.cuda.is_available()
    assert "columns" in rms_norm_sm90.accepts(torch.zeros(2, 128).bfloat16(), gain, 1e-5)
    assert "rows" in rms_norm_sm90.accepts(torch.zeros(70, 4096).bfloat16(), gain, 1e-5)
    assert "gain" in rms_norm_sm90.accepts(torch.zeros(2, 4096).bfloat16(), None, 1e-5)


def test_decode_kernels_come_first():
    assert [c.name for c in TABLE["linear_fp8"]] == ["cuda", "cuda", "cuda", "cpu", "reference"]
    assert TABLE["linear_fp8"][2].launch is cublas_prefill.linear_fp8


@pytest.mark.parametrize("k", [512, 4096, 32768])
def test_rms_norm_compiles(k, tmp_path, monkeypatch):
    monkeypatch.setenv("FU_CACHE_DIR", str(tmp_path))
    kernel = rms_norm_sm90.kernel(k, 1, False)
    jit.warmup([kernel], progress=False)
    assert kernel.cubin.resources.spill_stores == 0
