"""csrc/layout.cuh, compiled by g++, against fu_compile/formats.py: the same byte for every index."""

import ctypes
import random
import subprocess
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fu_compile import formats

CSRC = Path(__file__).parents[2] / "csrc"

# One C function per index function that fills a table, so that a test costs one call and not one per element.
SHIM = """
#include "layout.cuh"
extern "C" {
void int4_table(long long n, long long k, int group, long long* nibble, long long* scale, long long* zero) {
  for (long long r = 0; r < n; ++r)
    for (long long c = 0; c < k; ++c) {
      nibble[r * k + c] = fu::int4_nibble_at(r, c, k, group);
      scale[r * k + c] = fu::int4_scale_at(r, c, k, group);
      zero[r * k + c] = fu::int4_zero_at(r, c, k, group);
    }
}
long long int4_bytes(long long n, long long k, int group) { return fu::int4_bytes(n, k, group); }
int int4_tile_bytes(int group) { return fu::int4_tile_bytes(group); }
void interleave_table(long long n, long long* out) {
  for (long long p = 0; p < n; ++p) out[p] = fu::interleaved_source(p, n);
}
int hadamard_block(int d) { return fu::hadamard_block(d); }
void kv_table(int d, long long* out) { for (int c = 0; c < d; ++c) out[c] = fu::kv_nibble(c, d); }
long long kv_row(long long b, long long h, long long t, long long heads, long long pages) {
  return fu::kv_row(b, h, t, heads, pages);
}
long long kv_pages(long long n) { return fu::kv_pages(n); }
long long kv_complete_pages(long long n) { return fu::kv_complete_pages(n); }
unsigned power_of_two_bits(unsigned b) { return fu::power_of_two_bits(b); }
int constant(int i) {
  const int all[] = {fu::kTileN, fu::kTileK, fu::kNibbleBytes, fu::kPage, fu::kHadamardCap, fu::kFp8History,
                     fu::kFp8State, fu::kFp8Scale, fu::kFp8Calls, fu::kFp8Saturations, fu::kFp8Frozen,
                     fu::kFp8NonFinite};
  return all[i];
}
}
"""


@pytest.fixture(scope="module")
def lib(tmp_path_factory):
    """The header behind a C interface. Without g++ this is an error: the layout would go unchecked."""
    folder = tmp_path_factory.mktemp("layout")
    (folder / "shim.cpp").write_text(SHIM)
    so = folder / "layout.so"
    command = [
        "g++",
        "-std=c++17",
        "-O1",
        "-Wall",
        "-Werror",
        "-shared",
        "-fPIC",
        f"-I{CSRC}",
        "-o",
        so,
        folder / "shim.cpp",
    ]
    built = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    loaded = ctypes.CDLL(str(so))
    for name in ("int4_bytes", "kv_row", "kv_pages", "kv_complete_pages"):
        getattr(loaded, name).restype = ctypes.c_longlong
    loaded.kv_row.argtypes = [ctypes.c_longlong] * 5
    loaded.int4_bytes.argtypes = [ctypes.c_longlong, ctypes.c_longlong, ctypes.c_int]
    loaded.kv_pages.argtypes = loaded.kv_complete_pages.argtypes = [ctypes.c_longlong]
    loaded.power_of_two_bits.restype = ctypes.c_uint
    return loaded


def longs(n):
    t = torch.empty(n, dtype=torch.int64)
    return t, ctypes.cast(t.data_ptr(), ctypes.POINTER(ctypes.c_longlong))


def test_constants(lib):
    slots = formats.FP8_SLOTS
    ours = [
        formats.TILE_N, formats.TILE_K, formats.NIBBLE_BYTES, formats.PAGE, formats.HADAMARD_CAP, formats.FP8_HISTORY,
        formats.FP8_STATE, slots["scale"], slots["calls"], slots["saturations"], slots["frozen"], slots["non_finite"],
    ]  # fmt: skip
    assert [lib.constant(i) for i in range(len(ours))] == ours


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 70), st.integers(1, 420), st.sampled_from(formats.GROUPS), st.integers(0, 2**31))
def test_int4_positions(lib, n, k, group, seed):
    """Every code, scale and zero of a random packed weight is found where the C++ index says."""
    g = torch.Generator().manual_seed(seed)
    groups = -(-k // group)
    q = formats.Int4Codes(
        torch.randint(0, 16, (n, k), generator=g, dtype=torch.uint8),
        torch.randn(n, groups, generator=g).half(),
        torch.randint(0, 16, (n, groups), generator=g, dtype=torch.uint8),
        group,
    )
    packed = formats.pack_int4(q)
    assert packed.numel() == lib.int4_bytes(n, k, group)
    assert lib.int4_tile_bytes(group) == formats.int4_tile_bytes(group)
    (nibble, a), (scale, b), (zero, c) = longs(n * k), longs(n * k), longs(n * k)
    lib.int4_table(ctypes.c_longlong(n), ctypes.c_longlong(k), group, a, b, c)
    assert nibble.unique().numel() == n * k
    codes = (packed[nibble // 2] >> (4 * (nibble % 2)).to(torch.uint8)) & 15
    assert torch.equal(codes.view(n, k), q.codes)
    assert torch.equal(packed.view(torch.float16)[scale // 2].view(n, k), q.scales.repeat_interleave(group, 1)[:, :k])
    assert torch.equal(packed[zero].view(n, k) >> 3, q.zeros.repeat_interleave(group, 1)[:, :k])


def test_int4_fragment_order():
    """The order itself, stated once more: the A operand of mma.m16n8k16 with the columns of a lane contiguous."""
    codes = torch.randint(0, 16, (16, 128), dtype=torch.uint8)
    q = formats.Int4Codes(codes, torch.ones(16, 1).half(), torch.zeros(16, 1, dtype=torch.uint8), 128)
    words = formats.pack_int4(q)[: formats.NIBBLE_BYTES].view(torch.int32).tolist()
    for _ in range(200):
        lane, step, register, half = (random.randrange(m) for m in (32, 8, 4, 2))
        row = lane // 4 + 8 * (register % 2)
        # k16 step 2c + j, columns of lane t: 32c + 8t + 4j + (0, 1 | 2, 3), see pack_int4
        column = 32 * (step // 2) + 8 * (lane % 4) + 4 * (step % 2) + half + 2 * (register // 2)
        word = words[(step // 4) * 128 + lane * 4 + step % 4]
        pair = (word >> (0, 8, 4, 12)[register]) & 0x000F000F  # what a mask extracts
        assert (pair >> (16 * half)) & 15 == codes[row, column]


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 300))
def test_interleave(lib, half):
    out, p = longs(2 * half)
    lib.interleave_table(ctypes.c_longlong(2 * half), p)
    assert torch.equal(out, formats.interleave_gate_up(2 * half))


@pytest.mark.parametrize("head_dim", [2, 4, 6, 8, 10, 16, 36, 64, 80, 96, 100, 128, 192, 256])
def test_kv_row_order(lib, head_dim):
    assert lib.hadamard_block(head_dim) == formats.hadamard_block(head_dim)
    # Codes 0..15 of a row are read back from where the C++ index says: values are scale * (code - 8), code 0 present.
    codes = torch.randint(0, 16, (head_dim,), dtype=torch.float32)
    codes[random.randrange(head_dim)] = 0
    packed, scale = formats.encode_rows((codes - 8) * 0.5)
    assert float(scale) == 0.5
    nibble, p = longs(head_dim)
    lib.kv_table(head_dim, p)
    assert nibble.unique().numel() == head_dim
    assert torch.equal((packed[nibble // 2] >> (4 * (nibble % 2)).to(torch.uint8)) & 15, codes.to(torch.uint8))


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 5), st.integers(1, 9), st.integers(1, 700), st.data())
def test_kv_pages(lib, batch, heads, max_len, data):
    codes, scales, _, _ = formats.kv_store(batch, heads, max_len, 8)
    pages = codes.shape[2]
    assert pages == lib.kv_pages(max_len) == formats.kv_pages(max_len)
    b, h, t = (data.draw(st.integers(0, m - 1)) for m in (batch, heads, max_len))
    assert lib.kv_row(b, h, t, heads, pages) == scales[b, h, t // 64, t % 64].storage_offset()
    assert lib.kv_row(b, h, t, heads, pages) * 4 == codes[b, h, t // 64, t % 64].storage_offset()
    assert lib.kv_complete_pages(t) == t // 64


@settings(max_examples=60, deadline=None)
@given(st.floats(min_value=0.0, max_value=2.0**100, width=32))
def test_power_of_two(lib, value):
    state = formats.fp8_state()
    x = torch.tensor([value])
    _, scale = formats.fp8_quantize(x, state)
    bits = int((x.abs() * (2.0 / formats.E4M3_MAX)).view(torch.int32))
    assert int(scale.view(torch.int32)) == (lib.power_of_two_bits(bits) or 0x3F800000)  # 0 means a scale of 1
