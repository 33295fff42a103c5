"""Whatever became of a file in a run directory, every verb answers, and those that read change nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from cases import Case, cases, check_all, few_and_many
from mutate import form_of, restore
from small_run import WORDS
from verbs import call, guarded, picture

from shardway.checkpoint.file_format import MANIFEST
from shardway.checkpoint.reader import peek_latest
from shardway.resolve.request import ResolveRequest, check_same_run, find_changes, resolve_request
from shardway.rundir.directory import RunDir
from shardway.runfile.schema import all_keys
from shardway.train.record import read_earlier
from shardway.train.stops import find_deadline, read_pace

Tried = Callable[[Case, Callable[[], list[str]]], list[str]]

READERS: tuple[tuple[str, ...], ...] = (
    ("status",),
    ("status", "--json"),
    ("logs",),
    ("logs", "--json"),
    ("logs", "--job"),
    ("logs", "--output"),
    ("report",),
    ("report", "--json"),
)
FILES = (
    "status.json",
    "events/rank-00000.jsonl",
    "writer.lock",
    "resolved.toml",
    "run.toml",
    "stop",
    "report.html",
    "logs/start/attempt_0/0/stdout.log",
    "attempts/0001/result.json",
    "attempts/0002/submission.json",
    "attempts/0002/started.json",
    "attempts/0002/result.json",
    "attempts/0002/order.json",
    "attempts/0002/run.toml",
    "attempts/0002/log/job.out",
    "attempts/0002",
    "attempts",
    "events",
    "checkpoints",
)


def checkpoint_files(run: Path) -> list[str]:
    """The files of every checkpoint, whatever its format consists of, but for its manifest."""
    paths = sorted(RunDir(run).checkpoints.rglob("*"))
    return [path.relative_to(run).as_posix() for path in paths if path.is_file() and path.name != MANIFEST]


@pytest.fixture
def tried(run: Path, trained: Path) -> Callable[[Case, Callable[[], list[str]]], list[str]]:
    """Damages a file of the run, asks for complaints, and puts the file back."""

    def damage(case: Case, ask: Callable[[], list[str]]) -> list[str]:
        path = run / case.name
        whole = (trained / case.name).read_bytes() if (trained / case.name).is_file() else b""
        mutant = case.mutant(whole, form_of(path))
        mutant.put(path)
        try:
            return [f"{mutant.what}: {each}" for each in ask()]
        finally:
            restore(trained / case.name, path)

    return damage


@few_and_many(few=1, many=25)
def test_readers_answer_and_change_nothing(numbers: Sequence[int], run: Path, tried: Tried) -> None:
    def complain(case: Case) -> list[str]:
        verb, *options = case.dice().choice(READERS)
        before = picture(run, without=["report.html"])
        answer = call(verb, str(run), *options)
        found = answer.complaints((0, 2, 4), str(run), printable=options[:1] not in (["--job"], ["--output"]))
        if picture(run, without=["report.html"]) != before:
            found.append("the run directory is not as it was")
        return [*found, str(answer)] if found else []

    check_all(cases(FILES, numbers), lambda case: tried(case, lambda: complain(case)))


@few_and_many(few=1, many=14)
def test_a_submission_is_prepared_or_refused(numbers: Sequence[int], run: Path, tried: Tried) -> None:
    def complain(case: Case) -> list[str]:
        before = picture(run)
        answer = call("resume", str(run), "--dry-run")
        found = answer.complaints((0, 2, 3), str(run), "no run", *all_keys(), "the project folder", "the command")
        if picture(run) != before:
            found.append("the run directory is not as it was")
        return [*found, str(answer)] if found else []

    names = [name for name in FILES if name.startswith("attempts")]
    check_all(cases(names, numbers), lambda case: tried(case, lambda: complain(case)))


@few_and_many(few=1, many=10)
def test_going_on_is_prepared_or_refused(numbers: Sequence[int], run: Path, tried: Tried) -> None:
    """What a run reads before it goes on, as far as it writes nothing."""
    resolved = resolve_request(ResolveRequest(None, WORDS, run)).resolved

    def prepare() -> None:
        directory = RunDir(run)
        directory.check_no_strangers()
        directory.check_format()
        peek_latest(directory)
        read_earlier(directory)
        find_deadline(directory.attempt(2), None, read_pace(directory.read_status()))
        saved = directory.read_resolved()
        check_same_run(saved, resolved, str(run))
        find_changes(saved, resolved)

    def complain(case: Case) -> list[str]:
        before = picture(run)
        answer = guarded(prepare)
        found = answer.complaints((0, 2, 4), str(run))
        return [*found, str(answer)] if found or picture(run) != before else []

    names = [*FILES, *checkpoint_files(run)]
    check_all(cases(names, numbers), lambda case: tried(case, lambda: complain(case)))
