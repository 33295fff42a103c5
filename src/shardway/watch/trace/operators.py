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
    def format(self) -> str:
        """The format that a product computes in: as `dtype`, and "tf32" where its kernel shows that."""
        rounded = self.dtype == "fp32" and re.search(r"tf32|s1688|xf32", self.top_kernel)
        return "tf32" if rounded else self.dtype

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
        return product_shape(self.name, self.shapes) if self.kind == "product" else None

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
        dtypes = read_types(_text(timeline, types[row]))
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
                read_shapes(_text(timeline, dims[row])),
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
                read_shapes(_text(timeline, trace.dims[row])),
                read_types(_text(timeline, trace.types[row])),
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
def read_shapes(text: str) -> tuple[Any, ...]:
    """The shapes of an operator's inputs, as the profiler writes them; empty for none."""
    try:
        found = json.loads(text) if text else []
    except ValueError:
        return ()
    return tuple(found) if isinstance(found, list) else ()


@cache
def read_types(text: str) -> tuple[str, ...]:
    """The formats of its inputs, "" for what is no tensor of a known one."""
    found = read_shapes(text)
    return tuple(read[0] if isinstance(word, str) and (read := read_dtype(word)) else "" for word in found)


def _read_grid(text: str) -> tuple[int, ...]:
    found = read_shapes(text)
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
    known: dict[str, Dtype] = {"fp32": "fp32", "tf32": "tf32", "fp16": "fp16", "bf16": "bf16", "fp8": "fp8"}
    return part.peak(known[operator.format]) if operator.format in known else None


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
    if operator.kind == "communication" or (operator.kind == "other" and not operator.name.startswith("aten::")):
        return None, None
    return None, count_traffic(operator.name, operator.shapes, operator.dtypes)


_MOVES_NOTHING = frozenset(
    re.findall(
        r"\w+",
        "_reshape_alias _unsafe_view alias as_strided as_strided_ chunk contiguous cross_entropy_loss detach "
        "detach_ diagonal dropout empty empty_like empty_strided expand expand_as flatten full is_nonzero item "
        "lift_fresh movedim narrow new_empty new_empty_strided nll_loss nll_loss2d nll_loss_nd ones ones_like "
        "permute ravel real reshape resize_ resolve_conj resolve_neg result_type select set_ slice split "
        "split_with_sizes squeeze squeeze_ swapaxes t to transpose type_as unbind unflatten unfold unsqueeze "
        "unsqueeze_ view view_as zeros zeros_like",
    )
)
"""Operators that make a view or memory that is not yet written, or have others do the work."""
_REDUCES = re.compile(
    r"^_?(sum|nansum|mean|amax|amin|max|min|prod|norm|linalg_vector_norm|all|any|argmax|argmin|var|std|logsumexp"
    r"|count_nonzero|\w*pool\d?d(_with_indices)?)$"
)
_COMPARES = re.compile(r"^(eq|ne|lt|le|gt|ge|isnan|isinf|isfinite|logical_\w+)$")
_GATHERS = {"index_select": (0, 2), "embedding": (0, 1), "gather": (0, 2), "index": (0, 1)}
"""The places of the table and of the indices among the inputs of an operator that reads a part of a table."""


def count_traffic(name: str, shapes: tuple[Any, ...], dtypes: tuple[str, ...]) -> float | None:
    """Bytes that an operator beside products and attention reads and writes, each tensor once; None where the shapes
    do not show them. The result of a reduction is left out, and so is what a cache saves or lets be read twice."""
    bare, place = name.rpartition("::")[2], name.startswith("aten::")
    tensors = [
        (shape, size)
        for shape, dtype in zip(shapes, dtypes, strict=False)
        if _is_shape(shape) and (size := _size_of(dtype))
    ]
    if not tensors or (place and bare in _MOVES_NOTHING):
        return 0.0 if place and bare in _MOVES_NOTHING else None
    sizes = [math.prod(shape) * size for shape, size in tensors]
    (first, width), whole = tensors[0], float(sum(sizes))
    if bare in ("zero_", "fill_", "normal_", "uniform_", "random_", "bernoulli_"):
        return float(sizes[0])
    if bare == "copy_" or name.startswith("triton_") or (not place and "copy_" in name):
        return whole  # a compiled kernel's inputs and results
    if bare in ("_to_copy", "clone"):
        return 2.0 * sizes[0]
    if bare in ("cat", "stack"):
        return 2.0 * whole
    if bare == "nll_loss_forward":  # one logit of each row, and its target
        return float(sum(sizes[1:]) + math.prod(first[:-1]) * width)
    if bare == "nll_loss_backward":  # zeros but for one of each row
        return float(max(sizes))
    if bare in ("embedding_dense_backward", "embedding_backward"):
        return whole
    if bare in _GATHERS and len(first) and (index := _find_index(_GATHERS[bare], shapes, dtypes)):
        rows = math.prod(index[0]) * (math.prod(first[1:]) if bare != "gather" else 1)
        return float(2 * rows * width + math.prod(index[0]) * index[1])
    if _REDUCES.search(bare):
        return float(sizes[0])
    if bare.endswith("_") and not bare.endswith("__"):
        return whole + sizes[0]
    result = _broadcast([shape for shape, _ in tensors])
    wide = max([size for shape, size in tensors if shape] or [width])  # numbers without a dimension widen nothing
    wide = 1 if _COMPARES.search(bare) else wide
    if bare.endswith(("rms_norm_backward", "layer_norm_backward")):
        result = [math.prod(first)]  # the gradient of the gain is small
    return whole + math.prod(result) * wide


def _find_index(
    places: tuple[int, int], shapes: tuple[Any, ...], dtypes: tuple[str, ...]
) -> tuple[list[int], int] | None:
    place = places[1]
    if place >= len(shapes) or place >= len(dtypes) or not _is_shape(shapes[place]):
        return None
    return shapes[place], _size_of(dtypes[place])


def _broadcast(shapes: list[list[int]]) -> list[int]:
    """The shape that tensors of these shapes have together; the largest where they do not fit."""
    found: list[int] = []
    for shape in shapes:
        longer, shorter = (shape, found) if len(shape) > len(found) else (found, shape)
        padded = [1] * (len(longer) - len(shorter)) + shorter
        if any(one != other and 1 not in (one, other) for one, other in zip(longer, padded, strict=True)):
            return max(shapes, key=math.prod)
        found = [max(one, other) for one, other in zip(longer, padded, strict=True)]
    return found


def _size_of(dtype: str) -> int:
    return next((size for name, size in (*_DTYPES.values(), ("fp8", 1)) if name == dtype), 0)


def product_shape(name: str, shapes: tuple[Any, ...]) -> tuple[int, int, int, int] | None:
    """Batches, M, N and K of a product by its inputs; None where they are not those of one."""
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
        keys, key_heads = key[1:3]
    else:
        batch, heads, length, width = query
        key_heads, keys = key[1:3]
    causal = bool(re.search(r"[Tt]rue", operator.concrete))
    flop = 4.0 * batch * heads * length * keys * width * (0.5 if causal and length == keys else 1.0)
    traffic = item * batch * width * (2 * heads * length + 2 * key_heads * keys)
    return (2.5 * flop, 2.0 * traffic) if backward else (flop, float(traffic))


def _count_convolution(operator: Operator, shapes: list[Any], item: int) -> tuple[float | None, float | None]:
    if len(shapes) < 2:
        return None, None
    backward = bool(_BACKWARD.search(operator.name))
    image, weight = (shapes[1], shapes[2]) if backward and len(shapes) >= 3 else shapes[:2]
    space = len(image) - 2
    if space < 1 or len(weight) != len(image):
        return None, None
    stride, padding, dilation, transposed = _read_convolution(operator.concrete, space, backward=backward)
    if re.search(r"(cudnn|miopen|mkldnn)_convolution", operator.name) and "transpose" not in operator.name:
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
    wanted = 2 - operator.concrete.count("[False, ")  # a first layer's input needs no gradient
    return (wanted * flop, float(wanted * traffic)) if backward else (flop, float(traffic))


def _read_convolution(concrete: str, space: int, *, backward: bool) -> tuple[list[int], list[int], list[int], bool]:
    """Stride, padding, dilation and whether it is transposed, of the order of `aten::convolution`; 1, 0, 1, False where
    they are not recorded. Backward the sizes of the bias stand before them."""
    lists, words = [], read_shapes(concrete)
    words = words[:3] + words[4:] if backward else words
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
