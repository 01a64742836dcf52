"""The report: what it derives from a graph, its three forms, the registry, and explain."""

import contextlib
import copy
import gc
import html.parser
import inspect
import io
import json
import math
import os
import re
import subprocess
import sys

import pytest
import torch
from fu_compile.passes import Event
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

import fu_compile
from fu_compile import backend, repro
from fu_compile import report as report_module
from fu_compile.capture import capture
from fu_compile.errors import DataError, OptionError
from fu_compile.options import Options
from fu_compile.report import (
    COUNTERS,
    FORMATS,
    MEMORY,
    PIECES,
    REST,
    GraphReport,
    ModelReport,
    Report,
    human_bytes,
    human_seconds,
    layer_map,
    memory,
    new_record,
    record_of,
)
from fu_compile.report_html import COLOURS

CACHE = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"


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
        self.open, self.buttons, self.spans, self.loaded, self.ids, self.texts = [], [], [], [], set(), []

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        if tag not in ("meta", "col"):
            self.open.append(tag)
        if tag == "button":
            self.buttons.append(given)
        if "map" in self.open or tag == "td":
            self.spans.append(int(given.get("colspan", 1)))
        if "id" in given:
            assert given["id"] not in self.ids
            self.ids.add(given["id"])
        self.loaded += [value for name, value in attrs if name in ("src", "href")]
        self.scripts = [value for name, value in attrs if name.startswith("on")]
        assert not self.scripts
        assert tag != "script" or given.get("type") == "application/json"

    def handle_data(self, data):
        if self.open and self.open[-1] == "button":
            self.texts.append(data)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def read(made, tmp_path):
    text = made.to_html(tmp_path / "r.html").read_text(encoding="utf-8")
    page = Balanced()
    page.feed(text)
    return text, page


def test_the_page_is_one_well_formed_file(tmp_path):
    made = one()
    text, page = read(made, tmp_path)
    assert page.open == []
    assert page.loaded == []
    assert "http" not in re.sub(r"<!doctype html>", "", text)
    assert "<b>(" not in text  # names and reasons are escaped
    assert "<script>alert" not in text
    missed = [b for b in page.buttons if b["class"] == "missed"]
    assert len(missed) == 1
    assert "the activation is <gelu>, not silu" in missed[0]["title"]
    # Every cell opens details of its own.
    assert {b["popovertarget"] for b in page.buttons if "popovertarget" in b} <= page.ids
    data = re.search(r'<script type="application/json" id="report">(.*?)</script>', text, re.S).group(1)
    assert json.loads(data) == json.loads(json.dumps(made.as_dict()))


@pytest.mark.parametrize("layers", [1, 2, 80, 131])
def test_layers_that_agree_are_one_cell_and_none_is_lost(layers, tmp_path):
    graph = decode_graph(layers)
    graph.events = [e for e in graph.events if e.fired]
    differ = {i for i in (2, 40) if i < layers}
    graph.fused = [
        (path, "linear_fp8" if path in {f"model.layers.{i}.mlp.down_proj" for i in differ} else name, detail)
        for path, name, detail in decode_graph(layers).fused
        if not path.endswith(("o_proj", ".mlp"))
    ]
    text, page = read(Report([ModelReport("m", Options(), [graph])]), tmp_path)
    strip = re.search(r'<table class="map".*?</table>', text, re.S).group()
    rows = re.findall(r"<tr><th>[^<]*</th>(.*?)</tr>", strip, re.S)
    assert len(rows) == len(PIECES)
    changes = sum((i > 0) + (i < layers - 1) for i in differ)
    for piece, row in zip(PIECES, rows, strict=True):
        spans = [int(n) for n in re.findall(r'<td colspan="(\d+)">', row)]
        assert sum(spans) == layers, piece
        assert len(spans) == (1 + changes if piece == "residual" else 1), piece
    titles = [b["title"] for b in page.buttons if "output and down, residual, layer" in b["title"]]
    assert len(titles) == 1 + changes
    assert sum("8-bit" in title for title in titles) == len(differ)


def luminance(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_white_text_is_readable_on_every_cell():
    assert set(COLOURS) == set(FORMATS)
    for name, colour in COLOURS.items():
        assert 1.05 / (luminance(colour) + 0.05) >= 4.5, name  # WCAG 2.1, 1.4.3, level AA
    assert len(set(COLOURS.values())) == len(COLOURS)


# ---- memory and times ----------------------------------------------------------------------------------------------


def tiny(layers=1, **more):
    torch._dynamo.reset()
    torch.manual_seed(0)
    return LlamaForCausalLM(llama(layers, eos_token_id=None, pad_token_id=0, **more)).eval().requires_grad_(False)


def run(model, tokens=3, new=2, batch=1, **more):
    ids = torch.randint(3, 103, (batch, tokens))
    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new + 1, do_sample=False, **more)


def test_memory_adds_up_and_calls_are_timed_only_on_demand():
    layers = 2
    model = tiny(layers)
    model.compile(backend="futransformer", options={"rest": "eager", "overrides": [("model.layers.1.*", "bf16")]})
    cache = StaticCache(config=model.config, max_cache_len=70)
    run(model, **{CACHE: cache})
    made = fu_compile.report(model)
    assert [m.name for m in made.models] == ["LlamaForCausalLM"]  # a graph alone only knows the modules inside

    found = memory(made.graphs)
    assert list(found) == ["model.layers.0", "model.layers.1", REST]
    for i in range(layers):
        own = sum(p.nbytes for p in model.model.layers[i].parameters())
        assert found[f"model.layers.{i}"]["parameters"] == own
    total = {kind: sum(row.get(kind, 0) for row in found.values()) for kind in MEMORY}
    assert total["parameters"] == sum(p.nbytes for p in model.parameters()) == made.counters["bytes_original"]
    assert "int4" not in found["model.layers.1"]
    projections = [p for n, p in model.model.layers[1].named_parameters() if "proj" in n]
    assert found["model.layers.1"]["bf16"] == sum(p.numel() * 2 for p in projections)
    # Prefill and decode have packed weights of their own in layer 0; in layer 1 both share the 16-bit ones.
    assert total["int4"] + total["fp8"] + total["bf16"] == made.counters["bytes_packed"]
    assert total["kv_int4"] == made.counters["bytes_kv"]
    assert total["kv_model"] == sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    again = json.loads(json.dumps(made.as_dict()))
    assert again["models"][0]["memory"]["model.layers.0"] == found["model.layers.0"]
    assert human_bytes(total["int4"]) in str(made)

    before = {name: value for graph in made.graphs for name, value in graph.seconds.items()}
    assert {"capture", "rms_norm", "swiglu", "pack_weights", "rest", "packing"} <= set(before)
    assert all(value >= 0 for value in before.values())
    assert {graph.mean_seconds for graph in made.graphs} == {None}
    calls = [graph.calls for graph in made.graphs]
    decode = next(graph for graph in made.graphs if graph.phase == "decode")
    ids = torch.randint(3, 103, (1, 1))
    for timer in (contextlib.nullcontext(), fu_compile.report.timed(model), contextlib.nullcontext()):
        with timer, torch.no_grad():
            model(ids, **{CACHE: cache}, logits_to_keep=1)
    graphs = fu_compile.report(model).graphs
    assert sum(graph.calls for graph in graphs) == sum(calls) + 3
    # A call of one's own may be a graph of its own: the first call built it, the second was timed.
    assert sum(graph.timed_calls for graph in graphs) == 1
    timed = next(graph for graph in graphs if graph.timed_calls)
    assert timed.phase == decode.phase
    assert timed.mean_seconds > 0
    assert f"{human_seconds(timed.mean_seconds)} (of 1)" in fu_compile.report(model).to_text(200)


@pytest.mark.parametrize(("seconds", "text"), [(2.5, "2.50 s"), (0.0123, "12.3 ms"), (4e-5, "40 us")])
def test_seconds_are_written_for_people(seconds, text):
    assert human_seconds(seconds) == text


# ---- a script per graph --------------------------------------------------------------------------------------------


def fresh(path):
    """What a script prints in a fresh process: (operators line, max error)."""
    done = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1].startswith("max error: ")
    return lines[1], float(lines[-1].partition(": ")[2])


def here(path):
    """The same without the cost of a process."""
    namespace = {"__name__": "__main__"}
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(path.read_text(), str(path), "exec"), namespace)
    lines = out.getvalue().splitlines()
    return lines[1], float(lines[-1].partition(": ")[2])


def operators(graph):
    return "operators: " + ", ".join(f"{name} x{n}" for name, n in graph.operators().items())


@pytest.mark.slow
def test_a_repro_rebuilds_exact_graphs_of_every_cache(tmp_path):
    """Two batch sizes, so that the second pair of graphs has symbolic sizes; three kinds of cache."""
    model = fu_compile.compile(tiny(), mode="exact", rest="eager")
    run(model, cache_implementation="static")
    run(model, tokens=5, batch=2, cache_implementation="static")
    run(model, tokens=4)
    with torch.no_grad():
        model(torch.randint(3, 103, (1, 4)), use_cache=False)
    graphs = fu_compile.report(model).graphs
    assert any(graph.batch.startswith("s") for graph in graphs)
    stores = {(graph.phase, graph.store) for graph in graphs}
    cached = {(phase, store) for phase in ("prefill", "decode") for store in ("StaticCache", "DynamicCache")}
    assert stores == {*cached, ("score", "none")}
    for graph in graphs:
        if graph.index != 1 and not graph.batch.startswith("s") and graph.store == "StaticCache":
            continue  # the same with symbolic sizes is among them
        path = graph.repro(tmp_path / "some folder" / f"graph{graph.index}.py")
        printed, error = fresh(path) if graph.index == 1 else here(path)
        assert printed == operators(graph)
        assert 0 <= error < 1e-4  # float32 sums of a hundred terms in another order
    text = path.read_text().replace("'", '"')
    assert 'at("model.layers.0.mlp' in text
    assert "modeling_llama.py:" in text


def test_a_repro_rebuilds_quantised_graphs(tmp_path):
    model = fu_compile.compile(tiny(), rest="eager")
    run(model, tokens=70, cache_implementation="static")
    for graph in fu_compile.report(model).graphs:
        assert graph.store == "StaticCache + INT4"
        printed, error = here(graph.repro(tmp_path / f"graph{graph.index}.py"))
        assert printed == operators(graph)
        assert 1e-4 < error < 3  # quantised: an error, but of the size of the values (deviation 1) at most


@pytest.mark.parametrize("mode", ["exact", None])
def test_an_int4_cache_is_named_as_the_users_own_store(mode, tmp_path):
    """Fused, and in exact mode as the unfused update, the cache runs in INT4 and its bytes are those of the object."""
    model = fu_compile.compile(tiny(), mode=mode, rest="eager")
    cache = fu_compile.Int4Cache(model.config, 150)
    run(model, tokens=70, **{CACHE: cache})
    made = fu_compile.report(model)
    assert [graph.phase for graph in made.graphs] == ["prefill", "decode"]
    lengths = sum(layer.cumulative_length.nbytes for layer in cache.layers)
    for graph in made.graphs:
        assert graph.store == "Int4Cache"
        assert layer_map(graph)["model.layers.0"]["cache"].formats == ["int4"]
        assert ("kv_update" in graph.operators()) == (mode == "exact")
        assert graph.memory["model.layers.0"]["kv_int4"] == cache.nbytes - lengths
        assert "kv_model" not in graph.memory["model.layers.0"]
        if mode == "exact":  # fused, the operators are those of the test above
            printed, error = here(graph.repro(tmp_path / f"graph{graph.index}.py"))
            assert printed == operators(graph)
            assert error < 1e-4  # as above
    assert "fu_compile.Int4Cache" in made.to_text(200)


def test_a_repro_shows_a_wrong_graph(tmp_path, monkeypatch):
    """A backend that is one per cent off shows; so does editing the options of the script."""
    model = fu_compile.compile(tiny(), rest="eager")
    run(model, cache_implementation="static")
    path = fu_compile.report(model).graphs[1].repro(tmp_path / "graph.py")
    path.write_text(re.sub(r"OPTIONS = .*", "OPTIONS = {'mode': 'exact', 'rest': 'eager'}", path.read_text()))
    printed, exact = here(path)
    assert exact < 1e-4
    assert "linear_int4" not in printed
    right = backend.compile_graph

    def wrong(*args):
        compiled = right(*args)
        return lambda *inputs: [x * 1.01 for x in compiled(*inputs)]

    monkeypatch.setattr(backend, "compile_graph", wrong)
    assert here(path)[1] > 1e-3


def test_errors_are_measured():
    x = torch.randn(5, 7)
    assert repro.error(x, x) == (0.0, 0.0)
    largest, relative = repro.error(x + 0.5, x)
    assert largest == pytest.approx(0.5)
    assert relative == pytest.approx(0.5 / float(x.square().mean().sqrt()), rel=1e-5)
    inf = torch.tensor([float("-inf"), 1.0])
    assert repro.error(inf, inf) == (0.0, 0.0)
    assert math.isnan(repro.error(torch.tensor([float("nan")]), torch.ones(1))[0])
    assert repro.error(x[:0], x[:0]) == (0.0, 0.0)


def test_explain_tells_memory_and_writes_scripts_without_weights(tmp_path):
    with torch.device("meta"):
        model = LlamaForCausalLM(llama(1)).to(torch.bfloat16).eval()
    made = fu_compile.explain(model, options={"rest": "eager"})
    found = memory(made.graphs)
    assert sum(row["parameters"] for row in found.values()) == 2 * sum(p.numel() for p in model.parameters())
    layer = found["model.layers.0"]
    assert layer["int4"] < layer["fp8"] < layer["parameters"]
    assert layer["kv_int4"] < layer["kv_model"]
    paths = made.repro(tmp_path / "scripts")
    assert [path.name for path in paths] == ["graph0.py", "graph1.py"]
    for graph, path in zip(made.graphs, paths, strict=True):
        printed, error = here(path)
        assert printed == operators(graph)
        assert 1e-4 < error < 3  # quantised, as above


def captured(function, *inputs):
    """What ``capture`` makes of a function."""
    found = []

    def record(gm, example_inputs):
        found.append(capture(gm, example_inputs))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(function, backend=record, dynamic=True)(*inputs)
    return found[0]


def test_what_has_no_form_as_text_is_a_named_error(tmp_path):
    """Small constants are written out, infinities too; a large one is refused, but only when somebody asks."""
    x = torch.randn(3, 4)
    small = repro.write_down(captured(lambda x: x * torch.tensor([1.0, float("inf"), 2.0, 0.5]), x), "f", Options())
    assert "constant([1.0, float('inf'), 2.0, 0.5], torch.float32, DEVICE)" in "\n".join(small.lines)
    large = captured(lambda x: x * torch.tensor([float(i) for i in range(100)]).sum(), x)
    source = repro.write_down(large, "f", Options())
    assert source.lines == []
    with pytest.raises(DataError, match="has no form as text"):
        GraphReport(0, "score", "1", "1", source=source).repro(tmp_path / "no.py")
    with pytest.raises(DataError, match="backend of this process"):
        decode_graph().repro(tmp_path / "no.py")
    assert list(tmp_path.iterdir()) == []


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
