"""`train.tune = "auto"`: measures at the start of a run which settings are fastest, and takes them.

Each try trains a model of the run's own shape for some steps, by the run's engine and passes, on made-up batches. Axes
are tried one after the other (compiled blocks, the micro-batch, float8), each against the fastest so far.

Invariants:
- All ranks try the same values in the same order and end each try together; what counts is the slowest rank's time.
- What is chosen follows from what was measured alone (`tune_choice`).
- Afterwards the process is as before, but for files of the compiler's cache: the run computes what it would compute
  with the same values in its run file, to the bit. The layout stays, and so does what is set.
- Nothing here fails a run: a try that fails is left out, a cache that cannot be read or written is not used.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import logging
import math
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch._dynamo
import torch._dynamo.utils
from torch import nn

from shardway.data.batch_tree import move_batch
from shardway.data.open import Data
from shardway.data.order import position_share
from shardway.data.sources.base import DataRequest
from shardway.data.sources.synthetic import open_synthetic
from shardway.errors import LostContact, UserError, render_reason
from shardway.hardware.probe import probe_machine
from shardway.parallel.blocks import apply_backend_switches
from shardway.parallel.mesh import Mesh
from shardway.parallel.precision import read_precision
from shardway.places import find_own_folder
from shardway.plan.case import divisors
from shardway.plan.planner import estimate
from shardway.ranks.start import is_out_of_memory
from shardway.ranks.stop import StepRequests
from shardway.resolve import Resolved, resolve, resolve_with_data
from shardway.resolve.draft import DERIVED, MEASURED, Draft, share_of, takes_of, value_of
from shardway.resolve.planned import KEYS as LAYOUT_KEYS
from shardway.resolve.planned import case_of, shape_of_run
from shardway.resolve.request import Resolution
from shardway.resolve.rules.formats import COMPILE, COMPUTE
from shardway.resolve.rules.tuning import AT_THE_START, MICRO, TUNED, explain_untried
from shardway.rundir.file_io import write_json
from shardway.telemetry.activity import Activity
from shardway.train.engines import Engine
from shardway.train.loop_state import LoopPlan, ScheduledLR
from shardway.train.passes import Loss
from shardway.train.session import Session
from shardway.train.step import Generators, StepContext
from shardway.train.tune_choice import TrialResult, TuneChoice, TuneSpace, Values, search
from shardway.version import __version__

BUDGET_S = 90.0
"""The most seconds that all tries take together; a compiler that is at work then is waited for."""


_OTHERS = {COMPILE: "compiled blocks", MICRO: "other micro-batches", COMPUTE: "float8"}
"""What is said of a key of which no other value is tried."""


# --- what may be tried


def find_space(resolution: Resolution, resolved: Resolved) -> tuple[TuneSpace, dict[str, str]]:
    """What may be tried in a run whose data have completed it as `resolved`, and what may not, with why."""
    loaded = replace(resolution.loaded, values=resolved.values, origins=resolved.origins)
    draft = Draft(loaded, resolved.circumstances)
    why = {key: explain_untried(draft, key, resolved.derived.total_steps) for key in TUNED}
    usual = {key: draft.get(key) for key in TUNED if not why[key]}
    axes: list[tuple[str, Sequence[Sequence[Any]]]] = []
    if COMPILE in usual:
        axes.append((COMPILE, [["blocks"]]))
    if MICRO in usual:
        larger, smaller = list_sizes(share_of(draft), usual[MICRO])
        axes.append((MICRO, [_list_fitting(resolved, larger), smaller]))
    if COMPUTE in usual:
        axes.append((COMPUTE, [["float8"]]))
    first = {**usual, **({COMPILE: "off"} if COMPILE in usual else {})}
    why |= {key: "none fits by the plan" for key, directions in axes if not any(directions)}
    return TuneSpace(first, axes, usual), {_OTHERS[key]: reason for key, reason in why.items() if reason}


def list_sizes(share: int, planned: int) -> tuple[list[int], list[int]]:
    """Micro-batches above and below the planned one: each at least twice, or at most half, of the one before, and an
    even part of a rank's share."""
    even = divisors(share)
    larger, smaller, size = list[int](), list[int](), planned
    while size := next((each for each in even if each >= 2 * size), 0):
        larger.append(size)
    size = planned
    while size := next((each for each in reversed(even) if 2 * each <= size), 0):
        smaller.append(size)
    return larger, smaller


def _list_fitting(resolved: Resolved, sizes: Sequence[int]) -> list[int]:
    """The sizes up to the first that does not fit by the plan; all if the planner does not know machine or model."""
    machine, fitting = resolved.circumstances.machine, list[int]()
    if machine is None:
        return list(sizes)
    for size in sizes:
        with contextlib.suppress(UserError):
            shape = shape_of_run(resolved.values, resolved.circumstances.shape)
            if not estimate(case_of(resolved.values, shape, size, machine), machine).fits:
                return fitting
        fitting.append(size)
    return fitting


# --- a try


class BuildTrial(Protocol):
    """Makes the model and the engine of a session as the run makes its own; gives them with the run's loss."""

    def __call__(self, session: Session, data: Data) -> tuple[nn.Module, Engine, Loss]: ...


WARM_UP, BEFORE_REPLAYS = 3, 12
"""Steps that are not timed; more where the engine finds out in its first steps whether to replay passes."""
ROUND_S, MOST_STEPS = 0.25, 64
"""How long a round of steps that are timed together takes at least, and the most steps in it."""
FEWEST_ROUNDS, FEWEST_AT_THE_END, LONGEST_S = 5, 3, 4.0
"""Rounds that a try has at least, if the budget ends meanwhile, and the most seconds of all of them."""
SURE = 0.01
"""A try ends when the median of its rounds is known to this part of itself."""
BATCHES = 4
"""Batches that the steps of a try go through again and again."""


def spread_of(rounds: Sequence[float]) -> float:
    """How far the median is known, as a part of it: its notch (McGill, Tukey and Larsen 1978, "Variations of box
    plots")."""
    low, middle, high = statistics.quantiles(rounds, n=4)
    return 1.57 * (high - low) / math.sqrt(len(rounds)) / max(middle, 1e-9)


def is_enough(rounds: Sequence[float], steps: int) -> bool:
    """Whether the seconds a step in rounds of so many `steps` give their median, or have taken long."""
    known = len(rounds) >= FEWEST_ROUNDS
    return known and (spread_of(rounds) <= SURE or sum(rounds) * steps > LONGEST_S)


class TrialSteps:
    """The model, engine and schedule of a session that is only timed, and its steps."""

    def __init__(self, session: Session, data: Data, build: BuildTrial, batches: Sequence[Any]) -> None:
        self.values, self._device, self._batches = session.resolved.values, session.ranks.device, batches
        self._model, self._engine, self._loss = build(session, data)
        plan = LoopPlan(session, data.facts, "")
        self._lrs = ScheduledLR(session, plan, [self._engine], None)
        self._lrs.begin()
        self._loss_scale, self._done = plan.loss_scale, 0
        self.warm_up = WARM_UP if self._engine.passes.replays is None else BEFORE_REPLAYS

    def take(self, count: int) -> list[float]:
        """Take so many steps and wait for the device; their losses."""
        losses, samples = [], self.values.train.batch.largest
        for _ in range(count):
            self._lrs.write(self._done)
            batch, rows = self._batches[self._done % len(self._batches)]
            context = StepContext(self._done * samples, StepRequests(), self._loss_scale, None, rows, samples)
            result = self._engine.step(self._model, batch, self._loss, context)
            self._loss_scale = result.loss_scale
            self._done += 1
            losses.append(result.loss)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return losses


def make_batches(resolved: Resolved, data: Data, mesh: Mesh, device: torch.device) -> list[tuple[Any, int]]:
    """This rank's share of some made-up batches of the run's largest step, each with its rows."""
    values, facts = resolved.values, data.train.facts
    size, wants = values.train.batch.largest, takes_of(values.model.kind)
    shape = {"seq_len": facts.sample_shape[0]} if wants == "tokens" else {"shape": list(facts.sample_shape)}
    section = values.data.model_copy(update={"kind": "synthetic", "samples": BATCHES * size, **shape})
    classes = facts.classes or values.model.classes
    source = open_synthetic(DataRequest(section, values.train.seed, wants, facts.vocab, classes))
    share, found = position_share(size, mesh.data_rank, mesh.data_ranks), []
    for start in range(0, BATCHES * size, size):
        arrays = source.batch(np.arange(start + share.start, start + share.stop))
        pair = (torch.from_numpy(arrays["inputs"]), torch.from_numpy(arrays["targets"]))
        found.append((move_batch(pair, device), len(share)))
    return found


# --- all tries, on all ranks together


@dataclass(frozen=True)
class _Report:
    """What a rank says after a part of a try: its seconds, the losses of its steps, why it failed, whether it was asked
    to stop, and the seconds since the first try."""

    seconds: float
    losses: list[float]
    failure: str
    stop: bool
    total: float


class Tuning:
    """The tries of one run. `clock` gives seconds; only that of rank 0 counts for the budget."""

    def __init__(self, session: Session, data: Data, build: BuildTrial, clock: Callable[[], float]) -> None:
        self._session, self._ranks, self._data = session, session.ranks, data
        self._build, self._clock, self._began = build, clock, clock()
        self.resolved = resolve_with_data(session.resolved, data.facts)
        self._pinned = pin_layout(session.resolution, self.resolved)
        self.space, self.untried = find_space(session.resolution, self.resolved)
        self._stops = False

    @property
    def seconds(self) -> float:
        return self._clock() - self._began

    @cached_property
    def devices(self) -> list[str]:
        """The names of all ranks' devices, each once."""
        device = self._ranks.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else probe_machine().cpu_model or "a CPU"
        return sorted(set(self._ranks.gather(name)))

    @cached_property
    def _batches(self) -> list[tuple[Any, int]]:
        return make_batches(self.resolved, self._data, self._session.mesh, self._ranks.device)

    def measure(self, ended: Sequence[Values], note: Callable[[Values], None]) -> TuneChoice:
        """Try what `search` asks for. `ended`: values in which an earlier start of this run has ended; `note` is given
        values before they are tried, on rank 0."""
        trials = search(self.space)
        values = next(trials)
        while True:
            measured = self._try(values, ended, note)
            try:
                values = trials.send(measured)
            except StopIteration as stop:
                choice: TuneChoice = stop.value
                return choice

    def _try(self, values: Values, ended: Sequence[Values], note: Callable[[Values], None]) -> TrialResult:
        if values in ended:
            return TrialResult(values, failure="an earlier start of this run ended in it")
        if self._stops or self._ranks.gather(self.seconds)[0] > BUDGET_S:
            return TrialResult(values, untried=self._describe_end())
        try:
            resolution = self.resolve(dict.fromkeys(values, "tried"), values)
            resolved = resolve_with_data(resolution.resolved, self._data.facts)
        except UserError as error:
            return TrialResult(values, failure=render_reason(str(error)))
        if self._ranks.is_first:
            note(values)
        self._session.progress.enter(Activity.START, 0)
        with process_as_before(self._ranks.device), ExitStack() as stack:
            session = replace(
                self._session,
                resolution=replace(resolution, resolved=resolved),
                precision=read_precision(resolved.values.precision),
                settled=True,
                at_end=stack,
                to_write=[],
            )
            return self._run(values, session)

    def _run(self, values: Values, session: Session) -> TrialResult:
        made = list[TrialSteps]()

        def make() -> list[float]:
            apply_backend_switches(session.resolved.values, self._ranks.device)
            made.append(TrialSteps(session, self._data, self._build, self._batches))
            return []

        report = self._together(make)
        start_s, losses, rounds, count = report.seconds, list[float](), list[float](), 1
        while not report.failure and not self._is_over(report) and not is_enough(rounds, count):
            warms_up = len(losses) < made[0].warm_up
            report = self._together(partial(made[0].take, count))
            losses += report.losses
            if not warms_up:
                rounds.append(report.seconds / count)
                continue
            start_s += report.seconds
            if len(losses) == made[0].warm_up:
                count = max(1, min(MOST_STEPS, math.ceil(ROUND_S / max(report.seconds, 1e-6))))
        facts: dict[str, Any] = {"start_s": start_s, "losses": tuple(losses)}
        if report.failure:
            return TrialResult(values, **facts, failure=report.failure)
        if len(rounds) < FEWEST_AT_THE_END:
            return TrialResult(values, **facts, untried=self._describe_end())
        return TrialResult(values, statistics.median(rounds), spread_of(rounds), len(rounds) * count, **facts)

    def _together(self, work: Callable[[], list[float]]) -> _Report:
        """Do a part of a try on all ranks: the seconds of the slowest, the losses, why any failed. Raises LostContact
        where a rank is gone."""
        started, losses, failure = self._clock(), list[float](), ""
        try:
            losses = work()
        except LostContact:
            raise
        except Exception as error:
            reason = render_reason(str(error))
            failure = "out of memory" if is_out_of_memory(error) else f"{type(error).__name__}: {reason}"
            traceback.clear_frames(error.__traceback__)  # they hold tensors
        stop = self._session.signals.received is not None
        reports = self._ranks.gather(_Report(self._clock() - started, losses, failure, stop, self.seconds))
        first = next((each.failure for each in reports if each.failure), "")
        slowest, stop = max(each.seconds for each in reports), any(each.stop for each in reports)
        return _Report(slowest, reports[0].losses, first, stop, reports[0].total)

    def _is_over(self, report: _Report) -> bool:
        self._stops = self._stops or report.stop
        return self._stops or report.total > BUDGET_S

    def _describe_end(self) -> str:
        return "the run was asked to stop" if self._stops else f"{BUDGET_S:.0f} s were over"

    # --- the run with what was chosen

    def resolve(self, origins: Mapping[str, str], values: Values) -> Resolution:
        """The run with values for keys that nothing sets, its layout as it is. Raises UserError if a rule refuses."""
        loaded = self._pinned.loaded
        for key, value in values.items():
            loaded = loaded.with_value(key, value, f"{MEASURED}{origins[key]}")
        return replace(self._pinned, loaded=loaded, resolved=resolve(loaded, self.resolved.circumstances))


def pin_layout(resolution: Resolution, resolved: Resolved) -> Resolution:
    """The run with a micro-batch and a layout that other values cannot change: the ranks are laid out already."""
    loaded, keys = resolution.loaded, {MICRO}
    if resolved.values.parallel.layout == "auto":
        keys |= {key for keys_of_setting in LAYOUT_KEYS.values() for key in keys_of_setting}
    for key in sorted(keys):
        if resolved.is_derived(key):
            loaded = loaded.with_value(key, value_of(resolved.values, key), resolved.origins[key])
    return replace(resolution, loaded=loaded)


_CACHE_FOLDER = "TORCHINDUCTOR_CACHE_DIR"


@contextlib.contextmanager
def process_as_before(device: torch.device) -> Iterator[None]:
    """Within it a model may be built, compiled and trained; afterwards nothing of that is left in the process, and
    random numbers go on as if it had not been."""
    if device.type == "cuda":
        torch.cuda.init()  # seeds that wait for the device are set now, so that its generator is kept
    generators, folder = Generators(), os.environ.get(_CACHE_FOLDER)
    try:
        yield
    finally:
        gc.collect()
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        if folder is None:
            os.environ.pop(_CACHE_FOLDER, None)
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
        generators.put_back()


# --- what was found before: a file for each kind of run in the user's cache folder


class TuneCache:
    """What was chosen for runs with the same `facts`, and what this run is trying, in files of rank 0.

    Files are written whole under a name that is a hash of the facts, so that jobs may share them; what a start tries is
    in a file of the run, which only one process writes. Without a folder nothing is kept.
    """

    def __init__(self, folder: Path | None, facts: Mapping[str, Any], run: Path) -> None:
        self.facts, self.trouble = json.loads(json.dumps(facts)), ""
        name = _digest(self.facts)
        self._choice = folder / f"{name}.json" if folder is not None else None
        self._trying = folder / f"{name}-{_digest(str(run.absolute()))}.json" if folder is not None else None

    @property
    def path(self) -> Path | None:
        return self._choice

    def read(self) -> dict[str, Any] | None:
        """The choice that is kept; None if there is none. One that cannot be used is in `trouble`."""
        found = _read(self._choice)
        if found is None:
            return None
        kept, named = found.get("values"), found.get("origins")
        plain = isinstance(kept, dict) and isinstance(named, dict) and kept.keys() == named.keys()
        texts = all(isinstance(found.get(name), str) for name in ("text", "date"))
        if found.get("facts") == self.facts and plain and texts:
            return found
        self.trouble = f"{self._choice} is damaged, and is written anew"
        return None

    def write(self, choice: Mapping[str, Any]) -> None:
        self._keep(self._choice, {"format": 1, "facts": self.facts, **choice})

    def read_ended(self) -> list[dict[str, Any]]:
        """The values in which earlier starts of this run have ended."""
        ended = (_read(self._trying) or {}).get("tried", [])
        return [each for each in ended if isinstance(each, dict)] if isinstance(ended, list) else []

    def note(self, ended: Sequence[Values], values: Values) -> None:
        """These values are tried from now on; if the process ends meanwhile, its next start finds them."""
        self._keep(self._trying, {"tried": [*map(dict, ended), dict(values)]})

    def forget(self, ended: Sequence[Values]) -> None:
        """All tries of this start have ended well; those in which earlier ones ended are not tried again."""
        if ended:
            self.note(ended[:-1], ended[-1])
        elif self._trying is not None:
            with contextlib.suppress(OSError):
                self._trying.unlink(missing_ok=True)

    def _keep(self, path: Path | None, content: Mapping[str, Any]) -> None:
        try:
            if path is None:
                self.trouble = "this account has no home folder to keep the choice in"
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                write_json(path, content)
        except OSError as error:
            self.trouble = f"the choice is not kept: {path}: {error.strerror}"


def _read(path: Path | None) -> dict[str, Any] | None:
    """The object in a file; {} for any other content, None if it cannot be read."""
    try:
        content = path.read_bytes() if path is not None else None
    except OSError:
        return None
    if content is None:
        return None
    try:
        found = json.loads(content)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _digest(content: Any) -> str:
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=12).hexdigest()


def list_facts(devices: Sequence[str], space: TuneSpace, resolved: Resolved, data: Data) -> dict[str, Any]:
    """What a choice depends on: devices, versions, and the sections and keys that bear on speed."""
    table, sample = resolved.values.model_dump(mode="json"), data.train.facts
    optim = ("name", "kernel", "state_dtype", "clip")
    train = (
        "global_batch",
        "micro_batch",
        "channels_last",
        "deterministic",
        "cudnn_benchmark",
        "cuda_graphs",
        "compile",
    )
    facts, run = resolved.circumstances, resolved.values.run
    return {
        "devices": list(devices),
        "versions": {"shardway": __version__, "torch": torch.__version__, **_list_versions()},
        "ranks": [facts.ranks, facts.ranks_per_node, run.device, run.threads],
        **{name: table[name] for name in ("model", "parallel", "precision", "recompute")},
        "sample": [list(sample.sample_shape), sample.vocab, sample.classes],
        "optim": [table["optim"][name] for name in optim],
        "train": [table["train"][name] for name in train],
        "tried": [[key, [list(each) for each in directions]] for key, directions in space.axes],
    }


def _list_versions() -> dict[str, str]:
    found = {"cuda": str(torch.version.cuda or torch.version.hip or "")}
    if torch.cuda.is_available():
        found["cudnn"] = str(torch.backends.cudnn.version())
    for name in ("triton", "torchao"):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


# --- the door


def tune(session: Session, data: Data, build: BuildTrial, clock: Callable[[], float] = time.perf_counter) -> None:
    """Choose what `train.tune` may choose, on all ranks together, before the session is settled: its resolution has the
    values then, and its `tuned` what the event `tuned` says. Raises UserError only for what is wrong without it too."""
    tuning = Tuning(session, data, build, clock)
    ranks, space, untried = session.ranks, tuning.space, tuning.untried
    if not any(direction for _, directions in space.axes for direction in directions):
        _take(session, tuning.resolve(list_origins(TuneChoice(space, ()), [], session.resolved), space.usual))
        session.tuned = {"reason": f"train.tune measures nothing{_render_untried(untried)}"}
        return
    facts, folder = list_facts(tuning.devices, space, tuning.resolved, data), find_own_folder("CACHE")
    cache = TuneCache(folder / "tuned" if folder is not None else None, facts, session.directory.path)
    kept, ended = ranks.ask_first(lambda: (cache.read(), cache.read_ended()))
    if kept is not None and kept["values"].keys() == space.usual.keys():
        try:
            resolution = tuning.resolve(kept["origins"], kept["values"])
            ranks.together(lambda: _take(session, resolution))
        except UserError:
            cache.trouble = f"{cache.path} does not fit here, and is written anew"
        else:
            session.tuned = {
                "reason": f"tuned on {kept['date']} ({cache.path}): {kept['text']}",
                "values": kept["values"],
            }
            return
    if ranks.is_first:
        logging.getLogger("shardway").warning(
            f"train.tune measures which settings are fastest, for at most {BUDGET_S:.0f} s."
        )
    choice = tuning.measure(ended, lambda values: cache.note(ended, values))
    seconds, untried = ranks.gather(tuning.seconds)[0], {**choice.list_untried(), **untried}
    values, origins = ranks.gather((choice.values, list_origins(choice, tuning.devices, session.resolved)))[0]
    _take(session, tuning.resolve(origins, values))
    found = f"{choice.describe() or 'nothing was compared'}{_render_untried(untried)}"
    if ranks.is_first:
        cache.forget(ended)
        if not ended and choice.decided:
            date = time.strftime("%Y-%m-%d")
            cache.write({"values": values, "origins": origins, "text": found, "date": date})
    trouble = f" ({cache.trouble})" if cache.trouble else ""
    session.tuned = {
        "reason": f"tuned in {seconds:.0f} s: {found}{trouble}",
        "seconds": seconds,
        "values": values,
        "candidates": [each.tried.as_json() for each in choice.comparisons],
    }


def list_origins(choice: TuneChoice, devices: Sequence[str], resolved: Resolved) -> dict[str, str]:
    """Why each key of a choice has its value."""
    device, origins = " and ".join(devices), dict[str, str]()
    missed = {each.key: each.tried.untried for each in choice.comparisons}
    for key in choice.space.usual:
        if choice.of(key):
            where = f" on {device}" if any(each.gain for each in choice.of(key)) else ""
            origins[key] = f"{choice.explain(key)}{where} (train.tune)"
        else:
            before = resolved.origins[key].removeprefix(DERIVED).removesuffix(f"; {AT_THE_START}")
            origins[key] = f"not tried, {missed.get(key, 'there is no other value')}: {before}"
    return origins


def _render_untried(untried: Mapping[str, str]) -> str:
    told = [f"{name} ({why})" for name, why in untried.items()]
    return f"; not tried: {', '.join(told)}" if told else ""


def _take(session: Session, resolution: Resolution) -> None:
    values = resolution.resolved.values
    session.resolution, session.precision = resolution, read_precision(values.precision)
    apply_backend_switches(values, session.ranks.device)
    if not values.train.compiles and (workers := sys.modules.get("torch._inductor.async_compile")) is not None:
        workers.shutdown_compile_workers()
