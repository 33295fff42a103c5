from __future__ import annotations

import itertools
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardway.data.content import DataPath, fingerprint_arrays
from shardway.data.formats import token_store
from shardway.data.formats.base import BLOCK_BYTES, DamagedData, FileParts, describe_file, sum_blocks
from shardway.data.formats.indexes import make_sums
from shardway.data.formats.shard_file import write_token_shard
from shardway.data.formats.shard_manifest import write_manifest
from shardway.data.formats.token_store import (
    TokenFile,
    TokenStore,
    check_tokens,
    checks_blocks,
    read_npy_tokens,
    read_raw_tokens,
)
from shardway.data.formats.tokens import TokenRecords, open_token_store
from shardway.data.open import find_kind
from shardway.data.sources.base import DataRequest
from shardway.data.sources.tokens import TokenWindows, open_tokens
from shardway.errors import Bug, UserError
from shardway.runfile.schema import DataSection


def store_of(folder: Path, parts: list[np.ndarray], before: int = 0, checked: bool = False, **more: Any) -> TokenStore:
    """A file for each part, with `before` tokens that do not belong to it in front."""
    folder.mkdir(exist_ok=True)
    files = []
    for number, part in enumerate(parts):
        path = folder / f"{number}.bin"
        np.concatenate([np.full(before, 9, part.dtype), part]).tofile(path)
        files.append(TokenFile(path, part.dtype.str, before * part.itemsize, len(part)))
    listed = [describe_file(folder, file.path.name) for file in files]
    sums = [sum_blocks(file.path) for file in files]
    return TokenStore(tuple(files), parts=FileParts(folder, listed, sums) if checked else None, **more)


@settings(max_examples=40)
@given(st.data())
def test_rows_are_those_of_all_files_joined(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(0, 30), min_size=1, max_size=6))
    dtype = data.draw(st.sampled_from(["uint8", "<u2", "<u4", "<i4", "<i8"]))
    parts = [np.arange(length).astype(dtype) + number * 30 for number, length in enumerate(lengths)]
    flat = np.concatenate(parts)
    store = store_of(tmp_path_factory.mktemp("s"), parts, data.draw(st.integers(0, 5)), data.draw(st.booleans()))
    assert (len(store), store.dtype) == (len(flat), np.dtype(dtype))
    for _ in range(3):
        length = data.draw(st.integers(0, len(flat)))
        starts = np.array(data.draw(st.lists(st.integers(0, len(flat) - length), max_size=8)), np.int64)
        rows = store.rows(starts, length)
        assert rows.dtype == np.dtype(dtype)
        assert rows.tolist() == [flat[start : start + length].tolist() for start in starts]
        if length:
            lengths_asked = np.array([data.draw(st.integers(1, length)) for _ in starts], np.int64)
            runs = [flat[start : start + each] for start, each in zip(starts, lengths_asked, strict=True)]
            assert store.runs(starts, lengths_asked).tolist() == np.concatenate([flat[:0], *runs]).tolist()


def test_long_runs(tmp_path: Path) -> None:
    parts = [np.arange(1000, dtype=np.uint16), np.arange(1000, 3000, dtype=np.uint16)]
    store = store_of(tmp_path, parts)
    found = store.runs(np.array([0, 900, 2500]), np.array([800, 1900, 500]))
    assert found.tolist() == [*range(800), *range(900, 2800), *range(2500, 3000)]


@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize("start", [-1, 28, 30, 1000])
def test_rows_that_are_not_there_are_an_error(tmp_path: Path, files: int, start: int) -> None:
    store = store_of(tmp_path, [np.arange(30 // files, dtype=np.uint16)] * files)
    if files == 1 and start < 0:
        return  # counted from the end, as NumPy does
    with pytest.raises(IndexError):
        store.rows(np.array([0, start]), 5)
    if files > 1:
        with pytest.raises(IndexError):
            store.runs(np.array([0, start]), np.array([5, 5]))


def test_a_store_is_pickled_without_its_files(tmp_path: Path) -> None:
    store = store_of(tmp_path, [np.arange(500, dtype=np.uint16), np.arange(500, 900, dtype=np.uint16)], checked=True)
    small = len(pickle.dumps(store))
    store.rows(np.array([450]), 100)
    assert len(pickle.dumps(store)) == small < 1500
    assert pickle.loads(pickle.dumps(store)).rows(np.array([450]), 100)[0].tolist() == list(range(450, 550))


def test_files_are_mapped_when_they_are_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []
    original = TokenFile.open
    monkeypatch.setattr(TokenFile, "open", lambda self: opened.append(self.path.name) or original(self))
    store = store_of(tmp_path, [np.arange(20, dtype=np.uint16) + 20 * number for number in range(5)])
    store.rows(np.array([25, 60, 30]), 4)
    assert opened == ["1.bin", "3.bin"]
    monkeypatch.setattr(token_store, "MAPPED_FILES", 3)
    for start in (*range(0, 96, 7), 95):
        assert store.rows(np.array([start, 0]), 4).tolist() == [[*range(start, start + 4)], [0, 1, 2, 3]]
    assert len(opened) > 6


def test_rows_that_are_too_long_for_a_view(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [np.arange(100, dtype=np.uint16), np.arange(100, 300, dtype=np.uint16)]
    monkeypatch.setattr(token_store, "LONG_ROW", 7)
    for store in (store_of(tmp_path / "two", parts), store_of(tmp_path / "one", [np.concatenate(parts)])):
        starts = np.array([90, 0, 292, 150])
        assert store.rows(starts, 8).tolist() == [list(range(start, start + 8)) for start in starts]
        with pytest.raises(IndexError):
            store.rows(np.array([293]), 8)


def test_threads_read_while_files_are_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_store, "MAPPED_FILES", 3)
    store = store_of(tmp_path, [np.arange(50 * number, 50 * number + 50, dtype=np.uint16) for number in range(20)])

    def read_all(seed: int) -> bool:
        dice = np.random.default_rng(seed)
        each = [dice.integers(0, 990, 3) for _ in range(50)]
        return all(np.array_equal(store.rows(starts, 10), starts[:, None] + np.arange(10)) for starts in each)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(read_all, range(8)))


def test_offsets_that_are_no_multiple_of_a_token_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(bytes(101))
    files = (TokenFile(tmp_path / "x", "<u2", 0, 20), TokenFile(tmp_path / "x", "<u2", 1, 50))
    with pytest.raises(Bug, match="no multiple of their width"):
        TokenStore(files).rows(np.array([0, 30]), 4)
    assert TokenStore(files[1:]).rows(np.array([0]), 4).tolist() == [[0, 0, 0, 0]]


# --- checksums


def test_each_block_is_compared_once_when_it_is_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checked = []
    original = FileParts.check

    def note(self: FileParts, number: int, offset: int, size: int) -> None:
        checked.append((number, offset // BLOCK_BYTES))
        original(self, number, offset, size)

    monkeypatch.setattr(FileParts, "check", note)
    block = BLOCK_BYTES // 2
    parts = [np.zeros(3 * block, np.uint16), np.zeros(0, np.uint16), np.zeros(2 * block + 7, np.uint16)]
    store = store_of(tmp_path, parts, before=32, checked=True)
    store.rows(np.array([5, 9]), 100)
    store.rows(np.array([20]), 10)
    assert checked == [(0, 0)]
    store.rows(np.array([3 * block - 5]), 10)  # from the last block of one file, which has 64 bytes, into the next
    assert checked[1:] == [(0, 3), (2, 0)]
    store.rows(np.array([0]), 3 * block)
    assert checked[3:] == [(0, 1), (0, 2)]
    store.runs(np.array([4 * block]), np.array([block + 7]))
    assert checked[5:] == [(2, 1), (2, 2)]
    store.rows(np.array([0, block, 4 * block]), 9)
    assert len(checked) == 7


def test_a_damaged_block_is_found_at_every_width(tmp_path: Path) -> None:
    for dtype in ("uint8", "uint16", "uint32"):
        store = store_of(tmp_path / dtype, [np.zeros(700_000, dtype), np.zeros(900_000, dtype)], checked=True)
        at = 650_000 * np.dtype(dtype).itemsize
        with (tmp_path / dtype / "1.bin").open("r+b") as stream:
            stream.seek(at)
            stream.write(b"\1")
        store.rows(np.array([0, 600_000]), 100)
        place = rf"1\.bin is damaged at byte {at // BLOCK_BYTES * BLOCK_BYTES}"
        for _ in range(2):  # and again, since what is damaged stays so
            with pytest.raises(DamagedData, match=place):
                store.rows(np.array([700_000 + 650_000 - 50]), 100)


def test_a_store_that_does_not_fit_is_not_checked_while_it_is_read(tmp_path: Path) -> None:
    assert checks_blocks(10, 20)
    assert not checks_blocks(11, 20)
    assert checks_blocks(2**20)
    assert not checks_blocks(2**60)
    store = store_of(tmp_path, [np.arange(1000, dtype=np.uint16)], checked=True, memory_bytes=3999)
    (tmp_path / "0.bin").write_bytes(bytes(2000))
    assert store.rows(np.array([5]), 2).tolist() == [[0, 0]]
    store.memory_bytes = 4000
    with pytest.raises(DamagedData):
        pickle.loads(pickle.dumps(store)).rows(np.array([5]), 2)


# --- fingerprints and vocabulary


def test_the_fingerprint_of_one_file_is_that_of_its_array(tmp_path: Path) -> None:
    parts = [np.arange(100, dtype=np.uint16), np.arange(50, dtype=np.uint16)]
    assert store_of(tmp_path, parts[:1]).make_fingerprint(8, "x") == fingerprint_arrays(parts[:1], 8, "x")
    assert store_of(tmp_path, parts).make_fingerprint(8, "x") == fingerprint_arrays(parts, 8, "x")


def test_tokens_are_compared_with_the_vocabulary() -> None:
    place = DataPath("data.path", "x")
    check_tokens(np.array([0, 65535], np.uint16), 65536, place)
    check_tokens(np.array([0, 65535], np.uint16), None, place)
    check_tokens(np.zeros(0, np.int32), 1, place)
    for tokens, vocab in itertools.product((np.array([7], np.uint16), np.array([7], np.int32)), (7, 5)):
        with pytest.raises(UserError, match="holds the token 7"):
            check_tokens(tokens, vocab, place)
    with pytest.raises(UserError, match="holds the token -1"):
        check_tokens(np.array([-1]), None, place)


# --- files of tokens as records


def at(path: Path) -> DataPath:
    return DataPath("data.path", str(path))


def test_a_file_of_tokens_is_one_record(tmp_path: Path) -> None:
    tokens = np.arange(1000, dtype=np.uint16)
    np.save(tmp_path / "t.npy", tokens)
    tokens.tofile(tmp_path / "t.bin")
    for name, offset in (("t.npy", 128), ("t.bin", 0)):
        assert TokenRecords.is_at(tmp_path / name)
        reader = TokenRecords.open(at(tmp_path / name))
        assert (len(reader), reader.fields) == (1, {"tokens": "uint16[1000]"})
        assert reader.read([0, 0], ["tokens"])[1]["tokens"].tolist() == list(range(1000))
        assert reader.read([0], ["other"]) == [{}]
        where = reader.extent(0)
        assert (where.path, where.offset, where.size) == (tmp_path / name, offset, 2000)
        assert reader.more_facts() == {"tokens": 1000}
        with pytest.raises(UserError, match="there is no record 1"):
            reader.read([1])
    assert TokenRecords.open(at(tmp_path / "t.bin"), "uint32").fields == {"tokens": "uint32[500]"}
    assert read_raw_tokens(at(tmp_path / "t.bin"), "uint8").tokens == 2000
    assert read_npy_tokens(at(tmp_path / "t.npy")).tokens == 1000


def test_a_file_of_tokens_is_checked_where_it_has_checksums(tmp_path: Path) -> None:
    path = tmp_path / "t.bin"
    np.zeros(BLOCK_BYTES, np.uint16).tofile(path)
    assert open_token_store(at(path)).parts is None
    make_sums(tmp_path, TokenRecords.open(at(path)).parts.files)
    with path.open("r+b") as stream:
        stream.seek(BLOCK_BYTES + 5)
        stream.write(b"x")
    store = open_token_store(at(path))
    store.rows(np.array([0]), 100)
    with pytest.raises(DamagedData, match=f"byte {BLOCK_BYTES}"):
        store.rows(np.array([BLOCK_BYTES - 100]), 100)
    assert len(list(TokenRecords.open(at(path)).find_damage())) == 1


def test_what_is_no_file_of_tokens(tmp_path: Path) -> None:
    np.save(tmp_path / "images.npy", np.zeros((3, 4), np.uint8))
    np.save(tmp_path / "floats.npy", np.zeros(3))
    (tmp_path / "text.npy").write_text("text")
    (tmp_path / "m.bin").write_bytes(b"1234")
    (tmp_path / "m.idx").write_bytes(b"MMIDIDX")
    names = ("images.npy", "floats.npy", "text.npy", "m.bin", "missing.npy", "")
    assert [name for name in names if TokenRecords.is_at(tmp_path / name)] == []


# --- windows over several files


def read(path: Path, vocab: int | None = None, **keys: Any) -> TokenWindows:
    section = DataSection(kind="tokens", path=str(path), **{"seq_len": 4, **keys})
    opened = open_tokens(at(path), DataRequest(section, 0, "tokens", vocab))
    assert isinstance(opened, TokenWindows)
    return opened


def write_shards(folder: Path, documents: list[tuple[np.ndarray, Any]], **described: Any) -> Path:
    folder.mkdir()
    halves = documents[: len(documents) // 2], documents[len(documents) // 2 :]
    facts = [write_token_shard(folder / f"{n:05d}.shard", half, "uint16") for n, half in enumerate(halves)]
    write_manifest(folder, "tokens", facts, described)
    return folder


def test_windows_over_shards_are_those_over_one_file(tmp_path: Path) -> None:
    documents = [np.arange(number, dtype=np.uint16) for number in (5, 0, 13, 7, 30, 2)]
    flat = np.concatenate(documents)
    np.save(tmp_path / "t.npy", flat)
    folder = write_shards(tmp_path / "d", [(each, None) for each in documents], vocab=40, text_bytes=114)
    one, several = read(tmp_path / "t.npy"), read(folder)
    assert len(one) == len(several) == (len(flat) - 1) // 4
    ids = np.array([3, 0, len(one) - 1, 5])
    for name, values in one.batch(ids).items():
        found = several.batch(ids)[name]
        assert found.tolist() == values.tolist()
        assert found.flags.c_contiguous
    assert several.facts.description == f"57 tokens (uint16) in {folder}, 6 documents"
    assert (several.facts.vocab, several.facts.bytes_per_token) == (40, 2.0)
    assert read(folder, vocab=50).facts.vocab == 40
    assert find_kind(DataSection(kind="tokens")).exists(DataSection(kind="tokens", path=str(folder)))


def test_a_target_that_does_not_count(tmp_path: Path) -> None:
    first = np.arange(10, dtype=np.uint16)
    documents = [(first, None), (first + 10, first % 3 == 0), (first + 20, None), (first + 30, first < 4)]
    batch = read(write_shards(tmp_path / "d", documents)).batch(np.arange(9))
    targets = [token if token < 10 or 20 <= token < 34 or token in (10, 13, 16, 19) else -100 for token in range(1, 37)]
    assert batch["targets"].ravel().tolist() == targets
    assert batch["inputs"].ravel().tolist() == list(range(36))


def test_a_model_with_too_small_a_vocabulary_is_refused(tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "d", [(np.arange(30, dtype=np.uint16), None)] * 2, vocab=40)
    with pytest.raises(UserError) as caught:
        read(folder, vocab=39)
    assert str(caught.value) == (
        f'1 problem in the data\n  model.vocab: 39 is less than the 40 tokens of "{folder}"\n'
        '      allowed: 40 and above, or "auto"'
    )
    unknown = write_shards(tmp_path / "u", [(np.arange(30, dtype=np.uint16), None)] * 2)
    assert read(unknown, vocab=30).facts.vocab == 30
    with pytest.raises(UserError, match="holds the token 29"):
        read(unknown, vocab=29)


def test_the_fingerprint_of_shards_is_that_of_all_content(tmp_path: Path) -> None:
    documents = [(np.zeros(500_000, np.uint16), None) for _ in range(2)]
    first = read(write_shards(tmp_path / "a", documents)).facts.fingerprint
    assert read(write_shards(tmp_path / "b", documents)).facts.fingerprint == first
    assert read(tmp_path / "b", seq_len=5).facts.fingerprint != first
    changed = np.zeros(500_000, np.uint16)
    changed[123_457] = 1  # between the blocks that are looked at
    assert read(write_shards(tmp_path / "c", [documents[0], (changed, None)])).facts.fingerprint != first


def test_shards_without_enough_tokens_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds 4 tokens, too few for one sample"):
        read(write_shards(tmp_path / "d", [(np.arange(4, dtype=np.uint16), None)]))
    (tmp_path / "e").mkdir()
    write_manifest(tmp_path / "e", "tokens", [], {})
    with pytest.raises(UserError, match="holds no shards"):
        read(tmp_path / "e")
