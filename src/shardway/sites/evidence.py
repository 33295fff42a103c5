"""Which facts of a profile have a source, and which have none.

Invariant: a fact is a key path that the profile itself states ("node.cores", "queues.gpu.max_walltime"); a
source covers the fact it names and every fact below it. This module must not judge whether a source is right.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from shardway.sites.schema import SiteProfile

GENERIC_SITES = ("dgx-slurm", "generic-pbs", "generic-slurm", "laptop")
"""Shipped profiles that describe no particular machine, so that their facts need no source."""

_NOT_FACTS = {"format", "name", "title", "sources"}


def list_facts(profile: SiteProfile) -> tuple[str, ...]:
    """Key paths of everything that the profile states about its site, in the profile's order."""
    stated = profile.model_dump(exclude_unset=True, exclude_none=True, exclude=_NOT_FACTS)
    if "queues" in stated:
        stated["queues"] = {queue["name"]: queue for queue in stated["queues"]}
    return tuple(_leaf_paths(stated))


def list_unsourced(profile: SiteProfile) -> tuple[str, ...]:
    """Facts for which the profile gives no source; empty for a profile that is fit to be shipped."""
    return tuple(fact for fact in list_facts(profile) if not any(_covers(path, fact) for path in profile.sources))


def list_stray_sources(profile: SiteProfile) -> tuple[str, ...]:
    """Keys of `sources` that name no fact of the profile: a misspelt path, or a fact that was removed."""
    facts = list_facts(profile)
    return tuple(path for path in profile.sources if not any(_covers(path, fact) for fact in facts))


def _covers(path: str, fact: str) -> bool:
    return fact == path or fact.startswith(f"{path}.")


def _leaf_paths(table: Mapping[str, Any]) -> Iterator[str]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from (f"{key}.{path}" for path in _leaf_paths(value))
        else:
            yield key
