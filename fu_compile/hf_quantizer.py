"""Packed models in transformers: ``save_pretrained`` and ``from_pretrained`` with ``quant_method: "futransformer"``.

``config.json`` carries the manifest, the safetensors shards the bytes::

    "quantization_config": {
      "quant_method": "futransformer", "format": 1, "method": "rtn", "made_by": "0.1.0",
      "blocks": {"model.layers.0.self_attn.q_proj": {"precision": "int4", "k": 4096, "group": 128, "paired": false,
                                                      "members": [["...q_proj", 4096], ["...k_proj", 1024], ...]}, ...},
      "hashes": {"model.layers.0.self_attn.q_proj.block.packed": "sha256...", ...},
      "fp8_scales": {"model.layers.0.mlp.down_proj.block.packed": 0.0125, ...}
    }

``fp8_scales``: static scales of projection inputs (fu_compile.fp8); a model that is not packed has a manifest with
these alone.

Loading makes the model on the meta device, replaces the linears there and assigns the stored bytes: no floating weight
of a packed layer ever exists. transformers has no entry point for quantisers: a process that has not imported
``fu_compile`` ignores the manifest. ``import fu_compile`` is enough (it registers as soon as transformers is there).
"""

from __future__ import annotations

import contextvars
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.quantizers.auto import (
    AUTO_QUANTIZATION_CONFIG_MAPPING,
    register_quantization_config,
    register_quantizer,
)
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from .errors import DataError, FormatError, OptionError
from .weights import restore_scales

METHOD = "futransformer"
FORMAT = 1
"""Version of the manifest and of the packed layout."""
_FIELDS = ("precision", "k", "group", "paired", "members")
_CHUNK = 1 << 24
_verified: contextvars.ContextVar[bool] = contextvars.ContextVar("fu_compile_verified", default=False)
"""Whether the shards that transformers is about to load were compared with the manifest a moment ago."""


class FuTransformerConfig(QuantizationConfigMixin):
    """The manifest of a packed model."""

    def __init__(
        self,
        blocks: Mapping[str, Mapping[str, Any]] | None = None,
        hashes: Mapping[str, str] | None = None,
        method: str = "rtn",
        format: int = FORMAT,
        made_by: str = "",
        fp8_scales: Mapping[str, float] | None = None,
        quant_method: str = METHOD,
        **unknown: Any,
    ) -> None:
        """See the module's picture; ``hashes``: tensor name -> sha256 of its bytes, written when a model is saved;
        ``fp8_scales``: name of a projection's (first) weight -> static scale of its input (fu_compile.fp8).

        Raises:
            FormatError: another format version, fields that this release does not know, blocks that are none.
        """
        if quant_method != METHOD:
            raise FormatError(f"a manifest of {quant_method!r} is not one of {METHOD!r}", where="quantization_config")
        if format != FORMAT:
            raise FormatError(
                f"the packed model has format {format!r}, this release reads {FORMAT}",
                where="quantization_config",
                advice="Load it with the release that wrote it (made_by), or quantise the original model again.",
            )
        if unknown:
            raise FormatError(f"the manifest has unknown fields: {', '.join(unknown)}", where="quantization_config")
        self.quant_method: Any = METHOD
        self.format, self.method, self.made_by = format, method, made_by
        self.blocks = {name: dict(block) for name, block in (blocks or {}).items()}
        self.hashes = dict(hashes or {})
        self.fp8_scales = dict(fp8_scales or {})
        if wrong := [n for n, s in self.fp8_scales.items() if not (isinstance(s, float) and 0.0 < s < float("inf"))]:
            raise FormatError(f"the FP8 scale of {wrong[0]} is {self.fp8_scales[wrong[0]]!r}", where="fp8_scales")
        for name in self.blocks:
            self.rows(name)

    def rows(self, name: str) -> Any:
        """All rows (``packed.Rows``) of the block that the projection ``name`` owns. FormatError if they are none."""
        from .packed import Rows

        block = self.blocks[name]
        try:
            precision, k, group, paired, members = (block[f] for f in _FIELDS)
            n = sum(rows for _, rows in members)
            rows = Rows(precision, n, k, group, paired, 0, n)
            sound = members[0][0] == name and all(isinstance(v, int) for v in (n, k, group))
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise FormatError(f"the manifest entry is no block: {block}", where=name) from error
        rows.check()
        if not sound:
            raise FormatError(f"the manifest entry is no block: {block}", where=name)
        return rows


class FuTransformerQuantizer(HfQuantizer):
    """Loads and saves models whose linears are packed."""

    requires_calibration = True  # transformers then refuses to "quantise while loading": that is fu_compile.quantize

    quantization_config: FuTransformerConfig

    def _process_model_before_weight_loading(self, model: Any, checkpoint_files: Any = None, **kwargs: Any) -> Any:
        files = [f for f in checkpoint_files or () if str(f).endswith(".safetensors")]
        if checkpoint_files and len(files) != len(checkpoint_files):
            raise FormatError("packed models are stored as safetensors", where=str(checkpoint_files[0]))
        if not _verified.get():
            verify(self.quantization_config, files)
        skeleton(model, self.quantization_config)
        return model

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        model.requires_grad_(False)
        restore_scales(model)
        return model

    def get_state_dict_and_metadata(
        self, model: Any, *args: Any, **kwargs: Any
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """The state to save and the shards' metadata; writes the hashes into the manifest (before config.json is)."""
        state = model.state_dict()
        self.quantization_config.hashes = hashes(state)
        model.config.quantization_config = self.quantization_config
        return state, {"fu_compile": str(FORMAT)}

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        """Always."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Never: there is no backward."""
        return False

    @property
    def is_compileable(self) -> bool:
        """Under backend="futransformer" and any other."""
        return True


def register() -> None:
    """Tells transformers about the format; once is enough, more often does no harm."""
    if METHOD not in AUTO_QUANTIZATION_CONFIG_MAPPING:
        register_quantization_config(METHOD)(FuTransformerConfig)
        register_quantizer(METHOD)(FuTransformerQuantizer)


register()


# ---- the model and its manifest --------------------------------------------------------------------------------------


def describe(model: nn.Module, method: str) -> None:
    """Writes the manifest of a model whose linears have just been packed, so that transformers can save it."""
    from . import __version__
    from .quantize import PackedLinear

    owners: dict[int, str] = {}
    blocks: dict[str, dict[str, Any]] = {}
    for name, module in model.named_modules():
        if isinstance(module, PackedLinear):
            owner = owners.setdefault(id(module.block), name)
            r = module.where
            entry = {"precision": r.precision, "k": r.k, "group": r.group, "paired": r.paired, "members": []}
            blocks.setdefault(owner, entry)["members"].append([name, r.rows])
    left = dict(model.named_parameters())
    before = getattr(getattr(getattr(model, "config", None), "quantization_config", None), "fp8_scales", None) or {}
    scales = {name: scale for name, scale in before.items() if name in left}
    config = FuTransformerConfig(blocks=blocks, method=method, made_by=str(__version__), fp8_scales=scales)
    if hasattr(model, "config"):
        carry(model, config)
        untie(model, blocks)


def carry(model: Any, config: FuTransformerConfig) -> None:
    """Makes this the manifest that ``save_pretrained`` writes."""
    model.config.quantization_config = config
    model.hf_quantizer = FuTransformerQuantizer(config)
    model.is_quantized, model.quantization_method = True, METHOD


def keep_scales(model: Any, scales: Mapping[str, float]) -> None:
    """Writes static FP8 scales into the manifest; a model that is not packed gets one without blocks."""
    from . import __version__

    if not hasattr(model, "config"):
        return
    config = getattr(model.config, "quantization_config", None)
    if not isinstance(config, FuTransformerConfig):
        config = FuTransformerConfig(method="float", made_by=str(__version__))
        carry(model, config)
    config.fp8_scales = dict(scales)


def untie(model: Any, blocks: Iterable[str]) -> None:
    """A packed output head is no longer the embedding's weight."""
    heads = [n for n in blocks if model.get_submodule(n) is model.get_output_embeddings()]
    if not heads:
        return
    model.config.tie_word_embeddings = False
    for attribute in ("_tied_weights_keys", "all_tied_weights_keys"):
        tied = getattr(model, attribute, None)
        if isinstance(tied, dict):
            kept = {k: v for k, v in tied.items() if not any(k.startswith(f"{h}.") for h in heads)}
            setattr(model, attribute, kept)


def skeleton(model: Any, config: FuTransformerConfig) -> None:
    """Replaces the linears that the manifest names by packed ones without bytes, on the current default device.

    Raises:
        FormatError: the manifest names projections that this model does not have, or has in another size; before
            anything is replaced.
    """
    from .quantize import Group, PackedBlock, install

    groups = []
    for name, entry in config.blocks.items():
        rows, modules = config.rows(name), []
        for member, size in entry["members"]:
            try:
                module = model.get_submodule(member)
            except AttributeError as error:
                raise FormatError(f"the manifest packs {member}, which the model does not have") from error
            if not isinstance(module, nn.Linear) or (module.out_features, module.in_features) != (size, rows.k):
                raise FormatError(f"the manifest packs {member} as {size} x {rows.k}; the model has {module}")
            modules.append(module)
        names = [member for member, _ in entry["members"]]
        groups.append((Group(names, modules, rows.precision, rows.paired), rows))
    for group, rows in groups:
        install(model, group, PackedBlock(rows))
    untie(model, config.blocks)


# ---- files -----------------------------------------------------------------------------------------------------------


def hashes(state: Mapping[str, Tensor]) -> dict[str, str]:
    """Tensor name -> sha256 of its bytes in row-major order; memory that has several names is read once."""
    seen: dict[tuple[Any, ...], str] = {}
    found = {}
    for name, t in state.items():
        key = (t.device, t.data_ptr(), tuple(t.shape), t.stride(), t.dtype)
        if key not in seen:
            seen[key] = _digest(t)
        found[name] = seen[key]
    return found


def _digest(t: Tensor) -> str:
    digest = hashlib.sha256()
    flat = t.detach().contiguous().view(-1)
    if flat.numel():
        flat = flat.view(torch.uint8)
    for first in range(0, flat.numel(), _CHUNK):
        digest.update(flat[first : first + _CHUNK].cpu().numpy().data)
    return digest.hexdigest()


def verify(config: FuTransformerConfig, files: Iterable[str | os.PathLike[str]]) -> None:
    """Reads every tensor of the shards once and compares it with the manifest.

    Raises:
        FormatError: a tensor that is missing, foreign, of another size, or whose hash is another one.
        DataError: a shard that cannot be read (truncated, no safetensors file).
    """
    from safetensors import SafetensorError, safe_open

    known = set(config.hashes.values())
    present: set[str] = set()
    for path in files:
        try:
            with safe_open(os.fspath(path), framework="pt") as shard:
                names = list(shard.keys())
                for name in names:
                    digest = _digest(shard.get_tensor(name))
                    expected = config.hashes.get(name)
                    if digest != expected and (expected is not None or digest not in known):
                        what = "is not in the manifest" if expected is None else "does not have the manifest's sha256"
                        raise FormatError(f"{name} {what}", where=str(path), advice="Copy or download it again.")
                    present |= {name, digest}
        except (SafetensorError, OSError) as error:
            raise DataError(
                f"the shard cannot be read: {error}", where=str(path), advice="Download it again."
            ) from error
    lost = [n for n, digest in config.hashes.items() if n not in present and digest not in present]
    if lost:
        raise FormatError(f"{len(lost)} tensors of the manifest are in no shard, the first is {lost[0]}")
    if unknown := [n for n in config.blocks if f"{n}.block.packed" not in config.hashes]:
        raise FormatError(f"the manifest has no hash for the packed block of {unknown[0]}")


@contextmanager
def verified() -> Iterator[None]:
    """Inside, a model is loaded without comparing hashes: that has been done, or there are none."""
    token = _verified.set(True)
    try:
        yield
    finally:
        _verified.reset(token)


def save(model: Any, directory: str | os.PathLike[str], **more: Any) -> None:
    """``model.save_pretrained(directory)`` for a packed model.

    Args:
        model: what :func:`fu_compile.quantize` or :func:`fu_compile.load` returned.
        directory: made if it does not exist.
        more: for ``save_pretrained`` (``max_shard_size``, ...).

    Raises:
        FormatError: the model is not packed.
    """
    if not isinstance(getattr(model, "hf_quantizer", None), FuTransformerQuantizer):
        raise FormatError(
            f"this {type(model).__name__} is not packed", where="save", advice="fu_compile.quantize(model) packs it."
        )
    model.save_pretrained(directory, **more)


def load(directory: str | os.PathLike[str], dtype: torch.dtype | None = None, device: Any = None, **more: Any) -> Any:
    """A packed model from a folder, in eval mode, without gradients.

    Args:
        directory: what :func:`save` or ``save_pretrained`` wrote; or a checkpoint of another project that
            ``fu_compile.checkpoints`` reads.
        dtype: of what is not packed, and of activations; none: as saved.
        device: where to put it; none: the CPU.
        more: for ``from_pretrained``.

    Raises:
        DataError: no such folder, no manifest, a shard that is missing or cannot be read.
        FormatError: a model that is not packed, another format, or bytes that are not those that were saved.
    """
    from transformers import AutoModelForCausalLM

    from . import checkpoints

    folder = Path(directory).expanduser()
    if folder.suffix == ".gguf":
        return checkpoints.load(folder, dtype, device)
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(
            f"config.json cannot be read: {error}", where=str(folder), advice="Give a saved folder."
        ) from error
    manifest = config.get("quantization_config") if isinstance(config, dict) else None
    if isinstance(manifest, dict) and manifest.get("quant_method") in checkpoints.KINDS and not more:
        return checkpoints.load(folder, dtype, device)
    if not isinstance(manifest, dict) or manifest.get("quant_method") != METHOD:
        kind = manifest.get("quant_method") if isinstance(manifest, dict) else None
        raise FormatError(
            f"this folder holds a model of {kind!r}" if kind else "this folder holds a model that is not packed",
            where=str(folder),
            advice="docs/quantize.md lists the formats that can be read; fu_compile.quantize packs a float model.",
        )
    if "device_map" in more and device is not None:
        raise OptionError("device and device_map cannot both be given", where="load")
    verify(FuTransformerConfig.from_dict(manifest), shards(folder))
    with verified():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto" if dtype is None else dtype, **more)
    model.eval().requires_grad_(False)
    return model if device is None else model.to(device)


def shards(folder: Path) -> list[Path]:
    """The safetensors files of a folder, in order. DataError where one is missing."""
    index = folder / "model.safetensors.index.json"
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.exists() else []
    except (ValueError, KeyError, AttributeError) as error:
        raise DataError(f"the index of the shards is damaged: {error}", where=str(index)) from error
    found = [folder / name for name in names or ["model.safetensors"]]
    for path in found:
        if not path.is_file():
            raise DataError("a shard is missing", where=str(path), advice="Download it again.")
    return found
