"""A run as an attempt of a job: it stops before its wall-time ends, and its job learns how it ended."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pool import ranks
from runs import (
    Died,
    die_at,
    layout,
    lone_rank,
    open_tiny,
    pool_ranks,
    read_column,
    read_named,
    signal_at,
    tell_steps,
    train_tiny,
)
from shardway.errors import JobError, LostContact, UserError
from shardway.ranks import failure as words_of_ranks
from shardway.ranks.start import Ranks
from shardway.resolve.request import ResolveRequest
from shardway.rundir.attempts import VARIABLE, Attempt, AttemptStart, Ending, Result, Submission
from shardway.rundir.directory import RunDir
from shardway.train import loop, session, stops
from shardway.train.run import LiveRun, start, train_run
from shardway.train.session import open_session

SHORT = ("train.steps=8", "optim.warmup=0 steps", "model.dropout=0.1")


def begin(directory: Path, number: int = 1, *, left_s: float | None = None, on: Ranks | None = None) -> Attempt:
    """A job has begun; it ends in so many seconds."""
    attempt = RunDir(directory).attempt(number)
    if on is None or on.is_first:
        attempt.make()
        now = time.time()
        attempt.write_started(AttemptStart("77", started=now, deadline=now + left_s if left_s is not None else 0.0))
    if on is not None:
        on.barrier()
    return attempt


def result_of(attempt: Attempt) -> Result:
    result = attempt.read_result()
    assert result is not None
    return result


def end_of_time_at(last: int, attempt: Attempt) -> Callable[[LiveRun, int], None]:
    """For `before_step`: while step `last` is under way, the clock of rank 0 comes near the deadline."""

    def look(run: LiveRun, step: int) -> None:
        watch = run._loop._stopping.deadline  # type: ignore[union-attr]
        if step == last and watch is not None:
            watch._clock = lambda: watch._at - 1.0

    return look


@ranks(2)
def test_a_deadline_stops_all_ranks_and_the_next_attempt_goes_on_bit_by_bit(rank: int, tmp_path: Path) -> None:
    """Rank 0's clock alone decides; there is no step more and none less than without a stop."""
    on, words = pool_ranks(), (*SHORT, *layout(1, 2))
    train_tiny(tmp_path / "through", on, *words)
    first = begin(tmp_path / "cut", left_s=3600.0, on=on)
    outcome = train_tiny(tmp_path / "cut", on, *words, before_step=end_of_time_at(3, first), attempt=first)
    on.barrier()
    result = result_of(first)
    assert (result.state, result.step, result.exit_code, result.by, result.job) == (
        Ending.DEADLINE, 3, 0, "rank 0", "77",
    )  # fmt: skip
    assert result.reason.startswith("deadline in 1.0 s, margin ")
    second = begin(tmp_path / "cut", 2, left_s=3600.0, on=on)
    train_tiny(tmp_path / "cut", on, *words, attempt=second)
    on.barrier()
    result = result_of(second)
    assert (result.state, result.step, result.reason) == (Ending.FINISHED, 8, "all 8 steps are done")
    if rank == 0:
        assert (outcome.state, outcome.step) == ("stopped", 3)
        (stopped,) = read_named(tmp_path / "cut", "stopped")
        assert stopped["ending"] == "deadline"
        assert RunDir(tmp_path / "cut").checkpoint_steps() == [3]
        assert read_column(tmp_path / "cut") == read_column(tmp_path / "through")


def test_the_clock_is_told_once_at_the_start(tmp_path: Path, quiet_threads: None) -> None:
    """With an estimate first; the next attempt knows how long the last save took."""
    first = begin(tmp_path, left_s=3600.0)
    train_tiny(tmp_path, lone_rank(), *SHORT, before_step=end_of_time_at(2, first), attempt=first)
    train_tiny(tmp_path, lone_rank(), *SHORT, attempt=begin(tmp_path, 2, left_s=3600.0))
    one, two = read_named(tmp_path, "deadline")
    assert "an estimate, since nothing was saved yet" in one["reason"]
    (took,) = (event["seconds"] for event in read_named(tmp_path, "saved"))
    assert f"the last save of an earlier attempt took {took:.1f} s" in two["reason"]
    assert (one["step"], two["step"]) == (0, 2)
    assert 3500.0 < one["left_s"] <= 3600.0
    assert two["margin_s"] == pytest.approx(2 * took + 30.0)


def test_a_deadline_that_has_passed_lets_one_step_be_taken(tmp_path: Path, quiet_threads: None) -> None:
    """So that a chain of attempts that are too short still comes to its end."""
    for number in (1, 2):
        attempt = begin(tmp_path, number, left_s=-5.0)
        train_tiny(tmp_path, lone_rank(), *SHORT, attempt=attempt)
        assert (result_of(attempt).state, result_of(attempt).step) == (Ending.DEADLINE, number)


def test_a_job_without_a_deadline_runs_to_its_end(tmp_path: Path, quiet_threads: None) -> None:
    attempt = begin(tmp_path)
    train_tiny(tmp_path, lone_rank(), *SHORT, attempt=attempt)
    assert result_of(attempt).state is Ending.FINISHED
    assert read_named(tmp_path, "deadline") == []


@ranks(2)
def test_a_validation_that_would_not_end_in_time_is_not_begun(rank: int, tmp_path: Path) -> None:
    """On all ranks, by the clock of rank 0; the next one is."""
    on, words = pool_ranks(), (*SHORT, "train.validate_every=2 steps")

    def slow_at_4(run: LiveRun, step: int) -> None:
        watch = run._loop._stopping.deadline  # type: ignore[union-attr]
        if watch is not None and step in (4, 5):
            watch._validation_s = 7200.0 if step == 4 else 0.1
            watch._passed = ""
            watch.is_near = lambda: False  # type: ignore[method-assign]

    attempt = begin(tmp_path, left_s=3600.0, on=on)
    train_tiny(tmp_path, on, *words, before_step=slow_at_4, attempt=attempt)
    if rank == 0:
        assert [event["step"] for event in read_named(tmp_path, "validation")] == [2, 6, 8]
        (skipped,) = read_named(tmp_path, "validation_skipped")
        assert skipped["step"] == 4
        assert skipped["reason"].startswith("deadline in ")


# --- stopped by somebody

ASKED = {
    "": (Ending.STOPPED, "the stop file asked for a stop"),
    "the loss is flat": (Ending.STOPPED, "the loss is flat"),
    "deadline: the scheduler sent USR2": (Ending.DEADLINE, "the scheduler sent USR2"),
    "preempted": (Ending.PREEMPTED, "preempted"),
}


@pytest.mark.parametrize("words", ASKED)
def test_the_stop_file_names_the_end(
    words: str, tmp_path: Path, quiet_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stops, "LOOK_EVERY_S", 0.0)

    def ask(run: LiveRun, step: int) -> None:
        if step == 3:
            run.directory.request_stop(words)

    attempt = begin(tmp_path, left_s=3600.0)
    outcome = train_tiny(tmp_path, lone_rank(), *SHORT, before_step=ask, attempt=attempt)
    result = result_of(attempt)
    assert (result.state, result.reason) == ASKED[words]
    assert (result.step, outcome.state, outcome.reason) == (3, "stopped", result.reason)
    assert not RunDir(tmp_path).stop_requested()


@pytest.mark.parametrize(
    ("words", "queued", "sent"),
    [("deadline: USR2", True, 0), ("deadline: USR2", False, 1), ("preempted", True, 0), ("the loss is flat", True, 1)],
)
def test_the_end_of_the_time_is_no_message_where_the_chain_goes_on(
    words: str, queued: bool, sent: int, tmp_path: Path, quiet_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stops, "LOOK_EVERY_S", 0.0)
    messages: list[str] = []
    monkeypatch.setattr(session, "notify", lambda *event: messages.append(event[2]) or [])
    attempt = begin(tmp_path, left_s=3600.0)
    following = RunDir(tmp_path).attempt(2)
    following.make()
    following.write_submission(Submission("slurm", "a1b2c3", job="102" if queued else ""))

    def ask(run: LiveRun, step: int) -> None:
        if step == 2:
            run.directory.request_stop(words)

    train_tiny(tmp_path, lone_rank(), *SHORT, "notify.webhook=HOOK", before_step=ask, attempt=attempt)
    assert messages == ["end"] * sent


def test_a_request_in_the_last_moment_holds_the_successor(tmp_path: Path, quiet_threads: None) -> None:
    """It comes after all ranks have agreed on the deadline, and before anything says how the attempt ended."""
    attempt = begin(tmp_path, left_s=3600.0)
    with open_tiny(tmp_path, lone_rank(), *SHORT, attempt=attempt) as run:
        save = loop.Loop._save

        def ask_while_saving(own: loop.Loop) -> None:
            save(own)
            run.directory.request_stop("no more of it")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loop.Loop, "_save", ask_while_saving)
            tell_steps(run, end_of_time_at(3, attempt))
            train_run(run)
    assert (result_of(attempt).state, result_of(attempt).reason) == (Ending.STOPPED, "no more of it")
    assert not RunDir(tmp_path).stop_requested()


def test_a_signal_is_a_stop_and_what_the_job_script_knows_of_it_wins(tmp_path: Path, quiet_threads: None) -> None:
    one = begin(tmp_path)
    train_tiny(tmp_path, lone_rank(), *SHORT, before_step=signal_at(2), attempt=one)
    assert (result_of(one).state, result_of(one).reason) == (Ending.STOPPED, "a signal asked for a stop")

    def preempt(run: LiveRun, step: int) -> None:
        signal_at(4)(run, step)
        if step == 4:
            run.directory.request_stop("preempted")

    two = begin(tmp_path, 2)
    train_tiny(tmp_path, lone_rank(), *SHORT, before_step=preempt, attempt=two)
    assert (result_of(two).state, result_of(two).step) == (Ending.PREEMPTED, 4)


# --- failed


def test_what_ended_a_rank_is_the_result(tmp_path: Path, quiet_threads: None) -> None:
    attempt = begin(tmp_path)
    with pytest.raises(Died):
        train_tiny(tmp_path, lone_rank(), *SHORT, before_step=die_at(2), attempt=attempt)
    result = result_of(attempt)
    assert (result.state, result.step, result.exit_code, result.failure) == (Ending.CRASHED, 2, 70, "Died")
    assert result.by == "rank 0"


def test_memory_that_is_gone_is_told_apart(tmp_path: Path, quiet_threads: None) -> None:
    attempt = begin(tmp_path)

    def run_out(run: LiveRun, step: int) -> None:
        if step == 2:
            raise MemoryError

    with pytest.raises(MemoryError):
        train_tiny(tmp_path, lone_rank(), *SHORT, before_step=run_out, attempt=attempt)
    assert (result_of(attempt).state, result_of(attempt).step) == (Ending.OUT_OF_MEMORY, 1)


@ranks(2)
def test_the_rank_with_the_cause_speaks(rank: int, tmp_path: Path) -> None:
    """Also where another one notices first that it has lost contact."""
    on = pool_ranks()
    attempt = begin(tmp_path, on=on)

    def fail(run: LiveRun, step: int) -> None:
        if step == 3 and rank == 0:
            raise LostContact("rank 0 lost contact with another rank during a step: closed")
        if step == 3:
            time.sleep(0.3)
            raise JobError("its disk is gone")

    with pytest.raises(JobError):
        train_tiny(tmp_path, on, *SHORT, before_step=fail, attempt=attempt)
    result = result_of(attempt)
    assert (result.state, result.by, result.step, result.failure) == (
        Ending.CRASHED, "rank 1", 2, "JobError: its disk is gone",
    )  # fmt: skip


def test_the_same_failure_of_two_attempts_compares_equal(
    tmp_path: Path, quiet_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(words_of_ranks, "CAUSE_WAIT_S", 0.0)
    told = []
    for number in (1, 2):
        attempt = begin(tmp_path, number)

        def fail(run: LiveRun, step: int, number: int = number) -> None:
            raise JobError(f"the file /scratch/{number}/x at 0x{number}f is {number} bytes long")

        with pytest.raises(JobError):
            train_tiny(tmp_path, lone_rank(), *SHORT, before_step=fail, attempt=attempt)
        told.append((result_of(attempt).failure, result_of(attempt).step))
    assert told == [("JobError: the file PATH at # is # bytes long", 0)] * 2


# --- a script that owns its loop


def test_a_script_in_a_job_trains_where_its_job_is_asked_to_stop(
    tmp_path: Path, quiet_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = begin(tmp_path / "runs/a")
    monkeypatch.setenv(VARIABLE, str(attempt.path))
    with start("run.device=cpu", "run.threads=1", directory=tmp_path / "elsewhere") as run:
        assert run.directory.path == tmp_path / "runs/a"
        assert run.session.attempt == attempt
    with pytest.raises(JobError), start("run.device=cpu", "run.threads=1", directory=tmp_path / "elsewhere"):
        raise JobError("its own loop broke")
    assert result_of(attempt).failure == "JobError: its own loop broke"


def test_a_mistake_before_the_ranks_start_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attempt = begin(tmp_path / "runs/a")
    monkeypatch.setenv(VARIABLE, str(attempt.path))
    with pytest.raises(Exception, match=r"train\.stps"), start("train.stps=5"):
        pass
    result = result_of(attempt)
    assert (result.state, result.exit_code, result.by) == (Ending.CRASHED, 2, "rank 0")


def test_the_estimate_before_a_save_follows_the_model(
    tmp_path: Path, quiet_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stops, "ESTIMATED_RATE", 1.0)
    train_tiny(tmp_path, lone_rank(), *SHORT, "train.steps=1", attempt=begin(tmp_path, left_s=3600.0))
    started: dict[str, Any] = read_named(tmp_path, "started")[0]
    (told,) = read_named(tmp_path, "deadline")
    assert told["margin_s"] == pytest.approx(2 * (12 * started["parameters"] + 1.0) + 30.0)


ALONE_UNDER_TORCHRUN = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "77",
}


@pytest.mark.parametrize("starts", [1, 2, 3])
def test_ranks_that_start_again_leave_the_word_to_the_last_start(
    starts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The word of the first would stand, and the job be one that crashed, though the run came to its end."""
    monkeypatch.setattr(session, "stop_with_parent", lambda: None)
    attempt = begin(tmp_path)
    told = {"TORCHELASTIC_RESTART_COUNT": str(starts - 1), "TORCHELASTIC_MAX_RESTARTS": "2"}
    environ = {**ALONE_UNDER_TORCHRUN, **told, VARIABLE: str(attempt.path)}
    with pytest.raises(UserError), open_session(ResolveRequest(tmp_path / "none.toml"), environ):
        pass
    result = attempt.read_result()
    assert (result and result.state) == (Ending.CRASHED if starts == 3 else None)
