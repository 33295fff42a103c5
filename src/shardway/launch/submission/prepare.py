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
import shlex
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from shardway.errors import Bug, Problem, UserError, check_no_problems
from shardway.inherited import describe_options, find_account
from shardway.launch.hosts.base import Host
from shardway.launch.job import SECRETS, Chain, Job, Program
from shardway.launch.job_script import render_job_script
from shardway.launch.runs.job_status import Ledger, read_ledger
from shardway.launch.schedulers.base import find_scheduler
from shardway.launch.script import quote_all, read_block
from shardway.launch.snapshot import SnapshotPlan, plan_snapshot
from shardway.launch.submission.command import (
    Code,
    CommandRead,
    list_local_problems,
    list_rank_problems,
    read_command,
    warn_of_copies,
    warn_of_own_files,
)
from shardway.launch.submission.host_checks import list_host_problems
from shardway.launch.submission.job_request import (
    JobRequest,
    build_job,
    check_goes_on,
    check_run,
    list_site_problems,
    list_site_warnings,
    warn_of_python,
)
from shardway.places import expand_place
from shardway.resolve.draft import Resolved
from shardway.resolve.request import ResolveRequest
from shardway.rundir.attempts import Attempt
from shardway.rundir.directory import RunDir
from shardway.rundir.file_io import read_fields
from shardway.runfile.load import COMMAND_LINE, DEFAULT, LoadedRunFile, load_run, render_run, render_value
from shardway.sites.load import find_profile, flatten_profile, load_site
from shardway.sites.schema import SiteProfile

if TYPE_CHECKING:  # a submission that neither serves nor calls needs none of it
    from shardway.launch.calls.packing import FunctionCall
    from shardway.launch.submission.serve import ServeOptions, Serving

# --- problems of several sources as one list


@dataclass
class ProblemCollector:
    """Collects problems of several sources."""

    problems: list[Problem] = field(default_factory=list)
    _errors: list[UserError] = field(default_factory=list)

    @contextlib.contextmanager
    def of(self, where: str) -> Iterator[None]:
        """A UserError inside is recorded as problems of `where`, unless it names its place. The parts of its message
        after "allowed:" and "to do:" become fields of the problem."""
        try:
            yield
        except UserError as error:
            self._errors.append(error)
            what, *tail = re.split(r"\n\s*(allowed|to do): ", str(error), flags=re.IGNORECASE)
            parts = {name.lower(): _as_line(text) for name, text in zip(tail[::2], tail[1::2], strict=True)}
            whole = Problem(where, _as_line(what), allowed=parts.get("allowed", ""), remedy=parts.get("to do", ""))
            self.problems += error.problems or [whole]

    def check(self, title: str) -> None:
        """Raise one UserError with all problems, each once; a single error keeps its wording."""
        if len(self._errors) == 1 and len(self.problems) == max(1, len(self._errors[0].problems)):
            raise self._errors[0]
        check_no_problems(title, list(dict.fromkeys(self.problems)))


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


@dataclass(frozen=True)
class SubmitRequest:
    """What the verb was given: a run file or a command, where to run it, and how often.

    `site` is that of --on, `command` the words after `--`. `max_attempts` 0: as many as the work needs. `follows`: the
    run directory, on the host, of the run that has to be finished first. `serve`: a server to start; `command` is then
    its name and its own options. `call`: a function to call; `command` is then its name. `shell`: the folder's name of
    an interactive shell, for which no attempt is prepared; `workdir`: the folder of the host that it works in, None for
    a copy of the code as it is now.
    """

    run_request: ResolveRequest
    site: str = ""
    command: tuple[str, ...] = ()
    until_done: bool = False
    max_attempts: int = 0
    here: Path = field(default_factory=Path.cwd)
    follows: Path | None = None
    serve: ServeOptions | None = None
    call: FunctionCall | None = None
    shell: str = ""
    workdir: Path | None = None


@dataclass(frozen=True)
class Prepared:
    """A prepared submission. `asked`: the request. `files`: those of the attempt's folder beside its script. `ledger`:
    the run's attempts so far. `options`: those of the host's shell for schedulers. `resolved`: what a run file comes to
    for the job; None for a command. `serving`: the server that it starts."""

    request: JobRequest
    job: Job
    files: dict[Path, str]
    snapshot: SnapshotPlan | None
    warnings: tuple[str, ...]
    ledger: Ledger
    asked: SubmitRequest
    options: Mapping[str, str]
    resolved: Resolved | None = None
    serving: Serving | None = None

    @property
    def script(self) -> str:
        """The job script."""
        return render_job_script(self.job)


def prepare(
    request: SubmitRequest,
    host: Host,
    *,
    look: bool = False,
    like: Prepared | None = None,
    ledger: Ledger | None = None,
) -> Prepared:
    """Everything of the next attempt, or of the newest again if its submission was interrupted.

    `look`: check on the host what the job will need. `like`: another one to the same host, prepared before: what both
    share (profile, snapshot, secrets, what the host has) is not looked for again. `ledger`: that of the run, read
    already. Raises UserError with every problem that can be found, HostUnreachable.
    """
    findings, run_request, warnings = ProblemCollector(), request.run_request, list[str]()
    loaded, profile = load_request(request, like)
    if like is not None and (like.asked.here, bool(like.asked.command)) != (request.here, bool(request.command)):
        like = None
    inherited = find_scheduler(profile.scheduler).inherited
    heads = tuple(family.options for family in inherited if family.options)
    known = like.options if like is not None else host.read_options() if heads else {}
    options = {name: value for name, value in known.items() if name.startswith(heads)} if heads else {}
    name, account = find_account(inherited, options)
    if account and not loaded.values.site.account:
        loaded = loaded.with_default("site.account", account, f"{name} of the shell")
    run, secrets_path = _find_places(request, loaded, host, known=like is not None)
    if run_request.directory is not None:
        loaded = loaded.with_origin("run.root", "--dir")
    snapshot = like.snapshot if like else None
    with findings.of("the code"):
        try:
            if request.serve or request.workdir:
                snapshot = None
            elif like is None:
                snapshot = plan_snapshot(request.here, links=not host.name)
        except UserError as error:
            if request.command and request.call is None:
                raise
            warnings.append(f"no snapshot of the code was made: {str(error).splitlines()[0]}")
        if snapshot and not request.command and snapshot.revision is None:
            snapshot = None  # a run file needs no code; that of a folder which is no repository is not copied for it
        warnings += snapshot.notes if snapshot else ()
    ledger = ledger or read_ledger(host, run)
    number = ledger.next_number
    folder = RunDir(run).attempt(number)
    secrets = Secrets(like.request.secret_names) if like else read_secrets(host, secrets_path)
    if secrets.is_open:
        warnings.append(f"others can read {SECRETS}; close it: `chmod 600 {SECRETS}`")
    read, resolved, served = None, None, dict[Path, str]()
    program = Program(("-m", "shardway", "train", str(folder.run_file), "--dir", str(run)), meets_by_itself=True)
    serving = None
    if request.serve is not None:
        from shardway.launch.submission.serve import find_served, program_of

        python = "python3" if host.name else sys.executable
        serving = find_served(request.serve, loaded, profile, host, python)
        program = program_of(folder)
        read = CommandRead(program, module=serving.server.module if serving.server else "")
        if request.until_done:
            serving.add("--until-done goes on with work until it is done, and a server never is", remedy="leave it out")
    elif request.call is not None:
        program = Program((str(folder.call_program), str(folder.call_path)), calls=True)
        read = CommandRead(program)
    elif request.shell:
        program = Program(("bash",), python=False)
        read = CommandRead(program)
    elif request.command:
        read = CommandRead(Program(("-m", "torch")))  # in place of a refused command, so that the rest can be checked
        with findings.of("the command"):
            read = read_command(request.command, request.here, loaded.values.site.nodes)
        program = read.program
    hub = None
    if not request.command and _names_files_of_models(loaded):
        from shardway.launch.submission.hub_files import find_hub_files

        in_image = bool(loaded.values.site.image) and loaded.values.site.container != "none"
        hub = find_hub_files(loaded, profile, host, in_image=in_image)
        loaded = hub.loaded
        if not request.shell:  # in a shell, files of a model may be what is looked for
            findings.problems += hub.problems
            warnings += hub.warnings
        if hub.override:
            run_request = replace(run_request, overrides=(*run_request.overrides, hub.override))
    # where the ranks work: a training in the snapshot, any other program in the run's folder for its outputs; without a
    # snapshot in the submitting folder or, if that is on another host, in the run directory
    workdir = request.workdir or (run if host.name or request.serve else request.here)
    if snapshot is not None and request.shell:
        workdir = snapshot.start_folder(Attempt(RunDir(run).shells_folder / request.shell).code)
    elif snapshot is not None:
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
        source=request.here if snapshot and not host.name and not request.shell else None,
        token=os.urandom(3).hex(),
        secret_names=secrets.names,
        python="python3" if host.name else sys.executable,
        here=sys.prefix if not host.name and sys.prefix != sys.base_prefix else "",
        follows=request.follows,
        hub_repos=hub.repos if hub else serving.repos if serving else (),
        hub_variables={} if host.name or find_scheduler(profile.scheduler).this_machine else _list_cache_variables(),
    )
    code = Code(request.here, snapshot, is_there=snapshot is not None or not host.name)
    findings.problems += secrets.list_problems()
    findings.problems += list_site_problems(job_request)
    if serving is not None:
        from shardway.launch.submission.serve import plan_server

        served = plan_server(serving, job_request, folder, request.command[1:])
        findings.problems += serving.problems
        warnings += serving.warnings
    elif request.call is not None:
        served = _plan_call(request.call, job_request, folder, snapshot)
        findings.problems += _list_problems_of_call(request.call, job_request)
    elif read is not None:
        findings.problems += list_local_problems(read, job_request.shape.ranks_per_node, code)
        findings.problems += list_rank_problems(read.program, job_request.shape.ranks)
    elif not (hub and hub.hides_rest) and not {"site.nodes", "site.ranks_per_node"} & {
        p.where for p in findings.problems
    }:
        # a run file is checked for the ranks that the job will have
        with findings.of(str(run_request.run_file or "the run")):
            resolved = check_run(run_request, request.site, job_request)
            if ledger.status:
                with findings.of("what has changed"):
                    check_goes_on(host, ledger, resolved)
    if look and not (like is not None and _needs_the_same(like, request, job_request)):
        findings.problems += list_host_problems(job_request, host, code)
    findings.check(f"the job for {profile.name}")
    job = build_job(job_request, number)
    terms = job.terms
    asked = {f"site.options.{name}": str(value) for name, value in terms.options.items()}
    asked |= {"site.account": terms.account, "site.queue": terms.partition, "site.walltime": f"{terms.walltime_s:g} s"}
    warnings += describe_options(options, asked)
    warnings += list_site_warnings(job_request)
    if read is not None and serving is None and request.call is None:
        warnings += warn_of_copies(read, job_request.shape.ranks, code)
        warnings += warn_of_python(job_request) if code.is_there and read.program.python else ()
        warnings += warn_of_own_files(read, code)
        warnings += [] if request.shell else _describe_other_command(request, host, ledger)
        if code.is_there:
            from shardway.launch.submission.foreign_model import describe_foreign_model

            gpus = job.shape.nodes * job.shape.accelerators_per_node
            warnings += filter(None, [describe_foreign_model(read, request.here, profile, gpus)])
    files = {**_list_files(request, loaded, folder), **served}
    return Prepared(job_request, job, files, snapshot, tuple(warnings), ledger, request, known, resolved, serving)


def _needs_the_same(like: Prepared, request: SubmitRequest, job_request: JobRequest) -> bool:
    """Whether a job needs the files and programs of another one."""
    one, other = like.request.loaded.values, job_request.loaded.values
    same = (one.site, one.data, one.model) == (other.site, other.data, other.model)
    return same and like.asked.command[:1] == request.command[:1]


def find_run_directory(request: SubmitRequest, host: Host) -> Path:
    """The run directory that a request would have, on its host. Raises UserError, HostUnreachable."""
    loaded, _ = load_request(request)
    return _find_places(request, loaded, host, known=False)[0]


def load_request(request: SubmitRequest, like: Prepared | None = None) -> tuple[LoadedRunFile, SiteProfile]:
    """The run with the profile's [defaults] for keys that it does not set, and the profile."""
    findings, run_request = ProblemCollector(), request.run_request
    loaded = profile = None
    with findings.of(str(run_request.run_file or "the command line")):
        loaded = load_run(run_request.run_file, run_request.overrides)
    if request.site and loaded:
        loaded = loaded.with_value("site.name", request.site, "--on")
    if name := loaded.values.site.name if loaded else request.site:
        with findings.of(f"the site {name}"):
            is_known = like is not None and like.request.loaded.values.site.name == name
            profile = like.request.profile if like is not None and is_known else load_site(name)
    if not loaded or not profile:
        findings.check("what was asked for")
        raise Bug("a run or a site was not loaded, and nothing says why")
    for key, value in profile.defaults.items():
        loaded = loaded.with_default(f"site.{key}", value, f"site {profile.name}, defaults.{key}")
    return loaded, profile


def _names_files_of_models(loaded: LoadedRunFile) -> bool:
    """Whether a run names a model, a tokenizer or a chat template by a name or path, or data of a hub's cache."""
    model, data = loaded.values.model, loaded.values.data
    paths = (data.path, data.validation, *(part.path for part in data.blend))
    own = bool(model.hf) or data.tokenizer != "bytes" or data.chat_template != "chatml"
    return own or any("/snapshots/" in path for path in paths)


_OF_CACHES = ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "HF_DATASETS_CACHE", "HF_ASSETS_CACHE")


def _list_cache_variables() -> dict[str, str]:
    """Where this shell has the caches of the hub, for a job that does not get them from elsewhere."""
    return {name: os.path.abspath(os.environ[name]) for name in _OF_CACHES if os.environ.get(name)}


def _find_places(
    request: SubmitRequest, loaded: LoadedRunFile, host: Host, *, known: bool
) -> tuple[Path, PurePosixPath]:
    """The run directory and the secrets file on the host, of which that may be `known`. Raises UserError for a variable
    that the host does not set."""
    directory, values = request.run_request.directory, loaded.values
    try:
        place = str(directory or values.run.root)
        path, *rest = host.expand_many([place] if known else [place, SECRETS])
    except UserError as error:
        where = "--dir" if directory is not None else f"run.root, {loaded.origins['run.root']}"
        raise UserError(f"the run directory ({where}): {error}") from None
    name, command = values.run.name, request.command
    if name == "auto":  # that of the file, script or module
        module = command[command.index("-m") + 1 :][:1] if "-m" in command else ()
        if request.shell:
            command = () if loaded.path else ("shell",)
        if request.serve is not None:
            command = (f"serve-{Path(request.serve.model).name}",)
        named = [word for word in command if word.endswith(".py")] or [word.rpartition(".")[2] for word in module]
        named = named or list(command[:1])
        name = Path(named[0]).stem if named else (loaded.path.stem if loaded.path else "default")
    return Path(path) if directory is not None else Path(path) / name, rest[0] if rest else PurePosixPath(SECRETS)


def _plan_chain(request: SubmitRequest, profile: SiteProfile, number: int) -> Chain:
    ahead = profile.request.submit_from_nodes is False
    if not request.until_done:
        return Chain(max_attempts=number, ahead=ahead)
    # Where each link submits the next, none waits in vain.
    most = request.max_attempts or (min(profile.request.max_jobs or 5, 5) if ahead else 100)
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


def _plan_call(
    call: FunctionCall, request: JobRequest, folder: Attempt, snapshot: SnapshotPlan | None
) -> dict[Path, str]:
    """The files of a job that calls a function: the program, and the call."""
    from shardway.launch.calls.packing import read_program

    root, below = (str(snapshot.root), snapshot.below) if snapshot is not None else ("", "")
    text = replace(call, ranks=request.shape.ranks).render(root, below)
    return {folder.call_program: read_program(), folder.call_path: text}


def _list_problems_of_call(call: FunctionCall, request: JobRequest) -> Iterator[Problem]:
    """Accelerators that were asked for by name and are not there."""
    if call.gpus and not request.shape.accelerators_per_node:
        what = f"{call.gpus} accelerators on nodes of {request.profile.name}, which have none"
        yield Problem("gpus", what, remedy="leave gpus out, or name another site")


def _describe_other_command(request: SubmitRequest, host: Host, ledger: Ledger) -> Iterator[str]:
    """A warning if the run had another command, whose outputs this one would find in its working folder."""
    paths = [PurePosixPath(entry.attempt.order_path) for entry in ledger.entries]
    texts = host.read_files(paths) if paths else {}
    last = next((texts[path] for path in reversed(paths) if path in texts), "")
    before = _parse_order(last, ledger.run.path, None)
    if before is not None and before.command and before.command != request.command:
        yield (
            f"{ledger.run.path} ran another command, `{quote_all(before.command)}`, and this one finds what it wrote: "
            "both work in its folder `work`; where that is not meant, name another run (run.name, --dir)"
        )


# --- the request as recorded in the attempt's folder (order.json), and that of a run that goes on


@dataclass(frozen=True, kw_only=True)
class _RecordedRequest:
    """The fields of `order.json`; all but the run file, which lies beside it, and the run that it follows, are
    required."""

    run_file: str = ""
    overrides: tuple[str, ...]
    site: str
    command: tuple[str, ...]
    until_done: bool
    max_attempts: int
    here: str
    follows: str = ""
    serve: Mapping[str, Any] = field(default_factory=dict)


def render_order(request: SubmitRequest) -> str:
    """The text of `order.json`, from which `shardway resume` makes the next request."""
    run_file = request.run_request.run_file
    recorded = _RecordedRequest(
        run_file=str(run_file.absolute()) if run_file else "",
        overrides=tuple(request.run_request.overrides),
        site=request.site,
        command=request.command,
        until_done=request.until_done,
        max_attempts=request.max_attempts,
        here=str(request.here),
        follows=str(request.follows or ""),
        serve=asdict(request.serve) if request.serve is not None else {},
    )
    return json.dumps({"format": 1, **asdict(recorded)}, indent=1) + "\n"


def _parse_order(text: str, run: Path, run_file: Path | None) -> SubmitRequest | None:
    """The request in such a text, for the same run directory; None if it is damaged. `run_file` holds all values of the
    run file and the overrides of that time."""
    try:
        known = read_fields(_RecordedRequest, json.loads(text))
    except (ValueError, RecursionError):
        return None
    if known is None:
        return None
    run_request = ResolveRequest(run_file, () if run_file else known.overrides, run)
    serve = None
    if known.serve:
        from shardway.launch.submission.serve import ServeOptions

        serve = read_fields(ServeOptions, dict(known.serve))
        if serve is None:
            return None
    return SubmitRequest(
        run_request,
        known.site,
        known.command,
        known.until_done,
        known.max_attempts,
        Path(known.here),
        Path(known.follows) if known.follows else None,
        serve,
    )


@contextlib.contextmanager
def read_last_request(host: Host, run: Path) -> Iterator[SubmitRequest]:
    """The last request of a run; its run file is there for as long as the context lasts. For a run that was trained by
    hand, what it was started with.

    Raises UserError where nothing says how the run was started, or its record is damaged.
    """
    ledger = read_ledger(host, run)
    attempts = [entry.attempt for entry in ledger.entries]
    kept_paths = [p for attempt in attempts for p in (attempt.order_path, attempt.run_file, attempt.call_path)]
    texts = host.read_files([*map(PurePosixPath, kept_paths)])
    last = next((a for a in reversed(attempts) if PurePosixPath(a.order_path) in texts), None)
    if last is None:
        if host.name or not RunDir(run).resolved_path.exists():
            raise UserError(
                f"{run} was never submitted, so nothing says how.\n"
                "  To do: `shardway submit` it, or `shardway train` where it was trained by hand."
            )
        yield _request_by_hand(RunDir(run))
        return
    with tempfile.TemporaryDirectory() as scratch:
        kept = texts.get(PurePosixPath(last.run_file))
        run_file = last.run_file if kept is not None else None
        if kept is not None and host.name:  # a copy here of the other machine's file
            run_file = Path(scratch) / last.run_file.name
            run_file.write_text(kept, encoding="utf-8")
        request = _parse_order(texts[PurePosixPath(last.order_path)], run, run_file)
        if request is None:
            raise UserError(
                f"{last.order_path} is damaged.\n"
                f"  To do: submit the run with `shardway submit --dir {shlex.quote(str(run))}`."
            )
        if (called := texts.get(PurePosixPath(last.call_path))) is not None:
            from shardway.launch.calls.packing import parse_call

            request = replace(request, call=parse_call(called))
            if request.call is None:
                raise UserError(f"{last.call_path} is damaged.\n  To do: submit the function again.")
        result = ledger.last.result if ledger.last is not None else None
        if ledger.last is None or not (ledger.last.is_unsent or (result and result.ran_nothing)):
            request = replace(request, follows=None)  # it has begun, and goes on whatever became of that run
        yield request


def _request_by_hand(run: RunDir) -> SubmitRequest:
    """What a run was started with that no job has trained yet. Raises UserError where its script is not here."""
    if "model" in run.read_resolved():
        overrides, section = [], ""
        for line in run.resolved_path.read_text("utf-8").splitlines():
            entry, _, origin = line.rpartition(" # ")
            if line.startswith("["):
                section = line.strip("[] ")
            elif origin == COMMAND_LINE:
                name, _, value = entry.partition("=")
                overrides.append(f"{section}.{name.strip()}={value.strip()}")
        return SubmitRequest(ResolveRequest(run.request_path, tuple(overrides), run.path))
    command = next((event.get("command") for event in reversed([*run.all_events(0, ("started",))])), None)
    words = [str(word) for word in command] if isinstance(command, list) and command else [""]
    if not words[0].endswith(".py") or not Path(words[0]).is_file():
        raise UserError(
            f"{run.path} was trained by hand by a script ({words[0] or 'which is not recorded'}), which is not here.\n"
            "  To do: run this where the script is, or "
            f"`shardway submit --dir {shlex.quote(str(run.path))} -- python SCRIPT ...`."
        )
    return SubmitRequest(ResolveRequest(None, (), run.path), command=("python", *words))
