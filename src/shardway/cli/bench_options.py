"""What the verbs of `shardway bench` have in common: options and how they are read, where results go, ranks.

Invariant: without torch until ranks start; nothing is written but the files that --json and --html name, and the
profile that --save names.
"""

from __future__ import annotations

import datetime
import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardway.cli.main import uncollected
from shardway.cli.options import complete_site, print_json
from shardway.errors import Problem, SiteError, UserError, legible
from shardway.hardware.limits import ensure_temporary
from shardway.ranks.launcher import Placement
from shardway.refusals import find_remedy
from shardway.rundir.file_io import render_json, write_named

if TYPE_CHECKING:
    from shardway.ranks.start import Ranks
    from shardway.sites.schema import SiteProfile

ORIGIN = "command line"

SecondsOption = Annotated[float, typer.Option("--seconds", help="About how long it may take.")]
SiteOption = Annotated[
    str | None, typer.Option("--site", help="Profile to compare with.", autocompletion=complete_site)
]
JsonFileOption = Annotated[
    str | None, typer.Option("--json", metavar="FILE", help="Write everything as JSON; - prints it alone.")
]
SaveOption = Annotated[
    str | None,
    typer.Option("--save", metavar="NAME", help="Keep what was measured as a site of your own that extends --site."),
]
SIZES_METAVAR = "FIRST:LAST[:FACTOR] | SIZE,..."


# --- what the options say


def find_wrong_time(seconds: float) -> Iterator[Problem]:
    """What is wrong with --seconds."""
    if not (math.isfinite(seconds) and seconds > 0):
        yield Problem("--seconds", f"{seconds:g} is no time to measure in", ORIGIN, "a number above 0")


def find_wrong_names(option: str, names: Collection[str], allowed: Collection[str], noun: str) -> Iterator[Problem]:
    """What is wrong with the names in an option, each of which is to be one of `allowed`: a `noun`."""
    unknown = [name for name in names if name not in allowed]
    if unknown:
        what = f"{', '.join(unknown)} {f'is no {noun}' if len(unknown) == 1 else f'are no {noun}s'}"
        yield Problem(option, what, ORIGIN, ", ".join(allowed))
    elif not names:
        yield Problem(option, "names none", ORIGIN, ", ".join(allowed))


def split_names(text: str) -> tuple[str, ...]:
    """The words between commas, each once."""
    return tuple(dict.fromkeys(text.replace(",", " ").split()))


def read_sizes(text: str | None, least: int, problems: list[Problem]) -> tuple[int, ...] | None:
    """The bytes in --sizes, each `least` and more; None where it is not given, and for a mistake, which is added to
    `problems`."""
    if text is None:
        return None
    try:
        return parse_sizes(text, least)
    except ValueError as error:
        what, _, allowed = str(error).partition("; allowed: ")
        problems.append(Problem("--sizes", what, ORIGIN, allowed))
        return None


def parse_sizes(text: str, least: int = 1) -> tuple[int, ...]:
    """Bytes from "1KiB:16MiB", "1KiB:1GiB:2" (each twice the one before; else 4 times) or "4KiB,1MiB". Raises
    ValueError with a sentence, and what is allowed, also for a size below `least`."""
    from shardway.bench.bandwidth import list_sizes
    from shardway.units import parse_bytes, render_bytes, render_plural

    first, *more = text.split(":")
    if not more:
        found = tuple(parse_bytes(each) for each in text.split(","))
    else:
        low, high, factor = parse_bytes(first), parse_bytes(more[0]), 4.0
        if more[1:]:
            try:
                factor = float(more[1])
            except ValueError:
                factor = math.nan
        if len(more) > 2 or not 1.1 <= factor <= 1e6:
            raise ValueError(
                f'"{text}" has no factor from one size to the next; allowed: FIRST:LAST:FACTOR, from 1.1 on'
            )
        if low > high:
            what = f"{render_bytes(low)} is more than {render_bytes(high)}"
            raise ValueError(f'"{text}" is empty: {what}; allowed: the smaller size first')
        found = list_sizes(low, high, factor) if low else (0,)
    if min(found) < least:
        raise ValueError(f'"{text}" has a size of {min(found)}; allowed: {render_plural(least, "byte")} and more')
    return found


# --- where results go


@dataclass(frozen=True)
class BenchOutputs:
    """What is done with a result: a site's profile that it is compared with, a file for its facts ("-": stdout), a file
    for its page, and the name of a profile that keeps measured ceilings; None for what is not asked for."""

    site: str | None = None
    json: str | None = None
    html: str | None = None
    save: str | None = None

    def find_wrong(self, inputs: Sequence[str] = ()) -> Iterator[Problem]:
        """What is wrong with them; `inputs` are files that are read."""
        taken = {Path(name).resolve(): "--from" for name in inputs}
        for option, target in (("--json", None if self.json == "-" else self.json), ("--html", self.html)):
            if target is None:
                continue
            what, other = _describe_wrong_target(target), taken.get(Path(target).resolve())
            if what or other:
                allowed = "a file in a folder that you may write" + (", or -" if option == "--json" else "")
                yield Problem(option, what or f"{target} is also the file of {other}", ORIGIN, allowed)
            taken[Path(target).resolve()] = option
        if self.save is not None and self.site is None:
            yield Problem("--save", "needs --site: which site was measured", ORIGIN, "--site NAME --save NAME")

    def check_profiles(self) -> None:
        """Raise UserError for a site that cannot be read, and for a profile that cannot be kept under its name."""
        self.load_site()
        if self.save is not None:
            from shardway.sites.load import find_place

            find_place(self.save)

    def load_site(self) -> SiteProfile | None:
        """The profile of --site. Raises UserError where it cannot be read."""
        from shardway.sites.load import load_site

        return load_site(self.site) if self.site is not None else None

    def write(
        self, text: Callable[[], str], facts: Callable[[], Mapping[str, Any]], page: Callable[[], str] | None = None
    ) -> None:
        """Print the report, or its facts alone for "-"; write the files that are named."""
        if self.json == "-":
            print_json(facts())
        else:
            typer.echo(legible(text()))
            if self.json is not None:
                write_facts(self.json, facts())
        if self.html is not None and page is not None:
            write_result(self.html, page())
            typer.echo(f"wrote {legible(self.html)}", err=self.json == "-")

    def keep(self, render: Callable[[str, SiteProfile, str, datetime.date], str]) -> None:
        """Keep measured ceilings, if --save names a profile, and say what it is for. `render` makes its text of its
        name, the site, what it extends (the site's name, or its path from everywhere), and the day. Raises UserError
        where there are none, or they cannot be written."""
        from shardway.sites.load import keep_profile

        site = self.load_site()
        if self.save is None or self.site is None or site is None:
            return
        is_path = "/" in self.site or self.site.endswith(".toml")
        parent = str(Path(self.site).resolve()) if is_path else self.site
        path = keep_profile(self.save, render(self.save, site, parent, datetime.date.today()))
        typer.echo(f"wrote {path}: `shardway plan ... --on {self.save}` takes it", err=self.json == "-")


def _describe_wrong_target(target: str) -> str:
    """Why a file of that name cannot be written; "" where it can."""
    path = Path(target)
    if target in ("", "-"):
        return f'"{target}" is no file'
    if path.is_dir():
        return f"{target} is a folder"
    if path.exists() and not path.is_file():  # a device or a pipe, which is not replaced
        return "" if os.access(path, os.W_OK) else f"{target} cannot be written"
    folder = path.parent if not path.is_symlink() else path.resolve().parent
    if not folder.is_dir():
        return f"the folder {folder} does not exist"
    return "" if os.access(folder, os.W_OK | os.X_OK) else f"the folder {folder} cannot be written"


def write_facts(target: str, facts: Mapping[str, Any]) -> None:
    """Write facts as strict JSON to a file that an option names. Raises SiteError."""
    write_result(target, render_json(facts, indent=1) + "\n")


def write_result(target: str, text: str) -> None:
    """Write a file that an option names. Raises SiteError where the file system refuses it."""
    try:
        write_named(Path(target), text)
    except OSError as error:
        what = f"{target} cannot be written: {error.strerror}."
        raise SiteError(f"{what}\n  To do: {find_remedy(error, 'name another place')}.") from error


# --- ranks of a launch


@contextmanager
def reported_once(rank: int) -> Iterator[None]:
    """A mistake that every rank finds alike is reported by rank 0; the others end with its exit code."""
    try:
        yield
    except UserError as error:
        if rank == 0:
            raise
        raise typer.Exit(error.exit_code) from None


def join_ranks(placement: Placement, device: str, threads: int, seconds: float) -> Ranks:
    """Start with the other ranks of the launch, on a type of device, with so many threads where OMP_NUM_THREADS names
    none, to measure for so many seconds."""
    ensure_temporary()
    with uncollected():
        from shardway.ranks.start import StartOptions, start_ranks

    named = os.environ.get("OMP_NUM_THREADS", "")
    threads = int(named) if named.isdecimal() and int(named) else threads
    return start_ranks(placement, StartOptions(device, threads, _START_S, seconds + _SILENT_S))


_START_S, _SILENT_S = 300.0, 120.0
"""Waits for ranks that are still to begin, and for one that measures longer than it should."""
