"""The GEMM compiles here, without a GPU, for every shape of 8B and 70B inside its budget; its choices and refusals."""

from types import SimpleNamespace

import pytest
import torch
from fu_compile.lowerings import TABLE, gemm_sm90, reference_linear
from fu_compile.lowerings import decode_linear as common
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from fu_compile import jit, ops

FP8, BF16, F16 = torch.float8_e4m3fn, torch.bfloat16, torch.float16
REGISTERS = 168
"""What a thread of 384 starts with; setmaxnreg moves it to 232 and 40 (or 240 and 24)."""
SHAPES = {
    "8b": ((6144, 4096, ""), (4096, 4096, "residual"), (28672, 4096, "swiglu"), (4096, 14336, "residual")),
    "70b": ((10240, 8192, ""), (8192, 8192, "residual"), (57344, 8192, "swiglu"), (8192, 28672, "residual")),
}
OTHER = {"8b": (1, 100, 500, 8192), "70b": (2048,)}
"""Numbers of tokens whose kernels are compiled beside those of 8B at 2,048."""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("FU_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("FU_DISABLE_JIT", raising=False)


def check(kernels: list[jit.Kernel]) -> None:
    jit.warmup(kernels, progress=False)
    for kernel in kernels:
        used = kernel.cubin.resources
        assert used.spill_stores == used.spill_loads == 0, (kernel.constants, used)
        assert used.registers <= REGISTERS, (kernel.constants, used)
        assert not used.serialized, kernel.constants


def of_model(model: str, tokens: tuple[int, ...]) -> list[jit.Kernel]:
    """What prefill of a model runs: FP8 (SwiGLU with e4m3 output), BF16."""
    found = []
    for n, k, epilogue in SHAPES[model]:
        swiglu = epilogue == "swiglu"
        configs = dict.fromkeys(gemm_sm90.choose(m, n, swiglu) for m in tokens)
        found += [gemm_sm90.kernel(n, k, c, FP8, epilogue, out8=swiglu) for c in configs]
        found += [gemm_sm90.kernel(n, k, c, BF16, epilogue, row=epilogue != "residual") for c in configs]
    return found


def test_kernels_of_8b_at_2048_tokens():
    check(of_model("8b", (2048,)))


@pytest.mark.slow
@pytest.mark.parametrize("model", ["8b", "70b"])
def test_all_kernels(model):
    check(of_model(model, OTHER[model]))


@pytest.mark.slow
def test_every_epilogue_and_promotion():
    n, k = 1152, 896
    kernels = []
    for epilogue in ("bias", "bias|swiglu", "bias|residual"):
        kernels += [gemm_sm90.kernel(n, k, gemm_sm90.TOGETHER, dtype, epilogue, row=True) for dtype in (BF16, FP8)]
        kernels += [gemm_sm90.kernel(n, k, config, FP8, epilogue) for config in (gemm_sm90.PAIR, gemm_sm90.SMALL[1][0])]
        kernels.append(gemm_sm90.kernel(n, k, gemm_sm90.PROMOTED[0][0], FP8, epilogue, row=True))
        kernels.append(gemm_sm90.kernel(n, k, gemm_sm90.PAIR, F16, epilogue, half=True))
    kernels.append(gemm_sm90.kernel(n, k, gemm_sm90.PAIR, BF16, "residual", squares=True))
    check(kernels)


@pytest.mark.parametrize("prefill", ["fp8", "bf16"])
def test_kernels_of_a_model_are_those_that_prefill_asks_for(prefill):
    qwen = SimpleNamespace(
        model_type="qwen2", hidden_size=896, num_attention_heads=14, num_key_value_heads=2, intermediate_size=4864
    )
    kernels = gemm_sm90.kernels_of(qwen, prefill)
    gemms = [k.constants for k in kernels if k.source == "gemm_sm90.cu"]
    shapes = {(c["N"], c["K"], c["BIAS"], c["SWIGLU"], c["RESIDUAL"]) for c in gemms}
    assert shapes == {(1152, 896, 1, 0, 0), (896, 896, 0, 0, 1), (9728, 896, 0, 1, 0), (896, 4864, 0, 0, 1)}
    fp8 = prefill == "fp8"
    assert {c["TYPE"] for c in gemms} == {2 if fp8 else 0}
    assert all(c["OUT8"] == (fp8 and c["SWIGLU"]) for c in gemms)
    assert all(c["ROW"] == (not fp8 and not c["RESIDUAL"]) for c in gemms)
    others = [k.source for k in kernels if k.source != "gemm_sm90.cu"]
    assert others == ["gemm_rows_sm90.cu"] * (1 + fp8) + ["qkv_rope_sm90.cu"] * 2
    # every number of tokens finds its kernel among them
    made = {tuple(sorted(c.items())) for c in gemms}
    for m in (2, 17, 100, 128, 129, 700, 2048, 2300, 5000, 8192, 30000):
        config = gemm_sm90.choose(m, 9728, True)
        dtype = FP8 if fp8 else BF16
        wanted = gemm_sm90.kernel(9728, 896, config, dtype, "swiglu", row=not fp8, out8=fp8)
        assert tuple(sorted(wanted.constants.items())) in made


def test_rows_kernels():
    """What stands before a product; and a compiled multiplication is what it says: wgmma of the operands' type."""
    kernels = [gemm_sm90.rows_kernel(k, rms, True, False) for k in (576, 4096, 28672) for rms in (True, False)]
    kernels.append(gemm_sm90.rows_kernel(4096, True, False, True))
    jit.warmup(kernels, progress=False)
    for kernel in kernels:
        assert kernel.cubin.resources.spill_stores == 0
        assert kernel.cubin.resources.registers * kernel.shape.block <= 65536


@settings(max_examples=60, deadline=None)
@given(
    m=st.integers(1, 40000),
    n=st.integers(1, 8192).map(lambda i: 8 * i),
    promote=st.booleans(),
    swiglu=st.booleans(),
    out8=st.booleans(),
)
def test_every_shape_has_a_configuration_that_fits(m, n, promote, swiglu, out8):
    config = gemm_sm90.choose(m, n, swiglu, promote)
    assert config.promote == promote
    assert gemm_sm90.smem(config, swiglu, out8) <= common.SMEM_MAX
    assert gemm_sm90.stages(config, swiglu, out8) >= 3  # fewer do not cover a copy's latency
    blocks = config.tile_m // (64 if config.pingpong else 128)
    assert blocks * config.tile_n * (2 if promote else 1) // 2 <= 192  # accumulators of a thread


@settings(max_examples=60, deadline=None)
@given(k=st.integers(1, 4096).map(lambda i: 8 * i), dtype=st.sampled_from([FP8, BF16]))
def test_a_group_of_tiles_has_as_much_of_x_as_stays_in_l2(k, dtype):
    for config in (gemm_sm90.PAIR, gemm_sm90.TOGETHER, gemm_sm90.TURNS, gemm_sm90.SMALL[2][0]):
        rows = config.tile_m * config.cluster
        group = gemm_sm90.group(config, k, dtype)
        least = min(16, gemm_sm90.X_ROWS // rows)
        assert group in (8, 16)
        assert group == least or group * rows * k * dtype.itemsize <= gemm_sm90.X_BYTES
        assert group == 16 or 2 * group * rows * k * dtype.itemsize > gemm_sm90.X_BYTES
        assert gemm_sm90.kernel(64, k, config, dtype).constants["GROUP"] == group
    assert gemm_sm90.group(gemm_sm90.PAIR._replace(group=2), k, dtype) == 2


def test_choice_follows_the_work():
    assert gemm_sm90.choose(1, 4096).tile_m == 64  # most of a larger tile would be padding
    assert gemm_sm90.choose(8192, 28672, swiglu=True) == gemm_sm90.TURNS
    areas = [gemm_sm90.choose(m, 4096) for m in (1, 64, 256, 2048, 8192)]
    sizes = [c.tile_m * c.tile_n for c in areas]
    assert sizes == sorted(sizes)


def arguments(op: str, **changed):
    """Arguments that are ours on Hopper, some of them changed."""
    n, k = changed.pop("n", 512), changed.pop("k", 256)
    dtype = changed.pop("dtype", BF16)
    x = torch.empty(2, 5, changed.pop("features", k), dtype=dtype)
    steps = changed.pop("epilogue", "")
    columns = n // 2 if "swiglu" in steps else n
    bias = torch.empty(n, dtype=changed.pop("bias_dtype", dtype)) if "bias" in steps else None
    residual = torch.empty(2, 5, changed.pop("residual", columns), dtype=dtype) if "residual" in steps else None
    common_args = (bias, residual, 1e-5, 1.0, "rms", steps)
    if op == "linear_int4":
        args = (x, torch.empty(1, dtype=torch.uint8), n, k, 128, *common_args, None)
    elif op == "linear_bf16":
        args = (x, torch.empty(n, k, dtype=changed.pop("weight_dtype", dtype)), *common_args)
    else:
        weight = torch.empty(n, k, dtype=changed.pop("weight_dtype", FP8))
        if changed.pop("transposed", False):
            weight = torch.empty(k, n, dtype=FP8).t()
        args = (x, weight, torch.empty(n), torch.empty(24), *common_args, changed.pop("scaling", "delayed"))
    assert not changed
    return args


@pytest.mark.parametrize(
    ("op", "changed", "says"),
    [
        ("linear_fp8", {"scaling": "none"}, "not quantised"),
        ("linear_fp8", {"weight_dtype": BF16}, "not e4m3"),
        ("linear_fp8", {"transposed": True}, "not contiguous"),
        ("linear_fp8", {"k": 264}, "multiple of 16 bytes"),
        ("linear_fp8", {"dtype": torch.float32}, "not 16 bits"),
        ("linear_fp8", {"n": 500}, "500 output features"),
        ("linear_fp8", {"n": 520, "epilogue": "swiglu"}, "260 output features"),
        ("linear_fp8", {"features": 128}, "the input has 128 features"),
        ("linear_fp8", {"epilogue": "bias", "bias_dtype": torch.float32}, "bias has another dtype"),
        ("linear_fp8", {"epilogue": "residual", "residual": 256}, "residual does not look like"),
        ("linear_fp8", {"epilogue": "swiglu|residual"}, "SwiGLU with a residual"),
        ("linear_bf16", {"weight_dtype": F16}, "the weight is torch.float16"),
        ("linear_bf16", {"k": 36}, "multiple of 16 bytes"),
        ("linear_bf16", {"k": 40000}, "up to 32768"),
        ("linear_int4", {"k": 36}, "multiple of 16 bytes"),
        ("linear_int4", {"n": 500}, "500 output features"),
        ("linear_int4", {"dtype": torch.float32}, "not 16 bits"),
        # and what is ours everywhere but here
        ("linear_int4", {"epilogue": "swiglu"}, "written for Hopper"),
        ("linear_fp8", {}, "written for Hopper"),
        ("linear_bf16", {"epilogue": "bias|residual", "dtype": F16}, "written for Hopper"),
    ],
)
def test_refusals_name_their_reason(op, changed, says):
    with FakeTensorMode():
        reason = gemm_sm90.ACCEPTS[op](*arguments(op, **changed))
    assert reason is not None
    assert says in reason


def test_ours_on_hopper(monkeypatch):
    monkeypatch.setattr(common, "unavailable", lambda device: None)
    with FakeTensorMode():
        for op in ("linear_fp8", "linear_bf16", "linear_int4"):
            for epilogue in reference_linear._EPILOGUES:
                if "swiglu|residual" not in epilogue:
                    assert gemm_sm90.ACCEPTS[op](*arguments(op, epilogue=epilogue)) is None


def test_it_stands_before_the_others():
    """In the table: behind the decode kernel (which takes unquantised activations only), before cuBLASLt."""
    assert [c.launch.__module__.rpartition(".")[2] for c in TABLE["linear_fp8"] if c.name == "cuda"] == [
        "linear_fp8_sm90", "gemm_sm90", "cublas_prefill"
    ]  # fmt: skip
    assert TABLE["linear_bf16"][0].launch is gemm_sm90.linear_bf16
    assert TABLE["linear_int4"][1].launch is gemm_sm90.linear_int4
    assert TABLE["mlp_fp8"][0].launch is gemm_sm90.mlp_fp8
    assert set(gemm_sm90.LAUNCH) <= set(ops.SCHEMAS)


def test_shared_memory_is_checked_by_the_kernel(monkeypatch):
    """The kernel does not compile with another sum than its own."""
    from fu_compile.errors import LoweringError

    kernel = gemm_sm90.kernel(64, 64, gemm_sm90.PAIR, BF16)
    with pytest.raises(LoweringError, match="shared memory as the lowering computes it"):
        jit.cubin(kernel.source, kernel.constants | {"SMEM": kernel.constants["SMEM"] - 8})
    with pytest.raises(LoweringError, match="bytes of shared memory"):
        gemm_sm90.kernel(64, 64, gemm_sm90.Config(128, 256, 1, True, stages=3), BF16)
