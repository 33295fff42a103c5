# Planned by Shardway: 1.23 s a step (predicted, not measured), 45.6 GiB on the fullest rank.
# One rank computes 40 % of its peak.
# deepseek-v2-lite: degrees dp 16 x pp 3 = 48 ranks, as many as in the plan.
# Still to do, or different from the plan:
# - Base and scaling of rotary positions are not part of a plan: set --rotary-base as the model has it.
# - How the router scores, balances and drops is not part of a plan: set the --moe-router options.
# - Megatron interleaves groups of 3 micro-batches, and the plan's 16 are no multiple of that: set the size of a
#   group of micro-batches, or change the batch.
# - The plan does not say how fp8 is scaled; the file says by tensor, from the values at hand.
# - fp8 needs Transformer Engine and a GPU that has it; weights are gathered in bf16.
# - Set in your own script or on the command line: the data, the tokenizer, the number of iterations, the learning
#   rate, the folders of checkpoints.

# source megatron.sh; torchrun ... pretrain_gpt.py "${MEGATRON_ARGS[@]}" and your own flags
EXPECTED_RANKS=48

MEGATRON_ARGS=(
  # model
  --num-layers 27
  --hidden-size 2048
  --ffn-hidden-size 10944
  --num-attention-heads 16
  --kv-channels 128
  --qk-layernorm
  --multi-latent-attention
  --kv-lora-rank 512
  --qk-head-dim 128
  --qk-pos-emb-head-dim 64
  --v-head-dim 128
  --seq-length 4096
  --max-position-embeddings 4096
  --position-embedding-type rope
  --normalization RMSNorm
  --swiglu
  --disable-bias-linear
  --untie-embeddings-and-output-weights
  --vocab-size 102400
  --num-experts 64
  --moe-layer-freq '([0]*1+[1]*26)'
  --moe-router-topk 6
  --moe-ffn-hidden-size 1408
  --moe-shared-expert-intermediate-size 2816
  --moe-grouped-gemm
  --moe-token-dispatcher-type alltoall
  # layout
  --tensor-model-parallel-size 1
  --pipeline-model-parallel-size 3
  --context-parallel-size 1
  --expert-model-parallel-size 8
  --expert-tensor-parallel-size 1
  --num-layers-per-virtual-pipeline-stage 3
  # batch
  --micro-batch-size 2
  --global-batch-size 512
  # states
  --optimizer adam
  --use-distributed-optimizer
  --num-distributed-optimizer-instances 1
  --data-parallel-sharding-strategy no_shard
  --overlap-grad-reduce
  --overlap-param-gather
  # formats
  --bf16
  --fp8-format hybrid
  --fp8-recipe tensorwise
  --accumulate-allreduce-grads-in-fp32
  # kernels
  --attention-backend flash
  --attention-dropout 0.0
  --hidden-dropout 0.0
)
