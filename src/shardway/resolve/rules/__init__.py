"""The rules between keys, one function each, named as a sentence; `RULES` is their order.

Rules stand by section: [run], [checkpoint] and [guard] in `run`; [model] and [data] in `model`; [parallel] and the
split of a batch in `layout`; [precision], [optim] and what compiles in `formats`; [deepspeed] in `deepspeed`; what
`train.tune` measures in `tuning`. In each of these modules the public functions of a draft alone are its rules, applied
as they stand from top to bottom.

Invariant: a rule derives an open key or refuses; it never changes what the user set. This package reads no files and
does not look at the machine.
"""

from __future__ import annotations

from shardway.resolve.draft import Rule
from shardway.resolve.rules import deepspeed, formats, layout, model, run, tuning

OF_A_LAYOUT: tuple[Rule, ...] = (*layout.RULES, *formats.OF_A_LAYOUT, *deepspeed.RULES)
"""Rules that a layout has to pass."""

RULES: tuple[Rule, ...] = (
    *run.RULES,
    *formats.BEFORE_A_LAYOUT,
    *model.RULES,
    layout.bind_layout_rule(OF_A_LAYOUT),
    *OF_A_LAYOUT,
    *tuning.RULES,
)
