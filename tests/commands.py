"""`shardway train` as processes that a test starts, watches, and ends.

Invariant: when the context of `training_commands` ends, none of the processes that it has seen is alive.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil

import warm
from shardway.rundir.directory import RunDir

PATIENCE_S = 300.0
"""Guards against a hang alone: a command imports torch on each of its ranks, and may compile."""


@dataclass(frozen=True)
class Room:
    """Where a command runs: what is put before it to get there, its root as it is seen from here, and the folder,
    within the test's own, that runs are in."""

    enter: tuple[str, ...] = ()
    root: Path = Path("/")
    runs: str = ""

    def see(self, path: Path) -> Path:
        """A path of the room, from here."""
        return self.root / path.relative_to("/")


def find_ranks(processes: Iterable[psutil.Process]) -> dict[int, psutil.Process]:
    """The ranks among these that live, by number; spares that wait for a rank's place are younger than the rank."""
    found: dict[int, psutil.Process] = {}
    for process in processes:
        with contextlib.suppress(psutil.Error):  # what has ended since is none
            if _is_rank(process):
                rank = int(process.environ()["RANK"])
                found[rank] = min((process, found.get(rank, process)), key=psutil.Process.create_time)
    return found


def _is_rank(process: psutil.Process) -> bool:
    """Whether it runs the program of ranks; one that has ended does not."""
    with contextlib.suppress(psutil.Error):
        return "shardway.cli.rank" in " ".join(process.cmdline())
    return False


@dataclass
class Command:
    """One `shardway train` under way, and all the processes that it has been seen with.

    `folder` is its run directory as it is seen from here, `home` the folder of the test, `again` starts it once more
    with further words.
    """

    folder: Path
    home: Path
    process: subprocess.Popen[str]
    events_before: int
    again: Callable[..., Command]
    room: Room = Room()
    seen: set[psutil.Process] = field(default_factory=set)

    @property
    def run(self) -> RunDir:
        return RunDir(self.folder)

    def wait_for_step(self, step: int) -> None:
        """Wait until this command has recorded a step, and note its processes."""
        self.wait_until(lambda: any(event["step"] >= step for event in self.own_events() if event["event"] == "step"))
        self.note_processes()

    def note_processes(self) -> None:
        """Remember the processes of this moment."""
        own = psutil.Process(self.process.pid)
        self.seen |= {own, *own.children(recursive=True)}

    def own_events(self) -> list[dict[str, Any]]:
        """What was recorded since this command has begun."""
        return list(self.run.all_events())[self.events_before :]

    def wait_until(self, holds: Callable[[], bool], pause_s: float = 0.02) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not holds():
            # It may have come to that right before its end.
            assert self.process.poll() is None or holds(), self.process.communicate()
            assert time.monotonic() < deadline, "it takes too long"
            time.sleep(pause_s)

    def ranks(self) -> dict[int, psutil.Process]:
        """The local ranks by number."""
        return find_ranks(self.seen)

    def spares(self) -> list[psutil.Process]:
        """Processes that wait for the places of ranks."""
        self.note_processes()
        ranks, programs = self.ranks().values(), [process for process in self.seen if _is_rank(process)]
        return [process for process in programs if process not in ranks]

    def end(self) -> tuple[int, str]:
        """Wait for the end: exit code and what went to stderr."""
        _, said = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, said

    def finish(self) -> None:
        """Wait for a good end."""
        code, said = self.end()
        assert code == 0, said

    def left_alive(self) -> list[psutil.Process]:
        """Processes that outlive the command; a rank that was told to stop may take a moment to save."""
        _, alive = psutil.wait_procs(self.seen, timeout=60)
        return alive


Start = Callable[..., Command]


@contextlib.contextmanager
def training_commands(folder: Path) -> Iterator[Start]:
    """`start("name", *words)` trains into a folder of that name, in a `room`, with `environ` besides this process's
    own."""
    started: list[Command] = []

    def go(
        name: str,
        *words: str,
        launcher: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
        room: Room = Room(),
    ) -> Command:
        target = folder / room.runs / name
        program = [*room.enter, sys.executable, *launcher, "-m", "shardway", "train"]
        command = [*program, "--json", "--dir", str(target), *words]
        inherited = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        pipe = subprocess.PIPE
        seen = room.see(target)
        before = len(list(RunDir(seen).all_events()))
        with warm.starts():
            process = subprocess.Popen(
                command, env={**inherited, **(environ or {})}, cwd=folder, stdout=pipe, stderr=pipe, text=True
            )
        same = partial(go, name, *words, launcher=launcher, environ=environ, room=room)
        started.append(Command(seen, folder, process, before, same, room))
        return started[-1]

    try:
        yield go
    finally:
        for command in started:
            command.process.kill()
            for process in command.seen:  # one that was stopped would hold the pipes for ever
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            command.process.communicate()
            command.left_alive()


def stalling(rank: int, batch: int, mark: Path) -> dict[str, str]:
    """Variables that make a rank wait for a batch that does not come; once, since it leaves a mark."""
    return injected(SHARDWAY_TEST_STALL=f"{rank}:{batch}:{mark}")


def killing_in_save(rank: int, step: int, mark: Path) -> dict[str, str]:
    """Variables that kill a rank while it writes the first checkpoint from a step on; once, since it leaves a mark."""
    return injected(SHARDWAY_TEST_KILL=f"{rank}:writing:{step}:{mark}")


def pacing(seconds: float) -> dict[str, str]:
    """Variables that make each batch of training take so much longer."""
    return injected(SHARDWAY_TEST_PACE=str(seconds))


def injected(**variables: str) -> dict[str, str]:
    """What makes every Python of a command import `chaos/inject/sitecustomize.py`, and tells it what to do."""
    inject = Path(__file__).parent / "chaos" / "inject"
    path = os.pathsep.join([str(inject), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    return {**variables, "PYTHONPATH": path}
