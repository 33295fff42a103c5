"""The program of a job that serves, against a small server over loopback that is late, dies, hangs or does not obey."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from job_cases import wait_until

import stand_in_server
from shardway.launch.serving import watcher
from shardway.launch.serving.state import ServingState, parse_serving
from shardway.rundir.attempts import Attempt, Ending

STAND_IN = stand_in_server.__file__


class Watched:
    """An attempt whose program runs."""

    def __init__(self, folder: Path) -> None:
        self.attempt = Attempt(folder / "attempts/0001")
        self.attempt.make()
        self.stop = folder / "stop"
        self.process: subprocess.Popen[str] | None = None

    def start(self, behaviour: str = "", **changes: Any) -> Watched:
        attempt = self.attempt
        spec = {
            "server": "stand-in",
            "path": "/models/m",
            "request_name": "m",
            "tp": 1,
            "words": ["python3", "-S", STAND_IN, "--host", "{host}", "--port", "{port}"],
            "environment": {"STAND_IN": behaviour},
            "drops": ["MASTER_PORT"],
            "key_variable": "VLLM_API_KEY",
            "key_config": "",
            "host": "127.0.0.1",
            "port": 0,
            "health": "/health",
            "export": [],
            "start_s": 60.0,
            "grace_s": 0.3,
            "serving": str(attempt.serving_path),
            "api_key": str(attempt.api_key),
            "server_key": str(attempt.server_key),
            "log": str(attempt.server_log),
            "export_log": str(attempt.export_log),
            "result": str(attempt.result_path),
            "stop": str(self.stop),
            **changes,
        }
        attempt.serve_request.write_text(json.dumps(spec))
        words = [sys.executable, "-S", "-E", watcher.__file__, str(attempt.serve_request)]
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        return self

    @property
    def state(self) -> ServingState | None:
        path = self.attempt.serving_path
        return parse_serving(path.read_text()) if path.exists() else None

    def wait(self, state: str) -> ServingState:
        wait_until(lambda: self.state is not None and self.state.state == state)
        found = self.state
        assert found is not None
        return found

    def end(self) -> tuple[int, str]:
        """Its exit code and what it printed, once it has ended."""
        assert self.process is not None
        printed, _ = self.process.communicate(timeout=60)
        return self.process.returncode, printed

    def kill(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.communicate()


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    each = Watched(tmp_path)
    yield each
    each.kill()


def is_listening(port: int) -> bool:
    with socket.socket() as trial:
        return trial.connect_ex(("127.0.0.1", port)) == 0


def test_a_server_that_is_late_is_ready_then_and_ends_by_the_stop_file(watched: Watched) -> None:
    watched.start("late:0.4")
    ready = watched.wait("ready")
    assert ready.ready_s is not None
    assert ready.ready_s >= 0.4
    assert is_listening(ready.port)
    watched.stop.write_text("stopped by a person\n")
    code, printed = watched.end()
    ended = watched.wait("ended")
    assert (code, is_listening(ready.port)) == (0, False)
    assert ended.reason == "asked to stop: stopped by a person"
    assert watched.attempt.read_result() is None, "the job script says how a stop ended"
    key = watched.attempt.api_key.read_text().strip()
    assert len(key) >= 43
    assert stat.S_IMODE(watched.attempt.api_key.stat().st_mode) == 0o600
    assert key not in printed + watched.attempt.serving_path.read_text() + watched.attempt.serve_request.read_text()


def test_a_server_that_dies_gives_the_reason(watched: Watched) -> None:
    watched.start("dies:loading\nValueError: Model architectures ['X'] are not supported\nbye")
    code, _ = watched.end()
    result = watched.attempt.read_result()
    assert (code, watched.wait("ended").lines[-1]) == (1, "bye")
    assert result is not None
    assert result.state is Ending.CRASHED
    assert result.reason == (
        "stand-in ended with exit code 3 before it was ready: ValueError: Model architectures ['X'] are not supported"
    )


def test_a_server_without_memory_is_out_of_memory(watched: Watched) -> None:
    watched.start("dies:torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB")
    watched.end()
    result = watched.attempt.read_result()
    assert result is not None
    assert result.state is Ending.OUT_OF_MEMORY


def test_a_server_that_hangs_is_ended_in_time(watched: Watched) -> None:
    watched.start("hangs", start_s=0.3)
    code, _ = watched.end()
    assert (code, watched.wait("ended").reason) == (1, "stand-in was not ready within 0.3 s")


def test_lost_health_is_recorded_and_a_deaf_server_is_killed(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    text = Path(watcher.__file__).read_text().replace("HEALTH_S = 5.0", "HEALTH_S = 0.1")
    short = watched.attempt.serve_program
    short.write_text(text)
    monkeypatch.setattr(watcher, "__file__", str(short))
    watched.start("loses:0.6")
    ready = watched.wait("ready")
    wait_until(lambda: watched.state is not None and not watched.state.healthy)
    assert "health was lost" in watched.wait("ready").reason
    assert watched.process is not None
    watched.process.send_signal(signal.SIGTERM)
    assert watched.end()[0] == 0
    assert not is_listening(ready.port)


def test_a_server_that_ignores_sigterm_is_killed(watched: Watched) -> None:
    watched.start("deaf")
    ready = watched.wait("ready")
    watched.stop.touch()
    code, printed = watched.end()
    assert (code, is_listening(ready.port)) == (0, False)
    assert "did not end within 0.3 s of SIGTERM, and is killed" in printed


def test_a_port_in_use_gives_way_to_another(watched: Watched) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        watched.start(port=port)
        ready = watched.wait("ready")
        watched.stop.touch()
        _, printed = watched.end()
    assert ready.port != port
    assert f"port {port} is in use on this node" in printed


def test_a_port_that_is_taken_meanwhile_gives_way_too(watched: Watched) -> None:
    watched.start("dies:OSError: [Errno 98] Address already in use")
    code, printed = watched.end()
    assert (code, printed.count("was taken by another program meanwhile")) == (1, watcher.PORTS - 1)


def test_a_key_in_a_file_of_options_is_private(watched: Watched) -> None:
    words = ["python3", "-c", "import sys; print(open(sys.argv[1]).read()); raise RuntimeError('seen')", "{key_file}"]
    watched.start(key_variable="", key_config="api-key: {key}\n", words=words)
    watched.end()
    key = watched.attempt.api_key.read_text().strip()
    assert stat.S_IMODE(watched.attempt.server_key.stat().st_mode) == 0o600
    assert watched.attempt.server_key.read_text() == f"api-key: {key}\n"
    state = watched.wait("ended")
    assert key not in watched.attempt.serving_path.read_text(), "a server that prints its key shows it nowhere else"
    assert "api-key: ***" in state.lines


def test_a_checkpoint_is_exported_once_and_whole(watched: Watched, tmp_path: Path) -> None:
    folder = tmp_path / "exports/step-00000004"
    make = "import os, sys; os.mkdir(sys.argv[1]); open(os.path.join(sys.argv[1], 'config.json'), 'w')"
    watched.start(export=[sys.executable, "-c", make, "{folder}"], path=str(folder))
    watched.wait("ready")
    watched.stop.touch()
    watched.end()
    assert os.listdir(folder.parent) == ["step-00000004"]


def test_an_export_that_fails_is_the_reason(watched: Watched, tmp_path: Path) -> None:
    watched.start(
        export=[sys.executable, "-c", "raise SystemExit('JobError: no disk')", "{folder}"],
        path=str(tmp_path / "exports/step-00000004"),
    )
    assert watched.end()[0] == 1
    result = watched.attempt.read_result()
    assert result is not None
    assert "could not be exported" in result.reason


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (["x", "ValueError: the root", "RuntimeError: Engine core initialization failed. See root cause above."], 0),
        (["all is well", "the last one"], 1),
        ([], None),
    ],
)
def test_the_line_that_explains_an_end(lines: list[str], reason: int | None) -> None:
    expected = {0: "ValueError: the root", 1: "the last one", None: ""}[reason]
    assert watcher.find_reason(lines) == expected
