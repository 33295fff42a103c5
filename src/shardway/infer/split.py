"""How a model is split over ranks: by the plan that its library has for it, or by one for fused Conv1D layers.

GPT-2 and its kin have `Conv1D` in place of linear layers: weights are (in, out), and one product makes queries, keys
and values. The library has no plan for these, so theirs is found here, from the modules, in the library's own form: a
table of styles by name, by which its loader reads only a rank's part.

Invariants:
- Each rank has whole heads and an equal part of every inner width; what cannot be divided so is refused in a sentence.
- A bias behind a row-wise product is added once, after the sum over ranks.
- A layer that no rule knows stays whole on every rank, where it gives what it gives on one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

from shardway.errors import UserError
from shardway.hfconfig import import_extra
from shardway.parallel.mesh import build_grid


def split_options(kind: Any, config: Any, world: int, word: str) -> dict[str, Any]:
    """The keywords of `from_pretrained` that split a model of this class and config over `world` ranks. Raises
    UserError that names `word` if it cannot be split so."""
    from transformers.distributed import DistributedConfig

    with torch.device("meta"):
        model = kind(config)
    if model.tp_plan:
        _check_divisible(_list_widths(config.get_text_config()), world, word)
        return {"distributed_config": DistributedConfig(tp_size=world)}
    found = find_fused_plan(model)
    if found is None:
        raise UserError(
            f"{word} cannot be split over {world} ranks: transformers has no tensor-parallel plan for {kind.__name__}, "
            "and its layers are not the fused Conv1D of GPT-2, which are split without one.\n"
            "  To do: leave out --nproc; `--quantize int8` or `--dtype bf16` make it smaller on one rank."
        )
    _check_divisible(found.widths, world, word)
    _register_styles()
    return {"distributed_config": DistributedConfig(tp_size=world, tp_plan=dict(found.plan))}


def split_class(kind: Any, device: torch.device) -> Any:
    """The class, which opens its part of the model on this rank.

    The library places the parts by a device map, for which it needs accelerate. On CPUs there is nothing to place, so
    none is given, and nothing more has to be installed; the grid is one of CPUs, whatever devices torch was built for.
    """
    if device.type != "cpu":
        import_extra("accelerate", "hf")
        return kind

    def prepare(config: Any, device_map: Any = None) -> tuple[Any, None, Any]:
        from transformers.distributed.utils import TransformersDeviceMesh

        around = {"pp": 1, "dp_replicate": 1}
        dense = build_grid("cpu", {**around, "fsdp": 1, "tp": config.tp_size})
        experts = build_grid("cpu", {**around, "efsdp": config.tp_size, "ep": 1})
        return config, None, TransformersDeviceMesh(dense, experts)

    return type(
        kind.__name__, (kind,), {"prepare_distribute_model": staticmethod(prepare), "__module__": kind.__module__}
    )


def _list_widths(text: Any) -> dict[str, int]:
    """What the library's plans divide, by the names of the config."""
    names = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "moe_intermediate_size")
    return {name: size for name in names if isinstance(size := getattr(text, name, None), int)}


def _check_divisible(widths: Mapping[str, int], world: int, word: str) -> None:
    """Raise UserError if a width cannot be divided by the number of ranks."""
    odd = {name: size for name, size in widths.items() if size % world}
    if odd:
        found = ", ".join(f"{name} = {size}" for name, size in odd.items())
        fits = [each for each in range(1, world) if not any(size % each for size in widths.values())]
        raise UserError(
            f"{word} cannot be split over {world} ranks, by which {found} cannot be divided.\n"
            f"      allowed: {', '.join(map(str, fits))}, and other common divisors"
        )


# --- fused Conv1D layers: the plan

CONV_COLUMNS, CONV_ROWS = "shardway_conv1d_columns", "shardway_conv1d_rows"
CONV_QKV, FUSED_HEADS = "shardway_conv1d_qkv", "shardway_fused_heads"
"""Styles of our own, as a plan of the library names them."""

HEAD_COUNTS = ("num_heads", "n_head")
"""What attention modules call the number of their heads."""


@dataclass(frozen=True)
class FusedPlan:
    """Styles by module ("transformer.h.*.attn.c_attn"), and widths that the number of ranks must divide."""

    plan: Mapping[str, str]
    widths: Mapping[str, int]


def find_fused_plan(model: Any) -> FusedPlan | None:
    """The plan of a model of the library that has fused Conv1D layers; None if it has none.

    Attention is a module with `c_attn`, whose three thirds are queries, keys and values, `c_proj`, a `split_size` and a
    count of heads; a feed-forward block is one with `c_fc` and `c_proj`. The embedding of tokens and the output layer
    are split by the vocabulary, as in plans of the library.
    """
    from transformers.distributed.parallel_utils import replace_layer_number_by_wildcard as generic

    plan, widths = dict[str, str](), dict[str, int]()
    for name, module in model.named_modules():
        here = generic(name)
        if _is_fused_attention(module):
            plan |= {here: FUSED_HEADS, f"{here}.c_attn": CONV_QKV, f"{here}.c_proj": CONV_ROWS}
            widths["heads"] = next(getattr(module, count) for count in HEAD_COUNTS if hasattr(module, count))
        elif _is_conv_block(module):
            plan |= {f"{here}.c_fc": CONV_COLUMNS, f"{here}.c_proj": CONV_ROWS}
            widths["inner width"] = module.c_fc.nf
    if FUSED_HEADS not in plan.values():
        return None
    ends = {model.get_input_embeddings(): "embedding_rowwise", model.get_output_embeddings(): "colwise_gather_output"}
    plan |= {name: ends[module] for name, module in model.named_modules() if module in ends}
    return FusedPlan(plan, widths)


def _is_fused_attention(module: Any) -> bool:
    if not (_is_conv(module, "c_attn") and _is_conv(module, "c_proj")):
        return False
    width = module.c_attn.nx
    return (
        module.c_attn.nf == 3 * width
        and getattr(module, "split_size", None) == width
        and any(hasattr(module, count) for count in HEAD_COUNTS)
    )


def _is_conv_block(module: Any) -> bool:
    return _is_conv(module, "c_fc") and _is_conv(module, "c_proj") and bool(module.c_proj.nx == module.c_fc.nf)


def _is_conv(module: nn.Module, name: str) -> bool:
    from transformers.pytorch_utils import Conv1D

    return isinstance(getattr(module, name, None), Conv1D)


# --- fused Conv1D layers: the styles


def _register_styles() -> None:
    """Add our styles to the library's table, which is open to those of others."""
    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

    styles: dict[str, Any] = {
        CONV_COLUMNS: ConvColumns(1),
        CONV_QKV: ConvColumns(3),
        CONV_ROWS: ConvRows(),
        FUSED_HEADS: FusedHeads(),
    }
    for name, style in styles.items():
        ALL_PARALLEL_STYLES.register(name, style)


class ConvStyle:
    """What the library calls of a style: a parameter becomes a DTensor, by which its part alone is read, and the
    forward one that computes with this part. The model is only used, never trained."""

    def validate_param(self, module: Any, param: Any, mesh: Any, parameter_name: str | None = None) -> None:
        """Widths were compared with the number of ranks before."""

    def shard_param(self, module: nn.Module, param: str, mesh: Any) -> None:
        """Nothing of the module itself is split."""

    def install_forward(self, module: Any, mesh: Any) -> Any:
        """The module, which computes its part."""
        return module


class ConvColumns(ConvStyle):
    """Conv1D whose output is split. `parts`: products that stand side by side in it, each of which is split alike."""

    def __init__(self, parts: int) -> None:
        self._parts = parts

    def shard_param(self, module: nn.Module, param: str, mesh: Any) -> None:
        from torch.distributed.tensor import Shard
        from torch.distributed.tensor.placement_types import _StridedShard

        last = module.get_parameter(param).ndim - 1  # of a weight (in, out), and of a bias
        _replace(
            module, param, mesh, Shard(last) if self._parts == 1 else _StridedShard(last, split_factor=self._parts)
        )

    def install_forward(self, module: Any, mesh: Any) -> Any:
        def forward(hidden: torch.Tensor) -> torch.Tensor:
            return _multiply(hidden, module.weight.to_local(), module.bias.to_local())

        module.forward = forward
        return module


class ConvRows(ConvStyle):
    """Conv1D whose input is split: its products are summed over the ranks, and the bias, which all have, is added."""

    def shard_param(self, module: nn.Module, param: str, mesh: Any) -> None:
        from torch.distributed.tensor import Replicate, Shard

        _replace(module, param, mesh, Replicate() if param == "bias" else Shard(0))

    def install_forward(self, module: Any, mesh: Any) -> Any:
        group = mesh.get_group()

        def forward(hidden: torch.Tensor) -> torch.Tensor:
            made = _multiply(hidden, module.weight.to_local(), None)
            dist.all_reduce(made, group=group)
            return made + module.bias.to_local()

        module.forward = forward
        return module


class FusedHeads(ConvStyle):
    """Attention that divides what `c_attn` gives it by sizes of its own: they become those of this rank's heads."""

    def install_forward(self, module: Any, mesh: Any) -> Any:
        for name in ("split_size", *HEAD_COUNTS):
            if hasattr(module, name):
                setattr(module, name, getattr(module, name) // mesh.size())
        return module


def _replace(module: nn.Module, param: str, mesh: Any, placement: Any) -> None:
    """Make a parameter on the meta device one that is placed so on the ranks; the loader fills it."""
    from torch.distributed.tensor import distribute_tensor

    whole = module.get_parameter(param)
    placed = distribute_tensor(whole, mesh, [placement], src_data_rank=None)
    module.register_parameter(param, nn.Parameter(placed, requires_grad=whole.requires_grad))


def _multiply(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """hidden (..., in) @ weight (in, out) + bias (out)."""
    rows = hidden.reshape(-1, hidden.size(-1))
    made = rows @ weight if bias is None else torch.addmm(bias, rows, weight)
    return made.view(*hidden.shape[:-1], -1)
