"""The CUDA decode attention compiles here, without a GPU, for every family, and inside its register budget."""

from types import SimpleNamespace

import pytest
import torch
from fu_compile.lowerings import attention_int4_sm90 as attention

from fu_compile import formats, jit

FAMILIES = {  # query heads, key/value heads, head_dim, rotated columns, norms per head
    "8b": (32, 8, 128, 128, False),
    "70b": (64, 8, 128, 128, False),
    "smollm2": (9, 3, 64, 64, False),
    "qwen2.5-0.5b": (14, 2, 64, 64, False),
    "qwen2.5-7b": (28, 4, 128, 128, False),
    "qwen3-0.6b": (16, 8, 128, 128, True),
    "phi3-mini": (32, 32, 96, 96, False),
    "phi4-mini": (24, 8, 128, 96, False),
    "head-256": (8, 4, 256, 256, False),
    "multi-query": (20, 1, 64, 48, True),
}
SPILL = 32
"""Bytes a thread may spill, as for the linears: a few values that live across the main loop."""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("FU_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("FU_DISABLE_JIT", raising=False)


def check(kernels):
    jit.warmup(kernels, progress=False)
    for kernel in kernels:
        used = kernel.cubin.resources
        assert used.spill_stores <= SPILL, (kernel.constants, used)
        # Two blocks on an SM, beside each other or beside a linear; above head_dim 128 one.
        assert used.registers <= (128 if kernel.constants["D"] <= 128 else 255), (kernel.constants, used)


def kernel_of(family, batch=1, half=False, cos32=False, mask=0):
    hq, hkv, d, rotated, norms = FAMILIES[family]
    return attention.kernel(attention.config(batch, hq, hkv, d, 32), rotated, half, cos32, norms, norms, mask)


@pytest.mark.parametrize("family", ["8b", "70b", "smollm2"])
def test_kernels_compile(family):
    check([kernel_of(family, mask=1)])


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_all_kernels_compile(family):
    check([kernel_of(family, batch, mask=mask) for batch in (1, 8, 64) for mask in (0, 1)])
    check(
        [kernel_of(family, 1, half, cos32, mask) for half in (False, True) for cos32, mask in ((True, 2), (False, 3))]
    )


@pytest.mark.parametrize("batch", [1, 2, 3, 7, 32, 200])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_shape_has_a_configuration_that_fits(family, batch):
    hq, hkv, d, _, _ = FAMILIES[family]
    for pages in (1, 2, 3, 16, 2048):
        c = attention.config(batch, hq, hkv, d, pages)
        assert c.grid % c.cluster == 0
        assert c.cluster in (1, 2, 4, 8)
        parts = -(-c.group // c.heads)
        assert c.grid == batch * hkv * parts * c.cluster
        assert c.heads <= 8
        assert parts * c.heads >= c.group
        assert c.smem <= 232_448 - 1024
        # More blocks than multiprocessors only where the batch alone asks for them.
        assert c.cluster == 1 or c.grid <= 132


def test_kernels_of_reads_the_configuration():
    llama = SimpleNamespace(
        model_type="llama", hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, intermediate_size=14336
    )
    kernels = attention.kernels_of(llama, (1,))
    assert [(k.constants["D"], k.constants["GROUP"], k.constants["MASK"]) for k in kernels] == [
        (128, 4, 0),
        (128, 4, 1),
    ]
    assert kernels[0] is attention.kernel(attention.config(1, 32, 8, 128, 64), 128, False, False, False, False, 0)


def arguments(d=64, hq=4, hkv=2, tokens=1, dtype=torch.bfloat16, mask=None, rotated=None, kv_format="int4"):
    cache = [torch.zeros(1, hkv, 70, d, dtype=dtype) for _ in range(2)]
    angle = torch.zeros(1, tokens, rotated or d, dtype=dtype)
    qkv = torch.zeros(1, tokens, (hq + 2 * hkv) * d, dtype=dtype)
    cache = (*cache, *formats.kv_store(1, hkv, 70, d, kv_format=kv_format), *formats.kv_tables(hkv, d))
    return (qkv, angle, angle, None, None, 1e-6, *cache, torch.arange(tokens), mask, 0.1, hq, hkv, d)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"d": 80}, "head_dim 80"),
        ({"d": 288}, "head_dim 288"),
        ({"tokens": 2}, "2 tokens"),
        ({"dtype": torch.float32}, "not 16 bits"),
        ({"hq": 5}, "evenly"),
        ({"rotated": 96}, "cos"),
        ({"mask": torch.zeros(1, 4, 1, 70, dtype=torch.bool)}, "mask"),
        ({"mask": torch.zeros(1, 1, 1, 70, dtype=torch.int32)}, "dtype"),
        ({"kv_format": "int4-channel"}, "per channel"),
        ({}, "Hopper"),
    ],
)
def test_refusals_have_reasons(changes, reason):
    if not torch.cuda.is_available():
        assert reason in attention.accepts(*arguments(**changes))
