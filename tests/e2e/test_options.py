"""Options: the fixed table, precedence, and what a wrong one says. Errors: codes, text, pickling, Dynamo."""

import dataclasses
import json
import pathlib
import pickle
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fu_compile import errors
from fu_compile.errors import CODES, FuError, OptionError
from fu_compile.options import PRECISIONS, PRESETS, Options, parse, table

# The public table (design.md section 10), default first. Written out: the code must not be compared with itself.
TABLE = {
    "prefill": ("fp8", "bf16", "exact"),
    "decode": ("int4", "fp8", "bf16", "exact"),
    "kv_cache": ("int4", "int4-channel", "model"),
    "lm_head": ("model", "fp8", "int4"),
    "group_size": (128, 64, 32),
    "fp8_scaling": ("delayed", "static", "dynamic", "row"),
    "lowering": ("auto", "cuda", "triton", "reference"),
    "rest": ("inductor", "eager"),
    "cuda_graphs": (False, True),
    "strict": (False, True),
}


@pytest.fixture(autouse=True)
def no_environment(monkeypatch):
    import os

    for name in [n for n in os.environ if n.startswith("FU_")]:
        monkeypatch.delenv(name)


def test_the_table_is_the_public_one():
    assert {name: values for name, values, _ in table() if name != "overrides"} == TABLE
    assert all(meaning for _, _, meaning in table())
    defaults = Options()
    assert all(getattr(defaults, name) == values[0] for name, values in TABLE.items())
    assert defaults.overrides == ()
    assert Options.resolve() == defaults
    assert str(defaults) == "defaults"


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, vs in TABLE.items() for v in vs])
def test_every_value_is_accepted_everywhere(name, value, monkeypatch):
    assert getattr(Options.resolve(**{name: value}), name) == value
    assert getattr(Options.resolve(options={name: value}), name) == value
    monkeypatch.setenv(f"FU_{name.upper()}", str(value))
    found = getattr(Options.resolve(), name)
    assert found == value
    assert type(found) is type(value)


def test_keyword_beats_environment_beats_preset_beats_default(monkeypatch):
    assert Options.resolve().decode == "int4"
    assert Options.resolve(mode="exact").decode == "exact"
    monkeypatch.setenv("FU_DECODE", "bf16")
    assert Options.resolve(mode="exact").decode == "bf16"
    assert Options.resolve(mode="exact").prefill == "exact"
    assert Options.resolve(mode="exact", options={"decode": "fp8"}).decode == "fp8"
    assert Options.resolve(mode="exact", decode="fp8").decode == "fp8"
    assert Options.resolve(options={"decode": "fp8"}, decode="exact").decode == "exact"
    monkeypatch.setenv("FU_DECODE", "")  # an empty variable is none
    assert Options.resolve().decode == "int4"


def test_presets(monkeypatch):
    exact = Options.resolve(mode="exact")
    assert (exact.prefill, exact.decode, exact.kv_cache, exact.lm_head) == ("exact", "exact", "model", "model")
    assert exact.is_exact
    assert not Options().is_exact
    assert not Options.resolve("exact", overrides=[("*", "int4")]).is_exact
    assert Options.resolve(mode="reduce-overhead") == Options(cuda_graphs=True)
    assert Options.resolve(mode="default") == Options.resolve(mode=None) == Options()
    assert Options.resolve(options={"mode": "exact"}) == exact
    monkeypatch.setenv("FU_MODE", "exact")
    assert Options.resolve() == exact
    assert Options.resolve(mode="default") == Options()
    assert set(PRESETS) == {"default", "exact", "reduce-overhead"}


@pytest.mark.parametrize(
    ("keywords", "code", "says"),
    [
        ({"prefil": "fp8"}, "FU-OPT-001", "'prefill'"),
        ({"options": {"kvcache": "int4"}}, "FU-OPT-001", "'kv_cache'"),
        ({"prefill": "fp9"}, "FU-OPT-002", "'fp8'"),
        ({"prefill": "int4"}, "FU-OPT-002", "bf16"),  # a value of another option
        ({"decode": None}, "FU-OPT-002", "int4"),
        ({"mode": "exat"}, "FU-OPT-001", "'exact'"),
        ({"mode": 3}, "FU-OPT-001", "exact"),
        ({"group_size": 48}, "FU-OPT-002", "64"),
        ({"group_size": True}, "FU-OPT-002", "128"),
        ({"group_size": "64"}, "FU-OPT-002", "'64'"),
        ({"group_size": 64.0}, "FU-OPT-002", "64"),
        ({"cuda_graphs": 1}, "FU-OPT-002", "True"),
        ({"strict": "yes"}, "FU-OPT-002", "False"),
        ({"overrides": "model.*=bf16"}, "FU-OPT-003", "pairs"),
        ({"overrides": {"model.*": "bf16"}}, "FU-OPT-003", "pairs"),
        ({"overrides": ["model.*"]}, "FU-OPT-003", "pair"),
        ({"overrides": [("model.*", "bf16", 1)]}, "FU-OPT-003", "pair"),
        ({"overrides": [("", "bf16")]}, "FU-OPT-003", "pattern"),
        ({"overrides": [("*", "in4")]}, "FU-OPT-003", "'int4'"),
        ({"overrides": [(3, "int4")]}, "FU-OPT-003", "pattern"),
        ({"options": [("decode", "fp8")]}, "FU-OPT-002", "mapping"),
        ({"options": Options(), "mode": "exact"}, "FU-OPT-002", "replace"),
    ],
)
def test_wrong_options_name_the_way_out(keywords, code, says):
    with pytest.raises(OptionError) as caught:
        Options.resolve(**keywords)
    assert caught.value.code == code
    assert says in str(caught.value)
    assert isinstance(caught.value, ValueError)


def test_wrong_environment_variables(monkeypatch):
    monkeypatch.setenv("FU_SOMETHING_ELSE", "1")  # another program's
    monkeypatch.setenv("FU_CACHE_DIR", "/x")
    assert Options.resolve() == Options()
    monkeypatch.setenv("FU_PREFIL", "fp8")
    with pytest.raises(OptionError, match="FU_PREFILL"):
        Options.resolve()
    monkeypatch.delenv("FU_PREFIL")
    monkeypatch.setenv("FU_GROUP_SIZE", "48")
    with pytest.raises(OptionError, match="FU_GROUP_SIZE"):
        Options.resolve()


def test_overrides_first_match_wins():
    options = Options(overrides=[["model.layers.0.*", "bf16"], ("*.down_proj", "fp8"), ("model.layers.1?.*", "exact")])
    assert options.precision_for("model.layers.0.mlp.down_proj", "int4") == "bf16"
    assert options.precision_for("model.layers.3.mlp.down_proj", "int4") == "fp8"
    assert options.precision_for("model.layers.12.mlp.up_proj", "int4") == "exact"
    assert options.precision_for("model.layers.1.mlp.up_proj", "int4") == "int4"
    assert Options().precision_for("anything", "fp8") == "fp8"
    assert hash(options) == hash(Options.from_dict(options.as_dict()))
    assert parse("overrides", "a.*=bf16, b=c=fp8", "here") == (("a.*", "bf16"), ("b=c", "fp8"))
    for text in ("a.*", "=bf16", "a=", "a=fp9"):
        with pytest.raises(OptionError, match="here"):
            parse("overrides", text, "here")


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Options().prefill = "bf16"
    with pytest.raises(OptionError):
        dataclasses.replace(Options(), prefill="nothing")


values = st.fixed_dictionaries(
    {},
    optional={name: st.sampled_from(vs) for name, vs in TABLE.items()}
    | {"overrides": st.lists(st.tuples(st.text(min_size=1, max_size=8), st.sampled_from(PRECISIONS)), max_size=3)},
)


@settings(max_examples=40, deadline=None)
@given(values)
def test_json_round_trip(chosen):
    options = Options(**chosen)
    again = Options.from_dict(json.loads(json.dumps(options.as_dict())))
    assert again == options
    assert hash(again) == hash(options)
    assert pickle.loads(pickle.dumps(options)) == options


@pytest.mark.parametrize("saved", [{}, {"version": 2}, {"version": 1, "prefil": "fp8"}, {"version": 1, "rest": 1}, []])
def test_saved_options_of_another_kind(saved):
    with pytest.raises(OptionError):
        Options.from_dict(saved)


def test_cuda_graphs_without_a_gpu_is_accepted_and_said():
    options = Options.resolve(mode="reduce-overhead")
    assert "CUDA device" in options.not_applicable("cpu")["cuda_graphs"]
    assert options.not_applicable("cuda") == {}
    assert Options().not_applicable("cpu") == {}


def test_through_torch_compile():
    seen = []

    def backend(gm, inputs, *, mode=None, options=None):
        seen.append(Options.resolve(mode, options))
        return gm.forward

    x = torch.ones(3)
    torch.compile(torch.nn.ReLU(), backend=backend, options={"decode": "bf16", "mode": "exact"})(x)
    torch.compile(torch.nn.ReLU(), backend=backend, mode="reduce-overhead")(x)
    assert seen == [
        Options(prefill="exact", decode="bf16", kv_cache="model", lm_head="model"),
        Options(cuda_graphs=True),
    ]


# ---- errors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", errors.classes().values(), ids=lambda c: c.__name__)
def test_an_error_says_everything_and_survives_pickling(cls):
    error = cls("head_dim 3 is odd", where="model.layers.0")
    text = str(error)
    assert "head_dim 3 is odd" in text
    assert "model.layers.0" in text
    if cls is not FuError:
        assert error.code in CODES
        assert error.advice
        assert error.advice in text
        assert text.startswith(f"[{error.code}]")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is cls
    assert (str(again), again.code, again.where, again.as_dict()) == (text, error.code, error.where, error.as_dict())
    json.dumps(error.as_dict())


def test_codes_are_all_used_and_unknown_ones_refused():
    used = {cls.code for cls in errors.classes().values()} | {f"FU-OPT-00{i}" for i in (1, 2, 3, 4)}
    assert used - {""} == set(CODES)
    with pytest.raises(KeyError):
        FuError("x", code="FU-XXX-999")


@pytest.mark.parametrize("cls", errors.classes().values(), ids=lambda c: c.__name__)
@pytest.mark.parametrize("fullgraph", [False, True])
def test_an_error_in_a_backend_reaches_the_user_as_itself(cls, fullgraph):
    def backend(gm, inputs):
        with errors.through_dynamo():
            raise cls("no such thing", where="model.layers.1", advice="do this")

    torch._dynamo.reset()
    with pytest.raises(cls) as caught:
        torch.compile(lambda x: x + 1, backend=backend, fullgraph=fullgraph)(torch.ones(2))
    error = caught.value
    assert str(error) == str(cls("no such thing", where="model.layers.1", advice="do this"))
    assert type(errors.plain(error)) is cls
    assert type(pickle.loads(pickle.dumps(error))) is cls
    assert error.as_dict()["error"] == cls.__name__


def test_other_errors_are_left_to_dynamo():
    def backend(gm, inputs):
        with errors.through_dynamo():
            raise ZeroDivisionError("mine")

    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="mine"):
        torch.compile(lambda x: x + 2, backend=backend)(torch.ones(2))


def test_the_documentation_lists_every_option_and_code():
    text = (pathlib.Path(__file__).parents[2] / "docs" / "options.md").read_text(encoding="utf-8")
    for name, values, meaning in table():
        row = next(line for line in text.splitlines() if line.startswith(f"| `{name}` |"))
        shown = [] if name == "overrides" else [f'"{v}"' if isinstance(v, str) else str(v) for v in values]
        assert all(f"`{value}`" in row for value in shown)
        assert meaning.split(":")[0] in row or name == "fp8_scaling"
    rows = dict(re.findall(r"^\| (FU-\w+-\d+) \| `\w+` \| (.*) \|$", text, re.M))
    assert rows == CODES
