"""The course of a rehearsal with a command that takes a moment a step instead of training."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import psutil
import pytest

from shardway.launch import rehearsal as course
from shardway.launch import rehearsal as trials
from shardway.launch.rehearsal import Limits, RehearsalCheck, RehearsalVerdict, RehearsedProgram, rehearse, run_trial
from shardway.rundir.attempts import Ending
from shardway.rundir.directory import RunDir

TRAINER = str(Path(__file__).with_name("trainer.py"))
OK, FAIL, UNKNOWN = RehearsalVerdict.OK, RehearsalVerdict.FAIL, RehearsalVerdict.UNKNOWN


@pytest.fixture(autouse=True)
def in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept of a deadline is what the trainer keeps, and a bit: it stops in the middle of its steps."""
    monkeypatch.setattr(trials, "POLL_S", 0.01)
    monkeypatch.setattr(course, "RESERVE_S", 5.1)
    monkeypatch.setattr(course, "RESERVE_PART", 0.0)


def words(*flaw: str, steps: int = 60, pace: float = 0.02) -> list[str]:
    return [sys.executable, TRAINER, str(steps), str(pace), *flaw]


def checks_of(folder: Path, command: list[str], *, deadline: float = 60.0, whole: bool = True) -> list[RehearsalCheck]:
    return list(rehearse(RehearsedProgram(lambda run: command, deadline, whole), folder))


def verdicts(checks: list[RehearsalCheck]) -> list[tuple[str, RehearsalVerdict]]:
    return [(check.name, check.verdict) for check in checks]


# --- one attempt


def test_an_attempt_is_started_as_a_job_starts_it(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    trial = run_trial(words(steps=2), run, Limits(deadline_s=60.0))
    assert (trial.code, trial.killed, trial.steps, trial.first_step, trial.last_step) == (0, False, [1, 2], 0, 2)
    assert trial.result is not None
    assert trial.result.state is Ending.FINISHED
    started = trial.attempt.read_started()
    assert started is not None
    assert started.deadline - started.started == pytest.approx(60.0)
    assert trial.left_s == pytest.approx(60.0 - trial.seconds)
    again = run_trial(words(steps=3), run, Limits())
    assert (again.attempt.number, again.steps, again.first_step) == (2, [3], 2)
    assert again.attempt.read_started().deadline == 0.0  # type: ignore[union-attr]


def test_nothing_outlives_its_deadline(tmp_path: Path) -> None:
    """Nor what the command has started, nor what ignores SIGTERM."""
    script = "trap '' TERM; sleep 300 & echo $! > child; wait; sleep 300"
    folder, noted = tmp_path / "run", tmp_path / "child"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trials, "KILL_AFTER_S", 0.1)
        patch.chdir(tmp_path)
        for deadline_s in (0.3, 3.0, 30.0):  # a busy machine may not begin in the first of them
            trial = run_trial(["sh", "-c", script], RunDir(folder), Limits(deadline_s))
            if noted.exists() and noted.read_text():
                break
    assert trial.killed
    assert trial.code == -9
    assert trial.seconds < deadline_s + 30
    child = int(noted.read_text())
    until = time.monotonic() + 60
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < until
        time.sleep(0.01)


def test_what_a_command_said_last_is_kept(tmp_path: Path) -> None:
    trial = run_trial(["sh", "-c", "seq 9; echo bad >&2; exit 3"], RunDir(tmp_path / "run"), Limits())
    assert (trial.code, trial.killed) == (3, False)
    assert trial.last_words() == "6\n7\n8\n9\nbad"


# --- the whole course

GOOD = ["trains", "attempt 1 stops in time", "attempt 1 saves", "attempt 2 resumes", "same losses"]
TWICE = [*GOOD[:-1], "attempt 2 stops in time", "attempt 2 saves", "attempt 3 resumes", "same losses"]


def check_names(checks: list[RehearsalCheck]) -> None:
    """All is well, whether one deadline cut it or two."""
    assert {check.verdict for check in checks} == {OK}, checks
    assert [check.name for check in checks] in (GOOD, TWICE)


def test_a_run_that_goes_on_as_it_should(tmp_path: Path) -> None:
    """It is shorter than the deadline that was asked for: the deadline falls into it all the same. Into the second
    attempt as well, where that starts more slowly than the run before."""
    checks = checks_of(tmp_path, words())
    check_names(checks)
    assert checks[-1].found == "loss, grad_norm, lr of 60 steps are the same bit for bit"


def test_a_long_run_is_cut_as_often_as_its_deadline_says(tmp_path: Path) -> None:
    """What runs without a break is stopped after as long, and compared as far as it came."""
    check_names(checks_of(tmp_path, words(steps=100000), deadline=1.0, whole=False))


@pytest.mark.parametrize(
    ("flaw", "last", "found"),
    [
        ("drift", "same losses", "loss of step "),
        ("broken", "attempt 2 resumes", "it ended with exit code 1 after "),
        ("deaf", "attempt 1 stops in time", "it was still running at its deadline of "),
    ],
)
def test_the_first_failure_ends_it(
    flaw: str, last: str, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if flaw == "deaf":
        monkeypatch.setattr(course, "TRIES", 1)
        monkeypatch.setattr(course, "RESERVE_S", 0.5)  # what it is left to run on for
    steps = 60 if flaw != "deaf" else 100000
    checks = checks_of(tmp_path, words(flaw, steps=steps), deadline=2.0, whole=flaw != "deaf")
    assert [check.name for check in checks if check.verdict is FAIL] == [last]
    assert checks[-1].name == last
    assert checks[-1].found.startswith(found)


def test_a_command_that_does_not_train_fails_at_once(tmp_path: Path) -> None:
    checks = checks_of(tmp_path, ["sh", "-c", "echo no such model; exit 2"])
    assert verdicts(checks) == [("trains", FAIL)]
    assert checks[0].found.endswith("no such model")


def test_a_command_that_writes_no_events_is_seen_from_outside(tmp_path: Path) -> None:
    for deadline_s in (1.0, 5.0, 25.0):  # a busy machine may not start it in the first of them
        folder = tmp_path / f"{deadline_s:g}"
        folder.mkdir()
        checks = checks_of(folder, words("silent", steps=100000), deadline=deadline_s, whole=False)
        if UNKNOWN not in [check.verdict for check in checks[:-1]]:
            break
    assert verdicts(checks) == [
        ("obeys the stop file", OK),
        ("ends before its deadline", OK),
        ("starts again", OK),
        ("same losses", UNKNOWN),
    ]


def test_a_command_that_obeys_nothing(tmp_path: Path) -> None:
    checks = list(rehearse(RehearsedProgram(lambda run: ["sleep", "300"], 0.2, patience_s=0.2), tmp_path))
    assert verdicts(checks) == [("obeys the stop file", FAIL)]
    assert "stop` of the run directory" in checks[0].remedy


def test_a_trial_works_where_it_is_told_and_knows_its_stop_file(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    run = RunDir(tmp_path / "run")
    trial = run_trial(["sh", "-c", 'pwd; echo "$SHARDWAY_STOP_FILE"'], run, Limits(), tmp_path / "work")
    assert trial.last_words().splitlines() == [str(tmp_path / "work"), str(run.stop_path)]
