"""Control-group limits read from laid-out files, version 1 and 2."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardway.hardware.limits import CgroupLimits, count_oom_kills, read_cgroup_limits, read_cgroup_tasks

GIB = 2**30


VERSION_2 = {
    "proc/self/cgroup": "0::/system.slice/job_7/step_0",
    "sys/fs/cgroup/system.slice/job_7/step_0/cpu.max": "max 100000",
    "sys/fs/cgroup/system.slice/job_7/step_0/memory.max": "max",
    "sys/fs/cgroup/system.slice/job_7/cpu.max": "350000 100000",
    "sys/fs/cgroup/system.slice/job_7/memory.max": str(12 * GIB),
    "sys/fs/cgroup/system.slice/cpu.max": "800000 100000",
    "sys/fs/cgroup/system.slice/memory.max": str(64 * GIB),
}
VERSION_1 = {
    "proc/self/cgroup": "5:cpu,cpuacct:/slurm/job_7\n4:memory:/slurm/job_7\n1:name=systemd:/",
    "sys/fs/cgroup/cpu/slurm/job_7/cpu.cfs_quota_us": "200000",
    "sys/fs/cgroup/cpu/slurm/job_7/cpu.cfs_period_us": "100000",
    "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
    "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
    "sys/fs/cgroup/memory/slurm/job_7/memory.limit_in_bytes": str(3 * GIB),
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
}
# Both at once, as systemd mounts them on older distributions: memory by version 1, the rest by version 2.
HYBRID = {
    "proc/self/cgroup": "4:memory:/job\n0::/job",
    "sys/fs/cgroup/memory/job/memory.limit_in_bytes": str(5 * GIB),
    "sys/fs/cgroup/unified/job/cpu.max": "150000 100000",
}
# A container without a name space of its own: the path of the host is not there, the mount is the group.
CONTAINER = {
    "proc/self/cgroup": "0::/docker/4f1d",
    "sys/fs/cgroup/cpu.max": "50000 100000",
    "sys/fs/cgroup/memory.max": str(GIB),
}


@pytest.mark.parametrize(
    ("files", "limits"),
    [
        (VERSION_2, CgroupLimits(3.5, 12 * GIB)),
        (VERSION_1, CgroupLimits(2.0, 3 * GIB)),
        (HYBRID, CgroupLimits(1.5, 5 * GIB)),
        (CONTAINER, CgroupLimits(0.5, GIB)),
        ({}, CgroupLimits(None, None)),
        ({"proc/self/cgroup": "0::/"}, CgroupLimits(None, None)),
    ],
    ids=["version 2", "version 1", "hybrid", "container", "no files", "no limits"],
)
def test_the_tightest_limit_on_the_way_to_the_root_counts(
    lay_out: Callable[[Mapping[str, str]], Path], files: dict[str, str], limits: CgroupLimits
) -> None:
    assert read_cgroup_limits(lay_out(files)) == limits


KILLS_1 = "oom_kill_disable 0\nunder_oom 0\noom_kill 3"


@pytest.mark.parametrize(
    ("files", "kills"),
    [
        ({"proc/self/cgroup": "4:memory:/job", "sys/fs/cgroup/memory/job/memory.oom_control": KILLS_1}, 3),
        (
            {
                "proc/self/cgroup": "0::/job/step",
                "sys/fs/cgroup/job/step/memory.events.local": "max 7\noom 2\noom_kill 1\noom_group_kill 0",
                "sys/fs/cgroup/job/step/memory.events": "max 9\noom 4\noom_kill 2",
                "sys/fs/cgroup/job/memory.events": "max 9\noom 4\noom_kill 9",
            },
            1,
        ),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/memory.events": "oom_kill 0"}, 0),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/memory.events": "oom_kill many"}, None),
        ({"proc/self/cgroup": "4:memory:/job", "sys/fs/cgroup/memory/job/memory.oom_control": "under_oom 0"}, None),
        ({}, None),
    ],
    ids=["version 1", "version 2, the group's own first", "none yet", "no number", "older kernel", "no files"],
)
def test_what_the_kernel_ended_is_counted(
    lay_out: Callable[[Mapping[str, str]], Path], files: dict[str, str], kills: int | None
) -> None:
    assert count_oom_kills(lay_out(files)) == kills


@settings(max_examples=50)
@given(st.text(max_size=40), st.text(max_size=20), st.text(max_size=20))
def test_whatever_the_files_hold_is_read_without_an_error(
    tmp_path_factory: pytest.TempPathFactory, group: str, cpu: str, memory: str
) -> None:
    root = tmp_path_factory.mktemp("root")
    for name, text in (("proc/self/cgroup", f"0::/{group}"), ("sys/fs/cgroup/cpu.max", cpu)):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    (root / "sys/fs/cgroup/memory.max").write_text(memory, encoding="utf-8")
    limits = read_cgroup_limits(root)
    assert limits.cores is None or limits.cores >= 0
    assert limits.memory_bytes is None or limits.memory_bytes >= 0


@pytest.mark.parametrize(
    ("files", "tasks"),
    [
        (
            {"proc/self/cgroup": "0::/job", "sys/fs/cgroup/job/pids.max": "max", "sys/fs/cgroup/job/pids.current": "7"},
            None,
        ),
        ({"proc/self/cgroup": "0::/job", "sys/fs/cgroup/job/pids.max": "64"}, None),
        (
            {
                "proc/self/cgroup": "0::/pod/job",
                "sys/fs/cgroup/pod/job/pids.max": "512",
                "sys/fs/cgroup/pod/job/pids.current": "10",
                "sys/fs/cgroup/pod/pids.max": "1024",
                "sys/fs/cgroup/pod/pids.current": "1000",
            },
            (1024, 1000),  # of the pod 24 are left
        ),
        (
            {
                "proc/self/cgroup": "8:pids:/slurm",
                "sys/fs/cgroup/pids/slurm/pids.max": "30",
                "sys/fs/cgroup/pids/slurm/pids.current": "12",
            },
            (30, 12),
        ),
    ],
)
def test_processes_of_the_tightest_group(
    files: Mapping[str, str], tasks: tuple[int, int] | None, lay_out: Callable[[Mapping[str, str]], Path]
) -> None:
    assert read_cgroup_tasks(lay_out(files)) == tasks
