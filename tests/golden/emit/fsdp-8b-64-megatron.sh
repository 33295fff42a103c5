# Planned by Shardway: 1.23 s a step (predicted, not measured), 45.6 GiB on the fullest rank.
# One rank computes 40 % of its peak.
# llama-3.1-8b: degrees dp 64 = 64 ranks, as many as in the plan.
# Still to do, or different from the plan:
# - Base and scaling of rotary positions are not part of a plan: set --rotary-base as the model has it.
# - The prediction is that of the engine "fsdp2"; for Megatron-LM ask for that of "megatron" or "megatron-2021".
# - Megatron does not use torch.compile; the kernels of Transformer Engine are fused as they are.
# - Set in your own script or on the command line: the data, the tokenizer, the number of iterations, the learning
#   rate, the folders of checkpoints.

# source megatron.sh; torchrun ... pretrain_gpt.py "${MEGATRON_ARGS[@]}" and your own flags
EXPECTED_RANKS=64
unset CUDA_DEVICE_MAX_CONNECTIONS

MEGATRON_ARGS=(
  # model
  --num-layers 32
  --hidden-size 4096
  --ffn-hidden-size 14336
  --num-attention-heads 32
  --group-query-attention
  --num-query-groups 8
  --kv-channels 128
  --seq-length 8192
  --max-position-embeddings 8192
  --position-embedding-type rope
  --normalization RMSNorm
  --swiglu
  --disable-bias-linear
  --untie-embeddings-and-output-weights
  --vocab-size 128256
  # layout
  --tensor-model-parallel-size 1
  --pipeline-model-parallel-size 1
  --context-parallel-size 1
  # batch
  --micro-batch-size 1
  --global-batch-size 128
  # states
  --optimizer adam
  --use-distributed-optimizer
  --num-distributed-optimizer-instances 1
  --use-megatron-fsdp
  --data-parallel-sharding-strategy optim_grads_params
  --overlap-grad-reduce
  --overlap-param-gather
  --ckpt-format fsdp_dtensor
  # formats
  --bf16
  --accumulate-allreduce-grads-in-fp32
  # kernels
  --attention-backend flash
  --recompute-granularity full
  --recompute-method uniform
  --recompute-num-layers 1
  --attention-dropout 0.0
  --hidden-dropout 0.0
)
