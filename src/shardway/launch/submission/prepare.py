"""Prepares a submission: from the words of `shardway submit` to one value, with all problems at once.

Invariants:
- The problems of one source hide none of another.
- Preparing writes nothing, here or on the site. Its result is what would be written and submitted; all its problems
  have been reported.
- Secrets file: only names and line numbers are returned, never a value or the text of a line. The host reads it with
  the function that the job uses (`launch/shell/secret_lines.sh`), so both apply one rule.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import TypeVar

from shardway.errors import Bug, Problem, UserError, check_no_problems
from shardway.inherited import describe_options
from shardway.launch.hosts.base import Host
from shardway.launch.job import SECRETS, Chain, Job, Program
from shardway.launch.job_script import render_job_script
from shardway.launch.runs.job_status import Ledger, read_ledger
from shardway.launch.script import quote_all, read_block
from shardway.launch.snapshot import SnapshotPlan, plan_snapshot
from shardway.launch.submission import host_checks, site_checks
from shardway.launch.submission.command import CommandRead, read_command
from shardway.launch.submission.host_checks import Code
from shardway.launch.submission.job_request import JobRequest, build_job, with_account, with_site_defaults
from shardway.places import expand_place
from shardway.resolve.draft import Resolved
from shardway.resolve.request import ResolveRequest
from shardway.rundir.attempts import Attempt
from shardway.rundir.directory import RunDir
from shardway.rundir.file_io import read_fields
from shardway.runfile.load import DEFAULT, LoadedRunFile, load_run
from shardway.runfile.write import render_run, render_value
from shardway.sites.find import find_profile
from shardway.sites.load import flatten_profile, load_site
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
    told = {name.lower(): _as_line(text) for name, text in zip(tail[::2], tail[1::2], strict=True)}
    return Problem(where, _as_line(what), allowed=told.get("allowed", ""), remedy=told.get("to do", ""))


def _as_line(text: str) -> str:
    return " ".join(text.split()).removesuffix(".")


# --- the user's secrets file

_TELL = """
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
    shell = read_block("secret_lines", "read_secrets").text + _TELL
    told, mode = host.run_many([("bash", "-c", shell, str(path)), ("stat", "-c", "%a", str(path))])
    if not told.ok:
        return Secrets()
    faults, *names = told.out.splitlines()
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

    request: ResolveRequest
    site: str = ""
    command: tuple[str, ...] = ()
    until_done: bool = False
    max_attempts: int = 0
    here: Path = field(default_factory=Path.cwd)


@dataclass(frozen=True)
class Prepared:
    """A prepared submission. `files`: those of the attempt's folder beside its script. `ledger`: the run's attempts so
    far."""

    wish: JobRequest
    job: Job
    files: dict[Path, str]
    snapshot: SnapshotPlan | None
    warnings: tuple[str, ...]
    ledger: Ledger

    @property
    def script(self) -> str:
        """The job script."""
        return render_job_script(self.job)


def prepare(order: SubmitRequest, host: Host, *, look: bool = False) -> Prepared:
    """Everything of the next attempt, or of the newest again if its submission was interrupted.

    `look`: check on the host what the job will need. Raises UserError with every problem that can be found,
    HostUnreachable.
    """
    findings = ProblemCollector()
    loaded, profile = _load(order)
    options = host.read_options() if profile.scheduler == "slurm" else {}
    loaded = with_account(loaded, profile, options)
    run, secrets_path = _find_places(order, loaded, host)
    if order.request.directory is not None:
        loaded = loaded.with_origin("run.root", "--dir")
    nothing: tuple[SnapshotPlan | None, tuple[str, ...]] = (None, ())
    snapshot, notes = findings.collect("the code", lambda: _plan_snapshot(order, host), nothing)
    ledger = read_ledger(host, run)
    number = ledger.next_number
    folder = RunDir(run).attempt(number)
    secrets = read_secrets(host, secrets_path)
    program, read = _train_program(folder.run_file, run), None
    if order.command:
        nodes = loaded.values.site.nodes
        read = findings.collect("the command", lambda: read_command(order.command, order.here, nodes), _REFUSED)
        program = read.program
    wish = JobRequest(
        loaded=loaded,
        profile=profile,
        run=run,
        workdir=_work_folder(order, host, snapshot, folder),
        code=folder.code if snapshot and order.command else None,
        program=program,
        read=read,
        chain=_chain(order, profile, number),
        project=snapshot.root if snapshot and snapshot.links else None,
        source=order.here if snapshot and not host.name else None,
        token=os.urandom(3).hex(),
        secret_names=secrets.names,
        here=sys.prefix if not host.name and sys.prefix != sys.base_prefix else "",
    )
    findings.problems += secrets.list_problems()
    code = Code(order.here, snapshot, is_there=snapshot is not None or not host.name)
    resolved = _find_problems(findings, order, wish, code)
    if resolved is not None and ledger.status:
        findings.collect("what has changed", lambda: site_checks.check_goes_on(host, ledger, resolved), None)
    if look:
        findings.problems += host_checks.list_host_problems(wish, host, code)
    findings.check(f"the job for {profile.name}")
    files = {folder.order_path: render_order(replace(order, site=_site_word(loaded, order.here)))}
    if not order.command:
        loaded, copies = _carry_site(loaded, folder)
        files |= copies
        files[folder.run_file] = render_run(loaded.values, loaded.origins, _is_set(loaded))
    warnings = (
        *(*notes, *secrets.warnings, *describe_options(options, _asked(wish)), *site_checks.list_warnings(wish)),
        *(*host_checks.list_warnings(wish, code), *_describe_other_command(order, host, ledger)),
    )
    return Prepared(wish, build_job(wish, number), files, snapshot, warnings, ledger)


def _asked(wish: JobRequest) -> dict[str, str]:
    """What the job requests from Slurm, as values of sbatch options, by their keys."""
    terms = build_job(wish, 1).terms
    own = {"site.account": terms.account, "site.queue": terms.partition, "site.walltime": f"{terms.walltime_s:g} s"}
    return {**{f"site.options.{name}": str(value) for name, value in terms.options.items()}, **own}


def _find_problems(findings: ProblemCollector, order: SubmitRequest, wish: JobRequest, code: Code) -> Resolved | None:
    """The problems of a request that can be found without its host. Returns the resolved run file if there is one."""
    for check in (*site_checks.NUMBER_CHECKS, *site_checks.NAME_CHECKS):
        findings.problems += check(wish)
    shape_is_known = not {"site.nodes", "site.ranks_per_node"} & {problem.where for problem in findings.problems}
    if order.command:
        findings.problems += host_checks.list_local_problems(wish, code)
    elif shape_is_known:  # a run file is checked for the ranks that the job will have
        title = str(order.request.run_file or "the run")
        return findings.collect(title, lambda: site_checks.check_run(order.request, order.site, wish), None)
    return None


@dataclass(frozen=True)
class _Recorded:
    """The fields of an order in `order.json`; all are required."""

    overrides: tuple[str, ...]
    site: str
    command: tuple[str, ...]
    until_done: bool
    max_attempts: int
    here: str


def render_order(order: SubmitRequest) -> str:
    """The text of `order.json`, from which `shardway resume` makes the next order."""
    request = order.request
    table = {
        "format": 1,
        "run_file": str(request.run_file.absolute()) if request.run_file else "",
        "overrides": list(request.overrides),
        "site": order.site,
        "command": list(order.command),
        "until_done": order.until_done,
        "max_attempts": order.max_attempts,
        "here": str(order.here),
    }
    return json.dumps(table, indent=1) + "\n"


def parse_order(text: str, run: Path, run_file: Path | None) -> SubmitRequest | None:
    """The order in such a text, for the same run directory; None if it is damaged. `run_file` holds all values of the
    run file and the overrides of that time."""
    try:
        known = read_fields(_Recorded, json.loads(text))
    except (ValueError, RecursionError):
        return None
    if known is None:
        return None
    request = ResolveRequest(run_file, () if run_file else known.overrides, run)
    return SubmitRequest(request, known.site, known.command, known.until_done, known.max_attempts, Path(known.here))


def _load(order: SubmitRequest) -> tuple[LoadedRunFile, SiteProfile]:
    findings, title = ProblemCollector(), str(order.request.run_file or "the command line")
    loaded = findings.collect(title, lambda: load_run(order.request.run_file, order.request.overrides), None)
    if order.site and loaded:
        loaded = loaded.with_value("site.name", order.site, "--on")
    name = loaded.values.site.name if loaded else order.site
    profile = findings.collect(f"the site {name}", lambda: load_site(name), None) if name else None
    if not loaded or not profile:
        findings.check("what was asked for")
        raise Bug("a run or a site was not loaded, and nothing says why")
    return with_site_defaults(loaded, profile), profile


def _site_word(loaded: LoadedRunFile, here: Path) -> str:
    """The site in a form that is found from any folder."""
    name = loaded.values.site.name
    is_shipped_or_own = find_profile(name).origin != "file"
    return name if is_shipped_or_own else str(here / expand_place(name))


def _carry_site(loaded: LoadedRunFile, folder: Attempt) -> tuple[LoadedRunFile, dict[Path, str]]:
    """The run with a copy of its site profile beside it if the profile is the user's own, since in a container or on
    another host that file is not visible."""
    name = loaded.values.site.name
    if find_profile(name).origin == "shipped":
        return loaded, {}
    text = "".join(f"{key} = {render_value(value)}\n" for key, value in flatten_profile(name).items())
    return loaded.with_value("site.name", str(folder.site_file), f"copy of {name}"), {folder.site_file: text}


def _find_places(order: SubmitRequest, loaded: LoadedRunFile, host: Host) -> tuple[Path, PurePosixPath]:
    """The run directory and the secrets file on the host. Raises UserError for a variable that the host does not
    set."""
    directory, root = order.request.directory, loaded.values.run.root
    try:
        path, secrets = host.expand_many([str(directory or root), SECRETS])
    except UserError as error:
        where = "--dir" if directory is not None else f"run.root, {loaded.origins['run.root']}"
        raise UserError(f"the run directory ({where}): {error}") from None
    return Path(path) if directory is not None else Path(path) / _name_run(order, loaded), secrets


def _name_run(order: SubmitRequest, loaded: LoadedRunFile) -> str:
    """The name of the run: by default that of the file or script."""
    name = loaded.values.run.name
    if name == "auto":
        module = order.command[order.command.index("-m") + 1 :][:1] if "-m" in order.command else ()
        named = [word for word in order.command if word.endswith(".py")] or [word.rpartition(".")[2] for word in module]
        named = named or list(order.command[:1])
        name = Path(named[0]).stem if named else (loaded.path.stem if loaded.path else "default")
    return name


def _plan_snapshot(order: SubmitRequest, host: Host) -> tuple[SnapshotPlan | None, tuple[str, ...]]:
    """The snapshot and its notes. A run file without a command brings no code: if no snapshot can be made, none is
    used."""
    try:
        plan = plan_snapshot(order.here, links=not host.name)
    except UserError as error:
        if order.command:
            raise
        return None, (f"no snapshot of the code was made: {str(error).splitlines()[0]}",)
    if not order.command and plan.revision is None:
        return None, ()
    return plan, plan.notes


def _describe_other_command(order: SubmitRequest, host: Host, ledger: Ledger) -> Iterator[str]:
    """A warning if the run had another command, whose outputs this one would find in its working folder."""
    paths = [PurePosixPath(entry.attempt.order_path) for entry in ledger.entries] if order.command else []
    texts = host.read_files(paths) if paths else {}
    last = next((texts[path] for path in reversed(paths) if path in texts), "")
    before = parse_order(last, ledger.run.path, None)
    if before is not None and before.command and before.command != order.command:
        yield (
            f"{ledger.run.path} ran another command, `{quote_all(before.command)}`, and this one finds what it wrote: "
            "both work in its folder `work`; where that is not meant, name another run (run.name, --dir)"
        )


def _work_folder(order: SubmitRequest, host: Host, snapshot: SnapshotPlan | None, folder: Attempt) -> Path:
    """Where the ranks work: a training in the snapshot, any other program in the run's folder for its outputs. Without
    a snapshot: in the submitting folder or, if that is on another host, in the run directory.
    """
    if snapshot is None:
        return folder.run_path if host.name else order.here
    return snapshot.start_folder(RunDir(folder.run_path).work if order.command else folder.code)


def _train_program(run_file: Path, run: Path) -> Program:
    return Program(("-m", "shardway", "train", str(run_file), "--dir", str(run)), meets_by_itself=True)


def _chain(order: SubmitRequest, profile: SiteProfile, number: int) -> Chain:
    if not order.until_done:
        return Chain(max_attempts=number)
    ahead = profile.request.submit_from_nodes is False
    most = order.max_attempts or (min(profile.request.max_jobs or 5, 5) if ahead else OPEN_CHAIN)
    return Chain(until_done=True, max_attempts=number + most - 1, ahead=ahead)


def _is_set(loaded: LoadedRunFile) -> Callable[[str], bool]:
    """Whether a key goes into the run file of an attempt: unset keys are resolved again on the machine of the ranks."""
    return lambda dotted: loaded.origins[dotted] != DEFAULT
