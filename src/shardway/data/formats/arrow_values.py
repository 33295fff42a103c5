"""Values of Arrow arrays as Python objects and NumPy arrays, a few rows at a time.

Invariants:
- Every offset is checked against the bytes that are there before it is used, since a file may be damaged and Arrow
  itself does not look: a wrong one raises WrongValue and never reads what lies beside.
- A value is a copy: it may be written to, and keeps no file or batch alive. Only the rows that are asked for are
  touched.

Text is str, binary is bytes, a list of numbers is a NumPy array (a Python list if a number of it is missing), any other
list is a list, a struct is a dict. Source of the layouts: Arrow Columnar Format, "Physical memory layout".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Take = Callable[[Sequence[int]], list[Any]]
"""The values of some rows of an array, in this order."""

_Code = Literal["i", "q"]
"""The width of an offset: 32 or 64 bits."""


class WrongValue(ValueError):
    """The bytes of an Arrow array contradict each other."""


def make_take(array: Any) -> Take:
    """The function that gives rows of a pyarrow.Array. Raises WrongValue, as does the function."""
    take = _make_present(array)
    if not array.null_count:
        return take
    bits = array.buffers()[0]
    if bits is None:  # the type "null", and unions
        return take
    valid, shift = memoryview(bits).cast("B"), array.offset
    if len(valid) * 8 < len(array) + shift:
        raise WrongValue("the mask of missing values is too short")

    def take_or_none(rows: Sequence[int]) -> list[Any]:
        there = [valid[(row + shift) >> 3] >> ((row + shift) & 7) & 1 for row in rows]
        values = iter(take([row for row, one in zip(rows, there, strict=True) if one]))
        return [next(values) if one else None for one in there]

    return take_or_none


def name_type(kind: Any) -> str:
    """The type of a field, of a pyarrow.DataType: "text", "bytes", "int", "float", "bool", "object", "list",
    "int32[]" (a list of numbers), "float32[28, 28]", or Arrow's own name."""
    import pyarrow as pa

    types = pa.types
    if isinstance(kind, pa.FixedShapeTensorType):
        return f"{np.dtype(kind.value_type.to_pandas_dtype()).name}{[kind.shape[axis] for axis in _axes(kind)]}"
    if isinstance(kind, pa.BaseExtensionType):
        return name_type(kind.storage_type)
    if types.is_dictionary(kind):
        return name_type(kind.value_type)
    if _is_number(kind):
        return "int" if types.is_integer(kind) else "float"
    if types.is_fixed_size_list(kind) and _is_number(kind.value_type):
        return f"{np.dtype(kind.value_type.to_pandas_dtype()).name}[{kind.list_size}]"
    if _is_list(kind):
        return f"{np.dtype(kind.value_type.to_pandas_dtype()).name}[]" if _is_number(kind.value_type) else "list"
    names = (
        (types.is_boolean, "bool"),
        (lambda each: str(each) in ("string", "large_string", "string_view"), "text"),
        (lambda each: str(each) in ("binary", "large_binary", "binary_view"), "bytes"),
        (types.is_fixed_size_binary, "bytes"),
        (types.is_fixed_size_list, "list"),
        (types.is_struct, "object"),
    )
    return next((name for is_kind, name in names if is_kind(kind)), str(kind))


def _make_present(array: Any) -> Take:
    """As `make_take`, of rows that are not missing."""
    import pyarrow as pa

    kind, types = array.type, pa.types
    if isinstance(kind, pa.FixedShapeTensorType):
        return _take_shaped(_make_present(array.storage), kind.shape, _axes(kind))
    if isinstance(kind, pa.BaseExtensionType):
        return _make_present(array.storage)
    if _is_number(kind):
        return _take_numbers(array)
    if types.is_boolean(kind):
        return _take_bools(array)
    if types.is_string(kind) or types.is_binary(kind):
        return _take_strings(array, "i", types.is_string(kind))
    if types.is_large_string(kind) or types.is_large_binary(kind):
        return _take_strings(array, "q", types.is_large_string(kind))
    if _is_list(kind):
        return _take_lists(array, "q" if types.is_large_list(kind) else "i")
    if types.is_fixed_size_list(kind):
        return _take_fixed_lists(array)
    if types.is_struct(kind):
        return _take_structs(array)
    if types.is_dictionary(kind):
        return _take_dictionary(array)
    return _take_others(array)


def _is_number(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def _is_list(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def _numbers(array: Any) -> npt.NDArray[Any]:
    """A view of an array of numbers; where one is missing it is anything."""
    dtype, content = np.dtype(array.type.to_pandas_dtype()), array.buffers()[1]
    if not len(array):
        return np.zeros(0, dtype)
    if content is None or content.size < (array.offset + len(array)) * dtype.itemsize:
        raise WrongValue("there are fewer numbers than rows")
    return np.frombuffer(content, dtype, len(array), array.offset * dtype.itemsize)


def _take_numbers(array: Any) -> Take:
    values = _numbers(array)
    if values.dtype.char == "e":  # memoryview has no 16-bit floats
        return lambda rows: values[list(rows)].tolist()
    view = memoryview(values.data)
    return lambda rows: [view[row] for row in rows]


def _take_bools(array: Any) -> Take:
    content, shift = array.buffers()[1], array.offset
    if content is None or content.size * 8 < len(array) + shift:
        return _refuse_unless_empty(array, "there are fewer values than rows")
    bits = memoryview(content).cast("B")
    return lambda rows: [bool(bits[(row + shift) >> 3] >> ((row + shift) & 7) & 1) for row in rows]


def _offsets(array: Any, code: _Code) -> Sequence[int]:
    """The offsets of an array, one more than it has rows."""
    content = array.buffers()[1]
    width = 4 if code == "i" else 8
    if content is None or content.size < (array.offset + len(array) + 1) * width:
        raise WrongValue("there are fewer offsets than rows")
    view = memoryview(content).cast("B")
    return view[array.offset * width : (array.offset + len(array) + 1) * width].cast(code)


def _take_strings(array: Any, code: _Code, is_text: bool) -> Take:
    if not len(array):
        return lambda rows: []
    offsets, content = _offsets(array, code), array.buffers()[2]
    data = memoryview(b"" if content is None else content).cast("B")
    size = len(data)

    def take(rows: Sequence[int]) -> list[Any]:
        found: list[Any] = []
        for row in rows:
            start, end = offsets[row], offsets[row + 1]
            if not 0 <= start <= end <= size:
                raise WrongValue(f"row {row} would go from byte {start} to {end} of {size}")
            try:
                found.append(str(data[start:end], "utf-8") if is_text else bytes(data[start:end]))
            except UnicodeDecodeError as error:
                raise WrongValue(f"the text of row {row} is not UTF-8 ({error.reason})") from error
        return found

    return take


def _take_lists(array: Any, code: _Code) -> Take:
    if not len(array):
        return lambda rows: []
    return _take_spans(array.values, _offsets(array, code))


def _take_fixed_lists(array: Any) -> Take:
    size, first = array.type.list_size, array.offset
    return _take_spans(array.values, range(first * size, (first + len(array)) * size + 1, size) if size else None)


def _take_spans(child: Any, offsets: Sequence[int] | None) -> Take:
    """Rows that are spans of another array; no `offsets`: every span is empty."""
    size = len(child)
    values = _numbers(child) if _is_number(child.type) and not child.null_count else None
    take_child = make_take(child) if values is None else None

    def take(rows: Sequence[int]) -> list[Any]:
        found: list[Any] = []
        for row in rows:
            start, end = (offsets[row], offsets[row + 1]) if offsets is not None else (0, 0)
            if not 0 <= start <= end <= size:
                raise WrongValue(f"row {row} would go from value {start} to {end} of {size}")
            if values is not None:
                found.append(values[start:end].copy())
            elif take_child is not None:
                found.append(_shape(child, take_child(range(start, end))))
        return found

    return take


def _shape(child: Any, values: list[Any]) -> Any:
    """A list of numbers that has none missing is an array, whatever other rows have."""
    if _is_number(child.type) and None not in values:
        return np.array(values, np.dtype(child.type.to_pandas_dtype()))
    return values


def _take_shaped(take: Take, shape: Sequence[int], axes: Sequence[int]) -> Take:
    return lambda rows: [np.reshape(value, shape).transpose(axes) for value in take(rows)]


def _axes(kind: Any) -> list[int]:
    """Which axis of a tensor as it is stored is the first one, the second one and so on."""
    return list(range(len(kind.shape)) if kind.permutation is None else kind.permutation)


def _take_structs(array: Any) -> Take:
    takes = [(array.type.field(place).name, make_take(array.field(place))) for place in range(array.type.num_fields)]

    def take(rows: Sequence[int]) -> list[Any]:
        found: list[dict[str, Any]] = [{} for _ in rows]
        for name, take_field in takes:
            for record, value in zip(found, take_field(rows), strict=True):
                record[name] = value
        return found

    return take


def _take_dictionary(array: Any) -> Take:
    take_place, take_word, size = make_take(array.indices), make_take(array.dictionary), len(array.dictionary)

    def take(rows: Sequence[int]) -> list[Any]:
        places = take_place(rows)
        wrong = [place for place in places if not 0 <= place < size]
        if wrong:
            raise WrongValue(f"word {wrong[0]} of a dictionary of {size}")
        return take_word(places)

    return take


def _take_others(array: Any) -> Take:
    """Times, decimals, maps, views of text (as Polars writes) and what is rare: as pyarrow gives them."""
    import pyarrow as pa

    try:
        array.validate(full=True)
        if pa.types.is_timestamp(array.type) or pa.types.is_time(array.type) or pa.types.is_duration(array.type):
            array = _without_nanoseconds(array)
    except pa.ArrowException as error:
        raise WrongValue(str(error)) from error

    def take(rows: Sequence[int]) -> list[Any]:
        try:
            return [array[row].as_py() for row in rows]  # `take` has no views of text
        except (ValueError, OverflowError) as error:  # a date after the year 9999
            raise WrongValue(f"a value of type {array.type} is none that Python has: {error}") from error

    return take


def _without_nanoseconds(array: Any) -> Any:
    """Python's times have microseconds."""
    import pyarrow as pa

    if array.type.unit != "ns":
        return array
    if pa.types.is_timestamp(array.type):
        return array.cast(pa.timestamp("us", array.type.tz), safe=False)
    return array.cast(pa.duration("us") if pa.types.is_duration(array.type) else pa.time64("us"), safe=False)


def _refuse_unless_empty(array: Any, what: str) -> Take:
    if len(array):
        raise WrongValue(what)
    return lambda rows: []
