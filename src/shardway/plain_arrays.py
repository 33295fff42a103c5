"""What reports, advice and telemetry need of numpy, in plain Python: numpy itself where it is installed.

numpy takes 73 MB of the 44 MB that the rest of an installation on a login node takes, so that it comes with torch
(`shardway[torch]`). Reports of runs are looked at on login nodes as well; there these arrays compute the same numbers,
some fifty times slower, which is a second for the samples of an hour.

Invariants:
- `find_arrays()` has the same names with the same meaning, whichever it returns: tests compare the two. A name that the
  plain part lacks is an AttributeError, and a test looks that no caller uses one.
- Arrays have one or two axes. Results are float64 where numpy keeps float32, so they differ in the eighth digit; random
  numbers are others.
"""

from __future__ import annotations

import bisect
import math
import operator
import random
from array import array as packed_array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any


def find_arrays() -> Any:
    """numpy, or where it is not installed the part of it that this module has."""
    try:
        import numpy
    except ImportError:
        return _PLAIN
    return numpy


# --- number formats


@dataclass(frozen=True)
class NumberFormat:
    """A format by its letter in the module `array`; called, it makes one number."""

    name: str
    code: str

    @property
    def is_float(self) -> bool:
        return self.code in "fd"

    def __call__(self, value: Any) -> Any:
        return self.convert([value])[0]

    def convert(self, items: Sequence[Any]) -> list[Any]:
        """Numbers in this format; unsigned ones wrap around."""
        if self.code == "?":
            return [bool(item) for item in items]
        if self.code == "d":
            return [float(item) for item in items]
        if self.code == "f":
            return packed_array("f", items).tolist()
        bits = 8 * packed_array(self.code).itemsize
        if self.code.isupper():
            return [int(item) & ((1 << bits) - 1) for item in items]
        return [int(item) for item in items]


_FLOAT64, _FLOAT32, _BOOL = NumberFormat("float64", "d"), NumberFormat("float32", "f"), NumberFormat("bool", "?")
_INT64, _INT32 = NumberFormat("int64", "q"), NumberFormat("int32", "i")
_UINT8, _UINT16, _UINT32 = NumberFormat("uint8", "B"), NumberFormat("uint16", "H"), NumberFormat("uint32", "I")
_FORMATS: dict[Any, NumberFormat] = {
    **{each.name: each for each in (_FLOAT64, _FLOAT32, _BOOL, _INT64, _INT32, _UINT8, _UINT16, _UINT32)},
    float: _FLOAT64,
    int: _INT64,
    bool: _BOOL,
    None: _FLOAT64,
    "<i4": _INT32,
    "<u1": _UINT8,
    "<u2": _UINT16,
    "<u4": _UINT32,
    "d": _FLOAT64,
    "q": _INT64,
    "B": _UINT8,
}


def _format_of(dtype: Any) -> NumberFormat:
    return dtype if isinstance(dtype, NumberFormat) else _FORMATS[dtype]


def _describe_range(dtype: Any) -> Any:
    """As numpy.iinfo."""
    form = _format_of(dtype)
    bits = 8 * packed_array(form.code).itemsize - (not form.code.isupper())
    return SimpleNamespace(max=(1 << bits) - 1, min=0 if form.code.isupper() else -(1 << bits))


# --- arrays


def _divide(a: Any, b: Any) -> float:
    try:
        return a / b
    except ZeroDivisionError:
        return math.nan if a == 0 or a != a else math.copysign(math.inf, a)


class PlainArray:
    """Numbers of one or two axes, row by row in a list."""

    __slots__ = ("dtype", "items", "shape")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, items: list[Any], dtype: NumberFormat, shape: tuple[int, ...] | None = None) -> None:
        self.items, self.dtype = items, dtype
        self.shape = (len(items),) if shape is None else shape

    # --- its shape

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return len(self.items)

    @property
    def nbytes(self) -> int:
        return len(self.tobytes())

    @property
    def T(self) -> PlainArray:
        if self.ndim == 1:
            return self
        rows, columns = self.shape
        items = [self.items[row * columns + column] for column in range(columns) for row in range(rows)]
        return PlainArray(items, self.dtype, (columns, rows))

    def reshape(self, *shape: int) -> PlainArray:
        known = math.prod(count for count in shape if count >= 0)
        counts = tuple(count if count >= 0 else (len(self.items) // known if known else 0) for count in shape)
        return PlainArray(self.items, self.dtype, counts)

    def copy(self) -> PlainArray:
        return PlainArray(list(self.items), self.dtype, self.shape)

    def astype(self, dtype: Any) -> PlainArray:
        form = _format_of(dtype)
        items: Any = form.convert(self.items)
        if form.code in "BHI":  # small ones are kept for long
            items = packed_array(form.code, items)
        return PlainArray(items, form, self.shape)

    def view(self, dtype: Any) -> PlainArray:
        """The same bytes as numbers of another format; a last axis becomes as much shorter as these are larger."""
        form = _format_of(dtype)
        items = packed_array(form.code, self.tobytes()).tolist()
        return PlainArray(items, form, (*self.shape[:-1], len(items) // max(1, math.prod(self.shape[:-1]))))

    def tobytes(self) -> bytes:
        return packed_array("B" if self.dtype.code == "?" else self.dtype.code, self.items).tobytes()

    def tolist(self) -> list[Any]:
        return list(self.items) if self.ndim == 1 else [row.tolist() for row in self]

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items) if self.ndim == 1 else (self[row] for row in range(len(self)))

    def __bool__(self) -> bool:
        if len(self.items) != 1:
            raise ValueError("the truth of several numbers is ambiguous")
        return bool(self.items[0])

    def __repr__(self) -> str:
        return f"array({self.tolist()!r})"

    # --- parts of it

    def _list_places(self, key: Any, count: int) -> list[int]:
        """The places along an axis of `count` that a key names."""
        if isinstance(key, slice):
            return list(range(*key.indices(count)))
        if isinstance(key, PlainArray) and key.dtype is _BOOL:
            return [place for place, chosen in enumerate(key.items) if chosen]
        items = key.items if isinstance(key, PlainArray) else key
        return [place + count if place < 0 else place for place in items]

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, tuple):
            return self._get_by_axes(*key)
        if isinstance(key, int):
            if self.ndim == 1:
                return self.items[key]
            width, row = self.shape[1], range(self.shape[0])[key]
            return PlainArray(self.items[row * width : (row + 1) * width], self.dtype)
        if self.ndim == 1:
            if isinstance(key, slice):
                return PlainArray(self.items[key], self.dtype)
            found = [self.items[place] for place in self._list_places(key, len(self))]
            shape = key.shape if isinstance(key, PlainArray) and key.dtype is not _BOOL else None
            return PlainArray(found, self.dtype, shape)
        if isinstance(key, PlainArray) and key.ndim == 2:
            return PlainArray([item for item, chosen in zip(self.items, key.items, strict=True) if chosen], self.dtype)
        width, places = self.shape[1], self._list_places(key, len(self))
        chosen = [item for row in places for item in self.items[row * width : (row + 1) * width]]
        return PlainArray(chosen, self.dtype, (len(places), width))

    def _get_by_axes(self, first: Any, second: Any) -> Any:
        rows = self[first]
        if second is None:
            return PlainArray(rows.items, self.dtype, (len(rows), 1))
        if isinstance(first, int):
            return rows[second]
        if isinstance(second, int):
            width = rows.shape[1]
            return PlainArray(rows.items[range(width)[second] :: width], self.dtype)
        return rows.T[second].T

    def __setitem__(self, key: Any, value: Any) -> None:
        if self.ndim == 2:
            width = self.shape[1]
            rows = [range(len(self))[key]] if isinstance(key, int) else self._list_places(key, len(self))
            given = _spread(value, (len(rows), width))
            for at, row in enumerate(rows):
                self.items[row * width : (row + 1) * width] = self.dtype.convert(given[at * width : (at + 1) * width])
        elif isinstance(key, int):
            self.items[key] = self.dtype(value)
        else:
            places = self._list_places(key, len(self))
            given = self.dtype.convert(_spread(value, (len(places),)))
            for place, item in zip(places, given, strict=True):
                self.items[place] = item

    # --- element by element

    def _with(self, other: Any, work: Callable[[Any, Any], Any], *, swapped: bool = False, truth: bool = False) -> Any:
        if isinstance(other, list | tuple):
            other = _make(other)
        if isinstance(other, PlainArray):
            shape = _common_shape(self.shape, other.shape)
            mine, theirs = _spread(self, shape), _spread(other, shape)
            pairs = zip(theirs, mine, strict=True) if swapped else zip(mine, theirs, strict=True)
            items, form = [work(a, b) for a, b in pairs], other.dtype
        else:
            shape = self.shape
            items = [work(other, item) for item in self.items] if swapped else [work(i, other) for i in self.items]
            form = _FLOAT64 if isinstance(other, float) else _BOOL if isinstance(other, bool) else _INT64
        if truth:
            return PlainArray(items, _BOOL, shape)
        is_float = self.dtype.is_float or form.is_float or work is _divide
        if is_float:
            return PlainArray([float(item) for item in items], _FLOAT64, shape)
        logical = work in (operator.and_, operator.or_, operator.xor) and self.dtype is _BOOL and form is _BOOL
        return PlainArray(items, _BOOL if logical else _INT64, shape)

    def __add__(self, other: Any) -> Any:
        return self._with(other, operator.add)

    def __radd__(self, other: Any) -> Any:
        return self._with(other, operator.add, swapped=True)

    def __sub__(self, other: Any) -> Any:
        return self._with(other, operator.sub)

    def __rsub__(self, other: Any) -> Any:
        return self._with(other, operator.sub, swapped=True)

    def __mul__(self, other: Any) -> Any:
        return self._with(other, operator.mul)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Any:
        return self._with(other, _divide)

    def __rtruediv__(self, other: Any) -> Any:
        return self._with(other, _divide, swapped=True)

    def __floordiv__(self, other: Any) -> Any:
        return self._with(other, operator.floordiv)

    def __and__(self, other: Any) -> Any:
        return self._with(other, operator.and_)

    def __or__(self, other: Any) -> Any:
        return self._with(other, operator.or_)

    def __xor__(self, other: Any) -> Any:
        return self._with(other, operator.xor)

    def __rshift__(self, other: Any) -> Any:
        return self._with(other, operator.rshift)

    def __lshift__(self, other: Any) -> Any:
        return self._with(other, operator.lshift)

    def __eq__(self, other: object) -> Any:
        return self._with(other, operator.eq, truth=True)

    def __ne__(self, other: object) -> Any:
        return self._with(other, operator.ne, truth=True)

    def __lt__(self, other: Any) -> Any:
        return self._with(other, operator.lt, truth=True)

    def __le__(self, other: Any) -> Any:
        return self._with(other, operator.le, truth=True)

    def __gt__(self, other: Any) -> Any:
        return self._with(other, operator.gt, truth=True)

    def __ge__(self, other: Any) -> Any:
        return self._with(other, operator.ge, truth=True)

    def __neg__(self) -> PlainArray:
        return PlainArray([-item for item in self.items], self.dtype, self.shape)

    def __invert__(self) -> PlainArray:
        if self.dtype is _BOOL:
            return PlainArray([not item for item in self.items], _BOOL, self.shape)
        return PlainArray([~item for item in self.items], self.dtype, self.shape)

    def clip(self, least: Any = -math.inf, most: Any = math.inf) -> PlainArray:
        items = [item if item != item else min(max(item, least), most) for item in self.items]
        return PlainArray(items, self.dtype, self.shape)

    # --- over an axis

    def _reduce(self, axis: int | None, work: Callable[[Sequence[Any]], Any], form: NumberFormat | None = None) -> Any:
        if axis is None or self.ndim == 1:
            return work(self.items)
        lines = [row.items for row in (self.T if axis == 0 else self)]
        return PlainArray([work(line) for line in lines], form or self.dtype)

    def sum(self, axis: int | None = None) -> Any:
        return self._reduce(axis, math.fsum if self.dtype.is_float else sum, None if self.dtype.is_float else _INT64)

    def mean(self, axis: int | None = None, dtype: Any = None) -> Any:
        return self._reduce(axis, _mean, _FLOAT64)

    def var(self) -> float:
        middle = _mean(self.items)
        return _mean([(item - middle) ** 2 for item in self.items])

    def std(self) -> float:
        return math.sqrt(self.var())

    def max(self, axis: int | None = None) -> Any:
        return self._reduce(axis, max)

    def min(self, axis: int | None = None) -> Any:
        return self._reduce(axis, min)

    def any(self, axis: int | None = None) -> Any:
        return self._reduce(axis, any, _BOOL)

    def all(self, axis: int | None = None) -> Any:
        return self._reduce(axis, all, _BOOL)

    def searchsorted(self, sought: Any, side: str = "left") -> Any:
        return _search(self, sought, side)

    def argmax(self) -> int:
        return self.items.index(max(self.items))

    def argmin(self) -> int:
        return self.items.index(min(self.items))


def _mean(items: Sequence[Any]) -> float:
    return math.fsum(items) / len(items) if len(items) else math.nan


def _common_shape(mine: tuple[int, ...], theirs: tuple[int, ...]) -> tuple[int, ...]:
    if mine == theirs:
        return mine
    a, b = ((1,) * (2 - len(shape)) + shape for shape in (mine, theirs))
    shape = tuple(x if y == 1 else y for x, y in zip(a, b, strict=True))
    if any(count not in (1, whole) for part in (a, b) for count, whole in zip(part, shape, strict=True)):
        raise ValueError(f"arrays of {mine} and {theirs} numbers do not go together")
    return shape if max(len(mine), len(theirs)) == 2 else shape[1:]


def _spread(value: Any, shape: tuple[int, ...]) -> list[Any]:
    """The numbers of an array of this shape that repeats a value along the axes in which it has one."""
    if not isinstance(value, PlainArray):
        if not isinstance(value, list | tuple):
            return [value] * math.prod(shape)
        value = _make(value)
    if value.shape == shape:
        return list(value.items)
    if len(value.items) == 1:
        return value.items * math.prod(shape)
    if len(shape) == 1 or value.shape in ((shape[-1],), (1, shape[-1])):
        if len(value.items) != shape[-1]:
            raise ValueError(f"{value.shape} numbers for {shape} places")
        return list(value.items) * (shape[0] if len(shape) == 2 else 1)
    return [item for item in value.items for _ in range(shape[1])]


# --- what makes arrays


def _make(given: Any, dtype: Any = None) -> PlainArray:
    """As numpy.array: of numbers, rows of numbers, or an array."""
    if isinstance(given, PlainArray):
        return given.copy() if dtype is None else given.astype(dtype)
    rows = list(given)
    if rows and isinstance(rows[0], list | tuple | PlainArray):
        lines = [list(row) for row in rows]
        flat, shape = [item for line in lines for item in line], (len(lines), len(lines[0]))
    else:
        flat, shape = rows, (len(rows),)  # type: ignore[assignment]
    if dtype is None:
        kinds = {type(item) for item in flat}
        dtype = bool if kinds == {bool} else int if kinds and kinds <= {int, bool} else float
    form = _format_of(dtype)
    return PlainArray(form.convert(flat), form, shape)


def _as_array(given: Any, dtype: Any = None) -> PlainArray:
    if isinstance(given, PlainArray) and (dtype is None or _format_of(dtype) is given.dtype):
        return given
    return _make(given, dtype)


def _from_buffer(buffer: Any, dtype: Any, count: int = -1, offset: int = 0) -> PlainArray:
    form, view = _format_of(dtype), memoryview(buffer).cast("B")
    size = packed_array(form.code).itemsize
    end = len(view) if count < 0 else offset + count * size
    if end > len(view):
        raise ValueError("the buffer is smaller than what is asked for")
    return PlainArray(packed_array(form.code, bytes(view[offset:end])).tolist(), form)


def _full(shape: int | tuple[int, ...], value: Any, dtype: Any = None) -> PlainArray:
    counts = shape if isinstance(shape, tuple) else (shape,)
    form = _format_of(type(value) if dtype is None else dtype)
    return PlainArray([form(value)] * math.prod(counts), form, counts)


def _range(stop: int) -> PlainArray:
    return PlainArray(list(range(stop)), _INT64)


def _linspace(first: float, last: float, count: int) -> PlainArray:
    step = (last - first) / (count - 1) if count > 1 else 0.0
    items = [first + place * step for place in range(count)]
    return PlainArray([*items[:-1], float(last)] if count > 1 else items, _FLOAT64)


def _concatenate(parts: Iterable[Any], axis: int = 0) -> PlainArray:
    arrays = [_as_array(part) for part in parts]
    if axis == 1:
        return _concatenate([each.T for each in arrays]).T
    whole = [each for each in arrays if len(each)] or arrays[:1]
    form = next((each.dtype for each in whole if each.dtype.is_float), whole[0].dtype)
    items: Any = form.convert([item for each in whole for item in each.items])
    if form.is_float:  # times of all samples are kept for long
        items = packed_array(form.code, items)
    return PlainArray(items, form, (sum(map(len, whole)), *whole[0].shape[1:]))


def _append(given: PlainArray, value: Any) -> PlainArray:
    return PlainArray([*given.items, given.dtype(value)], given.dtype)


# --- what is computed of arrays


def _each(work: Callable[[Any], Any], form: NumberFormat | None = None) -> Callable[..., Any]:
    def apply(given: Any) -> Any:
        if not isinstance(given, PlainArray | list | tuple):
            return work(given)
        values = _as_array(given)
        return PlainArray([work(item) for item in values.items], form or values.dtype, values.shape)

    return apply


def _where(condition: PlainArray, yes: Any, no: Any) -> PlainArray:
    shape = condition.shape
    yes, no = (_make(each) if isinstance(each, list) else each for each in (yes, no))
    for other in (yes, no):
        if isinstance(other, PlainArray):
            shape = _common_shape(shape, other.shape)
    chosen = zip(_spread(condition, shape), _spread(yes, shape), _spread(no, shape), strict=True)
    items = [a if which else b for which, a, b in chosen]
    forms = [each.dtype if isinstance(each, PlainArray) else _format_of(type(each)) for each in (yes, no)]
    form = _FLOAT64 if any(each.is_float for each in forms) else _BOOL if forms == [_BOOL, _BOOL] else _INT64
    return PlainArray(form.convert(items), form, shape)


def _nan_to_num(given: PlainArray, nan: float = 0.0) -> PlainArray:
    most = 1.7976931348623157e308
    items = [nan if item != item else min(max(item, -most), most) for item in given.items]
    return PlainArray(items, given.dtype, given.shape)


def _cumsum(given: Any, axis: int | None = None) -> PlainArray:
    values = _as_array(given)
    if values.ndim == 1:
        return PlainArray(list(accumulate(values.items)), values.dtype)
    lines = [item for row in (values if axis == 1 else values.T) for item in accumulate(row.items)]
    return (
        PlainArray(lines, values.dtype, values.shape)
        if axis == 1
        else PlainArray(lines, values.dtype, values.T.shape).T
    )


def _diff(given: Any, prepend: float | None = None) -> PlainArray:
    items = list(_as_array(given).items)
    items = items if prepend is None else [prepend, *items]
    return _make([after - before for before, after in pairwise(items)], None if len(items) > 1 else float)


def _search(values: Any, sought: Any, side: str = "left") -> Any:
    items = values.items if isinstance(values, PlainArray) else values
    find = bisect.bisect_left if side == "left" else bisect.bisect_right
    if isinstance(sought, PlainArray | list | tuple):
        wanted = _as_array(sought)
        return PlainArray([find(items, each) for each in wanted.items], _INT64, wanted.shape)
    return find(items, sought)


def _unique(given: Any, return_counts: bool = False) -> Any:
    counts: dict[Any, int] = {}
    values = _as_array(given)
    for item in values.items:
        counts[item] = counts.get(item, 0) + 1
    found = PlainArray(sorted(counts), values.dtype)
    return (found, PlainArray([counts[each] for each in found.items], _INT64)) if return_counts else found


def _quantile(given: Any, q: Any) -> Any:
    """By linear interpolation, as numpy does by default."""
    items = sorted(_as_array(given).items)

    def at(share: float) -> float:
        place = share * (len(items) - 1)
        low = min(int(place), len(items) - 1)
        high = min(low + 1, len(items) - 1)
        return float(items[low] + (items[high] - items[low]) * (place - low))

    return [at(each) for each in q] if isinstance(q, list | tuple) else at(q)


def _interpolate(at: Any, places: Sequence[float], values: Sequence[float]) -> Any:
    def find(where: float) -> float:
        if where <= places[0] or len(places) == 1:
            return float(values[0])
        if where >= places[-1]:
            return float(values[-1])
        after = bisect.bisect_right(places, where)
        before = after - 1
        slope = (values[after] - values[before]) / (places[after] - places[before])
        return values[before] + slope * (where - places[before])

    return _each(find, _FLOAT64)(at)


def _fit_line(at: PlainArray, values: PlainArray, degree: int) -> PlainArray:
    """Slope and intercept of the line with the least squares; `degree` is 1."""
    middle, mean = at.mean(), values.mean()
    away = at - middle
    slope = (away * (values - mean)).sum() / (away * away).sum()
    return PlainArray([slope, mean - slope * middle], _FLOAT64)


def _convolve(given: PlainArray, kernel: PlainArray, mode: str) -> PlainArray:
    """With `mode` "same": as many numbers as the longer one has, around the middle."""
    longer, shorter = sorted((given.items, kernel.items), key=len, reverse=True)
    begin, count = (len(shorter) - 1) // 2, len(longer)
    full = [
        math.fsum(shorter[back] * longer[at - back] for back in range(len(shorter)) if 0 <= at - back < count)
        for at in range(begin, begin + count)
    ]
    return PlainArray(full, _FLOAT64)


def _split(given: PlainArray, cuts: PlainArray) -> list[PlainArray]:
    return [given[low:high] for low, high in pairwise([0, *cuts.items, len(given)])]


def _split_evenly(given: PlainArray, parts: int) -> list[PlainArray]:
    count, more = divmod(len(given), parts)
    edges = list(accumulate((count + (part < more) for part in range(parts)), initial=0))
    return [given[low:high] for low, high in pairwise(edges)]


def _divide_where(a: PlainArray, b: PlainArray, out: PlainArray, where: PlainArray) -> PlainArray:
    found = zip(a.items, b.items, out.items, where.items, strict=True)
    return PlainArray([_divide(x, y) if chosen else old for x, y, old, chosen in found], _FLOAT64)


def _pick(choose: Callable[[Sequence[Any]], Any]) -> Callable[[Sequence[Any]], Any]:
    """As numpy.fmin and numpy.fmax: NaN only where nothing else is there."""

    def pick(items: Sequence[Any]) -> Any:
        known = [item for item in items if item == item]
        return choose(known) if known else math.nan

    return pick


def _reducer(work: Callable[[Sequence[Any]], Any]) -> SimpleNamespace:
    """As the methods `reduce` and `reduceat` of a function of numpy, along the first axis."""

    def reduce(given: Any, axis: int = 0) -> Any:
        return _as_array(given)._reduce(axis, work)

    def reduce_at(given: Any, starts: Any, axis: int = 0) -> PlainArray:
        values, places = _as_array(given), list(starts)
        # As numpy: where a part has no place, its first number stands for it.
        edges = [(low, max(high, low + 1)) for low, high in pairwise([*places, len(values)])]
        if values.ndim == 1:
            return PlainArray([work(values.items[low:high]) for low, high in edges], values.dtype)
        return _make([values[low:high]._reduce(0, work) for low, high in edges], values.dtype)

    return SimpleNamespace(reduce=reduce, reduceat=reduce_at)


class _Draws:
    """Random numbers from a seed: others than numpy's."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def integers(self, low: int, high: int, shape: tuple[int, int]) -> PlainArray:
        """Integers from `low` to below `high`."""
        span, draw = high - low, self._random.random
        return PlainArray([low + int(span * draw()) for _ in range(math.prod(shape))], _INT64, shape)


def _minimum(a: Any, b: Any) -> Any:
    return (b if isinstance(b, PlainArray) else a)._with(a if isinstance(b, PlainArray) else b, min)


def _nan_max(given: PlainArray, axis: int) -> Any:
    return given._reduce(axis, _pick(max))


def _sort_places(given: PlainArray, kind: str = "stable") -> PlainArray:
    return PlainArray(sorted(range(len(given)), key=given.items.__getitem__), _INT64)


_PLAIN = SimpleNamespace(
    nan=math.nan,
    inf=math.inf,
    float64=_FLOAT64,
    float32=_FLOAT32,
    int64=_INT64,
    int32=_INT32,
    uint8=_UINT8,
    uint16=_UINT16,
    uint32=_UINT32,
    iinfo=_describe_range,
    array=_make,
    asarray=_as_array,
    ascontiguousarray=_as_array,
    frombuffer=_from_buffer,
    full=_full,
    arange=_range,
    linspace=_linspace,
    concatenate=_concatenate,
    append=_append,
    zeros=lambda shape, dtype=float: _full(shape, 0, dtype),
    ones=lambda shape, dtype=float: _full(shape, 1, dtype),
    empty=lambda shape, dtype=float: _full(shape, 0, dtype),
    isfinite=_each(math.isfinite, _BOOL),
    abs=_each(operator.abs),
    rint=_each(lambda item: float(round(item)), _FLOAT64),
    isin=lambda given, names: _each(set(names).__contains__, _BOOL)(given),
    flatnonzero=lambda given: PlainArray([place for place, item in enumerate(given.items) if item], _INT64),
    clip=lambda given, least, most: given.clip(least, most),
    median=lambda given: _quantile(given, 0.5),
    where=_where,
    nan_to_num=_nan_to_num,
    cumsum=_cumsum,
    diff=_diff,
    searchsorted=_search,
    unique=_unique,
    quantile=_quantile,
    interp=_interpolate,
    polyfit=_fit_line,
    convolve=_convolve,
    split=_split,
    array_split=_split_evenly,
    divide=_divide_where,
    minimum=_minimum,
    nanmax=_nan_max,
    argsort=_sort_places,
    add=_reducer(lambda items: math.fsum(items) if any(isinstance(item, float) for item in items) else sum(items)),
    fmin=_reducer(_pick(min)),
    fmax=_reducer(_pick(max)),
    random=SimpleNamespace(default_rng=_Draws),
)
