"""What a rank is busy with, and the times of it."""

from __future__ import annotations

from shardway.ranks.heartbeat import Activity, Progress


class Clock:
    """A clock that is set by hand."""

    now = 100.0

    def __call__(self) -> float:
        """The time, in seconds."""
        return self.now


class Shown:
    """A heartbeat that remembers."""

    def __init__(self) -> None:
        self.entries: list[tuple[Activity, int, float]] = []

    def write(self, activity: Activity, step: int, now: float) -> None:
        """Remember."""
        self.entries.append((activity, step, now))


def test_every_second_belongs_to_one_activity() -> None:
    clock, heartbeat = Clock(), Shown()
    progress = Progress(heartbeat, clock, process_start=90.0)
    for activity, step, seconds in ((Activity.LOAD, 0, 5.0), (Activity.STEP, 0, 2.5), (Activity.SAVE, 1, 1.0)):
        progress.enter(activity, step)
        clock.now += seconds
    progress.enter(Activity.STEP, 1)
    clock.now += 4.0
    spent = progress.spent()
    assert {activity: seconds for activity, seconds in spent.items() if seconds} == {
        Activity.START: 10.0,
        Activity.LOAD: 5.0,
        Activity.STEP: 6.5,
        Activity.SAVE: 1.0,
    }
    assert sum(spent.values()) == clock.now - 90.0
    assert heartbeat.entries[1] == (Activity.STEP, 0, 105.0)


def test_steps_that_were_done_before_are_repeated() -> None:
    clock = Clock()
    progress = Progress(clock=clock)
    progress.reached = 2
    for step in range(3):
        progress.take_step(step)
        clock.now += 1.0
    assert progress.spent()[Activity.REPEAT] == 2.0
    assert progress.spent()[Activity.STEP] == 1.0


def test_a_record_tells_of_a_step_under_way() -> None:
    clock = Clock()
    progress = Progress(clock=clock, process_start=99.0)
    progress.take_step(0)
    clock.now += 3.0
    progress.enter(Activity.SCRIPT, 0)
    assert progress.as_facts() == {"spent": {"start": 1.0, "step": 3.0}}
    progress.take_step(1)
    clock.now += 0.5
    assert progress.as_facts() == {"spent": {"start": 1.0, "step": 3.5}, "unfinished_s": 0.5}


def test_the_numbers_of_activities_stay() -> None:
    assert [activity.name for activity in sorted(Activity)] == (
        ["START", "LOAD", "DATA", "STEP", "REPEAT", "VALIDATE", "SAVE", "END", "SCRIPT", "SAMPLE"]
    )
    assert [int(activity) for activity in Activity] == list(range(10))
