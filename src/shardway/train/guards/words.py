"""What the guard says when it ends a run.

Invariant: each error names the step, what was seen, the newest checkpoint that can be trusted and what to do. This
module must not decide.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from shardway.errors import JobError, list_some
from shardway.parallel.replicas import ReplicaDifference
from shardway.train.guards.repeat import Corruption
from shardway.train.step import StepResult

SHOWN = 6
"""How many samples, ranks or parameters a message lists."""


@dataclass(frozen=True)
class Skipped:
    """A step that was skipped: its samples over all ranks, whether its passes could be repeated, and how many in a row
    with it."""

    step: int
    samples: Sequence[int]
    repeated: bool
    in_a_row: int


def describe_numbers(result: StepResult) -> str:
    """Which of the two numbers of a step is none: "loss of step 3 is nan"."""
    if math.isfinite(result.loss):
        return f"norm of its gradient is {result.grad_norm}"
    return f"loss is {result.loss}"


def refuse_weights(step: int, result: StepResult, saved: Sequence[int]) -> JobError:
    """What a step without a guard has made of the weights must not push good checkpoints out."""
    what = f"loss of step {step} is {result.loss}"
    if math.isfinite(result.loss):
        what = f"gradient of step {step} has the norm {result.grad_norm}"
    return JobError(
        f"the {what}, so the weights after it are of no use; the run ends here.\n"
        f"  No checkpoint was made of them ({_name_last(saved)}). To do: look for values in the data that are not "
        "finite, lower optim.lr, or set optim.clip; then run the same command again."
    )


def refuse_skips(skipped: Skipped, result: StepResult, limit: str, saved: Sequence[int]) -> JobError:
    """The last of the skipped steps that a run may have. `limit` says which key allows how many, and its origin."""
    steps = f"step {skipped.step}"
    if skipped.in_a_row > 1:
        steps = f"steps {skipped.step - skipped.in_a_row + 1} to {skipped.step}"
    again = "also when its passes were repeated" if skipped.repeated else "and the passes wrote into their batch, "
    again += "" if skipped.repeated else "so that they could not be repeated"
    return JobError(
        f"the {describe_numbers(result)} in step {skipped.step}, {again}; {steps} changed no weights, and the run "
        f"ends here ({limit}).\n"
        f"  Samples of step {skipped.step}: {list_some([str(each) for each in skipped.samples], SHOWN)}; all of them "
        f"are in the events named step_skipped. {_name_checkpoint(saved)}. To do: look for values in these "
        "samples that are not finite, lower optim.lr, or set optim.clip; then run the same command again."
    )


def refuse_machine(step: int, corruption: Corruption, saved: Sequence[int]) -> JobError:
    """Three runs of the same passes, three results."""
    return JobError(
        f"the passes of step {step} were run three times and gave three different results {_name_places(corruption)}; "
        "no rank changed its weights, and the run ends here.\n"
        f"  Either operations of this model have no fixed result, or a machine computes wrongly. "
        f"{_name_checkpoint(saved)}. To do: set train.deterministic = true; if it comes again with that, leave these "
        "hosts out and have them tested."
    )


@dataclass(frozen=True)
class Mismatch:
    """Copies that differ at a step, the hosts of the named ranks, and the last step at which all were equal."""

    step: int
    differences: Sequence[ReplicaDifference]
    hosts: Sequence[str]
    equal_at: int | None

    @property
    def ranks(self) -> list[int]:
        """The ranks of all differences."""
        return sorted({rank for each in self.differences for rank in each.ranks})


def refuse_replicas(mismatch: Mismatch, saved: Sequence[int]) -> JobError:
    """Copies of a weight differ."""
    names = list_some([each.parameter for each in mismatch.differences], SHOWN)
    ranks = list_some([str(rank) for rank in mismatch.ranks], SHOWN)
    hosts = list_some(list(mismatch.hosts), SHOWN)
    decided = all(each.decided for each in mismatch.differences)
    who = f"differ on rank {ranks} ({hosts}) from those of the other ranks"
    if not decided:
        who = f"differ between ranks {ranks} ({hosts}), and no majority says which are right"
    return JobError(
        f"after step {mismatch.step} the copies of {names} {who}; the run ends here, and nothing was saved after it.\n"
        f"  {_name_trusted(mismatch.equal_at, saved)} To do: leave the named hosts out and have them tested; then run "
        "the same command again."
    )


def _name_trusted(equal_at: int | None, saved: Sequence[int]) -> str:
    """Which checkpoint was made of copies that were compared and equal, and which were made later."""
    good = [step for step in saved if equal_at is not None and step <= equal_at]
    later = [step for step in saved if step not in good]
    compared = f"All copies were equal at step {equal_at}"
    if equal_at is None:
        compared = "No comparison was made before"
    text = f"{compared}, and no checkpoint is from then or before."
    if good:
        text = f"{compared}; the newest checkpoint from then or before is that of step {good[-1]}."
    if later:
        steps = list_some([str(step) for step in later], SHOWN)
        text += (
            f" Checkpoints from after it (step {steps}) may hold wrong weights: move them away to go on before them."
        )
    return text


def _name_places(corruption: Corruption) -> str:
    ranks = list_some([str(rank) for rank in corruption.ranks], SHOWN)
    return f"(rank {ranks} on {list_some(list(corruption.hosts), SHOWN)})"


def _name_last(saved: Sequence[int]) -> str:
    return f"step {saved[-1]} is the last one" if saved else "none was saved yet"


def _name_checkpoint(saved: Sequence[int]) -> str:
    return f"The last checkpoint is that of step {saved[-1]}" if saved else "No checkpoint was saved yet"
