"""The blocks of a model, the units of sharding, and what is done to them: compiled, recomputed, seeded for dropout;
and torch's process-wide backend flags.

Invariants:
- Units do not contain each other. A model's own plan decides; without one, the repeated parts of the model do.
- A module is compiled in place, so that names stay and hooks of what goes around it still run.
- `apply_backend_switches` sets every switch each time, so that what a run before left behind in the process does not
  count, but for what a script has set before it opened its run. This module is the only one that sets them.
- Recompute: gradients are those without it, bit for bit, random numbers included. The n-th result of an operator in the
  forward pass is what its n-th call gets when the region is computed again, as often as that happens; every other
  operator runs again. Recompute is inside the block: what compiles or shards a block goes around it.
- Dropout: before each block runs, the generator starts at a hash of (train.seed, the first sample of the micro-batch,
  the block's name). So its masks are those of one rank with the same micro-batches, over dp_replicate, dp_shard, pp and
  accumulation, and over tp without sequence parallelism; where ranks hold parts of a sequence (cp, tp with sequence
  parallelism) each part has masks of its own. A model without dropout is not touched.
"""

from __future__ import annotations

import contextlib
import difflib
import os
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch._functorch.config
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from shardway.errors import UserError
from shardway.models.contract import ModelPlan, canonical_name, match_modules
from shardway.models.initialise import stream_key
from shardway.places import expand_place, find_own_folder
from shardway.runfile.schema import RecomputeSection, RunFile


def find_units(model: nn.Module, plan: ModelPlan | None) -> list[nn.Module]:
    """The units of a model, in the order of its modules; empty for one that has no repeated part.

    Without a plan these are the members with parameters of the outermost `nn.ModuleList`s and `nn.Sequential`s.
    """
    if plan is not None:
        return [module for _, module in match_modules(model, plan.blocks)]
    found: list[nn.Module] = []
    for child in model.children():
        if isinstance(child, nn.ModuleList | nn.Sequential):
            found += [part for part in child.children() if any(True for _ in part.parameters())]
        else:
            found += find_units(child, None)
    return found


# --- torch.compile


def apply_compile(
    model: nn.Module, units: Sequence[nn.Module], mode: str, backend: str | Callable[..., Any] = "inductor"
) -> None:
    """Have the units (the model, where it has none) or the whole model compiled at their first call; `mode` is
    train.compile.

    One graph serves all blocks that are built alike. Of a whole model with sharded blocks, each block becomes a graph
    between the hooks that gather its weights. Of a replicated one all gradients are ready only at the end of its one
    graph, so that they do not travel while it computes.
    """
    modules = {"off": (), "blocks": tuple(units) or (model,), "model": (model,)}
    for module in modules[mode]:
        if module.forward.__module__.startswith("torch."):
            module.forward = partial(_call, module.forward)
        module.compile(backend=backend)


def _call(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A frame outside torch: the compiler passes over torch's own, and a block of one of its classes (such as
    `nn.TransformerEncoderLayer`) would quietly run uncompiled."""
    return forward(*args, **kwargs)


_CACHE = "TORCHINDUCTOR_CACHE_DIR"


def set_compile_cache(configured: str) -> None:
    """Keep compiled code in train.compile_cache; "auto" is the folder that torch's own variable names, or else
    `compiled` in shardway's part of the user's cache folder. Files are keyed by content and written whole, so ranks
    and runs may share the folder. torch sets its variable itself when parts of it are imported, to a folder of the
    node's that a job loses: that is no choice of the user's.

    torch has no other door to this than an environment variable, which compile workers inherit. Raises UserError
    where "auto" finds no folder or the folder cannot be made.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    if configured == "auto" and os.environ.get(_CACHE, "") not in ("", default_cache_dir()):
        return
    if configured != "auto":
        folder = expand_place(configured)
    elif (own := find_own_folder("CACHE")) is not None:
        folder = own / "compiled"
    else:
        raise UserError(
            'train.compile_cache: "auto" needs a home folder, and this account has none.\n'
            "  To do: set train.compile_cache to a folder."
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"train.compile_cache: the folder {folder} cannot be made ({error.strerror}).\n"
            "  To do: set train.compile_cache to a folder that can be written to."
        ) from None
    os.environ[_CACHE] = str(folder.resolve())


# --- backend flags of the process


def apply_backend_switches(values: RunFile, device: torch.device, *, leaves_tf32: bool = False) -> None:
    """Set how fp32 products, convolutions, nondeterminism and the compiler behave in this process; `leaves_tf32`: the
    script has set that itself.

    To be called before the device is used. Raises UserError where compiled code has no folder to be kept in.
    """
    if device.type == "cuda" and not leaves_tf32:
        # The older of torch's two interfaces: where both are used, torch raises, and its compiler reads this one.
        torch.set_float32_matmul_precision("high" if values.precision.tf32 is True else "highest")
    torch.backends.cudnn.benchmark = values.train.cudnn_benchmark
    if values.train.deterministic:
        # cuBLAS reads it when its first handle is made; without it torch refuses matrix products on CUDA.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(values.train.deterministic)
    torch.backends.cudnn.deterministic = values.train.deterministic
    wants_budget = values.recompute.mode == "budget"
    torch._functorch.config.activation_memory_budget = values.recompute.budget if wants_budget else 1.0
    if values.train.compiles:
        set_compile_cache(values.train.compile_cache)


@contextlib.contextmanager
def tf32_put_back(device: torch.device) -> Iterator[None]:
    """After a run in a process that goes on, TF32 is as it was before, so that the next one does not take it for what
    its script has set."""
    before = None
    if device.type == "cuda":
        with contextlib.suppress(RuntimeError):  # the newer interface is in use, which no run touches
            before = torch.get_float32_matmul_precision()
    try:
        yield
    finally:
        if before is not None:
            torch.set_float32_matmul_precision(before)


# --- recompute: a block is computed again in the backward pass (Chen et al., arXiv:1604.06174), whole or but for the
# results of chosen operators (Korthikanti et al., arXiv:2205.05198, section 5, whose choice was by module)

OPERATORS = MappingProxyType(
    {
        "matmul": (
            "aten.mm",
            "aten.addmm",
            "aten.bmm",
            "aten.baddbmm",
            "aten.convolution",
            "aten._scaled_mm",
            "aten._grouped_mm",
            "aten._scaled_grouped_mm",
        ),
        "attention": (
            "aten._scaled_dot_product_flash_attention",
            "aten._scaled_dot_product_flash_attention_for_cpu",
            "aten._scaled_dot_product_efficient_attention",
            "aten._scaled_dot_product_cudnn_attention",
            "torch_attn._varlen_attn",
        ),
        "collective": (
            "_c10d_functional.all_reduce",
            "_c10d_functional.reduce_scatter_tensor",
            "_c10d_functional.all_to_all_single",
        ),
    }
)
"""Name of a group in `recompute.save_ops` -> its operators; those that this torch lacks do not count."""

Operator = torch._ops.OpOverload


def apply_recompute(units: Sequence[nn.Module], section: RecomputeSection) -> None:
    """Let every k-th unit recompute in the backward pass what it does not keep, in place.

    Mode "budget" changes nothing here: the compiler chooses (`apply_backend_switches`). Raises UserError where an
    operator of `save_ops` does not exist.
    """
    if section.mode not in ("selective", "full"):
        return
    operators = find_operators(section.save_ops)
    for unit in units[:: section.every]:
        full = section.mode == "full"
        unit.forward = partial(_recompute, unit.forward) if full else partial(_recompute_part, operators, unit.forward)


# Functions of this module rather than `partial(checkpoint, ...)`: see `_call`.
def _recompute(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


def _recompute_part(operators: list[Operator], forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The compiler knows torch's own contexts and makes them a part of its graph. Without it they would compare every
    operator of both passes and allow one backward pass; but weights that are gathered inside a region are gathered once
    more when it is computed again, and a schedule that splits the backward pass computes it again twice."""
    make = create_selective_checkpoint_contexts if torch.compiler.is_compiling() else keeping
    return checkpoint(forward, *args, use_reentrant=False, context_fn=partial(make, operators), **kwargs)


def find_operators(names: Sequence[str]) -> list[Operator]:
    """The operators behind the names of `recompute.save_ops`: groups, or operators such as "aten.mm".

    Raises UserError for a name that is neither.
    """
    found: list[Operator] = []
    for name in names:
        overloads = [overload for each in OPERATORS.get(name, (name,)) for overload in _overloads(each)]
        if not overloads and name not in OPERATORS:
            near = difflib.get_close_matches(name, [each for group in OPERATORS.values() for each in group], n=1)
            hint = f"; the nearest known is {near[0]}" if near else ""
            raise UserError(
                f'recompute.save_ops names "{name}", which is no operator of this torch{hint}.\n'
                f"  allowed: {', '.join(OPERATORS)}, or an operator such as aten.mm"
            )
        found += overloads
    return found


def _overloads(name: str) -> Iterator[Operator]:
    namespace, _, operator = name.partition(".")
    packet = getattr(getattr(torch.ops, namespace), operator, None)
    if isinstance(packet, torch._ops.OpOverloadPacket):
        yield from (getattr(packet, overload) for overload in packet.overloads())


def keeping(operators: Collection[Operator]) -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """What goes around the forward pass of a region and around each time it is computed again (`context_fn` of
    `torch.utils.checkpoint.checkpoint`)."""
    kept: dict[Operator, list[Any]] = defaultdict(list)
    return _Keep(frozenset(operators), kept), _HandOut(frozenset(operators), kept)


class _Keep(TorchDispatchMode):
    """Keeps the results of some operators."""

    def __init__(self, operators: Collection[Operator], kept: dict[Operator, list[Any]]) -> None:
        super().__init__()
        self._operators, self._kept = operators, kept

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # a compiled function inside the region

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in self._operators:
            self._kept[func].append(tree_map(_keep, result))
        return result


class _HandOut(_Keep):
    """Hands them out, in the order in which they came."""

    def __enter__(self) -> Any:
        self._calls: dict[Operator, int] = defaultdict(int)
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in self._operators:
            return func(*args, **(kwargs or {}))
        call = self._calls[func]
        self._calls[func] += 1
        if call >= len(self._kept[func]):
            raise UserError(
                f"a block calls {func} more often when it is computed again than in the forward pass, so that "
                'recompute.mode = "selective" cannot match its results.\n  To do: set recompute.mode = "full", or '
                "leave that operator out of recompute.save_ops."
            )
        return tree_map(lambda kept: kept.hand_out(func) if isinstance(kept, _Kept) else kept, self._kept[func][call])


@dataclass(frozen=True)
class _Kept:
    """A result, and how often it had been changed in place when it was new."""

    tensor: torch.Tensor
    version: int

    def hand_out(self, operator: Operator) -> torch.Tensor:
        """The result as a new tensor, to which autograd may attach a history."""
        if self.tensor._version != self.version:
            raise UserError(
                f"the model changes in place what {operator} has returned, and recompute.save_ops keeps that result "
                "for the backward pass.\n  To do: leave that operator out of recompute.save_ops, or write the change "
                "as an operation of its own (`x = x + y`, not `x += y`)."
            )
        return self.tensor.detach()


def _keep(value: Any) -> Any:
    """Detached, or the history that autograd attaches to the result would keep itself alive; yet as a view that counts
    changes in place with it, which is what this dispatch key is for."""
    if not isinstance(value, torch.Tensor):
        return value
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return _Kept(value.detach(), value._version)


# --- random numbers of a forward pass


@dataclass
class _SamplePosition:
    """Where one stage is in the data: the first sample of the micro-batch that it is working on, and of the next."""

    sample: int = 0
    following: int = 0


@dataclass
class DropoutSeeds:
    """Seeds the generator as forward passes go; `part` differs between ranks that hold parts of one sequence."""

    seed: int
    part: int
    stride: int = 0
    places: list[_SamplePosition] = field(default_factory=list)

    def start(self, sample: int, stride: int = 0) -> None:
        """The next forward pass of each stage is for the micro-batch that starts at `sample`; those after it in a
        pipeline are `stride` samples apart."""
        self.stride = stride
        for place in self.places:
            place.following = sample

    def enter_stage(self, place: _SamplePosition, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        """A forward pre-hook of a stage: its next micro-batch begins."""
        place.sample, place.following = place.following, place.following + self.stride
        self.enter("", place, module, inputs)

    def enter(self, name: str, place: _SamplePosition, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if module.training:
            key = stream_key(self.seed, f"dropout/{place.sample}/{self.part}/{name}")
            torch.default_generator.manual_seed(key)
            if torch.cuda.is_available():
                torch.cuda.manual_seed(key)


def seed_dropout(stages: Sequence[nn.Module], units: Sequence[nn.Module], seeds: DropoutSeeds) -> DropoutSeeds | None:
    """Have each stage and each of its units start from their own seed; None for a model without dropout."""
    if not any(map(drops, stages)):
        return None
    for stage in stages:
        place = _SamplePosition()
        seeds.places.append(place)
        stage.register_forward_pre_hook(partial(seeds.enter_stage, place))
        for name, module in stage.named_modules():
            if module in units:
                module.register_forward_pre_hook(partial(seeds.enter, canonical_name(name), place))
    return seeds


def drops(model: nn.Module) -> bool:
    """Whether a model has dropout."""
    kinds = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.MultiheadAttention)
    dropping = (module for module in model.modules() if isinstance(module, kinds))
    return any(getattr(module, "p", getattr(module, "dropout", 0.0)) > 0.0 for module in dropping)
