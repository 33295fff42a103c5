"""Repeats the passes of a step: after numbers that are not finite, or to check that the same numbers come out.

Invariant: all ranks run the passes equally often and decide the same. The gradients that are left belong to the numbers
that are returned.

A transient fault (of memory, of a link, of an arithmetic unit) does not come twice; data, code and weights give the
same numbers again. Running a step again tells one from the other (Dixit et al., "Silent Data Corruptions at Scale",
arXiv:2102.11245).
"""

from __future__ import annotations

import hashlib
import math
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from shardway.errors import UserError
from shardway.parallel.replicas import sum_bits
from shardway.ranks.start import Ranks
from shardway.train.snapshot import Before


@dataclass(frozen=True)
class GuardChecks:
    """The checks before an update: `repeat` passes whose numbers are not finite, `probe` whether a second run of the
    passes gives the same bits."""

    repeat: bool
    probe: bool = False


@dataclass(frozen=True)
class Tried:
    """The numbers of one run of the passes: this rank's, and the vector that is summed over all ranks."""

    own: torch.Tensor
    summed: torch.Tensor

    @cached_property
    def numbers(self) -> list[float]:
        """The summed vector, read once: the host waits for the device here."""
        found: list[float] = self.summed.tolist()
        return found


@dataclass(frozen=True)
class Corruption:
    """Two runs of the same passes differed: the ranks whose own numbers did, and their hosts.

    `decided`: a third run equals one of the two, and its gradients are the ones that are left.
    """

    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    decided: bool


@dataclass(frozen=True)
class First:
    """Sum of losses, targets and the square of the gradient norm of a first run that was not finite."""

    total: float
    targets: float
    squares: float


@dataclass(frozen=True)
class Watched:
    """The run of the passes that counts. `finite`: whether its numbers are (True if unchecked)."""

    tried: Tried
    finite: bool = True
    repeated: bool = False
    first: First | None = None
    corruption: Corruption | None = None

    @property
    def is_refused(self) -> bool:
        """Whether these gradients must not change weights on any rank."""
        return not self.finite or (self.corruption is not None and not self.corruption.decided)


@dataclass(frozen=True)
class RepeatablePasses:
    """Passes that can be run again: `run` leaves gradients, `clear` drops them; `squares_at` is where the summed vector
    holds the squares of gradients."""

    run: Callable[[], Tried]
    clear: Callable[[], None]
    gradients: Callable[[], Sequence[torch.Tensor]]
    ranks: Ranks
    batch: Any
    squares_at: int

    def again(self, before: Before) -> Tried:
        """The passes once more, as if for the first time."""
        self.clear()
        before.put_back()
        return self.run()

    def read(self, tried: Tried) -> First | None:
        """The numbers of a run that are not finite; None if all are finite."""
        numbers = tried.numbers
        total, targets, squares = numbers[0], numbers[1], numbers[self.squares_at]
        finite = math.isfinite(squares) and (math.isfinite(total) or not targets)
        return None if finite else First(total, targets, squares)


def run_watched(work: RepeatablePasses, watch: GuardChecks, before: Before) -> Watched:
    """The passes of a step, repeated if `watch` asks for it; `before` is the state without them.

    Raises UserError if a probe cannot repeat them.
    """
    tried, corruption = work.run(), None
    if watch.probe:
        tried, corruption = _probe(work, before, tried)
    first = work.read(tried) if watch.repeat else None
    if first is None:
        watched = Watched(tried, corruption=corruption)
    elif not _can_repeat(work, before):
        watched = Watched(tried, finite=False, first=first, corruption=corruption)
    else:
        tried = work.again(before)
        watched = Watched(tried, work.read(tried) is None, repeated=True, first=first, corruption=corruption)
    if watched.is_refused:
        before.put_back_model()
    return watched


def _can_repeat(work: RepeatablePasses, before: Before) -> bool:
    """Whether every rank still has its batch unchanged."""
    return all(work.ranks.gather(before.has_its_batch()))


@dataclass(frozen=True)
class _Print:
    """What a run of the passes has given on one rank: its own numbers, and sums of the bits of its gradients."""

    own: str
    gradients: str


def _probe(work: RepeatablePasses, before: Before, first: Tried) -> tuple[Tried, Corruption | None]:
    """A second run, and if it differs on any rank a third: two equal ones of three are right."""
    if not _can_repeat(work, before):
        raise UserError(
            "guard.probe_every runs the passes of a step twice, and the first run wrote into the tensors of its "
            "batch.\n"
            '  To do: let model and loss function work on copies of them, or set guard.probe_every = "off".'
        )
    prints = [_take_prints(work, first)]
    second = work.again(before)
    prints.append(_take_prints(work, second))
    if prints[0] == prints[1]:
        return second, None
    third = work.again(before)
    prints.append(_take_prints(work, third))
    return third, _name_ranks(work.ranks, prints[0], prints[1], decided=prints[2] in prints[:2])


def _take_prints(work: RepeatablePasses, tried: Tried) -> list[_Print]:
    rest = [*tried.numbers, *sum_bits(work.gradients())]
    return work.ranks.gather(_Print(_digest(tried.own.tolist()), _digest(rest)))


def _digest(numbers: Sequence[float]) -> str:
    return hashlib.blake2b(repr(list(numbers)).encode(), digest_size=16).hexdigest()


def _name_ranks(ranks: Ranks, one: list[_Print], other: list[_Print], *, decided: bool) -> Corruption:
    """The ranks whose own losses differ; if none do, those whose gradients do."""
    pairs = list(enumerate(zip(one, other, strict=True)))
    named = [rank for rank, (a, b) in pairs if a.own != b.own] or [rank for rank, (a, b) in pairs if a != b]
    hosts = ranks.gather(socket.gethostname())
    return Corruption(tuple(named), tuple(dict.fromkeys(hosts[rank] for rank in named)), decided)
