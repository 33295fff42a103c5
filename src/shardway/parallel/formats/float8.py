"""Float8: which linear layers multiply in eight bits, and whether this device and its libraries can.

Invariant: embeddings, the output layer and what is not a plain `nn.Linear` inside a block stay as they are; names of
parameters stay. Weights stay in their own format and are cast at each use. This module must not import the libraries
before they are asked for.

A scale is that of the tensor that a rank computes with, so under the tensor axis (a part of a weight) rounding differs
from one rank's, within the error of the format.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType

import torch
from torch import nn

from shardway.errors import UserError
from shardway.models.contract import ModelPlan, canonical_name, held_by_rank, matches

_MULTIPLE = {"mxfp8": 32, "blockwise": 128}
"""What both dims of a weight must be a multiple of; 16 otherwise (cuBLAS, "FP8 data types": 16 bytes)."""

_CAPABILITY = {"tensorwise": (8, 9), "rowwise": (9, 0), "rowwise_with_gw_hp": (9, 0), "mxfp8": (10, 0)}
"""The least CUDA compute capability of a recipe's matrix products; blockwise: 9.0."""


@dataclass(frozen=True)
class Float8Options:
    """The keys float8_* and first_last of the run file, `all_gather` resolved."""

    recipe: str = "tensorwise"
    engine: str = "torchao"
    emulate: bool = False
    all_gather: bool = False
    first_last: str = "same"


@dataclass(frozen=True)
class Blocks:
    """A model (of a pipeline: this rank's part), its blocks and its plan. `edges` are those of the whole model's first
    and last block that this rank has."""

    model: nn.Module
    units: Sequence[nn.Module]
    plan: ModelPlan | None = None
    edges: Sequence[nn.Module] = ()


@dataclass(frozen=True)
class Float8Report:
    """What became of the linear layers in the blocks: names of converted ones, of those kept as they were on purpose,
    and of those with a dim that does not fit."""

    converted: tuple[str, ...]
    kept: tuple[str, ...]
    unfit: tuple[str, ...]
    emulated: bool

    def render(self) -> str:
        """One sentence for the user who asked for float8."""
        count = len(self.converted) + len(self.kept) + len(self.unfit)
        head = f"{len(self.converted)} of {count} linear layers in blocks multiply in float8"
        head += " (emulated)" if self.emulated else ""
        parts = [f"{len(self.kept)} kept as they are"] if self.kept else []
        parts += [f"{len(self.unfit)} have a dim that does not fit, such as {self.unfit[0]}"] if self.unfit else []
        return "; ".join([head, *parts])


@dataclass
class _Sorted:
    converted: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    unfit: list[str] = field(default_factory=list)


def apply_float8(blocks: Blocks, options: Float8Options, device: torch.device) -> Float8Report:
    """Let the matrices of a model's blocks multiply in float8, in place, before it is sharded.

    Of a model whose plan says how matrices split, those are converted and no others (routers and the like);
    `first_last = "bf16"` leaves the edges out. Raises UserError where the device or a library cannot, and where no
    layer fits.
    """
    emulate = check_float8(options, device)
    convert = _find_conversion(blocks.model, options, emulate)
    kept = {each for edge in blocks.edges for each in edge.modules()} if options.first_last == "bf16" else set()
    found, multiple = _Sorted(), _MULTIPLE.get(options.recipe, 16)
    for name, linear in _linears(blocks):
        if linear in kept or not _is_matrix(name, blocks.plan):
            found.kept.append(name)
        elif any(size % multiple for size in held_by_rank(linear.weight).shape):
            found.unfit.append(name)
        else:
            convert(name, linear)
            found.converted.append(name)
    if not found.converted and not found.kept:
        raise _no_layer(blocks.model, found, multiple)
    return Float8Report(tuple(found.converted), tuple(found.kept), tuple(found.unfit), emulate)


def check_float8(options: Float8Options, device: torch.device) -> bool:
    """Whether float8 is emulated on this device. Raises UserError where it can be neither computed nor emulated."""
    if _multiplies(options.recipe, device):
        return False
    if options.emulate and options.recipe != "blockwise" and options.engine == "torchao":
        return True
    raise UserError(
        f'precision.float8_recipe = "{options.recipe}" cannot be computed on {_describe(device)}: it needs '
        f"{_describe_need(options.recipe)}.\n  To do: choose another recipe or precision.compute, or "
        "precision.float8_emulate = true with a recipe of torchao other than blockwise (slow: for tests)."
    )


def compute_scales(model: nn.Module, options: Float8Options | None) -> None:
    """After each optimizer step: the scales of weights that are gathered in float8, in one all-reduce."""
    if options is not None and options.all_gather:
        _import_engine("torchao").compute_scales(model)


def _multiplies(recipe: str, device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _CAPABILITY.get(recipe, (9, 0))


def _describe(device: torch.device) -> str:
    if device.type != "cuda":
        return f"a {device.type.upper()}"
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)} (compute capability {major}.{minor})"


def _describe_need(recipe: str) -> str:
    major, minor = _CAPABILITY.get(recipe, (9, 0))
    return f"an accelerator with compute capability {major}.{minor} or above"


def _linears(blocks: Blocks) -> list[tuple[str, nn.Linear]]:
    """The plain linear layers of the units; of a model without a plan its last one is taken for the output layer."""
    inside = {module for unit in blocks.units for module in unit.modules()}
    named = blocks.model.named_modules()
    linears = [(canonical_name(name), module) for name, module in named if type(module) is nn.Linear]
    if blocks.plan is None:
        del linears[-1:]
    return [(name, linear) for name, linear in linears if linear in inside]


def _is_matrix(name: str, plan: ModelPlan | None) -> bool:
    if plan is None or not plan.tensor:
        return True
    return any(matches(name, pattern) and split != "logits" for pattern, split in plan.tensor.items())


def _no_layer(model: nn.Module, found: _Sorted, multiple: int) -> UserError:
    why = "has no linear layer inside its blocks"
    if found.unfit:
        why = f"has none whose dims are multiples of {multiple} ({found.unfit[0]} is not, for one)"
    return UserError(
        f'precision.compute = "float8" converts linear layers, and {type(model).__name__} {why}.\n'
        '  To do: set precision.compute = "bf16", or change the sizes.'
    )


@dataclass(frozen=True)
class _Engine:
    """A library that multiplies in float8: the module here that uses it, and what pip calls it."""

    module: str
    package: str


_ENGINES = {
    "torchao": _Engine("shardway.parallel.formats.float8_torchao", "'shardway[float8]'"),
    "transformer_engine": _Engine("shardway.parallel.formats.float8_te", "'transformer_engine[pytorch]'"),
}


def _import_engine(name: str) -> ModuleType:
    engine = _ENGINES[name]
    try:
        return importlib.import_module(engine.module)
    except ImportError as error:
        raise UserError(
            f'precision.compute = "float8" with precision.float8_engine = "{name}" needs {name}, which cannot be '
            f"imported ({error}).\n  To do: pip install {engine.package}, or set precision.compute."
        ) from None


def _find_conversion(model: nn.Module, options: Float8Options, emulate: bool) -> Callable[[str, nn.Linear], None]:
    engine = _import_engine(options.engine)
    try:
        return engine.find_conversion(model, options.recipe, emulate=emulate, all_gather=options.all_gather)
    except ImportError as error:
        raise UserError(
            f'precision.float8_recipe = "{options.recipe}" is not in the {options.engine} that is installed '
            f'({error}).\n  To do: choose "tensorwise", or install what it lacks.'
        ) from None
