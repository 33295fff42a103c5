"""Launcher variables as numbers, and the one error that says what is wrong with them.

Invariant: a variable that is missing or no number is a SiteError with its name and value, never a default. This
module must not read `os.environ`: the caller hands the variables in.
"""

from __future__ import annotations

from collections.abc import Mapping

from shardway.errors import SiteError

Environ = Mapping[str, str]


def read_int(environ: Environ, launcher: str, name: str) -> int:
    """The whole number in `name`, 0 or more; SiteError where it is missing or anything else."""
    text = environ.get(name, "")
    if not (text.isascii() and text.isdecimal()):
        raise variables_error(environ, launcher, (name,), f"{name} is a whole number from 0 on")
    return int(text)


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
    found = ", ".join(
        f'{name}="{_in_one_line(environ[name])}"' if name in environ else f"{name} not set" for name in names
    )
    program = "torchrun" if launcher == "the environment" else launcher
    fresh = f"start the ranks with {program} from a fresh shell; for a single rank, unset its variables"
    return SiteError(
        f"the variables of {launcher} do not place this process among the ranks: {found}\n"
        f"      allowed: {allowed}\n"
        f"      to do: {remedy or fresh}"
    )


def _in_one_line(value: str) -> str:
    """A value as bash would write it after `$`: a list of hosts may have a line each."""
    return value.replace("\n", "\\n")
