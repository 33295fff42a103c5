"""The batches of one rank, from any position on: of a source or a map-style dataset by number, of an iterable dataset
by its state or by reading all that comes before.

By number: requests are a pure function of (order, start position, share). They are answered in this process, or in
workers by torch's DataLoader, whose batch sampler they are. What a worker has read ahead and the loop has not consumed
is dropped and read again, so only the position of the next batch needs to be saved.

In sequence: position p is the p-th sample that the dataset gives; after its end it begins again (the next epoch). Every
rank reads all samples and takes its share of each global batch, unless the dataset gives each rank samples of its own.

Invariants:
- The ids of a step do not depend on workers, prefetch or where reading began, and torch's random state is left as it
  was. This module keeps no position of its own and does not depend on steps, losses or checkpoints.
- The generators of torch, numpy and Python that an iterable dataset draws from are seeded by (seed, epoch), the same on
  every rank. So one that draws from nothing else gives the same samples after a resume. A state is used only if the
  dataset has drawn from none of these since its epoch began, since draws at its beginning and draws for a sample look
  alike.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import itertools
import logging
import pickle
import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data._utils.signal_handling import _error_if_any_worker_fails

from shardway.batch_ramp import BatchRamp
from shardway.data.ahead import read_ahead
from shardway.data.batch_tree import LengthGroups, PackedInputs, collate_by, map_leaves, move_batch, pin_batch
from shardway.data.damage import LeftOut, gather_whole
from shardway.data.order import BlendOrder, Ids, SampleOrder, Skips, derive_keys, position_share
from shardway.data.samplers import (
    AnyOrder,
    BatchOrder,
    RandomStates,
    SnapshotPace,
    StreamSnapshot,
    has_state,
    kept_random_states,
    load_state,
    read_state,
    rewind,
)
from shardway.data.sources.base import Arrays, DataSource, StreamSource, is_drawing
from shardway.data.window_order import WindowOrder
from shardway.data.workers import (
    NoWorkers,
    Sender,
    Unsendable,
    dropped_if_refused,
    ended_workers,
    isolation,
    shorten_sockets,
    take_over,
)
from shardway.errors import Bug, ShardwayError, UserError
from shardway.hardware.limits import settle_temporary

Collate = Callable[[list[Any]], Any]

_OURS = (SampleOrder, BlendOrder, WindowOrder)
_IDS_AT_ONCE = 16384
"""Ids computed in one call of `Order.ids`: enough to make its fixed cost small beside a gather."""


@dataclass(frozen=True)
class Share:
    """Which rows of each global batch (samples over all ranks: always as many, or by a ramp) this rank reads."""

    global_batch: int | BatchRamp
    rank: int = 0
    ranks: int = 1

    @property
    def largest(self) -> int:
        """The samples of the largest global batch."""
        return BatchRamp.of(self.global_batch).largest


@dataclass(frozen=True)
class LoaderOptions:
    """`workers` processes (0 = read in this one), each `prefetch` batches ahead; `pin_memory` needs CUDA.

    Tokens are read fastest with 0 workers: sending a batch between processes costs more than gathering it. "auto" is
    found out by `waiting.tuned_batches`.
    """

    workers: int = 0
    prefetch: int = 2
    pin_memory: bool = False
    worker_init: Callable[[int], object] | None = None
    """Called in each worker with its number before it reads, as torch's `worker_init_fn`."""
    seeded: bool = False
    """Whether a dataset that is read in this process draws the random numbers that it would draw in a worker."""
    ahead: torch.device | None = None
    """With 0 workers: the device for which a thread reads `prefetch` batches ahead, from a source that draws nothing;
    None: each batch is read when it is asked for."""
    tell: Callable[[str], object] = logging.getLogger("shardway").warning
    """Shows a message to the user."""
    skip_damaged: bool = False
    """Whether damaged samples of a source are left out; else they are an error."""


@dataclass(frozen=True, eq=False)
class Batch:
    """This rank's samples of one step.

    `data` is {"inputs": tensor, "targets": tensor} from a source, or what the user's dataset collates to; `ids` are
    its samples, int64. `position` is that of the step's first sample over all ranks; the next step begins at
    `next_position` (more than a batch later if positions are skipped). `samples`: those of the step over all ranks.
    `snapshot` is the state of a stream after these samples, if it has one. `following`: the digest of the sample
    that followed the last snapshot before it, "" if it cannot be computed; None if an earlier batch has it.
    `went_astray`: a state did not lead to the sample that came next, so the stream was run through. Without `ids`,
    `data` holds one sample that does not count, so that a model never gets a batch without rows. `left_out`: those
    of its samples that are damaged, whose rows do not count.
    """

    data: Any
    ids: Ids
    position: int
    next_position: int
    samples: int
    snapshot: StreamSnapshot | None = None
    following: str | None = None
    went_astray: bool = False
    left_out: tuple[LeftOut, ...] = ()

    def pin_memory(self) -> Batch:
        """The batch in page-locked memory (the DataLoader calls this by its name)."""
        return replace(self, data=pin_batch(self.data))


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch with its tensors on a device; with pinned memory the copy overlaps with other work."""
    return replace(batch, data=move_batch(batch.data, device))


# --- by number


@dataclass(frozen=True, eq=False)
class StepRequest:
    """The request of the sampler to the dataset for one step. `seed` is for the random draws of the dataset in a
    worker; in the rank itself the rank's random state is used. `epochs` are those of the samples, for a source that
    draws."""

    position: int
    next_position: int
    samples: int
    ids: Ids
    seed: int
    epochs: Ids | None = None


@dataclass(frozen=True)
class StepSampler:
    """The requests of one rank: steps of `share.global_batch` (or the batches that `order` gives) from `position` on,
    `steps` of them or without end. Those of one size are computed many at once.

    A step takes the next positions that `skips` leaves. `with_epochs`: requests state the epochs of samples, if the
    order has them.
    """

    order: AnyOrder | BatchOrder
    share: Share
    position: int
    steps: int | None = None
    skips: Skips = field(default_factory=Skips)
    with_epochs: bool = False

    def __iter__(self) -> Iterator[StepRequest]:
        skips, left = self.skips, self.steps
        batch = self.order.size if isinstance(self.order, BatchOrder) else self.share.global_batch
        for first, size, count in skips.number_ramp(batch).runs(skips.count_kept(self.position)):
            steps = count if left is None else left if count is None else min(count, left)
            yield from self._take(first, size, steps)
            left = None if left is None or steps is None else left - steps
            if left == 0:
                return

    def _take(self, kept_before: int, batch: int, steps: int | None) -> Iterator[StepRequest]:
        """Steps of one size (None: without end), the first with so many kept positions before it."""
        order, share, skips = self.order, self.share, self.skips
        rows = np.array(position_share(batch, share.rank, share.ranks), np.int64)
        rank_seed = derive_keys(np.array([order.seed], np.uint64), np.array([share.rank]))
        # A sampler is read no earlier than needed: a script may change it between two epochs.
        at_once = max(1, _IDS_AT_ONCE // max(1, rows.size)) if isinstance(order, _OURS) else 1
        find_epochs = getattr(order, "epochs", None) if self.with_epochs else None
        step = 0
        while steps is None or step < steps:
            count = at_once if steps is None else min(at_once, steps - step)
            firsts = kept_before + np.arange(step, step + count) * batch
            starts, nexts = skips.find_kept(firsts), skips.find_kept(firsts + batch - 1) + 1
            if isinstance(order, BatchOrder):
                ids: Iterable[Ids] = [self._take_batch(order, int(starts[0]), int(nexts[0]))]
                epochs: Iterable[Ids | None] = itertools.repeat(None)
            else:
                positions = skips.find_kept(firsts[:, None] + rows)
                ids = order.ids(positions)
                epochs = find_epochs(positions) if find_epochs else itertools.repeat(None)
            seeds = derive_keys(rank_seed, starts)
            samples = itertools.repeat(batch)
            yield from map(StepRequest, starts.tolist(), nexts.tolist(), samples, ids, seeds.tolist(), epochs)
            step += count

    def _take_batch(self, order: BatchOrder, start: int, following: int) -> Ids:
        if start % order.size or following - start != order.size:
            raise UserError(
                f"data.skip leaves a part of the batch at position {start} out, and the batch_sampler of "
                f"run.loader gives whole ones.\n  Allowed: spans whose ends are multiples of {order.size}."
            )
        ids = order.batch(start // order.size)
        mine = position_share(len(ids), self.share.rank, self.share.ranks)
        return ids[mine.start : mine.stop]


class _NumberedSamples(Dataset[Any]):
    """A source, or a user's map-style dataset whose samples are collated in the process that reads them. Raises
    UserError for a dataset without length and index, whose samples have no numbers. `skip_damaged`: damaged samples of
    a source are left out; the errors of a user's dataset are its own."""

    def __init__(
        self, samples: DataSource | Dataset[Any], collate: Collate | None, *, skip_damaged: bool = False
    ) -> None:
        self.samples: Any = samples
        self.collate, self.skip_damaged = collate, skip_damaged
        self.is_source = isinstance(samples, DataSource)
        if not self.is_source and not is_map_style(samples):
            raise UserError(
                f"{type(samples).__name__} is not a map-style dataset, and only such a dataset resumes exactly\n"
                "      allowed: a dataset with __len__ and __getitem__\n"
                "      to do: give each sample a number, and read it in __getitem__"
            )

    def __len__(self) -> int:
        return len(self.samples)

    def answer(self, request: StepRequest) -> Batch:
        ids = request.ids if len(request.ids) else np.zeros(1, np.int64)
        left_out: tuple[LeftOut, ...] = ()
        if self.is_source:
            epochs = request.epochs
            if epochs is not None and not len(epochs):
                epochs = np.zeros(1, np.int64)

            def gather(rows: slice) -> Arrays:
                found: Arrays = (
                    self.samples.batch(ids[rows]) if epochs is None else self.samples.batch_of(ids[rows], epochs[rows])
                )
                return found

            arrays, left_out = gather_whole(gather, ids) if self.skip_damaged else (gather(slice(None)), ())
            left_out = left_out if len(request.ids) else ()  # the one sample would not have counted
            data = _join_fields(arrays)
        elif hasattr(self.samples, "__getitems__"):
            data = collate_by(self.collate, self.samples.__getitems__(ids.tolist()))
        else:
            data = collate_by(self.collate, [self.samples[index] for index in ids.tolist()])
        step = request.position, request.next_position, request.samples
        return Batch(data, request.ids, *step, left_out=left_out)

    def answer_seeded(self, request: StepRequest) -> Batch:
        """As in a worker, in this process, whose generators stay as they are."""
        with kept_random_states():
            _seed(request.seed)
            return self.answer(request)

    def __getitems__(self, request: StepRequest) -> Batch | ShardwayError:
        """In a worker, where draws depend on the batch, not on the worker; an error of Shardway is an answer too, so
        that its text is kept."""
        try:
            _seed(request.seed)
            return self.answer(request)
        except ShardwayError as error:
            return error


def _join_fields(arrays: Arrays) -> Any:
    """What a source gives by name; inputs of packed documents as `PackedInputs`, samples of different shapes as
    `LengthGroups`."""
    if arrays["targets"].dtype == object:
        groups = zip(arrays["inputs"], arrays["targets"], strict=True)
        return LengthGroups((torch.from_numpy(inputs), torch.from_numpy(targets)) for inputs, targets in groups)
    fields = {name: torch.from_numpy(array) for name, array in arrays.items()}
    if fields.keys() != {"inputs", "targets", "positions"}:
        return fields
    return {"inputs": PackedInputs(fields["inputs"], fields["positions"]), "targets": fields["targets"]}


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)


def is_map_style(samples: Any) -> bool:
    """Whether a dataset has a length and gives a sample by number (torch's Dataset always has a __getitem__)."""
    return hasattr(samples, "__len__") and hasattr(samples, "__getitem__") and not isinstance(samples, IterableDataset)


class StepLoader:
    """The steps of one rank over a source or a user's map-style dataset.

    `collate` joins the samples of a user's dataset (None: `collate_samples`); a source needs none. Raises UserError for
    a dataset without length and index, whose samples have no numbers.
    """

    def __init__(
        self,
        samples: DataSource | Dataset[Any],
        order: AnyOrder | BatchOrder,
        share: Share,
        options: LoaderOptions = LoaderOptions(),
        collate: Collate | None = None,
    ) -> None:
        self._dataset = _NumberedSamples(samples, collate, skip_damaged=options.skip_damaged)
        if isinstance(order, _OURS) and len(self._dataset) != order.samples:
            raise Bug(f"an order of {order.samples} samples over data with {len(self._dataset)}; please report this")
        self._order, self._share, self._options = order, share, options

    def batches(self, position: int, steps: int | None = None, skips: Skips | None = None) -> Iterator[Batch]:
        """This rank's batches from `position` (the beginning of the first step) on; without end if `steps` is None.

        Positions in `skips` are left out. A rank whose share is empty gets batches without `ids`. Closing the iterator
        ends its worker processes.
        """
        draws = is_drawing(self._dataset.samples)
        sampler = StepSampler(self._order, self._share, position, steps, skips or Skips(), draws)
        return _read_batches(self._dataset, sampler, self._options)


def validation_batches(
    samples: DataSource | Dataset[Any],
    count: int,
    share: Share,
    options: LoaderOptions = LoaderOptions(),
    collate: Collate | None = None,
) -> Iterator[Batch]:
    """The first `count` samples (all, where there are fewer), in order, each exactly once over all ranks.

    Every rank gets the same number of batches; the last step may be smaller than `share.global_batch`.
    """
    dataset = _NumberedSamples(samples, collate, skip_damaged=options.skip_damaged)
    order = SampleOrder(len(dataset), seed=0, shuffle=False)
    whole, rest = divmod(min(count, len(dataset)), share.largest)
    last = StepSampler(order, replace(share, global_batch=rest), whole * share.largest, min(rest, 1))
    return _read_batches(dataset, itertools.chain(StepSampler(order, share, 0, whole), last), options)


def _read_batches(
    dataset: _NumberedSamples, requests: Iterable[StepRequest], options: LoaderOptions
) -> Iterator[Batch]:
    """Answer each request, in order. Closing the iterator, or dropping it, leaves no process behind.

    Raises Unsendable if the dataset cannot be sent to a worker, WorkerDied if a worker dies; an error of the user's
    dataset passes unchanged. If no workers can be started, this process reads, and this is reported.
    """
    if options.workers:
        requests, asked = itertools.tee(requests)
        try:
            started = _start_workers(dataset, options, batch_sampler=asked)  # a request stands for a batch of indices
        except NoWorkers as refused:
            options.tell(str(refused))
        else:
            del requests, asked  # keep no reference to the requests
            with ended_workers(started, _error_if_any_worker_fails) as answers:
                yield from take_over(answers)
            return
    batches = _read_here(dataset, requests, options)
    if options.ahead is not None and dataset.is_source and not is_drawing(dataset.samples):
        batches = read_ahead(batches, options.prefetch, options.ahead)
    yield from batches


def _read_here(dataset: _NumberedSamples, requests: Iterable[StepRequest], options: LoaderOptions) -> Iterator[Batch]:
    for request in requests:  # no DataLoader: its fixed cost exceeds a gather
        batch = dataset.answer_seeded(request) if options.seeded else dataset.answer(request)
        yield batch.pin_memory() if options.pin_memory else batch


# --- in sequence

_END = object()


class SampleStream:
    """The samples of an iterable dataset (or of a source in sequence), epoch after epoch, each with its number; from
    the state `begin` of the dataset, or from a `snapshot` of an earlier process. Raises UserError if the dataset gives
    none any more."""

    def __init__(
        self, samples: Any, seed: int, begin: bytes | None = None, snapshot: StreamSnapshot | None = None
    ) -> None:
        self._dataset, self._seed, self._first = open_stream(samples), seed, begin
        self._source, self._name = find_source(samples), name_stream(samples)
        self._size = self._source.size if self._source is not None else 0
        self.wrong_length = ""
        """What to show of a source that has given more or fewer samples than its length; "" for nothing."""
        self._epoch, self._at, self._in_epoch = 0, 0, 0
        self._iterator: Iterator[Any] | None = None
        self._random: RandomStates | None = None
        self._fresh: RandomStates | None = None
        """The generators at the beginning of this epoch."""
        self.went_astray = False
        """Whether the first sample is not the one that followed the snapshot."""
        self._expected = snapshot.following if snapshot is not None else ""
        self._awaits = False
        self._following: str | None = None
        if snapshot is None:
            return
        with self._drawing():
            self._at, self._epoch, self._in_epoch = snapshot.given, snapshot.epoch, snapshot.in_epoch
            self._seed_epoch()
            if not snapshot.of_iterator:
                load_state(self._dataset, snapshot.state)
            self._iterator = iter(self._dataset)
            if snapshot.of_iterator:
                load_state(self._iterator, snapshot.state)

    def take_following(self) -> str | None:
        """The digest of the sample that followed the last snapshot, "" if it cannot be computed; None if that snapshot
        has it already, or no sample followed."""
        if self._following is None:
            return None
        found, self._following = self._following, None
        return found

    def snapshot(self) -> StreamSnapshot | None:
        """The place of the stream; None if it has no state, or has drawn from generators that go on."""
        if self._iterator is None or self._fresh is None or self._random is None:
            return None
        if self._source is not None and not self._source.state_is_exact:
            return None
        of_iterator = has_state(self._iterator)
        if not (of_iterator or has_state(self._dataset)) or not self._fresh.equals(self._random):
            return None
        state = read_state(self._iterator if of_iterator else self._dataset)
        if state is None:
            return None
        self._awaits = True
        return StreamSnapshot(self._at, self._epoch, self._in_epoch, of_iterator, state)

    def take(self, numbers: Sequence[int]) -> list[Any]:
        """The samples with these numbers, in rising order and none of them in the past; those between are skipped.
        Nothing of them is right if the stream `went_astray`."""
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
            iterator = self._begin() if self._iterator is None else self._iterator
            # `next` alone: an `__iter__` of the user's iterator may begin anew, or be missing.
            while len(found) < most and (sample := next(iterator, _END)) is not _END:
                found.append(sample)
                self._at += 1
        return found

    def _next(self) -> Any:
        iterator = self._begin() if self._iterator is None else self._iterator
        while (sample := next(iterator, _END)) is _END:
            if not self._in_epoch:
                raise self._refuse()
            self._compare_length(f"{self._in_epoch}", is_wrong=self._in_epoch < self._size)
            self._epoch, self._in_epoch = self._epoch + 1, 0
            iterator = self._begin()
        if self._awaits or self._expected:
            digest = digest_sample(sample)
            self.went_astray = self._expected not in ("", digest)
            if self._awaits:
                self._following = digest
            self._awaits, self._expected = False, ""
        self._in_epoch += 1
        self._compare_length("more", is_wrong=self._in_epoch > self._size > 0)
        return sample

    def _compare_length(self, given: str, *, is_wrong: bool) -> None:
        if is_wrong and not self.wrong_length:
            self.wrong_length = (
                f"{self._name} says that its length is {self._size}, and gives {given} in epoch {self._epoch + 1}: "
                "what the run file says in epochs is counted by its length."
            )

    def _begin(self) -> Iterator[Any]:
        if self._at == 0 and self._iterator is None:
            rewind(self._dataset, self._first)
        self._seed_epoch()
        self._iterator = iter(self._dataset)
        return self._iterator

    def _seed_epoch(self) -> None:
        self._fresh = RandomStates.seeded(self._seed, self._epoch)
        self._fresh.put_back()
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(self._epoch)

    def _refuse(self) -> UserError:
        name, given = self._name, self._at
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
        reading = self._source.reading(lambda: self._at) if self._source is not None else contextlib.nullcontext()
        with kept_random_states():
            if self._random is not None:
                self._random.put_back()
            try:
                with reading:
                    yield
            finally:
                self._random = RandomStates.read()


def find_source(samples: Any) -> StreamSource | None:
    """The source in sequence that samples are read from; None for an iterable dataset of a script."""
    samples = samples.samples if isinstance(samples, HeldOutStream) else samples
    return samples if isinstance(samples, StreamSource) else None


def open_stream(samples: Any) -> Any:
    """The iterable of an iterable dataset, or of a source in sequence."""
    return samples.open() if isinstance(samples, StreamSource) else samples


def name_stream(samples: Any) -> str:
    """What messages call an iterable dataset, or a source in sequence."""
    source = find_source(samples)
    if source is not None:
        return source.name
    return type(samples.samples if isinstance(samples, HeldOutStream) else samples).__name__


def _join_samples(samples: Any, collate: Collate | None, found: list[Any], numbers: Ids) -> Any:
    """The batch of what a stream has given."""
    source = find_source(samples)
    if source is None:
        return collate_by(collate, found)
    return {name: torch.from_numpy(array) for name, array in source.join(found, numbers).items()}


@dataclass(frozen=True)
class StreamLoader:
    """The steps of one rank over an iterable dataset, or a source in sequence.

    `own_share`: the dataset gives this rank samples of its own, and it takes all of them. `begin`: the state in which
    the dataset began, None if it has none. At most one worker process reads a stream.
    """

    dataset: Any
    seed: int
    share: Share
    options: LoaderOptions = field(default_factory=LoaderOptions)
    collate: Collate | None = None
    own_share: bool = False
    begin: bytes | None = None

    def batches(
        self, position: int, skips: Skips | None = None, snapshot: StreamSnapshot | None = None
    ) -> Iterator[Batch]:
        """This rank's batches from `position` (the beginning of the first step) on, without end; from a `snapshot` that
        was taken before it."""
        if self.options.workers and not self.own_share:
            sent = replace(self, options=LoaderOptions())  # `tell` is for this process
            stream = _WorkerStream(sent, position, skips or Skips(), snapshot)
            try:
                answers = _start_workers(stream, replace(self.options, workers=1), batch_size=None)
            except NoWorkers as refused:
                self.options.tell(str(refused))
            else:
                with ended_workers(answers, _error_if_any_worker_fails) as arriving:
                    yield from take_over(arriving)
                return
        for batch in self.read(position, skips or Skips(), snapshot):
            yield batch.pin_memory() if self.options.pin_memory else batch

    def read(self, position: int, skips: Skips, snapshot: StreamSnapshot | None) -> Iterator[Batch]:
        pace, stream, given, shown, astray = SnapshotPace(), None, 0, self.share.rank > 0, False
        ramp, first = skips.number_ramp(self.share.global_batch), skips.count_kept(position)
        while True:
            batch = ramp.size_at(first)
            rows = position_share(batch, self.share.rank, self.share.ranks)
            kept = skips.find_kept(np.arange(first, first + batch))
            first, start, end = first + batch, int(kept[0]), int(kept[-1]) + 1
            if self.own_share:
                begin = max(given, self._count_own(start))
                numbers = np.arange(begin, given := begin + len(rows))
            else:
                numbers = kept[rows.start : rows.stop]
            if stream is None:
                fits = snapshot is not None and snapshot.given <= int(numbers[0] if len(numbers) else start)
                stream = SampleStream(self.dataset, self.seed, self.begin, snapshot if fits else None)
            samples = stream.take(numbers.tolist())
            if stream.went_astray:
                # A source makes its dataset anew: one that has loaded a wrong state may keep some of it.
                anew = self.dataset if find_source(self.dataset) is None else copy.copy(self.dataset)
                astray, stream = True, SampleStream(anew, self.seed, self.begin)
                samples = stream.take(numbers.tolist())
            following = stream.take_following()
            if stream.wrong_length and not shown:
                self.options.tell(stream.wrong_length)
                shown = True
            taken = pace.take(stream)  # before samples are collated, which may draw or change them
            data = _join_samples(self.dataset, self.collate, samples, numbers)
            yield Batch(data, numbers, start, end, batch, taken, following, astray)

    def _count_own(self, position: int) -> int:
        """How many samples of its own this rank has taken in the steps before a position."""
        count = 0
        for first, size, steps in BatchRamp.of(self.share.global_batch).runs():
            whole = max(0, position - first) // size
            rows = len(position_share(size, self.share.rank, self.share.ranks))
            count += rows * (whole if steps is None else min(steps, whole))
        return count


class _WorkerStream(IterableDataset[Any]):
    """A stream that is read in a worker; an error of Shardway is an answer too, so that its text is kept."""

    def __init__(self, loader: StreamLoader, position: int, skips: Skips, snapshot: StreamSnapshot | None) -> None:
        self.loader, self.position, self.skips, self.snapshot = loader, position, skips, snapshot

    def __iter__(self) -> Iterator[Batch | ShardwayError]:
        try:
            yield from self.loader.read(self.position, self.skips, self.snapshot)
        except ShardwayError as error:
            yield error


class HeldOutStream:
    """An iterable dataset, or a source in sequence, for validation, each time from its beginning; its samples are
    counted once."""

    def __init__(self, samples: Any) -> None:
        self.samples, self._dataset = samples, open_stream(samples)
        self._first = read_state(self._dataset)
        self._counts: dict[int | None, int] = {}

    def __iter__(self) -> Iterator[Any]:
        rewind(self._dataset, self._first)
        return iter(self._dataset)

    def count(self, most: int | None) -> int:
        if most not in self._counts:
            self._counts[most] = count_samples(self.samples, most)
        return self._counts[most]


def count_samples(dataset: Any, most: int | None) -> int:
    """How many samples a dataset gives in an epoch, at most `most`: by its length, or by running through it."""
    if isinstance(dataset, HeldOutStream):
        return dataset.count(most)
    if isinstance(dataset, StreamSource) and dataset.size:
        return dataset.size if most is None else min(dataset.size, most)
    if hasattr(dataset, "__len__"):
        with contextlib.suppress(TypeError, NotImplementedError):
            return min(len(dataset), most) if most is not None else len(dataset)
    stream, count = SampleStream(dataset, 0), 0
    while (most is None or count < most) and stream.take_rest(1):
        count += 1
    return count


def validation_stream(dataset: Any, count: int, share: Share, collate: Collate | None = None) -> Iterator[Batch]:
    """The first `count` samples, each exactly once over all ranks, as many batches on every rank."""
    stream = SampleStream(dataset, 0)
    for start in range(0, count, share.largest):
        samples = stream.take_rest(min(share.largest, count - start))
        if len(samples) < min(share.largest, count - start):
            name = name_stream(dataset)
            raise UserError(
                f"{name} was to give {count} samples for validation and ended after {start + len(samples)}.\n"
                "  To do: let its __iter__ begin anew each time it is called, and its __len__, if it has one, be what "
                "it gives."
            )
        rows = position_share(len(samples), share.rank, share.ranks)
        mine = samples[rows.start : rows.stop] or samples[:1]
        ids = np.arange(start + rows.start, start + rows.stop)
        data = _join_samples(dataset, collate, mine, ids if len(ids) else np.array([start]))
        yield Batch(data, ids, start, start + len(samples), len(samples))


def digest_sample(sample: Any) -> str:
    """A digest of a sample, by the values of its leaves and alike in each process; "" if it cannot be computed. A leaf
    that is no tensor, array, string or number counts as it is pickled."""
    found = hashlib.blake2b(digest_size=16)

    def add(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            flat = leaf.detach().cpu().contiguous().reshape(-1)
            found.update(f"{leaf.dtype} {tuple(leaf.shape)}\0".encode() + flat.view(torch.uint8).numpy().tobytes())
        elif isinstance(leaf, np.ndarray) and not leaf.dtype.hasobject:
            found.update(f"{leaf.dtype} {leaf.shape}\0".encode() + leaf.tobytes())
        elif leaf is None or isinstance(leaf, str | bytes | int | float | complex):
            found.update(f"{leaf!r}\0".encode(errors="surrogatepass"))
        else:
            found.update(pickle.dumps(leaf))
        return leaf

    try:
        map_leaves(add, sample)
        return found.hexdigest()
    except Exception:  # what cannot be pickled cannot be compared
        return ""


def digest_first(samples: Any, seed: int) -> str:
    """A digest of the first sample of a stream, drawn with the same seed on every rank; "" if it cannot be computed."""
    dataset = open_stream(samples)
    if iter(dataset) is dataset:
        return ""  # it can be run through only once

    def as_plain(leaf: Any) -> Any:
        return (str(leaf.dtype), leaf.tolist()) if isinstance(leaf, torch.Tensor) else leaf

    begin = read_state(dataset)
    found = SampleStream(samples, seed).take_rest(1)
    rewind(dataset, begin)
    try:
        return hashlib.blake2b(pickle.dumps(map_leaves(as_plain, found)), digest_size=16).hexdigest()
    except Exception:  # what cannot be pickled cannot be compared
        return ""


# --- worker processes


def _start_workers(dataset: Dataset[Any], options: LoaderOptions, **reading: Any) -> Iterator[Any]:
    """The iterator of a DataLoader with `options.workers` processes, whose answers `take_over` reads. Raises UserError
    if the dataset cannot be sent to them, NoWorkers if the system refuses to start them.

    Workers are spawned. A fork of a process that runs threads (a process group, CUDA) may copy a held lock and wait for
    it forever. Workers of a fork server hold the pipe that keeps the server alive, so they all stay after a SIGKILL of
    the rank.
    """
    ForkingPickler.register(torch.Generator, _reduce_generator)
    shorten_sockets()
    sender = Sender(options.workers * options.prefetch)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Got pickle error")
        warnings.filterwarnings("ignore", message="This DataLoader will create")  # reported by `describe_few_cores`
        loader: DataLoader[Any] = DataLoader(
            dataset,
            num_workers=options.workers,
            prefetch_factor=options.prefetch,
            pin_memory=options.pin_memory,
            multiprocessing_context="spawn",
            worker_init_fn=functools.partial(_begin_worker, isolation(), sender, options.worker_init),
            generator=torch.Generator(),  # else the start of a loader would draw from the run's random state
            collate_fn=sender.hand_over,
            **reading,
        )
        try:
            with dropped_if_refused():
                return iter(loader)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise Unsendable(
                f"the dataset cannot be sent to a loader process: {error}\n"
                "      to do: define its class in a module and open files on first use, or set data.workers = 0"
            ) from error


def _begin_worker(
    isolate: Callable[[int], None], sender: Sender, own: Callable[[int], object] | None, number: int
) -> None:
    isolate(number)
    settle_temporary()
    sender.begin()
    if own is not None:
        own(number)


def _reduce_generator(generator: torch.Generator) -> tuple[Callable[..., torch.Generator], tuple[str, bytes]]:
    """Pickle a generator of a dataset by value: torch sends its state in a file that is closed before it is read."""
    return _make_generator, (str(generator.device), bytes(generator.get_state().tolist()))


def _make_generator(device: str, state: bytes) -> torch.Generator:
    generator = torch.Generator(device)
    generator.set_state(torch.tensor(list(state), dtype=torch.uint8))
    return generator
