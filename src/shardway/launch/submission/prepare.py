"""Prepares a submission: from the words of `shardway submit` to one value, with all problems at once.

Invariants:
- The problems of one source hide none of another.
- Preparing writes nothing, here or on the site. Its result is what would be written and submitted; all its problems
  have been reported.
- Secrets file: only names and line numbers are returned, never a value or the text of a line. The host reads it with
  the function that the job uses (`launch/shell/lib.sh`), so both apply one rule.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TypeVar

from shardway.errors import Bug, Problem, UserError, check_no_problems
from shardway.inherited import describe_options
from shardway.launch.hosts.base import Host
from shardway.launch.job import SECRETS, Chain, Job, Program
from shardway.launch.job_script import render_job_script
from shardway.launch.runs.job_status import Ledger, read_ledger
from shardway.launch.schedulers.base import Scheduler, find_scheduler
from shardway.launch.script import quote_all, read_block
from shardway.launch.snapshot import plan_snapshot
from shardway.launch.snapshot_files import SnapshotPlan
from shardway.launch.submission import host_checks, site_checks
from shardway.launch.submission.command import CommandRead, read_command
from shardway.launch.submission.host_checks import Code
from shardway.launch.submission.job_request import JobRequest, build_job, with_account, with_site_defaults
from shardway.places import expand_place
from shardway.resolve.request import ResolveRequest
from shardway.rundir.attempts import Attempt
from shardway.rundir.directory import RunDir
from shardway.rundir.file_io import read_fields
from shardway.runfile.load import COMMAND_LINE, DEFAULT, LoadedRunFile, load_run, render_run, render_value
from shardway.sites.load import find_profile, flatten_profile, load_site
from shardway.sites.schema import SiteProfile

# --- problems of several sources as one list

T = TypeVar("T")


@dataclass
class ProblemCollector:
    """Collects problems of several sources."""

    problems: list[Problem] = field(default_factory=list)
    _errors: list[UserError] = field(default_factory=list)

    def collect(self, where: str, make: Callable[[], T], otherwise: T) -> T:
        """The result of `make`. Its UserError is recorded as problems of `where`, unless it names its place; then the
        result is `otherwise`."""
        try:
            return make()
        except UserError as error:
            self._errors.append(error)
            self.problems += error.problems or [_as_problem(where, str(error))]
            return otherwise

    def check(self, title: str) -> None:
        """Raise one UserError with all problems, each once; a single error keeps its wording."""
        if len(self._errors) == 1 and len(self.problems) == max(1, len(self._errors[0].problems)):
            raise self._errors[0]
        check_no_problems(title, list(dict.fromkeys(self.problems)))


def _as_problem(where: str, message: str) -> Problem:
    """A message as one problem: the parts after "allowed:" and "to do:" become its fields."""
    what, *tail = re.split(r"\n\s*(allowed|to do): ", message, flags=re.IGNORECASE)
    parts = {name.lower(): _as_line(text) for name, text in zip(tail[::2], tail[1::2], strict=True)}
    return Problem(where, _as_line(what), allowed=parts.get("allowed", ""), remedy=parts.get("to do", ""))


def _as_line(text: str) -> str:
    return " ".join(text.split()).removesuffix(".")


# --- the user's secrets file

_PRINT = """
read_secrets "$0" 2> /dev/null
printf '%s\\n' "${secret_faults[*]}" "${secret_names[@]}"
"""


@dataclass(frozen=True)
class Secrets:
    """Names that a secrets file sets, and numbers of lines that set nothing. `is_open`: users other than its owner can
    read it."""

    names: tuple[str, ...] = ()
    faults: tuple[int, ...] = ()
    is_open: bool = False

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings for its owner."""
        return (f"others can read {SECRETS}; close it: `chmod 600 {SECRETS}`",) if self.is_open else ()

    def list_problems(self) -> Iterator[Problem]:
        """A problem for each line that the job would skip, by its number alone."""
        for number in self.faults:
            yield Problem(
                f"{SECRETS}, line {number}",
                "it sets no variable that a job may set (its text is not shown)",
                allowed="NAME=value, the name of letters, digits and _, and none that bash keeps for itself",
                remedy="correct that line, or put # before it",
            )


def read_secrets(host: Host, path: PurePosixPath) -> Secrets:
    """What the secrets file on the host sets, and whether other users can read it; nothing if there is no file."""
    shell = read_block("lib", "read_secrets").text + _PRINT
    found, mode = host.run_many([("bash", "-c", shell, str(path)), ("stat", "-c", "%a", str(path))])
    if not found.ok:
        return Secrets()
    faults, *names = found.out.splitlines()
    is_open = mode.ok and not mode.out.strip().endswith("00")
    return Secrets(tuple(dict.fromkeys(filter(None, names))), tuple(map(int, faults.split())), is_open)


# --- everything of a submission as one value

OPEN_CHAIN = 100
"""Most attempts of a chain of unstated length; each link submits the next, so none waits in vain."""


_REFUSED = CommandRead(Program(("-m", "torch")))
"""Replaces a refused command, so that the rest of the job can be checked."""


@dataclass(frozen=True)
class SubmitRequest:
    """What the verb was given: a run file or a command, where to run it, and how often.

    `site` is that of --on, `command` the words after `--`. `max_attempts` 0: as many as the work needs.
    """

    run_request: ResolveRequest
    site: str = ""
    command: tuple[str, ...] = ()
    until_done: bool = False
    max_attempts: int = 0
    here: Path = field(default_factory=Path.cwd)


@dataclass(frozen=True)
class Prepared:
    """A prepared submission. `files`: those of the attempt's folder beside its script. `ledger`: the run's attempts so
    far."""

    request: JobRequest
    job: Job
    files: dict[Path, str]
    snapshot: SnapshotPlan | None
    warnings: tuple[str, ...]
    ledger: Ledger

    @property
    def script(self) -> str:
        """The job script."""
        return render_job_script(self.job)


def prepare(request: SubmitRequest, host: Host, *, look: bool = False) -> Prepared:
    """Everything of the next attempt, or of the newest again if its submission was interrupted.

    `look`: check on the host what the job will need. Raises UserError with every problem that can be found,
    HostUnreachable.
    """
    findings = ProblemCollector()
    loaded, profile = _load(request)
    options = _read_options(host, find_scheduler(profile.scheduler))
    loaded = with_account(loaded, profile, options)
    run, secrets_path = _find_places(request, loaded, host)
    if request.run_request.directory is not None:
        loaded = loaded.with_origin("run.root", "--dir")
    nothing: tuple[SnapshotPlan | None, tuple[str, ...]] = (None, ())
    snapshot, notes = findings.collect("the code", lambda: _plan_snapshot(request, host), nothing)
    ledger = read_ledger(host, run)
    number = ledger.next_number
    folder = RunDir(run).attempt(number)
    secrets = read_secrets(host, secrets_path)
    read = None
    program = Program(("-m", "shardway", "train", str(folder.run_file), "--dir", str(run)), meets_by_itself=True)
    if request.command:
        nodes = loaded.values.site.nodes
        read = findings.collect("the command", lambda: read_command(request.command, request.here, nodes), _REFUSED)
        program = read.program
    # where the ranks work: a training in the snapshot, any other program in the run's folder for its outputs; without a
    # snapshot in the submitting folder or, if that is on another host, in the run directory
    workdir = run if host.name else request.here
    if snapshot is not None:
        workdir = snapshot.start_folder(RunDir(run).work if request.command else folder.code)
    job_request = JobRequest(
        loaded=loaded,
        profile=profile,
        run=run,
        workdir=workdir,
        code=folder.code if snapshot and request.command else None,
        program=program,
        read=read,
        chain=_plan_chain(request, profile, number),
        project=snapshot.root if snapshot and snapshot.links else None,
        source=request.here if snapshot and not host.name else None,
        token=os.urandom(3).hex(),
        secret_names=secrets.names,
        here=sys.prefix if not host.name and sys.prefix != sys.base_prefix else "",
    )
    code = Code(request.here, snapshot, is_there=snapshot is not None or not host.name)
    findings.problems += secrets.list_problems()
    for check in (*site_checks.NUMBER_CHECKS, *site_checks.NAME_CHECKS):
        findings.problems += check(job_request)
    if request.command:
        findings.problems += host_checks.list_local_problems(job_request, code)
    elif not {"site.nodes", "site.ranks_per_node"} & {problem.where for problem in findings.problems}:
        # a run file is checked for the ranks that the job will have
        ranks = partial(site_checks.check_run, request.run_request, request.site, job_request)
        resolved = findings.collect(str(request.run_request.run_file or "the run"), ranks, None)
        if resolved is not None and ledger.status:
            findings.collect("what has changed", partial(site_checks.check_goes_on, host, ledger, resolved), None)
    if look:
        findings.problems += host_checks.list_host_problems(job_request, host, code)
    findings.check(f"the job for {profile.name}")
    job = build_job(job_request, number)
    return Prepared(
        job_request,
        job,
        _list_files(request, loaded, folder),
        snapshot,
        (
            *(*notes, *secrets.warnings, *describe_options(options, _list_requested(job))),
            *(*site_checks.list_warnings(job_request), *host_checks.list_warnings(job_request, code)),
            *_describe_other_command(request, host, ledger),
        ),
        ledger,
    )


def _load(request: SubmitRequest) -> tuple[LoadedRunFile, SiteProfile]:
    findings, title = ProblemCollector(), str(request.run_request.run_file or "the command line")
    run_file, overrides = request.run_request.run_file, request.run_request.overrides
    loaded = findings.collect(title, lambda: load_run(run_file, overrides), None)
    if request.site and loaded:
        loaded = loaded.with_value("site.name", request.site, "--on")
    name = loaded.values.site.name if loaded else request.site
    profile = findings.collect(f"the site {name}", lambda: load_site(name), None) if name else None
    if not loaded or not profile:
        findings.check("what was asked for")
        raise Bug("a run or a site was not loaded, and nothing says why")
    return with_site_defaults(loaded, profile), profile


def _find_places(request: SubmitRequest, loaded: LoadedRunFile, host: Host) -> tuple[Path, PurePosixPath]:
    """The run directory and the secrets file on the host. Raises UserError for a variable that the host does not
    set."""
    directory, root = request.run_request.directory, loaded.values.run.root
    try:
        path, secrets = host.expand_many([str(directory or root), SECRETS])
    except UserError as error:
        where = "--dir" if directory is not None else f"run.root, {loaded.origins['run.root']}"
        raise UserError(f"the run directory ({where}): {error}") from None
    return Path(path) if directory is not None else Path(path) / _name_run(request, loaded), secrets


def _name_run(request: SubmitRequest, loaded: LoadedRunFile) -> str:
    """The name of the run: by default that of the file, script or module."""
    name, command = loaded.values.run.name, request.command
    if name == "auto":
        module = command[command.index("-m") + 1 :][:1] if "-m" in command else ()
        named = [word for word in command if word.endswith(".py")] or [word.rpartition(".")[2] for word in module]
        named = named or list(command[:1])
        name = Path(named[0]).stem if named else (loaded.path.stem if loaded.path else "default")
    return name


def _plan_snapshot(request: SubmitRequest, host: Host) -> tuple[SnapshotPlan | None, tuple[str, ...]]:
    """The snapshot and its notes. A run file without a command brings no code: if no snapshot can be made, none is
    used."""
    try:
        plan = plan_snapshot(request.here, links=not host.name)
    except UserError as error:
        if request.command:
            raise
        return None, (f"no snapshot of the code was made: {str(error).splitlines()[0]}",)
    if not request.command and plan.revision is None:
        return None, ()
    return plan, plan.notes


def _plan_chain(request: SubmitRequest, profile: SiteProfile, number: int) -> Chain:
    if not request.until_done:
        return Chain(max_attempts=number)
    ahead = profile.request.submit_from_nodes is False
    most = request.max_attempts or (min(profile.request.max_jobs or 5, 5) if ahead else OPEN_CHAIN)
    return Chain(until_done=True, max_attempts=number + most - 1, ahead=ahead)


def _list_files(request: SubmitRequest, loaded: LoadedRunFile, folder: Attempt) -> dict[Path, str]:
    """The attempt's files beside its script: the request, and for a run file that file with the keys that are set
    (unset ones are resolved again on the machine of the ranks) and a copy of a site profile of the user's own, which is
    not visible in a container or on another host."""
    name = loaded.values.site.name
    origin = find_profile(name).origin
    anywhere = name if origin != "file" else str(request.here / expand_place(name))  # found from any folder
    files = {folder.order_path: render_order(replace(request, site=anywhere))}
    if not request.command:
        if origin != "shipped":
            table = flatten_profile(name)
            files[folder.site_file] = "".join(f"{key} = {render_value(value)}\n" for key, value in table.items())
            loaded = loaded.with_value("site.name", str(folder.site_file), f"copy of {name}")
        origins = loaded.origins
        files[folder.run_file] = render_run(loaded.values, origins, lambda dotted: origins[dotted] != DEFAULT)
    return files


def _read_options(host: Host, scheduler: Scheduler) -> dict[str, str]:
    """The variables on the host that hold options for the command that submits."""
    heads = tuple(family.options for family in scheduler.inherited if family.options)
    return {name: value for name, value in host.read_options().items() if name.startswith(heads)} if heads else {}


def _list_requested(job: Job) -> dict[str, str]:
    """What the job requests from its scheduler, as values of options, by their keys."""
    terms = job.terms
    own = {"site.account": terms.account, "site.queue": terms.partition, "site.walltime": f"{terms.walltime_s:g} s"}
    return {**{f"site.options.{name}": str(value) for name, value in terms.options.items()}, **own}


def _describe_other_command(request: SubmitRequest, host: Host, ledger: Ledger) -> Iterator[str]:
    """A warning if the run had another command, whose outputs this one would find in its working folder."""
    paths = [PurePosixPath(entry.attempt.order_path) for entry in ledger.entries] if request.command else []
    texts = host.read_files(paths) if paths else {}
    last = next((texts[path] for path in reversed(paths) if path in texts), "")
    before = parse_order(last, ledger.run.path, None)
    if before is not None and before.command and before.command != request.command:
        yield (
            f"{ledger.run.path} ran another command, `{quote_all(before.command)}`, and this one finds what it wrote: "
            "both work in its folder `work`; where that is not meant, name another run (run.name, --dir)"
        )


# --- the request as recorded in the attempt's folder (order.json), and that of a run that goes on


@dataclass(frozen=True)
class _RecordedRequest:
    """The fields of `order.json`; all are required."""

    overrides: tuple[str, ...]
    site: str
    command: tuple[str, ...]
    until_done: bool
    max_attempts: int
    here: str


def render_order(request: SubmitRequest) -> str:
    """The text of `order.json`, from which `shardway resume` makes the next request."""
    run_file = request.run_request.run_file
    table = {
        "format": 1,
        "run_file": str(run_file.absolute()) if run_file else "",
        "overrides": list(request.run_request.overrides),
        "site": request.site,
        "command": list(request.command),
        "until_done": request.until_done,
        "max_attempts": request.max_attempts,
        "here": str(request.here),
    }
    return json.dumps(table, indent=1) + "\n"


def parse_order(text: str, run: Path, run_file: Path | None) -> SubmitRequest | None:
    """The request in such a text, for the same run directory; None if it is damaged. `run_file` holds all values of the
    run file and the overrides of that time."""
    try:
        known = read_fields(_RecordedRequest, json.loads(text))
    except (ValueError, RecursionError):
        return None
    if known is None:
        return None
    run_request = ResolveRequest(run_file, () if run_file else known.overrides, run)
    return SubmitRequest(run_request, known.site, known.command, known.until_done, known.max_attempts, Path(known.here))


@contextlib.contextmanager
def read_last_request(host: Host, run: Path) -> Iterator[SubmitRequest]:
    """The last request of a run; its run file is there for as long as the context lasts. For a run that was trained by
    hand, what it was started with.

    Raises UserError where nothing says how the run was started, or its record is damaged.
    """
    attempts = [entry.attempt for entry in read_ledger(host, run).entries]
    texts = host.read_files([PurePosixPath(p) for attempt in attempts for p in (attempt.order_path, attempt.run_file)])
    last = next((a for a in reversed(attempts) if PurePosixPath(a.order_path) in texts), None)
    if last is None:
        if host.name or not RunDir(run).resolved_path.exists():
            raise UserError(
                f"{run} was never submitted, so nothing says how.\n"
                "  To do: `shardway submit` it, or `shardway train` where it was trained by hand."
            )
        yield request_by_hand(RunDir(run))
        return
    with tempfile.TemporaryDirectory() as scratch:
        kept = texts.get(PurePosixPath(last.run_file))
        run_file = last.run_file if kept is not None else None
        if kept is not None and host.name:  # a copy here of the other machine's file
            run_file = Path(scratch) / last.run_file.name
            run_file.write_text(kept, encoding="utf-8")
        request = parse_order(texts[PurePosixPath(last.order_path)], run, run_file)
        if request is None:
            raise UserError(
                f"{last.order_path} is damaged.\n  To do: submit the run with `shardway submit --dir {run}`."
            )
        yield request


def request_by_hand(run: RunDir) -> SubmitRequest:
    """What a run was started with that no job has trained yet. Raises UserError where its script is not here."""
    if "model" in run.read_resolved():
        return SubmitRequest(
            ResolveRequest(run.request_path, tuple(_list_overrides(run.resolved_path.read_text("utf-8"))), run.path)
        )
    command = next((event.get("command") for event in reversed([*run.all_events(0, ("started",))])), None)
    words = [str(word) for word in command] if isinstance(command, list) and command else [""]
    if not words[0].endswith(".py") or not Path(words[0]).is_file():
        raise UserError(
            f"{run.path} was trained by hand by a script ({words[0] or 'which is not recorded'}), which is not here.\n"
            f"  To do: run this where the script is, or `shardway submit --dir {run.path} -- python SCRIPT ...`."
        )
    return SubmitRequest(ResolveRequest(None, (), run.path), command=("python", *words))


def _list_overrides(resolved: str) -> Iterator[str]:
    """The keys of a resolved run that were set on the command line, as words of one."""
    section = ""
    for line in resolved.splitlines():
        entry, _, origin = line.rpartition(" # ")
        if line.startswith("["):
            section = line.strip("[] ")
        elif origin == COMMAND_LINE:
            name, _, value = entry.partition("=")
            yield f"{section}.{name.strip()}={value.strip()}"
