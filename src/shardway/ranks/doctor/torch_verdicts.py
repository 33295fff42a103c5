"""Verdicts on what the torch probes of all ranks found.

Invariant: a rank is compared with the median of its peers. This module must not measure nor import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from shardway.errors import list_some
from shardway.ranks.doctor.finding import CheckResult, bad, good, poor, unknown

Probes = Mapping[int, Mapping[str, Any]]
"""Rank -> what its probe found; one that gave no answer has an "error"."""

_SLOW_IMPORT_S = 20.0
_SHOWN = 4
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
    """Whether every rank got to the end; else the first stage that one did not pass, which is the cause."""
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
    """How long the slowest rank imported torch."""
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
    """Time of the sum, and the rate by which NCCL's tests compare machines (bus bandwidth)."""
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
    """A GPU below 80 % of the median is slow, below 60 % ill."""
    rates = {rank: float(found["tflops"]) for rank, found in probes.items() if "tflops" in found}
    if not rates:
        return unknown("no GPU was measured")
    usual = median(rates.values())
    slow = [f"rank {rank} ({hosts.get(rank, 'n/a')}) {rate:.0f}" for rank, rate in rates.items() if rate < 0.8 * usual]
    said = f"{usual:.0f} TFLOP/s in bf16, the median of {len(rates)}"
    if slow:
        remedy = "one slow GPU slows all ranks: leave its node out and tell the site's support"
        return (bad if min(rates.values()) < 0.6 * usual else poor)(f"{said}; {list_some(slow, _SHOWN)}", remedy)
    return good(said)


def judge_peers(probes: Probes, hosts: Mapping[int, str]) -> CheckResult:
    """Whether each GPU reaches the others of its node without the host."""
    told = {rank: found for rank, found in probes.items() if found.get("others")}
    if not told:
        return unknown("no node here has several GPUs that one rank sees")
    apart = [f"rank {rank} ({hosts.get(rank, 'n/a')})" for rank, found in told.items() if found.get("apart")]
    if apart:
        remedy = "start without --gpus-per-task and --gpu-bind; in a container, give it all devices of the node"
        return poor(f"GPUs do not reach each other directly: {list_some(apart, _SHOWN)}", remedy)
    return good("all GPUs of a node reach each other directly")
