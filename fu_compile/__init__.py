"""FuTransformer: a ``torch.compile`` backend that runs Llama-style models with FP8 prefill and INT4 decode.

    model.compile(backend="futransformer")      # or fu_compile.compile(model, decode="bf16")
    model.generate(**inputs, cache_implementation="static")
    print(fu_compile.report(model))

Importing this package imports nothing else, not even torch: every name below is looked up when it is first used.
``from_pretrained`` of a packed model works from then on: the quantiser is registered as soon as transformers has been
imported, whichever of the two comes first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fu_compile import registry as _registry

if TYPE_CHECKING:
    from fu_compile import errors as errors
    from fu_compile.backend import compile as compile
    from fu_compile.doctor import doctor as doctor
    from fu_compile.errors import FuError as FuError
    from fu_compile.errors import FuWarning as FuWarning
    from fu_compile.fp8 import calibrate_fp8 as calibrate_fp8
    from fu_compile.generate import generate as generate
    from fu_compile.hf_quantizer import load as load
    from fu_compile.hf_quantizer import save as save
    from fu_compile.int4_cache import Int4Cache as Int4Cache
    from fu_compile.int4_cache import rotate_values as rotate_values
    from fu_compile.keys import KeyTables as KeyTables
    from fu_compile.keys import calibrate_keys as calibrate_keys
    from fu_compile.options import Options as Options
    from fu_compile.quantize import quantize as quantize
    from fu_compile.report import explain as explain
    from fu_compile.report import report as report

    __version__: str

# `report`, `doctor`, `generate` and `quantize` are modules that can be called: module and main function bear one name,
# and whichever import came first, `fu_compile.report(model)` and `from fu_compile.report import Report` both work.
_PUBLIC: dict[str, tuple[str, str | None]] = {
    "FuError": ("errors", "FuError"),
    "FuWarning": ("errors", "FuWarning"),
    "Int4Cache": ("int4_cache", "Int4Cache"),
    "KeyTables": ("keys", "KeyTables"),
    "Options": ("options", "Options"),
    "calibrate_fp8": ("fp8", "calibrate_fp8"),
    "calibrate_keys": ("keys", "calibrate_keys"),
    "compile": ("backend", "compile"),
    "doctor": ("doctor", None),
    "errors": ("errors", None),
    "explain": ("report", "explain"),
    "generate": ("generate", None),
    "load": ("hf_quantizer", "load"),
    "quantize": ("quantize", None),
    "report": ("report", None),
    "rotate_values": ("int4_cache", "rotate_values"),
    "save": ("hf_quantizer", "save"),
}

__all__ = [*_PUBLIC, "__version__"]

_registry.install()


def __getattr__(name: str) -> Any:
    import importlib

    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            value: Any = version("futransformer")
        except PackageNotFoundError:  # run from a source tree that was never installed
            value = "0+unknown"
    elif name in _PUBLIC:
        module, attribute = _PUBLIC[name]
        value = importlib.import_module(f"{__name__}.{module}")
        value = value if attribute is None else getattr(value, attribute)
    else:
        raise AttributeError(f"module 'fu_compile' has no attribute {name!r}; it has {', '.join(__all__)}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
