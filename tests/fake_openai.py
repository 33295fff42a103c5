"""A server with OpenAI's streaming interface and known delays, on loopback.

As a program (`python tests/fake_openai.py --first-ms 100 --step-ms 20`) it prints its port and serves until it is
ended; in a test it runs in a thread: `with serving(Delays(...)) as server`. It is no model: each piece of output is the
same text, sent when it is due, whatever came before; so what a client should see is known.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

MODEL = "fake-model"


@dataclass(frozen=True)
class Delays:
    """Seconds to the first piece of output and between pieces. `per_piece`: tokens of a piece. `fault`: what goes
    wrong, "" for nothing (`answer`, `generate` and `stream` have them). `key`: the one that is asked for."""

    first_s: float = 0.02
    step_s: float = 0.005
    per_piece: int = 1
    fault: str = ""
    key: str = ""
    models: tuple[str, ...] = (MODEL,)
    text: str = "é"


@dataclass
class FakeServer:
    """What is served, and what was asked."""

    delays: Delays
    port: int = 0
    bodies: list[dict[str, Any]] = field(default_factory=list)
    connections: int = 0
    written_s: dict[str, list[float]] = field(default_factory=dict)
    """When each piece of output was handed to the kernel, by `user` of the request: `time.perf_counter`, which on Linux
    is one clock for all processes. GET /written has it."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


class _Talk(asyncio.Protocol):
    """One connection: requests one after the other, each answered by timers."""

    def __init__(self, server: FakeServer) -> None:
        self.server, self.delays = server, server.delays
        self.buffer, self.answered = b"", 0
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        self.server.connections += 1

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        if self.buffer.startswith(b"\x16"):  # TLS
            self.transport.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            self.transport.close()
            return
        head, found, rest = self.buffer.partition(b"\r\n\r\n")
        if not found:
            return
        lines = head.decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines[1:])
        length = int(headers.get("content-length", 0))
        if len(rest) < length:
            return
        body, self.buffer = rest[:length], rest[length:]
        method, path, _ = lines[0].split(" ")
        self.answer(method, path, headers, json.loads(body) if body else {})

    def answer(self, method: str, path: str, headers: dict[str, str], body: dict[str, Any]) -> None:
        delays, self.answered = self.delays, self.answered + 1
        if delays.fault == "drop kept" and self.answered > 1:
            self.transport.abort()
        elif delays.key and headers.get("authorization") != f"bearer {delays.key}".lower():
            self.reply(401, {"error": {"message": "Incorrect API key provided"}})
        elif path == "/written":
            self.reply(200, self.server.written_s)
        elif method == "GET":
            if delays.fault == "no list":
                self.reply(404, {"detail": "Not Found"})
            else:
                self.reply(200, {"data": [{"id": name} for name in delays.models]})
        else:
            self.server.bodies.append(body)
            self.generate(path, body)

    def reply(self, status: int, found: object) -> None:
        text = json.dumps(found).encode()
        self.transport.write(
            f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n".encode()
            + text
        )

    def generate(self, path: str, body: dict[str, Any]) -> None:
        fault, number = self.delays.fault, len(self.server.bodies)
        if fault == "no stream":
            self.reply(200, {"choices": [{"text": "x", "finish_reason": "length"}]})
        elif fault == "no endpoint" and "chat" not in path:
            self.reply(404, {"detail": "Not Found"})
        elif fault == "strict" and "ignore_eos" in body:
            self.reply(400, {"error": {"message": "Unrecognized request argument supplied: ignore_eos"}})
        elif fault == "text only" and not isinstance(body.get("prompt", ""), str):
            self.reply(400, {"detail": "prompt must be a string."})
        elif fault == "broken later" and number > 1:
            self.reply(500, {"error": {"message": "CUDA out of memory"}})
        elif fault == "some broken" and number % 3 == 0:
            self.reply(503, "try later")
        else:
            self.stream(path, body)

    def stream(self, path: str, body: dict[str, Any]) -> None:
        fault, tokens = self.delays.fault, int(body.get("max_tokens") or body.get("max_completion_tokens") or 16)
        closes = fault == "until close"
        framing = "Connection: close" if closes else "Transfer-Encoding: chunked"
        self.transport.write(f"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n{framing}\r\n\r\n".encode())
        pieces = -(-tokens // self.delays.per_piece)
        loop = asyncio.get_running_loop()
        began = loop.time()
        if "chat" in path:
            self.event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        for piece in range(pieces):
            due = began + self.delays.first_s + piece * self.delays.step_s
            if fault == "cut" and piece == pieces - 1:
                loop.call_at(due, self.transport.abort)
                return
            if fault == "error event" and piece == 1:
                loop.call_at(due, self.event, {"error": {"message": "the engine died"}})
                loop.call_at(due, self.finish, body, tokens)
                return
            loop.call_at(due, self.piece, path, body, tokens, piece == pieces - 1)

    def piece(self, path: str, body: dict[str, Any], tokens: int, is_last: bool) -> None:
        text = self.delays.text * self.delays.per_piece
        end = "length" if is_last else None
        if "user" in body:
            self.server.written_s.setdefault(body["user"], []).append(time.perf_counter())
        if "chat" in path:
            choice = {"delta": {"content": text}, "finish_reason": end}
            self.event({"object": "chat.completion.chunk", "choices": [choice]})
        else:
            self.event({"object": "text_completion", "choices": [{"text": text, "finish_reason": end}]})
        if is_last:
            self.finish(body, tokens)

    def finish(self, body: dict[str, Any], tokens: int) -> None:
        fault = self.delays.fault
        if body.get("stream_options", {}).get("include_usage") and fault != "no usage":
            prompt = body.get("prompt") or body["messages"][0]["content"]
            read = len(prompt.split() if isinstance(prompt, str) else prompt)
            usage = {"prompt_tokens": read, "completion_tokens": tokens}
            self.event({"object": "text_completion", "choices": [], "usage": usage})
        if fault != "no done":
            self.write(b"data: [DONE]\n\n")
        if fault == "until close":
            self.transport.close()
        elif fault != "no end":
            self.transport.write(b"0\r\n\r\n")

    def event(self, found: object) -> None:
        self.write(b"data: " + json.dumps(found, ensure_ascii=False).encode() + b"\n\n")

    def write(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self.delays.fault == "until close":
            self.transport.write(data)
        else:
            self.transport.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


async def serve(server: FakeServer, ended: asyncio.Event, ready: threading.Event | None = None) -> None:
    """Serve until `ended`."""
    loop = asyncio.get_running_loop()
    listener = await loop.create_server(lambda: _Talk(server), "127.0.0.1", server.port, backlog=2048)
    server.port = listener.sockets[0].getsockname()[1]
    if ready is not None:
        ready.set()
    await ended.wait()
    listener.close()


@contextlib.contextmanager
def serving(delays: Delays) -> Iterator[FakeServer]:
    """A server in a thread of this process."""
    server, ready = FakeServer(delays), threading.Event()
    loop = asyncio.new_event_loop()
    ended = asyncio.Event()
    thread = threading.Thread(target=loop.run_until_complete, args=(serve(server, ended, ready),))
    thread.start()
    ready.wait()
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join()
        loop.close()


async def _main(server: FakeServer) -> None:
    ready = threading.Event()
    task = asyncio.create_task(serve(server, asyncio.Event(), ready))
    while not ready.is_set():
        await asyncio.sleep(0.01)
    print(server.port, flush=True)
    await task


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--first-ms", type=float, default=100.0)
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--port", type=int, default=0)
    given = parser.parse_args()
    asyncio.run(_main(FakeServer(Delays(given.first_ms / 1e3, given.step_ms / 1e3), given.port)))
