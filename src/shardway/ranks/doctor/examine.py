"""The doctor's examination: the table of checks, what each rank and rank 0 do, and the summary, one row a check.

Each rank looks at itself; rank 0 collects the reports and runs tests across the ranks.

Invariants: - The order of the table is that of the report, and a name never changes its meaning. - The examination ends
within its limits and never raises for what it finds; if ranks do not meet, each of them reports what it tried. What
needs the data or the model's files is None without them. - A row shows its worst verdict, and which nodes have it;
nothing is averaged away. The JSON form keeps its keys: format, verdict, site, world, hosts, missing, checks, reports. -
This module does not print.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from shardway.errors import ShardwayError, list_some
from shardway.ranks.doctor import cluster, node, world
from shardway.ranks.doctor.cluster import find_existing
from shardway.ranks.doctor.finding import (
    CheckResult,
    CheckScope,
    CheckVerdict,
    DoctorCheck,
    Report,
    parse_finding,
    run_checks,
    unknown,
)
from shardway.ranks.doctor.surroundings import MachineNeeds, MachineView
from shardway.ranks.doctor.torch_probe import Task, measure
from shardway.ranks.doctor.world import Answer, CheckPortTaken, ConnectivityCheck, MeetingPoint, attend, find_point
from shardway.resolve.request import Resolution
from shardway.runfile.schema import RunFile

# --- the table of checks

RANK, NODE, MACHINE, LOGIN = CheckScope.RANK, CheckScope.NODE, CheckScope.MACHINE, CheckScope.LOGIN

CHECKS: Mapping[str, DoctorCheck] = MappingProxyType(
    {
        "rank.placement": DoctorCheck(
            "do the launcher's variables place this rank", RANK, cluster.check_placement, True
        ),
        "versions": DoctorCheck("versions of Python, torch, Shardway", MACHINE, cluster.check_versions, True),
        "python.files": DoctorCheck("is Python on a parallel file system", MACHINE, cluster.check_python, True),
        "container": DoctorCheck("which container this is", NODE, cluster.check_container, True),
        "gpu.query": DoctorCheck("does nvidia-smi answer", NODE, node.check_query, True),
        "gpu.count": DoctorCheck("are all GPUs there", NODE, node.check_count, True),
        "gpu.visible": DoctorCheck("which GPUs a rank may use", RANK, node.check_visible, True),
        "gpu.ecc": DoctorCheck("errors of GPU memory", NODE, node.check_ecc, True),
        "gpu.throttle": DoctorCheck("is a GPU slowed down", NODE, node.check_throttle, True),
        "gpu.busy": DoctorCheck("does another program use a GPU", NODE, node.check_busy, True),
        "gpu.mode": DoctorCheck("compute mode and MIG", NODE, node.check_mode, True),
        "cpu.affinity": DoctorCheck("cores that a rank may use", RANK, node.check_affinity, True),
        "cpu.threads": DoctorCheck("OMP_NUM_THREADS", RANK, node.check_threads, True),
        "mem.limit": DoctorCheck("memory of the job on this node", NODE, node.check_memory, True),
        "mem.shm": DoctorCheck("size of /dev/shm", NODE, node.check_shm, True),
        "limit.memlock": DoctorCheck("may memory be locked", RANK, node.check_memlock, True),
        "limit.files": DoctorCheck("open files", RANK, node.check_files, True),
        "limit.tasks": DoctorCheck("processes and threads", RANK, node.check_tasks, True),
        "limit.core": DoctorCheck("core dumps on a shared file system", RANK, node.check_core, True),
        "tmp": DoctorCheck("folder for temporary files", NODE, node.check_tmp, True),
        "net.interface": DoctorCheck("interfaces of NCCL and gloo", NODE, cluster.check_interfaces, True),
        "net.master": DoctorCheck("the address at which ranks meet", NODE, cluster.check_master, True),
        "net.hostname": DoctorCheck("the address of the node's own name", NODE, cluster.check_hostname, True),
        "net.infiniband": DoctorCheck("InfiniBand ports", NODE, cluster.check_infiniband, True),
        "fs.mounts": DoctorCheck("do file systems answer", MACHINE, cluster.check_mounts, True),
        "fs.write": DoctorCheck("can the run write", MACHINE, cluster.check_write, True),
        "fs.space": DoctorCheck("room for checkpoints", MACHINE, cluster.check_space, True),
        "fs.caches": DoctorCheck("caches in a small home folder", MACHINE, cluster.check_caches),
        "fs.speed": DoctorCheck("speed of the run's folder", NODE, cluster.check_speed, deep=True, limit_s=60.0),
        "offline": DoctorCheck("do libraries know of no internet", NODE, cluster.check_offline, True),
        "proxy": DoctorCheck("the proxy that leads outside", NODE, cluster.check_proxy, True),
        "scheduler": DoctorCheck("does the scheduler answer", LOGIN, cluster.check_scheduler, limit_s=20.0),
        "account": DoctorCheck("is the account yours", LOGIN, cluster.check_account),
    }
)
"""Name -> what one process looks at. What is seen over all ranks only is in `WORLD_CHECKS`."""

WORLD_CHECKS: Mapping[str, str] = MappingProxyType(
    {
        "world.port": "is the port free on rank 0",
        "world.meeting": "do all ranks come together",
        "world.nodes": "are the nodes of the job all there and alike",
        "world.versions": "are versions equal on all nodes",
        "world.master": "is MASTER_ADDR the same address on all nodes",
        "world.clock": "do the clocks of the nodes agree",
        "world.visible": "does each node see the files of the first",
        "torch.start": "do torch and its process group start",
        "torch.import": "how long torch takes to import",
        "torch.allreduce": "a timed sum over all ranks",
        "torch.peers": "do GPUs of a node reach each other (--deep)",
        "torch.matmul": "speed of each GPU in a matrix product (--deep)",
    }
)
"""Name -> question, of what ranks find out together."""


def list_names() -> tuple[str, ...]:
    """Every name that a finding can have, in the order of the report."""
    return (*CHECKS, *WORLD_CHECKS)


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
    from shardway.plan.memory import optimizer_bytes
    from shardway.resolve.planned import shape_of_run

    try:
        shape = shape_of_run(values, resolution.resolved.circumstances.shape)
    except ShardwayError:
        return None
    weights = 2 if values.precision.weights == "bf16" else 4
    return float(shape.parameters) * (weights + optimizer_bytes(values.optim.name))


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


def examine_machine(around: MachineView, *, quick: bool = False, wait_s: float = 60.0) -> Diagnosis:
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
    verdict = world.judge_attendance(around, attended, point, wait_s)
    met = replace(verdict, check="world.meeting")
    return Diagnosis((own,), (met,), speaks=verdict.verdict is not CheckVerdict.OK)


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
        "torch.start": world.judge_start(probes, hosts),
        "torch.import": world.judge_import(probes, hosts),
    }
    if around.world > 1:
        verdicts["torch.allreduce"] = world.judge_sum(probes, device)
    if around.deep:
        verdicts["torch.peers"] = world.judge_peers(probes, hosts)
        verdicts["torch.matmul"] = world.judge_matmul(probes, hosts)
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
            self._add("world.port", world.judge_port(point, str(error)))
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
        self._add("world.port", world.judge_port(point, ""))
        self._add("world.meeting", world.judge_meeting(self._around, reports, missing, point, wait_s))
        self._add("world.nodes", world.judge_nodes(reports))
        self._add("world.versions", world.judge_versions(reports))
        self._add("world.master", world.judge_master(reports))
        others = self._first_of_others(reports)
        clocks = call.compare_clocks(others)
        self._add("world.clock", world.judge_clocks({others[rank]: clock for rank, clock in clocks.items()}))
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
        return world.judge_visible(str(folder), seen, SEEN_WITHIN_S)

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


# --- the summary

FORMAT = 1
_SHOWN = 4


@dataclass(frozen=True)
class SummaryRow:
    """One check over all ranks: its worst verdict, what was found there, and on which hosts (empty: on all)."""

    check: str
    verdict: CheckVerdict
    found: str
    remedy: str
    hosts: tuple[str, ...]

    def render(self) -> str:
        """A line, and what to do below it."""
        where = f"  [{list_some(self.hosts, _SHOWN)}]" if self.hosts else ""
        line = f"{self.verdict.value:<5} {self.check:<16} {self.found}{where}"
        return line + (f"\n{'':<23}To do: {self.remedy}" if self.remedy else "")


def list_rows(diagnosis: Diagnosis) -> list[SummaryRow]:
    """A row for every check that any rank ran, in the order of the table."""
    found: dict[str, list[tuple[str, CheckResult]]] = {}
    for report in diagnosis.reports:
        for finding in report.findings:
            found.setdefault(finding.check, []).append((report.host, finding))
    for finding in diagnosis.together:
        found.setdefault(finding.check, []).append(("", finding))
    return [_summarise(name, found[name]) for name in list_names() if name in found]


def _summarise(name: str, found: list[tuple[str, CheckResult]]) -> SummaryRow:
    """The worst, and where; hosts are left out where all have it."""
    worst = max(found, key=lambda each: each[1].verdict.weight)[1]
    alike = list(dict.fromkeys(host for host, finding in found if finding.verdict is worst.verdict))
    everywhere = set(alike) == {host for host, _ in found}
    return SummaryRow(name, worst.verdict, worst.found, worst.remedy, () if everywhere else tuple(alike))


def judge_rows(rows: list[SummaryRow]) -> CheckVerdict:
    """The verdict over all: the worst."""
    return max((row.verdict for row in rows), key=lambda verdict: verdict.weight, default=CheckVerdict.NA)


def render_rows(rows: list[SummaryRow], *, every: bool = False) -> str:
    """The rows as text; those that say nothing share a line, unless `every` is wanted."""
    silent = [row.check for row in rows if row.verdict is CheckVerdict.NA and not every]
    lines = [row.render() for row in rows if every or row.verdict is not CheckVerdict.NA]
    if silent:
        lines.append(f"{'n/a':<5} {', '.join(silent)}")
    counts = {verdict: sum(row.verdict is verdict for row in rows) for verdict in CheckVerdict}
    totals = [f"{counts[verdict]} {verdict}" for verdict in (CheckVerdict.FAIL, CheckVerdict.WARN, CheckVerdict.OK)]
    return "\n".join([*lines, ", ".join(totals)])


def render_json(diagnosis: Diagnosis, site: str, world: int) -> dict[str, Any]:
    """Plain data with stable keys; `reports` has every finding of every rank."""
    rows = list_rows(diagnosis)
    return {
        "format": FORMAT,
        "verdict": judge_rows(rows),
        "site": site,
        "world": world,
        "hosts": list(dict.fromkeys(report.host for report in diagnosis.reports)),
        "missing": list(diagnosis.missing),
        "checks": [asdict(row) for row in rows],
        "reports": [
            {"rank": report.rank, "host": report.host, "findings": [each.as_json() for each in report.findings]}
            for report in diagnosis.reports
        ],
    }
