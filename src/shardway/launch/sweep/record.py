"""The record of a sweep (`sweep.json`), and the requests of its members.

Invariants:
- The record says everything that a member is made of: the run file, the words that all share, its own values.
- A sweep grows only at its end: a member that is recorded keeps its name and values.
- A record that cannot be read is refused, and never taken for "no sweep".
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from shardway.errors import JobError, UserError
from shardway.launch.hosts.base import Host
from shardway.rundir.file_io import is_there
from shardway.rundir.sweep import SweepDir

if TYPE_CHECKING:  # verbs that look for a sweep and find none need none of it
    from shardway.launch.submission.prepare import SubmitRequest
    from shardway.launch.sweep.axes import Values

FORMAT = 1


@dataclass(frozen=True)
class Member:
    """One run of a sweep: the name of its folder, and its own values."""

    name: str
    values: Values


@dataclass(frozen=True)
class SweepRecord:
    """A sweep as it was asked for.

    `run_file`: its whole path ("": the default run), `base`: the SHA-256 of its text. `shared`: the words that all
    members have. `axes`: key -> text of each axis. `site`: that of --on; `here`: the folder of the command. `at_once`:
    how many jobs may run at one time, 0 for no limit. `follows`: the run that has to be finished first, "" for none.
    `created`: Unix seconds.
    """

    name: str
    search: str
    run_file: str
    base: str
    shared: tuple[str, ...]
    axes: Mapping[str, str]
    members: tuple[Member, ...]
    site: str = ""
    here: str = ""
    until_done: bool = False
    max_attempts: int = 0
    at_once: int = 0
    follows: str = ""
    seed: int = 0
    created: float = 0.0
    format: int = field(default=FORMAT)

    def find_member(self, name: str) -> Member | None:
        """The member of that name."""
        return next((member for member in self.members if member.name == name), None)

    @property
    def keys(self) -> list[str]:
        """The keys that differ between members, in the order of the command."""
        return list(dict.fromkeys([*self.axes, *(key for member in self.members for key in member.values)]))

    def make_request(self, folder: Path, member: Member) -> SubmitRequest:
        """The submission of one member."""
        from shardway.launch.submission.prepare import SubmitRequest
        from shardway.launch.sweep.axes import render_words
        from shardway.resolve.request import ResolveRequest

        words = (*self.shared, *render_words(member.values))
        run_file = Path(self.run_file) if self.run_file else None
        return SubmitRequest(
            ResolveRequest(run_file, words, folder / member.name),
            site=self.site,
            until_done=self.until_done,
            max_attempts=self.max_attempts,
            here=Path(self.here),
            follows=Path(self.follows) if self.follows else None,
        )

    def find_difference(self, other: SweepRecord) -> str:
        """How another sweep differs from this one, "" where it is the same or has further members."""
        if self.base != other.base:
            return "the run file has changed since"
        if self.shared != other.shared:
            return f"it has {' '.join(self.shared) or 'no further keys'}, and not {' '.join(other.shared) or 'none'}"
        if [member.values for member in self.members] != [
            member.values for member in other.members[: len(self.members)]
        ]:
            axes = " ".join(f"{key}={text}" for key, text in self.axes.items())
            return f"its runs have other values ({axes or self.search})"
        return ""


def name_members(rows: Sequence[Values], first: int = 0) -> tuple[Member, ...]:
    """Members with the names 000, 001 ..., in the order of the rows."""
    return tuple(Member(f"{number:03d}", dict(values)) for number, values in enumerate(rows, first))


def hash_text(path: Path | None) -> str:
    """The SHA-256 of a run file, "" for none."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if path is not None else ""


# --- on the host of the runs


def read_sweep(host: Host, folder: Path) -> SweepRecord | None:
    """The sweep in a folder; None where there is none. Raises JobError for a record that is damaged, or of a later
    version."""
    path = PurePosixPath(SweepDir(folder).record_path)
    text = host.read_files([path]).get(path)
    return None if text is None else parse_sweep(text, folder)


def parse_sweep(text: str, folder: Path) -> SweepRecord:
    """The record in a text. Raises JobError."""
    path = SweepDir(folder).record_path
    try:
        table: dict[str, Any] = json.loads(text)
        if table["format"] != FORMAT:
            raise JobError(
                f"{path} has format {table['format']}, and this Shardway reads {FORMAT}.\n  To do: update it."
            )
        members = tuple(
            Member(str(each["name"]), {str(key): str(value) for key, value in each["values"].items()})
            for each in table["members"]
        )
        if any(not member.name.isdecimal() for member in members):
            raise ValueError("the name of a member is no number")
        known = {name: table[name] for name in SweepRecord.__dataclass_fields__ if name in table}
        return SweepRecord(**{**known, "members": members, "shared": tuple(table["shared"])})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise JobError(
            f"{path} is damaged ({type(error).__name__}: {error}).\n"
            "  Its runs are untouched. To do: name them one by one (`shardway status RUN`), or put the file back."
        ) from None


def write_sweep(host: Host, folder: Path, record: SweepRecord) -> None:
    """Write the record whole. Raises UserError where the file system refuses it."""
    text = json.dumps(asdict(record), indent=1, ensure_ascii=False) + "\n"
    host.write_files({PurePosixPath(SweepDir(folder).record_path): text})


def remove_sweep(host: Host, folder: Path) -> None:
    """Take the record away, and the folder if nothing else is in it: nothing of the sweep was submitted."""
    host.run_many([("rm", "-f", str(SweepDir(folder).record_path)), ("rmdir", str(folder))])


@dataclass(frozen=True)
class FoundSweep:
    """A sweep that a word names, its folder on its host, and its record."""

    host: Host
    folder: Path
    record: SweepRecord


def find_sweep(word: str) -> FoundSweep | None:
    """The sweep that a word means: its folder, HOST:FOLDER, or the name of one in ./runs; None where that is none."""
    from shardway.launch.hosts import find_host

    remote = re.fullmatch(r"(?P<host>[^/:]+):(?P<folder>[/~].*)", word)
    if remote and not os.path.lexists(word):
        host = find_host(remote["host"])
        folder = Path(str(host.expand(remote["folder"])))
        record = read_sweep(host, folder)
        return FoundSweep(host, folder, record) if record else None
    place = Path(word) if "/" in word or os.path.isdir(word) else Path("runs", word)
    if not is_there(SweepDir(place).record_path):
        return None
    host, folder = find_host(""), Path(os.path.abspath(place))
    record = read_sweep(host, folder)
    return FoundSweep(host, folder, record) if record else None


def merge_sweeps(known: SweepRecord | None, wanted: SweepRecord, folder: Path) -> SweepRecord:
    """What to go on with where a folder has a sweep already. Raises UserError where that is another one."""
    if known is None:
        return wanted
    if why := known.find_difference(wanted):
        raise UserError(
            f"{folder} holds another sweep: {why}.\n"
            "  Nothing was submitted. To do: name this one (run.name=NAME, --dir FOLDER); "
            f"`shardway status {shlex.quote(str(folder))}` shows that one."
        )
    members = wanted.members if len(wanted.members) > len(known.members) else known.members
    return replace(
        known,
        members=members,
        at_once=wanted.at_once or known.at_once,
        until_done=wanted.until_done,
        max_attempts=wanted.max_attempts,
        follows=wanted.follows,
    )
