"""The doctor's examination: each rank looks at itself, rank 0 collects the reports and runs tests across the ranks.

Invariants:
- What needs the data or the model's files is None without them; nothing raises for that.
- The examination ends within its limits and never raises for what it finds; if ranks do not meet, each of them reports
  what it tried.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from shardway.errors import ShardwayError
from shardway.ranks.doctor import world_verdicts
from shardway.ranks.doctor.cluster import find_existing
from shardway.ranks.doctor.connectivity_check import (
    Answer,
    CheckPortTaken,
    ConnectivityCheck,
    MeetingPoint,
    attend,
    find_point,
)
from shardway.ranks.doctor.finding import CheckResult, CheckVerdict, Report, parse_finding, run_checks, unknown
from shardway.ranks.doctor.surroundings import MachineNeeds, MachineView
from shardway.ranks.doctor.table import CHECKS
from shardway.ranks.doctor.torch_probe import Task, measure
from shardway.resolve.request import Resolution
from shardway.runfile.schema import RunFile

# --- the run's needs


def read_wanted(resolution: Resolution) -> MachineNeeds:
    """The needs of a resolved run."""
    values = resolution.resolved.values
    site = values.site
    container = site.container if site.container not in ("auto", "none") else "container" if site.image else ""
    return MachineNeeds(
        folder=resolution.directory.path,
        checkpoint_bytes=estimate_checkpoint(values, resolution),
        keep=values.checkpoint.keep + values.checkpoint.keep_best + count_kept_for_ever(values),
        device=values.run.device,
        account=site.account,
        uses_hub=bool(values.model.hf and not Path(values.model.hf).exists()),
        container=container,
    )


def count_kept_for_ever(values: RunFile) -> int:
    """Checkpoints that `checkpoint.keep_every` adds up to; 0 where that depends on the data."""
    every, steps = values.checkpoint.keep_every, values.train.steps
    if every == "off" or every.unit != steps.unit:
        return 0
    return int(steps.amount // every.amount)


def estimate_checkpoint(values: RunFile, resolution: Resolution) -> float | None:
    """Bytes of one checkpoint: weights and optimizer states of the whole model; None where unknown."""
    from shardway.plan.memory import OPTIMIZER_BYTES
    from shardway.resolve.planned import shape_of_run

    try:
        shape = shape_of_run(values, resolution.resolved.circumstances.shape)
    except ShardwayError:
        return None
    weights = 2 if values.precision.weights == "bf16" else 4
    return float(shape.parameters) * (weights + OPTIMIZER_BYTES.get(values.optim.name, 8.0))


# --- the examination

SEEN_WITHIN_S = 5.0
_PROBE_S = 100.0
_START_S = 30.0
_SUM_BYTES, _DEEP_SUM_BYTES = 4 * 2**20, 64 * 2**20


@dataclass(frozen=True)
class Diagnosis:
    """The result of the examination. `speaks`: this rank has something to report; others leave that to rank 0."""

    reports: tuple[Report, ...]
    together: tuple[CheckResult, ...] = ()
    missing: tuple[int, ...] = ()
    speaks: bool = True


def examine(around: MachineView, *, quick: bool = False, wait_s: float = 60.0) -> Diagnosis:
    """Look at this machine and, where there are several ranks, at all of them together.

    `quick`: the checks of a preflight, and the meeting, but no torch. `wait_s`: how long ranks wait for each other.
    """
    own = Report(around.rank, around.host, tuple(run_checks(CHECKS, around, quick=quick)))
    if around.placement is None or around.world == 1:
        return Diagnosis((own,), () if quick else tuple(_probe_alone(around)))
    point = find_point(around.placement, around.job)
    if around.rank:
        return _follow(around, own, point, wait_s)
    return _Visit(around, own, ConnectivityCheck(point, around.world)).lead(wait_s, quick=quick)


def _follow(around: MachineView, own: Report, point: MeetingPoint, wait_s: float) -> Diagnosis:
    """The part of every rank but 0."""
    hello = {"rank": own.rank, "host": own.host, "findings": [finding.as_json() for finding in own.findings]}
    attended = attend(point, hello, _answer, wait_s)
    verdict = world_verdicts.judge_attendance(around, attended, point, wait_s)
    told = replace(verdict, check="world.meeting")
    return Diagnosis((own,), (told,), speaks=verdict.verdict is not CheckVerdict.OK)


def _answer(question: Answer) -> Answer:
    """Carry out a request of rank 0."""
    match question.get("ask"):
        case "look":
            return {"after": _look_for(Path(question["path"]), question["token"], question["limit_s"])}
        case "measure":
            return measure(Task(**question["task"]), _PROBE_S)
    return {}


def _look_for(path: Path, token: str, limit_s: float) -> float | None:
    """Seconds until the file had the expected content; None for never."""
    start = time.monotonic()
    while (after := time.monotonic() - start) <= limit_s:
        with contextlib.suppress(OSError, UnicodeDecodeError):
            if path.read_text(encoding="utf-8") == token:
                return after
        time.sleep(0.05)
    return None


def _probe_alone(around: MachineView) -> list[CheckResult]:
    """torch on one rank: if there is a device to test, or on request."""
    device = "cuda" if around.devices and around.wanted.device != "cpu" else "cpu"
    if not around.in_job or (device == "cpu" and not around.deep):
        return []
    found = {0: measure(Task(device, 0, _START_S, around.deep), _PROBE_S)}
    return _judge_probes(around, found, {0: around.host}, device)


def _judge_probes(
    around: MachineView, probes: dict[int, dict[str, Any]], hosts: dict[int, str], device: str
) -> list[CheckResult]:
    verdicts = {
        "torch.start": world_verdicts.judge_start(probes, hosts),
        "torch.import": world_verdicts.judge_import(probes, hosts),
    }
    if around.world > 1:
        verdicts["torch.allreduce"] = world_verdicts.judge_sum(probes, device)
    if around.deep:
        verdicts["torch.peers"] = world_verdicts.judge_peers(probes, hosts)
        verdicts["torch.matmul"] = world_verdicts.judge_matmul(probes, hosts)
    return [replace(verdict, check=name) for name, verdict in verdicts.items()]


class _Visit:
    """Rank 0's part."""

    def __init__(self, around: MachineView, own: Report, call: ConnectivityCheck) -> None:
        self._around, self._own, self._call = around, own, call
        self._found: list[CheckResult] = []

    def lead(self, wait_s: float, *, quick: bool) -> Diagnosis:
        """Gather the ranks, compare them, and release them."""
        call, point = self._call, self._call.point
        try:
            call.gather(wait_s)
        except CheckPortTaken as error:
            self._add("world.port", world_verdicts.judge_port(point, str(error)))
            self._add("world.meeting", unknown("not tried, since rank 0 cannot listen"))
            return Diagnosis((self._own,), tuple(self._found), tuple(call.missing))
        missing = tuple(call.missing)
        try:
            reports = self._compare(missing, wait_s)
            if not quick:
                self._try_torch(reports, missing)
        finally:
            call.end()
        return Diagnosis(tuple(reports), tuple(self._found), missing)

    def _add(self, name: str, finding: CheckResult) -> None:
        self._found.append(replace(finding, check=name))

    def _compare(self, missing: Sequence[int], wait_s: float) -> list[Report]:
        call, point = self._call, self._call.point
        reports = [self._own, *(_parse_report(rank, call.reports[rank]) for rank in sorted(call.reports))]
        self._add("world.port", world_verdicts.judge_port(point, ""))
        self._add("world.meeting", world_verdicts.judge_meeting(self._around, reports, missing, point, wait_s))
        self._add("world.nodes", world_verdicts.judge_nodes(reports))
        self._add("world.versions", world_verdicts.judge_versions(reports))
        self._add("world.master", world_verdicts.judge_master(reports))
        others = self._first_of_others(reports)
        clocks = call.compare_clocks(others)
        self._add("world.clock", world_verdicts.judge_clocks({others[rank]: clock for rank, clock in clocks.items()}))
        self._add("world.visible", self._show_file(others))
        return reports

    def _first_of_others(self, reports: Sequence[Report]) -> dict[int, str]:
        """One rank of each node but ours -> its host."""
        first: dict[str, int] = {}
        for report in reports:
            first.setdefault(report.host, report.rank)
        return {rank: host for host, rank in first.items() if host != self._own.host}

    def _show_file(self, others: dict[int, str]) -> CheckResult:
        """Write a file in the run's folder, and ask each other node for it."""
        if self._around.wanted.folder is None:
            return unknown("no run file or --dir says where the run writes")
        folder, token = find_existing(self._around.wanted.folder), uuid.uuid4().hex
        path = folder / f".doctor-seen-{token}"
        try:
            path.write_text(token, encoding="utf-8")
        except OSError as error:
            return unknown(f"the first node cannot write to {folder}: {error.strerror}")
        question = {"ask": "look", "path": str(path), "token": token, "limit_s": SEEN_WITHIN_S}
        try:
            answers = self._call.ask(dict.fromkeys(others, question), SEEN_WITHIN_S + 5.0)
        finally:
            with contextlib.suppress(OSError):
                path.unlink()
        seen = {host: answers.get(rank, {}).get("after") for rank, host in others.items()}
        return world_verdicts.judge_visible(str(folder), seen, SEEN_WITHIN_S)

    def _try_torch(self, reports: Sequence[Report], missing: Sequence[int]) -> None:
        """Let all ranks start torch at once."""
        if missing:
            self._add("torch.start", unknown("not tried, since ranks are missing"))
            return
        device = self._choose_device(reports)
        size = _DEEP_SUM_BYTES if self._around.deep else _SUM_BYTES
        task = Task(device, size, _START_S, self._around.deep)
        probes: dict[int, dict[str, Any]] = {}
        question = {"ask": "measure", "task": asdict(task)}
        ranks = range(1, self._around.world)
        answers = self._call.ask(
            dict.fromkeys(ranks, question), _PROBE_S + 5.0, lambda: probes.update({0: measure(task, _PROBE_S)})
        )
        for rank in ranks:
            probes[rank] = answers.get(rank) or {"stage": "python", "error": "the rank was lost"}
        self._found += _judge_probes(self._around, probes, {each.rank: each.host for each in reports}, device)

    def _choose_device(self, reports: Sequence[Report]) -> str:
        """CUDA if every node has a device for each of its ranks, so that all ranks use the same kind."""
        if self._around.wanted.device == "cpu":
            return "cpu"
        ranks: dict[str, int] = {}
        for report in reports:
            ranks[report.host] = ranks.get(report.host, 0) + 1
        gpus = {report.host: int(fact) for report in reports if (fact := report.fact("gpus")) is not None}
        return "cuda" if all(gpus.get(host, 0) >= count for host, count in ranks.items()) else "cpu"


def _parse_report(rank: int, hello: Answer) -> Report:
    """A rank's report; findings of another version that cannot be read are left out."""
    findings = []
    for table in hello.get("findings", ()):
        with contextlib.suppress(KeyError, TypeError, ValueError):
            findings.append(parse_finding(table))
    return Report(rank, str(hello.get("host", "n/a")), tuple(findings))
