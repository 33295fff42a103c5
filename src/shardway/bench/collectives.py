"""The seven collectives as calls of torch.distributed, with data that show every wrong result.

Invariants:
- What a rank sends follows from its number, the step and the place of each element; all values, and their sums over the
  ranks, are integers below 2**24, which fp32 holds exactly, in whatever order they are added.
- A result is right if its checksum is that of the expected one. The checksum weighs the bits of each element with an
  odd number of its place (mod 2**64), so one changed element always changes it.
- Nothing is timed here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType

import torch
import torch.distributed as dist

from shardway.bench.bandwidth import DIVIDED, ELEMENT_BYTES, round_size
from shardway.compat import library_collectives

BLOCKS = {"cpu": 2**16, "cuda": 2**22}
"""Data are made and checked in blocks of so many elements by type of device: what the caches of a processor hold, and
what keeps a GPU busy."""

_VALUES = 256
_EXACT = 2**24


@dataclass(frozen=True)
class GroupPlace:
    """This rank's place in a process group: its number there, and the numbers of all members among all ranks. `group`
    is None for the default one."""

    rank: int
    members: Sequence[int]
    group: dist.ProcessGroup | None = None

    @property
    def ranks(self) -> int:
        return len(self.members)


@dataclass(frozen=True)
class WrongResult:
    """How many elements of a rank's result are wrong, and the first of them."""

    elements: int
    index: int
    found: float
    expected: float

    def __str__(self) -> str:
        return f"{self.elements} wrong, the first is element {self.index}: {self.found:g} and not {self.expected:g}"


class CollectiveBuffers:
    """What one rank sends and receives in a collective of `size` bytes; the first of the group is the root."""

    def __init__(self, collective: str, size: int, place: GroupPlace, device: torch.device) -> None:
        self.collective, self.place = collective, place
        self._table = make_table(device)
        self.size = round_size(collective, size, place.ranks)
        whole = self.size // ELEMENT_BYTES
        self._part = whole // place.ranks if collective in DIVIDED else whole
        lengths = {"all_gather": (self._part, whole), "reduce_scatter": (whole, self._part)}
        sent, received = lengths.get(collective, (whole, whole))
        self.sent = torch.empty(sent, device=device)
        in_place = collective in ("all_reduce", "broadcast", "reduce")
        self.received = self.sent if in_place else torch.zeros(received, device=device)

    def fill(self, step: int) -> None:
        """The data of a step; what a broadcast has to bring is not there before."""
        if self.collective == "broadcast" and self.place.rank > 0:
            self.sent.zero_()
            return
        mark = self._mark(self.place.rank)
        for start, part in self._table.split(self.sent):
            part.copy_(self._table.values(start, len(part), step) + mark)

    def check(self, step: int) -> WrongResult | None:
        """What is wrong with the result of a step; None if it is right, or if this rank gets none."""
        if self.collective == "reduce" and self.place.rank > 0:
            return None
        found = expected = 0
        for start, part in self._table.split(self.received):
            found += self._table.checksum(part, start)
            expected += self._table.checksum(self._expect(start, len(part), step), start)
        return self._locate(step) if (found - expected) % 2**64 else None

    def _locate(self, step: int) -> WrongResult:
        count, first = 0, (-1, 0.0, 0.0)
        for start, part in self._table.split(self.received):
            expected = self._expect(start, len(part), step)
            wrong = (part != expected).nonzero().flatten()
            if len(wrong) and not count:
                index = int(wrong[0])
                first = (start + index, float(part[index]), float(expected[index]))
            count += len(wrong)
        return WrongResult(count, *first)

    def _expect(self, start: int, count: int, step: int) -> torch.Tensor:
        """Elements of the right result of this rank, from `start` on."""
        rank, ranks, part = self.place.rank, self.place.ranks, self._part
        if self.collective in ("broadcast", "send_recv"):
            sender = 0 if self.collective == "broadcast" else (rank - 1) % ranks
            return (self._table.values(start, count, step) + self._mark(sender)).float()
        if self.collective in ("all_gather", "all_to_all"):
            pieces = []
            while count > 0:
                sender, within = divmod(start, part)
                length = min(count, part - within)
                sent = within if self.collective == "all_gather" else rank * part + within
                pieces.append((self._table.values(sent, length, step) + self._mark(sender)).float())
                start, count = start + length, count - length
            return torch.cat(pieces)
        first = start + (rank * part if self.collective == "reduce_scatter" else 0)
        marks = sum(map(self._mark, range(ranks)))
        return (ranks * self._table.values(first, count, step) + marks).float()

    def _mark(self, rank: int) -> int:
        """What is added to the data of a rank: where sums are made, small enough for them to be exact."""
        if self.collective not in ("all_reduce", "reduce", "reduce_scatter"):
            return rank * _VALUES
        return rank % max(1, min(self.place.ranks, _EXACT // self.place.ranks - _VALUES))


class PlaceTable:
    """Numbers by the place of an element that look random and are the same on every rank: a table of one block, and a
    number for each block that is combined with it."""

    def __init__(self, device: torch.device) -> None:
        self.block = BLOCKS.get(device.type, 2**16)
        drawn = torch.Generator().manual_seed(0)
        self._values = torch.randint(0, _VALUES, (self.block,), dtype=torch.int32, generator=drawn).to(device)
        self._weights = (torch.randint(-(2**62), 2**62, (self.block,), generator=drawn) * 2 + 1).to(device)

    def split(self, tensor: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Blocks of a tensor, each with the place of its first element."""
        for start in range(0, len(tensor), self.block):
            yield start, tensor[start : start + self.block]

    def values(self, start: int, count: int, step: int) -> torch.Tensor:
        """Integers from 1 to 256 for the places from `start` on; those of two steps in a row differ everywhere."""
        pieces = []
        while count > 0:
            block, within = divmod(start, self.block)
            length = min(count, self.block - within)
            moved = (_scramble(block) + 37 * step) % _VALUES
            pieces.append(1 + ((self._values[within : within + length] + moved) & (_VALUES - 1)))
            start, count = start + length, count - length
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def checksum(self, values: torch.Tensor, start: int) -> int:
        """The checksum of fp32 elements of one block, whose first place `start` is; that of several is the sum of
        theirs, mod 2**64. Each element's bits count times an odd number."""
        weighed = values.view(torch.int32).long() * self._weights[: len(values)]
        return int(weighed.sum()) * (2 * _scramble(start // self.block) + 1) % 2**64


@cache
def make_table(device: torch.device) -> PlaceTable:
    """The table of a device, which all sizes share."""
    return PlaceTable(device)


def _scramble(number: int) -> int:
    """A number without a pattern, below 2**64: the finaliser of splitmix64 (Steele, Lea, Flood, 2014)."""
    mixed = (number + 1) * 0x9E3779B97F4A7C15 % 2**64
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB % 2**64
    return mixed ^ mixed >> 31


# --- the calls


def _all_reduce(buffers: CollectiveBuffers) -> None:
    dist.all_reduce(buffers.sent, group=buffers.place.group)


def _all_gather(buffers: CollectiveBuffers) -> None:
    library_collectives()["all_gather_function"](buffers.received, buffers.sent, group=buffers.place.group)


def _reduce_scatter(buffers: CollectiveBuffers) -> None:
    library_collectives()["reduce_scatter_function"](buffers.received, buffers.sent, group=buffers.place.group)


def _broadcast(buffers: CollectiveBuffers) -> None:
    dist.broadcast(buffers.sent, buffers.place.members[0], group=buffers.place.group)


def _reduce(buffers: CollectiveBuffers) -> None:
    dist.reduce(buffers.sent, buffers.place.members[0], group=buffers.place.group)


def _all_to_all(buffers: CollectiveBuffers) -> None:
    dist.all_to_all_single(buffers.received, buffers.sent, group=buffers.place.group)


def _send_recv(buffers: CollectiveBuffers) -> None:
    """To the next rank and from the one before, in a ring."""
    place = buffers.place
    after, before = (place.members[(place.rank + step) % place.ranks] for step in (1, -1))
    exchange(buffers.sent, after, buffers.received, before, place.group)


CALLS: Mapping[str, Callable[[CollectiveBuffers], None]] = MappingProxyType(
    {
        "all_reduce": _all_reduce,
        "all_gather": _all_gather,
        "reduce_scatter": _reduce_scatter,
        "broadcast": _broadcast,
        "reduce": _reduce,
        "all_to_all": _all_to_all,
        "send_recv": _send_recv,
    }
)
"""How each collective is called; on a device it is only queued."""


def exchange(
    sent: torch.Tensor, to: int, received: torch.Tensor, source: int, group: dist.ProcessGroup | None = None
) -> None:
    """Send to one rank and receive from one at the same time; both are numbers among all ranks."""
    works = [dist.P2POp(dist.isend, sent, to, group), dist.P2POp(dist.irecv, received, source, group)]
    for work in dist.batch_isend_irecv(works):
        work.wait()
