"""A host: it runs commands, takes and gives files; `user@host:SITE`, and `~` or `$VARIABLES` of paths, are read here.

Invariants:
- A command is a list of words, never text for a shell to split; each has a time limit.
- An accepted host name is one word, and no option of ssh.
- Nothing of a path is run: `$(...)`, backquotes and globs stay literal.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Protocol

from shardway import places
from shardway.errors import SiteError, UserError


class HostUnreachable(SiteError):
    """The host did not answer; nothing is known of what it did."""


@dataclass(frozen=True)
class Done:
    """How a command ended. `timed_out`: it was ended because its time was over, and may have had an effect."""

    words: tuple[str, ...]
    code: int
    out: str
    err: str
    timed_out: bool = False

    @property
    def ok(self) -> bool:
        """Whether it ended with 0 in time."""
        return self.code == 0 and not self.timed_out


MISSING = 127
"""Code of a command that does not exist, as a shell gives it."""


class Host(Protocol):
    """This machine or one behind ssh, of which each method raises HostUnreachable."""

    name: str
    """ "" for this machine, else as ssh knows it: "alice@login.example.org"."""

    def run(self, words: Sequence[str], *, timeout_s: float = 30.0, stdin: str = "") -> Done:
        """Run a command to its end, or for `timeout_s` seconds. A missing program is code 127."""

    def run_many(self, commands: Sequence[Sequence[str]], *, timeout_s: float = 60.0) -> list[Done]:
        """Run several commands in a row over one connection; each runs whatever the result of the one before."""

    def follow(self, words: Sequence[str]) -> Iterator[str]:
        """Run a command and yield its output line by line as it comes, until it ends or the iterator is closed."""

    def attach(self, words: Sequence[str], *, terminal: bool) -> list[str]:
        """The words by which this machine runs a command there with its own input, output and, where wanted, terminal;
        the code with which they end is the command's."""

    def read_files(self, paths: Sequence[PurePosixPath]) -> dict[PurePosixPath, str]:
        """The text of each of these files that is there and can be read, in one exchange; bytes that are no UTF-8 are
        replaced."""

    def write_files(self, files: Mapping[PurePosixPath, str], *, executable: Sequence[PurePosixPath] = ()) -> None:
        """Write whole files (folders are made), each to appear complete or not at all. Raises UserError where the
        file system refuses it (no space, no permission), with the path and the reason."""

    def copy_tree(self, source: Path, target: PurePosixPath) -> None:
        """Copy a local folder (with its links) to a folder of the host. Raises UserError where that exists or cannot be
        written."""

    def read_options(self) -> dict[str, str]:
        """Variables with options for a scheduler (`inherited.list_options`), which no command of this host gets."""

    def expand(self, path: str) -> PurePosixPath:
        """An absolute path on the host: `~` and `$VARIABLES` are the host's, a relative path is below the current
        folder here, or the home folder there. Raises UserError."""
        return self.expand_many([path])[0]

    def expand_many(self, paths: Sequence[str]) -> list[PurePosixPath]:
        """The same of several paths, in one exchange."""


# --- the words `user@host:SITE`

_HOST = re.compile(r"([A-Za-z0-9_.+@\\%-]+@)?([A-Za-z0-9_.-]+|[0-9A-Fa-f:.%a-z]*:[0-9A-Fa-f:.%a-z]*)")
_SHAPE = re.compile(r"(?P<host>[^\[\]:]+|(?:[^\[\]:]*@)?\[[^\[\]]+\]):(?P<site>.*)")


@dataclass(frozen=True)
class Target:
    """Where a job goes: `host` as ssh takes it, empty for this machine; `site` a profile, empty where none is named."""

    host: str
    site: str


def parse_target(text: str) -> Target:
    """What `--on` names: "SITE", "HOST:SITE", "USER@HOST:SITE" or "USER@HOST"; an IPv6 address stands in brackets.

    A word without ":" and "@" is a site, and so is a path ("./mine.toml", "/sites/mine.toml"). Raises UserError for
    a host that ssh would not take as one.
    """
    text = text.strip()
    if text.startswith((".", "/", "~")):
        return Target("", text)
    if "://" in text:
        raise UserError(
            f"--on {text}: a URL is no place for a job.\n"
            "  Allowed: SITE, HOST:SITE or USER@HOST:SITE.\n"
            "  To do: give the port, a jump host or a key to the host in ~/.ssh/config, and name the host here."
        )
    host, site = (text, "") if "@" in text else ("", text)
    if match := _SHAPE.fullmatch(text):
        host, site = match["host"].replace("[", "").replace("]", ""), match["site"]
    if (match or host) and (host.startswith("-") or "@-" in host or not _HOST.fullmatch(host)):
        raise UserError(
            f"--on {text}: {host!r} is no name of a host.\n"
            "  Allowed: letters, digits and . _ - in the name, with USER@ before it where you need one.\n"
            "  To do: check the name, or give the host a name of your own in ~/.ssh/config."
        )
    return Target(host, site)


# --- expansion of `~` and `$VARIABLES` in a path


def list_variables(path: str) -> list[str]:
    """Names of the variables in a path, HOME for a leading `~`."""
    home = ["HOME"] if path == "~" or path.startswith("~/") else []
    return list(dict.fromkeys([*home, *places.list_variables(path)]))


def fill_in(path: str, values: Mapping[str, str], base: str, host: str) -> PurePosixPath:
    """The absolute path; a relative one is below `base`.

    Raises UserError for a variable that the host does not set, and for `~other`, whose folder cannot be checked.
    """
    if path == "~" or path.startswith("~/"):
        path = "${HOME}" + path[1:]
    elif path.startswith("~"):
        raise UserError(f"the path {path}: only your own `~` is known.\n  To do: write that folder out.")
    missing = [name for name in list_variables(path) if not values.get(name)]
    if missing:
        where = host or "this machine"
        raise UserError(
            f"the path {path}: ${missing[0]} is not set on {where}.\n"
            "  To do: write the folder out, or set the variable there."
        )
    whole = places.fill_variables(path, values)
    # POSIX keeps two leading slashes, which are never meant.
    return PurePosixPath("/" + posixpath.normpath(posixpath.join(base, whole)).lstrip("/"))
