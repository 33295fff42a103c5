"""Arguments that several verbs share, how words become a request, lines on stderr, and shell completion.

Invariants:
- Completion is quick and without torch; what cannot be read is not offered.
- A run is named in the same words for every verb.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardway.errors import JobError, UserError, legible
from shardway.refusals import find_remedy
from shardway.rundir.file_io import render_json

if TYPE_CHECKING:
    from shardway.resolve.request import ResolveRequest
    from shardway.rundir.directory import RunDir


# --- options whose seconds may be left out


def fill_seconds(args: list[str], names: Sequence[str], form: re.Pattern[str], default_s: float) -> list[str]:
    """The words of a command with `default_s` behind each option of these names that no word of this form follows; the
    words after `--` are a program's."""
    end = args.index("--") if "--" in args else len(args)
    for place in reversed(range(end)):
        if args[place] in names and not form.fullmatch((args[place + 1 : end] or [""])[0]):
            args = [*args[: place + 1], f"{default_s:g}", *args[place + 1 :]]
    return args


# --- shell completion: each function lists what may stand where so much is written


def complete_words(incomplete: str) -> list[str]:
    """Of `[RUN_FILE] [KEY=VALUE]...`: keys up to their "=", their values, and run files and folders on the way to
    one."""
    from shardway.cli.completion import load_table

    table = load_table()
    key, has_value, begun = incomplete.partition("=")
    if has_value and key in table["keys"]:
        values = table["sites"] if key == "site.name" else table["keys"][key]
        if values[-1:] == [None]:
            values = [*values[:-1], *complete_path(begun)]
        return [f"{key}={value}" for value in _list_begun(values, begun)]
    return [*_list_begun((f"{key}=" for key in table["keys"]), incomplete), *_list_paths(incomplete, ".toml")]


def complete_model(incomplete: str) -> list[str]:
    """A model that is known by its name, then as `complete_words`."""
    from shardway.cli.completion import load_table

    return [*_list_begun(load_table()["models"], incomplete), *complete_words(incomplete)]


def complete_key(incomplete: str) -> list[str]:
    """A key, or a section."""
    from shardway.cli.completion import load_table

    return _list_begun((name for key in load_table()["keys"] for name in (key.partition(".")[0], key)), incomplete)


def complete_path(incomplete: str) -> list[str]:
    """A file or a folder."""
    return list(_list_paths(incomplete, ""))


def complete_run(incomplete: str) -> list[str]:
    """A run of ./runs or one that was submitted, by its directory or its name; else a folder."""
    from shardway.launch.runs.find import find_all, render_known

    names: list[str] = []
    with contextlib.suppress(Exception):  # a registry or a folder that cannot be read offers nothing
        for known in find_all(Path("runs")):
            names += [render_known(known), Path(known.run).name] if known.host == "" else [render_known(known)]
    return [*_list_begun(names, incomplete), *_list_paths(incomplete, "/")]


def list_examples() -> dict[str, str]:
    """The text of each shipped run file by its name, sorted."""
    from importlib.resources import files

    found = [each for each in (files("shardway.runfile") / "examples").iterdir() if each.name.endswith(".toml")]
    texts = {each.name.removesuffix(".toml"): each.read_text(encoding="utf-8") for each in found}
    return dict(sorted(texts.items()))


def complete_example(incomplete: str) -> list[str]:
    """An example of `init --from`."""
    return _list_begun(list_examples(), incomplete)


def complete_site(incomplete: str) -> list[str]:
    """A site profile, by its name or as a file; behind HOST: too."""
    from shardway.cli.completion import load_table

    host, colon, name = incomplete.rpartition(":")
    found = [f"{host}{colon}{site}" for site in _list_begun(load_table()["sites"], name)]
    return [*found, *([] if colon else _list_paths(incomplete, ".toml"))]


def complete_gpu(incomplete: str) -> list[str]:
    """An accelerator of the catalogue."""
    from shardway.hardware.catalogue import load_accelerators

    return _list_begun(load_accelerators(), incomplete)


def _list_begun(names: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in dict.fromkeys(names) if name.startswith(incomplete)]


def _list_paths(incomplete: str, suffix: str) -> Iterator[str]:
    begun = Path(incomplete or ".")
    folder = begun if incomplete.endswith("/") or not incomplete else begun.parent
    with contextlib.suppress(OSError):
        for path in sorted(folder.iterdir()):
            shown = f"./{path}" if incomplete.startswith("./") else str(path)
            if shown.startswith(incomplete) and not path.name.startswith("."):
                if path.is_dir():
                    yield f"{shown}/"
                elif shown.endswith(suffix):
                    yield shown


# --- shared arguments and requests

Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[RUN_FILE] [KEY=VALUE]...",
        help="A run file, and keys to set over it.",
        show_default=False,
        autocompletion=complete_words,
    ),
]
DirOption = Annotated[
    Path | None,  # what cannot be read is reported where it is used
    typer.Option("--dir", help="The run directory (default: run.root/run.name).", readable=False),
]
NprocOption = Annotated[int | None, typer.Option("--nproc", min=1, help="Ranks to start and watch on this machine.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print facts as JSON on stdout, and nothing else there.")]
RunName = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="A run directory, HOST:DIRECTORY, a run's name, or the id of its job.",
        autocompletion=complete_run,
    ),
]


def read_request(words: list[str] | None, directory: Path | None, fresh: bool = False) -> ResolveRequest:
    """The request in the words of a command line. Raises UserError where they name two run files."""
    from shardway.resolve.request import parse_words

    return replace(parse_words(words or []), directory=directory, fresh=fresh)


def find_run(path: Path | None) -> RunDir:
    """The one run that a word means: a run here by its directory, its name or the id of its job, or the only one of a
    folder (default: runs). Raises UserError where that is not one run, or is on another host."""
    from shardway.launch.runs.find import find_known, find_run_around, is_folder_of_runs, list_runs
    from shardway.rundir.directory import RunDir

    root = path or Path("runs")
    if path is not None and not is_folder_of_runs(path):
        known = find_known(str(path))
        if known.host:
            raise UserError(f"{path} is on another host, {known.host}.\n  To do: run the same command there.")
        return RunDir(Path(known.run))
    runs = list_runs(root) or [*filter(None, [find_run_around(root)])]
    if not runs:
        raise UserError(
            f'there is no run in "{root}".\n  To do: name a run directory, or start a run: `shardway train`.'
        )
    if len(runs) > 1:
        names = "\n".join(f"    {run}" for run in runs)
        raise UserError(f"{root} holds {len(runs)} runs; name one of them:\n{names}")
    return RunDir(runs[0])


def find_place(path: Path) -> Path:
    """The directory of the run that a word means, where there is nothing of that name; else the path as it is."""
    if not os.path.lexists(path):
        with contextlib.suppress(UserError):  # the reader of the path reports it
            return find_run(path).path
    return path


def read_time(option: str, text: str) -> float:
    """The seconds in the value of an option. Raises UserError where it is no time."""
    from shardway.units import parse_seconds

    try:
        return parse_seconds(text)
    except ValueError as error:
        raise UserError(f"{option}: {error}") from None


@contextlib.contextmanager
def explained_write(path: Path, elsewhere: str) -> Iterator[None]:
    """Write a file for a person. Raises JobError where the file system refuses it; `elsewhere`: what to do then."""
    try:
        yield
    except OSError as error:
        raise JobError(
            f"{path} cannot be written: {error.strerror}.\n  To do: {find_remedy(error, elsewhere)}."
        ) from None


# --- what is printed: facts on stdout, lines for a person on stderr


def print_json(facts: Any) -> None:
    """Print facts as JSON that every reader accepts; a number that is not finite is null."""
    typer.echo(render_json(facts, indent=1))


def print_table(columns: Sequence[str], rows: Sequence[Mapping[str, str]]) -> None:
    """Print rows as wide as they need to be, below the names of their columns."""
    from shardway.watch.words import align_cells

    for line in align_cells(
        [[column.upper() for column in columns], *([row[column] for column in columns] for row in rows)]
    ):
        typer.echo(legible(line))


def print_line(line: str) -> None:
    """Print a line on stderr."""
    print(line, file=sys.stderr)


def report(line: str) -> None:
    """Print a line on stderr, with the name of the command."""
    print_line(f"shardway: {line}")
