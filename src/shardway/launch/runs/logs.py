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

from shardway.errors import UserError, list_some
from shardway.launch.hosts.base import Host, HostUnreachable
from shardway.launch.runs.job_status import JobStatus, Ledger, LedgerEntry, read_ledger, read_standing
from shardway.rundir.attempts import Attempt
from shardway.rundir.directory import RunDir
from shardway.rundir.events import EventFollower

FIRST_GAP_S, LONGEST_GAP_S = 10.0, 80.0
"""Seconds between two questions to the scheduler: 10, 20, 40 and then 80."""

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
    done = host.run(("cat", "--", *_list_files(host, attempt, node)))
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
    tick = f"tick-{secrets.token_hex(8)}"
    names = (str(attempt.result_path), str(attempt.job_log), tick, str(_TICK_S))
    part, heard, said = "", False, False
    since_asked_s, gap_s, left = 0.0, FIRST_GAP_S, 0
    ended: JobStatus | None = None  # without a word; where its folder says how, the lines end by themselves
    for line in host.follow(("bash", "-c", _FOLLOW, "follow", *names, *_list_files(host, attempt, node))):
        if not line.endswith(tick):
            yield part + line
            part, heard, said = "", True, said or _LAST_WORD.search(line) is not None
            continue
        begun = line.removesuffix(tick)  # a line that is not complete yet
        part, heard, since_asked_s = part + begun, heard or begun != "", since_asked_s + _TICK_S
        ask = False  # an ended job is asked for twice, since accounting lags
        if left:
            left -= 1
            ask = left == 0
        elif not heard and since_asked_s >= gap_s:
            since_asked_s, gap_s, ask = 0.0, min(2 * gap_s, LONGEST_GAP_S), True
        if ask:
            was_over, ended = ended is not None, _find_ended(host, attempt)
            if ended is not None and ended.entry.result is not None:
                ended = None
            if was_over and ended is not None:
                break
            left = _LAST_TICKS if ended is not None else 0
        heard = False
    if part:
        yield part
    if not said and (ended := ended or _find_ended(host, attempt)):
        tell(_render_end(ended))


def _list_files(host: Host, attempt: Attempt, node: int | None) -> list[str]:
    if node is None:
        return [str(attempt.job_log)]
    done = host.run(("find", str(attempt.node_log_folder(node)), "-name", "std*.log"))
    files = sorted(path for path in done.out.split("\n") if path)
    if not files:
        raise UserError(
            f"attempt {attempt.number} has no output of node {node} by itself.\n"
            "  Agents, torchrun and ft_launcher keep such files; of srun and mpirun all of it is in the job's output: "
            "`shardway logs --job --rank R`."
        )
    return files


def _find_ended(host: Host, attempt: Attempt) -> JobStatus | None:
    """An attempt that has ended; None while it may go on for all that is known."""
    try:
        standings = read_standing(host, read_ledger(host, attempt.run_path))
    except HostUnreachable:
        return None
    return next((each for each in standings if each.entry.number == attempt.number and not each.is_active), None)


def _render_end(standing: JobStatus) -> str:
    entry = standing.entry
    if standing.result is None:
        return f"attempt {entry.number} was prepared, and no scheduler is known to have taken it."
    why = standing.why.sentence if standing.why else standing.result.reason
    return f"attempt {entry.number} (job {entry.job}) is over: {standing.word}: {why.rstrip('.')}."


def only_rank(lines: Iterable[str], rank: int) -> Iterator[str]:
    """The lines of one rank, without their prefix. Raises UserError at the end where there was none, with the ranks
    that did print."""
    seen = set[int]()
    for line in lines:
        if match := _RANK.match(line):
            theirs = int(match["rank"] or match["mpi"])
            seen.add(theirs)
            if theirs == rank:
                yield line[match.end() :]
    if rank not in seen:
        known = list_some([str(each) for each in sorted(seen)], _MOST_RANKS) or "none"
        raise UserError(f"rank {rank} has printed nothing; ranks that have: {known}.")


# --- the lock of a node that is gone


@dataclass
class LeftLock:
    """Whether the lock of a run directory is what a dead node left: servers of NFS may keep the locks of a node that is
    gone. It is held from a node of an attempt whose job is over; a lock of this machine is freed by its kernel.

    `host` sees the run directory and the scheduler; times are in seconds of `clock`.
    """

    host: Host
    run: RunDir
    clock: Callable[[], float] = time.monotonic
    gap_s: float = FIRST_GAP_S
    next_s: float = 0.0

    def put_off(self) -> None:
        """Another process writes: postpone the next query."""
        self.next_s = max(self.next_s, self.clock() + self.gap_s)

    def look(self) -> str:
        """How the attempt of that node ended; empty while it may go on, and where it is too early to ask again."""
        if self.clock() < self.next_s:
            return ""
        self.gap_s = min(2 * self.gap_s, LONGEST_GAP_S)
        self.next_s = self.clock() + self.gap_s
        node = self.run.find_writer_host().split(".")[0]
        if not node or node == socket.gethostname().split(".")[0]:
            return ""
        standings = read_standing(self.host, read_ledger(self.host, self.run.path))
        theirs = []
        for standing in standings:
            if started := standing.entry.started:
                names = (started.host, *started.nodes.split())
                theirs += [standing] if node in {name.split(".")[0] for name in names} else []
        return _render_end(theirs[-1]) if theirs and not any(each.is_active for each in standings) else ""


# --- waiting for a job of a run to begin

PAUSE_S = 0.5
SETTLED_S = 5.0
"""Seconds after the first rank in which the others begin to write."""


def trains_a_run_file(run: RunDir) -> bool:
    """Whether the last order of a run was a run file, whose ranks write events; a command of the person's need not."""
    orders = [attempt for attempt in run.attempts() if attempt.order_path.exists()]
    return bool(orders) and orders[-1].run_file.exists()


@dataclass
class Beginning:
    """The begin of a job of `run`, a directory that `host` sees; times are in seconds of `clock`. `since`: when a
    process that trains was first seen."""

    host: Host
    run: RunDir
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    since: float | None = None

    def wait(self, rank: int) -> str:
        """Wait until a process trains here, and this rank has events or should have them.

        Returns "" then, and if no job waits or runs but events exist; else how the last attempt ended.
        """
        further = self.run.follow_events(rank, from_end=True)
        if self._is_training(rank, further):
            return ""
        active, end = self._look()
        if not active:
            return "" if self.run.ranks_with_events() else end
        gone, gap_s = 0, FIRST_GAP_S  # gone: how often in a row the scheduler knew no job
        next_s = self.clock() + gap_s
        while gone < 2:
            self.sleep(PAUSE_S)
            if self._is_training(rank, further):
                return ""
            written = any(attempt.result_path.exists() for attempt in active)
            if written or self.clock() >= next_s:
                active, end = self._look()
                gap_s = min(2 * gap_s, LONGEST_GAP_S) if active and not gone else FIRST_GAP_S
                gone = 0 if active else gone + 1
                next_s = self.clock() + gap_s
                if written and not active:
                    break
        return end

    def _look(self) -> tuple[tuple[Attempt, ...], str]:
        """The attempts that wait or run for all that is known; if there is none, how the last one ended."""
        standings = read_standing(self.host, read_ledger(self.host, self.run.path))
        active = tuple(standing.entry.attempt for standing in standings if standing.is_active)
        return active, _render_end(standings[-1]) if standings and not active else ""

    def _is_training(self, rank: int, further: EventFollower) -> bool:
        """Whether a process trains here, and the rank has begun to write or had the time to. New events count as well,
        since not every file system shows a lock to other machines."""
        ranks = self.run.ranks_with_events()
        if further.new_events():
            return True
        if self.run.find_writer() is None or not ranks:
            return False
        self.since = self.clock() if self.since is None else self.since
        return rank in ranks or self.clock() - self.since > SETTLED_S
