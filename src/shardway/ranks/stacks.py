"""Questions of an agent to its ranks: where their threads are, and their last collectives.

Stacks: the interpreter's fault handler writes them from the signal handler, so that a rank also answers while it waits
in a library or one of its threads holds the GIL; a stopped process cannot.

Records: a thread of the rank waits at a named pipe. A rank that waits in a collective has released the GIL, so that
the thread can answer; a rank that holds the GIL, or is stopped, does not answer.

Invariant: a question never ends or blocks a rank. Only a rank whose file or pipe exists is asked, and errors in the
answering thread stay there.
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
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardway.ranks.flight_records import CollectiveRecords, Record, build_record, read_record

SIGNAL = signal.SIGURG
"""A signal that by default ends no process, and that is not used as a stop request."""
STACKS_WAIT_S = 1.0
_PAUSE_S = 0.02
_OUTERMOST = re.compile(r'\n(  File "[^"]*", line \d+ in (<module>|_run_module_as_main)|  \.\.\.)\n\Z')
"""The end of complete stacks: the outermost frame, that of a script or of `python -m`, of the main thread, which comes
last. The handler writes piece by piece, and may be preempted in between on a busy machine."""
_FRAME = re.compile(r'  File "(?P<file>[^"]*)", line (?P<line>\d+) in (?P<name>.*)')
_CRASH = "Fatal Python error: "
_SHOWN = 12


@dataclass(frozen=True)
class StackGroup:
    """Ranks whose main threads are at the same place, and that place: the innermost frames, innermost first."""

    ranks: tuple[int, ...]
    frames: tuple[str, ...]


def answer_with_stacks(folder: Path, local_rank: int) -> None:
    """From now on this process writes its stacks on SIGNAL. Called once, from the main thread."""
    with contextlib.suppress(OSError):
        # Kept open for the life of the process: the handler writes to its descriptor.
        descriptor = os.open(_path(folder, local_rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        faulthandler.register(SIGNAL, file=descriptor, all_threads=True, chain=False)


def ask_for_stacks(folder: Path, pids: Mapping[int, int]) -> dict[int, str]:
    """The fault handler's output of these ranks (local rank -> process id), of those that answer within WAIT_S."""
    asked = [rank for rank in pids if _path(folder, rank).exists()]
    for rank in asked:
        with contextlib.suppress(OSError):
            os.kill(pids[rank], SIGNAL)
    until, before = time.monotonic() + STACKS_WAIT_S, None
    while True:
        found = {rank: _path(folder, rank).read_text(errors="replace") for rank in asked}
        if time.monotonic() >= until or (found == before and all(map(_OUTERMOST.search, found.values()))):
            return {rank: text for rank, text in found.items() if text}
        before = found
        time.sleep(_PAUSE_S)


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
    _, found, crash = printed.rpartition(_CRASH)
    threads = [part for part in crash.split("\n\n") if "(most recent call first)" in part] if found else []
    crashed = [part for part in threads if part.startswith("Current thread")]
    return _frames((crashed or threads)[-1]) if threads else ()


def _frames(thread: str) -> tuple[str, ...]:
    """The innermost frames in the handler's text of one thread."""
    found = [match for line in thread.splitlines() if (match := _FRAME.fullmatch(line)) is not None]
    return tuple(f"{each['name']} ({each['file']}:{each['line']})" for each in found[:_SHOWN])


def _path(folder: Path, local_rank: int) -> Path:
    return folder / f"stacks-{local_rank}"


# --- the last collectives, through a pipe

RECORD_WAIT_S = 2.0
"""How long a rank may take to answer; on a busy machine it may have to wait for a core."""
SIZE = 2000
"""How many calls a rank remembers: torch's own default. A comparison needs some of each group."""
VARIABLES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
"""Torch's names of that number, the present and the previous one; 0 turns its recorder off."""

_DUMPS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")


def choose_recording(environ: Mapping[str, str]) -> dict[str, str]:
    """The variable that turns on torch's recorder in a rank; none if it is already set."""
    return {} if any(name in environ for name in VARIABLES) else {VARIABLES[0]: str(SIZE)}


def answer_with_record(folder: Path, local_rank: int) -> None:
    """From now on a thread of this process writes its record when asked. Called once."""
    pipe = _pipe_path(folder, local_rank)
    with contextlib.suppress(OSError):
        with contextlib.suppress(FileExistsError):
            os.mkfifo(pipe, 0o600)
        # Open for writing as well, so that reading waits for a question.
        descriptor = os.open(pipe, os.O_RDWR | os.O_CLOEXEC)
        threading.Thread(target=_answer, args=(descriptor, folder, local_rank), name="record", daemon=True).start()


def _answer(descriptor: int, folder: Path, local_rank: int) -> None:
    answer = _answer_path(folder, local_rank)
    while os.read(descriptor, 1):
        try:
            record = _read_own(local_rank)
        except Exception:  # torch's recorder is no stable interface; this rank then answers with an empty record
            record = Record(local_rank, whole=False)
        with contextlib.suppress(OSError):
            new = answer.with_name(f"{answer.name}-new")
            new.write_text(json.dumps(asdict(record), separators=(",", ":")), encoding="utf-8")
            new.replace(answer)


def _read_own(local_rank: int) -> Record:
    """The content of this process's recorders."""
    torch, distributed = sys.modules.get("torch"), sys.modules.get("torch.distributed.distributed_c10d")
    world = getattr(distributed, "_world", None)
    if torch is None or world is None or not world.pg_map:
        return Record(local_rank)
    library = vars(torch)["_C"]._distributed_c10d
    dumps: list[dict[str, Any]] = [json.loads(getattr(library, name)()) for name in _DUMPS if hasattr(library, name)]
    places = {str(world.pg_names[group]): dict(world.pg_group_ranks[group]) for group in list(world.pg_map)}
    members = {name: tuple(sorted(found, key=found.__getitem__)) for name, found in places.items()}
    size = next((os.environ[name] for name in VARIABLES if name in os.environ), "")
    return build_record(local_rank, dumps, members, recording=size.isdecimal() and int(size) > 0)


def ask_for_records(folder: Path, ranks: Iterable[int]) -> CollectiveRecords:
    """The records of these local ranks that answer within WAIT_S, and the ranks that do not."""
    asked = [rank for rank in ranks if _ask(folder, rank)]
    until = time.monotonic() + RECORD_WAIT_S
    while time.monotonic() < until and not all(_answer_path(folder, rank).exists() for rank in asked):
        time.sleep(_PAUSE_S)
    records: dict[int, Record] = {}
    for rank in asked:
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
            records[rank] = read_record(json.loads(_answer_path(folder, rank).read_text(encoding="utf-8")))
    return CollectiveRecords(tuple(records.values()), tuple(rank for rank in asked if rank not in records))


def _ask(folder: Path, local_rank: int) -> bool:
    """Ask a rank; returns whether its pipe exists and is open."""
    try:
        descriptor = os.open(_pipe_path(folder, local_rank), os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    with contextlib.suppress(OSError):
        _answer_path(folder, local_rank).unlink(missing_ok=True)
        os.write(descriptor, b"?")
    os.close(descriptor)
    return True


def _pipe_path(folder: Path, local_rank: int) -> Path:
    return folder / f"asked-{local_rank}"


def _answer_path(folder: Path, local_rank: int) -> Path:
    return folder / f"record-{local_rank}"
