"""`shardway config show --mesh`: as many ranks as the words say, on nodes of the size that they or the site say."""

from __future__ import annotations

import json
from pathlib import Path

from command_line import Shardway

from shardway.layout import AXES, Layout
from shardway.plan.placement import place_mesh, render_placement

SITE = """
format = 1
name = "lab"
title = "A lab"
scheduler = "slurm"
node = {accelerator = "a100-sxm4-40gb", accelerators_per_node = 4}
"""


def picture(per_node: int, **degrees: int) -> str:
    return render_placement(place_mesh(Layout({axis: degrees.get(axis, 1) for axis in AXES}), per_node))


def test_one_rank_is_the_default(shardway: Shardway) -> None:
    ended = shardway("config", "show", "--mesh")
    assert (ended.code, ended.out, ended.err) == (0, picture(1), "")


def test_nodes_of_as_many_ranks_as_nproc_says(shardway: Shardway) -> None:
    ended = shardway("config", "show", "--mesh", "--nodes", "2", "--nproc", "8", "parallel.tp=4")
    assert (ended.code, ended.out) == (0, picture(8, tp=4, dp_replicate=4))


def test_nodes_of_as_many_ranks_as_the_site_has_devices(shardway: Shardway, tmp_path: Path) -> None:
    (tmp_path / "lab.toml").write_text(SITE)
    ended = shardway("config", "show", "--mesh", "--nodes", "3", "site.name=./lab.toml", "parallel.dp_shard=4")
    assert (ended.code, ended.out, ended.err) == (0, picture(4, dp_shard=4, dp_replicate=3), "")


def test_a_site_without_devices_asks_for_nproc(shardway: Shardway) -> None:
    ended = shardway("config", "show", "--mesh", "--nodes", "2", "site.name=generic-slurm")
    assert (ended.code, ended.out) == (2, "")
    assert '"generic-slurm" names no accelerators of a node' in ended.err
    assert "--nproc" in ended.err


def test_nodes_count_for_the_resolved_run_too(shardway: Shardway) -> None:
    ended = shardway("config", "show", "--nodes", "2", "--nproc", "3")
    assert "dp_replicate = 6" in ended.out


def test_the_mesh_as_json(shardway: Shardway) -> None:
    ended = shardway("config", "show", "--mesh", "--json", "--nproc", "4", "parallel.tp=2")
    facts = json.loads(ended.out)
    assert (facts["ranks"], facts["nodes"]) == (4, 1)
    assert facts["dims"]["tp"]["groups"] == [[0, 1], [2, 3]]
