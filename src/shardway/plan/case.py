"""What is estimated: model, batch, layout, formats, engine, the layers of each stage; and the machine that it runs on.

Invariants:
- An `EngineTraits` entry states how a library works (formats, fusion, overlap, kernels), never how fast it was in some
  measurement.
- A `Case` is complete and consistent: every degree divides what it must, and no default is left that memory and time
  could read differently.
- Stages are consecutive and each has at least one layer. Unless an engine cuts otherwise, sizes differ by at most one,
  and the ends, which carry the embedding and the head, are never the larger ones.
- Every rate of a machine is one direction and per accelerator. A factor belongs to a kind of part (a generation of
  accelerators, a kind of link, a kind of kernel), never to one machine, model or publication. The shipped factors are
  in `ceilings.toml`, which `bench/planner/fit.py` writes.
- What neither profile nor catalogue states is either marked as assumed, or refused with an error if no plan is possible
  without it; no accelerator is guessed.

Sources: Megatron-LM: Narayanan et al., arXiv:2104.04473, sections 4 and 5, and Korthikanti et al., arXiv:2205.05198;
DeepSpeed: Rajbhandari et al., arXiv:1910.02054, section 5; FSDP: Zhao et al., arXiv:2304.11277, section 3; torchtitan:
Liang et al., arXiv:2410.06511; nanotron: its README and config (fp32 gradient accumulation, ZeRO-1); cuts:
`partition_balanced` of DeepSpeed before its pull request 4312 (2023), `build_model` of nanotron 0.5; schedules:
Narayanan et al., arXiv:2104.04473, section 2.2 (GPipe, 1F1B, interleaved); Korthikanti et al., arXiv:2205.05198,
section 4.2.3 (what interleaving keeps); Qi et al., arXiv:2401.10241, sections 2 and 6 (zero bubble, V).
"""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from functools import cache, cached_property, lru_cache
from importlib.resources import files
from itertools import accumulate
from types import MappingProxyType
from typing import Any, Literal

from shardway.errors import Problem, UserError, check_no_problems, render_problems
from shardway.hardware.catalogue import Accelerator, Dtype, load_accelerators, load_links
from shardway.layout import IN_ROUNDS, count_rounds, stages_of_rank
from shardway.plan.shapes import Architecture, LayerRun, LayerShape, Side
from shardway.sites.schema import CPU, SiteProfile

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
    spare_gradient_bytes: int = 0  # bytes of a second gradient, kept beside the summed one
    logit_bytes: int = 10  # bytes per logit at the peak of the loss: logits in 16 bits, in fp32, and a gradient
    split_logit_bytes: int = 0
    """Bytes per logit in addition, if the tensor axis splits the logits and the loss is several operators."""
    splits_loss: bool = True  # the tensor axis keeps logits split by vocabulary in the loss
    fused_norms: bool = True  # a norm is one kernel and keeps only its input; otherwise it goes through copies in fp32
    fused_activations: bool = True  # a gated activation is one kernel
    fused_scores: bool = True  # scale, mask and softmax of scores are one kernel, if scores are kept at all
    casts_each: bool = False
    """Products under `torch.autocast` make 16-bit copies of their weights, unless these were gathered in 16 bits. In a
    model of another library (`Case.foreign`) norms then read fp32, the residual stream keeps the format of the
    embedding, and every product also copies its inputs."""
    whole_regions: bool = False
    """The tensor axis keeps the whole input of a region, where others gather it again in the backward pass. With
    results of products kept, each rank's summands beside their sum; and keys and values that their heads do not
    split."""
    overlaps_tensor: bool = False
    """Unless products are in four bits, messages of the tensor axis travel beside the products that need or make them,
    which are cut into as many parts as there are ranks (Wang et al., ASPLOS 2023), if it splits the stream by
    sequence."""
    joins_inputs: bool = False  # products that read one tensor (queries, keys and values; gate and up) are one
    gathers_low_bits: bool = False  # the tensor axis gathers inputs of products in the format of these
    shards_low_bits: bool = False  # with products in eight bits weights are gathered from shards in eight bits
    stops_recompute: bool = False  # recompute of a whole layer leaves out its last product, whose result nothing reads
    gathers_keys: bool = False
    """The context axis gathers all keys and values at once; otherwise parts go round a ring, each beside the
    computation on the one before."""
    repeats_keys: bool = False  # keys and values are repeated for every query head before the context axis sends them
    rotation_moves: int = 2
    """How often queries and keys pass through memory when they are rotated: forward, and as often backward (4 at
    least). Compiled code has 2."""
    by_parameter: bool = False  # shards are gathered and gradients scattered per parameter, not in buckets or layers
    overlaps_gradients: bool = True
    overlaps_parameters: bool = True
    between: Literal["none", "products", "operators"] = "none"  # its mode of recompute between nothing and everything
    keeps_low_bits: bool = False  # inputs of products in eight bits are kept in eight bits
    splits_experts: bool = False
    """The tensor axis also splits each expert, and experts are distributed over the shards alone."""
    short_pipelines: bool = True
    """1F1B also runs fewer micro-batches than there are ranks; PyTorch's own schedule refuses that."""
    buffers_each_pass: bool = False  # each micro-batch of a pass through the pipeline has its own receive buffers
    passes_per_stage: int = 0  # micro-batches of a pass per stage, if the engine decides; 0 = it has no such rule
    shards_weights: bool = False
    """With sharding, weights are sharded too (ZeRO 3); other engines shard optimizer states (ZeRO 1)."""
    sums_apart: bool = False
    """With sharded optimizer states, gradients of a pass are added to earlier ones after its products, not by them."""
    pads_vocab: bool = False
    """If the tensor axis splits them, embedding and head are padded with unused rows, to sizes that suit kernels."""
    cut: Literal["even", "filled", "weighed"] = "even"
    """Layers of pipeline stages. "even": equal, the ends last to get one more; "filled": as many as the largest stage
    has until none is left; "weighed": by FLOPs, including the head's."""
    rails: bool = True  # a group's messages between nodes use the adapters of all its ranks, not only each rank's own
    eager: bool = True  # Python launches kernels one by one
    replays: bool = False  # its passes are replayed as CUDA graphs, so that nothing waits for the host
    newest_attention: Literal["", "torch", "own"] = ""
    """Whose is its attention, if it is the fastest kernel that Hopper and Blackwell have. torch's is for 16 bits, and
    for sequences that are not split over ranks."""
    early_attention: bool = False  # that kernel is as fast as cuDNN's was before 9.5 (late 2024)


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
        check_no_problems("the plan", [problem])
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
    etp: int = 1  # ranks that the tensor axis splits one expert over

    @cached_property
    def world(self) -> int:
        return self.dp_replicate * self.dp_shard * self.cp * self.tp * self.pp

    @cached_property
    def data(self) -> int:  # the number of shares of a global batch
        return self.dp_replicate * self.dp_shard

    @cached_property
    def shards(self) -> int:  # ranks that share states: those of dp_shard and of cp (they hold the same weights)
        return self.dp_shard * self.cp

    @cached_property
    def expert_shards(self) -> int:  # ranks that share the states of the experts of one rank
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
    zero: int = 0  # what `dp_shard * cp` ranks share: 0 nothing, 1 optimizer states, 2 also gradients, 3 also weights
    reshard: bool = True  # weights are freed after the forward pass (zero 3)
    sequence: bool = True  # the tensor axis also splits norms and the residual stream, by sequence
    recompute: Recompute = "none"
    attention: AttentionKernel = "flash2"
    dropout: bool = False
    compiled: bool = False
    foreign: bool = False  # a model of another library, whose stream has no format of its own
    replayed: bool = False  # one rank may replay passes as CUDA graphs, where the host would be too slow
    schedule: Schedule = "1f1b"
    stages_per_rank: int = 1
    offload: bool = False  # optimizer states lie in CPU memory
    fused_loss: bool = False  # the loss is computed without a full copy of the logits in fp32
    fuses_whole: bool = False  # and that only where the tensor axis does not split logits
    async_tensor: bool = False  # collectives of the tensor axis overlap with its products

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
    def stages(self) -> int:  # the number of parts that the pipeline cuts the layers into
        return self.degrees.pp * self.stages_per_rank

    @property
    def stream_split(self) -> int:  # ranks over which norms and the residual stream are split
        return self.degrees.tp if self.sequence else 1

    @property
    def flash(self) -> bool:  # whether scores are never written to memory
        return self.attention != "plain"

    @property
    def low_bits(self) -> bool:  # whether matrix products are in eight bits or less
        return self.precision in ("fp8", "mxfp8", "fp4")

    @cached_property
    def splits_copy(self) -> bool:  # whether products read a 16-bit copy of the weights that the optimizer updates
        return self.value_bytes == 2 and self.engine.master_bytes > 0

    @cached_property
    def kept_weight_bytes(self) -> int:  # bytes of a weight as the optimizer updates it
        return self.engine.master_bytes or self.engine.weight_bytes if self.value_bytes == 2 else 4

    @cached_property
    def casts_each(self) -> bool:
        """Whether every product makes 16-bit copies of its inputs; not if weights are kept in 16 bits."""
        return self._has_wide_stream and self._under_autocast

    @property
    def _has_wide_stream(self) -> bool:
        """Whether autocast leaves the stream as wide as weights are: fp16 has not its range."""
        return self.foreign or (self.precision == "fp16" and self.casts_weights)

    @property
    def _under_autocast(self) -> bool:
        return self.engine.casts_each and self.value_bytes == 2 and self.kept_weight_bytes == 4

    @cached_property
    def casts_weights(self) -> bool:
        """Whether products make 16-bit copies of weights: gathered ones arrive in 16 bits, as do copies of a model that
        is also split otherwise (`layout.needs_sharding`)."""
        degrees = self.degrees
        gathered = self.zero == 3 and degrees.shards > 1
        return self._under_autocast and not gathered and (degrees.data == 1 or degrees.tp * degrees.pp == 1)

    @cached_property
    def stream_bytes(self) -> int:  # bytes of a number of the residual stream
        return 4 if self.casts_weights and self._has_wide_stream else self.value_bytes

    @cached_property
    def hides_tensor(self) -> bool:  # whether messages of the tensor axis travel beside its products
        wanted = self.async_tensor or (self.engine.overlaps_tensor and self.precision != "fp4")
        return wanted and self.sequence and self.degrees.tp > 1

    @cached_property
    def gathered_bytes(self) -> float:  # bytes of a number that the tensor axis gathers for products
        if not (self.low_bits and self.engine.gathers_low_bits):
            return self.value_bytes
        return 0.5 if self.precision == "fp4" else 1

    @cached_property
    def shared_bytes(self) -> int:  # bytes of a number of a layer's weights that are gathered before they are used
        return 1 if self.low_bits and self.engine.shards_low_bits else self.value_bytes

    @property
    def fuses_loss(self) -> bool:
        return self.fused_loss and not (self.fuses_whole and self.degrees.tp > 1)

    @property
    def replays(self) -> bool:
        """Whether the host is never waited for: what it decides anew in each pass is not replayed."""
        plain = self.degrees.world == 1 and self.recompute == "none" and not self.offload and not self.dropout
        mixed = any(run.layer.experts for run in self.model.runs)
        own = self.replayed and plain and not mixed and self.precision in ("bf16", "fp32", "tf32")
        return self.engine.replays or own

    @property
    def attention_kernel(self) -> AttentionKernel:
        """The kernel that runs."""
        narrow = self.engine.newest_attention == "torch" and (self.degrees.cp > 1 or self.value_bytes == 4)
        return "flash2" if self.attention == "flash3" and narrow else self.attention

    @cached_property
    def gradient_bytes(self) -> int:  # bytes of a summed gradient
        return self.engine.gradient_bytes if self.value_bytes == 2 else 4

    @cached_property
    def value_bytes(self) -> int:  # bytes of an activation, a gathered weight, a message
        return 4 if self.precision in ("fp32", "tf32") else 2


def _find_problems(case: Case) -> Iterator[Problem]:
    degrees, model = case.degrees, case.model

    def divide(where: str, divisor: int, number: int, what: str, by: int = 0) -> Iterator[Problem]:
        if number % (by or divisor):
            allowed = ", ".join(map(str, divisors(number)[:16]))
            yield Problem(where, f"{divisor} does not divide {what}", allowed=allowed)

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
        yield from divide("parallel.tp", degrees.tp, heads, f"{heads} attention heads")
    if case.stages > model.depth:
        what = f"{case.stages} pipeline stages are more than there are layers, {model.depth}"
        yield Problem("parallel.pp", what, allowed=f"at most {model.depth} stages")
    counts = sorted({run.layer.experts.count for run in model.runs if run.layer.experts})
    for count in counts:
        yield from divide("parallel.ep", degrees.ep, count, f"{count} experts")
    if not counts and degrees.ep > 1:
        yield Problem("parallel.ep", f"{degrees.ep}, and {model.name} has no experts", allowed="1")
    ranks, what = degrees.shards * degrees.tp, "ranks of dp_shard x cp x tp"
    yield from divide("parallel.ep", degrees.ep, ranks, f"the {ranks} {what}", by=degrees.ep * degrees.etp)


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


def list_stages(case: Case) -> tuple[StageLayers, ...]:
    """One entry per pipeline rank. Raises UserError if a V has other than two stages a rank."""
    if case.schedule == "zbv" and case.stages_per_rank != 2:
        what = f"{case.stages_per_rank} stages a rank make no V (zbv)"
        check_no_problems("the plan", [Problem("parallel.pp_stages_per_rank", what, allowed="2")])
    return _cut(case.model.runs, case.degrees.pp, case.stages_per_rank, case.schedule, layers_of_stages(case))


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


def layers_of_stages(case: Case) -> tuple[int, ...]:
    """The number of layers of each stage, in order."""
    layers, stages = case.model.depth, case.stages
    if case.engine.cut == "filled":
        # Each stage has as many layers as the largest must have, until too few are left for that.
        most, sizes = -(-layers // stages), list[int]()
        for after in reversed(range(stages)):
            sizes.append(min(most, layers - sum(sizes) - after))
        return tuple(sizes)
    if case.engine.cut == "weighed" and stages > 1:
        head = case.model.head.flops_per_token
        return split_by_weight([layer.matmul_flops_per_token for layer in case.model.layers], head, stages)
    # The remainder goes to stages in the middle.
    base, more = divmod(layers, stages)
    start = (stages - more + 1) // 2
    return tuple(base + (start <= stage < start + more) for stage in range(stages))


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


# --- the machine: rated speeds, and the part of them that is reached

SHEET_WATTS = {"h100-sxm5-96gb": 700.0}
"""Power limit of the part whose peaks are also used for a variant with less power."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Nodes of `per_node` accelerators; `domain` of them are joined by the fast link (a node, or a rack of nodes).

    `link` and `network` are bytes per second and accelerator, one direction; `peer` is the part between two neighbours.
    """

    name: str
    accelerator: Accelerator
    per_node: int
    link: float
    peer: float
    network: float
    domain: int
    memory_bytes: int
    host_bytes: int | None = None  # memory of a node's host that a job may use; None: not known
    assumed: tuple[str, ...] = ()  # assumptions for what no source states, in sentences
    measured: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Factors measured on this machine, by name; they override the shipped ones."""

    def bytes_of_node(self, rank_bytes: float, ranks: int) -> float:
        """Bytes on a node's host if each of `ranks` ranks needs `rank_bytes`."""
        return rank_bytes * min(self.per_node, ranks)

    def spans_nodes(self, ranks: int, stride: int = 1) -> bool:
        """Whether a group of ranks, each `stride` from the next, leaves the fast link's domain."""
        return ranks * stride > self.domain

    def peak(self, precision: str) -> float:
        """Rated FLOP/s in a format; fp16 and bf16 run as fp32 on a part without them.

        Raises UserError if the part has no such products.
        """
        names: dict[str, tuple[Dtype, ...]] = {
            "fp32": ("fp32",),
            "tf32": ("tf32", "fp32"),
            "fp16": ("fp16", "bf16", "fp32"),
            "bf16": ("bf16", "fp32"),
            "fp4": ("fp4", "fp8"),
        }
        wanted = names.get(precision, ("fp8",))
        found = next((peak for name in wanted if (peak := self.accelerator.peak(name))), None)
        if found is None:
            known = ", ".join(self.accelerator.peak_flops) or "none is known"
            what = f'"{precision}" has no rate on {self.accelerator.name}'
            raise UserError(render_problems("the plan", [Problem("precision.compute", what, allowed=known)]))
        return found

    @property
    def power_share(self) -> float:
        """The part's power limit over that of the part whose peaks it uses; 1 for its own peaks."""
        sheet, own = SHEET_WATTS.get(self.accelerator.key), self.accelerator.power_w
        return own / sheet if sheet and own else 1.0


GENERATIONS = {
    "volta": ("v100*",),
    "ampere": ("a100*", "a40*"),
    "hopper": ("h100*", "h200*", "h800*", "gh200*"),
    "ada": ("l40s*", "rtx*"),
    "blackwell": ("b200*", "b300*", "gb200*", "gb300*"),
    "cdna": ("mi*",),
}
"""Kinds of accelerators by the start of their keys; a factor that a kind lacks is the general one."""


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """Factors by name. Rates are fractions of the rated speed, `_s` are seconds, `_bytes` bytes."""

    matmul: float  # of the 16-bit peak, for a large product during training
    matmul_low: float  # of the 8-bit peak
    matmul_fp4: float  # of the 4-bit peak
    matmul_ramp: float  # depth of a product at which its time doubles
    narrow_ramp: float  # width of its narrower side at which its time doubles
    misaligned: float  # additional time of a product if rows of its matrices are no multiples of 16 bytes
    misaligned_batched: float  # the same for the products of unfused attention, with such a head width
    batched: float  # of the 16-bit peak, for the many small products of unfused attention
    scores_passes: float  # how often unfused attention moves its scores, forward
    flash1: float  # of the 16-bit peak, for the forward pass of fused attention: first version; then later ones
    flash2: float
    flash3: float
    early_flash3: float  # the same in cuDNN before 9.5
    flash_ramp: float  # mean span of scores at which the time of fused attention doubles
    flash_backward: float  # the rate of its backward pass over that of its forward pass
    memory: float  # of the memory's bandwidth, for operators that only move numbers
    stream: float  # traffic of operators on the residual stream over the least possible
    gates: float  # the same for activations, rotations and casts
    plain_norm: float  # moves of a norm that goes through copies; one without copies has 2
    sums: float  # traffic of an engine that adds gradients apart from products, over the least possible
    kernel_s: float  # host seconds to start one operator
    power: float  # rates fall with this power of a part's power limit over that of the part whose peaks it uses
    link: float  # of the fast link's bandwidth
    link_latency_s: float
    network: float  # of the network's bandwidth, for large messages
    network_latency_s: float
    hop_s: float  # added by one more rank in a ring over the network
    half_bytes: float  # message size of one rank that reaches half of the network's bandwidth
    overlap: float  # part of the computation behind which messages hide
    tensor_contention: float  # slowdown of products by messages of the tensor axis beside them, of the messages' time
    optimizer_passes: float  # traffic of the update over the least possible
    step_s: float  # host time of a step beside its passes
    low: float  # factors of the interval that holds four of five measured steps
    high: float


def load_ceilings(accelerator: Accelerator) -> Ceilings:
    """The shipped factors for an accelerator, general ones where its generation has none."""
    table = _read_table()
    return Ceilings(**{**table["general"], **table.get(generation_of(accelerator.key), {})})


def list_fitted(accelerator: Accelerator) -> tuple[str, ...]:
    """The shipped factors for an accelerator that were fitted to published runs."""
    table, fitted, generation = _read_table(), _load_file()["fitted"], generation_of(accelerator.key)
    own = table.get(generation, {})
    return (*fitted.get(generation, ()), *(name for name in fitted["general"] if name not in own))


def has_fitted_runs(accelerator: Accelerator) -> bool:
    """Whether shipped factors were fitted to runs on accelerators of the same generation."""
    return generation_of(accelerator.key) in _load_file()["fitted"]


def ceilings_of(machine: Machine) -> Ceilings:
    """The factors for a machine: those measured on it, else the shipped ones for its accelerator."""
    measured = dict(machine.measured)
    if "flash3" in measured:  # the kernel of this machine, whatever its version
        measured["early_flash3"] = measured["flash3"]
    return replace(load_ceilings(machine.accelerator), **measured)


def generation_of(key: str) -> str:
    """The generation of an accelerator of the catalogue; "" if it is none of those known."""
    found = (name for name, patterns in GENERATIONS.items() if any(fnmatchcase(key, each) for each in patterns))
    return next(found, "")


def attention_of(engine: EngineTraits, accelerator: Accelerator) -> AttentionKernel:
    """The kernel of attention that an engine takes on an accelerator. Volta has none of FlashAttention 2."""
    generation = generation_of(accelerator.key)
    if generation in ("hopper", "blackwell") and engine.newest_attention:
        return "flash3"
    return "flash1" if generation == "volta" else "flash2"


@cache
def _read_table() -> Mapping[str, Mapping[str, Any]]:
    names = {field.name for field in fields(Ceilings)}
    kinds = {kind: row for kind, row in _load_file().items() if kind != "fitted"}
    return {kind: {name: value for name, value in row.items() if name in names} for kind, row in kinds.items()}


@cache
def _load_file() -> Mapping[str, Mapping[str, Any]]:
    return tomllib.loads(files(__package__).joinpath("ceilings.toml").read_text(encoding="utf-8"))


# --- the machine of a site profile, or of an accelerator alone

RACK_DOMAINS = {"gb200": 72, "gb300": 72}
"""Accelerators that a fast link joins beyond a node (NVL72; NVIDIA GB200 NVL72 data sheet)."""

USUAL_NODE = 8  # accelerators per node if only the part is named

USUAL_HOST_BYTES = 2 * 10**12  # memory of a node's host if only the part is named

USUAL_NETWORK = 25e9
"""Bytes per second of an accelerator between nodes if nothing states it: one adapter of 200 Gb/s each."""


def machine_of_site(site: SiteProfile) -> Machine:
    """The machine of a site. Raises UserError that names every missing fact that planning needs."""
    node, lacks, of_site = site.node, "", f"the site {site.name}"
    if node.accelerator is None or node.accelerator == CPU:
        where = "node.accelerator"
        lacks = f"names {'no accelerator' if node.accelerator is None else 'nodes without accelerators'}"
    elif not node.accelerators_per_node:
        where, lacks = "node.accelerators_per_node", "does not say how many accelerators a node has"
    if lacks:
        what, allowed = f'the site "{site.name}" {lacks}', "a key of the catalogue"
        remedy = f"copy the profile {site.name}, say it there, and name the copy with --on; or name a part with --gpu"
        check_no_problems(of_site, [Problem(where, what, allowed=allowed, remedy=remedy)])
    accelerator = load_accelerators()[str(node.accelerator)]
    per_node = int(node.accelerators_per_node or 1)
    network, assumed = USUAL_NETWORK, f"{USUAL_NETWORK * 8 / 1e9:g} Gb/s for each accelerator between nodes"
    link, adapters = load_links().get(site.network.link or ""), site.network.adapters_per_node
    if link is not None and link.bandwidth_bytes_per_s:
        network = link.bandwidth_bytes_per_s * (adapters or per_node) / per_node
        assumed = "" if adapters else "one adapter for each accelerator"
    notes = (assumed,) if assumed else ()
    machine = _machine(site.name, accelerator, per_node, node.link or accelerator.link, network, notes)
    names = [each.name for each in fields(Ceilings)]
    unknown = [name for name in site.measured if name not in names]
    check_no_problems(
        of_site,
        [Problem(f"measured.{name}", "is no ceiling of the planner", allowed=", ".join(names)) for name in unknown],
    )
    return replace(machine, host_bytes=node.memory, measured=MappingProxyType(dict(site.measured)))


@cache
def load_aliases() -> Mapping[str, str]:
    """Short names of accelerators, each with the key of the most common variant."""
    return tomllib.loads(files(__package__).joinpath("aliases.toml").read_text(encoding="utf-8"))


def machine_of_part(name: str) -> Machine:
    """Nodes of eight of an accelerator, with the network that such nodes usually have; a short name means the most
    common variant. Raises UserError."""
    parts = load_accelerators()
    short = name.strip().lower().replace("_", "-").replace(" ", "-")
    key = short if short in parts else load_aliases().get(short, name)
    if key not in parts:
        near = [each for each in parts if key and each.startswith(key)]
        near = near or difflib.get_close_matches(key, parts, n=3, cutoff=0.3)
        what = f'"{key}" is not in the catalogue of accelerators'
        allowed = ", ".join(parts)
        remedy = f"did you mean {' or '.join(near)}?" if near else ""
        problem = Problem("--gpu", what, allowed=allowed, remedy=remedy)
        raise UserError(render_problems("the plan", [problem]), [problem])
    part = parts[key]
    network = f"{USUAL_NETWORK * 8 / 1e9:g} Gb/s for each accelerator"
    note = f"nodes of {USUAL_NODE} with {network} and {USUAL_HOST_BYTES / 1e12:g} TB of memory"
    others = [each for each in parts if each != key and each.startswith(short)]
    variant = f"{part.name} for --gpu {name}" + (f" (also: {', '.join(others)})" if others else "")
    assumed = (note,) if short == key else (variant, note)
    machine = _machine(key, part, USUAL_NODE, part.link, USUAL_NETWORK, assumed)
    return replace(machine, host_bytes=USUAL_HOST_BYTES)


def _machine(
    name: str, part: Accelerator, per_node: int, link: str | None, network: float, assumed: Sequence[str]
) -> Machine:
    missing = [
        Problem(f"accelerator {part.key}", f"the catalogue does not know its {what}")
        for what, known in (("memory", part.memory_bytes), ("peak rates", part.peak_flops))
        if not known
    ]
    check_no_problems("the catalogue of accelerators", missing)
    fast = load_links().get(link or "")
    if fast is not None and (fast.bandwidth_bytes_per_s or fast.peer_bandwidth_bytes_per_s):
        peer = fast.peer_bandwidth_bytes_per_s or fast.bandwidth_bytes_per_s or 0.0
        rate = fast.bandwidth_bytes_per_s or peer * max(1, per_node - 1)
    else:
        rate, peer = 32e9, 32e9 / max(1, per_node - 1)
        assumed = (*assumed, "PCIe 4.0 between accelerators of a node")
    return Machine(
        name=name,
        accelerator=part,
        per_node=per_node,
        link=rate,
        peer=peer,
        network=network,
        domain=RACK_DOMAINS.get(part.key, per_node),
        memory_bytes=int(part.memory_bytes or 0),
        assumed=tuple(assumed),
    )
