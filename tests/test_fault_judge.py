"""How the bench that strikes other tools judges a run: `bench/faults/judge.py` and the table of its rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from outside import modules_of

with modules_of("bench/faults"):
    from judge import Record, count_orphaned, find_return, judge
    from peer_rows import Row, render

STEPS = 6


def life(name: str, first: int, last: int, begin: float, ranks: Sequence[int] = (0, 1)) -> list[Record]:
    """A step a second from `begin` on; the loss follows from rank and step."""
    return [
        Record(begin + step - first, rank, step, 10.0 * rank + step, (2 * step + rank,), name)
        for step in range(first, last + 1)
        for rank in ranks
    ]


UNDISTURBED = life("a", 1, STEPS, 0.0)


def test_ranks_that_start_again_do_steps_again_and_lose_nothing() -> None:
    verdict = judge([*life("b", 1, 4, 0.0), *life("c", 3, STEPS, 10.0)], UNDISTURBED, struck=3.5)
    assert (verdict.trains_s, verdict.whole_s) == (6.5, 6.5)
    assert (verdict.again, verdict.differ, verdict.lost, verdict.twice) == (2, 0, 0, 0)


def test_another_loss_is_seen_in_the_steps_that_count() -> None:
    wrong = [replace(record, loss=record.loss + 1e-12) for record in life("c", 3, STEPS, 10.0)]
    assert judge([*life("b", 1, 4, 0.0), *wrong], UNDISTURBED, struck=3.5).differ == 8
    right_after_all = [*life("b", 1, 4, 0.0), *wrong, *life("d", 3, STEPS, 20.0)]
    assert judge(right_after_all, UNDISTURBED, struck=3.5).differ == 0


def test_a_rank_that_goes_on_alone_loses_the_samples_of_the_other() -> None:
    """Rank 0 has a pause and goes on; rank 1 is new and comes back later."""
    alone = [*life("b", 1, 2, 0.0), *life("b", 3, STEPS, 7.0, [0]), *life("c", 5, STEPS, 9.0, [1])]
    verdict = judge(alone, UNDISTURBED, struck=1.5)
    assert (verdict.trains_s, verdict.whole_s) == (5.5, 7.5)
    assert (verdict.lost, verdict.twice, verdict.again) == (2, 0, 0)
    gone = judge([*life("b", 1, 2, 0.0), *life("b", 3, STEPS, 7.0, [0])], UNDISTURBED, struck=1.5)
    assert (gone.whole_s, gone.lost) == (None, 4)


def test_a_sample_that_stands_for_another_is_lost_and_twice() -> None:
    course = [replace(record, ids=(2,)) if record.step == 2 else record for record in UNDISTURBED]
    verdict = judge(course, UNDISTURBED, struck=0.5)
    assert (verdict.lost, verdict.twice) == (2, 2)


def test_a_rank_without_a_step_since_has_not_come_back() -> None:
    assert find_return(life("b", 1, 2, 0.0), struck=5.0) is None


def test_steps_of_ranks_from_before_are_orphaned() -> None:
    assert count_orphaned([*life("b", 1, 5, 0.0), *life("c", 2, 4, 3.0)], struck=2.5) == 2


def test_the_table_tells_median_and_most_and_what_differed() -> None:
    row = Row("one", "killed", 0, "rank 1", 0.5, 2.0, 2.0, 4, 0, 0, 0, 2, [], True, "", "")
    worse = replace(row, noticed_s=None, trains_s=6.0, whole_s=9.0, differ=3, lost=8, by_hand=["end it, start again"])
    line = render([row, worse]).splitlines()[-1]
    assert line == (
        "| killed | one | 2 | 0.5, 1 x not | 4.0 (most 6.0), both ranks 9.0 | 4 "
        "| 1 x: yes; 1 x: no, 8 samples lost | 2 | 1 x: -; 1 x: end it, start again |"
    )
