"""The error tree and the form in which problems are told."""

from __future__ import annotations

import pytest

from shardway.errors import (
    ERRORS_BY_NAME,
    Bug,
    Fenced,
    JobError,
    LostContact,
    Problem,
    ShardwayError,
    SiteError,
    UserError,
    check_no_problems,
    legible,
    render_problems,
    render_reason,
)

FULL = Problem("train.steps", "0 steps is no step at all", "run.toml:3", "at least 1 step", "raise it")
BARE = Problem("data.path", "is not set")


@pytest.mark.parametrize(
    ("kind", "code"), [(UserError, 2), (SiteError, 3), (JobError, 4), (LostContact, 4), (Fenced, 4), (Bug, 70)]
)
def test_each_error_has_its_exit_code(kind: type[ShardwayError], code: int) -> None:
    assert kind("what").exit_code == code
    assert issubclass(kind, ShardwayError)
    assert ERRORS_BY_NAME[kind.__name__] is kind


def test_errors_by_name_are_all_there_are() -> None:
    """But for errors of rooms above, which no rank raises."""
    direct = ShardwayError.__subclasses__()
    found = {*direct, *(below for kind in direct for below in kind.__subclasses__())}
    assert set(ERRORS_BY_NAME.values()) == {kind for kind in found if kind.__module__ == ShardwayError.__module__}


def test_a_problem_says_all_it_knows() -> None:
    assert FULL.render() == (
        "  train.steps (run.toml:3): 0 steps is no step at all\n      allowed: at least 1 step\n      to do: raise it"
    )
    assert BARE.render() == "  data.path: is not set"


def test_problems_are_counted() -> None:
    assert render_problems("run.toml", [BARE]) == "1 problem in run.toml\n  data.path: is not set"
    assert render_problems("run.toml", [BARE, FULL]) == f"2 problems in run.toml\n{BARE.render()}\n{FULL.render()}"


def test_problems_are_raised_together() -> None:
    with pytest.raises(UserError) as told:
        check_no_problems("run.toml", [BARE, FULL])
    assert str(told.value) == render_problems("run.toml", [BARE, FULL])
    check_no_problems("run.toml", [])


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("no space is left\n  To do: make room", "no space is left"),
        ("2 problems in run.toml\n  a.b: one\n  c.d: two", "2 problems in run.toml: a.b: one"),
        ("\n", "no reason was given"),
    ],
)
def test_a_reason_is_one_line_that_says_what(message: str, reason: str) -> None:
    assert render_reason(message) == reason


def test_what_a_terminal_would_obey_is_shown() -> None:
    said = "a \x1b[2Jb\0 \u202ec \ud800\n  é 漢 €"
    assert legible(said) == "a \\x1b[2Jb\\x00 \\u202ec \\ud800\n  é 漢 €"
    assert legible(said).encode()


def test_a_line_is_no_longer_than_a_person_reads() -> None:
    first, second, third = legible(f'short\n"{"x" * 10**6}" is no number\n  allowed: {"y" * 900}').split("\n")
    assert first == "short"
    assert second.startswith('"xxx')
    assert second.endswith('xxx" is no number')
    assert "(999065 characters)" in second
    assert len(second) < 1000
    assert third == f"  allowed: {'y' * 900}"
