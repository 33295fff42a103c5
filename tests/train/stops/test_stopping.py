"""A stop in a validation, while data do not come, in a save, at the start; what goes on comes out the same."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pool import ranks
from runs import TINY, TINY_IMAGES, layout, lone_rank, pool_ranks, read_column, read_named, signal_at, train_tiny
from shardway.checkpoint import writer
from shardway.checkpoint import writer as shards
from shardway.data.loader import Batch
from shardway.ranks import stop as stop_rules
from shardway.ranks.start import Ranks
from shardway.rundir.directory import RunDir
from shardway.train import dataloader, run
from shardway.train import stops as train_stops
from shardway.train.passes import Passes
from shardway.train.stops import count_until_next, read_shapes
from speed import picked

SHORT = ("train.steps=8", "checkpoint.every=100 steps", "train.validate_every=4 steps")
VALIDATED = (*SHORT, "data.samples=960", "train.micro_batch=1", "model.dropout=0.2")
DROPOUT = (*SHORT, "model.dropout=0.2")
PIPELINE = ("parallel.pp=2", "model.tied=false")


def further(*words: str) -> Any:
    """A case like another."""
    return pytest.param(words, marks=pytest.mark.exhaustive)


def terminate() -> None:
    """As a scheduler does it."""
    os.kill(os.getpid(), signal.SIGTERM)


@contextlib.contextmanager
def stalled(read: str, number: int, stops: Callable[[], None] = terminate, *, on: bool = True) -> Iterator[None]:
    """`read` of `train.run` gives a stream whose batch of that number does not come, while `stops` asks for a stop.

    Where `on` is False, the batches come, and what else is patched is patched as well.
    """
    fetch = getattr(run, read)

    def batches(*arguments: Any) -> Iterator[Batch]:
        for index, batch in enumerate(fetch(*arguments)):
            if on and index == number:
                torch.rand(1)  # reading may draw
                stops()
                time.sleep(60)
            yield batch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stop_rules, "NOTICE_S", 0.05)
        patch.setattr(stop_rules, "TICK_S", 0.02)
        patch.setattr(train_stops, "ASK_EVERY_S", 0.0)
        patch.setattr(run, read, batches)
        yield


def assert_alike(folder: Path, other: Path, on: Ranks | None = None) -> None:
    """Steps and validations, bit for bit."""
    if on is not None:
        on.barrier()
    for column in ("step", "loss", "grad_norm", "lr"):
        assert read_column(folder, column) == read_column(other, column), column
    assert validations(folder) == validations(other)


def validations(folder: Path) -> list[tuple[int, float]]:
    found = [event for event in RunDir(folder).events() if event["event"] == "validation"]
    return [(event["step"], event["loss"]) for event in found]


def train_through(folder: Path, *words: str) -> Path:
    """The run that nothing stops, once for all that ask for it in this folder."""
    through, on = folder / hashlib.sha256("\n".join(words).encode()).hexdigest(), pool_ranks()
    is_there = through.exists()
    on.barrier()
    if not is_there:
        train_tiny(through, on, *words)
    on.barrier()
    return through


# --- validations


def test_a_validation_that_a_stop_left_out_is_made_before_the_next_step(tmp_path: Path, quiet_threads: None) -> None:
    train_tiny(tmp_path / "through", lone_rank(), *SHORT)
    train_tiny(tmp_path / "stopped", lone_rank(), *SHORT, before_step=signal_at(4))
    assert validations(tmp_path / "stopped") == []
    train_tiny(tmp_path / "stopped", lone_rank(), *SHORT)
    assert_alike(tmp_path / "stopped", tmp_path / "through")
    names = [event["event"] for event in RunDir(tmp_path / "stopped").events()]
    assert names == [
        *("started", *["step"] * 4, "saved", "stopped"),
        *("started", "validation", *["step"] * 4, "saved", "validation", "finished"),
    ]


def test_a_run_that_owes_its_last_validation_is_stopped_rather_than_finished(
    tmp_path: Path, quiet_threads: None
) -> None:
    train_tiny(tmp_path / "through", lone_rank(), *SHORT)
    first = train_tiny(tmp_path / "stopped", lone_rank(), *SHORT, before_step=signal_at(8))
    assert (first.state, first.step) == ("stopped", 8)
    second = train_tiny(tmp_path / "stopped", lone_rank(), *SHORT)
    assert (second.state, second.step) == ("finished", 8)
    assert_alike(tmp_path / "stopped", tmp_path / "through")


def stop_in_batch(number: int, stops: Callable[[], None] = terminate) -> contextlib.AbstractContextManager[Any]:
    """A stop is asked for while a validation evaluates that batch."""
    evaluate, seen = Passes.evaluate, []

    def stop(*arguments: Any) -> torch.Tensor:
        seen.append(None)
        if len(seen) == number:
            stops()
        return evaluate(*arguments)

    patch = pytest.MonkeyPatch()
    patch.setattr(Passes, "evaluate", stop)
    patch.setattr(train_stops, "ASK_EVERY_S", 0.0)
    return contextlib.closing(_Undone(patch))


class _Undone:
    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.close = patch.undo


@pytest.mark.parametrize(
    "words", [further(*layout(1, 2)), further("parallel.tp=2"), PIPELINE, further("parallel.cp=2")], ids=str
)
@ranks(2)
def test_a_validation_is_broken_off_on_all_ranks_and_made_again(
    rank: int, words: tuple[str, ...], tmp_path: Path, references: Path
) -> None:
    on, words = pool_ranks(), (*VALIDATED, *words)
    through = train_through(references, *words)
    with stop_in_batch(1, terminate if rank == 1 else lambda: None):
        outcome = train_tiny(tmp_path / "stopped", on, *words)
    if rank == 0:
        assert (outcome.state, outcome.step) == ("stopped", 4)
        (event,) = read_named(tmp_path / "stopped", "validation_stopped")
        assert (event["step"], event["batches"], event["reason"]) == (4, 1, "a signal asked for a stop")
    train_tiny(tmp_path / "stopped", on, *words)
    assert_alike(tmp_path / "stopped", through, on)


@pytest.mark.parametrize(
    ("batches", "seconds", "expected"),
    [(1, 0.01, 4), (4, 0.04, 16), (16, 0.16, 64), (64, 0.64, 100), (100, 1.0, 100), (100, 10.0, 10), (1, 30.0, 1)],
)
def test_ranks_ask_each_other_about_once_a_second(batches: int, seconds: float, expected: int) -> None:
    assert count_until_next(batches, seconds) == expected


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_a_clock_that_says_nothing_useful(seconds: float) -> None:
    assert count_until_next(3, seconds) == 12


# --- data that do not come


def test_a_step_whose_batch_does_not_come_is_left_to_the_next_start(tmp_path: Path, quiet_threads: None) -> None:
    train_tiny(tmp_path / "through", lone_rank(), *SHORT)
    with stalled("training_batches", 5):
        outcome = train_tiny(tmp_path / "stopped", lone_rank(), *SHORT)
    assert (outcome.state, outcome.step, outcome.reason) == ("stopped", 5, "a signal asked for a stop")
    (event,) = read_named(tmp_path / "stopped", "step_discarded")
    assert event["step"] == 5
    assert RunDir(tmp_path / "stopped").checkpoint_steps() == [5]
    train_tiny(tmp_path / "stopped", lone_rank(), *SHORT)
    assert_alike(tmp_path / "stopped", tmp_path / "through")


WAYS = {
    "shards": further(*layout(1, 2)),
    "tensor": further("parallel.tp=2"),
    "pipeline": PIPELINE,
    "unguarded": (*layout(1, 2), "guard.non_finite=off"),
    "a batch that has just grown": (*layout(1, 2), "train.global_batch=[[0, 8], [40, 32]]", "train.micro_batch=4"),
    "copies": further(*layout(2, 1)),
    "context": further("parallel.cp=2"),
    "fp16": further(*layout(1, 2), "precision.compute=fp16"),
    "experts": further(*layout(1, 2), "model.experts=2", "model.experts_per_token=1"),
}


@pytest.mark.parametrize("words", WAYS.values(), ids=WAYS)
@ranks(2)
def test_all_ranks_void_a_step_that_one_has_no_batch_for(
    rank: int, words: tuple[str, ...], tmp_path: Path, references: Path
) -> None:
    """Weights, moments, buffers, counters and random numbers are those of before."""
    on, words = pool_ranks(), (*DROPOUT, *words)
    through = train_through(references, *(word for word in words if word != "guard.non_finite=off"))
    with stalled("training_batches", 5, on=rank == 1):
        outcome = train_tiny(tmp_path / "stopped", on, *words)
    if rank == 0:
        assert (outcome.state, outcome.step) == ("stopped", 5)
    train_tiny(tmp_path / "stopped", on, *words)
    assert_alike(tmp_path / "stopped", through, on)


@ranks(2)
def test_a_first_batch_that_does_not_come_ends_the_run_without_a_save(rank: int, tmp_path: Path) -> None:
    with stalled("training_batches", 0, on=rank == 1):
        outcome = train_tiny(tmp_path, pool_ranks(), *SHORT)
    if rank == 0:
        assert (outcome.state, outcome.step) == ("stopped", 0)
        assert [event["event"] for event in RunDir(tmp_path).events()] == ["started", "stopped"]
        assert RunDir(tmp_path).checkpoint_steps() == []


@pytest.mark.parametrize("number", picked([0, 2], 2))
@ranks(2)
def test_a_batch_of_a_validation_that_does_not_come(rank: int, number: int, tmp_path: Path, references: Path) -> None:
    on, words = pool_ranks(), (*VALIDATED, *layout(1, 2))
    through = train_through(references, *words)
    with stalled("validation_data", number, on=rank == 1):
        outcome = train_tiny(tmp_path / "stopped", on, *words)
    if rank == 0:
        assert (outcome.state, outcome.step) == ("stopped", 4)
        assert validations(tmp_path / "stopped") == []
    train_tiny(tmp_path / "stopped", on, *words)
    assert_alike(tmp_path / "stopped", through, on)


@ranks(2)
def test_the_last_batches_of_a_validation_are_not_counted_where_one_did_not_come(rank: int, tmp_path: Path) -> None:
    """The ranks do not ask each other again before its end."""
    on, words = pool_ranks(), (*VALIDATED, *layout(1, 2))
    with stalled("validation_data", 2, on=rank == 1), pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_stops, "ASK_EVERY_S", 1e9)
        patch.setattr(train_stops, "GROWTH", 10**9)
        outcome = train_tiny(tmp_path, on, *words)
    if rank == 0:
        assert (outcome.state, outcome.step) == ("stopped", 4)
        assert validations(tmp_path) == []


def test_a_stand_in_has_the_shapes_of_what_it_stands_for() -> None:
    data = {"inputs": torch.ones(3, 4, dtype=torch.int64), "both": (torch.ones(3), torch.tensor(2.0)), "name": "x"}
    shapes = read_shapes(data, torch.device("cpu"))
    assert shapes is not None
    made = shapes.make(2)
    assert made["name"] == "x"
    assert torch.equal(made["inputs"], torch.zeros(2, 4, dtype=torch.int64))
    assert [each.shape for each in made["both"]] == [(2,), ()]
    assert shapes.make()["inputs"].shape == (3, 4)


@pytest.mark.parametrize(("samples", "expected"), [(20, [4, 4, 2]), (16, [4, 4]), (3, [1])])
def test_how_many_samples_each_batch_of_a_validation_has(
    samples: int, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    share = dataloader.Share(8, 0, 2)
    monkeypatch.setattr(dataloader, "_validation_share", lambda session, data: (100, share))
    assert dataloader.validation_rows(None, range(samples)) == expected  # type: ignore[arg-type]


# --- saves and starts


def test_a_stop_that_comes_in_a_save_needs_no_other_step_and_no_other_save(
    tmp_path: Path, quiet_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = writer._commit

    def stop(*arguments: Any) -> None:
        terminate()
        write(*arguments)

    monkeypatch.setattr(writer, "_commit", stop)
    outcome = train_tiny(tmp_path, lone_rank(), *SHORT, "checkpoint.every=3 steps")
    assert (outcome.state, outcome.step) == ("stopped", 3)
    assert [event["step"] for event in read_named(tmp_path, "saved")] == [3]


def test_a_stop_that_was_asked_for_before_the_start_is_obeyed_before_the_first_step(
    tmp_path: Path, quiet_threads: None
) -> None:
    train_tiny(tmp_path, lone_rank(), *SHORT, before_step=signal_at(2))
    RunDir(tmp_path).request_stop("no more")
    outcome = train_tiny(tmp_path, lone_rank(), *SHORT)
    assert (outcome.state, outcome.step, outcome.reason) == ("stopped", 2, "no more")
    assert [event["step"] for event in read_named(tmp_path, "saved")] == [2]
    assert not RunDir(tmp_path).stop_requested()


@pytest.mark.parametrize("base", [TINY, TINY_IMAGES], ids=["tokens", "images"])
def test_a_second_ctrl_c_in_a_save_ends_the_run_at_once(
    base: tuple[str, ...], tmp_path: Path, quiet_threads: None
) -> None:
    """Though torch makes an error of it; what is half written is no checkpoint, and the same command goes on."""
    words = ("train.steps=6", "checkpoint.every=3 steps")
    train_tiny(tmp_path / "through", lone_rank(), *words, base=base)
    take = shards.memory_of

    def interrupt(*arguments: Any, **named: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        return take(*arguments, **named)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shards, "memory_of", interrupt)
        train_tiny(tmp_path / "stopped", lone_rank(), *words, base=base)
    stopped = RunDir(tmp_path / "stopped")
    assert stopped.checkpoint_steps() == []
    assert stopped.read_status()["reason"] == "a second signal ended the run at once"
    train_tiny(tmp_path / "stopped", lone_rank(), *words, base=base)
    assert_alike(tmp_path / "stopped", tmp_path / "through")
