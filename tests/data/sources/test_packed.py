from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardway.data.sources.packed as packed
import shardway.data.sources.tokens as tokens
from shardway.data.content import DataPath
from shardway.data.formats.base import DamagedData, DataFile, FileParts, sum_blocks
from shardway.data.formats.token_store import TokenFile, TokenStore
from shardway.data.sources.base import DataRequest, DataSource, SourceFacts
from shardway.data.sources.packed import NOT_COUNTED, PackedDocuments, open_packed
from shardway.data.sources.tokens import open_text, open_tokens
from shardway.errors import UserError
from shardway.runfile.schema import DataSection


class Documents(TokenStore):
    """A store whose ends of documents are in memory."""

    ends: np.ndarray | None = None

    def read_ends(self) -> np.ndarray | None:
        return self.ends


def make_store(
    folder: Path, lengths: list[int], files: int = 1, counted: np.ndarray | None = None, dtype: str = "uint16"
) -> Documents:
    """Token i of the store is i; documents may go over the end of a file."""

    def write(name: str, array: np.ndarray) -> tuple[TokenFile, ...]:
        parts = np.array_split(array, files)
        for number, part in enumerate(parts):
            part.tofile(folder / f"{name}{number}.bin")
        return tuple(TokenFile(folder / f"{name}{n}.bin", str(a.dtype), 0, len(a)) for n, a in enumerate(parts))

    store = Documents(
        write("tokens", np.arange(sum(lengths), dtype=dtype)), write("counted", counted) if counted is not None else ()
    )
    store.ends = np.cumsum(np.array(lengths, np.int64))
    return store


def open_store(store: TokenStore, folder: Path, seq_len: int = 8, vocab: int | None = None) -> PackedDocuments:
    section = DataSection(kind="tokens", path=str(folder), seq_len=seq_len)
    request = DataRequest(section, 0, "tokens", vocab)
    facts = SourceFacts("made-up tokens", "content", (seq_len,), vocab=vocab)
    return open_packed(store, DataPath("data.path", str(folder)), request, facts)


def refused(*arguments: Any, **keys: Any) -> str:
    with pytest.raises(UserError) as caught:
        open_store(*arguments, **keys)
    return str(caught.value)


LENGTHS = [5, 1, 9, 3, 0, 4, 12, 2, 7]


def test_a_batch_holds_documents_one_after_the_other(tmp_path: Path) -> None:
    source = open_store(make_store(tmp_path, LENGTHS), tmp_path)
    assert isinstance(source, DataSource)
    everything = source.batch(np.arange(len(source)))
    row = everything["inputs"].tolist().index([0, 1, 2, 3, 18, 19, 20, 34])
    assert everything["targets"][row].tolist() == [1, 2, 3, 4, 19, 20, 21, 35]
    assert everything["positions"][row].tolist() == [0, 1, 2, 3, 0, 1, 2, 0]
    row = everything["inputs"].tolist().index([30, 31, 32, 0, 0, 0, 0, 0])
    assert everything["targets"][row].tolist() == [31, 32, 33, *[NOT_COUNTED] * 5]
    assert everything["positions"][row].tolist() == [0, 1, 2, 0, 1, 2, 3, 4], "the padding is a document of its own"
    row = everything["inputs"].tolist().index([22, 23, 24, 25, 26, 27, 28, 29])
    assert everything["targets"][row].tolist() == [23, 24, 25, 26, 27, 28, 29, 30], "a piece ends where the next begins"
    assert everything["positions"][row].tolist() == list(range(8))
    assert {array.dtype for array in everything.values()} == {np.dtype(np.int64)}
    assert all(array.flags.c_contiguous for array in everything.values())


@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=30).filter(lambda each: max(each) > 1),
    files=st.integers(1, 4),
    seq_len=st.integers(1, 9),
)
def test_every_pair_of_a_document_comes_once(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], files: int, seq_len: int
) -> None:
    folder = tmp_path_factory.mktemp("store")
    source = open_store(make_store(folder, lengths, files), folder, seq_len)
    batch = source.batch(np.arange(len(source))[::-1])
    counts = batch["targets"] != NOT_COUNTED
    pairs = sorted(zip(batch["inputs"][counts].tolist(), batch["targets"][counts].tolist(), strict=True))
    starts = np.cumsum([0, *lengths])
    assert pairs == [(s + i, s + i + 1) for s, n in zip(starts.tolist(), lengths, strict=False) for i in range(n - 1)]
    # Positions go on within a piece, and begin anew with each piece and with the padding.
    places = batch["positions"]
    goes_on = places[:, 1:] == places[:, :-1] + 1
    assert (goes_on | (places[:, 1:] == 0)).all()
    assert (places[:, 0] == 0).all()
    same = (batch["inputs"][:, 1:] == batch["inputs"][:, :-1] + 1) & counts[:, 1:]
    assert (same[goes_on & counts[:, 1:]]).all()
    assert (counts[:, 1:] <= counts[:, :-1]).all(), "padding is at the end"
    assert (places[~counts & (np.roll(counts, 1, axis=1))] == 0).all(), "and a document of its own"
    one = source.batch(np.array([len(source) - 1]))
    assert all(np.array_equal(one[name][0], batch[name][0]) for name in batch)


def test_many_short_documents_are_gathered_as_long_ones_are(tmp_path: Path) -> None:
    """Runs are read in one of two ways by their length."""
    lengths = [3] * 200 + [700] * 3
    source = open_store(make_store(tmp_path, lengths), tmp_path, seq_len=256)
    batch = source.batch(np.arange(len(source)))
    counts = batch["targets"] != NOT_COUNTED
    assert (batch["targets"] - batch["inputs"])[counts].tolist() == [1] * int(counts.sum())
    assert counts.sum() == sum(n - 1 for n in lengths)


def test_tokens_that_do_not_count_are_context_alone(tmp_path: Path) -> None:
    counted = np.ones(sum(LENGTHS), np.uint8)
    counted[2:4] = counted[0] = 0
    source = open_store(make_store(tmp_path, LENGTHS, counted=counted), tmp_path)
    batch = source.batch(np.arange(len(source)))
    row = batch["inputs"].tolist().index([0, 1, 2, 3, 18, 19, 20, 34])
    assert batch["targets"][row].tolist() == [1, NOT_COUNTED, NOT_COUNTED, 4, 19, 20, 21, 35]


def test_facts_say_how_full_the_samples_are(tmp_path: Path) -> None:
    store = make_store(tmp_path, LENGTHS)
    facts = open_store(store, tmp_path).facts
    assert facts.description.endswith("9 documents packed into 5 samples of 8, 87.50 % full, cuts of longer ones: 1")
    assert facts.sample_shape == (8,)
    uncut = open_store(store, tmp_path, seq_len=16)
    assert uncut.facts.description.endswith("none of them cut")
    assert uncut.tokens_per_sample == 16
    assert uncut.facts.fingerprint != facts.fingerprint
    store.ends = np.cumsum(LENGTHS[::-1])
    assert open_store(store, tmp_path).facts.fingerprint != facts.fingerprint


def test_no_ids_give_arrays_of_the_right_shape(tmp_path: Path) -> None:
    batch = open_store(make_store(tmp_path, LENGTHS), tmp_path).batch(np.empty(0, np.int64))
    assert batch.keys() == {"inputs", "targets", "positions"}
    assert {array.shape for array in batch.values()} == {(0, 8)}


def test_bins_are_kept_and_not_pickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [2] * 20_000
    source = open_store(make_store(tmp_path, lengths), tmp_path)
    expected = source.batch(np.array([7, 3]))
    store = source.store
    store.ends, ends = None, store.ends
    pickled = pickle.dumps(source)
    assert len(pickled) < 3000
    monkeypatch.setattr(packed, "pack_documents", lambda *_: pytest.fail("the bins are computed again"))
    copy = pickle.loads(pickled)
    copy.store.ends = ends
    found = copy.batch(np.array([7, 3]))
    assert all(np.array_equal(found[name], expected[name]) for name in expected)


def test_bins_are_made_anew_for_other_documents(tmp_path: Path) -> None:
    store = make_store(tmp_path, [4, 4, 4, 4])
    assert len(open_store(store, tmp_path)) == 2
    store.ends = np.array([1, 16])
    assert open_store(store, tmp_path).batch(np.arange(1))["inputs"][0, 0] in (1, 9)


def test_damage_is_found_when_a_piece_is_read(tmp_path: Path) -> None:
    store = make_store(tmp_path, LENGTHS)
    file = tmp_path / "tokens0.bin"
    stat = file.stat()
    store.parts = FileParts(tmp_path, [DataFile(file.name, stat.st_size, stat.st_mtime_ns)], [sum_blocks(file)])
    source = open_store(store, tmp_path)
    with file.open("r+b") as stream:
        stream.seek(10)
        stream.write(b"\xff")
    with pytest.raises(DamagedData, match=r"tokens0\.bin is damaged"):
        source.batch(np.arange(len(source)))


def test_a_token_outside_the_vocabulary_is_named(tmp_path: Path) -> None:
    assert "holds the token 42" in refused(make_store(tmp_path, LENGTHS), tmp_path, vocab=30)


def test_a_store_without_documents_is_refused(tmp_path: Path) -> None:
    store = make_store(tmp_path, LENGTHS)
    store.ends = None
    message = refused(store, tmp_path)
    assert "does not say where a document ends" in message
    assert "data.pack = false" in message


def test_documents_of_one_token_are_refused(tmp_path: Path) -> None:
    assert "no document of at least two tokens" in refused(make_store(tmp_path, [1, 1, 1]), tmp_path)


# --- text


def open_files(folder: Path, tokenizer: str = "bytes", seq_len: int = 8) -> PackedDocuments:
    section = DataSection(path=str(folder), include="*.txt", tokenizer=tokenizer, seq_len=seq_len, pack=True)
    source = open_text(DataPath("data.path", str(folder)), DataRequest(section, 0, "tokens"))
    assert isinstance(source, PackedDocuments)
    return source


def list_rows(source: PackedDocuments) -> list[tuple[bytes, list[int]]]:
    batch = source.batch(np.arange(len(source)))
    rows = zip(batch["inputs"], batch["targets"], batch["positions"], strict=True)
    return sorted((bytes(inputs[targets >= 0].tolist()), places.tolist()) for inputs, targets, places in rows)


def test_files_of_text_are_documents(tmp_path: Path) -> None:
    for name, text in {"a": "abc", "b": "defghij", "c": "", "d": "klmn"}.items():
        (tmp_path / f"{name}.txt").write_text(text)
    source = open_files(tmp_path)
    # A file but the last ends with the zero byte that follows it, which is a target and no input.
    assert list_rows(source) == [(b"abcklm", [0, 1, 2, 0, 1, 2, 0, 1]), (b"defghij", [*range(7), 0])]
    (tmp_path / "d.txt").unlink()
    assert list_rows(open_files(tmp_path)) == [(b"abc", [0, 1, 2, *range(5)]), (b"defghij", [*range(7), 0])]


def test_one_file_is_one_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abcdefghijklm")
    assert list_rows(open_files(tmp_path)) == [(b"abcdefgh", [*range(8)]), (b"ijkl", [*range(4), *range(4)])]


class Halves:
    """A tokenizer of two letters a token."""

    vocab, end = 300, 299

    def encode(self, texts: list[str]) -> list[list[int]]:
        return [[ord(pair[0]) for pair in re.findall("..?", text)] for text in texts]


@pytest.mark.parametrize("end", [299, None])
def test_ends_of_tokenised_files_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: int | None) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "a.txt").write_text("abcdef")
    (tmp_path / "b.txt").write_text("ghijklm")
    tokenizer, encoded = Halves(), []
    tokenizer.end = end  # type: ignore[assignment]
    monkeypatch.setattr(tokens, "open_tokenizer", lambda name: tokenizer)
    encode = tokenizer.encode
    monkeypatch.setattr(tokenizer, "encode", lambda texts: encoded.append(texts) or encode(texts))
    found = open_files(tmp_path, str(tmp_path / "tokenizer.json"))
    assert len(encoded) == 2
    ends = [4, 8] if end is not None else [3, 7]
    read = found.store.read_ends()
    assert read is not None
    assert read.tolist() == ends
    open_files(tmp_path, str(tmp_path / "tokenizer.json"))
    assert len(encoded) == 2, "read from the cache"
    for kept in (tokens.cache_folder("auto")).glob("*-ends.npy"):
        kept.unlink()
    again = open_files(tmp_path, str(tmp_path / "tokenizer.json"))
    assert len(encoded) == 4
    assert again.store.read_ends().tolist() == ends  # type: ignore[union-attr]


def test_a_file_of_tokens_has_no_documents(tmp_path: Path) -> None:
    np.arange(40, dtype=np.uint16).tofile(tmp_path / "t.bin")
    section = DataSection(kind="tokens", path=str(tmp_path / "t.bin"), seq_len=8, pack=True)
    with pytest.raises(UserError, match="does not say where a document ends"):
        open_tokens(DataPath("data.path", section.path), DataRequest(section, 0, "tokens"))
