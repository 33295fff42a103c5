"""Results of SGLang and vLLM have the columns of ours; the table and the page that compare them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardway.bench.inference.page import render_page
from shardway.bench.inference.readers import ComparedResult, read_results
from shardway.bench.inference.report import list_compared, render_compared
from shardway.bench.inference.results import (
    FIELDS,
    ONE_BATCH,
    SERVE,
    THROUGHPUT,
    BatchTimes,
    BenchConditions,
    ServedRequest,
    append_row,
    make_row,
    measure_one_batch,
    measure_requests,
    measure_throughput,
)
from shardway.errors import UserError

FOLDER = Path(__file__).parents[2] / "recorded" / "inference"
RECORDED = tuple(sorted(FOLDER.iterdir()))


def read(name: str) -> list[ComparedResult]:
    return read_results([FOLDER / name])


@pytest.fixture(name="ours")
def _ours(tmp_path: Path) -> Path:
    """A file with a result of each kind."""
    path = tmp_path / "ours"
    conditions = BenchConditions("scripted", "scripted delays", "none", others={"slots": 4})
    served = [ServedRequest(0.0, (0.5, 0.6, 0.8), 10, 3), ServedRequest(0.1, (0.7, 0.9), 12, 2)]
    rest = {"prefill_mfu": None, "decode_mfu": None, "decode_mbu": None, "peaks": "n/a"}
    append_row(
        path, make_row(ONE_BATCH, conditions, {**measure_one_batch(2, 8, 3, BatchTimes(0.2, (0.1, 0.3))), **rest})
    )
    append_row(
        path, make_row(ONE_BATCH, conditions, {**measure_one_batch(4, 8, 3, BatchTimes(0.2, (0.2, 0.2))), **rest})
    )
    append_row(path, make_row(THROUGHPUT, conditions, {**measure_throughput(served, 0.9), "peaks": "n/a"}))
    service = {**measure_requests(served, 2.0), "request_rate": "inf", "max_concurrency": None}
    append_row(path, make_row(SERVE, conditions, service))
    return path


def test_every_recorded_file_has_the_columns_of_ours(ours: Path) -> None:
    results = read_results([*RECORDED, ours])
    assert {each.kind for each in results} == {ONE_BATCH, THROUGHPUT, SERVE}
    for each in results:
        assert tuple(each.figures) == FIELDS[each.kind]
    assert [each.origin.split(",")[0] for each in results] == [
        "SGLang offline_throughput",
        "SGLang one_batch",
        "SGLang one_batch",
        "SGLang bench_serving",
        "SGLang bench_serving",
        "vLLM bench latency",
        "vLLM bench serve",
        "vLLM bench throughput",
        *["shardway"] * 4,
    ]


def test_a_one_batch_file_of_sglang() -> None:
    first, second = read("sglang-one-batch.jsonl")
    assert (first.label, first.figures["batch_size"], first.figures["median_decode_latency"]) == ("before", 1, 0.005)
    assert (second.figures["prefill_throughput"], second.figures["overall_throughput"]) == (25600.0, 10880.0)


def test_offline_files_state_input_and_output_apart_or_not_at_all() -> None:
    (sglang,) = read("sglang-offline-throughput.jsonl")
    assert [sglang.figures[name] for name in FIELDS[THROUGHPUT]] == [
        *(1000, 20.0, 300000, 200000),
        *(50.0, 15000.0, 10000.0, 25000.0),
    ]
    (vllm,) = read("vllm-throughput.json")
    # vLLM's file has the sum alone, also as its rate.
    found = dict(vllm.figures)
    assert [found.pop(name) for name in ("total_input_tokens", "total_output_tokens")] == [None, None]
    assert [found.pop(name) for name in ("input_throughput", "output_throughput")] == [None, None]
    assert found["successful_requests"] == 32
    assert found["request_throughput"] == pytest.approx(32 / found["total_latency"])
    assert found["total_throughput"] == pytest.approx(3074 / found["total_latency"])  # 2050 read, 1024 written


def test_serving_files_have_the_same_names_for_the_same_latencies() -> None:
    """Of one load: 64 requests at 20 a second, at most 8 at a time, 64 tokens each and 32 to write."""
    (vllm,), (sglang, other) = read("vllm-serve.json"), read("sglang-serving.jsonl")
    assert [each.row["backend"] for each in (vllm, sglang, other)] == ["vllm", "sglang-oai", "vllm"]
    for each in (vllm, sglang, other):
        found = each.figures
        assert (found["request_rate"], found["max_concurrency"], found["completed"]) == (20.0, 8, 64)
        assert found["total_output_tokens"] == 2048
        assert found["output_throughput"] == pytest.approx(2048 / found["duration"])
        assert found["mean_e2el_ms"] == pytest.approx(found["mean_ttft_ms"] + 31 * found["mean_tpot_ms"], rel=0.01)
    assert (vllm.figures["total_input_tokens"], sglang.figures["total_input_tokens"]) == (4098, 4096)
    assert (vllm.figures["failed"], sglang.figures["failed"]) == (0, None)
    assert (vllm.figures["p90_ttft_ms"], vllm.figures["request_goodput"] is None) == (None, False)
    assert sglang.figures["median_e2el_ms"] == sglang.row["median_e2e_latency_ms"]
    assert (vllm.label, sglang.label) == ("vllm-serve", "sglang-serving")


def test_a_latency_file_of_vllm_has_no_prefill() -> None:
    (found,) = read("vllm-latency.json")
    known = {name: value for name, value in found.figures.items() if value is not None}
    assert known == {"total_latency": pytest.approx(sum(found.row["latencies"]) / len(found.row["latencies"]))}


def test_the_table_and_the_page_show_what_the_files_have(ours: Path) -> None:
    results = read_results([*RECORDED, ours])
    text = render_compared(results)
    assert text.isascii()
    assert [line for line in text.splitlines() if line in ("Static batches", "Offline throughput", "Serving")] == [
        "Static batches",
        "Offline throughput",
        "Serving",
    ]
    head, *rows = list_compared(results, THROUGHPUT)
    assert dict(zip(head, rows[1], strict=True))["in tok/s"] == "n/a"
    page = render_page(results)
    assert page.count("<svg") >= 8
    assert "http" not in page.replace("http-equiv", "")
    assert "slots = 4" in page
    assert all(row[0] in page for row in rows)


def test_a_page_of_results_without_figures_is_still_a_page() -> None:
    page = render_page(read("vllm-latency.json"))
    assert "vLLM bench latency" in page


def test_a_last_line_that_was_cut_off_is_left_out(ours: Path) -> None:
    whole = ours.read_text()
    ours.write_text(whole + '{"format": 1, "kind"')
    assert len(read_results([ours])) == 4
    ours.write_text(whole.replace("\n", "\n{\n", 1))
    with pytest.raises(UserError, match="line 2 is no JSON"):
        read_results([ours])


def test_what_is_no_result_is_refused_all_at_once(tmp_path: Path) -> None:
    texts = {
        "empty": "\n",
        "list": "[1]",
        "other": '{"a": 1}',
        "newer": json.dumps({"format": 9, "kind": "serve", "shardway": "9"}),
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\xfd")
    names = (*texts, "binary", "gone")
    with pytest.raises(UserError) as caught:
        read_results([tmp_path / name for name in names])
    message = str(caught.value)
    assert message.startswith("6 problems in the files")
    for part in (
        "is empty",
        "line 1 is no object",
        "has an object that is no result",
        "has a result of format 9, kind 'serve'; this Shardway reads 1",
        "is no text of UTF-8",
        "No such file or directory",
    ):
        assert part in message
