"""Text files as one row of tokens: the tokenizer, and the cache of prepared files.

Invariants:
- A prepared file is written beside its final name and renamed when it is complete. So many processes may prepare the
  same text at once, and a kill leaves no partial file. The text itself is never written.
- The tokens of a text depend on the text and the tokenizer file alone, not on cores or threads. The tokenizer libraries
  are imported when a tokenizer is opened, so byte data need none.
"""

from __future__ import annotations

import contextlib
import fnmatch
import importlib
import itertools
import os
import sysconfig
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import IO, Any, Protocol

import numpy as np
import numpy.typing as npt

from shardway.data.sources.base import DataPath, DataRequest, SourceFacts, data_error, fingerprint
from shardway.data.sources.tokens import TokenFile, TokenWindows, make_windows, read_npy
from shardway.errors import Bug, JobError, UserError, list_some
from shardway.places import expand_place, find_own_folder
from shardway.refusals import FULL, find_remedy
from shardway.runfile.schema import STDLIB

# --- the cache of prepared token files

STALE_S = 86400.0
"""A temporary file older than this was left by a kill and is removed."""

Tokens = npt.NDArray[Any]

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


def prepare_tokens(folder: Path, name: str, dtype: np.dtype[Any], tokens: Callable[[], Iterator[Tokens]]) -> TokenFile:
    """The token file `name` of a cache folder; if it is missing or damaged, `tokens()` is written to it.

    `tokens` gives pieces of `dtype` and turns its own reading errors into Shardway's: an OSError here is the cache's.
    Safe for many processes at once: each writes a file of its own and the last rename stands, with equal content.
    Raises UserError if the folder may not be written, JobError if there is no space.
    """
    target = folder / f"{name}.npy"
    if not _is_whole(target):
        with _cache_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            _remove_stale(folder)
            _write_tokens(target, dtype, tokens())
    return read_npy(DataPath("data.cache", str(target)))


def _is_whole(target: Path) -> bool:
    try:
        return target.is_file() and read_npy(DataPath("data.cache", str(target))).tokens >= 0
    except UserError:
        return False


def _write_tokens(target: Path, dtype: np.dtype[Any], tokens: Iterator[Tokens]) -> None:
    temporary = target.parent / f"{_PREFIX}{uuid.uuid4().hex}"
    try:
        with temporary.open("xb") as stream:
            _write_npy(stream, dtype, tokens)
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def _write_npy(stream: IO[bytes], dtype: np.dtype[Any], tokens: Iterator[Tokens]) -> None:
    """A NumPy file whose length is known only at the end: the header is written twice, and NumPy pads it for that."""
    count, start = 0, _write_header(stream, dtype, 0)
    for piece in tokens:
        stream.write(piece.data)
        count += piece.size
    stream.seek(0)
    if _write_header(stream, dtype, count) != start:
        raise Bug(f"the header of a token file grew with its length of {count} tokens; please report this")
    stream.flush()
    os.fsync(stream.fileno())


def _write_header(stream: IO[bytes], dtype: np.dtype[Any], count: int) -> int:
    header = {"descr": dtype.str, "fortran_order": False, "shape": (count,)}
    np.lib.format.write_array_header_1_0(stream, header)
    return stream.tell()


def _remove_stale(folder: Path) -> None:
    for left in folder.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > STALE_S:
                left.unlink()


@contextlib.contextmanager
def _cache_errors(folder: Path) -> Iterator[None]:
    """Turn an error of the cache into one that names the folder and a remedy."""
    try:
        yield
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


# --- the tokenizer, one interface for both libraries

END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]")
"""Usual names of the token that ends a document; the first that a tokenizer.json has is used."""

PIECE_CHARACTERS = 2**20
"""Text is encoded in pieces of about this many characters that end at a line, so that memory stays bounded."""


class Tokenizer(Protocol):
    """`vocab` is one more than the largest token; `end` is the token between documents, or None."""

    @property
    def vocab(self) -> int: ...

    @property
    def end(self) -> int | None: ...

    def encode(self, pieces: Sequence[str]) -> list[list[int]]: ...


@dataclass(frozen=True)
class JsonTokenizer:
    """A tokenizer.json, through the `tokenizers` package."""

    inner: Any

    @property
    def vocab(self) -> int:
        return max(self.inner.get_vocab(with_added_tokens=True).values()) + 1

    @property
    def end(self) -> int | None:
        found = (self.inner.token_to_id(name) for name in END_TOKENS)
        return next((token for token in found if token is not None), None)

    def encode(self, pieces: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self.inner.encode_batch(list(pieces), add_special_tokens=False)]


@dataclass(frozen=True)
class SentencePiece:
    """A .model file, through the `sentencepiece` package."""

    inner: Any

    @property
    def vocab(self) -> int:
        return int(self.inner.get_piece_size())

    @property
    def end(self) -> int | None:
        token = int(self.inner.eos_id())
        return token if token >= 0 else None

    def encode(self, pieces: Sequence[str]) -> list[list[int]]:
        encoded: list[list[int]] = self.inner.encode(list(pieces))
        return encoded


def open_tokenizer(name: str) -> Tokenizer:
    """The tokenizer of a .json or .model file; UserError if the file is missing or damaged, or its package is
    missing."""
    place = DataPath("data.tokenizer", name)
    openers = {".json": _open_json, ".model": _open_sentencepiece}
    if place.path.suffix not in openers:
        raise place.error("is not a tokenizer", allowed='"bytes", a tokenizer.json file or a .model file')
    if not place.path.is_file():
        raise place.error("does not exist", allowed='"bytes", a tokenizer.json file or a .model file')
    try:
        return openers[place.path.suffix](place.path)
    except UserError:
        raise
    except Exception as error:  # both libraries raise bare Exception, RuntimeError or OSError for a damaged file
        raise place.error(f"is not a {place.path.suffix} tokenizer that can be read: {error}") from error


def identify_tokenizer(name: str) -> str:
    """A fingerprint of the tokenizer's content; "bytes" stays itself."""
    return name if name == "bytes" else fingerprint(DataPath("data.tokenizer", name).path.read_bytes().hex())


def split_pieces(text: str) -> Iterator[str]:
    """Consecutive pieces of a text, each of at least PIECE_CHARACTERS and up to the next end of line."""
    start = 0
    while start < len(text):
        line_end = text.find("\n", start + PIECE_CHARACTERS)
        stop = len(text) if line_end < 0 else line_end + 1
        yield text[start:stop]
        start = stop


def _open_json(path: Path) -> Tokenizer:
    inner = _import_package("tokenizers").Tokenizer.from_file(str(path))
    # A tokenizer.json may carry the truncation and padding of the model it was made for; a corpus needs neither.
    inner.no_truncation()
    inner.no_padding()
    return JsonTokenizer(inner)


def _open_sentencepiece(path: Path) -> Tokenizer:
    return SentencePiece(_import_package("sentencepiece").SentencePieceProcessor(model_file=str(path)))


def _import_package(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(
            f"data.tokenizer needs the Python package {name}, which is not installed\n"
            '      to do: pip install "shardway[tokenizers]"'
        ) from error


# --- text files as one row of tokens

PREPARE_VERSION = 1
SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__"})

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


def open_text(place: DataPath, asked: DataRequest) -> TokenWindows:
    """The samples of a text file, or of the files of a folder whose name matches data.include.

    A single file read as bytes is memory-mapped. Otherwise the files, sorted by their path below the folder and joined
    by one zero byte (or the tokenizer's end-of-document token), are prepared in data.cache, first by rank 0 while the
    others wait. Bytes that are not UTF-8 reach a tokenizer as U+FFFD.
    """
    text = list_text(place, asked.section.include)
    if asked.section.tokenizer == "bytes":
        return _open_bytes(place, asked, text)
    return _open_tokenized(place, asked, text)


def list_text(place: DataPath, include: str) -> Text:
    """The documents at a path; raises UserError if there is none or one may not be read."""
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
    """The token file of this text and tokenizer in the cache, made now if it is missing."""
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
