"""What a rank does now and how long it has spent on what; its heartbeat, which its agent reads from memory.

A heartbeat is a small file in memory (`/dev/shm` where there is one). The rank writes it at every change of activity;
the agent reads it at any moment, also while the rank is stopped or one of its threads holds the GIL.

Invariants:
- From the first `enter` on every second belongs to exactly one activity, so the times add up to the time that passed.
- Clocks of two hosts are never compared; an age that cannot be known on this host is 0. Times are those of
  CLOCK_MONOTONIC, which the processes of a host share.
- A reader gets an entry as it was written or none; a rank without a heartbeat file runs as well.
- A private folder is removed when it is left, and one whose agent was killed by the next agent of the same user here.
  Files of other programs stay, and so does a folder that is held.
- A rank that cannot be bound to its cores trains unbound, with a message why.
- No torch: a rank shows its start before it imports torch, and threads that a library starts keep the cores of the
  thread that started them.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import select
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from shardway.ranks.evidence import answer_with_record, answer_with_stacks
from shardway.rundir.attempts import Attempt, AttemptStart
from shardway.rundir.lease import hold_folder, take_left_folder
from shardway.telemetry.activity import LAYOUT, Activity

# --- activities of a rank


class HeartbeatSink(Protocol):
    """A place that shows other processes the activity of this rank, its steps, and since when (monotonic seconds)."""

    def write(self, activity: Activity, step: int, now: float) -> None: ...


class Progress:
    """The activities of one rank; `process_start` is the start of the first one, on the given monotonic clock in
    seconds. `reached` is the most steps that an earlier attempt has done: those before it are repeated."""

    def __init__(
        self,
        heartbeat: HeartbeatSink | None = None,
        clock: Callable[[], float] = time.monotonic,
        process_start: float | None = None,
    ) -> None:
        self._heartbeat = heartbeat
        self._clock = clock
        self.activity = Activity.START
        self._since = clock() if process_start is None else process_start
        self._spent = dict.fromkeys(Activity, 0.0)
        self.reached = 0

    def enter(self, activity: Activity, step: int) -> None:
        """From now on the rank is busy with `activity`, with `step` steps done."""
        now = self._clock()
        self._spent[self.activity] += now - self._since
        self.activity, self._since = activity, now
        if self._heartbeat is not None:
            self._heartbeat.write(activity, step, now)

    def take_step(self, step: int) -> None:
        """From now on the rank takes the step after `step`: for the first time, or again."""
        self.enter(Activity.REPEAT if step < self.reached else Activity.STEP, step)

    def spent(self, now: float | None = None) -> dict[Activity, float]:
        """Seconds by activity up to now."""
        now = self._clock() if now is None else now
        return {**self._spent, self.activity: self._spent[self.activity] + now - self._since}

    def as_facts(self) -> dict[str, Any]:
        """For a record: `spent`, seconds by activity in lower case, and `unfinished_s` of a step under way, in it."""
        now = self._clock()
        spent = {each.name.lower(): round(seconds, 6) for each, seconds in self.spent(now).items() if seconds}
        if self.activity not in (Activity.STEP, Activity.REPEAT):
            return {"spent": spent}
        return {"spent": spent, "unfinished_s": round(now - self._since, 6)}


# --- when this process, or the job that it belongs to, started

RELEASED = "SHARDWAY_RELEASED"  # the release of a warm standby, in seconds of `time.monotonic()` on its own host
_STAT = Path("/proc/self/stat")


def find_process_start(attempt: Attempt | None, environ: Mapping[str, str]) -> float:
    """The start of the attempt, in seconds of `time.monotonic()`: of its job, if known and written on this host, else
    of this process (a standby: its release)."""
    released = environ.get(RELEASED, "")
    age_s = max(0.0, time.monotonic() - float(released)) if released else process_age_s()
    started = attempt.read_started() if attempt is not None else None
    if started is not None:
        age_s = max(age_s, job_age_s(started))
    return time.monotonic() - age_s


def process_age_s() -> float:
    """Seconds since this process started, including Python's own start and imports; 0 if the system does not show
    it."""
    try:
        fields = _STAT.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        began_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # `starttime`, field 22 with the name (proc(5))
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - began_s)
    except (OSError, AttributeError, IndexError, ValueError):
        return 0.0


def job_age_s(started: AttemptStart) -> float:
    """Seconds since a job started, by this host's clock; 0 for a job of another host, or if the clock was set."""
    if started.host != socket.gethostname() or not started.started:
        return 0.0
    age_s = time.time() - started.started
    return age_s if 0 <= age_s <= _uptime_s() else 0.0


def _uptime_s() -> float:
    """Seconds since this machine was started: no job of it is older."""
    try:
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    except (OSError, AttributeError):
        return float("inf")


# --- the heartbeat file

VARIABLE = "SHARDWAY_PROGRESS"  # gives the ranks of an agent the folder of their heartbeats
_ACTIVITIES = frozenset(Activity)


@dataclass(frozen=True)
class HeartbeatEntry:
    """An entry of a heartbeat file: `changes` counts the writes, `since` is in monotonic seconds."""

    changes: int
    pid: int
    activity: Activity
    step: int
    since: float


class HeartbeatWriter:
    """The heartbeat file of this process. Raises OSError if the file cannot be made. Opened again in the same process,
    it continues the count."""

    def __init__(self, path: Path) -> None:
        with open(path, "a+b") as file:
            file.truncate(LAYOUT.size)
            self._memory = mmap.mmap(file.fileno(), LAYOUT.size)
        self._changes = int(LAYOUT.unpack(self._memory[:])[0])

    def write(self, activity: Activity, step: int, now: float) -> None:
        """Show an activity. A reader that comes in between sees two counts that differ."""
        self._changes += 1
        LAYOUT.pack_into(self._memory, 0, self._changes, os.getpid(), activity, step, now, self._changes)


def read_heartbeat(path: Path) -> HeartbeatEntry | None:
    """The current entry; None if there is no file, nothing was written yet, or the entry is torn or overwritten."""
    for _ in range(8):
        try:
            data = path.read_bytes()
        except OSError:
            return None
        if len(data) != LAYOUT.size:
            return None
        first, pid, activity, step, since, last = LAYOUT.unpack(data)
        if first == last and activity in _ACTIVITIES:
            return HeartbeatEntry(first, pid, Activity(activity), step, since) if first else None
    return None


def heartbeat_path(folder: Path, local_rank: int) -> Path:
    """The heartbeat file of a rank of this node."""
    return folder / f"rank-{local_rank}"


def open_heartbeat(environ: Mapping[str, str], local_rank: int) -> HeartbeatWriter | None:
    """The heartbeat of this rank if an agent asks for one; None without an agent, or if it cannot be made."""
    if folder := environ.get(VARIABLE, ""):
        with contextlib.suppress(OSError):
            return HeartbeatWriter(heartbeat_path(Path(folder), local_rank))
    return None


# --- private folders of an agent, in memory if possible: for heartbeats, and for gates of standbys


@dataclass(frozen=True)
class FolderKind:
    """A kind of folder, by the prefix of its name and the prefixes of its files."""

    prefix: str
    files: tuple[str, ...]


HEARTBEATS = FolderKind("shardway-pages-", ("rank-", "stacks-", "asked-", "record-"))
GATES = FolderKind("shardway-spares-", ("gate-",))


def find_memory() -> Path:
    """A folder in memory, else the one for temporary files."""
    shared = Path("/dev/shm")
    return shared if shared.is_dir() and os.access(shared, os.W_OK) else Path(tempfile.gettempdir())


@contextlib.contextmanager
def private_folder(kind: FolderKind) -> Iterator[Path]:
    """A new folder of this user alone, held while entered. Raises OSError where none can be made."""
    where = find_memory()
    sweep_folders(kind, where)
    folders = tempfile.TemporaryDirectory(prefix=kind.prefix, dir=where, ignore_cleanup_errors=True)
    with folders as folder, hold_folder(Path(folder)):
        yield Path(folder)


def sweep_folders(kind: FolderKind, where: Path) -> None:
    """Remove the folders of this user that are not held by an agent; one younger than a minute may belong to an agent
    that has not locked it yet."""
    for folder in where.glob(f"{kind.prefix}*"):
        with contextlib.suppress(OSError):
            found = folder.lstat()
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and time.time() - found.st_mtime > 60.0:
                with take_left_folder(folder) as descriptor:
                    for name in os.listdir(descriptor):
                        if name.startswith(kind.files):
                            os.unlink(name, dir_fd=descriptor)
                    folder.rmdir()


# --- the first moments of a rank

GATE_VARIABLE = "SHARDWAY_GATE"
"""The gate at which a warm standby (`ranks.local`) waits: a FIFO. The process that holds it open for writing is alive,
so a standby does not wait for an agent that was killed."""


def wait_at_gate(environ: MutableMapping[str, str], prepare: Callable[[], object]) -> bool:
    """Whether this process is to be a rank: at once if it is no standby, else when it is released. A standby calls
    `prepare` first. Once released, its variables are those of its rank."""
    path = environ.pop(GATE_VARIABLE, "")
    if not path:
        return True
    try:
        gate = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # without it this would wait if the agent is gone
    except OSError:
        return False
    try:
        prepare()
        poll, variables = select.poll(), None
        poll.register(gate, select.POLLIN)
        while variables is None:
            try:
                variables = os.read(gate, select.PIPE_BUF)  # in one piece; empty once the agent is gone
            except BlockingIOError:
                poll.poll()
    finally:
        os.close(gate)
    if not variables:
        return False
    environ.update(json.loads(variables))
    environ[RELEASED] = repr(time.monotonic())
    return True


def join_agent(environ: Mapping[str, str]) -> None:
    """Show that this rank starts, and answer the agent's questions for stacks and last collectives; in the main
    thread."""
    local_rank = environ.get("LOCAL_RANK", "")
    heartbeat = open_heartbeat(environ, int(local_rank)) if local_rank.isdecimal() else None
    if heartbeat is not None:
        answer_with_stacks(Path(environ[VARIABLE]), int(local_rank))
        answer_with_record(Path(environ[VARIABLE]), int(local_rank))
        heartbeat.write(Activity.START, 0, time.monotonic())


# srun binds each task that it starts. An agent is one task with all cores of its node, and its ranks inherit them; the
# cores of the site's profile come in a variable. Sources: sched_setaffinity(2); srun(1), "--cpu-bind=mask_cpu".
CPU_MASKS = "SHARDWAY_CPU_MASKS"  # the CPU mask of each local rank in hexadecimal, separated by commas


def bind_to_cores(environ: Mapping[str, str]) -> str:
    """Bind this rank to its cores, those next to its accelerator, if CPU_MASKS names them; returns why it could not.
    Its present threads too: a standby has those of the libraries that it has imported."""
    masks = environ.get(CPU_MASKS, "")
    if not masks or not hasattr(os, "sched_setaffinity"):
        return ""
    local = environ.get("LOCAL_RANK", "")
    try:
        every = masks.split(",")
        mask = int(every[int(local) % len(every)], 16)  # as srun does if there are more ranks than masks
        cores = {core for core in range(mask.bit_length()) if mask >> core & 1}  # core 0 is the lowest bit
        for thread in map(int, os.listdir("/proc/self/task")):
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                os.sched_setaffinity(thread, cores)
    except (OSError, ValueError) as error:
        return f"local rank {local} is bound to no cores: {error}; {CPU_MASKS}={masks}"
    return ""
