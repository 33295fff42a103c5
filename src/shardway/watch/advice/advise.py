"""What to change in a run, most important first, and how each of its accelerators was used.

Invariants:
- Advice never raises for what a run directory may hold: a rule that fails says nothing.
- Every finding has its evidence. A finding that is the consequence of another one is left out.
- A verdict needs samples: an accelerator whose use was not measured is "unknown".
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Sequence

from shardway.rundir.directory import RunDir
from shardway.rundir.events import Event
from shardway.telemetry.store import HostTelemetry
from shardway.watch.advice.events import FoldedEvents
from shardway.watch.advice.evidence import (
    Evidence,
    GpuEvidence,
    HostEvidence,
    find_rise,
    gather,
    list_starts,
    mean,
    quantile,
    share,
    view_hosts,
)
from shardway.watch.advice.findings import Advice, GpuVerdict
from shardway.watch.advice.rules import (
    ADVICE_RULES,
    FULL_USE,
    HOT_SHARE,
    LOW_USE,
    MEMORY_BOUND,
    STARVED_SM,
    THROTTLE,
    WAITING_POWER,
)


def advise(
    run: RunDir,
    hosts: Sequence[HostTelemetry] | None = None,
    events: Iterable[Event] | FoldedEvents | None = None,
) -> list[Advice]:
    """What is found wrong with a run, most important first; empty where there is nothing to change. `hosts` and
    `events`: its telemetry, and the events of rank 0, where they were read already."""
    return advise_on(gather(run, hosts, events))


def advise_on(evidence: Evidence) -> list[Advice]:
    """The findings of all rules on some evidence: problems that cost work first, then by what each can bring."""
    found: list[tuple[int, Advice]] = []
    hidden = set[str]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # means of nothing are None
        for rule in ADVICE_RULES:
            with contextlib.suppress(Exception):
                news = list(rule.find(evidence))
                found += [(rule.tier, advice) for advice in news]
                if any(advice.severity == "problem" for advice in news):
                    hidden.update(rule.hides)
    found = [(tier, advice) for tier, advice in found if advice.rule not in hidden]
    found.sort(key=lambda row: (row[1].severity != "problem", row[0], -(row[1].ceiling_percent or 0.0)))
    return [advice for _, advice in found]


def judge_gpus(hosts: Sequence[HostTelemetry]) -> list[GpuVerdict]:
    """A verdict for each accelerator of the newest start (the one before it where the newest has too few samples), by
    its hardware's samples alone."""
    starts = list_starts(hosts)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return [_judge(gpu, host, starts) for host in view_hosts(hosts) for gpu in host.gpus]


def _judge(gpu: GpuEvidence, host: HostEvidence, starts: Sequence[Sequence[float]]) -> GpuVerdict:
    use = gpu.all("use_percent")
    before = sum(max(group) < host.info.started for group in starts)
    return GpuVerdict(
        gpu.host,
        gpu.device.index,
        mean(use),
        _name_verdict(gpu),
        quantile(use, 1.0),
        gpu.memory_max,
        mean(gpu.all("power_w")),
        find_rise(gpu.all("energy_j")),
        start=before + 1,
        starts=len(starts),
        since=float(host.times[0]),
        until=float(host.times[-1]),
    )


def _name_verdict(gpu: GpuEvidence) -> str:
    use = mean(gpu.over("use_percent", gpu.warm))
    if use is None or gpu.is_idle is None:
        return "unknown"
    if gpu.is_idle:
        return "idle"
    bits = gpu.over("throttle_bits", gpu.warm)
    if gpu.device.maker == "nvidia" and bits is not None and len(bits):
        known = bits[bits == bits].astype("int64")
        if share((known & sum(THROTTLE)) != 0) > 5 * HOT_SHARE:
            return "throttled"
    if use < LOW_USE - 15:
        return "low"
    sm, power = mean(gpu.over("sm_percent", gpu.warm)), gpu.power_share
    starved = sm < STARVED_SM if sm is not None else power is not None and power < WAITING_POWER
    if use >= FULL_USE and starved and (mean(gpu.over("dram_percent", gpu.warm)) or 0.0) < MEMORY_BOUND:
        return "waiting"
    return "used"
