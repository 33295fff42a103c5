"""Random legal layouts with random features: what the parity and the reshape tests run.

Invariant: the same draws in every session; a draw is legal when `resolve` says so and not by a second opinion.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from runs import COMMON
from shardway.errors import UserError
from shardway.resolve import resolve
from shardway.resolve.draft import Circumstances
from shardway.runfile.load import load_run

SMALL = (
    *COMMON,
    "model.dim=32",
    "model.layers=4",
    "model.heads=4",
    "model.ffn_dim=64",
    "model.vocab=32",
    "data.seq_len=16",
    "train.global_batch=8",
)

MIXTURE = ("model.experts=4", "model.expert_dim=16")
MODELS: dict[str, tuple[str, ...]] = {
    "dense": ("model.tied=false",),
    "tied": ("model.tied=true",),
    "grouped": ("model.tied=false", "model.kv_heads=2"),
    "one kv head": ("model.tied=false", "model.kv_heads=1", "model.norm=layernorm", "model.activation=gelu"),
    "experts": ("model.tied=false", *MIXTURE, "model.balance=none"),
    "experts, bias": ("model.tied=false", *MIXTURE, "model.bias_update_rate=0.01", "model.dense_layers=1"),
    "experts, loss": (
        "model.tied=false",
        *MIXTURE,
        "model.balance=loss",
        "model.balance_weight=0.1",
        "model.shared_experts=1",
        "model.kv_heads=2",
    ),
}
WORLDS = (2, 4, 4, 4, 4, 6, 8, 8)
AXES = ("dp_replicate", "dp_shard", "cp", "tp", "pp")


@dataclass(frozen=True)
class Drawn:
    """A layout with its features: overrides of a run on `world` ranks, those of the model apart."""

    world: int
    model: str
    parallel: tuple[str, ...]

    @property
    def overrides(self) -> tuple[str, ...]:
        """All of them."""
        return (*MODELS[self.model], *self.parallel)

    @property
    def alone(self) -> tuple[str, ...]:
        """Those of the same run on one rank."""
        kept = [word for word in self.parallel if not word.startswith(("parallel.", "train.micro", "recompute."))]
        return (*MODELS[self.model], *kept)

    @property
    def axes(self) -> frozenset[str]:
        """The axes that split something."""
        return frozenset(axis for axis in (*AXES, "ep") if self.degree(axis) > 1)

    @property
    def layers(self) -> int:
        """Blocks of the model: as few as show what there is to show, since each has its collectives."""
        return 4 if self.degree("pp") > 1 else 2

    def degree(self, axis: str) -> int:
        """The degree of an axis."""
        word = next((w for w in self.parallel if w.startswith(f"parallel.{axis}=")), "=1")
        return int(word.partition("=")[2])

    @property
    def features(self) -> str:
        """Degrees above 1 and what else is set, as one would say it."""
        said = (word.partition(".")[2] for word in self.parallel if not (word.endswith("=1") and _is_degree(word)))
        return ", ".join(word.replace("=", " ") for word in said)

    def __str__(self) -> str:
        return f"{self.model}, {self.features}"


@functools.cache
def draw_layouts(count: int, seed: int = 20, worlds: tuple[int, ...] = WORLDS) -> tuple[Drawn, ...]:
    """`count` distinct legal layouts."""
    found: dict[Drawn, None] = {}
    for drawn in _draws(random.Random(seed), worlds):
        if drawn not in found and _is_legal(drawn):
            found[drawn] = None
        if len(found) == count:
            break
    return tuple(found)


def pick_layouts(layouts: Sequence[Drawn]) -> list[Drawn]:
    """As few of them, and on as few ranks, as have every trait of all: each joins whose traits are new for its cost,
    and leaves again where those that came later have what it had."""
    missing = {trait for drawn in layouts for trait in traits_of(drawn)}
    picked = []
    while missing:
        best = max(layouts, key=lambda drawn: len(missing & traits_of(drawn)) / drawn.world)
        picked.append(best)
        missing -= traits_of(best)
    for drawn in list(picked):
        others = [each for each in picked if each is not drawn]
        if traits_of(drawn) <= {trait for each in others for trait in traits_of(each)}:
            picked = others
    return picked


def traits_of(drawn: Drawn) -> set[tuple[str, ...]]:
    """What a layout shows that another may not: two axes together, each model, each feature.

    Models on each axis alone are in `tests/parallel/test_kinds_on_axes.py`.
    """
    said = [drawn.model, *(word for word in drawn.parallel if not _is_degree(word))]
    return {*combinations(sorted(drawn.axes), 2), *((word,) for word in said)}


def pairs_of(layouts: Sequence[Drawn]) -> set[tuple[str, ...]]:
    """The pairs of axes that are split together in any of them."""
    return {pair for drawn in layouts for pair in combinations(sorted(drawn.axes), 2)}


def _draws(dice: random.Random, worlds: Sequence[int]) -> Iterator[Drawn]:
    while True:
        world = dice.choice(worlds)
        degrees = dict.fromkeys(AXES, 1)
        rest = world
        while rest > 1:
            factor = next(k for k in (2, 3) if rest % k == 0)
            degrees[dice.choice(AXES)] *= factor
            rest //= factor
        model = dice.choice(list(MODELS))
        words = {f"parallel.{axis}": degree for axis, degree in degrees.items()}
        yield Drawn(world, model, tuple(f"{k}={v}" for k, v in {**words, **_features(dice, degrees, model)}.items()))


def _features(dice: random.Random, degrees: dict[str, int], model: str) -> dict[str, Any]:
    """What else a run may set; only what matters in these degrees, so that two draws differ in what they do."""
    micro_batch = dice.choice([2, 4, "auto"])
    if micro_batch == 2 and degrees["tp"] * degrees["cp"] > 1 and degrees["dp_replicate"] * degrees["dp_shard"] == 1:
        micro_batch = 4  # their collectives go with every micro-batch: two of these show what four would
    words: dict[str, Any] = {
        "train.micro_batch": micro_batch,
        "recompute.mode": dice.choice(["none", "none", "full", "selective"]),
    }
    shard = degrees["dp_shard"] * degrees["cp"]
    if shard > 1:
        words["parallel.reshard_after_forward"] = dice.choice(["auto", "true", "false", 2])
        words["parallel.prefetch"] = dice.choice([0, 1, 2])
        if model.startswith("experts"):
            words["parallel.ep"] = dice.choice([k for k in (1, 2, 4) if shard % k == 0])
    if degrees["tp"] > 1:
        words["parallel.tp_sequence"] = dice.choice(["true", "true", "false"])
        words["parallel.tp_loss"] = dice.choice(["true", "false"])
    if degrees["cp"] > 1:
        words["parallel.cp_method"] = dice.choice(["ring", "gather"])
    if degrees["pp"] > 1:
        schedule = dice.choice(["gpipe", "1f1b", "interleaved", "zero_bubble", "zbv"])
        words["parallel.pp_schedule"] = schedule
        if degrees["pp"] == 2:
            per_rank = 1 if schedule in ("gpipe", "1f1b") else 2
            words["parallel.pp_split"] = dice.choice(["[]", "[3, 1]" if per_rank == 1 else "[1, 1, 1, 1]"])
        words["parallel.pp_micro_batches"] = dice.choice(["auto", "auto", 2])
    return words


def _is_degree(word: str) -> bool:
    return word.partition("=")[0].removeprefix("parallel.") in (*AXES, "ep")


def _is_legal(drawn: Drawn) -> bool:
    try:
        resolve(load_run(None, (*SMALL, *drawn.overrides)), Circumstances(drawn.world, drawn.world))
    except UserError:
        return False
    return True
