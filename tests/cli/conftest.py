"""The command line in this process, in a folder of its own, as on a machine without accelerators or scheduler."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import Ended, Shardway

from shardway.cli import train
from shardway.cli.main import app, run_guarded
from shardway.hardware import probe
from shardway.rundir import lease


def list_log_handlers() -> list[logging.Handler]:
    """Those of every library's logger."""
    named = [each for each in logging.root.manager.loggerDict.values() if isinstance(each, logging.Logger)]
    return [handler for logger in (logging.root, *named) for handler in logger.handlers]


@pytest.fixture
def shardway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Shardway]:
    """`shardway("train", "train.steps=2")`, run in tmp_path. No output may hold a traceback."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # what a run would set for its ranks
    for name in ("CACHE", "CONFIG", "STATE"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name.lower()))
    monkeypatch.setattr(probe, "_list_nvidia_devices", tuple)
    monkeypatch.setattr(train, "REFRESH_S", 0.01)
    monkeypatch.setattr(lease, "PAUSE_S", 0.001)
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> Ended:
        capsys.readouterr()
        for handler in list_log_handlers():
            if isinstance(handler, logging.StreamHandler) and getattr(handler.stream, "closed", False):
                handler.stream = sys.stderr  # it has that of the test that imported a library
                monkeypatch.setattr(handler, "flush", sys.stderr.flush)
        code = run_guarded(lambda: app(list(words), standalone_mode=False, prog_name="shardway"))
        said = capsys.readouterr()
        assert "Traceback" not in said.err
        return Ended(code, said.out, said.err)

    torch = sys.modules.get("torch")
    threads = torch.get_num_threads() if torch else 0
    yield run
    if torch:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(False)
