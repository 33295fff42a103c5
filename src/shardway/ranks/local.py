"""The ranks of this node as processes: started with torchrun's variables, watched to their end.

Of torch's elastic launcher only the processes are used. Its rendezvous is left out: agents of several nodes use
`ranks.rendezvous`.

Invariants:
- A process has the variables of its rank before its program begins (a warm standby: before it is released).
- When `run_local` returns or raises, none of the ranks it started is alive; if this process is killed, the kernel
  signals the ranks (`ranks.stop`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed import TCPStore
from torch.distributed.elastic.multiprocessing import (
    DefaultLogsSpecs,
    PContext,
    Std,
    SubprocessContext,
    start_processes,
)
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from shardway.errors import LateStop, UserError
from shardway.hardware.limits import count_oom_kills
from shardway.inherited import list_unfit_for_ranks
from shardway.rank_variables import AGENT_VARIABLE
from shardway.ranks.failure import RankFailure, mark_oom
from shardway.ranks.heartbeat import VARIABLE
from shardway.ranks.launcher import LOOPBACK
from shardway.ranks.stacks import choose_recording
from shardway.ranks.stop import STOP_SIGNALS, list_free_signals
from shardway.rundir.file_io import is_seen
from shardway.units import render_seconds

# --- processes of torch's elastic launcher

_TORCHS_SIGNALS = "TORCHELASTIC_SIGNALS_TO_HANDLE"


@dataclass(frozen=True)
class RankAssignment:
    """The ranks of a start that are on this node, and where all ranks meet: a store that an agent hosts for this start
    alone. `start` counts starts."""

    first: int
    world: int
    node: int
    nodes: int
    address: str
    port: int
    start: int = 0


@dataclass(frozen=True)
class LocalLaunch:
    """How many ranks run which Python module with which arguments, where their output goes, and CPU threads each.

    `heartbeats` is the folder of their heartbeats; None: they are not watched. A stop by the stop file may take
    `stop_timeout_s`. `assignment`: their numbers among all ranks; None: these are all. `shown`: their output is
    also printed here, each line with its rank.
    """

    ranks: int
    module: str
    arguments: Sequence[str]
    log_folder: Path
    threads: int
    stop_path: Path
    stop_timeout_s: float
    heartbeats: Path | None = None
    assignment: RankAssignment | None = None
    shown: bool = False


def start_program(
    launch: LocalLaunch, assignment: RankAssignment, further: Sequence[Mapping[str, str]] = ()
) -> PContext:
    """Start the program of each local rank, with `further` variables of its own."""
    ranks = range(launch.ranks)
    more = dict(enumerate(further))
    with _surroundings_of_ranks():
        processes = start_processes(
            name="ranks",
            entrypoint=sys.executable,
            args=dict.fromkeys(ranks, ("-m", launch.module, *launch.arguments)),
            envs={local: {**rank_variables(launch, assignment, local), **more.get(local, {})} for local in ranks},
            logs_specs=DefaultLogsSpecs(
                str(launch.log_folder), redirects=Std.ALL, tee=Std.ALL if launch.shown else Std.NONE
            ),
            log_line_prefixes={local: f"{assignment.first + local}: " for local in ranks},
        )
    _close_output(processes)
    return processes


def _close_output(processes: PContext) -> None:
    """Close the output files, to which only the ranks write: after an outage of their file server, closing them would
    raise, and torch closes them between ending one rank and the next."""
    for handler in handlers_of(processes).values():
        for name in ("_stdout", "_stderr"):
            if (file := getattr(handler, name, None)) is not None:
                file.close()


def handlers_of(processes: PContext) -> dict[int, SubprocessHandler]:
    """The processes by local rank."""
    return processes.subprocess_handlers if isinstance(processes, SubprocessContext) else {}


def output_folder(processes: PContext) -> Path:
    """The folder with the output of these processes alone: FOLDER/attempt_0/RANK/stdout.log."""
    return Path(processes.stdouts[0]).parents[2]


def rank_variables(launch: LocalLaunch, assignment: RankAssignment, local: int) -> dict[str, str]:
    """A rank's variables besides the inherited ones; thread counts that the user set stay.

    Source: "Environment Variables" of torchrun's manual; with TORCHELASTIC_USE_AGENT_STORE ranks meet in the store
    that the agent hosts, which outlives rank 0.
    """
    return {
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(launch.threads)),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        "RANK": str(assignment.first + local),
        "LOCAL_RANK": str(local),
        "GROUP_RANK": str(assignment.node),
        "WORLD_SIZE": str(assignment.world),
        "LOCAL_WORLD_SIZE": str(launch.ranks),
        "GROUP_WORLD_SIZE": str(assignment.nodes),
        "MASTER_ADDR": assignment.address,
        "MASTER_PORT": str(assignment.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": f"shardway-{os.getpid()}",
        "TORCHELASTIC_RESTART_COUNT": str(assignment.start),
        AGENT_VARIABLE: str(os.getpid()),
        VARIABLE: str(launch.heartbeats or ""),
        **choose_recording(os.environ),
    }


@contextlib.contextmanager
def _surroundings_of_ranks() -> Iterator[None]:
    """Handle stop signals here: torch, which would raise its own error, is given a signal that is never sent.

    Ranks do not inherit the variables of another launcher (`inherited`): neither the agent nor its ranks are MPI tasks.
    """
    before = dict(os.environ)
    for name in list_unfit_for_ranks(before):
        del os.environ[name]
    os.environ[_TORCHS_SIGNALS] = "SIGQUIT"
    try:
        yield
    finally:
        os.environ.pop(_TORCHS_SIGNALS)
        os.environ.update(before)


# --- running the ranks to their end

LATER_S = 10.0
"""Time that the ranks get beyond `run.stop_timeout`: they end themselves, with the best report of what they did."""
LOOK_EVERY_S = 1.0
POLL_S = 0.1
LEAVE_S = 2.0
"""Time for ranks to end after another has failed: they lose contact, and may report it. Ranks that wait where no
signal reaches them, as at the start, have nothing to report; torch would give them 30 s."""


@dataclass
class StopRequests:
    """Stop requests while the ranks run: signals, and a stop that takes too long. `passes_on`: no stop file can be
    written, so the ranks get a signal, which has the same effect."""

    on_stop: Callable[[], None]
    signals: list[int] = field(default_factory=list)
    at_once: bool = False
    late: bool = False
    passes_on: bool = False

    def record(self, number: int, frame: FrameType | None) -> None:
        """Receive a stop signal; Ctrl-C after another one means an immediate end."""
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
    start: Callable[[LocalLaunch, RankAssignment], PContext] = start_program,
) -> list[RankFailure]:
    """Run the ranks to their end; returns those that failed, the causes first (empty: all succeeded).

    The first Ctrl-C or SIGTERM calls `on_stop` (which asks the ranks to stop gracefully; if it raises UserError, they
    get SIGTERM); Ctrl-C after it kills them, and raises KeyboardInterrupt. Raises LateStop where a stop takes too long;
    then they are killed as well. `on_look` is called repeatedly with whether a rank has failed, and returns whether
    the others must end because of another node. `start` returns the processes (`ranks.warm_standby` may have some
    ready).
    """
    launch = replace(launch, log_folder=_find_log_folder(launch.log_folder))
    requests = StopRequests(on_stop)
    _silence_agent()
    oom_kills = count_oom_kills()
    with _assign(launch) as assignment, _stop_signals(requests), _late_stop_seen(launch, requests):
        processes = start(launch, assignment)
        try:
            return mark_oom(_await(processes, launch, requests, on_look), oom_kills)
        finally:
            processes.close(signal.SIGKILL)


def _find_log_folder(wanted: Path) -> Path:
    """The folder, or a temporary one where the disk is full or read-only: lost output does not end a run."""
    try:
        wanted.mkdir(parents=True, exist_ok=True)
        Path(tempfile.mkdtemp(dir=wanted)).rmdir()
    except OSError:
        return Path(tempfile.mkdtemp(prefix="shardway-output-"))
    return wanted


def _await(
    processes: PContext, launch: LocalLaunch, requests: StopRequests, on_look: Callable[[bool], bool]
) -> list[RankFailure]:
    passed = False
    while True:
        if requests.passes_on and not passed:
            passed = True
            for handler in handlers_of(processes).values():
                handler.proc.send_signal(signal.SIGTERM)
        if requests.late:
            raise _explain_late(launch)
        if requests.at_once:
            raise KeyboardInterrupt("a second signal")
        failed = _find_failed(processes)
        over = on_look(bool(failed))
        if over or failed:
            processes.close(signal.SIGTERM, timeout=round(LEAVE_S))
        ended = processes.wait(timeout=0)
        if ended is not None:
            causes = failed or ([] if over else list(ended.failures)[:1])
            described = [_describe(processes, launch, local, causes) for local in ended.failures]
            return sorted(described, key=lambda failure: failure.by_agent)
        time.sleep(POLL_S)


def _describe(processes: PContext, launch: LocalLaunch, local: int, causes: Sequence[int]) -> RankFailure:
    handler = handlers_of(processes)[local]
    first = launch.assignment.first if launch.assignment is not None else 0
    printed = _find_output(processes, local)
    return RankFailure(first + local, handler.proc.pid, handler.proc.returncode, printed, by_agent=local not in causes)


def _find_failed(processes: PContext) -> list[int]:
    """Local ranks that have failed by now."""
    return [local for local, handler in handlers_of(processes).items() if handler.proc.poll() not in (None, 0)]


def _find_output(processes: PContext, local: int) -> tuple[Path, ...]:
    """Files with the output of a rank, stdout first, without empty ones."""
    files = (Path(processes.stdouts[local]), Path(processes.stderrs[local]))
    return tuple(path for path in files if _has_content(path))


def _has_content(path: Path) -> bool:
    """Whether the file has content, as far as the file system answers now."""
    try:
        return path.is_file() and path.stat().st_size > 0
    except OSError:
        return False


@contextlib.contextmanager
def _assign(launch: LocalLaunch) -> Iterator[RankAssignment]:
    """The assignment, with a store of this process if all ranks are on this node."""
    if launch.assignment is not None:
        yield launch.assignment
        return
    store = host_store(LOOPBACK)
    yield RankAssignment(0, launch.ranks, 0, 1, LOOPBACK, store.port)


def host_store(address: str = "0.0.0.0") -> TCPStore:
    """A store of this process, at a free port, in which the ranks of one start meet."""
    return TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))


def _silence_agent() -> None:
    """Silence torch's loggers, each of which has its own level: the caller reports how ranks end."""
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
def _late_stop_seen(launch: LocalLaunch, requests: StopRequests) -> Iterator[None]:
    """While entered, a thread looks for the stop file (a file system may hang), and notes when the time is up."""
    done = threading.Event()

    def look() -> None:
        asked_at: float | None = None
        while not done.wait(LOOK_EVERY_S):
            if asked_at is None and (requests.passes_on or is_seen(launch.stop_path)):
                asked_at = time.monotonic()
            if asked_at is not None and time.monotonic() - asked_at > launch.stop_timeout_s + LATER_S:
                requests.late = True
                return

    thread = threading.Thread(target=look, name="late stop", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


@contextlib.contextmanager
def _stop_signals(requests: StopRequests) -> Iterator[None]:
    before: dict[int, Any] = {
        number: signal.signal(number, requests.record) for number in list_free_signals(STOP_SIGNALS)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
