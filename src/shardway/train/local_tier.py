"""The disks of the nodes as a place for checkpoints, and when a save by the clock is due.

Invariants:
- After a failed save the next one is due soon, whatever the interval.
- What is saved here names the start of the run that it comes from (`rundir.lineage`), which is written down before
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

# --- saves by the clock


@dataclass(frozen=True)
class LeastCost:
    """The interval at which saves and the work lost in failures cost least together (Daly 2006; `plan.economy`).

    `mtbf_s` is the mean time between failures of the whole job, in seconds. `shortest_s` holds until a save was
    measured, and is the least; `longest_s` is for jobs that hardly ever fail, since users stop them too; `most_share`
    bounds the share of the time that goes into saves.
    """

    mtbf_s: float
    shortest_s: float = 120.0
    longest_s: float = 1800.0
    most_share: float = 0.05

    def interval_s(self, save_s: float | None) -> float:
        """Seconds from one save to the next, if the run stands still for `save_s` at each (None: unknown)."""
        if save_s is None:
            return self.shortest_s
        least = max(self.shortest_s, save_s / self.most_share)
        return max(least, min(daly_interval(save_s, self.mtbf_s), self.longest_s))


class Cadence:
    """The clock of one folder; `every_s` None if only numbers of steps ask for saves."""

    def __init__(self, every_s: float | LeastCost | None, clock: Callable[[], float]) -> None:
        self._every_s = every_s
        self._clock = clock
        self._tried_at = clock()
        self._stall_s: float | None = None
        self.has_failed = False

    @property
    def interval_s(self) -> float | None:
        """Seconds from one save to the next; None if the clock asks for none."""
        if isinstance(self._every_s, LeastCost):
            return self._every_s.interval_s(self._stall_s)
        return self._every_s

    @property
    def is_measured(self) -> bool:
        """Whether the interval follows from what saves take."""
        return isinstance(self._every_s, LeastCost)

    def is_due(self, retry_s: float) -> bool:
        """Whether a save is due: by the interval, or `retry_s` seconds after a failed one."""
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


# --- the disks of the nodes

KEPT = 2
"""The newest complete checkpoints that stay, besides one that is being copied."""


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
        """Whether the run resumed from here, so that the run directory lacks that step."""

    @property
    def leads(self) -> bool:
        """Whether this rank makes and removes what its node has."""
        rank = self._session.ranks.rank
        return self.nodes.index(self.nodes[rank]) == rank

    @property
    def place(self) -> CheckpointFolder:
        """Where this rank writes, in the folder of the run's current start."""
        node = self.nodes[self._session.ranks.rank]
        share = self.nodes.count(node) / len(self.nodes)
        return CheckpointFolder(self._session.directory, self.leads, Local(self.files, node, share, self._start))

    def apart(self) -> Ranks:
        """The ranks over a process group of their own, made at the first call, on all ranks together."""
        if self._apart is None:
            self._apart = set_apart(self._session.ranks)
        return self._apart

    def begin(self, from_step: int, tier: str) -> None:
        """Write down where the run resumes; later saves have this origin."""
        self._start = descend(self._session, from_step, tier)

    def settle(self, step: int, *, is_here: bool) -> None:
        """The run resumes from this step, from these disks or not: what is newer here is removed. On all ranks
        together."""
        self._complete, self.is_base = [step] if is_here else [], is_here
        self._session.ranks.together(lambda: self.files.remove_after(step) if self.leads else None)

    def retire(self, step: int, ranks: Ranks) -> None:
        """A checkpoint is complete: older ones may be removed. On all ranks together, over `ranks`."""
        self._complete = [*self._complete, step][-KEPT:]
        kept = {*self._complete, *([] if self.copied is None else [self.copied])}
        ranks.together(lambda: self.files.keep_only(kept, up_to=step) if self.leads else None)

    def remove_partials(self) -> None:
        """Remove what interrupted saves have left, on all ranks together."""
        node = self.nodes[self._session.ranks.rank]
        self._session.ranks.together(lambda: self.files.remove_partials(node) if self.leads else None)

    def remove(self) -> None:
        """Remove all that the run has here, on all ranks together."""
        self._session.ranks.together(lambda: self.files.remove() if self.leads else None)

    def as_numbers(self) -> dict[str, Any]:
        """For a checkpoint's manifest: the start that it is saved in."""
        return {"line": self._start}


def open_tier(session: Session, plan: LocalPlan | None) -> LocalTier | None:
    """The disks of the nodes if the run uses them; on all ranks together. Raises UserError on every rank if a variable
    is missing on some."""
    if plan is None:
        return None
    ranks, folder = session.ranks, plan.folder
    return LocalTier(session, ranks.together(lambda: find_local_run(folder, session.run_id)), find_nodes(ranks))


def find_nodes(ranks: Ranks) -> tuple[int, ...]:
    """The node of each rank; from host names if the launcher does not number nodes."""
    told = ranks.gather((ranks.placement.node, socket.gethostname()))
    if all(node is not None for node, _ in told):
        return tuple(node or 0 for node, _ in told)
    hosts = list(dict.fromkeys(host for _, host in told))
    return tuple(hosts.index(host) for _, host in told)


def line_of(numbers: Mapping[str, Any]) -> str:
    """The start that saved a checkpoint with these numbers; empty if they have none."""
    return str(numbers.get("line", ""))


def descend(session: Session, from_step: int, tier: str) -> str:
    """Write down where the run resumes, on all ranks together; returns the name of the entry. Raises JobError."""
    return session.ranks.ask_first(lambda: _write_down(session, from_step, tier))


def note_descent(session: Session, from_step: int, tier: str) -> None:
    """The same for a run that no longer saves on disks of nodes but has: what is there may be undone by now."""
    if session.ranks.ask_first(lambda: has_line(session.directory.path)):
        descend(session, from_step, tier)


@contextlib.contextmanager
def line_kept(session: Session, tier: LocalTier | None) -> Iterator[None]:
    """If a run is refused, remove what was written down of where it resumes."""
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
