"""The page that ``Report.to_html`` writes: one file, nothing loaded from elsewhere, no scripts, every text escaped.

The layer map is a strip: one row per piece of the block, one column per decoder layer, neighbouring layers that agree
are one cell. A click opens the cell's details (the browser's own popover), hovering shows them as a tooltip. 80 layers
fit a screen, and a layer that differs from its neighbours stands out.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator
from html import escape
from typing import TYPE_CHECKING, Any

from fu_compile.report import (
    COUNTERS,
    FORMATS,
    MEMORY,
    PIECES,
    REST,
    STEPS,
    STORES,
    Cell,
    GraphReport,
    ModelReport,
    grouped_misses,
    human_bytes,
    human_seconds,
    layer_map,
    memory,
    times,
    title_of,
)

if TYPE_CHECKING:
    from fu_compile.doctor import DoctorReport
    from fu_compile.report import Report

COLOURS = {
    "int4": "#17735a",
    "int4-channel": "#2c7a7b",
    "fp8": "#2a67ad",
    "bf16": "#7248ac",
    "exact": "#5a6472",
    "model": "#8a5a12",
    "missed": "#b3261e",
}
"""Number format -> background of its cells, under white text."""

_MEMORY_COLOURS = {
    "parameters": "#8793a3",
    "int4": "#17735a",
    "fp8": "#2a67ad",
    "bf16": "#7248ac",
    "dense": "#b8860b",
    "kv_model": "#8a5a12",
    "kv_int4": "#4fae8d",
}
_MEANINGS = {**MEMORY, "dense": "dequantised or folded copies of weights (reference and CPU lowerings)"}

_LABELS = {"int4": "INT4", "int4-channel": "INT4-C", "fp8": "FP8", "bf16": "BF16", "exact": "exact", "model": "model"}
_LABELS |= {"missed": "missed"}

_PIECES = {
    "norms": "RMS norms",
    "qkv": "q/k/v projection, RoPE",
    "attention": "attention",
    "cache": "key/value cache",
    "swiglu": "gate and up, SwiGLU",
    "residual": "output and down, residual",
    "head": "output head",
}

_STYLE = """
:root { color-scheme: light dark; --line: #8885; --dim: #667; --card: #f5f6f8; --bad: #b3261e;
  font: 14px/1.45 system-ui, sans-serif; }
@media (prefers-color-scheme: dark) { :root { --dim: #aab; --card: #23262b; --bad: #ff8a80; } }
body { max-width: 76rem; margin: 1.5rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; margin: 0; } h2 { font-size: 1.2rem; margin: 1.6rem 0 .2rem; }
h3 { font-size: 1.05rem; margin: 1.6rem 0 .2rem; } h4 { font-size: 1rem; margin: 1rem 0 .3rem; }
p { margin: .3rem 0; } .dim { color: var(--dim); } .bad { color: var(--bad); font-weight: 600; }
.facts span { display: inline-block; background: var(--card); padding: .1rem .6rem; margin: 0 .4rem .3rem 0;
  border-radius: .3rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; margin: .3rem 0 .6rem; }
th, td { text-align: left; vertical-align: top; padding: .15rem .6rem; border-bottom: 1px solid var(--line); }
td { overflow-wrap: break-word; } td:first-child { min-width: 6.5rem; }
td.number { text-align: right; white-space: nowrap; }
.key span { color: #fff; padding: .05rem .5rem; margin-right: .35rem; border-radius: .2rem; white-space: nowrap; }
.key em { display: inline-block; font-style: normal; margin-right: 1.1rem; }
.key i { display: inline-block; width: .9rem; height: .9rem; margin: 0 .35rem -.15rem 0; border-radius: .2rem; }
.map { table-layout: fixed; width: 100%; }
.map th { border: 0; font-weight: 500; padding: .1rem .6rem .1rem 0; vertical-align: middle;
  white-space: nowrap; }
.map th.tick { font-size: .75rem; color: var(--dim); padding: .1rem 0; font-weight: 400; white-space: nowrap;
  border-left: 1px solid var(--line); padding-left: .15rem; }
.map td { padding: 1px; border: 0; } .map td.gap { padding: 0; }
.map button { all: unset; box-sizing: border-box; display: block; width: 100%; height: 1.7rem; line-height: 1.7rem;
  color: #fff; text-align: center; overflow: hidden; white-space: nowrap; border-radius: .15rem; cursor: pointer; }
.map button:focus-visible { outline: 3px solid #e8a33d; outline-offset: 1px; }
.map button.none { color: var(--dim); cursor: default; background: var(--card); }
[popover] { max-width: min(58rem, 90vw); max-height: 80vh; overflow: auto; border: 1px solid var(--line);
  border-radius: .4rem; padding: .8rem 1.2rem; box-shadow: 0 .5rem 2rem #0006; }
[popover] li { margin: .25rem 0; overflow-wrap: anywhere; }
.bar { display: flex; height: 1.4rem; margin: .4rem 0; border-radius: .2rem; overflow: hidden; }
.bar i { display: block; height: 100%; min-width: 2px; }
summary { cursor: pointer; margin: .25rem 0; font-weight: 500; }
details > :not(summary) { margin-left: 1rem; }
""" + "\n".join(
    f".map button.{name}, .key .{name} {{ background-color: {colour}; }}" for name, colour in COLOURS.items()
) + """
.map button.missed, .key .missed { background-image: repeating-linear-gradient(45deg, #0000 0 5px, #fff3 5px 8px); }
"""  # fmt: skip


def page(report: Report) -> str:
    """The whole page as text."""
    # "</script" and "<!--" inside a script element would end or change it.
    data = json.dumps(report.as_dict(), separators=(",", ":")).replace("<", "\\u003c")
    numbers = itertools.count()
    body = "".join(_model(model, numbers) for model in report.models) or f"<p>{escape(str(report))}</p>"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>FuTransformer report</title>'
        '<meta name="viewport" content="width=device-width">'
        f"<style>{_STYLE}</style></head><body><h1>FuTransformer report</h1>{body}"
        f'<script type="application/json" id="report">{data}</script></body></html>\n'
    )


def doctor_page(report: DoctorReport) -> str:
    """The page of ``DoctorReport.to_html``."""
    rows = "".join(
        f"<tr><td{' class=bad' * (c.status != 'ok')}>{escape(c.status)}</td><th>{escape(c.name)}</th>"
        f"<td>{escape(c.value)}" + (f"<br><b>{escape(c.advice)}</b>" if c.advice else "") + "</td></tr>"
        for c in report.checks
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>FuTransformer doctor</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head>'
        '<body><h1>FuTransformer doctor</h1><p class="dim">What to do is set in bold.</p>'
        f"<table><tr><th>status</th><th>what</th><th>found</th></tr>{rows}</table></body></html>\n"
    )


def _table(headings: Iterable[str], rows: Iterable[Iterable[Any]], numbers: Iterable[int] = ()) -> str:
    right = frozenset(numbers)
    head = "".join(f"<th>{escape(h)}</th>" for h in headings)
    body = "".join(
        "<tr>"
        + "".join(f"<td{' class=number' * (i in right)}>{escape(str(v))}</td>" for i, v in enumerate(row))
        + "</tr>"
        for row in rows
    )
    return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>' if body else ""


def _folded(title: str, content: str, shown: bool = False) -> str:
    return f"<details{' open' * shown}><summary>{escape(title)}</summary>{content}</details>" if content else ""


# ---- a model -------------------------------------------------------------------------------------------------------


def _model(model: ModelReport, numbers: Iterator[int]) -> str:
    counted = model.counted()
    misses = sum(len(graph.near_misses()) for graph in model.graphs)
    facts = [
        f"options: {model.options}",
        _count(len(model.graphs), "graph"),
        _count(counted["calls"], "call"),
        _count(counted["fallbacks"], "fallback"),
        _count(misses, "near miss"),
    ]
    marked = "".join(
        f"<span{' class=bad' * (i > 2 and not fact.startswith('0 '))}>{escape(fact)}</span>"
        for i, fact in enumerate(facts)
    )
    counters = [(n, v, COUNTERS.get(n, "")) for n, v in counted.items() if not n.startswith("bytes_")]
    options = [(n, v) for n, v in model.options.as_dict().items() if n != "version"]
    return (
        f'<h2>{escape(model.name)}</h2><p class="facts">{marked}</p>'
        + "".join(f"<p>{escape(note)}</p>" for note in model.notes)
        + ('<h4 class="bad">Fallbacks</h4>' + _table(("reason", "where"), model.fallbacks) if model.fallbacks else "")
        + (_legend() if model.graphs else "")
        + "".join(_graph(graph, numbers) for graph in model.graphs)
        + _memory(model)
        + _times(model)
        + _folded("Counters", _table(("counter", "value", "meaning"), counters, (1,)))
        + _folded("Options", _table(("option", "value"), options))
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "es" if what.endswith("s") else "s")


def _legend() -> str:
    entries = "".join(
        f'<em><span class="{name}">{_LABELS[name]}</span>{escape(text)}</em> ' for name, text in FORMATS.items()
    )
    return (
        f'<p class="key">{entries}</p><p class="dim">Layer maps: a row per piece of the block, a column per decoder'
        " layer. Click a cell for its operators, what runs them, and why; ! marks a near miss.</p>"
    )


def _memory(model: ModelReport) -> str:
    layers = memory(model.graphs)
    if not layers:
        return ""
    kinds = [kind for kind in MEMORY if any(row.get(kind) for row in layers.values())]
    total = {kind: sum(row.get(kind, 0) for row in layers.values()) for kind in kinds}
    if dense := int(model.counted().get("bytes_dense", 0)):
        total["dense"] = dense
    everything = sum(total.values()) or 1
    bar = "".join(
        f'<i style="background:{_MEMORY_COLOURS[kind]};width:{100 * size / everything:.2f}%"'
        f' title="{escape(_MEANINGS[kind])}: {human_bytes(size)}"></i>'
        for kind, size in total.items()
    )
    key = " ".join(
        f'<em><i style="background:{_MEMORY_COLOURS[kind]}"></i>{escape(_MEANINGS[kind])}: <b>{human_bytes(n)}</b></em>'
        for kind, n in total.items()
    )
    rows = [(layer, *(human_bytes(row[k]) if k in row else "" for k in kinds)) for layer, row in layers.items()]
    held = model.counted()
    holds = ", ".join(
        f"{name[6:]} {human_bytes(held[name])}" for name in COUNTERS if name.startswith("bytes_") and held[name]
    )
    return (
        f'<h3>Memory: {human_bytes(everything)}</h3><div class="bar">{bar}</div><p class="key">{key}</p>'
        + (f'<p class="dim">Held now: {escape(holds)}.</p>' if holds else "")
        + _folded("Per layer", _table(("layer", *kinds), rows, range(1, len(kinds) + 1)))
    )


def _times(model: ModelReport) -> str:
    if not model.graphs:
        return ""
    headings, rows = times(model.graphs)
    slowest = [
        (f"graph {graph.index}", name, human_seconds(value))
        for graph in model.graphs
        for name, value in graph.seconds.items()
        if name not in STEPS
    ]
    return (
        "<h3>Times</h3>"
        + _table(headings, rows, range(1, len(headings)))
        + '<p class="dim">All but the last column is paid once per graph. Calls are timed only inside'
        " <code>fu_compile.report.timed(model)</code>.</p>"
        + _folded("Each pass", _table(("graph", "pass", "time"), slowest, (2,)))
    )


# ---- a graph -------------------------------------------------------------------------------------------------------


def _graph(graph: GraphReport, numbers: Iterator[int]) -> str:
    decision = [(what, value, graph.reasons.get(what, "")) for what, value in graph.decision.items()]
    operators = [(name, n, *graph.lowerings.get(name, ("", ""))) for name, n in graph.operators().items()]
    misses = grouped_misses(graph)
    rewrites = ((e.name, e.layer, e.where, e.note) for e in graph.events if e.fired)
    left = sorted(graph.left_to_aten.items(), key=lambda entry: -entry[1])
    return (
        f"<h3>{escape(title_of(graph))}</h3>"
        f'<p class="dim">cache: {escape(graph.store)}{", " + escape(STORES[graph.store])}</p>'
        + _map(graph, numbers)
        + _folded(
            f"Near misses ({sum(n for _, n, *_ in misses)})",
            _table(("pass", "count", "first layer", "file:line", "failed precondition"), misses, (1,)),
            shown=True,
        )
        + _folded("Decision: what, and why", _table(("what", "value", "why"), decision))
        + _folded("Operators and what runs them", _table(("operator", "count", "lowering", "why"), operators, (1,)))
        + _folded(f"Left to ATen ({sum(graph.left_to_aten.values())})", _table(("operator", "count"), left, (1,)))
        + _folded("Rewrites that fired", _table(("pass", "layer", "file:line", "note"), rewrites))
    )


_NUMBERED = re.compile(r"^(.*?)\.?(\d+)$")


def _map(graph: GraphReport, numbers: Iterator[int]) -> str:
    rows = layer_map(graph)
    stacks: dict[str, list[str]] = {}
    for layer in rows:
        if layer != REST and (match := _NUMBERED.match(layer)):
            stacks.setdefault(match[1], []).append(layer)
    maps = [_strip(prefix, layers, rows, numbers, n == 0) for n, (prefix, layers) in enumerate(stacks.items())]
    if not stacks and rows:
        maps.append(_strip("", [], rows, numbers, True))
    return "".join(maps)


def _strip(
    prefix: str, layers: list[str], rows: dict[str, dict[str, Cell]], numbers: Iterator[int], with_rest: bool
) -> str:
    """One stack of layers as columns, and what lies outside the layers as a last one."""
    rest = with_rest and REST in rows
    lines, details = [], []
    for piece in PIECES:
        cells = []
        for run in _runs(layers, rows, piece):
            made, detail = _cell(prefix, run, rows[run[0]][piece], piece, len(run) / len(layers), next(numbers))
            cells.append(f'<td colspan="{len(run)}">{made}</td>')
            details.append(detail)
        if rest:
            made, detail = _cell("", [REST], rows[REST][piece], piece, 1.0, next(numbers))
            cells.append(f'<td class="gap"></td><td>{made}</td>')
            details.append(detail)
        lines.append(f"<tr><th>{escape(_PIECES[piece])}</th>{''.join(cells)}</tr>")
    step = next(s for s in (1, 2, 4, 8, 16, 32, 64, 128, 256) if len(layers) <= 20 * s)
    ticks = "".join(
        f'<th class="tick" colspan="{len(layers[i : i + step])}">{_number(layers[i])}</th>'
        for i in range(0, len(layers), step)
    )
    last = '<td class="gap"></td><th class="tick">outside the layers</th>' if rest else ""
    columns = '<col style="width:14rem">' + f'<col span="{len(layers)}">' * bool(layers)
    columns += '<col style="width:1rem"><col style="width:8rem">' if rest else ""
    width = f"min(100%, {len(layers) * 7 + 22}rem)"
    least = f"{len(layers) * 0.6 + 22:.0f}rem"
    return (
        f'<div class="wide"><table class="map" style="width:{width};min-width:{least}"><colgroup>{columns}</colgroup>'
        f'{"".join(lines)}<tr><th class="dim">{escape(prefix)}</th>{ticks}{last}</tr></table></div>{"".join(details)}'
    )


def _number(layer: str) -> str:
    match = _NUMBERED.match(layer)
    return match[2] if match else layer


def _runs(layers: list[str], rows: dict[str, dict[str, Cell]], piece: str) -> Iterator[list[str]]:
    """Neighbouring layers whose cells of ``piece`` say the same."""
    for _, run in itertools.groupby(layers, key=lambda layer: _said(layer, rows[layer][piece])):
        yield list(run)


def _said(layer: str, cell: Cell) -> tuple[Any, ...]:
    return (*cell.formats, cell.missed, *cell.lowerings, *(_without(note, layer) for note in cell.notes))


def _without(note: str, layer: str) -> str:
    return note.replace(f"{layer}.", "")


def _cell(prefix: str, run: list[str], cell: Cell, piece: str, share: float, number: int) -> tuple[str, str]:
    """The button of a cell, and the details that it opens."""
    if not cell.formats and not cell.missed:
        return '<button class="none" disabled title="no such piece here">–</button>', ""
    text = " + ".join(_LABELS[form] for form in cell.formats) or _LABELS["missed"]
    text += " !" if cell.missed and cell.formats else ""
    if share < 0.06 + 0.01 * len(text):
        text = "!" if cell.missed else ""
    where = _number(run[0]) if len(run) == 1 else f"{_number(run[0])} to {_number(run[-1])}"
    layers = "outside the layers" if run == [REST] else f"layer{'s' * (len(run) > 1)} {where} of {prefix}"
    notes = [_without(note, run[0]) for note in cell.notes]
    title = f"{_PIECES[piece]}, {layers}: {', '.join(FORMATS[f] for f in cell.formats) or FORMATS['missed']}"
    listed = "".join(f"<li>{escape(note)}</li>" for note in notes)
    colour = "missed" if cell.missed else cell.formats[0]
    mixed = "" if cell.missed or len(cell.formats) < 2 else _mixture(cell.formats)
    hover = escape("\n".join([title, *notes]), quote=True)
    button = f'<button class="{colour}" popovertarget="c{number}"{mixed} title="{hover}">{text}</button>'
    return button, f'<div id="c{number}" popover><b>{escape(title)}</b><ul>{listed}</ul></div>'


def _mixture(formats: list[str]) -> str:
    """A style with one band per format."""
    share = 100 / len(formats)
    stops = ", ".join(f"{COLOURS[f]} {n * share:.0f}% {(n + 1) * share:.0f}%" for n, f in enumerate(formats))
    return f' style="background:linear-gradient({stops})"'
