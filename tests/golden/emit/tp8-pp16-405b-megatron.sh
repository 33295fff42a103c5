# Planned by Shardway: 1.23 s a step (predicted, not measured), 45.6 GiB on the fullest rank.
# One rank computes 40 % of its peak.
# llama-3.1-405b: degrees dp 8 x tp 8 x pp 16 = 1024 ranks, as many as in the plan.
# Still to do, or different from the plan:
# - Base and scaling of rotary positions are not part of a plan: set --rotary-base as the model has it.
# - Megatron makes 129,024 entries of the vocabulary of 128,256, a multiple of 128 x tp.
# - Set in your own script or on the command line: the data, the tokenizer, the number of iterations, the learning
#   rate, the folders of checkpoints.

# source megatron.sh; torchrun ... pretrain_gpt.py "${MEGATRON_ARGS[@]}" and your own flags
EXPECTED_RANKS=1024
export CUDA_DEVICE_MAX_CONNECTIONS=1

MEGATRON_ARGS=(
  # model
  --num-layers 126
  --hidden-size 16384
  --ffn-hidden-size 53248
  --num-attention-heads 128
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
  --tensor-model-parallel-size 8
  --pipeline-model-parallel-size 16
  --context-parallel-size 1
  --sequence-parallel
  --pipeline-model-parallel-layout 'Ettttttt|tttttttt|tttttttt|tttttttt|tttttttt|tttttttt|tttttttt|tttttttt|tttttttt|tttttttt|tttttttt|tttttttt|tttttttt|tttttttt|tttttttt|tttttttL'
  # batch
  --micro-batch-size 1
  --global-batch-size 2048
  # states
  --optimizer adam
  --use-distributed-optimizer
  --num-distributed-optimizer-instances 1
  --data-parallel-sharding-strategy no_shard
  --overlap-grad-reduce
  --overlap-param-gather
  # formats
  --bf16
  --accumulate-allreduce-grads-in-fp32
  # kernels
  --attention-backend fused
  --recompute-granularity selective
  --recompute-modules core_attn
  --attention-dropout 0.0
  --hidden-dropout 0.0
)
