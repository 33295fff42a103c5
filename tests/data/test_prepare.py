from __future__ import annotations

import errno
import json
import logging
import os
import pickle
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardway.data import prepare, prepare_plan
from shardway.data.content import DataPath
from shardway.data.documents import DocumentField, choose_field, split_at_lines
from shardway.data.formats.base import DamagedData, DataFile, Extent, FileParts, Record, Records
from shardway.data.formats.jsonl import JsonlRecords
from shardway.data.formats.shard_manifest import ShardManifest, read_manifest
from shardway.data.formats.shards import ShardRecords, open_token_shards
from shardway.data.prepare import prepare_documents, run_prepare
from shardway.data.prepare_plan import PrepareOptions, PreparePlan, plan_prepare
from shardway.data.sources.base import DataRequest
from shardway.data.sources.tokens import open_documents
from shardway.data.splitting import RecordBytes
from shardway.errors import Bug, JobError, UserError
from shardway.runfile.schema import DataSection

WORDS = {"[UNK]": 0, "the": 1, "cat": 2, "sat": 3, "</s>": 4}
TURNS = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat"}]


@pytest.fixture
def words(tmp_path: Path) -> str:
    """A tokenizer.json that knows three words."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(WORDS, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.add_special_tokens(["</s>"])
    made.save(str(tmp_path / "tokenizer.json"))
    return str(tmp_path / "tokenizer.json")


class MadeUp(Records):
    """Records of one field that stand nowhere; a value may say what happens when it is read."""

    format = "madeup"

    def __init__(self, root: Path, values: Sequence[Any], name: str = "text") -> None:
        (root / "data").write_bytes(bytes(8 * len(values)))
        self.parts = FileParts(root, [DataFile("data", 8 * len(values), 0)])
        self.values, self.name = list(values), name

    @classmethod
    def is_at(cls, path: Path) -> bool:
        return False

    @classmethod
    def open(cls, place: DataPath) -> MadeUp:
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self.values)

    @property
    def fields(self) -> dict[str, str]:
        return {self.name: "any"}

    def extent(self, number: int) -> Extent:
        return Extent(self.parts.path(0), 8 * number, 8)

    def read(self, ids: Sequence[int], fields: Sequence[str] = ()) -> list[Record]:
        values = [self.values[number] for number in ids]
        if "kill" in map(str, values) and len(ids) > 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if "fail" in map(str, values) and len(ids) > 1:
            raise RuntimeError("the library of the format is broken")
        if "away" in map(str, values) and len(ids) > 1:
            raise OSError(errno.ESTALE, "Stale file handle")
        return [{self.name: value} for value in values]


def lines(path: Path, records: Sequence[Any]) -> tuple[JsonlRecords, DataPath]:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    place = DataPath("data.path", str(path))
    return JsonlRecords.open(place), place


def texts(path: Path, count: int) -> tuple[JsonlRecords, DataPath]:
    return lines(path, [{"text": "the cat sat " * (1 + number % 7)} for number in range(count)])


def prepared(
    source: tuple[Records, DataPath], out: Path, processes: int | None = 1, **options: Any
) -> tuple[PreparePlan, ShardManifest]:
    plan = plan_prepare(*source, out, PrepareOptions(**options))
    assert run_prepare(plan, lambda done, total: None, processes) == out
    return plan, read_manifest(DataPath("OUT", str(out)))


def documents(out: Path) -> list[list[int]]:
    store = open_token_shards(DataPath("OUT", str(out)))
    ends = store.read_ends().tolist()
    tokens = store.rows(np.array([0]), len(store))[0].tolist()
    return [tokens[start:stop] for start, stop in zip([0, *ends], ends, strict=False)]


def refused(source: tuple[Records, DataPath], out: Path, processes: int = 1, **options: Any) -> str:
    with pytest.raises(UserError) as caught:
        prepared(source, out, processes, **options)
    return str(caught.value)


def contents(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in out.iterdir()}


# --- documents of text


def test_texts_become_documents_with_an_end(words: str, tmp_path: Path) -> None:
    source = lines(tmp_path / "a.jsonl", [{"text": "the cat"}, {"text": ""}, {"text": "sat é"}, {"text": None}])
    plan, manifest = prepared(source, tmp_path / "out", tokenizer=words)
    assert documents(tmp_path / "out") == [[1, 2, 4], [], [3, 0, 4], []]
    assert (plan.kind, plan.samples, plan.files) == ("tokens", 4, 2)
    assert (manifest.dtype, manifest.vocab, manifest.end, manifest.text_bytes) == ("uint8", 5, 4, 7 + 6)
    described = manifest.described
    assert (described["empty"], described["counted"], described["field"]) == (2, 6, "text")
    assert described["tokenizer"]["name"] == "tokenizer.json"
    assert len(described["tokenizer"]["xxh3"]) == 32
    assert described["source"]["samples"] == 4
    prepared(source, tmp_path / "bare", tokenizer=words, end=False, seq_len=8, pack=True)
    assert documents(tmp_path / "bare") == [[1, 2], [], [3, 0], []]
    bare = read_manifest(DataPath("OUT", str(tmp_path / "bare"))).described
    assert (bare["end"], bare["seq_len"], bare["pack"]) == (None, 8, True)


def test_bytes_are_a_tokenizer_without_a_file(tmp_path: Path) -> None:
    made = MadeUp(tmp_path, ["é", b"\xff\x00", None]), DataPath("data.path", "made")
    _, manifest = prepared(made, tmp_path / "out", tokenizer="bytes")
    assert documents(tmp_path / "out") == [[0xC3, 0xA9, 0], [255, 0, 0], []]
    assert (manifest.vocab, manifest.dtype, manifest.text_bytes) == (256, "uint8", 4)


def test_text_that_is_not_utf8_reaches_a_tokenizer_as_a_replacement(words: str, tmp_path: Path) -> None:
    made = MadeUp(tmp_path, ["the \ud800 cat", b"cat \xff"]), DataPath("data.path", "made")
    _, manifest = prepared(made, tmp_path / "out", tokenizer=words, end=False)
    assert documents(tmp_path / "out") == [[1, 0, 2], [2, 0]]
    assert manifest.text_bytes == len("the � cat".encode()) + len("cat �".encode())


def test_long_texts_are_encoded_in_pieces(words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardway.data.documents.PIECE_CHARACTERS", 10)
    monkeypatch.setattr("shardway.data.documents.CHARACTERS_AT_ONCE", 100)
    long, middle = "the cat\nsat the\n\n" * 50, "the cat\nsat\n" * 5
    assert "".join(split_at_lines(long)) == long
    source = lines(tmp_path / "a.jsonl", [{"text": text} for text in ("cat", long, middle, "sat")])
    prepared(source, tmp_path / "out", tokenizer=words)
    assert documents(tmp_path / "out") == [[2, 4], [*([1, 2, 3, 1] * 50), 4], [*([1, 2, 3] * 5), 4], [3, 4]]


# --- conversations and tokens


def test_of_conversations_the_turns_of_the_assistant_count(words: str, tmp_path: Path) -> None:
    source = lines(tmp_path / "a.jsonl", [{"id": 1, "messages": TURNS}, {"id": 2, "messages": TURNS[:1]}])
    (tmp_path / "t.jinja").write_text("{% for m in messages %}{{ m.content }} </s> {% endfor %}")
    _, manifest = prepared(source, tmp_path / "out", tokenizer=words, chat_template=str(tmp_path / "t.jinja"))
    assert documents(tmp_path / "out") == [[1, 2, 4, 3, 4], [1, 2, 4]]
    store = open_token_shards(DataPath("OUT", str(tmp_path / "out")))
    counted = store.count_rows(np.array([0]), len(store))
    assert counted is not None
    assert counted[0].tolist() == [False, False, False, True, True, False, False, False]
    assert manifest.described["counted"] == 2
    assert manifest.described["chat_template"]["name"] == "t.jinja"
    assert manifest.end is None
    assert manifest.text_bytes == len("sat </s>")


@pytest.mark.parametrize("processes", [1, 2])
def test_a_conversation_that_is_none_is_named(tmp_path: Path, processes: int) -> None:
    source = lines(tmp_path / "a.jsonl", [{"messages": TURNS}] * 40 + [{"messages": [{"role": "user"}]}])
    message = refused(source, tmp_path / "out", processes, tokenizer="bytes", shard_bytes=1000)
    where = tmp_path / "a.jsonl"
    offset = sum(len(line) for line in where.read_bytes().splitlines(keepends=True)[:40])
    assert message == (
        f'1 problem in the data\n  data.path: "{where}" cannot be prepared: record 40 ({where}, byte {offset}) '
        'has no "content" in message 1 (it has role)'
    )


def test_conversations_without_an_assistant_teach_nothing(tmp_path: Path) -> None:
    source = lines(tmp_path / "a.jsonl", [{"messages": TURNS[:1]}])
    message = refused(source, tmp_path / "out", tokenizer="bytes")
    assert 'has no turn of an assistant in the field "messages": nothing can be learned from it' in message


def test_tools_beside_a_conversation_are_refused(tmp_path: Path) -> None:
    source = lines(tmp_path / "a.jsonl", [{"messages": TURNS, "tools": []}, {"messages": TURNS, "tools": ["f"]}])
    assert "record 1 (" in (message := refused(source, tmp_path / "out", tokenizer="bytes"))
    assert "names tools, which are not supported" in message


def test_rows_of_tokens_are_taken_as_they_are(tmp_path: Path) -> None:
    source = lines(tmp_path / "a.jsonl", [{"input_ids": [5, 300, 0]}, {"input_ids": []}, {"input_ids": [7]}])
    _, manifest = prepared(source, tmp_path / "out", tokenizer="bytes")
    assert documents(tmp_path / "out") == [[5, 300, 0], [], [7]]
    assert (manifest.vocab, manifest.dtype, manifest.end, manifest.text_bytes) == (301, "uint16", None, None)


@pytest.mark.parametrize("processes", [1, 2])
def test_the_type_of_tokens_follows_the_largest_of_all(tmp_path: Path, processes: int) -> None:
    rows = [np.arange(9, dtype=np.int64)] * 4000
    rows[33] = np.array([300])  # between the records that a plan looks at
    rows[3001] = np.array([70_000])
    source = MadeUp(tmp_path, rows, "tokens"), DataPath("data.path", "made")
    plan, manifest = prepared(source, tmp_path / "out", processes, tokenizer="bytes", shard_bytes=9000)
    assert plan.maker is not None
    assert plan.maker.dtype == "uint8"
    assert len(plan.parts) > 2
    assert (manifest.vocab, manifest.dtype) == (70_001, "uint32")
    assert documents(tmp_path / "out")[3000:3003] == [list(range(9)), [70_000], list(range(9))]


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ([1, -2], "holds the token -2; allowed: 0 and above"),
        ([2**32], "holds the token 4294967296; allowed: 0 to 4294967295"),
        ([1.5], 'has float64 of shape [1] in the field "tokens" and not a row of integers'),
        ([[1]], 'has int64 of shape [1, 1] in the field "tokens" and not a row of integers'),
        (["a"], 'has str32 of shape [1] in the field "tokens" and not a row of integers'),
        (3, 'has int64 of shape [] in the field "tokens" and not a row of integers'),
        ([[1], [1, 2]], 'has rows of different lengths in the field "tokens" and not a row of integers'),
    ],
)
def test_what_is_no_row_of_tokens_is_refused(tmp_path: Path, row: Any, sentence: str) -> None:
    source = lines(tmp_path / "a.jsonl", [{"tokens": [1]}, {"tokens": row}])
    assert f"byte 16) {sentence}" in refused(source, tmp_path / "out", tokenizer="bytes")


def test_tokens_of_a_named_tokenizer_lie_in_its_vocabulary(words: str, tmp_path: Path) -> None:
    source = lines(tmp_path / "a.jsonl", [{"tokens": [1]}, {"tokens": [5]}])
    assert "record 1 (" in (message := refused(source, tmp_path / "out", tokenizer=words))
    assert "holds the token 5; allowed: 0 to 4, as the tokenizer has" in message


# --- which field


@pytest.mark.parametrize(
    ("record", "wanted", "expected"),
    [
        ({"id": 1, "content": "c", "text": "t"}, "auto", DocumentField("text", "text")),
        ({"text": "t", "messages": TURNS}, "auto", DocumentField("messages", "conversation")),
        ({"text": "t", "input_ids": [1]}, "auto", DocumentField("text", "text")),
        ({"text": 5, "input_ids": [1]}, "auto", DocumentField("input_ids", "tokens")),
        ({"sentence": "t", "label": 3}, "auto", DocumentField("sentence", "text")),
        ({"conversations": json.dumps(TURNS)}, "auto", DocumentField("conversations", "conversation")),
        ({"a": "t", "b": "u"}, "b", DocumentField("b", "text")),
        ({"a": {"b": {"c": "u"}}}, "a.b.c", DocumentField("a.b.c", "text")),
        ({"a": json.dumps({"messages": TURNS})}, "a.messages", DocumentField("a.messages", "conversation")),
        ({"a.b": "u"}, "a.b", DocumentField("a.b", "text")),
        ({"json": {"messages": TURNS}}, "json", DocumentField("json", "conversation")),
    ],
)
def test_the_field_is_found(tmp_path: Path, record: Record, wanted: str, expected: DocumentField) -> None:
    records, place = lines(tmp_path / "a.jsonl", [record, record])
    found = choose_field(records, wanted, place)
    assert found == expected
    assert found.pick(records.read([0])[0])
    assert pickle.loads(pickle.dumps(found)) == found


@pytest.mark.parametrize(
    ("record", "wanted", "sentence"),
    [
        ({"a": "t", "b": "u"}, "auto", "has no field of a usual name with text, tokens or messages; it has a, b"),
        ({"label": 1}, "auto", "has no field of a usual name with text, tokens or messages; it has label"),
        ({"text": "t"}, "txt", 'has no field "txt"\n      allowed: text'),
        ({"label": 1}, "label", 'has no documents in the field "label"\n      allowed: text, a list of tokens, or'),
        ({"x": [1.5]}, "x", 'has no documents in the field "x"'),
        ({"x": {"y": 1}}, "x.z", 'has no documents in the field "x.z"'),
    ],
)
def test_a_field_without_documents_is_refused(tmp_path: Path, record: Record, wanted: str, sentence: str) -> None:
    source = lines(tmp_path / "a.jsonl", [record])
    assert sentence in refused(source, tmp_path / "out", tokenizer="bytes", field=wanted)


@pytest.mark.parametrize(
    ("record", "sentence"),
    [
        ({"other": "x"}, 'has no field "text"'),
        ({"text": 5}, 'has a int in the field "text" and not a text'),
        ({"text": ["x"]}, 'has a list in the field "text" and not a text'),
    ],
)
def test_a_record_without_a_document_is_named(tmp_path: Path, record: Record, sentence: str) -> None:
    source = lines(tmp_path / "a.jsonl", [{"text": "a"}, record])
    assert f"record 1 ({tmp_path / 'a.jsonl'}, byte 14) {sentence}" in refused(
        source, tmp_path / "out", tokenizer="bytes"
    )


# --- records as they are


def test_records_are_kept_as_they_are(tmp_path: Path) -> None:
    rows = [{"id": number, "name": f"n{number}", "list": [1, {"a": None}]} for number in range(50)]
    source = lines(tmp_path / "a.jsonl", rows)
    plan, manifest = prepared(source, tmp_path / "out", shard_bytes=400)
    assert (plan.kind, manifest.kind, manifest.samples) == ("records", "records", 50)
    assert len(manifest.shards) == len(plan.parts) > 2
    assert ShardRecords.open(DataPath("OUT", str(tmp_path / "out"))).read(range(50)) == rows


@pytest.mark.parametrize(
    ("option", "name"), [({"pack": True}, "--pack"), ({"seq_len": 4}, "--seq-len"), ({"field": "x"}, "--field")]
)
def test_options_of_tokens_need_a_tokenizer(tmp_path: Path, option: dict[str, Any], name: str) -> None:
    assert refused(texts(tmp_path / "a.jsonl", 3), tmp_path / "out", **option) == (
        f"{name} is for tokens; records stay as they are\n  To do: name a tokenizer with --tokenizer."
    )


# --- shards do not depend on how they were made


def test_processes_change_nothing(words: str, tmp_path: Path) -> None:
    source = texts(tmp_path / "a.jsonl", 400)
    plan, _ = prepared(source, tmp_path / "one", 1, tokenizer=words, shard_bytes=1000)
    assert len(plan.parts) > 4
    sizes = [stop - start for start, stop in plan.parts]
    assert max(sizes) < 1.5 * min(sizes)
    prepared(source, tmp_path / "two", 2, tokenizer=words, shard_bytes=1000)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    prepared(source, tmp_path / "whole", None, tokenizer=words)
    assert documents(tmp_path / "whole") == documents(tmp_path / "one")
    assert list(contents(tmp_path / "whole")) in (["00000.shard", "shards.json"], ["shards.json", "00000.shard"])


def test_the_plan_estimates_what_is_written(words: str, tmp_path: Path) -> None:
    source = texts(tmp_path / "a.jsonl", 3000)
    for number, options in enumerate(({"tokenizer": words}, {"tokenizer": "bytes"}, {})):
        out = tmp_path / f"out{number}"
        plan = plan_prepare(*source, out, PrepareOptions(**options))
        assert not out.exists()
        run_prepare(plan, lambda done, total: None, 1)
        assert plan.estimated_bytes == pytest.approx((out / "00000.shard").stat().st_size, rel=0.15)


def test_progress_rises_to_the_size_of_the_source(tmp_path: Path) -> None:
    source = texts(tmp_path / "a.jsonl", 3000)
    seen: list[tuple[int, int]] = []
    plan = plan_prepare(*source, tmp_path / "out", PrepareOptions("bytes", shard_bytes=20_000))
    run_prepare(plan, lambda done, total: seen.append((done, total)), 2)
    size = source[0].parts.size
    assert seen[0] == (0, size)
    assert seen[-1] == (size, size)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


# --- a folder that is unfinished, finished, or of something else


def stop_after(parts: int, plan: PreparePlan, processes: int) -> None:
    """Prepare until so many parts are finished, then Ctrl-C."""

    def interrupt(done: int, total: int) -> None:
        if len(list(plan.out.glob("*.shard"))) >= parts:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_prepare(plan, interrupt, processes)


@pytest.mark.parametrize("processes", [1, 2])
def test_finished_shards_stay_and_the_rest_is_made(words: str, tmp_path: Path, processes: int) -> None:
    source = texts(tmp_path / "a.jsonl", 400)
    options = PrepareOptions(words, shard_bytes=1000)
    prepared(source, tmp_path / "whole", 1, tokenizer=words, shard_bytes=1000)
    out = tmp_path / "out"
    stop_after(2, plan_prepare(*source, out, options), processes)
    kept = {path.name: path.stat().st_mtime_ns for path in out.glob("*.shard")}
    assert 2 <= len(kept) < len(list((tmp_path / "whole").glob("*.shard")))
    assert [path for path in (out / ".preparing").iterdir() if path.is_dir()] == []
    # One that was cut short since is made again.
    damaged = out / sorted(kept)[-1]
    with damaged.open("r+b") as stream:
        stream.truncate(100)
    plan = plan_prepare(*source, out, options)
    assert not plan.finished
    first: list[int] = []
    run_prepare(plan, lambda done, total: first.append(done), processes)
    assert first[0] > 0
    assert contents(out) == contents(tmp_path / "whole")
    now = {path.name: path.stat().st_mtime_ns for path in out.glob("*.shard")}
    assert {name: now[name] for name in kept if name != damaged.name} == {
        name: time for name, time in kept.items() if name != damaged.name
    }


def test_a_kill_behind_the_name_of_a_shard_keeps_it(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = texts(tmp_path / "a.jsonl", 400)
    options = PrepareOptions(words, shard_bytes=1000)
    out = tmp_path / "out"

    class Killed(BaseException):
        pass

    def die(folder: Path) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(prepare, "fsync_folder", die)
        with pytest.raises(Killed):
            run_prepare(plan_prepare(*source, out, options), lambda done, total: None, 1)
    (first,) = out.glob("*.shard")
    made = first.stat().st_mtime_ns
    run_prepare(plan_prepare(*source, out, options), lambda done, total: None, 1)
    assert first.stat().st_mtime_ns == made


def test_a_killed_command_leaves_whole_shards_and_no_process(words: str, tmp_path: Path) -> None:
    source = texts(tmp_path / "a.jsonl", 400)
    prepared(source, tmp_path / "whole", 1, tokenizer=words, shard_bytes=1000)
    # A script without a guard: its processes do not run it again.
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(f"""
        import multiprocessing, os, signal
        from pathlib import Path
        from shardway.data.content import DataPath
        from shardway.data.formats.jsonl import JsonlRecords
        from shardway.data.prepare import run_prepare
        from shardway.data.prepare_plan import PrepareOptions, plan_prepare

        place = DataPath("data.path", {str(source[1].path)!r})
        out = Path({str(tmp_path / "out")!r})
        plan = plan_prepare(JsonlRecords.open(place), place, out, PrepareOptions({words!r}, shard_bytes=1000))
        def end(done, total):
            if len(list(out.glob("*.shard"))) > 2:
                print(*(child.pid for child in multiprocessing.active_children()), flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
        run_prepare(plan, end, 2)
        """)
    )
    ended = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (-signal.SIGKILL, "")
    children = ended.stdout.split()
    assert len(children) == 2
    assert not any(is_running(int(child)) for child in children)
    out = tmp_path / "out"
    assert len(list(out.glob("*.shard"))) > 2
    prepared(source, out, 2, tokenizer=words, shard_bytes=1000)
    assert contents(out) == contents(tmp_path / "whole")


def is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_finished_folder_is_there_and_another_is_refused(words: str, tmp_path: Path) -> None:
    source, out = texts(tmp_path / "a.jsonl", 10), tmp_path / "out"
    prepared(source, out, tokenizer=words)
    before = contents(out)
    plan, _ = prepared(source, out, tokenizer=words)
    assert plan.finished
    assert (plan.kind, plan.files, plan.samples) == ("tokens", 2, 10)
    assert contents(out) == before
    other = texts(tmp_path / "b.jsonl", 11)
    start = f'1 problem in the data\n  OUT: "{out}" holds other prepared data (not of the same '
    assert refused(other, out, tokenizer=words).startswith(f"{start}source)")
    assert refused(source, out, tokenizer="bytes").startswith(f"{start}tokenizer)")
    assert refused(source, out, tokenizer=words, seq_len=5).startswith(f"{start}--seq-len)")
    assert refused(source, out, tokenizer=words, field="text").startswith(f"{start}field)")
    assert contents(out) == before


def test_an_unfinished_folder_of_something_else_is_refused(words: str, tmp_path: Path) -> None:
    source, out = texts(tmp_path / "a.jsonl", 400), tmp_path / "out"
    stop_after(1, plan_prepare(*source, out, PrepareOptions(words, shard_bytes=1000)), 1)
    start, end = f'OUT: "{out}" was begun with another ', f"remove that one: rm -r {out}"
    message = refused(source, out, tokenizer=words, shard_bytes=2000)
    assert f"{start}--shard-size and is unfinished" in message
    assert message.endswith(end)
    # The same file with other content of the same size.
    (tmp_path / "a.jsonl").write_text((tmp_path / "a.jsonl").read_text().replace("cat", "dog"))
    changed = JsonlRecords.open(source[1]), source[1]
    assert f"{start}source" in refused(changed, out, tokenizer=words, shard_bytes=1000)
    assert f"{start}source" in refused(texts(tmp_path / "b.jsonl", 9), out, tokenizer=words, shard_bytes=1000)


def test_a_place_that_is_taken_is_refused(tmp_path: Path) -> None:
    source = texts(tmp_path / "a.jsonl", 5)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").touch()
    assert "holds other files, such as notes.txt" in refused(source, tmp_path / "full")
    assert "is not a folder" in refused(source, tmp_path / "a.jsonl")
    (tmp_path / "empty").mkdir()
    prepared(source, tmp_path / "empty")
    if os.getuid():
        (tmp_path / "denied").mkdir(mode=0o500)
        assert "cannot be written: Permission denied" in refused(source, tmp_path / "denied" / "out")
    missing = tmp_path / "a.jsonl" / "out"
    assert "cannot be written: Not a directory" in refused(source, missing)


@pytest.mark.parametrize("size", [0, -1])
def test_a_shard_has_a_size(tmp_path: Path, size: int) -> None:
    assert "--shard-size: " in refused(texts(tmp_path / "a.jsonl", 5), tmp_path / "out", shard_bytes=size)


def test_shards_of_much_data_are_neither_small_nor_huge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare_plan, "LEAST_SHARD_BYTES", 1000)
    monkeypatch.setattr(prepare_plan, "MOST_SHARD_BYTES", 4000)
    source = texts(tmp_path / "a.jsonl", 500)
    for size in (999, 4001):
        assert refused(source, tmp_path / "out", shard_bytes=size) == (
            f"--shard-size: {size}B is no good size of a shard\n  allowed: 1kB to 4kB"
        )
    plan, _ = prepared(source, tmp_path / "out", shard_bytes=2000)
    assert max(path.stat().st_size for path in (tmp_path / "out").glob("*.shard")) < 2 * 2000
    assert len(plan.parts) > 5


def test_no_records_are_refused(tmp_path: Path) -> None:
    made = MadeUp(tmp_path, []), DataPath("data.path", "made")
    assert refused(made, tmp_path / "out").endswith('data.path: "made" holds no samples')


# --- damage, room, and processes that die


@pytest.mark.parametrize("processes", [1, 2])
def test_damage_of_the_source_is_named(tmp_path: Path, processes: int) -> None:
    source = texts(tmp_path / "a.jsonl", 400)
    plan = plan_prepare(*source, tmp_path / "out", PrepareOptions("bytes", shard_bytes=2000))
    with (tmp_path / "a.jsonl").open("r+b") as stream:
        stream.truncate(source[0].parts.size - 100)
    with pytest.raises(DamagedData, match=r"a\.jsonl is damaged at byte") as caught:
        run_prepare(plan, lambda done, total: None, processes)
    assert "the file ends after" in str(caught.value)
    assert not (tmp_path / "out" / "shards.json").exists()


def test_a_process_that_the_system_kills_is_named(tmp_path: Path) -> None:
    made = MadeUp(tmp_path, ["the cat"] * 1001), DataPath("data.path", "made")
    plan = plan_prepare(*made, tmp_path / "out", PrepareOptions("bytes", shard_bytes=2000))
    made[0].values[7] = "kill"
    with pytest.raises(JobError) as caught:
        run_prepare(plan, lambda done, total: None, 2)
    assert str(caught.value) == (
        "a process that prepared data was killed (signal 9)\n"
        "      likely: out of memory, of the node or of what the job may use (`dmesg`, or the accounting of the "
        "scheduler)\n"
        "      to do: run the same command again, with fewer --processes if memory was short: what is finished is kept"
    )
    made[0].values[7] = "the cat"
    prepared(made, tmp_path / "out", 1, tokenizer="bytes", shard_bytes=2000)


def test_other_errors_of_a_process_keep_their_kind(tmp_path: Path) -> None:
    made = MadeUp(tmp_path, ["the cat"] * 1001), DataPath("data.path", "made")
    plan = plan_prepare(*made, tmp_path / "out", PrepareOptions("bytes", shard_bytes=2000))
    made[0].values[7] = "away"
    with pytest.raises(JobError, match="made cannot be read: Stale file handle"):
        run_prepare(plan, lambda done, total: None, 2)
    made[0].values[7] = "the cat"
    plan = plan_prepare(*made, tmp_path / "other", PrepareOptions("bytes", shard_bytes=2000))
    made[0].values[7] = "fail"
    with pytest.raises(Bug, match="the library of the format is broken") as caught:
        run_prepare(plan, lambda done, total: None, 2)
    assert "in read" in str(caught.value)


def test_where_no_process_can_start_this_one_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr("multiprocessing.context.SpawnProcess._Popen", staticmethod(refuse))
    prepared(texts(tmp_path / "a.jsonl", 100), tmp_path / "out", 2, tokenizer="bytes", shard_bytes=2000)
    assert len(documents(tmp_path / "out")) == 100


class Disk:
    """What statvfs says."""

    f_bavail, f_frsize, f_blocks, f_files, f_favail = 10, 100, 1000, 1000, 500


@pytest.mark.parametrize(("name", "value", "why"), [("f_bavail", 3, "300B are free"), ("f_favail", 2, "2 more can")])
def test_too_little_room_is_found_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: int, why: str
) -> None:
    disk = type("Full", (Disk,), {name: value})
    plan = plan_prepare(*texts(tmp_path / "a.jsonl", 10), tmp_path / "out", PrepareOptions())
    monkeypatch.setattr(os, "statvfs", lambda path: disk())
    with pytest.raises(JobError, match=r"no space for prepared data in .*out: ") as caught:
        run_prepare(plan, lambda done, total: None, 1)
    assert why in str(caught.value)
    assert "To do: make room there (`df -h`; `df -i` where there is space), or choose another folder (OUT)." in str(
        caught.value
    )


def test_a_disk_that_gets_full_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(path: Path, documents: Iterator[Any], dtype: str) -> None:
        next(documents)
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(prepare, "write_token_shard", fill)
    with pytest.raises(JobError, match="Disk quota exceeded") as caught:
        prepared(texts(tmp_path / "a.jsonl", 10), tmp_path / "out", tokenizer="bytes")
    assert "finished shards stay" in str(caught.value)
    assert "make room in your quota" in str(caught.value)


# --- parts of records


@given(st.lists(st.integers(0, 50), min_size=1, max_size=40), st.integers(1, 12), st.booleans())
def test_parts_hold_every_record_once_in_order(sizes: list[int], count: int, grouped: bool) -> None:
    made = Spread(sizes, grouped)
    parts = RecordBytes(made).split(count)
    assert [number for start, stop in parts for number in range(start, stop)] == list(range(len(sizes)))
    assert all(start < stop for start, stop in parts)
    assert len(parts) <= count
    places = RecordBytes(made)
    starts = [places.start(number) for number in range(len(sizes) + 1)]
    assert starts == sorted(starts)
    assert starts[-1] == max(1, sum(sizes))


def test_parts_have_about_equal_bytes() -> None:
    sizes = np.random.default_rng(3).integers(1, 1000, 5000).tolist()
    for grouped in (False, True):
        places = RecordBytes(Spread(sizes, grouped))
        parts = places.split(7)
        held = [sum(sizes[start:stop]) for start, stop in parts]
        assert len(parts) == 7
        assert max(held) < 1.05 * min(held)


class Spread(Records):
    """Records of given sizes in files of up to ten; `grouped`: a format that states the place of every fifth alone."""

    format = "spread"

    def __init__(self, sizes: list[int], grouped: bool) -> None:
        self.sizes, self.step = sizes, 5 if grouped else 1
        files = [DataFile(f"{at}", sum(sizes[at : at + 10]), 0) for at in range(0, len(sizes), 10)]
        self.parts = FileParts(Path("/nowhere"), files)

    @classmethod
    def is_at(cls, path: Path) -> bool:
        return False

    @classmethod
    def open(cls, place: DataPath) -> Spread:
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def fields(self) -> dict[str, str]:
        return {}

    def read(self, ids: Sequence[int], fields: Sequence[str] = ()) -> list[Record]:
        return []

    def extent(self, number: int) -> Extent:
        file, first = number // 10, number // self.step * self.step
        return Extent(self.parts.path(file), sum(self.sizes[file * 10 : first]), 0)


# --- documents of a run


class Heard(logging.Handler):
    """What was logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture
def heard() -> Iterator[list[str]]:
    handler = Heard()
    logging.getLogger("shardway").addHandler(handler)
    yield handler.lines
    logging.getLogger("shardway").removeHandler(handler)


def test_a_run_prepares_once(words: str, tmp_path: Path, heard: list[str]) -> None:
    source = texts(tmp_path / "a.jsonl", 20)
    options = PrepareOptions(words)
    folder = prepare_documents(*source, options, tmp_path / "cache")
    before = (folder / "00000.shard").stat().st_mtime_ns
    assert prepare_documents(*source, options, tmp_path / "cache") == folder
    assert (folder / "00000.shard").stat().st_mtime_ns == before
    assert len(documents(folder)) == 20
    assert len(heard) == 1
    assert heard[0].startswith(f"preparing 20 documents of {tmp_path / 'a.jsonl'}, about ")
    (tmp_path / "a.jsonl").write_text((tmp_path / "a.jsonl").read_text().replace("cat", "dog"))
    changed = prepare_documents(JsonlRecords.open(source[1]), source[1], options, tmp_path / "cache")
    assert changed != folder
    assert documents(changed) != documents(folder)


def test_many_processes_may_prepare_the_same(words: str, tmp_path: Path, heard: list[str]) -> None:
    source = texts(tmp_path / "a.jsonl", 400)
    out, options = tmp_path / "out", PrepareOptions(words, shard_bytes=1000)
    prepared(source, tmp_path / "whole", tokenizer=words, shard_bytes=1000)
    plan, ended = plan_prepare(*source, out, options), []

    def overtake(done: int, total: int) -> None:
        if done > total // 2 and not ended:
            ended.append(True)
            run_prepare(plan_prepare(*source, out, options), lambda done, total: None, 1)

    assert run_prepare(plan, overtake, 1) == out
    assert ended
    assert contents(out) == contents(tmp_path / "whole")


def request(path: Path, tmp_path: Path, vocab: int | None = None, **keys: Any) -> DataRequest:
    keys = {"seq_len": 2, "kind": "jsonl", "cache": str(tmp_path / "cache"), **keys}
    return DataRequest(DataSection(path=str(path), **keys), 0, "tokens", vocab)


def test_a_run_reads_windows_of_documents(words: str, tmp_path: Path) -> None:
    records, place = lines(tmp_path / "a.jsonl", [{"body": "the cat sat", "id": 1}, {"body": "cat é", "id": 2}])
    source = open_documents(records, place, request(tmp_path / "a.jsonl", tmp_path, tokenizer=words))
    batch = source.batch(np.arange(len(source)))
    assert batch["inputs"].tolist() == [[1, 2], [3, 4], [2, 0]]
    assert batch["targets"].tolist() == [[2, 3], [4, 2], [0, 4]]
    facts = source.facts
    assert (facts.vocab, facts.sample_shape, facts.bytes_per_token) == (5, (2,), (11 + 6) / 7)
    assert facts.description == f"7 tokens (uint8) of {tmp_path / 'a.jsonl'}, 2 documents"
    again = open_documents(records, place, request(tmp_path / "a.jsonl", tmp_path, 9, tokenizer=words, inputs="body"))
    assert again.facts.fingerprint == facts.fingerprint
    assert pickle.loads(pickle.dumps(again)).batch(np.array([1]))["inputs"].tolist() == [[3, 4]]
    with pytest.raises(UserError, match=r"model\.vocab: 4 is less than the 5 tokens of data\.tokenizer"):
        open_documents(records, place, request(tmp_path / "a.jsonl", tmp_path, 4, tokenizer=words))
    with pytest.raises(UserError, match="holds 7 tokens, too few for one sample"):
        open_documents(records, place, request(tmp_path / "a.jsonl", tmp_path, tokenizer=words, seq_len=7))


def test_a_run_packs_conversations_and_counts_the_assistant(tmp_path: Path) -> None:
    records, place = lines(tmp_path / "a.jsonl", [{"messages": TURNS}] * 3)
    asked = request(tmp_path / "a.jsonl", tmp_path, seq_len=128, pack=True)
    source = open_documents(records, place, asked)
    batch = source.batch(np.arange(len(source)))
    counted = batch["targets"][batch["targets"] >= 0]
    assert bytes(counted.astype(np.uint8)) == b"sat<|im_end|>" * 3
    assert source.facts.bytes_per_token == 1.0


def test_a_run_takes_rows_of_tokens(tmp_path: Path) -> None:
    records, place = lines(tmp_path / "a.jsonl", [{"input_ids": [1, 2, 3]}, {"input_ids": [4, 500, 6]}])
    source = open_documents(records, place, request(tmp_path / "a.jsonl", tmp_path))
    assert source.batch(np.array([0, 1]))["inputs"].tolist() == [[1, 2], [3, 4]]
    assert (source.facts.vocab, source.facts.bytes_per_token) == (501, None)
    with pytest.raises(UserError, match=r"model\.vocab: 256 is less than the 501 tokens of"):
        open_documents(records, place, request(tmp_path / "a.jsonl", tmp_path, 256))


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    records, place = texts(tmp_path / "a.jsonl", 3)
    with pytest.raises(UserError, match=r"data\.cache: .* cannot be written: Not a directory"):
        open_documents(records, place, request(tmp_path / "a.jsonl", tmp_path, cache=str(tmp_path / "a.jsonl")))


# --- against the tokenizer's own library


def test_a_real_tokenizer_and_text_agree_with_their_library(tmp_path: Path) -> None:
    root = os.environ.get("SHARDWAY_TEST_DATA")
    if root is None:
        pytest.skip("SHARDWAY_TEST_DATA does not name a folder of real data")
    tokenizers = pytest.importorskip("tokenizers")
    folder = Path(root, "tokenizers/gpt2")
    text = Path(root, "wikitext-2/valid.txt").read_text(encoding="utf-8")[:200_000]
    source = lines(tmp_path / "a.jsonl", [{"text": part} for part in text.split("\n")])
    prepared(source, tmp_path / "out", 2, tokenizer=str(folder), end=False, shard_bytes=20_000)
    theirs = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert documents(tmp_path / "out") == [theirs.encode(part).ids for part in text.split("\n")]
