"""The records of an attempt, read whatever became of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardway.rundir.attempts import Attempt, AttemptStart, Ending, Result, Submission


def damaged(path: Path, **changed: Any) -> None:
    """Other values in a record of JSON."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    attempt = Attempt(tmp_path / "attempts/0001")
    attempt.make()
    attempt.write_submission(Submission("slurm", "token", "17", submitted=1.0, asked={"nodes": 2}))
    attempt.write_started(AttemptStart("17", "n1", "n1 n2", 2.0, 3.0))
    attempt.write_result(Result(Ending.FINISHED, "done", 5, 0, by="rank 0", ended=4.0))
    return attempt


def test_what_was_written_is_read(attempt: Attempt) -> None:
    assert attempt.read_submission() == Submission("slurm", "token", "17", submitted=1.0, asked={"nodes": 2})
    assert attempt.read_started() == AttemptStart("17", "n1", "n1 n2", 2.0, 3.0)
    assert attempt.read_result() == Result(Ending.FINISHED, "done", 5, 0, by="rank 0", ended=4.0)


def test_a_value_of_another_type_is_left_out(attempt: Attempt) -> None:
    damaged(attempt.submission_path, submitted={"x": 1}, asked="nodes")
    assert attempt.read_submission() == Submission("slurm", "token", "17")
    damaged(attempt.started_path, deadline=[3.0], started="soon")
    assert attempt.read_started() == AttemptStart("17", "n1", "n1 n2")
    damaged(attempt.result_path, failure=0.5, step="five", ended=10**400)
    assert attempt.read_result() == Result(Ending.FINISHED, "done", 0, 0, by="rank 0")


@pytest.mark.parametrize("job", [17, None, ["17"], "1\0"])
def test_a_record_without_its_job_is_none(attempt: Attempt, job: Any) -> None:
    damaged(attempt.started_path, job=job)
    assert attempt.read_started() is None


def test_an_ending_that_nobody_knows_is_lost(attempt: Attempt) -> None:
    damaged(attempt.result_path, state="melted")
    found = attempt.read_result()
    assert found is not None
    assert (found.state, found.reason) == (Ending.UNKNOWN, "done")


@pytest.mark.parametrize("content", [b"", b"[" * 10**5, b"\xff", b"null", b"[]", b'{"state": 1}', b"9" * 5000])
def test_a_record_that_cannot_be_read_is_none(attempt: Attempt, content: bytes) -> None:
    for path in attempt.record_paths:
        path.write_bytes(content)
    assert (attempt.read_submission(), attempt.read_started(), attempt.read_result()) == (None, None, None)
