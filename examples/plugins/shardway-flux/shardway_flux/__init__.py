"""Flux as a scheduler of Shardway: `scheduler = "flux"` in a site profile.

A batch script of Flux runs in an instance of its own, in which `flux run` starts processes; what concerns the job is
asked of the enclosing instance (`flux --parent`, in flux.sh). Shardway itself knows the ranks that `flux run` starts.

Sources: flux-batch(1), flux-run(1), flux-jobs(1) "--json", flux-job(1), flux-cancel(1), flux-environment(7) of
flux-core 0.70; RFC 19 (base 58 of job ids), RFC 21 (states); flux-core#5202 (brokers hand signals on to running tasks).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from functools import reduce
from importlib.resources import files
from types import MappingProxyType
from typing import Any

from shardway.launch.hosts.base import Done
from shardway.launch.job import Job
from shardway.launch.schedulers.base import (
    EachNode,
    JobPhase,
    JobRecord,
    Scheduler,
    SchedulerEnding,
    keep_known,
    parse_job_id,
    read_lines,
    render_options,
)
from shardway.launch.script import ScriptLine, quote

DIGITS = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
F58 = re.compile(rf"^[ƒf]([{DIGITS}]+)\s*$", re.MULTILINE)
PHASES = dict.fromkeys(("NEW", "DEPEND", "PRIORITY", "SCHED"), JobPhase.QUEUED) | {"INACTIVE": JobPhase.ENDED}
ENDINGS = {ending.name: ending for ending in SchedulerEnding} | {"CANCELED": SchedulerEnding.CANCELLED}


class Flux(Scheduler):
    """Flux, as a system instance runs it."""

    name, title = "flux", "Flux"
    by_hand = "make the folder of --output, flux batch THIS_FILE"
    shell = files(__package__) / "flux.sh"
    rules = files(__package__) / "flux.toml"
    launcher_variables = ("FLUX_*", "PMI_*")
    node_variables = ("FLUX_TASK_RANK",)
    gone = r"(?i)inactive|unknown job"
    accelerator_requests = ("gpus-per-slot", "none")
    named_by_keys = MappingProxyType({"queue": "site.queue", "bank": "site.account", "time-limit": "site.walltime"})
    job_variable = "FLUX_JOB_ID"
    client_command = server_command = survey_command = ("flux", "uptime")
    interactive = "flux alloc"
    submit_programs = ("flux batch", "flux submit", "flux alloc")

    def directives(self, job: Job) -> tuple[ScriptLine, ...]:
        """The #flux: lines."""
        terms, shape = job.terms, job.shape
        slots = f"--nodes={shape.nodes} --nslots={shape.nodes} --cores-per-slot={_cores(job)}"
        slots += " --exclusive" if shape.whole_nodes else ""
        gpus = shape.accelerators_per_node if terms.accelerators == "gpus-per-slot" else 0
        options = {
            f"--job-name={job.scheduler_name}": "the run, its attempt, and what makes it unique",
            f"--bank={quote(terms.account)}" if terms.account else "": "who is charged",
            f"--queue={quote(terms.queue)}" if terms.queue else "": "where the job waits",
            f"{slots} --gpus-per-slot={gpus}" if gpus else slots: "nodes: a slot is what is wanted of each",
            f"--time-limit={round(terms.walltime_s)}s": "wall-time of this attempt",
            f"--output={job.log_for_scheduler}": "what it prints",
            **dict.fromkeys(render_options(terms.options), "options of this run or site that Shardway has no name for"),
        }
        return tuple(ScriptLine(f"#flux: {text}", purpose) for text, purpose in options.items() if text)

    def each_node(self, job: Job) -> EachNode:
        """One task on each node, with everything that its slot has."""
        nodes, gpus = job.shape.nodes, job.shape.accelerators_per_node
        words = ["flux run", f"--nodes={nodes}", f"--ntasks={nodes}", f"--cores-per-task={_cores(job)}"]
        return EachNode((*words, *([f"--gpus-per-task={gpus}"] if gpus else [])), "$FLUX_TASK_RANK")

    def submit(self, script: str, log: str, after: str) -> tuple[str, ...]:
        """flux batch."""
        return ("flux", "batch", *([f"--dependency=afterany:{after}"] if after else []), script)

    def read_job_id(self, text: str) -> str:
        """The number that `flux batch` prints in base 58."""
        found = parse_job_id(F58, text)
        return str(reduce(lambda number, digit: 58 * number + DIGITS.index(digit), found, 0)) if found else ""

    def cancel(self, jobs: Sequence[str]) -> tuple[tuple[str, ...], ...]:
        """SIGTERM, which reaches the script as SIGHUP, and later SIGKILL."""
        return tuple(("flux", "cancel", job) for job in jobs)

    def warn(self, jobs: Sequence[str]) -> tuple[tuple[str, ...], ...]:
        """The brokers of a job hand the signal on to its tasks."""
        return tuple(("flux", "job", "kill", "--signal=SIGUSR1", job) for job in jobs)

    def query(self, jobs: Sequence[str]) -> tuple[tuple[str, ...], ...]:
        """One command a job, since several fail together."""
        return tuple(("flux", "jobs", "--json", job) for job in jobs)

    def parse_records(self, jobs: Sequence[str], answers: Sequence[Done]) -> dict[str, JobRecord]:
        """A record of each job for which an answer came."""
        return keep_known({job: _parse(job, done) for job, done in zip(jobs, answers, strict=True)}, answers)

    def find(self, name: str) -> tuple[tuple[str, ...], ...]:
        """Jobs of this name, active or not."""
        return (("flux", "jobs", "-a", "--no-header", "--format={id.dec}", f"--name={name}"),)

    def parse_found(self, answers: Sequence[Done]) -> tuple[str, ...]:
        """One number a line."""
        return tuple(sorted(read_lines(answers[0]), key=int))


def _cores(job: Job) -> int:
    return job.shape.cores_per_node or job.shape.ranks_per_node


def _parse(job: str, done: Done) -> JobRecord | None:
    """What one answer says of its job; None where it says nothing."""
    if not done.ok:
        return JobRecord(job, JobPhase.UNKNOWN) if "unknown" in done.err else None
    table: dict[str, Any] = json.loads(done.out)
    phase, result = PHASES.get(table["state"], JobPhase.RUNNING), table.get("result", "")
    status = table.get("waitstatus")  # as waitpid(2) has it
    exception = table.get("exception", {})
    waits = table.get("annotations", {}).get("sched", {}).get("reason_pending", "")
    ending = ENDINGS.get(result, SchedulerEnding.UNCLEAR) if phase is JobPhase.ENDED else None
    if ending is SchedulerEnding.FAILED and "t_run" not in table:
        ending = SchedulerEnding.NEVER_STARTED
    code = 0 if status is None else os.waitstatus_to_exitcode(status)  # below 0 for a signal
    return JobRecord(
        job,
        phase,
        state=result or table["state"],
        reason=" ".join(filter(None, (exception.get("type"), exception.get("note")))) or waits,
        ending=ending,
        exit_code=code if status is not None and code >= 0 else None,
        signal=max(0, -code),
        started=table.get("t_run"),
        ended=table.get("t_inactive"),
        nodes=table.get("nodelist", ""),
        name=table.get("name", ""),
    )
