"""Runs that go back before a spike: what they come to, what they leave out, and that no death in between matters."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
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
    read_steps,
    signal_at,
    tell_steps,
)
from shardway.cli.status import status
from shardway.errors import JobError
from shardway.rundir.directory import RunDir
from shardway.runfile.load import load_run
from shardway.runfile.schema import GuardSection
from shardway.train.run import LiveRun
from trained import assert_same_bits, whole_state

BATCH, SAMPLES, STEPS = 4, 400, 40
BASE = (
    *("run.device=cpu", "run.threads=1", "data.record_ids=true", f"train.global_batch={BATCH}"),
    *(f"train.steps={STEPS}", "checkpoint.background=false", "checkpoint.every=6 steps"),
)
BACK = ("guard.spike=20.0", "guard.on_spike=roll_back", "guard.spike_steps=2")
POISONED = range(128, 136)
"""Positions of the samples whose targets are far off: those of steps 33 and 34."""


def order_of_seed_0() -> list[int]:
    from shardway.data.order import SampleOrder

    return SampleOrder(SAMPLES, 0).ids(torch.arange(2 * SAMPLES).numpy()).tolist()


def make_data(poisoned: Any = POISONED) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(SAMPLES, 2, generator=generator)
    targets = inputs.sum(1, keepdim=True) + torch.randn(SAMPLES, 1, generator=generator)
    order = order_of_seed_0()
    targets[[order[position] for position in poisoned]] = 1e4
    return TensorDataset(inputs, targets)


def mean_square(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs - targets).square().mean()


class Net(nn.Module):
    """What draws random numbers and keeps running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def train(
    folder: Path,
    *words: str,
    poisoned: Any = POISONED,
    before_step: Callable[[LiveRun, int], None] | None = None,
    alone: bool = False,
    kind: Callable[[], nn.Module] = Net,
    validates: Callable[[LiveRun], float] | None = None,
) -> dict[str, torch.Tensor]:
    """A script's own loop; the state at its end."""
    on = lone_rank() if alone or not torch.distributed.is_initialized() else pool_ranks()
    with open_tiny(folder, on, *words, base=BASE) as run:
        if before_step is not None:
            tell_steps(run, before_step)
        torch.manual_seed(4)
        net = run.shard(kind())
        optimizer = run.optimizer(torch.optim.AdamW, net, lr=1e-3)
        validation = None
        if validates is not None:
            validation = run.validation(make_data(()), lambda output, targets: output.sum() * 0 + validates(run))
        for batch in run.steps(run.loader(make_data(poisoned)), validation=validation):
            run.step(net, batch, mean_square)
        return whole_state(net, optimizer)


Told = Callable[..., tuple[Path, dict[str, torch.Tensor]]]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    """`told(start, end)`: the run that never saw these positions, and its state at its end; when it saved is nothing to
    it."""
    known: dict[tuple[int, int], tuple[Path, dict[str, torch.Tensor]]] = {}

    def get(start: int, end: int) -> tuple[Path, dict[str, torch.Tensor]]:
        if (start, end) not in known:
            folder = tmp_path_factory.mktemp("told") / "run"
            # All of the samples that are far off lie in the span, up to its end.
            state = train(folder, f"data.skip=[[{start}, {end}]]", "checkpoint.every=off", poisoned=range(128, end))
            known[start, end] = folder, state
        return known[start, end]

    return get


def assert_is_told(folder: Path, found: dict[str, torch.Tensor], told: tuple[Path, dict[str, torch.Tensor]]) -> None:
    """A run has come to what the run that never saw the span has come to."""
    assert_same_bits(found, told[1])
    assert_same_run(folder, told[0])


def spans(folder: Path) -> list[list[int]]:
    return [each.span for each in RunDir(folder).left_out.read()]


def assert_same_run(found: Path, expected: Path) -> None:
    for name in ("step", "loss", "grad_norm", "lr"):
        assert read_column(found, name) == read_column(expected, name)


def used(folder: Path, world: int) -> list[int]:
    """The samples of all steps that hold, over all ranks."""
    return [sample for rank in range(world) for event in read_steps(folder, rank) for sample in event["ids"]]


@ranks(2)
def test_a_run_that_goes_back_is_the_run_that_never_saw_the_span(rank: int, tmp_path: Path) -> None:
    """The checkpoint of step 30 begins at position 120. Each sample but those of the span is used exactly once."""
    found = train(tmp_path / "back", *layout(2, 1), *BACK)
    expected = train(tmp_path / "told", *layout(2, 1), "data.skip=[[120, 136]]")
    assert_same_bits(found, expected)
    pool_ranks().barrier()
    assert_same_run(tmp_path / "back", tmp_path / "told")
    assert spans(tmp_path / "back") == [[120, 136]]
    assert spans(tmp_path / "told") == []
    order = order_of_seed_0()
    kept = [order[position] for position in range(STEPS * BATCH + 16) if not 120 <= position < 136]
    assert sorted(used(tmp_path / "back", 2)) == sorted(kept)
    (told,) = read_named(tmp_path / "back", "rolled_back")
    facts = ("step", "first", "last", "start", "end", "samples", "roll_backs")
    assert [told[name] for name in facts] == [30, 33, 34, 120, 136, 16, 1]
    (skipped,) = read_named(tmp_path / "back", "data_skipped")
    assert skipped["reason"] == "guard.on_spike left out 16 samples between positions 120 and 140"


@pytest.mark.parametrize("background", [True, False])
def test_what_was_saved_in_the_spike_is_set_aside(
    tmp_path: Path, quiet_threads: None, told: Told, background: bool
) -> None:
    """Step 33 is saved while nobody knows yet that it begins a spike, and no older one is removed for it."""
    words = ("checkpoint.every=3 steps", "checkpoint.keep=1", f"checkpoint.background={str(background).lower()}")
    found = train(tmp_path / "back", *words, *BACK, before_step=wait_until_step_33_is_saved)
    assert_is_told(tmp_path / "back", found, told(120, 136))
    run = RunDir(tmp_path / "back")
    (aside,) = read_named(run.path, "checkpoint_quarantined")
    assert (aside["name"], aside["kept_as"]) == ("step-000000033", "undone-step-000000033")
    assert aside["reason"] == "the run went back before it after a spike in steps 33 to 34"
    assert (run.checkpoints / "undone-step-000000033" / "manifest.json").exists()
    assert run.checkpoint_steps() == [40]
    manifest = json.loads((run.checkpoint_path(40) / "manifest.json").read_text())
    assert manifest["numbers"]["left_out"] == [each.as_json() for each in run.left_out.read()]


def test_what_was_validated_in_the_spike_is_no_best_one(tmp_path: Path, quiet_threads: None) -> None:
    """The validation of step 33 is the best of all, until the run goes back before it; the second one of it is not."""
    seen: list[int] = []

    def find(run: LiveRun) -> float:
        seen.append(run.step_number)
        is_spike = run.step_number == 33 and seen.count(33) == 1
        return 1.0 if is_spike else 50.0 - run.step_number + 9 * (run.step_number > 30)

    words = (
        "train.validate_every=3 steps",
        "train.validation_samples=1",
        "checkpoint.keep=1",
        "checkpoint.keep_best=2",
    )
    train(tmp_path, *words, *BACK, "checkpoint.every=6 steps", validates=find)
    assert seen.count(33) == 2
    results = {event["step"]: event["loss"] for event in RunDir(tmp_path).events() if event["event"] == "validation"}
    best = sorted(results, key=lambda step: (results[step], step))[:2]
    assert best == [40, 30]  # 39 is as good as 30, and later
    assert RunDir(tmp_path).checkpoint_steps() == [30, 40]
    assert [event["name"] for event in read_named(tmp_path, "checkpoint_quarantined")] == ["step-000000033"]


def wait_until_step_33_is_saved(run: LiveRun, step: int) -> None:
    """Which steps are saved must not depend on how soon one is written; that of step 33 is under way in step 34."""
    if step != 34:
        run._loop._checkpoints.settle()  # type: ignore[union-attr]


def test_a_run_goes_back_as_often_as_it_may_and_then_ends(tmp_path: Path, quiet_threads: None, told: Told) -> None:
    """Four bad steps: two are left out, and the other two come next."""
    words = (*BACK, "checkpoint.every=5 steps")
    with pytest.raises(JobError) as failure:
        train(tmp_path / "back", *words, "guard.max_roll_backs=1", poisoned=range(128, 144))
    assert str(failure.value).splitlines() == [
        "steps 31 to 32 are a spike (guard.spike), and the run has gone back once already; it ends here "
        "(guard.max_roll_backs = 1, command line).",
        f"  It has left out the positions [120, 136] ({tmp_path / 'back' / 'left_out.json'}). To do: look at the "
        "samples of these steps, lower optim.lr, or set optim.clip; then run the same command again, with a higher "
        'guard.max_roll_backs or guard.on_spike = "warn".',
    ]
    assert RunDir(tmp_path / "back").checkpoint_steps()[-1] == 30
    found = train(tmp_path / "back", *words, poisoned=range(128, 144))
    assert spans(tmp_path / "back") == [[120, 136], [120, 144]]
    assert_is_told(tmp_path / "back", found, told(120, 144))


CHOICES = {
    "a margin passes newer checkpoints over": (("guard.spike_margin=5",), [96, 136]),
    "a margin that nothing is older than takes the oldest": (("guard.spike_margin=90", "checkpoint.keep=2"), [96, 136]),
    "what lies far before the spike is trained on again": (("guard.max_left_out=3",), [124, 136]),
    "what data.skip leaves out is no batch": (("guard.max_left_out=3", "data.skip=[[126, 130]]"), [124, 140]),
    "one step suffices": (("guard.spike_steps=1", "guard.max_roll_backs=9"), [120, 132]),
}


@pytest.mark.parametrize("name", CHOICES)
def test_which_span_is_left_out(tmp_path: Path, name: str, quiet_threads: None) -> None:
    words, expected = CHOICES[name]
    end = max(136, expected[1])
    train(tmp_path, *BACK, *words, "train.steps=36", poisoned=range(end - 8, end))
    assert spans(tmp_path)[0] == expected


def test_a_run_without_a_checkpoint_from_before_says_so(tmp_path: Path, quiet_threads: None) -> None:
    with pytest.raises(JobError, match="there is no checkpoint from before it that the run could go back to"):
        train(tmp_path, *BACK, "checkpoint.every=50 steps")
    assert not RunDir(tmp_path).left_out.path.exists()


# --- ends in between


def test_a_stop_at_the_moment_of_going_back_saves_nothing_of_the_spike(
    tmp_path: Path, quiet_threads: None, told: Told
) -> None:
    words = (*BACK, "checkpoint.every=3 steps")
    train(tmp_path / "back", *words, before_step=signal_at(34))
    run = RunDir(tmp_path / "back")
    assert (run.read_status()["state"], run.read_status()["step"]) == ("stopped", 30)
    assert run.checkpoint_steps()[-1] == 30
    (aside,) = read_named(run.path, "checkpoint_quarantined")
    assert (aside["step"], aside["kept_as"]) == (30, "undone-step-000000033")
    found = train(tmp_path / "back", *words)
    assert_is_told(tmp_path / "back", found, told(120, 136))
    assert len(read_named(tmp_path / "back", "rolled_back")) == 1


def test_a_checkpoint_that_turns_out_to_be_damaged_is_passed_over(
    tmp_path: Path, quiet_threads: None, told: Told
) -> None:
    """The span is that of the decision; the steps between the older checkpoint and it are taken again."""

    def damage(run: LiveRun, step: int) -> None:
        file = run.directory.checkpoint_path(30) / "rank-00000.bin"
        if step == 34 and file.exists():
            file.write_bytes(file.read_bytes()[:-1] + b"x")

    found = train(tmp_path / "back", *BACK, before_step=damage)
    (event,) = read_named(tmp_path / "back", "rolled_back")
    assert (event["step"], event["back_to"]) == (24, 30)
    events = read_named(tmp_path / "back", "checkpoint_quarantined")
    assert [event["kept_as"] for event in events] == ["damaged-step-000000030"]
    assert_is_told(tmp_path / "back", found, told(120, 136))


def test_a_run_that_goes_on_within_a_spike_still_finds_it(tmp_path: Path, quiet_threads: None, told: Told) -> None:
    """The window and the steps in a row stand in the checkpoint of step 33, the first of the spike."""
    words = (*BACK, "checkpoint.every=3 steps")
    with pytest.raises(Died):
        train(tmp_path / "back", *words, before_step=die_at(33))
    assert RunDir(tmp_path / "back").checkpoint_steps()[-1] == 33
    found = train(tmp_path / "back", *words)
    assert spans(tmp_path / "back") == [[120, 136]]
    assert_is_told(tmp_path / "back", found, told(120, 136))


DEATHS = {
    "before anything is set aside": "shardway.train.restore.quarantine_undone",
    "before it loads": "shardway.train.restore.load_latest",
    "before it reads data": "shardway.train.loop.Loop._open_stream",
}


FURTHER = [pytest.mark.exhaustive]


@pytest.mark.parametrize(
    "place", [pytest.param(place, marks=FURTHER if place != "before anything is set aside" else ()) for place in DEATHS]
)
@ranks(2)
def test_a_death_in_between_changes_nothing(rank: int, tmp_path: Path, place: str) -> None:
    """The second attempt runs on other ranks, and so does that of the run that never saw the span."""
    both = (*layout(2, 1), "checkpoint.every=3 steps")
    with pytest.raises(Died), pytest.MonkeyPatch.context() as patch:
        train(
            tmp_path / "back", *both, *BACK, before_step=lambda run, step: die_in(patch, place) if step == 34 else None
        )
    train(tmp_path / "told", *both, "data.skip=[[120, 136]]", "train.steps=30")
    pool_ranks().barrier()
    assert spans(tmp_path / "back") == [[120, 136]]
    if rank == 0:
        alone = ("checkpoint.every=3 steps",)
        found = train(tmp_path / "back", *alone, *BACK, alone=True)
        assert_same_bits(found, train(tmp_path / "told", *alone, "data.skip=[[120, 136]]", alone=True))
        assert_same_run(tmp_path / "back", tmp_path / "told")
        assert (RunDir(tmp_path / "back").checkpoints / "undone-step-000000033").exists()
    pool_ranks().barrier()


def die_in(patch: pytest.MonkeyPatch, place: str) -> None:
    def die(*_: Any, **__: Any) -> None:
        raise Died

    patch.setattr(DEATHS[place], die)


def test_a_list_that_was_lost_is_read_from_a_checkpoint(tmp_path: Path, quiet_threads: None, told: Told) -> None:
    """With a bound of two batches, that of step 31 lies before the span that is left out."""
    words = (*BACK, "guard.max_left_out=2", "checkpoint.every=1 steps", "checkpoint.keep=9")
    with pytest.raises(Died):
        train(tmp_path / "back", *words, "guard.spike_margin=4", before_step=Second(31))
    run = RunDir(tmp_path / "back")
    before = run.left_out.read()
    assert run.checkpoint_steps()[-1] == 30
    run.left_out.path.unlink()
    found = train(tmp_path / "back", *words)
    assert run.left_out.read() == before
    assert_same_bits(found, told(128, 136)[1])


@pytest.mark.parametrize("dies", [False, True])
def test_what_nodes_saved_in_the_spike_is_not_taken(
    tmp_path: Path, quiet_threads: None, told: Told, dies: bool
) -> None:
    """Neither by the process that goes back, nor by the next one where it dies once that was decided."""
    local = ("checkpoint.local_every=1 steps", f"checkpoint.local_dir={tmp_path}", "checkpoint.every=6 steps")
    if dies:
        with pytest.raises(Died), pytest.MonkeyPatch.context() as patch:

            def look(run: LiveRun, step: int) -> None:
                if step == 34:
                    die_in(patch, "before anything is set aside")

            train(tmp_path / "back", *local, *BACK, before_step=look)
    found = train(tmp_path / "back", *local, *BACK)
    assert_is_told(tmp_path / "back", found, told(120, 136))
    names = [event["name"] for event in read_named(tmp_path / "back", "checkpoint_quarantined")]
    assert names == ["step-000000033", "step-000000032"]


class Second:
    """For `before_step`: end the run before a step that comes for the second time."""

    def __init__(self, step: int) -> None:
        self.step, self.times = step, 0

    def __call__(self, run: LiveRun, step: int) -> None:
        self.times += step == self.step
        if self.times == 2:
            raise Died


@ranks(2)
def test_a_way_back_to_what_other_ranks_saved_is_that_of_a_new_process(rank: int, tmp_path: Path) -> None:
    """One rank has no random state of two ranks' checkpoint: its generators begin as they did before it was loaded."""
    with pytest.raises(Died):
        train(tmp_path / "back", *layout(2, 1), *BACK, before_step=die_at(32))
    train(tmp_path / "told", *layout(2, 1), "data.skip=[[120, 136]]", "train.steps=30")
    pool_ranks().barrier()
    if rank == 0:
        drawn, expected = Draws(), Draws()
        found = train(tmp_path / "back", *BACK, alone=True, before_step=drawn)
        assert_same_bits(found, train(tmp_path / "told", "data.skip=[[120, 136]]", alone=True, before_step=expected))
        assert drawn == expected
        assert_same_run(tmp_path / "back", tmp_path / "told")
        (told,) = read_named(tmp_path / "back", "rolled_back")
        assert told["step"] == 30
    pool_ranks().barrier()


class Draws(dict[int, float]):
    """For `before_step`: what a script draws at random between two steps, by the step; the last time counts."""

    def __call__(self, run: LiveRun, step: int) -> None:
        self[step] = torch.rand(()).item() + np.random.rand() + random.random()


class Late(Net):
    """A part of it is used only where that is said."""

    def __init__(self) -> None:
        super().__init__()
        self.late, self.is_late = nn.Linear(2, 1), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + (self.late(x) if self.is_late else 0.0)


def test_a_parameter_that_was_first_used_in_the_span_has_no_state_again(tmp_path: Path, quiet_threads: None) -> None:
    def look(run: LiveRun, step: int) -> None:
        opened, net = run._loop._open_step, run._held.models[0].parallel.module  # type: ignore[union-attr]
        assert isinstance(net, Late)
        net.is_late = opened is not None and opened.batch.position in range(120, 136)

    found = train(tmp_path / "back", *BACK, before_step=look, kind=Late)
    assert spans(tmp_path / "back") == [[120, 136]]
    assert_same_bits(found, train(tmp_path / "told", "data.skip=[[120, 136]]", before_step=look, kind=Late))
    assert "late.weight exp_avg" not in found
    assert "layers.0.weight exp_avg" in found


def test_a_run_that_only_tells_is_what_it_was(tmp_path: Path, quiet_threads: None) -> None:
    train(tmp_path / "tells", "guard.spike=20.0")
    train(tmp_path / "plain")
    assert_same_run(tmp_path / "tells", tmp_path / "plain")
    assert [event["step"] for event in read_named(tmp_path / "tells", "spike")] == [33, 33, 34, 34]
    run = RunDir(tmp_path / "tells")
    assert not run.left_out.path.exists()
    manifest = json.loads((run.checkpoint_path(40) / "manifest.json").read_text())
    assert sorted(manifest["numbers"]) == ["data", "guard", "position", "samples", "step", "targets"]


def test_the_page_shows_what_a_run_file_takes_and_what_status_says(
    tmp_path: Path, quiet_threads: None, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parents[2] / "docs/guard.md").read_text(encoding="utf-8")
    shown = page[page.index("## Back before a spike") :]
    block = re.search(r"```toml\n(.*?)```", shown, re.DOTALL)
    assert block is not None
    (tmp_path / "run.toml").write_text(block[1])
    values = load_run(tmp_path / "run.toml").values.guard
    defaults = GuardSection(spike=8.0, on_spike="roll_back")
    assert values == defaults
    train(tmp_path / "run", *BACK, "train.steps=36")
    status([str(tmp_path / "run")])
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "left out" in line]
    assert line in shown.splitlines()
