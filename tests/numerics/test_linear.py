"""The projections against float64: every prologue and epilogue, ragged shapes, poisoned padding, dense memo."""

import copy
import gc
import io
import itertools

import pytest
import torch
from fu_compile.lowerings import choose, dense, reference_linear, using
from hypothesis import given, settings
from hypothesis import strategies as st

from fu_compile import formats as f
from fu_compile import ops
from fu_compile.errors import FormatError

fu = torch.ops.futransformer
EPILOGUES = ["|".join(n) for r in range(4) for n in itertools.combinations(ops.EPILOGUE_ORDER, r)]
EPS, SCALE = 1e-5, 0.22


@pytest.fixture(autouse=True)
def specification():
    """The operators' meaning, whatever faster lowering there is."""
    with torch.no_grad(), using("reference"):
        yield


def reference(x, w, bias, residual, prologue, epilogue, gain=None):
    """ops.py's meaning in float64; w: [N, K] as it decodes."""
    row = x.double() if gain is None else (x.double() * gain.double()).to(x.dtype).double()
    if prologue == "rms":
        row = row / torch.sqrt(x.double().pow(2).mean(-1, keepdim=True) + EPS)
    y = row @ w.double().T
    steps = epilogue.split("|")
    if "bias" in steps:
        y = y + bias.double()
    if "swiglu" in steps:
        gate, up = y.chunk(2, -1)
        y = gate * torch.sigmoid(gate) * up
    return residual.double() + SCALE * y if "residual" in steps else y


def operands(n, k, epilogue, dtype, tokens=(2, 3)):
    x = torch.randn(*tokens, k).to(dtype)
    steps = epilogue.split("|")
    out = n // 2 if "swiglu" in steps else n
    bias = torch.randn(n).to(dtype) if "bias" in steps else None
    residual = torch.randn(*tokens, out).to(dtype) if "residual" in steps else None
    return x, bias, residual


def close(y, expected, dtype, size=None):
    """size: sum of the products' absolute values, where there are too few outputs for the largest to stand for it."""
    assert y.dtype == dtype
    # One rounding to dtype: half a unit. float32 accumulation over K <= 1000 stays below 2e-6 of the largest value.
    half_unit = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[dtype]
    bound = expected.abs() * half_unit + 4e-6 * (expected.abs().max() if size is None else size)
    assert ((y.double() - expected).abs() <= bound).all(), float(((y.double() - expected).abs() / bound).max())


def pack(w, group, grid, paired):
    """Packed bytes and the weight they stand for, in [gate; up] order."""
    q = f.quantize_int4(w, group, grid)
    decoded = f.dequantize_int4(q)
    if paired:
        order = f.interleave_gate_up(w.shape[0])
        q = f.Int4Codes(q.codes[order], q.scales[order], q.zeros[order], group)
    return f.pack_int4(q), decoded


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("prologue", ["", "rms"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int4(prologue, epilogue, dtype):
    n, k, group = 44, 300, 64  # 22 gate rows: a ragged strip; 300 columns: a ragged group and tile
    packed, decoded = pack(torch.randn(n, k), group, "asym", "swiglu" in epilogue)
    x, bias, residual = operands(n, k, epilogue, dtype)
    y = fu.linear_int4(x, packed, n, k, group, bias, residual, EPS, SCALE, prologue, epilogue)
    close(y, reference(x, decoded, bias, residual, prologue, epilogue), dtype)


@pytest.mark.parametrize("epilogue", ["", "bias|swiglu|residual"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int4_takes_the_gain(dtype, epilogue):
    n, k, group = 44, 300, 64
    packed, decoded = pack(torch.randn(n, k), group, "asym", "swiglu" in epilogue)
    x, bias, residual = operands(n, k, epilogue, dtype)
    x[0, 0, :7] *= 3000  # a massive activation under the largest gains
    gain = torch.rand(k).mul(3).to(dtype)
    gain[5], gain[6], gain[7] = 40, 0, -2
    args = (packed, n, k, group, bias, residual, EPS, SCALE, "rms", epilogue)
    y = fu.linear_int4(x, *args, gain)
    close(y, reference(x, decoded, bias, residual, "rms", epilogue, gain), dtype)
    assert not torch.allclose(y, fu.linear_int4(x, *args))  # it does something
    assert torch.equal(fu.linear_int4(x, *args, torch.ones(k, dtype=dtype)), fu.linear_int4(x, *args))


def test_a_gain_needs_a_norm_and_one_value_for_each_feature():
    packed, _ = pack(torch.randn(16, 128), 128, "sym8", False)
    for name in ("reference", "cpu"):
        with using(name):
            for prologue, length in (("", 128), ("rms", 127)):
                args = (packed, 16, 128, 128, None, None, EPS, 1.0, prologue, "", torch.ones(length).bfloat16())
                with pytest.raises(FormatError, match="gain"):
                    fu.linear_int4(torch.randn(1, 128).bfloat16(), *args)


@settings(max_examples=15, deadline=None)
@given(
    st.integers(1, 40),
    st.sampled_from([1, 288, 576, 896]),
    st.sampled_from(f.GROUPS),
    st.sampled_from(["sym8", "asym"]),
    st.sampled_from([(), (1,), (1, 1), (5, 7)]),
    st.integers(0, 2**31),
)
def test_int4_shapes(n, k, group, grid, tokens, seed):
    torch.manual_seed(seed)
    packed, decoded = pack(torch.randn(n, k), group, grid, False)
    x, *_ = operands(n, k, "", torch.float32, tokens)
    y = fu.linear_int4(x, packed, n, k, group, None, None, EPS, 1.0, "rms", "")
    assert y.shape == (*tokens, n)
    size = reference(x.abs(), decoded.abs(), None, None, "rms", "").max()
    close(y, reference(x, decoded, None, None, "rms", ""), torch.float32, size)


def test_int4_padding_is_invisible():
    """Every byte that belongs to padding may hold anything: the result does not change (B28)."""
    n, k, group = 5, 100, 32
    packed, _ = pack(torch.randn(n, k), group, "sym8", False)
    rows, cols = 16, 128
    q = f.unpack_int4(packed, rows, cols, group)
    codes, scales, zeros = q.codes.clone(), q.scales.clone(), q.zeros.clone()
    codes[n:], codes[:, k:] = 3, 5
    scales[n:], zeros[n:] = float("nan"), 1
    poisoned = f.pack_int4(f.Int4Codes(codes, scales, zeros, group))
    assert not torch.equal(poisoned, packed)
    x = torch.randn(3, k)
    args = (n, k, group, None, None, EPS, 1.0, "", "")
    assert torch.equal(fu.linear_int4(x, poisoned, *args), fu.linear_int4(x, packed, *args))


@pytest.mark.parametrize("epilogue", ["", "bias", "bias|swiglu|residual"])
@pytest.mark.parametrize("prologue", ["", "rms"])
@pytest.mark.parametrize(("dtype", "weight_dtype"), [(torch.float32, torch.bfloat16), (torch.float16, torch.float16)])
def test_bf16(prologue, epilogue, dtype, weight_dtype):
    w = torch.randn(24, 80).to(weight_dtype)
    x, bias, residual = operands(24, 80, epilogue, dtype)
    y = fu.linear_bf16(x, w, bias, residual, EPS, SCALE, prologue, epilogue)
    close(y, reference(x, w, bias, residual, prologue, epilogue), dtype)


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("prologue", ["", "rms"])
@pytest.mark.parametrize("scaling", f.FP8_SCALINGS)
def test_fp8(prologue, epilogue, scaling):
    """P(x) as its codes decode, against the dequantised weight."""
    n, k = 24, 80
    w, s = f.quantize_fp8(torch.randn(n, k))
    x, bias, residual = operands(n, k, epilogue, torch.float32)
    state, twin = f.fp8_state(), f.fp8_state()
    y = fu.linear_fp8(x, w, s, state, bias, residual, EPS, SCALE, prologue, epilogue, scaling)
    row = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) if prologue == "rms" else x
    codes, step = f.fp8_quantize(row, twin, scaling)
    assert torch.equal(state, twin)
    seen = codes.double() * step.double()
    close(y, reference(seen, f.dequantize_fp8(w, s), bias, residual, "", epilogue), torch.float32)


@pytest.mark.parametrize("prologue", ["", "rms"])
def test_fp8_weights_alone(prologue):
    """Decode: the input is not quantised and its state is left alone."""
    w, s = f.quantize_fp8(torch.randn(24, 80))
    x, _, residual = operands(24, 80, "residual", torch.float32)
    state = f.fp8_state()
    before = state.clone()
    y = fu.linear_fp8(x, w, s, state, None, residual, EPS, SCALE, prologue, "residual", "none")
    close(y, reference(x, f.dequantize_fp8(w, s), None, residual, prologue, "residual"), torch.float32)
    assert torch.equal(state, before)


def test_fp8_jump_and_zeros():
    """B26 and B37 through the operator: a jump of 100x is repaired, zeros are exact, NaN stays in its row."""
    w, s = f.quantize_fp8(torch.randn(8, 64))
    x, state = torch.randn(2, 64), f.fp8_state()
    call = lambda x, state: fu.linear_fp8(x, w, s, state, None, None, EPS, 1.0, "", "", "delayed")  # noqa: E731
    call(x, state)
    assert torch.equal(call(x * 100, state), call(x * 100, f.fp8_state()))
    assert f.fp8_counters(state)["saturations"] == 1
    assert not call(torch.zeros(2, 64), f.fp8_state()).any()
    x[0, 0] = float("nan")
    y = call(x, f.fp8_state())
    assert y[0].isnan().all()
    assert y[1].isfinite().all()


def test_fp8_behind_a_norm_survives_a_sink():
    """A massive token must not cost the other rows their precision: the normalised rows are what is quantised."""
    w, s = f.quantize_fp8(torch.randn(32, 256))
    x = torch.randn(9, 256)
    call = lambda x: fu.linear_fp8(x, w, s, f.fp8_state(), None, None, EPS, 1.0, "rms", "", "delayed")  # noqa: E731
    alone = call(x[1:])
    x[0, 7] *= 3000.0
    error = (call(x)[1:] - alone).norm() / alone.norm()
    # A shared power-of-two scale moves at most a few values across the subnormal step; e4m3 itself errs by 0.03.
    assert error < 0.01


def test_zero_rows_and_groups():
    """B37: a zero row gives exact zeros, a zero group changes nothing else."""
    w = torch.randn(16, 256)
    w[3], w[5, :128] = 0.0, 0.0
    packed, decoded = pack(w, 128, "sym8", False)
    x = torch.randn(4, 256)
    y = fu.linear_int4(x, packed, 16, 256, 128, None, None, EPS, 1.0, "rms", "")
    assert not y[:, 3].any()
    close(y, reference(x, decoded, None, None, "rms", ""), torch.float32)
    assert not fu.linear_int4(x * 0, packed, 16, 256, 128, None, None, EPS, 1.0, "rms", "").any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exact_is_eager(dtype):
    """linear_exact: bit for bit what the modules compute."""
    k, n = 48, 32
    x, gain = torch.randn(2, 3, k).to(dtype), torch.randn(k).to(dtype)
    ws = [torch.randn(n, k).to(dtype) for _ in range(3)]
    bs = [torch.randn(n).to(dtype) for _ in range(3)]
    linear = torch.nn.functional.linear
    x32 = x.float()
    normed = gain * (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + EPS)).to(dtype)
    y = fu.linear_exact(x, ws, bs, gain, None, EPS, 1.0, "rms", "bias")
    assert torch.equal(y, torch.cat([linear(normed, w, b) for w, b in zip(ws, bs, strict=True)], -1))
    mlp = torch.nn.functional.silu(linear(normed, ws[0])) * linear(normed, ws[1])
    assert torch.equal(fu.linear_exact(x, ws[:2], [], gain, None, EPS, 1.0, "rms", "swiglu"), mlp)
    fused = linear(x, torch.cat(ws[:2]))
    one = fu.linear_exact(x, [torch.cat(ws[:2])], [], None, None, EPS, 1.0, "", "swiglu")
    assert torch.equal(one, torch.nn.functional.silu(fused[..., :n]) * fused[..., n:])
    r = torch.randn(2, 3, n).to(dtype)
    assert torch.equal(fu.linear_exact(x, ws[:1], [], None, r, EPS, 1.0, "", "residual"), r + linear(x, ws[0]))
    granite = r + linear(x, ws[0]) * SCALE
    assert torch.equal(fu.linear_exact(x, ws[:1], [], None, r, EPS, SCALE, "", "residual"), granite)


def test_refusals():
    packed, _ = pack(torch.randn(16, 128), 128, "sym8", False)
    x = torch.randn(2, 128)
    for prologue, epilogue in (("norm", ""), ("", "residual|bias"), ("", "silu"), ("", "bias|bias")):
        with pytest.raises(FormatError):
            fu.linear_int4(x, packed, 16, 128, 128, x, x, EPS, 1.0, prologue, epilogue)
    with pytest.raises(FormatError, match="bias"):
        fu.linear_int4(x, packed, 16, 128, 128, None, None, EPS, 1.0, "", "bias")
    with pytest.raises(FormatError):
        fu.linear_int4(x, packed, 32, 128, 128, None, None, EPS, 1.0, "", "")
    with pytest.raises(FormatError):
        fu.linear_exact(x, [torch.randn(4, 128)], [], None, None, EPS, 1.0, "", "bias")


def test_dense_memo():
    """Made once, found through aliases, remade after a write, freed with its storage, not pickled or copied."""
    gc.collect()
    before = dense.dense_bytes()
    packed, _ = pack(torch.randn(32, 128), 128, "sym8", False)
    other, decoded = pack(torch.randn(32, 128), 128, "sym8", False)
    x = torch.randn(1, 128)
    args = (32, 128, 128, None, None, EPS, 1.0, "", "")
    made = []
    original = reference_linear.dense_int4
    reference_linear.dense_int4 = lambda *a: made.append(1) or original(*a)
    try:
        y = fu.linear_int4(x, packed, *args)
        assert torch.equal(fu.linear_int4(x, packed.detach(), *args), y)
        assert len(made) == 1
        assert dense.dense_bytes() - before == 32 * 128 * 4
        packed.copy_(other)
        close(fu.linear_int4(x, packed, *args), reference(x, decoded, None, None, "", ""), torch.float32)
        assert len(made) == 2
        buffer = io.BytesIO()
        torch.save(packed, buffer)
        assert buffer.tell() < packed.numel() + 4096  # the dense copy would be 16 KB
        twin = copy.deepcopy(packed)
        fu.linear_int4(x, twin, *args)
        assert len(made) == 3
        dense.forget(twin)
        assert dense.dense_bytes() - before == 32 * 128 * 4
        del packed, twin
        gc.collect()
        assert dense.dense_bytes() == before
        with torch.inference_mode():
            frozen = other.clone()
            fu.linear_int4(x, frozen, *args)
            fu.linear_int4(x, frozen, *args)
        fu.linear_int4(x, frozen, *args)
        assert len(made) == 4
    finally:
        reference_linear.dense_int4 = original


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("prologue", ["", "rms"])
@pytest.mark.parametrize("kind", ["int4", "fp8", "bf16"])
def test_the_cpu_lowering_stays_within_the_roundings_it_adds(kind, prologue, epilogue):
    """bfloat16 on a CPU: one rounding more for each weight and input, one for the product before the epilogue."""
    n, k = 44, 300
    w = torch.randn(n, k) / k**0.5
    x, bias, residual = operands(n, k, epilogue, torch.bfloat16, tokens=(4, 5))
    tail = (bias, residual, EPS, SCALE, prologue, epilogue)
    if kind == "int4":
        packed, _ = pack(w, 64, "sym8", "swiglu" in epilogue)
        args = (x, packed, n, k, 64, *tail)
    elif kind == "fp8":
        args = (x, *f.quantize_fp8(w), f.fp8_state(), *tail, "dynamic")
    else:
        args = (x, w.bfloat16(), *tail)
    call = getattr(fu, f"linear_{kind}")
    expected = call(*args)
    with using("cpu"):
        y = call(*args)
    assert y.dtype == torch.bfloat16
    # Three roundings of at most 2^-9 of a unit-variance product, and the output's own 2^-9 on either side, in the
    # root mean square: 2^-9 * sqrt(3 + 2) / sqrt(3); the largest element of 900 may be five times that.
    unit = 2.0**-9 * (5 / 3) ** 0.5
    error = (y.double() - expected.double()).abs() / (1 + expected.double().abs())
    assert error.pow(2).mean().sqrt() < 2 * unit
    assert error.max() < 10 * unit


def test_the_cpu_lowering_is_for_bfloat16_on_a_cpu():
    packed, _ = pack(torch.randn(16, 128), 128, "sym8", False)
    tail = (16, 128, 128, None, None, EPS, 1.0, "", "")
    for dtype, name in ((torch.bfloat16, "cpu"), (torch.float32, "reference"), (torch.float16, "reference")):
        assert choose("linear_int4", "cpu", torch.randn(1, 128, dtype=dtype), packed, *tail)[0].name == name
    assert choose("linear_int4", "cuda", torch.randn(1, 128, dtype=torch.bfloat16), packed, *tail)[0].name != "cpu"
