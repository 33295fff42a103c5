"""Before and after of a lesson: what its runs measured on this machine, with the plan of the same step beside it.

Invariants:
- Measured figures come from events and checkpoints of the learner's runs; planned ones are computed when shown.
- The planner knows accelerators and no CPU: a planned step is that of the named accelerator, and never called a
  prediction of a CPU's. What a rank keeps between steps does not depend on the device, so that is compared as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import ValidationError

from shardway.errors import ShardwayError
from shardway.learn.evidence import LessonEvidence, LessonRun
from shardway.plan.case import Machine
from shardway.runfile.schema import RunFile
from shardway.watch.words import align_cells, render_size

_AXES = ("dp_replicate", "dp_shard", "tp", "pp", "cp", "ep")


@dataclass(frozen=True)
class RunFigures:
    """Figures of one run: `step_s` is the median seconds of a step, `saved_bytes` the largest file that a rank wrote of
    a checkpoint; planned: seconds of a step on the named accelerator, and bytes that a rank keeps between steps. None
    where a figure is not known."""

    run: str
    ranks: int
    layout: str
    changed: dict[str, Any]
    step_s: float | None
    loss: float
    saved_bytes: int | None
    planned_step_s: float | None = None
    planned_kept_bytes: float | None = None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def find_figures(evidence: LessonEvidence, machine: Machine) -> list[RunFigures]:
    """The figures of each run of a lesson that counts, in the order of their starts; the first one is the base."""
    runs = sorted(evidence.runs, key=lambda run: run.starts[0].get("time") or 0.0)
    found = []
    for run in runs:
        planned = _plan(run, machine)
        degrees = [f"{axis} {run.get(f'parallel.{axis}')}" for axis in _AXES if (run.get(f"parallel.{axis}") or 1) != 1]
        changed = _find_changed(runs[0], run) if run.is_gpt and runs[0].is_gpt else {}
        losses = run.losses
        largest = max(run.shard_bytes, default=None)
        found.append(
            RunFigures(
                run.name,
                run.world,
                " x ".join(degrees),
                changed,
                run.find_median_s(),
                losses[max(losses)],
                largest,
                *(planned or ()),
            )
        )
    return found


def _find_changed(base: LessonRun, run: LessonRun) -> dict[str, Any]:
    """The keys of the model, its data and its numbers whose value is not that of the base."""
    changed: dict[str, Any] = {}
    for section in ("model", "data", "optim", "precision", "recompute"):
        before, after = base.values.get(section) or {}, run.values.get(section) or {}
        changed |= {f"{section}.{name}": after[name] for name in after if before.get(name) != after[name]}
    if base.get("train.global_batch") != run.get("train.global_batch"):
        changed["train.global_batch"] = run.get("train.global_batch")
    return changed


def _plan(run: LessonRun, machine: Machine) -> tuple[float, float] | None:
    """Planned seconds of a step on the machine, and bytes of a rank between steps; None for a model without a plan."""
    if not run.is_gpt:
        return None
    from shardway.plan.planner import estimate
    from shardway.resolve.planned import case_of, shape_of_run

    try:
        values = RunFile.model_validate(dict(run.values))
        found = estimate(case_of(values, shape_of_run(values), machine=machine), machine)
    except (ShardwayError, ValidationError, ValueError, TypeError):
        return None
    return found.time.seconds, found.between_steps.kept


def render_figures(found: Sequence[RunFigures], accelerator: str) -> str:
    """The figures as a table; each step also as a part of that of the first run, measured and planned."""
    base = found[0]
    rows = [("run", "ranks", "step", "", "loss", "planned step", "", "kept by a rank", "planned")]
    for each in found:
        rows.append(
            (
                each.run,
                str(each.ranks),
                _ms(each.step_s),
                _ratio(each.step_s, base.step_s),
                f"{each.loss:.4f}",
                _ms(each.planned_step_s),
                _ratio(each.planned_step_s, base.planned_step_s),
                render_size(each.saved_bytes),
                render_size(each.planned_kept_bytes),
            )
        )
    lines = align_cells(rows)
    what = [f"  {each.run}: {', '.join(filter(None, [each.layout, _render_changed(each)]))}" for each in found]
    return "\n".join(
        [
            *lines,
            "",
            "what differs (from the first run, and degrees above 1)",
            *(line if not line.endswith(": ") else f"{line}nothing" for line in what),
            "",
            f"step            median, measured here; x: over that of {base.run}",
            f"planned step    the same step on {accelerator}: the planner has rates of accelerators, not of this CPU",
            "kept by a rank  largest file that a rank wrote of the last checkpoint: weights and optimizer; copies of a",
            "                model share the writing, so that each of them writes less than it keeps",
        ]
    )


def _render_changed(each: RunFigures) -> str:
    return ", ".join(f"{key} = {value}" for key, value in each.changed.items())


def _ms(seconds: float | None) -> str:
    return "n/a" if seconds is None else f"{seconds * 1000:.1f} ms"


def _ratio(seconds: float | None, base: float | None) -> str:
    return "" if seconds is None or not base else f"x {seconds / base:.2f}"
