"""Whole resolved runs: of every example as golden files, and any of them runs again as it stands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from golden_files import Golden, golden_names
from shardway.errors import UserError
from shardway.resolve import Circumstances, DataFacts, Resolved, resolve, resolve_with_data
from shardway.resolve.draft import applies
from shardway.runfile.load import LoadedRunFile, load_run, render_value
from shardway.runfile.schema import RunFile, all_keys

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.toml"))
WORLDS = (1, 2, 4)
TEXT = DataFacts(samples=1000, tokens_per_sample=128, vocab=256)


def on(ranks: int) -> Circumstances:
    """A machine of eight cores without accelerators, all ranks on it."""
    return Circumstances(ranks=ranks, ranks_per_node=ranks, usable_cores=8)


@pytest.mark.parametrize("ranks", WORLDS)
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_examples_resolve_as_before(path: Path, ranks: int, golden: Golden) -> None:
    golden(resolve(load_run(path), on(ranks)).render(), f"resolved/{path.stem}-{ranks}.toml")


def test_no_resolved_run_is_left_over() -> None:
    assert golden_names("resolved") == {f"{path.stem}-{ranks}.toml" for path in EXAMPLES for ranks in WORLDS}


def test_the_default_example_is_the_default_run() -> None:
    example = next(path for path in EXAMPLES if path.name == "default.toml")
    assert load_run(example).values == RunFile()
    assert resolve(load_run(example), on(2)).values == resolve(load_run(None), on(2)).values


def again(folder: Path, resolved: Resolved) -> LoadedRunFile:
    path = folder / "resolved.toml"
    path.write_text(resolved.render(), encoding="utf-8")
    return load_run(path)


def effective(values: RunFile) -> dict[str, Any]:
    """The keys that have an effect, with their values."""
    tables = values.model_dump(mode="json")
    return {key: tables[key.split(".")[0]][key.split(".")[1]] for key in all_keys() if applies(key, values)}


@pytest.mark.parametrize("ranks", WORLDS)
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_a_resolved_example_runs_again(path: Path, ranks: int, tmp_path: Path) -> None:
    resolved = resolve(load_run(path), on(ranks))
    second = resolve(again(tmp_path, resolved), on(ranks))
    assert effective(second.values) == effective(resolved.values)
    assert second.derived == resolved.derived


def test_a_resolved_run_with_its_data_runs_again(tmp_path: Path) -> None:
    resolved = resolve_with_data(resolve(load_run(None, ["train.steps=75"]), on(1)), TEXT)
    second = resolve_with_data(resolve(again(tmp_path, resolved), on(1)), TEXT)
    assert effective(second.values) == effective(resolved.values)
    assert second.derived == resolved.derived


POWERS = st.sampled_from([1, 2, 4, 8])
CHOICES: dict[str, st.SearchStrategy[Any]] = {
    "model.dim": st.sampled_from([16, 64, 96]),
    "model.heads": POWERS,
    "model.kv_heads": st.sampled_from(["auto", 1, 2]),
    "model.activation": st.sampled_from(["swiglu", "gelu"]),
    "model.vocab": st.sampled_from(["auto", 300]),
    "data.kind": st.sampled_from(["text", "synthetic"]),
    "data.include": st.sampled_from(["*.py", 'a"b', "é\u2028\\"]),
    "train.steps": st.sampled_from(["75 steps", "3 epochs", "1e6 tokens"]),
    "train.global_batch": st.integers(1, 64),
    "train.micro_batch": st.sampled_from(["auto", 1, 3]),
    "optim.name": st.sampled_from(["adamw", "sgd"]),
    "optim.momentum": st.floats(0.0, 1.0),
    "optim.schedule": st.sampled_from(["cosine", "wsd", "constant"]),
    "optim.decay": st.sampled_from(["10 steps", "0.1 epochs"]),
    "optim.lr": st.floats(1e-9, 1e3),
    "optim.clip": st.sampled_from(["off", 0.5]),
    "optim.lr_scaling": st.sampled_from(["none", "linear"]),
    "parallel.dp_replicate": st.sampled_from(["auto", 1, 2]),
    "parallel.dp_shard": st.sampled_from(["auto", 1, 2]),
    "checkpoint.every": st.sampled_from(["off", "10min", "1.5 epochs"]),
    "run.stop_timeout": st.sampled_from(["20m", "1h0.5s"]),
    "run.name": st.text(st.characters(codec="utf-8"), min_size=1, max_size=5),
}


@given(st.fixed_dictionaries({}, optional=CHOICES), st.sampled_from(WORLDS))
@settings(max_examples=60)
def test_any_resolved_run_runs_again(
    tmp_path_factory: pytest.TempPathFactory, values: dict[str, Any], ranks: int
) -> None:
    try:
        resolved = resolve(load_run(None, [f"{key}={render_value(value)}" for key, value in values.items()]), on(ranks))
    except UserError:
        return
    second = resolve(again(tmp_path_factory.getbasetemp(), resolved), on(ranks))
    assert effective(second.values) == effective(resolved.values)
    assert second.derived == resolved.derived
    assert second.render().replace("\n", "").count("derived: ") == 0
