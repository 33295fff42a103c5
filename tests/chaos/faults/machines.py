"""Faults of the machine around the processes: memory that runs out, and a clock that jumps.

Invariant: memory runs out in a control group of the command's own, and the clock jumps for its processes alone.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from commands import Command, Room, injected
from faults.numbers import harmed
from faults.strike import (
    FIRST,
    LAST,
    Aftermath,
    Fault,
    Struck,
    any_rank,
    children,
    starts_again_since,
    wait_for_mark,
    wait_for_some_step,
)

JUMP = "SHARDWAY_TEST_JUMP"
"""FILE for `inject/sitecustomize.py`: as soon as it is there, `time.time` is later by the seconds that it holds."""

LIMIT_BYTES = 2 << 30
HOUR_S = 3600.0


@contextlib.contextmanager
def limited(folder: Path) -> Iterator[Room]:
    """A control group below this process's own whose processes have so much memory together."""
    group = _own_group() / f"shardway-{os.getpid()}-{folder.name}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(LIMIT_BYTES))
    except OSError as error:
        with contextlib.suppress(OSError):
            group.rmdir()
        pytest.skip(f"no control group of one's own can limit memory here: {error}")
    try:
        yield Room(("sh", "-euc", 'echo $$ > "$0"/cgroup.procs; exec "$@"', str(group)))
    finally:
        _end_all(group)
        group.rmdir()


def _own_group() -> Path:
    """This process's group in the memory controller of version 1; in version 2 only groups without processes have
    groups below them that are limited."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return Path("/sys/fs/cgroup/memory") / path.lstrip("/")
    pytest.skip("there is no memory controller of control groups, version 1")


def _end_all(group: Path) -> None:
    left = []
    for line in (group / "cgroup.procs").read_text().split():
        with contextlib.suppress(psutil.Error):
            left.append(psutil.Process(int(line)))
            left[-1].kill()
    psutil.wait_procs(left, timeout=10)


says_memory = starts_again_since("the memory of this control group, which may have 2GiB, ran out", "by SIGKILL")
"""The kernel has ended a rank, and the run says that it was for want of memory."""


def jump(seconds: float) -> Callable[[Command, random.Random], Struck]:
    """The date of all processes of a run is another from one moment to the next."""

    def act(command: Command, dice: random.Random) -> Struck:
        wait_for_some_step(command, dice)
        struck = Struck(time.time(), "clock")
        whole = command.home / "jump.new"
        whole.write_text(str(seconds))
        whole.rename(command.home / "jump")
        return struck

    return act


def jumps(folder: Path, dice: random.Random) -> Mapping[str, str]:
    return injected(**{JUMP: str(folder / "jump")})


def nothing_started_again(after: Aftermath) -> None:
    """No clock but the monotonic one decides anything, and the events show the jump."""
    assert after.restarts == 0
    times = [event["time"] for event in after.events("step")]
    far = [abs(later - earlier) for earlier, later in pairwise(times)]
    assert max(far) > HOUR_S - 600, "it has jumped"


def jump_and_kill(seconds: float) -> Callable[[Command, random.Random], Struck]:
    """The date jumps, then a rank is killed."""

    def act(command: Command, dice: random.Random) -> Struck:
        struck = jump(seconds)(command, dice)
        command.note_processes()
        children(command)[any_rank(dice)].kill()
        return struck

    return act


FAULTS = (
    Fault(
        "memory runs out (the kernel kills a rank)",
        wait_for_mark("harmed"),
        (),
        harmed("hog", FIRST, LAST),
        room=limited,
        expects=says_memory,
        is_further=True,
    ),
    Fault(
        "clock an hour on",
        jump(HOUR_S),
        (),
        jumps,
        expects=nothing_started_again,
        is_further=True,
        is_timed=False,
    ),
    Fault(
        "clock an hour back",
        jump(-HOUR_S),
        (),
        jumps,
        expects=nothing_started_again,
        is_further=True,
        is_timed=False,
    ),
    Fault(
        "clock an hour back, and SIGKILL of a rank", jump_and_kill(-HOUR_S), (), jumps, is_further=True, is_timed=False
    ),
    Fault("clock an hour on, and SIGKILL of a rank", jump_and_kill(HOUR_S), (), jumps, is_further=True, is_timed=False),
)
