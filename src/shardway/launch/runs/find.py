"""Which runs the user has submitted, and which of them a word means: a directory, a name, or the id of a job.

Invariants:
- A torn or foreign line is skipped, and a registry that cannot be written stops no verb.
- A word that could mean several runs is refused, with all of them named.
- The id of a job is looked up in the records of the known runs, those of this machine first; no scheduler is asked.

One line of JSON per run in $XDG_STATE_HOME/shardway/submitted-runs (default ~/.local/state), appended in one write; a
line with `"gone": true` revokes those before it. It has only the places of run directories; the state of a run is in
its directory.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path

from shardway.errors import JobError, SiteError, UserError
from shardway.places import find_own_folder
from shardway.rundir.directory import RunDir
from shardway.rundir.file_io import is_there, list_names


@dataclass(frozen=True)
class Known:
    """A run that was submitted: its directory on `host` ("": this machine), and the site."""

    run: str
    host: str = ""
    site: str = ""


def render_known(known: Known) -> str:
    """As people name it: the directory, with its host before it where that is another one."""
    return f"{known.host}:{known.run}" if known.host else known.run


# --- the registry of submitted runs


def registry_path() -> Path | None:
    """The file of the registry; None for an account without a home, which has none."""
    folder = find_own_folder("STATE")
    return folder / "submitted-runs" if folder else None


def remember(known: Known) -> bool:
    """Add a run; one that is there already is not added again. Gives whether it is new."""
    if known in read_known():
        return False
    _append(asdict(known))
    return True


def forget(known: Known) -> None:
    """Revoke a run of which nothing is left."""
    _append({**asdict(known), "gone": True})


def _append(table: Mapping[str, object]) -> None:
    if target := registry_path():
        with contextlib.suppress(OSError):
            target.parent.mkdir(parents=True, exist_ok=True)
            with open(target, "a", encoding="utf-8") as file:
                file.write(json.dumps(table) + "\n")


def read_known() -> list[Known]:
    """The runs that are known, oldest first, each once."""
    source = registry_path()
    try:
        lines = source.read_text(encoding="utf-8").splitlines() if source else []
    except (OSError, UnicodeDecodeError):
        return []
    found: dict[Known, None] = {}
    for line in lines:
        with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError, RecursionError):
            table = json.loads(line)
            known = Known(str(table["run"]), str(table.get("host", "")), str(table.get("site", "")))
            if table.get("gone", False):
                found.pop(known, None)
            else:
                found[known] = None
    return list(found)


# --- the run that a word means


@dataclass(frozen=True)
class NamedRun:
    """The run that a word means; `attempt` is the number of the one whose job it names, None for any other word."""

    known: Known
    attempt: int | None = None
    job: str = ""


def find_known(word: str) -> Known:
    """The run that is meant. Raises UserError for none and for several."""
    return find_named(word).known


def find_named(word: str) -> NamedRun:
    """The run that is meant, with the attempt where a word is the id of a job. Raises UserError for none and for
    several.

    A word is a run directory, a path inside one, HOST:DIRECTORY, a run's name, or a job's id; of a name or an id,
    HOST: before it leaves out the other hosts.
    """
    if remote := re.fullmatch(r"(?P<host>[^/:]+):(?P<run>[/~].*)", word):
        return NamedRun(Known(remote["run"], remote["host"]))
    if is_run(Path(word)):
        return NamedRun(Known(word))
    if (around := find_run_around(Path(word))) is not None:
        return NamedRun(Known(str(around)))
    prefixed = re.fullmatch(r"(?P<host>[^/:]+):(?P<name>[^/:]+)", word)
    host, name = (prefixed["host"], prefixed["name"]) if prefixed else (None, word)
    named = [NamedRun(known) for known in _list_named(name) if host is None or known.host == host]
    candidates: list[Known] = []
    if not named or _JobName.parse(name) is not None:  # only then are other runs looked at: they may be out of reach
        candidates = [known for known in find_all(Path("runs")) if host is None or known.host == host]
    jobs = _JobSearch(candidates)
    named += [found for found in jobs.find(name) if found.known not in [each.known for each in named]]
    if len(named) == 1:
        return named[0]
    if named:
        listed = "\n".join(
            f"    {render_known(each.known)}" + (f" (job {each.job}, attempt {each.attempt})" if each.attempt else "")
            for each in named
        )
        what = "the id of a job" if any(each.attempt for each in named) else "the name"
        raise UserError(f'"{word}" is {what} of {len(named)} runs; name one of them by its directory:\n{listed}')
    raise UserError("\n".join(_describe_unknown(word, name, candidates, jobs)))


def _list_named(name: str) -> list[Known]:
    """The runs of that name: in ./runs, then those that were submitted from anywhere, each once. Registered paths are
    absolute; a path in ./runs is found before."""
    here = Path("runs", name)
    inside = [Known(str(here))] if "/" not in name and _may_be_run(here) else []
    place = ("", str(here.absolute()))
    known = [each for each in read_known() if name in (Path(each.run).name, each.run)]
    others = [each for each in known if not (inside and (each.host, each.run) == place) and _may_be_there(each)]
    return [*inside, *others]


def _describe_unknown(word: str, name: str, candidates: Sequence[Known], jobs: _JobSearch) -> Iterator[str]:
    """Why no run is meant, what was looked through, and what is close."""
    from difflib import get_close_matches

    yield f"there is no run {shlex.quote(word)}."
    if _JobName.parse(name) is not None:
        yield f"  It may be the id of a job, but none of {_count(len(candidates), 'known run')} has had a job {name}."
        if jobs.seen:
            yield f"  Their newest jobs: {', '.join(jobs.seen[-5:])}."
        for host, silence in jobs.silent.items():
            yield f"  {host} did not answer, so its runs were not looked through: {silence}"
        yield "  A job that was not submitted by Shardway has no run directory, and nothing was recorded of it."
    elif os.path.lexists(word):
        what = "folder, but no run is in it" if os.path.isdir(word) else "file, but it lies in no run directory"
        yield f"  It is a {what}."
    short = {each: render_known(known) for known in candidates for each in (Path(known.run).name, known.run)}
    if close := get_close_matches(name, [*short], n=3, cutoff=0.75):
        yield f"  Did you mean {' or '.join(dict.fromkeys(short[each] for each in close))}?"
    yield "  Allowed: a run directory, HOST:DIRECTORY, the name of a run that you submitted, the id of its job."
    yield "  To do: choose one of those that `shardway status --all` lists."


def _count(number: int, noun: str) -> str:
    return f"the {number} {noun}s" if number != 1 else f"the one {noun}"


def find_run_around(path: Path) -> Path | None:
    """The run directory in which a path lies, or None. Raises JobError where the file system does not answer."""
    if not os.path.lexists(path):
        return None
    whole = Path(os.path.abspath(path))
    around = next((folder for folder in whole.parents if is_run(folder)), None)
    if around is None or path.is_absolute():
        return around
    return Path(os.path.relpath(around))


# --- jobs by their ids


_JOB_NAME = re.compile(r"(?P<number>\d+)(?:\+\d+)?(?P<task>\[[^\[\]]*\]|_[\w\[\],:%-]+)?(?:\.(?P<rest>[\w.-]+))?")
_STEP_OF_JOB = re.compile(r"\d+|batch|extern|interactive")


@dataclass(frozen=True)
class _JobName:
    """A job's id in parts: "123_4" (a task of Slurm's arrays), "29084[3].server" (PBS), "4711.8123" (a process here and
    its start). `task` has its brackets or its line; `rest` is what follows a point: a server, a step, a start."""

    number: str
    task: str
    rest: str

    @classmethod
    def parse(cls, text: str) -> _JobName | None:
        found = _JOB_NAME.fullmatch(text)
        return cls(found["number"], found["task"] or "", found["rest"] or "") if found else None

    def means(self, job: _JobName) -> bool:
        """Whether a person that writes this means that job: a server's domain and a step may be left out or added, and
        an array stands for its tasks, a task for its array."""
        if self.number != job.number or not self._fits_task(job.task):
            return False
        mine, its = self.rest, job.rest
        if not mine or mine == its:
            return True
        if not its:  # a step of a job of Slurm
            return _STEP_OF_JOB.fullmatch(mine) is not None
        return mine.startswith(f"{its}.") or its.startswith(f"{mine}.")

    def _fits_task(self, its: str) -> bool:
        mine = self.task
        if not mine or mine == its or mine == "[]":
            return True
        if mine.startswith("["):
            return its == "[]"
        return not its or its.startswith("_[")


class _JobSearch:
    """Looks through the attempts of runs for a job. `seen`: the jobs that were looked at, as words; `silent`: hosts
    that did not answer, with the reason."""

    def __init__(self, runs: Sequence[Known]) -> None:
        self._runs = runs
        self.seen: list[str] = []
        self.silent: dict[str, str] = {}

    def find(self, word: str) -> list[NamedRun]:
        """The runs with that job: those of this machine if there are any, else those of other hosts; those whose id is
        exactly this one, else those that it may stand for."""
        name = _JobName.parse(word)
        if name is None:
            return []
        hosts = groupby(sorted(self._runs, key=lambda known: known.host), key=lambda known: known.host)
        exact: dict[Known, NamedRun] = {}
        loose: dict[Known, NamedRun] = {}
        for host, runs in hosts:
            for found in self._list_jobs(host, [*runs]):  # of several attempts with one job the newest stays
                if found.job == word:
                    exact[found.known] = found
                elif (job := _JobName.parse(found.job)) is not None and name.means(job):
                    loose[found.known] = found
            if (exact or loose) and host == "":
                break
        return list((exact or loose).values())

    def _list_jobs(self, host: str, runs: Sequence[Known]) -> Iterator[NamedRun]:
        if not host:
            for known in runs:
                with contextlib.suppress(JobError):  # it cannot be looked at, and is no answer
                    for attempt in RunDir(Path(known.run)).attempts():
                        records = attempt.read_submission(), attempt.read_started()
                        jobs = dict.fromkeys(record.job for record in records if record is not None and record.job)
                        yield from (self._note(known, attempt.number, job) for job in jobs)
            return
        from shardway.launch.hosts import find_host
        from shardway.launch.runs.job_status import read_ledgers

        try:
            ledgers = read_ledgers(find_host(host), [Path(known.run) for known in runs])
        except SiteError as error:
            self.silent[host] = str(error).splitlines()[0]
            return
        for known, ledger in zip(runs, ledgers, strict=True):
            yield from (self._note(known, entry.number, entry.job) for entry in ledger.entries if entry.job)

    def _note(self, known: Known, attempt: int, job: str) -> NamedRun:
        self.seen.append(f"{job} ({render_known(known)})")
        return NamedRun(known, attempt, job)


# --- all runs


def find_all(folder: Path) -> list[Known]:
    """The runs in a folder here, then those that were submitted from anywhere, each once."""
    here = list_runs(folder)
    places = {("", str(path.absolute())) for path in here}
    others = [known for known in read_known() if (known.host, known.run) not in places and _may_be_there(known)]
    return [*(Known(str(path)) for path in here), *others]


def list_runs(folder: Path) -> list[Path]:
    """The runs in a folder here, by name; none where there is no folder. Raises JobError where it does not answer."""
    return sorted(folder / name for name in list_names(folder) if _may_be_run(folder / name))


def is_run(path: Path) -> bool:
    """Whether a folder here is a run that was trained or submitted. Raises JobError where it does not answer."""
    return RunDir(path).exists() or is_there(RunDir(path).attempts_folder)


def is_folder_of_runs(path: str | Path) -> bool:
    """Whether a word means the runs in a folder here, and not one run. Raises JobError where it does not answer."""
    return os.path.isdir(path) and not is_run(Path(path))


def _may_be_there(known: Known) -> bool:
    """Whether a known run is on another host, or still here."""
    return known.host != "" or _may_be_run(Path(known.run))


def _may_be_run(path: Path) -> bool:
    """`is_run` if a file system may be unreachable: reading that run later reports it, and the others are found."""
    try:
        return is_run(path)
    except JobError:
        return True
