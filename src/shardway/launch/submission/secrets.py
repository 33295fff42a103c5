"""The person's file of secrets on the host where the job runs: which names it sets, and what is wrong with it.

The host itself reads it, with the very function that the job uses (`launch/shell/secret_lines.sh`): one rule for both.

Invariant: of the file only names and numbers of lines come back, never a value or the text of a line. This module must
not write.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

from shardway.errors import Problem
from shardway.launch.blocks import read_block
from shardway.launch.hosts.base import Host
from shardway.launch.job import SECRETS

_TELL = """
read_secrets "$0" 2> /dev/null
printf '%s\\n' "${secret_faults[*]}" "${secret_names[@]}"
"""


@dataclass(frozen=True)
class Secrets:
    """Names of what a secrets file sets, and numbers of lines that set nothing. `is_open`: people other than its owner
    can read it."""

    names: tuple[str, ...] = ()
    faults: tuple[int, ...] = ()
    is_open: bool = False

    @property
    def warnings(self) -> tuple[str, ...]:
        """What its owner should know."""
        return (f"others can read {SECRETS}; close it: `chmod 600 {SECRETS}`",) if self.is_open else ()

    def list_problems(self) -> Iterator[Problem]:
        """A line that the job would pass over, by its number alone."""
        for number in self.faults:
            yield Problem(
                f"{SECRETS}, line {number}",
                "it sets no variable that a job may set (its text is not shown)",
                allowed="NAME=value, the name of letters, digits and _, and none that bash keeps for itself",
                remedy="correct that line, or put # before it",
            )


def read_secrets(host: Host, path: PurePosixPath) -> Secrets:
    """What the secrets file on the host sets, and whether others can read it; nothing where there is none."""
    shell = read_block("secret_lines", "read_secrets").text + _TELL
    told, mode = host.run_many([("bash", "-c", shell, str(path)), ("stat", "-c", "%a", str(path))])
    if not told.ok:
        return Secrets()
    faults, *names = told.out.splitlines()
    is_open = mode.ok and not mode.out.strip().endswith("00")
    return Secrets(tuple(dict.fromkeys(filter(None, names))), tuple(map(int, faults.split())), is_open)
