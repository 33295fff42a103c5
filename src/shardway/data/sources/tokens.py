"""Rows of tokens: windows over memory-mapped files, and text that is prepared into one.

Invariants:
- Sample i is tokens iL .. iL + L (L + 1 of them): neighbouring windows share one token, and every token but the first
  is a target once.
- A prepared file is written beside its final name and renamed when it is complete. So many processes may prepare the
  same text at once, and a kill leaves no partial file. The text itself is never written.
- The tokens of a text depend on the text and the tokenizer file alone, not on cores or threads. The tokenizer libraries
  are imported when a tokenizer is opened, so byte data need none.
"""

from __future__ import annotations

import contextlib
import fnmatch
import itertools
import os
import sysconfig
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, cast

import numpy as np

from shardway.data.content import DataPath, data_error, fingerprint, sample_blocks
from shardway.data.formats.base import DamagedData, FileParts, Offsets, Records
from shardway.data.formats.megatron import open_megatron_store
from shardway.data.formats.shard_manifest import ShardManifest
from shardway.data.formats.shards import ShardTokens, open_token_shards
from shardway.data.formats.token_store import TokenFile, Tokens, TokenStore, check_tokens, read_npy_tokens, stage_file
from shardway.data.formats.tokens import open_token_store
from shardway.data.prepare import prepare_documents
from shardway.data.prepare_plan import PrepareOptions
from shardway.data.sources.base import Arrays, DataRequest, FileBlocks, Hold, Ids, SourceFacts
from shardway.data.sources.grouped import GroupedDocuments, open_grouped
from shardway.data.sources.packed import NOT_COUNTED, SAMPLED_FILES, PackedDocuments, open_packed
from shardway.data.tokenizers import Tokenizer, find_tokenizer, open_tokenizer
from shardway.errors import JobError, UserError, list_some
from shardway.places import expand_place, find_own_folder
from shardway.refusals import FULL, find_remedy
from shardway.runfile.schema import STDLIB
from shardway.units import render_count

# --- windows over a file of tokens


@dataclass(eq=False)
class TokenWindows:
    """Samples of `seq_len` tokens, int64: inputs [n, L], targets [n, L] one token later.

    `batch` raises UserError for a token at or above the vocabulary (below 0 for signed files), because on a device
    it would end in an unreadable fault of the embedding. A target that does not count is -100.
    """

    store: TokenStore
    seq_len: int
    place: DataPath
    facts: SourceFacts

    def __len__(self) -> int:
        return (len(self.store) - 1) // self.seq_len

    @property
    def file(self) -> TokenFile:
        """The file of the tokens; of several, the first."""
        return self.store.files[0]

    @property
    def tokens_per_sample(self) -> int:
        return self.seq_len

    def locate(self, number: int) -> str:
        """The tokens of a sample."""
        return self.store.locate(number * self.seq_len, self.seq_len + 1)

    def file_blocks(self) -> FileBlocks | None:
        """The samples by the file of their first token."""
        starts = self.store.file_starts()
        if starts is None:
            return None
        return FileBlocks(np.minimum(-(-starts[1:] // self.seq_len), len(self)), self.store.parts)

    def staged(self, hold: Hold) -> TokenWindows:
        """The same, read from staged files."""
        return replace(self, store=self.store.staged(hold))

    def batch(self, ids: Ids) -> Arrays:
        starts = ids * self.seq_len
        rows = self.store.rows(starts, self.seq_len + 1)
        check_tokens(rows, self.facts.vocab, self.place)
        # One block for both: of two, malloc gives memory back after each batch, and every page of it is made again.
        inputs, targets = np.empty((2, len(rows), self.seq_len), np.int64)
        inputs[:], targets[:] = rows[:, :-1], rows[:, 1:]
        counted = self.store.count_rows(starts + 1, self.seq_len) if self.store.counted else None
        if counted is not None:
            targets[~counted] = NOT_COUNTED
        return {"inputs": inputs, "targets": targets}


@dataclass(eq=False)
class JoinedTokens(TokenStore):
    """Documents joined into one file; `ends` says where they end, or which file of int64 does; None: nothing does."""

    ends: Offsets | TokenFile | None = None

    def read_ends(self) -> Offsets | None:
        return self.ends.open() if isinstance(self.ends, TokenFile) else self.ends

    def staged(self, hold: Callable[[FileParts], Any]) -> TokenStore:
        moved = super().staged(hold)
        if not isinstance(self.ends, TokenFile):
            return moved
        return replace(cast(JoinedTokens, moved), ends=replace(self.ends, path=stage_file(self.ends.path, hold)))


DocumentSamples = TokenWindows | PackedDocuments | GroupedDocuments


def _make_samples(store: TokenStore, place: DataPath, asked: DataRequest, facts: SourceFacts) -> DocumentSamples:
    """The samples of stored tokens: bins of their documents where data.pack asks for them, groups where
    data.group_tokens does, windows otherwise. Raises UserError."""
    section = asked.section
    make = open_packed if section.pack else open_grouped if section.group_tokens else _make_windows
    return make(store, place, asked, facts)


def _make_windows(store: TokenStore, place: DataPath, asked: DataRequest, facts: SourceFacts) -> TokenWindows:
    """The samples of stored tokens; the fingerprint combines that of `facts` and the tokens.

    Raises UserError if there are too few tokens for one sample, or if sampled tokens exceed the vocabulary.
    """
    seq_len = asked.section.seq_len
    if len(store) < seq_len + 1:
        raise place.error(
            f"holds {len(store)} tokens, too few for one sample",
            allowed=f"at least data.seq_len + 1 = {seq_len + 1}",
            remedy="give more data or a smaller data.seq_len",
        )
    filled = [file for file in store.files if file.tokens]
    for file in filled[:: -(-len(filled) // SAMPLED_FILES)]:
        for block in sample_blocks(file.open()):
            check_tokens(block, facts.vocab, place)
    complete = replace(facts, fingerprint=store.make_fingerprint(seq_len, facts.fingerprint))
    return TokenWindows(store, seq_len, place, complete)


def open_tokens(place: DataPath, asked: DataRequest) -> DocumentSamples:
    """The samples of a .npy or raw .bin token file, or of a folder of token shards.

    The vocabulary is that of the shards' manifest, else the model's if that is given. Raises UserError.
    """
    store = open_token_store(place, asked.section.token_dtype)
    described = f"{render_count(len(store))} tokens ({store.dtype.name})"
    facts = SourceFacts(f"{described} in {place.path}", "", (asked.section.seq_len,), vocab=asked.vocab)
    if isinstance(store, ShardTokens):
        facts = _add_manifest(facts, store.manifest, place, asked)
    return _make_samples(store, place, asked, facts)


def _add_manifest(facts: SourceFacts, manifest: ShardManifest, place: DataPath, asked: DataRequest) -> SourceFacts:
    """The facts with those of a manifest. Raises UserError for a model with too small a vocabulary."""
    vocab, text_bytes = manifest.vocab, manifest.text_bytes
    _check_vocab(asked.vocab, vocab, f'"{place.text}"')
    targets = int(manifest.described.get("counted", manifest.tokens))
    return replace(
        facts,
        description=f"{facts.description}, {render_count(manifest.samples)} documents",
        vocab=asked.vocab if vocab is None else vocab,
        bytes_per_token=None if text_bytes is None else text_bytes / max(1, targets),
    )


def _check_vocab(of_model: int | None, of_data: int | None, name: str) -> None:
    """Raise UserError for a model with too small a vocabulary for the data of that name."""
    if of_model is not None and of_data is not None and of_model < of_data:
        what, allowed = f"{of_model} is less than the {of_data} tokens of {name}", f'{of_data} and above, or "auto"'
        raise data_error("model.vocab", what, allowed=allowed)


def open_megatron(place: DataPath, asked: DataRequest) -> DocumentSamples:
    """The samples of Megatron-LM's name.bin and name.idx; their vocabulary is the model's if that is given."""
    store = open_megatron_store(place)
    description = f"{render_count(len(store))} tokens ({store.dtype.name}) in {store.files[0].path}"
    facts = SourceFacts(description, "", (asked.section.seq_len,), vocab=asked.vocab)
    return _make_samples(store, place, asked, facts)


def open_documents(records: Records, place: DataPath, asked: DataRequest) -> DocumentSamples:
    """The samples of documents of records: of each the text, the tokens or the conversation in the field data.inputs.

    They are prepared in data.cache as token shards, first by rank 0 while the others wait. Raises UserError for
    records without documents or a model with too small a vocabulary, JobError if the cache has no space, DamagedData.
    """
    section = asked.section
    if section.tokenizer != "bytes":
        _check_vocab(asked.vocab, open_tokenizer(section.tokenizer).vocab, f'data.tokenizer "{section.tokenizer}"')
    options = PrepareOptions(section.tokenizer, section.inputs, chat_template=section.chat_template)
    try:
        folder = prepare_documents(records, place, options, cache_folder(section.cache))
    except DamagedData as error:
        what, _, remedy = str(error).partition("\n")
        why = '  Documents are tokenised before the first step, where guard.damaged_data = "skip" has no effect.'
        raise DamagedData(f"{what}\n{why}\n{remedy}", error.place, of_copy=error.of_copy) from error
    store = open_token_shards(DataPath("data.cache", str(folder)))
    described = f"{render_count(len(store))} tokens ({store.dtype.name}) of {place.path}"
    facts = SourceFacts(described, "", (section.seq_len,), vocab=asked.vocab)
    return _make_samples(store, place, asked, _add_manifest(facts, store.manifest, place, asked))


# --- text files as one row of tokens

PREPARE_VERSION = 1
SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__"})

_LOOKED_AT = 1000
"""So many names of a folder show what lies there."""

PIECE_CHARACTERS = 2**20
"""Text is encoded in pieces of about this many characters that end at a line, so that memory stays bounded."""
_PIECES_AT_ONCE = 16


@dataclass(frozen=True)
class TextFile:
    """One document: its name below the folder, and what shows that it has not changed."""

    name: str
    size: int
    mtime_ns: int


@dataclass(frozen=True)
class Text:
    """The documents of a text, in the order in which they are joined."""

    root: Path
    files: tuple[TextFile, ...]

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)


def open_text(place: DataPath, asked: DataRequest) -> DocumentSamples:
    """The samples of a text file, or of the files of a folder whose name matches data.include.

    A single file read as bytes is memory-mapped. Otherwise the files, sorted by their path below the folder and joined
    by one zero byte (or the tokenizer's end-of-document token), are prepared in data.cache, first by rank 0 while the
    others wait. Bytes that are not UTF-8 reach a tokenizer as U+FFFD.
    """
    text, name = list_text(place, asked.section.include), asked.section.tokenizer
    tokenizer = None if name == "bytes" else open_tokenizer(name)
    vocab = 256 if tokenizer is None else tokenizer.vocab
    _check_vocab(asked.vocab, vocab, f'data.tokenizer "{name}"')
    # "bytes" stands for itself, a tokenizer for its content.
    content = name if tokenizer is None else fingerprint(find_tokenizer(name).read_bytes().hex())
    # Each file but the last is followed by one more token, which belongs to it.
    joined_ends = np.cumsum([file.size + 1 for file in text.files], dtype=np.int64)
    ends: Offsets | TokenFile = np.minimum(joined_ends, text.size + len(text.files) - 1)
    if tokenizer is None and len(text.files) == 1:
        tokens = TokenFile(text.root / text.files[0].name, "uint8", 0, text.files[0].size)
    else:
        dtype = np.dtype(np.uint8 if tokenizer is None else np.uint16 if vocab <= 2**16 else np.uint32)
        listed = ((file.name, file.size, file.mtime_ns) for file in text.files)
        key = fingerprint(PREPARE_VERSION, content, dtype, text.root.resolve(), *listed)
        found: list[int] = []
        cache, joined = cache_folder(asked.section.cache), _join(text, tokenizer, dtype, found)
        tokens = _prepare_tokens(cache, f"text-{key}", dtype, joined)
        if tokenizer is not None and (asked.section.pack or asked.section.group_tokens):
            listed_ends = _list_ends(text, tokenizer, dtype, found)
            ends = _prepare_tokens(cache, f"text-{key}-ends", np.dtype(np.int64), listed_ends)
    files = text.files[0].name if len(text.files) == 1 else f"{len(text.files)} files"
    description = f"{text.size / 1e6:.1f} MB of text, {files} in {text.root}"
    facts = SourceFacts(
        description if tokenizer is None else f"{description}, tokenizer {name} ({vocab} tokens)",
        content,
        (asked.section.seq_len,),
        vocab=vocab,
        bytes_per_token=1.0 if tokenizer is None else text.size / max(1, tokens.tokens),
    )
    return _make_samples(JoinedTokens((tokens,), ends=ends), place, asked, facts)


def list_text(place: DataPath, include: str) -> Text:
    """The documents at a path; raises UserError if there is none or one may not be read."""
    root = Path(sysconfig.get_path("stdlib")) if place.text == STDLIB else place.path
    if root.is_file():
        root, paths = root.parent, [root]
    elif root.is_dir():
        paths = sorted(_walk(root, include), key=lambda path: path.relative_to(root).as_posix())
    else:
        raise place.error("does not exist", allowed=f'a file, a folder, or "{STDLIB}"')
    if not paths:
        raise _no_match(place, root, include)
    named = [(path.relative_to(root).as_posix(), path.stat()) for path in paths]
    text = Text(root, tuple(TextFile(name, stat.st_size, stat.st_mtime_ns) for name, stat in named))
    denied = [file.name for file in text.files if not os.access(root / file.name, os.R_OK)]
    if denied:
        raise place.error(
            f"has files that may not be read: {list_some(denied, 5)}", remedy="ask their owner for read permission"
        )
    if text.size == 0:
        raise place.error("is empty" if len(paths) == 1 else f"has {len(paths)} files, all of them empty")
    return text


def _no_match(place: DataPath, root: Path, include: str) -> UserError:
    """The error for a folder of which `include` takes nothing: what lies there instead, and the key to set."""
    visible = (path.name for path in _walk(root, "*") if not path.name.startswith("."))
    names = sorted(itertools.islice(visible, _LOOKED_AT))
    if not names:
        return place.error("is a folder without files", allowed=f'a file, a folder with files, or "{STDLIB}"')
    suffixes = Counter(Path(name).suffix for name in names)
    glob = f"*{max(sorted(suffixes), key=lambda suffix: suffixes[suffix])}"
    remedy = f'data.include to a glob on file names, such as "{glob}"'
    from shardway.data.detect import find_record_kind, name_kind_key

    if kind := find_record_kind(place):
        remedy = f"{name_kind_key(place, kind)}, or, to train on the bytes as they are, {remedy}"
    shown = list_some(names, 3) if len(names) < _LOOKED_AT else f"{', '.join(names[:3])} and many more"
    return place.error(f'has no file that matches "{include}", but {shown}', remedy=f"set {remedy}")


def _walk(root: Path, include: str) -> Iterator[Path]:
    """Regular files below a folder whose name matches; OSError for a folder that may not be listed."""

    def refuse(error: OSError) -> None:
        raise error

    for folder, folders, names in os.walk(root, onerror=refuse):
        folders[:] = [name for name in folders if name not in SKIPPED_FOLDERS]
        paths = (Path(folder, name) for name in names if fnmatch.fnmatchcase(name, include))
        yield from (path for path in paths if path.is_file())


def _join(text: Text, tokenizer: Tokenizer | None, dtype: np.dtype[Any], ends: list[int]) -> Iterator[Tokens]:
    """All documents as bytes, with one zero byte between two; or as tokens, with the tokenizer's end of document, if it
    has one. `ends` gets the end of each, counted in tokens; what is between two belongs to the first."""
    done, end = 0, 0 if tokenizer is None else tokenizer.end
    for index, file in enumerate(text.files):
        if index:
            if end is not None:
                yield np.array([end], dtype)
                done += 1
            ends.append(done)
        for piece in _read_tokens(text, file, tokenizer, dtype):
            yield piece
            done += piece.size
    ends.append(done)


def _read_tokens(text: Text, file: TextFile, tokenizer: Tokenizer | None, dtype: np.dtype[Any]) -> Iterator[Tokens]:
    content = _read_document(text, file)
    if tokenizer is None:
        yield np.frombuffer(content, np.uint8)
        return
    pieces = split_pieces(content.decode("utf-8", errors="replace"))
    while group := list(itertools.islice(pieces, _PIECES_AT_ONCE)):
        yield from (np.array(tokens, dtype) for tokens in tokenizer.encode(group))


def _list_ends(text: Text, tokenizer: Tokenizer, dtype: np.dtype[Any], found: list[int]) -> Iterator[Tokens]:
    """The ends of all documents: `found` where they were joined just now, else counted once more."""
    if not found:
        for _ in _join(text, tokenizer, dtype, found):
            pass
    yield np.array(found, np.int64)


def split_pieces(text: str) -> Iterator[str]:
    """Consecutive pieces of a text, each of at least PIECE_CHARACTERS and up to the next end of line."""
    start = 0
    while start < len(text):
        line_end = text.find("\n", start + PIECE_CHARACTERS)
        stop = len(text) if line_end < 0 else line_end + 1
        yield text[start:stop]
        start = stop


def _read_document(text: Text, file: TextFile) -> bytes:
    path = text.root / file.name
    try:
        content = path.read_bytes()
    except OSError as error:
        raise JobError(f"{path} cannot be read: {error.strerror}") from error
    if len(content) != file.size:
        raise JobError(f"{path} changed while it was read; start the run again")
    return content


# --- the cache of prepared token files

STALE_S = 86400.0
"""A temporary file older than this was left by a kill and is removed."""

_PREFIX = ".preparing-"


def cache_folder(configured: str) -> Path:
    """data.cache; "auto" is shardway in the user's cache folder. Raises UserError if there is none."""
    if configured != "auto":
        return expand_place(configured)
    folder = find_own_folder("CACHE")
    if folder is None:
        what = '"auto" needs a home folder, and this account has none'
        raise data_error("data.cache", what, remedy="set data.cache to a folder")
    return folder


def _prepare_tokens(folder: Path, name: str, dtype: np.dtype[Any], tokens: Iterator[Tokens]) -> TokenFile:
    """The token file `name` of a cache folder; if it is missing or damaged, `tokens` is written to it.

    `tokens` gives pieces of `dtype` and turns its own reading errors into Shardway's: an OSError here is the cache's.
    Safe for many processes at once: each writes a file of its own and the last rename stands, with equal content.
    Raises UserError if the folder may not be written, JobError if there is no space.
    """
    target = folder / f"{name}.npy"
    place = DataPath("data.cache", str(target))
    with contextlib.suppress(UserError):
        if target.is_file():
            return read_npy_tokens(place)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob(f"{_PREFIX}*"):
            with contextlib.suppress(OSError):
                if time.time() - left.stat().st_mtime > STALE_S:
                    left.unlink()
        temporary = folder / f"{_PREFIX}{uuid.uuid4().hex}"
        try:
            with temporary.open("xb") as stream:
                _write_npy(stream, dtype, tokens)
            os.replace(temporary, target)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        if error.errno in FULL:
            raise JobError(
                f"no space for prepared data in {folder} ({reason})\n"
                f"  To do: {find_remedy(error, 'set data.cache to a folder with room')}."
            ) from error
        raise data_error(
            "data.cache", f'"{folder}" cannot be written: {reason}', remedy="set data.cache to a folder of yours"
        ) from error
    return read_npy_tokens(place)


def _write_npy(stream: IO[bytes], dtype: np.dtype[Any], tokens: Iterator[Tokens]) -> None:
    """A NumPy file whose length is known only at the end: the header is written twice, and NumPy pads it for that."""
    header, count = {"descr": dtype.str, "fortran_order": False}, 0
    np.lib.format.write_array_header_1_0(stream, {**header, "shape": (0,)})
    for piece in tokens:
        stream.write(piece.data)
        count += piece.size
    stream.seek(0)
    np.lib.format.write_array_header_1_0(stream, {**header, "shape": (count,)})
    stream.flush()
    os.fsync(stream.fileno())
