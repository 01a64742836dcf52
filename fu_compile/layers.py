"""Per-layer error report: what each quantised linear and each attention loses, in decibels.

The uncompiled model reads text, decoder layer by decoder layer (:class:`fu_compile.calibration.Walk`). Beside it run
the quantised forms of the same pieces, on the inputs of the float model, so that no error reaches the next piece::

    hidden --> layer in the model's dtype --> hidden of the next layer
                 | input of each linear   --> same operator on weights packed as the backend packs them
                 | q, k, v of attention   --> attention over the INT4 cache as decode reads it
                 +--> signal-to-noise ratio, 10 log10(sum y^2 / sum (y - y')^2)

Two phases, as in the backend: ``prefill`` (FP8 weights and activations unless the options say otherwise; attention
reads the keys and values of its own call, which are exact) and ``decode`` (INT4 weights; a query sees pages that were
complete before its own token as they decode, and the unfinished page exactly). With ``accumulated`` a second run of
each layer feeds every quantised output on, so that layer n sees what layers 0 .. n-1 have lost.

What is packed is freed with its layer: beside the model, memory is that of one layer in float32 per phase.
"""

from __future__ import annotations

import contextvars
import json
import math
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fu_compile import calibration, evaluate, formats, keys, models
from fu_compile.calibration import Moments, Walk
from fu_compile.errors import CacheMismatchError, FormatError
from fu_compile.gptq import block_linears
from fu_compile.lowerings import reference_linear
from fu_compile.options import Options
from fu_compile.plan import PRECISIONS
from fu_compile.quantize import PackedLinear
from fu_compile.weights import PackSpec

if TYPE_CHECKING:
    from fu_compile.keys import KeyTables

PHASES = ("prefill", "decode")
ATTENTION = "attention"
"""Name of the attention output (what o_proj reads) among the parts."""
EXACT = math.inf
"""SNR of a part that loses nothing: not quantised in this phase."""

_FLOOR = -300.0  # dB; a signal of zero with an error
_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_WORST = 12


# ---- the result ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayerError:
    """One part of one layer in one phase."""

    layer: int
    part: str
    """``self_attn.q_proj``, ... relative to the layer, or ``attention``"""
    phase: str
    """``prefill`` or ``decode``"""
    precision: str
    """``int4``, ``fp8``, ``bf16`` or ``exact``"""
    snr: float
    """dB over all tokens; infinite where nothing is quantised"""
    token: float
    """dB of the typical token: the median of the tokens' own ratios. The first token's activations can be so large
    that ``snr`` is that token's alone."""
    accumulated: float | None = None
    """dB over all tokens with the errors of all pieces before; none where it was not asked for"""
    note: str = ""
    """why it is exact, where that is not plain from the options"""


@dataclass(frozen=True)
class LayerReport:
    """All parts, in the order of layers, parts as they run, and phases."""

    model: str
    dtype: str
    source: str
    """where the text is from"""
    sequences: int
    tokens: int
    """of all sequences together"""
    options: dict[str, Any]
    errors: tuple[LayerError, ...] = field(repr=False)

    @property
    def layers(self) -> list[int]:
        """Layer numbers, ascending."""
        return sorted({e.layer for e in self.errors})

    @property
    def parts(self) -> list[str]:
        """Names of the parts as they run in a layer."""
        return list(dict.fromkeys(e.part for e in self.errors))

    @property
    def phases(self) -> list[str]:
        """The phases that were measured."""
        return list(dict.fromkeys(e.phase for e in self.errors))

    def worst(self, count: int = _WORST) -> list[LayerError]:
        """The ``count`` quantised parts with the lowest signal-to-noise ratio, the worst first."""
        return sorted((e for e in self.errors if e.snr < EXACT), key=lambda e: e.snr)[:count]

    def formats_of(self, phase: str) -> str:
        """Number formats of a phase in words: ``fp8`` or ``exact, int4``."""
        return ", ".join(sorted({e.precision for e in self.errors if e.phase == phase}))

    def title(self) -> str:
        """Model, text and size, as a table's title must state them."""
        return f"{self.model}, {self.dtype}: {self.tokens:,} tokens, {self.source}"

    def as_dict(self) -> dict[str, Any]:
        """For JSON; an SNR of null is infinite: nothing is lost."""
        rows = [{k: None if v == EXACT else v for k, v in asdict(e).items()} for e in self.errors]
        return {**vars(self), "errors": rows}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes :meth:`as_dict` as JSON."""
        Path(path).write_text(json.dumps(self.as_dict(), indent=2) + "\n")

    def to_html(self, path: str | os.PathLike[str]) -> Path:
        """Writes the heat maps as one self-contained page; returns its path."""
        from fu_compile.layers_html import page

        Path(path).write_text(page(self), encoding="utf-8")
        return Path(path)

    def tables(self) -> list[Any]:
        """``rich`` tables: the worst parts, then every layer, a table per phase."""
        from rich.table import Table

        accumulated = any(e.accumulated is not None for e in self.errors)
        worst = Table(title=f"Signal-to-noise, worst first\n{self.title()}", title_justify="left")
        for head in ("layer", "part", "phase", "format", "SNR dB", "typical token dB"):
            worst.add_column(head, justify="right" if "dB" in head or head == "layer" else "left")
        if accumulated:
            worst.add_column("accumulated dB", justify="right")
        for e in self.worst():
            more = [decibel(e.accumulated)] if accumulated else []
            worst.add_row(str(e.layer), e.part, e.phase, e.precision, decibel(e.snr), decibel(e.token), *more)
        found = [worst]
        snr = {(e.layer, e.part, e.phase): e.snr for e in self.errors}
        for phase in self.phases:
            table = Table(title=f"SNR in dB by layer, {phase} ({self.formats_of(phase)})", title_justify="left")
            table.add_column("layer", justify="right")
            for part in self.parts:
                table.add_column(part.rpartition(".")[2], justify="right")
            for layer in self.layers:
                table.add_row(str(layer), *(decibel(snr.get((layer, part, phase))) for part in self.parts))
            found.append(table)
        return found

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(width=110, color_system=None)
        with console.capture() as text:
            console.print(*self.tables(), sep="\n")
            console.print(*(f"layer {e.layer}, {e.part}: {e.note}" for e in self.errors if e.note), sep="\n")
        return text.get().rstrip() + "\n"


def decibel(value: float | None) -> str:
    """One decimal; ``exact`` for an infinite ratio, nothing for none."""
    return "" if value is None else "exact" if value == EXACT else f"{value:.1f}"


# ---- measuring -------------------------------------------------------------------------------------------------------


def layer_report(
    model: nn.Module,
    batches: Tensor | Iterable[Tensor],
    *,
    options: Options | None = None,
    tables: KeyTables | None = None,
    accumulated: bool = False,
    source: str = "token ids",
    progress: bool = True,
) -> LayerReport:
    """Signal-to-noise ratio of each linear's and each attention's output, quantised against uncompiled.

    Args:
        model: a causal language model of transformers in eval mode, not packed. It is left as it was.
        batches: int64 token ids [n, length], or several such tensors, such as
            :func:`fu_compile.calibration.token_batches` makes.
        options: what the backend would be given: ``prefill``, ``decode``, ``group_size``, ``fp8_scaling``, ``kv_cache``
            and ``overrides`` count. Projections that the backend fuses get the most faithful precision among them.
        tables: key tables of the INT4 cache; none: those that the backend makes from the weights.
        accumulated: also run the quantised layers one after the other; two more runs of every layer.
        source: what the report calls the text.
        progress: a progress bar with the time left, on standard error.

    Raises:
        OptionError: batches that are no token ids.
        FormatError: the model is packed, or a weight is not finite. CacheMismatchError: tables of another model.
        DataError, HeadDimError, TrainingModeError, MetaParameterError, OffloadedParameterError, NoLlamaBlockError: a
            model or text that does not fit.
    """
    options = options or Options()
    models.check(model, quantising=True)
    if packed := next((n for n, m in model.named_modules() if isinstance(m, PackedLinear)), None):
        raise FormatError(
            "this model is packed: there is no float model to compare with",
            where=packed,
            advice="Load the original model.",
        )
    rows = calibration.as_rows(batches, model.get_input_embeddings().weight.shape[0])  # type: ignore[operator]
    blocks = block_linears(model)
    tables = _tables(model, tables, len(blocks), options.kv_cache) if options.kv_cache in formats.KV_FORMATS else None

    from tqdm.auto import tqdm

    walk, frequencies = Walk(model, rows), keys.inv_freq(model)
    streams = {phase: list(walk.hidden) for phase in PHASES} if accumulated else {}
    layers = calibration.decoder_layers(model)[2]
    found: list[LayerError] = []
    total = len(layers) * len(rows)
    with tqdm(total=total, desc="layer errors", unit="sequence", disable=not progress, smoothing=0.1) as bar:
        for index, (block, linears) in enumerate(blocks.items()):
            names = {n.removeprefix(block + "."): m for n, m in linears.items()}
            pair = None if tables is None else tables.pairs(options.kv_cache)[index]
            watch = _Watch(layers[index], names, _precisions(linears, block, options), options, pair, streams, bar)
            watch._frequencies = frequencies
            walk.step(index, watch)
            found += watch.errors(index)
    return LayerReport(
        model=str(getattr(model.config, "_name_or_path", "")).rstrip("/").split("/")[-1] or type(model).__name__,
        dtype=str(next(model.parameters()).dtype).removeprefix("torch."),
        source=source,
        sequences=len(rows),
        tokens=sum(r.numel() for r in rows),
        options={k: v for k, v in options.as_dict().items() if k != "version"},
        errors=tuple(found),
    )


def text_report(
    model: nn.Module,
    tokenizer: Any,
    windows: Iterable[int] = evaluate.GATE_WINDOWS,
    length: int = evaluate.LENGTH,
    *,
    file: str | os.PathLike[str] | None = None,
    dataset: str | None = None,
    **more: Any,
) -> LayerReport:
    """:func:`layer_report` on the windows that :func:`fu_compile.evaluate.perplexity` would score.

    ``more``: arguments of :func:`layer_report`. Raises what both raise.
    """
    text, name, _ = evaluate.read_text(file, dataset)
    batch, chosen = evaluate.cut(evaluate.encode(tokenizer, text), windows, length)
    named = f"window{'s' * (len(chosen) > 1)} {', '.join(map(str, chosen))} of {length} tokens of {name}"
    return layer_report(model, batch, **{"source": named, **more})


def _tables(model: Any, tables: KeyTables | None, layers: int, kv_format: str = "int4") -> KeyTables:
    _, heads, head_dim = models.heads_of(model.config.get_text_config())
    formats.hadamard_block(head_dim)  # an odd head_dim is an error before any work
    tables = keys.tables_of(model, heads, head_dim, kv_format) if tables is None else tables
    pairs = tables.pairs(kv_format)
    if len(pairs) != layers or any(t.shape != (heads, head_dim) for pair in pairs for t in pair):
        raise CacheMismatchError(
            f"the key tables are not those of {layers} layers with {heads} heads of {head_dim}", where="tables"
        )
    return tables


def _precisions(linears: Iterable[str], block: str, options: Options) -> dict[str, dict[str, str]]:
    """phase -> name relative to the block -> precision; fused projections get the most faithful of theirs."""
    found: dict[str, dict[str, str]] = {}
    for phase in PHASES:
        base = getattr(options, phase)
        own = {n: options.precision_for(n, base) for n in linears}
        for name in own:
            parent, _, last = name.rpartition(".")
            group = next((g for g in _FUSED if last in g), (last,))
            together = [own[full] for n in group if (full := f"{parent}.{n}") in own]
            found.setdefault(phase, {})[name.removeprefix(block + ".")] = min(together, key=PRECISIONS.index)
    return found


class _Ratio:
    """Signal and noise, summed in float64 over all tokens, and the ratio of each token."""

    def __init__(self) -> None:
        self.signal = self.noise = 0.0
        self.each: list[Tensor] = []

    def add(self, y: Tensor, approximation: Tensor) -> None:
        """y, approximation: [..., tokens, features]; the same tensor object counts as no error."""
        y = y.detach().reshape(-1, y.shape[-1])
        if approximation is y or approximation.data_ptr() == y.data_ptr():
            self.signal += 1.0
            return
        error = approximation.detach().reshape(y.shape).to(torch.float32) - y.to(torch.float32)
        signal, noise = (t.to(torch.float32).square().sum(-1, dtype=torch.float64) for t in (y, error))
        self.signal += float(signal.sum())
        self.noise += float(noise.sum())
        self.each.append((10 * (signal / noise).log10()).cpu())

    @property
    def total(self) -> float:
        """dB over all tokens."""
        if self.noise == 0.0:
            return EXACT
        return max(_FLOOR, 10 * math.log10(self.signal / self.noise)) if self.signal else _FLOOR

    @property
    def typical(self) -> float:
        """Median over tokens, dB."""
        if not self.each:
            return EXACT
        value = float(torch.cat(self.each).nan_to_num(nan=EXACT, posinf=EXACT, neginf=_FLOOR).median())
        return max(value, _FLOOR)


class _Watch(Moments):
    """Stands beside one layer while :class:`Walk` runs it on every sequence, and measures (see the module's head)."""

    def __init__(
        self,
        layer: nn.Module,
        linears: dict[str, nn.Linear],
        precisions: dict[str, dict[str, str]],
        options: Options,
        tables: tuple[Tensor, Tensor] | None,
        streams: dict[str, list[Tensor]],
        bar: Any,
    ) -> None:
        super().__init__(layer, linears, full=False)
        self._layer, self._precisions, self._options = layer, precisions, options
        self._tables, self._streams, self._bar = tables, streams, bar
        self._kept = ""  # why the layer keeps the model's cache
        self._frequencies: Tensor | None = None  # of RoPE, [R/2]
        self._packed: dict[tuple[str, str], tuple[Tensor, ...]] = {}
        self._fresh: dict[tuple[str, str], _Ratio] = {}
        self._along: dict[tuple[str, str], _Ratio] = {}
        self._sequence = 0
        self._phase: str | None = None  # of the run that feeds quantised outputs on; none: the float run
        self._outputs: dict[str, Tensor] = {}  # of the float run of this sequence
        self._norms: list[tuple[Tensor, nn.Module, Tensor]] = []  # output, module, input
        self._folds: dict[str, bool] = {}  # linear -> whether the norm before it becomes part of its operator

    def errors(self, index: int) -> Iterator[LayerError]:
        """What was measured, as entries of layer ``index``."""
        for part in dict.fromkeys(name for name, _ in self._fresh):
            for phase in PHASES:
                if part == ATTENTION:
                    precision = self._options.kv_cache if self._int4(phase) else "exact"
                    note = self._kept if phase == "decode" and self._tables is not None else ""
                else:
                    precision, note = self._precisions[phase][part], ""
                ratio, along = self._fresh[part, phase], self._along.get((part, phase))
                after = None if along is None else along.total
                yield LayerError(index, part, phase, precision, ratio.total, ratio.typical, after, note)

    # -- what Walk.step calls

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Inside, linears, norms, the attention and the layer itself are watched."""
        config = next((m.config for m in self._layer.modules() if hasattr(m, "config")), None)
        with ExitStack() as stack:
            for module in self._layer.modules():
                if _epsilon(module) is not None:
                    stack.enter_context(_removed(module.register_forward_hook(self._norm)))
            for name, linear in self._linears.items():
                stack.enter_context(_removed(linear.register_forward_hook(self._linear(name))))
            stack.enter_context(_removed(self._layer.register_forward_hook(self._whole, with_kwargs=True)))
            if config is not None:
                stack.enter_context(_attending(config, self))
            yield

    def end_of_sequence(self) -> None:
        """Forgets the sequence that has just run."""
        self._outputs.clear()
        self._norms.clear()
        self._sequence += 1
        self._bar.update()

    # -- hooks

    def _norm(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if isinstance(output, Tensor):
            self._norms.append((output, module, args[0]))

    def _linear(self, name: str) -> Any:
        def after(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
            return self._compare(name, output, lambda phase: self._quantised(phase, name, args[0], output))

        return after

    def _whole(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """After the float run of a sequence: the runs that feed quantised outputs on."""
        if self._phase is not None:
            return
        try:
            for phase, hidden in self._streams.items():
                self._phase = phase
                self._norms.clear()
                out = layer(hidden[self._sequence], *args[1:], **kwargs)
                hidden[self._sequence] = out[0] if isinstance(out, tuple) else out
        finally:
            self._phase = None

    def attend(self, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        """transformers' attention interface: the model's own attention, or in a quantised run that of the phase."""
        exact = calibration._attention(*args, **kwargs)[0]
        other = self._compare(ATTENTION, exact, lambda phase: self._attention(phase, exact, *args, **kwargs))
        return exact if other is None else other, None

    def _compare(self, part: str, output: Tensor, approximate: Any) -> Tensor | None:
        """Float run: measures every phase. Quantised run: measures its own and returns what goes on instead."""
        if self._phase is None:
            self._outputs[part] = output
            for phase in PHASES:
                self._fresh.setdefault((part, phase), _Ratio()).add(_flat(output), _flat(approximate(phase)))
            return None
        other = approximate(self._phase)
        self._along.setdefault((part, self._phase), _Ratio()).add(_flat(self._outputs[part]), _flat(other))
        return other

    # -- the quantised pieces

    def _quantised(self, phase: str, name: str, x: Tensor, output: Tensor) -> Tensor:
        """The linear's output in the precision of the phase; ``output`` itself where that is exact."""
        precision = self._precisions[phase][name]
        if precision == "exact":
            return output
        linear, norm = self._linears[name], self._norm_before(name, x)
        if precision == "int4" and x.dtype == torch.float16:
            norm = None  # x * gain could leave its range (passes/pack_weights.py)
        packed = self._packed.get((phase, name))
        if packed is None:
            packed = self._packed[phase, name] = _pack(linear, precision, self._options.group_size, norm)
        prologue, row, eps = ("", x, 0.0) if norm is None else ("rms", norm[1], norm[2])
        tail = (linear.bias, None, eps, 1.0, prologue, "" if linear.bias is None else "bias")
        if precision == "int4":
            sizes, extra = (*linear.weight.shape, self._options.group_size), (None if norm is None else norm[0],)
        else:
            # as in passes/pack_weights.py: in decode FP8 weights meet activations as they are
            sizes, extra = (), () if precision == "bf16" else (self._scaling(phase),)  # type: ignore[assignment]
        operator: Any = getattr(reference_linear, f"linear_{precision}")
        return operator(row, *packed, *sizes, *tail, *extra)

    def _scaling(self, phase: str) -> str:
        return self._options.fp8_scaling if phase == "prefill" else "none"

    def _norm_before(self, name: str, x: Tensor) -> tuple[Tensor, Tensor, float] | None:
        """(gain, input, eps) of the RMSNorm whose output ``x`` is, where the backend makes it part of the linear."""
        found = next((entry for entry in self._norms if entry[0] is x), None)
        if found is None:
            return None
        _, module, source = found
        gain: Any = module.weight
        eps = _epsilon(module) or 0.0
        if name not in self._folds:
            plain = reference_linear.normalized(source.to(torch.float32), eps) * gain.to(torch.float32)
            # Not 1 + gain (Gemma) and no LayerNorm; a 16-bit norm rounds twice, 2^-8 each.
            self._folds[name] = torch.allclose(plain, x.to(torch.float32), rtol=2**-6, atol=1e-6)
        return (gain, source, eps) if self._folds[name] else None

    def _int4(self, phase: str) -> bool:
        return phase == "decode" and self._tables is not None and not self._kept

    def _attention(
        self,
        phase: str,
        exact: Tensor,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """Decode through the INT4 cache, all tokens at once; otherwise ``exact``.

        query [1, H, T, D], key and value [1, Hkv, T, D] -> [1, T, H, D]. Queries of page p see the pages before it as
        they decode and their own page exactly: what the cache shows at each step.
        """
        channel = self._options.kv_cache == formats.CHANNEL
        if phase == "decode" and self._tables is not None and not self._kept and not channel:
            heads = query.shape[1], key.shape[1], key.shape[-1]
            self._kept = _risk(module, heads, self._frequencies) or ""
        if not self._int4(phase) or self._tables is None:
            return exact
        mean, balance = (t.to(key.device) for t in self._tables)
        return keys.paged_attention(
            module,
            query,
            key,
            value,
            attention_mask,
            *args,
            mean=mean,
            balance=balance,
            kv_format=self._options.kv_cache,
            **kwargs,
        ).to(exact.dtype)


def _flat(y: Tensor) -> Tensor:
    """[1, T, ...] -> [T, features], a view where that is possible."""
    return y.reshape(y.shape[1], -1) if y.dim() == 4 else y.reshape(-1, y.shape[-1])


def _pack(
    linear: nn.Linear, precision: str, group: int, norm: tuple[Tensor, Tensor, float] | None
) -> tuple[Tensor, ...]:
    """As the weight store packs it: FP8 and 16-bit weights take the gain of the norm before them in, INT4 does not."""
    sources = [linear.weight, *([] if norm is None or precision == "int4" else norm[:1])]
    n, k = linear.weight.shape
    spec = PackSpec("", precision, (0,), (), 1 if len(sources) > 1 else None, group, False, n, k)
    with torch.inference_mode(False), torch.no_grad():
        return spec.pack(sources)


def _epsilon(module: nn.Module) -> float | None:
    """eps of an RMSNorm-like module: one gain, no bias."""
    gain = getattr(module, "weight", None)
    if not isinstance(gain, Tensor) or gain.dim() != 1 or getattr(module, "bias", None) is not None:
        return None
    return getattr(module, "variance_epsilon", getattr(module, "eps", None))


def _risk(module: nn.Module, heads: tuple[int, int, int], frequencies: Tensor | None) -> str | None:
    """Why the backend lets this layer keep the model's cache, or none."""
    parts = next((parts for name, parts in keys.projections(module) if not name), None)
    if parts is None:
        return None
    norm: Any = getattr(module, "k_norm", None)
    return keys.risk(parts, getattr(norm, "weight", None), heads, frequencies)


_WATCHING: contextvars.ContextVar[_Watch | None] = contextvars.ContextVar("fu_compile_layers", default=None)
_NAME = "futransformer_layers"


def _attend(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    watch = _WATCHING.get()
    if watch is None:
        return calibration._attention(*args, **kwargs)
    return watch.attend(*args, **kwargs)


@contextmanager
def _attending(config: Any, watch: _Watch) -> Iterator[None]:
    """Inside, attentions of this configuration go through ``watch``; the masks are already made."""
    from transformers import AttentionInterface

    AttentionInterface.register(_NAME, _attend)
    before, config._attn_implementation = config._attn_implementation, _NAME
    token = _WATCHING.set(watch)
    try:
        yield
    finally:
        _WATCHING.reset(token)
        config._attn_implementation = before


@contextmanager
def _removed(handle: Any) -> Iterator[None]:
    try:
        yield
    finally:
        handle.remove()
