"""The library door: a script with its own model, data and loop, alone and as ranks."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

import shardway
from pool import RankPool, ranks
from runs import (
    Signalled,
    layout,
    lone_rank,
    open_tiny,
    pool_ranks,
    read_column,
    read_named,
    read_steps,
    worst_difference,
)
from shardway.checkpoint.reader import load_latest
from shardway.checkpoint.state import Trained
from shardway.errors import UserError
from shardway.ranks.start import Ranks
from shardway.rundir.directory import RunDir
from shardway.train.run import LiveRun, _write_report
from shardway.train.validate import Validation
from speed import picked
from trained import assert_same_bits, whole, whole_state

SCRIPT = (
    "run.device=cpu",
    "run.threads=1",
    "train.steps=12",
    "checkpoint.every=off",
    "checkpoint.background=false",
    "data.record_ids=true",
)
"""What a script's run file says here: nothing of model and data."""


class Points(Dataset[Any]):
    """A user's dataset: 40 points and what they are to give."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(8)
        self.x = torch.randn(40, 6, generator=generator)
        self.y = torch.sin(self.x.sum(1, keepdim=True))

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index], self.y[index]


class Net(nn.Module):
    """A user's model, with weights of its own."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        middle = nn.BatchNorm1d(16) if norm else nn.LayerNorm(16)
        self.body = nn.Sequential(nn.Linear(6, 16), middle, nn.ReLU(inplace=True), nn.Linear(16, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


def seeded(norm: bool = False) -> Net:
    torch.manual_seed(21)
    return Net(norm)


def script(
    folder: Path, on: Ranks, *words: str, model: nn.Module | None = None, last: int | None = None
) -> tuple[nn.Module, torch.optim.Optimizer, list[float]]:
    """The script of the docstring of `shardway.train.run`; signalled to stop in step `last`."""
    losses = []
    with open_tiny(folder, on, *words, base=SCRIPT) as run:
        net = run.shard(model or seeded())
        optimizer = run.optimizer(torch.optim.AdamW, net, lr=1e-2)
        loader = run.loader(Points(), batch_size=8)
        for batch in run.steps(loader):
            if last is not None and len(losses) + 1 == last:
                run.session.signals = Signalled()  # type: ignore[assignment]
            losses.append(run.step(net, batch, F.mse_loss))
    return net, optimizer, losses


def clip_by_norm(grads: list[torch.Tensor], clip: float) -> None:
    """As `torch.nn.utils.clip_grad_norm_`, but that the norms of the parameters are added up in float64."""
    norm = torch.stack(torch._foreach_norm(grads)).double().square().sum().sqrt()
    torch._foreach_mul_(grads, torch.clamp(clip / (norm + 1e-6), max=1.0).float())


def plain_loop(
    model: nn.Module, batches: list[list[int]], clip: float | None
) -> tuple[nn.Module, torch.optim.Optimizer, list[float]]:
    """The same training by torch alone, over the same samples."""
    points, losses = Points(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for ids in batches:
        x, y = default_collate([points[index] for index in ids])
        loss = F.mse_loss(model(x), y)
        loss.backward()
        if clip is not None:
            clip_by_norm([parameter.grad for parameter in model.parameters()], clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, optimizer, losses


@pytest.mark.parametrize("norm", [False, True], ids=["layer norm", "batch norm"])
@pytest.mark.parametrize("clip", [None, 0.25])
def test_one_rank_trains_with_the_bits_of_a_plain_loop(
    tmp_path: Path, quiet_threads: None, norm: bool, clip: float | None
) -> None:
    word = f"optim.clip={clip or 'off'}"
    net, optimizer, losses = script(tmp_path, lone_rank(), word, model=seeded(norm))
    batches = read_column(tmp_path, "ids")
    assert [len(ids) for ids in batches] == [8] * 12
    expected = plain_loop(seeded(norm), batches, clip)
    assert losses == read_column(tmp_path) == expected[2]
    assert_same_bits(whole_state(net, optimizer), whole_state(expected[0], expected[1]))


def test_a_script_without_a_launcher(tmp_path: Path, quiet_threads: None) -> None:
    """`shardway.start()` itself, as in the README."""
    with shardway.start(None, *SCRIPT, directory=tmp_path) as run:
        assert isinstance(run, shardway.LiveRun)
        assert run.is_first
        assert run.device == torch.device("cpu")
        assert run.directory.path == tmp_path
        model = run.shard(seeded())
        optimizer = run.optimizer(torch.optim.SGD, model, lr=0.1)
        seen = [run.step(model, batch, F.mse_loss) for batch in run.steps(run.loader(Points(), batch_size=8))]
        assert optimizer.param_groups[0]["lr"] == 0.1
    assert seen == read_column(tmp_path)
    assert len(seen) == 12
    assert seen[-1] < seen[0]
    assert not torch.distributed.is_initialized()
    assert [event["event"] for event in RunDir(tmp_path).events()][-1] == "finished"


def scripted(rank: int, folder: Path, shape: tuple[int, int], words: tuple[str, ...], last: int | None) -> None:
    """The script on the ranks of the pool; rank 0 leaves what it has learnt."""
    net, _, _ = script(folder, pool_ranks(), *words, *layout(*shape), last=last)
    weights = [whole(parameter) for parameter in net.parameters()]
    if rank == 0:
        torch.save(weights, folder / "weights.pt")


@pytest.mark.parametrize("shape", picked([(2, 1), (1, 2), (2, 2)], (2, 2)))
def test_ranks_train_as_one_does(rank_pool: RankPool, tmp_path: Path, shape: tuple[int, int]) -> None:
    arguments = {"words": ("train.steps=6",), "last": None}
    rank_pool.run(scripted, 1, {"folder": tmp_path / "one", "shape": (1, 1), **arguments})
    rank_pool.run(scripted, shape[0] * shape[1], {"folder": tmp_path / "more", "shape": shape, **arguments})
    assert worst_difference(read_column(tmp_path / "more"), read_column(tmp_path / "one")) < 1e-5
    for found, expected in zip(*(torch.load(tmp_path / name / "weights.pt") for name in ("more", "one")), strict=True):
        assert torch.allclose(found, expected, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("shape", picked([(2, 1), (1, 2)], (1, 2)))
def test_a_script_resumes_with_the_same_bits(rank_pool: RankPool, tmp_path: Path, shape: tuple[int, int]) -> None:
    for name, stops in (("through", [None]), ("stopped", [3, None])):
        for last in stops:
            arguments = {"folder": tmp_path / name, "shape": shape, "words": ("train.steps=6",), "last": last}
            rank_pool.run(scripted, 2, arguments)
    assert [event["step"] for event in read_named(tmp_path / "stopped", "started")] == [0, 3]
    assert read_column(tmp_path / "stopped") == read_column(tmp_path / "through")


@pytest.mark.parametrize("shape", [(2, 1), (1, 2)])
@ranks(2)
def test_running_statistics_of_all_ranks_are_saved(rank: int, tmp_path: Path, shape: tuple[int, int]) -> None:
    """Each rank's batch norm has seen other samples; what is saved is their mean, for whoever goes on."""
    words = ("train.steps=4", "checkpoint.every=4 steps", *layout(*shape))
    net, _, _ = script(tmp_path, pool_ranks(), *words, model=seeded(norm=True))
    mine = {name.removeprefix("module."): buffer for name, buffer in net.named_buffers()}
    others = pool_ranks().gather({name: buffer.tolist() for name, buffer in mine.items()})
    assert others[0] == others[1]
    assert mine["body.1.running_mean"].abs().sum() > 0
    with open_tiny(tmp_path / f"own-{rank}", lone_rank(), base=SCRIPT) as run:
        alone = run.shard(seeded(norm=True))
        optimizer = run.optimizer(torch.optim.AdamW, alone, lr=1e-2)
        assert load_latest(RunDir(tmp_path), lone_rank(), Trained(alone, optimizer)) is not None
    for name, buffer in alone.named_buffers():
        assert buffer.tolist() == others[0][name]


def dict_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.mse_loss(model(batch["x"]), batch["y"])


class Named(Points):
    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:  # type: ignore[override]
        return {"x": self.x[index], "y": self.y[index]}


def test_a_batch_is_what_the_dataset_collates_to(tmp_path: Path, quiet_threads: None) -> None:
    _, _, expected = script(tmp_path / "pairs", lone_rank())
    with open_tiny(tmp_path / "dicts", lone_rank(), base=SCRIPT) as run:
        net = run.shard(seeded())
        run.optimizer(torch.optim.AdamW, net, lr=1e-2)
        found = [run.step(net, batch, dict_loss) for batch in run.steps(run.loader(Named(), batch_size=8))]
    assert found == expected


def walk(run: LiveRun, data: Any = None, batch_size: int | None = 8, **options: Any) -> int:
    """Take all steps; how many there were."""
    net = run.shard(seeded())
    run.optimizer(torch.optim.SGD, net, lr=0.1)
    steps = run.steps(run.loader(data or Points(), batch_size), **options)
    return len([run.step(net, batch, F.mse_loss) for batch in steps])


def test_lengths_and_batches_of_the_script_stand_where_nothing_else_does(tmp_path: Path, quiet_threads: None) -> None:
    quiet = SCRIPT[:2]
    with open_tiny(tmp_path / "a", lone_rank(), base=quiet) as run:
        assert walk(run, length="3 epochs") == 15
        assert run.resolved.origins["train.global_batch"] == "run.loader(batch_size=8)"
    with open_tiny(tmp_path / "b", lone_rank(), "train.steps=4", "train.global_batch=10", base=quiet) as run:
        assert walk(run, length="3 epochs") == 4
        assert [len(event["ids"]) for event in read_steps(tmp_path / "b") if "ids" in event] == []
        assert read_named(tmp_path / "b", "started")[0]["samples_per_step"] == 10


def test_each_step_is_told_with_its_facts(tmp_path: Path, quiet_threads: None) -> None:
    told: list[tuple[int, dict[str, Any]]] = []
    with open_tiny(tmp_path, lone_rank(), base=SCRIPT) as run:
        walk(run, on_step=lambda step, facts: told.append((step, facts)))
    assert [step for step, _ in told] == list(range(1, 13))
    assert [facts["loss"] for _, facts in told] == read_column(tmp_path)


def test_a_script_validates_with_its_own_loss(tmp_path: Path, quiet_threads: None) -> None:
    points = Points()
    validation = Validation(lambda: [(points.x[:7], points.y[:7])], F.mse_loss)
    with open_tiny(tmp_path, lone_rank(), "train.validate_every=6 steps", base=SCRIPT) as run:
        net = run.shard(seeded())
        run.optimizer(torch.optim.SGD, net, lr=0.1)
        for batch in run.steps(run.loader(points, 8), validation=validation):
            run.step(net, batch, F.mse_loss)
    found = [event["loss"] for event in read_named(tmp_path, "validation")]
    assert len(found) == 2
    with torch.no_grad():
        assert found[-1] == pytest.approx(F.mse_loss(net(points.x[:7]), points.y[:7]).item(), rel=1e-6)


def test_the_learning_rate_follows_the_run_file_only_where_it_says_so(tmp_path: Path, quiet_threads: None) -> None:
    with open_tiny(tmp_path / "own", lone_rank(), base=SCRIPT) as run:
        walk(run)
    assert read_column(tmp_path / "own", "lr") == [0.1] * 12
    words = ("optim.schedule=linear", "optim.warmup=2 steps", "optim.final_lr=0.0")
    with open_tiny(tmp_path / "file", lone_rank(), *words, base=SCRIPT) as run:
        walk(run)
    expected = [0.05, 0.1, *[0.1 * (1 - k / 10) for k in range(10)]]
    assert read_column(tmp_path / "file", "lr") == pytest.approx(expected)


def test_the_resolved_run_names_no_model_or_data_that_were_not_used(tmp_path: Path, quiet_threads: None) -> None:
    with open_tiny(tmp_path, lone_rank(), base=SCRIPT) as run:
        walk(run)
    resolved = tomllib.loads((tmp_path / "resolved.toml").read_text())
    assert "model" not in resolved
    assert set(resolved["data"]) == {"shuffle", "workers", "prefetch", "record_ids", "skip"}


def test_a_loop_without_a_step_is_refused(tmp_path: Path, quiet_threads: None) -> None:
    def act(run: LiveRun) -> None:
        run.optimizer(torch.optim.SGD, run.shard(seeded()), lr=0.1)
        for _ in run.steps(run.loader(Points(), 8)):
            continue

    assert refused(tmp_path, act) == (
        "the loop went on without run.step for the batch of step 1, so nothing was learnt from it.\n"
        "  To do: call run.step(model, batch, loss_fn) once for each batch of run.steps; or run.backward(loss) in "
        "place of loss.backward(), and run.stop after it."
    )


def test_two_steps_for_one_batch_are_refused(tmp_path: Path, quiet_threads: None) -> None:
    def act(run: LiveRun) -> None:
        net = run.shard(seeded())
        run.optimizer(torch.optim.SGD, net, lr=0.1)
        for batch in run.steps(run.loader(Points(), 8)):
            run.step(net, batch, F.mse_loss)
            run.step(net, batch, F.mse_loss)

    assert refused(tmp_path, act) == (
        "run.step was called twice for the batch of step 1.\n"
        "  To do: call it once for each batch; it takes the micro-batches and the update together."
    )


@pytest.mark.parametrize("shape", picked([(2, 1), (1, 2)], (2, 1)))
@ranks(2)
def test_a_loop_that_is_left_early_is_saved_and_goes_on(rank: int, tmp_path: Path, shape: tuple[int, int]) -> None:
    for name, limit in (("left", 5), ("left", 99), ("through", 99)):
        with open_tiny(tmp_path / name, pool_ranks(), "train.steps=8", *layout(*shape), base=SCRIPT) as run:
            net = run.shard(seeded())
            run.optimizer(torch.optim.SGD, net, lr=0.1)
            for number, batch in enumerate(run.steps(run.loader(Points(), 8)), start=1):
                run.step(net, batch, F.mse_loss)
                if number == limit:
                    break
        if limit == 5 and rank == 0:
            status = RunDir(tmp_path / name).read_status()
            assert (status["state"], status["reason"], status["step"]) == ("stopped", "the script left its loop", 5)
    assert [event["step"] for event in read_named(tmp_path / "left", "started")] == [0, 5]
    assert read_column(tmp_path / "left") == read_column(tmp_path / "through")


def test_a_loader_of_torch_is_refused(tmp_path: Path, quiet_threads: None) -> None:
    def act(run: LiveRun) -> None:
        run.optimizer(torch.optim.SGD, run.shard(seeded()), lr=0.1)
        run.steps(DataLoader(Points(), batch_size=8))  # type: ignore[arg-type]

    assert refused(tmp_path, act) == (
        "run.steps takes what run.loader gives, not a DataLoader.\n"
        "  To do: hand your dataset to run.loader(dataset, batch_size=...), which shares it over the ranks."
    )


def refused(folder: Path, act: Callable[[LiveRun], object]) -> str:
    with pytest.raises(UserError) as failure, open_tiny(folder, lone_rank(), base=SCRIPT) as run:
        act(run)
    return str(failure.value)


def test_data_that_cannot_be_read_are_refused(tmp_path: Path, quiet_threads: None) -> None:
    assert refused(tmp_path, lambda run: run.loader(7, 8)) == (
        "run.loader cannot read data of the type int.\n"
        "  Allowed: a dataset with __len__ and __getitem__ (map-style), one with __iter__ (iterable), a DataLoader of "
        "torch, or a source of shardway.data."
    )


def test_steps_need_a_model_and_an_optimizer(tmp_path: Path, quiet_threads: None) -> None:
    data = TensorDataset(torch.zeros(8, 6), torch.zeros(8, 1))
    assert refused(tmp_path / "a", lambda run: next(run.steps(run.loader(data, 8)))) == (
        "run.steps needs what is to be resumed and saved: call run.shard(model) before it."
    )
    assert refused(tmp_path / "b", lambda run: (run.shard(seeded()), next(run.steps(run.loader(data, 8))))) == (
        "run.steps needs what is to be resumed and saved: call run.optimizer(...) before it."
    )


def test_a_step_outside_the_loop_is_refused(tmp_path: Path, quiet_threads: None) -> None:
    batch = (torch.zeros(8, 6), torch.zeros(8, 1))
    assert refused(tmp_path, lambda run: run.step(run.shard(seeded()), batch, F.mse_loss)) == (
        "run.step was called before run.optimizer and `for batch in run.steps(loader)`."
    )


def test_an_error_of_the_script_is_the_scripts(tmp_path: Path, quiet_threads: None) -> None:
    """It passes unchanged; the run directory says what ended the run and can be gone on with."""
    with pytest.raises(ZeroDivisionError), open_tiny(tmp_path, lone_rank(), base=SCRIPT) as run:
        walk(run, on_step=lambda step, facts: 1 // (3 - step))
    assert RunDir(tmp_path).read_status()["state"] == "failed"
    assert read_column(tmp_path, "step") == [1, 2, 3]
    with open_tiny(tmp_path, lone_rank(), base=SCRIPT) as run:
        assert walk(run) == 12


def test_a_report_whose_modules_are_gone_leaves_the_run_as_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are loaded at the end of the run, when the installation may have changed."""
    monkeypatch.setitem(sys.modules, "shardway.watch.report", None)
    _write_report(RunDir(tmp_path))
    printed = capsys.readouterr().err
    assert printed.startswith("the report was not written: ModuleNotFoundError")
    assert f"`shardway report {tmp_path}`" in printed
