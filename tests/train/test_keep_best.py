"""`checkpoint.keep_best`, `checkpoint.monitor` and `train.patience`, with validations whose values are given."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import TensorDataset

from pool import ranks
from runs import (
    Died,
    die_at,
    layout,
    lone_rank,
    open_tiny,
    pool_ranks,
    read_column,
    read_named,
    signal_at,
    tell_steps,
    train_tiny,
)
from saved_tensors import read_whole
from shardway.checkpoint import manager
from shardway.errors import JobError, UserError
from shardway.ranks.start import Ranks
from shardway.rundir.directory import RunDir
from shardway.train import loop
from shardway.train.loss import LossSum
from shardway.train.validate import Validation
from speed import picked_pairs

QUIET = ("run.device=cpu", "run.threads=1", "checkpoint.background=false", "train.validate_every=1 steps")
SAMPLES = TensorDataset(torch.arange(24.0).reshape(12, 2) / 24, torch.arange(12) % 3)
NAN = math.nan


def train(
    folder: Path,
    on: Ranks,
    values: Sequence[float] | Mapping[int, float],
    *words: str,
    steps: int | None = None,
    last: int | None = None,
    signal: int | None = None,
    metric: str = "loss",
    validates: bool = True,
) -> Validation:
    """A run whose validation after step s gives `values[s - 1]` (or `values[s]` of a mapping) as `metric`."""
    by_step = values if isinstance(values, Mapping) else dict(enumerate(values, 1))
    with open_tiny(folder, on, *words, base=QUIET) as run:

        def given_value(output: torch.Tensor, targets: torch.Tensor) -> LossSum:
            value = by_step[run.step_number]
            if metric == "loss":
                return LossSum(torch.tensor(value, dtype=torch.float64), 1)
            return LossSum(output.sum(), 1, metrics={metric: value})

        if last is not None:
            tell_steps(run, die_at(last))
        if signal is not None:
            tell_steps(run, signal_at(signal))
        torch.manual_seed(3)
        model = run.shard(nn.Linear(2, 3))
        run.optimizer(torch.optim.SGD, model, lr=0.1)
        validation = run.validation(TensorDataset(*(each[:1] for each in SAMPLES.tensors)), given_value)
        length = steps or max(by_step)
        for batch in run.steps(run.loader(SAMPLES, 4), length, validation if validates else None):
            run.step(model, batch, F.cross_entropy)
    return validation


def kept(folder: Path) -> list[int]:
    return RunDir(folder).checkpoint_steps()


def reason_of(folder: Path) -> tuple[str, int, str]:
    status = RunDir(folder).read_status()
    return status["state"], status["step"], status["reason"]


# --- which stay


STAY: dict[str, tuple[list[float], tuple[str, ...], list[int]]] = {
    "best two and newest": ([5, 3, 4, 2, 6, 7], ("keep=1", "keep_best=2"), [2, 4, 6]),
    "the newest is one of them": ([5, 4, 3], ("keep=1", "keep_best=2"), [2, 3]),
    "none of them": ([5, 4, 3], ("keep=1", "keep_best=0"), [3]),
    "the last is saved by itself": ([5, 4, 3], ("keep=1", "keep_best=1", "every=off"), [3]),
    "no number is never one": ([NAN, 3, math.inf, -math.inf, NAN], ("keep=1", "keep_best=3"), [2, 5]),
    "of equals the earlier": ([2, 2, 2, 2], ("keep=1", "keep_best=2"), [1, 2, 4]),
    "beside those for ever": ([9, 8, 1, 7, 6, 5, 4], ("keep=1", "keep_best=1", "keep_every=2 steps"), [2, 3, 4, 6, 7]),
    "higher": ([1, 9, 3, 8, 2], ("keep=1", "keep_best=2", "monitor=max f1"), [2, 4, 5]),
    "lower": ([1, 9, 3, 8, 2], ("keep=1", "keep_best=2", "monitor=min f1"), [1, 5]),
    "all": ([3, 2, 1], ("keep=1", "keep_best=9"), [1, 2, 3]),
}


@pytest.mark.parametrize("case", picked_pairs(STAY, ("100 steps", "1 steps")), ids=", every ".join)
def test_the_best_stay_beside_the_newest(case: tuple[str, str], tmp_path: Path, quiet_threads: None) -> None:
    """What a row names was counted by hand; it is the same where every step is saved anyway."""
    name, every = case
    values, words, expected = STAY[name]
    metric = "f1" if any("f1" in word for word in words) else "loss"
    named = [f"checkpoint.every={every}", *(f"checkpoint.{word}" for word in words)]
    train(tmp_path, lone_rank(), values, *named, metric=metric)
    assert kept(tmp_path) == expected


VALUES = st.lists(st.sampled_from([1.0, 2.0, 3.0, 4.0, NAN, math.inf]), min_size=2, max_size=7)


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    values=VALUES,
    best=st.integers(1, 3),
    every=st.sampled_from([1, 2, 100]),
    ends=st.lists(st.integers(1, 6), max_size=3),
)
def test_kills_and_stops_change_nothing(
    values: list[float],
    best: int,
    every: int,
    ends: list[int],
    tmp_path_factory: pytest.TempPathFactory,
    quiet_threads: None,
) -> None:
    """Odd ends are deaths, even ones stops, which save: the best by hand are there, with the weights of their steps."""
    folder, reference = tmp_path_factory.mktemp("best"), tmp_path_factory.getbasetemp() / "every-step"
    if not reference.exists():  # what is validated changes nothing of what is learnt
        train(reference, lone_rank(), [0.0] * 7, "checkpoint.every=1 steps", "checkpoint.keep=9")
    words = (f"checkpoint.every={every} steps", "checkpoint.keep=1", f"checkpoint.keep_best={best}")
    for end in sorted({end for end in ends if end < len(values)}):
        if end % 2:
            with pytest.raises(Died):
                train(folder, lone_rank(), values, *words, last=end)
        else:
            train(folder, lone_rank(), values, *words, signal=end)
    found = train(folder, lone_rank(), values, *words).best
    finite = [step for step in range(1, len(values) + 1) if math.isfinite(values[step - 1])]
    ranked = sorted(finite, key=lambda step: (values[step - 1], step))
    assert (found.step if found else None) == (ranked[0] if ranked else None)
    assert kept(folder) == sorted({*ranked[:best], len(values)})
    for step in kept(folder):
        one, other = (read_whole(RunDir(each).checkpoint_path(step)) for each in (folder, reference))
        weights = [name for name in one if name.startswith("model.")]
        assert weights
        assert all(torch.equal(one[name], other[name]) for name in weights)


@pytest.mark.parametrize("where", ["validating", "saving", "removing"])
def test_a_death_around_the_save_of_a_best_step_changes_nothing(
    where: str, tmp_path: Path, quiet_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At step 4, which is better than all before, in a run that saves every third step."""
    values, words = [5.0, 4.0, 6.0, 1.0, 3.0, 2.0, 7.0], ("checkpoint.every=3 steps", "checkpoint.keep=1")
    name, module = {
        "validating": ("validate", loop),
        "saving": ("write_checkpoint", manager),
        "removing": ("prune_checkpoints", manager),
    }[where]
    real = getattr(module, name)

    def die(*arguments: Any, **options: Any) -> Any:
        saved = [event["step"] for event in read_named(tmp_path / "killed", "validation")]
        if 4 in saved or (where == "validating" and saved[-1:] == [3]):
            raise Killed
        return real(*arguments, **options)

    monkeypatch.setattr(module, name, die)
    with pytest.raises(Killed):
        train(tmp_path / "killed", lone_rank(), values, *words, "checkpoint.keep_best=2")
    monkeypatch.undo()
    train(tmp_path / "killed", lone_rank(), values, *words, "checkpoint.keep_best=2")
    assert kept(tmp_path / "killed") == [4, 6, 7]
    assert [event["step"] for event in read_named(tmp_path / "killed", "started")] == [
        0,
        4 if where == "removing" else 3,
    ]


class Killed(BaseException):
    """Ends a run as SIGKILL would: nothing of it is written down."""


# --- two ranks, disks of nodes, saves in the background


@ranks(2)
def test_two_ranks_keep_the_same(rank: int, tmp_path: Path) -> None:
    values, words = [5.0, 2.0, NAN, 2.0, 3.0, 6.0], ("checkpoint.keep=1", "checkpoint.keep_best=2", *layout(1, 2))
    with pytest.raises(Died):
        train(tmp_path / "run", pool_ranks(), values, *words, last=4)
    pool_ranks().barrier()
    assert kept(tmp_path / "run") == [2, 4]
    found = train(tmp_path / "run", pool_ranks(), values, *words, "train.patience=2")
    assert found.best is not None
    assert (found.best.step, dict(found.best.metrics)) == (2, {"loss": 2.0})
    pool_ranks().barrier()
    assert kept(tmp_path / "run") == [2, 4]
    assert reason_of(tmp_path / "run")[:2] == ("finished", 4)  # steps 3 and 4 were no better
    named = (*words, "checkpoint.background=true", "checkpoint.local_every=1 steps", "train.patience=4")
    train(tmp_path / "nodes", pool_ranks(), values, *named, f"checkpoint.local_dir={tmp_path / 'disk'}")
    pool_ranks().barrier()
    assert kept(tmp_path / "nodes") == [2, 4, 6]


@pytest.mark.parametrize(
    "words", [("background=true",), ("background=true", "local_every=1 steps"), ("local_every=1 steps",)]
)
def test_the_best_reach_the_run_directory_also_while_it_goes_on(
    words: tuple[str, ...], tmp_path: Path, quiet_threads: None
) -> None:
    """A save under way is waited for where it is not of that step."""
    values = [9.0, 5.0, 1.0, 4.0, 2.0, 3.0, 8.0, 9.0]
    named = [f"checkpoint.{word}" for word in (*words, "keep=1", "keep_best=3", "every=2 steps")]
    local = () if len(words) == 1 and "background" in words[0] else (f"checkpoint.local_dir={tmp_path / 'disk'}",)
    with pytest.raises(Died):
        train(tmp_path / "run", lone_rank(), values, *named, *local, last=5)
    assert {3, 4} <= set(kept(tmp_path / "run"))
    train(tmp_path / "run", lone_rank(), values, *named, *local)
    assert kept(tmp_path / "run") == [3, 5, 6, 8]


def test_a_best_step_that_only_the_nodes_have_is_brought_to_the_run_directory(
    tmp_path: Path, quiet_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run died after the validation that made it the best."""
    values, words = [3.0, 1.0, 2.0, 2.5], ("checkpoint.keep=1", "checkpoint.keep_best=1", "checkpoint.every=100 steps")
    local = ("checkpoint.local_every=1 steps", f"checkpoint.local_dir={tmp_path / 'disk'}")
    real = manager.CheckpointManager.save

    def die(saver: manager.CheckpointManager, point: manager.SavePoint) -> None:
        if point.best and point.step == 2:
            raise Killed
        real(saver, point)

    monkeypatch.setattr(manager.CheckpointManager, "save", die)
    with pytest.raises(Killed):
        train(tmp_path / "run", lone_rank(), values, *words, *local)
    monkeypatch.undo()
    assert kept(tmp_path / "run") == [1]
    train(tmp_path / "run", lone_rank(), values, *words, *local)
    assert [event["step"] for event in read_named(tmp_path / "run", "started")] == [0, 2]
    assert kept(tmp_path / "run") == [2, 4]


def test_where_a_best_step_cannot_be_saved_the_next_best_takes_its_place(
    tmp_path: Path, quiet_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = manager.write_checkpoint

    def refuse(place: Any, on: Any, content: Any) -> Any:
        if content.step == 3:
            raise JobError("no space is left")
        return real(place, on, content)

    monkeypatch.setattr(manager, "write_checkpoint", refuse)
    values, words = [5.0, 2.0, 1.0, 4.0, 3.0, 6.0], ("checkpoint.keep=1", "checkpoint.keep_best=2")
    found = train(tmp_path, lone_rank(), values, *words)
    assert [event["step"] for event in read_named(tmp_path, "save_failed")] == [3]
    assert kept(tmp_path) == [2, 5, 6]
    assert found.best is not None
    assert found.best.step == 3


# --- the end by patience


@pytest.mark.parametrize(
    ("values", "patience", "words", "last", "reason"),
    [
        ([3, 2, 4, 4, 1], 2, (), 4, "no better loss for 2 validations: 2 at step 2 is the best"),
        ([3, 2, 2, 1], 1, (), 3, "no better loss for 1 validation: 2 at step 2 is the best"),
        ([NAN, NAN, NAN, 1], 3, (), 3, "no better loss for 3 validations: none was a number"),
        ([NAN, 2.31449, NAN, 3, 1], 2, (), 4, "no better loss for 2 validations: 2.314 at step 2 is the best"),
        ([1, 2, 1, 2], 2, ("checkpoint.monitor=max f1",), 4, "no better f1 for 2 validations: 2 at step 2 is the best"),
    ],
)
def test_a_run_is_finished_after_so_many_validations_without_a_better_one(
    values: list[float],
    patience: int,
    words: tuple[str, ...],
    last: int,
    reason: str,
    tmp_path: Path,
    quiet_threads: None,
) -> None:
    metric = "f1" if words else "loss"
    length = {"steps": 9, "metric": metric}
    values = [*values, *[0.0] * 9]
    words = (f"train.patience={patience}", *words)
    train(tmp_path / "a", lone_rank(), values, *words, **length)
    assert reason_of(tmp_path / "a") == ("finished", last, reason)
    assert kept(tmp_path / "a")[-1] == last
    events = list(RunDir(tmp_path / "a").all_events())
    train(tmp_path / "a", lone_rank(), values, *words, **length)  # which has nothing to do
    assert list(RunDir(tmp_path / "a").all_events()) == events
    words = (*words, f"checkpoint.every={last - 1} steps")
    with pytest.raises(Died):
        train(tmp_path / "b", lone_rank(), values, *words, last=last - 1, **length)
    train(tmp_path / "b", lone_rank(), values, *words, **length)
    assert reason_of(tmp_path / "b") == ("finished", last, reason)
    assert read_column(tmp_path / "b") == read_column(tmp_path / "a")


def test_a_higher_patience_goes_on_and_a_lower_one_ends(
    tmp_path: Path, quiet_threads: None, caplog: pytest.LogCaptureFixture
) -> None:
    values = [2.0, 3.0, 3.0, 1.0, 3.0, 3.0, 3.0, 3.0]
    train(tmp_path, lone_rank(), values, "train.patience=2")
    assert reason_of(tmp_path)[:2] == ("finished", 3)
    train(tmp_path, lone_rank(), values, "train.patience=3")
    assert reason_of(tmp_path)[:2] == ("finished", 7)
    train(tmp_path, lone_rank(), values, "train.patience=2")
    assert reason_of(tmp_path) == ("finished", 7, "no better loss for 3 validations: 1 at step 4 is the best")
    train(tmp_path, lone_rank(), values, "train.patience=off")
    assert reason_of(tmp_path) == ("finished", 8, "all 8 steps are done")
    assert [event["step"] for event in read_named(tmp_path, "started")] == [0, 3, 7]
    train(tmp_path / "x", lone_rank(), values, "train.patience=1", "checkpoint.every=off")
    assert kept(tmp_path / "x") == [2]  # as after run.stop


def test_a_run_whose_last_step_is_no_better_is_finished_by_its_steps(tmp_path: Path, quiet_threads: None) -> None:
    train(tmp_path, lone_rank(), [1.0, 2.0, 3.0], "train.patience=2")
    assert reason_of(tmp_path) == ("finished", 3, "all 3 steps are done")


def test_a_death_between_the_last_validation_and_the_end_finishes_the_run_at_the_next_start(
    tmp_path: Path, quiet_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("train.patience=1", "checkpoint.every=1 steps")

    def die(*arguments: Any) -> None:
        raise Killed

    monkeypatch.setattr(loop.Loop, "_finish", die)
    with pytest.raises(Killed):
        train(tmp_path, lone_rank(), [1.0, 2.0, 0.0], *words)
    monkeypatch.undo()
    train(tmp_path, lone_rank(), [1.0, 2.0, 0.0], *words)
    assert reason_of(tmp_path)[:2] == ("finished", 2)
    assert [event["step"] for event in read_named(tmp_path, "validation")] == [1, 2]


def test_a_run_file_alone_does_the_same(tmp_path: Path, quiet_threads: None) -> None:
    """A learning rate that makes each step worse than the first."""
    words = ("train.validate_every=1 steps", "optim.lr=30.0", "optim.warmup=0 steps", "optim.name=sgd")
    words = (*words, "train.patience=3", "checkpoint.keep_best=1", "checkpoint.keep=1", "checkpoint.monitor=loss")
    outcome = train_tiny(tmp_path, lone_rank(), *words)
    losses = {event["step"]: event["loss"] for event in read_named(tmp_path, "validation")}
    best = min((step for step, loss in losses.items() if loss is not None), key=lambda step: (losses[step], step))
    assert (outcome.state, outcome.step) == ("finished", best + 3)
    assert outcome.reason.startswith("no better loss for 3 validations: ")
    assert outcome.reason.endswith(f" at step {best} is the best")
    assert kept(tmp_path) == [best, best + 3]
    assert train_tiny(tmp_path, lone_rank(), *words) == outcome


# --- what is refused


def test_a_metric_that_the_results_lack_ends_the_run_and_costs_no_step(tmp_path: Path, quiet_threads: None) -> None:
    """Each start with the same name comes further, as after a validation that failed."""
    words = ("checkpoint.keep_best=1", "train.validate_every=2 steps")
    for last in (2, 4):
        with pytest.raises(UserError) as told:
            train(tmp_path, lone_rank(), [1.0] * 9, *words, "checkpoint.monitor=max f2", metric="f1", steps=9)
        assert str(told.value) == (
            'checkpoint.monitor is "max f2" (command line), and the results of the validation hold no f2.\n'
            "      allowed: f1, loss; a name other than loss, accuracy and bits_per_byte with max or min before it\n"
            "  Nothing is lost: what was trained is saved. To do: name one of these, or let the loss function give f2 "
            "in LossSum(metrics=...); then run the same command again."
        )
        assert kept(tmp_path)[-1] == last
    train(tmp_path, lone_rank(), [1.0] * 9, *words, "checkpoint.monitor=max f1", metric="f1", steps=9)
    assert [event["step"] for event in read_named(tmp_path, "started")] == [0, 2, 4]
    assert kept(tmp_path)[0] == 2  # of equals the earliest


@ranks(2)
def test_a_metric_that_the_results_lack_is_told_on_all_ranks(rank: int, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="hold no bits_per_byte"):
        train(tmp_path, pool_ranks(), [1.0] * 3, "checkpoint.monitor=bits_per_byte", *layout(1, 2))
    pool_ranks().barrier()
    assert kept(tmp_path) == [1]


@pytest.mark.parametrize("word", ["checkpoint.keep_best=2", "train.patience=2"])
def test_a_script_without_a_validation_is_refused_before_its_first_step(
    word: str, tmp_path: Path, quiet_threads: None
) -> None:
    key, _, value = word.partition("=")
    with pytest.raises(UserError) as told:
        train(tmp_path, lone_rank(), [1.0, 2.0], word, validates=False)
    assert str(told.value) == (
        f"{key} is {value} (command line), which needs validations, and run.steps was given none.\n"
        "  To do: hand run.steps(loader, validation=run.validation(held_out, loss_fn)), or leave the key out."
    )
    assert not read_named(tmp_path, "started")
    with pytest.raises(UserError, match=r"off. \(command line\) makes none"):
        train(tmp_path, lone_rank(), [1.0, 2.0], word, "train.validate_every=off")


# --- what a script sees


def test_the_best_so_far_comes_back_to_the_script(tmp_path: Path, quiet_threads: None) -> None:
    found = train(tmp_path, lone_rank(), [1.0, 3.0, 2.0], "checkpoint.monitor=max f1", metric="f1")
    assert found.best is not None
    assert (found.best.step, found.best.metrics["f1"]) == (2, 3.0)
    assert found.best.metrics == found.results[2]
    nothing = train(tmp_path / "b", lone_rank(), [NAN, NAN])
    assert nothing.best is None
