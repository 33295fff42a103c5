"""The spans of positions that a run left out by itself, one for each time that it went back before a spike.

Invariant: a span that was written stays, and stays first: whoever goes on leaves out the same samples. A file that
cannot be read is an error, never an empty list. This module must not decide what is left out.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardway.errors import JobError
from shardway.refusals import find_remedy
from shardway.rundir.atomic import write_json
from shardway.rundir.fields import read_fields

FORMAT = 1

MOST = 10**18
"""The largest position, as in `data.skip`."""


@dataclass(frozen=True)
class SkippedRange:
    """Positions from `start` up to before `end`, of which `samples` would have been trained on.

    The run went back to the checkpoint of step `back_to` after a spike from step `first` to step `last`, at `time`
    (Unix seconds).
    """

    start: int
    end: int
    samples: int
    back_to: int
    first: int
    last: int
    reason: str
    time: float

    @property
    def span(self) -> list[int]:
        """As in `data.skip`."""
        return [self.start, self.end]

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


@dataclass(frozen=True)
class LeftOutFile:
    """The file of these spans."""

    path: Path

    def read(self) -> tuple[SkippedRange, ...]:
        """Those of the run, in the order in which it went back; none where there is no file. Raises JobError."""
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
            if content["format"] != FORMAT:
                raise ValueError(f"its format is {content['format']}, and this Shardway reads {FORMAT}")
            return read_left_out(content["spans"])
        except FileNotFoundError:
            return ()
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise JobError(
                f"{self.path} cannot be read: {error}.\n"
                "  It says which samples this run leaves out, so nothing was trained. To do: restore the file; or move "
                "it away, since every checkpoint from after the last time that the run went back holds what it said."
            ) from None

    def write(self, spans: Sequence[SkippedRange]) -> None:
        """Replace the file; durable once this returns. Raises JobError."""
        try:
            write_json(self.path, {"format": FORMAT, "spans": [each.as_json() for each in spans]})
        except OSError as error:
            raise JobError(
                f"{self.path} cannot be written: {error.strerror}.\n"
                f"  The run would leave samples out and could not say so. To do: {find_remedy(error)}; then run the "
                "same command again."
            ) from error


def read_left_out(entries: Any) -> tuple[SkippedRange, ...]:
    """Spans as they stand in a file or in a checkpoint. Raises ValueError where one is none."""
    if not isinstance(entries, list):
        raise ValueError("spans is no list")
    spans = [read_fields(SkippedRange, entry) for entry in entries]
    if wrong := [entry for entry, span in zip(entries, spans, strict=True) if span is None or not _is_span(span)]:
        raise ValueError(f"{wrong[0]!r} is no span")
    return tuple(span for span in spans if span is not None)


def _is_span(span: SkippedRange) -> bool:
    return 0 <= span.start < span.end <= MOST and 0 <= span.back_to < span.first <= span.last
