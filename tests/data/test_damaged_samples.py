"""Damaged samples are left out of their batch: whole ones keep their values, in the rank and in a loader process."""

from __future__ import annotations

import io
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from shardway.data.batch_tree import LengthGroups
from shardway.data.content import DataPath
from shardway.data.convert import WRITERS
from shardway.data.damage import DamageFound, LeftOut
from shardway.data.detect import open_records
from shardway.data.formats.base import BLOCK_BYTES, DamagedData
from shardway.data.formats.indexes import make_sums
from shardway.data.formats.shard_file import write_token_shard
from shardway.data.formats.shard_manifest import write_manifest
from shardway.data.loader import Batch, LoaderOptions, Share, StepLoader, validation_batches
from shardway.data.open import open_data
from shardway.data.order import SampleOrder
from shardway.data.sources.base import BlendPart, ConcatSource, DataSource, SourceFacts
from shardway.data.sources.decoded import DecodedSamples
from shardway.data.sources.grouped import GroupedDocuments
from shardway.data.sources.tokens import TokenWindows
from shardway.errors import JobError, UserError
from shardway.runfile.schema import DataSection

pytestmark = pytest.mark.usefixtures("warm_starts")

SKIPS = LoaderOptions(skip_damaged=True)
READERS = {
    "rank": SKIPS,
    "thread": replace(SKIPS, ahead=torch.device("cpu")),
    "process": replace(SKIPS, workers=1, prefetch=1),
}
COUNT, LENGTH, BATCH = 600, 4096, 8
FLIPPED = BLOCK_BYTES + BLOCK_BYTES // 2 + 1300
"""The byte that is flipped, in the second of three blocks, and in no header of a tar file."""


def pictures() -> Iterator[dict[str, Any]]:
    drawn = np.random.default_rng(1)
    for number in range(COUNT):
        stream = io.BytesIO()
        np.save(stream, drawn.integers(0, 256, (1, 64, 64), np.uint8))
        yield {"npy": stream.getvalue(), "cls": number % 5}


def write_pictures(to: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        WRITERS[to](pictures(), folder)
        if to != "shards":
            parts = open_records(DataPath("data.path", str(folder)), to).parts
            make_sums(parts.root, parts.files)

    return write


def write_tokens(folder: Path) -> None:
    """Documents of 3,000 tokens in one shard of three MiB."""
    folder.mkdir()
    rows = np.random.default_rng(2).integers(0, 1000, (500, 3000)).astype(np.uint16)
    facts = write_token_shard(folder / "00000.shard", [(row, None) for row in rows], "uint16")
    write_manifest(folder, "tokens", [facts], {"vocab": 1000})


KINDS: dict[str, tuple[str, Callable[[Path], None]]] = {
    "shards": ("shards", write_pictures("shards")),
    "webdataset": ("webdataset", write_pictures("webdataset")),
    "mds": ("mds", write_pictures("mds")),
    "tokens": ("tokens", write_tokens),
    "packed": ("tokens", write_tokens),
    "grouped": ("tokens", write_tokens),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """Whole data and the same with a flipped byte, by the name of the writer."""
    made: dict[str, tuple[Path, Path]] = {}

    def write(name: str) -> tuple[Path, Path]:
        kind, writer = KINDS[name]
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind)
            writer(folder / "whole")
            shutil.copytree(folder / "whole", folder / "damaged")
            (largest,) = sorted((folder / "damaged").iterdir(), key=lambda path: path.stat().st_size)[-1:]
            flip(largest, FLIPPED)
            made[kind] = folder / "whole", folder / "damaged"
        return made[kind]

    return write


def flip(path: Path, offset: int) -> None:
    """Change a byte as a disk does: the file keeps its times."""
    before = path.stat()
    with path.open("r+b") as stream:
        stream.seek(offset)
        byte = stream.read(1)[0]
        stream.seek(offset)
        stream.write(bytes([byte ^ 16]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def open_source(name: str, path: Path) -> DataSource:
    keys: dict[str, Any] = {"seq_len": LENGTH, "pack": name == "packed"}
    if name == "grouped":
        keys["group_tokens"] = 2 * LENGTH
    elif KINDS[name][0] != "tokens":
        keys = {"shape": [1, 64, 64], "inputs": "npy"}
    section = DataSection(kind=KINDS[name][0], path=str(path), validation_fraction=0.0, **keys)
    wants: Any = "images" if "shape" in keys else "tokens"
    return cast(DataSource, open_data(section, 0, wants, classes=5 if wants == "images" else None).train)


def in_block(source: Any) -> set[int]:
    """The samples that need the damaged block."""

    def touches(start: int, end: int) -> bool:
        return start < 2 * BLOCK_BYTES and end > BLOCK_BYTES

    if isinstance(source, DecodedSamples):
        extents = (source.records.extent(number) for number in range(len(source)))
        return {number for number, each in enumerate(extents) if touches(each.offset, each.offset + each.size)}
    if isinstance(source, TokenWindows):
        width = 2 * LENGTH
        return {number for number in range(len(source)) if touches(number * width, (number + 1) * width + 2)}
    bins = source.groups if isinstance(source, GroupedDocuments) else source.bins
    runs = zip(bins.starts.tolist(), bins.pairs.tolist(), strict=True)
    damaged = [touches(2 * start, 2 * (start + pairs + 1)) for start, pairs in runs]
    return {number for number in range(len(source)) if any(damaged[bins.firsts[number] : bins.firsts[number + 1]])}


def leaves(batch: Batch) -> list[dict[str, torch.Tensor]]:
    """What a batch has of each of its samples, by name."""
    if isinstance(batch.data, LengthGroups):
        return [{"inputs": inputs, "targets": targets} for inputs, targets in batch.data]
    inputs = batch.data["inputs"]
    packed = {"inputs": inputs[0], "positions": inputs[1]} if isinstance(inputs, tuple) else {"inputs": inputs}
    arrays = {**packed, "targets": batch.data["targets"]}
    return [{name: values[row] for name, values in arrays.items()} for row in range(len(arrays["targets"]))]


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", KINDS)
def test_whole_samples_of_a_batch_keep_their_values(
    name: str, reader: str, written: Callable[[str], tuple[Path, Path]]
) -> None:
    whole, damaged = (open_source(name, path) for path in written(name))
    order, expected = SampleOrder(len(whole), 3), in_block(whole)
    assert 0 < len(expected) < len(whole)
    plain = StepLoader(whole, order, Share(BATCH)).batches(0, len(whole) // BATCH)
    skipping = StepLoader(damaged, order, Share(BATCH), READERS[reader]).batches(0, len(whole) // BATCH)
    left_out: list[LeftOut] = []
    for one, other in zip(plain, skipping, strict=True):
        assert (one.ids.tolist(), one.position, one.next_position) == (
            other.ids.tolist(),
            other.position,
            other.next_position,
        )
        lost = {each.sample for each in other.left_out}
        for sample, values, found in zip(one.ids.tolist(), leaves(one), leaves(other), strict=True):
            if sample in lost:
                assert bool((found["targets"] == -100).all())
                assert bool(torch.isfinite(found["inputs"].double()).all())
            else:
                assert found.keys() == values.keys()
                assert all(torch.equal(found[key], values[key]) for key in values)
        left_out += other.left_out
    read = set(order.ids(np.arange(len(whole) // BATCH * BATCH)).tolist())
    assert {each.sample for each in left_out} == expected & read
    assert {each.offset for each in left_out} == {BLOCK_BYTES}, "each names the block"
    assert all(f"{each.file} is damaged at byte {BLOCK_BYTES}" in each.reason for each in left_out)
    assert {Path(each.file).parent for each in left_out} == {written(name)[1]}


def test_without_it_the_damage_is_an_error(written: Callable[[str], tuple[Path, Path]]) -> None:
    source = open_source("shards", written("shards")[1])
    order = SampleOrder(len(source), 0, shuffle=False)
    for options in (LoaderOptions(), replace(LoaderOptions(), workers=1, prefetch=1)):
        with pytest.raises(DamagedData, match=f"is damaged at byte {BLOCK_BYTES}"):
            list(StepLoader(source, order, Share(BATCH), options).batches(0, COUNT // BATCH))


def test_validation_leaves_them_out_too(written: Callable[[str], tuple[Path, Path]]) -> None:
    whole, damaged = (open_source("shards", path) for path in written("shards"))
    counted, left_out = 0, 0
    for batch in validation_batches(damaged, COUNT, Share(BATCH), SKIPS):
        counted += int((batch.data["targets"] != -100).sum())
        left_out += len(batch.left_out)
    assert left_out == len(in_block(whole))
    assert counted == COUNT - left_out


@pytest.mark.parametrize("name", ["shards", "tokens", "packed", "grouped"])
def test_a_batch_of_damaged_samples_has_no_target_that_counts(
    name: str, written: Callable[[str], tuple[Path, Path]]
) -> None:
    whole, damaged = (open_source(name, path) for path in written(name))
    expected = in_block(whole)
    first = next(number for number in sorted(expected) if number + 1 in expected)
    share, order = Share(2), SampleOrder(len(whole), 0, shuffle=False)
    (batch,) = StepLoader(damaged, order, share, SKIPS).batches(first, 1)
    (alike,) = StepLoader(whole, order, share).batches(first, 1)
    assert [each.sample for each in batch.left_out] == batch.ids.tolist() == [first, first + 1]
    for found, like in zip(leaves(batch), leaves(alike), strict=True):
        assert bool((found["targets"] == -100).all())
        assert found.keys() == like.keys()
        for key, values in found.items():
            assert values.dtype == like[key].dtype
            assert name == "grouped" or values.shape == like[key].shape


def test_a_rank_without_samples_reports_none(tmp_path: Path) -> None:
    """It reads sample 0 in their place."""
    write_pngs(tmp_path, broken={0})
    source = open_pngs(tmp_path)
    batches = StepLoader(source, SampleOrder(6, 0, shuffle=False), Share(2, rank=0, ranks=4), SKIPS).batches(2, 1)
    (batch,) = batches
    assert (batch.ids.tolist(), batch.left_out) == ([], ())
    assert batch.data["targets"].tolist() == [-100]


# --- images that do not decode, epochs, blends


def write_pngs(folder: Path, broken: set[int]) -> None:
    from PIL import Image

    for number in range(6):
        stream = io.BytesIO()
        Image.fromarray(np.random.default_rng(number).integers(0, 256, (4, 4, 3), np.uint8)).save(stream, "PNG")
        content = stream.getvalue()
        (folder / f"class{number % 2}").mkdir(exist_ok=True)
        kept = content[: len(content) // 2] if number in broken else content
        (folder / f"class{number % 2}" / f"{number}.png").write_bytes(kept)


def brighten(image: Any) -> torch.Tensor:
    """A transform that draws."""
    return torch.from_numpy(np.asarray(image, np.float32)).permute(2, 0, 1) * torch.rand(1)


def open_pngs(folder: Path, **keys: Any) -> DataSource:
    section = DataSection(kind="images", path=str(folder), shape=[3, 4, 4], validation_fraction=0.0, **keys)
    return cast(DataSource, open_data(section, 7, "images", classes=2).train)


@pytest.mark.parametrize("keys", [{}, {"transform": f"{__name__}:brighten"}], ids=["plain", "drawing"])
def test_an_image_that_does_not_decode(tmp_path: Path, keys: dict[str, str]) -> None:
    """Samples are read again one by one, and a transform draws as it does in the whole batch."""
    for name, broken in (("whole", set[int]()), ("broken", {0, 4})):
        (tmp_path / name).mkdir()
        write_pngs(tmp_path / name, broken)
    whole, damaged = (open_pngs(tmp_path / name, **keys) for name in ("whole", "broken"))
    order = SampleOrder(6, 1)
    plain = StepLoader(whole, order, Share(4)).batches(0, 3)
    skipping = StepLoader(damaged, order, Share(4), SKIPS).batches(0, 3)
    names = {sample for sample in range(6) if (Path(source_path(damaged, sample)).stem) in ("0", "4")}
    for one, other in zip(plain, skipping, strict=True):
        lost = np.isin(one.ids, list(names))
        assert {each.sample for each in other.left_out} == names & set(one.ids.tolist())
        assert torch.equal(one.data["inputs"][~lost], other.data["inputs"][~lost])
        assert torch.equal(one.data["targets"][~lost], other.data["targets"][~lost])
        assert (other.data["targets"][lost] == -100).all()
        for each in other.left_out:
            assert (each.file, each.offset) == (source_path(damaged, each.sample), 0)
            assert f"the image of record {each.sample} cannot be decoded" in each.reason


def source_path(source: Any, sample: int) -> str:
    return str(source.records.extent(sample).path)


def test_parts_of_a_blend(tmp_path: Path) -> None:
    parts = []
    for name, broken in (("a", {1}), ("b", {2, 5})):
        (tmp_path / name).mkdir()
        write_pngs(tmp_path / name, broken)
        parts.append(BlendPart(name, open_pngs(tmp_path / name), ((0, 1.0),)))
    source = ConcatSource(tuple(parts))
    (batch,) = StepLoader(source, source.order(0, shuffle=True), Share(12), SKIPS).batches(0, 1)
    named = {f"{Path(each.file).parts[-3]}/{Path(each.file).stem}" for each in batch.left_out}
    assert named == {"a/1", "b/2", "b/5"}
    assert (batch.data["targets"] == -100).sum() == 3


def test_files_that_go_or_shrink_in_the_middle_of_a_run(
    tmp_path: Path, written: Callable[[str], tuple[Path, Path]]
) -> None:
    """A file that is one sample is that sample's damage; a shard that is gone may be a file system that is away."""
    write_pngs(tmp_path, set())
    source = open_pngs(tmp_path)
    Path(source_path(source, 3)).unlink()
    (batch,) = StepLoader(source, SampleOrder(6, 0, shuffle=False), Share(6), SKIPS).batches(0, 1)
    assert [each.sample for each in batch.left_out] == [3]
    shutil.copytree(written("mds")[0], tmp_path / "mds", ignore=shutil.ignore_patterns(".shardway"))
    mds = cast(DecodedSamples, open_source("mds", tmp_path / "mds"))
    size = mds.records.extent(COUNT - 9).offset
    for number in (0, COUNT - 1):
        mds.batch(np.array([number]))  # the list of offsets is kept
    with mds.records.parts.path(0).open("r+b") as stream:
        stream.truncate(size)
    order = SampleOrder(COUNT, 0, shuffle=False)
    (last,) = StepLoader(mds, order, Share(12), SKIPS).batches(COUNT - 12, 1)
    assert [each.sample for each in last.left_out] == list(range(COUNT - 9, COUNT))
    for name, extra in (("mds", ()), ("mds", (".shardway",)), ("tokens", ())):
        folder = tmp_path / "-".join((name, "gone", *extra))
        shutil.copytree(written(name)[0], folder, ignore=shutil.ignore_patterns(*extra))
        source = pickle.loads(pickle.dumps(open_source(name, folder)))  # without open files
        for path in (each for suffix in ("mds", "shard") for each in folder.glob(f"*.{suffix}")):
            path.unlink()
        with pytest.raises(JobError, match="cannot be read") as caught:
            next(StepLoader(source, SampleOrder(len(source), 0), Share(4), SKIPS).batches(0, 1))
        assert not isinstance(caught.value, DamagedData)


# --- what is no damage of the data


class Failing:
    """A source of four samples that raises an error at sample 2."""

    tokens_per_sample = 1

    def __init__(self, error: Exception, dtype: type = np.int64) -> None:
        self.error, self.dtype = error, dtype
        self.facts = SourceFacts("made up", "", (1,))

    def __len__(self) -> int:
        return 4

    def batch(self, ids: Any) -> dict[str, Any]:
        if 2 in ids:
            raise self.error
        return {"inputs": ids[:, None].astype(np.float32), "targets": ids.astype(self.dtype)}


@pytest.mark.parametrize(
    "source",
    [
        Failing(UserError("holds the token 9")),
        Failing(JobError("cannot be read")),
        Failing(ValueError("of a transform")),
        Failing(DamagedData("a copy on this node", of_copy=True)),
        Failing(DamagedData("no target can be left out"), np.float32),
    ],
    ids=["user", "file system", "code", "copy", "targets"],
)
def test_other_errors_end_the_run(source: Failing) -> None:
    with pytest.raises(type(source.error)) as caught:
        next(StepLoader(source, SampleOrder(4, 0), Share(4), SKIPS).batches(0, 1))
    assert caught.value is source.error


def test_damage_that_is_gone_when_samples_are_read_alone() -> None:
    source = Failing(DamagedData("only in a batch"))
    gather, source.batch = source.batch, lambda ids: gather(ids if len(ids) > 1 else ids * 0)  # type: ignore[method-assign]
    (batch,) = StepLoader(source, SampleOrder(4, 0), Share(4), SKIPS).batches(0, 1)
    assert (batch.left_out, batch.data["targets"].tolist()) == ((), [0, 0, 0, 0])


def test_a_users_own_dataset_keeps_its_errors() -> None:
    class Rows(Dataset[Any]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, number: int) -> int:
            raise DamagedData("of the user's own reader")

    with pytest.raises(DamagedData, match="own reader"):
        next(StepLoader(Rows(), SampleOrder(4, 0), Share(4), SKIPS).batches(0, 1))


def test_each_place_and_each_sample_counts_once() -> None:
    found, other = DamageFound(), DamageFound()
    a, b, c = LeftOut(1, "f", 0, "f, block 0"), LeftOut(2, "f", 0, "f, block 0"), LeftOut(3, "g", 9, "g, block 9")
    assert found.add("train", [a, b]) == [a]
    assert found.add("train", [b, c]) == [c]
    assert found.add("validation", [b]) == []
    assert (found.samples, len(found.by_place)) == (4, 2)
    other.add("train", [replace(a, sample=5), c])
    found.join(other)
    assert (found.samples, len(found.by_place)) == (5, 2)
