"""What is added to a base image: packages of Debian or Ubuntu, packages of Python; as the script that runs inside it.

Invariant: every word that a person wrote is one word of the script's shell, whatever is in it, and no secret of a URL
gets into the script, which stays in the image. This module must not know runtimes.

Sources: apt-get(8); pip's documentation, "pip install" and "Requirements File Format"; POSIX sh, as images have it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shardway.errors import Problem, check_no_problems
from shardway.launch.script import ScriptLine, ScriptSection, quote, quote_all, render_script, wrap_command

REQUIREMENTS = "/tmp/shardway-requirements.txt"
"""Where the requirements are while they are installed."""

_PACKAGE = re.compile(r"[a-z0-9][a-z0-9+.-]+(:[a-z0-9-]+)?(=[A-Za-z0-9.+~:-]+|/[a-z0-9-]+)?")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_SECRET = re.compile(r"https?://[^/\s]+@|://[^/\s@]*:[^/\s@]+@")
_OUTSIDE = re.compile(
    r"(^|\s)(-r|--requirement|-c|--constraint|-e|--editable)[\s=]+(?!/)(?!\S+://)\S|^\s*\.{1,2}(/|\s*$)"
)
_OF_DEFINITIONS = re.compile(r"\{\{|(^|\s)%\w*")
_OPERATOR = re.compile(r"[<>=!~;@(]")


@dataclass(frozen=True)
class Recipe:
    """Names for apt-get, lines as after `pip install`, and the lines of a requirements file."""

    apt: tuple[str, ...] = ()
    pip: tuple[str, ...] = ()
    requirements: tuple[str, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether nothing is added."""
        return not (self.apt or self.pip or any(_is_needed(line) for line in self.requirements))


def parse_recipe(apt: Sequence[str], pip: Sequence[str], requirements: str = "") -> Recipe:
    """What a person asked for. Raises UserError with everything that cannot be run as it stands."""
    lines = tuple(requirements.splitlines())
    problems = [*_list_wrong_packages(apt)]
    for line in pip:
        problems += _list_wrong_line("--pip", line)
    for number, line in enumerate(lines, 1):
        problems += _list_wrong_line("--requirements", line, f"line {number}")
    check_no_problems("what to install", problems)
    return Recipe(tuple(apt), tuple(pip), lines)


def split_pip_line(line: str) -> tuple[str, ...]:
    """The words of a line as after `pip install`: a requirement with blanks ("torch >= 2.1") is one word.

    Raises ValueError for a quote that is not closed.
    """
    words = shlex.split(line)
    if any(word.startswith("-") for word in words):
        return tuple(words)
    is_one = any(_OPERATOR.match(word) or word.endswith(";") for word in words[1:])
    return (line.strip(),) if is_one else tuple(words)


def render_recipe(recipe: Recipe) -> str:
    """The script for `sh` inside the image, run as its root. It ends at the first command that fails."""
    return render_script((ScriptSection("", tuple(_lines(recipe))),))


def _lines(recipe: Recipe) -> Iterator[ScriptLine]:
    yield ScriptLine("set -eu", "nothing goes on after a command that failed")
    if recipe.apt:
        yield ScriptLine("export DEBIAN_FRONTEND=noninteractive", "packages of the image's own system; nobody is asked")
        yield ScriptLine(f"{_APT} update")
        install = f"{_APT} install --yes --no-install-recommends --"
        yield ScriptLine(wrap_command((install, *map(quote, recipe.apt))))
        yield ScriptLine("rm -rf /var/lib/apt/lists/*")
    if recipe.pip or recipe.requirements:
        yield ScriptLine("export PIP_BREAK_SYSTEM_PACKAGES=1", "packages of Python, for the image's own Python")
        yield ScriptLine("export PIP_ROOT_USER_ACTION=ignore PIP_DISABLE_PIP_VERSION_CHECK=1")
    if recipe.requirements:
        words = ("printf '%s\\n'", *map(quote, filter(_is_needed, recipe.requirements)), f">{REQUIREMENTS}")
        yield ScriptLine(wrap_command(words))
        yield ScriptLine(f"{_PIP} --requirement {REQUIREMENTS}")
        yield ScriptLine(f"rm {REQUIREMENTS}")
    for line in recipe.pip:
        yield ScriptLine(f"{_PIP} {quote_all(split_pip_line(line))}")


_APT = "apt-get -o APT::Sandbox::User=root"
"""Without its user _apt, whom a container of an ordinary user cannot become."""

_PIP = "python3 -m pip install --no-cache-dir"


def _is_needed(line: str) -> bool:
    return bool(line.strip()) and not line.lstrip().startswith("#")


def _list_wrong_packages(names: Sequence[str]) -> Iterator[Problem]:
    for name in names:
        if not _PACKAGE.fullmatch(name):
            yield Problem(
                "--apt",
                f'"{name}" is no name of a package',
                allowed="one name an option: libaio-dev, or with a version libaio-dev=0.3.113-4",
                remedy="give --apt once for each package",
            )


def _list_wrong_line(option: str, line: str, origin: str = "") -> Iterator[Problem]:
    """A line that pip, the shell or the file of the recipe would not take as it was meant."""
    shown = _SECRET.sub("https://...@", line)
    if _CONTROL.search(line.replace("\t", " ")):
        yield Problem(option, f"{shown!r} holds a control character", origin, remedy="give one option for each line")
    elif found := _OF_DEFINITIONS.search(line):
        what = f'"{shown}" holds "{found[0].strip()}", which means something else in Apptainer\'s definition files'
        yield Problem(option, what, origin, remedy="write it without")
    elif _SECRET.search(line):
        remedy = "use an index that asks for no password, or install it into a venv of the run: this stays in the image"
        yield Problem(option, f'"{shown}" holds a user or a password', origin, remedy=remedy)
    elif _is_needed(line) and _OUTSIDE.search(line):
        what = f'"{shown}" names a file of yours, and those are not in the image'
        yield Problem(
            option, what, origin, remedy="name the packages themselves, or put the code into the run's folder"
        )
    elif option == "--pip":
        yield from _list_unsplittable(option, line)
    elif line.rstrip().endswith("\\"):
        yield Problem(option, f'"{shown}" goes on in the next line', origin, remedy="write it on one line")


def _list_unsplittable(option: str, line: str) -> Iterator[Problem]:
    try:
        words = split_pip_line(line)
    except ValueError:
        yield Problem(option, f'"{line}" has a quote that is not closed', remedy="close it")
        return
    if not words:
        yield Problem(option, "it is empty", allowed="what may follow `pip install`", remedy="name a package")
