"""Rows as a Markdown table, a line for each fault and tool."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

HEAD = (
    "fault",
    "tool",
    "times",
    "noticed after s",
    "trains again after s",
    "steps done again",
    "losses and samples as undisturbed",
    "starts of a rank",
    "by hand",
)


@dataclass(frozen=True)
class Row:
    """One fault that one tool had once; seconds count from the fault (see `judge.Verdict`).

    `starts`: how often a rank was started in all; `seen` and `sign`: what was seen besides, and the line that told it.
    """

    tool: str
    fault: str
    seed: int
    whom: str
    noticed_s: float | None
    trains_s: float | None
    whole_s: float | None
    again: int
    differ: int
    lost: int
    twice: int
    starts: int
    by_hand: list[str]
    is_done: bool
    seen: str
    sign: str


def render(rows: Sequence[Row]) -> str:
    """The table; faults and tools in the order of the rows."""
    cells = [HEAD, ("---",) * len(HEAD)]
    for fault, tool in dict.fromkeys((row.fault, row.tool) for row in sorted(rows, key=_order(rows))):
        cells.append(render_cells([row for row in rows if (row.fault, row.tool) == (fault, tool)]))
    return "\n".join(f"| {' | '.join(each)} |" for each in cells)


def _order(rows: Sequence[Row]) -> Callable[[Row], int]:
    faults = list(dict.fromkeys(row.fault for row in rows))
    return lambda row: faults.index(row.fault)


def render_cells(rows: Sequence[Row]) -> tuple[str, ...]:
    """The cells of a fault and a tool."""
    first = rows[0]
    return (
        first.fault,
        first.tool,
        str(len(rows)),
        _spread([row.noticed_s for row in rows], ".1f"),
        _trains(rows),
        _spread([row.again for row in rows], ".0f"),
        _told([_sameness(row) for row in rows]),
        _spread([row.starts for row in rows], ".0f"),
        _told(["; ".join([*row.by_hand, *filter(None, [row.seen])]) or "-" for row in rows]),
    )


def _trains(rows: Sequence[Row]) -> str:
    """One rank, and where all came much later, those."""
    some, every = [row.trains_s for row in rows], [row.whole_s for row in rows]
    late = [b for a, b in zip(some, every, strict=True) if a is not None and b is not None and b - a > 1.0]
    never = any(a is not None and b is None for a, b in zip(some, every, strict=True))
    more = f", both ranks {_spread(list(late), '.1f')}" if late else ", both ranks never" if never else ""
    return _spread(some, ".1f") + more


def _sameness(row: Row) -> str:
    if not row.is_done:
        return "did not come to its end"
    if not (row.differ or row.lost or row.twice):
        return "yes"
    lost = f", {row.lost} samples lost" if row.lost else ""
    twice = f", {row.twice} too often" if row.twice else ""
    return f"no{lost}{twice}"


def _told(words: Sequence[str]) -> str:
    """What was so each time, else how often each."""
    counts = Counter(words)
    if len(counts) == 1:
        return words[0]
    return "; ".join(f"{count} x: {word}" for word, count in counts.most_common())


def _spread(values: Sequence[float | None], form: str) -> str:
    """Median (and the most, where it is another); a dash where there is none."""
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    median, most = f"{statistics.median(known):{form}}", f"{max(known):{form}}"
    missing = f", {len(values) - len(known)} x not" if len(known) < len(values) else ""
    return (median if median == most else f"{median} (most {most})") + missing
