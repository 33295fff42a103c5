"""What part of the rates on paper is reached, as fitted on published measurements, or measured on the machine.

Invariant: a factor belongs to a kind of part (a generation of accelerators, a kind of link, a kind of kernel), never to
one machine, model or publication. The shipped factors are in `ceilings.toml`, which `bench/planner/fit.py` writes. This
module must not compute a time.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from typing import Any

from shardway.hardware.catalogue import Accelerator
from shardway.plan.machine import Machine

GENERATIONS = {
    "volta": ("v100*",),
    "ampere": ("a100*", "a40*"),
    "hopper": ("h100*", "h200*", "h800*", "gh200*"),
    "ada": ("l40s*", "rtx*"),
    "blackwell": ("b200*", "b300*", "gb200*", "gb300*"),
    "cdna": ("mi*",),
}
"""Kinds of accelerators by the start of their keys; a factor that a kind lacks is the general one."""


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """Factors by name. Rates are parts of the rate on paper, `_s` are seconds, `_bytes` bytes."""

    matmul: float
    """Of the 16-bit peak, for a large product while a model trains."""
    matmul_low: float
    """Of the 8-bit peak."""
    matmul_fp4: float
    """Of the 4-bit peak."""
    matmul_ramp: float
    """Depth of a product at which it takes twice its time."""
    narrow_ramp: float
    """The same for its narrower side."""
    misaligned: float
    """What a product takes more where rows of its matrices are no multiples of 16 bytes."""
    misaligned_batched: float
    """The same for the products of unfused attention, whose heads have such a width."""
    batched: float
    """Of the 16-bit peak, for the many small products of unfused attention."""
    scores_passes: float
    """How often unfused attention moves its scores, forward."""
    flash1: float
    """Of the 16-bit peak, for the forward pass of fused attention of the first version; then of later ones."""
    flash2: float
    flash3: float
    flash_ramp: float
    """Mean span of scores at which fused attention takes twice its time."""
    flash_backward: float
    """The rate of its backward pass over that of its forward pass."""
    memory: float
    """Of the memory's bandwidth, for operators that only move numbers."""
    stream: float
    """How often operators on the residual stream move what has to be moved at least once."""
    gates: float
    """The same for activations, rotations and casts."""
    plain_norm: float
    """Moves of a norm that goes through copies; one that does not has 2."""
    sums: float
    """How often an engine that adds gradients to their sum apart from products moves what it has to at least once."""
    kernel_s: float
    """What the host needs to start one operator."""
    power: float
    """Rates fall with this power of a part's power limit over that of the sheet whose peaks it is given."""
    link: float
    """Of the fast link's bandwidth."""
    link_latency_s: float
    network: float
    """Of the network's bandwidth, for large messages."""
    network_latency_s: float
    hop_s: float
    """What one more rank in a ring over the network adds."""
    half_bytes: float
    """Message of one rank that reaches half of the network's bandwidth."""
    overlap: float
    """Part of the computation behind which messages hide."""
    async_tensor: float
    """Part of a tensor axis' messages that decomposed products hide (not fitted: Wang et al., ASPLOS 2023)."""
    optimizer_passes: float
    """How often the update moves what has to be moved at least once."""
    step_s: float
    """Host time of a step beside its passes."""
    low: float
    """Factors of the interval that holds four of five measured steps."""
    high: float


def load_ceilings(accelerator: Accelerator) -> Ceilings:
    """The shipped factors for an accelerator, general ones where its generation has none."""
    table = _read_table()
    return Ceilings(**{**table["general"], **table.get(generation_of(accelerator.key), {})})


def ceilings_of(machine: Machine) -> Ceilings:
    """The shipped factors for a machine's accelerator, behind those that were measured on it."""
    return replace(load_ceilings(machine.accelerator), **machine.measured)


def generation_of(key: str) -> str:
    """The generation that an accelerator of the catalogue belongs to; "" for none of those known."""
    found = (name for name, patterns in GENERATIONS.items() if any(fnmatchcase(key, each) for each in patterns))
    return next(found, "")


@cache
def _read_table() -> Mapping[str, Mapping[str, Any]]:
    text = files(__package__).joinpath("ceilings.toml").read_text(encoding="utf-8")
    names = {field.name for field in fields(Ceilings)}
    kinds = {kind: row for kind, row in tomllib.loads(text).items() if isinstance(row, dict)}
    return {kind: {name: value for name, value in row.items() if name in names} for kind, row in kinds.items()}
