"""HTTP/1.1 responses and streams of server-sent events, read from bytes as they come.

Both readers are fed what a socket gave, in whatever pieces, and give back what is complete; they know no socket and no
clock, so that any split of the same bytes gives the same result.

Sources: RFC 9112 (HTTP/1.1), sections 4 to 7; WHATWG HTML, 9.2 "Server-sent events", of which `data` is read.

Invariants: bytes are decoded only when a line is whole, so no character is cut; nothing that a server sends is run or
written; a line or a head of absurd length is an error, not memory.
"""

from __future__ import annotations

from collections.abc import Mapping

_MOST_HEAD = 2**16
_MOST_LINE = 2**24


class BrokenResponse(Exception):
    """What a server sent is no HTTP/1.1 response, or ended before it was whole."""


class ResponseReader:
    """One response. `status` is 0 until its head is read; then `headers` has lower-case names."""

    def __init__(self) -> None:
        self.status = 0
        self.reason = ""
        self.headers: dict[str, str] = {}
        self.is_complete = False
        self.rest = b""
        """Bytes after the end of the response."""
        self._buffer = b""
        self._left = 0
        """Bytes of the body, or of the chunk, that are still to come."""
        self._mode = "head"

    @property
    def keeps_alive(self) -> bool:
        """Whether the connection can take another request once this response is complete."""
        return self._mode != "until close" and self.headers.get("connection", "").lower() != "close"

    def feed(self, data: bytes) -> bytes:
        """Take bytes from the socket and return those of the body among them, without the framing. Raises
        BrokenResponse."""
        if self._mode == "until close":
            return data
        self._buffer += data
        body: list[bytes] = []
        while not self.is_complete and self._advance(body):
            pass
        if self.is_complete:
            self.rest, self._buffer = self._buffer, b""
        return body[0] if len(body) == 1 else b"".join(body)

    def end(self) -> None:
        """The server has closed the connection. Raises BrokenResponse where more was due."""
        if self._mode == "until close":
            self.is_complete = True
        elif not self.is_complete:
            raise BrokenResponse("the server closed the connection before its answer was whole")

    def _advance(self, body: list[bytes]) -> bool:
        """Read the next part; False where more bytes are needed."""
        if self._mode in ("length", "chunk"):
            if not self._buffer:
                return False
            taken = self._buffer[: self._left]
            self._buffer = self._buffer[len(taken) :]
            self._left -= len(taken)
            body.append(taken)
            if not self._left:
                self._mode, self.is_complete = ("chunk end", False) if self._mode == "chunk" else ("done", True)
            return True
        if self._mode == "until close":
            body.append(self._buffer)
            self._buffer = b""
            return False
        end = self._buffer.find(b"\r\n\r\n" if self._mode == "head" else b"\n")
        if end < 0:
            if len(self._buffer) > _MOST_HEAD:
                raise BrokenResponse(f"the server sent {_MOST_HEAD:,} bytes without an end of the {self._mode}")
            return False
        if self._mode == "head":
            head, self._buffer = self._buffer[:end], self._buffer[end + 4 :]
            self._read_head(head)
            return True
        line, self._buffer = self._buffer[:end].rstrip(b"\r"), self._buffer[end + 1 :]
        if self._mode == "chunk end":
            if line:
                raise BrokenResponse("a chunk of the answer is longer than its size")
            self._mode = "size"
        elif self._mode == "size":
            try:
                self._left = int(line.partition(b";")[0], 16)
            except ValueError:
                raise BrokenResponse(f"a chunk of the answer has the size {line[:20]!r}") from None
            if self._left < 0:
                raise BrokenResponse(f"a chunk of the answer has the size {line[:20]!r}")
            self._mode = "chunk" if self._left else "trailer"
        elif not line:  # the end of the trailer
            self._mode, self.is_complete = "done", True
        return True

    def _read_head(self, head: bytes) -> None:
        first, *lines = head.decode("latin-1").split("\r\n")
        protocol, _, rest = first.partition(" ")
        code, _, self.reason = rest.partition(" ")
        if not protocol.startswith("HTTP/1.") or not code.isdecimal():
            raise BrokenResponse(f"the answer begins with {first[:40]!r}, which is no HTTP/1.1")
        if 100 <= int(code) < 200:
            return  # "continue": the response itself follows
        self.status = int(code)
        for line in lines:
            name, _, value = line.partition(":")
            self.headers[name.strip().lower()] = value.strip()
        if protocol == "HTTP/1.0" and self.headers.get("connection", "").lower() != "keep-alive":
            self.headers["connection"] = "close"
        if self.headers.get("transfer-encoding", "").lower().endswith("chunked"):
            self._mode = "size"
        elif self.status in (204, 304):
            self._mode, self.is_complete = "done", True
        elif "content-length" in self.headers:
            length = self.headers["content-length"]
            if not length.isdecimal():
                raise BrokenResponse(f"the answer has the length {length[:20]!r}")
            self._left = int(length)
            self._mode, self.is_complete = ("length", False) if self._left else ("done", True)
        else:
            self._mode = "until close"


class EventReader:
    """The data of server-sent events, each as bytes of UTF-8."""

    def __init__(self) -> None:
        self._buffer = b""
        self._data: list[bytes] = []

    def feed(self, data: bytes) -> list[bytes]:
        """Take bytes of the body; return the data of the events that are whole now. Raises BrokenResponse."""
        self._buffer += data
        if b"\n" not in data:
            if len(self._buffer) > _MOST_LINE:
                raise BrokenResponse(f"the server sent a line of more than {_MOST_LINE:,} bytes")
            return []
        *lines, self._buffer = self._buffer.split(b"\n")
        events = []
        for line in lines:
            if line.endswith(b"\r"):
                line = line[:-1]
            if line.startswith(b"data:"):
                self._data.append(line[6:] if line[5:6] == b" " else line[5:])
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data = []
        return events

    def end(self) -> list[bytes]:
        """The data of a last event that no empty line ended."""
        line, self._buffer = self._buffer.rstrip(b"\r"), b""
        if line.startswith(b"data:"):
            self._data.append(line[5:].removeprefix(b" "))
        events, self._data = ([b"\n".join(self._data)] if self._data else []), []
        return events


def render_request(method: str, target: str, host: str, headers: Mapping[str, str], body: bytes = b"") -> bytes:
    """A request with a body of JSON, or without one, over a connection that is kept."""
    lines = [f"{method} {target} HTTP/1.1", f"Host: {host}", "User-Agent: shardway", "Connection: keep-alive"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    if body:
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, "", ""]).encode("latin-1", "replace") + body
