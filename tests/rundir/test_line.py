"""The line of descent: only what the run comes from is on it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardway.rundir.names import (
    LINE,
    LOCAL,
    MOST_BRANCHES,
    SHARED,
    Lineage,
    LineageBranch,
    has_line,
    read_line,
    write_line,
)

OLD, NEW = LineageBranch(1, 0, SHARED, "old"), LineageBranch(2, 20, LOCAL, "new")


def test_what_an_overtaken_writer_saved_later_is_off() -> None:
    line = Lineage((OLD, NEW))
    assert line.why_off("old", 20) == ""
    assert line.why_off("old", 21) == "the run went on from step 20 after it was saved"
    assert line.why_off("new", 90) == ""
    assert line.why_off("", 10) == line.why_off("other", 10) == "the run does not come from the start that saved it"


def test_what_was_saved_before_the_run_went_back_is_off() -> None:
    """Also in the same epoch: the process goes on under another name."""
    line = Lineage((OLD, LineageBranch(1, 10, SHARED, "back")))
    assert line.why_off("old", 15)
    assert line.why_off("back", 15) == ""


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ([], False),
        ([NEW], False),
        ([OLD, NEW], False),
        ([NEW, LineageBranch(3, 20, LOCAL)], True),
        ([NEW, LineageBranch(3, 20, SHARED)], False),
        ([NEW, LineageBranch(3, 20, LOCAL), LineageBranch(4, 0, SHARED)], False),
        ([NEW, LineageBranch(3, 30, LOCAL)], False),
    ],
)
def test_when_a_checkpoint_has_failed_twice(entries: list[LineageBranch], expected: bool) -> None:
    assert Lineage(tuple(entries)).failed_twice(20) is expected


def test_it_is_kept_and_kept_short(tmp_path: Path) -> None:
    assert not has_line(tmp_path)
    line = Lineage()
    for epoch in range(MOST_BRANCHES + 6):
        line = line.add(LineageBranch(epoch, epoch, SHARED))
    write_line(tmp_path, line)
    assert has_line(tmp_path)
    assert read_line(tmp_path) == line
    assert [entry.epoch for entry in line.entries] == list(range(6, MOST_BRANCHES + 6))
    assert len({entry.name for entry in line.entries}) == MOST_BRANCHES


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"format": 2, "entries": []}', '{"format": 1, "entries": [3]}', "\0"]
)
def test_a_file_that_cannot_be_read_is_a_line_without_entries(tmp_path: Path, text: str) -> None:
    (tmp_path / LINE).write_text(text)
    assert read_line(tmp_path) == Lineage()
    assert read_line(tmp_path).why_off("old", 1)


@given(st.data())
def test_what_is_on_the_line_is_what_the_run_comes_from(data: st.DataObject) -> None:
    """Starts and goings back happen while those before may still write: whatever was saved by anybody is on the line
    where the run came past it, and nowhere else."""
    line, reached, made = Lineage(), dict[str, int](), dict[int, str]()
    saved: set[tuple[str, int]] = set()
    for epoch in range(data.draw(st.integers(1, 6))):
        base = data.draw(st.sampled_from([0, *sorted(made)]))
        entry = LineageBranch(epoch, base, data.draw(st.sampled_from([LOCAL, SHARED])), f"start {epoch}")
        line, made = line.add(entry), {step: name for step, name in made.items() if step <= base}
        reached[entry.name] = base
        for _ in range(data.draw(st.integers(0, 6))):
            name = data.draw(st.sampled_from(sorted(reached)))  # the newest, or one that was overtaken
            reached[name] += 1
            if name == entry.name:
                made[reached[name]] = name
            saved.add((name, reached[name]))
    for name, step in saved:
        assert (line.why_off(name, step) == "") == (made.get(step) == name)
