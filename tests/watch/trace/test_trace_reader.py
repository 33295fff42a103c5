"""The reader: every form of file gives the same events, whatever the size of its pieces."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_traces import MadeTrace, make_training

from shardway.errors import UserError
from shardway.watch.trace import reader
from shardway.watch.trace.columns import KERNEL, OP, Trace
from shardway.watch.trace.reader import read_trace


def rows(trace: Trace) -> list[tuple[Any, ...]]:
    start = np.round((trace.start + trace.origin_us) * 1000).astype(int)
    names = [trace.names[code] for code in trace.name]
    return sorted(zip(start.tolist(), trace.duration.tolist(), names, trace.correlation.tolist(), strict=True))


def small() -> MadeTrace:
    made = MadeTrace()
    for width in (64, 128):
        made.product(width, width, width)
    made.event("cpu_op", 'a "}, {" in a name, \\ and ü', made.now, 3, inner=[{"a": 1}, {"b": {"c": []}}, {"ph": "X"}])
    made.events.append({"ph": "M", "name": "process_labels", "pid": 0, "tid": 0, "ts": 0, "args": {"labels": "GPU 0"}})
    made.product(32, 32, 32)
    return made


def expected(made: MadeTrace) -> list[tuple[Any, ...]]:
    timed = [each for each in made.events if each["ph"] == "X"]
    return sorted((round(e["ts"] * 1000), e["dur"], e["name"], e["args"].get("correlation", -1)) for e in timed)


FORMS = {
    "compact": lambda made: json.dumps(made.as_dict(), separators=(",", ":")),
    "spaced": lambda made: json.dumps(made.as_dict()),
    "indented": lambda made: json.dumps(made.as_dict(), indent=2),
    "tabs": lambda made: json.dumps(made.as_dict(), indent="\t"),
    "ascii off": lambda made: json.dumps(made.as_dict(), ensure_ascii=False),
    "a list": lambda made: json.dumps(made.events),
    "events last": lambda made: json.dumps({"other": [{"x": 1}], **made.properties, "traceEvents": made.events}),
    "a list without its end": lambda made: json.dumps(made.events)[:-1],
    "marked": lambda made: "\ufeff" + json.dumps(made.as_dict()),
}


@pytest.mark.parametrize("piece", [1 << 20, 700, 97])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_has_the_same_events(form: str, piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "_PIECE", piece)
    made, path = small(), tmp_path / "t.json"
    path.write_text(FORMS[form](made), encoding="utf-8")
    trace = read_trace(path)
    assert rows(trace) == expected(made)
    assert trace.faults.malformed == 0
    assert not trace.faults.truncated
    assert len(trace.of(KERNEL)) == 3
    if form not in ("a list", "a list without its end"):
        assert trace.properties["deviceProperties"][0]["name"] == "NVIDIA H100 80GB HBM3"


def test_a_compressed_file_of_two_members(tmp_path: Path) -> None:
    made, text = small(), json.dumps(small().as_dict()).encode()
    (tmp_path / "t.json.gz").write_bytes(gzip.compress(text[:500]) + gzip.compress(text[500:]))
    trace = read_trace(tmp_path / "t.json.gz")
    assert rows(trace) == expected(made)
    assert trace.json_bytes == len(text)


def test_shapes_and_devices_of_other_releases(tmp_path: Path) -> None:
    made = MadeTrace()
    made.product(8, 16, 32)
    for each in made.events:
        if each["cat"] == "kernel":
            each["args"] |= {"stream": "0x7", "correlation": str(each["args"]["correlation"])}
    trace = read_trace(made.write(tmp_path / "t.json"))
    kernel, op = int(trace.of(KERNEL)[0]), int(trace.of(OP)[0])
    assert trace.stream[kernel] == 7
    assert trace.correlation[kernel] == 1
    assert json.loads(trace.texts[trace.dims[op]]) == [[8, 16], [16, 32]]


@pytest.mark.parametrize("cut", [0.2, 0.5, 0.9])
def test_what_stands_before_the_cut_is_kept(cut: float, tmp_path: Path) -> None:
    made = make_training(steps=3)
    text = json.dumps(made.as_dict())
    (tmp_path / "t.json").write_text(text[: int(cut * len(text))])
    trace = read_trace(tmp_path / "t.json")
    assert trace.faults.truncated
    assert set(rows(trace)) < set(expected(made))
    assert len(trace.start) > 0.8 * cut * len(expected(made))


NO_TRACES = {
    "empty": (b"", "is empty"),
    "blank": (b"  \n", "is blank"),
    "other JSON": (b'{"a": 1}', 'JSON without "traceEvents"'),
    "a text": (b"<!DOCTYPE html><html>", "text that begins with '<!DOCTYPE html><html>'"),
    "a pickle": (b"\x80\x04\x95\x00\x00\x00\x00\x00\x00\x00\x00", "a pickle"),
    "an archive": (b"PK\x03\x04\x00\x00", "a zip archive"),
    "a database": (b"SQLite format 3\x00", "an SQLite database"),
    "compressed text": (gzip.compress(b"hello"), "text that begins with 'hello'"),
    "damaged at once": (b"\x1f\x8b\x08\x00" + b"\x01" * 40, "compressed data are damaged"),
}


@pytest.mark.parametrize("kind", NO_TRACES)
def test_what_is_no_trace_is_refused(kind: str, tmp_path: Path) -> None:
    content, words = NO_TRACES[kind]
    (tmp_path / "t.json").write_bytes(content)
    with pytest.raises(UserError, match=r"is no trace") as caught:
        read_trace(tmp_path / "t.json")
    assert words in str(caught.value)
    assert "To do" in str(caught.value)


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(UserError, match="cannot be read: No such file"):
        read_trace(Path("nowhere.json"))
