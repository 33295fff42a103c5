"""What a verb prints into a pipe that nobody reads: it is waited for as long as it may be, and never for ever."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import TINY, write_text

from shardway.ranks import outputs
from shardway.ranks.outputs import EnduringOutput
from shardway.rundir.directory import RunDir

pytestmark = pytest.mark.usefixtures("warm_starts")

PAGE = 4096


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """A pipe with room for one page more, which poll(2) calls ready."""
    ours, theirs = os.pipe()
    fcntl.fcntl(theirs, fcntl.F_SETPIPE_SZ, 2 * PAGE)
    os.write(theirs, b"x" * PAGE)
    yield ours, theirs
    os.close(ours)
    os.close(theirs)


@pytest.mark.parametrize("text", ["y" * 3 * PAGE, "\u20ac" * 2 * PAGE, "\U0001f600\n" * PAGE])
@pytest.mark.parametrize("line_buffering", [False, True])
def test_a_text_of_several_pages_waits_for_none(
    text: str, line_buffering: bool, pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outputs, "_MAIN_S", 0.01)
    monkeypatch.setattr(outputs, "_LOOK_MS", 1)
    encoding = "ascii" if text.startswith("\U0001f600") else "utf-8"
    with open(
        os.dup(pipe[1]), "w", encoding=encoding, errors="backslashreplace", buffering=1 if line_buffering else -1
    ) as stream:
        output = EnduringOutput(stream)
        assert output.write(text) == len(text)
        for _ in range(20):
            output.write("z" * 100)
        output.leave()
        monkeypatch.setattr(output, "_until", time.monotonic())
        output.flush()
    os.set_blocking(pipe[0], False)
    read = os.read(pipe[0], 4 * PAGE)
    assert read.startswith(b"x" * PAGE)
    assert len(read) > PAGE  # what there was room for has arrived


def test_an_error_of_several_pages_keeps_no_run(pipe: tuple[int, int], tmp_path: Path) -> None:
    words = ["train", *(f"train.key_{number}=1" for number in range(60))]
    soon = "import runpy; from shardway.ranks import outputs; outputs._LEAVE_S = 0.5; "
    soon += "runpy.run_module('shardway', run_name='__main__')"
    with subprocess.Popen(
        [sys.executable, "-c", soon, *words], stdout=pipe[1], stderr=pipe[1], cwd=tmp_path
    ) as process:
        try:
            assert process.wait(60) == 2
        finally:
            process.kill()
    os.set_blocking(pipe[0], False)
    assert b"60 problems in the command line" in os.read(pipe[0], 4 * PAGE)


def test_a_log_on_a_full_disk_ends_no_run(tmp_path: Path) -> None:
    with open("/dev/full", "wb") as full:
        words = ("train", *TINY, "--dir", str(tmp_path / "run"))
        write_text(tmp_path)
        done = subprocess.run(
            [sys.executable, "-m", "shardway", *words], stdout=full, stderr=full, cwd=tmp_path, check=False
        )
    assert done.returncode == 0
    assert RunDir(tmp_path / "run").read_status()["state"] == "finished"
