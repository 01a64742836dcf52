"""The INT4 cache and attention over it, against a float64 model of the rule in ops.py.

The rule: pages that were complete before the call are seen as they decode, everything else exactly.
"""

import gc

import pytest
import torch
from fu_compile.lowerings import pages
from hypothesis import given, settings
from hypothesis import strategies as st

from fu_compile import formats as f
from fu_compile.errors import CacheLengthError, CacheMismatchError

fu = torch.ops.futransformer
EPS, SCALE = 1e-6, 0.2
TOLERANCE = 2e-5
"""float32 softmax and sums over at most 300 unit-variance values; float64 differs by some 1e-6."""


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


class Model:
    """A cache driven through the operators, and what attention must see of it by the rule, in float64."""

    def __init__(
        self, batch=2, hq=4, hkv=2, d=16, length=200, dtype=torch.float32, rotated=None, norms=False, kv_format="int4"
    ):
        self.kv_format = kv_format
        self.batch, self.hq, self.hkv, self.d, self.length, self.dtype = batch, hq, hkv, d, length, dtype
        self.rotated = rotated or d
        self.keys, self.values = (torch.full((batch, hkv, length, d), float("nan")).to(dtype) for _ in range(2))
        self.store = f.kv_store(batch, hkv, length, d, kv_format=kv_format)
        for t, poison in zip(self.store, (0xFF, float("nan"), 0xFF, float("nan")), strict=True):
            t.fill_(poison)  # B17: unwritten memory must never matter
        self.tables = (torch.randn(hkv, d) * 0.5, torch.rand(hkv, d) + 0.5)
        self.norms = tuple(torch.randn(d).to(dtype) for _ in range(2)) if norms else (None, None)
        self.heads = (hq, hkv, d)
        self.at = 0

    def inputs(self, tokens):
        qkv = torch.randn(self.batch, tokens, (self.hq + 2 * self.hkv) * self.d).to(self.dtype)
        position = torch.arange(self.at, self.at + tokens)
        freq = 1.0 / 100 ** (torch.arange(0, self.rotated, 2) / self.rotated)
        angle = (position[:, None] * freq)[None]
        angle = torch.cat((angle, angle), -1)
        self.at += tokens
        return qkv, angle.cos().to(self.dtype), angle.sin().to(self.dtype), position

    def rope(self, qkv, cos, sin):
        """float64 q, k, v, rounded once to the model's dtype."""
        b, s, _ = qkv.shape
        heads = qkv.double().view(b, s, -1, self.d).transpose(1, 2)
        q, k, v = heads.split((self.hq, self.hkv, self.hkv), 1)
        out = []
        for x, gain in ((q, self.norms[0]), (k, self.norms[1])):
            if gain is not None:
                x = x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * gain.double()
            r, half = self.rotated, self.rotated // 2
            turned = torch.cat((-x[..., half:r], x[..., :half]), -1)
            y = x[..., :r] * cos.double()[:, None] + turned * sin.double()[:, None]
            out.append(torch.cat((y, x[..., r:]), -1).to(self.dtype))
        return *out, v.to(self.dtype)

    def seen(self, complete):
        """K and V as attention sees them, float64."""
        k, v = self.keys[:, :, : self.at].double(), self.values[:, :, : self.at].double()
        n = complete * 64
        if complete:
            if self.kv_format == "int4":
                decoded = f.decode_keys(*f.encode_keys(self.keys[:, :, :n], *self.tables), *self.tables)
            else:
                mean, reads = self.tables
                decoded = f.decode_key_pages(*f.encode_key_pages(self.keys[:, :, :n], mean, 0, reads), mean)
            k = torch.cat((decoded.double(), k[:, :, n:]), 2)
            v = torch.cat((f.decode_rows(*f.encode_rows(self.values[:, :, :n])).double(), v[:, :, n:]), 2)
        return k, v

    def expected(self, q, first, mask):
        """float64 attention; mask: [B or 1, 1 or H, S, L] or none (then causal by position)."""
        k, v = (x.repeat_interleave(self.hq // self.hkv, 1) for x in self.seen(first // 64))
        scores = q.double() @ k.transpose(-1, -2) * SCALE
        if mask is None:
            mask = torch.arange(self.at) <= torch.arange(first, self.at)[:, None]
        mask = mask[..., : self.at]
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask.double()
        return (torch.softmax(scores, -1).nan_to_num(0.0) @ v).transpose(1, 2).flatten(2)

    def decode(self, tokens=1, mask=None):
        """(the operator's result, the reference) for the next tokens."""
        first = self.at
        qkv, cos, sin, position = self.inputs(tokens)
        y = fu.attention_int4(
            qkv, cos, sin, *self.norms, EPS, self.keys, self.values, *self.store, *self.tables, position, mask, SCALE,
            *self.heads,
        )  # fmt: skip
        q, _, _ = self.rope(qkv, cos, sin)
        self.last_q = q
        return y, self.expected(q, first, mask)

    def prefill(self, tokens, fresh=False, mask=None):
        first = self.at
        qkv, cos, sin, position = self.inputs(tokens)
        q, k, v = fu.qkv_append(
            qkv, cos, sin, *self.norms, EPS, self.keys, self.values, *self.store, *self.tables, position, *self.heads
        )
        y = fu.attention_prefill(
            q, k, v, self.keys, self.values, *self.store, *self.tables, position, mask, SCALE, fresh
        )  # fmt: skip
        return y, self.expected(self.rope(qkv, cos, sin)[0], first, mask)


def check(pair, tolerance=TOLERANCE):
    y, expected = pair
    torch.testing.assert_close(y.double(), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize(("d", "rotated"), [(16, 16), (16, 8), (96, 96), (10, 4)])
@pytest.mark.parametrize("tokens", [1, 5])
def test_qkv_rope(norms, d, rotated, tokens):
    m = Model(d=d, rotated=rotated, norms=norms)
    m.at = 37
    qkv, cos, sin, _ = m.inputs(tokens)
    got = fu.qkv_rope(qkv, cos, sin, *m.norms, EPS, *m.heads)
    for ours, ref in zip(got, m.rope(qkv, cos, sin), strict=True):
        # cos and sin are given in float32, products of values up to 10 round by some 1e-6
        torch.testing.assert_close(ours, ref, rtol=2e-6, atol=2e-6)
        assert ours.is_contiguous()
    assert len({t.untyped_storage().data_ptr() for t in got}) == 3


@pytest.mark.parametrize("d", [8, 16, 64, 80, 96, 128, 192, 256])
def test_decode_over_pages(d):
    """Prefill across a page end, then steps that read the decoded page, fill the next one and read that too."""
    m = Model(d=d, length=140, batch=1)
    check(m.prefill(126, fresh=True))
    for _ in range(4):  # 127, 128: page 1 is quantised and read from the next step on
        check(m.decode())
    torch.testing.assert_close(
        fu.kv_dequantize(m.store[2], m.store[3], None, None, 2),
        f.decode_rows(*f.encode_rows(m.values[:, :, :128])),
        rtol=0,
        atol=0,
    )
    k = f.decode_keys(*f.encode_keys(m.keys[:, :, :128], *m.tables), *m.tables)
    assert torch.equal(fu.kv_dequantize(m.store[0], m.store[1], *m.tables, 2), k)


@settings(max_examples=12, deadline=None)
@given(
    st.lists(st.integers(1, 90), min_size=1, max_size=5),
    st.sampled_from([(4, 4), (9, 3), (8, 1)]),
    st.integers(0, 2**31),
    st.sampled_from(f.KV_FORMATS),
)
def test_chunks(chunks, heads, seed, kv_format):
    """Any split into calls obeys the rule (B20), with and without an own mask."""
    torch.manual_seed(seed)
    m = Model(hq=heads[0], hkv=heads[1], d=8, length=sum(chunks) + 3, kv_format=kv_format)
    for i, tokens in enumerate(chunks):
        mask = None
        if i % 2:
            mask = torch.arange(m.length) <= torch.arange(m.at, m.at + tokens)[:, None]
            mask = mask & (torch.arange(m.length) >= torch.tensor([0, 2])[:, None, None, None])
        check(m.decode(tokens, mask) if tokens < 3 else m.prefill(tokens, mask=mask))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits(dtype):
    m = Model(dtype=dtype, length=100)
    # q rounds to dtype before attention in both; float32 and float64 may round it apart by one unit: 2^-8, 2^-11.
    tolerance = {torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}[dtype]
    check(m.prefill(63, fresh=True), tolerance)
    for _ in range(4):
        y, expected = m.decode()
        assert y.dtype == dtype
        check((y, expected), tolerance)


@pytest.mark.parametrize("kind", ["bool", "float", "per head"])
@pytest.mark.parametrize(("tokens", "kv_format"), [(1, "int4"), (3, "int4"), (1, "int4-channel")])
def test_masks_and_poisoned_slots(kind, tokens, kv_format):
    """Left padding whose slots hold NaN, before and after their page is quantised; a sequence that is all padding."""
    m = Model(length=160, kv_format=kv_format)
    m.prefill(62, fresh=True)
    m.keys[0, :, :5], m.values[0, :, :5] = float("nan"), float("inf")
    for _ in range(3):
        first = m.at
        shown = (torch.arange(m.length) <= torch.arange(first, first + tokens)[:, None])[None, None].repeat(2, 1, 1, 1)
        shown[0, :, :, :5] = False
        shown[1, :, 0] = False  # a query that may see nothing
        mask = shown if kind == "bool" else torch.zeros(shown.shape).masked_fill(~shown, float("-inf"))
        if kind == "per head":
            mask = mask.repeat(1, m.hq, 1, 1) + torch.randn(2, m.hq, tokens, m.length)
        y, _ = m.decode(tokens, mask)
        assert y.isfinite().all()
        assert not y[1, 0].any()
    # The same values, computed by a model in which those slots hold other ones: zeros, or, where one range serves 64
    # tokens of a channel, something that leaves it alone.
    keys, values = m.keys.nan_to_num(0.0, 0.0, 0.0), m.values.nan_to_num(0.0, 0.0, 0.0)
    keys[0, :, :5] = 0.0 if kv_format == "int4" else keys[0, :, 5:6]
    assert m.at > 64
    clean = f.kv_store(2, m.hkv, m.length, m.d, kv_format=kv_format)
    fu.kv_append_(keys, values, *clean, *m.tables, 0, 1)
    qkv, cos, sin, position = m.inputs(tokens)
    args = (qkv, cos, sin, *m.norms, EPS)
    tail = (position, mask, SCALE, *m.heads)
    a = fu.attention_int4(*args, m.keys, m.values, *m.store, *m.tables, *tail)
    b = fu.attention_int4(*args, keys, values, *clean, *m.tables, *tail)
    torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_keys_per_channel_that_are_not_finite(bad):
    """Whoever sees such a token gets NaN; whoever does not gets what the other 63 tokens of its page give."""
    m = Model(length=160, kv_format="int4-channel")
    m.prefill(70, fresh=True)
    k = m.keys[0, 0, 7].clone()
    m.keys[0, 0, 7, 3] = bad
    fu.kv_append_(m.keys, m.values, *m.store, *m.tables, 0, 1)
    y, _ = m.decode(1)
    assert y[0, 0, : 2 * m.d].isnan().all()  # the two query heads of that key/value head
    assert y[0, 0, 2 * m.d :].isfinite().all()
    assert y[1].isfinite().all()
    shown = (torch.arange(m.length) <= m.at)[None, None, None].repeat(2, 1, 1, 1)
    shown[0, ..., 7] = False
    y, _ = m.decode(1, shown)
    m.keys[0, 0, 7] = k  # inside the channel's range or not: nothing that is finite may have been touched by it
    m.keys[0, 0, 7, 3] = m.keys[0, 0, 8, 3]
    check((y, m.expected(m.last_q, m.at - 1, shown)))


def test_lowest_value_masks():
    """transformers' additive masks hide with the lowest finite value, which must not meet NaN either."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        m = Model(dtype=dtype, length=70)
        m.prefill(6, fresh=True)
        m.keys[:, :, :2] = m.values[:, :, :2] = float("nan")
        mask = torch.zeros(2, 1, 1, 70).to(dtype)
        mask[..., :2] = mask[..., 7:] = torch.finfo(dtype).min
        y, _ = m.decode(1, mask)
        assert y.isfinite().all()
        # A row that hides everything is finite too (a mean over hidden slots, as in eager).
        m.keys[:, :, :2] = m.values[:, :, :2] = 0.0
        assert m.decode(1, torch.full_like(mask, torch.finfo(dtype).min))[0].isfinite().all()


def test_fresh_padded_prefill():
    m = Model(length=100)
    shown = torch.ones(9, 100).tril().bool()[None, None].repeat(2, 1, 1, 1)
    shown[0, :, :, :4] = False
    y, expected = m.prefill(9, fresh=True, mask=shown)
    check((y, expected))
    assert not y[0, :4].any()


def test_writing_past_the_end():
    m = Model(length=66)
    m.prefill(64, fresh=True)
    keys, codes = m.keys.clone(), m.store[0].clone()
    for call in (lambda: m.decode(3), lambda: m.prefill(3)):
        m.at = 64
        with pytest.raises(CacheLengthError, match="66"):
            call()
        assert torch.equal(m.keys, keys) or torch.equal(m.keys.nan_to_num(7.0), keys.nan_to_num(7.0))
        assert torch.equal(m.store[0], codes)
    m.at = 64
    check(m.decode(2))  # a good call right after still works


def test_stores_that_do_not_belong():
    m, other = Model(), Model(d=8)
    qkv, cos, sin, position = m.inputs(2)
    head = (qkv, cos, sin, None, None, EPS)
    with pytest.raises(CacheMismatchError):
        fu.qkv_append(*head, m.keys, m.values, *other.store, *m.tables, position, *m.heads)
    with pytest.raises(CacheMismatchError):
        fu.qkv_append(*head, m.keys[:1], m.values[:1], *m.store, *m.tables, position, *m.heads)
    with pytest.raises(CacheLengthError):
        fu.kv_append_(m.keys, m.values, *m.store, *m.tables, 0, 99)
    assert m.keys.isnan().all()


def test_partial_last_page_can_be_imported():
    """L is not a multiple of 64: the missing slots of the last page count as zero."""
    m = Model(length=70, batch=1)
    m.keys.normal_(), m.values.normal_()
    fu.kv_append_(m.keys, m.values, *m.store, *m.tables, 0, 2)
    v = fu.kv_dequantize(*m.store[2:], None, None, 2)
    assert torch.equal(v[:, :, :70], f.decode_rows(*f.encode_rows(m.values)))
    assert not v[:, :, 70:].any()


# ---- decoded pages ---------------------------------------------------------------------------------------------------


def counted(monkeypatch):
    decoded = []
    original = pages.Store.decode
    monkeypatch.setattr(pages.Store, "decode", lambda s, a, b: decoded.append((a, b)) or original(s, a, b))
    return decoded


def test_each_page_is_decoded_once(monkeypatch):
    decoded = counted(monkeypatch)
    m = Model(length=300, d=8)
    m.prefill(130, fresh=True)
    for _ in range(70):
        m.decode()
    assert decoded == [(0, 2), (2, 3)]
    check(m.decode())


def test_foreign_writes_are_noticed(monkeypatch):
    """Another writer of the store, a rewound cache, a new import: never stale pages."""
    decoded = counted(monkeypatch)
    m = Model(length=300, d=8)
    m.prefill(130, fresh=True)
    check(m.decode())
    m.keys[:, :, :64] = torch.randn(2, 2, 64, 8)  # user code writes the exact cache; the runtime imports again
    fu.kv_append_(m.keys, m.values, *m.store, *m.tables, 0, 1)
    check(m.decode())
    assert decoded == [(0, 2), (0, 2)]
    fresh = f.encode_rows(m.values[:, :, :64].neg_())
    m.store[2][:, :, 0], m.store[3][:, :, 0] = fresh[0], fresh[1]  # somebody writes into the store itself
    check(m.decode())
    m.tables[0].add_(0.25)
    fu.kv_append_(m.keys, m.values, *m.store, *m.tables, 0, 2)
    check(m.decode())
    m.at = 70  # crop: the exact rows from 64 on count again
    m.keys[:, :, 64:71] = torch.randn(2, 2, 7, 8)
    check(m.decode())
    m.at = 0  # reset and a new prompt
    check(m.prefill(100, fresh=True))
    for _ in range(30):
        check(m.decode())


def test_reading_back_and_forth():
    """Calls at an earlier position see that page exactly, and leave nothing of it behind for later positions."""
    m = Model(length=200, d=8)
    m.prefill(150, fresh=True)
    q = torch.randn(2, m.hq, 1, 8)
    k = torch.randn(2, m.hkv, 1, 8)

    def at(position):
        tail = (torch.tensor([position]), None, SCALE, False)
        return fu.attention_prefill(q, k, k, m.keys, m.values, *m.store, *m.tables, *tail)

    late, early = at(149), at(100)
    assert torch.equal(at(149), late)
    assert torch.equal(at(100), early)
    m.at = 101
    check((early, m.expected(q, 100, None)))


def test_inference_tensors_are_never_trusted():
    with torch.inference_mode():
        m = Model(length=100, d=8)
        m.store = tuple(t.clone() for t in m.store)
        assert m.store[0].is_inference()
        check(m.prefill(64, fresh=True))
        check(m.decode())
        fu.kv_append_(m.keys, m.values.neg_(), *m.store, *m.tables, 0, 1)
        check(m.decode())


def test_normal_store_under_inference_mode(monkeypatch):
    """The store that kv_store makes keeps versions, also when the model runs in inference mode."""
    decoded = counted(monkeypatch)
    with torch.inference_mode():
        m = Model(length=100, d=8)
        m.tables = tuple(f.kv_tables(2, 8))
        check(m.prefill(64, fresh=True))
        check(m.decode())
        check(m.decode())
        assert decoded == [(0, 1)]
        m.store[2].zero_()
        m.store[3].zero_()
        m.values[:, :, :64] = 0
        check(m.decode())


def test_decoded_pages_die_with_their_store():
    m = Model(length=100, d=8)
    m.prefill(64, fresh=True)
    m.decode()
    alive = lambda: sum(type(o) is pages._Decoded for o in gc.get_objects())  # noqa: E731
    gc.collect()
    before = alive()
    pages.forget(m.store[0])
    assert alive() == before - 1
    check(m.decode())
    assert alive() == before
    del m
    gc.collect()
    assert alive() == before - 1
