"""Prints the table of docs/faults.md from the notes that `make chaos` has taken.

python tests/chaos/table.py NOTES.jsonl
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

HEAD = ("fault", "times", "goes on by itself", "noticed after s", "trains again after s", "steps done again")


def main() -> None:
    """A row for each fault, in the order of the notes."""
    notes = [json.loads(line) for line in Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()]
    rows = [_row(name, [note for note in notes if note["fault"] == name]) for name in _names(notes)]
    for cells in (HEAD, ("---",) * len(HEAD), *rows):
        print(f"| {' | '.join(cells)} |")


def _names(notes: Iterable[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(note["fault"] for note in notes))


def _row(name: str, notes: list[dict[str, Any]]) -> tuple[str, ...]:
    alone = sum(note["starts"] == 1 for note in notes)
    return (
        name,
        str(len(notes)),
        "yes" if alone == len(notes) else "no" if not alone else f"{alone} times",
        _spread(notes, "noticed_s", ".1f"),
        _spread(notes, "trains_s", ".1f"),
        _spread(notes, "steps_lost", ".0f"),
    )


def _spread(notes: list[dict[str, Any]], column: str, form: str) -> str:
    """Median and most of a column."""
    values = [note[column] for note in notes if note[column] is not None]
    if not values:
        return "-"
    return f"{statistics.median(values):{form}} (most {max(values):{form}})"


if __name__ == "__main__":
    main()
