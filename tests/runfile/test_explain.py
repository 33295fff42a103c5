"""`config explain` and the JSON Schema: every key is documented, and what they say is what is enforced."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from typing import Any

import pytest

from shardway.errors import UserError
from shardway.runfile.load import KeyDoc, PeerName, explain_key, find_peers, list_peers, load_run, search_keys
from shardway.runfile.schema import RunFile, all_keys, sections

DOCS = [doc for section in sections() for doc in explain_key(section)]


def test_every_key_is_explained() -> None:
    assert [doc.key for doc in DOCS] == all_keys()
    for doc in DOCS:
        assert doc.doc.endswith("."), doc.key
        assert doc.allowed, doc.key
        assert doc.render() == f"{doc.key}\n  {doc.doc}\n  allowed: {doc.allowed}\n  default: {doc.default}"
        assert asdict(doc) == {"key": doc.key, "doc": doc.doc, "allowed": doc.allowed, "default": doc.default}


def test_the_defaults_that_are_shown_are_taken() -> None:
    loaded = load_run(None, [f"{doc.key}={doc.default}" for doc in DOCS])
    assert loaded.values == RunFile()
    assert set(loaded.origins.values()) == {"command line"}


def test_examples_that_are_shown_are_taken() -> None:
    shown = [doc for doc in DOCS if doc.allowed.startswith("such as ")]
    assert len(shown) >= 6
    for doc in shown:
        for example in re.split(", | or ", doc.allowed.removeprefix("such as ")):
            loaded = load_run(None, [f"{doc.key}={example}"])
            assert loaded.origins[doc.key] == "command line"


@pytest.mark.parametrize(
    ("dotted", "allowed", "default"),
    [
        ("model.dim", "an integer, at least 1", "128"),
        ("model.kv_heads", 'an integer, at least 1 or "auto"', '"auto"'),
        ("model.tied", "true or false", "true"),
        ("model.dropout", "a number, at least 0 and less than 1", "0.0"),
        ("model.channels", "a list of an integer, at least 1", "[16, 32]"),
        ("optim.name", '"adamw", "sgd", "adafactor", "adamw8bit", "muon"', '"adamw"'),
        ("optim.clip", 'a number, more than 0 or "off"', "1.0"),
        ("train.seed", f"an integer, at least 0 and at most {2**63 - 1}", "0"),
        ("data.include", "a string", '"*.py"'),
        ("run.stop_timeout", 'such as "90s", "1h30m"', '"15m"'),
    ],
)
def test_what_is_allowed(dotted: str, allowed: str, default: str) -> None:
    [doc] = explain_key(dotted)
    assert (doc.allowed, doc.default) == (allowed, default)


def test_a_section_is_all_its_keys() -> None:
    docs = explain_key("checkpoint")
    assert [doc.key for doc in docs] == [
        "checkpoint.every",
        "checkpoint.keep",
        "checkpoint.keep_every",
        "checkpoint.keep_best",
        "checkpoint.monitor",
        "checkpoint.background",
        "checkpoint.local_every",
        "checkpoint.local_dir",
    ]
    assert docs[1] == KeyDoc(
        "checkpoint.keep",
        "Complete checkpoints that are kept; older ones are removed after a newer one is complete.",
        "an integer, at least 1",
        "3",
    )


def test_an_unknown_key_is_answered_with_the_nearest() -> None:
    with pytest.raises(UserError) as told:
        explain_key("checkpoint.evry")
    assert str(told.value) == (
        "there is no key checkpoint.evry; did you mean checkpoint.every or checkpoint.keep_every or "
        "checkpoint.local_every?\n  allowed: a section (model, data, train, optim, parallel, deepspeed, "
        "precision, recompute, checkpoint, guard, track, notify, pipeline, run, site) or section.key."
    )


def test_a_name_that_is_like_no_other() -> None:
    with pytest.raises(UserError) as told:
        explain_key("zzz")
    assert str(told.value) == (
        "there is no key zzz; allowed: a section (model, data, train, optim, parallel, deepspeed, precision, "
        "recompute, checkpoint, guard, track, notify, pipeline, run, site) or section.key."
    )


# --- the JSON Schema

KINDS = {"string", "integer", "number", "boolean", "array", "object"}
WORDS = {
    "$defs",
    "$ref",
    "additionalProperties",
    "anyOf",
    "const",
    "default",
    "description",
    "enum",
    "examples",
    "exclusiveMaximum",
    "exclusiveMinimum",
    "items",
    "maxItems",
    "maximum",
    "minItems",
    "minLength",
    "minimum",
    "pattern",
    "properties",
    "required",
    "title",
    "type",
}
"""The part of JSON Schema 2020-12 that the schema uses; a new word belongs in here with a look at the standard."""


def walk(node: dict[str, Any]) -> list[dict[str, Any]]:
    """A schema and all schemas in it."""
    inner = [*node.get("properties", {}).values(), *node.get("$defs", {}).values(), *node.get("anyOf", [])]
    inner += [node["items"]] if "items" in node else []
    return [node, *(found for child in inner for found in walk(child))]


def test_the_schema_is_json_schema() -> None:
    schema = json.loads(json.dumps(RunFile.model_json_schema()))
    for node in walk(schema):
        assert node.keys() <= WORDS
        kinds = node.get("type", [])
        assert set([kinds] if isinstance(kinds, str) else kinds) <= KINDS
        if "$ref" in node:
            assert node["$ref"].removeprefix("#/$defs/") in schema["$defs"]


def test_the_schema_documents_each_key_and_forbids_others() -> None:
    schema = RunFile.model_json_schema()
    assert schema["additionalProperties"] is False
    for name, section in sections().items():
        table = schema["$defs"][schema["properties"][name]["$ref"].removeprefix("#/$defs/")]
        assert table["additionalProperties"] is False
        assert table["description"] == section.__doc__
        assert list(table["properties"]) == list(section.model_fields)
        for key, entry in table["properties"].items():
            assert entry["description"], f"{name}.{key}"
            assert "default" in entry, f"{name}.{key}"


def test_the_schema_knows_the_parent() -> None:
    """An editor that checks a run file must not mark `extends` as unknown."""
    assert RunFile.model_json_schema()["properties"]["extends"]["type"] == "string"


@pytest.mark.parametrize("row", list_peers(), ids=lambda row: row.name)
def test_every_name_of_a_peer_leads_to_keys_of_ours(row: PeerName) -> None:
    assert set(row.keys) <= set(all_keys())
    assert row in find_peers(row.name)


@pytest.mark.parametrize(
    ("word", "key"),
    [
        ("learning_rate", "optim.lr"),
        ("--learning-rate", "optim.lr"),
        ("gradient_accumulation_steps", "train.global_batch"),
        ("save_total_limit", "checkpoint.keep"),
        ("load_best_model_at_end", "checkpoint.keep_best"),
        ("save_top_k", "checkpoint.keep_best"),
        ("metric_for_best_model", "checkpoint.monitor"),
        ("greater_is_better", "checkpoint.monitor"),
        ("mode", "checkpoint.monitor"),
        ("EarlyStopping(patience=3)", "train.patience"),
        ("early_stopping_patience", "train.patience"),
        ("per_device_train_batch_size", "train.micro_batch"),
        ("zero_optimization.stage", "deepspeed.stage"),
        ("--tensor-model-parallel-size", "parallel.tp"),
        ("parallelism.tensor_parallel_degree", "parallel.tp"),
        ("training.seq_len", "data.seq_len"),
        ("accumulate_grad_batches", "train.global_batch"),
        ("train.steps", "train.steps"),
        ("guard", "guard.spike"),
        ("gradient norm", "optim.clip"),
        ("tokenizer", "data.tokenizer"),
        ("Wall-time", "site.walltime"),
    ],
)
def test_keys_are_found_by_any_word(word: str, key: str) -> None:
    found = search_keys(word)
    assert key in [each.key for each in found if isinstance(each, KeyDoc)]
    assert key in "".join(each.render() for each in found)


def test_a_word_that_nothing_has_is_told() -> None:
    with pytest.raises(UserError, match="there is no key qwertz"):
        search_keys("qwertz")


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("optim.learning_rate=1", "learning_rate (transformers, accelerate) is optim.lr here"),
        ("train.max_steps=9", "max_steps (transformers, accelerate, Lightning) is train.steps here"),
        ("train.epochs=9", 'epochs (PyTorch) is train.steps here; as in "3 epochs"'),
        ("parallel.tensor_parallel_degree=2", "tensor_parallel_degree (torchtitan) is parallel.tp here"),
        ("zero_optimization.stage=3", "zero_optimization.stage (DeepSpeed) is deepspeed.stage, parallel.dp_shard here"),
    ],
)
def test_a_key_of_a_peer_in_a_run_file_is_answered_with_ours(word: str, says: str) -> None:
    with pytest.raises(UserError) as told:
        load_run(None, [word])
    assert f"of this name; {says}\n" in str(told.value)
