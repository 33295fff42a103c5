"""A trace of torch's profiler (Kineto), or another file in Chrome's trace format, from bytes to columns.

Invariants:
- The file is decoded in pieces of about a megabyte, and of an event nothing is kept but its row of columns.
- A piece that decodes as a list of events was cut between two events: JSON that is cut elsewhere does not balance.
- Whatever a file holds, there is a `Trace`, with what was left out in `faults`, or a `UserError`: nothing else.
"""

from __future__ import annotations

import gc
import json
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from shardway.errors import UserError, legible
from shardway.watch.trace.columns import BareEvent, Trace, TraceColumns, TraceEvent, TraceFaults

_PIECE = 1 << 20  # bytes of JSON that are decoded at once
_BEGIN = 64 << 10  # what is looked at to name a file that is no trace
_INPUT = 8 << 10  # compressed bytes at once: damage costs what is expanded with it
_HEAD_MOST = 64 << 20  # no trace has more before its events
_TAIL_MOST = 4 << 20  # what follows the events is a few names


def read_trace(path: Path) -> Trace:
    """The events of a file. Raises UserError if it cannot be read or is no trace."""
    try:
        stream = path.open("rb")
    except OSError as error:
        raise UserError(
            f"{path} cannot be read: {error.strerror}.\n  To do: name a trace (.json or .json.gz)."
        ) from None
    columns = TraceColumns()
    with stream, _no_collection():
        source = _Source(stream, path)
        try:
            _read_events(source, columns)
        except OSError as error:
            if columns.rows == 0:
                raise UserError(f"{path} cannot be read: {error.strerror}.") from None
            columns.faults.truncated = f"reading ended at byte {source.read_bytes:,}: {error.strerror}"
        source.finish(columns.faults)
    if columns.properties is None:
        raise _refuse(path, source)
    return columns.finish(path, source.json_bytes)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Without the garbage collector, which would look at every event of a piece again and again; none has a cycle."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


# --- bytes of JSON, whether the file is compressed or not


class _Source:
    """The text of a file in pieces."""

    def __init__(self, stream: Any, path: Path) -> None:
        self.stream, self.path = stream, path
        self.begin = stream.read(_BEGIN)
        self.read_bytes = len(self.begin)
        self.json_bytes = 0
        self.ended = ""  # why the text ends before the file does
        self._waiting = self.begin
        self._inflate: Any = zlib.decompressobj(31) if self.begin[:2] == b"\x1f\x8b" else None

    def next_piece(self) -> bytes:
        """About as much text as is decoded at once; empty at the end."""
        parts, size = [], 0
        while size < _PIECE and not self.ended:
            data, self._waiting = self._waiting or self.stream.read(_PIECE), b""
            self.read_bytes = max(self.read_bytes, self.stream.tell())
            if not data:
                break
            if self._inflate is not None:
                data = self._expand(data)
            parts.append(data)
            size += len(data)
        self.json_bytes += size
        return b"".join(parts) if len(parts) != 1 else parts[0]

    def _expand(self, data: bytes) -> bytes:
        try:
            if self._inflate.eof:  # a file may hold several members
                self._inflate = zlib.decompressobj(31)
            text = self._inflate.decompress(data[:_INPUT], 4 * _PIECE)
        except zlib.error as error:
            self.ended = f"its compressed data are damaged near byte {self.read_bytes:,} ({error})"
            return b""
        rest = self._inflate.unconsumed_tail or self._inflate.unused_data.lstrip(b"\0")
        self._waiting = rest + data[_INPUT:]
        return text

    def finish(self, faults: TraceFaults) -> None:
        if not self.ended and self._inflate is not None and not self._inflate.eof:
            self.ended = f"its compressed data end at byte {self.read_bytes:,}, before their end mark"
        if self.ended:
            faults.truncated = self.ended


_KINDS = (
    (b"PK", "a zip archive", "unpack it"),
    (b"\x28\xb5\x2f\xfd", "compressed by zstd", "unpack it with `unzstd`"),
    (b"BZh", "compressed by bzip2", "unpack it with `bunzip2`"),
    (b"\xfd7zXZ", "compressed by xz", "unpack it with `unxz`"),
    (b"SQLite format 3", "an SQLite database, such as that of Nsight Systems", ""),
    (b"\x80\x02", "a pickle, such as torch's memory snapshot", ""),
    (b"\x80\x04", "a pickle, such as torch's memory snapshot", ""),
    (b"\x0a", "binary, such as a trace of Perfetto", ""),
)
"""How other files begin, what they are, and how one of them may become a trace."""


def _refuse(path: Path, source: _Source) -> UserError:
    begin = source.begin
    if source._inflate is not None:
        with suppress(zlib.error):
            begin = zlib.decompressobj(31).decompress(begin, _BEGIN)
        if source.ended:
            return UserError(f"{path} is no trace: {source.ended}.\n  To do: copy it again.")
    stripped = begin.removeprefix(b"\xef\xbb\xbf").lstrip()
    kind, remedy = "", ""
    if not begin.strip():
        kind = "empty" if not begin else "blank"
        remedy = "a profiler with `schedule(...)` writes its trace in `on_trace_ready`: give it one"
    elif stripped[:1] == b"{":
        kind = 'JSON without "traceEvents"'
        if len(begin) < _BEGIN and not _is_json(stripped):
            kind, remedy = f"{kind}, and cut off or damaged", "copy it again, or name another file"
    else:
        kind, remedy = next(
            ((what, to_do) for mark, what, to_do in _KINDS if begin.startswith(mark) and _is_binary(begin)),
            (
                "binary"
                if _is_binary(begin)
                else f"text that begins with {legible(stripped[:24].decode(errors='replace'))!r}",
                "",
            ),
        )
    remedy = remedy or "name what `prof.export_chrome_trace(...)` or `shardway profile` wrote"
    return UserError(
        f"{path} is no trace: it is {kind}.\n"
        "  Allowed: Chrome's trace format as torch's profiler writes it, .json or .json.gz, a list of events or"
        ' "traceEvents".\n'
        f"  To do: {remedy}."
    )


def _is_json(text: bytes) -> bool:
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return True


def _is_binary(begin: bytes) -> bool:
    return begin[:2] in (b"PK", b"BZ") or b"\0" in begin[:512] or any(byte > 127 for byte in begin[:8])


def may_be_trace(path: Path) -> bool:
    """Whether a file may be a trace by its beginning: a folder holds other JSON files too. One that is empty or damaged
    may be, so that it is not passed over in silence."""
    try:
        with path.open("rb") as stream:
            begin = _Source(stream, path).next_piece()
    except OSError:
        return True
    stripped = begin.removeprefix(b"\xef\xbb\xbf").lstrip()
    if stripped[:1] == b"[":
        return bool(re.match(rb"\[\s*(\{[^{}]*\"(ph|ts)\"|\]|$)", stripped))
    return stripped[:1] != b"{" or bool(_EVENTS.search(stripped))


# --- from text to events

_decode_events = msgspec.json.Decoder(list[TraceEvent], strict=False).decode
_decode_event = msgspec.json.Decoder(TraceEvent, strict=False).decode
_decode_bare = msgspec.json.Decoder(BareEvent, strict=False).decode

_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')
_BETWEEN = re.compile(rb"\}\s*,\s*(?=\{)")
_CLOSING = re.compile(rb"\}\s*\]")


def _read_events(source: _Source, columns: TraceColumns) -> None:
    """Fill the columns. `columns.properties` stays None where no list of events is found."""
    text, is_list = _find_events(source, columns)
    if columns.properties is None:
        return
    while True:
        piece = source.next_piece()
        text += piece
        if not piece:
            break
        cut = _last_cut(text)
        if cut is None:
            if len(text) > _HEAD_MOST:
                columns.faults.truncated = f"no event ends within {_HEAD_MOST >> 20} MiB of text"
                return
            continue
        body, text = text[: cut[0]], text[cut[1] :]
        try:
            columns.add(_decode_events(b"[" + body + b"]"))
        except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError):
            tail = _read_slowly(body, columns)
            if tail is not None:  # the list ended; what follows is properties
                _read_properties(tail + b"," + text, source, columns)
                return
    _read_last(text, source, columns, is_list=is_list)


def _find_events(source: _Source, columns: TraceColumns) -> tuple[bytes, bool]:
    """The text from the first event on, and whether the whole file is a list."""
    text = source.next_piece()
    stripped = text.removeprefix(b"\xef\xbb\xbf").lstrip()
    if stripped[:1] == b"[":
        after = stripped[1:].lstrip()
        if after[:1] in (b"{", b"]", b""):
            columns.properties = {}
        return after, True
    if stripped[:1] != b"{":
        return b"", False
    searched = 0
    while (found := _EVENTS.search(text, max(0, searched - 64))) is None:
        searched = len(text)
        more = source.next_piece()
        if not more or len(text) > _HEAD_MOST:
            return b"", False
        text += more
    columns.properties, columns.is_object = {}, True
    head = text[: found.start()].rstrip().rstrip(b",") + b"}"
    with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        columns.properties = _only_small(msgspec.json.decode(head.removeprefix(b"\xef\xbb\xbf")))
    return text[found.end() :].lstrip(), False


def _last_cut(text: bytes) -> tuple[int, int] | None:
    """Where the last event begins: the end of the one before it, and its own first byte."""
    at = len(text)
    for _ in range(64):
        at = text.rfind(b"{", 0, at)
        if at < 1:
            return None
        before = text[max(0, at - 256) : at].rstrip()
        if before[-1:] == b"," and (trimmed := before[:-1].rstrip())[-1:] == b"}":
            return at - (min(at, 256) - len(trimmed)), at
    return None


def _read_last(text: bytes, source: _Source, columns: TraceColumns, *, is_list: bool) -> None:
    """The last events, the end of the list, and the properties that follow it."""
    stripped = text.lstrip()
    if stripped[:1] == b"]":
        _read_properties(stripped[1:], source, columns)
        return
    closings = [found.start() + 1 for found in _CLOSING.finditer(text)]
    for end in closings[:-6:-1]:
        try:
            columns.add(_decode_events(b"[" + text[:end] + b"]"))
        except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError):
            continue
        _read_properties(text[end:].lstrip()[1:], source, columns)
        return
    tail = _read_slowly(text, columns, is_last=True, is_list=is_list)
    if tail is not None:
        _read_properties(tail, source, columns)


def _read_properties(tail: bytes, source: _Source, columns: TraceColumns) -> None:
    """What follows the list of events: `, "key": value, ...}`."""
    while len(tail) < _TAIL_MOST and (more := source.next_piece()):
        tail += more
    while source.next_piece():
        pass
    rest = tail.strip().lstrip(b",").strip()
    if rest in (b"", b"}"):
        if rest == b"" and columns.is_object:
            columns.faults.truncated = columns.faults.truncated or "its last bracket is missing"
        return
    try:
        columns.properties = {**(columns.properties or {}), **_only_small(msgspec.json.decode(b"{" + rest))}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        columns.faults.truncated = columns.faults.truncated or "what follows its events is no JSON"


def _only_small(found: Any) -> dict[str, Any]:
    """The properties without long ones, such as trees of other tools."""
    if not isinstance(found, dict):
        return {}
    keep = {"deviceProperties", "distributedInfo"}
    return {
        key: value
        for key, value in found.items()
        if key in keep or not isinstance(value, list | dict) or len(json.dumps(value)) < 4096
    }


def _read_slowly(text: bytes, columns: TraceColumns, *, is_last: bool = False, is_list: bool = False) -> bytes | None:
    """Events one by one, for text that does not decode as a whole. What follows the list's end, None if it goes on."""
    starts = [0, *(found.end() for found in _BETWEEN.finditer(text))]
    ends = [*(found.start() + 1 for found in _BETWEEN.finditer(text)), len(text)]
    at, found = 0, []
    tail: bytes | None = None
    while at < len(starts):
        event, used = _decode_one(text, starts, ends, at, columns.faults)
        if event is not None:
            found.append(event)
            at += used
            continue
        piece = text[starts[at] : ends[at]]
        event, tail = _decode_before_end(text[starts[at] :], columns.faults)
        if event is not None:
            found.append(event)
            break
        if is_last and at == len(starts) - 1:
            if piece.strip():
                columns.faults.truncated = columns.faults.truncated or "its last event is incomplete"
            elif not is_list:
                columns.faults.truncated = columns.faults.truncated or "the list of its events has no end"
            break
        columns.faults.malformed += 1
        columns.faults.sample = columns.faults.sample or legible(piece[:200].decode(errors="replace"))
        at += 1
    else:
        if is_last and not is_list:
            columns.faults.truncated = columns.faults.truncated or "the list of its events has no end"
    columns.add(found)
    return tail


_MOST_NESTED = 100  # objects that follow each other inside one event


def _decode_one(
    text: bytes, starts: list[int], ends: list[int], at: int, faults: TraceFaults
) -> tuple[TraceEvent | BareEvent | None, int]:
    """The event that begins at a cut, and how many cuts it has in it."""
    for used in range(1, min(_MOST_NESTED, len(starts) - at) + 1):
        piece = text[starts[at] : ends[at + used - 1]]
        if used > 1 and _is_event(text[starts[at + used - 1] : ends[at + used - 1]]):
            break  # the one before is broken, and this is the next
        try:
            return _decode_event(piece), used
        except msgspec.ValidationError:  # JSON, but no event as torch writes it
            with suppress(msgspec.DecodeError, UnicodeDecodeError):
                event = _decode_bare(piece)
                return event, used
            return None, 1
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            continue
    return None, 1


def _is_event(piece: bytes) -> bool:
    """Whether a text is an event by itself, and not an object within another one."""
    if b'"ts"' not in piece or b'"pid"' not in piece:
        return False
    try:
        _decode_bare(piece)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return True


def _decode_before_end(text: bytes, faults: TraceFaults) -> tuple[TraceEvent | BareEvent | None, bytes | None]:
    """The event before the end of the list, and what follows that end."""
    for found in list(_CLOSING.finditer(text[:_PIECE]))[:16]:
        event, _ = _decode_one(text, [0], [found.start() + 1], 0, faults)
        if event is not None:
            return event, text[found.end() :]
    return None, None
