"""NeMo: settings in YAML that are merged over a recipe of its Megatron-Bridge.

Invariant: every setting that the plan decides is written, even if the recipe has the same, so that any recipe of the
model's family can be used. This module does not import megatron.

Source: Megatron-Bridge 0.3.1 and 0.6.2 (training/config.py, training/mixed_precision.py, models/gpt_provider.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shardway.plan.case import Case
from shardway.plan.export import megatron as shared
from shardway.plan.export import megatron as terms
from shardway.plan.export.common import (
    Emitted,
    EmittedHeader,
    Settings,
    UniformSizes,
    describe_irregular,
    describe_script,
    gather,
    read_sizes,
    render_layout,
    write,
    write_yaml,
)
from shardway.plan.shapes.architecture import AttentionShape

FILE = "megatron_bridge.yaml"

_PRICED_AS = ("nemo", "megatron")

_PRECISION = {
    "bf16": "bf16_mixed",
    "fp16": "fp16_mixed",
    "fp8": "bf16_with_fp8_current_scaling_mixed",
    "mxfp8": "bf16_with_mxfp8_mixed",
    "fp4": "bf16_with_nvfp4_mixed",
}
_RECOMPUTES_NOTHING: Settings = {
    "recompute_granularity": None,
    "recompute_method": None,
    "recompute_num_layers": None,
}


def emit(case: Case, prediction_lines: Sequence[str]) -> Emitted:
    """megatron_bridge.yaml."""
    notes = gather(
        [
            *describe_irregular(case.model),
            *_describe(case),
            *terms.describe_megatron(case, "Megatron-Bridge", _PRICED_AS),
        ]
    )
    head = EmittedHeader(case, prediction_lines, terms.degrees_of(case), notes)
    return Emitted((write(FILE, head, write_yaml(_settings(case))),), notes)


def _describe(case: Case) -> Iterator[str]:
    yield (
        "Start from a recipe of the model's family: norms, gates, biases and positions are not settings of a file, and "
        "the recipe has them."
    )
    yield from describe_script(case, "the recipe, the data, the tokenizer, the number of iterations, the learning rate")
    if case.precision in ("fp32", "tf32"):
        yield "Megatron-Bridge has no recipe of mixed precision for fp32: set mixed_precision to null in Python."
    # Notes on the recipe of mixed precision, which no other setting of a file overrides
    if case.value_bytes == 2 and case.precision == "fp16" and case.gradient_bytes == 4:
        yield "Megatron-Bridge sums gradients in fp16 beside fp16; the plan sums them in fp32."
    if case.value_bytes == 2 and case.precision != "fp16" and case.gradient_bytes == 2:
        yield "Megatron-Bridge sums gradients in fp32 beside bf16, the plan in 16 bits: more memory than predicted."


def _settings(case: Case) -> Settings:
    precision, states = _PRECISION.get(case.precision), shared.state_settings(case)
    layout = {**shared.degree_settings(case), **_pipeline(case)}
    kernels = {**_RECOMPUTES_NOTHING, **shared.kernel_settings(case)}
    sharing = {"use_distributed_optimizer": states["use_distributed_optimizer"]}
    return {
        "model": {**_sizes(case), **layout, **kernels},
        "train": {"micro_batch_size": case.micro_batch, "global_batch_size": case.global_batch},
        "dataset": {"seq_length": case.seq_len},
        "ddp": states,
        "optimizer": {**shared.optimizer_settings(case), **sharing},
        "dist": {"use_megatron_fsdp": terms.uses_fsdp(case), "use_tp_pp_dp_mapping": terms.keeps_mapping(case)},
        **({"checkpoint": {"ckpt_format": "fsdp_dtensor"}} if terms.uses_fsdp(case) else {}),
        **({"mixed_precision": precision} if precision else {}),
    }


def _sizes(case: Case) -> Settings:
    model, sizes = case.model, read_sizes(case.model)
    return {
        "num_layers": sizes.count,
        "hidden_size": model.hidden,
        "ffn_hidden_size": sizes.ffn,
        **_attention(sizes.layer.attention),
        "seq_length": case.seq_len,
        "vocab_size": model.vocab,
        "share_embeddings_and_output_weights": model.tied,
        **_experts(sizes),
    }


def _attention(attention: AttentionShape) -> Settings:
    width: Settings = {} if attention.latent else {"kv_channels": attention.head_dim}
    return {
        "num_attention_heads": attention.heads,
        "num_query_groups": attention.kv_heads,
        **width,
        **shared.latent_settings(attention),
    }


def _experts(sizes: UniformSizes) -> Settings:
    experts = sizes.experts
    if experts is None:
        return {}
    which = [int(mixed) for mixed in sizes.mixed]
    return {"num_moe_experts": experts.count, "moe_layer_freq": which, **shared.expert_settings(sizes)}


def _pipeline(case: Case) -> Settings:
    """Both ways to cut are written, since a recipe may set the other one."""
    uneven = terms.needs_layout(case)
    return {
        "virtual_pipeline_model_parallel_size": None if uneven else terms.virtual_stages(case),
        "pipeline_model_parallel_layout": render_layout(case) if uneven else None,
    }
