"""LoRA (Hu et al., arXiv:2106.09685): small trained matrices beside frozen linear layers of a model of model.hf, by the
library `peft`; their values, the frozen weights they stand beside, and the files that peft reads.

Invariants:
- Layers are peft's own, made by its `inject_adapter_in_model` on the meta device, so what they compute is what it says.
  Values that a new adapter begins with follow from seed and name alone, whatever the layout.
- Frozen weights never change. A checkpoint leaves them out and names them by a fingerprint: the model's folder brings
  them again.
- Frozen matrices of linear layers and experts are held in the format in which they are multiplied. Each product casts
  them to it anyway, so no result changes.
- The library is imported when an adapter is asked for. This module must not read a checkpoint.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardway.errors import Bug, Problem, check_no_problems, list_some
from shardway.hfconfig import import_extra, without_warnings
from shardway.models.contract import ModelPlan, canonical_name, match_modules
from shardway.models.experts import Experts
from shardway.models.huggingface.weights import TensorFiles, TensorRegion
from shardway.models.initialise import constant_, held_part, normal_
from shardway.plan.shapes import ALL_LINEAR, OF_ATTENTION
from shardway.runfile.schema import ModelSection

# --- what an adapter is

_NAME = "default"
"""What peft calls the one adapter of a model; the word is in the names of its parameters, and in no file of its own."""

_PARTS = ("lora_A", "lora_B")
_BASE = "base_layer"


@dataclass(frozen=True)
class LoraShape:
    """Two matrices beside each target: [rank, inputs], then [outputs, rank], times alpha / rank."""

    rank: int
    alpha: float
    dropout: float
    targets: tuple[str, ...]

    @property
    def scaling(self) -> float:
        return self.alpha / self.rank


def read_lora(section: ModelSection) -> LoraShape | None:
    """The adapter of a resolved [model]; None without one."""
    if section.adapter == "none":
        return None
    if section.lora_alpha == "auto":
        raise Bug("model.lora_alpha reached read_lora unresolved")
    return LoraShape(section.lora_rank, section.lora_alpha, section.lora_dropout, tuple(section.lora_targets))


def is_of_adapter(name: str) -> bool:
    """Whether a parameter of this name belongs to an adapter."""
    return not set(_PARTS).isdisjoint(name.split("."))


def base_name(name: str) -> str:
    """What a parameter is called in the model without its adapter; "" for one of the adapter."""
    if is_of_adapter(name):
        return ""
    return ".".join(part for part in canonical_name(name).split(".") if part != _BASE)


def import_peft() -> ModuleType:
    """The library. Raises UserError if it is missing."""
    with without_warnings():
        return import_extra("peft", "lora")


def names_beside(name: str) -> tuple[str, str]:
    """What the first and the second matrix beside a weight are called, of a model without adapter its name."""
    owner = name.rpartition(".")[0]
    first, second = (f"{owner}.{part}.{_NAME}.weight" for part in _PARTS)
    return first, second


# --- onto a model


def apply_lora(model: nn.Module, plan: ModelPlan, shape: LoraShape, dtype: torch.dtype | None) -> tuple[str, ...]:
    """Put an adapter onto a model on the meta device, in place, and freeze everything else; the names of the layers
    that have one. `dtype`: the format of products, in which frozen matrices are held; None leaves theirs.

    Raises UserError if a target names no layer or has a side smaller than the rank, or peft is missing.
    """
    peft = import_peft()
    targets = list_targets(model, plan, shape.targets)
    _check_rank(model, targets, shape.rank)
    config = peft.LoraConfig(
        r=shape.rank, lora_alpha=shape.alpha, lora_dropout=shape.dropout, target_modules=list(targets), bias="none"
    )
    with torch.device("meta"), without_warnings():
        peft.inject_adapter_in_model(config, model, adapter_name=_NAME, low_cpu_mem_usage=True)
    made = [name for name, module in model.named_modules() if _is_adapted(module)]
    if sorted(made) != sorted(targets):
        raise Bug(f"peft has put an adapter onto {made}, and {targets} were asked for")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_of_adapter(name))
    if dtype is not None:
        for module in model.modules():
            _hold_in(module, dtype)
    return targets


def _check_rank(model: nn.Module, targets: Sequence[str], rank: int) -> None:
    """Raise UserError if a product of two matrices of this rank has a higher one than a layer's weight can."""
    sides = {
        canonical_name(name): (module.in_features, module.out_features)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    }
    smallest = min(targets, key=lambda name: min(sides[name]))
    most, (inputs, outputs) = min(sides[smallest]), sides[smallest]
    if rank > most:
        what = f"{rank} is more than {most}, the smaller side of {smallest} ({outputs} x {inputs})"
        remedy = "a smaller rank, or model.lora_targets without that layer"
        check_no_problems("the adapter (model.adapter)", [Problem("model.lora_rank", what, "", f"1 to {most}", remedy)])


def _hold_in(module: nn.Module, dtype: torch.dtype) -> None:
    """The matrices that a module multiplies with in `dtype`, where they are frozen. Tables and gains keep theirs: what
    they compute with is as wide as they are."""
    if isinstance(module, nn.Linear | Experts):
        for parameter in module.parameters(recurse=False):
            if parameter.dim() >= 2 and not parameter.requires_grad:
                parameter.data = parameter.data.to(dtype)


def _is_adapted(module: nn.Module) -> bool:
    return isinstance(getattr(module, _BASE, None), nn.Linear)


def list_targets(model: nn.Module, plan: ModelPlan, words: Sequence[str]) -> tuple[str, ...]:
    """The linear layers that `words` of model.lora_targets mean, in the order of the model.

    Of blocks with experts those of attention alone: transformers and peft have other layers there than this model.
    Raises UserError that names every word without a layer.
    """
    blocks = tuple([f"{canonical_name(name)}." for name, _ in match_modules(model, plan.blocks)])
    around = {canonical_name(name).rpartition(".")[0] for name, _ in match_modules(model, plan.attention)}
    linears = [canonical_name(name) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    attention = [name for name in linears if name.rpartition(".")[0] in around]
    if plan.experts:
        linears = [name for name in linears if name in attention or not name.startswith(blocks)]
    inside = [name for name in linears if name.startswith(blocks)]
    known: Mapping[str, Sequence[str]] = {ALL_LINEAR: inside, OF_ATTENTION: attention}
    chosen: set[str] = set()
    problems = []
    for word in words:
        found = known[word] if word in known else [name for name in linears if _ends_with(name, word)]
        if not found:
            ends = list(dict.fromkeys(name.rpartition(".")[2] for name in inside))
            allowed = f'"{ALL_LINEAR}", "{OF_ATTENTION}", or ends of names, such as {list_some(ends, 8)}'
            what = f'"{word}" is the end of no name of a linear layer that may have an adapter'
            problems.append(Problem("model.lora_targets", what, "", allowed))
        chosen.update(found)
    check_no_problems("the adapter (model.adapter)", problems)
    return tuple([name for name in linears if name in chosen])


def _ends_with(name: str, pattern: str) -> bool:
    """Whether the last parts of a name fit those of a pattern."""
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) >= len(wanted) and all(map(fnmatchcase, parts[-len(wanted) :], wanted))


@torch.no_grad()
def fill_lora(model: nn.Module, seed: int) -> None:
    """The values that a new adapter begins with: second matrices are zero, so that the model is the one without it;
    first ones have the standard deviation of peft's own draw, uniform within 1 / sqrt(inputs)."""
    for name, parameter in model.named_parameters():
        if _PARTS[1] in name.split("."):
            constant_(parameter, 0.0, name=name)
        elif is_of_adapter(name):
            normal_(parameter, seed=seed, name=canonical_name(name), std=1 / math.sqrt(3 * parameter.shape[1]))


# --- the frozen weights

_SAMPLED = 2048
"""Elements of a tensor that its fingerprint looks at."""


def fingerprint_weights(files: TensorFiles) -> str:
    """A fingerprint of weights in files: of names, shapes, and a row from the middle of each tensor, so that it takes a
    page of each from the disk. Weights that were trained further have another one."""
    digest = hashlib.blake2b(digest_size=16)
    with files.open() as reader:
        for name in sorted(files.shapes):
            shape = files.shapes[name]
            middle = TensorRegion(
                tuple([size // 2 for size in shape[:-1]] + [0] * bool(shape)),
                tuple([min(1, size) for size in shape[:-1]] + [min(_SAMPLED, size) for size in shape[-1:]]),
            )
            values = reader.read(name, middle).contiguous()
            digest.update(f"{name} {list(shape)} {values.dtype}".encode())
            digest.update(values.view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


# --- merged, and as files


@torch.no_grad()
def merge_lora(model: nn.Module, shape: LoraShape) -> dict[str, torch.Tensor]:
    """Add the adapter to the weights that it stands beside, in place; the weights under the names of the model without
    it, DTensors as they are. On all ranks together.

    The sum is peft's: alpha / rank x B A in the format of the adapter, added in the format of the weight.
    """
    merged: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        if not (called := base_name(name)):
            continue
        owner, is_adapted, leaf = name.partition(f".{_BASE}.")
        if is_adapted and leaf == "weight":
            layer: Any = model.get_submodule(owner)
            first, second = (_whole(getattr(layer, part)[_NAME].weight) for part in _PARTS)
            # The whole product on every rank, so that its bits are those of one rank, and of it the rows that are here.
            change, held = second @ first * shape.scaling, held_part(parameter, name)
            held.local.add_(change[held.offset[0] : held.offset[0] + held.local.shape[0]])
        merged[called] = parameter.detach()
    return merged


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""The files that `PeftModel.from_pretrained` reads."""

_PREFIX = "base_model.model."
"""What stands before the names of a model's layers in files of peft."""


def name_in_files(name: str) -> str:
    """What files of peft call a parameter of an adapter."""
    parts = canonical_name(name).split(".")
    return _PREFIX + ".".join(part for part in parts if part != _NAME)


def render_lora_config(model: nn.Module, targets: Sequence[str], shape: LoraShape, base: str) -> Mapping[str, Any]:
    """The content of adapter_config.json; `base`: the hub name or folder of the model, for people and for peft.

    Targets are the ends of their names where all layers with such an end have an adapter, as users write them.
    """
    peft = import_peft()
    leaves = {name.rpartition(".")[2] for name in targets}
    linears = [base_name(name) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    alike = {name for name in linears if name and name.rpartition(".")[2] in leaves}
    config = peft.LoraConfig(
        r=shape.rank,
        lora_alpha=shape.alpha,
        lora_dropout=shape.dropout,
        target_modules=sorted(leaves if alike == set(targets) else targets),
        bias="none",
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
        inference_mode=True,
    )
    plain = {name: sorted(value) if isinstance(value, set) else value for name, value in config.to_dict().items()}
    return {name: getattr(value, "value", value) for name, value in plain.items()}
