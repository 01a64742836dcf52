"""The lean way: linears replaced by packed ones, the originals freed.

``quantize`` walks the decoder layers. Projections that one kernel reads together share one block of bytes
(``fu_compile/packed.py``), in the form that the kernels read::

    self_attn   q_proj, k_proj, v_proj   one block [q; k; v], owned by q_proj
                o_proj                   a block of its own
    mlp         gate_proj, up_proj       one block, INT4: gate and up rows interleaved, owned by gate_proj
                down_proj                a block of its own

Under the backend these bytes are the operands of ``linear_int4`` and ``linear_fp8``, in prefill too: no other form of
the weight exists. In eager a :class:`PackedLinear` multiplies with the dequantised weight, as the reference operators
do; on a CPU that copy is kept with the block (4 bytes a weight, 2 in bfloat16), elsewhere it is made at every call.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from glob import escape
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import formats, lowerings
from .errors import FormatError, GradientError, NoLlamaBlockError, OptionError, TrainingModeError
from .formats import Int4Codes
from .lowerings.dense import dense
from .options import Options
from .packed import Rows, pack_codes, pack_fp8
from .plan import in_decoder_layer
from .weights import PackSpec, input_scale, set_input_scale

METHODS = ("rtn", "gptq")
JOINED: tuple[tuple[str, ...], ...] = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of projections of one module that are packed into one block, in this order."""
PAIRED = (("gate_proj", "up_proj"), ("gate_up_proj",))
"""Groups whose INT4 rows are interleaved when a SwiGLU follows."""
LARGEST = 5e5
"""Magnitude of a weight from which its INT4 scale leaves float16."""

assert lowerings.TABLE  # the operators are registered by importing the table


class PackedBlock(nn.Module):
    """One block of packed weights: the buffer ``packed``, [bytes] u8."""

    packed: Tensor

    def __init__(self, rows: Rows, packed: Tensor | None = None) -> None:
        """``rows``: all rows of the block; ``packed``: its bytes, or none: on the current default device, not filled.

        Raises:
            FormatError: another size or dtype than ``rows`` says.
        """
        super().__init__()
        rows.check()
        self.rows = rows.whole
        if packed is not None:
            rows.verify(packed)
        self.register_buffer("packed", torch.empty(rows.bytes, dtype=torch.uint8) if packed is None else packed)

    def _apply(self, fn: Any, recurse: bool = True) -> PackedBlock:
        scale = input_scale(self.packed)  # of the tensor that is about to be replaced
        super()._apply(fn, recurse)
        if scale is not None:
            set_input_scale(self.packed, scale)
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        given = state_dict.get(f"{prefix}packed")
        if isinstance(given, Tensor) and not given.is_meta:
            self.rows.verify(given)  # what PyTorch would cast in silence
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def extra_repr(self) -> str:
        """What the block holds, for print(model)."""
        r = self.rows
        form = f"int4, group {r.group}" + ", gate and up interleaved" * r.paired if r.precision == "int4" else "fp8"
        return f"{r.n} x {r.k}, {form}"


class PackedLinear(nn.Module):
    """y = x @ W.T + bias, W being rows of a packed block. Takes the place of an ``nn.Linear``; for inference only.

    The first projection of a block owns it as a submodule; the others hold it beside, so ``state_dict`` has every byte
    once (``...q_proj.block.packed`` has q, k and v).
    """

    block: PackedBlock
    bias: nn.Parameter | None

    def __init__(self, block: PackedBlock, first: int, rows: int, bias: Tensor | None, owner: bool) -> None:
        """Rows ``first .. first + rows - 1`` of ``block``; bias: [rows] or none; ``owner``: registers the block.

        Raises:
            FormatError: rows that the block does not have.
        """
        super().__init__()
        if owner:
            self.block = block
        else:
            object.__setattr__(self, "block", block)  # not registered
        self.where = replace(block.rows, first=first, rows=rows)
        self.where.check()
        self.in_features, self.out_features = block.rows.k, rows
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias.detach(), requires_grad=False))
        self.training = False

    @property
    def weight(self) -> Tensor:
        """The dequantised weight, [out_features, in_features] f32: a new tensor at every call."""
        return self.where.dense(self.block.packed)

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in_features] -> [..., out_features] in x's dtype.

        Raises:
            TrainingModeError: in training mode.
            GradientError: gradients are enabled and x requires them: there is no backward.
        """
        if self.training:
            raise TrainingModeError("a packed linear was called in training mode", where=repr(self))
        r = self.where
        if torch.compiler.is_compiling():
            weight = torch.ops.futransformer.packed_weight(
                self.block.packed, r.precision, r.n, r.k, r.group, r.paired, r.first, r.rows, x.dtype
            )
            return F.linear(x, weight, self.bias)
        if x.requires_grad and torch.is_grad_enabled():
            raise GradientError("the input of a packed linear requires gradients", where=repr(self))
        if x.device.type != "cpu":
            return F.linear(x, self.weight.to(x.dtype), self.bias)
        y = _product(x, self.block.packed, r)
        return (y if self.bias is None else y.add_(self.bias)).to(x.dtype)

    def extra_repr(self) -> str:
        """Sizes and rows, for print(model)."""
        r = self.where
        part = "" if r.rows == r.n else f", rows {r.first} to {r.first + r.rows - 1} of a block of {r.n}"
        return f"{self.in_features}, {self.out_features}, {r.precision}, bias={self.bias is not None}{part}"


def _product(x: Tensor, packed: Tensor, r: Rows) -> Tensor:
    """x @ W.T in float32, on a CPU, with the dense form of the whole block that the CPU lowerings share."""
    dtype = torch.bfloat16 if x.dtype == torch.bfloat16 else torch.float32
    half = (dtype,) if dtype == torch.bfloat16 else ()
    here = slice(r.first, r.first + r.rows)
    if r.precision == "int4":
        key: tuple[Any, ...] = (r.n, r.k, r.group, r.paired, packed.storage_offset(), *half)
        full = dense(packed, key, lambda: r.whole.dense(packed).to(dtype))
        return F.linear(x.to(dtype), full[here]).to(torch.float32)
    codes, scales = r.whole.operands(packed)
    full = dense(codes, (codes.shape, codes.storage_offset(), *half), lambda: codes.detach().to(dtype))
    return F.linear(x.to(dtype), full[here]).to(torch.float32).mul_(scales[here])


# ---- quantize --------------------------------------------------------------------------------------------------------


def quantize(
    model: nn.Module,
    method: str = "rtn",
    *,
    group_size: int = 128,
    grid: str | None = None,
    lm_head: str = "model",
    overrides: Iterable[tuple[str, str | Mapping[str, Any]]] = (),
    calibration: Any = None,
    tokenizer: Any = None,
    resume: Any = None,
    progress: bool = True,
    device: torch.device | str | None = None,
) -> nn.Module:
    """Replaces the linears of the decoder layers by packed ones, in place, and frees the originals.

    Layer by layer: at no time more than one projection block exists twice. ``requires_grad`` is switched off for the
    whole model, since nothing here has a backward.

    Args:
        model: a causal language model of transformers in eval mode, on one device.
        method: ``"rtn"`` (round to nearest; needs no text, with ``calibration`` its ranges are weighted by the inputs)
            or ``"gptq"`` (fu_compile.gptq).
        group_size: input columns that share one INT4 scale: 128, 64 or 32.
        grid: ``"sym8"`` or ``"asym"`` (formats.quantize_int4); default: asym with calibration, sym8 without.
        lm_head: ``"model"`` keeps the output head, ``"int4"`` (by ``method``) or ``"fp8"`` packs it; a head tied to the
            embedding is untied.
        overrides: pairs (shell glob over the module path, choice), first match wins. A choice is ``"int4"``, ``"fp8"``
            (one scale per output channel), ``"bf16"`` or ``"exact"``, which leave the linear as it is; or a mapping of
            ``method``, ``group_size``, ``grid``: INT4 that differs in these.
        calibration: text, whatever ``fu_compile.calibration.token_batches`` takes; none, with gptq: its default text.
        tokenizer: turns calibration text into ids.
        resume: with calibration: a folder that finished layers are written to and read from.
        progress: progress bars.
        device: with calibration: where it is computed, layer by layer; none: where the model is.

    Returns:
        ``model``, with ``config.quantization_config`` set; ``save_pretrained`` writes it packed.

    Raises:
        OptionError, TrainingModeError, MetaParameterError, OffloadedParameterError, DtypeError, NoLlamaBlockError,
        FormatError (packed already, or a weight that is not finite), DataError (calibration text, ``resume``): before
        anything is changed.
    """
    from . import gptq
    from .calibration import token_batches
    from .hf_quantizer import describe
    from .models import check

    if method not in METHODS:
        raise OptionError(f"method cannot be {method!r}", where="quantize", advice=f"Possible: {', '.join(METHODS)}.")
    grid = grid or ("sym8" if method == "rtn" and calibration is None else "asym")
    if grid not in ("sym8", "asym"):
        raise OptionError(f"grid cannot be {grid!r}", where="quantize", advice="Possible: sym8, asym.")
    default = gptq.Choice(method, group_size, grid)
    pairs = gptq.parse_overrides(overrides)
    named = tuple((pattern, entry) for pattern, entry in pairs if isinstance(entry, str))
    options = Options(group_size=group_size, lm_head=lm_head, overrides=named)  # checks the values
    special = [gptq.choice_of(entry, default) for _, entry in pairs if not isinstance(entry, str)]
    needs_text = any(c is not None and c.method == "gptq" for c in (default, *special)) or calibration is not None
    if resume is not None and not needs_text:
        raise OptionError("rounding to nearest without calibration cannot be resumed", where="resume", advice="")
    check(model, quantising=True)
    groups = plan(model, options, pairs)
    if needs_text or special:
        batches = token_batches(calibration, tokenizer, model=model) if needs_text else None
        head = any(g.precision == "int4" and not in_decoder_layer(g.names[0]) for g in groups)
        blocks = gptq.quantize_blocks(
            model, batches, method=method, group_size=group_size, grid=grid, overrides=pairs, resume=resume,
            progress=progress, device=device, lm_head=head,
        )  # fmt: skip
        made = _from_blocks(groups, blocks, grid)
    else:
        made = _rtn(groups, grid, progress)
    with torch.no_grad():
        for group, block in made:
            install(model, group, block)
            del block
    model.requires_grad_(False)
    describe(model, method)
    return model


class Group:
    """Linears that become one block: names (module paths, in order), modules, precision, pairing and group size."""

    def __init__(
        self, names: Sequence[str], modules: Sequence[nn.Linear], precision: str, paired: bool, group_size: int = 0
    ) -> None:
        self.names, self.modules, self.precision, self.paired = list(names), list(modules), precision, paired
        self.group_size = group_size

    @property
    def rows(self) -> Rows:
        """All rows of the block."""
        n = sum(m.out_features for m in self.modules)
        int4 = self.precision == "int4"
        return Rows(self.precision, n, self.modules[0].in_features, self.group_size * int4, self.paired and int4, 0, n)


def plan(model: nn.Module, options: Options, overrides: Sequence[tuple[str, Any]] = ()) -> list[Group]:
    """The blocks that :func:`quantize` makes, in the order of the modules. Raises for models it cannot do.

    ``overrides``: pairs of pattern and choice, as :func:`quantize` takes them; none: those of ``options``.
    """
    modules = dict(model.named_modules())
    if packed := next((n for n, m in modules.items() if isinstance(m, PackedLinear)), None):
        raise FormatError("this model is packed already", where=packed, advice="Load the original model again.")
    silu = _activation(model) in ("silu", "swish")
    head = getattr(model, "get_output_embeddings", lambda: None)()
    wanted: dict[str, tuple[str, int]] = {}  # precision and group size
    for name, module in modules.items():
        inside = in_decoder_layer(name)
        if isinstance(module, nn.Linear) and (inside or module is head):
            entry: Any = next((e for p, e in overrides or options.overrides if fnmatchcase(name, p)), {})
            base, more = ("int4" if inside else options.lm_head), entry if isinstance(entry, Mapping) else {}
            precision = entry if isinstance(entry, str) else base
            wanted[name] = precision, more.get("group_size", options.group_size)
    if not any(map(in_decoder_layer, wanted)):
        raise NoLlamaBlockError(f"{type(model).__name__} has no linears in decoder layers", where="quantize")
    groups: list[Group] = []
    for name in [n for n, (p, _) in wanted.items() if p in ("int4", "fp8")]:
        if any(name in g.names for g in groups[-3:]):
            continue
        parent, _, own = name.rpartition(".")
        names = next((j for j in JOINED if own in j), (own,))
        full = [f"{parent}.{n}" if parent else n for n in names]
        if not _can_join([modules.get(n) for n in full], [wanted.get(n) for n in full], own in PAIRED[0] and silu):
            names, full = (own,), [name]
        paired = silu and names in PAIRED and sum(modules[n].out_features for n in full) % 2 == 0
        groups.append(Group(full, [modules[n] for n in full], wanted[name][0], paired, wanted[name][1]))  # type: ignore[misc]
    for group in groups:
        for name, module in zip(group.names, group.modules, strict=True):
            _check_weight(name, module.weight, group.precision)
    return groups


def _can_join(modules: Sequence[Any], wanted: Sequence[tuple[str, int] | None], paired: bool) -> bool:
    """Whether these linears fit one block: all there, alike, and INT4 rows that start at a strip."""
    if not all(isinstance(m, nn.Linear) for m in modules) or len(set(wanted)) > 1 or wanted[0] is None:
        return False
    if len({(m.in_features, m.weight.device, m.weight.dtype) for m in modules}) > 1:
        return False
    if paired:
        return len({m.out_features for m in modules}) == 1
    return wanted[0][0] == "fp8" or all(m.out_features % formats.TILE_N == 0 for m in modules[:-1])


def _activation(model: nn.Module) -> str:
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return str(getattr(text, "hidden_act", ""))


def _check_weight(name: str, weight: Tensor, precision: str) -> None:
    low, high = (float(v) for v in torch.aminmax(weight.detach()))
    if not (-float("inf") < low <= high < float("inf")):
        raise FormatError("the weight is not finite (NaN or infinity)", where=name, advice="Load the weights again.")
    if precision == "int4" and max(-low, high) > LARGEST:
        raise FormatError(f"a weight of magnitude {max(-low, high):.3g} has no INT4 scale in float16", where=name)


def _rtn(groups: list[Group], grid: str, progress: bool) -> Iterator[tuple[Group, PackedBlock]]:
    from tqdm.auto import tqdm

    total = sum(m.weight.numel() for g in groups for m in g.modules)
    with tqdm(total=total, unit="weight", unit_scale=True, desc="quantize", disable=not progress) as bar:
        for group in groups:
            size = sum(m.weight.numel() for m in group.modules)
            yield group, rtn_block(group, grid)
            bar.update(size)


def rtn_block(group: Group, grid: str = "sym8") -> PackedBlock:
    """The block of these linears, rounded to nearest; float32 copies of a few rows at a time."""
    rows = group.rows
    weights = [m.weight.detach() for m in group.modules]
    spec = PackSpec(
        name=group.names[0], precision=group.precision, weights=tuple(range(len(weights))), biases=(), gain=None,
        group=group.group_size, interleave=rows.paired, n=rows.n, k=rows.k,
    )  # fmt: skip
    if rows.precision == "fp8":
        return PackedBlock(rows, pack_fp8(*spec.pack(weights)[:2]))
    packed = torch.empty(rows.bytes, dtype=torch.uint8, device=weights[0].device)
    strip = formats.int4_bytes(formats.TILE_N, rows.k, group.group_size)
    for first, part in spec.blocks(weights):
        piece = formats.pack_int4(formats.quantize_int4(part, group.group_size, grid))
        packed[first // formats.TILE_N * strip :][: piece.numel()] = piece
    return PackedBlock(rows, packed)


def _from_blocks(groups: list[Group], blocks: Iterable[Any], grid: str) -> Iterator[tuple[Group, PackedBlock]]:
    """Packs what ``gptq.quantize_blocks`` yields; linears that it leaves out (FP8) with the block they lie in."""
    left = list(groups)
    for block in blocks:
        here = [g for g in left if g.names[0] == block.name or g.names[0].startswith(f"{block.name}.")]
        for group in here:
            left.remove(group)
            yield group, _block_of(group, block.layers, grid)
    for group in left:  # an output head that is not INT4
        yield group, rtn_block(group, grid)


def _block_of(group: Group, layers: Mapping[str, Int4Codes], grid: str) -> PackedBlock:
    codes = [layers.get(name) for name in group.names]
    if group.precision == "int4" and all(isinstance(c, Int4Codes) for c in codes):
        return codes_block(group, codes)  # type: ignore[arg-type]
    return rtn_block(group, grid)


def pack(model: nn.Module, codes: Mapping[str, Int4Codes], method: str = "gptq") -> nn.Module:
    """Packs codes that were chosen before (``gptq.quantize_blocks``); every other linear stays as it is.

    Args:
        model: as for :func:`quantize`; changed in place.
        codes: module path -> codes of its weight.
        method: for the manifest.

    Returns:
        ``model``.

    Raises:
        OptionError, FormatError: a path that is no linear of a decoder layer, or codes of another shape, before
            anything is changed. Otherwise as :func:`quantize`.
    """
    from .hf_quantizer import describe
    from .models import check

    check(model, quantising=True)
    pairs: list[tuple[str, Any]] = [(escape(name), {"group_size": q.group}) for name, q in codes.items()]
    groups = plan(model, Options(), [*pairs, ("*", "exact")])
    known = {n: m for g in groups for n, m in zip(g.names, g.modules, strict=True)}
    for name, q in codes.items():
        if name not in known:
            raise OptionError(f"{name} is no linear of a decoder layer", where="pack")
        if q.codes.shape != known[name].weight.shape:
            raise FormatError(f"codes {list(q.codes.shape)} for {list(known[name].weight.shape)}", where=name)
    with torch.no_grad():
        for group in groups:
            install(model, group, _block_of(group, codes, "sym8"))
    model.requires_grad_(False)
    describe(model, method)
    return model


def codes_block(group: Group, codes: Sequence[Int4Codes]) -> PackedBlock:
    """The block of these linears from codes that somebody else has chosen."""
    return PackedBlock(group.rows, pack_codes(list(codes), paired=group.paired))


def install(model: nn.Module, group: Group, block: PackedBlock) -> None:
    """Puts packed linears in the place of the group's; the originals are let go of."""
    first = 0
    for i, name in enumerate(group.names):
        old = group.modules[i]
        new = PackedLinear(block, first, old.out_features, old.bias, owner=i == 0)
        first += old.out_features
        _put(model, name, new)
    group.modules.clear()
    block.train(False)


def _put(model: nn.Module, name: str, new: nn.Module) -> None:
    parent, _, own = name.rpartition(".")
    setattr(model.get_submodule(parent) if parent else model, own, new)


class _CallableModule(types.ModuleType):
    """Lets ``fu_compile.quantize`` be the function and the module at once."""

    def __call__(self, model: nn.Module, method: str = "rtn", **options: Any) -> nn.Module:
        return quantize(model, method, **options)


_CallableModule.__call__.__doc__ = quantize.__doc__
sys.modules[__name__].__class__ = _CallableModule

__all__ = ["Group", "PackedBlock", "PackedLinear", "pack", "plan", "quantize"]
