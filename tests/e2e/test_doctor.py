"""What doctor finds in a model, each finding once where it is and never where it is not."""

import json
import re

import pytest
import torch
from field import CACHE, compiled, counters, dynamic_cache, generate, prompt, static_cache, step
from models import config, model
from transformers import CompileConfig

import fu_compile
from fu_compile import doctor as doctor_module
from fu_compile import report as report_module
from fu_compile.doctor import BACKEND, Check, DoctorReport

FINDINGS = ("compilers", "dynamo", "fallbacks", "prefill", "cache", "recompilations", "calls")
EAGER = {"mode": "exact", "rest": "eager"}


@pytest.fixture(autouse=True)
def empty(monkeypatch):
    monkeypatch.setattr(report_module, "_records", [])
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def llama():
    made = model(config("llama", num_hidden_layers=1)).requires_grad_(False)
    made.generation_config.eos_token_id = None
    return made


def findings(found):
    """Names of what is not in order, whatever the machine lacks."""
    names = {"reaches the backend", "calls so far", *FINDINGS}
    return {check.name for check in found.checks if check.name in names and check.status != "ok"}


def run(made, tokens=5, new=3, **more):
    return generate(made, prompt(1, tokens) % 131, new, **more)


def other(gm, inputs):
    """A compiler that is not ours."""
    return gm.forward


def test_a_healthy_model_has_none_of_the_findings(llama):
    fu_compile.compile(llama, **EAGER)
    run(llama, cache_implementation="static")
    found = fu_compile.doctor(llama)
    assert findings(found) == set()
    assert not {check.name for check in found.checks} & set(FINDINGS)
    assert "3 calls of 2 graphs" in found["calls so far"].value
    assert findings(fu_compile.doctor()) == set()


def test_every_finding_names_a_line_that_mends_it(llama):
    """What the other tests find one by one comes with an advice; here as a rule over all checks."""
    wrapper = torch.compile(llama, backend=BACKEND, options=EAGER)
    for found in (fu_compile.doctor(llama), fu_compile.doctor(wrapper)):
        for check in found.checks:
            if check.status == "problem":
                assert check.advice, check.name


# ---- calls that never arrive -----------------------------------------------------------------------------------------


def test_a_wrapper_that_generates_uncompiled(llama):
    wrapper = torch.compile(llama, backend=BACKEND, options=EAGER)
    run(wrapper, cache_implementation="static")
    found = fu_compile.doctor(wrapper)
    assert findings(found) == {"reaches the backend", "calls so far"}
    assert found["reaches the backend"].status == "problem"
    assert found["calls so far"].value.startswith("0 calls")
    assert 'model.compile(backend="futransformer")' in found["reaches the backend"].advice


def test_a_compiled_model_whose_calls_went_elsewhere(llama):
    fu_compile.compile(llama, **EAGER)
    ids = prompt(1, 4) % 131
    with torch.no_grad():
        llama.forward(ids)  # not model(...): this bypasses what model.compile() installed
    found = fu_compile.doctor(llama)
    assert findings(found) == {"calls so far"}
    assert found["reaches the backend"].status == "ok"
    assert "model.forward" in found["calls so far"].advice
    assert "LlamaForCausalLM was compiled" in fu_compile.doctor()["calls"].value
    with torch.no_grad():
        llama(ids)
    assert findings(fu_compile.doctor(llama)) == set()
    assert "calls" not in fu_compile.doctor()


def test_an_uncompiled_model_is_not_blamed_for_its_calls(llama):
    assert findings(fu_compile.doctor(llama)) == {"reaches the backend"}


@pytest.mark.parametrize("stance", ["force_eager", "eager_on_recompile", "default"])
def test_a_stance_that_skips_the_compiler(llama, stance):
    fu_compile.compile(llama, **EAGER)
    torch.compiler.set_stance(stance)
    try:
        found = fu_compile.doctor(llama)
    finally:
        torch.compiler.set_stance("default")
    assert ("dynamo" in found) == (stance != "default")
    if stance != "default":
        assert found["dynamo"].status == "problem"
        assert "set_stance" in found["dynamo"].advice


def test_a_disabled_dynamo(llama):
    with torch._dynamo.config.patch(disable=True):
        assert "TORCH_COMPILE_DISABLE" in fu_compile.doctor(llama)["dynamo"].advice
        assert "dynamo" in fu_compile.doctor()
    assert "dynamo" not in fu_compile.doctor()


def test_a_fallback_is_named(llama):
    fu_compile.compile(llama, rest="eager")
    llama.requires_grad_(True)
    with pytest.warns(fu_compile.FuWarning, match="gradients"):
        llama(prompt(1, 4) % 131)
    check = fu_compile.doctor(llama)["fallbacks"]
    assert "gradients" in check.value
    assert "strict=True" in check.advice


# ---- two compilers ---------------------------------------------------------------------------------------------------


def wrap_other(m):
    return torch.compile(fu_compile.compile(m, **EAGER), backend=other)


def forward_other(m):
    fu_compile.compile(m, **EAGER)
    m.forward = torch.compile(m.forward, backend=other)
    return m


def other_around_forward(m):
    m.compile(backend=other)
    m.forward = torch.compile(m.forward, backend=BACKEND, options=EAGER)
    return m


def wrap_ours(m):
    m.compile(backend=other)
    return torch.compile(m, backend=BACKEND, options=EAGER)


@pytest.mark.parametrize(
    ("wire", "status", "unwanted"),
    [
        (wrap_other, "warning", "leave out torch.compile(model) with backend 'other'"),
        (forward_other, "problem", "leave out model.forward = torch.compile(...) with backend 'other'"),
        (other_around_forward, "warning", "leave out model.compile() with backend 'other'"),
        (wrap_ours, "problem", "leave out model.compile() with backend 'other'"),
    ],
)
def test_two_compilers_stacked(llama, wire, status, unwanted):
    wired = wire(llama)
    check = fu_compile.doctor(wired)["compilers"]
    assert check.status == status
    assert unwanted in check.advice
    # The claim itself: the inner one gets the graph.
    with torch.no_grad():
        wired(prompt(1, 4) % 131)
    assert counters(llama)["calls"] == (1 if status == "warning" else 0)
    assert (fu_compile.doctor(wired)["reaches the backend"].status == "ok") == (status == "warning")


def test_one_compiler_twice_is_no_stack(llama):
    wired = torch.compile(fu_compile.compile(llama, **EAGER), backend=BACKEND, options=EAGER)
    assert "compilers" not in fu_compile.doctor(wired)


def decode_only(**options):
    made = CompileConfig(mode=None, **options)
    made._compile_all_devices = True  # what a GPU does without being asked
    return made


def test_eager_prefill(llama):
    run(llama, cache_implementation="static", compile_config=decode_only(backend=BACKEND, options=EAGER))
    found = fu_compile.doctor(llama)
    assert findings(found) == {"reaches the backend", "prefill"}
    assert "only decode steps" in found["reaches the backend"].value
    assert "2 decode steps" in found["prefill"].value
    assert 'model.compile(backend="futransformer")' in found["prefill"].advice


def test_what_generate_compiles_around_a_compiled_model_is_no_finding(llama):
    fu_compile.compile(llama, **EAGER)
    run(llama, cache_implementation="static", compile_config=decode_only(backend=other))
    assert findings(fu_compile.doctor(llama)) == set()


def test_generate_compiled_by_another_compiler(llama):
    run(llama, cache_implementation="static", compile_config=decode_only(backend=other))
    assert "'other'" in fu_compile.doctor(llama)["reaches the backend"].value


def test_prompts_of_one_token_are_no_eager_prefill(llama):
    fu_compile.compile(llama, **EAGER)
    step(llama, prompt(1, 1) % 131, static_cache(llama, 8, 1))
    assert counters(llama)["decode_calls"] == 1
    assert findings(fu_compile.doctor(llama)) == set()


# ---- caches and graphs -----------------------------------------------------------------------------------------------


def test_a_growing_cache(llama):
    compiled(llama, mode="exact")
    cache = dynamic_cache(llama)
    step(llama, prompt(1, 5) % 131, cache)
    assert "cache" not in fu_compile.doctor(llama)  # a prefill alone copies nothing
    step(llama, prompt(1, 1) % 131, cache)
    check = fu_compile.doctor(llama)["cache"]
    assert check.value.startswith("1 decode step")
    assert 'cache_implementation="static"' in check.advice
    assert CACHE in ("cache", "past_key_values")


def test_a_near_recompile_limit(llama, monkeypatch):
    compiled(llama, mode="exact")
    run(llama, cache_implementation="static")  # two graphs
    for limit, status in ((3, None), (2, "problem")):
        with torch._dynamo.config.patch(recompile_limit=limit):
            found = fu_compile.doctor(llama)
        assert ("recompilations" in found) == (status is not None), limit
        if status:
            assert found["recompilations"].status == status
            assert f"recompile_limit = {4 * limit}" in found["recompilations"].advice
    with torch._dynamo.config.patch(recompile_limit=64):
        monkeypatch.setattr(doctor_module, "graphs_of", lambda code: 48)
        assert fu_compile.doctor(llama)["recompilations"].status == "warning"
        monkeypatch.setattr(doctor_module, "graphs_of", lambda code: 47)
        assert "recompilations" not in fu_compile.doctor(llama)


def test_the_limit_is_the_one_that_dynamo_obeys(llama):
    """At the limit that doctor calls a problem, another shape really runs uncompiled."""
    fu_compile.compile(llama, **EAGER, dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=2), torch.no_grad():
        for tokens in (4, 5):
            llama(prompt(1, tokens) % 131, use_cache=False)
        assert fu_compile.doctor(llama)["recompilations"].status == "problem"
        before = counters(llama)["calls"]
        assert before == 2
        llama(prompt(1, 6) % 131, use_cache=False)
    assert counters(llama)["calls"] == before


# ---- forms -----------------------------------------------------------------------------------------------------------


def test_text_dictionary_and_page_say_the_same(llama, tmp_path):
    found = fu_compile.doctor(torch.compile(llama, backend=BACKEND))
    page = found.to_html(tmp_path / "doctor.html").read_text(encoding="utf-8")
    text = found.to_text(200)
    assert json.loads(json.dumps(found.as_dict()))["ok"] is False
    for check in found.checks:
        for said in filter(None, (check.name, check.value, check.advice)):
            assert re.sub(r"[&<>\"']", "", said)[:40] in re.sub(r"&\w+;|&#x27;|[<>\"']", "", page), said
            assert said[:60] in text
    assert "http" not in page.replace("<!doctype html>", "")
    evil = DoctorReport([Check("<b>", "</table><script>", "problem", "&")])
    assert "<script>" not in evil.to_html(tmp_path / "evil.html").read_text()
    assert max(map(len, found.to_text(60).splitlines())) <= 60
