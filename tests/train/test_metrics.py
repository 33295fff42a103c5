"""What a script logs, and metric objects in a validation: the same as one rank that sees all samples would have."""

from __future__ import annotations

import importlib
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from pool import ranks
from runs import Died, die_at, layout, lone_rank, open_tiny, pool_ranks, tell_steps
from shardway.errors import UserError
from shardway.ranks.start import Ranks
from shardway.rundir.directory import RunDir
from shardway.train.loss import LossSum
from shardway.train.run import LiveRun
from shardway.train.validate import MetricLog

QUIET = ("run.device=cpu", "run.threads=1", "checkpoint.background=false", "train.validate_every=2 steps")
CLASSES = 3


def samples(count: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(count)
    return TensorDataset(torch.randn(count, 4, generator=generator), torch.arange(count) % CLASSES)


def build() -> nn.Module:
    torch.manual_seed(3)
    return nn.Linear(4, CLASSES)


def read_logged(folder: Path) -> dict[int, dict[str, float]]:
    return {event["step"]: event["values"] for event in RunDir(folder).all_events(names=("logged",))}


def library() -> Any:
    """torchmetrics, imported where it is needed: it brings whole libraries with it, which takes seconds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module("torchmetrics")


def make_metrics() -> dict[str, Any]:
    """Metrics whose states are counts and lists, and a collection."""
    of_classes = library().classification
    return {
        "f1": of_classes.MulticlassF1Score(CLASSES, average=None),
        "auroc": of_classes.MulticlassAUROC(CLASSES),
        "mean": library().MetricCollection({"top": of_classes.MulticlassAccuracy(CLASSES)}),
    }


def validated(folder: Path, on: Ranks, *words: str, count: int = 23) -> tuple[dict[str, float], dict[str, Any]]:
    """The results of the last validation, and the values that plain torchmetrics gives for the weights at its step."""
    metrics = make_metrics()
    with open_tiny(folder, on, *words, base=QUIET) as run:
        model = run.shard(build())
        run.optimizer(torch.optim.SGD, model, lr=0.1)
        held_out = samples(count)
        validation = run.validation(held_out, F.cross_entropy, metrics=metrics)
        for batch in run.steps(run.loader(samples(64), 8), 2, validation):
            run.step(model, batch, F.cross_entropy)
        weights = {name: _whole(value) for name, value in model.state_dict().items()}
        assert not metrics["f1"].update_called
    plain = build()
    plain.load_state_dict(weights)
    with torch.no_grad():
        outputs, targets = plain(held_out.tensors[0]), held_out.tensors[1]
    expected: dict[str, Any] = {}
    for name, metric in metrics.items():
        metric.update(outputs, targets)
        parts = metric.items() if name == "mean" else [("", metric)]
        for key, part in parts:
            part.distributed_available_fn = lambda: False
            expected["_".join(filter(None, (name, key)))] = part.compute()
    assert validation.last is not None
    return validation.last, expected


def _whole(value: torch.Tensor) -> torch.Tensor:
    full = getattr(value, "full_tensor", None)
    return full() if full is not None else value


def check_as_expected(found: dict[str, float], expected: dict[str, Any]) -> None:
    for name, value in expected.items():
        for at, number in enumerate(value.flatten().tolist()):
            assert found[f"{name}_{at}" if value.ndim else name] == pytest.approx(number, abs=2e-6), name


def test_metric_objects_of_a_validation_are_those_of_all_samples(tmp_path: Path) -> None:
    found, expected = validated(tmp_path, lone_rank())
    assert {"f1_0", "f1_1", "f1_2", "auroc", "mean_top", "loss"} <= set(found)
    check_as_expected(found, expected)


@ranks(2)
def test_metric_objects_join_their_ranks(rank: int, tmp_path: Path) -> None:
    """23 samples are uneven shares of two ranks, and one sample leaves a rank without any."""
    for shape in ((2, 1), (1, 2)):
        check_as_expected(*validated(tmp_path / f"{shape}", pool_ranks(), *layout(*shape)))
    top = library().classification.MulticlassAccuracy(CLASSES, average="micro")
    one = run_with(tmp_path / "one", pool_ranks(), {"top": top}, count=1)
    assert one is not None
    assert one["top"] in (0.0, 1.0)


@ranks(2)
def test_states_that_only_their_class_can_join(rank: int, tmp_path: Path) -> None:
    """The statistics of a correlation are stacked; a loss of model and batch names what it is shown."""
    x, y = samples(23).tensors
    data = [{"x": x[at], "y": y[at]} for at in range(23)]

    def loss_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> LossSum:
        outputs = model(batch["x"])
        total = F.cross_entropy(outputs, batch["y"], reduction="sum")
        return LossSum(total, len(outputs), outputs=(outputs[:, 0], batch["y"].float()))

    with open_tiny(tmp_path, pool_ranks(), *layout(2, 1), base=QUIET) as run:
        model = run.shard(build())
        run.optimizer(torch.optim.SGD, model, lr=0.1)
        validation = run.validation(data, loss_of, metrics={"correlation": library().PearsonCorrCoef()})
        for batch in run.steps(run.loader(data, 8), 2, validation):
            run.step(model, batch, loss_of)
        with torch.no_grad():
            pair = torch.stack((model(x)[:, 0], y.float()))
    assert validation.last is not None
    assert validation.last["correlation"] == pytest.approx(float(torch.corrcoef(pair)[0, 1]), abs=1e-5)


def test_a_loss_of_model_and_batch_names_what_metrics_see(tmp_path: Path) -> None:
    def loss_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> LossSum:
        outputs = model(batch["x"])
        total = F.cross_entropy(outputs, batch["y"], reduction="sum")
        return LossSum(total, len(outputs), outputs=(outputs, batch["y"]))

    score = library().classification.MulticlassF1Score
    x, y = samples(9).tensors
    data = [{"x": x[at], "y": y[at]} for at in range(9)]
    for loss, fails in ((loss_of, False), (lambda model, batch: loss_of(model, batch).total / 9, True)):
        with open_tiny(tmp_path / f"{fails}", lone_rank(), base=QUIET) as run:
            model = run.shard(build())
            run.optimizer(torch.optim.SGD, model, lr=0.1)
            validation = run.validation(data, loss, metrics={"f1": score(CLASSES)})
            if fails:
                with pytest.raises(UserError, match=r"outputs=\(predictions, targets\)"):
                    for batch in run.steps(run.loader(data, 4), 2, validation):
                        run.step(model, batch, loss)
                continue
            for batch in run.steps(run.loader(data, 4), 2, validation):
                run.step(model, batch, loss)
            assert validation.last is not None
            plain = score(CLASSES)
            with torch.no_grad():
                plain.update(model(x), y)
            assert validation.last["f1"] == pytest.approx(float(plain.compute()))


def test_targets_that_do_not_count_are_not_shown_to_metrics(tmp_path: Path) -> None:
    """A batch whose targets are all -100 is filled for the loss; a metric must not see what it was filled with."""
    x, y = samples(16).tensors
    y = y.clone()
    y[:8] = -100
    seen = library().classification.MulticlassAccuracy(CLASSES, average="micro", ignore_index=-100)
    with open_tiny(tmp_path, lone_rank(), base=QUIET) as run:
        model = run.shard(build())
        run.optimizer(torch.optim.SGD, model, lr=0.1)
        validation = run.validation(TensorDataset(x, y), F.cross_entropy, metrics={"accuracy_of": seen})
        for batch in run.steps(run.loader(TensorDataset(x, y), 8), 2, validation):
            run.step(model, batch, F.cross_entropy)
        with torch.no_grad():
            right = float((model(x[8:]).argmax(1) == y[8:]).float().mean())
    assert validation.last is not None
    assert validation.last["accuracy_of"] == pytest.approx(right)


class Tally:
    """A metric of nobody's library."""

    def __init__(self) -> None:
        self.count = 0

    def reset(self) -> None:
        self.count = 0

    def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:
        self.count += len(outputs)

    def compute(self) -> int:
        return self.count


@ranks(2)
def test_a_metric_that_cannot_be_joined_is_refused_on_several_ranks(rank: int, tmp_path: Path) -> None:
    of = library()
    wrapped = of.wrappers.ClasswiseWrapper(of.classification.MulticlassF1Score(CLASSES, average=None))
    for name, metric in (("tally", Tally()), ("wrapped", wrapped)):
        with pytest.raises(UserError, match=f"'{name}' .* how to join these is not known"):
            run_with(tmp_path / name, pool_ranks(), {name: metric})


def run_with(folder: Path, on: Ranks, metrics: Any, count: int = 23) -> dict[str, float] | None:
    with open_tiny(folder, on, *layout(on.world, 1), base=QUIET) as run:
        model = run.shard(build())
        run.optimizer(torch.optim.SGD, model, lr=0.1)
        validation = run.validation(samples(count), F.cross_entropy, metrics=metrics)
        for batch in run.steps(run.loader(samples(64), 8), 2, validation):
            run.step(model, batch, F.cross_entropy)
    return validation.last


def test_any_metric_will_do_on_one_rank(tmp_path: Path) -> None:
    result = run_with(tmp_path, lone_rank(), {"tally": Tally()})
    assert result is not None
    assert result["tally"] == 23


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        ({"f1": 0.5}, "no metric: 'f1' \\(float\\)"),
        ([Tally()], "was given a list"),
        ({"loss": Tally()}, '"loss", a name that the results'),
    ],
)
def test_what_is_no_metric_is_said(tmp_path: Path, metrics: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        run_with(tmp_path, lone_rank(), metrics)


# --- run.log


def log_run(folder: Path, on: Ranks, *words: str, last: int | None = None, steps: int = 4, batch: int = 5) -> None:
    """Each step logs what is known of its batch: a mean over this rank's rows, a sum, extremes, a metric."""
    metric = library().classification.MulticlassAccuracy(CLASSES, average="micro")
    with open_tiny(folder, on, *words, base=(*QUIET, "checkpoint.every=2 steps")) as run:
        if last is not None:
            tell_steps(run, die_at(last))
        model = run.shard(build())
        run.optimizer(torch.optim.SGD, model, lr=0.1)
        for x, y in run.steps(run.loader(samples(30), batch), steps):
            run.step(model, (x, y), F.cross_entropy)
            metric.reset()
            metric.update(F.one_hot((y + x[:, 0].gt(0)) % CLASSES, CLASSES).float(), y)
            log_of(run, x, y, metric)


def log_of(run: LiveRun, x: torch.Tensor, y: torch.Tensor, metric: Any) -> None:
    run.log(level=x.mean(), right=metric)
    run.log({"rows": len(x), "y max": 0}, reduce="sum")
    run.log({"y max": y.max()}, reduce="max")
    run.log(low=x.min().item(), reduce="min")
    if run.is_first:
        run.log(first=run.step_number + 1)


@ranks(2)
def test_what_is_logged_on_ranks_is_what_one_rank_logs(rank: int, tmp_path: Path) -> None:
    """Batches of five on two ranks are two and three rows."""
    if rank == 0:
        log_run(tmp_path / "alone", lone_rank())
    pool_ranks().barrier()
    alone = read_logged(tmp_path / "alone")
    assert sorted(alone) == [1, 2, 3, 4]
    assert set(alone[1]) == {"level", "right", "rows", "y max", "low", "first"}
    assert [values["first"] for values in alone.values()] == [1, 2, 3, 4]
    assert alone[2]["rows"] == 5
    for shape in ((2, 1), (1, 2)):
        log_run(tmp_path / f"{shape}", pool_ranks(), *layout(*shape))
        found = read_logged(tmp_path / f"{shape}")
        assert found.keys() == alone.keys()
        for step, values in alone.items():
            assert found[step] == pytest.approx(values, rel=1e-6, abs=1e-7), step


def test_what_was_logged_goes_on_after_a_kill(tmp_path: Path) -> None:
    log_run(tmp_path / "whole", lone_rank(), steps=6)
    with pytest.raises(Died):
        log_run(tmp_path / "cut", lone_rank(), last=3, steps=6)
    log_run(tmp_path / "cut", lone_rank(), steps=6)
    assert read_logged(tmp_path / "cut") == read_logged(tmp_path / "whole")


@ranks(2)
def test_ranks_need_not_log_alike(rank: int, tmp_path: Path) -> None:
    """Nothing waits for a rank that has logged nothing, in no step and at no end."""
    with open_tiny(tmp_path, pool_ranks(), *layout(2, 1), base=QUIET) as run:
        model = run.shard(build())
        run.optimizer(torch.optim.SGD, model, lr=0.1)
        for step, batch in enumerate(run.steps(run.loader(samples(32), 8), 5), start=1):
            if step == 2 and rank == 1:
                run.log(before=1)
            run.step(model, batch, F.cross_entropy)
            if rank == step % 2:
                run.log(one=step, other=10 * rank + step)
    assert read_logged(tmp_path)[2] == {"before": 1.0, "one": 2.0, "other": 2.0}
    assert {step: values["one"] for step, values in read_logged(tmp_path).items()} == {n: float(n) for n in range(1, 6)}


def test_a_tensor_is_logged_as_it_was(tmp_path: Path) -> None:
    written: list[tuple[int, dict[str, float]]] = []
    log = MetricLog(lone_rank(), lambda step, values: written.append((step, values)))
    value = torch.tensor([2.0])
    log.add(1, 4, {"x": value}, "mean")
    value.fill_(9.0)
    log.add(2, 4, {"x": True, "y": float("nan")}, "mean")
    log.add(2, 4, {"x": 3}, "sum")
    log.add(3, 4, {"x": 1}, "mean")
    log.drop_after(2)
    assert log.is_waiting
    log.flush()
    assert not log.is_waiting
    assert written[0] == (1, {"x": 2.0})
    assert written[1][1]["x"] == 3.0
    assert math.isnan(written[1][1]["y"])
    assert len(written) == 2


@pytest.mark.parametrize(
    ("values", "way", "said"),
    [
        ({"x": torch.ones(2), "y": "two"}, "mean", "does not take: 'x' \\(Tensor\\), 'y' \\(str\\)"),
        ({"x": None}, "mean", "'x' \\(NoneType\\)"),
        ({"a": 1.0, 3: 2.0}, "mean", "a value named 3 \\(int\\)"),
        ({"x": torch.tensor(1j)}, "mean", "'x' \\(Tensor\\)"),
        ({"x": 1}, "median", '"mean", "sum", "min", "max"'),
    ],
)
def test_what_cannot_be_logged_is_said(values: dict[str, Any], way: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        MetricLog(lone_rank(), lambda step, values: None).add(1, 1, values, way)


def test_there_is_a_time_to_log(tmp_path: Path) -> None:
    with open_tiny(tmp_path, lone_rank(), base=QUIET) as run, pytest.raises(UserError, match="was called before"):
        run.log(x=1)
