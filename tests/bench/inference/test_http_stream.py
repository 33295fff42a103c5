"""HTTP/1.1 and server-sent events from bytes: any split of the same bytes gives the same result."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardway.bench.inference.http_stream import BrokenResponse, EventReader, ResponseReader, render_request

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"


def chunk(parts: list[bytes]) -> bytes:
    """A chunked body, with an extension and a trailer."""
    sizes = b"".join(b"%X;x=1\r\n%s\r\n" % (len(part), part) for part in parts if part)
    return sizes + b"0\r\nX-Trailer: 1\r\n\r\n"


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[first:last] for first, last in itertools.pairwise(edges)]


PLACES = st.lists(st.integers(0, 10_000), max_size=12)


@given(st.lists(st.binary(max_size=40), max_size=6), PLACES, st.sampled_from(["chunked", "length", "until close"]))
def test_a_body_is_the_same_however_it_comes(parts: list[bytes], places: list[int], framing: str) -> None:
    body = b"".join(parts)
    if framing == "chunked":
        data = HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunk(parts)
    elif framing == "length":
        data = HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body
    else:
        data = HEAD + b"\r\n" + body
    reader = ResponseReader()
    found = b"".join(reader.feed(piece) for piece in cut(data, places))
    assert (found, reader.status) == (body, 200)
    assert reader.is_complete == (framing != "until close")
    assert reader.keeps_alive == (framing != "until close")
    reader.end()
    assert (reader.is_complete, reader.rest) == (True, b"")


@given(st.lists(st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"])), max_size=6), PLACES)
def test_events_are_the_same_however_they_come(texts: list[str], places: list[int]) -> None:
    data = b": comment\nevent: x\n" + b"".join(
        b"data: %s%s" % (text.encode(), b"\r\n\r\n" if number % 2 else b"\n\n") for number, text in enumerate(texts)
    )
    reader = EventReader()
    found = [event.decode() for piece in cut(data, places) for event in reader.feed(piece)]
    assert found == texts
    assert reader.end() == []


def test_lines_of_an_event_and_one_without_an_end() -> None:
    reader = EventReader()
    assert reader.feed(b"data:a\ndata: b\n\nid: 3\n\ndata: last") == [b"a\nb"]
    assert reader.end() == [b"last"]


def test_a_next_response_begins_where_one_ends() -> None:
    reader = ResponseReader()
    assert reader.feed(b"HTTP/1.1 100 Continue\r\n\r\n" + HEAD + b"Content-Length: 2\r\n\r\nokHTTP/1.1") == b"ok"
    assert (reader.is_complete, reader.rest) == (True, b"HTTP/1.1")
    empty = ResponseReader()
    empty.feed(b"HTTP/1.1 204 No Content\r\n\r\n")
    assert empty.is_complete
    old = ResponseReader()
    old.feed(b"HTTP/1.0 200 OK\r\nContent-Length: 1\r\n\r\nx")
    assert (old.is_complete, old.keeps_alive) == (True, False)


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"SSH-2.0-OpenSSH\r\n\r\n", "no HTTP/1.1"),
        (HEAD + b"Content-Length: x\r\n\r\n", "the length 'x'"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", "the size b'zz'"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n-1\r\n", "the size b'-1'"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\nab\r\n", "longer than its size"),
        (b"H" * 70_000, "without an end of the head"),
    ],
)
def test_what_is_no_response_is_refused(data: bytes, what: str) -> None:
    with pytest.raises(BrokenResponse, match=what):
        ResponseReader().feed(data)


def test_a_response_that_ends_early_is_no_success() -> None:
    for framing in (b"Transfer-Encoding: chunked\r\n\r\n5\r\nab", b"Content-Length: 9\r\n\r\nab"):
        reader = ResponseReader()
        reader.feed(HEAD + framing)
        with pytest.raises(BrokenResponse, match="before its answer was whole"):
            reader.end()
    with pytest.raises(BrokenResponse, match="a line of more than"):
        EventReader().feed(b"x" * (2**24 + 1))


def test_a_request_is_whole() -> None:
    found = render_request("POST", "/v1/completions", "h:1", {"Authorization": "Bearer k"}, b"{}")
    head, _, body = found.partition(b"\r\n\r\n")
    assert head.split(b"\r\n")[0] == b"POST /v1/completions HTTP/1.1"
    assert {b"Host: h:1", b"Authorization: Bearer k", b"Content-Length: 2"} <= set(head.split(b"\r\n"))
    assert body == b"{}"
    assert b"Content-Length" not in render_request("GET", "/v1/models", "h:1", {})
