"""Problems of several sources as one list, so that a person is told once.

Invariant: what one source finds hides nothing that another would. This module must not judge anything itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from shardway.errors import Problem, UserError, check_no_problems

T = TypeVar("T")


@dataclass
class ProblemCollector:
    """Problems as they are found."""

    problems: list[Problem] = field(default_factory=list)
    _errors: list[UserError] = field(default_factory=list)

    def collect(self, where: str, make: Callable[[], T], otherwise: T) -> T:
        """What `make` gives; its UserError becomes problems, of `where` if it does not say, and then `otherwise`."""
        try:
            return make()
        except UserError as error:
            self._errors.append(error)
            self.problems += error.problems or [_as_problem(where, str(error))]
            return otherwise

    def check(self, title: str) -> None:
        """Raise one UserError with all that was found, each once; where that is one error, as it was worded."""
        if len(self._errors) == 1 and len(self.problems) == max(1, len(self._errors[0].problems)):
            raise self._errors[0]
        check_no_problems(title, list(dict.fromkeys(self.problems)))


def _as_problem(where: str, message: str) -> Problem:
    """A message as one problem: what stands after "allowed:" and "to do:" is what these are."""
    what, *tail = re.split(r"\n\s*(allowed|to do): ", message, flags=re.IGNORECASE)
    told = {name.lower(): _as_line(text) for name, text in zip(tail[::2], tail[1::2], strict=True)}
    return Problem(where, _as_line(what), allowed=told.get("allowed", ""), remedy=told.get("to do", ""))


def _as_line(text: str) -> str:
    return " ".join(text.split()).removesuffix(".")
