"""What agents tell each other arrives as it was said, or not at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardway.ranks.evidence import Call, CallTimeline, HangEvidence, Record, RecordedGroup, StackGroup
from shardway.ranks.failure import LaunchOutcome, RankFailure
from shardway.ranks.hang import Hang, Sighting, SlowestRank, StoppedProcess
from shardway.ranks.heartbeat import Activity, HeartbeatEntry
from shardway.ranks.rendezvous import AgentState, News, Note, read_news, read_note, render

WHOLE = st.integers(0, 9999)
RANKS = st.lists(WHOLE, max_size=3).map(tuple)
BEHIND = st.builds(SlowestRank, st.none() | st.tuples(WHOLE, WHOLE), st.booleans())
ENTRIES = st.builds(HeartbeatEntry, WHOLE, WHOLE, st.sampled_from(list(Activity)), WHOLE, st.floats(0, 1e9))
HANGS = st.builds(
    Hang,
    RANKS,
    st.floats(0, 1e6),
    st.floats(0, 1e6),
    st.builds(Sighting, ENTRIES, st.sampled_from(StoppedProcess)),
    st.booleans(),
)
GROUPS = st.lists(st.builds(StackGroup, RANKS, st.lists(st.text(max_size=9), max_size=2).map(tuple)), max_size=2)
CALLS = st.builds(Call, WHOLE, st.text(max_size=9), WHOLE, st.text(max_size=9), st.text(max_size=9), st.booleans())
SPANS = st.lists(st.tuples(WHOLE, WHOLE, WHOLE), max_size=2).map(tuple)
TEAMS = st.builds(RecordedGroup, st.text(max_size=4), st.text(max_size=4), st.text(max_size=4), SPANS)
LINES = st.lists(st.builds(CallTimeline, TEAMS, st.lists(CALLS, max_size=2).map(tuple)), max_size=2).map(tuple)
RECORDS = st.lists(st.builds(Record, WHOLE, LINES, st.booleans(), st.text(max_size=9)), max_size=2).map(tuple)
SEEN = st.builds(HangEvidence, RECORDS, RANKS, GROUPS.map(tuple))
PRINTED = st.just((Path("a b/stderr.log"),))
FLAGS = {"by_agent": st.booleans(), "for_memory": st.booleans()}
FAILURES = st.builds(RankFailure, WHOLE, WHOLE, st.integers(-64, 255), PRINTED, **FLAGS)
OUTCOMES = st.builds(
    LaunchOutcome,
    st.lists(FAILURES, max_size=2).map(tuple),
    st.none() | HANGS,
    SEEN,
    st.booleans(),
    st.booleans(),
)
NOTES = st.builds(Note, WHOLE, WHOLE, st.sampled_from(list(AgentState)), BEHIND, st.none() | OUTCOMES)
NEWS = st.builds(
    News, WHOLE, WHOLE, RANKS, WHOLE, RANKS, st.booleans(), st.booleans(), BEHIND, st.none() | st.integers(0, 255)
)


@given(NOTES)
def test_a_note_arrives_as_it_was_written(note: Note) -> None:
    assert read_note(render(note)) == note


@given(NEWS)
def test_news_arrive_as_they_were_written(news: News) -> None:
    assert read_news(render(news)) == news


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", "[" * 5000, '{"count": 1}', "\x00"])
def test_anything_else_is_no_note_and_no_news(text: str) -> None:
    assert read_note(text) is None
    assert read_news(text) is None


@given(NOTES, st.data())
def test_a_note_that_lacks_a_part_is_none(note: Note, data: st.DataObject) -> None:
    facts = json.loads(render(note))
    del facts[data.draw(st.sampled_from(sorted(facts)))]
    assert read_note(json.dumps(facts)) is None
