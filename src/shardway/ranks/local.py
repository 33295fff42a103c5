"""The ranks of this node as processes: started with torchrun's variables or as warm standbys, watched to their end.

Of torch's elastic launcher only the processes are used. Its rendezvous is left out: agents of several nodes use
`ranks.rendezvous`.

Warm standbys are processes that have imported torch and wait, until ranks have to start again. They are started while
the ranks train. Ranks that start again then need no new Python and no import of torch, which takes seconds here, and
minutes on a shared file system that is busy. Each waits at a gate (`heartbeat.wait_at_gate`).

Invariants:
- A process has the variables of its rank before its program begins (a warm standby: before it is released).
- When `run_local` returns or raises, none of the ranks it started is alive; if this process is killed, the kernel
  signals the ranks (`ranks.stop`).
- Standbys that were released are ranks; all others are dead when the agent ends. A start never waits for standbys, nor
  fails for lack of them. A standby is released once.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
from shardway.hardware.limits import count_oom_kills, read_memory_left
from shardway.inherited import list_unfit_for_ranks
from shardway.rank_variables import AGENT_VARIABLE
from shardway.ranks.evidence import choose_recording
from shardway.ranks.failure import RankFailure, mark_oom
from shardway.ranks.hang import SlowestRank
from shardway.ranks.heartbeat import GATE_VARIABLE, GATES, VARIABLE, private_folder
from shardway.ranks.launcher import LOOPBACK
from shardway.ranks.stop import STOP_SIGNALS, list_free_signals
from shardway.rundir.directory import WAITS
from shardway.rundir.file_io import is_seen
from shardway.units import render_seconds

# --- the processes


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
    `stop_timeout_s`. `assignment`: their numbers among all ranks; None: these are all. `shown`: their output is also
    printed here, each line with its rank. `telemetry_s`: how often this node is sampled meanwhile; None: never."""

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
    telemetry_s: float | None = None


def start_program(
    launch: LocalLaunch, assignment: RankAssignment, further: Sequence[Mapping[str, str]] = ()
) -> PContext:
    """Start the program of each local rank, with `further` variables of its own."""
    ranks, more = range(launch.ranks), dict(enumerate(further))
    # Ranks do not inherit the variables of another launcher: neither the agent nor its ranks are MPI tasks. Stop
    # signals are handled here: torch, which would raise its own error, is given a signal that is never sent.
    before, torchs_signals = dict(os.environ), "TORCHELASTIC_SIGNALS_TO_HANDLE"
    for name in list_unfit_for_ranks(before):
        del os.environ[name]
    os.environ[torchs_signals] = "SIGQUIT"
    try:
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
    finally:
        os.environ.pop(torchs_signals)
        os.environ.update(before)
    # Only the ranks write to the output files. After an outage of their file server, closing them would raise, and
    # torch closes them between ending one rank and the next.
    for handler in handlers_of(processes).values():
        for name in ("_stdout", "_stderr"):
            if (file := getattr(handler, name, None)) is not None:
                file.close()
    return processes


def handlers_of(processes: PContext) -> dict[int, SubprocessHandler]:
    """The processes by local rank."""
    return processes.subprocess_handlers if isinstance(processes, SubprocessContext) else {}


def output_folder(processes: PContext) -> Path:
    """The folder with the output of these processes alone: FOLDER/attempt_0/RANK/stdout.log."""
    return Path(processes.stdouts[0]).parents[2]


def rank_variables(launch: LocalLaunch, assignment: RankAssignment, local: int) -> dict[str, str]:
    """A rank's variables besides the inherited ones; thread counts that the user set stay. Source: "Environment
    Variables" of torchrun's manual; with TORCHELASTIC_USE_AGENT_STORE ranks meet in the store that the agent hosts,
    which outlives rank 0."""
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


def host_store(address: str = "0.0.0.0") -> TCPStore:
    """A store of this process, at a free port, in which the ranks of one start meet."""
    return TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))


# --- running the ranks to their end

LATER_S = 10.0
"""Time that the ranks get beyond `run.stop_timeout`: they end themselves, with the best report of what they did."""
LOOK_EVERY_S = 1.0
POLL_S = 0.1
LEAVE_S = 2.0
"""Time for ranks to end after another has failed: they lose contact, and may report it. Ranks that wait where no
signal reaches them, as at the start, have nothing to report; torch would give them 30 s."""
CORE_DUMP_S = 300.0
"""Time for a rank that crashed to write its core dump and to end. Another may lose contact and end before it: without
this wait the core dump would be cut, and the other rank's end be the cause."""


class StopRequests:
    """Stop requests while the ranks run, from the moment `received` is entered: signals, and a stop that takes too
    long. `passes_on`: no stop file can be written, so the ranks get a signal, which has the same effect."""

    def __init__(self, launch: LocalLaunch, on_stop: Callable[[], None]) -> None:
        self._launch, self._on_stop = launch, on_stop
        self._done = threading.Event()
        self.signalled = self.at_once = self.late = self.passes_on = False

    @contextlib.contextmanager
    def received(self) -> Iterator[None]:
        """While entered, stop signals come here, and a thread looks for the stop file (a file system may hang)."""
        before: dict[int, Any] = {each: signal.signal(each, self._record) for each in list_free_signals(STOP_SIGNALS)}
        thread = threading.Thread(target=self._look, name="late stop", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._done.set()
            thread.join()
            for number, handler in before.items():
                signal.signal(number, handler)

    def _record(self, number: int, frame: FrameType | None) -> None:
        """Receive a stop signal; Ctrl-C after another one means an immediate end."""
        self.at_once |= self.signalled and number == signal.SIGINT
        if not self.signalled:
            self.signalled = True
            try:
                self._on_stop()
            except UserError:
                self.passes_on = True

    def check(self) -> None:
        """Raise LateStop or KeyboardInterrupt where the ranks must be killed."""
        if self.late:
            limit = render_seconds(self._launch.stop_timeout_s)
            raise LateStop(
                f"the stop took longer than run.stop_timeout = {limit}, and the ranks did not end themselves, so they "
                "were killed.\n  Nothing that was saved has changed. To do: run the same command again: it goes on "
                "from the last checkpoint. If steps and saves take that long, raise run.stop_timeout."
            )
        if self.at_once:
            raise KeyboardInterrupt("a second signal")

    def _look(self) -> None:
        asked_at: float | None = None
        while not self._done.wait(LOOK_EVERY_S):
            if asked_at is None and (self.passes_on or is_seen(self._launch.stop_path)):
                asked_at = time.monotonic()
            if asked_at is not None and time.monotonic() - asked_at > self._launch.stop_timeout_s + LATER_S:
                self.late = True
                return


def run_local(
    launch: LocalLaunch,
    on_stop: Callable[[], None],
    on_look: Callable[[bool], bool] = lambda failed: False,
    start: Callable[[LocalLaunch, RankAssignment], PContext] = start_program,
) -> list[RankFailure]:
    """Run the ranks to their end; returns those that failed, the causes first (empty: all succeeded). The first Ctrl-C
    or SIGTERM calls `on_stop` (which asks the ranks to stop gracefully; if it raises UserError, they get SIGTERM);
    Ctrl-C after it kills them, and raises KeyboardInterrupt. Raises LateStop where a stop takes too long; then they are
    killed as well. `on_look` is called repeatedly with whether a rank has failed, and returns whether the others must
    end because of another node. `start` returns the processes (`WarmStandby` may have some ready)."""
    try:
        launch.log_folder.mkdir(parents=True, exist_ok=True)
        Path(tempfile.mkdtemp(dir=launch.log_folder)).rmdir()
    except OSError:  # the disk is full or read-only: lost output does not end a run
        launch = replace(launch, log_folder=Path(tempfile.mkdtemp(prefix="shardway-output-")))
    requests, oom_kills = StopRequests(launch, on_stop), count_oom_kills()
    for name in list(logging.root.manager.loggerDict):  # each has its own level; the caller reports how ranks end
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    if (assignment := launch.assignment) is None:  # all ranks are on this node
        store = host_store(LOOPBACK)
        assignment = RankAssignment(0, launch.ranks, 0, 1, LOOPBACK, store.port)
    with requests.received():
        processes = start(launch, assignment)
        try:
            handlers, passed, first_end = handlers_of(processes), False, math.inf
            while True:
                if requests.passes_on and not passed:
                    passed = True
                    for handler in handlers.values():
                        handler.proc.send_signal(signal.SIGTERM)
                requests.check()
                codes = {local: handler.proc.poll() for local, handler in handlers.items()}
                failed = [local for local, code in codes.items() if code not in (None, 0)]
                is_over = on_look(bool(failed))
                if is_over or failed:
                    first_end = min(first_end, time.monotonic())
                    if time.monotonic() >= first_end + CORE_DUMP_S or not _is_one_ending(handlers):
                        processes.close(signal.SIGTERM, timeout=round(LEAVE_S))
                        break
                elif None not in codes.values():
                    break
                time.sleep(POLL_S)
            failures = []
            for local, handler in handlers.items():
                if not handler.proc.poll():
                    continue
                process, printed = handler.proc, list[Path]()
                for path in map(Path, (processes.stdouts[local], processes.stderrs[local])):
                    with contextlib.suppress(OSError):  # as far as the file system answers now
                        if path.is_file() and path.stat().st_size > 0:
                            printed.append(path)
                rank, by_agent = assignment.first + local, local not in failed
                failures.append(RankFailure(rank, process.pid, process.returncode, tuple(printed), by_agent))
            return mark_oom(sorted(failures, key=lambda failure: failure.by_agent), oom_kills)
        finally:
            processes.close(signal.SIGKILL)


def _is_one_ending(handlers: Mapping[int, SubprocessHandler]) -> bool:
    """Whether a rank is about to end by itself: the kernel writes its core dump just now, or has taken its memory
    already (proc(5): CoreDumping, since Linux 4.15, and VmSize)."""
    for handler in handlers.values():
        with contextlib.suppress(OSError):  # it has ended
            status = Path(f"/proc/{handler.proc.pid}/status").read_text(errors="replace")
            if "\nCoreDumping:\t1" in status or "\nVmSize:" not in status:
                return True
    return False


# --- warm standbys

AUTO_AFTER_S = 60.0  # after the first step: short runs have none
STANDBY_BYTES = 512 << 20
"""More than a process takes that has imported torch and shardway (300 MiB with torch 2.13 for CPUs)."""
MOST_OF_MEMORY = 0.25


class StandbyGate:
    """The agent's side of a gate. Raises OSError if no FIFO can be made."""

    def __init__(self, path: Path) -> None:
        self.path = path
        os.mkfifo(path, 0o600)
        # Also for reading: to open it for writing alone waits for the standby.
        self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def release(self, variables: Mapping[str, str]) -> None:
        """Start the rank with these variables. Less than PIPE_BUF goes into a pipe in one piece."""
        os.write(self._descriptor, json.dumps(dict(variables)).encode())

    def close(self) -> None:
        """A standby that was not released ends; one that was must have read its variables by now."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


@dataclass(frozen=True)
class _Batch:
    """Standbys that were started together, their gates, what closes these, and the folder of their output (None: it
    could not be marked)."""

    processes: PContext
    gates: Sequence[StandbyGate]
    around_gates: contextlib.ExitStack
    output: Path | None


class WarmStandby:
    """The standbys of one node; `after_s`: how long after the first step of a start they are started, None: never.
    `bounded`: only if they take no more than MOST_OF_MEMORY of the memory that is left."""

    def __init__(
        self, after_s: float | None, *, bounded: bool = True, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._after_s, self._bounded, self._clock = after_s, bounded, clock
        self._of: tuple[LocalLaunch, RankAssignment] | None = None
        self._first: int | None = None
        self._trains_since: float | None = None
        self._batch: _Batch | None = None
        self._released: list[_Batch] = []  # with open gates: a standby may not have come there when it is released

    def __enter__(self) -> WarmStandby:
        return self

    def __exit__(self, *error: object) -> None:
        self._drop()
        for batch in self._released:
            batch.around_gates.close()

    def start(self, launch: LocalLaunch, assignment: RankAssignment) -> PContext:
        """The processes of these ranks: standbys if there are any for them, else new ones."""
        batch, of = self._batch, self._of
        self._of, self._first, self._trains_since = (launch, assignment), None, None
        if batch is None or of is None:
            return start_program(launch, assignment)
        is_whole = all(handler.proc.poll() is None for handler in handlers_of(batch.processes).values())
        if (of[0].ranks, of[1].first) != (launch.ranks, assignment.first) or not is_whole:
            self._drop()
            return start_program(launch, assignment)
        self._batch = None
        self._released.append(batch)
        if batch.output is not None:
            with contextlib.suppress(OSError):  # then their output is not found as that of the newest start
                (batch.output / WAITS).unlink(missing_ok=True)
        for local, gate in enumerate(batch.gates):
            gate.release(rank_variables(launch, assignment, local))
        return batch.processes

    def look(self, slowest: SlowestRank, *, ends: bool = False) -> None:
        """Called now and then with the progress of the slowest rank here: start standbys when it is time. If this start
        `ends`, it is: they import while the remaining ranks are ended and the cause is looked for."""
        if self._after_s is None or self._batch is not None or self._of is None:
            return
        if self._trains_since is None:
            if slowest.position is None or not slowest.position[1]:
                return
            if self._first is None:
                self._first = slowest.position[0]
            if slowest.position[0] <= self._first:
                return  # no step was done since this start
            self._trains_since = self._clock()
        if not ends and self._clock() - self._trains_since < self._after_s:
            return
        if self._bounded and self._of[0].ranks * STANDBY_BYTES > MOST_OF_MEMORY * read_memory_left():
            self._after_s = None
            return
        try:
            self._batch = _start_batch(*self._of)
        except OSError:  # no more processes or files are available: the ranks start without standbys
            self._after_s = None

    def _drop(self) -> None:
        """End the standbys that were not released."""
        batch, self._batch = self._batch, None
        if batch is not None:
            batch.processes.close(signal.SIGKILL)
            batch.around_gates.close()
            if batch.output is not None:
                shutil.rmtree(batch.output, ignore_errors=True)


def _start_batch(launch: LocalLaunch, assignment: RankAssignment) -> _Batch:
    """Raises OSError, and leaves nothing then: a standby whose gate is closed ends."""
    with contextlib.ExitStack() as around:
        folder = around.enter_context(private_folder(GATES))
        gates = [StandbyGate(folder / f"gate-{local}") for local in range(launch.ranks)]
        for gate in gates:
            around.callback(gate.close)
        processes = start_program(launch, assignment, [{GATE_VARIABLE: str(gate.path)} for gate in gates])
        output = output_folder(processes)
        is_marked = False
        with contextlib.suppress(OSError):
            (output / WAITS).touch()  # these processes are no ranks yet
            is_marked = True
        return _Batch(processes, gates, around.pop_all(), output if is_marked else None)
