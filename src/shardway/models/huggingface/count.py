"""Counts what `transformers` builds from a config.json: a process of its own, which `plan.counted` starts.

Invariants: nothing is downloaded, no code of a model's folder runs, no weights are read, and no memory is taken for
tensors. The class is the one that `architectures` names. Parameters are always those of the library; the forward pass
is followed where the library's own names say what it takes. A token meets as many experts as its config states, also
where the library computes all of them and drops the rest. Standard output holds the answer alone.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import json
import logging
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from shardway.errors import UserError
from shardway.hfconfig import import_extra
from shardway.models.trace import count_units
from shardway.plan.counted import CountedModel, CountedUnit
from shardway.plan.shapes import Unit

LENGTHS = (256, 512, 768)
"""Tokens of the samples that are counted: multiples of the chunks in which linear attention works."""

_WAYS = (
    (torch.bfloat16, True, True),
    (torch.bfloat16, False, True),
    (torch.bfloat16, True, False),
    (torch.float32, True, False),
)
"""Formats of weights, whether of layers alike the first alone runs, and whether the model trains: tried in this order.
Some layers pass on what a later one reads, some models need labels to train, some operators have no bf16."""

_AUTO = (
    "AutoModelForSeq2SeqLM",
    "AutoModelForSpeechSeq2Seq",
    "AutoModelForMaskedLM",
    "AutoModelForCausalLM",
    "AutoModelForImageTextToText",
    "AutoModelForImageClassification",
    "AutoModel",
)
"""The library's own tables of classes, in the order in which they are asked for a config that names no class."""


def count_config(keys: Mapping[str, Any]) -> CountedModel:
    """The count of the content of a config.json. Raises UserError if the library does not build it."""
    library = import_extra("transformers")
    config = make_config(library, keys)
    kind = find_class(library, config)
    if not isinstance(config, kind.config_class) and isinstance(_text_of(config), kind.config_class):
        config = _text_of(config)  # its language model is named
    model = build_on_meta(kind, config, torch.bfloat16)
    longest, failures = find_longest(model, config), list[str]()
    lengths = choose_lengths(longest)
    known: dict[str, Any] = {"model": kind.__name__, "library": f"transformers {library.__version__}"}
    known |= {"longest": longest, "learned": has_learned_positions(model, longest)}
    for dtype, alike, trains in _WAYS:
        model = (model if dtype is torch.bfloat16 else build_on_meta(kind, config, dtype)).train(trains)
        for first in list_inputs(model, config, lengths[0]):
            grows = "input_ids" in first
            try:
                counts = _count_lengths(model, kind, config, first, lengths if grows else lengths[:1], alike)
            except UserError as error:
                failures.append(str(error).splitlines()[0].rpartition("without numbers: ")[2])
                continue
            takes = (f"{name} {str(each.dtype).removeprefix('torch.')} {[*each.shape]}" for name, each in first.items())
            return CountedModel(
                **known,
                takes=", ".join(takes),
                lengths=lengths if grows else (),
                units=_join(counts),
                value_bytes=dtype.itemsize,
            )
    whole = Unit(
        name="model", parameters=sum(each.numel() for each in model.parameters()), forward_flops=0.0, saved_bytes=0.0
    )
    failure = failures[0] if failures else f"{kind.__name__} takes {model.main_input_name}"
    return CountedModel(**known, takes="", lengths=(), units=_join([(whole,)]), value_bytes=2, failure=failure)


def choose_lengths(longest: int) -> tuple[int, ...]:
    """The lengths to count at, of samples of at most `longest` tokens, 0: of any length. Three determine all others; of
    a model for three or fewer, all that it takes."""
    if longest == 0 or longest >= LENGTHS[-1]:
        return LENGTHS
    return tuple(longest * part // 4 for part in (1, 2, 3)) if longest >= 4 else tuple(range(1, longest + 1))


def _count_lengths(
    model: nn.Module, kind: Any, config: Any, first: Mapping[str, torch.Tensor], lengths: Sequence[int], alike: bool
) -> list[tuple[Unit, ...]]:
    """The units for inputs of each length; `first` has the first one. Raises UserError."""
    inputs = [
        {name: _lengthen(each, lengths[0], length) for name, each in first.items()} if length != lengths[0] else first
        for length in lengths
    ]
    fewer = keep_met_experts(config)
    if fewer is None:
        return [count_units(model, each, alike=alike) for each in inputs]
    with _ProductWatch(model, _experts_of(config)[1]) as watch:
        counts = [count_units(model, inputs[0], alike=alike)]
    if not watch.found:
        return counts + [count_units(model, each, alike=alike) for each in inputs[1:]]
    dtype = next(each.dtype for each in model.parameters() if each.is_floating_point())
    met = build_on_meta(kind, fewer, dtype).train(model.training)
    sizes = {unit.name: unit.parameters for unit in counts[0]}
    return [
        tuple(replace(unit, parameters=sizes[unit.name]) for unit in count_units(met, each, alike=alike))
        for each in inputs
    ]


_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk", "moe_top_k")


def _experts_of(config: Any) -> tuple[str, int, int]:
    """The key of the number of experts, that number, and how many of them a token meets; 0 for what it does not say."""
    text = _text_of(config)
    name, count = _find_number(text, _EXPERTS)
    return name, count, _find_number(text, _PER_TOKEN)[1]


def _find_number(config: Any, names: Sequence[str]) -> tuple[str, int]:
    return next(((name, value) for name in names if type(value := getattr(config, name, None)) is int), ("", 0))


def keep_met_experts(config: Any) -> Any:
    """The config with as many experts as a token meets; None if it has no others."""
    name, experts, met = _experts_of(config)
    if not 0 < met < experts:
        return None
    fewer = copy.deepcopy(config)
    setattr(_text_of(fewer), name, met)
    return fewer


class _ProductWatch(TorchFunctionMode):
    """Whether something is multiplied with the weights of all experts at once, as where every expert gets every token
    and those that it was not sent count for nothing. Grouped products are other operators."""

    _PRODUCTS = (torch.bmm, torch.baddbmm, torch.matmul, torch.einsum, torch.Tensor.bmm, torch.Tensor.matmul)

    def __init__(self, model: nn.Module, experts: int) -> None:
        super().__init__()
        shapes = [tuple(each.shape) for each in model.parameters() if each.dim() == 3 and each.shape[0] == experts]
        self._weights = {*shapes, *((count, wide, high) for count, high, wide in shapes)}
        self.found = False

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in self._PRODUCTS or getattr(func, "__name__", "") in ("__matmul__", "__rmatmul__"):
            given = (each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor))
            self.found = self.found or any(tuple(each.shape) in self._weights for each in given)
        return func(*args, **(kwargs or {}))


def make_config(library: Any, keys: Mapping[str, Any]) -> Any:
    """The library's config of these keys, of a model that keeps nothing for generation. Raises UserError."""
    family = keys.get("model_type")
    if family not in library.CONFIG_MAPPING:
        raise UserError(
            f'model_type = "{family}" is not in transformers {library.__version__}.\n'
            "  To do: install a version that has it; code from a model's own folder is not run"
        )
    try:
        config = library.CONFIG_MAPPING[family].from_dict({k: v for k, v in keys.items() if k != "quantization_config"})
    except Exception as error:  # the library raises errors of any kind
        raise _refuse(library, f"its config.json ({family})", error) from error
    for each in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        if each is not None:
            each.use_cache = False
    return config


def find_class(library: Any, config: Any) -> Any:
    """The class that the config names, or that the library's tables have for it; else the model of its own module.
    Raises UserError."""
    named = [getattr(library, name, None) for name in config.architectures or ()]
    tables = [getattr(library, name)._model_mapping for name in _AUTO]
    asked = [table for table in tables if type(config) in table]
    if getattr(config, "is_decoder", False):  # a config of an encoder that is used as a decoder
        asked = [each for each in asked if each is not library.AutoModelForMaskedLM._model_mapping] or asked
    listed = [kind[0] if isinstance(kind, tuple) else kind for kind in (table[type(config)] for table in asked)]
    # Tables also list classes for a part of a config, such as its language model.
    whole = [kind for kind in listed if isinstance(config, getattr(kind, "config_class", None) or ())]
    for found in (*named, *whole):
        if isinstance(found, type) and issubclass(found, nn.Module):
            return found
    module = importlib.import_module(type(config).__module__.replace(".configuration_", ".modeling_"))
    for kind in vars(module).values():
        if isinstance(kind, type) and issubclass(kind, nn.Module) and vars(kind).get("config_class") is type(config):
            return kind
    raise UserError(f"transformers {library.__version__} has a config for {config.model_type}, and no model.")


def build_on_meta(kind: Any, config: Any, dtype: torch.dtype) -> nn.Module:
    """The library's model without memory. Raises UserError with what it refuses."""
    try:
        with torch.device("meta"):
            model: nn.Module = kind._from_config(config, dtype=dtype)
            return model
    except Exception as error:  # any error of the library's code
        raise _refuse(import_extra("transformers"), kind.__name__, error) from error


def _refuse(library: Any, what: str, error: Exception) -> UserError:
    said = " ".join(str(error).split())
    return UserError(
        f"transformers {library.__version__} does not build {what}: {type(error).__name__}: {said}\n"
        "  To do: correct the config.json, or install what is missing"
    )


def _text_of(config: Any) -> Any:
    """The config of the language model; the whole where there are several."""
    try:
        return config.get_text_config()
    except ValueError:
        return config


def find_longest(model: nn.Module, config: Any) -> int:
    """The positions that a config states; 0 if it states none. Some tables begin behind the number of padding."""
    text = _text_of(config)
    names = ("max_position_embeddings", "n_positions", "max_target_positions")
    stated = next((value for name in names if type(value := getattr(text, name, None)) is int), 0)
    padded = [
        each.padding_idx + 1
        for name, each in model.named_modules()
        if isinstance(each, nn.Embedding)
        and name.endswith("position_embeddings")
        and each.num_embeddings == stated
        and each.padding_idx is not None
    ]
    return int(max(0, stated - max(padded, default=0)))


_TABLES = ("pos", "wpe")
"""What is in the names of tables of positions: position_embeddings, embed_positions, positions_embed, wpe."""
_TOWERS = ("vision", "visual", "image")
_OFFSET = 2
"""Rows before the first position of some tables, such as OPT's and BART's."""


def has_learned_positions(model: nn.Module, longest: int) -> bool:
    """Whether a table of learned vectors has as many positions as `longest`; those of an image are none of a text."""

    def positions(name: str, table: nn.Module) -> tuple[int, ...]:
        if not isinstance(table, nn.Embedding) or not table.weight.requires_grad or any(t in name for t in _TOWERS):
            return ()
        if not any(word in name.rpartition(".")[2] for word in _TABLES):
            return ()
        rows, padding = table.num_embeddings, table.padding_idx
        return (rows, rows - _OFFSET) if padding is None else (rows - padding - 1,)

    return longest > 0 and any(longest in positions(name, each) for name, each in model.named_modules())


def list_inputs(model: nn.Module, config: Any, length: int) -> Iterator[dict[str, torch.Tensor]]:
    """What the forward pass may take, by name, with one sample of `length` tokens; the likeliest first."""
    takes, main = inspect.signature(model.forward).parameters, str(model.main_input_name)

    def made(name: str) -> torch.Tensor | None:
        integers = name in ("input_ids", "decoder_input_ids")
        spans = length if main == "input_ids" else getattr(config, "max_target_positions", None) or length
        shape = _shape_of(name, config, spans)
        dtype = torch.int64 if integers else next(p.dtype for p in model.parameters() if p.is_floating_point())
        return None if shape is None else torch.empty(shape, dtype=dtype, device="meta")

    others = ["decoder_input_ids"] if "decoder_input_ids" in takes and config.is_encoder_decoder else []
    more = [name for name in ("input_ids", "pixel_values", "input_features") if name in takes and name != main]
    for names in ([main, *others], *([main, *others, each] for each in more), *([each, *others] for each in more)):
        tensors = {name: tensor for name in names if (tensor := made(name)) is not None}
        if len(tensors) == len(set(names)):
            yield tensors


def _shape_of(name: str, config: Any, length: int) -> tuple[int, ...] | None:
    """The shape of one sample; None for an input whose size no key states."""
    if name in ("input_ids", "decoder_input_ids"):
        return 1, length
    if name in ("pixel_values", "pixel_values_videos"):
        of_images = getattr(config, "vision_config", None) or getattr(config, "backbone_config", None) or config
        size = getattr(of_images, "image_size", None) or 224
        size = [*size.values()] if isinstance(size, dict) else size
        high, wide = (size[0], size[-1]) if isinstance(size, (list, tuple)) else (size, size)
        channels = getattr(of_images, "num_channels", None) or 3
        frames = getattr(of_images, "num_frames", None)
        return (1, frames, channels, high, wide) if frames else (1, channels, high, wide)
    if name == "input_features" and getattr(config, "num_mel_bins", None):
        return 1, config.num_mel_bins, 2 * (getattr(config, "max_source_positions", None) or 1500)
    return (1, 16_000) if name == "input_values" else None  # a second of sound


def _lengthen(tensor: torch.Tensor, before: int, after: int) -> torch.Tensor:
    """The same input of a sample with `after` tokens."""
    shape = [after if place == 1 and size == before else size for place, size in enumerate(tensor.shape)]
    return tensor.new_empty(shape) if tensor.dtype == torch.int64 else tensor


def _join(counts: Sequence[Sequence[Unit]]) -> tuple[CountedUnit, ...]:
    """The units of several lengths as one each; those that follow one another and are alike at all lengths as one."""
    joined: list[CountedUnit] = []
    for same in zip(*counts, strict=True):
        unit = CountedUnit(
            name=same[0].name,
            parameters=same[0].parameters,
            forward_flops=tuple(each.forward_flops for each in same),
            saved_bytes=tuple(each.saved_bytes for each in same),
            fixed_bytes=tuple(each.fixed_bytes for each in same),
        )
        before = joined[-1] if joined else None
        if before and replace(before, name=unit.name, count=1) == unit:
            name = f"{before.name.partition(' to ')[0]} to {unit.name}"
            joined[-1] = replace(before, name=name, count=before.count + 1)
        else:
            joined.append(unit)
    return tuple(joined)


def main() -> None:
    """Read the content of a config.json, write its count or {"error": sentence}."""
    answer, sys.stdout = sys.stdout, sys.stderr  # what libraries print is no answer
    warnings.simplefilter("ignore")
    logging.getLogger("torch._subclasses.fake_tensor").disabled = True  # it logs each way that fails
    try:
        text = count_config(json.loads(sys.stdin.read())).to_json()
    except UserError as error:
        text = json.dumps({"error": str(error)})
    answer.write(text)
    answer.flush()


if __name__ == "__main__":
    main()
