"""Which facts have a source: on profiles made here, and on every profile that is shipped."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest

from shardway.sites.load import list_shipped, load_site
from shardway.sites.problems import GENERIC_SITES, describe_facts, list_facts, list_stray_sources
from shardway.sites.schema import SiteProfile
from unsourced import list_unsourced

SINFO = {"source": "sinfo", "date": "2026-11-01"}


def profile_with(sources: dict[str, Any]) -> SiteProfile:
    lines = [f'"{path}" = {{ source = "{s["source"]}", date = {s["date"]} }}' for path, s in sources.items()]
    text = """
        format = 1
        name = "mine"
        title = "My machine"
        scheduler = "slurm"
        environment = { A = "1" }
        node = { cores = 4, memory = "1GiB" }
        queues = [{ name = "gpu", max_nodes = 2 }, { name = "gpu-long" }]
        [sources]
    """
    return SiteProfile.model_validate(tomllib.loads("\n".join([text, *lines])))


def test_facts_are_what_the_profile_states_and_nothing_else() -> None:
    assert list_facts(profile_with({})) == (
        "scheduler",
        "node.cores",
        "node.memory",
        "queues.gpu.name",
        "queues.gpu.max_nodes",
        "queues.gpu-long.name",
        "environment.A",
    )


def test_a_source_covers_its_fact_and_those_below() -> None:
    sources = {"scheduler": SINFO, "node": SINFO, "queues.gpu": SINFO, "environment.A": SINFO}
    assert list_unsourced(profile_with(sources)) == ("queues.gpu-long.name",)


def test_the_longest_path_that_covers_a_fact_is_its_source() -> None:
    guide = {"source": "unverified: a guide", "date": "2026-10-01"}
    facts = {fact.path: fact for fact in describe_facts(profile_with({"node": guide, "node.cores": SINFO}))}
    assert [(path, fact.text, fact.is_unsure) for path, fact in facts.items()] == [
        ("scheduler", "slurm", True),
        ("node.cores", "4", False),
        ("node.memory", "1GiB", True),
        ("queues.gpu.name", "gpu", True),
        ("queues.gpu.max_nodes", "2", True),
        ("queues.gpu-long.name", "gpu-long", True),
        ("environment.A", "1", True),
    ]
    assert facts["scheduler"].source is None
    assert str(facts["node.memory"].source.date) == "2026-10-01"  # type: ignore[union-attr]


def test_nothing_is_sourced_by_an_empty_table() -> None:
    assert list_unsourced(profile_with({})) == list_facts(profile_with({}))


@pytest.mark.parametrize("path", ["node.core", "nod", "queues.cpu", "name", "node.cores.more", ""])
def test_a_source_that_names_no_fact_is_stray(path: str) -> None:
    assert list_stray_sources(profile_with({path: SINFO, "node.cores": SINFO})) == (path,)


@pytest.mark.parametrize("name", sorted(set(list_shipped()) - set(GENERIC_SITES)))
def test_every_fact_of_a_shipped_site_has_a_source(name: str) -> None:
    assert list_unsourced(load_site(name)) == ()


@pytest.mark.parametrize("name", sorted(set(list_shipped()) - set(GENERIC_SITES)))
def test_a_source_of_a_shipped_site_is_public_or_says_what_it_is(name: str) -> None:
    # A public address, a document without one, or a plain word that nobody has verified the fact.
    texts = [source.source for source in load_site(name).sources.values()]
    assert [text for text in texts if not any(word in text for word in ("https://", "C-DAC", "unverified"))] == []


def test_a_generic_machine_leaves_unsourced_only_what_its_owner_chooses() -> None:
    assert set(list_unsourced(load_site("dgx-slurm"))) == {"scheduler", "launcher", "container"}


def test_the_generic_profiles_exist() -> None:
    assert set(GENERIC_SITES) <= set(list_shipped())
