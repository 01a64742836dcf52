"""Counters advance once, at the end; positions are views of them; a mask that hides nothing more is dropped."""

from __future__ import annotations

import pytest
import torch
from models import cache_kwarg, config, model, static_cache

import fu_compile
from fu_compile import backend, ops, passes

aten = torch.ops.aten


def run(monkeypatch, steps, rewrite=passes.REWRITE, mask=None, layers=3):
    """(logits of the steps, counters, the last decode graph) of a small model over a filled cache."""
    graphs = []
    sign = backend.sign
    monkeypatch.setattr(backend, "sign", lambda done: graphs.append(done) or sign(done))
    monkeypatch.setattr(passes, "REWRITE", rewrite)
    torch._dynamo.reset()
    m = model(config("llama", num_hidden_layers=layers), torch.bfloat16)
    fu_compile.compile(m, rest="eager")
    batch = 1 if mask is None else mask.shape[0]
    cache = static_cache(m, 192, batch)
    torch.manual_seed(1)
    for layer in cache.layers:
        layer.keys.normal_()
        layer.values.normal_()
        layer.cumulative_length.fill_(62)
    out = []
    with torch.no_grad():
        for step in range(steps):
            extra = {} if mask is None else {"attention_mask": mask[:, : 63 + step]}
            ids = torch.randint(3, 131, (batch, 1))
            out.append(m(input_ids=ids, use_cache=True, **extra, **cache_kwarg(cache)).logits)
    return out, [int(layer.cumulative_length) for layer in cache.layers], graphs[-1].gm


def test_same_logits_and_counters(monkeypatch):
    got, lengths, gm = run(monkeypatch, 4)
    without = tuple(p for p in passes.REWRITE if p != "positions")
    expected, same_lengths, before = run(monkeypatch, 4, without)
    assert lengths == same_lengths == [66, 66, 66]
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)

    def count(graph, target):
        return sum(n.target is target for n in graph.graph.nodes)

    assert count(before, aten.add_.Tensor) == 3
    assert count(gm, aten.add_.Tensor) == 0
    assert count(gm, aten._foreach_add_.Scalar) == 1
    attentions = [n for n in gm.graph.nodes if ops.name_of(n.target) == "attention_int4"]
    counters = [n.args[14].args[0] for n in attentions]
    assert len({c.name for c in counters}) == len(attentions) == 3
    assert all(c.op == "placeholder" and "cumulative_length" in c.name for c in counters)
    assert all(n.args[15] is None for n in attentions)
    last = [n for n in gm.graph.nodes if n.op == "call_function"][-1]
    assert last.target is aten._foreach_add_.Scalar
    assert list(last.args[0]) == counters


def test_one_layer_keeps_its_own_addition(monkeypatch):
    _, lengths, gm = run(monkeypatch, 2, layers=1)
    assert lengths == [64]
    last = [n for n in gm.graph.nodes if n.op == "call_function"][-1]
    assert last.target is aten.add_.Tensor


def test_padding_stays(monkeypatch):
    mask = torch.ones(2, 192, dtype=torch.int64)
    mask[0, :5] = 0
    got, _, gm = run(monkeypatch, 2, mask=mask)
    attentions = [n for n in gm.graph.nodes if ops.name_of(n.target) == "attention_int4"]
    assert attentions
    assert all(n.args[15] is not None for n in attentions)
    without = tuple(p for p in passes.REWRITE if p != "positions")
    for a, b in zip(got, run(monkeypatch, 2, without, mask)[0], strict=True):
        assert torch.equal(a, b)


@pytest.fixture(autouse=True)
def reset():
    yield
    torch._dynamo.reset()
