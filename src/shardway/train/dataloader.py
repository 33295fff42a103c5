"""From a user's dataset or DataLoader to this rank's batches on its device, for training and validation.

Invariants:
- Reports on skipped data have no effect: `data.skips` alone decides which positions are left out.
- Which samples a rank gets follows from the resolved run, the grid and the position alone, if the data themselves are
  repeatable. If they may not be, this is reported once.
- Settings of the script hold where neither run file nor command line sets them. What cannot be right is refused before
  anything is read.
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
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    default_collate,
    default_convert,
)

from shardway.checkpoint.state import CheckpointState
from shardway.data.loader import (
    Batch,
    HeldOutStream,
    LoaderOptions,
    Share,
    StepLoader,
    StreamLoader,
    count_samples,
    digest_first,
    is_map_style,
    read_state,
    to_device,
    validation_batches,
    validation_stream,
)
from shardway.data.order import SampleOrder, Skips, position_share
from shardway.data.samplers import AnyOrder, BatchOrder, SamplerOrder, WholeBatches
from shardway.data.sources.base import DataSource
from shardway.data.workers import describe_shortage, fit_workers
from shardway.errors import UserError
from shardway.hardware.limits import count_threads, describe_few_cores
from shardway.rundir.lineage import SkippedRange
from shardway.runfile.load import DEFAULT
from shardway.train.loop_state import Counters
from shardway.train.script_state import StreamState
from shardway.train.session import Session
from shardway.units import Span

# --- reports on skipped data


def report_skipped(session: Session, before: Counters, after: Counters, own: Sequence[SkippedRange] = ()) -> None:
    """An event if the step between these counters has skipped positions; `own` are the spans of the run itself."""
    left_out = (after.position - before.position) - (after.samples - before.samples)
    if left_out:
        lists = {"data.skip": session.resolved.values.data.skip, "guard.on_spike": [each.span for each in own]}
        reach = (before.position, after.position)
        who = [name for name, spans in lists.items() if any(_meet(span, reach) for span in spans)]
        reason = (
            f"{' and '.join(who)} left out {left_out} samples between positions {before.position} and {after.position}"
        )
        session.recorder.event("data_skipped", step=after.step, samples=left_out, reason=reason)


def _meet(one: Sequence[int], other: Sequence[int]) -> bool:
    return one[0] < other[1] and other[0] < one[1]


def report_late_spans(session: Session, counters: Counters) -> None:
    """An event if a new span lies, at least in part, before the position of a resumed run: it comes too late."""
    before, now = session.changes.get("data.skip", ([], []))
    late = [span for span in now if span not in before and span[0] < counters.position]
    if late and counters.step:
        reason = (
            f"data.skip: {', '.join(map(str, late))} begins before position {counters.position}, where the run goes "
            "on; what was trained on before that stays learnt. To jump over it, move the checkpoints after it away"
        )
        session.recorder.event("skip_too_late", step=counters.step, spans=late, reason=reason)


# --- batches of this rank on its device

Collate = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class Loader:
    """The source of a run's batches: a source, a map-style dataset or an iterable one, and its facts.

    `size`: samples of an epoch; 0 if unknown. `order`: the order of a script's own sampler (None: the run's own order).
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
    """The state in which an iterable dataset began, None if it has none."""

    @property
    def is_stream(self) -> bool:
        """Whether its samples have no numbers and are read in sequence."""
        return not isinstance(self.samples, DataSource) and not is_map_style(self.samples)


def training_batches(
    session: Session, loader: Loader, state: CheckpointState | None, position: int, skips: Sequence[Sequence[int]]
) -> Iterator[Batch]:
    """This rank's share of every global batch from `position` on, without end; `skips` as in `data.skip`. `state`:
    where the data resume, beyond what the position gives."""
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
    """Whether an iterable dataset itself gives each rank other samples; called on all ranks together."""
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
    """Raise UserError if a sampler gives each rank another order; called on all ranks together."""
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
    """Report once why the order of samples may change after a resume."""
    if loader.order is not None and loader.order.hidden_state:
        session.note_once(
            "data_order_noted",
            f"{loader.fingerprint}: after a resume the sampler is run through from its first epoch on, with the random "
            "numbers of torch, numpy and Python seeded by train.seed. What it draws from elsewhere is not the same "
            "then.",
        )


def validation_data(session: Session, samples: Any, collate: Collate | None = None) -> Iterator[Any]:
    """This rank's share of the held-out samples (a source, a map-style or an iterable dataset), with as many batches on
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
    """The most samples that are validated on (None: all), and this rank's share of them."""
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
    to_come = max(0, torch.get_num_threads() - count_threads())  # torch starts them later
    workers, too_few = fit_workers(workers, here, session.task_limit, to_come)
    few_cores = describe_few_cores(workers, here) if workers else ""
    for said in (session.temporary, too_few, few_cores, describe_shortage() if workers else ""):
        if said:
            session.note_once("data_order_noted", said)
    pinned = session.ranks.device.type == "cuda"
    return LoaderOptions(workers, data.prefetch, pinned, init, functools.partial(_report, session))


def _report(session: Session, text: str) -> None:
    """Report something of this rank alone."""
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
    """The batches on a device, those of a source as pairs (inputs, targets)."""
    with contextlib.closing(batches) as stream:  # type: ignore[type-var]
        for batch in stream:
            yield to_device(_paired(batch), device)


def _paired(batch: Batch) -> Batch:
    """A source's batch, {"inputs": ..., "targets": ...}, as the pair that a training script expects."""
    data = batch.data
    if isinstance(data, dict) and data.keys() == {"inputs", "targets"}:
        return replace(batch, data=(data["inputs"], data["targets"]))
    return batch


# --- what a script hands to run.loader and run.validation


@dataclass(frozen=True)
class LoaderArguments:
    """The script's arguments of `run.loader`; None for those it leaves open."""

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
    """The loader that a script asks for; its settings hold unless a run file or the command line sets them.

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
    """Whether it is a DataLoader of torch, or one with its attributes, such as torchdata's."""
    names = ("dataset", "batch_size", "sampler", "batch_sampler", "collate_fn", "drop_last", "num_workers")
    return isinstance(data, DataLoader) or all(hasattr(data, name) for name in names)


def _take_over(given: LoaderArguments) -> LoaderArguments:
    """The arguments that a DataLoader of torch was made with, if `run.loader` was given nothing else."""
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
    """The `collate_fn` that a DataLoader was given; None if none."""
    return loader.collate_fn if loader.collate_fn not in (default_collate, default_convert) else None


def _is_plain_shuffle(loader: Any) -> bool:
    """Whether the sampler of a loader is what `shuffle=True` makes: then the run's own order shuffles, by train.seed.

    The sampler of torchdata's loader has a generator even if the script has given none, with another seed in each
    process.
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
    """An iterable dataset, read from its beginning."""
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
    """Raise UserError for an argument that such data do not support."""
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
    """Apply the script's settings where nothing else sets them."""
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
    """Raise UserError if a length needs the number of samples of an epoch, and it is unknown.

    `given`: whether the script sets the length of the run.
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
    """The validation data and their collate function: of a DataLoader, the samples that its sampler gives."""
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
