"""Where every thread of a rank is, written when its agent asks, and read by it.

The interpreter's fault handler writes them from the signal itself, so a rank also answers while it waits in a library
or a thread of it holds Python's lock; a process that is stopped cannot.

Invariant: asking never ends a rank, since only one that has promised an answer (its file is there) is asked. This
module must not import torch.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

SIGNAL = signal.SIGURG
"""One that ends nobody who does not listen, and that nobody sends to ask for a stop."""
WAIT_S = 1.0
_PAUSE_S = 0.02
_OUTERMOST = re.compile(r'\n(  File "[^"]*", line \d+ in (<module>|_run_module_as_main)|  \.\.\.)\n\Z')
_FRAME = re.compile(r'  File "(?P<file>[^"]*)", line (?P<line>\d+) in (?P<name>.*)')
_CRASH = "Fatal Python error: "
_SHOWN = 12


@dataclass(frozen=True)
class StackGroup:
    """Ranks whose main threads are at the same place, and that place: the innermost frames, innermost first."""

    ranks: tuple[int, ...]
    frames: tuple[str, ...]


def answer_with_stacks(folder: Path, local_rank: int) -> None:
    """From now on this process writes its stacks when it gets SIGNAL. Called once, from the main thread."""
    with contextlib.suppress(OSError):
        # Kept open for the life of the process: the handler writes to its descriptor.
        descriptor = os.open(_path(folder, local_rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        faulthandler.register(SIGNAL, file=descriptor, all_threads=True, chain=False)


def ask_for_stacks(folder: Path, pids: Mapping[int, int]) -> dict[int, str]:
    """What the fault handler writes of these ranks (local rank -> process id), of those that answer within WAIT_S."""
    asked = [rank for rank in pids if _path(folder, rank).exists()]
    for rank in asked:
        with contextlib.suppress(OSError):
            os.kill(pids[rank], SIGNAL)
    until = time.monotonic() + WAIT_S
    found, before = _read_all(folder, asked), None
    while time.monotonic() < until and not (found == before and all(map(_is_whole, found.values()))):
        time.sleep(_PAUSE_S)
        found, before = _read_all(folder, asked), found
    return {rank: text for rank, text in found.items() if text}


def _read_all(folder: Path, ranks: Iterable[int]) -> dict[int, str]:
    return {rank: _path(folder, rank).read_text(errors="replace") for rank in ranks}


def _is_whole(text: str) -> bool:
    """Whether the main thread, which the handler names last, is there to its outermost frame, that of a script or of
    `python -m`. The handler writes piece by piece, and a busy machine may take its turn away in between."""
    return _OUTERMOST.search(text) is not None


def group_stacks(stacks: Mapping[int, str]) -> list[StackGroup]:
    """Ranks by where their main thread is, the smallest groups first: who is alone is most likely to blame."""
    return merge_groups(StackGroup((rank,), _main_frames(text)) for rank, text in stacks.items())


def merge_groups(groups: Iterable[StackGroup]) -> list[StackGroup]:
    """Groups of several nodes, or of single ranks, as one for each place; the smallest first."""
    places: dict[tuple[str, ...], list[int]] = {}
    for group in groups:
        places.setdefault(group.frames, []).extend(group.ranks)
    found = [StackGroup(tuple(sorted(ranks)), frames) for frames, ranks in places.items()]
    return sorted(found, key=lambda group: (len(group.ranks), group.ranks))


def read_crash(printed: str) -> tuple[str, ...]:
    """Where Python was when a library crashed, of what the fault handler printed last: the frames of the thread that
    crashed, or of the main one where that thread has never run Python. Empty where it printed nothing."""
    _, said, crash = printed.rpartition(_CRASH)
    threads = [part for part in crash.split("\n\n") if "(most recent call first)" in part] if said else []
    crashed = [part for part in threads if part.startswith("Current thread")]
    return _frames((crashed or threads)[-1]) if threads else ()


def _main_frames(text: str) -> tuple[str, ...]:
    """Frames of the thread that the handler names last: the main one."""
    return _frames(text.split("\n\n")[-1])


def _frames(thread: str) -> tuple[str, ...]:
    """The innermost frames of what the handler writes of a thread."""
    found = [match for line in thread.splitlines() if (match := _FRAME.fullmatch(line)) is not None]
    return tuple(f"{each['name']} ({each['file']}:{each['line']})" for each in found[:_SHOWN])


def _path(folder: Path, local_rank: int) -> Path:
    return folder / f"stacks-{local_rank}"
