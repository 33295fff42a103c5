"""Output of a run's jobs, followed from the start of a job: the job's own, that of one rank or of one node.

Invariants:
- Following ends when the attempt has ended, on every host, also if nothing was left to report it: while nothing is
  printed, the scheduler is queried now and then.
- The run directory is checked often, the scheduler ever more rarely. One answer without the job ends nothing, since
  accounting may lag.

Lines of ranks begin with the rank, with any launcher: "3: ..." (torchrun as the job script sets it, srun --label),
"[1,3]<stdout>: ..." (mpirun --tag-output).
"""

from __future__ import annotations

import re
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from shardway.errors import UserError, list_some
from shardway.launch.hosts.base import Host, HostUnreachable
from shardway.launch.runs.job_status import JobStatus, Ledger, LedgerEntry, read_ledger, read_standing
from shardway.rundir.attempts import Attempt
from shardway.rundir.directory import RunDir

_FOLLOW = """end=$1 log=$2 tick=$3 every=$4; shift 4; tail -q -n +1 -F "$@" 2>/dev/null & tail=$!
while sleep "$every" >/dev/null; do echo "$tick"; done & ticking=$!
trap 'kill "$tail" "$ticking"' EXIT
while [ ! -e "$end" ]; do sleep 1; done
for second in {1..30}; do
  grep -qE 'shardway: (attempt [0-9]+: |nothing to do)' "$log" && break
  sleep 1
done; sleep 1"""
"""A rank records how it ended before it prints that; the job script's last word comes after those of all ranks, unless
the job was killed. The ticks are lines among the others, at which their reader looks around."""
_LAST_WORD = re.compile(r"shardway: (attempt \d+: |nothing to do)")

_TICK_S = 5
_FIRST_GAP, _LONGEST_GAP = 2, 16
"""Ticks between two questions to the scheduler: 10, 20, 40 and then 80 seconds."""
_LAST_TICKS = 2
"""Ticks for what was printed last to arrive, once it is known to be over; then the scheduler is asked once more."""

_MOST_RANKS = 16
_RANK = re.compile(r"\s*(?:(?P<rank>\d+): |\[\d+,(?P<mpi>\d+)\]<std\w+>:)")


def choose_attempt(ledger: Ledger, number: int | None) -> LedgerEntry:
    """The attempt of that number, or the newest that has begun. Raises UserError where there is none."""
    begun = [entry for entry in ledger.entries if entry.started is not None] or list(ledger.entries)
    chosen = [entry for entry in ledger.entries if entry.number == number] if number else begun[-1:]
    if not chosen:
        known = ", ".join(str(entry.number) for entry in ledger.entries) or "none"
        raise UserError(f"{ledger.run.path} has no attempt {number or ''}; attempts: {known}.")
    return chosen[0]


def read_output(host: Host, attempt: Attempt, node: int | None) -> Iterator[str]:
    """Lines of the job's output, or of every rank of one node. Raises UserError where nothing was printed."""
    done = host.run(("cat", "--", *_paths(host, attempt, node)))
    if not done.ok and not done.out:
        why = "" if "No such file" in done.err else f": {done.err.strip()}"
        raise UserError(
            f"attempt {attempt.number} of {attempt.run_path} has printed nothing{why}.\n"
            "  To do: `shardway status` says whether its job waits, runs or is over; `shardway logs -f` waits for it."
        )
    return iter(done.out.splitlines())


def follow_output(host: Host, attempt: Attempt, node: int | None, tell: Callable[[str], None]) -> Iterator[str]:
    """The same lines as they come, until the attempt has ended; `tell` gets why where the job itself has not said so.

    Raises UserError where the node has no output by itself, HostUnreachable where the connection breaks.
    """
    paths = _paths(host, attempt, node)
    tick = f"tick-{secrets.token_hex(8)}"
    names = (str(attempt.result_path), str(attempt.job_log), tick, str(_TICK_S))
    lines = host.follow(("bash", "-c", _FOLLOW, "follow", *names, *paths))
    return _Follower(tick, lambda: _find_end(host, attempt)).lines(lines, tell)


@dataclass(frozen=True)
class _LoggedEnd:
    """How an attempt ended, in a sentence, and whether its folder says so."""

    why: str
    written: bool


def _find_end(host: Host, attempt: Attempt) -> _LoggedEnd | None:
    """How an attempt ended; None while it may go on for all that is known."""
    try:
        standings = read_standing(host, read_ledger(host, attempt.run_path))
    except HostUnreachable:
        return None
    for standing in standings:
        if standing.entry.number == attempt.number and not standing.is_active:
            return _LoggedEnd(render_end(standing), standing.entry.result is not None)
    return None


def render_end(standing: JobStatus) -> str:
    """How an attempt that is over ended, in a sentence."""
    entry = standing.entry
    if standing.result is None:
        return f"attempt {entry.number} was prepared, and no scheduler is known to have taken it."
    why = standing.why.sentence if standing.why else standing.result.reason
    return f"attempt {entry.number} (job {entry.job}) is over: {standing.word}: {why.rstrip('.')}."


@dataclass
class _Follower:
    """Reads lines with ticks among them, and ends where nothing more will come: it asks after a while of silence, the
    longer the more often it has asked; all counts are in ticks."""

    tick: str
    find_end: Callable[[], _LoggedEnd | None]
    waited: int = 0
    gap: int = _FIRST_GAP
    left: int = 0
    end: _LoggedEnd | None = None

    def lines(self, lines: Iterable[str], tell: Callable[[str], None]) -> Iterator[str]:
        """The lines without the ticks; `tell` gets how the attempt ended where no line does."""
        part, heard, said = "", False, False
        for line in lines:
            if not line.endswith(self.tick):
                yield part + line
                part, heard, said = "", True, said or _LAST_WORD.search(line) is not None
                continue
            begun = line.removesuffix(self.tick)  # a line that is not complete yet
            part += begun
            if self._is_over(heard or begun != ""):
                break
            heard = False
        if part:
            yield part
        end = None if said else self.end or self.find_end()
        if end is not None:
            tell(end.why)

    def _is_over(self, heard: bool) -> bool:
        """At a tick, with or without output since the last: whether to end. An ended job is queried twice, since a
        scheduler's accounting may lag behind."""
        self.waited += 1
        if self.left:
            self.left -= 1
            return self.left == 0 and self._has_ended()
        if not heard and self.waited >= self.gap:
            self.waited, self.gap = 0, min(2 * self.gap, _LONGEST_GAP)
            self.left = _LAST_TICKS if self._has_ended() else 0
        return False

    def _has_ended(self) -> bool:
        """Whether it ended without a word; where its folder says how, the lines end by themselves."""
        end = self.find_end()
        self.end = end if end is not None and not end.written else None
        return self.end is not None


@dataclass
class LeftLock:
    """Whether the lock of a run directory is what a dead node left: servers of NFS may keep the locks of a node that is
    gone. It is held from a node of an attempt whose job is over; a lock of this machine is freed by its kernel.

    `host` sees the run directory and the scheduler; times are in seconds of `clock`.
    """

    host: Host
    run: RunDir
    clock: Callable[[], float] = time.monotonic
    gap_s: float = _FIRST_GAP * _TICK_S
    next_s: float = 0.0

    def put_off(self) -> None:
        """Another process writes: postpone the next query."""
        self.next_s = max(self.next_s, self.clock() + self.gap_s)

    def look(self) -> str:
        """How the attempt of that node ended; empty while it may go on, and where it is too early to ask again."""
        if self.clock() < self.next_s:
            return ""
        self.gap_s = min(2 * self.gap_s, _LONGEST_GAP * _TICK_S)
        self.next_s = self.clock() + self.gap_s
        node = _short(self.run.find_writer_host())
        if not node or node == _short(socket.gethostname()):
            return ""
        standings = read_standing(self.host, read_ledger(self.host, self.run.path))
        theirs = [standing for standing in standings if node in _nodes(standing)]
        return render_end(theirs[-1]) if theirs and not any(each.is_active for each in standings) else ""


def _nodes(standing: JobStatus) -> list[str]:
    started = standing.entry.started
    return [_short(name) for name in (started.host, *started.nodes.split())] if started else []


def _short(name: str) -> str:
    """A node's name without its domain."""
    return name.split(".")[0]


def only_rank(lines: Iterable[str], rank: int) -> Iterator[str]:
    """The lines of one rank, without their prefix. Raises UserError at the end where there was none, with the ranks
    that did print."""
    seen = set[int]()
    for line in lines:
        match = _RANK.match(line)
        if match is None:
            continue
        theirs = int(match["rank"] or match["mpi"])
        seen.add(theirs)
        if theirs == rank:
            yield line[match.end() :]
    if rank not in seen:
        known = list_some([str(each) for each in sorted(seen)], _MOST_RANKS) or "none"
        raise UserError(f"rank {rank} has printed nothing; ranks that have: {known}.")


def _paths(host: Host, attempt: Attempt, node: int | None) -> list[str]:
    return [str(attempt.job_log)] if node is None else _files_of_node(host, attempt, node)


def _files_of_node(host: Host, attempt: Attempt, node: int) -> list[str]:
    folder: Path = attempt.node_log_folder(node)
    done = host.run(("find", str(folder), "-name", "std*.log"))
    files = sorted(path for path in done.out.split("\n") if path)
    if not files:
        raise UserError(
            f"attempt {attempt.number} has no output of node {node} by itself.\n"
            "  Agents, torchrun and ft_launcher keep such files; of srun and mpirun all of it is in the job's output: "
            "`shardway logs --job --rank R`."
        )
    return files


# --- waiting for a job of a run to begin

PAUSE_S = 0.5
FIRST_GAP_S, LONGEST_GAP_S = 10.0, 80.0
"""Seconds between two questions to the scheduler: 10, 20, 40 and then 80."""
SETTLED_S = 5.0
"""Seconds after the first rank in which the others begin to write."""


def trains_a_run_file(run: RunDir) -> bool:
    """Whether the last order of a run was a run file, whose ranks write events; a command of the person's need not."""
    orders = [attempt for attempt in run.attempts() if attempt.order_path.exists()]
    return bool(orders) and orders[-1].run_file.exists()


@dataclass(frozen=True)
class SchedulerSnapshot:
    """What a look at the scheduler gave: attempts that wait or run for all that is known, and how the last one ended,
    in a sentence that is empty while it has not."""

    active: tuple[Attempt, ...]
    end: str


@dataclass(frozen=True)
class Beginning:
    """The begin of a job of `run`, a directory that `host` sees; times are in seconds of `clock`."""

    host: Host
    run: RunDir
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def wait(self, rank: int) -> str:
        """Wait until a process trains here, and this rank has events or should have them.

        Returns "" then, and if no job waits or runs but events exist; else how the last attempt ended.
        """
        training = _Training(self.run, rank, self.clock)
        if training.is_seen():
            return ""
        look, questions = self._look(), _Questions()
        if not look.active:
            return "" if self.run.ranks_with_events() else look.end
        questions.note(look, self.clock())
        while questions.gone < 2:
            self.sleep(PAUSE_S)
            if training.is_seen():
                return ""
            written = any(attempt.result_path.exists() for attempt in look.active)
            if written or self.clock() >= questions.next_s:
                look = self._look()
                questions.note(look, self.clock())
                if written and not look.active:
                    break
        return look.end

    def _look(self) -> SchedulerSnapshot:
        standings = read_standing(self.host, read_ledger(self.host, self.run.path))
        active = tuple(standing.entry.attempt for standing in standings if standing.is_active)
        return SchedulerSnapshot(active, render_end(standings[-1]) if standings and not active else "")


@dataclass
class _Questions:
    """When the scheduler is asked next, and how often in a row it knew no job."""

    next_s: float = 0.0
    gap_s: float = 0.0
    gone: int = 0

    def note(self, look: SchedulerSnapshot, now: float) -> None:
        self.gone = 0 if look.active else self.gone + 1
        self.gap_s = min(2 * self.gap_s, LONGEST_GAP_S) if look.active and self.gap_s else FIRST_GAP_S
        self.next_s = now + self.gap_s
        if not look.active:
            self.gap_s = 0.0


@dataclass
class _Training:
    """Whether a process trains here, and a rank has begun to write or had the time to. New events count as well, since
    not every file system shows a lock to other machines."""

    run: RunDir
    rank: int
    clock: Callable[[], float]
    since: float | None = None

    def __post_init__(self) -> None:
        self._further = self.run.follow_events(self.rank, from_end=True)

    def is_seen(self) -> bool:
        ranks = self.run.ranks_with_events()
        if self._further.new_events():
            return True
        if self.run.find_writer() is None or not ranks:
            return False
        self.since = self.clock() if self.since is None else self.since
        return self.rank in ranks or self.clock() - self.since > SETTLED_S
