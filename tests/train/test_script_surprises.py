"""What scripts do that is rare and right: they seed by themselves, change their folder, hold odd tensors, have
optimizers of their own."""

from __future__ import annotations

import copy
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ExponentialLR, StepLR
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import Dataset, Subset, TensorDataset, WeightedRandomSampler

import shardway
import warm
from pool import ranks
from runs import lone_rank, open_tiny, pool_ranks, read_column, read_named
from shardway.checkpoint.state import Unstorable, put_state_together, seed_all, take_state_apart
from shardway.errors import LostContact, ShardwayError, UserError
from shardway.ranks import stop
from shardway.ranks.start import Ranks
from shardway.rundir.directory import RunDir
from shardway.train import loop

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


DRAW = """
import random, sys
import numpy as np
import shardway

if "seeded" in sys.argv:
    np.random.seed(5)
    random.seed(5)
if "drawn" in sys.argv:
    np.random.rand(), random.random()
keys = [word for word in sys.argv if "=" in word]
with shardway.start("run.device=cpu", "run.threads=1", "run.telemetry=off", *keys, directory=sys.argv[1]):
    print(np.random.rand(), random.random())
"""


@pytest.mark.parametrize("words", [(), ("train.seed=3",)])
def test_generators_of_numpy_and_python_are_seeded_where_the_script_has_not_touched_them(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    """So that a run that dies before its first save begins again with the same numbers; `train.seed` seeds either."""
    (tmp_path / "draw.py").write_text(DRAW)
    drawn = {}
    with warm.starts():
        for name in ("first", "second", "seeded", "drawn"):
            command = [sys.executable, "draw.py", name, name, *words]
            ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
            assert ended.returncode == 0, ended.stderr
            drawn[name] = ended.stdout.split()[-2:]
    own = [str(np.random.RandomState(5).rand()), str(random.Random(5).random())]
    assert drawn["first"] == drawn["second"] != own
    assert drawn["seeded"] == (drawn["first"] if words else own)
    assert (drawn["drawn"] == drawn["first"]) == bool(words)


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


@ranks(2)
def test_what_torch_would_average_a_second_time_is_refused(rank: int, tmp_path: Path) -> None:
    with open_tiny(tmp_path, pool_ranks(), base=KEYS) as run:
        model = run.shard(nn.Linear(4, 1))
        run.optimizer(torch.optim.SGD, model, lr=0.01)
        wrapped = DistributedDataParallel(model)
        for batch in run.steps(run.loader(Noisy(), batch_size=4), 2):
            if run.step_number == 0:
                with pytest.raises(UserError, match=r"DistributedDataParallel around the Linear .*\n.*give it what"):
                    run.step(wrapped, batch, F.mse_loss)
            run.step(model, batch, F.mse_loss)


@ranks(2)
def test_what_torch_would_shard_a_second_time_is_refused(rank: int, tmp_path: Path) -> None:
    with open_tiny(tmp_path, pool_ranks(), base=KEYS) as run:
        model = run.shard(nn.Linear(4, 1))
        fully_shard(model)
        run.optimizer(torch.optim.SGD, model, lr=0.01)
        with pytest.raises(UserError, match=r"run\.steps: .* FSDPModule around .*\n.*set parallel\.dp_shard"):
            next(run.steps(run.loader(Noisy(), batch_size=4), 2))
        assert not (tmp_path / "events").exists()


@ranks(2)
def test_a_part_of_the_data_for_each_rank_is_refused(rank: int, tmp_path: Path) -> None:
    for part, what in (
        (range(rank, 32, 2), r"Subset of 16, of other samples"),
        (range(20 + rank), r"Subset of 20 on rank 0 and Subset of 21 on rank 1"),
    ):
        with open_tiny(tmp_path, pool_ranks(), base=KEYS) as run:
            model = run.shard(nn.Linear(4, 1))
            run.optimizer(torch.optim.SGD, model, lr=0.01)
            with pytest.raises(UserError, match=what):
                next(run.steps(run.loader(Subset(Noisy(), part), batch_size=4), 2))
    with open_tiny(tmp_path, pool_ranks(), base=KEYS) as run:  # perhaps drawn at random
        model = run.shard(nn.Linear(4, 1))
        run.optimizer(torch.optim.SGD, model, lr=0.01)
        data = TensorDataset(torch.rand(8, 4), torch.rand(8, 1))
        for batch in run.steps(run.loader(data, batch_size=4), 2):
            run.step(model, batch, F.mse_loss)
    if rank == 0:
        assert "TensorDataset of 8, of other samples" in read_named(tmp_path, "data_order_noted")[0]["reason"]


def test_weights_of_a_sampler_that_the_script_changes_go_on(tmp_path: Path, quiet_threads: None) -> None:
    for name, lengths in (("whole", (8,)), ("parted", (2, 6, 8))):
        for last in lengths:
            torch.manual_seed(1)
            with open_tiny(tmp_path / name, lone_rank(), base=(*SAVED, "data.workers=0")) as run:
                model = run.shard(nn.Linear(4, 1))
                run.optimizer(torch.optim.SGD, model, lr=0.01)
                sampler = WeightedRandomSampler([1.0] * 32, 8)
                for batch in run.steps(run.loader(Noisy(), batch_size=4, sampler=sampler), last):
                    run.step(model, batch, F.mse_loss)
                    sampler.weights[run.step_number] = 100.0
    assert read_column(tmp_path / "parted") == read_column(tmp_path / "whole")


class Harder(Noisy):
    """Samples of a level that a script raises."""

    def __init__(self) -> None:
        self.level, self.reads = 0, 0

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.reads += 1
        return torch.full((4,), float(self.level)), torch.ones(1)

    def state_dict(self) -> dict[str, int]:
        return {"level": self.level}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.level = state["level"]


@pytest.mark.parametrize("keeps", [True, False], ids=["kept", "not kept"])
def test_a_dataset_that_the_script_changes(keeps: bool, tmp_path: Path, quiet_threads: None) -> None:
    for name, lengths in (("whole", (4,)), ("parted", (2, 4))):
        for last in lengths:
            torch.manual_seed(1)
            data = Harder()
            with open_tiny(tmp_path / name, lone_rank(), base=(*SAVED, "data.workers=0")) as run:
                model = run.shard(nn.Linear(4, 1))
                run.optimizer(torch.optim.SGD, model, lr=0.01)
                if keeps:
                    run.keep("data", data)
                for batch in run.steps(run.loader(data, batch_size=4), last):
                    run.step(model, batch, F.mse_loss)
                    data.level += 1
    notes = [event["reason"] for event in read_named(tmp_path / "whole", "data_order_noted")]
    if keeps:
        assert not notes
        assert read_column(tmp_path / "parted") == read_column(tmp_path / "whole")
    else:
        assert [note.split(":")[0] for note in notes] == [
            "the script has changed Harder.level from 0 to 1 between two batches, which no checkpoint holds"
        ]


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


OWN_GENERATORS: dict[str, tuple[Callable[[int], Any], Callable[[Any], float]]] = {
    "torch": (lambda rank: torch.Generator().manual_seed(rank), lambda own: float(torch.rand(1, generator=own))),
    "numpy": (lambda rank: np.random.default_rng(rank), lambda own: float(own.random())),
    "twister": (lambda rank: np.random.Generator(np.random.MT19937(rank)), lambda own: float(own.random())),
    "legacy": (lambda rank: np.random.RandomState(rank), lambda own: float(own.normal())),
    "python": (lambda rank: random.Random(rank), lambda own: own.gauss(0, 1)),
}


def draw(name: str, folder: Path, rank: int, on: Ranks, lengths: tuple[int, ...]) -> list[float]:
    """What a script draws from a generator that it keeps, in several starts."""
    make, take = OWN_GENERATORS[name]
    drawn = []
    for last in lengths:
        with open_tiny(folder, on, base=SAVED) as run:
            model = run.shard(nn.Linear(4, 1))
            run.optimizer(torch.optim.SGD, model, lr=0.01)
            own = run.keep("own", make(rank))
            for batch in run.steps(run.loader(Noisy(), batch_size=4), last):
                run.step(model, batch, F.mse_loss)
                drawn.append(take(own))
    return drawn


@pytest.mark.parametrize("name", OWN_GENERATORS)
def test_a_kept_generator_goes_on(name: str, tmp_path: Path, quiet_threads: None) -> None:
    assert draw(name, tmp_path, 3, lone_rank(), (2, 4)) == draw(name, tmp_path / "whole", 3, lone_rank(), (4,))


@ranks(2)
def test_a_kept_generator_goes_on_on_each_rank(rank: int, tmp_path: Path) -> None:
    parted = draw("numpy", tmp_path / "parted", rank, pool_ranks(), (2, 4))
    generator = np.random.default_rng(rank)
    assert parted == [float(generator.random()) for _ in range(4)]
    if rank == 0:  # a single rank goes on as the first, in a run that two have saved
        assert draw("numpy", tmp_path / "parted", rank, lone_rank(), (6,)) == [float(generator.random()) for _ in "56"]


def test_a_scaler_goes_on(tmp_path: Path, quiet_threads: None) -> None:
    scales = []
    for last in (2, 4):
        with open_tiny(tmp_path, lone_rank(), base=SAVED) as run:
            model = run.shard(nn.Linear(4, 1))
            optimizer = run.optimizer(torch.optim.SGD, model, lr=0.01)
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
            for inputs, targets in run.steps(run.loader(Noisy(), batch_size=4), last):
                run.backward(scaler.scale(F.mse_loss(model(inputs), targets)))
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                scales.append(scaler.get_scale())
    assert scales == [16.0, 32.0, 64.0, 128.0]


class Tally:
    """A number of a script."""

    def __init__(self, value: int) -> None:
        self.value = value

    def state_dict(self) -> dict[str, int]:
        return vars(self)

    def load_state_dict(self, state: dict[str, int]) -> None:
        vars(self).update(state)


@ranks(2)
def test_what_one_rank_alone_keeps_is_named(rank: int, tmp_path: Path) -> None:
    with open_tiny(tmp_path, pool_ranks(), base=SAVED) as run:
        model = run.shard(nn.Linear(4, 1))
        run.optimizer(torch.optim.SGD, model, lr=0.01)
        run.keep("alike", Tally(1))
        run.keep("unlike", Tally(rank))
        run.keep(f"of-{rank}", Tally(1))
        for batch in run.steps(run.loader(Noisy(), batch_size=4), 2):
            run.step(model, batch, F.mse_loss)
    if rank == 0:
        (event,) = read_named(tmp_path, "script_noted")
        assert event["reason"].split(". ")[0] == (
            "unlike is not the same on all ranks, and all resume from that of rank 0, which is saved; "
            "of-0 is kept by run.keep on 1 of 2 ranks, and resumes on these alone; "
            "of-1 is kept by run.keep on rank 1 and not on rank 0, so it is not saved"
        )


@ranks(2)
def test_a_learning_rate_of_one_rank_alone_is_refused(rank: int, tmp_path: Path) -> None:
    words = r"not the same on all ranks: 0\.5 on rank 0 and 0\.1 on rank 1"
    with pytest.raises(UserError, match=words), open_tiny(tmp_path, pool_ranks(), base=SAVED) as run:
        model = run.shard(nn.Linear(4, 1))
        optimizer = run.optimizer(torch.optim.SGD, model, lr=0.5)
        for batch in run.steps(run.loader(Noisy(), batch_size=4), 4):
            run.step(model, batch, F.mse_loss)
            if rank == 1:
                optimizer.param_groups[0]["lr"] = 0.1
    assert not RunDir(tmp_path).checkpoint_steps()


@ranks(2)
def test_a_group_that_a_script_has_destroyed_is_named(rank: int, tmp_path: Path) -> None:
    words = r"destroyed before the end of the run.*\n.*call run\.close\(\) before"
    with pytest.raises(UserError, match=words), open_tiny(tmp_path, pool_ranks(), base=SAVED) as run:
        model = run.shard(nn.Linear(4, 1))
        run.optimizer(torch.optim.SGD, model, lr=0.5)
        for batch in run.steps(run.loader(Noisy(), batch_size=4), 4):
            run.step(model, batch, F.mse_loss)
            break
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


@ranks(2)
def test_a_mode_of_one_rank_alone_is_named(rank: int, tmp_path: Path) -> None:
    with open_tiny(tmp_path, pool_ranks(), base=SAVED) as run:
        model = run.shard(nn.Linear(4, 1))
        run.optimizer(torch.optim.SGD, model, lr=0.5)
        for batch in run.steps(run.loader(Noisy(), batch_size=4), 4):
            run.step(model, batch, F.mse_loss)
            if rank == 0:
                model.eval()
    if rank == 0:
        (event,) = read_named(tmp_path, "script_noted")
        assert event["reason"].startswith("train() and eval() in model: not the same on all ranks")


@ranks(2)
def test_statistics_over_ranks_on_a_cpu_are_refused(rank: int, tmp_path: Path) -> None:
    with open_tiny(tmp_path, pool_ranks(), base=SAVED) as run, pytest.raises(UserError, match=r"bn: a SyncBatchNorm, "):
        run.shard(nn.Sequential(OrderedDict(bn=nn.SyncBatchNorm(4), last=nn.Linear(4, 1))))


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


@pytest.mark.parametrize("keeps", [True, False], ids=["kept", "found"])
def test_an_average_that_is_made_late(
    keeps: bool, tmp_path: Path, quiet_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is found after the first save too; where its state waits for it, its own updates are not undone."""
    monkeypatch.setattr(loop, "SEARCH_PACE", 0)
    counts = []
    for name, lengths in (("whole", (6,)), ("parted", (4, 6))):
        for last in lengths:
            torch.manual_seed(1)
            average = None
            with open_tiny(tmp_path / name, lone_rank(), base=SAVED) as run:
                model = run.shard(nn.Linear(4, 1))
                run.optimizer(torch.optim.SGD, model, lr=0.1)
                for batch in run.steps(run.loader(Noisy(), batch_size=4), last):
                    run.step(model, batch, F.mse_loss)
                    if run.step_number >= 2:
                        if average is None:
                            average = AveragedModel(model)
                            if keeps:
                                run.keep("average-model", average)
                        average.update_parameters(model)
            counts.append(int(average.n_averaged))
    assert counts == ([4, 2, 4] if keeps else [4, 2, 2])
    notes = [event["reason"] for event in read_named(tmp_path / "parted", "script_noted")]
    assert keeps or "average-model was made after the run was resumed" in notes[0]


def test_what_a_script_changes_and_no_checkpoint_holds_is_named(
    tmp_path: Path, quiet_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "SEARCH_PACE", 0)
    with open_tiny(tmp_path, lone_rank(), base=SAVED) as run:
        model = run.shard(nn.Sequential(nn.Dropout(0.1), nn.Linear(4, 1)))
        run.optimizer(torch.optim.SGD, model, lr=0.1)
        reference, average, kept = (copy.deepcopy(model) for _ in range(3))
        run.keep("kept", kept)
        for batch in run.steps(run.loader(Noisy(), batch_size=4), 4):
            run.step(model, batch, F.mse_loss)
            model[0].p += 0.1
            for each in (average, kept):
                each[1].weight.data.lerp_(model[1].weight.data, 0.5)
    assert reference is not average
    assert [event["reason"].split(",")[0] for event in read_named(tmp_path, "script_noted")] == [
        "model.0.p is no longer 0.1",
        "the script changes a copy of model (copy.deepcopy)",
    ]


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


def test_another_class_is_named_and_not_its_defaults(
    tmp_path: Path, quiet_threads: None, capfd: pytest.CaptureFixture[str]
) -> None:
    kinds = ((torch.optim.Adam, StepLR, {"step_size": 2}), (torch.optim.AdamW, ExponentialLR, {"gamma": 0.5}))
    for last, (kind, course, arguments) in zip((2, 4), kinds, strict=True):
        with shardway.start(*SAVED, directory=tmp_path) as run:
            model = run.shard(nn.Linear(4, 1))
            optimizer = run.optimizer(kind, model, lr=0.1 * last)
            run.scheduler(course, optimizer, name="course", **arguments)
            for batch in run.steps(run.loader(Noisy(), batch_size=4), last):
                run.step(model, batch, F.mse_loss)
    assert "optimizer was Adam when step-000000002 was saved and is AdamW now" in capfd.readouterr().err
    changed = read_named(tmp_path, "started")[-1]["changed"]
    assert changed == {
        "train.steps": ["2 steps", "4 steps"],
        "optimizer": ["Adam", "AdamW"],
        "optimizer.lr": [0.2, 0.4],
        "course": ["StepLR", "ExponentialLR"],
    }


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


# --- what a refusal says to a script


def test_a_script_is_not_sent_to_options_of_the_command_line(tmp_path: Path, quiet_threads: None) -> None:
    strange, other = tmp_path / "strange", tmp_path / "other"
    (strange / "thesis").mkdir(parents=True)
    with pytest.raises(UserError) as refused:
        shardway.start(*KEYS, directory=strange)
    said = [str(refused.value)]
    for keys, kind, steps in (
        ((), torch.optim.Adam, 2),
        ((), torch.optim.SGD, 2),
        (("train.seed=3",), torch.optim.Adam, 2),
    ):
        with shardway.start(*SAVED, *keys, directory=other) as run:
            model = run.shard(nn.Linear(4, 1))
            run.optimizer(kind, model, lr=0.1)
            try:
                for batch in run.steps(run.loader(Noisy(), batch_size=4), steps):
                    run.step(model, batch, F.mse_loss)
            except ShardwayError as error:
                said.append(str(error))
    assert len(said) == 3, said
    for message in said:
        assert "shardway.start(" in message
        assert not re.search(r"(?<!\w)--(dir|fresh)", message)
