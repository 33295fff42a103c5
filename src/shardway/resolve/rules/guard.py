"""Rules of what looks after the machine while it trains.

Invariant: a rule derives what was left open or refuses; it never changes what the user set. This module must not
read files or look at the machine.
"""

from __future__ import annotations

from shardway.resolve.draft import Draft


def a_probe_repeats_what_has_one_result(draft: Draft) -> None:
    """On a GPU some operations add in whatever order they end, and two runs of a sound device differ."""
    probes = draft.get("guard.probe_every") != "off"
    if probes and draft.get("run.device") == "cuda" and not draft.get("train.deterministic"):
        draft.refuse(
            "guard.probe_every",
            "two runs of the same passes are compared bit by bit, and on a GPU operations have one result only with "
            "train.deterministic = true",
            '"off"; or train.deterministic = true',
        )


def a_run_goes_back_before_spikes_that_are_looked_for(draft: Draft) -> None:
    if draft.get("guard.on_spike") == "roll_back" and draft.get("guard.spike") == "off":
        draft.refuse(
            "guard.on_spike",
            '"roll_back", and guard.spike = "off" looks for no spike',
            '"warn"; or a guard.spike such as 8.0',
        )


def a_run_goes_back_to_what_was_saved(draft: Draft) -> None:
    saves = draft.get("checkpoint.every") != "off" or draft.get("checkpoint.keep_every") != "off"
    if draft.get("guard.on_spike") == "roll_back" and not saves:
        draft.refuse(
            "guard.on_spike",
            '"roll_back" goes back to a checkpoint, and checkpoint.every = "off" makes none',
            '"warn"; or a checkpoint.every such as "200 steps"',
        )


def a_spike_that_is_left_out_is_left_out_whole(draft: Draft) -> None:
    most, steps = draft.get("guard.max_left_out"), draft.get("guard.spike_steps")
    if draft.get("guard.on_spike") == "roll_back" and most < steps:
        draft.refuse(
            "guard.max_left_out",
            f"{most} batches do not reach back to the beginning of a spike of guard.spike_steps = {steps} steps",
            f"at least {steps}",
        )
