"""PBS Pro and OpenPBS: #PBS lines, queries about jobs and their answers, variables of jobs and ranks.

Invariants:
- `job_state` decides the phase before `Exit_status` is read, which a requeued job still has.
- A job is requested in the `select` form alone (one chunk per node, scattered), never mixed with the older `-l nodes=`,
  which PBS refuses. No value goes through `qsub -v`, which changes quotes and backslashes.

A server without a job history refuses `-x` for every job, also for running ones; the query is then repeated without it.

Each call asks for one job: for several, `qstat -f -F json` prints the first one found and exits 0. Values of users can
make its JSON invalid (wrong types, doubled keys, bytes that are not UTF-8); then the few attributes that matter are
read from its lines.

`pbs.toml` has the sentences, `pbs_survey.py` reads what PBS says of its nodes and queues.

Sources: qstat(1B) "-x", PBS Professional Reference Guide "Job Attributes", "Job States" and "Job Exit Codes", OpenPBS
src/include/job.h; transcripts of OpenPBS 23.06; qsub(1B) "-l select", "-k oed"; pbs_resources(7B); PBS Professional
User's Guide, "Multi-node jobs", pbs_tmrsh; pbsdsh(1B).
"""

from __future__ import annotations

import contextlib
import datetime
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from shardway.inherited import Family
from shardway.launch.schedulers.base import (
    OWN_FILES,
    Ask,
    EachNode,
    JobPhase,
    JobRecord,
    OptionProblem,
    Scheduler,
    SchedulerEnding,
    keep_known,
    merge_tasks,
    parse_job_id,
    read_lines,
    render_options,
)
from shardway.launch.script import ScriptLine, quote, read_block
from shardway.rank_variables import Environ, RankSeat, first_set, read_int, variables_error

if TYPE_CHECKING:  # each rank that a scheduler has started imports this module
    from shardway.launch.hosts.base import Done
    from shardway.launch.job import Job
    from shardway.launch.site_survey import ProbedFacts

_INHERITED = (
    Family(
        "a job of PBS",
        ("PBS_*", "QSUB_*", "NCPUS"),
        "of the job that submits",
        kept=(
            *("PBS_CONF_FILE", "PBS_DEFAULT", "PBS_SERVER", "PBS_EXEC", "PBS_HOME", "PBS_AUTH_METHOD", "PBS_TMPDIR"),
            *("PBS_PRIMARY", "PBS_SECONDARY", "PBS_LEAF_NAME", "PBS_*_SERVICE_PORT", "PBS_ENCRYPT_METHOD"),
            "PBS_SUPPORTED_AUTH_METHODS",
        ),
        settings=("NCPUS",),
        reaches_ranks=True,
    ),
)


class Pbs(Scheduler):
    """PBS Pro and OpenPBS."""

    name = "pbs"
    title = "PBS"
    hands_on_environment = False
    signals_every_process = True
    agent_by_default = False  # it was never tested under PBS on a real machine
    by_hand = "make the folder of -o, qsub THIS_FILE"
    shell = "pbs"
    rules = OWN_FILES / "pbs.toml"
    own_jobs = 'qselect -u "$(id -un)" 2> /dev/null'
    launcher_variables = ("PBS_*", "NODE")
    node_variables = ("NODE",)
    gone = r"(?i)Unknown Job Id|(?:has|for) finished|invalid for state of job"  # the last while an epilogue runs
    own_keys = frozenset(("containers.by_scheduler",))
    accelerator_requests = ("ngpus", "none")
    named_by_keys = MappingProxyType(
        {
            "q": "site.queue",
            "P": "site.account",
            "N": "run.name",
            **dict.fromkeys(("o", "e", "j", "k", "J", "r", "v", "V", "S"), ""),
        }
    )
    inherited = _INHERITED
    job_variable = "PBS_JOBID"
    client_command = ("qstat", "--version")
    server_command = ("qstat", "-Q")
    remedies = MappingProxyType({"all_memory": "mem= in select"})
    interactive = "qsub -I"
    submit_programs = ("qsub",)
    survey_command = ("qstat", "-Bf", "-F", "json")
    generic_site = "generic-pbs"

    # --- the job script

    def directives(self, job: Job) -> tuple[ScriptLine, ...]:
        return tuple(ScriptLine(f"#PBS {line.text}", line.purpose) for line in _options(job))

    def each_node(self, job: Job) -> EachNode:
        """A shell function, since pbs_tmrsh hands on nothing."""
        return EachNode(("on_each_node",), "$NODE")

    def mpirun_lines(self, job: Job) -> tuple[ScriptLine, ...]:
        """Its nodes, and a remote shell for an mpirun without support for PBS."""
        return (ScriptLine("mpirun_on_pbs", "the nodes, and what starts its daemons there"),)

    # --- commands, and what they print

    def submit(self, script: str, log: str, after: str) -> tuple[str, ...]:
        shell = f'{read_block("pbs", "submit_as_program").text}\nsubmit_as_program "$@"'
        return ("bash", "-c", shell, "qsub", script, *(["-W", f"depend=afterany:{after}"] if after else []))

    def read_job_id(self, text: str) -> str:
        return parse_job_id(_TAKEN, text)

    def cancel(self, jobs: Sequence[str]) -> tuple[tuple[str, ...], ...]:
        return tuple(("qdel", job) for job in jobs)

    def warn(self, jobs: Sequence[str]) -> tuple[tuple[str, ...], ...]:
        return tuple(("qsig", "-s", "SIGUSR1", job) for job in jobs)

    def query(self, jobs: Sequence[str]) -> tuple[tuple[str, ...], ...]:
        """One command a job, whose outputs `parse_records` reads in the same order."""
        tasks = {job: ("-t",) if "[]" in job else () for job in jobs}
        return tuple(("sh", "-c", _WITH_HISTORY, "qstat", *tasks[job], "-f", "-F", "json", job) for job in jobs)

    def find(self, name: str) -> tuple[tuple[str, ...], ...]:
        """The command whose output `parse_found` reads: jobs of this name, finished ones too where PBS knows them."""
        return (("sh", "-c", _WITH_HISTORY, "qselect", "-N", name),)

    def parse_records(self, jobs: Sequence[str], answers: Sequence[Done]) -> dict[str, JobRecord]:
        """A record of each of these jobs for which an answer came; one that PBS does not know is UNKNOWN.

        Raises SchedulerSilent where no answer came for any of them.
        """
        return keep_known({job: _parse_answer(job, done) for job, done in zip(jobs, answers, strict=True)}, answers)

    def parse_found(self, answers: Sequence[Done]) -> tuple[str, ...]:
        found = [line.strip() for line in read_lines(answers[0]) if _ID.fullmatch(line.strip())]
        return tuple(sorted(found, key=lambda job: int(re.split(r"[\[.]", job)[0])))

    # --- options and variables

    def check_option(self, name: str, value: Any) -> OptionProblem | None:
        """-l may ask for resources that no key has."""
        entries = value if isinstance(value, list) else [value]
        if name == "l" and any(str(entry).startswith(("select", "walltime", "nodes", "place")) for entry in entries):
            what = "with select, nodes, place or walltime is what the other keys of [site] say"
            return OptionProblem(what, 'other resources, such as {l = "filesystems=home"}')
        return super().check_option(name, value)

    def read_seat(self, environ: Environ) -> RankSeat | None:
        """pbsdsh and pbs_tmrsh: one rank a line of PBS_NODEFILE. Torque numbers the lines (PBS_VNODENUM); OpenPBS
        numbers the hosts (PBS_NODENUM), and its PBS_TASKNUM only counts up, so that it can place one rank a host."""
        if environ.get("PBS_TASKNUM", "1") == "1":  # the job script itself
            return None
        name = first_set(environ, "PBS_VNODENUM", "PBS_NODENUM")
        index, slots = read_int(environ, "pbsdsh", name), _read_nodefile(environ, "pbsdsh", _SHARE_NODEFILE)
        hosts = list(dict.fromkeys(slots))
        if name == "PBS_NODENUM" and len(hosts) < len(slots):
            raise variables_error(environ, "pbsdsh", (name, "PBS_NODEFILE"), _HOSTS_ONCE, _ONE_TASK_A_HOST)
        if index >= len(slots):
            allowed = f"{name} less than {len(slots)}, the lines of PBS_NODEFILE"
            raise variables_error(environ, "pbsdsh", (name, "PBS_NODEFILE"), allowed)
        host = slots[index]
        local_rank, local_world = slots[:index].count(host), slots.count(host)
        return RankSeat(index, len(slots), local_rank, local_world, hosts.index(host), len(hosts), "pbsdsh")

    def find_hosts(self, environ: Environ, launcher: str, remedy: str) -> tuple[str, list[str]] | None:
        if "PBS_NODEFILE" not in environ:
            return None
        return "PBS_NODEFILE", _read_nodefile(environ, launcher, remedy)

    def count_cores(self, environ: Environ, local_world: int) -> int | None:
        on_node = environ.get("NCPUS", "")
        return max(1, int(on_node) // local_world) if on_node.isdecimal() else None

    # --- surveys

    def survey(self, ask: Ask) -> ProbedFacts:
        from shardway.launch.schedulers.pbs_survey import survey

        return survey(ask, self.survey_command)


# --- queries and answers

_PHASES = {
    **dict.fromkeys("HQTW", JobPhase.QUEUED),
    **dict.fromkeys("BERSU", JobPhase.RUNNING),
    **dict.fromkeys("FX", JobPhase.ENDED),
    "M": JobPhase.UNKNOWN,
}
_ENDINGS = {
    -20: SchedulerEnding.NODE_FAILURE,
    -26: SchedulerEnding.OUT_OF_MEMORY,
    -27: SchedulerEnding.OUT_OF_MEMORY,
    -29: SchedulerEnding.TIMEOUT,
    -24: SchedulerEnding.FAILED,
    -25: SchedulerEnding.FAILED,
    -28: SchedulerEnding.FAILED,
}
"""Exit_status below 0 of jobs that ran; any other says that the job was not started."""

_SIGNAL = 256
"""Exit_status from here on: this, and the signal that ended the job."""

_DELETED, _FAILED = 91, 93
_UNDELIVERED = 0
_UNKNOWN_JOB = re.compile(r"Unknown Job Id|Unknown queue destination", re.IGNORECASE)
_ID = re.compile(r"\d+(\[\d*\])?(\.[\w.-]+)?")
_ATTRIBUTES = (
    *("job_state", "substate", "Exit_status", "Stageout_status", "run_count", "stime", "obittime", "mtime"),
    *("exec_host", "comment", "Hold_Types", "Job_Name", "array", "depend"),
)
_HEAD_OF_ANSWER = re.compile(r'"pbs_version"')
_LINE = re.compile(r'^(?:\t{3}| {12})"(\w+)"\s*:\s*(.*?),?\s*$')
_HEAD = re.compile(r'^(?:\t{2}| {8})"(\d+(?:\[\d*\])?[\w.-]*)"\s*:\s*\{\s*$')

_WITH_HISTORY = (
    'answer=$("$0" -x "$@"); code=$?; [ "$code" != 36 ] || exec "$0" "$@"; '
    '[ -z "$answer" ] || printf "%s\\n" "$answer"; exit "$code"'
)
"""Shell: a command of PBS with -x, and without where that is refused: error 15140, job_history_enable not set, of which
the exit code is the last byte. After any other failure it is not asked again: that finished jobs are missing would
look as if there were none."""

_LOST_OUTPUT = "PBS could not deliver the job's output files; they stayed on its node"
_FAILED_BY_PBS = "PBS counts it as failed though its script ended with 0: it may have lost a node while it ran"


_TAKEN = re.compile(r"^(\d+(?:\[\])?(?:\.[\w.-]+)?)\s*$", re.MULTILINE)
"""qsub(1B): "12.server", "12[].server"."""


def _parse_answer(job: str, done: Done) -> JobRecord | None:
    """What one call says of its job; None where it says nothing."""
    if done.timed_out:
        return None
    tables = _parse_jobs(done.out)
    parents = [table for table in tables.values() if table.get("array") == "True"]
    others = {name: table for name, table in tables.items() if table.get("array") != "True"}
    if parents:
        return _array_record(job, parents[0], [_record(name, table) for name, table in others.items()])
    if others:
        return _record(job, others.get(job) or next(iter(others.values())))
    if _UNKNOWN_JOB.search(done.err):
        return JobRecord(job, JobPhase.UNKNOWN)
    if done.ok and _HEAD_OF_ANSWER.search(done.out):
        return JobRecord(
            job, JobPhase.UNKNOWN, note="PBS answered but shows nothing of it: it may be another user's job"
        )
    return None


def _parse_jobs(text: str) -> dict[str, Mapping[str, Any]]:
    """Job id -> its attributes, of every job that an answer has."""
    with contextlib.suppress(ValueError, RecursionError):
        answer = json.loads(text)
        jobs = answer.get("Jobs") if isinstance(answer, dict) else None
        tables = jobs if isinstance(jobs, dict) else {}
        return {job: table for job, table in tables.items() if isinstance(table, dict) and table.get("job_state")}
    return _pick_jobs(text)


def _pick_jobs(text: str) -> dict[str, Mapping[str, Any]]:
    """The same from the lines of a text that is no JSON. A job's own attributes are known by their indentation, which
    a value in `Variable_List` cannot forge."""
    found: dict[str, dict[str, Any]] = {}
    job = ""
    for line in text.splitlines():
        if head := _HEAD.match(line):
            job = head[1]
        elif (match := _LINE.match(line)) and job and match[1] in _ATTRIBUTES:
            found.setdefault(job, {})[match[1]] = _parse_value(match[2])
    return {job: table for job, table in found.items() if table.get("job_state")}


def _parse_value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text.strip('"')


def _array_record(job: str, parent: Mapping[str, Any], tasks: Sequence[JobRecord]) -> JobRecord:
    """An array: its phase is the parent's, its ending that of its tasks, as the parent's Exit_status is not."""
    record = _record(job, parent)
    if not tasks or record.phase is not JobPhase.ENDED:
        return record
    over = [task for task in tasks if task.phase is JobPhase.ENDED]
    return replace(merge_tasks(job, over or tasks), phase=JobPhase.ENDED, state=record.state, reason=record.reason)


def _record(job: str, table: Mapping[str, Any]) -> JobRecord:
    state = str(table["job_state"])
    phase = _PHASES.get(state, JobPhase.RUNNING)
    runs = _int(table, "run_count") or 0
    record = JobRecord(
        job=job,
        phase=phase,
        state=state,
        reason=_reason(state, table),
        started=None if phase is JobPhase.QUEUED else _parse_time(table.get("stime")),
        nodes=str(table.get("exec_host", "")),
        restarts=runs if phase is JobPhase.QUEUED else max(runs - 1, 0),
        name=str(table.get("Job_Name", "")),
    )
    return _ended(record, table) if phase is JobPhase.ENDED else record


def _reason(state: str, table: Mapping[str, Any]) -> str:
    """The comment; where a job is held without one, the attributes that hold it."""
    comment = " ".join(str(table.get("comment", "")).split())
    if comment or state != "H":
        return comment
    depend = f", depend = {table['depend']}" if table.get("depend") else ""
    return f"Hold_Types = {table.get('Hold_Types', '')}{depend}"


def _ended(record: JobRecord, table: Mapping[str, Any]) -> JobRecord:
    status = _int(table, "Exit_status")
    ending, note = _ending(status, table)
    if _int(table, "Stageout_status") == _UNDELIVERED:
        note = "; ".join(part for part in (note, _LOST_OUTPUT) if part)
    signal = status - _SIGNAL if status is not None and status >= _SIGNAL else 0
    return replace(
        record,
        ending=ending,
        exit_code=status if status is not None and 0 <= status < _SIGNAL else None,
        signal=signal,
        ended=_parse_time(table.get("obittime")) or _parse_time(table.get("mtime")),
        note=note,
        exit_text="" if status is None else str(status),
    )


def _ending(status: int | None, table: Mapping[str, Any]) -> tuple[SchedulerEnding, str]:
    """How a job ended, and what is odd about that; one that was deleted may have any exit status."""
    substate = _int(table, "substate")
    if substate == _DELETED:
        return SchedulerEnding.CANCELLED, ""
    if status is None:
        ran = bool(table.get("exec_host"))
        return (SchedulerEnding.UNCLEAR if ran else SchedulerEnding.NEVER_STARTED), ""
    if status < 0:
        return _ENDINGS.get(status, SchedulerEnding.NEVER_STARTED), ""
    if status == 0 and substate == _FAILED:
        return SchedulerEnding.UNCLEAR, _FAILED_BY_PBS
    return (SchedulerEnding.FAILED if status else SchedulerEnding.COMPLETED), ""


def _int(table: Mapping[str, Any], name: str) -> int | None:
    """An attribute as a number; PBS writes some as text."""
    try:
        return int(table[name])
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def _parse_time(value: Any) -> float | None:
    """Unix seconds from local time such as "Sat Nov 21 06:11:15 2026"; None for anything else."""
    try:
        return datetime.datetime.strptime(str(value), "%a %b %d %H:%M:%S %Y").timestamp()
    except (ValueError, OverflowError):
        return None


# --- the job script's #PBS lines


def _options(job: Job) -> Iterator[ScriptLine]:
    terms = job.terms
    yield ScriptLine(f"-N {job.scheduler_name}", "the run, its attempt, and what makes it unique")
    if terms.account:
        yield ScriptLine(f"-P {quote(terms.account)}", "the account that is charged, and where the job waits")
    if terms.queue:
        yield ScriptLine(f"-q {quote(terms.queue)}", "the account that is charged, and where the job waits")
    yield ScriptLine(f"-l select={_render_select(job)}", "nodes, and what is wanted of each")
    yield ScriptLine(f"-l place=scatter{':excl' if job.shape.whole_nodes else ''}")
    yield from (ScriptLine(f"-l {entry}", "the container that PBS makes on each node") for entry in _container(job))
    yield ScriptLine(f"-l walltime={_render_time(terms.walltime_s)}", "wall-time of this attempt")
    yield ScriptLine("-r n", "an attempt that loses its nodes ends; the next attempt goes on from the last checkpoint")
    yield ScriptLine("-S /bin/bash", "the shell of this script, whatever the login shell is")
    yield ScriptLine("-j oe", "what it prints, at once and not when it has ended")
    yield ScriptLine("-k oed")
    yield ScriptLine(f"-o {job.log_for_scheduler}")
    for words in render_options(terms.options):
        yield ScriptLine(words, "options of this run or site that Shardway has no name for")


def _render_select(job: Job) -> str:
    """The chunks: `2:ncpus=112:ngpus=8:mem=1880gb:mpiprocs=8`. mpiprocs is how often PBS_NODEFILE names a node."""
    shape = job.shape
    parts = [
        str(shape.nodes),
        f"ncpus={shape.cores_per_node or shape.ranks_per_node}",
        f"mpiprocs={shape.ranks_per_node if job.launcher == 'mpirun' else 1}",
    ]
    if shape.accelerators_per_node and job.terms.accelerators == "ngpus":
        parts.append(f"ngpus={shape.accelerators_per_node}")
    if shape.memory_bytes:
        parts.append(f"mem={shape.memory_bytes // 2**20}mb")
    if _made_by_pbs(job):
        parts.append("container_engine=enroot")
    return ":".join(parts)


def _made_by_pbs(job: Job) -> bool:
    return job.container.runtime == "enroot" and bool(job.container.rules.by_scheduler)


def _container(job: Job) -> Iterator[str]:
    if _made_by_pbs(job):
        yield f"container_image={quote(job.container.image)}"
        yield f"container_name={job.name}"


def _render_time(seconds: float) -> str:
    whole = -(-seconds // 1)
    minutes, rest = divmod(int(whole), 60)
    return f"{minutes // 60:02d}:{minutes % 60:02d}:{rest:02d}"


# --- the place of a task of pbsdsh

_HOSTS_ONCE = "each host once in PBS_NODEFILE, since PBS does not number the tasks of one host"
_ONE_TASK_A_HOST = "ask for mpiprocs=1 and start torchrun on each host, or start the ranks with mpirun"
_SHARE_NODEFILE = "copy it to a shared folder in the job script, then: pbsdsh -- env PBS_NODEFILE=COPY ..."


def _read_nodefile(environ: Environ, launcher: str, remedy: str) -> list[str]:
    """The lines of PBS_NODEFILE: a host for each task, in the order of the tasks."""
    path = environ.get("PBS_NODEFILE", "")
    try:
        slots = Path(path).read_text(encoding="utf-8").split() if path else []
    except OSError:
        slots = []
    if slots:
        return slots
    allowed = "a file that this host can read, with one host name a line"
    raise variables_error(environ, launcher, ("PBS_NODEFILE",), allowed, remedy)
