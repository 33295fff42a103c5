"""The table of docs/faults.md, from the notes of cases (`notes`).

python tests/chaos/table.py NOTES.csv                         prints it
python tests/chaos/table.py docs/faults.csv docs/faults.md    puts it into the page

Invariant: nothing is left out: a case that came out otherwise counts among those that were tried.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from notes import Note, read_notes

HEAD = (
    *("fault", "came out as undisturbed", "goes on by itself", "noticed after s", "trains again after s"),
    "steps done again",
)
BEGIN, END = "<!-- table: tests/chaos/table.py -->\n", "<!-- end of the table -->\n"


def main() -> None:
    """Print the table, or put it into a page."""
    table = render_table(read_notes(Path(sys.argv[1])))
    if len(sys.argv) < 3:
        print(table, end="")
        return
    page = Path(sys.argv[2])
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    page.write_text(f"{before}{BEGIN}{table}{END}{rest.partition(END)[2]}", encoding="utf-8")


def render_table(notes: Sequence[Note]) -> str:
    """A row for each fault, in the order of the notes."""
    names = dict.fromkeys(note.fault for note in notes)
    rows = [_row(name, [note for note in notes if note.fault == name]) for name in names]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (HEAD, ("---",) * len(HEAD), *rows))


def _row(name: str, tried: Sequence[Note]) -> tuple[str, ...]:
    well = [note for note in tried if note.came_out]
    alone = sum(note.starts == 1 for note in well)
    return (
        name,
        f"{len(well)} of {len(tried)}",
        "-" if not well else "yes" if alone == len(well) else "no" if not alone else f"{alone} times",
        _spread([note.noticed_s for note in well], ".1f"),
        _spread([note.trains_s for note in well], ".1f"),
        _spread([note.steps_again for note in well], ".0f"),
    )


def _spread(column: Sequence[float | None], form: str) -> str:
    """Median and most of a column."""
    values = [value for value in column if value is not None]
    if not values:
        return "-"
    return f"{statistics.median(values):{form}} (most {max(values):{form}})"


if __name__ == "__main__":
    main()
