"""Stops at any step and other ranks, workers or skipped spans after it leave every batch as it was, for every kind of
data that a run file can name."""

from __future__ import annotations

import gzip
import io
import itertools
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shardway.batch_ramp import BatchRamp
from shardway.data.batch_tree import LengthGroups, PackedInputs
from shardway.data.convert import WRITERS
from shardway.data.loader import LoaderOptions, Share, StepLoader
from shardway.data.open import open_data, order_of
from shardway.data.order import BlendOrder, SampleOrder, Skips
from shardway.data.sources.base import DataSource, Wants
from shardway.runfile.schema import DataSection, RunFile
from speed import picked

BATCH, EPOCHS, SEED, SEQ_LEN = 7, 2.2, 11, 8
RECORDED = Path(__file__).parents[1] / "recorded/data"
Row = tuple[int, tuple[tuple[str, bytes], ...]]
"""A sample as a batch holds it: its id, and the bytes of each of its arrays."""


def jitter(image: Any) -> Any:
    """Adds what NumPy and torch draw, so that it differs from sample to sample and from epoch to epoch."""
    import torch

    pixels = np.asarray(image, np.float32).transpose(2, 0, 1)
    return torch.from_numpy(pixels + np.random.random(pixels.shape).astype(np.float32)) + torch.rand(1)


# --- small data of every kind


def texts(count: int = 23) -> Iterator[dict[str, Any]]:
    drawn = np.random.default_rng(1)
    for number in range(count):
        yield {"text": f"{number}:" + "".join(drawn.choice(list("abcdé "), int(drawn.integers(0, 30))))}


def documents(count: int = 19, dtype: str = "uint16") -> Iterator[dict[str, Any]]:
    drawn = np.random.default_rng(2)
    for _ in range(count):
        yield {"tokens": drawn.integers(0, 200, int(drawn.integers(1, 25))).astype(dtype)}


def chats(count: int = 17) -> Iterator[dict[str, Any]]:
    for number in range(count):
        turns = [("user", f"{number}+{number}?"), ("assistant", f"It is {2 * number}." * (1 + number % 3))]
        yield {"messages": [{"role": role, "content": content} for role, content in turns]}


def pictures(count: int = 31) -> Iterator[dict[str, Any]]:
    from PIL import Image

    drawn = np.random.default_rng(3)
    for number in range(count):
        stream = io.BytesIO()
        Image.fromarray(drawn.integers(0, 256, (6, 5, 3), np.uint8)).save(stream, "PNG")
        yield {"png": stream.getvalue(), "cls": number % 3}


def numbers(count: int = 41) -> Iterator[dict[str, Any]]:
    drawn = np.random.default_rng(4)
    for number in range(count):
        yield {"x": drawn.random((2, 3), np.float32), "y": np.int64(number % 5)}


def write_npy(path: Path) -> None:
    np.save(path, np.random.default_rng(5).integers(0, 99, 333).astype(np.uint16))


def write_raw(path: Path) -> None:
    np.random.default_rng(6).integers(0, 99, 301).astype(np.uint16).tofile(path)


def write_gzip(path: Path) -> None:
    with gzip.open(path, "wt") as stream:
        stream.writelines(json.dumps(record) + "\n" for record in texts(29))


def write_idx(folder: Path) -> None:
    drawn, count = np.random.default_rng(7), 37
    folder.mkdir()
    for name, shape in (("train-images-idx3-ubyte", (count, 4, 3)), ("train-labels-idx1-ubyte", (count,))):
        sizes = b"".join(size.to_bytes(4, "big") for size in shape)
        content = drawn.integers(0, 10, shape, np.uint8).tobytes()
        (folder / name).write_bytes(bytes((0, 0, 8, len(shape))) + sizes + content)


def copy_energon(folder: Path) -> None:
    shutil.copytree(RECORDED / "energon", folder)


def written(to: str, records: Callable[[], Iterator[dict[str, Any]]]) -> Callable[[Path], None]:
    return lambda path: WRITERS[to](records(), path)


DATA: Mapping[str, tuple[str, Callable[[Path], None]]] = {
    "texts": ("folder", written("text", texts)),
    "lines": ("lines.jsonl", written("jsonl", texts)),
    "lines-gz": ("lines.jsonl.gz", write_gzip),
    "chats": ("chats.jsonl", written("jsonl", chats)),
    "npy": ("tokens.npy", write_npy),
    "raw": ("tokens.bin", write_raw),
    "token-shards": ("folder", written("tokens", documents)),
    "megatron": ("folder", written("megatron", documents)),
    "parquet": ("texts.parquet", written("parquet", texts)),
    "arrow": ("pictures.arrow", written("arrow", pictures)),
    "webdataset": ("folder", written("webdataset", pictures)),
    "mds": ("folder", written("mds", pictures)),
    "hdf5": ("numbers.h5", written("hdf5", numbers)),
    "lmdb": ("folder", written("lmdb", pictures)),
    "arrays": ("folder", written("arrays", numbers)),
    "images": ("folder", written("images", pictures)),
    "idx": ("folder", write_idx),
    "shards": ("folder", written("shards", pictures)),
    "text-shards": ("folder", written("shards", texts)),
    "energon": ("folder", copy_energon),
    "synthetic": ("", lambda path: None),
}
"""Name of the data -> name of the path, and what writes it there."""


@dataclass(frozen=True)
class Case:
    """What a [data] section says of them; `parts` of a blend as (name of the data, kind, weight)."""

    data: str
    kind: str
    wants: Wants = "tokens"
    keys: Mapping[str, Any] = field(default_factory=dict)
    parts: Sequence[tuple[str, str, Any]] = ()


PICTURES: Mapping[str, Any] = {"shape": [3, 4, 4]}
JITTER = {"shape": [3, 6, 5], "transform": f"{__name__}:jitter"}
NUMBERS = {"shape": [2, 3]}
PACKED = {"pack": True}
GROUPED = {"group_tokens": 40}
LATER = [[0, 0.5], [40, 0.1], [61, 0.7]]
CASES = {
    "text": Case("texts", "text", keys={"include": "*.txt"}),
    "jsonl": Case("lines", "jsonl"),
    "jsonl-gz": Case("lines-gz", "jsonl"),
    "chats": Case("chats", "jsonl"),
    "npy": Case("npy", "tokens"),
    "raw": Case("raw", "tokens"),
    "token-shards": Case("token-shards", "tokens"),
    "megatron": Case("megatron", "megatron"),
    "parquet": Case("parquet", "parquet"),
    "arrow": Case("arrow", "arrow", "images", PICTURES),
    "webdataset": Case("webdataset", "webdataset", "images", PICTURES),
    "mds": Case("mds", "mds", "images", PICTURES),
    "hdf5": Case("hdf5", "hdf5", "images", {**NUMBERS, "inputs": "x", "targets": "y"}),
    "lmdb": Case("lmdb", "lmdb", "images", PICTURES),
    "arrays": Case("arrays", "arrays", "images", NUMBERS),
    "images": Case("images", "images", "images", PICTURES),
    "idx": Case("idx", "idx", "images"),
    "shards": Case("shards", "shards", "images", PICTURES),
    "text-shards": Case("text-shards", "shards"),
    "energon": Case("energon", "energon", keys={"inputs": "txt", "seq_len": 4}),
    "synthetic": Case("synthetic", "synthetic", keys={"samples": 33}),
    "held-out": Case("npy", "tokens", keys={"validation_fraction": 0.2}),
    "in-order": Case("parquet", "parquet", keys={"shuffle": False}),
    "jitter": Case("images", "images", "images", JITTER),
    "jitter-held-out": Case("webdataset", "webdataset", "images", {**JITTER, "validation_fraction": 0.2}),
    "packed": Case("lines", "jsonl", keys=PACKED),
    "packed-chats": Case("chats", "jsonl", keys=PACKED),
    "packed-megatron": Case("megatron", "megatron", keys=PACKED),
    "grouped": Case("lines", "jsonl", keys=GROUPED),
    "grouped-megatron": Case("megatron", "megatron", keys=GROUPED),
    "blend": Case("", "jsonl", parts=[("lines", "", 0.5), ("npy", "tokens", LATER), ("parquet", "parquet", 0.25)]),
    "blend-in-order": Case(
        "", "tokens", keys={"shuffle": False}, parts=[("npy", "", 2), ("raw", "", LATER), ("megatron", "megatron", 1)]
    ),
    "blend-packed": Case(
        "",
        "jsonl",
        keys=PACKED,
        parts=[("lines", "", 3), ("megatron", "megatron", LATER), ("token-shards", "tokens", 1.5)],
    ),
    "blend-grouped": Case(
        "",
        "jsonl",
        keys=GROUPED,
        parts=[("lines", "", 3), ("megatron", "megatron", LATER), ("token-shards", "tokens", 1.5)],
    ),
    "blend-jitter": Case(
        "", "images", "images", JITTER, [("images", "", 1), ("webdataset", "webdataset", LATER), ("lmdb", "lmdb", 0.3)]
    ),
}


class Room:
    """A folder with data, each written when it is first asked for, and what an undisturbed run reads from them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._kept: dict[str, list[Row]] = {}

    def path_of(self, data: str) -> str:
        name, write = DATA[data]
        path = self.folder / data / name
        if not path.parent.exists():
            path.parent.mkdir()
            write(path)
        return str(path)

    def open(self, case: Case) -> tuple[DataSource, SampleOrder | BlendOrder]:
        """The data and their order, as each start of a run opens them."""
        keys = {
            "kind": case.kind,
            "seq_len": SEQ_LEN,
            "validation_fraction": 0.0,
            "cache": str(self.folder / "cache"),
            **case.keys,
        }
        if case.parts:
            keys["blend"] = [
                {"path": self.path_of(data), "weight": weight, **({"kind": kind} if kind else {})}
                for data, kind, weight in case.parts
            ]
        elif DATA[case.data][0]:
            keys["path"] = self.path_of(case.data)
        section = DataSection(**keys)
        known = {"vocab": 300} if case.wants == "tokens" else {"classes": 10}
        source = open_data(section, SEED, case.wants, **known).train
        values = RunFile.model_validate({"data": section.model_dump(), "train": {"seed": SEED}})
        return source, order_of(values, source)

    def undisturbed(self, name: str) -> list[Row]:
        """The samples at the first positions, read by one rank without workers and without a stop."""
        if name not in self._kept:
            source, order = self.open(CASES[name])
            steps = -(-int(len(source) * EPOCHS) // BATCH)
            loader = StepLoader(source, order, Share(BATCH))
            self._kept[name] = [row for batch in loader.batches(0, steps) for row in rows_of(batch)]
        return self._kept[name]


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Room:
    return Room(tmp_path_factory.mktemp("elastic"))


# --- runs


def name_tensors(data: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The tensors of a batch, also those of packed inputs."""
    for name, value in sorted(data.items()):
        yield from value._asdict().items() if isinstance(value, PackedInputs) else [(name, value)]


def rows_of(batch: Any) -> list[Row]:
    """The samples of a rank's batch that count."""
    if isinstance(batch.data, LengthGroups):
        groups = zip(batch.ids.tolist(), batch.data, strict=False)
        return [(number, tuple((str(each.shape), each.numpy().tobytes()) for each in pair)) for number, pair in groups]
    arrays = {name: tensor.numpy() for name, tensor in name_tensors(batch.data)}
    return [
        (number, tuple((name, array[row].tobytes()) for name, array in arrays.items()))
        for row, number in enumerate(batch.ids.tolist())
    ]


@dataclass(frozen=True)
class Leg:
    """From one start of a run to its end: so many steps on so many ranks, each with so many workers. `foresight`:
    whether data.skip names spans already that only later legs reach."""

    steps: int
    ranks: int
    workers: int = 0
    foresight: bool = True


Spans = Sequence[tuple[int, int]]


class Plan:
    """The positions that each step takes, found by counting them."""

    def __init__(self, positions: int, spans: Spans, ramp: BatchRamp) -> None:
        skipped = set(itertools.chain.from_iterable(range(*span) for span in spans))
        kept = [position for position in range(positions) if position not in skipped]
        self.steps, first = list[list[int]](), 0
        while first < len(kept) and first + (size := ramp.size_at(kept[first])) <= len(kept):
            self.steps.append(kept[first : first + size])
            first += size


def run(room: Room, case: Case, plan: Plan, spans: Spans, legs: Sequence[Leg], ramp: BatchRamp) -> list[list[Row]]:
    """The global batch of each step: each leg opens all anew and knows no more than the position that the one before it
    has reached."""
    position, done, batches = 0, 0, list[list[Row]]()
    for leg in legs:
        steps = plan.steps[done : done + leg.steps]
        if not steps:
            break
        source, order = room.open(case)
        end = steps[-1][-1] + 1
        known = Skips([span for span in spans if leg.foresight or span[0] < end])
        options = LoaderOptions(workers=leg.workers, prefetch=2)
        loaders = [StepLoader(source, order, Share(ramp, rank, leg.ranks), options) for rank in range(leg.ranks)]
        # Without an end, so that workers have read ahead when the run stops.
        streams = [loader.batches(position, skips=known) for loader in loaders]
        for step in steps:
            shares = [next(stream) for stream in streams]
            assert {share.position for share in shares} == {step[0]}
            assert len({share.next_position for share in shares}) == 1
            position = shares[0].next_position
            batches.append([row for share in shares for row in rows_of(share)])
        assert position == end
        for stream in streams:
            stream.close()  # type: ignore[attr-defined]
        done += len(steps)
    return batches


CONSTANT = BatchRamp.of(BATCH)


def check(room: Room, name: str, spans: Spans, legs: Sequence[Leg], ramp: BatchRamp = CONSTANT) -> None:
    """The batches of the legs are those of the undisturbed run, less what is skipped."""
    rows = room.undisturbed(name)
    plan = Plan(len(rows), spans, ramp)
    rest = Leg(len(plan.steps), 1)
    found = run(room, CASES[name], plan, spans, [*legs, rest], ramp)
    expected = [[rows[position] for position in step] for step in plan.steps]
    assert [[row[0] for row in step] for step in found] == [[row[0] for row in step] for step in expected]
    assert found == expected


@st.composite
def legs(draw: st.DrawFn) -> list[Leg]:
    leg = st.builds(Leg, st.integers(1, 9), st.sampled_from([1, 2, 3, 5, 8]), st.just(0), st.booleans())
    return draw(st.lists(leg, min_size=1, max_size=4))


@st.composite
def spans_to_skip(draw: st.DrawFn) -> list[tuple[int, int]]:
    """Up to three spans, in order and not touching."""
    bounds = sorted(draw(st.sets(st.integers(0, 70), max_size=6)))
    return list(zip(bounds[::2], bounds[1::2], strict=False))


RAMPS = st.sampled_from([BatchRamp.of(each) for each in (BATCH, [[0, 3], [17, 9]], [[0, 11], [8, 2], [30, 7]])])
"""How many samples the steps have: always as many, or by their positions."""


# --- what holds


@pytest.mark.parametrize("name", CASES)
def test_every_sample_comes_once_an_epoch(name: str, room: Room) -> None:
    rows = room.undisturbed(name)
    source, order = room.open(CASES[name])
    ids = np.array([number for number, _ in rows])
    sizes = order.sizes if isinstance(order, BlendOrder) else (len(source),)
    firsts = np.cumsum([0, *sizes])
    assert len(rows) >= 2 * len(source)
    for first, size in zip(firsts, sizes, strict=False):
        own = ids[(ids >= first) & (ids < first + size)] - first
        for epoch in range(len(own) // size):
            assert sorted(own[epoch * size : (epoch + 1) * size]) == list(range(size))
        rest = own[len(own) // size * size :]
        assert len(set(rest.tolist())) == len(rest)
    contents: dict[int, set[Any]] = {}
    for number, content in rows:
        contents.setdefault(number, set()).add(content)
    repeated = [found for number, found in contents.items() if np.count_nonzero(ids == number) > 1]
    assert repeated
    draws = "jitter" in name
    assert all((len(found) > 1) == draws for found in repeated), "epochs differ where a transform draws, and only there"


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=2)
@given(legs=legs(), spans=spans_to_skip(), ramp=RAMPS)
@example(
    legs=[Leg(1, 8), Leg(2, 5), Leg(1, 3, foresight=False), Leg(2, 2)],
    spans=[(5, 9), (20, 23)],
    ramp=BatchRamp.of([[0, 7], [22, 5]]),
)
def test_a_stop_changes_nothing(name: str, room: Room, legs: list[Leg], spans: Spans, ramp: BatchRamp) -> None:
    check(room, name, spans, legs, ramp)


AS_ANOTHER = {
    "jsonl-gz",
    "raw",
    "packed-megatron",
    "grouped-megatron",
    "blend-in-order",
    "text-shards",
    "in-order",
    "held-out",
    "synthetic",
}
"""Cases that a loader process reads with the code of another case."""


BY_PROCESSES = [name for name in CASES if name not in AS_ANOTHER]
ON_RANKS = ("images", "grouped", "blend-packed")
"""Those of them that loader processes of several ranks read, also before they go on with others."""


@pytest.mark.parametrize("name", picked(BY_PROCESSES, *ON_RANKS))
def test_loader_processes_change_nothing(name: str, room: Room, warm_starts: None) -> None:
    check(room, name, [(5, 9), (20, 23)], [Leg(2, 2, 1, foresight=False), Leg(1, 1, 3)])


@pytest.mark.parametrize("name", [name for name in BY_PROCESSES if name not in ON_RANKS])
def test_a_loader_process_changes_nothing(name: str, room: Room, warm_starts: None) -> None:
    """Of data that are drawn, two: what is drawn does not depend on which one reads."""
    check(room, name, [(5, 9), (20, 23)], [Leg(3, 1, 2 if "jitter" in name else 1, foresight=False)])


@pytest.mark.parametrize("batches", [(1, 5, 30), (16, 3, 8)])
def test_another_global_batch_goes_on_with_the_next_samples(batches: Sequence[int], room: Room) -> None:
    """The position counts samples, so even the size of the steps may change."""
    rows, position, found = room.undisturbed("blend"), 0, list[Row]()
    for number, batch in enumerate(batches):
        source, order = room.open(CASES["blend"])
        loaders = [StepLoader(source, order, Share(batch, rank, number + 1)) for rank in range(number + 1)]
        for shares in zip(*(loader.batches(position, 2) for loader in loaders), strict=True):
            found += [row for share in shares for row in rows_of(share)]
        position = shares[0].next_position
    assert found == rows[: 2 * sum(batches)]
