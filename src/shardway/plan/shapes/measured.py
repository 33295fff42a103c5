"""A model that is no transformer, as units: what each holds, computes and keeps. Includes convolutional networks.

Invariants:
- All counts of a model are sums over its units, so they always agree; JSON is read back as the same value.
- Saved bytes are what autograd saves for the backward pass, each tensor once, in the unit that saves it first: inputs
  of products and of batch norms, results of activations, indices of poolings. Statistics of batch norms, which are of
  no single sample, are left out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from shardway.errors import Bug, Problem, UserError, check_no_problems
from shardway.plan.shapes.architecture import Architecture

FORMAT = 1
_UNIT_NUMBERS = ("count", "parameters", "forward_flops", "saved_bytes", "fixed_bytes")
_KINDS: Mapping[str, tuple[type, ...]] = {"str": (str,), "int": (int,)}
_REMEDY = "write the file anew: `shardway plan run.toml --trace`"


@dataclass(frozen=True, kw_only=True)
class Unit:
    """`count` identical parts, each sharded and recomputed as one; all numbers are those of one part.

    FLOPs count a multiplication and an addition as two; `saved_bytes` are kept for the backward pass of one sample.
    """

    name: str
    parameters: int
    forward_flops: float
    saved_bytes: float
    count: int = 1
    fixed_bytes: float = 0.0
    """The part of `saved_bytes` that does not follow the format of activations: masks, indices."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A model known by its units. Raises UserError that names every invalid number."""

    name: str
    units: tuple[Unit, ...]
    source: str = ""
    """How the counts were taken, and for which sample."""
    value_bytes: int = 4
    """Bytes of an activation when `saved_bytes` were counted."""

    def __post_init__(self) -> None:
        check_no_problems(f"the model {self.name}", _find_problems(self))

    @cached_property
    def parameters(self) -> int:
        return sum(unit.count * unit.parameters for unit in self.units)

    @cached_property
    def forward_flops_per_sample(self) -> float:
        """A multiplication and an addition count as two."""
        return sum(unit.count * unit.forward_flops for unit in self.units)

    @property
    def flops_per_sample(self) -> float:
        """Forward and backward; the latter is twice the former (Kaplan et al., arXiv:2001.08361, section 2.1)."""
        return 3 * self.forward_flops_per_sample

    def to_json(self) -> str:
        """The content of a shape file."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=2) + "\n"


Shape = Architecture | Measured
"""The kinds of models that can be planned."""


def measured_from_json(text: str, origin: str = "the shape file") -> Measured:
    """The inverse of `to_json`. Raises UserError that names every key that is missing or invalid."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{origin} is no JSON: {error}.\n  To do: {_REMEDY}") from error
    table: Mapping[str, Any] = content if isinstance(content, dict) else {}
    check_no_problems(origin, _find_file_problems(table))
    units = tuple(Unit(**unit) for unit in table["units"])
    return Measured(name=table["name"], units=units, source=table["source"], value_bytes=table["value_bytes"])


def read_measured(path: Path) -> Measured:
    """Read a shape file. Raises UserError if that fails."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UserError(f"the shape file {path} cannot be read: {error}.\n  To do: name one, or {_REMEDY}") from error
    return measured_from_json(text, str(path))


def _find_problems(model: Measured) -> list[Problem]:
    problems = [] if model.units else [Problem("units", "there is none", allowed="at least 1")]
    if model.value_bytes not in (1, 2, 4, 8):
        problems.append(Problem("value_bytes", f"{model.value_bytes} is the size of no number", allowed="1, 2, 4, 8"))
    for unit in model.units:
        for name in _UNIT_NUMBERS:
            value, least = getattr(unit, name), int(name == "count")
            if not least <= value < math.inf:
                problems.append(Problem(f"{unit.name}: {name}", f"{value} cannot be", allowed=f"{least} or more"))
        if unit.fixed_bytes > unit.saved_bytes:
            what = f"{unit.fixed_bytes:g} is more than saved_bytes, {unit.saved_bytes:g}"
            problems.append(Problem(f"{unit.name}: fixed_bytes", what, allowed="a part of saved_bytes"))
    return problems


def _find_file_problems(table: Mapping[str, Any]) -> list[Problem]:
    if table.get("format") != FORMAT:
        what = f"{table.get('format')!r} is not a format that is known"
        return [Problem("format", what, allowed=str(FORMAT), remedy=_REMEDY)]
    kinds: dict[str, type] = {"name": str, "source": str, "value_bytes": int, "units": list}
    problems = [_describe(key, table, kind) for key, kind in kinds.items() if type(table.get(key)) is not kind]
    units = table["units"] if not problems else []
    for number, unit in enumerate(units):
        problems += _find_unit_problems(f"units[{number}]", unit if isinstance(unit, dict) else {})
    return problems


def _find_unit_problems(where: str, unit: Mapping[str, Any]) -> list[Problem]:
    numbers: tuple[type, ...] = (int, float)
    kinds = {each.name: numbers if each.type == "float" else _KINDS[str(each.type)] for each in fields(Unit)}
    wrong = [_describe(key, unit, *kinds[key], where=where) for key in kinds if type(unit.get(key)) not in kinds[key]]
    unknown = [key for key in unit if key not in kinds]
    return wrong + [Problem(f"{where}.{key}", "is not known", allowed=", ".join(kinds)) for key in unknown]


def _describe(key: str, table: Mapping[str, Any], *kinds: type, where: str = "") -> Problem:
    what = f"{table[key]!r} cannot be" if key in table else "is missing"
    words = {str: "a string", int: "an integer", float: "a number", list: "a list"}
    return Problem(f"{where}.{key}".lstrip("."), what, allowed=words[kinds[-1]], remedy=_REMEDY)


# --- convolutional and plain linear networks

VALUE_BYTES = 4
INDEX_BYTES = 8
MASK_BYTES = 1
_CONVNET_KERNEL = 5


@dataclass(frozen=True, kw_only=True)
class Convolution:
    """A square kernel, optionally with batch norm and activation; its result has `area` positions."""

    inputs: int
    outputs: int
    kernel: int
    area: int
    groups: int = 1
    bias: bool = False
    norm: bool = True
    activated: bool = True

    @property
    def parameters(self) -> int:
        """Kernels, biases, gain and bias of the norm."""
        return self._kernels + self.outputs * (int(self.bias) + 2 * int(self.norm))

    @property
    def flops(self) -> int:
        """Forward FLOPs of one image."""
        return 2 * self.area * self._kernels

    @property
    def values(self) -> int:
        """Numbers kept of one image: the norm's input and the activation's output."""
        return self.area * self.outputs * (int(self.norm) + int(self.activated))

    @property
    def _kernels(self) -> int:
        return self.kernel**2 * self.inputs // self.groups * self.outputs


def convolution_unit(
    name: str, convolutions: Sequence[Convolution], *, values: int = 0, indices: int = 0, count: int = 1
) -> Unit:
    """Convolutions as one unit; `values` and `indices` are kept in addition, per image."""
    kept = values + sum(each.values for each in convolutions)
    return Unit(
        name=name,
        count=count,
        parameters=sum(each.parameters for each in convolutions),
        forward_flops=sum(each.flops for each in convolutions),
        saved_bytes=VALUE_BYTES * kept + INDEX_BYTES * indices,
        fixed_bytes=INDEX_BYTES * indices,
    )


def linear_unit(name: str, inputs: int, outputs: int, *, values: int = 0, masks: int = 0) -> Unit:
    """A linear layer with a bias; `values` and bytes of `masks` are kept per sample."""
    return Unit(
        name=name,
        parameters=(inputs + 1) * outputs,
        forward_flops=2 * inputs * outputs,
        saved_bytes=VALUE_BYTES * values + MASK_BYTES * masks,
        fixed_bytes=MASK_BYTES * masks,
    )


def perceptron(inputs: int, hidden: Sequence[int], classes: int, *, dropout: bool = False) -> Measured:
    """Linear layers with ReLU between them: each keeps its result, and dropout its output and a mask."""
    units = []
    for number, (before, after) in enumerate(pairwise((inputs, *hidden))):
        kept = after * (2 if dropout else 1) + (0 if number else inputs)
        units.append(linear_unit(f"blocks.{number}", before, after, values=kept, masks=after if dropout else 0))
    head = linear_unit("head", (inputs, *hidden)[-1], classes, values=0 if hidden else inputs)
    return Measured(name="mlp", units=(*units, head), source=f"computed for samples of {inputs:,} numbers")


def convnet(image: tuple[int, int, int], channels: Sequence[int], classes: int) -> Measured:
    """Blocks of a 5 x 5 convolution, batch norm, ReLU and 2 x 2 max-pooling, then a linear layer."""
    before, height, width = image
    units = []
    for number, after in enumerate(channels):
        block = Convolution(inputs=before, outputs=after, kernel=_CONVNET_KERNEL, area=height * width)
        read, pooled = before * height * width, after * (height // 2) * (width // 2)
        units.append(convolution_unit(f"blocks.{number}", [block], values=read, indices=pooled))
        before, height, width = after, height // 2, width // 2
    features = before * height * width
    head = linear_unit("head", features, classes, values=features)
    return Measured(name="convnet", units=(*units, head), source=f"computed for images of {render_image(image)}")


@dataclass(frozen=True, kw_only=True)
class ResidualNetwork:
    """Sizes of a residual network (He et al., arXiv:1512.03385); the stride of a bottleneck is in its 3 x 3 kernel, as
    in torchvision. Raises UserError for an image that is too small for the strides."""

    name: str
    depths: tuple[int, ...]
    widths: tuple[int, ...]
    layer: Literal["basic", "bottleneck"]
    stem: int = 64
    image: tuple[int, int, int] = (3, 224, 224)
    classes: int = 1000
    early_stride: bool = False
    """The first stage halves its input too."""

    def __post_init__(self) -> None:
        least = 2 ** (len(self.depths) + 1 + self.early_stride)
        if min(self.image[1:]) < least:
            what = f"{self.name} halves images of {render_image(self.image)} to nothing"
            check_no_problems("the model", [Problem("image_size", what, allowed=f"at least {least}")])
        if len(self.depths) != len(self.widths):
            raise Bug(f"{len(self.depths)} depths and {len(self.widths)} widths of a residual network")


def residual_network(sizes: ResidualNetwork) -> Measured:
    """Its units: the stem, the layers, the output layer."""
    units = tuple(_list_residual_units(sizes))
    return Measured(name=sizes.name, units=units, source=f"computed for images of {render_image(sizes.image)}")


def render_image(image: tuple[int, int, int]) -> str:
    """Channels, height and width in words."""
    return " x ".join(map(str, image))


def _list_residual_units(sizes: ResidualNetwork) -> Iterator[Unit]:
    channels, height, width = sizes.image
    entering, (height, width) = channels * height * width, _halve(height, width)
    stem = Convolution(inputs=channels, outputs=sizes.stem, kernel=7, area=height * width)
    before, (height, width) = sizes.stem, _halve(height, width)
    # The output of the pooling is kept by the first layer that reads it.
    pooled = before * height * width
    yield convolution_unit("stem", [stem], values=entering, indices=pooled)
    for stage, (depth, after) in enumerate(zip(sizes.depths, sizes.widths, strict=True)):
        halved = stage > 0 or sizes.early_stride
        layers = _residual_layer(sizes.layer, before, after, (height, width), halved=halved)
        yield convolution_unit(f"stage {stage + 1}, first layer", layers, values=0 if stage else pooled)
        height, width = _halve(height, width) if halved else (height, width)
        layers = _residual_layer(sizes.layer, after, after, (height, width), halved=False)
        if depth > 1:
            yield convolution_unit(f"stage {stage + 1}, other layers", layers, count=depth - 1)
        before = after
    yield linear_unit("head", before, sizes.classes, values=before)


def _residual_layer(
    kind: Literal["basic", "bottleneck"], before: int, after: int, size: tuple[int, int], *, halved: bool
) -> list[Convolution]:
    """The convolutions of one layer, including the shortcut's if sizes change."""
    area, small = math.prod(size), math.prod(_halve(*size) if halved else size)
    if kind == "basic":
        layers = [
            Convolution(inputs=before, outputs=after, kernel=3, area=small),
            Convolution(inputs=after, outputs=after, kernel=3, area=small),
        ]
    else:
        inner = after // 4
        layers = [
            Convolution(inputs=before, outputs=inner, kernel=1, area=area),
            Convolution(inputs=inner, outputs=inner, kernel=3, area=small),
            Convolution(inputs=inner, outputs=after, kernel=1, area=small),
        ]
    if halved or before != after:
        layers.append(Convolution(inputs=before, outputs=after, kernel=1, area=small, activated=False))
    return layers


def _halve(height: int, width: int) -> tuple[int, int]:
    """The size after a stride of 2 with padding."""
    return -(-height // 2), -(-width // 2)
