"""Pictures and pages that plan and report share: palette, style sheet, SVG, tables, tiles, rounding that adds up.

Invariants:
- A colour is named by the concept that it stands for, and a concept has one colour in every picture; colours and
  strokes are classes (and variables) of the style sheet.
- Every text passes `html.escape`, and every drawing has a label in words. Nothing is fetched.
- Rounded parts sum to the rounded total, and each is off by less than one last digit.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any

# --- the palette


@cache
def _read_colours() -> Mapping[str, Mapping[str, Any]]:
    """The concepts with their colours, and the palette: values of a colour on a light and on a dark page."""
    colours: Mapping[str, Mapping[str, Any]] = tomllib.loads(read_beside(__package__, "drawing.toml"))
    return colours


def read_beside(package: str | None, name: str) -> str:
    """The text of a file of a package."""
    return files(package or "").joinpath(name).read_text(encoding="utf-8")


def colour_of(concept: str) -> str:
    """The colour of a concept; that of everything else for one without its own."""
    return str(_read_colours()["concepts"].get(concept, "teal"))


def render_style() -> str:
    """The whole sheet: light, dark (on a screen, if the reader's system is dark), and paper."""
    fills = "\n".join(
        f"svg .{colour} {{ fill: var(--{colour}); }}" for colour in sorted({*_read_colours()["concepts"].values()})
    )
    light, dark = (
        " ".join(f"--{name}: {pair[side]};" for name, pair in _read_colours()["palette"].items()) for side in (0, 1)
    )
    on_dark = f"@media screen and (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}"
    rules = read_beside(__package__, "drawing.css")
    return f":root {{ color-scheme: light dark; {light} }}\n{on_dark}\n\n{rules}{fills}\n"


# --- SVG: drawings, boxes, lines, text, axes


@dataclass(frozen=True)
class Frame:
    """A rectangle of a drawing, in its units."""

    x: float
    y: float
    width: float
    height: float

    @property
    def right(self) -> float:  # its right edge
        return self.x + self.width

    @property
    def bottom(self) -> float:  # its lower edge
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
    cards = []
    for label, value, *notes in tiles:
        below = "".join(f"<span>{escape(note)}</span>" for note in notes)
        cards.append(f'<div class="card tile"><span>{escape(label)}</span><b>{escape(value)}</b>{below}</div>')
    return f'<div class="tiles">{"".join(cards)}</div>'


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
