from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from made_machines import make_nvidia

from shardway.cli.doctor import doctor
from shardway.errors import UserError
from shardway.hardware.probe import NvidiaState
from shardway.ranks.doctor import surroundings
from shardway.ranks.doctor.examine import CHECKS

RUN = """format = 1
[model]
dim = 64
layers = 2
heads = 4
vocab = 1000
[data]
kind = "synthetic"
[run]
device = "cpu"
[site]
account = "proj1"
image = "x.sif"
"""


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of its own, and a process that no launcher started."""
    for name in ("RANK", "WORLD_SIZE", "SLURM_JOB_ID", "PBS_JOBID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_one_line_a_check_and_always_0(
    bare: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(surroundings, "read_nvidia", lambda limit: NvidiaState("hung", "nvidia-smi does not answer"))
    assert doctor(directory=bare / "run", preflight=True) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("compared with laptop")
    assert any(line.startswith("fail  gpu.query        nvidia-smi does not answer") for line in lines)
    assert any(line.startswith("ok    fs.write") for line in lines)
    assert lines[-1].startswith("1 fail, ")
    assert doctor(directory=bare / "run", preflight=True, strict=True) == 3


def test_the_run_file_says_what_is_wanted(bare: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (bare / "run.toml").write_text(RUN)
    assert doctor(["run.toml"], preflight=True, as_json=True, strict=True) == 0
    told = json.loads(capsys.readouterr().out)
    rows = {row["check"]: row for row in told["checks"]}
    assert (told["site"], told["world"], told["missing"]) == ("laptop", 1, [])
    assert set(rows) == {name for name, check in CHECKS.items() if check.quick}
    assert "and 3 are kept" in rows["fs.space"]["found"]


def test_a_checkpoint_is_weights_and_moments(bare: Path) -> None:
    from shardway.ranks.doctor.examine import read_wanted
    from shardway.resolve.request import parse_words, resolve_request

    (bare / "run.toml").write_text(RUN)
    resolution = resolve_request(parse_words(["run.toml", "optim.name=adamw", "run.root=there"]))
    wanted = read_wanted(resolution)
    shape_parameters = (wanted.checkpoint_bytes or 0) / 12  # fp32 weights, and two moments of each
    assert 100_000 < shape_parameters < 400_000
    assert (wanted.folder, wanted.account, wanted.container, wanted.device) == (
        (Path("there/run"), "proj1", "container", "cpu")
    )
    assert (wanted.uses_hub, wanted.keep) == (False, 3)
    best = resolve_request(parse_words(["run.toml", "checkpoint.keep=2", "checkpoint.keep_best=4"]))
    assert read_wanted(best).keep == 6


def test_checkpoints_that_are_kept_for_ever_count() -> None:
    from shardway.ranks.doctor.examine import count_kept_for_ever
    from shardway.runfile.load import load_run

    def count(*words: str) -> int:
        return count_kept_for_ever(load_run(None, words).values)

    assert count("train.steps=1000") == 0
    assert count("train.steps=1000", "checkpoint.keep_every=300 steps") == 3
    assert count("train.steps=2 epochs", "checkpoint.keep_every=0.5 epochs") == 4
    assert count("train.steps=2 epochs", "checkpoint.keep_every=300 steps") == 0  # only the data can tell


def test_a_preflight_survives_a_broken_run_file(bare: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (bare / "run.toml").write_text("[model]\ndimension = 4\n")
    with pytest.raises(UserError, match="dimension"):
        doctor(["run.toml"])
    assert doctor(["run.toml"], preflight=True, strict=True) == 0
    told = capsys.readouterr()
    assert "dimension" in told.err
    assert "goes on without the run file" in told.err
    assert "ok    versions" in told.out


def test_wrong_words(bare: Path) -> None:
    with pytest.raises(UserError, match=r"--wait: \"soon\" is not a time"):
        doctor(wait="soon")
    with pytest.raises(UserError, match="there is no site"):
        doctor(site="nowhere")


def test_made_up_gpus_are_of_the_catalogue() -> None:
    assert make_nvidia(2).visible == 2


def test_a_login_node_needs_no_torch(bare: Path) -> None:
    words = ["shardway", "doctor", "--site", "juwels-booster", "--all"]
    code = f"import sys; sys.modules['torch'] = None; sys.argv = {words}"
    ended = subprocess.run(
        (sys.executable, "-c", f"{code}; from shardway.cli.main import main; main()"),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "n/a   gpu.count        this is no node of a job" in ended.stdout
    assert "fail  scheduler        " in ended.stdout or "ok    scheduler" in ended.stdout
