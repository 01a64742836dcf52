"""The weight store: from (parameters, versions) to folded and packed forms, shared by all graphs of a model.

The user's parameters are never changed. A packed form belongs to the parameter *objects* it was made from and to their
``_version``; another object (``load_state_dict(assign=True)``, a copy of the model that runs through the same graph) or
another version (in-place writes) is packed for itself. Writes that PyTorch does not count (``p.data``, inference
tensors) are found by comparing a sample of every parameter, at every prefill.

Packing goes projection by projection, in blocks of rows, so that no float32 copy of a whole layer ever exists.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import formats
from .caches import version
from .errors import FormatError
from .packed import Rows

_NEVER = -1
BLOCK = 1 << 22
"""Weights that are folded and quantised at a time: 16 MiB in float32, whatever the model."""

SAMPLE = 16
"""Elements per parameter that are compared to find uncounted writes."""


@dataclass(frozen=True)
class CalibratedKeys:
    """Key tables that were measured on text, of one layer."""

    mean: Tensor
    """[Hkv, D] f32"""
    balance: Tensor
    """[Hkv, D] f32"""
    reads: Tensor
    """[Hkv, D] f32, of keys per channel"""
    error: float
    """Relative error of the attention's output through the INT4 cache with these tables, on that text."""
    version: int | None
    """Of the keys' weights when they were measured."""


RUINED = 0.5
"""Relative error of an attention's output, measured on calibration text, from which a layer keeps the model's cache."""


@dataclass(frozen=True)
class PackSpec:
    """How one packed constant is made from Dynamo's arguments (the integers are positions in the argument list)."""

    name: str
    precision: str
    weights: tuple[int, ...]
    """Joined along the output features."""
    biases: tuple[int, ...]
    gain: int | None
    """RMSNorm gain that is folded into the weight."""
    group: int
    interleave: bool
    """Gate and up rows interleaved as ``formats.interleave_gate_up`` says."""
    n: int
    k: int
    rows: Rows | None = None
    """The one source is a block that was packed with the model, and these are the rows of it that the linear reads."""

    @property
    def sources(self) -> tuple[int, ...]:
        """Every argument the constant depends on."""
        return (*self.weights, *self.biases, *(() if self.gain is None else (self.gain,)))

    def pack(self, sources: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The constants for these sources (in the order of ``self.sources``): the operands of the linear operator."""
        count = len(self.weights)
        weights, biases = sources[:count], sources[count : count + len(self.biases)]
        gain = None if self.gain is None else sources[-1]
        bias = () if not biases else (torch.cat([b.detach() for b in biases]),)
        if self.rows is not None:
            act = (input_state(weights[0]),) if self.precision == "fp8" else ()
            return (*self.rows.operands(weights[0].detach()), *act, *bias)
        return (*getattr(self, f"_pack_{self.precision}")(weights, gain), *bias)

    def blocks(self, weights: Sequence[Tensor], gain: Tensor | None = None) -> Iterator[tuple[int, Tensor]]:
        """(first row, float32 rows) of the joined, interleaved and folded weight."""
        order = formats.interleave_gate_up(self.n).to(weights[0].device) if self.interleave else None
        starts = [0]
        for w in weights:
            starts.append(starts[-1] + w.shape[0])
        step = max(16, BLOCK // self.k // 16 * 16)
        for first in range(0, self.n, step):
            last = min(self.n, first + step)
            if order is None:
                parts = [
                    w.detach()[max(first - s, 0) : max(last - s, 0)] for w, s in zip(weights, starts, strict=False)
                ]
                rows = torch.cat([p for p in parts if p.shape[0]]).to(torch.float32)
            else:
                rows = torch.empty(last - first, self.k, device=weights[0].device)
                wanted = order[first:last]
                for w, s in zip(weights, starts, strict=False):
                    here = (wanted >= s) & (wanted < s + w.shape[0])
                    rows[here] = w.detach()[wanted[here] - s].to(torch.float32)
            yield first, rows if gain is None else rows.mul_(gain.detach().to(torch.float32))

    def _pack_bf16(self, weights: Sequence[Tensor], gain: Tensor | None) -> tuple[Tensor]:
        like = weights[0]
        dtype = like.dtype if like.dtype == torch.float16 else torch.bfloat16
        packed = torch.empty(self.n, self.k, dtype=dtype, device=like.device)
        for first, rows in self.blocks(weights, gain):
            packed[first : first + rows.shape[0]] = rows
        return (packed,)

    def _pack_fp8(self, weights: Sequence[Tensor], gain: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        device = weights[0].device
        packed = torch.empty(self.n, self.k, dtype=torch.float8_e4m3fn, device=device)
        scales = torch.empty(self.n, dtype=torch.float32, device=device)
        for first, rows in self.blocks(weights, gain):
            here = slice(first, first + rows.shape[0])
            packed[here], scales[here] = formats.quantize_fp8(rows)
        return packed, scales, input_state(weights[0])

    def _pack_int4(self, weights: Sequence[Tensor], gain: Tensor | None) -> tuple[Tensor]:
        packed = torch.empty(
            formats.int4_bytes(self.n, self.k, self.group), dtype=torch.uint8, device=weights[0].device
        )
        strip = formats.int4_bytes(16, self.k, self.group)
        for first, rows in self.blocks(weights, gain):
            block = formats.pack_int4(formats.quantize_int4(rows, self.group))
            packed[first // 16 * strip :][: block.numel()] = block
        return (packed,)


def set_input_scale(weight: Tensor, scale: float) -> None:
    """Remembers the static FP8 scale of a projection's input beside its (first) weight, as that is now."""
    weight._fu_input_scale = (scale, version(weight))  # type: ignore[attr-defined]


def input_scale(weight: Tensor) -> float | None:
    """What :func:`set_input_scale` has left, or none, also where the weight was written to since."""
    scale, then = getattr(weight, "_fu_input_scale", (None, None))
    return scale if then == version(weight) else None


def input_state(weight: Tensor) -> Tensor:
    """The state (formats.fp8_state) of a projection's input, on its device: frozen where a static scale is known."""
    state = formats.fp8_state(weight.device)
    scale = input_scale(weight)
    if scale is not None:
        state[formats.FP8_SLOTS["scale"]], state[formats.FP8_SLOTS["frozen"]] = scale, 1.0
    return state


def restore_scales(model: Any) -> None:
    """Puts the scales of the manifest beside the weights that have none; the weights as they are now are theirs.

    Raises:
        FormatError: the manifest names a weight that the model does not have.
    """
    scales = getattr(getattr(getattr(model, "config", None), "quantization_config", None), "fp8_scales", None)
    if not scales:
        return
    weights = dict([*model.named_parameters(), *model.named_buffers()])
    if lost := [name for name in scales if name not in weights]:
        raise FormatError(f"the manifest has an FP8 scale for {lost[0]}, which the model does not have")
    for name, scale in scales.items():
        if not hasattr(weights[name], "_fu_input_scale"):
            set_input_scale(weights[name], scale)


def key_tables(
    heads: tuple[int, int, int], weights: Sequence[Tensor], biases: Sequence[Tensor], inv_freq: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Key mean and balance of a layer with a k_proj bias, [Hkv, D] float32 each, before any calibration.

    ``heads``: query heads, key/value heads, head_dim; ``weights`` and ``biases``: those of q, k and v, joined or not.
    The mean is that of the rotated bias over positions, the balance is quant.md's (E k^2 / E q^2)^(1/4), equal on RoPE
    pairs, with the second moments that the bias and unit-variance inputs give: b^2 + |w|^2 per row.
    """
    q_heads, kv_heads, dim = heads
    device = weights[0].device
    w = torch.cat([w.detach() for w in weights]) if len(weights) > 1 else weights[0].detach()
    b = torch.cat([b.detach().float() for b in biases])
    cut = [q_heads * dim, kv_heads * dim]
    power = torch.linalg.vector_norm(w[: sum(cut)], dim=1, dtype=torch.float32).square() + b[: sum(cut)].square()
    mean, _ = formats.kv_tables(kv_heads, dim, device, key_bias=b[cut[0] : sum(cut)], inv_freq=inv_freq)
    k2 = power[cut[0] :].view(kv_heads, dim)
    q2 = power[: cut[0]].view(kv_heads, q_heads // kv_heads, dim).mean(1)
    rotated = dim if inv_freq is None else 2 * inv_freq.numel()
    ratio = k2 / q2.clamp_min(1e-12)
    half = rotated // 2
    pair = (k2[:, :half] + k2[:, half:rotated]) / (q2[:, :half] + q2[:, half:rotated]).clamp_min(1e-12)
    ratio[:, :half] = ratio[:, half:rotated] = pair
    return mean, ratio.clamp(1e-4, 1e4).pow(0.25)


RISK = 3.0
"""Rotating part of a k_proj bias against what the inputs put into the keys, from which INT4 keys lose the latter.

One rotated token is coded in 15 steps of its largest value: with a constant three times as large as the content, a step
is as large as the content's standard deviation."""


OUTLIER = 8.0
"""Largest channel of the keys against the median one, from which INT4 keys lose the others.

Rotation spreads one channel over its block, and the step grows with it: one channel 4, 8, 16, 50 times the rest costs
2, 5, 15, 80 times the KL divergence of keys without one (tests/cases, B24). Trained models without biases stay under 6
(SmolLM2-135M, all layers)."""


HORIZON = 8192
"""Positions over which a turning bias is followed."""


def _left(bias: Tensor, mean: Tensor, inv_freq: Tensor) -> Tensor:
    """What centring leaves of a bias that RoPE turns: root mean square over HORIZON positions, [Hkv, D] f32."""
    half = inv_freq.numel()
    angle = torch.arange(HORIZON, dtype=torch.float64)[:, None] * inv_freq.detach().double().cpu().reshape(-1)
    c, s = angle.cos(), angle.sin()
    c1, s1, c2, s2, cs = c.mean(0), s.mean(0), c.square().mean(0), s.square().mean(0), (c * s).mean(0)
    b, m = (t.detach().double().cpu().view(mean.shape) for t in (bias, mean))
    (x, y), (mx, my) = ((t[:, :half], t[:, half : 2 * half]) for t in (b, m))
    first = x * x * c2 + y * y * s2 - 2 * x * y * cs - 2 * mx * (x * c1 - y * s1) + mx * mx
    second = y * y * c2 + x * x * s2 + 2 * x * y * cs - 2 * my * (y * c1 + x * s1) + my * my
    left = torch.cat((first, second, (b - m)[:, 2 * half :].square()), 1)
    return left.clamp_min_(0.0).sqrt_().to(mean)


def key_risk(
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    norm: Tensor | None,
    heads: tuple[int, int, int],
    inv_freq: Tensor | None = None,
    tables: tuple[Tensor, Tensor] | None = None,
) -> str | None:
    """Why INT4 keys would be ruined by these projections of q, k and v (joined or not), or none.

    Compares the channels' standard deviation for inputs of unit variance: the row norms of k_proj, or the gains of the
    ``norm`` over the keys. A bias counts against the root mean square of all: its largest channel decides, since
    rotation spreads it. With key ``tables`` (:func:`key_tables`) and ``inv_freq`` only what they leave of the bias
    counts: its slowly turning part is subtracted, the rest is balanced. ``heads``: query heads, key/value heads,
    head_dim. Reads the device.
    """
    if not weights or weights[0].is_meta:
        return None
    q_heads, kv_heads, dim = heads
    pick, rows = (1, slice(None)) if len(weights) > 1 else (0, slice(q_heads * dim, (q_heads + kv_heads) * dim))
    if norm is not None:
        spread = norm.detach().float().abs()
    else:
        spread = torch.linalg.vector_norm(weights[pick].detach()[rows], dim=1, dtype=torch.float32)
    outlier = float(spread.max() / spread.median().clamp_min(1e-12))
    if outlier > OUTLIER:
        return (
            f"one channel of the keys is {outlier:.1f} times the median one: INT4 keys would lose the others,"
            " so this layer keeps the model's cache"
        )
    if not biases:
        return None
    bias = biases[pick].detach()[rows].float()
    constant = largest = float(bias.abs().max())
    what = "times the keys' own spread:"
    if tables is not None and inv_freq is not None and 2 * inv_freq.numel() <= dim:
        balance = tables[1].to(spread)
        largest = float((_left(bias, tables[0], inv_freq).to(spread) / balance).max())
        spread = spread.view(1 if norm is not None else kv_heads, dim) / balance
        what = "times the keys' own spread after centring:"
    ratio = largest / max(float(spread.square().mean().sqrt()), 1e-12)
    if ratio <= RISK:
        return None
    return (
        f"k_proj has a bias of up to {constant:.3g}, {ratio:.1f} {what}"
        " without calibration INT4 keys would lose it, so this layer keeps the model's cache"
    )


def measured_risk(calibrated: CalibratedKeys) -> str | None:
    """Why INT4 keys would be ruined although they were calibrated, or none."""
    if calibrated.error <= RUINED:
        return None
    return (
        f"on the calibration text the attention through INT4 keys was off by {100 * calibrated.error:.0f} %,"
        " so this layer keeps the model's cache"
    )


class Sample:
    """A few elements of every parameter, to find writes that PyTorch does not count."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        views: dict[tuple, list[Tensor]] = {}
        for p in parameters:
            flat = p.detach().view(-1) if p.is_contiguous() else p.detach().reshape(-1)
            views.setdefault((p.dtype, p.device), []).append(flat[:: max(1, -(-flat.numel() // SAMPLE))])
        self._views = list(views.values())
        self._places = [(weakref.ref(p), p.data_ptr()) for p in parameters]
        self._values = self._read()

    def _read(self) -> list[Tensor]:
        return [torch.cat(v) for v in self._views]

    def changed(self) -> bool:
        """Whether a parameter has got other memory (``p.data = ...``), or a sampled element differs in any bit."""
        if any((p := ref()) is not None and p.data_ptr() != place for ref, place in self._places):
            return True
        return any(
            not torch.equal(a.view(torch.uint8), b.view(torch.uint8))
            for a, b in zip(self._values, self._read(), strict=True)
        )


class Entry:
    """Packed constants and the parameters, by identity, version and sample, that they were made from."""

    __slots__ = ("sample", "sources", "tensors", "versions")

    def __init__(self, sources: Sequence[Tensor], tensors: tuple[Tensor, ...]) -> None:
        self.sources = [weakref.ref(s) for s in sources]
        self.versions: list[int | None] = [version(s) for s in sources]
        self.tensors = tensors
        self.sample = Sample(sources)

    def current(self, sources: Sequence[Tensor]) -> bool:
        """Whether these are still the parameters, and PyTorch has counted no write to them."""
        return all(r() is s and version(s) == v for r, s, v in zip(self.sources, sources, self.versions, strict=True))


def finish(tensors: Sequence[Tensor]) -> None:
    """Waits until these are written: CUDA kernels read weights while the grid before still runs (decode_linear)."""
    for device in {t.device for t in tensors if t.is_cuda}:
        torch.cuda.current_stream(device).synchronize()


class WeightStore:
    """All packed constants of the process."""

    def __init__(self) -> None:
        self._entries: dict[tuple, Entry] = {}
        self.packs = 0
        self.repacks = 0
        self.generation = 0
        """Grows when an uncounted write is found: whoever holds constants asks again."""
        # By the tensor that the keys of a layer are computed with: calibrated tables, the model, (version, first key).
        self._keys: Any = torch.utils.weak.WeakTensorKeyDictionary()
        self._owners: Any = torch.utils.weak.WeakTensorKeyDictionary()
        self._first: Any = torch.utils.weak.WeakTensorKeyDictionary()
        self._reads: Any = torch.utils.weak.WeakTensorKeyDictionary()
        self.holders: weakref.WeakSet[Any] = weakref.WeakSet()
        """The bindings of all graphs: ``release(ids)`` lets go of what was made from parameters that were repacked."""

    def get(self, key: tuple, sources: Sequence[Tensor], make: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """The constants ``key`` of these parameters, made by ``make`` when there are none or they are out of date."""
        full = (*key, *map(id, sources))
        entry = self._entries.get(full)
        if entry is not None and entry.current(sources):
            if not entry.sample.changed():
                return entry.tensors
            self.drop(sources)
        if entry is None:
            self.packs += 1
            # the constants die with the first parameter they were made from
            weakref.finalize(sources[0], self._entries.pop, full, None)
        else:
            self.repacks += 1
            del self._entries[full]
            del entry  # before packing: old and new are never held together
            for holder in list(self.holders):
                holder.release(set(map(id, sources)))
        # Outside inference mode: calls of either mode read the constants, and FP8 states are written to.
        with torch.inference_mode(False), torch.no_grad():
            entry = self._entries[full] = Entry(sources, make())
        finish(entry.tensors)
        return entry.tensors

    def drop(self, sources: Sequence[Tensor]) -> None:
        """Forgets everything made from any of these parameters (they were written without being counted)."""
        ids = set(map(id, sources))
        for entry in self._entries.values():
            if any(id(r()) in ids for r in entry.sources):
                entry.versions = [_NEVER] * len(entry.versions)
        self.generation += 1

    def fp8_inputs(self, sources: Iterable[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """(first weight, state of the input) of every FP8 projection that was made from any of these parameters."""
        ids = set(map(id, sources))
        found = [e for e in self._entries.values() if any(id(r()) in ids for r in e.sources)]
        made = [(e.sources[0](), e.tensors[2]) for e in found if e.tensors[0].dtype == torch.float8_e4m3fn]
        return [(weight, state) for weight, state in made if weight is not None]

    def calibrate(self, key_weight: Tensor, mean: Tensor, balance: Tensor, reads: Tensor, error: float) -> None:
        """Keeps tables for the layer whose keys come from this parameter (or packed block); bound graphs ask again."""
        self._keys[key_weight] = CalibratedKeys(mean, balance, reads, error, version(key_weight))
        self.generation += 1

    def adopt(self, model: torch.nn.Module) -> None:
        """Remembers whose weights these are: where nobody calibrates, the model is asked for its first token's keys."""
        from .keys import key_weights

        for weight in key_weights(model):
            self._owners[weight] = weakref.ref(model)

    def first_key(self, weight: Tensor, model: torch.nn.Module | None = None) -> Tensor | None:
        """The key at position 0 of the layer with this key weight, [Hkv, D] f32 (keys.first_keys), or none.

        ``model``: whose weight it is; none: the one that was adopted. A model is asked once for each version of the
        weight, in eager.
        """
        from .keys import first_keys

        return self._asked(self._first, first_keys, weight, model)

    def reads(self, weight: Tensor, model: torch.nn.Module | None = None) -> Tensor | None:
        """The direction in which this layer's queries read its keys, [Hkv, D] f32 (keys.common_reads), or none.

        ``model``: as in :meth:`first_key`, and asked as often.
        """
        from .keys import common_reads

        return self._asked(self._reads, common_reads, weight, model)

    def _asked(
        self,
        memo: Any,
        ask: Callable[[torch.nn.Module], list[Tensor]],
        weight: Tensor,
        model: torch.nn.Module | None,
    ) -> Tensor | None:
        """What ``ask`` finds for the layer with this key weight; ``memo`` remembers all layers of the model."""
        from .keys import by_weight, key_weights

        known = memo.get(weight)
        if known is not None and known[0] == version(weight):
            found: Tensor | None = known[1]
            return found
        if model is None:
            owner = self._owners.get(weight)
            model = None if owner is None else owner()
        if model is None:
            return None
        answers = by_weight(model, ask)
        for other in key_weights(model):
            memo[other] = version(other), answers.get(id(other))
        return answers.get(id(weight))

    def calibrated(self, weights: Sequence[Tensor]) -> CalibratedKeys | None:
        """The tables that were measured with these weights of q, k and v (joined or not), or none."""
        if not weights:
            return None
        weight = weights[min(1, len(weights) - 1)]
        found: CalibratedKeys | None = self._keys.get(weight)
        return found if found is not None and found.version == version(weight) else None

    def fp8_states(self, sources: Iterable[Tensor]) -> list[Tensor]:
        """The states (formats.fp8_state) of :meth:`fp8_inputs`."""
        return [state for _, state in self.fp8_inputs(sources)]

    @property
    def bytes(self) -> int:
        """Bytes of all packed constants."""
        return sum(t.nbytes for e in self._entries.values() for t in e.tensors)


STORE = WeightStore()
