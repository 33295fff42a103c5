"""What a rank entered last: the collectives of each of its groups, from the flight recorder of torch.

Torch notes each collective as it is entered, with a number that counts those of its group. On gloo the state that it
tells never changes (torch 2.13); whether it counts the collective as done ("retired") does. Gloo notes no transfers
from point to point; NCCL does, and counts them apart.

Invariant: kept is what a comparison of ranks needs (`collectives`), a bounded number of calls a group. Text that is no
record raises ValueError, TypeError or KeyError. Pure. This module must not import torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from math import prod
from typing import Any

LAST = 8
"""How many of the newest calls of a group are kept."""
FIRST_OPEN = 4
"""How many are kept besides of those that were entered and are not over, the oldest of them."""

Span = tuple[int, int, int]

_MOST_RANKS = 1_000_000
_SHOWN_SIZES = 3
_DTYPES = {
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Byte": "uint8",
    "Char": "int8",
    "Short": "int16",
    "Int": "int32",
    "Long": "int64",
    "Bool": "bool",
}
_TRANSFER = re.compile(r"\w+:(?P<verb>send|recv) \d+(?:->|<-)(?P<other>\d+)")
_UNNAMED = frozenset(("", "undefined", "default_pg"))


@dataclass(frozen=True)
class Call:
    """A collective as one rank entered it: its number in the order of the group, its kind ("all_reduce"), what this
    rank put in (elements of all tensors, their sizes and dtypes in words), and whether it is over for this rank."""

    number: int
    kind: str
    elements: int
    sizes: str
    dtype: str
    ended: bool


@dataclass(frozen=True)
class Team:
    """A process group: the library that carries it, torch's name for it (the same on all its ranks), what people call
    it (may be empty), and the ranks in it by their numbers among all, in the order of the group.

    These are kept as spans (first, distance, count), so that a record of a rank among thousands stays small.
    """

    backend: str
    name: str
    words: str
    spans: tuple[Span, ...]

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The ranks; empty where they are not known."""
        return tuple(first + distance * place for first, distance, count in self.spans for place in range(count))


def make_team(backend: str, name: str, words: str, ranks: Sequence[int]) -> Team:
    """A group of these ranks."""
    return Team(backend, name, words, tuple(_find_spans(ranks)))


def _find_spans(ranks: Sequence[int]) -> Iterator[Span]:
    begin = 0
    while begin < len(ranks):
        distance = ranks[begin + 1] - ranks[begin] if begin + 1 < len(ranks) else 1
        end = begin + 1
        while end < len(ranks) and ranks[end] - ranks[end - 1] == distance:
            end += 1
        yield ranks[begin], distance, end - begin
        begin = end


@dataclass(frozen=True)
class CallTimeline:
    """The last calls of one rank in one group, oldest first."""

    team: Team
    calls: tuple[Call, ...]


@dataclass(frozen=True)
class Record:
    """The last calls of a rank in all its groups.

    `whole`: nothing was left out since the rank began, so that a group without a line was never used by it.
    `transfer`: the oldest point-to-point transfer that it began after its last collective, and that is not over.
    """

    rank: int
    lines: tuple[CallTimeline, ...] = ()
    whole: bool = True
    transfer: str = ""


def build_record(
    rank: int, dumps: Sequence[Mapping[str, Any]], members: Mapping[str, tuple[int, ...]], *, recording: bool
) -> Record:
    """The record of a rank from what the recorders of torch tell (one for NCCL, one for the rest), and the ranks of
    each group by torch's name for it. `recording`: they were on from the start."""
    entries = [list(dump.get("entries", ())) for dump in dumps]
    whole = recording and all(not each or int(each[0]["record_id"]) == 0 for each in entries)
    transfer = next(filter(None, (_find_transfer(each, members) for each in entries)), "")
    calls = [entry for each in entries for entry in each if not _is_transfer(entry)]
    calls.sort(key=_find_team)
    lines = [
        CallTimeline(_describe_team(next_ones[0], members), trim_calls(map(_read_entry, next_ones)))
        for next_ones in (list(group) for _, group in groupby(calls, key=_find_team))
    ]
    return Record(rank, tuple(lines), whole, transfer)


def trim_calls(calls: Iterable[Call]) -> tuple[Call, ...]:
    """The calls to keep of one group, in order: the newest ones, and the oldest of those that are open at the end.

    Numbers that begin anew are those of a group that was made again under the same name; of several calls with one
    number (sent together) the first stands for all.
    """
    newest: list[Call] = []
    for call in calls:
        if newest and call.number < newest[-1].number:
            newest = []
        if not newest or call.number > newest[-1].number:
            newest.append(call)
    open_ones = find_open(newest)
    return (*open_ones[: max(0, min(FIRST_OPEN, len(open_ones) - LAST))], *newest[-LAST:])


def find_open(calls: Sequence[Call]) -> Sequence[Call]:
    """Calls that are not over, after the last one that is."""
    done = next((index for index in range(len(calls), 0, -1) if calls[index - 1].ended), 0)
    return calls[done:]


def shift_record(record: Record, first: int) -> Record:
    """The same with the number that the rank has among all, the first of its node being `first`."""
    return replace(record, rank=record.rank + first)


def read_record(facts: Mapping[str, Any]) -> Record:
    """A record from what `dataclasses.asdict` made of it."""
    return Record(
        int(facts["rank"]), tuple(map(_read_line, facts["lines"])), bool(facts["whole"]), str(facts["transfer"])
    )


def _read_line(facts: Mapping[str, Any]) -> CallTimeline:
    team = facts["team"]
    return CallTimeline(
        Team(str(team["backend"]), str(team["name"]), str(team["words"]), tuple(map(_read_span, team["spans"]))),
        tuple(map(_read_call, facts["calls"])),
    )


def _read_span(numbers: Sequence[Any]) -> Span:
    first, distance, count = map(int, numbers)
    if not 0 <= count <= _MOST_RANKS:
        raise ValueError(f"a group of {count} ranks")
    return first, distance, count


def _read_call(facts: Mapping[str, Any]) -> Call:
    return Call(
        int(facts["number"]),
        str(facts["kind"]),
        int(facts["elements"]),
        str(facts["sizes"]),
        str(facts["dtype"]),
        bool(facts["ended"]),
    )


# --- what torch says


def _find_team(entry: Mapping[str, Any]) -> tuple[str, str]:
    backend, found, _ = str(entry["profiling_name"]).partition(":")
    return backend if found else "", str(entry["process_group"][0])


def _describe_team(entry: Mapping[str, Any], members: Mapping[str, tuple[int, ...]]) -> Team:
    backend, name = _find_team(entry)
    words = str(entry["process_group"][1])
    return make_team(backend, name, "" if words in _UNNAMED else words.removeprefix("mesh_"), members.get(name, ()))


def _read_entry(entry: Mapping[str, Any]) -> Call:
    shapes = [tuple(map(int, shape)) for shape in entry["input_sizes"]]
    kinds = sorted({_DTYPES.get(str(each), str(each)) for each in entry["input_dtypes"]})
    return Call(
        number=int(entry["collective_seq_id"]),
        kind=str(entry["profiling_name"]).rpartition(":")[2],
        elements=sum(map(prod, shapes)),
        sizes=_render_sizes(shapes),
        dtype=" and ".join(kinds),
        ended=bool(entry["retired"]),
    )


def _render_sizes(shapes: Sequence[tuple[int, ...]]) -> str:
    shown = ", ".join("x".join(map(str, shape)) or "1" for shape in shapes[:_SHOWN_SIZES])
    return f"{shown} and {len(shapes) - _SHOWN_SIZES} more" if len(shapes) > _SHOWN_SIZES else shown


def _is_transfer(entry: Mapping[str, Any]) -> bool:
    return bool(entry["is_p2p"]) or _TRANSFER.fullmatch(str(entry["profiling_name"])) is not None


def _find_transfer(entries: Sequence[Mapping[str, Any]], members: Mapping[str, tuple[int, ...]]) -> str:
    """What is said of the oldest open transfer after the last collective, as "recv from rank 0"."""
    last = next((index for index in range(len(entries), 0, -1) if not _is_transfer(entries[index - 1])), 0)
    for entry in entries[last:]:
        found = _TRANSFER.fullmatch(str(entry["profiling_name"]))
        ranks = members.get(_find_team(entry)[1], ())
        if found is not None and not entry["retired"] and int(found["other"]) < len(ranks):
            return f"{found['verb']} {'to' if found['verb'] == 'send' else 'from'} rank {ranks[int(found['other'])]}"
    return ""
