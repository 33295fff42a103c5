"""Whether it was the kernel that ended a rank, because memory ran out.

Invariant: it is said only where the count of the ranks' own control group says so; where nobody can read that, nothing
is said. This module must not start or end anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from shardway.errors import JobError
from shardway.hardware.cgroup import count_oom_kills, read_cgroup_limits
from shardway.ranks.local import RankFailure
from shardway.units import say_bytes


def explain_oom(
    failures: Sequence[RankFailure], before: int | None, base: str, root: Path = Path("/")
) -> JobError | None:
    """The error of ranks of which one was killed since `count_oom_kills` was `before`; None where that is not known.

    `base` says where the run goes on from; `root` stands for "/".
    """
    killed = next((failure for failure in failures if failure.signal_name == "SIGKILL"), None)
    now = count_oom_kills(root)
    if killed is None or before is None or now is None or now <= before:
        return None
    limit = read_cgroup_limits(root).memory_bytes
    bound = f", which may have {say_bytes(limit)}," if limit is not None and limit < 1 << 60 else ""
    return JobError(
        f"the memory of this control group{bound} ran out, so the kernel ended rank {killed.rank} (process "
        f"{killed.pid}) by SIGKILL; the other ranks were ended with it.\n"
        "  To do: run the same command again with more memory, or with less of it in use (a smaller train.micro_batch, "
        f"fewer data.workers, checkpoint.background = false): it goes on from {base}."
    )
