"""csrc/qkv_rope_sm90.cu compiles here, without a GPU; what its lowering refuses, and where it stands."""

import pytest
import torch
from fu_compile.lowerings import TABLE, qkv_rope_sm90
from fu_compile.lowerings import decode_linear as common
from torch._subclasses.fake_tensor import FakeTensorMode

from fu_compile import formats
from fu_compile.errors import CacheMismatchError

BF16 = torch.bfloat16


@pytest.mark.parametrize(
    "kernel",
    [((32, 8, 128), 128, False, False, (False, False)), ((16, 8, 96), 72, True, True, (True, True))],
    ids=["8b", "norms, partial, f16"],
)
@pytest.mark.parametrize("append", [True, False])
def test_compiles_inside_its_budget(kernel, append, tmp_path, monkeypatch):
    monkeypatch.setenv("FU_CACHE_DIR", str(tmp_path))
    used = qkv_rope_sm90.kernel(*kernel, append).cubin.resources
    assert used.spill_stores == used.spill_loads == 0
    assert used.registers <= 64  # four blocks of 256 threads on a multiprocessor: what waits is memory


def arguments(op, **changed):
    """Arguments that are ours on Hopper, some of them changed."""
    heads = changed.pop("heads", (4, 2, 64))
    dtype, tokens, slots = changed.pop("dtype", BF16), 5, changed.pop("slots", 200)
    q, kv, dim = heads
    rotated = changed.pop("rotated", dim)
    qkv = torch.empty(2, tokens, (q + 2 * kv) * dim, dtype=dtype)
    cos = torch.empty(1, tokens, rotated, dtype=changed.pop("cos_dtype", dtype))
    sin = torch.empty(1, tokens, changed.pop("sin", rotated), dtype=cos.dtype)
    norm = torch.empty(dim, dtype=changed.pop("norm_dtype", dtype))
    rope = (qkv, cos, sin, norm, None, 1e-6)
    if op == "qkv_rope":
        args = (*rope, *heads)
    else:
        keys = torch.empty(2, kv, slots, dim, dtype=changed.pop("cache_dtype", dtype))
        values = torch.empty_like(keys)
        if changed.pop("strided", False):
            values = values.transpose(1, 2).contiguous().transpose(1, 2)
        store = formats.kv_store(2, kv, changed.pop("pages", slots), dim, kv_format=changed.pop("format", "int4"))
        tables = torch.empty(kv, dim), torch.empty(kv, dim)
        position = torch.empty(tokens, dtype=changed.pop("position", torch.int64))
        args = (*rope, keys, values, *store, *tables, position, *heads)
    assert not changed
    return args


@pytest.mark.parametrize(
    ("op", "changed", "says"),
    [
        ("qkv_rope", {"dtype": torch.float32}, "not 16 bits"),
        ("qkv_rope", {"heads": (4, 2, 80)}, "not a multiple of 32"),
        ("qkv_rope", {"heads": (4, 2, 288)}, "up to 256"),
        ("qkv_rope", {"rotated": 128}, "128 rotated columns of 64"),
        ("qkv_rope", {"cos_dtype": torch.float64}, "cos is torch.float64"),
        ("qkv_rope", {"sin": 32}, "do not look alike"),
        ("qkv_rope", {"norm_dtype": torch.float32}, "norm per head"),
        ("qkv_append", {"cache_dtype": torch.float16}, "the cache is torch.float16"),
        ("qkv_append", {"format": "int4-channel"}, "per channel"),
        ("qkv_append", {"slots": 64, "pages": 200}, "unfinished page alone"),
        ("qkv_append", {"strided": True}, "not contiguous"),
        ("qkv_append", {"position": torch.int32}, "positions are torch.int32"),
        ("qkv_append", {"heads": (4, 2, 80)}, "not a multiple of 32"),
        ("qkv_rope", {}, "written for Hopper"),
        ("qkv_append", {}, "written for Hopper"),
    ],
)
def test_refusals_name_their_reason(op, changed, says):
    reason = qkv_rope_sm90.ACCEPTS[op](*arguments(op, **changed))
    assert reason is not None
    assert says in reason


@pytest.mark.parametrize("changed", [{}, {"rotated": 48}, {"cos_dtype": torch.float32}, {"dtype": torch.float16}])
def test_ours_on_hopper(changed, monkeypatch):
    monkeypatch.setattr(common, "unavailable", lambda device: None)
    for op in ("qkv_rope", "qkv_append"):
        assert qkv_rope_sm90.ACCEPTS[op](*arguments(op, **changed)) is None
        assert TABLE[op][0].launch is qkv_rope_sm90.LAUNCH[op]
    with FakeTensorMode():
        assert qkv_rope_sm90.ACCEPTS["qkv_rope"](*arguments("qkv_rope", **changed)) is None


def test_a_store_of_another_cache_is_refused_before_anything_is_written():
    args = list(arguments("qkv_append"))
    args[8] = args[8][:, :, :2]  # fewer pages than the cache has slots
    args[10] = args[10][:, :, :2]
    with pytest.raises(CacheMismatchError, match="do not belong together"):
        qkv_rope_sm90.qkv_append(*args)
