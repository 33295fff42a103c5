"""What a model may tell the rest of Shardway about itself, as data.

Every `nn.Module` whose `forward` takes the inputs and returns logits can be trained. Two methods are optional:

    def plan(self) -> ModelPlan             which modules form units, and how their matrices split
    def init_weights(self, seed: int)       fill every parameter and buffer, needed when it is built on meta

Invariant: a plan names modules by pattern and never holds a module, so it is as true of the model on the meta
device as of one that was sharded. This module must not change a model.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal

from torch import nn

from shardway.errors import Problem, check_no_problems

Split = Literal["column", "row", "vocabulary"]
"""How a weight splits over the tensor axis: `column` by output features (dim 0), `row` by input features (dim 1),
`vocabulary` by rows of an embedding table (dim 0, the lookup then sums over ranks)."""

_WRAPPERS = ("_checkpoint_wrapped_module", "_orig_mod")


@dataclass(frozen=True)
class ModelPlan:
    """Facts of a model that its parallel forms need.

    `blocks` are patterns of modules that are one unit of sharding, compilation and recompute, each called once in
    a forward pass. `tensor` maps patterns to how the matched module's weight splits over the tensor axis.
    A pattern is compared part by part between the dots: "blocks.*" is every child of `blocks` and no grandchild.
    """

    blocks: tuple[str, ...] = ()
    tensor: Mapping[str, Split] = field(default_factory=dict)


def find_plan(model: nn.Module) -> ModelPlan | None:
    """The plan that the model's class offers, or None. Raises UserError where `plan()` returns something else."""
    if not callable(getattr(type(model), "plan", None)):  # on the class: a submodule may happen to be named plan
        return None
    plan = model.plan()  # type: ignore[operator]
    check_no_problems(f"the plan of {type(model).__name__}", _list_type_problems(plan))
    return plan


def find_init_weights(model: nn.Module) -> Callable[[int], None] | None:
    """The model's own `init_weights(seed)`, or None; without one it cannot be built on the meta device."""
    method = getattr(model, "init_weights", None)
    return method if callable(getattr(type(model), "init_weights", None)) else None


def match_modules(model: nn.Module, patterns: Iterable[str]) -> list[tuple[str, nn.Module]]:
    """The (name, module) pairs that any pattern matches, each once, in the order of `model.named_modules()`.

    Raises UserError that names every pattern without a match, with the nearest names of the model.
    """
    modules: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        modules.setdefault(canonical_name(name), module)  # the outermost wrapper goes by the name
    del modules[""]
    wanted = list(patterns)
    unmatched = [p for p in wanted if not any(matches(name, p) for name in modules)]
    problems = [_describe_no_match(pattern, list(modules)) for pattern in unmatched]
    check_no_problems(f"the plan of {type(model).__name__}", problems)
    return [(name, module) for name, module in modules.items() if any(matches(name, p) for p in wanted)]


def matches(name: str, pattern: str) -> bool:
    """Whether a module's name fits a pattern, part by part between the dots."""
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def canonical_name(name: str) -> str:
    """The name without the parts that torch's recompute wrapper and `torch.compile` add to it.

    Initial values are drawn by name, so the name of a weight must not depend on what wraps its module.
    """
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _list_type_problems(plan: object) -> list[Problem]:
    if isinstance(plan, ModelPlan):
        return []
    return [
        Problem(
            where="plan()",
            what=f"returned a {type(plan).__name__}",
            allowed="a shardway.models.contract.ModelPlan",
            remedy='return ModelPlan(blocks=("layers.*",)), or rename a method that means something else',
        )
    ]


def _describe_no_match(pattern: str, names: Sequence[str]) -> Problem:
    near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.4) or names[:3]
    return Problem(
        where=pattern,
        what="no module has such a name",
        allowed="the name of a module, * for any one part; such as "
        + (", ".join(near) or "none: it has no submodules"),
        remedy="correct the pattern",
    )
