"""The ledger: which samples each step of a run had, and where a sample comes again.

Invariants:
- A step that was taken is answered from what the run wrote: the ids themselves with data.record_ids, or its position.
- A step to come is answered from the order, which follows from the run file alone; a run that rolls back later takes
  others.
- Steps that were undone by a rollback or a restart do not count.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from shardway.batch_ramp import BatchRamp
from shardway.data.open import open_described, order_of
from shardway.data.order import Ids, Skips
from shardway.data.sources.base import DataSource, StreamSource, locate_sample
from shardway.errors import UserError
from shardway.rundir.directory import RunDir
from shardway.runfile.schema import RunFile, read_skips

SPLIT = "data_split_by_rank"
"""The event of a run whose data in sequence give each rank samples of its own."""


@dataclass(frozen=True)
class StepSamples:
    """The samples of one step, in the order of the global batch, and where each lies. `taken`: whether the run took
    it."""

    step: int
    ids: list[int]
    sources: list[str]
    taken: bool

    def as_json(self) -> dict[str, Any]:
        """As `shardway data at --json` prints it."""
        return asdict(self)


@dataclass(frozen=True)
class SampleLedger:
    """The samples of a run: `values` of its resolved run file, `source` what it trains on. Without a source (`why`) its
    samples have only the numbers that were recorded."""

    directory: RunDir
    values: RunFile
    source: DataSource | StreamSource | None
    why: str = field(default="", kw_only=True)

    def at(self, step: int) -> StepSamples:
        """The samples of a step. Raises UserError if nothing says which."""
        self._check_numbers()
        taken = step in self._taken
        ids = self._recorded.get(step, []) if taken else []
        ids = ids or self._compute(step).tolist()
        return StepSamples(step, ids, [self.locate(number) for number in ids], taken)

    def where(self, sample: int) -> tuple[list[int], int | None]:
        """The steps that had a sample, and the next that will have it; None if it does not come again, or that is not
        known. Raises UserError for a number that no sample has, or if nothing was recorded of a dataset of a script."""
        self._check_numbers()
        if self.source is None and self._recorded:
            return [step for step, ids in self._recorded.items() if sample in ids], None
        order = self._order
        if not 0 <= sample < order.samples:
            raise UserError(f"there is no sample {sample}\n  allowed: 0 to {order.samples - 1}")
        steps, positions = list(self._taken), list(self._taken.values())  # both rise
        done = []
        for position in order.find_positions(sample, 0):
            place = bisect_right(positions, position) - 1
            if not positions or position >= self._find_end(steps[-1]):
                break
            if place >= 0 and position < self._find_end(steps[place]) and not self._is_skipped(position):
                done.append(steps[place])
        return done, self._find_next(sample, max(self._taken, default=0))

    def _check_numbers(self) -> None:
        """Raise UserError if samples in sequence have numbers on each rank alone."""
        if isinstance(self.source, StreamSource) and any(each["event"] == SPLIT for each in self.directory.events()):
            raise UserError(
                f"{self.directory.path}: {self.source.name} gives each rank samples of its own, so a sample has no "
                "number that holds for all ranks\n  to do: let it give the same samples on every rank, which a run "
                "shares over the ranks"
            )

    def locate(self, sample: int) -> str:
        """Where a sample lies."""
        if self.source is None:
            return f"sample {sample} {self.why or 'of the dataset of the script'}"
        return locate_sample(self.source, sample)

    @property
    def _order(self) -> Any:
        if self.source is None:
            raise UserError(
                f"{self.directory.path}: the samples of this step are not known: the run has a dataset of a script, "
                "and only steps with data.record_ids = true say which they had\n"
                "  to do: set data.record_ids = true in the next run"
            )
        return _SequenceOrder() if isinstance(self.source, StreamSource) else order_of(self.values, self.source)

    @cached_property
    def _skips(self) -> Skips:
        left_out = (each.span for each in self.directory.left_out.read())
        return Skips(read_skips([*self.values.data.skip, *left_out]))

    @cached_property
    def _ramp(self) -> BatchRamp:
        """The samples of a step, by the number of its first kept position."""
        return self._skips.number_ramp(self.values.train.batch)

    @cached_property
    def _steps(self) -> list[dict[str, Any]]:
        return [event for event in self.directory.events() if event["event"] == "step"]

    @cached_property
    def _taken(self) -> dict[int, int]:
        """The position of each step that counts."""
        first = self.values.train.batch.find_start
        return {
            event["step"]: event["position"] if "position" in event else first(event["step"] - 1)
            for event in self._steps
        }

    @cached_property
    def _sizes(self) -> dict[int, int]:
        """The samples of each step that counts."""
        sizes = {event["step"]: event.get("samples") for event in self._steps}
        at = self._taken
        return {step: size or self._ramp.size_at(self._skips.count_kept(at[step])) for step, size in sizes.items()}

    @cached_property
    def _recorded(self) -> dict[int, list[int]]:
        """The recorded ids of each step that counts, in the order of the ranks.

        Ranks that share rows (of tensor or pipeline parallelism) record the same. The first ranks are those of the last
        attempt, and one that only an earlier attempt had comes behind them.
        """
        found: dict[int, dict[int, list[list[int]]]] = {step: {} for step in self._taken}
        for rank in self.directory.ranks_with_events():
            for event in self.directory.events(rank):
                step = event.get("step", 0)
                if event["event"] == "step" and event.get("ids") and step in found:
                    found[step].setdefault(event.get("position", -1), []).append(event["ids"])
        ids = {}
        for step, by_position in found.items():
            shares, batch = by_position.get(self._taken[step], by_position.get(-1, [])), self._sizes[step]
            if sum(map(len, shares)) != batch:
                shares = list({tuple(share): share for share in shares}.values())
            taken = [number for share in shares for number in share]
            if batch in itertools.accumulate(map(len, shares)):
                ids[step] = taken[:batch]
        return ids

    def _compute(self, step: int) -> Ids:
        if step in self._taken:
            first, size = self._skips.count_kept(self._taken[step]), self._sizes[step]
        else:
            last = max((each for each in self._taken if each < step), default=0)
            first = self._ramp.find_start(step - last - 1, self._number_after(last))
            size = self._ramp.size_at(first)
        ids: Ids = self._order.ids(self._skips.find_kept(first + np.arange(size)))
        return ids

    def _number_after(self, step: int) -> int:
        """The number of the first kept position behind a step that was taken; 0 for step 0."""
        return self._skips.count_kept(self._taken[step]) + self._sizes[step] if step else 0

    def _find_end(self, step: int) -> int:
        """The position behind the last sample of a step that was taken."""
        return int(self._skips.find_kept(np.array([self._number_after(step) - 1]))[0]) + 1

    def _find_next(self, sample: int, last: int) -> int | None:
        """The first step behind `last` that has a sample: its positions follow from the inverse of the order."""
        begin = self._number_after(last)
        for position in self._order.find_positions(sample, int(self._skips.find_kept(np.array([begin]))[0])):
            if not self._is_skipped(position):
                return last + self._ramp.count_steps(self._skips.count_kept(position) + 1, begin)
        return None

    def _is_skipped(self, position: int) -> bool:
        return any(start <= position < end for start, end in self._skips.spans)


@dataclass(frozen=True)
class _SequenceOrder:
    """The order of what is read in sequence: sample p comes at position p, once."""

    samples: int = 2**62

    def ids(self, positions: Ids) -> Ids:
        return positions

    def find_positions(self, sample: int, start: int) -> Iterator[int]:
        yield from [sample] if sample >= start else []


def open_ledger(path: Path) -> SampleLedger:
    """The ledger of the run in a directory. Raises UserError if there is none, or if neither its data can be opened nor
    ids were recorded."""
    directory = RunDir(path)
    if not directory.exists():
        raise UserError(f"there is no run in {path}\n  allowed: a run directory")
    directory.check_format()
    directory.check_readable()
    resolved = directory.read_resolved()
    values = RunFile.model_validate(resolved)
    if "model" not in resolved:
        return SampleLedger(directory, values, None)
    try:
        return SampleLedger(directory, values, open_described(values).train)
    except UserError:
        if not values.data.record_ids:
            raise
        return SampleLedger(directory, values, None, why="of data that cannot be opened from here")
