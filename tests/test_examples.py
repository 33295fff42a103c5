"""The examples: the default run file says what the defaults are, and each of them resolves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardway.resolve.request import ResolveRequest, resolve_request

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_the_default_example_is_the_default_run() -> None:
    example = resolve_request(ResolveRequest(EXAMPLES / "default.toml")).resolved
    assert example.values == resolve_request(ResolveRequest()).resolved.values


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.stem)
def test_an_example_resolves_and_says_where_its_data_comes_from(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    base = tmp_path / "models" / "base"  # what lora.toml adapts
    base.mkdir(parents=True)
    sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    config = {"model_type": "llama", "max_position_embeddings": 512, **dict.fromkeys(sizes, 16), "head_dim": 4}
    (base / "config.json").write_text(json.dumps(config), encoding="utf-8")
    resolved = resolve_request(ResolveRequest(path)).resolved
    assert resolved.values.run.name == path.stem
    assert "# Data: " in path.read_text(encoding="utf-8")
