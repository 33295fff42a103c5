from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from shardway.telemetry.host import HostReader, JobGroup, JobProcesses, RateCounters, open_infiniband, open_lustre


@contextmanager
def running(program: str, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """A Python program that is told to end by the end of its input."""
    words = [sys.executable, "-c", program]
    process = subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **variables}
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield process
    finally:
        process.stdin.close()
        process.stdout.close()
        process.kill()
        process.wait()


def lay_out(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


# --- real processes

BUSY = """
import subprocess, sys
grandchild = '''
import sys, time
kept = bytearray(64 << 20)
with open("/dev/null", "wb") as file:
    file.write(bytes(8 << 20))
while time.process_time() < 0.4:
    pass
print("ready", flush=True)
sys.stdin.read()
'''
subprocess.run([sys.executable, "-c", grandchild])
print("waited", flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_what_a_child_of_a_child_uses_is_seen_and_outlives_it() -> None:
    with running(BUSY) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        reader, begun = HostReader(process.pid), time.monotonic()
        reader.read(begun)
        before = reader.processes.cpu
        assert process.stdout.readline() == "ready\n"
        now = begun + 2.0  # new processes are looked for once a second
        values = dict(zip(reader.series, reader.read(now), strict=True))
        assert len(reader.processes.pids) == 2
        assert values["memory/job_bytes"] > 64 << 20
        assert reader.processes.cpu - before >= 35, "ticks of 10 ms"
        assert values["cpu/job_cores"] == pytest.approx((reader.processes.cpu - before) / 100 / 2.0)
        assert values["cpu/threads"] == 2
        written, used = reader.processes.io[1], reader.processes.cpu
        assert written >= 8 << 20
        process.stdin.close()
        assert process.stdout.readline() == "waited\n"
        reader.read(time.monotonic())
        assert process.pid in reader.processes.pids
        assert len(reader.processes.pids) == 1
        assert reader.processes.io[1] == pytest.approx(written, abs=1 << 16), "neither lost nor counted twice"
        assert reader.processes.cpu >= used
        assert reader.processes.cpu < used + 100


def test_a_process_is_known_by_what_stands_in_its_environment() -> None:
    with running("print('ready', flush=True); input()", OF_JOB="n1.12") as process:
        assert process.stdout is not None
        process.stdout.readline()
        for marker, found in ((b"\0OF_JOB=n1.12\0", True), (b"\0OF_JOB=n1.1\0", False)):
            processes = JobProcesses(0, marker)
            processes.read(1.0)
            assert (process.pid in processes.pids) is found
            processes.close()


# --- processes as a pretended kernel shows them


class PretendedProcesses:
    """A /proc with some processes."""

    def __init__(self, root: Path) -> None:
        self.root, self.newest = root, 1
        self.note_newest(1)

    def note_newest(self, pid: int) -> None:
        self.newest = max(self.newest, pid)
        lay_out(self.root, {"proc/loadavg": f"0.5 0.4 0.3 1/9 {self.newest}\n"})

    def put(self, pid: int, parent: int, session: int, ticks: int, written: int) -> None:
        stat = f"{pid} (a) b) S {parent} 1 {session} 0 -1 0 0 0 0 0 {ticks} 0 0 0 20 0 3 0 99 4096 7 0\n"
        io = f"rchar: 0\nwchar: {written}\nsyscr: 0\nsyscw: 0\nread_bytes: 0\nwrite_bytes: {written}\n"
        io += "cancelled_write_bytes: 0\n"
        # written in place: a file of the kernel that is open shows what is there now
        status = f"Name:\ta\nTgid:\t{pid if session else parent}\nPid:\t{pid}\n"
        files = {"stat": stat, "io": io, "environ": "A=1\0", "status": status}
        lay_out(self.root, {f"proc/{pid}/{name}": text for name, text in files.items()})
        self.note_newest(pid)

    def end(self, pid: int) -> None:
        for name in ("stat", "io"):
            (self.root / f"proc/{pid}/{name}").write_text("")  # a descriptor of a process that is gone gives nothing
        for path in (self.root / f"proc/{pid}").iterdir():
            path.unlink()
        (self.root / f"proc/{pid}").rmdir()


@pytest.fixture
def kernel(tmp_path: Path) -> PretendedProcesses:
    pretended = PretendedProcesses(tmp_path)
    pretended.put(10, 1, 10, 100, 1000)
    pretended.put(5, 10, 10, 50, 500)  # a child with a smaller number
    pretended.put(99, 1, 99, 9999, 9999)  # another's
    return pretended


def read_sums(processes: JobProcesses, now: float) -> tuple[int, int]:
    processes.read(now)
    return processes.cpu, processes.io[1]


def test_what_a_parent_has_taken_over_is_not_counted_twice(kernel: PretendedProcesses) -> None:
    processes = JobProcesses(10, root=str(kernel.root))
    assert read_sums(processes, 0) == (150, 1500)
    kernel.put(10, 1, 10, 160, 1600)  # the kernel adds a child's to its parent
    kernel.end(5)
    assert read_sums(processes, 2) == (160, 1600)


def test_what_no_parent_has_taken_over_is_kept(kernel: PretendedProcesses) -> None:
    processes = JobProcesses(10, root=str(kernel.root))
    assert read_sums(processes, 0) == (150, 1500)
    kernel.end(5)
    assert read_sums(processes, 2) == (150, 1500)
    kernel.end(10)
    assert read_sums(processes, 4) == (150, 1500)
    assert processes.pids == frozenset()


def test_a_new_process_counts_whole_and_one_of_a_session_without_its_parent_too(kernel: PretendedProcesses) -> None:
    processes = JobProcesses(10, root=str(kernel.root))
    read_sums(processes, 0)
    kernel.put(120, 10, 120, 7, 70)  # makes a session
    kernel.put(121, 1, 120, 3, 30)  # its parent is gone
    kernel.put(122, 10, 0, 5000, 5000)  # a thread
    kernel.note_newest(123)  # has its number, and cannot be seen yet
    assert read_sums(processes, 2) == (160, 1600)
    assert processes.pids == {5, 10, 120, 121}
    kernel.put(123, 10, 10, 1, 1)
    assert read_sums(processes, 4) == (161, 1601)
    kernel.put(9000, 10, 10, 1, 1)  # too many numbers to look at each
    assert read_sums(processes, 6) == (162, 1602)


def test_a_sampler_leaves_itself_out(kernel: PretendedProcesses) -> None:
    processes = JobProcesses(10, root=str(kernel.root), leave_out=(5,))
    processes.read(0)
    assert processes.pids == {10}


# --- control groups


@pytest.mark.parametrize(
    ("lines", "files", "expected"),
    [
        (
            "0::/system.slice/slurmstepd.scope/job_12/step_0/user/task_0\n",
            {
                "unified": "sys/fs/cgroup/system.slice/slurmstepd.scope/job_12",
                "memory.current": "5000",
                "memory.stat": "anon 1\ninactive_file 1000\n",
                "memory.events": "low 0\noom_kill 2\n",
                "memory.max": "70000",
            },
            (True, 4000, 2, 70000),
        ),
        (
            "9:cpu:/x\n4:memory:/slurm/uid_1000/job_12/step_batch\n",
            {
                "unified": "sys/fs/cgroup/memory/slurm/uid_1000/job_12",
                "memory.usage_in_bytes": "5000",
                "memory.stat": "inactive_file 1\ntotal_inactive_file 2000\n",
                "memory.oom_control": "oom_kill_disable 0\noom_kill 0\n",
                "memory.limit_in_bytes": "9223372036854771712",
            },
            (True, 3000, 0, None),
        ),
        (
            "0::/user.slice/session-3.scope\n",
            {
                "unified": "sys/fs/cgroup/user.slice/session-3.scope",
                "memory.current": "5000",
                "memory.stat": "inactive_file 1000\n",
                "memory.events": "oom_kill 1\n",
                "memory.max": "max",
            },
            (False, 4000, 1, None),
        ),
    ],
)
def test_the_group_of_a_job(tmp_path: Path, lines: str, files: dict[str, str], expected: Sequence[object]) -> None:
    folder = files.pop("unified")
    lay_out(tmp_path, {"proc/7/cgroup": lines, **{f"{folder}/{name}": text for name, text in files.items()}})
    (tmp_path / folder / "step_0").mkdir(parents=True)
    group = JobGroup(7, "12.server", str(tmp_path))
    assert (group.is_jobs_own, group.used_bytes(), group.oom_kills(), group.limit_bytes) == tuple(expected)


def test_without_a_group_values_are_missing(tmp_path: Path) -> None:
    group = JobGroup(7, "12", str(tmp_path))
    assert not group.is_jobs_own
    assert group.used_bytes() != group.used_bytes()
    assert group.oom_kills() != group.oom_kills()


# --- counters


def test_infiniband_counts_words_of_four_bytes(tmp_path: Path) -> None:
    folder = "sys/class/infiniband/mlx5_0/ports/1/counters"
    lay_out(tmp_path, {f"{folder}/port_rcv_data": "100\n", f"{folder}/port_xmit_data": "200\n"})
    missing: dict[str, str] = {}
    counters = open_infiniband(missing, str(tmp_path))
    assert counters is not None
    assert counters.series == ("ib/mlx5_0:1/rx_bytes_per_s", "ib/mlx5_0:1/tx_bytes_per_s")
    counters.rates(10.0)
    lay_out(tmp_path, {f"{folder}/port_rcv_data": "600\n", f"{folder}/port_xmit_data": "100\n"})
    received, sent = counters.rates(12.0)
    assert received == 1000.0
    assert sent != sent, "a counter that was reset has no rate"
    assert missing == {}


def test_lustre_of_both_ages(tmp_path: Path) -> None:
    place = "proc/fs/lustre/llite/scratch-ffff8801/stats"
    old = "snapshot_time 1 secs.usecs\nread_bytes 3 samples [bytes] 1 9 {0}\nopen {1} samples [regs]\n"
    lay_out(tmp_path, {place: old.format(100, 5)})
    missing: dict[str, str] = {}
    counters = open_lustre(missing, str(tmp_path))
    assert counters is not None
    assert counters.series[0] == "lustre/scratch/read_bytes_per_s"
    counters.rates(0.0)
    lay_out(tmp_path, {place: old.format(1100, 9)})
    assert counters.rates(2.0) == [500.0, 0.0, 2.0]


def test_lustre_whose_counters_are_denied_says_so(tmp_path: Path) -> None:
    lay_out(tmp_path, {"proc/self/mounts": "10.0.0.1@o2ib:/fs /scratch lustre rw 0 0\n"})
    missing: dict[str, str] = {}
    assert open_lustre(missing, str(tmp_path)) is None
    assert "administrators" in missing["lustre/*"]


def test_a_counter_that_cannot_be_read_any_more_is_missing() -> None:
    def fail() -> list[float]:
        raise OSError("gone")

    assert all(rate != rate for rate in RateCounters(("a", "b"), fail).rates(1.0))
