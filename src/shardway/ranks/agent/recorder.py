"""How an agent asks its ranks for their last collectives, and how a rank answers: torch's flight recorder, by a pipe.

A thread of the rank waits at a named pipe. A rank that waits in a collective has let go of Python's lock, so that the
thread can answer; one that holds the lock, or is stopped, does not answer.

Invariant: asking never ends a rank nor holds one up: no signal is sent, and what goes wrong in the thread stays there.
Only a rank that has promised an answer (its pipe is there) is asked. This module must not import torch: a rank that has
not imported it yet has no groups.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shardway.ranks.agent.collectives import Heard
from shardway.ranks.agent.record import Record, build_record, read_record

WAIT_S = 2.0
"""How long a rank may take to answer; on a busy machine it has to be given a turn first."""
SIZE = 2000
"""How many calls a rank remembers, torch's own default; some of them are needed for each group."""
VARIABLES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
"""Torch's names of that number, the present one and the one before; 0 turns its recorder off."""

_PAUSE_S = 0.02
_DUMPS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")


def choose_recording(environ: Mapping[str, str]) -> dict[str, str]:
    """The variable that a rank is started with, so that torch records; none where somebody has set it."""
    return {} if any(name in environ for name in VARIABLES) else {VARIABLES[0]: str(SIZE)}


# --- the rank


def answer_with_record(folder: Path, local_rank: int) -> None:
    """From now on a thread of this process writes its record when it is asked. Called once."""
    pipe = _pipe_path(folder, local_rank)
    with contextlib.suppress(OSError):
        with contextlib.suppress(FileExistsError):
            os.mkfifo(pipe, 0o600)
        # Open for writing as well, so that reading waits while nobody asks.
        descriptor = os.open(pipe, os.O_RDWR | os.O_CLOEXEC)
        threading.Thread(target=_answer, args=(descriptor, folder, local_rank), name="record", daemon=True).start()


def _answer(descriptor: int, folder: Path, local_rank: int) -> None:
    answer = _answer_path(folder, local_rank)
    while os.read(descriptor, 1):
        try:
            record = _read_own(local_rank)
        except Exception:  # torch's recorder is no stable interface; this rank answers, and knows nothing
            record = Record(local_rank, whole=False)
        with contextlib.suppress(OSError):
            new = answer.with_name(f"{answer.name}-new")
            new.write_text(json.dumps(asdict(record), separators=(",", ":")), encoding="utf-8")
            new.replace(answer)


def _read_own(local_rank: int) -> Record:
    """What the recorders of this process hold."""
    torch, distributed = sys.modules.get("torch"), sys.modules.get("torch.distributed.distributed_c10d")
    world = getattr(distributed, "_world", None)
    if torch is None or world is None or not world.pg_map:
        return Record(local_rank)
    library = vars(torch)["_C"]._distributed_c10d
    dumps: list[dict[str, Any]] = [json.loads(getattr(library, name)()) for name in _DUMPS if hasattr(library, name)]
    places = {str(world.pg_names[group]): dict(world.pg_group_ranks[group]) for group in list(world.pg_map)}
    members = {name: tuple(sorted(found, key=found.__getitem__)) for name, found in places.items()}
    return build_record(local_rank, dumps, members, recording=_is_recording(os.environ))


def _is_recording(environ: Mapping[str, str]) -> bool:
    size = next((environ[name] for name in VARIABLES if name in environ), "")
    return size.isdecimal() and int(size) > 0


# --- the agent


def ask_for_records(folder: Path, ranks: Iterable[int]) -> Heard:
    """The records of these local ranks, of those that answer within WAIT_S, and those that do not."""
    asked = [rank for rank in ranks if _ask(folder, rank)]
    until = time.monotonic() + WAIT_S
    while time.monotonic() < until and not all(_answer_path(folder, rank).exists() for rank in asked):
        time.sleep(_PAUSE_S)
    found = {rank: _read_answer(folder, rank) for rank in asked}
    records = tuple(record for record in found.values() if record is not None)
    return Heard(records, tuple(rank for rank, record in found.items() if record is None))


def _ask(folder: Path, local_rank: int) -> bool:
    """Ask a rank that has promised an answer; whether it has."""
    try:
        descriptor = os.open(_pipe_path(folder, local_rank), os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    with contextlib.suppress(OSError):
        _answer_path(folder, local_rank).unlink(missing_ok=True)
        os.write(descriptor, b"?")
    os.close(descriptor)
    return True


def _read_answer(folder: Path, local_rank: int) -> Record | None:
    try:
        return read_record(json.loads(_answer_path(folder, local_rank).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def _pipe_path(folder: Path, local_rank: int) -> Path:
    return folder / f"asked-{local_rank}"


def _answer_path(folder: Path, local_rank: int) -> Path:
    return folder / f"record-{local_rank}"
