"""Bytes of a `.npy` file, against NumPy's own reader."""

from __future__ import annotations

import ast
import io
import re
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from shardway.data.formats.npy import parse_npy


def written(array: npt.NDArray[Any], version: tuple[int, int] | None = None) -> bytes:
    stream = io.BytesIO()
    np.lib.format.write_array(stream, array, version)
    return stream.getvalue()


def outcome(read: Callable[[bytes], npt.NDArray[Any]], content: bytes) -> npt.NDArray[Any] | str:
    """The array, or the kind of the error and its words, without addresses of objects. Errors of NumPy of other kinds
    than these two are to be a ValueError that has their words."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of headers that Python 2 wrote
            return read(content)
    except (ValueError, EOFError) as error:
        words = f"{type(error).__name__}: {error}"
    except Exception as error:
        words = f"ValueError: {type(error).__name__}: {error}"
    return re.sub("0x[0-9a-f]+", "", words)


def read_by_numpy(content: bytes) -> npt.NDArray[Any]:
    array: npt.NDArray[Any] = np.lib.format.read_array(io.BytesIO(content), allow_pickle=False)
    return array


def assert_as_numpy(content: bytes) -> None:
    ours, theirs = outcome(parse_npy, content), outcome(read_by_numpy, content)
    if isinstance(theirs, str) or isinstance(ours, str):
        assert ours == theirs
        return
    assert (ours.dtype, ours.shape, ours.flags.f_contiguous) == (theirs.dtype, theirs.shape, theirs.flags.f_contiguous)
    assert ours.tobytes() == theirs.tobytes()
    assert ours.flags.writeable


PAIR = st.just(np.dtype([("a", "i1"), ("b", "<f4", (2,))]))
DTYPES = st.one_of(hnp.scalar_dtypes(), hnp.unicode_string_dtypes(), hnp.byte_string_dtypes(), PAIR)


@given(
    hnp.arrays(DTYPES, hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)),
    st.booleans(),
    st.sampled_from([(1, 0), (2, 0), (3, 0)]),
)
@example(np.zeros((), "<f4"), False, (1, 0))
@example(np.zeros((0, 3), "<f4"), True, (1, 0))
def test_an_array_is_what_numpy_reads(array: npt.NDArray[Any], fortran: bool, version: tuple[int, int]) -> None:
    assert_as_numpy(written(np.asfortranarray(array) if fortran else array, version))


def test_a_header_that_is_cut_is_damage() -> None:
    content = bytearray(written(np.arange(3, dtype="<i4")))
    content[8:10] = (3).to_bytes(2, "little")  # the length of its header
    with pytest.raises(ValueError, match="TokenError"):
        parse_npy(bytes(content))


@given(st.data())
def test_bytes_that_are_cut_or_changed_are_what_numpy_makes_of_them(data: st.DataObject) -> None:
    content = bytearray(written(np.arange(12, dtype="<i4").reshape(3, 4)))
    for _ in range(data.draw(st.integers(0, 2))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    assert_as_numpy(bytes(content[: data.draw(st.integers(0, len(content)))]))


def test_no_syntax_tree_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads that make one at a time disturb each other in CPython 3.11."""
    content = written(np.arange(6, dtype="<f4").reshape(2, 3))
    monkeypatch.setattr(ast, "literal_eval", lambda text: pytest.fail("a header was parsed as Python"))
    np.testing.assert_array_equal(parse_npy(content), [[0, 1, 2], [3, 4, 5]])
