"""What is handed on: files, and sentences about what stands in none of them; the comment that each file starts with.

Invariant: a file says how many ranks its degrees make and how many the plan has. This module must not know a library.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from shardway.plan.case import Case

_WIDTH = 112


@dataclass(frozen=True)
class EmittedFile:
    """A text and the name that it is meant to be kept under."""

    name: str
    text: str


@dataclass(frozen=True)
class Emitted:
    """The files of one library; `told` is what it cannot express and what a person still has to set, in sentences."""

    files: tuple[EmittedFile, ...]
    told: tuple[str, ...]


Emitter = Callable[[Case, Sequence[str]], Emitted]
"""Called with a case and the lines of its prediction."""


@dataclass(frozen=True)
class EmittedHeader:
    """What a file says about itself before its settings: prediction, degrees that it expresses, what it lacks."""

    case: Case
    prediction: Sequence[str]
    degrees: Mapping[str, int]
    told: Sequence[str]

    @property
    def ranks(self) -> int:
        """How many the degrees of the file make."""
        return math.prod(self.degrees.values())

    def lines(self) -> list[str]:
        """Without marks of a comment."""
        told = [line for sentence in self.told for line in _item(sentence)]
        heading = ["Still to do, or different from the plan:"] if told else []
        return [*self.prediction, *_wrapped(f"{self.case.model.name}: {self._degrees()}"), *heading, *told]

    def comment(self, mark: str = "#") -> str:
        """The lines as a comment, with the newline after the last."""
        return "".join(f"{mark} {line}".rstrip() + "\n" for line in self.lines())

    def _degrees(self) -> str:
        product = " x ".join(f"{name} {size}" for name, size in self.degrees.items() if size > 1) or "1"
        there, wanted = self.ranks, self.case.degrees.world
        if there == wanted:
            return f"degrees {product} = {there} ranks, as many as in the plan."
        return f"degrees {product} = {there} ranks, but the plan has {wanted}: what is missing is told below."


def write(name: str, head: EmittedHeader, body: str) -> EmittedFile:
    """A file whose format has comments that start with #."""
    return EmittedFile(name, f"{head.comment()}\n{body}")


def gather(sentences: Iterable[str]) -> tuple[str, ...]:
    """Each once, in the order in which they were said first."""
    return tuple(dict.fromkeys(sentences))


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, break_long_words=False, break_on_hyphens=False)


def _item(sentence: str) -> list[str]:
    first, *rest = _wrapped(sentence)
    return [f"- {first}", *(f"  {line}" for line in rest)]
