"""The library door: `shardway.start()` and what a script that owns its loop calls.

    with shardway.start() as run:
        model = run.shard(Net())
        optimizer = run.optimizer(torch.optim.AdamW, model, lr=3e-4)
        loader = run.loader(dataset, batch_size=64)
        for batch in run.steps(loader):
            loss = run.step(model, batch, loss_fn)

Invariant: the command line trains through this same door. This module must not hold logic of its own: it hands each
call to the room that knows.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

from shardway.checkpoint.retention import Keep
from shardway.checkpoint.savable import check_savable
from shardway.data.sources.base import Source
from shardway.errors import UserError
from shardway.parallel.apply import ApplyOptions, ParallelModel, apply_parallelism
from shardway.parallel.compile import CompileOptions
from shardway.plan.economy import GPU_MTBF_SECONDS
from shardway.ranks.leave import tell_errors
from shardway.resolve import DataFacts, Resolved, scale_of
from shardway.resolve.request import Request, parse_words
from shardway.rundir.directory import RunDir
from shardway.runfile.schema import PrecisionSection
from shardway.train.engines import ENGINES
from shardway.train.engines.base import Engine, EngineParts
from shardway.train.feed import Loader, training_batches, validation_data, validation_rows
from shardway.train.guard import plan_guard
from shardway.train.loaders import LoaderArguments, check_length, make_loader, take_validation
from shardway.train.loop import Loop
from shardway.train.loop_plan import LoopParts, LoopPlan
from shardway.train.loss import LossSum
from shardway.train.loss_probe import probe_loss
from shardway.train.loss_scale import LossScale
from shardway.train.memory import Holder, memory_told
from shardway.train.passes import Portions
from shardway.train.saves.cadence import LeastCost
from shardway.train.saves.tiers import LocalPlan
from shardway.train.schedule import Course
from shardway.train.script import OpenedRun
from shardway.train.session import Session, open_session
from shardway.train.validate import Validation
from shardway.units import Scale, Span

OWN_MODEL_KEYS = ("data.shuffle", "data.workers", "data.prefetch", "data.record_ids", "data.skip")
"""Of [model] and [data], what has an effect on a script that brings its own model and data."""


class Run:
    """One run as its script sees it; made by `start`."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._model: nn.Module | None = None
        self._parallel: ParallelModel | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._loop: Loop | None = None
        self._engine: Engine | None = None
        self._probes_loss = False
        self._opened: OpenedRun[Run] | None = None

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

    def find_holder(self) -> Holder:
        """What this rank holds."""
        steps = self._loop.counters.step if self._loop is not None else 0
        return Holder(self._session.ranks, self.resolved.values, self._model, self._optimizer, steps)

    def shard(self, model: nn.Module) -> nn.Module:
        """Make a model parallel as the run file says and move it to this rank's device; returns what to call.

        A model that has weights keeps those of rank 0; one on the meta device is filled by its `init_weights(seed)`.
        Raises UserError where the model cannot be split or filled.
        """
        values = self.resolved.values
        options = ApplyOptions(
            parallel=values.parallel,
            precision=self._session.precision,
            recompute=values.recompute,
            compile=CompileOptions(values.train.compile),
            channels_last=values.train.channels_last,
            seed=values.train.seed,
            wrap_copies=ENGINES[values.train.engine].wraps_copies,
        )
        self._model = model
        self._parallel = apply_parallelism(model, self._session.mesh, self.device, options)
        check_savable(self._parallel.module.state_dict(), f"what {type(model).__name__} holds")
        return self._parallel.given

    def optimizer(
        self, factory: Callable[..., torch.optim.Optimizer], model: nn.Module, **options: Any
    ) -> torch.optim.Optimizer:
        """`factory(model.parameters(), **options)`, saved and resumed with the run.

        Its learning rate stays as given unless the run file sets `optim.schedule`; then it is the peak of it.
        """
        self._optimizer = factory(model.parameters(), **options)
        return self._optimizer

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
        given = LoaderArguments(dataset, batch_size, collate_fn, sampler, batch_sampler, drop_last, workers)
        return make_loader(self._session, given)

    def validation(
        self,
        dataset: Any,
        loss_fn: Callable[..., LossSum | torch.Tensor],
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> Validation:
        """What `steps` validates on: every sample of a dataset (as of `loader`) once, over all ranks.

        `loss_fn` as in `step`. `train.validation_samples`, where the run file sets it, is how many at most. Afterwards
        `last` of what is returned holds the metrics, `step` their step, `results` those of all validations by step.
        """
        bytes_per_token = dataset.facts.bytes_per_token if isinstance(dataset, Source) else None
        samples, collate = take_validation(dataset, collate_fn)
        rows = partial(validation_rows, self._session, samples)
        return Validation(partial(validation_data, self._session, samples, collate), loss_fn, bytes_per_token, rows)

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
        self._engine, self._probes_loss = self._make_engine(), self._session.own_model
        parts = LoopParts(self._engine, partial(training_batches, self._session, loader), validation, on_step)
        self._loop = Loop(self._session, self._plan(loader), parts)
        return self._loop.batches()

    def step(self, model: nn.Module, batch: Any, loss_fn: Callable[..., LossSum | torch.Tensor]) -> float:
        """One optimizer step on this batch; the mean loss over the global batch.

        Of a pair (inputs, targets), `loss_fn(model(inputs), targets)` is the loss; of any other batch,
        `loss_fn(model, batch)`. It returns the mean over its samples, or a `LossSum` where targets may not count.
        Gradients of a script's own model are clipped only where the run file sets `optim.clip`.
        """
        if self._loop is None or self._engine is None:
            raise UserError("run.step was called before run.optimizer and `for batch in run.steps(loader)`.")
        self._loop.check_awaits_step()
        moment = self._loop.moment()  # it looks for the stop file: a file system that hangs is no hang of a step
        self._session.progress.take_step(self._loop.counters.step)
        result = self._engine.step(model, batch, loss_fn, moment)
        self._loop.note(result)
        if self._probes_loss and not result.decision.void:
            self._probes_loss = False
            probe_loss(self._session, self._engine.passes, model, batch, loss_fn, moment.rows)
        return result.loss

    def _make_engine(self) -> Engine:
        if self._parallel is None or self._optimizer is None:
            missing = "run.shard(model)" if self._parallel is None else "run.optimizer(...)"
            raise UserError(f"run.steps needs what is to be resumed and saved: call {missing} before it.")
        session, (train, derived) = self._session, (self.resolved.values.train, self.resolved.derived)
        clip = self.resolved.values.optim.clip
        parts = EngineParts(
            parallel=self._parallel,
            optimizer=self._optimizer,
            portions=Portions(train.global_batch, int(train.micro_batch), derived.accumulation, derived.per_pass),
            precision=session.precision,
            clip=None if clip == "off" or session.leaves_alone("optim.clip") else float(clip),
            ranks=session.ranks,
            resolved=self.resolved,
            to_write=session.to_write,
            at_end=session.at_end,
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
            keep=Keep(values.checkpoint.keep, None if kept == "off" else max(1, kept.in_steps(scale))),
            schedule="constant" if constant else values.optim.schedule,
            course=Course(derived.total_steps, warmup_steps, derived.decay_steps, values.optim.final_lr),
            data_fingerprint=loader.fingerprint,
            loss_scale=_loss_scale_of(values.precision) if self._session.precision.scales_loss else None,
            stop_margin_s=None if margin == "auto" else float(margin),
            guard=plan_guard(self._session, scale),
            local=self._plan_local(scale),
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
    every rank alike; one that nobody catches ends the script with its message and its exit code.
    """
    tell_errors()
    request = parse_words([str(word) for word in words if word is not None])
    place = Path(directory) if directory is not None else None
    opened = OpenedRun(open_run(replace(request, directory=place, fresh=fresh, own_model=True)))
    opened.run._opened = opened
    return opened.run


@contextlib.contextmanager
def open_run(request: Request) -> Iterator[Run]:
    """The run of a request, open on this rank."""
    with open_session(request, os.environ) as session:
        run = Run(session)
        with memory_told(run.find_holder):
            yield run
            run.leave()


def _loss_scale_of(section: PrecisionSection) -> LossScale:
    return LossScale(
        section.loss_scale, section.loss_scale_growth, section.loss_scale_backoff, section.loss_scale_interval
    )


def _has_effect_on_own_model(dotted: str) -> bool:
    return not dotted.startswith(("model.", "data.")) or dotted in OWN_MODEL_KEYS
