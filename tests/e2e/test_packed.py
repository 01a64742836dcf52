"""Packed models: one set of bytes from quantize() to the kernel, in eager, under the backend and on disk."""

import copy
import json
import os
import pickle
import re
import subprocess
import sys
import textwrap

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import config, model
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

import fu_compile
from fu_compile import formats, models, packed, registry
from fu_compile.errors import DataError, FormatError, GradientError, NoLlamaBlockError, OptionError, TrainingModeError
from fu_compile.quantize import PackedBlock, PackedLinear

EAGER_REST = {"rest": "eager", "kv_cache": "model", "strict": True}
NEW = 4


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def tokens(batch=2, length=9):
    return torch.randint(3, 131, (batch, length), generator=torch.Generator().manual_seed(5))


def packed_linears(m):
    return {n: mod for n, mod in m.named_modules() if isinstance(mod, PackedLinear)}


def dense_twin(original, quantised):
    """The float model with the weights that the packed ones stand for."""
    twin = copy.deepcopy(original)
    for name, module in packed_linears(quantised).items():
        twin.get_submodule(name).weight = torch.nn.Parameter(module.weight.to(next(original.parameters()).dtype))
    return twin


@torch.no_grad()
def logits(m, ids=None):
    return m(tokens() if ids is None else ids).logits


@torch.no_grad()
def generated(m):
    out = m.generate(
        tokens(), max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, cache_implementation="static",
        output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    return out.sequences, torch.stack(out.logits)


# ---- the layout of a block -----------------------------------------------------------------------------------------


@given(
    group=st.sampled_from(formats.GROUPS), paired=st.booleans(), k=st.integers(1, 300),
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=3), tail=st.integers(1, 40), seed=st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=25, deadline=None)
def test_int4_rows_are_those_of_the_codes(group, paired, k, sizes, tail, seed):
    """Any sizes: whole strips and a ragged last part; gate and up of any equal height."""
    rows_of_parts = [tail, tail] if paired else [*(16 * s for s in sizes), tail]
    generator = torch.Generator().manual_seed(seed)
    parts = [formats.quantize_int4(torch.randn(n, k, generator=generator), group, "asym") for n in rows_of_parts]
    block = packed.pack_codes(parts, paired)
    n = sum(p.codes.shape[0] for p in parts)
    first = 0
    for part in parts:
        rows = packed.Rows("int4", n, k, group, paired, first, part.codes.shape[0])
        rows.check()
        assert torch.equal(rows.dense(block), formats.dequantize_int4(part))
        if not paired:
            assert rows.operands(block)[0].untyped_storage().data_ptr() == block.untyped_storage().data_ptr()
        first += rows.rows
    whole = rows.whole
    assert (whole.refuses(swiglu=True) is None) == paired
    assert bool(whole.refuses(swiglu=False)) == paired
    with pytest.raises(FormatError, match="lies in u8"):
        whole.dense(block[:-1])


def test_fp8_rows_are_those_of_the_codes():
    w = torch.randn(37, 41)  # the scales start behind 37 * 41 bytes, rounded up
    block = packed.pack_fp8(*formats.quantize_fp8(w))
    rows = packed.Rows("fp8", 37, 41, 0, False, 5, 20)
    assert torch.equal(rows.dense(block), formats.dequantize_fp8(*formats.quantize_fp8(w))[5:25])
    codes, scales = rows.operands(block)
    assert codes.dtype == torch.float8_e4m3fn
    assert scales.dtype == torch.float32


@pytest.mark.parametrize(
    "bad", [{"n": 0}, {"first": 30, "rows": 10}, {"group": 48}, {"precision": "nf4"}, {"precision": "fp8"}, {"rows": 0}]
)
def test_numbers_that_describe_no_block(bad):
    good = {"precision": "int4", "n": 32, "k": 64, "group": 64, "paired": False, "first": 0, "rows": 32}
    packed.Rows(**good).check()
    with pytest.raises(FormatError, match="describes no rows"):
        packed.Rows(**{**good, **bad}).check()


# ---- quantize ------------------------------------------------------------------------------------------------------

CASES = [
    ("llama", {}, {}),
    ("qwen3", {}, {}),
    ("qwen2", {"overrides": [("*", "fp8")]}, {}),
    ("qwen2", {"overrides": [("*k_proj", "fp8"), ("*.0.*up_proj", "exact")]}, {}),
    ("smollm2", {"lm_head": "int4", "grid": "asym"}, {}),
    ("phi3", {"lm_head": "fp8"}, {}),
    ("llama", {}, {"hidden_act": "gelu"}),
]


@pytest.mark.parametrize(("family", "options", "changes"), CASES, ids=lambda v: str(v)[:40])
def test_eager_and_backend_compute_with_the_packed_weights(family, options, changes):
    original = model(config(family, num_hidden_layers=1, **changes))
    m = fu_compile.quantize(copy.deepcopy(original), group_size=32, progress=False, **options)
    twin = dense_twin(original, m)
    # float32: the same products, in another order at most
    torch.testing.assert_close(logits(m), logits(twin), rtol=1e-4, atol=2e-5)
    want_ids, want = generated(twin)
    m.compile(backend="futransformer", options={**EAGER_REST, "prefill": "bf16"})
    ids, got = generated(m)
    assert torch.equal(ids, want_ids)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=2e-5)
    report = fu_compile.report(m)
    assert report.counters["fallbacks"] == 0
    assert report.counters["decode_calls"] == NEW - 1
    linears = {name for graph in report.graphs for _, name, _ in graph.fused if name.startswith("linear")}
    assert "packed_weight" not in {name for graph in report.graphs for _, name, _ in graph.fused}
    assert linears <= {"linear_int4", "linear_fp8", "linear_exact"}
    if family == "llama" and not changes:
        for graph in report.graphs:  # everything is fused as with ordinary weights
            steps = sorted(d for _, name, d in graph.fused if name == "linear_int4")
            assert steps == ["residual", "residual", "rms", "rms swiglu"]
            assert graph.decision["weights"] == "packed"


def test_nothing_is_packed_again_and_nothing_copied():
    m = fu_compile.quantize(model(config("llama", num_hidden_layers=1)), group_size=64, progress=False)
    blocks = [mod.packed for mod in m.modules() if isinstance(mod, PackedBlock)]
    size = sum(b.numel() for b in blocks)
    m.compile(backend="futransformer", options=EAGER_REST)
    generated(m)
    graphs = list(fu_compile.report(m).models[0].alive)
    constants = [t for g in graphs for b in g._bindings.values() for t in b.constants]
    assert {t.untyped_storage().data_ptr() for t in constants} == {b.untyped_storage().data_ptr() for b in blocks}
    assert fu_compile.report(m).counters["bytes_packed"] == size
    # 4.5 bits a weight at group 64 (scale and zero are 24 bits); tiles of 128 columns are padded at these sizes
    assert size == sum(formats.int4_bytes(b.rows.n, b.rows.k, 64) for b in m.modules() if isinstance(b, PackedBlock))


def test_bfloat16_eager_is_the_reference_within_one_rounding():
    m = fu_compile.quantize(model(config("qwen2"), dtype=torch.bfloat16), group_size=32, progress=False)
    for linear in packed_linears(m).values():
        x = torch.randn(3, linear.in_features).bfloat16()
        want = torch.nn.functional.linear(x.double(), linear.weight.double())
        want += 0 if linear.bias is None else linear.bias.double()
        with torch.no_grad():
            got = linear(x).double()
        # each weight, the product and the sum with the bias are rounded to bfloat16 on a CPU: 2^-9 each
        assert (got - want).norm() <= 3 * 2**-9 * want.norm()


def test_int4_cache_and_fp8_prefill_run_on_a_packed_model():
    original = model(config("qwen2"))
    m = fu_compile.quantize(copy.deepcopy(original), group_size=32, overrides=[("*down_proj", "fp8")], progress=False)
    m.compile(backend="futransformer", options={"rest": "eager", "strict": True})
    ids = tokens(1, 70)  # one page of 64 tokens is quantised
    with torch.no_grad():
        out = m.generate(ids, max_new_tokens=3, min_new_tokens=3, do_sample=False, cache_implementation="static")
    assert out.shape == (1, 73)
    prefill, decode = fu_compile.report(m).graphs
    assert prefill.decision["cache"] == "int4"
    assert ("linear_fp8", "residual delayed") in {(n, d) for _, n, d in prefill.fused}
    assert ("linear_fp8", "residual none") in {(n, d) for _, n, d in decode.fused}
    tables = fu_compile.Int4Cache(m.config, 128, model=m).layers[0].key_mean
    same = fu_compile.Int4Cache(m.config, 128, model=dense_twin(original, m)).layers[0].key_mean
    assert torch.equal(tables, same)
    assert tables.any()


def test_gptq_packs_the_codes_that_it_chose():
    from fu_compile.gptq import quantize_blocks

    original = model(config("llama", num_hidden_layers=1))
    ids = torch.randint(3, 131, (3, 40))
    overrides = [("*v_proj", "fp8"), ("*o_proj", "exact")]
    chosen = {}
    for block in quantize_blocks(original, ids, group_size=32, overrides=overrides, progress=False):
        chosen |= block.layers
    m = fu_compile.quantize(
        copy.deepcopy(original), "gptq", group_size=32, overrides=overrides, calibration=ids, progress=False
    )
    linears = {n.rpartition("layers.0.")[2]: mod for n, mod in packed_linears(m).items()}
    assert linears.keys() == {f"self_attn.{p}_proj" for p in "qkv"} | {f"mlp.{p}_proj" for p in ("gate", "up", "down")}
    for name, codes in chosen.items():
        assert torch.equal(m.get_submodule(name).weight, formats.dequantize_int4(codes)), name
    assert linears["self_attn.v_proj"].where.precision == "fp8"
    assert m.config.quantization_config.method == "gptq"


def test_our_own_loop_and_other_backends_run_a_packed_model():
    m = fu_compile.quantize(model(config("llama", num_hidden_layers=1)), group_size=32, progress=False)
    more = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False}
    with torch.no_grad():
        want = m.generate(tokens(), **more)
        other = torch.compile(m.forward, backend="aot_eager")
        assert torch.equal(other(tokens()).logits, logits(m))
        m.compile(backend="futransformer", options=EAGER_REST)
        assert torch.equal(m.generate(tokens(), custom_generate=fu_compile.generate, **more), want)
    tables = fu_compile.calibrate_keys(m, [tokens()])
    assert len(tables.means) == 1


def test_a_key_bias_that_int4_would_lose_is_seen_through_packed_weights():
    original = model(config("qwen2"))
    with torch.no_grad():
        original.model.layers[1].self_attn.k_proj.bias[3] = 40.0
    m = fu_compile.quantize(original, group_size=32, progress=False)
    m.compile(backend="futransformer", options={"rest": "eager"})
    with torch.no_grad():
        m.generate(tokens(), max_new_tokens=1, do_sample=False, cache_implementation="static")
    prefill = fu_compile.report(m).graphs[0]
    assert [e.layer for e in prefill.near_misses() if "k_proj has a bias" in e.note] == ["model.layers.1.self_attn"]


@pytest.mark.parametrize(
    ("break_it", "options", "error", "match"),
    [
        (lambda m: m.train(), {}, TrainingModeError, "training"),
        (lambda m: m.model.layers[1].mlp.up_proj.weight.data[3].fill_(float("nan")), {}, FormatError, "not finite"),
        (lambda m: m.model.layers[1].mlp.up_proj.weight.data[3].fill_(1e6), {}, FormatError, "float16"),
        (lambda m: None, {"method": "awq"}, OptionError, "awq"),
        (lambda m: None, {"group_size": 48}, OptionError, "48"),
        (lambda m: None, {"grid": "nf4"}, OptionError, "nf4"),
        (lambda m: None, {"lm_head": "int3"}, OptionError, "int3"),
        (lambda m: None, {"overrides": [("*", "int2")]}, OptionError, "int2"),
    ],
)
def test_refused_before_anything_changes(break_it, options, error, match):
    m = model(config("llama"))
    break_it(m)
    before = [(n, type(mod)) for n, mod in m.named_modules()]
    with pytest.raises(error, match=match):
        fu_compile.quantize(m, progress=False, **options)
    assert [(n, type(mod)) for n, mod in m.named_modules()] == before
    assert not hasattr(m.config, "quantization_config")


def test_refused_twice_and_refused_without_layers():
    m = fu_compile.quantize(model(config("llama")), progress=False)
    with pytest.raises(FormatError, match="packed already"):
        fu_compile.quantize(m, progress=False)
    with pytest.raises(NoLlamaBlockError):
        fu_compile.quantize(torch.nn.Sequential(torch.nn.Linear(3, 3)).eval(), progress=False)


def test_training_and_gradients_are_refused_by_name():
    m = fu_compile.quantize(model(config("llama")), progress=False)
    assert not any(p.requires_grad for p in m.parameters())
    m(tokens())  # gradients enabled, nothing requires them
    with pytest.raises(TrainingModeError):
        m.train()(tokens())
    m.eval()
    m.model.embed_tokens.requires_grad_(True)
    with pytest.raises(GradientError):
        m(tokens())


class Largest(TorchDispatchMode):
    """The most elements that one floating tensor with memory had, while the mode was on."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (list, tuple)) else [out]:
            if isinstance(t, torch.Tensor) and t.is_floating_point() and not t.is_meta:
                self.numel = max(self.numel, t.numel())
        return out


def test_originals_are_freed_projection_by_projection(monkeypatch):
    from fu_compile import quantize

    m = model(config("llama", num_hidden_layers=3))
    alive, real = [], quantize.rtn_block

    def counting(group, *rest):
        alive.append(sum(isinstance(mod, torch.nn.Linear) for mod in m.modules()))
        return real(group, *rest)

    monkeypatch.setattr(quantize, "rtn_block", counting)
    m = fu_compile.quantize(m, progress=False)
    # lm_head and 7 linears a layer; before each block all earlier originals are gone
    assert alive == [1 + 7 * 3 - done for done in (0, 3, 4, 6, 7, 10, 11, 13, 14, 17, 18, 20)]


# ---- copies --------------------------------------------------------------------------------------------------------


MIXED = [("*.0.*down_proj", "fp8"), ("*.1.*o_proj", "exact")]


def mixed(seed=0):
    return fu_compile.quantize(model(config("qwen2"), seed=seed), group_size=32, overrides=MIXED, progress=False)


def test_deepcopy_pickle_and_state_dict():
    m = mixed()
    want = logits(m)
    for other in (copy.deepcopy(m), pickle.loads(pickle.dumps(m))):
        assert torch.equal(logits(other), want)
        q, k = other.model.layers[0].self_attn.q_proj, other.model.layers[0].self_attn.k_proj
        assert q.block is k.block
        assert q.block is not m.model.layers[0].self_attn.q_proj.block
    state = m.state_dict()
    assert state["model.layers.0.self_attn.q_proj.block.packed"].dtype == torch.uint8
    assert not any("k_proj.block" in name or "up_proj.block" in name for name in state)
    other = mixed(seed=1)
    other.load_state_dict(state)
    assert torch.equal(logits(other), want)
    state["model.layers.0.mlp.gate_proj.block.packed"] = state["model.layers.0.mlp.gate_proj.block.packed"].float()
    with pytest.raises(FormatError, match="float32"):
        other.load_state_dict(state)


def test_a_compiled_model_sees_new_bytes():
    m = mixed()
    m.compile(backend="futransformer", options=EAGER_REST | {"prefill": "exact"})
    generated(m)
    state = {n: t.clone() for n, t in m.state_dict().items()}
    name = "model.layers.1.mlp.gate_proj.block.packed"
    state[name][:1024] ^= 0x11
    m.load_state_dict(state)
    _, got = generated(m)
    with models.uncompiled(m):
        _, want = generated(m)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=2e-5)


def test_dtype_conversion_leaves_the_bytes_alone():
    m = mixed()
    before = {n: t.clone() for n, t in m.state_dict().items() if t.dtype == torch.uint8}
    torch.nn.Module.to(m, torch.bfloat16)
    assert all(torch.equal(m.state_dict()[n], t) for n, t in before.items())
    assert m.model.layers[0].self_attn.k_proj.bias.dtype == torch.bfloat16


# ---- files ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("packed")
    m = fu_compile.quantize(
        model(config("smollm2"), dtype=torch.bfloat16), group_size=32, lm_head="int4", overrides=[("*v_proj", "fp8")],
        progress=False,
    )  # fmt: skip
    fu_compile.save(m, folder, max_shard_size="30KB")
    return folder, logits(m)


def copied(folder, tmp_path):
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def test_loading_is_exact_and_never_holds_a_float_weight(saved):
    folder, want = saved
    with Largest() as largest:
        m = fu_compile.load(folder)
    assert torch.equal(logits(m), want)
    # the embedding is the largest tensor that is not packed; no projection of 72 x 112 was ever there in float
    assert largest.numel == m.model.embed_tokens.weight.numel() != 72 * 112
    floats = [t.shape for n, t in m.state_dict().items() if t.is_floating_point() and t.dim() == 2]
    assert floats == [m.model.embed_tokens.weight.shape]
    assert not m.training
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    m = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert m.dtype == torch.float32
    assert not any(p.requires_grad for p in m.parameters())


def test_saving_again_gives_the_same_manifest_and_hashes(saved, tmp_path):
    m = fu_compile.load(saved[0])
    m.save_pretrained(tmp_path, max_shard_size="30KB")
    changed = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert changed == json.loads((saved[0] / "config.json").read_text())["quantization_config"]


def flip(path):
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def manifest(folder, **changes):
    path = folder / "config.json"
    found = json.loads(path.read_text())
    found["quantization_config"].update(changes)
    path.write_text(json.dumps(found))


def first(folder):
    return min(folder.glob("*.safetensors"))


@pytest.mark.parametrize(
    ("damage", "error", "match"),
    [
        (lambda d: flip(first(d)), FormatError, "sha256"),
        (lambda d: first(d).write_bytes(first(d).read_bytes()[:-7]), DataError, "cannot be read"),
        (lambda d: first(d).write_bytes(b"nothing"), DataError, "cannot be read"),
        (lambda d: first(d).unlink(), DataError, "missing"),
        (lambda d: (d / "config.json").write_text("{"), DataError, "config.json"),
        (lambda d: manifest(d, format=2), FormatError, "format 2"),
        (lambda d: manifest(d, sparsity="2:4"), FormatError, "sparsity"),
        (lambda d: manifest(d, quant_method="awq"), FormatError, "awq"),
        (lambda d: manifest(d, blocks={"model.layers.0.mlp.down_proj": {"k": 3}}), FormatError, "no block"),
        (lambda d: manifest(d, hashes={}), FormatError, "not in the manifest"),
    ],
)
@pytest.mark.parametrize("way", ["load", "from_pretrained"])
def test_damaged_foreign_and_newer_files(saved, tmp_path, monkeypatch, way, damage, error, match):
    folder = copied(saved[0], tmp_path)
    damage(folder)
    if way == "load":
        monkeypatch.setattr(PackedBlock, "__init__", lambda *a: pytest.fail("something was built"))
        with pytest.raises(error, match=match):
            fu_compile.load(folder)
    elif match in ("sha256", "format 2", "sparsity", "no block", "not in the manifest"):
        with pytest.raises(error, match=match):
            AutoModelForCausalLM.from_pretrained(folder)


def test_a_manifest_for_another_model(saved, tmp_path):
    folder = copied(saved[0], tmp_path)
    path = folder / "config.json"
    found = json.loads(path.read_text())
    found["intermediate_size"] = 120
    path.write_text(json.dumps(found))
    with pytest.raises(FormatError, match="the model has Linear"):
        fu_compile.load(folder)


def test_float_models_are_refused(tmp_path):
    m = model(config("llama"))
    with pytest.raises(FormatError, match="not packed"):
        fu_compile.save(m, tmp_path)
    m.save_pretrained(tmp_path)
    with pytest.raises(FormatError, match="not packed"):
        fu_compile.load(tmp_path)


@pytest.mark.parametrize("first", ["import fu_compile, sys", "import fu_compile.hf_quantizer"])
def test_importing_the_package_is_enough_for_from_pretrained(saved, first):
    registry.install()  # transformers is there already: registered again, which does no harm
    code = f"""
{first}
assert "sys" not in dir() or "transformers" not in sys.modules
import transformers
m = transformers.AutoModelForCausalLM.from_pretrained({str(saved[0])!r})
print(type(m.lm_head).__name__)
"""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert re.fullmatch("PackedLinear", done.stdout.strip()), done.stderr
