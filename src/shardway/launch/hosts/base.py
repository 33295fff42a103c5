"""What a host does for us: run a command, take files, give files.

Invariant: a command is a list of words, never a text that a shell takes apart; each has a time limit. This module
must not know what the commands mean.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Protocol

from shardway.errors import SiteError


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
    """This machine or one behind ssh."""

    name: str
    """ "" for this machine, else as ssh knows it: "alice@login.example.org"."""

    def run(self, words: Sequence[str], *, timeout_s: float = 30.0, stdin: str = "") -> Done:
        """Run a command to its end. A missing program is code 127. Raises HostUnreachable."""
        ...

    def run_many(self, commands: Sequence[Sequence[str]], *, timeout_s: float = 60.0) -> list[Done]:
        """Run several commands in a row over one connection; each runs whatever became of the one before."""
        ...

    def follow(self, words: Sequence[str]) -> Iterator[str]:
        """Run a command and yield its output line by line as it comes, until it ends or the iterator is closed."""
        ...

    def read_files(self, paths: Sequence[PurePosixPath]) -> dict[PurePosixPath, str]:
        """The text of each of these files that is there and can be read, in one exchange; bytes that are no UTF-8 are
        replaced."""
        ...

    def write_files(self, files: Mapping[PurePosixPath, str], *, executable: Sequence[PurePosixPath] = ()) -> None:
        """Write whole files (folders are made), each to appear complete or not at all. Raises UserError where the
        file system refuses it (no space, no permission), with the path and the reason."""
        ...

    def copy_tree(self, source: Path, target: PurePosixPath) -> None:
        """Copy a local folder (with its links) to a folder of the host that does not exist yet."""
        ...

    def read_options(self) -> dict[str, str]:
        """Variables that hold options for sbatch (`inherited.list_options`), which no command of this host gets."""
        ...

    def expand(self, path: str) -> PurePosixPath:
        """An absolute path on the host: `~` and `$VARIABLES` are the host's, a relative path is below the current
        folder here, or the home folder there."""
        ...

    def expand_many(self, paths: Sequence[str]) -> list[PurePosixPath]:
        """The same of several paths, in one exchange."""
        ...
