"""Launcher variables as numbers, a place among the ranks, and the one error that says what is wrong with them.

Launchers (`ranks.launcher`) and schedulers (`launch.schedulers`) read their variables by these functions.

Invariant: a variable that is missing or no number is a SiteError with its name and value, never a default. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardway.errors import SiteError

Environ = Mapping[str, str]

AGENT_VARIABLE = "SHARDWAY_AGENT"
"""Set for ranks that an agent of ours has started: its process id."""


def read_int(environ: Environ, launcher: str, name: str) -> int:
    """The whole number in `name`, 0 or more; SiteError where it is missing or anything else."""
    text = environ.get(name, "")
    if not (text.isascii() and text.isdecimal()):
        raise variables_error(environ, launcher, (name,), f"{name} is an integer from 0 on")
    return int(text)


def read_count(text: str) -> int | None:
    """A number that may be missing."""
    return int(text) if text.isdecimal() else None


def read_optional_int(environ: Environ, launcher: str, name: str | None) -> int | None:
    """As `read_int`, but None where there is no such variable."""
    return read_int(environ, launcher, name) if name is not None and name in environ else None


def first_set(environ: Environ, *names: str) -> str:
    """The first name that is set; the first of all where none is, so that an error can name it."""
    return next((name for name in names if name in environ), names[0])


def first_value(environ: Environ, *names: str) -> str:
    """The first value that is not empty, or ""."""
    return next((environ[name] for name in names if environ.get(name)), "")


def variables_error(
    environ: Environ, launcher: str, names: tuple[str, ...], allowed: str, remedy: str = ""
) -> SiteError:
    """The error for these variables of this launcher; without a remedy it says how to start afresh."""
    lines = {name: environ[name].replace("\n", "\\n") for name in names if name in environ}  # hosts may have one each
    found = ", ".join(f'{name}="{lines[name]}"' if name in lines else f"{name} not set" for name in names)
    program = "torchrun" if launcher == "the environment" else launcher
    fresh = f"start the ranks with {program} from a fresh shell; for a single rank, unset its variables"
    return SiteError(
        f"the variables of {launcher} do not place this process among the ranks: {found}\n"
        f"      allowed: {allowed}\n"
        f"      to do: {remedy or fresh}"
    )


@dataclass(frozen=True)
class RankSeat:
    """A place among ranks without the meeting point.

    `node` and `nodes` are None where they are not numbered. `launcher` is what started the ranks, `launch` a name of
    this launch that is finer than the job's id, or "".
    """

    rank: int
    world: int
    local_rank: int
    local_world: int
    node: int | None = None
    nodes: int | None = None
    launcher: str = ""
    launch: str = ""


@dataclass(frozen=True)
class SeatVariables:
    """The variables in which one launcher gives a rank its place; None for numbers it does not give."""

    rank: str
    world: str
    local_rank: str
    local_world: str
    node: str | None = None
    nodes: str | None = None


def check_seat(environ: Environ, launcher: str, names: SeatVariables, seat: RankSeat) -> None:
    """Raise where a number is out of range; the message names all variables of the comparison."""
    if seat.rank >= seat.world:
        allowed = f"{names.rank} less than {names.world}"
        raise variables_error(environ, launcher, (names.rank, names.world), allowed)
    if not seat.local_rank < seat.local_world <= seat.world:
        allowed = f"{names.local_rank} less than {names.local_world}, and that at most {names.world}"
        raise variables_error(environ, launcher, (names.local_rank, names.local_world, names.world), allowed)
    if seat.node is not None and seat.nodes is not None and seat.node >= seat.nodes:
        shown = (names.node or "", names.nodes or "")
        raise variables_error(environ, launcher, shown, f"{names.node} less than {names.nodes}")
