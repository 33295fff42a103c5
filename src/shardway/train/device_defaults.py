"""What is left to the device, on the ranks that are there: what their devices are, and what a script has set in torch.

Invariant: all ranks resolve the same values, and what a script has set stands before any default. This module must not
decide what a device does fast (that is `resolve.device_defaults`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from shardway.errors import UserError, render_reason
from shardway.hardware.device import DeviceFacts, facts_of_cuda
from shardway.parallel.compile import set_compile_cache
from shardway.resolve.device_defaults import COMPILE, COMPUTE, KEYS, TF32
from shardway.resolve.request import Resolution
from shardway.resolve.resolved import Resolved, Settled, value_of


@dataclass(frozen=True)
class RankReport:
    """What one rank says of its device (None: a CPU), and of what its script has set in torch."""

    device: DeviceFacts | None
    script: Mapping[str, Settled]


def look_here(resolution: Resolution, device: torch.device) -> RankReport:
    """The report of this rank, before it changes any setting of torch."""
    facts = _look_at(device)
    if facts is not None and not facts.no_compiler and resolution.resolved.values.train.compile == "blocks":
        try:
            set_compile_cache(resolution.resolved.values.train.compile_cache)
        except UserError as error:
            if resolution.resolved.is_derived(COMPILE):
                facts = replace(facts, no_compiler=render_reason(str(error)))
    return RankReport(facts, _read_script(device) if resolution.request.own_model else {})


def _look_at(device: torch.device) -> DeviceFacts | None:
    if device.type == "cpu":
        return None
    name = torch.cuda.get_device_name(device)
    if torch.version.hip is not None:
        return replace(facts_of_cuda(name, None), kind="rocm", has_tf32=False)
    native = torch.cuda.is_bf16_supported(including_emulation=False)
    return facts_of_cuda(name, torch.cuda.get_device_capability(device), native)


def _read_script(device: torch.device) -> dict[str, Settled]:
    """What a script has settled by torch's own switches before it opened its run."""
    settled = {}
    if torch.is_autocast_enabled(device.type):
        settled[COMPUTE] = Settled("fp32", "the script has an autocast of its own")
    if device.type == "cuda" and (tf32 := read_tf32_of_script()) is not None:
        settled[TF32] = tf32
    return settled


def read_tf32_of_script() -> Settled | None:
    """Whether fp32 products run in TF32 where torch's switches are not at their defaults; None where they are."""
    said = "the script has set torch's own switches"
    try:
        precision = torch.get_float32_matmul_precision()
        if precision == "highest" and torch.backends.cudnn.allow_tf32:
            return None
    except RuntimeError:  # the newer of torch's two interfaces is in use: the older one refuses to answer
        return Settled(torch.backends.cuda.matmul.fp32_precision == "tf32", said)
    return Settled(precision != "highest", f'{said} (torch.get_float32_matmul_precision() is "{precision}")')


def agree(resolution: Resolution, reports: Sequence[RankReport], before: Mapping[str, Any]) -> Resolution:
    """The resolution that all ranks come to by what all of them report, and by what rank 0 finds in the directory."""
    facts = resolution.resolved.circumstances
    devices = tuple(dict.fromkeys(report.device for report in reports if report.device is not None))
    script = {key: settled for report in reversed(reports) for key, settled in report.script.items()}
    if (facts.devices, facts.before, facts.settled) == (devices, before, script):
        return resolution
    return resolution.under(devices=devices, before=before, settled=script)


def describe_numerics(resolved: Resolved) -> dict[str, list[Any]]:
    """Key -> [value, origin] of number formats and compilation, for the event that begins an attempt."""
    return {key: [value_of(resolved.values, key), resolved.origins[key]] for key in KEYS}
