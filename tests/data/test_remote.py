"""Data behind an address are copied whole, and gone on with after a kill; what is wrong with one is one sentence."""

from __future__ import annotations

import functools
import http.server
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardway.data import remote
from shardway.data.remote import fetched
from shardway.errors import JobError, UserError

fsspec = pytest.importorskip("fsspec")


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A file system in memory, with three files below /data."""
    system = fsspec.filesystem("memory")
    monkeypatch.setattr(system, "store", {})
    monkeypatch.setattr(system, "pseudo_dirs", [""])
    for name, content in (("a.txt", b"one"), ("b.txt", b"two, longer"), ("sub/c.txt", b"three")):
        system.pipe(f"/data/{name}", content)
    return system


def files_of(folder: str) -> dict[str, bytes]:
    path = Path(folder)
    return {str(each.relative_to(path)): each.read_bytes() for each in sorted(path.rglob("*")) if each.is_file()}


def fetch(source: str, out: Path) -> tuple[str, dict[str, bytes], list[str]]:
    told: list[str] = []
    with fetched(source, out, told.append) as local:
        content = {"": Path(local).read_bytes()} if Path(local).is_file() else files_of(local)
        found = Path(local).name, content, told
    assert os.listdir(out.parent) == []
    return found


def test_a_path_of_this_machine_is_itself(tmp_path: Path) -> None:
    with fetched("some/path", tmp_path / "out", pytest.fail) as local:
        assert local == "some/path"


def test_a_file_a_folder_and_a_pattern(far: Any, tmp_path: Path) -> None:
    name, content, told = fetch("memory://data/b.txt", tmp_path / "out")
    assert (name, content) == ("b.txt", {"": b"two, longer"})
    assert told[0].startswith("copying 1 file, 11 B, from memory://data/b.txt to ")
    every = {"a.txt": b"one", "b.txt": b"two, longer", "sub/c.txt": b"three"}
    assert fetch("memory://data", tmp_path / "out")[1] == every
    assert fetch("memory://data/", tmp_path / "out")[1] == every
    assert fetch("memory://data/*.txt", tmp_path / "out")[1] == {"a.txt": b"one", "b.txt": b"two, longer"}
    assert fetch("memory://data/{a,b}.txt", tmp_path / "out")[1] == {"a.txt": b"one", "b.txt": b"two, longer"}


def test_files_of_this_machine_by_address(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a b.txt").write_bytes(b"x")
    (tmp_path / "work").mkdir()
    assert fetch(f"file://{tmp_path}/in/a b.txt", tmp_path / "work" / "out")[1] == {"": b"x"}


def test_shards_of_a_pattern_that_are_missing_are_named(far: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"names files that are missing: c\.txt, d\.txt"):
        fetch("memory://data/{a,c,d}.txt", tmp_path / "out")


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("memory://nowhere", 'SOURCE: "memory://nowhere" does not exist'),
        ("memory://data/*.tar", "has no file"),
        ("nothing://x/y", "cannot be opened: Protocol not known: nothing"),
    ],
)
def test_an_address_without_data_is_refused(far: Any, tmp_path: Path, source: str, what: str) -> None:
    with pytest.raises(UserError) as error:
        fetch(source, tmp_path / "out")
    assert what in str(error.value)
    assert os.listdir(tmp_path) == []


def test_a_copy_that_was_cut_off_is_gone_on_with(far: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first file is whole, the second is half there: only its rest is read."""
    monkeypatch.setattr(remote, "PIECE_BYTES", 4)
    far.pipe("/data/b.txt", bytes(range(40)))
    opened: list[tuple[str, int]] = []
    work = type(far)._open

    def watch(self: Any, path: str, *arguments: Any, **named: Any) -> Any:
        file = work(self, path, *arguments, **named)
        read = file.read

        def counted(size: int) -> bytes:
            opened.append((path.rpartition("/")[2], file.tell()))
            if stops and path.endswith("b.txt") and file.tell() >= 20:
                raise ConnectionResetError("gone")
            return read(size)

        monkeypatch.setattr(file, "read", counted)
        return file

    monkeypatch.setattr(type(far), "_open", watch)
    stops = True
    with pytest.raises(JobError, match=r"/data/b\.txt could not be copied: gone\n.* run the same command again"):
        fetch("memory://data", tmp_path / "out")
    stops = False
    opened.clear()
    assert fetch("memory://data", tmp_path / "out")[1]["b.txt"] == bytes(range(40))
    assert opened[0] == ("b.txt", 20)
    assert "a.txt" not in {name for name, _ in opened}


def test_a_copy_of_another_file_is_not_gone_on_with(far: Any, tmp_path: Path) -> None:
    """What lies there is longer, or the file has changed since."""
    with pytest.raises(ZeroDivisionError), fetched("memory://data/b.txt", tmp_path / "out", lambda line: None) as local:
        raise ZeroDivisionError
    assert Path(local).read_bytes() == b"two, longer"
    far.pipe("/data/b.txt", b"other words")
    assert fetch("memory://data/b.txt", tmp_path / "out")[1] == {"": b"other words"}


def test_a_file_that_ends_early_is_said(far: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = type(far).info
    monkeypatch.setattr(type(far), "info", lambda self, path, **named: {**info(self, path, **named), "size": 20})
    with pytest.raises(JobError, match=r"/data/a\.txt has 20 bytes and 3 were copied"):
        fetch("memory://data/a.txt", tmp_path / "out")


def test_a_full_disk_is_said(far: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(JobError, match=r"no space for /data/a\.txt .*\n.*what was copied stays"):
        fetch("memory://data/a.txt", tmp_path / "out")


# --- over http


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """Two files and their list, served on this machine."""
    pytest.importorskip("aiohttp")
    folder = tmp_path / "served"
    (folder / "data").mkdir(parents=True)
    for name in ("a.txt", "b.txt"):
        (folder / "data" / name).write_bytes(name.encode() * 1000)

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as served:
        thread = threading.Thread(target=served.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{served.server_address[1]}"
        served.shutdown()
        thread.join()


def test_files_over_http(server: str, tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    out = tmp_path / "work" / "out"
    assert fetch(f"{server}/data/a.txt", out)[1] == {"": b"a.txt" * 1000}
    assert fetch(f"{server}/data/{{a,b}}.txt", out)[1] == {"a.txt": b"a.txt" * 1000, "b.txt": b"b.txt" * 1000}
    with pytest.raises(UserError, match="does not exist"):
        fetch(f"{server}/data/c.txt", out)


def test_a_server_that_gives_no_parts_is_asked_for_all(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "work").mkdir()
    out = tmp_path / "work" / "out"
    with monkeypatch.context() as patch, pytest.raises(JobError):
        patch.setattr(remote.os, "replace", lambda *paths: (_ for _ in ()).throw(JobError))
        fetch(f"{server}/data/a.txt", out)
    (part,) = out.parent.rglob(".a.txt.part")
    part.write_bytes(b"half")
    assert fetch(f"{server}/data/a.txt", out)[1] == {"": b"a.txt" * 1000}
