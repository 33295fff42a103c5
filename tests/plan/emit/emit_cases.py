"""The cases that are written for other libraries: three kept as golden files, and any that hypothesis draws."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from shardway.plan.case import Case, Degrees, divisors, find_engine
from shardway.plan.shapes import Architecture, AttentionShape, ExpertsShape, Latent, LayerRun, LayerShape


def decoder(name: str, hidden: int, layers: int, heads: int, kv_heads: int, ffn: int, vocab: int) -> Architecture:
    attention = AttentionShape(heads=heads, kv_heads=kv_heads, head_dim=hidden // heads)
    layer = LayerShape(hidden=hidden, attention=attention, ffn=ffn)
    return Architecture(
        name=name, hidden=hidden, runs=(LayerRun(layer, layers),), vocab=vocab, tied=False, final_norm_parameters=hidden
    )


LLAMA_8B = decoder("llama-3.1-8b", 4096, 32, 32, 8, 14336, 128256)
LLAMA_405B = decoder("llama-3.1-405b", 16384, 126, 128, 8, 53248, 128256)


def _mixture() -> Architecture:
    latent = Latent(kv_rank=512, q_rank=0, rope_dim=64, value_dim=128)
    attention = AttentionShape(heads=16, kv_heads=16, head_dim=128, latent=latent)
    dense = LayerShape(hidden=2048, attention=attention, ffn=10944)
    experts = ExpertsShape(count=64, per_token=6, dim=1408, shared_dim=2816)
    mixed = LayerShape(hidden=2048, attention=attention, ffn=10944, experts=experts)
    runs = (LayerRun(dense, 1), LayerRun(mixed, 26))
    return Architecture(name="deepseek-v2-lite", hidden=2048, runs=runs, vocab=102400, tied=False)


MIXTURE = _mixture()

GOLDEN_CASES = {
    "fsdp-8b-64": Case(
        model=LLAMA_8B,
        seq_len=8192,
        global_batch=128,
        degrees=Degrees(dp_shard=64),
        engine=find_engine("fsdp2"),
        zero=3,
        recompute="full",
        compiled=True,
    ),
    "tp8-pp16-405b": Case(
        model=LLAMA_405B,
        seq_len=8192,
        global_batch=2048,
        degrees=Degrees(dp_shard=8, tp=8, pp=16),
        engine=find_engine("megatron"),
        zero=1,
        recompute="selective",
        attention="flash3",
    ),
    "moe-ep8": Case(
        model=MIXTURE,
        seq_len=4096,
        global_batch=512,
        micro_batch=2,
        degrees=Degrees(dp_shard=16, pp=3, ep=8),
        engine=find_engine("megatron"),
        zero=1,
        schedule="interleaved",
        stages_per_rank=3,
        precision="fp8",
    ),
}

ENGINES = ("shardway", "fsdp2", "torchtitan", "megatron", "nemo", "deepspeed", "nanotron")

PREDICTION = (
    "Planned by Shardway: 1.23 s a step (predicted, not measured), 45.6 GiB on the fullest rank.",
    "One rank computes 40 % of its peak.",
)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any layout that a case allows, small models, every choice of format, schedule and recompute."""
    model = draw(st.sampled_from([LLAMA_8B, MIXTURE]))
    degrees = draw(_degrees(model))
    micro_batch, passes = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2, 8]))
    choices: dict[str, Any] = {
        "zero": draw(st.sampled_from([0, 1, 2, 3])),
        "precision": draw(st.sampled_from(["fp32", "tf32", "fp16", "bf16", "fp8", "mxfp8", "fp4"])),
        "recompute": draw(st.sampled_from(["none", "selective", "products", "operators", "full"])),
        "optimizer": draw(st.sampled_from(["adamw", "adamw8bit", "adafactor", "sgd", "muon"])),
        "attention": draw(st.sampled_from(["plain", "flash1", "flash2", "flash3"])),
        "engine": find_engine(draw(st.sampled_from(ENGINES))),
        **{name: draw(st.booleans()) for name in ("reshard", "sequence", "compiled", "offload", "fused_loss")},
        **{name: draw(st.booleans()) for name in ("dropout", "async_tensor")},
        **draw(_schedules(degrees)),
    }
    return Case(
        model=model,
        seq_len=8192,
        global_batch=degrees.data * micro_batch * passes,
        micro_batch=micro_batch,
        degrees=degrees,
        **choices,
    )


@st.composite
def _degrees(draw: st.DrawFn, model: Architecture) -> Degrees:
    sizes = {name: draw(st.sampled_from([1, 2, 4])) for name in ("dp_replicate", "dp_shard", "cp", "tp")}
    pp = draw(st.sampled_from([1, 2, 3]))
    ep = etp = 1
    if model is MIXTURE:
        ranks = sizes["dp_shard"] * sizes["cp"] * sizes["tp"]
        etp = draw(st.sampled_from([1, sizes["tp"]]))
        ep = draw(st.sampled_from(divisors(ranks // etp)))
    return Degrees(**sizes, pp=pp, ep=ep, etp=etp)


def _schedules(degrees: Degrees) -> st.SearchStrategy[dict[str, Any]]:
    if degrees.pp == 1:
        return st.just({})
    pairs = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zero_bubble", 1), ("zbv", 2)]
    return st.sampled_from([{"schedule": schedule, "stages_per_rank": stages} for schedule, stages in pairs])
