"""The machine of every shipped profile, and of a part alone; what is not known is told or refused."""

from __future__ import annotations

from typing import Any

import pytest

from shardway.errors import UserError
from shardway.hardware.catalogue import load_accelerators, load_links
from shardway.plan.case import RACK_DOMAINS, Machine, machine_of_part, machine_of_site
from shardway.sites.load import list_shipped, load_site
from shardway.sites.schema import CPU, SiteProfile

OPEN = {"laptop", "generic-slurm", "generic-pbs"}
"""Profiles that leave the accelerator to whoever copies them, or to the machine that they are on."""


def profile(**node: Any) -> SiteProfile:
    """A site that says little else."""
    return SiteProfile.model_validate(
        {"format": 1, "name": "here", "title": "Here", "scheduler": "slurm", "node": node}
    )


def check_plausible(machine: Machine) -> None:
    """Between a V100 and what is to come: units that slip are off by eight or a thousand."""
    assert 1 <= machine.per_node <= 16
    assert machine.domain >= machine.per_node
    assert 12 * 10**9 <= machine.memory_bytes <= 400 * 10**9
    assert 10e9 <= machine.link <= 2e12
    assert 1e9 <= machine.peer <= machine.link
    assert 1e9 <= machine.network <= machine.link * 1.01
    assert 50e12 <= machine.peak("bf16") <= 10e15
    assert machine.peak("fp32") <= machine.peak("bf16")
    assert 0 < machine.power_share <= 1
    assert all(told == told.strip() and told for told in machine.assumed)


@pytest.mark.parametrize("name", sorted(set(list_shipped()) - OPEN))
def test_every_shipped_site_with_accelerators_is_a_machine(name: str) -> None:
    site = load_site(name)
    machine = machine_of_site(site)
    check_plausible(machine)
    assert machine.name == name
    assert machine.accelerator.key == site.node.accelerator
    assert machine.per_node == site.node.accelerators_per_node


@pytest.mark.parametrize("name", ["generic-slurm", "generic-pbs"])
def test_a_profile_that_names_no_accelerator_is_refused_in_a_sentence(name: str) -> None:
    with pytest.raises(UserError) as told:
        machine_of_site(load_site(name))
    assert "node.accelerator" in str(told.value)
    assert "names no accelerator" in str(told.value)
    assert "--gpu" in str(told.value)


def test_nodes_without_accelerators_are_refused_in_a_sentence() -> None:
    with pytest.raises(UserError, match='the site "here" names nodes without accelerators'):
        machine_of_site(profile(accelerator=CPU))


def test_how_many_a_node_has_must_be_known() -> None:
    with pytest.raises(UserError, match="does not say how many accelerators a node has"):
        machine_of_site(profile(accelerator="h100-sxm5-80gb"))


def test_what_the_network_has_is_shared_by_the_accelerators_of_a_node() -> None:
    """Perlmutter: four adapters of 200 Gb/s for four A100."""
    site = load_site("perlmutter")
    link = load_links()[str(site.network.link)]
    adapters = int(site.network.adapters_per_node or 0)
    expected = float(link.bandwidth_bytes_per_s or 0) * adapters / int(site.node.accelerators_per_node or 1)
    assert machine_of_site(site).network == pytest.approx(expected)


def test_an_unknown_network_is_assumed_and_told() -> None:
    machine = machine_of_site(profile(accelerator="h100-sxm5-80gb", accelerators_per_node=4))
    assert machine.network == 25e9
    assert any("200 Gb/s for each accelerator" in told for told in machine.assumed)


# --- a part alone


def complete_parts() -> list[str]:
    """Parts whose memory and rates the catalogue knows."""
    return [key for key, part in load_accelerators().items() if part.memory_bytes and part.peak_flops]


@pytest.mark.parametrize("key", complete_parts())
def test_every_complete_part_is_a_machine(key: str) -> None:
    machine = machine_of_part(key)
    assert machine.accelerator.key == key
    assert machine.per_node == 8
    assert machine.domain == RACK_DOMAINS.get(key, 8)
    assert machine.link > 0
    assert machine.assumed
    assert machine.peak("bf16") > 0


@pytest.mark.parametrize(("word", "meant"), [("h1000", "h100-sxm5-80gb"), ("a100-sxm4-80", "a100-sxm4-80gb")])
def test_a_part_that_is_not_known_is_told_with_those_like_it(word: str, meant: str) -> None:
    with pytest.raises(UserError) as told:
        machine_of_part(word)
    assert f'"{word}" is not in the catalogue' in str(told.value)
    assert "did you mean" in str(told.value)
    assert meant in str(told.value)


def test_a_word_that_is_like_no_part_is_told_with_all_of_them() -> None:
    with pytest.raises(UserError) as told:
        machine_of_part("~~~~")
    assert "did you mean" not in str(told.value)
    assert "h100-sxm5-80gb" in str(told.value)
