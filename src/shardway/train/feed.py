"""From data to this rank's batches on its device: for training from any position, for validation from the start.

Invariant: which samples a rank gets follows from the resolved run, the grid and the position alone. This module must
not take steps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from shardway.data.loader import Batch, LoaderOptions, Share, StepLoader, to_device, validation_batches
from shardway.data.order import Order, position_share
from shardway.data.skips import Skips
from shardway.train.session import Session


@dataclass(frozen=True)
class Loader:
    """Where a run's batches come from: a source or a map-style dataset, and what is known of it."""

    samples: Any
    size: int
    tokens_per_sample: int
    fingerprint: str


def training_batches(
    session: Session, loader: Loader, position: int, skips: Sequence[Sequence[int]]
) -> Iterator[Batch]:
    """This rank's share of every global batch from `position` on, without end; `skips` as in `data.skip`."""
    values, mesh = session.resolved.values, session.mesh
    order = Order(loader.size, values.train.seed, values.data.shuffle)
    share = Share(values.train.global_batch, mesh.data_rank, mesh.data_ranks)
    step_loader = StepLoader(loader.samples, order, share, _options(session))
    return _on_device(step_loader.batches(position, skips=Skips(skips)), session.ranks.device)


def validation_data(session: Session, samples: Any) -> Iterator[Any]:
    """This rank's share of the held-out samples (a source or a map-style dataset), as many batches on every rank."""
    count, share = _validation_share(session, samples)
    batches = validation_batches(samples, count, share, _options(session))
    return (batch.data for batch in _on_device(batches, session.ranks.device))


def validation_rows(session: Session, samples: Any) -> list[int]:
    """How many samples this rank has in each batch of `validation_data`."""
    count, share = _validation_share(session, samples)
    whole, rest = divmod(min(count, len(samples)), share.global_batch)
    rows = [len(position_share(each, share.rank, share.ranks)) for each in (share.global_batch, rest)]
    return [rows[0]] * whole + rows[1:] * min(rest, 1)


def _validation_share(session: Session, samples: Any) -> tuple[int, Share]:
    """How many samples are validated on at most, and this rank's share of them."""
    values, mesh = session.resolved.values, session.mesh
    count = len(samples) if session.leaves_alone("train.validation_samples") else values.train.validation_samples
    at_once = int(values.train.micro_batch) * session.resolved.derived.per_pass
    return count, Share(at_once * mesh.data_ranks, mesh.data_rank, mesh.data_ranks)


def _options(session: Session) -> LoaderOptions:
    data = session.resolved.values.data
    return LoaderOptions(data.workers, data.prefetch, pin_memory=session.ranks.device.type == "cuda")


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
