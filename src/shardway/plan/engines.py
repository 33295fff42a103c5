"""What training libraries keep and do, as far as memory and time depend on it.

Invariant: an entry states how a library works (formats, fusion, overlap, what is launched), never how fast it was in
some measurement. This module must not hold a fitted number.

Sources: Megatron-LM: Narayanan et al., arXiv:2104.04473, sections 4 and 5, and Korthikanti et al., arXiv:2205.05198;
DeepSpeed: Rajbhandari et al., arXiv:1910.02054, section 5; FSDP: Zhao et al., arXiv:2304.11277, section 3; torchtitan:
Liang et al., arXiv:2410.06511; nanotron: its README and config (fp32 gradient accumulation, ZeRO-1).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from shardway.errors import Problem, UserError, render_problems


@dataclass(frozen=True, kw_only=True)
class EngineTraits:
    """How a library trains.

    Bytes are per parameter where products are in 16 bits: `weight_bytes` of what products read, `gradient_bytes` of
    what gradients are summed in, `master_bytes` of the copy that the optimizer updates (0: the weights are that copy).
    """

    name: str
    weight_bytes: int = 2
    gradient_bytes: int = 4
    master_bytes: int = 4
    spare_gradient_bytes: int = 0
    """Of a second gradient, kept beside the one that is summed."""
    logit_bytes: int = 10
    """Bytes per logit at the peak of the loss: logits in 16 bits, in fp32, and a gradient."""
    split_logit_bytes: int = 0
    """Beside these where the tensor axis splits the logits and the loss is several operators."""
    splits_loss: bool = True
    """The tensor axis keeps logits split by vocabulary in the loss."""
    fused_norms: bool = True
    """A norm is one kernel and keeps its input alone; otherwise it goes through copies in fp32."""
    fused_activations: bool = True
    """A gated activation is one kernel."""
    fused_scores: bool = True
    """Scale, mask and softmax of scores are one kernel, where scores are kept at all."""
    casts_each: bool = False
    """Formats follow each operator (`torch.autocast`): norms read fp32, the residual stream is left as it comes, and
    every product makes copies in 16 bits of what it reads, and of its weight where that was not gathered so."""
    whole_regions: bool = False
    """The tensor axis keeps whole what enters a region, where others gather it again on the way back; where results of
    products are kept, each rank's summands beside their sum; and keys and values that their heads do not split."""
    by_parameter: bool = False
    """Shards are gathered and gradients scattered parameter by parameter, not in buckets or layers."""
    overlaps_gradients: bool = True
    overlaps_parameters: bool = True
    splits_sends: bool = True
    """Stages send each tensor rank's share of the stream alone."""
    between: Literal["none", "products", "operators"] = "none"
    """What it recomputes between nothing and everything."""
    keeps_low_bits: bool = False
    """Inputs of products in eight bits are kept in eight bits."""
    splits_experts: bool = False
    """The tensor axis splits each expert as well, and experts are dealt out over the shards alone."""
    short_pipelines: bool = True
    """1F1B also runs fewer micro-batches than there are ranks; PyTorch's own schedule refuses that."""
    buffers_each_pass: bool = False
    """Each micro-batch of a pass through the pipeline has buffers of its own to arrive in."""
    passes_per_stage: int = 0
    """Micro-batches of a pass for each stage, where it is left to the engine; 0 = it has no such rule."""
    shards_weights: bool = False
    """Shards weights themselves (ZeRO 3) where it shards at all; others share optimizer states (ZeRO 1)."""
    sums_apart: bool = False
    """With shared optimizer states, gradients of a pass are added to earlier ones after its products, not by them."""
    pads_vocab: bool = False
    """Where the tensor axis splits them, embedding and head have rows of no token, so that their sizes suit kernels."""
    cut: Literal["even", "filled", "weighed"] = "even"
    """Layers of pipeline stages: alike, ends last to get one more; as many as the largest stage has until none is left;
    or by FLOPs, the head's among them."""
    rails: bool = True
    """A group's messages between nodes use the adapters of all its ranks, not each rank's own alone."""
    eager: bool = True
    """Kernels are launched one by one by Python."""


ENGINES: Mapping[str, EngineTraits] = MappingProxyType(
    {
        each.name: each
        for each in (
            EngineTraits(
                name="shardway",
                splits_experts=True,
                between="products",
                weight_bytes=4,
                master_bytes=0,
                logit_bytes=12,
                fused_activations=False,
                buffers_each_pass=True,
                short_pipelines=False,
                shards_weights=True,
                casts_each=True,
                whole_regions=True,
            ),
            EngineTraits(
                name="fsdp2",
                between="products",
                shards_weights=True,
                buffers_each_pass=True,
                short_pipelines=False,
                fused_activations=False,
                logit_bytes=12,
                split_logit_bytes=4,
            ),
            EngineTraits(
                name="torchtitan",
                between="operators",
                buffers_each_pass=True,
                short_pipelines=False,
                fused_norms=False,
                fused_activations=False,
                logit_bytes=12,
                split_logit_bytes=4,
                passes_per_stage=1,
            ),
            EngineTraits(name="fsdp1", shards_weights=True, fused_activations=False, logit_bytes=10),
            EngineTraits(
                name="megatron",
                between="products",
                eager=False,
                logit_bytes=8,
                keeps_low_bits=True,
                pads_vocab=True,
            ),
            EngineTraits(
                name="nemo",
                between="products",
                eager=False,
                logit_bytes=8,
                keeps_low_bits=True,
                gradient_bytes=2,
                pads_vocab=True,
            ),
            EngineTraits(name="megatron-2021", overlaps_gradients=False, overlaps_parameters=False, pads_vocab=True),
            EngineTraits(
                name="megatron-deepspeed",
                sums_apart=True,
                pads_vocab=True,
                overlaps_gradients=False,
                overlaps_parameters=False,
            ),
            EngineTraits(
                name="scaling",
                pads_vocab=True,
                gradient_bytes=2,
                logit_bytes=20,
                splits_loss=False,
                overlaps_gradients=False,
                overlaps_parameters=False,
            ),
            EngineTraits(name="deepspeed", shards_weights=True, gradient_bytes=2, rails=False),
            EngineTraits(
                name="nanotron",
                spare_gradient_bytes=2,
                fused_activations=False,
                overlaps_parameters=False,
                by_parameter=True,
                cut="weighed",
            ),
        )
    }
)
"""The libraries whose figures can be told, by name."""


def find_engine(name: str) -> EngineTraits:
    """The engine of that name. Raises UserError with those that there are."""
    if name not in ENGINES:
        problem = Problem("--engine", f'"{name}" is not known', allowed=", ".join(ENGINES))
        raise UserError(render_problems("the plan", [problem]))
    return ENGINES[name]
