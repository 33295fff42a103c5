"""Counts of the library: between lengths, on disk, and what is said where nothing is kept."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardway.errors import UserError
from shardway.plan import counted
from shardway.plan.counted import CountedModel, CountedUnit, counted_from_json, digest_of_config, find_counted
from shardway.plan.huggingface import find_shape
from shardway.plan.shapes import measured_from_json

BLOCK = CountedUnit(
    name="layers.0 to layers.3",
    count=4,
    parameters=10,
    forward_flops=(30.0, 80.0, 150.0),  # of length n / 8: n^2 + 2n over 1, 2 ... times 10
    saved_bytes=(8.0, 16.0, 24.0),
    fixed_bytes=(1.0, 1.0, 1.0),
)
REST = CountedUnit(name="rest", parameters=7, forward_flops=(4.0,) * 3, saved_bytes=(0.0,) * 3, fixed_bytes=(0.0,) * 3)
COUNT = CountedModel(
    model="SomeForCausalLM",
    library="transformers 5.0.0",
    takes="input_ids int64 [1, 8]",
    longest=64,
    learned=False,
    lengths=(8, 16, 24),
    units=(BLOCK, REST),
    value_bytes=2,
)
CONFIG = {"model_type": "some", "hidden_size": 8}


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of kept counts, on a machine without the libraries."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(counted, "find_library", lambda: None)
    folder = tmp_path / "shardway" / "shapes"
    folder.mkdir(parents=True)
    return folder


def keep(folder: Path, count: CountedModel, version: str, config: Any = CONFIG) -> None:
    (folder / f"{digest_of_config(config)}-{version}.json").write_text(count.to_json(), encoding="utf-8")


def test_another_length_follows_from_three() -> None:
    found = COUNT.at_length("some", 80)
    assert [unit.name for unit in found.units] == ["layers.0 to layers.3", "rest"]
    assert found.units[0].forward_flops == 10 * (10**2 + 2 * 10)
    assert (found.units[0].saved_bytes, found.units[0].fixed_bytes) == (80.0, 1.0)
    assert found.units[1].forward_flops == 4.0
    assert (found.parameters, COUNT.parameters, found.value_bytes) == (47, 47, 2)
    assert found.source == "counted by transformers 5.0.0 as SomeForCausalLM, for samples of 80 tokens"


def test_a_token_meets_parameters_and_no_scores() -> None:
    """10 n^2 + 20 n over n / 8 and four layers of 10 parameters: products are 2.5 a token, scores are none."""
    assert COUNT.at_length("some", 80).active == 7 + 4 * 1
    wide = replace(BLOCK, forward_flops=(200.0, 440.0, 720.0))  # 20 n^2 + 180 n: 22.5 a token
    assert replace(COUNT, units=(wide, REST)).at_length("some", 800).active == 7 + 4 * 10
    table = replace(REST, name="embeddings", forward_flops=(0.0, 0.0, 0.0))
    assert replace(COUNT, units=(BLOCK, table)).at_length("some", 8).active == 7 + 4 * 1
    found = COUNT.at_length("some", 80)
    assert measured_from_json(found.to_json()).active == found.active == found.estimate_active(80)
    assert replace(found, active=0).estimate_active(80) == min(47, round(found.forward_flops_per_sample / 160))


def test_a_model_without_a_length_has_one_count() -> None:
    unit = replace(BLOCK, forward_flops=(5.0,), saved_bytes=(3.0,), fixed_bytes=(0.0,))
    images = replace(COUNT, lengths=(), units=(unit,), takes="pixel_values bfloat16 [1, 3, 8, 8]")
    found = images.at_length("some", 0)
    assert found.forward_flops_per_sample == 20.0
    assert found.source.endswith("for samples of pixel_values bfloat16 [1, 3, 8, 8]")


def test_a_forward_pass_that_was_not_followed_is_not_planned() -> None:
    with pytest.raises(
        UserError, match=r"some has 47 parameters .* numbers: it looks at values\n  To do: give its inp"
    ):
        replace(COUNT, failure="it looks at values").at_length("some", 8)


def test_a_file_is_read_back_and_what_is_none_is_not() -> None:
    assert counted_from_json(COUNT.to_json()) == COUNT
    old = counted.FORMAT - 1
    table = json.loads(COUNT.to_json())
    for broken in (
        "",
        "[]",
        "{}",
        '{"format": 1}',
        json.dumps({**table, "format": old}),
        json.dumps({**table, "lengths": [0, 0, 0]}),
        json.dumps({**table, "x": 1}),
    ):
        assert counted_from_json(broken) is None


def test_without_the_libraries_the_newest_count_of_the_config_is_used(kept: Path) -> None:
    with pytest.raises(UserError, match=r'layers of a "some" by itself'):
        find_counted(CONFIG, "m", print)
    for version in ("5.9.1", "5.23.0", "4.57.0"):
        keep(kept, replace(COUNT, library=f"transformers {version}"), version)
    assert find_counted(CONFIG, "m", print).library == "transformers 5.23.0"
    assert find_counted({**CONFIG, "transformers_version": "4.0"}, "m", print).library == "transformers 5.23.0"
    with pytest.raises(UserError, match="by itself"):
        find_counted({**CONFIG, "hidden_size": 16}, "m", print)
    (kept / f"{digest_of_config(CONFIG)}-5.23.0.json").write_text("torn", encoding="utf-8")
    assert find_counted(CONFIG, "m", print).library == "transformers 5.9.1"


def test_with_the_libraries_a_count_of_another_version_is_not_used(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counted, "find_library", lambda: "5.23.0")
    monkeypatch.setattr(counted, "_ask_child", lambda *_: COUNT)
    keep(kept, replace(COUNT, longest=1), "5.9.1")
    said: list[str] = []
    assert find_counted(CONFIG, "m", said.append) == COUNT
    assert find_counted(CONFIG, "m", said.append) == COUNT
    assert said == ["m is counted with transformers 5.23.0, once"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"num_hidden_layers": 10**9},
            "num_hidden_layers: 1000000000 is no size\n      allowed: an integer, 1 to 100,000",
        ),
        ({"num_hidden_layers": 0}, "num_hidden_layers: 0 is no size"),
        ({"num_hidden_layers": -1}, "num_hidden_layers: -1 is no size"),
        ({"intermediate_size": 0}, "intermediate_size: 0 is no size"),
        ({"vocab_size": 0}, "vocab_size: 0 is no size"),
        ({"model_type": "some", "n_layers": 10**9}, "n_layers: 1000000000 is no size\n      allowed: an integer, 0 to"),
        ({"model_type": "some", "text_config": {"n_layer": 10**6}}, "text_config.n_layer: 1000000 is no size"),
    ],
)
def test_sizes_that_no_model_has_are_not_counted(
    changes: dict[str, Any], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library builds a billion layers for hours, and 0 or -1 of them as none."""
    monkeypatch.setattr(counted, "find_library", lambda: "5.23.0")
    monkeypatch.setattr(counted, "_ask_child", lambda *_: pytest.fail("the library was asked"))
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 8}
    config = {"model_type": "llama", "vocab_size": 8, **sizes, **changes}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(UserError) as refused:
        find_shape(str(tmp_path))
    assert says in str(refused.value)


def test_a_part_that_an_unknown_family_leaves_out_is_counted(kept: Path, tmp_path: Path) -> None:
    config = {"model_type": "some", "num_decoder_layers": 0}
    keep(kept, COUNT, "5.0.0", config)
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert find_shape(str(tmp_path)) == COUNT


def test_a_known_family_with_a_head_of_its_own_is_counted(kept: Path, tmp_path: Path) -> None:
    """And where it cannot be, both reasons are given."""
    folder = tmp_path / "m"
    folder.mkdir()
    config = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, "vocab_size": 100}
    config["architectures"] = ["GPT2DoubleHeadsModel"]
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(UserError) as told:
        find_shape(str(folder))
    assert 'architectures: "GPT2DoubleHeadsModel" has a head whose sizes are not known' in str(told.value)
    assert "To do: run this once where they are" in str(told.value)
    keep(kept, COUNT, "5.23.0", config)
    assert find_shape(str(folder)) == COUNT


GPT2: dict[str, Any] = {"model_type": "gpt2", "n_embd": 256, "n_layer": 2, "n_head": 4, "n_positions": 1024}
BERT: dict[str, Any] = {"model_type": "bert", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
BERT |= {"num_attention_heads": 4, "max_position_embeddings": 512, "is_decoder": True}


@pytest.mark.parametrize(("config", "parameters"), [(GPT2, 2_625_536), (BERT, 2_036_968)], ids=["gpt2", "bert"])
def test_cross_attention_that_a_config_adds_is_counted_by_the_library(
    config: dict[str, Any], parameters: int, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shardway.models.huggingface.count import count_config

    monkeypatch.setattr(counted, "find_library", lambda: "5.23.0")
    monkeypatch.setattr(counted, "_ask_child", lambda config, _: count_config(config))
    folder = kept.parent / "cross"
    folder.mkdir()
    keys = {**config, "vocab_size": 1000, "add_cross_attention": True}
    (folder / "config.json").write_text(json.dumps(keys), encoding="utf-8")
    found = find_shape(str(folder))
    assert isinstance(found, CountedModel)
    assert (found.parameters, found.failure) == (parameters, "")
