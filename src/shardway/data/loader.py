"""The batches of one rank, from any position on.

One mechanism serves our sources and a user's map-style dataset. Requests are a pure function of (order, start position,
share). They are answered in this process, or in workers by torch's DataLoader, whose batch sampler they are. What a
worker has read ahead and the loop has not consumed is dropped and read again, so only the position of the next batch
needs to be saved.

Invariant: the ids of a step do not depend on workers, prefetch or where reading began, and torch's random state is left
as it was. This module must not keep a position of its own or depend on steps, losses or checkpoints.
"""

from __future__ import annotations

import functools
import itertools
import logging
import pickle
import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.reduction import ForkingPickler
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data._utils.signal_handling import _error_if_any_worker_fails

from shardway.data.batch_tree import collate_by, move_batch, pin_batch
from shardway.data.handover import Sender, shorten_sockets, take_over
from shardway.data.order import Ids, SampleOrder, Skips, Words, derive_keys, position_share
from shardway.data.samplers import AnyOrder, BatchOrder, StreamSnapshot
from shardway.data.sources.base import DataSource
from shardway.data.workers import NoWorkers, dropped_if_refused, ended_workers, isolation
from shardway.errors import Bug, ShardwayError, UserError
from shardway.hardware.limits import settle_temporary

_IDS_AT_ONCE = 16384
"""Ids computed in one call of `Order.ids`: enough to make its fixed cost small beside a gather."""


@dataclass(frozen=True)
class Share:
    """Which rows of each global batch (samples over all ranks) this rank reads."""

    global_batch: int
    rank: int = 0
    ranks: int = 1


@dataclass(frozen=True)
class LoaderOptions:
    """`workers` processes (0 = read in this one), each `prefetch` batches ahead; `pin_memory` needs CUDA.

    Tokens are read fastest with 0 workers: sending a batch between processes costs more than gathering it.
    """

    workers: int = 0
    prefetch: int = 2
    pin_memory: bool = False
    worker_init: Callable[[int], object] | None = None
    """Called in each worker with its number before it reads, as torch's `worker_init_fn`."""
    tell: Callable[[str], object] = logging.getLogger("shardway").warning
    """Shows a message to the user."""


@dataclass(frozen=True, eq=False)
class Batch:
    """This rank's samples of one step.

    `data` is {"inputs": tensor, "targets": tensor} from a source, or what the user's dataset collates to; `ids` are its
    samples, int64. `position` is that of the step's first sample over all ranks; the next step begins at
    `next_position` (more than a batch later if positions are skipped). `snapshot` is the state of a stream after these
    samples, if it has one. Without `ids`, `data` holds one sample that does not count, so that a model never gets a
    batch without rows.
    """

    data: Any
    ids: Ids
    position: int
    next_position: int
    snapshot: StreamSnapshot | None = None

    def pin_memory(self) -> Batch:
        """The batch in page-locked memory (the DataLoader calls this by its name)."""
        return replace(self, data=pin_batch(self.data))


@dataclass(frozen=True, eq=False)
class StepRequest:
    """The request of the sampler to the dataset for one step."""

    position: int
    next_position: int
    ids: Ids
    seed: int
    """Seeds the random draws of the dataset in a worker; in the rank itself the rank's random state is used."""


@dataclass(frozen=True)
class StepSampler:
    """The requests of one rank: steps of `share.global_batch` from `position` on, `steps` of them or without end.

    A step takes the next positions that `skips` leaves.
    """

    order: AnyOrder
    share: Share
    position: int
    steps: int | None = None
    skips: Skips = field(default_factory=Skips)

    def __iter__(self) -> Iterator[StepRequest]:
        batch = self.share.global_batch
        rows = np.array(position_share(batch, self.share.rank, self.share.ranks), np.int64)
        # A sampler is read no earlier than needed: a script may change it between two epochs.
        at_once = max(1, _IDS_AT_ONCE // max(1, rows.size)) if isinstance(self.order, SampleOrder) else 1
        kept_before = self.skips.count_kept(self.position)
        step = 0
        while self.steps is None or step < self.steps:
            count = at_once if self.steps is None else min(at_once, self.steps - step)
            firsts = kept_before + np.arange(step, step + count) * batch
            starts, nexts = self.skips.find_kept(firsts), self.skips.find_kept(firsts + batch - 1) + 1
            ids = self.order.ids(self.skips.find_kept(firsts[:, None] + rows))
            seeds = _derive_seeds(self.order.seed, self.share.rank, starts)
            yield from map(StepRequest, starts.tolist(), nexts.tolist(), ids, seeds.tolist())
            step += count


@dataclass(frozen=True)
class BatchRequests:
    """As `StepSampler`, for a batch sampler that gives the samples of each step. Spans of `skips` are whole steps."""

    order: BatchOrder
    share: Share
    position: int
    skips: Skips = field(default_factory=Skips)

    def __iter__(self) -> Iterator[StepRequest]:
        size, kept_before = self.order.size, self.skips.count_kept(self.position)
        for step in itertools.count():
            first = np.array([kept_before + step * size])
            start, last = self.skips.find_kept(first), self.skips.find_kept(first + size - 1)
            if start % size or last - start != size - 1:
                raise UserError(
                    f"data.skip leaves a part of the batch at position {start[0]} out, and the batch_sampler of "
                    f"run.loader gives whole ones.\n  Allowed: spans whose ends are multiples of {size}."
                )
            ids = self.order.batch(int(start[0]) // size)
            mine = position_share(len(ids), self.share.rank, self.share.ranks)
            seeds = _derive_seeds(self.order.seed, self.share.rank, start)
            yield StepRequest(int(start[0]), int(last[0]) + 1, ids[mine.start : mine.stop], int(seeds[0]))


def _derive_seeds(seed: int, rank: int, starts: Ids) -> Words:
    return derive_keys(derive_keys(np.array([seed], np.uint64), np.array([rank])), starts)


class SourceDataset(Dataset[Any]):
    """A source as torch's map-style dataset: one gather per batch."""

    def __init__(self, source: DataSource) -> None:
        self.source = source

    def __len__(self) -> int:
        return len(self.source)

    def __getitems__(self, ids: Sequence[int] | Ids) -> dict[str, torch.Tensor]:
        arrays = self.source.batch(np.asarray(ids if len(ids) else [0], np.int64))
        return {name: torch.from_numpy(array) for name, array in arrays.items()}


class CollatedDataset(Dataset[Any]):
    """A user's map-style dataset whose samples are collated in the process that reads them."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any] | None) -> None:
        self.dataset = dataset
        self.collate = collate

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, ids: Sequence[int] | Ids) -> Any:
        wanted = [int(index) for index in ids] or [0]
        if hasattr(self.dataset, "__getitems__"):
            return collate_by(self.collate, self.dataset.__getitems__(wanted))
        return collate_by(self.collate, [self.dataset[index] for index in wanted])


class _WorkerDataset(Dataset[Any]):
    """Answers requests in a worker; an error of Shardway is an answer too, so that its text is kept."""

    def __init__(self, dataset: SourceDataset | CollatedDataset) -> None:
        self.dataset = dataset

    def __getitems__(self, request: StepRequest) -> Batch | ShardwayError:
        _seed_worker(request.seed)
        try:
            return _answer(self.dataset, request)
        except ShardwayError as error:
            return error


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
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        self._dataset = make_dataset(samples, collate)
        if isinstance(order, SampleOrder) and len(self._dataset) != order.samples:
            raise Bug(f"an order of {order.samples} samples over data with {len(self._dataset)}; please report this")
        self._order, self._share, self._options = order, share, options

    def batches(self, position: int, steps: int | None = None, skips: Skips | None = None) -> Iterator[Batch]:
        """This rank's batches from `position` (the beginning of the first step) on; without end if `steps` is None.

        Positions in `skips` are left out. A rank whose share is empty gets batches without `ids`. Closing the iterator
        ends its worker processes.
        """
        if isinstance(self._order, BatchOrder):
            batches = BatchRequests(self._order, self._share, position, skips or Skips())
            return read_batches(self._dataset, itertools.islice(batches, steps), self._options)
        sampler = StepSampler(self._order, self._share, position, steps, skips or Skips())
        return read_batches(self._dataset, sampler, self._options)


def validation_batches(
    samples: DataSource | Dataset[Any],
    count: int,
    share: Share,
    options: LoaderOptions = LoaderOptions(),
    collate: Callable[[list[Any]], Any] | None = None,
) -> Iterator[Batch]:
    """The first `count` samples (all, where there are fewer), in order, each exactly once over all ranks.

    Every rank gets the same number of batches; the last step may be smaller than `share.global_batch`.
    """
    dataset = make_dataset(samples, collate)
    order = SampleOrder(len(dataset), seed=0, shuffle=False)
    whole, rest = divmod(min(count, len(dataset)), share.global_batch)
    last = StepSampler(order, replace(share, global_batch=rest), whole * share.global_batch, min(rest, 1))
    return read_batches(dataset, itertools.chain(StepSampler(order, share, 0, whole), last), options)


def make_dataset(
    samples: DataSource | Dataset[Any], collate: Callable[[list[Any]], Any] | None = None
) -> SourceDataset | CollatedDataset:
    """A source or a user's map-style dataset behind one interface: `__getitems__(ids)` is a whole batch."""
    if isinstance(samples, DataSource):
        return SourceDataset(samples)
    if not is_map_style(samples):
        raise UserError(
            f"{type(samples).__name__} is not a map-style dataset, and only such a dataset resumes exactly\n"
            "      allowed: a dataset with __len__ and __getitem__\n"
            "      to do: give each sample a number, and read it in __getitem__"
        )
    return CollatedDataset(samples, collate)


def is_map_style(samples: Any) -> bool:
    """Whether a dataset has a length and gives a sample by number (torch's Dataset always has a __getitem__)."""
    return hasattr(samples, "__len__") and hasattr(samples, "__getitem__") and not isinstance(samples, IterableDataset)


def read_batches(
    dataset: SourceDataset | CollatedDataset, requests: Iterable[StepRequest], options: LoaderOptions
) -> Iterator[Batch]:
    """Answer each request, in order. Closing the iterator, or dropping it, leaves no process behind.

    Raises UserError if the dataset cannot be sent to a worker, JobError if a worker dies; an error of the user's
    dataset passes unchanged. If no workers can be started, this process reads, and this is reported.
    """
    if options.workers:
        requests, asked = itertools.tee(requests)
        try:
            started = _start_workers(dataset, asked, options)
        except NoWorkers as refused:
            options.tell(str(refused))
        else:
            del requests, asked  # keep no reference to the requests
            with ended_workers(started, _error_if_any_worker_fails) as answers:
                yield from take_over(answers)
            return
    for request in requests:  # no DataLoader: its fixed cost exceeds a gather
        batch = _answer(dataset, request)
        yield batch.pin_memory() if options.pin_memory else batch


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch with its tensors on a device; with pinned memory the copy overlaps with other work."""
    return replace(batch, data=move_batch(batch.data, device))


def _answer(dataset: SourceDataset | CollatedDataset, request: StepRequest) -> Batch:
    return Batch(dataset.__getitems__(request.ids), request.ids, request.position, request.next_position)


def _start_workers(
    dataset: SourceDataset | CollatedDataset, requests: Iterable[StepRequest], options: LoaderOptions
) -> Iterator[Any]:
    # A request stands for a batch of indices.
    return start_workers(_WorkerDataset(dataset), options, batch_sampler=cast(Any, requests))


def start_workers(
    dataset: Dataset[Any],
    options: LoaderOptions,
    **reading: Any,
) -> Iterator[Any]:
    """The iterator of a DataLoader with `options.workers` processes, whose answers `take_over` reads. Raises UserError
    if the dataset cannot be sent to them, NoWorkers if the system refuses to start them.

    Workers are spawned. A fork of a process that runs threads (a process group, CUDA) may copy a held lock and wait for
    it forever. Workers of a fork server hold the pipe that keeps the server alive, so they all stay after a SIGKILL of
    the rank.
    """
    ForkingPickler.register(torch.Generator, _reduce_generator)
    shorten_sockets()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Got pickle error")
        warnings.filterwarnings("ignore", message="This DataLoader will create")  # reported by `describe_few_cores`
        return _start(dataset, options, Sender(options.workers * options.prefetch), reading)


def _start(dataset: Dataset[Any], options: LoaderOptions, sender: Sender, reading: dict[str, Any]) -> Iterator[Any]:
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
        raise UserError(
            f"the dataset cannot be sent to a loader process: {error}\n"
            "      to do: define its class in a module and open files on first use, or set data.workers = 0"
        ) from error


def _reduce_generator(generator: torch.Generator) -> tuple[Callable[..., torch.Generator], tuple[str, bytes]]:
    """Pickle a generator of a dataset by value: torch sends its state in a file that is closed before it is read."""
    return _make_generator, (str(generator.device), bytes(generator.get_state().tolist()))


def _make_generator(device: str, state: bytes) -> torch.Generator:
    generator = torch.Generator(device)
    generator.set_state(torch.tensor(list(state), dtype=torch.uint8))
    return generator


def _begin_worker(
    isolate: Callable[[int], None], sender: Sender, own: Callable[[int], object] | None, number: int
) -> None:
    isolate(number)
    settle_temporary()
    sender.begin()
    if own is not None:
        own(number)


def _seed_worker(seed: int) -> None:
    """Set the random state of a worker, so that what a dataset draws depends on the batch, not on the worker."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
