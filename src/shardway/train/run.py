"""The library door: `shardway.start()` and what a script that owns its loop calls.

    with shardway.start() as run:
        model = run.shard(Net())
        optimizer = run.optimizer(torch.optim.AdamW, model, lr=3e-4)
        loader = run.loader(dataset, batch_size=64)
        for batch in run.steps(loader):
            loss = run.step(model, batch, loss_fn)

Invariant: the command line trains through this same door. This module must not hold logic of its own: it passes each
call to the room that owns it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import nn

from shardway.checkpoint.manager import LeastCost, LocalPlan, RetentionPolicy
from shardway.checkpoint.state import KeptObjects
from shardway.checkpoint.writer import check_savable
from shardway.data.sources.base import DataSource
from shardway.errors import UserError
from shardway.parallel.apply import ApplyOptions, ParallelModel, apply_parallelism
from shardway.plan.economy import GPU_MTBF_SECONDS
from shardway.ranks.stop import report_errors
from shardway.resolve import DataFacts, Resolved, scale_of
from shardway.resolve.request import ResolveRequest, parse_words
from shardway.rundir.directory import RunDir
from shardway.runfile.schema import PrecisionSection
from shardway.train.by_hand import BackwardCall, GradientsByHand
from shardway.train.dataloader import (
    Loader,
    LoaderArguments,
    check_length,
    make_loader,
    take_validation,
    training_batches,
    validation_data,
    validation_rows,
)
from shardway.train.engines import ENGINES
from shardway.train.engines.base import Engine, EngineParts, StepCall
from shardway.train.engines.torch import script_explained
from shardway.train.guard import plan_guard
from shardway.train.held import HeldOptimizer, Holdings, check_several, refuse_broken
from shardway.train.loop import Loop
from shardway.train.loop_state import LoopParts, LoopPlan, LRSchedule, check_is_validated
from shardway.train.loss import LossScale, LossSum
from shardway.train.loss_probe import probe_loss
from shardway.train.memory import Holder, memory_explained
from shardway.train.metrics import check_metrics
from shardway.train.model_numerics import format_named, keep_formats, resolve_for_model
from shardway.train.passes import BatchSplit, let_go
from shardway.train.script import OpenedRun, ScriptDisplay, close_earlier, open_display
from shardway.train.script_state import find_data_state
from shardway.train.session import Session, open_session
from shardway.train.validate import Validation
from shardway.units import Scale, Span

T = TypeVar("T")

OWN_MODEL_KEYS = ("data.shuffle", "data.workers", "data.prefetch", "data.record_ids", "data.skip")
"""Of [model] and [data], what has an effect on a script that brings its own model and data."""


class Run:
    """One run as its script sees it; made by `start`."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._held = Holdings(KeptObjects(session.ranks.device, leads=session.ranks.is_first))
        self._loop: Loop | None = None
        self._engines: dict[int, Engine] = {}
        self._by_hand: GradientsByHand | None = None
        self._probes_loss = False
        self._opened: OpenedRun[Run] | None = None
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
    def _model(self) -> nn.Module | None:
        return self._held.models[0].parallel.module if self._held.models else None

    @property
    def _parallel(self) -> ParallelModel | None:
        return self._held.models[0].parallel if self._held.models else None

    @property
    def _optimizer(self) -> torch.optim.Optimizer | None:
        return self._held.optimizers[0].optimizer if self._held.optimizers else None

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

    def close(self) -> None:
        """The end of the run in this script, where it was not opened by `with`; a second call does nothing."""
        if self._opened is not None:
            self._opened.close()
        else:
            self.leave()

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return self._opened.close(kind, error, trace) if self._opened is not None else None

    def leave(self) -> None:
        """A loop that the script left early is saved and said to be stopped."""
        if self._loop is not None:
            self._loop.leave()
            if self._display is not None and self._loop.has_begun:
                self._display.end()

    def find_holder(self) -> Holder:
        """What this rank holds."""
        steps = self._loop.counters.step if self._loop is not None else 0
        models = [each.parallel.module for each in self._held.models]
        optimizers = [each.optimizer for each in self._held.optimizers]
        return Holder(self._session.ranks, self.resolved.values, models, optimizers, steps)

    def shard(self, model: nn.Module, name: str | None = None) -> nn.Module:
        """Make a model parallel as the run file says and move it to this rank's device; returns what to call.

        A model that has weights keeps those of rank 0; one on the meta device is filled by its `init_weights(seed)`.
        A run may have several models; `name` is what a further one is called in checkpoints and events. Raises
        UserError where the model cannot be split or filled.
        """
        self._check_open("run.shard")
        self._check_not_begun("run.shard")
        numerics = resolve_for_model(self._session, model, is_first=not self._held.models)
        values = self.resolved.values
        options = ApplyOptions(
            parallel=values.parallel,
            precision=numerics.precision,
            recompute=values.recompute,
            compile=numerics.compile,
            channels_last=values.train.channels_last,
            seed=values.train.seed,
            wrap_copies=ENGINES[values.train.engine].wraps_copies,
        )
        parallel = apply_parallelism(model, self._session.mesh, self.device, options)
        check_savable(parallel.module.state_dict(), f"what {type(model).__name__} holds")
        keep_formats(self._session, parallel.module, numerics.precision)
        return self._held.add_model(parallel, name, numerics.precision).parallel.given

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
        self._check_open("run.optimizer")
        self._check_not_begun("run.optimizer")
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
        """Save and resume an object that has `state_dict()` and `load_state_dict(state)`; returns it.

        The state may be nested dicts, lists and tuples of tensors, numbers, strings and None. What all ranks have alike
        is saved once, as rank 0 has it. Raises UserError where a checkpoint cannot hold the state.
        """
        self._held.keep(name, thing)
        return thing

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

    def loader(
        self,
        dataset: Any,
        batch_size: int | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        sampler: Any = None,
        batch_sampler: Any = None,
        drop_last: bool | None = None,
        workers: int | None = None,
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
        if not isinstance(loader, Loader):
            raise UserError(
                f"run.steps takes what run.loader gives, not a {type(loader).__name__}.\n"
                "  To do: hand your dataset to run.loader(dataset, batch_size=...), which shares it over the ranks."
            )
        if length is not None:
            resolution = self._session.resolution
            self._session.resolution = resolution.with_default("train.steps", length, f"run.steps(length={length!r})")
        if not self._session.settled:
            self._session.own_model = True
            check_length(self._session, loader, given=length is not None)
            self._session.settle(DataFacts(loader.size, loader.tokens_per_sample, None), keep=_has_effect_on_own_model)
        check_is_validated(self._session, validation)
        self._leave_earlier()
        first, *others = self._make_engines()
        self._probes_loss = self._session.own_model
        held = self._held if self._session.own_model else None
        state = find_data_state(self._session, loader, self._find_position)
        batches = partial(training_batches, self._session, loader, state)
        draws = self._session.own_model or not isinstance(loader.samples, DataSource)  # ours draw nothing
        self._by_hand = GradientsByHand(self._session, self._held, self._engines) if held is not None else None
        parts = LoopParts(first, batches, validation, on_step, tuple(others), held, draws, self._by_hand, state)
        self._loop = Loop(self._session, self._plan(loader), parts)
        return self._loop.batches()

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
        held = self._held.find_optimizer(model, optimizer)
        call = StepCall(self._engines[id(held.optimizer)], self._name_step(held), model, loss_fn)
        with format_named(self.resolved, call.engine.passes.precision):
            return self._loop.step(call, batch, partial(self._probe, call, batch))

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

    def autocast(self) -> contextlib.AbstractContextManager[None]:
        """Around a forward pass and a loss that the script computes itself: the format of `precision.compute`."""
        if self._by_hand is None:
            raise UserError("run.autocast was called before `for batch in run.steps(loader)`.")
        return self._by_hand.autocast()

    def _probe(self, call: StepCall, batch: Any, rows: int | None) -> None:
        """Look once whether the loss depends on how its batch is cut."""
        if self._probes_loss:
            self._probes_loss = False
            probe_loss(self._session, call.engine.passes, call.model, batch, call.loss_fn, rows)
            for each in self._held.models:
                let_go(each.parallel)

    def _name_step(self, held: HeldOptimizer) -> str:
        """What the loss of an optimizer's step is called: as its model, or as itself where the model has several."""
        alone = sum(each.model is held.model for each in self._held.optimizers) == 1
        return held.model.name if alone else held.name

    def _find_position(self) -> int:
        """Where the next step begins in the order of samples."""
        return self._loop.counters.position if self._loop is not None else 0

    def _leave_earlier(self) -> None:
        """A loop that the script has left, by `break` or in a cell that was interrupted, is saved where it stands: the
        next one goes on from there. Raises UserError where an error has left the model between two states."""
        if self._loop is None:
            return
        if self._loop.intact.is_broken():
            raise refuse_broken(max(self._session.list_saved(), default=0))
        self._loop.leave()
        step = self._loop.counters.step
        if step and not self._session.ranks.ask_first(lambda: step in self._session.list_saved()):
            self._loop.save()  # finished, with `checkpoint.every = "off"`

    def _check_open(self, caller: str) -> None:
        if self._opened is not None and not self._opened.is_open:
            raise UserError(
                f"{caller} was called after the end of the run (run.close(), or the end of its `with`).\n"
                "  To do: call shardway.start again, and make model and optimizer anew: the run goes on from its last "
                "checkpoint."
            )

    def _check_not_begun(self, caller: str) -> None:
        if self._loop is not None and not self._loop.has_ended:
            raise UserError(
                f"{caller} was called after run.steps, so what it makes would neither be trained nor saved.\n"
                "  To do: call it before run.steps."
            )

    def _make_engines(self) -> list[Engine]:
        if not self._held.models or not self._held.optimizers:
            missing = "run.optimizer(...)" if self._held.models else "run.shard(model)"
            raise UserError(f"run.steps needs what is to be resumed and saved: call {missing} before it.")
        check_several(self._held, self.resolved.values)
        self._engines = {id(each.optimizer): self._make_engine(each) for each in self._held.optimizers}
        return list(self._engines.values())

    def _make_engine(self, held: HeldOptimizer) -> Engine:
        session, (train, derived) = self._session, (self.resolved.values.train, self.resolved.derived)
        clip = self.resolved.values.optim.clip
        first, further, beside = self._held.around(held)
        parts = EngineParts(
            parallel=first,
            optimizer=held.optimizer,
            batch_split=BatchSplit(train.global_batch, int(train.micro_batch), derived.accumulation, derived.per_pass),
            precision=held.model.precision or session.precision,
            clip=None if clip == "off" or session.leaves_alone("optim.clip") else float(clip),
            ranks=session.ranks,
            resolved=self.resolved,
            to_write=session.to_write,
            at_end=session.at_end,
            further=further,
            beside=beside,
            own_model=session.own_model,
        )
        return ENGINES[train.engine].make(parts)

    def _plan(self, loader: Loader) -> LoopPlan:
        resolved = self.resolved
        values, derived = resolved.values, resolved.derived
        scale = scale_of(resolved, DataFacts(loader.size, loader.tokens_per_sample, None))
        every, validate_every, margin = values.checkpoint.every, values.train.validate_every, values.run.stop_margin
        kept, constant = values.checkpoint.keep_every, self._session.leaves_alone("optim.schedule")
        warmup_steps = 0 if constant else derived.warmup_steps
        return LoopPlan(
            total_steps=derived.total_steps,
            global_batch=values.train.global_batch,
            tokens_per_sample=loader.tokens_per_sample,
            validate_every=None if validate_every == "off" else max(1, validate_every.in_steps(scale)),
            save_every=max(1, every.in_steps(scale)) if isinstance(every, Span) else None,
            save_every_s=self._save_interval(every),
            save_at_end=every != "off" or values.checkpoint.local_every != "off",
            keep=RetentionPolicy(
                values.checkpoint.keep,
                None if kept == "off" else max(1, kept.in_steps(scale)),
                values.checkpoint.keep_best,
            ),
            schedule="constant" if constant else values.optim.schedule,
            writes_lr=not constant,
            lr_schedule=LRSchedule(derived.total_steps, warmup_steps, derived.decay_steps, values.optim.final_lr),
            data_fingerprint=loader.fingerprint,
            loss_scale=_loss_scale_of(values.precision) if self._session.precision.scales_loss else None,
            stop_margin_s=None if margin == "auto" else float(margin),
            guard=plan_guard(self._session, scale),
            local=self._plan_local(scale),
            monitor=values.checkpoint.monitor,
            patience=None if values.train.patience == "off" else values.train.patience,
        )

    def _plan_local(self, scale: Scale) -> LocalPlan | None:
        section = self.resolved.values.checkpoint
        if section.local_every == "off":
            return None
        steps = max(1, section.local_every.in_steps(scale)) if isinstance(section.local_every, Span) else None
        return LocalPlan(steps, self._save_interval(section.local_every), section.local_dir)

    def _save_interval(self, every: object) -> float | LeastCost | None:
        if every == "auto":
            return LeastCost(GPU_MTBF_SECONDS / self._session.ranks.world)
        return every if isinstance(every, float) else None


def start(*words: str | Path | None, directory: str | Path | None = None, fresh: bool = False) -> Run:
    """Join whatever started this process (nothing, torchrun, srun, mpirun, PBS) and open the run directory.

    `words` are those of `shardway train`: a run file, and `key.path=value` to set over it; None is passed over.
    `directory` is the run directory where they set no run.root or run.name; `fresh` sets what an earlier run left
    there aside. The run ends with the block of a `with`, by `run.close()`, or with the script. Raises ShardwayError on
    every rank alike; one that is not caught ends the script with its message and its exit code.
    """
    report_errors()
    close_earlier()
    request = parse_words([str(word) for word in words if word is not None])
    place = Path(directory) if directory is not None else None
    opened = OpenedRun(open_run(replace(request, directory=place, fresh=fresh, own_model=True)))
    opened.run._opened, opened.run._display = opened, open_display(opened.run.session)
    return opened.run


@contextlib.contextmanager
def open_run(request: ResolveRequest) -> Iterator[Run]:
    """The run of a request, open on this rank."""
    with open_session(request, os.environ) as session:
        run = Run(session)
        with memory_explained(run.find_holder), script_explained():
            yield run
            run.leave()


def _loss_scale_of(section: PrecisionSection) -> LossScale:
    return LossScale(
        section.loss_scale, section.loss_scale_growth, section.loss_scale_backoff, section.loss_scale_interval
    )


def _has_effect_on_own_model(dotted: str) -> bool:
    return not dotted.startswith(("model.", "data.")) or dotted in OWN_MODEL_KEYS
