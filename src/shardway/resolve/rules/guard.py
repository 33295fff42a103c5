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
