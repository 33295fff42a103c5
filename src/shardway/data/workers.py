"""Loader processes: how many a rank can have, how their answers reach it, isolated while they work, ended with their
iterator and with their rank.

Invariants:
- No worker outlives the rank that started it, however that rank ends. The death of a worker is reported only while its
  answers are waited for.
- There are never more workers than were asked for, and the samples of a step do not depend on their number.
- An answer arrives, however little room there is: in shared memory if that has room, else as bytes through the pipe.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import multiprocessing
import multiprocessing.process
import os
import pickle
import re
import shutil
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import resource_sharer, util
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any

import torch
from torch.utils.data._utils.collate import default_collate_fn_map

from shardway.data.batch_tree import list_leaves
from shardway.errors import JobError, ShardwayError, SiteError, UserError
from shardway.hardware.limits import (
    NEAR,
    TaskLimit,
    count_open_files,
    explain_limit,
    find_temporary,
    read_file_limit,
    read_files_left,
    read_task_limit,
)
from shardway.ranks.stop import BrokenOff, end_with_parent
from shardway.units import render_bytes

_DYING_S = 5.0
"""How long after its connections a worker may end: its threads free their memory in between."""
_DEAD_WORKER = re.compile(r"DataLoader worker \(pid")
_DEAD_WORKER_TEXT = """\
a loader process died: {reason}
      likely: {likely}
      to do: {remedy}lower data.workers or data.prefetch; data.workers = 0 reads in the rank itself"""
_LIKELY = """\
out of memory (of the node, or of /dev/shm), or its own traceback above says that the new process
      could not import the dataset, or that the script lacks `if __name__ == "__main__":`"""
_STARTING = ("multiprocessing", "threading.py")
"""The places in Python's library that start processes and threads."""
_REFUSALS = (
    *(errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.ENOSYS),
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT),
)
"""Errors with which the system refuses to start more."""


class NoWorkers(SiteError):
    """The system does not allow loader processes here."""


class Unsendable(UserError):
    """A dataset cannot be pickled, so no loader process can read it."""


class WorkerDied(JobError):
    """A loader process has ended before its rank."""


@contextlib.contextmanager
def ended_workers(answers: Iterator[Any], check: Callable[[], None] = lambda: None) -> Iterator[Iterator[Any]]:
    """Use the iterator of a DataLoader; its workers end with the context, or with the interpreter. `check` raises
    RuntimeError if one has died.

    Raises WorkerDied if a worker died, and only while answers are waited for.
    """
    workers: list[BaseProcess] = list(getattr(answers, "_workers", []))
    end = functools.partial(_end_workers, answers, workers)
    atexit.register(end)
    try:
        yield _awaited(answers, check)
    except (BrokenOff, KeyboardInterrupt):
        # They may hang on the same file; without the error that torch raises in the main thread when a worker dies.
        if threading.current_thread() is threading.main_thread():
            handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            try:
                for worker in workers:
                    worker.kill()
                for worker in workers:
                    worker.join(1.0)
            finally:
                signal.signal(signal.SIGCHLD, handler)
        raise
    except RuntimeError as error:
        if _DEAD_WORKER.search(str(error)):
            raise _explain_death(str(error).splitlines()[0]) from error
        raise
    except (ConnectionError, EOFError) as error:
        if (dead := _find_dying(workers)) is None:
            raise
        reason = f"DataLoader worker (pid {dead.pid}) exited unexpectedly with exit code {dead.exitcode}"
        raise _explain_death(reason) from error
    finally:
        atexit.unregister(end)
        end()


def _explain_death(reason: str) -> WorkerDied:
    limit = read_task_limit()
    if limit is None or limit.left >= 2 * NEAR:
        return WorkerDied(_DEAD_WORKER_TEXT.format(reason=reason, likely=_LIKELY, remedy=""))
    likely = f"it could not start its threads: {limit}"
    return WorkerDied(_DEAD_WORKER_TEXT.format(reason=reason, likely=likely, remedy=f"{limit.remedy}, or "))


@contextlib.contextmanager
def dropped_if_refused() -> Iterator[None]:
    """Around the start of a DataLoader's iterator: if the system refuses its processes, threads or connections, end
    those that it has started and raise NoWorkers."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        folder, name = os.path.split(frames[-1].f_code.co_filename)
        starts = os.path.basename(folder) in _STARTING or name in _STARTING
        refused = error.errno in _REFUSALS if isinstance(error, OSError) else bool(explain_limit(error))
        if not (refused and starts):
            raise  # an error of the dataset, of a sampler, or of the start of the script
        for frame in frames:  # end what the iterator of the DataLoader had started, and close its pipes now
            begun: Any = frame.f_locals.get("self")
            if hasattr(begun, "_shutdown_workers"):
                begun._shutdown = True  # else its own shutdown would look for attributes that it does not have yet
                for worker in getattr(begun, "_workers", []):
                    worker.kill()
                    worker.join()
        traceback.clear_frames(error.__traceback__)
        why = explain_limit(error).partition("\n")[0].rstrip(".")
        remedy = "raise that limit" if why else "let it (processes and the semaphores of /dev/shm are needed)"
        raise NoWorkers(
            f"no loader process can be started ({why or error}): the rank reads its batches itself, which may be "
            f"slower. To do: {remedy}, or set data.workers = 0."
        ) from error


def _find_dying(workers: Sequence[BaseProcess]) -> BaseProcess | None:
    """The worker that ends within a moment, or has ended; None if all live on.

    A worker's messages break off before the kernel reports its death, so torch, which checks once, takes the error for
    one of the dataset.
    """
    until = time.monotonic() + _DYING_S
    while workers:
        for worker in workers:
            if not worker.is_alive():
                return worker
        if time.monotonic() > until:
            break
        time.sleep(0.01)
    return None


class _Deaths:
    """A handler of SIGCHLD (such as torch's) that raises if a worker has died, put off until answers are awaited.

    Raised in the middle of a collective, the error would leave this rank a collective behind or ahead of the others,
    and all of them waiting; in a save it would look like an error of the save.
    """

    def __init__(self, handler: Callable[[int, FrameType | None], object]) -> None:
        self._handler = handler
        self._waits = self._came = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self._waits:
            self._handler(number, frame)
        else:
            self._came = True

    @contextlib.contextmanager
    def awaited(self) -> Iterator[None]:
        """In this context, in the main thread, the handler raises; at once if a child has ended before."""
        self._waits = threading.current_thread() is threading.main_thread()
        try:
            if self._waits and self._came:
                self._came = False
                self._handler(signal.SIGCHLD, None)
            yield
        finally:
            self._waits = False


def _awaited(answers: Iterator[Any], check: Callable[[], None]) -> Iterator[Any]:
    """The answers; deaths of workers are reported while one is waited for: by the handler of SIGCHLD that is set (torch
    sets one with its first loader), put into a `_Deaths`, in the main thread."""
    deaths = None
    if threading.current_thread() is threading.main_thread():
        handler = signal.getsignal(signal.SIGCHLD)
        if isinstance(handler, _Deaths):
            deaths = handler
        else:
            deaths = _Deaths(handler if callable(handler) else lambda number, frame: check())
            signal.signal(signal.SIGCHLD, deaths)
    while True:
        with deaths.awaited() if deaths is not None else contextlib.nullcontext():
            try:
                answer = next(answers)
            except StopIteration:
                return
        yield answer


def isolation() -> Callable[[int], None]:
    """The first function that a worker started by this thread runs (`worker_init_fn`): see `isolate_worker`."""
    return functools.partial(isolate_worker, by_main=threading.current_thread() is threading.main_thread())


def isolate_worker(_: int, *, by_main: bool = False) -> None:
    """Let a worker live exactly as long as its rank needs it; runs in the worker.

    Ctrl-C and a scheduler's signals reach every process of a job; the rank handles them and still needs its batches
    until the step has ended. A killed rank cannot end its workers, so each watches its rank. A stopped worker cannot
    watch, so the kernel ends it, but only if `by_main`: for the kernel a parent is a thread.
    """
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(name, signal.SIG_IGN)
    if by_main:
        end_with_parent()
    parent = multiprocessing.parent_process()

    def exit_with_parent() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=exit_with_parent, daemon=True).start()
    # The thread that sends tensors may still be in C++ when the interpreter is taken down, which aborts the process.
    atexit.register(os._exit, 0)


def _end_workers(answers: Iterator[Any], workers: Sequence[BaseProcess]) -> None:
    """End the workers now: torch does so only when the last reference goes, which a traceback may hold."""
    shutdown = getattr(answers, "_shutdown_workers", None)
    if shutdown is not None:
        # No answers are awaited any more: how a worker ended must not hide why the reading did.
        with contextlib.suppress(RuntimeError):
            shutdown()
    for worker in workers:
        worker.kill()  # no effect if it has ended; workers ignore SIGTERM
        worker.join()


# --- how many workers the machine allows

OWN_TASKS = 5
"""A loader process itself, its three threads (one watches the rank, two send), and the thread of the rank that reads
from it."""
SPARE_TASKS = 12
"""Further threads that a rank starts: for collectives, saves, the stop watchdog."""
OWN_FILES = 4
"""Open files of a rank for each of its loader processes."""
SPARE_FILES = 24
"""Further files that a rank opens while it trains: connections, checkpoints, its events."""


def fit_workers(
    wanted: int, ranks: int, limit: TaskLimit | None, to_come: int = 0, environ: Mapping[str, str] = os.environ
) -> tuple[int, str]:
    """How many of the `wanted` loader processes each of `ranks` on this node can have, and why no more ("": all).

    At least one is wanted, and a validation has as many again. `limit`: before any rank started one. `to_come`: threads
    that a rank will start to compute with.
    """
    by_tasks, by_files = wanted, wanted
    if limit is not None:
        # numpy's OpenBLAS starts further threads in each process that imports it.
        text = environ.get("OPENBLAS_NUM_THREADS") or environ.get("OMP_NUM_THREADS", "")
        first = text.split(",")[0].strip()
        threads = int(first) if first.isdecimal() and int(first) else min(64, os.cpu_count() or 1)
        each = OWN_TASKS + threads - 1
        by_tasks = max(0, limit.left // ranks - SPARE_TASKS - to_come) // (2 * each)
    if (files := read_file_limit()) is not None:
        by_files = max(0, files - count_open_files() - SPARE_FILES) // (2 * OWN_FILES)
    fit = min(wanted, by_tasks, by_files)
    if fit == wanted:
        return wanted, ""
    if limit is not None and by_tasks <= by_files:
        why, remedy = f"{limit}", limit.remedy
    else:
        why, remedy = f"ulimit -n allows {files} open files", "raise `ulimit -n`"
    who = "the rank" if ranks == 1 else f"each of the {ranks} ranks of this node"
    has = "reads its batches itself" if not fit else f"has {fit} loader process{'' if fit == 1 else 'es'}"
    return fit, (
        f"{why}: too few for data.workers = {wanted}, and as many for a validation, so {who} {has}. "
        f"To do: {remedy}, or set data.workers = {fit}."
    )


# --- how answers reach their rank. torch puts each tensor of an answer into a file of /dev/shm and passes its
# descriptor through a socket below TMPDIR. In a container /dev/shm may be small or missing, a path below TMPDIR may be
# longer than a socket's (unix(7): 108 bytes) or not writable, open files may run out, or the thread behind the socket
# may be one too many. Each of these failures ends in a thread of the loader process without a report, and the rank
# waits forever

SHARED = "/dev/shm"
SPARE = 4
"""How many answers of the same size must fit: other loader processes put theirs there at the same moment."""
PLENTY = 256 * 2**20
_SPARE_FILES = 16
"""Files that a rank may open while answers are on their way."""
_LONGEST_SOCKET = 107
_BELOW_TMPDIR = len("/pymp-12345678/listener-12345678")
_SHORT = ("/tmp", "/var/tmp", "/dev/shm")


@dataclass(frozen=True)
class PackedAnswer:
    """An answer as bytes."""

    data: bytes


def find_room() -> int:
    """Free bytes in shared memory; 0 if it cannot be written."""
    try:
        found = os.statvfs(SHARED)
    except OSError:
        return 0
    return found.f_bavail * found.f_frsize if os.access(SHARED, os.W_OK) else 0


def describe_shortage() -> str:
    """Why most answers will come through pipes, and what to do; "" if they will not."""
    room = find_room()
    if room >= PLENTY // 4:
        return ""
    return (
        f"{SHARED} has {render_bytes(room)} free, so loader processes send their batches through pipes, which takes "
        "longer. To do: give the container more of it (--shm-size=16g, --ipc=host), or set data.workers = 0."
    )


@dataclass
class Sender:
    """How a loader process sends its answers; each process has a copy.

    `ahead`: how many answers of one rank's loader processes may wait to be taken over.
    """

    ahead: int = 2
    shares: bool = True
    """Whether descriptors can be handed over."""

    def begin(self) -> None:
        """Prepare a loader process, before its first answer.

        torch's own collate function would join samples in shared memory, and end the process if there is no room
        (SIGBUS). Descriptors are handed over by a thread with a socket; if it cannot start, bytes are sent instead.
        """
        if find_room() < PLENTY:
            default_collate_fn_map[torch.Tensor] = lambda batch, collate_fn_map=None: torch.stack(batch, 0)
        sharer = resource_sharer._resource_sharer  # type: ignore[attr-defined]
        with sharer._lock:
            try:
                if sharer._address is None:
                    sharer._start()
            except (OSError, RuntimeError):
                self.shares = False

    def hand_over(self, answer: Any) -> Any:
        """The answer, or its bytes if shared memory has too little room, or if the rank has so many open files that
        those of further answers may not fit."""
        tensors = [leaf for leaf in list_leaves(answer) if isinstance(leaf, torch.Tensor)]
        fits = self.shares and find_room() >= SPARE * sum(leaf.nbytes for leaf in tensors) + 2**16
        if fits and find_files_left() >= (self.ahead + 2) * len(tensors) + _SPARE_FILES:
            return answer
        return PackedAnswer(pickle.dumps(answer, protocol=5))


def find_files_left() -> int:
    """How many files a loader process and its rank can both still open."""
    return min(map(read_files_left, (os.getpid(), os.getppid())))


def take_over(answers: Iterator[Any]) -> Iterator[Any]:
    """The answers as they were before they were handed over; raises an error of Shardway among them."""
    for sent in answers:
        answer = pickle.loads(sent.data) if isinstance(sent, PackedAnswer) else sent
        if isinstance(answer, ShardwayError):
            raise answer
        yield answer


@functools.cache
def shorten_sockets() -> None:
    """Give the sockets of future loader processes a folder with a short path if a path below TMPDIR is too long for a
    socket."""
    usual = find_temporary()
    if usual is not None and len(os.fsencode(usual)) + _BELOW_TMPDIR <= _LONGEST_SOCKET:
        return
    for place in _SHORT:
        if os.path.isdir(place) and os.access(place, os.W_OK):
            folder = tempfile.mkdtemp(prefix="pymp-", dir=place)
            multiprocessing.process.current_process()._config["tempdir"] = folder  # type: ignore[attr-defined]
            util.Finalize(None, shutil.rmtree, args=(folder, True), exitpriority=-100)
            return
