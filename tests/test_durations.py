"""The table of durations, and the parts that it gives."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import durations
from durations import (
    FAST,
    LONG_S,
    SLOW,
    SLOW_S,
    WHY,
    Row,
    SharedRun,
    choose_files,
    has_slow,
    kinds_of,
    read_rows,
    render_rows,
    starts_ranks,
)

TESTS = Path(__file__).parent
FILES = sorted(path.relative_to(TESTS.parent).as_posix() for path in TESTS.rglob("test_*.py"))


def test_rows_are_of_files_that_are_there() -> None:
    rows = read_rows()
    assert {row.file for row in rows} <= set(FILES)
    assert {row.kind for row in rows} <= {"slow", "exhaustive", "fast"}
    assert [row.what for row in rows if row.kind != "fast" and row.seconds < SLOW_S] == []


def test_a_long_test_says_why() -> None:
    long = [row.what for row in read_rows() if row.kind == "slow" and row.seconds >= LONG_S]
    assert [name for name in long if not any(name.startswith(each) for each in WHY)] == []


@pytest.mark.parametrize("marks", ["not slow and not exhaustive", "slow and not exhaustive", "exhaustive", ""])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_parts_are_all_files_once(marks: str, count: int) -> None:
    parts = [choose_files(f"{number}/{count}", kinds_of(marks), FILES) for number in range(1, count + 1)]
    assert sorted(file for part in parts for file in part) == FILES


def test_the_parts_take_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = tuple(
        Row("slow", float(seconds), f"{name}::test") for name, seconds in zip("abcde", (9, 5, 4, 1, 1), strict=True)
    )
    monkeypatch.setattr(durations, "read_rows", lambda: (*rows, Row("fast", 50.0, "b")))
    assert choose_files("1/2", frozenset({"slow"}), "abcde") == {"a", "d"}
    assert choose_files("2/2", frozenset({"slow"}), "abcde") == {"b", "c", "e"}


def test_files_that_start_ranks_stay_together(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = tuple(Row("fast", float(seconds), name) for name, seconds in zip("abcd", (9, 5, 4, 1), strict=True))
    monkeypatch.setattr(durations, "read_rows", lambda: rows)
    assert choose_files("1/2", FAST, "abcd", together={"b", "c", "d"}) == {"b", "c", "d"}
    assert choose_files("2/2", FAST, "abcd", together={"b", "c", "d"}) == {"a"}
    assert [text for text in ("@ranks(2)\n", "warm_starts", "rank_pool", "ranks = 2") if not starts_ranks(text)] == [
        "ranks = 2"
    ]


def test_a_file_is_looked_into_for_slow_tests_where_it_may_have_some(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = (Row("slow", 1.0, "a::one"), Row("fast", 1.0, "b"), Row("exhaustive", 1.0, "c::one"))
    monkeypatch.setattr(durations, "read_rows", lambda: rows)
    assert [file for file in "abc" if has_slow(file, "")] == ["a"]
    assert has_slow("b", "pytestmark = pytest.mark.slow\n")


@pytest.mark.parametrize("part", ["0/2", "3/2", "2", "a/b", "-1/2"])
def test_a_part_that_there_is_not_is_refused(part: str) -> None:
    with pytest.raises(pytest.UsageError, match="K/N"):
        choose_files(part, frozenset({"slow"}), FILES)


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Four tests in three files, of which the second takes longest."""
    rows = [Row("slow", seconds, f"{name}::one") for name, seconds in (("a", 2.0), ("t/b", 3.0), ("c", 1.0))]
    monkeypatch.setattr(durations, "read_rows", lambda: rows)
    return [SimpleNamespace(nodeid=name) for name in ("a::one", "a::two", "t/b::one", "c::one")]


def test_processes_that_share_a_run_take_each_file_once_and_the_longest_first(
    shared: list[Any], tmp_path: Path
) -> None:
    one, other = (SharedRun(tmp_path, SLOW).take_files(shared) for _ in range(2))
    order = [next(one).nodeid, next(other).nodeid, next(one).nodeid, next(other).nodeid]
    assert order == ["t/b::one", "a::one", "c::one", "a::two"]
    assert [*one, *other] == []


def test_what_files_of_a_shared_run_have_in_common_is_kept_between_them(shared: list[Any], tmp_path: Path) -> None:
    began = []

    def begin(item: Any, nextitem: Any) -> None:
        began.append((item.nodeid, nextitem and nextitem.nodeid))
        session.shouldstop = "stop" if item.nodeid == "c::one" and stops else ""

    config = SimpleNamespace(hook=SimpleNamespace(pytest_runtest_protocol=begin), option=SimpleNamespace(collectonly=0))
    session: Any = SimpleNamespace(
        items=shared, config=config, testsfailed=0, shouldfail="", Interrupted=KeyboardInterrupt
    )
    stops = False
    assert SharedRun(tmp_path, SLOW).pytest_runtestloop(session)
    order = ["t/b::one", "a::one", "a::two", "c::one", None]
    assert began == list(pairwise(order))
    assert SharedRun(tmp_path, SLOW).pytest_runtestloop(session)
    assert len(began) == 4  # nothing is left for another process
    stops = True
    tmp_path.joinpath("c").unlink()
    with pytest.raises(KeyboardInterrupt):
        SharedRun(tmp_path, SLOW).pytest_runtestloop(session)
    session.testsfailed = 1  # a file that cannot be imported
    assert SharedRun(tmp_path, SLOW).pytest_runtestloop(session) is None


def test_the_table_keeps_what_was_not_measured() -> None:
    kinds = {"a::one": "slow", "a::two": "slow", "b::one": "slow", "c::far": "exhaustive", "a::far": "exhaustive"}
    kinds["c::thinned"] = "exhaustive"
    before = [
        Row("slow", 3.0, "a::one"),
        Row("slow", 4.0, "b::one"),
        Row("exhaustive", 5.0, "c::far"),
        Row("slow", 2.0, "c::thinned"),
        Row("slow", 6.0, "a::gone"),
        Row("fast", 0.7, "b"),
        Row("slow", 1.0, "elsewhere::one"),
        Row("fast", 0.3, "elsewhere"),
    ]
    rows = list(render_rows({"a::one": 0.03, "a::two": 0.5, "a::far": 9.0}, kinds, before))
    assert rows == [
        "fast 0.03 a",
        "exhaustive 9.00 a::far",
        "slow 0.50 a::two",
        "fast 0.70 b",
        "slow 4.00 b::one",
        "exhaustive 5.00 c::far",
        "exhaustive 2.00 c::thinned",
        "fast 0.30 elsewhere",
        "slow 1.00 elsewhere::one",
    ]


def test_no_two_files_of_tests_have_one_name() -> None:
    """pytest imports them by their name alone: two in one part of a run end it."""
    names = [path.name for path in Path(__file__).parent.rglob("test_*.py")]
    assert [name for name in sorted(set(names)) if names.count(name) > 1] == []
