"""What a query sees of the INT4 cache, in float32: decoded pages first, then exact rows.

::

    slots      0 ............ 64 c | 64 c ............ live | ...... L
    seen       pages as they decode |  keys, values exactly  | never read

``c`` = pages that were complete before this call. On a CPU the float32 rows hang on the storage of k_codes: a page is
decoded once, the exact rows (fewer than 64, plus the tokens of the call) are copied at every call. Whoever else writes
to the store moves a version and the decoded pages are dropped. A store without versions (inference tensors), stores on
other devices and those of an Int4Cache, whose point is memory, are decoded at every call.

Where a call stands in its cache, the runtime knows or reads once for all layers (:func:`calling`). An operator that is
called without it reads its position itself.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from fu_compile.lowerings.dense import version_of
from torch import Tensor

from fu_compile import formats
from fu_compile.errors import CaptureError

PAGE = formats.PAGE
_ATTRIBUTE = "_fu_decoded"
_keep: contextvars.ContextVar[bool] = contextvars.ContextVar("fu_compile_keep_decoded", default=False)


@contextlib.contextmanager
def keeping_decoded() -> Iterator[None]:
    """Inside, the decoded pages of an Int4Cache on a CPU are kept too: an evaluation wants speed, not memory."""
    token = _keep.set(True)
    try:
        yield
    finally:
        _keep.reset(token)


def keeps_decoded() -> bool:
    """Whether this is inside :func:`keeping_decoded`."""
    return _keep.get()


@dataclass(frozen=True)
class _Call:
    """What the host knows of the call that runs."""

    first: int | None = None
    captured: bool = False


_NOTHING = _Call()
_call: contextvars.ContextVar[_Call] = contextvars.ContextVar("fu_compile_call", default=_NOTHING)


@contextlib.contextmanager
def calling(first: int | None, captured: bool = False) -> Iterator[None]:
    """Inside, :func:`first_position` gives ``first`` instead of reading a position back from its device.

    Args:
        first: position of the call's first token in every cache that it writes; none: only the device knows.
        captured: the call is being captured in a CUDA graph, which is replayed wherever the cache stands then.
    """
    token = _call.set(_Call(first, captured))
    try:
        yield
    finally:
        _call.reset(token)


def capturing(t: Tensor) -> bool:
    """Whether work on ``t`` is being captured in a CUDA graph, where nothing can be read back."""
    return t.is_cuda and torch.cuda.is_current_stream_capturing()


def first_position(position: Tensor) -> int:
    """position[0]: [S] int64, from the host where it knows it, else read back.

    Raises:
        CaptureError: it would have to be read during the capture of a CUDA graph.
    """
    call = _call.get()
    inside = capturing(position)
    # A graph that somebody captures within the call (Inductor's own) would keep the number of this call for good.
    if call.first is not None and (call.captured or not inside):
        return call.first
    if inside:
        raise CaptureError(
            "how many tokens the cache holds is known on the device alone, and reading it cannot be captured",
            where="torch.cuda.graph",
        )
    return int(position[0])


def unless_moved(v: Tensor, position: Tensor, first: int) -> Tensor:
    """The values of a call that was told to start at ``first``: v: [B, Hkv, S, D], as they are.

    In a CUDA graph they become NaN where a replay starts at another position than the capture did: attention then
    gives NaN instead of what looks like a result.
    """
    return v.masked_fill(position[0] != first, float("nan")) if _call.get().captured else v


@dataclass(frozen=True)
class Store:
    """The six tensors of one layer's INT4 cache (shapes: fu_compile.ops, qkv_append)."""

    k_codes: Tensor
    k_scales: Tensor
    v_codes: Tensor
    v_scales: Tensor
    key_mean: Tensor
    key_balance: Tensor

    def versions(self) -> tuple[object, ...] | None:
        """Identity and version of all six, or none where a tensor keeps no version."""
        tensors = (self.k_codes, self.k_scales, self.v_codes, self.v_scales, self.key_mean, self.key_balance)
        versions = [version_of(t) for t in tensors]
        return None if None in versions else (*versions, *(t.data_ptr() for t in tensors), self.k_codes.shape)

    def encode(self, keys: Tensor, values: Tensor, first: int, last: int) -> None:
        """Quantises the rows of the pages first .. last-1: keys and values are [B, Hkv, <= (last - first) * 64, D].

        Missing rows (slots beyond the end of a StaticCache) count as zero.
        """
        missing = (last - first) * PAGE - keys.shape[2]
        if missing:
            keys, values = (torch.nn.functional.pad(t, (0, 0, 0, missing)) for t in (keys, values))
        v_codes, v_scales = formats.encode_rows(values)
        if formats.per_channel(self.k_scales):
            k_codes, k_scales = formats.encode_key_pages(keys, self.key_mean, first, self.key_balance)
            # A key that is not finite has no code: whoever sees the token gets NaN from its value instead.
            v_scales = v_scales.masked_fill(~torch.isfinite(keys).all(-1), float("nan"))
        else:
            pair = formats.encode_keys(keys, self.key_mean, self.key_balance)
            k_codes, k_scales = (t.unflatten(2, (-1, PAGE)) for t in pair)
        v_codes, v_scales = (t.unflatten(2, (-1, PAGE)) for t in (v_codes, v_scales))
        store = (self.k_codes, self.k_scales, self.v_codes, self.v_scales)
        for into, new in zip(store, (k_codes, k_scales, v_codes, v_scales), strict=True):
            into[:, :, first:last].copy_(new)

    def decode(self, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the pages first .. last-1: [B, Hkv, (last - first) * 64, D] f32."""
        pages = slice(first, last)
        keys = decode_keys(self.k_codes[:, :, pages], self.k_scales[:, :, pages], self.key_mean, self.key_balance)
        return keys, formats.decode_rows(*(t[:, :, pages].flatten(2, 3) for t in (self.v_codes, self.v_scales)))


def decode_keys(codes: Tensor, scales: Tensor, mean: Tensor, balance: Tensor) -> Tensor:
    """Keys of whole pages in the format that the scales tell: [B, Hkv, P, 64, D/2] -> [B, Hkv, P * 64, D] f32."""
    if formats.per_channel(scales):
        return formats.decode_key_pages(codes, scales, mean)
    return formats.decode_keys(codes.flatten(2, 3), scales.flatten(2, 3), mean, balance)


@dataclass
class _Decoded:
    """The float32 rows that hang on a store."""

    k: Tensor
    v: Tensor
    versions: tuple[object, ...] | None
    pages: int = 0
    """pages 0 .. pages-1 of k and v are decoded and finite or in ``dirty``"""
    dirty: set[int] = field(default_factory=set)
    """decoded pages with a non-finite value: only then do masked rows have to be cleaned"""


def paged(keys: Tensor, store: Store) -> bool:
    """Whether keys: [B, Hkv, L, D] hold only the unfinished page (Int4Cache), not every token (StaticCache)."""
    return keys.shape[2] == PAGE and store.k_codes.shape[2] > 1


def append(store: Store, keys: Tensor, values: Tensor, first: int, last: int) -> None:
    """Quantises the pages first .. last-1 of keys and values: [B, Hkv, L, D], which hold every token.

    What is decoded stays in step: pages before ``first`` stay decoded.
    """
    if last <= first:
        return
    memo = _memo(store, keys.shape[1], keys.shape[-1])
    rows = slice(first * PAGE, last * PAGE)
    store.encode(keys[:, :, rows], values[:, :, rows], first, last)
    if memo is not None:
        memo.pages, memo.versions = min(memo.pages, first), store.versions()


def exact_rows(store: Store, cache: Tensor, x: Tensor, first: int) -> Tensor:
    """The rows of a call that are read exactly: [B, Hkv, first % 64 + S, D], the unfinished page and the call's own.

    Args:
        store: the INT4 cache.
        cache: keys or values, [B, Hkv, L, D]; all tokens, those of the call included, or the unfinished page.
        x: [B, Hkv, S, D], the rows of this call.
        first: position of the first of them.
    """
    if paged(cache, store):
        return torch.cat((cache[:, :, : first % PAGE], x.to(cache.dtype)), 2)
    return cache[:, :, first // PAGE * PAGE : first + x.shape[2]]


def extend(store: Store, keys: Tensor, values: Tensor, k: Tensor, v: Tensor, first: int) -> None:
    """Appends k and v: [B, Hkv, S, D] at position ``first`` to an INT4 cache whose exact rows are one page.

    keys, values: [B, Hkv, 64, D], of which the first ``first % 64`` rows are live. Pages that become complete are
    quantised; what is left over is the new unfinished page.
    """
    page, live = first // PAGE, first + k.shape[2]
    done = live // PAGE - page
    if not done:
        rows = slice(first % PAGE, first % PAGE + k.shape[2])
        keys[:, :, rows].copy_(k)
        values[:, :, rows].copy_(v)
        return
    k, v = exact_rows(store, keys, k, first), exact_rows(store, values, v, first)
    store.encode(k[:, :, : done * PAGE], v[:, :, : done * PAGE], page, page + done)
    keys[:, :, : live % PAGE].copy_(k[:, :, done * PAGE :])
    values[:, :, : live % PAGE].copy_(v[:, :, done * PAGE :])


def seen(
    store: Store, k_exact: Tensor, v_exact: Tensor, complete: int, keep: bool, check: bool
) -> tuple[Tensor, Tensor, bool]:
    """The keys and values that attention reads.

    Args:
        store: the INT4 cache.
        k_exact: [B, Hkv, T, D], the exact rows behind the complete pages.
        v_exact: like k_exact.
        complete: pages that were complete before this call.
        keep: whether decoded pages may be kept in float32 for the next call.
        check: whether the caller needs to know that all is finite.

    Returns:
        K and V, [B, Hkv, complete * 64 + T, D] f32, not to be written, and (only if ``check``) whether all of it is
        known to be finite.
    """
    exact = complete * PAGE
    live = exact + k_exact.shape[2]
    memo = _memo(store, k_exact.shape[1], k_exact.shape[-1]) if keep else None
    if memo is None:
        k, v = store.decode(0, complete)
        return torch.cat((k, k_exact.float()), 2), torch.cat((v, v_exact.float()), 2), False
    memo.pages = min(memo.pages, complete)  # rows behind it are overwritten with exact ones
    if memo.pages < complete:
        rows = slice(memo.pages * PAGE, exact)
        k, v = store.decode(memo.pages, complete)
        memo.k[:, :, rows], memo.v[:, :, rows] = k, v
        memo.dirty = {p for p in memo.dirty if p < memo.pages}
        if not _finite(k, v):
            memo.dirty.add(memo.pages)
        memo.pages = complete
    if memo.dirty:
        memo.dirty = {p for p in memo.dirty if p < complete}
    k, v = memo.k[:, :, exact:live].copy_(k_exact), memo.v[:, :, exact:live].copy_(v_exact)
    return memo.k[:, :, :live], memo.v[:, :, :live], check and not memo.dirty and _finite(k, v)


def _finite(k: Tensor, v: Tensor) -> bool:
    # A sum is finite only if every term is (or overflows: then a needless clean-up follows); it needs no temporary.
    return bool(torch.isfinite(k.sum() + v.sum()))


def _memo(store: Store, kv_heads: int, head_dim: int) -> _Decoded | None:
    """The decoded rows that hang on the store, emptied if somebody else wrote to it; none where it cannot be known."""
    versions = store.versions()
    if store.k_codes.device.type != "cpu" or versions is None:
        return None
    storage = store.k_codes.untyped_storage()
    memo: _Decoded | None = getattr(storage, _ATTRIBUTE, None)
    batch, _, pages = store.k_codes.shape[:3]
    shape = (batch, kv_heads, pages * PAGE, head_dim)
    if memo is None or memo.k.shape != shape:
        with torch.inference_mode(False):
            memo = _Decoded(torch.empty(shape), torch.empty(shape), versions)
        setattr(storage, _ATTRIBUTE, memo)
    elif memo.versions != versions:
        memo.pages, memo.versions = 0, versions
        memo.dirty.clear()
    return memo


def forget(k_codes: Tensor) -> None:
    """Frees the decoded rows that hang on a store; the next call decodes again."""
    storage = k_codes.untyped_storage()
    if hasattr(storage, _ATTRIBUTE):
        delattr(storage, _ATTRIBUTE)
