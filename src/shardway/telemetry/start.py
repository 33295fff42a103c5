"""Starts the process that samples this node, and ends it: in the agent of a node, and in a rank without an agent.

Invariants:
- A run is sampled once on a node: VARIABLE names the folder that is sampled already.
- The process starts START_AFTER_S after the ranks, so that a short run has none, and nothing here fails a run.
- When `sampled` is left, the process has ended, or was killed.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VARIABLE = "SHARDWAY_TELEMETRY"
"""The folder into which this node is sampled."""
START_AFTER_S = 5.0
END_S = 2.0
_NOT_OF_IT = ("SHARDWAY_JOB", "LD_PRELOAD")
"""Not handed on: the name by which a job of this machine is ended, and what was meant for the ranks."""


@dataclass(frozen=True)
class SampledRun:
    """What is sampled. `folder`: where the file of this host is. `top`: the root of the job's processes here. `events`:
    nothing is written before this file of the run grows; None for a run that has begun. `heartbeats`: the folder of
    those of `ranks` ranks, the first of which is rank `first`; None where they show none."""

    folder: Path
    every_s: float
    top: int
    node: int = 0
    job: str = ""
    attempt: int = 0
    marker: str = ""
    events: Path | None = None
    heartbeats: Path | None = None
    first: int = 0
    ranks: int = 0

    @classmethod
    def of_attempt(
        cls, attempt: Path | None, folder: Path, every_s: float, top: int, environ: Mapping[str, str], **more: Any
    ) -> SampledRun:
        """What is sampled of a run by a process of it: the job by the variables of its script, the attempt by its
        folder."""
        number = int(attempt.name) if attempt is not None and attempt.name.isdigit() else 0
        return cls(folder, every_s, top, job=environ.get("SHARDWAY_JOB", ""), attempt=number, **more)

    def words(self) -> list[str]:
        """The command of the process."""
        from shardway.telemetry.sampler import measure  # not for those that only know VARIABLE

        after = "" if self.events is None else f"{measure(self.events)}:{os.path.abspath(self.events)}"
        options = {
            "into": os.path.abspath(self.folder),
            "every_s": f"{self.every_s:g}",
            "top": self.top,
            "node": self.node,
            "job": self.job,
            "attempt": self.attempt,
            "marker": self.marker,
            "after": after,
            "pipe": "yes",
            "ranks": "" if self.heartbeats is None else f"{self.first}:{self.ranks}:{self.heartbeats}",
        }
        words = [f"{name}={value}" for name, value in options.items() if value != ""]
        return [sys.executable, "-m", "shardway.telemetry.sampler", *words]


@contextlib.contextmanager
def sampled(run: SampledRun | None, environ: MutableMapping[str, str] = os.environ) -> Iterator[None]:
    """While entered, this node is sampled; not if `run` is None, or another process does it already."""
    if run is None or is_sampled(run.folder, environ):
        yield
        return
    before = environ.get(VARIABLE)
    words = run.words()  # now, while the run has not begun
    is_over = threading.Event()
    thread = threading.Thread(target=_watch, args=(words, dict(environ), is_over), name="sampling", daemon=True)
    environ[VARIABLE] = os.path.abspath(run.folder)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        if before is None:
            environ.pop(VARIABLE, None)
        else:
            environ[VARIABLE] = before


def is_sampled(folder: Path, environ: MutableMapping[str, str]) -> bool:
    """Whether a process samples this node into that folder already."""
    there = environ.get(VARIABLE, "")
    return bool(there) and os.path.realpath(there) == os.path.realpath(folder)


def _watch(words: list[str], environ: dict[str, str], is_over: threading.Event) -> None:
    """Start the process some seconds later, and end it when all is over."""
    if is_over.wait(START_AFTER_S):
        return
    for name in _NOT_OF_IT:
        environ.pop(name, None)
    try:
        process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env=environ,
            start_new_session=True,  # Ctrl-C is for the ranks, which then still save
        )
    except OSError:  # no process can be started: the run goes on without
        return
    is_over.wait()
    with contextlib.suppress(OSError):
        process.stdin.close()  # type: ignore[union-attr]
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # one that hangs in a driver cannot be waited for
            process.wait(END_S)
