"""Perplexity of one model on several paths, side by side, by one fixed protocol.

Protocol (GPTQ's, on WikiText-2 raw, test split): the rows of the data set joined by two newlines, no beginning-of-text
token, non-overlapping windows of ``length`` tokens from the start of the stream; per window the mean negative log
likelihood (NLL, in nats) of its ``length - 1`` predictions; perplexity = exp(mean over windows). A path is compared
with the uncompiled model window by window, so that the text's own variation drops out: mean difference ± standard
error.

Paths:

=========  ============================================================================================
``eager``  the model as transformers runs it, not compiled: what the others are compared with
``exact``  ``mode="exact"``: our rewrites, nothing quantised
``fp8``    FP8 prefill: each window is one forward call; with ``fp8_scaling="static"`` the activation scales are
           those stored with the model, or calibrated on WikiText-2 valid
``int4``   INT4 decode: each token of a window is decoded on its own through the INT4 key/value cache,
           the next input being the text's token and not the model's (teacher forcing)
``cache``  an Int4Cache alone, keys calibrated on WikiText-2 valid, values rotated (``fu_compile.rotate_values``),
           weights as they are; in calls of one page of 64 tokens, in which every token sees what it would see decoded
           on its own: the pages before its own as they decode, its own page exactly
``channel`` the same with keys per channel (``kv_cache="int4-channel"``)
``cache4`` the same as ``cache`` with every token in INT4, the unfinished page too: decoded token by token
=========  ============================================================================================
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fu_compile import formats, models
from fu_compile.errors import DataError, OptionError

SHA256 = {
    "test": "173c87a53759e0201f33e0ccf978e510c2042d7f2cb78229d9a50d79b9e7dd08",
    "valid": "4cd0f6876d07a413aa911261ff6d363c72d757d47f0fdd6015702014c89cb9c7",
}
"""WikiText-2 raw, the files ``wiki.test.raw`` and ``wiki.valid.raw``. Several public files of that name are others."""

LENGTH = 2048
GATE_WINDOWS = (14, 56, 98, 140)
"""The windows that decide whether a change may go in."""
RELEASE_WINDOWS = tuple(range(0, 134, 7))
"""The windows that released numbers are taken on."""

PATHS: dict[str, tuple[str, dict[str, Any]]] = {
    # name: (what the table says, options of the backend; eager has none)
    "eager": ("uncompiled", {}),
    "exact": ("nothing quantised, one call per window", {"mode": "exact"}),
    "fp8": ("FP8 prefill, one call per window", {"prefill": "fp8", "decode": "exact", "kv_cache": "model"}),
    "int4": ("INT4 decode, token by token", {"prefill": "exact", "decode": "int4", "kv_cache": "int4"}),
    "cache": ("INT4 cache alone, values rotated, page by page", {"mode": "exact"}),
    "channel": ("the same, keys per channel", {"mode": "exact"}),
    "cache4": ("INT4 cache, unfinished page in INT4 too, token by token", {"mode": "exact"}),
}

CALIBRATION_WINDOWS = 4
"""Windows of the validation split from which the means of the keys and static FP8 scales are taken."""

# Rows of logits that are turned into float32 log probabilities at once: 256 x 128,256 of Llama 3 are 130 MB.
_ROWS = 256


@dataclass(frozen=True)
class PathResult:
    """One path on all windows."""

    name: str
    nll: tuple[float, ...]
    """Mean NLL of each window, in nats per token, in the order of :attr:`Result.windows`."""
    tokens: int
    """Predicted tokens, all windows together."""
    seconds: float
    """Wall time of the scoring, compilation included."""
    difference: float | None = None
    """Mean over windows of NLL minus eager's NLL; none without an eager path."""
    standard_error: float | None = None
    """Standard error of that mean; none with fewer than two windows."""

    @property
    def perplexity(self) -> float:
        """exp(mean NLL)."""
        return math.exp(statistics.fmean(self.nll))


@dataclass(frozen=True)
class Result:
    """All paths of one run, and everything needed to repeat it."""

    model: str
    dtype: str
    length: int
    windows: tuple[int, ...]
    stream_tokens: int
    """Tokens of the whole text; the windows are cut from it."""
    source: str
    sha256: str
    paths: tuple[PathResult, ...]
    versions: dict[str, str] = field(default_factory=dict)

    def __getitem__(self, name: str) -> PathResult:
        """The path of this name (KeyError where it was not run)."""
        return {p.name: p for p in self.paths}[name]

    def slice_text(self) -> str:
        """The slice in words, as a table's title must state it."""
        names = (
            f"windows {', '.join(map(str, self.windows))}" if len(self.windows) <= 8 else f"{len(self.windows)} windows"
        )
        return f"{names} of {self.length} tokens from the start of the text, {self.dtype}"

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        rows = [vars(p) | {"perplexity": p.perplexity, "nll": list(p.nll)} for p in self.paths]
        return vars(self) | {"windows": list(self.windows), "paths": rows}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes :meth:`as_dict` as JSON."""
        Path(path).write_text(json.dumps(self.as_dict(), indent=2) + "\n")

    def table(self) -> Any:
        """A ``rich`` table; the title names the slice."""
        from rich.table import Table

        table = Table(title=f"Perplexity: {self.model}, {self.source}\n{self.slice_text()}", title_justify="left")
        for head, side in (("path", "left"), ("how", "left")):
            table.add_column(head, justify=side)  # type: ignore[arg-type]
        for head in ("perplexity", "NLL - eager (± s.e.)", "tokens", "seconds"):
            table.add_column(head, justify="right")
        for p in self.paths:
            change = "" if p.difference is None or p.name == "eager" else f"{p.difference:+.4f}"
            change += f" ± {p.standard_error:.4f}" if change and p.standard_error is not None else ""
            table.add_row(p.name, PATHS[p.name][0], f"{p.perplexity:.3f}", change, f"{p.tokens:,}", f"{p.seconds:.1f}")
        return table

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(width=110, color_system=None)
        with console.capture() as text:
            console.print(self.table())
        return text.get()


def perplexity(
    model: Any,
    tokenizer: Any,
    paths: Sequence[str] = ("eager", "exact", "fp8", "int4"),
    windows: Iterable[int] = GATE_WINDOWS,
    length: int = LENGTH,
    *,
    file: str | os.PathLike[str] | None = None,
    dataset: str | None = None,
    options: dict[str, Any] | None = None,
    progress: bool = True,
) -> Result:
    """Perplexity of ``model`` on each of ``paths``, by the protocol at the head of this module.

    Args:
        model: a transformers causal language model in eval mode. It is left as it was; Dynamo is reset between paths.
        tokenizer: its tokenizer.
        paths: names of :data:`PATHS`.
        windows: indices of windows of ``length`` tokens, counted from the start of the text.
        length: tokens per window.
        file: any other text, read as it is, instead of the verified WikiText-2.
        dataset: ``NAME[:CONFIG[:SPLIT]]`` of the library ``datasets``, instead of a file.
        options: options of the backend on top of each path's own, such as ``{"group_size": 64}``.
        progress: a progress bar with the time left, on standard error.

    Raises:
        OptionError: an unknown path, a window that the text does not have, or both ``file`` and ``dataset``.
        DataError: the text cannot be found, or is not WikiText-2.
    """
    if unknown := [p for p in paths if p not in PATHS]:
        raise OptionError(f"there is no path {unknown[0]!r}", where="paths", advice=f"Possible: {', '.join(PATHS)}.")
    text, source, digest = read_text(file, dataset)
    stream = encode(tokenizer, text)
    batch, chosen = cut(stream, windows, length)
    batch = batch.to(model.device)

    results: list[PathResult] = []
    with torch.no_grad(), _bar(len(paths) * batch.shape[0] * (length - 1), progress) as bar:
        for name in paths:
            bar.set_description(f"perplexity, {name}")
            start = time.perf_counter()
            kept = _cache(model, tokenizer, name, batch) if name in ("cache", "channel", "cache4") else None
            with _rotated(model, kept is not None), _prepared(model, name, options or {}):
                if name == "fp8" and (options or {}).get("fp8_scaling") == "static":
                    from fu_compile.fp8 import calibrate_fp8

                    if not getattr(getattr(model.config, "quantization_config", None), "fp8_scales", None):
                        calibrate_fp8(model, _validation(tokenizer, length), progress=False, keep=False)
                if name == "int4" or kept is not None:
                    whole_pages = name in ("cache", "channel")
                    nll = score_decode(model, batch, bar.update, kept, formats.PAGE if whole_pages else 1)
                else:
                    nll = score_prefill(model, batch, bar.update)
            seconds = time.perf_counter() - start
            results.append(PathResult(name, tuple(nll), batch.shape[0] * (length - 1), seconds))
    return Result(
        model=str(getattr(tokenizer, "name_or_path", "")).rstrip("/").split("/")[-1] or type(model).__name__,
        dtype=str(model.dtype).removeprefix("torch."),
        length=length,
        windows=chosen,
        stream_tokens=stream.shape[0],
        source=source,
        sha256=digest,
        paths=tuple(_compare(results)),
        versions=_versions(),
    )


def score_prefill(model: Any, batch: Tensor, done: Callable[[int], Any] = lambda n: None) -> list[float]:
    """Mean NLL of each row of ``batch``: [windows, length] int64; one call of the model per row.

    ``done`` is called with the number of tokens just scored.
    """
    out = []
    for row in batch:
        logits = model(input_ids=row[None], use_cache=False).logits[0, :-1]
        parts = zip(logits.split(_ROWS), row[1:].split(_ROWS), strict=True)
        out.append(torch.cat([_nll(part, target) for part, target in parts]).mean().item())
        done(row.shape[0] - 1)
    return out


def score_decode(
    model: Any, batch: Tensor, done: Callable[[int], Any] = lambda n: None, kept: Any = None, step: int = 1
) -> list[float]:
    """Mean NLL of each row of ``batch``: [windows, length] int64; all rows decoded together, ``step`` tokens per call.

    The key/value cache (``kept``, or a StaticCache) starts empty, so every token, the first included, goes through it.
    In calls of one page (64 tokens) an Int4Cache with an exact page shows every token what it would see decoded alone.
    """
    rows, length = batch.shape
    cache = {models.cache_kwarg(model): models.static_cache(model, length, rows) if kept is None else kept}
    total = torch.zeros(rows, dtype=torch.float64, device=batch.device)
    for i in range(0, length - 1, step):
        tokens = batch[:, i : min(i + step, length - 1)]
        logits = model(input_ids=tokens, use_cache=True, **cache).logits
        targets = batch[:, i + 1 : i + 1 + tokens.shape[1]]
        total += _nll(logits.flatten(0, 1), targets.flatten()).view(rows, -1).sum(1)
        done(tokens.numel())
    return (total / (length - 1)).tolist()


def _cache(model: Any, tokenizer: Any, name: str, batch: Tensor) -> Any:
    """The Int4Cache of a path, its keys calibrated on the first windows of the validation split."""
    from fu_compile import keys
    from fu_compile.int4_cache import Int4Cache

    rows, length = batch.shape
    more: dict[str, Any] = {"kv_cache": formats.CHANNEL, "model": model} if name == "channel" else {}
    if name != "channel":
        more["tables"] = keys.calibrate_keys(model, [w[None] for w in _validation(tokenizer, length)])
    return Int4Cache(model.config, length, rows, model.device, model.dtype, exact_page=name != "cache4", **more)


@contextmanager
def _rotated(model: Any, wanted: bool) -> Iterator[None]:
    """The model with rotated values where that is wanted, decoded pages kept; afterwards every weight is as it was."""
    from fu_compile.int4_cache import rotate_values
    from fu_compile.lowerings.pages import keeping_decoded

    if not wanted:
        yield
        return
    names = ("v_proj", "qkv_proj", "o_proj")
    before = [
        (p, p.detach().clone()) for path, m in model.named_modules() if path.endswith(names) for p in m.parameters()
    ]
    rotate_values(model)
    try:
        with keeping_decoded():
            yield
    finally:
        for parameter, was in before:
            parameter.copy_(was)


def _validation(tokenizer: Any, length: int) -> Tensor:
    """The calibration text of all paths: [CALIBRATION_WINDOWS, length] of WikiText-2's validation split."""
    return cut(encode(tokenizer, wikitext("valid")[0]), range(CALIBRATION_WINDOWS), length)[0]


def wikitext(split: str = "test") -> tuple[str, str]:
    """The text of a WikiText-2 raw split (rows of Hugging Face's data set joined by two newlines), and where it was.

    Looked for in this order: ``FU_WIKITEXT`` (a folder or the file itself), ``shared/data/wikitext-2-raw`` beside or in
    the source tree or the working directory, and the package ``datasets`` where it is installed.

    Raises:
        DataError: nothing found, or a file with another checksum.
    """
    name = f"wiki.{split}.raw"
    for folder in _places():
        file = folder if folder.is_file() else folder / name
        if file.is_file():
            raw = file.read_bytes()
            if (digest := hashlib.sha256(raw).hexdigest()) != SHA256[split]:
                raise DataError(
                    f"{file} is not WikiText-2 raw: sha256 {digest}, expected {SHA256[split]}", where=str(file)
                )
            return join_rows(raw.decode("utf-8")), str(file)
    if importlib.util.find_spec("datasets") is not None:
        from datasets import load_dataset

        rows = load_dataset(
            "Salesforce/wikitext", "wikitext-2-raw-v1", split="validation" if split == "valid" else split
        )
        # Back to the raw file, so that the same checksum decides.
        raw = "".join(r or " \n" for r in rows["text"]).encode("utf-8")
        if hashlib.sha256(raw).hexdigest() == SHA256[split]:
            return "\n\n".join(rows["text"]), "Salesforce/wikitext"
        raise DataError("Salesforce/wikitext on the hub is not the WikiText-2 raw known here", where="datasets")
    raise DataError(
        f"WikiText-2 raw ({name}) was not found",
        where=", ".join(str(p) for p in _places()),
        advice="Set FU_WIKITEXT to a folder that has the file, or `pip install datasets`, or pass another text (file).",
    )


def join_rows(raw: str) -> str:
    """Rows of the raw file as the data set has them (a blank line " \\n" is an empty row), joined by two newlines."""
    rows = raw.split("\n")
    rows = rows[:-1] if rows[-1] == "" else rows
    return "\n\n".join("" if row == " " else row + "\n" for row in rows)


def read_text(file: str | os.PathLike[str] | None, dataset: str | None = None) -> tuple[str, str, str]:
    """Text, a name for it, and the sha256 of the text: ``file`` as it is, a data set, or verified WikiText-2 (test).

    Raises:
        DataError: the text cannot be found or read. OptionError: both a file and a data set.
    """
    if file is not None and dataset is not None:
        raise OptionError("both a file and a data set are given", where="file, dataset", advice="Give one of them.")
    if dataset is not None:
        text, name = _dataset(dataset)
    elif file is None:
        text, _ = wikitext("test")
        name = "WikiText-2 raw (test)"
    else:
        path = Path(file).expanduser()
        try:
            text, name = path.read_text(encoding="utf-8"), path.name
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(
                f"{path} cannot be read as text: {error}", where="file", advice="Give a UTF-8 text file."
            ) from error
    return text, name, hashlib.sha256(text.encode("utf-8")).hexdigest()


def _dataset(spec: str) -> tuple[str, str]:
    """Rows of ``NAME[:CONFIG[:SPLIT]]`` (split: test), column ``text``, joined by two newlines; and a name for them."""
    name, config, split, *more = [*spec.split(":"), "", ""]
    if len(more) > 2 or not name:
        raise OptionError(f"{spec!r} names no data set", where="dataset", advice="Write NAME[:CONFIG[:SPLIT]].")
    split = split or "test"
    if importlib.util.find_spec("datasets") is None:
        raise DataError(
            f"reading the data set {name} needs the package datasets",
            where="dataset",
            advice="pip install datasets, or give a text file.",
        )
    import datasets

    try:
        rows = datasets.load_dataset(name, config or None, split=split)
        texts = rows["text"]
    # The library has errors of its own and lets those of its downloads through; every one ends in the same advice.
    except Exception as error:
        columns = getattr(locals().get("rows"), "column_names", None)
        what = f"it has no column text, but {columns}" if columns else (str(error).strip().splitlines() or [""])[0]
        raise DataError(
            f"the data set {name} cannot be read (configuration {config or 'default'}, split {split}): {what}",
            where="dataset",
            advice="Check name, configuration, split and network; or give a text file.",
        ) from error
    return "\n\n".join(texts), f"{name} ({', '.join(filter(None, (config, split)))})"


def encode(tokenizer: Any, text: str) -> Tensor:
    """The whole text as one stream of token ids, [tokens] int64, without special tokens."""
    limit, tokenizer.model_max_length = tokenizer.model_max_length, int(1e30)  # the stream is cut below: no warning
    try:
        ids = tokenizer(text, add_special_tokens=False, return_attention_mask=False).input_ids
    finally:
        tokenizer.model_max_length = limit
    return torch.tensor(ids, dtype=torch.int64)


def cut(stream: Tensor, windows: Iterable[int], length: int) -> tuple[Tensor, tuple[int, ...]]:
    """The windows ``[i * length, (i + 1) * length)`` of ``stream``: [windows, length], and their indices as a tuple."""
    chosen = tuple(windows)
    there = stream.shape[0] // max(length, 1)
    if length < 2 or not chosen or not all(0 <= w < there for w in chosen):
        raise OptionError(
            f"windows {list(chosen)} of {length} tokens: the text has {stream.shape[0]} tokens",
            where="windows, length",
            advice=f"Use at least one window, indices 0 to {there - 1}, and a length of at least 2.",
        )
    return torch.stack([stream[w * length : (w + 1) * length] for w in chosen]), chosen


def _nll(logits: Tensor, target: Tensor) -> Tensor:
    """Per row, in float64; log softmax in float32 whatever the model's dtype."""
    return torch.nn.functional.cross_entropy(logits.float(), target, reduction="none").double()


def _compare(results: list[PathResult]) -> Iterator[PathResult]:
    eager = next((r.nll for r in results if r.name == "eager"), None)
    for r in results:
        if eager is None:
            yield r
            continue
        differences = [a - b for a, b in zip(r.nll, eager, strict=True)]
        n = len(differences)
        error = statistics.stdev(differences) / math.sqrt(n) if n > 1 else None
        yield PathResult(r.name, r.nll, r.tokens, r.seconds, statistics.fmean(differences), error)


def _prepared(model: Any, name: str, extra: dict[str, Any]) -> AbstractContextManager[Any]:
    if name == "eager":
        return models.uncompiled(model)
    return models.compiled(model, **{**PATHS[name][1], **extra})


def _places() -> list[Path]:
    root = Path(__file__).resolve().parents[1]
    near = [base / "shared/data/wikitext-2-raw" for base in (root, root.parent, Path.cwd(), Path.cwd().parent)]
    given = os.environ.get("FU_WIKITEXT")
    return ([Path(given).expanduser()] if given else []) + list(dict.fromkeys(near))


def _bar(total: int, shown: bool) -> Any:
    from tqdm.auto import tqdm

    return tqdm(total=total, unit="tok", disable=not shown, smoothing=0.05)


def _versions() -> dict[str, str]:
    import platform

    import transformers

    return {"torch": torch.__version__, "transformers": transformers.__version__, "python": platform.python_version()}
