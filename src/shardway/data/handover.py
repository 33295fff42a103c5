"""How batches come from loader processes to their rank: in shared memory where there is room for them, else as bytes
through the pipe.

torch puts each tensor of an answer into a file of /dev/shm and hands its descriptor over by a socket below TMPDIR. In a
container /dev/shm may be small or missing, a path below TMPDIR may be longer than a socket's (unix(7): 108 bytes) or
not writable, open files may be few, the thread behind the socket may be one too many. Each of these failures ends in a
thread of the loader process that tells nobody: the rank waits for ever.

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
from multiprocessing import resource_sharer, util
from typing import Any

import torch
from torch.utils.data._utils.collate import default_collate_fn_map

from shardway.data.batch_tree import list_leaves
from shardway.errors import ShardwayError
from shardway.hardware.limits import find_temporary, read_files_left
from shardway.units import render_bytes

SHARED = "/dev/shm"
SPARE = 4
"""How often an answer has to fit: other loader processes put theirs there at the same moment."""
PLENTY = 256 * 2**20
_SPARE_FILES = 16
"""What a rank may open while answers are on their way."""
_LONGEST_SOCKET = 107
_BELOW_TMPDIR = len("/pymp-12345678/listener-12345678")
_SHORT = ("/tmp", "/var/tmp", "/dev/shm")


@dataclass(frozen=True)
class PackedAnswer:
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


@dataclass
class Sender:
    """How a loader process sends its answers; a copy is in each of them.

    `ahead`: how many answers of one rank's loader processes may wait to be taken over.
    """

    ahead: int = 2
    shares: bool = True
    """Whether descriptors can be handed over."""

    def begin(self) -> None:
        """In a loader process, before its first answer.

        torch's own function would join samples in shared memory, and end the process where there is no room (SIGBUS).
        Descriptors are handed over by a thread with a socket; where it cannot start, it would only be waited for.
        """
        if find_room() < PLENTY:
            default_collate_fn_map[torch.Tensor] = _stack
        sharer = resource_sharer._resource_sharer  # type: ignore[attr-defined]
        with sharer._lock:
            try:
                if sharer._address is None:
                    sharer._start()
            except (OSError, RuntimeError):
                self.shares = False

    def hand_over(self, answer: Any) -> Any:
        """What is sent: the answer, or its bytes where shared memory has too little room, or the rank has so many files
        open that those of further answers may not fit."""
        tensors = [leaf for leaf in list_leaves(answer) if isinstance(leaf, torch.Tensor)]
        fits = self.shares and find_room() >= SPARE * sum(leaf.nbytes for leaf in tensors) + 2**16
        if fits and find_files_left() >= (self.ahead + 2) * len(tensors) + _SPARE_FILES:
            return answer
        return PackedAnswer(pickle.dumps(answer, protocol=5))


def find_files_left() -> int:
    """How many files a loader process and its rank can both still open."""
    return min(map(read_files_left, (os.getpid(), os.getppid())))


def take_over(answers: Iterator[Any]) -> Iterator[Any]:
    """The answers as they were before they were handed over; an error of ours among them is raised."""
    for sent in answers:
        answer = pickle.loads(sent.data) if isinstance(sent, PackedAnswer) else sent
        if isinstance(answer, ShardwayError):
            raise answer
        yield answer


def _stack(batch: list[torch.Tensor], *, collate_fn_map: Any = None) -> torch.Tensor:
    return torch.stack(batch, 0)


@functools.cache
def shorten_sockets() -> None:
    """Let loader processes that this process starts have their sockets in a folder with a short path, where that below
    TMPDIR is too long for a socket."""
    usual = find_temporary()
    if usual is not None and len(os.fsencode(usual)) + _BELOW_TMPDIR <= _LONGEST_SOCKET:
        return
    for place in _SHORT:
        if os.path.isdir(place) and os.access(place, os.W_OK):
            folder = tempfile.mkdtemp(prefix="pymp-", dir=place)
            multiprocessing.process.current_process()._config["tempdir"] = folder  # type: ignore[attr-defined]
            util.Finalize(None, shutil.rmtree, args=(folder, True), exitpriority=-100)
            return
