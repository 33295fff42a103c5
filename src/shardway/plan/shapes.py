"""The shape of a model: a transformer as layers of matrices and attention, another model as units; from [model] or a
trace.

Invariants:
- Parameters, FLOPs, matrix products and saved tensors of a transformer are all derived from the same matrices, and all
  counts of another model are sums over its units, so they always agree.
- FLOPs are model FLOPs (no recompute); a multiplication and an addition count as two. The backward pass is twice the
  forward pass (Kaplan et al., arXiv:2001.08361, section 2.1). `causal` counts only the half of the scores that the
  mask leaves, otherwise all of them: both conventions are published (docs/plan.md).
- Saved bytes of a unit are what autograd saves for the backward pass, each tensor once, in the unit that saves it
  first: inputs of products and of batch norms, results of activations, indices of poolings. Statistics of batch norms,
  which are of no single sample, are left out.
- The shape of [model] has the parameters that `shardway.models` builds from it, which a test compares. A shape that
  --trace counted is used only for the model and sample that it was counted for.

Sources: attention and feed-forward: Vaswani et al., arXiv:1706.03762, section 3; grouped queries: Ainslie et al.,
arXiv:2305.13245; gated units: Shazeer, arXiv:2002.05202; latent attention: DeepSeek-V2, arXiv:2405.04434, section 2.1;
experts: Lepikhin et al., arXiv:2006.16668, and shared ones: Dai et al., arXiv:2401.06066; residual networks: He et al.,
arXiv:1512.03385.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, Literal

from shardway.earlier_names import EARLIER_KEYS
from shardway.errors import Bug, Problem, UserError, check_no_problems, render_problems
from shardway.runfile.schema import ModelSection, RunFile

# --- one layer of a transformer: matrices and attention

Split = Literal["outputs", "inputs", "none"]  # which side of a matrix the tensor axis splits

Part = Literal["attention", "ffn", "router", "experts", "shared", "head", "embedding"]


@dataclass(frozen=True)
class Matrix:
    """A weight that tokens are multiplied with; experts have `copies` of it, and a token meets `met` of them."""

    name: str
    part: Part
    inputs: int
    outputs: int
    split: Split = "none"
    bias: bool = False
    copies: int = 1
    met: int = 1
    kv_heads: int = 0  # heads of keys or values in the outputs; the tensor axis splits no further than these
    frozen: bool = False  # only an adapter beside it is trained
    adapter: int = 0  # parameters of the adapter

    @property
    def parameters(self) -> int:
        own = self.copies * (self.inputs * self.outputs + (self.outputs if self.bias else 0))
        return own + self.adapter

    @property
    def trained(self) -> int:  # parameters that have a gradient
        return self.adapter if self.frozen else self.parameters

    @property
    def flops_per_token(self) -> int:  # forward
        return 2 * (self.met * self.inputs * self.outputs + self.adapter)

    @property
    def frozen_flops_per_token(self) -> int:  # of the product whose backward pass has no gradient of weights
        return 2 * self.met * self.inputs * self.outputs if self.frozen else 0


# --- an adapter: LoRA (Hu et al., arXiv:2106.09685)

ALL_LINEAR, OF_ATTENTION = "all-linear", "attention"
"""Words of model.lora_targets that stand for several layers."""

LORA_LAYERS: Mapping[str, tuple[tuple[str, int, int], ...]] = {
    "q_proj": (("q", 1, 1),),
    "k_proj": (("kv", 1, 2),),
    "v_proj": (("kv", 1, 2),),
    "o_proj": (("o", 1, 1),),
    "qkv_proj": (("q", 1, 1), ("kv", 0, 1)),
    "gate_proj": (("ffn_up", 1, 2),),
    "up_proj": (("ffn_up", 1, 2),),
    "gate_up_proj": (("ffn_up", 1, 1),),
    "down_proj": (("ffn_down", 1, 1),),
    "lm_head": (("head", 1, 1),),
}
"""Linear layer of the Hugging Face library -> the matrices here that it is, or a part of: name, whether its inputs are
counted there, and in how many equal parts the matrix's outputs are cut."""

_USUAL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The layers of a block; fused ones count only where they are named."""


@dataclass(frozen=True)
class AdapterShape:
    """Two matrices of `rank` beside each of the `layers` (names of `LORA_LAYERS`), of every block."""

    rank: int
    layers: tuple[str, ...]
    dropout: bool = False

    def count_beside(self, matrix: Matrix) -> int:
        """Parameters beside a matrix."""
        parts = [part for layer in self.layers for part in LORA_LAYERS[layer] if part[0] == matrix.name]
        return sum(self.rank * (matrix.inputs * inputs + matrix.outputs // cuts) for _, inputs, cuts in parts)

    def count_readers(self, *names: str) -> int:
        """How many of its layers read the input of these matrices."""
        return sum(any(part[0] in names and part[1] for part in LORA_LAYERS[layer]) for layer in self.layers)


def find_adapter(section: ModelSection, experts: bool) -> AdapterShape | None:
    """The adapter of a resolved [model]; None without one. Of a pattern the last part counts, whatever blocks the
    others choose. Beside experts it is for attention alone."""
    if section.adapter == "none":
        return None
    attention = _USUAL[:4]
    known = {ALL_LINEAR: attention if experts else _USUAL, OF_ATTENTION: attention}
    chosen: list[str] = []
    for word in section.lora_targets:
        leaf = word.rpartition(".")[2]
        named = [name for name in LORA_LAYERS if name == leaf or (name in _USUAL and fnmatchcase(name, leaf))]
        chosen += [name for name in known.get(word, named) if not experts or name in (*attention, "lm_head")]
    return AdapterShape(section.lora_rank, tuple(dict.fromkeys(chosen)), section.lora_dropout > 0)


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Sizes of multi-head latent attention; `head_dim` of the attention is then the part without positions."""

    kv_rank: int
    q_rank: int = 0
    rope_dim: int = 64
    value_dim: int = 128


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """Heads that attend to all positions (`window` 0) or to the last `window`; `causal` heads not to later ones."""

    heads: int
    kv_heads: int
    head_dim: int
    latent: Latent | None = None
    window: int = 0
    causal: bool = True
    bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    qk_norm_whole: bool = False
    """The norms of queries and keys span all heads, with one gain per feature (OLMo 2, arXiv:2501.00656)."""
    sinks: bool = False  # each head has a learned score (sink) beside those of positions (gpt-oss, arXiv:2508.10925)
    cross: bool = False  # keys and values come from the encoder

    @property
    def input_products(self) -> int:  # products that read the input: queries, keys and values, or both latents
        return 3 if self.latent is None else 2

    @property
    def qk_width(self) -> int:  # features of all queries, and of keys once repeated for each head
        return self.heads * (self.head_dim + (self.latent.rope_dim if self.latent else 0))

    @property
    def value_width(self) -> int:  # output features of all heads
        return self.heads * (self.latent.value_dim if self.latent else self.head_dim)

    @property
    def kv_width(self) -> int:  # features of keys and values together, as attention reads them
        return self.qk_width + self.value_width if self.latent else 2 * self.kv_heads * self.head_dim

    def matrices(self, hidden: int) -> Iterator[Matrix]:
        """The matrices before and after the scores."""
        latent = self.latent
        if latent is None:
            kv = self.kv_heads * self.head_dim
            yield Matrix("q", "attention", hidden, self.heads * self.head_dim, "outputs", self.bias)
            yield Matrix("kv", "attention", hidden, 2 * kv, "outputs", self.bias, kv_heads=self.kv_heads)
        else:
            if latent.q_rank:
                yield Matrix("q_down", "attention", hidden, latent.q_rank)
            yield Matrix("q_up", "attention", latent.q_rank or hidden, self.qk_width, "outputs")
            yield Matrix("kv_down", "attention", hidden, latent.kv_rank + latent.rope_dim)
            up = self.heads * self.head_dim + self.value_width
            yield Matrix("kv_up", "attention", latent.kv_rank, up, "outputs")
        yield Matrix("o", "attention", self.value_width, hidden, "inputs", self.output_bias)

    @property
    def norm_parameters(self) -> int:  # gains of norms inside attention, and sinks
        if self.latent is not None:
            return self.latent.kv_rank + self.latent.q_rank
        heads = self.heads + self.kv_heads if self.qk_norm_whole else 2
        return (heads * self.head_dim if self.qk_norm else 0) + (self.heads if self.sinks else 0)

    def mean_span(self, seq: int, causal: bool) -> float:
        """Positions that a query is scored with, on average; with `causal` false the mask is ignored."""
        if not (self.causal and causal) or self.cross:
            return float(min(seq, self.window) if self.window and self.causal else seq)
        window = min(self.window or seq, seq)
        return (window * (window + 1) / 2 + (seq - window) * window) / seq

    def core_flops_per_token(self, seq: int, causal: bool) -> float:
        """Forward FLOPs of scores and the sum of values."""
        return 2 * self.mean_span(seq, causal) * (self.qk_width + self.value_width)


@dataclass(frozen=True, kw_only=True)
class ExpertsShape:
    """A mixture: `count` experts of width `dim`, of which a token meets `per_token`, and a shared width."""

    count: int
    per_token: int
    dim: int
    shared_dim: int = 0
    shared_gate: bool = False
    """The output of the shared experts is weighted by a score of its own (Qwen2-MoE, arXiv:2407.10671)."""
    bias: bool = False  # of the router and of the experts


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """Attention, optionally a second one to an encoder, and a feed-forward layer or a mixture of experts."""

    hidden: int
    attention: AttentionShape
    ffn: int
    gated: bool = True
    cross: AttentionShape | None = None
    experts: ExpertsShape | None = None
    ffn_bias: bool = False
    norms: int = 2
    norm_bias: bool = False
    adapter: AdapterShape | None = None  # all else is frozen

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:  # cached, since a search looks up the same layer thousands of times
        return hash(tuple(getattr(self, each.name) for each in fields(self)))

    @cached_property
    def matrices(self) -> tuple[Matrix, ...]:  # all matrices, in the order in which a token meets them
        found = [matrix for each in self.attentions for matrix in each.matrices(self.hidden)]

        def add_products(part: Part, width: int, bias: bool = False, copies: int = 1, met: int = 1) -> None:
            wide = width * self.gate_products
            found.append(Matrix(f"{part}_up", part, self.hidden, wide, "outputs", bias, copies, met))
            found.append(Matrix(f"{part}_down", part, width, self.hidden, "inputs", bias, copies, met))

        mixture = self.experts
        if mixture is None:
            add_products("ffn", self.ffn, self.ffn_bias)
            return self._beside_adapter(found)
        found.append(Matrix("router", "router", self.hidden, mixture.count, bias=mixture.bias))
        add_products("experts", mixture.dim, mixture.bias, mixture.count, mixture.per_token)
        if mixture.shared_dim:
            add_products("shared", mixture.shared_dim)
        if mixture.shared_gate:
            found.append(Matrix("shared_gate", "router", self.hidden, 1))
        return self._beside_adapter(found)

    def _beside_adapter(self, matrices: Sequence[Matrix]) -> tuple[Matrix, ...]:
        if (adapter := self.adapter) is None:
            return tuple(matrices)
        return tuple([replace(each, frozen=True, adapter=adapter.count_beside(each)) for each in matrices])

    @property
    def gate_products(self) -> int:  # products that read the input of the feed-forward layer: up, and the gate
        return 2 if self.gated else 1

    @property
    def attentions(self) -> tuple[AttentionShape, ...]:  # its own attention, and that to the encoder
        return (self.attention, self.cross) if self.cross else (self.attention,)

    @property
    def norm_parameters(self) -> int:  # gains (and biases) of all norms of the layer
        own = self.norms * self.hidden * (2 if self.norm_bias else 1)
        return own + sum(each.norm_parameters for each in self.attentions)

    @property
    def parameters(self) -> int:  # all parameters, including experts that a token does not meet
        return sum(each.parameters for each in self.matrices) + self.norm_parameters

    @property
    def trained_parameters(self) -> int:  # those that have a gradient
        return self.parameters if self.adapter is None else sum(each.trained for each in self.matrices)

    @property
    def active_parameters(self) -> int:  # parameters that one token meets
        idle = sum(each.parameters // each.copies * (each.copies - each.met) for each in self.matrices)
        return self.parameters - idle

    @cached_property
    def matmul_flops_per_token(self) -> int:  # forward FLOPs without attention's scores
        return sum(each.flops_per_token for each in self.matrices)

    def core_flops_per_token(self, seq: int, causal: bool, source_seq: int | None = None) -> float:
        """Forward FLOPs of scores and sums of values; `source_seq` positions of the encoder, None: `seq`."""
        spans = ((each, source_seq or seq if each.cross else seq) for each in self.attentions)
        return sum(each.core_flops_per_token(span, causal) for each, span in spans)


# --- a whole transformer

LARGEST = 2**31  # the largest size of a layer; a larger number is taken for a typing error

MOST_LAYERS = 100_000  # the most layers of one sort, for the same reason

Side = Literal["decoder", "encoder"]


@dataclass(frozen=True)
class LayerRun:
    """`count` identical layers; those of an encoder work on the encoder's sequence."""

    layer: LayerShape
    count: int
    side: Side = "decoder"


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A transformer: tokens (or patches) in, layers, and a head over `vocab` entries (or `outputs` classes).

    Raises UserError that names every invalid size.
    """

    name: str
    hidden: int
    runs: tuple[LayerRun, ...]
    vocab: int
    tied: bool = True
    positions: int = 0  # rows of a table of learned positions
    unused_positions: int = 0  # rows of that table that no token uses
    patch_features: int = 0  # numbers in a patch; if above 0 the input is patches
    outputs: int | None = None  # of the head: classes; None: as many as `vocab`, 0: there is no head
    pooled: bool = False  # the head is used once per sample
    head_bias: bool = False
    final_norm_parameters: int = 0
    extra_parameters: int = 0
    """Parameters of the input beside its tables: a norm, kinds of tokens, a class token, relative positions."""
    before_head: tuple[Matrix, ...] = ()
    """Products between the last layer and the head, of as many positions: BERT has one (google-research/bert,
    run_pretraining.py, get_masked_lm_output)."""
    encoder_seq: int = 0  # positions of the encoder, if there is one; 0 = as many as the decoder has
    adapter: AdapterShape | None = None
    """What is trained beside a model that is frozen (`beside`)."""

    def __post_init__(self) -> None:
        problems = [] if self.runs else [Problem("model.layers", "there is no layer", allowed="at least 1")]
        sizes, splits = {"model.dim": self.hidden, "model.vocab": self.vocab}, []
        for number, run in enumerate(self.runs):
            experts, attention = run.layer.experts, run.layer.attention
            own = {"model.layers": run.count, "model.heads": attention.heads, "model.kv_heads": attention.kv_heads}
            own |= {"model.head_dim": attention.head_dim, **({} if experts else {"model.ffn_dim": run.layer.ffn})}
            own |= {"model.experts": experts.count, "model.expert_dim": experts.dim} if experts else {}
            sizes |= {f"{name} of layer {number}" if number else name: size for name, size in own.items()}
            if attention.kv_heads > 0 and attention.heads % attention.kv_heads:
                what = f"{attention.kv_heads} does not divide model.heads = {attention.heads}"
                splits.append(Problem("model.kv_heads", what, allowed="a divisor of model.heads"))
            if experts and not 1 <= experts.per_token <= experts.count:
                what = f"{experts.per_token} of {experts.count} experts cannot be chosen"
                splits.append(Problem("model.experts_per_token", what, allowed=f"1 to {experts.count}"))
        for name, size in sizes.items():
            most = MOST_LAYERS if name.startswith("model.layers") else LARGEST
            if not 1 <= size <= most:
                problems.append(Problem(name, f"{size:,} is no size", allowed=f"1 to {most:,}"))
        check_no_problems(f"the model {self.name}", [*problems, *dict.fromkeys(splits)])

    @cached_property
    def layers(self) -> tuple[LayerShape, ...]:
        return tuple(run.layer for run in self.runs for _ in range(run.count))

    @property
    def depth(self) -> int:
        return sum(run.count for run in self.runs)

    @property
    def longest(self) -> int:  # tokens that a sample may have; 0: any number
        return self.positions - self.unused_positions

    @property
    def embedding_parameters(self) -> int:  # parameters that turn tokens or patches into features, including positions
        table = self.patch_features * self.hidden + self.hidden if self.patch_features else self.vocab * self.hidden
        return table + self.positions * self.hidden + self.extra_parameters

    @cached_property
    def head(self) -> Matrix:  # the output layer; a tied one shares its weight with the embedding
        outputs = self.vocab if self.outputs is None else self.outputs
        head = Matrix("head", "head", self.hidden, outputs, "outputs", self.head_bias)
        if self.adapter is None:
            return head
        return replace(head, frozen=True, adapter=self.adapter.count_beside(head))

    @property
    def head_parameters(self) -> int:  # parameters of the output layer and of the part before it, without shared ones
        own = (self.head.outputs if self.head_bias else 0) + self.head.adapter if self.tied else self.head.parameters
        return own + sum(each.parameters for each in self.before_head)

    @cached_property
    def parameters(self) -> int:
        ends = self.embedding_parameters + self.head_parameters + self.final_norm_parameters
        return ends + sum(run.count * run.layer.parameters for run in self.runs)

    @cached_property
    def active_parameters(self) -> int:
        return self.parameters - sum(
            run.count * (run.layer.parameters - run.layer.active_parameters) for run in self.runs
        )

    def forward_flops_per_token(self, seq: int, *, causal: bool) -> float:
        """FLOPs of one token of the decoder in sequences of `seq`, with its share of the encoder and of the head."""
        total, source = 0.0, self.side_seq("encoder", seq)
        for run in self.runs:
            length = self.side_seq(run.side, seq)
            per_token = run.layer.matmul_flops_per_token + run.layer.core_flops_per_token(length, causal, source)
            if run.layer.cross:  # keys and values of the attention to the encoder are computed from its tokens
                reads = [each for each in run.layer.cross.matrices(run.layer.hidden) if each.name == "kv"]
                per_token += sum(each.flops_per_token for each in reads) * (source / length - 1)
            total += run.count * per_token * length / seq
        patches = 2 * self.patch_features * self.hidden
        head = sum(each.flops_per_token for each in (*self.before_head, self.head))
        return total + patches + head / (seq if self.pooled else 1)

    def flops_per_token(self, seq: int, *, causal: bool) -> float:
        """FLOPs of a token forward and backward; the backward pass has no gradients of frozen weights."""
        left_out = sum(run.count * each.frozen_flops_per_token for run in self.runs for each in run.layer.matrices)
        left_out += self.head.frozen_flops_per_token
        return 3 * self.forward_flops_per_token(seq, causal=causal) - left_out

    @cached_property
    def trained_parameters(self) -> int:  # those that have a gradient
        layers = sum(run.count * run.layer.trained_parameters for run in self.runs)
        return self.parameters if self.adapter is None else layers + self.head.trained

    def beside(self, adapter: AdapterShape | None) -> Architecture:
        """The same model frozen, with an adapter; itself without one."""
        if adapter is None:
            return self
        runs = tuple([replace(run, layer=replace(run.layer, adapter=adapter)) for run in self.runs])
        return replace(self, runs=runs, adapter=adapter)

    def side_seq(self, side: Side, seq: int) -> int:
        return (self.encoder_seq or seq) if side == "encoder" else seq


# --- a model that is no transformer, as units

FORMAT = 1
_REMEDY = "write the file anew: `shardway plan run.toml --trace`"


@dataclass(frozen=True, kw_only=True)
class Unit:
    """`count` identical parts, each sharded and recomputed as one; all numbers are those of one part.

    FLOPs count a multiplication and an addition as two; `saved_bytes` are kept for the backward pass of one sample.
    """

    name: str
    parameters: int
    forward_flops: float
    saved_bytes: float
    count: int = 1
    fixed_bytes: float = 0.0  # the part of `saved_bytes` that does not follow the format of activations: masks, indices


def merge_units(units: Sequence[Unit]) -> tuple[Unit, ...]:
    """The same units, those that follow one another and are alike in all numbers as one."""
    merged = []
    for _, group in groupby(units, key=lambda unit: replace(unit, name="", count=1)):
        alike = list(group)
        label = alike[0].name if len(alike) == 1 else f"{alike[0].name} to {alike[-1].name}"
        merged.append(replace(alike[0], name=label, count=sum(unit.count for unit in alike)))
    return tuple(merged)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A model known by its units. Raises UserError that names every invalid number."""

    name: str
    units: tuple[Unit, ...]
    source: str = ""  # how the counts were taken, and for which sample
    value_bytes: int = 4  # bytes of an activation when `saved_bytes` were counted
    active: int = 0  # parameters that one token meets; 0: not known

    def __post_init__(self) -> None:
        problems = [] if self.units else [Problem("units", "there is none", allowed="at least 1")]
        if self.value_bytes not in (1, 2, 4, 8):
            what = f"{self.value_bytes} is the size of no number"
            problems.append(Problem("value_bytes", what, allowed="1, 2, 4, 8"))
        for unit in self.units:
            for name in ("count", "parameters", "forward_flops", "saved_bytes", "fixed_bytes"):
                value, least = getattr(unit, name), int(name == "count")
                if not least <= value < math.inf:
                    problems.append(Problem(f"{unit.name}: {name}", f"{value} cannot be", allowed=f"{least} or more"))
            if unit.fixed_bytes > unit.saved_bytes:
                what = f"{unit.fixed_bytes:g} is more than saved_bytes, {unit.saved_bytes:g}"
                problems.append(Problem(f"{unit.name}: fixed_bytes", what, allowed="a part of saved_bytes"))
        check_no_problems(f"the model {self.name}", problems)

    @cached_property
    def parameters(self) -> int:
        return sum(unit.count * unit.parameters for unit in self.units)

    @cached_property
    def forward_flops_per_sample(self) -> float:
        return sum(unit.count * unit.forward_flops for unit in self.units)

    @property
    def flops_per_sample(self) -> float:  # forward and backward
        return 3 * self.forward_flops_per_sample

    def estimate_active(self, seq_len: int) -> int:
        """Parameters that one of `seq_len` tokens of a sample meets; where that is not known, those that its FLOPs
        could be products with."""
        return self.active or min(self.parameters, round(self.forward_flops_per_sample / (2 * max(1, seq_len))))

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=2) + "\n"


Shape = Architecture | Measured  # the kinds of models that can be planned


# --- shape files, which --trace writes

_Kinds = Mapping[str, tuple[type, ...]]
_FILE: _Kinds = {"name": (str,), "source": (str,), "value_bytes": (int,), "units": (list,)}
_UNIT: _Kinds = {
    "name": (str,),
    "parameters": (int,),
    "forward_flops": (int, float),
    "saved_bytes": (int, float),
    "count": (int,),
    "fixed_bytes": (int, float),
}
_WORDS: Mapping[type, str] = {str: "a string", int: "an integer", float: "a number", list: "a list"}


def measured_from_json(text: str, origin: str = "the shape file") -> Measured:
    """The inverse of `to_json`. Raises UserError that names every key that is missing or invalid."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{origin} is no JSON: {error}.\n  To do: {_REMEDY}") from error
    table: Mapping[str, Any] = content if isinstance(content, dict) else {}
    if table.get("format") != FORMAT:
        what = f"{table.get('format')!r} is not a format that is known"
        check_no_problems(origin, [Problem("format", what, allowed=str(FORMAT), remedy=_REMEDY)])
    problems = list(_find_wrong_types(table, _FILE))
    for number, each in enumerate([] if problems else table["units"]):
        unit, where = each if isinstance(each, dict) else {}, f"units[{number}]."
        problems += _find_wrong_types(unit, _UNIT, where)
        unknown = [key for key in unit if key not in _UNIT]
        problems += [Problem(where + key, "is not known", allowed=", ".join(_UNIT)) for key in unknown]
    check_no_problems(origin, problems)
    units = tuple(Unit(**unit) for unit in table["units"])
    active = table.get("active")
    return Measured(
        name=table["name"],
        units=units,
        source=table["source"],
        value_bytes=table["value_bytes"],
        active=active if type(active) is int and active > 0 else 0,
    )


def _find_wrong_types(table: Mapping[str, Any], kinds: _Kinds, where: str = "") -> Iterator[Problem]:
    for key, allowed in kinds.items():
        if type(table.get(key)) not in allowed:
            what = f"{table[key]!r} cannot be" if key in table else "is missing"
            yield Problem(where + key, what, allowed=_WORDS[allowed[-1]], remedy=_REMEDY)


def read_measured(path: Path) -> Measured:
    """Read a shape file. Raises UserError if that fails."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UserError(f"the shape file {path} cannot be read: {error}.\n  To do: name one, or {_REMEDY}") from error
    return measured_from_json(text, str(path))


def traced_path(run_file: Path) -> Path:
    """Where the traced shape of a run file is kept."""
    return run_file.with_suffix(".shape.json")


def find_traced(values: RunFile, run_file: Path) -> tuple[Measured, str] | None:
    """The traced shape of a run file, if there is one, and a note on it. Raises UserError if it is of another model."""
    stored = traced_path(run_file)
    if not stored.exists():
        return None
    shape = read_measured(stored)
    if not shape.source.endswith(digest_of(values)):
        raise UserError(
            f"{stored} was counted for another [model] or data.seq_len than this run has.\n"
            "  To do: count it again (--trace), or remove the file."
        )
    return shape, f"the model as --trace counted it: {stored} (remove it to plan [model])"


def digest_of(values: RunFile) -> str:
    """Digest of what a sample and the model are made from; by the first names of keys, so that earlier counts hold."""
    later = set() if values.model.settings else {"settings"}
    if values.model.adapter == "none":
        later |= {name for name in type(values.model).model_fields if name == "adapter" or name.startswith("lora_")}
    text = values.model.model_dump_json(exclude=later) + str((values.data.seq_len, values.data.shape))
    for first, today in EARLIER_KEYS.items():
        text = text.replace(f'"{today.removeprefix("model.")}":', f'"{first.removeprefix("model.")}":')
    return hashlib.sha256(text.encode()).hexdigest()[:12]


# --- convolutional and plain linear networks

VALUE_BYTES = 4
INDEX_BYTES = 8
MASK_BYTES = 1

Image = tuple[int, int, int]  # channels, height and width


def render_image(image: Image) -> str:
    """Channels, height and width in words."""
    return " x ".join(map(str, image))


Convolution = tuple[int, int, int, int, bool]
"""A square kernel with batch norm: inputs, outputs, width of the kernel, positions of the result, and whether an
activation follows."""


def _convolution_unit(
    name: str, convolutions: Sequence[Convolution], *, values: int = 0, indices: int = 0, count: int = 1
) -> Unit:
    """Convolutions as one unit, which keep the norm's input and the activation's output; `values` and `indices` are
    kept in addition, per image."""
    kernels = [kernel**2 * inputs * outputs for inputs, outputs, kernel, _, _ in convolutions]
    kept = values + sum(area * outputs * (2 if active else 1) for _, outputs, _, area, active in convolutions)
    return Unit(
        name=name,
        count=count,
        parameters=sum(kernels) + sum(2 * outputs for _, outputs, _, _, _ in convolutions),
        forward_flops=sum(2 * each[3] * size for each, size in zip(convolutions, kernels, strict=True)),
        saved_bytes=VALUE_BYTES * kept + INDEX_BYTES * indices,
        fixed_bytes=INDEX_BYTES * indices,
    )


def _linear_unit(name: str, inputs: int, outputs: int, *, values: int = 0, masks: int = 0) -> Unit:
    """A linear layer with a bias; `values` and bytes of `masks` are kept per sample."""
    return Unit(
        name=name,
        parameters=(inputs + 1) * outputs,
        forward_flops=2 * inputs * outputs,
        saved_bytes=VALUE_BYTES * values + MASK_BYTES * masks,
        fixed_bytes=MASK_BYTES * masks,
    )


def perceptron(inputs: int, hidden: Sequence[int], classes: int, *, dropout: bool = False) -> Measured:
    """Linear layers with ReLU between them: each keeps its result, and dropout its output and a mask."""
    units = []
    for number, (before, after) in enumerate(pairwise((inputs, *hidden))):
        kept = after * (2 if dropout else 1) + (0 if number else inputs)
        units.append(_linear_unit(f"blocks.{number}", before, after, values=kept, masks=after if dropout else 0))
    head = _linear_unit("head", (inputs, *hidden)[-1], classes, values=0 if hidden else inputs)
    return Measured(name="mlp", units=(*units, head), source=f"computed for samples of {inputs:,} numbers")


def convnet(image: Image, channels: Sequence[int], classes: int) -> Measured:
    """Blocks of a 5 x 5 convolution, batch norm, ReLU and 2 x 2 max-pooling, then a linear layer."""
    before, height, width = image
    units = []
    for number, after in enumerate(channels):
        block = (before, after, 5, height * width, True)
        read, pooled = before * height * width, after * (height // 2) * (width // 2)
        units.append(_convolution_unit(f"blocks.{number}", [block], values=read, indices=pooled))
        before, height, width = after, height // 2, width // 2
    features = before * height * width
    head = _linear_unit("head", features, classes, values=features)
    return Measured(name="convnet", units=(*units, head), source=f"computed for images of {render_image(image)}")


def residual_network(
    name: str,
    depths: Sequence[int],
    widths: Sequence[int],
    *,
    basic: bool,
    stem: int = 64,
    image: Image = (3, 224, 224),
    classes: int = 1000,
    early_stride: bool = False,
) -> Measured:
    """A residual network of basic or of bottleneck layers, the stride of a bottleneck in its 3 x 3 kernel as in
    torchvision; with `early_stride` the first stage halves its input too. Raises UserError for an image that is too
    small for the strides."""
    least = 2 ** (len(depths) + 1 + early_stride)
    if min(image[1:]) < least:
        what = f"{name} halves images of {render_image(image)} to nothing"
        check_no_problems("the model", [Problem("image_size", what, allowed=f"at least {least}")])

    def halve(size: tuple[int, int]) -> tuple[int, int]:  # by a stride of 2 with padding
        return -(-size[0] // 2), -(-size[1] // 2)

    def layer(before: int, after: int, *, halved: bool) -> list[Convolution]:
        """The convolutions of one layer on images of `size`, including the shortcut's if sizes change."""
        area, small = math.prod(size), math.prod(halve(size) if halved else size)
        chain = [(before, after, 3, small), (after, after, 3, small)]
        if not basic:
            inner = after // 4
            chain = [(before, inner, 1, area), (inner, inner, 3, small), (inner, after, 1, small)]
        shortcut = [(before, after, 1, small, False)] if halved or before != after else []
        return [*((*each, True) for each in chain), *shortcut]

    channels, size = image[0], halve(image[1:])
    first, size = (channels, stem, 7, math.prod(size), True), halve(size)
    # The output of the pooling is kept by the first layer that reads it.
    before, pooled = stem, stem * math.prod(size)
    units = [_convolution_unit("stem", [first], values=math.prod(image), indices=pooled)]
    for stage, (depth, after) in enumerate(zip(depths, widths, strict=True)):
        halved, unit = stage > 0 or early_stride, f"stage {stage + 1}"
        layers = layer(before, after, halved=halved)
        units.append(_convolution_unit(f"{unit}, first layer", layers, values=0 if stage else pooled))
        size = halve(size) if halved else size
        if depth > 1:
            layers = layer(after, after, halved=False)
            units.append(_convolution_unit(f"{unit}, other layers", layers, count=depth - 1))
        before = after
    units.append(_linear_unit("head", before, classes, values=before))
    return Measured(name=name, units=tuple(units), source=f"computed for images of {render_image(image)}")


# --- the shape of [model]


def shape_of_section(model: ModelSection, sample: tuple[int, ...]) -> Shape:
    """The shape of a resolved [model]; `sample` is (data.seq_len,) or the image's (channels, height, width).

    Raises UserError if the vocabulary is not known, or an image does not fit the model.
    """
    if model.kind not in _SHAPES:
        what = f'"{model.kind}" is a model of another package, whose layers the planner does not know'
        raise _refusal("model.kind", what, f"{', '.join(_SHAPES)}; or `shardway plan --trace`, which counts any model")
    return _SHAPES[model.kind](model, sample)


def _transformer(model: ModelSection, sample: tuple[int, ...]) -> Architecture:
    dense = _block(model)
    plain = min(model.dense_layers, model.layers) if model.experts else model.layers
    runs = [LayerRun(dense, plain)] if plain else []
    if model.experts and plain < model.layers:
        width = _resolved(model, "expert_dim")
        experts = ExpertsShape(
            count=model.experts, per_token=model.experts_per_token, dim=width, shared_dim=model.shared_experts * width
        )
        runs.append(LayerRun(replace(dense, experts=experts), model.layers - plain))
    return Architecture(
        name="transformer",
        hidden=model.dim,
        runs=tuple(runs),
        vocab=_vocab(model),
        tied=model.tied,
        positions=_resolved(model, "max_positions") if model.positions == "learned" else 0,
        final_norm_parameters=model.dim * (2 if dense.norm_bias else 1),
    )


def _vit(model: ModelSection, sample: tuple[int, ...]) -> Architecture:
    channels, height, width = _image(model, sample)
    if height % model.patch or width % model.patch:
        what = f"patches of {model.patch} x {model.patch} do not tile images of {height} x {width}"
        raise _refusal("model.patch", what, "a common divisor of height and width")
    block, classified = _block(model), int(model.pooling == "class")
    return Architecture(
        name="vit",
        hidden=model.dim,
        runs=(LayerRun(replace(block, attention=replace(block.attention, causal=False)), model.layers),),
        vocab=model.classes,
        tied=False,
        positions=(height // model.patch) * (width // model.patch) + classified,
        patch_features=channels * model.patch**2,
        pooled=True,
        head_bias=True,
        final_norm_parameters=model.dim * (2 if block.norm_bias else 1),
        extra_parameters=classified * model.dim,
    )


def _encoder_decoder(model: ModelSection, sample: tuple[int, ...]) -> Architecture:
    """Layers of `torch.nn.Transformer`: biases everywhere; attention is causal, in the source too."""
    if model.dim % model.heads:
        what = f"{model.heads} heads do not split model.dim = {model.dim} into heads of equal width"
        raise _refusal("model.heads", what, "a divisor of model.dim")
    width, ffn = model.dim // model.heads, _resolved(model, "ffn_dim")
    own = AttentionShape(heads=model.heads, kv_heads=model.heads, head_dim=width, bias=True, output_bias=True)
    encoder = LayerShape(hidden=model.dim, attention=own, ffn=ffn, gated=False, ffn_bias=True, norm_bias=True)
    decoder = replace(encoder, cross=replace(own, cross=True), norms=3)
    return Architecture(
        name="encoder_decoder",
        hidden=model.dim,
        runs=(LayerRun(encoder, model.layers, "encoder"), LayerRun(decoder, model.layers)),
        vocab=_vocab(model),
        tied=False,
        head_bias=True,
        final_norm_parameters=4 * model.dim,
    )


def _convnet(model: ModelSection, sample: tuple[int, ...]) -> Measured:
    image = _image(model, sample)
    least = 2 ** len(model.channels)
    if min(image[1:]) < least:
        what = f"its {len(model.channels)} blocks halve images of {render_image(image)} to nothing"
        raise _refusal("model.channels", what, f"images of at least {least} x {least}")
    return convnet(image, model.channels, model.classes)


_SHAPES: Mapping[str, Callable[[ModelSection, tuple[int, ...]], Shape]] = {
    "transformer": _transformer,
    "encoder_decoder": _encoder_decoder,
    "vit": _vit,
    "convnet": _convnet,
    "mlp": lambda model, sample: perceptron(math.prod(sample), model.hidden, model.classes, dropout=model.dropout > 0),
}


def _block(model: ModelSection) -> LayerShape:
    """A block of attention and a dense feed-forward layer; latent attention has no biases."""
    width = _resolved(model, "head_dim")
    if model.kv_rank:
        latent = Latent(
            kv_rank=model.kv_rank,
            q_rank=model.q_rank,
            rope_dim=_resolved(model, "rope_head_dim"),
            value_dim=_resolved(model, "value_head_dim"),
        )
        attention = AttentionShape(heads=model.heads, kv_heads=model.heads, head_dim=width, latent=latent)
    else:
        attention = AttentionShape(
            heads=model.heads,
            kv_heads=_resolved(model, "kv_heads"),
            head_dim=width,
            bias=model.bias or model.qkv_bias,
            output_bias=model.bias,
            qk_norm=model.qk_norm,
        )
    return LayerShape(
        hidden=model.dim,
        attention=attention,
        ffn=_resolved(model, "ffn_dim"),
        gated=model.activation == "swiglu",
        ffn_bias=model.bias,
        norm_bias=model.bias and model.norm == "layernorm",
    )


def _vocab(model: ModelSection) -> int:
    if model.vocab == "auto":
        what = '"auto" follows the data, which a plan does not open'
        remedy = "set model.vocab, such as 50257 for GPT-2's tokenizer"
        raise _refusal("model.vocab", what, "the number of entries of the vocabulary", remedy)
    return model.vocab


def _image(model: ModelSection, sample: tuple[int, ...]) -> Image:
    if len(sample) != 3:
        what = f'a "{model.kind}" learns from images, and a sample has {len(sample)} dims'
        raise _refusal("model.kind", what, "data whose samples are channels x height x width")
    channels, height, width = sample
    return channels, height, width


def _resolved(model: ModelSection, key: str) -> int:
    value = getattr(model, key)
    if not isinstance(value, int):
        raise Bug(f"model.{key} = {value!r} reached the plan unresolved")
    return value


def _refusal(where: str, what: str, allowed: str, remedy: str = "") -> UserError:
    return UserError(render_problems("the model", [Problem(where, what, allowed=allowed, remedy=remedy)]))
