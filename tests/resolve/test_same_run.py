"""Which keys of a run may change before it is continued."""

from __future__ import annotations

import tomllib

import pytest
from resolving import resolve_words

from shardway.errors import UserError
from shardway.resolve import check_same_run, find_changes
from shardway.resolve.draft import applies
from shardway.resolve.request import FIXED_AT_RESUME, FREE_AT_RESUME, _is_same_model
from shardway.runfile.schema import RunFile, all_keys, sections

CHANGES = {
    "model.kind": "mlp",
    "model.dim": 64,
    "model.layers": 5,
    "model.heads": 2,
    "model.kv_heads": 2,
    "model.ffn_dim": 77,
    "model.vocab": 300,
    "model.norm": "layernorm",
    "model.activation": "gelu",
    "model.tied": False,
    "model.rope_theta": 5.0,
    "model.head_dim": 16,
    "model.norm_eps": 1e-6,
    "model.bias": True,
    "model.qkv_bias": True,
    "model.qk_norm": True,
    "model.positions": "learned",
    "model.experts": 4,
    "model.kv_rank": 16,
    "model.hf": "org/name",
    "data.kind": "synthetic",
    "data.tokenizer": "words.json",
    "data.include": "*.md",
    "data.seq_len": 64,
    "data.pack": True,
    "data.group_tokens": 4096,
    "data.shuffle": False,
    "data.validation_fraction": 0.5,
    "train.engine": "deepspeed",
    "train.seed": 7,
    "optim.name": "sgd",
    "precision.weights": "bf16",
}
"""Of the default run: another value of each fixed key that it has."""

FREE = (
    "train.steps=9",
    "train.global_batch=8",
    "train.micro_batch=2",
    "optim.lr=0.5",
    "optim.schedule=constant",
    "optim.clip=off",
    "parallel.layout=auto",
    "parallel.dp_shard=2",
    "precision.compute=bf16",
    "checkpoint.every=off",
    "checkpoint.keep=1",
    "checkpoint.keep_every=1000 steps",
    "checkpoint.keep_best=2",
    "checkpoint.monitor=accuracy",
    "train.patience=3",
    "checkpoint.local_every=10 steps",
    "checkpoint.local_dir=/scratch",
    "data.skip=[[5, 9]]",
    "run.threads=3",
    "run.name=other",
    "data.path=/moved",
    "data.workers=2",
)


def saved_of(*overrides: str, **circumstances: int) -> dict[str, object]:
    return tomllib.loads(resolve_words(*overrides, **circumstances).render())


def test_the_same_run_may_go_on() -> None:
    check_same_run(saved_of(), resolve_words(), "runs/a")
    check_same_run({}, resolve_words(), "runs/a")


def test_what_may_change() -> None:
    check_same_run(saved_of(), resolve_words(*FREE, ranks=2), "runs/a")


@pytest.mark.parametrize("dotted", CHANGES)
def test_what_must_not_change(dotted: str) -> None:
    section, name = dotted.split(".")
    saved = saved_of()
    now = saved[section][name]  # type: ignore[index]
    saved[section][name] = CHANGES[dotted]  # type: ignore[index]
    with pytest.raises(UserError) as told:
        check_same_run(saved, resolve_words(), "runs/a")
    origin = resolve_words().origins[dotted]
    assert str(told.value) == (
        "1 problem in what has changed since runs/a was started\n"
        f"  {dotted} ({origin}): {now!r}, but the run in runs/a was started with {CHANGES[dotted]!r}\n"
        f"      allowed: {CHANGES[dotted]!r}\n"
        "      to do: restore the value, choose another directory with --dir, or start runs/a over with --fresh, which "
        "sets it aside"
    )


def test_the_fixed_keys_are_keys() -> None:
    assert set(FIXED_AT_RESUME) <= set(all_keys())
    assert len(set(FIXED_AT_RESUME)) == len(FIXED_AT_RESUME)
    assert CHANGES.keys() == {dotted for dotted in FIXED_AT_RESUME if applies(dotted, RunFile())}


def test_keys_of_another_model_do_not_count() -> None:
    """What a saved run does not name, it did not use."""
    images = ("model.kind=convnet", "data.kind=synthetic")
    with pytest.raises(UserError) as told:
        check_same_run(saved_of(*images), resolve_words("data.kind=synthetic"), "runs/a")
    assert str(told.value).splitlines()[:2] == [
        "1 problem in what has changed since runs/a was started",
        "  model.kind (default): 'transformer', but the run in runs/a was started with 'convnet'",
    ]


@pytest.mark.parametrize(
    ("words", "dotted", "value"),
    [
        (("model.experts=8", "model.expert_dim=32"), "model.experts_per_token", 4),
        (("model.experts=8",), "model.router_score", "sigmoid"),
        (("model.experts=8",), "model.balance", "loss"),
        (("model.kv_rank=16",), "model.rope_head_dim", 8),
        (("model.positions=learned",), "model.max_positions", 512),
        (("model.kind=vit", "data.kind=synthetic"), "model.patch", 7),
        (("model.kind=vit", "data.kind=synthetic"), "model.pooling", "mean"),
    ],
)
def test_what_must_not_change_in_other_models(words: tuple[str, ...], dotted: str, value: object) -> None:
    with pytest.raises(UserError, match=rf"1 problem in .*\n  {dotted} "):
        check_same_run(saved_of(*words), resolve_words(*words, f"{dotted}={value}"), "runs/a")


def test_how_experts_are_balanced_may_be_tuned() -> None:
    words = ("model.experts=8",)
    check_same_run(saved_of(*words), resolve_words(*words, "model.bias_update_rate=0.1"), "runs/a")
    check_same_run(saved_of(*words), resolve_words(*words, "model.capacity_factor=1.5"), "runs/a")


def test_a_vocabulary_that_was_open_may_be_settled() -> None:
    words = ("data.tokenizer=words.json",)
    check_same_run(saved_of(*words), resolve_words(*words, "model.vocab=9"), "runs/a")
    check_same_run(saved_of(*words, "model.vocab=9"), resolve_words(*words), "runs/a")


def test_all_changes_are_told_at_once_and_what_to_do_once() -> None:
    with pytest.raises(UserError) as told:
        check_same_run(saved_of("train.seed=1", "model.dim=64"), resolve_words(), "runs/a")
    lines = str(told.value).splitlines()
    assert lines[0] == "4 problems in what has changed since runs/a was started"  # head_dim and ffn_dim follow dim
    assert [line.strip() for line in lines if "to do:" in line] == [lines[-1].strip()]


# --- changes that are allowed and told


def test_what_changed_is_found_with_both_values() -> None:
    words = ("optim.lr=0.5", "train.steps=900", "precision.compute=bf16", "data.skip=[[5, 9], [7, 12]]")
    assert find_changes(saved_of(), resolve_words(*words)) == {
        "data.skip": [[], [[5, 12]]],
        "optim.lr": [0.003, 0.5],
        "precision.compute": ["fp32", "bf16"],
        "train.steps": ["800 steps", "900 steps"],
    }


def test_where_a_run_goes_on_is_no_change_of_it() -> None:
    words = (
        "parallel.layout=auto",
        "parallel.dp_shard=2",
        "run.threads=3",
        "run.name=other",
        "data.workers=2",
        "data.stage=/scratch",
        "train.micro_batch=2",
    )
    assert find_changes(saved_of(), resolve_words(*words, ranks=2)) == {}
    assert find_changes({}, resolve_words("optim.lr=0.5")) == {}
    assert set(FREE_AT_RESUME) <= {*all_keys(), *sections()}


COMMIT = "0123456789" * 4
SNAPSHOT = f"/cache/models--org--name/snapshots/{COMMIT}"


@pytest.mark.parametrize(
    ("before", "after", "same"),
    [
        ("org/name", SNAPSHOT, True),  # a job gets the folder of what a run file names
        (SNAPSHOT, "org/name", True),
        (f"org/name@{COMMIT}", SNAPSHOT, True),
        ("org/name@main", SNAPSHOT, True),
        (SNAPSHOT, SNAPSHOT.replace("/cache", "/moved"), True),
        (f"org/name@{COMMIT[::-1]}", SNAPSHOT, False),
        ("org/other", SNAPSHOT, False),
        (SNAPSHOT, SNAPSHOT.replace("0123", "3210"), False),
        ("org/name", "org/other", False),
        ("/a/model", "/b/model", False),
    ],
)
def test_a_hub_name_is_the_folder_of_its_snapshot(before: str, after: str, same: bool) -> None:
    assert _is_same_model(before, after) == same
