"""From a dataset or DataLoader of the user to this rank's batches on its device, and what a checkpoint holds of it.

Invariants:
- Which samples a rank gets follows from the resolved run, the grid and the position alone, if the data themselves are
  repeatable. If they may not be, this is reported once.
- Settings of the script hold where neither run file nor command line sets them. What cannot be right is refused before
  anything is read.
- Each rank saves the state that belongs to the last batch that counts, however far ahead was read. Ranks that read the
  same data (of one pipeline, or of one tensor group) save one. With the same number of ranks the dataset resumes from
  its state. Otherwise, or if none was saved, it is run through from its beginning, which is reported once.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import pickle
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch.utils._pytree import tree_map_only
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    default_collate,
    default_convert,
)

from shardway.checkpoint.file_format import TensorTable
from shardway.checkpoint.state import (
    CheckpointState,
    Tensors,
    Unstorable,
    make_room,
    put_state_together,
    structure_name,
    take_state_apart,
)
from shardway.data.batch_tree import LengthGroups
from shardway.data.ledger import SPLIT
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
    name_stream,
    read_state,
    to_device,
    validation_batches,
    validation_stream,
)
from shardway.data.open import order_of
from shardway.data.order import Skips, position_share
from shardway.data.samplers import (
    AnyOrder,
    BatchOrder,
    SamplerOrder,
    SamplerStand,
    SamplerStands,
    StreamSnapshot,
    WholeBatches,
)
from shardway.data.sources.base import DataSource, StreamSource, describe_slow_order
from shardway.data.waiting import MOST, START_S, WorkerChoice, describe_waiting, tuned_batches, watched_batches
from shardway.data.workers import describe_shortage, fit_workers
from shardway.errors import UserError
from shardway.hardware.limits import count_own_cores, count_threads, describe_few_cores
from shardway.resolve.draft import value_of
from shardway.resolve.request import list_epoch_keys
from shardway.rundir.names import SkippedRange
from shardway.runfile.load import DEFAULT
from shardway.train.damaged_data import report_damage
from shardway.train.loop_state import Counters
from shardway.train.loss import IGNORED
from shardway.train.session import Session

Collate = Callable[[list[Any]], Any]

NOTE = "data_order_noted"
"""The event of what a user should know of the order of the data."""
SLOW = "data_slow"
"""The event of a run that waits long for its data."""


@dataclass(frozen=True)
class Loader:
    """What a run's batches are read from: a source, a map-style dataset or an iterable one, and its facts.

    `size`: samples of an epoch; 0 if unknown. `order`: the order of a script's own sampler (None: the run's own order).
    `begin`: the state in which an iterable dataset began, None if it has none.
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

    @property
    def is_stream(self) -> bool:
        """Whether its samples have no numbers and are read in sequence."""
        return not isinstance(self.samples, DataSource) and not is_map_style(self.samples)

    @property
    def name(self) -> str:
        """What messages call the data."""
        return self.samples.name if isinstance(self.samples, StreamSource) else self.fingerprint


# --- batches of this rank on its device


def training_batches(
    session: Session, loader: Loader, state: CheckpointState | None, position: int, skips: Sequence[Sequence[int]]
) -> Iterator[Batch]:
    """This rank's share of every global batch from `position` on, without end; `skips` as in `data.skip`. `state`:
    where the data resume, beyond what the position gives. Raises UserError if a sampler gives each rank another order.
    """
    values, mesh, ranks, order = session.resolved.values, session.mesh, session.ranks, loader.order
    share = Share(values.train.batch, mesh.data_rank, mesh.data_ranks)
    options = _options(session, loader)

    def slow(waiting: float) -> None:
        chosen, tunes = session.reading, values.data.workers == "auto" and bool(options.workers)
        workers = chosen.workers if chosen is not None else options.workers
        line = describe_waiting(waiting, workers, tunes=tunes, in_sequence=loader.is_stream)
        _report(session, SLOW, line)

    if order is not None and order.hidden_state:
        session.note_once(
            NOTE,
            f"{loader.fingerprint}: after a resume the sampler is run through from its first epoch on, with the random "
            "numbers of torch, numpy and Python seeded by train.seed. What it draws from elsewhere is not the same "
            "then.",
        )
    if loader.is_stream:
        if isinstance(loader.samples, StreamSource):
            _report_sequence(session, loader.samples)
        own = False
        if mesh.data_ranks > 1:  # an iterable dataset may give each rank other samples itself
            digests = ranks.gather(ranks.together(lambda: digest_first(loader.samples, 0)))
            own = len(set(digests)) > 1 and "" not in digests
        if own:
            session.note_once(
                SPLIT,
                f"{name_stream(loader.samples)} gives each rank samples of its own, so each takes all that it is "
                "given: after a resume on another number of ranks the order of samples is another.",
            )
        reader = StreamLoader(loader.samples, values.train.seed, share, options, loader.collate, own, loader.begin)
        if not isinstance(state, StreamState):
            batches = reader.batches(position, Skips(skips))
        else:
            batches = state.watched(reader.batches(position, Skips(skips), state.begin))
        return _on_device(watched_batches(batches, slow), session)
    if order is not None and mesh.data_ranks > 1:
        first = np.arange(position, position + share.largest)
        ids = ranks.together(
            lambda: order.batch(position // order.size) if isinstance(order, BatchOrder) else order.ids(first)
        )
        if len(set(ranks.gather(hashlib.blake2b(ids.tobytes()).hexdigest()))) > 1:
            raise UserError(
                "the sampler of run.loader gives each rank another order, so that samples would be missed.\n"
                "  To do: seed what it draws from alike on every rank (torch's, numpy's and Python's random numbers "
                "are), and let it give all samples, not a rank's part."
            )
    if order is None and values.data.shuffle and (why := describe_slow_order(loader.samples)):
        words = f"samples come slowly in random order (data.shuffle): {why}"
        session.note_once(SLOW, f"{words}. To do: `shardway data prepare` once, and train on what it writes.")
    used: AnyOrder | BatchOrder = order or order_of(values, loader.samples)
    if loader.whole_batches and not isinstance(used, BatchOrder | WholeBatches):
        used = WholeBatches(used, loader.size)

    def begin(workers: int, start: int) -> Iterator[Batch]:
        now = replace(options, workers=workers)
        return StepLoader(loader.samples, used, share, now, loader.collate).batches(start, skips=Skips(skips))

    if session.windows is not None:
        session.windows.begin(position, Skips(skips))

    if values.data.workers == "auto" and options.workers:

        def settled(choice: WorkerChoice) -> None:
            session.reading = choice
            facts = {"workers": choice.workers, "waited": choice.before.share, "waits": choice.now.share}
            session.recorder.event("loader", step=session.recorder.step_done, **facts, reason=str(choice))

        batches = tuned_batches(begin, position, options.workers, options.prefetch, settled, slow)
    else:
        batches = watched_batches(begin(options.workers, position), slow)
    if session.windows is not None:
        batches = session.windows.watched(batches)
    return _on_device(batches, session)


def _report_sequence(session: Session, samples: StreamSource) -> None:
    """Show once what has no effect on samples that come in sequence."""
    resolved = session.resolved
    notes = ["data.shuffle has no effect"] if resolved.values.data.shuffle else []
    if resolved.values.train.validate_every == "off" and resolved.is_derived("train.validate_every"):
        notes.append("nothing is validated, as nothing is held out at the end of what is read in sequence")
    if notes:
        described = f"{samples.name} is iterable, and its samples come in its own order"
        session.note_once(NOTE, f"{described}: {', and '.join(notes)}.")
    if not samples.state_is_exact:
        session.note_once(
            NOTE,
            f"{samples.name}: its state is not used, as it does not bring back the sample that comes next. To do: let "
            "it change before each yield, and hold what is buffered.",
        )


def validation_data(session: Session, samples: Any, collate: Collate | None = None) -> Iterator[Any]:
    """This rank's share of the held-out samples (a source, a map-style or an iterable dataset), with as many batches on
    every rank."""
    most, share = _validation_share(session, samples)
    count = count_samples(samples, most)
    if isinstance(samples, DataSource) or is_map_style(samples):
        options = _options(session)
        if session.resolved.values.data.workers == "auto":
            options = replace(options, workers=_workers_for(session, count))
        batches = validation_batches(samples, count, share, options, collate)
    else:
        batches = validation_stream(samples, count, share, collate)

    def take(batch: Batch) -> Any:
        if batch.left_out:
            report_damage(session, batch.left_out, session.recorder.step_done, of="validation")
        return batch.data

    return map(take, _on_device(batches, session))


def validation_rows(session: Session, samples: Any) -> list[int]:
    """How many samples this rank has in each batch of `validation_data`."""
    most, share = _validation_share(session, samples)
    whole, rest = divmod(count_samples(samples, most), share.largest)
    rows = [len(position_share(each, share.rank, share.ranks)) for each in (share.largest, rest)]
    return [rows[0]] * whole + rows[1:] * min(rest, 1)


def _validation_share(session: Session, samples: Any) -> tuple[int | None, Share]:
    """The most samples that are validated on (None: all), and this rank's share of them."""
    values, mesh = session.resolved.values, session.mesh
    most = None if session.leaves_alone("train.validation_samples") else values.train.validation_samples
    at_once = int(values.train.micro_batch) * session.resolved.derived.per_pass
    return most, Share(at_once * mesh.data_ranks, mesh.data_rank, mesh.data_ranks)


def _workers_for(session: Session, samples: int) -> int:
    """Loader processes of a validation on so many samples over all ranks, where data.workers is auto: those of the
    training, if to start them takes a small part of the time that the rank would need itself."""
    chosen = session.reading
    if chosen is None:
        return 0
    seconds = chosen.before.waiting / session.resolved.values.train.batch.largest * samples
    return chosen.workers if seconds > 5 * START_S else 0


def _options(session: Session, loader: Loader | None = None) -> LoaderOptions:
    data, here, ranks = session.resolved.values.data, session.ranks.placement.local_world, session.ranks
    collate, init = (loader.collate, loader.worker_init) if loader is not None else (None, None)
    tunes = data.workers == "auto"
    if data.workers == "auto":
        # A script's dataset may be one that no other process can read.
        able = loader is not None and not loader.is_stream and not session.leaves_alone("data.workers")
        workers = min(MOST, count_own_cores(here)) if able else 0
    else:
        workers = data.workers
    for name, function in (("collate_fn", collate), ("worker_init_fn", init)):
        if not workers:
            break
        try:
            pickle.dumps(function)
        except (pickle.PicklingError, AttributeError, TypeError):
            workers = 0
            session.note_once(
                NOTE,
                f"data.workers is {data.workers}, and the {name} of run.loader cannot be sent to a loader process (a "
                "lambda, or a function inside another): each rank reads its batches itself. To do: define it with def "
                "at the top of a module.",
            )
    if loader is not None and loader.is_stream:
        workers = min(workers, 1)
    notes = [session.temporary]
    if workers:
        to_come = max(0, torch.get_num_threads() - count_threads())  # torch starts them later
        workers, too_few = fit_workers(workers, here, session.task_limit, to_come)
        if not tunes:  # what is tuned is measured
            notes += [too_few, *([describe_few_cores(workers, here), describe_shortage()] if workers else [])]
    for said in filter(None, notes):
        session.note_once(NOTE, said)
    seeded = tunes and loader is not None and not isinstance(loader.samples, DataSource)
    cuda = ranks.device.type == "cuda"
    return LoaderOptions(
        workers,
        data.prefetch,
        cuda,
        init,
        seeded,
        ranks.device if cuda else None,  # on a CPU the thread would take turns with the training
        lambda text: _report(session, NOTE, text),
        skip_damaged=session.resolved.values.guard.damaged_data == "skip",
    )


def _report(session: Session, event: str, text: str) -> None:
    """Report something of this rank alone."""
    if session.ranks.is_first:
        session.note_once(event, text)
    else:
        logging.getLogger("shardway").warning(f"rank {session.ranks.rank}: {text}")


def _on_device(batches: Iterator[Batch], session: Session) -> Iterator[Batch]:
    """The batches on the rank's device; those of a source, {"inputs": ..., "targets": ...}, as the pair that a training
    script expects, and groups of documents with lengths that the layout splits evenly."""
    parallel = session.resolved.values.parallel
    chunks = 2 * parallel.cp if parallel.cp > 1 else 1
    parts = math.lcm(chunks, parallel.cp * parallel.tp if parallel.tp_sequence else 1)
    with contextlib.closing(batches) as stream:  # type: ignore[type-var]
        for batch in stream:
            data = batch.data
            if isinstance(data, dict) and data.keys() == {"inputs", "targets"}:
                batch = replace(batch, data=(data["inputs"], data["targets"]))
            if isinstance(data, LengthGroups):
                batch = replace(batch, data=pad_groups(data, parts))
            yield to_device(batch, session.ranks.device)


def pad_groups(groups: LengthGroups, multiple: int) -> LengthGroups:
    """The groups with lengths that are multiples of a number, by more padding at the end of each row."""

    def pad(tensor: torch.Tensor, value: int) -> torch.Tensor:
        missing = -tensor.shape[1] % multiple
        return torch.nn.functional.pad(tensor, (0, missing), value=value) if missing else tensor

    return LengthGroups((pad(inputs, 0), pad(targets, IGNORED)) for inputs, targets in groups)


# --- data of a script that are not the same on all ranks, or that it changes while the run trains


def check_same_data(session: Session, loader: Loader) -> None:
    """Raise UserError on every rank if one was given another map-style dataset; called on all ranks together. That
    tensors or lists differ is reported once: they may have been drawn at random."""
    ranks = session.ranks
    if ranks.world == 1:
        return
    facts = ranks.gather(ranks.together(lambda: (loader.is_stream, loader.fingerprint, *_digest_data(loader.samples))))
    if loader.is_stream or len(set(facts)) == 1:
        return
    rank, other = next((rank, each) for rank, each in enumerate(facts) if each != facts[0])
    first = facts[0][1]
    what = f"{first} on rank 0 and {other[1]} on rank {rank}" if other[1] != first else f"{first}, of other samples"
    words = f"run.loader was not given the same data on all ranks: {what}."
    remedy = "To do: give every rank the whole dataset; each takes its share of every batch by itself."
    if other[:-1] == facts[0][:-1]:
        session.note_once(NOTE, f"{words} {remedy}")
    else:
        raise UserError(f"{words}\n  Nothing was trained. {remedy}")


def _digest_data(samples: Any) -> tuple[str, str]:
    """Digests of what differs between parts of one dataset: numbers of samples, and values. They are the same where it
    is not known without reading samples that may be random."""
    numbers, values = b"", b""
    with contextlib.suppress(Exception):
        if isinstance(samples, Subset):
            numbers = np.asarray(list(samples.indices), np.int64).tobytes()
        elif isinstance(samples, TensorDataset | list | tuple):
            values = pickle.dumps([_as_plain(samples[at]) for at in (0, -1)])
    return hashlib.blake2b(numbers).hexdigest(), hashlib.blake2b(values).hexdigest()


def _as_plain(sample: Any) -> Any:
    """A sample without what differs between two tensors of the same values."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.detach().cpu().tolist(), sample)


def changes_noted(
    batches: Iterator[Batch], session: Session, dataset: Any, is_kept: Callable[[], bool]
) -> Iterator[Batch]:
    """The batches; it is reported once if the script has changed a number or a string of its dataset between two of
    them, which no checkpoint holds. `is_kept`: whether the script keeps its dataset itself."""
    with contextlib.closing(batches) as stream:  # type: ignore[type-var]
        is_noted = isinstance(dataset, DataSource | StreamSource)
        for batch in stream:
            before = {} if is_noted else _read_fields(dataset)
            yield batch
            now = {} if is_noted else _read_fields(dataset)
            changed = [name for name in before if name in now and now[name] != before[name]]
            if changed and not is_kept():
                is_noted, name, workers = True, changed[0], session.resolved.values.data.workers
                blind = f"; its loader processes (data.workers = {workers}) do not see the change" if workers else ""
                session.note_once(
                    NOTE,
                    f"the script has changed {type(dataset).__name__}.{name} from {before[name]!r} to {now[name]!r} "
                    f"between two batches, which no checkpoint holds: after a resume it begins anew{blind}. To do: "
                    'give it state_dict() and load_state_dict(), and call run.keep("data", dataset).',
                )


def _read_fields(dataset: Any) -> dict[str, Any]:
    """The numbers and strings that are public in a dataset."""
    fields = {**vars(type(dataset)), **getattr(dataset, "__dict__", {})}
    plain = (bool, int, float, str, type(None))
    return {name: value for name, value in fields.items() if type(value) in plain and not name.startswith("_")}


# --- reports on skipped data; they have no effect


def report_skipped(session: Session, before: Counters, after: Counters, own: Sequence[SkippedRange] = ()) -> None:
    """An event if the step between these counters has skipped positions; `own` are the spans of the run itself."""
    left_out = (after.position - before.position) - (after.samples - before.samples)
    if left_out:
        lists = {"data.skip": session.resolved.values.data.skip, "guard.on_spike": [each.span for each in own]}
        start, end = before.position, after.position
        by = [name for name, spans in lists.items() if any(span[0] < end and start < span[1] for span in spans)]
        reason = f"{' and '.join(by)} left out {left_out} samples between positions {start} and {end}"
        session.recorder.event("data_skipped", step=after.step, samples=left_out, reason=reason)


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
    workers: int | Literal["auto"] | None = None
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
    dataset, name = given.dataset, type(given.dataset).__name__
    if isinstance(dataset, DataSource):
        _refuse_beside(given, f"the source {name}, which gives whole batches in the run's own order")
        _set_defaults(session, given)
        return Loader(dataset, len(dataset), dataset.tokens_per_sample, dataset.facts.fingerprint)
    if isinstance(dataset, StreamSource):
        _refuse_beside(given, f"{dataset.name}, whose samples are joined as the model takes them")
        _set_defaults(session, given)
        begin = read_state(dataset.open())
        fingerprint = session.ranks.gather(dataset.facts.fingerprint)[0]  # it may give each rank samples of its own
        return Loader(dataset, dataset.size, dataset.tokens_per_sample, fingerprint, begin=begin)
    if not is_map_style(dataset):
        return _make_stream(session, given)
    _check_some(dataset, "run.loader")
    if given.sampler is not None and given.batch_sampler is not None:
        raise UserError("run.loader takes a sampler or a batch_sampler, not both.")
    resolved = session.resolved
    seed, own = resolved.values.train.seed, given.sampler
    order: SamplerOrder | BatchOrder | None = SamplerOrder(own, seed) if own is not None else None
    if given.batch_sampler is not None:
        if given.batch_size is not None or given.drop_last is not None:
            raise UserError(
                "run.loader takes no batch_size or drop_last beside a batch_sampler, which says what a batch is."
            )
        order = BatchOrder(given.batch_sampler, seed)
        ramp, origin = resolved.values.train.batch, resolved.origins["train.global_batch"]
        if origin != DEFAULT and ramp.sizes != (order.size,):
            raise UserError(
                f"the batch_sampler of {given.origin} gives batches of {order.size} samples, and train.global_batch is "
                f"{resolved.values.train.global_batch} ({origin}).\n"
                "  To do: let them be the same, or leave train.global_batch away."
            )
        given = replace(given, batch_size=order.size)
    _set_defaults(session, given)
    kind = f"{name} of {len(dataset)}"
    if order is not None:
        kind = f"{kind} in the order of {type(given.sampler if own is not None else given.batch_sampler).__name__}"
    size = order.samples if order is not None else len(dataset)
    drops = bool(given.drop_last) and not isinstance(order, BatchOrder)
    if drops:
        ramp = session.resolved.values.train.batch
        if not ramp.is_constant:
            raise UserError(
                "run.loader(drop_last=True) ends an epoch with its last whole batch, and train.global_batch is "
                f"{session.resolved.values.train.global_batch} "
                f"({session.resolved.origins['train.global_batch']}): batches of several sizes.\n"
                "  To do: leave drop_last away (a batch at the end of an epoch goes on with the next one), or let all "
                "batches be of one size."
            )
        batch = ramp.largest
        if size < batch:
            raise UserError(
                f"run.loader(drop_last=True) leaves no batch: an epoch has {size} samples, a batch {batch}.\n"
                "  To do: lower batch_size (train.global_batch), or leave drop_last away."
            )
        size, kind = size // batch * batch, f"{kind}, whole batches of {batch}"
    return Loader(dataset, size, 1, kind, given.collate_fn, order, drops, given.worker_init)


def _check_some(dataset: Any, origin: str) -> None:
    """Raise UserError for a map-style dataset without samples."""
    if not len(dataset):
        raise UserError(
            f"{origin} was given {type(dataset).__name__} of 0 samples.\n"
            "  To do: look at where they come from: a wrong folder, or a filter that leaves nothing."
        )


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
    kind, begin = f"the stream {name}{f' of {size}' if size else ''}", read_state(given.dataset)
    return Loader(given.dataset, size, 1, kind, given.collate_fn, None, False, given.worker_init, begin)


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
    for key, argument, value in (
        ("train.global_batch", "batch_size", given.batch_size),
        ("data.workers", "workers", given.workers),
        ("data.shuffle", "shuffle", given.shuffle),
        ("data.prefetch", "prefetch", given.prefetch),
    ):
        if value is not None:
            origin = f"{given.origin}({argument}={value})"
            before = session.resolved.origins[key]
            session.take_default(key, value, origin)
            if key == "train.global_batch" and before.startswith("run.loader(") and before != origin:
                session.note_once("loader", f"{origin} has no effect: the global batch of the run is that of {before}.")


def check_length(session: Session, loader: Loader, *, given: bool) -> None:
    """Raise UserError if a length needs the number of samples of an epoch, and it is unknown.

    `given`: whether the script sets the length of the run.
    """
    if loader.size:
        return
    name, values, origins = name_stream(loader.samples), session.resolved.values, session.resolved.origins
    if not given and session.leaves_alone("train.steps"):
        raise UserError(
            f"{name} has no length, so nothing says how long the run is.\n"
            "  To do: say it in steps, run.steps(loader, 1000) or train.steps = 1000."
        )
    for key in list_epoch_keys(values):
        raise UserError(
            f'{key} is "{value_of(values, key)}" ({origins[key]}), and {name} has no length, so nothing says how many '
            f"steps an epoch has.\n  To do: give {key} in steps, or give {name} a __len__."
        )


def take_validation(dataset: Any, collate: Collate | None) -> tuple[Any, Collate | None]:
    """The validation data and their collate function: of a DataLoader, the samples that its sampler gives."""
    if not _is_loader(dataset):
        in_sequence = isinstance(dataset, StreamSource) or hasattr(dataset, "__iter__")
        known = isinstance(dataset, DataSource) or is_map_style(dataset) or not in_sequence
        if is_map_style(dataset):
            _check_some(dataset, "run.validation")
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


# --- what a checkpoint holds of a script's data beside the position: states of iterable datasets, and of samplers with
# generators or a state

STREAM, ORDER = "stream", "order"
"""Prefixes of names in a checkpoint; the first is followed by a rank's place among those that read."""


def find_data_state(
    session: Session, loader: Loader, find_position: Callable[[], int]
) -> StreamState | OrderState | None:
    """What a checkpoint holds of a loader's data beside the position; None if the position is enough."""
    if loader.is_stream:
        return StreamState(session, loader.name, find_position)
    return OrderState(session, loader.order, loader.size, find_position) if loader.order is not None else None


class StreamState(CheckpointState):
    """The state of a stream on this rank. `find_position` gives the position of the run when it is saved; the next
    reading starts at `begin`."""

    def __init__(self, session: Session, name: str, find_position: Callable[[], int]) -> None:
        mesh = session.mesh
        self._session, self._name, self._find_position = session, name, find_position
        self._part, self._ranks = f"{STREAM}-{mesh.data_rank}", mesh.data_ranks
        self._leads = all(mesh.coordinate(axis) == 0 for axis in ("pp", "cp", "tp"))
        self._seen: deque[tuple[int, StreamSnapshot]] = deque(maxlen=2)  # the last may belong to a void step
        self._facts: Mapping[str, Any] = {}
        self._unused = ""
        self.begin: StreamSnapshot | None = None

    def watched(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The batches; their states are remembered, and it is reported once if there are none."""
        first, last = True, None
        for batch in batches:
            if batch.following is not None and last is not None:
                self._seen.append((last[0], replace(last[1], following=batch.following)))
            if batch.snapshot is not None:
                last = (batch.next_position, batch.snapshot)
            if first:
                self._report_what_is_run_through(batch)
            first = False
            yield batch

    def _report_what_is_run_through(self, batch: Batch) -> None:
        alone = "one loader process reads it, whatever data.workers says"
        workers = self._session.resolved.values.data.workers not in ("auto", 0, 1)
        if self._unused:
            self._report(self._unused)
        if batch.went_astray:
            self._report(
                "its state does not lead to the sample that came next, since it leaves something out (a shuffle "
                "buffer, a generator), so it is run through from its beginning to where the run was."
            )
        if batch.snapshot is None:
            self._report(
                "after a resume it is run through from its beginning to where the run was. The order is the same if it "
                "gives the same samples each time; the random numbers of torch, numpy and Python that it draws are the "
                f"same{f'; {alone}' if workers else ''}. It goes on without that where it has state_dict() and "
                "load_state_dict(), and draws from generators of its own alone, which its state holds."
            )
        elif workers:
            self._report(f"{alone}.")

    def collect(self) -> Tensors:
        """The last state that a sample has followed and that is not after the last batch that counts, as one structure
        and its tensors; else that at the beginning of this attempt."""
        position = self._find_position()
        snapshot = next((each for end, each in reversed(self._seen) if end <= position), self.begin)
        if snapshot is None or not self._leads:
            return {}
        try:
            parts = take_state_apart(pickle.loads(snapshot.state))
        except Unstorable as error:
            where = f" at {error.path}" if error.path else ""
            self._report(
                f"its state{where} is a {error.kind}, which a checkpoint cannot hold, so after a resume it is run "
                "through from its beginning."
            )
            return {}
        facts = {
            "ranks": self._ranks,
            "given": snapshot.given,
            "epoch": snapshot.epoch,
            "in_epoch": snapshot.in_epoch,
            "of_iterator": snapshot.of_iterator,
            "following": snapshot.following,
            "state": parts.text,
        }
        own = {self._part: dict(parts.tensors)} if parts.tensors else {}
        return {**own, structure_name(self._part): json.dumps(facts)}

    def template(self, table: TensorTable) -> Tensors:
        """Targets for this rank's state, if as many ranks have saved theirs."""
        self.begin, self._unused, self._facts = None, "", {}
        first, own = structure_name(f"{STREAM}-0"), structure_name(self._part)
        if first not in table.values:
            return {}
        saved = json.loads(json.loads(table.values[first]))["ranks"]
        if saved != self._ranks:
            self._unused = (
                f"{saved} rank(s) have saved where they stood in it and {self._ranks} read it now, so it is run "
                "through from its beginning to where the run was."
            )
            return {}
        if own not in table.values:
            return {}
        self._facts = dict(json.loads(json.loads(table.values[own])))
        room = make_room(table, f"{self._part}.")
        return {self._part: room} if room else {}

    def install(self, tensors: Tensors) -> None:
        if not self._facts:
            return
        loaded = tensors.get(self._part, {})
        state = put_state_together(self._facts["state"], lambda name, device: loaded[name])
        known = {name: self._facts[name] for name in ("given", "epoch", "in_epoch", "of_iterator")}
        following = self._facts.get("following", "")  # older checkpoints have none
        self.begin = StreamSnapshot(**known, state=pickle.dumps(state), following=following)

    def _report(self, what: str) -> None:
        self._session.note_once(NOTE, f"{self._name}: {what}")


class OrderState(CheckpointState):
    """The state of a sampler, the same on all ranks: before the epochs that it was run through for, and now."""

    def __init__(
        self, session: Session, order: SamplerOrder | BatchOrder, samples: int, find_position: Callable[[], int]
    ) -> None:
        """`samples`: the samples of an epoch."""
        self._session, self._order, self._samples, self._find_position = session, order, samples, find_position
        self._text = ""

    def collect(self) -> Tensors:
        """Rank 0's state, as one structure and its tensors; nothing if a position is enough."""
        stands = self._order.stands(self._find_position() // self._samples)
        if not self._session.ranks.is_first or (not stands.first.generators and stands.first.own is None):
            return {}

        def spread(stand: SamplerStand) -> dict[str, Any]:
            own = pickle.loads(stand.own) if stand.own is not None else None
            return {"generators": stand.generators, "own": own, "has_own": stand.own is not None}

        state = {
            "epoch": stands.epoch,
            "first": spread(stands.first),
            "befores": {epoch: spread(stand) for epoch, stand in stands.befores.items()},
            "now": spread(stands.now),
            "read": stands.read,
        }
        try:
            parts = take_state_apart(state)
        except Unstorable as error:
            self._session.note_once(
                NOTE,
                f"the state of the sampler of run.loader holds a {error.kind}, which a checkpoint cannot hold, so "
                "after a resume it begins as the script makes it and is run through from its first epoch on.",
            )
            return {}
        own = {ORDER: dict(parts.tensors)} if parts.tensors else {}
        return {**own, structure_name(ORDER): parts.text}

    def template(self, table: TensorTable) -> Tensors:
        name = structure_name(ORDER)
        self._text = json.loads(table.values[name]) if name in table.values else ""
        room = make_room(table, f"{ORDER}.")
        return {ORDER: room} if room and self._text else {}

    def install(self, tensors: Tensors) -> None:
        if not self._text:
            return

        def gather(saved: Mapping[str, Any]) -> SamplerStand:
            return SamplerStand(saved["generators"], pickle.dumps(saved["own"]) if saved["has_own"] else None)

        loaded = tensors.get(ORDER, {})
        saved = put_state_together(self._text, lambda name, device: loaded[name])
        befores = {epoch: gather(stand) for epoch, stand in saved["befores"].items()}
        first, now = gather(saved["first"]), gather(saved["now"])
        self._order.go_on(SamplerStands(first, saved["epoch"], befores, now, saved["read"]))
