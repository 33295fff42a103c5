"""The text of a job script, and of the functions beside it: scheduler, launcher and container runtime combined; and of
the scripts behind which a person sits, which make a job's environment with the same lines.

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
from dataclasses import replace
from pathlib import Path

from shardway.inherited import list_patterns
from shardway.launch.containers import Container
from shardway.launch.job import Job
from shardway.launch.schedulers.base import Scheduler, find_scheduler
from shardway.launch.script import (
    ScriptLine,
    ScriptSection,
    quote,
    quote_comment,
    quote_expanding,
    quote_place,
    quote_shell,
    read_blocks,
    read_shell,
    render_function,
    render_script,
    script_lines,
    wrap_command,
)
from shardway.places import LENT
from shardway.plugins import make_plugin
from shardway.version import __version__

_SAVING_S = 30
"""How long mpirun leaves ranks between SIGTERM and SIGKILL; its default is one second. Schedulers wait about as long
(Slurm's KillWait is 30 s, PBS's kill_delay 10 s). mpirun waits twice this time in any case, also for ranks that have
left."""

_LAST_WORD_S = 120
"""How long a job that was asked to end waits for the results of its ranks; the scheduler kills it sooner."""


def render_job_script(job: Job) -> str:
    """The whole script; the same job gives the same text."""
    scheduler, runtime = find_scheduler(job.scheduler), make_plugin("containers", job.container.runtime)
    end = (*runtime.teardown(job, scheduler), ScriptLine("finish", "how this attempt ended, and what comes next"))
    main = (
        ScriptSection("begin", _begin(job, scheduler)),
        ScriptSection("what the ranks find", _around(job)),
        ScriptSection("run", _run(job, scheduler, runtime)),
        ScriptSection("end", end),
    )
    by_hand = f"To submit it by hand: {scheduler.by_hand}"
    head = script_lines(
        ("#!/bin/bash", ""),
        (f"# Written by Shardway {__version__} for {quote_comment(job.site)}. {by_hand}", ""),
        ("# Its functions are in lib.sh in the attempt's folder; `shardway submit ... --dry-run --lib` prints it", ""),
    )
    parts = (
        ScriptSection("", (*head, *scheduler.directives(job))),
        ScriptSection("this run and this attempt", _names(job, scheduler)),
        ScriptSection("what this job does, in order", (render_function("main", main), ScriptLine("main"))),
    )
    return render_script(parts, behind=True)


def render_enter_script(job: Job) -> str:
    """The text of `enter.sh`: a command on a node of a running attempt of this run, in what its ranks find.

    It is called as `enter.sh ATTEMPT_FOLDER JOB NODE RANK TERMINAL COMMAND...` where the scheduler's commands are. NODE
    "here" is this node, RANK and TERMINAL may be "". A later link of a chain, which a job has submitted, has the same.
    """
    scheduler, runtime = find_scheduler(job.scheduler), make_plugin("containers", job.container.runtime)
    options, inside = runtime.of_launcher(job, scheduler), _list_prepared(job)
    again = '"$0" "$here" "$job" here "$rank" "" "$@"'
    goes_on = wrap_command(("on_node", '"$node"', *((*inside, '"$@"') if options else ("bash", again))))
    reach = script_lines(
        (f'[ -z "$rank" ] || [ "$node" = here ] || place_rank "$rank" {job.shape.ranks_per_node}', "where a rank is"),
        (f'if [ "$node" != here ]; then\n  {goes_on}\nfi', "there"),
    )
    # by that name a command on this machine would be a part of the job, which lasts as long as one of its processes
    named = "SHARDWAY_JOB=$job" if scheduler.this_machine else "export SHARDWAY_JOB=$job"
    leaves = ("env", "-u", "SHARDWAY_JOB") if scheduler.this_machine and inside else ()
    named_rank = (
        'if [ -n "$rank" ]; then\n'
        '  pid=$(find_rank "$rank")\n'
        '  [ -n "$pid" ] || fail "rank $rank has no process on $(uname -n): it has ended, or not begun"\n'
        '  set -- "${@//\\{pid\\}/$pid}"\n'
        "fi"
    )
    command = wrap_command((*runtime.wrap(job, scheduler), *inside, *leaves, '"$@"'))
    workdir = quote(str(job.around.workdir))
    around = (
        ScriptLine('drop_variables "${of_ranks[@]}"', "what a shell of another job has left"),
        ScriptLine(named),
        *_set_environment(job),
        ScriptLine(f"cd {workdir} || fail 'there is no folder to run in'", "where the ranks work"),
        *runtime.setup_beside(job, scheduler),
        *script_lines((named_rank, "its process in place of the word {pid}"), (f"exec {command}", "the command")),
    )
    names = (
        ScriptLine(f"run={quote(str(job.run))} runtime={job.container.runtime}", "the run"),
        ScriptLine("here=$1 job=$2 node=$3 rank=$4 terminal=$5", "this attempt, and where the command is to run"),
        ScriptLine("shift 5"),
        ScriptLine(
            wrap_command(("options=(", *options, ")")), "options of what reaches the node: a container that it makes"
        ),
        ScriptLine("export SHARDWAY_ATTEMPT_DIR=$here SHARDWAY_STOP_FILE=$run/stop", "what the ranks read and write"),
        *script_lines(*_lend(job)),
        ScriptLine('. "$here/lib.sh"', "the functions that every job has"),
    )
    head = f"# Written by Shardway {__version__}: `shardway exec` runs a command on a node of the job with it"
    main = (ScriptSection("to the node", reach), ScriptSection("there", around))
    return _render_behind_person(head, names, main, functions=("place_rank", "find_rank"))


def render_shell_script(job: Job, folder: Path) -> str:
    """The text of the script of `shardway shell`, which lies in `folder` beside `lib.sh`: what a job's ranks find, and
    then a shell."""
    scheduler, runtime = find_scheduler(job.scheduler), make_plugin("containers", job.container.runtime)
    options, inside = runtime.of_launcher(job, scheduler), _list_prepared(job)
    names = " ".join(name for name in job.variables if name not in job.around.secret_names)
    of_host = 'PATH LD_LIBRARY_PATH PYTHONPATH VIRTUAL_ENV CONDA_PREFIX "${loaded[@]}" '
    found = of_host if job.container.runtime == "none" else ""
    keep = f'declare -p {found}{names} > "$here/environment.sh" 2> /dev/null'
    begin = ("begin_here",) if scheduler.this_machine else ("begin", "export SHARDWAY_JOB=$job")
    place = ("on_node", '"${nodes[0]}"') if options else runtime.wrap(job, scheduler)
    main = (
        ScriptSection(
            "begin",
            (
                ScriptLine('drop_variables "${of_ranks[@]}"', "what a shell of another job has left"),
                *map(ScriptLine, begin),
            ),
        ),
        ScriptSection(
            "what the ranks of a job find", (*_set_environment(job), _meet(job), ScriptLine(_enter_folder(job)))
        ),
        ScriptSection(
            "the shell",
            (
                ScriptLine(keep, "for a container, and for a shell that ~/.bashrc may have changed"),
                *runtime.setup(job, scheduler),
                *([ScriptLine(wrap_command(("options=(", *options, ")")), "the container")] if options else []),
                ScriptLine(wrap_command(("open_shell", *place, *inside))),
                *runtime.teardown(job, scheduler),
                ScriptLine('echo "$status" > "$here/exit_code"'),
                ScriptLine('exit "$status"'),
            ),
        ),
    )
    heading = (
        ScriptLine(
            f"run={quote(str(job.run))} here={quote(str(folder))}", "the run directory, and this shell's folder"
        ),
        ScriptLine(f"scheduler={job.scheduler} walltime={round(job.terms.walltime_s)} runtime={job.container.runtime}"),
        ScriptLine("options=() terminal="),
        ScriptLine("[ ! -t 0 ] || [ ! -t 1 ] || terminal=yes"),
        *script_lines(*_lend(job)),
        ScriptLine('. "$here/lib.sh"', "the functions that every job has"),
    )
    head = f"# Written by Shardway {__version__} for {quote_comment(job.site)}: `shardway shell` starts it"
    functions = ("begin_here", "open_shell") if scheduler.this_machine else ("open_shell",)
    return _render_behind_person(head, heading, main, scheduler.shell_lines(job), functions)


def render_bashrc(job: Job, folder: Path) -> str:
    """What bash reads in that shell: the person's own ~/.bashrc, after which the job's variables hold again."""
    environment = quote(str(folder / "environment.sh"))
    return (
        "[ ! -r ~/.bashrc ] || . ~/.bashrc\n"
        f". {environment}\n"
        f"cd {quote(str(job.around.workdir))} || exit\n"
        f'PS1="({job.name}) ${{PS1-\\\\w\\\\$ }}"\n'
    )


def _render_behind_person(
    head: str,
    names: tuple[ScriptLine, ...],
    main: tuple[ScriptSection, ...],
    before: tuple[ScriptLine, ...] = (),
    functions: tuple[str, ...] = (),
) -> str:
    """A script that a person sits behind: what it reports goes to the person, and no attempt ends with it."""
    blocks = read_blocks("interactive")
    replaced = tuple(blocks[name] for name in ("say", "fail", *functions))
    parts = (
        ScriptSection("", script_lines(("#!/bin/bash", ""), (head, ""))),
        ScriptSection("this run", names),
        ScriptSection("functions in place of those for a log, and others", replaced),
        ScriptSection("where it begins", before),
        ScriptSection("in order", (render_function("main", main), ScriptLine('main "$@"'))),
    )
    return render_script(parts)


def render_library(scheduler: str) -> str:
    """The text of `lib.sh`: the functions of every job, and those of the scheduler."""
    heading = 'variables that mean something for another job or rank (docs/environment.md), and "!...", which stay'
    arrays = []
    for name, of_ranks in (("of_ranks", True), ("of_jobs", False)):
        patterns = map(quote_shell, list_patterns(of_ranks=of_ranks))
        arrays.append(ScriptLine(wrap_command((f"{name}=(", *patterns, ")"))))
    lists = render_script((ScriptSection(heading, tuple(arrays)),))
    return f"{read_shell('lib')}\n{lists}\n# --- {scheduler}\n\n{read_shell(find_scheduler(scheduler).shell)}"


# --- the parts of the script


def _names(job: Job, scheduler: Scheduler) -> tuple[ScriptLine, ...]:
    to_log = job.log_for_scheduler != str(job.folder.job_log)
    steps = "yes" if job.program.meets_by_itself else "no"
    missing = 'echo "shardway: $here/lib.sh is missing, see line 3 of this script" >&2'
    facts = f"last_attempt={job.chain.max_attempts} scheduler={job.scheduler} token={quote(job.token)}"
    return script_lines(
        (
            f"run={quote(str(job.run))}",
            "the run directory, this attempt, and the one that it goes on from (0000: none)",
        ),
        (f"attempt={job.attempt:04d}", ""),
        (f"after={job.chain.after:04d}", ""),
        (f"{facts} walltime={round(job.terms.walltime_s)}", "the token makes its name unique; seconds"),
        (f"counts_steps={steps}", "whether the program obeys the stop file and says itself how it ended"),
        (f"runtime={job.container.runtime}", "what starts the container of the ranks"),
        ("here=$run/attempts/$attempt", "the folder of this attempt"),
        ("export SHARDWAY_ATTEMPT_DIR=$here SHARDWAY_STOP_FILE=$run/stop", "what the ranks read and write"),
        *_lend(job),
        (to_log and 'exec >> "$here/log/job.out" 2>&1', "what this job prints"),
        (f'[ -r "$here/lib.sh" ] || {{ {missing}; exit 1; }}', ""),
        ('. "$here/lib.sh"', "the functions that every job has"),
        (to_log and _by_function(job, scheduler) and "prints=$here/log/job.out", "for tasks on other nodes"),
    )


def _lend(job: Job) -> tuple[tuple[object, str], ...]:
    shell = job.container.runtime != "none" and f"export {LENT}=$run/cache"
    return ((shell, "prepared data, where the home in the container ends with it"),)


def _begin(job: Job, scheduler: Scheduler) -> tuple[ScriptLine, ...]:
    chained = job.chain.until_done
    warns = job.warn_s > 0 and not scheduler.warns
    clock = f"in_time $((deadline - started - {round(job.warn_s)})) tell_script USR2"
    return script_lines(
        ("begin_attempt", "which job this is; one job alone has an attempt"),
        (chained and "check_chain", "whether the attempt before has left work to do"),
        ("check_stop", "a person may have asked for a stop while it waited"),
        (
            job.follows is not None and f"check_followed {quote(str(job.follows))}",
            "the run before it, which has to be finished",
        ),
        (chained and not job.chain.ahead and "queue_next", "the next attempt, which waits until this job has ended"),
        ("check_nodes", "ranks on no node fail nowhere"),
        ("heed_signals", "signals become the stop file"),
        (warns and clock, "warns this script before the wall-time ends"),
    )


def _around(job: Job) -> tuple[ScriptLine, ...]:
    enter = ScriptLine(_enter_folder(job), "the code that was submitted")
    return (*_set_environment(job), _meet(job), enter)


def _meet(job: Job) -> ScriptLine:
    words = f"meet {quote(job.meeting.host_suffix)} {'yes' if job.meeting.resolve else 'no'}"
    return ScriptLine(words, "where the ranks meet; the site's suffix of names on the network for computing")


def _set_environment(job: Job) -> tuple[ScriptLine, ...]:
    """Modules, Python, variables and secrets: the same lines for the ranks of a job and for a person beside them."""
    around, cores = job.around, job.shape.cores_per_rank
    modules = ("load_modules", *(["--purge"] if around.purge_modules else []), *map(quote, around.modules))
    venv = ""
    if around.venv.startswith("conda:"):
        named = f"conda activate {quote(around.venv.removeprefix('conda:'))}"
        venv = _or_fail(f'eval "$(conda shell.bash hook)" && {named}', named)
    elif around.venv and job.container.runtime == "none":
        activate = f". {quote_place(around.venv + '/bin/activate')}"
        venv = _or_fail(activate, activate)
    expanded = [
        (f"export {name}={quote_expanding(value)}", "variables of the site") for name, value in around.expanded.items()
    ]
    literal = [(f"export {name}={quote(value)}", "variables of the run") for name, value in around.literal.items()]
    return script_lines(
        (len(modules) > 1 and wrap_command(modules), "software of the site"),
        (venv, "Python and its packages"),
        (cores and f"export OMP_NUM_THREADS={cores}", "threads of a rank"),  # PBS sets it to all cores of the node
        ("export PYTHONUNBUFFERED=1", "what a rank prints is seen at once, and not lost with the rank"),
        *expanded,
        *literal,
        (f"read_secrets {quote_expanding(around.secrets_file)}", "passwords and tokens, of a file of yours"),
    )


def _or_fail(command: str, name: str) -> str:
    """A command without which the ranks would find other software than requested."""
    return f"{command} || fail {quote(f'{name} failed, as the lines before say; see site.venv')}"


def _enter_folder(job: Job) -> str:
    """Shell that changes into the working folder; for a script submitted by hand, without a snapshot, into `source`."""
    around = job.around
    workdir, gone = quote(str(around.workdir)), "fail 'there is no folder to run in'"
    if around.code is not None:
        words = (around.code, around.workdir, around.source or "")
        return wrap_command(("enter_work", *(quote(str(word)) for word in words)))
    if around.source is None:
        return f"cd {workdir} || {gone}"
    source = quote(str(around.source))
    instead = f'{{ [ ! -e "$here/order.json" ] && cd {source} && say "no snapshot was made: it runs in" {source}; }}'
    return wrap_command((f"cd {workdir} 2> /dev/null ||", f"{instead} ||", gone))


def _run(job: Job, scheduler: Scheduler, runtime: Container) -> tuple[ScriptLine, ...]:
    own, mpirun, hands_on = job.program.meets_by_itself, job.launcher == "mpirun", scheduler.hands_on_environment
    shielded = scheduler.signals_every_process
    # Ranks in a container, whose image may set the same names, or on nodes that get no environment inherit nothing.
    names = " ".join(name for name in job.variables if name not in job.around.secret_names)
    keep = job.container.runtime != "none" or mpirun or not hands_on
    # What other nodes need to find programs, as shell words; variables that modules set are passed on by name.
    carried = ["PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "CONDA_PREFIX", "ENROOT_DATA_PATH"]
    carried += ['"${loaded[@]}"'] if job.around.modules and not hands_on else []
    carries = not hands_on and (job.one_agent_a_node or job.telemetry_s or runtime.teardown(job, scheduler))
    sampling = ""
    if job.telemetry_s:
        beside = scheduler.beside(job)
        words = (f"{job.telemetry_s:g}", quote(job.python), quote_shell(beside.index), *beside.words)
        sampling = wrap_command(("sample_nodes", *words))
    lines = [
        *script_lines(
            (
                keep and f'declare -p {names} > "$here/environment.sh" 2> /dev/null',
                "variables of the job, for ranks that do not inherit them; no secrets",
            ),
            (carries and f"carried=({' '.join(carried)})", "what other nodes need to find programs"),
        ),
        *runtime.setup(job, scheduler),
    ]
    if mpirun:  # it passes variables to other nodes by name, so that no value appears in the list of processes
        words = (
            "set_up_mpirun",
            quote(job.start.mpirun or "mpirun"),
            str(_SAVING_S),
            *job.around.secret_names,
            *carried,
        )
        purpose = "how long ranks may save after SIGTERM (seconds), and variables that other nodes get"
        lines += [ScriptLine(wrap_command(words), purpose), *scheduler.mpirun_lines(job)]
    doctor = ""
    if job.preflight is not None:
        # Our agent starts only trainings, and a failed doctor is not restarted.
        launcher = "torchrun" if job.launcher in ("agent", "ft_launcher") else job.launcher
        looking = replace(job, program=job.preflight, launcher=launcher, elastic=False)
        prints = "prints=$here/log/doctor.out " if _by_function(job, scheduler) else ""
        doctor = f'{prints}{_command(looking, scheduler, runtime)} > "$here/log/doctor.out" 2>&1'
    found = 'grep -E "(warn|fail) " "$here/log/doctor.out"'
    within = round(2 * job.again.start_s) if own and math.isfinite(job.again.start_s) else 0
    lines += script_lines(
        (doctor, "what the nodes are like; it stops nothing"),
        (doctor and f'! {found} || say "this is what the doctor found; all of it is in $here/log/doctor.out"', ""),
        (sampling, "what the accelerators, cores, memory and network of each node do (run.telemetry)"),
        (
            shielded and "shield",
            "what starts the ranks outlives signals, which this scheduler sends to every process",
        ),
        (f"{_command(job, scheduler, runtime)} &", "the ranks, and how they ended"),
        ("ranks=$!", ""),
        (shielded and "heed_signals", ""),
        # seconds in which rank 0 must report its start
        (within and f'in_time {within} end_without_ranks {within} "$ranks"', "a job without ranks ends"),
        (own and mpirun and f'in_time 0 end_mpirun {_SAVING_S} "$ranks"', "and one whose ranks have left"),
        ('wait_for "$ranks"', "to their end, whatever signals come"),
        # the scheduler has signalled the ranks too
        (shielded and own and f'[ -z "$asked" ] || await_ranks {_LAST_WORD_S}', "they may still save"),
    )
    return tuple(lines)


def _by_function(job: Job, scheduler: Scheduler) -> bool:
    """Whether `on_each_node` starts the ranks, and needs to be given their output files."""
    return job.one_agent_a_node and scheduler.each_node(job).words[:1] == ("on_each_node",)


def _command(job: Job, scheduler: Scheduler, runtime: Container) -> str:
    """The command that starts the program on every rank: launcher, container, environment, program."""
    started = make_plugin("launchers", job.launcher).start(job, scheduler)
    prepared = _list_prepared(job, by_name=job.launcher == "mpirun")
    outside = (*started.outside, *runtime.of_launcher(job, scheduler), *runtime.wrap(job, scheduler))
    return wrap_command((*outside, *prepared, *started.inside))


def _list_prepared(job: Job, *, by_name: bool = False) -> tuple[str, ...]:
    """Words before a command in a container, or where variables come `by_name`: the job's variables are set and, in a
    container, the virtual environment, if it was made with the image's Python."""
    inside = job.container.runtime != "none"
    files = ['"$here/environment.sh"'] if inside or by_name else []
    if inside and job.around.venv and not job.around.venv.startswith("conda:"):
        files.append(quote_place(f"{job.around.venv}/bin/activate"))
    return tuple(word for file in files for word in ("bash", "-c", quote('. "$0" && exec "$@"'), file))
