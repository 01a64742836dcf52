"""Other people's quantised checkpoints, read into packed models.

======================  ====================================================  =========================================
``quant_method``        what is stored (q: 4-bit codes)                        here
======================  ====================================================  =========================================
gptq                    q along K in int32, zeros along N (v1: zero - 1)       same codes, scales, zeros
gptq, act-order         the same, group of a column in ``g_idx``               down_proj the same, others again, warned
awq (gemm)              q and zeros along N, order 0 2 4 6 1 3 5 7             same codes, scales, zeros
compressed-tensors      pack-quantized: q + 8 along K; zeros along N           same codes, scales, zeros
compressed-tensors      float-quantized: e4m3, scale per tensor or channel     same codes and scales
fbgemm_fp8              e4m3, scale per channel                                same codes and scales
fp8                     e4m3, scale per 128 x 128 block                        quantised again, with a warning
torchao Int4Tensor      q + 8 in nibbles along K; w = q * scale + zero_point   same where 8 - zero_point/scale is 0..15
torchao Float8Tensor    e4m3, scale per tensor or channel                      same codes and scales
GGUF Q4_0               32 columns, f16 scale, zero 8                          same codes and scales
GGUF Q4_1               32 columns, f16 scale and minimum                      same where every -min/scale is 0..15
======================  ====================================================  =========================================

Groups of theirs that are multiples of 128, 64 or 32 columns (or a whole row) become several of ours. Scales that
float16 cannot hold exactly (bfloat16 below 2^-14, float32) are rounded, codes are kept, and the warning says how many.
With activation order a column's group is anywhere, and ours are runs of columns. The columns of down_proj can be put in
order, since the rows of gate_proj and up_proj may stand in the same order: the model computes the same. The inputs of
the other projections cannot be permuted, so those are dequantised and rounded to nearest, ``asym`` in groups of 32.

Layouts from the formats' own documentation and files; docs/quantize.md names them.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import formats
from .errors import DataError, FormatError, FuWarning, MissingDependencyError
from .formats import Int4Codes
from .packed import Rows, pack_codes, pack_fp8

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Column of nibble i among the eight of one int32."""


@dataclass(frozen=True)
class Fp8:
    """codes: [N, K] e4m3, scales: [N] f32."""

    codes: Tensor
    scales: Tensor


@dataclass(frozen=True)
class Again:
    """A weight whose grid is not ours: [N, K] f32, the precision it gets, and why it is quantised again."""

    weight: Tensor
    precision: str
    reason: str


@dataclass(frozen=True)
class Scattered:
    """An INT4 weight with activation order: column k belongs to group ``g_idx[k]``, groups have ``size`` columns."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    g_idx: Tensor
    size: int

    def order(self) -> Tensor:
        """[K]: the columns, group by group."""
        return torch.argsort(self.g_idx.long(), stable=True)

    def sorted(self, notes: Counter[str]) -> Decoded:
        """The weight whose inputs come in that order; in groups of one size it is one of our grids."""
        order = self.order()
        if not _in_order(self.g_idx[order], self.size):
            found = self.again()
            return Again(found.weight[:, order], found.precision, found.reason)
        return int4_or_again(self.codes[:, order].contiguous(), self.scales, self.zeros, self.size, notes)

    def again(self) -> Again:
        """The weight as it stands, for another grid."""
        groups = self.g_idx.long()
        weight = (self.codes.float() - self.zeros.float()[:, groups]) * self.scales.float()[:, groups]
        return Again(weight, "int4", "activation order: the columns of a group are not neighbours")


Decoded = Int4Codes | Fp8 | Again | Scattered


# ---- nibbles ---------------------------------------------------------------------------------------------------------


def unpack_nibbles(packed: Tensor, dim: int, order: Sequence[int] = range(8)) -> Tensor:
    """[..] int32, eight codes each -> u8 with eight times the size along ``dim``; nibble i is column ``order[i]``."""
    shifts = torch.empty(8, dtype=torch.int32)
    shifts[torch.tensor(list(order))] = torch.arange(0, 32, 4, dtype=torch.int32)
    wide = (packed.unsqueeze(dim + 1) >> shifts.view(-1, *([1] * (packed.dim() - dim - 1)))) & 15
    return wide.flatten(dim, dim + 1).to(torch.uint8)


def int4_or_again(codes: Tensor, scales: Tensor, zeros: Tensor, size: int, notes: Counter[str]) -> Decoded:
    """Codes of another grid as ours, or dequantised where they are none.

    Args:
        codes: [N, K] u8, 0..15.
        scales: [N, G] floating.
        zeros: [N, G] integers of any sign, or floating (GGUF minima as -min / scale).
        size: columns of a group; a size that covers the row, or less than 1: one group.
        notes: what was not exact is counted here.
    """
    k = codes.shape[1]
    size = k if size < 1 else min(size, k)
    dense_zeros, dense_scales = (t.float().repeat_interleave(size, 1)[:, :k] for t in (zeros, scales))
    fits = bool(((zeros >= 0) & (zeros <= 15) & (zeros == zeros.round())).all())
    ours = next((g for g in formats.GROUPS if size % g == 0 or size == k), None)
    half = scales.to(torch.float16)
    if not fits or ours is None or not bool(torch.isfinite(half).all()):
        why = (
            f"groups of {size} columns are not made of ours" if ours is None
            else "a scale is beyond float16" if fits else "a zero point is no integer in 0..15"
        )  # fmt: skip
        return Again((codes.float() - dense_zeros) * dense_scales, "int4", why)
    inexact = int((half.float() != scales.float()).sum())
    if inexact:
        notes["scales that float16 does not hold were rounded, codes kept"] += inexact
    columns = torch.arange(0, k, ours) // size
    return Int4Codes(codes, half[:, columns].contiguous(), zeros.to(torch.uint8)[:, columns].contiguous(), ours)


def _in_order(g_idx: Tensor | None, size: int) -> bool:
    """Whether column k belongs to group k // size."""
    if g_idx is None or bool((g_idx < 0).all()):
        return True
    return torch.equal(g_idx.long(), torch.arange(g_idx.numel()) // (size if size > 0 else g_idx.numel()))


# ---- one decoder per format ------------------------------------------------------------------------------------------

Tensors = Mapping[str, Tensor]
"""The tensors of one projection, by the last part of their name."""


def gptq(t: Tensors, settings: Mapping[str, Any], notes: Counter[str]) -> Decoded:
    """qweight [K/8, N] i32, qzeros [G, N/8] i32, scales [G, N], g_idx [K]."""
    if settings.get("bits") != 4:
        raise FormatError(f"GPTQ with {settings.get('bits')} bits", advice="Only 4-bit checkpoints can be repacked.")
    if settings.get("dynamic"):
        raise FormatError("GPTQ with settings that differ from layer to layer ('dynamic')")
    codes = unpack_nibbles(t["qweight"], 0).t().contiguous()
    stored = 0 if settings.get("checkpoint_format", "gptq") == "gptq_v2" else 1
    zeros = unpack_nibbles(t["qzeros"], 1).t().to(torch.int16) + stored
    scales, size = t["scales"].t(), int(settings.get("group_size", -1))
    if not _in_order(t.get("g_idx"), size):
        return Scattered(codes, scales, zeros, t["g_idx"], size)
    return int4_or_again(codes, scales, zeros, size, notes)


def awq(t: Tensors, settings: Mapping[str, Any], notes: Counter[str]) -> Decoded:
    """qweight [K, N/8] i32, qzeros [G, N/8] i32, scales [G, N]."""
    bits = settings.get("bits", settings.get("w_bit"))
    version = str(settings.get("version", settings.get("format", "gemm"))).lower()
    if bits != 4 or version != "gemm":
        raise FormatError(f"AWQ with {bits} bits, version {version}", advice="Only 4-bit 'gemm' can be repacked.")
    codes = unpack_nibbles(t["qweight"], 1, AWQ_ORDER).t().contiguous()
    scales = t["scales"].t()
    zeros = torch.full(scales.shape, 8) if "qzeros" not in t else unpack_nibbles(t["qzeros"], 1, AWQ_ORDER).t()
    size = settings.get("group_size", settings.get("q_group_size", 128))
    return int4_or_again(codes, scales, zeros, int(size), notes)


def compressed_tensors(t: Tensors, settings: Mapping[str, Any], notes: Counter[str]) -> Decoded:
    """weight_packed [N, K/8] i32, weight_scale [N, G], weight_zero_point [N/8, G] i32 or [N, G] i8, weight_shape; or
    weight [N, K] e4m3 and weight_scale [], [1] or [N, 1]."""
    if "weight_packed" not in t:
        return per_channel(t, settings, notes)
    args = settings["weights"]
    if (
        args.get("num_bits") != 4
        or args.get("type", "int") != "int"
        or args.get("strategy") not in ("group", "channel")
    ):
        raise FormatError(f"compressed-tensors weights as {args}", advice="4-bit integers in groups can be repacked.")
    n, k = (int(v) for v in t["weight_shape"])
    codes = unpack_nibbles(t["weight_packed"], 1)[:n, :k].contiguous()
    scales = t["weight_scale"]
    zeros = torch.full(scales.shape, 8)
    if (zp := t.get("weight_zero_point")) is not None:
        zeros = unpack_nibbles(zp, 0)[:n] if zp.dtype == torch.int32 else zp.to(torch.int16) + 8
    size = -1 if args["strategy"] == "channel" else int(args["group_size"])
    g_idx = t.get("weight_g_idx")
    if g_idx is not None and not _in_order(g_idx, size):
        return Scattered(codes, scales, zeros, g_idx, size)
    return int4_or_again(codes, scales, zeros, size, notes)


def per_channel(t: Tensors, settings: Mapping[str, Any], notes: Counter[str]) -> Decoded:
    """weight [N, K] e4m3, weight_scale one number, or one for each row."""
    w, scale = t["weight"], t["weight_scale"].float()
    if w.dtype != torch.float8_e4m3fn or scale.numel() not in (1, w.shape[0]):
        raise FormatError(f"an FP8 weight {w.dtype} {list(w.shape)} with scales {list(scale.shape)}")
    return Fp8(w, scale.reshape(-1).expand(w.shape[0]).contiguous())


def blockwise(t: Tensors, settings: Mapping[str, Any], notes: Counter[str]) -> Decoded:
    """weight [N, K] e4m3, weight_scale_inv one number for each block of ``weight_block_size``."""
    w, scale = t["weight"], t["weight_scale_inv"].float()
    rows, columns = settings.get("weight_block_size") or (128, 128)
    scale = scale.repeat_interleave(rows, 0)[: w.shape[0]].repeat_interleave(columns, 1)[:, : w.shape[1]]
    if bool((scale == scale[:, :1]).all()):
        return Fp8(w, scale[:, 0].contiguous())
    return Again(w.float() * scale, "fp8", "FP8 scales change along the columns, ours are one for each row")


def torchao(t: Tensors, settings: Mapping[str, Any], notes: Counter[str]) -> Decoded:
    """_weight_qdata [N, K/2] i8 (columns 2i and 2i+1 in the low and high nibble, two's complement), _weight_scale and
    _weight_zero_point [K/group, N]; or _weight_qdata [N, K] e4m3 and _weight_scale of one number, or one for each row.

    ``settings["tensor"]``: what the shard's metadata says of the tensor subclass.
    """
    kind, data = settings["tensor"].get("_type"), settings["tensor"].get("_data", {})
    if "_weight_act_pre_scale" in t:
        raise FormatError("a torchao weight whose inputs are scaled first (AWQ's act_pre_scale)")
    if kind == "Float8Tensor":
        return per_channel({"weight": t["_weight_qdata"], "weight_scale": t["_weight_scale"]}, settings, notes)
    packed = t["_weight_qdata"].view(torch.uint8)
    if kind != "Int4Tensor" or packed.dim() != 2:
        advice = 'Save the model with Int4WeightOnlyConfig(int4_packing_format="plain").'
        raise FormatError(f"a torchao weight as {kind} {list(packed.shape)}", advice=advice)
    # A nibble is q in two's complement, q + 8 our code.
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(1) ^ 8
    scales, offset = t["_weight_scale"].t().float(), t["_weight_zero_point"].t().float()
    size = int(data["block_size"][-1])
    steps = torch.where(scales == 0, 0.0, offset / torch.where(scales == 0, 1.0, scales))
    near = steps.round()
    zeros = 8.0 - torch.where(near * scales == offset, near, steps)
    if bool(((scales == 0) & (offset != 0)).any()):  # a constant group: no scale, a value
        wide_scales, wide = (v.repeat_interleave(size, 1)[:, : codes.shape[1]] for v in (scales, offset))
        return Again((codes.float() - 8.0) * wide_scales + wide, "int4", "a group is constant and not zero")
    return int4_or_again(codes, scales, zeros, size, notes)


@dataclass(frozen=True)
class Kind:
    """One format: how a projection is recognised and decoded."""

    mark: str
    """End of the name of the tensor that every packed projection has."""
    parts: tuple[str, ...]
    decode: Callable[[Tensors, Mapping[str, Any], Counter[str]], Decoded]


_CT = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx", "weight", "input_scale",
       "input_zero_point")  # fmt: skip
KINDS: dict[str, Kind] = {
    "gptq": Kind("qweight", ("qweight", "qzeros", "scales", "g_idx"), gptq),
    "awq": Kind("qweight", ("qweight", "qzeros", "scales"), awq),
    "compressed-tensors": Kind("weight_scale", _CT, compressed_tensors),
    "fbgemm_fp8": Kind("weight_scale", ("weight", "weight_scale", "input_scale_ub"), per_channel),
    "torchao": Kind(
        "_weight_qdata",
        ("_weight_qdata", "_weight_scale", "_weight_zero_point", "_weight_act_pre_scale", "_weight_scale_and_zero"),
        torchao,
    ),
    "fp8": Kind("weight_scale_inv", ("weight", "weight_scale_inv", "activation_scale"), blockwise),
}
"""``quant_method`` -> format."""


# ---- reading ---------------------------------------------------------------------------------------------------------


def load(
    path: str | os.PathLike[str], dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> Any:
    """A packed model from another format: a folder with config.json and safetensors, or a ``.gguf`` file.

    Projection by projection; no float form of a projection is held whose grid is compatible.

    Args:
        path: the folder or file.
        dtype: of what is not packed, and of activations; none: the checkpoint's.
        device: where to put the model; none: the CPU.

    Raises:
        DataError: files that are missing or cannot be read.
        FormatError: a format that is not in the table of this module, or a variant of one that cannot be read.

    Warns:
        FuWarning: projections that were quantised again, and scales that were rounded, with numbers.
    """
    path = Path(path).expanduser()
    config, source = _gguf(path) if path.suffix == ".gguf" else _folder(path)
    notes: Counter[str] = Counter()
    state, blocks = _pack(source, config, notes)
    model = _build(config, state, blocks, source.kind, dtype)
    if notes:
        said = "; ".join(f"{what} ({count})" for what, count in sorted(notes.items()))
        warnings.warn(f"{path.name}: {said}", FuWarning, stacklevel=2)
    return model if device is None else model.to(device)


@dataclass
class Source:
    """What a checkpoint holds: names of packed projections, their decoder, and all other tensors."""

    kind: str
    packed: list[str]
    decode: Callable[[str, Counter[str]], Decoded]
    others: Callable[[], Iterator[tuple[str, Tensor]]]


def _folder(path: Path) -> tuple[Any, Source]:
    from safetensors import SafetensorError, safe_open
    from transformers import AutoConfig

    from .hf_quantizer import shards

    try:
        settings = json.loads((path / "config.json").read_text(encoding="utf-8")).get("quantization_config")
        config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError, AttributeError) as error:
        raise DataError(
            f"config.json cannot be read: {error}", where=str(path), advice="Give a saved folder."
        ) from error
    method = (settings or {}).get("quant_method")
    if method not in KINDS:
        raise FormatError(
            f"{method!r} is no format that can be repacked",
            where=str(path),
            advice=f"Possible: {', '.join(KINDS)}, GGUF.",
        )
    kind, files = KINDS[method], {}
    try:
        for shard in shards(path):
            handle = safe_open(os.fspath(shard), framework="pt")
            files.update(dict.fromkeys(handle.keys(), handle))
    except (SafetensorError, OSError) as error:
        raise DataError(f"a shard cannot be read: {error}", where=str(path), advice="Download it again.") from error
    packed = [n.removesuffix(f".{kind.mark}") for n in files if n.endswith(f".{kind.mark}")]
    taken = {f"{name}.{part}" for name in packed for part in kind.parts}
    schemes = settings
    if method == "compressed-tensors":
        schemes = _scheme(settings)

    def decode(name: str, notes: Counter[str]) -> Decoded:
        parts = {p: files[f"{name}.{p}"].get_tensor(f"{name}.{p}") for p in kind.parts if f"{name}.{p}" in files}
        try:
            if method == "torchao":
                said = files[f"{name}.{kind.mark}"].metadata() or {}
                return kind.decode(parts, {"tensor": json.loads(said[f"{name}.weight"])}, notes)
            return kind.decode(parts, schemes, notes)
        except KeyError as error:
            raise FormatError(f"{method}: the tensor {error} is missing", where=name) from error
        except FormatError as error:
            raise FormatError(error.what, where=name, advice=error.advice) from error

    def others() -> Iterator[tuple[str, Tensor]]:
        for name, handle in files.items():
            if name not in taken:
                yield name, handle.get_tensor(name)

    return config, Source(method, packed, decode, others)


def _scheme(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """The one weight scheme of a compressed-tensors checkpoint."""
    groups = settings.get("config_groups") or {}
    schemes = [g.get("weights") for g in groups.values()]
    if len({json.dumps(s, sort_keys=True) for s in schemes}) != 1 or not schemes[0]:
        raise FormatError(f"compressed-tensors with {len(schemes)} weight schemes", where="quantization_config")
    if settings.get("format") not in ("pack-quantized", "float-quantized"):
        raise FormatError(f"compressed-tensors format {settings.get('format')!r}", where="quantization_config")
    return {"weights": schemes[0]}


_GGUF_NAMES = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
_GGUF_MODELS = ("llama", "qwen2", "qwen3")


def _gguf(path: Path) -> tuple[Any, Source]:
    try:
        from gguf import GGMLQuantizationType as Type
        from gguf import GGUFReader, dequantize
    except ImportError as error:
        raise MissingDependencyError("reading GGUF needs the package gguf", advice="pip install gguf") from error
    from transformers import AutoConfig

    if not path.is_file():
        raise DataError(f"there is no file {path}", where="checkpoint", advice="Give the path of a .gguf file.")
    try:
        reader = GGUFReader(path)
        config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    except (OSError, ValueError) as error:
        raise DataError(f"the GGUF file cannot be read: {error}", where=str(path)) from error
    if config.model_type not in _GGUF_MODELS:
        raise FormatError(f"GGUF with a {config.model_type} model", advice=f"Possible: {', '.join(_GGUF_MODELS)}.")
    tensors = {gguf_name(t.name): t for t in reader.tensors if not t.name.startswith("rope_freqs")}
    types = {Type.Q4_0: 0, Type.Q4_1: 1}
    packed = [
        n.removesuffix(".weight")
        for n, t in tensors.items()
        if t.tensor_type in types and n.startswith("model.layers.")
    ]
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}

    def rows(name: str, count: int) -> Tensor:
        """Order of rows: llama.cpp stores q and k of llama models with the two halves of each head interleaved."""
        own = name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]
        order = torch.arange(count)
        if config.model_type == "llama" and own in heads:
            order = order.view(heads[own], -1, 2).transpose(1, 2).reshape(-1)
        return order

    def decode(name: str, notes: Counter[str]) -> Decoded:
        t = tensors[f"{name}.weight"]
        k, n = (int(v) for v in t.shape)
        raw = torch.from_numpy(t.data.reshape(n, k // 32, -1).copy())[rows(name, n)]
        return gguf_block(raw, types[t.tensor_type], notes)

    def others() -> Iterator[tuple[str, Tensor]]:
        for name, t in tensors.items():
            if name.removesuffix(".weight") not in packed:
                value = torch.from_numpy(dequantize(t.data, t.tensor_type).copy())
                yield name, value[rows(name, value.shape[0])]

    return config, Source("gguf", packed, decode, others)


def gguf_name(name: str) -> str:
    """``model.layers.3.self_attn.q_proj.weight`` for ``blk.3.attn_q.weight``. FormatError for a name without one."""
    found = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if found is None or found[2] not in _GGUF_NAMES:
        raise FormatError(f"the GGUF tensor {name} has no place in a Llama model")
    return f"model.layers.{found[1]}." * (found[1] is not None) + f"{_GGUF_NAMES[found[2]]}.{found[3]}"


def gguf_block(raw: Tensor, kind: int, notes: Counter[str]) -> Decoded:
    """raw: [N, K/32, 18 or 20] u8, Q4_0 (``kind`` 0: scale, codes) or Q4_1 (1: scale, minimum, codes)."""
    n, blocks, _ = raw.shape
    head = 4 if kind else 2
    codes = torch.cat((raw[..., head:] & 15, raw[..., head:] >> 4), -1).view(n, blocks * 32)
    numbers = raw[..., :head].contiguous().view(torch.float16)
    scales = numbers[..., 0]
    zeros = torch.full(scales.shape, 8.0)
    if kind:
        minimum = numbers[..., 1].float()
        zeros = torch.where(scales == 0, 0.0, -minimum / torch.where(scales == 0, 1.0, scales.float()))
        if bool(((scales == 0) & (minimum != 0)).any()):  # a constant block: no scale, a value
            weight = codes.float() * scales.float().repeat_interleave(32, 1) + minimum.repeat_interleave(32, 1)
            return Again(weight, "int4", "a block is constant and not zero")
        near = zeros.round()
        zeros = torch.where(near * scales.float() == -minimum, near, zeros)
    return int4_or_again(codes, scales, zeros, 32, notes)


# ---- building --------------------------------------------------------------------------------------------------------


def _pack(source: Source, config: Any, notes: Counter[str]) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
    """All tensors of the packed model and the manifest's blocks."""
    from .quantize import PAIRED

    silu = getattr(config.get_text_config(), "hidden_act", "") in ("silu", "swish")
    state: dict[str, Tensor] = {}
    blocks: dict[str, dict[str, Any]] = {}
    moved: dict[str, Tensor] = {}
    for task in _tasks(source.packed):
        found = {name: source.decode(name, notes) for names in task for name in names}
        down = found[task[-1][0]] if len(task) == 2 else None
        order = down.order() if isinstance(down, Scattered) else None
        if isinstance(down, Scattered):
            found[task[-1][0]] = down.sorted(notes)
        for names in task:
            parts = [_settle(found[name], notes) for name in names]
            if order is not None and names is task[0]:  # the rows of gate and up, as the columns of down
                parts = [_with_rows(part, order) for part in parts]
                moved |= {f"{name}.bias": order for name in names}
            paired = silu and tuple(n.rpartition(".")[2] for n in names) in PAIRED
            for members, group in _runs(names, parts, paired):
                _add(state, blocks, members, group, paired and len(members) == len(names))
    for name, value in source.others():
        state[name] = value[moved[name]] if name in moved else value
    return state, blocks


def _tasks(packed: Sequence[str]) -> Iterator[list[list[str]]]:
    """What is handled together: projections of one block, and down_proj behind its gate and up."""
    from .quantize import JOINED

    have, done = set(packed), set[str]()
    for name in packed:
        parent, dot, own = name.rpartition(".")
        gate_up = [f"{parent}{dot}{n}" for n in JOINED[1]]
        down = f"{parent}{dot}down_proj"
        if name in done:
            continue
        if own in ("down_proj", *JOINED[1]) and have.issuperset((*gate_up, down)):
            task = [gate_up, [down]]
        else:
            names = [f"{parent}{dot}{n}" for n in next((j for j in JOINED if own in j), (own,))]
            task = [names if have.issuperset(names) else [name]]
        done |= {n for names in task for n in names}
        yield task


def _settle(found: Decoded, notes: Counter[str]) -> Int4Codes | Fp8:
    if isinstance(found, Scattered):
        found = found.again()
    if not isinstance(found, Again):
        return found
    notes[f"projections quantised again, to nearest: {found.reason}"] += 1
    if found.precision == "fp8":
        return Fp8(*formats.quantize_fp8(found.weight))
    return formats.quantize_int4(found.weight, min(formats.GROUPS), "asym")


def _with_rows(part: Int4Codes | Fp8, order: Tensor) -> Int4Codes | Fp8:
    if isinstance(part, Fp8):
        return Fp8(part.codes.view(torch.uint8)[order].view(torch.float8_e4m3fn), part.scales[order])
    return Int4Codes(part.codes[order], part.scales[order], part.zeros[order], part.group)


def _runs(
    names: list[str], parts: list[Int4Codes | Fp8], paired: bool
) -> Iterator[tuple[list[str], list[Int4Codes | Fp8]]]:
    """All of them in one block where they fit, each in its own otherwise."""
    alike = len({(type(p), p.codes.shape[1], getattr(p, "group", 0)) for p in parts}) == 1
    sizes = [p.codes.shape[0] for p in parts]
    if paired:
        fits = len(set(sizes)) == 1 or len(sizes) == 1
    else:
        fits = isinstance(parts[0], Fp8) or all(s % formats.TILE_N == 0 for s in sizes[:-1])
    if alike and fits:
        yield names, parts
    else:
        yield from (([n], [p]) for n, p in zip(names, parts, strict=True))


def _add(
    state: dict[str, Tensor], blocks: dict[str, dict[str, Any]], names: list[str], parts: list[Int4Codes | Fp8],
    paired: bool,
) -> None:  # fmt: skip
    k, n = parts[0].codes.shape[1], sum(p.codes.shape[0] for p in parts)
    int4 = [p for p in parts if isinstance(p, Int4Codes)]
    if int4:
        paired = paired and n % 2 == 0
        packed, group = pack_codes(int4, paired), int4[0].group
    else:
        fp8 = [p for p in parts if isinstance(p, Fp8)]
        codes = torch.cat([p.codes.view(torch.uint8) for p in fp8]).view(torch.float8_e4m3fn)
        packed, group, paired = pack_fp8(codes, torch.cat([p.scales for p in fp8])), 0, False
    Rows("int4" if int4 else "fp8", n, k, group, paired, 0, n).verify(packed)
    state[f"{names[0]}.block.packed"] = packed
    members = [[name, p.codes.shape[0]] for name, p in zip(names, parts, strict=True)]
    blocks[names[0]] = {
        "precision": "int4" if int4 else "fp8", "k": k, "group": group, "paired": paired, "members": members,
    }  # fmt: skip


def _build(
    config: Any, state: dict[str, Tensor], blocks: dict[str, dict[str, Any]], kind: str, dtype: torch.dtype | None
) -> Any:
    """The model on the meta device, its projections replaced, the state assigned (fu_compile.hf_quantizer)."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    from . import __version__
    from .hf_quantizer import FuTransformerConfig, verified

    manifest = FuTransformerConfig(blocks=blocks, method=kind, made_by=str(__version__))
    config.quantization_config = manifest.to_dict()
    chosen = dtype or config.dtype or next((t.dtype for t in state.values() if t.is_floating_point()), torch.float32)
    kind_of_model: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    with verified():
        model, info = kind_of_model.from_pretrained(
            None, config=config, state_dict=state, dtype=chosen, output_loading_info=True
        )
    if lost := sorted(info["missing_keys"]):
        raise FormatError(f"the checkpoint lacks {len(lost)} tensors of the model, the first is {lost[0]}", where=kind)
    return model.eval().requires_grad_(False)
