"""Exact mode: every family, RoPE type and attention spelling within 1e-4 of eager, through generate.

float32, prefill and 8 decode steps, StaticCache and DynamicCache, padded and unpadded; and in every graph nothing of
the block is left to ATen. 1e-4 is the bar of the design; rewrites reorder float32 sums, which moves logits by 1e-6.
"""

from __future__ import annotations

import pytest
import torch
from models import FAMILIES, ROPES, config, model

import fu_compile

pytestmark = pytest.mark.slow

NEW = 9  # the prefill's token and 8 decode steps
ANGLES = {"aten.matmul.default": 1}
"""transformers 5.17 multiplies frequencies and positions by matmul, once for the whole model; an attention has two."""
BLOCK = ("linear", "silu", "softmax", "scaled_dot", "matmul", "index_copy", "rsqrt")


def prompts(padded: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(3, 131, (2, 11))
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :4] = 0
    return {"input_ids": ids, "attention_mask": mask}


def logits(m: torch.nn.Module, padded: bool, cache: str | None) -> torch.Tensor:
    out = m.generate(
        **prompts(padded), max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, cache_implementation=cache,
        output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    return torch.stack(out.logits)


def check(cfg) -> None:
    torch._dynamo.reset()
    m = model(cfg)
    calls = [(padded, cache) for cache in ("static", None) for padded in (False, True)]
    expected = [logits(m, *call) for call in calls]
    m.compile(backend="futransformer", options={"mode": "exact", "rest": "eager", "strict": True})
    for call, eager in zip(calls, expected, strict=True):
        difference = (logits(m, *call) - eager).abs().max()
        assert difference < 1e-4, f"padded, cache = {call}: {difference}"
    report = fu_compile.report(m)
    assert report.counters["fallbacks"] == 0
    assert report.counters["decode_calls"] == 8 * len(calls)
    for graph in report.graphs:
        left = [op for op, n in graph.left_to_aten.items() if any(b in op for b in BLOCK) and n > ANGLES.get(op, 0)]
        assert left == [], f"{graph.phase}: {left}"
        n = cfg.num_hidden_layers
        assert graph.fired()["attention"] == graph.fired()["qkv"] == graph.fired()["swiglu"] == n
        assert graph.fired()["residual"] == graph.fired()["kv_write"] == 2 * n


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_families(family, attn):
    check(config(family, attn=attn, num_hidden_layers=1))


@pytest.mark.parametrize("rope", [r for r in ROPES if r != "default"])
def test_ropes(rope):
    check(config("llama", rope, num_hidden_layers=1))


@pytest.mark.parametrize(("family", "rope"), [("qwen2", "yarn"), ("qwen3", "dynamic"), ("mistral", "linear")])
def test_ropes_of_other_families(family, rope):
    check(config(family, rope, num_hidden_layers=1))


@pytest.mark.parametrize("cache", ["static", None])
def test_sampling(cache):
    """The same seed draws the same tokens: logits within 1e-6 move no draw of this seed."""
    torch._dynamo.reset()
    m = model(config("llama", num_hidden_layers=1))

    def sample() -> torch.Tensor:
        torch.manual_seed(5)
        return m.generate(
            **prompts(padded=True), max_new_tokens=NEW, min_new_tokens=NEW, do_sample=True, temperature=0.8, top_k=40,
            top_p=0.95, repetition_penalty=1.1, cache_implementation=cache,
        )  # fmt: skip

    expected = sample()
    m.compile(backend="futransformer", options={"mode": "exact", "rest": "eager", "strict": True})
    assert torch.equal(sample(), expected)
    assert fu_compile.report(m).counters["decode_calls"] == NEW - 1
