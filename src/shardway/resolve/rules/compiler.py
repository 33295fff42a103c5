"""Rules of compilation and recompute.

Invariant: a rule derives what was left open or refuses; it never changes what the user set. This module must not
read files or look at the machine.
"""

from __future__ import annotations

from shardway.resolve.draft import Draft


def a_pipeline_compiles_blocks(draft: Draft) -> None:
    """No rank of a pipeline calls the whole of what it holds."""
    if draft.get("parallel.pp") > 1 and draft.get("train.compile") == "model":
        draft.refuse(
            "train.compile", f'"model" does not go with parallel.pp = {draft.get("parallel.pp")}', '"blocks" or "off"'
        )


def a_memory_budget_needs_the_compiler(draft: Draft) -> None:
    if draft.get("recompute.mode") == "budget" and draft.get("train.compile") == "off":
        draft.refuse(
            "recompute.mode",
            '"budget": it is the compiler that chooses, and train.compile is "off"',
            '"none", "selective", "full"; or train.compile = "blocks"',
        )
