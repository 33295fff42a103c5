"""The files of a lease: who has claimed which epoch, how often it has said that it lives, who was found silent.

    epoch-000007.json   who holds epoch 7; made once, never changed
    beat-000007         how often its holder has said that it lives, and whether it has released it; replaced whole
    silent-000007       the beat at which somebody watched it for long enough without seeing another

Invariant: an epoch is claimed by at most one, since its file is made exclusively; the highest epoch counts. The newest
one is never removed, except by its own holder where it wrote nothing under it. This module must not decide who lives:
it reads and writes.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol

from shardway.rundir.atomic import render_json, write_new, write_whole
from shardway.rundir.identity import Identity

FORMAT = 1

KEPT = 8
"""How many epochs stay: somebody who was asleep while so many passed would have to claim one that is gone."""

_OF_EPOCH = re.compile(r"\.?(?:epoch-(\d{6,})\.json|(?:beat|silent)-(\d{6,}))(?:\.\w+\.tmp)?")
_CLAIM = re.compile(r"epoch-(\d{6,})\.json")


class ClaimFiles(Protocol):
    """The files of one folder. All methods raise OSError where the file system refuses."""

    def names(self) -> list[str]:
        """What the folder holds; nothing where there is none."""

    def read(self, name: str) -> str:
        """The text of a file; FileNotFoundError where there is none."""

    def create(self, name: str, text: str) -> bool:
        """Write a whole and durable file under a name that is free; whether it was."""

    def replace(self, name: str, text: str) -> None:
        """Write a whole file in place of another; it need not be durable."""

    def remove(self, name: str) -> None:
        """Remove a file."""


@dataclass(frozen=True)
class DiskFiles:
    """The files of a folder on disk; the folder is made by the first that is written."""

    folder: Path

    def names(self) -> list[str]:
        """What the folder holds; nothing where there is none."""
        try:
            return os.listdir(self.folder)
        except FileNotFoundError:
            return []

    def read(self, name: str) -> str:
        """The text of a file, whatever bytes stand in it."""
        return (self.folder / name).read_text(encoding="utf-8", errors="replace")

    def create(self, name: str, text: str) -> bool:
        """Write a whole and durable file under a name that is free; whether it was."""
        self.folder.mkdir(exist_ok=True)
        return write_new(self.folder / name, text)

    def replace(self, name: str, text: str) -> None:
        """Write a whole file in place of another, without waiting for the disk."""
        write_whole(self.folder / name, text, durable=False)

    def remove(self, name: str) -> None:
        """Remove a file."""
        (self.folder / name).unlink()


@dataclass(frozen=True)
class Claim:
    """That somebody holds an epoch. `token` is unique, `since` the date on its host, `attempt` what it is part of."""

    epoch: int
    token: str = ""
    who: Identity = field(default_factory=Identity)
    since: str = ""
    attempt: str = ""


@dataclass(frozen=True)
class Beat:
    """How often a holder has said that it lives (-1: never, or that cannot be read), and whether it has released."""

    count: int = -1
    released: bool = False


@dataclass(frozen=True)
class ClaimState:
    """The newest epoch as it stands; `silent_at` is the beat at which somebody found it silent (None: nobody did)."""

    claim: Claim
    beat: Beat
    silent_at: int | None = None

    @property
    def given_up(self) -> bool:
        """Whether its holder has released it, or has said nothing since it was found silent."""
        return self.beat.released or self.silent_at == self.beat.count


def survey(files: ClaimFiles) -> ClaimState | None:
    """The newest epoch; None where nobody has claimed any. Raises OSError."""
    epoch = newest_epoch(files.names())
    if epoch is None:
        return None
    return ClaimState(read_claim(files, epoch), read_beat(files, epoch), _read_silent(files, epoch))


def newest_epoch(names: Iterable[str]) -> int | None:
    """The highest epoch that is claimed; None for none."""
    return max((int(match[1]) for match in map(_CLAIM.fullmatch, names) if match), default=None)


def read_claim(files: ClaimFiles, epoch: int) -> Claim:
    """Who has claimed an epoch; a claim of nobody known where that cannot be understood. Raises OSError."""
    table = _parse(files.read(_claim_name(epoch)))
    who = table.get("who")
    identity = _fill(Identity, who if isinstance(who, dict) else {})
    words = {name: str(table.get(name, "")) for name in ("token", "since", "attempt")}
    return Claim(epoch, who=identity or Identity(), **words)


def write_claim(files: ClaimFiles, claim: Claim) -> bool:
    """Claim an epoch; whether it is this claim's. Raises OSError where that is not known.

    A server may tell somebody whose request was repeated that the name is taken, by itself: the file says whose it is.
    """
    text = render_json({"format": FORMAT, **asdict(claim)}, indent=1) + "\n"
    try:
        if files.create(_claim_name(claim.epoch), text):
            return True
    except OSError as error:
        with contextlib.suppress(FileNotFoundError):
            return read_claim(files, claim.epoch).token == claim.token
        raise error
    return read_claim(files, claim.epoch).token == claim.token


def read_beat(files: ClaimFiles, epoch: int) -> Beat:
    """The last beat of an epoch. Raises OSError."""
    words = _read_words(files, beat_name(epoch))
    return Beat(_whole(words), "released" in words)


def write_beat(files: ClaimFiles, epoch: int, beat: Beat) -> None:
    """Say that the holder of an epoch lives, or has released it. Raises OSError."""
    files.replace(beat_name(epoch), f"{beat.count}{' released' if beat.released else ''}\n")


def write_silent(files: ClaimFiles, standing: ClaimState) -> None:
    """Say that a holder was watched for long enough and found silent; true until it beats again. Raises OSError."""
    files.replace(_silent_name(standing.claim.epoch), f"{standing.beat.count}\n")


def remove_claim(files: ClaimFiles, epoch: int) -> None:
    """Take an epoch back, as if it had never been claimed. Raises OSError."""
    for name in (_claim_name(epoch), beat_name(epoch)):  # in this order: a claim without beats would be watched
        with contextlib.suppress(FileNotFoundError):
            files.remove(name)


def remove_old(files: ClaimFiles, epoch: int) -> None:
    """Remove what is left of epochs long before this one; what cannot be removed stays."""
    with contextlib.suppress(OSError):
        for name in files.names():
            match = _OF_EPOCH.fullmatch(name)
            if match is not None and int(match[1] or match[2]) <= epoch - KEPT:
                with contextlib.suppress(OSError):
                    files.remove(name)


def beat_name(epoch: int) -> str:
    """The name of the file of an epoch's beats."""
    return f"beat-{epoch:06d}"


def _claim_name(epoch: int) -> str:
    return f"epoch-{epoch:06d}.json"


def _silent_name(epoch: int) -> str:
    return f"silent-{epoch:06d}"


def _read_silent(files: ClaimFiles, epoch: int) -> int | None:
    words = _read_words(files, _silent_name(epoch))
    return _whole(words) if words else None


def _read_words(files: ClaimFiles, name: str) -> list[str]:
    try:
        return files.read(name).split()
    except FileNotFoundError:
        return []


def _whole(words: list[str]) -> int:
    return int(words[0]) if words and words[0].isdecimal() else -1


def _parse(text: str) -> dict[str, Any]:
    try:
        table = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return table if isinstance(table, dict) else {}


def _fill(kind: type[Identity], table: dict[str, Any]) -> Identity | None:
    """An identity from plain data; None where a field is of another type."""
    kinds = {entry.name: type(entry.default) for entry in fields(kind)}
    known = {name: value for name, value in table.items() if name in kinds}
    return kind(**known) if all(type(value) is kinds[name] for name, value in known.items()) else None
