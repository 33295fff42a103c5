"""A world of hosts and processes with a clock of its own, in which each run of a seed goes the same way.

Real code runs in it as it stands: each task is a thread, and only one of all threads ever runs. It gives way where it
waits, for time to pass or for a file, and nowhere else.

Invariant: what happens is a pure function of the seed. Time stands still while a task runs.
"""

from __future__ import annotations

import heapq
import itertools
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from shardway.rundir.lease import Identity

FOREVER = float("inf")


class Killed(BaseException):
    """Ends a task in the middle of what it does, as kill -9 does: nothing that it tries afterwards has an effect."""


class Broken(Exception):
    """Something happened in the world that must not."""


class Workers:
    """Threads that are used again: to make one takes longer than most of what it does."""

    def __init__(self) -> None:
        self._idle: list[_Worker] = []

    def take(self) -> _Worker:
        """A thread that has nothing to do."""
        return self._idle.pop() if self._idle else _Worker(self._idle)

    def end(self) -> None:
        """End all threads; none of them is busy."""
        for worker in self._idle:
            worker.start(None)
            worker.thread.join()


class _Worker:
    def __init__(self, idle: list[_Worker]) -> None:
        self.gate = threading.Lock()
        self.gate.acquire()
        self._idle = idle
        self._work: Callable[[], None] | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def start(self, work: Callable[[], None] | None) -> None:
        """Let it work, or end it."""
        self._work = work
        self.gate.release()

    def _run(self) -> None:
        while True:
            self.gate.acquire()
            work = self._work
            if work is None:
                return
            work()


@dataclass(eq=False)
class Host:
    """A host: its clock goes `rate` times as fast as time, its date is `skew_s` off; it may stand still, or be down."""

    name: str
    rate: float = 1.0
    skew_s: float = 0.0
    boots: int = 1
    paused_until: float = 0.0
    down_until: float = 0.0
    frozen_s: float = 0.0
    processes: dict[int, Process] = field(default_factory=dict)

    def stop(self, now: float, seconds: float, *, frozen: bool) -> None:
        """Stand still for a while; `frozen`: its clock too, and it will not know."""
        until = max(self.paused_until, now + seconds)
        if frozen:
            self.frozen_s += until - max(self.paused_until, now)
        self.paused_until = until

    def is_gone(self, other: Identity) -> bool:
        """What a process here can be sure of."""
        here = (self.name, f"boot-{self.boots}")
        return (other.host, other.boot) == here and other.pid not in self.processes


@dataclass(eq=False)
class Process:
    """A process on a host; `namespace` is that of its container."""

    world: World
    host: Host
    pid: int
    namespace: str = "pids"
    tasks: list[Task] = field(default_factory=list)

    @property
    def lives(self) -> bool:
        """Whether it is there."""
        return self.pid in self.host.processes

    @property
    def identity(self) -> Identity:
        """What it says of itself."""
        return Identity(self.host.name, f"boot-{self.host.boots}", self.namespace, self.pid, str(self.pid))

    def is_gone(self, other: Identity) -> bool:
        """What it can be sure of: it sees its own container alone."""
        return other.namespace == self.namespace and self.host.is_gone(other)

    def spawn(self, work: Callable[[], None]) -> None:
        """Begin a task of it, now."""
        task = Task(self.world, self, work)
        self.tasks.append(task)
        self.world.wake(task, self.world.now)

    def kill(self) -> None:
        """End it at once."""
        self.host.processes.pop(self.pid, None)
        for task in self.tasks:
            task.killed = True
            self.world.wake(task, self.world.now)

    def end(self) -> None:
        """It has come to its end by itself: what is left of its tasks ends with it."""
        self.kill()

    # --- its clock and its mutexes

    def now(self) -> float:
        """What the host's clock says that never goes back."""
        return (self.world.now - self.host.frozen_s) * self.host.rate

    def date(self) -> str:
        """The date of the world's story, never the real one: a seed goes the same way at any time of day."""
        return f"2026-01-02 00:{int(self.world.now) // 60:02}:{int(self.world.now) % 60:02}"

    def sleep(self, seconds: float) -> None:
        """Wait by that clock."""
        self.world.wait(seconds / self.host.rate)

    def mutex(self) -> Mutex:
        """What one task of it holds at a time."""
        return Mutex(self.world)


class Mutex:
    """Held by one task at a time."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._held = False

    def __enter__(self) -> None:
        while self._held:
            self._world.wait(0.01)
        self._held = True

    def __exit__(self, *error: object) -> None:
        self._held = False


class Task:
    """One thread of a process."""

    def __init__(self, world: World, process: Process, work: Callable[[], None]) -> None:
        self.world = world
        self.process = process
        self.killed = False
        self.done = False
        self.wakes = 0
        self._work = work
        self.worker: _Worker | None = None

    def resume(self) -> None:
        """Run it until it waits."""
        if self.worker is None:
            if self.killed:
                self.done = True
                return
            self.worker = self.world.workers.take()
            self.worker.start(self._run)
        else:
            self.worker.gate.release()
        self.world.gate.acquire()

    def _run(self) -> None:
        worker = self.worker
        try:
            self._work()
        except Killed:
            pass
        except BaseException as error:
            self.world.failure = self.world.failure or error
        self.done = True
        if worker is not None:
            worker._idle.append(worker)
        self.world.gate.release()


class World:
    """Hosts, processes, and what happens when."""

    def __init__(self, seed: str, workers: Workers) -> None:
        self.dice = random.Random(seed)
        self.seed = seed
        self.workers = workers
        self.now = 0.0
        self.hosts: list[Host] = []
        self.log: list[tuple[float, str, str]] = []
        self.failure: BaseException | None = None
        self.gate = threading.Lock()
        self.gate.acquire()
        self.over = False
        self.traps: dict[str, Callable[[Process], None]] = {}
        self._current: Task | None = None
        self._heap: list[tuple[float, int, Any, int]] = []
        self._numbers = itertools.count()
        self._pids = itertools.count(1)

    def note(self, who: str, what: str) -> None:
        """A line for whoever reads how a seed went."""
        self.log.append((self.now, who, what))

    def start_process(self, host: Host, namespace: str = "pids") -> Process:
        """A process that does nothing yet."""
        process = Process(self, host, next(self._pids), namespace)
        host.processes[process.pid] = process
        return process

    def at(self, time: float, act: Callable[[], None]) -> None:
        """Let something happen at a time."""
        heapq.heappush(self._heap, (time, next(self._numbers), act, 0))

    def wake(self, task: Task, time: float) -> None:
        """Let a task go on at a time, and not before."""
        if not task.done:
            task.wakes += 1
            heapq.heappush(self._heap, (time, next(self._numbers), task, task.wakes))

    def wait(self, seconds: float) -> None:
        """Let time pass for the task that runs; longer where its host stands still."""
        task = self._current
        if task is None:
            raise Broken("something waits that is no task")
        if task.killed:
            raise Killed
        until = self.now + seconds
        if (self._heap and self._heap[0][0] <= until) or task.process.host.paused_until > self.now:
            self.wake(task, until)
            worker = task.worker
            self.gate.release()
            if worker is not None:
                worker.gate.acquire()
            if task.killed:
                raise Killed
        else:  # nothing else happens before: it goes on at once
            self.now = until

    def pass_point(self, name: str, process: Process) -> None:
        """A place in what a process does, at which something may wait for it once."""
        trap = self.traps.pop(name, None)
        if trap is not None:
            trap(process)
            self.wait(0.0)

    def run(self, until: float) -> None:
        """Let everything happen until a time, or until it is over. Raises what a task raised."""
        while self._heap and not self.over and self.failure is None:
            time, _, what, wakes = heapq.heappop(self._heap)
            if time > until:
                break
            self.now = max(self.now, time)
            if isinstance(what, Task):
                self._go_on(what, wakes)
            else:
                what()
        self._end()
        if self.failure is not None:
            raise self.failure

    def _go_on(self, task: Task, wakes: int) -> None:
        if task.done or wakes != task.wakes:
            return
        if task.process.host.paused_until > self.now and not task.killed:
            self.wake(task, task.process.host.paused_until)
            return
        self._current = task
        task.resume()
        self._current = None

    def _end(self) -> None:
        """Give back all threads."""
        for host in self.hosts:
            for process in list(host.processes.values()):
                process.kill()
        while self._heap:
            _, _, what, _ = heapq.heappop(self._heap)
            if isinstance(what, Task) and not what.done:
                what.killed = True
                self._current = what
                what.resume()
        self._current = None
