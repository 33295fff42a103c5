"""Which steps of a run a profiler captures: the text of `train.profile`, and that of the file `profile` of a run.

Invariant: a range begins at step 2 or later, since the step before it warms the profiler up; what is written back reads
as the same range.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

CAPTURED_STEPS = 3  # steps that are captured where the file names no number
MOST_STEPS = 100  # a trace has megabytes to a gigabyte a step, all of it in memory until it is written

RANGE_ALLOWED = (
    '"steps 50-53" (the first is at least 2), ", rank 3" after it for that rank alone, ", then finish" to end the run'
)
REQUEST_ALLOWED = 'nothing, "steps 5", "rank 2", or both'

WITHOUT_EXTRAS = (
    *(
        'checkpoint.every="off"',
        'checkpoint.local_every="off"',
        'checkpoint.keep_every="off"',
        "checkpoint.keep_best=0",
    ),
    *('train.validate_every="off"', 'train.patience="off"', 'train.sample_every="off"'),
    *("track.to=[]", "track.settings={}"),
)
"""Keys of a run of a few steps that are looked at: no saves, validations, samples and trackers."""

_RANGE = re.compile(r"steps?\s+(\d{1,12})(?:\s*-\s*(\d{1,12}))?(?:\s*,?\s*rank\s+(\d{1,7}))?(\s*,?\s*then finish)?")
_REQUEST = re.compile(r"(?:steps?\s+(\d{1,12}))?\s*,?\s*(?:rank\s+(\d{1,7}))?")


@dataclass(frozen=True)
class CaptureRange:
    """Steps `first` to `last` are captured, both of them too. `rank`: of that rank alone; None: of rank 0 and of the
    slowest. `finishes`: the run is finished with the last of them."""

    first: int
    last: int
    rank: int | None = None
    finishes: bool = False

    def __str__(self) -> str:
        rank = f", rank {self.rank}" if self.rank is not None else ""
        return f"steps {self.first}-{self.last}{rank}{', then finish' if self.finishes else ''}"


def parse_capture_range(text: str) -> CaptureRange:
    """The range in the text of a run file. Raises ValueError in the form "what; allowed: ..."."""
    match = _RANGE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f'"{text}" is no range of steps; allowed: {RANGE_ALLOWED}')
    first, last = int(match[1]), int(match[2] or match[1])
    if first < 2 or last < first:
        raise ValueError(f'"{text}" begins before step 2 or ends before it begins; allowed: {RANGE_ALLOWED}')
    if last - first + 1 > MOST_STEPS:
        raise ValueError(f'"{text}" is {last - first + 1} steps; allowed: at most {MOST_STEPS}')
    return CaptureRange(first, last, int(match[3]) if match[3] else None, bool(match[4]))


def parse_capture_request(text: str) -> tuple[int, int | None]:
    """How many steps the text of the file asks for, and of which rank (None: rank 0 and the slowest). Raises ValueError
    in the form "what; allowed: ..."."""
    match = _REQUEST.fullmatch(text.strip())
    if match is None:
        shown = " ".join(text.split())[:60]
        raise ValueError(f'"{shown}" is no request for a capture; allowed: {REQUEST_ALLOWED}')
    steps = int(match[1]) if match[1] else CAPTURED_STEPS
    if not 1 <= steps <= MOST_STEPS:
        raise ValueError(f"{steps} steps are asked for; allowed: 1 to {MOST_STEPS}")
    return steps, int(match[2]) if match[2] else None
