"""Tables for notebooks: rows of plain values as a data frame of the library that is installed.

Invariants:
- The columns, their order and their values are the same in every form; what a row does not have is None (NaN where a
  library makes numbers of it).
- No library is imported before a table is made.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from shardway.errors import UserError
from shardway.hfconfig import import_extra

FORMS = ("pandas", "polars", "columns")
"""The forms of a table, the first that is installed by default; "columns" needs nothing."""

_SHOWN = 20


class Columns(dict[str, list[Any]]):
    """A table as a dictionary: the name of each column -> its values. `rows`: how many there are."""

    @property
    def rows(self) -> int:
        """The number of rows."""
        return len(next(iter(self.values()), []))

    def row(self, place: int) -> dict[str, Any]:
        """One row by its place; negative places count from the end."""
        return {name: values[place] for name, values in self.items()}

    def to_pandas(self) -> Any:
        """As a `pandas.DataFrame`. Raises UserError where pandas is not installed."""
        return _make_frame(self, "pandas")

    def _repr_html_(self) -> str:
        return render_table(list(self), list(zip(*self.values(), strict=True)))


def choose_form(wanted: str = "") -> str:
    """The form that is wanted, or the first that is installed. Raises UserError for an unknown one."""
    if wanted and wanted not in FORMS:
        raise UserError(f'frames="{wanted}": no form of a table.\n      allowed: {", ".join(FORMS)}')
    return wanted or next(form for form in FORMS if form == "columns" or find_spec(form) is not None)


def make_table(rows: Iterable[Mapping[str, Any]], form: str, first: Sequence[str] = ()) -> Any:
    """Rows as a table, with the columns `first` before all others, in the order in which they come."""
    rows = list(rows)
    names = dict.fromkeys([*first, *(name for row in rows for name in row)])
    return make_frame(Columns({name: [row.get(name) for row in rows] for name in names}), form)


def make_frame(columns: Columns, form: str) -> Any:
    """Columns in the form that is wanted. Raises UserError where its library is not installed."""
    return columns if form == "columns" else _make_frame(columns, form)


def _make_frame(columns: Mapping[str, Sequence[Any]], library: str) -> Any:
    package = import_extra(library, "frames")
    if library == "polars":
        return package.DataFrame(dict(columns), strict=False)
    return package.DataFrame(dict(columns))


def render_table(names: Sequence[str], rows: Sequence[Sequence[Any]], most: int = _SHOWN) -> str:
    """As HTML; of a long table the first and the last rows."""
    head = "".join(f"<th>{html.escape(str(name))}</th>" for name in names)
    half = most // 2
    shown: list[Sequence[Any]] = (
        list(rows) if len(rows) <= most else [*rows[:half], ["..."] * len(names), *rows[-half:]]
    )
    body = "".join(f"<tr>{''.join(f'<td>{html.escape(_shorten(cell))}</td>' for cell in row)}</tr>" for row in shown)
    count = f"<p>{len(rows)} rows</p>" if len(rows) > most else ""
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{count}"


def _shorten(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
