"""Key tables of the INT4 cache: what is subtracted from the keys, and what they are divided by, before the rotation.

::

    row = H((k - mean) / balance)                                4 bits a channel, one scale a token
    q k = (balance q) H H ((k - mean) / balance) + q mean        the same q mean for every key: softmax drops it

Both are free to choose: whatever they are, attention is the same up to the rounding. The mean moves the quantiser's
range to where the keys are; the balance shifts error from channels with large queries to channels with small ones.
Its closed form (E k^2 / E q^2)^(1/4) would be best if all errors were independent and small; they are not, so
:func:`calibrate_keys` runs the model with several exponents and takes the one that changes it least.

One error is not random at all. Every query reads the first token (the attention sink), and behind the first layers its
key is nearly the same in every text, so its rounding error is a constant that shifts all attention the same way. The
mean takes that error in (:func:`on_grid`): the first token's key then lies on the quantiser's grid.

Where nobody calibrated, mean and balance come from the biases in the weights (:func:`fu_compile.weights.key_tables`),
and the first token's key from calls of the model with single tokens.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from . import calibration, formats
from .errors import CacheMismatchError, NoLlamaBlockError
from .models import uncompiled
from .weights import STORE, key_risk, key_tables, measured_risk

EXPONENTS = (0.0, 0.125, 0.25)
"""Of E k^2 / E q^2 in the balance: none, half and all of the closed form."""
MEASURED = 2
"""Calibration sequences on which every exponent is tried."""
FIRST = 8
"""Random tokens whose keys at position 0 are looked at where nobody calibrated."""
READS = 128
"""Random tokens whose queries are looked at where nobody calibrated."""


@dataclass(frozen=True)
class KeyTables:
    """What is subtracted from the keys and what they are divided by before rotation, per layer.

    means, balances: one [Hkv, D] float32 each per layer. Subtracting a constant from every key is neutral to softmax;
    it only moves the quantiser's range.
    """

    means: tuple[Tensor, ...]
    balances: tuple[Tensor, ...]
    exponent: float | None = None
    """Of E k^2 / E q^2 in the balances, chosen by measurement; none: not measured."""
    tried: Mapping[float, float] = field(default_factory=dict)
    """Exponent -> relative squared error of the last hidden states with keys and values in INT4."""
    errors: tuple[float, ...] = ()
    """Relative error (root mean square) of every layer's attention output with these tables."""
    reads: tuple[Tensor, ...] = ()
    """Of keys per channel: the direction in which queries read them (:func:`common_reads`), by layer, or none known."""

    def pairs(self, kv_format: str) -> list[tuple[Tensor, Tensor]]:
        """The two tables of each layer's store in this format: mean and balance, of keys per channel mean and reads."""
        second = self.balances
        if kv_format == formats.CHANNEL:
            second = self.reads or tuple(torch.zeros_like(m) for m in self.means)
        return list(zip(self.means, second, strict=True))

    def __str__(self) -> str:
        text = f"key tables of {len(self.means)} layers"
        if self.exponent is None:
            return text
        tried = ", ".join(f"{e:g}: {error:.3g}" for e, error in self.tried.items())
        return f"{text}, balance exponent {self.exponent:g} (squared error of the hidden states {tried})"


def calibrate_keys(model: nn.Module, input_ids: Iterable[Tensor]) -> KeyTables:
    """Key tables from calibration text: means over all tokens after RoPE, and the balance that changes the model least.

    The tables are also kept with the model: ``Int4Cache(..., model=model)`` and the INT4 copies of static caches that
    later calls attach use them, as long as the keys' weights stay as they are. Calibrate before the first compiled
    call, which decides what layers get an INT4 cache.

    Args:
        model: a causal language model in eval mode; called in eager, whatever it was compiled with.
        input_ids: batches [B, S] of token ids, such as windows of the text that the model will read. The first
            sequences (MEASURED) decide the balance; shorter than a page of 64 tokens they cannot, and it is one.

    Raises:
        CacheMismatchError: there is no batch, or a layer keeps no keys of the usual form.
        NoLlamaBlockError: there are no decoder layers, or attention that INT4 cannot be measured in (learned sinks).
    """
    decoder = calibration.decoder_layers(model)[0]
    rows = [row[None].to(next(model.parameters()).device) for batch in input_ids for row in batch]
    if not rows:
        raise CacheMismatchError("there is no calibration text", where="calibrate_keys")
    sums = _Sums()
    before = []
    with _probing(decoder, sums):
        for i, row in enumerate(rows):
            hidden = decoder(input_ids=row, use_cache=False).last_hidden_state
            before += [hidden] * (i < MEASURED)
    weights = key_weights(model)
    frequencies = inv_freq(model)
    means, ratios = sums.tables(0 if frequencies is None else frequencies.numel())
    reads = sums.reads()
    if len(means) != len(weights):
        raise CacheMismatchError(
            f"{len(means)} attentions ran and {len(weights)} have key projections", where="calibration"
        )
    tried: dict[float, float] = {}
    errors: dict[float, tuple[float, ...]] = {}
    tables: dict[float, list[tuple[Tensor, Tensor]]] = {}
    for exponent in EXPONENTS:
        balances = [r.pow(exponent) for r in ratios]
        tables[exponent] = [
            (on_grid(k, mean, balance), balance) for k, mean, balance in zip(sums.first(), means, balances, strict=True)
        ]
        rounded = _Rounded(tables[exponent])
        signal = noise = 0.0
        with _probing(decoder, rounded):
            for row, exact in zip(rows, before, strict=False):
                hidden = decoder(input_ids=row, use_cache=False).last_hidden_state
                signal += float(exact.float().square().sum())
                noise += float((hidden.float() - exact.float()).square().sum())
        tried[exponent], errors[exponent] = noise / signal, rounded.errors()
    best = min(tried, key=lambda e: tried[e])
    for weight, (mean, balance), read, error in zip(weights, tables[best], reads, errors[best], strict=True):
        STORE.calibrate(weight, mean, balance, read, error)
    chosen = tables[best]
    means_, balances_ = (tuple(pair[i] for pair in chosen) for i in (0, 1))
    return KeyTables(means_, balances_, best, tried, errors[best], tuple(reads))


def on_grid(first: Tensor, mean: Tensor, balance: Tensor) -> Tensor:
    """The mean, moved by the rounding error of the first token's key, which then decodes to itself.

    first, mean, balance: [Hkv, D] float. The move is at most half a step of that key in every rotated channel.
    """
    k = first.to(torch.float32)[None, :, None]
    return mean + (k - formats.decode_keys(*formats.encode_keys(k, mean, balance), mean, balance))[0, :, 0]


def first_keys(model: nn.Module) -> list[Tensor]:
    """The keys at position 0, a mean over some random tokens: [Hkv, D] float32 by layer.

    Behind the first layers the first token's key hardly depends on which token it is. One eager call of the model with
    FIRST sequences of one token; the same for the same model.

    Raises:
        NoLlamaBlockError: there are no decoder layers, or attention that reads more than its keys (learned sinks).
    """
    decoder = calibration.decoder_layers(model)[0]
    vocabulary = model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    ids = torch.randint(vocabulary, (FIRST, 1), generator=torch.Generator().manual_seed(0))
    found: dict[int, Tensor] = {}

    def probe(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        if kwargs.get("s_aux") is not None or key.shape[2] != 1:
            raise NoLlamaBlockError("attention that reads more than its keys", where=type(module).__name__)
        found[_layer(module)] = key[:, :, 0].to(torch.float32).mean(0)
        # The only token attends to itself.
        return value.repeat_interleave(query.shape[1] // value.shape[1], 1).transpose(1, 2), None

    with _probing(decoder, probe):
        decoder(input_ids=ids.to(next(model.parameters()).device), use_cache=False)
    return [found[layer] for layer in sorted(found)]


def common_reads(model: nn.Module) -> list[Tensor]:
    """The direction in which queries read the keys, where nobody calibrated: [Hkv, D] float32 by layer.

    Most queries of a head share a direction (it is what points them at the first token), and behind the first layers it
    hardly depends on the text. One eager call of the model with READS random tokens; the same for the same model.

    Raises:
        NoLlamaBlockError: there are no decoder layers, or attention that reads more than its keys (learned sinks).
        CacheMismatchError: a layer keeps no keys of the usual form.
    """
    decoder = calibration.decoder_layers(model)[0]
    vocabulary = model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    ids = torch.randint(vocabulary, (1, READS), generator=torch.Generator().manual_seed(0))
    sums = _Sums()
    with _probing(decoder, sums):
        decoder(input_ids=ids.to(next(model.parameters()).device), use_cache=False)
    return sums.reads()


def shared_direction(moment: Tensor) -> Tensor:
    """Second moments [.., D, D] -> the largest principal axis [.., D] float32.

    Its length is the root mean square of the vectors along it, in units of that across it (at most 1e3).
    """
    values, axes = torch.linalg.eigh(moment.to(torch.float64))
    across = values[..., :-1].mean(-1).clamp_min(1e-6 * values[..., -1]).clamp_min(1e-30)
    length = (values[..., -1].clamp_min(0.0) / across).sqrt()
    return (axes[..., -1] * length[..., None]).to(torch.float32)


def tables_of(model: nn.Module, kv_heads: int, head_dim: int, kv_format: str = "int4") -> KeyTables:
    """Key tables of a model: those that were calibrated, else from the weights and a few single tokens.

    Layers whose k_proj has a bias get its mean and balance, the others zero and one; the mean of either is then moved
    (:func:`on_grid`) by the rounding error of the first token's key. ``kv_format``: of keys per channel the tables have
    directions too, calibrated ones or :func:`common_reads`, zero where the model cannot be asked.

    Raises:
        CacheMismatchError: a layer has no k_proj of this size.
    """
    frequencies = inv_freq(model)
    found: list[tuple[Tensor, Tensor]] = []
    estimated: list[int] = []
    reads: list[Tensor | None] = []
    for name, parts in projections(model):
        known = STORE.calibrated([_stored(p) for p in parts])
        if known is not None:
            found.append((known.mean, known.balance))
            reads.append(known.reads)
            continue
        reads.append(None)
        weights, biases = [p.weight for p in parts], _biases(parts)
        q_heads = (sum(w.shape[0] for w in weights) - 2 * kv_heads * head_dim) // head_dim
        if len(parts) == 3 and weights[1].shape[0] != kv_heads * head_dim:
            raise CacheMismatchError(
                f"k_proj has {weights[1].shape[0]} rows for {kv_heads} heads of {head_dim}", where=name
            )
        estimated.append(len(found))
        if biases:
            found.append(key_tables((q_heads, kv_heads, head_dim), weights, biases, frequencies))
        else:
            found.append(formats.kv_tables(kv_heads, head_dim, weights[0].device))
    if estimated:
        for i, weight in enumerate(key_weights(model)):
            first = STORE.first_key(weight, model)
            if i in estimated and first is not None:
                mean, balance = found[i]
                found[i] = on_grid(first.to(mean.device), mean, balance), balance
    means, balances = (tuple(pair[i] for pair in found) for i in (0, 1))
    if kv_format != formats.CHANNEL:
        return KeyTables(means, balances)
    if estimated:
        for i, weight in enumerate(key_weights(model)):
            reads[i] = STORE.reads(weight, model) if i in estimated else reads[i]
    known_reads = tuple(torch.zeros_like(m) if r is None else r.to(m.device) for m, r in zip(means, reads, strict=True))
    return KeyTables(means, balances, reads=known_reads)


def risk(parts: list[Any], gain: Tensor | None, heads: tuple[int, int, int], frequencies: Tensor | None) -> str | None:
    """Why the backend lets a layer with these q/k/v projections keep the model's cache, or none.

    ``gain``: of the norm over the keys; ``heads``: query heads, key/value heads, head_dim.
    """
    known = STORE.calibrated([_stored(p) for p in parts])
    if known is not None:
        return measured_risk(known)
    weights, biases = [p.weight for p in parts], _biases(parts)
    if not biases or frequencies is None:
        return key_risk(weights, biases, gain, heads)
    return key_risk(weights, biases, gain, heads, frequencies, key_tables(heads, weights, biases, frequencies))


def inv_freq(model: nn.Module) -> Tensor | None:
    """RoPE frequencies of the model, [R/2], or none."""
    return next((m.inv_freq for m in model.modules() if isinstance(getattr(m, "inv_freq", None), Tensor)), None)  # type: ignore[return-value]


def projections(model: nn.Module) -> Iterator[tuple[str, list[Any]]]:
    """Path and q/k/v projections (three, or one that is joined) of every attention, in the order of the layers."""
    for name, module in model.named_modules():
        joined = getattr(module, "qkv_proj", None)
        parts: list[Any] = (
            [joined] if joined is not None else [getattr(module, p, None) for p in ("q_proj", "k_proj", "v_proj")]
        )
        if all(isinstance(p, nn.Linear) or hasattr(p, "block") for p in parts):  # block: a packed linear
            yield name, parts


def _biases(parts: list[Any]) -> list[Tensor]:
    """As many biases as projections, zeros for those that have none; no bias at all: none."""
    if all(p.bias is None for p in parts):
        return []
    rows = [p.weight.new_zeros(p.weight.shape[0]) if p.bias is None else p.bias for p in parts]
    return [r.detach() for r in rows]


def _stored(projection: Any) -> Tensor:
    """The tensor that holds a projection's weight: the parameter, or the packed block that it is part of."""
    return projection.block.packed if hasattr(projection, "block") else projection.weight


def by_weight(model: nn.Module, ask: Callable[[nn.Module], list[Tensor]]) -> dict[int, Tensor]:
    """What ``ask`` (:func:`first_keys`, :func:`common_reads`) finds, by the id of the keys' weights.

    Empty where the model cannot be asked.
    """
    weights = key_weights(model)
    if any(p.is_meta for p in model.parameters()) or model.training:
        return {}
    try:
        found = ask(model)
    except (NoLlamaBlockError, CacheMismatchError):
        return {}
    # Layers that share keys, or attention of another kind beside: then it is not clear whose key is whose.
    return {id(w): k for w, k in zip(weights, found, strict=True)} if len(found) == len(weights) else {}


def key_weights(model: nn.Module) -> list[Tensor]:
    """The tensor with the keys' weights of every attention, by which the store knows calibrated tables."""
    return [_stored(parts[min(1, len(parts) - 1)]) for _, parts in projections(model)]


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *args: Any,
    mean: Tensor,
    balance: Tensor,
    kv_format: str = "int4",
    **kwargs: Any,
) -> Tensor:
    """Attention as decoding through an INT4 cache shows it, all tokens at once, in float32.

    query [1, H, T, D], key and value [1, Hkv, T, D], after RoPE; mask and the rest as transformers' attention functions
    take them -> [1, T, H, D]. Queries of a page see the pages before it as they decode and their own page exactly.
    ``balance``: the second table of the format (:meth:`KeyTables.pairs`).
    """
    if kv_format == formats.CHANNEL:  # the last, unfinished page is never read as old
        whole = key[:, :, : key.shape[2] // formats.PAGE * formats.PAGE]
        old_keys = formats.decode_key_pages(*formats.encode_key_pages(whole, mean, 0, balance), mean)
    else:
        old_keys = formats.decode_keys(*formats.encode_keys(key, mean, balance), mean, balance)
    old_values = formats.decode_rows(*formats.encode_rows(value))
    query, key, value = (t.to(torch.float32) for t in (query, key, value))
    out = []
    for first in range(0, query.shape[2], formats.PAGE):
        page = slice(first, first + formats.PAGE)
        seen_k = torch.cat((old_keys[:, :, :first], key[:, :, page]), 2)
        seen_v = torch.cat((old_values[:, :, :first], value[:, :, page]), 2)
        mask = None if attention_mask is None else attention_mask[:, :, page, : seen_k.shape[2]]
        out.append(calibration._attention(module, query[:, :, page], seen_k, seen_v, mask, *args, **kwargs)[0])
    return torch.cat(out, 1)


# ---- what stands in the place of attention while the model reads the text --------------------------------------------


class _Sums:
    """Moments of keys and queries after RoPE, by layer, in float64: [Hkv, D] each."""

    def __init__(self) -> None:
        self._sums: dict[int, list[Tensor]] = {}
        self._counts: dict[int, int] = {}
        self._first: dict[int, list[Tensor]] = {}
        self._moments: dict[int, Tensor] = {}

    def __call__(self, module: nn.Module, query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        if key.dim() != 4 or key.shape[2] != query.shape[2]:
            raise CacheMismatchError("a layer of this model keeps no keys [B, Hkv, S, D]", where="calibration")
        layer = _layer(module)
        k = key[0].to(torch.float64)
        q = query[0].unflatten(0, (key.shape[1], -1)).to(torch.float64)
        new = [k.sum(1), k.square().sum(1), q.square().mean(1).sum(1)]
        flat = q[:, :, 1:].flatten(1, 2).to(torch.float32)  # the first token's query reads nothing but itself
        self._moments[layer] = self._moments.get(layer, 0.0) + flat.transpose(1, 2) @ flat
        old = self._sums.get(layer)
        self._sums[layer] = new if old is None else [a + b for a, b in zip(old, new, strict=True)]
        self._counts[layer] = self._counts.get(layer, 0) + k.shape[1]
        self._first.setdefault(layer, []).append(k[:, 0])
        return calibration._attention(module, query, key, *args, **kwargs)

    def reads(self) -> list[Tensor]:
        """The direction that the queries share, [Hkv, D] float32 by layer."""
        return [shared_direction(self._moments[layer]) for layer in sorted(self._moments)]

    def first(self) -> list[Tensor]:
        """The mean over the sequences of the keys at position 0, float32, by layer."""
        return [torch.stack(self._first[layer]).mean(0).to(torch.float32) for layer in sorted(self._first)]

    def tables(self, half: int) -> tuple[list[Tensor], list[Tensor]]:
        """Means, and E (k - mean)^2 / E q^2, equal on the columns c and c + half of a RoPE pair; float32, by layer."""
        means, ratios = [], []
        for layer in sorted(self._sums):
            k, k2, q2 = (s / self._counts[layer] for s in self._sums[layer])
            k2 = (k2 - k.square()).clamp_min(0.0)
            for t in (k2, q2):  # turning mixes the two: over many positions they differ by chance alone
                t[:, :half] += t[:, half : 2 * half].clone()
                t[:, half : 2 * half] = t[:, :half]
            means.append(k.to(torch.float32))
            ratios.append((k2 / q2.clamp_min(1e-12)).clamp(1e-4, 1e4).to(torch.float32))
        return means, ratios


class _Rounded:
    """Attention through an INT4 cache with these tables, and how far its output is from exact attention's."""

    def __init__(self, tables: list[tuple[Tensor, Tensor]]) -> None:
        self._tables = tables
        self._signal, self._noise = ([0.0] * len(tables) for _ in range(2))

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        layer = _layer(module)
        mean, balance = self._tables[layer]
        exact = calibration._attention(module, *args, **kwargs)[0]
        out = paged_attention(module, *args, mean=mean, balance=balance, **kwargs)
        self._signal[layer] += float(exact.float().square().sum())
        self._noise[layer] += float((out - exact.float()).square().sum())
        return out.to(exact.dtype), None

    def errors(self) -> tuple[float, ...]:
        """Relative error of each layer."""
        return tuple((n / s) ** 0.5 if s else 0.0 for s, n in zip(self._signal, self._noise, strict=True))


def _layer(module: nn.Module) -> int:
    index = getattr(module, "layer_idx", None)
    if not isinstance(index, int):
        raise NoLlamaBlockError("an attention does not say which layer it is in", where=type(module).__name__)
    return index


_NAME = "futransformer_keys"
_PROBE: contextvars.ContextVar[Callable[..., tuple[Tensor, None]]] = contextvars.ContextVar("fu_compile_keys")


def _attend(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    return _PROBE.get()(*args, **kwargs)


@contextmanager
def _probing(decoder: Any, probe: Callable[..., tuple[Tensor, None]]) -> Iterator[None]:
    """Inside, the decoder runs in eager without gradients and every attention is ``probe``."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, eager_mask

    AttentionInterface.register(_NAME, _attend)
    AttentionMaskInterface.register(_NAME, eager_mask)
    config = decoder.config
    before, config._attn_implementation = config._attn_implementation, _NAME
    token = _PROBE.set(probe)
    try:
        with uncompiled(decoder), torch.inference_mode(False), torch.no_grad():
            yield
    finally:
        _PROBE.reset(token)
        config._attn_implementation = before
