"""Whether a start of the ranks that ended badly had come to the end of the run, or of the attempt, before.

By the time that rank 0 records an end, all that is worth keeping is saved. Who fails after that, while it leaves, does
no harm; ranks that were started again would train on after a stop.

Invariant: work that is left is never taken for done: what ended without a save, what another run recorded, and a stop
that nobody but an agent that is lost has asked for are no end. This module must not start or end anything.
"""

from __future__ import annotations

from itertools import islice

from shardway.cli.failure_cause import LaunchOutcome
from shardway.ranks.signals import find_received
from shardway.rundir.attempts import BY_SIGNAL, SECOND_SIGNAL
from shardway.rundir.directory import RunDir

_NAMES = frozenset(("started", "stopped", "finished"))


def has_come_to_its_end(run: RunDir, mark: int, ended: LaunchOutcome) -> bool:
    """Whether rank 0 has recorded an end of its own in the start whose events begin at `mark`."""
    events = [event for event in islice(run.all_events(0), mark, None) if event["event"] in _NAMES]
    if sum(event["event"] == "started" for event in events) > 1 or run.find_writer() is not None:
        return False  # another run has taken over
    end = next((event for event in reversed(events) if event["event"] != "started"), None)
    if end is None or end.get("reason") == SECOND_SIGNAL:  # which saves nothing
        return False
    # Ranks whose agent is gone ask for a stop, and the others may go on without their node.
    by_orphans = end["event"] == "stopped" and end.get("failure") == BY_SIGNAL and find_received() is None
    return not (ended.lost and by_orphans)


def name_trouble(ended: LaunchOutcome) -> str:
    """What went wrong, in a few words."""
    if ended.found is not None:
        return ended.found.hang.message
    if ended.lost:
        return f"{' and '.join(ended.lost)} did not answer any more"
    if not ended.failures:
        return "a rank did not leave in time, so all were ended"
    first = ended.failures[0]
    how = f"was ended by {first.signal_name}" if first.signal_name else f"left with exit code {first.exit_code}"
    return f"rank {first.rank} (process {first.pid}) {how}"
