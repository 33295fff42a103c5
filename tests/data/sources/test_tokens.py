from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardway.data.content import DataPath
from shardway.data.sources.base import DataRequest
from shardway.data.sources.tokens import TokenWindows, open_tokens
from shardway.errors import UserError
from shardway.runfile.schema import DataSection


def read(path: Path, vocab: int | None = None, **keys: Any) -> TokenWindows:
    section = DataSection(kind="tokens", path=str(path), **{"seq_len": 4, **keys})
    return open_tokens(DataPath("data.path", str(path)), DataRequest(section, 0, "tokens", vocab))


def save(path: Path, tokens: np.ndarray) -> Path:
    if path.suffix == ".npy":
        np.save(path, tokens)
    else:
        tokens.tofile(path)
    return path


def refused(path: Path, vocab: int | None = None, **keys: Any) -> str:
    with pytest.raises(UserError) as caught:
        read(path, vocab, **keys)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("t.npy", "uint8"), ("t.npy", "int32"), ("t.npy", ">u2"), ("t.bin", "uint16"), ("t.bin", "uint32")],
)
def test_windows_follow_each_other_and_share_one_token(tmp_path: Path, name: str, dtype: str) -> None:
    path = save(tmp_path / name, np.arange(14).astype(dtype))
    source = read(path, token_dtype=dtype if name == "t.bin" else "uint16")
    assert len(source) == 3  # (14 - 1) // 4
    assert source.tokens_per_sample == 4
    batch = source.batch(np.array([2, 0]))
    assert batch["inputs"].tolist() == [[8, 9, 10, 11], [0, 1, 2, 3]]
    assert batch["targets"].tolist() == [[9, 10, 11, 12], [1, 2, 3, 4]]
    assert {array.dtype for array in batch.values()} == {np.dtype(np.int64)}
    assert all(array.flags.c_contiguous for array in batch.values())


def test_no_ids_give_arrays_of_the_right_shape(tmp_path: Path) -> None:
    batch = read(save(tmp_path / "t.bin", np.arange(14, dtype=np.uint16)), vocab=20).batch(np.empty(0, np.int64))
    assert batch["inputs"].shape == batch["targets"].shape == (0, 4)


def test_a_source_is_pickled_without_its_tokens(tmp_path: Path) -> None:
    source = read(save(tmp_path / "t.npy", np.arange(100_000, dtype=np.uint32)))
    expected = source.batch(np.array([7]))["inputs"]
    pickled = pickle.dumps(source)
    assert len(pickled) < 2000
    assert np.array_equal(pickle.loads(pickled).batch(np.array([7]))["inputs"], expected)


def test_facts(tmp_path: Path) -> None:
    path = save(tmp_path / "t.npy", np.arange(14, dtype=np.uint16))
    facts = read(path, vocab=20).facts
    assert facts.description == f"14 tokens (uint16) in {path}"
    assert (facts.vocab, facts.sample_shape, facts.classes, facts.bytes_per_token) == (20, (4,), None, None)


def test_the_fingerprint_is_that_of_the_content(tmp_path: Path) -> None:
    tokens = np.arange(50_000, dtype=np.uint16)
    first = read(save(tmp_path / "a.npy", tokens)).facts.fingerprint
    assert read(save(tmp_path / "b.npy", tokens)).facts.fingerprint == first
    assert read(tmp_path / "a.npy", seq_len=8).facts.fingerprint != first
    for changed in (0, len(tokens) - 1):
        other = tokens.copy()
        other[changed] += 1
        assert read(save(tmp_path / "c.npy", other)).facts.fingerprint != first
    assert read(save(tmp_path / "d.npy", tokens[:-1])).facts.fingerprint != first


def test_a_token_beyond_the_vocabulary_is_refused_when_opened(tmp_path: Path) -> None:
    path = save(tmp_path / "t.npy", np.arange(14, dtype=np.uint16))
    assert refused(path, vocab=13) == (
        "1 problem in the data\n"
        f'  data.path: "{path}" holds the token 13\n'
        "      allowed: 0 to 12, because the vocabulary has 13\n"
        "      to do: raise model.vocab, or check the width of a token (data.token_dtype)"
    )


def test_a_token_beyond_the_vocabulary_is_refused_where_it_is_read(tmp_path: Path) -> None:
    tokens = np.zeros(1_000_001, np.uint16)
    tokens[4003] = 13  # between the blocks that are looked at when the file is opened
    source = read(save(tmp_path / "t.npy", tokens), vocab=13)
    assert source.batch(np.array([999]))["targets"].tolist() == [[0, 0, 0, 0]]
    with pytest.raises(UserError, match="holds the token 13"):
        source.batch(np.array([5, 1000]))


def test_a_negative_token_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "t.npy", np.array([1, 2, -100, 3, 4], np.int64))
    assert refused(path) == (
        f'1 problem in the data\n  data.path: "{path}" holds the token -100\n      allowed: 0 and above'
    )


def test_a_file_of_another_sort_is_refused(tmp_path: Path) -> None:
    expected = (
        "1 problem in the data\n"
        '  data.path: "{path}" is not a token file\n'
        "      allowed: a .npy file with one row of integers, or a raw .bin file\n"
        '      to do: for text, set data.kind = "text"'
    )
    (tmp_path / "t.txt").write_text("text")
    for path in (tmp_path / "t.txt", tmp_path):
        assert refused(path) == expected.format(path=path)


def test_a_file_that_is_not_there_is_said_to_be_missing(tmp_path: Path) -> None:
    assert refused(tmp_path / "missing.npy") == (
        f'1 problem in the data\n  data.path: "{tmp_path / "missing.npy"}" does not exist\n'
        "      allowed: a .npy or .bin token file"
    )


def test_too_few_tokens_are_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "t.bin", np.arange(4, dtype=np.uint16))
    assert refused(path) == (
        "1 problem in the data\n"
        f'  data.path: "{path}" holds 4 tokens, too few for one sample\n'
        "      allowed: at least data.seq_len + 1 = 5\n"
        "      to do: give more data or a smaller data.seq_len"
    )
    assert len(read(save(path, np.arange(5, dtype=np.uint16)))) == 1


def test_a_truncated_raw_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.bin"
    path.write_bytes(bytes(101))
    assert refused(path) == (
        "1 problem in the data\n"
        f'  data.path: "{path}" has 101 bytes, not a whole number of uint16 tokens of 2 bytes: the file is truncated\n'
        "      to do: copy the file again, or set data.token_dtype to its width"
    )


def test_an_empty_raw_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.bin"
    path.touch()
    assert refused(path) == f'1 problem in the data\n  data.path: "{path}" is empty'


@pytest.mark.parametrize("lost", [1, 30, 200])
def test_a_truncated_npy_file_is_refused(tmp_path: Path, lost: int) -> None:
    path = save(tmp_path / "t.npy", np.arange(100, dtype=np.uint16))
    content = path.read_bytes()
    path.write_bytes(content[:-lost])
    assert refused(path) == (
        "1 problem in the data\n"
        f'  data.path: "{path}" should hold 100 tokens by its header but holds {(200 - lost) // 2}: '
        "the file is truncated or damaged\n"
        "      to do: copy the file again"
    )


@pytest.mark.parametrize(
    "content", [b"", b"\x93NUM", b"\x93NUMPY\x01\x00v\x00{'descr'", b"\x93NUMPY\x09\x00\x04\x00{}  ", b"x" * 500]
)
def test_a_damaged_npy_header_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "t.npy"
    path.write_bytes(content)
    assert refused(path) == (
        "1 problem in the data\n"
        f'  data.path: "{path}" is not a NumPy file: its header cannot be read\n'
        "      to do: copy the file again"
    )


@pytest.mark.parametrize(
    ("array", "held"), [(np.zeros((5, 4), np.uint16), "uint16 of shape [5, 4]"), (np.zeros(9), "float64 of shape [9]")]
)
def test_an_npy_file_that_is_no_row_of_integers_is_refused(tmp_path: Path, array: np.ndarray, held: str) -> None:
    path = save(tmp_path / "t.npy", array)
    assert refused(path) == (
        f'1 problem in the data\n  data.path: "{path}" holds {held}\n      allowed: one row of integers'
    )
