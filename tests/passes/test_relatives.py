"""Models that are not of the family: refused with a reason, never matched wrongly."""

import collections

import pytest
import torch
from families import call, prompt, rewritten
from models import BASE, model
from transformers import AutoConfig

pytestmark = pytest.mark.slow

RELATIVES = {
    "olmo": {"rms_norm": {"the mean is subtracted first: this is a LayerNorm"}},
    "olmo2": {"qkv": {"the norm of the queries is over the whole projection, not per head (OLMo2)"},
              "residual": {"a norm stands between the linear and the sum (post-norm)"}},
    "gemma": {"rms_norm": {"the gain is computed from a parameter (add.Tensor), such as Gemma's 1 + weight"},
              "swiglu": {"the activation is gelu, not silu"}},
    "stablelm": {"rms_norm": {"the mean is subtracted first: this is a LayerNorm"}},
    "cohere": {"rotary": {"pairs are interleaved (GPT-J), not halves"}},
    "gpt_neox": {"rms_norm": {"the mean is subtracted first: this is a LayerNorm"}},
}  # fmt: skip


@pytest.mark.parametrize("name", list(RELATIVES))
def test_relatives_are_refused_with_a_reason_and_stay_right(name):
    cfg = AutoConfig.for_model(
        name, **{**BASE, "num_hidden_layers": 1}, **({"head_dim": 16} if name == "gemma" else {})
    )
    cfg._attn_implementation = "sdpa"
    m, contexts = model(cfg), []
    ids, mask = prompt(True)
    eager = call(m, ids, mask, "dynamic", steps=3)
    ours = call(rewritten(m, contexts, []), ids, mask, "dynamic", steps=3)
    for a, b in zip(eager, ours, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-5)
    reasons = collections.defaultdict(set)
    for event in contexts[0].events:
        if not event.fired:
            reasons[event.name].add(event.note)
            assert event.layer
    for pass_name, notes in RELATIVES[name].items():
        assert notes <= reasons[pass_name]
