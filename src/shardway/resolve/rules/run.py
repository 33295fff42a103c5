"""Rules of the process: name, device, threads, timeouts.

Invariant: a rule derives what was left open or refuses; it never changes what the user set. This module must not
read files or look at the machine.
"""

from __future__ import annotations

from shardway.resolve.draft import Draft, Rule
from shardway.units import render_seconds


def a_run_without_a_name_is_called_after_its_file(name: str) -> Rule:
    """Bound to the file's name, which is no key."""

    def rule(draft: Draft) -> None:
        if draft.get("run.name") == "auto":
            draft.derive("run.name", name, "name of the run file")

    return rule


def a_run_uses_the_accelerator_where_there_is_one(draft: Draft) -> None:
    accelerators = draft.circumstances.accelerators
    if draft.get("run.device") == "auto":
        found = f"{accelerators} accelerators found" if accelerators else "no accelerator found"
        draft.derive("run.device", "cuda" if accelerators else "cpu", found)
    elif draft.get("run.device") == "cuda" and not accelerators:
        draft.refuse("run.device", '"cuda" is asked for and this machine shows no accelerator', '"auto" or "cpu"')


def ranks_of_a_node_share_its_cores(draft: Draft) -> None:
    if draft.get("run.threads") == "auto":
        facts = draft.circumstances
        threads = max(1, facts.usable_cores // facts.ranks_per_node)
        draft.derive("run.threads", threads, f"{facts.usable_cores} cores / {facts.ranks_per_node} ranks on a node")


def timeouts_are_nested(draft: Draft) -> None:
    """The innermost timer must ring first, since only it can name the operation that hangs."""
    collective = draft.get("run.collective_timeout")
    for outer in ("run.start_timeout", "run.stop_timeout"):
        if draft.get(outer) <= collective:
            draft.refuse(
                "run.collective_timeout",
                f"{render_seconds(collective)} is not shorter than {outer} = {render_seconds(draft.get(outer))}, so a "
                "hanging collective would be ended before it can say which operation hangs",
                f"less than {render_seconds(draft.get(outer))}",
                f"lower run.collective_timeout or raise {outer}",
            )


def a_job_has_as_many_nodes_as_the_run_may(draft: Draft) -> None:
    elastic, nodes = draft.get("run.elastic"), draft.get("site.nodes")
    if elastic != "off" and not elastic[0] <= nodes <= elastic[1]:
        draft.refuse(
            "run.elastic",
            f"{elastic} leaves out site.nodes = {nodes}",
            f"a range with {nodes} in it",
            f"set site.nodes to {elastic[0]} to {elastic[1]}, or widen run.elastic",
        )
