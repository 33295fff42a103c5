"""What resolving takes and gives: which keys have an effect, circumstances, the resolved run, the draft of the rules.

Invariants:
- The table of owners alone decides which keys have an effect, for the rule that refuses an ineffective key and for what
  is shown and written.
- Input and result are frozen; no value is derived after this package. A rule can only derive an open key or refuse; it
  never sees or changes the user's file.
- Integers stay exact (a run file may hold larger ones than a float can), and every search is bounded. A degree that is
  still "auto" counts as 1, which happens only if another rule has refused it.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, reduce, wraps
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from shardway.batch_ramp import BatchRamp
from shardway.errors import Problem
from shardway.hardware.catalogue import DeviceFacts
from shardway.hfconfig import ModelFacts
from shardway.plugins import GROUPS, load_plugin
from shardway.runfile.blend import BlendEntry
from shardway.runfile.load import DEFAULT, LoadedRunFile, render_run
from shardway.runfile.schema import DeepspeedSection, RunFile, all_keys

if TYPE_CHECKING:
    from shardway.plan.case import Machine
    from shardway.plan.shapes import Shape


# --- which keys have an effect under which choice

DOORS: Mapping[str, str] = {"model.kind": "models", "data.kind": "data_sources", "optim.name": "optimizers"}
"""Selector -> its group of plugins, each of which states the keys that have an effect with it."""

BLOCK_MODELS = ("transformer", "vit")
"""Kinds of models made of transformer blocks."""

ABOVE_ZERO = "above 0"
"""The choice of a numeric selector that is not 0."""

_SIZES = ("dim", "layers", "heads", "ffn_dim")
_BLOCKS = ("head_dim", "norm", "norm_eps", "activation", "bias", "qkv_bias", "qk_norm")
_DECODER = ("kv_heads", "tied", "positions", "rope_theta", "max_positions", "experts", "kv_rank")
_ROUTING = ("router_score", "router_normalise", "router_scale", "balance")
_MIXTURE = ("experts_per_token", "expert_dim", "shared_experts", "dense_layers", *_ROUTING)
_LATENT = ("q_rank", "rope_head_dim", "value_head_dim")
_IMAGES = ("channels", "hidden", "patch", "pooling", "classes")

WEIGHT_KEYS = ("kind", "hf", "vocab", *_SIZES, *_BLOCKS, *_DECODER, *_MIXTURE, *_LATENT, *_IMAGES, "settings")
"""Keys of [model] about its weights or their meaning."""

ADAPTER_KEYS = ("adapter", "lora_rank", "lora_alpha", "lora_targets")
"""Keys of [model] about weights that are trained beside frozen ones."""

_BALANCING = ("bias_update_rate", "balance_weight", "capacity_factor")
SHAPE_KEYS = (*(name for name in WEIGHT_KEYS if name not in ("kind", "hf")), *_BALANCING, "dropout")
"""Keys of [model] that describe a reference model; with model.hf its config.json decides them."""

_OF_TORCH = ("static_graph", "compress", "powersgd_rank", "reshard_after_forward", "prefetch", "cpu_offload")
"""Keys of [parallel] about PyTorch's copies and shards."""

SAMPLE_KEYS = ("train.sample_prompts", "train.sample_tokens")
"""What has an effect where train.sample_every is a span."""

_OF_ROLL_BACK = ("spike_steps", "spike_margin", "max_left_out", "max_roll_backs")
"""Keys of [guard] about rewinding before a spike."""


def _model(names: tuple[str, ...], *choices: str) -> dict[str, tuple[str, ...]]:
    return {f"model.{name}": choices for name in names}


OWNERS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "model.positions": {"model.rope_theta": ("rope",), "model.max_positions": ("learned",)},
    "model.experts": _model((*_MIXTURE, "bias_update_rate", "balance_weight", "capacity_factor"), ABOVE_ZERO),
    "model.adapter": _model((*ADAPTER_KEYS[1:], "lora_dropout"), "lora"),
    "model.balance": {"model.bias_update_rate": ("bias",), "model.balance_weight": ("loss",)},
    "model.kv_rank": {
        **_model(_LATENT, ABOVE_ZERO),
        **_model(("kv_heads", "bias", "qkv_bias", "qk_norm", "positions"), "0"),
    },
    "optim.schedule": {"optim.decay": ("wsd",), "optim.final_lr": ("cosine", "linear", "wsd")},
    "optim.lr_scaling": {"optim.base_batch": ("linear",)},
    "train.engine": {
        **{f"deepspeed.{name}": ("deepspeed",) for name in DeepspeedSection.model_fields},
        **{f"parallel.{name}": ("torch",) for name in _OF_TORCH},
        "optim.state_dtype": ("torch",),
        **{f"guard.{name}": ("torch",) for name in ("non_finite", "max_skips", "probe_every", "compare_every")},
        "guard.on_spike": ("torch",),
    },
    "guard.on_spike": {f"guard.{name}": ("roll_back",) for name in _OF_ROLL_BACK},
    "guard.non_finite": {"guard.max_skips": ("skip",)},
    "guard.damaged_data": {"guard.max_damaged": ("skip",)},
    "train.compile": {"train.compile_cache": ("blocks", "model")},
    "precision.compute": {
        **{f"precision.loss_scale{part}": ("fp16",) for part in ("", "_growth", "_backoff", "_interval")},
        **{f"precision.float8_{part}": ("float8",) for part in ("recipe", "engine", "emulate", "all_gather")},
        "precision.first_last": ("float8",),
    },
    "data.shuffle": {"data.window": ("windows",)},
    "recompute.mode": {
        "recompute.every": ("selective", "full"),
        "recompute.save_ops": ("selective",),
        "recompute.budget": ("budget",),
    },
}
"""Selector key -> key -> values of the selector with which the key has an effect."""


def value_of(values: RunFile, dotted: str) -> Any:
    """The value of a key."""
    section, name = dotted.split(".")
    return getattr(getattr(values, section), name)


def put_value(values: RunFile, dotted: str, value: Any) -> RunFile:
    """The same values with another one of a key."""
    section, name = dotted.split(".")
    return values.model_copy(update={section: getattr(values, section).model_copy(update={name: value})})


@cache
def kinds_of(selector: str) -> Mapping[str, tuple[str, ...]]:
    """Key -> our own choices of a selector of `DOORS` with which it has an effect."""
    group = GROUPS[DOORS[selector]].own
    kinds = {name: load_plugin(DOORS[selector], name).keys for name in group}
    keys = dict.fromkeys(key for owned in kinds.values() for key in owned)
    return MappingProxyType({key: tuple(name for name in group if key in kinds[name]) for key in keys})


def fact_of(selector: str, choice: str, fact: str) -> Any:
    """What the class behind a choice of a selector of `DOORS` states, such as `takes` of a model."""
    return getattr(load_plugin(DOORS[selector], choice), fact)


def takes_of(kind: str) -> Literal["tokens", "images"]:
    """What a kind of model takes."""
    takes: Literal["tokens", "images"] = fact_of("model.kind", kind, "takes")
    return takes


def applies(dotted: str, values: RunFile) -> bool:
    """Whether a key has an effect in this run."""
    if values.model.hf and dotted in (f"model.{name}" for name in SHAPE_KEYS):
        return False
    if dotted in ("model.hf_weights", "model.adapter") and not values.model.hf:
        return False
    if dotted == "track.settings":
        return bool(values.track.to)
    if dotted in SAMPLE_KEYS:
        return bool(values.train.sample_every != "off")
    if dotted == "data.path" and values.data.blend:
        return False
    for selector in DOORS:
        kinds = kinds_of_data(values.data.kind, values.data.blend, values.data.validation)
        chosen = kinds if selector == "data.kind" else (name_choice(value_of(values, selector)),)
        if not any(has_effect(dotted, selector, each) for each in chosen):
            return False
    owning = {selector: owners[dotted] for selector, owners in OWNERS.items() if dotted in owners}
    return all(name_choice(value_of(values, selector)) in choices for selector, choices in owning.items())


def kinds_of_data(kind: str, blend: Sequence[BlendEntry], validation: str) -> tuple[str, ...]:
    """The kinds that are read: of the parts of a blend and of what it validates on, or else data.kind."""
    own = [kind] if validation or not blend else []
    return tuple(dict.fromkeys([*(part.kind or kind for part in blend), *own]))


def has_effect(dotted: str, selector: str, choice: str) -> bool:
    """Whether a key has an effect with a choice of a selector of `DOORS`."""
    if dotted == f"{selector.partition('.')[0]}.settings":
        return bool(fact_of(selector, choice, "takes_settings")())
    kinds = kinds_of(selector)
    if choice in GROUPS[DOORS[selector]].own:
        return dotted not in kinds or choice in kinds[dotted]
    return dotted not in kinds or dotted in fact_of(selector, choice, "keys")


def name_choice(value: object) -> str:
    """The name of a choice in `OWNERS`: a number other than 0 is `ABOVE_ZERO`."""
    return ABOVE_ZERO if isinstance(value, int) and not isinstance(value, bool) and value > 0 else str(value)


# --- circumstances, data facts, the resolved run

DERIVED, MEASURED = "derived: ", "measured: "
"""The starts of the origin of a value that nothing sets: a rule has settled it, or `train.tune` has."""


@dataclass(frozen=True)
class Settled:
    """The value of a key that is "auto", and the reason."""

    value: Any
    reason: str


@dataclass(frozen=True)
class Circumstances:
    """The facts of machine and launcher: ranks in all and per node, cores and accelerators of a node."""

    ranks: int = 1
    ranks_per_node: int = 1
    usable_cores: int = 1
    accelerators: int = 0
    site: str = "laptop"
    hf: ModelFacts | None = None
    """The facts of model.hf's config, if there is one."""
    machine: Machine | None = None
    """The accelerators of the run, as the planner sees them; None if unknown or unwanted."""
    shape: Shape | None = None
    """The layers of model.hf, if the planner supports its family."""
    own_model: bool = False
    """Whether a script brings its own model and data, so that [model] and [data] describe nothing."""
    local_disk: str = ""
    """Folder on each node's own disk from the site's profile; empty if it has none."""
    devices: tuple[DeviceFacts, ...] = ()
    """The abilities of the ranks' accelerators, each kind once; empty if unknown."""
    before: Mapping[str, Any] = field(default_factory=dict)
    """Keys that follow the device -> values of earlier attempts of this run; empty for a new run. If train.tune could
    choose the micro-batch, that and the degrees too."""
    settled: Mapping[str, Settled] = field(default_factory=dict)
    """Keys that follow the device -> values that the script with its own model has settled."""


@dataclass(frozen=True)
class DataFacts:
    """Facts that only the opened data has.

    `samples` of an epoch, 0 if that is not known; `held_out`: whether there is something to validate on. `in_sequence`:
    what messages call data whose samples come in sequence alone, "" for those with numbers.
    """

    samples: int
    tokens_per_sample: int
    vocab: int | None
    held_out: bool = True
    in_sequence: str = ""


@dataclass(frozen=True)
class Derived:
    """Numbers that follow from the keys and are no keys themselves."""

    replicas: int
    accumulation: int
    peak_lr: float
    per_pass: int = 1
    total_steps: int = 0
    warmup_steps: int = 0
    decay_steps: int = 0


@dataclass(frozen=True)
class Resolved:
    """A run as it will happen. Frozen; `origins` has the origin of every key's value."""

    values: RunFile
    origins: Mapping[str, str]
    circumstances: Circumstances
    derived: Derived

    def is_derived(self, dotted: str) -> bool:
        return self.origins[dotted].startswith((DERIVED, MEASURED))

    def with_values(self, settled: Mapping[str, Settled]) -> Resolved:
        """The same run with other values for open keys."""
        values, origins = self.values, dict(self.origins)
        for dotted, each in settled.items():
            values = put_value(values, dotted, each.value)
            origins[dotted] = f"{DERIVED}{each.reason}"
        return replace(self, values=values, origins=MappingProxyType(origins))

    def render(self, keep: Callable[[str], bool] = lambda dotted: True) -> str:
        """The resolved run as a run file: the effective keys that pass `keep`, with their origins."""
        return render_run(self.values, self.origins, lambda dotted: applies(dotted, self.values) and keep(dotted))


# --- the draft


class Draft:
    """The state that rules work on: values by dotted key, their origins, problems found so far."""

    def __init__(self, loaded: LoadedRunFile, circumstances: Circumstances) -> None:
        self.circumstances = circumstances
        self.problems: list[Problem] = []
        self.file_name, self.origins = loaded.file_name, dict(loaded.origins)
        self._given, self._changed = loaded.values, dict[str, Any]()
        self._table = {dotted: value_of(loaded.values, dotted) for dotted in all_keys()}

    @property
    def values(self) -> RunFile:
        """All values as they stand now."""
        return reduce(lambda values, pair: put_value(values, *pair), self._changed.items(), self._given)

    def get(self, dotted: str) -> Any:
        return self._table[dotted]

    @property
    def data_kinds(self) -> tuple[str, ...]:
        """The kinds of the data: several for a blend of them."""
        return kinds_of_data(self.get("data.kind"), self.get("data.blend"), self.get("data.validation"))

    def is_set(self, dotted: str) -> bool:
        """Whether the user (or a rule) set the key."""
        return self.origins[dotted] != DEFAULT

    def is_open(self, dotted: str) -> bool:
        """Whether the key is not settled yet: it is not set, or it is "auto"."""
        return not self.is_set(dotted) or bool(self.get(dotted) == "auto")

    def is_derived(self, dotted: str) -> bool:
        return self.origins[dotted].startswith((DERIVED, MEASURED))

    def derive(self, dotted: str, value: Any, reason: str) -> None:
        """Settle an open key."""
        self._table[dotted] = self._changed[dotted] = value
        self.origins[dotted] = f"{DERIVED}{reason}"

    def refuse(self, dotted: str, what: str, allowed: str = "", remedy: str = "") -> None:
        self.problems.append(Problem(dotted, what, self.origins[dotted], allowed, remedy))

    def on_ranks(self, ranks: int, tried: Mapping[str, Any] = MappingProxyType({})) -> Draft:
        """A trial: a copy of this draft without problems, for another number of ranks and with other values.

        If this draft has problems its model may not be settled, and then the planner is not asked about the trial.
        """
        trial = copy.copy(self)
        machine = None if self.problems else self.circumstances.machine
        trial.circumstances, trial.problems = replace(self.circumstances, ranks=ranks, machine=machine), []
        trial.origins = self.origins | dict.fromkeys(tried, "tried")
        trial._table, trial._changed = {**self._table, **tried}, {**self._changed, **tried}
        return trial

    def passes(self, rules: Sequence[Rule]) -> bool:
        """Whether no rule refuses anything; stops at the first that does."""
        for rule in rules:
            rule(self)
            if self.problems:
                return False
        return True


Rule = Callable[[Draft], None]


def list_rules(module: Mapping[str, Any]) -> tuple[Rule, ...]:
    """The rules that a module defines, as they stand in it: its public functions of a draft alone."""
    mine = (each for name, each in module.items() if inspect.isfunction(each) and not name.startswith("_"))
    named = (each for each in mine if each.__module__ == module["__name__"])
    return tuple(each for each in named if list(each.__annotations__) == ["draft", "return"])


def of_what_is_described(rule: Rule) -> Rule:
    """A rule of what [model] and [data] describe: not for a script that brings its own model, whose objects are checked
    in the same way when it passes them in."""

    @wraps(rule)
    def judge(draft: Draft) -> None:
        if not draft.circumstances.own_model:
            rule(draft)

    return judge


def of_engine(name: str, rule: Rule) -> Rule:
    """A rule of one engine alone."""

    @wraps(rule)
    def judge(draft: Draft) -> None:
        if draft.get("train.engine") == name:
            rule(draft)

    return judge


# --- arithmetic that rules share


def nearest_divisor(number: int, wanted: int) -> int:
    """The divisor of `number` nearest to `wanted`, as `nearest_where` finds it."""
    return nearest_where(lambda divisor: number % divisor == 0, wanted, number)


def nearest_where(fits: Callable[[int], bool], wanted: int, most: int) -> int:
    """The number of 1 to `most` nearest to `wanted` that fits, the smaller of two; 1 if none within 4096 of it does.
    The caller guarantees that 1 fits."""
    start = min(wanted, most)
    near = (number for away in range(4096) for number in (start - away, start + away))
    return next((number for number in near if 1 <= number <= most and fits(number)), 1)


def nearest_multiple(unit: int, wanted: int) -> int:
    """The multiple of `unit` nearest to `wanted`, the larger of two; at least `unit`."""
    return max(1, (2 * wanted + unit) // (2 * unit)) * unit


def ceil_div(number: int, parts: int) -> int:
    """number / parts, rounded up."""
    return -(-number // parts)


def join_words(words: Sequence[str]) -> str:
    """One, two or more words in a sentence: a, b and c."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def count_of(number: int, what: str) -> str:
    """A number with its noun: 1 stage, 2 stages, 2 micro-batches."""
    plural = f"{what}es" if what.endswith("ch") else f"{what}s"
    return f"{number} {what if number == 1 else plural}"


# --- shares of a global batch


def replicas_of(draft: Draft) -> int:
    """The number of ranks that share a global batch."""
    degrees = (draft.get("parallel.dp_replicate"), draft.get("parallel.dp_shard"))
    return math.prod(degree for degree in degrees if degree != "auto")


def batch_of(draft: Draft) -> BatchRamp:
    """The samples of each step over all ranks."""
    return BatchRamp.of(draft.get("train.global_batch"))


def share_of(draft: Draft) -> int:
    """The most samples of a step that a rank has."""
    return ceil_div(batch_of(draft).largest, replicas_of(draft))


def accumulation_of(draft: Draft) -> int:
    """The number of micro-batches of a rank's share of the largest step."""
    return ceil_div(share_of(draft), draft.get("train.micro_batch"))
