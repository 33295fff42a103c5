"""The agent that leads and those that follow, on a store in memory and a clock that a test sets."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardway.ranks.failure import LaunchOutcome, RankFailure
from shardway.ranks.hang import NO_RANKS, SlowestRank
from shardway.ranks.rendezvous import (
    LOST_S,
    AgentState,
    Coordinator,
    FollowingAgent,
    Membership,
    News,
    Note,
    RendezvousMember,
    Unreachable,
    read_news,
    read_note,
    render,
)

KILLED = LaunchOutcome((RankFailure(1, 4711, -9),))


@dataclass
class StoreInMemory:
    """What was written, as text; `is_gone`: whoever keeps it is."""

    notes: dict[int, str] = field(default_factory=dict)
    news: str = ""
    is_gone: bool = False

    def write_note(self, node: int, note: Note) -> None:
        self._reach()
        self.notes[node] = render(note)

    def read_notes(self) -> list[Note | None]:
        self._reach()
        return [read_note(self.notes.get(node, "")) for node in range(4)]

    def write_news(self, news: News) -> None:
        self.news = render(news)

    def read_news(self) -> News | None:
        self._reach()
        return read_news(self.news)

    def _reach(self) -> None:
        if self.is_gone:
            raise Unreachable("gone")


@dataclass
class Scene:
    """One that leads and three that follow; `pass_time` lets those look that are awake."""

    awake: set[int] = field(default_factory=lambda: {0, 1, 2, 3})
    now: float = 0.0

    def __post_init__(self) -> None:
        self.store = StoreInMemory()
        self.coordinator = Coordinator(self.store, 0, 4, self.clock)  # type: ignore[arg-type]
        self.others = {node: FollowingAgent(self.store, node, self.clock) for node in (1, 2, 3)}  # type: ignore[arg-type]

    def clock(self) -> float:
        return self.now

    def pass_time(self, seconds: float) -> None:
        """In steps of half a second."""
        for _ in range(round(seconds * 2)):
            self.now += 0.5
            for node in sorted(self.awake, reverse=True):  # a look of the leader sees what the others have just said
                (self.coordinator if node == 0 else self.others[node])._beat()

    def run_ranks(self, *nodes: int) -> int:
        """Begin a start in which all nodes run their ranks; its number."""
        news = self.coordinator.begin(nodes, port=1)
        for node in nodes:
            self.say(node, AgentState.RUNNING, news.start)
        self.pass_time(1)
        return news.start

    def say(
        self,
        node: int,
        state: AgentState,
        start: int,
        outcome: LaunchOutcome | None = None,
        slowest: SlowestRank = NO_RANKS,
    ) -> None:
        (self.coordinator if node == 0 else self.others[node]).publish(state, start, slowest, outcome)


@pytest.fixture
def scene() -> Scene:
    scene = Scene()
    scene.pass_time(1)
    return scene


def test_those_that_are_there_and_have_no_ranks_are_gathered(scene: Scene) -> None:
    assert scene.coordinator.gather(10.0, lambda: False) == (0, 1, 2, 3)
    scene.say(2, AgentState.RUNNING, 1)
    scene.pass_time(1)
    assert scene.coordinator.find_free() == (0, 1, 3)
    scene.say(2, AgentState.ENDED, 1)
    scene.pass_time(1)
    assert scene.coordinator.find_free() == (0, 1, 2, 3)


def test_a_node_that_never_came_is_waited_for_and_one_that_was_lost_is_not(scene: Scene) -> None:
    late = Scene(awake={0, 1, 2})
    late.pass_time(1)
    assert late.coordinator._list_missing() == [3]
    scene.awake = {0, 1, 2}
    scene.pass_time(LOST_S + 1)
    assert scene.coordinator._list_missing() == []
    assert scene.coordinator.list_present() == (0, 1, 2)


def test_ranks_run_where_the_news_name_them(scene: Scene) -> None:
    scene.coordinator.begin((0, 1, 3), port=7)
    scene.pass_time(1)
    news = scene.others[1].await_order(0)
    assert news is not None
    assert (news.start, news.members, news.port) == (1, (0, 1, 3), 7)
    assert scene.others[3].await_order(0) == news
    assert 2 not in news.members


def test_a_failure_on_one_node_ends_the_start_on_all(scene: Scene) -> None:
    start = scene.run_ranks(0, 1, 2, 3)
    members: list[RendezvousMember] = [scene.coordinator, *scene.others.values()]
    assert not any(member.is_over(start) for member in members)
    scene.say(2, AgentState.FAILED, start)
    scene.pass_time(1)
    assert all(member.is_over(start) for member in members)


def test_a_hang_on_one_node_has_all_asked_and_ends_nothing_yet(scene: Scene) -> None:
    start = scene.run_ranks(0, 1, 2, 3)
    members: list[RendezvousMember] = [scene.coordinator, *scene.others.values()]
    scene.say(2, AgentState.HANGS, start, slowest=SlowestRank((7, 1)))
    assert not any(member.is_asked(start) for member in members)
    scene.pass_time(1)
    assert all(member.is_asked(start) and not member.is_over(start) for member in members)
    assert scene.coordinator.elsewhere == SlowestRank((7, 1))
    scene.say(2, AgentState.FAILED, start)
    scene.pass_time(1)
    assert all(member.is_asked(start) and member.is_over(start) for member in members)
    again = scene.run_ranks(0, 1)
    assert not any(member.is_asked(again) for member in members)


def test_ranks_that_end_well_end_nothing(scene: Scene) -> None:
    start = scene.run_ranks(0, 1)
    scene.say(1, AgentState.ENDED, start, LaunchOutcome())
    scene.pass_time(1)
    assert not scene.coordinator.is_over(start)
    scene.say(0, AgentState.ENDED, start, LaunchOutcome())
    scene.pass_time(1)
    assert scene.coordinator.await_end() == {0: LaunchOutcome(), 1: LaunchOutcome()}


def test_how_each_node_ended_is_told_and_who_was_lost(scene: Scene) -> None:
    start = scene.run_ranks(0, 1, 2)
    scene.awake = {0, 1}
    scene.say(1, AgentState.ENDED, start, KILLED)
    scene.say(0, AgentState.ENDED, start, LaunchOutcome())
    scene.pass_time(LOST_S + 1)
    ends = scene.coordinator.await_end()
    assert ends == {0: LaunchOutcome(), 1: KILLED, 2: None}


def test_a_coordinator_that_was_asleep_loses_no_node(scene: Scene) -> None:
    start = scene.run_ranks(0, 1)
    scene.now += 3600.0
    scene.pass_time(1)
    assert not scene.coordinator.is_over(start)
    assert scene.coordinator.list_present() == (0, 1, 2, 3)


@pytest.mark.parametrize("how", ["silent", "gone"])
def test_a_start_is_over_without_a_coordinator(scene: Scene, how: str) -> None:
    start = scene.run_ranks(0, 1)
    follow = scene.others[1]
    scene.awake.discard(0)
    scene.store.is_gone = how == "gone"
    for _ in range(3 if how == "gone" else round(LOST_S * 2) + 3):
        scene.pass_time(0.5)
        over = follow.is_over(start)
    assert over
    assert follow.is_alone()
    assert follow.await_order(start) is None
    assert follow.present == (0, 1, 2, 3)


def test_all_hear_the_exit_code(scene: Scene) -> None:
    scene.coordinator._report(code=4)
    scene.pass_time(1)
    news = scene.others[3].await_order(0)
    assert news is not None
    assert news.code == 4


def test_the_slowest_rank_of_all_nodes_is_known_to_all(scene: Scene) -> None:
    start = scene.run_ranks(0, 1)
    scene.say(0, AgentState.RUNNING, start, slowest=SlowestRank((7, 2)))
    scene.say(1, AgentState.RUNNING, start, slowest=SlowestRank((7, 1), stopped=True))
    scene.pass_time(1)
    scene.pass_time(0.5)
    assert scene.others[1].elsewhere == scene.coordinator.elsewhere == SlowestRank((7, 1), stopped=True)


def test_silence_grows_by_what_the_observer_lived_through() -> None:
    membership = Membership()
    membership.look({1: 5}, 0.0)
    membership.look({1: 5}, 1000.0)
    assert not membership.is_lost(1)
    for second in range(11):
        membership.look({1: 5}, 1000.0 + second)
    assert membership.is_lost(1)
    membership.look({1: 6}, 1011.0)
    assert not membership.is_lost(1)
    assert not membership.is_lost(2)


ACTS = st.lists(
    st.tuples(st.sampled_from(["sleep", "wake", "fail", "end", "wait"]), st.integers(1, 3), st.integers(1, 24)),
    max_size=12,
)


@settings(max_examples=60)
@given(ACTS)
def test_whatever_the_others_do_a_start_comes_to_an_end(acts: list[tuple[str, int, int]]) -> None:
    """Nodes sleep, wake, fail and end in any order. A start that is over stays over; nobody runs on in an old one; and
    once all that are awake have ended, the one that leads knows how, and can begin the next with them."""
    scene = Scene()
    scene.pass_time(1)
    start = scene.run_ranks(0, 1, 2, 3)
    was_over = False
    for act, node, halves in acts:
        if act == "sleep":
            scene.awake.discard(node)
        elif act == "wake":
            scene.awake.add(node)
        elif act == "fail":
            scene.say(node, AgentState.ENDED, start, KILLED)
        elif act == "end":
            scene.say(node, AgentState.ENDED, start, LaunchOutcome())
        scene.pass_time(halves / 2)
        assert scene.coordinator.is_over(start) or not was_over
        was_over = scene.coordinator.is_over(start)
        if was_over:
            scene.pass_time(0.5)  # the others hear it at their next look
            assert all(scene.others[each].is_over(start) for each in scene.awake - {0})
    for node in range(4):
        scene.say(node, AgentState.ENDED, start, LaunchOutcome())
    scene.pass_time(LOST_S + 2)
    ends = scene.coordinator.await_end()
    assert {node for node, outcome in ends.items() if outcome is None} <= {0, 1, 2, 3} - scene.awake
    free = scene.coordinator.find_free()
    assert set(free) == scene.awake
    assert scene.coordinator.begin(free, port=1).start == start + 1
