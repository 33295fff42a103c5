"""The files of one checkpoint as a rank finds them: on the file system of the run, or on the disks of the nodes.

Invariant: what `bring` was asked for stands in `found.folder` of every rank that asked, or somebody hears why not. What
lies on disks of nodes is read through a folder of its own, which is gone afterwards; what was saved is not changed.
This module must not read tensors.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from shardway.checkpoint.fetch import Transfer, make_transfers, plan_transfers
from shardway.checkpoint.find import FoundCheckpoint
from shardway.checkpoint.local_checkpoints import Nearby, read_nearby
from shardway.checkpoint.manifest import Damaged, Manifest, write_manifest
from shardway.checkpoint.place import CheckpointFolder
from shardway.errors import JobError
from shardway.ranks.start import Ranks
from shardway.rundir.atomic import remove_folder
from shardway.rundir.look import list_names
from shardway.rundir.steps import partial_name


class ShardStore(Protocol):
    """The files of one checkpoint; all but `found` are called on all ranks together."""

    @property
    def found(self) -> FoundCheckpoint:
        """Where this rank reads."""
        ...

    def bring(self, find: Callable[[], Collection[str]]) -> list[str]:
        """Let this rank read the files that `find` names; what of them is damaged."""
        ...

    def share(self, names: Sequence[str]) -> list[str]:
        """Of all files, by name, those that this rank reads from first to last: each is read so by one rank."""
        ...


@dataclass(frozen=True)
class SharedShardStore:
    """Every rank sees every file."""

    found: FoundCheckpoint
    ranks: Ranks

    def bring(self, find: Callable[[], Collection[str]]) -> list[str]:
        """They are there."""
        return []

    def share(self, names: Sequence[str]) -> list[str]:
        """Every so manyth."""
        return list(names[self.ranks.rank :: self.ranks.world])


@dataclass(frozen=True)
class LocalShardStore:
    """Each node sees what it has saved; `nodes` is the node of each rank, `apart` opens the ranks over which files are
    sent."""

    found: FoundCheckpoint
    ranks: Ranks
    nearby: Nearby
    nodes: tuple[int, ...]
    manifest: Manifest | None
    apart: Callable[[], Ranks]
    refused: str = ""

    def bring(self, find: Callable[[], Collection[str]]) -> list[str]:
        """Have those that this node has not sent to the rank that leads it."""
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
        """Of those that its node has; where several nodes have one, they take turns, and so do the ranks of a node."""
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
    """The files of a checkpoint on disks of nodes, which each node reads through links in a folder of its own."""
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
    """Make the folder that this node reads from; why it cannot be made, or nothing."""
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
