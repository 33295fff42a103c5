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
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from shardway.data.open import open_described, order_of
from shardway.data.order import Ids, Skips
from shardway.data.sources.base import DataSource, locate_sample
from shardway.errors import UserError
from shardway.rundir.directory import RunDir
from shardway.runfile.schema import RunFile, read_skips


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
    source: DataSource | None
    why: str = field(default="", kw_only=True)

    def at(self, step: int) -> StepSamples:
        """The samples of a step. Raises UserError if nothing says which."""
        taken = step in self._taken
        ids = self._recorded.get(step, []) if taken else []
        ids = ids or self._compute(step).tolist()
        return StepSamples(step, ids, [self.locate(number) for number in ids], taken)

    def where(self, sample: int) -> tuple[list[int], int | None]:
        """The steps that had a sample, and the next that will have it; None if it does not come again, or that is not
        known. Raises UserError for a number that no sample has, or if nothing was recorded of a dataset of a script."""
        if self.source is None and self._recorded:
            return [step for step, ids in self._recorded.items() if sample in ids], None
        order = self._order
        if not 0 <= sample < order.samples:
            raise UserError(f"there is no sample {sample}\n  allowed: 0 to {order.samples - 1}")
        steps, positions = list(self._taken), list(self._taken.values())  # both rise
        done = []
        for position in order.find_positions(sample, 0):
            place = bisect_right(positions, position) - 1
            if not positions or position >= self._find_end(positions[-1]):
                break
            if place >= 0 and position < self._find_end(positions[place]) and not self._is_skipped(position):
                done.append(steps[place])
        return done, self._find_next(sample, max(self._taken, default=0))

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
        return order_of(self.values, self.source)

    @cached_property
    def _skips(self) -> Skips:
        left_out = (each.span for each in self.directory.left_out.read())
        return Skips(read_skips([*self.values.data.skip, *left_out]))

    @cached_property
    def _taken(self) -> dict[int, int]:
        """The position of each step that counts."""
        steps = [event for event in self.directory.events() if event["event"] == "step"]
        batch = self.values.train.global_batch
        return {event["step"]: event.get("position", (event["step"] - 1) * batch) for event in steps}

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
        batch = self.values.train.global_batch
        ids = {}
        for step, by_position in found.items():
            shares = by_position.get(self._taken[step], by_position.get(-1, []))
            if sum(map(len, shares)) != batch:
                shares = list({tuple(share): share for share in shares}.values())
            taken = [number for share in shares for number in share]
            if batch in itertools.accumulate(map(len, shares)):
                ids[step] = taken[:batch]
        return ids

    def _compute(self, step: int) -> Ids:
        if step in self._taken:
            return self._ids_from(self._taken[step])
        last = max((each for each in self._taken if each < step), default=0)
        kept = self._skips.count_kept(self._taken[last]) if last else 0
        number = kept + (step - max(last, 1)) * self.values.train.global_batch
        return self._ids_from(int(self._skips.find_kept(np.array([number]))[0]))

    def _find_end(self, position: int) -> int:
        """The position behind the last sample of the step that begins at a position."""
        last = self._skips.count_kept(position) + self.values.train.global_batch - 1
        return int(self._skips.find_kept(np.array([last]))[0]) + 1

    def _ids_from(self, position: int) -> Ids:
        """The ids of the step that begins at a position."""
        first = self._skips.count_kept(position)
        numbers = first + np.arange(self.values.train.global_batch)
        ids: Ids = self._order.ids(self._skips.find_kept(numbers))
        return ids

    def _find_next(self, sample: int, last: int) -> int | None:
        """The first step behind `last` that has a sample: its positions follow from the inverse of the order."""
        batch = self.values.train.global_batch
        begin = self._skips.count_kept(self._taken[last]) + batch if last else 0
        for position in self._order.find_positions(sample, int(self._skips.find_kept(np.array([begin]))[0])):
            if not self._is_skipped(position):
                return last + 1 + (self._skips.count_kept(position) - begin) // batch
        return None

    def _is_skipped(self, position: int) -> bool:
        return any(start <= position < end for start, end in self._skips.spans)


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
