"""The table of docs/faults.md is that of the notes beside it, and nothing that was tried is left out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import table
from faults.strike import Struck
from notes import FILE, Note, noted, read_notes

from shardway.rundir.directory import RunDir

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_has_the_table_of_the_notes() -> None:
    page = (DOCS / "faults.md").read_text(encoding="utf-8")
    notes = read_notes(DOCS / "faults.csv")
    assert len({(note.fault, note.seed) for note in notes}) == len(notes) > 0
    assert f"{table.BEGIN}{table.render_kinds(notes)}{table.END}" in page


def test_every_fault_is_of_one_kind_and_every_case_counts() -> None:
    notes = read_notes(DOCS / "faults.csv")
    faults = dict.fromkeys(note.fault for note in notes)
    found = {fault: [kind for kind, pattern in table.KINDS if re.fullmatch(pattern, fault)] for fault in faults}
    assert {fault: kinds for fault, kinds in found.items() if len(kinds) != 1} == {}
    rows = [[cell.strip() for cell in line.split("|")] for line in table.render_kinds(notes).splitlines()[2:]]
    assert [row[1] for row in rows] == [kind for kind, _ in table.KINDS]
    assert sum(int(row[2]) for row in rows) == len(faults)
    well, tried = zip(*(row[3].split(" of ") for row in rows), strict=True)
    assert sum(map(int, tried)) == len(notes)
    assert sum(map(int, well)) == sum(note.came_out for note in notes)
    with pytest.raises(ValueError, match="of no kind"):
        table.find_kind("a meteorite")


def test_a_case_that_fails_is_noted_and_one_that_is_skipped_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "notes.csv"
    monkeypatch.setenv(FILE, str(path))
    run = RunDir(tmp_path / "run")
    run.create()
    with run.event_writer(0) as events:
        events.write("started", step=0)
    with noted("one, with a comma", 3) as note:
        note.tell(Struck(0.0, "rank 1"), 2, run)
    with pytest.raises(AssertionError), noted("another", 3):
        raise AssertionError("otherwise")
    with pytest.raises(pytest.skip.Exception), noted("no root", 3):
        pytest.skip("here it cannot be done")
    well, badly = read_notes(path)
    assert (well.fault, well.seed, well.came_out, well.whom, well.starts) == ("one, with a comma", 3, True, "rank 1", 2)
    assert (badly.fault, badly.came_out, badly.starts) == ("another", False, None)


def test_a_row_counts_what_came_out_otherwise_and_tells_the_times_of_the_others() -> None:
    notes = [
        Note("kill", 0, "2026-11-23", True, "rank 0", 1, 0.12, 5.0, 18),
        Note("kill", 1, "2026-11-23", True, "rank 1", 1, 0.08, 7.04, 3),
        Note("kill", 2, "2026-11-23"),
        Note("clock", 0, "2026-11-23", True, "time", 2),
    ]
    assert table.render_table(notes).splitlines()[2:] == [
        "| kill | 2 of 3 | yes | 0.1 (most 0.1) | 6.0 (most 7.0) | 10 (most 18) |",
        "| clock | 1 of 1 | no | - | - | - |",
    ]
