"""What ranks answer when their agent asks, where their threads are and their last collectives, and what that shows.

Stacks: the interpreter's fault handler writes them from the signal handler, so that a rank also answers while it waits
in a library or one of its threads holds the GIL; a stopped process cannot.

Records: a thread of the rank waits at a named pipe. A rank that waits in a collective has released the GIL, so that
the thread can answer; a rank that holds the GIL, or is stopped, does not answer. Torch's flight recorder notes each
collective as it is entered, with a number that counts those of its group. On gloo the reported state never changes
(torch 2.13); whether the collective counts as done ("retired") does. Gloo notes no point-to-point transfers; NCCL does,
and counts them apart.

Within one group collectives are numbered by their order, the same on all its ranks. A rank that others wait for may
itself wait in another group, so only ranks that wait in no group are named; if every rank waits for another, that is
reported. Point-to-point transfers are counted by pairs of ranks and not recorded by all libraries, so they are no
evidence against a rank.

Invariants:
- A question never ends or blocks a rank. Only a rank whose file or pipe exists is asked, and errors in the answering
  thread stay there.
- Of each group a bounded number of calls is kept, as a comparison of ranks needs. A string that is not a record raises
  ValueError, TypeError or KeyError. A rank is reported as missing from a collective only if its own record shows it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import groupby
from math import prod
from pathlib import Path
from typing import Any

# --- stacks, by a signal

SIGNAL = signal.SIGURG  # a signal that by default ends no process, and that is not used as a stop request
STACKS_WAIT_S = 1.0
_OUTERMOST = re.compile(r'\n(  File "[^"]*", line \d+ in (<module>|_run_module_as_main)|  \.\.\.)\n\Z')
"""The end of complete stacks: the outermost frame, that of a script or of `python -m`, of the main thread, which comes
last. The handler writes piece by piece, and may be preempted in between on a busy machine."""
_FRAME = re.compile(r'  File "(?P<file>[^"]*)", line (?P<line>\d+) in (?P<name>.*)')


@dataclass(frozen=True)
class StackGroup:
    """Ranks whose main threads are at the same place, and that place: the innermost frames, innermost first."""

    ranks: tuple[int, ...]
    frames: tuple[str, ...]


def answer_with_stacks(folder: Path, local_rank: int) -> None:
    """From now on this process writes its stacks on SIGNAL. Called once, from the main thread."""
    with contextlib.suppress(OSError):
        # Kept open for the life of the process: the handler writes to its descriptor.
        descriptor = os.open(folder / f"stacks-{local_rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        faulthandler.register(SIGNAL, file=descriptor, all_threads=True, chain=False)


def ask_for_stacks(folder: Path, pids: Mapping[int, int]) -> dict[int, str]:
    """The fault handler's output of these ranks (local rank -> process id), of those that answer within
    STACKS_WAIT_S."""
    paths = {rank: path for rank in pids if (path := folder / f"stacks-{rank}").exists()}
    for rank in paths:
        with contextlib.suppress(OSError):
            os.kill(pids[rank], SIGNAL)
    until, before = time.monotonic() + STACKS_WAIT_S, None
    while True:
        found = {rank: path.read_text(errors="replace") for rank, path in paths.items()}
        if time.monotonic() >= until or (found == before and all(map(_OUTERMOST.search, found.values()))):
            return {rank: text for rank, text in found.items() if text}
        before = found
        time.sleep(0.02)


def group_stacks(stacks: Mapping[int, str]) -> list[StackGroup]:
    """Ranks by the place of their main thread, smallest groups first: a lone rank is most likely at fault."""
    last = {rank: _frames(text.split("\n\n")[-1]) for rank, text in stacks.items()}  # the main thread is written last
    return merge_groups(StackGroup((rank,), frames) for rank, frames in last.items())


def merge_groups(groups: Iterable[StackGroup]) -> list[StackGroup]:
    """Groups of several nodes, or of single ranks, joined by place; smallest first."""
    places: dict[tuple[str, ...], list[int]] = {}
    for group in groups:
        places.setdefault(group.frames, []).extend(group.ranks)
    found = [StackGroup(tuple(sorted(ranks)), frames) for frames, ranks in places.items()]
    return sorted(found, key=lambda group: (len(group.ranks), group.ranks))


def read_crash(printed: str) -> tuple[str, ...]:
    """Python's stack at a native crash, from the fault handler's last output: the frames of the crashed thread, or of
    the main thread if the crashed one never ran Python. Empty where there is none."""
    _, found, crash = printed.rpartition("Fatal Python error: ")
    threads = [part for part in crash.split("\n\n") if "(most recent call first)" in part] if found else []
    crashed = [part for part in threads if part.startswith("Current thread")]
    return _frames((crashed or threads)[-1]) if threads else ()


def _frames(thread: str) -> tuple[str, ...]:
    """The innermost frames in the handler's text of one thread, at most 12."""
    found = [match for line in thread.splitlines() if (match := _FRAME.fullmatch(line)) is not None]
    return tuple(f"{each['name']} ({each['file']}:{each['line']})" for each in found[:12])


# --- the record of one rank

LAST = 8  # how many of the newest calls of a group are kept
FIRST_OPEN = 4  # how many of the oldest open calls (entered and not over) are kept besides
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
    and its ranks by global number, in the order of the group. The ranks are kept as spans (first, distance, count), so
    that a record of one rank among thousands stays small."""

    backend: str
    name: str
    words: str
    spans: tuple[Span, ...]

    def __post_init__(self) -> None:
        if not all(0 <= count <= _MOST_RANKS for _, _, count in self.spans):
            raise ValueError(f"a group with more than {_MOST_RANKS} ranks")

    @cached_property
    def ranks(self) -> tuple[int, ...]:
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
    """The last calls of a rank in all its groups. `whole`: nothing was left out since the rank started, so that it
    never used a group without a timeline. `transfer`: the oldest unfinished point-to-point transfer that it began after
    its last collective."""

    rank: int
    lines: tuple[CallTimeline, ...] = ()
    whole: bool = True
    transfer: str = ""


def read_record(facts: Mapping[str, Any]) -> Record:
    """A record from the result of `dataclasses.asdict`, also after JSON. Raises ValueError for anything else."""
    from pydantic import TypeAdapter  # by an agent; a rank that only writes its record starts without it

    return TypeAdapter(Record).validate_python(facts)


# --- parsing torch's dumps


def build_record(
    rank: int, dumps: Sequence[Mapping[str, Any]], members: Mapping[str, tuple[int, ...]], *, recording: bool
) -> Record:
    """The record of a rank from the dumps of torch's recorders (one for NCCL, one for the rest) and the ranks of each
    group by torch's name for it. `recording`: the recorders were on from the start."""
    entries = [list(dump.get("entries", ())) for dump in dumps]
    whole = recording and all(not each or int(each[0]["record_id"]) == 0 for each in entries)
    transfer, calls = "", []
    for each in entries:
        after: list[Mapping[str, Any]] = []  # transfers after the last collective
        for entry in each:
            if entry["is_p2p"] or _TRANSFER.fullmatch(str(entry["profiling_name"])):
                after.append(entry)
            else:
                calls.append(entry)
                after = []
        for entry in after:  # oldest first, as "recv from rank 0"
            found = _TRANSFER.fullmatch(str(entry["profiling_name"]))
            ranks = members.get(_group_key(entry)[1], ())
            if not transfer and found and not entry["retired"] and int(found["other"]) < len(ranks):
                towards = "to" if found["verb"] == "send" else "from"
                transfer = f"{found['verb']} {towards} rank {ranks[int(found['other'])]}"
    lines = []
    for (backend, name), group in groupby(sorted(calls, key=_group_key), key=_group_key):
        of_group = list(group)
        words = str(of_group[0]["process_group"][1])
        words = "" if words in ("", "undefined", "default_pg") else words.removeprefix("mesh_")
        described = make_group(backend, name, words, members.get(name, ()))
        lines.append(CallTimeline(described, trim_calls(map(_read_entry, of_group))))
    return Record(rank, tuple(lines), whole, transfer)


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


def trim_calls(calls: Iterable[Call]) -> tuple[Call, ...]:
    """The calls of one group to keep, in order: the newest ones, and the oldest of those still open. Numbers that
    restart belong to a group that was made again under the same name; of several calls with one number (sent together)
    the first is kept."""
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


# --- the last collectives, through a pipe

RECORD_WAIT_S = 2.0  # how long a rank may take to answer; on a busy machine it may have to wait for a core
SIZE = 2000  # how many calls a rank remembers: torch's own default. A comparison needs some of each group.
VARIABLES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
"""Torch's names of that number, the present and the previous one; 0 turns its recorder off."""


def choose_recording(environ: Mapping[str, str]) -> dict[str, str]:
    """The variable that turns on torch's recorder in a rank; none if it is already set."""
    return {} if any(name in environ for name in VARIABLES) else {VARIABLES[0]: str(SIZE)}


def answer_with_record(folder: Path, local_rank: int) -> None:
    """From now on a thread of this process writes its record when asked. Called once."""
    pipe = folder / f"asked-{local_rank}"
    with contextlib.suppress(OSError):
        with contextlib.suppress(FileExistsError):
            os.mkfifo(pipe, 0o600)
        # Open for writing as well, so that reading waits for a question.
        descriptor = os.open(pipe, os.O_RDWR | os.O_CLOEXEC)
        threading.Thread(target=_answer, args=(descriptor, folder, local_rank), name="record", daemon=True).start()


def _answer(descriptor: int, folder: Path, local_rank: int) -> None:
    answer, new = folder / f"record-{local_rank}", folder / f"record-{local_rank}-new"
    while os.read(descriptor, 1):
        try:
            record = _read_own(local_rank)
        except Exception:  # torch's recorder is no stable interface; this rank then answers with an empty record
            record = Record(local_rank, whole=False)
        with contextlib.suppress(OSError):
            new.write_text(json.dumps(asdict(record), separators=(",", ":")), encoding="utf-8")
            new.replace(answer)


def _read_own(local_rank: int) -> Record:
    torch, distributed = sys.modules.get("torch"), sys.modules.get("torch.distributed.distributed_c10d")
    world = getattr(distributed, "_world", None)
    if torch is None or world is None or not world.pg_map:
        return Record(local_rank)
    library, names = vars(torch)["_C"]._distributed_c10d, ("_dump_fr_trace_json", "_dump_nccl_trace_json")
    dumps: list[dict[str, Any]] = [json.loads(getattr(library, name)()) for name in names if hasattr(library, name)]
    places = {str(world.pg_names[group]): dict(world.pg_group_ranks[group]) for group in list(world.pg_map)}
    members = {name: tuple(sorted(found, key=found.__getitem__)) for name, found in places.items()}
    size = next((os.environ[name] for name in VARIABLES if name in os.environ), "")
    return build_record(local_rank, dumps, members, recording=size.isdecimal() and int(size) > 0)


def ask_for_records(folder: Path, ranks: Iterable[int]) -> HangEvidence:
    """The records of these local ranks that answer within RECORD_WAIT_S, and the ranks that do not; a rank without an
    open pipe is not asked."""
    answers: dict[int, Path] = {}
    for rank in ranks:
        with contextlib.suppress(OSError):
            descriptor = os.open(folder / f"asked-{rank}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            answers[rank] = folder / f"record-{rank}"
            with contextlib.suppress(OSError):
                answers[rank].unlink(missing_ok=True)
                os.write(descriptor, b"?")
            os.close(descriptor)
    until = time.monotonic() + RECORD_WAIT_S
    while time.monotonic() < until and not all(answer.exists() for answer in answers.values()):
        time.sleep(0.02)
    records: dict[int, Record] = {}
    for rank, answer in answers.items():
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
            records[rank] = read_record(json.loads(answer.read_text(encoding="utf-8")))
    return HangEvidence(tuple(records.values()), tuple(rank for rank in answers if rank not in records))


# --- comparing the records of all ranks

SHOWN = 3  # maximum number of sentences
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
class HangEvidence:
    """The last collectives of ranks, the ranks that were asked for them and did not answer, and the stacks of ranks."""

    records: tuple[Record, ...] = ()
    silent: tuple[int, ...] = ()
    groups: tuple[StackGroup, ...] = ()

    def shift(self, first: int) -> HangEvidence:
        """The same with global rank numbers, `first` being that of this node's first rank."""
        records = tuple(replace(record, rank=record.rank + first) for record in self.records)
        groups = tuple(replace(each, ranks=tuple(rank + first for rank in each.ranks)) for each in self.groups)
        return HangEvidence(records, tuple(rank + first for rank in self.silent), groups)


NO_EVIDENCE = HangEvidence()


def merge_evidence(parts: Sequence[HangEvidence]) -> HangEvidence:
    """The evidence of several nodes as one."""
    records = sorted((record for part in parts for record in part.records), key=lambda record: record.rank)
    silent = sorted(rank for part in parts for rank in part.silent)
    return HangEvidence(
        tuple(records), tuple(silent), tuple(merge_groups(each for part in parts for each in part.groups))
    )


def explain_collectives(evidence: HangEvidence) -> tuple[str, ...]:
    """What the records show, a sentence each without a full stop, most important first; at most SHOWN."""
    known = {record.rank: record for record in evidence.records}
    named = {line.group for record in evidence.records for line in record.lines if len(line.group.ranks) > 1}
    sentences, waits, silent = [], [], frozenset(evidence.silent)
    for group in sorted(named, key=lambda group: (group.ranks, group.backend, group.name)):  # the same on every node
        view = _GroupView(group, known)
        if mismatch := _explain_mismatch(view):
            sentences.append(mismatch)
        elif wait := _find_wait(view, silent):
            waits.append(wait)
    # Reported are waits for ranks that wait nowhere; else a circle of waits; else those without absentees.
    waiting = {rank for wait in waits if wait.awaited for rank in wait.inside}
    roots = [wait for wait in waits if wait.awaited - waiting]
    roots = [
        replace(wait, missing=tuple(rank for rank in wait.missing if rank not in waiting))
        for wait in sorted(roots, key=lambda wait: len(wait.awaited & waiting))
    ]
    waits = roots or [wait for wait in waits if wait.awaited] or waits
    awaited = {rank for wait in waits for rank in wait.awaited}
    is_circle = bool(awaited) and awaited <= {rank for wait in waits for rank in wait.inside}
    waits = waits[: SHOWN - len(sentences)]
    sentences += [_explain_wait(wait) for wait in waits]
    if is_circle:
        sentences = [*sentences[: SHOWN - 1], CIRCLE]
    if not silent <= {rank for wait in waits for rank in wait.silent}:
        sentences = [*sentences[: SHOWN - 1], f"{render_ranks(evidence.silent)} {SILENT}"]
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


@dataclass(frozen=True)
class _GroupView:
    group: RecordedGroup
    records: Mapping[int, Record]

    def calls(self, rank: int) -> Sequence[Call]:
        """The known calls of a rank, oldest first."""
        lines = self.records[rank].lines if rank in self.records else ()
        group, key = self.group, (self.group.backend, self.group.name)
        for line in lines:
            # A rank that has left the group no longer has its list of ranks.
            if (line.group.backend, line.group.name) == key and line.group.spans in ((), group.spans):
                return line.calls
        return ()

    def render(self) -> str:
        """Its ranks, and by which name and backend it goes."""
        ranks, backend, words = render_ranks(self.group.ranks), self.group.backend, self.group.words
        carried = f" ({backend})" if backend else ""
        return f"group {words} of {ranks}{carried}" if words else f"{ranks}{carried}"


def _explain_mismatch(view: _GroupView) -> str:
    """The first number under which ranks have entered collectives that do not match; "" for none."""
    by_number: dict[int, dict[int, Call]] = {}
    for rank in view.group.ranks:
        for call in view.calls(rank):
            by_number.setdefault(call.number, {})[rank] = call
    for number, calls in sorted(by_number.items()):
        places: dict[tuple[str, int, str], list[int]] = {}
        for rank, call in calls.items():  # by what must be the same on all ranks
            same = (call.kind, call.elements, call.dtype) if call.kind in _ALIKE else (call.kind, 0, "")
            places.setdefault(same, []).append(rank)
        if len(places) > 1:
            order = sorted(places.values(), key=lambda ranks: (len(ranks), ranks))
            text = "; ".join(f"{render_ranks(ranks)} in {_render_call(calls[ranks[0]])}" for ranks in order)
            where = f"of {view.render()} at number {number}"
            return f"the ranks do not call the same collectives (a mistake in the code): {where} {text}"
    return ""


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


def _find_wait(view: _GroupView, all_silent: frozenset[int]) -> _Wait | None:
    open_ones = {rank: calls[0] for rank in view.group.ranks if (calls := find_open(view.calls(rank)))}
    if not open_ones:
        return None
    call = min(open_ones.values(), key=lambda each: each.number)
    inside = tuple(rank for rank, each in open_ones.items() if each.number == call.number)
    silent = tuple(rank for rank in view.group.ranks if rank in all_silent)
    missing, unknown = [], []
    for rank in view.group.ranks:
        if calls := view.calls(rank):
            missing += [rank] if calls[-1].number < call.number else []
        elif rank in view.records and view.records[rank].whole:  # it has entered none
            missing += [rank] if call.number > 0 else []
        elif rank not in all_silent:
            unknown.append(rank)
    return _Wait(view, call, inside, tuple(missing), silent, tuple(unknown))


def _explain_wait(wait: _Wait) -> str:
    are, call, view = "is" if len(wait.inside) == 1 else "are", wait.call, wait.view
    parts = [f"{render_ranks(wait.inside)} {are} in {_render_call(call)}, number {call.number} of {view.render()}"]
    if wait.missing:
        by_number: dict[int, list[int]] = {}
        for rank in sorted(wait.missing):
            by_number.setdefault(view.calls(rank)[-1].number if view.calls(rank) else 0, []).append(rank)
        before = []
        for number, same in sorted(by_number.items())[:2]:
            calls = view.calls(same[0])
            what = f"the last one there was {_render_call(calls[-1])}, number {number}" if calls else "none there yet"
            before.append(what if len(same) == len(wait.missing) else f"{render_ranks(same)}: {what}")
        have = "has" if len(wait.missing) == 1 else "have"
        parts.append(f"which {render_ranks(wait.missing)} {have} not entered ({'; '.join(before)})")
        transfers = {rank: view.records[rank].transfer for rank in wait.missing}
        parts += [f"rank {rank} is in {transfer}" for rank, transfer in transfers.items() if transfer][:1]
    if wait.silent:
        parts.append(f"{render_ranks(wait.silent)} {SILENT}")
    if wait.unknown and not wait.awaited:
        parts.append(f"what {render_ranks(wait.unknown)} entered there is not known any more")
    if not (wait.awaited or wait.unknown):
        parts.append("which all have entered and which is not over: look at the network and the devices")
    return ", ".join(parts)


def _render_call(call: Call) -> str:
    """As "all_reduce of 4x3 float32"."""
    what = f"{call.sizes} {call.dtype}".strip()
    return f"{call.kind} of {what}" if what else call.kind
