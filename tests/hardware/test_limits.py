"""Limits of processes, threads, open files, cores and temporary folders are read, and told where they are reached."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from shardway.errors import SiteError
from shardway.hardware import limits
from shardway.hardware.limits import TaskLimit, ensure_temporary, explain_limit, judge_cores, settle_temporary

LIMITED = """
import os, resource, threading
from shardway.hardware.limits import *

def bind_tasks(most):
    resource.setrlimit(resource.RLIMIT_NPROC, (most, most))
    if os.getuid() == 0:  # the limit does not hold for root
        own = 50000 + os.getpid() % 10000  # other tests run beside this one
        os.setresgid(own, own, own)
        os.setresuid(own, own, own)

"""


def run_limited(code: str) -> list[str]:
    """The lines that a process prints which may limit itself."""
    done = subprocess.run([sys.executable, "-c", LIMITED + code], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


THREADS = """
bind_tasks(0)
taken, over = read_task_limit().taken, threading.Event()
try:
    threading.Thread(target=over.wait).start()
except RuntimeError as error:
    print(taken)
    print(explain_limit(error))
over.set()
"""


def test_a_thread_that_cannot_start_is_told_with_the_limit() -> None:
    taken, first, remedy = run_limited(THREADS)
    assert int(taken) >= 1
    assert first.startswith("no more processes or threads can be started: ulimit -u (of the user ")
    assert first.endswith(f"allows 0 processes and threads, of which {taken} are there.")
    assert "raise `ulimit -u`" in remedy


PROCESSES = """
bind_tasks(0)
try:
    os.fork()
except OSError as error:
    print(explain_limit(error))
"""


def test_a_process_that_cannot_start_is_told_with_the_limit() -> None:
    assert "ulimit -u" in run_limited(PROCESSES)[0]


def test_all_threads_of_the_user_are_counted() -> None:
    code = """
if os.getuid() == 0:
    bind_tasks(1000)
else:
    resource.setrlimit(resource.RLIMIT_NPROC, (100000, 100000))
before, over = read_task_limit(), threading.Event()
for _ in range(5):
    threading.Thread(target=over.wait).start()
print(read_task_limit().taken - before.taken, before.left - read_task_limit().left)
over.set()
"""
    if os.getuid() != 0:
        pytest.skip("other processes of this user come and go")
    assert run_limited(code) == ["5 5"]


def test_the_control_group_is_a_limit_too(tmp_path: Path) -> None:
    group = tmp_path / "sys/fs/cgroup/pids/job"
    group.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("8:pids:/job\n")
    (group / "pids.max").write_text("max\n")
    (group / "pids.current").write_text("90\n")
    found = limits.read_task_limit(tmp_path)
    assert found is None or "pids.max" not in found.source
    (group / "pids.max").write_text("100\n")
    limit = limits.read_task_limit(tmp_path)
    assert limit is not None
    assert (limit.limit, limit.taken, limit.left) == (100, 90, 10)
    assert "pids.max" in str(limit)


def test_the_limit_that_leaves_least_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    users, groups = TaskLimit(100, 20, "ulimit -u", ""), TaskLimit(1000, 990, "pids.max", "")
    monkeypatch.setattr(limits, "_read_user_limit", lambda root: users)
    monkeypatch.setattr(limits, "_read_group_limit", lambda root: groups)
    assert limits.read_task_limit() is groups


def test_a_rank_may_open_as_many_files_as_it_is_allowed() -> None:
    code = """
for pair in ((64, 640), (64, 64)):
    resource.setrlimit(resource.RLIMIT_NOFILE, pair)
    raise_file_limit()
    print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""
    assert run_limited(code) == ["640 640", "64 64"]


@pytest.mark.parametrize(
    ("pair", "raised"),
    [
        ((64, 2**20), limits.MOST_FILES),
        ((64, resource.RLIM_INFINITY), limits.MOST_FILES),
        ((2**20, 2**20), None),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), None),
    ],
)
def test_no_more_files_are_asked_for_than_programs_bear(
    pair: tuple[int, int], raised: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(resource, "getrlimit", lambda name: pair)
    monkeypatch.setattr(resource, "setrlimit", lambda name, wanted: asked.append(wanted[0]))
    limits.raise_file_limit()
    assert asked == ([] if raised is None else [raised])


def test_the_files_of_another_process_are_counted() -> None:
    code = """
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
opened = [open("/dev/null") for _ in range(10)]
print(64 - count_open_files(), flush=True)
input()
"""
    with subprocess.Popen([sys.executable, "-c", LIMITED + code], stdin=-1, stdout=-1, text=True) as other:
        assert other.stdout is not None
        left = int(other.stdout.readline())
        assert limits.read_files_left(other.pid) in (left, left + 1)  # the list itself is open while it is read
        assert left < 54
        other.communicate("\n")
    assert limits.read_files_left(2**30) == sys.maxsize


def test_files_that_cannot_be_opened_are_told_with_the_limit() -> None:
    code = """
resource.setrlimit(resource.RLIMIT_NOFILE, (40, 41))
opened = []
try:
    while True:
        opened.append(open("/dev/null"))
except OSError as error:
    print(explain_limit(error))
"""
    first, allowed, remedy = run_limited(code)
    assert first.startswith("no more files can be opened")
    assert first.endswith("ulimit -n allows 40.")
    assert "up to 41" in allowed
    assert "data.workers" in remedy


@pytest.mark.parametrize(
    "error",
    [
        ValueError("can't start new thread"),
        RuntimeError("shapes do not match"),
        OSError(errno.ENOSPC, "No space left on device"),
        BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable", "lock"),
    ],
)
def test_other_errors_are_none_of_a_limit(error: Exception) -> None:
    assert explain_limit(error) == ""


def test_an_unnamed_refusal_is_that_of_a_limit_only_where_one_is_near(monkeypatch: pytest.MonkeyPatch) -> None:
    error = BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
    monkeypatch.setattr(limits, "read_task_limit", lambda root: TaskLimit(100, 50, "ulimit -u", ""))
    assert explain_limit(error) == ""
    monkeypatch.setattr(limits, "read_task_limit", lambda root: TaskLimit(100, 99, "ulimit -u", ""))
    assert "ulimit -u allows 100" in explain_limit(error)
    assert "ulimit -u allows 100" in explain_limit(RuntimeError("Resource temporarily unavailable"))


@pytest.mark.parametrize(
    ("workers", "ranks", "machine", "mask", "quota", "words"),
    [
        (2, 1, 64, 64, None, ""),
        (2, 1, 64, 64, 3.0, ""),
        (2, 1, 64, 64, 2.5, "3 processes (1 rank, data.workers = 2) share 2.5 cores, what the control group"),
        (2, 1, 64, 64, 2.5, "data.workers = 1."),
        (4, 2, 64, 64, 8.0, "10 processes (2 ranks, data.workers = 4) share 8 cores, what the control group"),
        (4, 2, 64, 64, 8.0, "data.workers = 3."),
        (4, 1, 64, 2, None, "5 processes (1 rank, data.workers = 4) share 2 cores, what the affinity mask"),
        (8, 4, 64, 16, None, ""),  # each rank has a mask of its own
        (16, 4, 64, 16, None, "17 processes (1 rank, data.workers = 16) share 16 cores, what the affinity mask"),
        (12, 4, 64, 32, None, "52 processes (4 ranks, data.workers = 12) share 32 cores, what the affinity mask"),
        (2, 1, 2, 2, None, ""),
        (2, 2, 2, 2, None, "6 processes (2 ranks, data.workers = 2) share 2 cores, all that this machine has"),
        (2, 2, 2, 2, None, "data.workers = 1."),
        (2, 1, 64, 64, 0.5, "data.workers = 0."),
    ],
)
def test_processes_that_take_turns_are_told(
    workers: int, ranks: int, machine: int, mask: int, quota: float | None, words: str
) -> None:
    told = judge_cores(workers, ranks, machine, mask, quota)
    assert words in told
    assert bool(words) == bool(told)


def test_the_affinity_mask_of_this_process_counts() -> None:
    code = """
os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[0]})
print(describe_few_cores(3, 1))
"""
    if (os.cpu_count() or 1) < 2:
        pytest.skip("a machine of one core has no narrower mask")
    assert "share 1 core, what the affinity mask" in run_limited(code)[0]


@pytest.fixture
def unsettled(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Python looks for its folder of temporary files anew, and the environment names none."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    for name in ("TMPDIR", "TEMP", "TMP"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_a_folder_that_can_be_written_is_no_news(unsettled: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert settle_temporary() == ""
    unsettled.setattr(tempfile, "tempdir", None)
    unsettled.setenv("TMPDIR", str(tmp_path))
    assert settle_temporary() == ""
    assert tempfile.gettempdir() == str(tmp_path)


def test_a_folder_that_is_missing_is_told(unsettled: pytest.MonkeyPatch, tmp_path: Path) -> None:
    unsettled.setenv("TMPDIR", str(tmp_path / "gone"))
    told = settle_temporary()
    assert told.startswith(f"TMPDIR is {tmp_path / 'gone'} (environment), which does not exist, so temporary files are")
    assert "export TMPDIR" in told
    (tmp_path / "file").touch()
    unsettled.setattr(tempfile, "tempdir", None)
    unsettled.setenv("TMPDIR", str(tmp_path / "file"))
    assert "which is no folder" in settle_temporary()


def refuse_folders() -> str:
    raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")


def test_where_nothing_can_be_written_temporary_files_are_in_memory(unsettled: pytest.MonkeyPatch) -> None:
    unsettled.setattr(tempfile, "_get_default_tempdir", refuse_folders)
    assert "temporary files are in /dev/shm" in settle_temporary()
    assert tempfile.gettempdir() == "/dev/shm"
    assert "temporary files are in /dev/shm" in settle_temporary()  # also for the next rank of this process
    ensure_temporary()


def test_no_folder_at_all_is_refused(unsettled: pytest.MonkeyPatch) -> None:
    unsettled.setattr(tempfile, "_get_default_tempdir", refuse_folders)
    unsettled.setattr(limits, "_LAST_RESORT", "/no/such/folder")
    unsettled.setenv("TMPDIR", "/gone")
    with pytest.raises(SiteError, match=r"TMPDIR is /gone .* no other folder") as caught:
        ensure_temporary()
    assert "--tmpfs /tmp" in str(caught.value)


READ_ONLY = 'mount --bind . . && mount -o remount,ro,bind . && exec "$@"'


def test_a_folder_on_a_read_only_file_system_is_told(tmp_path: Path) -> None:
    around = ["unshare", "-m", "bash", "-c", READ_ONLY, "x"]
    if subprocess.run([*around, "true"], cwd=tmp_path, capture_output=True, check=False).returncode:
        pytest.skip("needs to mount a file system of its own (root)")
    code = "from shardway.hardware.limits import settle_temporary; print(settle_temporary())"
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [*around, sys.executable, "-c", code], cwd=tmp_path, env=environ, capture_output=True, text=True, check=True
    )
    assert f"TMPDIR is {tmp_path} (environment), where nothing can be written, so" in done.stdout


def test_a_limit_of_this_process_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some sandboxes refuse what the kernel allows."""

    def refuse(name: int, pair: tuple[int, int]) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(resource, "getrlimit", lambda name: (64, 128))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    limits.raise_file_limit()
    assert limits.read_file_limit() == 64
