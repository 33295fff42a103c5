"""The examples: the default run file says what the defaults are, and each of them resolves."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardway.resolve.request import ResolveRequest, resolve_request

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_the_default_example_is_the_default_run() -> None:
    example = resolve_request(ResolveRequest(EXAMPLES / "default.toml")).resolved
    assert example.values == resolve_request(ResolveRequest()).resolved.values


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.stem)
def test_an_example_resolves_and_says_where_its_data_comes_from(path: Path) -> None:
    resolved = resolve_request(ResolveRequest(path)).resolved
    assert resolved.values.run.name == path.stem
    assert "# Data: " in path.read_text(encoding="utf-8")
