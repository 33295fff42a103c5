"""Which run a person means: by its directory here, by host and directory, or by its name among those submitted.

Invariant: a word that could mean several runs is refused with all of them named. This module must not ask hosts.
"""

from __future__ import annotations

import re
from pathlib import Path

from shardway.errors import JobError, UserError
from shardway.launch.runs.registry import Known, read_known
from shardway.rundir.directory import RunDir
from shardway.rundir.look import is_there, list_names

_REMOTE = re.compile(r"(?P<host>[^/:]+):(?P<run>[/~].*)")


def find_known(word: str, registry: Path | None = None) -> Known:
    """The run that is meant. Raises UserError for none and for several."""
    remote = _REMOTE.fullmatch(word)
    if remote:
        return Known(remote["run"], remote["host"])
    path = Path(word)
    if is_run(path):
        return Known(word)
    named = [
        known
        for known in read_known(registry)
        if (Path(known.run).name == word or known.run == word) and (known.host or _may_be_run(Path(known.run)))
    ]
    if len(named) == 1:
        return named[0]
    if named:
        listed = "\n".join(f"    {render_known(known)}" for known in named)
        raise UserError(f'"{word}" is the name of {len(named)} runs; name one of them by its directory:\n{listed}')
    raise UserError(
        f"there is no run {word}.\n"
        "  Allowed: a run directory, HOST:DIRECTORY, or the name of a run that you submitted; `shardway status` lists "
        "them."
    )


def find_all(folder: Path, registry: Path | None = None) -> list[Known]:
    """The runs in a folder here, then those that were submitted from anywhere, each once."""
    here = list_runs(folder)
    places = {("", str(path.absolute())) for path in here}
    others = [
        known
        for known in read_known(registry)
        if (known.host, known.run) not in places and (known.host or _may_be_run(Path(known.run)))
    ]
    return [*(Known(str(path)) for path in here), *others]


def list_runs(folder: Path) -> list[Path]:
    """The runs in a folder here, by name; none where there is no folder. Raises JobError where it does not answer."""
    return sorted(folder / name for name in list_names(folder) if _may_be_run(folder / name))


def is_run(path: Path) -> bool:
    """Whether a folder here is a run that was trained or submitted. Raises JobError where it does not answer."""
    return RunDir(path).exists() or is_there(RunDir(path).attempts_folder)


def _may_be_run(path: Path) -> bool:
    """The same where a file system may be away: whoever looks at that run tells it, and the others are found."""
    try:
        return is_run(path)
    except JobError:
        return True


def render_known(known: Known) -> str:
    """As people name it: the directory, with its host before it where that is another one."""
    return f"{known.host}:{known.run}" if known.host else known.run
