"""What a model may state about itself to the rest of Shardway, as data.

Every `nn.Module` whose `forward` takes the inputs and returns logits can be trained. Two methods are optional:

    def plan(self) -> ModelPlan             which modules form units, how weights split, where it may be cut
    def init_weights(self, seed: int)       fill every parameter and buffer, needed when it is built on meta

and an attribute of the class, `base_fingerprint`: see `find_base`.

Invariant: a plan names modules by pattern and never holds a module, so it holds for the model on the meta device and
for a sharded one. This module must not change a model.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardway.errors import Problem, check_no_problems

Split = Literal["column", "key_value", "row", "vocabulary", "logits", "sequence"]
"""How the tensor axis splits a module.

`column`: its weight [out, in] splits by output features; `key_value`: so do projections into key and value heads, which
are repeated over ranks if there are fewer heads than ranks; `row`: by input features, so its output is a sum over the
ranks; `vocabulary`: an embedding table splits by rows, so its output is also a sum; `logits`: the output layer, by
columns; `sequence`: nothing splits, and it works on each token alone (norms, tables of positions), so it may get a part
of the sequence. A model that marks none keeps its sequence whole.
"""

_WRAPPERS = ("_checkpoint_wrapped_module", "_orig_mod")


@dataclass(frozen=True)
class ModelPlan:
    """Facts of a model that its parallel forms need. A pattern is compared part by part between the dots: "blocks.*" is
    every child of `blocks` and no grandchild."""

    blocks: tuple[str, ...] = ()
    """Modules that are one unit of sharding, compilation and recompute, each called once in a forward pass."""
    tensor: Mapping[str, Split] = field(default_factory=dict)
    """How modules take part in the tensor axis."""
    regions: tuple[str, ...] = ()
    """Modules that hold all `column` and `row` modules of one sum: the tensor axis gathers the first input (the whole
    sequence) at the beginning and adds up the outputs at the end. All ranks compute the rest of a region alike."""
    held: Mapping[str, int] = field(default_factory=dict)
    """Parameters inside a region that the tensor axis splits in this dim, read through `held_by_rank`."""
    kv_width: int = 0
    """Features of one key/value head, the least that a `key_value` module may be split into."""
    attention: tuple[str, ...] = ()
    """Modules without parameters that mix positions: (q, k, v), each [batch, heads, seq, head_dim], causal -> the same
    shape as q; k and v may have fewer heads. The context axis takes their place."""
    positions: str = ""
    """Keyword of `forward` that takes int64 positions [seq]; without it the sequence cannot be split."""
    experts: tuple[str, ...] = ()
    """Modules (tokens [n, dim] sorted by expert, counts [experts]) -> [n, dim], whose parameters all have the expert in
    dim 0 and are read through `held_by_rank`. The expert axis splits them and sends tokens to the ranks of their
    experts."""
    active: float = 1.0
    """The part of its experts that one token uses (top-k / experts)."""
    first: tuple[str, ...] = ()
    """Modules before the blocks: a pipeline's first stage keeps them."""
    last: tuple[str, ...] = ()
    """Modules after the blocks: a pipeline's last stage keeps them. A module that a stage lacks is None (or gone from
    its `nn.ModuleDict`), and `forward` must then return its input. Without `last` a model cannot be cut."""
    shared: tuple[tuple[str, str], ...] = ()
    """Pairs of modules of which the second uses a weight of the first (tied embeddings): they must stay together."""


@runtime_checkable
class Balancing(Protocol):
    """A module that sends tokens to experts and keeps them equally busy."""

    load: torch.Tensor
    """int64 [experts]: choices counted in training since `adjust`."""
    gradient_scale: float
    """The factor on the sum over tokens of the main loss, for an auxiliary loss; 0 counts nothing."""
    sum_over_context: Callable[[torch.Tensor], torch.Tensor] | None
    """Adds up counts over the ranks that hold parts of a sequence; None if a rank holds it whole."""

    def adjust(self, load: torch.Tensor) -> None:
        """Take the sum of `load` over all ranks, and reset the counts."""


def find_routers(model: nn.Module) -> list[Balancing]:
    """The modules of a model that balance experts."""
    return [module for module in model.modules() if isinstance(module, Balancing)]


def held_by_rank(parameter: torch.Tensor) -> torch.Tensor:
    """The part of a parameter that this rank computes with: the local tensor of a split one, else itself."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def find_plan(model: nn.Module) -> ModelPlan | None:
    """The plan that the class of a whole model offers, or None.

    Raises UserError if `plan()` returns something else, or if patterns of it match nothing, with all of them and the
    nearest names.
    """
    if not callable(getattr(type(model), "plan", None)):  # on the class: a submodule may happen to be named plan
        return None
    plan = model.plan()  # type: ignore[operator]
    what = f"the plan of {type(model).__name__}"
    if not isinstance(plan, ModelPlan):
        problem = Problem(
            where="plan()",
            what=f"returned a {type(plan).__name__}",
            allowed="a shardway.models.contract.ModelPlan",
            remedy='return ModelPlan(blocks=("layers.*",)), or rename a method that means something else',
        )
        check_no_problems(what, [problem])
    shared = [name for pair in plan.shared for name in pair]
    groups = (plan.blocks, plan.tensor, plan.regions, plan.attention, plan.experts, plan.first, plan.last, shared)
    modules, parameters = list(_module_names(model)), [canonical_name(name) for name, _ in model.named_parameters()]
    wanted = [("module", modules, p) for p in dict.fromkeys(pattern for group in groups for pattern in group)]
    wanted += [("parameter", parameters, p) for p in plan.held]
    problems = []
    for kind, names, pattern in wanted:
        if not any(matches(name, pattern) for name in names):
            near = ", ".join(difflib.get_close_matches(pattern, names, n=3, cutoff=0.4) or names[:3])
            allowed = f"the name of a {kind}, * for any one part; such as {near or 'none: it has no submodules'}"
            what_not = f"no {kind} has such a name"
            problems.append(Problem(pattern, what_not, allowed=allowed, remedy="correct the pattern"))
    check_no_problems(what, problems)
    return plan


def find_init_weights(model: nn.Module) -> Callable[[int], None] | None:
    """The model's own `init_weights(seed)`, or None; without one it cannot be built on the meta device."""
    method = getattr(model, "init_weights", None)
    return method if callable(getattr(type(model), "init_weights", None)) else None


def find_base(model: nn.Module) -> str:
    """The fingerprint of frozen weights that the model's `init_weights` brings again, so that checkpoints leave them
    out; "" for a model whose checkpoints hold all of it."""
    return str(getattr(model, "base_fingerprint", "")) if hasattr(type(model), "base_fingerprint") else ""


def match_modules(model: nn.Module, patterns: Iterable[str]) -> list[tuple[str, nn.Module]]:
    """The (name, module) pairs that any pattern matches, each once, in the order of `model.named_modules()`.

    A part of a model (a pipeline stage) may lack some: `find_plan` reports what a whole model lacks.
    """
    wanted = list(patterns)
    modules = _module_names(model)
    return [(name, module) for name, module in modules.items() if any(matches(name, p) for p in wanted)]


def match_parameters(model: nn.Module, dims: Mapping[str, int]) -> list[tuple[str, int]]:
    """(name, dim) of each parameter that a pattern of `dims` matches."""
    names = [canonical_name(name) for name, _ in model.named_parameters()]
    return [(name, dim) for name in names for pattern, dim in dims.items() if matches(name, pattern)]


def matches(name: str, pattern: str) -> bool:
    """Whether a module's name fits a pattern, part by part between the dots."""
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def canonical_name(name: str) -> str:
    """The name without the parts that torch's recompute wrapper and `torch.compile` add to it.

    Initial values are drawn by name, so the name of a weight must not depend on what wraps its module.
    """
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _module_names(model: nn.Module) -> dict[str, nn.Module]:
    """Every submodule by name; the outermost wrapper goes by the name of what it wraps."""
    modules: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        modules.setdefault(canonical_name(name), module)
    del modules[""]
    return modules
