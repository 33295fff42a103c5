"""Batches arrive from loader processes whatever the machine is short of: shared memory, short paths, threads, files."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
from multiprocessing import resource_sharer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from runs import TINY, TINY_IMAGES, read_column, read_named
from shardway.data import workers
from shardway.data.loader import Batch
from shardway.data.workers import PackedAnswer, Sender, describe_shortage, take_over
from shardway.errors import UserError
from speed import picked

pytestmark = pytest.mark.usefixtures("warm_starts")

BATCH = Batch({"x": torch.arange(1024.0), "names": ["a", None]}, np.arange(3), 0, 3, 3)
SMALL_SHM = 'mount -t tmpfs -o size=64k none /dev/shm && exec "$@"'


def same(found: Batch, expected: Batch) -> bool:
    alike = found.data["names"] == expected.data["names"] and np.array_equal(found.ids, expected.ids)
    return alike and torch.equal(found.data["x"], expected.data["x"])


@pytest.mark.parametrize(("room", "kind"), [(2**30, Batch), (2**16, PackedAnswer), (0, PackedAnswer)])
def test_an_answer_is_sent_in_bytes_where_there_is_no_room(
    room: int, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "find_room", lambda: room)
    sent = Sender().hand_over(BATCH)
    assert type(sent) is kind
    (found,) = take_over(iter([pickle.loads(pickle.dumps(sent))]))
    assert same(found, BATCH)


@pytest.mark.parametrize(
    ("ahead", "left", "kind"),
    [(4, 10**9, Batch), (4, 22, Batch), (4, 21, PackedAnswer), (5, 22, PackedAnswer), (0, 0, PackedAnswer)],
)
def test_an_answer_is_sent_in_bytes_where_the_files_of_those_ahead_may_not_fit(
    ahead: int, left: int, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "find_files_left", lambda: left)
    assert type(Sender(ahead).hand_over(BATCH)) is kind


def test_files_of_this_process_and_its_rank_count(monkeypatch: pytest.MonkeyPatch) -> None:
    left = {os.getpid(): 30, os.getppid(): 20}
    monkeypatch.setattr(workers, "read_files_left", lambda process: left[process])
    assert workers.find_files_left() == 20
    left[os.getpid()] = 10
    assert workers.find_files_left() == 10


@pytest.fixture
def sharer(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What hands descriptors over in a loader process, as it is when that starts."""
    fresh = resource_sharer._ResourceSharer()  # type: ignore[attr-defined]
    monkeypatch.setattr(resource_sharer, "_resource_sharer", fresh)
    yield fresh
    if fresh._thread is not None:
        fresh.stop(timeout=10)
    elif fresh._listener is not None:
        fresh._listener.close()


def test_descriptors_are_handed_over_where_that_can_start(sharer: Any) -> None:
    sender = Sender()
    sender.begin()
    assert sender.shares
    assert sharer._thread.is_alive()
    assert type(sender.hand_over(BATCH)) is Batch


def test_an_answer_is_sent_in_bytes_where_no_thread_can_hand_its_descriptors_over(
    sharer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank would wait for that thread for ever."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    sender = Sender()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        sender.begin()
    assert type(sender.hand_over(BATCH)) is PackedAnswer


def test_an_answer_is_sent_in_bytes_where_no_socket_can_be_made(
    sharer: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(multiprocessing.current_process()._config, "tempdir", str(tmp_path / "gone"))  # type: ignore[attr-defined]
    sender = Sender()
    sender.begin()
    assert type(sender.hand_over(BATCH)) is PackedAnswer


def test_an_error_is_an_answer_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "find_room", lambda: 0)
    (found,) = take_over(iter([Sender().hand_over(KeyError("lost"))]))
    assert isinstance(found, KeyError)


def test_an_error_of_ours_is_raised_in_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "find_room", lambda: 0)
    with pytest.raises(UserError, match="no such column"):
        next(take_over(iter([Sender().hand_over(UserError("no such column"))])))


@pytest.mark.parametrize(("room", "told"), [(2**30, ""), (2**16, "/dev/shm has 64KiB free"), (0, "--shm-size")])
def test_a_shortage_is_told_with_what_to_do(room: int, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "find_room", lambda: room)
    assert told in describe_shortage()
    assert bool(told) is bool(describe_shortage())


def test_a_folder_that_is_not_there_has_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "SHARED", "/no/such/folder")
    assert workers.find_room() == 0


def train(folder: Path, *words: str, before: tuple[str, ...] = (), **environ: str) -> subprocess.CompletedProcess[str]:
    command = [*before, sys.executable, "-m", "shardway", "train", "--dir", str(folder), *words, "train.steps=6"]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=120, env={**os.environ, **environ}
    )


def can_mount() -> bool:
    words = ["unshare", "-m", "bash", "-c", SMALL_SHM, "x", "true"]
    return subprocess.run(words, capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize("kind", picked(["tokens", "images"], "images"))
def test_a_run_with_next_to_no_shared_memory_is_the_same_run(tmp_path: Path, kind: str) -> None:
    if not can_mount():
        pytest.skip("needs to mount a file system of its own (root)")
    words = (*(TINY if kind == "tokens" else TINY_IMAGES), "data.workers=1")
    assert train(tmp_path / "usual", *words).returncode == 0
    done = train(tmp_path / "small", *words, before=("unshare", "-m", "bash", "-c", SMALL_SHM, "x"))
    assert done.returncode == 0, done.stderr
    assert read_column(tmp_path / "small") == read_column(tmp_path / "usual")
    for name, notes in (("small", 1), ("usual", 0)):
        told = [event["reason"] for event in read_named(tmp_path / name, "data_order_noted")]
        assert sum("/dev/shm has" in reason for reason in told) == notes


def test_a_long_tmpdir_is_no_matter(tmp_path: Path) -> None:
    """A socket's path has 107 characters at most, and torch's lie below TMPDIR."""
    folder = tmp_path / ("x" * 120)
    folder.mkdir()
    done = train(tmp_path / "run", *TINY, "data.workers=2", TMPDIR=str(folder))
    assert done.returncode == 0, done.stderr
    assert len(read_column(tmp_path / "run")) == 6


KEEPS = """
import os, resource, sys
import torch
from shardway.data.loader import LoaderOptions, Share, StepLoader
from shardway.data.order import SampleOrder

class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        return {name: torch.full((4,), float(index)) for name in "abcde"}

if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_NOFILE, (90, 90))
    loader = StepLoader(Samples(), SampleOrder(64, 0), Share(4), LoaderOptions(int(sys.argv[1])))
    kept = [batch.data for batch in loader.batches(0, 40)]
    print([batch["e"][:, 0].tolist() for batch in kept], len(os.listdir("/proc/self/fd")) < 90)
"""


def test_a_script_that_keeps_its_batches_keeps_no_files_beyond_its_limit(tmp_path: Path) -> None:
    """40 batches of five tensors, and 90 files."""
    (tmp_path / "keeps.py").write_text(KEEPS)
    command = [sys.executable, str(tmp_path / "keeps.py")]
    told = [
        subprocess.run([*command, workers], capture_output=True, text=True, check=True, timeout=120).stdout
        for workers in ("0", "2")
    ]
    assert told[0] == told[1]
    assert told[0].endswith("True\n")


NO_PROCESS = """
import os, resource, sys
import torch
from shardway.data.loader import LoaderOptions, Share, StepLoader, validation_batches
from shardway.data.order import SampleOrder
from shardway.data.samplers import RandomStates
from shardway.data.loader import StreamLoader

class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 16
    def __getitem__(self, index):
        return torch.full((4,), float(index))

class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(torch.arange(16.0)[:, None])

def read(workers):
    options, share = LoaderOptions(workers, tell=print), Share(4)
    loaders = (
        StepLoader(Samples(), SampleOrder(16, 0), share, options).batches(0, 4),
        validation_batches(Samples(), 14, share, options),
        StreamLoader(Stream(), 0, share, options).batches(0),
    )
    return [[batch.data[:, 0].tolist() for batch, _ in zip(loader, range(4))] for loader in loaders]

if __name__ == "__main__":
    expected = read(0)
    limit, most = getattr(resource, sys.argv[1]), int(sys.argv[2])
    before = resource.getrlimit(limit)
    resource.setrlimit(limit, (most, before[1]))
    if os.getuid() == 0 and sys.argv[1] == "RLIMIT_NPROC":  # which does not hold for root
        # what this Python has in a folder of root alone is read before
        import multiprocessing.popen_fork, multiprocessing.popen_spawn_posix, multiprocessing.popen_forkserver
        import multiprocessing.queues, multiprocessing.synchronize, multiprocessing.resource_tracker
        os.setresuid(*[50000 + os.getpid() % 10000] * 3)
    print(read(2) == expected)
    resource.setrlimit(limit, before)
"""


@pytest.mark.parametrize(("limit", "most"), [("RLIMIT_NPROC", 0), ("RLIMIT_NOFILE", 12)])
def test_a_rank_reads_itself_where_no_loader_process_can_start(tmp_path: Path, limit: str, most: int) -> None:
    (tmp_path / "reads.py").write_text(NO_PROCESS)
    command = [sys.executable, str(tmp_path / "reads.py"), limit, str(most)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    *told, alike = done.stdout.splitlines()
    assert alike == "True"
    assert "Traceback" not in done.stderr
    assert len(told) == 3
    for each in told:
        assert each.startswith("no loader process can be started (")
        assert each.endswith("or set data.workers = 0.")
        assert ("ulimit -u" if limit == "RLIMIT_NPROC" else "ulimit -n allows 12") in each
