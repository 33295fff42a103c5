"""The recorded topologies, and texts of nodes that a test makes up."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

from shardway.bench.topology import NodeTopology, PairPath, read_recorded

FOLDER = Path(__file__).parent / "recorded" / "topology"


@cache
def list_sources() -> Mapping[str, Mapping[str, str]]:
    """Name of a recorded topology -> its source, and the driver's name of its devices where the text lacks it."""
    return tomllib.loads((FOLDER / "SOURCES.toml").read_text(encoding="utf-8"))


def read_text(name: str) -> str:
    return (FOLDER / f"{name}.txt").read_text(encoding="utf-8")


@cache
def load(name: str) -> NodeTopology:
    """A recorded node, with its devices' name where it is known."""
    [node] = read_recorded({name: read_text(name)}, list_sources()[name].get("device", ""))
    return node


def with_path(node: NodeTopology, first: int, second: int, path: PairPath) -> NodeTopology:
    """The node with another path between two devices."""
    return replace(node, pairs={**node.pairs, (min(first, second), max(first, second)): path})
