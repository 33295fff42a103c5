from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from command_line import Shardway

from shardway.launch.hosts.local import LocalHost
from shardway.launch.runs import logs
from shardway.launch.runs.find import Known, remember
from shardway.rundir.attempts import Attempt, Ending, Result, Submission
from shardway.rundir.directory import RunDir
from shardway.rundir.events import EventFollower

GONE = "999999999.1"


def id_of_this_process() -> str:
    """A job of this machine that runs for as long as the test."""
    return f"{os.getpid()}.{Path('/proc/self/stat').read_text().rpartition(') ')[2].split()[19]}"


def submitted(path: Path, job: str = GONE, said: str = "", *, command: bool = False) -> Attempt:
    """The next attempt of a run as `shardway submit` leaves it, and what its job has printed."""
    run = RunDir(path.absolute())
    attempt = run.attempt(len(run.attempts()) + 1)
    attempt.make()
    attempt.order_path.write_text("{}")
    if not command:
        attempt.run_file.write_text("format = 1\n")
    attempt.write_submission(Submission("local", "a1b2c3", job, submitted=1.0))
    if said:
        attempt.job_log.write_text(said)
    return attempt


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks follow upon each other within milliseconds."""
    monkeypatch.setattr(logs, "PAUSE_S", 0.005)
    monkeypatch.setattr(logs, "FIRST_GAP_S", 0.02)


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set once somebody has looked for a beginning, and found none."""
    look, looked = logs.Beginning._is_training, threading.Event()

    def is_training(beginning: logs.Beginning, rank: int, further: EventFollower) -> bool:
        found = look(beginning, rank, further)
        looked.set()
        return found

    monkeypatch.setattr(logs.Beginning, "_is_training", is_training)
    return looked


@dataclass
class Trainer:
    """Rank 0 of a job that begins, after `looked` where that is given, writes an event, and leaves."""

    run: RunDir
    looked: threading.Event | None = None

    def __enter__(self) -> Trainer:
        self._thread = threading.Thread(target=self._train)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._thread.join()

    def _train(self) -> None:
        if self.looked is not None:
            self.looked.wait(60.0)
        lock = self.run.writer_lock()
        lock.acquire()
        with self.run.event_writer(0) as writer:
            writer.write("fault", step=7, what="late")
            time.sleep(0.05)
        lock.release()


@pytest.mark.parametrize("word", ["runs/lf", "{here}/runs/lf", "lf", "runs", None])
def test_of_a_command_the_output_of_its_job_is_shown(word: str | None, shardway: Shardway, tmp_path: Path) -> None:
    submitted(tmp_path / "runs/lf", said="0: hello\n", command=True)
    remember(Known(str(tmp_path / "runs/lf")))
    ended = shardway("logs", *([word.format(here=tmp_path)] if word else []))
    assert (ended.code, ended.out, ended.err) == (0, "0: hello\n", "")


def test_the_output_of_a_command_is_followed(
    shardway: Shardway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = submitted(tmp_path / "runs/lf", command=True)
    monkeypatch.setattr(logs, "follow_output", lambda host, which, node, tell: iter([f"{which.path}"]))
    ended = shardway("logs", "-f", str(tmp_path / "runs/lf"))
    assert (ended.code, ended.out, ended.err) == (0, f"{attempt.path}\n", "")


@pytest.mark.parametrize("word", ["runs/a", "a"])
def test_a_job_that_waits_is_waited_for(word: str, shardway: Shardway, tmp_path: Path, looked: threading.Event) -> None:
    submitted(tmp_path / "runs/a", id_of_this_process())
    remember(Known(str(tmp_path / "runs/a")))
    with Trainer(RunDir(tmp_path / "runs/a"), looked):
        ended = shardway("logs", "-f", word, "--json")
    assert (ended.code, ended.err, ended.out.count('"late"')) == (0, "", 1)


def test_a_job_that_resumes_a_run_is_waited_for(shardway: Shardway, tmp_path: Path, looked: threading.Event) -> None:
    """What was written before is there already, and nobody writes yet."""
    run = RunDir(tmp_path / "runs/a")
    submitted(run.path).write_result(Result(Ending.DEADLINE, by="rank 0"))
    with Trainer(run):
        pass
    submitted(run.path, id_of_this_process())
    with Trainer(run, looked):
        ended = shardway("logs", "-f", "runs/a", "--json")
    assert (ended.code, ended.err, ended.out.count('"late"')) == (0, "", 2)


@pytest.mark.parametrize("result", [None, Result(Ending.CRASHED, "no module x", by="job script")])
def test_of_a_job_that_died_before_its_first_event_the_output_is_shown(
    result: Result | None, shardway: Shardway, tmp_path: Path
) -> None:
    attempt = submitted(tmp_path / "runs/a", said="ModuleNotFoundError: x\n")
    if result:
        attempt.write_result(result)
    ended = shardway("logs", "-f", "runs/a")
    assert (ended.code, ended.out) == (0, "ModuleNotFoundError: x\n")
    assert ended.err.startswith(f"shardway: attempt 1 (job {GONE}) is over: {'crashed: no' if result else 'unknown'}")
    assert shardway("logs", "runs/a").out == "ModuleNotFoundError: x\n"


def test_a_job_that_dies_while_it_is_waited_for_ends_that(
    shardway: Shardway, tmp_path: Path, looked: threading.Event
) -> None:
    attempt = submitted(tmp_path / "runs/a", id_of_this_process(), said="0: bad\n")
    died = Result(Ending.CRASHED, "bad", by="job script")
    dying = threading.Thread(target=lambda: looked.wait(60.0) and attempt.write_result(died))
    dying.start()
    ended = shardway("logs", "-f", "runs/a")
    dying.join()
    assert (ended.code, ended.out) == (0, "0: bad\n")
    assert "is over: crashed: bad.\n" in ended.err


def test_events_are_a_beginning_where_locks_of_other_machines_are_not_seen(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "a")
    submitted(run.path, id_of_this_process())

    def write(seconds: float) -> None:
        with run.event_writer(0) as writer:
            writer.write("fault")

    assert logs.Beginning(LocalHost(), run, sleep=write).wait(0) == ""
    assert len(run.events(0)) == 1


@dataclass
class Clock:
    """Seconds that pass only while somebody sleeps."""

    now: float = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_a_scheduler_is_asked_ever_more_rarely_and_twice_before_a_job_counts_as_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    run, clock, asked = RunDir(tmp_path / "a"), Clock(), []
    submitted(run.path)
    waits = iter([True, True, True, True, False, True, False, False])

    class Told(logs.Beginning):
        def _look(self) -> tuple[tuple[Attempt, ...], str]:
            asked.append(round(clock.now))
            return (run.attempt(1),) if next(waits) else (), "over"

    assert Told(LocalHost(), run, clock=lambda: clock.now, sleep=clock.sleep).wait(0) == "over"
    assert asked == [0, 10, 30, 70, 150, 160, 170, 180]


def test_a_job_that_has_printed_nothing_is_told(shardway: Shardway, tmp_path: Path) -> None:
    submitted(tmp_path / "runs/a", id_of_this_process())
    ended = shardway("logs", "runs/a")
    assert (ended.code, ended.out) == (2, "")
    assert "attempt 1 of runs/a has printed nothing.\n  To do: `shardway status" in ended.err


@pytest.fixture
def printed(tmp_path: Path) -> str:
    """A command of two ranks that has ended."""
    submitted(tmp_path / "runs/a", said="0: a\nno rank's\n 1: b\n0: c\n", command=True)
    return "runs/a"


@pytest.mark.parametrize(("rank", "out"), [(0, "a\nc\n"), (1, "b\n")])
def test_lines_of_one_rank(rank: int, out: str, printed: str, shardway: Shardway) -> None:
    assert shardway("logs", printed, "--rank", str(rank)).out == out


@pytest.mark.parametrize("follow", [False, True])
def test_a_rank_that_never_printed_is_told_with_those_that_did(
    follow: bool, printed: str, shardway: Shardway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "follow_output", lambda host, attempt, *_: logs.read_output(host, attempt, None))
    ended = shardway("logs", printed, "--job", "--rank", "5", *(["-f"] if follow else []))
    assert (ended.code, ended.out) == (2, "")
    assert "rank 5 has printed nothing; ranks that have: 0, 1." in ended.err
