"""NeMo: settings in YAML that are merged over a recipe of its Megatron-Bridge.

Invariant: every setting that the plan decides is written, also where a recipe has the same, so that the recipe is free
to be any of the model's family. This module must not import megatron.

Source: Megatron-Bridge 0.3.1 (training/config.py, training/mixed_precision.py, models/gpt_provider.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shardway.plan.case import Case
from shardway.plan.emit import megatron_terms as terms
from shardway.plan.emit.emitted import Emitted, Head, gather, write
from shardway.plan.emit.pipeline import render_layout
from shardway.plan.emit.sizes import Sizes, read_sizes, tell_irregular
from shardway.plan.emit.tellings import tell_script
from shardway.plan.emit.texts import Settings, write_yaml
from shardway.plan.shapes.layer import Attention

FILE = "megatron_bridge.yaml"

_PRECISION = {
    "bf16": "bf16_mixed",
    "fp16": "fp16_mixed",
    "fp8": "bf16_with_fp8_current_scaling_mixed",
    "mxfp8": "bf16_with_mxfp8_mixed",
    "fp4": "bf16_with_nvfp4_mixed",
}


def emit(case: Case, prediction_lines: Sequence[str]) -> Emitted:
    """megatron_bridge.yaml."""
    told = gather([*tell_irregular(case.model), *_tell(case), *terms.tell_megatron(case, "Megatron-Bridge")])
    degrees = case.degrees
    made = {"dp": degrees.data, "cp": degrees.cp, "tp": degrees.tp, "pp": degrees.pp}
    return Emitted((write(FILE, Head(case, prediction_lines, made, told), write_yaml(_settings(case))),), told)


def _tell(case: Case) -> Iterator[str]:
    yield (
        "Start from a recipe of the model's family: norms, gates, biases and positions are not settings of a file, and "
        "the recipe has them."
    )
    yield from tell_script(case, "the recipe, the data, the tokenizer, the number of iterations, the learning rate")
    if case.precision in ("fp32", "tf32"):
        yield "Megatron-Bridge has no recipe of mixed precision for fp32: set mixed_precision to null in Python."


def _settings(case: Case) -> Settings:
    precision = _PRECISION.get(case.precision)
    return {
        "model": {**_sizes(case), **_layout(case), **_kernels(case)},
        "train": {"micro_batch_size": case.micro_batch, "global_batch_size": case.global_batch},
        "dataset": {"seq_length": case.seq_len},
        "ddp": _data_parallel(case),
        "optimizer": _optimizer(case),
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


def _attention(attention: Attention) -> Settings:
    latent = attention.latent
    common: Settings = {"num_attention_heads": attention.heads, "num_query_groups": attention.kv_heads}
    if latent is None:
        return {**common, "kv_channels": attention.head_dim}
    return {
        **common,
        "multi_latent_attention": True,
        "q_lora_rank": latent.q_rank or None,
        "kv_lora_rank": latent.kv_rank,
        "qk_head_dim": attention.head_dim,
        "qk_pos_emb_head_dim": latent.rope_dim,
        "v_head_dim": latent.value_dim,
    }


def _experts(sizes: Sizes) -> Settings:
    experts = sizes.experts
    if experts is None:
        return {}
    return {
        "num_moe_experts": experts.count,
        "moe_router_topk": experts.per_token,
        "moe_ffn_hidden_size": experts.dim,
        "moe_shared_expert_intermediate_size": experts.shared_dim or None,
        "moe_layer_freq": [int(flag) for flag in sizes.mixed],
        "moe_grouped_gemm": True,
        "moe_token_dispatcher_type": "alltoall",
    }


def _layout(case: Case) -> Settings:
    degrees = case.degrees
    virtual = None if terms.needs_layout(case) else terms.virtual_stages(case)
    return {
        "tensor_model_parallel_size": degrees.tp,
        "pipeline_model_parallel_size": degrees.pp,
        "virtual_pipeline_model_parallel_size": virtual,
        "pipeline_model_parallel_layout": render_layout(case) if terms.needs_layout(case) else None,
        "context_parallel_size": degrees.cp,
        "expert_model_parallel_size": degrees.ep,
        "expert_tensor_parallel_size": degrees.etp,
        "sequence_parallel": case.sequence and degrees.tp > 1,
    }


def _kernels(case: Case) -> Settings:
    off: Settings = {"recompute_granularity": None, "recompute_method": None, "recompute_num_layers": None}
    rate = 0.1 if case.dropout else 0.0
    return {
        "attention_backend": terms.attention_backend(case),
        **off,
        **terms.recompute(case),
        "tp_comm_overlap": case.async_tensor and case.sequence and case.degrees.tp > 1,
        "cross_entropy_loss_fusion": case.fused_loss,
        "attention_dropout": rate,
        "hidden_dropout": rate,
    }


def _data_parallel(case: Case) -> Settings:
    fsdp, shared = terms.uses_fsdp(case), terms.uses_distributed_optimizer(case)
    gathers = case.engine.overlaps_gradients and case.engine.overlaps_parameters and shared
    return {
        "use_distributed_optimizer": shared,
        "num_distributed_optimizer_instances": terms.instances(case),
        "use_megatron_fsdp": fsdp,
        "data_parallel_sharding_strategy": terms.strategy(case) if fsdp else "no_shard",
        "overlap_grad_reduce": case.engine.overlaps_gradients,
        "overlap_param_gather": gathers,
    }


def _optimizer(case: Case) -> Settings:
    return {
        "optimizer": terms.OPTIMIZERS.get(case.optimizer, "adam"),
        "use_distributed_optimizer": terms.uses_distributed_optimizer(case),
        "optimizer_cpu_offload": case.offload,
        "use_precision_aware_optimizer": case.offload,
    }
