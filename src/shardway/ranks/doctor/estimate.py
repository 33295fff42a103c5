"""What a run file wants of a machine, as the doctor compares it: folder, device, size of a checkpoint.

Invariant: what cannot be known without the data or the model's files is None; nothing raises for that. This module must
not import torch.
"""

from __future__ import annotations

from pathlib import Path

from shardway.errors import ShardwayError
from shardway.ranks.doctor.surroundings import MachineNeeds
from shardway.resolve.request import Resolution
from shardway.runfile.schema import RunFile


def read_wanted(resolution: Resolution) -> MachineNeeds:
    """The demands of a resolved run."""
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
    """Checkpoints that `checkpoint.keep_every` adds up to; 0 where only the data can tell."""
    every, steps = values.checkpoint.keep_every, values.train.steps
    if every == "off" or every.unit != steps.unit:
        return 0
    return int(steps.amount // every.amount)


def estimate_checkpoint(values: RunFile, resolution: Resolution) -> float | None:
    """Bytes of one checkpoint: weights and the optimizer's states of the whole model; None where it is not known."""
    from shardway.plan.memory.breakdown import OPTIMIZER_BYTES
    from shardway.resolve.planned.case import shape_of_run

    try:
        shape = shape_of_run(values, resolution.resolved.circumstances.shape)
    except ShardwayError:
        return None
    weights = 2 if values.precision.weights == "bf16" else 4
    return float(shape.parameters) * (weights + OPTIMIZER_BYTES.get(values.optim.name, 8.0))
