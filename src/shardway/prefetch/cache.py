"""The cache of Hugging Face's hub on this machine: where it is, how a name is written, which snapshot a name leads to,
and the record that prefetch leaves of what it fetched.

Invariants:
- The layout is the hub's own (models--ORG--NAME with blobs, refs, snapshots), so that every library finds what lies
  there. The record is one file more, which others pass over.
- Looking up writes nothing, needs no network and imports nothing beyond the standard library.

Source: huggingface_hub 2.4, constants.py (the order of the variables) and file_download.py (the layout).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shardway.errors import Problem, SiteError, UserError, render_problems
from shardway.hfconfig import COMMIT, HUB_CACHES, OFFLINE_VARIABLES, RECORDS, parse_snapshot
from shardway.places import expand_home, expand_place, find_home, list_variables
from shardway.rundir.file_io import write_json

# --- where it is

_TRUE = ("1", "ON", "YES", "TRUE")


@dataclass(frozen=True)
class HubCache:
    """The folder of a cache, and what decides that it is this one: "HF_HOME", "HF_HOME of site.environment"."""

    folder: Path
    origin: str

    def repo(self, name: HubName) -> CachedRepo:
        """The part of a repository, which may not be there."""
        return CachedRepo(self.folder / f"{name.kind}s--{name.repo.replace('/', '--')}")


def find_cache(of_job: Mapping[str, str] | None = None, source: str = "the job's environment") -> HubCache:
    """The cache that the libraries of a job use. `of_job`: variables that the job gets from `source` over those of this
    process, which the shell of the job expands.

    Raises UserError for a variable that is not set here, SiteError for an account without a home.
    """
    for name, below in HUB_CACHES.items():
        origin = f"{name} of {source}" if of_job and name in of_job else name
        value = of_job[name] if of_job and name in of_job else os.environ.get(name, "")
        if not value:
            continue
        filled = os.path.expandvars(str(expand_home(value)))
        if unset := list_variables(filled):
            raise UserError(
                f"{origin} is {value}, and ${unset[0]} is not set here.\n  To do: set {unset[0]}, or HF_HUB_CACHE."
            )
        return HubCache(Path(os.path.abspath(filled)) / below, origin)
    home = find_home()
    if home is None:
        raise SiteError("this account has no home folder for a cache of the hub.\n  To do: set HF_HOME to a folder.")
    return HubCache(home / ".cache" / "huggingface" / "hub", "the default")


def is_offline(variables: Mapping[str, str] | None = None) -> bool:
    """Whether variables (default: those of this process) forbid the hub's library to use the network."""
    found = os.environ if variables is None else variables
    return any(found.get(name, "").upper() in _TRUE for name in OFFLINE_VARIABLES[:2])


# --- names

Kind = Literal["model", "dataset"]
_NAME = re.compile(r"[A-Za-z0-9_](?:[\w.-]*\w)?(?:/[A-Za-z0-9_](?:[\w.-]*\w)?)?", re.ASCII)


@dataclass(frozen=True)
class HubName:
    """A repository of the hub, "org/name", at a revision; "" is the main branch."""

    repo: str
    revision: str = ""
    kind: Kind = "model"

    def __str__(self) -> str:
        return f"{self.repo}@{self.revision}" if self.revision else self.repo


def parse_hub_name(text: str, where: str, kind: Kind = "model") -> HubName:
    """The repository in "org/name" or "org/name@revision". `where`: the key or option that has it, for messages. Raises
    UserError for anything else."""
    repo, at, revision = text.partition("@")
    valid = _NAME.fullmatch(repo) and "--" not in repo and ".." not in repo
    if not valid or (at and not re.fullmatch(r"[\w./-]+", revision)) or ".." in revision or revision.startswith("/"):
        allowed = f"org/name or org/name@revision of a {kind}"
        problem = Problem(where, f'"{text}" is no name of the hub', allowed=allowed)
        raise UserError(render_problems("what is to be fetched", [problem]), [problem])
    return HubName(repo, revision, kind)


def find_hub_name(hf: str) -> HubName | None:
    """The repository that model.hf names; None where it is a folder, or no name of the hub, as `locate_model` takes
    it."""
    if not hf or hf.startswith(("/", ".", "~")) or hf.count("/") > 1 or "$" in hf or os.path.lexists(expand_place(hf)):
        return None
    try:
        return parse_hub_name(hf, "model.hf")
    except UserError:
        return None


def name_of_snapshot(path: str | Path) -> HubName | None:
    """The repository and commit whose snapshot a path is, by the names of its folders; None for another folder."""
    found = parse_snapshot(str(path))
    if found is None:
        return None
    kind: Kind = "model" if found[0] == "model" else "dataset"
    return HubName(found[1], found[2], kind)


# --- one repository in the cache


@dataclass(frozen=True)
class RecordedFile:
    """A file as the hub lists it: bytes, and the digest that names its blob (SHA-256 of large files, git's SHA-1 of a
    blob for small ones)."""

    size: int
    digest: str


@dataclass(frozen=True)
class CachedRepo:
    """The folder of a repository in the cache."""

    folder: Path

    def find_commit(self, revision: str) -> str:
        """The commit that a revision means here: itself, or what refs/ says; "" where that is not known."""
        if COMMIT.fullmatch(revision):
            return revision
        try:
            text = (self.folder / "refs" / (revision or "main")).read_text(encoding="utf-8").strip()
        except (OSError, ValueError):
            return ""
        return text if COMMIT.fullmatch(text) else ""

    def snapshot(self, commit: str) -> Path:
        return self.folder / "snapshots" / commit

    def blob(self, digest: str) -> Path:
        return self.folder / "blobs" / digest

    def partial(self, digest: str) -> Path:
        """What there is of a blob that is being fetched, or whose fetch was cut."""
        return self.folder / "blobs" / f"{digest}.shardway.incomplete"

    def record_path(self, commit: str) -> Path:
        return self.folder / RECORDS / f"{commit}.json"

    def read_record(self, commit: str) -> dict[str, RecordedFile]:
        """The files that prefetch fetched of a commit, by name; those that the hub's own library noted, as far as they
        are here, where prefetch left no record."""
        recorded = _read_files(self.record_path(commit))
        if recorded:
            return recorded
        noted, snapshot = _read_files(self.folder / "trees" / f"{commit}.json"), self.snapshot(commit)
        return {path: file for path, file in noted.items() if os.path.lexists(snapshot / path)}

    def write_record(self, commit: str, files: Mapping[str, RecordedFile]) -> None:
        """Add files to the record of a commit. Raises OSError where it cannot be written."""
        path = self.record_path(commit)
        before = _read_files(path)
        both = {**before, **files}
        if both == before:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        table = {name: {"size": both[name].size, "blob_id": both[name].digest} for name in sorted(both)}
        write_json(path, {"format": 1, "files": table})


def _read_files(path: Path) -> dict[str, RecordedFile]:
    """Files in a record of ours or of the hub's library (trees/COMMIT.json), which have the same keys; empty where
    there is none that can be read."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))["files"]
        return {name: _read_file(facts) for name, facts in table.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}


def _read_file(facts: Mapping[str, Any]) -> RecordedFile:
    large = facts.get("lfs_sha256")
    return RecordedFile(int(facts.get("lfs_size") or facts["size"]), str(large or facts["blob_id"]))
