"""What other trainers call what a key of a run file says: one row a name.

Invariant: every key named here is one of the schema's; a name of a peer that means two things has a row each. This
module must not translate values: it says where to look.
"""

from __future__ import annotations

from dataclasses import dataclass

HF, LIGHTNING, DEEPSPEED, FSDP = "transformers, accelerate", "Lightning", "DeepSpeed", "PyTorch's FSDP"
MEGATRON, TITAN, SLURM = "Megatron-LM", "torchtitan", "Slurm"


@dataclass(frozen=True)
class PeerName:
    """A name that `peer` has for what `keys` say; `note` is what differs."""

    name: str
    peer: str
    keys: tuple[str, ...]
    note: str = ""

    def render(self) -> str:
        """ "learning_rate (transformers) is optim.lr here"."""
        note = f"; {self.note}" if self.note else ""
        return f"{self.name} ({self.peer}) is {', '.join(self.keys)} here{note}"


_BATCH = "all samples of a step over all ranks; accumulation follows from it and train.micro_batch"

_BEST = "`shardway checkpoint export RUN FOLDER --best` takes the best one out"
_DIRECTION = 'a word before the metric, as in "max f1" or "min rmse"'

PEERS: tuple[PeerName, ...] = (
    # --- transformers' TrainingArguments
    PeerName("learning_rate", HF, ("optim.lr",)),
    PeerName("gradient_accumulation_steps", f"{HF}, DeepSpeed", ("train.global_batch", "train.micro_batch"), _BATCH),
    PeerName("per_device_train_batch_size", HF, ("train.micro_batch", "train.global_batch"), _BATCH),
    PeerName("per_device_eval_batch_size", HF, ("train.micro_batch",)),
    PeerName("auto_find_batch_size", HF, ("train.micro_batch",), 'what "auto" does'),
    PeerName("max_steps", f"{HF}, Lightning", ("train.steps",)),
    PeerName("num_train_epochs", HF, ("train.steps",), 'as in "3 epochs"'),
    PeerName("save_total_limit", HF, ("checkpoint.keep",)),
    PeerName("load_best_model_at_end", HF, ("checkpoint.keep_best",), _BEST),
    PeerName("metric_for_best_model", HF, ("checkpoint.monitor",), 'as in "accuracy" or "max f1"'),
    PeerName("greater_is_better", HF, ("checkpoint.monitor",), _DIRECTION),
    PeerName("early_stopping_patience", HF, ("train.patience",), "counted in validations"),
    PeerName("save_steps", HF, ("checkpoint.every",), 'as in "500 steps"'),
    PeerName("save_strategy", HF, ("checkpoint.every",)),
    PeerName("eval_steps", HF, ("train.validate_every",)),
    PeerName("eval_strategy", HF, ("train.validate_every",)),
    PeerName("evaluation_strategy", HF, ("train.validate_every",)),
    PeerName("fp16", HF, ("precision.compute",), 'as "fp16"'),
    PeerName("bf16", HF, ("precision.compute",), 'as "bf16"'),
    PeerName("tf32", HF, ("precision.tf32",)),
    PeerName("gradient_checkpointing", HF, ("recompute.mode",)),
    PeerName("max_grad_norm", HF, ("optim.clip",)),
    PeerName("warmup_ratio", HF, ("optim.warmup",), 'as a length, such as "100 steps"'),
    PeerName("warmup_steps", HF, ("optim.warmup",)),
    PeerName("lr_scheduler_type", HF, ("optim.schedule",)),
    PeerName("adam_beta1", HF, ("optim.betas",)),
    PeerName("adam_beta2", HF, ("optim.betas",)),
    PeerName("adam_epsilon", HF, ("optim.eps",)),
    PeerName("optim", HF, ("optim.name",)),
    PeerName("output_dir", HF, ("run.root", "run.name"), "or --dir"),
    PeerName("run_name", HF, ("run.name",)),
    PeerName("resume_from_checkpoint", HF, ("checkpoint.every",), "a run goes on by itself; --fresh starts over"),
    PeerName("dataloader_num_workers", HF, ("data.workers",)),
    PeerName("dataloader_prefetch_factor", HF, ("data.prefetch",)),
    PeerName("torch_compile", HF, ("train.compile",)),
    PeerName("data_seed", HF, ("train.seed",)),
    PeerName("full_determinism", HF, ("train.deterministic",)),
    PeerName("model_name_or_path", HF, ("model.hf",)),
    PeerName("model_max_length", HF, ("data.seq_len",)),
    PeerName("block_size", f"{HF}, nanoGPT", ("data.seq_len",)),
    PeerName("ddp_bucket_cap_mb", HF, ("parallel.bucket",)),
    PeerName("deepspeed", HF, ("train.engine", "deepspeed.settings")),
    PeerName("mixed_precision", HF, ("precision.compute",)),
    PeerName("num_processes", HF, ("site.ranks_per_node",), "or --nproc"),
    PeerName("num_machines", HF, ("site.nodes",)),
    # --- Lightning's Trainer
    PeerName("devices", LIGHTNING, ("site.ranks_per_node",), "or --nproc; run.device says which kind"),
    PeerName("num_nodes", LIGHTNING, ("site.nodes",)),
    PeerName("accelerator", LIGHTNING, ("run.device",)),
    PeerName("strategy", LIGHTNING, ("parallel.layout", "train.engine")),
    PeerName("precision", LIGHTNING, ("precision.compute", "precision.weights")),
    PeerName("max_epochs", LIGHTNING, ("train.steps",), 'as in "3 epochs"'),
    PeerName("accumulate_grad_batches", LIGHTNING, ("train.global_batch", "train.micro_batch"), _BATCH),
    PeerName("gradient_clip_val", LIGHTNING, ("optim.clip",)),
    PeerName("val_check_interval", LIGHTNING, ("train.validate_every",)),
    PeerName("limit_val_batches", LIGHTNING, ("train.validation_samples",)),
    PeerName("save_top_k", LIGHTNING, ("checkpoint.keep_best",), _BEST),
    PeerName("save_last", LIGHTNING, ("checkpoint.keep",), "the newest are always kept"),
    PeerName("monitor", LIGHTNING, ("checkpoint.monitor",), 'as in "accuracy" or "max f1"'),
    PeerName("mode", LIGHTNING, ("checkpoint.monitor",), _DIRECTION),
    PeerName(
        "EarlyStopping", f"{LIGHTNING}, Keras", ("train.patience", "checkpoint.monitor"), "counted in validations"
    ),
    PeerName("patience", f"{LIGHTNING}, Keras", ("train.patience",), "counted in validations"),
    PeerName("every_n_train_steps", LIGHTNING, ("checkpoint.every",)),
    PeerName("deterministic", LIGHTNING, ("train.deterministic",)),
    PeerName("benchmark", LIGHTNING, ("train.cudnn_benchmark",)),
    PeerName("max_time", LIGHTNING, ("site.walltime",)),
    PeerName("default_root_dir", LIGHTNING, ("run.root",)),
    # --- DeepSpeed's ds_config.json
    PeerName("zero_optimization.stage", DEEPSPEED, ("deepspeed.stage", "parallel.dp_shard")),
    PeerName("zero_stage", DEEPSPEED, ("deepspeed.stage", "parallel.dp_shard")),
    PeerName("train_batch_size", DEEPSPEED, ("train.global_batch",)),
    PeerName("train_micro_batch_size_per_gpu", DEEPSPEED, ("train.micro_batch",)),
    PeerName("gradient_clipping", DEEPSPEED, ("optim.clip",)),
    PeerName("offload_optimizer", DEEPSPEED, ("deepspeed.offload_optimizer", "parallel.cpu_offload")),
    PeerName("offload_param", DEEPSPEED, ("deepspeed.offload_params",)),
    PeerName("initial_scale_power", DEEPSPEED, ("precision.loss_scale",)),
    PeerName("activation_checkpointing", DEEPSPEED, ("recompute.mode",)),
    # --- FSDP, DDP
    PeerName("fsdp", f"{FSDP}, transformers", ("parallel.dp_shard",)),
    PeerName("ddp", "PyTorch's DDP", ("parallel.dp_replicate",)),
    PeerName("sharding_strategy", FSDP, ("parallel.dp_shard", "parallel.reshard_after_forward")),
    PeerName("reshard_after_forward", FSDP, ("parallel.reshard_after_forward",)),
    PeerName("cpu_offload", FSDP, ("parallel.cpu_offload",)),
    PeerName("backward_prefetch", FSDP, ("parallel.prefetch",)),
    PeerName("bucket_cap_mb", "PyTorch's DDP", ("parallel.bucket",)),
    PeerName(
        "find_unused_parameters", "PyTorch's DDP", ("parallel.static_graph",), "unused ones are found by themselves"
    ),
    # --- Megatron-LM's flags
    PeerName("tensor_model_parallel_size", MEGATRON, ("parallel.tp",)),
    PeerName("pipeline_model_parallel_size", MEGATRON, ("parallel.pp",)),
    PeerName("context_parallel_size", MEGATRON, ("parallel.cp",)),
    PeerName("expert_model_parallel_size", MEGATRON, ("parallel.ep",)),
    PeerName("sequence_parallel", MEGATRON, ("parallel.tp_sequence",)),
    PeerName("use_distributed_optimizer", MEGATRON, ("parallel.dp_shard",)),
    PeerName("num_layers_per_virtual_pipeline_stage", MEGATRON, ("parallel.pp_stages_per_rank",)),
    PeerName("micro_batch_size", MEGATRON, ("train.micro_batch",)),
    PeerName("global_batch_size", f"{MEGATRON}, {TITAN}", ("train.global_batch",)),
    PeerName("train_iters", MEGATRON, ("train.steps",)),
    PeerName("train_samples", MEGATRON, ("train.steps",), 'as in "1e6 samples"'),
    PeerName("lr_decay_style", MEGATRON, ("optim.schedule",)),
    PeerName("lr_warmup_iters", MEGATRON, ("optim.warmup",)),
    PeerName("min_lr", MEGATRON, ("optim.final_lr",), "as a part of optim.lr"),
    PeerName("clip_grad", MEGATRON, ("optim.clip",)),
    PeerName("save_interval", MEGATRON, ("checkpoint.every",)),
    PeerName("eval_interval", f"{MEGATRON}, nanoGPT", ("train.validate_every",)),
    PeerName("recompute_granularity", MEGATRON, ("recompute.mode",)),
    PeerName("recompute_activations", MEGATRON, ("recompute.mode",)),
    PeerName("num_layers", MEGATRON, ("model.layers",)),
    PeerName("hidden_size", f"{MEGATRON}, transformers", ("model.dim",)),
    PeerName("num_attention_heads", f"{MEGATRON}, transformers", ("model.heads",)),
    PeerName("num_query_groups", MEGATRON, ("model.kv_heads",)),
    PeerName("num_key_value_heads", "transformers", ("model.kv_heads",)),
    PeerName("num_hidden_layers", "transformers", ("model.layers",)),
    PeerName("intermediate_size", "transformers", ("model.ffn_dim",)),
    PeerName("vocab_size", "transformers, nanoGPT", ("model.vocab",)),
    PeerName("ffn_hidden_size", MEGATRON, ("model.ffn_dim",)),
    PeerName("seq_length", MEGATRON, ("data.seq_len",)),
    PeerName("num_experts", MEGATRON, ("model.experts",)),
    PeerName("moe_router_topk", MEGATRON, ("model.experts_per_token",)),
    PeerName("distributed_timeout_minutes", MEGATRON, ("run.collective_timeout",)),
    # --- torchtitan's job config
    PeerName("data_parallel_replicate_degree", TITAN, ("parallel.dp_replicate",)),
    PeerName("data_parallel_shard_degree", TITAN, ("parallel.dp_shard",)),
    PeerName("tensor_parallel_degree", TITAN, ("parallel.tp",)),
    PeerName("pipeline_parallel_degree", TITAN, ("parallel.pp",)),
    PeerName("context_parallel_degree", TITAN, ("parallel.cp",)),
    PeerName("expert_parallel_degree", TITAN, ("parallel.ep",)),
    PeerName("pipeline_parallel_schedule", TITAN, ("parallel.pp_schedule",)),
    PeerName("local_batch_size", TITAN, ("train.micro_batch",)),
    PeerName("activation_checkpoint.mode", TITAN, ("recompute.mode",)),
    PeerName("activation_checkpoint", TITAN, ("recompute.mode",)),
    PeerName("checkpoint.interval", TITAN, ("checkpoint.every",)),
    PeerName("keep_latest_k", TITAN, ("checkpoint.keep",)),
    PeerName("async_mode", TITAN, ("checkpoint.background",)),
    PeerName("training.seq_len", TITAN, ("data.seq_len",)),
    PeerName("training.steps", TITAN, ("train.steps",)),
    PeerName("dump_folder", TITAN, ("run.root",)),
    PeerName("lr_scheduler.warmup_steps", TITAN, ("optim.warmup",)),
    PeerName("decay_ratio", TITAN, ("optim.decay",)),
    # --- plain PyTorch, nanoGPT, Slurm
    PeerName("batch_size", "PyTorch", ("train.global_batch",), _BATCH),
    PeerName("epochs", "PyTorch", ("train.steps",), 'as in "3 epochs"'),
    PeerName("num_workers", "PyTorch", ("data.workers",)),
    PeerName("prefetch_factor", "PyTorch", ("data.prefetch",)),
    PeerName("weight_decay", "PyTorch", ("optim.weight_decay",)),
    PeerName("max_iters", "nanoGPT", ("train.steps",)),
    PeerName("grad_clip", "nanoGPT", ("optim.clip",)),
    PeerName("n_layer", "nanoGPT, transformers", ("model.layers",)),
    PeerName("n_head", "nanoGPT, transformers", ("model.heads",)),
    PeerName("n_embd", "nanoGPT, transformers", ("model.dim",)),
    PeerName("time", SLURM, ("site.walltime",)),
    PeerName("partition", SLURM, ("site.queue",)),
    PeerName("account", SLURM, ("site.account",)),
    PeerName("ntasks_per_node", SLURM, ("site.ranks_per_node",)),
    PeerName("nodes", SLURM, ("site.nodes",)),
)
"""What a person may be used to."""


def plain_name(word: str) -> str:
    """A name as the table has it: "--tensor-model-parallel-size" -> "tensor_model_parallel_size"."""
    return word.strip().lstrip("-").replace("-", "_").lower()


def find_peers(word: str) -> list[PeerName]:
    """The rows of a name, with or without the section that the peer has it in, or a person has put it in here; of such
    a section alone those of its names."""
    name = plain_name(word)
    name = name.partition("(")[0]  # EarlyStopping(patience=3)
    exact = [row for row in PEERS if row.name.lower() == name]
    exact = exact or [row for row in PEERS if row.name.startswith(f"{name}.")]
    return exact or [row for row in PEERS if "." in name and row.name == name.rpartition(".")[2]]
