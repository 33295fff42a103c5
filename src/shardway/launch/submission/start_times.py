"""When a job would start in each queue of a site, as far as its scheduler says (`shardway submit --when`, `--soonest`).

Invariants:
- Nothing is submitted and nothing is written.
- A time is what the scheduler has answered, never an estimate of ours; where it gives none, the reason is a sentence.
- The job that a queue is asked about is the one that would be submitted to it, with the limits of that queue.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from shardway.errors import Problem, SiteError, UserError, list_some
from shardway.launch.hosts.base import Host
from shardway.launch.job import Job
from shardway.launch.schedulers.base import QueueState, RequestedResources, describe_silence, find_scheduler
from shardway.launch.submission.prepare import SubmitRequest, load_request, prepare
from shardway.sites.schema import Queue
from shardway.units import render_seconds

KEY = "site.queue"


@dataclass(frozen=True)
class QueueStart:
    """A queue, and when a job would start there.

    `start`: Unix seconds; None where the queue does not take the job (`problems`, or `refusal` in the scheduler's
    words) or the scheduler gives no time (`unknown`: why). `limits`: those of the profile, for a person.
    """

    queue: str
    limits: str = ""
    start: float | None = None
    problems: tuple[Problem, ...] = ()
    refusal: str = ""
    unknown: str = ""

    @property
    def key(self) -> str:
        """What chooses it, on the command line."""
        return f"{KEY}={self.queue}" if self.queue else ""

    @property
    def words(self) -> str:
        """When, in words: "now", "in 12min (14:05)", "refused", "cannot be known"."""
        if self.start is None:
            return "cannot be known" if self.unknown else "refused"
        wait_s = self.start - time.time()
        if wait_s < 60:
            return "now"
        at = time.localtime(self.start)
        form = "%H:%M" if at[:3] == time.localtime()[:3] else "%a %d %b %H:%M"
        return f"in {render_seconds(60 * round(wait_s / 60))} ({time.strftime(form, at)})"

    def list_reasons(self) -> list[str]:
        """Why there is no time, with the key that changes it, a line each."""
        said = [text for text in (self.refusal, self.unknown) if text]
        for problem in self.problems:
            allowed = f"; allowed: {problem.allowed}" if problem.allowed else ""
            remedy = f"; to do: {problem.remedy}" if problem.remedy else ""
            said.append(f"{problem.where}: {problem.what}{allowed}{remedy}")
        return said

    def as_json(self) -> dict[str, Any]:
        """Plain data; `start` in Unix seconds."""
        return {"queue": self.queue, "start": self.start, "limits": self.limits, "reasons": self.list_reasons()}


def list_starts(request: SubmitRequest, host: Host) -> list[QueueStart]:
    """The queues of the site, the soonest first, then those of which nothing is known, then those that refuse the job.

    Raises UserError for a queue that the request itself names and that it is to be chosen from, and for what is wrong
    with the request in every queue.
    """
    loaded, profile = load_request(request)
    scheduler = find_scheduler(profile.scheduler)
    states: dict[str, QueueState] = {}
    if scheduler.queues_command:
        done = host.run(scheduler.queues_command)
        if not done.ok and not profile.queues:
            raise SiteError(f"{profile.name} does not say which queues it has: {describe_silence(done)}.")
        states = {state.name: state for state in scheduler.parse_queues(done.out)} if done.ok else {}
    if profile.queues:
        rows = [_ask(request, host, queue.name, _describe_limits(queue), states) for queue in profile.queues]
    else:
        names = [*states] or [loaded.values.site.queue]
        rows = [_ask(request, host, name, "", states) for name in names]
    found = rows[0].problems
    if found and all(row.problems == found for row in rows):
        prepare(request, host)  # what is wrong everywhere is no matter of queues: its own message
    return sorted(rows, key=lambda row: (row.start is None, row.start or 0.0, not row.unknown))


def choose_soonest(rows: list[QueueStart]) -> QueueStart:
    """The queue that starts a job first. Raises UserError where none takes it, SiteError where that is not known."""
    if rows and rows[0].start is not None:
        return rows[0]
    reasons = "".join(f"\n    {row.queue or 'the queue'}: {line}" for row in rows for line in row.list_reasons())
    if any(row.unknown for row in rows):
        raise SiteError(
            f"--soonest: which queue starts the job first cannot be known.{reasons}\n"
            f"  Nothing was submitted. To do: choose one: {KEY}=NAME."
        )
    raise UserError(f"--soonest: no queue takes the job.{reasons}\n  Nothing was submitted.")


def with_queue(request: SubmitRequest, name: str) -> SubmitRequest:
    """The same request for this queue."""
    if not name:
        return request
    overrides = [word for word in request.run_request.overrides if word.partition("=")[0].strip() != KEY]
    run_request = replace(request.run_request, overrides=(*overrides, f"{KEY}={name}"))
    return replace(request, run_request=run_request)


def _ask(request: SubmitRequest, host: Host, name: str, limits: str, states: Mapping[str, QueueState]) -> QueueStart:
    row = QueueStart(name, limits)
    try:
        prepared = prepare(with_queue(request, name), host)
    except UserError as error:
        problems = tuple(error.problems) or (Problem(KEY, str(error).splitlines()[0]),)
        return replace(row, problems=problems)
    scheduler, terms = prepared.request.scheduler, prepared.job.terms
    if scheduler.this_machine:
        return replace(row, start=time.time())
    state = states.get(terms.partition or name)
    if states and state is None:
        return replace(row, refusal=f"{scheduler.title} knows no {terms.partition or name}")
    if state is not None:
        if state.closed:
            return replace(row, refusal=state.closed)
        if problems := tuple(_list_problems(state, prepared.job)):
            return replace(row, problems=problems)
    if not scheduler.start_command:
        return replace(row, unknown=scheduler.why_no_start)
    done = host.run(scheduler.start_command, stdin=prepared.script, timeout_s=60)
    start = scheduler.read_start(done)
    if start is not None:
        return replace(row, start=start)
    if done.timed_out or done.code == 127:
        return replace(row, unknown=describe_silence(done))
    asked = RequestedResources(
        queue=terms.partition, account=terms.account, qos=terms.qos, walltime_s=terms.walltime_s, host=host.name
    )
    found = scheduler.explain_refusal(done, asked)
    remedy = "" if re.search(r"dry-run|support", found.remedy) else f"; to do: {found.remedy}"
    return replace(row, refusal=f"{found.sentence.rstrip('.')}{remedy}")


def _list_problems(state: QueueState, job: Job) -> Iterator[Problem]:
    """What a queue as it is now does not take of a job, which would wait in it for ever."""
    terms, nodes, most = job.terms, job.shape.nodes, state.max_walltime_s
    if most is not None and terms.walltime_s > most:
        limit = render_seconds(most)
        yield Problem("site.walltime", f"{render_seconds(terms.walltime_s)} is longer than it allows", allowed=limit)
    largest = min((count for count in (state.max_nodes, state.nodes) if count), default=None)
    if largest is not None and nodes > largest:
        yield Problem("site.nodes", f"{nodes} nodes are more than it has for a job", allowed=f"at most {largest}")
    if state.min_nodes is not None and nodes < state.min_nodes:
        yield Problem("site.nodes", f"{nodes} nodes are fewer than it takes", allowed=f"at least {state.min_nodes}")
    if state.accounts and terms.account not in state.accounts:
        what = f'"{terms.account}" may not use it' if terms.account else "it is for some accounts alone"
        yield Problem("site.account", what, allowed=list_some(state.accounts, 4))


def _describe_limits(queue: Queue) -> str:
    parts = [render_seconds(queue.max_walltime)] if queue.max_walltime else []
    if queue.min_nodes or queue.max_nodes:
        fewest, most = queue.min_nodes or 1, queue.max_nodes
        parts.append(f"{fewest} to {most} nodes" if most else f"{fewest} nodes or more")
    return ", ".join(parts)
