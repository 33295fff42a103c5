"""Which checkpoints lie on the disks of the nodes, seen from all of them together.

Invariant: one that is given has one manifest on all nodes and every file of it on some, in its size; whether the bytes
are right is for who reads them. Every rank finds the same. This module must not change anything on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shardway.checkpoint.checksum import find_short
from shardway.checkpoint.find import FoundCheckpoint, PassedOver
from shardway.checkpoint.manifest import Damaged, Manifest, digest_manifest
from shardway.checkpoint.verify import manifest_of
from shardway.rundir.local import LocalRun
from shardway.rundir.steps import step_name

Judge = Callable[[Manifest], str]
"""Why a run must not go on from a checkpoint with this manifest; empty where it may."""


@dataclass(frozen=True)
class LocalCopy:
    """What one folder has of a checkpoint: the manifest's digest, the files that are there, and what is wrong with it.

    `files` are all that the manifest names, `present` those that are there: name -> folder. `wrong` is why it is not
    taken at all; `short` tells of files that are there and are not whole.
    """

    step: int
    digest: str = ""
    files: tuple[str, ...] = ()
    present: Mapping[str, str] = field(default_factory=dict)
    wrong: str = ""
    short: tuple[str, ...] = ()


@dataclass(frozen=True)
class Nearby:
    """A checkpoint on the disks of nodes: of each file the ranks whose node has it, and what this rank's node has."""

    step: int
    digest: str
    holders: Mapping[str, tuple[int, ...]]
    here: Mapping[str, str]


@dataclass(frozen=True)
class Survey:
    """Checkpoints that a run may go on from, and those that it may not, the newest first."""

    nearby: tuple[Nearby, ...] = ()
    passed_over: tuple[PassedOver, ...] = ()


def list_held(local: LocalRun, run: str, newer_than: int, judge: Judge) -> list[LocalCopy]:
    """What the folders that are seen from here have of checkpoints that are newer than a step."""
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
    """What all ranks have told of what they see; a rank that does not look has told nothing."""
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
