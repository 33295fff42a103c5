"""Reads the newest checkpoint that is whole: every byte of it was compared with its manifest.

Invariant: what `load_latest` returns was installed on every rank, and every byte of that checkpoint was compared; an
error names the files. Bytes are compared while they are read into the state, so after an error that state is a mixture
and nobody goes on with it. It must not change anything on disk.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from shardway.checkpoint.checksum import find_damage
from shardway.checkpoint.find import FoundCheckpoint, PassedOver, find_in_run
from shardway.checkpoint.manifest import Damaged, Manifest
from shardway.checkpoint.shard_store import ShardStore, SharedShardStore
from shardway.checkpoint.shards.read import ShardSource, list_wanted, read_tensors
from shardway.checkpoint.shards.table import NAME as TABLE
from shardway.checkpoint.shards.table import TensorTable, read_table
from shardway.checkpoint.state import (
    CheckpointState,
    Tensors,
    is_model,
    is_optimizer,
    list_parameters,
    random_state,
    set_random_state,
)
from shardway.checkpoint.verify import manifest_of, manifest_of_step
from shardway.errors import JobError, UserError, list_some
from shardway.ranks.start import Ranks
from shardway.rundir.directory import START_OVER, RunDir
from shardway.rundir.lineage import SHARED
from shardway.rundir.steps import step_name


@dataclass(frozen=True)
class LoadedCheckpoint:
    """What was restored: the checkpoint's name, its counters, and whether the random state came with it.

    `passed_over`: newer ones that are damaged, the newest first. `tier`: where it was (`rundir.line`).
    """

    name: str
    step: int
    world: int
    numbers: Mapping[str, Any]
    random_restored: bool
    passed_over: tuple[PassedOver, ...] = ()
    tier: str = SHARED


@dataclass(frozen=True)
class _Opened:
    """A checkpoint whose manifest and table are whole."""

    folder: Path
    manifest: Manifest
    table: TensorTable


def peek_latest(directory: RunDir) -> Manifest | None:
    """The manifest of the newest checkpoint that has one, or None where there is no checkpoint.

    Cheap, so that a run that cannot go on is told before its model is built. Raises JobError where no manifest can be
    read, UserError for a newer format.
    """
    passed_over = []
    for step in reversed(directory.checkpoint_steps()):
        try:
            return manifest_of_step(directory, step)
        except Damaged as damage:
            passed_over.append(PassedOver(step, "; ".join(damage.reasons)))
    if passed_over:
        raise JobError(nothing_whole(directory, passed_over))
    return None


def load_latest(
    directory: RunDir, ranks: Ranks, state: CheckpointState, without: Sequence[int] = ()
) -> LoadedCheckpoint | None:
    """Restore the newest whole checkpoint on all ranks together; None where there is no checkpoint but the steps
    `without`.

    Raises JobError where there are checkpoints and none is whole, or where it does not fit the state.
    """
    steps = [step for step in ranks.ask_first(directory.checkpoint_steps) if step not in without]
    passed_over: list[PassedOver] = []
    for step in reversed(steps):
        loaded = load_from(SharedShardStore(find_in_run(directory, step), ranks), ranks, state)
        if isinstance(loaded, LoadedCheckpoint):
            return replace(loaded, passed_over=tuple(passed_over))
        passed_over.append(loaded)
    if passed_over:
        raise JobError(nothing_whole(directory, passed_over))
    return None


def load_from(stock: ShardStore, ranks: Ranks, state: CheckpointState) -> LoadedCheckpoint | PassedOver:
    """Restore one checkpoint, or say what of it is damaged; the same on every rank."""
    step = stock.found.step or 0
    if damaged := _agree(ranks, step, stock.bring(lambda: [TABLE])):
        return damaged
    opened = ranks.together(lambda: _open(stock.found))
    if damaged := _agree(ranks, step, opened.reasons if isinstance(opened, Damaged) else ()):
        return damaged
    if isinstance(opened, Damaged):  # which is agreed by now
        raise opened
    manifest = opened.manifest
    state.prepare(opened.table)
    tensors = state.template(opened.table)
    if manifest.world == ranks.world:
        tensors["random"] = {f"rank-{ranks.rank}": random_state()}
    _check_model_is_whole(ranks, opened, tensors)
    ranks.together(lambda: _fit(opened, tensors))
    if damaged := _agree(ranks, step, stock.bring(lambda: _want(opened, tensors))):
        return damaged
    share = stock.share(sorted(manifest.files))
    if damaged := _agree(ranks, step, ranks.together(lambda: _read(opened, tensors, share))):
        return damaged
    ranks.together(lambda: state.read_files(opened.folder, manifest.world))
    state.install(tensors)
    generators = tensors.get("random", {}).get(f"rank-{ranks.rank}")
    if generators:
        set_random_state(generators)
    return LoadedCheckpoint(step_name(manifest.step), manifest.step, manifest.world, manifest.numbers, bool(generators))


def _open(found: FoundCheckpoint) -> _Opened | Damaged:
    try:
        manifest = manifest_of(found)
        return _Opened(found.folder, manifest, read_table(found.folder, manifest))
    except Damaged as damage:
        return damage


def _agree(ranks: Ranks, step: int, reasons: Sequence[str]) -> PassedOver | None:
    """What any rank found damaged, on every rank; None where nobody found anything."""
    found = dict.fromkeys(reason for share in ranks.gather(tuple(reasons)) for reason in share)
    return PassedOver(step, "; ".join(found)) if found else None


def nothing_whole(directory: RunDir, damaged: Sequence[PassedOver]) -> str:
    """What is told where every checkpoint of a run is damaged."""
    told = "\n".join(f"  {directory.checkpoint_path(each.step).name}: {each.reason}" for each in damaged)
    return (
        f"no checkpoint in {directory.checkpoints} is whole:\n{told}\n"
        f"  None was loaded, and nothing was changed. To do: restore the files, or {START_OVER}."
    )


@contextlib.contextmanager
def _misfits_told(folder: Path) -> Iterator[None]:
    """What torch and this module raise where a state is not that of a checkpoint, as a JobError."""
    try:
        yield
    except (RuntimeError, KeyError, ValueError) as error:
        raise JobError(_misfit(folder, error)) from error


def _fit(opened: _Opened, tensors: Tensors) -> None:
    """Leave out of a template what was not saved. Raises JobError where it does not fit."""
    saved = sorted({**opened.table.tensors, **opened.table.values})
    with _misfits_told(opened.folder):
        _check_nothing_is_lost(tensors, saved)
        _leave_out_unsaved_state(tensors, saved)
        _leave_out_unsaved_generators(tensors, saved)


def _check_model_is_whole(ranks: Ranks, opened: _Opened, tensors: Mapping[str, Any]) -> None:
    """Raise UserError on every rank where the checkpoint holds tensors of a model that no rank has today."""
    if not any(map(is_model, tensors)):
        return
    today = {f"{part}.{name}" for part in filter(is_model, tensors) for name in tensors[part]}
    saved = sorted(name for name in opened.table.tensors if is_model(name.partition(".")[0]))
    known = ranks.sum(torch.tensor([name in today for name in saved], dtype=torch.int64, device=ranks.device))
    lost = [name for name, ranks_with_it in zip(saved, known.tolist(), strict=True) if not ranks_with_it]
    if lost:
        names = list_some([name.partition(".")[2] for name in lost], 6)
        parts = sorted({name.partition(".")[0] for name in lost})
        raise UserError(
            f"the checkpoint {opened.folder} holds {names} of {list_some(parts, 6)}, which the script of today does "
            "not make: what a run adds to its models while it trains is not made again.\n"
            "  Nothing was changed. To do: make models as they were when it was saved, before run.steps."
        )


def _want(opened: _Opened, tensors: Tensors) -> set[str]:
    """The files that a template is read from. Raises JobError where it does not fit."""
    with _misfits_told(opened.folder):
        return list_wanted(opened.table, tensors)


def _read(opened: _Opened, tensors: Tensors, share: Sequence[str]) -> list[str]:
    """Read what this rank wants, and compare its share of the files besides; what is damaged."""
    folder, seals, table = opened.folder, opened.manifest.files, opened.table
    shards = {chunk.file for row in table.tensors.values() for chunk in row.chunks}
    with _misfits_told(folder):
        damages = read_tensors(ShardSource(folder, seals, table, [name for name in share if name in shards]), tensors)
    others = (find_damage(folder, name, seals[name]) for name in share if name not in shards)
    return [*damages, *(damage for damage in others if damage)]


def _leave_out_unsaved_state(tensors: dict[str, Any], saved: Sequence[str]) -> None:
    """Ask for no optimizer state of a parameter that has none among the sorted names `saved`.

    A parameter that no batch had used by then had none; the template made it up. A checkpoint of weights alone has no
    optimizer.
    """
    for part in [part for part in tensors if is_optimizer(part)]:
        if not _has(saved, f"{part}."):
            del tensors[part]
            continue
        states = tensors[part].get("state", {})
        for name in list(states):
            if not _saved_state(part, name, saved):
                del states[name]


def _leave_out_unsaved_generators(tensors: dict[str, Any], saved: Sequence[str]) -> None:
    """Ask for no generator that has no state among the sorted names `saved`: that of a GPU where there was none."""
    for rank, generators in tensors.get("random", {}).items():
        if not _has(saved, f"random.{rank}."):
            generators.clear()
        if not _has(saved, f"random.{rank}.cuda"):
            generators.pop("cuda", None)


def _has(saved: Sequence[str], prefix: str) -> bool:
    """Whether one of sorted names begins so."""
    at = bisect_left(saved, prefix)
    return at < len(saved) and saved[at].startswith(prefix)


def _check_nothing_is_lost(tensors: dict[str, Any], saved: Sequence[str]) -> None:
    """Raise ValueError where the optimizer of today keeps less of a parameter than the sorted names `saved` hold."""
    for part in filter(is_optimizer, tensors):
        for name in list_parameters(tensors):
            if lost := _saved_state(part, name, saved) - set(tensors[part].get("state", {}).get(name, ())):
                raise ValueError(f"it has {', '.join(sorted(lost))} of {name}, which this optimizer does not keep.")


def _saved_state(part: str, name: str, saved: Sequence[str]) -> set[str]:
    """What the sorted names `saved` hold of a parameter besides its values, such as "exp_avg"."""
    prefix = f"{part}.state.{name}."
    of_it = saved[bisect_left(saved, prefix) : bisect_left(saved, f"{prefix}\U0010ffff")]
    return {each.removeprefix(prefix).partition(".")[0] for each in of_it}


def _misfit(folder: Path, error: BaseException) -> str:
    return (
        f"the checkpoint {folder} does not fit this model or optimizer: {error}\n"
        "  To do: use the run file that it was saved with (in a script: its model and optimizer). `shardway checkpoint "
        f"export RUN FOLDER --own-names` takes its weights out. Or {START_OVER}."
    )
