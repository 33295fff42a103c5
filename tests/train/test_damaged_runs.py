"""Runs on data with damaged samples: they stop, or go on as a run in which these samples do not count."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from typer.testing import CliRunner

from pool import ranks
from runs import (
    COMMON,
    TINY,
    layout,
    lone_rank,
    pool_ranks,
    read_column,
    read_named,
    read_steps,
    signal_at,
    train_tiny,
    worst_difference,
)
from shardway.cli.main import app
from shardway.data.formats.base import DamagedData
from shardway.data.formats.shard_file import write_token_shard
from shardway.data.formats.shard_manifest import write_manifest
from shardway.data.sources.base import Arrays, Ids
from shardway.data.sources.decoded import DecodedSamples
from shardway.errors import UserError
from shardway.rundir.directory import RunDir
from shardway.watch.progress import summarise

COUNT = 32
BROKEN = ("03", "10", "17", "24")
BASE = (
    *(word for word in COMMON if not word.startswith(("data.kind", "data.samples"))),
    *("model.kind=mlp", "model.hidden=[16]", "model.classes=4"),
)
HELD = (
    *("data.kind=images", "data.shape=[1, 8, 8]", "data.validation_fraction=0.25", "data.record_ids=true"),
    *("train.steps=6", "train.validate_every=3", "optim.schedule=constant"),
)
SKIP = "guard.damaged_data=skip"


def draw_images(folder: Path, broken: tuple[str, ...]) -> Path:
    image_module = pytest.importorskip("PIL.Image")
    drawn = np.random.default_rng(3)
    for number in range(COUNT):
        stream = io.BytesIO()
        image_module.fromarray(drawn.integers(0, 256, (8, 8), np.uint8)).save(stream, "PNG")
        path = folder / f"class{number % 4}" / f"{number:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        content = stream.getvalue()
        path.write_bytes(content[:60] if path.stem in broken else content)
    return folder


@pytest.fixture
def images(tmp_path: Path) -> Path:
    return draw_images(tmp_path / "images", BROKEN)


def masked_run(folder: Path, images: Path, *words: str) -> None:
    """The same run on whole images, of which some do not count."""
    whole, batch = draw_images(folder / "whole", ()), DecodedSamples.batch

    def masked(self: DecodedSamples, ids: Ids) -> Arrays:
        arrays = batch(self, ids)
        stems = [self.records.extent(number).path.stem for number in ids.tolist()]
        arrays["targets"][np.isin(stems, BROKEN)] = -100
        return arrays

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DecodedSamples, "batch", masked)
        train_tiny(folder / "run", lone_rank(), *HELD, f"data.path={whole}", *words, base=BASE)


def validated(folder: Path) -> list[tuple[float, float]]:
    return [(event["loss"], event["accuracy"]) for event in read_named(folder, "validation")]


def of_ranks(folder: Path, name: str) -> list[dict[str, Any]]:
    run = RunDir(folder)
    return [event for rank in run.ranks_with_events() for event in run.all_events(rank, (name,))]


@ranks(2)
def test_the_curve_is_that_of_a_run_without_them(rank: int, tmp_path: Path, images: Path) -> None:
    words = (*HELD, f"data.path={images}", SKIP)
    if rank == 0:
        masked_run(tmp_path / "masked", images)
        train_tiny(tmp_path / "alone", lone_rank(), *words, base=BASE)
    dist.barrier()
    for name, split in (("copies", layout(2, 1)), ("shards", layout(1, 2))):
        train_tiny(tmp_path / name, pool_ranks(), *words, *split, "train.micro_batch=2", base=BASE)
    if rank:
        return
    expected = tmp_path / "masked/run"
    assert [event["loss"] for event in read_steps(tmp_path / "alone")] == read_column(expected)
    assert validated(tmp_path / "alone") == validated(expected)
    for name in ("copies", "shards"):
        for column in ("loss", "grad_norm"):
            assert worst_difference(read_column(tmp_path / name, column), read_column(expected, column)) < 1e-5
        pairs = zip(validated(tmp_path / name), validated(expected), strict=True)
        assert all(found == pytest.approx(like, rel=1e-5) for found, like in pairs)
    for name in ("alone", "copies", "shards"):
        check_events(tmp_path / name)


def check_events(folder: Path) -> None:
    """Each left out sample is written down with its step; each place is shown once a rank."""
    left_out = of_ranks(folder, "samples_left_out")
    seen: dict[int, set[int]] = {}
    for rank in RunDir(folder).ranks_with_events():
        for event in read_steps(folder, rank):
            seen.setdefault(event["step"], set()).update(event["ids"])
    trained = [event for event in left_out if event["of"] == "train"]
    assert {event["of"] for event in left_out} == {"train", "validation"}
    assert all(set(event["ids"]) <= seen[event["step"]] for event in trained)
    names = {Path(event["file"]).stem for event in left_out}
    assert names == set(BROKEN)
    assert all(event["reason"].startswith(f"{event['file']}, byte 0: the image of record ") for event in left_out)
    shown = [(event["rank"], event["file"]) for event in of_ranks(folder, "data_damaged")]
    assert sorted(shown) == sorted({(event["rank"], event["file"]) for event in left_out})
    (counted,) = read_named(folder, "damage_counted")
    assert counted["samples"] == len(BROKEN)
    assert counted["reason"].startswith("4 samples at 4 damaged places left out in this attempt: ")
    assert summarise(RunDir(folder)).damaged == "4 samples at 4 damaged places left out"


def test_status_and_report_say_so(tmp_path: Path, images: Path, quiet_threads: None) -> None:
    train_tiny(tmp_path / "run", lone_rank(), *HELD, f"data.path={images}", SKIP, base=BASE)
    runner = CliRunner()
    shown = runner.invoke(app, ["status", str(tmp_path / "run")]).output
    assert "  damaged     4 samples at 4 damaged places left out\n" in shown
    assert runner.invoke(app, ["report", str(tmp_path / "run")]).exit_code == 0
    page = (tmp_path / "run/report.html").read_text()
    assert "<h2>Damaged data</h2><p>4 samples at 4 damaged places left out</p>" in page


def test_a_run_that_goes_on_leaves_them_out_again(tmp_path: Path, images: Path, quiet_threads: None) -> None:
    words = (*HELD, f"data.path={images}", SKIP, "checkpoint.every=1 steps")
    train_tiny(tmp_path / "through", lone_rank(), *words, base=BASE)
    train_tiny(tmp_path / "cut", lone_rank(), *words, base=BASE, before_step=signal_at(4))
    assert len(read_steps(tmp_path / "cut")) == 4
    train_tiny(tmp_path / "cut", lone_rank(), *words, base=BASE)
    assert read_column(tmp_path / "cut") == read_column(tmp_path / "through")
    found = [
        [(each["step"], each["ids"]) for each in of_ranks(tmp_path / name, "samples_left_out")]
        for name in ("cut", "through")
    ]
    assert found[0] == found[1]


def test_by_default_the_run_ends(tmp_path: Path, images: Path, quiet_threads: None) -> None:
    with pytest.raises(DamagedData) as caught:
        train_tiny(tmp_path / "run", lone_rank(), *HELD, f"data.path={images}", base=BASE)
    assert caught.value.exit_code == 4
    lines = str(caught.value).splitlines()
    assert "cannot be decoded: " in lines[0]
    assert lines[1] == '  To do: copy the file again from where it came, or set guard.damaged_data = "skip".'


def test_too_many_end_it_and_are_listed(tmp_path: Path, images: Path, quiet_threads: None) -> None:
    words = (*HELD, f"data.path={images}", SKIP, "guard.max_damaged=2")
    with pytest.raises(UserError) as caught:  # after which no rank starts again by itself
        train_tiny(tmp_path / "run", lone_rank(), *words, base=BASE)
    first, *places, remedy = str(caught.value).splitlines()
    assert first == (
        "rank 0 has met 3 damaged samples, and leaves out at most guard.max_damaged = 2 (command line); the run ends "
        "here."
    )
    assert len(places) == 3
    assert all(place.endswith(" (1 sample)") for place in places)
    assert remedy.startswith(f"  To do: `shardway data verify {images}` lists all that is damaged.")
    ids = [sample for each in of_ranks(tmp_path / "run", "samples_left_out") for sample in each["ids"]]
    assert len(set(ids)) == 3, "those that were met are written down"


# --- tokens of prepare: a block with another checksum, in the rank, from a stage


def damage(shard: Path) -> None:
    """Change a byte of the second block."""
    with shard.open("r+b") as stream:
        stream.seek(2**20 + 100)
        stream.write(b"\xff")


def write_tokens(tmp_path: Path, *, damaged: bool) -> Path:
    """A shard of tokens of two blocks, of which the second may be damaged."""
    folder = tmp_path / ("tokens-damaged" if damaged else "tokens")
    folder.mkdir()
    rows = np.random.default_rng(0).integers(0, 32, 2**19 + 8192).astype(np.uint16)
    facts = write_token_shard(folder / "00000.shard", [(rows, None)], "uint16")
    write_manifest(folder, "tokens", [facts], {"vocab": 32})
    if damaged:
        damage(folder / "00000.shard")
    return folder


LONG = tuple(word for word in TINY if not word.startswith(("data.kind", "data.samples", "data.seq_len", "model.vocab")))
WORDS = (
    *("data.kind=tokens", "data.seq_len=1024", "train.global_batch=4", "train.steps=2", "data.shuffle=false"),
    *("data.validation_fraction=0.0", "data.record_ids=true", "optim.warmup=0 steps"),
)
LAST = "data.skip=[[0, 508]]"
"""What is left are the samples 508 to 515; from 511 on they need the second block."""


def test_tokens_of_a_damaged_block_do_not_count(tmp_path: Path, quiet_threads: None) -> None:
    for name in ("whole", "damaged"):
        words = (
            *WORDS,
            f"data.path={write_tokens(tmp_path, damaged=name == 'damaged')}",
            LAST,
            SKIP,
            "checkpoint.every=2 steps",
        )
        train_tiny(tmp_path / f"run-{name}", lone_rank(), *words, base=LONG)
    (one, nothing), whole = read_steps(tmp_path / "run-damaged"), read_steps(tmp_path / "run-whole")
    found = [
        (each["step"], each["ids"], each["offset"]) for each in of_ranks(tmp_path / "run-damaged", "samples_left_out")
    ]
    assert found == [(1, [511], 2**20), (2, [512, 513, 514, 515], 2**20)]
    assert len(of_ranks(tmp_path / "run-damaged", "data_damaged")) == 1, "one place"
    assert of_ranks(tmp_path / "run-whole", "samples_left_out") == []
    assert one["ids"] == whole[0]["ids"]
    assert one["loss"] != whole[0]["loss"]
    assert nothing["loss"] is None, "no target of step 2 counts"
    manifest = RunDir(tmp_path / "run-damaged").checkpoint_path(2) / "manifest.json"
    assert json.loads(manifest.read_text())["numbers"]["targets"] == 3 * 1024


def test_damaged_data_are_read_where_they_lie(tmp_path: Path, quiet_threads: None) -> None:
    """They are not staged; but damage of a staged copy ends the run, since the data themselves are whole."""
    for name, damaged in (("damaged", True), ("whole", False)):
        words = (
            *WORDS,
            LAST,
            SKIP,
            f"data.path={write_tokens(tmp_path, damaged=damaged)}",
            f"data.stage={tmp_path / 'disk'}",
        )
        train_tiny(tmp_path / name, lone_rank(), *words, base=LONG)
    (note,) = read_named(tmp_path / "damaged", "not_staged")
    assert note["reason"].startswith("the data are read where they lie: ")
    assert "00000.shard is damaged at byte 1048576" in note["reason"]
    assert {each["offset"] for each in of_ranks(tmp_path / "damaged", "samples_left_out")} == {2**20}
    assert of_ranks(tmp_path / "whole", "samples_left_out") == []
    (copy,) = [path for path in (tmp_path / "disk").rglob("*.shard") if path.is_file()]
    damage(copy)
    with pytest.raises(DamagedData, match="removes it, and the next run copies it again"):
        train_tiny(tmp_path / "again", lone_rank(), *words, base=LONG)


@ranks(2)
def test_ranks_with_the_same_rows_write_them_down_once(rank: int, tmp_path: Path) -> None:
    words = (*WORDS, f"data.path={tmp_path / 'tokens-damaged'}", LAST, SKIP, "train.steps=1")
    if rank == 0:
        write_tokens(tmp_path, damaged=True)
        train_tiny(tmp_path / "alone", lone_rank(), *words, base=LONG)
    dist.barrier()
    train_tiny(tmp_path / "split", pool_ranks(), *words, *layout(1, 1), "parallel.tp=2", base=LONG)
    if rank == 0:
        assert worst_difference(read_column(tmp_path / "split"), read_column(tmp_path / "alone")) < 1e-5
        (event,) = of_ranks(tmp_path / "split", "samples_left_out")
        assert (event["rank"], event["ids"]) == (0, [511])
