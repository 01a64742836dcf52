"""What this machine can do, and whether a model's calls reach the backend.

``print(fu_compile.doctor())`` lists versions, GPU, compilers and folders; ``fu_compile.doctor(model)`` also looks at
the model. Nothing is changed. Only a call looks at the GPU, never the import.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import os
import platform
import re
import shutil
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fu_compile.report import record_of, render, table, unwrap

if TYPE_CHECKING:
    import torch

VERSION = 1
"""Version of the dictionary that :meth:`DoctorReport.as_dict` makes."""

BACKEND = "futransformer"

TESTED: dict[str, tuple[tuple[int, int], tuple[int, int]]] = {
    "torch": ((2, 11), (2, 13)),
    "transformers": ((5, 17), (5, 24)),
}
"""Oldest and newest version that the tests run with."""

LOWERINGS_BY_CAPABILITY: tuple[tuple[Callable[[tuple[int, int]], bool], str], ...] = (
    (lambda capability: capability == (9, 0), "CUDA kernels (sm_90a), Triton, reference"),
    (lambda capability: capability >= (8, 0), "Triton, reference"),
    (lambda capability: True, "reference only: compute capability 8.0 or newer is needed for kernels"),
)
"""Compute capability -> what can run there; the first that fits. Exact for 9.0: sm_90a code runs on nothing else."""


@dataclass(frozen=True)
class Check:
    """One line of the report."""

    name: str
    value: str
    status: str = "ok"
    """``ok``, ``warning`` (works, with a limit) or ``problem`` (will not do what was asked)."""
    advice: str = ""


class DoctorReport:
    """The checks. ``str()`` is a table, :meth:`as_dict` JSON, :attr:`ok` whether nothing is a problem."""

    def __init__(self, checks: list[Check]) -> None:
        self.checks = checks

    @property
    def ok(self) -> bool:
        """Whether no check is a problem."""
        return not self.problems

    @property
    def problems(self) -> list[Check]:
        """The checks that are problems."""
        return [check for check in self.checks if check.status == "problem"]

    def __getitem__(self, name: str) -> Check:
        return next(check for check in self.checks if check.name == name)

    def __contains__(self, name: str) -> bool:
        return any(check.name == name for check in self.checks)

    def as_dict(self) -> dict[str, Any]:
        """Everything, in types that JSON has, with a version."""
        return {"version": VERSION, "ok": self.ok, "checks": [asdict(check) for check in self.checks]}

    def to_text(self, width: int | None = None) -> str:
        """The text of ``str()``, at most ``width`` columns wide."""
        rows = [(c.status, c.name, c.value) for c in self.checks]
        advice = [f"{c.name}: {c.advice}" for c in self.checks if c.advice]
        closing = ["", "what to do", *advice] if advice else []
        return render([table("FuTransformer doctor", ("status", "what", "found"), rows), *closing], width)

    def __str__(self) -> str:
        return self.to_text()

    def __repr__(self) -> str:
        return f"<DoctorReport: {len(self.checks)} checks, {len(self.problems)} problems>"


def doctor(model: torch.nn.Module | None = None) -> DoctorReport:
    """Looks at the machine and, with a model, at whether its calls reach the backend.

    Args:
        model: a model, compiled or not, or the wrapper that ``torch.compile(model)`` returns.

    Raises:
        OptionError: if ``model`` is not a module.
    """
    checks = [*_software(), *_machine()]
    if model is not None:
        checks += _model(model)
    return DoctorReport(checks)


# ---- the machine ---------------------------------------------------------------------------------------------------


def installed(distribution: str) -> str | None:
    """Version of an installed distribution, or none; nothing is imported."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def version_message() -> str | None:
    """One sentence with both versions if torch or transformers lies outside the tested window; none otherwise."""
    found = {name: installed(name) for name in TESTED}
    outside = [name for name, version in found.items() if version and not _in_window(version, *TESTED[name])]
    if not outside:
        return None
    have = " with ".join(f"{name} {version or '(not installed)'}" for name, version in found.items())
    window = " and ".join(f"{name} {_dotted(low)} to {_dotted(high)}" for name, (low, high) in TESTED.items())
    return f"{have} is outside what was tested: {window}"


def _in_window(version: str, low: tuple[int, int], high: tuple[int, int]) -> bool:
    numbers = re.findall(r"\d+", version)
    return len(numbers) >= 2 and low <= (int(numbers[0]), int(numbers[1])) <= high


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def _software() -> Iterator[Check]:
    yield Check("futransformer", installed("futransformer") or "run from a source tree")
    yield Check("python", f"{platform.python_version()} on {sys.platform} {platform.machine()}")
    message = version_message()
    status = "warning" if message else "ok"
    yield Check("torch", installed("torch") or "missing", status)
    have = installed("transformers")
    yield Check("transformers", have or "missing", status if have else "problem", "" if have else _get("transformers"))
    if message:
        yield Check("tested versions", message, "warning", "Install versions inside the window, or run the tests here.")
    names = {entry.name for entry in importlib.metadata.entry_points(group="torch_dynamo_backends")}
    if BACKEND in names:
        yield Check("backend", f"{BACKEND!r} is registered with torch.compile")
    else:
        yield Check("backend", f"{BACKEND!r} is not registered", "problem", "Install the package: pip install -e .")


def _machine() -> Iterator[Check]:
    import torch

    gpu = torch.cuda.is_available()
    if not gpu:
        built = torch.version.cuda
        found = f"none (torch was built for CUDA {built})" if built else "none (torch was built without CUDA)"
        yield Check("gpu", f"{found}: the reference lowerings run on the CPU")
    for index in range(torch.cuda.device_count() if gpu else 0):
        properties = torch.cuda.get_device_properties(index)
        capability = (properties.major, properties.minor)
        runs = next(text for fits, text in LOWERINGS_BY_CAPABILITY if fits(capability))
        value = f"{properties.name}, compute capability {_dotted(capability)}: {runs}"
        yield Check(f"gpu {index}", value, "ok" if capability >= (8, 0) else "warning")
    needed = "warning" if gpu else "ok"
    for name, distributions in (
        ("triton", ("triton", "triton-windows")),
        ("cuda-core", ("cuda-core",)),
        ("nvrtc", ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu13", "nvidia-cuda-nvrtc-cu12")),
    ):
        have = next((version for d in distributions if (version := installed(d))), None)
        missing = "missing" if gpu else "missing (only used with a GPU)"
        yield Check(name, have or missing, "ok" if have else needed, "" if have or not gpu else _get(distributions[0]))
    compiler = next((path for c in (os.environ.get("CXX"), "g++", "clang++") if c and (path := shutil.which(c))), None)
    yield (
        Check("c++ compiler", compiler)
        if compiler
        else Check(
            "c++ compiler",
            "missing: Inductor needs one on a CPU",
            "warning" if gpu else "problem",
            "Install g++ or clang++ (apt install g++, xcode-select --install) or use rest='eager'.",
        )
    )
    yield _cache_folder()


def _cache_folder() -> Check:
    folder = Path(os.environ.get("FU_CACHE_DIR") or Path("~/.cache/futransformer")).expanduser()
    # The folder may not be there yet: then what counts is the nearest one that is.
    nearest = next((p for p in (folder, *folder.parents) if p.exists()), Path("/"))
    if nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK):
        return Check("cache folder", f"{folder} (writable)")
    advice = "Set FU_CACHE_DIR to a folder that you can write; until then a temporary folder is used."
    return Check("cache folder", f"{folder} cannot be written", "warning", advice)


def _get(package: str) -> str:
    return f"pip install {package}"


# ---- the model -----------------------------------------------------------------------------------------------------

_IN_PLACE = f'model.compile(backend="{BACKEND}")'


def _model(model: Any) -> Iterator[Check]:
    inner = unwrap(model)
    yield Check("model", type(inner).__name__)
    yield _reached(model, inner)
    record = record_of(inner)
    calls = record.counters["calls"] if record else 0
    yield Check("calls so far", f"{calls} calls of {len(record.graphs) if record else 0} graphs reached the backend")
    if inner.training:
        yield Check("mode", "training", "problem", "Call model.eval().")
    wanting = [name for name, p in inner.named_parameters() if p.requires_grad]
    if wanting:
        value = f"{len(wanting)} parameters require grad ({wanting[0]}, ...)"
        yield Check("gradients", value, "warning", "Call it under torch.no_grad(), or model.requires_grad_(False).")
    yield from _placement(inner)


def _placement(model: torch.nn.Module) -> Iterator[Check]:
    tensors = dict(model.named_parameters())
    hooked = [name for name, module in model.named_modules() if _offloads(getattr(module, "_hf_hook", None))]
    if hooked:
        value = f"accelerate moves the weights of {hooked[0] or 'the model'} around every call"
        yield Check("offload", value, "problem", "Load the model onto one device, for example device_map='cuda'.")
    elif meta := [name for name, p in tensors.items() if p.is_meta]:
        value = f"{len(meta)} parameters have no values (meta device), first {meta[0]}"
        yield Check("parameters", value, "problem", "Load the weights first; explain works without.")
    devices = sorted({str(p.device) for p in tensors.values()})
    if len(devices) > 1:
        value = f"the parameters are spread over {', '.join(devices)}"
        yield Check("devices", value, "problem", "Load the model onto one device.")
    dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in tensors.values()})
    usual = set(dtypes) <= {"bfloat16", "float16", "float32"}
    yield Check(
        "dtype", ", ".join(dtypes) or "no parameters", "ok" if usual and len(dtypes) <= 1 else "warning",
        "" if usual else "Load the model with dtype=torch.bfloat16.",
    )  # fmt: skip


def _offloads(hook: Any) -> bool:
    """Whether an accelerate hook, or one of a sequence of them, keeps the weights elsewhere between calls."""
    return hook is not None and any(
        getattr(h, "offload", False) or getattr(h, "weights_map", None) is not None
        for h in getattr(hook, "hooks", (hook,))
    )


def _reached(model: Any, inner: torch.nn.Module) -> Check:
    name = "reaches the backend"
    in_place = backend_of(inner._compiled_call_impl) if inner._compiled_call_impl is not None else None
    forward = backend_of(vars(inner)["forward"]) if "forward" in vars(inner) else None
    for backend, how in ((in_place, "model.compile() in place"), (forward, "a compiled model.forward")):
        if backend == BACKEND:
            return Check(name, f"yes, generate() too: {how}")
    wrapper = backend_of(model) if model is not inner else None
    if wrapper == BACKEND:
        value = "only calls of the wrapper: wrapper.generate() runs uncompiled, PyTorch hands it to the inner model"
        return Check(name, value, "problem", f"Instead of torch.compile(model): {_IN_PLACE}")
    parts = [n for n, m in inner.named_modules() if n and m._compiled_call_impl and backend_of(m._compiled_call_impl)]
    parts = [n for n in parts if backend_of(inner.get_submodule(n)._compiled_call_impl) == BACKEND]
    if parts:
        return Check(name, f"only inside {', '.join(parts[:3])}", "warning", f"For the whole model: {_IN_PLACE}")
    other = next((b for b in (in_place, forward, wrapper) if b), None)
    value = f"no: compiled with backend {other!r}" if other else "no: the model is not compiled"
    return Check(name, value, "problem", _IN_PLACE)


def backend_of(compiled: Any) -> str | None:
    """Name of the backend of something that ``torch.compile`` made (a function or a wrapper), or none."""
    from torch._dynamo.eval_frame import innermost_backend

    context = getattr(compiled, "dynamo_ctx", None)
    cells = [cell.cell_contents for cell in getattr(compiled, "__closure__", None) or () if _filled(cell)]
    contexts = itertools.chain(
        [context], (c for c in cells if hasattr(c, "callback") and hasattr(c, "compiler_config"))
    )
    callback = next((c.callback for c in contexts if c is not None), None)
    if not callable(callback):
        return None
    backend = innermost_backend(callback)
    # torch.compile(mode=..., options=...) hides the backend behind a wrapper that knows its name.
    name = getattr(backend, "compiler_name", None) or getattr(backend, "__name__", None) or type(backend).__name__
    return str(name)


def _filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # an empty cell
        return False


class _CallableModule(types.ModuleType):
    """Lets ``fu_compile.doctor`` be the function and the module at once."""

    def __call__(self, model: torch.nn.Module | None = None) -> DoctorReport:
        return doctor(model)


_CallableModule.__call__.__doc__ = doctor.__doc__
sys.modules[__name__].__class__ = _CallableModule
