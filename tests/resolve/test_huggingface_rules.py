"""What model.hf settles from a config.json, and what cannot go with it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from resolving import refusal_of, resolve_words, value_of

from shardway.hfconfig import ModelFacts
from shardway.resolve.draft import SHAPE_KEYS, applies

DENSE = ModelFacts(
    family="qwen3",
    vocab=151936,
    dim=1000,
    layers=28,
    heads=16,
    kv_heads=8,
    head_dim=128,
    ffn_dim=3072,
    max_positions=4096,
    tied=True,
    tokenizer="/models/qwen3/tokenizer.json",
)
MIXTURE = replace(DENSE, experts=64, experts_per_token=8, expert_dim=768, tied=False)
HF = ("model.hf=org/name", "data.kind=synthetic")
TEXT = ("model.hf=org/name", "data.validation=x")


@pytest.mark.parametrize("facts", [DENSE, MIXTURE])
def test_the_shape_is_that_of_the_config(facts: ModelFacts) -> None:
    resolved = resolve_words(*HF, hf=facts)
    for name in ("vocab", "dim", "layers", "heads", "kv_heads", "head_dim", "ffn_dim", "tied", "experts"):
        assert value_of(resolved, f"model.{name}") == getattr(facts, name)
    assert resolved.origins["model.dim"] == "derived: config.json of org/name"
    if facts.experts:
        assert value_of(resolved, "model.experts_per_token") == 8
        assert value_of(resolved, "model.expert_dim") == 768


def test_a_resolved_run_file_runs_again() -> None:
    """What the config says is not written down, since it may not be set."""
    text = resolve_words(*HF, hf=MIXTURE).render()
    assert 'hf = "org/name"' in text
    assert not any(f"\n{name} = " in text.partition("[data]")[0] for name in SHAPE_KEYS)


def test_keys_of_a_shape_apply_without_a_model_of_the_hub_alone() -> None:
    with_hf, without = resolve_words(*HF, hf=DENSE).values, resolve_words("data.kind=synthetic").values
    assert applies("model.dim", without)
    assert not any(applies(f"model.{name}", with_hf) for name in SHAPE_KEYS)


@pytest.mark.parametrize(
    ("words", "facts", "told"),
    [
        (
            (*HF, "model.dim=64"),
            DENSE,
            '  model.dim (command line): has no effect with model.hf = "org/name", whose config.json says it\n'
            "      allowed: only without model.hf\n"
            "      to do: remove the key",
        ),
        (
            (*HF, "model.dropout=0.1"),
            None,
            '  model.dropout (command line): has no effect with model.hf = "org/name", whose config.json says it\n'
            "      allowed: only without model.hf\n"
            "      to do: remove the key",
        ),
        (
            (*HF, "model.kind=mlp"),
            None,
            '  model.kind (command line): "mlp" is another model than model.hf = "org/name"\n'
            "      allowed: one of the two\n"
            "      to do: remove one of them",
        ),
        (
            ("model.hf_weights=false",),
            None,
            "  model.hf_weights (command line): has no effect without model.hf\n"
            "      allowed: only with model.hf\n"
            "      to do: remove the key",
        ),
        (
            (*HF, "data.seq_len=8192"),
            DENSE,
            "  data.seq_len (command line): 8192 is more than the 4096 positions that the model knows\n"
            "      allowed: at most 4096",
        ),
        (
            TEXT,
            replace(DENSE, tokenizer=""),
            '  data.tokenizer (default): "bytes" is not what the model was trained with, and there is no '
            "tokenizer.json beside its config\n"
            '      allowed: a tokenizer.json or .model file; "bytes" where that is meant',
        ),
    ],
)
def test_what_cannot_go_with_it_is_refused(words: tuple[str, ...], facts: ModelFacts | None, told: str) -> None:
    assert refusal_of(*words, hf=facts) == f"1 problem in the run\n{told}"


def test_text_is_read_with_the_tokenizer_of_the_model() -> None:
    resolved = resolve_words(*TEXT, hf=DENSE)
    assert value_of(resolved, "data.tokenizer") == "/models/qwen3/tokenizer.json"
    assert resolved.origins["data.tokenizer"] == "derived: tokenizer of org/name"
    assert value_of(resolve_words(*TEXT, "data.tokenizer=bytes", hf=DENSE), "data.tokenizer") == "bytes"


def test_a_token_file_has_the_vocabulary_of_the_config() -> None:
    resolved = resolve_words("model.hf=org/name", "data.kind=tokens", "data.path=x.bin", hf=DENSE)
    assert value_of(resolved, "model.vocab") == 151936


def test_without_facts_nothing_is_derived() -> None:
    assert value_of(resolve_words(*HF), "model.dim") == 128


def test_what_splits_it_is_told_without_keys_that_its_config_decides() -> None:
    assert refusal_of(*HF, "parallel.pp=2", "data.seq_len=128", hf=DENSE, ranks=2) == (
        "1 problem in the run\n"
        "  parallel.pp (command line): 2: the output layer of org/name is its embedding, which would be in two stages\n"
        "      allowed: 1\n"
        "      to do: split over parallel.dp_shard or parallel.tp"
    )
    odd = replace(DENSE, vocab=151935, tied=False)
    assert refusal_of(*HF, "parallel.tp=2", "data.seq_len=128", hf=odd, ranks=2) == (
        "1 problem in the run\n"
        "  parallel.tp (command line): 2 does not divide model.vocab = 151935\n"
        "      allowed: a divisor of it, such as 1"
    )


# --- adapters

LORA = (*HF, "model.adapter=lora")


def test_the_factor_of_an_adapter_follows_its_rank() -> None:
    resolved = resolve_words(*LORA, "model.lora_rank=8", hf=DENSE)
    assert value_of(resolved, "model.lora_alpha") == 16.0
    assert resolved.origins["model.lora_alpha"] == "derived: 2 x lora_rank"
    assert value_of(resolve_words(*LORA, "model.lora_alpha=3.0", hf=DENSE), "model.lora_alpha") == 3.0


@pytest.mark.parametrize("words", [("parallel.dp_shard=2",), ("parallel.cp=2",), ("parallel.dp_replicate=2",)])
def test_an_adapter_is_split_like_data(words: tuple[str, ...]) -> None:
    assert value_of(resolve_words(*LORA, *words, hf=DENSE, ranks=2), "model.adapter") == "lora"


@pytest.mark.parametrize(
    ("words", "circumstances", "told"),
    [
        (
            ("model.adapter=lora",),
            {},
            '  model.adapter (command line): "lora" leaves the weights of a model as they are, and a reference model '
            "has none to start from\n"
            '      allowed: "none"; or model.hf\n'
            "      to do: name a model in model.hf; `shardway checkpoint export` writes one of a run's own transformer",
        ),
        (
            ("model.adapter=lora",),
            {"own_model": True},
            '  model.adapter (command line): "lora": a script brings its own model\n'
            '      allowed: "none"\n'
            "      to do: call peft.get_peft_model(model, config) in the script, and give run.shard what it returns",
        ),
        (
            (*LORA, f"model.lora_rank={DENSE.dim + 1}"),
            {"hf": DENSE},
            f"  model.lora_rank (command line): {DENSE.dim + 1} is more than {DENSE.dim}, the width of "
            f"{HF[0].partition('=')[2]}: no layer there has such a rank\n"
            f"      allowed: 1 to {DENSE.dim}",
        ),
        (
            (*LORA, "parallel.tp=2"),
            {"ranks": 2, "hf": DENSE},
            '  parallel.tp (command line): 2: model.adapter = "lora" does not cut its matrices with those of their '
            "layers\n"
            "      allowed: 1\n"
            "      to do: split over parallel.dp_replicate, parallel.dp_shard or parallel.cp",
        ),
        (
            (*LORA, "parallel.pp=2"),
            {"ranks": 2, "hf": replace(DENSE, tied=False)},
            '  parallel.pp (command line): 2: model.adapter = "lora" is not cut into stages\n'
            "      allowed: 1\n"
            "      to do: split over parallel.dp_replicate, parallel.dp_shard or parallel.cp",
        ),
        (
            (*LORA, "train.engine=deepspeed"),
            {"hf": DENSE},
            '  train.engine (command line): "deepspeed": its files of a checkpoint would hold the frozen weights of '
            'model.adapter = "lora" too\n'
            '      allowed: "torch"',
        ),
        (
            (*LORA, "precision.compute=float8", "precision.float8_emulate=true"),
            {"hf": DENSE},
            '  precision.compute (command line): "float8" converts plain linear layers, and model.adapter = "lora" '
            "puts others in their place\n"
            '      allowed: "bf16"',
        ),
        (
            (*HF, "model.lora_rank=8"),
            {"hf": DENSE},
            '  model.lora_rank (command line): has no effect with model.adapter = "none"\n'
            "      allowed: only with model.adapter = lora\n"
            "      to do: remove the key",
        ),
    ],
)
def test_an_adapter_is_refused_where_it_does_not_hold(words: tuple[str, ...], circumstances: Any, told: str) -> None:
    assert refusal_of(*words, **circumstances) == f"1 problem in the run\n{told}"
