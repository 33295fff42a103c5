"""What a run directory holds, as data: `shardway.Run("runs/my").steps` and its neighbours.

Invariants:
- It only reads, and a run may be writing meanwhile; each attribute is read anew when it is asked for.
- Without torch. What a run has not recorded is an empty table or None, never an error.
- Tables are of one form for all of a run: pandas where installed, else polars, else a dictionary of columns.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardway.api.frames import Columns, choose_form, make_frame, make_table
from shardway.errors import UserError
from shardway.launch.runs.find import find_known
from shardway.rundir.directory import RunDir

if TYPE_CHECKING:
    from shardway.launch.runs.job_status import JobStatus
    from shardway.rundir.events import Event
    from shardway.watch.progress import RunSummary
    from shardway.watch.report.content import ReportContent

_FIRST = ("step", "time")
_OF_STEPS = ("step", "loss", "lr", "grad_norm", "tokens_per_s", "samples_per_s", "seconds", "time")


class Run:
    """A run by its directory, a path in it, its name, or the id of one of its jobs, as for `shardway status`.

    `frames`: "pandas", "polars" or "columns"; by default the first of them that is installed. Raises UserError where
    that is no run, or one of another host."""

    def __init__(self, run: str | os.PathLike[str], *, frames: str = "") -> None:
        known = find_known(os.fspath(run))
        if known.host:
            raise UserError(
                f"{known.run} is on another host, {known.host}, and its files are read here.\n"
                f"  To do: copy it (`rsync -a {known.host}:{known.run} .`), or do this on that host."
            )
        self._form = choose_form(frames)
        self.directory = RunDir(Path(known.run))
        self.directory.check_format()

    @property
    def path(self) -> Path:
        """The run directory."""
        return self.directory.path

    @property
    def name(self) -> str:
        """Its name."""
        return self.path.resolve().name

    # --- tables

    @property
    def steps(self) -> Any:
        """A row each step that counts, undone ones left out: step, loss, lr, grad_norm, tokens_per_s, samples_per_s,
        seconds (of the step), time (Unix seconds)."""
        events = (event for event in self.directory.events(0) if event["event"] == "step")
        return self._table(events, _OF_STEPS)

    @property
    def validations(self) -> Any:
        """A row each validation: step, time and its metrics."""
        return self._table((event for event in self.directory.events(0) if event["event"] == "validation"), _FIRST)

    @property
    def logged(self) -> Any:
        """A row each step with values that the script logged: step, time and the values by their names."""
        events = (event for event in self.directory.events(0) if event["event"] == "logged")
        rows = ({"step": e.get("step"), "time": e.get("time"), **_as_table(e.get("values"))} for e in events)
        return make_table(rows, self._form, _FIRST)

    @property
    def checkpoints(self) -> Any:
        """A row each checkpoint that is there: step, path, time (when it was saved), bytes, seconds (of the save), and
        the loss of the validation of that step."""
        events = self.directory.events(0)
        saved = {event.get("step"): event for event in events if event["event"] == "saved"}
        losses = {event.get("step"): event.get("loss") for event in events if event["event"] == "validation"}
        rows = []
        for step in self.directory.checkpoint_steps():
            save = saved.get(step, {})
            facts = {name: save.get(name) for name in ("time", "bytes", "seconds")}
            path = str(self.directory.checkpoint_path(step))
            rows.append({"step": step, "path": path, **facts, "validation_loss": losses.get(step)})
        return make_table(rows, self._form, ("step", "path", "time", "bytes", "seconds", "validation_loss"))

    @property
    def events(self) -> Any:
        """A row each event of every rank, as written, undone steps included: rank, time, event, step, and under `facts`
        all else that it states."""
        rows = [
            {
                "rank": rank,
                "time": event.get("time"),
                "event": event["event"],
                "step": event.get("step"),
                "facts": {name: v for name, v in event.items() if name not in ("event", "time", "step")},
            }
            for rank in self.directory.ranks_with_events()
            for event in self.directory.all_events(rank)
        ]
        return make_table(rows, self._form, ("rank", "time", "event", "step", "facts"))

    @property
    def telemetry(self) -> Any:
        """A row each sample of each host: time (Unix seconds), host, and the series of that host by name
        ("gpu/0/use_percent")."""
        from shardway.telemetry.store import read_telemetry

        hosts = [host for host in read_telemetry(self.directory.telemetry_folder) if len(host.times)]
        columns = Columns({"time": [], "host": []})
        for name in dict.fromkeys(name for host in hosts for name in host.series):
            columns[name] = []
        for host in hosts:
            count = len(host.times)
            columns["time"] += host.times.tolist()
            columns["host"] += [host.host] * count
            for name in columns.keys() - {"time", "host"}:
                columns[name] += host.series[name].tolist() if name in host.series else [None] * count
        return make_frame(columns, self._form)

    @property
    def attempts(self) -> Any:
        """A row each attempt that was submitted: attempt, state, job, nodes, started, ended, step, reason and what else
        `shardway status --json` states of it. Attempts that have not ended are asked for at their scheduler."""
        from shardway.launch.runs.job_status import attempts_as_json

        return make_table(attempts_as_json(self._read_statuses()), self._form, ("attempt", "state", "job"))

    @property
    def evaluations(self) -> Any:
        """A row each result of `shardway evaluate`: step, time, kind, data, and its numbers by name."""
        from shardway.watch.facts import read_evaluation

        rows = []
        for content in self.directory.read_evaluations():
            found = read_evaluation(content)
            sizes = {"samples": found.samples, "questions": found.questions}
            errors = {f"{name}_error": value for name, value in found.errors.items()}
            head = {"step": found.step, "time": found.time, "kind": found.kind, "data": found.data}
            rows.append({**head, **found.results, **errors, **sizes})
        return make_table(rows, self._form, ("step", "time", "kind", "data"))

    # --- facts

    @property
    def config(self) -> dict[str, dict[str, Any]]:
        """The resolved run by section: `run.config["optim"]["lr"]`; empty where it has not begun."""
        resolved = self.directory.read_resolved()
        return {name: section for name, section in resolved.items() if isinstance(section, dict)}

    @property
    def plan(self) -> dict[str, Any] | None:
        """Seconds of a step and MFU as planned, beside what was measured; None where there is no plan for its machine
        or not enough was measured."""
        found = self._gather().predicted
        return found.as_json() if found is not None else None

    @property
    def report(self) -> dict[str, Any]:
        """What `shardway report --json` has."""
        return self._gather().as_json()

    @property
    def status(self) -> dict[str, Any]:
        """What `shardway status --json` has of its progress: state, step, loss, speed, seconds left, ..."""
        summary, jobs = self._summarise(), self._read_statuses()
        facts = summary.as_json()
        if summary.state == "new" and jobs:  # a foreign command, or a job that has not begun
            facts["state"] = jobs[-1].word
        return facts

    @property
    def state(self) -> str:
        """In one word, as `shardway status` has it."""
        return str(self.status["state"])

    def logs(self, rank: int | None = None) -> str:
        """What the newest attempt printed, of its job or of one rank; "" where nothing is kept."""
        attempts = self.directory.attempts()
        of_job = rank is None and attempts
        paths = [attempts[-1].job_log] if of_job else self.directory.rank_output(rank or 0)
        texts = []
        for path in paths:
            try:
                texts.append(path.read_text(encoding="utf-8", errors="replace"))
            except OSError:
                continue
        return "".join(texts)

    # --- how it is shown

    def __repr__(self) -> str:
        return f'<Run "{self.path}">'

    def _repr_html_(self) -> str:
        from shardway.api.display import render_run

        return render_run(self)

    def watch(self, interval_s: float = 2.0) -> None:
        """Show how it stands until it has ended: as a widget or a cell that is redrawn in a notebook, as lines
        elsewhere."""
        from shardway.api.display import watch

        watch(self, interval_s)

    # --- reading

    def _table(self, events: Iterable[Event], first: tuple[str, ...]) -> Any:
        hidden = ("event", "spent")
        rows = ({name: value for name, value in event.items() if name not in hidden} for event in events)
        return make_table(rows, self._form, first)

    def _gather(self) -> ReportContent:
        from shardway.watch.report.content import gather

        return gather(self.directory)

    def _summarise(self) -> RunSummary:
        from shardway.watch.progress import summarise

        return summarise(self.directory)

    def _read_statuses(self) -> list[JobStatus]:
        from shardway.launch.hosts.local import LocalHost
        from shardway.launch.runs.job_status import read_ledger, read_standing

        host = LocalHost()
        return read_standing(host, read_ledger(host, self.path))


def _as_table(values: Any) -> dict[str, Any]:
    return values if isinstance(values, dict) else {}
