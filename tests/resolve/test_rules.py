"""Every rule between keys: what it derives with which reason, and what it refuses in which words."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from resolving import refusal_of, resolve_words, value_of

from shardway.resolve import Circumstances, resolve
from shardway.resolve.rules import RULES
from shardway.runfile.load import load_run


@dataclass(frozen=True)
class Derives:
    rule: str
    words: tuple[str, ...]
    key: str
    value: Any
    reason: str
    circumstances: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.rule}-{self.value}"


@dataclass(frozen=True)
class Refuses:
    rule: str
    words: tuple[str, ...]
    told: str
    circumstances: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.rule}-{' '.join(self.words)}"


CONVNET = ("model.kind=convnet", "data.kind=synthetic")
LATENT = ("model.kv_rank=16",)
GPU = {"accelerators": 2}
EMULATED = ("precision.compute=float8", "precision.float8_emulate=true")
PIPELINE = ("parallel.pp=2", "model.tied=false")

DERIVATIONS = [
    Derives("a_run_uses_the_accelerator_where_there_is_one", (), "run.device", "cpu", "no accelerator found"),
    Derives("a_run_uses_the_accelerator_where_there_is_one", (), "run.device", "cuda", "2 accelerators found", GPU),
    Derives(
        "ranks_of_a_node_share_its_cores",
        (),
        "run.threads",
        4,
        "16 cores / 4 ranks on a node",
        {"ranks": 8, "ranks_per_node": 4, "usable_cores": 16},
    ),
    Derives(
        "ranks_of_a_node_share_its_cores",
        (),
        "run.threads",
        1,
        "2 cores / 4 ranks on a node",
        {"ranks": 4, "usable_cores": 2},
    ),
    Derives("key_value_heads_divide_the_heads", ("model.heads=8",), "model.kv_heads", 8, "as many as heads"),
    Derives(
        "the_feed_forward_width_follows_the_activation",
        ("model.dim=128",),
        "model.ffn_dim",
        352,
        "8/3 dim, rounded up to a multiple of 32",
    ),
    Derives(
        "the_feed_forward_width_follows_the_activation",
        ("model.dim=96",),
        "model.ffn_dim",
        256,
        "8/3 dim, rounded up to a multiple of 32",
    ),
    Derives(
        "the_feed_forward_width_follows_the_activation",
        ("model.dim=128", "model.activation=gelu"),
        "model.ffn_dim",
        512,
        "4 dim",
    ),
    Derives(
        "the_feed_forward_width_follows_the_activation",
        ("model.kind=encoder_decoder", "model.dim=96"),
        "model.ffn_dim",
        384,
        "4 dim",
    ),
    Derives("heads_divide_the_width", ("model.dim=96",), "model.head_dim", 24, "dim / heads"),
    Derives(
        "latent_attention_has_widths_of_its_own",
        (*LATENT, "model.head_dim=10"),
        "model.rope_head_dim",
        6,
        "half of head_dim, rounded up to even",
    ),
    Derives(
        "latent_attention_has_widths_of_its_own",
        (*LATENT, "model.head_dim=10"),
        "model.value_head_dim",
        10,
        "as wide as head_dim",
    ),
    Derives(
        "learned_positions_reach_the_end_of_a_sample",
        ("model.positions=learned", "data.seq_len=77"),
        "model.max_positions",
        77,
        "data.seq_len",
    ),
    Derives(
        "a_mixture_has_enough_experts_and_layers",
        ("model.experts=8", "model.experts_per_token=3", "model.ffn_dim=200"),
        "model.expert_dim",
        80,
        "ffn_dim / 3 experts a token, rounded up to a multiple of 16",
    ),
    Derives(
        "the_weight_of_one_expert_is_its_score",
        ("model.experts=8", "model.experts_per_token=1"),
        "model.router_normalise",
        False,
        "one expert a token",
    ),
    Derives("bytes_have_256_values", (), "model.vocab", 256, "one entry a byte"),
    Derives("bytes_have_256_values", ("model.kind=encoder_decoder",), "model.vocab", 256, "one entry a byte"),
    Derives("bytes_have_256_values", ("data.kind=synthetic",), "model.vocab", 256, "one entry a byte"),
    Derives(
        "validation_needs_something_held_out",
        ("data.validation_fraction=0.0",),
        "train.validate_every",
        "off",
        "nothing is held out",
    ),
    Derives(
        "float8_gathers_what_has_one_scale",
        (*EMULATED, "parallel.dp_shard=2"),
        "precision.float8_all_gather",
        True,
        "one scale a weight",
        {"ranks": 2},
    ),
    Derives(
        "float8_gathers_what_has_one_scale",
        EMULATED,
        "precision.float8_all_gather",
        False,
        "weights are not sharded",
    ),
    Derives("degrees_multiply_to_the_ranks", (), "parallel.dp_replicate", 4, "4 ranks", {"ranks": 4}),
    Derives(
        "degrees_multiply_to_the_ranks",
        ("parallel.dp_shard=2",),
        "parallel.dp_replicate",
        3,
        "6 ranks / dp_shard 2",
        {"ranks": 6},
    ),
    Derives(
        "degrees_multiply_to_the_ranks",
        ("parallel.dp_shard=auto", "parallel.dp_replicate=2"),
        "parallel.dp_shard",
        3,
        "6 ranks / dp_replicate 2",
        {"ranks": 6},
    ),
    Derives(
        "degrees_multiply_to_the_ranks",
        ("parallel.dp_shard=auto",),
        "parallel.dp_shard",
        6,
        "6 ranks",
        {"ranks": 6},
    ),
    Derives(
        "degrees_multiply_to_the_ranks",
        ("parallel.dp_shard=auto",),
        "parallel.dp_replicate",
        1,
        "dp_shard is auto and takes all ranks",
        {"ranks": 6},
    ),
    Derives(
        "a_micro_batch_is_a_part_of_a_rank_share",
        ("train.global_batch=12",),
        "train.micro_batch",
        3,
        "12 samples / 4 data-parallel ranks",
        {"ranks": 4},
    ),
    Derives(
        "a_micro_batch_is_a_part_of_a_rank_share",
        ("train.global_batch=13",),
        "train.micro_batch",
        4,
        "13 samples / 4 data-parallel ranks",
        {"ranks": 4},
    ),
]

REFUSALS = [
    Refuses(
        "a_run_uses_the_accelerator_where_there_is_one",
        ("run.device=cuda",),
        '  run.device (command line): "cuda" is asked for and this machine shows no accelerator\n'
        '      allowed: "auto" or "cpu"',
    ),
    Refuses(
        "timeouts_are_nested",
        ("run.collective_timeout=10min", "run.stop_timeout=20min"),
        "  run.collective_timeout (command line): 10m is not shorter than run.start_timeout = 10m, so a hanging "
        "collective would be ended before it can say which operation hangs\n"
        "      allowed: less than 10m\n"
        "      to do: lower run.collective_timeout or raise run.start_timeout",
    ),
    Refuses(
        "timeouts_are_nested",
        ("run.stop_timeout=1s",),
        "  run.collective_timeout (default): 5m is not shorter than run.stop_timeout = 1s, so a hanging "
        "collective would be ended before it can say which operation hangs\n"
        "      allowed: less than 1s\n"
        "      to do: lower run.collective_timeout or raise run.stop_timeout",
    ),
    Refuses(
        "a_key_of_another_kind_is_not_ignored",
        (*CONVNET, "model.dropout=0.1"),
        '  model.dropout (command line): has no effect with model.kind = "convnet"\n'
        "      allowed: only with model.kind = transformer or encoder_decoder or vit or mlp\n"
        "      to do: remove the key",
    ),
    Refuses(
        "a_key_of_another_kind_is_not_ignored",
        ("optim.decay=5",),
        '  optim.decay (command line): has no effect with optim.schedule = "cosine"\n'
        "      allowed: only with optim.schedule = wsd\n"
        "      to do: remove the key",
    ),
    Refuses(
        "a_model_reads_the_data_it_is_made_for",
        ("model.kind=convnet",),
        '  data.kind (default): "text" cannot feed model.kind = "convnet"\n      allowed: arrays, idx, synthetic',
    ),
    Refuses(
        "a_model_reads_the_data_it_is_made_for",
        ("data.kind=idx", "data.path=x"),
        '  data.kind (command line): "idx" cannot feed model.kind = "transformer"\n'
        "      allowed: text, tokens, synthetic",
    ),
    Refuses(
        "data_other_than_text_name_their_path",
        ("data.kind=tokens", "model.vocab=9"),
        "  data.path (default): is not set\n      allowed: the file or folder that holds the data",
    ),
    Refuses(
        "heads_divide_the_width",
        ("model.dim=128", "model.heads=7"),
        "  model.heads (command line): 7 does not divide model.dim = 128\n      allowed: a divisor, such as 8",
    ),
    Refuses(
        "heads_divide_the_width",
        ("model.dim=128", "model.heads=200", "model.kv_heads=1"),
        "  model.heads (command line): 200 does not divide model.dim = 128\n      allowed: a divisor, such as 128",
    ),
    Refuses(
        "heads_divide_the_width",
        (f"model.dim={10**15}", "model.heads=3"),
        f"  model.heads (command line): 3 does not divide model.dim = {10**15}\n      allowed: a divisor, such as 2",
    ),
    Refuses(
        "heads_divide_the_width",
        ("model.dim=12", "model.heads=4"),
        "  model.heads (command line): 4 heads of width 3: rotary positions need an even width\n"
        "      allowed: dim / heads even",
    ),
    Refuses(
        "heads_divide_the_width",
        ("model.head_dim=7",),
        "  model.head_dim (command line): 7: rotary positions need an even width\n      allowed: an even number",
    ),
    Refuses(
        "a_key_of_another_kind_is_not_ignored",
        ("model.shared_experts=2",),
        "  model.shared_experts (command line): has no effect with model.experts = 0\n"
        "      allowed: only with model.experts = above 0\n"
        "      to do: remove the key",
    ),
    Refuses(
        "a_key_of_another_kind_is_not_ignored",
        (*LATENT, "model.kv_heads=4"),
        "  model.kv_heads (command line): has no effect with model.kv_rank = 16\n"
        "      allowed: only with model.kv_rank = 0\n"
        "      to do: remove the key",
    ),
    Refuses(
        "latent_attention_has_widths_of_its_own",
        (*LATENT, "model.rope_head_dim=5"),
        "  model.rope_head_dim (command line): 5: rotary positions need an even width\n      allowed: an even number",
    ),
    Refuses(
        "latent_attention_has_widths_of_its_own",
        (*LATENT, "model.rope_head_dim=8", "model.value_head_dim=41"),
        "  model.value_head_dim (command line): 41 is wider than keys are (head_dim 32 + rope_head_dim 8)\n"
        "      allowed: at most 40",
    ),
    Refuses(
        "learned_positions_reach_the_end_of_a_sample",
        ("model.positions=learned", "model.max_positions=100"),
        "  model.max_positions (command line): 100 is fewer than the tokens of a sample, data.seq_len = 128\n"
        "      allowed: at least 128",
    ),
    Refuses(
        "a_mixture_has_enough_experts_and_layers",
        ("model.experts=4", "model.experts_per_token=5"),
        "  model.experts_per_token (command line): 5 is more than model.experts = 4\n      allowed: 1 to 4",
    ),
    Refuses(
        "a_mixture_has_enough_experts_and_layers",
        ("model.experts=4", "model.dense_layers=4"),
        "  model.dense_layers (command line): 4 leaves none of model.layers = 4 for experts\n      allowed: 0 to 3",
    ),
    Refuses(
        "experts_are_gated",
        ("model.experts=4", "model.activation=gelu"),
        '  model.activation (command line): "gelu", and experts (model.experts) are gated\n      allowed: "swiglu"',
    ),
    Refuses(
        "the_weight_of_one_expert_is_its_score",
        ("model.experts=4", "model.experts_per_token=1", "model.router_normalise=true"),
        "  model.router_normalise (command line): true makes the weight of the one expert of a token 1, and a router "
        "without gradient\n"
        "      allowed: false, or model.experts_per_token above 1",
    ),
    Refuses(
        "experts_drop_tokens_of_whole_sequences",
        ("model.experts=4", "model.capacity_factor=1.5", "parallel.cp=2"),
        "  model.capacity_factor (command line): 1.5 drops tokens by their place in a sequence, and parallel.cp = 2 "
        "splits sequences\n"
        "      allowed: 0, or parallel.cp = 1",
        {"ranks": 2},
    ),
    Refuses(
        "key_value_heads_divide_the_heads",
        ("model.heads=4", "model.kv_heads=3"),
        "  model.kv_heads (command line): 3 does not divide model.heads = 4\n      allowed: a divisor, such as 2",
    ),
    Refuses(
        "a_token_file_does_not_say_its_vocabulary",
        ("data.kind=tokens", "data.path=x.bin"),
        '  model.vocab (default): "auto" follows a tokenizer, and a token file does not name the one that made it\n'
        "      allowed: the number of entries of the vocabulary\n"
        "      to do: set model.vocab, such as 50257 for GPT-2's tokenizer",
    ),
    Refuses(
        "validation_needs_something_held_out",
        ("train.validate_every=5", "data.validation_fraction=0.0"),
        "  train.validate_every (command line): 5 steps, and nothing is held out: data.validation_fraction is 0\n"
        '      allowed: "off"\n'
        "      to do: name data.validation, or hold out a fraction",
    ),
    *(
        Refuses(
            "what_this_version_lacks_is_refused",
            (f"parallel.{axis}=2",),
            f"  parallel.{axis} (command line): 2: this version of Shardway does not split a run along {axis} yet\n"
            "      allowed: 1\n"
            "      to do: use dp_replicate and dp_shard",
        )
        for axis in ("cp", "tp", "pp", "ep")
    ),
    Refuses(
        "what_this_version_lacks_is_refused",
        ("model.hf=gpt2",),
        '  model.hf (command line): "gpt2": this version of Shardway does not load Hugging Face models yet\n'
        "      allowed: empty, with model.kind naming a reference model; or `run.shard(your_model)` in a script of "
        "your own",
    ),
    Refuses(
        "tf32_needs_a_device_that_has_it",
        ("precision.tf32=true",),
        "  precision.tf32 (command line): true has no effect on a CPU\n      allowed: false",
    ),
    Refuses(
        "degrees_multiply_to_the_ranks",
        ("parallel.dp_shard=3",),
        "  parallel.dp_shard (command line): dp_shard 3 does not divide the number of ranks, 4\n"
        "      allowed: degrees whose product is the number of ranks\n"
        '      to do: start 3 ranks (--nproc 3), or change it; "auto" takes what the others leave',
        {"ranks": 4},
    ),
    Refuses(
        "degrees_multiply_to_the_ranks",
        ("parallel.dp_shard=3", "parallel.dp_replicate=2"),
        "  parallel.dp_shard (command line): dp_replicate 2 x dp_shard 3 = 6 is not the number of ranks, 4\n"
        "      allowed: degrees whose product is the number of ranks\n"
        '      to do: start 6 ranks (--nproc 6), or change a degree; "auto" takes what the others leave',
        {"ranks": 4},
    ),
    Refuses(
        "degrees_multiply_to_the_ranks",
        ("parallel.dp_replicate=1",),
        "  parallel.dp_replicate (command line): every degree is 1, and there are 4 ranks\n"
        "      allowed: degrees whose product is the number of ranks\n"
        '      to do: start 1 rank (--nproc 1), or change it; "auto" takes what the others leave',
        {"ranks": 4},
    ),
    Refuses(
        "every_replica_gets_a_sample",
        ("train.global_batch=3",),
        "  train.global_batch (command line): 3 samples cannot be shared by 4 data-parallel ranks\n"
        "      allowed: at least 4\n"
        "      to do: raise train.global_batch or use fewer ranks",
        {"ranks": 4},
    ),
    Refuses(
        "a_micro_batch_is_a_part_of_a_rank_share",
        ("train.global_batch=16", "train.micro_batch=5"),
        "  train.micro_batch (command line): 5 is more than a rank's share of 4 (train.global_batch 16 / 4 ranks)\n"
        "      allowed: 1 to 4",
        {"ranks": 4},
    ),
    *(
        Refuses(
            "bf16_weights_need_bf16_products",
            (f"precision.compute={compute}", "precision.weights=bf16"),
            f'  precision.weights (command line): "bf16" holds fewer digits than precision.compute = "{compute}" '
            "multiplies\n"
            '      allowed: "fp32"; or precision.compute = "bf16" or "float8"',
        )
        for compute in ("fp32", "fp16")
    ),
    Refuses(
        "cudnn_tries_kernels_where_it_runs_and_may",
        ("train.cudnn_benchmark=true",),
        "  train.cudnn_benchmark (command line): true has no effect on a CPU\n      allowed: false",
    ),
    Refuses(
        "cudnn_tries_kernels_where_it_runs_and_may",
        ("train.cudnn_benchmark=true", "train.deterministic=true"),
        "  train.cudnn_benchmark (command line): true may choose another kernel in each run, and train.deterministic "
        "is true\n"
        "      allowed: one of the two",
        GPU,
    ),
    Refuses(
        "float8_needs_a_device_that_has_it",
        ("precision.compute=float8",),
        '  precision.compute (command line): "float8": a CPU has no such matrix products\n'
        '      allowed: "fp32", "bf16", "fp16"; or precision.float8_emulate = true, which is slow and for tests',
    ),
    Refuses(
        "float8_needs_a_device_that_has_it",
        (*EMULATED, "precision.float8_recipe=blockwise"),
        '  precision.float8_recipe (command line): "blockwise" is not emulated\n      allowed: any other recipe',
    ),
    Refuses(
        "transformer_engine_knows_other_recipes",
        ("precision.compute=float8", "precision.float8_engine=transformer_engine", "precision.float8_recipe=rowwise"),
        '  precision.float8_recipe (command line): "rowwise" is not for precision.float8_engine = '
        '"transformer_engine"\n'
        '      allowed: "tensorwise", "mxfp8", "blockwise"\n'
        '      to do: change it, or set float8_engine = "torchao"',
        GPU,
    ),
    Refuses(
        "transformer_engine_knows_other_recipes",
        (*EMULATED, "precision.float8_engine=transformer_engine"),
        '  precision.float8_emulate (command line): true is not for precision.float8_engine = "transformer_engine"\n'
        "      allowed: false\n"
        '      to do: change it, or set float8_engine = "torchao"',
        GPU,
    ),
    *(
        Refuses(
            "float8_gathers_what_has_one_scale",
            (*EMULATED, "precision.float8_all_gather=true", "parallel.dp_shard=auto", *words),
            f"  precision.float8_all_gather (command line): true, but {reason}\n      allowed: false",
            {"ranks": ranks},
        )
        for words, reason, ranks in (
            ((), "weights are not sharded", 1),
            (
                ("precision.float8_recipe=rowwise",),
                'only torchao\'s recipe "tensorwise" does, and this is torchao\'s "rowwise"',
                4,
            ),
            (
                ("parallel.reshard_after_forward=2",),
                "parallel.reshard_after_forward = 2 gathers within smaller groups",
                4,
            ),
        )
    ),
    Refuses(
        "float8_multiplies_whole_groups_of_tokens",
        ("precision.compute=float8", "data.seq_len=120"),
        "  data.seq_len (command line): 120 tokens are no whole groups of 16, as float8 products take them\n"
        "      allowed: a multiple of 16",
        GPU,
    ),
    Refuses(
        "a_pipeline_compiles_blocks",
        (*PIPELINE, "train.compile=model"),
        '  train.compile (command line): "model" does not go with parallel.pp = 2\n      allowed: "blocks" or "off"',
        {"ranks": 2},
    ),
    Refuses(
        "a_memory_budget_needs_the_compiler",
        ("recompute.mode=budget",),
        '  recompute.mode (command line): "budget": it is the compiler that chooses, and train.compile is "off"\n'
        '      allowed: "none", "selective", "full"; or train.compile = "blocks"',
    ),
    Refuses(
        "nesterov_needs_momentum",
        ("optim.name=sgd", "optim.nesterov=true", "optim.momentum=0"),
        "  optim.nesterov (command line): true needs optim.momentum above 0\n      allowed: false, or a momentum",
    ),
    Refuses(
        "muon_needs_matrices",
        (*CONVNET, "optim.name=muon"),
        '  optim.name (command line): "muon" is for the matrices of blocks, and this model.kind = "convnet" has none\n'
        '      allowed: "adamw"',
    ),
    Refuses(
        "muon_needs_matrices",
        ("model.kind=mlp", "model.hidden=[]", "data.kind=synthetic", "optim.name=muon"),
        '  optim.name (command line): "muon" is for the matrices of blocks, and this model.kind = "mlp" has none\n'
        '      allowed: "adamw"',
    ),
    Refuses(
        "bf16_weights_need_an_optimizer_that_rounds_them",
        ("optim.name=adafactor", "precision.compute=bf16", "precision.weights=bf16"),
        '  optim.name (command line): "adafactor" does not round stochastically, and precision.weights = "bf16" would '
        'lose its small updates\n      allowed: "adamw", "sgd", "muon"; or precision.weights = "fp32"',
    ),
    Refuses(
        "narrow_momentum_needs_momentum",
        ("optim.name=sgd", "optim.momentum=0", "optim.state_dtype=bf16"),
        '  optim.state_dtype (command line): "bf16": without momentum there is no state\n'
        '      allowed: "fp32", or a momentum',
    ),
    Refuses(
        "a_key_of_another_kind_is_not_ignored",
        ("optim.name=adafactor", "optim.state_dtype=bf16"),
        '  optim.state_dtype (command line): has no effect with optim.name = "adafactor"\n'
        "      allowed: only with optim.name = adamw or sgd or muon\n      to do: remove the key",
    ),
]

ONLY_DERIVE = {
    "ranks_of_a_node_share_its_cores",
    "the_feed_forward_width_follows_the_activation",
    "bytes_have_256_values",
}
DERIVE_TOO = {
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
}

ELSEWHERE = {
    "a_hugging_face_model_brings_its_own_shape",
    "a_sample_fits_the_positions_of_a_hugging_face_model",
    "a_hugging_face_model_brings_its_tokenizer",
}
"""Rules of `test_huggingface_rules.py`."""


def test_every_rule_is_tested_below() -> None:
    names = {rule.__name__ for rule in RULES} - ELSEWHERE
    assert {case.rule for case in DERIVATIONS} == ONLY_DERIVE | DERIVE_TOO
    assert {case.rule for case in REFUSALS} == names - ONLY_DERIVE


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
        ("model.experts=4", "model.capacity_factor=1.5", "model.balance_step=0.01"),
        ("model.kind=encoder_decoder", "model.layers=2", "data.seq_len=64", "model.dropout=0.1"),
        ("model.kind=vit", "data.kind=synthetic", "model.patch=7", "model.classes=3", "model.bias=true"),
        ("precision.compute=bf16", "precision.reduce=bf16"),
        ("precision.compute=bf16", "precision.weights=bf16"),
        ("precision.compute=fp16", "precision.loss_scale=1024", "precision.loss_scale_interval=10"),
        (*EMULATED, "precision.weights=bf16", "precision.first_last=bf16", "data.seq_len=120"),
        ("recompute.mode=selective", "recompute.every=2", 'recompute.save=["aten.mm"]'),
        ("recompute.mode=budget", "recompute.budget=0.3", "train.compile=blocks", "train.compile_cache=x"),
    ],
)
def test_what_goes_together_is_not_refused(words: tuple[str, ...]) -> None:
    resolved = resolve_words(*words)
    assert {dotted for dotted, origin in resolved.origins.items() if origin == "command line"} == {
        word.partition("=")[0] for word in words
    }


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


def test_all_that_cannot_be_is_told_at_once() -> None:
    told = refusal_of("model.heads=3", "train.global_batch=1", "precision.weights=bf16", "parallel.dp_shard=2", ranks=2)
    assert [line for line in told.splitlines() if not line.startswith("      ")] == [
        "3 problems in the run",
        "  model.heads (command line): 3 does not divide model.dim = 128",
        "  train.global_batch (command line): 1 samples cannot be shared by 2 data-parallel ranks",
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
