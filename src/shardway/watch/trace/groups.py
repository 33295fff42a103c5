"""What each operator of a step is for: attention, products of blocks, output layer and loss, norms and so on; with the
time, arithmetic and bytes of each group.

A backward operator belongs to the group of the forward operator whose autograd node it is, by the node's number. The
output layer is the product whose result the loss takes. In compiled code the names of the kernels show what they do.

Invariants:
- The times of the groups and the idle time add up to the step: an instant counts for the operator that was called last,
  and for one group, computing before communication before copies; on a CPU what is left, such as waiting, comes last.
- Work counts once, where it is done: an operator that calls others which do its work has none of its own.
- Arithmetic beside products is that of the definitions (`POINTWISE`), one FLOP for each addition, product or function.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np

from shardway.watch.trace import intervals
from shardway.watch.trace.columns import ANNOTATION, KERNEL, MEMCPY, OP
from shardway.watch.trace.kernels import find_kind, find_op_kind
from shardway.watch.trace.operators import (
    Operator,
    count_traffic,
    count_work,
    product_shape,
    read_shapes,
    read_types,
)
from shardway.watch.trace.timeline import CPU_COMMUNICATION, OPTIMIZER_STEP, Timeline, find_parents

Group = Literal[
    "attention",
    "products",
    "output",
    "norms",
    "elementwise",
    "casts",
    "optimizer",
    "communication",
    "copies",
    "other",
]
GROUPS: tuple[Group, ...] = get_args(Group)

_COMPUTE: tuple[Group, ...] = tuple(each for each in GROUPS if each not in ("communication", "copies", "other"))


@dataclass(frozen=True)
class GroupTime:
    """A group of a step: `ms` of it, which add up to the step with idle time, and its operators, whose own times count
    twice what runs side by side."""

    group: Group
    ms: float
    operators: tuple[Operator, ...]


# --- arithmetic beside products

POINTWISE: tuple[tuple[re.Pattern[str], float], ...] = (
    (re.compile(r"_fused_adamw?_"), 14.0),  # decay 1, first moment 3, second 4, root and bias 3, update 3
    (re.compile(r"rms_norm_backward"), 9.0),
    (re.compile(r"rms_norm"), 4.0),  # square, sum, scale, gain
    (re.compile(r"(layer|batch|group)_norm.*backward"), 14.0),
    (re.compile(r"(layer|batch|group)_norm"), 7.0),
    (re.compile(r"softmax_backward"), 4.0),
    (re.compile(r"softmax"), 5.0),  # maximum, difference, exp, sum, quotient
    (re.compile(r"silu_backward"), 8.0),
    (re.compile(r"silu"), 4.0),  # minus, exp, sum, quotient
    (re.compile(r"gelu_backward"), 14.0),
    (re.compile(r"gelu"), 8.0),
    (re.compile(r"sigmoid"), 3.0),
    (re.compile(r"linalg_vector_norm|foreach_norm|addcmul|addcdiv"), 2.0),
    (re.compile(r"lerp"), 3.0),
    (
        re.compile(
            r"copy|clone|cat|stack|fill|zero|index|embedding|gather|scatter|roll|where|masked|nll_loss|one_hot|repeat|pad"
            r"|tril|triu|arange|sort|topk|random|bernoulli|local_scalar|^(ne|eq|gt|lt|ge|le|max|min|amax|amin|argmax|isnan|isinf|isfinite)$"
        ),
        0.0,
    ),
)
"""FLOP for each element of the largest tensor, by an operator's name; 1 for others."""

_ARITHMETIC = re.compile(r"(?:^|_)(add|mul|sub|div|pow|rsqrt|exp|log|mean|sum|neg|sqrt|tanh|sigmoid|silu|gelu)(?=_|$)")


def count_pointwise(name: str, shapes: Sequence[object]) -> float:
    """FLOP of one call of an operator that is no product; of a compiled kernel one for each operator in its name."""
    sizes = [math.prod(each) for each in shapes if isinstance(each, list) and all(isinstance(n, int) for n in each)]
    if not sizes:
        return 0.0
    if name.startswith("triton_"):
        return float(max(sizes) * len(_ARITHMETIC.findall(name)))
    bare = name.rpartition("::")[2]
    return max(sizes) * next((count for pattern, count in POINTWISE if pattern.search(bare)), 1.0)


# --- what the names show

_SCOPES: tuple[tuple[Group, re.Pattern[str]], ...] = (
    ("optimizer", re.compile(r"_foreach_|_fused_(adam|sgd|adagrad)|multi_tensor")),
    (
        "attention",
        re.compile(r"scaled_dot_product|flash_attn|flex_attention|_flash_attention|_efficient_attention|sdpa"),
    ),
    ("output", re.compile(r"cross_entropy|log_softmax|nll_loss|_loss\b|kl_div|logsumexp")),
    ("norms", re.compile(r"rms_?norm|layer_?norm|batch_norm|group_norm|triton_\w*rsqrt", re.IGNORECASE)),
)
"""What an operator, and all that it calls, is for."""
_BACKWARD = "autograd::engine::evaluate_function"
_COPIES = re.compile(
    r"^(copy_|clone|contiguous|_to_copy|to|cat|stack|fill_|zero_|zeros|zeros_like|ones|ones_like|full|index_select|index"
    r"|index_put_?|embedding\w*|gather|scatter\w*|roll|repeat|constant_pad_nd|pad|flip|slice_backward|select_backward"
    r"|index_add_?|arange|masked_fill_?|where|tril|triu)$"
)
_ONLY_CASTS = re.compile(r"^triton_\w+?_fused_(_to_copy_?|view_?|t_?|transpose_?|clone_?)*(_?\d+)*$")
_COMPILED = re.compile(r"^CompiledFunction(Backward)?$")
"""A graph of torch.compile: on a CPU its kernels leave no events of their own."""
_JOINS = frozenset(("aten::cat", "aten::stack"))
_REAL = frozenset(("fp64", "fp32", "fp16", "bf16", "fp8"))


def find_scope(name: str) -> Group | None:
    """What an operator of this name and all that it calls are for, where its name shows that."""
    return next((group for group, pattern in _SCOPES if pattern.search(name)), None)


def is_cast(name: str, dtypes: Sequence[str]) -> bool:
    """Whether an operator copies numbers of one format into another one."""
    if name in ("aten::copy_", "aten::_to_copy"):
        known = [each for each in dtypes[:2] if each in _REAL]
        return len(set(known)) == 2
    return bool(_ONLY_CASTS.search(name)) and "_to_copy" in name


def find_group(name: str, dtypes: Sequence[str], scope: Group | None, *, moves: bool) -> Group:
    """The group of an operator within a scope; `moves`: whether it reads or writes memory."""
    if scope == "optimizer":
        return scope
    if is_cast(name, dtypes):
        return "casts"
    if scope is not None:
        return scope
    kind = find_op_kind(name)
    if kind is not None:
        return "attention" if kind == "attention" else "products"
    if name.startswith("triton_") or _COMPILED.search(name):
        return "elementwise"
    if name.startswith("fsdp::"):
        return "copies"
    if not name.startswith("aten::"):
        return "other"
    if _COPIES.search(name.removeprefix("aten::")):
        return "copies"
    return "elementwise" if moves else "other"


_KIND_GROUPS: Mapping[str, Group] = {
    "product": "products",
    "convolution": "products",
    "attention": "attention",
    "optimizer": "optimizer",
    "elementwise": "elementwise",
    "reduction": "elementwise",
}


def find_kernel_group(name: str) -> Group:
    """The group of a kernel that no operator launched."""
    return find_scope(name) or _KIND_GROUPS.get(find_kind(name), "other")


# --- the operators of the host and what they are for


@dataclass
class OperatorTree:
    """The host's operators in the order of their start. `parents`: the place of the one around each, -1 for none;
    `scopes`: what each is for, None where neither its name nor those around it show it."""

    timeline: Timeline
    rows: np.ndarray
    parents: list[int]
    names: list[str]
    scopes: list[Group | None] = field(default_factory=list)

    def inputs(self, place: int) -> tuple[tuple[Any, ...], tuple[str, ...]]:
        """The recorded shapes and formats of its inputs; of a list of tensors, whose format is not recorded, each with
        the usual one."""
        shapes = read_shapes(self._text(self.timeline.trace.dims, place))
        dtypes = read_types(self._text(self.timeline.trace.types, place))
        if shapes and dtypes and self.names[place] in _JOINS and isinstance(shapes[0], list) and shapes[0]:
            first = shapes[0]
            return (*first, *shapes[1:]), (*[self.usual] * len(first), *dtypes[1:])
        return shapes, dtypes

    @cached_property
    def usual(self) -> str:
        """The format of most products; fp32 where there are none."""
        rows = [place for place, name in enumerate(self.names) if find_op_kind(name) == "product"]
        found = Counter(next((each for each in self.inputs(place)[1] if each in _REAL), "") for place in rows)
        return next((name for name, _ in found.most_common() if name), "fp32")

    def concrete(self, place: int) -> str:
        """Its recorded arguments that are no tensors."""
        return self._text(self.timeline.trace.extra, place)

    def key(self, place: int) -> tuple[Any, ...]:
        """What operators share that are counted as one: name and inputs."""
        trace, row, name = self.timeline.trace, self.rows[place], self.names[place]
        arguments = int(trace.extra[row]) if find_op_kind(name) in ("attention", "convolution") else -1
        return name, int(trace.dims[row]), int(trace.types[row]), arguments

    def _text(self, column: np.ndarray, place: int) -> str:
        code = column[self.rows[place]]
        return self.timeline.trace.texts[code] if code >= 0 else ""


def build_tree(timeline: Timeline) -> OperatorTree:
    """The operators with their scopes."""
    trace = timeline.trace
    rows = trace.of(OP)
    rows = rows[np.lexsort((-trace.end[rows], trace.start[rows]))]  # of those that begin together, the one around first
    tree = OperatorTree(
        timeline,
        rows,
        find_parents(trace, rows).tolist(),
        [trace.names[code] for code in trace.name[rows].tolist()],
    )
    forward = _find_forward(tree)
    marked: dict[int, Group] = dict.fromkeys(_find_written_norms(tree), "norms")
    marked |= dict.fromkeys(_find_output_layers(tree), "output")
    updates = _find_updates(timeline, rows)
    for place, (name, parent) in enumerate(zip(tree.names, tree.parents, strict=True)):
        scope: Group | None = None
        if updates[place]:
            scope = "optimizer"
        elif name.startswith(_BACKWARD):
            scope = tree.scopes[forward[place]] if place in forward else None
        elif parent >= 0:
            scope = tree.scopes[parent]
        if scope is None and not name.startswith("autograd::"):
            scope = marked.get(place) or find_scope(name)
        tree.scopes.append(scope)
    return tree


def _find_updates(timeline: Timeline, rows: np.ndarray) -> list[bool]:
    """Whether an optimizer's step called each operator."""
    spans = timeline.times(timeline.named(OPTIMIZER_STEP, ANNOTATION))
    start = timeline.trace.start[rows]
    return [*(intervals.measure_within(spans, start, start + 0.01) > 0.005)]


def _find_forward(tree: OperatorTree) -> dict[int, int]:
    """For each backward node its forward operator: the last one before it with the node's number."""
    nodes = tree.timeline.trace.node[tree.rows].tolist()
    made: dict[int, list[int]] = defaultdict(list)
    for place, (node, name, parent) in enumerate(zip(nodes, tree.names, tree.parents, strict=True)):
        inside = parent >= 0 and tree.names[parent].startswith(_BACKWARD)
        if node >= 0 and not inside and not name.startswith(_BACKWARD):
            made[node].append(place)
    found = {}
    for place, (node, name) in enumerate(zip(nodes, tree.names, strict=True)):
        if node >= 0 and name.startswith(_BACKWARD):
            before = made.get(node, [])
            if at := bisect_left(before, place):
                found[place] = before[at - 1]
    return found


def _find_output_layers(tree: OperatorTree) -> set[int]:
    """The products whose result a loss takes: the last one before it on its thread, as wide as the loss."""
    threads = tree.timeline.trace.thread[tree.rows].tolist()
    last: dict[int, int] = {}
    found = set()
    for place, (name, parent, thread) in enumerate(zip(tree.names, tree.parents, threads, strict=True)):
        around = tree.names[parent] if parent >= 0 else ""
        if find_op_kind(name) == "product":
            if find_op_kind(around) != "product":
                last[thread] = place
        elif find_scope(name) == "output" and find_scope(around) != "output" and thread in last:
            product = last[thread]
            sized = product_shape(tree.names[product], tree.inputs(product)[0])
            width = next((each[-1] for each in tree.inputs(place)[0] if isinstance(each, list) and each), 0)
            if sized is not None and (sized[2] == width or name.startswith("triton_")):
                found.add(product)
    return found


_ROOT_MEAN_SQUARE = ("aten::pow", "aten::mean", "aten::add", "aten::rsqrt")
_MOST_SCALINGS = 2


def _find_written_norms(tree: OperatorTree) -> set[int]:
    """The operators of norms that a model writes out, as those of Hugging Face do: the mean of squares, the root, and
    the products with it and with the gain; casts may lie between."""
    threads = tree.timeline.trace.thread[tree.rows].tolist()
    found = set[int]()
    begun: dict[int, list[int]] = {}
    scalings: dict[int, int] = {}
    for place, (name, parent, thread) in enumerate(zip(tree.names, tree.parents, threads, strict=True)):
        if (parent >= 0 and tree.names[parent].startswith(("aten::", _BACKWARD))) or not name.startswith("aten::"):
            continue
        so_far = begun.setdefault(thread, [])
        if name == "aten::mul" and scalings.get(thread):
            found.add(place)
            scalings[thread] -= 1
        elif name in ("aten::to", "aten::type_as"):
            continue
        elif len(so_far) < len(_ROOT_MEAN_SQUARE) and name == _ROOT_MEAN_SQUARE[len(so_far)]:
            so_far.append(place)
            if len(so_far) == len(_ROOT_MEAN_SQUARE):
                found.update(so_far)
                begun[thread], scalings[thread] = [], _MOST_SCALINGS
        else:
            begun[thread] = [place] if name == _ROOT_MEAN_SQUARE[0] else []
            scalings[thread] = 0
    return found


# --- time


def _list_own_spans(tree: OperatorTree) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """When each operator ran itself and none that it called: starts, ends and places."""
    trace, rows = tree.timeline.trace, tree.rows
    lane = trace.process[rows].astype(np.int64) << 32 | trace.thread[rows]
    start, end = trace.start[rows], trace.end[rows]
    found: list[tuple[float, float, int]] = []
    for each in np.unique(lane):
        places = np.flatnonzero(lane == each)
        places = places[np.lexsort((-end[places], start[places]))]
        calls: list[tuple[int, float]] = []
        now = -math.inf
        for place, begins, ends in zip(places.tolist(), start[places].tolist(), end[places].tolist(), strict=True):
            while calls and calls[-1][1] <= begins:
                done, until = calls.pop()
                found.append((now, until, done))
                now = max(now, until)
            if calls:
                found.append((now, begins, calls[-1][0]))
                ends = min(ends, calls[-1][1])
            now = max(now, begins)
            calls.append((place, ends))
        for done, until in reversed(calls):
            found.append((now, until, done))
            now = max(now, until)
    some = [span for span in found if span[1] > span[0]]
    if not some:
        return np.empty(0), np.empty(0), np.empty(0, dtype=np.int64)
    low, high, place_of = zip(*some, strict=True)
    return np.array(low), np.array(high), np.array(place_of)


def measure_groups(timeline: Timeline) -> list[GroupTime]:
    """The groups of an average step, in the order of `GROUPS`, those without time and operators left out."""
    tree = build_tree(timeline)
    gather = _gather_device if timeline.on_device else _gather_host
    spans, operators = gather(tree)
    spans["communication"] = intervals.join(spans.get("communication", np.empty((0, 2))), timeline.communication)
    taken = np.empty((0, 2)) if timeline.on_device else timeline.data_loading
    order: tuple[Group, ...] = (*_COMPUTE, "other", "communication", "copies")
    if not timeline.on_device:
        order = (*_COMPUTE, "copies", "communication", "other")
    found: dict[Group, float] = {}
    for group in order:
        own = intervals.remove(spans.get(group, np.empty((0, 2))), taken)
        taken = intervals.join(taken, own)
        found[group] = timeline.overlap_ms(own)
    return [
        GroupTime(group, found[group], tuple(sorted(operators[group], key=lambda each: -each.ms)))
        for group in GROUPS
        if found[group] > 0 or operators[group]
    ]


@dataclass(frozen=True)
class CallWork:
    """FLOP and bytes of a call; None where its shapes do not show them."""

    flop: float | None = None
    bytes: float | None = None


NO_WORK = CallWork(0.0, 0.0)

SMALL_BYTES = 1024.0
"""Operators that move less do not do the work of the one that called them, if its shapes are not known."""


def count_call(operator: Operator) -> CallWork:
    """FLOP and bytes of one call of an operator by itself, as if it called no others."""
    flop, moved = count_work(operator)
    if moved is None and operator.name.startswith("aten::"):  # numbers without a dimension, or no input at all
        moved = count_traffic(operator.name, operator.shapes, operator.dtypes)
    if flop is None and moved is not None:
        flop = count_pointwise(operator.name, operator.shapes) if moved else 0.0
    return CallWork(flop, moved)


class _Gathering:
    """Operators while they are summed up, those of a group with the same name and shapes as one."""

    def __init__(self, tree: OperatorTree) -> None:
        self._tree = tree
        self._found: dict[tuple[Any, ...], tuple[Group, Operator, list[float]]] = {}
        self._counted: dict[tuple[Any, ...], CallWork] = {}

    def describe(self, place: int, kernel: str = "") -> Operator:
        """An operator of the host without its numbers."""
        tree, name = self._tree, self._tree.names[place]
        known = find_op_kind(name) or ("elementwise" if name.startswith(("aten::", "triton_")) else "other")
        shapes, dtypes = tree.inputs(place)
        return Operator(name, known, shapes, dtypes, 0.0, 0.0, 0.0, kernel, concrete=tree.concrete(place))

    def count(self, place: int) -> CallWork:
        """The work of a call by itself."""
        key = self._tree.key(place)
        if key not in self._counted:
            self._counted[key] = count_call(self.describe(place))
        return self._counted[key]

    def add(self, group: Group, place: int, us: float, work: CallWork, kernel: str = "", *, calls: float = 1.0) -> None:
        """A call of an operator of the host, or time of it; a place of -1 stands for a kernel that none launched."""
        key = (group, *self._tree.key(place)) if place >= 0 else (group, kernel)
        if key not in self._found:
            made = self.describe(place, kernel) if place >= 0 else Operator(kernel, "other", (), (), 0, 0, 0, kernel)
            self._found[key] = group, made, [0.0] * 5
        numbers = self._found[key][2]
        for at, value in enumerate((calls, us, float(bool(kernel)), work.flop or 0.0, work.bytes or 0.0)):
            numbers[at] += value
        if work.bytes is None:
            numbers[4] = math.nan

    def list_groups(self) -> dict[Group, list[Operator]]:
        """The operators of each group, as those of an average step."""
        timeline = self._tree.timeline
        steps, found = len(timeline.kept), defaultdict[Group, list[Operator]](list)
        for group, operator, (calls, us, kernels, flop, moved) in self._found.values():
            known = not math.isnan(moved)
            found[group].append(
                replace(
                    operator,
                    calls=calls / steps,
                    ms=timeline.per_step(us),
                    kernels=kernels / steps,
                    flop=flop / steps if known else None,
                    bytes=moved / steps if known else None,
                )
            )
        return found


_Gathered = tuple[dict[Group, "np.ndarray"], dict[Group, list[Operator]]]


def _gather_host(tree: OperatorTree) -> _Gathered:
    """Operators of a CPU with the time that they spent themselves, when each group ran."""
    timeline, gathering = tree.timeline, _Gathering(tree)
    low, high, place_of = _list_own_spans(tree)
    first, last = timeline.window
    low, high = np.clip(low, first, last), np.clip(high, first, last)
    spent = np.bincount(place_of, high - low, minlength=len(tree.rows)).tolist() if len(place_of) else []
    start = timeline.trace.start[tree.rows].tolist()
    works = _count_once(tree, gathering)
    of_group: dict[Group, list[int]] = defaultdict(list)
    for place, us in enumerate(spent):
        begins = first <= start[place] < last
        if not begins and us <= 0:
            continue
        group = _group_of(tree, gathering, place)
        of_group[group].append(place)
        work = works.get(place, NO_WORK) if begins else NO_WORK
        gathering.add(group, place, us, work, calls=float(begins and place in works))
    spans = {}
    for group, places in of_group.items():
        mine = np.isin(place_of, places)
        spans[group] = intervals.unite(low[mine], high[mine])
    return spans, gathering.list_groups()


def _count_once(tree: OperatorTree, gathering: _Gathering) -> dict[int, CallWork]:
    """The work of each operator that has work of its own: of those that others do it for, nothing."""
    inner_flop, inner_bytes = [0.0] * len(tree.rows), [0.0] * len(tree.rows)
    found = {}
    for place in reversed(range(len(tree.rows))):
        name, work = tree.names[place], NO_WORK
        if _COMPILED.search(name):
            found[place] = CallWork()
        flop, moved = inner_flop[place], inner_bytes[place]
        if name.startswith(("aten::", "triton_", "extern_kernels", "_", "shardway")):
            own = gathering.count(place)
            computes = find_op_kind(name) is not None and bool(own.flop)
            if computes:
                by_others = flop >= 0.5 * (own.flop or 0.0)
            else:
                by_others = moved >= max(0.5 * (own.bytes or 0.0), SMALL_BYTES if own.bytes is None else 1.0)
            if not by_others and (own.bytes is None or own.bytes > 0):
                found[place] = work = own
        parent = tree.parents[place]
        if parent >= 0:
            computed = work.flop or 0.0 if find_op_kind(name) is not None else 0.0
            inner_flop[parent] += flop + computed
            inner_bytes[parent] += moved + (work.bytes or 0.0)
    return found


def _group_of(tree: OperatorTree, gathering: _Gathering, place: int) -> Group:
    name = tree.names[place]
    if CPU_COMMUNICATION.search(name):
        return "communication"
    moves = name.startswith("aten::") and bool(gathering.count(place).bytes)
    return find_group(name, tree.inputs(place)[1], tree.scopes[place], moves=moves)


def _gather_device(tree: OperatorTree) -> _Gathered:
    """Kernels by the operators that launched them; copies that none of these is, when each group ran."""
    timeline, gathering, trace = tree.timeline, _Gathering(tree), tree.timeline.trace
    place_of = {row: place for place, row in enumerate(tree.rows.tolist())}
    first, last = timeline.window
    of_group: dict[Group, list[int]] = defaultdict(list)
    seen: set[int] = set()
    columns = (timeline.rows, timeline.op, timeline.is_optimizer, timeline.is_communication)
    for row, op, updates, communicates in zip(*(each.tolist() for each in columns), strict=True):
        if not first <= trace.start[row] < last:
            continue
        kernel, place, us = trace.names[trace.name[row]], place_of.get(op, -1), float(trace.duration[row])
        if trace.category[row] != KERNEL:
            size = float(max(trace.bytes[row], 0.0))
            both = 2.0 if "DtoD" in kernel or "Device -> Device" in kernel else 1.0
            is_copy = trace.category[row] == MEMCPY
            gathering.add("copies", -1, us, CallWork(0.0, size * both if is_copy else size), kernel)
            of_group["copies"].append(row)
            continue
        group: Group = "communication" if communicates else "optimizer" if updates else find_kernel_group(kernel)
        if place < 0 or communicates or _COMPILED.search(tree.names[place]):
            gathering.add(group, -1, us, CallWork(), kernel)
        else:
            own = _group_of(tree, gathering, place)
            group = "optimizer" if updates else group if own == "other" else own
            work, is_first = gathering.count(place), place not in seen
            work = work if is_first or work.bytes is None else NO_WORK
            gathering.add(group, place, us, work, kernel, calls=float(is_first))
            seen.add(place)
        of_group[group].append(row)
    spans = {group: timeline.times(np.array(rows)) for group, rows in of_group.items()}
    return spans, gathering.list_groups()
