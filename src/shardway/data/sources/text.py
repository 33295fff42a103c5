"""Text files as one row of tokens, prepared once into a cache.

Invariant: a prepared file appears by rename only when it is whole, so that many processes may prepare the same
text at once and a kill leaves nothing half. The text itself is never written. This module must not know samples:
`tokens` makes windows of what it prepares.
"""

from __future__ import annotations

import fnmatch
import itertools
import os
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shardway.data.sources.base import DataPath, DataRequest, SourceFacts, data_error, fingerprint
from shardway.data.sources.cache import Tokens, cache_folder, prepare_tokens
from shardway.data.sources.tokenizer import Tokenizer, identify_tokenizer, open_tokenizer, split_pieces
from shardway.data.sources.tokens import TokenFile, TokenWindows, make_windows
from shardway.errors import JobError, list_some

PREPARE_VERSION = 1
STDLIB = "python:stdlib"
SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__"})

_PIECES_AT_ONCE = 16


@dataclass(frozen=True)
class TextFile:
    """One document: its name below the folder, and what tells that it has not changed."""

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


def open_text(place: DataPath, asked: DataRequest) -> TokenWindows:
    """The samples of a text file, or of the files of a folder whose name matches data.include.

    A single file read as bytes is mapped where it lies. Otherwise the files, sorted by their path below the folder
    and joined by one zero byte (or the tokenizer's end-of-document token), are prepared in data.cache, which rank 0
    does first while the others wait. Bytes that are not UTF-8 reach a tokenizer as U+FFFD.
    """
    text = list_text(place, asked.section.include)
    if asked.section.tokenizer == "bytes":
        return _open_bytes(place, asked, text)
    return _open_tokenized(place, asked, text)


def list_text(place: DataPath, include: str) -> Text:
    """The documents at a place; raises UserError where there is none or one may not be read."""
    root = Path(sysconfig.get_path("stdlib")) if place.text == STDLIB else place.path
    if root.is_file():
        text = Text(root.parent, (_describe(root, root.name),))
    elif root.is_dir():
        paths = sorted(_walk(root, include), key=lambda path: path.relative_to(root).as_posix())
        text = Text(root, tuple(_describe(path, path.relative_to(root).as_posix()) for path in paths))
    else:
        raise place.error("does not exist", allowed=f'a file, a folder, or "{STDLIB}"')
    _check_text(place, text, include)
    return text


def _walk(root: Path, include: str) -> Iterator[Path]:
    """Regular files below a folder whose name matches; OSError for a folder that may not be listed."""
    for folder, folders, names in os.walk(root, onerror=_raise):
        folders[:] = [name for name in folders if name not in SKIPPED_FOLDERS]
        paths = (Path(folder, name) for name in names if fnmatch.fnmatchcase(name, include))
        yield from (path for path in paths if path.is_file())


def _raise(error: OSError) -> None:
    raise error


def _describe(path: Path, name: str) -> TextFile:
    stat = path.stat()
    return TextFile(name, stat.st_size, stat.st_mtime_ns)


def _check_text(place: DataPath, text: Text, include: str) -> None:
    if not text.files:
        raise place.error(f'has no file that matches "{include}"', remedy="set data.include to a glob on file names")
    denied = [file.name for file in text.files if not os.access(text.root / file.name, os.R_OK)]
    if denied:
        raise place.error(
            f"has files that may not be read: {list_some(denied, 5)}", remedy="ask their owner for read permission"
        )
    if text.size == 0:
        raise place.error("is empty" if len(text.files) == 1 else f"has {len(text.files)} files, all of them empty")


def _open_bytes(place: DataPath, asked: DataRequest, text: Text) -> TokenWindows:
    _check_vocab(asked, 256, "bytes")
    file = text.files[0]
    if len(text.files) == 1:
        tokens = TokenFile(text.root / file.name, "uint8", 0, file.size)
    else:
        tokens = _prepare(asked, text, np.dtype(np.uint8), lambda: _join_bytes(text))
    facts = SourceFacts(_summarise(text), "bytes", (asked.section.seq_len,), vocab=256, bytes_per_token=1.0)
    return make_windows(tokens, place, asked, facts)


def _open_tokenized(place: DataPath, asked: DataRequest, text: Text) -> TokenWindows:
    name = asked.section.tokenizer
    tokenizer = open_tokenizer(name)
    _check_vocab(asked, tokenizer.vocab, name)
    dtype = np.dtype(np.uint16 if tokenizer.vocab <= 2**16 else np.uint32)
    tokens = _prepare(asked, text, dtype, lambda: _join_tokens(text, tokenizer, dtype))
    facts = SourceFacts(
        description=f"{_summarise(text)}, tokenizer {name} ({tokenizer.vocab} tokens)",
        fingerprint=identify_tokenizer(name),
        sample_shape=(asked.section.seq_len,),
        vocab=tokenizer.vocab,
        bytes_per_token=text.size / max(1, tokens.tokens),
    )
    return make_windows(tokens, place, asked, facts)


def _check_vocab(asked: DataRequest, vocab: int, tokenizer: str) -> None:
    if asked.vocab is not None and asked.vocab < vocab:
        raise data_error(
            "model.vocab",
            f'{asked.vocab} is less than the {vocab} tokens of data.tokenizer "{tokenizer}"',
            allowed=f'{vocab} and above, or "auto"',
        )


def _summarise(text: Text) -> str:
    files = text.files[0].name if len(text.files) == 1 else f"{len(text.files)} files"
    return f"{text.size / 1e6:.1f} MB of text, {files} in {text.root}"


def _prepare(asked: DataRequest, text: Text, dtype: np.dtype[Any], tokens: Callable[[], Iterator[Tokens]]) -> TokenFile:
    """The token file of this text and tokenizer in the cache, made now where it is not there yet."""
    tokenizer = identify_tokenizer(asked.section.tokenizer)
    listed = ((file.name, file.size, file.mtime_ns) for file in text.files)
    key = fingerprint(PREPARE_VERSION, tokenizer, dtype, text.root.resolve(), *listed)
    return prepare_tokens(cache_folder(asked.section.cache), f"text-{key}", dtype, tokens)


def _join_bytes(text: Text) -> Iterator[Tokens]:
    """All documents as bytes, with one zero byte between two."""
    for index, file in enumerate(text.files):
        if index:
            yield np.zeros(1, np.uint8)
        yield np.frombuffer(_read_document(text, file), np.uint8)


def _join_tokens(text: Text, tokenizer: Tokenizer, dtype: np.dtype[Any]) -> Iterator[Tokens]:
    """All documents as tokens, with the tokenizer's end of document, if it has one, between two."""
    for index, file in enumerate(text.files):
        if index and tokenizer.end is not None:
            yield np.array([tokenizer.end], dtype)
        pieces = split_pieces(_read_document(text, file).decode("utf-8", errors="replace"))
        while group := list(itertools.islice(pieces, _PIECES_AT_ONCE)):
            yield from (np.array(tokens, dtype) for tokens in tokenizer.encode(group))


def _read_document(text: Text, file: TextFile) -> bytes:
    path = text.root / file.name
    try:
        content = path.read_bytes()
    except OSError as error:
        raise JobError(f"{path} cannot be read: {error.strerror}") from error
    if len(content) != file.size:
        raise JobError(f"{path} changed while it was read; start the run again")
    return content
