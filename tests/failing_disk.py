"""Runs whose file system fails for one or many operations: `python failing_disk.py KIND FOLDER SEED CASES`.

KIND "full" takes nothing more (ENOSPC); "away" answers nothing at all, reads and open files neither, as that of a
server that is gone (ENOTCONN). Prints as JSON how many operations an undisturbed run takes and its losses, and for each
case how the run ended and the losses once the same command was given again on a file system that is well.

Invariant: every run is a process of its own, so that the one before it is dead. Only what is under FOLDER is refused.
"""

from __future__ import annotations

import builtins
import errno
import io
import json
import os
import random
import shutil
import stat
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

WORDS = ("checkpoint.every=5 steps", "checkpoint.keep=1", "checkpoint.background=true", "train.validate_every=10 steps")
EVER = 1 << 40
ERRORS = {"full": errno.ENOSPC, "away": errno.ENOTCONN}


def _is_folder(path: str, look: Callable[[str], os.stat_result] = os.stat) -> bool:
    try:
        return stat.S_ISDIR(look(path).st_mode)
    except OSError:
        return False


@dataclass
class Refusals:
    """A file system that refuses the operations `first` to `last` (exclusive) of those that its kind counts.

    `steps`: how many it had seen before each step.
    """

    kind: str
    folder: str
    first: int = EVER
    last: int = EVER
    seen: int = 0
    steps: list[int] = field(default_factory=list)
    _readlink: Callable[[str], str] = os.readlink

    def install(self) -> None:
        """In this process, until it ends."""
        is_away = self.kind == "away"
        for name, makes in (("mkdir", 0), ("rename", 0), ("replace", 0), ("link", 1)):
            setattr(os, name, self._by_path(getattr(os, name), makes))
        for name in ("write", "fsync", "ftruncate"):
            setattr(os, name, self._by_descriptor(getattr(os, name)))
        for name in ("stat", "lstat", "access", "listdir", "scandir", "unlink", "rmdir", "readlink") if is_away else ():
            setattr(os, name, self._by_path(getattr(os, name), 0))
        for name in ("read", "pread", "preadv", "fstat", "close") if is_away else ():
            setattr(os, name, self._by_descriptor(getattr(os, name), is_done_first=name == "close"))
        os.open = self._opening(os.open, lambda flags, *rest: is_away or bool(flags & os.O_CREAT))
        opening = self._opening(io.open, lambda mode="r", *rest: is_away or bool(set(mode) & set("wxa")))
        builtins.open = io.open = opening  # type: ignore[assignment]

    def note_step(self, *_: object) -> None:
        """A step is to come."""
        self.steps.append(self.seen)

    def met_steps_alone(self) -> bool:
        """Whether all that was refused lay between two steps of the run, neither its start nor its end."""
        return bool(self.steps) and self.steps[0] <= self.first and self.last <= self.steps[-1]

    def _count(self, path: object) -> None:
        if not os.path.abspath(os.fsdecode(path)).startswith(self.folder):  # type: ignore[arg-type]
            return
        number, self.seen = self.seen, self.seen + 1
        if self.first <= number < self.last:
            raise OSError(ERRORS[self.kind], os.strerror(ERRORS[self.kind]), os.fsdecode(path))  # type: ignore[arg-type]

    def _by_path(self, call: Callable[..., Any], argument: int) -> Callable[..., Any]:
        def refuse(*arguments: Any, **named: Any) -> Any:
            if arguments and not isinstance(arguments[argument], int):
                self._count(arguments[argument])
            return call(*arguments, **named)

        return refuse

    def _by_descriptor(self, call: Callable[..., Any], *, is_done_first: bool = False) -> Callable[..., Any]:
        def refuse(descriptor: int, *arguments: Any) -> Any:
            path = self._find_path(descriptor)
            if is_done_first and not _is_folder(path):  # a close that fails has closed all the same
                call(descriptor)
                self._count(path)
                return None
            if not is_done_first:
                self._count(path)
            return call(descriptor, *arguments)

        return refuse

    def _opening(self, call: Callable[..., Any], counts: Callable[..., bool]) -> Callable[..., Any]:
        def refuse(path: Any, *arguments: Any, **named: Any) -> Any:
            if not isinstance(path, int) and counts(*arguments, *([named["mode"]] if "mode" in named else [])):
                self._count(path)
            return call(path, *arguments, **named)

        return refuse

    def _find_path(self, descriptor: int) -> str:
        """What is open there; nothing of ours where nothing is."""
        try:
            return self._readlink(f"/proc/self/fd/{descriptor}")
        except OSError:
            return "/"


@dataclass(frozen=True)
class Ended:
    """How a run ended: the kind and the words of its error (empty: well), how many operations it took, and whether
    nothing was refused but between two steps."""

    kind: str = ""
    message: str = ""
    operations: int = 0
    met_steps_alone: bool = False


@dataclass(frozen=True)
class Case:
    """What was refused, how the run ended, and its losses once it was given again."""

    first: int
    last: int
    ended: Ended
    losses: list[float] = field(default_factory=list)


def attempt(refusals: Refusals) -> Ended:
    """A run in a process of its own."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, json.dumps(asdict(_train(refusals))).encode())
        os._exit(0)
    os.close(writer)
    with open(reader, encoding="utf-8") as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return Ended(**json.loads(said)) if said else Ended("died")


def _train(refusals: Refusals) -> Ended:
    from runs import lone_rank, train_tiny

    refusals.install()
    error: BaseException | None = None
    try:
        train_tiny(Path(refusals.folder), lone_rank(), *WORDS, before_step=refusals.note_step)
    except BaseException as raised:
        error = raised
    kind, message = (type(error).__name__, str(error)) if error is not None else ("", "")
    return Ended(kind, message, refusals.seen, refusals.met_steps_alone())


def try_case(run: Path, kind: str, first: int, last: int) -> Case:
    """A run that is refused something, and again where it did not end well."""
    from runs import read_column

    shutil.rmtree(run, ignore_errors=True)
    ended = attempt(Refusals(kind, str(run), first, last))
    again = attempt(Refusals(kind, str(run))) if ended.kind else Ended()
    return Case(first, last, ended, read_column(run) if not again.kind else [])


def main() -> None:
    """See the module."""
    kind, folder, dice, count = sys.argv[1], Path(sys.argv[2]), random.Random(sys.argv[3]), int(sys.argv[4])
    import torch

    torch.set_num_threads(1)
    from runs import read_column

    well = attempt(Refusals(kind, str(folder / "well")))
    firsts = dice.sample(range(well.operations), min(count, well.operations))
    spans = [(first, first + dice.choice((1, dice.randrange(2, 20), EVER))) for first in firsts]
    cases = [asdict(try_case(folder / "run", kind, *span)) for span in spans]
    print(json.dumps({"well": asdict(well), "losses": read_column(folder / "well"), "cases": cases}))


if __name__ == "__main__":
    main()
