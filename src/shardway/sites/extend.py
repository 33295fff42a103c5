"""A profile and the one that it extends, as one table.

Invariant: what the child states holds; a fact that the child changes loses the source that the parent had for it, so
that no source vouches for a value that it never gave. This module must not judge a value: what is wrong in a table
stays there for the schema to report.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardway.sites.evidence import find_covering, list_stated

_OWN_KEYS = ("extends", "replaces")
"""What a profile says of itself, and does not hand down."""


def merge_tables(parent: Mapping[str, Any], child: Mapping[str, Any]) -> dict[str, Any]:
    """The child over its parent: tables key by key, queues by their name, lists and values replaced."""
    inherited = {key: value for key, value in parent.items() if key not in (*_OWN_KEYS, "sources")}
    merged = _merge(inherited, {key: value for key, value in child.items() if key != "sources"})
    if "queues" in parent and "queues" in child:
        merged["queues"] = _merge_queues(parent["queues"], child["queues"])
    sources = child.get("sources", {})
    kept = _keep_sources(parent, child)
    if kept or "sources" in child:
        merged["sources"] = {**kept, **sources} if isinstance(sources, Mapping) else sources
    return merged


def _merge(parent: Mapping[str, Any], child: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(parent)
    for key, value in child.items():
        before = merged.get(key)
        both = isinstance(before, Mapping) and isinstance(value, Mapping)
        merged[key] = _merge(before, value) if both else value  # type: ignore[arg-type]
    return merged


def _merge_queues(parent: Any, child: Any) -> Any:
    """Queues of the parent, each with what the child says of it, then those that are the child's alone."""
    if not _are_tables(parent) or not _are_tables(child):
        return child
    names = [queue["name"] for queue in parent]
    changes = {queue["name"]: queue for queue in child if queue.get("name") in names}
    merged = [_merge(queue, changes.get(queue["name"], {})) for queue in parent]
    return [*merged, *(queue for queue in child if queue.get("name") not in names)]


def _are_tables(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(entry, Mapping) for entry in value)


def _keep_sources(parent: Mapping[str, Any], child: Mapping[str, Any]) -> dict[str, Any]:
    """A source for each fact of the parent that still holds: one a fact, since a common one could cover others now."""
    sources = parent.get("sources", {})
    before, after = list_stated(parent), list_stated(child)
    changed = {fact for fact, value in after.items() if fact not in before or before[fact] != value}
    # A table that the child puts in the place of a value, or a value in that of a table, changes what is below it.
    lost = changed | {fact for fact in before if find_covering(fact, changed) is not None}
    covering = {fact: find_covering(fact, sources) for fact in before if fact not in lost}
    return {fact: sources[path] for fact, path in covering.items() if path is not None}
