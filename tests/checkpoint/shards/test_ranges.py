"""Ranges of a file come into memory as they are, and whatever was changed around them is found."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from shardway.checkpoint import file_format
from shardway.checkpoint.file_format import BlockReader, Damaged, FileChecksum, checksum_bytes, checksum_file

BLOCK, STEP = 64, 16


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_format, "BLOCK", BLOCK)
    monkeypatch.setattr(file_format, "STEP", STEP)


def read(folder: Path, checksum: FileChecksum, ranges: list[tuple[int, memoryview]], *, whole: bool) -> str | None:
    """Ranges of the file f, and the rest of it if it is to be read whole; what is damaged."""
    reader = BlockReader(folder, {"f": checksum}, held=1)
    try:
        for at, target in ranges:
            reader.read("f", at, target)
        if whole:
            reader.verify_rest("f")
    except Damaged as damage:
        return "; ".join(damage.reasons)
    return None


def cut(rng: random.Random, size: int) -> list[tuple[int, int]]:
    """Ranges that do not overlap, some of no length, some that touch."""
    places = sorted(rng.randrange(size + 1) for _ in range(rng.randrange(1, 30)))
    return [(first, end) for first, end in itertools.pairwise(places) if rng.random() < 0.6]


@pytest.mark.parametrize("seed", range(60))
def test_what_is_wanted_comes_as_it_is(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    content = rng.randbytes(rng.choice([0, 1, BLOCK - 1, BLOCK, 3 * BLOCK, 333]))
    (tmp_path / "f").write_bytes(content)
    places = cut(rng, len(content))
    memories = [bytearray(end - first) for first, end in places]
    order = rng.sample(range(len(places)), len(places))
    found = [(places[number][0], memoryview(memories[number])) for number in order]
    assert read(tmp_path, checksum_bytes(content), found, whole=bool(seed % 2)) is None
    assert [bytes(memory) for memory in memories] == [content[first:end] for first, end in places]


def flip(rng: random.Random, data: bytearray) -> None:
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def cut_off(rng: random.Random, data: bytearray) -> None:
    del data[rng.randrange(len(data)) :]


def grow(rng: random.Random, data: bytearray) -> None:
    data += rng.randbytes(rng.randrange(1, 9))


def blank(rng: random.Random, data: bytearray) -> None:
    first = rng.randrange(len(data) - 8)
    data[first : first + 8] = bytes(8)


def swap(rng: random.Random, data: bytearray) -> None:
    one, other = rng.sample(range(len(data) // BLOCK), 2)
    first, second = (slice(number * BLOCK, (number + 1) * BLOCK) for number in (one, other))
    data[first], data[second] = data[second], data[first]


@pytest.mark.parametrize("change", [flip, cut_off, grow, blank, swap], ids=lambda change: change.__name__)
def test_every_change_is_found(change: Callable[[random.Random, bytearray], None], tmp_path: Path) -> None:
    for seed in range(200):
        rng = random.Random(seed)
        content = rng.randbytes(rng.randrange(2 * BLOCK, 6 * BLOCK))
        data = bytearray(content)
        change(rng, data)
        (tmp_path / "f").write_bytes(data)
        damage = read(tmp_path, checksum_bytes(content), [], whole=True)
        assert damage is not None, seed
        assert damage.startswith("f has " if len(data) != len(content) else "the content of f has changed"), damage


def test_no_more_is_read_than_the_blocks_around_what_is_wanted(tmp_path: Path) -> None:
    content = bytearray(random.Random(0).randbytes(10 * BLOCK))
    seals = checksum_bytes(bytes(content))
    content[5 * BLOCK] ^= 1
    (tmp_path / "f").write_bytes(content)
    memory = bytearray(BLOCK)
    before, around = ([(at, memoryview(memory))] for at in (3 * BLOCK + 7, 4 * BLOCK + 7))
    assert read(tmp_path, seals, before, whole=False) is None
    assert bytes(memory) == bytes(content[3 * BLOCK + 7 : 4 * BLOCK + 7])
    told = read(tmp_path, seals, around, whole=False)
    assert told == f"the content of f has changed (the checksum of its bytes {5 * BLOCK} to {6 * BLOCK} is another)"


def test_what_is_not_whole_is_not_handed_on(tmp_path: Path) -> None:
    content = bytes(3 * BLOCK)
    (tmp_path / "f").write_bytes(content[:-1] + b"x")
    first, across = bytearray(BLOCK), bytearray(b"." * BLOCK)
    found = [(0, memoryview(first)), (BLOCK + 9, memoryview(across))]
    assert read(tmp_path, checksum_bytes(content), found, whole=False) is not None
    assert first == bytes(BLOCK)
    assert across[-9:] == b"." * 9  # the part of the block that differs


def test_a_table_may_not_point_behind_the_file(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"abc")
    told = read(tmp_path, checksum_bytes(b"abc"), [(1, memoryview(bytearray(3)))], whole=False)
    assert told == "f has 3 bytes, and more are said to be in it"


@pytest.mark.parametrize("size", [0, 1, STEP, BLOCK, BLOCK + 1, 5 * BLOCK])
def test_a_seal_is_that_of_the_file(size: int, tmp_path: Path) -> None:
    content = random.Random(size).randbytes(size)
    (tmp_path / "f").write_bytes(content)
    assert checksum_file(tmp_path / "f") == checksum_bytes(content)
    assert len(checksum_bytes(content).blocks) == -(-size // BLOCK)
