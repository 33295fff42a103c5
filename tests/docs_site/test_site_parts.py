"""The parts of the site's tools: each fault of a page is found, links lead where they lead on a forge, the recorder
reads a terminal as a terminal does."""

from __future__ import annotations

from pathlib import Path

import pytest

from outside import ROOT, modules_of
from shardway.launch.schedulers.base import _rules_for_all
from shardway.resolve.rules import RULES

with modules_of("tools/docs_site"):
    from build import link_names, map_prose, name_of_file, rewrite_links
    from check import find_problems
    from error_pages import list_error_pages
    from reference import EVENTS, list_events, list_exit_codes
    from terminal import Recording, Screen, record, render_svg


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ('<a href="other.html">x</a>', "page.html: the link other.html leads nowhere"),
        ('<a href="page.html#no">x</a>', "page.html: page.html#no names no heading of that page"),
        ('<script src="https://unpkg.com/x"></script>', "page.html: https://unpkg.com/x is loaded from another host"),
        ('<img src="//host/x.png" alt="">', "page.html: //host/x.png is loaded from another host"),
        ('<img src="x.png" alt="">', "page.html: there is no x.png"),
        ('<img src="page.html">', "page.html: a picture has no text in its place"),
        ("<h1>a</h1><h3>b</h3>", "page.html: headings leave a level out"),
    ],
)
def test_a_fault_of_a_page_is_found(tmp_path: Path, body: str, fault: str) -> None:
    (tmp_path / "page.html").write_text(f'<p id="here">{body}', encoding="utf-8")
    assert find_problems(tmp_path) == [fault]


def test_a_sound_page_has_no_fault(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "index.html").write_text(
        '<h1 id="a">a</h1><a href="in/">x</a><a href="https://a.b">y</a>', encoding="utf-8"
    )
    (tmp_path / "in" / "index.html").write_text('<a href="../index.html#a">x</a>', encoding="utf-8")
    assert find_problems(tmp_path) == []


def test_links_lead_where_they_lead_on_a_forge() -> None:
    linked: dict[str, Path] = {}
    text = (
        "[a](plan.md#emit) [b](../AGENTS.md) [c](../examples/default.toml) [d](decisions) [e](../README.md) "
        "[f](https://example.org)\n```text\n[g](nowhere.md)\n```"
    )
    made = rewrite_links(text, ROOT / "docs" / "start.md", "start.md", linked)
    assert made.startswith(
        "[a](plan.md#emit) [b](project/agents.md) [c](files/examples/default.toml.md) [d](decisions/index.md) "
        "[e](index.md) [f](https://example.org)\n"
    )
    assert "[g](nowhere.md)" in made
    assert linked == {"files/examples/default.toml.md": ROOT / "examples" / "default.toml"}
    with pytest.raises(SystemExit, match=r"start\.md: the link nowhere\.md leads nowhere"):
        rewrite_links("[x](nowhere.md)", ROOT / "docs" / "start.md", "start.md", {})


def test_the_first_mention_of_a_key_or_verb_is_a_link() -> None:
    pages = {"reference/keys/train.md": "", "reference/verbs/status.md": ""}
    left = "# `train.steps`\n[`train.seed`](x) and `train.seed`\n`no.key` `shardway no`"
    made = link_names(f"{left}\n`train.steps = 3`, `train.steps`, `shardway status my`", "howto/a.md", pages)
    assert made == (
        f"{left}\n[`train.steps = 3`](../reference/keys/train.md#train.steps), `train.steps`, "
        "[`shardway status my`](../reference/verbs/status.md)"
    )
    assert link_names(made, "reference/verbs/status.md", pages) == made


def test_blocks_of_code_are_left_alone() -> None:
    assert map_prose("a\n````\na\n```\na\n````\na", str.upper) == "A\n````\na\n```\na\n````\nA"
    assert name_of_file(ROOT / "examples") == "files/examples/index.md"


def test_every_rule_ending_event_and_code_has_a_page() -> None:
    names = {page.name for page in list_error_pages()}
    assert {f"job-{rule['code']}" for rule in _rules_for_all()} - names == {"job-completed"}
    assert len([name for name in names if name.startswith("rule-")]) >= len({rule.__name__ for rule in RULES}) - 1
    assert {f"exit-{number}" for number, *_ in list_exit_codes()} <= names
    assert {doc.name for doc in list_events()} == EVENTS.keys()


def test_a_screen_is_read_as_a_terminal_reads_it() -> None:
    screen = Screen(10, 3)
    screen.feed("one\r\n\x1b[1;32mtwo\x1b[0m!\r\nthree\r\nfour\x1b[")
    assert screen.lines() == [[["two", "b c-green"], ["!", ""]], [["three", ""]], [["four", ""]]]
    screen.feed("1A\r\x1b[2Kover")
    assert screen.lines()[1:] == [[["over", ""]], [["four", ""]]]
    screen.feed("\r0123456789abc")
    assert [line[0][0] for line in screen.lines()] == ["two", "0123456789", "abcr"]


def test_a_recording_has_what_commands_printed(tmp_path: Path) -> None:
    recording = record(("printf 'a\\nb\\n'", "echo c; sleep 0.1; echo d"), tmp_path)
    assert isinstance(recording, Recording)
    assert recording.faster == [1.0, 1.0]
    session: dict[str, object] = {"rows": 26, "columns": 92, "frames": recording.frames}
    picture = render_svg(session)
    assert all(f">{letter}</text>" in picture for letter in "abcd")
    with pytest.raises(SystemExit, match="false ended with code 1"):
        record(("false",), tmp_path)
