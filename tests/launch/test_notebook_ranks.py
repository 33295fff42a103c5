from __future__ import annotations

import os
import time
import types
from pathlib import Path
from typing import Any

import pytest

import shardway
from shardway.errors import JobError, UserError
from shardway.launch.calls import notebook

pytestmark = pytest.mark.usefixtures("functions_by_value")


def place() -> tuple[str, ...]:
    """Where a rank finds itself."""
    print("hello\nfrom", os.environ["RANK"], end="")
    return tuple(os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"))


def test_rank_0_gives_the_value_and_all_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert shardway.notebook_launch(place, nproc=2) == ("0", "2", "0", "2", "127.0.0.1")
    assert sorted(capsys.readouterr().out.splitlines()) == ["0: from 0", "0: hello", "1: from 1", "1: hello"]


def fail(pids: str) -> None:
    """Rank 1 raises, rank 0 waits for it."""
    Path(pids, os.environ["RANK"]).write_text(str(os.getpid()))
    if os.environ["RANK"] == "1":
        raise KeyError("bad")
    time.sleep(600)


def is_gone(path: Path) -> bool:
    """Whether the process of this file has ended."""
    return not Path(f"/proc/{path.read_text()}/fd/1").exists()


def test_the_error_of_a_rank_is_raised_and_none_is_left(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="bad") as raised:
        shardway.notebook_launch(fail, str(tmp_path))
    assert raised.value.__notes__ == ["raised by fail, rank 1 of 2"]
    assert "in fail" in str(raised.value.__cause__)
    assert all(map(is_gone, tmp_path.iterdir()))


def die() -> None:
    """Rank 1 is killed, as for want of memory."""
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), 9)
    time.sleep(600)


def test_a_rank_that_was_killed_is_named() -> None:
    with pytest.raises(JobError, match=r"^rank 1 of die was killed by SIGKILL, most often since memory ran out; "):
        shardway.notebook_launch(die)


def wait(pids: str) -> None:
    """Wait for ever, with a child."""
    import subprocess

    child = subprocess.Popen(["sleep", "600"])
    Path(pids, f"child-{os.environ['RANK']}").write_text(str(child.pid))
    Path(pids, os.environ["RANK"]).write_text(str(os.getpid()))
    child.wait()


def test_an_interrupt_ends_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def look(pause_s: float) -> None:
        if len(list(tmp_path.iterdir())) == 4 and all(path.read_text() for path in tmp_path.iterdir()):
            raise KeyboardInterrupt
        time.sleep(pause_s)

    monkeypatch.setattr(notebook, "time", types.SimpleNamespace(sleep=look, monotonic=time.monotonic))
    with pytest.raises(KeyboardInterrupt):
        shardway.notebook_launch(wait, str(tmp_path))
    assert all(map(is_gone, tmp_path.iterdir()))


def train(folder: str) -> tuple[int, list[float], int]:
    """A run of two ranks."""
    import torch
    from torch.nn import functional

    import shardway

    generator = torch.Generator().manual_seed(0)
    data = [(torch.randn(4, generator=generator), torch.randn(1, generator=generator)) for _ in range(32)]
    words = ("run.device=cpu", "run.threads=1", "run.display=off", "run.telemetry=off", "checkpoint.every=off")
    with shardway.start(*words, directory=folder) as run:
        model = run.shard(torch.nn.Linear(4, 1))
        optimizer = run.optimizer(torch.optim.SGD, model, lr=0.1)
        losses = [run.step(model, b, functional.mse_loss) for b in run.steps(run.loader(data, batch_size=8), 4)]
        return run.session.ranks.world, losses, len(optimizer.param_groups)


def test_a_run_within_finds_its_ranks(tmp_path: Path, warm_starts: None) -> None:
    world, losses, groups = shardway.notebook_launch(train, str(tmp_path / "run"), nproc=2)
    assert (world, len(losses), groups) == (2, 4, 1)
    run = shardway.Run(tmp_path / "run", frames="columns")
    assert run.steps["loss"] == pytest.approx(losses)
    assert run.events.row(0)["facts"]["world"] == 2


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: shardway.notebook_launch(place, nproc=0), "nproc=0: it counts processes"),
        (lambda: shardway.notebook_launch(place, 1), r"^place\(\).* does not take these arguments"),
        (lambda: shardway.notebook_launch("place"), r"^'place' is no function"),  # type: ignore[arg-type]
    ],
)
def test_a_mistake_starts_nothing(call: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        call()


def test_a_rank_starts_no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="this process is a rank itself"):
        shardway.notebook_launch(place)
