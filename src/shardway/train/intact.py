"""Whether what a run holds is whole: between two steps it is, and an error in the midst of an update breaks it.

Invariant: what is saved was whole. In a notebook an interrupt waits until it is (`ranks.notebook`), and the run goes on
in the next cell. This module must not save.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager

from shardway.errors import UserError
from shardway.ranks.notebook import Interrupts
from shardway.ranks.start import Ranks
from shardway.train.engines.base import Engine
from shardway.train.step import StepContext


class Intact:
    """What the loop asks around its pieces of work."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks, self._interrupts, self._broken = ranks, Interrupts(), False

    def held(self, *, apply: bool = True) -> AbstractContextManager[None]:
        """While entered, an interrupt waits; not for what takes long and is made again where it is interrupted."""
        return self._interrupts.held() if apply else contextlib.nullcontext()

    @contextlib.contextmanager
    def update(self, engine: Engine, moment: StepContext) -> Iterator[None]:
        """One update: before it has begun, an error leaves the model as it was."""
        with self._interrupts.held():
            try:
                yield
            except BaseException:
                self._broken = moment.update.begun or not engine.can_void
                raise

    def is_broken(self) -> bool:
        """Whether the model is neither before nor after an update, on any rank; asked on all of them."""
        return any(self._ranks.gather(self._broken))

    def describe(self, step: int) -> str:
        """Why nothing is saved."""
        return f"the update of step {step + 1} was broken off, and nothing of it is saved"


def refuse_broken(saved: int) -> UserError:
    """The error where a loop goes on after an update that was broken off; `saved`: the step of the last checkpoint."""
    where = f"step {saved}, which is saved" if saved else "the start, since nothing is saved yet"
    return UserError(
        "an error has ended the last update in its midst, so the model is neither before nor after it.\n"
        f"  To do: call shardway.start and make model and optimizer anew: the run goes on from {where}."
    )
