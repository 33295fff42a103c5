"""Checkpoints on the disks of the nodes: finds them, fetches their files for a rank, copies them to the run directory.

Invariants:
- A listed checkpoint has one manifest on all nodes, and each of its files is on some node in its full size. Bytes are
  verified when they are read. All ranks find the same checkpoints.
- Transfers: what arrives is compared with its checksum; a file that differs is reported and not kept. A rank that
  cannot read or write still takes part in every message, so no rank waits forever.
- A rank's files: what `bring` was asked for is in `found.folder` of every rank that asked, or an error is reported.
  Files of other nodes are read through a temporary folder. What was saved is not changed.
- Copies: each rank copies the files that it wrote. If a file is no longer what was in memory when it was written, the
  copy makes no checkpoint.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Protocol

import torch
import torch.distributed as dist

from shardway.checkpoint.catalog import FoundCheckpoint, PassedOver, manifest_of
from shardway.checkpoint.file_format import (
    BLOCK,
    STEP,
    ChecksumWriter,
    Damaged,
    FileChecksum,
    Manifest,
    digest_manifest,
    find_short,
    write_manifest,
)
from shardway.checkpoint.folders import CheckpointFolder
from shardway.checkpoint.writer import SavedCheckpoint, SaveRequest, make_checkpoint, with_file_errors
from shardway.errors import JobError
from shardway.ranks.start import Ranks
from shardway.rundir.file_io import list_names, remove_folder
from shardway.rundir.names import LocalRun, partial_name, step_name

# --- which checkpoints the nodes have together

Judge = Callable[[Manifest], str]
"""Why a run must not resume from a checkpoint with this manifest; empty if it may."""


@dataclass(frozen=True)
class LocalCopy:
    """What one folder has of a checkpoint: the manifest's digest, the files that are there, and what is wrong with it.

    `files` are all that the manifest names, `present` those that are there: name -> folder. `wrong`: why the folder is
    not used at all; `short`: files that are there but not complete.
    """

    step: int
    digest: str = ""
    files: tuple[str, ...] = ()
    present: Mapping[str, str] = field(default_factory=dict)
    wrong: str = ""
    short: tuple[str, ...] = ()


@dataclass(frozen=True)
class Nearby:
    """A checkpoint on the disks of nodes: for each file the ranks whose node has it, and what this rank's node has."""

    step: int
    digest: str
    holders: Mapping[str, tuple[int, ...]]
    here: Mapping[str, str]


@dataclass(frozen=True)
class Survey:
    """Checkpoints that a run may resume from, and those that it may not, the newest first."""

    nearby: tuple[Nearby, ...] = ()
    passed_over: tuple[PassedOver, ...] = ()


def list_held(local: LocalRun, run: str, newer_than: int, judge: Judge) -> list[LocalCopy]:
    """What the folders that this rank sees have of checkpoints that are newer than a step."""
    return [
        _look(FoundCheckpoint(node / step_name(step), step, run), judge)
        for node in local.nodes()
        for step in local.steps_of(node)
        if step > newer_than
    ]


def _look(found: FoundCheckpoint, judge: Judge) -> LocalCopy:
    step, where = found.step or 0, found.folder
    try:
        manifest = manifest_of(found)
    except Damaged as damage:
        return LocalCopy(step, wrong="; ".join(damage.reasons))
    shorts = {name: find_short(where, name, seal) for name, seal in manifest.files.items()}
    present = {name: str(where) for name, short in shorts.items() if short is None}
    cut = tuple(short for name, short in shorts.items() if short is not None and (where / name).exists())
    return LocalCopy(step, digest_manifest(manifest), tuple(sorted(manifest.files)), present, judge(manifest), cut)


def survey(of_ranks: Sequence[Iterable[LocalCopy]], rank: int) -> Survey:
    """Combines what all ranks see; a rank that does not look reports nothing."""
    held = [(other, each) for other, share in enumerate(of_ranks) for each in share]
    found = [_judge(step, held, rank) for step in sorted({each.step for _, each in held}, reverse=True)]
    return Survey(
        tuple(each for each in found if isinstance(each, Nearby)),
        tuple(each for each in found if isinstance(each, PassedOver)),
    )


def _judge(step: int, held: Sequence[tuple[int, LocalCopy]], rank: int) -> Nearby | PassedOver:
    of_step = [(other, each) for other, each in held if each.step == step]
    right = [(other, each) for other, each in of_step if not each.wrong]
    if not right:
        return PassedOver(step, _join(each.wrong for _, each in of_step))
    if len({each.digest for _, each in right}) > 1:
        return PassedOver(step, "what the nodes have of it is not of one checkpoint")
    holders: dict[str, tuple[int, ...]] = dict.fromkeys(right[0][1].files, ())
    for other, each in right:
        for name in each.present:
            holders[name] = (*holders[name], *(() if other in holders[name] else (other,)))
    if lost := [name for name, ranks in holders.items() if not ranks]:
        return PassedOver(step, _join((*(_describe(of_step)), *(f"no node has {name}" for name in lost))))
    here = {name: where for other, each in right if other == rank for name, where in each.present.items()}
    return Nearby(step, right[0][1].digest, holders, here)


def _describe(of_step: Sequence[tuple[int, LocalCopy]]) -> Iterator[str]:
    for _, each in of_step:
        yield from ([each.wrong] if each.wrong else each.short)


def _join(reasons: Iterable[str]) -> str:
    return "; ".join(dict.fromkeys(reasons))


def read_nearby(nearby: Nearby) -> Manifest:
    """Its manifest, on a rank whose node has a part of it."""
    where = next(iter(nearby.here.values()))
    return manifest_of(FoundCheckpoint(Path(where), nearby.step))


# --- transfers between nodes


@dataclass(frozen=True)
class Transfer:
    """A file that one rank sends to another."""

    name: str
    sender: int
    receiver: int


def plan_transfers(holders: Mapping[str, Sequence[int]], wanted: Mapping[int, frozenset[str]]) -> list[Transfer]:
    """The transfers, the same on every rank: `holders` of each file, and the files that each rank needs and lacks.

    Ranks that have the same file take turns.
    """
    wishes = sorted((name, receiver) for receiver, names in wanted.items() for name in names)
    return [
        Transfer(name, holders[name][number % len(holders[name])], receiver)
        for number, (name, receiver) in enumerate(wishes)
    ]


def make_transfers(
    ranks: Ranks, transfers: Sequence[Transfer], folder: Path, seals: Mapping[str, FileChecksum]
) -> Iterator[str]:
    """Send and receive this rank's files, read from and written into `folder`; yields what arrived damaged or could not
    be kept.

    All ranks go through the same list in the same order, so that every message meets its other end.
    """
    for each in transfers:
        if ranks.rank == each.sender:
            _send(ranks, each, folder / each.name, seals[each.name].bytes)
        elif ranks.rank == each.receiver and (damage := _receive(ranks, each, folder, seals[each.name])):
            yield damage


def _send(ranks: Ranks, transfer: Transfer, path: Path, size: int) -> None:
    """Send a file block by block; zeros replace what cannot be read, which the checksum then shows."""
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
    """Receive a file; returns what is wrong with it, or ""."""
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
    """The lengths of the blocks of a file."""
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


# --- one checkpoint as a rank finds it


class ShardStore(Protocol):
    """The files of one checkpoint; all but `found` are called on all ranks together."""

    @property
    def found(self) -> FoundCheckpoint:
        """The checkpoint as this rank reads it."""
        ...

    def bring(self, find: Callable[[], Collection[str]]) -> list[str]:
        """Make the files that `find` names readable for this rank; returns what of them is damaged."""
        ...

    def share(self, names: Sequence[str]) -> list[str]:
        """The files that this rank reads whole; each file is read whole by one rank."""
        ...


@dataclass(frozen=True)
class SharedShardStore:
    """Every rank sees every file."""

    found: FoundCheckpoint
    ranks: Ranks

    def bring(self, find: Callable[[], Collection[str]]) -> list[str]:
        """Nothing to do."""
        return []

    def share(self, names: Sequence[str]) -> list[str]:
        """Every `world`-th file."""
        return list(names[self.ranks.rank :: self.ranks.world])


@dataclass(frozen=True)
class LocalShardStore:
    """Each node has what it has saved; `nodes` is the node of each rank, `apart` opens the ranks over which files are
    sent."""

    found: FoundCheckpoint
    ranks: Ranks
    nearby: Nearby
    nodes: tuple[int, ...]
    manifest: Manifest | None
    apart: Callable[[], Ranks]
    refused: str = ""

    def bring(self, find: Callable[[], Collection[str]]) -> list[str]:
        """Send the files that this node lacks to the rank that leads it."""
        if self.refused:
            return [self.refused]
        wishes, lead = self.ranks.gather(self.ranks.together(lambda: frozenset(find()))), self._lead_of
        wanted: dict[int, frozenset[str]] = {}
        for rank, wish in enumerate(wishes):
            leader = lead(rank)
            missing = {name for name in wish if leader not in self.nearby.holders.get(name, ())}
            wanted[leader] = wanted.get(leader, frozenset()) | (missing & self.nearby.holders.keys())
        there = self.ranks.gather(self.ranks.together(lambda: list_names(self.found.folder) if self._leads else []))
        wanted = {leader: missing - set(there[leader]) for leader, missing in wanted.items()}
        transfers = plan_transfers(self.nearby.holders, wanted)
        return self._move(transfers) if transfers else []

    def share(self, names: Sequence[str]) -> list[str]:
        """Files that its node has; nodes that have the same file take turns, and so do the ranks of a node."""
        return [name for number, name in enumerate(names) if self._reader(name, number) == self.ranks.rank]

    def _reader(self, name: str, number: int) -> int:
        holders = self.nearby.holders[name]
        turn, leader = divmod(number, len(holders))
        node = self.nodes[holders[leader]]
        of_node = [rank for rank, other in enumerate(self.nodes) if other == node]
        return of_node[turn % len(of_node)]

    def _move(self, transfers: Sequence[Transfer]) -> list[str]:
        apart, seals = self.apart(), self.manifest.files if self.manifest is not None else {}
        return apart.together(lambda: list(make_transfers(apart, transfers, self.found.folder, seals)))

    def _lead_of(self, rank: int) -> int:
        return self.nodes.index(self.nodes[rank])

    @property
    def _leads(self) -> bool:
        return self._lead_of(self.ranks.rank) == self.ranks.rank


@contextlib.contextmanager
def open_local_stock(
    place: CheckpointFolder, ranks: Ranks, nearby: Nearby, nodes: tuple[int, ...], apart: Callable[[], Ranks]
) -> Iterator[LocalShardStore]:
    """The files of a checkpoint on disks of nodes; each node reads them through links in a folder of its own."""
    start = place.local.start if place.local is not None else ""
    folder = place.folder / partial_name(nearby.step, f"read-{start}")
    first = min(rank for holders in nearby.holders.values() for rank in holders)
    told = ranks.gather(_try_to_read(nearby) if ranks.rank == first else "")[first]
    manifest = told if isinstance(told, Manifest) else None
    try:
        made = _try_to_link(place, folder, nearby.here, manifest) if place.leads and manifest is not None else ""
        refused = next((why for why in (told, *ranks.gather(made)) if isinstance(why, str) and why), "")
        yield LocalShardStore(FoundCheckpoint(folder, nearby.step), ranks, nearby, nodes, manifest, apart, refused)
    finally:
        if place.leads:
            remove_folder(folder)


def _try_to_read(nearby: Nearby) -> Manifest | str:
    """The manifest, or why it cannot be read any more."""
    try:
        return read_nearby(nearby)
    except Damaged as damage:
        return "; ".join(damage.reasons)


def _try_to_link(place: CheckpointFolder, folder: Path, here: Mapping[str, str], manifest: Manifest) -> str:
    """Make the folder that this node reads from; returns why it cannot be made, or ""."""
    try:
        place.make()
        remove_folder(folder)
        folder.mkdir()
        for name, where in here.items():
            os.symlink(Path(where) / name, folder / name)
        write_manifest(folder, manifest)
    except (OSError, JobError) as error:
        return f"it cannot be read through {folder}: {error}"
    return ""


# --- copies to the run directory


def carry_checkpoint(
    source: CheckpointFolder, target: CheckpointFolder, ranks: Ranks, saved: SavedCheckpoint
) -> SavedCheckpoint:
    """Copy what `saved` describes, on all ranks together, in any thread of theirs.

    Raises JobError on every rank alike.
    """
    here, manifest = source.path(saved.manifest.step), saved.manifest

    def write(folder: Path) -> tuple[Manifest, Sequence[str]]:
        ranks.together(lambda: _carry_all(here, folder, saved))
        return manifest, saved.own

    return make_checkpoint(target, ranks, SaveRequest(manifest.step, manifest.total_bytes, write))


def _carry_all(source: Path, target: Path, saved: SavedCheckpoint) -> None:
    for name in saved.own:
        _carry(source / name, target / name, saved.manifest.files[name])


def _carry(source: Path, target: Path, seal: FileChecksum) -> None:
    """Copy one file, durably, and compare what was read with its checksum on the way."""
    sealer, step = ChecksumWriter(), memoryview(bytearray(STEP))
    with with_file_errors(), open(source, "rb", buffering=0) as old, open(target, "xb") as new:
        while count := old.readinto(step):
            sealer.update(step[:count])
            new.write(step[:count])
        new.flush()
        os.fsync(new.fileno())
    if sealer.seal() != seal:
        raise JobError(f"{source} is not what was written there, so it was not copied")
