"""The text of a job script: scheduler, launcher and container runtime combined.

Each of the three is one table, name -> its contribution; their product is never written out. The script is bash for
people to read: each line below its purpose, in the order of execution. It can be submitted by hand.

Invariants:
- Two attempts of a chain have the same script except for the four places that name the attempt, so that a job can make
  its successor's script without Python (`queue_next` in launch/shell/control.sh).
- Scheduler commands run outside the container.
- Nothing is read or started here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType

from shardway.inherited import list_patterns
from shardway.launch import launchers
from shardway.launch.containers import APPTAINER, CHARLIECLOUD, ENROOT, PODMAN, PYXIS, Runtime
from shardway.launch.job import Job, JobEnvironment, Program
from shardway.launch.launchers import Starter
from shardway.launch.schedulers.base import SchedulerScript
from shardway.launch.schedulers.local import LOCAL
from shardway.launch.schedulers.pbs import PBS
from shardway.launch.schedulers.slurm import SLURM
from shardway.launch.script import (
    ScriptLine,
    ScriptSection,
    quote,
    quote_comment,
    quote_expanding,
    quote_place,
    quote_shell,
    read_block,
    render_function,
    render_script,
    wrap_command,
)
from shardway.places import LENT
from shardway.version import __version__

SCHEDULERS: Mapping[str, SchedulerScript] = MappingProxyType({"slurm": SLURM, "pbs": PBS, "local": LOCAL})

LAUNCH_COMMANDS: Mapping[str, Starter] = MappingProxyType(
    {
        "torchrun": launchers.start_torchrun,
        "srun": launchers.start_by_srun,
        "mpirun": launchers.start_by_mpirun,
        "agent": launchers.start_agent,
        "ft_launcher": launchers.start_ft_launcher,
    }
)

RUNTIMES: Mapping[str, Runtime] = MappingProxyType(
    {
        "none": Runtime(),
        "pyxis": PYXIS,
        "enroot": ENROOT,
        "apptainer": APPTAINER,
        "podman": PODMAN,
        "charliecloud": CHARLIECLOUD,
    }
)

LAUNCHERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "slurm": ("torchrun", "srun", "mpirun", "agent", "ft_launcher"),
        "pbs": ("torchrun", "mpirun", "agent", "ft_launcher"),
        "local": ("torchrun", "mpirun", "agent", "ft_launcher"),
    }
)
"""Scheduler -> the launchers that work with it."""

_PATHS = ("PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "CONDA_PREFIX", "ENROOT_DATA_PATH")
_IN_EVERY_SCRIPT = (
    *("say", "field", "in_json", "whole", "step_now", "write_result", "ask_to_stop", "cancel_later"),
    *("claim", "note_submission", "note_start", "read_stop", "check_stop", "why_not_started", "fail", "wait_for"),
    *("say_next", "finish"),
)
_OF_A_WORKING_FOLDER = ("untouched", "same", "under_link", "give_way", "is_code", "refresh_work", "enter_work")
_OF_A_CHAIN = ("leave", "settle", "state_of", "cause_of", "say_alike", "same_end", "has_saved", "check_chain")


def render_job_script(job: Job) -> str:
    """The whole script; the same job gives the same text."""
    scheduler, runtime = SCHEDULERS[job.scheduler], RUNTIMES[job.container.runtime]
    end = (*runtime.teardown(job, scheduler), ScriptLine("finish", "how this attempt ended, and what comes next"))
    main = (
        ScriptSection("begin", _begin(job, scheduler)),
        ScriptSection("what the ranks find", _around(job)),
        ScriptSection("run", _run(job, scheduler, runtime)),
        ScriptSection("end", end),
    )
    parts = (
        ScriptSection("", (ScriptLine("#!/bin/bash"), *_header(job), *scheduler.directives(job))),
        ScriptSection("this run and this attempt", _names(job)),
        ScriptSection("what this job does, in order; the functions are below", (render_function("main", main),)),
        ScriptSection("how an attempt begins and ends", _functions(job, scheduler)),
        ScriptSection("", (ScriptLine("main"),)),
    )
    return render_script(parts)


def _header(job: Job) -> tuple[ScriptLine, ...]:
    by_hand = {
        "slurm": "make the folder of --output, sbatch THIS_FILE",
        "pbs": "make the folder of -o, qsub THIS_FILE",
        "local": "bash THIS_FILE",
    }[job.scheduler]
    site = quote_comment(job.site)
    return (ScriptLine(f"# Written by Shardway {__version__} for {site}. To submit it by hand: {by_hand}"),)


def _names(job: Job) -> tuple[ScriptLine, ...]:
    steps = "yes" if job.program.meets_by_itself else "no"
    lines = [
        ScriptLine(f"run={quote(str(job.run))}", "the run directory"),
        ScriptLine(
            f"attempt={job.attempt:04d}", "this attempt, the one that it goes on from (0000: none), and the last"
        ),
        ScriptLine(f"after={job.chain.after:04d}"),
        ScriptLine(f"last_attempt={job.chain.max_attempts}"),
        ScriptLine(
            f"scheduler={job.scheduler}", "what runs the job, what makes its name unique, its wall-time in seconds"
        ),
        ScriptLine(f"token={quote(job.token)}"),
        ScriptLine(f"walltime={round(job.terms.walltime_s)}"),
        ScriptLine(f"counts_steps={steps}", "whether the program obeys the stop file and says itself how it ended"),
        ScriptLine(f"runtime={job.container.runtime}", "what starts the container of the ranks"),
        ScriptLine('asked="" status=0', "what it was asked by a signal, and how it ended"),
        ScriptLine("unset prints clocks loaded CDPATH", "names of this script that a person's shell may have had"),
        ScriptLine("here=$run/attempts/$attempt"),
        ScriptLine("export SHARDWAY_ATTEMPT_DIR=$here SHARDWAY_STOP_FILE=$run/stop", "what the ranks read and write"),
    ]
    if job.container.runtime != "none":
        lines.append(
            ScriptLine(f"export {LENT}=$run/cache", "prepared data, where the home in the container ends with it")
        )
    if job.log_for_scheduler != str(job.folder.job_log):
        lines.append(ScriptLine('exec >> "$here/log/job.out" 2>&1', "what this job prints"))
        lines += [ScriptLine("prints=$here/log/job.out")] if _by_function(job) else []
    return tuple(lines)


_LEFT_OUT = 'variables that mean something for another job or rank (docs/environment.md), and "!...", which stay'


def _array(name: str, words: Iterable[str]) -> str:
    return wrap_command((f"{name}=(", *(quote_shell(word) for word in words), ")"))


def _functions(job: Job, scheduler: SchedulerScript) -> tuple[ScriptLine, ...]:
    needed = (
        (job.scheduler == "local" or _warns_itself(job, scheduler), ("in_time", "tell_script")),
        (_ranks_within(job) > 0, ("in_time", "end_without_ranks")),
        (job.launcher == "mpirun", ("check_mpirun",)),
        (_ends_mpirun(job), ("in_time", "end_mpirun")),
        (_awaits_ranks(job, scheduler), ("await_ranks",)),
        (job.chain.until_done, _OF_A_CHAIN),
        (job.chain.until_done and not job.chain.ahead, ("queue_next",)),
    )
    control = dict.fromkeys((*_IN_EVERY_SCRIPT, *(name for wanted, names in needed if wanted for name in names)))
    left_out = {"of_ranks": True, "of_jobs": False} if "queue_next" in control else {"of_ranks": True}
    return (
        *(ScriptLine(_array(name, list_patterns(of_ranks=ranks)), _LEFT_OUT) for name, ranks in left_out.items()),
        read_block("inherited", "drop_variables"),
        *(read_block("control", name) for name in control),
        *(read_block(scheduler.shell, name) for name in scheduler.functions(job)),
        *(read_block("addresses", name) for name in ("address", "own_address", "free_port", "meet")),
        *(read_block("work", name) for name in (_OF_A_WORKING_FOLDER if job.around.code is not None else ())),
        read_block("secret_lines", "read_secrets"),
    )


def _begin(job: Job, scheduler: SchedulerScript) -> tuple[ScriptLine, ...]:
    chained = job.chain.until_done
    lines = [
        ScriptLine(
            'drop_variables "${of_ranks[@]}"', "what another launch has left, and would place the ranks elsewhere"
        ),
        ScriptLine("begin", "which job this is, its nodes, when its wall-time ends"),
        ScriptLine("export SHARDWAY_JOB=$job"),
        ScriptLine("claim"),
        ScriptLine("note_start"),
        *([ScriptLine("check_chain")] if chained else []),
        ScriptLine("check_stop"),
        *([ScriptLine("queue_next")] if chained and not job.chain.ahead else []),
        ScriptLine(
            f"[ ${{#nodes[@]}} -gt 0 ] || fail {quote(_NO_NODES.format(job.scheduler))}",
            "ranks on no node fail nowhere",
        ),
        ScriptLine("trap 'ask_to_stop deadline the wall-time is about to end' USR2", "signals become the stop file"),
        *_traps(),
    ]
    if _warns_itself(job, scheduler):
        clock = f"in_time $((deadline - started - {round(job.warn_s)})) tell_script USR2"
        lines.append(ScriptLine(clock, "warns this script before the wall-time ends, which the scheduler does not"))
    return tuple(lines)


_NO_NODES = "the nodes of this job are not known: {} named none"

_ASKING = {
    "TERM": "SIGTERM, as schedulers send it before they kill",
    **{name: f"SIG{name}" for name in ("INT", "USR1", "HUP")},
}
"""Signals that ask a job to stop, with what is recorded for each."""


def _traps() -> tuple[ScriptLine, ...]:
    return tuple(ScriptLine(f"trap 'ask_to_stop signal came: {said}' {name}") for name, said in _ASKING.items())


def _warns_itself(job: Job, scheduler: SchedulerScript) -> bool:
    """Whether the script itself warns before the end of the wall-time."""
    return job.warn_s > 0 and not scheduler.warns


def _ends_mpirun(job: Job) -> bool:
    """Whether the script ends mpirun, since the ranks record how they ended."""
    return job.launcher == "mpirun" and job.program.meets_by_itself


def _awaits_ranks(job: Job, scheduler: SchedulerScript) -> bool:
    """Whether a job that was asked to end waits for the results of ranks that the scheduler has signalled too."""
    return scheduler.signals_every_process and job.program.meets_by_itself


def _around(job: Job) -> tuple[ScriptLine, ...]:
    around, cores = job.around, job.shape.cores_per_rank
    lines = _modules(job)
    if cores:  # PBS sets it to all cores of the node
        lines.append(ScriptLine(f"export OMP_NUM_THREADS={cores}", "threads of a rank"))
    lines.append(
        ScriptLine("export PYTHONUNBUFFERED=1", "what a rank prints is seen at once, and not lost with the rank")
    )
    for name, value in around.expanded.items():
        lines.append(ScriptLine(f"export {name}={quote_expanding(value)}", "variables of the site"))
    for name, value in around.literal.items():
        lines.append(ScriptLine(f"export {name}={quote(value)}", "variables of the run"))
    secrets = quote_expanding(around.secrets_file)
    lines += [
        ScriptLine(f"secrets={secrets}", "passwords and tokens stand in a file of your own alone"),
        ScriptLine('read_secrets "$secrets"'),
        ScriptLine(f"suffix={quote(job.meeting.host_suffix)} resolve={'yes' if job.meeting.resolve else 'no'}", _MEET),
        ScriptLine("meet"),
        ScriptLine(_enter(around), "the code that was submitted"),
    ]
    return tuple(lines)


def _enter(around: JobEnvironment) -> str:
    """Shell that changes into the working folder; for a script submitted by hand, without a snapshot, into `source`."""
    workdir, gone = quote(str(around.workdir)), "fail 'there is no folder to run in'"
    if around.code is not None:
        words = (around.code, around.workdir, around.source or "")
        return wrap_command(("enter_work", *(quote(str(word)) for word in words)))
    if around.source is None:
        return f"cd {workdir} || {gone}"
    source = quote(str(around.source))
    instead = f'{{ [ ! -e "$here/order.json" ] && cd {source} && say "no snapshot was made: it runs in" {source}; }}'
    return wrap_command((f"cd {workdir} 2> /dev/null ||", f"{instead} ||", gone))


_SAVING_S = 30
"""How long mpirun leaves ranks between SIGTERM and SIGKILL; its default is one second. Schedulers wait about as long
(Slurm's KillWait is 30 s, PBS's kill_delay 10 s). mpirun waits twice this time in any case, also for ranks that have
left."""

_MEET = "where the ranks meet: rules of this site for the name of a node on the network for computing"


def _modules(job: Job) -> list[ScriptLine]:
    around, inside = job.around, job.container.runtime != "none"
    lines = []
    if around.modules or around.purge_modules:
        lines.append(ScriptLine("command -v module > /dev/null || . /etc/profile", "software of the site"))
        lines += [ScriptLine("module purge")] if around.purge_modules else []
        lines += [ScriptLine("exported=$(compgen -e)")] if _notes_modules(job) else []
        lines += [ScriptLine(_or_fail(f"module load {quote(name)}", "site.modules")) for name in around.modules]
        if _notes_modules(job):
            noted = "mapfile -t loaded < <(compgen -e | grep -vxF \"$exported\" | grep -v '^_')"
            lines.append(
                ScriptLine(noted, "what it set, for nodes on which PBS starts ranks with next to no environment")
            )
    if around.venv.startswith("conda:"):
        name = quote(around.venv.removeprefix("conda:"))
        activate = f'eval "$(conda shell.bash hook)" && conda activate {name}'
        lines.append(ScriptLine(_or_fail(activate, "site.venv", f"conda activate {name}"), "Python and its packages"))
    elif around.venv and not inside:
        activate = f". {quote_place(around.venv + '/bin/activate')}"
        lines.append(ScriptLine(_or_fail(activate, "site.venv"), "Python and its packages"))
    return lines


def _or_fail(command: str, key: str, name: str = "") -> str:
    """A command without which the ranks would find other software than requested. Old `module` commands fail with 0."""
    return f"{command} || fail {quote(f'{name or command} failed, as the lines before say; see {key}')}"


def _run(job: Job, scheduler: SchedulerScript, runtime: Runtime) -> tuple[ScriptLine, ...]:
    lines = []
    if _inherits_nothing(job):
        names = " ".join(name for name in job.variables if name not in job.around.secret_names)
        keep = f'declare -p {names} > "$here/environment.sh" 2> /dev/null'
        lines.append(ScriptLine(keep, "variables of the job, for ranks that do not inherit them; no secrets"))
    if "on_each_node" in scheduler.functions(job):
        lines.append(ScriptLine(f"carried=({' '.join(_carried(job))})", "what other nodes need to find programs"))
    lines += runtime.setup(job, scheduler)
    lines += _mpirun_options(job) if job.launcher == "mpirun" else []  # from variables that earlier lines set
    if job.preflight is not None:
        doctor = _command(_as_doctor(job, job.preflight), scheduler, runtime)
        doctor = f"prints=$here/log/doctor.out {doctor}" if _by_function(job) else doctor
        lines.append(ScriptLine(f'{doctor} > "$here/log/doctor.out" 2>&1', "what the nodes are like; it stops nothing"))
        found = 'grep -E "(warn|fail) " "$here/log/doctor.out"'
        lines.append(
            ScriptLine(f'! {found} || say "this is what the doctor found; all of it is in $here/log/doctor.out"')
        )
    shielded, within = scheduler.signals_every_process, _ranks_within(job)
    lines += [ScriptLine(f"trap '' {' '.join(_ASKING)}", _SHIELD)] if shielded else []
    lines += [
        ScriptLine(f"{_command(job, scheduler, runtime)} &", "the ranks, and how they ended"),
        ScriptLine("ranks=$!"),
    ]
    lines += _traps() if shielded else ()
    if within:
        lines.append(ScriptLine(f'in_time {within} end_without_ranks {within} "$ranks"', "a job without ranks ends"))
    if _ends_mpirun(job):
        lines.append(ScriptLine(f'in_time 0 end_mpirun {_SAVING_S} "$ranks"', "and one whose ranks have left"))
    lines.append(ScriptLine('wait_for "$ranks"'))
    if _awaits_ranks(job, scheduler):
        lines.append(ScriptLine(f'[ -z "$asked" ] || await_ranks {_LAST_WORD_S}', "they may still save"))
    return tuple(lines)


_LAST_WORD_S = 120
"""How long a job that was asked to end waits for the results of its ranks; the scheduler kills it sooner."""

_SHIELD = "signals of the scheduler reach every process of this job: what starts the ranks has to outlive them"


def _ranks_within(job: Job) -> int:
    """Seconds in which rank 0 must report its start; 0 for no limit, or if it is unknown."""
    within = 2 * job.again.start_s
    return round(within) if job.program.meets_by_itself and math.isfinite(within) else 0


def _as_doctor(job: Job, doctor: Program) -> Job:
    """The same job with the doctor as its program. Our agent starts only trainings, and a failed doctor is not
    restarted."""
    launcher = "torchrun" if job.launcher in ("agent", "ft_launcher") else job.launcher
    return replace(job, program=doctor, launcher=launcher, elastic=False)


def _notes_modules(job: Job) -> bool:
    """Whether the variables that modules set must be passed to the other nodes by name."""
    return job.scheduler == "pbs" and bool(job.around.modules)


def _carried(job: Job) -> tuple[str, ...]:
    """Names of variables that other nodes need, as shell words."""
    return (*_PATHS, '"${loaded[@]}"') if _notes_modules(job) else _PATHS


def _inherits_nothing(job: Job) -> bool:
    """Whether ranks are in a container, whose image may set the same names, or on nodes that get no environment."""
    return job.container.runtime != "none" or job.launcher == "mpirun" or job.scheduler == "pbs"


def _by_function(job: Job) -> bool:
    """Whether `on_each_node` starts the ranks, and needs to be given their output files."""
    return job.scheduler == "pbs" and job.one_agent_a_node


def _command(job: Job, scheduler: SchedulerScript, runtime: Runtime) -> str:
    """The command that starts the program on every rank: launcher, container, environment, program."""
    started = LAUNCH_COMMANDS[job.launcher](job, scheduler)
    outside = (*started.outside, *runtime.of_launcher(job, scheduler))
    inside = (*_prepared(job), *started.inside)
    return wrap_command((*outside, *runtime.wrap(job, scheduler), *inside))


def _prepared(job: Job) -> tuple[str, ...]:
    """Words before a rank's program that set the job's variables and, in a container, its virtual environment, if one
    was named and was made with the image's Python."""
    inside = job.container.runtime != "none"
    files = ['"$here/environment.sh"'] if inside or job.launcher == "mpirun" else []
    if inside and job.around.venv and not job.around.venv.startswith("conda:"):
        files.append(quote_place(f"{job.around.venv}/bin/activate"))
    return tuple(word for file in files for word in ("bash", "-c", quote('. "$0" && exec "$@"'), file))


def _mpirun_options(job: Job) -> list[ScriptLine]:
    """mpirun passes variables to other nodes by name, so no value appears in the list of processes."""
    names = (*job.around.secret_names, *_carried(job))
    lines = [
        ScriptLine(
            f"check_mpirun {quote(job.start.mpirun or 'mpirun')}", "which it is, of those that modules and conda bring"
        ),
        ScriptLine(
            f"mpirun_options=(--mca odls_base_sigkill_timeout {_SAVING_S})", "how long ranks may save after SIGTERM"
        ),
        ScriptLine(f'for name in {" ".join(names)}; do [ -z "${{!name+set}}" ] || mpirun_options+=(-x "$name"); done'),
    ]
    if job.scheduler == "pbs":
        lines += [
            ScriptLine('mpirun_options+=(--hostfile "$PBS_NODEFILE")', "the nodes, and what starts its daemons there"),
            ScriptLine("ompi_info 2> /dev/null | grep -q 'MCA plm: tm' || remote_shell"),
        ]
    return lines
