"""What a person sits behind: a shell on an allocation of its own (`shardway shell`), and commands on the nodes of a job
that runs (`shardway exec`).

Invariants:
- The environment is made by the lines and functions of job scripts (`launch.job_script`), never by others.
- A refused command changes nothing. A shell writes into a folder of its own, below `shells` of the run directory.
- `exec` writes nothing into a run, and ends nothing of it.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from shardway.errors import SiteError, UserError
from shardway.launch.hosts.base import Host
from shardway.launch.job import Job
from shardway.launch.job_script import render_bashrc, render_library, render_shell_script
from shardway.launch.runs.job_status import Ledger, LedgerEntry, read_ledger, read_standing
from shardway.launch.schedulers.base import find_scheduler
from shardway.launch.submission.budget import check_budget, estimate_cost, render_hours
from shardway.launch.submission.prepare import Prepared, SubmitRequest, load_request, prepare
from shardway.launch.submission.submit import bring_snapshot
from shardway.places import expand_place
from shardway.rundir.attempts import Attempt
from shardway.rundir.directory import FOLDER_MODE, RunDir
from shardway.sites.schema import CPU
from shardway.units import render_seconds

USUAL_WALLTIME_S = 3600.0
"""Wall-time of a shell where none is named, or the queue's limit where that is shorter."""

# --- a shell on an allocation of its own


@dataclass(frozen=True)
class ShellOptions:
    """What the shell is to have. `gpus`: of each node; None for one, where the site has any. `walltime`: "" for an
    hour, or the queue's limit where that is shorter."""

    nodes: int = 1
    gpus: int | None = None
    walltime: str = ""


@dataclass(frozen=True)
class ShellPlan:
    """A shell that is checked and not begun: its folder on the host, the files of that, and the words that start it."""

    prepared: Prepared
    folder: Path
    files: dict[Path, str]
    words: tuple[str, ...]

    @property
    def job(self) -> Job:
        return self.prepared.job

    @property
    def script(self) -> Path:
        """The script that makes the environment."""
        return self.folder / "shell.sh"


def plan_shell(
    request: SubmitRequest, host: Host, options: ShellOptions, *, terminal: bool, agreed: bool = False
) -> ShellPlan:
    """A shell with what the request's ranks would find. Raises UserError for what is refused, also by the budget unless
    the person has `agreed`, SiteError where the scheduler has no way to open one."""
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(2).hex()}"
    request = replace(request, command=(), serve=None, follows=None, until_done=False, max_attempts=0, shell=name)
    keys = (*request.run_request.overrides, *_list_keys(request, options))
    prepared = prepare(replace(request, run_request=replace(request.run_request, overrides=keys)), host)
    job = replace(prepared.job, warn_s=0.0, telemetry_s=0.0, preflight=None)
    prepared = replace(prepared, job=job)
    check_budget([estimate_cost(prepared)], agreed=agreed)
    scheduler, folder = find_scheduler(job.scheduler), RunDir(job.run).shells_folder / name
    plan = ShellPlan(prepared, folder, {}, ())
    words = scheduler.open_shell(job, str(plan.script), terminal=terminal)
    if words is None:
        raise SiteError(
            f"{scheduler.title} on {job.site} has no way to open a shell that Shardway knows.\n"
            "  To do: submit a command (`shardway submit ... -- COMMAND`), or ask the site for its own way."
        )
    if scheduler.shell_needs_terminal and not terminal:
        raise UserError(
            f"{scheduler.title} opens a shell at a terminal alone, and the input or output of this command is none.\n"
            "  To do: type it at a terminal, or submit what the shell would run: `shardway submit ... -- bash FILE`."
        )
    files = {
        plan.script: render_shell_script(job, folder),
        folder / "lib.sh": render_library(job.scheduler),
        folder / "bashrc": render_bashrc(job, folder),
    }
    return replace(plan, files=files, words=words)


def _list_keys(request: SubmitRequest, options: ShellOptions) -> list[str]:
    """What differs from the run: nodes, GPUs and wall-time of a person's own, and no launcher, which nothing needs."""
    loaded, profile = load_request(request)
    keys = [f"site.nodes={options.nodes}", 'site.launcher="auto"', "site.preflight=false"]
    accelerators = 0 if profile.node.accelerator == CPU else profile.node.accelerators_per_node
    if options.gpus is not None and not accelerators:
        known = "has no GPUs" if accelerators == 0 else "states no GPUs, so none can be asked for"
        raise UserError(
            f"--gpus {options.gpus}: the profile of {profile.name} {known}.\n"
            "  To do: leave it out, or name a site with GPUs (`shardway sites list`; `shardway sites probe` makes a "
            "profile)."
        )
    if options.gpus is not None and accelerators and options.gpus > accelerators:
        raise UserError(
            f"--gpus {options.gpus}: a node of {profile.name} has {accelerators}.\n"
            f"  Allowed: 1 to {accelerators} of each node; --nodes says of how many nodes."
        )
    if accelerators:
        keys.append(f"site.ranks_per_node={options.gpus or 1}")
    if options.walltime:
        return [*keys, f'site.walltime="{options.walltime}"']
    name = loaded.values.site.queue
    queue = next((each for each in profile.queues if not name or each.name == name), None)
    most = queue.max_walltime if queue is not None else None
    return [*keys, f'site.walltime="{min(USUAL_WALLTIME_S, most or USUAL_WALLTIME_S):g}s"']


def write_shell(plan: ShellPlan, host: Host) -> None:
    """Write the folder of a shell, with its copy of the code. Raises UserError where the file system refuses."""
    run = plan.job.run
    made = host.run(("mkdir", "-p", "-m", f"{FOLDER_MODE:o}", str(run)))
    if not made.ok:
        raise UserError(
            f"{run} cannot be made: {made.err.strip()}\n  To do: name another run directory (--dir, run.root)."
        )
    host.write_files({PurePosixPath(path): text for path, text in plan.files.items()})
    if plan.prepared.snapshot is not None:
        bring_snapshot(host, plan.prepared.snapshot, Attempt(plan.folder))


def describe_shell(plan: ShellPlan) -> list[str]:
    """What is asked for, and where the shell works, in lines."""
    job, shape = plan.job, plan.job.shape
    asked = [f"{shape.nodes} node{'s' if shape.nodes > 1 else ''}"]
    if shape.accelerators_per_node:
        asked.append(f"{shape.accelerators_per_node} GPU{'s' if shape.accelerators_per_node > 1 else ''} of each")
    if not find_scheduler(job.scheduler).this_machine:
        asked.append(render_seconds(job.terms.walltime_s))
        asked.append(f"at most {render_hours((cost := estimate_cost(plan.prepared)).most)} {cost.unit}")
    container = f", in {job.container.runtime} {job.container.image}" if job.container.runtime != "none" else ""
    return [f"a shell on {job.site}: {', '.join(asked)}{container}", f"it works in {job.around.workdir}"]


def find_work(host: Host, ledger: Ledger) -> Path | None:
    """The folder in which the newest attempt of a run works, on its host; None where that is not known or not there."""
    for entry in reversed(ledger.entries):
        if entry.submission is not None and (known := entry.submission.workdir):
            return Path(known) if host.run(("test", "-d", known)).ok else None
    return None


# --- commands on the nodes of a job that runs


@dataclass(frozen=True)
class NodeCommand:
    """A command for one node (its name), and the words that run it there, on the run's host."""

    node: str
    words: tuple[str, ...]


@dataclass(frozen=True)
class ExecTarget:
    """Which nodes: one by its name or its number from 0 on, that of a rank, or every one; the first where nothing is
    said."""

    node: str = ""
    rank: int | None = None
    every: bool = False


def plan_exec(
    host: Host, run: Path, target: ExecTarget, command: Sequence[str], *, terminal: bool
) -> tuple[NodeCommand, ...]:
    """The commands for the nodes of a run's job. Raises UserError where no job of it runs, or has no such node."""
    ledger = read_ledger(host, run)
    entry = _find_running(host, ledger)
    scheduler = find_scheduler(entry.submission.scheduler if entry.submission else "")
    script = _find_script(host, ledger, entry)
    if not scheduler.reaches_nodes:
        raise SiteError(f"{scheduler.title} has no way to the nodes of a job that Shardway knows.")
    nodes = entry.started.nodes.split() if entry.started else []
    folder, rank = str(entry.attempt.path), "" if target.rank is None else str(target.rank)
    pty = "yes" if terminal and not target.every else ""
    commands = []
    for node in nodes if target.every else [_choose_node(target, nodes, ledger)]:
        words = ("bash", str(script), folder, entry.job, node, rank, pty, *command)
        commands.append(NodeCommand(node, words))
    return tuple(commands)


def _find_running(host: Host, ledger: Ledger) -> LedgerEntry:
    run, standings = ledger.run.path, read_standing(host, ledger)
    running = [standing.entry for standing in standings if standing.is_active and standing.word == "running"]
    if running and running[-1].started is not None:
        return running[-1]
    todo = "shardway status says more; `shardway shell` opens a shell on an allocation of its own"
    if not standings:
        by_hand = None if host.name else ledger.run.find_writer(by_hand=True)
        what = f"is trained by hand, by {by_hand}, and has no job" if by_hand else "has no job"
        raise UserError(f"{run} {what}, so there is none to run a command in.\n  To do: {todo}.")
    last = next((each for each in reversed(standings) if each.is_active), standings[-1])
    silence = f" ({last.silence})" if last.silence else ""
    state = "has only just started" if running else f"is {last.word}{silence}"
    raise UserError(
        f"{run} has no job that runs: attempt {last.entry.number} (job {last.entry.job or 'none'}) {state}.\n"
        f"  To do: {todo}."
    )


def _find_script(host: Host, ledger: Ledger, entry: LedgerEntry) -> Path:
    """`enter.sh` of the attempt, or of the last one before it that Shardway submitted: the links that jobs submit in
    between are like it."""
    paths = [each.attempt.enter_script for each in ledger.entries if each.number <= entry.number]
    done = host.run(("find", *map(str, paths), "-maxdepth", "0"))
    found = [path for path in paths if str(path) in done.out.splitlines()]
    if not found:
        raise UserError(
            f"attempt {entry.number} of {ledger.run.path} has no enter.sh: it was submitted by hand, or by a Shardway "
            "before 0.2.\n  To do: resume it once with this version (`shardway resume`); its next job has one."
        )
    return found[-1]


def _choose_node(target: ExecTarget, nodes: Sequence[str], ledger: Ledger) -> str:
    """The node's name; "-" where the script finds it by the rank."""
    if target.rank is not None:
        return "-"
    if not nodes:
        raise SiteError(f"the job of {ledger.run.path} has not written which nodes it has.")
    if not target.node:
        return nodes[0]
    if re.fullmatch(r"\d+", target.node) and target.node not in nodes:
        if int(target.node) < len(nodes):
            return nodes[int(target.node)]
    else:
        for node in nodes:
            if target.node in (node, node.partition(".")[0]) or target.node.partition(".")[0] == node:
                return node
    shown = ", ".join(f"{number} ({node})" for number, node in enumerate(nodes[:8])) + (", ..." if nodes[8:] else "")
    raise UserError(f"--node {target.node}: the job has no such node.\n  Allowed: {shown}.")


def find_existing(path: str) -> bool:
    """Whether a word names a file here, so that it is a run file and no run."""
    return os.path.isfile(expand_place(path))
