"""The Hugging Face model of a foreign command: found among its words, sized, and held against what the job asks for."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from shardway.launch.submission.command import CommandRead, read_command
from shardway.launch.submission.foreign_model import (
    ForeignTraining,
    describe_foreign_model,
    estimate_least_bytes,
    read_training,
)
from shardway.plan.huggingface import find_named
from shardway.sites.load import load_site

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LLAMA = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _write_config(folder: Path, **keys: object) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**LLAMA, **keys}), encoding="utf-8")


def _read(here: Path, *words: str) -> ForeignTraining:
    training = read_training(read_command(["python", "train.py", *words], here), here)
    assert training is not None
    return training


def _describe(here: Path, gpus: int, *words: str) -> str:
    read = read_command(["python", "train.py", *words], here)
    return describe_foreign_model(read, here, load_site("juwels-booster"), gpus)


# --- which words name a model, and what they say


@pytest.mark.parametrize(
    "words",
    [
        ("--model", "org/big"),
        ("--model_name_or_path=org/big",),
        ("--model-name-or-path", "org/big"),
        ("trainer.model.pretrained_model_name_or_path=org/big",),
    ],
)
def test_a_model_is_named_by_an_option(here: Path, words: tuple[str, ...]) -> None:
    assert _read(here, "--epochs", "3", *words).model == "org/big"


def test_a_word_is_a_model_where_one_is_here(here: Path) -> None:
    _write_config(here / "weights")
    _write_config(here / f"hub/models--org--cached/snapshots/{COMMIT}")
    (here / "hub/models--org--cached/refs").mkdir()
    (here / "hub/models--org--cached/refs/main").write_text(COMMIT)
    assert _read(here, "weights").model == "weights"
    assert _read(here, "org/cached").model == "org/cached"
    for words in (("data/train",), ("--model", "resnet18"), ("--data", "org/other")):
        assert read_training(read_command(["python", "train.py", *words], here), here) is None


def test_a_name_without_an_organisation_is_one_that_is_known(here: Path) -> None:
    _write_config(here / f"hub/models--tiny/snapshots/{COMMIT}")
    (here / "hub/models--tiny/refs").mkdir()
    (here / "hub/models--tiny/refs/main").write_text(COMMIT)
    assert _read(here, "--model", "gpt2").model == "gpt2"
    assert _read(here, "--model", "tiny").model == "tiny"
    assert read_training(read_command(["python", "train.py", "--model", "resnet50"], here), here) is None


def test_settings_files_and_shell_texts_are_read(here: Path) -> None:
    (here / "recipe.yaml").write_text("model_name_or_path: org/big\nmax_length: 4096\nuse_peft: true\nlora_r: 32\n")
    (here / "ds.json").write_text('{"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}')
    training = _read(here, "--config", "recipe.yaml", "--deepspeed", "ds.json", "--max_length", "1024")
    assert (training.model, training.seq_len, training.lora, training.lora_rank) == ("org/big", 1024, True, 32)
    assert (training.sharding, training.offloads) == ("2", True)
    (here / "run.sh").write_text("# --model org/none\naccelerate launch train.py --model org/big --fsdp full_shard\n")
    training = read_training(read_command(["bash", "run.sh"], here), here)  # type: ignore[assignment]
    assert (training.model, training.sharding) == ("org/big", "all")


@pytest.mark.parametrize(
    ("words", "fields"),
    [
        (("--optim", "paged_adamw_8bit"), {"optimizer": "adamw8bit"}),
        (("--torch_dtype", "bfloat16"), {"narrow": True}),
        (("--use_peft", "--load_in_4bit"), {"lora": True, "frozen_bits": 4}),
        (("--use_peft", "false"), {"lora": False}),
        (("--load_in_4bit",), {"lora": False, "frozen_bits": 16}),
        (("--gradient_checkpointing", "False"), {"recompute": False}),
        (("--per_device_train_batch_size", "8"), {"micro_batch": 8}),
        (("--fsdp", "full_shard auto_wrap"), {"sharding": "all"}),
        (("--strategy=ddp",), {"sharding": "none"}),
    ],
)
def test_what_the_words_say_of_the_training(here: Path, words: tuple[str, ...], fields: dict[str, object]) -> None:
    training = _read(here, "--model", "org/big", *words)
    assert {name: getattr(training, name) for name in fields} == fields


# --- what it takes


def test_states_are_sixteen_bytes_a_parameter_shared_by_all() -> None:
    """Weights 4, gradients 4, moments 8 (Rajbhandari et al., arXiv:1910.02054, section 3.1)."""
    model = find_named("llama2-7b")
    training = ForeignTraining(model="m", named_by="model", seq_len=512)
    alone = replace(training, sharding="none")
    states = 16 * model.parameters
    for gpus in (1, 8):
        assert 0 < estimate_least_bytes(model, alone, gpus) - states < 0.05 * states
    assert 0 < estimate_least_bytes(model, training, 8) - states / 8 < 0.2 * states
    narrow = estimate_least_bytes(model, replace(alone, narrow=True), 1)
    assert 0 < narrow - 8 * model.parameters < 0.05 * states
    frozen = estimate_least_bytes(model, replace(alone, lora=True, frozen_bits=4), 1)
    assert 0 < frozen - model.parameters / 2 < 0.05 * states


def test_what_does_not_fit_comes_with_the_least_that_would(here: Path) -> None:
    """7 billion parameters have 108 GB of states; a GPU of the site has 42.9 GB, a node four."""
    line = _describe(here, 1, "--model", "meta-llama/Llama-2-7b-hf")
    assert "was not sized" in line  # the name known by the planner is llama2-7b
    _write_config(here / "llama")
    line = _describe(here, 1, "--model", "llama")
    assert line.startswith(
        "if this trains llama (model), it does not fit 1 x NVIDIA A100 SXM4 40 GB (40GiB): at least 10"
    )
    assert "the least that would do is 4 of them: site.nodes=1;" in line
    line = _describe(here, 4, "--model", "llama")
    assert "it fits 4 x NVIDIA A100 SXM4 40 GB (40GiB) only if they share its states (FSDP, ZeRO-3)" in line
    assert "it takes at least" in _describe(here, 4, "--model", "llama", "--fsdp", "full_shard")
    assert "no number of them would do: GPUs with more memory" in _describe(here, 4, "--model", "llama", "ddp")
    assert "it takes at least" in _describe(here, 1, "--model", "llama", "--use_peft")


def test_a_job_of_several_nodes(here: Path) -> None:
    line = _describe(here, 4, "--model", "Qwen/Qwen3-32B")
    assert "the least that would do is 16 of them: site.nodes=4; counted" in line
    assert line.endswith("sizes of qwen3-32b")


def test_what_is_not_here_is_not_fetched(here: Path) -> None:
    assert _describe(here, 4, "--model", "org/unknown") == (
        "org/unknown (model) was not sized: its config.json is not in the cache of this machine, and nothing is "
        "downloaded here; before the job: `shardway prefetch --model org/unknown`"
    )
    _write_config(here / "odd", model_type="of-tomorrow")
    line = _describe(here, 4, "--model", "odd")
    assert 'its family "of-tomorrow" is not among those that the planner knows by itself; `shardway plan odd`' in line


def test_no_model_or_no_gpus_is_no_line(here: Path) -> None:
    assert _describe(here, 4, "--lr", "1e-3") == ""
    assert _describe(here, 0, "--model", "org/big") == ""
    read: CommandRead = read_command(["python", "train.py", "--model", "org/big"], here)
    assert describe_foreign_model(read, here, load_site("laptop"), 1) == ""
