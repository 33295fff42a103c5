# Planned by Shardway: 1.23 s a step (predicted, not measured), 45.6 GiB on the fullest rank.
# One rank computes 40 % of its peak.
# llama-3.1-405b: degrees dp_shard 8 x tp 8 x pp 16 = 1024 ranks, as many as in the plan.
# Still to do, or different from the plan:
# - The prediction is that of the engine "megatron"; for torchtitan ask for that of "fsdp2" or "torchtitan".
# - torchtitan shards weights, gradients and optimizer states alike, and the plan shares them as ZeRO-1. Weights
#   stay gathered from the forward to the backward pass, which comes nearest.
# - torchtitan cannot recompute the scores of attention alone; with a fused kernel none are kept anyway.
# - torchtitan chooses the kernel of attention by itself; the prediction is for flash3.
# - The loss is computed with a full copy of the logits in torchtitan.toml; torchtitan_job.py computes it in parts,
#   which takes less memory than predicted.
# - Set in your own script or on the command line: the data set, the number of steps, the learning rate, the folder
#   of the tokenizer.

from torchtitan.config import CompileConfig, ParallelismConfig
from torchtitan.models.llama3 import model_registry
from torchtitan.models.llama3.config_registry import llama3_405b
from torchtitan.trainer import Trainer


def planned() -> Trainer.Config:
    # python -m torchtitan.train --module torchtitan_job --config planned
    config = llama3_405b()
    config.model_spec = model_registry("405B")
    config.training.local_batch_size = 256
    config.training.global_batch_size = 2048
    config.training.seq_len = 8192
    config.training.mixed_precision_param = "bfloat16"
    config.training.enable_cpu_offload = False
    config.training.disable_cuda_graphs = True
    config.parallelism = ParallelismConfig(
        data_parallel_replicate_degree=1,
        data_parallel_shard_degree=8,
        fsdp_reshard_after_forward="never",
        context_parallel_degree=1,
        tensor_parallel_degree=8,
        pipeline_parallel_degree=16,
        pipeline_parallel_schedule="1F1B",
        pipeline_parallel_microbatch_size=1,
        pipeline_parallel_first_stage_less_layers=1,
        pipeline_parallel_last_stage_less_layers=1,
        pipeline_parallel_layers_per_stage=8,
        expert_parallel_degree=1,
        enable_sequence_parallel=True,
    )
    config.activation_checkpoint = None
    config.compile = CompileConfig(
        enable=False,
        enable_async_tensor_parallel=False,
    )
    return config
