"""What a script of its own hands in as data: batches of any structure, collate functions, samplers, streams, a
DataLoader. What ranks and micro-batches compute is what one rank computes at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from pool import ranks
from runs import Died, layout, lone_rank, open_tiny, pool_ranks, read_column, read_named, train_line
from shardway.errors import UserError
from shardway.ranks.start import Ranks

QUIET = (
    "run.device=cpu",
    "run.threads=1",
    "train.validate_every=off",
    "checkpoint.every=off",
    "checkpoint.background=false",
    "data.record_ids=true",
)


def train(
    folder: Path,
    on: Ranks,
    data: Any,
    loss: Callable[..., Any],
    *words: str,
    steps: Any = 4,
    last: int | None = None,
    **loader: Any,
) -> list[float]:
    """The losses of a script with a linear model of four inputs; all ranks die after step `last`."""
    loader = {"batch_size": 8, **loader}
    return train_line(folder, on, data, loss, *words, base=QUIET, steps=steps, last=last, **loader)


def row(index: int) -> torch.Tensor:
    return torch.tensor([index, 1.0, -index, index % 5]) / 10


def named_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """Fails where names and rows do not belong together."""
    x, names = (batch["x"], batch["name"]) if not isinstance(batch, tuple | list) else batch
    assert [f"{float(each[0]):.1f}" for each in x] == list(names)
    return model(x).square().mean()


@dataclass
class Example:
    """A sample of a dataclass."""

    x: torch.Tensor
    name: str


class Made(Dataset[Any]):
    """Forty samples, made by a function."""

    def __init__(self, make: Callable[[int], Any], count: int = 40) -> None:
        self.make, self.count = make, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


def name(index: int) -> str:
    return f"{index / 10:.1f}"


def of_boxes(model: nn.Module, batch: Any) -> torch.Tensor:
    """The mean over samples of what each one's own boxes give."""
    images, targets = batch["images"], batch["targets"]
    assert [int(target["id"]) for target in targets] == [round(float(image[0]) * 10) for image in images]
    return torch.stack([model(t["boxes"]).mean() + model(i) for i, t in zip(images, targets, strict=True)]).mean()


def boxes_of(samples: list[Any]) -> Any:
    images, targets = zip(*samples, strict=True)
    return {"images": list(images), "targets": targets}


STRUCTURES: dict[str, tuple[Any, Any, Any]] = {
    "strings in a dict": (lambda i: {"x": row(i), "name": name(i)}, named_loss, None),
    "strings in a pair": (lambda i: (row(i), name(i)), lambda output, names: output.square().mean(), None),
    "a field that is None": (
        lambda i: {"x": row(i), "name": name(i), "mask": None, "deep": (None, {"m": None})},
        named_loss,
        None,
    ),
    "a field that is None here and there": (
        lambda i: {"x": row(i), "name": name(i), "mask": None if i % 3 else row(i)},
        lambda m, b: named_loss(m, b) + sum(0 if t is None else m(t).sum() for t in b["mask"]) / len(b["mask"]),
        None,
    ),
    "a dataclass": (
        lambda i: Example(row(i), name(i)),
        lambda m, b: named_loss(m, {"x": b.x, "name": b.name}),
        None,
    ),
    "boxes": (lambda i: (row(i), {"id": i, "boxes": row(i).repeat(1 + i % 3, 1)}), of_boxes, boxes_of),
    "a list of samples": (
        lambda i: {"x": row(i), "name": name(i)},
        lambda m, b: named_loss(m, {"x": torch.stack([s["x"] for s in b]), "name": [s["name"] for s in b]}),
        list,
    ),
    "padded": (
        lambda i: row(i).repeat(1 + i % 4, 1),
        lambda m, b: (m(b) * b.any(2, keepdim=True)).sum(1).square().mean(),
        lambda samples: nn.utils.rnn.pad_sequence(samples, batch_first=True),
    ),
    "packed": (
        lambda i: row(i).repeat(1 + i % 4, 1),
        lambda m, b: m(nn.utils.rnn.pad_packed_sequence(b, batch_first=True)[0]).pow(2).mean(2).sum(1).mean(),
        lambda samples: nn.utils.rnn.pack_sequence(samples, enforce_sorted=False),
    ),
}


@pytest.mark.parametrize("structure", ["strings in a dict", "a field that is None", "boxes", "packed"])
@pytest.mark.parametrize("micro", [1, 3])
def test_micro_batches_of_any_structure_are_the_batch(
    structure: str, micro: int, tmp_path: Path, quiet_threads: None
) -> None:
    make, loss, collate = STRUCTURES[structure]
    whole = train(tmp_path / "whole", lone_rank(), Made(make), loss, collate_fn=collate)
    cut = train(tmp_path / "cut", lone_rank(), Made(make), loss, f"train.micro_batch={micro}", collate_fn=collate)
    if structure != "packed":  # padding counts in its mean
        assert cut == pytest.approx(whole, rel=1e-5)
    assert len(cut) == 4


def train_first(rank: int, *arguments: Any, **options: Any) -> list[float]:
    """`train` on rank 0 alone; every rank has its losses."""
    return pool_ranks().gather(train(*arguments, **options) if rank == 0 else [])[0]


@ranks(2)
def test_two_ranks_take_any_structure_as_one_does(rank: int, tmp_path: Path) -> None:
    for number, (structure, (make, loss, collate)) in enumerate(STRUCTURES.items()):
        given = {"steps": 2, "collate_fn": collate}
        alone = train_first(rank, tmp_path / f"{number}", lone_rank(), Made(make), loss, **given)
        words = ("train.micro_batch=2", *layout(2, 1))
        folder = tmp_path / f"{number}-both"
        both = train(folder, pool_ranks(), Made(make), loss, *words, **given)
        if structure != "packed":
            assert both == pytest.approx(alone, rel=1e-5), structure


def refused(act: Callable[[], Any]) -> str:
    with pytest.raises(UserError) as failure:
        act()
    return str(failure.value)


def test_what_cannot_be_joined_or_cut_is_one_sentence(tmp_path: Path, quiet_threads: None) -> None:
    ragged = Made(lambda i: {"x": torch.ones(3 + i % 5)})
    text = refused(lambda: train(tmp_path / "a", lone_rank(), ragged, named_loss))
    assert text.startswith('sample["x"] has different shapes in the samples of one batch, so they cannot be stacked: [')
    assert "collate_fn" in text

    def collate(samples: list[Any]) -> Any:
        return {"x": torch.stack(samples), "classes": torch.ones(3)}

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return model(batch["x"]).mean() + batch["classes"].mean()

    assert len(train(tmp_path / "b", lone_rank(), Made(row), loss, collate_fn=collate)) == 4
    words = "train.micro_batch=4"
    text = refused(lambda: train(tmp_path / "c", lone_rank(), Made(row), loss, words, collate_fn=collate))
    assert text.startswith('batch["classes"] has the shape [3] in a batch of 8 samples, and it cannot be cut')


class Graphs:
    """A batch that is no tree: it moves to a device, and can only be used whole."""

    def __init__(self, samples: list[torch.Tensor]) -> None:
        self.x = torch.cat(samples)
        self.moved = 0

    def to(self, device: torch.device) -> Graphs:
        self.moved += 1
        return self


def graph_loss(model: nn.Module, batch: Graphs) -> torch.Tensor:
    assert batch.moved == 1
    return model(batch.x).mean()


def test_a_batch_that_is_no_tree_is_passed_whole(tmp_path: Path, quiet_threads: None) -> None:
    graphs = Made(lambda i: row(i).repeat(1 + i % 2, 1))
    assert len(train(tmp_path / "a", lone_rank(), graphs, graph_loss, collate_fn=Graphs)) == 4
    words = "train.micro_batch=4"
    text = refused(lambda: train(tmp_path / "b", lone_rank(), graphs, graph_loss, words, collate_fn=Graphs))
    assert text.startswith("batch is of the type Graphs in a batch of 8 samples, and it cannot be cut")


# --- orders

ROWS = TensorDataset(torch.stack([row(index) for index in range(40)]))


def mean_output(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch[0]).square().mean()


ORDERS: dict[str, Callable[[], dict[str, Any]]] = {
    "subset": lambda: {"sampler": SubsetRandomSampler(range(0, 40, 3))},
    "weighted": lambda: {"sampler": WeightedRandomSampler([1.0] * 39 + [9.0], 20)},
    "seeded": lambda: {"sampler": RandomSampler(ROWS, generator=torch.Generator().manual_seed(4))},
    "distributed": lambda: {"sampler": DistributedSampler(ROWS, num_replicas=2, rank=0)},
    "batches": lambda: {"batch_sampler": BatchSampler(RandomSampler(ROWS), 8, drop_last=False), "batch_size": None},
    "uneven batches": lambda: {"batch_sampler": [[0, 1, 2], [3], list(range(10))], "batch_size": None},
    "drop_last": lambda: {"drop_last": True, "batch_size": 12},
    "loader": lambda: {"dataset": DataLoader(ROWS, batch_size=8, shuffle=True), "batch_size": None},
}


def with_order(name: str) -> tuple[Any, dict[str, Any]]:
    options = ORDERS[name]()
    return options.pop("dataset", ROWS), options


@pytest.mark.parametrize("name", ORDERS)
def test_a_run_goes_on_in_the_order_of_its_sampler(name: str, tmp_path: Path, quiet_threads: None) -> None:
    for folder, every, lasts in (("through", "off", [None]), ("killed", "6 steps", [7, None])):
        for last in lasts:
            data, options = with_order(name)
            words = f"checkpoint.every={every}"
            try:
                train(tmp_path / folder, lone_rank(), data, mean_output, words, steps=10, last=last, **options)
            except Died:
                torch.rand(5)
    assert [event["step"] for event in read_named(tmp_path / "killed", "started")] == [0, 6]
    assert read_column(tmp_path / "killed", "ids") == read_column(tmp_path / "through", "ids")
    assert read_column(tmp_path / "killed") == read_column(tmp_path / "through")
    assert read_named(tmp_path / "killed", "data_order_noted") == []


@ranks(2)
def test_two_ranks_share_the_order_of_a_sampler(rank: int, tmp_path: Path) -> None:
    for name in ORDERS:
        data, options = with_order(name)
        alone = train_first(rank, tmp_path / f"{name}-alone", lone_rank(), data, mean_output, steps=6, **options)
        data, options = with_order(name)
        both = train(tmp_path / name, pool_ranks(), data, mean_output, *layout(1, 2), steps=6, **options)
        assert both == pytest.approx(alone, rel=1e-5), name


def ids_of(folder: Path, data: Any, *words: str, **options: Any) -> list[list[int]]:
    train(folder, lone_rank(), data, mean_output, *words, **{"batch_size": None, **options})
    return read_column(folder, "ids")


def test_a_loader_of_torch_is_taken_over(tmp_path: Path, quiet_threads: None) -> None:
    in_order = DataLoader(ROWS, batch_size=16)
    assert ids_of(tmp_path / "a", in_order) == [[(16 * s + i) % 40 for i in range(16)] for s in range(4)]
    assert ids_of(tmp_path / "b", in_order, batch_size=4)[1] == [4, 5, 6, 7]
    assert ids_of(tmp_path / "c", in_order, "train.global_batch=2")[1] == [2, 3]
    dropped = ids_of(tmp_path / "d", DataLoader(ROWS, batch_size=16, drop_last=True), steps="2 epochs")
    assert dropped == [[*range(16)], [*range(16, 32)]] * 2
    shuffled = ids_of(tmp_path / "e", DataLoader(ROWS, batch_size=10, shuffle=True))
    seen = [index for ids in shuffled for index in ids]
    assert sorted(seen) == list(range(40)) != seen
    assert ids_of(tmp_path / "f", DataLoader(ROWS, 10), "data.shuffle=true") == shuffled

    def collate(samples: list[Any]) -> Any:
        return (torch.stack([sample[0] for sample in samples]) * 0,)

    flat = train(tmp_path / "g", lone_rank(), DataLoader(ROWS, 8, collate_fn=collate), mean_output, batch_size=None)
    assert flat[0] == pytest.approx(float(nn_bias()) ** 2, rel=1e-5)


def nn_bias() -> torch.Tensor:
    torch.manual_seed(3)
    return nn.Linear(4, 1).bias.detach()


def test_orders_that_contradict_are_refused(tmp_path: Path, quiet_threads: None) -> None:
    def act(**options: Any) -> str:
        return refused(
            lambda: train(tmp_path / str(len(list(tmp_path.iterdir()))), lone_rank(), ROWS, mean_output, **options)
        )

    sampler = SequentialSampler(ROWS)
    assert act(sampler=sampler, batch_sampler=[[1]]) == "run.loader takes a sampler or a batch_sampler, not both."
    assert "says what a batch is" in act(batch_sampler=[[1], [2]])
    assert "leaves no batch: an epoch has 40 samples, a batch 41" in act(drop_last=True, batch_size=41)
    assert refused(lambda: train(tmp_path / "x", lone_rank(), 7, mean_output)).startswith(
        "run.loader cannot read data of the type int."
    )
    none = DataLoader(ROWS, batch_size=None)
    text = refused(lambda: train(tmp_path / "y", lone_rank(), none, mean_output, batch_size=None))
    assert text.startswith("the DataLoader has batch_size=None")
    words = ("train.global_batch=3",)
    options = {"batch_sampler": [[1, 2], [3, 4]], "batch_size": None}
    text = refused(lambda: train(tmp_path / "z", lone_rank(), ROWS, mean_output, *words, **options))
    assert text.startswith("the batch_sampler of run.loader gives batches of 2 samples, and train.global_batch is 3 (")


def test_a_collate_function_that_cannot_be_sent_is_used_here(tmp_path: Path, quiet_threads: None) -> None:
    options = {"collate_fn": lambda samples: (torch.stack([sample[0] for sample in samples]),), "workers": 2}
    with_workers = train(tmp_path / "a", lone_rank(), ROWS, mean_output, **options)
    (note,) = read_named(tmp_path / "a", "data_order_noted")
    assert note["reason"].startswith("data.workers is 2, and the collate_fn of run.loader cannot be sent to a loader")
    assert with_workers == train(tmp_path / "b", lone_rank(), ROWS, mean_output)


# --- streams


class Stream(IterableDataset[Any]):
    """Forty rows, some noise on each."""

    def __iter__(self) -> Iterator[Any]:
        for index in range(40):
            yield row(index) + torch.rand(4) / 100


class Sized(Stream):
    def __len__(self) -> int:
        return 40


def stream_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


@pytest.mark.parametrize("make", [Stream, Sized, lambda: DataLoader(Stream(), batch_size=8)])
def test_a_stream_is_trained_on_and_gone_on_with(make: Callable[[], Any], tmp_path: Path, quiet_threads: None) -> None:
    words = "checkpoint.every=6 steps"
    train(tmp_path / "through", lone_rank(), make(), stream_loss, steps=12)
    with pytest.raises(Died):
        train(tmp_path / "killed", lone_rank(), make(), stream_loss, words, steps=12, last=7)
    train(tmp_path / "killed", lone_rank(), make(), stream_loss, words, steps=12)
    assert [event["step"] for event in read_named(tmp_path / "killed", "started")] == [0, 6]
    assert read_column(tmp_path / "killed") == read_column(tmp_path / "through")
    notes = read_named(tmp_path / "through", "data_order_noted")
    assert ["run through from its beginning" in note["reason"] for note in notes] == [True]


@ranks(2)
def test_two_ranks_share_a_stream(rank: int, tmp_path: Path) -> None:
    alone = train(tmp_path / f"alone-{rank}", lone_rank(), Stream(), stream_loss, steps=6)
    both = train(tmp_path / "both", pool_ranks(), Stream(), stream_loss, *layout(1, 2), steps=6)
    assert both == pytest.approx(alone, rel=1e-5)


class Sharded(IterableDataset[Any]):
    """Gives each rank every second row."""

    def __iter__(self) -> Iterator[Any]:
        rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        return (row(index) for index in range(rank, 40, world))


@ranks(2)
def test_a_stream_that_shares_itself_is_not_shared_again(rank: int, tmp_path: Path) -> None:
    both = train(tmp_path / "both", pool_ranks(), Sharded(), stream_loss, *layout(1, 2), steps=5)
    rows = TensorDataset(torch.stack([row(index) for index in range(40)]))
    alone = train(tmp_path / f"alone-{rank}", lone_rank(), rows, mean_output, "data.shuffle=false", steps=5)
    assert both == pytest.approx(alone, rel=1e-5)
    (note,) = read_named(tmp_path / "both", "data_split_by_rank")
    assert note["reason"].startswith("Sharded gives each rank samples of its own")


def test_a_stream_without_a_length_needs_one_in_steps(tmp_path: Path, quiet_threads: None) -> None:
    assert refused(lambda: train(tmp_path / "a", lone_rank(), Stream(), stream_loss, steps=None)) == (
        "Stream has no length, so nothing says how long the run is.\n"
        "  To do: say it in steps, run.steps(loader, 1000) or train.steps = 1000."
    )
    text = refused(lambda: train(tmp_path / "b", lone_rank(), Stream(), stream_loss, steps="3 epochs"))
    assert text.startswith("train.steps is \"3 epochs\" (run.steps(length='3 epochs')), and Stream has no length")
    assert len(train(tmp_path / "c", lone_rank(), Sized(), stream_loss, steps="2 epochs")) == 10
    text = refused(lambda: train(tmp_path / "d", lone_rank(), Stream(), stream_loss, sampler=[1, 2]))
    assert text.startswith(
        "run.loader takes no sampler with Stream, an iterable dataset, whose samples come in its own"
    )
    text = refused(lambda: train(tmp_path / "e", lone_rank(), Stream(), stream_loss, drop_last=True))
    assert text.startswith("run.loader takes no drop_last with Stream")


class Unseeded:
    """A sampler that gives each rank an order of its own."""

    def __len__(self) -> int:
        return 40

    def __iter__(self) -> Iterator[int]:
        first = torch.distributed.get_rank()
        return iter([(first + index) % 40 for index in range(40)])


@ranks(2)
def test_a_sampler_that_differs_on_ranks_is_refused(rank: int, tmp_path: Path) -> None:
    text = refused(lambda: train(tmp_path, pool_ranks(), ROWS, mean_output, *layout(1, 2), sampler=Unseeded()))
    assert text.startswith("the sampler of run.loader gives each rank another order")


def test_other_data_in_the_same_run_are_refused_in_the_words_of_a_script(tmp_path: Path, quiet_threads: None) -> None:
    """Also of a second loop of the same script."""

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return model(batch).mean()

    first = [row(index) for index in range(64)]
    words = ("checkpoint.every=2 steps",)
    others = ([row(index) for index in range(48)], torch.stack(first), Stream())
    with open_tiny(tmp_path, lone_rank(), *words, base=QUIET) as run:
        model = run.shard(nn.Linear(4, 1))
        run.optimizer(torch.optim.SGD, model, lr=0.01)
        for batch in run.steps(run.loader(first, batch_size=8), 2):
            run.step(model, batch, loss)
        with pytest.raises(UserError, match=r"run\.loader was given list of 48, the checkpoint says list of 64"):
            next(run.steps(run.loader(others[0], batch_size=8)))
    for data in others:
        with pytest.raises(UserError) as failure:
            train(tmp_path, lone_rank(), data, loss, *words)
        assert str(failure.value).splitlines()[1] == (
            "  The position in the data would mean other samples, so nothing was trained. To do: restore the data, "
            "give these a run of their own (shardway.start(directory=...)), or start over with "
            "shardway.start(fresh=True), which sets the run directory aside."
        )
    with pytest.raises(UserError, match=r"ask for more steps, or start over with shardway.start\(fresh=True\)"):
        train(tmp_path, lone_rank(), first, loss, *words, steps=1)
    assert len(read_column(tmp_path)) == 2
    train(tmp_path, lone_rank(), first, loss, *words)
    assert len(read_column(tmp_path)) == 4
