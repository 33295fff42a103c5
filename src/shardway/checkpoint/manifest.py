"""The manifest: which files a checkpoint consists of, their sizes and checksums, and the numbers of the run.

Invariant: a folder without a manifest is no checkpoint; a file that is not what the manifest says is damage. This
module must not read tensors.

torch's own formats load a flipped bit or a zeroed page without a word, so each file carries an XXH3-128 checksum
(https://xxhash.com), which costs far less than reading the file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from shardway.errors import JobError, UserError
from shardway.rundir.atomic import write_json

FORMAT = 1
NAME = "manifest.json"
_BLOCK = 2**20
"""Small enough to stay in a core's cache between reading and hashing."""


@dataclass(frozen=True)
class Seal:
    """Size and checksum of one file."""

    bytes: int
    xxh3: str


@dataclass(frozen=True)
class Manifest:
    """`numbers` are the run's counters at `step`; `world` is how many ranks wrote the files."""

    step: int
    world: int
    numbers: Mapping[str, Any]
    files: Mapping[str, Seal]

    @property
    def total_bytes(self) -> int:
        """Size of all files together."""
        return sum(seal.bytes for seal in self.files.values())


class Damaged(JobError):
    """A checkpoint is not what was saved; `reasons` say what of it."""

    def __init__(self, folder: Path, reasons: Sequence[str]) -> None:
        self.reasons = tuple(reasons)
        super().__init__(f"the checkpoint {folder} is damaged: {'; '.join(reasons)}.")


def seal_file(path: Path) -> Seal:
    """Read a whole file and compute its seal."""
    digest, size, block = xxhash.xxh3_128(), 0, memoryview(bytearray(_BLOCK))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(block):
            digest.update(block[:count])
            size += count
    return Seal(size, digest.hexdigest())


def list_files(folder: Path) -> list[str]:
    """The files in a folder and in the folders within, as paths from it, in the same order on every rank."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest into a folder whose files are all there."""
    files = {name: {"bytes": seal.bytes, "xxh3": seal.xxh3} for name, seal in sorted(manifest.files.items())}
    content = {"format": FORMAT, "step": manifest.step, "world": manifest.world, "numbers": dict(manifest.numbers)}
    write_json(folder / NAME, {**content, "files": files})


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint. Raises Damaged where it cannot be read, UserError for a newer format."""
    try:
        content = json.loads((folder / NAME).read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise UserError(
                f"the checkpoint {folder} has format {content['format']}; this Shardway reads format {FORMAT}.\n"
                "  Nothing in it was changed. To do: update Shardway."
            )
        files = {name: Seal(int(seal["bytes"]), str(seal["xxh3"])) for name, seal in content["files"].items()}
        return Manifest(int(content["step"]), int(content["world"]), dict(content["numbers"]), files)
    except FileNotFoundError:
        raise Damaged(folder, [f"its {NAME} is missing"]) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(folder, [f"its {NAME} cannot be read ({error})"]) from None


def find_damage(folder: Path, name: str, seal: Seal) -> str | None:
    """What is wrong with one file of a checkpoint, or None."""
    path = folder / name
    try:
        found = seal_file(path)
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"
    if found.bytes != seal.bytes:
        return _say_size(name, found.bytes, seal)
    return None if found == seal else f"the content of {name} has changed (its checksum is another)"


def find_short(folder: Path, name: str, seal: Seal) -> str | None:
    """What is wrong with the size of one file of a checkpoint, or None; its content is not read."""
    try:
        size = (folder / name).stat().st_size
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"
    return None if size == seal.bytes else _say_size(name, size, seal)


def _say_size(name: str, size: int, seal: Seal) -> str:
    return f"{name} has {size} bytes, the manifest says {seal.bytes}"
