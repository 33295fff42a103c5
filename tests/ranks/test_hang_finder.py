"""Who hangs, from heartbeats at one moment after another; the clock is set by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardway.ranks.hang import (
    NO_RANKS,
    ActivitySpan,
    Hang,
    HangFinder,
    HangTimeout,
    Sighting,
    SlowestRank,
    StoppedProcess,
    find_slowest,
    merge_slowest,
)
from shardway.ranks.heartbeat import Activity, HeartbeatEntry

LOOK_S = 0.25


class Ranks:
    """Ranks whose heartbeats a test turns, and their finder's looks."""

    def __init__(self, count: int) -> None:
        self.now = 1000.0
        self.hang_timeout = HangTimeout(start_s=600.0)
        self.finder = HangFinder(self.hang_timeout, longest_tick_s=2 * LOOK_S)
        self.heartbeats = {rank: HeartbeatEntry(1, 10 + rank, Activity.START, 0, self.now) for rank in range(count)}
        self.stopped: dict[int, StoppedProcess] = {}
        self.elsewhere = NO_RANKS

    def enter(self, activity: Activity, step: int, *ranks: int) -> None:
        """These ranks (none named: all) begin an activity now."""
        for rank in ranks or tuple(self.heartbeats):
            heartbeat = self.heartbeats[rank]
            self.heartbeats[rank] = replace(
                heartbeat, changes=heartbeat.changes + 1, activity=activity, step=step, since=self.now
            )

    def look(self, seconds: float = LOOK_S) -> Hang | None:
        """What the finder says after so long."""
        self.now += seconds
        seen = {
            rank: Sighting(heartbeat, self.stopped.get(rank, StoppedProcess.NONE))
            for rank, heartbeat in self.heartbeats.items()
        }
        return self.finder.look(seen, self.now, self.elsewhere)

    def train(self, steps: int, *before: Activity) -> None:
        """All ranks take steps, each longer than a look, and do these things before each, shorter than one."""
        for step in range(steps):
            for activity in before:
                self.enter(activity, step)
                assert self.look(0.1) is None
            self.enter(Activity.STEP, step)
            assert self.look(0.4) is None

    def wait_for_hang(self, most_s: float = 700.0) -> Hang:
        """Look until there is one."""
        for _ in range(int(most_s / LOOK_S)):
            if (hang := self.look()) is not None:
                return hang
        raise AssertionError("no hang was found")


def test_ranks_that_go_on_do_not_hang() -> None:
    ranks = Ranks(2)
    ranks.train(200)
    assert ranks.hang_timeout.usual_s(Activity.STEP) is not None


def test_the_rank_that_is_behind_is_to_blame() -> None:
    """It is in its step, while the others wait for it with their save."""
    ranks = Ranks(3)
    ranks.train(10)
    ranks.enter(Activity.STEP, 10)
    ranks.enter(Activity.SAVE, 11, 0, 2)
    before = ranks.now
    hang = ranks.wait_for_hang()
    assert (hang.ranks, hang.all_alike) == ((1,), False)
    assert ranks.now - before == pytest.approx(3 * 0.4 + 5.0, abs=3 * LOOK_S)
    assert hang.message == ("rank 1 did nothing for 6.2 s in a step after step 10 (more than 6.2 s means a hang)")


def test_who_waits_for_one_with_a_longer_timeout_does_not_hang() -> None:
    """Data may be late for a minute; that the others are in their step meanwhile is no hang of theirs."""
    ranks = Ranks(2)
    for _ in range(5):
        ranks.hang_timeout.observe(ActivitySpan(Activity.DATA), 0.1)
    ranks.train(10)
    ranks.enter(Activity.DATA, 10)
    ranks.enter(Activity.STEP, 10, 0)
    before = ranks.now
    assert ranks.wait_for_hang().ranks == (1,)
    assert ranks.now - before == pytest.approx(3 * 0.1 + 65.0, abs=3 * LOOK_S)


def test_a_step_that_one_rank_knows_to_be_repeated_is_the_same_place() -> None:
    ranks = Ranks(2)
    ranks.train(10)
    ranks.enter(Activity.STEP, 10)
    ranks.enter(Activity.REPEAT, 10, 0)
    assert ranks.wait_for_hang().ranks == (0, 1)


def test_where_all_are_at_one_place_all_are_named() -> None:
    ranks = Ranks(2)
    ranks.train(10)
    ranks.enter(Activity.STEP, 10)
    hang = ranks.wait_for_hang()
    assert (hang.ranks, hang.all_alike) == ((0, 1), True)
    assert hang.message.startswith("all ranks did nothing for 6.2 s in a step after step 10")


def test_a_rank_that_is_stopped_is_to_blame_wherever_it_is() -> None:
    ranks = Ranks(2)
    ranks.train(10)
    ranks.enter(Activity.STEP, 10)
    ranks.enter(Activity.SAVE, 11, 1)
    ranks.stopped = {1: StoppedProcess.RANK}
    hang = ranks.wait_for_hang()
    assert hang.ranks == (1,)
    assert "in a save after step 11, stopped by a signal (more than 5.0 s" in hang.message


def test_a_rank_whose_loader_process_is_stopped_is_not_given_the_time_of_slow_storage() -> None:
    ranks = Ranks(2)
    ranks.train(10, Activity.DATA)
    ranks.enter(Activity.STEP, 10, 0)
    ranks.enter(Activity.DATA, 10, 1)
    assert all(ranks.look() is None for _ in range(200))
    ranks.stopped = {1: StoppedProcess.LOADER}
    hang = ranks.wait_for_hang(1.0)
    assert hang.ranks == (1,)
    assert "while waiting for data after step 10, its loader process stopped by a signal (more than 5" in hang.message


def test_the_time_that_a_rank_has_waited_for_another_is_not_held_against_it() -> None:
    """Who was waited for (for data, say) has come as far, and now both take their time."""
    ranks = Ranks(2)
    ranks.train(10, Activity.DATA)
    ranks.enter(Activity.STEP, 10, 1)
    ranks.enter(Activity.DATA, 10, 0)
    assert all(ranks.look() is None for _ in range(100))
    ranks.enter(Activity.STEP, 10, 0)
    assert all(ranks.look() is None for _ in range(20))
    assert ranks.wait_for_hang(3.0).ranks == (0, 1)


def test_a_rank_in_its_script_may_keep_others_waiting_in_the_step() -> None:
    """It looks for the stop file there, on a file system that stands still."""
    ranks = Ranks(2)
    ranks.train(10, Activity.DATA, Activity.SCRIPT)
    ranks.enter(Activity.SCRIPT, 10)
    ranks.enter(Activity.STEP, 10, 1)
    assert all(ranks.look() is None for _ in range(200))
    assert ranks.wait_for_hang(20.0).ranks == (0,)


def test_ranks_that_wait_for_another_node_do_not_hang() -> None:
    """Those of the other node are a step behind, or one of them is stopped; then they catch up and nobody moves."""
    for waits_for in (SlowestRank((9, 3)), SlowestRank((10, 3), stopped=True)):
        ranks = Ranks(2)
        ranks.train(10)
        ranks.enter(Activity.STEP, 10)
        ranks.elsewhere = waits_for
        assert all(ranks.look() is None for _ in range(400))
        ranks.elsewhere = SlowestRank((10, 3))
        assert all(ranks.look() is None for _ in range(20))
        assert ranks.wait_for_hang(3.0).all_alike


def test_who_is_behind_the_other_nodes_is_to_blame() -> None:
    ranks = Ranks(2)
    ranks.train(10)
    ranks.enter(Activity.STEP, 10, 0)
    ranks.elsewhere = SlowestRank((10, 3))
    assert ranks.wait_for_hang(20.0).ranks == (1,)


def test_the_slowest_of_several_nodes() -> None:
    assert merge_slowest([]) == find_slowest({}) == NO_RANKS
    ahead, slowest = SlowestRank((4, 2)), SlowestRank((4, 1), stopped=True)
    assert merge_slowest([ahead, NO_RANKS, slowest]) == slowest
    assert merge_slowest([ahead, SlowestRank(None, stopped=True)]) == ahead


def test_a_first_step_has_the_timeout_of_a_start() -> None:
    """Also after ranks were started again, though others' steps are known by then."""
    ranks = Ranks(1)
    ranks.train(10)
    again = Ranks(1)
    again.finder = HangFinder(ranks.hang_timeout, longest_tick_s=2 * LOOK_S)
    again.enter(Activity.STEP, 5)
    before = again.now
    assert again.wait_for_hang().limit_s == 600.0
    assert again.now - before == pytest.approx(600.0, abs=3 * LOOK_S)


def test_an_observer_that_slept_accuses_nobody() -> None:
    """Ctrl-Z stops the agent with its ranks; when all go on, an hour has passed."""
    ranks = Ranks(2)
    ranks.train(10)
    ranks.enter(Activity.STEP, 10)
    assert ranks.look(3600.0) is None
    ranks.enter(Activity.STEP, 11)
    assert ranks.look() is None


def test_after_something_was_done_the_time_counts_anew() -> None:
    ranks = Ranks(1)
    ranks.train(10)
    ranks.enter(Activity.STEP, 10)
    ranks.wait_for_hang()
    ranks.finder.forgive()
    assert ranks.look() is None
    assert ranks.wait_for_hang(most_s=7.0).ranks == (0,)


def test_steps_shorter_than_a_look_teach_nothing_longer() -> None:
    ranks = Ranks(1)
    for step in range(0, 100, 10):
        for each in range(step, step + 10):
            ranks.now += 0.025
            ranks.enter(Activity.STEP, each)
        ranks.look(0.0)
    usual = ranks.hang_timeout.usual_s(Activity.STEP)
    assert usual is not None
    assert usual <= LOOK_S


def test_steps_between_two_looks_are_enough_to_know_them() -> None:
    """A rank that takes thousands in a second may hang in its first second."""
    ranks = Ranks(1)
    ranks.enter(Activity.STEP, 0)
    ranks.look()
    for step in range(100):
        ranks.now += 0.0025
        for activity in (Activity.DATA, Activity.SCRIPT, Activity.STEP):
            ranks.enter(activity, step)
    assert ranks.wait_for_hang(most_s=8.0).limit_s <= 3 * 2 * LOOK_S + 5.0


def test_a_run_that_resumes_has_not_taken_the_steps_before() -> None:
    """Between two looks its count of steps goes from none to that of its checkpoint."""
    ranks = Ranks(1)
    ranks.look()
    ranks.enter(Activity.LOAD, 0)
    for activity in (Activity.DATA, Activity.SCRIPT, Activity.STEP):
        ranks.enter(activity, 5000)
    ranks.look()
    assert ranks.hang_timeout.usual_s(Activity.STEP) is None


@given(st.lists(st.floats(0.01, 0.5), min_size=20, max_size=60))
def test_a_hang_is_found_in_time_and_not_before(times: list[float]) -> None:
    """Within three times the longest step and five seconds and what two looks take; never while steps go on."""
    ranks = Ranks(2)
    ranks.enter(Activity.STEP, 0)
    assert ranks.look() is None
    for step, seconds in enumerate(times, start=1):
        ranks.enter(Activity.STEP, step)
        assert ranks.look(seconds) is None
    ranks.enter(Activity.STEP, len(times) + 1)
    ranks.stopped = {1: StoppedProcess.RANK}
    before = ranks.now
    hang = ranks.wait_for_hang(most_s=20.0)
    assert hang.ranks == (1,)
    assert 5.0 <= ranks.now - before <= 3 * max(times) + 5.0 + 3 * LOOK_S
