"""Lists, describes, verifies, quarantines and copies the checkpoints of a run, without torch.

Invariants:
- A folder counts as a checkpoint by its name or its manifest, never by a guess.
- Verify: a checkpoint passes only if every file that was saved is there with the bytes that were saved.
- Describe: whatever is read for display is compared with the manifest.
- Quarantine: nothing is deleted. A damaged checkpoint is renamed only after an older one was loaded, an undone one
  before.
- Copy: the copy is compared with its checksums before it becomes a checkpoint. Files of the source are only read, and
  nothing is written outside the new folder.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from shardway.checkpoint.file_format import (
    MANIFEST,
    TABLE,
    Damaged,
    Manifest,
    TensorTable,
    find_damage,
    find_short,
    read_manifest,
    read_table,
    write_manifest,
)
from shardway.errors import JobError, UserError
from shardway.rundir.directory import RunDir
from shardway.rundir.file_io import fsync_folder
from shardway.rundir.names import find_run_id, step_of_checkpoint
from shardway.watch.progress import find_best_checkpoint

# --- the checkpoints of a run, or one by its own folder


@dataclass(frozen=True)
class FoundCheckpoint:
    """A checkpoint's folder and the step in its name; None if the folder has another name. `run`: the id of the run in
    whose directory it was found; empty if the run has no id, or if the user named the folder."""

    folder: Path
    step: int | None
    run: str = ""


@dataclass(frozen=True)
class PassedOver:
    """A checkpoint that is newer than the loaded one, and why it was not loaded."""

    step: int
    reason: str


def find_checkpoints(path: Path) -> list[FoundCheckpoint]:
    """All checkpoints of a run directory, the newest first, or the one in this folder. Raises UserError if there is
    none."""
    run = RunDir(path)
    found = [find_in_run(run, step) for step in reversed(run.checkpoint_steps())]
    step = step_of_checkpoint(path)
    if not found and path.is_dir() and (step is not None or (path / MANIFEST).exists()):
        found = [FoundCheckpoint(path, step)]
    if not found:
        raise UserError(
            f"{path} holds no checkpoint.\n  To do: name a run directory that has one (`shardway status` lists runs "
            "and their steps), or the folder of a checkpoint."
        )
    return found


def find_in_run(run: RunDir, step: int) -> FoundCheckpoint:
    """The checkpoint of a step in a run directory, whether it exists or not."""
    return FoundCheckpoint(run.checkpoint_path(step), step, find_run_id(run.path))


def find_checkpoint(path: Path, step: int | None = None) -> FoundCheckpoint:
    """The checkpoint of a step, or the newest where `step` is None. Raises UserError where there is none."""
    found = find_checkpoints(path)
    chosen = next((each for each in found if step is None or each.step == step), None)
    if chosen is None:
        steps = ", ".join(str(each.step) for each in reversed(found) if each.step is not None)
        raise UserError(f"{path} holds no checkpoint of step {step}.\n      allowed: {steps or 'no --step here'}")
    return chosen


# --- comparison with the manifest, byte by byte


@dataclass(frozen=True)
class Verified:
    """The result for one checkpoint: `reasons` is empty for a complete one, `manifest` is None if it cannot be read.
    `step` is None if neither name nor manifest has it."""

    step: int | None
    name: str
    manifest: Manifest | None
    reasons: tuple[str, ...] = ()

    @property
    def is_whole(self) -> bool:
        return not self.reasons

    def as_json(self) -> dict[str, Any]:
        manifest = self.manifest
        return {
            "step": self.step,
            "name": self.name,
            "whole": self.is_whole,
            "reasons": list(self.reasons),
            "world": manifest.world if manifest else None,
            "files": len(manifest.files) if manifest else None,
            "bytes": manifest.total_bytes if manifest else None,
        }


def verify_all(checkpoints: Iterable[FoundCheckpoint]) -> Iterator[Verified]:
    """The result for each checkpoint. Raises UserError for a newer format."""
    for found in checkpoints:
        step, manifest, reasons = found.step, None, tuple[str, ...]()
        try:
            manifest = manifest_of(found)
            step = manifest.step
            verify_found(found)
        except Damaged as damage:
            reasons = damage.reasons
        yield Verified(step, found.folder.name, manifest, reasons)


def verify_found(found: FoundCheckpoint, rank: int = 0, world: int = 1) -> Manifest:
    """Compare this rank's share of the files with the manifest. Raises Damaged that names what differs."""
    manifest = manifest_of(found)
    shares = list(manifest.files.items())[rank::world]
    damages = [damage for name, checksum in shares if (damage := find_damage(found.folder, name, checksum))]
    if damages:
        raise Damaged(found.folder, damages)
    return manifest


def verify_checkpoint(directory: RunDir, step: int, rank: int = 0, world: int = 1) -> Manifest:
    """The same of a run's checkpoint."""
    return verify_found(find_in_run(directory, step), rank, world)


def manifest_of_step(directory: RunDir, step: int) -> Manifest:
    """The manifest of a run's checkpoint; raises as `manifest_of`."""
    return manifest_of(find_in_run(directory, step))


def manifest_of(found: FoundCheckpoint) -> Manifest:
    """The manifest of a checkpoint. Raises Damaged if it cannot be read or is of another run, UserError for a newer
    format."""
    manifest = read_manifest(found.folder)
    if found.step is not None and manifest.step != found.step:
        raise Damaged(found.folder, [f"its manifest is that of step {manifest.step}"])
    if found.run and manifest.run and manifest.run != found.run:
        remedy = "`shardway checkpoint import` makes a new run of it"
        raise Damaged(found.folder, [f"it is of another run ({manifest.run}, not {found.run}): {remedy}"])
    return manifest


# --- description: manifest and table

PARTS = ("model", "optimizer", "random", "kept", "script", "stream", "order")
"""The parts of a run that a tensor may belong to; a script may keep objects, and has settings and schedulers."""


def part_of(name: str) -> str:
    """The part of the run that a name in a checkpoint belongs to: one of `PARTS`. Further models and optimizers have a
    name after a dash; `structure` states how a part is built that is no plain tree."""
    first, _, rest = name.partition(".")
    return part_of(rest) if first == "structure" else first.partition("-")[0]


VALUE = "value"  # the dtype shown for a value that is not a tensor
_EMBEDDING, _HEAD = "model.model.embed_tokens.weight", "model.lm_head.weight"


@dataclass(frozen=True)
class CheckpointHead:
    """A checkpoint and its manifest."""

    found: FoundCheckpoint
    manifest: Manifest

    def as_json(self) -> dict[str, Any]:
        """Plain data; sizes in bytes."""
        manifest = self.manifest
        return {
            "folder": str(self.found.folder),
            "run": manifest.run,
            "step": manifest.step,
            "world": manifest.world,
            "numbers": dict(manifest.numbers),
            "bytes": manifest.total_bytes,
            "files": {name: checksum.bytes for name, checksum in sorted(manifest.files.items())},
        }


@dataclass(frozen=True)
class TensorEntry:
    """One tensor as it is saved, whole: its name in the unwrapped model, its shape, its size in bytes. A value that is
    not a tensor has the dtype "value", no shape, and the size of its JSON."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int

    @property
    def part(self) -> str:
        """The part of the run it belongs to: one of `PARTS`."""
        return part_of(self.name)


def read_head(found: FoundCheckpoint) -> CheckpointHead:
    """The manifest of a checkpoint, after the size of each file and the content of the table were checked. Raises
    Damaged."""
    manifest = manifest_of(found)
    checks = {name: find_damage if name == TABLE else find_short for name in manifest.files}
    damages = [what for name, check in checks.items() if (what := check(found.folder, name, manifest.files[name]))]
    if damages:
        raise Damaged(found.folder, damages)
    return CheckpointHead(found, manifest)


def list_entries(head: CheckpointHead) -> list[TensorEntry]:
    """The tensors and values of a checkpoint, by name. Raises Damaged."""
    return make_entries(read_table(head.found.folder, head.manifest))


def list_newest(run: RunDir) -> list[TensorEntry]:
    """The entries of the newest readable checkpoint of a run; empty if there is none."""
    for step in reversed(run.checkpoint_steps()):
        with contextlib.suppress(Damaged):  # a load skips it and reports it
            return list_entries(read_head(find_in_run(run, step)))
    return []


def find_tie(run: RunDir) -> bool | None:
    """Whether the checkpoints of a Hugging Face model hold one matrix for embedding and output layer; None if no
    checkpoint shows it."""
    names = {entry.name for entry in list_newest(run)}
    return _HEAD not in names if _EMBEDDING in names else None


def make_entries(table: TensorTable) -> list[TensorEntry]:
    """The entries of a table, by name."""
    entries = [TensorEntry(name, (), VALUE, len(text)) for name, text in table.values.items()]
    for name, row in table.tensors.items():
        # Names of dtypes end with their bits, except 8-bit formats, which have a suffix.
        bits = re.search(r"\d+", row.dtype)
        item = 1 if row.dtype == "bool" else max(1, int(bits.group()) // 8) if bits else 0
        entries.append(TensorEntry(name, row.shape, row.dtype, math.prod(row.shape) * item))
    return sorted(entries, key=lambda entry: entry.name)


# --- the best one


def choose_best(run: RunDir) -> int:
    """The step of the best checkpoint by `checkpoint.monitor`. Raises UserError if none is of a validated step."""
    found = find_best_checkpoint(run)
    if found is None:
        raise UserError(
            f"no checkpoint in {run.path} is of a step that was validated, so none is the best.\n"
            "  To do: leave out --best for the newest, or name one by --step; checkpoint.keep_best in the run file "
            "keeps the best ones."
        )
    return found.step


# --- frozen weights that a checkpoint leaves out

BASE = "base"
"""The number of a checkpoint that holds the fingerprint of frozen weights which it leaves out."""


def check_base(numbers: Mapping[str, Any], today: str, place: str, changed: str, otherwise: str = "") -> None:
    """Raise UserError if a checkpoint was saved beside other frozen weights than those of `place` today."""
    if (saved := str(numbers.get(BASE, ""))) != today:
        raise UserError(
            f'the weights of model.hf = "{place}" are not those that the adapter was trained beside: their '
            f"fingerprint is {today or 'none'}, that of step {numbers['step']} is {saved or 'none'}.\n"
            f"  {changed}. To do: restore the files of the model{f', or {otherwise}' if otherwise else ''}."
        )


# --- quarantine of damaged and undone checkpoints


@dataclass(frozen=True)
class CorruptCheckpoint:
    """A quarantined checkpoint: its name, its new name, and what is wrong with it."""

    name: str
    kept_as: str
    reason: str


def quarantine(directory: RunDir, found: Sequence[PassedOver], kind: str = "damaged") -> list[CorruptCheckpoint]:
    """Rename checkpoints that are "damaged" or "undone"; called on rank 0 while it holds the writer's lock. Raises
    JobError if the file system refuses."""
    done = []
    for each in found:
        path, kept_as = directory.checkpoint_path(each.step), directory.aside_path(each.step, kind)
        try:
            os.rename(path, kept_as)
        except OSError as error:
            raise JobError(
                f"the checkpoint {path} is {kind} ({each.reason}) and cannot be renamed: {error.strerror}.\n"
                "  The run goes on from an older one. To do: move it out of the way, then run the same command again."
            ) from error
        done.append(CorruptCheckpoint(path.name, kept_as.name, each.reason))
    if done:
        fsync_folder(directory.checkpoints)
    return done


# --- a copy as the checkpoint of another run


def copy_checkpoint(found: FoundCheckpoint, directory: RunDir) -> Manifest:
    """Copy a checkpoint into a run that has none of its step. Raises Damaged, JobError if it cannot be written."""
    manifest = replace(manifest_of(found), epoch=0, run=find_run_id(directory.path))
    final, partial = directory.checkpoint_path(manifest.step), directory.partial_checkpoint_path(manifest.step)
    try:
        partial.mkdir()
        for name, checksum in manifest.files.items():
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts:
                raise Damaged(found.folder, [f"its manifest names {name}, which is not in it"])
            (partial / name).parent.mkdir(parents=True, exist_ok=True)
            try:
                shutil.copyfile(found.folder / name, partial / name)
            except FileNotFoundError:
                raise Damaged(found.folder, [f"{name} is missing"]) from None
            with open(partial / name, "rb") as file:
                os.fsync(file.fileno())
            if damage := find_damage(partial, name, checksum):
                raise Damaged(found.folder, [damage])
        write_manifest(partial, manifest)
        for within in {(partial / name).parent for name in manifest.files} | {partial}:
            fsync_folder(within)
        os.rename(partial, final)
        fsync_folder(final.parent)
    except OSError as error:
        raise JobError(f"the checkpoint {found.folder} cannot be copied: {error.strerror or error}") from error
    return manifest
