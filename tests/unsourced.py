"""Facts of a site profile that have no source; a shipped profile has none of them."""

from __future__ import annotations

from shardway.sites.problems import find_covering, list_facts
from shardway.sites.schema import SiteProfile


def list_unsourced(profile: SiteProfile) -> tuple[str, ...]:
    """Facts for which the profile gives no source; empty for a profile that may be shipped."""
    return tuple(fact for fact in list_facts(profile) if find_covering(fact, profile.sources) is None)
