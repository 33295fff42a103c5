"""Runs on a disk that takes nothing from some operation on, for one or many: `python full_disk.py FOLDER SEED CASES`.

Prints as JSON how many operations an undisturbed run takes and its losses, and for each case how the run ended and the
losses once the same command was given again on a disk that is well.

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
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

WORDS = ("checkpoint.every=5 steps", "checkpoint.keep=1", "checkpoint.background=true", "train.validate_every=10 steps")
EVER = 1 << 40


@dataclass
class Refusals:
    """A file system without room for the operations `first` to `last` (exclusive) of those that take some."""

    folder: str
    first: int = EVER
    last: int = EVER
    seen: int = 0

    def install(self) -> None:
        """In this process, until it ends."""
        for name, makes in (("mkdir", 0), ("rename", 0), ("replace", 0), ("link", 1)):
            setattr(os, name, self._by_path(getattr(os, name), makes))
        for name in ("write", "fsync", "ftruncate"):
            setattr(os, name, self._by_descriptor(getattr(os, name)))
        os.open = self._opening(os.open, lambda flags, *rest: bool(flags & os.O_CREAT))
        builtins.open = io.open = self._opening(io.open, lambda mode="r", *rest: bool(set(mode) & set("wxa")))  # type: ignore[assignment]

    def _count(self, path: object) -> None:
        if not os.path.abspath(os.fsdecode(path)).startswith(self.folder):  # type: ignore[arg-type]
            return
        number, self.seen = self.seen, self.seen + 1
        if self.first <= number < self.last:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), os.fsdecode(path))  # type: ignore[arg-type]

    def _by_path(self, call: Callable[..., Any], argument: int) -> Callable[..., Any]:
        def refuse(*arguments: Any, **named: Any) -> Any:
            self._count(arguments[argument])
            return call(*arguments, **named)

        return refuse

    def _by_descriptor(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def refuse(descriptor: int, *arguments: Any) -> Any:
            self._count(os.readlink(f"/proc/self/fd/{descriptor}"))
            return call(descriptor, *arguments)

        return refuse

    def _opening(self, call: Callable[..., Any], makes: Callable[..., bool]) -> Callable[..., Any]:
        def refuse(path: Any, *arguments: Any, **named: Any) -> Any:
            if not isinstance(path, int) and makes(*arguments, *([named["mode"]] if "mode" in named else [])):
                self._count(path)
            return call(path, *arguments, **named)

        return refuse


@dataclass(frozen=True)
class Case:
    """What was refused, how the run ended (empty: well), and its losses once it was given again."""

    first: int
    last: int
    kind: str = ""
    message: str = ""
    losses: list[float] = field(default_factory=list)


def attempt(run: Path, first: int = EVER, last: int = EVER) -> tuple[str, str, int]:
    """A run in a process of its own: the kind and the words of its error, and how many operations there were."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, json.dumps(_train(run, Refusals(str(run), first, last))).encode())
        os._exit(0)
    os.close(writer)
    with open(reader, encoding="utf-8") as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return tuple(json.loads(said)) if said else ("died", "", 0)  # type: ignore[return-value]


def _train(run: Path, refusals: Refusals) -> tuple[str, str, int]:
    from runs import lone_rank, train_tiny

    refusals.install()
    try:
        train_tiny(run, lone_rank(), *WORDS)
    except BaseException as error:
        return type(error).__name__, str(error), refusals.seen
    return "", "", refusals.seen


def try_case(folder: Path, first: int, last: int) -> Case:
    """A run that is refused something, and again where it did not end well."""
    from runs import read_column

    run = folder / "run"
    shutil.rmtree(run, ignore_errors=True)
    kind, message, _ = attempt(run, first, last)
    again = attempt(run) if kind else ("", "", 0)
    return Case(first, last, kind, message, read_column(run) if not again[0] else [])


def main() -> None:
    """See the module."""
    folder, dice, count = Path(sys.argv[1]), random.Random(sys.argv[2]), int(sys.argv[3])
    import torch

    torch.set_num_threads(1)
    from runs import read_column

    kind, message, operations = attempt(folder / "well")
    firsts = dice.sample(range(operations), min(count, operations))
    spans = [(first, first + dice.choice((1, dice.randrange(2, 20), EVER))) for first in firsts]
    cases = [asdict(try_case(folder, *span)) for span in spans]
    told = {"operations": operations, "error": f"{kind}: {message}" if kind else ""}
    print(json.dumps({**told, "losses": read_column(folder / "well"), "cases": cases}))


if __name__ == "__main__":
    main()
