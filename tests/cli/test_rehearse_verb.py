"""`shardway rehearse`: its words, what it prints, and its exit code. The rehearsal itself is played here."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import Shardway

from shardway.launch import rehearsal as course
from shardway.launch.rehearsal import RehearsalCheck, RehearsalVerdict, RehearsedProgram

GOOD = [
    RehearsalCheck("trains", RehearsalVerdict.OK, "9 steps"),
    RehearsalCheck("same losses", RehearsalVerdict.UNKNOWN, "no events"),
]
BAD = [
    GOOD[0],
    RehearsalCheck("same losses", RehearsalVerdict.FAIL, "loss of step 3 is 1.0\nand more", "look for state"),
]


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> list[RehearsedProgram]:
    """The pieces that were rehearsed."""
    pieces: list[RehearsedProgram] = []

    def play(piece: RehearsedProgram, folder: Path) -> Iterator[RehearsalCheck]:
        assert folder.is_dir()
        assert list(folder.iterdir()) == []
        (folder / "left").touch()
        pieces.append(piece)
        yield from GOOD

    monkeypatch.setattr(course, "rehearse", play)
    return pieces


def test_a_run_file_is_trained_with_its_words(
    shardway: Shardway, played: list[RehearsedProgram], tmp_path: Path
) -> None:
    words = ("train.seed=3", "--deadline", "1m30s", "--nproc", "2", "--steps", "40")
    ended = shardway("rehearse", *words)
    assert (ended.code, ended.err) == (0, "")
    (piece,) = played
    assert (piece.deadline_s, piece.whole) == (90.0, True)
    command = list(piece.words(tmp_path / "x"))
    assert command[1:] == [
        *("-m", "shardway", "train", "train.seed=3", "train.steps=40", "--nproc", "2"),
        *("--dir", f"{tmp_path}/x"),
    ]
    first, *lines = ended.out.splitlines()
    assert first.startswith("rehearsing in runs/rehearsal-")
    assert lines == [f"{'ok':8}{'trains':28}9 steps", f"{'unknown':8}{'same losses':28}no events"]
    assert list((tmp_path / "runs").iterdir()) == [], "the scratch folder is removed"


def test_a_command_stays_as_it_is(shardway: Shardway, played: list[RehearsedProgram], tmp_path: Path) -> None:
    ended = shardway("rehearse", "--keep", "--", "torchrun", "--nproc-per-node", "2", "my script.py", "--lr=3")
    assert ended.code == 0
    (piece,) = played
    assert (piece.deadline_s, piece.whole) == (30.0, False)
    assert list(piece.words(tmp_path)) == ["torchrun", "--nproc-per-node", "2", "my script.py", "--lr=3"]
    (kept,) = (tmp_path / "runs").iterdir()
    assert (kept / "left").exists()


def test_a_difference_is_an_error_of_the_job(
    shardway: Shardway, played: list[RehearsedProgram], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(course, "rehearse", lambda piece, folder: iter(BAD))
    ended = shardway("rehearse")
    assert ended.code == 4
    assert ended.out.splitlines()[2:] == [
        f"{'fail':8}{'same losses':28}loss of step 3 is 1.0",
        f"{'':36}and more",
        f"{'':36}to do: look for state",
    ]
    assert ended.err == (
        "shardway: the rehearsal failed: same losses: loss of step 3 is 1.0\n"
        "  To do: rehearse with --keep to look at what was written.\n"
    )


def test_facts_for_programs(shardway: Shardway, played: list[RehearsedProgram]) -> None:
    ended = shardway("rehearse", "--json")
    assert ended.code == 0
    assert [(check["name"], check["verdict"]) for check in json.loads(ended.out)["checks"]] == [
        ("trains", "ok"),
        ("same losses", "unknown"),
    ]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--deadline", "soon"), 'shardway: --deadline: "soon" is not a time;'),
        (("--nproc", "2", "--", "python", "x.py"), "shardway: --nproc and --steps belong to a run file;"),
        (("train.stps=4",), "shardway: 1 problem in "),
        (("absent.toml",), "shardway: "),
    ],
)
def test_mistakes_are_told_before_anything_starts(
    words: tuple[str, ...], told: str, shardway: Shardway, played: list[RehearsedProgram], tmp_path: Path
) -> None:
    ended = shardway("rehearse", *words)
    assert (ended.code, played) == (2, [])
    assert ended.err.startswith(told)
    assert not (tmp_path / "runs").exists()


def test_a_command_that_is_not_there_is_told(shardway: Shardway, tmp_path: Path) -> None:
    ended = shardway("rehearse", "--", "no-such-program")
    assert ended.code == 2
    assert ended.err.startswith("shardway: the command cannot be started: No such file or directory (no-such-program)")


def test_a_command_is_rehearsed_in_copies_of_its_folder(
    shardway: Shardway, played: list[RehearsedProgram], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its outputs, which it may have from before, are not those of the rehearsal."""
    monkeypatch.setenv("HOME", "/nowhere")
    (tmp_path / "train.py").write_text("x = 1\n")
    assert shardway("rehearse", "--", "python", "train.py").code == 0
    (piece,) = played
    (tmp_path / "scratch").mkdir()
    first, second = piece.place(tmp_path / "scratch/through"), piece.place(tmp_path / "scratch/cut-1")
    assert (first, second) == (tmp_path / "scratch/through/work", tmp_path / "scratch/cut-1/work")
    assert first is not None
    (first / "model.pt").touch()
    assert piece.place(tmp_path / "scratch/through") == first
    assert sorted(path.name for path in first.iterdir()) == ["model.pt", "train.py"]
    assert second is not None
    assert [path.name for path in second.iterdir()] == ["train.py"]
    ended = shardway("rehearse", "--", "python", "train.py", "--data", "../x.txt")
    assert (ended.code, len(played)) == (2, 1)
    assert "../x.txt leads out of" in ended.err
