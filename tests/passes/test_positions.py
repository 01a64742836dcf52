"""Counters advance once, at the end; positions are views of them; a mask that hides nothing more is dropped."""

from __future__ import annotations

import pytest
import torch
from fu_compile.passes.causal_mask import only_causal, query_positions
from fu_compile.passes.matching import insert_call
from models import cache_kwarg, config, model, static_cache
from test_int4_cache_pass import Int4Layer
from test_rewrites import Layer

import fu_compile
from fu_compile import backend, ops, passes
from fu_compile.caches import starts_at_counter

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


@pytest.mark.slow
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


# ---- prefill -------------------------------------------------------------------------------------------------------

BEFORE = passes.REWRITE[: passes.REWRITE.index("positions")]
KINDS = {"static": Layer, "int4": Int4Layer}


def prefill(kind, **how):
    """A prefill over a cache, as it is before the pass: (layer, attention, its position, its mask)."""
    layer = KINDS[kind]("prefill", **how).run(*BEFORE)
    attention = layer.only("attention_prefill")
    return layer, attention, *attention.args[11:13]


def counted(layer):
    """Whether the positions of a graph are those that its counter gives."""
    (counter,) = [i.index for i in layer.ctx.inputs if i.path.endswith("cumulative_length")]
    return starts_at_counter(layer.ctx, layer.gm, backend._POSITIONS, {counter})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["llama", "qwen2", "granite"])
def test_a_prefill_needs_no_mask(kind, family):
    layer, attention, position, mask = prefill(kind, family=family)
    assert mask is not None
    assert only_causal(mask, query_positions(mask))
    assert not only_causal(mask)  # over a cache it is not the mask of the call alone
    assert not only_causal(mask, position)  # of the same value, but another node: that is asked of the counters
    layer.run("positions")
    assert attention.args[12] is None
    assert counted(layer)


def test_a_cache_that_the_graph_makes_needs_no_mask():
    """transformers 5.17 masks the call's own tokens there over all slots, 5.24 leaves the mask out."""
    layer = Layer("prefill", fresh=True).run(*BEFORE)
    attention = layer.only("attention_prefill")
    layer.run("positions")
    assert attention.args[12] is None
    assert attention.args[3].target is aten.zeros.default


def test_sizes_that_are_symbols_need_no_mask():
    layer, attention, _, mask = prefill("int4", dynamic=True)
    assert mask is not None
    layer.run("positions")
    assert attention.args[12] is None
    assert counted(layer)


def spoil(layer, how, mask):
    """Changes one node of ``slot <= arange(S) + counter``."""
    gm = layer.gm
    slots, queries = mask.args
    position = query_positions(mask)
    if how == "below":
        return insert_call(gm, mask, aten.lt.Tensor, (slots, queries), like=mask)
    if how == "turned":
        return insert_call(gm, mask, aten.ge.Tensor, (slots, queries), like=mask)
    if how == "both":
        other = insert_call(gm, mask, aten.ge.Scalar, (slots, 1), like=mask)
        return insert_call(gm, layer.only("attention_prefill"), aten.__and__.Tensor, (mask, other), like=mask)
    if how == "slots":
        moved = insert_call(gm, mask, aten.add.Tensor, (slots, 1), like=slots)
        mask.update_arg(0, moved)
    elif how == "positions":
        moved = insert_call(gm, position, aten.add.Tensor, (position.args[1], 1), like=position.args[1])
        position.update_arg(1, moved)
    elif how == "scaled":
        position.kwargs = {"alpha": 2}
    elif how == "advanced":
        (write,) = [n for n in gm.graph.nodes if n.target is aten.add_.Tensor]
        position.prepend(write)
    elif how == "twice":
        (write,) = [n for n in gm.graph.nodes if n.target is aten.add_.Tensor]
        with gm.graph.inserting_after(write):
            gm.graph.call_function(aten.add_.Tensor, write.args)
    return mask


@pytest.mark.parametrize("how", ["below", "turned", "both", "slots", "positions", "scaled", "advanced", "twice"])
def test_any_other_mask_stays(how):
    layer, attention, _, mask = prefill("static")
    attention.update_arg(12, spoil(layer, how, mask))
    layer.run("positions")
    assert attention.args[12] is not None


@pytest.mark.parametrize("how", ["behind", "scaled", "advanced", "foreign"])
def test_other_positions_are_not_the_counters(how):
    layer, _, position, _ = prefill("static")
    assert counted(layer)
    if how == "behind":
        moved = insert_call(layer.gm, position, aten.add.Tensor, (position.args[1], 1), like=position.args[1])
        position.update_arg(1, moved)
    elif how == "scaled":
        position.kwargs = {"alpha": 2}
    elif how == "advanced":
        (write,) = [n for n in layer.gm.graph.nodes if n.target is aten.add_.Tensor]
        position.prepend(write)
    else:
        assert not starts_at_counter(layer.ctx, layer.gm, backend._POSITIONS, set())
        return
    assert not counted(layer)


def test_a_view_of_the_counter_is_read_when_it_is_used():
    """The decode graph: the counters advance behind the last attention, not before."""
    layer = Layer("decode").run()
    assert counted(layer)
    (write,) = [n for n in layer.gm.graph.nodes if n.target is aten.add_.Tensor]
    attention = layer.only("attention_int4")
    attention.args[14].append(write)  # behind the view, before who reads it
    assert not counted(layer)


@pytest.fixture(autouse=True)
def reset():
    yield
    torch._dynamo.reset()
