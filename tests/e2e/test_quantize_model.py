"""fu_compile.quantize with calibration, its mixed choices, runs that stop and go on, and the command."""

import copy
import importlib
import json
import pathlib
import types

import pytest
import torch
from models import config, model
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers import models as tokenizer_models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import fu_compile
from fu_compile import __main__ as cli
from fu_compile import calibration, formats, gptq, models
from fu_compile.errors import DataError, FormatError, OffloadedParameterError, OptionError
from fu_compile.gptq import quantize_blocks
from fu_compile.quantize import PackedLinear, pack

LAYER = "model.layers.0."


@pytest.fixture(autouse=True)
def fresh():
    torch.manual_seed(3)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def ids(*shape):
    return torch.randint(3, 131, shape)


def llama(layers=1, **more):
    return model(config("llama", num_hidden_layers=layers, **more))


def codes_of(m, batches, **options):
    found = {}
    for block in quantize_blocks(m, batches, progress=False, **options):
        found |= block.layers
    return found


def weights_of(m):
    return {n: mod.weight for n, mod in m.named_modules() if isinstance(mod, PackedLinear)}


def same(packed, codes):
    """Every weight of the packed model is what its codes stand for, bit for bit."""
    weights = weights_of(packed)
    assert weights.keys() == codes.keys()
    for name, q in codes.items():
        assert torch.equal(weights[name], formats.dequantize_int4(q)), name


# ---- choices -------------------------------------------------------------------------------------------------------


def test_overrides_change_method_group_and_grid_of_single_linears():
    original, text = llama(), ids(2, 40)
    overrides = [
        ("*v_proj", {"group_size": 64}),
        ("*o_proj", {"method": "rtn", "grid": "sym8"}),
        ("*down_proj", "fp8"),
        ("*up_proj", "exact"),
    ]
    m = fu_compile.quantize(
        copy.deepcopy(original), "gptq", group_size=32, overrides=overrides, calibration=text, progress=False
    )
    want = codes_of(original, text, group_size=32, overrides=overrides)
    down = m.get_submodule(f"{LAYER}mlp.down_proj")
    assert down.where.precision == "fp8"
    weights = weights_of(m)
    assert weights.keys() == want.keys() | {f"{LAYER}mlp.down_proj"}
    for name, q in want.items():
        assert torch.equal(weights[name], formats.dequantize_int4(q)), name
    groups = {n.rpartition(".")[2]: m.get_submodule(n).where.group for n in want}
    assert groups == {"q_proj": 32, "k_proj": 32, "v_proj": 64, "o_proj": 32, "gate_proj": 32}
    assert {q.group for n, q in want.items() if n.endswith("v_proj")} == {64}
    # o_proj was rounded, and not by GPTQ: sym8 has its zero at 8
    assert (want[f"{LAYER}self_attn.o_proj"].zeros == 8).all()
    # Different groups cannot share a block; the model computes all the same.
    attention = m.model.layers[0].self_attn
    assert attention.q_proj.block is not attention.v_proj.block
    twin = copy.deepcopy(original)
    for name, weight in weights.items():
        twin.get_submodule(name).weight = torch.nn.Parameter(weight)
    with torch.no_grad():
        # the same float32 products; FP8's scale comes after the product instead of before
        torch.testing.assert_close(m(text).logits, twin(text).logits, rtol=1e-4, atol=1e-4)
        fu_compile.compile(m, rest="eager", kv_cache="model", prefill="bf16", strict=True)
        torch.testing.assert_close(m(text).logits, twin(text).logits, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("entry", [{"group": 64}, {"group_size": 48}, {"method": "awq"}, 7])
def test_choices_that_do_not_exist_are_refused(entry):
    m = llama()
    with pytest.raises(OptionError, match=r"overrides|group_size|method"):
        fu_compile.quantize(m, overrides=[("*", entry)], progress=False)
    assert not weights_of(m)


@pytest.mark.parametrize("tied", [True, False])
def test_the_head_is_quantised_by_the_method(tied):
    original, text = llama(tie_word_embeddings=tied), ids(2, 40)
    want = codes_of(original, text, group_size=32, lm_head=True)
    nearest = formats.dequantize_int4(formats.quantize_int4(original.lm_head.weight.detach(), 32, "asym"))
    embedding = original.get_input_embeddings().weight.clone()
    m = fu_compile.quantize(
        copy.deepcopy(original), "gptq", group_size=32, lm_head="int4", calibration=text, progress=False
    )
    same(m, want)
    assert not torch.equal(m.lm_head.weight, nearest)
    assert torch.equal(m.get_input_embeddings().weight, embedding)
    assert not m.config.tie_word_embeddings
    eight = fu_compile.quantize(original, "gptq", group_size=32, lm_head="fp8", calibration=text, progress=False)
    assert eight.lm_head.where.precision == "fp8"
    same_layers = {n: q for n, q in want.items() if n != "lm_head"}
    assert all(torch.equal(eight.get_submodule(n).weight, formats.dequantize_int4(q)) for n, q in same_layers.items())


def test_rounding_with_calibration_weighs_its_ranges():
    original, text = llama(), ids(2, 40)
    m = fu_compile.quantize(copy.deepcopy(original), "rtn", group_size=32, calibration=text, progress=False)
    same(m, codes_of(original, text, method="rtn", group_size=32, grid="asym"))
    plain = fu_compile.quantize(copy.deepcopy(original), "rtn", group_size=32, grid="asym", progress=False)
    differ = [n for n, w in weights_of(plain).items() if not torch.equal(w, weights_of(m)[n])]
    assert len(differ) == 7


def test_pack_takes_codes_and_leaves_the_rest():
    original, text = llama(), ids(2, 40)
    codes = codes_of(original, text, group_size=64)
    some = {n: q for n, q in codes.items() if not n.endswith("q_proj")}
    m = pack(copy.deepcopy(original), some)
    same(m, some)
    assert isinstance(m.model.layers[0].self_attn.q_proj, torch.nn.Linear)
    with pytest.raises(OptionError, match="no linear"):
        pack(original, {"model.embed_tokens": codes[f"{LAYER}mlp.up_proj"]})
    with pytest.raises(FormatError, match="codes"):
        pack(original, {f"{LAYER}mlp.up_proj": codes[f"{LAYER}mlp.down_proj"]})
    assert not weights_of(original)


def test_the_device_changes_nothing(monkeypatch):
    """Layer by layer on a device: every layer is moved there and back, the codes are the same."""
    original, text = llama(2), ids(2, 24)
    want = codes_of(original, text, group_size=32, lm_head=True)
    moves, plain = [], torch.nn.Module.to
    monkeypatch.setattr(torch.nn.Module, "to", lambda self, where: (moves.append(where), plain(self, where))[1])
    found = codes_of(original, text, group_size=32, lm_head=True, device="cpu")
    assert len(moves) == 2 * 2 + 2 * 2  # two layers, then norm and head, there and back
    assert found.keys() == want.keys()
    for name, q in want.items():
        assert torch.equal(found[name].codes, q.codes)
        assert torch.equal(found[name].scales, q.scales)


# ---- one rule for models -------------------------------------------------------------------------------------------


def hooked(**hook):
    m = llama()
    m.model.layers[0].self_attn.q_proj._hf_hook = types.SimpleNamespace(**hook)
    return m


def test_only_hooks_that_offload_are_refused():
    for act in (
        lambda m: fu_compile.compile(m),
        lambda m: fu_compile.quantize(m, progress=False),
        lambda m: list(quantize_blocks(m, ids(1, 8), progress=False)),
    ):
        with pytest.raises(OffloadedParameterError, match="q_proj"):
            act(hooked(offload=True))
        act(hooked(offload=False, weights_map=None))


def test_loose_adapters_are_refused_where_weights_are_replaced():
    """Rounding the base would leave the adapter's own linears to be rounded too."""
    m = llama()
    attention = m.model.layers[0].self_attn
    loose = torch.nn.Sequential(torch.nn.Linear(4, 4))
    loose.base_layer = attention.q_proj
    attention.q_proj = loose
    models.check(m.eval())
    for act in (
        lambda: fu_compile.quantize(m, progress=False),
        lambda: quantize_blocks(m, ids(1, 8), progress=False),
    ):
        with pytest.raises(OptionError, match="adapters"):
            act()


# ---- a run that stops ----------------------------------------------------------------------------------------------


@pytest.fixture
def stop_at(monkeypatch):
    """stop_at(n): the n-th block that is computed from now on is interrupted; returns the list of those begun."""

    plain = gptq.quantize_block

    def arm(n):
        begun = []

        def block(name, *args):
            begun.append(name)
            if len(begun) == n:
                raise KeyboardInterrupt
            return plain(name, *args)

        monkeypatch.setattr(gptq, "quantize_block", block)
        return begun

    return arm


def test_quantize_goes_on_where_it_stopped(stop_at, tmp_path):
    original, text = llama(3, tie_word_embeddings=True), ids(2, 24)
    options = {"group_size": 32, "lm_head": "int4", "calibration": text, "progress": False}
    want = weights_of(fu_compile.quantize(copy.deepcopy(original), "gptq", **options))
    stop_at(3)
    with pytest.raises(KeyboardInterrupt):
        fu_compile.quantize(copy.deepcopy(original), "gptq", resume=tmp_path / "run", **options)
    begun = stop_at(99)
    m = fu_compile.quantize(copy.deepcopy(original), "gptq", resume=tmp_path / "run", **options)
    assert begun == ["model.layers.2", "lm_head"]
    assert weights_of(m).keys() == want.keys()
    assert all(torch.equal(w, want[n]) for n, w in weights_of(m).items())
    with pytest.raises(DataError, match="other"):
        fu_compile.quantize(copy.deepcopy(original), "gptq", resume=tmp_path / "run", **options | {"group_size": 64})
    with pytest.raises(OptionError, match="resumed"):
        fu_compile.quantize(original, resume=tmp_path / "run", progress=False)


# ---- the command ---------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    """A tiny saved model with a tokenizer, and a text."""
    path = tmp_path / "tiny"
    words = {f"w{i}": i for i in range(131)}
    inner = Tokenizer(tokenizer_models.WordLevel(words, unk_token="w0"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="w0", eos_token="w1").save_pretrained(path)
    llama(2).save_pretrained(path)
    (tmp_path / "text.txt").write_text(" ".join(f"w{i}" for i in ids(300).tolist()))
    return path


def test_quantize_command(folder, stop_at, capsys, tmp_path):
    out = tmp_path / "out"
    wanted = [
        "quantize", str(folder), str(out), "--method", "gptq", "--group", "32", "--lm-head", "fp8",
        "--overrides", "*.down_proj=fp8,*.v_proj=int4:64", "--calibration", str(tmp_path / "text.txt"),
        "--samples", "3", "--length", "20", "--fp8-scales", "--device", "cpu",
    ]  # fmt: skip
    begun = stop_at(2)
    assert cli.main([*wanted, "--quiet"]) == 130
    assert begun == ["model.layers.0", "model.layers.1"]
    assert not out.exists()
    begun = stop_at(99)
    assert cli.main(wanted) == 0  # with progress bars
    assert begun == ["model.layers.1"]
    said, shown = capsys.readouterr()
    assert "before" in said
    assert "3 x 20 tokens" in shown
    assert "INT4 weights" in shown
    assert not (tmp_path / "out.partial").exists()
    m = fu_compile.load(out)
    manifest = m.config.quantization_config
    assert manifest.method == "gptq"
    attention = m.model.layers[1].self_attn
    assert (attention.q_proj.where.group, attention.v_proj.where.group) == (32, 64)
    assert m.lm_head.where.precision == "fp8"
    eight = {"lm_head", *(f"model.layers.{i}.mlp.down_proj" for i in range(2))}
    assert set(manifest.fp8_scales) == {f"{name}.block.packed" for name in eight}
    text = calibration.token_batches(tmp_path / "text.txt", AutoTokenizer.from_pretrained(out), samples=3, length=20)
    original = models.load(folder)[0]
    want = codes_of(original, text, group_size=32, overrides=[("*.down_proj", "fp8"), ("*.v_proj", {"group_size": 64})])
    for name, q in want.items():
        assert torch.equal(m.get_submodule(name).weight, formats.dequantize_int4(q)), name
    assert cli.main(wanted) == 2  # it is there already
    assert "already" in capsys.readouterr().err


def test_quantize_command_without_text(folder, tmp_path, capsys):
    out = tmp_path / "out"
    assert cli.main(["quantize", str(folder), str(out), "--quiet", "--device", "cpu"]) == 0
    linear = fu_compile.load(out).model.layers[0].mlp.up_proj
    plain = fu_compile.quantize(models.load(folder)[0], progress=False).model.layers[0].mlp.up_proj
    assert torch.equal(linear.weight, plain.weight)
    assert json.loads((out / "config.json").read_text())["quantization_config"]["method"] == "rtn"
    capsys.readouterr()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--overrides", "*.v_proj=int4:x"], "int4:64"),
        (["--overrides", "*.v_proj=int4:48"], "48"),
        (["--overrides", "*.v_proj=int3"], "int3"),
        (["--group", "48"], "48"),
        (["--samples", "0"], "--samples"),
        (["--calibration", "a.txt", "--dataset", "b"], "both"),
        (["--dataset", ":x", "--method", "gptq"], "names no data set"),
        (["--calibration", "./no-such.txt"], "no-such.txt"),
        (["--fp8-scales", "--overrides", "*=int4"], "no FP8 projection"),
    ],
)
def test_quantize_command_refuses(arguments, says, folder, tmp_path, capsys):
    before = ["quantize", str(folder), str(tmp_path / "out"), "--quiet", "--device", "cpu"]
    assert cli.main([*before, *arguments]) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_calibration_from_a_data_set_is_read_as_it_is_asked_for(monkeypatch):
    import sys

    rows, asked = ({"text": f"w{i}"} for i in range(10)), []
    fake = types.ModuleType("datasets")
    fake.load_dataset = lambda *args, **more: (asked.append((args, more)), rows)[1]
    monkeypatch.setattr(calibration.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "datasets", fake)
    found = calibration.dataset_rows("a/b:c")
    assert asked == [(("a/b", "c"), {"split": "train", "streaming": True})]
    assert next(iter(found)) == {"text": "w0"}
    assert next(rows) == {"text": "w1"}  # the others are unread
    monkeypatch.setattr(calibration.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DataError, match="needs the package datasets"):
        calibration.dataset_rows("a/b")


# ---- the benchmarks ------------------------------------------------------------------------------------------------


def test_the_8b_benchmark_runs_on_small_shapes(monkeypatch, tmp_path, capsys):
    monkeypatch.syspath_prepend(str(pathlib.Path(__file__).parents[2] / "benchmarks"))
    gptq_8b = importlib.import_module("gptq_8b")
    small = ["--device", "cpu", "--shape", "tiny", "--samples", "2", "--length", "16", "--out", str(tmp_path)]
    assert gptq_8b.main([*small, "--blocks", "3"]) == 0
    found = json.loads(next(tmp_path.glob("gptq-8b-*.json")).read_text())
    assert [layer["block"] for layer in found["layers"]] == [f"model.layers.{i}" for i in range(3)]
    assert found["missed"] is None  # the bar is for the GPU and the 8B shapes
    first, *others = (layer["seconds"] for layer in found["layers"])
    assert found["minutes for 32 layers"] == pytest.approx((first + 31 * sum(others) / 2) / 60)
    assert "32 layers" in capsys.readouterr().out
