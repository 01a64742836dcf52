"""Every CUDA kernel of the 8B and 70B sets compiles here, without a GPU, inside its budget; and the cache of cubins."""

import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
from fu_compile.lowerings import linear_fp8_sm90, linear_int4_sm90

from fu_compile import __main__ as cli
from fu_compile import jit
from fu_compile.errors import FuWarning, LoweringError

LLAMA_8B = SimpleNamespace(
    model_type="llama", hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, intermediate_size=14336
)
LLAMA_70B = SimpleNamespace(
    model_type="llama", hidden_size=8192, num_attention_heads=64, num_key_value_heads=8, intermediate_size=28672
)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("FU_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("FU_DISABLE_JIT", raising=False)
    jit._warn_unwritable.cache_clear()
    return tmp_path / "cache" / "kernels"


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """A source that compiles in a moment."""
    source = tmp_path / "csrc"
    source.mkdir()
    (source / "tiny.cu").write_text('extern "C" __global__ void FU_KERNEL(int* p) { *p = FU_VALUE; }\n')
    monkeypatch.setattr(jit, "CSRC", source)
    monkeypatch.setattr(jit, "_memory", {})
    jit._headers.cache_clear()
    yield "tiny.cu"
    jit._headers.cache_clear()


def budget(kernel: jit.Kernel) -> int:
    """Registers of a thread with which as many blocks fit an SM as the design wants."""
    if "REGISTERS" in kernel.constants:  # a block has a multiprocessor, beside arrange_rows
        return kernel.constants["REGISTERS"]
    if kernel.source.startswith("arrange_rows"):  # what it leaves: 1024 registers on each of the four register files
        return 32
    blocks = 2 if kernel.shape.smem <= 115_712 else 1
    warps = -(-kernel.shape.block // 32 * blocks // 4)  # on one of the four register files of 16384
    return 16384 // (32 * warps) // 8 * 8


def check(kernels: list[jit.Kernel]) -> None:
    kernels = [
        k for k in kernels if k.source.startswith(("linear", "arrange_rows"))
    ]  # attention: test_attention_compile.py
    jit.warmup(kernels, progress=False)
    for kernel in kernels:
        used = kernel.cubin.resources
        assert used.spill_stores == 0, (kernel.cubin.name, used)
        assert used.registers <= budget(kernel), (kernel.cubin.name, used, budget(kernel))


def fp8_kernels() -> list[jit.Kernel]:
    shapes = ((6144, 4096, "rms", ""), (4096, 14336, "", "residual"), (57344, 8192, "rms", "swiglu"))
    return [linear_fp8_sm90.kernel(n, k, t, False, p, e) for n, k, p, e in shapes for t in (2, 8)]


def test_kernels_of_8b_at_one_and_eight_tokens():
    check(jit.kernels_of(LLAMA_8B, (1, 8)))


@pytest.mark.slow
@pytest.mark.parametrize("config", [LLAMA_8B, LLAMA_70B], ids=["8b", "70b"])
def test_all_kernels(config):
    check(jit.kernels_of(config, linear_int4_sm90.TOKENS))


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [4, 8, 16, 32])
def test_every_kind_of_division_compiles(tokens):
    """Those that --tune would try first and last of each kind."""
    kernels = []
    for n, k, prologue, epilogue in ((28672, 4096, "rms", "swiglu"), (4096, 14336, "", "residual")):
        kinds = {}
        for c in linear_int4_sm90.configs(n, k, 128, tokens, 132):
            assert 0 < c.smem(n, k, 128) <= c.limit
            kinds.setdefault(c.way, []).append(c)
        assert any(prepare for _, _, prepare, _ in kinds) == (tokens <= linear_int4_sm90.PREPARED)
        assert any(wgmma for _, _, _, wgmma in kinds) == (tokens >= 8)
        for found in kinds.values():
            kernels += [
                linear_int4_sm90.kernel_of(c, n, k, 128, False, prologue, epilogue) for c in (found[0], found[-1])
            ]
    jit.warmup(kernels, progress=False)
    for kernel in kernels:
        used = kernel.cubin.resources
        assert used.registers <= kernel.constants["REGISTERS"], (kernel.cubin.name, used)
        assert not used.serialized, kernel.cubin.name
    # --tune leaves out what spills; most do not
    assert sum(k.cubin.resources.spill_stores > 0 for k in kernels) <= len(kernels) // 4
    assert not any(c.wgmma for c in linear_int4_sm90.configs(4096, 4096, 64, 32, 132))  # one scale a tile
    assert not any(c.wgmma for c in linear_int4_sm90.configs(4096, 4096, 128, 32, 132, half=True))


@pytest.mark.slow
def test_variants_of_the_format():
    check(fp8_kernels())
    check(jit.kernels_of(LLAMA_8B, (1, 8, 32), half=True))
    for group in (64, 32):
        check(jit.kernels_of(LLAMA_8B, (1, 32), group))


@pytest.mark.parametrize("n", [1, 37, 960, 2112, 6144, 57344])
@pytest.mark.parametrize("k", [8, 200, 576, 4096, 28672])
@pytest.mark.parametrize("group", [128, 32])
def test_every_shape_has_a_configuration_that_fits(n, k, group):
    for tokens in linear_int4_sm90.TOKENS:
        c = linear_int4_sm90.choose(n, k, group, tokens)
        assert 0 < c.smem(n, k, group) <= 232_448 - 1024, c
        assert c.grid % c.cluster == 0
        assert c.grid <= 132
        assert c.slots >= 1
        assert c.tokens >= tokens


def test_a_norm_before_a_shape_that_was_tuned_without_one():
    """A cluster whose blocks prepare x for themselves sees a part of the row each, and adds the squares up."""
    split = [key for key, c in linear_int4_sm90.TUNED.items() if c.prepare and c.cluster > 1]
    assert split
    check([linear_int4_sm90.kernel(n, k, 128, tokens, False, "rms", "", 132, True) for n, k, tokens in split])


def test_kernels_of_reads_the_configuration():
    qwen = SimpleNamespace(
        model_type="qwen2", hidden_size=896, num_attention_heads=14, num_key_value_heads=2, intermediate_size=4864
    )
    every = jit.kernels_of(qwen, (1,))
    kernels = every[:4]
    assert {k.source for k in every[4:]} == {"attention_int4_sm90.cu"}
    assert [k.constants["GAIN"] for k in kernels] == [1, 0, 1, 0]
    assert [k.constants["GAIN"] for k in jit.kernels_of(qwen, (1,), half=True)[:4]] == [0, 0, 0, 0]
    assert [(k.constants["N"], k.constants["K"]) for k in kernels] == [
        (1152, 896), (896, 896), (9728, 896), (896, 4864)
    ]  # fmt: skip
    assert [k.constants["BIAS"] for k in kernels] == [1, 0, 0, 0]
    assert [k.constants["RESIDUAL"] for k in kernels] == [0, 1, 0, 1]


def test_cold_then_memory_then_disk(tiny, folder):
    first = jit.cubin(tiny, {"VALUE": 3})
    assert first.origin == "compiled"
    assert first.code[:4] == b"\x7fELF"
    assert jit.cubin(tiny, {"VALUE": 3}) is first
    assert jit.cubin(tiny, {"VALUE": 4}).name != first.name
    jit._memory.clear()
    again = jit.cubin(tiny, {"VALUE": 3})
    assert (again.origin, again.code, again.resources) == ("disk", first.code, first.resources)
    assert len(list(folder.iterdir())) == 2  # and no temporary file


def test_key_covers_source_headers_and_versions(tiny, monkeypatch):
    _, text = jit.render(tiny, {"VALUE": 1})
    keys = {jit.cache_key(text), jit.cache_key(text + " ")}
    (jit.CSRC / "some.cuh").write_text("// a header")
    jit._headers.cache_clear()
    keys.add(jit.cache_key(text))
    monkeypatch.setattr(jit, "_nvrtc_version", lambda: "99")
    keys.add(jit.cache_key(text))
    assert len(keys) == 4


def test_damaged_entry_is_compiled_again(tiny, folder):
    code = jit.cubin(tiny, {"VALUE": 5}).code
    (entry,) = folder.iterdir()
    for damage in (b"", entry.read_bytes()[:-1], entry.read_bytes().replace(b"ELF", b"BAD")):
        entry.write_bytes(damage)
        jit._memory.clear()
        with pytest.warns(FuWarning, match="damaged"):
            found = jit.cubin(tiny, {"VALUE": 5})
        assert (found.origin, found.code) == ("compiled", code)
    jit._memory.clear()
    assert jit.cubin(tiny, {"VALUE": 5}).origin == "disk"


def test_folder_that_cannot_be_written(tiny, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("FU_CACHE_DIR", str(tmp_path / "file"))
    with pytest.warns(FuWarning, match="cannot be kept"):
        assert jit.cubin(tiny, {"VALUE": 6}).origin == "compiled"


def test_disabled_names_the_kernel_unless_it_is_cached(tiny, monkeypatch):
    jit.cubin(tiny, {"VALUE": 7})
    jit._memory.clear()
    monkeypatch.setenv("FU_DISABLE_JIT", "1")
    assert jit.cubin(tiny, {"VALUE": 7}).origin == "disk"
    with pytest.raises(LoweringError, match=r"tiny_.* is not in") as error:
        jit.cubin(tiny, {"VALUE": 8})
    assert "warmup" in str(error.value)
    monkeypatch.setenv("FU_DISABLE_JIT", "0")
    assert jit.cubin(tiny, {"VALUE": 8}).origin == "compiled"


def test_two_threads_compile_once(tiny):
    before = jit.COUNTERS.compiled
    threads = [threading.Thread(target=jit.cubin, args=(tiny, {"VALUE": 9})) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert jit.COUNTERS.compiled == before + 1


def test_source_errors_say_what(tiny):
    with pytest.raises(LoweringError, match="no CUDA source nothing"):
        jit.cubin("nothing.cu", {})
    (jit.CSRC / "wrong.cu").write_text('extern "C" __global__ void FU_KERNEL() { undeclared(); }\n')
    with pytest.raises(LoweringError, match="undeclared"):
        jit.cubin("wrong.cu", {})


def test_the_compiler_does_not_keep_kernels_itself(tiny, monkeypatch):
    """NVRTC 13.0 on a machine with a GPU: a kernel that any process has compiled comes back with an empty log."""
    import cuda.core

    asked, real = [], cuda.core.Program
    monkeypatch.setattr(cuda.core, "Program", lambda *args: asked.append(args[2]) or real(*args))
    assert jit.cubin(tiny, {"VALUE": 11}).resources.registers > 0
    assert [options.no_cache for options in asked] == [True]


def test_log_without_a_report_is_an_error():
    with pytest.raises(LoweringError, match="register report"):
        jit.parse_log("ptxas info : nothing of interest")


def test_import_needs_nothing_of_cuda():
    names = "cuda.core", "cuda.bindings", "triton"
    missing = "; ".join(f"sys.modules[{n!r}] = None" for n in names)
    code = f"import sys; {missing}; import fu_compile.lowerings, fu_compile.jit"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.fixture
def folder_of_a_model(tmp_path):
    """config.json of a model whose kernels compile in a moment."""
    from transformers import LlamaConfig

    tiny = LlamaConfig(
        hidden_size=128, intermediate_size=128, num_attention_heads=2, num_key_value_heads=1, dtype="bfloat16"
    )
    tiny.save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def test_warmup_compiles_ahead_without_a_gpu(folder_of_a_model, folder, capsys):
    assert cli.main(["warmup", folder_of_a_model, "--tokens", "1", "--prefill", "none"]) == 0
    printed = capsys.readouterr()
    made = len(list(folder.glob("*.fu")))
    assert made >= 5  # four linears and attention
    assert f"{made} kernels compiled, 0 already" in printed.out
    assert "kernels: 100%" in printed.err
    jit._memory.clear()
    assert cli.main(["warmup", folder_of_a_model, "--tokens", "1", "--prefill", "none", "--quiet"]) == 0
    printed = capsys.readouterr()
    assert f"0 kernels compiled, {made} already" in printed.out
    assert printed.err == ""


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        (["--dtype", "float32"], "16-bit activations"),
        (["--tokens", "0"], "--tokens 0"),
        (["--tokens", "1,x"], "not a list of numbers"),
        (["--tokens", "65"], "from 1 to 64"),
        (["--group-size", "100"], "no group size 100"),
    ],
)
def test_warmup_names_what_it_cannot_do(folder_of_a_model, folder, capsys, extra, says):
    assert cli.main(["warmup", folder_of_a_model, *extra]) == 2
    assert says in capsys.readouterr().err
    assert not folder.exists()


def test_warmup_without_nvrtc_is_a_named_error(folder_of_a_model, folder, capsys, monkeypatch):
    monkeypatch.setattr(jit, "unavailable", lambda: "the package cuda-core is not installed")
    assert cli.main(["warmup", folder_of_a_model, "--quiet"]) == 2
    printed = capsys.readouterr().err
    assert "cuda-core is not installed" in printed
    assert "linear_int4" in printed  # the kernel that was wanted
    assert cli.main(["warmup", "no/such/folder"]) == 2
