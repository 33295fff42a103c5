"""A client of OpenAI-compatible servers that measures: many streams in one thread, each piece of output with its time.

It speaks HTTP/1.1 itself, on asyncio's protocols: a client library of the service that is measured takes so much time
for each token that at some hundred streams it is what is measured (S. Bekman, Machine Learning Engineering,
"Inference").

Definitions: an arrival is when bytes that carry output were received, by the kernel's stamp where it gives one; a piece
of output may be several tokens, which are counted by the server's `usage` where it has one, else as pieces. ITL is the
gap between pieces.

Invariants:
- The key is read from an environment variable by the caller; it is sent, and never kept, shown or written.
- A request either has all of its output or an error; none is lost or sent twice, but for one on a kept connection that
  the server had closed before it sent anything.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import msgspec

from shardway.bench.inference.http_stream import BrokenResponse, EventReader, ResponseReader, render_request
from shardway.bench.inference.results import ServedRequest
from shardway.bench.inference.stamped_socket import StampedSocket
from shardway.errors import UserError

ENDPOINTS = ("/v1/completions", "/v1/chat/completions")

# --- where


@dataclass(frozen=True)
class ServerAddress:
    """A server, by the parts of its URL; `prefix` is what stands before /v1."""

    host: str
    port: int
    is_tls: bool
    prefix: str = ""

    @property
    def url(self) -> str:
        """As a person writes it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.is_tls else 'http'}://{host}:{self.port}{self.prefix}"


def parse_address(text: str) -> ServerAddress:
    """The server of a URL such as http://node7:8000 or https://host/models/v1. Raises ValueError with a sentence."""
    allowed = "allowed: http://HOST:PORT or https://HOST[:PORT], with or without /v1"
    try:
        parts = urlsplit(text if "://" in text else f"http://{text}")
        port = parts.port
    except ValueError as error:
        raise ValueError(f'"{text}" is no URL: {error}; {allowed}') from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f'"{text}" is no URL of a server; {allowed}')
    if parts.username or parts.password:
        raise ValueError("a URL with a password in it would be shown and written; allowed: --api-key-env NAME")
    is_tls = parts.scheme == "https"
    path = parts.path.rstrip("/")
    for ending in (*ENDPOINTS, "/v1/models", "/v1"):
        path = path.removesuffix(ending)
    return ServerAddress(parts.hostname, port or (443 if is_tls else 80), is_tls, path)


# --- what a server streams


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Any = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    def has_output(self) -> bool:
        """Whether it carries tokens. An empty text that ends nothing is a token whose characters are not whole yet."""
        if self.delta is not None:
            each = self.delta
            return bool(each.content or each.reasoning_content or each.reasoning or each.tool_calls)
        return bool(self.text) or (self.text is not None and self.finish_reason is None)


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Piece(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None
    object: str | None = None
    message: str | None = None

    def find_failure(self) -> str:
        """Why the server gave up, in one of the forms that servers have for it; "" where it did not."""
        if self.error is not None:
            return _shorten(self.error)
        if self.object == "error":
            return _shorten(self.message)
        ended = next((each.finish_reason for each in self.choices if each.finish_reason in ("abort", "error")), None)
        return f"finish_reason {ended}" if ended else ""


_DECODER = msgspec.json.Decoder(_Piece)
_MOST_ERROR = 2**16


class CompletionExchange:
    """One request and what has come of its answer. It is fed bytes with the time of their arrival."""

    def __init__(self, prompt_tokens: int = 0) -> None:
        self.sent_s = 0.0
        self.arrivals_s: list[float] = []
        self.usage = _Usage()
        self.error = ""
        self.body = b""
        self.response = ResponseReader()
        self.is_done = False
        """Whether nothing more of it is awaited, but perhaps the end of the response."""
        self._prompt_tokens = prompt_tokens
        self._events = EventReader()

    @property
    def is_stream(self) -> bool:
        return self.response.headers.get("content-type", "").startswith("text/event-stream")

    def feed(self, data: bytes, now: float) -> None:
        """Bytes of the answer. Raises BrokenResponse."""
        body = self.response.feed(data)
        if body and (self.response.status != 200 or not self.is_stream):
            self.body += body[: _MOST_ERROR - len(self.body)] if self.response.status != 200 else body
        elif body:
            for event in self._events.feed(body):
                self._take(event, now)
        if self.response.is_complete:
            self._finish(now)

    def close(self, now: float) -> None:
        """The server closed the connection. Raises BrokenResponse where the answer is not whole."""
        if self.is_done and not self.response.is_complete:
            return
        self.response.end()
        self._finish(now)

    def _take(self, event: bytes, now: float) -> None:
        if event == b"[DONE]":
            self.is_done = True
            return
        try:
            piece = _DECODER.decode(event)
        except msgspec.MsgspecError as error:
            raise BrokenResponse(f"an event of the stream is no JSON of a completion: {error}") from None
        if failure := piece.find_failure():
            self.error = self.error or f"the server reported: {failure}"
        if piece.usage is not None:
            self.usage = piece.usage
        if any(each.has_output() for each in piece.choices):
            self.arrivals_s.append(now)

    def _finish(self, now: float) -> None:
        for event in self._events.end():
            self._take(event, now)
        self.is_done = True
        status = self.response.status
        if status != 200:
            self.error = f"HTTP {status} {self.response.reason}".strip() + _explain_body(self.body)
        elif not self.is_stream and not self.error:
            self.error = "the answer is no stream of events"

    def read(self) -> ServedRequest:
        """The request as it ended."""
        error = self.error or ("" if self.arrivals_s else "the stream ended without any output")
        read, written = self.usage.prompt_tokens, self.usage.completion_tokens
        return ServedRequest(
            self.sent_s,
            tuple(self.arrivals_s),
            self._prompt_tokens if read is None else read,
            len(self.arrivals_s) if written is None else written,
            error,
        )


def _explain_body(body: bytes) -> str:
    """What an answer other than 200 has as its reason."""
    try:
        found = json.loads(body)
    except ValueError:
        text = body.decode("utf-8", "replace")
    else:
        found = found.get("error", found.get("detail", found)) if isinstance(found, dict) else found
        text = str(found.get("message", found) if isinstance(found, dict) else found)
    return f": {_shorten(text)}" if text else ""


def _shorten(found: object) -> str:
    if isinstance(found, dict) and "message" in found:
        found = found["message"]
    text = " ".join(str(found).split())
    return text if len(text) <= 200 else f"{text[:200]}..."


# --- connections


class _Stamped:
    """Bytes that have arrived, with their times, to be read once all that came with them has its time too: where the
    kernel does not stamp, sockets that become ready together are stamped together, and none waits until what another
    one received is parsed. `own_count`: how often the kernel had no stamp."""

    def __init__(self) -> None:
        self.own_count = 0
        self._waiting: list[tuple[_Connection, bytes, float]] = []

    def add(self, connection: _Connection, data: bytes, arrived_s: float | None) -> None:
        """Keep bytes with their time."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self.read)
        if arrived_s is None:
            self.own_count += 1
            arrived_s = time.perf_counter()
        self._waiting.append((connection, data, arrived_s))

    def read(self) -> None:
        """Read all that waits."""
        waiting, self._waiting = self._waiting, []
        for connection, data, now in waiting:
            connection.read(data, now)


class _Connection(asyncio.Protocol):
    """A connection to the server, with the exchange that is under way on it."""

    def __init__(self, stamped: _Stamped, receiver: StampedSocket) -> None:
        self._stamped, self._receiver = stamped, receiver
        self.transport: asyncio.Transport | None = None
        self.exchange: CompletionExchange | None = None
        self.ended: asyncio.Future[None] | None = None
        self.got_bytes = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self._stamped.add(self, data, self._receiver.take_arrival())

    def read(self, data: bytes, now: float) -> None:
        """Bytes that came at a time."""
        exchange = self.exchange
        if exchange is None:
            self.drop()  # bytes that nothing asked for
            return
        self.got_bytes = True
        try:
            exchange.feed(data, max(now, exchange.sent_s))  # the clock of the day may have been set
        except BrokenResponse as error:
            exchange.error = exchange.error or str(error)
            self.drop()
            self.settle()
            return
        if exchange.response.is_complete:
            if exchange.response.rest:
                self.drop()
            self.settle()
        elif exchange.is_done:  # the end of the chunks comes in the next packet, or never
            asyncio.get_running_loop().call_later(_LINGER_S, self._give_up, exchange)

    def connection_lost(self, _: Exception | None) -> None:
        self._stamped.read()
        self.transport, exchange = None, self.exchange
        if exchange is None or (self.ended is not None and self.ended.done()):
            return
        try:
            exchange.close(time.perf_counter())
        except BrokenResponse as error:
            exchange.error = exchange.error or f"{error} ({len(exchange.arrivals_s)} pieces had come)"
        self.settle()

    def settle(self) -> None:
        if self.ended is not None and not self.ended.done():
            self.ended.set_result(None)

    def drop(self) -> None:
        if self.transport is not None:
            self.transport.abort()
            self.transport = None

    def _give_up(self, exchange: CompletionExchange) -> None:
        if self.exchange is exchange and not exchange.response.is_complete:
            self.drop()
            self.settle()


_LINGER_S = 1.0


class StreamClient:
    """Sends requests to one server and keeps its connections. Used within a running event loop."""

    def __init__(self, address: ServerAddress, key: str = "", timeout_s: float = 600.0) -> None:
        self.address = address
        self._timeout_s = timeout_s
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._tls = ssl.create_default_context() if address.is_tls else None
        self._idle: list[_Connection] = []
        self._stamped = _Stamped()
        self._place: tuple[socket.AddressFamily, Any] | None = None

    @property
    def own_stamps(self) -> int:
        """How many reads had no stamp of the kernel, and have the time at which they were read."""
        return self._stamped.own_count

    async def connect(self) -> None:
        """Open a first connection. Raises OSError, or ssl.SSLError, where that fails with every address of the host."""
        host, port = self.address.host, self.address.port
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        failure: OSError = OSError(f"{host} has no address")
        for family, *_, place in found:
            try:
                self._place = (family, place)
                self._idle.append(await self._open())
                return
            except OSError as error:
                failure = error
        raise failure

    async def _open(self) -> _Connection:
        if self._place is None:
            raise OSError("it is not known where the server is: connect() has not succeeded")
        family, place = self._place
        receiver = StampedSocket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            receiver.setblocking(False)
            receiver.ask_for_stamps()
            return await asyncio.wait_for(self._connect(receiver, place), min(_CONNECT_S, self._timeout_s))
        except BaseException:
            receiver.close()
            raise

    async def _connect(self, receiver: StampedSocket, place: Any) -> _Connection:
        loop = asyncio.get_running_loop()
        await loop.sock_connect(receiver, place)
        name = self.address.host if self._tls is not None else None
        _, connection = await loop.create_connection(
            lambda: _Connection(self._stamped, receiver), sock=receiver, ssl=self._tls, server_hostname=name
        )
        return connection

    async def open_idle(self, count: int) -> None:
        """Open connections until so many are kept, so that a load does not begin with them. A server that refuses some
        is left as it is: requests then open their own."""
        with suppress(OSError, TimeoutError):
            while len(self._idle) < count:
                wanted = min(_AT_ONCE, count - len(self._idle))
                self._idle += await asyncio.gather(*(self._open() for _ in range(wanted)))

    def render(self, method: str, target: str, body: bytes = b"") -> bytes:
        """A request to this server as bytes."""
        shown = f"{self.address.host}:{self.address.port}"
        return render_request(method, self.address.prefix + target, shown, self._headers, body)

    async def send(self, request: bytes, prompt_tokens: int = 0) -> CompletionExchange:
        """Send a request and wait for its answer, which may be an error."""
        exchange = CompletionExchange(prompt_tokens)
        while True:
            connection = self._take_idle()
            is_kept = connection is not None
            exchange.sent_s = time.perf_counter()
            try:
                connection = connection or await self._open()
            except (OSError, TimeoutError) as error:
                exchange.error = f"cannot connect: {describe_failure(error)}"
                return exchange
            if not await self._exchange(connection, exchange, request, is_kept):
                exchange = CompletionExchange(prompt_tokens)  # the server had closed it in the meantime
                continue
            return exchange

    async def _exchange(
        self, connection: _Connection, exchange: CompletionExchange, request: bytes, is_kept: bool
    ) -> bool:
        """False where a kept connection turned out to be closed, so that nothing was answered."""
        loop = asyncio.get_running_loop()
        connection.exchange, connection.ended, connection.got_bytes = exchange, loop.create_future(), False
        if connection.transport is None:
            return not is_kept
        if is_kept:
            exchange.sent_s = time.perf_counter()
        connection.transport.write(request)
        timer = loop.call_later(self._timeout_s, connection.settle)
        try:
            await connection.ended
        except asyncio.CancelledError:
            connection.exchange = None
            connection.drop()
            raise
        finally:
            timer.cancel()
        connection.exchange = None
        if exchange.response.is_complete and exchange.response.keeps_alive and connection.transport is not None:
            self._idle.append(connection)
            return True
        lost = connection.transport is None
        connection.drop()
        if not exchange.is_done and not exchange.error:
            exchange.error = f"no end of the answer within {self._timeout_s:g} s (--timeout)"
        return not (is_kept and lost and not connection.got_bytes)

    def _take_idle(self) -> _Connection | None:
        while self._idle:
            found = self._idle.pop()
            if found.transport is not None and not found.transport.is_closing():
                return found
        return None

    def close(self) -> None:
        """Close the connections that are kept."""
        for each in self._idle:
            each.drop()
        self._idle.clear()


_CONNECT_S = 30.0
_AT_ONCE = 32


def describe_failure(error: Exception) -> str:
    """Why a connection failed, in some words."""
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted ({error.verify_message})"
    if isinstance(error, ssl.SSLError):
        return f"no TLS ({error.reason or error}); is it http and not https?"
    if isinstance(error, OSError) and error.errno == errno.EMFILE:
        return "too many open files: raise `ulimit -n`, or lower --max-concurrency"
    if isinstance(error, OSError):
        known = errno.errorcode.get(error.errno or 0) and not isinstance(error, socket.gaierror)
        return os.strerror(error.errno or 0) if known else error.strerror or str(error)
    return str(error)


# --- requests by the interface of OpenAI


@dataclass(frozen=True)
class StreamRequest:
    """What each request has in common. `endpoint` is one of `ENDPOINTS`; `extra` is merged into each body, where None
    takes a key out."""

    model: str
    endpoint: str
    ignore_eos: bool = True
    temperature: float = 0.0
    extra: Mapping[str, Any] = field(default_factory=dict)

    def render_body(self, prompt: Sequence[int] | str, output_len: int) -> bytes:
        """The JSON of one request: ids or text for /v1/completions, text for /v1/chat/completions."""
        body: dict[str, Any] = {"model": self.model}
        if self.endpoint == ENDPOINTS[0]:
            body["prompt"] = prompt
        else:
            body["messages"] = [{"role": "user", "content": prompt}]
        body |= {"max_tokens": output_len, "temperature": self.temperature, "stream": True}
        body["stream_options"] = {"include_usage": True}
        if self.ignore_eos:
            body["ignore_eos"] = True
        return msgspec.json.encode({key: value for key, value in {**body, **self.extra}.items() if value is not None})


async def list_models(client: StreamClient) -> list[str] | str:
    """The models that the server has, or how it answered where it does not list them. Raises UserError for one that
    does not answer, or refuses the key."""
    url = client.address.url
    try:
        await client.connect()
    except (OSError, TimeoutError) as error:
        raise UserError(
            f"{url} does not answer: {describe_failure(error)}.\n"
            "  To do: check host and port (--base-url), and that the server has started: most load for minutes."
        ) from None
    exchange = await client.send(client.render("GET", "/v1/models"))
    check_access(exchange, url)
    if exchange.response.status != 200:
        return f"HTTP {exchange.response.status}{_explain_body(exchange.body)}"
    try:
        found = json.loads(exchange.body)
        return [str(each["id"]) for each in found["data"]]
    except (ValueError, KeyError, TypeError):
        return "no JSON of a list"


def check_access(exchange: CompletionExchange, url: str) -> None:
    """Raise UserError where the server refused the key, or is no server of HTTP."""
    status = exchange.response.status
    if status in (401, 403):
        raise UserError(
            f"{url} refuses the request: HTTP {status}{_explain_body(exchange.body)}.\n"
            "  To do: put its key into an environment variable: OPENAI_API_KEY, or the one that --api-key-env names."
        )
    if not status:
        raise UserError(
            f"{url} gives no answer of HTTP: {exchange.error}.\n"
            "  To do: check the port, and http or https (--base-url)."
        )


# --- a load


@dataclass(frozen=True)
class LoadResult:
    """What came of a load. `requests`: those that ended, in the order in which they were due; `wanted` of them were to
    be sent. `lag_s`: how late the client's own loop was, sampled; `cpu_s`: its processor time; `own_stamps`: how many
    reads had no stamp of the kernel."""

    requests: tuple[ServedRequest, ...]
    wanted: int
    duration_s: float
    lag_s: tuple[float, ...]
    cpu_s: float
    own_stamps: int = 0

    @property
    def was_interrupted(self) -> bool:
        """Whether it was ended before all requests had."""
        return len(self.requests) < self.wanted


async def send_load(
    client: StreamClient,
    requests: Sequence[tuple[bytes, int]],
    due_s: Sequence[float],
    most: int | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> LoadResult:
    """Send each (request, prompt tokens) when it is due, in seconds from now, at most `most` at a time; a request that
    has to wait for that counts from when it is sent. Ctrl-C ends the load, and returns what was measured."""
    found: dict[int, ServedRequest] = {}
    gate = asyncio.Semaphore(most) if most is not None else None
    lags: list[float] = []

    async def send(number: int) -> None:
        request, tokens = requests[number]
        if gate is None:
            exchange = await client.send(request, tokens)
        else:
            async with gate:
                exchange = await client.send(request, tokens)
        found[number] = exchange.read()
        progress(len(found))

    async def watch() -> None:
        while True:
            asked = time.perf_counter()
            await asyncio.sleep(_SAMPLE_S)
            lags.append(max(0.0, time.perf_counter() - asked - _SAMPLE_S))

    tasks: list[asyncio.Task[None]] = []
    watcher = asyncio.create_task(watch())
    began, cpu, own = time.perf_counter(), time.process_time(), client.own_stamps
    ended = began
    try:
        with _cancelled_by_interrupt():
            for number, due in enumerate(due_s):
                if (wait := began + due - time.perf_counter()) > 0:
                    await asyncio.sleep(wait)
                tasks.append(asyncio.create_task(send(number)))
            await asyncio.gather(*tasks)
    except asyncio.CancelledError:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    finally:
        ended = time.perf_counter()
        watcher.cancel()
        with suppress(asyncio.CancelledError):
            await watcher
    used = time.process_time() - cpu
    ordered = tuple(found[number] for number in sorted(found))
    return LoadResult(ordered, len(requests), ended - began, tuple(lags), used, client.own_stamps - own)


_SAMPLE_S = 0.02


@contextmanager
def _cancelled_by_interrupt() -> Iterator[None]:
    """While entered, SIGINT cancels the task that entered. A second one ends the process as usual."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    before = signal.getsignal(signal.SIGINT)

    def cancel() -> None:
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, before)
        if task is not None:
            task.cancel()

    loop.add_signal_handler(signal.SIGINT, cancel)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, before)
