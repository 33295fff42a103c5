"""The attempt that this process is a part of, and how its ranks say that it failed.

Invariant: of the ranks of one attempt, the one whose own error ended it says so; a rank that only lost contact with
another gives that one time to speak first. This module must not import torch, nor decide what happens next.
"""

from __future__ import annotations

import contextlib
import re
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from shardway.errors import LostContact, NodeLost, ShardwayError, SiteError, render_reason
from shardway.rundir.attempts import VARIABLE, Attempt, Ending, Result

PATIENCE_S = 5.0
"""How long a rank that lost contact waits for the words of the rank that is to blame."""

_PAUSE_S = 0.05
_LONGEST = 200
_UNNAMED_EXIT = 70

_PATH = re.compile(r"""[^\s,;:'"()\[\]]*/[^\s,;:'"()\[\]]*""")
_ADDRESS = re.compile(r"0x[0-9a-fA-F]+|\b(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{8,}\b")
_NUMBER = re.compile(r"\d+(?:[.,_]\d+)*(?:[eE][+-]?\d+)?")


@dataclass(frozen=True)
class RankFault:
    """What ended a rank: the name of the error's class, its message, and the exit code that the rank ends with."""

    kind: str
    message: str
    exit_code: int
    out_of_memory: bool = False


def find_attempt(environ: Mapping[str, str]) -> Attempt | None:
    """The attempt that a job script started this process for; None where none did.

    Raises SiteError where its folder is not there: what the ranks have to say would be lost.
    """
    path = environ.get(VARIABLE, "")
    if not path:
        return None
    if not Path(path).is_dir():
        raise SiteError(
            f"{VARIABLE} names {path}, and there is no such folder on {socket.gethostname()}.\n"
            "  It is where a job says how it went. To do: make the run directory visible on every node and in the "
            "container, or unset the variable where no job is meant."
        )
    return Attempt(Path(path))


def describe_error(error: BaseException, *, out_of_memory: bool = False) -> RankFault:
    """An error as a fault; one that is not Shardway's own counts as a defect."""
    if isinstance(error, ShardwayError):
        return RankFault(type(error).__name__, str(error), error.exit_code, out_of_memory)
    name = type(error).__name__
    return RankFault(name, f"{name}: {error}" if str(error) else name, _UNNAMED_EXIT, out_of_memory)


def sign_failure(fault: RankFault) -> str:
    """A line that is the same for the same failure of another attempt: numbers, addresses and paths are left out.

    What a rank says that lost contact depends on how; only that it did is kept.
    """
    line = next((line.strip() for line in fault.message.splitlines() if line.strip()), "")
    line = "" if line == fault.kind else line.removeprefix(f"{fault.kind}: ")
    if fault.kind == LostContact.__name__:
        line = line.partition(":")[0]
    for pattern, stand_in in ((_PATH, "PATH"), (_ADDRESS, "#"), (_NUMBER, "#")):
        line = pattern.sub(stand_in, line)
    return f"{fault.kind}: {' '.join(line.split())}"[:_LONGEST].rstrip(": ")


_STATES = {NodeLost.__name__: Ending.NODE_FAILURE}
"""Error -> how an attempt ends with it, where that is no crash."""


def report_fault(
    attempt: Attempt | None, by: str, fault: RankFault, step: int = 0, patience_s: float = PATIENCE_S
) -> bool:
    """Write that the attempt crashed, ran out of memory or lost a node, unless somebody has said how it ended.

    `patience_s` is how long a rank that lost contact waits for somebody else's words. Whether these were taken;
    False as well where the file system refuses them, since the error itself matters more.
    """
    if attempt is None or (fault.kind == LostContact.__name__ and _is_told(attempt, patience_s)):
        return False
    state = _STATES.get(fault.kind, Ending.CRASHED) if not fault.out_of_memory else Ending.OUT_OF_MEMORY
    with contextlib.suppress(OSError):
        return report_end(
            attempt, Result(state, render_reason(fault.message), step, fault.exit_code, sign_failure(fault), by=by)
        )
    return False


def report_end(attempt: Attempt, result: Result) -> bool:
    """Write how the attempt ended, with its job, this host and the time; whether these words were taken."""
    started = attempt.read_started()
    job = started.job if started is not None else ""
    return attempt.write_result(replace(result, job=job, host=socket.gethostname(), ended=time.time()))


def _is_told(attempt: Attempt, patience_s: float) -> bool:
    """Wait until somebody has said how the attempt ended; False where nobody has in that time."""
    until = time.monotonic() + patience_s
    while attempt.read_result() is None:
        if time.monotonic() >= until:
            return False
        time.sleep(_PAUSE_S)
    return True
