"""Runs programs that may never answer: a driver's tool, a scheduler's, a look at a mounted folder.

Invariant: `run_commands` returns soon after its limit, whatever the programs do: one that the kernel does not let go
(a hung mount, a dead driver) is left behind. This module must not know what a program is asked.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass

_KILLED_WITHIN_S = 0.5
MISSING = 127
"""Code of a program that is not there, as a shell gives it."""


@dataclass(frozen=True)
class CommandResult:
    """How a program ended; `hung`: its time was over, so that `code` says nothing."""

    code: int
    out: str = ""
    err: str = ""
    hung: bool = False

    @property
    def ok(self) -> bool:
        return self.code == 0 and not self.hung

    @property
    def missing(self) -> bool:
        return self.code == MISSING and not self.hung

    @property
    def first_line(self) -> str:
        return next((line.strip() for line in (self.err + "\n" + self.out).splitlines() if line.strip()), "")


def run_command(words: Sequence[str], limit_s: float) -> CommandResult:
    """Run one program, at most `limit_s` seconds."""
    return run_commands([words], limit_s)[0]


def run_commands(commands: Sequence[Sequence[str]], limit_s: float) -> list[CommandResult]:
    """Run programs side by side, at most `limit_s` seconds in all; an answer each, in their order."""
    deadline = time.monotonic() + limit_s
    started = [_start(words) for words in commands]
    return [_finish(each, deadline) if isinstance(each, subprocess.Popen) else each for each in started]


def _start(words: Sequence[str]) -> subprocess.Popen[str] | CommandResult:
    try:
        return subprocess.Popen(
            list(words),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env={**os.environ, "LC_ALL": "C"},
            start_new_session=True,  # so that its children can be ended with it
        )
    except OSError as error:
        return CommandResult(MISSING, err=error.strerror or str(error))


def _finish(process: subprocess.Popen[str], deadline: float) -> CommandResult:
    try:
        out, err = process.communicate(timeout=max(0.05, deadline - time.monotonic()))
        return CommandResult(process.returncode, out, err)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    # One that hangs in the kernel ends when the kernel releases it, and is not waited for.
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.communicate(timeout=_KILLED_WITHIN_S)
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()
    return CommandResult(-signal.SIGKILL, hung=True)
