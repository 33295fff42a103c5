"""Pictures and pages that plan and report share: palette, style sheet, SVG, tables, tiles, rounding that adds up.

Invariants:
- A colour is named by the concept that it stands for, and a concept has one colour in every picture; colours and
  strokes are classes (and variables) of the style sheet.
- Every text passes `html.escape`, and every drawing has a label in words. Nothing is fetched.
- Rounded parts sum to the rounded total, and each is off by less than one last digit.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from types import MappingProxyType

# --- the palette

COLOURS: Mapping[str, str] = MappingProxyType(
    {
        # computation is blue
        "products": "blue",
        "forward": "blue",
        "train": "blue",
        "attention": "navy",
        "other operators": "sky",
        "backward": "teal",
        # what states hold, and messages that carry it
        "weights": "plum",
        "backward, for weights": "plum",
        "weight messages": "plum",
        "gradients": "rose",
        "gradient messages": "rose",
        "optimizer": "green",
        "activations": "orange",
        "working": "amber",
        "gathered": "pink",
        "shard messages": "pink",
        "messages": "brown",
        "stage messages": "brown",
        "tensor messages": "red",
        "context messages": "amber",
        "expert messages": "orange",
        # waiting and overheads are grey
        "waiting for the host": "slate",
        "context": "slate",
        "bubble": "stone",
        "fragmentation": "stone",
        "rest of the step": "grey",
        # the life of a run
        "validation": "orange",
        "save": "green",
        "resume": "plum",
        "fault": "red",
        "start": "amber",
        "end": "brown",
        "script": "sky",
        "speed": "teal",
        "learning rate": "brown",
        "data": "slate",
        "idle": "stone",
        "unaccounted": "grey",
    }
)
"""Concept -> its colour in every picture of a plan and of a report."""


def colour_of(concept: str) -> str:
    """The colour of a concept; that of everything else for one without its own."""
    return COLOURS.get(concept, "teal")


_PALETTE: Mapping[str, tuple[str, str]] = {
    "page": ("#f6f6f4", "#14171a"),
    "card": ("#ffffff", "#1c2024"),
    "ink": ("#1d2329", "#e4e7ea"),
    "soft": ("#5b656e", "#a3adb6"),
    "line": ("#dcdedb", "#343b41"),
    "head": ("#f1f1ee", "#23282d"),
    "good": ("#17763f", "#4fca83"),
    "bad": ("#bb2d28", "#ff7b74"),
    "warn": ("#96600d", "#e7b45a"),
    "blue": ("#3b78d0", "#4f8ae0"),
    "sky": ("#86b6ee", "#8fbdf2"),
    "navy": ("#274b8f", "#3a5fa8"),
    "orange": ("#e08325", "#e58f38"),
    "amber": ("#efbf4d", "#e6bd5a"),
    "brown": ("#9a6330", "#a97446"),
    "teal": ("#239a8b", "#33ab9b"),
    "rose": ("#d2587f", "#d9688d"),
    "plum": ("#8d5bb0", "#a175c4"),
    "red": ("#c4473f", "#d0584f"),
    "pink": ("#e99ab2", "#d98fa7"),
    "green": ("#6f9a3b", "#86b04f"),
    "stone": ("#c3c2ba", "#5c625f"),
    "slate": ("#77818b", "#8a949e"),
    "grey": ("#a5adb4", "#727b83"),
}
"""Colour -> its value on a light and on a dark page."""

_RULES = """
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif;
}
main { max-width: 1120px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 26px; line-height: 1.25; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 36px 0 8px; }
h3 { font-size: 14px; margin: 18px 0 6px; }
p { margin: 4px 0 10px; max-width: 84ch; overflow-wrap: anywhere; }
ul { margin: 4px 0; padding-left: 20px; max-width: 84ch; }
li { margin: 3px 0; overflow-wrap: anywhere; }
.soft { color: var(--soft); }
.verdict { font-weight: 600; } .verdict.good { color: var(--good); } .verdict.bad { color: var(--bad); }
.verdict.unsure { color: var(--warn); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(210px, 1fr)); gap: 10px; margin-top: 16px; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 8px; }
.tile { padding: 10px 14px; min-width: 0; }
.tile b { display: block; font-size: 21px; line-height: 1.3; font-weight: 600; font-variant-numeric: tabular-nums; }
.tile span { display: block; color: var(--soft); font-size: 13px; line-height: 1.4; overflow-wrap: anywhere; }
figure { margin: 10px 0; padding: 12px 14px; } figcaption { font-size: 13px; margin-top: 8px; }
.scroll { overflow-x: auto; }
svg { display: block; width: 100%; height: auto; }
svg text { fill: var(--ink); font: 12px system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif; }
svg .soft { fill: var(--soft); } svg .small { font-size: 10px; } svg .bold { font-weight: 600; }
svg .grid { stroke: var(--line); stroke-width: 1; fill: none; }
svg .axis { stroke: var(--soft); stroke-width: 1; fill: none; }
svg .usable { stroke: var(--good); stroke-width: 2; stroke-dasharray: 5 3; }
svg .physical { stroke: var(--bad); stroke-width: 2; }
svg .curve { stroke: var(--blue); stroke-width: 2.2; fill: none; }
svg .ideal { stroke: var(--soft); stroke-width: 1.4; stroke-dasharray: 4 4; fill: none; }
svg .dot { fill: var(--blue); } svg .asked { fill: var(--card); stroke: var(--blue); stroke-width: 2.5; }
svg .cross { stroke: var(--bad); stroke-width: 2; fill: none; }
svg .whisker { stroke: var(--ink); stroke-width: 1.5; fill: none; }
svg .lane { fill: var(--head); stroke: var(--line); stroke-width: 0.6; }
svg .box { stroke: var(--card); stroke-width: 0.6; }
svg text.on { fill: #ffffff; font-size: 10px; }
.key { display: flex; flex-wrap: wrap; gap: 4px 16px; font-size: 13px; color: var(--soft); margin: 8px 0 0; padding: 0;
  list-style: none; max-width: none; }
.key li { margin: 0; white-space: nowrap; }
.swatch { display: inline-block; width: 11px; height: 11px; margin-right: 6px; vertical-align: -1px; }
.swatch svg { width: 11px; height: 11px; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
caption { text-align: left; padding: 9px 12px; font-weight: 600; }
th, td { text-align: left; padding: 5px 12px; border-top: 1px solid var(--line); vertical-align: top; }
thead th { color: var(--soft); font-weight: 500; background: var(--head); white-space: nowrap; }
tbody th { font-weight: 400; white-space: nowrap; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
td.words { min-width: 190px; }
tr.sum td, tr.sum th { font-weight: 600; border-top: 2px solid var(--soft); }
tr.chosen, tr.chosen th { font-weight: 600; }
.table { margin: 10px 0; }
.two { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 12px; }
footer { margin-top: 40px; font-size: 13px; color: var(--soft); }
@media (max-width: 760px) {
  main { padding: 18px 12px 40px; }
  .two { grid-template-columns: minmax(0, 1fr); }
  .tiles { grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); }
  h1 { font-size: 22px; } .tile b { font-size: 18px; }
}
@media print {
  main { max-width: none; padding: 0; } body { font-size: 11pt; background: none; } p { break-after: avoid; }
  .card { break-inside: avoid; } h2, h3, caption { break-after: avoid; }
  .scroll { overflow: visible; } .scroll svg { min-width: 0 !important; }
  table { font-size: 9pt; } th, td { padding: 3px 6px; } td.words { min-width: 0; }
  svg *, .swatch, .swatch * { -webkit-print-color-adjust: exact; print-color-adjust: exact; }
}
"""


def render_style() -> str:
    """The whole sheet: light, dark (on a screen, if the reader's system is dark), and paper."""
    fills = "\n".join(f"svg .{colour} {{ fill: var(--{colour}); }}" for colour in sorted({*COLOURS.values()}))
    light, dark = (" ".join(f"--{name}: {pair[side]};" for name, pair in _PALETTE.items()) for side in (0, 1))
    on_dark = f"@media screen and (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}"
    return f":root {{ color-scheme: light dark; {light} }}\n{on_dark}\n{_RULES}{fills}\n"


# --- SVG: drawings, boxes, lines, text, axes


@dataclass(frozen=True)
class Frame:
    """A rectangle of a drawing, in its units."""

    x: float
    y: float
    width: float
    height: float

    @property
    def right(self) -> float:
        """Its right edge."""
        return self.x + self.width

    @property
    def bottom(self) -> float:
        """Its lower edge."""
        return self.y + self.height


def render_drawing(size: tuple[float, float], label: str, parts: Iterable[str], least: int = 0) -> str:
    """A drawing of (width, height), shown at least `least` pixels wide also on narrow screens."""
    width, height = size
    wide = f' style="min-width:{least}px"' if least else ""
    return (
        f'<svg viewBox="0 0 {_short(width)} {_short(height)}" role="img" aria-label="{escape(label)}"{wide}>'
        f"{''.join(parts)}</svg>"
    )


def rect(frame: Frame, kind: str, tip: str = "") -> str:
    """A filled box; `tip` is its tooltip."""
    title = f"<title>{escape(tip)}</title>" if tip else ""
    place = f'x="{_short(frame.x)}" y="{_short(frame.y)}"'
    size = f'width="{_short(frame.width)}" height="{_short(frame.height)}"'
    return f'<rect {place} {size} class="{kind}">{title}</rect>'


def line(start: tuple[float, float], end: tuple[float, float], kind: str) -> str:
    """A straight line."""
    (x1, y1), (x2, y2) = start, end
    return f'<line x1="{_short(x1)}" y1="{_short(y1)}" x2="{_short(x2)}" y2="{_short(y2)}" class="{kind}"/>'


def polyline(points: Sequence[tuple[float, float]], kind: str) -> str:
    """A line through points."""
    return f'<polyline points="{" ".join(f"{_short(x)},{_short(y)}" for x, y in points)}" class="{kind}"/>'


def circle(at: tuple[float, float], radius: float, kind: str, tip: str = "") -> str:
    """A dot."""
    title = f"<title>{escape(tip)}</title>" if tip else ""
    return f'<circle cx="{_short(at[0])}" cy="{_short(at[1])}" r="{_short(radius)}" class="{kind}">{title}</circle>'


def text(at: tuple[float, float], words: str, kind: str = "", anchor: str = "start") -> str:
    """Words that begin, end or are centred (`anchor`) at a point of their base line."""
    mark = f' class="{kind}"' if kind else ""
    side = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text x="{_short(at[0])}" y="{_short(at[1])}"{mark}{side}>{escape(words)}</text>'


def nice_ticks(top: float, count: int = 5) -> list[float]:
    """Round numbers from 0 to at most `top`, about `count` of them."""
    if top <= 0:
        return [0.0]
    power = 10.0 ** math.floor(math.log10(top / count))
    step = next(power * each for each in (1, 2, 2.5, 5, 10) if top / (power * each) <= count)
    return [step * number for number in range(int(top / step + 1e-9) + 1)]


def _short(value: float) -> str:
    """A coordinate with two decimals at most."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


# --- rounding that adds up


def round_parts(parts: Sequence[float], decimals: int) -> list[float]:
    """Non-negative parts, rounded so that they add up to their rounded sum; the largest remainders are rounded up."""
    scale = 10**decimals
    scaled = [part * scale for part in parts]
    floors = [math.floor(each) for each in scaled]
    missing = round(sum(scaled)) - sum(floors)
    order = sorted(range(len(parts)), key=lambda place: floors[place] - scaled[place])
    raised = set(order[:missing])
    return [(floor + (place in raised)) / scale for place, floor in enumerate(floors)]


# --- HTML: frame, facts, tables, keys of colours


def render_document(title: str, body: str, *, style: str = "", scripts: str = "") -> str:
    """A whole document; `body` and `scripts` are HTML, `style` is added to the sheet."""
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    policy += "; script-src 'unsafe-inline'; img-src data: blob:" if scripts else ""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f"<title>{escape(title)}</title>\n<style>\n{render_style()}{style}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n{scripts}</body>\n</html>\n"
    )


def render_tiles(tiles: Iterable[Sequence[str]]) -> str:
    """Facts side by side in large type, each a label, a value and notes."""
    return f'<div class="tiles">{"".join(_render_tile(*tile) for tile in tiles)}</div>'


def _render_tile(label: str, value: str, *notes: str) -> str:
    below = "".join(f"<span>{escape(note)}</span>" for note in notes)
    return f'<div class="card tile"><span>{escape(label)}</span><b>{escape(value)}</b>{below}</div>'


def render_table(
    caption: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    words: Collection[int] = (),
    sums: Collection[str] = (),
    chosen: Collection[str] = (),
    plain: bool = False,
) -> str:
    """A table that scrolls sideways if it is too wide. The first cell of a row names it; columns listed in `words` hold
    text, others numbers; in a `plain` table all cells are alike. `sums` are rows, by their first cell, that add up
    those above; `chosen` are highlighted rows."""

    def kind(place: int) -> str:
        return "" if plain or not place else ' class="words"' if place in words else ' class="number"'

    def render(row: Sequence[str]) -> str:
        first, *others = row
        marks = " ".join(name for name, marked in (("sum", sums), ("chosen", chosen)) if first in marked)
        cells = "".join(f"<td{kind(place)}>{escape(cell)}</td>" for place, cell in enumerate(others, 1))
        name = f"<td>{escape(first)}</td>" if plain else f'<th scope="row">{escape(first)}</th>'
        return f'<tr class="{marks}">{name}{cells}</tr>' if marks else f"<tr>{name}{cells}</tr>"

    head = "".join(f'<th scope="col"{kind(place)}>{escape(name)}</th>' for place, name in enumerate(columns))
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    body = "".join(map(render, rows))
    inside = f"{title}<thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
    return f'<div class="card table scroll"><table>{inside}</table></div>'


def render_figure(svg: str, key: Mapping[str, str], note: str = "") -> str:
    """A picture with its key of colours (label -> colour) and a note below."""
    swatch = '<span class="swatch"><svg viewBox="0 0 11 11" aria-hidden="true"><rect width="11" height="11" rx="2"'
    items = "".join(f'<li>{swatch} class="{kind}"/></svg></span>{escape(name)}</li>' for name, kind in key.items())
    colours = f'<ul class="key">{items}</ul>' if key else ""
    below = f'<figcaption class="soft">{escape(note)}</figcaption>' if note else ""
    return f'<figure class="card"><div class="scroll">{svg}</div>{colours}{below}</figure>'


def render_list(texts: Iterable[str]) -> str:
    """A list of sentences."""
    return f"<ul>{''.join(f'<li>{escape(text)}</li>' for text in texts)}</ul>"


def render_section(title: str, *parts: str) -> str:
    """A heading with its parts."""
    inside = "\n".join(part for part in parts if part)
    return f"<section>\n<h2>{escape(title)}</h2>\n{inside}\n</section>"


def render_text(text: str, kind: str = "") -> str:
    """A paragraph; "" for no text."""
    mark = f' class="{escape(kind)}"' if kind else ""
    return f"<p{mark}>{escape(text)}</p>" if text else ""
