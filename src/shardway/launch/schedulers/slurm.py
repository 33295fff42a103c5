"""Slurm: #SBATCH lines, srun, queries about jobs and their answers, variables of jobs and ranks.

Invariants:
- A job is ended or unknown only by an answer of squeue or sacct.
- srun always gets nodes, tasks and cores explicitly: inside a job it takes missing ones from the job's variables, and
  since 22.05 it does not take the cores of a task from there at all.
- Host lists are expanded in the order and with the zero padding that `scontrol show hostnames` prints.

squeue reads the controller's memory and is up to date; sacct has the exit codes but lags by seconds after a start. So
squeue decides whether a job is active, and sacct, if it has a record, how it ended. Text fields are read, not JSON:
squeue's JSON of 22.05 ignores the requested jobs, and sacct's gives 0 for every exit code.

`slurm.toml` has the sentences, `slurm_survey.py` reads what Slurm says of its nodes and partitions.

Sources: squeue(1) "OUTPUT FORMAT" and "JOB STATE CODES", sacct(1) "Job Accounting Fields", of 22.05 to 26.05; sbatch(1)
"OPTIONS", srun(1) "OPTIONS", "--cpus-per-task" and "Output environment variables"; scontrol(1) "show hostnames".
"""

from __future__ import annotations

import datetime
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from shardway.inherited import Family
from shardway.launch.schedulers.base import (
    OWN_FILES,
    Ask,
    EachNode,
    EachRank,
    JobPhase,
    JobRecord,
    OptionProblem,
    Scheduler,
    SchedulerEnding,
    SchedulerSilent,
    describe_silence,
    merge_tasks,
    parse_job_id,
    render_options,
)
from shardway.launch.script import ScriptLine, quote
from shardway.rank_variables import (
    Environ,
    RankSeat,
    SeatVariables,
    check_seat,
    first_set,
    read_int,
    variables_error,
)

if TYPE_CHECKING:  # each rank that a scheduler has started imports this module
    from shardway.launch.hosts.base import Done
    from shardway.launch.job import Job
    from shardway.launch.site_survey import ProbedFacts

_KEYS = {
    "SBATCH_ACCOUNT": "site.account",
    "SBATCH_PARTITION": "site.queue",
    "SBATCH_TIMELIMIT": "site.walltime",
    "SBATCH_MEM_PER_NODE": "site.memory",
    "SBATCH_JOB_NAME": "run.name",
    **dict.fromkeys(
        ("SBATCH_GRES", "SBATCH_GPUS", "SBATCH_GPUS_PER_NODE", "SBATCH_GPUS_PER_TASK"), "site.ranks_per_node"
    ),
    **dict.fromkeys(
        (
            "SBATCH_OUTPUT",
            "SBATCH_ERROR",
            "SBATCH_REQUEUE",
            "SBATCH_NO_REQUEUE",
            "SBATCH_OPEN_MODE",
            "SBATCH_SIGNAL",
        ),
        "",
    ),
    **dict.fromkeys(("SBATCH_ARRAY_INX", "SBATCH_WAIT", "SBATCH_IGNORE_PBS", "SBATCH_DEBUG", "SBATCH_NO_KILL"), ""),
}
"""Options of sbatch -> the key of a run file with the same meaning; "" for what the job script sets itself. All other
options go into site.options."""

_NAMED_BY_KEYS = {
    **dict.fromkeys(("time", "t"), "site.walltime"),
    **dict.fromkeys(("nodes", "N"), "site.nodes"),
    **dict.fromkeys(("partition", "p"), "site.queue"),
    **dict.fromkeys(("account", "A"), "site.account"),
    **dict.fromkeys(("ntasks", "n", "ntasks-per-node"), "site.ranks_per_node"),
    **dict.fromkeys(("gres", "gpus-per-node", "G", "gpus"), "site.ranks_per_node and site.accelerator_type"),
    **dict.fromkeys(("job-name", "J"), "run.name"),
    **dict.fromkeys(("mem",), "site.memory"),
    # as options of sbatch they would put the job script itself into the container, which has no srun
    **dict.fromkeys(("container", "container-image"), "site.container and site.image"),
    "container-mounts": "site.mounts",
    **dict.fromkeys(
        (
            *("container-name", "container-workdir", "container-save", "container-mount-home"),
            *("container-remap-root", "container-writable", "container-readonly", "container-env"),
        ),
        "containers.options of a profile",
    ),
    **dict.fromkeys(("output", "o", "error", "e", "dependency", "d", "array", "a", "chdir", "D", "requeue"), ""),
}

_INHERITED = (
    Family(
        "a job or step of Slurm",
        ("SLURM_*", "SLURMD_*", "SRUN_*", "_SLURM_SPANK_OPTION_*"),
        "srun in the new job would take them for its own options; left by salloc, a step, or the job that submits",
        kept=(
            *("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_JWT", "SLURM_ROOT", "SLURM_HOME"),
            "SLURM_MPI_TYPE",
        ),
        settings=("SLURM_OVERLAP", "SLURM_NETWORK", "SLURM_UNBUFFEREDIO", "SRUN_CPUS_PER_TASK"),
        reaches_ranks=True,
    ),
    Family(
        "options for Slurm's commands",
        ("SBATCH_*", "SALLOC_*", "SQUEUE_*", "SACCT_*", "SCANCEL_*", "SINFO_*", "SCONTROL_*"),
        "they would override the script, and change what squeue and sacct print; submit reports those that concern the "
        "job, and site.account follows SBATCH_ACCOUNT if nothing else sets it",
        reaches_ranks=True,
        options="SBATCH_",
        keys=_KEYS,
    ),
    Family(
        "a container for whatever Slurm starts",
        ("PYXIS_CONTAINER_IMAGE", "PYXIS_CONTAINER_NAME"),
        "Pyxis would start the job script itself in it, where there is no srun; site.image says what the ranks run in",
        reaches_ranks=True,
    ),
)


class Slurm(Scheduler):
    """Slurm, of 22.05 to 26.05."""

    name = "slurm"
    title = "Slurm"
    warns = True
    by_hand = "make the folder of --output, sbatch THIS_FILE"
    shell = "slurm"
    rules = OWN_FILES / "slurm.toml"
    own_jobs = 'squeue --all --noheader --user="$(id -un)" --format=%A 2> /dev/null'
    launcher = "srun"
    launcher_variables = ("SLURM_*", "PMI_*", "PMIX_*")
    rank_variables = (
        *("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS"),
        *("SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE"),
    )
    place_variables = ("SLURM_PROCID", "SLURM_LOCALID")
    node_variables = ("SLURM_NODEID",)
    gone = r"(?i)Invalid job id|already completing or completed"
    own_keys = frozenset(("queues.partition", "queues.qos", "request.constraint", "launcher=srun", "container=pyxis"))
    accelerator_requests = ("gres", "gpus-per-node", "none")
    memory_options = ("mem-per-cpu", "mem-per-gpu")
    named_by_keys = MappingProxyType(_NAMED_BY_KEYS)
    inherited = _INHERITED
    job_variable = "SLURM_JOB_ID"
    restart_variable = "SLURM_RESTART_COUNT"
    also_sets = frozenset(("PALS_RANKID", "PMI_RANK"))  # by Cray's plug-in, and by --mpi=pmi2
    numbers_ranks = True
    client_command = ("squeue", "--version")
    server_command = ("sinfo", "-h", "-o", "%R")
    remedies = MappingProxyType(
        {
            "leave_out": "--exclude={host}",
            "all_memory": "--mem=0",
            "cores": "export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK in the job script, or srun --cpu-bind=none",
            "memlock": "start from a shell with `ulimit -l unlimited`, or srun --propagate=NONE",
        }
    )
    interactive = "salloc"
    submit_programs = ("sbatch", "salloc")
    survey_command = ("sinfo", "-h", "-o", "%P|%a|%l|%D|%t|%N|%G|%c|%m|%f|%z")
    generic_site = "generic-slurm"

    # --- the job script

    def directives(self, job: Job) -> tuple[ScriptLine, ...]:
        return tuple(ScriptLine(f"#SBATCH {line.text}", line.purpose) for line in _options(job))

    def each_node(self, job: Job) -> EachNode:
        return EachNode(_srun(job, 1), "$SLURM_NODEID")

    def each_rank(self, job: Job) -> EachRank:
        place = "export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID; "
        binding = (f"--cpu-bind={quote(job.start.bind)}",) if job.start.bind else ()
        return EachRank((*_srun(job, job.shape.ranks_per_node), "--label", *binding), place)

    # --- commands, and what they print

    def submit(self, script: str, log: str, after: str) -> tuple[str, ...]:
        return ("sbatch", "--parsable", *([f"--dependency=afterany:{after}"] if after else []), script)

    def read_job_id(self, text: str) -> str:
        return parse_job_id(_TAKEN, text)

    def cancel(self, jobs: Sequence[str]) -> tuple[tuple[str, ...], ...]:
        return (("scancel", *jobs),)

    def warn(self, jobs: Sequence[str]) -> tuple[tuple[str, ...], ...]:
        return (("scancel", "--full", "--signal=USR1", *jobs),)

    def query(self, jobs: Sequence[str]) -> tuple[tuple[str, ...], ...]:
        """The two commands whose outputs `parse_records` reads, in this order. None if no word is a Slurm id; a single
        invalid id would make Slurm refuse the whole query."""
        ids = ",".join(job for job in jobs if _JOB.fullmatch(job))
        return (_squeue("-j", ids), _sacct("-D", "-j", ids)) if ids else ()

    def find(self, name: str) -> tuple[tuple[str, ...], ...]:
        """The two commands whose outputs `parse_found` reads: the user's jobs of the last two weeks with this name."""
        return _squeue("-n", name), _sacct("-X", "--name", name, "-S", f"now-{_DAYS_BACK}days")

    def parse_records(self, jobs: Sequence[str], answers: Sequence[Done]) -> dict[str, JobRecord]:
        """A record of each of these jobs with known state; a job that Slurm does not list is UNKNOWN.

        A job is left out if only sacct answered and does not state how it ended. Raises SchedulerSilent if nothing is
        known of any job.
        """
        if not answers:
            return {job: JobRecord(job, JobPhase.UNKNOWN) for job in jobs}
        squeue, sacct = answers
        live, booked = _parse_squeue(squeue), _parse_sacct(sacct)
        if live is None and booked is None:
            raise SchedulerSilent(describe_silence(squeue))
        records = {job: _choose(job, live, booked) for job in jobs}
        known = {job: record for job, record in records.items() if record}
        if jobs and not known:
            raise SchedulerSilent(describe_silence(squeue if live is None else sacct))
        return known

    def parse_found(self, answers: Sequence[Done]) -> tuple[str, ...]:
        """Ids of the jobs with a name, oldest first, without submissions that Slurm refused but recorded.

        Raises SchedulerSilent if one of the two did not answer and the other found nothing.
        """
        squeue, sacct = answers
        live, booked = _parse_squeue(squeue), _parse_sacct(sacct)
        rows = [*(live or ()), *(booked or ())]
        refused = {row.parent for row in rows if row.refused}
        found = {row.parent for row in rows} - refused
        if not found and (live is None or booked is None):
            raise SchedulerSilent(describe_silence(squeue if live is None else sacct))
        return tuple(sorted(found, key=int))

    # --- options

    def check_option(self, name: str, value: Any) -> OptionProblem | None:
        """Generic resources may be others than those that keys request: local disks, licences of a node."""
        if name == _GRES and not any(part.strip().startswith("gpu") for part in ",".join(_texts(value)).split(",")):
            return None
        return super().check_option(name, value)

    def read_cpus_per_task(self, options: Mapping[str, str]) -> int:
        text = options.get("cpus-per-task", options.get("c", ""))
        return int(text) if text.isdecimal() else 0

    def leaves_one_thread(self, options: Mapping[str, str], launcher_options: str) -> bool:
        asked = (options.get("hint") == "nomultithread", options.get("threads-per-core") == "1")
        return any(asked) or "nomultithread" in launcher_options or "threads-per-core=1" in launcher_options

    # --- variables

    def is_rank(self, environ: Environ) -> bool:
        """Whether srun started this process. A batch step has SLURM_PROCID=0 too, but no step id (22.05, 24.11) or
        -5 (26.05); batch, interactive and extern steps are 0xfffffffb, -a and -c as unsigned numbers (slurm.h)."""
        step = environ.get("SLURM_STEP_ID", "")
        return "SLURM_PROCID" in environ and step.isdecimal() and int(step) < 0xFFFFFFF0

    def read_seat(self, environ: Environ) -> RankSeat | None:
        if not self.is_rank(environ):
            return None
        world = first_set(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
        names = SeatVariables("SLURM_PROCID", world, "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_NODEID")
        seat = _read_seat(environ, names)
        check_seat(environ, "srun", names, seat)
        return seat

    def find_hosts(self, environ: Environ, launcher: str, remedy: str) -> tuple[str, list[str]] | None:
        """The nodes of the job. With another launcher the step is that of its daemons, which may leave out the node it
        was called on."""
        steps = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST") if launcher == "srun" else ("SLURM_JOB_NODELIST",)
        name = first_set(environ, *steps)
        if name not in environ:
            return None
        try:
            return name, parse_hostlist(environ[name])
        except ValueError:
            allowed = 'a host list such as "n[01-03,7],login1"'
            raise variables_error(environ, launcher, (name,), allowed, remedy) from None

    def is_in_terminal(self, environ: Environ) -> bool:
        """Whether this is the first task of `srun --pty` (srun(1)); its other tasks are shells that start nothing."""
        return "SLURM_PTY_PORT" in environ and environ.get("SLURM_PROCID", "0") == "0"

    def count_cores(self, environ: Environ, local_world: int) -> int | None:
        """CPUs of a task where it was asked for them, else its part of the node's."""
        if (per_task := environ.get("SLURM_CPUS_PER_TASK", "")).isdecimal():
            return int(per_task)
        on_node = environ.get("SLURM_CPUS_ON_NODE", "")
        return max(1, int(on_node) // local_world) if on_node.isdecimal() else None

    def count_accelerators(self, environ: Environ) -> int | None:
        text = environ.get("SLURM_GPUS_ON_NODE", "")
        return int(text) if text.isdecimal() else None

    # --- the doctor, and surveys

    def list_accounts(self, user: str) -> tuple[str, ...]:
        return ("sacctmgr", "-nP", "show", "assoc", f"user={user}", "format=account")

    def survey(self, ask: Ask) -> ProbedFacts:
        from shardway.launch.schedulers.slurm_survey import survey

        return survey(ask, self.survey_command)

    def survey_container(self, ask: Ask) -> tuple[str, str]:
        """Pyxis, which adds options to srun."""
        return ("pyxis", "srun --help") if "--container-image" in ask(("srun", "--help"), quiet=True) else ("", "")

    def read_site_name(self, ask: Ask) -> str:
        from shardway.launch.schedulers.slurm_survey import CONFIG, parse_config

        return parse_config(ask(CONFIG, quiet=True)).get("ClusterName", "")


# --- queries and answers

_ENV = ("env", "SLURM_TIME_FORMAT=%s")
"""Times as Unix seconds, so the time zone of the answering machine does not matter."""

_SQUEUE = ("%i", "%A", "%T", "%S", "%e", "%N", "%r", "%j")
_SACCT = ("JobID", "JobIDRaw", "State", "ExitCode", "Submit", "Start", "End", "NodeList", "Reason", "JobName")
_DAYS_BACK = 14

_QUEUED = frozenset(
    ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT")
)
_ENDINGS = {
    "COMPLETED": SchedulerEnding.COMPLETED,
    "FAILED": SchedulerEnding.FAILED,
    "TIMEOUT": SchedulerEnding.TIMEOUT,
    "DEADLINE": SchedulerEnding.TIMEOUT,
    "CANCELLED": SchedulerEnding.CANCELLED,
    "PREEMPTED": SchedulerEnding.PREEMPTED,
    "OUT_OF_MEMORY": SchedulerEnding.OUT_OF_MEMORY,
    "NODE_FAIL": SchedulerEnding.NODE_FAILURE,
    "BOOT_FAIL": SchedulerEnding.NODE_FAILURE,
    "RECONFIG_FAIL": SchedulerEnding.NODE_FAILURE,
    "POWER_UP_FAIL": SchedulerEnding.NODE_FAILURE,
    "LAUNCH_FAILED": SchedulerEnding.NEVER_STARTED,
    "REVOKED": SchedulerEnding.NEVER_STARTED,
}
_MAY_RUN_AGAIN = frozenset(("REQUEUED", "PREEMPTED", "NODE_FAIL"))
"""States after which Slurm may queue the same job id again."""

_TOLD_BY_STEPS = frozenset(("COMPLETED", "FAILED"))
"""States of a job whose steps, which only sacct has, may give a better reason."""

_LAUNCH_FAILURE = "0:53"
_HIGHEST_SIGNAL = 31
_FOLDED = 128
_JOB = re.compile(r"\d+(_(\d+|\[[-\d,:%]+\]))?")
_UNKNOWN_ID = "Invalid job id specified"
_NO_ACCOUNTING = "accounting storage is disabled"


_TAKEN = re.compile(r"^(?:Submitted batch job )?(\d+)(?:;\S+)?\s*$", re.MULTILINE)
"""With or without --parsable, sbatch(1): "12", "12;cluster", "Submitted batch job 12"."""


def _squeue(*which: str) -> tuple[str, ...]:
    return (*_ENV, "squeue", "-h", "-r", "-t", "all", *which, "-o", "|".join(_SQUEUE))


def _sacct(*which: str) -> tuple[str, ...]:
    return (*_ENV, "sacct", "-n", "-P", *which, "-o", ",".join(_SACCT))


@dataclass(frozen=True)
class _Row:
    """One line of squeue or sacct about a job or an array task, in Slurm's words."""

    job: str
    raw: str
    state: str
    start: str
    nodes: str
    reason: str
    name: str
    end: str = ""
    exit: str = ""
    submit: str = ""
    steps: tuple[tuple[str, str, str], ...] = field(default=())
    """(step, state, exit code) of each step."""

    @property
    def parent(self) -> str:
        """The id that sbatch printed."""
        return self.job.split("_")[0]

    @property
    def word(self) -> str:
        """The state's first word: "CANCELLED by 1001" is CANCELLED."""
        return (self.state.split() or [""])[0]

    @property
    def has_ended(self) -> bool:
        return self.word in _ENDINGS

    @property
    def refused(self) -> bool:
        """Whether this is the record of a job that sbatch refused: it has an id, and failed without a node."""
        return self.word == "FAILED" and not self.nodes and not self.steps

    def covers(self, job: str) -> bool:
        """Whether the line is about this id: its own, or one of the tasks of "70_[2-3%2]"."""
        parent, _, tasks = self.job.partition("_")
        if self.job == job or not tasks.startswith("["):
            return self.job == job
        asked, _, task = job.partition("_")
        return asked == parent and task.isdigit() and _is_task(int(task), tasks.strip("[]"))


def _is_task(task: int, tasks: str) -> bool:
    """Whether a list such as "1-3,5,8-20:4%2" contains this task."""
    for part in tasks.split("%")[0].split(","):
        bounds, _, step = part.partition(":")
        first, _, last = bounds.partition("-")
        if int(first) <= task <= int(last or first) and (task - int(first)) % int(step or 1) == 0:
            return True
    return False


def _parse_squeue(done: Done) -> list[_Row] | None:
    """The lines of squeue; None if it did not answer."""
    if not done.ok and _UNKNOWN_ID not in done.err:
        return None
    rows = []
    for cells in _split(done.out, len(_SQUEUE)):
        job, raw, state, start, end, nodes, reason, name = cells
        rows.append(_Row(job, raw, state, start, nodes, reason, name, end))
    return rows


def _parse_sacct(done: Done) -> list[_Row] | None:
    """The job lines of sacct with their steps, only the newest run of each job; None if it did not answer."""
    if not done.ok and _NO_ACCOUNTING not in done.err:
        return None
    runs: list[_Row] = []
    for job, raw, state, exit_text, submit, start, end, nodes, reason, name in _split(done.out, len(_SACCT)):
        owner, _, step = job.partition(".")
        if not step:
            nodes = "" if nodes == "None assigned" else nodes
            runs.append(_Row(job, raw, state, start, nodes, reason, name, end, exit_text, submit))
        elif runs and runs[-1].job == owner:
            runs[-1] = replace(runs[-1], steps=(*runs[-1].steps, (step, state, exit_text)))
    return runs


def _split(text: str, count: int) -> list[list[str]]:
    """Cells of the lines about jobs. The last cell is the name, which may contain the separator."""
    lines = [line.split("|", count - 1) for line in text.splitlines()]
    return [cells for cells in lines if len(cells) == count and _JOB.fullmatch(cells[0].split(".")[0])]


def _choose(job: str, live: list[_Row] | None, booked: list[_Row] | None) -> JobRecord | None:
    """The record of one job from both answers; None if too little is known."""
    now, runs = _select(job, live or []), _select(job, booked or [])
    past = _newest(runs)
    restarts = len(runs) - len(past)
    ended = [row for row in past if row.has_ended]
    if live is None:
        # Without squeue it is unknown whether a job that can be queued again has been.
        settled = bool(past) and all(row.has_ended and row.word not in _MAY_RUN_AGAIN for row in past)
        return _combine(job, past, restarts) if settled else None
    if not all(row.has_ended for row in now):
        return _combine(job, now, restarts)
    if now and len(ended) < len(past) and any(row.word in _TOLD_BY_STEPS for row in now):
        record = _combine(job, now, restarts)
        return replace(record, phase=JobPhase.RUNNING, ending=None, ended=None, note="sacct does not know its end yet")
    if now:
        return _combine(job, past if len(ended) >= len(now) else now, restarts)
    if past:
        return _combine(job, past, restarts)
    return JobRecord(job, JobPhase.UNKNOWN) if booked is not None else None


def _select(job: str, rows: list[_Row]) -> list[_Row]:
    """The lines about a job: its own; else those of its tasks; else those of the task with it as raw id."""
    return (
        [row for row in rows if row.covers(job)]
        or [row for row in rows if row.parent == job]
        or [row for row in rows if row.raw == job]
    )


def _newest(rows: list[_Row]) -> list[_Row]:
    """The last run of each job; a job that was queued again has one line per run."""
    last: dict[str, _Row] = {}
    for row in rows:
        if row.job not in last or row.submit >= last[row.job].submit:
            last[row.job] = row
    return list(last.values())


def _combine(job: str, rows: list[_Row], restarts: int) -> JobRecord:
    records = [_record(row) for row in rows]
    merged = merge_tasks(job, records) if len(records) > 1 else replace(records[0], job=job)
    return replace(merged, restarts=max(restarts, 0))


def _record(row: _Row) -> JobRecord:
    started = _parse_time(row.start)
    record = JobRecord(
        job=row.job,
        phase=JobPhase.RUNNING,
        state=row.state,
        reason="" if row.reason == "None" else row.reason,
        started=started,
        nodes=row.nodes,
        name=row.name,
        exit_text=row.exit,
    )
    if row.has_ended:
        return _ended(row, record)
    if row.word in _QUEUED:
        return replace(record, phase=JobPhase.QUEUED, started=None)
    return record


def _ended(row: _Row, record: JobRecord) -> JobRecord:
    ending = _ending(row)
    ran = bool(row.nodes)
    exit_text = _exit_text(row) if ran else ""
    code, signal = _parse_exit(exit_text)
    note = ""
    if code is not None and 2 < code < _FOLDED and ending is SchedulerEnding.FAILED:
        note = f"Slurm before 26.05 shows an exit code above 127 less 128, so that {code} may be {code + _FOLDED}"
    return replace(
        record,
        phase=JobPhase.ENDED,
        ending=ending,
        exit_code=code,
        signal=signal,
        started=record.started if ran else None,
        ended=_parse_time(row.end),
        note=note,
        exit_text=exit_text,
    )


def _ending(row: _Row) -> SchedulerEnding:
    ending = _ENDINGS[row.word]
    if not row.nodes and ending not in (SchedulerEnding.CANCELLED, SchedulerEnding.COMPLETED):
        return SchedulerEnding.NEVER_STARTED
    if ending is SchedulerEnding.FAILED and row.exit == _LAUNCH_FAILURE:
        return SchedulerEnding.NEVER_STARTED
    # The kernel kills a process of a step; the job script decides what follows from that.
    out_of_memory = any(state == "OUT_OF_MEMORY" for _, state, _ in row.steps)
    if out_of_memory and ending in (SchedulerEnding.COMPLETED, SchedulerEnding.FAILED):
        return SchedulerEnding.OUT_OF_MEMORY
    return ending


def _exit_text(row: _Row) -> str:
    """The job's exit code; that of its script if Slurm reports 0:0 for a job that it ended itself."""
    if row.exit == "0:0" and row.word != "COMPLETED":
        return next((text for step, _, text in row.steps if step == "batch" and text), "")
    return row.exit


def _parse_exit(text: str) -> tuple[int | None, int]:
    """Exit code and signal from "1:0" or "0:9"; Slurm's own numbers beyond the signals, such as 125, are neither."""
    code, _, signal = text.partition(":")
    if not code.isdigit() or not signal.isdigit():
        return None, 0
    if int(signal):
        return None, int(signal) if int(signal) <= _HIGHEST_SIGNAL else 0
    return int(code), 0


def _parse_time(text: str) -> float | None:
    """Unix seconds from seconds, or from local time in ISO format; None for "Unknown", "None", "N/A"."""
    try:
        return float(text) if text.isdigit() else datetime.datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None


# --- the job script's #SBATCH lines and srun


def _options(job: Job) -> Iterator[ScriptLine]:
    terms, shape = job.terms, job.shape
    yield ScriptLine(f"--job-name={job.scheduler_name}", "the run, its attempt, and what makes it unique")
    if terms.account:
        yield ScriptLine(f"--account={quote(terms.account)}", "the account that is charged, and where the job waits")
    if terms.partition:
        yield ScriptLine(
            f"--partition={quote(terms.partition)}", "the account that is charged, and where the job waits"
        )
    if terms.qos:
        yield ScriptLine(f"--qos={quote(terms.qos)}", "the account that is charged, and where the job waits")
    if terms.constraint:
        yield ScriptLine(f"--constraint={quote(terms.constraint)}", "the kind of node")
    yield ScriptLine(f"--nodes={shape.nodes}", "nodes, and what is wanted of each")
    tasks = 1 if job.one_agent_a_node else shape.ranks_per_node
    yield ScriptLine(f"--ntasks-per-node={tasks}")
    if cpus := cpus_of_task(job, tasks):
        yield ScriptLine(f"--cpus-per-task={cpus}")
    yield from _generic_resources(job)
    if shape.memory_bytes:
        yield ScriptLine(f"--mem={shape.memory_bytes // 2**20}M")
    if shape.whole_nodes:
        yield ScriptLine("--exclusive")
    yield ScriptLine(f"--time={_render_time(terms.walltime_s)}", "wall-time of this attempt")
    if job.warn_s:
        yield ScriptLine(f"--signal=B:USR2@{round(job.warn_s)}", "warns this script before the wall-time ends")
    yield ScriptLine(
        "--no-requeue", "an attempt that loses its nodes ends; the next attempt goes on from the last checkpoint"
    )
    if job.elastic:
        yield ScriptLine(
            "--no-kill", "a node that is lost does not end the job: the run goes on with those that are left"
        )
    yield ScriptLine("--open-mode=append", "what it prints")
    yield ScriptLine(f"--output={job.log_for_scheduler}")
    for words in render_options({name: value for name, value in terms.options.items() if name.lstrip("-") != _GRES}):
        yield ScriptLine(words, "options of this run or site that Shardway has no name for")


_GRES = "gres"


def _texts(value: Any) -> list[str]:
    return list(map(str, value if isinstance(value, list | tuple) else [value]))


def _generic_resources(job: Job) -> Iterator[ScriptLine]:
    """Accelerators, and what an option requests besides them (local disks): of two --gres only the last counts."""
    count, kind = job.shape.accelerators_per_node, job.terms.accelerator_type
    asked = f"{kind}:{count}" if kind else str(count)
    gres = [f"gpu:{asked}"] if count and job.terms.accelerators == "gres" else []
    for name, value in job.terms.options.items():
        if name.lstrip("-") == _GRES:
            gres += _texts(value)
    if gres:
        yield ScriptLine(f"--gres={','.join(gres)}")
    if count and job.terms.accelerators == "gpus-per-node":
        yield ScriptLine(f"--gpus-per-node={asked}")


def _render_time(seconds: float) -> str:
    """Whole minutes, rounded up, as Slurm counts them (sbatch(1), --time)."""
    minutes = max(1, -(-round(seconds) // 60))
    days, rest = divmod(minutes, 24 * 60)
    return f"{days}-{rest // 60:02d}:{rest % 60:02d}:00"


def cpus_of_task(job: Job, tasks_per_node: int) -> int:
    """CPUs as Slurm counts them: all hardware threads of the cores of one task; 0 if the site does not state the
    cores."""
    cores = (job.shape.cores_per_node or 0) // tasks_per_node
    return max(1, cores) * job.shape.threads_per_core if job.shape.cores_per_node else 0


def _srun(job: Job, tasks_per_node: int) -> tuple[str, ...]:
    """The words of an srun that starts `tasks_per_node` tasks on each node."""
    cpus = cpus_of_task(job, tasks_per_node)
    words = [
        "srun",
        f"--nodes={job.shape.nodes}",
        f"--ntasks={job.shape.nodes * tasks_per_node}",
        f"--ntasks-per-node={tasks_per_node}",
        *([f"--cpus-per-task={cpus}"] if cpus else []),
        *_on_a_bad_end(job),
        *map(quote, job.start.srun_options),
    ]
    return tuple(words)


def _on_a_bad_end(job: Job) -> tuple[str, ...]:
    """Agents detect the loss of an agent themselves; srun would signal the others by SIGTERM, which means a stop."""
    if job.launcher != "agent":
        return ("--kill-on-bad-exit=1",)
    return ("--kill-on-bad-exit=0", "--wait=0", *(("--no-kill",) if job.elastic else ()))


# --- the place of a task of srun


def _read_seat(environ: Environ, names: SeatVariables) -> RankSeat:
    rank, world, local_rank, node = (
        read_int(environ, "srun", name) for name in (names.rank, names.world, names.local_rank, "SLURM_NODEID")
    )
    try:
        tasks = parse_tasks_per_node(environ.get(names.local_world, ""))
    except ValueError:
        allowed = 'the tasks of each node, such as "2(x3),1"'
        raise variables_error(environ, "srun", (names.local_world,), allowed) from None
    if sum(tasks) != world or node >= len(tasks):
        shown = (names.world, "SLURM_NODEID", names.local_world)
        allowed = f"{sum(tasks)} tasks and a node less than {len(tasks)}, as {names.local_world} says"
        raise variables_error(environ, "srun", shown, allowed)
    step = f"{environ.get('SLURM_JOB_ID', '')}.{environ['SLURM_STEP_ID']}"
    return RankSeat(rank, world, local_rank, tasks[node], node, len(tasks), "srun", step)


# --- Slurm's short forms -> lists: "n[01-03,7],login1" -> host names, "2(x3),1" -> tasks of each node

_ITEM = re.compile(r"(?:[^\[\],]|\[[^\[\]]*\])+")
_PART = re.compile(r"\[(?P<ranges>[^\]]*)\]|(?P<plain>[^\[]+)")
_RANGE = re.compile(r"(?P<first>[0-9]+)(?:-(?P<last>[0-9]+))?")
_TASKS = re.compile(r"(?P<tasks>[0-9]+)(?:\(x(?P<nodes>[0-9]+)\))?")


def parse_hostlist(text: str) -> list[str]:
    """Host names in order: "n[08-10],r[1-2]c[0-1]" -> n08 n09 n10 r1c0 r1c1 r2c0 r2c1."""
    items = _ITEM.findall(text)
    if not items or ",".join(items) != text:
        raise ValueError(f'"{text}" is not a Slurm host list such as "n[01-03,7],login1"')
    return [host for item in items for host in _expand_item(item)]


def _expand_item(item: str) -> list[str]:
    choices = [
        [part["plain"]] if part["plain"] else _expand_ranges(item, part["ranges"]) for part in _PART.finditer(item)
    ]
    return ["".join(chosen) for chosen in itertools.product(*choices)]


def _expand_ranges(item: str, ranges: str) -> list[str]:
    return [number for text in ranges.split(",") for number in _expand_range(item, text)]


def _expand_range(item: str, text: str) -> list[str]:
    match = _RANGE.fullmatch(text)
    last = match and (match["last"] or match["first"])
    if match is None or last is None or int(match["first"]) > int(last):
        raise ValueError(f'"{text}" in the host list item "{item}" is not a range such as "01-16"')
    width = len(match["first"])
    return [f"{number:0{width}d}" for number in range(int(match["first"]), int(last) + 1)]


def parse_tasks_per_node(text: str) -> list[int]:
    """Tasks of each node in order: "2(x3),1" -> [2, 2, 2, 1]."""
    matches = [_TASKS.fullmatch(part) for part in text.split(",")]
    counts: list[int] = []
    for match in matches:
        if match is None:
            raise ValueError(f'"{text}" is not a list of tasks per node such as "2(x3),1"')
        counts += [int(match["tasks"])] * int(match["nodes"] or 1)
    return counts
