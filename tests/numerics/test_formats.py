"""Round trips and error bounds of every number format, with float64 references, ragged shapes and the zero cases."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fu_compile import formats as f
from fu_compile.errors import FormatError, HeadDimError

few = settings(max_examples=25, deadline=None)
seeds = st.integers(0, 2**31)
groups = st.sampled_from(f.GROUPS)
grids = st.sampled_from(["sym8", "asym"])
HEAD_DIMS = [8, 16, 64, 80, 96, 128, 192, 256]


def rand(*shape, seed, scale=1.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def grouped(x, group):
    """[N, K] -> [N, K] with every element replaced by its group's index along K."""
    return torch.arange(x.shape[1]) // group


# ---- INT4 weights ----------------------------------------------------------------------------------------------------


@few
@given(st.integers(1, 40), st.sampled_from([1, 31, 128, 288, 300, 576, 896]), groups, grids, seeds)
def test_int4_error(n, k, group, grid, seed):
    """Half a step between the ends of the range; at the ends what rounding scale and zero point can cost."""
    w = rand(n, k, seed=seed)
    q = f.quantize_int4(w, group, grid)
    assert q.codes.shape == (n, k)
    assert q.scales.shape == q.zeros.shape == (n, -(-k // group))
    assert q.codes.max() <= 15
    step = q.scales.double().abs()[:, grouped(w, group)]
    error = (f.dequantize_int4(q).double() - w.double()).abs()
    # sym8: 0.5 step inside; a value of almost the extreme's magnitude and the other sign clips from 8 to 7: one step.
    # asym: the zero point rounds by half a step, so one end may clip by that much: one step. 1e-2: the f16 scale.
    assert (error <= step * (1.0 + 1e-2)).all()
    inside = (q.codes > 0) & (q.codes < 15)
    assert (error[inside] <= step[inside] * (0.5 + 1e-5)).all()  # 1e-5: float32 division at a tie


@few
@given(st.integers(1, 33), st.sampled_from([288, 576, 896, 4304]), groups, grids, seeds)
def test_int4_pack_round_trip(n, k, group, grid, seed):
    q = f.quantize_int4(rand(n, k, seed=seed), group, grid)
    packed = f.pack_int4(q)
    assert packed.dtype == torch.uint8
    assert packed.numel() == f.int4_bytes(n, k, group)
    assert f.int4_tile_bytes(group) % 16 == 0  # lanes read 16-byte vectors
    back = f.unpack_int4(packed, n, k, group)
    for a, b in ((q.codes, back.codes), (q.scales, back.scales), (q.zeros, back.zeros)):
        assert torch.equal(a, b)
    assert torch.equal(f.pack_int4(back), packed)


@few
@given(st.integers(1, 33), st.integers(1, 300), groups, seeds)
def test_int4_padding_decodes_to_zero(n, k, group, seed):
    packed = f.pack_int4(f.quantize_int4(rand(n, k, seed=seed) + 3.0, group, "asym"))
    rows, cols = -(-n // 16) * 16, -(-k // 128) * 128
    whole = f.dequantize_int4(f.unpack_int4(packed, rows, cols, group))
    assert not whole[n:].any()
    assert not whole[:, k:].any()
    assert whole[:n, :k].any()


def test_int4_sym8_uses_the_whole_range():
    """The extreme maps to code 0 whatever its sign (quant.md: never -7..7), and powers of two are exact."""
    w = torch.zeros(2, 128)
    w[0, :2] = torch.tensor([-8.0, 7.0])
    w[1, :2] = torch.tensor([8.0, -7.0])
    q = f.quantize_int4(w, 128, "sym8")
    assert q.codes[:, 0].tolist() == [0, 0]
    assert q.codes[:, 1].tolist() == [15, 15]
    assert q.scales.flatten().tolist() == [1.0, -1.0]
    assert torch.equal(f.dequantize_int4(q), w)


@pytest.mark.parametrize("grid", ["sym8", "asym"])
def test_int4_zeros_and_denormals(grid):
    w = torch.zeros(5, 256)
    w[1, :128] = 1e-40  # float32 denormal
    # The best scale is 1.4 (asym: 1.5) of float16's smallest steps: rounded to nearest it would clip by three steps.
    w[2, :128] = torch.linspace(-11.2, 11.2, 128) * 2.0**-24
    w[3] = torch.randn(256)
    w[3, 128:] = 0.0
    q = f.quantize_int4(w, 128, grid)
    back = f.dequantize_int4(q)
    assert back.isfinite().all()
    assert not back[0].any()
    assert not back[3, 128:].any()
    assert not back[4].any()
    assert (back[1].abs() <= 2.0**-25).all()  # half of float16's smallest step
    # Scales round away from zero under 2^-14, here to two steps: half of that, or all of it at the ends (asym).
    assert ((back[2] - w[2]).abs() <= (1.001 if grid == "sym8" else 2.001) * 2.0**-24).all()
    assert not f.dequantize_int4(f.unpack_int4(f.pack_int4(q), 5, 256, 128))[0].any()


@pytest.mark.parametrize("grid", ["sym8", "asym"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_weights_are_named(grid, bad):
    w = torch.randn(9, 100)
    w[6, 99] = bad
    with pytest.raises(FormatError, match="row 6"):
        f.quantize_int4(w, 64, grid)
    with pytest.raises(FormatError, match="row 6"):
        f.quantize_fp8(w)


@pytest.mark.parametrize("grid", ["sym8", "asym"])
def test_int4_scale_overflow(grid):
    w = torch.randn(4, 64)
    w[2, 3] = 2e6
    with pytest.raises(FormatError, match="row 2"):
        f.quantize_int4(w, 64, grid)
    w[2, 3] = 4e5  # just inside float16
    assert f.dequantize_int4(f.quantize_int4(w, 64, grid)).isfinite().all()


def test_int4_refuses():
    w = torch.randn(4, 64)
    with pytest.raises(FormatError, match="group size 48"):
        f.quantize_int4(w, 48)
    with pytest.raises(FormatError, match="grid"):
        f.quantize_int4(w, 64, "sym7")
    with pytest.raises(FormatError, match="matrix"):
        f.quantize_int4(w[0], 64)
    q = f.quantize_int4(w, 64)
    with pytest.raises(FormatError):
        f.unpack_int4(f.pack_int4(q)[:-16], 4, 64, 64)
    with pytest.raises(FormatError):
        f.pack_int4(f.Int4Codes(q.codes, q.scales[:, :0], q.zeros, 64))
    with pytest.raises(FormatError):
        f.pack_int4(f.Int4Codes(q.codes, q.scales.float(), q.zeros, 64))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_int4_reads_every_float_dtype(dtype):
    w = torch.randn(7, 200).to(dtype)
    a, b = f.quantize_int4(w, 64), f.quantize_int4(w.float(), 64)
    assert torch.equal(a.codes, b.codes)
    assert torch.equal(a.scales, b.scales)


def test_int4_large_weight_in_slices(monkeypatch):
    """Quantising in slices of rows changes nothing, also in the row an error names."""
    w = torch.randn(50, 96)
    whole = f.quantize_int4(w, 32, "asym")
    monkeypatch.setattr(f, "_ROWS_AT_ONCE", 96 * 7)
    sliced = f.quantize_int4(w, 32, "asym")
    assert torch.equal(whole.codes, sliced.codes)
    assert torch.equal(whole.scales, sliced.scales)
    w[33, 0] = math.nan
    with pytest.raises(FormatError, match="row 33"):
        f.quantize_int4(w, 32)


@few
@given(st.integers(1, 200))
def test_interleave_is_a_permutation(half):
    order = f.interleave_gate_up(2 * half)
    assert torch.equal(order.sort().values, torch.arange(2 * half))
    assert torch.equal(order[f.deinterleave_gate_up(2 * half)], torch.arange(2 * half))
    whole = half // 8 * 16
    strips = order[:whole].view(-1, 2, 8)
    assert torch.equal(strips[:, 0] + half, strips[:, 1])  # rows g and g + 8 of a strip belong together
    left = order[whole:].view(2, -1)
    assert torch.equal(left[0] + half, left[1])


def test_interleave_refuses_odd():
    with pytest.raises(FormatError):
        f.interleave_gate_up(7)


# ---- FP8 -------------------------------------------------------------------------------------------------------------


@few
@given(st.integers(1, 30), st.integers(1, 300), seeds, st.sampled_from([1e-30, 1.0, 1e4]))
def test_fp8_weight_error(n, k, seed, scale):
    w = rand(n, k, seed=seed, scale=scale)
    codes, s = f.quantize_fp8(w)
    assert codes.dtype == torch.float8_e4m3fn
    error = (f.dequantize_fp8(codes, s).double() - w.double()).abs()
    # 3 mantissa bits: half a unit is 2^-4 of the value; under 2^-6 the step is 2^-9, half of it 2^-10.
    # 1.001: the float32 rounding of the scale.
    assert (error <= torch.maximum(w.double().abs() * 2.0**-4, s.double()[:, None] * 2.0**-10) * 1.001).all()


def test_fp8_weight_zeros():
    w = torch.zeros(3, 64)
    w[1] = 1e-44
    w[2, 5] = -7.0
    codes, s = f.quantize_fp8(w)
    back = f.dequantize_fp8(codes, s)
    assert s[0] == 1.0
    assert back.isfinite().all()
    assert not back[0].any()
    assert back[2, 5] == -7.0  # the extreme is 448 * scale
    assert back[2].count_nonzero() == 1


def test_fp8_weight_scale_is_the_best_of_an_octave():
    """Per row the least squared error over max / 448 * 2^(i/8); and worth it: some 10 % less than the first scale."""
    w = torch.randn(40, 333) * torch.logspace(-3, 3, 40)[:, None]
    codes, s = f.quantize_fp8(w)

    def error(scale):
        x = w.double() / scale.double()[:, None]
        return (
            ((x.float().clamp(-448, 448).to(torch.float8_e4m3fn).double() - x) * scale.double()[:, None])
            .square()
            .sum(1)
        )

    tried = torch.stack([error(w.abs().amax(1) / 448 * 2 ** (i / 8)) for i in range(8)])
    got = (f.dequantize_fp8(codes, s).double() - w.double()).square().sum(1)
    torch.testing.assert_close(got, tried.amin(0), rtol=1e-4, atol=0)  # float32 rounding of scale and quotient
    assert 0.8 < float((got / tried[0]).mean()) < 0.95


def test_fp8_weight_that_was_fp8_is_kept():
    """A row whose largest code is 448 comes back with the same codes: repacking FP8 loses nothing."""
    codes = torch.randn(16, 128).mul_(100).clamp_(-400, 400).to(torch.float8_e4m3fn)
    codes[:, 3] = 448.0
    w = codes.float() * torch.logspace(-6, 2, 16)[:, None]
    again, _ = f.quantize_fp8(w)
    assert torch.equal(again.view(torch.uint8), codes.view(torch.uint8))


@few
@given(seeds, st.integers(1, 5), st.integers(1, 70))
def test_fp8_rows_have_scales_of_their_own(seed, rows, k):
    """One scale per row: nothing of a massive row reaches the others, and the largest value of each is exact."""
    x = rand(2, rows, k, seed=seed) * torch.logspace(0, 4, rows)[:, None]
    x[0, 0] = 0.0
    state = f.fp8_state()
    codes, scale = f.fp8_quantize(x, state, "row")
    assert scale.shape == (2, rows, 1)
    assert scale[0, 0] == 1.0
    back = codes.double() * scale.double()
    assert not back[0, 0].any()
    error = (back - x.double()).abs()
    # 2^-4 of the value, half a step of 2^-9 under 2^-6; 1.001: the float32 rounding of the scale
    assert (error <= torch.maximum(x.double().abs() * 2.0**-4, scale.double() * 2.0**-10) * 1.001).all()
    amax = x.abs().amax(-1)
    torch.testing.assert_close(back.abs().amax(-1).float(), amax, rtol=1e-6, atol=0)
    alone = f.fp8_quantize(x[1:, -1:], f.fp8_state(), "row")
    assert torch.equal(alone[0].view(torch.uint8), codes[1:, -1:].view(torch.uint8))
    counters = f.fp8_counters(state)
    assert (counters["calls"], counters["saturations"], counters["amax"]) == (1, 0, float(amax.max()))


PER_CALL = [s for s in f.FP8_SCALINGS if s != "row"]
"""Scalings with one scale per call."""


def is_power_of_two(scale):
    return math.frexp(float(scale))[0] == 0.5


@few
@given(seeds, st.sampled_from([1e-6, 0.3, 1.0, 77.0, 3e4]), st.sampled_from(PER_CALL))
def test_fp8_first_call_measures(seed, size, scaling):
    x = rand(3, 5, 64, seed=seed, scale=size)
    state = f.fp8_state()
    codes, scale = f.fp8_quantize(x, state, scaling)
    assert is_power_of_two(scale)
    amax = float(x.abs().max())
    headroom = 1.0 if scaling == "dynamic" else 2.0
    # The smallest power of two that keeps the headroom: half of it would not.
    assert amax * headroom <= 448.0 * float(scale) * (1 + 1e-6)
    assert amax * headroom > 224.0 * float(scale) * (1 - 1e-6)
    error = (codes.double() * scale.double() - x.double()).abs()
    assert (error <= torch.maximum(x.double().abs() * 2.0**-4, scale.double() * 2.0**-10)).all()
    counters = f.fp8_counters(state)
    assert counters["calls"] == 1
    assert counters["saturations"] == 0
    assert counters["amax"] == amax


def test_fp8_second_identical_call_is_identical():
    x, state = torch.randn(4, 96), f.fp8_state()
    a, sa = f.fp8_quantize(x, state)
    b, sb = f.fp8_quantize(x, state)
    assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    assert sa == sb


@pytest.mark.parametrize("scaling", ["delayed", "static"])
def test_fp8_jump_is_counted_and_repaired(scaling):
    x, state = torch.randn(4, 96), f.fp8_state()
    f.fp8_quantize(x, state, scaling)
    if scaling == "static":
        f.fp8_freeze(state)
    frozen = float(state[f.FP8_SLOTS["scale"]])
    codes, scale = f.fp8_quantize(x * 100, state, scaling)
    assert f.fp8_counters(state)["saturations"] == 1
    fresh, fresh_scale = f.fp8_quantize(x * 100, f.fp8_state())
    assert torch.equal(codes.view(torch.uint8), fresh.view(torch.uint8))  # as good as if it had been measured
    assert scale == fresh_scale
    f.fp8_quantize(x * 100, state, scaling)
    # delayed has learnt the new range; static keeps its scale, repairs again and counts again
    assert f.fp8_counters(state)["saturations"] == (1 if scaling == "delayed" else 2)
    if scaling == "static":
        assert f.fp8_counters(state)["scale"] == frozen
        assert float(f.fp8_quantize(x, state, "static")[1]) == frozen


def test_fp8_history_is_sixteen_calls():
    state = f.fp8_state()
    big, small = torch.full((4,), 100.0), torch.full((4,), 1.0)
    _, wide = f.fp8_quantize(big, state)
    scales = [float(f.fp8_quantize(small, state)[1]) for _ in range(f.FP8_HISTORY + 1)]
    assert scales[: f.FP8_HISTORY] == [float(wide)] * f.FP8_HISTORY
    assert scales[-1] < float(wide)
    assert f.fp8_counters(state)["saturations"] == 0


def test_fp8_history_moves_only_the_exponent():
    """A value's rounding does not depend on history unless it falls under the subnormal step."""
    x = torch.rand(1000) + 0.5
    wide, narrow = f.fp8_state(), f.fp8_state()
    f.fp8_quantize(x * 16, wide)
    (a, sa), (b, sb) = f.fp8_quantize(x, wide), f.fp8_quantize(x, narrow)
    assert sa > sb
    assert torch.equal(a.float() * sa, b.float() * sb)


def test_fp8_zeros_do_not_set_a_scale():
    """An all-zero first call (a dummy run, a zero embedding) is exact and leaves measuring to the next call."""
    x, state = torch.randn(2, 64) * 50, f.fp8_state()
    codes, scale = f.fp8_quantize(torch.zeros(2, 64), state)
    assert not codes.float().any()
    assert scale.isfinite()
    assert scale > 0
    a, sa = f.fp8_quantize(x, state)
    b, sb = f.fp8_quantize(x, f.fp8_state())
    assert sa == sb
    assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    assert f.fp8_counters(state)["saturations"] == 0


def test_fp8_freeze_takes_a_scale_that_holds_what_was_seen():
    x, state = torch.randn(3, 50), f.fp8_state()
    with pytest.raises(FormatError, match="nothing to freeze"):
        f.fp8_freeze(state, 0.1)
    f.fp8_quantize(x, state, "static")
    amax = float(x.abs().max())
    for bad in (amax / 449, 0.0, float("nan"), float("inf")):
        with pytest.raises(FormatError, match="does not hold"):
            f.fp8_freeze(state, bad)
    f.fp8_freeze(state, amax / 300)
    codes, scale = f.fp8_quantize(x, state, "static")
    assert scale == torch.tensor(amax / 300)
    assert torch.equal(codes.float(), (x / scale).to(torch.float8_e4m3fn).float())
    assert f.fp8_counters(state)["saturations"] == 0
    f.fp8_quantize(x * 2, state, "static")  # beyond 448 of it
    assert f.fp8_counters(state)["saturations"] == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("scaling", f.FP8_SCALINGS)
def test_fp8_non_finite_propagates_and_is_forgotten(bad, scaling):
    x, state = torch.randn(4, 64), f.fp8_state()
    poisoned = x.clone()
    poisoned[1, 7] = bad
    codes, scale = f.fp8_quantize(poisoned, state, scaling)
    back = codes.float() * scale
    assert back[1, 7].isnan()
    assert back.isnan().sum() == 1  # other rows of the batch do not suffer
    assert state.isfinite().all()
    assert f.fp8_counters(state)["non_finite"] == 1
    f.fp8_quantize(x, state, scaling)
    assert f.fp8_counters(state)["saturations"] == 0


@few
@given(st.lists(st.floats(0.0, 2.0**100, width=32), min_size=1, max_size=20), st.sampled_from(PER_CALL), seeds)
def test_fp8_host_and_device_are_one(sizes, scaling, seed):
    """The numbers of a CPU and the tensors of an accelerator: the same states, scales and codes, bit for bit."""
    host, device = f.fp8_state(), f.fp8_state()
    for i, size in enumerate(sizes):
        x = rand(8, seed=seed + i, scale=size)
        x[i % 8] = math.inf if i % 5 == 3 else size
        a, sa = f._fp8_on_host(x, host, scaling)
        b, sb = f._fp8_on_device(x, device, scaling)
        assert torch.equal(host.view(torch.int32), device.view(torch.int32))
        assert torch.equal(sa.view(torch.int32), sb.view(torch.int32))
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        if i == 7 and float(host[:16].max()) > 0:
            f.fp8_freeze(host)
            f.fp8_freeze(device)


def test_fp8_static_calibrates_until_frozen():
    state = f.fp8_state()
    with pytest.raises(FormatError, match="nothing to freeze"):
        f.fp8_freeze(state)
    for size in (1.0, 8.0, 2.0):
        f.fp8_quantize(torch.full((3,), size), state, "static")
    f.fp8_freeze(state)
    scale = f.fp8_quantize(torch.full((3,), 0.1), state, "static")[1]
    assert float(scale) == 2.0**-4  # 2 * 8 / 448 = 0.0357
    assert f.fp8_counters(state)["frozen"] == 1


def test_fp8_refuses():
    with pytest.raises(FormatError):
        f.fp8_quantize(torch.ones(2), f.fp8_state(), "often")
    with pytest.raises(FormatError):
        f.fp8_quantize(torch.ones(2), torch.zeros(3))


def test_fp8_any_token_count():
    for tokens in (0, 1, 2, 7, 33):
        codes, scale = f.fp8_quantize(torch.randn(tokens, 16), f.fp8_state())
        assert codes.shape == (tokens, 16)
        assert scale.isfinite()


# ---- Hadamard and cache rows -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("head_dim", "block"), [(8, 8), (16, 16), (64, 32), (80, 16), (96, 32), (128, 32), (6, 2), (256, 32)]
)
def test_hadamard(head_dim, block):
    assert f.hadamard_block(head_dim) == block
    x = torch.randn(3, 2, head_dim, dtype=torch.float64)
    y = f.hadamard(x, block)
    torch.testing.assert_close(f.hadamard(y, block), x, rtol=0, atol=1e-14)  # its own inverse
    torch.testing.assert_close(y.norm(dim=-1), x.norm(dim=-1), rtol=1e-13, atol=0)  # orthonormal
    eye = f.hadamard(torch.eye(head_dim, dtype=torch.float64), block)
    assert torch.equal(eye, eye.T)
    outside = torch.arange(head_dim)[:, None] // block != torch.arange(head_dim) // block
    assert not eye[outside].any()
    torch.testing.assert_close(f.hadamard(x.float(), block).double(), y, rtol=0, atol=1e-5)  # float32 rounding


@pytest.mark.parametrize("head_dim", [1, 7, 33, 65, 0])
def test_odd_head_dims(head_dim):
    with pytest.raises(HeadDimError):
        f.hadamard_block(head_dim)
    if head_dim:
        with pytest.raises(HeadDimError):
            f.encode_rows(torch.randn(2, head_dim))
    with pytest.raises(HeadDimError):
        f.kv_store(1, 1, 64, head_dim)
    with pytest.raises(HeadDimError):
        f.hadamard(torch.randn(2, 12), 8)
    with pytest.raises(HeadDimError):
        f.hadamard(torch.randn(2, 12), 3)


@few
@given(st.sampled_from([*HEAD_DIMS, 2, 6, 10, 100]), seeds, st.sampled_from([1e-3, 1.0, 500.0]))
def test_rows_round_trip(head_dim, seed, size):
    x = rand(2, 3, 5, head_dim, seed=seed, scale=size)
    codes, scales = f.encode_rows(x)
    assert codes.shape == (2, 3, 5, head_dim // 2)
    assert scales.shape == (2, 3, 5)
    back = f.decode_rows(codes, scales)
    step = scales.double().abs()[..., None]
    error = (back.double() - x.double()).abs()
    # Half a step, or one where the value opposite to the extreme clips from 8 to 7; 1e-2: the f16 scale.
    assert (error <= step * (1 + 1e-2)).all()
    assert (error / step).mean() <= 0.3  # uniform rounding has a mean of a quarter step
    # Decoded values encode to themselves (codes and scale), so requantising a page is harmless.
    again, scales_again = f.encode_rows(back)
    assert torch.equal(f.decode_rows(again, scales_again), back)


def test_rows_order():
    """The picture in encode_rows, spelt out for head_dim 16."""
    q = torch.arange(16)
    codes, _ = f.encode_rows((q - 8.0)[None])
    expected = [c | (c + 1) << 4 for t in range(4) for c in (2 * t, 8 + 2 * t)]
    assert codes[0].tolist() == expected


def test_rows_zero_denormal_huge_and_nan():
    x = torch.zeros(5, 64)
    x[1] = 1e-42
    x[2, 3], x[2, 4] = 3e8, -1.0
    x[3, 0] = math.nan
    x[4, 0] = -math.inf
    back = f.decode_rows(*f.encode_rows(x))
    assert not back[0].any()
    assert (back[1].abs() <= 2.0**-25).all()
    assert back[2].isfinite().all()
    assert back[2, 3] == 65504 * 8  # saturates
    assert back[3:].isnan().all()  # a row with NaN or infinity is NaN, and only that row


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_keys_round_trip(head_dim):
    """Centred, balanced and rotated keys come back within the rows' error, in float64 arithmetic."""
    k = torch.randn(2, 3, 64, head_dim)
    mean, balance = torch.randn(3, head_dim) * 20, torch.rand(3, head_dim) + 0.5
    k = k + mean[:, None]
    codes, scales = f.encode_keys(k, mean, balance)
    back = f.decode_keys(codes, scales, mean, balance)
    block = f.hadamard_block(head_dim)
    centred = f.hadamard((k.double() - mean.double()[:, None]) / balance.double()[:, None], block)
    rows = f.hadamard((back.double() - mean.double()[:, None]) / balance.double()[:, None], block)
    # One step of the row's scale, plus float32 rounding of mean (20) and rotation.
    assert ((rows - centred).abs() <= scales.double().abs()[..., None] * 1.01 + 1e-4).all()


def test_centring_saves_biased_keys():
    """quant.md: a rotation without the mean spreads a large constant; with it the error is that of the rest."""
    bias = torch.zeros(2, 64)
    bias[:, 5] = 100.0
    k = torch.randn(1, 2, 64, 64) + bias[:, None]
    one = torch.ones(2, 64)

    def error(mean):
        return float((f.decode_keys(*f.encode_keys(k, mean, one), mean, one) - k).pow(2).mean())

    assert error(bias) < 0.02 < 0.5 < error(torch.zeros(2, 64))


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 3), st.sampled_from(HEAD_DIMS), st.floats(0.0, 200.0), st.integers(0, 2**31))
def test_key_pages_round_trip(pages, head_dim, constant, seed):
    """Keys with one range per channel and page come back within half a step, whatever constant a channel has."""
    torch.manual_seed(seed)
    k = torch.randn(2, 3, pages * 64, head_dim) * torch.rand(head_dim).exp2() + constant * torch.randn(3, 1, head_dim)
    mean = torch.randn(3, head_dim)
    codes, ranges = f.encode_key_pages(k, mean)
    assert codes.shape == (2, 3, pages, 64, head_dim // 2)
    assert ranges.shape == (2, 3, pages, 2, head_dim)
    assert (codes.dtype, ranges.dtype) == (torch.uint8, torch.float16)
    back = f.decode_key_pages(codes, ranges, mean)
    steps, minima = (t.double()[..., None, :] for t in ranges.unbind(3))
    # Half a step; the step and the minimum round to float16 (2^-11 each), the sum to float32.
    allowed = steps * (0.5 + 15 * 2.0**-11) + minima.abs() * 2.0**-11 + 2.0**-20 * (k.abs().max() + 1)
    error = (back.double() - k.double()).unflatten(2, (-1, 64)).abs()
    assert (error <= allowed).all()
    # All 16 codes are of use: a page of a channel reaches both ends of its range. The lowest value lies above the
    # minimum by what that was rounded down; the step is of what is left above the rounded minimum.
    q = f._unpack_nibbles(codes)[:, :, 1:]
    rounded = (minima.abs() * 2.0**-11 + 2.0**-20 * (k.abs().max() + 1)) / steps
    assert (q.amin(3) <= 0.5 + rounded[:, :, 1:, 0]).all()
    assert (q.amax(3) == 15).all()
    # The first token of the sequence lies on the grid: what is left is the rounding of the minimum.
    assert (error[:, :, 0, 0] <= minima[:, :, 0, 0].abs() * 2.0**-11 + 2.0**-19 * (k.abs().max() + 1)).all()
    # Pages further on know no first token.
    assert torch.equal(f.encode_key_pages(k, mean, 3)[1][:, :, 1:], ranges[:, :, 1:])


def test_key_pages_at_the_edges():
    """A constant channel, one without a finite value, magnitudes beyond float16; neighbours are not touched."""
    k = torch.randn(1, 1, 64, 8)
    plain = f.decode_key_pages(*f.encode_key_pages(k, torch.zeros(1, 8)), torch.zeros(1, 8))
    k[..., 0], k[..., 1], k[..., 2] = 3.0, float("nan"), 1e6
    k[..., 5, 3] = float("inf")
    codes, ranges = f.encode_key_pages(k, torch.zeros(1, 8))
    back = f.decode_key_pages(codes, ranges, torch.zeros(1, 8))
    assert (back[..., 0] == 3.0).all()
    assert back.isfinite().all()
    assert (back[..., 2] >= 65504).all()
    assert torch.equal(back[..., 4:], plain[..., 4:])
    keep = torch.arange(64) != 5
    assert ((back - k)[:, :, keep, 3].abs() <= 0.51 * ranges[0, 0, 0, 0, 3]).all()
    with pytest.raises(FormatError, match="65 tokens"):
        f.encode_key_pages(torch.randn(1, 1, 65, 8), torch.zeros(1, 8))
    with pytest.raises(HeadDimError):
        f.encode_key_pages(torch.randn(1, 1, 64, 9), torch.zeros(1, 9))
    with pytest.raises(FormatError, match="int8"):
        f.kv_store(1, 1, 64, 8, kv_format="int8")


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 3), st.sampled_from(HEAD_DIMS), st.floats(0.0, 8.0), st.integers(0, 2), st.integers(0, 2**31))
def test_key_errors_cancel_where_queries_read(pages, head_dim, length, first_page, seed):
    """The codes keep errors small along a shared direction of the queries: what is minimised falls, and never rises."""
    torch.manual_seed(seed)
    k = torch.randn(2, 3, pages * 64, head_dim) * torch.rand(head_dim).exp2()
    k[..., 1] = 7.0  # a constant channel
    mean = torch.randn(3, head_dim)
    reads = torch.nn.functional.normalize(torch.randn(3, head_dim), dim=1) * length
    reads[0] = 0.0  # a head without one
    plain, (codes, ranges) = f.encode_key_pages(k, mean, first_page), f.encode_key_pages(k, mean, first_page, reads)
    again = f.encode_key_pages(k.clone(), mean.clone(), first_page, reads.clone())
    assert torch.equal(codes, again[0])
    assert torch.equal(ranges, plain[1])  # the same format and ranges: only codes differ
    assert torch.equal(codes[:, 0], plain[0][:, 0])

    def cost(codes):
        e = (f.decode_key_pages(codes, ranges, mean).double() - k.double()).unflatten(2, (-1, 64))
        along = (e * reads.double()[:, None, None]).sum(-1).square().mean((0, 2, 3))
        return e, along, along + e.square().sum(-1).mean((0, 2, 3))

    (e, along, after), (_, along_before, before) = cost(codes), cost(plain[0])
    steps = ranges[:, :, :, 0].double()[..., None, :]
    minima = ranges[:, :, :, 1].double()[..., None, :]
    # One step of shift and half a step of rounding, both minima's and steps' float16, float32.
    assert (e.abs() <= 1.5 * steps + 15 * 2.0**-11 * steps + minima.abs() * 2.0**-11 + 1e-5).all()
    # A greedy choice of single tokens can be unlucky; the mean over 128 and more never was: 1 % for the chance of it.
    assert (after <= 1.01 * before + 1e-12).all()
    if length > 2 and head_dim >= 64:
        assert (along[1:] < 0.3 * along_before[1:]).all()  # measured 0.12 at most
    assert (e[..., 1].abs() <= 2.0**-11 * 16 + 1e-5).all()  # the constant channel stays as exact as it was


def test_key_errors_of_one_token_stay_its_own():
    """Not finite, beyond float16: the token's other channels stay within their bound, other tokens keep their codes."""
    k, mean = torch.randn(1, 1, 128, 64), torch.zeros(1, 64)
    reads = torch.randn(1, 64)
    codes, ranges = f.encode_key_pages(k, mean, 1, reads)
    bad = k.clone()
    bad[0, 0, 70, 3], bad[0, 0, 71, 4], bad[0, 0, 72] = float("nan"), float("-inf"), float("nan")
    got, after = f.encode_key_pages(bad, mean, 1, reads)
    assert torch.equal(got[:, :, 0], codes[:, :, 0])
    assert torch.equal(after[:, :, 0], ranges[:, :, 0])
    back = f.decode_key_pages(got, after, mean)
    assert back.isfinite().all()
    steps = after[0, 0, 1, 0]
    fine = torch.isfinite(bad[0, 0, 64:])
    assert ((back - k)[0, 0, 64:].abs() <= 1.51 * steps + 4 * 2.0**-11)[fine].all()
    # A channel beyond float16 saturates; what it loses is nobody else's to take back.
    bad = k.clone()
    bad[..., 5] = 1e6
    got, after = f.encode_key_pages(bad, mean, 1, reads)
    error = (f.decode_key_pages(got, after, mean) - bad).unflatten(2, (-1, 64)).abs()
    keep = torch.arange(64) != 5
    assert (error <= 1.51 * after[:, :, :, 0].float()[..., None, :] + 4 * 2.0**-11)[..., keep].all()
    broken = f.encode_key_pages(k, mean, 1, torch.full((1, 64), float("nan")))
    assert torch.equal(broken[0], f.encode_key_pages(k, mean, 1)[0])  # a direction that is no number is none


def test_keys_per_channel_do_not_mind_a_bias():
    """The case that ruins rotated keys without their mean: a large constant in one channel costs the others nothing."""
    bias = torch.zeros(2, 64)
    bias[:, 5] = 100.0
    k, zero = torch.randn(1, 2, 64, 64), torch.zeros(2, 64)

    def error(keys):
        back = f.decode_key_pages(*f.encode_key_pages(keys, zero), zero)
        return (back - keys).square().mean((0, 1, 2))

    plain, biased = error(k), error(k + bias[:, None])
    keep = torch.arange(64) != 5
    assert torch.equal(plain[keep], biased[keep])
    assert biased[5] < 2 * plain[5]  # the minimum is one float16 rounding of 100: 2^-5 at most, a tenth of a step


def test_kv_store_shapes():
    kc, ks, vc, vs = f.kv_store(2, 3, 65, 96)
    assert kc.shape == vc.shape == (2, 3, 2, 64, 48)
    assert ks.shape == vs.shape == (2, 3, 2, 64)
    assert (kc.dtype, ks.dtype) == (torch.uint8, torch.float16)
    assert [t.shape for t in f.kv_store(2, 3, 65, 96, kv_format="int4-channel")] == [
        kc.shape, (2, 3, 2, 2, 96), vc.shape, vs.shape,
    ]  # fmt: skip
    with torch.inference_mode():
        assert not any(t.is_inference() for t in f.kv_store(1, 1, 64, 8))


def test_kv_tables():
    mean, balance = f.kv_tables(2, 64)
    assert not mean.any()
    assert (balance == 1).all()
    bias = torch.randn(2 * 64)
    assert not f.kv_tables(2, 64, key_bias=bias)[0].any()
    inv_freq = 1.0 / 10000 ** (torch.arange(0, 48, 2) / 48)  # 48 of 64 columns rotate
    mean, _ = f.kv_tables(2, 64, key_bias=bias, inv_freq=inv_freq, attention_scaling=1.25)
    b = bias.view(2, 64).double()
    angle = torch.arange(2048, dtype=torch.float64)[:, None] * torch.cat((inv_freq, inv_freq)).double()
    cos, sin = angle.cos() * 1.25, angle.sin() * 1.25
    half = torch.cat((-b[:, 24:48], b[:, :24]), 1)
    turned = b[:, None, :48] * cos + half[:, None] * sin
    torch.testing.assert_close(mean[:, :48].double(), turned.mean(1), rtol=1e-5, atol=1e-6)  # one float32 rounding
    torch.testing.assert_close(mean[:, 48:], bias.view(2, 64)[:, 48:])
    assert mean[:, 0].abs().max() < 0.01 * b.abs().max()  # the fastest pair averages out
    with pytest.raises(FormatError):
        f.kv_tables(2, 64, key_bias=bias[1:], inv_freq=inv_freq)
