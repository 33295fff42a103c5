"""Small pieces of SVG: a drawing with its label, boxes, lines, texts, axes.

Invariant: every text passes `html.escape`, and every drawing says in words what it shows. Colours and strokes are
classes of the style sheet. This module must not know what is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape


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
    """A drawing of (width, height); on narrow screens it is never shown narrower than `least` pixels."""
    width, height = size
    wide = f' style="min-width:{least}px"' if least else ""
    return (
        f'<svg viewBox="0 0 {_short(width)} {_short(height)}" role="img" aria-label="{escape(label)}"{wide}>'
        f"{''.join(parts)}</svg>"
    )


def rect(frame: Frame, kind: str, told: str = "") -> str:
    """A filled box; `told` appears where the pointer rests on it."""
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
    """Words that begin, end or are centred at a point of their base line."""
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
