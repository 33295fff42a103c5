from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from shardway.telemetry.host import (
    OF_PROCESSES,
    HostReader,
    JobGroup,
    JobProcesses,
    KeptFile,
    RateCounters,
    open_infiniband,
    open_lustre,
)


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
        now = begun + 12.0  # new processes are looked for every ten seconds where many are started
        values = dict(zip(reader.series, reader.read(now), strict=True))
        assert len(reader.processes.pids) == 2
        assert values["memory/job_bytes"] > 64 << 20
        assert reader.processes.cpu - before >= 35, "ticks of 10 ms"
        assert values["cpu/job_cores"] == pytest.approx((reader.processes.cpu - before) / 100 / 12.0)
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

    def put(
        self, pid: int, parent: int, session: int, ticks: int, written: int, waited: int = 0, threads: str = "S"
    ) -> None:
        """`threads`: the state of each; the files of threads are there where it has several."""
        times, count = f"{ticks} 0 {waited} 0", len(threads)
        stat = f"{pid} (a) b) {threads[0]} {parent} 1 {session} 0 -1 0 0 0 0 0 {times} 20 0 {count} 0 99 4096 7 0\n"
        io = f"rchar: 0\nwchar: {written}\nsyscr: 0\nsyscw: 0\nread_bytes: 0\nwrite_bytes: {written}\n"
        io += "cancelled_write_bytes: 0\n"
        # written in place: a file of the kernel that is open shows what is there now
        status = f"Name:\ta\nTgid:\t{pid if session else parent}\nPid:\t{pid}\n"
        files = {"stat": stat, "io": io, "environ": "A=1\0", "status": status}
        if count > 1:
            files |= {f"task/{pid + at}/stat": f"{pid + at} (a) b) {state} 1\n" for at, state in enumerate(threads)}
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
    kernel.put(10, 1, 10, 110, 1600, waited=50)  # the kernel adds a child's to its parent
    kernel.end(5)
    assert read_sums(processes, 2) == (160, 1600)


def test_a_parent_that_computes_has_not_taken_over_a_child(kernel: PretendedProcesses) -> None:
    processes = JobProcesses(10, root=str(kernel.root))
    assert read_sums(processes, 0) == (150, 1500)
    kernel.put(10, 1, 10, 900, 9000)
    kernel.end(5)
    assert read_sums(processes, 2) == (950, 9500)


def test_a_child_that_ends_with_its_parent_is_not_counted_twice(kernel: PretendedProcesses) -> None:
    kernel.put(11, 5, 10, 7, 70)  # a child of the child
    processes = JobProcesses(10, root=str(kernel.root))
    assert read_sums(processes, 0) == (157, 1570)
    kernel.put(10, 1, 10, 100, 1570, waited=60)
    kernel.end(5)
    kernel.end(11)
    assert read_sums(processes, 5) == (160, 1570)


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
    kernel.put(9000, 10, 10, 1, 1)  # too many numbers to look at each, and so soon
    assert read_sums(processes, 6) == (161, 1601)
    assert read_sums(processes, 14) == (162, 1602)


def test_a_process_that_gets_its_own_program_late_is_looked_at_again(kernel: PretendedProcesses) -> None:
    processes = JobProcesses(0, b"\0OF_JOB=12\0", root=str(kernel.root))
    processes.read(0)
    kernel.put(120, 1, 120, 7, 70)  # a daemon's child: the environment is still the daemon's
    processes.read(5)
    assert processes.pids == frozenset()
    lay_out(kernel.root, {"proc/120/environ": "A=1\0OF_JOB=12\0"})
    processes.read(10)
    assert processes.pids == {120}


@pytest.mark.parametrize("count", [1, 40, 100])
def test_threads_that_want_to_run_are_those_in_state_r(kernel: PretendedProcesses, count: int) -> None:
    kernel.put(10, 1, 10, 100, 1000, threads="R")
    kernel.put(1000, 10, 10, 1, 1, threads="RSSS" * count)
    kernel.put(5000, 10, 10, 1, 1, threads="SD" * count)
    processes = JobProcesses(10, root=str(kernel.root))
    others = 6 * count - 2  # the first of each is known by its process
    found, turns = [], -(-others // processes.MOST_THREADS)
    with counted_calls() as calls:
        for turn in range(turns):
            processes.read(float(turn))
            found.append(processes.ready)
    assert sum(found) / turns == pytest.approx(1 + count), "all in turn"
    assert processes.threads == 2 + 6 * count  # 5 has one too
    threads = sum("/task/" in path for path in calls["open"])
    assert threads == others
    assert threads <= turns * processes.MOST_THREADS
    assert sum(path.endswith("/task") for path in calls["listdir"]) <= 2, "named once while their number stays"


@contextmanager
def counted_calls() -> Iterator[dict[str, list[str]]]:
    """The files that are opened, listed and read anew while it is entered."""
    calls: dict[str, list[str]] = {"open": [], "listdir": [], "pread": []}

    def count(name: str, real: Callable[..., object]) -> Callable[..., object]:
        def call(*values: object) -> object:
            calls[name].append(str(values[0]))
            return real(*values)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in calls:
            patch.setattr(os, name, count(name, getattr(os, name)))
        yield calls


NET = "Inter-|\n face |\n  eth0: 100 0 0 0 0 0 0 0 200 0 0 0 0 0 0 0\n    lo: 1 0 0 0 0 0 0 0 1 0 0 0 0 0 0 0\n"


@pytest.fixture
def node(kernel: PretendedProcesses, monkeypatch: pytest.MonkeyPatch) -> PretendedProcesses:
    """A node with a job under Slurm."""
    group = "sys/fs/cgroup/job_12"
    files = {"memory.current": "5000\n", "memory.stat": "inactive_file 1000\n", "memory.events": "oom_kill 0\n"}
    lay_out(kernel.root, {f"{group}/{name}": text for name, text in files.items()})
    lay_out(kernel.root, {"proc/10/cgroup": "0::/job_12\n", "proc/net/dev": NET})
    lay_out(kernel.root, {"proc/meminfo": "MemTotal: 900 kB\nMemFree: 1 kB\nMemAvailable: 400 kB\n"})
    note_cores(kernel.root, 100)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    return kernel


def note_cores(root: Path, busy: int) -> None:
    numbers = f"{busy} 0 0 1000 0 0 0 0 0 0"
    lay_out(root, {"proc/stat": f"cpu  {numbers}\ncpu0 {numbers}\ncpu1 {numbers}\nintr 5\n"})


def test_what_a_sample_reads_is_bounded(node: PretendedProcesses) -> None:
    """What a sample costs is the files it reads: this is their number, for 16 children, of samples of five seconds."""
    for child in range(11, 26):
        node.put(child, 10, 10, 1, 1)
    reader = HostReader(10, job="12", root=str(node.root), processes_each=5)
    for second in range(6):  # what was there at the start has then been looked at twice
        reader.read(float(second))
    reads = []
    for second in range(6, 16):
        with counted_calls() as calls:
            reader.read(float(second))
        reads.append(len(calls["pread"]))
        assert calls["open"] == calls["listdir"] == [], "nothing is opened where no process was started"
    each = 5  # cores, kills, two of the job's group, network
    of_processes = 2 * 17 + 3  # two of each, memory, and the load twice: its value, and the number given last
    assert reads == 2 * [each, each, each, each, each + of_processes]


def test_what_is_not_read_is_missing_and_what_ended_last_is_not_lost(node: PretendedProcesses) -> None:
    reader = HostReader(10, job="12", root=str(node.root), processes_each=5)
    rows = []
    for second in range(6):
        note_cores(node.root, 100 + 1000 * second)
        node.put(10, 1, 10, 100 + 60 * second, 1000 + 50 * second)
        rows.append(dict(zip(reader.series, reader.read(float(second)), strict=True)))
    assert rows[0]["cpu/threads"] == 2
    for row in rows[1:5]:
        assert all(np.isnan(row[name]) for name in OF_PROCESSES)
        assert row["memory/job_bytes"] == 4000
        assert row["core/1/use_percent"] == 100
    assert rows[5]["cpu/job_cores"] == pytest.approx(0.6), "over the five seconds"
    assert rows[5]["io/write_bytes_per_s"] == pytest.approx(50)
    assert reader.read_last(5.2)[0] != 0
    lay_out(node.root, {"sys/fs/cgroup/job_12/memory.events": "oom_kill 1\n"})
    node.put(10, 1, 10, 600, 2250)
    last = dict(zip(reader.series, reader.read_last(7.0), strict=True))
    assert last["memory/oom_kills"] == 1
    assert last["io/write_bytes_per_s"] == pytest.approx(500)
    assert last["cpu/job_cores"] == pytest.approx(1.0)
    assert np.isnan(last["core/0/use_percent"])
    too_soon = dict(zip(reader.series, reader.read_last(7.1), strict=True))
    assert np.isnan(too_soon["cpu/job_cores"])
    assert too_soon["memory/oom_kills"] == 1


def test_a_node_without_a_process_of_the_job_has_no_figures_of_it(node: PretendedProcesses) -> None:
    node.end(5)
    for name in ("stat", "io"):
        (node.root / f"proc/10/{name}").write_text("")
    reader = HostReader(10, root=str(node.root))
    values = dict(zip(reader.series, reader.read(0.0), strict=True))
    assert values["cpu/load"] == 0.5
    assert all(np.isnan(values[name]) for name in ("cpu/job_cores", "cpu/threads", "memory/job_bytes"))


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


@pytest.mark.parametrize("pieces", [[900], [4090, 10], [3500, 4096, 3900, 200], [3900]])
def test_a_file_of_lines_is_read_whole_and_not_asked_for_more_at_its_end(tmp_path: Path, pieces: list[int]) -> None:
    """The kernel hands out lines of at most 1024 bytes while there is place in a page."""
    content = bytes(at % 251 for at in range(sum(pieces)))
    ends = np.cumsum(pieces).tolist()
    lay_out(tmp_path, {"lines": ""})
    file, asked = KeptFile(str(tmp_path / "lines")), list[int]()

    def pread(descriptor: int, size: int, start: int) -> bytes:
        asked.append(start)
        return content[start : next((end for end in ends if end > start), start)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pread", pread)
        assert file.read_records() == content
    file.close()
    last_is_full = pieces[-1] > os.sysconf("SC_PAGE_SIZE") - 1024
    assert asked == [0, *ends[: None if last_is_full else -1]]
