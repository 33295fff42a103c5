"""Environment variables that belong to one job, step or rank, and so never reach another one.

`shardway submit` may be typed in a shell of a login node, of `salloc`, of a step, of a job of another scheduler, of a
notebook, or of a rank; a site's modules and profiles add defaults for the command that submits. Variables that a new
job would take for its own are removed at submission; those that may have been meant for the job are reported.

Invariant: `inherited.toml` and the families of the schedulers (`Scheduler.inherited`) are the only list of them. One
exception: the shell of a job drops the devices of a job when it submits the next one, since a user who submits may mean
them. docs/environment.md shows the table; Python (`strip`) and the shell of job scripts (`list_patterns`) follow it. No
torch is imported here, and `os.environ` is not read.

Sources: bsub(1), flux-environment(7), torchrun's and accelerate's manuals; variables seen in ranks of Open MPI 4 and 5,
MPICH's hydra, Intel MPI, MVAPICH2, HPE's PALS, IBM's JSM, DeepSpeed's launcher.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any

from shardway.plugins import make_installed, make_own


@dataclass(frozen=True)
class Family:
    """Variables of one kind: shell patterns of their names, exceptions that pass (`kept`), and the reason.

    `settings`: those that a job may set for its own ranks. `reaches_ranks`: whether ranks that an agent starts see
    them; a submitted job never does.
    """

    subject: str
    names: tuple[str, ...]
    reason: str
    kept: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    reaches_ranks: bool = False
    options: str = ""
    """How the names begin of variables that hold options for the command that submits; "" for none."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """Such a variable -> the key of a run file with the same meaning; "" for what the job script sets itself. All other
    options go into site.options."""

    def has(self, name: str) -> bool:
        """Whether a variable belongs to this family."""
        return _matches(name, self.names) and not _matches(name, self.kept)


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    names, beginnings, others = _sort(patterns)
    return name in names or name.startswith(beginnings) or any(fnmatchcase(name, other) for other in others)


@cache
def _sort(patterns: tuple[str, ...]) -> tuple[frozenset[str], tuple[str, ...], tuple[str, ...]]:
    """Whole names, beginnings, and patterns that are neither: hundreds, which as expressions take long to compile."""
    others = {each for each in patterns if _SPECIAL.intersection(each)}
    beginnings = {each for each in others if each.endswith("*") and not _SPECIAL.intersection(each[:-1])}
    whole = frozenset(patterns) - others
    return whole, tuple(each[:-1] for each in beginnings), tuple(others - beginnings)


_SPECIAL = frozenset("*?[")


@cache
def list_families() -> tuple[Family, ...]:
    """The whole table: what is no scheduler's, our own schedulers, others whose launchers are known, and other
    packages' schedulers."""
    general, others = (read_families(files(__package__) / "inherited.toml", part) for part in ("general", "other"))
    own, installed = (
        [family for scheduler in make("schedulers") for family in scheduler.inherited]
        for make in (make_own, make_installed)
    )
    return (*general, *own, *others, *installed)


_parse_tables = cache(tomllib.loads)


def read_tables(file: Traversable) -> Mapping[str, Any]:
    """The tables of a TOML file that lies beside a module, parsed once in a process."""
    return _parse_tables(file.read_text(encoding="utf-8"))


def read_families(file: Traversable, part: str) -> tuple[Family, ...]:
    """The families of one part of a TOML file: an entry [[PART]] each, with the fields of `Family`."""
    families = []
    for row in read_tables(file)[part]:
        fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}
        families.append(Family(**fields))
    return tuple(families)


def list_patterns(*, of_ranks: bool) -> tuple[str, ...]:
    """The table for `drop_variables` of a job script: "!PATTERN" for what passes, then PATTERN for the rest.

    `of_ranks`: the families that reach no ranks, which a job drops when it begins; otherwise those that stay in a job
    and do not reach the next one.
    """
    chosen = [family for family in list_families() if family.reaches_ranks is not of_ranks]
    kept = (f"!{name}" for family in chosen for name in family.kept)
    return (*kept, *(name for family in chosen for name in family.names))


def strip(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that a job submitted from here may inherit."""
    return {name: value for name, value in environ.items() if find_family(name) is None}


def list_unfit_for_ranks(environ: Mapping[str, str]) -> list[str]:
    """The variables that ranks started by an agent must not inherit."""
    unfit = [family for family in list_families() if not family.reaches_ranks]
    return [name for name in environ if any(family.has(name) for family in unfit)]


def list_option_patterns() -> tuple[str, ...]:
    """Patterns of variables that may be meant for a job and do not reach it automatically."""
    return tuple(f"{family.options}*" for family in list_families() if family.options)


def list_options(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that hold options for the command that submits."""
    patterns = list_option_patterns()
    return {name: value for name, value in environ.items() if _matches(name, patterns)}


def find_account(families: Iterable[Family], options: Mapping[str, str]) -> tuple[str, str]:
    """The variable of a scheduler's families that names the account, and its value; ("", "") for none. Sites leave the
    project account there (`jutil env activate` sets it)."""
    names = (name for family in families for name, key in family.keys.items() if key == _ACCOUNT)
    return next(((name, options[name]) for name in names if options.get(name)), ("", ""))


@cache
def find_family(name: str) -> Family | None:
    """The family of a variable; None for one that passes everywhere."""
    return next((family for family in list_families() if family.has(name)), None)


def name_key(name: str) -> str:
    """The key of a run file with the same meaning as a variable with an option; "" if there is none."""
    family = find_family(name)
    if family is None or not family.options or not name.startswith(family.options):
        return ""
    option = name.removeprefix(family.options).lower().replace("_", "-")  # SBATCH_MEM_BIND -> mem-bind
    return family.keys.get(name, f"site.options.{option}")


def describe_options(options: Mapping[str, str], asked: Mapping[str, str]) -> Iterator[str]:
    """A sentence for each option of `list_options`: that it is used (an account), or what applies instead.

    `asked`: what the job requests from the scheduler, by key. An option with the same value gets no sentence.
    """
    for name, value in options.items():
        key = name_key(name)
        said = asked.get(key, "")
        if not value or (said and said == _as_asked(key, value) and key != _ACCOUNT):
            continue
        if key == _ACCOUNT and said == value:
            yield f"the account is {value}, as {name} of this shell says; site.account says it for every shell"
            continue
        holds = (
            f"the job has {said} ({key})" if said else f"to ask for it, set {key}" if key else "the job script says it"
        )
        yield f"{name}={value} of this shell is left out: {holds}"


_ACCOUNT = "site.account"


_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<clock>\d+(?::\d+){0,2})")


def _as_asked(key: str, value: str) -> str:
    """An option's value in the form of the job's request: a time in seconds (sbatch(1), --time)."""
    match = _TIME.fullmatch(value) if key == "site.walltime" else None
    if match is None:
        return value
    numbers = [int(number) for number in match["clock"].split(":")]
    # minutes, minutes and seconds, or all three; after days the first one is hours
    weights = (3600, 60, 1) if match["days"] or len(numbers) == 3 else (60, 1)
    seconds = sum(number * weight for number, weight in zip(numbers, weights, strict=False))
    return f"{seconds + 86400 * int(match['days'] or 0)} s"
