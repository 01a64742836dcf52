"""``fu_compile.generate`` on a CUDA device, where the loop looks only every few steps whether the texts have ended.

The model runs uncompiled: what is tested is the loop, against transformers' own on the same device.
"""

import pytest
import torch
from field import CACHE, build, left_pad, prompt

import fu_compile
from fu_compile import generate as module

pytestmark = pytest.mark.gpu
DEVICE = "cuda"


@pytest.fixture(scope="module")
def made():
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    return build(**sizes, num_hidden_layers=2).to(DEVICE)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("batch", [1, 3])
def test_end_tokens_are_found_late_and_leave_no_trace(made, kind, sample, batch, monkeypatch):
    monkeypatch.setattr(module, "_warn_if_uncompiled", lambda model, config: None)
    # Otherwise transformers compiles its decode steps with Inductor, whose last digits are its own.
    given = {"do_sample": sample, "top_k": 4, "cache_implementation": kind, "disable_compile": True}
    ids, mask = (t.to(DEVICE) for t in left_pad([prompt(1, n, seed=n)[0] for n in ((9,), (4, 11, 7))[batch > 1]]))
    given |= {"attention_mask": mask, "return_dict_in_generate": True, "output_scores": True}
    torch.manual_seed(3)
    text = made.generate(ids, max_new_tokens=12, **given).sequences[:, ids.shape[1] :]
    eos = [int(row[3]) for row in text]
    found = []
    for loop in ({}, {"custom_generate": fu_compile.generate}):
        torch.manual_seed(3)
        out = made.generate(ids, max_new_tokens=40, eos_token_id=eos, **given, **loop)
        found.append((out, torch.rand(4, device=DEVICE)))
    (want, number), (got, ours) = found
    assert torch.equal(got.sequences, want.sequences)
    assert len(got.scores) == len(want.scores) < 40
    assert torch.equal(torch.stack(got.scores), torch.stack(want.scores))
    assert torch.equal(ours, number)
    assert int(getattr(got, CACHE).get_seq_length()) == int(getattr(want, CACHE).get_seq_length())
