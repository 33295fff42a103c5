"""Verbs in folders, homes and locales that a careful person does not have: a sentence where it cannot work."""

from __future__ import annotations

import errno
import os
import pwd
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import TINY, Shardway, write_text

from shardway.cli import main
from shardway.cli.main import run_guarded
from shardway.rundir.directory import RunDir

GONE = "The current folder was removed"
LOOP = "Too many levels of symbolic links"


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "runs/mine")
    made.create()
    made.write_status(state="finished", step=3, reason="all 3 steps are done")
    return made


@pytest.mark.parametrize(
    "words", [("status",), ("sites", "list"), ("submit", "--on", "laptop", "--dry-run", "--", "ls")]
)
def test_an_account_without_a_home_is_served(
    words: tuple[str, ...], shardway: Shardway, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(_: int) -> None:
        raise KeyError

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for name in ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name)
    assert shardway(*words).code == 0


def test_shipped_sites_do_not_need_the_folder_of_own_ones(
    shardway: Shardway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link to itself cannot be read by anybody, as the home of another account by most."""
    (tmp_path / "loop").symlink_to("loop")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "loop"))
    own = f"{tmp_path}/loop/shardway/sites, which cannot be read ({LOOP})"
    assert shardway("sites", "show", "laptop").code == 0
    assert f"Your own profiles: {own}\n" in shardway("sites", "list").out
    ended = shardway("sites", "show", "mine")
    assert (ended.code, f"  your own profiles stand in {own}\n" in ended.err) == (2, True)
    assert shardway("sites", "probe", "--write", "mine").code == 2


@pytest.mark.parametrize(
    "words",
    [
        *(("status", "runs/mine"), ("stop", "runs/mine"), ("logs", "runs/mine"), ("report", "runs/mine")),
        *(("train",), ("rehearse",), ("checkpoint", "verify", "runs/mine"), ("init",)),
        *(("submit", "--", "ls"), ("submit", "--on", "laptop"), ("resume", "runs/mine"), ("config", "show", "x.toml")),
    ],
)
def test_a_folder_that_was_removed_is_told(
    words: tuple[str, ...], shardway: Shardway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    ended = shardway(*words)
    assert (ended.code, GONE in ended.err) == (2, True)


def test_from_a_folder_that_was_removed_a_whole_path_is_served(
    shardway: Shardway, run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    for verb in ("status", "stop", "report"):
        ended = shardway(verb, str(run.path))
        assert (ended.code, ended.err) == (0, ""), verb


@pytest.mark.parametrize("verb", ["status", "stop"])
@pytest.mark.parametrize("part", ["lease", "attempts"])
def test_what_cannot_be_seen_of_a_run_is_not_taken_for_absent(
    verb: str, part: str, shardway: Shardway, run: RunDir
) -> None:
    (run.path / part).symlink_to(part)
    ended = shardway(verb, "runs/mine")
    assert (ended.code, f"runs/mine/{part} cannot be looked at: {LOOP}" in ended.err) == (4, True)


@pytest.mark.parametrize("verb", ["status", "stop", "logs", "report"])
def test_a_name_that_no_folder_can_have_is_no_run(verb: str, shardway: Shardway) -> None:
    ended = shardway(verb, "x" * 300)
    assert (ended.code, "there is no run" in ended.err) == (2, True)


@pytest.mark.parametrize(
    ("words", "said"),
    [(("report", "."), 'no run in "."'), (("report", ""), 'no run in "."'), (("status", ""), "no run ''.")],
)
def test_a_place_without_a_run_stands_in_quotes(words: tuple[str, ...], said: str, shardway: Shardway) -> None:
    ended = shardway(*words)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith(f"shardway: there is {said}")


@pytest.mark.parametrize(
    ("number", "code", "words"),
    [
        (errno.EACCES, 4, "/place cannot be written: Permission denied.\n  To do: ask its owner for permission"),
        (errno.ENAMETOOLONG, 4, "/place cannot be looked at: File name too long"),
        (errno.ELOOP, 4, "/place cannot be looked at: Too many levels of symbolic links"),
        (errno.ENOTDIR, 4, "/place cannot be looked at: Not a directory"),
        (errno.ESTALE, 4, "/place cannot be looked at: Stale file handle"),
        (errno.ENOSPC, 4, "/place cannot be written: No space left on device.\n  To do: make room there"),
        (errno.EDQUOT, 4, "/place cannot be written: Disk quota exceeded.\n  To do: make room in your quota"),
        (errno.EROFS, 4, "/place cannot be written: Read-only file system.\n  To do: mount that file system to be"),
        (errno.EMFILE, 3, "no more files can be opened"),
        (errno.EISDIR, 70, "This is a defect"),
    ],
)
def test_what_a_file_system_refuses_is_no_defect(
    number: int, code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def work() -> None:
        raise OSError(number, os.strerror(number), "/place")

    assert run_guarded(work) == code
    said = capsys.readouterr().err
    assert words in said
    assert ("Traceback" in said) == (code == 70)


def test_what_may_not_be_read_is_not_told_as_a_write(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def work() -> None:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES), "/place")

    monkeypatch.setattr(os, "access", lambda path, mode: False)  # of another's folder; root may read all
    assert run_guarded(work) == 4
    assert "/place cannot be looked at: Permission denied" in capsys.readouterr().err


@pytest.mark.parametrize("words", [("config", "schema"), ("--version",)])
def test_an_output_that_finds_no_room_is_told(words: tuple[str, ...]) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "shardway", *words], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.stderr.startswith("shardway: what this command writes or prints cannot be written: No space left on")
    assert done.returncode == 4


def test_a_reader_that_has_gone_is_no_error(tmp_path: Path) -> None:
    command = f"{sys.executable} -m shardway config schema | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert (done.stdout, done.stderr) == ("0\n", "")


def test_train_and_submit_fill_in_the_same_variables(
    shardway: Shardway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCRATCH", str(tmp_path / "scratch"))
    words = ("run.root=$SCRATCH/runs", "run.name=of$NAME", "data.path=$SCRATCH/text.txt")
    where = f"{tmp_path}/scratch/runs/of$NAME"
    assert shardway("train", *words, "--dry-run").out.startswith(f"# would train with 1 rank(s) into {where}\n")
    assert f"run='{where}'\n" in shardway("submit", "--on", "laptop", *words, "--dry-run").out
    (tmp_path / "scratch").mkdir()
    write_text(tmp_path / "scratch")
    ended = shardway("train", *TINY, "run.root=$SCRATCH/runs", "data.path=$SCRATCH/text.txt")
    assert (ended.code, f"run directory  {tmp_path}/scratch/runs/default\n" in ended.out) == (0, True)
    assert not list(tmp_path.glob("$*"))


def test_data_of_a_variable_of_the_job_are_not_looked_for(shardway: Shardway) -> None:
    words = ("data.path=$OF_THE_JOB/text.txt", "run.root=runs")
    assert shardway("submit", "--on", "laptop", *words, "--dry-run").code == 0


def test_a_run_that_may_not_be_read_has_a_remedy(
    shardway: Shardway, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of another user; click would say only that it is not readable."""
    stat = os.stat

    def refuse(path: object, **options: bool) -> os.stat_result:
        if isinstance(path, int) or not str(path).startswith(f"{run.path}/"):
            return stat(path, **options)  # type: ignore[arg-type]
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != str(run.path))
    monkeypatch.setattr(os, "stat", refuse)
    ended = shardway("train", "--dir", str(run.path))
    monkeypatch.undo()
    assert (ended.code, "To do: ask its owner for permission" in ended.err) == (4, True)


def test_a_folder_that_a_container_could_not_be_told_is_refused(
    shardway: Shardway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its mounts may hold variables, which the shell of the job fills in."""
    (tmp_path / "of$HOME").mkdir()
    monkeypatch.chdir(tmp_path / "of$HOME")
    words = ("submit", "--on", "laptop", "--dry-run", "site.venv=none")
    assert shardway(*words, "--", "ls").code == 0
    ended = shardway(*words, "site.container=apptainer", "site.image=/x.sif", "--", "ls")
    assert (ended.code, 'of$HOME/runs/ls" has $HOME in its name, which the shell of a job' in ended.err) == (2, True)


PRINTS = "import shardway.cli.main as t, sys; t.ensure_utf8_mode(); t.print_anything(); print(sys.argv[1], '\\ud800')"


@pytest.mark.parametrize(
    ("variables", "shown"),
    [
        ({"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, b"caf\xc3\xa9 \xe9 \\ud800\n"),
        ({"PYTHONIOENCODING": "utf-8:strict"}, b"caf\xc3\xa9 \xe9 \\ud800\n"),
        ({"PYTHONIOENCODING": "ascii"}, b"caf\\xe9 \xe9 \\ud800\n"),
    ],
)
def test_whatever_the_locale_names_are_the_bytes_that_they_are(variables: dict[str, str], shown: bytes) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PRINTS, b"caf\xc3\xa9 \xe9"],
        env={**os.environ, **variables},
        capture_output=True,
        check=True,
    )
    assert done.stdout == shown


def test_a_verb_speaks_utf8_before_it_reads_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    for name in ("ensure_utf8_mode", "print_anything"):
        monkeypatch.setattr(main, name, lambda name=name: called.append(name))
    monkeypatch.setattr(main, "run_guarded", lambda _: called.append("verb") or 0)
    monkeypatch.setattr(main, "leave", lambda *_, **__: None)
    monkeypatch.setattr(sys, "argv", ["shardway", "train"])
    main.main()
    assert called == ["ensure_utf8_mode", "print_anything", "verb"]


HINT = re.compile(
    r"(?:shardway [a-z]+(?: [a-z]+)??|touch)(?: --?[a-z]+)* "
    r"\{([^{}]*\b(?:run|folder|directory|reference|where)\b[^{}]*)\}"
)


def test_a_command_that_a_message_names_can_be_copied(shardway: Shardway) -> None:
    """A place in it is quoted, for its spaces."""
    ended = shardway("init", "my own.toml")
    (command,) = re.findall("`(.*)`", ended.out)
    assert shlex.split(command) == ["shardway", "train", "my own.toml"]
    files = Path(main.__file__).parents[1].rglob("*.py")
    assert [found for file in files for found in HINT.findall(file.read_text()) if "quote" not in found] == []
