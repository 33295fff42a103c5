"""The guard: what a fault in the passes of a step costs, and what a run says that it cannot go on from."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from pool import ranks
from runs import (
    layout,
    lone_rank,
    open_tiny,
    pool_ranks,
    read_column,
    read_named,
    read_steps,
    tell_steps,
    train_tiny,
)
from shardway.errors import JobError, UserError
from shardway.rundir.directory import RunDir
from shardway.train.guard import Spikes, read_spikes
from shardway.train.run import LiveRun
from speed import picked
from trained import assert_same_bits, whole_state

SCRIPT = ("run.device=cpu", "run.threads=1", "checkpoint.every=off")
SHORT = ("train.steps=6", "optim.warmup=0 steps", "model.dropout=0.2", "train.micro_batch=2")

Harm = Callable[[torch.Tensor], torch.Tensor]


def to_nan(values: torch.Tensor) -> torch.Tensor:
    return values * math.nan


def flip_bit(values: torch.Tensor) -> torch.Tensor:
    """The same numbers but for one bit in the exponent of the last."""
    harmed = values.detach().clone().contiguous()
    harmed.view(torch.int32).flatten()[-1] ^= 1 << 26
    return values + (harmed - values.detach())


def harm_once(module: nn.Module, how: Harm, *, backward: bool) -> None:
    """The next output of a module, or the gradient that comes back to it, is not what it should be."""

    def harm(_: nn.Module, __: Any, output: torch.Tensor) -> torch.Tensor:
        handle.remove()
        if backward:
            output.register_hook(how)
            return output
        return how(output)

    handle = module.register_forward_hook(harm)


def first_model(run: LiveRun) -> nn.Module:
    """The first model that the run trains."""
    return run._held.models[0].parallel.module


def fault_at(step: int, how: Harm = to_nan, *, rank: int = 1, backward: bool = True) -> Callable[[LiveRun, int], None]:
    """For `before_step`: one rank computes something wrong, once, in a step."""

    def look(run: LiveRun, coming: int) -> None:
        if coming == step and run.session.ranks.rank == rank:
            linear = next(module for module in first_model(run).modules() if isinstance(module, nn.Linear))
            harm_once(linear, how, backward=backward)

    return look


class Net(nn.Module):
    """What keeps running statistics and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def mean_square(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs - targets).square().mean()


def train_net(
    folder: Path,
    words: tuple[str, ...],
    before_step: Callable[[LiveRun, int], None] | None = None,
    bad_samples: tuple[int, ...] = (),
    seen: list[dict[str, torch.Tensor]] | None = None,
) -> dict[str, torch.Tensor]:
    """A script's own loop; the whole state at its end, and before each step in `seen`."""
    torch.manual_seed(3)
    inputs, targets = torch.randn(64, 2), torch.randn(64, 1)
    inputs[list(bad_samples)] = math.nan
    on = pool_ranks() if torch.distributed.is_initialized() else lone_rank()
    with open_tiny(folder, on, "train.global_batch=8", "data.shuffle=false", *words, base=SCRIPT) as run:
        if before_step is not None:
            tell_steps(run, before_step)
        torch.manual_seed(4)
        net = run.shard(Net())
        optimizer = run.optimizer(torch.optim.SGD, net, lr=0.05, momentum=0.9)
        for batch in run.steps(run.loader(TensorDataset(inputs, targets))):
            if seen is not None:
                seen.append(whole_state(net, optimizer))
            run.step(net, batch, mean_square)
        return whole_state(net, optimizer)


@pytest.mark.parametrize("backward", [True, False], ids=["gradient", "loss"])
@ranks(2)
def test_a_transient_fault_leaves_no_trace_in_the_weights(rank: int, tmp_path: Path, backward: bool) -> None:
    """With dropout, running statistics, accumulation and momentum: all of it bit for bit."""
    words = ("train.steps=6", "train.micro_batch=2", "guard.non_finite=skip", *layout(2, 1))
    expected = train_net(tmp_path / "well", words)
    found = train_net(tmp_path / "hurt", words, fault_at(4, backward=backward))
    assert_same_bits(found, expected)
    pool_ranks().barrier()
    assert read_column(tmp_path / "hurt") == read_column(tmp_path / "well")
    assert read_column(tmp_path / "hurt", "grad_norm") == read_column(tmp_path / "well", "grad_norm")
    (told,) = read_named(tmp_path / "hurt", "transient")
    assert told["step"] == 4
    assert told["grad_norm"] is None
    assert (told["loss"] is None) == (not backward)
    assert not read_named(tmp_path / "well", "transient")


LAYOUTS = {
    "replicas": layout(2, 1),
    "shards": layout(1, 2),
    "tensor": ("parallel.tp=2",),
    "pipeline": ("parallel.pp=2", "model.tied=false"),
    "experts": ("model.experts=4", "parallel.dp_shard=2", "parallel.ep=2"),
    "powersgd": (*layout(2, 1), "parallel.compress=powersgd", "parallel.powersgd_rank=2"),
}


def train_well(folder: Path, name: str) -> Path:
    """The run in a layout that nothing happens to, once for all that ask for it in this folder."""
    run = folder / f"guard-{name}"
    is_there = run.exists()
    pool_ranks().barrier()
    if not is_there:
        train_tiny(run, pool_ranks(), *SHORT, *LAYOUTS[name])
    pool_ranks().barrier()
    return run


@pytest.mark.parametrize("name", picked(LAYOUTS, "tensor"))
@ranks(2)
def test_a_transient_fault_leaves_no_trace_in_any_layout(
    rank: int, tmp_path: Path, references: Path, name: str
) -> None:
    """Replicas are those of the test before."""
    well = train_well(references, name)
    train_tiny(tmp_path / "hurt", pool_ranks(), *SHORT, *LAYOUTS[name], before_step=fault_at(4))
    pool_ranks().barrier()
    assert [event["step"] for event in read_named(tmp_path / "hurt", "transient")] == [4]
    assert read_column(tmp_path / "hurt") == read_column(well)
    assert read_column(tmp_path / "hurt", "grad_norm") == read_column(well, "grad_norm")


@ranks(2)
def test_a_step_whose_data_are_no_numbers_changes_nothing(rank: int, tmp_path: Path) -> None:
    """Sample 21 is one of step 3, on rank 1."""
    states: list[dict[str, torch.Tensor]] = []
    words = ("train.steps=5", "train.micro_batch=2", "guard.non_finite=skip", *layout(2, 1))
    train_net(tmp_path, words, bad_samples=(21,), seen=states)
    assert_same_bits(states[3], states[2])
    assert not torch.equal(states[4]["layers.0.weight weight"], states[3]["layers.0.weight weight"])
    pool_ranks().barrier()
    (told,) = read_named(tmp_path, "step_skipped")
    assert (told["step"], told["repeated"], told["in_a_row"], told["skipped"], told["position"]) == (3, True, 1, 1, 16)
    assert told["ids"] == [[16, 17, 18, 19], [20, 21, 22, 23]]
    assert told["loss"] is None
    assert [event.get("skipped", False) for event in read_steps(tmp_path)] == [False, False, True, False, False]
    assert [event["loss"] is None for event in read_steps(tmp_path)] == [False, False, True, False, False]


@ranks(2)
def test_too_many_skipped_steps_end_the_run_and_no_checkpoint_is_harmed(rank: int, tmp_path: Path) -> None:
    words = ("train.steps=8", "checkpoint.every=2 steps", "guard.max_skips=2", "guard.non_finite=skip", *layout(2, 1))
    with pytest.raises(JobError) as failure:
        train_net(tmp_path, words, bad_samples=(17, 25))
    assert str(failure.value).splitlines() == [
        "the loss is nan in step 4, also when its passes were repeated; steps 3 to 4 changed no weights, and the run "
        "ends here (guard.max_skips = 2, command line).",
        "  Samples of step 4: 24, 25, 26, 27, 28, 29 and 2 more; all of them are in the events named step_skipped. The "
        "last checkpoint is that of step 2. To do: look for values in these samples that are not finite, lower "
        "optim.lr, or set optim.clip; then run the same command again.",
    ]
    pool_ranks().barrier()
    assert RunDir(tmp_path).checkpoint_steps() == [2]
    state = train_net(tmp_path, (*words, "guard.max_skips=3"), bad_samples=(17, 25))
    assert all(bool(tensor.isfinite().all()) for tensor in state.values())


def test_skipped_steps_are_counted_over_attempts(tmp_path: Path, quiet_threads: None) -> None:
    words = ("checkpoint.every=1 steps", "guard.non_finite=skip", "guard.max_skips=2")
    train_net(tmp_path, (*words, "train.steps=2"), bad_samples=(9,))
    with pytest.raises(JobError, match="steps 2 to 3 changed no weights"):
        train_net(tmp_path, (*words, "train.steps=8"), bad_samples=(9, 17))
    assert [event["skipped"] for event in read_named(tmp_path, "step_skipped")] == [1, 2]


def test_the_run_stops_at_the_first_where_that_is_asked_for(tmp_path: Path, quiet_threads: None) -> None:
    with pytest.raises(JobError) as failure:
        train_net(tmp_path, ("train.steps=8", "guard.non_finite=stop"), bad_samples=(9,))
    first = str(failure.value).splitlines()[0]
    assert first == (
        "the loss is nan in step 2, also when its passes were repeated; step 2 changed no weights, and the run ends "
        'here (guard.non_finite = "stop", command line).'
    )


def test_a_script_that_asks_for_nothing_has_its_passes_run_once(tmp_path: Path, quiet_threads: None) -> None:
    calls: list[int] = []

    def count(run: LiveRun, step: int) -> None:
        if step == 1:
            first_model(run).register_forward_pre_hook(lambda *_: calls.append(step))

    with pytest.raises(JobError, match="the loss of step 2 is nan, so the weights after it are of no use"):
        train_net(tmp_path, ("train.steps=8",), count, bad_samples=(9,))
    assert len(calls) == 2


class Scaled(Net):
    """Writes into what it is given."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.mul_(0.5))


CASES = {"guard.non_finite=skip": (JobError, math.nan, 3), "guard.probe_every=1 steps": (UserError, 1.0, 0)}


@pytest.mark.parametrize("key", CASES)
def test_a_batch_that_was_written_into_is_not_run_again(tmp_path: Path, key: str, quiet_threads: None) -> None:
    error, value, skipped = CASES[key]
    data, words = TensorDataset(torch.full((16, 2), value), torch.zeros(16, 1)), ("train.global_batch=4", key)
    with pytest.raises(error, match="wrote into"), open_tiny(tmp_path, lone_rank(), *words, base=SCRIPT) as run:
        net = run.shard(Scaled())
        run.optimizer(torch.optim.SGD, net, lr=0.1)
        for batch in run.steps(run.loader(data)):
            run.step(net, batch, mean_square)
    assert [event["repeated"] for event in read_named(tmp_path, "step_skipped")] == [False] * skipped


# --- the probe


@pytest.mark.parametrize("name", ["replicas", "shards"])
@ranks(2)
def test_a_probe_finds_a_flipped_bit_and_goes_on_with_the_majority(
    rank: int, tmp_path: Path, references: Path, name: str
) -> None:
    words, well = (*SHORT, *LAYOUTS[name], "guard.probe_every=2 steps"), train_well(references, name)
    train_tiny(tmp_path / "hurt", pool_ranks(), *words, before_step=fault_at(4, flip_bit, backward=False))
    pool_ranks().barrier()
    (told,) = read_named(tmp_path / "hurt", "corruption")
    assert (told["step"], told["ranks"], told["decided"], len(told["hosts"])) == (4, [1], True, 1)
    assert read_column(tmp_path / "hurt") == read_column(well)


@pytest.mark.parametrize("name", picked(LAYOUTS, "replicas", "shards", "experts"))
@ranks(2)
def test_a_sound_machine_passes_every_probe(rank: int, tmp_path: Path, references: Path, name: str) -> None:
    words, well = (*SHORT, *LAYOUTS[name]), train_well(references, name)
    train_tiny(tmp_path / "probed", pool_ranks(), *words, "guard.probe_every=1", "guard.compare_every=1")
    pool_ranks().barrier()
    assert read_column(tmp_path / "probed") == read_column(well)
    assert not read_named(tmp_path / "probed", "corruption")


def test_three_results_of_three_runs_end_the_run(tmp_path: Path, quiet_threads: None) -> None:
    """A model that draws from a generator that nobody knows of."""
    own = torch.Generator().manual_seed(1)

    class Noisy(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + torch.rand(1, generator=own)

    data = TensorDataset(torch.randn(16, 2), torch.zeros(16, 1))
    words = ("train.steps=6", "train.global_batch=4", "guard.probe_every=3 steps")
    with pytest.raises(JobError) as failure, open_tiny(tmp_path, lone_rank(), *words, base=SCRIPT) as run:
        net = run.shard(Noisy())
        run.optimizer(torch.optim.SGD, net, lr=0.1)
        for batch in run.steps(run.loader(data)):
            run.step(net, batch, mean_square)
    assert str(failure.value).startswith("the passes of step 3 were run three times and gave three different results")
    assert [event["decided"] for event in read_named(tmp_path, "corruption")] == [False]


# --- copies of weights


def flip_weight_at(step: int, rank: int) -> Callable[[LiveRun, int], None]:
    """For `before_step`: one bit of one weight of one rank changes."""

    def look(run: LiveRun, coming: int) -> None:
        if coming == step and run.session.ranks.rank == rank:
            norm = next(p for name, p in run._held.models[0].parallel.module.named_parameters() if "norm" in name)
            held = norm.to_local() if hasattr(norm, "to_local") else norm
            held.data.view(torch.int32)[0] ^= 1

    return look


@ranks(2)
def test_a_flipped_bit_of_a_copy_is_found(rank: int, tmp_path: Path) -> None:
    words = (*SHORT, *layout(2, 1), "checkpoint.every=1 steps", "guard.compare_every=2 steps", "checkpoint.keep=9")
    with pytest.raises(JobError) as failure:
        train_tiny(tmp_path, pool_ranks(), *words, before_step=flip_weight_at(3, 1))
    first, second = str(failure.value).splitlines()
    assert first.startswith("after step 4 the copies of ")
    assert "differ between ranks 0, 1 (" in first
    assert first.endswith("no majority says which are right; the run ends here, and nothing was saved after it.")
    assert second.startswith(
        "  All copies were equal at step 2; the newest checkpoint from then or before is that of step 2. Checkpoints "
        "from after it (step 3) may hold wrong weights: move them away to go on before them. To do: "
    )
    pool_ranks().barrier()
    assert RunDir(tmp_path).checkpoint_steps() == [1, 2, 3]
    (told,) = read_named(tmp_path, "replica_differs")
    assert (told["step"], told["ranks"], told["decided"], told["equal_at"]) == (4, [0, 1], False, 2)
    assert len(told["parameters"]) >= 1


@pytest.mark.parametrize("shape", [("parallel.dp_replicate=4",), ("parallel.tp=4", "model.heads=4")], ids=["dp", "tp"])
@ranks(4)
def test_a_majority_of_copies_names_the_rank(rank: int, tmp_path: Path, shape: tuple[str, ...]) -> None:
    words = (*SHORT, *shape, "parallel.tp_sequence=false", "guard.compare_every=3 steps")
    with pytest.raises(JobError, match=r"differ on rank 2 \(.*\) from those of the other ranks"):
        train_tiny(tmp_path, pool_ranks(), *words, before_step=flip_weight_at(3, 2))
    pool_ranks().barrier()
    (told,) = read_named(tmp_path, "replica_differs")
    assert (told["ranks"], told["decided"], told["equal_at"]) == ([2], True, None)


# --- spikes


def test_a_row_of_spikes_begins_at_its_first_and_is_read_back_to_the_bit() -> None:
    """A step without numbers neither counts nor ends the row; one without a spike does."""
    spikes, rows = Spikes(), []
    losses = [1.0 + 0.1 / (step + 3) for step in range(30)] + [9.0, math.nan, 8.0, 1.0, 7.0]
    for step, loss in enumerate(losses, 1):
        values = {"loss": loss, "grad_norm": 0.5}
        spikes = spikes.after(step, values, spikes.find(values, 20.0))
        rows.append((spikes.in_a_row, spikes.first))
        assert read_spikes(json.loads(json.dumps(spikes.as_numbers()))) == spikes
    assert rows == [*[(0, 0)] * 30, (1, 31), (1, 31), (2, 31), (0, 0), (1, 35)]
    assert read_spikes({}) == Spikes({})


def test_a_spike_is_told_and_nothing_else(tmp_path: Path, quiet_threads: None) -> None:
    torch.manual_seed(3)
    inputs = torch.randn(256, 2)
    targets = inputs.sum(1, keepdim=True) + torch.randn(256, 1)
    targets[161] = 1000.0
    words = ("train.steps=60", "train.global_batch=4", "data.shuffle=false", "guard.spike=8.0")
    with open_tiny(tmp_path, lone_rank(), *words, base=SCRIPT) as run:
        net = run.shard(nn.Linear(2, 1))
        run.optimizer(torch.optim.SGD, net, lr=1e-5)
        for batch in run.steps(run.loader(TensorDataset(inputs, targets))):
            run.step(net, batch, mean_square)
    told = read_named(tmp_path, "spike")
    assert [(event["step"], event["of"]) for event in told] == [(41, "loss"), (41, "grad_norm")]
    assert all(event["value"] > event["median"] and event["deviations"] > 8 for event in told)
    assert len(read_steps(tmp_path)) == 60
