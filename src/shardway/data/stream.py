"""The batches of one rank from an iterable dataset, from any position on: by its state, or by reading all that comes
before.

Position p is the p-th sample that the dataset gives; after its end it begins again (the next epoch). Every rank reads
all samples and takes its share of each global batch, unless the dataset gives each rank samples of its own.

Invariant: the generators of torch, numpy and Python that a dataset draws from are seeded by (seed, epoch), the same on
every rank, and those of the run are left as they are. So a dataset that draws from nothing else gives the same samples
after a resume. A state is used only if the dataset has drawn from none of these since its epoch began, since draws at
its beginning and draws for a sample look alike. This module must not depend on losses or checkpoints.
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

from shardway.data.batch_tree import collate_by, map_leaves
from shardway.data.handover import take_over
from shardway.data.loader import Batch, LoaderOptions, Share, start_workers
from shardway.data.order import Skips, position_share
from shardway.data.samplers import (
    RandomStates,
    SnapshotPace,
    StreamSnapshot,
    has_state,
    kept_random_states,
    load_state,
    read_state,
    rewind,
)
from shardway.data.workers import NoWorkers, ended_workers
from shardway.errors import ShardwayError, UserError


class SampleStream:
    """The samples of an iterable dataset, epoch after epoch, each with its number. Raises UserError if the dataset
    gives none any more."""

    def __init__(
        self, dataset: Any, seed: int, begin: bytes | None = None, snapshot: StreamSnapshot | None = None
    ) -> None:
        """Start from the state `begin` of the dataset, or from a `snapshot` of an earlier process."""
        self._dataset, self._seed, self._first = dataset, seed, begin
        self._epoch, self._at, self._in_epoch = 0, 0, 0
        self._iterator: Iterator[Any] | None = None
        self._random: RandomStates | None = None
        self._fresh: RandomStates | None = None
        """The generators at the beginning of this epoch."""
        if snapshot is not None:
            with self._drawing():
                self._resume(snapshot)

    def snapshot(self) -> StreamSnapshot | None:
        """The place of the stream; None if it has no state, or has drawn from generators that go on."""
        iterator, of_iterator = self._iterator, has_state(self._iterator)
        if iterator is None or not (of_iterator or has_state(self._dataset)) or self._has_drawn():
            return None
        state = read_state(iterator if of_iterator else self._dataset)
        if state is None:
            return None
        return StreamSnapshot(self._at, self._epoch, self._in_epoch, of_iterator, state)

    def _has_drawn(self) -> bool:
        return self._fresh is None or self._random is None or not self._fresh.equals(self._random)

    def _resume(self, snapshot: StreamSnapshot) -> None:
        self._at, self._epoch, self._in_epoch = snapshot.given, snapshot.epoch, snapshot.in_epoch
        self._seed_epoch()
        if snapshot.of_iterator:
            self._iterator = iter(self._dataset)
            load_state(self._iterator, snapshot.state)
        else:
            load_state(self._dataset, snapshot.state)
            self._iterator = iter(self._dataset)

    def take(self, numbers: Sequence[int]) -> list[Any]:
        """The samples with these numbers, in rising order and none of them in the past; those between are skipped."""
        found = []
        with self._drawing():
            for number in numbers:
                while self._at <= number:
                    sample = self._next()
                    self._at += 1
                found.append(sample)
        return found

    def take_rest(self, most: int) -> list[Any]:
        """At most `most` further samples of this epoch."""
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
        if self._at == 0 and self._iterator is None:
            rewind(self._dataset, self._first)
        self._seed_epoch()
        self._iterator = iter(self._dataset)

    def _seed_epoch(self) -> None:
        self._fresh = RandomStates.seeded(self._seed, self._epoch)
        self._fresh.put_back()
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(self._epoch)

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
        """In this context the dataset draws from generators of its own."""
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

    `own_share`: the dataset gives this rank samples of its own, and it takes all of them. At most one worker process
    reads a stream.
    """

    dataset: Any
    seed: int
    share: Share
    options: LoaderOptions = field(default_factory=LoaderOptions)
    collate: Callable[[list[Any]], Any] | None = None
    own_share: bool = False
    begin: bytes | None = None
    """The state in which the dataset began, None if it has none."""

    def batches(
        self, position: int, skips: Skips | None = None, snapshot: StreamSnapshot | None = None
    ) -> Iterator[Batch]:
        """This rank's batches from `position` (the beginning of the first step) on, without end; from a `snapshot` that
        was taken before it."""
        reading = _Reading(self, position, skips or Skips(), snapshot)
        if self.options.workers and not self.own_share:
            sent = replace(reading, loader=replace(self, options=LoaderOptions()))  # `tell` is for this process
            try:
                answers = start_workers(_WorkerStream(sent), replace(self.options, workers=1), batch_size=None)
            except NoWorkers as refused:
                self.options.tell(str(refused))
            else:
                with ended_workers(answers, _error_if_any_worker_fails) as stream:
                    yield from take_over(stream)
                return
        for batch in reading:
            yield batch.pin_memory() if self.options.pin_memory else batch


@dataclass(frozen=True)
class _Reading:
    """The batches of a stream from a position on."""

    loader: StreamLoader
    position: int
    skips: Skips = field(default_factory=Skips)
    snapshot: StreamSnapshot | None = None

    def __iter__(self) -> Iterator[Batch]:
        loader, pace = self.loader, SnapshotPace()
        batch, stream = loader.share.global_batch, None
        rows = position_share(batch, loader.share.rank, loader.share.ranks)
        first = self.skips.count_kept(self.position)
        while True:
            kept = self.skips.find_kept(np.arange(first, first + batch))
            start, end = int(kept[0]), int(kept[-1]) + 1
            if loader.own_share:
                numbers = np.arange(start // batch * len(rows), (start // batch + 1) * len(rows))
            else:
                numbers = kept[rows.start : rows.stop]
            if stream is None:
                fits = self.snapshot is not None and self.snapshot.given <= int(numbers[0] if len(numbers) else start)
                snapshot = self.snapshot if fits else None
                stream = SampleStream(loader.dataset, loader.seed, loader.begin, snapshot)
            samples = stream.take(numbers.tolist())
            taken = pace.take(stream)  # before samples are collated, which may draw or change them
            yield Batch(collate_by(loader.collate, samples), numbers, start, end, taken)
            first += batch


class _WorkerStream(IterableDataset[Any]):
    """A stream that is read in a worker; an error of Shardway is an answer too, so that its text is kept."""

    def __init__(self, reading: _Reading) -> None:
        self.reading = reading

    def __iter__(self) -> Iterator[Batch | ShardwayError]:
        try:
            yield from self.reading
        except ShardwayError as error:
            yield error


class HeldOutStream:
    """An iterable dataset for validation, each time from its beginning; its samples are counted once."""

    def __init__(self, dataset: Any) -> None:
        self.dataset, self._first = dataset, read_state(dataset)
        self._counts: dict[int | None, int] = {}

    def __iter__(self) -> Iterator[Any]:
        rewind(self.dataset, self._first)
        return iter(self.dataset)

    def count(self, most: int | None) -> int:
        """How many samples there are, or `most`."""
        if most not in self._counts:
            self._counts[most] = count_samples(self.dataset, most)
        return self._counts[most]


def count_samples(dataset: Any, most: int | None) -> int:
    """How many samples a dataset gives in an epoch, at most `most`: by its length, or by running through it."""
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
    """A digest of the first sample, drawn with the same seed on every rank; "" if it cannot be computed."""
    if iter(dataset) is dataset:
        return ""  # it can be run through only once
    begin = read_state(dataset)
    found = SampleStream(dataset, seed).take_rest(1)
    rewind(dataset, begin)
    try:
        return hashlib.blake2b(pickle.dumps(map_leaves(_as_plain, found)), digest_size=16).hexdigest()
    except Exception:  # what cannot be pickled cannot be compared
        return ""


def _as_plain(leaf: Any) -> Any:
    return (str(leaf.dtype), leaf.tolist()) if isinstance(leaf, torch.Tensor) else leaf
