"""Looks at the host that submits: many commands, one exchange.

Invariant: what a host does not answer is not held against anybody. This module must not know what is looked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from shardway.errors import Problem, UserError
from shardway.launch.hosts.base import Done, Host


@dataclass(frozen=True)
class HostCheck:
    """A command, and what its answer means. `path` is one of the host (with `~` and `$NAMES`) that the command is
    about, "" for none; `key` and `origin` are of the value that it comes from."""

    key: str
    origin: str
    words: Callable[[str], Sequence[str]]
    judge: Callable[[Done], Iterable[Problem]]
    path: str = ""


def take_looks(host: Host, looks: Sequence[HostCheck]) -> list[Problem]:
    """What is wrong, in the order of the looks, each once; a path with a variable that the host does not set is a
    problem as well. Raises HostUnreachable."""
    paths, problems = _expand(host, looks)
    asked = [look for look in looks if not look.path or look.path in paths]
    commands = [look.words(str(paths[look.path]) if look.path else "") for look in asked]
    if commands:
        for look, done in zip(asked, host.run_many(commands), strict=True):
            problems += look.judge(done)
    return list(dict.fromkeys(problems))


def _expand(host: Host, looks: Sequence[HostCheck]) -> tuple[dict[str, PurePosixPath], list[Problem]]:
    """Paths as the host knows them, all in one exchange; one by one only where one of them cannot be known."""
    named = {look.path: look for look in looks if look.path}
    try:
        return dict(zip(named, host.expand_many(list(named)), strict=True)), []
    except UserError:
        found = {path: _expand_one(host, look) for path, look in named.items()}
    paths = {path: one for path, one in found.items() if isinstance(one, PurePosixPath)}
    return paths, [one for one in found.values() if isinstance(one, Problem)]


def _expand_one(host: Host, look: HostCheck) -> PurePosixPath | Problem:
    try:
        return host.expand(look.path)
    except UserError as error:
        what, _, remedy = str(error).partition("\n  To do: ")
        return Problem(look.key, what.removesuffix("."), look.origin, remedy=remedy.removesuffix("."))


def test_exists(path: str) -> tuple[str, ...]:
    """Whether there is anything at a path."""
    return ("test", "-e", path)


def always(problem: Problem) -> Callable[[Done], Iterator[Problem]]:
    """The problem where the command fails in time."""
    return lambda done: iter(()) if done.ok or done.timed_out else iter((problem,))
