"""Warm standbys: processes of this node that have imported torch and wait, until ranks have to start again.

They are started while the ranks train. Ranks that start again then need no new Python and no import of torch, which
takes seconds here, and minutes on a shared file system that is busy. Each waits at a gate, a FIFO: the process that
holds it open for writing is alive, so a standby does not wait for an agent that was killed.

Invariants:
- Standbys that were released are ranks; all others are dead when the agent ends. A start never waits for standbys, nor
  fails for lack of them.
- A standby is released once, with the variables of its rank. A process that is no standby does not wait.
- No torch at import: a rank reads its gate before it imports torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shardway.hardware.limits import read_memory_left
from shardway.ranks.hang import SlowestRank
from shardway.ranks.heartbeat import GATES, RELEASED, private_folder
from shardway.rundir.directory import WAITS

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing import PContext

    from shardway.ranks.local import LocalLaunch, RankAssignment

# --- the gate of one standby

VARIABLE = "SHARDWAY_GATE"
"""The FIFO at which a standby waits."""


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


def wait_at_gate(environ: MutableMapping[str, str], prepare: Callable[[], object]) -> bool:
    """Whether this process is to be a rank: at once if it is no standby, else when it is released.

    A standby calls `prepare` first. Once released, its variables are those of its rank.
    """
    path = environ.pop(VARIABLE, "")
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


# --- the standbys of one node

AUTO_AFTER_S = 60.0
"""After the first step: short runs have none."""
STANDBY_BYTES = 512 << 20
"""More than a process takes that has imported torch and shardway (300 MiB with torch 2.13 for CPUs)."""
MOST_OF_MEMORY = 0.25


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

    `bounded`: only if they take no more than MOST_OF_MEMORY of the memory that is left.
    """

    def __init__(
        self, after_s: float | None, *, bounded: bool = True, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._after_s, self._bounded, self._clock = after_s, bounded, clock
        self._of: tuple[LocalLaunch, RankAssignment] | None = None
        self._first: int | None = None
        self._trains_since: float | None = None
        self._batch: _Batch | None = None
        self._released: list[_Batch] = []
        """Their gates stay open: a standby may not have come to its gate when it is released."""

    def __enter__(self) -> WarmStandby:
        return self

    def __exit__(self, *error: object) -> None:
        self._drop()
        for batch in self._released:
            batch.around_gates.close()

    def start(self, launch: LocalLaunch, assignment: RankAssignment) -> PContext:
        """The processes of these ranks: standbys if there are any for them, else new ones."""
        from shardway.ranks.local import start_program

        processes = self._release(launch, assignment)
        self._of, self._first, self._trains_since = (launch, assignment), None, None
        return processes or start_program(launch, assignment)

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

    def _release(self, launch: LocalLaunch, assignment: RankAssignment) -> PContext | None:
        """The standbys as these ranks; None if there are none, or none for them any more."""
        from shardway.ranks.local import handlers_of, rank_variables

        batch, of = self._batch, self._of
        if batch is None or of is None:
            return None
        is_whole = all(handler.proc.poll() is None for handler in handlers_of(batch.processes).values())
        if (of[0].ranks, of[1].first) != (launch.ranks, assignment.first) or not is_whole:
            self._drop()
            return None
        self._batch = None
        self._released.append(batch)
        if batch.output is not None:
            with contextlib.suppress(OSError):  # then their output is not found as that of the newest start
                (batch.output / WAITS).unlink(missing_ok=True)
        for local, gate in enumerate(batch.gates):
            gate.release(rank_variables(launch, assignment, local))
        return batch.processes

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
    from shardway.ranks.local import output_folder, start_program

    with contextlib.ExitStack() as around:
        folder = around.enter_context(private_folder(GATES))
        gates = [StandbyGate(folder / f"gate-{local}") for local in range(launch.ranks)]
        for gate in gates:
            around.callback(gate.close)
        processes = start_program(launch, assignment, [{VARIABLE: str(gate.path)} for gate in gates])
        output = output_folder(processes)
        is_marked = False
        with contextlib.suppress(OSError):
            (output / WAITS).touch()  # these processes are no ranks yet
            is_marked = True
        return _Batch(processes, gates, around.pop_all(), output if is_marked else None)
