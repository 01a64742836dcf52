"""Packed weights dequantised once: the float32 copy that the reference multiplies with.

The copy hangs on the *storage* of the packed tensor: it is found through every alias of it, lives exactly as long, and
is neither pickled nor copied with the tensor. It is made again when the packed tensor's version moves (an in-place
write). Inference tensors have no version and count as constant: packed weights are written once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor

_ATTRIBUTE = "_fu_dense"


class _Entry:
    """What one storage carries: version, key (which weight, in which row order) and the dense tensor."""

    __slots__ = ("__weakref__", "dense", "key", "version")

    def __init__(self, key: tuple[object, ...], version: int, dense: Tensor) -> None:
        self.key, self.version, self.dense = key, version, dense


_entries: weakref.WeakSet[_Entry] = weakref.WeakSet()


def version_of(tensor: Tensor) -> int | None:
    """The in-place version of a tensor; none for inference tensors, which keep no version."""
    return None if tensor.is_inference() else tensor._version


def dense(packed: Tensor, key: tuple[object, ...], make: Callable[[], Tensor]) -> Tensor:
    """The dense form of ``packed``: the one that hangs on it, or what ``make`` returns.

    Args:
        packed: the tensor whose version decides whether the copy is still right.
        key: what else decides it (sizes, group, row order); one dense form per storage is kept.
        make: dequantises ``packed`` to [N, K] f32.
    """
    storage = packed.untyped_storage()
    entry: _Entry | None = getattr(storage, _ATTRIBUTE, None)
    version = version_of(packed) or 0
    if entry is not None and entry.version == version and entry.key == key:
        return entry.dense
    # Outside inference mode, so that the copy serves calls of either mode.
    with torch.inference_mode(False), torch.no_grad():
        entry = _Entry(key, version, make())
    setattr(storage, _ATTRIBUTE, entry)
    _entries.add(entry)
    return entry.dense


def forget(packed: Tensor) -> None:
    """Frees the dense form of ``packed``, if there is one; the next use makes it again."""
    storage = packed.untyped_storage()
    if hasattr(storage, _ATTRIBUTE):
        delattr(storage, _ATTRIBUTE)


def dense_bytes(packed: Tensor | None = None) -> int:
    """Bytes of the dense form of ``packed`` (0 where it has none), or of all dense forms that are alive."""
    if packed is None:
        return sum(e.dense.nbytes for e in _entries)
    entry: _Entry | None = getattr(packed.untyped_storage(), _ATTRIBUTE, None)
    return 0 if entry is None else entry.dense.nbytes
