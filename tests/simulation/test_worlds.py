"""The lease and the policy of restarts, in a world where everything goes wrong that a seed can think of.

A seed that fails prints its schedule, and goes the same way again: `tell(SEED, WHOLE, Workers())`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from broken import Flagged, Unconfirmed, Unsure, watch_by_dates
from schedule import Story, draw, tell
from training import Plan
from world import Workers

from shardway.rundir import lease
from shardway.rundir.lease import LeaseTimes

FEW, MANY, MOST = 60, 160, 2000
WHOLE = Plan()


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    """Threads for all worlds of this module."""
    found = Workers()
    yield found
    found.end()


def test_whatever_happens_there_is_one_writer_and_the_run_ends(workers: Workers) -> None:
    records = [tell(seed, WHOLE, workers) for seed in range(FEW)]
    assert sum(max(record.claimed) for record in records) > 2 * FEW
    assert all(record.commits[-1].step == WHOLE.steps for record in records)


def test_whatever_happens_to_many_runs(workers: Workers) -> None:
    for seed in range(FEW, MANY):
        tell(seed, WHOLE, workers)


@pytest.mark.exhaustive
def test_whatever_happens_to_most_runs(workers: Workers) -> None:
    for seed in range(MANY, MOST):
        tell(seed, WHOLE, workers)


def test_a_seed_goes_the_same_way_again(workers: Workers) -> None:
    logs = []
    for _ in range(2):
        story = Story(7, WHOLE, workers)
        story.run()
        logs.append(story.world.log)
    assert logs[0] == logs[1]
    assert len(logs[0]) > 10


def find_break(workers: Workers, plan: Plan, seeds: range) -> str:
    """What the first of these seeds tells that breaks; empty where none does."""
    for seed in seeds:
        try:
            tell(seed, plan, workers)
        except AssertionError as error:
            return str(error)
    return ""


def test_a_holder_that_never_looks_commits_beside_another(workers: Workers) -> None:
    told = find_break(workers, replace(WHOLE, make_lease=Unconfirmed), range(5, 40))
    assert "had begun to load" in told.splitlines()[0]
    schedule = [fault.render() for fault in draw(int(told.split(":")[0].removeprefix("seed "))).faults]
    assert all(line in told for line in schedule)


def test_a_look_alone_leaves_the_moment_before_the_rename(workers: Workers) -> None:
    assert "had begun to load" in find_break(workers, replace(WHOLE, fences=False), range(15, 60))


def test_a_look_that_is_a_while_old_is_not_enough_either(workers: Workers) -> None:
    plan = replace(WHOLE, make_lease=Flagged, fences=False)
    assert "had begun to load" in find_break(workers, plan, range(40))


def test_a_holder_that_does_not_doubt_itself_writes_events_beside_another(workers: Workers) -> None:
    assert "wrote an event" in find_break(workers, replace(WHOLE, make_lease=Unsure), range(100, 800))


def test_a_watch_that_is_shorter_than_a_beat_overtakes_the_living(workers: Workers) -> None:
    assert "was overtaken while it lived" in find_break(workers, replace(WHOLE, terms=LeaseTimes(ttl_s=1.0)), range(40))


def test_dates_of_two_hosts_overtake_the_living(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "watch", watch_by_dates)
    assert "was overtaken while it lived" in find_break(workers, WHOLE, range(60))
