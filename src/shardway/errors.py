"""The error tree, by the party that can act.

    ShardwayError
    ├── UserError   exit 2    the user can fix it: a run file, a path, an option
    ├── SiteError   exit 3    the machine or its profile has to change: scheduler, devices, ports
    ├── JobError    exit 4    the job went wrong while it ran: a rank died, a checkpoint is damaged, no space
    │   ├── LostContact       another rank is gone or silent: the consequence of that rank's error, not a cause
    │   └── Fenced            another run has taken the run directory over: nothing more may be written
    └── Bug         exit 70   Shardway itself is wrong; the message asks for a report

Invariant: a message is complete: what happened, the value and where it came from, what is allowed, what to do. This
module imports nothing of Shardway and prints nothing.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


class ShardwayError(Exception):
    """Base of every error that Shardway raises on purpose; `exit_code` is what the command line returns."""

    exit_code = 70


class _MessageAlone:
    """Shows the message without a traceback in a notebook; the message is complete."""

    def _render_traceback_(self) -> list[str]:
        """What IPython shows in place of a traceback; IPython looks for this name."""
        return [f"shardway: {legible(str(self))}"]


class UserError(_MessageAlone, ShardwayError):
    """Something that the user can fix; `problems` holds the parts of a message that counts several."""

    exit_code = 2

    def __init__(self, message: str = "", problems: Sequence[Problem] = ()) -> None:
        super().__init__(message)
        self.problems = tuple(problems)


class SiteError(_MessageAlone, ShardwayError):
    """Something that the machine or its profile lacks."""

    exit_code = 3


class JobError(_MessageAlone, ShardwayError):
    """Something that went wrong while the job ran."""

    exit_code = 4


class LostContact(JobError):
    """Another rank is gone or silent. That rank's own error is the cause to look for first."""


class NodeLost(JobError):
    """A node of the job no longer answers."""


class Fenced(JobError):
    """This run no longer holds its run directory: nothing may be written there any more, not even the reason."""


class LateStop(JobError):
    """A requested stop took longer than allowed, so the ranks were ended; nothing restarts automatically."""


class Bug(ShardwayError):
    """A state that must never be reached."""


ERRORS_BY_NAME: dict[str, type[ShardwayError]] = {
    cls.__name__: cls for cls in (UserError, SiteError, JobError, LostContact, NodeLost, Fenced, LateStop, Bug)
}
"""Name -> class, so that an error recorded by one rank can be raised again by the process that started it."""


@contextlib.contextmanager
def in_words_of_scripts() -> Iterator[None]:
    """In this context errors name the arguments of `shardway.start` in place of the options of the command line, which
    a script does not have; commands (in backticks) stay as they are."""
    try:
        yield
    except ShardwayError as error:
        parts = str(error).split("`")
        for option, argument in _OF_SCRIPTS.items():
            parts[::2] = [re.sub(rf"(?<![\w-]){option}\b", argument, part) for part in parts[::2]]
        error.args = ("`".join(parts), *error.args[1:])
        raise


_OF_SCRIPTS = {"--dir": "shardway.start(directory=...)", "--fresh": "shardway.start(fresh=True)"}


@dataclass(frozen=True)
class Problem:
    """One thing wrong with the user's input.

    `where` is the key or file, `origin` where its value came from ("run.toml:12", "command line"), `what` a sentence
    with the value in it, `allowed` what is valid instead, `remedy` what to do.
    """

    where: str
    what: str
    origin: str = ""
    allowed: str = ""
    remedy: str = ""

    def render(self) -> str:
        """The problem as indented lines, without a trailing newline."""
        head = f"  {self.where} ({self.origin}): {self.what}" if self.origin else f"  {self.where}: {self.what}"
        tail = [f"      allowed: {self.allowed}"] if self.allowed else []
        tail += [f"      to do: {self.remedy}"] if self.remedy else []
        return "\n".join([head, *tail])


def render_problems(title: str, problems: Sequence[Problem]) -> str:
    """All problems under one counted title: "2 problems in run.toml"."""
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    return "\n".join([f"{count} in {title}", *(problem.render() for problem in problems)])


def check_no_problems(title: str, problems: Sequence[Problem]) -> None:
    """Raise one UserError that names every problem; do nothing if there is none."""
    if problems:
        raise UserError(render_problems(title, problems), problems)


def render_reason(message: str) -> str:
    """An error as one line of a status: its first line, and of counted problems the first one too."""
    lines = [line.strip() for line in message.splitlines() if line.strip()] or ["no reason was given"]
    counted = len(lines) > 1 and re.match(r"\d+ problems? in ", lines[0])
    return f"{lines[0]}: {lines[1]}" if counted else lines[0]


def list_some(names: Sequence[str], most: int) -> str:
    """The first `most` names, and how many more there are: "a, b and 3 more"."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def legible(text: str) -> str:
    """A message that is safe to print, also from a damaged file: control characters are written as escapes, and of a
    line with more than 1000 characters the middle is left out."""
    lines = []
    for line in text.split("\n"):
        line = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in line)
        left_out = f" ... ({len(line) - 950} characters) ... "
        lines.append(line if len(line) <= 1000 else f"{line[:750]}{left_out}{line[-200:]}")
    return "\n".join(lines)
