"""The keys of a run file about faults that a run survives: [guard].

Invariant: as in `schema`: strict keys, each with its sentence. This module must not check one key against another.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from shardway.runfile.section import NonNegativeInt, PositiveFloat, PositiveInt, Section, key
from shardway.runfile.types import Off, SpanOrOff

SpikeSteps = Annotated[int, Field(ge=1, le=10)]
"""More would shift the median of the least window (20 values) that a spike is measured by."""


class GuardSection(Section):
    """What happens to numbers that are not finite, and how the machine is looked after."""

    non_finite: Literal["skip", "stop", "off"] = key(
        "skip",
        "What happens where loss or gradient are not finite after the passes of a step were repeated once: the step is "
        "skipped, or the run stops; off = nothing is repeated, and the run stops after such a step.",
    )
    max_skips: PositiveInt = key(3, "Skipped steps in a row that end the run (non_finite = skip).")
    spike: PositiveFloat | Off = key(
        "off",
        "Tell a loss or a gradient norm that lies so many standard deviations above those of the last steps, such as "
        "8.0; `on_spike` says what is done about it.",
    )
    on_spike: Literal["warn", "roll_back"] = key(
        "warn",
        "What follows a spike: nothing; or the run goes back to the newest checkpoint from before it and leaves the "
        "data from there to its end out.",
    )
    spike_steps: SpikeSteps = key(
        3, "Steps in a row with a spike after which the run goes back (on_spike = roll_back); 1 to 10."
    )
    spike_margin: NonNegativeInt = key(
        0, "Steps before a spike whose checkpoints are passed over when the run goes back (on_spike = roll_back)."
    )
    max_left_out: PositiveInt = key(
        500,
        "Global batches that one roll back leaves out at most, the last ones up to the end of the spike; those before "
        "them are trained on again.",
    )
    max_roll_backs: PositiveInt = key(
        3, "How often a run goes back at most, over all its attempts; the spike after that ends it."
    )
    probe_every: SpanOrOff = key(
        "off", "How often the passes of a step are run twice and compared bit by bit; a third run decides."
    )
    compare_every: SpanOrOff = key(
        "off",
        "How often weights that several ranks hold alike are compared over these ranks; a difference ends the run.",
    )
