"""The client of OpenAI-compatible servers, against a server of known delays: counts, times, faults, interrupts."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import sys
import threading
from typing import Any

import pytest

from fake_openai import Delays, serving
from ports import free_port
from shardway.bench.inference import client, service
from shardway.bench.inference.client import (
    ENDPOINTS,
    CompletionExchange,
    LoadResult,
    StreamClient,
    StreamRequest,
    list_models,
    parse_address,
    send_load,
)
from shardway.bench.inference.results import Row
from shardway.bench.inference.service import ServiceLoad, choose_model, measure_service, parse_body, parse_goodput
from shardway.bench.inference.stamped_socket import StampedSocket
from shardway.errors import JobError, UserError


def measure(delays: Delays, endpoint: str = ENDPOINTS[0], **load: Any) -> Row:
    """The row of a small load on a server."""

    async def run(url: str) -> Row:
        client = StreamClient(parse_address(url), delays.key, load.pop("timeout_s", 20.0))
        request = StreamRequest(await choose_model(client, None), endpoint, load.pop("ignore_eos", True))
        try:
            return await measure_service(
                client, request, ServiceLoad(**{"count": 6, "input_len": 7, "output_len": 4, **load})
            )
        finally:
            client.close()

    with serving(delays) as server:
        return asyncio.run(run(server.url))


def failure(delays: Delays, **load: Any) -> str:
    with pytest.raises((UserError, JobError)) as caught:
        measure(delays, **load)
    return str(caught.value)


# --- what is measured


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_tokens_are_counted_and_nothing_comes_before_it_is_due(endpoint: str) -> None:
    row = measure(Delays(first_s=0.05, step_s=0.02), endpoint, goodput={"ttft": 49.0})
    assert (row["completed"], row["failed"], row["interrupted"]) == (6, 0, False)
    assert (row["total_input_tokens"], row["total_output_tokens"]) == (42, 24)
    # A server answers when it is due or later, and a client sees it then or later: a bound that load does not move.
    assert row["median_ttft_ms"] >= 50.0
    assert row["median_e2el_ms"] >= 110.0
    assert row["mean_tpot_ms"] == pytest.approx((row["mean_e2el_ms"] - row["mean_ttft_ms"]) / 3)
    assert row["mean_itl_ms"] == pytest.approx(row["mean_tpot_ms"])
    assert (row["request_goodput"], row["slo_attainment"]) == (0.0, 0.0)
    assert row["backend"] == ("openai" if endpoint == ENDPOINTS[0] else "openai-chat")


def test_a_row_states_which_clock_stamped_its_arrivals(monkeypatch: pytest.MonkeyPatch) -> None:
    assert measure(Delays())["arrivals_stamped_by"] == ("kernel" if sys.platform == "linux" else "client")
    monkeypatch.setattr(StampedSocket, "ask_for_stamps", lambda _: None)
    row = measure(Delays(first_s=0.02))
    assert (row["arrivals_stamped_by"], row["completed"]) == ("client", 6)
    assert row["median_ttft_ms"] >= 20.0


def test_a_load_of_more_connections_than_files_is_refused_before_it_begins() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = min(soft, 1000) if soft != resource.RLIM_INFINITY else 1000
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
        service._allow_connections(lowest)  # the soft limit is raised as far as needed
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (lowest + 64, hard)
        if hard != resource.RLIM_INFINITY:
            with pytest.raises(UserError, match=f"To do: --max-concurrency {hard - 64}, or a higher"):
                service._allow_connections(hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_body_may_not_change_what_the_result_states() -> None:
    assert parse_body(None) == {}
    extra = parse_body('{"seed": 1, "max_tokens": null, "max_completion_tokens": 4}')
    body = json.loads(StreamRequest("m", ENDPOINTS[1], extra=extra).render_body("words", 9))
    assert ("max_tokens" in body, body["max_completion_tokens"], body["seed"], body["stream"]) == (False, 4, 1, True)
    with pytest.raises(ValueError, match=r'has "prompt" \(--prompts and --input-len\), "ignore_eos" \(--disable-'):
        parse_body('{"prompt": "x", "ignore_eos": false}')


def test_256_streams_at_a_time_lose_nothing() -> None:
    row = measure(Delays(first_s=0.4, step_s=0.05), count=300, most=256)
    assert (row["completed"], row["failed"], row["max_concurrent_requests"]) == (300, 0, 256)
    assert (row["total_input_tokens"], row["total_output_tokens"]) == (2100, 1200)
    assert row["median_ttft_ms"] >= 400.0


def test_several_tokens_a_piece_are_counted_by_usage_and_gaps_by_piece() -> None:
    row = measure(Delays(per_piece=3, step_s=0.02), output_len=9)
    assert row["total_output_tokens"] == 6 * 9
    assert row["median_e2el_ms"] >= 60.0  # 20 and two steps of 20
    assert row["mean_tpot_ms"] == pytest.approx(row["mean_itl_ms"] * 2 / 8)
    uncounted = measure(Delays(fault="no usage"), output_len=9)
    assert (uncounted["total_input_tokens"], uncounted["total_output_tokens"]) == (42, 54)


def test_one_token_has_no_tpot() -> None:
    row = measure(Delays(), output_len=1, goodput={"tpot": 0.1})
    assert (row["mean_tpot_ms"], row["mean_itl_ms"], row["slo_attainment"]) == (None, None, 1.0)


def test_arrivals_and_concurrency_are_kept() -> None:
    with serving(Delays(step_s=0.001)) as server:

        async def run() -> LoadResult:
            client = StreamClient(parse_address(server.url))
            await client.connect()
            body = StreamRequest("m", ENDPOINTS[0]).render_body([1, 2], 3)
            requests = [(client.render("POST", ENDPOINTS[0], body), 2)] * 5
            try:
                return await send_load(client, requests, [0.0, 0.0, 0.0, 0.05, 0.1], 1)
            finally:
                client.close()

        result = asyncio.run(run())
    assert [each.error for each in result.requests] == [""] * 5
    for before, after in zip(result.requests, result.requests[1:], strict=False):
        assert after.sent_s >= before.arrivals_s[-1]  # one at a time
    assert result.duration_s >= 0.1  # from its begin: the first is due then, and sent a moment later
    assert server.connections == 1  # which is kept
    assert json.loads(json.dumps(server.bodies[0]))["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize("fault", ["until close", "no done", "no end"])
def test_streams_that_end_in_another_way_are_whole(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_LINGER_S", 0.05)
    row = measure(Delays(fault=fault), count=2, most=1)
    assert (row["completed"], row["total_output_tokens"]) == (2, 8)


def test_a_kept_connection_that_the_server_closed_loses_nothing() -> None:
    row = measure(Delays(fault="drop kept"), count=4, most=2)
    assert (row["completed"], row["failed"], row["total_output_tokens"]) == (4, 0, 16)


# --- what goes wrong


def test_faults_of_a_server_are_one_sentence() -> None:
    assert "refuses the request: HTTP 401: Incorrect API key provided" in failure_of_key()
    assert "the answer is no stream of events.\n  To do: a server that streams" in failure(Delays(fault="no stream"))
    assert "HTTP 404 X: Not Found.\n  To do: --endpoint /v1/chat/completions" in failure(Delays(fault="no endpoint"))
    assert "ignore_eos.\n  To do: --disable-ignore-eos" in failure(Delays(fault="strict"))
    assert measure(Delays(fault="strict"), ignore_eos=False)["completed"] == 6
    assert "HTTP 400 X: prompt must be a string.\n  To do: --prompts words" in failure(Delays(fault="text only"))
    row = measure(Delays(fault="text only"), words=True)
    assert (row["completed"], row["prompts"], row["total_input_tokens"]) == (6, "random words", 42)
    cut = failure(Delays(fault="cut"))
    assert "the server closed the connection before its answer was whole (3 pieces had come)" in cut
    assert "the server reported: the engine died" in failure(Delays(fault="error event"))
    assert "none of 6 requests to http://127.0.0.1:" in failure(Delays(fault="broken later"))
    assert "6 x HTTP 500 X: CUDA out of memory" in failure(Delays(fault="broken later"))
    assert "no end of the answer within 0.6 s (--timeout)" in failure(Delays(first_s=5.0), timeout_s=0.6)


def failure_of_key() -> str:
    async def run(url: str) -> None:
        client = StreamClient(parse_address(url), "wrong")
        try:
            await choose_model(client, None)
        finally:
            client.close()

    with serving(Delays(key="right")) as server, pytest.raises(UserError) as caught:
        asyncio.run(run(server.url))
    assert "wrong" not in str(caught.value)
    return str(caught.value)


def test_a_key_that_is_right_is_sent_and_not_in_the_row() -> None:
    row = measure(Delays(key="s3cret"))
    assert row["completed"] == 6
    assert "s3cret" not in json.dumps(row)


def test_requests_that_fail_are_counted_beside_those_that_do_not() -> None:
    row = measure(Delays(fault="some broken"))
    assert (row["completed"], row["failed"]) == (4, 2)
    assert row["errors"] == {"HTTP 503 X: try later": 2}
    assert row["total_output_tokens"] == 16


def test_a_model_that_the_server_lacks_or_that_is_not_clear() -> None:
    async def choose(url: str, wanted: str | None) -> str:
        client = StreamClient(parse_address(url))
        try:
            return await choose_model(client, wanted)
        finally:
            client.close()

    with serving(Delays(models=("a", "b"))) as server:
        assert asyncio.run(choose(server.url, "b")) == "b"
        with pytest.raises(UserError, match='has no model "c"\n  allowed: a, b'):
            asyncio.run(choose(server.url, "c"))
        with pytest.raises(UserError, match="several models, and --model names none\n  allowed: a, b"):
            asyncio.run(choose(server.url, None))
    with serving(Delays(fault="no list")) as server:
        assert asyncio.run(choose(server.url, "c")) == "c"
        with pytest.raises(UserError, match="does not list its models"):
            asyncio.run(choose(server.url, None))


def test_a_url_that_does_not_answer() -> None:
    async def ask(url: str) -> None:
        await list_models(StreamClient(parse_address(url)))

    port = free_port()
    with pytest.raises(UserError, match=f"http://127.0.0.1:{port} does not answer: Connect"):
        asyncio.run(ask(f"http://127.0.0.1:{port}"))
    with serving(Delays()) as server, pytest.raises(UserError, match=r"does not answer: no TLS \(.*is it http and not"):
        asyncio.run(ask(server.url.replace("http:", "https:")))


def test_an_interrupt_ends_the_load_and_keeps_what_was_measured() -> None:
    assert threading.current_thread() is threading.main_thread()  # elsewhere the signal would end the tests
    with serving(Delays(first_s=0.02, step_s=0.0)) as server:

        async def run() -> LoadResult:
            client = StreamClient(parse_address(server.url))
            await client.connect()
            body = StreamRequest("m", ENDPOINTS[0]).render_body([1], 1)
            requests = [(client.render("POST", ENDPOINTS[0], body), 1)] * 50

            def interrupt(count: int) -> None:
                if count == 3:
                    os.kill(os.getpid(), signal.SIGINT)

            try:
                return await send_load(client, requests, [0.0] * 50, 1, interrupt)
            finally:
                client.close()

        before = signal.getsignal(signal.SIGINT)
        result = asyncio.run(run())
    assert result.was_interrupted
    assert 3 <= len(result.requests) < 50
    assert {each.error for each in result.requests} == {""}
    assert signal.getsignal(signal.SIGINT) is before


def test_an_answer_is_read_whatever_pieces_it_comes_in() -> None:
    """Split at every byte, so within a character too."""
    events = [{"choices": [{"text": "é"}]}, {"choices": [{"text": "", "finish_reason": "length"}]}]
    events.append({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}})
    body = b"".join(b"data: %s\n\n" % json.dumps(each, ensure_ascii=False).encode() for each in events)
    body += b"data: [DONE]\n\n"
    data = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    exchange = CompletionExchange(9)
    for number in range(len(data)):
        exchange.feed(data[number : number + 1], float(number))
    found = exchange.read()
    assert (found.error, found.input_tokens, found.output_tokens, len(found.arrivals_s)) == ("", 3, 2, 1)
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
    for event, why in (
        ({"error": {"message": "no memory"}}, "no memory"),
        ({"object": "error", "message": "too long"}, "too long"),
        ({"choices": [{"text": "x", "finish_reason": "abort"}]}, "finish_reason abort"),
    ):
        failed = CompletionExchange()
        failed.feed(head + b"data: " + json.dumps(event).encode() + b"\n\n", 0.0)
        assert failed.read().error == f"the server reported: {why}"
    broken = CompletionExchange()
    with pytest.raises(Exception, match="no JSON of a completion"):
        broken.feed(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: {x}\n\n", 0.0)


# --- words


def test_addresses_and_limits_are_read_or_refused() -> None:
    assert parse_address("node7:8000").url == "http://node7:8000"
    assert parse_address("https://h/models/v1/").url == "https://h:443/models"
    assert parse_address("http://h:1/v1/chat/completions").prefix == ""
    assert parse_address("http://[::1]:8").url == "http://[::1]:8"
    for text, what in (
        ("ftp://h", "no URL of a server"),
        ("http://h:x", "no URL"),
        ("http://", "no URL of a server"),
        ("http://me:secret@h", "a URL with a password in it"),
    ):
        with pytest.raises(ValueError, match=what) as caught:
            parse_address(text)
        assert "secret" not in str(caught.value)
    assert parse_goodput(["ttft:200", "tpot:50,e2el:3e3"]) == {"ttft": 200.0, "tpot": 50.0, "e2el": 3000.0}
    with pytest.raises(ValueError, match="itl:3, ttft:-1, tpot: no limit; allowed: ttft:MS"):
        parse_goodput(["itl:3 ttft:-1", "tpot"])
