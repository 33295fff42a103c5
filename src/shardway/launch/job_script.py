"""The text of a job script, and of the functions beside it: scheduler, launcher and container runtime combined.

Each of the three is a class that is found by its name; their product is never written out. The script is bash for
people to read, a page in the order of execution: directives, settings of this run, environment, ranks, end. It can be
submitted by hand. What every job does alike are functions of `lib.sh`, which lies in the attempt's folder; the script
reads it from there, since schedulers run a copy of the script.

Invariants:
- Two attempts of a chain have the same script except for the four places that name the attempt, so that a job can make
  its successor's script without Python (`queue_next` in launch/shell/lib.sh).
- `lib.sh` is the same for all jobs of a scheduler; a value of a run stands in the script alone.
- Scheduler commands run outside the container.
- Nothing is started here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from shardway.inherited import list_patterns
from shardway.launch.containers import Container
from shardway.launch.job import Job, JobEnvironment, Program
from shardway.launch.schedulers.base import Scheduler, find_scheduler
from shardway.launch.script import (
    ScriptLine,
    ScriptSection,
    quote,
    quote_comment,
    quote_expanding,
    quote_place,
    quote_shell,
    read_shell,
    render_function,
    render_script,
    wrap_command,
)
from shardway.places import LENT
from shardway.plugins import make_plugin
from shardway.version import __version__

_PATHS = ("PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "CONDA_PREFIX", "ENROOT_DATA_PATH")


def render_job_script(job: Job) -> str:
    """The whole script; the same job gives the same text."""
    scheduler, runtime = find_scheduler(job.scheduler), make_plugin("containers", job.container.runtime)
    end = (*runtime.teardown(job, scheduler), ScriptLine("finish", "how this attempt ended, and what comes next"))
    main = (
        ScriptSection("begin", _begin(job, scheduler)),
        ScriptSection("what the ranks find", _around(job, scheduler)),
        ScriptSection("run", _run(job, scheduler, runtime)),
        ScriptSection("end", end),
    )
    parts = (
        ScriptSection("", (ScriptLine("#!/bin/bash"), *_header(job, scheduler), *scheduler.directives(job))),
        ScriptSection("this run and this attempt", _names(job, scheduler)),
        ScriptSection("what this job does, in order", (render_function("main", main), ScriptLine("main"))),
    )
    return render_script(parts, behind=True)


def render_library(scheduler: str) -> str:
    """The text of `lib.sh`: the functions of every job, and those of the scheduler."""
    arrays = (
        ScriptLine(_array(name, list_patterns(of_ranks=of_ranks)))
        for name, of_ranks in (("of_ranks", True), ("of_jobs", False))
    )
    lists = render_script((ScriptSection(_LEFT_OUT, tuple(arrays)),))
    return f"{read_shell('lib')}\n{lists}\n# --- {scheduler}\n\n{read_shell(find_scheduler(scheduler).shell)}"


_LEFT_OUT = 'variables that mean something for another job or rank (docs/environment.md), and "!...", which stay'


def _array(name: str, words: Iterable[str]) -> str:
    return wrap_command((f"{name}=(", *(quote_shell(word) for word in words), ")"))


def _header(job: Job, scheduler: Scheduler) -> tuple[ScriptLine, ...]:
    site, by_hand = quote_comment(job.site), scheduler.by_hand
    return (
        ScriptLine(f"# Written by Shardway {__version__} for {site}. To submit it by hand: {by_hand}"),
        ScriptLine(
            "# Its functions are in lib.sh in the attempt's folder; `shardway submit ... --dry-run --lib` prints it"
        ),
    )


def _names(job: Job, scheduler: Scheduler) -> tuple[ScriptLine, ...]:
    steps = "yes" if job.program.meets_by_itself else "no"
    lines = [
        ScriptLine(
            f"run={quote(str(job.run))}",
            "the run directory, this attempt, and the one that it goes on from (0000: none)",
        ),
        ScriptLine(f"attempt={job.attempt:04d}"),
        ScriptLine(f"after={job.chain.after:04d}"),
        ScriptLine(
            f"last_attempt={job.chain.max_attempts} scheduler={job.scheduler} token={quote(job.token)} "
            f"walltime={round(job.terms.walltime_s)}",
            "the token makes its name unique; seconds",
        ),
        ScriptLine(f"counts_steps={steps}", "whether the program obeys the stop file and says itself how it ended"),
        ScriptLine(f"runtime={job.container.runtime}", "what starts the container of the ranks"),
        ScriptLine("here=$run/attempts/$attempt", "the folder of this attempt"),
        ScriptLine("export SHARDWAY_ATTEMPT_DIR=$here SHARDWAY_STOP_FILE=$run/stop", "what the ranks read and write"),
    ]
    if job.container.runtime != "none":
        lines.append(
            ScriptLine(f"export {LENT}=$run/cache", "prepared data, where the home in the container ends with it")
        )
    to_log = job.log_for_scheduler != str(job.folder.job_log)
    if to_log:
        lines.append(ScriptLine('exec >> "$here/log/job.out" 2>&1', "what this job prints"))
    lines += [
        ScriptLine(_NO_LIBRARY),
        ScriptLine('. "$here/lib.sh"', "the functions that every job has"),
    ]
    if to_log and _by_function(job, scheduler):
        lines.append(ScriptLine("prints=$here/log/job.out", "for tasks on other nodes"))
    return tuple(lines)


_NO_LIBRARY = (
    '[ -r "$here/lib.sh" ] || { echo "shardway: $here/lib.sh is missing, see line 3 of this script" >&2; exit 1; }'
)


def _begin(job: Job, scheduler: Scheduler) -> tuple[ScriptLine, ...]:
    chained = job.chain.until_done
    queues = [ScriptLine("queue_next", "the next attempt, which waits until this job has ended")]
    lines = [
        ScriptLine("begin_attempt", "which job this is; one job alone has an attempt"),
        *([ScriptLine("check_chain", "whether the attempt before has left work to do")] if chained else []),
        ScriptLine("check_stop", "a person may have asked for a stop while it waited"),
        *(queues if chained and not job.chain.ahead else []),
        ScriptLine("check_nodes", "ranks on no node fail nowhere"),
        ScriptLine("heed_signals", "signals become the stop file"),
    ]
    if _warns_itself(job, scheduler):
        clock = f"in_time $((deadline - started - {round(job.warn_s)})) tell_script USR2"
        lines.append(ScriptLine(clock, "warns this script before the wall-time ends"))
    return tuple(lines)


def _warns_itself(job: Job, scheduler: Scheduler) -> bool:
    """Whether the script itself warns before the end of the wall-time."""
    return job.warn_s > 0 and not scheduler.warns


def _ends_mpirun(job: Job) -> bool:
    """Whether the script ends mpirun, since the ranks record how they ended."""
    return job.launcher == "mpirun" and job.program.meets_by_itself


def _awaits_ranks(job: Job, scheduler: Scheduler) -> bool:
    """Whether a job that was asked to end waits for the results of ranks that the scheduler has signalled too."""
    return scheduler.signals_every_process and job.program.meets_by_itself


def _around(job: Job, scheduler: Scheduler) -> tuple[ScriptLine, ...]:
    around, cores = job.around, job.shape.cores_per_rank
    lines = _modules(job, scheduler)
    if cores:  # PBS sets it to all cores of the node
        lines.append(ScriptLine(f"export OMP_NUM_THREADS={cores}", "threads of a rank"))
    lines.append(
        ScriptLine("export PYTHONUNBUFFERED=1", "what a rank prints is seen at once, and not lost with the rank")
    )
    for name, value in around.expanded.items():
        lines.append(ScriptLine(f"export {name}={quote_expanding(value)}", "variables of the site"))
    for name, value in around.literal.items():
        lines.append(ScriptLine(f"export {name}={quote(value)}", "variables of the run"))
    resolve = "yes" if job.meeting.resolve else "no"
    lines += [
        ScriptLine(f"read_secrets {quote_expanding(around.secrets_file)}", "passwords and tokens, of a file of yours"),
        ScriptLine(f"meet {quote(job.meeting.host_suffix)} {resolve}", _MEET),
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

_MEET = "where the ranks meet; the site's suffix of names on the network for computing"


def _modules(job: Job, scheduler: Scheduler) -> list[ScriptLine]:
    around, inside = job.around, job.container.runtime != "none"
    lines = []
    if around.modules or around.purge_modules:
        purge = ["--purge"] if around.purge_modules else []
        lines.append(
            ScriptLine(wrap_command(("load_modules", *purge, *map(quote, around.modules))), "software of the site")
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
    """A command without which the ranks would find other software than requested."""
    return f"{command} || fail {quote(f'{name or command} failed, as the lines before say; see {key}')}"


def _run(job: Job, scheduler: Scheduler, runtime: Container) -> tuple[ScriptLine, ...]:
    lines = []
    if _inherits_nothing(job, scheduler):
        names = " ".join(name for name in job.variables if name not in job.around.secret_names)
        keep = f'declare -p {names} > "$here/environment.sh" 2> /dev/null'
        lines.append(ScriptLine(keep, "variables of the job, for ranks that do not inherit them; no secrets"))
    if not scheduler.hands_on_environment and (job.one_agent_a_node or runtime.teardown(job, scheduler)):
        carried = " ".join(_carried(job, scheduler))
        lines.append(ScriptLine(f"carried=({carried})", "what other nodes need to find programs"))
    lines += runtime.setup(job, scheduler)
    lines += (
        _mpirun_options(job, scheduler) if job.launcher == "mpirun" else []
    )  # from variables that earlier lines set
    if job.preflight is not None:
        doctor = _command(_as_doctor(job, job.preflight), scheduler, runtime)
        doctor = f"prints=$here/log/doctor.out {doctor}" if _by_function(job, scheduler) else doctor
        lines.append(ScriptLine(f'{doctor} > "$here/log/doctor.out" 2>&1', "what the nodes are like; it stops nothing"))
        found = 'grep -E "(warn|fail) " "$here/log/doctor.out"'
        lines.append(
            ScriptLine(f'! {found} || say "this is what the doctor found; all of it is in $here/log/doctor.out"')
        )
    shielded, within = scheduler.signals_every_process, _ranks_within(job)
    lines += [ScriptLine("shield", _SHIELD)] if shielded else []
    lines += [
        ScriptLine(f"{_command(job, scheduler, runtime)} &", "the ranks, and how they ended"),
        ScriptLine("ranks=$!"),
    ]
    lines += [ScriptLine("heed_signals")] if shielded else []
    if within:
        lines.append(ScriptLine(f'in_time {within} end_without_ranks {within} "$ranks"', "a job without ranks ends"))
    if _ends_mpirun(job):
        lines.append(ScriptLine(f'in_time 0 end_mpirun {_SAVING_S} "$ranks"', "and one whose ranks have left"))
    lines.append(ScriptLine('wait_for "$ranks"', "to their end, whatever signals come"))
    if _awaits_ranks(job, scheduler):
        lines.append(ScriptLine(f'[ -z "$asked" ] || await_ranks {_LAST_WORD_S}', "they may still save"))
    return tuple(lines)


_LAST_WORD_S = 120
"""How long a job that was asked to end waits for the results of its ranks; the scheduler kills it sooner."""

_SHIELD = "what starts the ranks outlives signals, which this scheduler sends to every process"


def _ranks_within(job: Job) -> int:
    """Seconds in which rank 0 must report its start; 0 for no limit, or if it is unknown."""
    within = 2 * job.again.start_s
    return round(within) if job.program.meets_by_itself and math.isfinite(within) else 0


def _as_doctor(job: Job, doctor: Program) -> Job:
    """The same job with the doctor as its program. Our agent starts only trainings, and a failed doctor is not
    restarted."""
    launcher = "torchrun" if job.launcher in ("agent", "ft_launcher") else job.launcher
    return replace(job, program=doctor, launcher=launcher, elastic=False)


def _notes_modules(job: Job, scheduler: Scheduler) -> bool:
    """Whether the variables that modules set must be passed to the other nodes by name."""
    return not scheduler.hands_on_environment and bool(job.around.modules)


def _carried(job: Job, scheduler: Scheduler) -> tuple[str, ...]:
    """Names of variables that other nodes need, as shell words."""
    return (*_PATHS, '"${loaded[@]}"') if _notes_modules(job, scheduler) else _PATHS


def _inherits_nothing(job: Job, scheduler: Scheduler) -> bool:
    """Whether ranks are in a container, whose image may set the same names, or on nodes that get no environment."""
    return job.container.runtime != "none" or job.launcher == "mpirun" or not scheduler.hands_on_environment


def _by_function(job: Job, scheduler: Scheduler) -> bool:
    """Whether `on_each_node` starts the ranks, and needs to be given their output files."""
    return job.one_agent_a_node and scheduler.each_node(job).words[:1] == ("on_each_node",)


def _command(job: Job, scheduler: Scheduler, runtime: Container) -> str:
    """The command that starts the program on every rank: launcher, container, environment, program."""
    started = make_plugin("launchers", job.launcher).start(job, scheduler)
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


def _mpirun_options(job: Job, scheduler: Scheduler) -> list[ScriptLine]:
    """mpirun passes variables to other nodes by name, so no value appears in the list of processes."""
    names = (*job.around.secret_names, *_carried(job, scheduler))
    mpirun = quote(job.start.mpirun or "mpirun")
    lines = [
        ScriptLine(
            wrap_command(("set_up_mpirun", mpirun, str(_SAVING_S), *names)),
            "how long ranks may save after SIGTERM (seconds), and variables that other nodes get",
        ),
    ]
    lines += scheduler.mpirun_lines(job)
    return lines
