"""Sends files of a checkpoint from the nodes that have them to those that want them.

Invariant: what arrives is compared with its seal on the way; a file that came otherwise is told of and is not there. A
rank that cannot read or write still takes its part in every message, so that none waits for ever. This module must not
decide who wants what.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
import torch.distributed as dist

from shardway.checkpoint.checksum import BLOCK, ChecksumWriter, FileChecksum
from shardway.ranks.start import Ranks


@dataclass(frozen=True)
class Transfer:
    """A file that one rank sends to another."""

    name: str
    sender: int
    receiver: int


def plan_transfers(holders: Mapping[str, Sequence[int]], wanted: Mapping[int, frozenset[str]]) -> list[Transfer]:
    """Who sends what to whom, the same on every rank: `holders` of each file, and what each rank wants and has not.

    Several ranks that have a file take turns.
    """
    wishes = sorted((name, receiver) for receiver, names in wanted.items() for name in names)
    return [
        Transfer(name, holders[name][number % len(holders[name])], receiver)
        for number, (name, receiver) in enumerate(wishes)
    ]


def make_transfers(
    ranks: Ranks, transfers: Sequence[Transfer], folder: Path, seals: Mapping[str, FileChecksum]
) -> Iterator[str]:
    """Send and receive this rank's files, read from and written into `folder`; what came damaged or could not be kept.

    All ranks go through the same list in the same order, so that every message meets its other end.
    """
    for each in transfers:
        if ranks.rank == each.sender:
            _send(ranks, each, folder / each.name, seals[each.name].bytes)
        elif ranks.rank == each.receiver and (damage := _receive(ranks, each, folder, seals[each.name])):
            yield damage


def _send(ranks: Ranks, transfer: Transfer, path: Path, size: int) -> None:
    """Send a file block by block; zeros in place of what cannot be read, which its seal then shows."""
    with contextlib.ExitStack() as stack:
        file: BinaryIO = io.BytesIO()
        with contextlib.suppress(OSError):
            file = stack.enter_context(open(path, "rb", buffering=0))
        for length in _lengths(size):
            block = torch.zeros(length, dtype=torch.uint8)
            _fill(file, block.numpy().data)
            with ranks.contact("while sending a checkpoint"):
                dist.send(block, dst=transfer.receiver, group=ranks.group)


def _receive(ranks: Ranks, transfer: Transfer, folder: Path, seal: FileChecksum) -> str:
    """Receive a file; what is wrong with it, or nothing."""
    sealer, wrong = ChecksumWriter(), ""
    path = folder / transfer.name
    with contextlib.ExitStack() as stack:
        file: BinaryIO | None = None
        try:
            file = stack.enter_context(open(path, "wb", buffering=0))
        except OSError as error:
            wrong = _describe_unkept(transfer.name, error)
        for length in _lengths(seal.bytes):
            block = torch.empty(length, dtype=torch.uint8)
            with ranks.contact("while receiving a checkpoint"):
                dist.recv(block, src=transfer.sender, group=ranks.group)
            sealer.update(block.numpy().data)
            if file is not None and not wrong:
                wrong = _keep(file, block.numpy().data, transfer.name)
    if not wrong and sealer.seal() != seal:
        wrong = f"the content of {transfer.name} has changed where it came from"
    if wrong:
        path.unlink(missing_ok=True)
    return wrong


def _lengths(size: int) -> Iterator[int]:
    """Of the blocks of a file."""
    yield from (min(BLOCK, size - at) for at in range(0, size, BLOCK))


def _fill(file: BinaryIO, data: memoryview) -> None:
    with contextlib.suppress(OSError):
        while len(data) and (count := file.readinto(data)):  # type: ignore[attr-defined]
            data = data[count:]


def _keep(file: BinaryIO, data: memoryview, name: str) -> str:
    try:
        while len(data):
            data = data[file.write(data) :]
    except OSError as error:
        return _describe_unkept(name, error)
    return ""


def _describe_unkept(name: str, error: OSError) -> str:
    return f"{name} cannot be kept where it is wanted: {error.strerror}"
