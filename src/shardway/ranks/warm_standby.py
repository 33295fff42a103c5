"""Spare processes of this node, which take the place of its ranks when these have to start again.

Invariant: Spares that were taken are ranks, all others are dead when the standby ends. A start never waits for
spares, nor fails for want of them.

They are started while the ranks train, import what takes long, and wait (`ranks.standby_gate`). Ranks that start again
then need no new Python and no import of torch, which takes seconds here, and minutes on a shared file system that is
busy.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from torch.distributed.elastic.multiprocessing import PContext

from shardway.hardware.limits import read_memory_left
from shardway.ranks.agent.hang import Behind
from shardway.ranks.agent.heartbeat import GATES, private_folder
from shardway.ranks.local import LocalLaunch, Seats, handlers_of, output_folder, rank_variables, start_program
from shardway.ranks.standby_gate import StandbyGate
from shardway.rundir.directory import WAITS

AUTO_AFTER_S = 60.0
"""After the first step: short runs have none."""
SPARE_BYTES = 512 << 20
"""More than a process takes that has imported torch and shardway (300 MiB with torch 2.13 for CPUs)."""
MOST_OF_MEMORY = 0.25


@dataclass(frozen=True)
class _Batch:
    """Spares that were started together, their gates, what closes these, and the folder of what they print."""

    processes: PContext
    gates: Sequence[StandbyGate]
    around_gates: contextlib.ExitStack
    output: Path | None

    def is_whole(self) -> bool:
        """Whether all of them live."""
        return all(handler.proc.poll() is None for handler in handlers_of(self.processes).values())


class WarmStandby:
    """The spares of one node; `after_s`: how long after the first step of a start they are started, None: never.

    `bounded`: only where they take no more than MOST_OF_MEMORY of the memory that is left.
    """

    def __init__(
        self, after_s: float | None, *, bounded: bool = True, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._after_s, self._bounded, self._clock = after_s, bounded, clock
        self._of: tuple[LocalLaunch, Seats] | None = None
        self._first: int | None = None
        self._trains_since: float | None = None
        self._batch: _Batch | None = None
        self._taken: list[_Batch] = []
        """Their gates stay open: a spare may not have come to its gate when it is released."""

    def __enter__(self) -> WarmStandby:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._drop()
        for batch in self._taken:
            batch.around_gates.close()

    def start(self, launch: LocalLaunch, seats: Seats) -> PContext:
        """The processes of these ranks: spares, where there are some for them, else new ones."""
        taken = self._take(launch, seats)
        self._of, self._first, self._trains_since = (launch, seats), None, None
        return taken or start_program(launch, seats)

    def look(self, behind: Behind, *, ends: bool = False) -> None:
        """Now and then, with how far the hindmost rank here is: start spares when it is time. When this start `ends`,
        it is: they import while the ranks that live are ended and it is found out why."""
        if self._after_s is None or self._batch is not None or self._of is None:
            return
        if self._trains_since is None:
            if not self._trains(behind):
                return
            self._trains_since = self._clock()
        if ends or self._clock() - self._trains_since >= self._after_s:
            self._fill(*self._of)

    def _trains(self, behind: Behind) -> bool:
        """Whether a step was done since this start."""
        if behind.place is None or not behind.place[1]:
            return False
        if self._first is None:
            self._first = behind.place[0]
        return behind.place[0] > self._first

    def _fill(self, launch: LocalLaunch, seats: Seats) -> None:
        if self._bounded and launch.ranks * SPARE_BYTES > MOST_OF_MEMORY * read_memory_left():
            self._after_s = None
            return
        try:
            self._batch = _start_batch(launch, seats)
        except OSError:  # no more processes are to be had, or files: the ranks start without them
            self._after_s = None

    def _take(self, launch: LocalLaunch, seats: Seats) -> PContext | None:
        """The spares as these ranks; None where there are none, or none for them any more."""
        batch, of = self._batch, self._of
        if batch is None or of is None:
            return None
        if (of[0].ranks, of[1].first) != (launch.ranks, seats.first) or not batch.is_whole():
            self._drop()
            return None
        self._batch = None
        self._taken.append(batch)
        if batch.output is not None:
            with contextlib.suppress(OSError):  # then what they print is not found as that of the newest start
                (batch.output / WAITS).unlink(missing_ok=True)
        for local, gate in enumerate(batch.gates):
            gate.release(rank_variables(launch, seats, local))
        return batch.processes

    def _drop(self) -> None:
        """End the spares, which nobody needs."""
        batch, self._batch = self._batch, None
        if batch is not None:
            batch.processes.close(signal.SIGKILL)
            batch.around_gates.close()
            if batch.output is not None:
                shutil.rmtree(batch.output, ignore_errors=True)


def _start_batch(launch: LocalLaunch, seats: Seats) -> _Batch:
    """Raises OSError, and leaves nothing then: a spare whose gate is closed leaves."""
    with contextlib.ExitStack() as around:
        folder = around.enter_context(private_folder(GATES))
        gates = [_open_gate(around, folder / f"gate-{local}") for local in range(launch.ranks)]
        processes = start_program(launch, seats, [gate.path for gate in gates])
        return _Batch(processes, gates, around.pop_all(), _mark_waiting(processes))


def _open_gate(around: contextlib.ExitStack, path: Path) -> StandbyGate:
    gate = StandbyGate(path)
    around.callback(gate.close)
    return gate


def _mark_waiting(processes: PContext) -> Path | None:
    """The folder of what these processes print, marked: they are no ranks yet. None where it cannot be marked."""
    output = output_folder(processes)
    try:
        (output / WAITS).touch()
    except OSError:
        return None
    return output
