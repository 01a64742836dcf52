"""The per-layer error report: against formats by hand, the Int4Cache step by step, and the compiled model."""

import json
import math
import re

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

import fu_compile
from fu_compile import Int4Cache, Options, formats, layers, models
from fu_compile import __main__ as cli
from fu_compile.errors import CacheMismatchError, DataError, FormatError, OptionError
from fu_compile.layers import EXACT, layer_report
from fu_compile.layers_html import STEPS, page

VOCABULARY = 61
SIZES = {"hidden_size": 96, "intermediate_size": 160, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"vocab_size": VOCABULARY, "max_position_embeddings": 256, "initializer_range": 0.15}
PARTS = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "attention", "self_attn.o_proj"]
PARTS += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]


def random_gains(model):
    for name, p in model.named_parameters():
        if "norm" in name:
            p.data = 0.3 + torch.rand_like(p)
    return model


def llama(layers=2, dtype=torch.float32, **more):
    made = LlamaForCausalLM(LlamaConfig(**SIZES, num_hidden_layers=layers, **more)).to(dtype)
    return random_gains(made.eval().requires_grad_(False))


def ids(*shape):
    return torch.randint(0, VOCABULARY, shape)


def report(model, batches, **more):
    options = {k: more.pop(k) for k in [*more] if k in Options.__dataclass_fields__}
    return layer_report(model, batches, options=Options(**options), progress=False, **more)


def found(result, layer, part, phase):
    (one,) = [e for e in result.errors if (e.layer, e.part, e.phase) == (layer, part, phase)]
    return one


def decibel(y, approximation):
    return float(10 * (y.square().sum() / (y - approximation).square().sum()).log10())


class Seen:
    """Inputs and outputs of modules while a model runs in eager."""

    def __init__(self, model, *names):
        self.inputs, self.outputs = {n: [] for n in names}, {n: [] for n in names}
        modules = dict(model.named_modules())
        self.handles = [modules[n].register_forward_hook(self.hook(n)) for n in names]

    def hook(self, name):
        def after(module, args, output):
            self.inputs[name].append(args[0].double())
            self.outputs[name].append(output.double())

        return after


# ---- the numbers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", [32, 128])
def test_decode_linears_are_the_rounded_weights_on_the_float_models_inputs(group):
    model, batch = llama(), ids(2, 39)
    result = report(model, batch, group_size=group)
    names = [f"model.layers.1.{p}" for p in ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")]
    seen = Seen(model, *names)
    model(input_ids=batch, use_cache=False)
    for name in names:
        weight = formats.dequantize_int4(formats.quantize_int4(model.get_submodule(name).weight, group)).double()
        expected = decibel(seen.outputs[name][0], seen.inputs[name][0] @ weight.t())
        error = found(result, 1, name.removeprefix("model.layers.1."), "decode")
        # float32 operators against float64: their own noise lies some 100 dB under that of INT4
        assert error.snr == pytest.approx(expected, abs=0.01), name
        assert (error.precision, error.accumulated) == ("int4", None)


def test_prefill_linears_fold_the_gain_and_round_the_normalised_row():
    model, batch = llama(), ids(1, 33)
    result = report(model, batch)
    norm, down = "model.layers.1.input_layernorm", "model.layers.1.mlp.down_proj"
    names = [f"model.layers.1.self_attn.{part}_proj" for part in "qkv"]
    seen = Seen(model, norm, *names, down)
    model(input_ids=batch, use_cache=False)

    def rounded(row, weight):  # one power of two per call, twice the largest value fits
        codes, step = formats.fp8_quantize(row.float(), formats.fp8_state())
        return (codes.double() * step) @ formats.dequantize_fp8(*formats.quantize_fp8(weight)).double().t()

    hidden, gain = seen.inputs[norm][0], model.get_submodule(norm).weight
    row = hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + model.config.rms_norm_eps)
    apart = []
    for name in names:
        weight = model.get_submodule(name).weight
        folded = decibel(seen.outputs[name][0], rounded(row, weight * gain))
        assert found(result, 1, name.partition("layers.1.")[2], "prefill").snr == pytest.approx(folded, abs=0.01)
        apart.append(abs(folded - decibel(seen.outputs[name][0], rounded(seen.inputs[name][0], weight))))
    # The test can tell folding from not folding: another weight and another row are rounded. One of three projections:
    # the two errors of a single one are equal to 0.02 dB in one draw of twenty.
    assert max(apart) > 0.02
    plain = decibel(seen.outputs[down][0], rounded(seen.inputs[down][0], model.get_submodule(down).weight))
    assert found(result, 1, "mlp.down_proj", "prefill").snr == pytest.approx(plain, abs=0.01)


@pytest.mark.parametrize("length", [64, 65, 131, 192])
def test_decode_attention_is_what_an_int4_cache_shows_token_by_token(length):
    model, batch = llama(layers=1), ids(1, length)
    result = report(model, batch)
    error = found(result, 0, "attention", "decode")
    if length == 64:  # one unfinished page until the last token: nothing was read from INT4
        assert error.snr > 110  # float32
        return
    name = "model.layers.0.self_attn.o_proj"
    seen = Seen(model, name)
    model(input_ids=batch, use_cache=False)
    whole = seen.inputs[name].pop()
    cache = Int4Cache(model.config, length, dtype=torch.float32, model=model)
    seen.inputs[name].clear()  # for its tables the cache has called the model with single tokens
    for i in range(length):
        model(input_ids=batch[:, i : i + 1], use_cache=True, **{models.cache_kwarg(model): cache})
    # The first layer's q, k and v do not depend on the cache. The last pages alone differ, in float32 of another order.
    assert error.snr == pytest.approx(decibel(whole, torch.cat(seen.inputs[name], 1)), abs=0.02)
    assert 10 < error.snr < 60


def test_keys_per_channel_need_no_excuse():
    """A bias that ruins rotated keys leaves keys per channel alone: the layer is reported as what it is."""
    config = Qwen2Config(**SIZES, num_hidden_layers=1)
    model = random_gains(Qwen2ForCausalLM(config).eval().requires_grad_(False))
    batch = ids(1, 150)
    plain = found(report(model, batch, kv_cache="int4-channel"), 0, "attention", "decode")
    model.model.layers[0].self_attn.k_proj.bias[11] = 400.0
    biased = found(report(model, batch, kv_cache="int4-channel"), 0, "attention", "decode")
    assert found(report(model, batch), 0, "attention", "decode").precision == "exact"
    assert plain.precision == biased.precision == "int4-channel"
    assert not biased.note
    # A turning channel of 400 is coded in steps of some 50, but it is one of 24; the others keep theirs.
    assert biased.snr > plain.snr - 20


def test_accumulated_hidden_states_give_the_compiled_models_logits(monkeypatch):
    """What the quantised runs feed on is what the backend computes, in both phases."""
    kept = {}

    class Watch(layers._Watch):
        def __init__(self, *args):
            super().__init__(*args)
            kept.update(self._streams)

    monkeypatch.setattr(layers, "_Watch", Watch)
    model, batch = llama(), ids(1, 70)
    result = report(model, batch, group_size=32, accumulated=True)
    exact = model(input_ids=batch, use_cache=False).logits
    common = {"rest": "eager", "group_size": 32}
    with models.compiled(model, prefill="fp8", kv_cache="model", **common):
        prefill = model(input_ids=batch, use_cache=False).logits
    with models.compiled(model, prefill="exact", decode="int4", kv_cache="int4", **common):
        cache = {models.cache_kwarg(model): models.static_cache(model, 70)}
        steps = [model(input_ids=batch[:, i : i + 1], use_cache=True, **cache).logits for i in range(70)]
    for phase, compiled in (("prefill", prefill), ("decode", torch.cat(steps, 1))):
        logits = model.lm_head(model.model.norm(kept[phase][0]))
        noise, ours = decibel(exact, compiled), decibel(exact, logits)
        # Not bit-equal: an FP8 value at a rounding tie may fall to either side after sums in another order.
        assert decibel(compiled, logits) > noise + 20, phase
        assert ours == pytest.approx(noise, abs=0.2)
        assert found(result, 0, "self_attn.q_proj", phase).accumulated == found(result, 0, PARTS[0], phase).snr
        assert found(result, 1, "mlp.down_proj", phase).accumulated < found(result, 1, "mlp.down_proj", phase).snr
    assert found(result, 0, "attention", "prefill").snr == EXACT
    assert found(result, 0, "attention", "prefill").accumulated < 60  # FP8 keys and values have reached it


def test_typical_token_is_not_hidden_behind_one_massive_token():
    y = torch.ones(9, 8)
    y[0] = 1e4
    ratio = layers._Ratio()
    ratio.add(y, torch.cat((y[:1], y[1:] * 0.9)))
    assert ratio.typical == pytest.approx(20, abs=0.01)
    assert ratio.total > 80
    zero = layers._Ratio()
    zero.add(torch.zeros(2, 3), torch.ones(2, 3))
    assert zero.total == zero.typical < -100


# ---- options and models ----------------------------------------------------------------------------------------------


def test_options_decide_what_is_rounded():
    model, batch = llama(), ids(1, 66)
    overrides = (("*.0.self_attn.k_proj", "exact"), ("*.1.mlp.down_proj", "fp8"))
    result = report(model, batch, prefill="bf16", kv_cache="model", overrides=overrides, accumulated=True)
    assert found(result, 0, "attention", "decode").snr == EXACT
    for name in ("q", "k", "v"):  # fused with k_proj, which stays exact
        assert found(result, 0, f"self_attn.{name}_proj", "decode").snr == EXACT
        assert found(result, 0, f"self_attn.{name}_proj", "decode").accumulated == EXACT
    assert found(result, 1, "self_attn.v_proj", "decode").precision == "int4"
    assert 40 < found(result, 1, "mlp.gate_proj", "prefill").snr < 60  # 8 bits of mantissa
    # FP8 weights alone in decode, activations too in prefill
    down = [found(result, 1, "mlp.down_proj", phase) for phase in ("decode", "prefill")]
    assert [e.precision for e in down] == ["fp8", "fp8"]
    assert down[0].snr > down[1].snr + 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_models(dtype):
    result = report(llama(dtype=dtype), [ids(1, 70), ids(2, 5)])
    assert (result.sequences, result.tokens) == (3, 80)
    assert result.parts == PARTS
    for e in result.errors:
        assert e.snr == EXACT if (e.part, e.phase) == ("attention", "prefill") else 12 < e.snr < 60, e


def test_layer_whose_keys_int4_would_ruin_says_that_it_keeps_its_cache():
    model = Qwen2ForCausalLM(Qwen2Config(**SIZES, num_hidden_layers=2)).eval().requires_grad_(False)
    model.model.layers[1].self_attn.k_proj.bias.data[3] = 100.0
    result = report(model, ids(1, 70))
    kept = found(result, 1, "attention", "decode")
    assert (kept.precision, kept.snr) == ("exact", EXACT)
    assert "keeps the model's cache" in kept.note
    assert found(result, 0, "attention", "decode").precision == "int4"
    assert "layer 1, attention: k_proj has a bias" in str(result)


def test_model_is_left_as_it_was():
    model, batch = llama(), ids(1, 20)
    before = model(input_ids=batch).logits
    attention = model.config._attn_implementation
    report(model, batch, accumulated=True)
    assert model.config._attn_implementation == attention
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert torch.equal(model(input_ids=batch).logits, before)


def test_what_does_not_fit_is_refused_by_name():
    model, batch = llama(), ids(1, 20)
    with pytest.raises(OptionError, match="int64"):
        report(model, batch.float())
    with pytest.raises(DataError, match="61 tokens"):
        report(model, batch + VOCABULARY)
    tables = layers._tables(model, None, 2)
    with pytest.raises(CacheMismatchError, match="2 layers with 2 heads of 24"):
        layer_report(model, batch, tables=type(tables)(tables.means[:1], tables.balances[:1]), progress=False)
    packed = fu_compile.quantize(llama(), progress=False)
    with pytest.raises(FormatError, match="is packed"):
        report(packed, batch)


# ---- text, JSON, page ------------------------------------------------------------------------------------------------


def test_text_has_the_worst_first_and_every_layer(tmp_path):
    result = report(llama(layers=3), ids(1, 70))
    worst = [e.snr for e in result.worst(50)]
    assert worst == sorted(worst)
    assert len(worst) == 3 * (8 + 7)  # attention is exact in prefill
    text = str(result)
    first = result.worst(1)[0]
    assert re.search(rf"│ +{first.layer} │ {first.part} +│ {first.phase} +│ {first.precision}", text)
    for phase in ("prefill (exact, fp8)", "decode (int4)"):
        assert f"by layer, {phase}" in text
    result.save(tmp_path / "out.json")
    read = json.loads((tmp_path / "out.json").read_text())
    assert len(read["errors"]) == 48
    exact = [e for e in read["errors"] if e["snr"] is None]
    assert {(e["part"], e["phase"]) for e in exact} == {("attention", "prefill")}
    assert read["options"]["group_size"] == 128


@pytest.mark.parametrize(("count", "accumulated"), [(2, True), (60, False)])
def test_page_is_one_file_with_a_cell_per_layer_and_part(tmp_path, count, accumulated):
    errors = [
        layers.LayerError(n, part, phase, "int4", 5.0 + n if n else EXACT, 20.0, 9.0 if accumulated else None)
        for n in range(count)
        for part in PARTS
        for phase in layers.PHASES
    ]
    made = layers.LayerReport("<b>", "float32", "a & b", 1, 9, {}, tuple(errors))
    text = made.to_html(tmp_path / "x.html").read_text()
    assert text == page(made)
    assert not re.search(r"https?:|<link|src=|url\(", text)
    assert "<b>" not in text.split("<h2>")[0]
    maps = text.split("<h2>")[1:]
    assert len([m for m in maps if "map heat" in m]) == (4 if accumulated else 2)
    cells = re.findall(r'<td><div (?:class="exact"|style="background:(#\w+)") title="([^"]*)">', maps[0])
    assert len(cells) == count * len(PARTS)
    assert [shade for shade, _ in cells[:2]] == ["", STEPS[0][1]]
    assert "layer 1, self_attn.q_proj, int4: 6.0 dB" in cells[1][1]
    read = json.loads(re.search(r'id="layers">(.*)</script>', text)[1])
    assert len(read["errors"]) == len(errors)


def test_colours_can_be_read_and_told_apart():
    def luminance(shade):
        parts = [int(shade[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return sum(a * b for a, b in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    assert [below for below, _ in STEPS] == sorted(below for below, _ in STEPS)
    assert STEPS[-1][0] == math.inf
    for _, shade in STEPS:  # WCAG 2 AA: white text on it
        assert 1.05 / (luminance(shade) + 0.05) >= 4.5, shade
    assert len({shade for _, shade in STEPS}) == len(STEPS)


# ---- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path, monkeypatch):
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    llama(layers=1).save_pretrained(tmp_path)
    inner = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="w0").save_pretrained(tmp_path)
    (tmp_path / "text.txt").write_text(" ".join(f"w{i}" for i in ids(300).tolist()))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_command_writes_text_page_and_json(folder, capsys):
    arguments = ["perplexity", str(folder), "--file", "text.txt", "--length", "70", "--windows", "1,3", "--layers"]
    assert cli.main([*arguments, "--accumulated", "--html", "x.html", "--save", "x.json", "--group-size", "32"]) == 0
    out = capsys.readouterr().out
    assert "windows 1, 3 of 70 tokens of text.txt" in out
    assert "accumulated dB" in out
    assert "Perplexity" not in out
    assert (folder / "x.html").stat().st_size > 5000
    read = json.loads((folder / "x.json").read_text())
    assert (read["tokens"], read["options"]["group_size"]) == (140, 32)
    assert cli.main([*arguments, "--paths", "eager", "--save", "y.json"]) == 0
    assert "Perplexity" in capsys.readouterr().out
    both = json.loads((folder / "y.json").read_text())
    assert both["paths"][0]["name"] == "eager"
    assert len(both["layers"]["errors"]) == 16


@pytest.mark.parametrize("flags", [["--html", "x.html"], ["--accumulated"], ["--layers", "--dataset", "d"]])
def test_command_refuses_flags_that_do_not_go_together(folder, capsys, flags):
    assert cli.main(["perplexity", str(folder), "--file", "text.txt", "--length", "70", *flags]) == 2
    assert "FU-OPT-002" in capsys.readouterr().err
    assert not (folder / "x.html").exists()
