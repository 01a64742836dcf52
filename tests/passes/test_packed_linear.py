"""Packed weights in a graph: where they go, and which of them one kernel can read together."""

import pytest
import torch
from fu_compile.passes.packed_linear import group, rows_of
from models import config, model
from torch import fx

import fu_compile
from fu_compile import ops, passes
from fu_compile.capture import capture
from fu_compile.packed import Rows


class Three(torch.nn.Module):
    """Three projections of one input, the second twice."""

    def __init__(self, mlp):
        super().__init__()
        self.mlp = mlp

    def forward(self, x):
        return self.mlp.up_proj(x) + self.mlp.gate_proj(x) + self.mlp.up_proj(x + 1)


def captured(module, *args):
    graphs = []

    def backend(gm, example_inputs):
        graphs.append(capture(gm, example_inputs))
        return gm.forward

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(module, backend=backend, fullgraph=True)(*args)
    torch._dynamo.reset()
    return graphs[0]


@pytest.fixture
def mlp():
    m = fu_compile.quantize(model(config("llama", num_hidden_layers=1)), group_size=32, progress=False)
    return m.model.layers[0].mlp


def weights_of(gm):
    return [n for n in gm.graph.nodes if ops.name_of(n.target) == "packed_weight"]


def test_weights_go_behind_the_inputs_once(mlp):
    x = torch.randn(2, 3, 64)
    found = captured(Three(mlp), x)
    assert len(weights_of(found.gm)) == 3
    with torch.no_grad():
        want = Three(mlp)(x)
    ctx = passes.Context(inputs=found.inputs)
    passes.run(found.gm, ctx, ["packed_linear"])
    nodes = list(found.gm.graph.nodes)
    inputs = sum(n.op == "placeholder" for n in nodes)
    assert weights_of(found.gm) == nodes[inputs : inputs + 2]  # up once, gate once
    assert ctx.count("packed_linear") == 2
    block = mlp.gate_proj.block.packed
    args = [x if n.meta["val"].dtype == torch.float32 else block for n in nodes[:inputs]]
    # eager multiplies with the same float32 weights; the sum is the same three terms
    torch.testing.assert_close(found.gm(*args)[0], want)


def node(graph, block, first, rows, precision="int4", size=32, paired=False):
    n, k = 96, 64
    args = (block, precision, n, k, size, paired, first, rows, torch.float32)
    return graph.call_function(ops.op("packed_weight"), args)


def test_what_belongs_together():
    graph = fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    dense = graph.placeholder("dense")
    q, k, v = node(graph, a, 0, 32), node(graph, a, 32, 48), node(graph, a, 80, 16)
    other, fp8 = node(graph, b, 32, 48), node(graph, a, 32, 48, "fp8", 0)
    computed = node(graph, graph.call_function(torch.neg, (a,)), 0, 96)
    whole = Rows("int4", 96, 64, 32, False, 0, 96)
    assert rows_of(q) == Rows("int4", 96, 64, 32, False, 0, 32)
    assert group([q, k, v]) == whole
    assert group([k]) == rows_of(k)
    assert group([dense, dense]) is None
    assert rows_of(computed) is None
    for apart in ([q, other, v], [q, dense, v], [dense, k]):
        assert "same block" in group(apart)
    for disordered in ([k, q, v], [q, v], [q, q], [q, fp8, v]):
        assert "another order" in group(disordered)


@pytest.mark.parametrize(
    ("rows", "swiglu", "reason"),
    [
        (Rows("int4", 96, 64, 32, True, 0, 96), True, None),
        (Rows("int4", 96, 64, 32, True, 0, 96), False, "interleaved"),
        (Rows("int4", 96, 64, 32, True, 0, 48), True, "interleaved"),
        (Rows("int4", 96, 64, 32, False, 0, 96), True, "one after the other"),
        (Rows("int4", 96, 64, 32, False, 32, 20), False, None),
        (Rows("int4", 96, 64, 32, False, 24, 32), False, "strip"),
        (Rows("fp8", 96, 64, 0, False, 24, 32), False, None),
        (Rows("fp8", 96, 64, 0, False, 0, 96), True, None),
    ],
)
def test_what_a_kernel_cannot_read_as_it_stands(rows, swiglu, reason):
    rows.check()
    found = rows.refuses(swiglu)
    assert (found is None) if reason is None else (reason in found)
