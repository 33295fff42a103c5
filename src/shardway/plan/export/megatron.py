"""Megatron-LM: a shell file with its flags; settings and notes of Megatron Core that NeMo shares.

Invariants:
- Settings and notes that both libraries share are derived here once, so that they differ only in spelling.
- Each flag follows from the sizes of the plan. Properties of a model that a plan does not have (scaling of positions,
  epsilons, how experts are chosen and balanced) are left to Megatron and noted.
- Sourced, the file starts nothing and changes nothing but MEGATRON_ARGS, EXPECTED_RANKS and one variable of CUDA's.
  Megatron derives the data degree from the world, so a comment and EXPECTED_RANKS state what that has to be.

Sources: Megatron Core 0.16 to 0.19 (megatron/training/arguments.py, core/transformer/transformer_config.py,
core/model_parallel_config.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from shardway.plan.case import Case, layers_of_stages
from shardway.plan.export import common
from shardway.plan.export.common import EmittedFile, Settings, UniformSizes
from shardway.plan.shapes import AttentionShape

# --- notes on Megatron Core

OPTIMIZERS = {"adamw": "adam", "sgd": "sgd", "muon": "muon"}


def uses_fsdp(case: Case) -> bool:
    """Whether Megatron-FSDP shards: ZeRO beyond the first stage; the first is the distributed optimizer."""
    return case.zero >= 2 and case.degrees.shards > 1


def degrees_of(case: Case) -> Mapping[str, int]:
    """The degrees as Megatron has them; dp is the rest of the ranks."""
    degrees = case.degrees
    return {"dp": degrees.data, "cp": degrees.cp, "tp": degrees.tp, "pp": degrees.pp}


def keeps_mapping(case: Case) -> bool:
    """Whether pipeline ranks lie within copies, as in the plan; Megatron can do that if nothing else shares data."""
    degrees = case.degrees
    return degrees.pp > 1 and degrees.dp_replicate > 1 and degrees.dp_shard == 1


def virtual_stages(case: Case) -> int | None:
    """Stages of a rank, if there are several."""
    return case.stages_per_rank if case.degrees.pp > 1 and case.stages_per_rank > 1 else None


def needs_layout(case: Case) -> bool:
    """Whether stages differ in their layers, so that each has to be written out."""
    return case.degrees.pp > 1 and not common.is_even(case)


def describe_megatron(case: Case, library: str, priced_as: Collection[str]) -> Iterator[str]:
    """Notes for either library; `priced_as` are the engines whose prediction is that of the library."""
    yield from common.describe_engine(case, library, priced_as)
    if not keeps_mapping(case):
        yield from common.describe_order(case, "Megatron")
    if uses_fsdp(case) and case.optimizer == "muon":
        yield "Megatron-FSDP refuses Muon: share the optimizer states alone, as ZeRO-1 does."
    if case.zero == 3 and not case.reshard:
        yield "Megatron-FSDP frees weights after the forward pass always: less memory and more traffic than predicted."
    if uses_fsdp(case) and case.degrees.tp * case.degrees.cp > 1:
        yield (
            "Megatron-FSDP wants CUDA_DEVICE_MAX_CONNECTIONS above 1, and tp or cp want it at 1 before Blackwell: "
            "expect less overlap than predicted."
        )
    schedule = common.schedule_of(case)
    if case.degrees.pp > 1 and schedule not in ("1f1b", "interleaved"):
        stand_in = "the interleaved 1F1B" if virtual_stages(case) else "1F1B"
        yield f"Megatron has no schedule {schedule}: it runs {stand_in}, with another bubble and other memory."
    if case.degrees.pp > 1 and schedule == "interleaved" and case.micro_batches % case.degrees.pp:
        yield (
            f"Megatron interleaves groups of {case.degrees.pp} micro-batches, and the plan's {case.micro_batches} are "
            "no multiple of that: set the size of a group of micro-batches, or change the batch."
        )
    if case.precision == "tf32":
        yield "Megatron has no option for tf32: the file says fp32, and NVIDIA_TF32_OVERRIDE=1 sets the rest."
    if case.precision == "fp8":
        yield "The plan does not say how fp8 is scaled; the file says by tensor, from the values at hand."
    if case.low_bits:
        yield f"{case.precision} needs Transformer Engine and a GPU that has it; weights are gathered in bf16."
    yield from common.describe_optimizer(case, library, OPTIMIZERS)
    if case.recompute in ("products", "operators"):
        yield (
            f'Megatron recomputes named modules, the plan "{case.recompute}": nothing is recomputed, which takes more '
            "memory than predicted."
        )
    if case.attention == "flash1":
        yield "Transformer Engine has no first FlashAttention; a later one is faster than predicted."
    if case.compiled:
        yield "Megatron does not use torch.compile; the kernels of Transformer Engine are fused as they are."
    if case.async_tensor and not (case.sequence and case.degrees.tp > 1):
        yield "Megatron overlaps the collectives of tp only with sequence parallelism: it is off."
    if case.offload:
        yield "CPU offload uses the precision-aware optimizer of Transformer Engine."
    if case.offload and case.zero == 3:
        yield "Megatron offloads optimizer states alone, the plan weights and gradients as well: more memory."
    whole = 2 * case.degrees.cp if case.degrees.cp > 1 else 1
    if case.seq_len % whole:
        yield f"Megatron refuses sequences that are no multiple of 2 x cp = {whole}, and the plan has {case.seq_len}."
    # Megatron rounds the vocabulary up to a multiple of 128 for each rank of the tensor axis
    unit = 128 * case.degrees.tp
    padded = -(-case.model.vocab // unit) * unit
    if padded != case.model.vocab:
        yield f"Megatron makes {padded:,} entries of the vocabulary of {case.model.vocab:,}, a multiple of 128 x tp."


# --- settings by the names of TransformerConfig

_ATTENTION = {"plain": "unfused", "flash3": "fused"}
"""cuDNN's kernel for attention made for Hopper; FlashAttention's for the others."""

_RECOMPUTE: Mapping[str, Settings] = {
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}


def _dashed(settings: Settings) -> Settings:
    return {name.replace("_", "-"): value for name, value in settings.items()}


def latent_settings(attention: AttentionShape) -> Settings:
    """Settings of latent attention, if a model has it."""
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
    """Settings of experts except their number and layers, which the libraries spell differently."""
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
    """Degrees except the data degree, which is the rest of the ranks."""
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
    """Which ranks share which states, and which collectives of them overlap with products."""
    fsdp, shared, gradients = uses_fsdp(case), case.zero >= 1, case.engine.overlaps_gradients
    strategy = "optim_grads_params" if case.zero == 3 else "optim_grads"
    return {
        "use_distributed_optimizer": shared,
        "num_distributed_optimizer_instances": case.degrees.dp_replicate if shared else 1,
        "use_megatron_fsdp": fsdp,
        "data_parallel_sharding_strategy": strategy if fsdp else "no_shard",
        "overlap_grad_reduce": gradients,
        "overlap_param_gather": gradients and case.engine.overlaps_parameters and shared,
    }


def optimizer_settings(case: Case) -> Settings:
    """The optimizer, and where it keeps its states."""
    return {
        "optimizer": OPTIMIZERS.get(case.optimizer, "adam"),
        "optimizer_cpu_offload": case.offload,
        "use_precision_aware_optimizer": case.offload,
    }


def kernel_settings(case: Case) -> Settings:
    """Attention, recompute, fusion, overlap, dropout."""
    rate = 0.1 if case.dropout else 0.0
    return {
        "attention_backend": _ATTENTION.get(case.attention, "flash"),
        **_RECOMPUTE.get(case.recompute, {}),
        "tp_comm_overlap": case.hides_tensor,
        "cross_entropy_loss_fusion": case.fused_loss,
        "attention_dropout": rate,
        "hidden_dropout": rate,
    }


# --- the architecture as flags of Megatron-LM


def model_flags(case: Case) -> Settings:
    """Sizes, norms, biases, positions, experts."""
    model, sizes = case.model, common.read_sizes(case.model)
    attention, experts = sizes.layer.attention, sizes.experts
    grouped = attention.kv_heads != attention.heads and attention.latent is None
    windows: Settings = {}
    if sizes.window:
        # Megatron counts the positions before a token, a plan includes the token itself.
        some = None if all(sizes.windowed) else common.render_pattern(sizes.windowed)
        windows = {"window-size": f"{sizes.window - 1},0", "window-attn-skip-freq": some}
    counted: Settings = {}
    if experts:
        some = None if all(sizes.mixed) else common.render_pattern(sizes.mixed)
        counted = {"num-experts": experts.count, "moe-layer-freq": some}
    return {
        "num-layers": sizes.count,
        "hidden-size": model.hidden,
        "ffn-hidden-size": sizes.ffn,
        "num-attention-heads": attention.heads,
        "group-query-attention": grouped,
        "num-query-groups": attention.kv_heads if grouped else None,
        "kv-channels": attention.head_dim,
        "qk-layernorm": attention.qk_norm or attention.latent is not None,
        **_dashed(latent_settings(attention)),
        **windows,
        "seq-length": case.seq_len,
        "max-position-embeddings": max(case.seq_len, model.positions),
        "position-embedding-type": "learned_absolute" if model.positions else "rope",
        "normalization": "LayerNorm" if sizes.layer.norm_bias else "RMSNorm",
        "swiglu": sizes.layer.gated,
        # Megatron has biases everywhere, or on queries, keys and values, or nowhere.
        "disable-bias-linear": not (sizes.layer.ffn_bias or attention.output_bias),
        "add-qkv-bias": attention.bias and not (sizes.layer.ffn_bias or attention.output_bias),
        "untie-embeddings-and-output-weights": not model.tied,
        "vocab-size": model.vocab,
        **counted,
        **_dashed(expert_settings(sizes)),
    }


# --- the shell file

FILE = "megatron.sh"

_PRECISION: Mapping[str, Settings] = {
    "fp16": {"fp16": True},
    "bf16": {"bf16": True},
    "fp8": {"bf16": True, "fp8-format": "hybrid", "fp8-recipe": "tensorwise"},
    "mxfp8": {"bf16": True, "fp8-format": "e4m3", "fp8-recipe": "mxfp8"},
    "fp4": {"bf16": True, "fp4-format": "e2m1", "fp4-recipe": "nvfp4"},
}


def describe(case: Case) -> Iterator[str]:
    """What the flags leave open or cannot express."""
    sizes = common.read_sizes(case.model)
    attention = sizes.layer.attention
    yield from common.describe_irregular(case.model)
    biases = (attention.bias, attention.output_bias, sizes.layer.ffn_bias)
    if len(set(biases)) > 1 and any(biases[1:]):
        yield "Megatron has biases in all matrices or in none but queries, keys and values; here it has them in all."
    if not sizes.layer.gated:
        yield "Without gates the activation is GELU; another one is an option of its own."
    if not case.model.positions:
        yield "Base and scaling of rotary positions are not part of a plan: set --rotary-base as the model has it."
    if sizes.experts:
        yield "How the router scores, balances and drops is not part of a plan: set the --moe-router options."
    yield from describe_megatron(case, "Megatron-LM", ("megatron", "megatron-2021"))
    left = "the data, the tokenizer, the number of iterations, the learning rate, the folders of checkpoints"
    yield common.describe_script(left)


def render(case: Case, head: Sequence[str]) -> list[EmittedFile]:
    """megatron.sh."""
    checkpoints: Settings = {"ckpt_format": "fsdp_dtensor"} if uses_fsdp(case) else {}
    cut: Settings = {}
    if needs_layout(case):
        cut = {"pipeline-model-parallel-layout": common.render_layout(case)}
    elif virtual_stages(case):
        cut = {"num-layers-per-virtual-pipeline-stage": layers_of_stages(case)[0]}
    # By default Megatron sums gradients in fp32 beside bf16 and in fp16 beside fp16.
    wide = case.gradient_bytes == 4
    summed: Settings = {
        "accumulate-allreduce-grads-in-fp32": wide,
        "grad-reduce-in-bf16": not wide and case.precision != "fp16",
    }
    groups = {
        "model": model_flags(case),
        "layout": {**_dashed(degree_settings(case)), **cut, "use-tp-pp-dp-mapping": keeps_mapping(case)},
        "batch": {"micro-batch-size": case.micro_batch, "global-batch-size": case.global_batch},
        "states": _dashed({**optimizer_settings(case), **state_settings(case), **checkpoints}),
        "formats": {**_PRECISION.get(case.precision, {}), **(summed if case.value_bytes == 2 else {})},
        "kernels": _dashed(kernel_settings(case)),
    }
    # CUDA_DEVICE_MAX_CONNECTIONS: one queue orders collectives of tp and cp; Megatron-FSDP refuses it.
    connections = "export CUDA_DEVICE_MAX_CONNECTIONS=1\n" if case.degrees.tp * case.degrees.cp > 1 else ""
    connections = "unset CUDA_DEVICE_MAX_CONNECTIONS\n" if uses_fsdp(case) else connections
    arrays = "".join(f"  # {name}\n{common.write_flags(flags)}" for name, flags in groups.items())
    body = (
        f'# source {FILE}; torchrun ... pretrain_gpt.py "${{MEGATRON_ARGS[@]}}" and your own flags\n'
        f"EXPECTED_RANKS={case.degrees.world}\n{connections}\nMEGATRON_ARGS=(\n{arrays})\n"
    )
    return [common.write(FILE, head, body)]
