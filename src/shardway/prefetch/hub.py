"""Asks a hub what a repository holds, and brings files into the cache: gone on with where a download was cut, and
checked by the digest that the hub gives.

Invariants:
- A blob has its name only when all of its bytes have the digest that is its name, and a snapshot's link exists only for
  such a blob. `refs/` leads to a commit only when every file of it that was asked for is there.
- What came before a cut, a kill or a full disk stays as `DIGEST.shardway.incomplete`, and the next start goes on behind
  it. Bytes are written at their own offset, so that two processes that fetch one blob without knowing of each other
  (a file system without locks) write the same bytes to the same places.
- Nothing is written outside the folder of the repository in the cache.

The hub's own library (2.4) begins a cut file again in a new process and compares no digest, hence this one; its session
(proxies, certificates), token and errors are used.

Sources: huggingface_hub 2.4 (routes, headers, layout); RFC 9110, section 14 (ranges).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from shardway.errors import JobError, ShardwayError, SiteError, UserError, list_some
from shardway.hfconfig import COMMIT, HUB_REFUSALS, import_extra
from shardway.prefetch.cache import CachedRepo, HubCache, HubName, RecordedFile
from shardway.refusals import FORBIDDEN, FULL, UNWRITABLE, find_remedy
from shardway.rundir.file_io import write_whole
from shardway.version import __version__

THREADS = 4
"""Files that are fetched at once."""
TRIES = 5
"""Times in a row that a connection may bring nothing."""
FIRST_PAUSE_S = 1.0
MOST_BYTES = 50 * 10**9
"""The public hub sends larger files by a protocol of its own alone (huggingface_hub, MAX_HTTP_DOWNLOAD_SIZE)."""
_TIMEOUT_S = 30.0
_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_WRITE_BYTES = 2**20
_READ_BYTES = 2**22
_OF_THE_DISK = UNWRITABLE | FORBIDDEN | {errno.EIO}


# --- what a repository holds


@dataclass(frozen=True)
class RemoteSnapshot:
    """What a repository holds at a commit: the chosen files by name."""

    name: HubName
    commit: str
    files: dict[str, RecordedFile]
    gated: bool = False

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files.values())


@dataclass
class HubClient:
    """Requests to one hub: HF_ENDPOINT, or the public one."""

    endpoint: str
    session: Any
    library: Any
    token: str

    @classmethod
    def open(cls) -> HubClient:
        """With the proxies and certificates of the environment, and the token of the user, if there is one."""
        library = import_extra("huggingface_hub")
        endpoint = os.environ.get("HF_ENDPOINT", "").rstrip("/") or "https://huggingface.co"
        implicit = os.environ.get("HF_HUB_DISABLE_IMPLICIT_TOKEN", "").upper() not in ("1", "ON", "YES", "TRUE")
        return cls(endpoint, library.get_session(), library, (library.get_token() or "") if implicit else "")

    @property
    def headers(self) -> dict[str, str]:
        plain = {"user-agent": f"shardway/{__version__}", "accept-encoding": "identity"}
        return {**plain, "authorization": f"Bearer {self.token}"} if self.token else plain

    def list_files(self, name: HubName, patterns: Sequence[str], left_out: Sequence[str], where: str) -> RemoteSnapshot:
        """The files of a repository that match a pattern and none that is left out. `where`: the key or option that
        names it, for messages. Raises UserError where the hub refuses, SiteError where it cannot be reached."""
        kind, revision = f"{name.kind}s", urllib.parse.quote(name.revision or "main", safe="")
        with self._refusals(name, where):
            about = self._get(f"{self.endpoint}/api/{kind}/{name.repo}/revision/{revision}").json()
            commit, found = about["sha"], dict[str, RecordedFile]()
            if not COMMIT.fullmatch(commit):
                raise ValueError(f"commit {commit!r}")
            page: str | None = f"{self.endpoint}/api/{kind}/{name.repo}/tree/{commit}?recursive=true"
            while page:
                answer = self._get(page)
                for entry in answer.json():
                    path = entry["path"]
                    if entry.get("type") != "file" or not _is_inside(path):
                        continue
                    if any(fnmatch(path, each) for each in patterns) and not any(fnmatch(path, o) for o in left_out):
                        large = entry.get("lfs") or {}
                        size, digest = large.get("size", entry["size"]), large.get("oid", entry["oid"])
                        found[path] = _check_listed(RecordedFile(size, digest))
                page = answer.links.get("next", {}).get("url")
        return RemoteSnapshot(name, commit, dict(sorted(found.items())), bool(about.get("gated")))

    def url_of(self, snapshot: RemoteSnapshot, path: str) -> str:
        """Where the bytes of a file are."""
        prefix = "datasets/" if snapshot.name.kind == "dataset" else ""
        quoted = urllib.parse.quote(path)
        return f"{self.endpoint}/{prefix}{snapshot.name.repo}/resolve/{snapshot.commit}/{quoted}"

    def check(self, answer: Any) -> None:
        """Raise the error of the hub's library for a refusal."""
        self.library.utils.hf_raise_for_status(answer)

    def _get(self, url: str) -> Any:
        own = url.startswith(f"{self.endpoint}/")  # a page that leads elsewhere does not get the token
        headers = {name: text for name, text in self.headers.items() if own or name != "authorization"}
        answer = self.session.get(url, headers=headers, timeout=_TIMEOUT_S, follow_redirects=True)
        self.check(answer)
        return answer

    @contextlib.contextmanager
    def _refusals(self, name: HubName, where: str) -> Iterator[None]:
        try:
            yield
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            if _kinds(error) & set(HUB_REFUSALS):
                raise self.explain(name, where, error) from error
            raise SiteError(
                f"{self.endpoint} does not answer as a hub does ({error!r}).\n"
                "  To do: correct HF_ENDPOINT, or look at the proxy (https_proxy) that answers in its place."
            ) from error
        except Exception as error:  # the errors of HTTP clients share no base
            raise self.explain(name, where, error) from error

    def explain(self, name: HubName, where: str, error: Exception) -> ShardwayError:
        """The error of a request, as one for the person responsible for it."""
        kinds, subject = _kinds(error), f'{where}: "{name}"'
        hint = "" if self.token or "RevisionNotFoundError" in kinds else " (no token is set)"
        for kind, (what, remedy) in HUB_REFUSALS.items():
            if kind in kinds and remedy:
                return UserError(f"{subject} {what}{hint}.\n  To do: {remedy}.")
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status in (401, 403):
            return UserError(
                f"{subject}: the hub refuses it ({status}){hint}.\n  To do: `hf auth login`, or set HF_TOKEN."
            )
        first = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
        if "OfflineModeIsEnabled" in kinds:
            return UserError(
                f"{subject} cannot be fetched: HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set here.\n"
                "  To do: unset both for this command."
            )
        return SiteError(
            f"{subject} cannot be fetched: {self.endpoint} gives no answer that helps ({first}).\n"
            "  To do: look whether this machine reaches it (HF_ENDPOINT, https_proxy), or fetch it where it can be "
            "reached, and copy the cache; what came is kept, and the same command goes on from there."
        )


def _kinds(error: BaseException) -> set[str]:
    return {cls.__name__ for cls in type(error).__mro__}


def _is_inside(path: str) -> bool:
    """Whether a name that a hub lists stays inside the snapshot."""
    return bool(path) and not path.startswith("/") and ".." not in path.split("/") and "\0" not in path


def _check_listed(file: RecordedFile) -> RecordedFile:
    """The file, whose digest becomes the name of one in the cache. Raises ValueError where it is none."""
    if type(file.size) is not int or file.size < 0 or not _DIGEST.fullmatch(file.digest):
        raise ValueError(f"size {file.size!r}, digest {file.digest!r}")
    return file


# --- what is there already


def is_whole(path: Path, file: RecordedFile, *, reads: bool = False) -> bool:
    """Whether a file has its size and, where it is read (`reads`), its digest. Raises OSError where it cannot be
    read."""
    try:
        size = path.stat().st_size
    except (FileNotFoundError, NotADirectoryError):
        return False
    return size == file.size and (not reads or find_digest(path, file) == file.digest)


def find_digest(path: Path, file: RecordedFile) -> str:
    """The digest of a file's bytes, of the kind that `file.digest` is: SHA-256, or git's SHA-1 of a blob."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return _find_digest(descriptor, file)
    finally:
        os.close(descriptor)


def _find_digest(descriptor: int, file: RecordedFile) -> str:
    if len(file.digest) == 64:
        digest = hashlib.sha256()
    else:
        digest = hashlib.sha1(b"blob %d\0" % os.fstat(descriptor).st_size, usedforsecurity=False)
    at = 0
    while piece := os.pread(descriptor, _READ_BYTES, at):
        digest.update(piece)
        at += len(piece)
    return digest.hexdigest()


def list_absent(snapshot: RemoteSnapshot, repo: CachedRepo, *, reads: bool = False) -> dict[str, int]:
    """The files of a snapshot that are not here whole, and how many bytes of each have to come."""
    absent = {}
    for path, file in snapshot.files.items():
        if is_whole(repo.snapshot(snapshot.commit) / path, file, reads=reads):
            continue
        partial, blob = repo.partial(file.digest), repo.blob(file.digest)
        there = file.size if is_whole(blob, file, reads=reads) else _count_begun(partial)
        absent[path] = max(0, file.size - there) if there <= file.size else file.size
    return absent


def _count_begun(partial: Path) -> int:
    """Bytes of a partial file; another process may finish it at any time."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return partial.stat().st_size
    return 0


# --- fetching


@dataclass
class FetchState:
    """How far a fetch is, and what people should read about it. Changed by several threads."""

    total_bytes: int = 0
    done_bytes: int = 0
    resumed_bytes: int = 0
    notes: list[str] = field(default_factory=list)
    stop: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, count: int) -> None:
        with self.lock:
            self.done_bytes += count

    def keep(self, count: int) -> None:
        """Bytes that are there from an earlier try."""
        with self.lock:
            self.resumed_bytes += count
            self.done_bytes += count

    def note(self, line: str) -> None:
        with self.lock:
            self.notes.append(line)


class _Stopped(Exception):
    """Another file has failed for good, or the user ended it."""


@dataclass(frozen=True)
class Fetcher:
    """Fetches the files of snapshots into a cache. `pause` waits between two tries."""

    client: HubClient
    cache: HubCache
    where: str = "--model"
    pause: Callable[[float], None] = time.sleep

    def fetch(
        self,
        snapshot: RemoteSnapshot,
        absent: Sequence[str],
        state: FetchState,
        show: Callable[[FetchState], object] = lambda state: None,
    ) -> Path:
        """Bring the absent files of a snapshot into the cache; returns the snapshot's folder.

        Raises UserError, SiteError or JobError with everything that could not be fetched; what came is kept.
        """
        repo, folder = self.cache.repo(snapshot.name), self.cache.repo(snapshot.name).snapshot(snapshot.commit)
        failures: list[tuple[str, Exception]] = []
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (repo.folder / "blobs").mkdir(exist_ok=True)
        except OSError as error:
            raise self._explain_disk(repo.folder, error) from error
        pool = ThreadPoolExecutor(THREADS, thread_name_prefix="prefetch")
        try:
            waiting = {pool.submit(self._bring, snapshot, repo, path, state): path for path in absent}
            while waiting:
                done, _ = wait(waiting, timeout=0.1, return_when=FIRST_COMPLETED)
                show(state)
                for each in done:
                    path, failure = waiting.pop(each), each.exception()
                    if isinstance(failure, Exception) and not isinstance(failure, _Stopped):
                        failures.append((path, failure))
                        if isinstance(failure, OSError):  # of the disk: it is the same for all others
                            state.stop.set()
        except BaseException:  # a connection that brings nothing is not waited for
            state.stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        pool.shutdown()
        if failures:
            raise self._as_one(snapshot, repo, failures)
        try:
            repo.write_record(snapshot.commit, snapshot.files)
            revision = snapshot.name.revision or "main"
            if revision != snapshot.commit:
                _write_ref(repo.folder / "refs" / revision, snapshot.commit)
        except OSError as error:
            if absent:
                raise self._explain_disk(repo.folder, error) from error
            state.note(f"{repo.folder} takes no files ({error.strerror}): it is used as it is")
        return folder

    # --- one file

    def _bring(self, snapshot: RemoteSnapshot, repo: CachedRepo, path: str, state: FetchState) -> None:
        """Blob and link of one file."""
        if state.stop.is_set():
            raise _Stopped
        file, link = snapshot.files[path], repo.snapshot(snapshot.commit) / path
        if os.path.lexists(link):  # damaged, or it would not be absent
            link.unlink(missing_ok=True)
        link.parent.mkdir(parents=True, exist_ok=True)
        blob = repo.blob(file.digest)
        if os.path.lexists(blob) and not is_whole(blob, file, reads=True):
            state.note(f"{path}: what is in the cache is damaged, and is fetched again")
            blob.unlink(missing_ok=True)
        if blob.is_file():
            state.keep(file.size)
        else:
            self._bring_blob(snapshot, repo, path, state)
        try:
            os.symlink(os.path.relpath(blob, link.parent), link)
        except FileExistsError:
            pass  # another process was faster
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
                raise
            os.link(blob, link)

    def _bring_blob(self, snapshot: RemoteSnapshot, repo: CachedRepo, path: str, state: FetchState) -> None:
        file = snapshot.files[path]
        partial, blob = repo.partial(file.digest), repo.blob(file.digest)
        for trial in (1, 2):
            with _locked(partial, path, state) as descriptor:
                if blob.is_file():
                    state.keep(file.size)
                    with contextlib.suppress(FileNotFoundError):
                        partial.unlink()
                    return
                begun = os.fstat(descriptor).st_size
                if begun > file.size:
                    os.ftruncate(descriptor, 0)
                    begun = 0
                state.keep(begun)
                self._receive(snapshot, path, descriptor, begun, state)
                os.fsync(descriptor)
                found = _find_digest(descriptor, file)
                if found == file.digest and _finish(descriptor, partial, blob):
                    return
                if _is_same(descriptor, partial):
                    partial.unlink(missing_ok=True)
                state.add(-file.size)
            if trial == 1:
                state.note(f"{path}: wrong bytes came (digest {found[:12]}, expected {file.digest[:12]}); once more")
        raise JobError(
            f"{path} came twice with a wrong digest ({found}, the hub lists {file.digest}).\n"
            "  To do: look what is between this machine and the hub (a proxy, a mirror in HF_ENDPOINT); nothing of it "
            "was kept."
        )

    def _receive(self, snapshot: RemoteSnapshot, path: str, descriptor: int, at: int, state: FetchState) -> None:
        """Write the bytes of a file from offset `at` on, over as many connections as it takes."""
        size, failed, pause = snapshot.files[path].size, 0, FIRST_PAUSE_S
        url = self.client.url_of(snapshot, path)
        while at < size:
            before = at
            reason: Exception | None = None
            try:
                for reached in self._stream(url, descriptor, at, size, state):
                    at = reached
            except (_Stopped, ShardwayError):
                raise
            except Exception as error:
                if isinstance(error, OSError) and error.errno in _OF_THE_DISK:
                    raise
                status = getattr(getattr(error, "response", None), "status_code", 0)
                if 400 <= status < 500 and status not in (408, 416, 429):
                    raise self.client.explain(snapshot.name, self.where, error) from error
                if status == 416 and at:
                    os.ftruncate(descriptor, 0)
                    state.add(-at)
                    at = 0
                reason = error
                at = min(size, max(at, os.fstat(descriptor).st_size)) if status != 416 else at
            if at >= size:
                return
            failed, pause = (failed + 1, pause * 2) if at <= before else (0, FIRST_PAUSE_S)
            if failed >= TRIES:
                why = f"{type(reason).__name__}: {reason}" if reason else "the connection ends without data"
                raise SiteError(
                    f"{path}: {TRIES} connections in a row brought nothing ({why}); {at:,} of {size:,} bytes are "
                    "there.\n  To do: run the same command again: it goes on from there."
                ) from reason
            if state.stop.wait(0):
                raise _Stopped
            if failed:
                self.pause(pause)

    def _stream(self, url: str, descriptor: int, at: int, size: int, state: FetchState) -> Iterator[int]:
        """One connection: writes what comes, and yields the offset behind it each time."""
        headers = {**self.client.headers, **({"range": f"bytes={at}-"} if at else {})}
        with self.client.session.stream(
            "GET", url, headers=headers, timeout=_TIMEOUT_S, follow_redirects=True
        ) as answer:
            if answer.status_code >= 400:
                answer.read()
            self.client.check(answer)
            if at and not _begins_at(answer, at):  # the server does not take ranges
                os.ftruncate(descriptor, 0)
                state.add(-at)
                at = 0
                yield at
            for piece in answer.iter_raw():
                if state.stop.is_set():
                    raise _Stopped
                piece = piece[: size - at]
                _write_at(descriptor, piece, at)
                at += len(piece)
                state.add(len(piece))
                yield at

    # --- what went wrong

    def _as_one(
        self, snapshot: RemoteSnapshot, repo: CachedRepo, failures: Sequence[tuple[str, Exception]]
    ) -> ShardwayError:
        """All failures of a fetch as one error; that of the disk alone, since it is the cause of the others."""
        disk = next((error for _, error in failures if isinstance(error, OSError)), None)
        if disk is not None:
            return self._explain_disk(repo.folder, disk)
        first = failures[0][1]
        if not isinstance(first, ShardwayError):
            raise first
        alike = [error for _, error in failures if isinstance(error, ShardwayError)]
        texts = list(dict.fromkeys(str(error) for error in alike))
        if len(texts) == 1:
            return first
        heads = [text.partition("\n")[0] for text in texts]
        remedy = texts[0].partition("To do: ")[2] or "run the same command again."
        return type(first)(
            f"{len(failures)} files of {snapshot.name} could not be fetched: {list_some(heads, 5)}\n  To do: {remedy}"
        )

    def _explain_disk(self, folder: Path, error: OSError) -> ShardwayError:
        remedy = find_remedy(error, "name another cache by HF_HOME or HF_HUB_CACHE")
        place = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else str(folder)
        kind = JobError if error.errno in FULL else UserError
        return kind(
            f"{place} cannot be written ({self.cache.origin} leads there): {error.strerror}.\n"
            f"  To do: {remedy}; what came is kept, and the same command goes on from there."
        )


def _write_at(descriptor: int, piece: bytes, at: int) -> None:
    """Write all of a piece at its offset. Raises OSError where the disk takes no more."""
    rest = memoryview(piece)
    while rest:
        taken = os.pwrite(descriptor, rest[:_WRITE_BYTES], at)
        at, rest = at + taken, rest[taken:]


def _begins_at(answer: Any, at: int) -> bool:
    return answer.status_code == 206 and str(answer.headers.get("content-range", "")).startswith(f"bytes {at}-")


@contextlib.contextmanager
def _locked(path: Path, name: str, state: FetchState) -> Iterator[int]:
    """A descriptor of a partial file that no other process of ours writes meanwhile (where the file system has
    locks)."""
    waits = False
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if state.stop.wait(0.2):
                    raise _Stopped from None
                if not waits:
                    state.note(f"{name}: another process was fetching it, and was waited for")
                waits = True
                continue
            except OSError:
                pass  # a file system without locks: see the module's invariants
            if not _is_same(descriptor, path):  # the other one has finished it meanwhile
                continue
            yield descriptor
            return
        finally:
            os.close(descriptor)


def _finish(descriptor: int, partial: Path, blob: Path) -> bool:
    """Give a whole blob its name; returns whether it has it now, perhaps by another process without locks."""
    with contextlib.suppress(FileNotFoundError):
        if _is_same(descriptor, partial):
            os.rename(partial, blob)
    return blob.is_file()


def _is_same(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _write_ref(path: Path, commit: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(OSError):
        if path.read_text(encoding="utf-8").strip() == commit:
            return
    write_whole(path, commit)
