"""The errors a user can meet: one class each, with a stable code, what happened, where, and what to do.

``str(error)`` prints all of it::

    [FU-OPT-001] there is no option 'prefil'
      where:      keyword of fu_compile.compile
      what to do: did you mean 'prefill'?

Codes never change their meaning; :data:`CODES` is the table that the documentation prints.

An error raised inside a ``torch.compile`` backend is normally wrapped into Dynamo's ``BackendCompilerFailed``, so that
a user's ``except fu_compile.FuError`` would miss it. :func:`through_dynamo` lets it arrive as what it is.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

CODES: dict[str, str] = {
    "FU-OPT-001": "there is no option, mode or environment variable of that name",
    "FU-OPT-002": "an option has a value that it cannot take",
    "FU-OPT-003": "an entry of `overrides` is not a pair (layer name pattern, precision)",
    "FU-OPT-004": "a saved options dictionary has another version or is not a dictionary of options",
    "FU-TRN-001": "the model is in training mode",
    "FU-GRD-001": "gradients are required through weights or inputs that would be quantised",
    "FU-MET-001": "a parameter is on the meta device: it has a shape and no values",
    "FU-OFF-001": "a parameter is offloaded: a hook moves it in and out around every call",
    "FU-BLK-001": "no Llama block was recognised in the model",
    "FU-DTY-001": "the model has a dtype, or a mixture of dtypes, that the chosen precision cannot run",
    "FU-HDM-001": "the head dimension cannot be rotated or packed (it is odd, or has no power-of-two divisor)",
    "FU-CLN-001": "the call would write past the end of the key/value cache",
    "FU-CMM-001": "the key/value cache has another batch size, shape, dtype or device than the call",
    "FU-CAP-001": "a CUDA graph of this call would need something that is known on the device alone",
    "FU-FMT-001": "a packed tensor does not have the layout that its format prescribes",
    "FU-LOW-001": "no lowering accepts an operator on this device, or the requested one does not",
    "FU-WCH-001": "weights changed after they were packed into something that still holds the old ones",
    "FU-DEP-001": "a package, compiler or driver that this call needs is missing or does not fit",
    "FU-GEN-001": "`fu_compile.generate` was asked for something that it cannot do",
    "FU-DAT-001": "a model, download or data set cannot be had, or is not the one it should be",
}
"""Every code and its meaning. A code is never reused for something else."""


class FuError(Exception):
    """Base of every error that FuTransformer raises on purpose.

    Args:
        what: one sentence: what happened, with the value and the limit.
        where: layer path, option name or ``file:line``; empty where there is none.
        advice: what to do about it; the class has a default.
        code: a key of :data:`CODES`; the class has a default.
    """

    code: str = ""
    advice: str = ""

    def __init__(self, what: str, *, where: str = "", advice: str | None = None, code: str | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.advice = type(self).advice if advice is None else advice
        self.code = type(self).code if code is None else code
        if self.code not in CODES and self.code:
            raise KeyError(f"{self.code!r} is not in fu_compile.errors.CODES")

    def __str__(self) -> str:
        # Built from the attributes: Dynamo rewrites `args[0]` of what passes through it.
        lines = [f"[{self.code}] {self.what}" if self.code else self.what]
        lines += [f"  where:      {self.where}"] if self.where else []
        lines += [f"  what to do: {self.advice}"] if self.advice else []
        return "\n".join(lines)

    def as_dict(self) -> dict[str, str]:
        """Class name, code, what, where and advice, for logs and JSON."""
        name = _named(type(self)).__name__
        return {"error": name, "code": self.code, "what": self.what, "where": self.where, "advice": self.advice}

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions pickle as `cls(*args)`, which would lose the keyword arguments.
        return _rebuild, (_named(type(self)), self.what, self.where, self.advice, self.code)


class OptionError(FuError, ValueError):
    """An option that does not exist or has a value it cannot take. Also a ``ValueError``."""

    code = "FU-OPT-002"
    advice = "docs/options.md lists every option and its values."


class TrainingModeError(FuError):
    """The model is in training mode: dropout and weight updates make packed weights wrong."""

    code = "FU-TRN-001"
    advice = "Call model.eval() first, or leave this model uncompiled while you train it."


class GradientError(FuError):
    """Gradients are required through something that has no backward."""

    code = "FU-GRD-001"
    advice = "Call the model under torch.no_grad() or torch.inference_mode(), or model.requires_grad_(False)."


class MetaParameterError(FuError):
    """A parameter is on the meta device, so there is nothing to pack."""

    code = "FU-MET-001"
    advice = (
        "Load the weights first (from_pretrained, or to_empty and load_state_dict); fu_compile.explain works without."
    )


class OffloadedParameterError(FuError):
    """A parameter is moved in and out by accelerate's hooks, so no compiled graph can hold it."""

    code = "FU-OFF-001"
    advice = "Load the model onto one device: from_pretrained(..., device_map='cuda') or no device_map at all."


class NoLlamaBlockError(FuError):
    """No decoder block of the Llama kind was recognised, so there is nothing to do for this backend."""

    code = "FU-BLK-001"
    advice = "print(fu_compile.explain(model)) lists the nearest misses; backend='inductor' compiles any other model."


class DtypeError(FuError):
    """A dtype that the chosen precision cannot run."""

    code = "FU-DTY-001"
    advice = "Load the model with dtype=torch.bfloat16 (or float16, float32), the same for all decoder layers."


class HeadDimError(FuError):
    """A head dimension that cannot be rotated or packed."""

    code = "FU-HDM-001"
    advice = "Use kv_cache='model', which keeps the model's own cache."


class CacheLengthError(FuError, IndexError):
    """The call would write past the end of the cache. Raised before anything is written. Also an ``IndexError``."""

    code = "FU-CLN-001"
    advice = "Make the cache longer (max_cache_len), or generate fewer tokens (max_new_tokens)."


class CacheMismatchError(FuError, ValueError):
    """The cache does not fit the call: batch size, shape, dtype or device. Also a ``ValueError``."""

    code = "FU-CMM-001"
    advice = "Make the cache for this model, batch size and device, or pass none and let generate() make it."


class CaptureError(FuError, RuntimeError):
    """The call cannot be captured in a CUDA graph. Also a ``RuntimeError``, as what PyTorch raises in a capture."""

    code = "FU-CAP-001"
    advice = "Call cache.reset() inside torch.cuda.graph, before the model, or capture decode steps alone."


class FormatError(FuError, ValueError):
    """A packed tensor that does not have the layout of its format. Also a ``ValueError``."""

    code = "FU-FMT-001"
    advice = "Pack it again with this version; layouts are in fu_compile/formats.py."


class LoweringError(FuError):
    """No lowering accepts the operator on this device, or the requested one does not."""

    code = "FU-LOW-001"
    advice = "Use lowering='auto' or lowering='reference'; print(fu_compile.doctor()) says what this machine has."


class WeightsChangedError(FuError):
    """Weights changed after packing, and what was made from the old ones cannot be updated."""

    code = "FU-WCH-001"
    advice = "Compile the model again after the change: fu_compile.compile(model)."


class MissingDependencyError(FuError, ImportError):
    """A package, compiler or driver is missing or does not fit. Also an ``ImportError``."""

    code = "FU-DEP-001"
    advice = "print(fu_compile.doctor()) says what is missing and how to get it."


class GenerateError(FuError, ValueError):
    """``fu_compile.generate`` was asked for something that it cannot do. Also a ``ValueError``."""

    code = "FU-GEN-001"
    advice = "docs/generate.md lists what it runs and what it leaves to transformers."


class DataError(FuError):
    """A model file, download or data set that cannot be had, or whose checksum says that it is another one."""

    code = "FU-DAT-001"
    advice = "docs/numerics.md names the data sets, their checksums and where they are looked for."


class FuWarning(UserWarning):
    """What would otherwise be silent: a fallback, a damaged cache entry, an untested version."""


def classes() -> dict[str, type[FuError]]:
    """Every public error class by its name, :class:`FuError` included."""
    return {"FuError": FuError} | {c.__name__: c for c in FuError.__subclasses__() if c.__module__ == __name__}


def plain(error: FuError) -> FuError:
    """``error`` without what :func:`through_dynamo` added to its class."""
    cls = _named(type(error))
    return error if type(error) is cls else _rebuild(cls, error.what, error.where, error.advice, error.code)


@contextmanager
def through_dynamo() -> Iterator[None]:
    """Inside a backend: lets a :class:`FuError` reach the user's ``except`` instead of ``BackendCompilerFailed``.

    Dynamo passes exactly one family of exceptions through unwrapped, ``ShortenTraceback``; the error is raised again as
    an instance of both its own class and that family. Everything else is left alone.
    """
    try:
        yield
    except FuError as error:
        cls: Any = _surfaced(_named(type(error)))  # type: ignore[arg-type]
        raise cls(error.what, error.where, error.advice, error.code).with_traceback(error.__traceback__) from None


def _named(cls: type[FuError]) -> type[FuError]:
    return getattr(cls, "_public", cls)


def _rebuild(cls: type[FuError], what: str, where: str, advice: str, code: str) -> FuError:
    return cls(what, where=where, advice=advice, code=code)


@functools.cache
def _surfaced(cls: type[FuError]) -> type[FuError]:
    from torch._dynamo.exc import ShortenTraceback  # heavy, and only a running Dynamo gets here

    def init(self: Any, what: str, where: str, advice: str, code: str) -> None:
        ShortenTraceback.__init__(self, what, first_useful_frame=None)
        self.what, self.where, self.advice, self.code = what, where, advice, code
        self.msg = what  # an ImportError has this field, and Dynamo searches it

    body = {"__init__": init, "__module__": cls.__module__, "__qualname__": cls.__qualname__, "_public": cls}
    return type(cls.__name__, (cls, ShortenTraceback), body)
