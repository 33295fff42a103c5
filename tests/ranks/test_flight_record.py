"""What is kept of what torch's recorders tell. The dumps are made up here, in the form of torch 2.13."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardway.ranks.evidence import (
    FIRST_OPEN,
    LAST,
    Call,
    Record,
    build_record,
    find_open,
    make_group,
    read_record,
    trim_calls,
)

MEMBERS = {"0": (0, 1, 2, 3), "2": (1, 3)}


def entry(name: str, number: int, group: tuple[str, str] = ("0", "default_pg"), **other: Any) -> dict[str, Any]:
    return {
        "record_id": number - 1,
        "process_group": [*group],
        "collective_seq_id": number,
        "profiling_name": name,
        "input_sizes": [[4, 3]],
        "input_dtypes": ["BFloat16"],
        "retired": True,
        "is_p2p": False,
        **other,
    }


def build(*dumps: list[dict[str, Any]], recording: bool = True) -> Record:
    return build_record(1, [{"entries": dump} for dump in dumps], MEMBERS, recording=recording)


def call(number: int, *, ended: bool = True) -> Call:
    return Call(number, "all_reduce", 4, "4", "float32", ended)


def test_calls_stand_by_group() -> None:
    record = build(
        [entry("gloo:all_reduce", 1), entry("gloo:broadcast", 1, ("2", "mesh_tp"), retired=False)],
        [entry("nccl:_all_gather_base", 1, ("2", "mesh_tp"))],
    )
    assert [(line.group, [each.number for each in line.calls]) for line in record.lines] == [
        (make_group("gloo", "0", "", (0, 1, 2, 3)), [1]),
        (make_group("gloo", "2", "tp", (1, 3)), [1]),
        (make_group("nccl", "2", "tp", (1, 3)), [1]),
    ]
    assert record.lines[0].calls == (Call(1, "all_reduce", 12, "4x3", "bfloat16", ended=True),)
    assert not record.lines[1].calls[0].ended


@pytest.mark.parametrize(
    ("first", "recording", "whole"), [(1, True, True), (2, True, False), (1, False, False)], ids=["all", "lost", "off"]
)
def test_whether_nothing_was_left_out(first: int, recording: bool, whole: bool) -> None:
    assert build([entry("gloo:all_reduce", first)], recording=recording).whole is whole
    assert build([], recording=recording).whole is recording


def test_a_recorder_that_is_off_says_nothing() -> None:
    assert build_record(1, [{"version": "2.10"}], MEMBERS, recording=False) == Record(1, whole=False)


def test_tensors_that_travel_together_and_those_without_size() -> None:
    several = entry("gloo:all_reduce", 1, input_sizes=[[2], [], [3], [4], [5]], input_dtypes=["Float", "Int"] * 2)
    empty = entry("gloo:barrier", 2, input_sizes=[], input_dtypes=[])
    (line,) = build([several, empty]).lines
    first, second = line.calls
    assert (first.elements, first.sizes, first.dtype) == (15, "2, 1, 3 and 2 more", "float32 and int32")
    assert (second.elements, second.sizes, second.dtype) == (0, "", "")


def test_transfers_are_no_collectives_and_the_open_one_is_told() -> None:
    old = entry("nccl:send 0->1", 1, ("2", "mesh_pp"), is_p2p=True, retired=False)
    new = entry("nccl:recv 0<-1", 3, ("2", "mesh_pp"), is_p2p=True, retired=False)
    record = build([old, entry("nccl:all_reduce", 2), new])
    assert [line.group.name for line in record.lines] == ["0"]
    assert record.transfer == "recv from rank 3"
    assert build([old, entry("nccl:all_reduce", 2)]).transfer == ""
    assert build([{**new, "retired": True}]).transfer == ""


def test_a_group_that_is_not_known_any_more_has_no_ranks() -> None:
    (line,) = build([entry("gloo:all_reduce", 1, ("7", "undefined"))]).lines
    assert line.group == make_group("gloo", "7", "", ())


def test_numbers_that_begin_anew_are_of_a_new_group() -> None:
    kept = trim_calls([call(1), call(2), call(3, ended=False), call(1), call(2, ended=False)])
    assert kept == (call(1), call(2, ended=False))


def test_of_calls_with_one_number_the_first_stands_for_all() -> None:
    assert trim_calls([call(1), call(1, ended=False), call(2)]) == (call(1), call(2))


def test_an_open_call_before_one_that_is_over_holds_nobody() -> None:
    assert find_open([call(1, ended=False), call(2), call(3, ended=False)]) == [call(3, ended=False)]


@given(st.lists(st.booleans(), max_size=40))
def test_few_are_kept_and_those_that_matter(ended: list[bool]) -> None:
    """In order, the last one, and the first one of those that are open at the end."""
    calls = [call(number, ended=each) for number, each in enumerate(ended, 1)]
    kept = trim_calls(calls)
    assert len(kept) <= LAST + FIRST_OPEN
    assert list(kept) == sorted(set(kept), key=lambda each: each.number)
    assert kept[-1:] == tuple(calls[-1:])
    assert [*find_open(kept)][:1] == [*find_open(calls)][:1]


def test_a_record_arrives_as_it_was_written() -> None:
    record = build([entry("gloo:all_reduce", 1), entry("gloo:broadcast", 2)])
    assert read_record(json.loads(json.dumps(asdict(record)))) == record


@given(st.lists(st.integers(0, 40), unique=True))
def test_a_group_has_its_ranks_in_their_order(ranks: list[int]) -> None:
    assert make_group("gloo", "0", "", ranks).ranks == tuple(ranks)


def test_the_record_of_a_rank_among_thousands_is_small() -> None:
    members = {"0": tuple(range(16384)), "1": tuple(range(5, 16384, 8))}
    entries = [entry("nccl:all_reduce", number, (str(number % 2), "")) for number in range(1, 2001)]
    record = build_record(5, [{"entries": entries}], members, recording=True)
    assert [len(line.group.ranks) for line in record.lines] == [16384, 2048]
    assert len(json.dumps(asdict(record))) < 4000


@pytest.mark.parametrize("span", [[0, 1], [0, 1, -1], [0, 1, 10**9], "abc"])
def test_a_span_of_something_else_is_no_record(span: object) -> None:
    facts = asdict(build([entry("gloo:all_reduce", 1)]))
    facts["lines"][0]["group"]["spans"] = [span]
    with pytest.raises(ValueError, match=r"spans|a group with"):
        read_record(facts)
