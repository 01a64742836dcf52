"""The CUDA decode attention against a float64 model of the rule in ops.py. One command on a Hopper GPU:

python -m pytest tests/gpu -m gpu -k attention

Fresh random inputs in every run; outputs and every slot that must not matter hold NaN. What is checked: the output, the
new rows bit for bit, a page that fills, and that nothing else was touched.
"""

from __future__ import annotations

import pytest
import torch
from fu_compile.lowerings import attention_int4_sm90 as kernel

from fu_compile import formats, jit, lowerings, ops
from fu_compile.errors import CacheMismatchError

pytestmark = pytest.mark.gpu
fu = torch.ops.futransformer
PAGE, EPS = formats.PAGE, 1e-6

FAMILIES = {  # query heads, key/value heads, head_dim, rotated columns, norms per head
    "8b": (32, 8, 128, 128, False),
    "70b": (64, 8, 128, 128, False),
    "smollm2": (9, 3, 64, 64, False),
    "qwen2.5": (14, 2, 64, 64, False),
    "qwen3": (16, 8, 128, 128, True),
    "phi3": (32, 32, 96, 96, False),
    "partial-rotary": (6, 2, 128, 32, False),
    "small-head": (4, 2, 32, 32, False),
    "head-256": (8, 4, 256, 256, False),
    "multi-query": (20, 1, 64, 48, True),
    "head-160": (10, 2, 160, 80, False),
}
LENGTHS = (0, 1, 63, 64, 65, 127, 128, 1000)


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


class Layer:
    """One layer's cache with ``length`` random tokens, everything behind them poisoned."""

    def __init__(self, family, length, batch=1, slots=None, paged=False, dtype=torch.bfloat16, cos_dtype=None):
        self.hq, self.hkv, self.d, self.rotated, norms = FAMILIES[family]
        self.batch, self.dtype, self.paged, self.at = batch, dtype, paged, length
        slots = slots or length + 70
        pages = max(-(-slots // PAGE), 2 if paged else 1)
        self.limit = pages * PAGE if paged else slots
        r = lambda *shape: torch.randn(*shape, device="cuda")  # noqa: E731
        self.k = (r(batch, self.hkv, pages * PAGE, self.d) * 1.5).to(dtype)
        self.k[..., 3] *= 6  # an outlier channel
        self.v = r(batch, self.hkv, pages * PAGE, self.d).to(dtype)
        self.tables = (r(self.hkv, self.d) * 0.5, torch.rand(self.hkv, self.d, device="cuda") + 0.5)
        self.norms = tuple((r(self.d) * 0.2 + 1).to(dtype) for _ in range(2)) if norms else (None, None)
        self.scale = self.d**-0.5
        self.store = formats.kv_store(batch, self.hkv, pages * PAGE, self.d, "cuda")
        for t, poison in zip(self.store, (0xFF, float("nan"), 0xFF, float("nan")), strict=True):
            t.fill_(poison)
        shape = (batch, self.hkv, PAGE if paged else slots, self.d)
        self.keys, self.values = (torch.full(shape, float("nan"), device="cuda", dtype=dtype) for _ in range(2))
        first = length // PAGE * PAGE if paged else 0
        for cache, rows in ((self.keys, self.k), (self.values, self.v)):
            cache[:, :, : length - first] = rows[:, :, first:length]
        self.encode(0, length // PAGE)
        self.cos_dtype = cos_dtype or dtype
        self.freq = 1.0 / 10000 ** (torch.arange(0, self.rotated, 2, device="cuda") / self.rotated)

    def encoded(self, first, last):
        rows = slice(first * PAGE, last * PAGE)
        return (
            *formats.encode_keys(self.k[:, :, rows], *self.tables),
            *formats.encode_rows(self.v[:, :, rows]),
        )

    def encode(self, first, last):
        if last > first:
            for to, new in zip(self.store, self.encoded(first, last), strict=True):
                to[:, :, first:last] = new.unflatten(2, (-1, PAGE))

    def inputs(self):
        qkv = torch.randn(self.batch, 1, (self.hq + 2 * self.hkv) * self.d, device="cuda").to(self.dtype)
        position = torch.tensor([self.at], device="cuda")
        angle = (position[:, None] * self.freq)[None]
        angle = torch.cat((angle, angle), -1)
        return qkv, angle.cos().to(self.cos_dtype), angle.sin().to(self.cos_dtype), position

    def call(self, qkv, cos, sin, position, mask=None, scale=None):
        return fu.attention_int4(
            qkv, cos, sin, *self.norms, EPS, self.keys, self.values, *self.store, *self.tables, position, mask,
            scale or self.scale, self.hq, self.hkv, self.d,
        )  # fmt: skip

    def expected(self, qkv, cos, sin, mask=None):
        """(float64 output, this call's key, value rows) and remembers the rows."""
        q, k, v = lowerings.reference_attention._heads(
            qkv.float(), cos.float(), sin.float(), *self.norms, EPS, self.hq, self.hkv, self.d
        )
        self.k[:, :, self.at], self.v[:, :, self.at] = k[:, :, 0].to(self.dtype), v[:, :, 0].to(self.dtype)
        n = self.at // PAGE * PAGE
        keys, values = (x[:, :, : self.at + 1].double() for x in (self.k, self.v))
        if n:
            kc, ks, vc, vs = (t[:, :, : n // PAGE].flatten(2, 3) for t in self.store)
            keys[:, :, :n] = formats.decode_keys(kc, ks, *self.tables).double()
            values[:, :, :n] = formats.decode_rows(vc, vs).double()
        repeat = self.hq // self.hkv
        scores = q.double() @ keys.repeat_interleave(repeat, 1).mT * self.scale
        if mask is not None:
            mask = mask[..., : self.at + 1]
            shown = mask if mask.dtype == torch.bool else mask > -30000
            scores = scores.masked_fill(~shown, float("-inf"))
            if mask.dtype != torch.bool:
                scores = scores + torch.where(shown, mask, 0).double()
            values = torch.where(shown.mT, values, 0.0)
        y = torch.softmax(scores, -1).nan_to_num(0.0) @ values.repeat_interleave(repeat, 1)
        return y.transpose(1, 2).flatten(2), self.k[:, :, self.at], self.v[:, :, self.at]


def error(y, expected):
    """Largest error in roundings of the output's dtype, of at least an eighth of the row's rms."""
    step = 2.0**-8 if y.dtype == torch.bfloat16 else 2.0**-11
    floor = expected.square().mean(-1, keepdim=True).sqrt() / 8 + 1e-30
    e = (y.double() - expected).abs() / (torch.maximum(expected.abs(), floor) * step)
    return float("inf") if not bool(torch.isfinite(e).all()) else float(e.max())


ROUNDINGS = 2.0
"""One rounding is the store; scores, weights and sums differ from float64 by some 1e-4 of a rounding of bfloat16."""


def step(layer, mask=None):
    """One call, everything that it must do and must not do checked."""
    qkv, cos, sin, position = layer.inputs()
    before = [t.clone() for t in (layer.keys, layer.values, *layer.store)]
    poison = torch.full((layer.batch, 1, layer.hq * layer.d), float("nan"), device="cuda", dtype=layer.dtype)
    del poison
    expected, k, v = layer.expected(qkv, cos, sin, mask)
    y = layer.call(qkv, cos, sin, position, mask)
    assert error(y, expected) <= ROUNDINGS, error(y, expected)
    at, page = layer.at, layer.at // PAGE
    slot = at % PAGE if layer.paged else at
    if layer.norms[0] is None:
        assert torch.equal(layer.keys[:, :, slot], k)
    else:
        torch.testing.assert_close(layer.keys[:, :, slot], k)
    assert torch.equal(layer.values[:, :, slot], v)
    layer.k[:, :, at] = layer.keys[:, :, slot]
    before[0][:, :, slot], before[1][:, :, slot] = layer.keys[:, :, slot], v
    if at % PAGE == PAGE - 1:
        kc, ks, vc, vs = (t.unflatten(2, (-1, PAGE))[:, :, 0] for t in layer.encoded(page, page + 1))
        assert torch.equal(layer.store[2][:, :, page], vc)
        assert torch.equal(layer.store[3][:, :, page], vs)
        # The rotation is summed in another order: a value half way between two codes may go either way.
        torch.testing.assert_close(layer.store[1][:, :, page].float(), ks.float(), rtol=2e-3, atol=0)
        got = layer.store[0][:, :, page]
        apart = torch.stack(((got & 15).int() - (kc & 15).int(), (got >> 4).int() - (kc >> 4).int())).abs()
        assert int(apart.max()) <= 1
        assert float(apart.float().mean()) < 1e-3
        for i in range(4):
            before[2 + i][:, :, page] = layer.store[i][:, :, page]
    for a, b in zip((layer.keys, layer.values, *layer.store), before, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    layer.at += 1
    return y


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("paged", [False, True])
def test_lengths(family, paged):
    for length in LENGTHS:
        layer = Layer(family, length, paged=paged)
        for _ in range(2):
            step(layer)


@pytest.mark.parametrize("family", ["8b", "70b", "smollm2", "phi3", "multi-query"])
@pytest.mark.parametrize("batch", [3, 8, 40])
def test_batches(family, batch):
    for length in (63, 200):
        step(Layer(family, length, batch))


@pytest.mark.parametrize("family", ["8b", "70b", "head-160"])
@pytest.mark.parametrize("cos", [torch.float16, torch.float32])
def test_float16(family, cos):
    for length in (31, 63, 500):
        step(Layer(family, length, 2, dtype=torch.float16, cos_dtype=cos))


def test_long_context():
    step(Layer("8b", 20_000, 1))
    step(Layer("8b", 4095, 33))


@pytest.mark.parametrize("kind", ["bool", "lowest", "infinity", "float32"])
@pytest.mark.parametrize("family", ["8b", "70b"])
def test_masks(family, kind):
    for length in (40, 127, 300):
        layer = Layer(family, length, 3)
        columns = layer.limit
        shown = (torch.arange(columns, device="cuda") <= length)[None, None, None].repeat(3, 1, 1, 1)
        shown[0, ..., :37] = False  # left padding, behind which there may be anything
        layer.keys[0, :, :37] = layer.values[0, :, :37] = float("nan")
        shown[1, ..., ::3] = False
        shown[2] = False  # nothing visible: zeros
        dtype = torch.float32 if kind == "float32" else layer.dtype
        lowest = float("-inf") if kind == "infinity" else torch.finfo(dtype).min
        mask = (
            shown if kind == "bool" else torch.randn(shown.shape, device="cuda").to(dtype).masked_fill(~shown, lowest)
        )
        y = step(layer, mask)
        assert not y[2].any()
    # One row for all sequences
    layer = Layer(family, 100, 3)
    mask = (torch.arange(layer.limit, device="cuda") <= 100)[None, None, None]
    step(layer, mask.expand(3, 1, 1, -1))
    step(layer, mask)


def test_a_row_that_is_not_finite():
    """A visible NaN reaches the result, as in the reference; a hidden one does not."""
    layer = Layer("8b", 130)
    layer.k[0, 0, 70, 5] = float("nan")
    layer.encode(0, 2)
    y = layer.call(*layer.inputs()).view(32, 128)
    assert y[:4].isnan().all()
    assert y[4:].isfinite().all()
    mask = torch.ones(1, 1, 1, layer.limit, device="cuda", dtype=torch.bool)
    mask[..., 70] = False
    assert layer.call(*layer.inputs(), mask).isfinite().all()


def test_large_values():
    """Sharp attention: scores of about fifty."""
    for dtype in (torch.bfloat16, torch.float16):
        layer = Layer("8b", 200, dtype=dtype)
        qkv, cos, sin, position = layer.inputs()
        qkv[..., : 32 * 128] *= 10
        expected, _, _ = layer.expected(qkv, cos, sin)
        # The tensor cores truncate sums of codes, 8 of which cancel: a score of 50 is known to 3e-4.
        assert error(layer.call(qkv, cos, sin, position), expected) <= ROUNDINGS + (0 if dtype == torch.bfloat16 else 1)


@pytest.mark.parametrize("paged", [False, True])
def test_past_the_end_nothing_is_written(paged):
    layer = Layer("8b", 64, 2, slots=100, paged=paged)
    before = [t.clone() for t in (layer.keys, layer.values, *layer.store)]
    for at in (layer.limit, layer.limit + 1, 10**6, -1):
        qkv, cos, sin, position = layer.inputs()
        assert layer.call(qkv, cos, sin, position.fill_(at)).isnan().all()
    torch.cuda.synchronize()
    for a, b in zip((layer.keys, layer.values, *layer.store), before, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def test_repeats_are_identical():
    for family, batch in (("8b", 1), ("70b", 8), ("8b", 40)):
        layer = Layer(family, 1000, batch)
        args = layer.inputs()
        first = layer.call(*args).clone()
        for _ in range(50):
            assert torch.equal(layer.call(*args), first)


def test_same_bits_at_any_batch_position():
    layer = Layer("8b", 300, 8)
    qkv, *rest = layer.inputs()
    y = layer.call(qkv, *rest)
    order = torch.randperm(8, device="cuda")
    for t in (layer.keys, layer.values, *layer.store):
        t.copy_(t[order].clone())
    assert torch.equal(layer.call(qkv[order], *rest), y[order])


@pytest.mark.parametrize("paged", [False, True])
def test_captured_and_replayed_over_growing_positions(paged):
    """One graph, its position advanced on the device, over two page ends: what the reference lowering does."""
    layer = Layer("8b", 60, 2, slots=256, paged=paged)
    qkv, _, _, position = layer.inputs()
    tables = torch.outer(torch.arange(256, device="cuda").float(), layer.freq).repeat(1, 2)
    cos_table, sin_table = tables.cos().to(layer.dtype), tables.sin().to(layer.dtype)
    other = [t.clone() for t in (layer.keys, layer.values, *layer.store)]

    def call():
        c, s = cos_table[position][None], sin_table[position][None]
        return layer.call(qkv, c, s, position)

    call()  # compiles; writes the same row again below
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = call()
        position.add_(1)
    position.fill_(60)
    for at in range(60, 200):
        qkv.normal_()
        graph.replay()
        with lowerings.using("reference"):
            want = fu.attention_int4(
                qkv, cos_table[at][None, None], sin_table[at][None, None], None, None, EPS, *other, *layer.tables,
                torch.tensor([at], device="cuda"), None, layer.scale, layer.hq, layer.hkv, layer.d,
            )  # fmt: skip
        # Codes of a page may differ by one where a value lies half way between two, which moves a score by some
        # hundredths; both outputs round to bfloat16.
        assert float((y.float() - want.float()).norm() / want.float().norm()) < 0.03, at
    assert int(position) == 200


def test_the_operator_says_why_not():
    layer = Layer("8b", 10)
    qkv, cos, sin, position = layer.inputs()

    def choose(mask=None, dim=128, tokens=1, heads=32):
        many = qkv.new_zeros(1, tokens, (heads + 16) * dim)
        cache = [t.new_zeros((*t.shape[:-1], dim)) for t in (layer.keys, layer.values)]
        tail = (*layer.store, *layer.tables, position, mask, 0.1, heads, 8, dim)
        chosen, passed = lowerings.choose("attention_int4", "cuda", many, cos, sin, None, None, EPS, *cache, *tail)
        return chosen.name, dict(passed).get("cuda", "")

    assert choose() == ("cuda", "")
    assert "head_dim 80" in choose(dim=80)[1]
    assert "2 tokens" in choose(tokens=2)[1]
    assert "mask" in choose(mask=torch.zeros(1, 32, 1, 80, device="cuda", dtype=torch.bool))[1]
    with pytest.raises(CacheMismatchError):
        fu.attention_int4(
            qkv.repeat(2, 1, 1), cos, sin, None, None, EPS, layer.keys, layer.values, *layer.store, *layer.tables,
            position, None, 0.1, 32, 8, 128,
        )  # fmt: skip


def test_every_family_compiles_ahead():
    for hq, hkv, d, rotated, norms in FAMILIES.values():
        c = kernel.config(1, hq, hkv, d, 16)
        jit.warmup([kernel.kernel(c, rotated, False, False, norms, norms, 0)], progress=False)
    assert ops.PAGE == PAGE
