"""The disks of the nodes as a place for checkpoints, and when a save by the clock is due.

Invariants:
- A save that failed makes the next one due soon, whatever the interval.
- What is saved here names the start of the run that it comes from (`rundir.line`), which is written down before
  anything is saved under it.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from shardway.checkpoint.folders import CheckpointFolder, Local
from shardway.errors import UserError
from shardway.parallel.mesh import set_apart
from shardway.plan.economy import daly_interval
from shardway.ranks.start import Ranks
from shardway.rundir.lineage import LineageBranch, has_line, read_line, write_line
from shardway.rundir.names import LocalRun, find_local_run
from shardway.train.session import Session

# --- When a save is due by the clock, for one place that checkpoints are written to


@dataclass(frozen=True)
class LeastCost:
    """The interval at which saves and what failures undo cost least together (Daly 2006; `plan.economy`).

    `mtbf_s` is the mean time between failures of the whole job, in seconds. `shortest_s` until a save was measured and
    as the least; `longest_s` is for jobs that hardly ever fail, since people stop them too; `most_share` bounds the
    share of the time that goes into saves.
    """

    mtbf_s: float
    shortest_s: float = 120.0
    longest_s: float = 1800.0
    most_share: float = 0.05

    def interval_s(self, save_s: float | None) -> float:
        """Seconds from one save to the next, where the run stands still for `save_s` at each (None: not known yet)."""
        if save_s is None:
            return self.shortest_s
        least = max(self.shortest_s, save_s / self.most_share)
        return max(least, min(daly_interval(save_s, self.mtbf_s), self.longest_s))


class Cadence:
    """The clock of one place; `every_s` None where only numbers of steps ask for saves."""

    def __init__(self, every_s: float | LeastCost | None, clock: Callable[[], float]) -> None:
        self._every_s = every_s
        self._clock = clock
        self._tried_at = clock()
        self._stall_s: float | None = None
        self.has_failed = False

    @property
    def interval_s(self) -> float | None:
        """Seconds from one save to the next; None where the clock does not ask for any."""
        if isinstance(self._every_s, LeastCost):
            return self._every_s.interval_s(self._stall_s)
        return self._every_s

    @property
    def is_measured(self) -> bool:
        """Whether the interval follows from what saves take."""
        return isinstance(self._every_s, LeastCost)

    def is_due(self, retry_s: float) -> bool:
        """Whether it is time for a save: by the interval, or so many seconds after one that failed."""
        since = self._clock() - self._tried_at
        due = self.interval_s is not None and since >= self.interval_s
        return due or (self.has_failed and since >= retry_s)

    def try_now(self) -> None:
        """A save begins, or has failed now."""
        self._tried_at = self._clock()

    def fail(self) -> None:
        """A save has failed, now."""
        self.try_now()
        self.has_failed = True

    def succeed(self, stall_s: float) -> None:
        """A save is complete; the run stood still for it so many seconds."""
        self.has_failed, self._stall_s = False, stall_s


# --- The disks of the nodes as a place for checkpoints: which node a rank is on, what is kept there, and for how
# long

KEPT = 2
"""Of the newest complete checkpoints so many stay, and one that is being copied."""


@dataclass(frozen=True)
class LocalPlan:
    """How often to save on the disks of the nodes (in steps, or seconds of the clock), and in which folder there."""

    every: int | None
    every_s: float | LeastCost | None
    folder: str


class LocalTier:
    """The disk of this rank's node; `nodes` is the node of each rank."""

    def __init__(self, session: Session, files: LocalRun, nodes: tuple[int, ...]) -> None:
        self._session = session
        self._start = ""
        self._complete: list[int] = []
        self._apart: Ranks | None = None
        self.files = files
        self.nodes = nodes
        self.copied: int | None = None
        """The step that is being copied to the run directory."""
        self.is_base = False
        """Whether the run went on from here, so that the run directory lacks that step."""

    @property
    def leads(self) -> bool:
        """Whether this rank makes and removes what its node has."""
        rank = self._session.ranks.rank
        return self.nodes.index(self.nodes[rank]) == rank

    @property
    def place(self) -> CheckpointFolder:
        """Where this rank writes, as the start of the run that it is in now."""
        node = self.nodes[self._session.ranks.rank]
        share = self.nodes.count(node) / len(self.nodes)
        return CheckpointFolder(self._session.directory, self.leads, Local(self.files, node, share, self._start))

    def apart(self) -> Ranks:
        """The ranks over a group of their own, made at the first call, which is on all ranks together."""
        if self._apart is None:
            self._apart = set_apart(self._session.ranks)
        return self._apart

    def begin(self, from_step: int, tier: str) -> None:
        """Write down where the run goes on from; what is saved from now on comes from there."""
        self._start = descend(self._session, from_step, tier)

    def settle(self, step: int, *, is_here: bool) -> None:
        """The run goes on from this step, from these disks or not: what is newer here goes. On all ranks together."""
        self._complete, self.is_base = [step] if is_here else [], is_here
        self._session.ranks.together(lambda: self.files.remove_after(step) if self.leads else None)

    def retire(self, step: int, ranks: Ranks) -> None:
        """A checkpoint is complete: older ones may go. On all ranks together, over `ranks`."""
        self._complete = [*self._complete, step][-KEPT:]
        kept = {*self._complete, *([] if self.copied is None else [self.copied])}
        ranks.together(lambda: self.files.keep_only(kept, up_to=step) if self.leads else None)

    def remove_partials(self) -> None:
        """Remove what saves that were cut off have left, on all ranks together."""
        node = self.nodes[self._session.ranks.rank]
        self._session.ranks.together(lambda: self.files.remove_partials(node) if self.leads else None)

    def remove(self) -> None:
        """Remove all that the run has here, on all ranks together."""
        self._session.ranks.together(lambda: self.files.remove() if self.leads else None)

    def as_numbers(self) -> dict[str, Any]:
        """For a checkpoint's manifest: the start that it is saved in."""
        return {"line": self._start}


def open_tier(session: Session, plan: LocalPlan | None) -> LocalTier | None:
    """The disks of the nodes, where the run is to use them; on all ranks together. Raises UserError on every rank where
    a variable is missing on some."""
    if plan is None:
        return None
    ranks, folder = session.ranks, plan.folder
    return LocalTier(session, ranks.together(lambda: find_local_run(folder, session.run_id)), find_nodes(ranks))


def find_nodes(ranks: Ranks) -> tuple[int, ...]:
    """The node of each rank; by the names of hosts where the launcher does not number nodes."""
    told = ranks.gather((ranks.placement.node, socket.gethostname()))
    if all(node is not None for node, _ in told):
        return tuple(node or 0 for node, _ in told)
    hosts = list(dict.fromkeys(host for _, host in told))
    return tuple(hosts.index(host) for _, host in told)


def line_of(numbers: Mapping[str, Any]) -> str:
    """The start that a checkpoint with these numbers was saved in; empty where it does not say."""
    return str(numbers.get("line", ""))


def descend(session: Session, from_step: int, tier: str) -> str:
    """Write down where the run goes on from; the name of the entry, on all ranks together. Raises JobError."""
    return session.ranks.ask_first(lambda: _write_down(session, from_step, tier))


def note_descent(session: Session, from_step: int, tier: str) -> None:
    """The same where the run saves on no disks of nodes any more, but has: what lies there may be undone by now."""
    if session.ranks.ask_first(lambda: has_line(session.directory.path)):
        descend(session, from_step, tier)


@contextlib.contextmanager
def line_kept(session: Session, tier: LocalTier | None) -> Iterator[None]:
    """A run that is refused has not gone on from anywhere: what was written down of that is taken back."""
    path, is_first = session.directory.path, session.ranks.is_first and tier is not None
    before = read_line(path) if is_first and has_line(path) else None
    try:
        yield
    except UserError:
        if is_first and before is not None and read_line(path) != before:
            write_line(path, before)
        raise


def _write_down(session: Session, from_step: int, tier: str) -> str:
    directory = session.directory
    directory.confirm_writer()
    entry = LineageBranch(directory.epoch, from_step, tier)
    write_line(directory.path, read_line(directory.path).add(entry))
    return entry.name
