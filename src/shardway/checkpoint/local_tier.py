"""Checkpoints on the disks of the nodes: finds them, fetches their files for a rank, copies them to the run directory.

Invariants:
- A listed checkpoint has one manifest on all nodes, and each of its files is on some node in its full size. Bytes are
  verified when they are read. All ranks find the same checkpoints.
- Transfers: what arrives is compared with its checksum; a file that differs is reported and not kept. A rank that
  cannot read or write still takes part in every message, so no rank waits forever.
- A rank's files: what `bring` was asked for is in `found.folder` of every rank that asked, or an error is reported.
  Files of other nodes are read through a temporary folder. What was saved is not changed.
- What is saved here names the start of the run that it comes from (`rundir.names`), which is written down before
  anything is saved under it.
- Copies: each rank copies the files that it wrote. If a file is no longer what was in memory when it was written, the
  copy makes no checkpoint.
"""

from __future__ import annotations

import contextlib
import io
import os
import socket
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

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
from shardway.checkpoint.reader import ShardStore
from shardway.checkpoint.writer import (
    CheckpointFolder,
    SavedCheckpoint,
    commit_checkpoint,
    new_checkpoint,
    with_file_errors,
)
from shardway.errors import JobError, UserError
from shardway.parallel.mesh import set_apart
from shardway.ranks.start import Ranks
from shardway.ranks.stop import SignalWatch
from shardway.resolve import Resolved
from shardway.rundir.directory import RunDir
from shardway.rundir.file_io import list_names, remove_folder
from shardway.rundir.names import (
    LOCAL,
    LineageBranch,
    LocalRun,
    find_local_run,
    has_line,
    partial_name,
    read_line,
    step_name,
    write_line,
)

# --- which checkpoints the nodes have together

Judge = Callable[[Manifest], str]  # why a run must not resume from a checkpoint with this manifest; empty if it may


@dataclass(frozen=True)
class LocalCopy:
    """What one folder has of a checkpoint: the manifest's digest, the files that are there, and what is wrong with it.
    `files` are all that the manifest names, `present` those that are there: name -> folder. `wrong`: why the folder is
    not used at all; `short`: files that are there but not complete."""

    step: int
    digest: str = ""
    files: tuple[str, ...] = ()
    present: Mapping[str, str] = field(default_factory=dict)
    wrong: str = ""
    short: tuple[str, ...] = ()


@dataclass(frozen=True)
class LocalCheckpoint:
    """A checkpoint on the disks of nodes: for each file the ranks whose node has it, and what this rank's node has."""

    step: int
    digest: str
    holders: Mapping[str, tuple[int, ...]]
    here: Mapping[str, str]


@dataclass(frozen=True)
class Survey:
    """Checkpoints that a run may resume from, and those that it may not, the newest first."""

    local: tuple[LocalCheckpoint, ...] = ()
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
    shorts = {name: find_short(where, name, checksum) for name, checksum in manifest.files.items()}
    present = {name: str(where) for name, short in shorts.items() if short is None}
    cut = tuple(short for name, short in shorts.items() if short is not None and (where / name).exists())
    return LocalCopy(step, digest_manifest(manifest), tuple(sorted(manifest.files)), present, judge(manifest), cut)


def survey(of_ranks: Sequence[Iterable[LocalCopy]], rank: int) -> Survey:
    """Combines what all ranks see; a rank that does not look reports nothing."""
    held = [(other, each) for other, share in enumerate(of_ranks) for each in share]
    local, passed_over = [], []
    for step in sorted({each.step for _, each in held}, reverse=True):
        of_step = [(other, each) for other, each in held if each.step == step]
        right = [(other, each) for other, each in of_step if not each.wrong]
        if len({each.digest for _, each in right}) > 1:
            passed_over.append(PassedOver(step, "what the nodes have of it is not of one checkpoint"))
            continue
        holders: dict[str, tuple[int, ...]] = dict.fromkeys(right[0][1].files, ()) if right else {}
        for other, each in right:
            for name in each.present:
                holders[name] = (*holders[name], *(() if other in holders[name] else (other,)))
        reasons = [reason for _, each in of_step for reason in ([each.wrong] if each.wrong else each.short)]
        lost = [f"no node has {name}" for name, ranks in holders.items() if not ranks]
        if lost or not right:
            passed_over.append(PassedOver(step, "; ".join(dict.fromkeys((*reasons, *lost)))))
        else:
            here = {name: where for other, each in right if other == rank for name, where in each.present.items()}
            local.append(LocalCheckpoint(step, right[0][1].digest, holders, here))
    return Survey(tuple(local), tuple(passed_over))


# --- transfers between nodes


@dataclass(frozen=True)
class Transfer:
    """A file that one rank sends to another."""

    name: str
    sender: int
    receiver: int


def plan_transfers(holders: Mapping[str, Sequence[int]], wanted: Mapping[int, frozenset[str]]) -> list[Transfer]:
    """The transfers, the same on every rank: `holders` of each file, and the files that each rank needs and lacks.
    Ranks that have the same file take turns."""
    pairs = sorted((name, receiver) for receiver, names in wanted.items() for name in names)
    return [
        Transfer(name, holders[name][number % len(holders[name])], receiver)
        for number, (name, receiver) in enumerate(pairs)
    ]


def make_transfers(
    ranks: Ranks, transfers: Sequence[Transfer], folder: Path, checksums: Mapping[str, FileChecksum]
) -> Iterator[str]:
    """Send and receive this rank's files, read from and written into `folder`; yields what arrived damaged or could not
    be kept. All ranks go through the same list in the same order, so that every message meets its other end."""
    for each in transfers:
        if ranks.rank == each.sender:
            _send(ranks, each, folder / each.name, checksums[each.name].bytes)
        elif ranks.rank == each.receiver and (damage := _receive(ranks, each, folder, checksums[each.name])):
            yield damage


def _send(ranks: Ranks, transfer: Transfer, path: Path, size: int) -> None:
    """Send a file block by block; zeros replace what cannot be read, which the checksum then shows."""
    with contextlib.ExitStack() as stack:
        file: Any = io.BytesIO()
        with contextlib.suppress(OSError):
            file = stack.enter_context(open(path, "rb", buffering=0))
        for at in range(0, size, BLOCK):
            block = torch.zeros(min(BLOCK, size - at), dtype=torch.uint8)
            data = block.numpy().data
            with contextlib.suppress(OSError):
                while len(data) and (count := file.readinto(data)):
                    data = data[count:]
            with ranks.contact("while sending a checkpoint"):
                dist.send(block, dst=transfer.receiver, group=ranks.group)


def _receive(ranks: Ranks, transfer: Transfer, folder: Path, checksum: FileChecksum) -> str:
    """Receive a file; returns what is wrong with it, or ""."""
    writer, refusal, path = ChecksumWriter(), None, folder / transfer.name
    with contextlib.ExitStack() as stack:
        try:
            file: Any = stack.enter_context(open(path, "wb", buffering=0))
        except OSError as error:
            refusal = error
        for at in range(0, checksum.bytes, BLOCK):
            block = torch.empty(min(BLOCK, checksum.bytes - at), dtype=torch.uint8)
            with ranks.contact("while receiving a checkpoint"):
                dist.recv(block, src=transfer.sender, group=ranks.group)
            data = block.numpy().data
            writer.update(data)
            try:
                while len(data) and refusal is None:
                    data = data[file.write(data) :]
            except OSError as error:
                refusal = error
    if refusal is None and writer.result() == checksum:
        return ""
    path.unlink(missing_ok=True)
    if refusal is not None:
        return f"{transfer.name} cannot be kept where it is wanted: {refusal.strerror}"
    return f"the content of {transfer.name} has changed where it came from"


# --- one checkpoint as a rank finds it


@dataclass(frozen=True)
class LocalShardStore(ShardStore):
    """Each node has what it has saved; `nodes` is the node of each rank, `apart` opens the ranks over which files are
    sent."""

    local: LocalCheckpoint
    nodes: tuple[int, ...]
    manifest: Manifest | None
    apart: Callable[[], Ranks]
    refused: str = ""

    def bring(self, find: Callable[[], Collection[str]]) -> list[str]:
        """Send the files that this node lacks to the rank that leads it."""
        if self.refused:
            return [self.refused]
        ranks, holders, folder = self.ranks, self.local.holders, self.found.folder
        leaders = [self.nodes.index(node) for node in self.nodes]
        wanted: dict[int, frozenset[str]] = {}
        for leader, wish in zip(leaders, ranks.gather(ranks.together(lambda: frozenset(find()))), strict=True):
            missing = {name for name in wish if name in holders and leader not in holders[name]}
            wanted[leader] = wanted.get(leader, frozenset()) | missing
        leads = leaders[ranks.rank] == ranks.rank
        there = ranks.gather(ranks.together(lambda: list_names(folder) if leads else []))
        transfers = plan_transfers(holders, {leader: names - set(there[leader]) for leader, names in wanted.items()})
        if not transfers:
            return []
        apart, checksums = self.apart(), self.manifest.files if self.manifest is not None else {}
        return apart.together(lambda: list(make_transfers(apart, transfers, folder, checksums)))

    def share(self, names: Sequence[str]) -> list[str]:
        """Files that its node has; nodes that have the same file take turns, and so do the ranks of a node."""
        own = []
        for number, name in enumerate(names):
            holders = self.local.holders[name]
            turn, leader = divmod(number, len(holders))
            of_node = [rank for rank, node in enumerate(self.nodes) if node == self.nodes[holders[leader]]]
            if of_node[turn % len(of_node)] == self.ranks.rank:
                own.append(name)
        return own


@contextlib.contextmanager
def open_local_store(
    place: CheckpointFolder, ranks: Ranks, local: LocalCheckpoint, nodes: tuple[int, ...], apart: Callable[[], Ranks]
) -> Iterator[LocalShardStore]:
    """The files of a checkpoint on disks of nodes; each node reads them through links in a folder of its own."""
    folder = place.folder / partial_name(local.step, f"read-{place.start}")
    first = min(rank for holders in local.holders.values() for rank in holders)
    manifest, unreadable, unlinked = None, "", ""
    if ranks.rank == first:
        try:
            manifest = manifest_of(FoundCheckpoint(Path(next(iter(local.here.values()))), local.step))
        except Damaged as damage:
            unreadable = "; ".join(damage.reasons)
    manifest, unreadable = ranks.gather((manifest, unreadable))[first]
    try:
        if place.leads and manifest is not None:
            try:
                place.make()
                remove_folder(folder)
                folder.mkdir()
                for name, where in local.here.items():
                    os.symlink(Path(where) / name, folder / name)
                write_manifest(folder, manifest)
            except (OSError, JobError) as error:
                unlinked = f"it cannot be read through {folder}: {error}"
        refused = next((why for why in (unreadable, *ranks.gather(unlinked)) if why), "")
        yield LocalShardStore(FoundCheckpoint(folder, local.step), ranks, local, nodes, manifest, apart, refused)
    finally:
        if place.leads:
            remove_folder(folder)


# --- copies to the run directory


def replicate_checkpoint(
    source: CheckpointFolder, target: CheckpointFolder, ranks: Ranks, saved: SavedCheckpoint
) -> SavedCheckpoint:
    """Copy what `saved` describes, on all ranks together, in any thread of theirs. Raises JobError on every rank
    alike."""
    manifest = saved.manifest
    with new_checkpoint(target, ranks, manifest.step, manifest.total_bytes) as folder:

        def copy_own() -> None:
            for name in saved.own:
                _replicate(source.path(manifest.step) / name, folder / name, manifest.files[name])

        ranks.together(copy_own)
        return commit_checkpoint(target, ranks, manifest, saved.own)


def _replicate(source: Path, target: Path, expected: FileChecksum) -> None:
    """Copy one file, durably, and compare what was read with its checksum on the way."""
    checksum, step = ChecksumWriter(), memoryview(bytearray(STEP))
    with with_file_errors(), open(source, "rb", buffering=0) as old, open(target, "xb") as new:
        while count := old.readinto(step):
            checksum.update(step[:count])
            new.write(step[:count])
        new.flush()
        os.fsync(new.fileno())
    if checksum.result() != expected:
        raise JobError(f"{source} is not what was written there, so it was not copied")


# --- the disk of this rank's node, and the lineage of what is saved there

KEPT = 2  # the newest complete checkpoints that stay, besides one that is being copied


class SavedRun(Protocol):
    """What saving needs of a run in training: `train.session.Session` is one; `recorder` takes its events and status,
    `directory` is where it writes, and with which right."""

    run_id: str
    ranks: Ranks
    signals: SignalWatch
    at_end: contextlib.ExitStack

    @property
    def resolved(self) -> Resolved: ...

    @property
    def directory(self) -> RunDir: ...

    @property
    def recorder(self) -> Any: ...


class LocalTier:
    """The disk of this rank's node; `nodes` is the node of each rank. Its methods are called on all ranks together."""

    def __init__(self, run: SavedRun, files: LocalRun, nodes: tuple[int, ...]) -> None:
        self._run = run
        self._start = ""
        self._complete: list[int] = []
        self._apart: Ranks | None = None
        self.files = files
        self.nodes = nodes
        self.copied: int | None = None  # the step that is being copied to the run directory
        self.is_base = False  # whether the run resumed from here, so that the run directory lacks that step

    @property
    def leads(self) -> bool:
        """Whether this rank makes and removes what its node has."""
        rank = self._run.ranks.rank
        return self.nodes.index(self.nodes[rank]) == rank

    @property
    def place(self) -> CheckpointFolder:
        """Where this rank writes, in the folder of the run's current start."""
        node = self.nodes[self._run.ranks.rank]
        share = self.nodes.count(node) / len(self.nodes)
        make = partial(self.files.make, node)
        return CheckpointFolder(self._run.directory, self.leads, self.files.node(node), LOCAL, self._start, share, make)

    def apart(self) -> Ranks:
        """The ranks over a process group of their own, made at the first call."""
        if self._apart is None:
            self._apart = set_apart(self._run.ranks)
        return self._apart

    def begin(self, from_step: int, tier: str) -> None:
        """Write down where the run resumes; later saves have this origin."""
        self._start = descend(self._run, from_step, tier)

    @contextlib.contextmanager
    def line_kept(self) -> Iterator[None]:
        """If the run is refused, remove what was written down of where it resumes."""
        path, is_first = self._run.directory.path, self._run.ranks.is_first
        before = read_line(path) if is_first and has_line(path) else None
        try:
            yield
        except UserError:
            if before is not None and read_line(path) != before:
                write_line(path, before)
            raise

    def settle(self, step: int, *, is_here: bool) -> None:
        """The run resumes from this step, from these disks or not: what is newer here is removed."""
        self._complete, self.is_base = [step] if is_here else [], is_here
        self._lead(lambda: self.files.remove_after(step))

    def prune(self, step: int, ranks: Ranks) -> None:
        """A checkpoint is complete: older ones may be removed. Over `ranks`."""
        self._complete = [*self._complete, step][-KEPT:]
        kept = {*self._complete, *([] if self.copied is None else [self.copied])}
        self._lead(lambda: self.files.keep_only(kept, up_to=step), ranks)

    def remove_partials(self) -> None:
        self._lead(lambda: self.files.remove_partials(self.nodes[self._run.ranks.rank]))

    def remove(self) -> None:
        self._lead(self.files.remove)

    def as_numbers(self) -> dict[str, Any]:
        """For a checkpoint's manifest: the start that it is saved in."""
        return {"line": self._start}

    def _lead(self, act: Callable[[], None], ranks: Ranks | None = None) -> None:
        (ranks or self._run.ranks).together(lambda: act() if self.leads else None)


def open_tier(run: SavedRun, folder: str) -> LocalTier:
    """The disks of the nodes; on all ranks together. Raises UserError on every rank if some lack a variable."""
    ranks = run.ranks
    files = ranks.together(lambda: find_local_run(folder, run.run_id))
    found = ranks.gather((ranks.placement.node, socket.gethostname()))
    if all(node is not None for node, _ in found):
        return LocalTier(run, files, tuple(node or 0 for node, _ in found))
    hosts = list(dict.fromkeys(host for _, host in found))  # the launcher does not number nodes
    return LocalTier(run, files, tuple(hosts.index(host) for _, host in found))


def line_of(numbers: Mapping[str, Any]) -> str:
    """The start that saved a checkpoint with these numbers; empty if they have none."""
    return str(numbers.get("line", ""))


def descend(run: SavedRun, from_step: int, tier: str) -> str:
    """Write down where the run resumes, on all ranks together; returns the name of the entry. Raises JobError."""

    def write_down() -> str:
        run.directory.confirm_writer()
        entry = LineageBranch(run.directory.epoch, from_step, tier)
        write_line(run.directory.path, read_line(run.directory.path).add(entry))
        return entry.name

    return run.ranks.ask_first(write_down)
