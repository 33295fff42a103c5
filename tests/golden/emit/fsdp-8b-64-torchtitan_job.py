# Planned by Shardway: 1.23 s a step (predicted, not measured), 45.6 GiB on the fullest rank.
# One rank computes 40 % of its peak.
# llama-3.1-8b: degrees dp_shard 64 = 64 ranks, as many as in the plan.
# Still to do, or different from the plan:
# - torchtitan chooses the kernel of attention by itself; the prediction is for flash2.
# - The loss is computed with a full copy of the logits in torchtitan.toml; torchtitan_job.py computes it in parts,
#   which takes less memory than predicted.
# - Set in your own script or on the command line: the data set, the number of steps, the learning rate, the folder
#   of the tokenizer.

from torchtitan.config import CompileConfig, ParallelismConfig
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.models.llama3 import model_registry
from torchtitan.models.llama3.config_registry import llama3_8b
from torchtitan.trainer import Trainer


def planned() -> Trainer.Config:
    # python -m torchtitan.train --module torchtitan_job --config planned
    config = llama3_8b()
    config.model_spec = model_registry("8B")
    config.training.local_batch_size = 1
    config.training.global_batch_size = 128
    config.training.seq_len = 8192
    config.training.mixed_precision_param = "bfloat16"
    config.training.enable_cpu_offload = False
    config.training.disable_cuda_graphs = True
    config.parallelism = ParallelismConfig(
        data_parallel_replicate_degree=1,
        data_parallel_shard_degree=64,
        fsdp_reshard_after_forward="always",
        context_parallel_degree=1,
        tensor_parallel_degree=1,
        pipeline_parallel_degree=1,
        expert_parallel_degree=1,
        enable_sequence_parallel=True,
    )
    config.activation_checkpoint = FullAC.Config()
    config.compile = CompileConfig(
        enable=True,
        enable_async_tensor_parallel=False,
    )
    return config
