"""Orders that samplers of torch give: the same from any position on, whatever was drawn before."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from shardway.data import samplers
from shardway.data.loader import Share, StepLoader
from shardway.data.order import SampleOrder, Skips
from shardway.data.samplers import AnyOrder, BatchOrder, SamplerOrder, WholeBatches
from shardway.errors import UserError

DATA = TensorDataset(torch.arange(10))


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Shuffled(Sampler[int]):
    """Draws from one of the generators of the process."""

    def __init__(self, how: str) -> None:
        self.how = how

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[int]:
        ids = list(range(10))
        if self.how == "python":
            random.shuffle(ids)
        else:
            np.random.shuffle(ids)
        return iter(ids)


class Rotated(Sampler[int]):
    """Keeps a state of its own."""

    def __init__(self) -> None:
        self.begun = 0

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[int]:
        self.begun += 1
        return iter((np.arange(10) + self.begun) % 10)


SAMPLERS: dict[str, Any] = {
    "sequential": lambda: SequentialSampler(DATA),
    "random": lambda: RandomSampler(DATA),
    "random with its generator": lambda: RandomSampler(DATA, generator=seeded(5)),
    "subset": lambda: SubsetRandomSampler([1, 3, 5, 7]),
    "weighted": lambda: WeightedRandomSampler([1.0] * 9 + [9.0], 12),
    "weighted with its generator": lambda: WeightedRandomSampler([1.0] * 10, 6, generator=seeded(5)),
    "python": lambda: Shuffled("python"),
    "numpy": lambda: Shuffled("numpy"),
    "with a state": Rotated,
    "distributed": lambda: DistributedSampler(DATA, num_replicas=2, rank=1, seed=3),
    "a list": lambda: [9, 8, 7],
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_an_order_is_the_same_from_any_position_on(name: str) -> None:
    """As in a process that begins there: whatever was drawn in it before, and after going back."""
    order = SamplerOrder(SAMPLERS[name](), 7)
    state = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    positions = np.arange(5 * order.samples)
    through = order.ids(positions).tolist()
    assert torch.equal(torch.get_rng_state(), state[0])
    assert (np.random.get_state()[1].tolist(), random.getstate()) == state[1:]
    torch.rand(3)
    random.random()
    later = SamplerOrder(SAMPLERS[name](), 7)
    start = 3 * order.samples + 2
    assert later.ids(positions[start:]).tolist() == through[start:]
    if name != "with a state":
        assert later.ids(positions).tolist() == order.ids(positions).tolist() == through


@pytest.mark.parametrize("name", SAMPLERS)
def test_an_epoch_that_is_read_in_parts_is_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where fewer parts are kept than an epoch has, and something else draws between two parts."""
    whole = SamplerOrder(SAMPLERS[name](), 7)
    positions = np.arange(4 * whole.samples)
    through = whole.ids(positions).tolist()
    for block, kept in ((4, 4), (3, 2), (1, 1)):
        monkeypatch.setattr(samplers, "_BLOCK", block)
        monkeypatch.setattr(samplers, "_KEPT", kept)
        order = SamplerOrder(SAMPLERS[name](), 7)
        found = []
        for part in np.array_split(positions, 11):
            found += order.ids(part).tolist()
            torch.rand(2)
            np.random.rand()
            random.random()
        assert found == through
        start = 2 * whole.samples + 2
        assert SamplerOrder(SAMPLERS[name](), 7).ids(positions[start:]).tolist() == through[start:]
        if name != "with a state":
            assert order.ids(positions[1:3]).tolist() == through[1:3]
    monkeypatch.setattr(samplers, "_BLOCK", 1)
    with pytest.raises(UserError, match="gives 3 in epoch 1"):
        SamplerOrder(Wrong(5), 0).ids(np.arange(5))
    with pytest.raises(UserError, match="gives more than 2 in epoch 1"):
        SamplerOrder(Wrong(2), 0).ids(np.arange(2))


def test_a_sampler_without_an_end_is_read_as_far_as_is_needed() -> None:
    """As people write it who count in steps; it took all memory, and then the run."""
    many = 10**10
    for make in (
        lambda: RandomSampler(DATA, replacement=True, num_samples=many),
        lambda: RandomSampler(DATA, replacement=True, num_samples=many, generator=seeded(3)),
        lambda: range(many),
    ):
        order = SamplerOrder(make(), 1)
        assert order.samples == many
        through = order.ids(np.arange(40)).tolist()
        assert SamplerOrder(make(), 1).ids(np.arange(30, 40)).tolist() == through[30:]
    batches = BatchOrder(BatchSampler(RandomSampler(DATA, replacement=True, num_samples=many), 4, drop_last=True), 1)
    assert (batches.size, batches.samples) == (4, many)
    assert len(batches.batch(5)) == 4


def test_an_epoch_is_what_the_sampler_gives() -> None:
    alone = RandomSampler(DATA, generator=seeded(5))
    epochs = [list(alone) for _ in range(3)]
    order = SamplerOrder(SAMPLERS["random with its generator"](), 0)
    assert order.ids(np.arange(30)).reshape(3, 10).tolist() == epochs
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_the_order_of_a_distributed_sampler_has_all_samples() -> None:
    order = SamplerOrder(SAMPLERS["distributed"](), 0)
    assert sorted(order.ids(np.arange(10)).tolist()) == list(range(10))
    assert order.ids(np.arange(10)).tolist() != order.ids(np.arange(10, 20)).tolist()


def test_batches_of_a_distributed_sampler_are_those_of_all_ranks() -> None:
    inner = DistributedSampler(DATA, num_replicas=2, rank=1, seed=3)
    order = BatchOrder(BatchSampler(inner, 4, drop_last=False), 0)
    epochs = [[order.batch(3 * epoch + number).tolist() for number in range(3)] for epoch in range(2)]
    assert [sorted(sum(epoch, [])) for epoch in epochs] == [list(range(10))] * 2  # noqa: RUF017
    assert epochs[0] != epochs[1]


def test_samplers_that_may_differ_are_known() -> None:
    hidden = {name: SamplerOrder(make(), 0).hidden_state for name, make in SAMPLERS.items()}
    assert [name for name, is_hidden in hidden.items() if is_hidden] == ["python", "numpy", "with a state"]
    assert not BatchOrder(BatchSampler(RandomSampler(DATA), 4, drop_last=False), 0).hidden_state


class Endless(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class Wrong(Endless):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length


@pytest.mark.parametrize(
    ("sampler", "first_line"),
    [
        (Endless(), "the sampler Endless of run.loader has no length, so its order cannot be resumed."),
        (Wrong(0), "the sampler Wrong of run.loader has the length 0; it must give at least one."),
        (
            Wrong(5),
            "the sampler Wrong of run.loader says that its length is 5, and gives 3 in epoch 1: positions in such an "
            "order cannot be counted.",
        ),
        (
            Wrong(2),
            "the sampler Wrong of run.loader says that its length is 2, and gives more than 2 in epoch 1: positions in "
            "such an order cannot be counted.",
        ),
        (["a", "b"], "a sampler of run.loader gives 'a', and a sample is read by its number."),
    ],
)
def test_an_order_that_cannot_be_resumed_is_refused(sampler: Any, first_line: str) -> None:
    with pytest.raises(UserError) as failure:
        SamplerOrder(sampler, 0).ids(np.arange(2))
    assert str(failure.value).splitlines()[0] == first_line


@pytest.mark.parametrize("order", [SampleOrder(10, 3), SamplerOrder(list(range(10)), 3)])
def test_whole_batches_leave_the_rest_of_each_epoch_out(order: Any) -> None:
    whole = WholeBatches(order, 8)
    found = whole.ids(np.arange(16)).tolist()
    assert found == order.ids(np.concatenate([np.arange(8), np.arange(10, 18)])).tolist()


def read(order: AnyOrder | BatchOrder, size: int, world: int, position: int, steps: int) -> list[list[int]]:
    streams = [StepLoader(DATA, order, Share(size, rank, world)).batches(position, steps) for rank in range(world)]
    return [np.concatenate([batch.ids for batch in step]).tolist() for step in zip(*streams, strict=True)]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_batches_of_a_batch_sampler_are_shared_as_they_are(world: int) -> None:
    """Also one that is smaller than the others, or than the number of ranks."""
    batches = [[0, 1, 2, 3], [4, 5], [6], [7, 8, 9]]
    order = BatchOrder(batches, 0)
    assert (order.size, order.samples) == (4, 16)
    assert read(order, 4, world, 0, 6) == [*batches, *batches[:2]]
    assert read(order, 4, world, 12, 2) == [batches[3], batches[0]]
    batch = next(StepLoader(DATA, order, Share(4, 0, 3)).batches(8))
    assert (batch.ids.size, len(batch.data[0])) == (0, 1)


def test_steps_of_a_batch_sampler_are_skipped_whole() -> None:
    order = BatchOrder([[0, 1], [2, 3], [4]], 0)
    loader = StepLoader(DATA, order, Share(2))
    assert [batch.ids.tolist() for batch in loader.batches(0, 2, Skips([(2, 4)]))] == [[0, 1], [4]]
    with pytest.raises(UserError, match="spans whose ends are multiples of 2"):
        list(loader.batches(0, 2, Skips([(1, 3)])))


@pytest.mark.parametrize("block", [4, 100])
@pytest.mark.parametrize("epochs_at_will", [False, True])
def test_another_process_goes_on_from_any_position(
    block: int, epochs_at_will: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its generator was seeded otherwise; where the sampler stood is all that it is told, in the midst of an epoch that
    is read in blocks too, with several epochs read ahead."""
    monkeypatch.setattr(samplers, "_BLOCK", block)

    class OfEpochs(RandomSampler):
        def set_epoch(self, epoch: int) -> None:
            """Counts nothing: the generator does."""

    make = OfEpochs if epochs_at_will else RandomSampler
    for replacement in (False, True):
        for position in (0, 3, 4, 9, 10, 17, 29):
            for ahead in (1, 6, 15):
                here, there = (
                    SamplerOrder(make(DATA, replacement=replacement, num_samples=10, generator=seeded(seed)), 5)
                    for seed in (1, 2)
                )
                expected = here.ids(np.arange(60))
                here = SamplerOrder(make(DATA, replacement=replacement, num_samples=10, generator=seeded(1)), 5)
                here.ids(np.arange(position + ahead))
                there.go_on(here.stands(position // 10))
                found = there.ids(np.arange(position, 60))
                assert found.tolist() == expected[position:].tolist()
                assert here.ids(np.arange(position, 60)).tolist() == expected[position:].tolist()
