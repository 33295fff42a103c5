"""What records of ranks show: who has not entered what the others wait in. The records are made up here."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardway.ranks.evidence import (
    CIRCLE,
    SHOWN,
    SILENT,
    Call,
    CallTimeline,
    HangEvidence,
    Record,
    RecordedGroup,
    explain_collectives,
    make_group,
    merge_evidence,
    render_ranks,
)

ALL = make_group("gloo", "0", "", (0, 1, 2, 3))
LEFT, RIGHT = make_group("gloo", "1", "tp", (0, 1)), make_group("gloo", "2", "tp", (2, 3))
ACROSS = make_group("gloo", "3", "dp", (1, 2))


def call(number: int, kind: str = "all_reduce", size: int = 4, *, ended: bool = True) -> Call:
    return Call(number, kind, size, str(size), "float32", ended)


def done(last: int) -> list[Call]:
    """Calls that are over, the last one of that number."""
    return [call(number) for number in range(1, last + 1)]


def inside(last: int) -> list[Call]:
    """The same, and the last one is not over."""
    return [*done(last - 1), call(last, ended=False)]


def hear(ranks: Mapping[int, Mapping[RecordedGroup, Sequence[Call]]], *silent: int, whole: bool = True) -> HangEvidence:
    records = (
        Record(rank, tuple(CallTimeline(team, tuple(calls)) for team, calls in lines.items()), whole)
        for rank, lines in ranks.items()
    )
    return HangEvidence(tuple(records), silent)


def test_who_has_not_entered_what_the_others_are_in() -> None:
    collectives = hear({rank: {ALL: done(7) if rank == 2 else inside(8)} for rank in range(4)})
    assert explain_collectives(collectives) == (
        "ranks 0, 1 and 3 are in all_reduce of 4 float32, number 8 of ranks 0 to 3 (gloo), which rank 2 has not "
        "entered (the last one there was all_reduce of 4 float32, number 7)",
    )


def test_several_that_are_behind_with_what_each_entered_last() -> None:
    calls = {0: inside(8), 1: done(5), 2: done(7), 3: done(5)}
    (told,) = explain_collectives(hear({rank: {ALL: calls[rank]} for rank in range(4)}))
    assert told == (
        "rank 0 is in all_reduce of 4 float32, number 8 of ranks 0 to 3 (gloo), which ranks 1 to 3 have not entered "
        "(ranks 1 and 3: the last one there was all_reduce of 4 float32, number 5; "
        "rank 2: the last one there was all_reduce of 4 float32, number 7)"
    )


def test_who_runs_ahead_waits_in_the_first_that_is_not_over() -> None:
    """Ranks on devices have begun many while they wait in one."""
    ahead = [*done(4), *(call(number, ended=False) for number in range(5, 9))]
    (told,) = explain_collectives(hear({0: {LEFT: ahead}, 1: {LEFT: done(4)}}))
    assert told.startswith("rank 0 is in all_reduce of 4 float32, number 5 of group tp of ranks 0 and 1 (gloo)")


def test_of_several_that_are_not_over_the_first_is_told() -> None:
    """Who sends a broadcast is done with it before the others have it."""
    team = make_group("gloo", "5", "", (0, 1, 2))
    calls = {
        0: [*done(4), call(5, "broadcast"), call(6, ended=False)],
        1: [*done(4), call(5, "broadcast", ended=False)],
    }
    (told,) = explain_collectives(hear({0: {team: calls[0]}, 1: {team: calls[1]}, 2: {team: done(4)}}))
    assert told.startswith("rank 1 is in broadcast of 4 float32, number 5 of ranks 0 to 2 (gloo), which rank 2 has not")


def test_nothing_to_say_where_nobody_waits() -> None:
    assert explain_collectives(HangEvidence()) == ()
    assert explain_collectives(hear({rank: {ALL: done(7 + rank)} for rank in range(4)})) == ()


def test_who_is_waited_for_by_way_of_others_is_named_alone() -> None:
    """0 waits for 1 in one group, 1 for 2 in another, 2 for 3 in a third: it is 3 that waits for nobody."""
    collectives = hear(
        {
            0: {LEFT: inside(3)},
            1: {LEFT: done(2), ACROSS: inside(9)},
            2: {ACROSS: done(8), RIGHT: inside(5)},
            3: {RIGHT: done(4)},
        }
    )
    (told,) = explain_collectives(collectives)
    assert told.startswith("rank 2 is in")
    assert "which rank 3 has not entered" in told


def test_a_circle_of_waits_accuses_nobody_alone() -> None:
    other = replace(LEFT, name="9", words="cp")
    collectives = hear({0: {LEFT: inside(3), other: done(1)}, 1: {LEFT: done(2), other: inside(2)}})
    told = explain_collectives(collectives)
    assert len(told) == SHOWN
    assert "which rank 1 has not entered" in told[0]
    assert "which rank 0 has not entered" in told[1]
    assert told[2] == CIRCLE


def test_who_did_not_answer() -> None:
    collectives = hear({rank: {ALL: inside(8)} for rank in range(3)}, 3)
    told = f"ranks 0 to 2 are in all_reduce of 4 float32, number 8 of ranks 0 to 3 (gloo), rank 3 {SILENT}"
    assert explain_collectives(collectives) == (told,)
    assert explain_collectives(hear({0: {ALL: done(8)}}, 1, 2)) == (f"ranks 1 and 2 {SILENT}",)


def test_a_rank_that_made_no_group_yet_has_entered_nothing() -> None:
    collectives = hear({0: {LEFT: inside(1)}, 1: {}})
    (told,) = explain_collectives(collectives)
    assert told.endswith("which rank 1 has not entered (none there yet)")


def test_what_was_overwritten_accuses_nobody() -> None:
    collectives = hear({0: {LEFT: inside(9)}, 1: {ALL: done(50)}}, whole=False)
    (told,) = explain_collectives(collectives)
    assert told.endswith(
        "number 9 of group tp of ranks 0 and 1 (gloo), what rank 1 entered there is not known any more"
    )


def test_who_has_left_a_group_still_counts_in_it() -> None:
    """Its ranks are not known any more to who has left it; its calls are."""
    gone = replace(LEFT, spans=())
    (told,) = explain_collectives(hear({0: {LEFT: inside(9)}, 1: {gone: done(8)}}, whole=False))
    assert "which rank 1 has not entered (the last one there was all_reduce of 4 float32, number 8)" in told


def test_all_are_in_and_it_is_not_over() -> None:
    (told,) = explain_collectives(hear({rank: {LEFT: inside(6)} for rank in (0, 1)}))
    assert told.endswith("which all have entered and which is not over: look at the network and the devices")


def test_a_rank_in_a_transfer_is_told_with_it() -> None:
    collectives = hear({0: {LEFT: inside(6)}, 1: {LEFT: done(5)}})
    records = (collectives.records[0], replace(collectives.records[1], transfer="recv from rank 3"))
    (told,) = explain_collectives(HangEvidence(records))
    assert told.endswith("number 5), rank 1 is in recv from rank 3")


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (call(6, "all_gather"), "rank 0 in all_reduce of 4 float32; rank 1 in all_gather of 4 float32"),
        (call(6, size=5), "rank 0 in all_reduce of 4 float32; rank 1 in all_reduce of 5 float32"),
        (replace(call(6), dtype="int64"), "rank 0 in all_reduce of 4 float32; rank 1 in all_reduce of 4 int64"),
    ],
    ids=["kind", "size", "dtype"],
)
def test_different_collectives_under_one_number_are_a_mistake(other: Call, words: str) -> None:
    collectives = hear({0: {LEFT: inside(6)}, 1: {LEFT: [*done(5), replace(other, ended=False)]}})
    assert explain_collectives(collectives) == (
        "the ranks do not call the same collectives (a mistake in the code): "
        f"of group tp of ranks 0 and 1 (gloo) at number 6 {words}",
    )


def test_sizes_may_differ_where_ranks_put_in_what_they_have() -> None:
    """An exchange of tokens; a shape that is another, with as many elements, goes together as well."""
    own = {rank: [*done(5), call(6, "all_to_all", 4 + rank, ended=False)] for rank in (0, 1)}
    assert "mistake" not in "".join(explain_collectives(hear({rank: {LEFT: own[rank]} for rank in (0, 1)})))
    shaped = {0: call(1, size=6), 1: replace(call(1, size=6), sizes="2x3")}
    assert explain_collectives(hear({rank: {LEFT: [shaped[rank]]} for rank in (0, 1)})) == ()


def test_no_more_than_a_person_reads() -> None:
    teams = [make_group("gloo", str(number), "", (number, 99)) for number in range(40)]
    ranks = {number: {teams[number]: inside(3)} for number in range(40)}
    collectives = hear({**ranks, 99: {team: done(2) for team in teams}}, 100)
    told = explain_collectives(collectives)
    assert len(told) == SHOWN
    assert told[-1] == f"rank 100 {SILENT}"


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ((3,), "rank 3"),
        ((0, 2), "ranks 0 and 2"),
        ((0, 1), "ranks 0 and 1"),
        ((2, 1, 0), "ranks 0 to 2"),
        ((0, 1, 2, 3, 5, 9, 10, 11), "ranks 0 to 3, 5 and 9 to 11"),
    ],
)
def test_ranks_as_people_say_them(ranks: tuple[int, ...], words: str) -> None:
    assert render_ranks(ranks) == words


def test_what_several_nodes_heard_is_put_together() -> None:
    one, other = hear({0: {ALL: inside(2)}}, 1), hear({0: {ALL: done(1)}}, 1).shift(2)
    merged = merge_evidence([other, one])
    assert [record.rank for record in merged.records] == [0, 2]
    assert merged.silent == (1, 3)
    assert "which rank 2 has not entered" in explain_collectives(merged)[0]


# --- worlds that are made up


@dataclass
class World:
    """Ranks that run the same program over groups, each until it waits for another or stops by itself."""

    program: list[RecordedGroup]
    stops: dict[int, int]
    """By rank: before which of its own calls it hangs."""
    at: dict[int, int] = field(default_factory=dict)

    def own(self, rank: int) -> list[RecordedGroup]:
        return [team for team in self.program if rank in team.ranks]

    def has_entered(self, rank: int, team: RecordedGroup, number: int) -> bool:
        """Whether a rank has come to the call of this number of a group."""
        return self.own(rank)[: self.at[rank]].count(team) >= number

    def run(self) -> None:
        """Until nothing moves: a rank enters its next call once the one that it is in is over."""
        self.at = dict.fromkeys(range(6), 0)
        moved = True
        while moved:
            moved = False
            for rank in self.at:
                if self.is_free(rank) and self.at[rank] < len(self.own(rank)) and self.at[rank] != self.stops.get(rank):
                    self.at[rank] += 1
                    moved = True

    def is_free(self, rank: int) -> bool:
        """Whether the call that a rank is in is over: all of its group have entered it."""
        if not self.at[rank]:
            return True
        entered = self.own(rank)[: self.at[rank]]
        team, number = entered[-1], entered.count(entered[-1])
        return all(self.has_entered(other, team, number) for other in team.ranks)

    def record(self, rank: int) -> Record:
        entered = self.own(rank)[: self.at[rank]]
        counts: dict[RecordedGroup, list[Call]] = {}
        for index, team in enumerate(entered):
            calls = counts.setdefault(team, [])
            calls.append(call(len(calls) + 1, ended=index < len(entered) - 1 or self.is_free(rank)))
        return Record(rank, tuple(CallTimeline(team, tuple(calls)) for team, calls in counts.items()))


@st.composite
def worlds(draw: st.DrawFn) -> World:
    members = st.sets(st.integers(0, 5), min_size=2).map(lambda ranks: tuple(sorted(ranks)))
    teams = [
        make_group("gloo", str(name), "", ranks)
        for name, ranks in enumerate(draw(st.lists(members, min_size=1, max_size=4)))
    ]
    world = World(draw(st.lists(st.sampled_from(teams), min_size=1, max_size=14)), {})
    hung = draw(st.sets(st.integers(0, 5), min_size=1, max_size=2))
    world.stops = {rank: draw(st.integers(0, len(world.own(rank)))) for rank in hung}
    world.run()
    return world


@given(worlds(), st.randoms())
def test_whoever_is_named_first_is_one_that_hangs(world: World, dice: random.Random) -> None:
    """All ranks run the same program; those that hang keep others waiting, directly or by way of others. The first
    sentence names one that hangs as not having entered, and none that only waits, whatever the order of the records."""
    records = [world.record(rank) for rank in range(6)]
    dice.shuffle(records)
    told = explain_collectives(HangEvidence(tuple(records)))
    waiting = {rank for rank in range(6) if not world.is_free(rank)}
    if not waiting:
        assert told == ()
        return
    assert " not entered (" in told[0]
    named = told[0].split(", which ")[1].split(" ha")[0]
    stuck = {rank for rank, at in world.stops.items() if world.at[rank] == at and rank not in waiting}
    assert named in {render_ranks(ranks) for ranks in ([*stuck], *([one] for one in stuck))}
    assert told == explain_collectives(HangEvidence(tuple(sorted(records, key=lambda record: record.rank))))


@given(worlds(), st.sets(st.integers(0, 5), min_size=1))
def test_nobody_is_accused_for_silence(world: World, silent: set[int]) -> None:
    """Whoever did not answer is told as such, and never as not having entered."""
    records = tuple(world.record(rank) for rank in range(6) if rank not in silent)
    told = explain_collectives(HangEvidence(records, tuple(silent)))
    assert any(SILENT in each for each in told)
    for rank in silent:
        assert not any(f"which rank {rank} has not entered" in each for each in told)
