"""Operators with the time, arithmetic and memory traffic of a step, against the peaks of the device.

Invariants:
- Arithmetic and bytes follow from the shapes that the trace records; without shapes they are None, as is a share of a
  peak that no source states. Bytes count each input and output once: a lower bound.
- A product's FLOP is 2 M N K; attention counts both products, half of them if it is causal, and 2.5 times as much
  backward (FlashAttention-2, arXiv 2307.08691, section 4.1).
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from shardway.hardware.catalogue import Accelerator, Dtype
from shardway.watch.trace.kernels import Kind, find_kind, find_op_kind, uses_matrix_units
from shardway.watch.trace.timeline import Timeline, find_parents

_DTYPES: dict[str, tuple[str, int]] = {
    "float": ("fp32", 4),
    "float32": ("fp32", 4),
    "double": ("fp64", 8),
    "half": ("fp16", 2),
    "bfloat16": ("bf16", 2),
    "long": ("int64", 8),
    "int": ("int32", 4),
    "bool": ("bool", 1),
    "unsigned char": ("uint8", 1),
    "char": ("int8", 1),
    "signed char": ("int8", 1),
    "byte": ("uint8", 1),
    "long int": ("int64", 8),
    "short": ("int16", 2),
    "float16": ("fp16", 2),
    "complex<float>": ("complex64", 8),
    "complex<double>": ("complex128", 16),
}


def read_dtype(word: str) -> tuple[str, int] | None:
    """A type as the profiler writes it, such as "c10::BFloat16": its name here and its bytes."""
    bare = word.removeprefix("c10::").lower()
    return ("fp8", 1) if bare.startswith("float8") else _DTYPES.get(bare)


@dataclass(frozen=True)
class Operator:
    """An operator with one set of shapes, over the kept steps; `ms` and `calls` are those of a step.

    `low_precision`: whether its inputs have 16 bits or less; None where types were not recorded. `matrix_units`: the
    share of its time that was computed on matrix units, None where the names of its kernels do not show it.
    `flop_share`, `byte_share`: of the device's peaks. `floor_ms`: the time that the peaks allow.
    """

    name: str
    kind: Kind
    shapes: tuple[Any, ...]
    dtypes: tuple[str, ...]
    calls: float
    ms: float
    kernels: float
    top_kernel: str
    flop: float | None = None
    bytes: float | None = None
    flop_share: float | None = None
    byte_share: float | None = None
    floor_ms: float | None = None
    matrix_units: float | None = None
    grid: tuple[int, ...] = ()
    concrete: str = ""

    @property
    def dtype(self) -> str:
        """That of its first tensor of real numbers."""
        return _find_real(self.dtypes)

    @property
    def low_precision(self) -> bool | None:
        return _is_low(self.dtypes)

    @property
    def tflops(self) -> float | None:
        return self.flop / self.ms / 1e9 if self.flop and self.ms > 0 else None

    @property
    def tbps(self) -> float | None:
        return self.bytes / self.ms / 1e9 if self.bytes and self.ms > 0 else None

    @property
    def product(self) -> tuple[int, int, int, int] | None:
        """Batches, M, N and K of a product of matrices."""
        return _product_shape(self.name, self.shapes) if self.kind == "product" else None

    def render_shapes(self) -> str:
        """The shapes of its tensors, as "4096x1024 1024x50257"."""
        words = ["x".join(map(str, shape)) for shape in self.shapes if _is_shape(shape) and shape]
        return " ".join(words[:4])


_REAL = ("fp32", "fp64", "fp16", "bf16", "fp8", "tf32")


def list_operators(timeline: Timeline, part: Accelerator | None) -> list[Operator]:
    """The operators of a step, those with most time first."""
    found = _of_device(timeline) if timeline.on_device else _of_host(timeline)
    return sorted((_rate(each, part) for each in found), key=lambda each: -each.ms)


# --- gathering


def _group(columns: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The first row of each distinct combination, and the combination of each row."""
    _, first, inverse = np.unique(np.column_stack(columns), axis=0, return_index=True, return_inverse=True)
    return first, inverse.reshape(-1)


def _of_device(timeline: Timeline) -> list[Operator]:
    """Time of kernels by the operator that launched them; by the kernel where that is not known."""
    trace = timeline.trace
    low, high = timeline.window
    start = trace.start[timeline.rows]
    here = (start >= low) & (start < high)
    rows, op = timeline.rows[here], timeline.op[here]
    if not len(rows):
        return []
    known = op >= 0
    name = np.where(known, trace.name[op], trace.name[rows])
    dims, types = np.where(known, trace.dims[op], -1), np.where(known, trace.types[op], -1)
    extra = np.where(known, trace.extra[op], -1)
    alone = np.where(known, 0, trace.category[rows].astype(np.int64))
    updates = timeline.is_optimizer[here]
    first, inverse = _group([name, dims, types, extra, alone, updates.astype(np.int64)])
    steps = len(timeline.kept)
    total = np.bincount(inverse, trace.duration[rows])
    kernels = np.bincount(inverse)
    found = []
    members = np.argsort(inverse, kind="stable")
    edges = np.concatenate(([0], np.cumsum(kernels)))
    for group, row in enumerate(first):
        mine = members[edges[group] : edges[group + 1]]
        calls = len(np.unique(op[mine])) if known[row] else len(mine)
        dtypes = _read_types(_text(timeline, types[row]))
        low_precision = _is_low(dtypes)
        codes, which = np.unique(trace.name[rows[mine]], return_inverse=True)
        spent = np.bincount(which, trace.duration[rows[mine]])
        top = int(np.argmax(spent))
        names = [trace.names[code] for code in codes]
        units = [uses_matrix_units(each, low_precision) for each in names]
        shown = sum(each for each, unit in zip(spent, units, strict=True) if unit is not None)
        used = sum(each for each, unit in zip(spent, units, strict=True) if unit)
        op_name = trace.names[name[row]]
        kind = (find_op_kind(op_name) if known[row] else None) or _kind_of(names, spent)
        kind = "optimizer" if updates[row] else kind
        biggest = rows[mine][which == top]
        found.append(
            Operator(
                op_name,
                kind,
                _read_shapes(_text(timeline, dims[row])),
                dtypes,
                calls / steps,
                timeline.per_step(float(total[group])),
                len(mine) / steps,
                names[top],
                matrix_units=used / shown if shown > 0.5 * spent.sum() else None,
                grid=_read_grid(_text(timeline, trace.extra[biggest[0]])),
                concrete=_text(timeline, extra[row]),
            )
        )
    return found


def _kind_of(names: list[str], spent: np.ndarray) -> Kind:
    return find_kind(names[int(np.argmax(spent))])


def _of_host(timeline: Timeline) -> list[Operator]:
    """Time that operators spent themselves, without those that they called."""
    trace = timeline.trace
    ops = timeline.host_ops
    if not len(ops):
        return []
    parents = find_parents(trace, ops)
    own = trace.duration[ops].copy()
    inner = parents >= 0
    np.subtract.at(own, parents[inner], trace.duration[ops[inner]])
    low, high = timeline.window
    here = (trace.start[ops] >= low) & (trace.start[ops] < high)
    ops, own = ops[here], np.maximum(own[here], 0.0)
    if not len(ops):
        return []
    first, inverse = _group([trace.name[ops], trace.dims[ops], trace.types[ops], trace.extra[ops]])
    total, counts = np.bincount(inverse, own), np.bincount(inverse)
    steps = len(timeline.kept)
    found = []
    for group, place in enumerate(first):
        row = ops[place]
        name = trace.names[trace.name[row]]
        kind = find_op_kind(name) or ("elementwise" if name.startswith("aten::") else "other")
        found.append(
            Operator(
                name,
                kind,
                _read_shapes(_text(timeline, trace.dims[row])),
                _read_types(_text(timeline, trace.types[row])),
                counts[group] / steps,
                timeline.per_step(float(total[group])),
                0.0,
                "",
                concrete=_text(timeline, trace.extra[row]),
            )
        )
    return found


def _text(timeline: Timeline, code: int) -> str:
    return timeline.trace.texts[code] if code >= 0 else ""


@cache
def _read_shapes(text: str) -> tuple[Any, ...]:
    try:
        found = json.loads(text) if text else []
    except ValueError:
        return ()
    return tuple(found) if isinstance(found, list) else ()


@cache
def _read_types(text: str) -> tuple[str, ...]:
    found = _read_shapes(text)
    return tuple(read[0] if isinstance(word, str) and (read := read_dtype(word)) else "" for word in found)


def _read_grid(text: str) -> tuple[int, ...]:
    found = _read_shapes(text)
    return tuple(found) if found and all(isinstance(each, int) for each in found) else ()


def _find_real(dtypes: tuple[str, ...]) -> str:
    """The first type that is one of real numbers."""
    return next((each for each in dtypes if each in _REAL), "")


def _is_low(dtypes: tuple[str, ...]) -> bool | None:
    dtype = _find_real(dtypes)
    return dtype in ("fp16", "bf16", "fp8") if dtype else None


def _is_shape(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, int) and each >= 0 for each in value)


# --- arithmetic and bytes


def _rate(operator: Operator, part: Accelerator | None) -> Operator:
    """With its arithmetic, bytes and their shares of the peaks."""
    flop, traffic = count_work(operator)
    if flop is None and traffic is None:
        return operator
    flop = flop * operator.calls if flop is not None else None
    traffic = traffic * operator.calls if traffic is not None else None
    rated = replace(operator, flop=flop, bytes=traffic)
    if part is None or operator.ms <= 0:
        return rated
    peak, rate = _find_peak(operator, part), part.memory_bandwidth_bytes_per_s
    floors = []
    if flop and peak:
        floors.append(flop / peak)
    if traffic and rate:
        floors.append(traffic / rate)
    seconds = operator.ms / 1e3
    if floors and max(floors) > 1.1 * seconds:  # inputs that were read in part, or from a cache: no statement
        return rated
    return replace(
        rated,
        flop_share=flop / seconds / peak if flop and peak else None,
        byte_share=traffic / seconds / rate if traffic and rate else None,
        floor_ms=1e3 * max(floors) if floors else None,
    )


def _find_peak(operator: Operator, part: Accelerator) -> float | None:
    dtype = operator.dtype
    if dtype == "fp32" and re.search(r"tf32|s1688|xf32", operator.top_kernel):
        dtype = "tf32"
    known: dict[str, Dtype] = {"fp32": "fp32", "tf32": "tf32", "fp16": "fp16", "bf16": "bf16", "fp8": "fp8"}
    return part.peak(known[dtype]) if dtype in known else None


def count_work(operator: Operator) -> tuple[float | None, float | None]:
    """FLOP and bytes of one call; None where the shapes do not show them."""
    sizes = [_size_of(dtype) for dtype in operator.dtypes]
    shapes = [shape for shape in operator.shapes if _is_shape(shape) and shape]
    if not shapes:
        return None, None
    item = next((size for dtype, size in zip(operator.dtypes, sizes, strict=True) if dtype in _REAL), 0)
    if operator.kind == "product" and (sized := operator.product):
        batches, m, n, k = sized
        return 2.0 * batches * m * n * k, float(item * batches * (m * k + k * n + m * n))
    if operator.kind == "attention":
        return _count_attention(operator, shapes, item)
    if operator.kind == "convolution":
        return _count_convolution(operator, shapes, item)
    if "moe" in operator.name.lower() and (counted := _count_experts(shapes, item)):
        return counted
    if operator.kind in ("other", "communication"):
        return None, None
    tensors = [
        (math.prod(shape), size)
        for shape, size in zip(operator.shapes, sizes, strict=False)
        if _is_shape(shape) and shape and size
    ]
    if not tensors:
        return None, None
    inputs = sum(count * size for count, size in tensors)
    count, size = max(tensors)
    writes_an_input = operator.name.endswith("_") or "copy_" in operator.name
    return None, float(inputs if writes_an_input else inputs + count * size)


def _size_of(dtype: str) -> int:
    return next((size for name, size in (*_DTYPES.values(), ("fp8", 1)) if name == dtype), 0)


def _product_shape(name: str, shapes: tuple[Any, ...]) -> tuple[int, int, int, int] | None:
    tensors = [shape for shape in shapes if _is_shape(shape) and len(shape) >= 1]
    if "addmm" in name or "baddbmm" in name or "addmv" in name:
        tensors = tensors[1:]
    if len(tensors) < 2:
        return None
    one, other = tensors[:2]
    if name == "aten::linear":
        return (1, math.prod(one[:-1]), other[0], one[-1]) if len(other) == 2 and one[-1:] == other[-1:] else None
    if len(one) == 2 and len(other) == 1:
        return (1, one[0], 1, one[1]) if one[1] == other[0] else None
    if len(one) == 2 and len(other) == 2:
        return (1, one[0], other[1], one[1]) if one[1] == other[0] else None
    if len(one) >= 3 and len(other) == len(one) and one[-1] == other[-2]:
        return math.prod(one[:-2]), one[-2], other[-1], one[-1]
    return (
        (1, math.prod(one[:-1]), other[-1], one[-1])
        if len(one) >= 3 and len(other) == 2 and one[-1] == other[0]
        else None
    )


_BACKWARD = re.compile(r"backward|_bwd")


def _count_attention(operator: Operator, shapes: list[Any], item: int) -> tuple[float | None, float | None]:
    backward = bool(_BACKWARD.search(operator.name))
    four = [shape for shape in shapes if len(shape) == 4]
    if len(four) < 3:
        return None, None
    query, key = four[1:3] if backward and "_scaled_dot" in operator.name else four[:2]
    if re.search(r"_flash_attention_(forward|backward)|_efficient_attention", operator.name):
        batch, length, heads, width = query
        keys = key[1]
    else:
        batch, heads, length, width = query
        keys = key[2]
    causal = bool(re.search(r"[Tt]rue", operator.concrete))
    flop = 4.0 * batch * heads * length * keys * width * (0.5 if causal and length == keys else 1.0)
    traffic = item * batch * width * heads * (2 * length + 2 * keys)
    return (2.5 * flop, 2.0 * traffic) if backward else (flop, float(traffic))


def _count_convolution(operator: Operator, shapes: list[Any], item: int) -> tuple[float | None, float | None]:
    if len(shapes) < 2:
        return None, None
    backward = bool(_BACKWARD.search(operator.name))
    image, weight = (shapes[1], shapes[2]) if backward and len(shapes) >= 3 else shapes[:2]
    space = len(image) - 2
    if space < 1 or len(weight) != len(image):
        return None, None
    stride, padding, dilation, transposed = _read_convolution(operator.concrete, space)
    if re.search(r"(cudnn|miopen)_convolution", operator.name) and "transpose" not in operator.name:
        stride, padding = [max(each, 1) for each in padding], stride  # these name the padding first
    if transposed:
        out = [
            (size - 1) * stride[axis] - 2 * padding[axis] + dilation[axis] * (weight[2 + axis] - 1) + 1
            for axis, size in enumerate(image[2:])
        ]
        points, channels = math.prod(image[2:]), image[1]
        flop = 2.0 * image[0] * points * channels * weight[1] * math.prod(weight[2:])
        out_channels = weight[1]
    else:
        out = [
            max((size + 2 * padding[axis] - dilation[axis] * (weight[2 + axis] - 1) - 1) // max(stride[axis], 1) + 1, 1)
            for axis, size in enumerate(image[2:])
        ]
        flop = 2.0 * image[0] * math.prod(out) * weight[0] * weight[1] * math.prod(weight[2:])
        out_channels = weight[0]
    traffic = item * (math.prod(image) + math.prod(weight) + image[0] * out_channels * math.prod(out))
    return (2 * flop, 2.0 * traffic) if backward else (flop, float(traffic))


def _read_convolution(concrete: str, space: int) -> tuple[list[int], list[int], list[int], bool]:
    """Stride, padding, dilation and whether it is transposed, of the order of `aten::convolution`; 1, 0, 1, False where
    they are not recorded."""
    lists, words = [], _read_shapes(concrete)
    for word in words:
        numbers = [int(each) for each in re.findall(r"-?\d+", str(word))] if re.match(r"[\[(]", str(word)) else []
        if numbers:
            lists.append((numbers * space)[:space] if len(numbers) == 1 else numbers[:space])
    lists = [each for each in lists if len(each) == space]
    stride, padding, dilation = (lists + [[1] * space, [0] * space, [1] * space][len(lists) :])[:3]
    transposed = any(str(word).lower() == "true" for word in words[6:7])
    return stride, padding, [max(each, 1) for each in dilation], transposed


def _count_experts(shapes: list[Any], item: int) -> tuple[float, float] | None:
    """Gated experts of a kernel: tokens x hidden, experts x 2 inner x hidden, experts x hidden x inner, tokens x k."""
    threes, twos = [each for each in shapes if len(each) == 3], [each for each in shapes if len(each) == 2]
    if len(threes) < 2 or len(twos) < 2 or threes[0][0] != threes[1][0]:
        return None
    tokens, hidden = twos[0]
    experts, chosen = threes[0][0], max(twos[-1][1], 1)
    weights = math.prod(threes[0][1:]) + math.prod(threes[1][1:])
    used = min(experts, tokens * chosen)
    return 2.0 * tokens * chosen * weights, float(item * (used * weights + 2 * tokens * hidden))
