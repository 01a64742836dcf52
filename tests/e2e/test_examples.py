"""The examples are programs that a user runs: they run here, with tiny settings."""

import importlib.util
import json
import sys
import types
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers import models as tokenizer_models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from fu_compile.errors import DataError, MissingDependencyError

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
    assert {p.stem for p in EXAMPLES.glob("*.py")} == {"accuracy", "demo", "lm_eval_local", "quickstart"}


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


def test_accuracy_shows_perplexities_and_layers(tiny, capsys, monkeypatch):
    monkeypatch.setenv("FU_REST", "eager")
    words = (tiny / "text.txt").read_text()
    (tiny / "text.txt").write_text(f"{words} {words}")  # --quick reads 512 words
    arguments = ["--model", str(tiny), "--file", str(tiny / "text.txt"), "--quick", "--paths", "eager,fp8", "--quiet"]
    program("accuracy").main([*arguments, "--group-size", "32", "--html", str(tiny / "x.html")])
    out = capsys.readouterr().out
    for word in ("windows 0, 1, 2, 3 of 128 tokens", "fp8", "worst first", "down_proj", "decode (int4)", "wrote"):
        assert word in out, word
    assert "map heat" in (tiny / "x.html").read_text()


def harness(monkeypatch):
    """A stand-in for lm-evaluation-harness: scores each choice as the harness does, by one call per choice."""

    class HFLM:
        def __init__(self, pretrained, tokenizer, batch_size):
            self.model, self.tokenizer = pretrained, tokenizer

    def simple_evaluate(lm, tasks, bootstrap_iters):
        (task,) = tasks
        rows, samples = task["custom_dataset"]()[task["test_split"]], []
        for n, row in enumerate(rows):
            context = lm.tokenizer(row[task["doc_to_text"]], return_tensors="pt").input_ids
            resps = []
            for choice in row[task["doc_to_choice"]]:
                whole = lm.tokenizer(row["text"] + task["target_delimiter"] + choice, return_tensors="pt").input_ids
                with torch.no_grad():
                    logp = lm.model(whole[:, :-1]).logits.log_softmax(-1)[0, context.shape[1] - 1 :]
                score = logp.gather(1, whole[0, context.shape[1] :, None]).sum().item()
                resps.append((score, False))
            samples.insert(0, {"doc_id": n, "filtered_resps": resps})
        right = [max(range(4), key=lambda i, s=s: s["filtered_resps"][i][0]) for s in reversed(samples)]
        accuracy = sum(r == row[task["doc_to_target"]] for r, row in zip(right, rows, strict=True)) / len(rows)
        numbers = {"acc,none": accuracy, "acc_norm,none": accuracy}
        return {"results": {task["task"]: numbers}, "samples": {task["task"]: samples}}

    names = ("lm_eval", "lm_eval.models", "lm_eval.models.huggingface", "datasets")
    fakes = {name: types.ModuleType(name) for name in names}
    for name, module in fakes.items():
        module.__spec__ = importlib.util.spec_from_loader(name, loader=None)
        monkeypatch.setitem(sys.modules, name, module)
    fakes["lm_eval"].simple_evaluate = simple_evaluate
    fakes["lm_eval.models.huggingface"].HFLM = HFLM
    fakes["datasets"].Dataset = types.SimpleNamespace(from_list=list)


def question(text, right, **more):
    choices = ["w5 w6", "w7", "w8 w9 w10", "w11"]
    return json.dumps({"text": text, "choices": choices, "answer": right, **more})


def test_lm_eval_scores_the_compiled_model(tiny, capsys, monkeypatch):
    harness(monkeypatch)
    monkeypatch.setenv("FU_REST", "eager")
    (tiny / "q.jsonl").write_text("\n".join([question("w3 w4 w9", 0), "", question("w8 w4 w3 w12", 2)]))
    results = program("lm_eval_local").main(["--model", str(tiny), "--file", str(tiny / "q.jsonl")])
    assert [r["path"] for r in results] == ["uncompiled", "exact", "default (FP8 prefill)"]
    assert all(len(r["scores"]) == 8 for r in results)
    assert results[1]["scores"] == pytest.approx(results[0]["scores"], abs=1e-4)  # float32 sums in another order
    assert results[1]["acc"] == results[0]["acc"]
    assert 1e-4 < results[2]["difference"] < 0.5  # FP8 did run
    assert "2 questions" in capsys.readouterr().out


def test_lm_eval_questions_are_complete_and_bad_files_refused(tmp_path):
    example = program("lm_eval_local")
    rows = example.questions()
    assert {r["answer"] for r in rows} == {0, 1, 2, 3}
    assert all(len(set(r["choices"])) == 4 for r in rows)
    for text in ("", "{", "3", question("w3", 4), question("w3", 0, more=1)):
        (tmp_path / "q.jsonl").write_text(text)
        with pytest.raises(DataError):
            example.questions(tmp_path / "q.jsonl")
    with pytest.raises(DataError, match="cannot be read"):
        example.questions(tmp_path / "none.jsonl")


def test_lm_eval_missing_says_what_to_install(monkeypatch):
    example = program("lm_eval_local")
    monkeypatch.setattr(example.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match="lm_eval and datasets cannot be imported") as error:
        example.main([])
    assert error.value.advice == "pip install lm_eval"
