"""Messages to the owner of a run: to a server and a mailer of this machine, one an event, without the secret."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from commands import stalling, training_commands
from runs import TINY, Died, die_at, lone_rank, train_tiny
from shardway.errors import UserError
from shardway.rundir import notify as module
from shardway.rundir.directory import RunDir
from shardway.rundir.notify import notify
from shardway.runfile.load import load_run
from shardway.runfile.schema import NotifySection

HOOK = 'notify.webhook="TEAM_HOOK"'


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[dict[str, str], bytes]]]:
    """What was posted to the URL in TEAM_HOOK; a path with "refused" answers 403, one with "slow" too late."""
    posted: list[tuple[dict[str, str], bytes]] = []
    done = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if "slow" in self.path:
                done.wait(5)
            posted.append((dict(self.headers.items()), body))
            self.send_response(403 if "refused" in self.path else 200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    found = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=found.serve_forever, daemon=True, kwargs={"poll_interval": 0.01})
    thread.start()
    monkeypatch.setenv("TEAM_HOOK", f"http://127.0.0.1:{found.server_port}/services/s3cr3t")
    yield posted
    done.set()
    found.shutdown()
    found.server_close()
    thread.join()


def make_run(path: Path) -> RunDir:
    run = RunDir(path / "speech")
    run.create()
    run.write_status(state="running", step=40, total_steps=100, loss=1.25)
    return run


def send(run: RunDir, kind: str = "failure", **targets: Any) -> list[str]:
    given = NotifySection(**{"webhook": "TEAM_HOOK", **targets})
    return notify(run, given, kind, "failed", "rank 3 died\nwith details")


def test_a_webhook_gets_one_message_an_event(server: list[tuple[dict[str, str], bytes]], tmp_path: Path) -> None:
    run = make_run(tmp_path)
    assert [send(run), send(run), send(run, "end"), send(run, "no_progress")] == [[], [], [], []]
    texts = [json.loads(body)["text"] for _, body in server]
    assert [text.splitlines()[0] for text in texts] == [
        "shardway: run speech failed at step 40 of 100",
        "shardway: run speech made no progress at step 40 of 100",
    ]
    for part in ("rank 3 died", "loss       1.2500", f"shardway status {run.path}"):
        assert part in texts[0]


def test_each_start_of_a_long_run_has_its_own_message(
    server: list[tuple[dict[str, str], bytes]], tmp_path: Path
) -> None:
    """The start is far from the end of the events; the status is older than the last step."""
    run = make_run(tmp_path)
    for epoch in (1, 2):
        with run.event_writer(0) as writer:
            writer.write("started", step=0, epoch=epoch)
            for step in range(1, 3001):
                writer.keep("step", step=100 * epoch + step, loss=0.75, seconds=0.1, filler="x" * 60)
            writer.flush()
        assert [event for event in run.last_events() if event["event"] == "started"] == []
        assert [send(run), send(run)] == [[], []]
    texts = [json.loads(body)["text"] for _, body in server]
    assert [text.splitlines()[0] for text in texts] == [
        "shardway: run speech failed at step 3100 of 100",
        "shardway: run speech failed at step 3200 of 100",
    ]
    assert "loss       0.7500" in texts[0]


def test_ntfy_gets_text_and_a_title(server: list[tuple[dict[str, str], bytes]], tmp_path: Path) -> None:
    assert send(make_run(tmp_path), form="ntfy") == []
    [(headers, body)] = server
    assert headers["Title"] == "shardway: run speech failed at step 40 of 100"
    assert body.decode().startswith("rank 3 died")


def test_what_was_not_asked_for_is_not_sent(server: list[tuple[dict[str, str], bytes]], tmp_path: Path) -> None:
    assert send(make_run(tmp_path), "end", on=["failure"]) == []
    assert server == []


def test_a_webhook_that_fails_or_hangs_costs_little_and_shows_no_secret(
    server: list[tuple[dict[str, str], bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    url = os.environ["TEAM_HOOK"]
    found = []
    for number, other in enumerate((f"{url}/refused", "http://127.0.0.1:1/s3cr3t", "s3cr3t", "")):
        monkeypatch.setenv("TEAM_HOOK", other)
        found += send(make_run(tmp_path / str(number)))
    assert found == [
        "notify.webhook: not sent: the server answered 403",
        "notify.webhook: not sent: Connection refused",
        "notify.webhook: not sent: ValueError",
        "notify.webhook: not sent: the variable TEAM_HOOK is not set here",
    ]
    monkeypatch.setenv("TEAM_HOOK", f"{url}/slow")
    monkeypatch.setattr(module, "MOST_S", 0.1)
    started = time.perf_counter()
    assert send(make_run(tmp_path / "slow")) == ["notify: not sent within 0 s"]
    assert time.perf_counter() - started < 1


def test_mail_goes_through_the_mailer_of_the_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mailer, sent = tmp_path / "bin" / "sendmail", tmp_path / "sent"
    mailer.parent.mkdir()
    mailer.write_text(f'#!/bin/bash\necho "$@" > {sent}\ncat >> {sent}\n')
    mailer.chmod(0o755)
    monkeypatch.setenv("PATH", f"{mailer.parent}:/usr/bin:/bin")
    assert send(make_run(tmp_path), webhook="", mail="me@example.org") == []
    lines = sent.read_text().splitlines()
    assert lines[:3] == [
        "-i -- me@example.org",
        "To: me@example.org",
        "Subject: [shardway] run speech failed at step 40 of 100",
    ]


def test_a_run_reports_its_end_and_its_failure(server: list[tuple[dict[str, str], bytes]], tmp_path: Path) -> None:
    with pytest.raises(Died):
        train_tiny(tmp_path / "run", lone_rank(), HOOK, "train.steps=6", before_step=die_at(3))
    train_tiny(tmp_path / "run", lone_rank(), HOOK, "train.steps=6")
    train_tiny(tmp_path / "other", lone_rank(), "train.steps=6")
    first = [json.loads(body)["text"].splitlines()[0] for _, body in server]
    assert first == ["shardway: run run failed at step 3 of 6", "shardway: run run finished at step 6 of 6"]
    for path in (tmp_path / "run").rglob("*"):
        assert not path.is_file() or b"s3cr3t" not in path.read_bytes(), path


@pytest.mark.exhaustive
def test_a_rank_that_hangs_is_reported_with_its_step(
    server: list[tuple[dict[str, str], bytes]], tmp_path: Path
) -> None:
    """A real rank that waits for a batch which never comes: a message, and one more once the run has ended."""
    words = ("--nproc", "1", "run.hang_timeout=2s", HOOK, *TINY, "train.steps=8")
    with training_commands(tmp_path) as start:
        command = start("run", *words, environ=stalling(0, 5, tmp_path / "stalled"))
        command.finish()
    texts = [json.loads(body)["text"].splitlines() for _, body in server]
    assert [lines[0] for lines in texts] == [
        "shardway: run run made no progress at step 5 of 8",
        "shardway: run run finished at step 8 of 8",
    ]
    assert texts[0][1].startswith("rank 0 did nothing for 2.0 s while waiting for data after step 5")


def test_a_run_that_cannot_send_states_it_when_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module.shutil, "which", lambda *_: None)
    seen: list[str] = []
    words = (HOOK, 'notify.mail="me@example.org"', "train.steps=6")
    train_tiny(tmp_path, lone_rank(), *words, before_step=lambda run, step: seen.append(capsys.readouterr().err))
    assert "notify.webhook: the variable TEAM_HOOK is not set here" in seen[0]
    assert "notify.mail: this node has neither sendmail nor mail" in seen[0]


@pytest.mark.parametrize("word", ["notify.webhook=https://hooks.example.org/s3cr3t", "notify.mail=-oQ/tmp"])
def test_a_url_or_an_option_in_the_run_file_is_refused(word: str) -> None:
    with pytest.raises(UserError, match=r"notify\.") as error:
        load_run(None, [word])
    assert "allowed: " in str(error.value)
    assert "s3cr3t" not in str(error.value)
