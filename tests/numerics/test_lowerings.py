"""The table of lowerings: every operator has one, the choice gives reasons, schemas and fakes tell the truth."""

import time

import pytest
import torch
from fu_compile.lowerings import Lowering

from fu_compile import formats as f
from fu_compile import lowerings, ops
from fu_compile.errors import LoweringError

fu = torch.ops.futransformer


def test_every_operator_has_a_reference():
    assert lowerings.TABLE.keys() == ops.SCHEMAS.keys()
    for name, ways in lowerings.TABLE.items():
        assert ways[-1].name == "reference", name
        assert ways[-1].devices == (), name
        assert ways[-1].refuses("anything", ()) is None, name


def test_choose_gives_reasons(monkeypatch):
    reference = lowerings.TABLE["swiglu"][0]
    wide = Lowering("triton", lambda g, u: g * 0 + 7, ("cpu",), lambda g, u: None if g.shape[-1] % 8 == 0 else "N % 8")
    gpu = Lowering("cuda", lambda g, u: g, ("cuda",))
    monkeypatch.setitem(lowerings.TABLE, "swiglu", (gpu, wide, reference))
    x, odd = torch.randn(2, 16), torch.randn(2, 15)
    chosen, passed = lowerings.choose("swiglu", "cpu", x, x)
    assert chosen is wide
    assert passed == [("cuda", "runs on cuda and not on cpu")]
    chosen, passed = lowerings.choose("swiglu", "cpu", odd, odd)
    assert chosen is reference
    assert passed[1] == ("triton", "N % 8")
    assert lowerings.choose("swiglu", "cpu", x, x, lowering="reference")[0] is reference
    with pytest.raises(LoweringError, match="not on cpu"):
        lowerings.choose("swiglu", "cpu", x, x, lowering="cuda")
    with pytest.raises(LoweringError, match="N % 8"):
        lowerings.choose("swiglu", "cpu", odd, odd, lowering="triton")
    # The registered kernel walks the same table.
    run = lowerings._implementation("swiglu")
    assert (run(x, x) == 7).all()
    assert torch.equal(run(odd, odd), reference.launch(odd, odd))
    with lowerings.using("reference"):
        assert torch.equal(run(x, x), reference.launch(x, x))
    with lowerings.using("triton"), pytest.raises(LoweringError):
        run(odd, odd)


def test_unknown_names():
    with pytest.raises(LoweringError, match="rocm"):
        lowerings.choose("swiglu", "cpu", lowering="rocm")
    with pytest.raises(LoweringError, match="conv"):
        lowerings.choose("conv", "cpu")
    with pytest.raises(LoweringError), lowerings.using("rocm"):
        pass
    with pytest.raises(LoweringError, match="cuda"):
        lowerings.choose("residual", "cpu", lowering="cuda")
    x = torch.randn(3)
    with lowerings.using("triton"), pytest.raises(LoweringError):
        fu.residual(x, x, 1.0)
    fu.residual(x, x, 1.0)  # and afterwards everything is as before


def test_dispatch_overhead():
    """Looking into the table costs under 3 us over calling the launch function (B=1 decode makes 150 calls a step)."""
    run, launch = lowerings._implementation("swiglu"), lambda *a: None
    sole = Lowering("reference", launch)
    saved = lowerings.TABLE["swiglu"]
    lowerings.TABLE["swiglu"] = (sole,)
    try:
        run = lowerings._implementation("swiglu")
    finally:
        lowerings.TABLE["swiglu"] = saved
    best = float("inf")
    for _ in range(20):
        start = time.perf_counter()
        for _ in range(1000):
            run(1, 2)
        best = min(best, (time.perf_counter() - start) / 1000)
    assert best < 3e-6, f"{best * 1e6:.2f} us"


def linear_args(epilogue=""):
    n, k = 32, 96
    x = torch.randn(2, 3, k)
    out = n // 2 if "swiglu" in epilogue else n
    tail = (
        torch.randn(n) if "bias" in epilogue else None, torch.randn(2, 3, out) if "residual" in epilogue else None,
        1e-5, 1.0, "rms", epilogue,
    )  # fmt: skip
    return x, torch.randn(n, k), tail


def cache_args(length=70, d=16):
    b, hq, hkv = 2, 4, 2
    qkv = torch.randn(b, 3, (hq + 2 * hkv) * d)
    cos, sin = torch.randn(1, 3, d), torch.randn(1, 3, d)
    keys, values = torch.randn(b, hkv, length, d), torch.randn(b, hkv, length, d)
    store = f.kv_store(b, hkv, length, d)
    return qkv, cos, sin, keys, values, store, f.kv_tables(hkv, d), torch.tensor([62, 63, 64]), (hq, hkv, d)


def samples():
    x = torch.randn(2, 3, 32)
    yield "rms_norm", (x, torch.randn(32), 1e-5)
    yield "rms_norm", (x.bfloat16(), None, 1e-5)
    yield "rotary", (torch.randn(2, 4, 3, 16), torch.randn(1, 3, 8), torch.randn(1, 3, 8))
    yield "swiglu", (x, x)
    yield "residual", (x, x, 0.5)
    ws = [torch.randn(h * 8, 32) for h in (4, 2, 2)]
    yield "qkv", (x, ws, [], None, None, 1e-6, 4, 2, 8)
    yield "qkv", (x[:, :1], [torch.cat(ws)], [torch.randn(64)], torch.ones(8), torch.ones(8), 1e-6, 4, 2, 8)
    yield "attention", (torch.randn(2, 4, 3, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8), None, 0.3, False)
    yield "kv_write_", (torch.zeros(2, 2, 8, 4), torch.tensor([1, 2]), torch.randn(2, 2, 2, 4))
    yield "kv_roll_", (torch.randn(2, 2, 8, 4), torch.randn(2, 2, 1, 4))
    yield "kv_fill_", (torch.randn(2, 2, 8, 4), torch.randn(2, 2, 9, 4))
    yield "kv_cat", (torch.randn(2, 2, 8, 4), torch.randn(2, 2, 1, 4))
    yield "kv_cat", (None, torch.randn(2, 2, 3, 4))
    for epilogue in ("", "bias|swiglu", "bias|residual"):
        x, w, tail = linear_args(epilogue)
        bias, residual, eps, scale, prologue, _ = tail
        yield "linear_bf16", (x.bfloat16(), w.bfloat16(), *tail)
        yield "linear_int4", (x, f.pack_int4(f.quantize_int4(w, 32)), 32, 96, 32, *tail)
        yield "linear_fp8", (x, *f.quantize_fp8(w), f.fp8_state(), *tail, "delayed")
        if "swiglu" in epilogue:
            down, out = f.quantize_fp8(torch.randn(24, 16)), torch.randn(2, 3, 24)
            mlp = (x, *f.quantize_fp8(w), f.fp8_state(), bias, *down, f.fp8_state(), None, out, eps, scale, prologue)
            yield "mlp_fp8", (*mlp, "residual", "delayed")
        biases = [] if bias is None else [bias]
        yield "linear_exact", (x, [w], biases, torch.ones(96), residual, eps, scale, prologue, epilogue)
    packed = f.pack_int4(f.quantize_int4(torch.randn(32, 96), 32))
    yield "packed_weight", (packed, "int4", 32, 96, 32, True, 16, 16, torch.bfloat16)
    qkv, cos, sin, keys, values, store, tables, position, heads = cache_args()
    yield "qkv_rope", (qkv, cos, sin, torch.ones(16), torch.ones(16), 1e-6, *heads)
    rope = (qkv, cos, sin, None, None, 1e-6)
    yield "qkv_append", (*rope, keys, values, *store, *tables, position, *heads)
    yield "attention_int4", (*rope, keys, values, *store, *tables, position, None, 0.3, *heads)
    q, k, v = fu.qkv_rope(*rope, *heads)
    yield "attention_prefill", (q, k, v, keys, values, *store, *tables, position, None, 0.3, False)
    for kv_format in f.KV_FORMATS:
        yield "kv_store", (keys, kv_format)
    channel = f.kv_store(2, 2, 70, 16, kv_format="int4-channel")
    yield "qkv_append", (*rope, keys, values, *channel, *tables, position, *heads)
    yield "attention_int4", (*rope, keys, values, *channel, *tables, position, None, 0.3, *heads)
    yield "kv_append_", (keys, values, *store, *tables, 0, 1)
    k, v = torch.randn(2, 2, 3, 16), torch.randn(2, 2, 3, 16)
    page = (torch.randn(2, 2, 64, 16), torch.randn(2, 2, 64, 16))
    yield "kv_extend_", (k, v, *page, *store, *tables, position)
    yield "kv_update", (k, v, *page, *store, *tables, position, 70)
    yield "kv_round", (k, v, *tables)
    yield "kv_dequantize", (store[0], store[1], *tables, 1)
    yield "kv_dequantize", (channel[0], channel[1], *tables, 1)
    yield "kv_dequantize", (store[2], store[3], None, None, 2)


SAMPLES = list(samples())


def test_samples_cover_every_operator():
    assert {name for name, _ in SAMPLES} == ops.SCHEMAS.keys()


@pytest.mark.parametrize("index", range(len(SAMPLES)), ids=[f"{n}-{i}" for i, (n, _) in enumerate(SAMPLES)])
def test_schema_and_fake(index):
    """The schema says what is written, the fake says shape, dtype and strides (torch.library.opcheck)."""
    name, args = SAMPLES[index]
    # opcheck compares inputs before and after with allclose, which PyTorch does not have for e4m3.
    utils = ("test_faketensor",) if name in ("linear_fp8", "mlp_fp8") else ("test_schema", "test_faketensor")
    with torch.no_grad():
        torch.library.opcheck(ops.op(name), args, test_utils=utils)


def test_fp8_writes_its_state_only():
    x, w, tail = linear_args("bias|residual")
    args = (x, *f.quantize_fp8(w), f.fp8_state(), *tail, "delayed")
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    before = [t.clone() for t in tensors]
    versions = [t._version for t in tensors]
    with torch.no_grad():
        fu.linear_fp8(*args)
    for i, (t, old) in enumerate(zip(tensors, before, strict=True)):
        assert torch.equal(t.view(torch.uint8), old.view(torch.uint8)) == (i != 3)
        assert (t._version > versions[i]) == (i == 3)


def test_cache_writes_move_versions():
    """The runtime notices foreign writes by version, so ours must move them too, and only those of what we write."""
    qkv, cos, sin, keys, values, store, tables, position, heads = cache_args()
    written, read = (keys, values, *store), (qkv, cos, sin, *tables)
    before = [t._version for t in (*written, *read)]
    with torch.no_grad():
        fu.qkv_append(qkv, cos, sin, None, None, 1e-6, keys, values, *store, *tables, position, *heads)
    after = [t._version for t in (*written, *read)]
    assert all(a > b for a, b in zip(after[:6], before[:6], strict=True))
    assert after[6:] == before[6:]
