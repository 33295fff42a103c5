"""Several models and optimizers in one run: each trains as torch alone would train it, and all go on after a resume."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

from pool import RankPool, ranks
from runs import Died, Signalled, layout, lone_rank, open_tiny, pool_ranks, read_column, read_named, read_steps
from shardway.checkpoint.catalog import PARTS, find_checkpoint
from shardway.checkpoint.reader import TensorReader, find_differences
from shardway.errors import UserError
from shardway.ranks.start import Ranks
from shardway.train.run import LiveRun
from speed import picked, picked_pairs
from trained import whole

WORDS = (
    "run.device=cpu",
    "run.threads=1",
    "train.steps=6",
    "checkpoint.every=off",
    "checkpoint.background=false",
)
LAYOUTS = [(1, 1), (2, 1), (1, 2)]
NAMES = ["one rank", "replicas", "shards"]


def points() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(64, 4, generator=generator))


def layers(*sizes: int) -> nn.Sequential:
    pairs = itertools.pairwise(sizes)
    return nn.Sequential(*[part for a, b in pairs for part in (nn.Linear(a, b), nn.Tanh())][:-1])


Step = Callable[[Any], None]
Make = Callable[[LiveRun], tuple[Step, dict[str, Any]]]
"""A script: what it does with a batch, and the models and objects whose tensors a test compares."""


def noise(batch: Any) -> torch.Tensor:
    """Of the batch's rows, so that it does not depend on the layout."""
    return torch.sin(batch[0][:, :2] * 50)


def gan(critic_steps: int = 1) -> Make:
    """A generator and what judges it; the judge may take several steps for each of the generator."""

    def make(run: LiveRun) -> tuple[Step, dict[str, Any]]:
        torch.manual_seed(11)
        generator, judge = run.shard(layers(2, 8, 4)), run.shard(layers(4, 8, 1), name="judge")
        of_generator = run.optimizer(torch.optim.Adam, generator, lr=0.02)
        run.optimizer(torch.optim.Adam, judge, name="judge", lr=0.05)
        run.scheduler(torch.optim.lr_scheduler.StepLR, of_generator, step_size=2)

        def judged(model: nn.Module, batch: Any) -> torch.Tensor:
            made = generator(noise(batch)).detach()
            return F.softplus(-model(batch[0])).mean() + F.softplus(model(made)).mean()

        def generated(model: nn.Module, batch: Any) -> torch.Tensor:
            return F.softplus(-judge(model(noise(batch)))).mean()

        def step(batch: Any) -> None:
            for _ in range(critic_steps):
                run.step(judge, batch, judged)
            run.step(generator, batch, generated)

        return step, {"generator": generator, "judge": judge}

    return make


def autoencoder(run: LiveRun) -> tuple[Step, dict[str, Any]]:
    """Encoder and decoder apart, one optimizer over both."""
    torch.manual_seed(12)
    encoder, decoder = run.shard(layers(4, 6, 2)), run.shard(layers(2, 6, 4))
    both = [*encoder.parameters(), *decoder.parameters()]
    run.optimizer(lambda _, **options: torch.optim.AdamW(both, **options), decoder, lr=0.05)

    def step(batch: Any) -> None:
        run.step(decoder, batch, lambda model, b: F.mse_loss(model(encoder(b[0])), b[0]))

    return step, {"encoder": encoder, "decoder": decoder}


class Shadow:
    """An average of weights as people write it."""

    def __init__(self, model: nn.Module) -> None:
        self.updates = 0
        self.shadow = {name: each.detach().clone() for name, each in model.named_parameters()}

    def update(self, model: nn.Module) -> None:
        self.updates += 1
        for name, each in model.named_parameters():
            self.shadow[name].lerp_(each.detach(), 0.2)

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow, "updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow, self.updates = state["shadow"], state["updates"]


def averaged(kind: str) -> Make:
    def make(run: LiveRun) -> tuple[Step, dict[str, Any]]:
        torch.manual_seed(13)
        model = run.shard(layers(4, 6, 4))
        run.optimizer(torch.optim.SGD, model, lr=0.1, momentum=0.9)
        ema: Any = run.keep("ema", Shadow(model)) if kind == "by hand" else AveragedModel(model)

        def step(batch: Any) -> None:
            run.step(model, batch, lambda m, b: F.mse_loss(m(b[0]), b[0] ** 2))
            ema.update(model) if kind == "by hand" else ema.update_parameters(model)

        return step, {"model": model, "ema": ema}

    return make


def distilled(run: LiveRun) -> tuple[Step, dict[str, Any]]:
    """A teacher that is the student's average and has no optimizer: a model that is only run."""
    torch.manual_seed(14)
    student, teacher = run.shard(layers(4, 6, 4)), run.shard(layers(4, 6, 4), name="teacher")
    run.optimizer(torch.optim.SGD, student, lr=0.1)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        with torch.no_grad():
            wanted = teacher(batch[0])
        return F.mse_loss(model(batch[0] + 0.1), wanted + batch[0])

    def step(batch: Any) -> None:
        run.step(student, batch, loss)
        with torch.no_grad():
            for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
                slow.lerp_(fast, 0.3)

    return step, {"student": student, "teacher": teacher}


SCRIPTS: dict[str, Make] = {
    "gan": gan(),
    "critic": gan(3),
    "autoencoder": autoencoder,
    "ema": averaged("by hand"),
    "averaged": averaged("torch"),
    "distilled": distilled,
}


def drive(folder: Path, on: Ranks, make: Make, *words: str, last: int | None = None) -> dict[str, torch.Tensor]:
    """Run a script; it is signalled in step `last`. What its models and objects hold then, whole."""
    with open_tiny(folder, on, *words, base=WORDS) as run:
        step, held = make(run)
        for batch in run.steps(run.loader(points(), batch_size=8)):
            if last is not None and run.step_number + 1 == last:
                run.session.signals = Signalled()  # type: ignore[assignment]
            step(batch)
        return {
            f"{name}.{key.removeprefix('module.')}": whole(value)
            for name, thing in held.items()
            for key, value in _tensors(thing).items()
        }


def _tensors(thing: Any) -> dict[str, torch.Tensor]:
    if isinstance(thing, nn.Module):
        return dict(thing.state_dict())
    return {**thing.shadow, "updates": torch.tensor(thing.updates)}


def on_ranks(
    rank: int, folder: Path, name: str, shape: tuple[int, int], words: tuple[str, ...], stops: tuple[Any, ...]
) -> None:
    on = pool_ranks() if shape != (1, 1) else lone_rank()
    for last in stops:
        found = drive(folder, on, SCRIPTS[name], *layout(*shape), *words, last=last)
    if rank == 0:
        torch.save(found, folder / "tensors.pt")


def compare(folder: Path, one: str, other: str, *, exactly: bool = True, within: float = 1e-4) -> None:
    found, expected = (torch.load(folder / name / "tensors.pt") for name in (one, other))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        if exactly:
            assert torch.equal(found[name], tensor), name
        else:
            assert torch.allclose(found[name], tensor, rtol=within, atol=within / 100), name


@ranks(2)
def test_running_statistics_of_an_average_go_on_on_every_rank(rank: int, tmp_path: Path) -> None:
    """Each rank's batch norm sees its own rows: what a checkpoint has of an average of it must not be one rank's alone.
    Also of a copy that is kept by hand, and beside a module that one rank keeps alone."""

    def drive_to(folder: Path, last: int | None) -> list[torch.Tensor]:
        with open_tiny(folder, pool_ranks(), *layout(2, 1), "checkpoint.every=2 steps", base=WORDS) as run:
            torch.manual_seed(13)
            model = run.shard(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 4)))
            run.optimizer(torch.optim.SGD, model, lr=0.1)
            average = AveragedModel(model, use_buffers=True, multi_avg_fn=get_ema_multi_avg_fn(0.7))
            own = run.keep("own", nn.BatchNorm1d(4))
            if rank == 0:
                run.keep("alone", nn.BatchNorm1d(4))
            for batch in run.steps(run.loader(points(), batch_size=8)):
                if run.step_number == last:
                    raise Died
                run.step(model, batch, lambda m, b: F.mse_loss(m(b[0]), b[0] ** 2))
                average.update_parameters(model)
                own(batch[0])
            return [each.clone() for each in (*average.buffers(), *own.buffers())]

    expected = drive_to(tmp_path / "whole", None)
    with pytest.raises(Died):
        drive_to(tmp_path / "killed", 3)
    found = drive_to(tmp_path / "killed", None)
    assert [event["step"] for event in read_named(tmp_path / "killed", "started")] == [0, 2]
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


STOPPED = [(name, where) for name in SCRIPTS for where in NAMES if (name, where) != ("averaged", "shards")]
"""An average of shards is refused, see below."""
EACH_ONCE = (
    *(("gan", "shards"), ("critic", "replicas"), ("autoencoder", "shards")),
    *(("ema", "one rank"), ("averaged", "replicas"), ("distilled", "shards")),
)


@pytest.mark.parametrize("case", picked(STOPPED, *EACH_ONCE), ids="-".join)
def test_a_run_that_was_stopped_ends_with_the_same_bits(
    rank_pool: RankPool, tmp_path: Path, case: tuple[str, str]
) -> None:
    name, shape = case[0], LAYOUTS[NAMES.index(case[1])]
    arguments = {"name": name, "shape": shape, "words": ()}
    size = shape[0] * shape[1]
    rank_pool.run(on_ranks, size, {"folder": tmp_path / "whole", "stops": (None,), **arguments})
    stops = (2, 4) if name == "gan" else (3,)
    rank_pool.run(on_ranks, size, {"folder": tmp_path / "stopped", "stops": (*stops, None), **arguments})
    assert [event["step"] for event in read_named(tmp_path / "stopped", "started")] == [0, *stops]
    assert read_column(tmp_path / "stopped") == read_column(tmp_path / "whole")
    compare(tmp_path, "stopped", "whole")


@pytest.mark.parametrize("case", picked_pairs(["gan", "critic", "autoencoder", "distilled"], NAMES[1:]), ids="-".join)
def test_ranks_and_micro_batches_train_as_one_rank_does(
    rank_pool: RankPool, tmp_path: Path, case: tuple[str, str]
) -> None:
    name, shape = case[0], LAYOUTS[NAMES.index(case[1])]
    one = {"folder": tmp_path / "one", "name": name, "shape": (1, 1), "words": (), "stops": (None,)}
    rank_pool.run(on_ranks, 1, one)
    words = ("train.micro_batch=2",)
    rank_pool.run(on_ranks, 2, {**one, "folder": tmp_path / "more", "shape": shape, "words": words})
    compare(tmp_path, "more", "one", exactly=False)


def test_a_gan_trains_as_torch_alone_trains_it(tmp_path: Path, quiet_threads: None) -> None:
    found = drive(tmp_path, lone_rank(), gan(2), "data.record_ids=true")
    torch.manual_seed(11)
    generator, judge = layers(2, 8, 4), layers(4, 8, 1)
    of_generator = torch.optim.Adam(generator.parameters(), lr=0.02)
    of_judge = torch.optim.Adam(judge.parameters(), lr=0.05)
    losses = []
    for event in read_steps(tmp_path):
        batch = [points().tensors[0][event["ids"]]]
        for _ in range(2):
            of_judge.zero_grad()
            made = generator(noise(batch)).detach()
            loss = F.softplus(-judge(batch[0])).mean() + F.softplus(judge(made)).mean()
            loss.backward()
            of_judge.step()
            losses.append(loss.item())
        of_generator.zero_grad()
        loss = F.softplus(-judge(generator(noise(batch)))).mean()
        loss.backward()
        of_generator.step()
        assert event["losses"] == {"judge": losses[-1], "model": loss.item()}
        assert event["loss"] == losses[-2]
    for name, model in (("generator", generator), ("judge", judge)):
        for key, value in model.state_dict().items():
            assert torch.equal(found[f"{name}.{key}"], value)


def test_what_differs_in_a_further_model_or_a_kept_object_is_a_difference(tmp_path: Path, quiet_threads: None) -> None:
    def make(scale: float) -> Make:
        def script(run: LiveRun) -> tuple[Step, dict[str, Any]]:
            step, held = gan()(run)
            shadow = run.keep("ema", Shadow(held["judge"]))
            shadow.updates = int(scale)
            with torch.no_grad():
                held["judge"][0].bias.mul_(scale)
            return step, held

        return script

    for name, scale in (("one", 1.0), ("same", 1.0), ("other", 2.0)):
        drive(tmp_path / name, lone_rank(), make(scale), "train.steps=1", "checkpoint.every=1 steps")
    readers = {name: TensorReader(find_checkpoint(tmp_path / name).folder) for name in ("one", "same", "other")}
    assert find_differences(readers["one"], readers["same"], PARTS) == []
    found = {each.name for each in find_differences(readers["one"], readers["other"], PARTS)}
    assert {"model-judge.0.bias", "structure.kept.ema"} <= found
    of_data = {"stream", "order"}  # of iterable datasets and samplers, which this script has none of
    assert {entry.part for entry in readers["one"].entries.values()} == set(PARTS) - of_data


def refused(folder: Path, act: Callable[[LiveRun], object], *words: str) -> str:
    with pytest.raises(UserError) as failure, open_tiny(folder, lone_rank(), *words, base=WORDS) as run:
        act(run)
    return str(failure.value)


def test_a_step_that_could_mean_two_optimizers_is_refused(tmp_path: Path, quiet_threads: None) -> None:
    def act(run: LiveRun) -> None:
        model = run.shard(layers(4, 4))
        for name in ("fast", "slow"):
            run.optimizer(torch.optim.SGD, model, name=name, lr=0.1)
        for batch in run.steps(run.loader(points(), batch_size=8)):
            run.step(model, batch, lambda m, b: m(b[0]).mean())

    assert refused(tmp_path, act) == (
        "run.step cannot tell which optimizer to use: several optimizers update this Sequential (fast, slow).\n"
        "  To do: say which: run.step(model, batch, loss_fn, optimizer)."
    )


def test_what_is_made_after_the_loop_has_begun_is_refused(tmp_path: Path, quiet_threads: None) -> None:
    def act(run: LiveRun) -> None:
        model = run.shard(layers(4, 4))
        run.optimizer(torch.optim.SGD, model, lr=0.1)
        for batch in run.steps(run.loader(points(), batch_size=8)):
            run.step(model, batch, lambda m, b: m(b[0]).mean())
            run.optimizer(torch.optim.SGD, model, lr=0.1)

    assert refused(tmp_path, act) == (
        "run.optimizer was called after run.steps, so what it makes would neither be trained nor saved.\n"
        "  To do: call it before run.steps."
    )


@pytest.mark.parametrize("case", picked_pairs(["all", "first", "second"], NAMES[1:]), ids="-".join)
@ranks(2)
def test_any_rank_may_finish_the_run(rank: int, tmp_path: Path, case: tuple[str, str]) -> None:
    who, shape = case[0], LAYOUTS[NAMES.index(case[1])]

    def attempt() -> list[int]:
        with open_tiny(tmp_path, pool_ranks(), *layout(*shape), base=WORDS) as run:
            step, _ = gan()(run)
            steps = []
            for batch in run.steps(run.loader(points(), batch_size=8)):
                steps.append(run.step_number + 1)
                step(batch)
                if steps[-1] == 3 and who in ("all", ("first", "second")[rank]):
                    run.stop("no gain")
            return steps

    attempt()
    pool_ranks().barrier()
    assert read_column(tmp_path, "step") == [1, 2, 3]
    assert attempt() == []
    pool_ranks().barrier()
    assert [(each["step"], each["reason"]) for each in read_named(tmp_path, "finished")] == [(3, "no gain")]


@pytest.mark.parametrize("shape", LAYOUTS[1:], ids=NAMES[1:])
@ranks(2)
def test_a_kept_shard_is_saved_as_a_shard(rank: int, tmp_path: Path, shape: tuple[int, int]) -> None:
    found = drive(tmp_path, pool_ranks(), averaged("by hand"), *layout(*shape))
    again = drive(tmp_path, pool_ranks(), averaged("by hand"), *layout(*reversed(shape)))  # type: ignore[arg-type]
    assert {name: value.tolist() for name, value in again.items()} == {n: v.tolist() for n, v in found.items()}
    assert not isinstance(again["ema.0.weight"], DTensor)


@ranks(2)
def test_a_copy_of_a_sharded_model_is_refused(rank: int, tmp_path: Path) -> None:
    with pytest.raises(UserError) as failure:
        drive(tmp_path, pool_ranks(), averaged("torch"), *layout(1, 2))
    assert str(failure.value).startswith(
        "a copy of Sequential was asked for (copy.deepcopy, AveragedModel), and its weights are shards of FSDP2"
    )


# --- what a script freezes and frees


def gradual(run: LiveRun) -> tuple[Step, dict[str, Any]]:
    """The body is frozen at first, joins after the second step, and the head is frozen after the fourth."""
    torch.manual_seed(15)
    model = layers(4, 6, 4)
    model[0].requires_grad_(False)
    called = run.shard(model)
    run.optimizer(torch.optim.Adam, called, lr=0.05)

    def step(batch: Any) -> None:
        run.step(called, batch, lambda m, b: F.mse_loss(m(b[0]), b[0] ** 2))
        if run.step_number + 1 == 2:
            model[0].requires_grad_(True)
        if run.step_number + 1 == 4:
            model[2].requires_grad_(False)

    return step, {"model": called}


SCRIPTS["gradual"] = gradual


@pytest.mark.parametrize(("shape", "stop"), [((2, 1), 3), ((1, 2), 5)], ids=NAMES[1:])
def test_what_is_frozen_and_freed_trains_as_on_one_rank(
    rank_pool: RankPool, tmp_path: Path, shape: tuple[int, int], stop: int
) -> None:
    """Stopped when all is trained, or when the head is frozen."""
    one = {"folder": tmp_path / "one", "name": "gradual", "shape": (1, 1), "words": (), "stops": (None,)}
    rank_pool.run(on_ranks, 1, one)
    two = {**one, "shape": shape, "words": ("train.micro_batch=2",)}
    rank_pool.run(on_ranks, 2, {**two, "folder": tmp_path / "more"})
    compare(tmp_path, "more", "one", exactly=False)
    rank_pool.run(on_ranks, 2, {**two, "folder": tmp_path / "stopped", "stops": (stop, None)})
    compare(tmp_path, "stopped", "more")


@ranks(2)
def test_replicas_of_a_model_that_was_all_frozen_are_refused_when_it_is_to_be_trained(
    rank: int, tmp_path: Path
) -> None:
    def make(run: LiveRun) -> tuple[Step, dict[str, Any]]:
        model = run.shard(layers(4, 4).requires_grad_(False))
        run.optimizer(torch.optim.SGD, model, lr=0.1)
        model.requires_grad_(True)
        return lambda batch: run.step(model, batch, lambda m, b: m(b[0]).mean()), {}  # type: ignore[return-value]

    with pytest.raises(UserError) as failure:
        drive(tmp_path, pool_ranks(), make, *layout(2, 1))
    assert str(failure.value) == (
        "all parameters of Sequential were frozen when run.shard was given it, and some are to be trained now; its "
        "replicas (parallel.dp_replicate) would not average their gradients.\n"
        "  To do: call run.shard(model) first and freeze parameters after it."
    )


# --- an optimizer that evaluates the loss itself


def lbfgs(run: LiveRun) -> tuple[Step, dict[str, Any]]:
    torch.manual_seed(16)
    model = run.shard(layers(4, 5, 4).double())  # a line search makes more of a rounding with each step
    run.optimizer(torch.optim.LBFGS, model, lr=0.3, max_iter=3, history_size=4, line_search_fn="strong_wolfe")

    def loss(model: nn.Module, batch: Any) -> Any:
        values = batch[0].double()
        return F.mse_loss(model(values), values**2)

    return lambda batch: run.step(model, batch, loss), {"model": model}  # type: ignore[return-value]


SCRIPTS["lbfgs"] = lbfgs


def test_lbfgs_on_replicas_trains_as_on_one_rank_and_goes_on(rank_pool: RankPool, tmp_path: Path) -> None:
    one = {"folder": tmp_path / "one", "name": "lbfgs", "shape": (1, 1), "words": (), "stops": (None,)}
    rank_pool.run(on_ranks, 1, one)
    two = {**one, "shape": (2, 1), "words": ("train.micro_batch=2",)}
    rank_pool.run(on_ranks, 2, {**two, "folder": tmp_path / "more"})
    compare(tmp_path, "more", "one", exactly=False, within=1e-6)
    rank_pool.run(on_ranks, 2, {**two, "folder": tmp_path / "stopped", "stops": (3, None)})
    compare(tmp_path, "stopped", "more")


@ranks(2)
def test_lbfgs_over_shards_is_refused_before_the_first_step(rank: int, tmp_path: Path) -> None:
    with pytest.raises(UserError) as failure:
        drive(tmp_path, pool_ranks(), lbfgs, *layout(1, 2))
    assert str(failure.value) == (
        "LBFGS looks at all parameters as one vector, and here they are shards or slices (parallel.dp_shard, tp, ep).\n"
        "  To do: use parallel.dp_replicate alone, or another optimizer."
    )
