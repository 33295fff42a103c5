"""The library door: `shardway.start()` and what a script that owns its loop calls.

    with shardway.start() as run:
        model = run.shard(Net())
        optimizer = run.optimizer(torch.optim.AdamW, model, lr=3e-4)
        loader = run.loader(dataset, batch_size=64)
        for batch in run.steps(loader):
            loss = run.step(model, batch, loss_fn)

Invariants:
- The command line trains through this same door, which passes each call to the room that owns it.
- A run is closed once, with the error that ended its script if there was one. A failure to show something never ends or
  changes the run.

A line of `shardway train` is written by its event, in the thread that records it. So it stands whole between the
script's own output (a bar of tqdm makes room for it), and in the cell of a notebook that trains. It goes to stderr,
since a script's stdout is its own; in a notebook, whose stdout is not parsed, it goes to stdout.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import shlex
import sys
import threading
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Literal, TextIO, TypeVar

import torch
from torch import nn

from shardway.checkpoint.catalog import find_tie
from shardway.checkpoint.state import KeptObjects
from shardway.checkpoint.writer import check_savable
from shardway.data.loader import Batch
from shardway.data.open import Data, open_resolved
from shardway.data.sources.base import ConcatSource, DataSource
from shardway.errors import JobError, UserError, in_words_of_scripts
from shardway.models.build import build_model
from shardway.models.contract import find_base
from shardway.parallel.apply import ApplyOptions, apply_parallelism
from shardway.prefetch.check import locate_whole_model
from shardway.ranks.start import is_out_of_memory
from shardway.ranks.stop import find_shell, report_errors, restore_hook, script_hook
from shardway.resolve import DataFacts, Resolved
from shardway.resolve.draft import takes_of
from shardway.resolve.request import ResolveRequest, parse_words, read_keys_variable
from shardway.rundir.attempts import VARIABLE as ATTEMPT
from shardway.rundir.directory import RunDir
from shardway.rundir.events import Event
from shardway.train.blended import describe_blend
from shardway.train.by_hand import BackwardCall, GradientsByHand
from shardway.train.dataloader import (
    Loader,
    LoaderArguments,
    changes_noted,
    check_length,
    check_same_data,
    find_data_state,
    make_loader,
    take_validation,
    training_batches,
    validation_data,
    validation_rows,
)
from shardway.train.engines import ENGINES, Engine, EngineParts, StepCall, script_explained
from shardway.train.held import HeldOptimizer, Holdings, check_several
from shardway.train.loop import Loop
from shardway.train.loop_state import LoopPlan
from shardway.train.loss import LossSum, class_cross_entropy, token_cross_entropy
from shardway.train.loss_probe import probe_loss
from shardway.train.memory import explain_memory
from shardway.train.optim.kinds import build_optimizer
from shardway.train.passes import BatchSplit, let_go
from shardway.train.session import Session, format_named, keep_formats, open_session, resolve_for_model
from shardway.train.staging import stage_for_node
from shardway.train.validate import Validation, check_metrics
from shardway.watch.progress import read_validations
from shardway.watch.words import PlainLines, list_last_lines

T = TypeVar("T")

OWN_MODEL_KEYS = ("data.shuffle", "data.workers", "data.prefetch", "data.record_ids", "data.skip")
"""Of [model] and [data], what has an effect on a script that brings its own model and data."""


class LiveRun:
    """One run as its script sees it; made by `start`."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._held = Holdings(KeptObjects(session.ranks.device, session.ranks.rank))
        self._loop: Loop | None = None
        self._engines: dict[int, Engine] = {}
        self._by_hand: GradientsByHand | None = None
        self._probes_loss = False
        self._opened: OpenedRun[LiveRun] | None = None
        self._display: ScriptDisplay | None = None

    @property
    def resolved(self) -> Resolved:
        """The resolved run: `run.resolved.values.train.seed`."""
        return self._session.resolved

    @property
    def directory(self) -> RunDir:
        """The run directory."""
        return self._session.directory

    @property
    def device(self) -> torch.device:
        """This rank's device."""
        return self._session.ranks.device

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0."""
        return self._session.ranks.is_first

    @property
    def session(self) -> Session:
        """What the run is made of, for recipes."""
        return self._session

    @property
    def step_number(self) -> int:
        """How many steps are done; in the loop of a resumed run, with those of earlier attempts.

        Raises UserError before the loop has begun: what the run goes on from is known then.
        """
        if self._loop is None or not self._loop.has_begun:
            raise UserError(
                "run.step_number was read before the first batch, when it is not known yet from which step the run "
                "goes on.\n  To do: read it within `for batch in run.steps(loader)`."
            )
        return self._loop.counters.step

    # --- before the loop

    def shard(self, model: nn.Module, name: str | None = None) -> nn.Module:
        """Make a model parallel as the run file says and move it to this rank's device; returns what to call.

        A model that has weights keeps those of rank 0; one on the meta device is filled by its `init_weights(seed)`.
        A run may have several models; `name` is what a further one is called in checkpoints and events. Raises
        UserError where the model cannot be split or filled.
        """
        self._check_open("run.shard", before_loop=True)
        precision, compiled = resolve_for_model(self._session, model, is_first=not self._held.models)
        values = self.resolved.values
        options = ApplyOptions(
            parallel=values.parallel,
            precision=precision,
            recompute=values.recompute,
            compile=compiled,
            channels_last=values.train.channels_last,
            seed=values.train.seed,
            wrap_copies=ENGINES[values.train.engine].wraps_copies,
        )
        parallel = apply_parallelism(model, self._session.mesh, self.device, options)
        check_savable(parallel.module.state_dict(), f"what {type(model).__name__} holds", in_place=True)
        keep_formats(self._session, parallel.module, precision)
        return self._held.add_model(parallel, name, precision).parallel.given

    def optimizer(
        self,
        factory: Callable[..., torch.optim.Optimizer],
        model: nn.Module,
        *,
        name: str | None = None,
        **options: Any,
    ) -> torch.optim.Optimizer:
        """`factory(model.parameters(), **options)`, saved and resumed with the run.

        Its learning rate is the script's own unless the run file sets `optim.schedule`; then it is the peak of it.
        `name` is what a further optimizer is called in checkpoints.
        """
        self._check_open("run.optimizer", before_loop=True)
        return self._held.add_optimizer(factory(model.parameters(), **options), model, name).optimizer

    def scheduler(
        self,
        factory: Callable[..., Any],
        optimizer: torch.optim.Optimizer,
        *,
        name: str | None = None,
        **options: Any,
    ) -> Any:
        """`factory(optimizer, **options)`, a learning-rate scheduler that is saved and resumed with the run.

        The script calls its `step()`: after each `run.step`, at the end of an epoch, or with a metric. `name` is what
        it is called in checkpoints.
        """
        scheduler = factory(optimizer, **options)
        name = self._held.add_scheduler(scheduler, optimizer, name)
        if self._loop is not None:
            self._loop.resume_scheduler(name, scheduler)
        return scheduler

    def keep(self, name: str, thing: T) -> T:
        """Save and resume an object that has `state_dict()` and `load_state_dict(state)`, or a generator of random
        numbers (torch's, numpy's, Python's); returns it.

        The state may be nested dicts, lists and tuples of tensors, numbers, strings and None. What all ranks have alike
        is saved once, as rank 0 has it; of a generator each rank's. Raises UserError where a checkpoint cannot hold the
        state.
        """
        self._held.keep(name, thing)
        return thing

    def loader(
        self,
        dataset: Any,
        batch_size: int | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        sampler: Any = None,
        batch_sampler: Any = None,
        drop_last: bool | None = None,
        workers: int | Literal["auto"] | None = None,
    ) -> Loader:
        """Batches of a dataset (map-style or iterable, a source of `shardway.data`, or a DataLoader of torch, of which
        all this is taken over), each rank its share of every batch.

        `batch_size` counts samples over all ranks, so that the loss does not depend on their number;
        `train.global_batch` of a run file or the command line wins over it. `collate_fn`, `sampler` and `batch_sampler`
        are as those of a DataLoader. With `drop_last` an epoch ends before a batch that would not be whole; without,
        such a batch goes on with the next epoch. `workers` stands for `data.workers`.
        """
        self._check_open("run.loader")
        given = LoaderArguments(dataset, batch_size, collate_fn, sampler, batch_sampler, drop_last, workers)
        return make_loader(self._session, given)

    def validation(
        self,
        dataset: Any,
        loss_fn: Callable[..., LossSum | torch.Tensor],
        collate_fn: Callable[[list[Any]], Any] | None = None,
        metrics: Any = None,
    ) -> Validation:
        """What `steps` validates on: every sample of a dataset (as of `loader`) once, over all ranks.

        `loss_fn` as in `step`. `train.validation_samples`, where the run file sets it, is how many at most. Afterwards
        `last` of what is returned holds the metrics, `step` their step, `results` those of all validations by step, and
        `best` step and metrics of the best by `checkpoint.monitor`.
        `metrics` are metric objects by name, such as torchmetrics': each sees outputs and targets of every sample once.
        """
        bytes_per_token = dataset.facts.bytes_per_token if isinstance(dataset, DataSource) else None
        samples, collate = take_validation(dataset, collate_fn)
        rows = partial(validation_rows, self._session, samples)
        objects = check_metrics(metrics) if metrics is not None else {}
        data = partial(validation_data, self._session, samples, collate)
        monitor = self.resolved.values.checkpoint.monitor
        return Validation(data, loss_fn, bytes_per_token, rows, objects, monitor=monitor)

    # --- the loop

    def steps(
        self,
        loader: Loader,
        length: str | int | None = None,
        validation: Validation | None = None,
        on_step: Callable[[int, dict[str, Any]], None] | None = None,
    ) -> Iterator[Any]:
        """The batches that are left of the run, on this rank's device: resumes, records, validates, saves, stops.

        `length` ("3 epochs", 500) stands where nothing sets `train.steps`. A source's batch is (inputs, targets); a
        dataset's is what torch's default_collate makes of its samples.
        """
        self._check_open("run.steps")
        with in_words_of_scripts() if self._opened is not None else contextlib.nullcontext():
            loop = self._make_loop(loader, length, validation, on_step)
        return loop.batches() if self._opened is None else _of_script(loop.batches())

    def _make_loop(
        self,
        loader: Loader,
        length: str | int | None,
        validation: Validation | None,
        on_step: Callable[[int, dict[str, Any]], None] | None,
    ) -> Loop:
        session, held = self._session, self._held
        if not isinstance(loader, Loader):
            raise UserError(
                f"run.steps takes what run.loader gives, not a {type(loader).__name__}.\n"
                "  To do: hand your dataset to run.loader(dataset, batch_size=...), which shares it over the ranks."
            )
        origin = f"run.steps(length={length!r})"
        if length is not None and self._loop is not None:
            self._check_second_length(origin, self._loop)
        elif length is not None:
            session.take_default("train.steps", length, origin)
        if not session.settled:
            session.own_model = True
            check_length(session, loader, given=length is not None)
            session.settle(
                DataFacts(loader.size, loader.tokens_per_sample, None),
                keep=lambda key: not key.startswith(("model.", "data.")) or key in OWN_MODEL_KEYS,
            )
        values, origins = session.resolved.values, session.resolved.origins
        asked = {"checkpoint.keep_best": values.checkpoint.keep_best, "train.patience": values.train.patience}
        named = [f"{key} is {value} ({origins[key]})" for key, value in asked.items() if value not in (0, "off")]
        if named and validation is None:
            raise UserError(
                f"{' and '.join(named)}, which needs validations, and run.steps was given none.\n"
                "  To do: hand run.steps(loader, validation=run.validation(held_out, loss_fn)), or leave the key out."
            )
        self._leave_earlier()
        if not held.models or not held.optimizers:
            missing = "run.optimizer(...)" if held.models else "run.shard(model)"
            raise UserError(f"run.steps needs what is to be resumed and saved: call {missing} before it.")
        held.check_unwrapped()
        if session.own_model:
            check_same_data(session, loader)
        check_several(held, self.resolved.values)
        self._engines = {id(each.optimizer): self._make_engine(each) for each in held.optimizers}
        self._probes_loss = own = session.own_model
        self._by_hand = GradientsByHand(session, held, self._engines) if own else None

        def batches_from(position: int, skips: Sequence[Sequence[int]]) -> Iterator[Batch]:
            batches = training_batches(session, loader, state, position, skips)
            kept = held.kept.objects.values()
            return changes_noted(batches, session, loader.samples, lambda: any(loader.samples is each for each in kept))

        state = find_data_state(session, loader, lambda: self._loop.counters.position if self._loop is not None else 0)
        self._loop = Loop(
            session,
            LoopPlan(
                session,
                DataFacts(loader.size, loader.tokens_per_sample, None),
                loader.fingerprint,
                describe_blend(session.resolved.values, loader.samples)
                if isinstance(loader.samples, ConcatSource)
                else None,
                find_base(held.models[0].parallel.module),
            ),
            list(self._engines.values()),
            batches_from,
            validation=validation,
            on_step=on_step,
            held=held if own else None,
            by_hand=self._by_hand,
            data=state,
            reading_draws=own or not isinstance(loader.samples, DataSource),  # ours draw nothing
        )
        return self._loop

    def step(
        self,
        model: nn.Module,
        batch: Any,
        loss_fn: Callable[..., LossSum | torch.Tensor],
        optimizer: torch.optim.Optimizer | None = None,
    ) -> float:
        """One optimizer step on this batch; the mean loss over the global batch.

        The model's own optimizer takes it, or the one that is given. With several optimizers a batch may have any
        number of steps, and counts as one.

        Of a pair (inputs, targets), `loss_fn(model(inputs), targets)` is the loss; of any other batch,
        `loss_fn(model, batch)`. It returns the mean over its samples, or a `LossSum` where targets may not count.
        Gradients of a script's own model are clipped only where the run file sets `optim.clip`.
        """
        self._check_open("run.step")
        if self._loop is None:
            raise UserError("run.step was called before run.optimizer and `for batch in run.steps(loader)`.")
        self._held.check_unwrapped(model)
        held = self._held.find_optimizer(model, optimizer)
        # The loss is named after the model, or after the optimizer where the model has several.
        alone = sum(each.model is held.model for each in self._held.optimizers) == 1
        name = held.model.name if alone else held.name
        call = StepCall(self._engines[id(held.optimizer)], name, model, loss_fn)

        def look(rows: int | None) -> None:
            """Look once whether the loss depends on how its batch is cut."""
            if self._probes_loss:
                self._probes_loss = False
                probe_loss(self._session, call.engine.passes, model, batch, loss_fn, rows)
                for each in self._held.models:
                    let_go(each.parallel)

        with format_named(self.resolved, call.engine.passes.precision):
            return self._loop.step(call, batch, look)

    def backward(
        self,
        loss: LossSum | torch.Tensor,
        model: nn.Module | None = None,
        *,
        samples: int | None = None,
        retain_graph: bool = False,
    ) -> float:
        """In place of `loss.backward()`: add the gradient of the mean over the global batch to `.grad`; the mean loss.

        `loss` is the mean over this rank's samples of the batch, or a `LossSum`. The script calls its optimizer itself,
        and `run.clip` where it clips. Of several models, `model` says whose gradients count (None: of all). Calls for
        one batch add up; `samples` says of how many samples a loss is the mean where the script has cut the batch.
        """
        if self._loop is None:
            raise UserError("run.backward was called before run.optimizer and `for batch in run.steps(loader)`.")
        models = tuple(self._held.models if model is None else [self._held.find_given(model, "run.backward")])
        first = next((each for each in self._held.optimizers if each.model in models), self._held.optimizers[0])
        call = BackwardCall(self._engines[id(first.optimizer)], models[0].name, models, loss, samples, retain_graph)
        return self._loop.backward(call)

    def clip(self, target: Any, max_norm: float) -> float:
        """Bring the norm of gradients over all ranks and shards down to `max_norm`; the norm before.

        `target` is a model, an optimizer, or parameters. Call it on all ranks together.
        """
        if self._by_hand is None:
            raise UserError("run.clip was called before `for batch in run.steps(loader)`.")
        return self._by_hand.clip(target, float(max_norm))

    def autocast(self) -> AbstractContextManager[None]:
        """Around a forward pass and a loss that the script computes itself: the format of `precision.compute`."""
        if self._by_hand is None:
            raise UserError("run.autocast was called before `for batch in run.steps(loader)`.")
        return self._by_hand.autocast()

    def log(self, metrics: Mapping[str, Any] | None = None, /, *, reduce: str = "mean", **values: Any) -> None:
        """Write down values of the step under way: `run.log(accuracy=0.93)`, or `run.log({"top 5": 0.99})`.

        A value is a number, a tensor of one element, or a metric object such as torchmetrics', which is computed over
        all ranks. `reduce` says how numbers of several ranks become one: their "mean" by samples of the batch, "sum",
        "min" or "max". Ranks need not log alike, and none waits. Raises UserError for what is no number.
        """
        if self._loop is None:
            raise UserError(
                "run.log was called before run.steps.\n  To do: call it within `for batch in run.steps(loader)`."
            )
        self._loop.log({**dict(metrics.items() if metrics is not None else ()), **values}, reduce)

    def stop(self, reason: str = "the script ended it") -> None:
        """Let the run be finished after the step under way, saved, and never continued; where any rank calls it."""
        if self._loop is None or not self._loop.has_begun:
            raise UserError(
                "run.stop was called before the first batch.\n  To do: call it within `for batch in run.steps(loader)`."
            )
        self._loop.finish_early(reason)

    # --- the end

    def close(self) -> None:
        """The end of the run in this script, where it was not opened by `with`; a second call does nothing."""
        if self._opened is not None:
            self._opened.close()
        else:
            self.leave()

    def __enter__(self) -> LiveRun:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return self._opened.close(kind, error, trace) if self._opened is not None else None

    def leave(self) -> None:
        """A loop that the script left early is saved and said to be stopped. Raises UserError if it cannot be, since
        the script has destroyed torch's process group."""
        if self._loop is not None:
            ends = self._loop.has_begun and not self._loop.has_ended
            if ends and self._session.ranks.world > 1 and not torch.distributed.is_initialized():
                raise UserError(
                    "the script has left its loop early, and torch's process group was destroyed before the end of the "
                    "run, so nothing since the last checkpoint is saved.\n"
                    "  To do: call run.close() before torch.distributed.destroy_process_group(), or leave that call "
                    "out: the end of the run makes it."
                )
            self._loop.leave()
            if self._display is not None and self._loop.has_begun:
                self._display.end()

    # --- parts

    def _check_second_length(self, origin: str, earlier: Loop) -> None:
        """A run has one length: that of its first loop. Raises UserError for another one in a later loop."""
        first, steps = self._session.resolved.origins["train.steps"], earlier.counters.step
        if not first.startswith("run.steps("):
            return  # it stands in the run file or on the command line, where a loop's is only a default
        remedy = (
            'name the length of the whole run, such as run.steps(loader, "3 epochs"), which goes through all epochs by '
            "itself"
        )
        if origin != first:
            raise UserError(
                f"{origin} is called in a run whose length is that of {first}, and {steps} steps are done.\n"
                f"  Nothing of them is lost. To do: {remedy}; a later loop goes on to that length and is given none."
            )
        if earlier.has_ended and find_shell() is None:  # in a notebook a cell is simply run again
            logging.getLogger("shardway").warning(
                f"{origin} is called again after all {steps} steps of the run, so no batch is left. To do: {remedy}."
            )

    def _leave_earlier(self) -> None:
        """A loop that the script has left, by `break` or in a cell that was interrupted, is saved where it stands: the
        next one goes on from there. Raises UserError where an error has left the model between two states."""
        if self._loop is None:
            return
        if self._loop.is_broken():
            saved = max(self._session.list_saved(), default=0)
            where = f"step {saved}, which is saved" if saved else "the start, since nothing is saved yet"
            raise UserError(
                "an error has ended the last update in its midst, so the model is neither before nor after it.\n"
                f"  To do: call shardway.start and make model and optimizer anew: the run goes on from {where}."
            )
        self._loop.leave()
        step = self._loop.counters.step
        if step and not self._session.ranks.ask_first(lambda: step in self._session.list_saved()):
            self._loop.save()  # finished, with `checkpoint.every = "off"`

    def _check_open(self, caller: str, *, before_loop: bool = False) -> None:
        if self._opened is not None and not self._opened.is_open:
            raise UserError(
                f"{caller} was called after the end of the run (run.close(), or the end of its `with`).\n"
                "  To do: call shardway.start again, and make model and optimizer anew: the run goes on from its last "
                "checkpoint."
            )
        if before_loop and self._loop is not None and not self._loop.has_ended:
            raise UserError(
                f"{caller} was called after run.steps, so what it makes would neither be trained nor saved.\n"
                "  To do: call it before run.steps."
            )

    def _make_engine(self, held: HeldOptimizer, note: Callable[[str], None] | None = None) -> Engine:
        session, values, derived = self._session, self.resolved.values, self.resolved.derived
        train, clip = values.train, values.optim.clip
        first, further, beside = self._held.around(held)
        parts = EngineParts(
            parallel=first,
            optimizer=held.optimizer,
            batch_split=BatchSplit(train.batch.largest, int(train.micro_batch), derived.accumulation, derived.per_pass),
            precision=held.model.precision,
            clip=None if clip == "off" or session.leaves_alone("optim.clip") else float(clip),
            ranks=session.ranks,
            resolved=self.resolved,
            to_write=session.to_write,
            at_end=session.at_end,
            further=further,
            beside=beside,
            own_model=session.own_model,
            note=note or partial(session.record_reason, "passes_replayed"),
        )
        return ENGINES[train.engine].make(parts)


def _of_script(batches: Iterator[Any]) -> Iterator[Any]:
    with in_words_of_scripts():
        yield from batches


def start(*words: str | Path | None, directory: str | Path | None = None, fresh: bool = False) -> LiveRun:
    """Join whatever started this process (nothing, torchrun, srun, mpirun, PBS) and open the run directory.

    `words` are those of `shardway train`: a run file, and `key.path=value` to set over it; None is passed over.
    `directory` is the run directory where they set no run.root or run.name; `fresh` sets what an earlier run left
    there aside. Keys in the variable SHARDWAY_KEYS (a JSON list) override all others. The run ends with the block of a
    `with`, by `run.close()`, or with the script. Raises ShardwayError on every rank alike; one that is not caught ends
    the script with its message and its exit code.
    """
    report_errors()
    earlier = getattr(find_shell(), _OPENED, None)
    if isinstance(earlier, OpenedRun) and earlier.is_open:  # an earlier cell of a notebook has left it open
        logging.getLogger("shardway").warning("the run that was still open is closed; this one begins.")
        earlier.close()
    request = parse_words([str(word) for word in words if word is not None])
    request = replace(request, overrides=(*request.overrides, *read_keys_variable(os.environ)))
    place = Path(directory) if directory is not None else None
    own = replace(request, directory=place, fresh=fresh, own_model=True, started_in=Path.cwd())
    with in_words_of_scripts():
        opened = OpenedRun(open_run(own))
    opened.run._opened, opened.run._display = opened, open_display(opened.run.session)
    return opened.run


@contextlib.contextmanager
def open_run(request: ResolveRequest) -> Iterator[LiveRun]:
    """The run of a request, open on this rank."""
    with open_session(request, os.environ) as session:
        run = LiveRun(session)
        try:
            with script_explained():
                yield run
                run.leave()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            models = [each.parallel.module for each in run._held.models]
            optimizers = [each.optimizer for each in run._held.optimizers]
            steps = run._loop.counters.step if run._loop is not None else 0
            message = explain_memory(error, session.ranks, session.resolved.values, models, optimizers, steps)
            raise JobError(message) from error


# --- the end of a run

_OPENED = "_shardway_opened"
"""Attribute of a notebook's shell: the run that was opened last."""


class OpenedRun(Generic[T]):
    """What a context manager gives, entered at once; `close` leaves it. `is_open`: `close` has not been called."""

    def __init__(self, context: AbstractContextManager[T]) -> None:
        self._context: AbstractContextManager[T] | None = context
        self.is_open = False
        self.run = context.__enter__()
        self.is_open = True
        script_hook().closes.append(self.close)
        if (shell := find_shell()) is not None:
            setattr(shell, _OPENED, self)
        # Before threads are joined and pools are closed: a last save needs them.
        getattr(threading, "_register_atexit", atexit.register)(self.close)

    def close(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> bool:
        """Leave the run, with the error that ends it if there is one; a second call does nothing."""
        if not self.is_open or self._context is None:
            return False
        self.is_open = False
        closes = script_hook().closes
        if self.close in closes:
            closes.remove(self.close)
        context, self._context = self._context, None
        del self.run  # what is registered for the end of the process must not keep a model until then
        with in_words_of_scripts():
            handled = bool(context.__exit__(kind, error, trace))
        if error is None:
            restore_hook()
        return handled


# --- the lines of shardway train, on rank 0

LONGEST_ON_TERMINAL_S, LONGEST_IN_FILE_S = 60.0, 600.0
"""The most seconds between two step lines of a long run."""


class ScriptDisplay:
    """Takes the events that rank 0 records, and writes their lines."""

    def __init__(self, directory: RunDir, said: Container[str]) -> None:
        """`said`: reasons that were shown in full already."""
        self._lines: PlainLines | None = None
        self._directory, self._said = directory, said

    def show(self, event: Event) -> None:
        if event["event"] == "fault" or event.get("reason") in self._said:
            return  # the error is shown when it ends the script
        with contextlib.suppress(Exception):
            if self._lines is None:
                validations = []
                with contextlib.suppress(JobError, OSError):
                    validations = read_validations(self._directory)
                stream = _find_stream()
                longest_s = LONGEST_ON_TERMINAL_S if stream is not None and stream.isatty() else LONGEST_IN_FILE_S
                self._lines = PlainLines(validations=validations, longest_s=longest_s)
            self._write(self._lines.lines(event))

    def end(self) -> None:
        """At the end of the script's run: show where the run is, and how to continue it."""
        with contextlib.suppress(Exception):
            status = self._directory.read_status()
            state, reason = str(status.get("state", "")), str(status.get("reason", ""))
            lines = list_last_lines(
                str(self._directory.path),
                state,
                reason,
                report=f"shardway report {shlex.quote(str(self._directory.path))}",
                nothing_done=state == "finished" and self._lines is None,
                status=status,
                by_hand=ATTEMPT not in os.environ,
            )
            self._write(lines)

    def _write(self, lines: list[str]) -> None:
        stream = _find_stream()
        if stream is None or not lines:
            return
        bars = getattr(sys.modules.get("tqdm"), "tqdm", None)
        with bars.external_write_mode(file=stream) if bars is not None else contextlib.nullcontext():
            stream.write("".join(f"{line}\n" for line in lines))
            stream.flush()


def _find_stream() -> TextIO | None:
    """The stream that users read, looked up each time, since a notebook or a test may set another."""
    return sys.stdout if find_shell() is not None else sys.stderr


def open_display(session: Session) -> ScriptDisplay | None:
    """The display of this rank's script; None if `run.display` is "off", on other ranks, and if an agent of Shardway
    shows the run."""
    is_shown = session.resolved.values.run.display != "off" and session.ranks.placement.launcher != "shardway"
    if not is_shown or not session.ranks.is_first:
        return None
    display = ScriptDisplay(session.directory, session.noted)
    session.recorder.show = display.show
    return display


# --- the run that a run file describes: as a script would train it, in the loop of `LiveRun.steps`

LOSSES: dict[str, Callable[[torch.Tensor, torch.Tensor], LossSum]] = {
    "tokens": token_cross_entropy,
    "images": class_cross_entropy,
}
"""What a model takes -> its loss."""


@dataclass(frozen=True)
class RunOutcome:
    """How a run ended: its directory, and the state and reason of its last event."""

    directory: str
    state: str
    reason: str
    step: int


def train(request: ResolveRequest, data: Data | None = None) -> RunOutcome:
    """Train on this rank until the run is finished or asked to stop, then report; `data` as of `train_run`. Raises
    ShardwayError."""
    with open_run(request) as run:
        outcome = train_run(run, data)
        if run.is_first and run.session.recorder.is_open:
            _write_report(run.directory)
    return outcome


def _write_report(directory: RunDir) -> None:
    """Write the page of a run that has ended; one that cannot be written does not change how it ended."""
    try:  # also around the import, which is made here alone: what is installed may be gone by now
        from shardway.watch.report import render_report

        directory.write_report(render_report(directory))
    except Exception as error:
        logging.getLogger("shardway").warning(
            f"the report was not written: {type(error).__name__}: {error}\n"
            f"  The run itself has ended and is recorded. To do: `shardway report {shlex.quote(str(directory.path))}`."
        )


def train_run(run: LiveRun, data: Data | None = None) -> RunOutcome:
    """Train what the run file of an open run describes; `data` are its data if this process, its only rank, has opened
    them already."""
    if data is None:  # rank 0 opens them first, which prepares the files for the others
        data = run.session.ranks.first_then_all(lambda: open_resolved(run.resolved))
    if run.resolved.values.train.tune == "auto":
        from shardway.train.tune import tune  # what is not measured need not be there

        tune(run.session, data, _build_timed)
    run.session.settle(data.facts)
    values = run.resolved.values
    if values.data.stage != "off":
        data = stage_for_node(run.session, data)
    wants = takes_of(values.model.kind)
    model = _assemble(run, data)
    validation = run.validation(data.validation, LOSSES[wants]) if data.validation is not None else None
    for batch in run.steps(run.loader(data.train), validation=validation):
        run.step(model, batch, LOSSES[wants])
    status = run.directory.read_status() if run.is_first else {}
    return RunOutcome(
        str(run.directory.path), status.get("state", ""), status.get("reason", ""), int(status.get("step", 0))
    )


def _assemble(run: LiveRun, data: Data, *, timed: bool = False) -> nn.Module:
    """The model of the run file, parallel, and with its optimizer; `timed`: it is thrown away after some steps."""
    values, peak_lr = run.resolved.values, run.resolved.derived.peak_lr
    model = run.shard(_build(run, data, timed=timed))
    run.optimizer(lambda parameters: build_optimizer(values.optim, model, peak_lr), model)
    return model


def _build_timed(session: Session, data: Data) -> tuple[nn.Module, Engine, Callable[..., LossSum]]:
    """A model that train.tune trains for some steps, its engine and its loss."""
    run = LiveRun(session)
    model = _assemble(run, data, timed=True)
    engine = run._make_engine(run._held.optimizers[0], note=lambda text: None)
    return model, engine, LOSSES[takes_of(session.resolved.values.model.kind)]


def _build(run: LiveRun, data: Data, *, timed: bool = False) -> nn.Module:
    """The model of the run file, on the meta device; one that is only `timed` gets random weights."""
    section, facts, session = run.resolved.values.model, data.train.facts, run.session
    if not section.hf:
        return build_model(section, vocab=facts.vocab, sample_shape=facts.sample_shape)
    from shardway.models.huggingface.lora import read_lora
    from shardway.models.huggingface.model import build_huggingface  # needs the extra `hf`

    folder = session.ranks.first_then_all(lambda: locate_whole_model(section.hf, weights=section.hf_weights))
    # Whether the run has a checkpoint, and whether that ties the output layer to the embedding.
    has_checkpoint, tied = session.ranks.ask_first(lambda: (bool(session.list_saved()), find_tie(session.directory)))
    # Else they are random, or in the checkpoint, which lacks those beside an adapter.
    lora = read_lora(section)
    looks = section.hf_weights and not timed and (lora is not None or not has_checkpoint or tied is None)
    size = int(facts.vocab or 0)
    model = build_huggingface(folder, vocab=size, seq_len=facts.sample_shape[0], weights=looks, tied=tied)
    if lora is not None:
        seed = run.resolved.values.train.seed
        model.base_fingerprint = session.ranks.ask_first(lambda: model.fingerprint_base(seed))
        model.add_lora(lora, session.precision.autocast_dtype)
    elif has_checkpoint:
        model.fit = None
    for note in model.notes if run.is_first and not has_checkpoint and not timed else ():
        logging.getLogger("shardway").warning(note)
    return model
