"""The input of memory and time estimates: model, batch, layout, formats, engine; and the layers of each stage.

Invariants:
- An `EngineTraits` entry states how a library works (formats, fusion, overlap, kernels), never how fast it was in some
  measurement.
- A `Case` is complete and consistent: every degree divides what it must, and no default is left that memory and time
  could read differently.
- Stages are consecutive and each has at least one layer. Unless an engine cuts otherwise, sizes differ by at most one,
  and the ends, which carry the embedding and the head, are never the larger ones. No layer is priced here.

Sources: Megatron-LM: Narayanan et al., arXiv:2104.04473, sections 4 and 5, and Korthikanti et al., arXiv:2205.05198;
DeepSpeed: Rajbhandari et al., arXiv:1910.02054, section 5; FSDP: Zhao et al., arXiv:2304.11277, section 3; torchtitan:
Liang et al., arXiv:2410.06511; nanotron: its README and config (fp32 gradient accumulation, ZeRO-1); cuts:
`partition_balanced` of DeepSpeed before its pull request 4312 (2023), `build_model` of nanotron 0.5; schedules:
Narayanan et al., arXiv:2104.04473, section 2.2 (GPipe, 1F1B, interleaved); Korthikanti et al., arXiv:2205.05198,
section 4.2.3 (what interleaving keeps); Qi et al., arXiv:2401.10241, sections 2 and 6 (zero bubble, V).
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache, cached_property, lru_cache
from importlib.resources import files
from itertools import accumulate
from types import MappingProxyType
from typing import Literal, get_args

from shardway.errors import Problem, UserError, check_no_problems, render_problems
from shardway.layout import IN_ROUNDS, count_rounds, stages_of_rank
from shardway.plan.shapes.architecture import Architecture, LayerRun, LayerShape, Side
from shardway.plugins import is_registered, list_names

# --- traits of training libraries


@dataclass(frozen=True, kw_only=True)
class EngineTraits:
    """How a library trains.

    Bytes are per parameter with products in 16 bits: `weight_bytes` of what products read, `gradient_bytes` of the
    sums of gradients, `master_bytes` of the copy that the optimizer updates (0: the weights are that copy).
    """

    name: str
    weight_bytes: int = 2
    gradient_bytes: int = 4
    master_bytes: int = 4
    spare_gradient_bytes: int = 0
    """Bytes of a second gradient, kept beside the summed one."""
    logit_bytes: int = 10
    """Bytes per logit at the peak of the loss: logits in 16 bits, in fp32, and a gradient."""
    split_logit_bytes: int = 0
    """Bytes per logit in addition, if the tensor axis splits the logits and the loss is several operators."""
    splits_loss: bool = True
    """The tensor axis keeps logits split by vocabulary in the loss."""
    fused_norms: bool = True
    """A norm is one kernel and keeps only its input; otherwise it goes through copies in fp32."""
    fused_activations: bool = True
    """A gated activation is one kernel."""
    fused_scores: bool = True
    """Scale, mask and softmax of scores are one kernel, if scores are kept at all."""
    casts_each: bool = False
    """Formats follow each operator (`torch.autocast`): norms read fp32, the residual stream keeps its format, and every
    product makes 16-bit copies of its inputs, and of its weight unless that was gathered in 16 bits."""
    whole_regions: bool = False
    """The tensor axis keeps the whole input of a region, where others gather it again in the backward pass. With
    results of products kept, each rank's summands beside their sum; and keys and values that their heads do not
    split."""
    by_parameter: bool = False
    """Shards are gathered and gradients scattered per parameter, not in buckets or layers."""
    overlaps_gradients: bool = True
    overlaps_parameters: bool = True
    splits_sends: bool = True
    """Stages send only each tensor rank's share of the stream."""
    between: Literal["none", "products", "operators"] = "none"
    """Its mode of recompute between nothing and everything."""
    keeps_low_bits: bool = False
    """Inputs of products in eight bits are kept in eight bits."""
    splits_experts: bool = False
    """The tensor axis also splits each expert, and experts are distributed over the shards alone."""
    short_pipelines: bool = True
    """1F1B also runs fewer micro-batches than there are ranks; PyTorch's own schedule refuses that."""
    buffers_each_pass: bool = False
    """Each micro-batch of a pass through the pipeline has its own receive buffers."""
    passes_per_stage: int = 0
    """Micro-batches of a pass per stage, if the engine decides; 0 = it has no such rule."""
    shards_weights: bool = False
    """With sharding, weights are sharded too (ZeRO 3); other engines shard optimizer states (ZeRO 1)."""
    sums_apart: bool = False
    """With sharded optimizer states, gradients of a pass are added to earlier ones after its products, not by them."""
    pads_vocab: bool = False
    """If the tensor axis splits them, embedding and head are padded with unused rows, to sizes that suit kernels."""
    cut: Literal["even", "filled", "weighed"] = "even"
    """Layers of pipeline stages. "even": equal, the ends last to get one more; "filled": as many as the largest stage
    has until none is left; "weighed": by FLOPs, including the head's."""
    rails: bool = True
    """A group's messages between nodes use the adapters of all its ranks, not only each rank's own."""
    eager: bool = True
    """Python launches kernels one by one."""


@cache
def load_engines() -> Mapping[str, EngineTraits]:
    """The engines that can be priced, by name."""
    tables = tomllib.loads(files(__package__).joinpath("engines.toml").read_text(encoding="utf-8"))
    return MappingProxyType({name: EngineTraits(name=name, **traits) for name, traits in tables.items()})


def find_engine(name: str) -> EngineTraits:
    """The engine of that name. Raises UserError with the known names."""
    engines = load_engines()
    if name not in engines:
        problem = Problem("--engine", f'"{name}" is not known', allowed=", ".join(engines))
        raise UserError(render_problems("the plan", [problem]))
    return engines[name]


# --- the case

Precision = Literal["fp32", "tf32", "fp16", "bf16", "fp8", "mxfp8", "fp4"]
"""Format of matrix products; the formats of kept tensors follow from it and the engine."""

Recompute = Literal["none", "selective", "products", "operators", "full"]
"""What the backward pass computes again: nothing; attention's scores (Korthikanti et al., arXiv:2205.05198, section 5);
all but results of products and attention; all but every second of these (Liang et al., arXiv:2410.06511, section
2.2.1); all of a layer but its input."""

AttentionKernel = Literal["plain", "flash1", "flash2", "flash3"]
"""Kernels of attention: scores in memory; fused as by FlashAttention (arXiv:2205.14135), its second version
(arXiv:2307.08691), or by kernels made for Hopper and later (arXiv:2407.08608, cuDNN)."""

Schedule = Literal["gpipe", "1f1b", "interleaved", "zero_bubble", "zbv"]


@dataclass(frozen=True, kw_only=True)
class Degrees:
    """How many ranks each axis splits over. Experts split over the ranks of `dp_shard * cp * tp / etp`."""

    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    """Ranks that the tensor axis splits one expert over."""

    @cached_property
    def world(self) -> int:
        return self.dp_replicate * self.dp_shard * self.cp * self.tp * self.pp

    @cached_property
    def data(self) -> int:
        """The number of shares of a global batch."""
        return self.dp_replicate * self.dp_shard

    @cached_property
    def shards(self) -> int:
        """Ranks that share states: those of dp_shard and of cp (they hold the same weights)."""
        return self.dp_shard * self.cp

    @cached_property
    def expert_shards(self) -> int:
        """Ranks that share the states of the experts of one rank."""
        return max(1, self.shards * self.tp // (self.ep * self.etp))

    def render(self) -> str:
        """The degrees above 1: "dp_shard 16 x tp 8"; "one rank" if there is none."""
        above = [f"{field.name} {getattr(self, field.name)}" for field in fields(self) if field.name != "etp"]
        return " x ".join(part for part in above if not part.endswith(" 1")) or "one rank"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A step of training to be priced. Raises UserError that names everything that does not divide.

    `global_batch` and `micro_batch` count sequences (images): over all ranks, and in one pass of one data rank.
    """

    model: Architecture
    seq_len: int
    global_batch: int
    micro_batch: int = 1
    degrees: Degrees = Degrees()
    precision: Precision = "bf16"
    optimizer: str = "adamw"
    engine: EngineTraits = field(default_factory=lambda: find_engine("shardway"))
    zero: int = 0
    """What `dp_shard * cp` ranks share: 0 nothing, 1 optimizer states, 2 also gradients, 3 also weights."""
    reshard: bool = True
    """Weights are freed after the forward pass (zero 3)."""
    sequence: bool = True
    """The tensor axis also splits norms and the residual stream, by sequence."""
    recompute: Recompute = "none"
    attention: AttentionKernel = "flash2"
    dropout: bool = False
    compiled: bool = False
    schedule: Schedule = "1f1b"
    stages_per_rank: int = 1
    offload: bool = False
    """Optimizer states lie in CPU memory."""
    fused_loss: bool = False
    """The loss is computed without a full copy of the logits in fp32."""
    async_tensor: bool = False
    """Collectives of the tensor axis overlap with its products."""

    def __post_init__(self) -> None:
        check_no_problems(f"the plan of {self.model.name}", list(_find_problems(self)))

    @cached_property
    def micro_batches(self) -> int:
        return self.global_batch // (self.degrees.data * self.micro_batch)

    @cached_property
    def tokens(self) -> int:
        """Tokens of one micro-batch on one rank, of the part of the sequences that a context rank holds."""
        return self.micro_batch * self.seq_len // self.degrees.cp

    def side_tokens(self, side: Side) -> int:
        """The same for an encoder's or a decoder's sequence."""
        return self.micro_batch * self.model.side_seq(side, self.seq_len) // self.degrees.cp

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch * self.seq_len

    @property
    def stages(self) -> int:
        """The number of parts that the pipeline cuts the layers into."""
        return self.degrees.pp * self.stages_per_rank

    @property
    def stream_split(self) -> int:
        """Ranks over which norms and the residual stream are split."""
        return self.degrees.tp if self.sequence else 1

    @property
    def flash(self) -> bool:
        """Whether scores are never written to memory."""
        return self.attention != "plain"

    @property
    def low_bits(self) -> bool:
        """Whether matrix products are in eight bits or less."""
        return self.precision in ("fp8", "mxfp8", "fp4")

    @cached_property
    def splits_copy(self) -> bool:
        """Whether products read a 16-bit copy of the weights that the optimizer updates."""
        return self.value_bytes == 2 and self.engine.master_bytes > 0

    @cached_property
    def kept_weight_bytes(self) -> int:
        """Bytes of a weight as the optimizer updates it."""
        return self.engine.master_bytes or self.engine.weight_bytes if self.value_bytes == 2 else 4

    @cached_property
    def casts_each(self) -> bool:
        """Whether every product makes 16-bit copies of its inputs; not if weights are kept in 16 bits."""
        return self.engine.casts_each and self.value_bytes == 2 and self.kept_weight_bytes == 4

    @cached_property
    def casts_weights(self) -> bool:
        """Whether weights are among these copies: gathered weights arrive in 16 bits, as do copies of a model that is
        also split otherwise (`layout.needs_sharding`)."""
        degrees = self.degrees
        gathered = self.zero == 3 and degrees.shards > 1
        return self.casts_each and not gathered and (degrees.data == 1 or degrees.tp * degrees.pp == 1)

    @cached_property
    def stream_bytes(self) -> int:
        """Bytes of a number of the residual stream, which has the format of the embedding."""
        return 4 if self.casts_weights else self.value_bytes

    @cached_property
    def gradient_bytes(self) -> int:
        """Bytes of a summed gradient."""
        return self.engine.gradient_bytes if self.value_bytes == 2 else 4

    @cached_property
    def value_bytes(self) -> int:
        """Bytes of an activation, a gathered weight, a message."""
        return 4 if self.precision in ("fp32", "tf32") else 2


_SIZES = {
    "seq_len": "data.seq_len",
    "global_batch": "train.global_batch",
    "micro_batch": "train.micro_batch",
    "stages_per_rank": "parallel.pp_stages_per_rank",
}
"""A size of a case -> the key of a run file for it."""

_WORDS = {
    "precision": ("precision.compute", get_args(Precision)),
    "recompute": ("recompute.mode", get_args(Recompute)),
    "schedule": ("parallel.pp_schedule", get_args(Schedule)),
}
"""A word of a case -> the key of a run file for it, and its allowed values."""

_DEGREES = tuple(each.name for each in fields(Degrees))


def _find_problems(case: Case) -> Iterator[Problem]:
    """All problems; fast if there are none, since a search makes thousands of cases."""
    sizes = [(f"parallel.{name}", getattr(case.degrees, name)) for name in _DEGREES]
    sizes += [(where, getattr(case, name)) for name, where in _SIZES.items()]
    wrong = [Problem(where, f"{size} is no size", allowed="1 or more") for where, size in sizes if size < 1]
    yield from wrong or _find_division_problems(case)
    if case.zero not in (0, 1, 2, 3):
        yield Problem("zero", f"{case.zero} is no stage of ZeRO", allowed="0, 1, 2, 3")
    for name, (where, allowed) in _WORDS.items():
        if getattr(case, name) not in allowed:
            yield Problem(where, f'"{getattr(case, name)}" is not known', allowed=", ".join(allowed))
    if not is_registered("optimizers", case.optimizer):
        what = f'"{case.optimizer}" is not known'
        yield Problem("optim.name", what, allowed=", ".join(list_names("optimizers")))


def _find_division_problems(case: Case) -> Iterator[Problem]:
    degrees, model = case.degrees, case.model
    if case.global_batch % (degrees.data * case.micro_batch):
        yield Problem(
            "train.global_batch",
            f"{case.global_batch} does not split over {degrees.data} data ranks in micro-batches of {case.micro_batch}",
            allowed=f"a multiple of {degrees.data * case.micro_batch}",
            remedy="change the global batch, the micro-batch, or dp_replicate x dp_shard",
        )
    if case.seq_len % degrees.cp:
        what = f"{degrees.cp} does not divide the sequence of {case.seq_len}"
        yield Problem("parallel.cp", what, allowed="a divisor of data.seq_len")
    for heads in sorted({run.layer.attention.heads for run in model.runs}):
        if heads % degrees.tp:
            what = f"{degrees.tp} does not divide {heads} attention heads"
            yield Problem("parallel.tp", what, allowed=_render_divisors(heads))
    if case.stages > model.depth:
        what = f"{case.stages} pipeline stages are more than there are layers, {model.depth}"
        yield Problem("parallel.pp", what, allowed=f"at most {model.depth} stages")
    counts = sorted({run.layer.experts.count for run in model.runs if run.layer.experts})
    for count in counts:
        if count % degrees.ep:
            what = f"{degrees.ep} does not divide {count} experts"
            yield Problem("parallel.ep", what, allowed=_render_divisors(count))
    if not counts and degrees.ep > 1:
        yield Problem("parallel.ep", f"{degrees.ep}, and {model.name} has no experts", allowed="1")
    ranks = degrees.shards * degrees.tp
    if ranks % (degrees.ep * degrees.etp):
        what = f"{degrees.ep} does not divide the {ranks} ranks of dp_shard x cp x tp"
        yield Problem("parallel.ep", what, allowed=_render_divisors(ranks))


def _render_divisors(number: int) -> str:
    return ", ".join(str(each) for each in divisors(number)[:16])


def divisors(number: int) -> list[int]:
    """All divisors in order; empty for a number below 1."""
    if number < 1:
        return []
    low = [each for each in range(1, math.isqrt(number) + 1) if number % each == 0]
    return low + [number // each for each in reversed(low) if each * each != number]


# --- the layers of each pipeline rank, and how many micro-batches it keeps at once

Runs = tuple[LayerRun, ...]


@dataclass(frozen=True)
class StageLayers:
    """The layers of one pipeline rank with their counts, and which ends of the model it holds."""

    rank: int
    layers: Runs
    first: bool
    last: bool

    @property
    def count(self) -> int:
        return sum(run.count for run in self.layers)


def list_stages(case: Case) -> tuple[StageLayers, ...]:
    """One entry per pipeline rank."""
    return _cut(case.model.runs, case.degrees.pp, case.stages_per_rank, case.schedule, layers_of_stages(case))


def layers_of_stages(case: Case) -> tuple[int, ...]:
    """The number of layers of each stage, in order."""
    layers = case.model.depth
    if case.engine.cut == "filled":
        return fill_up(layers, case.stages)
    if case.engine.cut == "weighed" and case.stages > 1:
        head = case.model.head.flops_per_token
        return split_by_weight([layer.matmul_flops_per_token for layer in case.model.layers], head, case.stages)
    return split_evenly(layers, case.stages)


@lru_cache(maxsize=4096)
def _cut(runs: Runs, ranks: int, per_rank: int, schedule: str, sizes: tuple[int, ...]) -> tuple[StageLayers, ...]:
    edges = list(accumulate(sizes, initial=0))
    stages = []
    for rank in range(ranks):
        held = stages_of_rank(rank, ranks, per_rank, schedule)
        counts: dict[tuple[LayerShape, Side], int] = {}
        for stage in held:
            place = 0
            for run in runs:
                inside = min(edges[stage + 1], place + run.count) - max(edges[stage], place)
                if inside > 0:
                    counts[run.layer, run.side] = counts.get((run.layer, run.side), 0) + inside
                place += run.count
        layers = tuple(LayerRun(layer, count, side) for (layer, side), count in counts.items())
        stages.append(StageLayers(rank, layers, 0 in held, ranks * per_rank - 1 in held))
    return tuple(stages)


@cache
def split_evenly(layers: int, stages: int) -> tuple[int, ...]:
    """Layers of each stage; the remainder goes to stages in the middle."""
    base, more = divmod(layers, stages)
    start = (stages - more + 1) // 2
    return tuple(base + (start <= stage < start + more) for stage in range(stages))


def fill_up(layers: int, stages: int) -> tuple[int, ...]:
    """Each stage has as many layers as the largest must have, until too few are left for that."""
    most = -(-layers // stages)
    sizes: list[int] = []
    for after in reversed(range(stages)):
        sizes.append(min(most, layers - sum(sizes) - after))
    return tuple(sizes)


def split_by_weight(weights: Sequence[float], last: float, stages: int) -> tuple[int, ...]:
    """Layers of each stage; a stage ends with the layer that takes it beyond its share. `last`: weight of the head."""
    total, done, sizes = sum(weights) + last, 0.0, [0]
    for place, weight in enumerate(weights):
        left = len(weights) - place
        if sizes[-1] and (done > total * len(sizes) / stages or left == stages - len(sizes)) and len(sizes) < stages:
            sizes.append(0)
        sizes[-1] += 1
        done += weight
    return tuple(sizes)


def fills_schedule(case: Case) -> bool:
    """Whether the schedule takes this number of micro-batches: rounds of equal size if a rank has several stages; for
    1F1B at least as many as there are ranks, unless the engine runs fewer."""
    ranks, passes = case.degrees.pp, case.micro_batches
    if ranks == 1:
        return True
    if case.schedule in IN_ROUNDS and passes % count_rounds(passes, ranks):
        return False
    return case.schedule != "1f1b" or passes >= ranks or case.engine.short_pipelines


def kept_micro_batches(case: Case, rank: int) -> float:
    """Micro-batches whose activations a pipeline rank holds at its peak, in units of all of its layers.

    A rank leads by some forward passes before it alternates; delayed gradients of weights keep their inputs as well.
    """
    ranks, passes, per_rank = case.degrees.pp, case.micro_batches, case.stages_per_rank
    if ranks == 1:
        return 1.0
    if case.schedule == "gpipe":
        return float(passes)
    if case.schedule == "zbv":
        return float(min(passes, ranks))
    waits = case.schedule == "zero_bubble"
    lead = ranks - 1 - rank
    if per_rank > 1:
        lead = (per_rank - 1) * -(-passes // count_rounds(passes, ranks)) + (1 if waits else 2) * lead
    return min(float(passes), (lead + 1 + (rank if waits else 0)) / per_rank)
