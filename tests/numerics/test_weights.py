"""The weight store: what is packed is the folded, joined, interleaved weight, whatever the block size and device."""

from __future__ import annotations

import gc

import pytest
import torch

from fu_compile import formats, weights
from fu_compile.caches import KVSpec
from fu_compile.runtime import _tables
from fu_compile.weights import PackSpec, Sample, WeightStore


def spec(precision: str, n: int, k: int, **changes) -> PackSpec:
    given = {"name": "w", "weights": (0, 1), "biases": (), "gain": 2, "group": 64, "interleave": False}
    return PackSpec(precision=precision, n=n, k=k, **{**given, **changes})


@pytest.fixture(params=[1 << 22, 1])
def block(request, monkeypatch):
    """All rows at once, and 16 rows at a time."""
    monkeypatch.setattr(weights, "BLOCK", request.param)


@pytest.mark.parametrize("interleave", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int4_is_the_folded_weight(block, interleave, dtype):
    a, b, gain = torch.randn(40, 100).to(dtype), torch.randn(40, 100).to(dtype), torch.randn(100).to(dtype)
    gain[3] = 0.0
    (packed,) = spec("int4", 80, 100, interleave=interleave).pack((a, b, gain))
    folded = torch.cat((a, b)).float() * gain.float()
    q = formats.quantize_int4(folded[formats.interleave_gate_up(80)] if interleave else folded, 64)
    assert torch.equal(packed, formats.pack_int4(q))


def test_fp8_and_bf16_and_biases(block):
    a, b, gain = torch.randn(24, 80), torch.randn(8, 80), torch.randn(80)
    folded = torch.cat((a, b)) * gain
    codes, scale, state = spec("fp8", 32, 80).pack((a, b, gain))
    want, want_scale = formats.quantize_fp8(folded)
    assert torch.equal(codes.view(torch.uint8), want.view(torch.uint8))
    assert torch.equal(scale, want_scale)
    assert not state.any()
    packed, bias = spec("bf16", 32, 80, biases=(3, 4), gain=None).pack((a, b, torch.arange(24.0), torch.arange(8.0)))
    assert torch.equal(packed, torch.cat((a, b)).bfloat16())
    assert bias.tolist() == [*range(24), *range(8)]


def test_the_store_knows_objects_and_versions():
    store, p = WeightStore(), torch.nn.Parameter(torch.randn(4, 4))
    held = [p]
    make = lambda: (held[0].detach().clone(),)  # noqa: E731
    first = store.get(("k",), (p,), make)
    assert store.get(("k",), (p,), make) is first
    with torch.no_grad():
        p.add_(1)
    second = store.get(("k",), (p,), make)
    assert torch.equal(second[0], p)
    assert (store.packs, store.repacks) == (1, 1)
    store.drop((p,))
    assert store.get(("k",), (p,), make) is not second
    del p, held[:]
    gc.collect()
    assert store.bytes == 0


def test_a_sample_finds_writes_that_are_not_counted():
    p = torch.nn.Parameter(torch.randn(1000, 3))
    sample = Sample([p])
    assert not sample.changed()
    version = p._version
    p.data.mul_(-1)
    assert p._version == version
    assert sample.changed()


def test_tables_stand_on_the_device_of_the_call():
    """Without a bias nothing but the call says where the tables belong (a GPU run met tables on the CPU)."""
    plain = KVSpec("layer", 0, 1, None, True, (), (), None, None, (4, 2, 16))
    mean, balance = _tables(plain, (7, torch.empty(1, 5, device="meta")))
    assert mean.device.type == balance.device.type == "meta"
    assert mean.shape == balance.shape == (2, 16)


def test_packed_constants_are_finished_before_anyone_gets_them(monkeypatch):
    """Our kernels start before the work in front of them is done and read weights at once."""
    waited = []

    class Stream:
        def synchronize(self):
            waited.append("done")

    class OnGpu:
        device, is_cuda, nbytes = torch.device("cuda", 0), True, 4

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    p = torch.nn.Parameter(torch.randn(3))
    store = WeightStore()
    for _ in range(2):
        store.get(("k",), (p,), lambda: (OnGpu(), OnGpu()))
    assert waited == ["done"]  # once, when it was packed
