"""The report: what it derives from a graph, its three forms, the registry, and explain."""

import copy
import gc
import html.parser
import inspect
import json
import re

import pytest
import torch
from fu_compile.passes import Event
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

import fu_compile
from fu_compile import report as report_module
from fu_compile.errors import OptionError
from fu_compile.options import Options
from fu_compile.report import COUNTERS, PIECES, REST, GraphReport, ModelReport, Report, layer_map, new_record, record_of


def llama(layers=2, **more):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaConfig(**{**sizes, "vocab_size": 103, "num_hidden_layers": layers, **more})


@pytest.fixture(autouse=True)
def empty_registry(monkeypatch):
    monkeypatch.setattr(report_module, "_records", [])


def decode_graph(layers=3):
    """A decode graph as the backend describes it; in layer 1 the SwiGLU was nearly taken."""
    graph = GraphReport(0, "decode", "1", "1", {"weights": "int4"}, {"weights": "option decode [a.*]"}, calls=7)
    for i in range(layers):
        path = f"model.layers.{i}"
        graph.fused += [
            (f"{path}.self_attn", "linear_int4", "rms"),
            (f"{path}.self_attn", "attention_int4", ""),
            (f"{path}.self_attn.o_proj", "linear_fp8" if i == 2 else "linear_int4", "residual"),
            (f"{path}.mlp", "linear_int4", "rms swiglu" if i != 1 else "rms"),
            (f"{path}.mlp.down_proj", "linear_int4", "residual"),
        ]
        graph.events.append(Event("rms_norm", f"{path}.input_layernorm", "llama.py:3", True))
    graph.fused.append(("lm_head", "linear_exact", "rms"))
    graph.lowerings = {"linear_int4": ("reference", "no GPU"), "attention_int4": ("triton", "sm_80")}
    where = "/env/lib/python3.11/site-packages/transformers/llama.py:9"
    graph.events.append(Event("swiglu", "model.layers.1.mlp", where, False, "the activation is <gelu>, not silu"))
    graph.left_to_aten = {"aten.gelu.default": 1}
    graph.seconds = {"capture": 0.5}
    return graph


def texts(graph, layer):
    return {piece: str(cell) for piece, cell in layer_map(graph)[layer].items()}


def test_layer_map():
    graph = decode_graph()
    assert list(layer_map(graph)) == ["model.layers.0", "model.layers.1", "model.layers.2", REST]
    every = dict.fromkeys(("norms", "qkv", "attention", "cache", "swiglu", "residual"), "int4") | {"head": "-"}
    assert texts(graph, "model.layers.0") == every
    # A projection without SwiGLU still runs its weights in INT4; the mark says that something was missed.
    assert texts(graph, "model.layers.1") == every | {"swiglu": "int4!"}
    assert texts(graph, "model.layers.2") == every | {"residual": "fp8+int4"}
    assert texts(graph, REST) == dict.fromkeys(PIECES, "-") | {"norms": "exact", "head": "exact"}
    cell = layer_map(graph)["model.layers.1"]["swiglu"]
    assert cell.missed
    assert any(
        "the activation is <gelu>, not silu" in note and "(transformers/llama.py:9)" in note for note in cell.notes
    )
    assert layer_map(graph)["model.layers.0"]["attention"].lowerings == ["triton"]


def test_layers_are_in_numerical_order():
    graph = GraphReport(0, "prefill", "1", "s0", fused=[(f"m.layers.{i}.mlp", "swiglu", "") for i in (10, 9, 1, 100)])
    assert list(layer_map(graph)) == ["m.layers.1", "m.layers.9", "m.layers.10", "m.layers.100"]
    assert "m.layers.1-100" in str(Report([ModelReport("m", Options(), [graph])]))


def test_every_operator_has_a_place_in_the_layer_map():
    from fu_compile import ops

    for name in ops.SCHEMAS:
        graph = GraphReport(0, "decode", "1", "1", fused=[("model.layers.0.self_attn", name, "")])
        row = layer_map(graph)["model.layers.0"]
        assert sum(len(cell.notes) for cell in row.values()) >= 1, name


def one(**more):
    record = ModelReport("Tiny<b>", Options(decode="int4", overrides=[("[a].*", "bf16")]), [decode_graph()], **more)
    record.counters["bytes_packed"] = 1536
    record.counters["calls"] = 7
    record.fall_back("cannot [bold]do[/bold] </script><script>alert(1)</script>", "model.layers.1.mlp")
    return Report([record])


@pytest.mark.parametrize("width", [40, 72, 100, 200])
def test_text_fits_and_loses_nothing(width):
    text = one().to_text(width)
    assert max(map(len, text.splitlines())) <= max(width, 40)
    if width == 200:
        for wanted in ("graph 0: decode, batch 1, query length 1, 7 calls", "option decode [a.*]", "1.5 KiB", "no GPU",
                       "the activation is <gelu>, not silu", "transformers/llama.py:9", "aten.gelu.default x1",
                       "cannot [bold]do[/bold]", "model.layers.1.mlp", "int4!"):  # fmt: skip
            assert wanted in text, wanted
    assert "\x1b" not in text


def test_as_dict_is_json_with_flat_counters():
    made = one()
    again = json.loads(json.dumps(made.as_dict()))
    assert again["counters"] == made.counters
    assert set(made.counters) == set(COUNTERS)
    assert all(type(value) is int for value in made.counters.values())
    assert made.counters["fallbacks"] == 1
    graph = again["models"][0]["graphs"][0]
    assert graph["operators"] == {"linear_int4": 11, "attention_int4": 3, "linear_fp8": 1, "linear_exact": 1}
    assert graph["fired"] == {"rms_norm": 3}
    assert graph["layer_map"]["model.layers.1"]["swiglu"]["missed"] is True
    assert again["models"][0]["options"]["overrides"] == [["[a].*", "bf16"]]


class Balanced(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.cells, self.loaded = [], [], []

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta",):
            self.open.append(tag)
        if tag == "td":
            self.cells.append(dict(attrs))
        self.loaded += [value for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_one_well_formed_file(tmp_path):
    made = one()
    text = made.to_html(tmp_path / "r.html").read_text(encoding="utf-8")
    page = Balanced()
    page.feed(text)
    assert page.open == []
    assert page.loaded == []
    assert "http" not in re.sub(r"<!doctype html>", "", text)
    assert "<b>" not in text  # names and reasons are escaped
    assert "<script>alert" not in text
    cells = [cell for cell in page.cells if "title" in cell]
    assert len(cells) == 4 * len(PIECES)
    missed = [cell for cell in cells if cell["class"] == "missed"]
    assert len(missed) == 1
    assert "the activation is <gelu>, not silu" in missed[0]["title"]
    data = re.search(r'<script type="application/json" id="report">(.*?)</script>', text, re.S).group(1)
    assert json.loads(data) == json.loads(json.dumps(made.as_dict()))


def test_empty_reports_say_so(tmp_path):
    assert "nothing was compiled" in str(fu_compile.report())
    model = torch.nn.Linear(2, 2)
    assert "no call of this Linear" in str(fu_compile.report(model))
    assert fu_compile.report(model).counters == dict.fromkeys(COUNTERS, 0)
    assert "nothing was compiled" in fu_compile.report().to_html(tmp_path / "r.html").read_text()
    with pytest.raises(OptionError, match="Module"):
        fu_compile.report(3)


# ---- the registry --------------------------------------------------------------------------------------------------


def test_a_record_is_found_by_model_or_parameter_and_the_newest_wins():
    a, b = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    first = new_record("a", Options(), a)
    second = new_record("b", Options(), b.weight)
    assert record_of(a) is first
    assert record_of(torch.nn.Sequential(a)) is first  # a part of a bigger model
    assert fu_compile.report(b).models == [second]
    third = new_record("a", Options(decode="bf16"), a)
    assert record_of(a) is third
    assert record_of(copy.deepcopy(a)) is None
    assert fu_compile.report(torch.compile(a, backend="eager")).models == [third]
    assert fu_compile.report().models == [first, second, third]


def test_records_of_dead_models_go():
    model = torch.nn.Linear(2, 2)
    new_record("dead", Options(), model)
    del model
    gc.collect()
    alive = torch.nn.Linear(2, 2)
    kept = new_record("alive", Options(), alive)
    assert fu_compile.report().models == [kept]
    for i in range(200):
        new_record(f"untied {i}", Options())
    assert len(fu_compile.report().models) < 80
    assert record_of(alive) is kept


def test_a_fallback_is_new_once_and_counted_always():
    record = ModelReport("m", Options())
    assert record.fall_back("no", "here")
    assert not record.fall_back("no", "here")
    assert record.fall_back("no", "there")
    assert record.counters["fallbacks"] == 3
    assert record.fallbacks == [("no", "here"), ("no", "there")]


# ---- explain -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [1, 3])
def test_explain_on_meta_counts_every_layer(layers):
    with torch.device("meta"):
        model = LlamaForCausalLM(llama(layers)).eval()
    made = fu_compile.explain(model, mode="exact")
    assert [graph.phase for graph in made.graphs] == ["prefill", "decode"]
    assert made.counters["graphs"] == 2
    assert made.fallbacks == []
    for graph in made.graphs:
        fired = graph.fired()
        assert (fired["rms_norm"], fired["attention"], fired["swiglu"]) == (2 * layers + 1, layers, layers)
        assert (fired["kv_write"], fired["qkv"], fired["residual"]) == (2 * layers, layers, 2 * layers)
        rows = layer_map(graph)
        assert [row for row in rows if row != REST] == [f"model.layers.{i}" for i in range(layers)]
        for layer in range(layers):
            filled = [piece for piece, cell in rows[f"model.layers.{layer}"].items() if cell.formats]
            assert filled == [piece for piece in PIECES if piece != "head"]
        assert rows[REST]["head"].formats == ["exact"]
    assert all(parameter.is_meta for parameter in model.parameters())


def test_explain_leaves_the_model_as_it_was():
    model = LlamaForCausalLM(llama(1))
    model.model.layers[0].mlp.eval()  # a mixture, as a user who freezes parts has it
    flags = {name: module.training for name, module in model.named_modules()}
    before = {name: value.clone() for name, value in model.state_dict().items()}
    ids = torch.randint(0, 103, (2, 5))
    model.compile(backend="eager")
    attributes = set(vars(model))
    compiled = model._compiled_call_impl
    random = torch.random.get_rng_state()
    fu_compile.explain(model)
    assert torch.equal(random, torch.random.get_rng_state())
    assert {name: module.training for name, module in model.named_modules()} == flags
    assert set(vars(model)) == attributes
    assert model._compiled_call_impl is compiled
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert fu_compile.report().models == []  # an explanation is no compiled model

    cache = StaticCache(config=model.config, max_cache_len=9)
    keyword = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    with torch.no_grad():
        model.eval()(ids, **{keyword: cache})
        keys = cache.layers[0].keys.clone()
        fu_compile.explain(model, input_ids=ids[:, :1], **{keyword: cache})
    assert int(cache.get_seq_length()) == 5
    assert torch.equal(keys, cache.layers[0].keys)


def test_a_second_explanation_equals_the_first():
    # Dynamo remembers the sizes of a function and would make them symbolic the second time.
    with torch.device("meta"):
        model = LlamaForCausalLM(llama(1)).eval()
    for batch, tokens in ((2, 7), (3, 9)):
        ids = torch.zeros((batch, tokens), dtype=torch.long, device="meta")
        (graph,) = fu_compile.explain(model, input_ids=ids, use_cache=False).graphs
        assert (graph.phase, graph.batch, graph.query_length) == ("score", str(batch), str(tokens))


def test_explain_takes_inputs_and_options():
    model = LlamaForCausalLM(llama(1)).eval()
    keyword = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    ids = torch.randint(0, 103, (1, 6))
    made = fu_compile.explain(model, options={"prefill": "bf16"}, input_ids=ids, **{keyword: DynamicCache()})
    assert made.graphs[0].operators()["linear_bf16"] >= 4
    assert made.models[0].options.prefill == "bf16"
    assert "not applicable" in str(fu_compile.explain(model, mode="reduce-overhead", input_ids=ids, use_cache=False))
    with pytest.raises(OptionError, match="'prefill'"):
        fu_compile.explain(model, options={"prefil": "bf16"})


def test_a_model_without_a_block_is_reported_not_raised():
    made = fu_compile.explain(torch.nn.Sequential(torch.nn.Linear(4, 4)), input=torch.ones(2, 4))
    assert made.graphs == []
    assert made.counters["fallbacks"] == 1
    assert "attention" in made.fallbacks[0][0]
    with pytest.raises(OptionError, match="input_ids"):
        fu_compile.explain(torch.nn.Linear(4, 4))
