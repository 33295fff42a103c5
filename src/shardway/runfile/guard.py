"""The keys of a run file about faults that a run survives: [guard].

Invariant: as in `schema`: strict keys, each with its sentence. This module must not check one key against another.
"""

from __future__ import annotations

from typing import Literal

from shardway.runfile.section import PositiveFloat, PositiveInt, Section, key
from shardway.runfile.types import Off, SpanOrOff


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
        "8.0; nothing is done about it.",
    )
    probe_every: SpanOrOff = key(
        "off", "How often the passes of a step are run twice and compared bit by bit; a third run decides."
    )
    compare_every: SpanOrOff = key(
        "off",
        "How often weights that several ranks hold alike are compared over these ranks; a difference ends the run.",
    )
