"""The HTML of a report: its frame, style, script and small building blocks.

Invariant: every text passes `html.escape`, data in a script cannot close it, and nothing is fetched from anywhere.
This module must not know what a run is.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

STYLE = """
:root {
  color-scheme: light dark;
  --page: #f6f6f4; --card: #ffffff; --ink: #1d2329; --soft: #66707a; --line: #e3e4e1; --head: #f1f1ee;
  --train: #2f6fd0; --validation: #d9730d; --speed: #0e8f7e; --rate: #7a5bc7; --norm: #5f7f2b;
  --save: #9aa3ab; --resume: #c2408f; --fault: #cf3a34; --good: #1b8a4b; --warn: #b7791f;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #14171a; --card: #1c2024; --ink: #e4e7ea; --soft: #98a2ac; --line: #2d3338; --head: #23282d;
    --train: #6ea8ff; --validation: #f2a04a; --speed: #3cc7b2; --rate: #b39af0; --norm: #a9c76a;
    --save: #66707a; --resume: #f07cc0; --fault: #ff6f68; --good: #4fca83; --warn: #e7b45a;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif;
}
main { max-width: 1180px; margin: 0 auto; padding: 28px 20px 60px; }
header { margin-bottom: 18px; }
h1 { font-size: 26px; line-height: 1.2; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 17px; margin: 34px 0 10px; }
h3 { font-size: 14px; margin: 0; }
p { margin: 4px 0; }
.soft { color: var(--soft); overflow-wrap: anywhere; }
.state {
  font-size: 13px; font-weight: 600; vertical-align: 4px; margin-left: 8px; padding: 2px 10px;
  border-radius: 99px; border: 1px solid currentColor;
}
.state.finished { color: var(--good); } .state.running { color: var(--train); }
.state.stopped { color: var(--warn); } .state.failed { color: var(--fault); } .state.new { color: var(--soft); }
.tiles { display: grid; grid-template-columns: repeat(4, minmax(0, 1fr)); gap: 10px; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 8px; }
.tile { padding: 10px 14px; min-width: 0; }
.tile b { display: block; font-size: 20px; font-weight: 600; font-variant-numeric: tabular-nums; }
.tile span { color: var(--soft); font-size: 13px; overflow-wrap: anywhere; }
.curves { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 12px; }
.tables { columns: 2; column-gap: 12px; }
.pairs { break-inside: avoid; overflow: hidden; margin-bottom: 12px; }
.wide { grid-column: 1 / -1; }
.figure { padding: 12px 12px 4px; min-width: 0; }
.figure .bar { display: flex; justify-content: space-between; align-items: center; min-height: 26px; }
.plot { height: 260px; } .wide .plot { height: 380px; }
button {
  font: inherit; font-size: 13px; color: var(--soft); background: none; cursor: pointer;
  border: 1px solid var(--line); border-radius: 6px; padding: 1px 9px;
}
button[aria-pressed="true"] { color: var(--card); background: var(--soft); }
.key { font-size: 13px; margin: 0 0 10px; color: var(--soft); }
.key i { display: inline-block; height: 12px; margin: 0 6px 0 14px; border-left: 2px solid; vertical-align: -1px; }
.key i:first-child { margin-left: 0; }
.save { color: var(--save); } .resume { color: var(--resume); } .fault { color: var(--fault); }
.shares { display: flex; height: 18px; margin: 8px 0 12px; border-radius: 6px; overflow: hidden; }
.shares i { min-width: 1px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th, td { text-align: left; padding: 5px 12px; border-top: 1px solid var(--line); vertical-align: top; }
thead th { border-top: none; color: var(--soft); font-weight: 500; background: var(--head); white-space: nowrap; }
td { overflow-wrap: anywhere; font-variant-numeric: tabular-nums; }
.scroll td { white-space: nowrap; } .scroll td:last-child { white-space: pre-line; min-width: 240px; }
.pairs th { font-weight: 400; color: var(--soft); width: 42%; }
.pairs h3 { padding: 8px 12px; background: var(--head); }
@media (max-width: 760px) {
  main { padding: 18px 12px 40px; }
  .curves { grid-template-columns: minmax(0, 1fr); }
  .tables { columns: 1; }
  .tiles { grid-template-columns: repeat(2, minmax(0, 1fr)); }
  .wide .plot { height: 300px; }
}
@media print { button { display: none; } .figure, table { break-inside: avoid; } }
"""

SCRIPT = """
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const touch = window.matchMedia("(pointer: coarse)").matches;
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
  const config = { responsive: true, displaylogo: false, displayModeBar: false, scrollZoom: false };
  const logs = new Set();

  function shape(mark) {
    const save = mark.kind === "save";
    return {
      type: "line", x0: mark.step, x1: mark.step, yref: "paper", y0: 0, y1: save ? 0.035 : 1,
      line: { color: colour(mark.kind), width: save ? 2 : 1.5, dash: mark.kind === "resume" ? "dash" : "solid" },
    };
  }

  function trace(source) {
    return {
      type: "scatter", x: source.x, y: source.y, name: source.name, mode: source.mode,
      line: { color: colour(source.colour), width: source.faint ? 1 : 2 }, marker: { size: 6 },
      opacity: source.faint ? 0.35 : 1, hovertemplate: "%{y:.5~g}",
    };
  }

  function layout(figure) {
    const axis = { gridcolor: colour("line"), linecolor: colour("line"), zeroline: false, automargin: true };
    return {
      margin: { l: 8, r: 12, t: 8, b: 8 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: colour("soft"), family: "inherit", size: 12 }, hovermode: "x unified",
      hoverlabel: { bgcolor: colour("card"), bordercolor: colour("line"), font: { color: colour("ink") } },
      dragmode: touch ? false : "zoom", shapes: data.marks.map(shape),
      showlegend: figure.traces.length > 1,
      legend: { orientation: "h", x: 1, xanchor: "right", y: 1, yanchor: "bottom" },
      xaxis: { ...axis, title: { text: "step", standoff: 6 }, range: data.range, rangemode: "nonnegative" },
      yaxis: { ...axis, type: logs.has(figure.name) ? "log" : "linear", tickformat: figure.percent ? ".1%" : "" },
    };
  }

  function draw() {
    for (const figure of data.figures) {
      Plotly.react("plot-" + figure.name, figure.traces.map(trace), layout(figure), config);
    }
  }

  for (const button of document.querySelectorAll("button[data-log]")) {
    button.addEventListener("click", () => {
      const name = button.dataset.log;
      if (!logs.delete(name)) logs.add(name);
      button.setAttribute("aria-pressed", String(logs.has(name)));
      draw();
    });
  }
  dark.addEventListener("change", draw);
  draw();
})();
"""


def render_page(title: str, body: str, scripts: str) -> str:
    """A whole document; `body` and `scripts` are HTML already."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
        "script-src 'unsafe-inline'; img-src data: blob:\">\n"
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n{scripts}\n</body>\n</html>\n"
    )


def render_data(name: str, data: Any) -> str:
    """Data for the page's script, as JSON that cannot end the script element."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return f'<script type="application/json" id="{name}">{text}</script>'


def render_tile(label: str, value: str, note: str = "") -> str:
    """One fact in large type."""
    return f'<div class="card tile"><span>{escape(label)}</span><b>{escape(value)}</b><span>{escape(note)}</span></div>'


def render_pairs(title: str, pairs: Iterable[tuple[str, str]]) -> str:
    """A table of labels and values under a title."""
    rows = "".join(f"<tr><th>{escape(label)}</th><td>{escape(value)}</td></tr>" for label, value in pairs)
    return f'<div class="card pairs"><h3>{escape(title)}</h3><table>{rows}</table></div>'


def render_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table with a head, that scrolls sideways where it is too wide."""
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="card scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def render_figure(name: str, title: str, *, wide: bool, log: bool) -> str:
    """The frame that the script draws a picture into."""
    button = f'<button data-log="{escape(name)}" aria-pressed="false">log axis</button>' if log else ""
    kind = "card figure wide" if wide else "card figure"
    return (
        f'<div class="{kind}"><div class="bar"><h3>{escape(title)}</h3>{button}</div>'
        f'<div class="plot" id="plot-{escape(name)}"></div></div>'
    )
