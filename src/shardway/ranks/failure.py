"""How ranks fail: the report of a rank in its attempt, what the agent saw, and whether the ranks start again.

Invariants:
- Of the ranks of one attempt, the one whose own error ended it reports the end; a rank that only lost contact with
  another gives that one time to report first.
- Memory counts as the cause only if the control group of the ranks has counted such a kill.
- A run that makes progress starts again however often it fails; one that makes none stops after a few failures. What
  the user has to change is never tried again. Progress is a checkpoint that is newer than all before. A checkpoint on
  the disks of the nodes may be the fault itself, so a run does not end before it has started from another one.
- No torch.
"""

from __future__ import annotations

import contextlib
import re
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shardway.errors import JobError, LostContact, NodeLost, ShardwayError, SiteError, render_reason
from shardway.hardware.limits import count_oom_kills, read_cgroup_limits
from shardway.rundir.attempts import VARIABLE, Attempt, Ending, Result
from shardway.units import format_bytes

# --- the report of a rank, in the attempt that its job script has started

CAUSE_WAIT_S = 5.0
"""How long a rank that lost contact waits for the report of the rank at fault."""

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
    """The attempt that a job script started this process for; None without one.

    Raises SiteError if its folder does not exist: the reports of the ranks would be lost.
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
    """A line that is the same for the same failure of another attempt: without numbers, addresses and paths.

    The message of lost contact varies with the transport, so only its first words are kept.
    """
    line = next((line.strip() for line in fault.message.splitlines() if line.strip()), "")
    line = "" if line == fault.kind else line.removeprefix(f"{fault.kind}: ")
    if fault.kind == LostContact.__name__:
        line = line.partition(":")[0]
    for pattern, stand_in in ((_PATH, "PATH"), (_ADDRESS, "#"), (_NUMBER, "#")):
        line = pattern.sub(stand_in, line)
    return f"{fault.kind}: {' '.join(line.split())}"[:_LONGEST].rstrip(": ")


_STATES = {NodeLost.__name__: Ending.NODE_FAILURE}
"""Error -> how an attempt ends with it, if not as a crash."""


def report_fault(
    attempt: Attempt | None, by: str, fault: RankFault, step: int = 0, wait_s: float = CAUSE_WAIT_S
) -> bool:
    """Write that the attempt crashed, ran out of memory or lost a node, unless its end is already written.

    A rank that lost contact first waits `wait_s` for the report of another rank. Returns whether this report counts;
    also False if the file system refuses it, since the error itself matters more.
    """
    if attempt is None or (fault.kind == LostContact.__name__ and _await_result(attempt, wait_s)):
        return False
    state = _STATES.get(fault.kind, Ending.CRASHED) if not fault.out_of_memory else Ending.OUT_OF_MEMORY
    with contextlib.suppress(OSError):
        return report_end(
            attempt, Result(state, render_reason(fault.message), step, fault.exit_code, sign_failure(fault), by=by)
        )
    return False


def report_end(attempt: Attempt, result: Result) -> bool:
    """Write how the attempt ended, with its job, this host and the time; returns whether this report counts."""
    started = attempt.read_started()
    job = started.job if started is not None else ""
    return attempt.write_result(replace(result, job=job, host=socket.gethostname(), ended=time.time()))


def _await_result(attempt: Attempt, wait_s: float) -> bool:
    """Wait until the end of the attempt is written; False if it is not in that time."""
    until = time.monotonic() + wait_s
    while attempt.read_result() is None:
        if time.monotonic() >= until:
            return False
        time.sleep(_PAUSE_S)
    return True


# --- failed ranks as their agent sees them

_CRASHES = ("SIGSEGV", "SIGBUS", "SIGABRT", "SIGFPE", "SIGILL")


@dataclass(frozen=True)
class RankFailure:
    """A rank that ended badly: its exit code (negative for a signal) and the files with its output.

    `by_agent`: others had failed, and the agent ended it. `for_memory`: the kernel ended it, since memory ran out.
    """

    rank: int
    pid: int
    exit_code: int
    printed: tuple[Path, ...] = ()
    by_agent: bool = False
    for_memory: bool = False

    @property
    def signal_name(self) -> str | None:
        """Name of the signal that ended it, or None."""
        return signal.Signals(-self.exit_code).name if self.exit_code < 0 else None

    @property
    def crashed(self) -> bool:
        """Whether that signal comes from a fault in native code."""
        return self.signal_name in _CRASHES

    def read_printed(self) -> str:
        """Its output, as far as it can be read."""
        return "".join(path.read_text(encoding="utf-8", errors="replace") for path in self.printed)


# --- whether the kernel ended a rank, because memory ran out


def mark_oom(failures: Sequence[RankFailure], before: int | None, root: Path = Path("/")) -> list[RankFailure]:
    """The same failures, with a mark on the first killed rank if the kernel has killed it for lack of memory.

    `before` is the result of `count_oom_kills` when the ranks started; `root` stands for "/".
    """
    killed = next((each for each in failures if each.signal_name == "SIGKILL" and not each.by_agent), None)
    now = count_oom_kills(root)
    if killed is None or before is None or now is None or now <= before:
        return list(failures)
    return [replace(each, for_memory=True) if each is killed else each for each in failures]


def explain_oom(killed: RankFailure, base: str, root: Path = Path("/")) -> JobError:
    """The error of such a rank; `base` names the checkpoint from which the run continues."""
    limit = read_cgroup_limits(root).memory_bytes
    bound = f", which may have {format_bytes(limit)}," if limit is not None and limit < 1 << 60 else ""
    return JobError(
        f"the memory of this control group{bound} ran out, so the kernel ended rank {killed.rank} (process "
        f"{killed.pid}) by SIGKILL; the other ranks were ended with it.\n"
        "  To do: run the same command again with more memory, or with less of it in use (a smaller train.micro_batch, "
        f"fewer data.workers, checkpoint.background = false): it goes on from {base}."
    )


# --- whether the ranks start again: a pure function of the failures so far

SAME_TWICE = 2
WITHOUT_PROGRESS = 3
"""So many failures in a row between two checkpoints end the run, whatever they are."""


FROM_NODES = 2
"""So many starts from one checkpoint on the disks of the nodes may fail; the next start ignores those disks."""


@dataclass(frozen=True)
class RepeatedFailure:
    """A failure of the ranks: a line that is the same for the same failure, and the newest complete checkpoint's step.

    `hopeless`: the user has to change something first, such as the run file. `from_nodes`: the ranks had started from
    that checkpoint, and it existed only on the disks of the nodes.
    """

    signature: str
    saved_step: int
    hopeless: bool = False
    from_nodes: bool = False


@dataclass(frozen=True)
class RestartDecision:
    """Whether the ranks start again; if not, why."""

    restart: bool
    reason: str = ""


def decide(failures: Sequence[RepeatedFailure], most: int | None = None) -> RestartDecision:
    """Whether to restart after these failures, the newest last; `most` restarts are allowed (None: any number)."""
    newest = failures[-1]
    if newest.hopeless:
        return RestartDecision(False)
    if most is not None and len(failures) > most:
        return RestartDecision(False, "" if most == 0 else f"run.max_restarts allows {most}")
    stuck = [failure for failure in failures if failure.saved_step >= newest.saved_step]
    where = f"with step {newest.saved_step} as the last that was saved" if newest.saved_step else "with nothing saved"
    from_nodes = [failure for failure in stuck if failure.from_nodes]
    if newest.from_nodes and len(from_nodes) <= FROM_NODES:
        return RestartDecision(True)  # it may be that checkpoint: the third start does not begin from it
    if [failure.signature for failure in stuck].count(newest.signature) >= SAME_TWICE:
        return RestartDecision(False, f"the same failure came twice {where}")
    if len(stuck) - min(len(from_nodes), FROM_NODES) >= WITHOUT_PROGRESS:
        return RestartDecision(False, f"{len(stuck)} failures came one after another {where}")
    return RestartDecision(True)
