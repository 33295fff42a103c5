"""A rank that the kernel has ended for want of memory, and one of which nobody knows."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardway.ranks.failure import RankFailure, explain_oom, mark_oom

BASE = "the checkpoint of step 40"
KILLED = [RankFailure(0, 4710, 4), RankFailure(1, 4711, -9)]


def machine(folder: Path, kills: int, limit: str = str(2 << 30)) -> Path:
    """Where the control group of this process has counted so many kills."""
    group = folder / "sys/fs/cgroup/memory/job"
    group.mkdir(parents=True)
    (folder / "proc/self").mkdir(parents=True)
    (folder / "proc/self/cgroup").write_text("4:memory:/job\n")
    (group / "memory.oom_control").write_text(f"under_oom 0\noom_kill {kills}\n")
    (group / "memory.limit_in_bytes").write_text(f"{limit}\n")
    return folder


def test_a_count_that_has_grown_names_memory_and_the_rank(tmp_path: Path) -> None:
    root = machine(tmp_path, 3)
    first, killed = mark_oom(KILLED, 2, root)
    assert (first.for_memory, killed.for_memory) == (False, True)
    assert str(explain_oom(killed, BASE, root)) == (
        "the memory of this control group, which may have 2GiB, ran out, so the kernel ended rank 1 (process 4711) by "
        "SIGKILL; the other ranks were ended with it.\n"
        "  To do: run the same command again with more memory, or with less of it in use (a smaller train.micro_batch, "
        "fewer data.workers, checkpoint.background = false): it goes on from the checkpoint of step 40."
    )


@pytest.mark.parametrize("limit", ["9223372036854771712", ""])
def test_a_group_without_a_limit_has_run_out_with_its_machine(tmp_path: Path, limit: str) -> None:
    error = explain_oom(KILLED[1], BASE, machine(tmp_path, 1, limit))
    assert str(error).startswith("the memory of this control group ran out, so the kernel ended rank 1 ")


@pytest.mark.parametrize(
    ("failures", "before"),
    [
        (KILLED, 3),
        (KILLED, None),
        ([RankFailure(1, 4711, -15)], 2),
        ([RankFailure(1, 4711, 70)], 2),
        ([RankFailure(1, 4711, -9, by_agent=True)], 2),
    ],
    ids=["no more than before", "not known before", "another signal", "an error of its own", "ended by its agent"],
)
def test_what_is_not_sure_is_not_said(tmp_path: Path, failures: list[RankFailure], before: int | None) -> None:
    assert mark_oom(failures, before, machine(tmp_path, 3)) == failures


def test_nothing_is_said_where_nobody_counts(tmp_path: Path) -> None:
    assert mark_oom(KILLED, 0, tmp_path) == KILLED
