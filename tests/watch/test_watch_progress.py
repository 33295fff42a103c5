from __future__ import annotations

import pytest
from watch_events import event, started, step

from shardway.rundir.events import Event
from shardway.watch.progress import RunProgress


def _progress(*events: Event) -> RunProgress:
    progress = RunProgress()
    for each in events:
        progress.update(each)
    return progress


def test_before_two_steps_the_time_left_is_from_the_first() -> None:
    progress = _progress(started(total_steps=11), step(1, 5.0, seconds=2.0))
    assert progress.seconds_left == 20.0


@pytest.mark.parametrize(
    "events",
    [
        [],
        [started()],
        [started(total_steps=None), step(1, 1.0)],
        [started(), step(1, 1.0, seconds=None)],
        [started(), step(1, 1.0), event("stopped", 1, 2.0, reason="")],
    ],
)
def test_time_left_is_unknown(events: list[Event]) -> None:
    assert _progress(*events).seconds_left is None


def test_pace_and_speed_are_of_the_last_attempt() -> None:
    progress = _progress(
        started(),
        step(1, 1.0, tokens_per_s=1.0),
        step(2, 2.0, tokens_per_s=1.0),
        started(step=2, at=100.0, total_steps=10),
        step(3, 110.0, tokens_per_s=7.0),
        step(4, 113.0, tokens_per_s=9.0),
    )
    assert progress.seconds_left == 6 * 3.0
    assert progress.typical("tokens_per_s") == 8.0


def test_earliest_of_equal_validations_is_best() -> None:
    losses = {10: 2.0, 20: 1.0, 30: float("nan"), 40: 1.0}
    progress = _progress(started(), *(event("validation", at, at, loss=loss) for at, loss in losses.items()))
    assert progress.best_validation is not None
    assert progress.best_validation.step == 20


def test_events_without_a_start_are_an_attempt_of_their_own() -> None:
    progress = _progress(step(7, 1.0), step(8, 2.0))
    assert (progress.step, progress.total_steps, len(progress.attempts)) == (8, None, 1)


def test_faults_and_endings_belong_to_their_attempt() -> None:
    progress = _progress(
        started(),
        step(5, 1.0),
        event("fault", 5, 1.5, kind="JobError", message="rank 1 died", exit_code=4),
        event("failed", 5, 1.6, reason="rank 1 died"),
        started(step=0, at=9.0),
    )
    first, second = progress.attempts
    assert first.ending is not None
    assert (first.ending.state, first.step, [fault.exit_code for fault in first.faults]) == ("failed", 5, [4])
    assert (second.ending, second.step, second.faults) == (None, 0, [])
