"""What happens between two steps: stopping, saving, validating, finishing, and what is written about it."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from pool import RankPool, ranks
from runs import (
    TINY_IMAGES,
    Died,
    die_at,
    layout,
    lone_rank,
    open_tiny,
    pool_ranks,
    read_column,
    read_named,
    read_steps,
    signal_at,
    train_alone,
    train_tiny,
)
from shardway.errors import JobError, UserError
from shardway.ranks.stop import StepRequests
from shardway.rundir.directory import RunDir
from shardway.train import stops
from shardway.train.loss import IGNORED, LossSum, token_cross_entropy
from shardway.train.run import LiveRun
from shardway.train.validate import Validation, validate
from speed import picked, picked_pairs
from trained import apply_shape, make_passes

SHORT = ("train.steps=6", "optim.warmup=0 steps")
SCRIPT = ("run.device=cpu", "run.threads=1", "checkpoint.every=off", "checkpoint.background=false")


def read_strictly(text: str) -> Any:
    """JSON as a strict reader takes it: NaN and Infinity are no numbers."""

    def refuse(word: str) -> None:
        raise ValueError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refuse)


def touch_stop_at(last: int) -> Any:
    def look(run: LiveRun, step: int) -> None:
        if step == last and run.is_first:
            run.directory.request_stop()

    return look


@ranks(2)
def test_the_stop_file_stops_all_ranks_after_the_step(rank: int, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stops, "LOOK_EVERY_S", 0.0)
        words = ("train.steps=7", "checkpoint.every=100 steps")
        outcome = train_tiny(tmp_path, pool_ranks(), *layout(1, 2), *words, before_step=touch_stop_at(5))
        pool_ranks().barrier()
        assert not RunDir(tmp_path).stop_requested()
        if rank == 0:
            assert (outcome.state, outcome.step) == ("stopped", 5)
            assert outcome.reason == "the stop file asked for a stop"
            assert RunDir(tmp_path).checkpoint_steps() == [5]
            names = [event["event"] for event in RunDir(tmp_path).events()]
            assert names == ["started", *["step"] * 5, "saved", "stopped"]
        train_tiny(tmp_path, pool_ranks(), *layout(1, 2), *words)
    assert read_column(tmp_path, "step") == list(range(1, 8))


def test_a_stop_saves_even_where_saving_is_off(tmp_path: Path, quiet_threads: None) -> None:
    outcome = train_tiny(tmp_path, lone_rank(), "checkpoint.every=off", before_step=signal_at(3))
    assert (outcome.state, outcome.reason, outcome.step) == ("stopped", "a signal asked for a stop", 3)
    assert RunDir(tmp_path).checkpoint_steps() == [3]
    status = RunDir(tmp_path).read_status()
    assert (status["state"], status["reason"], status["step"]) == ("stopped", "a signal asked for a stop", 3)


def test_a_stop_in_the_last_step_is_a_finish(
    tmp_path: Path, quiet_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the file that asked for it does not stop a longer run later."""
    monkeypatch.setattr(stops, "LOOK_EVERY_S", 0.0)
    outcome = train_tiny(tmp_path, lone_rank(), *SHORT, before_step=touch_stop_at(6))
    assert (outcome.state, outcome.step) == ("finished", 6)
    assert not RunDir(tmp_path).stop_requested()


def test_cadences_in_steps(tmp_path: Path, quiet_threads: None) -> None:
    words = ("checkpoint.every=6 steps", "checkpoint.keep=2", "train.validate_every=8 steps", "train.steps=20")
    train_tiny(tmp_path, lone_rank(), *words)
    assert [event["step"] for event in read_named(tmp_path, "saved")] == [6, 12, 18, 20]
    assert RunDir(tmp_path).checkpoint_steps() == [18, 20]
    assert [event["step"] for event in read_named(tmp_path, "validation")] == [8, 16, 20]


def test_steps_that_are_kept_for_ever_are_saved_whatever_the_cadence(tmp_path: Path, quiet_threads: None) -> None:
    words = ("checkpoint.every=4 steps", "checkpoint.keep=1", "checkpoint.keep_every=6 steps", "train.steps=20")
    train_tiny(tmp_path / "both", lone_rank(), *words)
    assert [event["step"] for event in read_named(tmp_path / "both", "saved")] == [4, 6, 8, 12, 16, 18, 20]
    assert RunDir(tmp_path / "both").checkpoint_steps() == [6, 12, 18, 20]
    train_tiny(tmp_path / "alone", lone_rank(), *words, "checkpoint.every=off", "checkpoint.keep_every=96 samples")
    assert RunDir(tmp_path / "alone").checkpoint_steps() == [12]


def test_a_save_comes_before_the_validation_of_the_same_step(tmp_path: Path, quiet_threads: None) -> None:
    train_tiny(tmp_path, lone_rank(), *SHORT, "checkpoint.every=3 steps", "train.validate_every=3 steps")
    names = [event["event"] for event in RunDir(tmp_path).events()]
    part = ["step"] * 3 + ["saved", "validation"]
    assert names == ["started", *part, *part, "finished"]


@ranks(2)
def test_cadences_in_time(rank: int, tmp_path: Path) -> None:
    """Rank 0's clock decides for all."""
    words = (*SHORT, "checkpoint.every=1ms", "checkpoint.keep=9")
    train_tiny(tmp_path / "often", pool_ranks(), *words, before_step=lambda run, step: time.sleep(0.002))
    assert RunDir(tmp_path / "often").checkpoint_steps() == [1, 2, 3, 4, 5, 6]
    train_tiny(tmp_path / "seldom", pool_ranks(), *SHORT, "checkpoint.every=1h")
    assert RunDir(tmp_path / "seldom").checkpoint_steps() == [6]


def test_nothing_is_saved_where_saving_is_off(tmp_path: Path, quiet_threads: None) -> None:
    assert train_tiny(tmp_path, lone_rank(), *SHORT).state == "finished"
    assert RunDir(tmp_path).checkpoint_steps() == []
    assert read_named(tmp_path, "saved") == read_named(tmp_path, "validation") == []


@ranks(2)
def test_a_finished_run_does_nothing_when_started_again(rank: int, tmp_path: Path) -> None:
    words = (*SHORT, "checkpoint.every=100 steps", "train.validate_every=2 steps")
    train_tiny(tmp_path, pool_ranks(), *words)
    before = {path: path.stat().st_mtime_ns for path in RunDir(tmp_path).checkpoint_path(6).iterdir()}
    lines = len(list(RunDir(tmp_path).all_events()))
    pool_ranks().barrier()
    outcome = train_tiny(tmp_path, pool_ranks(), *words)
    added = list(RunDir(tmp_path).all_events())[lines:]
    assert added == []
    assert {path: path.stat().st_mtime_ns for path in RunDir(tmp_path).checkpoint_path(6).iterdir()} == before
    if rank == 0:
        assert (outcome.state, outcome.reason, outcome.step) == ("finished", "all 6 steps are done", 6)


def test_a_finished_run_goes_on_when_it_is_made_longer(tmp_path: Path, quiet_threads: None) -> None:
    words = ("optim.warmup=0 steps", "checkpoint.every=100 steps", "optim.schedule=constant")
    train_tiny(tmp_path / "a", lone_rank(), *words, "train.steps=4")
    train_tiny(tmp_path / "a", lone_rank(), *words, "train.steps=7")
    train_tiny(tmp_path / "b", lone_rank(), *words, "train.steps=7")
    assert read_column(tmp_path / "a") == read_column(tmp_path / "b")


def broken_from(calls: int, how: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A loss to which `how` adds something from the given call on."""
    seen = []

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        seen.append(len(outputs))
        return mean_square(outputs, targets) + (how(outputs) if len(seen) >= calls else 0.0)

    return loss


def add_nan(outputs: torch.Tensor) -> torch.Tensor:
    return outputs.sum() * math.nan


def add_root_of_0(outputs: torch.Tensor) -> torch.Tensor:
    """0, with a gradient that is no number."""
    return torch.sqrt((outputs * 0).sum())


BROKEN = {
    add_nan: "the loss of step 3 is nan, so the weights after it are of no use; the run ends here.",
    add_root_of_0: "the gradient of step 3 has the norm nan, so the weights after it are of no use; the run ends here.",
}


@pytest.mark.parametrize(
    "case",
    picked_pairs(BROKEN, [((2, 1), "off"), ((1, 2), "1.0")]),
    ids=lambda case: f"{case[0].__name__}, clip {case[1][1]}",
)
@ranks(2)
def test_weights_that_are_no_numbers_are_not_saved(
    rank: int, tmp_path: Path, case: tuple[Callable[[torch.Tensor], torch.Tensor], tuple[tuple[int, int], str]]
) -> None:
    """Rank 1's share is broken in step 3; all ranks end with the same words, before anything is saved."""
    how, (shape, clip) = case
    words = ("train.steps=6", "checkpoint.every=1 steps", "train.global_batch=4", f"optim.clip={clip}", *layout(*shape))
    loss, data = broken_from(3 if rank == 1 else 99, how), TensorDataset(torch.randn(8, 2), torch.randn(8, 1))
    with pytest.raises(JobError) as failure, open_tiny(tmp_path, pool_ranks(), *words, base=SCRIPT) as run:
        net = run.shard(nn.Linear(2, 1))
        run.optimizer(torch.optim.SGD, net, lr=0.1)
        for batch in run.steps(run.loader(data)):
            run.step(net, batch, loss)
    assert str(failure.value).splitlines() == [
        BROKEN[how],
        "  No checkpoint was made of them (step 2 is the last one). To do: look for values in the data that are not "
        "finite, lower optim.lr, or set optim.clip; then run the same command again.",
    ]
    pool_ranks().barrier()
    assert RunDir(tmp_path).checkpoint_steps() == [1, 2]
    events = [read_strictly(line) for line in (tmp_path / "events/rank-00000.jsonl").read_text().splitlines()]
    (broken,) = (event for event in events if event["event"] == "step" and event["step"] == 3)
    assert (broken["loss"] is None) == (how is add_nan)
    assert broken["grad_norm"] is None
    status = read_strictly((tmp_path / "status.json").read_text())
    assert status["state"] == "failed"


def test_a_validation_that_is_no_number_is_written_as_null(tmp_path: Path, quiet_threads: None) -> None:
    words = ("train.steps=1", "train.validate_every=1 steps", "train.global_batch=4")
    data = TensorDataset(torch.randn(8, 2), torch.randn(8, 1))
    with open_tiny(tmp_path, lone_rank(), *words, base=SCRIPT) as run:
        net = run.shard(nn.Linear(2, 1))
        run.optimizer(torch.optim.SGD, net, lr=0.1)
        for batch in run.steps(run.loader(data), validation=Validation(list, mean_square)):
            run.step(net, batch, mean_square)
    lines = (tmp_path / "events/rank-00000.jsonl").read_text().splitlines()
    losses = [event["loss"] for event in map(read_strictly, lines) if event["event"] == "validation"]
    assert losses == [None]
    assert read_strictly((tmp_path / "status.json").read_text())["validation"]["loss"] is None


class Padded(Dataset[Any]):
    """Samples 0 to 3 have no target that counts."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return torch.arange(5), torch.full((5,), IGNORED if index < 4 else index)


def test_a_batch_without_a_target_does_not_end_the_run(tmp_path: Path, quiet_threads: None) -> None:
    words = ("train.steps=4", "train.global_batch=4", "data.shuffle=false", "data.record_ids=true")
    weights = []
    with open_tiny(tmp_path, lone_rank(), *words, base=SCRIPT) as run:
        torch.manual_seed(0)
        net = run.shard(nn.Embedding(5, 8))
        run.optimizer(torch.optim.AdamW, net, lr=0.1, weight_decay=0.5)
        for batch in run.steps(run.loader(Padded())):
            weights.append(net.weight.detach().clone())
            run.step(net, batch, token_cross_entropy)
    changed = [not torch.equal(*pair) for pair in pairwise(weights)]
    assert changed == [False, True, False], "neither momentum nor weight decay moves what nothing was learned for"
    losses = read_column(tmp_path)
    assert [loss is None for loss in losses] == [True, False, True, False]
    assert losses[3] < losses[1]


def test_other_data_are_not_trained_on_under_an_old_position(tmp_path: Path, quiet_threads: None) -> None:
    train_tiny(tmp_path, lone_rank(), "train.steps=9", before_step=signal_at(4))
    before = len(list(RunDir(tmp_path).all_events()))
    with pytest.raises(UserError) as failure:
        train_tiny(tmp_path, lone_rank(), "train.steps=9", "data.samples=200")
    first, second = str(failure.value).splitlines()
    assert first.startswith("the training data is not what the first 4 steps were trained on: the fingerprint of ")
    assert second == (
        "  The position in the data would mean other samples, so nothing was trained. To do: restore the data, "
        "or start over with --fresh, which sets the run directory aside."
    )
    assert list(RunDir(tmp_path).all_events())[before:] == []


def test_fewer_steps_than_are_done_are_refused(tmp_path: Path, quiet_threads: None) -> None:
    train_tiny(tmp_path, lone_rank(), "train.steps=9", before_step=signal_at(6))
    with pytest.raises(UserError) as failure:
        train_tiny(tmp_path, lone_rank(), "train.steps=5")
    assert str(failure.value) == (
        "6 steps are done, and train.steps asks for 5.\n"
        "  Nothing was changed. To do: ask for more steps, or start over with --fresh, which sets the run "
        "directory aside."
    )


@ranks(2)
def test_steps_are_recorded_with_their_facts(rank: int, tmp_path: Path) -> None:
    train_tiny(tmp_path, pool_ranks(), *SHORT, "data.record_ids=true")
    steps = read_steps(tmp_path, rank)
    assert [event["step"] for event in steps] == [1, 2, 3, 4, 5, 6]
    for event in steps:
        assert {"loss", "grad_norm", "lr", "tokens_per_s", "samples_per_s", "seconds", "ids", "time"} <= event.keys()
        assert len(event["ids"]) == 4
        assert event["tokens_per_s"] == pytest.approx(8 * 12 / event["seconds"])
    (started,) = read_named(tmp_path, "started")
    assert (started["format"], started["step"], started["total_steps"], started["world"]) == (1, 0, 6, 2)
    assert (started["samples_per_step"], started["tokens_per_step"]) == (8, 96)
    assert read_column(tmp_path) == [event["loss"] for event in steps]


def test_what_ended_a_run_is_written_down(tmp_path: Path, quiet_threads: None) -> None:
    with pytest.raises(Died):
        train_tiny(tmp_path, lone_rank(), *SHORT, before_step=die_at(2))
    (fault,) = read_named(tmp_path, "fault")
    assert (fault["rank"], fault["kind"], fault["exit_code"]) == (0, "Bug", 70)
    assert (fault["step"], fault["message"]) == (2, "Died (after step 2)")
    assert RunDir(tmp_path).read_status()["state"] == "failed"
    assert RunDir(tmp_path).find_writer() is None


def hold_out(rank: int, folder: Path, shape: tuple[int, int], fraction: str) -> None:
    words = (
        "train.steps=2",
        "optim.warmup=0 steps",
        "train.validate_every=1 steps",
        f"data.validation_fraction={fraction}",
    )
    for name, base in (("tokens", ()), ("images", TINY_IMAGES)):
        options = {"base": base} if base else {}
        micro = "train.micro_batch=2"  # batch norm's portions are the same on all worlds
        train_tiny(folder / name, pool_ranks(), *words, micro, *layout(*shape), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("fraction", picked(["0.03", "0.2"], "0.03"))
def test_validation_does_not_depend_on_the_ranks(rank_pool: RankPool, tmp_path: Path, fraction: str) -> None:
    """Also where there are fewer samples than ranks: three held out, for four ranks; else nineteen."""
    shapes = [(1, 1), (1, 2), (2, 2)]
    for shape in shapes:
        folder = tmp_path / f"{shape[0]}{shape[1]}"
        rank_pool.run(hold_out, shape[0] * shape[1], {"folder": folder, "shape": shape, "fraction": fraction})
    for shape in shapes[1:]:
        found = read_named(tmp_path / f"{shape[0]}{shape[1]}" / "tokens", "validation")
        expected = read_named(tmp_path / "11" / "tokens", "validation")
        assert [event["loss"] for event in found] == pytest.approx([event["loss"] for event in expected], rel=1e-6)
        images = read_named(tmp_path / f"{shape[0]}{shape[1]}" / "images", "validation")
        assert all(0 <= event["accuracy"] <= 1 and event["loss"] > 0 for event in images)
    accuracies = {event["accuracy"] for event in read_named(tmp_path / "22" / "images", "validation")}
    counted = 3 if fraction == "0.03" else 19
    assert all((accuracy * counted) == pytest.approx(round(accuracy * counted)) for accuracy in accuracies)


class Modes(nn.Module):
    """Notes in which mode it was run; one part is kept out of training on purpose."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.kept = nn.BatchNorm1d(2)
        self.kept.eval()
        self.seen: set[bool] = set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add(self.training)
        return self.layer(self.kept(x))


def mean_square(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return ((outputs - targets) ** 2).mean()


def summed_square(outputs: torch.Tensor, targets: torch.Tensor) -> LossSum:
    return LossSum(((outputs - targets) ** 2).sum(), len(targets))


@pytest.mark.parametrize("loss", [mean_square, summed_square])
@ranks(2)
def test_validation_counts_each_sample_once(rank: int, loss: Any) -> None:
    """Rank 1 has no sample in the second batch: its mean over nothing is not a number and must not count."""
    torch.manual_seed(4)
    model = Modes()
    x, y = torch.randn(3, 2), torch.randn(3, 1)
    mine = [(x[rank : rank + 1], y[rank : rank + 1]), (x[2 + rank :], y[2 + rank :])]
    passes = make_passes(apply_shape(model, pool_ranks(), (2, 1)), pool_ranks())
    found = validate(model, Validation(lambda: mine, loss, bytes_per_token=2.0), passes, pool_ranks())
    with torch.no_grad():
        expected = mean_square(model.eval()(x), y).item()
    assert found["loss"] == pytest.approx(expected, rel=1e-6)
    assert found["bits_per_byte"] == pytest.approx(expected / 0.6931471805599453 / 2.0)
    assert "accuracy" not in found


def test_validation_leaves_every_mode_as_it_was() -> None:
    model = Modes()
    passes = make_passes(apply_shape(model, lone_rank()), lone_rank())
    validate(model, Validation(lambda: [(torch.ones(1, 2), torch.ones(1, 1))], mean_square), passes, lone_rank())
    assert model.seen == {False}
    assert model.training
    assert model.layer.training
    assert not model.kept.training


def test_validation_of_nothing_is_no_number(tmp_path: Path) -> None:
    passes = make_passes(apply_shape(nn.Linear(1, 1), lone_rank()), lone_rank())
    found = validate(passes.parallel.call, Validation(list, mean_square), passes, lone_rank())
    assert list(found) == ["loss"]
    assert found["loss"] != found["loss"]


def test_a_validation_that_fails_ends_its_reading() -> None:
    """Also while the error is kept, as a notebook does: its loader processes must not stay."""
    ended: list[bool] = []

    def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        try:
            while True:
                yield torch.ones(1, 2), torch.ones(1, 1)
        finally:
            ended.append(True)

    def fails(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        raise ValueError("of the script")

    def fetch(stream: Iterator[Any], *, breakable: bool) -> tuple[Any, bool]:
        return next(stream), False

    passes = make_passes(apply_shape(Modes(), lone_rank()), lone_rank())
    breaks = stops.ValidationBreaks(lone_rank(), fetch, lambda missed: StepRequests())
    with pytest.raises(ValueError, match="of the script") as kept:
        validate(passes.parallel.call, Validation(batches, fails), passes, lone_rank(), breaks)
    assert ended == [True]
    assert kept.tb is not None


@ranks(2)
def test_validation_does_not_disturb_training(rank: int, tmp_path: Path) -> None:
    words = ("train.steps=5", "model.dropout=0.2", *layout(1, 2))
    train_tiny(tmp_path / "with", pool_ranks(), *words, "train.validate_every=2 steps")
    train_tiny(tmp_path / "without", pool_ranks(), *words)
    assert read_column(tmp_path / "with") == read_column(tmp_path / "without")


@ranks(2)
def test_one_open_run_is_like_the_other(rank: int, tmp_path: Path) -> None:
    """Two runs in one process do not share anything: the second gives what it gives alone."""
    train_alone(rank, tmp_path / "first", *SHORT, "train.seed=5")
    train_tiny(tmp_path / "second", pool_ranks(), *SHORT)
    train_tiny(tmp_path / "third", pool_ranks(), *SHORT)
    assert read_column(tmp_path / "second") == read_column(tmp_path / "third")
