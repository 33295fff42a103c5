from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset, TensorDataset
from torch.utils.data._utils import signal_handling

from shardway.data.loader import (
    Batch,
    LoaderOptions,
    Share,
    StepLoader,
    to_device,
    validation_batches,
)
from shardway.data.open import open_data
from shardway.data.order import SampleOrder
from shardway.data.sources.base import DataSource
from shardway.errors import Bug, JobError, UserError
from shardway.runfile.schema import DataSection

pytestmark = pytest.mark.usefixtures("warm_starts")

IN_PROCESS = LoaderOptions()
WORKERS = LoaderOptions(workers=2, prefetch=1)


class Numbers(Dataset[Any]):
    """A user's dataset whose sample is its own index."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.full((2, 3), float(index))


class Augmented(Numbers):
    """Draws from all three random generators that datasets use."""

    def __getitem__(self, index: int) -> Any:
        return index, random.random(), np.random.random(), float(torch.rand(()))


class Faulty(Numbers):
    """Fails at one sample in the way that its name says."""

    def __init__(self, count: int, fault: str) -> None:
        super().__init__(count)
        self.fault = fault

    def __getitem__(self, index: int) -> Any:
        if index == 11 and self.fault == "raise":
            raise LookupError("sample 11 is bad")
        if index == 11 and self.fault == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        return index, os.getpid()


def make_source(samples: int = 40) -> DataSource:
    section = DataSection(kind="synthetic", samples=samples, seq_len=4, validation_fraction=0.0)
    return open_data(section, 0, "tokens", vocab=17).train


def read_world(loaders: list[StepLoader], position: int, steps: int) -> list[list[int]]:
    """The ids of each step over all ranks, in the order of the ranks."""
    streams = [loader.batches(position, steps) for loader in loaders]
    return [np.concatenate([batch.ids for batch in step]).tolist() for step in zip(*streams, strict=True)]


def make_world(
    samples: DataSource | Dataset[Any], order: SampleOrder, batch: int, world: int, options: LoaderOptions = IN_PROCESS
) -> list[StepLoader]:
    return [StepLoader(samples, order, Share(batch, rank, world), options) for rank in range(world)]


def expected_ids(order: SampleOrder, batch: int, position: int, steps: int) -> list[list[int]]:
    starts = range(position, position + steps * batch, batch)
    return [order.ids(np.arange(start, start + batch)).tolist() for start in starts]


def list_workers() -> list[psutil.Process]:
    found = []
    for child in psutil.Process().children(recursive=True):
        try:
            found += [child] if "spawn_main" in " ".join(child.cmdline()) else []
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
    return found


def wait_until_gone(pids: list[int], within_s: float = 120.0) -> list[int]:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline and any(psutil.pid_exists(pid) for pid in pids):
        time.sleep(0.05)
    return [pid for pid in pids if psutil.pid_exists(pid)]


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("samples", [40, 70_000])
def test_the_order_of_samples_does_not_depend_on_the_world(world: int, samples: int) -> None:
    order = SampleOrder(samples, seed=1)
    found = read_world(make_world(Numbers(samples), order, 12, world), 24, 9)
    assert found == expected_ids(order, 12, 24, 9)


@settings(max_examples=60)
@given(
    samples=st.integers(1, 60),
    batch=st.integers(1, 20),
    position=st.integers(0, 500),
    cuts=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 4)), min_size=1, max_size=4),
)
def test_a_run_that_resumes_on_other_worlds_reads_the_same(
    samples: int, batch: int, position: int, cuts: list[tuple[int, int]]
) -> None:
    order = SampleOrder(samples, seed=3)
    found, at = [], position
    for world, steps in cuts:
        found += read_world(make_world(Numbers(samples), order, batch, world), at, steps)
        at += steps * batch
    assert found == expected_ids(order, batch, position, sum(steps for _, steps in cuts))


def test_an_epoch_is_every_sample_once_where_it_ends_inside_a_batch() -> None:
    order = SampleOrder(10, seed=1)
    found = read_world(make_world(Numbers(10), order, 4, 3), 0, 10)
    ids = list(itertools.chain(*found))
    epochs = [ids[start : start + 10] for start in range(0, 40, 10)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(10))] * 4
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_reading_is_endless_unless_steps_are_given() -> None:
    loader = StepLoader(make_source(), SampleOrder(40, 0), Share(16))
    endless = [batch.position for batch in itertools.islice(loader.batches(32), 2000)]
    assert endless == list(range(32, 32 + 2000 * 16, 16))
    assert [batch.position for batch in loader.batches(32, 3)] == [32, 48, 64]
    assert list(loader.batches(32, 0)) == []


def test_a_batch_of_a_source_is_its_samples() -> None:
    source = make_source()
    batch = next(StepLoader(source, SampleOrder(40, 0), Share(8, 1, 2)).batches(16))
    expected = source.batch(batch.ids)
    assert batch.ids.dtype == np.int64
    for name, tensor in batch.data.items():
        assert tensor.dtype == torch.int64
        assert tensor.is_contiguous()
        assert np.array_equal(tensor.numpy(), expected[name])
    assert batch.data.keys() == {"inputs", "targets"}


def test_a_batch_of_a_user_dataset_is_collated() -> None:
    batch = next(StepLoader(Numbers(40), SampleOrder(40, 0), Share(8)).batches(0))
    assert batch.data[0].tolist() == batch.ids.tolist()
    assert batch.data[1].shape == (8, 2, 3)
    own = StepLoader(Numbers(40), SampleOrder(40, 0), Share(8), collate=lambda samples: [index for index, _ in samples])
    assert next(own.batches(0)).data == batch.ids.tolist()


class NamedAlike(Numbers):
    """Samples with the names that a source of packed documents gives."""

    def __getitem__(self, index: int) -> Any:
        return {"inputs": index, "targets": index, "positions": index}


def test_a_user_dataset_may_have_the_names_of_packed_documents() -> None:
    batch = next(StepLoader(NamedAlike(40), SampleOrder(40, 0), Share(8)).batches(0))
    assert {name: tensor.tolist() for name, tensor in batch.data.items()} == dict.fromkeys(
        ("inputs", "targets", "positions"), batch.ids.tolist()
    )


def test_a_dataset_that_gathers_whole_batches_is_asked_so() -> None:
    dataset = TensorDataset(torch.arange(40))
    dataset.__getitems__ = lambda ids: [(dataset.tensors[0][index],) for index in ids] + [(torch.tensor(-1),)]  # type: ignore[attr-defined]
    batch = next(StepLoader(dataset, SampleOrder(40, 0), Share(8)).batches(0))
    assert batch.data[0].tolist() == [*batch.ids.tolist(), -1]


@pytest.mark.parametrize("samples", [make_source(), Numbers(40)])
def test_an_empty_share_has_a_sample_that_does_not_count(samples: Any) -> None:
    """No model is called with a batch without rows."""
    order = SampleOrder(40, 0)
    full = next(StepLoader(samples, order, Share(2)).batches(4))
    empty = next(StepLoader(samples, order, Share(2, rank=0, ranks=4)).batches(4))
    assert empty.ids.shape == (0,)
    assert empty.position == 4
    found, expected = list_tensors(empty.data), list_tensors(full.data)
    assert [(tensor.dtype, *tensor.shape) for tensor in found] == [(t.dtype, 1, *t.shape[1:]) for t in expected]


def list_tensors(data: Any) -> list[torch.Tensor]:
    return list(data.values() if isinstance(data, dict) else data)


@pytest.mark.parametrize(
    ("world", "count", "batch"), [(1, 17, 5), (3, 17, 5), (8, 17, 5), (2, 100, 8), (4, 20, 10), (3, 0, 4)]
)
def test_validation_takes_each_sample_once_in_order(world: int, count: int, batch: int) -> None:
    streams = [list(validation_batches(Numbers(40), count, Share(batch, rank, world))) for rank in range(world)]
    steps = [np.concatenate([part.ids for part in step]).tolist() for step in zip(*streams, strict=True)]
    taken = min(count, 40)
    assert steps == [list(range(start, min(start + batch, taken))) for start in range(0, taken, batch)]
    assert [part.position for part in streams[0]] == list(range(0, taken, batch))


class Pair(NamedTuple):
    left: torch.Tensor
    right: list[torch.Tensor]


def test_tensors_move_to_a_device_and_the_rest_stays() -> None:
    tree = {"pair": Pair(torch.zeros(2), [torch.ones(3)]), "names": ["a"], "count": 3}
    batch = to_device(Batch(tree, np.arange(2), 5, 7, 2), torch.device("meta"))
    assert (batch.position, batch.next_position, batch.ids.tolist()) == (5, 7, [0, 1])
    assert isinstance(batch.data["pair"], Pair)
    assert batch.data["pair"].left.device.type == batch.data["pair"].right[0].device.type == "meta"
    assert (batch.data["names"], batch.data["count"]) == (["a"], 3)
    assert tree["pair"].left.device.type == "cpu"  # type: ignore[union-attr]


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return itertools.count()


def test_a_dataset_without_length_is_refused() -> None:
    with pytest.raises(UserError) as caught:
        StepLoader(Endless(), SampleOrder(4, 0), Share(2))
    assert str(caught.value) == (
        "Endless is not a map-style dataset, and only such a dataset resumes exactly\n"
        "      allowed: a dataset with __len__ and __getitem__\n"
        "      to do: give each sample a number, and read it in __getitem__"
    )


def test_an_order_of_another_length_is_a_bug() -> None:
    with pytest.raises(Bug, match="an order of 4 samples over data with 40"):
        StepLoader(Numbers(40), SampleOrder(4, 0), Share(2))


def test_a_dataset_that_cannot_be_sent_to_a_worker_is_refused() -> None:
    dataset = Numbers(40)
    dataset.stream = (number for number in range(3))  # type: ignore[attr-defined]
    with pytest.raises(UserError) as caught:
        next(StepLoader(dataset, SampleOrder(40, 0), Share(8), WORKERS).batches(0))
    assert str(caught.value) == (
        "the dataset cannot be sent to a loader process: cannot pickle 'generator' object\n"
        "      to do: define its class in a module and open files on first use, or set data.workers = 0"
    )


@pytest.mark.parametrize(("world", "prefetch"), [pytest.param(1, 1, marks=pytest.mark.exhaustive), (2, 4)])
def test_workers_read_the_same_and_are_gone_when_the_iterator_is(world: int, prefetch: int) -> None:
    source, order, options = make_source(), SampleOrder(40, 1), LoaderOptions(workers=2, prefetch=prefetch)
    state = torch.get_rng_state()
    found = read_world(make_world(source, order, 12, world, options), 24, 6)
    assert found == expected_ids(order, 12, 24, 6)
    assert list_workers() == []
    loader = StepLoader(source, order, Share(12), options)
    stream = loader.batches(0)
    for batch in itertools.islice(stream, 3):
        assert np.array_equal(batch.data["inputs"].numpy(), source.batch(batch.ids)["inputs"])
    assert len(list_workers()) == 2
    stream.close()  # type: ignore[attr-defined]
    assert list_workers() == []
    assert torch.equal(torch.get_rng_state(), state)


def test_signals_of_the_job_do_not_end_workers() -> None:
    with_workers = StepLoader(Numbers(400), SampleOrder(400, 0), Share(4), WORKERS).batches(0)
    next(with_workers)
    next(with_workers)  # one of each worker, so that both have started
    workers = list_workers()
    assert len(workers) == 2
    for worker in workers:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            worker.send_signal(number)
    assert [batch.position for batch in itertools.islice(with_workers, 20)] == list(range(8, 88, 4))
    with_workers.close()  # type: ignore[attr-defined]
    assert list_workers() == []


def test_what_a_dataset_draws_depends_on_the_position_not_on_the_worker() -> None:
    def draws(options: LoaderOptions, position: int, steps: int) -> list[list[float]]:
        loader = StepLoader(Augmented(40), SampleOrder(40, 0), Share(4), options)
        return [
            torch.stack([part.double() for part in batch.data]).tolist() for batch in loader.batches(position, steps)
        ]

    whole = draws(LoaderOptions(workers=2, prefetch=2), 0, 6)
    assert draws(LoaderOptions(workers=1, prefetch=1), 8, 4) == whole[2:]
    assert len({tuple(step[1]) for step in whole}) == 6


@pytest.mark.parametrize("of_torch", [True, False])
def test_a_dead_worker_is_told_where_its_batch_is_waited_for_and_nowhere_else(
    of_torch: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a collective, the error would have this rank and the others wait for each other. Torch sets its handler once,
    and somebody else may have set another since."""
    monkeypatch.setattr(signal_handling, "_SIGCHLD_handler_set", not of_torch)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    stream = StepLoader(Numbers(400), SampleOrder(400, 0), Share(4), WORKERS).batches(0)
    next(stream)
    next(stream)
    worker = list_workers()[0]
    worker.kill()
    until = time.monotonic() + 60
    # Other work of this rank. A worker is a zombie before the last of its threads has ended and it counts as dead.
    while os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
        assert time.monotonic() < until
        time.sleep(0.01)
    with pytest.raises(JobError, match="a loader process died"):
        next(stream)
    assert list_workers() == []


def test_a_dead_worker_ends_the_job_with_a_sentence() -> None:
    loader = StepLoader(Faulty(40, "die"), SampleOrder(40, 0, shuffle=False), Share(4), WORKERS)
    with pytest.raises(JobError) as caught:
        list(loader.batches(0, 10))
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("a loader process died: DataLoader worker (pid")
    assert lines[-1] == "      to do: lower data.workers or data.prefetch; data.workers = 0 reads in the rank itself"
    assert list_workers() == []


def test_an_error_in_a_worker_arrives_as_it_is(tmp_path: Path) -> None:
    loader = StepLoader(Faulty(40, "raise"), SampleOrder(40, 0, shuffle=False), Share(4), WORKERS)
    with pytest.raises(LookupError, match="sample 11 is bad"):
        list(loader.batches(0, 10))
    tokens = np.zeros(1_000_001, np.uint16)
    tokens[4003] = 13
    np.save(tmp_path / "t.npy", tokens)
    section = DataSection(kind="tokens", path=str(tmp_path / "t.npy"), seq_len=4, validation_fraction=0.0)
    source = open_data(section, 0, "tokens", vocab=13).train
    loader = StepLoader(source, SampleOrder(len(source), 0, shuffle=False), Share(4), WORKERS)
    with pytest.raises(UserError) as caught:
        list(loader.batches(996, 5))
    assert str(caught.value).splitlines()[1] == f'  data.path: "{tmp_path / "t.npy"}" holds the token 13'
    assert list_workers() == []


RANK = """
import os, signal, sys, time
sys.path.insert(0, {folder!r})
from test_loader import Faulty, SampleOrder, Share, StepLoader, WORKERS

if __name__ == "__main__":
    stream = StepLoader(Faulty(40, "none"), SampleOrder(40, 0), Share(4), WORKERS).batches(0)
    print(*{{int(next(stream).data[1][0]) for _ in range(4)}}, flush=True)
    {end}
"""


@pytest.mark.parametrize(
    "end",
    [
        *("os.kill(os.getpid(), signal.SIGKILL)", "pass"),
        pytest.param("raise SystemExit(0)", marks=pytest.mark.exhaustive),
    ],
)
def test_no_worker_outlives_its_rank(tmp_path: Path, end: str) -> None:
    script = tmp_path / "rank.py"
    script.write_text(RANK.format(folder=str(Path(__file__).parent), end=end))
    done = subprocess.run([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, timeout=300, check=False)
    assert done.returncode == (-signal.SIGKILL if "SIGKILL" in end else 0)
    pids = [int(word) for word in done.stdout.split()]
    assert len(pids) == 2
    assert wait_until_gone(pids) == []


@pytest.mark.gpu
def test_pinned_batches_reach_the_device() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    source = make_source()
    for workers in (0, 2):
        loader = StepLoader(source, SampleOrder(40, 0), Share(8), LoaderOptions(workers=workers, pin_memory=True))
        for batch in loader.batches(0, 4):
            assert all(tensor.is_pinned() for tensor in batch.data.values())
            moved = to_device(batch, torch.device("cuda"))
            assert np.array_equal(moved.data["inputs"].cpu().numpy(), source.batch(batch.ids)["inputs"])
