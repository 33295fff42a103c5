"""What came of a run that was struck, from the records of its ranks and of the run that nothing happened to.

Pure. Times are monotonic seconds of one host. A life is one process of a rank, or one start of all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Record:
    """A step that a rank has done, with its loss and the samples that it took; `loss` is compared to the bit."""

    time: float
    rank: int
    step: int
    loss: float
    ids: tuple[int, ...]
    life: str


@dataclass(frozen=True)
class Verdict:
    """`trains_s`: until some rank trained again, `whole_s`: until all did; None where that never was.

    `differ`: steps of a rank whose loss is another than in the undisturbed run, or that are missing. `lost` and
    `twice`: samples that the weights have not seen, or once too often. `again`: steps that were done more than once.
    """

    trains_s: float | None
    whole_s: float | None
    again: int
    differ: int
    lost: int
    twice: int


def judge(records: Sequence[Record], undisturbed: Sequence[Record], struck: float) -> Verdict:
    """Compare a run with the one that nothing happened to; `struck` is when the fault was."""
    ranks = sorted({record.rank for record in undisturbed})
    back = [find_return([record for record in records if record.rank == rank], struck) for rank in ranks]
    known = [each for each in back if each is not None]
    wanted, found = find_course(undisturbed), find_course(records)
    used, meant = _count_samples(found), _count_samples(wanted)
    return Verdict(
        trains_s=min(known) - struck if known else None,
        whole_s=max(known) - struck if known and len(known) == len(ranks) else None,
        again=max((_count_repeated(records, rank) for rank in ranks), default=0),
        differ=sum(key not in found or found[key].loss != record.loss for key, record in wanted.items()),
        lost=(meant - used).total(),
        twice=(used - meant).total(),
    )


def find_course(records: Sequence[Record]) -> dict[tuple[int, int], Record]:
    """(rank, step) -> what was done last, which is what the weights at the end have come from."""
    return {(record.rank, record.step): record for record in sorted(records, key=lambda record: record.time)}


def find_return(records: Sequence[Record], struck: float) -> float | None:
    """When a rank trained again: the first step of the life that went on to the end, where that is a new one, else the
    end of its longest pause."""
    in_order = sorted(records, key=lambda record: record.time)
    before = {record.life for record in in_order if record.time <= struck}
    after = [record for record in in_order if record.time > struck]
    if not after:
        return None
    last = max(after, key=lambda record: (record.step, record.time)).life
    if last not in before:
        return next(record.time for record in after if record.life == last)
    times = [max((record.time for record in in_order if record.time <= struck), default=struck)]
    times += [record.time for record in after if record.life == last]
    return max(pairwise(times), key=lambda pair: pair[1] - pair[0])[1]


def count_orphaned(records: Sequence[Record], struck: float) -> int:
    """Steps that ranks from before have done since."""
    before = {record.life for record in records if record.time <= struck}
    return len({record.step for record in records if record.time > struck and record.life in before})


def _count_samples(course: Mapping[tuple[int, int], Record]) -> Counter[int]:
    return Counter(sample for record in course.values() for sample in record.ids)


def _count_repeated(records: Sequence[Record], rank: int) -> int:
    times = Counter(record.step for record in records if record.rank == rank)
    return sum(count > 1 for count in times.values())
