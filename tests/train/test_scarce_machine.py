"""A run on a machine that is short of processes, threads, open files, cores or a folder for temporary files: it is the
same run and says so in a line, or it is refused before its first step."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from runs import TINY, lone_rank, open_tiny, place, read_column, read_named, train_tiny
from shardway.errors import JobError
from shardway.hardware.limits import TaskLimit
from shardway.ranks import start
from shardway.train import dataloader, session

pytestmark = pytest.mark.usefixtures("warm_starts")

FEW = TaskLimit(20, 10, "ulimit -u", "raise `ulimit -u`")


def list_notes(folder: Path) -> list[str]:
    return [event["reason"] for event in read_named(folder, "data_order_noted")]


def test_few_processes_give_the_same_run_and_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quiet_threads: None
) -> None:
    train_tiny(tmp_path / "usual", lone_rank(), "train.steps=4")
    monkeypatch.setattr(session, "read_task_limit", lambda: FEW)
    train_tiny(tmp_path / "few", lone_rank(), "data.workers=3", "train.steps=4")
    assert read_column(tmp_path / "few") == read_column(tmp_path / "usual")
    (note,) = list_notes(tmp_path / "few")
    assert note.startswith("ulimit -u allows 20 processes and threads, of which 10 are there: too few for")
    assert "data.workers = 3" in note
    assert "so the rank reads its batches itself" in note


def test_a_folder_for_temporary_files_that_is_missing_is_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quiet_threads: None
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "gone"))
    train_tiny(tmp_path / "run", lone_rank(), "train.steps=4")
    (note,) = list_notes(tmp_path / "run")
    assert note.startswith(f"TMPDIR is {tmp_path / 'gone'} (environment), which does not exist")


def test_fewer_cores_than_processes_are_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quiet_threads: None
) -> None:
    monkeypatch.setattr(dataloader, "describe_few_cores", lambda workers, ranks: f"{workers} + {ranks} on few cores")
    with open_tiny(tmp_path / "run", lone_rank(), "data.workers=2") as run:
        dataloader._options(run.session)
        assert "2 + 1 on few cores" in run.session.noted
    with open_tiny(tmp_path / "alone", lone_rank()) as run:
        dataloader._options(run.session)
        assert run.session.noted == set()


TRAIN_WITH = """
import resource, runpy, sys
limit = int(sys.argv.pop(1))
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
runpy.run_module("shardway", run_name="__main__", alter_sys=True)
"""


def test_few_open_files_give_the_same_run_and_a_line(tmp_path: Path, quiet_threads: None) -> None:
    train_tiny(tmp_path / "usual", lone_rank(), "train.steps=6")
    words = ["train", "--dir", str(tmp_path / "few"), *TINY, "data.workers=2", "train.steps=6", "run.display=off"]
    done = subprocess.run(
        [sys.executable, "-c", TRAIN_WITH, "32", *words], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert read_column(tmp_path / "few") == read_column(tmp_path / "usual")
    assert "ulimit -n allows 32 open files: too few for data.workers = 2" in done.stderr


START = """
import logging, os, resource, sys
import torch
from runs import place
from shardway.errors import SiteError
from shardway.ranks.start import StartOptions, start_ranks
most = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_NPROC, (most, most))
if os.getuid() == 0:  # the limit does not hold for root
    os.setresuid(*[50000 + os.getpid() % 10000] * 3)
try:
    start_ranks(place(0, 1, "none"), StartOptions(threads=32))
    torch.ones(1000, 1000).sum()  # OpenMP ends the process where it cannot start its threads
    print(torch.get_num_threads())
except SiteError as error:
    print(error)
"""


def run_start(most: int) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-c", START, str(most)]
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=True, timeout=120)


def test_a_rank_whose_threads_cannot_start_is_refused() -> None:
    first, remedy = run_start(0).stdout.splitlines()
    assert first.startswith("a rank needs at least 4 more threads, and ulimit -u (of the user ")
    assert "allows 0 processes and threads" in first
    assert "start fewer ranks" in remedy


def test_a_rank_computes_with_the_threads_that_fit() -> None:
    if os.getuid() != 0:
        pytest.skip("other processes of this user come and go")
    done = run_start(16)
    threads = int(done.stdout)
    assert 1 <= threads <= 12
    assert f"too few for run.threads = 32, so rank 0 computes with {threads}." in done.stderr


@pytest.mark.parametrize(
    ("left", "local", "threads", "fit"), [(4, 1, 1, 1), (5, 1, 2, 2), (5, 1, 9, 2), (40, 4, 32, 7)]
)
def test_each_rank_has_its_part_of_the_threads_that_are_left(
    left: int, local: int, threads: int, fit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "read_task_limit", lambda: TaskLimit(left + 4, 4, "ulimit -u", ""))
    assert start._fit_threads(place(0, local, "none"), threads) == fit


def raise_emfile() -> None:
    raise OSError(errno.EMFILE, "Too many open files", "some/file")


def test_a_limit_that_is_reached_later_is_told_and_the_ranks_may_start_again(
    tmp_path: Path, quiet_threads: None
) -> None:
    with (
        pytest.raises(JobError, match="no more files can be opened") as caught,
        open_tiny(tmp_path, lone_rank()) as run,
    ):
        run.session.begin()
        raise_emfile()
    assert isinstance(caught.value.__cause__, OSError)
    (fault,) = read_named(tmp_path, "fault")
    assert (fault["kind"], fault["exit_code"]) == ("JobError", 4)
    assert f"ulimit -n allows {resource.getrlimit(resource.RLIMIT_NOFILE)[0]}" in fault["message"]


def test_an_error_between_ranks_names_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(JobError, match="no more files can be opened"):
        lone_rank().together(raise_emfile)


SCRIPT = """
import errno, sys
import shardway
with shardway.start("run.device=cpu", "run.threads=1", directory=sys.argv[1]) as run:
    raise OSError(errno.EMFILE, "Too many open files", "of the script")
"""


def test_a_script_that_opens_too_many_files_keeps_its_traceback(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "run")], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 1
    assert f'File "{script}", line 5' in done.stderr
    assert (
        "[Errno 24] Too many open files: 'of the script'\nno more files can be opened: this process has" in done.stderr
    )
