"""What scripts do that is rare and right: they seed by themselves, change their folder, hold odd tensors, have
optimizers of their own."""

from __future__ import annotations

import os
import random
import shutil
import signal
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

import shardway
from runs import lone_rank, open_tiny, read_column
from shardway.checkpoint.state import Unstorable, put_state_together, seed_all, take_state_apart
from shardway.errors import LostContact, UserError
from shardway.ranks import stop
from shardway.rundir.directory import RunDir

KEYS = ("run.device=cpu", "run.threads=1", "run.telemetry=off", "checkpoint.background=false")
SAVED = (*KEYS, "checkpoint.every=2 steps")


class Noisy(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Samples with noise from the process' generator."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((4,), index / 32) + torch.rand(4), torch.ones(1)


def train(run: Any, model: nn.Module, steps: int, most: int = 99) -> None:
    """Steps of a script with this model; it leaves its loop where `most` steps are done, with a batch in its hands."""
    model = run.shard(model)
    run.optimizer(torch.optim.SGD, model, lr=0.01, momentum=0.9)
    for batch in run.steps(run.loader(Noisy(), batch_size=4), steps):
        if run.step_number == most:
            break
        run.step(model, batch, F.mse_loss)


# --- the process


def test_a_script_may_go_to_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quiet_threads: None
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    for last in (4, 6):
        with shardway.start(*SAVED, directory="run") as run:
            os.chdir("out")
            train(run, nn.Linear(4, 1), last)
        os.chdir(tmp_path)
    assert RunDir(tmp_path / "run").checkpoint_steps()[-1] == 6
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize("words", [(), ("train.seed=3",)])
def test_a_seed_of_the_script_holds(words: tuple[str, ...], tmp_path: Path, quiet_threads: None) -> None:
    """Unless the run is asked for another."""
    drawn = []
    for number, seed in enumerate((7, 7, 8, None, None)):
        seed_all(99, 0)  # as a run before in this process
        if seed is not None:
            torch.manual_seed(seed)
        expected = torch.rand(4, generator=torch.Generator().manual_seed(seed or 0))
        with shardway.start(*KEYS, *words, directory=tmp_path / str(number)):
            drawn.append(torch.rand(4))
        assert torch.equal(drawn[-1], expected) == (not words)
    assert torch.equal(drawn[0], drawn[1])
    assert torch.equal(drawn[3], drawn[4])
    assert torch.equal(drawn[0], drawn[2]) == bool(words)


@pytest.mark.parametrize("words", [(), ("train.seed=3",)])
def test_other_generators_are_as_the_script_left_them(words: tuple[str, ...], tmp_path: Path) -> None:
    """They do not show whether they were seeded; unless the run is asked for a seed."""
    np.random.seed(5)
    random.seed(5)
    expected = np.random.RandomState(5).rand(), random.Random(5).random()
    with shardway.start(*KEYS, *words, directory=tmp_path / "run"):
        drawn = np.random.rand(), random.random()
    assert (drawn == expected) == (not words)


@pytest.mark.parametrize("words", [(), ("run.threads=2",)])
def test_threads_of_the_script_hold(
    words: tuple[str, ...], tmp_path: Path, quiet_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in a second run of the process; unless the run is asked for another number."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    keys = (*(key for key in KEYS if not key.startswith("run.threads")), *words)
    for name in ("first", "second"):  # a run that another one precedes
        torch.set_num_threads(5)
        with shardway.start(*keys, directory=tmp_path / name) as run:
            assert torch.get_num_threads() == run.resolved.values.run.threads == (2 if words else 5)
    torch.set_num_threads(1)  # as torch began
    with shardway.start(*keys, directory=tmp_path / "third") as run:
        assert run.resolved.is_derived("run.threads") == (not words)


def test_a_stop_that_comes_while_a_watch_begins_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    real = signal.signal

    def late(number: int, handler: Any) -> Any:
        before = real(number, handler)
        if number == signal.SIGTERM and isinstance(getattr(handler, "__self__", None), stop.SignalWatch):
            os.kill(os.getpid(), signal.SIGTERM)
        return before

    monkeypatch.setattr(signal, "signal", late)
    with stop.SignalWatch() as watch:
        assert watch.received == "SIGTERM"


def test_one_rank_has_no_other_to_lose() -> None:
    with pytest.raises(RuntimeError) as caught, lone_rank().contact("during a step"):
        raise RuntimeError("gloo: connection reset")
    assert not isinstance(caught.value, LostContact)


# --- the loop


def test_another_length_in_a_later_loop_is_refused(tmp_path: Path, quiet_threads: None) -> None:
    with open_tiny(tmp_path, lone_rank(), base=KEYS) as run:
        model = run.shard(nn.Linear(4, 1))
        run.optimizer(torch.optim.SGD, model, lr=0.01)
        for batch in run.steps(run.loader(Noisy(), batch_size=4), 2):
            run.step(model, batch, F.mse_loss)
        with pytest.raises(
            UserError, match=r"length=4\) is called in a run whose length is that of .*length=2\), and 2"
        ):
            next(run.steps(run.loader(Noisy(), batch_size=8), 4))


def test_the_same_length_once_more_is_answered(
    tmp_path: Path, quiet_threads: None, capfd: pytest.CaptureFixture[str]
) -> None:
    taken = []
    with open_tiny(tmp_path, lone_rank(), base=KEYS) as run:
        model = run.shard(nn.Linear(4, 1))
        run.optimizer(torch.optim.SGD, model, lr=0.01)
        for _ in range(2):
            for batch in run.steps(run.loader(Noisy(), batch_size=8), "1 epochs"):
                taken.append(run.step(model, batch, F.mse_loss))
    assert len(taken) == 4
    assert "is called again after all 4 steps of the run" in capfd.readouterr().err


def test_a_batch_that_was_left_is_drawn_again_alike(tmp_path: Path, quiet_threads: None) -> None:
    for name, stops in (("whole", (99,)), ("left", (3, 99))):
        for most in stops:
            with shardway.start(*KEYS, "data.workers=0", directory=tmp_path / name) as run:
                torch.manual_seed(1)
                train(run, nn.Linear(4, 1), 6, most)
    assert read_column(tmp_path / "left") == read_column(tmp_path / "whole")


# --- what it holds


class Buffered(nn.Module):
    """A linear layer with a further tensor."""

    def __init__(self, extra: torch.Tensor, *, frozen: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)
        if frozen:
            self.extra = nn.Parameter(extra, requires_grad=False)
        else:
            self.register_buffer("extra", extra)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.linear(x + 0 * self.extra.flatten()[0].abs())
        return result


@pytest.mark.parametrize(
    ("extra", "frozen"),
    [
        (torch.tensor([1 + 2j, 3 - 4j]).conj(), False),
        (torch.tensor([1 + 2j, 3 - 4j]).conj().imag, False),
        (torch.randint(-8, 8, (4, 4), dtype=torch.int8), True),
    ],
    ids=["conjugate", "negative", "integers"],
)
def test_odd_tensors_are_saved_and_loaded(
    extra: torch.Tensor, frozen: bool, tmp_path: Path, quiet_threads: None
) -> None:
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    for folder, lengths in ((whole, (4,)), (parted, (2, 4))):
        for last in lengths:
            torch.manual_seed(1)
            model = Buffered(extra, frozen=frozen)
            with shardway.start(*SAVED, directory=folder) as run:
                train(run, model, last)
            assert torch.equal(model.extra, extra)
    assert read_column(parted) == read_column(whole)


def test_an_expanded_buffer_is_refused_unless_it_is_not_saved(tmp_path: Path, quiet_threads: None) -> None:
    """torch cannot load it either."""
    model = Buffered(torch.arange(4.0).expand(3, 4))
    with shardway.start(*SAVED, directory=tmp_path / "saved") as run, pytest.raises(UserError, match=r"extra: its el"):
        run.shard(model)
    model.register_buffer("extra", torch.arange(4.0).expand(3, 4), persistent=False)
    for last in (2, 4):
        with shardway.start(*SAVED, directory=tmp_path / "other") as run:
            train(run, model, last)
    assert len(read_column(tmp_path / "other")) == 4


def test_data_without_samples_are_refused_at_once(tmp_path: Path, quiet_threads: None) -> None:
    with open_tiny(tmp_path, lone_rank(), base=KEYS) as run:
        with pytest.raises(UserError, match=r"run\.loader was given list of 0 samples"):
            run.loader([], batch_size=8)
        with pytest.raises(UserError, match=r"run\.validation was given list of 0 samples"):
            run.validation([], F.mse_loss)
        assert not (tmp_path / "events").exists()


def test_a_later_loader_keeps_the_batch_and_the_length(
    tmp_path: Path, quiet_threads: None, capfd: pytest.CaptureFixture[str]
) -> None:
    with open_tiny(tmp_path, lone_rank(), base=KEYS) as run:
        model = run.shard(nn.Linear(4, 1))
        run.optimizer(torch.optim.SGD, model, lr=0.01)
        for batch in run.steps(run.loader(Noisy(), batch_size=8), "1 epochs"):
            run.step(model, batch, F.mse_loss)
            if run.step_number == 1:
                break
        for batch in run.steps(run.loader(Noisy(), batch_size=4, workers=0)):
            run.step(model, batch, F.mse_loss)
    assert len(read_column(tmp_path)) == 4
    assert "batch_size=4) has no effect: the global batch of the run is that of" in capfd.readouterr().err


def test_kept_values_come_back_as_they_were() -> None:
    state = {
        "window": deque([1.0, 2.0], maxlen=2),
        "endless": deque([3]),
        "best": np.array(5.0),
        "swapped": np.array([1, 2], dtype=">f4"),
        "turned": np.arange(6).reshape(2, 3)[:, ::-1],
    }
    parts = take_state_apart(state)
    found = put_state_together(parts.text, lambda name, device: parts.tensors[name])
    assert [found["window"], found["window"].maxlen, found["endless"].maxlen] == [state["window"], 2, None]
    for name in ("best", "swapped", "turned"):
        assert found[name].dtype == state[name].dtype
        np.testing.assert_array_equal(found[name], state[name], strict=True)
    for wide in (np.zeros(2, np.longdouble), np.longdouble(1)):
        with pytest.raises(Unstorable, match="x is a number of 128 bits"):
            take_state_apart({"x": wide})


def test_a_kept_metric_goes_on(tmp_path: Path, quiet_threads: None) -> None:
    torchmetrics = pytest.importorskip("torchmetrics")

    def seen(last: int) -> Iterator[float]:
        with open_tiny(tmp_path, lone_rank(), base=SAVED) as run:
            model = run.shard(nn.Linear(4, 1))
            run.optimizer(torch.optim.SGD, model, lr=0.01)
            metric = run.keep("seen", torchmetrics.SumMetric())
            for batch in run.steps(run.loader(Noisy(), batch_size=4), last):
                run.step(model, batch, F.mse_loss)
                metric.update(1.0)
                yield float(metric.compute())

    assert [*seen(2), *seen(4)] == [1.0, 2.0, 3.0, 4.0]


# --- optimizers


class Sam(torch.optim.Optimizer):
    """Sharpness-aware minimization, whose step does nothing by itself."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def ascend(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["before"] = parameter.clone()
                parameter.add_(parameter.grad, alpha=0.05)
        self.zero_grad()

    @torch.no_grad()
    def descend(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                before = self.state[parameter]["before"]
                self.state[parameter]["moved"] = self.state[parameter].get("moved", 0) + 1
                parameter.copy_(before).sub_(parameter.grad, alpha=group["lr"] / self.state[parameter]["moved"])
        self.zero_grad()

    def step(self, closure: Any = None) -> None:
        raise NotImplementedError("ascend and descend")


def test_an_optimizer_whose_step_is_not_for_others(tmp_path: Path, quiet_threads: None) -> None:
    for name, lengths in (("whole", (6,)), ("parted", (4, 6))):
        for last in lengths:
            torch.manual_seed(1)
            with shardway.start(*SAVED, directory=tmp_path / name) as run:
                model = run.shard(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1)))
                optimizer = run.optimizer(Sam, model, lr=0.1)
                for inputs, targets in run.steps(run.loader(Noisy(), batch_size=4), last):
                    run.backward(F.mse_loss(model(inputs), targets))
                    optimizer.ascend()
                    run.backward(F.mse_loss(model(inputs), targets))
                    optimizer.descend()
    assert read_column(tmp_path / "parted") == read_column(tmp_path / "whole")


class Counting(torch.optim.SGD):
    """Halves its rate with each step, by a number of its own."""

    calls = 0

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        for group in self.param_groups:
            group["lr"] = 0.1 * 0.5**self.calls
        return super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "calls": self.calls, "seen": {"last": torch.tensor([self.calls])}}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # another name than torch's
        self.calls = state["calls"]
        assert state["seen"]["last"].tolist() == [self.calls]
        super().load_state_dict({name: state[name] for name in ("state", "param_groups")})


class Named(Counting):
    """The same where torch finds out which states there are."""

    step = torch.optim.SGD.step


@pytest.mark.parametrize("kind", [Counting, Named])
def test_what_an_optimizer_adds_to_its_state_is_kept(kind: type[Counting], tmp_path: Path, quiet_threads: None) -> None:
    for name, lengths in (("whole", (6,)), ("parted", (2, 4, 6))):
        for last in lengths:
            torch.manual_seed(1)
            with shardway.start(*SAVED, directory=tmp_path / name) as run:
                model = run.shard(nn.Linear(4, 1))
                optimizer = run.optimizer(kind, model, lr=0.1, momentum=0.9)
                for batch in run.steps(run.loader(Noisy(), batch_size=4), last):
                    run.step(model, batch, F.mse_loss)
                    if kind is Named:
                        optimizer.calls += 1
            assert optimizer.calls == last
    assert read_column(tmp_path / "parted") == read_column(tmp_path / "whole")


# --- the end


def test_a_report_that_cannot_be_written_leaves_a_run_finished(
    tmp_path: Path, quiet_threads: None, capfd: pytest.CaptureFixture[str]
) -> None:
    from shardway.resolve.request import ResolveRequest
    from shardway.train.run import train as train_file

    words = ("model.dim=16", "model.layers=1", "model.heads=2", "data.seq_len=16", "train.global_batch=2")
    request = ResolveRequest(None, (*KEYS, *words, "train.steps=1", "train.validate_every=off"), tmp_path / "run")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/report.html").mkdir()
    assert train_file(request).state == "finished"
    assert "the report was not written: IsADirectoryError" in capfd.readouterr().err
    assert RunDir(tmp_path / "run").read_status()["state"] == "finished"
    shutil.rmtree(tmp_path / "run/report.html")
