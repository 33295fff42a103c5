"""What a script hands to `run.loader` and `run.validation`: datasets, samplers, collate functions, torch's DataLoader.

Invariant: what the script says stands where no run file or command line does, and what cannot be right is refused
before anything is read. This module must not read samples for training.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    default_collate,
    default_convert,
)

from shardway.data.loader import is_map_style
from shardway.data.samplers import BatchOrder, SamplerOrder
from shardway.data.sources.base import DataSource
from shardway.data.stateful import read_state
from shardway.data.stream import HeldOutStream
from shardway.errors import UserError
from shardway.runfile.load import DEFAULT
from shardway.train.dataloader import Collate, Loader
from shardway.train.session import Session
from shardway.units import Span


@dataclass(frozen=True)
class LoaderArguments:
    """What a script hands to `run.loader`; None for what it leaves open."""

    dataset: Any
    batch_size: int | None = None
    collate_fn: Collate | None = None
    sampler: Any = None
    batch_sampler: Any = None
    drop_last: bool | None = None
    workers: int | None = None
    shuffle: bool | None = None
    prefetch: int | None = None
    worker_init: Callable[[int], object] | None = None
    origin: str = "run.loader"


def make_loader(session: Session, given: LoaderArguments) -> Loader:
    """The loader that a script asks for; what it says stands where no run file or command line does.

    Raises UserError for arguments that contradict each other, and for data that cannot be read in order.
    """
    if _is_loader(given.dataset):
        given = _take_over(given)
    dataset = given.dataset
    if isinstance(dataset, DataSource):
        _refuse_beside(given, f"the source {type(dataset).__name__}, which gives whole batches in the run's own order")
        _set_defaults(session, given)
        return Loader(dataset, len(dataset), dataset.tokens_per_sample, dataset.facts.fingerprint)
    name = type(dataset).__name__
    if not is_map_style(dataset):
        return _make_stream(session, given)
    if given.sampler is not None and given.batch_sampler is not None:
        raise UserError("run.loader takes a sampler or a batch_sampler, not both.")
    seed, own = session.resolved.values.train.seed, given.sampler
    order: SamplerOrder | BatchOrder | None = SamplerOrder(own, seed) if own is not None else None
    if given.batch_sampler is not None:
        order, given = _take_batches(session, given, seed)
    _set_defaults(session, given)
    kind = f"{name} of {len(dataset)}"
    if order is not None:
        kind = f"{kind} in the order of {type(given.sampler if own is not None else given.batch_sampler).__name__}"
    size = order.samples if order is not None else len(dataset)
    drops = bool(given.drop_last) and not isinstance(order, BatchOrder)
    if drops:
        batch = session.resolved.values.train.global_batch
        if size < batch:
            raise UserError(
                f"run.loader(drop_last=True) leaves no batch: an epoch has {size} samples, a batch {batch}.\n"
                "  To do: lower batch_size (train.global_batch), or leave drop_last away."
            )
        size, kind = size // batch * batch, f"{kind}, whole batches of {batch}"
    return Loader(dataset, size, 1, kind, given.collate_fn, order, drops, given.worker_init)


def _is_loader(data: Any) -> bool:
    """Whether it is a DataLoader of torch, or one of its kind, such as torchdata's."""
    names = ("dataset", "batch_size", "sampler", "batch_sampler", "collate_fn", "drop_last", "num_workers")
    return isinstance(data, DataLoader) or all(hasattr(data, name) for name in names)


def _take_over(given: LoaderArguments) -> LoaderArguments:
    """What a DataLoader of torch was made with, where `run.loader` was given nothing else."""
    loader = given.dataset
    taken = replace(
        given,
        origin="the DataLoader",
        dataset=loader.dataset,
        batch_size=given.batch_size or loader.batch_size,
        collate_fn=given.collate_fn or _own_collate(loader),
        workers=given.workers if given.workers is not None else loader.num_workers,
        worker_init=loader.worker_init_fn,
        prefetch=loader.prefetch_factor,
    )
    if isinstance(loader.dataset, IterableDataset):
        if taken.batch_size is None:
            raise UserError(
                "the DataLoader has batch_size=None: its dataset gives whole batches, which cannot be shared over "
                "ranks.\n  To do: let the dataset give samples, and set batch_size."
            )
        return taken
    if taken.sampler is not None or taken.batch_sampler is not None:
        return taken
    if loader.batch_size is None and loader.batch_sampler is not None:
        return replace(taken, batch_sampler=loader.batch_sampler)
    if taken.batch_size is None:
        raise UserError(
            "the DataLoader has batch_size=None, and run.loader needs to know how many samples a batch has.\n"
            "  To do: give it a batch_size."
        )
    taken = replace(taken, drop_last=given.drop_last if given.drop_last is not None else loader.drop_last)
    if type(loader.sampler) is SequentialSampler:
        return replace(taken, shuffle=False)
    return taken if _is_plain_shuffle(loader) else replace(taken, sampler=loader.sampler)


def _own_collate(loader: DataLoader[Any]) -> Collate | None:
    """The `collate_fn` that a DataLoader was given; None where it was given none."""
    return loader.collate_fn if loader.collate_fn not in (default_collate, default_convert) else None


def _is_plain_shuffle(loader: Any) -> bool:
    """Whether the sampler of a loader is what `shuffle=True` makes: then the run's own order shuffles, by train.seed.

    That of torchdata's loader has a generator also where the script has given none, with another seed in each process.
    """
    sampler = loader.sampler
    if type(sampler) is not RandomSampler:
        known = type(sampler).__module__.startswith("torchdata.") and type(sampler).__name__ == "RandomSampler"
        if not known or getattr(loader, "generator", None) is not None:
            return False
    elif sampler.generator is not None:
        return False
    return not sampler.replacement and len(sampler) == len(sampler.data_source)


def _take_batches(session: Session, given: LoaderArguments, seed: int) -> tuple[BatchOrder, LoaderArguments]:
    """The order of a batch sampler, and the batch size that it has."""
    if given.batch_size is not None or given.drop_last is not None:
        raise UserError(
            "run.loader takes no batch_size or drop_last beside a batch_sampler, which says what a batch is."
        )
    order, resolved = BatchOrder(given.batch_sampler, seed), session.resolved
    batch, origin = resolved.values.train.global_batch, resolved.origins["train.global_batch"]
    if origin != DEFAULT and batch != order.size:
        raise UserError(
            f"the batch_sampler of {given.origin} gives batches of {order.size} samples, and train.global_batch is "
            f"{batch} ({origin}).\n  To do: let them be the same, or leave train.global_batch away."
        )
    return order, replace(given, batch_size=order.size)


def _make_stream(session: Session, given: LoaderArguments) -> Loader:
    """An iterable dataset, which is run through from its beginning."""
    name = type(given.dataset).__name__
    if not hasattr(given.dataset, "__iter__"):
        raise UserError(
            f"run.loader cannot read data of the type {name}.\n"
            "  Allowed: a dataset with __len__ and __getitem__ (map-style), one with __iter__ (iterable), a DataLoader "
            "of torch, or a source of shardway.data."
        )
    _refuse_beside(replace(given, collate_fn=None), f"{name}, an iterable dataset, whose samples come in its own order")
    _set_defaults(session, given)
    size = 0
    if hasattr(given.dataset, "__len__"):
        with contextlib.suppress(TypeError, NotImplementedError):
            size = len(given.dataset)
    known = f" of {size}" if size else ""
    kind, begin = f"the stream {name}{known}", read_state(given.dataset)
    return Loader(given.dataset, size, 1, kind, given.collate_fn, None, False, given.worker_init, begin)


def _refuse_beside(given: LoaderArguments, data: str) -> None:
    """Raise UserError for an argument that such data cannot follow."""
    arguments = {
        "collate_fn": given.collate_fn is not None,
        "sampler": given.sampler is not None,
        "batch_sampler": given.batch_sampler is not None,
        "drop_last": bool(given.drop_last),
    }
    wrong = [name for name, is_given in arguments.items() if is_given]
    if wrong:
        raise UserError(
            f"run.loader takes no {' and no '.join(wrong)} with {data}.\n"
            "  To do: leave it away; a batch at the end of an epoch goes on with the next one."
        )


def _set_defaults(session: Session, given: LoaderArguments) -> None:
    """Let what the script says stand where nothing else does."""
    said = {
        "train.global_batch": ("batch_size", given.batch_size),
        "data.workers": ("workers", given.workers),
        "data.shuffle": ("shuffle", given.shuffle),
        "data.prefetch": ("prefetch", given.prefetch),
    }
    for key, (argument, value) in said.items():
        if value is not None:
            origin = f"{given.origin}({argument}={value})"
            session.resolution = session.resolution.with_default(key, value, origin)


def check_length(session: Session, loader: Loader, *, given: bool) -> None:
    """Raise UserError where a length needs to know how many samples an epoch has, and nothing says so.

    `given`: whether the script says how long the run is.
    """
    if loader.size:
        return
    name, values, origins = type(loader.samples).__name__, session.resolved.values, session.resolved.origins
    if not given and session.leaves_alone("train.steps"):
        raise UserError(
            f"{name} has no length, so nothing says how long the run is.\n"
            "  To do: say it in steps, run.steps(loader, 1000) or train.steps = 1000."
        )
    keys = (
        "train.steps",
        "train.validate_every",
        "checkpoint.every",
        "checkpoint.keep_every",
        "checkpoint.local_every",
    )
    for key in (*keys, "optim.warmup", "optim.decay"):
        section, field = key.split(".")
        span = getattr(getattr(values, section), field)
        if isinstance(span, Span) and span.unit == "epochs":
            raise UserError(
                f'{key} is "{span}" ({origins[key]}), and {name} has no length, so nothing says how many steps an '
                f"epoch has.\n  To do: give {key} in steps, or give {name} a __len__."
            )


def take_validation(dataset: Any, collate: Collate | None) -> tuple[Any, Collate | None]:
    """What is validated on, and how it is collated: of a DataLoader, the samples that its sampler gives."""
    if not _is_loader(dataset):
        known = isinstance(dataset, DataSource) or is_map_style(dataset) or not hasattr(dataset, "__iter__")
        return dataset if known else HeldOutStream(dataset), collate
    collate = collate or _own_collate(dataset)
    samples, sampler, batches = dataset.dataset, dataset.sampler, dataset.batch_sampler
    if isinstance(samples, IterableDataset):
        return take_validation(samples, collate)
    if dataset.batch_size is None and batches is not None:
        order = BatchOrder(batches, 0)
        ids = np.concatenate([order.batch(number) for number in range(order.samples // order.size)])
    elif type(sampler) is SequentialSampler or _is_plain_shuffle(dataset):
        return samples, collate
    else:
        whole = SamplerOrder(sampler, 0)
        ids = whole.ids(np.arange(whole.samples))
    return Subset(samples, ids.tolist()), collate
