"""The last collectives of each rank and group, from torch's flight recorder, and the ranks that have not entered one.

Torch notes each collective as it is entered, with a number that counts those of its group. On gloo the reported state
never changes (torch 2.13); whether the collective counts as done ("retired") does. Gloo notes no point-to-point
transfers; NCCL does, and counts them apart.

Within one group collectives are numbered by their order, the same on all its ranks. A rank that others wait for may
itself wait in another group, so only ranks that wait in no group are named; if every rank waits for another, that is
reported. Point-to-point transfers are counted by pairs of ranks and not recorded by all libraries, so they are no
evidence against a rank.

Invariants:
- Everything here is pure. Of each group a bounded number of calls is kept, as a comparison of ranks needs.
- A string that is not a record raises ValueError, TypeError or KeyError.
- A rank is reported as missing from a collective only if its own record shows it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from math import prod
from typing import Any

# --- the record of one rank

LAST = 8
"""How many of the newest calls of a group are kept."""
FIRST_OPEN = 4
"""How many of the oldest open calls (entered and not over) are kept besides."""

Span = tuple[int, int, int]

_MOST_RANKS = 1_000_000
_SHOWN_SIZES = 3
_DTYPES = {
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Bool": "bool",
    "Byte": "uint8",
    "Char": "int8",
    "Short": "int16",
    "Int": "int32",
    "Long": "int64",
}
_TRANSFER = re.compile(r"\w+:(?P<verb>send|recv) \d+(?:->|<-)(?P<other>\d+)")
_UNNAMED = frozenset(("", "undefined", "default_pg"))


@dataclass(frozen=True)
class Call:
    """A collective as one rank entered it: its number in the order of the group, its kind ("all_reduce"), this rank's
    input (elements of all tensors, their sizes and dtypes as text), and whether it is over for this rank."""

    number: int
    kind: str
    elements: int
    sizes: str
    dtype: str
    ended: bool


@dataclass(frozen=True)
class RecordedGroup:
    """A process group: its backend, torch's name for it (the same on all its ranks), its description (may be empty),
    and its ranks by global number, in the order of the group.

    The ranks are kept as spans (first, distance, count), so that a record of one rank among thousands stays small.
    """

    backend: str
    name: str
    words: str
    spans: tuple[Span, ...]

    def __post_init__(self) -> None:
        if not all(0 <= count <= _MOST_RANKS for _, _, count in self.spans):
            raise ValueError(f"a group with more than {_MOST_RANKS} ranks")

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The ranks; empty where unknown."""
        return tuple(first + distance * place for first, distance, count in self.spans for place in range(count))


def make_group(backend: str, name: str, words: str, ranks: Sequence[int]) -> RecordedGroup:
    """A group of these ranks."""
    spans: list[Span] = []
    begin = 0
    while begin < len(ranks):
        distance = ranks[begin + 1] - ranks[begin] if begin + 1 < len(ranks) else 1
        end = begin + 1
        while end < len(ranks) and ranks[end] - ranks[end - 1] == distance:
            end += 1
        spans.append((ranks[begin], distance, end - begin))
        begin = end
    return RecordedGroup(backend, name, words, tuple(spans))


@dataclass(frozen=True)
class CallTimeline:
    """The last calls of one rank in one group, oldest first."""

    group: RecordedGroup
    calls: tuple[Call, ...]


@dataclass(frozen=True)
class Record:
    """The last calls of a rank in all its groups.

    `whole`: nothing was left out since the rank started, so that it never used a group without a timeline.
    `transfer`: the oldest unfinished point-to-point transfer that it began after its last collective.
    """

    rank: int
    lines: tuple[CallTimeline, ...] = ()
    whole: bool = True
    transfer: str = ""


def build_record(
    rank: int, dumps: Sequence[Mapping[str, Any]], members: Mapping[str, tuple[int, ...]], *, recording: bool
) -> Record:
    """The record of a rank from the dumps of torch's recorders (one for NCCL, one for the rest) and the ranks of each
    group by torch's name for it. `recording`: the recorders were on from the start."""
    entries = [list(dump.get("entries", ())) for dump in dumps]
    whole = recording and all(not each or int(each[0]["record_id"]) == 0 for each in entries)
    transfer = next(filter(None, (_find_transfer(each, members) for each in entries)), "")
    calls = [entry for each in entries for entry in each if not _is_transfer(entry)]
    calls.sort(key=_group_key)
    lines = []
    for (backend, name), group in groupby(calls, key=_group_key):
        entries_of = list(group)
        words = str(entries_of[0]["process_group"][1])
        words = "" if words in _UNNAMED else words.removeprefix("mesh_")
        described = make_group(backend, name, words, members.get(name, ()))
        lines.append(CallTimeline(described, trim_calls(map(_read_entry, entries_of))))
    return Record(rank, tuple(lines), whole, transfer)


def trim_calls(calls: Iterable[Call]) -> tuple[Call, ...]:
    """The calls of one group to keep, in order: the newest ones, and the oldest of those still open.

    Numbers that restart belong to a group that was made again under the same name; of several calls with one number
    (sent together) the first is kept.
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
    """Calls after the last finished one."""
    done = next((index for index in range(len(calls), 0, -1) if calls[index - 1].ended), 0)
    return calls[done:]


def read_record(facts: Mapping[str, Any]) -> Record:
    """A record from the result of `dataclasses.asdict`, also after JSON. Raises ValueError for anything else."""
    from pydantic import TypeAdapter  # by an agent; a rank that only writes its record starts without it

    return TypeAdapter(Record).validate_python(facts)


# --- parsing torch's dumps


def _group_key(entry: Mapping[str, Any]) -> tuple[str, str]:
    backend, found, _ = str(entry["profiling_name"]).partition(":")
    return backend if found else "", str(entry["process_group"][0])


def _read_entry(entry: Mapping[str, Any]) -> Call:
    shapes = [tuple(map(int, shape)) for shape in entry["input_sizes"]]
    shown = ", ".join("x".join(map(str, shape)) or "1" for shape in shapes[:_SHOWN_SIZES])
    kinds = sorted({_DTYPES.get(str(each), str(each)) for each in entry["input_dtypes"]})
    return Call(
        number=int(entry["collective_seq_id"]),
        kind=str(entry["profiling_name"]).rpartition(":")[2],
        elements=sum(map(prod, shapes)),
        sizes=f"{shown} and {len(shapes) - _SHOWN_SIZES} more" if len(shapes) > _SHOWN_SIZES else shown,
        dtype=" and ".join(kinds),
        ended=bool(entry["retired"]),
    )


def _is_transfer(entry: Mapping[str, Any]) -> bool:
    return bool(entry["is_p2p"]) or _TRANSFER.fullmatch(str(entry["profiling_name"])) is not None


def _find_transfer(entries: Sequence[Mapping[str, Any]], members: Mapping[str, tuple[int, ...]]) -> str:
    """The oldest open transfer after the last collective, as "recv from rank 0"."""
    last = next((index for index in range(len(entries), 0, -1) if not _is_transfer(entries[index - 1])), 0)
    for entry in entries[last:]:
        found = _TRANSFER.fullmatch(str(entry["profiling_name"]))
        ranks = members.get(_group_key(entry)[1], ())
        if found is not None and not entry["retired"] and int(found["other"]) < len(ranks):
            return f"{found['verb']} {'to' if found['verb'] == 'send' else 'from'} rank {ranks[int(found['other'])]}"
    return ""


# --- comparing the records of all ranks

SHOWN = 3
"""Maximum number of sentences."""

_ALIKE = frozenset(
    (
        *("all_reduce", "allreduce_coalesced", "broadcast", "reduce"),
        *("_all_gather_base", "all_gather_single", "_reduce_scatter_base", "reduce_scatter_single"),
    )
)
"""Kinds for which all ranks pass the same number of elements, of one dtype."""

CIRCLE = "each of these waits for another: they call collectives in different orders, or one is held up elsewhere"
SILENT = "did not answer (stopped, or Python's lock is held)"


@dataclass(frozen=True)
class CollectiveRecords:
    """The records of ranks, and the ranks that were asked and did not answer."""

    records: tuple[Record, ...] = ()
    silent: tuple[int, ...] = ()

    def shift(self, first: int) -> CollectiveRecords:
        """The same with global rank numbers, `first` being that of this node's first rank."""
        records = tuple(replace(record, rank=record.rank + first) for record in self.records)
        return CollectiveRecords(records, tuple(rank + first for rank in self.silent))


NO_RECORDS = CollectiveRecords()


def merge_records(parts: Iterable[CollectiveRecords]) -> CollectiveRecords:
    """The records of the ranks of several nodes."""
    known = list(parts)
    records = sorted((record for part in known for record in part.records), key=lambda record: record.rank)
    return CollectiveRecords(tuple(records), tuple(sorted(rank for part in known for rank in part.silent)))


def explain_collectives(collectives: CollectiveRecords) -> tuple[str, ...]:
    """What the records show, a sentence each without a full stop, most important first; at most SHOWN."""
    known = {record.rank: record for record in collectives.records}
    named = {line.group for record in collectives.records for line in record.lines if len(line.group.ranks) > 1}
    # The order is the same on every node.
    groups = sorted(named, key=lambda group: (group.ranks, group.backend, group.name))
    views = [_GroupView(group, known, frozenset(collectives.silent)) for group in groups]
    found = [(view, _find_mismatch(view)) for view in views]
    sentences = [_explain_mismatch(view.group, calls) for view, calls in found if calls]
    waits = _choose_waits([wait for view, calls in found if not calls and (wait := _find_wait(view))])
    awaited = {rank for wait in waits for rank in wait.awaited}
    is_circle = bool(awaited) and awaited <= {rank for wait in waits for rank in wait.inside}
    waits = waits[: SHOWN - len(sentences)]
    sentences += [_explain_wait(wait, known) for wait in waits]
    if is_circle:
        sentences = [*sentences[: SHOWN - 1], CIRCLE]
    if not set(collectives.silent) <= {rank for wait in waits for rank in wait.silent}:
        sentences = [*sentences[: SHOWN - 1], f"{render_ranks(collectives.silent)} {SILENT}"]
    return tuple(sentences[:SHOWN])


def render_ranks(ranks: Sequence[int]) -> str:
    """Ranks as text: "rank 3", "ranks 0 and 2", "ranks 0 to 7, 9 and 12"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    spans = [[f"{run[0]} to {run[-1]}"] if len(run) > 2 else list(map(str, run)) for run in runs]
    words = [word for span in spans for word in span]
    listed = f"{', '.join(words[:-1])} and {words[-1]}" if len(words) > 1 else "".join(words)
    return f"rank {listed}" if len(ranks) == 1 else f"ranks {listed}"


# --- one group


@dataclass(frozen=True)
class _GroupView:
    """One group, with all records."""

    group: RecordedGroup
    records: Mapping[int, Record]
    all_silent: frozenset[int]

    def calls(self, rank: int) -> Sequence[Call]:
        """The known calls of a rank, oldest first."""
        lines = self.records[rank].lines if rank in self.records else ()
        group, key = self.group, (self.group.backend, self.group.name)
        for line in lines:
            # A rank that has left the group no longer has its list of ranks.
            if (line.group.backend, line.group.name) == key and line.group.spans in ((), group.spans):
                return line.calls
        return ()

    def last(self, rank: int) -> int | None:
        """The number of the last collective that a rank has entered, 0 for none; None where unknown."""
        calls = self.calls(rank)
        if calls:
            return calls[-1].number
        return 0 if rank in self.records and self.records[rank].whole else None

    def call(self, rank: int, number: int) -> Call | None:
        """The call of this number; None where unknown."""
        return next((call for call in self.calls(rank) if call.number == number), None)


@dataclass(frozen=True)
class _Wait:
    """A collective that some ranks of a group have entered and that is not over."""

    view: _GroupView
    call: Call
    inside: tuple[int, ...]
    missing: tuple[int, ...]
    silent: tuple[int, ...]
    unknown: tuple[int, ...]

    @property
    def awaited(self) -> frozenset[int]:
        return frozenset((*self.missing, *self.silent))


def _find_wait(view: _GroupView) -> _Wait | None:
    open_ones = {rank: calls[0] for rank in view.group.ranks if (calls := find_open(view.calls(rank)))}
    if not open_ones:
        return None
    call = min(open_ones.values(), key=lambda each: each.number)
    last = {rank: view.last(rank) for rank in view.group.ranks}
    return _Wait(
        view,
        call,
        inside=tuple(rank for rank, each in open_ones.items() if each.number == call.number),
        missing=tuple(rank for rank, number in last.items() if number is not None and number < call.number),
        silent=tuple(rank for rank in view.group.ranks if rank in view.all_silent),
        unknown=tuple(rank for rank, number in last.items() if number is None and rank not in view.all_silent),
    )


def _find_mismatch(view: _GroupView) -> dict[int, Call]:
    """The first number under which ranks have entered collectives that do not match, by rank; empty for none."""
    numbers = sorted({call.number for rank in view.group.ranks for call in view.calls(rank)})
    for number in numbers:
        calls = {rank: call for rank in view.group.ranks if (call := view.call(rank, number)) is not None}
        if len({_sign(call) for call in calls.values()}) > 1:
            return calls
    return {}


def _sign(call: Call) -> tuple[str, int, str]:
    """What must be the same on all ranks."""
    return (call.kind, call.elements, call.dtype) if call.kind in _ALIKE else (call.kind, 0, "")


# --- sentences


def _explain_mismatch(group: RecordedGroup, calls: Mapping[int, Call]) -> str:
    number = next(iter(calls.values())).number
    places: dict[tuple[str, int, str], list[int]] = {}
    for rank, call in calls.items():
        places.setdefault(_sign(call), []).append(rank)
    order = sorted(places.values(), key=lambda ranks: (len(ranks), ranks))
    places_text = "; ".join(f"{render_ranks(ranks)} in {_render_call(calls[ranks[0]])}" for ranks in order)
    where = f"of {_render_group(group)} at number {number}"
    return f"the ranks do not call the same collectives (a mistake in the code): {where} {places_text}"


def _choose_waits(waits: Sequence[_Wait]) -> list[_Wait]:
    """The waits to report: those for ranks that wait nowhere; else a circle of waits; else those without absentees."""
    waiting = {rank for wait in waits if wait.awaited for rank in wait.inside}
    roots = [wait for wait in waits if wait.awaited - waiting]
    roots = [
        replace(wait, missing=tuple(rank for rank in wait.missing if rank not in waiting))
        for wait in sorted(roots, key=lambda wait: len(wait.awaited & waiting))
    ]
    return roots or [wait for wait in waits if wait.awaited] or list(waits)


def _explain_wait(wait: _Wait, records: Mapping[int, Record]) -> str:
    are, call, group = "is" if len(wait.inside) == 1 else "are", wait.call, _render_group(wait.view.group)
    parts = [f"{render_ranks(wait.inside)} {are} in {_render_call(call)}, number {call.number} of {group}"]
    if wait.missing:
        have = "has" if len(wait.missing) == 1 else "have"
        before = _render_last(wait.view, wait.missing)
        parts.append(f"which {render_ranks(wait.missing)} {have} not entered ({before})")
        parts += [f"rank {rank} is in {records[rank].transfer}" for rank in wait.missing if records[rank].transfer][:1]
    if wait.silent:
        parts.append(f"{render_ranks(wait.silent)} {SILENT}")
    if wait.unknown and not wait.awaited:
        parts.append(f"what {render_ranks(wait.unknown)} entered there is not known any more")
    if not (wait.awaited or wait.unknown):
        parts.append("which all have entered and which is not over: look at the network and the devices")
    return ", ".join(parts)


def _render_last(view: _GroupView, ranks: Sequence[int]) -> str:
    """The last collective of these ranks in the group."""
    by_number: dict[int, list[int]] = {}
    for rank in sorted(ranks):
        by_number.setdefault(view.calls(rank)[-1].number if view.calls(rank) else 0, []).append(rank)
    parts = []
    for number, same in sorted(by_number.items()):
        calls = view.calls(same[0])
        what = f"the last one there was {_render_call(calls[-1])}, number {number}" if calls else "none there yet"
        parts.append(what if len(same) == len(ranks) else f"{render_ranks(same)}: {what}")
    return "; ".join(parts[:2])


def _render_call(call: Call) -> str:
    """As "all_reduce of 4x3 float32"."""
    what = f"{call.sizes} {call.dtype}".strip()
    return f"{call.kind} of {what}" if what else call.kind


def _render_group(group: RecordedGroup) -> str:
    ranks = render_ranks(group.ranks)
    carried = f" ({group.backend})" if group.backend else ""
    return f"group {group.words} of {ranks}{carried}" if group.words else f"{ranks}{carried}"
