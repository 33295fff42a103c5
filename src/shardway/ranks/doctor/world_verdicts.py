"""Verdicts over all ranks: attendance; agreement of nodes, clocks and files; torch's probes.

Invariant: every verdict is a function of what was gathered; no connection is opened. A rank or a node is compared with
the median of its peers or with the peers themselves, not with a number for another kind of machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from shardway.errors import list_some
from shardway.ranks.doctor.cluster import VERSIONS
from shardway.ranks.doctor.connectivity_check import Attendance, ClockOffset, MeetingPoint
from shardway.ranks.doctor.finding import CheckResult, Report, bad, good, poor, unknown
from shardway.ranks.doctor.surroundings import MachineView
from shardway.units import render_seconds

# --- attendance, nodes, clocks, files

_SKEW_S = 1.0
_MOST_HOSTS_OF_A_VERDICT = 8


def judge_meeting(
    around: MachineView, reports: Sequence[Report], missing: Sequence[int], point: MeetingPoint, wait_s: float
) -> CheckResult:
    """Rank 0's view: which ranks reported in time, and which nodes no rank reported from."""
    if not missing:
        hosts = len({report.host for report in reports})
        return good(f"all {around.world} ranks on {hosts} node{'s' * (hosts != 1)} met at {point}")
    came = list_some([f"{report.rank} ({report.host})" for report in reports], _MOST_HOSTS_OF_A_VERDICT)
    absent = list_absent_hosts(around, reports)
    from_where = f"; no rank came from {list_some(absent, _MOST_HOSTS_OF_A_VERDICT)}" if absent else ""
    said = f"rank{'s' * (len(missing) > 1)} {list_ranks(missing)} of {around.world} did not come to {point} within "
    remedy = (
        "look at the output of these ranks: they were not started, or say there why they could not reach this address; "
        f"from their node: getent hosts {point.address}; nc -zv {point.address} {point.port}"
    )
    if absent:
        remedy += f"; leave a node out with --exclude={absent[0]}"
    return bad(f"{said}{render_seconds(wait_s)}; came: {came}{from_where}", remedy)


def list_ranks(ranks: Sequence[int]) -> str:
    """Ranks in short form: [1, 2, 3, 7] -> "1-3, 7"."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and rank == parts[-1][-1] + 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    return list_some(
        [f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts], _MOST_HOSTS_OF_A_VERDICT
    )


def list_absent_hosts(around: MachineView, reports: Sequence[Report]) -> list[str]:
    """Nodes of the job that no rank reported from. Short names are compared, ignoring case, since schedulers differ in
    domains."""
    came = {report.host.partition(".")[0].lower() for report in reports}
    return [host for host in around.hosts if host.partition(".")[0].lower() not in came]


def judge_attendance(around: MachineView, attended: Attendance, point: MeetingPoint, wait_s: float) -> CheckResult:
    """The view of a rank that tried to report."""
    tries = "; ".join(f"{count} x {words}" for words, count in attended.tries.items())
    if attended.met:
        return good(f"met rank 0 at {point}") if not tries else bad(f"met rank 0 at {point}, {tries}", _SEE_FIRST)
    said = f"rank {around.rank} on {around.host} could not reach rank 0 at {point} within {render_seconds(wait_s)}"
    remedy = (
        "if others reach it, this node's network or firewall is wrong: leave the node out; if none does, rank 0 was "
        f"not started, or MASTER_ADDR is no address of its node: getent hosts {point.address} on both"
    )
    return bad(f"{said}: {tries or 'no try was possible'}", remedy)


_SEE_FIRST = "look at the output of rank 0"


def judge_port(point: MeetingPoint, trouble: str) -> CheckResult:
    """Rank 0 listens where training will, so a taken port is known in advance."""
    if not trouble:
        return good(f"rank 0 listens at port {point.port}")
    remedy = "export MASTER_PORT with another port for all ranks, or ask for whole nodes (--exclusive)"
    return bad(f"rank 0 cannot listen at port {point.port}: {trouble}", remedy)


def judge_nodes(reports: Sequence[Report]) -> CheckResult:
    """Whether nodes have as many GPUs as each other."""
    counts = {report.host: fact for report in reports if (fact := report.fact("gpus")) is not None}
    if len(counts) < 2:
        return unknown("one node has no peers")
    usual = median(float(count) for count in counts.values())
    odd = [
        f"{host} has {count:g}" for host, count in counts.items() if isinstance(count, int | float) and count != usual
    ]
    if odd:
        remedy = "ask for one kind of node (--constraint, or another queue), or leave these out"
        return bad(f"GPUs of a node: {usual:g}, but {list_some(odd, _MOST_HOSTS_OF_A_VERDICT)}", remedy)
    return good(f"{len(counts)} nodes with {usual:g} GPUs each")


def judge_versions(reports: Sequence[Report]) -> CheckResult:
    """Whether Python, torch, Shardway, the driver and the processor are the same everywhere."""
    told = [report for report in reports if report.fact("python") is not None]
    if len(told) < 2:
        return unknown("one node has no peers")
    differ = []
    for name in VERSIONS:
        found: dict[str, list[str]] = {}
        for report in told:
            found.setdefault(str(report.fact(name) or "none"), []).append(report.host)
        if len(found) > 1:
            differ.append(
                f"{name}: " + ", ".join(f"{value} on {list_some(hosts, 3)}" for value, hosts in sorted(found.items()))
            )
    if not differ:
        return good(f"equal on {len(told)} nodes")
    remedy = "start all ranks in the same environment: one venv or image on a shared file system"
    only_driver = all(line.startswith("driver") for line in differ)
    return (poor if only_driver else bad)("; ".join(differ), remedy)


def judge_master(reports: Sequence[Report]) -> CheckResult:
    """Whether MASTER_ADDR resolves to one address."""
    found: dict[str, list[str]] = {}
    for report in reports:
        address = report.fact("master_address")
        if address is not None:
            found.setdefault(str(address), []).append(report.host)
    if not found:
        return unknown("no node looked it up")
    if len(found) == 1:
        return good(f"{next(iter(found))} on every node")
    said = ", ".join(f"{address} on {list_some(hosts, 3)}" for address, hosts in sorted(found.items()))
    return poor(said, "export MASTER_ADDR with the IPv4 address of rank 0's fast interface instead of a name")


def judge_clocks(clocks: Mapping[str, ClockOffset]) -> CheckResult:
    """Whether clocks agree, as far as the network allows to measure."""
    if not clocks:
        return unknown("one node has one clock")
    off = {host: clock for host, clock in clocks.items() if abs(clock.ahead_s) - clock.error_s > _SKEW_S}
    if off:
        said = list_some([f"{host} {render_skew(clock)}" for host, clock in off.items()], _MOST_HOSTS_OF_A_VERDICT)
        return poor(f"against rank 0: {said}", "tell the site's support: time synchronisation (chrony) fails there")
    largest = max(clocks.values(), key=lambda clock: abs(clock.ahead_s))
    return good(f"within {1000 * (abs(largest.ahead_s) + largest.error_s):.2g} ms on {len(clocks) + 1} nodes")


def render_skew(clock: ClockOffset) -> str:
    """In words: "3.20 s ahead"."""
    return f"{abs(clock.ahead_s):.2f} s {'ahead' if clock.ahead_s > 0 else 'behind'}"


def judge_visible(folder: str, seen: Mapping[str, float | None], limit_s: float) -> CheckResult:
    """Whether each other node saw a new file of the first node, and after how long."""
    if not seen:
        return unknown("one node sees its own files")
    blind = [host for host, after in seen.items() if after is None]
    if blind:
        remedy = (
            "choose a run directory on a file system that all nodes share (--dir, run.root), and mount it in containers"
        )
        said = f"a file that the first node wrote in {folder} is not there within {limit_s:g} s on"
        return bad(f"{said} {list_some(blind, _MOST_HOSTS_OF_A_VERDICT)}", remedy)
    slowest = max(after for after in seen.values() if after is not None)
    return good(f"{folder}: {len(seen)} other node{'s' * (len(seen) > 1)} saw a new file after {slowest:.2f} s at most")


# --- torch probes

Probes = Mapping[int, Mapping[str, Any]]
"""Rank -> the result of its probe; without an answer it has an "error"."""

_SLOW_IMPORT_S = 20.0
_MOST_RANKS_SHOWN = 4
_REMEDIES = {
    "python": "look at the environment of the ranks: `python -c 'import shardway'` on that node",
    "import torch": "look at the environment: `python -c 'import torch'` on that node, its modules and its image",
    "CUDA": "check that this torch is a CUDA build for this driver: python -m torch.utils.collect_env",
    "matrix product": "the GPU hangs: leave the node out and tell the site's support",
    "process group": "choose the interface: NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME; NCCL_DEBUG=INFO says what it tries",
    "sum over all ranks": (
        "run again with NCCL_DEBUG=INFO and look for the last transport it names; try NCCL_IB_DISABLE=1, then "
        "NCCL_P2P_DISABLE=1, to learn which one fails"
    ),
}


def judge_start(probes: Probes, hosts: Mapping[int, str]) -> CheckResult:
    """Whether every rank finished; else the first stage that a rank did not pass, which is the cause."""
    failed = {rank: found for rank, found in probes.items() if "error" in found}
    if not failed:
        first = next(iter(probes.values()))
        return good(f"torch {first.get('torch', 'n/a')}" + (f", CUDA {first['cuda']}" if first.get("cuda") else ""))
    order = list(_REMEDIES)
    rank = min(failed, key=lambda each: _place(order, str(failed[each].get("stage", "python"))))
    stage = str(failed[rank].get("stage", "python"))
    others = f" ({len(failed) - 1} other ranks failed too)" if len(failed) > 1 else ""
    said = f"rank {rank} on {hosts.get(rank, 'n/a')}, {stage}: {failed[rank]['error']}{others}"
    return bad(said, _REMEDIES.get(stage, _REMEDIES["process group"]))


def _place(order: list[str], stage: str) -> int:
    return order.index(stage) if stage in order else len(order)


def judge_import(probes: Probes, hosts: Mapping[int, str]) -> CheckResult:
    """How long the slowest rank took to import torch."""
    seconds = {rank: float(found["import_s"]) for rank, found in probes.items() if "import_s" in found}
    if not seconds:
        return unknown("no rank could import torch")
    rank = max(seconds, key=lambda each: seconds[each])
    said = (
        f"{seconds[rank]:.1f} s on rank {rank} ({hosts.get(rank, 'n/a')}), {median(seconds.values()):.1f} s the median"
    )
    if seconds[rank] > _SLOW_IMPORT_S:
        return poor(said, "use a container image (one file), or unpack the environment on each node's own disk")
    return good(said)


def judge_sum(probes: Probes, device: str) -> CheckResult:
    """Time of the sum, and its bus bandwidth as NCCL's tests define it."""
    seconds = [float(found["sum_s"]) for found in probes.values() if "sum_s" in found]
    if len(seconds) < len(probes) or not seconds:
        return unknown(f"{len(seconds)} of {len(probes)} ranks got to it") if seconds else unknown("no rank got to it")
    size = next(int(found["sum_bytes"]) for found in probes.values())
    bus = size / max(*seconds, 1e-9) * 2 * (len(seconds) - 1) / len(seconds)
    library = "NCCL" if device == "cuda" else "gloo"
    return good(
        f"{size / 2**20:g} MiB over {len(seconds)} ranks by {library} in {1000 * max(seconds):.2f} ms: "
        f"{bus / 1e9:.2f} GB/s a rank",
        sum_s=max(seconds),
    )


def judge_matmul(probes: Probes, hosts: Mapping[int, str]) -> CheckResult:
    """A GPU below 80 % of the median is slow, below 60 % defective."""
    rates = {rank: float(found["tflops"]) for rank, found in probes.items() if "tflops" in found}
    if not rates:
        return unknown("no GPU was measured")
    usual = median(rates.values())
    slow = [f"rank {rank} ({hosts.get(rank, 'n/a')}) {rate:.0f}" for rank, rate in rates.items() if rate < 0.8 * usual]
    said = f"{usual:.0f} TFLOP/s in bf16, the median of {len(rates)}"
    if slow:
        remedy = "one slow GPU slows all ranks: leave its node out and tell the site's support"
        return (bad if min(rates.values()) < 0.6 * usual else poor)(
            f"{said}; {list_some(slow, _MOST_RANKS_SHOWN)}", remedy
        )
    return good(said)


def judge_peers(probes: Probes, hosts: Mapping[int, str]) -> CheckResult:
    """Whether each GPU reaches the others of its node without the host."""
    told = {rank: found for rank, found in probes.items() if found.get("others")}
    if not told:
        return unknown("no node here has several GPUs that one rank sees")
    apart = [f"rank {rank} ({hosts.get(rank, 'n/a')})" for rank, found in told.items() if found.get("apart")]
    if apart:
        remedy = "start without --gpus-per-task and --gpu-bind; in a container, give it all devices of the node"
        return poor(f"GPUs do not reach each other directly: {list_some(apart, _MOST_RANKS_SHOWN)}", remedy)
    return good("all GPUs of a node reach each other directly")
