"""The cost of a case on a machine: memory by stage, time by item, throughput, utilisation.

Invariant: every figure follows from the case and the machine alone and states its convention. Nothing here chooses
between cases.

Sources: model and hardware FLOPs utilisation: Chowdhery et al., arXiv:2204.02311, appendix B, and Korthikanti et al.,
arXiv:2205.05198, section 6.3.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from shardway.plan.case import Case
from shardway.plan.machine import Machine
from shardway.plan.memory import (
    Moments,
    Overheads,
    StageMemory,
    estimate_memory,
    estimate_moments,
    load_overheads,
    peak_stage,
)
from shardway.plan.time.ceilings import Ceilings, ceilings_of
from shardway.plan.time.step import StepTime, estimate_step, every_second


@dataclass(frozen=True)
class Estimate:
    """A case on a machine; `memory` has one entry per pipeline rank."""

    case: Case
    machine: Machine
    memory: tuple[StageMemory, ...]
    time: StepTime

    @cached_property
    def peak(self) -> StageMemory:
        """The rank that needs most."""
        return peak_stage(self.memory)

    @property
    def usable_bytes(self) -> float:
        """The part of a device's memory that a plan may use."""
        return self.machine.memory_bytes * self.peak.overheads.usable

    @cached_property
    def moments(self) -> Moments:
        """What the fullest rank holds between steps."""
        return estimate_moments(self.case, self.peak)

    @property
    def memory_low(self) -> float:
        """Lower end of the interval that holds four of five measured peaks, as nvidia-smi shows them."""
        return self.peak.device * self.peak.overheads.low

    @property
    def memory_high(self) -> float:
        """The upper end of that interval."""
        return self.peak.device * self.peak.overheads.high

    @property
    def fits(self) -> bool:
        """Whether every rank's device, and every node's host, holds what it needs."""
        return holds(self.machine, self.peak, self.case.degrees.world)

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all ranks per second."""
        return self.case.tokens_per_step / self.time.seconds

    def flops_per_second(self, *, causal: bool) -> float:
        """Model FLOP/s of one accelerator; `causal` counts the half of the scores that the mask leaves."""
        per_token = self.case.model.flops_per_token(self.case.seq_len, causal=causal)
        return per_token * self.tokens_per_second / self.case.degrees.world

    @property
    def peak_flops(self) -> float:
        """The rated FLOP/s by which utilisation is measured: that of the products' own format."""
        return self.machine.peak(self.case.precision)

    def mfu(self, *, causal: bool) -> float:
        """Model FLOPs utilisation, 0 to 1."""
        return self.flops_per_second(causal=causal) / self.peak_flops

    def hfu(self, *, causal: bool) -> float:
        """Hardware FLOPs utilisation: includes what is computed again."""
        return self.mfu(causal=causal) * (1 + self._computed_again(causal))

    def _computed_again(self, causal: bool) -> float:
        """FLOPs that recompute adds, as a fraction of the model's."""
        case = self.case
        forward = case.model.forward_flops_per_token(case.seq_len, causal=causal)
        head = case.model.head.flops_per_token
        core = sum(
            run.count * run.layer.core_flops_per_token(case.model.side_seq(run.side, case.seq_len), causal)
            for run in case.model.runs
        )
        products = sum(
            run.count * every_second(run.layer) * run.layer.matmul_flops_per_token for run in case.model.runs
        )
        computed = {"full": forward - head, "selective": 0.0 if case.flash else core, "operators": products}
        again = computed.get(case.recompute, 0.0)
        return again / (3 * forward)


def holds(machine: Machine, peak: StageMemory, ranks: int) -> bool:
    """Whether a machine has the memory that the fullest of `ranks` ranks needs; a host of unknown size always does."""
    on_host = (
        machine.host_bytes is None
        or machine.bytes_of_node(peak.host, ranks) <= machine.host_bytes * peak.overheads.usable
    )
    return on_host and peak.device <= machine.memory_bytes * peak.overheads.usable


def estimate(
    case: Case, machine: Machine, ceilings: Ceilings | None = None, overheads: Overheads | None = None
) -> Estimate:
    """Price a case. Without `ceilings` and `overheads` the shipped ones are used. Raises UserError."""
    memory = estimate_memory(case, overheads or load_overheads())
    return Estimate(case, machine, memory, estimate_step(case, machine, ceilings or ceilings_of(machine)))
