"""The CUDA decode linears against float64 on the same codes and scales. One command on a Hopper GPU:

python -m pytest tests/gpu -m gpu

Fresh random inputs in every run, outputs poisoned, all shapes of the supported families and odd ones. The tolerance is
2 bfloat16 roundings of the output (one is the store; the other is float32 summation and the hardware's rsqrt and exp).
"""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import decode_linears as bench
from fu_compile.lowerings import linear_int4_sm90 as int4

from fu_compile import formats, jit, lowerings

pytestmark = pytest.mark.gpu

ROUNDINGS = bench.ROUNDINGS
SHAPES = bench.SMALL + bench.linears("8b")


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """All kernels at once, on all cores: one after another they would be most of the time."""
    want = [(s, t, 128, torch.bfloat16) for s in SHAPES for t in int4.TOKENS]
    want += [
        (s, t, g, d)
        for s in bench.SMALL
        for g in (64, 32)
        for d in (torch.bfloat16, torch.float16)
        for t in (1, 4, 8, 32)
    ]
    want += [(s, t, 128, torch.bfloat16) for s in bench.linears("70b") for t in (1, 8, 32)]
    jit.warmup([bench.kernel(*w) for w in want], progress=False)


def identity(lin: bench.Linear) -> str:
    return f"{lin.n}x{lin.k}-{lin.prologue}-{lin.epilogue}"


@pytest.mark.parametrize("lin", SHAPES, ids=identity)
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 8, 9, 16, 17, 31, 32, 33, 64])
def test_int4(lin, tokens):
    assert bench.check_one(lin, tokens, 128, torch.bfloat16) <= ROUNDINGS


@pytest.mark.parametrize("lin", bench.SMALL, ids=identity)
@pytest.mark.parametrize("group", [64, 32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_int4_groups_and_float16(lin, group, dtype):
    for tokens in (1, 4, 7, 20, 50):
        assert bench.check_one(lin, tokens, group, dtype) <= ROUNDINGS


def divisions(tokens: int) -> list:
    """Every shape with the first configuration of each kind and depth of a stage: most are chosen by no shape of these
    tests."""
    found = []
    for lin in SHAPES:
        kinds = {}
        shape = (lin.n, lin.k, 128, int4.bound(tokens), 132)
        for c in int4.configs(*shape):
            kinds.setdefault((c.way, min(c.chunk, 2)), (lin, c))
        found += kinds.values()
    return found


@pytest.mark.parametrize("tokens", [3, 5, 8, 27, 32])
def test_every_kind_of_division(tokens):
    cases = divisions(tokens)
    kernels = [
        int4.kernel_of(c, s.n, s.k, 128, False, s.prologue, s.epilogue, bench.takes_gain(s, torch.bfloat16))
        for s, c in cases
    ]
    jit.warmup(kernels, progress=False)
    for lin, c in cases:
        assert bench.check_one(lin, tokens, 128, torch.bfloat16, c) <= ROUNDINGS, (lin, c)


@pytest.mark.parametrize("lin", bench.linears("70b"), ids=identity)
@pytest.mark.parametrize("tokens", [1, 8, 32])
def test_int4_70b(lin, tokens):
    assert bench.check_one(lin, tokens, 128, torch.bfloat16) <= ROUNDINGS


@pytest.mark.parametrize("lin", [s for s in SHAPES if s.k % 16 == 0], ids=identity)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fp8(lin, dtype):
    for tokens in (1, 3, 8, 19, 64):
        assert bench.check_fp8(lin, tokens, dtype) <= ROUNDINGS


@pytest.mark.parametrize("tokens", [8, 32])
def test_same_bits_at_any_batch_position(tokens):
    lin = bench.linears("8b")[0]
    packed = formats.pack_int4(bench.random_codes(lin.n, lin.k, 128))
    x = torch.randn(tokens, lin.k, device="cuda", dtype=torch.bfloat16)
    y = bench.ours(x, packed, lin, 128)
    order = torch.randperm(tokens, device="cuda")
    assert torch.equal(bench.ours(x[order], packed, lin, 128), y[order])


@pytest.mark.parametrize("tokens", [1, 8, 32])
def test_ten_thousand_replays_are_identical(tokens):
    weights, layers, _ = bench.packed_weights("8b", 128)
    x = torch.randn(tokens, 4096, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(x)

    def call(i, lin, v, residual):
        return bench.ours(v, weights[lin.name][i], lin, 128, None, residual)

    body = bench.layer_body("8b", call, layers, x)
    graph = bench.graph_of(lambda: out.copy_(body()))
    graph.replay()
    want = out.clone()
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(10_000):
        out.fill_(float("nan"))
        graph.replay()
        different += (out != want).any()
    assert int(different) == 0


def test_the_operator_chooses_cuda_and_says_why_not():
    lin = bench.Linear("", 960, 576, "rms", "")
    packed = formats.pack_int4(bench.random_codes(lin.n, lin.k, 128))
    x = torch.randn(2, 1, 576, device="cuda", dtype=torch.bfloat16)
    args = (packed, 960, 576, 128, None, None, 1e-5, 1.0, "rms", "")
    assert lowerings.choose("linear_int4", "cuda", x, *args)[0].name == "cuda"
    y = torch.ops.futransformer.linear_int4(x, *args)
    with lowerings.using("reference"):
        want = torch.ops.futransformer.linear_int4(x, *args)
    torch.testing.assert_close(y, want, rtol=2**-6, atol=2**-6)
    chosen, passed = lowerings.choose("linear_int4", "cuda", x.float(), *args)
    assert chosen.name != "cuda"
    assert any("16 bits" in reason for _, reason in passed)
    chosen, passed = lowerings.choose("linear_int4", "cuda", x.expand(2, 40, 576), *args)
    assert any("80 tokens" in reason for _, reason in passed)


def test_strided_input_and_residual():
    lin = bench.Linear("", 960, 576, "", "residual")
    packed = formats.pack_int4(bench.random_codes(lin.n, lin.k, 128))
    wide = torch.randn(5, 2000, device="cuda", dtype=torch.bfloat16)
    for x, r in (
        (wide[:, 8:584], wide[:, 600:1560]),
        (wide[:, 1:577], wide[:, 3:963]),
        (wide[::2, :576], wide[::2, 40:1000]),
    ):
        want = bench.ours(x.contiguous(), packed, lin, 128, None, r.contiguous())
        assert torch.equal(bench.ours(x, packed, lin, 128, None, r), want)


def test_capture_before_the_first_launch():
    lin = bench.Linear("", 976, 640, "rms", "")
    packed = formats.pack_int4(bench.random_codes(lin.n, lin.k, 128))
    x = torch.randn(1, 640, device="cuda", dtype=torch.bfloat16)
    int4._kernel.cache_clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = bench.ours(x, packed, lin, 128)
    graph.replay()
    assert torch.equal(y, bench.ours(x, packed, lin, 128))
