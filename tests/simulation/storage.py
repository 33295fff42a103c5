"""A file system that hosts share, with what is known to go wrong on such.

- An operation takes a while, and has its effect at some moment within it.
- It may fail, before it had its effect or after (an answer that was lost).
- A host sees a folder as it was a while ago, unless it has changed that folder itself since (NFS keeps listings).
- A host that goes down takes with it what it has written and not synced: such a file is there, and empty.
- A host may lose the file system for a while: its operations fail, or hang until it is back.

Invariant: a name is made, linked or renamed at one moment for all hosts; a file that is opened is read as it is.
"""

from __future__ import annotations

import errno
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from world import Host, Process, World

T = TypeVar("T")


@dataclass
class File:
    """Its text, the host that has yet to sync it, and its date by the clock of whoever wrote it."""

    text: str
    unsynced: Host | None = None
    date: float = 0.0


@dataclass
class Folder:
    """Names and what they stand for, and what names there were when."""

    entries: dict[str, Any] = field(default_factory=dict)
    times: list[float] = field(default_factory=lambda: [0.0])
    names: list[tuple[str, ...]] = field(default_factory=lambda: [()])
    changed_by: dict[str, float] = field(default_factory=dict)

    def note_change(self, host: Host, now: float) -> None:
        """After a change by a host."""
        self.changed_by[host.name] = now
        if len(self.entries) != len(self.names[-1]) or tuple(self.entries) != self.names[-1]:
            self.times.append(now)
            self.names.append(tuple(self.entries))

    def list_at(self, time: float) -> tuple[str, ...]:
        """The names that there were at a time."""
        return self.names[bisect_right(self.times, time) - 1]


@dataclass
class Trouble:
    """What goes wrong with the files of one host until a time: a share of operations fails, or all hang."""

    fails: float = 0.0
    hangs: bool = False
    until: float = 0.0


class Store:
    """What is stored. `stale_s` is how old a listing may be, `slow` how many times longer operations take."""

    def __init__(self, world: World, stale_s: float) -> None:
        self.world = world
        self.folders: dict[str, Folder] = {}
        self.trouble: dict[str, Trouble] = {}
        self.stale_s = stale_s
        self.slow = 1.0
        self.on_rename: Callable[[Process, str, str], None] = lambda process, source, target: None
        self.on_create: Callable[[Process, str, str], None] = lambda process, path, name: None
        self.on_replace: Callable[[Process, str, str], None] = lambda process, path, name: None

    def folder(self, path: str) -> Folder:
        """The folder of a path, made where it is not there."""
        return self.folders.setdefault(path, Folder())

    def crash(self, host: Host) -> None:
        """What a host has not synced is lost."""
        for folder in self.folders.values():
            for file in folder.entries.values():
                if isinstance(file, File) and file.unsynced is host:
                    file.text, file.unsynced = "", None


@dataclass(frozen=True)
class Mount:
    """The store as a process on a host sees it."""

    store: Store
    process: Process

    def _do(self, act: Callable[[], T]) -> T:
        """An operation: it takes time, has its effect, takes time; or it fails before or after."""
        world, host = self.store.world, self.process.host
        dice = world.dice
        trouble = self.store.trouble.get(host.name)
        if trouble is not None and trouble.until > world.now and trouble.hangs:
            world.wait(trouble.until - world.now)
        world.wait(dice.expovariate(500.0) * self.store.slow)
        failing = trouble is not None and trouble.until > world.now and dice.random() < trouble.fails
        if failing and dice.random() < 0.7:
            raise _refusal(dice.random())
        result = act()
        world.wait(dice.expovariate(1000.0) * self.store.slow)
        if failing:
            raise _refusal(dice.random())
        return result

    # --- names

    def list(self, path: str) -> list[str]:
        """The names in a folder, perhaps as they were a while ago."""

        def look() -> list[str]:
            folder, now = self.store.folder(path), self.store.world.now
            if not self.store.stale_s:
                return list(folder.entries)
            oldest = max(folder.changed_by.get(self.process.host.name, 0.0), now - self.store.stale_s)
            return list(folder.list_at(self.store.world.dice.uniform(oldest, now)))

        return self._do(look)

    def exists(self, path: str, name: str) -> bool:
        """Whether a name is there."""
        return self._do(lambda: name in self.store.folder(path).entries)

    def make_folder(self, path: str, name: str) -> None:
        """A new folder in a folder, where it is not there yet."""

        def make() -> None:
            if name not in self.store.folder(path).entries:
                self.store.folder(path).entries[name] = Folder()
                self._note_change(path)

        self._do(make)

    def rename(self, path: str, source: str, target: str) -> None:
        """A folder gets another name, unless somebody has that."""

        def move() -> None:
            entries = self.store.folder(path).entries
            if source not in entries:
                raise FileNotFoundError(errno.ENOENT, "No such file or directory")
            if target in entries:
                raise OSError(errno.ENOTEMPTY, "Directory not empty")
            entries[target] = entries.pop(source)
            self._note_change(path)
            self.store.on_rename(self.process, source, target)

        self._do(move)

    def remove_tree(self, path: str, name: str) -> None:
        """A folder with its files, one after the other; what fails stays."""
        for file in self._do(lambda: list(_inside(self.store, path, name))):
            self._do(lambda file=file: _inside(self.store, path, name).pop(file, None))  # type: ignore[misc]

        def remove() -> None:
            if self.store.folder(path).entries.pop(name, None) is not None:
                self._note_change(path)

        self._do(remove)

    # --- files

    def read(self, path: str, name: str, inner: str = "") -> str:
        """The text of a file in a folder, or in a folder within."""

        def look() -> str:
            entries = _inside(self.store, path, inner) if inner else self.store.folder(path).entries
            if name not in entries:
                raise FileNotFoundError(errno.ENOENT, "No such file or directory")
            return str(entries[name].text)

        return self._do(look)

    def write(self, path: str, inner: str, name: str, text: str) -> None:
        """A file in a folder within; not synced."""

        def put() -> None:
            _inside(self.store, path, inner, must=True)[name] = File(text, self.process.host)

        self._do(put)

    def sync(self, path: str, inner: str, name: str) -> None:
        """What was written of a file stays."""

        def settle() -> None:
            file = _inside(self.store, path, inner, must=True).get(name)
            if file is None:
                raise FileNotFoundError(errno.ENOENT, "No such file or directory")
            file.unsynced = None

        self._do(settle)

    def create(self, path: str, name: str, text: str) -> bool:
        """A whole and synced file under a free name; whether it was free."""

        def link() -> bool:
            entries = self.store.folder(path).entries
            free = name not in entries
            if free:
                entries[name] = File(text)
                self.store.on_create(self.process, path, name)
            self._note_change(path)  # by its temporary neighbour
            return free

        return self._do(link)

    def replace(self, path: str, name: str, text: str) -> None:
        """A whole file in place of another; not synced."""

        def put() -> None:
            host = self.process.host
            self.store.folder(path).entries[name] = File(text, host, self.store.world.now + host.skew_s)
            self._note_change(path)
            self.store.on_replace(self.process, path, name)

        self._do(put)

    def remove(self, path: str, name: str) -> None:
        """A file less."""

        def drop() -> None:
            if self.store.folder(path).entries.pop(name, None) is None:
                raise FileNotFoundError(errno.ENOENT, "No such file or directory")
            self._note_change(path)

        self._do(drop)

    def _note_change(self, path: str) -> None:
        self.store.folder(path).note_change(self.process.host, self.store.world.now)


@dataclass(frozen=True)
class LeaseFiles:
    """The folder of a lease, as `shardway.rundir.lease.LeaseFiles`."""

    mount: Mount
    path: str = "lease"

    def names(self) -> list[str]:
        return self.mount.list(self.path)

    def read(self, name: str) -> str:
        return self.mount.read(self.path, name)

    def create(self, name: str, text: str) -> bool:
        return self.mount.create(self.path, name, text)

    def replace(self, name: str, text: str) -> None:
        self.mount.replace(self.path, name, text)

    def remove(self, name: str) -> None:
        self.mount.remove(self.path, name)


def _inside(store: Store, path: str, name: str, *, must: bool = False) -> dict[str, Any]:
    """The files of a folder within a folder; of one that is not there none, or an error where there `must` be one."""
    found = store.folder(path).entries.get(name)
    if found is None and must:
        raise FileNotFoundError(errno.ENOENT, "No such file or directory")
    return found.entries if isinstance(found, Folder) else {}


def _refusal(draw: float) -> OSError:
    number = (errno.EIO, errno.ENOSPC, errno.ESTALE)[int(draw * 3)]
    return OSError(number, errno.errorcode[number])
