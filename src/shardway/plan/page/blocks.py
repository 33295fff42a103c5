"""The HTML of a plan's page: its frame, facts in large type, tables, keys of colours.

Invariant: every text passes `html.escape`; nothing is fetched from anywhere and no script runs. This module must not
know what a plan is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from shardway.plan.page.style import render_style


def render_document(title: str, body: str) -> str:
    """A whole document; `body` is HTML already."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        f"<title>{escape(title)}</title>\n<style>\n{render_style()}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


@dataclass(frozen=True)
class FactTile:
    """A fact in large type, with what it is and what belongs to it."""

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

    `sums` are rows that add up what is above them, by their first cell; `chosen` those that stand out.
    """

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: frozenset[int] = frozenset()
    sums: frozenset[str] = frozenset()
    chosen: frozenset[str] = frozenset()


def render_table(table: TableBlock) -> str:
    """A table that scrolls sideways where it is too wide."""
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
    """A picture with its key of colours (what is shown -> its role) and a line below."""
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
    """Sentences below each other."""
    return f"<ul>{''.join(f'<li>{escape(text)}</li>' for text in texts)}</ul>"


def render_section(title: str, *parts: str) -> str:
    """A heading with what belongs to it."""
    inside = "\n".join(part for part in parts if part)
    return f"<section>\n<h2>{escape(title)}</h2>\n{inside}\n</section>"


def render_text(text: str, kind: str = "") -> str:
    """A paragraph; "" for no text."""
    mark = f' class="{escape(kind)}"' if kind else ""
    return f"<p{mark}>{escape(text)}</p>" if text else ""
