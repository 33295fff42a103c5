"""NeMo: settings in YAML that are merged over a recipe of its Megatron-Bridge.

Invariant: every setting that the plan decides is written, even if the recipe has the same, so that any recipe of the
model's family can be used. This module does not import megatron.

Source: Megatron-Bridge 0.3.1 and 0.6.2 (training/config.py, training/mixed_precision.py, models/gpt_provider.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shardway.plan.case import Case
from shardway.plan.export import common, megatron
from shardway.plan.export.common import EmittedFile, Settings

FILE = "megatron_bridge.yaml"

_PRECISION = {
    "bf16": "bf16_mixed",
    "fp16": "fp16_mixed",
    "fp8": "bf16_with_fp8_current_scaling_mixed",
    "mxfp8": "bf16_with_mxfp8_mixed",
    "fp4": "bf16_with_nvfp4_mixed",
}

degrees_of = megatron.degrees_of


def render(case: Case, head: Sequence[str]) -> list[EmittedFile]:
    """megatron_bridge.yaml."""
    return [common.write(FILE, head, common.write_yaml(_settings(case)))]


def describe(case: Case) -> Iterator[str]:
    """All notes."""
    yield from common.describe_irregular(case.model)
    yield (
        "Start from a recipe of the model's family: norms, gates, biases and positions are not settings of a file, and "
        "the recipe has them."
    )
    yield common.describe_script("the recipe, the data, the tokenizer, the number of iterations, the learning rate")
    if case.precision in ("fp32", "tf32"):
        yield "Megatron-Bridge has no recipe of mixed precision for fp32: set mixed_precision to null in Python."
    # Notes on the recipe of mixed precision, which no other setting of a file overrides
    if case.value_bytes == 2 and case.precision == "fp16" and case.gradient_bytes == 4:
        yield "Megatron-Bridge sums gradients in fp16 beside fp16; the plan sums them in fp32."
    if case.value_bytes == 2 and case.precision != "fp16" and case.gradient_bytes == 2:
        yield "Megatron-Bridge sums gradients in fp32 beside bf16, the plan in 16 bits: more memory than predicted."
    yield from megatron.describe_megatron(case, "Megatron-Bridge", ("nemo", "megatron"))


def _settings(case: Case) -> Settings:
    precision, states = _PRECISION.get(case.precision), megatron.state_settings(case)
    uneven = megatron.needs_layout(case)
    layout = {
        **megatron.degree_settings(case),
        # Both ways to cut are written, since a recipe may set the other one.
        "virtual_pipeline_model_parallel_size": None if uneven else megatron.virtual_stages(case),
        "pipeline_model_parallel_layout": common.render_layout(case) if uneven else None,
    }
    nothing = {"recompute_granularity": None, "recompute_method": None, "recompute_num_layers": None}
    kernels = {**nothing, **megatron.kernel_settings(case)}
    sharing = {"use_distributed_optimizer": states["use_distributed_optimizer"]}
    return {
        "model": {**_sizes(case), **layout, **kernels},
        "train": {"micro_batch_size": case.micro_batch, "global_batch_size": case.global_batch},
        "dataset": {"seq_length": case.seq_len},
        "ddp": states,
        "optimizer": {**megatron.optimizer_settings(case), **sharing},
        "dist": {"use_megatron_fsdp": megatron.uses_fsdp(case), "use_tp_pp_dp_mapping": megatron.keeps_mapping(case)},
        **({"checkpoint": {"ckpt_format": "fsdp_dtensor"}} if megatron.uses_fsdp(case) else {}),
        **({"mixed_precision": precision} if precision else {}),
    }


def _sizes(case: Case) -> Settings:
    model, sizes = case.model, common.read_sizes(case.model)
    attention, experts = sizes.layer.attention, sizes.experts
    counted: Settings = (
        {"num_moe_experts": experts.count, "moe_layer_freq": [int(each) for each in sizes.mixed]} if experts else {}
    )
    return {
        "num_layers": sizes.count,
        "hidden_size": model.hidden,
        "ffn_hidden_size": sizes.ffn,
        "num_attention_heads": attention.heads,
        "num_query_groups": attention.kv_heads,
        **({} if attention.latent else {"kv_channels": attention.head_dim}),
        **megatron.latent_settings(attention),
        "seq_length": case.seq_len,
        "vocab_size": model.vocab,
        "share_embeddings_and_output_weights": model.tied,
        **counted,
        **megatron.expert_settings(sizes),
    }
