"""From data to this rank's batches on its device: for training from any position, for validation from the start.

Invariant: which samples a rank gets follows from the resolved run, the grid and the position alone, as far as the data
themselves do; where they may not, it is said once. This module must not take steps.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from shardway.checkpoint.state import CheckpointState
from shardway.data.handover import describe_shortage
from shardway.data.loader import (
    Batch,
    LoaderOptions,
    Share,
    StepLoader,
    is_map_style,
    to_device,
    validation_batches,
)
from shardway.data.order import SampleOrder, position_share
from shardway.data.samplers import AnyOrder, BatchOrder, SamplerOrder, WholeBatches
from shardway.data.skips import Skips
from shardway.data.sources.base import DataSource
from shardway.data.stream import StreamLoader, count_samples, digest_first, validation_stream
from shardway.data.worker_room import fit_workers
from shardway.errors import UserError
from shardway.hardware.limits import count_threads, describe_few_cores
from shardway.train.data_state import StreamState
from shardway.train.session import Session

Collate = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class Loader:
    """Where a run's batches come from: a source, a map-style dataset or an iterable one, and what is known of it.

    `size`: samples of an epoch; 0 where nothing says how many there are. `order`: what a script's own sampler gives
    (None: the run's own order).
    """

    samples: Any
    size: int
    tokens_per_sample: int
    fingerprint: str
    collate: Collate | None = None
    order: SamplerOrder | BatchOrder | None = None
    whole_batches: bool = False
    worker_init: Callable[[int], object] | None = None
    begin: bytes | None = None
    """The state that an iterable dataset began with, where it has one."""

    @property
    def is_stream(self) -> bool:
        """Whether its samples have no numbers and are run through."""
        return not isinstance(self.samples, DataSource) and not is_map_style(self.samples)


def training_batches(
    session: Session, loader: Loader, state: CheckpointState | None, position: int, skips: Sequence[Sequence[int]]
) -> Iterator[Batch]:
    """This rank's share of every global batch from `position` on, without end; `skips` as in `data.skip`. `state`:
    where the data go on from, as far as the position does not say that."""
    values, mesh = session.resolved.values, session.mesh
    share = Share(values.train.global_batch, mesh.data_rank, mesh.data_ranks)
    options = _options(session, loader)
    _note_order(session, loader)
    if loader.is_stream:
        own = _gives_own_samples(session, loader)
        reader = StreamLoader(loader.samples, values.train.seed, share, options, loader.collate, own, loader.begin)
        if not isinstance(state, StreamState):
            return _on_device(reader.batches(position, Skips(skips)), session.ranks.device)
        batches = reader.batches(position, Skips(skips), state.begin)
        return _on_device(state.watched(batches), session.ranks.device)
    order: AnyOrder | BatchOrder = loader.order or SampleOrder(
        len(loader.samples), values.train.seed, values.data.shuffle
    )
    if loader.order is not None:
        _check_alike(session, loader, position)
    if loader.whole_batches and not isinstance(order, BatchOrder | WholeBatches):
        order = WholeBatches(order, loader.size)
    step_loader = StepLoader(loader.samples, order, share, options, loader.collate)
    return _on_device(step_loader.batches(position, skips=Skips(skips)), session.ranks.device)


def _gives_own_samples(session: Session, loader: Loader) -> bool:
    """Whether an iterable dataset gives each rank other samples by itself; asked on all ranks together."""
    if session.mesh.data_ranks == 1:
        return False
    digests = session.ranks.gather(session.ranks.together(lambda: digest_first(loader.samples, 0)))
    own = len(set(digests)) > 1 and "" not in digests
    if own:
        session.note_once(
            "data_order_noted",
            f"{type(loader.samples).__name__} gives each rank samples of its own, so each takes all that it is given: "
            "after a resume on another number of ranks the order of samples is another.",
        )
    return own


def _check_alike(session: Session, loader: Loader, position: int) -> None:
    """Raise UserError where a sampler gives each rank another order; called on all ranks together."""
    if session.mesh.data_ranks == 1 or loader.order is None:
        return
    batch, order = session.resolved.values.train.global_batch, loader.order
    first = np.arange(position, position + batch)
    ids = session.ranks.together(
        lambda: order.batch(position // order.size) if isinstance(order, BatchOrder) else order.ids(first)
    )
    if len(set(session.ranks.gather(hashlib.blake2b(ids.tobytes()).hexdigest()))) > 1:
        raise UserError(
            "the sampler of run.loader gives each rank another order, so that samples would be missed.\n"
            "  To do: seed what it draws from alike on every rank (torch's, numpy's and Python's random numbers are), "
            "and let it give all samples, not a rank's part."
        )


def _note_order(session: Session, loader: Loader) -> None:
    """Say once what of the order of samples may not be the same after a resume."""
    if loader.order is not None and loader.order.hidden_state:
        session.note_once(
            "data_order_noted",
            f"{loader.fingerprint}: after a resume the sampler is run through from its first epoch on, with the random "
            "numbers of torch, numpy and Python seeded by train.seed. What it draws from elsewhere is not the same "
            "then.",
        )


def validation_data(session: Session, samples: Any, collate: Collate | None = None) -> Iterator[Any]:
    """This rank's share of the held-out samples (a source, a map-style or an iterable dataset), as many batches on
    every rank."""
    most, share = _validation_share(session, samples)
    count = count_samples(samples, most)
    if isinstance(samples, DataSource) or is_map_style(samples):
        batches = validation_batches(samples, count, share, _options(session), collate)
    else:
        batches = validation_stream(samples, count, share, collate)
    return (batch.data for batch in _on_device(batches, session.ranks.device))


def validation_rows(session: Session, samples: Any) -> list[int]:
    """How many samples this rank has in each batch of `validation_data`."""
    most, share = _validation_share(session, samples)
    whole, rest = divmod(count_samples(samples, most), share.global_batch)
    rows = [len(position_share(each, share.rank, share.ranks)) for each in (share.global_batch, rest)]
    return [rows[0]] * whole + rows[1:] * min(rest, 1)


def _validation_share(session: Session, samples: Any) -> tuple[int | None, Share]:
    """How many samples are validated on at most (None: all), and this rank's share of them."""
    values, mesh = session.resolved.values, session.mesh
    most = None if session.leaves_alone("train.validation_samples") else values.train.validation_samples
    at_once = int(values.train.micro_batch) * session.resolved.derived.per_pass
    return most, Share(at_once * mesh.data_ranks, mesh.data_rank, mesh.data_ranks)


def _options(session: Session, loader: Loader | None = None) -> LoaderOptions:
    data = session.resolved.values.data
    init = loader.worker_init if loader is not None else None
    workers = data.workers
    for name, function in (("collate_fn", loader.collate if loader is not None else None), ("worker_init_fn", init)):
        if workers and not _can_be_sent(function):
            workers = 0
            session.note_once(
                "data_order_noted",
                f"data.workers is {data.workers}, and the {name} of run.loader cannot be sent to a loader process (a "
                "lambda, or a function inside another): each rank reads its batches itself. To do: define it with def "
                "at the top of a module.",
            )
    here = session.ranks.placement.local_world
    if loader is not None and loader.is_stream:
        workers = min(workers, 1)
    to_come = max(0, torch.get_num_threads() - count_threads())  # torch starts them when it is told how many, or later
    workers, too_few = fit_workers(workers, here, session.task_limit, to_come)
    few_cores = describe_few_cores(workers, here) if workers else ""
    for said in (session.temporary, too_few, few_cores, describe_shortage() if workers else ""):
        if said:
            session.note_once("data_order_noted", said)
    pinned = session.ranks.device.type == "cuda"
    return LoaderOptions(workers, data.prefetch, pinned, init, functools.partial(_report, session))


def _report(session: Session, text: str) -> None:
    """Say what happened on this rank alone."""
    if session.ranks.is_first:
        session.note_once("data_order_noted", text)
    else:
        logging.getLogger("shardway").warning(f"rank {session.ranks.rank}: {text}")


def _can_be_sent(function: Any) -> bool:
    try:
        pickle.dumps(function)
    except (pickle.PicklingError, AttributeError, TypeError):
        return False
    return True


def _on_device(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    """The batches on a device, a source's as the pair (inputs, targets)."""
    with contextlib.closing(batches) as stream:  # type: ignore[type-var]
        for batch in stream:
            yield to_device(_paired(batch), device)


def _paired(batch: Batch) -> Batch:
    """A source's batch, {"inputs": ..., "targets": ...}, as the pair that a training script expects."""
    data = batch.data
    if isinstance(data, dict) and data.keys() == {"inputs", "targets"}:
        return replace(batch, data=(data["inputs"], data["targets"]))
    return batch
