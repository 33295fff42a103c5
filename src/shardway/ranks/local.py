"""Starts ranks on this machine through torch's own elastic agent, and says how they ended.

Invariant: when `run_local` returns or raises, none of the ranks it started is alive; should this process be killed,
the kernel tells the ranks (`ranks.parent`). This module must not know what the ranks do.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from shardway.errors import LateStop
from shardway.ranks.agent.page import VARIABLE
from shardway.ranks.signals import STOP_SIGNALS
from shardway.units import render_seconds

LATER_S = 10.0
"""How much more time than `run.stop_timeout` the ranks get: they end themselves, and know better what they were at."""
LOOK_EVERY_S = 1.0


@dataclass(frozen=True)
class LocalLaunch:
    """How many ranks run which Python module with which arguments, where their output goes, and CPU threads each.

    `pages` is the folder where they show what they do (`ranks.agent`); None: nobody looks. A stop, whoever asked for
    it by this file, may take `stop_timeout_s`.
    """

    ranks: int
    module: str
    arguments: Sequence[str]
    log_folder: Path
    threads: int
    stop_path: Path
    stop_timeout_s: float
    pages: Path | None = None


@dataclass(frozen=True)
class RankFailure:
    """A rank that ended badly: its exit code, negative for a signal."""

    rank: int
    pid: int
    exit_code: int

    @property
    def signal_name(self) -> str | None:
        """Name of the signal that ended it, or None."""
        return signal.Signals(-self.exit_code).name if self.exit_code < 0 else None


def run_local(launch: LocalLaunch, on_stop: Callable[[], None]) -> list[RankFailure]:
    """Run the ranks to their end; those that ended badly, the causes first (empty: all went well).

    The first Ctrl-C or SIGTERM calls `on_stop` (which asks the ranks to stop gracefully); Ctrl-C after it kills them,
    and raises KeyboardInterrupt. Raises LateStop where a stop takes too long; then they are killed as well.
    """
    launch.log_folder.mkdir(parents=True, exist_ok=True)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=launch.ranks,
        run_id=f"shardway-{os.getpid()}",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(log_dir=str(launch.log_folder), redirects=Std.ALL),
        # Stop signals are ours (below); the agent keeps one that nobody sends in passing.
        signals_to_handle="SIGQUIT",
    )
    _silence_agent()
    late = threading.Event()
    with _stop_signals(on_stop, late), _late_stop_seen(launch, late), _environment(launch):
        try:
            elastic_launch(config, sys.executable)("-m", launch.module, *launch.arguments)
        except ChildFailedError as error:
            # The agent lists them as it found them: first those that failed, then those that it ended for that.
            return [RankFailure(rank, failure.pid, failure.exitcode) for rank, failure in error.failures.items()]
        except SignalException as error:
            if late.is_set():
                raise _explain_late(launch) from None
            raise KeyboardInterrupt(str(error)) from None
    return []


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
def _late_stop_seen(launch: LocalLaunch, late: threading.Event) -> Iterator[None]:
    """While entered, a thread looks for the stop file, and tells the main thread by a signal when time is up."""
    done, main = threading.Event(), threading.get_ident()

    def look() -> None:
        asked_at: float | None = None
        while not done.wait(LOOK_EVERY_S):
            if asked_at is None and launch.stop_path.exists():
                asked_at = time.monotonic()
            if asked_at is not None and time.monotonic() - asked_at > launch.stop_timeout_s + LATER_S:
                late.set()
                signal.pthread_kill(main, signal.SIGUSR2)
                return

    thread = threading.Thread(target=look, name="late stop", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


@contextlib.contextmanager
def _stop_signals(on_stop: Callable[[], None], late: threading.Event) -> Iterator[None]:
    asked: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if late.is_set() or (asked and number == signal.SIGINT):
            # Understood by the elastic agent, which then kills its ranks with this very signal.
            raise SignalException("a second signal", signal.SIGKILL)
        if not asked:
            asked.append(number)
            on_stop()

    before: dict[int, Any] = {number: signal.signal(number, handle) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _environment(launch: LocalLaunch) -> Iterator[None]:
    """Variables that the ranks inherit; the threads that the user set stay."""
    before = dict(os.environ)
    os.environ.setdefault("OMP_NUM_THREADS", str(launch.threads))
    os.environ[VARIABLE] = str(launch.pages or "")
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
