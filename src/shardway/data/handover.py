"""Hands batches from loader processes to their rank: in shared memory if there is room, else as bytes through the pipe.

torch puts each tensor of an answer into a file of /dev/shm and passes its descriptor through a socket below TMPDIR. In
a container /dev/shm may be small or missing, a path below TMPDIR may be longer than a socket's (unix(7): 108 bytes) or
not writable, open files may run out, or the thread behind the socket may be one too many. Each of these failures ends
in a thread of the loader process without a report, and the rank waits forever.

Invariant: an answer arrives, however little room there is. This module must not depend on the content of an answer
beyond its tensors.
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
"""How many answers of the same size must fit: other loader processes put theirs there at the same moment."""
PLENTY = 256 * 2**20
_SPARE_FILES = 16
"""Files that a rank may open while answers are on their way."""
_LONGEST_SOCKET = 107
_BELOW_TMPDIR = len("/pymp-12345678/listener-12345678")
_SHORT = ("/tmp", "/var/tmp", "/dev/shm")


@dataclass(frozen=True)
class PackedAnswer:
    """An answer as bytes."""

    data: bytes


def find_room() -> int:
    """Free bytes in shared memory; 0 if it cannot be written."""
    try:
        found = os.statvfs(SHARED)
    except OSError:
        return 0
    return found.f_bavail * found.f_frsize if os.access(SHARED, os.W_OK) else 0


def describe_shortage() -> str:
    """Why most answers will come through pipes, and what to do; "" if they will not."""
    room = find_room()
    if room >= PLENTY // 4:
        return ""
    return (
        f"{SHARED} has {render_bytes(room)} free, so loader processes send their batches through pipes, which takes "
        "longer. To do: give the container more of it (--shm-size=16g, --ipc=host), or set data.workers = 0."
    )


@dataclass
class Sender:
    """How a loader process sends its answers; each process has a copy.

    `ahead`: how many answers of one rank's loader processes may wait to be taken over.
    """

    ahead: int = 2
    shares: bool = True
    """Whether descriptors can be handed over."""

    def begin(self) -> None:
        """Prepare a loader process, before its first answer.

        torch's own collate function would join samples in shared memory, and end the process if there is no room
        (SIGBUS). Descriptors are handed over by a thread with a socket; if it cannot start, bytes are sent instead.
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
        """The answer, or its bytes if shared memory has too little room, or if the rank has so many open files that
        those of further answers may not fit."""
        tensors = [leaf for leaf in list_leaves(answer) if isinstance(leaf, torch.Tensor)]
        fits = self.shares and find_room() >= SPARE * sum(leaf.nbytes for leaf in tensors) + 2**16
        if fits and find_files_left() >= (self.ahead + 2) * len(tensors) + _SPARE_FILES:
            return answer
        return PackedAnswer(pickle.dumps(answer, protocol=5))


def find_files_left() -> int:
    """How many files a loader process and its rank can both still open."""
    return min(map(read_files_left, (os.getpid(), os.getppid())))


def take_over(answers: Iterator[Any]) -> Iterator[Any]:
    """The answers as they were before they were handed over; raises an error of Shardway among them."""
    for sent in answers:
        answer = pickle.loads(sent.data) if isinstance(sent, PackedAnswer) else sent
        if isinstance(answer, ShardwayError):
            raise answer
        yield answer


def _stack(batch: list[torch.Tensor], *, collate_fn_map: Any = None) -> torch.Tensor:
    return torch.stack(batch, 0)


@functools.cache
def shorten_sockets() -> None:
    """Give the sockets of future loader processes a folder with a short path if a path below TMPDIR is too long for a
    socket."""
    usual = find_temporary()
    if usual is not None and len(os.fsencode(usual)) + _BELOW_TMPDIR <= _LONGEST_SOCKET:
        return
    for place in _SHORT:
        if os.path.isdir(place) and os.access(place, os.W_OK):
            folder = tempfile.mkdtemp(prefix="pymp-", dir=place)
            multiprocessing.process.current_process()._config["tempdir"] = folder  # type: ignore[attr-defined]
            util.Finalize(None, shutil.rmtree, args=(folder, True), exitpriority=-100)
            return
