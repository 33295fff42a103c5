"""The manifest: which files a checkpoint consists of, their seals, and the numbers of the run.

Invariant: a folder without a manifest is no checkpoint; a file that is not what the manifest says is damage. So is a
manifest that does not say what it said: it has a checksum of its own. This module must not read tensors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from shardway.checkpoint.checksum import BLOCK, FileChecksum
from shardway.errors import JobError, UserError
from shardway.rundir.atomic import render_json, write_json
from shardway.rundir.look import check_answers

FORMAT = 2
NAME = "manifest.json"


@dataclass(frozen=True)
class Manifest:
    """`numbers` are the run's counters at `step`; `world` is how many ranks wrote the files.

    `epoch` is that of the writer's lease; 0 where it had none. `run` is the id of the run; empty in older ones.
    """

    step: int
    world: int
    numbers: Mapping[str, Any]
    files: Mapping[str, FileChecksum]
    epoch: int = 0
    run: str = ""

    @property
    def total_bytes(self) -> int:
        """Size of all files together."""
        return sum(seal.bytes for seal in self.files.values())


class Damaged(JobError):
    """A checkpoint is not what was saved; `reasons` say what of it."""

    def __init__(self, folder: Path, reasons: Sequence[str]) -> None:
        self.reasons = tuple(reasons)
        super().__init__(f"the checkpoint {folder} is damaged: {'; '.join(reasons)}.")


def list_files(folder: Path) -> list[str]:
    """The files in a folder and in the folders within, as paths from it, in the same order on every rank."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest into a folder whose files are all there."""
    content = _content_of(manifest)
    write_json(folder / NAME, {**content, "xxh3": _digest(content)})


def digest_manifest(manifest: Manifest) -> str:
    """A checksum of all that a manifest says, the same as stands in its file."""
    return _digest(_content_of(manifest))


def _content_of(manifest: Manifest) -> dict[str, Any]:
    files = {name: {"bytes": seal.bytes, "xxh3": seal.blocks} for name, seal in sorted(manifest.files.items())}
    head = {"format": FORMAT, "step": manifest.step, "world": manifest.world, "epoch": manifest.epoch}
    return {**head, "run": manifest.run, "numbers": dict(manifest.numbers), "block_bytes": BLOCK, "files": files}


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint. Raises Damaged where it cannot be read, UserError for another format."""
    try:
        content = json.loads((folder / NAME).read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise UserError(_other_format(folder, content["format"]))
        if content.pop("xxh3") != _digest(content):
            raise Damaged(folder, [f"its {NAME} has changed (its checksum is another)"])
        files = {name: _read_seal(name, seal) for name, seal in content["files"].items()}
        numbers, epoch = dict(content["numbers"]), int(content["epoch"])
        run = str(content.get("run", ""))
        return Manifest(int(content["step"]), int(content["world"]), numbers, files, epoch, run)
    except FileNotFoundError:
        raise Damaged(folder, [f"its {NAME} is missing"]) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        check_answers(folder / NAME, error)
        raise Damaged(folder, [f"its {NAME} cannot be read ({error})"]) from None


def _digest(content: Mapping[str, Any]) -> str:
    """Of what a manifest says, however that is written; what is not finite is written as null."""
    return xxhash.xxh3_128_hexdigest(render_json(content, sort_keys=True).encode())


def _read_seal(name: str, seal: Mapping[str, Any]) -> FileChecksum:
    found = FileChecksum(int(seal["bytes"]), tuple(map(str, seal["xxh3"])))
    if len(found.blocks) != -(-found.bytes // BLOCK):
        raise ValueError(f"{name} has {len(found.blocks)} checksums for {found.bytes} bytes")
    return found


def _other_format(folder: Path, found: Any) -> str:
    remedy = "update Shardway" if isinstance(found, int) and found > FORMAT else "use the Shardway that saved it"
    return (
        f"the checkpoint {folder} has format {found}; this Shardway reads format {FORMAT}.\n"
        f"  Nothing in it was changed. To do: {remedy}."
    )
