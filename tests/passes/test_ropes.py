"""RoPE scalings, 16-bit models, sliding windows and the records that the passes leave, on real models."""

import pytest
import torch
from families import call, expected, prompt, rewritten
from fu_compile.passes import RECOGNISE
from models import ROPES, config, model

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("rope", list(ROPES))
def test_rope(rope):
    """cos and sin are the graph's own: with every scaling the result is eager's, past the original length too."""
    m = model(config("llama", rope, max_position_embeddings=16, num_hidden_layers=1))
    contexts, graphs = [], []
    ids, mask = prompt(False)
    eager = call(m, ids, mask, "static", steps=6)
    ours = call(rewritten(m, contexts, graphs), ids, mask, "static", steps=6)
    # dynamic RoPE depends on data, so Dynamo breaks the graph around it; the block is still one graph
    blocks = [ctx for ctx in contexts if ctx.count("attention")]
    assert len(blocks) >= 2
    for ctx in blocks:
        counts = {n: ctx.count(n) for n in RECOGNISE}
        assert counts == expected("llama", 1, "static")
    for a, b in zip(eager, ours, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen3", "granite", "phi3"])
def test_16_bits(family, dtype):
    m = model(config(family, num_hidden_layers=1), dtype)
    contexts, graphs = [], []
    ids, mask = prompt(True)
    eager = call(m, ids, mask, "static", steps=1)
    ours = call(rewritten(m, contexts, graphs), ids, mask, "static", steps=1)
    assert {n: contexts[0].count(n) for n in RECOGNISE} == expected(family, 1, "static")
    # the same operators in the same order; only attention may sum in another: one rounding of logits below 4
    torch.testing.assert_close(ours[0], eager[0], rtol=0, atol=4 * torch.finfo(dtype).eps)


SLIDING = "sliding window 16"


@pytest.mark.parametrize(
    ("cache", "padded", "masks"),
    [
        ("static", False, {"given"}),  # generate builds the mask of a static cache before the call
        ("dynamic", False, {"causal", SLIDING, f"{SLIDING} + padding"}),  # newer transformers leave it to is_causal
        ("dynamic", True, {f"{SLIDING} + padding"}),
        ("none", True, {f"{SLIDING} + padding"}),
    ],
)
def test_masks_of_a_sliding_window(cache, padded, masks):
    m, contexts = model(config("mistral", num_hidden_layers=1)), []
    call(rewritten(m, contexts, []), *prompt(padded), cache, steps=6)
    found = [str(a.mask) for a in contexts[0].data["attention"]]
    assert len(found) == 1
    assert set(found) <= masks


def test_a_window_that_fills_rolls_and_overflows():
    m = model(config("mistral", num_hidden_layers=1))
    for length, kinds in ((12, ["write", "write", "roll"]), (20, ["fill", "roll"])):
        contexts = []
        ids = torch.randint(3, 131, (2, length))
        eager = call(m, ids, torch.ones_like(ids), "static", steps=6)
        ours = call(rewritten(m, contexts, []), ids, torch.ones_like(ids), "static", steps=6)
        assert [w.kind for ctx in contexts for w in ctx.data["kv_write"][:1]] == kinds
        for a, b in zip(eager, ours, strict=True):
            torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-5)


def test_records_of_the_cache_writes():
    m, contexts, graphs = model(config("llama")), [], []
    call(rewritten(m, contexts, graphs), *prompt(False), "static", steps=3)
    records = contexts[1].data["kv_write"]
    assert [r.index for r in records] == [0, 1]
    nodes = {n.name: n for n in graphs[1].graph.nodes}
    for r in records:
        assert r.key_cache.endswith(f"layers_{r.index}_keys")
        assert r.value_cache.endswith(f"layers_{r.index}_values")
        assert nodes[r.keys].args == (nodes[r.key_cache], nodes[r.position], nodes[r.keys].args[2])
        assert nodes[r.keys].args[2].name.startswith("rotary")
