"""Runs a verb on what was damaged and says what is wrong with its answer.

Invariant: a complaint is a sentence; no complaint means one clear message, the right exit code, and no file changed.
This module must not damage anything.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from shardway.cli.main import app, run_guarded

MOST_CHARACTERS = 8_000
"""Of a message: a screen full. A value that is longer than a line is shortened."""


LIMIT_S = 60
"""For a verb that answers in some milliseconds."""


@dataclass(frozen=True)
class Answer:
    """How a verb ended and what it printed."""

    words: tuple[str, ...]
    code: int
    out: str
    err: str

    def complaints(self, codes: Sequence[int], *names: str, printable: bool = True) -> list[str]:
        """What is wrong with it, where these exit codes are right and an error has to name one of `names`.

        `printable`: no output of somebody else's program, which may colour what it prints.
        """
        found = [f"exit code {self.code}, not one of {codes}"] if self.code not in codes else []
        if "Traceback" in self.err or "Traceback" in self.out:
            found.append("a traceback")
        strange = sorted({char for char in self.out + self.err if not char.isprintable() and char != "\n"})
        if strange and printable:
            found.append(f"characters that a terminal obeys: {strange[:5]!a}")
        if self.code:
            found += self._complain_of_message(names)
        return found

    def _complain_of_message(self, names: Sequence[str]) -> Iterator[str]:
        told = self.err.strip() or self.out.strip()
        if not told:
            yield "no message"
        elif names and not any(name in self.err + self.out for name in names):
            yield f"the message names none of {names}"
        if self.err and not self.err.startswith("shardway: "):
            yield "the message is not one of Shardway's"
        if len(self.err) > MOST_CHARACTERS:
            yield f"the message has {len(self.err)} characters"

    def __str__(self) -> str:
        said = (self.err or self.out).strip()
        return f"shardway {' '.join(self.words)} -> {self.code}\n      " + said[-1500:].replace("\n", "\n      ")


def call(*words: str) -> Answer:
    """A verb of the command line in this process."""
    return guarded(lambda: app(list(words), standalone_mode=False, prog_name="shardway"), *words)


def guarded(work: Callable[[], object], *words: str) -> Answer:
    """What a verb does, with its errors made messages; output is held to be UTF-8, as a terminal's."""
    out, err = io.BytesIO(), io.BytesIO()
    with _stream(out) as into, _stream(err) as told, contextlib.redirect_stdout(into), contextlib.redirect_stderr(told):
        with _limited():
            code = run_guarded(work)
        into.flush()
        told.flush()
        return Answer(words, code, out.getvalue().decode(), err.getvalue().decode())


def _stream(into: io.BytesIO) -> io.TextIOWrapper:
    return io.TextIOWrapper(into, encoding="utf-8", newline="")


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    """A verb that takes too long ends with an error, which is a complaint."""

    def end(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"no answer in {LIMIT_S} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(LIMIT_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def picture(folder: Path, *, without: Sequence[str] = ()) -> dict[str, str]:
    """What lies in a folder: path -> what it is, files by the digest of their content."""
    found = {}
    for base, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(base, name)
            if name not in without:
                found[str(path.relative_to(folder))] = _describe(path)
    return found


def _describe(path: Path) -> str:
    if path.is_symlink():
        return f"a link to {path.readlink()}"
    if path.is_dir():
        return "a folder"
    return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
