"""Runs the ranks of this node as processes to their end, and says how they ended.

Of torch's elastic launcher these are the processes alone (`ranks.processes`). Its rendezvous is left out: nodes that
hold together do so by `ranks.crew`.

Invariant: when `run_local` returns or raises, none of the ranks it started is alive; should this process be killed,
the kernel tells the ranks (`ranks.parent`). This module must not know what the ranks do.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed import TCPStore
from torch.distributed.elastic.multiprocessing import PContext

from shardway.errors import LateStop, UserError
from shardway.hardware.cgroup import count_oom_kills
from shardway.ranks.failure import RankFailure
from shardway.ranks.meeting import LOOPBACK
from shardway.ranks.oom import mark_oom
from shardway.ranks.processes import LocalLaunch, Seats, handlers_of, start_program
from shardway.ranks.signals import STOP_SIGNALS, list_free
from shardway.rundir.look import is_seen
from shardway.units import render_seconds

LATER_S = 10.0
"""How much more time than `run.stop_timeout` the ranks get: they end themselves, and know better what they were at."""
LOOK_EVERY_S = 1.0
POLL_S = 0.1
LEAVE_S = 2.0
"""How long ranks may take to end once another has failed: they lose contact, and may say so. Those that wait for it
where they hear no signal, as at the start of all, have nothing to say; torch would give them 30 s."""


@dataclass
class StopRequests:
    """What was asked for while the ranks run, by signals and by a stop that takes too long. `passes_on`: there can be
    no stop file, so the ranks get a signal, which they obey alike."""

    on_stop: Callable[[], None]
    signals: list[int] = field(default_factory=list)
    at_once: bool = False
    late: bool = False
    passes_on: bool = False

    def hear(self, number: int, frame: FrameType | None) -> None:
        """A stop signal; Ctrl-C after another one means at once."""
        self.at_once |= bool(self.signals) and number == signal.SIGINT
        self.signals.append(number)
        if len(self.signals) == 1:
            try:
                self.on_stop()
            except UserError:
                self.passes_on = True


def run_local(
    launch: LocalLaunch,
    on_stop: Callable[[], None],
    on_look: Callable[[bool], bool] = lambda failed: False,
    start: Callable[[LocalLaunch, Seats], PContext] = start_program,
) -> list[RankFailure]:
    """Run the ranks to their end; those that ended badly, the causes first (empty: all went well).

    The first Ctrl-C or SIGTERM calls `on_stop` (which asks the ranks to stop gracefully; where it raises UserError,
    they get SIGTERM); Ctrl-C after it kills them, and raises KeyboardInterrupt. Raises LateStop where a stop takes too
    long; then they are killed as well. `on_look` is told now and then whether a rank has failed, and says whether the
    others are to end for another node's sake.
    `start` gives the processes (`ranks.spares` may have some ready).
    """
    launch = replace(launch, log_folder=_find_log_folder(launch.log_folder))
    asked = StopRequests(on_stop)
    _silence_agent()
    oom_kills = count_oom_kills()
    with _meeting(launch) as seats, _stop_signals(asked), _late_stop_seen(launch, asked):
        processes = start(launch, seats)
        try:
            return mark_oom(_await(processes, launch, asked, on_look), oom_kills)
        finally:
            processes.close(signal.SIGKILL)


def _find_log_folder(wanted: Path) -> Path:
    """The folder, or a temporary one where the disk is full or read-only: a run does not end for want of its output."""
    try:
        wanted.mkdir(parents=True, exist_ok=True)
        Path(tempfile.mkdtemp(dir=wanted)).rmdir()
    except OSError:
        return Path(tempfile.mkdtemp(prefix="shardway-output-"))
    return wanted


def _await(
    processes: PContext, launch: LocalLaunch, asked: StopRequests, on_look: Callable[[bool], bool]
) -> list[RankFailure]:
    passed = False
    while True:
        if asked.passes_on and not passed:
            passed = True
            for handler in handlers_of(processes).values():
                handler.proc.send_signal(signal.SIGTERM)
        if asked.late:
            raise _explain_late(launch)
        if asked.at_once:
            raise KeyboardInterrupt("a second signal")
        failed = _find_failed(processes)
        over = on_look(bool(failed))
        if over or failed:
            processes.close(signal.SIGTERM, timeout=round(LEAVE_S))
        ended = processes.wait(timeout=0)
        if ended is not None:
            causes = failed or ([] if over else list(ended.failures)[:1])
            told = [_describe(processes, launch, local, causes) for local in ended.failures]
            return sorted(told, key=lambda failure: failure.by_agent)
        time.sleep(POLL_S)


def _describe(processes: PContext, launch: LocalLaunch, local: int, causes: Sequence[int]) -> RankFailure:
    handler = handlers_of(processes)[local]
    first = launch.seats.first if launch.seats is not None else 0
    printed = _find_output(processes, local)
    return RankFailure(first + local, handler.proc.pid, handler.proc.returncode, printed, by_agent=local not in causes)


def _find_failed(processes: PContext) -> list[int]:
    """Local ranks that have ended badly by now."""
    return [local for local, handler in handlers_of(processes).items() if handler.proc.poll() not in (None, 0)]


def _find_output(processes: PContext, local: int) -> tuple[Path, ...]:
    """Files with what a rank printed, stdout first, of those that are not empty."""
    files = (Path(processes.stdouts[local]), Path(processes.stderrs[local]))
    return tuple(path for path in files if _has_content(path))


def _has_content(path: Path) -> bool:
    """Whether there is something to read, as far as the file system answers now."""
    try:
        return path.is_file() and path.stat().st_size > 0
    except OSError:
        return False


@contextlib.contextmanager
def _meeting(launch: LocalLaunch) -> Iterator[Seats]:
    """The seats, with a store of this process where the ranks are all on this node."""
    if launch.seats is not None:
        yield launch.seats
        return
    store = host_store(LOOPBACK)
    yield Seats(0, launch.ranks, 0, 1, LOOPBACK, store.port)


def host_store(address: str = "0.0.0.0") -> TCPStore:
    """A store of this process, at a port that is free, in which the ranks of one start meet."""
    return TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))


def _silence_agent() -> None:
    """How ranks end is told by who called; torch gives each of its loggers a level of its own."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _explain_late(launch: LocalLaunch) -> LateStop:
    limit = render_seconds(launch.stop_timeout_s)
    return LateStop(
        f"the stop took longer than run.stop_timeout = {limit}, and the ranks did not end themselves, so they were "
        "killed.\n  Nothing that was saved has changed. To do: run the same command again: it goes on from the last "
        "checkpoint. If steps and saves take that long, raise run.stop_timeout."
    )


@contextlib.contextmanager
def _late_stop_seen(launch: LocalLaunch, asked: StopRequests) -> Iterator[None]:
    """While entered, a thread looks for the stop file (a file system may hang), and notes when time is up."""
    done = threading.Event()

    def look() -> None:
        asked_at: float | None = None
        while not done.wait(LOOK_EVERY_S):
            if asked_at is None and (asked.passes_on or is_seen(launch.stop_path)):
                asked_at = time.monotonic()
            if asked_at is not None and time.monotonic() - asked_at > launch.stop_timeout_s + LATER_S:
                asked.late = True
                return

    thread = threading.Thread(target=look, name="late stop", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


@contextlib.contextmanager
def _stop_signals(asked: StopRequests) -> Iterator[None]:
    before: dict[int, Any] = {number: signal.signal(number, asked.hear) for number in list_free(STOP_SIGNALS)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
