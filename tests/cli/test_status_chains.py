"""What `shardway status` says of a run that was submitted: of the last attempt first, and what is still to come."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import Shardway

from shardway.rundir.attempts import Attempt, AttemptStart, Ending, Result, Submission
from shardway.rundir.directory import RunDir

DONE = "deadline in 4 s"


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run of 100 steps that did 20 in two attempts, both ended by their wall-time, the second after a failure in
    between; each took 10 s to start, and its steps 4 s."""
    run = RunDir(tmp_path / "mine")
    run.create()
    events = [
        (10.0, 1, "started", 0, {"start": 10.0}),
        (10.0, 1, "restarted", 0, {}),
        (20.0, 2, "started", 0, {"start": 10.0}),
        (24.0, 2, "step", 10, {"start": 10.0, "step": 4.0}),
        (24.0, 2, "stopped", 10, {"start": 10.0, "step": 4.0}),
        (34.0, 3, "started", 10, {"start": 10.0}),
        (38.0, 3, "step", 20, {"start": 10.0, "step": 4.0}),
        (38.0, 3, "stopped", 20, {"start": 10.0, "step": 4.0}),
    ]
    with open(run.path / "events/rank-00000.jsonl", "w", encoding="utf-8") as file:
        for at, pid, name, step, spent in events:
            facts = {"event": name, "step": step, "total_steps": 100, "pid": pid, "host": "n1", "reason": DONE}
            print(json.dumps({**facts, "spent": spent, "time": at}), file=file)
    run.write_status(state="stopped", step=20, total_steps=100, reason=DONE)
    for number in (1, 2):
        ended(run, number, Result(Ending.DEADLINE, DONE, 10 * number, by="rank 0", ended=5.0))
    return run


def ended(run: RunDir, number: int, result: Result, began: float = 1.0) -> Attempt:
    attempt = run.attempt(number)
    attempt.make()
    attempt.write_started(AttemptStart("17", started=began))
    attempt.write_result(result)
    return attempt


Lines = Callable[[], list[str]]


@pytest.fixture
def lines(shardway: Shardway, run: RunDir) -> Lines:
    return lambda: shardway("status", str(run.path)).out.splitlines()


def test_attempts_are_not_confused_with_starts_in_them(lines: Lines) -> None:
    assert "  attempts    2" in lines()
    assert "  restarts    1 (the ranks started again in their attempt)" in lines()


def test_what_a_chain_will_take_is_told_and_that_it_is_badly_spent(lines: Lines) -> None:
    told = "some 8 more such jobs; starting takes more of them than training: raise site.walltime"
    assert f"  to go       {told}" in lines()


def test_nothing_is_to_go_where_no_job_was_ended_by_its_time(lines: Lines, run: RunDir) -> None:
    for attempt in run.attempts():
        attempt.result_path.unlink()
        attempt.write_result(Result(Ending.PREEMPTED, "", 10))
    assert not any("to go" in line for line in lines())


@pytest.mark.parametrize("state", [Ending.CRASHED, Ending.OUT_OF_MEMORY, Ending.NODE_FAILURE, Ending.UNKNOWN])
def test_an_attempt_that_failed_before_its_ranks_is_told_first(state: Ending, lines: Lines, run: RunDir) -> None:
    ended(run, 3, Result(state, "no module named mine", exit_code=1, by="job script"), began=4e9)
    assert lines()[0] == f"{run.path}  failed: no module named mine"


def test_a_chain_that_has_ended_by_failures_is_told_by_them(lines: Lines, run: RunDir) -> None:
    for number in (3, 4):
        ended(run, number, Result(Ending.CRASHED, "no module named mine", 20, by="job script"), began=4e9)
    ended(run, 5, Result(Ending.NOT_NEEDED, "attempts 0003 and 0004 ended alike"), began=4e9)
    assert lines()[0] == f"{run.path}  failed: no module named mine"
    assert not any("to go" in line for line in lines())


def test_a_job_that_never_began_is_told_first(lines: Lines, run: RunDir) -> None:
    attempt = run.attempt(3)
    attempt.make()
    attempt.write_submission(Submission("slurm", "x", job="17", submitted=4e9))
    attempt.write_result(Result(Ending.CRASHED, "its prolog failed", by="scheduler"))
    assert lines()[0] == f"{run.path}  failed: its prolog failed"


def test_an_attempt_whose_ranks_spoke_is_told_in_their_words(lines: Lines, run: RunDir) -> None:
    ended(run, 3, Result(Ending.CRASHED, "exit code 1", by="job script"), began=2.0)
    assert lines()[0] == f"{run.path}  stopped: {DONE}"


def test_a_wall_time_that_is_over_is_no_failure(lines: Lines, run: RunDir) -> None:
    ended(run, 3, Result(Ending.DEADLINE, "the wall-time is over"), began=4e9)
    assert lines()[0] == f"{run.path}  stopped: {DONE}"


def test_a_job_that_is_refused_leaves_a_finished_run_finished(lines: Lines, run: RunDir) -> None:
    """A start with another model, after the last step, is no failure of what was trained."""
    event = {"event": "finished", "step": 100, "pid": 3, "host": "n1", "reason": "all 100 steps are done", "time": 50.0}
    with open(run.path / "events/rank-00000.jsonl", "a", encoding="utf-8") as file:
        print(json.dumps(event), file=file)
    run.write_status(state="finished", step=100, total_steps=100, reason="all 100 steps are done")
    refused = "the run has another model.dim"
    ended(run, 3, Result(Ending.CRASHED, refused, exit_code=2, by="job script"), began=4e9)
    assert lines()[0] == f"{run.path}  finished: all 100 steps are done"
    assert any(refused in line for line in lines()[1:])
