"""What comes from a hub over loopback: whole, gone on with behind a cut, checked, and nowhere but in the cache."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants

import hub_server
from hub_models import FIRST, SECOND, write_model
from hub_server import COMMIT, HubServer, digest_of
from shardway.errors import JobError, ShardwayError, SiteError, UserError
from shardway.hfconfig import locate_model
from shardway.prefetch import hub as hub_module
from shardway.prefetch.cache import CachedRepo, HubCache, HubName
from shardway.prefetch.hub import Fetcher, FetchState, HubClient, RemoteSnapshot, list_absent
from shardway.prefetch.wanted import want_model

NAME = HubName("org/tiny")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = write_model(tmp_path_factory.mktemp("hub") / "tiny")
    (model / "original").mkdir()
    (model / "original" / "consolidated.00.safetensors").write_bytes(b"twice")
    (model / "pytorch_model.bin").write_bytes(b"pickled")
    return model


@pytest.fixture
def hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with HubServer({"org/tiny": folder, "datasets/org/text": folder}) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.setenv("HF_TOKEN_PATH", "/nowhere/token")
        yield server
        huggingface_hub.close_session()


@pytest.fixture
def cache(tmp_path: Path) -> HubCache:
    return HubCache(tmp_path / "hf" / "hub", "HF_HOME")


def look(client: HubClient | None = None) -> RemoteSnapshot:
    wanted = want_model(NAME, "model.hf")
    return (client or HubClient.open()).list_files(NAME, wanted.patterns, wanted.left_out, wanted.where)


def fetch(cache: HubCache, state: FetchState | None = None, client: HubClient | None = None) -> Path:
    """What `shardway prefetch` does, without waiting between tries."""
    client = client or HubClient.open()
    remote = look(client)
    absent = list_absent(remote, cache.repo(NAME))
    fetcher = Fetcher(client, cache, "model.hf", pause=lambda seconds: None)
    return fetcher.fetch(remote, list(absent), state or FetchState())


def partial_of(cache: HubCache, folder: Path, name: str) -> Path:
    return cache.repo(NAME).partial(digest_of((folder / name).read_bytes()))


def test_a_model_comes_as_the_hub_library_would_have_left_it(hub: HubServer, cache: HubCache, folder: Path) -> None:
    snapshot = fetch(cache)
    assert snapshot == cache.folder / "models--org--tiny" / "snapshots" / COMMIT
    names = {path.name for path in snapshot.iterdir()}
    assert names == {path.name for path in folder.iterdir()} - {"original", "pytorch_model.bin"}
    assert all((snapshot / name).read_bytes() == (folder / name).read_bytes() for name in names)
    assert all((snapshot / name).is_symlink() and not os.readlink(snapshot / name).startswith("/") for name in names)
    found = huggingface_hub.snapshot_download("org/tiny", cache_dir=cache.folder, local_files_only=True)
    assert Path(found) == snapshot
    assert {path.relative_to(cache.folder).parts[0] for path in cache.folder.rglob("*")} == {"models--org--tiny"}
    assert list(cache.folder.rglob("*.incomplete")) == []


def test_what_is_there_is_not_fetched_again(hub: HubServer, cache: HubCache) -> None:
    fetch(cache)
    hub.requests.clear()
    state = FetchState()
    fetch(cache, state)
    assert not [each for each in hub.requests if "/resolve/" in each.path]
    assert state.done_bytes == 0


def test_a_cut_connection_is_gone_on_with(hub: HubServer, cache: HubCache, folder: Path) -> None:
    hub.faults.cut_after, hub.faults.cuts = 9000, 4
    snapshot = fetch(cache)
    assert (snapshot / FIRST).read_bytes() == (folder / FIRST).read_bytes()
    assert len(hub.fetched(FIRST)) + len(hub.fetched(SECOND)) == 2 + 4
    assert hub.fetched(FIRST)[0] == 0
    assert all(begin % 9000 == 0 and begin > 0 for begin in hub.fetched(FIRST)[1:])


def test_another_start_goes_on_behind_what_came(hub: HubServer, cache: HubCache, folder: Path) -> None:
    """What a killed process leaves is the bytes that came."""
    whole = (folder / FIRST).read_bytes()
    cache.repo(NAME).partial("x").parent.mkdir(parents=True)
    partial_of(cache, folder, FIRST).write_bytes(whole[:5000])
    state = FetchState()
    assert (fetch(cache, state) / FIRST).read_bytes() == whole
    assert hub.fetched(FIRST) == [5000]
    assert (state.resumed_bytes, state.done_bytes) == (5000, look().size)


def test_a_hub_that_sends_nothing_is_given_up_and_what_came_stays(
    hub: HubServer, cache: HubCache, folder: Path
) -> None:
    hub.faults.failing = 1000
    with pytest.raises(SiteError, match=r"connections in a row brought nothing") as caught:
        fetch(cache)
    assert "run the same command again: it goes on from there" in str(caught.value)
    assert cache.repo(NAME).find_commit("") == ""
    hub.faults.failing = 0
    assert (fetch(cache) / SECOND).read_bytes() == (folder / SECOND).read_bytes()


def test_a_server_without_ranges_sends_all_of_it_again(hub: HubServer, cache: HubCache, folder: Path) -> None:
    cache.repo(NAME).partial("x").parent.mkdir(parents=True)
    partial_of(cache, folder, FIRST).write_bytes((folder / FIRST).read_bytes()[:3000])
    hub.faults.no_ranges = True
    state = FetchState()
    assert (fetch(cache, state) / FIRST).read_bytes() == (folder / FIRST).read_bytes()
    assert state.done_bytes == look().size


def test_a_part_that_is_longer_than_the_file_is_thrown_away(hub: HubServer, cache: HubCache, folder: Path) -> None:
    cache.repo(NAME).partial("x").parent.mkdir(parents=True)
    partial_of(cache, folder, FIRST).write_bytes(bytes(10**6))
    assert (fetch(cache) / FIRST).read_bytes() == (folder / FIRST).read_bytes()


# --- wrong bytes


def test_wrong_bytes_are_found_and_fetched_once_more(hub: HubServer, cache: HubCache, folder: Path) -> None:
    hub.faults.wrong = {FIRST: 1, "tokenizer.json": 1}
    state = FetchState()
    snapshot = fetch(cache, state)
    assert (snapshot / FIRST).read_bytes() == (folder / FIRST).read_bytes()
    assert sorted(note.partition(":")[0] for note in state.notes) == [FIRST, "tokenizer.json"]
    assert all("wrong bytes came" in note for note in state.notes)


def test_bytes_that_stay_wrong_are_refused_by_the_name_of_the_file(
    hub: HubServer, cache: HubCache, folder: Path
) -> None:
    hub.faults.wrong = {FIRST: 1000}
    with pytest.raises(JobError) as caught:
        fetch(cache)
    assert str(caught.value).startswith(f"{FIRST} came twice with a wrong digest")
    snapshot = cache.repo(NAME).snapshot(COMMIT)
    assert not os.path.lexists(snapshot / FIRST)
    assert (snapshot / SECOND).is_file()  # the others came
    assert not partial_of(cache, folder, FIRST).exists()
    assert cache.repo(NAME).find_commit("") == ""


def test_a_part_of_other_bytes_is_found_at_the_end(hub: HubServer, cache: HubCache, folder: Path) -> None:
    cache.repo(NAME).partial("x").parent.mkdir(parents=True)
    partial_of(cache, folder, FIRST).write_bytes(b"x" * 5000)
    assert (fetch(cache) / FIRST).read_bytes() == (folder / FIRST).read_bytes()
    assert hub.fetched(FIRST) == [5000, 0]


def test_a_damaged_file_of_the_cache_is_fetched_again(hub: HubServer, cache: HubCache, folder: Path) -> None:
    snapshot = fetch(cache)
    blob = (snapshot / FIRST).resolve()
    content = blob.read_bytes()
    blob.write_bytes(content[:-1])
    assert list_absent(look(), cache.repo(NAME)) == {FIRST: len(content)}
    fetch(cache)
    assert blob.read_bytes() == content
    blob.write_bytes(content[:-1] + b"?")  # of the right size: found where it is read
    assert list_absent(look(), cache.repo(NAME)) == {}
    assert list_absent(look(), cache.repo(NAME), reads=True) == {FIRST: len(content)}


# --- what the disk refuses


@pytest.mark.parametrize(
    ("number", "kind", "words"),
    [
        (errno.ENOSPC, JobError, "make room there"),
        (errno.EDQUOT, JobError, "make room in your quota"),
        (errno.EACCES, UserError, "ask its owner for permission"),
    ],
)
def test_a_disk_that_refuses_is_named_and_what_came_stays(
    number: int,
    kind: type[ShardwayError],
    words: str,
    hub: HubServer,
    cache: HubCache,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write, left = hub_module._write_at, 20_000
    lock = threading.Lock()

    def refuse(descriptor: int, piece: bytes, at: int) -> None:
        nonlocal left
        with lock:
            left -= len(piece)
            if left < 0:
                raise OSError(number, os.strerror(number))
        write(descriptor, piece, at)

    monkeypatch.setattr(hub_module, "_write_at", refuse)
    with pytest.raises(kind) as caught:
        fetch(cache)
    text = str(caught.value)
    assert os.strerror(number) in text
    assert words in text
    assert "HF_HOME" in text
    monkeypatch.undo()
    os.environ["HF_ENDPOINT"] = hub.url
    try:
        assert (fetch(cache) / FIRST).read_bytes() == (folder / FIRST).read_bytes()
    finally:
        del os.environ["HF_ENDPOINT"]


def test_a_cache_of_others_is_used_as_it_is(hub: HubServer, cache: HubCache, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = fetch(cache)
    cache.repo(NAME).record_path(COMMIT).unlink()

    def refuse(self: CachedRepo, commit: str, files: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(CachedRepo, "write_record", refuse)
    state = FetchState()
    assert fetch(cache, state) == snapshot
    assert ["takes no files (Permission denied)" in note for note in state.notes] == [True]


def test_a_cache_that_cannot_be_made_is_named(hub: HubServer, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file.* cannot be written \(HF_HUB_CACHE leads there\): Not a directory"):
        fetch(HubCache(tmp_path / "file" / "hub", "HF_HUB_CACHE"))


# --- permission, and several at once


def test_a_gated_repository_takes_the_token(hub: HubServer, cache: HubCache, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.faults.gated = frozenset(("org/tiny",))
    assert look().gated
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(UserError, match=r'model.hf: "org/tiny" is gated') as caught:
        fetch(cache)
    assert "hf_wrong" not in str(caught.value)
    monkeypatch.setenv("HF_TOKEN", hub.token)
    assert (fetch(cache) / "config.json").is_file()


def test_two_at_once_fetch_each_file_once(hub: HubServer, cache: HubCache, folder: Path) -> None:
    client = HubClient.open()
    remote = look(client)
    errors: list[BaseException] = []

    def work() -> None:
        try:
            Fetcher(client, cache).fetch(remote, list(remote.files), FetchState())
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert all((cache.repo(NAME).snapshot(COMMIT) / name).is_file() for name in remote.files)
    assert hub.fetched(FIRST) == hub.fetched(SECOND) == [0]


def test_without_locks_two_writers_write_the_same_bytes(
    hub: HubServer, cache: HubCache, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a file system whose locks do nothing."""
    monkeypatch.setattr(hub_module.fcntl, "flock", lambda descriptor, how: None)
    threads = [threading.Thread(target=lambda: fetch(cache)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    fetch(cache)
    assert (cache.repo(NAME).snapshot(COMMIT) / FIRST).read_bytes() == (folder / FIRST).read_bytes()


def test_an_interrupt_keeps_what_came(hub: HubServer, cache: HubCache) -> None:
    def interrupt(state: FetchState) -> None:
        raise KeyboardInterrupt

    client = HubClient.open()
    remote, state = look(client), FetchState()
    with pytest.raises(KeyboardInterrupt):
        Fetcher(client, cache).fetch(remote, list(remote.files), state, interrupt)
    assert state.stop.is_set()
    assert cache.repo(NAME).find_commit("") == ""
    for thread in threading.enumerate():
        if thread.name.startswith("prefetch"):
            thread.join()
    assert (fetch(cache) / FIRST).is_file()


# --- what is asked for


def test_what_comes_holds_what_a_run_asks_for(hub: HubServer, cache: HubCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the listing that the hub's own library keeps, it counts the files that it asks for."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache.folder))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    snapshot = fetch_online(cache, monkeypatch)
    assert locate_model("org/tiny") == snapshot


def fetch_online(cache: HubCache, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Fetch, and note the listing as `huggingface_hub.snapshot_download` does."""
    from huggingface_hub._tree_cache import TreeCacheEntry, write_tree_cache

    with monkeypatch.context() as online:
        online.setattr(constants, "HF_HUB_OFFLINE", False)
        snapshot = fetch(cache)
        everything = HubClient.open().list_files(NAME, ("*",), (), "model.hf")
    entries = {name: TreeCacheEntry(file.size, file.digest) for name, file in everything.files.items()}
    write_tree_cache(str(snapshot.parent.parent), COMMIT, entries)
    assert len(entries) > len(list(snapshot.iterdir()))
    return snapshot


@pytest.mark.parametrize("path", ["../../x", "/etc/x", "a/../../x", "a\0b"])
def test_a_listed_name_that_leads_out_of_the_snapshot_is_not_taken(
    path: str, hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = {"type": "file", "size": 1, "oid": "0" * 40}
    monkeypatch.setattr(hub_server, "list_entry", lambda file, folder: {**entry, "path": path})
    assert HubClient.open().list_files(NAME, ("*",), (), "--model").files == {}


@pytest.mark.parametrize(
    "facts", [{"oid": "../../x"}, {"oid": 5}, {"size": "1"}, {"size": -1}, {"lfs": {"oid": "../x", "size": 1}}]
)
def test_a_digest_that_is_none_is_no_name_of_a_file(
    facts: dict[str, object], hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = {"type": "file", "path": "config.json", "size": 1, "oid": "0" * 40, **facts}
    monkeypatch.setattr(hub_server, "list_entry", lambda file, folder: entry)
    with pytest.raises(SiteError, match="does not answer as a hub does"):
        HubClient.open().list_files(NAME, ("*",), (), "--model")


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        (HubName("org/none"), UserError, "is neither a folder nor a name of the hub"),
        (HubName("org/tiny", "v9"), UserError, "names a revision that the hub does not have"),
    ],
)
def test_a_wrong_name_is_explained(hub: HubServer, name: HubName, kind: type[ShardwayError], words: str) -> None:
    with pytest.raises(kind, match=words):
        HubClient.open().list_files(name, ("*",), (), "--model")


def test_a_proxy_that_answers_instead_is_explained(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    client = HubClient.open()
    monkeypatch.setattr(client, "_get", lambda url: type("Page", (), {"json": lambda self: {"hello": "log in"}})())
    with pytest.raises(SiteError, match="does not answer as a hub does"):
        client.list_files(NAME, ("*",), (), "--model")


def test_a_hub_that_is_away_is_a_matter_of_the_site(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    try:
        with pytest.raises(SiteError, match=r"look whether this machine reaches it"):
            look()
    finally:
        huggingface_hub.close_session()


def test_the_record_of_a_commit_grows(tmp_path: Path, hub: HubServer, cache: HubCache) -> None:
    client = HubClient.open()
    few = client.list_files(NAME, ("config.json",), (), "--tokenizer")
    Fetcher(client, cache).fetch(few, list(few.files), FetchState())
    assert set(CachedRepo(cache.repo(NAME).folder).read_record(COMMIT)) == {"config.json"}
    fetch(cache)
    assert {FIRST, "config.json"} <= set(cache.repo(NAME).read_record(COMMIT))
