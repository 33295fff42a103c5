"""What the results of validations ask for: a checkpoint of a step that is one of the best, or the end of the run.

Invariant: it follows from the results that hold and from the steps that are saved, and nothing of it is written down;
so a resume knows the same. All ranks know what rank 0 found. This module must not save, nor end the run.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from shardway.best import Results
from shardway.errors import UserError
from shardway.train.loop_plan import LoopPlan
from shardway.train.session import Session
from shardway.train.validate import Validation


@dataclass(frozen=True)
class _Verdict:
    save_due: bool
    finish_reason: str
    unknown: str


class Monitoring:
    """Looks at the results of one run; without a validation there is nothing to look at.

    `save_due`: the step is one of the best or the last, and the run directory lacks it. `finish_reason`: why the run is
    finished by `train.patience`; empty where it is not. `unknown`: that no result has the metric which
    `checkpoint.monitor` names.
    """

    def __init__(self, session: Session, plan: LoopPlan, validation: Validation | None) -> None:
        self._session = session
        self._plan = plan
        self._validation = validation
        self.save_due, self.finish_reason, self.unknown = False, "", ""

    @property
    def ranking(self) -> tuple[int, ...]:
        """The steps that were validated, the best first, where checkpoints are kept by it."""
        return tuple(self._plan.monitor.rank(self._results)) if self._plan.keep.best else ()

    def look(self, step: int, *, finished: bool) -> None:
        """Find what the results up to this step ask for, of a run that is finished anyway or not; on all ranks
        together."""
        if self._validation is None:
            return
        done = finished or step >= self._plan.total_steps
        found = self._session.ranks.ask_first(lambda: self._judge(step, done=done))
        self.save_due, self.finish_reason, self.unknown = found.save_due, found.finish_reason, found.unknown
        if found.finish_reason and self._session.own_model and self._session.ranks.is_first:
            told = f"this run is finished ({found.finish_reason}); with a higher train.patience it goes on."
            logging.getLogger("shardway").warning(told)

    def take_save(self) -> tuple[bool, tuple[int, ...]]:
        """For a save, which is made now: whether the result asks for it, and the ranking."""
        due, self.save_due = self.save_due, False
        return due, self.ranking

    def describe_finish(self, reason: str) -> dict[str, str]:
        """For the status of a run that is finished before its last step: by its script, or by which key."""
        return {"finished_by": "train.patience"} if self.finish_reason else {"finished_early": reason}

    @property
    def _results(self) -> Results:
        return self._validation.results if self._validation is not None else {}

    def _judge(self, step: int, *, done: bool) -> _Verdict:
        keep, finish_reason = self._plan.keep, "" if done else self._find_finish()
        saved = self._session.directory.checkpoint_steps() if keep.best or finish_reason else []
        is_best = step in keep.find_best([*saved, step], self.ranking)
        return _Verdict((is_best or bool(finish_reason)) and step not in saved, finish_reason, self._find_unknown())

    def _find_finish(self) -> str:
        """Why the run is finished, where enough validations in a row were no better."""
        monitor, patience, results = self._plan.monitor, self._plan.patience, self._results
        count = monitor.count_since_best(results)
        if patience is None or count < patience:
            return ""
        best = monitor.find_best(results)
        said = f"{best.metrics[monitor.metric]:.4g} at step {best.step} is the best" if best else "none was a number"
        return f"no better {monitor.metric} for {count} validation{'s' * (count != 1)}: {said}"

    def _find_unknown(self) -> str:
        metric, results = self._plan.monitor.metric, self._results
        origin = self._session.resolved.origins["checkpoint.monitor"]
        if not results or any(metric in metrics for metrics in results.values()):
            return ""
        there = ", ".join(dict.fromkeys(name for metrics in results.values() for name in metrics))
        return (
            f'checkpoint.monitor is "{self._plan.monitor}" ({origin}), and the results of the validation hold no '
            f"{metric}.\n"
            f"      allowed: {there}; a name other than loss, accuracy and bits_per_byte with max or min before it\n"
            "  Nothing is lost: what was trained is saved. To do: name one of these, or let the loss function give "
            f"{metric} in LossSum(metrics=...); then run the same command again."
        )


def check_is_validated(session: Session, validation: Validation | None) -> None:
    """Raise UserError where a key goes by the results of validations, and the script has none."""
    values, origins = session.resolved.values, session.resolved.origins
    asked = {"checkpoint.keep_best": values.checkpoint.keep_best, "train.patience": values.train.patience}
    named = [f"{key} is {value} ({origins[key]})" for key, value in asked.items() if value not in (0, "off")]
    if named and validation is None:
        raise UserError(
            f"{' and '.join(named)}, which needs validations, and run.steps was given none.\n"
            "  To do: hand run.steps(loader, validation=run.validation(held_out, loss_fn)), or leave the key out."
        )
