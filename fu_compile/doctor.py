"""What this machine can do, and whether a model's calls reach the backend.

``print(fu_compile.doctor())`` lists versions, GPU, compilers and folders, and models whose calls never arrived;
``fu_compile.doctor(model)`` also looks at the model: which compiler owns its calls, whether prefill and decode arrive,
growing caches, and how near Dynamo is to giving up. Nothing is changed and nothing is run. What it finds comes with the
line that mends it. Only a call looks at the GPU, never the import.
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

from fu_compile.report import models_without_calls, records_of, render, table, unwrap

if TYPE_CHECKING:
    import torch

    from fu_compile.report import ModelReport

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

    def to_html(self, path: str | Path) -> Path:
        """Writes one self-contained page and returns its path."""
        from fu_compile.report_html import doctor_page

        target = Path(path)
        target.write_text(doctor_page(self), encoding="utf-8")
        return target

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
    checks += _processwide() if model is None else _model(model)
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
    records = records_of(inner)
    yield Check("model", type(inner).__name__)
    compilers = _compilers(model, inner)
    yield _reached(compilers, inner)
    yield from _stacked(compilers)
    yield from _switched_off()
    yield _calls(compilers, records)
    yield from _fallen_back(records)
    yield from _eager_prefill(compilers, records)
    yield from _growing_cache(records)
    yield from _recompilations(inner)
    if inner.training:
        yield Check("mode", "training", "problem", "Call model.eval().")
    wanting = [name for name, p in inner.named_parameters() if p.requires_grad]
    if wanting:
        value = f"{len(wanting)} parameters require grad ({wanting[0]}, ...)"
        yield Check("gradients", value, "warning", "Call it under torch.no_grad(), or model.requires_grad_(False).")
    yield from _placement(inner)


def _processwide() -> Iterator[Check]:
    yield from _switched_off()
    for name in models_without_calls():
        value = f"{name} was compiled with fu_compile.compile and no call has reached the backend"
        yield Check("calls", value, "warning", f"print(fu_compile.doctor(model)) says why; usually: {_IN_PLACE}")


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


# ---- who compiles it -----------------------------------------------------------------------------------------------

_FORWARD, _INPLACE, _WRAPPER, _GENERATE = (
    "model.forward = torch.compile(...)",
    "model.compile()",
    "torch.compile(model)",
    "generate(compile_config=...)",
)


def _compilers(model: Any, inner: torch.nn.Module) -> dict[str, str]:
    """How the model was compiled -> backend, from the inside to the outside: the first one gets the graphs."""
    found = {
        _FORWARD: backend_of(vars(inner)["forward"]) if "forward" in vars(inner) else None,
        _INPLACE: backend_of(inner._compiled_call_impl) if inner._compiled_call_impl is not None else None,
        _WRAPPER: backend_of(model) if model is not inner else None,
        # transformers keeps what generate() compiled for its decode steps here.
        _GENERATE: backend_of(vars(inner)["_compiled_call"]) if "_compiled_call" in vars(inner) else None,
    }
    return {how: backend for how, backend in found.items() if backend is not None}


def _owner(compilers: dict[str, str]) -> tuple[str, str]:
    return next(iter(compilers.items()), ("", ""))


def _reached(compilers: dict[str, str], inner: torch.nn.Module) -> Check:
    name = "reaches the backend"
    how, owner = _owner(compilers)
    if owner == BACKEND:
        if how == _WRAPPER:
            value = "only calls of the wrapper: wrapper.generate() runs uncompiled, PyTorch hands it to the inner model"
            return Check(name, value, "problem", f"Instead of torch.compile(model): {_IN_PLACE}")
        if how == _GENERATE:
            value = f"only decode steps: {how} leaves the prefill uncompiled"
            return Check(name, value, "warning", f"For prefill and decode: {_IN_PLACE}")
        where = "model.compile() in place" if how == _INPLACE else "a compiled model.forward"
        return Check(name, f"yes, generate() too: {where}")
    parts = [n for n, m in inner.named_modules() if n and m._compiled_call_impl and backend_of(m._compiled_call_impl)]
    parts = [n for n in parts if backend_of(inner.get_submodule(n)._compiled_call_impl) == BACKEND]
    if parts and not owner:
        return Check(name, f"only inside {', '.join(parts[:3])}", "warning", f"For the whole model: {_IN_PLACE}")
    value = f"no: compiled with backend {owner!r}" if owner else "no: the model is not compiled"
    return Check(name, value, "problem", _IN_PLACE)


def _stacked(compilers: dict[str, str]) -> Iterator[Check]:
    # What generate() compiles around a model compiled in place never gets a graph (tests/cases, B02): no finding.
    mine = {how: backend for how, backend in compilers.items() if how != _GENERATE}
    if len(set(mine.values())) < 2:
        return
    how, owner = _owner(mine)
    listed = ", around it ".join(f"{how} with {backend!r}" for how, backend in mine.items())
    value = f"{len(mine)} stacked: {listed}; the inner one gets every graph"
    unwanted = how if owner != BACKEND else next(h for h, b in mine.items() if b != BACKEND)
    advice = f"Keep one: leave out {unwanted} with backend {mine[unwanted]!r}."
    yield Check("compilers", value, "warning" if owner == BACKEND else "problem", advice)


def _switched_off() -> Iterator[Check]:
    import torch

    stance = str(torch._dynamo.eval_frame._stance.stance)
    if torch._dynamo.config.disable:
        advice = "Unset TORCH_COMPILE_DISABLE and TORCHDYNAMO_DISABLE, or torch._dynamo.config.disable = False."
        yield Check("dynamo", "switched off: every compiled model runs uncompiled", "problem", advice)
    elif stance in ("force_eager", "eager_on_recompile"):
        when = "every call runs" if stance == "force_eager" else "calls that need a new graph run"
        yield Check(
            "dynamo", f"stance {stance!r}: {when} uncompiled", "problem", 'torch.compiler.set_stance("default")'
        )


# ---- what its calls did --------------------------------------------------------------------------------------------


def _calls(compilers: dict[str, str], records: list[ModelReport]) -> Check:
    calls = sum(record.counters["calls"] for record in records)
    value = f"{calls} calls of {sum(len(record.graphs) for record in records)} graphs reached the backend"
    if calls or BACKEND not in compilers.values():
        return Check("calls so far", value)
    # The model is compiled: either it was never called, or its calls went somewhere else.
    advice = "Call model(...) or model.generate(...), not model.forward(...) or a part of it, and look again."
    return Check("calls so far", value, "warning", advice)


def _fallen_back(records: list[ModelReport]) -> Iterator[Check]:
    found = [entry for record in records for entry in record.fallbacks]
    if found:
        reason, where = found[0]
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        value = f"left to the general path: {reason}" + f" at {where}" * bool(where) + more
        yield Check("fallbacks", value, "warning", "print(fu_compile.report(model)) lists them; strict=True raises.")


def _eager_prefill(compilers: dict[str, str], records: list[ModelReport]) -> Iterator[Check]:
    prefill, decode = (sum(record.counters[f"{phase}_calls"] for record in records) for phase in ("prefill", "decode"))
    how, owner = _owner(compilers)
    # Compiled in place, prompts of one token are decode steps too: nothing ran uncompiled.
    if decode and not prefill and not (owner == BACKEND and how in (_FORWARD, _INPLACE)):
        value = f"ran uncompiled: {decode} decode steps reached the backend and no prefill"
        yield Check("prefill", value, "warning", f"Instead of a compile_config: {_IN_PLACE}")


def _growing_cache(records: list[ModelReport]) -> Iterator[Check]:
    graphs = [graph for record in records for graph in record.graphs if graph.operators()["kv_cat"]]
    calls = sum(graph.calls for graph in graphs if graph.phase == "decode")
    if calls:
        steps = "1 decode step" if calls == 1 else f"{calls} decode steps"
        value = f"{steps} copied a DynamicCache, which grows with every token and is never INT4"
        yield Check("cache", value, "warning", 'model.generate(..., cache_implementation="static")')


NEAR = 0.75
"""Share of Dynamo's limit from which the number of graphs is worth a warning."""


def _recompilations(inner: torch.nn.Module) -> Iterator[Check]:
    import torch

    limit = min(torch._dynamo.config.recompile_limit, torch._dynamo.config.accumulated_recompile_limit)
    found = max(map(graphs_of, _codes(inner)), default=0)
    if found < NEAR * limit:
        return
    full = found >= limit
    value = f"{found} graphs of {type(inner).__name__}.forward, the limit is {limit}: " + (
        "calls of other shapes now run uncompiled" if full else "beyond it calls run uncompiled"
    )
    advice = (
        f"torch._dynamo.config.recompile_limit = {4 * limit}, or fewer shapes: a static cache, fixed batch sizes"
        ' (TORCH_LOGS="recompiles" says what changes).'
    )
    yield Check("recompilations", value, "problem" if full else "warning", advice)


def graphs_of(code: types.CodeType) -> int:
    """How many graphs Dynamo keeps for a code object (all models of a class share theirs)."""
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list

    return len(_debug_get_cache_entry_list(code))


def _codes(inner: torch.nn.Module) -> set[types.CodeType]:
    """The code objects that Dynamo may have started from: ``forward`` and the functions that decorators put around."""
    found: set[types.CodeType] = set()
    waiting: list[Any] = [type(inner).forward, vars(inner).get("forward"), type(inner)._call_impl]
    while waiting:
        function = waiting.pop()
        function = getattr(function, "__func__", function)
        if isinstance(function, types.FunctionType) and function.__code__ not in found:
            found.add(function.__code__)
            waiting += [getattr(function, name, None) for name in ("__wrapped__", "_torchdynamo_orig_callable")]
    return found


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
