"""Registers our quantiser with transformers when both have been imported, without importing either for the other.

transformers finds quantisers in a dictionary of its module ``transformers.quantizers.auto`` and has no entry point for
more. An import hook waits for that module, registers behind it and removes itself; where it is there already,
registering is all that happens.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

REGISTRY = "transformers.quantizers.auto"


def install() -> None:
    """Registers now, or as soon as transformers' registry is imported."""
    if REGISTRY in sys.modules:
        _register()
    else:
        sys.meta_path.insert(0, _AfterImport())


class _AfterImport:
    """A finder that finds nothing itself: it puts :func:`_register` behind the loading of the registry."""

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The spec that the other finders give, for the registry; none for any other module."""
        if name != REGISTRY:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                _register()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _register() -> None:
    try:
        importlib.import_module("fu_compile.hf_quantizer")  # registers at its end, also where its import led here
    except ImportError as error:  # a transformers outside the support window must still be importable
        from fu_compile.errors import FuWarning

        warnings.warn(f"packed models cannot be loaded with this transformers: {error}", FuWarning, stacklevel=2)
