"""The page of ``LayerReport.to_html``: heat maps of signal-to-noise ratios, one file, nothing loaded, no scripts.

A map per phase: one row per part of a layer, one column per layer, the colour is the ratio. Colours run from brown over
grey to blue, so that they can be told apart without seeing red and green as different; hovering gives the numbers.
"""

from __future__ import annotations

import json
from html import escape

from fu_compile import report_html
from fu_compile.layers import EXACT, LayerError, LayerReport, decibel

STEPS: tuple[tuple[float, str], ...] = (
    (10.0, "#7f1d0d"),
    (15.0, "#a63d0a"),
    (20.0, "#96580a"),
    (25.0, "#6f6450"),
    (30.0, "#5a6a78"),
    (35.0, "#36699c"),
    (40.0, "#1d5690"),
    (EXACT, "#0c3d70"),
)
"""(SNR in dB below which the colour holds, background under white text). 10 dB: noise of a third of the signal."""

_PHASES = {
    "prefill": "all tokens of a prompt in one call",
    "decode": "one token at a time, through the key/value cache",
}
_STYLE = """
.map.heat td { padding: 1px; } .map.heat td div { height: 1.7rem; line-height: 1.7rem; text-align: center;
  color: #fff; border-radius: .15rem; overflow: hidden; font-size: .8rem; }
.map.heat td div.exact { color: var(--dim); background: var(--card); }
.scale { display: flex; max-width: 44rem; margin: .6rem 0; }
.scale span { flex: 1; color: #fff; text-align: center; padding: .1rem .2rem; white-space: nowrap; font-size: .85rem; }
.scale span.exact { color: var(--dim); background: var(--card); }
"""


def colour(snr: float) -> str:
    """Background of a cell; SNR in dB, not infinite."""
    return next(shade for below, shade in STEPS if snr < below)


def page(report: LayerReport) -> str:
    """The whole page as text."""
    data = json.dumps(report.as_dict(), separators=(",", ":")).replace("<", "\\u003c")
    maps = "".join(_section(report, phase, False) for phase in report.phases)
    if any(e.accumulated is not None for e in report.errors):
        maps += "".join(_section(report, phase, True) for phase in report.phases)
    rows = [
        (e.layer, e.part, e.phase, e.precision, decibel(e.snr), decibel(e.token), decibel(e.accumulated))
        for e in report.worst()
    ]
    headings = ("layer", "part", "phase", "format", "SNR dB", "typical token dB", "accumulated dB")
    notes = "".join(f"<li>layer {e.layer}, {escape(e.part)}: {escape(e.note)}</li>" for e in report.errors if e.note)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>FuTransformer layer errors</title>'
        '<meta name="viewport" content="width=device-width">'
        f"<style>{report_html._STYLE}{_STYLE}</style></head><body><h1>FuTransformer layer errors</h1>"
        f'<p>{escape(report.title())}</p><p class="dim">Signal-to-noise ratio of each output, quantised against'
        " uncompiled, on the inputs of the uncompiled model. A row per part of a layer, a column per layer; hover for"
        f" the numbers.</p>{_scale()}{maps}"
        f"<h2>Worst</h2>{report_html._table(headings, rows, (0, 4, 5, 6))}"
        + (f"<h2>Notes</h2><ul>{notes}</ul>" if notes else "")
        + f'<script type="application/json" id="layers">{data}</script></body></html>\n'
    )


def _scale() -> str:
    """The legend."""
    low, cells = "", []
    for below, shade in STEPS:
        text = f"under {below:.0f} dB" if not low else f"{low} dB and more" if below == EXACT else f"{low}–{below:.0f}"
        cells.append(f'<span style="background:{shade}">{text}</span>')
        low = f"{below:.0f}"
    return f'<div class="scale">{"".join(cells)}<span class="exact">exact</span></div>'


def _section(report: LayerReport, phase: str, accumulated: bool) -> str:
    what = ", errors accumulated along the layers" if accumulated else ""
    found = {(e.part, e.layer): e for e in report.errors if e.phase == phase}
    layers = report.layers
    cells = {
        part: "".join(_cell(found.get((part, n)), accumulated, len(layers)) for n in layers) for part in report.parts
    }
    lines = "".join(f"<tr><th>{escape(part)}</th>{row}</tr>" for part, row in cells.items())
    step = next(s for s in (1, 2, 4, 8, 16, 32, 64, 128, 256) if len(layers) <= 20 * s)
    ticks = "".join(
        f'<th class="tick" colspan="{len(layers[i : i + step])}">{layers[i]}</th>' for i in range(0, len(layers), step)
    )
    width, least = f"min(100%, {len(layers) * 5 + 14}rem)", f"{len(layers) * 0.6 + 14:.0f}rem"
    return (
        f"<h2>{phase}: {escape(report.formats_of(phase))}{what}</h2>"
        f'<p class="dim">{_PHASES[phase]}</p><div class="wide">'
        f'<table class="map heat" style="width:{width};min-width:{least}"><colgroup><col style="width:12rem">'
        f'<col span="{len(layers)}"></colgroup>{lines}<tr><th class="dim">layer</th>{ticks}</tr></table></div>'
    )


def _cell(error: LayerError | None, accumulated: bool, layers: int) -> str:
    snr = None if error is None else error.accumulated if accumulated else error.snr
    if error is None or snr is None:
        return '<td><div class="exact" title="no such part here">–</div></td>'
    title = (
        f"layer {error.layer}, {error.part}, {error.precision}: {decibel(error.snr)} dB,"
        f" typical token {decibel(error.token)} dB"
    )
    title += f", accumulated {decibel(error.accumulated)} dB" if error.accumulated is not None else ""
    title += f"\n{error.note}" if error.note else ""
    hover = escape(title.replace("exact dB", "exact"), quote=True)
    if snr == EXACT:
        return f'<td><div class="exact" title="{hover}">{"" if layers > 16 else "exact"}</div></td>'
    text = f"{snr:.0f}" if layers <= 40 else ""
    return f'<td><div style="background:{colour(snr)}" title="{hover}">{text}</div></td>'
