"""Capture: where inputs come from, what the clean-up removes, and what it must keep."""

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from fu_compile.passes import layer_of, where
from graphs import same_as_eager, show, trace
from models import Recorder, cache_kwarg, compiled, config, model, static_cache
from transformers import DynamicCache

from fu_compile.capture import Aliases, capture, source_path


def check(fn, *args):
    """The cleaned graph as text, after comparing results and written arguments with eager bit for bit."""
    same_as_eager(fn, *args, names=())
    return show(trace(fn, *args).gm)


# ---- inputs ----


@pytest.mark.parametrize(
    ("source", "path"),
    [
        (
            "L['args'][0]._modules['model']._modules['layers']._modules['0']._parameters['weight']",
            "model.layers.0.weight",
        ),
        ("L['self']._modules['model']._modules['norm']._parameters['weight']", "model.norm.weight"),
        ("L['kwargs']['cache'].layers[0].keys", "cache.layers.0.keys"),
        ("L['past_key_values'].layers[11].cumulative_length", "past_key_values.layers.11.cumulative_length"),
        ("L['self']._modules['rotary_emb']._buffers['inv_freq']", "rotary_emb.inv_freq"),
        ("L['kwargs']['input_ids']", "input_ids"),
        ("L['kwargs']['attention_mask']['full_attention']", "attention_mask.full_attention"),
        ("L['input_ids'].size()[1]", "input_ids.size.1"),
    ],
)
def test_source_path(source, path):
    assert source_path(source) == path


@pytest.mark.parametrize("cache_kind", ["static", "dynamic"])
def test_inputs(cache_kind):
    m = model(config("llama", num_hidden_layers=1))
    recorder = Recorder()
    compiled(m, recorder)
    ids = torch.randint(3, 131, (2, 5))
    if cache_kind == "static":
        cache = static_cache(m, 16, 2)
    else:
        cache = DynamicCache(config=m.config)
        cache.update(torch.randn(2, 2, 3, 16), torch.randn(2, 2, 3, 16), 0)
    with torch.no_grad():
        m(ids, position_ids=torch.arange(5)[None], **cache_kwarg(cache))
    captured = recorder.graphs[0]
    kinds = {
        kind: [i.path for i in captured.inputs if i.kind == kind] for kind in ("parameter", "buffer", "cache", "tensor")
    }
    assert set(kinds["parameter"]) == {n for n, _ in m.named_parameters()}
    assert kinds["buffer"] == ["model.rotary_emb.inv_freq"]
    name = next(iter(cache_kwarg(None)))
    assert {f"{name}.layers.0.keys", f"{name}.layers.0.values"} <= set(kinds["cache"])
    assert set(kinds["tensor"]) == {"arg.0", "position_ids"}  # what is passed by position has no name
    placeholders = [n for n in captured.gm.graph.nodes if n.op == "placeholder"]
    assert [i.name for i in captured.inputs] == [n.name for n in placeholders]
    assert [i.index for i in captured.inputs] == list(range(len(placeholders)))
    assert captured.find("model.norm.weight").kind == "parameter"
    with pytest.raises(KeyError, match=r"closest is 'model\.norm\.weight'"):
        captured.find("model.norm.weights")


def test_every_node_knows_its_layer_and_line():
    m = model(config("llama"))
    recorder = Recorder()
    compiled(m, recorder)
    with torch.no_grad():
        m(torch.randint(3, 131, (2, 5)), use_cache=False)
    nodes = [n for n in recorder.graphs[0].gm.graph.nodes if n.op == "call_function"]
    linears = [layer_of(n) for n in nodes if n.target is torch.ops.aten.linear.default]
    assert linears[:3] == [f"model.layers.0.self_attn.{p}_proj" for p in "qkv"]
    assert linears[-1] == "lm_head"
    assert all("val" in n.meta for n in nodes)
    assert all("modeling_llama.py:" in where(n) for n in nodes if "layers" in layer_of(n) and "linear" in n.name)


def test_symbolic_sizes_and_their_inputs():
    captured = trace(lambda x: x.reshape(x.shape[0], -1) * x.shape[0], torch.randn(3, 4, 2), dynamic=[(0, 0)])
    assert {i.kind for i in captured.inputs} == {"size", "tensor"}


def test_a_graph_that_does_not_come_from_dynamo():
    gm = torch.fx.symbolic_trace(torch.nn.ReLU())
    captured = capture(gm, [torch.randn(2, 3)])
    assert captured.inputs[0].kind == "tensor"
    assert "relu" in show(captured.gm)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_grad_and_autocast_do_not_crash(grad, autocast):
    m = model(config("llama", num_hidden_layers=1))
    recorder = Recorder()
    compiled(m, recorder)
    with torch.set_grad_enabled(grad), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        m(torch.randint(3, 131, (2, 5)), use_cache=False)
    assert len(recorder.graphs) == 1
    assert recorder.graphs[0].autocast == autocast


# ---- what goes ----


def test_casts_views_and_neutral_numbers_go():
    def fn(x):
        y = x.to(torch.float32).view(2, 3, 4).reshape(2, 3, 4)[:, :, 0:4].contiguous()
        return (y + 0).mul(1.0).to(x.device).expand(2, 3, 4).sum(-1)

    assert_expected_inline(
        check(fn, torch.randn(2, 3, 4)),
        """\
sum_1 = sum.dim_IntList(x, [-1])
return sum_1
""",
    )


def test_real_casts_and_views_stay():
    def fn(x):
        return x.to(torch.float32).view(6, 4)[:, 1:], x.transpose(0, 1).contiguous(), x + 1, x * 2.0

    assert_expected_inline(
        check(fn, torch.randn(2, 3, 4, dtype=torch.bfloat16)),
        """\
to = to.dtype(x, torch.float32)
view = view(to, [6, 4])
slice_1 = slice.Tensor(view, 1, 1, 9223372036854775807)
transpose = transpose.int(x, 0, 1)
contiguous = contiguous(transpose)
add = add.Tensor(x, 1)
mul = mul.Tensor(x, 2.0)
return slice_1, contiguous, add, mul
""",
    )


def test_inactive_dropout_goes_active_dropout_stays():
    x = torch.randn(2, 3)
    assert "dropout" not in show(trace(lambda x: F.dropout(x, 0.5, training=False) * 2, x).gm)
    assert "dropout" not in show(trace(lambda x: F.dropout(x, 0.0, training=True) * 2, x).gm)
    assert "dropout" in show(trace(lambda x: F.dropout(x, 0.5, training=True) * 2, x).gm)


def test_join_with_nothing_goes():
    def fn(x):
        return torch.cat([x * 2, x[:, :, 4:]], dim=-1).exp()

    assert_expected_inline(
        check(fn, torch.randn(2, 3, 4)),
        """\
mul = mul.Tensor(x, 2)
exp = exp(mul)
return exp
""",
    )


def test_constants_are_read_directly():
    def fn(x):
        return x[:, torch.tensor([1])] * 2

    assert_expected_inline(
        check(fn, torch.randn(2, 3)),
        """\
index = index.Tensor(x, [None, _tensor_constant0])
mul = mul.Tensor(index, 2)
return mul
""",
    )


def test_the_same_view_is_taken_once():
    def fn(x, c):
        return x * c.unsqueeze(1) + x.exp() * c.unsqueeze(1), c.unsqueeze(0)

    assert_expected_inline(
        check(fn, torch.randn(2, 3), torch.randn(2)),
        """\
unsqueeze = unsqueeze(c, 1)
mul = mul.Tensor(x, unsqueeze)
exp = exp(x)
mul_1 = mul.Tensor(exp, unsqueeze)
add = add.Tensor(mul, mul_1)
unsqueeze_2 = unsqueeze(c, 0)
return add, unsqueeze_2
""",
    )


def test_markers_without_effect_go():
    def fn(x):
        with torch.autocast("cpu", enabled=False):
            y = x * 2
        return y.exp()

    assert_expected_inline(
        check(fn, torch.randn(2, 3)),
        """\
mul = mul.Tensor(x, 2)
exp = exp(mul)
return exp
""",
    )


def test_markers_with_effect_stay():
    def fn(x, w):
        with torch.autocast("cpu", torch.bfloat16):
            y = F.linear(x, w)
        return y.float()

    captured = trace(fn, torch.randn(2, 3), torch.randn(4, 3))
    assert captured.autocast
    linear, cast = [n for n in captured.gm.graph.nodes if isinstance(n.meta.get("val"), torch.Tensor) and n.args]
    assert linear.meta["val"].dtype == torch.bfloat16
    assert cast.meta["val"].dtype == torch.float32  # not dropped: the region is in force while its casts are judged
    assert not torch.is_autocast_enabled("cpu")
    same_as_eager(fn, torch.randn(2, 3), torch.randn(4, 3), names=())


# ---- what must stay: a copy that somebody could tell from its source ----


def copy_then_write(x):
    y = x + 0
    y.mul_(2)
    return y * 1.5


def source_written(x):
    y = x * 1.0
    x.mul_(2)
    return y * 1.5


def clone_written_through_a_view(x):
    y = x.clone()
    y.view(-1)[1:].mul_(3)
    return y.exp()


def cast_written(x):
    y = x.to(torch.float32)  # no copy: eager writes through to x
    y.mul_(2)
    return y.exp()


def forced_copy(x):
    y = x.to(torch.float32, copy=True)
    y.mul_(2)
    return y.exp()


def returned_copy(x):
    return x + 0


def returned_join(x):
    return torch.cat([x, x[:0]])


def view_written(x):
    a, b = x.unsqueeze(1), x.unsqueeze(1)
    a.mul_(2)
    return b.exp()


def dead_write(x):
    x.add_(1)
    return torch.zeros(2)


COPIES = [
    copy_then_write,
    source_written,
    clone_written_through_a_view,
    cast_written,
    forced_copy,
    view_written,
    dead_write,
]


@pytest.mark.parametrize("fn", COPIES, ids=lambda f: f.__name__)
def test_writes_reach_what_they_reach_in_eager(fn):
    same_as_eager(fn, torch.randn(4, 3), names=())


@pytest.mark.parametrize("fn", [returned_copy, returned_join], ids=lambda f: f.__name__)
def test_a_returned_copy_is_no_alias_of_its_source(fn):
    captured = trace(fn, torch.randn(4, 3))
    x = torch.randn(4, 3)
    (out,) = captured.gm(x)
    assert out.data_ptr() != x.data_ptr()


def test_aliases_follow_views_chunks_and_writes():
    def fn(x, y):
        a, _b = x.chunk(2)
        a.unsqueeze(0).mul_(2)
        return y.exp()

    captured = trace(fn, torch.randn(4, 3), torch.randn(2))
    aliases = Aliases(captured.gm.graph)
    x, y = [n for n in captured.gm.graph.nodes if n.op == "placeholder"]
    assert x in aliases.written
    assert y not in aliases.written
