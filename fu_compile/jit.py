"""Compiling CUDA C++ at run time: rendered source -> NVRTC -> cubin -> disk cache -> a kernel that can be launched.

::

    Kernel("linear_int4_sm90.cu", {"N": 4096, ...}, "pppppiiiff", Shape(132, 256, 110_000))
        render    #define FU_N 4096 ... + the file; one extern "C" kernel whose name says what it is
        cubin     from memory, else from FU_CACHE_DIR/kernels/<name>-<key>.fu, else by NVRTC (0.3-1 s)
        load      cuLibraryLoadData, once per process; the launch works in every context
        launch    cuLaunchKernelEx, with programmatic dependent launch

Nothing of CUDA is needed on the user's machine but the driver and two wheels: ``cuda-core`` and ``nvidia-cuda-nvrtc``
(a CUDA build of torch brings the second). Our sources include no CUDA header, so there is no toolkit to find and no
version to match. Importing this module imports neither.

The key of a cache entry covers the rendered source, every header in csrc, the flags, and the versions of NVRTC and of
the file format. An entry is written to a temporary name and renamed, and carries a checksum: a folder that cannot be
written, a damaged entry or two processes compiling the same kernel cost a warning or a compile, never a wrong kernel.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import hashlib
import importlib.metadata
import importlib.util
import io
import json
import logging
import os
import re
import tempfile
import threading
import time
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .errors import FuWarning, LoweringError, MissingDependencyError

log = logging.getLogger(__name__)

ARCH = "sm_90a"
"""The only architecture the CUDA sources are written for: Hopper."""

CSRC = Path(importlib.util.find_spec("fu_compile.csrc").submodule_search_locations[0])  # type: ignore[union-attr, index]
"""Folder of the CUDA sources."""

_MAGIC = b"FUJIT1\n"
_FLAGS = ("-std=c++17", f"-arch={ARCH}", "--ptxas-options=-v")
_DISABLE = "FU_DISABLE_JIT"


@dataclasses.dataclass(frozen=True)
class Resources:
    """What ptxas reports for one kernel, per thread."""

    registers: int
    spill_stores: int
    """bytes"""
    spill_loads: int
    """bytes"""
    serialized: bool = False
    """The compiler waits behind every wgmma (warnings C7508 to C7519): correct, and half as fast."""


@dataclasses.dataclass(frozen=True)
class Cubin:
    """One compiled kernel."""

    name: str
    """The ``extern "C"`` symbol."""
    code: bytes
    resources: Resources
    origin: str
    """``"compiled"`` or ``"disk"``"""
    seconds: float
    """What getting it took."""


@dataclasses.dataclass
class Counters:
    """What this process did."""

    compiled: int = 0
    from_disk: int = 0
    loaded: int = 0
    seconds: float = 0.0
    """Spent compiling or reading."""


COUNTERS = Counters()


def unavailable() -> str | None:
    """Why kernels cannot be compiled here, or none. Looks for the packages, imports nothing."""
    for package, module in (("cuda-core", "cuda.core"), ("cuda-bindings", "cuda.bindings")):
        try:
            if importlib.util.find_spec(module) is None:
                return f"the package {package} is not installed"
        except ModuleNotFoundError:
            return f"the package {package} is not installed"
    return None


def render(source: str, constants: Mapping[str, int]) -> tuple[str, str]:
    """(symbol, source text) of one kernel.

    Args:
        source: file name in csrc.
        constants: ``NAME: value``, rendered as ``#define FU_NAME value``.

    Raises:
        LoweringError: there is no such source.
    """
    path = CSRC / source
    if not path.is_file():
        raise LoweringError(f"there is no CUDA source {source} in {CSRC}")
    # The symbol: what tells kernels of one source apart, short enough for a profiler's column.
    digest = hashlib.sha256(json.dumps(dict(constants), sort_keys=True).encode()).hexdigest()[:8]
    shape = "_".join(f"{k.lower()}{constants[k]}" for k in ("N", "K", "TOKENS") if k in constants)
    name = "_".join(p for p in (path.stem, shape, digest) if p)
    defines = "".join(f"#define FU_{k} {int(v)}\n" for k, v in constants.items())
    return name, f"#define FU_KERNEL {name}\n{defines}#line 1 {json.dumps(source)}\n{path.read_text()}"


@functools.cache
def _headers() -> bytes:
    return b"".join(p.name.encode() + b"\0" + p.read_bytes() for p in sorted(CSRC.glob("*.cuh")))


@functools.cache
def _nvrtc_version() -> str:
    """NVRTC's version from its wheel's metadata: reading it must not cost an import at every start."""
    for package in ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu13", "nvidia-cuda-nvrtc-cu12"):
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "system"


def cache_key(text: str) -> str:
    """32 hexadecimal digits over everything that can change the machine code of a rendered source."""
    h = hashlib.sha256()
    for part in (_MAGIC, text.encode(), _headers(), " ".join(_FLAGS).encode(), _nvrtc_version().encode()):
        h.update(len(part).to_bytes(8, "little"))
        h.update(part)
    return h.hexdigest()[:32]


# ---- disk -----------------------------------------------------------------------------------------------------------


def cache_folder() -> Path:
    """``kernels`` in ``FU_CACHE_DIR`` or in ``~/.cache/futransformer``; it may not exist."""
    return Path(os.environ.get("FU_CACHE_DIR") or Path("~/.cache/futransformer")).expanduser() / "kernels"


def _pack(code: bytes, resources: Resources) -> bytes:
    head = json.dumps(dataclasses.asdict(resources)).encode()
    body = len(head).to_bytes(4, "little") + head + code
    return _MAGIC + hashlib.sha256(body).digest() + body


def _unpack(data: bytes) -> tuple[bytes, Resources]:
    """ValueError: not an entry, or not as it was written."""
    start = len(_MAGIC) + 32
    body = data[start:]
    if data[: len(_MAGIC)] != _MAGIC or hashlib.sha256(body).digest() != data[len(_MAGIC) : start]:
        raise ValueError("checksum")
    size = int.from_bytes(body[:4], "little")
    return body[4 + size :], Resources(**json.loads(body[4 : 4 + size]))


def _read(path: Path) -> tuple[bytes, Resources] | None:
    try:
        return _unpack(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        warnings.warn(f"the cached kernel {path} is damaged ({error}) and is compiled again", FuWarning, stacklevel=3)
        return None


def _write(path: Path, data: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name, suffix=".tmp", delete=False) as f:
            try:
                f.write(data)
                f.close()
                os.replace(f.name, path)  # atomic: a reader sees the old entry or the new one
            except BaseException:
                Path(f.name).unlink(missing_ok=True)
                raise
    except OSError as error:
        _warn_unwritable(str(path.parent), error.strerror or str(error))


@functools.cache
def _warn_unwritable(folder: str, reason: str) -> None:
    warnings.warn(
        f"compiled kernels cannot be kept in {folder} ({reason}); every process compiles them again."
        " Set FU_CACHE_DIR to a writable folder.",
        FuWarning,
        stacklevel=4,
    )


# ---- compiling ------------------------------------------------------------------------------------------------------

_REGISTERS = re.compile(r"Used (\d+) registers")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_SERIALIZED = re.compile(r"C75(0[89]|1\d)|wgmma\S* instructions are serialized")


def parse_log(text: str) -> Resources:
    """Registers and spills from ptxas's report (``--ptxas-options=-v``) on one kernel.

    Raises:
        LoweringError: the log has no such report.
    """
    registers, spills = _REGISTERS.search(text), _SPILLS.search(text)
    if registers is None or spills is None:
        raise LoweringError(f"the compiler's log has no register report:\n{text[:2000]}")
    return Resources(int(registers[1]), int(spills[1]), int(spills[2]), bool(_SERIALIZED.search(text)))


def _nvrtc(name: str, text: str) -> tuple[bytes, Resources]:
    reason = unavailable()
    if reason is not None:
        raise MissingDependencyError(f"{reason}, and the kernel {name} has to be compiled")
    from cuda.core import Program, ProgramOptions

    output = io.StringIO()
    # no_cache: NVRTC hands out what another process compiled, without a report on registers and spills. (Seen with 13.0
    # on a machine with a GPU; a comment or another file name does not make it compile again.) We keep cubins ourselves.
    options = ProgramOptions(
        name=f"{name}.cu", arch=ARCH, std="c++17", include_path=[str(CSRC)], ptxas_options=["-v"], no_cache=True
    )  # fmt: skip
    try:
        code = Program(text, "c++", options).compile("cubin", logs=output).code
    except Exception as error:
        what = f"NVRTC {_nvrtc_version()} cannot compile {name}: {error}\n{output.getvalue()}"
        raise LoweringError(what) from error
    return bytes(code), parse_log(output.getvalue())


_memory: dict[str, Cubin] = {}
_lock = threading.Lock()


def cubin(source: str, constants: Mapping[str, int]) -> Cubin:
    """The compiled kernel, from memory, from disk or from NVRTC.

    Args:
        source: file name in csrc.
        constants: rendered as ``#define FU_NAME value``.

    Raises:
        LoweringError: it does not compile, or it is not in the cache and ``FU_DISABLE_JIT`` is set (names the kernel).
        MissingDependencyError: it is not in the cache, and cuda-core or NVRTC is missing.
    """
    name, text = render(source, constants)
    key = cache_key(text)
    with _lock:  # one compile at a time: two threads want the same kernel more often than two different ones
        found = _memory.get(key)
        if found is None:
            found = _memory[key] = _get(name, text, key)
        return found


def _get(name: str, text: str, key: str) -> Cubin:
    start = time.perf_counter()
    path = cache_folder() / f"{name}-{key}.fu"
    entry, origin = _read(path), "disk"
    if entry is None:
        if os.environ.get(_DISABLE, "") not in ("", "0"):
            raise LoweringError(
                f"{_DISABLE} is set and the kernel {name} is not in {path.parent}",
                advice=f"Compile ahead with `python -m fu_compile warmup MODEL`, or unset {_DISABLE}.",
            )
        entry, origin = _nvrtc(name, text), "compiled"
        _write(path, _pack(*entry))
    seconds = time.perf_counter() - start
    COUNTERS.seconds += seconds
    COUNTERS.compiled += origin == "compiled"
    COUNTERS.from_disk += origin == "disk"
    log.info("%s: %s in %.2f s, %s", name, origin, seconds, entry[1])
    return Cubin(name, entry[0], entry[1], origin, seconds)


# ---- launching ------------------------------------------------------------------------------------------------------

_TYPES = {"p": ctypes.c_void_p, "i": ctypes.c_int, "f": ctypes.c_float}


class _Where:
    """A parameter that is passed by its address on the host: the parameter array points to it, nothing is copied."""

    def __init__(self, pointers: Any, at: int) -> None:
        self._pointers, self._at = pointers, at

    @property
    def value(self) -> int | None:
        """The address."""
        return self._pointers[self._at]

    @value.setter
    def value(self, address: int) -> None:
        self._pointers[self._at] = address


def _check(result: tuple[Any, ...]) -> Any:
    from cuda.bindings import driver

    if result[0] != driver.CUresult.CUDA_SUCCESS:
        raise LoweringError(f"the CUDA driver says {result[0].name}")
    return result[1] if len(result) == 2 else result[1:]


@dataclasses.dataclass(frozen=True)
class Shape:
    """How a kernel is launched."""

    grid: int
    """blocks"""
    block: int
    """threads"""
    smem: int
    """bytes of dynamic shared memory"""
    cluster: int = 1
    """blocks in a cluster"""


class Kernel:
    """A kernel of csrc, specialised by constants; compiled and loaded at the first launch.

    Args:
        source: file name in csrc.
        constants: rendered as ``#define FU_NAME value``.
        signature: one letter per parameter: p pointer (an integer address), i int, f float, t tensor map (the address
            of the 128 bytes on the host).
        shape: how it is launched.
    """

    def __init__(self, source: str, constants: Mapping[str, int], signature: str, shape: Shape) -> None:
        self.source, self.constants, self.signature, self.shape = source, dict(constants), signature, shape
        self._handle: Any = None
        self._devices: set[int] = set()
        self._local = threading.local()

    @property
    def cubin(self) -> Cubin:
        """Compiles if need be; needs no GPU."""
        return cubin(self.source, self.constants)

    def load(self, device: int) -> None:
        """Makes the kernel ready on a device; once. Safe while a stream of the process is being captured."""
        from cuda.bindings import driver

        mode = _check(
            driver.cuThreadExchangeStreamCaptureMode(driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
        )
        try:
            if self._handle is None:
                compiled = self.cubin
                library = _check(driver.cuLibraryLoadData(compiled.code, [], [], 0, [], [], 0))
                self._handle = _check(driver.cuLibraryGetKernel(library, compiled.name.encode()))
                COUNTERS.loaded += 1
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            _check(driver.cuKernelSetAttribute(attribute, self.shape.smem, self._handle, driver.CUdevice(device)))
            carveout = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
            _check(driver.cuKernelSetAttribute(carveout, 100, self._handle, driver.CUdevice(device)))
            self._devices.add(device)
        finally:
            driver.cuThreadExchangeStreamCaptureMode(mode)

    def _prepare(self) -> Any:
        """Per thread: the launch configuration and the parameters' storage, filled in place by every launch."""
        from cuda.bindings import driver

        shape, attributes = self.shape, []
        overlap = driver.CUlaunchAttribute()
        overlap.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        overlap.value.programmaticStreamSerializationAllowed = 1
        attributes.append(overlap)
        if shape.cluster > 1:
            cluster = driver.CUlaunchAttribute()
            cluster.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            cluster.value.clusterDim.x = shape.cluster
            cluster.value.clusterDim.y = cluster.value.clusterDim.z = 1
            attributes.append(cluster)
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = shape.grid, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = shape.block, 1, 1
        config.sharedMemBytes = shape.smem
        config.attrs, config.numAttrs = attributes, len(attributes)
        pointers = (ctypes.c_void_p * len(self.signature))()
        values: list[Any] = []
        for at, letter in enumerate(self.signature):
            values.append(_Where(pointers, at) if letter == "t" else _TYPES[letter]())
            if letter != "t":
                pointers[at] = ctypes.addressof(values[at])
        self._local.state = state = (config, values, pointers, ctypes.addressof(pointers), driver.cuLaunchKernelEx)
        return state

    def __call__(self, device: int, stream: int, *args: float | None, grid: int | None = None) -> None:
        """Launches on a stream of a device whose context is current.

        Overlaps with the kernel before it in the stream as far as that kernel allows (programmatic dependent launch):
        weights must have been written before that kernel started.

        Args:
            device: ordinal.
            stream: address, as ``torch.cuda.Stream.cuda_stream``.
            args: one value per letter of the signature; none is a null pointer.
            grid: blocks of this launch, where they depend on the call; none: those of the shape.

        Raises:
            LoweringError: see :func:`cubin`; or the driver refuses the launch.
        """
        if device not in self._devices:
            self.load(device)
        state = getattr(self._local, "state", None) or self._prepare()
        config, values, _, address, launch = state
        for slot, value in zip(values, args, strict=True):
            slot.value = value
        config.hStream = stream
        if grid is not None:
            config.gridDimX = grid
        error = launch(config, self._handle, address, 0)[0]
        if error:
            raise LoweringError(f"the CUDA driver refuses to launch {self.cubin.name}: {error.name}")


def kernels_of(config: Any, tokens: Iterable[int] = (1, 8, 32), group: int = 128, half: bool = False) -> list[Kernel]:
    """Every decode kernel of a model: its linears, with the gain of the norm before them, and its attention.

    Args:
        config: a transformers configuration of the Llama kind, or one that holds it as ``text_config``.
        tokens: batch sizes (tokens of a decode call) to compile for; each stands for all down to the next smaller size.
        group: INT4 group size.
        half: float16 activations instead of bfloat16.
    """
    from fu_compile.lowerings import attention_int4_sm90 as attention
    from fu_compile.lowerings import linear_int4_sm90 as int4
    from fu_compile.models import linears_of

    config = getattr(config, "text_config", None) or config
    linears = linears_of(config)
    tokens = list(tokens)
    bounds = sorted({int4.bound(t) for t in tokens})
    kernels = [
        (int4.kernel(n, k, group, bound, half, prologue, epilogue, int4.SMS, gain), gain)
        for bound in bounds
        for n, k, prologue, epilogue in linears
        for gain in (prologue == "rms" and not half,)
    ]
    before = [first for kernel, gain in kernels if (first := int4.arrange_kernel(kernel, gain)) is not None]
    return [kernel for kernel, _ in kernels] + [*before, *attention.kernels_of(config, sorted(set(tokens)), half=half)]


def most_tokens() -> int:
    """Of a decode call that kernels are compiled for."""
    from fu_compile.lowerings.decode_linear import MAX_TOKENS

    return MAX_TOKENS


def warmup(kernels: Iterable[Kernel], progress: bool = True) -> Counters:
    """Compiles kernels ahead, in parallel, without a GPU; those on disk already cost a read.

    Args:
        kernels: of :func:`kernels_of`, or any others.
        progress: show a bar.

    Returns:
        What was done by this call.

    Raises:
        LoweringError, MissingDependencyError: as :func:`cubin`.
    """
    from concurrent.futures import ThreadPoolExecutor

    from tqdm import tqdm

    unique = {}
    for kernel in kernels:
        name, text = render(kernel.source, kernel.constants)
        unique[cache_key(text)] = (name, text)
    if unavailable() is None:
        import cuda.core  # noqa: F401  here, before several threads want it: it does not survive a race of imports
    start, before = time.perf_counter(), dataclasses.replace(COUNTERS)
    todo = [(key, *entry) for key, entry in unique.items() if key not in _memory]
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        jobs = [pool.submit(_get, name, text, key) for key, name, text in todo]
        for (key, _, _), job in tqdm(zip(todo, jobs, strict=True), "kernels", len(jobs), disable=not progress):
            _memory[key] = job.result()
    return Counters(
        COUNTERS.compiled - before.compiled,
        COUNTERS.from_disk - before.from_disk,
        COUNTERS.loaded - before.loaded,
        time.perf_counter() - start,
    )
