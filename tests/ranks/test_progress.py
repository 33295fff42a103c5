"""What a rank is busy with, and the times of it."""

from __future__ import annotations

from shardway.ranks.progress import Activity, Progress


class Clock:
    """A clock that is set by hand."""

    now = 100.0

    def __call__(self) -> float:
        """The time, in seconds."""
        return self.now


class Shown:
    """A page that remembers."""

    def __init__(self) -> None:
        self.entries: list[tuple[Activity, int, float]] = []

    def write(self, activity: Activity, step: int, now: float) -> None:
        """Remember."""
        self.entries.append((activity, step, now))


def test_every_second_belongs_to_one_activity() -> None:
    clock, page = Clock(), Shown()
    progress = Progress(page, clock, began=90.0)
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
    assert page.entries[1] == (Activity.STEP, 0, 105.0)
