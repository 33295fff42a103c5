"""How long tests take, as measured, and what follows from it: which are `slow`, and which files a part of a run has.

tests/durations.txt holds a line for each test of SLOW_S or more, and one a file for all its others together:

    KIND SECONDS WHAT        KIND is slow, exhaustive (left out of `make test`), or fast (a file)

`make durations` writes it again, on a machine with nothing else to do. A test that is not in it, a new one, is fast.
Processes that share a run take its files one by one, the longest first, so that they end together on a machine on
which tests take other times than in the table.

Invariant: no test says itself that it is slow. The parts of a run are whole files, take about as long, and are all of
it; a file of a shared run is run by one process. This module must not import torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

TABLE = Path(__file__).with_name("durations.txt")
SLOW_S = 0.04
"""The tests below it, some eight thousand, take less than a minute of one core together: `make check`."""
LONG_S = 20.0
FILE_S = 0.1
"""What a file takes to be imported, and all that is known of one that was not measured."""

WHY = {
    "tests/test_readme.py::test_every_shell_block_of_the_": "what a newcomer types: a first run, then four trainings",
    "tests/train/test_processes.py::test_what_was_killed_goes_on_with_the_same": "two kills and five starts",
    "tests/train/test_nodes.py::": "agents wait for a lost node as long as it may take",
    "tests/cli/test_followers.py::test_a_": "jobs of this machine that start torch, one after the other",
    "tests/learn/test_lessons_run.py::": "what a learner types in a lesson: ten or more processes, one after the other",
    "tests/docs_site/test_site_pages.py::": "the whole site is built, once for all of its tests",
    "tests/train/test_takeover.py::": "a run that is stopped is overtaken once its lease has run out, and then goes on",
}
"""Why a test may take LONG_S or more, by what its name begins with."""


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    kind: str
    seconds: float
    what: str

    @property
    def file(self) -> str:
        """The file, from the root of the project."""
        return self.what.partition("::")[0]


@cache
def read_rows() -> tuple[Row, ...]:
    """The table."""
    lines = (line.split(" ", 2) for line in TABLE.read_text(encoding="utf-8").splitlines())
    return tuple(Row(kind, float(seconds), what) for kind, seconds, what in lines)


def add_options(parser: pytest.Parser) -> None:
    """The options that are about how long tests take."""
    parser.addoption("--part", default="1/1", help="K/N: the files of the Kth of N parts that take as long")
    parser.addoption("--share", metavar="FOLDER", help="run the files that no process with this folder has begun")
    parser.addoption("--write-durations", action="store_true", help="write tests/durations.txt again")


def mark_slow(items: Iterable[pytest.Item]) -> None:
    """Mark what the table says is slow."""
    slow = {row.what for row in read_rows() if row.kind != "fast"}
    for item in items:
        if item.nodeid in slow:
            item.add_marker(pytest.mark.slow)


def choose_files(
    part: str, kinds: frozenset[str], files: Iterable[str], together: Container[str] = ()
) -> frozenset[str]:
    """Those of a part K/N of a run of these kinds of tests: each in turn, the longest first, to the part that has least
    by then; the files of `together` as if they were one. Raises UsageError."""
    number, count = _read_part(part)
    seconds = _seconds_of_files(kinds)
    files = sorted(files)
    groups = [[file] for file in files if file not in together]
    groups += [company] if (company := [file for file in files if file in together]) else []
    loads, chosen = [0.0] * count, [set[str]() for _ in range(count)]
    for group in sorted(groups, key=lambda group: (-sum(seconds[file] for file in group), group)):
        least = loads.index(min(loads))
        loads[least] += sum(seconds[file] for file in group)
        chosen[least].update(group)
    return frozenset(chosen[number - 1])


def _seconds_of_files(kinds: frozenset[str]) -> defaultdict[str, float]:
    """How long the tests of these kinds in a file take."""
    seconds: defaultdict[str, float] = defaultdict(lambda: FILE_S)
    for row in read_rows():
        if row.kind in kinds:
            seconds[row.file] += row.seconds
    return seconds


def _read_part(text: str) -> tuple[int, int]:
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise pytest.UsageError(f"--part is {text}; K/N, with K from 1 to N")
    return int(number), int(count)


def kinds_of(marks: str) -> frozenset[str]:
    """The kinds of tests that an expression of marks (-m) lets through."""
    kinds = {
        "not slow and not exhaustive": {"fast"},
        "slow and not exhaustive": {"slow"},
        "not exhaustive": {"fast", "slow"},
        "exhaustive": {"exhaustive"},
    }
    return frozenset(kinds.get(marks, {"fast", "slow", "exhaustive"}))


FAST, SLOW = frozenset({"fast"}), frozenset({"slow"})


def starts_ranks(text: str) -> bool:
    """Whether tests in a file with this text run on the pool's ranks or start warm processes. What these are forked
    from takes five seconds to start, so that a run of fast tests has them in one part."""
    return "@ranks(" in text or "warm_starts" in text or "rank_pool" in text


def has_slow(file: str, text: str) -> bool:
    """Whether there may be slow tests in a file: the table has one, or the text marks some itself."""
    return "mark.slow" in text or any(row.kind == "slow" and row.file == file for row in read_rows())


class Parts:
    """Leaves out the files that are not of this part, and those without a test of its kind where that is known."""

    def __init__(self, config: pytest.Config) -> None:
        self._root = config.rootpath
        self._part, self._kinds = config.getoption("--part"), kinds_of(config.getoption("markexpr"))
        _read_part(self._part)

    @pytest.hookimpl(tryfirst=True)
    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        """True for a file of another part."""
        if not (collection_path.name.startswith("test_") and collection_path.suffix == ".py"):
            return None
        return True if self._name(collection_path) not in self._files() else None

    @cache  # noqa: B019
    def _files(self) -> frozenset[str]:
        paths = Path(__file__).parent.rglob("test_*.py")
        texts = {self._name(path): path.read_text(encoding="utf-8") for path in paths}
        if self._kinds == SLOW:
            texts = {file: text for file, text in texts.items() if has_slow(file, text)}
        together = {file for file, text in texts.items() if starts_ranks(text)} if self._kinds == FAST else ()
        return choose_files(self._part, self._kinds, texts, together)

    def _name(self, path: Path) -> str:
        return path.relative_to(self._root).as_posix()


class SharedRun:
    """Runs the files that no other process of this run has begun: the first to make an entry in `folder` has one."""

    def __init__(self, folder: Path, kinds: frozenset[str]) -> None:
        self._folder, self._kinds = folder, kinds

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """As pytest's own. The next file is taken when the last test of the one before begins, so that fixtures of the
        session live on."""
        if session.testsfailed or session.config.option.collectonly:
            return None
        items = self.take_files(session.items)
        item = next(items, None)
        while item is not None:
            following = next(items, None)
            session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if session.shouldfail:
                raise session.Failed(session.shouldfail)
            if session.shouldstop:
                raise session.Interrupted(session.shouldstop)
            item = following
        return True

    def take_files(self, items: Iterable[pytest.Item]) -> Iterator[pytest.Item]:
        """The tests of one file after another, each taken when its first test is asked for."""
        seconds = _seconds_of_files(self._kinds)
        files: dict[str, list[pytest.Item]] = defaultdict(list)
        for item in items:
            files[item.nodeid.partition("::")[0]].append(item)
        for file in sorted(files, key=lambda file: -seconds[file]):
            if self._take(file):
                yield from files[file]

    def _take(self, file: str) -> bool:
        try:
            self._folder.joinpath(file.replace("/", "+")).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


class Stopwatch:
    """Writes the table, with what was run measured anew and all else as it was."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        self._kinds: dict[str, str] = {}
        self._failed: set[str] = set()

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Note which tests are exhaustive; others than those that are run as well."""
        for item in items:
            self._kinds[item.nodeid] = "exhaustive" if item.get_closest_marker("exhaustive") else "slow"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add up start, test and end."""
        self._seconds[report.nodeid] += report.duration
        if report.failed:
            self._failed.add(report.nodeid)

    def pytest_sessionfinish(self, session: Any, exitstatus: int) -> None:
        """Write, unless the run was cut. What failed took as long as it did before."""
        if exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            seconds = {test: taken for test, taken in self._seconds.items() if test not in self._failed}
            before = [row for row in read_rows() if TABLE.parents[1].joinpath(row.file).exists()]
            rows = render_rows(seconds, self._kinds, before)
            TABLE.write_text("".join(f"{line}\n" for line in rows), encoding="utf-8")


def render_rows(seconds: Mapping[str, float], kinds: Mapping[str, str], before: Sequence[Row]) -> Iterator[str]:
    """The lines of the table: what was measured, and of `before` what still exists and was not.

    `kinds`: of every test in the files that were collected; rows of other files stay as they are.
    """
    collected = {test.partition("::")[0] for test in kinds}
    elsewhere = [row for row in before if row.file not in collected]
    before = [row for row in before if row.file in collected]
    rows = [Row(kinds[test], taken, test) for test, taken in seconds.items() if taken >= SLOW_S]
    rows += [
        Row(kinds[row.what], row.seconds, row.what)
        for row in before
        if row.kind != "fast" and row.what not in seconds and row.what in kinds
    ]
    others: dict[str, float] = defaultdict(float)
    for test, taken in seconds.items():
        if taken < SLOW_S and kinds[test] != "exhaustive":
            others[test.partition("::")[0]] += taken
    for row in before:
        if row.kind == "fast" and row.what not in others and any(test.startswith(f"{row.what}::") for test in kinds):
            others[row.what] = row.seconds
    rows += [Row("fast", taken, file) for file, taken in others.items() if taken >= 0.005]
    for row in sorted([*rows, *elsewhere], key=lambda row: (row.what, row.kind)):
        yield f"{row.kind} {row.seconds:.2f} {row.what}"
