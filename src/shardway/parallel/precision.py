"""Number formats: in which of them weights are kept, products are taken and gradients travel.

Invariants:
- A format changes the rounding of a number, not the layout of it: this module knows of no axis.
- `linear_with(module, x, module.weight, module.bias)` equals `module(x)`, so a region that computes with the local part
  of a weight is independent of formats.
- `apply_formats` keeps names and values (rounded once to bf16); buffers and batch norms keep fp32, since running
  statistics would not change in bf16.
- Float8: embeddings, the output layer and what is not a plain `nn.Linear` inside a block stay as they are. Names and
  formats of weights stay; they are cast at each use. Its libraries are imported when they are asked for.
- If weights are kept in fp32 the optimizer works on fp32.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from shardway.errors import UserError
from shardway.models.contract import ModelPlan, canonical_name, held_by_rank, matches
from shardway.runfile.schema import PrecisionSection

# --- the formats of a step

_COMPUTE = {"auto": None, "fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16, "float8": torch.bfloat16}
"""Format of products; with float8 that of everything which is not a converted linear layer. "auto" is of a section that
was not resolved, for weights that are read or written and not trained."""

FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Name of a number format of weights -> torch's."""


@dataclass(frozen=True)
class Precision:
    """`autocast_dtype` None computes in the format of the weights; `reduce_dtype` is that of summed sharded gradients.

    `float8` has the keys float8_* and first_last, resolved; None: no layer is converted. `model_dtype`: what a script's
    model computes its products in by hooks of its own, where no autocast is around its loss.
    """

    autocast_dtype: torch.dtype | None
    reduce_dtype: torch.dtype
    weights_dtype: torch.dtype = torch.float32
    float8: PrecisionSection | None = None
    model_dtype: torch.dtype | None = None

    @property
    def scales_loss(self) -> bool:
        """Whether the loss must be scaled (`LossScale`), so that small gradients do not vanish in fp16."""
        return self.autocast_dtype == torch.float16

    def autocast(self, device: torch.device) -> AbstractContextManager[object]:
        """The context in which a forward pass runs; none where weights are kept in the format of products."""
        if self.autocast_dtype in (None, self.weights_dtype):
            return contextlib.nullcontext()
        return torch.autocast(device.type, dtype=self.autocast_dtype)


def read_precision(section: PrecisionSection) -> Precision:
    """The formats that a resolved run file names."""
    reduce, weights = FORMATS[section.reduce], FORMATS[section.weights]
    return Precision(_COMPUTE[section.compute], reduce, weights, section if section.compute == "float8" else None)


# --- formats of weights and inputs

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def apply_formats(model: nn.Module, weights: torch.dtype, *, channels_last: bool = False) -> None:
    """Bring weights into these formats, in place, and each input of the model when it is called; fp32 leaves them.
    `channels_last` orders the memory of 4-dim weights and inputs as N, H, W, C.

    To be applied to each stage of a pipeline, since a stage has hooks of its own; weights that stages share do not
    change a second time.
    """
    dtype = None if weights == torch.float32 else weights
    norms = {p for module in model.modules() if isinstance(module, BATCH_NORMS) for p in module.parameters()}
    for parameter in model.parameters() if dtype is not None else ():
        if not parameter.is_floating_point() or parameter in norms:
            continue
        cast = parameter.detach().to(dtype)
        if isinstance(parameter, DTensor):  # its `.data` takes another dtype without an error and keeps its own
            torch.utils.swap_tensors(parameter, nn.Parameter(cast, parameter.requires_grad))
        else:
            parameter.data = cast
    if channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if dtype is not None or channels_last:
        model.register_forward_pre_hook(partial(_bring_inputs, dtype, channels_last), with_kwargs=True)


def _bring_inputs(dtype: torch.dtype | None, channels_last: bool, module: nn.Module, args: Any, kwargs: Any) -> Any:
    def bring(tensor: torch.Tensor) -> torch.Tensor:
        if dtype is not None and tensor.is_floating_point():
            tensor = tensor.to(dtype)
        if channels_last and tensor.dim() == 4:
            tensor = tensor.contiguous(memory_format=torch.channels_last)
        return tensor

    return tree_map_only(torch.Tensor, bring, (args, kwargs))


# --- autocast of the model alone: a script's loss written for fp32 may use operators that autocast refuses
# (`binary_cross_entropy` on CUDA) or mix its formats, so autocast around the whole loss is optional


def left_to_model(precision: Precision) -> Precision:
    """The same formats if the model itself casts its products (`autocast_model`)."""
    return replace(precision, autocast_dtype=None, model_dtype=precision.autocast_dtype)


def autocast_model(model: nn.Module, device: torch.device, dtype: torch.dtype) -> Callable[[], None]:
    """Compute a model, and copies of it, under autocast from now on; returns what ends that."""
    hooks = ModelAutocast(device.type, dtype)
    first = model.register_forward_pre_hook(hooks.enter)
    last = model.register_forward_hook(hooks.leave, always_call=True)

    def end() -> None:
        first.remove()
        last.remove()

    return end


@dataclass(eq=False)
class ModelAutocast:
    """Hooks of one module; `dtype` is the format of its products. In an autocast of the caller's, that one holds."""

    device_type: str
    dtype: torch.dtype
    _open: list[AbstractContextManager[Any] | None] = field(default_factory=list)

    def enter(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        is_on = torch.is_autocast_enabled(self.device_type)
        context = None if is_on else torch.autocast(self.device_type, self.dtype)
        if context is not None:
            context.__enter__()
        self._open.append(context)

    def leave(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
        """Called whatever ends the pass."""
        context = self._open.pop() if self._open else None
        if context is None:
            return output
        context.__exit__(None, None, None)
        return tree_map_only(torch.Tensor, lambda x: x.float() if x.dtype == self.dtype else x, output)


# --- linear layers with a given weight


class FormattedLinear(nn.Linear):
    """A linear layer that multiplies in a format of its own.

    An existing `nn.Linear` becomes one by a change of its class, so that its name, parameters, hooks and whatever
    stands in for its `forward` stay.
    """

    def multiply(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """x [..., in] @ weight [out, in] transposed -> [..., out] in x's dtype."""
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear_with(self, x, self.weight, self.bias)


def linear_with(
    module: nn.Module, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """What the linear layer `module` computes of x [..., in], with this weight [out, in] and bias [out]."""
    if not isinstance(module, FormattedLinear):
        return F.linear(x, weight, bias)
    device = x.device.type
    if torch.is_autocast_enabled(device):
        x = x.to(torch.get_autocast_dtype(device))
    with torch.autocast(device, enabled=False):  # the format is chosen here, not by the operator inside
        y = module.multiply(x, weight)
        return y if bias is None else y + bias.to(y.dtype)


# --- float8: a scale is that of the tensor that a rank computes with, so under the tensor axis (a part of a weight)
# rounding differs from one rank's, within the error of the format

_MULTIPLE = {"mxfp8": 32, "blockwise": 128}
"""What both dims of a weight must be a multiple of; 16 otherwise (cuBLAS, "FP8 data types": 16 bytes)."""

_CAPABILITY = {"tensorwise": (8, 9), "mxfp8": (10, 0)}
"""The least CUDA compute capability of a recipe's matrix products; of the others 9.0."""

_PACKAGES = {"torchao": "'shardway[float8]'", "transformer_engine": "'transformer_engine[pytorch]'"}
"""A library that multiplies in float8 -> what pip calls it."""

_TE_RECIPES = {"tensorwise": "Float8CurrentScaling", "mxfp8": "MXFP8BlockScaling", "blockwise": "Float8BlockScaling"}
"""Recipe -> its class in Transformer Engine."""

Conversion = Callable[[str, nn.Linear], None]
"""Makes a layer of a model, given with its name, multiply in eight bits."""


def apply_float8(
    model: nn.Module,
    units: Iterable[nn.Module],
    section: PrecisionSection,
    device: torch.device,
    plan: ModelPlan | None = None,
    edges: Iterable[nn.Module] = (),
) -> list[str]:
    """Let the matrices of a model's blocks (of a pipeline: those of this rank) multiply in float8, in place, before it
    is sharded; the names of these layers.

    Of a model whose plan says how matrices split, those are converted and no others (routers and the like); of one
    without a plan, the last layer is taken for the output layer. `first_last = "bf16"` leaves out the edges: the whole
    model's first and last block, as far as this rank has them. Raises UserError where the device or a library cannot,
    and where no layer fits.
    """
    emulate = check_float8(section, device)
    convert = _find_conversion(model, section, emulate)
    multiple, splits = _MULTIPLE.get(section.float8_recipe, 16), {} if plan is None else plan.tensor
    inside = {module for unit in units for module in unit.modules()}
    left_out = {each for edge in edges for each in edge.modules()} if section.first_last == "bf16" else set()
    linears = [(canonical_name(name), module) for name, module in model.named_modules() if type(module) is nn.Linear]
    converted, kept, unfit = [], 0, ""
    for name, linear in linears if plan is not None else linears[:-1]:
        if linear not in inside:
            continue
        matrix = any(matches(name, pattern) and split != "logits" for pattern, split in splits.items())
        if linear in left_out or (splits and not matrix):
            kept += 1
        elif any(size % multiple for size in held_by_rank(linear.weight).shape):
            unfit = unfit or name
        else:
            convert(name, linear)
            converted.append(name)
    if not converted and not kept:
        why = "has no linear layer inside its blocks"
        if unfit:
            why = f"has none whose dims are multiples of {multiple} ({unfit} is not, for one)"
        raise UserError(
            f'precision.compute = "float8" converts linear layers, and {type(model).__name__} {why}.\n'
            '  To do: set precision.compute = "bf16", or change the sizes.'
        )
    return converted


def check_float8(section: PrecisionSection, device: torch.device) -> bool:
    """Whether float8 is emulated on this device. Raises UserError where it can be neither computed nor emulated."""
    needed, where = _CAPABILITY.get(section.float8_recipe, (9, 0)), f"a {device.type.upper()}"
    if device.type == "cuda":
        found = torch.cuda.get_device_capability(device)
        if found >= needed:
            return False
        where = f"{torch.cuda.get_device_name(device)} (compute capability {found[0]}.{found[1]})"
    if section.float8_emulate and section.float8_recipe != "blockwise" and section.float8_engine == "torchao":
        return True
    raise UserError(
        f'precision.float8_recipe = "{section.float8_recipe}" cannot be computed on {where}: it needs an accelerator '
        f"with compute capability {needed[0]}.{needed[1]} or above.\n  To do: choose another recipe or "
        "precision.compute, or precision.float8_emulate = true with a recipe of torchao other than blockwise (slow: "
        "for tests)."
    )


def compute_scales(model: nn.Module, section: PrecisionSection | None) -> None:
    """After each optimizer step: the scales of weights that are gathered in float8, in one all-reduce."""
    if section is not None and section.float8_all_gather is True:
        _import_library("torchao").compute_scales(model)


def _import_library(name: str) -> ModuleType:
    try:
        module = "shardway.parallel.float8_torchao" if name == "torchao" else "transformer_engine.pytorch"
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(
            f'precision.compute = "float8" with precision.float8_engine = "{name}" needs {name}, which cannot be '
            f"imported ({error}).\n  To do: pip install {_PACKAGES[name]}, or set precision.compute."
        ) from None


def _find_conversion(model: nn.Module, section: PrecisionSection, emulate: bool) -> Conversion:
    recipe, name = section.float8_recipe, section.float8_engine
    library = _import_library(name)
    try:
        if name == "transformer_engine":  # neither emulates nor gathers in float8
            return _find_te_conversion(model, recipe, library)
        all_gather = section.float8_all_gather is True
        return library.find_conversion(model, recipe, emulate=emulate, all_gather=all_gather)
    except ImportError as error:
        raise UserError(
            f'precision.float8_recipe = "{recipe}" is not in the {name} that is installed '
            f'({error}).\n  To do: choose "tensorwise", or install what it lacks.'
        ) from None


def _find_te_conversion(model: nn.Module, recipe: str, te: Any) -> Conversion:
    """What puts a layer of NVIDIA's Transformer Engine, with the same parameters, in the place of one of `model`."""
    kind = getattr(importlib.import_module("transformer_engine.common").recipe, _TE_RECIPES[recipe], None)
    if kind is None:
        raise ImportError(f"this version of transformer_engine has no {_TE_RECIPES[recipe]}")

    def convert(name: str, linear: nn.Linear) -> None:
        sizes, biased = (linear.in_features, linear.out_features), linear.bias is not None
        with torch.device("meta"):
            layer = te.Linear(*sizes, bias=biased, params_dtype=linear.weight.dtype, device="meta")
        layer.weight = linear.weight
        if biased:
            layer.bias = linear.bias
        layer.forward = partial(_in_te_float8, te, kind(), layer.forward)
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, layer)

    return convert


def _in_te_float8(te: Any, recipe: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with te.fp8_autocast(enabled=True, fp8_recipe=recipe):
        return forward(*args, **kwargs)
