"""Whether it was the kernel that ended a rank, because memory ran out.

Invariant: it is said only where the count of the ranks' own control group says so; where nobody can read that, nothing
is said. This module must not start or end anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from shardway.errors import JobError
from shardway.hardware.cgroup import count_oom_kills, read_cgroup_limits
from shardway.ranks.failure import RankFailure
from shardway.units import format_bytes


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
