"""Building blocks of a plan's page: style sheet, SVG drawings, facts, tables, keys of colours, rounding that adds up.

Invariants:
- A colour is named by the role of what it shows, so that an item has one colour everywhere; colours and strokes are
  classes of the style sheet.
- Every text passes `html.escape`, and every drawing has a label in words. Nothing is fetched and no script runs.
- Rounded parts sum to the rounded total, and each is off by less than one last digit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from types import MappingProxyType

# --- the style sheet: colours by role for light, dark and paper

MEMORY_ROLES: Mapping[str, str] = MappingProxyType(
    {
        "weights": "blue",
        "gradients": "sky",
        "optimizer": "navy",
        "activations": "orange",
        "working": "amber",
        "gathered": "teal",
        "messages": "rose",
        "fragmentation": "stone",
        "context": "slate",
    }
)
"""Colours of the items of device memory: states are blue, transient items are warm."""

TIME_ROLES: Mapping[str, str] = MappingProxyType(
    {
        "products": "blue",
        "attention": "navy",
        "other operators": "sky",
        "waiting for the host": "slate",
        "tensor messages": "orange",
        "context messages": "amber",
        "expert messages": "brown",
        "shard messages": "rose",
        "stage messages": "plum",
        "bubble": "stone",
        "gradient messages": "red",
        "weight messages": "pink",
        "optimizer": "teal",
        "rest of the step": "grey",
    }
)
"""Colours of the items of a step: computation is blue, messages are warm, waiting is grey."""

OTHER_ROLE = "green"
"""The colour of an item without one of its own."""

_LIGHT: Mapping[str, str] = MappingProxyType(
    {
        "page": "#f6f6f4",
        "card": "#ffffff",
        "ink": "#1d2329",
        "soft": "#5b656e",
        "line": "#dcdedb",
        "head": "#f1f1ee",
        "good": "#17763f",
        "bad": "#bb2d28",
        "warn": "#96600d",
        "blue": "#3b78d0",
        "sky": "#86b6ee",
        "navy": "#274b8f",
        "orange": "#e08325",
        "amber": "#efbf4d",
        "brown": "#9a6330",
        "teal": "#239a8b",
        "rose": "#d2587f",
        "plum": "#8d5bb0",
        "red": "#c4473f",
        "pink": "#e99ab2",
        "green": "#6f9a3b",
        "stone": "#c3c2ba",
        "slate": "#77818b",
        "grey": "#a5adb4",
    }
)
_DARK: Mapping[str, str] = MappingProxyType(
    {
        "page": "#14171a",
        "card": "#1c2024",
        "ink": "#e4e7ea",
        "soft": "#a3adb6",
        "line": "#343b41",
        "head": "#23282d",
        "good": "#4fca83",
        "bad": "#ff7b74",
        "warn": "#e7b45a",
        "blue": "#4f8ae0",
        "sky": "#8fbdf2",
        "navy": "#3a5fa8",
        "orange": "#e58f38",
        "amber": "#e6bd5a",
        "brown": "#a97446",
        "teal": "#33ab9b",
        "rose": "#d9688d",
        "plum": "#a175c4",
        "red": "#d0584f",
        "pink": "#d98fa7",
        "green": "#86b04f",
        "stone": "#5c625f",
        "slate": "#8a949e",
        "grey": "#727b83",
    }
)

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
    fills = "\n".join(f"svg .{role} {{ fill: var(--{role}); }}" for role in sorted({*_roles()}))
    dark = f"@media screen and (prefers-color-scheme: dark) {{ :root {{ {_variables(_DARK)} }} }}"
    return f":root {{ color-scheme: light dark; {_variables(_LIGHT)} }}\n{dark}\n{_RULES}{fills}\n"


def _roles() -> list[str]:
    return [*MEMORY_ROLES.values(), *TIME_ROLES.values(), OTHER_ROLE]


def _variables(colours: Mapping[str, str]) -> str:
    return " ".join(f"--{name}: {value};" for name, value in colours.items())


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


def rect(frame: Frame, kind: str, told: str = "") -> str:
    """A filled box; `told` is its tooltip."""
    title = f"<title>{escape(told)}</title>" if told else ""
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


def circle(at: tuple[float, float], radius: float, kind: str, told: str = "") -> str:
    """A dot."""
    title = f"<title>{escape(told)}</title>" if told else ""
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


def render_document(title: str, body: str) -> str:
    """A whole document; `body` is HTML."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        f"<title>{escape(title)}</title>\n<style>\n{render_style()}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


@dataclass(frozen=True)
class FactTile:
    """A fact in large type, with its label and a note."""

    label: str
    value: str
    notes: tuple[str, ...] = ()


def render_tiles(tiles: Iterable[FactTile]) -> str:
    """Facts side by side."""
    return f'<div class="tiles">{"".join(_render_tile(tile) for tile in tiles)}</div>'


def _render_tile(tile: FactTile) -> str:
    notes = "".join(f"<span>{escape(note)}</span>" for note in tile.notes)
    return f'<div class="card tile"><span>{escape(tile.label)}</span><b>{escape(tile.value)}</b>{notes}</div>'


@dataclass(frozen=True)
class TableBlock:
    """Rows under a head. The first cell of a row names it; columns listed in `words` hold text, others numbers.

    `sums` are rows, by their first cell, that add up those above; `chosen` are highlighted rows.
    """

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: frozenset[int] = frozenset()
    sums: frozenset[str] = frozenset()
    chosen: frozenset[str] = frozenset()


def render_table(table: TableBlock) -> str:
    """A table that scrolls sideways if it is too wide."""
    head = "".join(
        f'<th scope="col"{_kind(table, place)}>{escape(name)}</th>' for place, name in enumerate(table.columns)
    )
    body = "".join(_render_row(table, row) for row in table.rows)
    return (
        f'<div class="card table scroll"><table><caption>{escape(table.caption)}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _render_row(table: TableBlock, row: Sequence[str]) -> str:
    kinds = [name for name, marked in (("sum", table.sums), ("chosen", table.chosen)) if row[0] in marked]
    mark = f' class="{" ".join(kinds)}"' if kinds else ""
    cells = "".join(f"<td{_kind(table, place)}>{escape(cell)}</td>" for place, cell in enumerate(row[1:], 1))
    return f'<tr{mark}><th scope="row">{escape(row[0])}</th>{cells}</tr>'


def _kind(table: TableBlock, place: int) -> str:
    if place == 0:
        return ""
    return ' class="words"' if place in table.words else ' class="number"'


def render_figure(svg: str, key: Mapping[str, str], note: str = "") -> str:
    """A picture with its key of colours (label -> role) and a note below."""
    told = f'<figcaption class="soft">{escape(note)}</figcaption>' if note else ""
    return f'<figure class="card"><div class="scroll">{svg}</div>{_render_key(key)}{told}</figure>'


def _render_key(key: Mapping[str, str]) -> str:
    if not key:
        return ""
    swatch = '<span class="swatch"><svg viewBox="0 0 11 11" aria-hidden="true"><rect width="11" height="11" rx="2"'
    items = "".join(
        f'<li>{swatch} class="{escape(role)}"/></svg></span>{escape(name)}</li>' for name, role in key.items()
    )
    return f'<ul class="key">{items}</ul>'


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
