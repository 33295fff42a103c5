"""A rank that ended badly: what its agent saw, whether memory ran out, and whether the ranks start again.

Invariants:
- Memory counts as the cause only where the control group of the ranks counts such a kill.
- A run that makes progress starts again however often it fails; one that makes none stops after a few. What the user
  has to change is never tried again. Progress is a checkpoint that is newer than all before. A checkpoint on the disks
  of the nodes may be the fault itself, so a run does not end before it has begun from another one.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shardway.errors import JobError
from shardway.hardware.limits import count_oom_kills, read_cgroup_limits
from shardway.units import format_bytes

_CRASHES = ("SIGSEGV", "SIGBUS", "SIGABRT", "SIGFPE", "SIGILL")


@dataclass(frozen=True)
class RankFailure:
    """A rank that ended badly: its exit code, negative for a signal, and the files with what it printed.

    `by_agent`: others had failed, and the agent ended it. `for_memory`: the kernel did, since memory had run out.
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
        """Whether that signal is one that a process gives itself by a mistake in native code."""
        return self.signal_name in _CRASHES

    def read_printed(self) -> str:
        """All that it printed, as far as it can be read."""
        return "".join(path.read_text(encoding="utf-8", errors="replace") for path in self.printed)


# --- Whether it was the kernel that ended a rank, because memory ran out


def mark_oom(failures: Sequence[RankFailure], before: int | None, root: Path = Path("/")) -> list[RankFailure]:
    """The same failures, with a mark on the first that was killed where the kernel has done it for want of memory.

    `before` is what `count_oom_kills` said when the ranks began; `root` stands for "/".
    """
    killed = next((each for each in failures if each.signal_name == "SIGKILL" and not each.by_agent), None)
    now = count_oom_kills(root)
    if killed is None or before is None or now is None or now <= before:
        return list(failures)
    return [replace(each, for_memory=True) if each is killed else each for each in failures]


def explain_oom(killed: RankFailure, base: str, root: Path = Path("/")) -> JobError:
    """The error of such a rank; `base` says where the run goes on from."""
    limit = read_cgroup_limits(root).memory_bytes
    bound = f", which may have {format_bytes(limit)}," if limit is not None and limit < 1 << 60 else ""
    return JobError(
        f"the memory of this control group{bound} ran out, so the kernel ended rank {killed.rank} (process "
        f"{killed.pid}) by SIGKILL; the other ranks were ended with it.\n"
        "  To do: run the same command again with more memory, or with less of it in use (a smaller train.micro_batch, "
        f"fewer data.workers, checkpoint.background = false): it goes on from {base}."
    )


# --- Whether the ranks start again after a failure: a pure function of what has failed so far

SAME_TWICE = 2
WITHOUT_PROGRESS = 3
"""How many failures in a row between two checkpoints end the run, whatever they were."""


FROM_NODES = 2
"""How many starts from one checkpoint on the disks of the nodes may fail; the next one leaves these out."""


@dataclass(frozen=True)
class RepeatedFailure:
    """A failure of the ranks: a line that is the same for the same failure, and the newest complete checkpoint's step.

    `hopeless`: a person has to change something first, such as a run file. `from_nodes`: the ranks had begun from that
    checkpoint, and it stood on the disks of the nodes alone.
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
    """What follows from all failures of this start so far, the newest last; `most` restarts are allowed (None: any)."""
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
