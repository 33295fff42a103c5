"""Models, machines and cases that tests of the planner price, and how hypothesis draws them."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from hypothesis import strategies as st

from shardway.plan.case import Case, Degrees, Machine, find_engine, load_engines, machine_of_part
from shardway.plan.shapes import Architecture, AttentionShape, ExpertsShape, LayerRun, LayerShape


def gpt_layer(hidden: int = 1024, heads: int = 16) -> LayerShape:
    """The layer that Korthikanti et al. count (arXiv:2205.05198, section 4): biases, GELU, four times as wide."""
    attention = AttentionShape(heads=heads, kv_heads=heads, head_dim=hidden // heads, bias=True, output_bias=True)
    return LayerShape(hidden=hidden, attention=attention, ffn=4 * hidden, gated=False, ffn_bias=True, norm_bias=True)


def llama_layer(hidden: int = 1024, heads: int = 16, kv_heads: int = 8) -> LayerShape:
    """No biases, a gated feed-forward layer, keys and values that heads share."""
    attention = AttentionShape(heads=heads, kv_heads=kv_heads, head_dim=hidden // heads)
    return LayerShape(hidden=hidden, attention=attention, ffn=3 * hidden)


def model_of(layer: LayerShape, layers: int = 8, vocab: int = 32768) -> Architecture:
    """Layers alike between two ends that share nothing."""
    norm = layer.hidden * (2 if layer.norm_bias else 1)
    return Architecture(
        name="drawn",
        hidden=layer.hidden,
        runs=(LayerRun(layer, layers),),
        vocab=vocab,
        tied=False,
        final_norm_parameters=norm,
    )


def expert_model(experts: int = 8, layers: int = 8) -> Architecture:
    """Every layer a mixture, of which a token meets two."""
    mixture = ExpertsShape(count=experts, per_token=2, dim=1024)
    return model_of(replace(llama_layer(), experts=mixture), layers)


def case_of(model: Architecture | None = None, engine: str = "megatron", **changes: Any) -> Case:
    """A case; degrees may stand beside its own keys, and the batch is as large as they need unless it is given."""
    names = {each.name for each in fields(Degrees)}
    degrees = Degrees(**{name: changes.pop(name) for name in names & changes.keys()})
    values = {
        "model": model or model_of(llama_layer()),
        "seq_len": 1024,
        "global_batch": degrees.data * changes.get("micro_batch", 1) * (4 * degrees.pp if degrees.pp > 1 else 1),
        "degrees": degrees,
        "engine": find_engine(engine),
    }
    return Case(**{**values, **changes})


def h100s(**changes: Any) -> Machine:
    """Nodes of eight H100 with a 400 Gb/s adapter each."""
    return replace(machine_of_part("h100-sxm5-80gb"), **{"network": 50e9, **changes})


LAYERS = st.one_of(
    st.builds(gpt_layer, st.sampled_from([512, 1024, 4096]), st.sampled_from([8, 16])),
    st.builds(llama_layer, st.sampled_from([512, 1024, 4096]), st.sampled_from([8, 16]), st.sampled_from([2, 4, 8])),
)
"""Layers of a width that people train; all heads split over eight."""


@st.composite
def cases(draw: st.DrawFn, **fixed: Any) -> Case:
    """Dense models in layouts that are legal, by any engine; `fixed` keys are not drawn."""
    drawn = {
        "engine": draw(st.sampled_from(list(load_engines()))),
        "tp": draw(st.sampled_from([1, 2, 8])),
        "pp": draw(st.sampled_from([1, 2, 4])),
        "dp_shard": draw(st.sampled_from([1, 2, 8])),
        "dp_replicate": draw(st.sampled_from([1, 4])),
        "zero": draw(st.sampled_from([0, 1, 2, 3])),
        "reshard": draw(st.booleans()),
        "sequence": draw(st.booleans()),
        "micro_batch": draw(st.sampled_from([1, 2])),
        "recompute": draw(st.sampled_from(["none", "selective", "products", "operators", "full"])),
        "precision": draw(st.sampled_from(["fp32", "bf16", "fp8"])),
        "optimizer": draw(st.sampled_from(["adamw", "adamw8bit", "sgd"])),
        "attention": draw(st.sampled_from(["plain", "flash2"])),
        "dropout": draw(st.booleans()),
        "compiled": draw(st.booleans()),
    }
    model = fixed.pop("model", None) or model_of(draw(LAYERS), layers=draw(st.sampled_from([4, 8, 12])))
    return case_of(model, **{**drawn, **fixed})
