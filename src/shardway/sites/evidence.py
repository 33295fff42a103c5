"""Which facts of a profile have a source, and which have none.

Invariant: a fact is a key path that the profile itself states ("node.cores", "queues.gpu.max_walltime"); a source
covers the fact it names and every fact below it, and the longest path that covers a fact is its source. Whether a
source is right is not judged.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from shardway.sites.schema import FactSource, SiteProfile
from shardway.units import render_bytes, render_seconds

GENERIC_SITES = ("dgx-slurm", "generic-pbs", "generic-slurm", "laptop")
"""Shipped profiles that describe no particular machine, so that their facts need no source."""

_NOT_FACTS = {"format", "name", "title", "extends", "replaces", "sources"}


@dataclass(frozen=True)
class SiteFact:
    """One thing that a profile states. `value` is in bytes or seconds where it is a size or a time; `source` is None
    where the profile gives none."""

    path: str
    value: Any
    source: FactSource | None

    @property
    def is_unsure(self) -> bool:
        """Whether the fact is unverified: it has no source, or one that states so."""
        return self.source is None or self.source.is_unsure

    @property
    def text(self) -> str:
        """The value for people: "480GiB", "1d", "yes"."""
        return _render_value(self.path, self.value)


def list_facts(profile: SiteProfile) -> tuple[str, ...]:
    """Key paths of everything that the profile states about its site, in the profile's order."""
    return tuple(_list_values(profile))


def describe_facts(profile: SiteProfile) -> tuple[SiteFact, ...]:
    """Everything that the profile states about its site, each with its source."""
    return tuple(
        SiteFact(path, value, _find_source(path, profile.sources)) for path, value in _list_values(profile).items()
    )


def list_stray_sources(profile: SiteProfile) -> tuple[str, ...]:
    """Keys of `sources` that name no fact of the profile: a misspelt path, or a fact that was removed."""
    facts = list_facts(profile)
    return tuple(path for path in profile.sources if not any(_covers(path, fact) for fact in facts))


def list_stated(table: Mapping[str, Any]) -> dict[str, Any]:
    """Key path -> value of every fact in the table of a profile, checked or not."""
    stated = {key: value for key, value in table.items() if key not in _NOT_FACTS}
    queues = stated.get("queues")
    if isinstance(queues, list | tuple):
        tables = [queue for queue in queues if isinstance(queue, Mapping) and "name" in queue]
        stated["queues"] = {str(queue["name"]): queue for queue in tables}
    return dict(_leaves(stated))


def find_covering(fact: str, paths: Iterable[str]) -> str | None:
    """The longest of the key paths that names the fact or something above it."""
    return max((path for path in paths if _covers(path, fact)), key=len, default=None)


def _find_source(fact: str, sources: Mapping[str, FactSource]) -> FactSource | None:
    covering = find_covering(fact, sources)
    return None if covering is None else sources[covering]


def _list_values(profile: SiteProfile) -> dict[str, Any]:
    return list_stated(profile.model_dump(exclude_unset=True, exclude_none=True, exclude=_NOT_FACTS))


def _covers(path: str, fact: str) -> bool:
    return fact == path or fact.startswith(f"{path}.")


def _leaves(table: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from ((f"{key}.{path}", leaf) for path, leaf in _leaves(value))
        else:
            yield key, value


def _render_value(path: str, value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    if path == "node.memory":
        return render_bytes(value)
    if path.endswith("_walltime") and isinstance(value, int | float):
        return render_seconds(value)
    return str(value).strip()
