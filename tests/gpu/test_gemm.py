"""The GEMM against float64 on the same operands, and the prefill operators against the reference, on a Hopper GPU.

python -m pytest tests/gpu -m gpu

Fresh random operands, outputs poisoned with NaN. Tolerances in roundings of the output are ``limit`` of
benchmarks/prefill_gemm.py: 2 where the sums are float32 (one is the store), more where e4m3 products are summed by the
tensor core's own accumulator.
"""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import prefill_gemm as bench
from fu_compile.lowerings import gemm_sm90, qkv_rope_sm90, reference_attention, reference_linear

from fu_compile import formats, jit

pytestmark = pytest.mark.gpu

FP8, BF16, F16 = bench.FP8, bench.BF16, bench.F16
FAMILIES = (
    bench.Gemm("SmolLM2 qkv", 960, 576),
    bench.Gemm("SmolLM2 gate_up", 3072, 576, "swiglu"),
    bench.Gemm("Qwen2.5-0.5B qkv", 1152, 896, "bias"),
    bench.Gemm("Qwen2.5-0.5B gate_up", 9728, 896, "swiglu", out8=True),
    bench.Gemm("Qwen3-0.6B o", 1024, 2048, "residual", squares=True),
    bench.Gemm("Phi-3-mini down", 3072, 8192, "residual"),
)
TOKENS = (1, 17, 127, 129, 2049)


def chosen(g, m):
    return gemm_sm90.choose(m, g.n, g.epilogue == "swiglu")


def check(g, m, config, dtype):
    error, squares = bench.check_one(g, m, config, dtype)
    assert error <= bench.limit(g, config, dtype), (g, m, config)
    assert squares < 1e-5  # float32 sums


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """All kernels at once, on all cores."""
    cases = bench.small_cases()
    cases += [(g, chosen(g, m), d) for g in FAMILIES for m in TOKENS for d in (BF16, FP8, F16)]
    jit.warmup(bench.kernels(cases), progress=False)


@pytest.mark.parametrize(
    ("g", "config", "dtype"), bench.small_cases(), ids=lambda v: "-".join(map(str, v)) if isinstance(v, tuple) else None
)
def test_odd_shapes_in_every_cut(g, config, dtype):
    for m in (2300,) if g in bench.LONG else bench.TOKENS:
        check(g, m, config, dtype)


@pytest.mark.parametrize("g", FAMILIES, ids=lambda g: g.name)
@pytest.mark.parametrize("dtype", [BF16, FP8, F16], ids=["bf16", "fp8", "f16"])
def test_families(g, dtype):
    for m in TOKENS:
        check(g, m, chosen(g, m), dtype)


@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "bf16"])
def test_8b(fp8):
    for g in bench.gemms("8b", fp8):
        for m in (100, 2049):
            check(g, m, chosen(g, m), FP8 if fp8 else BF16)


def test_20000_tokens():
    o = bench.Operands(bench.Gemm("o", 4096, 4096, "residual"), 20000, FP8)
    config = gemm_sm90.choose(20000, 4096)
    o.run(config)
    for first in (0, 9900, 19900):
        assert o.error(first, first + 100) <= bench.limit(o.gemm, config, FP8)


def test_promotion_is_what_float32_gives():
    """At K = 14336 the fast accumulator's error is visible, the promoted one's is not."""
    g = bench.Gemm("down", 1024, 14336)
    errors = []
    for config in (gemm_sm90.PAIR, gemm_sm90.PROMOTED[0][0]):
        o = bench.Operands(g, 300, FP8)
        o.run(config)
        errors.append(bench.relative(o.y, o.exact()))
    assert errors[1] < 2**-8  # bfloat16's rounding is 2^-9 in the mean square at most
    assert errors[1] <= errors[0]


def test_same_input_same_bits_whatever_the_batch():
    g = bench.gemms("8b", True)[1]
    o = bench.Operands(g, 700, FP8)
    config = gemm_sm90.choose(700, g.n)
    first = o.run(config).clone()
    for _ in range(20):
        assert torch.equal(o.run(config), first)
    part = torch.empty_like(o.y[:65])
    gemm_sm90.gemm(
        o.x[300:365], o.weight, part, config, g.epilogue, step=o.step, channel=o.channel, residual=o.residual[300:365],
        scale=0.5,
    )  # fmt: skip
    assert torch.equal(part, first[300:365])


def test_many_launches_in_a_graph():
    """Barriers and state come out of every launch as they went in."""
    g = bench.Gemm("gate_up", 2048, 512, "swiglu", out8=True)
    o = bench.Operands(g, 260, FP8)
    config = gemm_sm90.TURNS
    o.run(config)
    want = o.run(config).clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            o.run(config)
    for _ in range(100):
        graph.replay()
    assert torch.equal(o.y.view(torch.uint8), want.view(torch.uint8))
    assert float(o.act[formats.FP8_SLOTS["calls"]]) == 1002
    assert o.act[21:].tolist() == [0, 0, 0]


# ---- what stands before a product ------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [576, 896, 4096, 14336, 28672])
@pytest.mark.parametrize("scaling", ["delayed", "static", "dynamic", "row"])
@pytest.mark.parametrize("rms", [True, False])
def test_codes(k, scaling, rms):
    """Codes, scale and state are those of formats.fp8_quantize, over calls that saturate and that are not finite."""
    ours, theirs = formats.fp8_state("cuda"), formats.fp8_state("cuda")
    for call in range(6):
        x = (torch.randn(70, k, device="cuda") * (1, 1, 40, 1e-3, 0, 1)[call]).bfloat16()
        if call == 5:
            x[3, 5], x[60, 7] = float("inf"), float("nan")
        codes, step = gemm_sm90.codes_of(x, ours, scaling, rms, 1e-5)
        row = reference_linear.normalized(x.float(), 1e-5) if rms else x.float()
        want, want_step = formats.fp8_quantize(row, theirs, scaling)
        torch.testing.assert_close(step.view(-1), want_step.view(-1), rtol=1e-5, atol=0.0)
        if scaling == "row":  # what the report shows as the scale: a row of zeros among others counts as 1 there only
            ours[formats.FP8_SLOTS["scale"]] = theirs[formats.FP8_SLOTS["scale"]]
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0.0)
        # rstd's last bit moves values over the boundary of a code now and then
        differ = (codes.view(torch.uint8) & 127 != want.view(torch.uint8) & 127).float().mean()
        assert float(differ) < (2e-3 if scaling != "row" else 2e-2)  # a row's own scale: values between two codes
        if call == 1 and scaling == "static":
            for state in (ours, theirs):
                formats.fp8_freeze(state)


def operands(op, n, k, dtype, prologue, epilogue):
    x = torch.randn(3, 50, k, device="cuda").to(dtype)
    columns = n // 2 if "swiglu" in epilogue else n
    bias = torch.randn(n, device="cuda").to(dtype) if "bias" in epilogue else None
    residual = torch.randn(3, 50, columns, device="cuda").to(dtype) if "residual" in epilogue else None
    w = torch.randn(n, k, device="cuda") / k**0.5
    tail = (bias, residual, 1e-5, 0.5, prologue, epilogue)
    if op == "linear_bf16":
        return (x, w.to(dtype), *tail)
    return (x, *formats.quantize_fp8(w), formats.fp8_state("cuda"), *tail)


EPILOGUES = ("", "bias", "residual", "bias|swiglu", "bias|residual")


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("prologue", ["", "rms"])
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_operators_are_the_reference(epilogue, prologue, dtype):
    args = operands("linear_bf16", 512, 576, dtype, prologue, epilogue)
    assert gemm_sm90.accepts_bf16(*args) is None
    # The reference multiplies in tf32-free float32 and rounds once, as the kernel does.
    assert bench.relative(gemm_sm90.linear_bf16(*args), reference_linear.linear_bf16(*args)) < 4e-3
    for scaling in ("delayed", "dynamic", "row"):
        args = operands("linear_fp8", 512, 576, dtype, prologue, epilogue)
        assert gemm_sm90.accepts_fp8(*args, scaling) is None
        want = reference_linear.linear_fp8(*(a.clone() if i == 3 else a for i, a in enumerate(args)), scaling)
        assert bench.relative(gemm_sm90.linear_fp8(*args, scaling), want) < 6e-3  # codes on a boundary


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("gain", [True, False])
@pytest.mark.parametrize("shape", [(512, 576), (336, 200)], ids=str)
def test_packed_int4(epilogue, gain, shape):
    n, k = shape
    packed = formats.pack_int4(formats.quantize_int4(torch.randn(n, k, device="cuda") / k**0.5, 64))
    x, _, *tail = operands("linear_bf16", n, k, BF16, "rms", epilogue)
    row = torch.rand(k, device="cuda").bfloat16() + 0.5 if gain else None
    args = (x, packed, n, k, 64, *tail, row)
    assert gemm_sm90.accepts_int4(*args) is None
    # the weight is rounded to bfloat16 once more than in the reference
    assert bench.relative(gemm_sm90.linear_int4(*args), reference_linear.linear_int4(*args)) < 6e-3


def test_strided_input_and_residual():
    """Rows of a larger matrix are read where they are."""
    _, w, *rest = operands("linear_bf16", 512, 576, BF16, "", "residual")
    wide = torch.randn(3, 50, 640, device="cuda").bfloat16()
    residual = torch.randn(3, 50, 1024, device="cuda").bfloat16()[..., 512:]
    rest[1] = residual
    y = gemm_sm90.linear_bf16(wide[..., :576], w, *rest)
    assert torch.equal(
        y, gemm_sm90.linear_bf16(wide[..., :576].contiguous(), w, rest[0], residual.contiguous(), *rest[2:])
    )


@pytest.mark.parametrize("tokens", [3, 150])
def test_mlp(tokens):
    """The state of the row between the products decides as formats.fp8_quantize does, also where a call saturates."""
    n, k, out = 512, 576, 320
    weights = (*formats.quantize_fp8(torch.randn(n, k, device="cuda") / k**0.5),)
    down = (*formats.quantize_fp8(torch.randn(out, n // 2, device="cuda") / 16),)
    states = [formats.fp8_state("cuda") for _ in range(4)]
    for call in range(5):
        x = torch.randn(2, tokens, k, device="cuda")
        if call == 3:
            x[1, 2] *= 300  # without a norm: a massive token
        residual = torch.randn(2, tokens, out, device="cuda").bfloat16()
        tail = (None, residual, 1e-5, 0.5, "rms" if call < 3 else "", "residual", "delayed")
        mine, its = ((*weights, states[i], None, *down, states[i + 1], *tail) for i in (0, 2))
        assert gemm_sm90.accepts_mlp(x.bfloat16(), *mine) is None
        y, want = gemm_sm90.mlp_fp8(x.bfloat16(), *mine), reference_linear.mlp_fp8(x.bfloat16(), *its)
        assert bench.relative(y, want) < 2e-2  # codes on a boundary, in two roundings to e4m3
        for a, b in ((0, 2), (1, 3)):
            torch.testing.assert_close(states[a], states[b], rtol=1e-2, atol=0.0)
    assert float(states[1][formats.FP8_SLOTS["saturations"]]) == 1


# ---- between projection and attention --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("heads", "rotated", "norms", "dtype", "batch"),
    [((32, 8, 128), 128, False, BF16, 1), ((4, 2, 64), 64, True, BF16, 2), ((6, 2, 96), 72, False, F16, 2)],
    ids=["8b", "norms", "partial"],
)
@pytest.mark.parametrize(("start", "tokens"), [(0, 70), (0, 5), (33, 200), (64, 64), (130, 1)])
def test_rope_and_append(heads, rotated, norms, dtype, batch, start, tokens):
    q_heads, kv_heads, dim = heads
    qkv = torch.randn(batch, tokens, (q_heads + 2 * kv_heads) * dim, device="cuda").to(dtype)
    angle = torch.randn(1, tokens, rotated, device="cuda")
    gains = [torch.randn(dim, device="cuda").to(dtype) if norms else None for _ in range(2)]
    rope = (qkv, angle.cos().to(dtype), angle.sin().to(dtype), *gains, 1e-5)
    for y, want in zip(qkv_rope_sm90.qkv_rope(*rope, *heads), reference_attention.qkv_rope(*rope, *heads), strict=True):
        assert bench.relative(y, want) < 1e-3  # the hardware's rsqrt moves a rounding now and then
    keys, values = (torch.randn(batch, kv_heads, 340, dim, device="cuda").to(dtype) for _ in range(2))
    store = formats.kv_store(batch, kv_heads, 340, dim, "cuda")
    cache = [keys, values, *(torch.randint(0, 2, t.shape, device="cuda").to(t.dtype) for t in store)]
    tables = torch.randn(kv_heads, dim, device="cuda") * 0.1, torch.rand(kv_heads, dim, device="cuda") + 0.5
    position = torch.arange(start, start + tokens, device="cuda")
    mine, its = [t.clone() for t in cache], [t.clone() for t in cache]
    y = qkv_rope_sm90.qkv_append(*rope, *mine, *tables, position, *heads)
    want = reference_attention.qkv_append(*rope, *its, *tables, position, *heads)
    for a, b in zip((*y, *mine), (*want, *its), strict=True):
        assert float((a.float() != b.float()).float().mean()) < 2e-3
