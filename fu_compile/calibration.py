"""Calibration: text to token ids, and what each linear layer of a model sees while it reads them.

Text (:func:`token_batches`) comes from a ``datasets`` object, files, strings or tensors. Every sequence starts as a
served one does: at position 0, with the beginning-of-text token where the tokenizer adds one. The first token is the
attention sink, and a calibration that never sees it leaves it with the largest error (docs/numerics.md).

Statistics (:class:`Walk`) are taken from the unquantised model in one pass, decoder layer by decoder layer::

    token ids -> embedding -> hidden states of all sequences        kept: one state per sequence, nothing else
                                  |
        layer 0 (float) ----------+--> second moments X^T X of every linear's input  -> the layer is quantised
                                  |    v_proj: rows of X weighted by the attention they receive
        layer 1 (float) ----------+--> ...

Source of the attention weights: RSQ (Sung et al., 2025) weights tokens by received attention; here the weight is the
sum over queries and heads of p^2, which is how an error of one value vector enters the attention output's variance.
"""

from __future__ import annotations

import contextvars
import importlib.util
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from fu_compile import evaluate, models
from fu_compile.errors import DataError, FuWarning, NoLlamaBlockError, OptionError

SAMPLES = 8
"""Calibration sequences of the measurements in docs/numerics.md."""
LENGTH = 2048
"""Tokens per sequence there."""

_SCORES = 1 << 23
"""Attention scores held at a time: 32 MB in float32."""
_QUERIES = 256
"""Queries at a time at most: the shorter the block, the less of a causal mask is computed in vain."""


# ---- text ------------------------------------------------------------------------------------------------------------


def token_batches(
    source: Any = None,
    tokenizer: Any = None,
    *,
    model: Any = None,
    samples: int = SAMPLES,
    length: int = LENGTH,
    column: str = "text",
) -> Tensor:
    """Calibration sequences: [samples, length] int64.

    Args:
        source: one of

            - none: WikiText-2 raw (validation split) where its file lies on this machine; otherwise text that
              ``model`` writes itself, with a warning. Neither uses the network.
            - an object of the library ``datasets`` (one split, streamed or not), or any iterable of mappings;
            - a path, or several, of UTF-8 text files, or of a folder (its ``*.txt`` files in order of name);
            - a list of strings, each a text;
            - a tensor of token ids: [tokens], cut here, or [n, tokens], taken as it is.
        tokenizer: turns text into ids; not needed for tensors.
        model: writes the text where there is none, and limits ``length`` to its positions.
        samples: number of sequences.
        length: tokens per sequence, the beginning-of-text token included.
        column: the text's name in the rows of a data set.

    Texts are joined by two newlines. Sequences are spread evenly over the text.

    Raises:
        DataError: a file that cannot be read, a data set without that column, less text than asked for.
        OptionError: text without a tokenizer, ``samples`` or ``length`` out of range, ids that are no integers.
    """
    limit = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    length = min(length, limit) if isinstance(limit, int) else length
    if samples < 1 or length < 2:
        raise OptionError(f"{samples} calibration sequences of {length} tokens", where="samples, length")
    if isinstance(source, Tensor):
        return _from_tensor(source, samples, length)
    if source is None:
        try:
            source = [_local_wikitext()]
        except DataError as error:
            if model is None:
                raise
            warnings.warn(
                "no calibration text was given and WikiText-2 is not on this machine: the model writes"
                f" {samples} x {length} tokens itself. What that costs against real text was not measured; pass text"
                f" like the one it will read. ({error.what})",
                FuWarning,
                stacklevel=2,
            )
            return model_text(model, samples, length)
    if tokenizer is None:
        raise OptionError("calibration text needs a tokenizer", where="token_batches", advice="Pass tokenizer=.")
    prefix = _prefix(tokenizer)
    need = samples * (length - len(prefix))
    stream = _stream(_texts(source, column), tokenizer, need)
    return _windows(stream, samples, length, prefix)


def model_text(model: Any, samples: int = SAMPLES, length: int = LENGTH, seed: int = 0) -> Tensor:
    """Sequences that the model writes: [samples, length] int64 on its device.

    Each starts with the beginning-of-text token of the configuration, if there is one, and a random token; every
    further token is sampled at temperature 1. The same seed gives the same text on the same machine.
    """
    from transformers import DynamicCache

    generator = torch.Generator().manual_seed(seed)
    config = model.config.get_text_config()
    first = torch.randint(config.vocab_size, (samples, 1), generator=generator)
    if isinstance(bos := config.bos_token_id, int):
        first = torch.cat((torch.full_like(first, bos), first), 1)[:, :length]
    ids = [first.to(model.device)]
    cache = {models.cache_kwarg(model): DynamicCache(config=config)}
    with models.uncompiled(model), torch.no_grad():
        for _ in range(length - first.shape[1]):
            logits = model(input_ids=ids[-1], use_cache=True, logits_to_keep=1, **cache).logits[:, -1]
            p = logits.to("cpu", torch.float32).softmax(-1)
            ids.append(torch.multinomial(p, 1, generator=generator).to(model.device))
    return torch.cat(ids, 1)


def _local_wikitext() -> str:
    """WikiText-2 valid from a file; DataError where evaluate.wikitext would have to download it."""
    name = "wiki.valid.raw"
    places = evaluate._places()
    if not any(p.is_file() or (p / name).is_file() for p in places):
        raise DataError(f"{name} was not found", where=", ".join(map(str, places)), advice="Set FU_WIKITEXT.")
    return evaluate.wikitext("valid")[0]


def _from_tensor(ids: Tensor, samples: int, length: int) -> Tensor:
    if ids.dtype not in (torch.int64, torch.int32) or ids.dim() not in (1, 2):
        raise OptionError(f"token ids are int64 [tokens] or [n, tokens]; these are {ids.dtype} {list(ids.shape)}")
    return ids.long() if ids.dim() == 2 else _windows(ids.long(), samples, length, [])


def _prefix(tokenizer: Any) -> list[int]:
    """What the tokenizer puts in front of a text: the beginning-of-text token or nothing."""
    ids = list(tokenizer("").input_ids)
    return ids[:1] if ids and ids[0] == getattr(tokenizer, "bos_token_id", None) else []


def _texts(source: Any, column: str) -> Iterator[str]:
    if isinstance(source, (str, os.PathLike)):
        source = [Path(source)]
    if isinstance(source, dict):
        raise DataError(
            f"a data set of several splits ({', '.join(map(str, source))})",
            where="source",
            advice="Pass one of its splits.",
        )
    if not isinstance(source, Iterable):
        raise OptionError(f"calibration text cannot be read from {type(source).__name__}", where="source")
    for item in source:
        if isinstance(item, os.PathLike):
            yield from _files(Path(item))
        elif isinstance(item, str):
            yield item
        elif hasattr(item, "keys"):
            if column not in item or not isinstance(item[column], str):
                raise DataError(
                    f"a row of the data set has no text {column!r}; it has {', '.join(map(str, item.keys()))}",
                    where="source",
                    advice="Name the column: column=...",
                )
            yield item[column]
        else:
            raise OptionError(f"a calibration text is a string, a path or a row, not {type(item).__name__}")


def dataset_rows(spec: str) -> Any:
    """The rows of ``NAME[:CONFIG[:SPLIT]]`` (split: train) of the library ``datasets``, read as they are asked for.

    Raises:
        OptionError: no name. DataError: the library is missing, or the data set cannot be read.
    """
    name, config, split, *more = [*spec.split(":"), "", ""]
    if len(more) > 2 or not name:
        raise OptionError(f"{spec!r} names no data set", where="dataset", advice="Write NAME[:CONFIG[:SPLIT]].")
    if importlib.util.find_spec("datasets") is None:
        raise DataError(
            f"reading the data set {name} needs the package datasets", where="dataset", advice="pip install datasets"
        )
    import datasets

    try:
        return datasets.load_dataset(name, config or None, split=split or "train", streaming=True)
    # The library has errors of its own and lets those of its downloads through; every one ends in the same advice.
    except Exception as error:
        raise DataError(
            f"the data set {name} cannot be read: {(str(error).strip().splitlines() or [''])[0]}",
            where="dataset",
            advice="Check name, configuration, split and network; or give text files.",
        ) from error


def _files(path: Path) -> Iterator[str]:
    path = path.expanduser()
    files = sorted(path.glob("*.txt")) if path.is_dir() else [path]
    if not files:
        raise DataError(f"{path} has no *.txt file", where="source", advice="Give text files, or a folder with some.")
    for file in files:
        yield evaluate.read_text(file)[0]


def _stream(texts: Iterator[str], tokenizer: Any, need: int) -> Tensor:
    """At least ``need`` tokens where the texts have as many; a large data set is not read to its end."""
    kept: list[str] = []
    budget = 8 * need  # characters: about twice what English needs
    while True:
        size = sum(map(len, kept))
        for text in texts:
            kept.append(text)
            size += len(text) + 2
            if size >= budget:
                break
        stream = evaluate.encode(tokenizer, "\n\n".join(kept))
        if stream.shape[0] >= need or size < budget:
            return stream
        budget *= 2


def _windows(stream: Tensor, samples: int, length: int, prefix: Sequence[int]) -> Tensor:
    body = length - len(prefix)
    there = stream.shape[0] // body
    if there < samples:
        raise DataError(
            f"the calibration text has {stream.shape[0]} tokens; {samples} sequences of {length} need {samples * body}",
            where="source",
            advice="Give more text, or fewer or shorter sequences (samples=, length=).",
        )
    rows, _ = evaluate.cut(stream, [i * there // samples for i in range(samples)], body)
    head = torch.tensor(list(prefix), dtype=torch.int64).expand(samples, len(prefix))
    return torch.cat((head, rows), 1)


# ---- statistics ------------------------------------------------------------------------------------------------------


def as_rows(batches: Tensor | Iterable[Tensor], vocabulary: int) -> list[Tensor]:
    """Single sequences [1, length] of a tensor [n, length] or of several tensors, of different lengths perhaps.

    Raises:
        DataError: there is no sequence, one is empty, or an id is not in the vocabulary.
        OptionError: something that is not a tensor of token ids.
    """
    rows: list[Tensor] = []
    for batch in [batches] if isinstance(batches, Tensor) else batches:
        if not isinstance(batch, Tensor) or batch.dtype not in (torch.int64, torch.int32) or batch.dim() not in (1, 2):
            raise OptionError(
                "calibration batches are int64 tensors [n, length] of token ids",
                where="batches",
                advice="fu_compile.calibration.token_batches makes them from text.",
            )
        rows += list(batch.reshape(-1, batch.shape[-1]).long().split(1))
    if not rows or any(r.numel() == 0 for r in rows):
        raise DataError("there is no calibration sequence, or one is empty", where="batches")
    low, high = min(int(r.min()) for r in rows), max(int(r.max()) for r in rows)
    if low < 0 or high >= vocabulary:
        raise DataError(
            f"calibration ids go from {low} to {high}; the model has {vocabulary} tokens",
            where="batches",
            advice="Use the tokenizer that belongs to the model.",
        )
    return rows


def decoder_layers(model: nn.Module) -> tuple[nn.Module, str, nn.ModuleList]:
    """The decoder of a causal language model, and the full name and list of its layers.

    Raises:
        NoLlamaBlockError: there is no list of decoder layers.
    """
    find: Any = getattr(model, "get_decoder", None)
    decoder = find() if find is not None else model
    layers = getattr(decoder, "layers", None)
    name = next((n for n, m in model.named_modules() if m is layers), None)
    if not isinstance(layers, nn.ModuleList) or name is None or not len(layers):
        raise NoLlamaBlockError(f"{type(model).__name__} has no list of decoder layers", where="model")
    return decoder, name, layers


Part = tuple[slice, Tensor]
"""Rows of a linear's weight, and the second moments that apply to them: [K, K] or their diagonal [K], float32."""


class Moments:
    """Second moments of the inputs of some linears, collected by hooks while a block runs.

    Linears that are given the same tensor (q, k and v; gate and up) share one accumulator.

    Args:
        block: module under which the linears lie.
        linears: name relative to the block -> linear.
        full: false: only the diagonal.
    """

    def __init__(self, block: nn.Module, linears: dict[str, nn.Linear], full: bool) -> None:
        self._linears = linears
        self._full = full
        self._modules = {id(m): name for name, m in block.named_modules()}
        self._site: dict[str, str] = {}  # linear -> the first linear that had the same input
        self._sums: dict[str, Tensor] = {}  # first linear -> moments
        self._values: dict[str, tuple[int, Tensor]] = {}  # v_proj or qkv_proj -> rows of v, weighted moments
        self._live: list[tuple[Tensor, str]] = []  # inputs of the current sequence

    def parts(self) -> dict[str, list[Part]]:
        """Of every linear that ran: its rows and their moments; the same tensor object where they are shared."""
        found: dict[str, list[Part]] = {}
        for name, site in self._site.items():
            rows, plain = self._linears[name].weight.shape[0], self._sums[site]
            if name in self._values:
                value_rows, weighted = self._values[name]
                found[name] = [(slice(rows - value_rows, rows), weighted)]
                if rows > value_rows:
                    found[name].insert(0, (slice(0, rows - value_rows), plain))
            else:
                found[name] = [(slice(0, rows), plain)]
        return found

    @property
    def unweighted(self) -> list[str]:
        """Value projections whose attention was not seen."""
        return [n for n in self._site if n.rpartition(".")[2] in ("v_proj", "qkv_proj") and n not in self._values]

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Inside, every call of a linear counts."""
        hooks = [m.register_forward_pre_hook(self._hook(name)) for name, m in self._linears.items()]
        token = _COLLECTING.set(self)
        try:
            yield
        finally:
            _COLLECTING.reset(token)
            for hook in hooks:
                hook.remove()
            self._live.clear()

    def end_of_sequence(self) -> None:
        """Forgets the inputs of the sequence that has just run."""
        self._live.clear()

    def _hook(self, name: str) -> Callable[..., None]:
        def before(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            x = args[0]
            # An input is known by identity: it is kept alive until the sequence has run, so no other has its place.
            lead = next((lead for seen, lead in self._live if seen is x), None)
            if lead is None:
                lead = self._site.get(name, name)
                self._sums[lead] = self._add(self._sums.get(lead), x)
                self._live.append((x, lead))
            self._site.setdefault(name, lead)

        return before

    def attention(self, module: nn.Module, weights: Tensor, value_rows: int) -> None:
        """Called by the attention of ``module``: weights [tokens] f32, rows of v in its value projection."""
        owner = self._modules.get(id(module))
        for part in ("v_proj", "qkv_proj"):
            name = f"{owner}.{part}" if owner else part
            lead = self._site.get(name)
            x = next((x for x, seen in self._live if seen == lead), None)
            if x is not None:
                before = self._values.get(name, (value_rows, None))[1]
                self._values[name] = value_rows, self._add(before, x, weights)

    def _add(self, total: Tensor | None, x: Tensor, weights: Tensor | None = None) -> Tensor:
        x = x.detach().reshape(-1, x.shape[-1]).to(torch.float32)
        if weights is not None:
            x = x * weights.sqrt()[:, None]
        new = x.t() @ x if self._full else x.square().sum(0)
        return new if total is None else total.add_(new)


_COLLECTING: contextvars.ContextVar[Moments | None] = contextvars.ContextVar("fu_compile_collecting", default=None)
_ATTENTION = "futransformer_calibration"


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **ignored: Any,
) -> tuple[Tensor, None]:
    """transformers' eager attention in blocks of queries, with the probabilities handed to the collector.

    query [1, H, T, D], key and value [1, Hkv, S, D], after RoPE; mask additive [1, 1 or H, T, S] -> [1, T, H, D].
    """
    if s_aux is not None:
        raise NoLlamaBlockError("attention with learned sinks cannot be calibrated", where=type(module).__name__)
    heads, tokens, dim = query.shape[1:]
    kv_heads, slots = key.shape[1:3]
    scale = dim**-0.5 if scaling is None else scaling
    out = torch.empty((1, tokens, heads, value.shape[-1]), dtype=value.dtype, device=value.device)
    received = torch.zeros(slots, dtype=torch.float32, device=query.device)
    q = query[0].unflatten(0, (kv_heads, -1)).to(torch.float32)
    kt = key[0].to(torch.float32).transpose(-1, -2)[:, None]
    mask = None if attention_mask is None else attention_mask[0, :, :, :slots]
    step = max(1, min(_QUERIES, _SCORES // (heads * slots)))
    for first in range(0, tokens, step):
        rows = slice(first, min(first + step, tokens))
        end = slots if mask is None else _visible(mask[:, rows], rows.stop)
        scores = (q[:, :, rows] @ kt[..., :end]).mul_(scale)
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        if mask is not None:
            scores += mask[:, None, rows, :end]
        p = scores.softmax(-1)
        out[0, rows] = (p.to(value.dtype) @ value[0, :, None, :end]).flatten(0, 1).transpose(0, 1)
        received[:end] += p.square_().sum((0, 1, 2))
    collector = _COLLECTING.get()
    if collector is not None:
        collector.attention(module, received, kv_heads * value.shape[-1])
    return out, None


def _visible(mask: Tensor, end: int) -> int:
    """``end`` if no row of the mask sees a slot from there on (causal), else all slots."""
    hidden = mask.shape[-1] <= end or float(mask[..., end:].amax()) < torch.finfo(mask.dtype).min / 2
    return min(end, mask.shape[-1]) if hidden else mask.shape[-1]


@contextmanager
def _observed(config: Any) -> Iterator[None]:
    """Inside, models of this configuration attend through :func:`_attention`."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, eager_mask

    AttentionInterface.register(_ATTENTION, _attention)
    AttentionMaskInterface.register(_ATTENTION, eager_mask)
    before = config._attn_implementation
    config._attn_implementation = _ATTENTION
    try:
        yield
    finally:
        config._attn_implementation = before


class Walk:
    """The hidden states of all calibration sequences, in front of one decoder layer after another.

    The embedding, the masks and the position embeddings come from a call of the model whose layers do nothing but note
    their arguments, so that every family's own code decides them. Between steps the model is as it was.

    Args:
        model: a causal language model in eval mode.
        rows: sequences, [1, length] int64 each.
        device: where the hidden states and the layers' arguments are kept; none: where the model puts them. The caller
            sees to it that a layer is there while it runs (:func:`moved`).
    """

    def __init__(self, model: nn.Module, rows: Sequence[Tensor], device: torch.device | str | None = None) -> None:
        self._device = device
        self._decoder, self.name, self._layers = decoder_layers(model)
        self.hidden: list[Tensor] = []
        """[1, length, hidden] per sequence, in the model's dtype."""
        self._lengths = [r.shape[-1] for r in rows]
        self._calls: dict[int, list[tuple[tuple[Any, ...], dict[str, Any]]]] = {}  # length -> arguments of every layer
        with torch.no_grad(), _observed(self._decoder.config), models.uncompiled(self._decoder):
            for row in rows:
                self._embed(row.to(next(self._decoder.parameters()).device))

    def _embed(self, row: Tensor) -> None:
        calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        first: list[Tensor] = []

        def note(hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if not first:
                first.append(hidden)
            calls.append((args, kwargs))
            return hidden

        before = [vars(layer).get("forward") for layer in self._layers]
        try:
            for layer in self._layers:
                layer.forward = note
            self._decoder(input_ids=row, use_cache=False)
        finally:
            for layer, forward in zip(self._layers, before, strict=True):
                del layer.forward
                if forward is not None:
                    layer.forward = forward
        if self._device is not None:
            first, calls = tree_map_only(Tensor, lambda t: t.to(self._device), (first, calls))
        self.hidden.append(first[0])
        # No content, only positions, decides these arguments: sequences of one length share them.
        self._calls.setdefault(row.shape[-1], calls)

    def step(self, index: int, moments: Moments | None = None) -> None:
        """Runs layer ``index`` on all sequences; :attr:`hidden` is then in front of the next one.

        Raises:
            DataError: the layer gives a value that is not finite.
        """
        layer = self._layers[index]
        with torch.no_grad(), _observed(self._decoder.config), moments.collecting() if moments else _nothing():
            for i, length in enumerate(self._lengths):
                args, kwargs = self._calls[length][index]
                out = layer(self.hidden[i], *args, **kwargs)
                self.hidden[i] = out[0] if isinstance(out, tuple) else out
                if moments is not None:
                    moments.end_of_sequence()
        if not all(bool(torch.isfinite(h.sum(dtype=torch.float32))) for h in self.hidden):
            raise DataError(
                "the unquantised layer gives NaN or infinity on the calibration text",
                where=f"{self.name}.{index}",
                advice="Check the model's weights and dtype: in float16 some models overflow where bfloat16 does not.",
            )

    def head(self, norm: nn.Module, moments: Moments, head: nn.Linear) -> None:
        """Hands the normalised hidden states to the output head's moments; nothing of the head is computed."""
        (collect,) = (moments._hook(name) for name in moments._linears)
        with torch.no_grad():
            for hidden in self.hidden:
                collect(head, (norm(hidden),))
                moments.end_of_sequence()


@contextmanager
def moved(modules: Iterable[nn.Module], device: torch.device | str | None) -> Iterator[None]:
    """Inside, the parameters and buffers of these modules are on ``device`` (none: where they are); then back."""
    if device is None:
        yield
        return
    homes = [(m, next((p.device for p in m.parameters()), None)) for m in modules]
    try:
        for module, _ in homes:
            module.to(device)
        yield
    finally:
        for module, home in homes:
            if home is not None:
                module.to(home)


@contextmanager
def _nothing() -> Iterator[None]:
    yield
