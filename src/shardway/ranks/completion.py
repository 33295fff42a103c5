"""How a start of the ranks ended and how an attempt ends: what was requested, and whether the run had completed.

Invariants:
- A user's request wins over the clock, so that the next attempt of a chain is held.
- Unfinished work never counts as complete: an end without a save, an end that another run recorded, and a stop that
  only a lost agent requested do not count.

When rank 0 records an end, everything is saved. A rank that fails after that, during its shutdown, does no harm;
restarted ranks would train on after a stop.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from shardway.errors import Bug, ShardwayError
from shardway.ranks.failure import describe_error, find_attempt, report_fault
from shardway.ranks.launcher import has_restarts_left
from shardway.ranks.stop import Decision, find_stop_signal
from shardway.rundir.attempts import BY_AGENT, BY_SIGNAL, SECOND_SIGNAL, Ending
from shardway.rundir.directory import RunDir

if TYPE_CHECKING:
    from shardway.ranks.failure import RankFailure
    from shardway.ranks.hang import DetectedHang

# --- how an attempt ends

_BY_SCRIPT = {"deadline": Ending.DEADLINE, "preempted": Ending.PREEMPTED}
"""First word of a stop file that a job script wrote when the scheduler warned it -> how the attempt ends."""


_END_OF_WORD = re.compile(r"[\s:,]+")


@dataclass(frozen=True)
class AttemptEnd:
    """How an attempt ends, and why in a sentence."""

    state: Ending
    reason: str
    failure: str = ""
    """BY_SIGNAL if a signal was obeyed, which only the scheduler can interpret."""


def find_end(decision: Decision, stop_file: str | None, deadline: str = "") -> AttemptEnd:
    """The end that all ranks have agreed on, in the words of rank 0.

    `stop_file` is the content of the stop file (None: there is none), `deadline` the description of the clock.
    """
    if stop_file is not None:
        if stop_file.startswith(f"{BY_SIGNAL} "):
            return AttemptEnd(Ending.STOPPED, f"a {stop_file}", BY_SIGNAL)
        first, *rest = _END_OF_WORD.split(stop_file.strip(), maxsplit=1)
        if (state := _BY_SCRIPT.get(first.lower())) is not None:
            return AttemptEnd(state, "".join(rest) or stop_file)
        return AttemptEnd(Ending.STOPPED, stop_file or decision.stop_reason)
    if decision.deadline:
        return AttemptEnd(Ending.DEADLINE, deadline or decision.stop_reason)
    return AttemptEnd(Ending.STOPPED, decision.stop_reason, BY_SIGNAL)


# --- how a start of the ranks ended


@dataclass(frozen=True)
class LaunchOutcome:
    """How one start of the ranks ended, on all its nodes.

    `failures`: ranks that ended badly, the causes first. `found`: a hang. `lost`: names of lost nodes. `called_off`: a
    stop was requested before all nodes were present.
    """

    failures: tuple[RankFailure, ...] = ()
    found: DetectedHang | None = None
    lost: tuple[str, ...] = ()
    called_off: bool = False

    @property
    def is_well(self) -> bool:
        """Whether nothing went wrong."""
        return not (self.failures or self.found or self.lost)


def has_begun(run: RunDir, marks: Mapping[int, int]) -> bool:
    """Whether the run went on in a start whose events begin at these marks; before that, the run is unchanged."""
    return any(event["event"] == "started" for event in islice(run.all_events(0), marks.get(0, 0), None))


_NAMES = frozenset(("started", "stopped", "finished"))


def has_come_to_its_end(run: RunDir, mark: int, ended: LaunchOutcome) -> bool:
    """Whether rank 0 has recorded an end of its own in the start whose events begin at `mark`."""
    events = [event for event in islice(run.all_events(0), mark, None) if event["event"] in _NAMES]
    if sum(event["event"] == "started" for event in events) > 1 or run.find_writer() is not None:
        return False  # another run has taken over
    end = next((event for event in reversed(events) if event["event"] != "started"), None)
    if end is None or end.get("reason") == SECOND_SIGNAL:  # a second signal saves nothing
        return False
    # Ranks that lose their agent ask for a stop, and the others may go on without their node.
    by_orphans = end["event"] == "stopped" and end.get("failure") == BY_SIGNAL and find_stop_signal() is None
    return not (ended.lost and by_orphans)


def name_trouble(ended: LaunchOutcome) -> str:
    """What failed, in a few words."""
    if ended.found is not None:
        return ended.found.hang.message
    if ended.lost:
        return f"{' and '.join(ended.lost)} did not answer any more"
    if not ended.failures:
        return "a rank did not leave in time, so all were ended"
    first = ended.failures[0]
    how = f"was ended by {first.signal_name}" if first.signal_name else f"left with exit code {first.exit_code}"
    return f"rank {first.rank} (process {first.pid}) {how}"


# --- an error of this process


@dataclass
class AttemptShare:
    """Whether an error of this process ends the attempt: not on a node without which the others may go on."""

    ends_attempt: bool = True


@contextlib.contextmanager
def failure_reported(share: AttemptShare, exits: tuple[type[Exception], ...]) -> Iterator[None]:
    """Report to the job, if there is one, an error before a rank could report it or after all have ended; not if the
    ranks start again. `exits`: exceptions that end the process as intended."""
    attempt = find_attempt(os.environ) if not has_restarts_left(os.environ) else None
    try:
        yield
    except exits:
        raise
    except Exception as error:  # a library that is not there on one node, for instance: the other nodes wait for it
        told = error if isinstance(error, ShardwayError) else Bug(f"{type(error).__name__}: {error}")
        report_fault(attempt if share.ends_attempt else None, BY_AGENT, describe_error(told))
        raise
