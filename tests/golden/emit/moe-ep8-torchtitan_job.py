# Planned by Shardway: 1.23 s a step (predicted, not measured), 45.6 GiB on the fullest rank.
# One rank computes 40 % of its peak.
# deepseek-v2-lite: degrees dp_shard 16 x pp 3 = 48 ranks, as many as in the plan.
# Still to do, or different from the plan:
# - The prediction is that of the engine "megatron"; for torchtitan ask for that of "fsdp2" or "torchtitan".
# - torchtitan shards weights, gradients and optimizer states alike, and the plan shares them as ZeRO-1. Weights
#   stay gathered from the forward to the backward pass, which comes nearest.
# - torchtitan wants the model compiled for fp8 to be fast, and the plan does not compile.
# - torchtitan chooses the kernel of attention by itself; the prediction is for flash2.
# - The loss is computed with a full copy of the logits in torchtitan.toml; torchtitan_job.py computes it in parts,
#   which takes less memory than predicted.
# - Set in your own script or on the command line: the data set, the number of steps, the learning rate, the folder
#   of the tokenizer.

from torchtitan.components.quantization import Float8GroupedExpertsConverter, Float8LinearConverter
from torchtitan.config import CompileConfig, ParallelismConfig
from torchtitan.models.deepseek_v3 import model_registry
from torchtitan.models.deepseek_v3.config_registry import deepseek_v3_16b
from torchtitan.trainer import Trainer


def planned() -> Trainer.Config:
    # python -m torchtitan.train --module torchtitan_job --config planned
    config = deepseek_v3_16b()
    converters = [
        Float8LinearConverter.Config(
            filter_fqns=["lm_head", "router.gate"],
            model_compile_enabled=False,
        ),
        Float8GroupedExpertsConverter.Config(
            model_compile_enabled=False,
        ),
    ]
    config.model_spec = model_registry("16B", converters=converters)
    config.training.local_batch_size = 32
    config.training.global_batch_size = 512
    config.training.seq_len = 4096
    config.training.mixed_precision_param = "bfloat16"
    config.training.enable_cpu_offload = False
    config.training.disable_cuda_graphs = True
    config.parallelism = ParallelismConfig(
        data_parallel_replicate_degree=1,
        data_parallel_shard_degree=16,
        fsdp_reshard_after_forward="never",
        context_parallel_degree=1,
        tensor_parallel_degree=1,
        pipeline_parallel_degree=3,
        pipeline_parallel_schedule="Interleaved1F1B",
        pipeline_parallel_microbatch_size=2,
        pipeline_parallel_first_stage_less_layers=0,
        pipeline_parallel_last_stage_less_layers=0,
        pipeline_parallel_layers_per_stage=3,
        expert_parallel_degree=8,
        enable_sequence_parallel=True,
    )
    config.activation_checkpoint = None
    config.compile = CompileConfig(
        enable=False,
        enable_async_tensor_parallel=False,
    )
    return config
