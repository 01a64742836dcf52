"""The page that ``Report.to_html`` writes: one file, nothing loaded from elsewhere, every text escaped."""

from __future__ import annotations

import json
from collections.abc import Iterable
from html import escape
from typing import TYPE_CHECKING, Any

from fu_compile.report import (
    COUNTERS,
    FORMATS,
    PIECES,
    Cell,
    GraphReport,
    ModelReport,
    grouped_misses,
    human_bytes,
    layer_map,
    title_of,
)

if TYPE_CHECKING:
    from fu_compile.report import Report

_COLOURS = {
    "int4": "#1b7f5c",
    "fp8": "#2f6fb5",
    "bf16": "#7a5bb0",
    "exact": "#6b7280",
    "model": "#9aa0a8",
    "missed": "#b3372f",
}

_STYLE = """
:root { color-scheme: light dark; font: 14px/1.45 system-ui, sans-serif; }
body { max-width: 76rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.15rem; margin-top: 2.5rem; } h3 { font-size: 1rem; margin-bottom: .3rem; }
table { border-collapse: collapse; margin: .3rem 0 1rem; }
th, td { text-align: left; vertical-align: top; padding: .15rem .6rem; border-bottom: 1px solid #8884; }
td { overflow-wrap: anywhere; }
.map td { color: #fff; text-align: center; border: 1px solid #8884; min-width: 4.5rem; cursor: help; }
.map td small { display: block; opacity: .85; } .map td.none { color: inherit; opacity: .5; }
.key span { color: #fff; padding: .1rem .5rem; margin-right: .4rem; border-radius: .2rem; }
.bar { display: inline-block; height: .7rem; background: #2f6fb5; }
summary { cursor: pointer; }
""" + "\n".join(f".{name} {{ background: {colour}; }}" for name, colour in _COLOURS.items())


def page(report: Report) -> str:
    """The whole page as text."""
    # "</script" and "<!--" inside a script element would end or change it.
    data = json.dumps(report.as_dict()).replace("<", "\\u003c")
    key = "".join(f'<span class="{name}">{name}</span>{escape(text)} ' for name, text in FORMATS.items())
    body = "".join(_model(model) for model in report.models) or f"<p>{escape(str(report))}</p>"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>FuTransformer report</title>'
        '<meta name="viewport" content="width=device-width">'
        f"<style>{_STYLE}</style></head><body><h1>FuTransformer report</h1><p class=key>{key}</p>{body}"
        f'<script type="application/json" id="report">{data}</script></body></html>\n'
    )


def _table(headings: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    head = "".join(f"<th>{escape(h)}</th>" for h in headings)
    body = "".join("<tr>" + "".join(f"<td>{escape(str(v))}</td>" for v in row) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>" if body else ""


def _section(title: str, content: str) -> str:
    return f"<h3>{escape(title)}</h3>{content}" if content else ""


def _model(model: ModelReport) -> str:
    counts = [(n, v, COUNTERS.get(n, "")) for n, v in model.counted().items() if not n.startswith("bytes_")]
    options = [(n, v) for n, v in model.options.as_dict().items() if n != "version"]
    return (
        f"<h2>{escape(model.name)}</h2>"
        + "".join(f"<p>{escape(note)}</p>" for note in model.notes)
        + _section("Bytes", _bytes(model))
        + _section("Counters", _table(("counter", "value", "meaning"), counts))
        + _section("Fallbacks", _table(("reason", "where"), model.fallbacks))
        + _section("Options", _table(("option", "value"), options))
        + "".join(_graph(graph) for graph in model.graphs)
    )


def _bytes(model: ModelReport) -> str:
    sizes = {name: value for name, value in model.counted().items() if name.startswith("bytes_") and value}
    largest = max(sizes.values(), default=1)
    rows = "".join(
        f"<tr><th>{name[6:]}</th><td>{human_bytes(value)}</td>"
        f'<td><span class="bar" style="width:{20 * value / largest:.2f}rem"></span>'
        f" {escape(COUNTERS.get(name, ''))}</td></tr>"
        for name, value in sizes.items()
    )
    return f"<table>{rows}</table>" if rows else ""


def _graph(graph: GraphReport) -> str:
    decision = [(what, value, graph.reasons.get(what, "")) for what, value in graph.decision.items()]
    operators = [(name, n, *graph.lowerings.get(name, ("", ""))) for name, n in graph.operators().items()]
    seconds = [(name, f"{value:.3f}") for name, value in graph.seconds.items()]
    misses = _table(("pass", "count", "first layer", "file:line", "failed precondition"), grouped_misses(graph))
    rewrites = _table(
        ("pass", "layer", "file:line", "note"), ((e.name, e.layer, e.where, e.note) for e in graph.events if e.fired)
    )
    return (
        f"<h2>{escape(title_of(graph))}</h2>"
        + _section("Decision", _table(("what", "value", "why"), decision))
        + _section("Layer map (hover a cell for operators, lowerings and reasons)", _map(graph))
        + _section("Operators", _table(("operator", "count", "lowering", "why"), operators))
        + _section("Near misses", misses)
        + _section("Left to ATen", _table(("operator", "count"), sorted(graph.left_to_aten.items())))
        + _section("Seconds", _table(("step", "seconds"), seconds))
        + (f"<details><summary>Rewrites that fired</summary>{rewrites}</details>" if rewrites else "")
    )


def _map(graph: GraphReport) -> str:
    rows = "".join(
        f"<tr><th>{escape(layer)}</th>{''.join(_cell(row[piece]) for piece in PIECES)}</tr>"
        for layer, row in layer_map(graph).items()
    )
    head = "".join(f"<th>{piece}</th>" for piece in PIECES)
    return f'<table class="map"><tr><th></th>{head}</tr>{rows}</table>' if rows else ""


def _cell(cell: Cell) -> str:
    colour = "missed" if cell.missed else (cell.formats[0] if cell.formats else "none")
    hover = escape("\n".join(cell.notes), quote=True)
    small = f"<small>{escape(', '.join(cell.lowerings))}</small>" if cell.lowerings else ""
    return f'<td class="{colour}" title="{hover}">{escape(str(cell))}{small}</td>'
