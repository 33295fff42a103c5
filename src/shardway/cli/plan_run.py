"""What `shardway plan run.toml` asks: the run as it resolves on the machine, its model laid out, counted or traced.

Invariant: what a run file says is not said a second time by an option. torch is imported for --trace alone, whose
result is kept beside the run file, so that the next plan needs none. This module must not print.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from shardway.cli.plan_options import Counting
from shardway.errors import Problem, SiteError, UserError, check_no_problems
from shardway.plan.answer.said import PlanOptions, SearchQuestion, find_problems
from shardway.plan.machine import Machine
from shardway.plan.search.space import AXES, SETTINGS, Question
from shardway.plan.shapes.measured import Measured, Shape, read_measured
from shardway.plan.units.answer import UnitQuestion
from shardway.plan.units.estimate import UnitCase
from shardway.resolve.applies import IMAGE_MODELS, TOKEN_MODELS
from shardway.resolve.planned.case import case_of, list_assumptions, precision_of, shape_of_run
from shardway.resolve.request import parse_words, resolve_request
from shardway.resolve.resolved import Resolved
from shardway.units import Span

if TYPE_CHECKING:
    from shardway.runfile.schema import RunFile

KEYS = {
    "seq_len": ("--seq-len", "data.seq_len"),
    "global_batch": ("--global-batch", "train.global_batch"),
    "precisions": ("--precision", "precision.compute"),
    "optimizer": ("--optimizer", "optim.name"),
    "engine": ("--engine", "train.engine"),
    "layout": ("--layout", "parallel.tp and its like"),
    "micro_batch": ("--micro-batch", "train.micro_batch"),
    "recompute": ("--recompute", "recompute.mode"),
    "schedule": ("--schedule", "parallel.pp_schedule"),
    "zero": ("--zero", "parallel.dp_shard"),
    "attention": ("--attention", "train.compile and the device"),
    "compiled": ("--compiled", "train.compile"),
    "offload": ("--offload", "parallel.cpu_offload"),
}
"""What an option says -> the option, and the key of a run file that says it there."""

SETTLED = frozenset((*AXES, *SETTINGS, "offload", "sequence"))
"""What a resolved run leaves no choice of."""


@dataclass(frozen=True)
class AskedUnits:
    """The question of a model that is known by its units, and what was assumed."""

    question: UnitQuestion
    assumed: tuple[str, ...]


@dataclass(frozen=True)
class _FoundShape:
    """A shape, and where it is from, where that is not the run file."""

    shape: Shape
    told: str = ""
    samples: int | None = None
    """Of an epoch, where the data are open."""


def ask_run(words: list[str], machine: Machine, said: PlanOptions, counting: Counting) -> SearchQuestion | AskedUnits:
    """The question of a run file on a machine. Raises UserError with all that cannot be."""
    check_no_problems("the plan", [*find_problems(said, machine), *_find_doubles(said)])
    ranks = said.gpus or (said.nodes or 1) * machine.per_node
    request = parse_words(words)
    resolved = resolve_request(request, ranks, min(ranks, machine.per_node), machine).resolved
    path = Path(words[0])
    if counting.trace or counting.module:
        found = _trace(resolved.values, path, counting.module)
    else:
        found = _find_shape(resolved.values, resolved.circumstances.shape, path)
    shape, told = found.shape, [*machine.assumed, *filter(None, [found.told])]
    if not said.gpus and not said.nodes:
        told.append("one node (--nodes)")
    length = said.length or _length_of(resolved, found.samples)
    if isinstance(shape, Measured):
        return AskedUnits(_ask_units(resolved, shape, machine, ranks, length), tuple(told))
    told += list_assumptions(resolved.values)
    return SearchQuestion(Question(case_of(resolved.values, shape), machine, ranks, SETTLED), length, tuple(told))


def _find_doubles(said: PlanOptions) -> list[Problem]:
    return [
        Problem(option, "is said by the run file", remedy=f"set {key} there, or give {key}=... behind the run file")
        for name, (option, key) in KEYS.items()
        if getattr(said, name) != getattr(PlanOptions(), name)
    ]


def _length_of(resolved: Resolved, samples: int | None) -> Span | None:
    """In steps where that is known; None where only the data can say how long an epoch is."""
    if resolved.derived.total_steps:
        return Span(float(resolved.derived.total_steps), "steps")
    span = resolved.values.train.steps
    if span.unit == "epochs":
        return Span(span.amount * samples, "samples") if samples else None
    return span


def _ask_units(resolved: Resolved, shape: Measured, machine: Machine, ranks: int, length: Span | None) -> UnitQuestion:
    values = resolved.values
    parallel, micro = values.parallel, values.train.micro_batch
    case = UnitCase(
        model=shape,
        global_batch=values.train.global_batch,
        micro_batch=int(micro),
        dp_replicate=int(parallel.dp_replicate),
        dp_shard=int(parallel.dp_shard),
        precision=precision_of(values.precision),
        optimizer=values.optim.name,
    )
    tokens = values.data.seq_len if values.model.kind in TOKEN_MODELS or values.model.hf else 1
    return UnitQuestion(case, machine, ranks, length, frozenset(("micro_batch", "dp_shard")), tokens)


# --- the shape


def shape_path(run_file: Path) -> Path:
    """Where the shape that was traced for a run file is kept."""
    return run_file.with_suffix(".shape.json")


def _find_shape(values: RunFile, hf: Shape | None, path: Path) -> _FoundShape:
    """What was traced for the run file, otherwise what it describes."""
    stored = shape_path(path)
    if stored.exists():
        return _FoundShape(
            _read(stored, values), f"the model as --trace counted it: {stored} (remove it to plan [model])"
        )
    if values.model.kind in IMAGE_MODELS and not values.model.hf:
        return _of_images(values)
    return _FoundShape(shape_of_run(values, hf))


def _read(stored: Path, values: RunFile) -> Measured:
    """Raises UserError where the run file has another model since."""
    shape = read_measured(stored)
    if not shape.source.endswith(_digest(values)):
        raise UserError(
            f"{stored} was counted for another [model] or data.seq_len than this run has.\n"
            "  To do: count it again (--trace), or remove the file."
        )
    return shape


def _digest(values: RunFile) -> str:
    """Of what a sample and the model are made from."""
    text = values.model.model_dump_json() + str((values.data.seq_len, values.data.shape))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _of_images(values: RunFile) -> _FoundShape:
    """The data say how large their images are."""
    from shardway.data.open import are_there, find_sample, open_described
    from shardway.plan.shapes.section import shape_of_section

    if not are_there(values):
        return _FoundShape(shape_of_section(values.model, find_sample(values)[0]), _without_data(values))
    data = open_described(values)
    return _FoundShape(shape_of_section(values.model, data.train.facts.sample_shape), samples=data.facts.samples)


def _trace(values: RunFile, path: Path, module: str) -> _FoundShape:
    """The model that the run file names, counted with torch; kept for the next plan."""
    try:
        from shardway.train.param_count import count_model
    except ModuleNotFoundError as error:
        raise UserError(
            f"--trace builds the model, and {error.name} is not installed here.\n"
            "  To do: run it once where PyTorch is, and take the file of the shape along."
        ) from error
    from shardway.data.open import are_there

    counted, stored = count_model(values, module), shape_path(path)
    counted = replace(counted, source=f"{counted.source}; of {_digest(values)}")
    try:
        stored.write_text(counted.to_json(), encoding="utf-8")
    except OSError as error:
        raise SiteError(f"{stored} cannot be written: {error.strerror}.") from error
    told = f"the model as it was counted now, kept in {stored}"
    return _FoundShape(counted, told if are_there(values) else f"{told}; {_without_data(values)}")


def _without_data(values: RunFile) -> str:
    """What stands for data that are not there yet."""
    images = values.model.kind in IMAGE_MODELS and not values.model.hf
    says = "samples of data.seq_len tokens"
    if images:
        says = f"images of {list(values.data.shape)} (others: data.kind=synthetic data.shape=[...])"
    return f"{says}, since {values.data.path} is not there yet"
