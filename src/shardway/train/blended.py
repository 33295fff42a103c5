"""What a run records of its blend: the parts when it starts, their history in a checkpoint, their epochs when it ends.

Invariants:
- A run goes on only if its parts and their weights before its position are those that it was trained with. Weights from
  that position on may change, and parts may be added at the end of the list.
- Samples that were left out (`data.skip`, guard.on_spike) do not count as taken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardway.data.order import BlendOrder
from shardway.data.sources.base import BlendPart, ConcatSource
from shardway.errors import UserError
from shardway.runfile.schema import RunFile

NUMBERS = "blend"
"""The name of a blend's history in the numbers of a checkpoint."""


@dataclass(frozen=True)
class Blended:
    """The blend of a run: its parts and their order."""

    parts: tuple[BlendPart, ...]
    order: BlendOrder

    def as_numbers(self) -> dict[str, Any]:
        """What a checkpoint says of it: `parts` by their fingerprints, `segments` as [start, [slots of each part]], and
        `weights` of each part as pairs [position, weight]."""
        return {
            "parts": [part.source.facts.fingerprint for part in self.parts],
            "segments": [[each.start, list(each.counts)] for each in self.order.segments],
            "weights": [[[start, float(weight)] for start, weight in part.steps] for part in self.parts],
        }

    def as_facts(self, position: int) -> dict[str, Any]:
        """The parts with their shares from a position on, for an event."""
        here, later = self._segments_from(position)
        shares = [[[start, counts[part] / sum(counts)] for start, counts in (here, *later)] for part in self._numbers]
        parts = [
            {"name": part.name, "samples": len(part.source), "shares": share}
            for part, share in zip(self.parts, shares, strict=True)
        ]
        return {"parts": parts, "reason": f"trains on {', '.join(map(_describe_shares, parts))}"}

    def count(self, position: int, left_out: Sequence[Sequence[int]]) -> dict[str, Any]:
        """The samples of each part that were taken before a position without some spans, for an event."""
        taken = self.order.part_counts(position)
        for start, end in left_out:
            taken = taken - self.order.part_counts(min(end, position)) + self.order.part_counts(min(start, position))
        parts = [
            {"name": part.name, "samples": int(count), "epochs": int(count) / len(part.source)}
            for part, count in zip(self.parts, taken, strict=True)
        ]
        said = ", ".join(f"{part['name']} {part['epochs']:.2f} epochs ({part['samples']} samples)" for part in parts)
        return {"parts": parts, "reason": f"took {said}"}

    def check_past(self, saved: Mapping[str, Any], position: int, step: int) -> None:
        """Raise UserError if parts or weights before a position are not those of a checkpoint there."""
        past = [(start, counts) for start, counts in saved["segments"] if start < position]
        used = [part for part in range(len(saved["parts"])) if any(counts[part] for _, counts in past)]
        own = self.as_numbers()
        changed = [part for part in used if own["parts"][part : part + 1] != saved["parts"][part : part + 1]]
        if changed:
            names = ", ".join(f"[{part}]{self._name(part)}" for part in changed)
            raise UserError(
                f"the training data is not what the first {step} steps were trained on: data.blend{names} has "
                "changed.\n"
                "  The position in the data would mean other samples, so nothing was trained. To do: restore these "
                "parts in their places, and add others behind them."
            )
        now = [(start, counts) for start, counts in own["segments"] if start < position]
        if [_strip(each) for each in now] != [_strip(each) for each in past]:
            raise UserError(
                f"data.blend has other weights before position {position}, where the run goes on, than the first "
                f"{step} steps were trained with.\n"
                "  The position in the data would mean other samples, so nothing was trained. To do: keep those "
                f"weights and let the new ones begin at {position} or later: {self._propose(saved, position)}."
            )

    def _propose(self, saved: Mapping[str, Any], position: int) -> str:
        """The weights to write: the old ones, and from a position on those of today."""
        lines = []
        for number, part in enumerate(self.parts):
            before = [[0, 0.0]]
            if number < len(saved["weights"]):
                before = [pair for pair in saved["weights"][number] if pair[0] < position]
            weight = float([each for start, each in part.steps if start <= position][-1])
            if before != [[start, float(each)] for start, each in part.steps if start < position]:
                lines.append(f'weight = {[*before, [position, weight]]} of "{part.name}"')
        return ", ".join(lines)

    def _name(self, number: int) -> str:
        return f' "{self.parts[number].name}"' if number < len(self.parts) else ""

    @property
    def _numbers(self) -> range:
        return range(len(self.parts))

    def _segments_from(self, position: int) -> tuple[tuple[int, Sequence[int]], list[tuple[int, Sequence[int]]]]:
        """The segment of a position, from that on, and those that follow."""
        segments = self.order.segments
        here = [each for each in segments if each.start <= position][-1]
        return (position, here.counts), [(each.start, each.counts) for each in segments if each.start > position]


def describe_blend(values: RunFile, source: ConcatSource) -> Blended:
    """The blend that a run trains on."""
    return Blended(source.parts, source.order(values.train.seed, bool(values.data.shuffle)))


def _describe_shares(part: Mapping[str, Any]) -> str:
    """ "70 % web (600 samples; 20 % from position 100000 on)"."""
    (_, share), *later = part["shares"]
    then = "".join(f"; {100 * each:.4g} % from position {start} on" for start, each in later)
    return f"{100 * share:.4g} % {part['name']} ({part['samples']} samples{then})"


def _strip(segment: Sequence[Any]) -> list[Any]:
    """A segment without parts at the end of the list that it does not take."""
    start, counts = segment
    last = max((part for part, count in enumerate(counts) if count), default=-1)
    return [start, list(counts[: last + 1])]
