"""The state of an inference server as its job records it, and how it is reached: tunnel, curl, benchmark.

Invariants:
- A line that is shown works when it is pasted, and holds no key: it reads the key's file, and `ps` does not show it.
- A record that is missing or damaged is None.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import PurePosixPath
from typing import Any

from shardway.launch.hosts.base import Host
from shardway.launch.script import quote
from shardway.rundir.attempts import Attempt
from shardway.rundir.file_io import read_fields


@dataclass(frozen=True)
class ServingState:
    """What the job's program recorded. `state`: starting, ready or ended; `address`: on which the server listens;
    `key_file`: "" where no key is checked; `ready_s`: seconds from its start until it was ready."""

    state: str
    server: str
    model: str
    path: str
    tp: int
    node: str
    address: str
    port: int
    healthy: bool = False
    key_file: str = ""
    ready_s: float | None = None
    reason: str = ""
    lines: tuple[str, ...] = ()
    updated: float = 0.0


def parse_serving(text: str) -> ServingState | None:
    """The state from the text of `serving.json`; None where it is empty or damaged."""
    with contextlib.suppress(ValueError, RecursionError):
        return read_fields(ServingState, json.loads(text))
    return None


def read_serving(host: Host, attempt: Attempt) -> ServingState | None:
    """The state of the server of an attempt; None where it has none yet. Raises HostUnreachable."""
    path = PurePosixPath(attempt.serving_path)
    return parse_serving(host.read_files([path]).get(path, ""))


@dataclass(frozen=True)
class ServerAccess:
    """How a server is reached. `host`: the login host, "" for this machine; `this_machine`: the job runs there."""

    serving: ServingState
    host: str = ""
    this_machine: bool = False

    @property
    def url(self) -> str:
        """The base address of its API, on this machine or at the end of the tunnel."""
        return f"http://127.0.0.1:{self.serving.port}/v1"

    @property
    def tunnel(self) -> str:
        """The ssh command that makes `url` work; "" where none is needed. A loopback address is reached through the
        node, any other through the login host alone."""
        port, node = self.serving.port, self.serving.node
        if self.this_machine:
            return f"ssh -N -L {port}:127.0.0.1:{port} {quote(self.host)}" if self.host else ""
        login = self.host or f"{getpass.getuser()}@{socket.gethostname()}"
        if self.serving.address == "0.0.0.0":
            return f"ssh -N -L {port}:{quote(node)}:{port} {quote(login)}"
        user = f"{login.rpartition('@')[0]}@" if "@" in login else ""
        return f"ssh -N -J {quote(login)} -L {port}:127.0.0.1:{port} {quote(user + node)}"

    @property
    def key(self) -> str:
        """Shell that prints the key; "" where none is checked."""
        reads = f"cat {quote(self.serving.key_file)}"
        if self.host:
            reads = f"ssh {quote(self.host)} {quote(reads)}"
        return f"$({reads})" if self.serving.key_file else ""

    @property
    def curl(self) -> str:
        """A request, for bash or zsh. printf is of the shell itself, so that no process has the key among its words."""
        bearer = f" -H @<(printf 'Authorization: Bearer %s' \"{self.key}\")" if self.key else ""
        body = json.dumps({"model": self.serving.model, "prompt": "Once upon a time", "max_tokens": 16})
        return f"curl -s{bearer} -H 'Content-Type: application/json' -d {quote(body)} {self.url}/completions"

    @property
    def bench(self) -> str:
        """The command that measures it."""
        key = f'OPENAI_API_KEY="{self.key}" ' if self.key else ""
        return f"{key}shardway bench infer serve --base-url {self.url} --model {quote(self.serving.model)}"

    def list_lines(self) -> list[tuple[str, str]]:
        """Labels and texts: the state, and how to reach the server while it lives."""
        serving = self.serving
        state = serving.state + (
            f" after {serving.ready_s:g} s" if serving.state == "ready" and serving.ready_s is not None else ""
        )
        if serving.state == "ready" and not serving.healthy:
            state = "does not answer"
        lines = [("server", f"{serving.server}, {state}" + (f": {serving.reason}" if serving.reason else ""))]
        lines += [("model", f"{serving.model}, tensor parallel {serving.tp}, on {serving.node}")]
        if serving.state == "ended":
            return lines + [("", line) for line in serving.lines[-5:]]
        if serving.state == "ready":
            lines += [("url", self.url), *([("tunnel", self.tunnel)] if self.tunnel else [])]
            lines += [("ask", self.curl), ("measure", self.bench)]
        return lines

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        known: Mapping[str, Any] = asdict(self.serving)
        ready = self.serving.state == "ready"
        return {
            **known,
            "lines": list(self.serving.lines),
            "url": self.url if ready else "",
            "tunnel": self.tunnel if ready else "",
            "curl": self.curl if ready else "",
        }
