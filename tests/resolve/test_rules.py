"""Every rule between keys: what it derives with which reason, and what it refuses in which words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cases_axes
import cases_layout
import cases_model
import cases_numerics
import cases_pipeline
import pytest
from resolving import refusal_of, resolve_or_refuse, resolve_words, value_of
from rule_cases import CONVNET, EMULATED, Derives, Refuses

from shardway.resolve import Circumstances, resolve
from shardway.resolve.rules import RULES
from shardway.runfile.load import load_run

TABLES = (cases_model, cases_layout, cases_axes, cases_pipeline, cases_numerics)
DERIVATIONS = [case for table in TABLES for case in table.DERIVATIONS]
REFUSALS = [case for table in TABLES for case in table.REFUSALS]

ONLY_DERIVE = {
    "a_run_without_a_name_is_called_after_its_file",
    "ranks_of_a_node_share_its_cores",
    "the_feed_forward_width_follows_the_activation",
    "bytes_have_256_values",
    "arrays_are_called_x_and_y",
    "what_is_only_gathered_needs_no_loader_process",
    "what_is_measured_at_the_start_says_so",
}
DERIVE_TOO = {
    "data_are_staged_to_a_whole_path",
    "a_group_is_a_micro_batch",
    "stages_follow_the_schedule",
    "micro_batches_fill_the_pipeline",
    "heads_divide_the_width",
    "latent_attention_has_widths_of_its_own",
    "learned_positions_reach_the_end_of_a_sample",
    "a_mixture_has_enough_experts_and_layers",
    "the_weight_of_one_expert_is_its_score",
    "a_run_uses_the_accelerator_where_there_is_one",
    "key_value_heads_divide_the_heads",
    "validation_needs_something_held_out",
    "degrees_multiply_to_the_ranks",
    "a_micro_batch_is_a_part_of_a_rank_share",
    "float8_gathers_what_has_one_scale",
    "what_nodes_save_has_a_folder",
}

ELSEWHERE = {
    "an_open_layout_is_the_fastest_that_fits",
    "a_hugging_face_model_brings_its_own_shape",
    "only_a_hugging_face_model_has_weights_to_start_from",
    "a_sample_fits_the_positions_of_a_hugging_face_model",
    "a_hugging_face_model_brings_its_tokenizer",
    "an_adapter_goes_beside_a_hugging_face_model",
    "the_rank_of_an_adapter_is_below_the_width_of_the_model",
    "an_adapter_is_split_like_data_alone",
    "an_adapter_multiplies_in_wider_formats",
    "zero_shards_over_copies_alone",
    "zero_takes_steps_of_one_size",
    "zero_updates_parts_without_shape",
    "zero_has_formats_of_its_own",
    "zero_1_does_not_accumulate_in_bf16",
    "zero_3_compiles_blocks",
    "zero_offloads_what_it_shards",
    "settings_of_deepspeed_do_not_contradict_the_run_file",
    "what_nodes_save_is_written_by_shardway",
    "what_is_left_to_the_device_is_what_it_does_fast",
}
"""Rules of `test_open_layout.py`, of `test_huggingface_rules.py`, of `test_device_defaults.py` and of DeepSpeed."""


def test_every_rule_is_tested_below() -> None:
    names = {rule.__name__ for rule in RULES} - ELSEWHERE
    assert {case.rule for case in DERIVATIONS} == ONLY_DERIVE | DERIVE_TOO
    assert {case.rule for case in REFUSALS} == names - ONLY_DERIVE


def test_the_model_of_a_script_is_not_judged_by_the_model_section() -> None:
    """Also where a rule looks whether other ranks would do: 5 do not divide the heads of [model]."""
    refused = [str(resolve_or_refuse("parallel.tp=5", ranks=3, own_model=own)) for own in (False, True)]
    assert ["start 5 ranks (--nproc 5), or change it" in text for text in refused] == [False, True]


@pytest.mark.parametrize("case", DERIVATIONS, ids=str)
def test_a_rule_derives(case: Derives) -> None:
    resolved = resolve_words(*case.words, **case.circumstances)
    assert value_of(resolved, case.key) == case.value
    assert resolved.origins[case.key] == f"derived: {case.reason}"


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("run.device=cpu", "cpu"),
        ("run.threads=3", 3),
        ("model.kv_heads=1", 1),
        ("model.ffn_dim=7", 7),
        ("model.vocab=300", 300),
        ("parallel.dp_replicate=2", 2),
        ("train.micro_batch=1", 1),
        ("run.name=mine", "mine"),
    ],
)
def test_a_rule_leaves_what_is_set(word: str, value: object) -> None:
    """None of these is what the rule would have chosen for a machine like this."""
    key = word.partition("=")[0]
    resolved = resolve_words(word, "parallel.dp_shard=auto", ranks=4, usable_cores=8, accelerators=4)
    assert value_of(resolved, key) == value
    assert resolved.origins[key] == "command line"


@pytest.mark.parametrize("case", REFUSALS, ids=str)
def test_a_rule_refuses(case: Refuses) -> None:
    assert refusal_of(*case.words, **case.circumstances) == f"1 problem in the run\n{case.told}"


# --- what rules leave alone


@pytest.mark.parametrize(
    "words",
    [
        CONVNET,
        ("model.kind=mlp", "data.kind=arrays", "data.path=x.npz", "data.inputs=a", "model.hidden=[4]"),
        ("data.kind=tokens", "data.path=x.bin", "data.token_dtype=uint8", "model.vocab=9"),
        ("train.validate_every=5", "data.validation=x", "data.validation_fraction=0.0"),
        ("train.validate_every=off", "data.validation_fraction=0.0"),
        (*CONVNET[:1], "data.kind=idx", "data.path=x", "data.validation_fraction=0.0"),
        ("optim.name=sgd", "optim.nesterov=true"),
        ("optim.name=sgd", "optim.state_dtype=bf16", "optim.kernel=foreach"),
        ("optim.name=muon", "optim.muon_lr_factor=10.0", "optim.muon_adjust=original", "optim.state_dtype=bf16"),
        ("optim.name=adamw8bit", "optim.betas=[0.9, 0.99]", "optim.eps=1e-6"),
        ("optim.name=adafactor", "optim.weight_decay=0.0"),
        ("optim.name=muon", "precision.compute=bf16", "precision.weights=bf16"),
        ("optim.schedule=wsd", "optim.decay=5", "optim.final_lr=0.0"),
        ("optim.lr_scaling=linear", "optim.base_batch=64"),
        ("model.dim=6", "model.heads=3"),
        ("model.dim=100", "model.heads=3", "model.head_dim=8"),
        ("model.positions=learned", "model.head_dim=7", "model.max_positions=512", "model.bias=true"),
        ("model.kv_rank=16", "model.q_rank=8", "model.head_dim=7", "model.rope_head_dim=4"),
        ("model.experts=8", "model.shared_experts=1", "model.balance=loss", "model.balance_weight=0.1"),
        ("model.experts=4", "model.capacity_factor=1.5", "model.bias_update_rate=0.01"),
        ("model.kind=encoder_decoder", "model.layers=2", "data.seq_len=64", "model.dropout=0.1"),
        ("model.kind=vit", "data.kind=synthetic", "model.patch=7", "model.classes=3", "model.bias=true"),
        ("precision.compute=bf16", "precision.reduce=bf16"),
        ("precision.compute=bf16", "precision.weights=bf16"),
        ("precision.compute=fp16", "precision.loss_scale=1024", "precision.loss_scale_interval=10"),
        (*EMULATED, "precision.weights=bf16", "precision.first_last=bf16", "data.seq_len=120"),
        ("recompute.mode=selective", "recompute.every=2", 'recompute.save_ops=["aten.mm"]'),
        ("recompute.mode=budget", "recompute.budget=0.3", "train.compile=blocks", "train.compile_cache=x"),
    ],
)
def test_what_goes_together_is_not_refused(words: tuple[str, ...]) -> None:
    resolved = resolve_words(*words)
    assert {dotted for dotted, origin in resolved.origins.items() if origin == "command line"} == {
        word.partition("=")[0] for word in words
    }


@pytest.mark.parametrize(("words", "ranks"), [*cases_axes.LEGAL, *cases_pipeline.LEGAL])
def test_what_goes_together_on_ranks_is_not_refused(words: tuple[str, ...], ranks: int) -> None:
    resolved = resolve_words(*words, ranks=ranks)
    assert all(resolved.origins[word.partition("=")[0]] == "command line" for word in words)


def test_tf32_is_for_cuda() -> None:
    assert resolve_words("precision.tf32=true", accelerators=1).values.precision.tf32 is True


def test_a_tokenizer_leaves_the_vocabulary_to_the_data() -> None:
    resolved = resolve_words("data.tokenizer=words.json")
    assert value_of(resolved, "model.vocab") == "auto"
    assert resolved.origins["model.vocab"] == "default"


def test_the_name_is_that_of_the_file(tmp_path: Any) -> None:
    path = tmp_path / "mnist.toml"
    path.write_text("format = 1\n")
    resolved = resolve(load_run(path), Circumstances())
    assert (resolved.values.run.name, resolved.origins["run.name"]) == ("mnist", "derived: name of the run file")
    named = resolve(load_run(path, ["run.name=mine"]), Circumstances())
    assert (named.values.run.name, named.origins["run.name"]) == ("mine", "command line")
    assert resolve(load_run(None), Circumstances()).values.run.name == "default"


NARROW = ("precision.weights=bf16", "precision.compute=fp32")


def test_all_that_cannot_be_is_told_at_once() -> None:
    told = refusal_of("model.heads=3", "train.global_batch=1", *NARROW, "parallel.dp_shard=2", ranks=2)
    assert [line for line in told.splitlines() if not line.startswith("      ")] == [
        "3 problems in the run",
        "  model.heads (command line): 3 does not divide model.dim = 128",
        "  train.global_batch (command line): 1 sample cannot be shared by 2 data-parallel ranks",
        '  precision.weights (command line): "bf16" holds fewer digits than precision.compute = "fp32" multiplies',
    ]


def test_the_run_file_is_named_in_the_title(tmp_path: Any) -> None:
    path = tmp_path / "my.toml"
    path.write_text("[model]\nheads = 3\n")
    with pytest.raises(Exception, match=rf"^1 problem in {path}\n  model.heads \(my.toml:2\): 3 does not"):
        resolve(load_run(path), Circumstances())


# --- numbers that are no keys


def test_the_numbers_that_follow() -> None:
    derived = resolve_words("train.global_batch=30", "train.micro_batch=4", ranks=3).derived
    assert (derived.replicas, derived.accumulation, derived.peak_lr) == (3, 3, 3e-3)


def test_linear_scaling_of_the_learning_rate() -> None:
    words = ("optim.lr_scaling=linear", "optim.base_batch=64", "optim.lr=0.1", "train.global_batch=256")
    assert resolve_words(*words).derived.peak_lr == pytest.approx(0.4)
    assert resolve_words("optim.lr=0.1", "train.global_batch=256").derived.peak_lr == 0.1


def test_nothing_loaded_is_changed() -> None:
    loaded = load_run(None, ["train.seed=3"])
    before = (loaded.values.model_dump(mode="json"), dict(loaded.origins))
    resolve(loaded, Circumstances(ranks=2, ranks_per_node=2))
    assert (loaded.values.model_dump(mode="json"), dict(loaded.origins)) == before


def test_a_prepared_folder_states_its_vocabulary(tmp_path: Path) -> None:
    (tmp_path / "shards.json").touch()
    assert value_of(resolve_words("data.kind=tokens", f"data.path={tmp_path}"), "model.vocab") == "auto"
