"""Nodes of one job that read each byte of a data set once together, and what goes wrong between them."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from shardway.data import joint_copy, stage, stage_peers
from shardway.data.formats.base import BLOCK_BYTES, DamagedData, FileParts, describe_file, sum_blocks
from shardway.data.joint_copy import GrowingFile
from shardway.data.stage import CopyProgress, StageFolder
from shardway.data.stage_peers import (
    FoundPart,
    PartServer,
    PartState,
    PeerNode,
    PeerTrouble,
    StagePeers,
    assign_parts,
    span_of,
)
from shardway.errors import SiteError

SECRET = b"s" * 32
PART = 2 * BLOCK_BYTES


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_peers, "PART_BYTES", PART)
    monkeypatch.setattr(stage_peers, "PIECE_BYTES", BLOCK_BYTES)
    monkeypatch.setattr(joint_copy, "PIECE_BYTES", BLOCK_BYTES)
    monkeypatch.setattr(joint_copy, "LOOK_S", 0.002)
    monkeypatch.setattr(joint_copy, "PATIENCE_S", 5.0)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def make_parts(root: Path, sizes: dict[str, int], *, sums: bool = False) -> FileParts:
    root.mkdir()
    for name, size in sizes.items():
        (root / name).write_bytes(random.Random(name).randbytes(size))
    files = [describe_file(root, name) for name in sizes]
    return FileParts(root, files, [sum_blocks(root / file.name) for file in files] if sums else [])


SIZES = {"large": 5 * PART + 777, "middle": PART, "empty": 0, **{f"small{n}": 1000 + n for n in range(9)}}


class Nodes:
    """Some nodes in one process, each with a disk and a server, and the bytes that each has read of the data."""

    def __init__(self, folder: Path, count: int, parts: FileParts, monkeypatch: pytest.MonkeyPatch) -> None:
        self.parts = parts
        self.folders = [StageFolder(folder / f"node{node}") for node in range(count)]
        self.progress = [CopyProgress() for _ in range(count)]
        files = {key: file.size for key, file in zip(parts.list_keys(), parts.files, strict=True)}
        owners = assign_parts(files, count)
        self.peers = [StagePeers(node, [], owners, SECRET) for node in range(count)]
        for peers in self.peers:
            peers.coming = files.__contains__
        self.servers = [PartServer(node, SECRET, self.finder(node)) for node in range(count)]
        named = [PeerNode(f"n{node}", ("127.0.0.1",), each.port) for node, each in enumerate(self.servers)]
        for peers in self.peers:
            peers.set_nodes(named)
        self.errors: dict[int, Exception] = {}
        self.read = Counter[str]()
        read_part, mutex = GrowingFile.read_part, threading.Lock()

        def count_reads(growing: GrowingFile, part: int, note: Callable[[int], object]) -> None:
            read_part(growing, part, note)
            with mutex:
                self.read[parts.files[growing.number].name] += span_of(growing.size, part)[1]

        monkeypatch.setattr(GrowingFile, "read_part", count_reads)

    def finder(self, node: int) -> Callable[[str, int], FoundPart | PartState]:
        return lambda key, part: self.find(node, key, part)

    def find(self, node: int, key: str, part: int) -> FoundPart | PartState:
        return self.peers[node].find_part(key, part, self.folders[node].find_part)

    def stage(self, *only: int) -> None:
        """Each node, or some, stages the data in a thread of its own."""

        def hold(node: int) -> None:
            try:
                self.folders[node].hold(
                    self.parts, spare=0, progress=self.progress[node], peers=self.peers[node]
                ).close()
            except Exception as error:
                self.errors[node] = error
            self.peers[node].coming = lambda key: False

        threads = [threading.Thread(target=hold, args=(node,)) for node in only or range(len(self.folders))]
        for each in threads:
            each.start()
        for each in threads:
            each.join(30)
        assert not any(each.is_alive() for each in threads)

    def check(self, *only: int) -> None:
        """All that was staged is right, and no half file is left."""
        for node in only or range(len(self.folders)):
            (root,) = (self.folders[node].path / "sets").iterdir()
            for file in self.parts.files:
                assert (root / file.name).read_bytes() == (self.parts.root / file.name).read_bytes()
            assert not list((self.folders[node].path / "objects").glob(".*"))

    def close(self) -> None:
        for server in self.servers:
            server.close()
        for peers in self.peers:
            peers.close()


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Nodes]]:
    """(nodes, sums) -> so many nodes, for the data of SIZES."""
    started = []

    def begin(count: int = 3, *, sums: bool = False) -> Nodes:
        started.append(Nodes(tmp_path, count, make_parts(tmp_path / "data", SIZES, sums=sums), monkeypatch))
        return started[-1]

    yield begin
    for each in started:
        each.close()


@pytest.mark.parametrize("sums", [False, True])
def test_nodes_read_each_byte_once_together(start: Callable[..., Nodes], sums: bool) -> None:
    nodes = start(4, sums=sums)
    nodes.stage()
    assert not nodes.errors
    nodes.check()
    assert nodes.read == SIZES
    whole = sum(SIZES.values())
    read = [each.copied_bytes - each.fetched_bytes for each in nodes.progress]
    assert sum(read) == whole
    assert [each.copied_bytes for each in nodes.progress] == [whole] * 4
    assert max(read) <= whole / 4 + PART
    before = nodes.read.copy()
    nodes.stage()  # a further time nothing is missing
    assert nodes.read == before


def test_parts_are_balanced_and_those_of_earlier_are_not_read_again() -> None:
    files = {f"{10 * PART}-{number}": 10 * PART for number in range(7)} | {"5-x": 5, "0-y": 0}
    owners = assign_parts(files, 4)
    assert owners == assign_parts(files, 4)
    loads = Counter(owner for parts in owners.values() for owner in parts)
    assert max(loads.values()) - min(loads.values()) <= 2
    has = np.array([True] + [False] * 8)
    kept = assign_parts(files, 4, {1: has, 3: has})
    assert set(kept[next(iter(files))]) == {1, 3}


def test_a_node_that_has_the_data_sends_them_to_a_new_one(start: Callable[..., Nodes]) -> None:
    nodes = start(2)
    nodes.peers[1].coming = lambda key: False
    nodes.stage(0)
    nodes.check(0)
    before = nodes.read.copy()
    has = np.ones(len(SIZES), np.bool_)
    files = {key: file.size for key, file in zip(nodes.parts.list_keys(), nodes.parts.files, strict=True)}
    for peers in nodes.peers:
        peers.owners = assign_parts(files, 2, {0: has})
    nodes.stage(1)
    nodes.check(1)
    assert nodes.read == before


def test_an_owner_that_is_gone_is_not_waited_for(start: Callable[..., Nodes]) -> None:
    nodes = start(3)
    nodes.servers[1].close()
    began = time.monotonic()
    nodes.stage(0, 2)
    assert time.monotonic() - began < 4
    assert not nodes.errors
    nodes.check(0, 2)
    assert "n1: " in nodes.peers[0].troubles[1]


def test_an_owner_that_is_much_slower_is_not_waited_for_longer_than_patience(
    start: Callable[..., Nodes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joint_copy, "PATIENCE_S", 0.05)
    nodes = start(3)  # node 1 promises all and reads nothing
    nodes.stage(0, 2)
    assert not nodes.errors
    nodes.check(0, 2)
    assert sum(nodes.read.values()) > sum(SIZES.values())


def test_an_owner_without_room_is_not_waited_for(start: Callable[..., Nodes], monkeypatch: pytest.MonkeyPatch) -> None:
    nodes, grow = start(3), StageFolder._grow

    def refuse(folder: StageFolder, parts: FileParts, number: int, key: str) -> GrowingFile:
        if folder == nodes.folders[1]:
            raise folder._explain(OSError(28, "No space left on device"), parts.path(number))
        return grow(folder, parts, number, key)

    monkeypatch.setattr(StageFolder, "_grow", refuse)
    nodes.stage()
    assert isinstance(nodes.errors.pop(1), SiteError)
    assert not nodes.errors
    nodes.check(0, 2)


def test_a_byte_that_is_flipped_on_the_way_is_found_and_the_part_read_where_it_lies(
    start: Callable[..., Nodes], monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes, flips = start(2), iter([True])
    fill = stage_peers._fill

    def flip(connection: socket.socket, view: memoryview, *rest: float) -> None:
        fill(connection, view, *rest)
        if len(view) == BLOCK_BYTES and next(flips, False):
            view[5] ^= 1

    monkeypatch.setattr(stage_peers, "_fill", flip)
    nodes.stage()
    assert not nodes.errors
    nodes.check()
    assert "disagree with their checksum" in str([each.troubles for each in nodes.peers])


def test_wrong_bytes_with_a_checksum_of_their_own_do_not_count_as_damaged_data(start: Callable[..., Nodes]) -> None:
    """An owner whose memory has flipped a bit before it made the checksum."""
    nodes = start(2, sums=True)
    spoilt = nodes.find

    def find(node: int, key: str, part: int) -> FoundPart | PartState:
        found = spoilt(node, key, part)
        if isinstance(found, PartState) or found.size < PART:
            return found
        content = bytearray(os.pread(found.descriptor, found.size, found.offset))
        os.close(found.descriptor)
        content[7] ^= 1
        reader = os.memfd_create("spoilt")
        os.write(reader, content)
        blocks = [stage_peers.xxhash.xxh3_64_intdigest(content[at : at + BLOCK_BYTES]) for at in (0, BLOCK_BYTES)]
        return FoundPart(reader, 0, len(content), np.array(blocks, np.uint64).tobytes())

    nodes.find = find  # type: ignore[method-assign]
    nodes.stage()
    assert not nodes.errors
    nodes.check()


def test_data_that_are_damaged_where_they_lie_are_named_on_every_node(start: Callable[..., Nodes]) -> None:
    nodes = start(2, sums=True)
    with (nodes.parts.root / "middle").open("r+b") as stream:
        stream.write(b"\0\0")
    nodes.stage()
    assert set(nodes.errors) == {0, 1}
    assert all(isinstance(each, DamagedData) for each in nodes.errors.values())
    assert all(f"{nodes.parts.root / 'middle'} is damaged at byte 0" in str(each) for each in nodes.errors.values())
    assert not [each for folder in nodes.folders for each in (folder.path / "objects").glob(".*")]


def test_neither_another_job_nor_another_program_gets_data(start: Callable[..., Nodes]) -> None:
    nodes = start(2)
    nodes.stage()
    key = nodes.parts.list_keys()[0]
    foreign = StagePeers(0, nodes.peers[0].nodes, nodes.peers[0].owners, b"x" * 32)
    with pytest.raises(PeerTrouble, match="n1: "):
        foreign.fetch(1, key, 0, PART, lambda at, piece: None)
    assert foreign.rests(1)
    for says in (b"", b"GET / HTTP/1.0\r\n\r\n" * 10, bytes(64)):
        with socket.create_connection(("127.0.0.1", nodes.servers[1].port), timeout=5) as connection:
            answer = connection.recv(32)
            with contextlib.suppress(OSError):  # the server may have closed it at the first words
                connection.sendall(says)
                connection.shutdown(socket.SHUT_WR)
                assert connection.recv(1) == b""
        assert len(answer) == 32  # a random number, and no more
    asked = nodes.peers[0].fetch(1, "4096-../../secret", 0, 4096, lambda at, piece: None)
    assert asked is PartState.NEVER


def test_another_program_at_the_port_of_a_node_is_not_believed(start: Callable[..., Nodes]) -> None:
    nodes = start(2)
    other = PartServer(1, b"y" * 32, lambda key, part: PartState.NEVER)
    peers = StagePeers(0, [nodes.peers[0].nodes[0], PeerNode("n1", ("127.0.0.1",), other.port)], {}, SECRET)
    try:
        with pytest.raises(PeerTrouble):
            peers.fetch(1, "1-a", 0, 1, lambda at, piece: None)
    finally:
        other.close()


def test_a_node_that_sends_far_more_slowly_than_the_data_are_read_is_asked_no_more(
    start: Callable[..., Nodes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_peers, "SLOW_BYTES", PART)
    nodes = start(2)
    nodes.stage(1, 0)
    peers = StagePeers(0, nodes.peers[0].nodes, nodes.peers[0].owners, SECRET)
    peers.note_shared(100 * PART, 1e-6)
    peers.fetch(1, nodes.parts.list_keys()[0], 0, PART, lambda at, piece: time.sleep(0.01))
    assert peers.rests(1)
    assert "more slowly" in peers.troubles[1]


def test_a_server_ends_with_a_connection_that_says_nothing(start: Callable[..., Nodes]) -> None:
    nodes = start(2)
    with socket.create_connection(("127.0.0.1", nodes.servers[0].port), timeout=5) as connection:
        connection.recv(32)
        began = time.monotonic()
        nodes.servers[0].close()
        assert connection.recv(1) == b""
    assert time.monotonic() - began < 2


def test_a_set_that_is_read_window_by_window_comes_from_other_nodes_too(
    tmp_path: Path, start: Callable[..., Nodes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage, "SPARE_BYTES", 0)
    nodes = start(3)
    everything = range(len(SIZES))
    partial = [stage.PartialSet(folder, nodes.parts) for folder in nodes.folders]
    for node, each in enumerate(partial):
        each.want([0, 1], [number for number in everything if number > 1])
        nodes.peers[node].coming = each.is_wanted
    threads = [
        threading.Thread(target=each.copy_together, args=(nodes.peers[node], nodes.progress[node]))
        for node, each in enumerate(partial)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    assert [each.list_missing(everything) for each in partial] == [[]] * 3
    assert nodes.read == SIZES
    assert all(not each._claim.copying for each in partial)
    for each in partial:
        each.close()
    nodes.check()
