"""The lowerings: one file, one way to run a family of operators.

``TABLE`` is the whole choice: for each operator the lowerings in order of preference, each with the devices it runs on
and ``accepts(*arguments) -> reason or None``. :func:`choose` walks it and says why it passed over what it passed over.
Importing this package registers one implementation per operator with ``fu_compile.ops.library``; it looks into the
same table at every call, so a graph never names a kernel.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from fu_compile.lowerings import (
    attention_int4_sm90,
    cpu_linear,
    cublas_prefill,
    gemm_sm90,
    linear_fp8_sm90,
    linear_int4_sm90,
    qkv_rope_sm90,
    reference_attention,
    reference_block,
    reference_linear,
    rms_norm_sm90,
)

from fu_compile import ops
from fu_compile.errors import LoweringError

NAMES = ("cuda", "triton", "cpu", "reference")
"""Every name a lowering can have, best first."""


def _anything(*args: Any) -> None:
    """Accepts every argument."""
    return


@dataclass(frozen=True)
class Lowering:
    """One way to run one operator."""

    name: str
    """``"reference"``, ``"cpu"``, ``"triton"`` or ``"cuda"``"""
    launch: Callable[..., Any]
    """takes the operator's arguments in schema order"""
    devices: tuple[str, ...] = ()
    """device types it runs on; none: all of them"""
    accepts: Callable[..., str | None] = _anything
    """the operator's arguments (real or fake tensors) -> why it cannot run them, or none"""

    def refuses(self, device_type: str, args: tuple[Any, ...]) -> str | None:
        """Why this lowering cannot run these arguments on this device, or none."""
        if self.devices and device_type not in self.devices:
            return f"runs on {', '.join(self.devices)} and not on {device_type}"
        return self.accepts(*args)


_CUDA: dict[str, Any] = {
    "linear_int4": linear_int4_sm90,
    "linear_fp8": linear_fp8_sm90,
    "attention_int4": attention_int4_sm90,
    "rms_norm": rms_norm_sm90,
}


def _candidates(name: str, reference: Callable[..., Any]) -> tuple[Lowering, ...]:
    """The lowerings of one operator, in order of preference; the reference takes everything and stands last."""
    found = []
    if name in _CUDA:
        found.append(Lowering("cuda", _CUDA[name].launch, ("cuda",), _CUDA[name].accepts))
    found += [
        Lowering("cuda", module.LAUNCH[name], ("cuda",), module.ACCEPTS[name])
        for module in (gemm_sm90, qkv_rope_sm90, cublas_prefill)
        if name in module.LAUNCH
    ]
    if name in cpu_linear.LAUNCH:
        found.append(Lowering("cpu", cpu_linear.LAUNCH[name], ("cpu",), cpu_linear.accepts))
    return (*found, Lowering("reference", reference))


TABLE: dict[str, tuple[Lowering, ...]] = {
    name: _candidates(name, launch)
    for module in (reference_block, reference_linear, reference_attention)
    for name, launch in module.LAUNCH.items()
}
"""Operator name -> its lowerings, in order of preference."""

_asked: contextvars.ContextVar[str] = contextvars.ContextVar("fu_compile_lowering", default="auto")


@contextlib.contextmanager
def using(lowering: str) -> Iterator[None]:
    """Operators called inside use this lowering (``"auto"``: the best that accepts them).

    Raises:
        LoweringError: there is no lowering of that name.
    """
    _check_name(lowering)
    token = _asked.set(lowering)
    try:
        yield
    finally:
        _asked.reset(token)


def _check_name(lowering: str) -> None:
    if lowering != "auto" and lowering not in NAMES:
        raise LoweringError(f"there is no lowering {lowering!r}; there are auto, {', '.join(NAMES)}")


def choose(op: str, device_type: str, *args: Any, lowering: str = "auto") -> tuple[Lowering, list[tuple[str, str]]]:
    """The lowering that runs ``op``, and what was passed over for which reason.

    Args:
        op: short operator name, a key of ``fu_compile.ops.SCHEMAS``.
        device_type: ``"cpu"``, ``"cuda"``, ...
        args: the operator's arguments, real or fake.
        lowering: ``"auto"`` or one of NAMES.

    Raises:
        LoweringError: no such operator or lowering, or the one that was asked for does not take these arguments.
    """
    _check_name(lowering)
    if op not in TABLE:
        raise LoweringError(f"there is no operator {op!r} to lower")
    passed: list[tuple[str, str]] = []
    for candidate in TABLE[op]:
        if lowering not in ("auto", candidate.name):
            passed.append((candidate.name, f"lowering={lowering!r} was asked for"))
            continue
        reason = candidate.refuses(device_type, args)
        if reason is None:
            return candidate, passed
        passed.append((candidate.name, reason))
    have = "; ".join(f"{name}: {reason}" for name, reason in passed)
    which = "" if lowering == "auto" else f"{lowering} "
    raise LoweringError(f"{op} has no {which}lowering for these arguments on {device_type} ({have})")


def _implementation(name: str) -> Callable[..., Any]:
    """The registered kernel: straight to the only lowering where there is one, through :func:`choose` otherwise."""
    candidates = TABLE[name]
    sole = candidates[0].launch if len(candidates) == 1 and not candidates[0].devices else None

    @functools.wraps(candidates[-1].launch)
    def run(*args: Any) -> Any:
        asked = _asked.get()
        if asked == "auto":
            if sole is not None and candidates[0].accepts is _anything:
                return sole(*args)
            device = next(a for a in args if isinstance(a, torch.Tensor)).device.type
            for candidate in candidates:
                if (not candidate.devices or device in candidate.devices) and candidate.accepts(*args) is None:
                    return candidate.launch(*args)
        first = next(a for a in args if isinstance(a, torch.Tensor))
        return choose(name, first.device.type, *args, lowering=asked)[0].launch(*args)

    return run


_missing = ops.SCHEMAS.keys() - TABLE.keys()
if _missing:
    raise LoweringError(f"operators without a lowering: {', '.join(sorted(_missing))}")
for _name in ops.SCHEMAS:
    ops.library.impl(_name, _implementation(_name), "CompositeExplicitAutograd")
