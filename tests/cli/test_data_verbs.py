"""`shardway data` on every format and with every mistake: facts on stdout, one message on stderr, the exit code."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
from command_line import TINY, Ended, Shardway, write_text

from shardway.data import convert
from shardway.data import open as open_module
from shardway.data.convert import WRITERS, convert_records
from shardway.data.detect import check_is_text, open_records, place_of
from shardway.errors import UserError

PNG = (
    "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de0000000c49444154789c63606060000000040001f61738"
    "550000000049454e44ae426082"
)
"""An image of one pixel."""

FORMATS = (
    *("jsonl", "parquet", "arrow", "webdataset", "mds", "lmdb", "hdf5", "arrays", "megatron", "tokens", "shards"),
    *("images", "text", "idx", "npy"),
)
KINDS = {"npy": "tokens"}


@pytest.fixture
def make(tmp_path: Path) -> Callable[[str], str]:
    """The name of a small data set of a format in the current folder, of four samples (one of npy)."""

    def write(to: str) -> str:
        if (tmp_path / to).exists():
            return to
        if to == "idx":
            (tmp_path / to).mkdir()
            (tmp_path / to / "train-images-idx3-ubyte").write_bytes(struct.pack(">4I", 2051, 4, 2, 2) + bytes(16))
            (tmp_path / to / "train-labels-idx1-ubyte").write_bytes(struct.pack(">2I", 2049, 4) + bytes(4))
        elif to == "arrays":
            (tmp_path / to).mkdir()
            np.save(tmp_path / to / "x.npy", np.zeros((4, 3), np.float32))
            np.save(tmp_path / to / "y.npy", np.arange(4))
        elif to == "npy":
            np.save(tmp_path / "npy.npy", np.arange(200, dtype=np.uint16) % 100)
            return "npy.npy"
        else:
            lines = tmp_path / "source.jsonl"
            text = "a b c d e f g h " * 4
            records = [{"text": f"{text}{number}", "tokens": list(range(30)), "label": 0} for number in range(4)]
            lines.write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
            fields = {"text": ["text"], "webdataset": ["text"], "lmdb": ["text"]}
            if to == "images":
                for number in range(4):
                    folder = tmp_path / to / f"class-{number % 2}"
                    folder.mkdir(parents=True, exist_ok=True)
                    (folder / f"{number}.png").write_bytes(bytes.fromhex(PNG))
            else:
                records = open_records(place_of(lines))  # type: ignore[assignment]
                convert_records(records, tmp_path / to, to, fields.get(to, ()), lambda done, total: None)  # type: ignore
        return to

    return write


def read_json(ended: Ended) -> Any:
    assert (ended.code, ended.err) == (0, ""), ended.err
    return json.loads(ended.out)


def refused(ended: Ended, *parts: str, code: int = 2) -> None:
    """It ended with one message of a few lines that says what is allowed or what to do, and printed nothing."""
    assert (ended.code, ended.out) == (code, ""), ended
    assert ended.err.startswith("shardway: ")
    assert len(ended.err.splitlines()) <= 5
    assert any(word in ended.err.lower() for word in ("allowed: ", "to do: ")), ended.err
    for part in parts:
        assert part in ended.err


# --- every verb on every format


@pytest.mark.parametrize("to", FORMATS)
def test_the_verbs_that_read(shardway: Shardway, make: Callable[[str], str], to: str) -> None:
    path = make(to)
    facts = read_json(shardway("data", "info", path, "--json"))
    samples = 1 if to == "npy" else 4
    assert {"kind", "samples", "files", "bytes", "fingerprint", "fields", "checksums"} <= facts.keys()
    assert (facts["kind"], facts["samples"]) == (KINDS.get(to, to), samples)
    assert facts["fingerprint"] in shardway("data", "info", path).out
    lines = shardway("data", "head", path, "-n", "3", "--json").out.splitlines()
    assert [json.loads(line)["sample"] for line in lines] == list(range(min(3, samples)))
    shown = shardway("data", "head", path, "-n", "1").out.splitlines()
    assert shown[0].startswith("0  ")
    assert len(shown) == 1 + len(facts["fields"])
    found = read_json(shardway("data", "stats", path, "--json"))
    assert (found["samples"], found["looked_at"]) == (samples, samples)
    assert f"samples: {samples}\n" in shardway("data", "stats", path).out
    assert shardway("data", "index", path).out.startswith("indexed: ")
    assert shardway("data", "verify", path).out.startswith("whole: ")
    assert read_json(shardway("data", "index", path, "--checksum", "--json"))["samples"] == samples
    verified = read_json(shardway("data", "verify", path, "--json"))
    assert (verified["whole"], verified["damage"]) == (True, [])
    assert "MiB" in verified["checked"]


@pytest.mark.parametrize("to", FORMATS)
def test_bench_names_a_layer(shardway: Shardway, make: Callable[[str], str], to: str) -> None:
    words = ("data", "bench", make(to), "--seconds", "0.02", "--set", "seq_len=8", "--set", "shape=[3,4,4]")
    ended = shardway(*words, "--json")
    assert ended.code == 0, ended.err
    found = json.loads(ended.out)
    measured = {name: rate["per_s"] for name, rate in found["layers"].items() if rate["per_s"]}
    assert found["limits"] == min(measured, key=measured.__getitem__)
    assert "disk" not in measured  # all of it is in memory
    assert measured.keys() >= {"read", "copy"}
    assert {"disk", "read", "copy"} <= found["layers"].keys()
    assert found["whole"]["per_s"] > 0


def test_stage_copies_once(shardway: Shardway, make: Callable[[str], str]) -> None:
    path = make("webdataset")
    first = shardway("data", "stage", path, "--to", "disk", "--json")
    facts = json.loads(first.out)
    assert facts["copied_bytes"] > 0
    assert read_json(shardway("data", "info", facts["root"], "--json"))["samples"] == 4
    assert read_json(shardway("data", "stage", path, "--to", "disk", "--json"))["copied_bytes"] == 0
    refused(shardway("data", "stage", path, "--to", f"{path}/disk"), "--to: ", "lies within the data")
    refused(shardway("data", "stage", path, "--to", "/proc/x"), "--to: ", code=3)


def test_values_in_words_and_as_json(shardway: Shardway, tmp_path: Path) -> None:
    record = {"a": "x\ny", "b": float("nan"), "c": [1, None], "d": "é" * 200}
    (tmp_path / "a.jsonl").write_text(json.dumps(record), encoding="utf-8")
    assert shardway("data", "head", "a.jsonl").out.splitlines() == [
        "0  a.jsonl, byte 0",
        r"    a: x\ny",
        "    b: nan",
        "    c: [1, null]",
        f"    d: {'é' * 120}... (200 characters)",
    ]
    found = json.loads(shardway("data", "head", "a.jsonl", "--json").out)
    assert found == {"sample": 0, "at": "a.jsonl, byte 0", **record, "b": "nan"}


def test_bytes_are_shown_as_text_where_they_are(shardway: Shardway, make: Callable[[str], str]) -> None:
    assert "    image: 69 bytes, 89 50 4e 47" in shardway("data", "head", make("images"), "-n", "1").out
    assert " bytes, 'a b c d e f g h " in shardway("data", "head", make("webdataset"), "-n", "1").out


# --- paths


@pytest.mark.parametrize(
    ("path", "what"),
    [
        ("nowhere", 'PATH: "nowhere" does not exist'),
        ("", 'PATH: "" is empty'),
        ("empty", 'PATH: "empty" is a folder without files'),
        ("odd", "is of no format that Shardway reads"),
        ("odd/a.xyz", "is of no format that Shardway reads"),
        ("webdataset/{000000..000002}.tar", "names files that are missing: 000001.tar, 000002.tar"),
        ("webdataset/{000000..00", "does not exist"),
        ("nowhere/*.tar", "does not exist"),
    ],
)
def test_a_wrong_path_is_named(
    shardway: Shardway, make: Callable[[str], str], tmp_path: Path, path: str, what: str
) -> None:
    make("webdataset")
    (tmp_path / "empty").mkdir()
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "a.xyz").write_bytes(b"\0\1")
    for verb in (("info",), ("head",), ("stats",), ("index",), ("verify",), ("bench",), ("stage", "--to", "disk")):
        refused(shardway("data", verb[0], path, *verb[1:]), what)
    refused(shardway("data", "prepare", path, "out"), what)
    refused(shardway("data", "convert", path, "out", "--to", "mds"), what)
    assert not (tmp_path / "out").exists()


def test_patterns_with_braces(shardway: Shardway, make: Callable[[str], str]) -> None:
    make("webdataset")
    for pattern in ("webdataset/{000000..000000}.tar", "webdataset/*.tar", "webdataset/00000[0-9].tar"):
        assert read_json(shardway("data", "info", pattern, "--json"))["samples"] == 4


@pytest.mark.parametrize("kind", sorted({*WRITERS, "idx", "energon"} - {"jsonl", "text"}))
def test_a_wrong_kind_is_refused(shardway: Shardway, make: Callable[[str], str], kind: str) -> None:
    make("jsonl")
    ended = shardway("data", "info", "source.jsonl", "--kind", kind)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith('shardway: 1 problem in the data\n  PATH: "source.jsonl" ')


@pytest.mark.parametrize("name", ["x.parquet", "parquet", "parquet.txt", "x.jsonl", "tokens.bin", "x.npy", "utf-16.md"])
def test_a_file_of_another_kind_is_not_trained_on_as_text(
    name: str, shardway: Shardway, make: Callable[[str], str], tmp_path: Path
) -> None:
    if "parquet" in name:
        next((tmp_path / make("parquet")).glob("*.parquet")).rename(tmp_path / "found")
        shutil.rmtree(tmp_path / "parquet")
        (tmp_path / "found").rename(tmp_path / name)
    elif name == "x.jsonl":
        make("jsonl")
        (tmp_path / "source.jsonl").rename(tmp_path / name)
    elif name == "utf-16.md":
        (tmp_path / name).write_text("To be, or not to be. " * 99, encoding="utf-16")
    else:
        np.save(tmp_path / "x.npy", np.arange(200, dtype=np.uint16))
        np.arange(200, dtype=np.uint16).tofile(tmp_path / "tokens.bin")
    kind = {"x.jsonl": "jsonl", "tokens.bin": "tokens", "x.npy": "tokens", "utf-16.md": "text"}.get(name, "parquet")
    words = [word for word in TINY if not word.startswith("data.path")]
    of_a_blend = f'data.blend=[{{path="{name}",weight=1}}]'
    for key, part in ((f"data.path={name}", "data.path"), (of_a_blend, "data.blend[0]")):
        ended = shardway("train", *words, key, "--dir", "run")
        what = "is text in UTF-16" if name == "utf-16.md" else f'is of the kind "{kind}" by its name or its first bytes'
        refused(ended, part, f'"{name}" {what}', f'kind = "{kind}"')
    assert not (tmp_path / "run").exists()
    assert shardway("train", *TINY, f"data.path={name}", "data.kind=text", "--dir", "run").code == 0


@pytest.mark.parametrize("name", ["x.csv", "x", "x.log", "x.json", "x.yaml", "X.TXT"])
def test_text_of_any_name_is_text(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text('{"a": 1}\n' * 9)
    check_is_text(place_of(tmp_path / name))


@pytest.mark.parametrize(
    ("kind", "head"), [("parquet", b"PAR1"), ("arrow", b"ARROW1\0\0"), ("hdf5", b"\x89HDF\r\n\x1a\n")]
)
def test_a_file_that_is_called_text_is_known_by_its_first_bytes(kind: str, head: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_bytes(head + bytes(9))
    with pytest.raises(UserError, match=f'is of the kind "{kind}" by its name or its first bytes'):
        check_is_text(place_of(tmp_path / "x.txt"))


def test_documents_that_are_damaged_are_not_skipped(shardway: Shardway, tmp_path: Path) -> None:
    line = '{"text": "To be, or not to be, that is the question."}\n'
    (tmp_path / "text.jsonl").write_text(f'{line * 3}{{"text": "unfinished\n{line * 3}')
    words = ("data.path=text.jsonl", "data.kind=jsonl", "guard.damaged_data=skip")
    ended = shardway("train", *TINY, *words)
    assert (ended.code, ended.out) == (4, "")
    what, why, remedy = ended.err.splitlines()
    assert what.startswith("shardway: text.jsonl is damaged at byte ")
    assert 'tokenised before the first step, where guard.damaged_data = "skip" has no effect' in why
    assert remedy.startswith("  To do: correct line 4, or remove it, or copy the file again")


def test_a_kind_that_does_not_exist(shardway: Shardway, make: Callable[[str], str]) -> None:
    refused(shardway("data", "info", make("jsonl"), "--kind", "csv"), '--kind: "csv" is no kind of data', "parquet")
    refused(shardway("data", "info", make("jsonl"), "--kind", "synthetic"), "has no records to look at")


def test_what_may_not_be_read_is_said(
    shardway: Shardway, make: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for a user without permission, whom a test as root is not."""
    make("images")
    scan = os.scandir

    def refuse(path: Any = ".") -> Any:
        if "images" in str(path):
            raise PermissionError(13, os.strerror(13), str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    monkeypatch.setattr("os.listdir", lambda path=".": refuse(path))
    ended = shardway("data", "info", "images", "--kind", "images")
    refused(ended, 'PATH: "images" cannot be read: Permission denied', "ask its owner for permission")


# --- values of options


def test_head_beyond_the_end(shardway: Shardway, make: Callable[[str], str]) -> None:
    path = make("jsonl")
    refused(shardway("data", "head", path, "--from", "4"), "--from: 4 is beyond the last of 4 samples", "0 to 3")
    assert len(shardway("data", "head", path, "--from", "3", "-n", "9", "--json").out.splitlines()) == 1


def test_fields_and_lengths_of_stats(shardway: Shardway, make: Callable[[str], str]) -> None:
    refused(
        shardway("data", "stats", make("jsonl"), "--field", "no"), '--field: "no" is no field', "text, tokens, label"
    )
    refused(shardway("data", "stats", make("text"), "--seq-len", "8"), "--seq-len is for tokens")
    found = read_json(shardway("data", "stats", make("tokens"), "--seq-len", "29", "--json"))
    assert (found["unit"], found["length"]["total"], found["duplicates"]) == ("tokens", 120, 3)
    assert found["fill"] == {"seq_len": 29, "padded": 1.0, "packed": 1.0}
    found = read_json(shardway("data", "stats", make("tokens"), "--seq-len", "29", "--group-tokens", "60", "--json"))
    assert found["fill"]["grouped"] == 1.0
    refused(shardway("data", "stats", make("tokens"), "--group-tokens", "60"), "--group-tokens: 60 needs --seq-len")
    assert read_json(shardway("data", "stats", make("jsonl"), "--samples", "2", "--json"))["looked_at"] == 2


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("--pack",), "--pack needs the length of a sequence"),
        (("--seq-len", "8"), "--seq-len is for tokens"),
        (("--tokenizer", "no.json"), '--tokenizer: "no.json" does not exist'),
        (("--tokenizer", "bytes", "--field", "no"), 'has no field "no"'),
        (("--tokenizer", "bytes", "--field", "text", "--chat-template", "no"), '--chat-template: "no" does not exist'),
        (("--shard-size", "lots"), '--shard-size: "lots" is not a size'),
        (("--kind", "csv"), "is no kind of data"),
    ],
)
def test_wrong_options_of_prepare(
    shardway: Shardway, make: Callable[[str], str], tmp_path: Path, words: tuple[str, ...], what: str
) -> None:
    refused(shardway("data", "prepare", make("jsonl"), "out", *words), what)
    assert not (tmp_path / "out").exists()


def test_wrong_options_of_convert_and_bench(shardway: Shardway, make: Callable[[str], str]) -> None:
    path = make("jsonl")
    refused(shardway("data", "convert", path, "out", "--to", "csv"), '--to: "csv" cannot be written', "squashfs")
    refused(shardway("data", "convert", path, "out", "--to", "mds", "--field", "no"), '--field: "no" is no field')
    refused(shardway("data", "convert", path, "out", "--to", "images"), "record 0 has no image")
    refused(shardway("data", "bench", path, "--set", "nokey=3"), "data.nokey", "there is no key of this name")


# --- what is written


@pytest.mark.parametrize("verb", [("prepare",), ("convert", "--to", "mds"), ("convert", "--to", "squashfs")])
def test_nothing_is_written_into_what_is_read(
    shardway: Shardway, make: Callable[[str], str], tmp_path: Path, verb: tuple[str, ...]
) -> None:
    make("webdataset")
    before = sorted(os.listdir(tmp_path / "webdataset"))
    for out in ("webdataset", "webdataset/out", "webdataset/../webdataset/deep/out"):
        refused(shardway("data", verb[0], "webdataset", out, *verb[1:]), "OUT: ", "lies within the data that are read")
    assert sorted(os.listdir(tmp_path / "webdataset")) == before


def test_what_is_there_stays(shardway: Shardway, make: Callable[[str], str], tmp_path: Path) -> None:
    source, other = make("jsonl"), make("mds")
    before = (tmp_path / other / "index.json").read_bytes()
    refused(shardway("data", "convert", source, other, "--to", "mds"), f'OUT: "{other}" is there already')
    refused(shardway("data", "prepare", source, other), f'OUT: "{other}" holds other files')
    refused(shardway("data", "prepare", source, "source.jsonl"), 'OUT: "source.jsonl" is not a folder')
    refused(shardway("data", "convert", source, "source.jsonl/out", "--to", "mds"), "cannot be written")
    assert (tmp_path / other / "index.json").read_bytes() == before


def test_prepare_says_what_it_wrote(shardway: Shardway, make: Callable[[str], str]) -> None:
    words = (
        "data",
        "prepare",
        make("jsonl"),
        "out",
        "--tokenizer",
        "bytes",
        "--field",
        "text",
        "--seq-len",
        "16",
        "--pack",
    )
    planned = read_json(shardway(*words, "--dry-run", "--json"))
    assert (planned["kind"], planned["samples"]) == ("tokens", 4)
    assert shardway(*words, "--dry-run").out.startswith("out: 4 samples as tokens, about ")
    made = read_json(shardway(*words, "--json"))
    assert (made["out"], made["kind"], made["samples"]) == ("out", "tokens", 4)
    assert shardway(*words).out.startswith("out: 4 samples, ")  # it is there already
    refused(shardway("data", "prepare", make("jsonl"), "out", "--tokenizer", "bytes"), "holds other prepared data")


def test_an_interrupt_leaves_nothing(
    shardway: Shardway, make: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(records: Any, out: Path) -> None:
        out.mkdir()
        next(records)
        raise KeyboardInterrupt

    monkeypatch.setitem(convert.WRITERS, "mds", interrupt)
    make("jsonl")
    before = sorted(os.listdir(tmp_path))
    ended = shardway("data", "convert", "jsonl", "out", "--to", "mds")
    assert (ended.code, ended.out) == (130, "")
    assert sorted(os.listdir(tmp_path)) == before


# --- damage


def test_damage_is_named_and_mended(shardway: Shardway, make: Callable[[str], str], tmp_path: Path) -> None:
    make("shards")
    assert shardway("data", "convert", "shards", "copy", "--to", "shards").code == 0
    shard = tmp_path / "shards" / "00000.shard"
    content = bytearray(shard.read_bytes())
    content[10] ^= 1
    shard.write_bytes(content)
    ended = shardway("data", "verify", "shards")
    assert (ended.code, ended.err) == (4, "")
    assert "shards/00000.shard" in ended.out
    as_json = shardway("data", "verify", "shards", "--json")
    assert as_json.code == 4
    assert json.loads(as_json.out)["whole"] is False
    assert shardway("data", "repair", "shards").code == 4
    assert "blocks were copied" in shardway("data", "repair", "shards", "--from", "copy").out
    assert shardway("data", "verify", "shards").code == 0
    assert read_json(shardway("data", "repair", "shards", "--json")) == {"mended": [], "left": []}
    assert shardway("data", "repair", "shards").out == "whole: there is nothing to mend\n"


def test_only_shards_can_be_mended(shardway: Shardway, make: Callable[[str], str]) -> None:
    make("shards")
    refused(shardway("data", "repair", "nowhere"), 'PATH: "nowhere" does not exist')
    refused(shardway("data", "repair", make("webdataset")), 'PATH: "webdataset" holds no shards')
    refused(shardway("data", "repair", "shards", "--from", "nowhere"), '--from: "nowhere" does not exist')
    refused(shardway("data", "repair", "shards", "--from", "webdataset"), '--from: "webdataset" holds no shards')


def test_flipped_bits_of_any_format_are_found_after_index(
    shardway: Shardway, make: Callable[[str], str], tmp_path: Path
) -> None:
    (file,) = (tmp_path / make("text")).glob("*0.txt")
    assert shardway("data", "index", "text", "--checksum").code == 0
    file.write_bytes(file.read_bytes().replace(b"a b", b"a c"))
    ended = shardway("data", "verify", "text")
    assert ended.code == 4
    assert f"text/{file.name} is damaged at byte 0" in ended.out


# --- the samples of a run


@pytest.mark.parametrize("draws", [False, True])
def test_a_run_opens_its_data_once(
    draws: bool, shardway: Shardway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But once more where that may draw random numbers, which are seeded in between."""
    write_text(tmp_path)
    opened = MagicMock(wraps=open_module.open_described)
    monkeypatch.setattr(open_module, "open_described", opened)
    monkeypatch.setattr(open_module, "may_draw", lambda section: draws)
    assert shardway("train", *TINY, "--dir", "runs/a").code == 0
    assert opened.call_count == 1 + draws


def test_steps_and_samples_of_a_run(shardway: Shardway, tmp_path: Path) -> None:
    write_text(tmp_path)
    assert shardway("train", *TINY, "--dir", "runs/a").code == 0
    found = read_json(shardway("data", "at", "2", "runs/a", "--json"))
    assert found.keys() == {"step", "ids", "sources", "taken"}
    assert (found["step"], len(found["ids"]), len(found["sources"]), found["taken"]) == (2, 2, 2, True)
    assert shardway("data", "at", "2", "runs/a").out.splitlines()[0] == "step 2: 2 samples"
    assert shardway("data", "at", "9", "runs/a").out.startswith("step 9 (not taken yet): 2 samples\n")
    sample = str(found["ids"][0])
    told = read_json(shardway("data", "where", sample, "runs/a", "--json"))
    assert (told["sample"], told["steps"]) == (found["ids"][0], [2])
    assert found["ids"][0] in read_json(shardway("data", "at", str(told["next"]), "runs/a", "--json"))["ids"]
    assert "  taken in step 2\n  comes next in step " in shardway("data", "where", sample, "runs/a").out
    refused(shardway("data", "where", "99999", "runs/a"), "there is no sample 99999")


def test_a_run_has_a_name(shardway: Shardway, tmp_path: Path) -> None:
    from shardway.launch.runs.find import Known, remember

    write_text(tmp_path)
    assert shardway("train", *TINY, "--dir", "elsewhere/mine").code == 0
    remember(Known(str(tmp_path / "elsewhere" / "mine")))
    assert read_json(shardway("data", "at", "1", "mine", "--json"))["step"] == 1
    refused(shardway("data", "at", "1", "nowhere"), "there is no run nowhere")
    refused(shardway("data", "where", "1", "login:/scratch/run"), "is on another host")
    assert shardway("data", "at", "0", "mine").code == 2


# --- pipes


def test_a_pipe_that_closes_early_is_no_error(tmp_path: Path) -> None:
    lines = "\n".join(json.dumps({"text": "x" * 1000, "n": number}) for number in range(3000))
    (tmp_path / "a.jsonl").write_text(lines, encoding="utf-8")
    command = f"{sys.executable} -m shardway data head a.jsonl -n 3000 --json | head -n 1; echo ${{PIPESTATUS[0]}}"
    ended = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert ended.stderr == ""
    first, code = ended.stdout.splitlines()
    assert (json.loads(first)["n"], code) == (0, "0")
