"""Samplers and batch samplers over all ranks, and iterable datasets with a state.

Invariants:
- Taking states costs a small part of the time of reading.
- The same sampler with the same seed gives the same ids, unless it draws from something not named below.

A state is taken between two batches. After it is loaded, the next sample is the one that would have come. It is kept as
bytes, since the dataset may go on changing the object that it returned.

Position p is element i of the sampler in epoch e, with (e, i) = divmod(p, its length). While a sampler runs, the random
generators of torch, numpy and Python are seeded by (seed, epoch); afterwards they are restored. A sampler's own
generator starts as it was when the loader was made, and earlier epochs are run through first, so a resumed run has the
order of an uninterrupted one. The states of generators, and of a sampler with a state, at the beginning of the epochs
where a run resumes can be moved to another process (`SamplerStands`).
"""

from __future__ import annotations

import contextlib
import itertools
import pickle
import random
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from shardway.data.order import BlendOrder, Ids, SampleOrder, derive_keys
from shardway.data.window_order import WindowOrder
from shardway.errors import UserError

# --- Iterable datasets with a state: `state_dict()` and `load_state_dict(state)`, in the form of torchdata's
# StatefulDataLoader, of the dataset or of the iterator that it gives

_SHARE = 0.1
"""Fraction of the time that states may cost; if one takes long, the next batches have none."""


def has_state(thing: Any) -> bool:
    """Whether it has a state."""
    return all(callable(getattr(thing, name, None)) for name in ("state_dict", "load_state_dict"))


def read_state(thing: Any) -> bytes | None:
    """Its current state; None if it has none, or none yet."""
    if not has_state(thing):
        return None
    try:
        state = thing.state_dict()
        return None if state is None else pickle.dumps(state)
    except Exception:  # the dataset is run through then, which is reported
        return None


def load_state(thing: Any, state: bytes) -> None:
    """Load a state; errors pass through."""
    thing.load_state_dict(pickle.loads(state))


def rewind(thing: Any, begin: bytes | None) -> None:
    """Return to the beginning, unless it is there."""
    if begin is not None and read_state(thing) != begin:
        load_state(thing, begin)


@dataclass(frozen=True)
class StreamSnapshot:
    """The place of a stream of samples: `given` samples in all, `in_epoch` of them in `epoch`, and the state of its
    dataset (`of_iterator`: of the dataset's iterator). `following`: the digest of the sample that came next, "" if it
    is not known."""

    given: int
    epoch: int
    in_epoch: int
    of_iterator: bool
    state: bytes
    following: str = ""


@dataclass
class SnapshotPace:
    """How often the state of a stream (an object with `snapshot()`) may be taken."""

    _next: float = 0.0

    def take(self, stream: Any) -> StreamSnapshot | None:
        """The current place of a stream; also None if the last one took too long."""
        started = time.perf_counter()
        if started < self._next:
            return None
        snapshot = stream.snapshot()
        ended = time.perf_counter()
        self._next = ended + (ended - started) * (1 / _SHARE - 1)
        return snapshot


# --- The order of samples of a torch sampler as a function of the position, so that a run can resume anywhere

_STATELESS = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
_BLOCK = 2**16
"""Elements read from a sampler at once. A longer epoch, such as that of RandomSampler(replacement=True,
num_samples=10**10), is read only as far as needed."""
_KEPT = 64
"""Blocks that are kept: going back after a spike must not run through a sampler again."""


@dataclass
class RandomStates:
    """The generators of torch (CPU), numpy and Python that data are drawn with."""

    torch_cpu: torch.Tensor
    numpy: Any
    python: Any

    @staticmethod
    def read() -> RandomStates:
        return RandomStates(torch.get_rng_state(), np.random.get_state(), random.getstate())

    def equals(self, other: RandomStates) -> bool:
        """Whether nothing was drawn between the two."""
        mine, others = (each.numpy if isinstance(each.numpy, tuple) else (each.numpy,) for each in (self, other))
        same = all(np.array_equal(one, two) for one, two in zip(mine, others, strict=True))
        return same and torch.equal(self.torch_cpu, other.torch_cpu) and self.python == other.python

    def put_back(self) -> None:
        torch.set_rng_state(self.torch_cpu)
        np.random.set_state(self.numpy)
        random.setstate(self.python)

    @staticmethod
    def seeded(seed: int, number: int) -> RandomStates:
        """The states after seeding with the derived key of (seed, number); the current states stay as they are."""
        with kept_random_states():
            key = int(derive_keys(np.array([seed], np.uint64), np.array([number]))[0])
            random.seed(key)
            np.random.seed(key % 2**32)
            torch.default_generator.manual_seed(key % 2**63)
            return RandomStates.read()


@contextlib.contextmanager
def kept_random_states() -> Iterator[None]:
    """Restore the generators at the end of the context."""
    before = RandomStates.read()
    try:
        yield
    finally:
        before.put_back()


@dataclass(frozen=True)
class SamplerStand:
    """Where a sampler was: the states of the generators that it holds, and its own if it has `state_dict()`."""

    generators: tuple[bytes, ...]
    own: bytes | None


@dataclass(frozen=True)
class SamplerStands:
    """Where a sampler was at `first`, before each epoch from `epoch` on that it was run through for, and `now`, when
    the block `read` (epoch, number) was the next."""

    first: SamplerStand
    epoch: int
    befores: dict[int, SamplerStand]
    now: SamplerStand
    read: tuple[int, int]


class _ChangeableFields:
    """What a script may change in one of torch's samplers between two epochs, as a state; None if there is nothing."""

    def __init__(self, sampler: Any) -> None:
        inner = getattr(sampler, "sampler", None) if type(sampler) is BatchSampler else sampler
        names = {WeightedRandomSampler: "weights", SubsetRandomSampler: "indices"}
        self._sampler, self._name = inner, names.get(type(inner), "")

    def state_dict(self) -> dict[str, Any] | None:
        if not self._name:
            return None
        values = getattr(self._sampler, self._name)
        array = values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
        return {self._name: np.array(array, order="C")} if array.dtype.kind in "iuf" else None

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """In place if possible: the script may hold the same object."""
        array, values = state[self._name], getattr(self._sampler, self._name)
        if isinstance(values, torch.Tensor) and tuple(values.shape) == array.shape:
            values.detach().copy_(torch.from_numpy(array))
        elif isinstance(values, list):
            values[:] = array.tolist()
        elif isinstance(values, np.ndarray) and values.shape == array.shape:
            values[...] = array
        else:
            kind = torch.from_numpy if isinstance(values, torch.Tensor) else np.array
            setattr(self._sampler, self._name, tuple(array.tolist()) if isinstance(values, tuple) else kind(array))


def _are_alike(one: bytes | None, other: bytes | None) -> bool:
    """Whether two states of such fields have the same values."""
    if one is None or other is None or one == other:
        return one == other
    first, second = pickle.loads(one), pickle.loads(other)
    return bool(first.keys() == second.keys() and all(np.array_equal(first[name], second[name]) for name in first))


class _Epochs:
    """What a sampler gives in each epoch, read in blocks."""

    def __init__(self, sampler: Any, seed: int, what: str) -> None:
        self._sampler, self._seed, self._what = sampler, seed, what
        # The method of a sampler, or of the one inside it, that sets the epoch.
        set_epoch = getattr(sampler, "set_epoch", None) or getattr(getattr(sampler, "sampler", None), "set_epoch", None)
        self._set_epoch: Callable[[int], object] | None = set_epoch if callable(set_epoch) else None
        self._generators = _find_generators(sampler)
        self._stateful = sampler if has_state(sampler) else _ChangeableFields(sampler)
        self._first = self._stand()
        self._next, self._has_read = (0, 0), False
        self._elements: Iterator[Any] = iter(())
        self._states: RandomStates | None = None
        self._kept: dict[tuple[int, int], list[Any]] = {}
        self._befores: dict[int, SamplerStand] = {}
        try:
            self.count = len(sampler)
        except (TypeError, NotImplementedError) as error:
            raise UserError(
                f"{what} of run.loader has no length, so its order cannot be resumed.\n"
                "  To do: give it __len__, the number of what it gives in an epoch."
            ) from error
        if self.count < 1:
            raise UserError(f"{what} of run.loader has the length {self.count}; it must give at least one.")

    @property
    def hidden_state(self) -> bool:
        """Whether the sampler may draw from a generator that is not seen here."""
        known = _is_known(self._sampler) or self._set_epoch is not None or self._generators
        return not known and not has_state(self._sampler)

    def element(self, epoch: int, row: int) -> Any:
        number, at = divmod(row, _BLOCK)
        return self.block(epoch, number)[at]

    def block(self, epoch: int, number: int = 0) -> list[Any]:
        """The elements of an epoch from `number` x _BLOCK on, until the next block or the end."""
        wanted = (epoch, number)
        if wanted not in self._kept:
            begins_anywhere = self._set_epoch is not None and not self._generators
            if begins_anywhere and epoch != self._next[0]:
                self._turn_to((epoch, 0))
            elif wanted < self._next:
                self._turn_to((epoch, 0) if begins_anywhere else (0, 0))
            if self._next == (0, 0) and self._has_read:
                self._put(self._first)
            elif self._next == (0, 0):
                self._put_generators(self._first)
                self._first = self._stand()  # includes the script's changes so far
            self._has_read = True
            while self._next <= wanted:
                self._read_on()
        return self._kept[wanted]

    def stands(self, epoch: int) -> SamplerStands:
        first, now = self._first, self._stand()
        befores = {each: stand for each, stand in self._befores.items() if each >= epoch}
        if self._is_untouched((now, *befores.values())):  # today's fields are those at any time
            first, now = replace(first, own=None), replace(now, own=None)
            befores = {each: replace(stand, own=None) for each, stand in befores.items()}
        return SamplerStands(first, epoch, befores, now, self._next)

    def _is_untouched(self, stands: Iterable[SamplerStand]) -> bool:
        """Whether the fields of one of torch's samplers are as they were at first."""
        only_fields = isinstance(self._stateful, _ChangeableFields)
        return only_fields and all(_are_alike(self._first.own, stand.own) for stand in stands)

    def go_on(self, stands: SamplerStands) -> None:
        """Continue as the process whose sampler was in these states; nothing happens if it held other generators."""
        if len(stands.first.generators) != len(self._generators):
            return
        if isinstance(self._stateful, _ChangeableFields):
            today = self._stand().own
            if not _are_alike(stands.first.own, today):  # none was changed, or today's script begins with others
                befores = {epoch: replace(stand, own=None) for epoch, stand in stands.befores.items()}
                stands = replace(stands, befores=befores, now=replace(stands.now, own=None))
            stands = replace(stands, first=replace(stands.first, own=today))
        self._kept, self._befores, self._has_read = {}, {}, True
        self._first, self._next = stands.first, (stands.epoch, 0)
        for epoch, stand in sorted(stands.befores.items()):
            self._put(stand)
            self._next = (epoch, 0)
            while self._next < min((epoch + 1, 0), stands.read):
                self._read_on()
        self._put(stands.now)

    def _turn_to(self, place: tuple[int, int]) -> None:
        self._next = place
        self._befores = {epoch: stand for epoch, stand in self._befores.items() if epoch < place[0]}

    def _read_on(self) -> None:
        epoch, number = place = self._next
        before = number * _BLOCK
        left = self.count - before
        if number == 0:
            self._befores[epoch] = self._stand()
        with kept_random_states():
            if self._states is None or number == 0:
                RandomStates.seeded(self._seed, epoch).put_back()
                if self._set_epoch is not None:
                    self._set_epoch(epoch)
                self._elements = iter(self._sampler)
            else:
                self._states.put_back()
            found = list(itertools.islice(self._elements, left + 1 if left <= _BLOCK else _BLOCK))
            self._states = RandomStates.read()
        if len(found) != min(left, _BLOCK):
            many = f"{before + len(found)}" if len(found) < left else f"more than {self.count}"
            raise UserError(
                f"{self._what} of run.loader says that its length is {self.count}, and gives {many} in epoch "
                f"{epoch + 1}: positions in such an order cannot be counted.\n"
                "  To do: let its __len__ say how many it gives in every epoch."
            )
        self._next = (epoch, number + 1) if left > _BLOCK else (epoch + 1, 0)
        self._kept[place] = found
        for old in sorted(self._kept)[:-_KEPT]:
            if old != place:
                del self._kept[old]
        alive = {each for each, _ in self._kept}
        self._befores = {each: stand for each, stand in self._befores.items() if each in alive}

    def _stand(self) -> SamplerStand:
        generators = tuple(bytes(generator.get_state().numpy()) for generator in self._generators)
        return SamplerStand(generators, read_state(self._stateful))

    def _put(self, stand: SamplerStand) -> None:
        self._put_generators(stand)
        rewind(self._stateful, stand.own)

    def _put_generators(self, stand: SamplerStand) -> None:
        for generator, state in zip(self._generators, stand.generators, strict=True):
            generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


class _OwnOrder:
    what: str

    def __init__(self, sampler: Any, seed: int) -> None:
        self._epochs, self.seed = _Epochs(_whole(sampler), seed, f"{self.what} {type(sampler).__name__}"), seed
        self.stands, self.go_on = self._epochs.stands, self._epochs.go_on

    @property
    def hidden_state(self) -> bool:
        """Whether the order after a resume may differ, since the sampler draws from a generator that is not seen
        here."""
        return self._epochs.hidden_state


class SamplerOrder(_OwnOrder):
    """The endless sequence of ids of a sampler, with the attributes of `SampleOrder`."""

    what = "the sampler"

    def __init__(self, sampler: Any, seed: int) -> None:
        super().__init__(sampler, seed)
        self.samples = self._epochs.count

    def ids(self, positions: Ids) -> Ids:
        """The sample at each position (any shape, from 0 on), int64 -> int64."""
        places = zip(*(part.flatten().tolist() for part in np.divmod(positions, np.int64(self.samples))), strict=True)
        return _as_ids([self._epochs.element(*place) for place in places]).reshape(np.shape(positions))


class BatchOrder(_OwnOrder):
    """The endless sequence of batches of a batch sampler; step s takes batch s mod its length.

    Positions count as if each batch had `size` samples, the largest size in the first block of epoch 1.
    """

    what = "the batch sampler"

    def __init__(self, sampler: Any, seed: int) -> None:
        super().__init__(sampler, seed)
        self.size = max((len(batch) for batch in self._epochs.block(0)), default=0)
        self.samples = self._epochs.count * self.size
        if not self.size:
            raise UserError("the batch_sampler of run.loader gives no batches with samples in them.")

    def batch(self, number: int) -> Ids:
        return _as_ids(self._epochs.element(*divmod(number, self._epochs.count)))


@dataclass(frozen=True)
class WholeBatches:
    """An order whose epochs end before their last batch if that would be incomplete (`drop_last`)."""

    order: SampleOrder | BlendOrder | WindowOrder | SamplerOrder
    samples: int
    """Samples of an epoch that are used: a multiple of the global batch."""

    @property
    def seed(self) -> int:
        return self.order.seed

    def ids(self, positions: Ids) -> Ids:
        epochs, rows = np.divmod(positions, np.int64(self.samples))
        return self.order.ids(epochs * np.int64(self.order.samples) + rows)


AnyOrder = SampleOrder | BlendOrder | WindowOrder | SamplerOrder | WholeBatches


def _is_known(sampler: Any) -> bool:
    """Whether a sampler draws from torch's generator alone, or not at all."""
    if type(sampler) is BatchSampler:
        return _is_known(sampler.sampler)
    return isinstance(sampler, list | tuple | range) or type(sampler) in _STATELESS


def _whole(sampler: Any) -> Any:
    """For a sampler that gives each rank its own part, the one that gives all: the loader shares batches over ranks."""
    if type(sampler) is BatchSampler and isinstance(sampler.sampler, DistributedSampler):
        return BatchSampler(_whole(sampler.sampler), sampler.batch_size, sampler.drop_last)
    if not isinstance(sampler, DistributedSampler):
        return sampler
    shuffle, seed, drop_last = sampler.shuffle, sampler.seed, sampler.drop_last
    return DistributedSampler(sampler.dataset, 1, 0, shuffle=shuffle, seed=seed, drop_last=drop_last)


def _find_generators(sampler: Any) -> list[torch.Generator]:
    """The generators that a sampler, or one inside it, holds."""
    found: list[torch.Generator] = []
    for value in getattr(sampler, "__dict__", {}).values():
        if isinstance(value, torch.Generator):
            found.append(value)
        elif isinstance(value, Sampler):
            found += _find_generators(value)
    return found


def _as_ids(found: list[Any]) -> Ids:
    ids = np.asarray([int(each) if isinstance(each, torch.Tensor) else each for each in found])
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise UserError(
            f"a sampler of run.loader gives {found[0]!r}, and a sample is read by its number.\n"
            "  Allowed: integers from 0 to the length of the dataset."
        )
    return ids.astype(np.int64)
