"""What a shell completes: verbs, options, keys with their values, runs; quickly, and without torch; and its scripts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import Shardway

from shardway.cli.completion import SCRIPTS, Shell, answer, load_table, print_answer
from shardway.cli.main import VERBS
from shardway.rundir.directory import RunDir

PROGRAM = Path(sys.executable).parent / "shardway"


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache of all of these tests, so that the table is made once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(cache / "config"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (("comp",), ["compare", "completion"]),
        (("config", "sh"), ["show"]),
        (("completion", ""), ["bash", "zsh", "fish"]),
        (("submit", "--no"), ["--nodes"]),
        (("resume", "x", "--o"), ["--once"]),
        (("train", "optim.l"), ["optim.lr=", "optim.lr_scaling="]),
        (("train", "my.toml", "guard.non_finite="), [f"guard.non_finite={each}" for each in ("skip", "stop", "off")]),
        (("train", "train.compile_cache=f"), []),
        (("train", "train.deterministic=t"), ["train.deterministic=true"]),
        (("train", "optim.name=ad"), [f"optim.name={each}" for each in ("adamw", "adafactor", "adamw8bit")]),
        (("submit", "site.name=juw"), ["site.name=juwels-booster"]),
        (("submit", "--on", "ju"), ["jupiter", "jureca-dc", "juwels-booster"]),
        (("submit", "--on=joe@login:jup"), ["--on=joe@login:jupiter"]),
        (("plan", "--gpu", "h100-sxm5-8"), ["h100-sxm5-80gb"]),
        (("plan", "gpt2-m"), ["gpt2-medium"]),
        (("init", "--from", "m"), ["mnist"]),
        (("checkpoint", "export", "--dtype", "b"), ["bf16"]),
        (("config", "explain", "guard.non"), ["guard.non_finite"]),
        (("no-such-verb", ""), []),
    ],
)
def test_what_may_stand_there(words: tuple[str, ...], found: list[str]) -> None:
    assert answer(words) == found


def test_every_verb_is_offered() -> None:
    assert answer([""]) == [*VERBS]


def test_files_and_folders(tmp_path: Path) -> None:
    for name in ("my.toml", "my.txt", ".my.toml"):
        (tmp_path / name).touch()
    (tmp_path / "mine").mkdir()
    assert answer(["train", "my"]) == ["my.toml"]
    assert answer(["train", "./m"]) == ["./mine/", "./my.toml"]
    assert answer(["train", "data.path=m"]) == ["data.path=mine/", "data.path=my.toml", "data.path=my.txt"]
    assert answer(["submit", "--", "python", "m"]) == ["mine/", "my.toml", "my.txt"]
    assert answer(["train", "gone/x"]) == []


def test_runs_by_directory_and_name(tmp_path: Path) -> None:
    RunDir(tmp_path / "runs/one").create()
    RunDir(tmp_path / "runs/other").create()
    for verb in ("status", "stop", "resume", "logs", "report", "compare"):
        assert answer([verb, "runs/o"]) == ["runs/one", "runs/other", "runs/one/", "runs/other/"]
    assert answer(["submit", "--after", "on"]) == ["one"]
    assert answer(["stop", "zz"]) == []
    assert answer(["stop", "runs/one", "r"]) == []  # it takes one


def test_the_table_follows_what_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    made = iter(range(9))
    monkeypatch.setattr("shardway.cli.completion._make_table", lambda: {"sites": [f"made-{next(made)}"]})
    assert [load_table()["sites"] for _ in range(2)] == [["made-0"], ["made-0"]]
    (tmp_path / "config/shardway/sites").mkdir(parents=True)  # a profile of one's own
    assert [load_table()["sites"] for _ in range(2)] == [["made-1"], ["made-1"]]
    (tmp_path / "shardway/completion.json").write_text("{")
    assert load_table()["sites"] == ["made-2"]


def test_what_cannot_be_answered_is_silent(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    monkeypatch.setattr("shardway.cli.completion._make_table", lambda: 1 / 0)
    print_answer(["train", ""])
    assert capfd.readouterr() == ("", "")


def test_a_completion_is_quick_and_without_torch() -> None:
    """In a process of its own, as a shell asks for it; with the table made, nothing slow is imported."""
    load_table()
    code = (
        "import sys\n"
        "from shardway.cli.main import main\n"
        "main()\n"
        "assert not {'torch', 'pydantic', 'numpy'} & {*sys.modules}\n"
    )
    asked = [sys.executable, "-c", code, "completion", "--answer", "--", "train", "optim.mom"]
    ended = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.split() == ["optim.momentum="]


@pytest.mark.parametrize(
    ("line", "words", "found"),
    [
        ("{} train precision.compute=b", "{}|train|precision.compute|=|b", "bf16"),
        ("{} train precision.compute=", "{}|train|precision.compute|=", "fp32|bf16|fp16|float8|auto"),
        ("{} submit --on joe@x:jup", "{}|submit|--on|joe@x|:|jup", "jupiter"),
        ("{} config ", "{}|config|", "show|explain|schema"),
    ],
)
def test_bash_cuts_words_at_signs(line: str, words: str, found: str, tmp_path: Path) -> None:
    """The script puts them together again, and gives what stands behind the sign."""
    (tmp_path / "script").write_text(SCRIPTS[Shell.bash])
    load_table()
    bash = (
        "source ./script; COMP_WORDBREAKS=$' \\t\\n\"><=;|&(:'; COMP_LINE=$1; COMP_POINT=${#COMP_LINE}\n"
        "IFS='|' read -ra COMP_WORDS <<< \"$2\"; [[ $2 == *'|' ]] && COMP_WORDS+=('')\n"
        "COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); _shardway 2> /dev/null; IFS='|'; echo \"${COMPREPLY[*]}\""
    )
    asked = ["bash", "--norc", "-c", bash, "bash", line.format(PROGRAM), words.format(PROGRAM)]
    ended = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=True, env={**os.environ})
    assert ended.stdout.strip() == found


def test_each_shell_has_a_script(shardway: Shardway, tmp_path: Path) -> None:
    for shell in Shell:
        assert "completion --answer --" in shardway("completion", shell.value).out
    (tmp_path / "script").write_text(shardway("completion", "bash").out)
    checked = subprocess.run(
        [str(PROGRAM.parent / "shellcheck"), "-s", "bash", "script"], capture_output=True, text=True, check=False
    )
    assert checked.stdout == ""
    assert shardway("completion", "tcsh").code == 2
