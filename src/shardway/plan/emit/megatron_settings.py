"""Settings of Megatron Core that its libraries share, by the names of TransformerConfig.

Invariant: what both libraries are given is worked out here once, so that they cannot differ but in spelling. This
module must not write a sentence or a file.

Source: Megatron Core 0.16 to 0.19 (core/transformer/transformer_config.py, core/model_parallel_config.py).
"""

from __future__ import annotations

from collections.abc import Mapping

from shardway.plan.case import Case
from shardway.plan.emit import megatron_terms as terms
from shardway.plan.emit.sizes import UniformSizes
from shardway.plan.emit.texts import Settings
from shardway.plan.shapes.layer import AttentionShape

_ATTENTION = {"plain": "unfused", "flash3": "fused"}
"""cuDNN's kernel for those made for Hopper; FlashAttention's for the others."""

_RECOMPUTE: Mapping[str, Settings] = {
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}


def dashed(settings: Settings) -> Settings:
    """The same as options of Megatron-LM."""
    return {name.replace("_", "-"): value for name, value in settings.items()}


def latent_settings(attention: AttentionShape) -> Settings:
    """Attention over compressed keys and values, where a model has it."""
    latent = attention.latent
    if latent is None:
        return {}
    return {
        "multi_latent_attention": True,
        "q_lora_rank": latent.q_rank or None,
        "kv_lora_rank": latent.kv_rank,
        "qk_head_dim": attention.head_dim,
        "qk_pos_emb_head_dim": latent.rope_dim,
        "v_head_dim": latent.value_dim,
    }


def expert_settings(sizes: UniformSizes) -> Settings:
    """Experts but for how many there are and in which layers, for which the libraries have words of their own."""
    experts = sizes.experts
    if experts is None:
        return {}
    return {
        "moe_router_topk": experts.per_token,
        "moe_ffn_hidden_size": experts.dim,
        "moe_shared_expert_intermediate_size": experts.shared_dim or None,
        "moe_grouped_gemm": True,
        "moe_token_dispatcher_type": "alltoall",
    }


def degree_settings(case: Case) -> Settings:
    """Degrees that Megatron is told; the data degree is what is left of the ranks."""
    degrees = case.degrees
    moe = any(layer.experts for layer in case.model.layers)
    return {
        "tensor_model_parallel_size": degrees.tp,
        "pipeline_model_parallel_size": degrees.pp,
        "context_parallel_size": degrees.cp,
        **({"expert_model_parallel_size": degrees.ep, "expert_tensor_parallel_size": degrees.etp} if moe else {}),
        "sequence_parallel": case.sequence and degrees.tp > 1,
    }


def state_settings(case: Case) -> Settings:
    """Who shares which states, and which collectives of them run beside products."""
    fsdp, shared, gradients = terms.uses_fsdp(case), case.zero >= 1, case.engine.overlaps_gradients
    return {
        "use_distributed_optimizer": shared,
        "num_distributed_optimizer_instances": case.degrees.dp_replicate if shared else 1,
        "use_megatron_fsdp": fsdp,
        "data_parallel_sharding_strategy": terms.strategy(case) if fsdp else "no_shard",
        "overlap_grad_reduce": gradients,
        "overlap_param_gather": gradients and case.engine.overlaps_parameters and shared,
    }


def optimizer_settings(case: Case) -> Settings:
    """Which one, and where it keeps its states."""
    return {
        "optimizer": terms.OPTIMIZERS.get(case.optimizer, "adam"),
        "optimizer_cpu_offload": case.offload,
        "use_precision_aware_optimizer": case.offload,
    }


def kernel_settings(case: Case) -> Settings:
    """Attention, recompute, what is fused or overlapped, dropout."""
    rate = 0.1 if case.dropout else 0.0
    return {
        "attention_backend": _ATTENTION.get(case.attention, "flash"),
        **_RECOMPUTE.get(case.recompute, {}),
        "tp_comm_overlap": case.async_tensor and case.sequence and case.degrees.tp > 1,
        "cross_entropy_loss_fusion": case.fused_loss,
        "attention_dropout": rate,
        "hidden_dropout": rate,
    }
