from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from claimed import claim_from
from shardway.launch.hosts.base import Done, HostUnreachable
from shardway.launch.hosts.local import LocalHost
from shardway.launch.runs import logs
from shardway.launch.runs.logs import LeftLock, follow_output
from shardway.rundir.attempts import Attempt, AttemptStart, Ending, Result, Submission
from shardway.rundir.directory import RunDir

TICK = object()
"""Stands for the line of a tick."""

RUNS = "17|17|RUNNING|1|2|n1|None|base\n"
WAITS = "17|17|PENDING|N/A|N/A||Priority|base\n"
GONE = ""
NODE_FAILED = "17|17|NODE_FAIL|0:0|1|2|3|n1|None|base\n"


@dataclass
class Told(LocalHost):
    """A host whose scheduler says what a test tells it, question by question; the last answer stays."""

    squeue: list[str] = field(default_factory=lambda: [RUNS])
    sacct: str = ""
    script: Sequence[object] = ()
    asked: int = 0
    at: list[int] = field(default_factory=list)
    ticks: int = 0
    broken: bool = False

    def run_many(self, commands: Sequence[Sequence[str]], *, timeout_s: float = 60.0) -> list[Done]:
        if not any("squeue" in words for words in commands):
            if self.broken:
                raise HostUnreachable("there: the connection broke.")
            return super().run_many(commands, timeout_s=timeout_s)
        live = self.squeue[min(self.asked, len(self.squeue) - 1)]
        self.asked += 1
        self.at.append(self.ticks)
        down = live == "down"
        answers = ("" if down else live), ("" if down else self.sacct)
        return [
            Done(tuple(words), int(down), out, "Unable to contact slurm controller" if down else "")
            for words, out in zip(commands, answers, strict=True)
        ]

    def follow(self, words: Sequence[str]) -> Iterator[str]:
        tick = words[6]
        for line in self.script:
            if line is TICK:
                self.ticks += 1
                yield tick
            else:
                yield str(line).replace("TICK", tick)


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    """A job that was submitted and has begun."""
    made = Attempt(tmp_path / "run/attempts/0001")
    made.make()
    made.write_submission(Submission("slurm", "a1b2c3", "17", submitted=1.0))
    made.write_started(AttemptStart("17", "n1", "n1", 1.0, 0.0))
    return made


def follow(host: Told, attempt: Attempt) -> tuple[list[str], list[str]]:
    """The lines, and what was told beside them."""
    told: list[str] = []
    return list(follow_output(host, attempt, None, told.append)), told


def test_a_job_that_was_killed_without_a_word_is_followed_to_its_end(attempt: Attempt) -> None:
    """The lines that come late are still shown."""
    script = ["0: step 1", TICK, TICK, TICK, "0: late", TICK, TICK, *[TICK] * 500]
    host = Told(squeue=[GONE], sacct=NODE_FAILED, script=script)
    lines, told = follow(host, attempt)
    assert lines == ["0: step 1", "0: late"]
    assert len(told) == 1
    assert told[0].startswith("attempt 1 (job 17) is over: node_failure: ")
    assert host.ticks <= 5, "a few seconds later"
    assert host.asked == 2


def test_a_job_that_the_scheduler_has_forgotten_is_over(attempt: Attempt) -> None:
    lines, told = follow(Told(squeue=[GONE], script=[TICK] * 100), attempt)
    assert lines == []
    assert "unknown: the scheduler does not know the job" in told[0]


@pytest.mark.parametrize("answer", [RUNS, WAITS, "down"])
def test_one_that_may_go_on_is_followed_and_asked_for_ever_more_rarely(attempt: Attempt, answer: str) -> None:
    host = Told(squeue=[answer], script=[TICK] * 100)
    follow(host, attempt)
    gaps = [later - former for former, later in zip([0, *host.at], host.at[:-1], strict=False)]
    assert gaps[:6] == [2, 4, 8, 16, 16, 16]


def test_a_job_that_prints_is_not_asked_for(attempt: Attempt) -> None:
    script = [each for number in range(100) for each in (f"0: step {number}", TICK)]
    host = Told(script=[*script, "shardway: attempt 0001: finished: done"])
    lines, _ = follow(host, attempt)
    assert (len(lines), host.at) == (101, [])


def test_an_answer_that_was_too_early_ends_nothing(attempt: Attempt) -> None:
    """Accounting lags: a job that is unknown at one moment runs at the next."""
    host = Told(squeue=[GONE, RUNS], script=[*[TICK] * 6, "0: alive"])
    lines, told = follow(host, attempt)
    assert lines == ["0: alive"]
    assert told == []


def test_a_connection_that_breaks_while_asking_ends_nothing(attempt: Attempt) -> None:
    lines, told = follow(Told(broken=True, script=[*[TICK] * 9, "0: alive"]), attempt)
    assert (lines, told) == (["0: alive"], [])


def test_an_attempt_that_no_scheduler_took_is_not_waited_for(attempt: Attempt) -> None:
    attempt.started_path.unlink()
    attempt.write_submission(Submission("slurm", "a1b2c3"))
    _, told = follow(Told(script=[TICK] * 100), attempt)
    assert told == ["attempt 1 was prepared, and no scheduler is known to have taken it."]


@pytest.mark.parametrize(
    ("script", "lines"),
    [
        (["0: half of TICK", "a line"], ["0: half of a line"]),
        (["0: a", "0: b TICK", TICK, "c"], ["0: a", "0: b c"]),
        (["0: the last TICK"], ["0: the last "]),
    ],
)
def test_a_tick_in_the_middle_of_a_line_leaves_it_whole(
    attempt: Attempt, script: list[object], lines: list[str]
) -> None:
    assert follow(Told(script=script), attempt)[0] == lines


@pytest.mark.parametrize(
    ("last", "told"),
    [
        ("2026-01-02 03:04:05 shardway: attempt 0001: crashed: the program ended with exit code 3", []),
        ("0: step 4", ["attempt 1 (job 17) is over: unknown: it ended without a word."]),
    ],
)
def test_how_it_ended_is_told_where_the_job_has_not_said_it(attempt: Attempt, last: str, told: list[str]) -> None:
    """Its successor wrote down for one that was killed that it ended without a word."""
    attempt.write_result(Result(Ending.UNKNOWN, "it ended without a word", job="17", by="job script"))
    assert follow(Told(squeue=[GONE], script=[last]), attempt) == ([last], told)


# --- a lock that nobody holds any more


@dataclass
class Held:
    """A run whose lock is held, as its claim says by a process on some host."""

    run: RunDir
    host: Told
    now: float = 0.0

    def left(self) -> LeftLock:
        """A fresh look at it."""
        return LeftLock(self.host, self.run, clock=lambda: self.now)


@pytest.fixture
def held(attempt: Attempt) -> Iterator[Held]:
    run = RunDir(attempt.run_path)
    lock = run.writer_lock()
    lock.acquire()
    yield Held(run, Told(squeue=[GONE], sacct=NODE_FAILED))
    lock.release()


@pytest.mark.parametrize("name", ["n1", "n1.cluster.example.org"])
def test_the_lock_of_a_node_that_died_is_not_waited_for(held: Held, name: str) -> None:
    claim_from(held.run, name)
    assert held.left().look().startswith("attempt 1 (job 17) is over: node_failure: ")


@pytest.mark.parametrize("answer", [RUNS, WAITS, "down"])
def test_the_lock_of_a_job_that_may_go_on_counts(held: Held, answer: str) -> None:
    claim_from(held.run, "n1")
    held.host.squeue = [answer]
    assert held.left().look() == ""


@pytest.mark.parametrize("name", [socket.gethostname(), "n9", ""])
def test_the_lock_of_this_machine_or_of_no_job_counts(held: Held, name: str) -> None:
    """Somebody may train there by hand."""
    claim_from(held.run, name)
    assert held.left().look() == ""
    assert held.host.asked == (name == "n9")


def test_a_lock_is_asked_for_ever_more_rarely_and_not_while_events_come(held: Held) -> None:
    claim_from(held.run, "n1")
    held.host.squeue = [RUNS]
    left, asked = held.left(), []
    left.put_off()
    for second in range(240):
        held.now = float(second)
        left.look()
        asked += [second] * (held.host.asked - len(asked))
    assert asked == [10, 30, 70, 150, 230]
    left.put_off()
    held.now += 60
    left.look()
    assert held.host.asked == 5


# --- for real


def test_a_real_job_of_this_machine_that_is_killed_ends_its_followers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "_TICK_S", 0.2)
    monkeypatch.setattr(logs, "FIRST_GAP_S", 1.0)
    attempt = Attempt(tmp_path / "run/attempts/0001")
    attempt.make()
    command = f"echo '0: begun' > {attempt.job_log}; sleep 600"
    with subprocess.Popen(["bash", "-c", command], start_new_session=True) as job:
        start = Path(f"/proc/{job.pid}/stat").read_text().rpartition(") ")[2].split()[19]
        attempt.write_submission(Submission("local", "a1b2c3", f"{job.pid}.{start}", submitted=1.0))
        told: list[str] = []
        lines = follow_output(LocalHost(), attempt, None, told.append)
        assert next(lines) == "0: begun"
        os.killpg(job.pid, signal.SIGKILL)
        began = time.monotonic()
        assert list(lines) == []
    assert time.monotonic() - began < 120
    assert told
    assert "is over: unknown: " in told[0]


def test_a_job_that_says_its_last_word_ends_its_followers_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "_TICK_S", 600)
    attempt = Attempt(tmp_path / "run/attempts/0001")
    attempt.make()
    attempt.job_log.write_text("0: a\nshardway: attempt 0001: finished: done\n")
    attempt.write_result(Result(Ending.FINISHED, by="rank 0"))
    began = time.monotonic()
    told: list[str] = []
    lines = list(follow_output(LocalHost(), attempt, None, told.append))
    assert (lines, told) == (["0: a", "shardway: attempt 0001: finished: done"], [])
    assert time.monotonic() - began < 120, "the clock of the ticks must not hold the output open"
