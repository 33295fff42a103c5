"""A hub of one's own over loopback: repositories from folders, with the routes and headers that clients of the hub use,
and faults to order.

    with HubServer({"org/tiny": folder}) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)

Invariant: what it sends is what lies in the folders, unless a fault changes it; `hub.requests` has each request.

Sources: huggingface_hub 2.4 (paths, `X-Repo-Commit`, `X-Linked-Etag`, `X-Error-Code`), RFC 9110 section 14 (ranges).
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COMMIT = "c0ffee" * 6 + "c0de"
LARGE = 4096
"""Files of so many bytes are listed as large ones, by their SHA-256."""


@dataclass
class HubFaults:
    """What goes wrong. `cut_after`: a connection ends after so many bytes of a file; `cuts`: so often. `wrong`: files
    whose bytes come wrong, with how often. `gated`: repositories that need the token."""

    cut_after: int = 0
    cuts: int = 0
    wrong: dict[str, int] = field(default_factory=dict)
    gated: frozenset[str] = frozenset()
    no_ranges: bool = False
    failing: int = 0
    """So many requests for bytes are answered by 503 first."""


@dataclass(frozen=True)
class SeenRequest:
    path: str
    begin: int
    token: str


class HubServer:
    """Serves "org/name" (models) and "datasets/org/name" from folders, all at one commit."""

    token = "hf_right"
    page = 4
    """Files of a page of a listing."""

    def __init__(self, repos: Mapping[str, Path], commit: str = COMMIT) -> None:
        self.repos, self.commit, self.faults = dict(repos), commit, HubFaults()
        self.requests: list[SeenRequest] = []
        self.lock = threading.Lock()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def log_message(self, *words: Any) -> None:
                pass

            def do_GET(self) -> None:
                hub.answer(self, sends=True)

            def do_HEAD(self) -> None:
                hub.answer(self, sends=False)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.thread = threading.Thread(target=lambda: self.server.serve_forever(poll_interval=0.02), daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def __enter__(self) -> HubServer:
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    def fetched(self, name: str) -> list[int]:
        """Offsets at which the bytes of a file were asked for."""
        return [each.begin for each in self.requests if each.path.endswith(f"/{name}") and "/resolve/" in each.path]

    # --- answers

    def answer(self, handler: BaseHTTPRequestHandler, *, sends: bool) -> None:
        url = urllib.parse.urlsplit(handler.path)
        path = urllib.parse.unquote(url.path)
        span = re.fullmatch(r"bytes=(\d+)-", handler.headers.get("Range", ""))
        begin = int(span[1]) if span else 0
        token = handler.headers.get("Authorization", "").removeprefix("Bearer ")
        with self.lock:
            self.requests.append(SeenRequest(path, begin, token))
        if found := re.fullmatch(r"/api/(models|datasets)/(.+)/(revision|tree)/([^/]+)", path):
            kind, name, what, revision = found.groups()
            self._send_facts(handler, name if kind == "models" else f"datasets/{name}", what, revision)
        elif found := re.fullmatch(r"/(.+)/resolve/([^/]+)/(.+)", path):
            self._send_file(handler, found[1], found[3], begin, token, sends=sends)
        else:
            self._refuse(handler, 404, "RepoNotFound")

    def _refuse(self, handler: BaseHTTPRequestHandler, status: int, code: str = "") -> None:
        handler.send_response(status)
        handler.send_header("X-Error-Code", code)
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    def _send_facts(self, handler: BaseHTTPRequestHandler, name: str, what: str, revision: str) -> None:
        if name not in self.repos:
            return self._refuse(handler, 401, "RepoNotFound")
        if revision not in ("main", self.commit):
            return self._refuse(handler, 404, "RevisionNotFound")
        facts: Any = {"id": name, "sha": self.commit, "gated": "manual" if name in self.faults.gated else False}
        following = ""
        if what == "tree":
            url = urllib.parse.urlsplit(handler.path)
            first = int(urllib.parse.parse_qs(url.query).get("cursor", ["0"])[0])
            facts = [list_entry(path, self.repos[name]) for path in list_files(self.repos[name])]
            if first + self.page < len(facts):
                following = f'<{self.url}{url.path}?recursive=true&cursor={first + self.page}>; rel="next"'
            facts = facts[first : first + self.page]
        text = json.dumps(facts).encode()
        handler.send_response(200)
        if following:
            handler.send_header("Link", following)
        handler.send_header("Content-Type", "application/json")
        handler.send_header("Content-Length", str(len(text)))
        handler.end_headers()
        return handler.wfile.write(text) and None

    def _send_file(
        self, handler: BaseHTTPRequestHandler, name: str, file: str, begin: int, token: str, *, sends: bool
    ) -> None:
        faults, path = self.faults, self.repos.get(name, Path("/nowhere")) / file
        if name in faults.gated and token != self.token:
            return self._refuse(handler, 403, "GatedRepo")
        if not path.is_file():
            return self._refuse(handler, 404, "EntryNotFound")
        if sends and faults.failing > 0:
            faults.failing -= 1
            return self._refuse(handler, 503)
        content = path.read_bytes()
        digest = digest_of(content)
        if sends and faults.wrong.get(file, 0) > 0:
            faults.wrong[file] -= 1
            content = bytes([content[0] ^ 1]) + content[1:]
        if begin and begin >= len(content):
            return self._refuse(handler, 416)
        begin = 0 if faults.no_ranges else begin
        handler.send_response(206 if begin else 200)
        handler.send_header("ETag", f'"{digest}"')
        handler.send_header("X-Repo-Commit", self.commit)
        handler.send_header("Content-Length", str(len(content) - begin))
        if begin:
            handler.send_header("Content-Range", f"bytes {begin}-{len(content) - 1}/{len(content)}")
        handler.end_headers()
        rest = content[begin:]
        if sends and faults.cuts > 0 and len(rest) > faults.cut_after:
            faults.cuts -= 1
            handler.wfile.write(rest[: faults.cut_after])
            handler.wfile.flush()
            handler.close_connection = True
            return handler.connection.shutdown(2)
        return handler.wfile.write(rest if sends else b"") and None


def list_files(folder: Path) -> list[Path]:
    """Files of a folder and below it."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def digest_of(content: bytes) -> str:
    """What names a blob: SHA-256 of a large file, git's SHA-1 of a small one."""
    if len(content) >= LARGE:
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def list_entry(path: Path, folder: Path) -> dict[str, Any]:
    """A file as the hub lists it."""
    content = path.read_bytes()
    entry: dict[str, Any] = {"type": "file", "path": path.relative_to(folder).as_posix(), "size": len(content)}
    if len(content) < LARGE:
        return {**entry, "oid": digest_of(content)}
    return {
        **entry,
        "oid": hashlib.sha1(content).hexdigest(),
        "lfs": {"oid": digest_of(content), "size": len(content), "pointerSize": 134},
    }


def fill_cache(cache: Path, repo: str, folder: Path, commit: str = COMMIT, kind: str = "model") -> Path:
    """A cache as a download of a folder's files leaves it, the record included; returns the snapshot's folder."""
    root = cache / f"{kind}s--{repo.replace('/', '--')}"
    snapshot = root / "snapshots" / commit
    files = {}
    for path in list_files(folder):
        content, name = path.read_bytes(), path.relative_to(folder)
        blob, link = root / "blobs" / digest_of(content), snapshot / name
        blob.parent.mkdir(parents=True, exist_ok=True)
        link.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(content)
        link.symlink_to(Path("../" * (2 + len(name.parts) - 1)) / "blobs" / blob.name)
        files[name.as_posix()] = {"size": len(content), "blob_id": blob.name}
    (root / "refs").mkdir(exist_ok=True)
    (root / "refs" / "main").write_text(commit)
    record = root / "shardway" / f"{commit}.json"
    record.parent.mkdir(exist_ok=True)
    record.write_text(json.dumps({"format": 1, "files": files}))
    return snapshot
