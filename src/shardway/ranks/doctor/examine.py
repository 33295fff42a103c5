"""The doctor's examination: the table of checks, what each rank and rank 0 do, and the summary, one row a check.

Each rank looks at itself; rank 0 collects the reports and runs tests across the ranks.

Invariants:
- The order of the table is that of the report, and a name never changes its meaning.
- The examination ends within its limits and never raises for what it finds; if ranks do not meet, each of them reports
  what it tried. A check that hangs stays behind in a thread that ends with the process. What needs the data or the
  model's files is None without them.
- A row shows its worst verdict, and which nodes have it; nothing is averaged away. The JSON form keeps its keys:
  format, verdict, site, world, hosts, missing, checks, reports.
- This module does not print.
"""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from shardway.errors import ShardwayError, UserError, list_some
from shardway.ranks.doctor import checks, world
from shardway.ranks.doctor.checks import find_existing
from shardway.ranks.doctor.surroundings import (
    CheckResult,
    CheckVerdict,
    MachineNeeds,
    MachineView,
    Report,
    bad,
    parse_finding,
    poor,
    unknown,
)
from shardway.ranks.doctor.torch_probe import Task, measure
from shardway.ranks.doctor.world import Answer, CheckPortTaken, ConnectivityCheck, attend, find_point
from shardway.resolve.request import Resolution
from shardway.runfile.schema import RunFile
from shardway.sites.schema import SiteProfile

# --- the table of checks


class CheckScope(StrEnum):
    """Where a check makes sense, and how often."""

    MACHINE = "machine"  # on any machine, once
    LOGIN = "login"  # only on a login node
    NODE = "node"  # on a node of a job, once
    RANK = "rank"  # in each rank of a job


@dataclass(frozen=True)
class DoctorCheck:
    """One check: its question, its scope, and the function that looks. `quick`: part of the preflight of an attempt.
    `deep`: only on request, since it takes seconds or loads the machine."""

    question: str
    where: CheckScope
    examine: Callable[[MachineView], CheckResult]
    quick: bool = True
    deep: bool = False
    limit_s: float = 10.0


RANK, NODE, MACHINE, LOGIN = CheckScope.RANK, CheckScope.NODE, CheckScope.MACHINE, CheckScope.LOGIN

CHECKS: Mapping[str, DoctorCheck] = {
    "rank.placement": DoctorCheck("do the launcher's variables place this rank", RANK, checks.check_placement),
    "versions": DoctorCheck("versions of Python, torch, Shardway", MACHINE, checks.check_versions),
    "python.files": DoctorCheck("is Python on a parallel file system", MACHINE, checks.check_python),
    "container": DoctorCheck("which container this is", NODE, checks.check_container),
    "gpu.query": DoctorCheck("does nvidia-smi answer", NODE, checks.check_query),
    "gpu.count": DoctorCheck("are all GPUs there", NODE, checks.check_count),
    "gpu.visible": DoctorCheck("which GPUs a rank may use", RANK, checks.check_visible),
    "gpu.ecc": DoctorCheck("errors of GPU memory", NODE, checks.check_ecc),
    "gpu.throttle": DoctorCheck("is a GPU slowed down", NODE, checks.check_throttle),
    "gpu.busy": DoctorCheck("does another program use a GPU", NODE, checks.check_busy),
    "gpu.mode": DoctorCheck("compute mode and MIG", NODE, checks.check_mode),
    "cpu.affinity": DoctorCheck("cores that a rank may use", RANK, checks.check_affinity),
    "cpu.threads": DoctorCheck("OMP_NUM_THREADS", RANK, checks.check_threads),
    "mem.limit": DoctorCheck("memory of the job on this node", NODE, checks.check_memory),
    "mem.shm": DoctorCheck("size of /dev/shm", NODE, checks.check_shm),
    "limit.memlock": DoctorCheck("may memory be locked", RANK, checks.check_memlock),
    "limit.files": DoctorCheck("open files", RANK, checks.check_files),
    "limit.tasks": DoctorCheck("processes and threads", RANK, checks.check_tasks),
    "limit.core": DoctorCheck("core dumps on a shared file system", RANK, checks.check_core),
    "tmp": DoctorCheck("folder for temporary files", NODE, checks.check_tmp),
    "net.interface": DoctorCheck("interfaces of NCCL and gloo", NODE, checks.check_interfaces),
    "net.master": DoctorCheck("the address at which ranks meet", NODE, checks.check_master),
    "net.hostname": DoctorCheck("the address of the node's own name", NODE, checks.check_hostname),
    "net.infiniband": DoctorCheck("InfiniBand ports", NODE, checks.check_infiniband),
    "fs.mounts": DoctorCheck("do file systems answer", MACHINE, checks.check_mounts),
    "fs.write": DoctorCheck("can the run write", MACHINE, checks.check_write),
    "fs.space": DoctorCheck("room for checkpoints", MACHINE, checks.check_space),
    "fs.caches": DoctorCheck("caches in a small home folder", MACHINE, checks.check_caches, quick=False),
    "fs.speed": DoctorCheck("speed of the run's folder", NODE, checks.check_speed, False, deep=True, limit_s=60.0),
    "offline": DoctorCheck("do libraries know of no internet", NODE, checks.check_offline),
    "proxy": DoctorCheck("the proxy that leads outside", NODE, checks.check_proxy),
    "scheduler": DoctorCheck("does the scheduler answer", LOGIN, checks.check_scheduler, False, limit_s=20.0),
    "account": DoctorCheck("is the account yours", LOGIN, checks.check_account, quick=False),
}
"""Name -> what one process looks at."""

WORLD_CHECKS = (
    *("world.port", "world.meeting", "world.nodes", "world.versions", "world.master", "world.clock", "world.visible"),
    *("torch.start", "torch.import", "torch.allreduce", "torch.peers", "torch.matmul", "torch.copy"),
)
"""Names of what ranks find out together; docs/doctor.md has the question of each."""


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
        checkpoint_bytes=_estimate_checkpoint(values, resolution),
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


def _estimate_checkpoint(values: RunFile, resolution: Resolution) -> float | None:
    """Bytes of one checkpoint: trained weights of the whole model and their states; None where unknown."""
    from shardway.plan.memory import checkpoint_bytes
    from shardway.resolve.planned import shape_of_run

    try:
        shape = shape_of_run(values, resolution.resolved.circumstances.shape)
    except ShardwayError:
        return None
    weights = 2 if values.precision.weights == "bf16" else 4
    return checkpoint_bytes(shape.trained_parameters, weights, values.optim.name)


# --- checks side by side, each within its own time

QUICK_LIMIT_S = 4.0  # the most seconds for a check of a preflight


def run_checks(table: Mapping[str, DoctorCheck], around: MachineView, *, quick: bool = False) -> list[CheckResult]:
    """The findings of the checks that this rank runs ("n/a" where one makes no sense here); what a node or machine has
    once is reported by the first rank of the node."""
    found: dict[str, CheckResult] = {}

    def run(name: str, check: DoctorCheck) -> None:
        try:
            if check.where in (CheckScope.NODE, CheckScope.RANK) and not around.in_job:
                found[name] = unknown("this is no node of a job")
            elif check.where is CheckScope.LOGIN and around.in_job and not around.scheduler.this_machine:
                found[name] = unknown("this is a node of a job; scheduler commands are for login nodes")
            else:
                found[name] = check.examine(around)
        except Exception as error:  # a check that is wrong must not end the job
            text = f"the check itself failed: {type(error).__name__}: {error}"
            found[name] = poor(text, "report this as a defect of Shardway")

    started = {}
    for name, check in table.items():
        left_out = (quick and not check.quick) or (check.deep and not around.deep)
        if left_out or not (check.where is CheckScope.RANK or around.first_of_node):
            continue
        limit_s = min(check.limit_s, QUICK_LIMIT_S) if quick else check.limit_s
        thread = threading.Thread(target=run, args=(name, check), name=f"doctor {name}", daemon=True)
        started[name] = thread, limit_s, time.monotonic() + limit_s
        thread.start()
    results = []
    for name, (thread, limit_s, deadline) in started.items():
        thread.join(max(0.0, deadline - time.monotonic()))
        late = f"no answer within {limit_s:g} s ({table[name].question}?)"
        finding = found.get(name) or bad(late, f"look at {around.host} by hand: what this check touches hangs")
        results.append(replace(finding, check=name))
    return results


# --- the examination

SEEN_WITHIN_S = 5.0
_PROBE_S = 100.0
_START_S = 30.0


@dataclass(frozen=True)
class Diagnosis:
    """The result of the examination. `speaks`: this rank has something to report; others leave that to rank 0."""

    reports: tuple[Report, ...]
    together: tuple[CheckResult, ...] = ()
    missing: tuple[int, ...] = ()
    speaks: bool = True


def examine_machine(around: MachineView, *, quick: bool = False, wait_s: float = 60.0) -> Diagnosis:
    """Look at this machine and, where there are several ranks, at all of them together. `quick`: the checks of a
    preflight, and the meeting, but no torch. `wait_s`: how long ranks wait for each other."""
    own = Report(around.rank, around.host, tuple(run_checks(CHECKS, around, quick=quick)))
    if around.placement is None or around.world == 1:
        device = "cuda" if around.devices and around.wanted.device != "cpu" else "cpu"
        if quick or not around.in_job or (device == "cpu" and not around.deep):
            return Diagnosis((own,))
        probes = {0: measure(Task(device, 0, _START_S, around.deep), _PROBE_S)}
        return Diagnosis((own,), _named(_judge_probes(around, probes, {0: around.host}, device)))
    point = find_point(around.placement, around.job)
    if around.rank == 0:
        return _lead(around, own, ConnectivityCheck(point, around.world), wait_s, quick=quick)
    hello = {"rank": own.rank, "host": own.host, "findings": [asdict(finding) for finding in own.findings]}
    verdict = world.judge_attendance(around, attend(point, hello, _answer, wait_s), point, wait_s)
    return Diagnosis((own,), _named({"world.meeting": verdict}), speaks=verdict.verdict is not CheckVerdict.OK)


def _named(verdicts: Mapping[str, CheckResult]) -> tuple[CheckResult, ...]:
    return tuple(replace(verdict, check=name) for name, verdict in verdicts.items())


def _answer(question: Answer) -> Answer:
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


def _lead(around: MachineView, own: Report, call: ConnectivityCheck, wait_s: float, *, quick: bool) -> Diagnosis:
    try:
        call.gather(wait_s)
    except CheckPortTaken as error:
        verdicts = {
            "world.port": world.judge_port(call.point, str(error)),
            "world.meeting": unknown("not tried, since rank 0 cannot listen"),
        }
        return Diagnosis((own,), _named(verdicts), tuple(call.missing))
    missing, point, reports = tuple(call.missing), call.point, [own]
    try:
        for rank in sorted(call.reports):
            findings = []
            for table in call.reports[rank].get("findings", ()):
                with contextlib.suppress(KeyError, TypeError, ValueError):  # of another version
                    findings.append(parse_finding(table))
            reports.append(Report(rank, str(call.reports[rank].get("host", "n/a")), tuple(findings)))
        first: dict[str, int] = {}  # of each node
        for report in reports:
            first.setdefault(report.host, report.rank)
        others = {rank: host for host, rank in first.items() if host != own.host}
        verdicts = {
            "world.port": world.judge_port(point, ""),
            "world.meeting": world.judge_meeting(around, reports, missing, point, wait_s),
            "world.nodes": world.judge_nodes(reports),
            "world.versions": world.judge_versions(reports),
            "world.master": world.judge_master(reports),
            "world.clock": world.judge_clocks(
                {others[rank]: clock for rank, clock in call.compare_clocks(others).items()}
            ),
            "world.visible": _show_file(around, call, others),
        }
        if not quick and missing:
            verdicts["torch.start"] = unknown("not tried, since ranks are missing")
        elif not quick:
            verdicts |= _try_torch(around, call, reports)
    finally:
        call.end()
    return Diagnosis(tuple(reports), _named(verdicts), missing)


def _show_file(around: MachineView, call: ConnectivityCheck, others: dict[int, str]) -> CheckResult:
    """Write a file in the run's folder, and ask each other node for it."""
    if around.wanted.folder is None:
        return unknown("no run file or --dir says where the run writes")
    folder, token = find_existing(around.wanted.folder), uuid.uuid4().hex
    path = folder / f".doctor-seen-{token}"
    try:
        path.write_text(token, encoding="utf-8")
    except OSError as error:
        return unknown(f"the first node cannot write to {folder}: {error.strerror}")
    question = {"ask": "look", "path": str(path), "token": token, "limit_s": SEEN_WITHIN_S}
    try:
        answers = call.ask(dict.fromkeys(others, question), SEEN_WITHIN_S + 5.0)
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
    seen = {host: answers.get(rank, {}).get("after") for rank, host in others.items()}
    return world.judge_visible(str(folder), seen, SEEN_WITHIN_S)


def _try_torch(around: MachineView, call: ConnectivityCheck, reports: Sequence[Report]) -> dict[str, CheckResult]:
    """Let all ranks start torch at once: with CUDA if every node has a device for each of its ranks."""
    ranks = Counter(report.host for report in reports)
    gpus = {report.host: int(fact) for report in reports if (fact := report.fact("gpus")) is not None}
    has_devices = all(gpus.get(host, 0) >= count for host, count in ranks.items())
    device = "cuda" if has_devices and around.wanted.device != "cpu" else "cpu"
    task = Task(device, 2**26 if around.deep else 2**22, _START_S, around.deep)
    probes: dict[int, dict[str, Any]] = {}
    question, others = {"ask": "measure", "task": asdict(task)}, range(1, around.world)
    questions = dict.fromkeys(others, question)
    answers = call.ask(questions, _PROBE_S + 5.0, lambda: probes.update({0: measure(task, _PROBE_S)}))
    for rank in others:
        probes[rank] = answers.get(rank) or {"stage": "python", "error": "the rank was lost"}
    return _judge_probes(around, probes, {each.rank: each.host for each in reports}, device)


def _judge_probes(
    around: MachineView, probes: dict[int, dict[str, Any]], hosts: dict[int, str], device: str
) -> dict[str, CheckResult]:
    verdicts = {"torch.start": world.judge_start(probes, hosts), "torch.import": world.judge_import(probes, hosts)}
    if around.world > 1:
        verdicts["torch.allreduce"] = world.judge_sum(probes, device)
    if around.deep:
        verdicts["torch.peers"] = world.judge_peers(probes, hosts)
        tflops, copy_gbs = _find_measured(around.site)
        verdicts["torch.matmul"] = world.judge_matmul(probes, hosts, tflops)
        verdicts["torch.copy"] = world.judge_copy(probes, hosts, copy_gbs)
    return verdicts


def _find_measured(site: SiteProfile) -> tuple[float | None, float | None]:
    """TFLOP/s of 16-bit products and GB/s of a copy that were measured on a site, by its profile; None where it has
    none."""
    from shardway.plan.case import ceilings_of, machine_of_site
    from shardway.plan.time import machine_bandwidth, product_rate

    if not {"matmul", "memory"} & set(site.measured):
        return None, None
    try:
        machine = machine_of_site(site)
        ceilings = ceilings_of(machine)
        rate = product_rate(machine, ceilings, "fp16")
    except UserError:  # what a plan refuses there is no matter of this node
        return None, None
    copied = machine_bandwidth(machine) * ceilings.memory
    return (
        rate / 1e12 if "matmul" in site.measured else None,
        copied / 1e9 if "memory" in site.measured else None,
    )


# --- the summary

FORMAT = 1


@dataclass(frozen=True)
class SummaryRow:
    """One check over all ranks: its worst verdict, what was found there, and on which hosts (empty: on all)."""

    check: str
    verdict: CheckVerdict
    found: str
    remedy: str
    hosts: tuple[str, ...]


def list_rows(diagnosis: Diagnosis) -> list[SummaryRow]:
    """A row for every check that any rank ran, in the order of the table."""
    found: dict[str, list[tuple[str, CheckResult]]] = {}
    for report in diagnosis.reports:
        for finding in report.findings:
            found.setdefault(finding.check, []).append((report.host, finding))
    for finding in diagnosis.together:
        found.setdefault(finding.check, []).append(("", finding))
    rows = []
    for name in (name for name in list_names() if name in found):
        worst = max((finding for _, finding in found[name]), key=lambda each: each.verdict.weight)
        alike = list(dict.fromkeys(host for host, finding in found[name] if finding.verdict is worst.verdict))
        everywhere = set(alike) == {host for host, _ in found[name]}
        rows.append(SummaryRow(name, worst.verdict, worst.found, worst.remedy, () if everywhere else tuple(alike)))
    return rows


def judge_rows(rows: list[SummaryRow]) -> CheckVerdict:
    """The verdict over all: the worst."""
    return max((row.verdict for row in rows), key=lambda verdict: verdict.weight, default=CheckVerdict.NA)


def render_rows(rows: list[SummaryRow], *, every: bool = False) -> str:
    """The rows as text; those that say nothing share a line, unless `every` is wanted."""
    lines, silent = [], []
    for row in rows:
        if row.verdict is CheckVerdict.NA and not every:
            silent.append(row.check)
            continue
        where = f"  [{list_some(row.hosts, 4)}]" if row.hosts else ""
        lines.append(f"{row.verdict.value:<5} {row.check:<16} {row.found}{where}")
        lines += [f"{'':<23}To do: {row.remedy}"] if row.remedy else []
    if silent:
        lines.append(f"{'n/a':<5} {', '.join(silent)}")
    counts = Counter(row.verdict for row in rows)
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
            {"rank": report.rank, "host": report.host, "findings": [asdict(each) for each in report.findings]}
            for report in diagnosis.reports
        ],
    }
