"""The right to write a run directory: a lease on disk, and `flock` where the file system has it.

The holder of the highest epoch may write, for as long as its heartbeats come. A held lock proves at once that its
holder lives. A free one proves nothing, since not every file system shows locks to other hosts. So the lease decides,
and the lock only saves the wait for it.

Invariants:
- An epoch is claimed by at most one process, since its file is created exclusively; the highest epoch counts. The
  newest one is removed only by its own holder, and only if nothing was written under it.
- A holder that was overtaken finds out at its next `confirm`, and at its next `check` after at most `sure_s` of its own
  clock. This needs no file locks and no agreement of clocks between hosts. It needs a file system that creates a name
  exclusively and shows a process the whole folder after that process has changed it.
- Time is measured on the watcher's own clock, between two of its own looks; no clock of another host and no file date
  is read. Time in which the watcher was asleep or could not read the folder does not count.
- A process counts as gone only where that is certain: the same kernel and PID namespace, and no such process in it.
- While a `WriterLock` is held, no `acquire` of another process returns before the lease was found silent for its time.
- The lock file is removed only with a lease that was never held: unlinking a locked file lets two writers hold two
  locks of the same name, and then the lease alone decides.
- `hold_folder`: the kernel frees a folder when its holder ends, in any namespace. Where the file system has no locks,
  every holder counts as alive.

    epoch-000007.json   the process that holds epoch 7; written once, never changed
    beat-000007         how many heartbeats its holder has written, and whether it has released it; replaced whole
    silent-000007       the heartbeat count at which a watcher found the holder silent
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import shlex
import socket
import stat
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from shardway.errors import Fenced, JobError, UserError
from shardway.refusals import find_remedy
from shardway.rundir.file_io import is_there, read_fields, render_json, write_new, write_whole
from shardway.rundir.names import LEASE

# --- identity of a process, checkable from other processes and hosts

_ENDED = ("Z", "X")


@dataclass(frozen=True)
class Identity:
    """A process: its host, that host's boot, the namespace of its pid, the pid, and when it started (clock ticks). An
    empty field is unknown. The boot id distinguishes hosts of the same name, the namespace a container from another on
    the same host, and the start time a process from a later one with the same pid."""

    host: str = ""
    boot: str = ""
    namespace: str = ""
    pid: int = 0
    started: str = ""


def own_identity(proc: Path = Path("/proc")) -> Identity:
    """This process."""
    pid = os.getpid()
    return Identity(*_read_here(proc), pid, _read_stat(proc, pid)[1])


def is_gone(other: Identity, proc: Path = Path("/proc")) -> bool:
    """Whether a process has certainly ended; False where it lives or cannot be seen from here."""
    if not is_seen_here(other, proc):
        return False
    try:
        os.kill(other.pid, 0)
    except ProcessLookupError:
        return True
    except OSError:  # the process is another user's, so what follows may not be visible
        pass
    state, started = _read_stat(proc, other.pid)
    if state in _ENDED:  # further threads may be in the middle of a write
        try:
            return len(os.listdir(proc / str(other.pid) / "task")) <= 1
        except OSError:
            return True
    return bool(started and other.started) and started != other.started


def is_alive(other: Identity, proc: Path = Path("/proc")) -> bool | None:
    """Whether a process still runs; None where that is not certain: it is elsewhere, or hidden (proc(5), hidepid)."""
    if not other.started or not is_seen_here(other, proc):
        return None
    if is_gone(other, proc):
        return False
    return True if _read_stat(proc, other.pid)[1] == other.started else None


def is_seen_here(other: Identity, proc: Path = Path("/proc")) -> bool:
    """Whether the pid of a process belongs to this process's own PID namespace."""
    known = (other.host, other.boot, other.namespace)
    return all(known) and known == _read_here(proc) and other.pid > 0


def _read_here(proc: Path) -> tuple[str, str, str]:
    """Host, boot and PID namespace of this process; empty where they are unreadable."""
    boot = namespace = ""
    with contextlib.suppress(OSError):
        boot = (proc / "sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    with contextlib.suppress(OSError):
        namespace = os.readlink(proc / "self/ns/pid")
    return socket.gethostname(), boot, namespace


def _read_stat(proc: Path, pid: int) -> tuple[str, str]:
    """State and start of a process (proc(5), fields 3 and 22); both empty where they are unreadable."""
    try:
        words = (proc / str(pid) / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return "", ""
    return (words[0], words[19]) if len(words) > 19 else ("", "")


# --- files of a lease: claims, heartbeats, silence

FORMAT = 1
KEPT = 8  # epochs that are kept: a process that was asleep while so many passed would try to claim one that was removed
_OF_EPOCH = re.compile(r"\.?(?:epoch-(\d{6,})\.json|(?:beat|silent)-(\d{6,}))(?:\.\w+\.tmp)?")
_CLAIM = re.compile(r"epoch-(\d{6,})\.json")


@dataclass(frozen=True)
class LeaseFiles:
    """The files of a lease folder; the first write makes it. All methods raise OSError where the disk refuses."""

    folder: Path

    def names(self) -> list[str]:
        try:
            return os.listdir(self.folder)
        except FileNotFoundError:
            return []

    def read(self, name: str) -> str:
        return (self.folder / name).read_text(encoding="utf-8", errors="replace")

    def create(self, name: str, text: str) -> bool:
        """Write a whole and durable file under a free name; returns whether the name was free."""
        self.folder.mkdir(exist_ok=True)
        return write_new(self.folder / name, text)

    def replace(self, name: str, text: str) -> None:
        """Write a whole file in place of another, without waiting for the disk."""
        write_whole(self.folder / name, text, durable=False)

    def remove(self, name: str) -> None:
        (self.folder / name).unlink()


@dataclass(frozen=True)
class Claim:
    """One claim of an epoch. `token` is unique, `since` the date on the holder's host, `attempt` its attempt."""

    epoch: int
    token: str = ""
    who: Identity = field(default_factory=Identity)
    since: str = ""
    attempt: str = ""


@dataclass(frozen=True)
class Beat:
    """How many heartbeats the holder has written (-1: none, or unreadable), and whether it has released the epoch."""

    count: int = -1
    released: bool = False


@dataclass(frozen=True)
class ClaimState:
    """The newest epoch as it stands; `silent_at` is the heartbeat at which it was found silent (None: never)."""

    claim: Claim
    beat: Beat
    silent_at: int | None = None

    @property
    def given_up(self) -> bool:
        """Whether the holder has released the epoch, or has not beaten since it was found silent."""
        return self.beat.released or self.silent_at == self.beat.count


def survey(files: LeaseFiles) -> ClaimState | None:
    """The newest epoch; None where none is claimed. Raises OSError."""
    epoch = newest_epoch(files.names())
    if epoch is None:
        return None
    silent, _ = _read_count(files, f"silent-{epoch:06d}")
    return ClaimState(read_claim(files, epoch), read_beat(files, epoch), silent)


def newest_epoch(names: Iterable[str]) -> int | None:
    """The highest claimed epoch; None where none is."""
    return max((int(match[1]) for match in map(_CLAIM.fullmatch, names) if match), default=None)


def read_claim(files: LeaseFiles, epoch: int) -> Claim:
    """The claim of an epoch; one with an unknown holder where the file is not valid. Raises OSError."""
    text, table = files.read(_claim_name(epoch)), None
    with contextlib.suppress(ValueError, RecursionError):
        table = json.loads(text)
    if not isinstance(table, dict):
        return Claim(epoch)
    words = {name: str(table.get(name, "")) for name in ("token", "since", "attempt")}
    return Claim(epoch, who=read_fields(Identity, table.get("who")) or Identity(), **words)


def write_claim(files: LeaseFiles, claim: Claim) -> bool:
    """Claim an epoch; returns whether this claim has it. Raises OSError where that is unknown. A server may answer a
    repeated request with "the name is taken" although it took the first one: the file decides."""
    text = render_json({"format": FORMAT, **asdict(claim)}, indent=1) + "\n"
    try:
        if files.create(_claim_name(claim.epoch), text):
            return True
    except OSError as error:
        with contextlib.suppress(FileNotFoundError):
            return read_claim(files, claim.epoch).token == claim.token
        raise error
    return read_claim(files, claim.epoch).token == claim.token


def read_beat(files: LeaseFiles, epoch: int) -> Beat:
    """The last heartbeat of an epoch. Raises OSError."""
    count, words = _read_count(files, beat_name(epoch))
    return Beat(-1 if count is None else count, "released" in words)


def write_beat(files: LeaseFiles, epoch: int, beat: Beat) -> None:
    """Write a heartbeat, or that the holder has released the epoch. Raises OSError."""
    files.replace(beat_name(epoch), f"{beat.count}{' released' if beat.released else ''}\n")


def beat_name(epoch: int) -> str:
    """Name of the file with an epoch's heartbeats."""
    return f"beat-{epoch:06d}"


def _claim_name(epoch: int) -> str:
    return f"epoch-{epoch:06d}.json"


def _read_count(files: LeaseFiles, name: str) -> tuple[int | None, list[str]]:
    """The number that a file begins with (None: nothing is in it; -1: no number), and all its words."""
    try:
        words = files.read(name).split()
    except FileNotFoundError:
        words = []
    return (int(words[0]) if words[0].isdecimal() else -1) if words else None, words


# --- watching a holder that cannot be asked


class HostClock:
    """A clock of this host that never goes back; where the system has one, it counts while the host sleeps too."""

    def now(self) -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()

    def date(self) -> str:
        """For display only."""
        return time.strftime("%Y-%m-%d %H:%M:%S")

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


@dataclass(frozen=True)
class LeaseTimes:
    """The times of a lease in seconds.

    A holder beats every `beat_s`. A process that saw no beat for `ttl_s` may take over. A holder that could not beat
    for `sure_s` looks before it writes again; the rest up to `ttl_s` allows for clocks of different speeds. A watcher
    looks every `look_s`; a look or a wait that took `slack_s` longer does not count.
    """

    beat_s: float = 2.0
    sure_s: float = 10.0
    ttl_s: float = 15.0
    look_s: float = 0.5
    slack_s: float = 2.0


class LeaseVerdict(Enum):
    """What a watch found: another beat; no beat for long enough; another epoch or a release."""

    LIVES = "lives"
    SILENT = "silent"
    CHANGED = "changed"


def watch(files: LeaseFiles, clock: HostClock, first: ClaimState, terms: LeaseTimes) -> LeaseVerdict:
    """Watch the holder of an epoch, last seen as `first`, until a verdict is certain. Raises OSError where the folder
    stays unreadable for as long as a watch takes."""
    seen_at = since = clock.now()
    while True:
        asked = clock.now()
        clock.sleep(terms.look_s)
        began = clock.now()
        try:
            seen = survey(files)
        except OSError:
            since = clock.now()
            if since - seen_at > terms.ttl_s:
                raise
            continue
        seen_at = clock.now()
        if seen is None or seen.claim != first.claim or seen.beat.released:
            return LeaseVerdict.CHANGED
        if seen.beat.count > first.beat.count:
            return LeaseVerdict.LIVES
        if began - asked > terms.look_s + terms.slack_s or seen_at - began > terms.slack_s:
            since = seen_at
        elif began - since >= terms.ttl_s:
            return LeaseVerdict.SILENT


# --- holding the lease

TRIES = 20  # how often a claim is tried while other processes are faster
TAKEN_OVER = "another run has taken over"  # how the error of an overtaken writer begins
Report = Callable[[str], None]


@dataclass(frozen=True)
class LeaseOptions:
    """What a lease works with: own identity, attempt, test for gone processes, tokens, mutexes, clock and times."""

    who: Identity = field(default_factory=own_identity)
    attempt: str = ""
    is_gone: Callable[[Identity], bool] = is_gone
    make_token: Callable[[], str] = lambda: uuid.uuid4().hex
    make_mutex: Callable[[], contextlib.AbstractContextManager[Any]] = threading.Lock
    clock: HostClock = field(default_factory=HostClock)
    terms: LeaseTimes = field(default_factory=LeaseTimes)


class Lease:
    """An epoch of one run directory, from `take` until `release`; `where` is the directory's name in messages. The
    holder calls `beat` every `terms.beat_s`, from any thread."""

    def __init__(self, files: LeaseFiles, where: str, options: LeaseOptions | None = None) -> None:
        self._files, self._where = files, where
        self._options = options or LeaseOptions()
        self._clock, self._terms = self._options.clock, self._options.terms
        self._claim, self._count, self._beaten_at = Claim(0), 0, 0.0
        self._lost: Fenced | None = None
        self._mutex = self._options.make_mutex()

    @property
    def epoch(self) -> int:
        """The epoch that this process holds; 0 before `take`."""
        return self._claim.epoch

    # --- taking it

    def take(self, report: Report) -> None:
        """Claim the next epoch once the newest is free; `report` is called with a line where that takes a while. Raises
        UserError where a living process holds it, JobError where others are always faster, OSError."""
        for tries_left in reversed(range(TRIES)):
            try:
                state = self.await_free(report)
                epoch, began = state.claim.epoch + 1 if state is not None else 1, self._clock.now()
                since, options = self._clock.date(), self._options
                claim = Claim(epoch, options.make_token(), options.who, since, options.attempt)
                # A later claim may have come meanwhile: then this one is not the highest.
                if write_claim(self._files, claim) and newest_epoch(self._files.names()) == epoch:
                    self._claim, self._count, self._lost, self._beaten_at = claim, 0, None, began
                    with contextlib.suppress(OSError):
                        self.beat()
                    return
            except FileNotFoundError:  # another process may have withdrawn between two looks
                if not tries_left:
                    raise
            self._clock.sleep(self._terms.look_s)
        raise JobError(
            f"the lease of {self._where} could not be taken: others were faster {TRIES} times.\n"
            "  To do: start one run in that directory; if only one was started, look at the file system."
        )

    def await_free(self, report: Report) -> ClaimState | None:
        """Return the newest epoch once it is free; a finding of silence is noted for the next `take`, and holds until
        the holder's next beat. Raises UserError where a living process holds it, OSError."""
        while True:
            state = survey(self._files)
            if state is None or state.given_up or self._options.is_gone(state.claim.who):
                return state
            who = state.claim.who
            is_here = who.host == socket.gethostname()
            holder = f"process {who.pid} of this host" if is_here else f"another host ({who.host or 'unknown'})"
            report(f"{holder} held this run; watching for {self._terms.ttl_s:.0f} s whether it still does")
            verdict = watch(self._files, self._clock, state, self._terms)
            if verdict is LeaseVerdict.LIVES:
                raise UserError(render_held(self._where, render_holder(state.claim)))
            if verdict is LeaseVerdict.SILENT:
                with contextlib.suppress(OSError):
                    self._files.replace(f"silent-{state.claim.epoch:06d}", f"{state.beat.count}\n")
                return state

    # --- holding it

    def beat(self) -> None:
        """Write a heartbeat and check that this process still holds the epoch. The check comes after a change of the
        folder, so that a network file system shows its current state. Raises Fenced where another epoch is the highest,
        OSError where the folder cannot be written or read."""
        with self._mutex:
            if self._lost is not None:
                raise Fenced(str(self._lost))
            began = self._clock.now()
            self._count += 1
            write_beat(self._files, self.epoch, Beat(self._count))
            self._look()
            self._beaten_at = began

    def check(self) -> None:
        """Cheap: reads the folder only if this process could not beat for `sure_s` (it was stopped, files were away).
        Raises Fenced where it holds no more, OSError where that is unknown now."""
        if self._lost is not None:
            raise Fenced(str(self._lost))
        if self._clock.now() - self._beaten_at > self._terms.sure_s:
            self.beat()

    def confirm(self) -> None:
        """Check now, before what must not happen twice. Raises as `check` does."""
        self.beat()

    def prune(self) -> None:
        """Remove the files of epochs long before this one, once something is written under this one; what cannot be
        removed stays."""
        with contextlib.suppress(OSError):
            for name in self._files.names():
                match = _OF_EPOCH.fullmatch(name)
                if match is not None and int(match[1] or match[2]) <= self.epoch - KEPT:
                    with contextlib.suppress(OSError):
                        self._files.remove(name)

    def withdraw(self) -> None:
        """Give the epoch back as if it had never been taken, for a holder that wrote nothing under it."""
        with self._mutex, contextlib.suppress(Fenced, OSError):
            if self.epoch and self._lost is None:
                self._look()
                self._lost = Fenced(f"this run has ended its writing in {self._where}.")
                for name in (_claim_name(self.epoch), beat_name(self.epoch)):  # a claim without beats would be watched
                    with contextlib.suppress(FileNotFoundError):
                        self._files.remove(name)

    def release(self) -> None:
        """Give the epoch back, so that the next is taken at once; if that cannot be written, the next needs a watch."""
        with self._mutex, contextlib.suppress(OSError):
            if self.epoch and self._lost is None:
                self._lost = Fenced(f"this run has ended its writing in {self._where}.")
                write_beat(self._files, self.epoch, Beat(self._count, released=True))

    def _look(self) -> None:
        newest = newest_epoch(self._files.names())
        if newest is None:
            raise FileNotFoundError(2, "its lease is not there")
        claim = read_claim(self._files, newest)
        if claim.token != self._claim.token:
            self._lost = Fenced(render_lost(self._where, self._claim, claim))
            raise self._lost


@dataclass(frozen=True)
class FollowerLease:
    """The lease of a rank that writes in the epoch of another process: it holds nothing and writes no heartbeats."""

    files: LeaseFiles
    where: str
    epoch: int

    def check(self) -> None:
        """Does nothing: this rank takes no step that the holder does not take."""

    def confirm(self) -> None:
        """Check now. Raises Fenced where another epoch is the highest, OSError where that is unknown."""
        newest = newest_epoch(self.files.names())
        if newest is None:
            raise FileNotFoundError(2, "its lease is not there")
        if newest != self.epoch:
            raise Fenced(render_lost(self.where, Claim(self.epoch), read_claim(self.files, newest)))


HeldLease = Lease | FollowerLease  # the right to write a run directory

# --- the lock beside the lease

LOCK_TRIES, PAUSE_S = 5, 0.05
LEAVE_S = 5.0
"""How long a release waits for a heartbeat under way, so that a hanging file system does not keep a run from ending."""

SHOWN_S = 120.0  # how long after its last heartbeat a holder without a visible lock is still shown


LOCK = "writer.lock"  # the file in a run directory


class WriterLock:
    """The right to write one run directory, until `release` or the end of the process; a thread writes heartbeats."""

    def __init__(self, run: Path, options: LeaseOptions | None = None) -> None:
        self._run, self._lock_path, self._options = run, run / LOCK, options or LeaseOptions()
        self._descriptor = -1
        self._has_made_file = False
        self._done = threading.Event()
        self._beats: threading.Thread | None = None
        self.lease = Lease(LeaseFiles(run / LEASE), str(run), self._options)

    def acquire(self, report: Report = lambda line: None) -> None:
        """Take the right; `report` is called with a line if the previous holder has to be watched first. Raises
        UserError that names the holder if another process has it, or if the directory may not be written."""
        with self._refusals():
            self._lock(fcntl.LOCK_EX)
            try:
                self.lease = Lease(LeaseFiles(self._run / LEASE), str(self._run), self._options)
                self.lease.take(report)
            except BaseException:
                self._unlock()
                raise
        self._done = threading.Event()
        self._beats = threading.Thread(target=self._beat, args=(self.lease, self._done), name="lease", daemon=True)
        self._beats.start()

    def await_free(self, report: Report) -> None:
        """Return once `acquire` need not wait, unless another process is faster. Raises UserError as it does."""
        if not is_there(self._lock_path) and not is_there(self._run / LEASE):
            return
        with self._refusals():
            self._lock(fcntl.LOCK_SH)
            self._unlock()
            self.lease.await_free(report)

    def release(self) -> None:
        """Give the right back; a second call does nothing."""
        if self._stop_beats():
            self.lease.release()
        self._unlock()

    def prune(self) -> None:
        """Remove the files of much earlier holders; called once something is written."""
        self.lease.prune()

    def withdraw(self) -> None:
        """Give the right back where nothing was written under it: the directory is as it was before `acquire`."""
        if self._stop_beats():
            self.lease.withdraw()
            with contextlib.suppress(OSError):
                (self._run / LEASE).rmdir()
                if self._has_made_file:
                    self._lock_path.unlink()
        self._unlock()

    def _beat(self, lease: Lease, done: threading.Event) -> None:
        while not done.wait(self._options.terms.beat_s):
            with contextlib.suppress(OSError):  # tried again; the lease counts how long there was no heartbeat
                try:
                    lease.beat()
                except Fenced:  # the next write reports it
                    return

    def _stop_beats(self) -> bool:
        """Stop the heartbeats; False where there are none, or a file system still blocks them."""
        beats, self._beats = self._beats, None
        if beats is None:
            return False
        self._done.set()
        beats.join(LEAVE_S)
        return not beats.is_alive()

    def _lock(self, kind: int) -> None:
        self._has_made_file |= not is_there(self._lock_path)
        self._descriptor = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        if not stat.S_ISREG(os.fstat(self._descriptor).st_mode):  # a device: one lock for the whole machine
            self._unlock()
            raise OSError(errno.EINVAL, "it is no file", str(self._lock_path))
        for _ in range(LOCK_TRIES):
            try:
                fcntl.flock(self._descriptor, kind | fcntl.LOCK_NB)
                return
            except BlockingIOError:  # perhaps of a reader that checks for a holder, and holds it for an instant itself
                time.sleep(PAUSE_S)
            except OSError:  # no locks in this file system (ENOSYS of a Lustre mounted without, ENOLCK of an NFS)
                return
        self._unlock()
        claim = _read_claimed(self._run)
        if claim is None or not is_gone(claim.who):
            raise UserError(render_held(str(self._run), render_holder(claim)))

    def _unlock(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            with contextlib.suppress(OSError):  # the server went away meanwhile, and the lock with it
                os.close(descriptor)

    @contextlib.contextmanager
    def _refusals(self) -> Iterator[None]:
        """Turn errors of the file system into a UserError with a remedy."""
        try:
            yield
        except OSError as error:
            remedy = find_remedy(
                error,
                "choose a directory that you may write to with --dir",
                "move away what stands there where it is no file",
            )
            raise UserError(
                f"the run directory {self._run} cannot be locked: {error.strerror} "
                f"({error.filename or self._run / LEASE}).\n  To do: {remedy}."
            ) from None


# --- for readers


def find_holder(run: Path, *, by_hand: bool = False) -> str | None:
    """The holder ("process 4711 on host n1 since ..."), or None for none; with `by_hand` a job counts as none. For a
    holder whose lock is not visible here, it includes when its last heartbeat came, by the file system's clock."""
    claim, beaten = _see(run) or (None, -1.0)
    if beaten < 0 or (by_hand and claim is not None and claim.attempt):
        return None
    seen = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(beaten)) if beaten else ""
    return render_holder(claim) + (f", last seen {seen}" if seen else "")


def find_holder_host(run: Path) -> str:
    """The host of the holder; empty for none, or while it is not yet written."""
    claim, _ = _see(run) or (None, 0.0)
    return claim.who.host if claim is not None else ""


def find_claim_time(run: Path) -> float | None:
    """When the newest epoch was claimed, by the file system's clock; None for none, or where that is unknown."""
    with contextlib.suppress(OSError):
        epoch = newest_epoch(LeaseFiles(run / LEASE).names())
        return None if epoch is None else (run / LEASE / _claim_name(epoch)).stat().st_mtime
    return None


def signal_holder(run: Path, number: int) -> bool:
    """Send a signal to the holder; returns whether it is visible from here and may be signalled."""
    claim, _ = _see(run) or (None, 0.0)
    with contextlib.suppress(OSError):
        if claim is not None and is_seen_here(claim.who) and not is_gone(claim.who):
            os.kill(claim.who.pid, number)
            return True
    return False


def _see(run: Path) -> tuple[Claim | None, float] | None:
    """The holder as seen without a watch, if known, and the date of its last heartbeat in Unix seconds (0: its lock is
    visible); None for no holder. Where no lock is visible, the date of the last heartbeat is compared with this host's:
    good enough for display."""
    claim = _read_claimed(run)
    is_left = claim is not None and is_gone(claim.who)
    if _is_locked(run / LOCK) and not is_left:
        return claim, 0.0
    if claim is None or is_left:
        return None
    with contextlib.suppress(OSError):
        beaten = (run / LEASE / beat_name(claim.epoch)).stat().st_mtime
        if time.time() - beaten < SHOWN_S:
            return claim, beaten
    return None


def _read_claimed(run: Path) -> Claim | None:
    """The claim that its holder has not given up, where there is one and it can be read. If the holder is gone, only
    its children hold a visible lock: they inherited its open file."""
    with contextlib.suppress(OSError):
        state = survey(LeaseFiles(run / LEASE))
        if state is not None and not state.given_up:
            return state.claim
    return None


def _is_locked(path: Path) -> bool:
    """Whether a lock of another process is visible from here."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(descriptor)
    return False


# --- folders held while their process lives


@contextlib.contextmanager
def hold_folder(folder: Path) -> Iterator[None]:
    """Hold a folder while entered, where the file system has locks. Raises OSError where it is not a folder."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def take_left_folder(folder: Path) -> Iterator[int]:
    """Hold a folder that no process holds, as an open descriptor. Raises OSError where one does, or none exists."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield descriptor
    finally:
        os.close(descriptor)


# --- messages


def render_holder(claim: Claim | None) -> str:
    """The holder: "process 4711 on host n1 since 2026-01-02 03:04:05"."""
    if claim is None or not (claim.who.pid and claim.who.host and claim.since):
        return "a process that has just started"
    return f"process {claim.who.pid} on host {claim.who.host} since {claim.since}"


def render_held(where: str, holder: str) -> str:
    """The error message for a second writer."""
    return (
        f"another run is training into {where}: {holder}.\n"
        "  Two writers would destroy each other's checkpoints, so this one stops before it wrote anything.\n"
        f"  To do: wait for it, stop it gracefully with `touch {shlex.quote(where)}/stop`, or give this run another "
        "directory with --dir."
    )


def render_lost(where: str, own: Claim, other: Claim) -> str:
    """The error message for an overtaken writer."""
    return (
        f"{TAKEN_OVER} {where}: {render_holder(other)} (epoch {other.epoch}; this one had {own.epoch}).\n"
        "  This one could not show for a while that it lives: it was stopped, or the file system did not answer. It "
        "writes nothing more; what it had saved is unchanged.\n"
        "  To do: nothing, if the other one is meant to go on; else stop that one, then run the same command again."
    )
