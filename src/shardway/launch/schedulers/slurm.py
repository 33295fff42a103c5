"""Slurm: #SBATCH lines, srun, queries about jobs and their answers, variables of jobs and ranks.

Invariants:
- A job is ended or unknown only by an answer of squeue or sacct.
- srun always gets nodes, tasks and cores explicitly: inside a job it takes missing ones from the job's variables, and
  since 22.05 it does not take the cores of a task from there at all.
- Host lists are expanded in the order and with the zero padding that `scontrol show hostnames` prints.

squeue reads the controller's memory and is up to date; sacct has the exit codes but lags by seconds after a start. So
squeue decides whether a job is active, and sacct, if it has a record, how it ended. Text fields are read, not JSON:
squeue's JSON of 22.05 ignores the requested jobs, and sacct's gives 0 for every exit code.

`slurm.toml` has the sentences, `variables.toml` the variables of jobs, and `surveys.py` reads what Slurm says of its
nodes and partitions.

Sources: squeue(1) "OUTPUT FORMAT" and "JOB STATE CODES", sacct(1) "Job Accounting Fields", of 22.05 to 26.05; sbatch(1)
"OPTIONS", srun(1) "OPTIONS", "--cpus-per-task" and "Output environment variables"; scontrol(1) "show hostnames".
"""

from __future__ import annotations

import datetime
import itertools
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from shardway.inherited import read_families
from shardway.launch.schedulers.base import (
    OWN_FILES,
    Ask,
    EachNode,
    EachRank,
    JobPhase,
    JobRecord,
    OptionProblem,
    QueueState,
    Scheduler,
    SchedulerEnding,
    SchedulerSilent,
    describe_silence,
    keep_known,
    merge_tasks,
    parse_job_id,
    render_options,
)
from shardway.launch.script import ScriptLine, quote, script_lines
from shardway.rank_variables import (
    Environ,
    RankSeat,
    SeatVariables,
    check_seat,
    first_set,
    read_count,
    read_int,
    variables_error,
)

if TYPE_CHECKING:  # each rank that a scheduler has started imports this module
    from shardway.launch.hosts.base import Done
    from shardway.launch.job import Job
    from shardway.launch.site_survey import ProbedFacts

_Meaning = TypeVar("_Meaning")


def _by_name(names: Mapping[_Meaning, str]) -> dict[str, _Meaning]:
    """Meaning (a key of a run file) -> Slurm's names for it, as name -> meaning."""
    return {name: meaning for meaning, group in names.items() for name in group.split()}


_NAMED_BY_KEYS = _by_name(
    {
        "site.walltime": "time t",
        "site.nodes": "nodes N",
        "site.queue": "partition p",
        "site.account": "account A",
        "site.ranks_per_node": "ntasks n ntasks-per-node",
        "site.ranks_per_node and site.accelerator_type": "gres gpus-per-node G gpus",
        "run.name": "job-name J",
        "site.memory": "mem",
        # as options of sbatch they would put the job script itself into the container, which has no srun
        "site.container and site.image": "container container-image",
        "site.mounts": "container-mounts",
        "containers.options of a profile": "container-name container-workdir container-save container-mount-home "
        "container-remap-root container-writable container-readonly container-env",
        "": "output o error e dependency d array a chdir D requeue",
    }
)


class Slurm(Scheduler):
    """Slurm, of 22.05 to 26.05."""

    name = "slurm"
    title = "Slurm"
    warns = True
    by_hand = "make the folder of --output, sbatch THIS_FILE"
    shell = "slurm"
    reaches_nodes = True
    rules = OWN_FILES / "slurm.toml"
    own_jobs = 'squeue --all --noheader --user="$(id -un)" --format=%F 2> /dev/null'
    array_index = "$SLURM_ARRAY_TASK_ID"
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
    inherited = read_families(OWN_FILES / "variables.toml", "slurm")
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
        terms, shape = job.terms, job.shape
        tasks = 1 if job.one_agent_a_node else shape.ranks_per_node
        cpus, count = cpus_of_task(job, tasks), shape.accelerators_per_node
        asked = f"{terms.accelerator_type}:{count}" if terms.accelerator_type else str(count)
        # Of two --gres only the last counts: what an option requests besides accelerators (local disks) is added.
        gres = [f"gpu:{asked}"] if count and terms.accelerators == "gres" else []
        gres += [text for name, value in terms.options.items() if name.lstrip("-") == "gres" for text in _texts(value)]
        options = {name: value for name, value in terms.options.items() if name.lstrip("-") != "gres"}
        minutes = max(1, -(-round(terms.walltime_s) // 60))  # rounded up, as Slurm counts them (sbatch(1), --time)
        days, rest = divmod(minutes, 24 * 60)
        waits = "the account that is charged, and where the job waits"
        left = "a node that is lost does not end the job: the run goes on with those that are left"
        own = "options of this run or site that Shardway has no name for"
        lines: list[tuple[object, str]] = [
            (f"--job-name={job.scheduler_name}", "the run, its attempt, and what makes it unique"),
            (terms.account and f"--account={quote(terms.account)}", waits),
            (terms.partition and f"--partition={quote(terms.partition)}", waits),
            (terms.qos and f"--qos={quote(terms.qos)}", waits),
            (terms.constraint and f"--constraint={quote(terms.constraint)}", "the kind of node"),
            (f"--nodes={shape.nodes}", "nodes, and what is wanted of each"),
            (f"--ntasks-per-node={tasks}", ""),
            (cpus and f"--cpus-per-task={cpus}", ""),
            (gres and f"--gres={','.join(gres)}", ""),
            (count and terms.accelerators == "gpus-per-node" and f"--gpus-per-node={asked}", ""),
            (shape.memory_bytes and f"--mem={shape.memory_bytes // 2**20}M", ""),
            (shape.whole_nodes and "--exclusive", ""),
            (f"--time={days}-{rest // 60:02d}:{rest % 60:02d}:00", "wall-time of this attempt"),
            (job.warn_s and f"--signal=B:USR2@{round(job.warn_s)}", "warns this script before the wall-time ends"),
            ("--no-requeue", "an attempt that loses its nodes ends; the next attempt goes on from the last checkpoint"),
            (job.elastic and "--no-kill", left),
            ("--open-mode=append", "what it prints"),
            (f"--output={job.log_for_scheduler}", ""),
        ]
        lines += [(words, own) for words in render_options(options)]
        return script_lines(*((text and f"#SBATCH {text}", purpose) for text, purpose in lines))

    def each_node(self, job: Job) -> EachNode:
        return EachNode(_srun(job, 1), "$SLURM_NODEID")

    def beside(self, job: Job) -> EachNode:
        """A step that shares cores, memory and accelerators with all others (srun(1), --overlap)."""
        words = (word for word in _srun(job, 1) if not word.startswith("--kill-on-bad-exit"))
        more = ("--kill-on-bad-exit=0", "--overlap", "--mem=0", "--job-name=telemetry")
        return EachNode((*words, *more), "$SLURM_NODEID")

    def each_rank(self, job: Job) -> EachRank:
        place = "export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID; "
        binding = (f"--cpu-bind={quote(job.start.bind)}",) if job.start.bind else ()
        return EachRank((*_srun(job, job.shape.ranks_per_node), "--label", *binding), place)

    def open_shell(self, job: Job, script: str, *, terminal: bool) -> tuple[str, ...]:
        """salloc with the options of a job script, and that script as its command, here."""
        return ("salloc", *_list_allocation_options(self.directives(job)), "bash", script)

    def shell_lines(self, job: Job) -> tuple[ScriptLine, ...]:
        """Under salloc it is not on a node, and not in a step; its step shares all with those that the shell starts."""
        first = '"$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"'
        step = f'[ -n "${{SLURM_STEP_ID-}}" ] || {{ job=$SLURM_JOB_ID; on_node {first} bash "$0"; }}'
        return script_lines(
            ("options=(--preserve-env)", "what srun in the shell takes for the shape of the job"),
            (step, "salloc starts this where it was typed: it goes on on the first node"),
        )

    # --- commands, and what they print

    def submit(self, script: str, log: str, after: str) -> tuple[str, ...]:
        return ("sbatch", "--parsable", *([f"--dependency=afterany:{after}"] if after else []), script)

    start_command = ("env", "SLURM_TIME_FORMAT=%s", "sbatch", "--test-only")
    queues_command = ("scontrol", "show", "partition")

    def parse_queues(self, text: str) -> tuple[QueueState, ...]:
        """`sbatch --test-only` names a start also for a partition that is down, for another's accounts, or of less time
        than the job has, where the site has EnforcePartLimits=NO (seen with 22.05)."""
        from shardway.launch.schedulers.surveys import parse_partitions, parse_time

        return tuple(
            QueueState(
                name=words["PartitionName"],
                closed="" if (state := words.get("State", "UP")) == "UP" else f"its state is {state}",
                accounts=() if (named := words.get("AllowAccounts", "ALL")) in ("ALL", "") else tuple(named.split(",")),
                max_walltime_s=parse_time(words.get("MaxTime", "")),
                max_nodes=read_count(words.get("MaxNodes", "")),
                min_nodes=read_count(words.get("MinNodes", "")),
                nodes=read_count(words.get("TotalNodes", "")),
            )
            for words in parse_partitions(text)
            if words.get("RootOnly") != "YES"
        )

    def read_start(self, done: Done) -> float | None:
        found = _STARTS.search(f"{done.err}\n{done.out}")
        return _parse_time(found[1]) if found else None

    def read_job_id(self, text: str) -> str:
        return parse_job_id(_TAKEN, text)

    def array_directives(self, job: Job, tasks: int, at_once: int, logs: str) -> tuple[ScriptLine, ...]:
        one = [line for line in self.directives(job) if not line.text.startswith("#SBATCH --output=")]
        output = f"#SBATCH --output={f'{logs}/task-%a.out' if logs else '/dev/null'}"
        array = f"#SBATCH --array=0-{tasks - 1}{f'%{at_once}' if at_once else ''}"
        return (
            *one,
            ScriptLine(output),
            ScriptLine(array, "the runs, by their numbers in `jobs`, and how many at once"),
        )

    def name_task(self, array: str, index: int) -> str:
        return f"{array}_{index}"

    def cancel(self, jobs: Sequence[str]) -> tuple[tuple[str, ...], ...]:
        return (("scancel", *jobs),)

    def warn(self, jobs: Sequence[str]) -> tuple[tuple[str, ...], ...]:
        return (("scancel", "--full", "--signal=USR1", *jobs),)

    def query(self, jobs: Sequence[str]) -> tuple[tuple[str, ...], ...]:
        """squeue and sacct; nothing if no word is a Slurm id: one invalid id makes Slurm refuse the whole query."""
        ids = ",".join(job for job in jobs if _JOB.fullmatch(job))
        return (_squeue("-j", ids), _sacct("-D", "-j", ids)) if ids else ()

    def find(self, name: str) -> tuple[tuple[str, ...], ...]:
        """The user's jobs of the last two weeks with this name."""
        return _squeue("-n", name), _sacct("-X", "--name", name, "-S", "now-14days")

    def parse_records(self, jobs: Sequence[str], answers: Sequence[Done]) -> dict[str, JobRecord]:
        """A job is left out if only sacct answered and does not state how it ended."""
        if not answers:
            return {job: JobRecord(job, JobPhase.UNKNOWN) for job in jobs}
        live, booked, silent = _parse_answers(answers)
        return keep_known({job: _choose(job, live, booked) for job in jobs}, [silent])

    def parse_found(self, answers: Sequence[Done]) -> tuple[str, ...]:
        """Without submissions that Slurm refused but recorded: they have an id, and failed without a node."""
        live, booked, silent = _parse_answers(answers)
        rows = [*(live or ()), *(booked or ())]
        refused = {row.parent for row in rows if row.word == "FAILED" and not row.nodes and not row.steps}
        found = {row.parent for row in rows} - refused
        if not found and (live is None or booked is None):
            raise SchedulerSilent(describe_silence(silent))
        return tuple(sorted(found, key=int))

    # --- options

    def check_option(self, name: str, value: Any) -> OptionProblem | None:
        """Generic resources may be others than those that keys request: local disks, licences of a node."""
        if name == "gres" and not any(part.strip().startswith("gpu") for part in ",".join(_texts(value)).split(",")):
            return None
        return super().check_option(name, value)

    def read_cpus_per_task(self, options: Mapping[str, str]) -> int:
        return read_count(options.get("cpus-per-task", options.get("c", ""))) or 0

    def leaves_one_thread(self, options: Mapping[str, str], launcher_options: str) -> bool:
        asked = (options.get("hint") == "nomultithread", options.get("threads-per-core") == "1")
        return any(asked) or "nomultithread" in launcher_options or "threads-per-core=1" in launcher_options

    # --- variables

    def is_rank(self, environ: Environ) -> bool:
        """A batch step has SLURM_PROCID=0 too, but no step id (22.05, 24.11) or -5 (26.05); batch, interactive and
        extern steps are 0xfffffffb, -a and -c as unsigned numbers (slurm.h)."""
        step = environ.get("SLURM_STEP_ID", "")
        return "SLURM_PROCID" in environ and step.isdecimal() and int(step) < 0xFFFFFFF0

    def read_seat(self, environ: Environ) -> RankSeat | None:
        if not self.is_rank(environ):
            return None
        world_name = first_set(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
        names = SeatVariables("SLURM_PROCID", world_name, "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_NODEID")
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
        seat = RankSeat(rank, world, local_rank, tasks[node], node, len(tasks), "srun", step)
        check_seat(environ, "srun", names, seat)
        return seat

    def find_hosts(self, environ: Environ, launcher: str, remedy: str) -> tuple[str, list[str]] | None:
        """With another launcher the step is that of its daemons, which may leave out the node it was called on."""
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
        """The first task of `srun --pty` (srun(1)); its other tasks are shells that start nothing."""
        return "SLURM_PTY_PORT" in environ and environ.get("SLURM_PROCID", "0") == "0"

    def count_cores(self, environ: Environ, local_world: int) -> int | None:
        """CPUs of a task where it was asked for them, else its part of the node's."""
        if (per_task := read_count(environ.get("SLURM_CPUS_PER_TASK", ""))) is not None:
            return per_task
        on_node = read_count(environ.get("SLURM_CPUS_ON_NODE", ""))
        return None if on_node is None else max(1, on_node // local_world)

    def count_accelerators(self, environ: Environ) -> int | None:
        return read_count(environ.get("SLURM_GPUS_ON_NODE", ""))

    # --- the doctor, and surveys

    def list_accounts(self, user: str) -> tuple[str, ...]:
        return ("sacctmgr", "-nP", "show", "assoc", f"user={user}", "format=account")

    def survey(self, ask: Ask) -> ProbedFacts:
        from shardway.launch.schedulers.surveys import survey_slurm

        return survey_slurm(ask, self.survey_command)

    def survey_container(self, ask: Ask) -> tuple[str, str]:
        """Pyxis, which adds options to srun."""
        return ("pyxis", "srun --help") if "--container-image" in ask(("srun", "--help"), quiet=True) else ("", "")

    def read_site_name(self, ask: Ask) -> str:
        found = re.search(r"^ClusterName\s*=(.*)", ask(("scontrol", "show", "config"), quiet=True), re.MULTILINE)
        return found[1].strip() if found else ""


def cpus_of_task(job: Job, tasks_per_node: int) -> int:
    """CPUs as Slurm counts them: all hardware threads of the cores of one task; 0 if the site does not state the
    cores."""
    cores = (job.shape.cores_per_node or 0) // tasks_per_node
    return max(1, cores) * job.shape.threads_per_core if job.shape.cores_per_node else 0


def _srun(job: Job, tasks_per_node: int) -> tuple[str, ...]:
    """The words of an srun that starts `tasks_per_node` tasks on each node."""
    cpus = cpus_of_task(job, tasks_per_node)
    bad_end = ("--kill-on-bad-exit=1",)
    if job.launcher == "agent":
        # Agents detect the loss of an agent themselves; srun would signal the others by SIGTERM, which means a stop.
        bad_end = ("--kill-on-bad-exit=0", "--wait=0", *(("--no-kill",) if job.elastic else ()))
    return (
        "srun",
        f"--nodes={job.shape.nodes}",
        f"--ntasks={job.shape.nodes * tasks_per_node}",
        f"--ntasks-per-node={tasks_per_node}",
        *([f"--cpus-per-task={cpus}"] if cpus else []),
        *bad_end,
        *map(quote, job.start.srun_options),
    )


_OF_SBATCH = frozenset(
    (
        *("requeue", "no-requeue", "open-mode", "output", "o", "error", "e", "input", "i", "array", "a", "parsable"),
        *("export", "export-file", "wrap", "wait", "W", "test-only", "signal"),
    )
)
"""Options of sbatch that salloc does not know, or that mean nothing where a person sits at the shell."""


def _list_allocation_options(directives: Sequence[ScriptLine]) -> list[str]:
    """The options of #SBATCH lines, as words, that say what an allocation is."""
    lines = [shlex.split(line.text.removeprefix("#SBATCH ")) for line in directives]
    return [word for words in lines if words[0].lstrip("-").partition("=")[0] not in _OF_SBATCH for word in words]


def _texts(value: Any) -> list[str]:
    return list(map(str, value if isinstance(value, list | tuple) else [value]))


# --- queries and answers

_ENV = ("env", "SLURM_TIME_FORMAT=%s")  # Unix seconds, so the time zone of the answering machine does not matter
_SQUEUE = ("%i", "%A", "%T", "%S", "%e", "%N", "%r", "%j")
_SACCT = ("JobID", "JobIDRaw", "State", "ExitCode", "Submit", "Start", "End", "NodeList", "Reason", "JobName")

_QUEUED = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT")
_ENDINGS = _by_name(
    {
        SchedulerEnding.COMPLETED: "COMPLETED",
        SchedulerEnding.FAILED: "FAILED",
        SchedulerEnding.TIMEOUT: "TIMEOUT DEADLINE",
        SchedulerEnding.CANCELLED: "CANCELLED",
        SchedulerEnding.PREEMPTED: "PREEMPTED",
        SchedulerEnding.OUT_OF_MEMORY: "OUT_OF_MEMORY",
        SchedulerEnding.NODE_FAILURE: "NODE_FAIL BOOT_FAIL RECONFIG_FAIL POWER_UP_FAIL",
        SchedulerEnding.NEVER_STARTED: "LAUNCH_FAILED REVOKED",
    }
)
_MAY_RUN_AGAIN = ("REQUEUED", "PREEMPTED", "NODE_FAIL")  # Slurm may queue the same job id again
_TOLD_BY_STEPS = ("COMPLETED", "FAILED")  # the job's steps, which only sacct has, may give a better reason
_FOLDED = 128
_JOB = re.compile(r"\d+(_(\d+|\[[-\d,:%]+\]))?")

_TAKEN = re.compile(r"^(?:Submitted batch job )?(\d+)(?:;\S+)?\s*$", re.MULTILINE)
"""With or without --parsable, sbatch(1): "12", "12;cluster", "Submitted batch job 12"."""


_STARTS = re.compile(r"\bto start at (\S+)")
"""sbatch --test-only: "sbatch: Job 12 to start at 1795915509 using 4 processors on nodes n1 in partition batch"."""


def _squeue(*which: str) -> tuple[str, ...]:
    return (*_ENV, "squeue", "-h", "-r", "-t", "all", *which, "-o", "|".join(_SQUEUE))


def _sacct(*which: str) -> tuple[str, ...]:
    return (*_ENV, "sacct", "-n", "-P", *which, "-o", ",".join(_SACCT))


@dataclass(frozen=True)
class _Row:
    """One line of squeue or sacct about a job or an array task, in Slurm's words. A step: (step, state, exit code)."""

    job: str
    raw: str
    state: str
    start: str
    end: str
    nodes: str
    reason: str
    name: str
    exit: str = ""
    submit: str = ""
    steps: tuple[tuple[str, str, str], ...] = field(default=(), kw_only=True)

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

    def covers(self, job: str) -> bool:
        """Whether the line is about this id: its own, or one of the tasks of "70_[1-3,5,8-20:4%2]"."""
        parent, _, tasks = self.job.partition("_")
        asked, _, task = job.partition("_")
        if self.job == job or not tasks.startswith("[") or asked != parent or not task.isdigit():
            return self.job == job
        for part in tasks.strip("[]").split("%")[0].split(","):
            bounds, _, step = part.partition(":")
            first, _, last = bounds.partition("-")
            if int(first) <= int(task) <= int(last or first) and (int(task) - int(first)) % int(step or 1) == 0:
                return True
        return False


def _parse_answers(answers: Sequence[Done]) -> tuple[list[_Row] | None, list[_Row] | None, Done]:
    """The lines of squeue, and the job lines of sacct with their steps; None for the one that did not answer, and the
    answer that has to be complained of if nothing is known."""
    squeue, sacct = answers
    live: list[_Row] | None = None
    if squeue.ok or "Invalid job id specified" in squeue.err:
        live = [_Row(*cells) for cells in _split(squeue.out, len(_SQUEUE))]
    booked: list[_Row] | None = None
    if sacct.ok or "accounting storage is disabled" in sacct.err:
        booked = []
        for job, raw, state, exit_text, submit, start, end, nodes, reason, name in _split(sacct.out, len(_SACCT)):
            owner, _, step = job.partition(".")
            if not step:
                nodes = "" if nodes == "None assigned" else nodes
                booked.append(_Row(job, raw, state, start, end, nodes, reason, name, exit_text, submit))
            elif booked and booked[-1].job == owner:
                booked[-1] = replace(booked[-1], steps=(*booked[-1].steps, (step, state, exit_text)))
    return live, booked, squeue if live is None else sacct


def _split(text: str, count: int) -> list[list[str]]:
    """Cells of the lines about jobs. The last cell is the name, which may contain the separator."""
    lines = [line.split("|", count - 1) for line in text.splitlines()]
    return [cells for cells in lines if len(cells) == count and _JOB.fullmatch(cells[0].split(".")[0])]


def _choose(job: str, live: list[_Row] | None, booked: list[_Row] | None) -> JobRecord | None:
    """The record of one job from both answers; None if too little is known."""
    now, runs = _select(job, live or []), _select(job, booked or [])
    newest: dict[str, _Row] = {}  # a job that was queued again has one line per run
    for row in runs:
        if row.job not in newest or row.submit >= newest[row.job].submit:
            newest[row.job] = row
    past = list(newest.values())
    ended = [row for row in past if row.has_ended]
    unsettled = False
    if live is None:
        # Without squeue it is unknown whether a job that can be queued again has been.
        if not past or not all(row.has_ended and row.word not in _MAY_RUN_AGAIN for row in past):
            return None
        chosen = past
    elif not all(row.has_ended for row in now):
        chosen = now
    elif now and len(ended) < len(past) and any(row.word in _TOLD_BY_STEPS for row in now):
        chosen, unsettled = now, True
    elif now or past:
        chosen = past if len(ended) >= len(now) else now
    else:
        return JobRecord(job, JobPhase.UNKNOWN) if booked is not None else None
    records = [_record(row) for row in chosen]
    record = merge_tasks(job, records) if len(records) > 1 else replace(records[0], job=job)
    record = replace(record, restarts=len(runs) - len(past))
    if unsettled:
        note = "sacct does not know its end yet"
        return replace(record, phase=JobPhase.RUNNING, ending=None, ended=None, note=note)
    return record


def _select(job: str, rows: list[_Row]) -> list[_Row]:
    """The lines about a job: its own; else those of its tasks; else those of the task with it as raw id."""
    return (
        [row for row in rows if row.covers(job)]
        or [row for row in rows if row.parent == job]
        or [row for row in rows if row.raw == job]
    )


def _record(row: _Row) -> JobRecord:
    reason = "" if row.reason == "None" else row.reason
    started = _parse_time(row.start)
    if not row.has_ended:
        phase, started = (JobPhase.QUEUED, None) if row.word in _QUEUED else (JobPhase.RUNNING, started)
        return JobRecord(
            row.job, phase, row.state, reason, started=started, nodes=row.nodes, name=row.name, exit_text=row.exit
        )

    ending = _ENDINGS[row.word]
    not_run = not row.nodes and ending not in (SchedulerEnding.CANCELLED, SchedulerEnding.COMPLETED)
    if not_run or (ending is SchedulerEnding.FAILED and row.exit == "0:53"):  # which means that the launch failed
        ending = SchedulerEnding.NEVER_STARTED
    elif ending in (SchedulerEnding.COMPLETED, SchedulerEnding.FAILED):
        # The kernel kills a process of a step; the job script decides what follows from that.
        killed = any(state == "OUT_OF_MEMORY" for _, state, _ in row.steps)
        ending = SchedulerEnding.OUT_OF_MEMORY if killed else ending

    exit_text = row.exit if row.nodes else ""
    if exit_text == "0:0" and row.word != "COMPLETED":  # Slurm ended it itself: the exit code of its script
        exit_text = next((text for step, _, text in row.steps if step == "batch" and text), "")
    parts = exit_text.split(":")
    known = len(parts) == 2 and all(map(str.isdigit, parts))
    code, signal = map(int, parts) if known else (0, 0)
    note = ""
    if known and not signal and 2 < code < _FOLDED and ending is SchedulerEnding.FAILED:
        note = f"Slurm before 26.05 shows an exit code above 127 less 128, so that {code} may be {code + _FOLDED}"
    return JobRecord(
        job=row.job,
        phase=JobPhase.ENDED,
        state=row.state,
        reason=reason,
        ending=ending,
        exit_code=code if known and not signal else None,
        signal=signal if signal <= 31 else 0,  # Slurm's own numbers beyond the signals, such as 125, are none
        started=started if row.nodes else None,
        ended=_parse_time(row.end),
        nodes=row.nodes,
        name=row.name,
        note=note,
        exit_text=exit_text,
    )


def _parse_time(text: str) -> float | None:
    """Unix seconds from seconds, or from local time in ISO format; None for "Unknown", "None", "N/A"."""
    try:
        return float(text) if text.isdigit() else datetime.datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None


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
    hosts: list[str] = []
    for item in items:
        choices: list[list[str]] = []
        for part in _PART.finditer(item):
            ranges = part["ranges"].split(",") if part["plain"] is None else []
            choices.append([number for each in ranges for number in _expand_range(item, each)] or [part["plain"]])
        hosts += map("".join, itertools.product(*choices))
    return hosts


def _expand_range(item: str, text: str) -> list[str]:
    match = _RANGE.fullmatch(text)
    if match is None or int(match["first"]) > int(match["last"] or match["first"]):
        raise ValueError(f'"{text}" in the host list item "{item}" is not a range such as "01-16"')
    first, last = match["first"], match["last"] or match["first"]
    return [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]


def parse_tasks_per_node(text: str) -> list[int]:
    """Tasks of each node in order: "2(x3),1" -> [2, 2, 2, 1]."""
    counts: list[int] = []
    for match in map(_TASKS.fullmatch, text.split(",")):
        if match is None:
            raise ValueError(f'"{text}" is not a list of tasks per node such as "2(x3),1"')
        counts += [int(match["tasks"])] * int(match["nodes"] or 1)
    return counts
