"""The batches of one rank from an iterable dataset: from any position on, by running through what comes before it.

Position p is the p-th sample that the dataset gives; where it ends, it begins again (the next epoch). Every rank runs
through all samples and takes its share of each global batch, unless the dataset gives each rank samples of its own.

Invariant: the generators of torch, numpy and Python that a dataset draws from are seeded by (seed, epoch), the same on
every rank, and those of the run are left as they are; so a dataset that draws from nothing else gives the same samples
after a resume. This module must not know losses or checkpoints.
"""

from __future__ import annotations

import contextlib
import hashlib
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset
from torch.utils.data._utils.signal_handling import _error_if_any_worker_fails

from shardway.data.batch_tree import map_leaves
from shardway.data.collate import collate_by
from shardway.data.loader import Batch, LoaderOptions, Share, start_workers
from shardway.data.order import position_share
from shardway.data.samplers import RandomStates, kept_random_states
from shardway.data.skips import Skips
from shardway.data.workers import ended_workers
from shardway.errors import ShardwayError, UserError


class SampleStream:
    """The samples of an iterable dataset, epoch after epoch, each with its number. Raises UserError where there are
    none any more."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self._dataset, self._seed = dataset, seed
        self._epoch, self._at, self._in_epoch = 0, 0, 0
        self._iterator: Iterator[Any] | None = None
        self._random: RandomStates | None = None

    def take(self, numbers: Sequence[int]) -> list[Any]:
        """The samples of these numbers, in rising order and none of them behind; those between are passed over."""
        found = []
        with self._drawing():
            for number in numbers:
                while self._at <= number:
                    sample = self._next()
                    self._at += 1
                found.append(sample)
        return found

    def take_rest(self, most: int) -> list[Any]:
        """Up to so many more samples of this epoch."""
        found: list[Any] = []
        with self._drawing():
            if self._iterator is None:
                self._begin()
            while len(found) < most and (sample := next(self._iterator, _END)) is not _END:  # type: ignore[arg-type]
                found.append(sample)
        self._at += len(found)
        return found

    def _next(self) -> Any:
        if self._iterator is None:
            self._begin()
        while (sample := next(self._iterator, _END)) is _END:  # type: ignore[arg-type]
            if not self._in_epoch:
                raise self._refuse()
            self._epoch, self._in_epoch = self._epoch + 1, 0
            self._begin()
        self._in_epoch += 1
        return sample

    def _begin(self) -> None:
        RandomStates.seeded(self._seed, self._epoch).put_back()
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(self._epoch)
        self._iterator = iter(self._dataset)

    def _refuse(self) -> UserError:
        name, given = type(self._dataset).__name__, self._at
        if not given:
            return UserError(f"{name} gives no samples.")
        return UserError(
            f"{name} ended after {given} samples and gives none when it is begun again, and the run needs more.\n"
            "  To do: let its __iter__ begin anew each time it is called (a class, not a generator), or ask for fewer "
            "steps."
        )

    @contextlib.contextmanager
    def _drawing(self) -> Iterator[None]:
        """The dataset draws from generators of its own in here."""
        with kept_random_states():
            if self._random is not None:
                self._random.put_back()
            try:
                yield
            finally:
                self._random = RandomStates.read()


_END = object()


@dataclass(frozen=True)
class StreamLoader:
    """The steps of one rank over an iterable dataset.

    `own_share`: the dataset gives this rank samples of its own, of which it takes all. One worker process at most reads
    a stream.
    """

    dataset: Any
    seed: int
    share: Share
    options: LoaderOptions = field(default_factory=LoaderOptions)
    collate: Callable[[list[Any]], Any] | None = None
    own_share: bool = False

    def batches(self, position: int, skips: Skips | None = None) -> Iterator[Batch]:
        """This rank's batches from `position` (where its first step begins) on, without end."""
        reading = _Reading(self, position, skips or Skips())
        if not self.options.workers or self.own_share:
            for batch in reading:
                yield batch.pin_memory() if self.options.pin_memory else batch
            return
        options = replace(self.options, workers=1)
        answers = start_workers(_WorkerStream(reading), options, batch_size=None)
        with ended_workers(answers, _error_if_any_worker_fails) as stream:
            for answer in stream:
                if isinstance(answer, ShardwayError):
                    raise answer
                yield answer


@dataclass(frozen=True)
class _Reading:
    """What a stream gives from a position on."""

    loader: StreamLoader
    position: int
    skips: Skips = field(default_factory=Skips)

    def __iter__(self) -> Iterator[Batch]:
        loader = self.loader
        batch, stream = loader.share.global_batch, SampleStream(loader.dataset, loader.seed)
        rows = position_share(batch, loader.share.rank, loader.share.ranks)
        first = self.skips.count_kept(self.position)
        while True:
            kept = self.skips.find_kept(np.arange(first, first + batch))
            start, end = int(kept[0]), int(kept[-1]) + 1
            if loader.own_share:
                numbers = np.arange(start // batch * len(rows), (start // batch + 1) * len(rows))
            else:
                numbers = kept[rows.start : rows.stop]
            yield Batch(collate_by(loader.collate, stream.take(numbers.tolist())), numbers, start, end)
            first += batch


class _WorkerStream(IterableDataset[Any]):
    """A stream that is read in a worker; an error of ours is an answer too, so that its text stays as it is."""

    def __init__(self, reading: _Reading) -> None:
        self.reading = reading

    def __iter__(self) -> Iterator[Batch | ShardwayError]:
        try:
            yield from self.reading
        except ShardwayError as error:
            yield error


class HeldOutStream:
    """An iterable dataset that is validated on; how many samples it gives is counted once."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self._counts: dict[int | None, int] = {}

    def __iter__(self) -> Iterator[Any]:
        return iter(self.dataset)

    def count(self, most: int | None) -> int:
        """How many samples there are, or `most`."""
        if most not in self._counts:
            self._counts[most] = count_samples(self.dataset, most)
        return self._counts[most]


def count_samples(dataset: Any, most: int | None) -> int:
    """How many samples a dataset gives in an epoch, or `most`: by its length, or by running through it."""
    if isinstance(dataset, HeldOutStream):
        return dataset.count(most)
    if hasattr(dataset, "__len__"):
        with contextlib.suppress(TypeError, NotImplementedError):
            return min(len(dataset), most) if most is not None else len(dataset)
    stream, count = SampleStream(dataset, 0), 0
    while (most is None or count < most) and stream.take_rest(1):
        count += 1
    return count


def validation_stream(
    dataset: Any, count: int, share: Share, collate: Callable[[list[Any]], Any] | None = None
) -> Iterator[Batch]:
    """The first `count` samples, each exactly once over all ranks, as many batches on every rank."""
    stream = SampleStream(dataset, 0)
    for start in range(0, count, share.global_batch):
        samples = stream.take_rest(min(share.global_batch, count - start))
        if len(samples) < min(share.global_batch, count - start):
            name = type(getattr(dataset, "dataset", dataset)).__name__
            raise UserError(
                f"{name} was to give {count} samples for validation and ended after {start + len(samples)}.\n"
                "  To do: let its __iter__ begin anew each time it is called, and its __len__, if it has one, be what "
                "it gives."
            )
        rows = position_share(len(samples), share.rank, share.ranks)
        mine = samples[rows.start : rows.stop] or samples[:1]
        ids = np.arange(start + rows.start, start + rows.stop)
        yield Batch(collate_by(collate, mine), ids, start, start + len(samples))


def digest_first(dataset: Any, seed: int) -> str:
    """A digest of the first sample, drawn with the same seed on every rank; "" where it cannot be taken."""
    if iter(dataset) is dataset:
        return ""  # it can be run through once
    found = SampleStream(dataset, seed).take_rest(1)
    try:
        return hashlib.blake2b(pickle.dumps(map_leaves(_as_plain, found)), digest_size=16).hexdigest()
    except Exception:  # what cannot be pickled cannot be compared
        return ""


def _as_plain(leaf: Any) -> Any:
    return (str(leaf.dtype), leaf.tolist()) if isinstance(leaf, torch.Tensor) else leaf
