"""PBS Pro and OpenPBS: #PBS lines, queries about jobs and their answers, variables of jobs and ranks.

Invariants:
- `job_state` decides the phase before `Exit_status` is read, which a requeued job still has.
- A job is requested in the `select` form alone (one chunk per node, scattered), never mixed with the older `-l nodes=`,
  which PBS refuses. No value goes through `qsub -v`, which changes quotes and backslashes.

A server without a job history refuses `-x` for every job, also for running ones; the query is then repeated without it.

Each call asks for one job: for several, `qstat -f -F json` prints the first one found and exits 0. Values of users can
make its JSON invalid (wrong types, doubled keys, bytes that are not UTF-8); then the few attributes that matter are
read from its lines.

`pbs.toml` has the sentences, `variables.toml` the variables of jobs, and `surveys.py` reads what PBS says of its nodes
and queues.

Sources: qstat(1B) "-x", PBS Professional Reference Guide "Job Attributes", "Job States" and "Job Exit Codes", OpenPBS
src/include/job.h; transcripts of OpenPBS 23.06; qsub(1B) "-l select", "-k oed"; pbs_resources(7B); PBS Professional
User's Guide, "Multi-node jobs", pbs_tmrsh; pbsdsh(1B).
"""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from shardway.inherited import read_families
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
from shardway.launch.script import ScriptLine, quote, read_block, script_lines
from shardway.rank_variables import Environ, RankSeat, first_set, read_count, read_int, variables_error

if TYPE_CHECKING:  # each rank that a scheduler has started imports this module
    from shardway.launch.hosts.base import Done
    from shardway.launch.job import Job
    from shardway.launch.site_survey import ProbedFacts


class Pbs(Scheduler):
    """PBS Pro and OpenPBS."""

    name = "pbs"
    title = "PBS"
    hands_on_environment = False
    signals_every_process = True
    agent_by_default = False  # it was never tested under PBS on a real machine
    by_hand = "make the folder of -o, qsub THIS_FILE"
    shell = "pbs"
    reaches_nodes = True
    rules = OWN_FILES / "pbs.toml"
    array_index = "$PBS_ARRAY_INDEX"
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
    inherited = read_families(OWN_FILES / "variables.toml", "pbs")
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
        terms, shape = job.terms, job.shape
        by_pbs = job.container.runtime == "enroot" and job.container.rules.by_scheduler
        select = f"{shape.nodes}:ncpus={shape.cores_per_node or shape.ranks_per_node}"
        # how often PBS_NODEFILE names a node
        select += f":mpiprocs={shape.ranks_per_node if job.launcher == 'mpirun' else 1}"
        gpus = shape.accelerators_per_node if terms.accelerators == "ngpus" else 0
        select += f":ngpus={gpus}" if gpus else ""
        select += f":mem={shape.memory_bytes // 2**20}mb" if shape.memory_bytes else ""
        select += ":container_engine=enroot" if by_pbs else ""
        minutes, seconds = divmod(math.ceil(terms.walltime_s), 60)
        waits = "the account that is charged, and where the job waits"
        made = "the container that PBS makes on each node"
        lines: list[tuple[object, str]] = [
            (f"-N {job.scheduler_name}", "the run, its attempt, and what makes it unique"),
            (terms.account and f"-P {quote(terms.account)}", waits),
            (terms.queue and f"-q {quote(terms.queue)}", waits),
            (f"-l select={select}", "nodes, and what is wanted of each"),
            (f"-l place=scatter{':excl' if shape.whole_nodes else ''}", ""),
            (by_pbs and f"-l container_image={quote(job.container.image)}", made),
            (by_pbs and f"-l container_name={job.name}", made),
            (f"-l walltime={minutes // 60:02d}:{minutes % 60:02d}:{seconds:02d}", "wall-time of this attempt"),
            ("-r n", "an attempt that loses its nodes ends; the next attempt goes on from the last checkpoint"),
            ("-S /bin/bash", "the shell of this script, whatever the login shell is"),
            ("-j oe", "what it prints, at once and not when it has ended"),
            ("-k oed", ""),
            (f"-o {job.log_for_scheduler}", ""),
        ]
        own = "options of this run or site that Shardway has no name for"
        lines += [(words, own) for words in render_options(terms.options)]
        return script_lines(*((text and f"#PBS {text}", purpose) for text, purpose in lines))

    def each_node(self, job: Job) -> EachNode:
        """A shell function, since pbs_tmrsh hands on nothing."""
        return EachNode(("on_each_node",), "$NODE")

    def mpirun_lines(self, job: Job) -> tuple[ScriptLine, ...]:
        """Its nodes, and a remote shell for an mpirun without support for PBS."""
        return (ScriptLine("mpirun_on_pbs", "the nodes, and what starts its daemons there"),)

    shell_needs_terminal = True

    def open_shell(self, job: Job, script: str, *, terminal: bool) -> tuple[str, ...]:
        """`qsub -I -- SCRIPT` ends with 0 whatever the script does, which writes its exit code beside itself."""
        lines = [shlex.split(line.text.removeprefix("#PBS ")) for line in self.directives(job)]
        words = [word for line in lines if line[0] not in _OF_BATCH for word in line]
        code = f"{script.rpartition('/')[0]}/exit_code"
        return ("bash", "-c", _INTERACTIVE, code, "-I", *words, "--", "/bin/bash", "-l", script)

    # --- commands, and what they print

    def submit(self, script: str, log: str, after: str) -> tuple[str, ...]:
        shell = f'{read_block("pbs", "submit_as_program").text}\nsubmit_as_program "$@"'
        return ("bash", "-c", shell, "qsub", script, *(["-W", f"depend=afterany:{after}"] if after else []))

    why_no_start = "PBS estimates the start of jobs that are queued alone (qstat -T), and of none before"

    def read_job_id(self, text: str) -> str:
        return parse_job_id(_TAKEN, text)

    def array_directives(self, job: Job, tasks: int, at_once: int, logs: str) -> tuple[ScriptLine, ...]:
        """PBS takes an array only if its jobs may run again (Reference Guide, "Job Arrays"): a task whose node is lost
        is queued again by PBS, and goes on from the last checkpoint. A limit (%) is known since PBS 2020.1."""
        left_out = ("#PBS -r ", "#PBS -o ")
        one = [line for line in self.directives(job) if not line.text.startswith(left_out)]
        array = f"#PBS -J 0-{tasks - 1}{f'%{at_once}' if at_once else ''}"
        purpose = "the numbers of the runs in `jobs`, and how many at once"
        return (*one, ScriptLine("#PBS -o /dev/null"), ScriptLine(array, purpose))

    def name_task(self, array: str, index: int) -> str:
        return array.replace("[]", f"[{index}]", 1)

    def cancel(self, jobs: Sequence[str]) -> tuple[tuple[str, ...], ...]:
        return tuple(("qdel", job) for job in jobs)

    def warn(self, jobs: Sequence[str]) -> tuple[tuple[str, ...], ...]:
        return tuple(("qsig", "-s", "SIGUSR1", job) for job in jobs)

    def query(self, jobs: Sequence[str]) -> tuple[tuple[str, ...], ...]:
        """One command a job, in the same order."""
        tasks = {job: ("-t",) if "[]" in job else () for job in jobs}
        return tuple(("sh", "-c", _WITH_HISTORY, "qstat", *tasks[job], "-f", "-F", "json", job) for job in jobs)

    def find(self, name: str) -> tuple[tuple[str, ...], ...]:
        """Finished jobs too, where PBS knows them."""
        return (("sh", "-c", _WITH_HISTORY, "qselect", "-N", name),)

    def parse_records(self, jobs: Sequence[str], answers: Sequence[Done]) -> dict[str, JobRecord]:
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
        share = "copy it to a shared folder in the job script, then: pbsdsh -- env PBS_NODEFILE=COPY ..."
        index, slots = read_int(environ, "pbsdsh", name), _read_nodefile(environ, "pbsdsh", share)
        hosts = list(dict.fromkeys(slots))
        if name == "PBS_NODENUM" and len(hosts) < len(slots):
            allowed = "each host once in PBS_NODEFILE, since PBS does not number the tasks of one host"
            remedy = "ask for mpiprocs=1 and start torchrun on each host, or start the ranks with mpirun"
            raise variables_error(environ, "pbsdsh", (name, "PBS_NODEFILE"), allowed, remedy)
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
        on_node = read_count(environ.get("NCPUS", ""))
        return None if on_node is None else max(1, on_node // local_world)

    # --- surveys

    def survey(self, ask: Ask) -> ProbedFacts:
        from shardway.launch.schedulers.surveys import survey_pbs

        return survey_pbs(ask, self.survey_command)


_OF_BATCH = ("-r", "-S", "-j", "-k", "-o", "-e")
"""Options of qsub that mean nothing where a person sits at the shell."""

_INTERACTIVE = 'qsub "$@"; code=$?; [ "$code" != 0 ] || code=$(cat "$0" 2> /dev/null || echo 0); exit "$code"'


# --- queries and answers

_PHASES = {
    **dict.fromkeys("HQTW", JobPhase.QUEUED),
    **dict.fromkeys("BERSU", JobPhase.RUNNING),
    **dict.fromkeys("FX", JobPhase.ENDED),
    "M": JobPhase.UNKNOWN,
}
_ENDINGS = {
    -20: SchedulerEnding.NODE_FAILURE,
    **dict.fromkeys((-26, -27), SchedulerEnding.OUT_OF_MEMORY),
    -29: SchedulerEnding.TIMEOUT,
    **dict.fromkeys((-24, -25, -28), SchedulerEnding.FAILED),
}
"""Exit_status below 0 of jobs that ran; any other says that the job was not started."""

_SIGNAL = 256
"""Exit_status from here on: this, and the signal that ended the job."""

_DELETED, _FAILED = 91, 93  # substates
_ID = re.compile(r"\d+(\[\d*\])?(\.[\w.-]+)?")
_UNKNOWN_JOB = re.compile(r"Unknown Job Id|Unknown queue destination", re.IGNORECASE)
_TAKEN = re.compile(r"^(\d+(?:\[\])?(?:\.[\w.-]+)?)\s*$", re.MULTILINE)  # qsub(1B): "12.server", "12[].server"

_ATTRIBUTES = (
    *("job_state", "substate", "Exit_status", "Stageout_status", "run_count", "stime", "obittime", "mtime"),
    *("exec_host", "comment", "Hold_Types", "Job_Name", "array", "depend"),
)
_LINE = re.compile(r'^(?:\t{3}| {12})"(\w+)"\s*:\s*(.*?),?\s*$')
_HEAD = re.compile(r'^(?:\t{2}| {8})"(\d+(?:\[\d*\])?[\w.-]*)"\s*:\s*\{\s*$')

_WITH_HISTORY = (
    'answer=$("$0" -x "$@"); code=$?; [ "$code" != 36 ] || exec "$0" "$@"; '
    '[ -z "$answer" ] || printf "%s\\n" "$answer"; exit "$code"'
)
"""Shell: a command of PBS with -x, and without where that is refused: error 15140, job_history_enable not set, of which
the exit code is the last byte. After any other failure it is not asked again: that finished jobs are missing would
look as if there were none."""


def _parse_answer(job: str, done: Done) -> JobRecord | None:
    """What one call says of its job; None where it says nothing."""
    if done.timed_out:
        return None
    tables = _parse_jobs(done.out)
    parent = next((table for table in tables.values() if table.get("array") == "True"), None)
    others = {name: table for name, table in tables.items() if table.get("array") != "True"}
    if parent is not None:
        # An array: its phase is the parent's, its ending that of its tasks, as the parent's Exit_status is not.
        record, tasks = _record(job, parent), [_record(name, table) for name, table in others.items()]
        if not tasks or record.phase is not JobPhase.ENDED:
            return record
        over = [task for task in tasks if task.phase is JobPhase.ENDED]
        return replace(merge_tasks(job, over or tasks), phase=JobPhase.ENDED, state=record.state, reason=record.reason)
    if others:
        return _record(job, others.get(job) or next(iter(others.values())))
    if _UNKNOWN_JOB.search(done.err):
        return JobRecord(job, JobPhase.UNKNOWN)
    if done.ok and '"pbs_version"' in done.out:
        note = "PBS answered but shows nothing of it: it may be another user's job"
        return JobRecord(job, JobPhase.UNKNOWN, note=note)
    return None


def _parse_jobs(text: str) -> dict[str, Mapping[str, Any]]:
    """Job id -> its attributes, of every job that an answer has. Of a text that is no JSON the lines are read: a job's
    own attributes are known by their indentation, which a value in `Variable_List` cannot forge."""
    found: dict[str, Any] = {}
    try:
        answer = json.loads(text)
        jobs = answer.get("Jobs") if isinstance(answer, dict) else None
        found = jobs if isinstance(jobs, dict) else {}
    except (ValueError, RecursionError):
        job = ""
        for line in text.splitlines():
            if head := _HEAD.match(line):
                job = head[1]
            elif (match := _LINE.match(line)) and job and match[1] in _ATTRIBUTES:
                value: Any = match[2].strip('"')
                with contextlib.suppress(ValueError, RecursionError):
                    value = json.loads(match[2])
                found.setdefault(job, {})[match[1]] = value
    return {job: table for job, table in found.items() if isinstance(table, dict) and table.get("job_state")}


def _record(job: str, table: Mapping[str, Any]) -> JobRecord:
    state = str(table["job_state"])
    phase, runs = _PHASES.get(state, JobPhase.RUNNING), _int(table, "run_count") or 0
    reason, nodes = " ".join(str(table.get("comment", "")).split()), str(table.get("exec_host", ""))
    if state == "H" and not reason:  # held without a comment: the attributes that hold it
        depend = f", depend = {table['depend']}" if table.get("depend") else ""
        reason = f"Hold_Types = {table.get('Hold_Types', '')}{depend}"
    record = JobRecord(
        job=job,
        phase=phase,
        state=state,
        reason=reason,
        started=None if phase is JobPhase.QUEUED else _parse_time(table.get("stime")),
        nodes=nodes,
        restarts=runs if phase is JobPhase.QUEUED else max(runs - 1, 0),
        name=str(table.get("Job_Name", "")),
    )
    if phase is not JobPhase.ENDED:
        return record

    status, substate, notes = _int(table, "Exit_status"), _int(table, "substate"), []
    if substate == _DELETED:  # it may have any exit status
        ending = SchedulerEnding.CANCELLED
    elif status is None:
        ending = SchedulerEnding.UNCLEAR if nodes else SchedulerEnding.NEVER_STARTED
    elif status < 0:
        ending = _ENDINGS.get(status, SchedulerEnding.NEVER_STARTED)
    elif status == 0 and substate == _FAILED:
        ending = SchedulerEnding.UNCLEAR
        notes.append("PBS counts it as failed though its script ended with 0: it may have lost a node while it ran")
    else:
        ending = SchedulerEnding.FAILED if status else SchedulerEnding.COMPLETED
    if _int(table, "Stageout_status") == 0:
        notes.append("PBS could not deliver the job's output files; they stayed on its node")
    return replace(
        record,
        ending=ending,
        exit_code=status if status is not None and 0 <= status < _SIGNAL else None,
        signal=status - _SIGNAL if status is not None and status >= _SIGNAL else 0,
        ended=_parse_time(table.get("obittime")) or _parse_time(table.get("mtime")),
        note="; ".join(notes),
        exit_text="" if status is None else str(status),
    )


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


# --- the place of a task of pbsdsh


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
