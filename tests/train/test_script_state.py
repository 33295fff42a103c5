"""What a script of one's own holds and changes between two steps: it counts, it is saved, and it goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler as schedules
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

from pool import ranks
from runs import lone_rank, open_tiny, pool_ranks, read_column, read_named
from shardway.errors import JobError, UserError
from shardway.train.run import LiveRun
from speed import picked

WORDS = (
    "run.device=cpu",
    "run.threads=1",
    "train.steps=8",
    "checkpoint.every=off",
    "checkpoint.background=false",
)


def points() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(64, 4, generator=generator)
    return TensorDataset(x, x.sum(1, keepdim=True))


def net() -> nn.Module:
    torch.manual_seed(5)
    return nn.Linear(4, 1)


Setup = Callable[[LiveRun], Iterator[None]]
"""A script: what it makes, and after each `yield` what it does after a step."""


def drive(folder: Path, make: Callable[[LiveRun], Callable[[int], Any]], *words: str, until: int = 8) -> list[Any]:
    """Run a script until it is done, or leave its loop after step `until`; what it has noted after each step."""
    notes = []
    with open_tiny(folder, lone_rank(), *words, base=WORDS) as run:
        step = make(run)
        for batch in run.steps(run.loader(points(), batch_size=8)):
            notes.append(step(batch))
            if run.step_number + 1 >= until:
                break
    return notes


def whole_and_stopped(
    folder: Path, make: Callable[[LiveRun], Callable[[Any], Any]], *words: str, stops: tuple[int, ...] = (4, 8)
) -> tuple[list[Any], list[Any]]:
    """The notes of a run, and those of the same run in several attempts."""
    whole = drive(folder / "whole", make, *words)
    stopped = [note for until in stops for note in drive(folder / "stopped", make, *words, until=until)]
    assert read_column(folder / "stopped") == read_column(folder / "whole")
    assert read_column(folder / "stopped", "lr") == read_column(folder / "whole", "lr")
    return whole, stopped


def scheduled(
    factory: Callable[..., Any], *, by_run: bool = False, metric: bool = False, every: int = 1, **options: Any
) -> Callable[[LiveRun], Callable[[Any], Any]]:
    """A script that steps a scheduler of torch."""

    def make(run: LiveRun) -> Callable[[Any], Any]:
        model = run.shard(net())
        optimizer = run.optimizer(torch.optim.SGD, model, lr=0.1, momentum=0.9)
        made = run.scheduler(factory, optimizer, **options) if by_run else factory(optimizer, **options)

        def step(batch: Any) -> Any:
            loss = run.step(model, batch, F.mse_loss)
            used = optimizer.param_groups[0]["lr"]
            if (run.step_number + 1) % every == 0:
                made.step(loss) if metric else made.step()
            return used

        return step

    return make


def chain(optimizer: torch.optim.Optimizer, total: int) -> schedules.SequentialLR:
    warm = schedules.LinearLR(optimizer, 0.1, total_iters=3)
    return schedules.SequentialLR(optimizer, [warm, schedules.CosineAnnealingLR(optimizer, total)], [3])


SCHEDULERS = {
    "step": lambda by: scheduled(schedules.StepLR, by_run=by, step_size=2, gamma=0.1),
    "lambda": lambda by: scheduled(schedules.LambdaLR, by_run=by, lr_lambda=lambda step: 1 / (1 + step)),
    "one cycle": lambda by: scheduled(schedules.OneCycleLR, by_run=by, max_lr=0.2, total_steps=9),
    "milestones": lambda by: scheduled(schedules.MultiStepLR, by_run=by, milestones=[2, 6]),
    "plateau": lambda by: scheduled(
        schedules.ReduceLROnPlateau, by_run=by, metric=True, patience=0, factor=0.5, threshold=0.5
    ),
    "cosine after warmup": lambda by: scheduled(chain, by_run=by, total=6),
    "by epoch": lambda by: scheduled(schedules.ExponentialLR, by_run=by, gamma=0.5, every=4),
    "cyclic": lambda by: scheduled(schedules.CyclicLR, by_run=by, base_lr=0.01, max_lr=0.1, step_size_up=3),
}


KINDS = [(kind, how) for kind in SCHEDULERS for how in ("by hand", "run.scheduler")]


@pytest.mark.parametrize("case", picked(KINDS, ("plateau", "by hand"), ("lambda", "run.scheduler")), ids="-".join)
def test_a_scheduler_of_the_script_counts_and_goes_on(
    tmp_path: Path, quiet_threads: None, case: tuple[str, str]
) -> None:
    kind, by_run = case[0], case[1] == "run.scheduler"
    whole, stopped = whole_and_stopped(tmp_path, SCHEDULERS[kind](by_run))
    assert whole == stopped
    assert read_column(tmp_path / "whole", "lr") == whole
    assert len(set(whole)) > 1


def test_schedulers_of_every_kind_go_on_beside_each_other(tmp_path: Path, quiet_threads: None) -> None:
    """Each with a model of its own, by hand and by the run in turns."""

    def make(run: LiveRun) -> Callable[[Any], Any]:
        beside = [Beside(run, f"m{number}") for number in range(len(SCHEDULERS))]
        pairs = enumerate(zip(SCHEDULERS.values(), beside, strict=True))
        steps = [script(bool(number % 2))(one) for number, (script, one) in pairs]  # type: ignore[arg-type]
        return lambda batch: [step(batch) for step in steps]

    whole, stopped = whole_and_stopped(tmp_path, make, stops=(3, 5, 8))
    assert whole == stopped
    assert all(len(set(rates)) > 1 for rates in zip(*whole, strict=True))


class Beside:
    """A run as one of several scripts has it: its model, optimizer and scheduler have a name."""

    def __init__(self, run: LiveRun, name: str) -> None:
        self.run, self.name = run, name

    @property
    def step_number(self) -> int:
        return self.run.step_number

    def shard(self, model: nn.Module) -> nn.Module:
        return self.run.shard(model, name=self.name)

    def optimizer(self, factory: Any, model: nn.Module, **options: Any) -> torch.optim.Optimizer:
        return self.run.optimizer(factory, model, name=self.name, **options)

    def scheduler(self, factory: Any, optimizer: torch.optim.Optimizer, **options: Any) -> Any:
        return self.run.scheduler(factory, optimizer, **options)

    def step(self, model: nn.Module, batch: Any, loss: Any) -> float:
        return self.run.step(model, batch, loss)


def test_a_learning_rate_that_a_script_sets_by_hand_counts(tmp_path: Path, quiet_threads: None) -> None:
    def make(run: LiveRun) -> Callable[[Any], Any]:
        model = run.shard(net())
        optimizer = run.optimizer(torch.optim.SGD, model, lr=0.1)

        def step(batch: Any) -> float:
            for group in optimizer.param_groups:
                group["lr"] = 0.1 * (1 - run.step_number / 8)
            run.step(model, batch, F.mse_loss)
            return optimizer.param_groups[0]["lr"]

        return step

    whole, stopped = whole_and_stopped(tmp_path, make)
    assert whole == stopped == [0.1 * (1 - k / 8) for k in range(8)]
    assert read_column(tmp_path / "whole", "lr") == whole


def settings_changed(change: Callable[[torch.optim.Optimizer, int], None]) -> Callable[[LiveRun], Callable[[Any], Any]]:
    """A script that changes settings of its optimizer after a step, once."""

    def make(run: LiveRun) -> Callable[[Any], Any]:
        model = run.shard(net())
        optimizer = run.optimizer(torch.optim.AdamW, model, lr=0.05)

        def step(batch: Any) -> Any:
            run.step(model, batch, F.mse_loss)
            change(optimizer, run.step_number + 1)
            return [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]

        return step

    return make


def decay(optimizer: torch.optim.Optimizer, step: int) -> None:
    if step == 2:
        optimizer.param_groups[0].update(weight_decay=0.3, betas=(0.5, 0.6), lr=0.01)


def shrink(optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.param_groups[0]["lr"] *= 0.7
    optimizer.param_groups[0]["my own"] = {"at": step, "best": float("inf")}


def both(optimizer: torch.optim.Optimizer, step: int) -> None:
    shrink(optimizer, step)
    if step == 2:
        optimizer.param_groups[0].update(weight_decay=0.3, betas=(0.5, 0.6))


@pytest.mark.parametrize("change", picked([decay, shrink, both], both))
def test_settings_that_a_script_changes_hold(
    tmp_path: Path, quiet_threads: None, change: Callable[[torch.optim.Optimizer, int], None]
) -> None:
    whole, stopped = whole_and_stopped(tmp_path, settings_changed(change))
    assert whole == stopped
    assert whole[0] != whole[-1]


def two_parts() -> nn.Module:
    torch.manual_seed(9)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))


def test_a_group_that_is_added_during_the_run_is_there_after_a_resume(tmp_path: Path, quiet_threads: None) -> None:
    """Gradual unfreezing: the body is frozen, and joins the optimizer after the second step."""

    def make(run: LiveRun) -> Callable[[Any], Any]:
        model = run.shard(two_parts())
        model[0].requires_grad_(False)
        optimizer = run.optimizer(
            lambda _, **options: torch.optim.Adam(model[1].parameters(), **options), model, lr=0.1
        )

        def step(batch: Any) -> Any:
            run.step(model, batch, F.mse_loss)
            if run.step_number + 1 == 2:
                model[0].requires_grad_(True)
                optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.02})
            return [len(group["params"]) for group in optimizer.param_groups], model[0].weight.sum().item()

        return step

    whole, stopped = whole_and_stopped(tmp_path, make)
    assert whole == stopped
    assert whole[0][0] == [2]
    assert whole[-1][0] == [2, 2]
    assert whole[-1][1] != whole[1][1]


def test_what_is_frozen_and_what_evaluates_holds(tmp_path: Path, quiet_threads: None) -> None:
    def make(run: LiveRun) -> Callable[[Any], Any]:
        torch.manual_seed(9)
        model = run.shard(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1)))
        run.optimizer(torch.optim.Adam, model, lr=0.1)

        def step(batch: Any) -> Any:
            run.step(model, batch, F.mse_loss)
            if run.step_number + 1 == 2:
                model[0].requires_grad_(False)
                model[1].eval()
                model[2].eval()
            if run.step_number + 1 == 6:
                model[0].requires_grad_(True)
            return model[0].weight.sum().item(), model[1].running_mean.tolist(), model[2].training

        return step

    whole, stopped = whole_and_stopped(tmp_path, make)
    assert whole == stopped
    assert whole[2][0] == whole[5][0] != whole[6][0]
    assert not whole[3][2]


class Shadow:
    """An average of weights as people write it by hand."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay, self.updates, self.history = decay, 0, [("begun", None)]
        self.shadow = {name: each.detach().clone() for name, each in model.named_parameters()}

    def update(self, model: nn.Module) -> None:
        self.updates += 1
        self.history.append(("updated", self.updates))
        for name, each in model.named_parameters():
            self.shadow[name].mul_(self.decay).add_(each.detach(), alpha=1 - self.decay)

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow, "updates": self.updates, "history": self.history, 3: (True, 1.5, float("nan"))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state[3][:2] == (True, 1.5)
        self.shadow, self.updates, self.history = state["shadow"], state["updates"], state["history"]


@pytest.mark.parametrize("kind", ["both kept", "found", "foreach"])
def test_an_average_of_the_weights_goes_on(tmp_path: Path, quiet_threads: None, kind: str) -> None:
    def make(run: LiveRun) -> Callable[[Any], Any]:
        model = run.shard(net())
        run.optimizer(torch.optim.SGD, model, lr=0.1)
        shadow = Shadow(model, 0.9)
        if kind == "foreach":
            ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        else:
            ema = AveragedModel(model, avg_fn=lambda old, new, _: 0.9 * old + 0.1 * new)
        if kind == "both kept":
            assert run.keep("ema", ema) is ema
            assert run.keep("shadow", shadow) is shadow

        def step(batch: Any) -> Any:
            run.step(model, batch, F.mse_loss)
            ema.update_parameters(model)
            note = ema.n_averaged.item(), ema.module.weight.tolist()
            if kind != "both kept":
                return note
            shadow.update(model)
            return *note, shadow.updates, shadow.history[:], shadow.shadow["weight"].tolist()

        return step

    whole, stopped = whole_and_stopped(tmp_path, make, stops=(3, 5, 8) if kind == "both kept" else (4, 8))
    assert whole == stopped
    assert whole[-1][0] == 8


# --- what cannot be told apart or stored is refused before it trains


def refused(folder: Path, make: Callable[[LiveRun], Callable[[Any], Any]], *words: str) -> str:
    with pytest.raises(UserError) as failure:
        drive(folder, make, *words)
    assert read_column(folder) == []
    return str(failure.value)


def test_two_schedulers_of_a_kind_are_refused_unless_they_have_names(tmp_path: Path, quiet_threads: None) -> None:
    def make(run: LiveRun) -> Callable[[Any], Any]:
        model = run.shard(net())
        optimizer = run.optimizer(torch.optim.SGD, model, lr=0.1)
        both = [schedules.StepLR(optimizer, 3), schedules.StepLR(optimizer, 2)]
        return lambda batch: (run.step(model, batch, F.mse_loss), [each.step() for each in both])

    assert refused(tmp_path / "two", make) == (
        "the script has made 2 schedulers of the class StepLR for one optimizer, and which is which after a resume "
        "is not known.\n"
        '  To do: make them with run.scheduler(StepLR, optimizer, ..., name="..."), so that each is saved and resumed '
        "under its name; or let go of those that are not used."
    )

    def named(run: LiveRun) -> Callable[[Any], Any]:
        model = run.shard(net())
        optimizer = run.optimizer(torch.optim.SGD, model, lr=0.1)
        both = [run.scheduler(schedules.StepLR, optimizer, name=f"s{k}", step_size=k) for k in (2, 3)]

        def step(batch: Any) -> float:
            run.step(model, batch, F.mse_loss)
            for each in both:
                each.step()
            return optimizer.param_groups[0]["lr"]

        return step

    whole, stopped = whole_and_stopped(tmp_path, named)
    assert whole == stopped


def test_two_averages_are_refused_unless_they_have_names(tmp_path: Path, quiet_threads: None) -> None:
    def make(run: LiveRun) -> Callable[[Any], Any]:
        model = run.shard(net())
        run.optimizer(torch.optim.SGD, model, lr=0.1)
        both = [AveragedModel(model), AveragedModel(model)]
        return lambda batch: (run.step(model, batch, F.mse_loss), [each.update_parameters(model) for each in both])

    assert refused(tmp_path, make) == (
        "the script averages model more than once (AveragedModel), and which average is which after a resume is "
        'not known.\n  To do: hand each to run.keep("a name", average).'
    )


class Holder:
    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


@pytest.mark.parametrize(
    ("thing", "told"),
    [
        (Holder({"a": [1, {"f": len}]}), "thing.state_dict() at a.1.f is a builtin_function_or_method, which"),
        (Holder(iter([])), "thing.state_dict() is a list_iterator, which"),
        (Holder({"t": torch.eye(2).to_sparse()}), "thing.state_dict() at t is a tensor of the layout torch.sparse_coo"),
        ({"count": 0}, "run.keep('thing', ...) was given a dict, which has no state_dict()"),
        (nn.Linear, "run.keep('thing', ...) was given the class Linear."),
    ],
    ids=["function", "iterator", "sparse", "no state", "class"],
)
def test_what_cannot_be_stored_is_refused_at_once(tmp_path: Path, quiet_threads: None, thing: Any, told: str) -> None:
    with pytest.raises(UserError) as failure, open_tiny(tmp_path, lone_rank(), base=WORDS) as run:
        run.keep("thing", thing)
    assert str(failure.value).startswith(told)
    assert "To do:" in str(failure.value)


@pytest.mark.parametrize("name", ["a.b", "", 3, "a b"])
def test_names_are_plain_and_unique(tmp_path: Path, quiet_threads: None, name: Any) -> None:
    with open_tiny(tmp_path, lone_rank(), base=WORDS) as run:
        run.keep("ema", Holder(1))
        with pytest.raises(UserError, match="letters, digits"):
            run.keep(name, Holder(1))
        with pytest.raises(UserError, match="twice"):
            run.keep("ema", Holder(2))


def test_a_schedule_of_the_run_file_and_one_of_the_script_are_refused(tmp_path: Path, quiet_threads: None) -> None:
    def make(run: LiveRun) -> Callable[[Any], Any]:
        model = run.shard(net())
        optimizer = run.optimizer(torch.optim.SGD, model, lr=0.1)

        def step(batch: Any) -> None:
            run.step(model, batch, F.mse_loss)
            optimizer.param_groups[0]["lr"] = 0.5

        return step

    with pytest.raises(UserError) as failure:
        drive(tmp_path, make, "optim.schedule=linear", "optim.warmup=0 steps")
    assert str(failure.value) == (
        "the script has set lr to 0.5, and optim.schedule = 'linear' (command line) sets it at each step (to 0.1 "
        "the last time).\n  To do: leave one of the two out: the schedule of the script, or optim.schedule."
    )


# --- what the person changes between two attempts


def told_changes(folder: Path) -> dict[str, Any]:
    return read_named(folder, "started")[-1]["changed"]


def test_another_argument_holds_and_is_told(
    tmp_path: Path, quiet_threads: None, capfd: pytest.CaptureFixture[str]
) -> None:
    def make(lr: float, gamma: float) -> Callable[[LiveRun], Callable[[Any], Any]]:
        def script(run: LiveRun) -> Callable[[Any], Any]:
            model = run.shard(net())
            optimizer = run.optimizer(torch.optim.SGD, model, lr=lr, weight_decay=0.1)
            made = run.scheduler(schedules.StepLR, optimizer, step_size=2, gamma=gamma)

            def step(batch: Any) -> float:
                run.step(model, batch, F.mse_loss)
                used = optimizer.param_groups[0]["lr"]
                made.step()
                return used

            return step

        return script

    first = drive(tmp_path, make(0.1, 0.5), until=3)
    assert first == [0.1, 0.1, 0.05]
    second = drive(tmp_path, make(0.4, 0.5), until=5)
    assert second == pytest.approx([0.2, 0.1])
    assert told_changes(tmp_path) == {"optimizer.lr": [0.1, 0.4]}
    third = drive(tmp_path, make(0.4, 0.1))
    assert third == pytest.approx([0.1, 0.01, 0.01])
    assert told_changes(tmp_path) == {"optimizer-StepLR.gamma": [0.5, 0.1]}
    assert "optimizer-StepLR.gamma was 0.5 when step-000000005 was saved and is 0.1 now" in capfd.readouterr().err


def test_what_the_script_no_longer_keeps_is_told_and_no_error(
    tmp_path: Path, quiet_threads: None, capfd: pytest.CaptureFixture[str]
) -> None:
    def make(*names: str) -> Callable[[LiveRun], Callable[[Any], Any]]:
        def script(run: LiveRun) -> Callable[[Any], Any]:
            model = run.shard(net())
            run.optimizer(torch.optim.SGD, model, lr=0.1)
            for name in names:
                run.keep(name, Holder([torch.ones(2), name]))
            return lambda batch: run.step(model, batch, F.mse_loss)

        return script

    drive(tmp_path, make("a", "b"), until=2)
    drive(tmp_path, make("b", "c"), until=4)
    assert [line for line in capfd.readouterr().err.splitlines() if "state of" in line] == [
        "step-000000002 holds the state of a, which the script has not made: it waits to be made.",
        "step-000000002 holds no state of c: it begins as the script has made it.",
    ]


def test_an_object_that_is_kept_later_takes_what_waits_for_it(tmp_path: Path, quiet_threads: None) -> None:
    """Stochastic weight averaging begins late: what the script makes within its loop is found and goes on as well."""

    def make(run: LiveRun) -> Callable[[Any], Any]:
        model = run.shard(net())
        run.optimizer(torch.optim.SGD, model, lr=0.1)
        made: list[AveragedModel] = []

        def step(batch: Any) -> Any:
            run.step(model, batch, F.mse_loss)
            if run.step_number + 1 >= 2:
                if not made:
                    made.append(run.keep("swa", AveragedModel(model)))
                made[0].update_parameters(model)
            return made[0].n_averaged.item() if made else 0

        return step

    whole, stopped = whole_and_stopped(tmp_path, make)
    assert whole == stopped == list(range(8))


# --- the end that a script chooses


@pytest.mark.parametrize("when", ["before", "after", "instead"])
def test_a_run_that_the_script_has_stopped_is_finished(tmp_path: Path, quiet_threads: None, when: str) -> None:
    def attempt() -> list[int]:
        with open_tiny(tmp_path, lone_rank(), base=WORDS) as run:
            model = run.shard(net())
            run.optimizer(torch.optim.SGD, model, lr=0.1)
            steps = []
            for batch in run.steps(run.loader(points(), batch_size=8)):
                steps.append(run.step_number + 1)
                if when == "before" and steps[-1] == 3:
                    run.stop("no gain for 2 steps")
                if when == "instead" and steps[-1] == 4:
                    run.stop("no gain for 2 steps")
                    continue
                run.step(model, batch, F.mse_loss)
                if when == "after" and steps[-1] == 3:
                    run.stop("no gain for 2 steps")
            return steps

    attempt()
    assert read_column(tmp_path, "step") == [1, 2, 3]
    assert attempt() == []
    ends = read_named(tmp_path, "finished")
    assert [(each["step"], each["reason"]) for each in ends] == [(3, "no gain for 2 steps")], (
        "the second start writes nothing"
    )


def test_a_run_that_is_stopped_after_its_save_is_finished_too(tmp_path: Path, quiet_threads: None) -> None:
    def attempt() -> list[int]:
        with open_tiny(tmp_path, lone_rank(), "checkpoint.every=3 steps", base=WORDS) as run:
            model = run.shard(net())
            run.optimizer(torch.optim.SGD, model, lr=0.1)
            steps = []
            for batch in run.steps(run.loader(points(), batch_size=8)):
                steps.append(run.step_number + 1)
                if steps[-1] == 4:
                    run.stop("enough")
                    continue
                run.step(model, batch, F.mse_loss)
            return steps

    assert attempt() == [1, 2, 3, 4]
    assert attempt() == attempt() == []
    assert read_column(tmp_path, "step") == [1, 2, 3]


def test_a_scheduler_beside_a_schedule_of_the_run_file_is_refused(tmp_path: Path, quiet_threads: None) -> None:
    words = ("optim.schedule=linear", "optim.warmup=0 steps")
    assert refused(tmp_path, SCHEDULERS["step"](False), *words) == (
        "optim.schedule = 'linear' (command line) sets the learning rate at each step, and the script has made a "
        "scheduler for it (optimizer-StepLR).\n"
        "  To do: leave one of the two out: the scheduler of the script, or optim.schedule."
    )


def test_what_was_not_made_again_yet_is_saved_on(tmp_path: Path, quiet_threads: None) -> None:
    """A run that is saved between a resume and the moment at which its script makes an object again loses nothing."""

    def make(at: int) -> Callable[[LiveRun], Callable[[Any], Any]]:
        def script(run: LiveRun) -> Callable[[Any], Any]:
            model = run.shard(net())
            run.optimizer(torch.optim.SGD, model, lr=0.1)
            made: list[Holder] = []

            def step(batch: Any) -> Any:
                run.step(model, batch, F.mse_loss)
                if run.step_number + 1 == at:
                    made.append(run.keep("late", Holder({"sum": torch.zeros(2), "at": -1})))
                for each in made:
                    each.state = {"sum": each.state["sum"] + 1, "at": run.step_number + 1}
                return made[0].state["sum"].tolist() if made else None

            return step

        return script

    assert drive(tmp_path, make(1), until=2) == [[1.0, 1.0], [2.0, 2.0]]
    assert drive(tmp_path, make(8), until=4) == [None, None]
    assert drive(tmp_path, make(5), until=6) == [[3.0, 3.0], [4.0, 4.0]]


def test_the_number_of_a_step_is_known_in_the_loop_alone(tmp_path: Path, quiet_threads: None) -> None:
    with open_tiny(tmp_path, lone_rank(), base=WORDS) as run, pytest.raises(UserError, match="before the first batch"):
        assert run.step_number


# --- optimizers that evaluate the loss themselves


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_lbfgs_trains_as_in_torch_and_goes_on(tmp_path: Path, quiet_threads: None, search: str | None) -> None:
    options: dict[str, Any] = {"lr": 0.5, "max_iter": 4, "history_size": 3, "line_search_fn": search}

    def make(run: LiveRun) -> Callable[[Any], Any]:
        model = run.shard(two_parts())
        run.optimizer(torch.optim.LBFGS, model, **options)

        def step(batch: Any) -> Any:
            return run.step(model, batch, lambda out, y: F.mse_loss(torch.tanh(out), y)), model[0].weight.tolist()

        return step

    words = ("data.record_ids=true",)
    whole, stopped = whole_and_stopped(tmp_path, make, *words)
    assert whole == stopped
    model = two_parts()
    optimizer = torch.optim.LBFGS(model.parameters(), **options)
    for ids, (loss, weights) in zip(read_column(tmp_path / "whole", "ids"), whole, strict=True):
        x, y = points()[ids]

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            value = F.mse_loss(torch.tanh(model(x)), y)  # noqa: B023
            value.backward()
            return value

        assert loss == pytest.approx(optimizer.step(closure).item(), rel=1e-6)
        assert torch.allclose(model[0].weight, torch.tensor(weights), rtol=1e-4, atol=1e-6)


def test_another_optimizer_than_the_saved_one_is_told(tmp_path: Path, quiet_threads: None) -> None:
    def make(factory: Any) -> Callable[[LiveRun], Callable[[Any], Any]]:
        def script(run: LiveRun) -> Callable[[Any], Any]:
            model = run.shard(net())
            run.optimizer(factory, model, lr=0.1)
            return lambda batch: run.step(model, batch, F.mse_loss)

        return script

    drive(tmp_path / "a", make(torch.optim.LBFGS), until=2)
    with pytest.raises(UserError, match="holds the state of LBFGS as optimizer, and today it is Adam"):
        drive(tmp_path / "a", make(torch.optim.Adam))
    drive(tmp_path / "b", make(torch.optim.Adam), until=2)
    with pytest.raises(UserError, match="holds the state of another optimizer as optimizer, and today it is LBFGS"):
        drive(tmp_path / "b", make(torch.optim.LBFGS))


def test_an_average_of_another_run_of_the_process_is_left_alone(tmp_path: Path, quiet_threads: None) -> None:
    """As in a notebook whose cell is run again: what the first run has left is none of the second."""
    left: list[AveragedModel] = []

    def make(run: LiveRun) -> Callable[[Any], Any]:
        model = run.shard(net())
        run.optimizer(torch.optim.SGD, model, lr=0.1)
        left.append(AveragedModel(model))
        mine = left[-1]
        return lambda batch: (run.step(model, batch, F.mse_loss), mine.update_parameters(model), mine.n_averaged.item())

    for name in ("first", "second"):
        assert [note[-1] for note in drive(tmp_path / name, make, until=2)] == [1, 2]
    assert [note[-1] for note in drive(tmp_path / "second", make, until=4)] == [3, 4]


def test_an_object_that_can_no_longer_be_stored_costs_no_save(
    tmp_path: Path, quiet_threads: None, capfd: pytest.CaptureFixture[str]
) -> None:
    def make(run: LiveRun) -> Callable[[Any], Any]:
        model = run.shard(net())
        run.optimizer(torch.optim.SGD, model, lr=0.1)
        thing, fine = run.keep("thing", Holder(0)), run.keep("fine", Holder(0))

        def step(batch: Any) -> Any:
            run.step(model, batch, F.mse_loss)
            thing.state, fine.state = print, fine.state + 1
            return fine.state

        return step

    assert drive(tmp_path, make, until=2) == [1, 2]
    assert "thing is not in this checkpoint: thing.state_dict() is a builtin_function" in capfd.readouterr().err
    assert drive(tmp_path, make, until=4) == [3, 4]


SHARDS = ("parallel.dp_shard=2", "parallel.dp_replicate=1")


@ranks(2)
@pytest.mark.parametrize("words", picked([(), SHARDS], SHARDS))
def test_a_second_loop_goes_on_where_the_first_was_left(rank: int, words: tuple[str, ...], tmp_path: Path) -> None:
    """With the same bits, though nothing is saved by itself; and a third has nothing left to do."""
    losses: dict[str, list[float]] = {"whole": [], "left": []}
    for name, leaves_at in (("whole", 99), ("left", 3)):
        with open_tiny(tmp_path / name, pool_ranks(), *words, base=WORDS) as run:
            model = run.shard(net())
            run.optimizer(torch.optim.AdamW, model, lr=0.1)
            for _ in range(3):
                for batch in run.steps(run.loader(points(), batch_size=8)):
                    losses[name].append(run.step(model, batch, F.mse_loss))
                    if len(losses[name]) == leaves_at:
                        break
    assert losses["left"] == losses["whole"]
    assert len(losses["whole"]) == 8


def test_a_finished_loop_is_saved_although_more_was_made_since(tmp_path: Path, quiet_threads: None) -> None:
    """Nothing was saved by itself; what was made after the loop is no reason to lose what it has learnt."""
    with open_tiny(tmp_path, lone_rank(), base=WORDS) as run:
        model = run.shard(net())
        run.optimizer(torch.optim.SGD, model, lr=0.1)
        for batch in run.steps(run.loader(points(), batch_size=8)):
            run.step(model, batch, F.mse_loss)
        assert run.directory.checkpoint_steps() == []
        run.optimizer(torch.optim.SGD, model, lr=0.1, name="second")
        assert list(run.steps(run.loader(points(), batch_size=8))) == []
        assert run.directory.checkpoint_steps() == [8]


def test_a_finished_loop_is_saved_before_a_further_model_is_missed(tmp_path: Path, quiet_threads: None) -> None:
    with open_tiny(tmp_path, lone_rank(), base=WORDS) as run:
        model = run.shard(net())
        run.optimizer(torch.optim.SGD, model, lr=0.1)
        for batch in run.steps(run.loader(points(), batch_size=8)):
            run.step(model, batch, F.mse_loss)
        run.optimizer(torch.optim.SGD, run.shard(net(), name="second"), lr=0.1, name="second")
        with pytest.raises(JobError, match=r"does not fit this model or optimizer: Missing key .*model-second"):
            list(run.steps(run.loader(points(), batch_size=8)))
        assert run.directory.checkpoint_steps() == [8]
