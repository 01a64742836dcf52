"""The examples are programs that a user runs: they run here, with tiny settings."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers import models as tokenizer_models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
WORDS = [f"w{i}" for i in range(61)]


def program(name):
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def tiny(tmp_path):
    """A folder with a random model of two layers, a tokenizer with a chat template, and a text in its words."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "vocab_size": len(WORDS), "max_position_embeddings": 256}
    # No end token: a random model must not stop early.
    LlamaForCausalLM(LlamaConfig(**sizes, eos_token_id=None, pad_token_id=0)).save_pretrained(tmp_path)
    # The one special token lies outside the model's vocabulary: everything it generates is printed.
    inner = Tokenizer(tokenizer_models.WordLevel({w: i for i, w in enumerate([*WORDS, "[UNK]"])}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="[UNK]")
    tokenizer.chat_template = "w1 {% for message in messages %}{{ message['content'] }} {% endfor %}w2"
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "text.txt").write_text(" ".join(WORDS[i] for i in torch.randint(3, 61, (400,)).tolist()))
    yield tmp_path
    torch.compiler.reset()


def test_every_example_is_tested_here():
    assert {p.stem for p in EXAMPLES.glob("*.py")} == {"demo", "quickstart"}


def test_quickstart(tiny, capsys):
    program("quickstart").main([str(tiny), "w3 w4 w5", "--tokens", "5"])
    out = capsys.readouterr().out
    assert out.startswith("w3 w4 w5 ")
    assert len(out.splitlines()[0].split()) == 8  # prompt and all new tokens
    assert "decode" in out  # the report names the graphs' phases


def test_demo_shows_answer_speed_report_and_four_perplexities(tiny, capsys, monkeypatch):
    monkeypatch.setenv("FU_REST", "eager")  # six graphs: Inductor would take a minute for what is not tested here
    arguments = ["--model", str(tiny), "--prompt", "w7 w8", "--tokens", "6", "--quiet", "--windows", "0", "2"]
    arguments += ["--length", "40", "--file", str(tiny / "text.txt"), "--json", str(tiny / "out.json")]
    program("demo").main(arguments)
    out = capsys.readouterr().out
    assert "tokens/s" in out
    assert "nan" not in out
    for word in ("eager", "exact", "fp8", "int4", "windows 0, 2 of 40 tokens", "prefill", "decode"):
        assert word in out, word
    read = json.loads((tiny / "out.json").read_text())
    assert [p["name"] for p in read["paths"]] == ["eager", "exact", "fp8", "int4"]
    assert abs(read["paths"][1]["difference"]) < 1e-5  # exact: float32 sums in another order


def test_demo_without_the_text_says_so_and_still_shows_the_rest(tiny, capsys, monkeypatch):
    demo = program("demo")
    monkeypatch.setattr(demo.evaluate, "_places", list)
    monkeypatch.setattr(demo.evaluate.importlib.util, "find_spec", lambda name: None)
    # The import system is not asked while find_spec is gone: only the last step runs under it.
    monkeypatch.setattr(demo, "chat", lambda *a: ("w9", 1.0))
    monkeypatch.setattr(demo.fu_compile, "report", lambda model: "the report", raising=False)
    demo.main(["--model", str(tiny), "--quiet"])
    out = capsys.readouterr().out
    assert "the report" in out
    assert "FU_WIKITEXT" in out


def test_speed_is_the_median_of_decode_steps():
    demo = program("demo")
    bar = demo.Progress(5, "x", shown=False)
    bar.put(None)  # the prompt
    assert bar.times == []
    bar.times = [10.0, 20.0, 20.5, 21.0, 29.0, 29.5]  # first token at 10: compilation; one outlier
    assert bar.tokens_per_second() == pytest.approx(2.0)
