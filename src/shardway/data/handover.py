"""How batches come from loader processes to their rank: in shared memory where there is room for them, else as bytes
through the pipe.

torch puts each tensor of an answer into a file of /dev/shm and hands its descriptor over by a socket below TMPDIR. In a
container /dev/shm may be small or missing, a path below TMPDIR may be longer than a socket's (unix(7): 108 bytes), and
either failure ends in a thread of the loader process that tells nobody: the rank waits for ever.

Invariant: an answer arrives, whatever the room. This module must not know what an answer is made of but its tensors.
"""

from __future__ import annotations

import functools
import multiprocessing.process
import os
import pickle
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import util
from typing import Any

import torch
from torch.utils.data._utils.collate import default_collate_fn_map

from shardway.data.batch_tree import list_leaves
from shardway.errors import ShardwayError
from shardway.units import render_bytes

SHARED = "/dev/shm"
SPARE = 4
"""How often an answer has to fit: other loader processes put theirs there at the same moment."""
PLENTY = 256 * 2**20
_LONGEST_SOCKET = 107
_BELOW_TMPDIR = len("/pymp-12345678/listener-12345678")
_SHORT = ("/tmp", "/var/tmp", "/dev/shm")


@dataclass(frozen=True)
class Sent:
    """An answer as bytes."""

    data: bytes


def find_room() -> int:
    """Bytes that are free in shared memory; 0 where nothing can be written there."""
    try:
        found = os.statvfs(SHARED)
    except OSError:
        return 0
    return found.f_bavail * found.f_frsize if os.access(SHARED, os.W_OK) else 0


def describe_shortage() -> str:
    """Why answers will mostly come through pipes, and what to do; "" where they need not."""
    room = find_room()
    if room >= PLENTY // 4:
        return ""
    return (
        f"{SHARED} has {render_bytes(room)} free, so loader processes send their batches through pipes, which takes "
        "longer. To do: give the container more of it (--shm-size=16g, --ipc=host), or set data.workers = 0."
    )


def hand_over(answer: Any) -> Any:
    """What a loader process sends: the answer, or its bytes where shared memory has too little room. Runs in there."""
    needed = sum(leaf.nbytes for leaf in list_leaves(answer) if isinstance(leaf, torch.Tensor))
    if find_room() >= SPARE * needed + 2**16:
        return answer
    return Sent(pickle.dumps(answer, protocol=5))


def take_over(answers: Iterator[Any]) -> Iterator[Any]:
    """The answers as they were before they were handed over; an error of ours among them is raised."""
    for sent in answers:
        answer = pickle.loads(sent.data) if isinstance(sent, Sent) else sent
        if isinstance(answer, ShardwayError):
            raise answer
        yield answer


def begin_handing_over() -> None:
    """In a loader process: torch's own function would join samples in shared memory, and end the process where there is
    no room (SIGBUS)."""
    if find_room() < PLENTY:
        default_collate_fn_map[torch.Tensor] = _stack


def _stack(batch: list[torch.Tensor], *, collate_fn_map: Any = None) -> torch.Tensor:
    return torch.stack(batch, 0)


@functools.cache
def shorten_sockets() -> None:
    """Let loader processes that this process starts have their sockets in a folder with a short path, where that below
    TMPDIR is too long for a socket."""
    if len(os.fsencode(tempfile.gettempdir())) + _BELOW_TMPDIR <= _LONGEST_SOCKET:
        return
    for place in _SHORT:
        if os.path.isdir(place) and os.access(place, os.W_OK):
            folder = tempfile.mkdtemp(prefix="pymp-", dir=place)
            multiprocessing.process.current_process()._config["tempdir"] = folder  # type: ignore[attr-defined]
            util.Finalize(None, shutil.rmtree, args=(folder, True), exitpriority=-100)
            return
