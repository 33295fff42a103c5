"""The keys of a run file about what is saved, and where: [checkpoint].

Invariant: as in `schema`: strict keys, each with its sentence. This module must not check one key against another.
"""

from __future__ import annotations

from shardway.best import LOSS
from shardway.runfile.section import NonNegativeInt, PositiveInt, Section, key
from shardway.runfile.types import MonitorField, SaveCadence, SpanOrOff
from shardway.units import Span


class CheckpointSection(Section):
    """When state is saved and how much of it is kept."""

    every: SaveCadence = key(
        Span(200, "steps"),
        'How often to save: an amount of training, a time, "auto" (what costs least, by the time of a save and the '
        'number of ranks) or "off".',
    )
    keep: PositiveInt = key(
        3, "Complete checkpoints that are kept; older ones are removed after a newer one is complete."
    )
    keep_every: SpanOrOff = key(
        "off", "Steps whose checkpoints are kept for ever, beside the newest; they are saved whatever `every` says."
    )
    keep_best: NonNegativeInt = key(
        0,
        "How many of the steps with the best validation are kept besides, whatever `every` says; `monitor` is what "
        "makes them the best. 0 = none.",
    )
    monitor: MonitorField = key(
        LOSS,
        "Which metric of a validation keep_best and train.patience go by: loss, accuracy, bits_per_byte, or another "
        'name of its results with its direction, "max f1" or "min rmse".',
    )
    background: bool = key(
        True,
        "Write checkpoints while the run goes on, from a copy of the state in the host's memory; the last one is "
        "waited for, as are all where that memory does not suffice or the engine writes files of its own.",
    )
    local_every: SaveCadence = key(
        "off",
        "How often to save on each node's own disk, as `every`; what `every` asks for is then saved there as well, and "
        'copied to the run directory while the run goes on. "off" = in the run directory alone.',
    )
    local_dir: str = key(
        "",
        "Folder on each node's own disk for these; variables of the environment may stand in it. Empty = the site's "
        "node.local_disk (local_every).",
    )
