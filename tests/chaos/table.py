"""The tables of what came of each fault, from the notes of cases (`notes`): a row a fault, or a row a kind of fault.

python tests/chaos/table.py NOTES.csv                         prints a row for each fault
python tests/chaos/table.py docs/faults.csv docs/faults.md    puts a row for each kind of fault into the page

Invariant: nothing is left out: a case that came out otherwise counts among those that were tried, and every fault is of
one kind.
"""

from __future__ import annotations

import re
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from notes import Note, read_notes

_COLUMNS = (
    *("came out as undisturbed", "goes on by itself", "noticed after s", "trains again after s", "steps done again"),
)
HEAD = ("fault", *_COLUMNS)
HEAD_OF_KINDS = ("kind of fault", "faults", *_COLUMNS)

KINDS = (
    (
        "SIGKILL of a rank, the agent or a loader worker",
        r"SIGKILL of (rank 0|a rank|the agent|a loader worker)(?! while).*",
    ),
    ("SIGKILL at a moment of a save", r"SIGKILL (while (the state|a shard)|before the rename|after the rename).*"),
    ("crash in native code, memory runs out", r"crash of .*|memory runs out .*"),
    ("hang of a rank", r"hang .*"),
    ("SIGSTOP of a rank or a loader worker", r"SIGSTOP .*"),
    ("stop signal, stop file, second Ctrl-C", r"SIGTERM .*|SIGUSR2 .*|stop (file|signal).*|second Ctrl-C .*"),
    ("second launch of the run", r"second launch .*"),
    ("disk full, inodes or quota used up", r"(disk full|inodes|quota) .*"),
    ("file system read-only, slow or hanging", r"(SIGKILL of (all|a rank) while the )?file system .*"),
    ("file server gone or hanging", r"(SIGKILL of a rank while the )?file server .*"),
    ("checkpoint damaged in the run directory", r"(newest checkpoint|every checkpoint) .*"),
    ("disk of a node lost, or a checkpoint on it damaged", r".*(disk of a node|disk of the node).*"),
    ("clock an hour off", r"clock .*"),
    ("loss not finite, a bit of the weights flips", r"loss(es)? not finite.*|a bit of one copy .*"),
    ("mistake in user code, data or run file, until mended", r"a user's code .*|data file .*|run file .*"),
    ("resume on other ranks or in another layout", r"goes on with .*"),
    ("network between two hosts slow or cut", r"network .*"),
)
"""Kinds of faults in the order of the page, and the pattern that the whole name of each of its faults matches."""

BEGIN, END = "<!-- table: tests/chaos/table.py -->\n", "<!-- end of the table -->\n"


def main() -> None:
    """Print the table, or put it into a page."""
    notes = read_notes(Path(sys.argv[1]))
    if len(sys.argv) < 3:
        print(render_table(notes), end="")
        return
    table, page = render_kinds(notes), Path(sys.argv[2])
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    page.write_text(f"{before}{BEGIN}{table}{END}{rest.partition(END)[2]}", encoding="utf-8")


def render_table(notes: Sequence[Note]) -> str:
    """A row for each fault, in the order of the notes."""
    names = dict.fromkeys(note.fault for note in notes)
    return _render(HEAD, [(name, *_cells([note for note in notes if note.fault == name])) for name in names])


def render_kinds(notes: Sequence[Note]) -> str:
    """A row for each kind of fault, with how many faults it has. Raises ValueError for a fault of no kind."""
    tried: dict[str, list[Note]] = {kind: [] for kind, _ in KINDS}
    for note in notes:
        tried[find_kind(note.fault)].append(note)
    rows = [(kind, str(len({note.fault for note in those})), *_cells(those)) for kind, those in tried.items() if those]
    return _render(HEAD_OF_KINDS, rows)


def find_kind(fault: str) -> str:
    """The kind that a fault is of. Raises ValueError where it is of none."""
    for kind, pattern in KINDS:
        if re.fullmatch(pattern, fault):
            return kind
    raise ValueError(f"{fault} is of no kind in {__file__}")


def _render(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (head, ("---",) * len(head), *rows))


def _cells(tried: Sequence[Note]) -> tuple[str, ...]:
    well = [note for note in tried if note.came_out]
    alone = sum(note.starts == 1 for note in well)
    return (
        f"{len(well)} of {len(tried)}",
        "-" if not well else "yes" if alone == len(well) else "no" if not alone else f"{alone} of {len(well)}",
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
