"""Exit codes say who can act, whatever went wrong; facts alone reach stdout."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import typer
from command_line import TINY, Shardway, write_text

from shardway.cli import main
from shardway.cli.main import report_error, run_guarded
from shardway.errors import Bug, JobError, LostContact, ShardwayError, SiteError, UserError
from shardway.rundir.attempts import VARIABLE, Attempt

pytestmark = pytest.mark.usefixtures("warm_starts")


def ending(error: BaseException) -> int:
    def work() -> None:
        raise error

    return run_guarded(work)


@pytest.mark.parametrize(
    ("error", "code"),
    [(UserError("x"), 2), (SiteError("x"), 3), (JobError("x"), 4), (LostContact("x"), 4), (Bug("x"), 70)],
)
def test_the_code_of_an_error(error: ShardwayError, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert ending(error) == code
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines()[0] == "shardway: x"


def test_what_is_no_error_ends_with_0() -> None:
    assert run_guarded(lambda: None) == 0
    assert run_guarded(lambda: "text") == 0
    assert run_guarded(lambda: 3) == 3


@pytest.mark.parametrize(("verb", "word"), [("train", "second signal"), ("logs", "signal")])
def test_a_signal_ends_with_130(
    verb: str, word: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of those who heed the first one it was the second."""
    monkeypatch.setattr("sys.argv", ["shardway", verb])
    monkeypatch.delitem(sys.modules, "shardway.train.run", raising=False)
    assert ending(KeyboardInterrupt()) == 130
    assert ending(typer.Abort()) == 130
    assert capsys.readouterr().err == f"shardway: ended at once by a {word}\n" * 2


def test_a_defect_shows_where_it_is_and_asks_for_a_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert ending(ZeroDivisionError("division by zero")) == 70
    err = capsys.readouterr().err
    assert err.startswith("Traceback (most recent call last):\n")
    assert err.endswith(
        "shardway: ZeroDivisionError: division by zero\n"
        "  This is a defect of Shardway: please report it with the lines above.\n"
    )


def test_only_a_defect_asks_for_a_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert report_error(JobError("a rank died")) == 4
    assert capsys.readouterr().err == "shardway: a rank died\n"


def test_the_base_of_usage_errors_is_clicks() -> None:
    """Found by its place, since releases of typer differ in whose click they use."""
    assert main.CLICK_ERROR.__name__ == "ClickException"
    assert issubclass(typer.BadParameter, main.CLICK_ERROR)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("frob",), "No such command 'frob'."),
        (("trian",), "No such command 'trian'. Did you mean 'train', 'track', 'trace'?"),
        (("train", "--nproc", "0"), "Invalid value for '--nproc'"),
        (("train", "--nproc", "two"), "Invalid value for '--nproc'"),
        (("train", "--frob"), "No such option: --frob"),
        (("logs", "--rank", "-1"), "Invalid value for '--rank'"),
        (("config", "explain"), "Missing argument"),
        (("stop", "a", "b"), "unexpected extra argument"),
        (("config", "frob"), "No such command 'frob'."),
    ],
)
def test_wrong_usage_is_a_users_mistake(words: tuple[str, ...], said: str, shardway: Shardway) -> None:
    ended = shardway(*words)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith(f"Usage: shardway{'' if words[0] in ('frob', 'trian') else f' {words[0]}'}")
    assert said in ended.err
    assert "defect" not in ended.err


@pytest.mark.parametrize("words", [(), ("config",)])
def test_without_a_verb_the_help_is_shown(words: tuple[str, ...], shardway: Shardway) -> None:
    ended = shardway(*words)
    assert ended.code == 2
    assert "Commands:" in ended.err


@pytest.mark.parametrize("word", ["-h", "--help"])
@pytest.mark.parametrize("verb", [(), ("train",), ("init",), ("status",), ("logs",), ("report",), ("config", "show")])
def test_help_is_no_error(verb: tuple[str, ...], word: str, shardway: Shardway) -> None:
    ended = shardway(*verb, word)
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.startswith(" ".join(["Usage: shardway", *verb]))


def test_the_version(shardway: Shardway) -> None:
    ended = shardway("--version")
    assert (ended.code, ended.out, ended.err) == (0, f"shardway {main.__version__}\n", "")


def test_a_defect_in_a_verb_leaves_stdout_empty(
    shardway: Shardway, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from shardway.runfile import load

    def fail(name: str) -> None:
        raise RuntimeError("wrong")

    monkeypatch.setattr(load, "explain_key", fail)
    assert run_guarded(lambda: main.app(["config", "explain", "train"], standalone_mode=False)) == 70
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines()[-2] == "shardway: RuntimeError: wrong"


# --- in a process of its own


def start(*words: str, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "shardway", *words]
    return subprocess.run(command, text=True, timeout=300, check=False, **options)  # type: ignore[call-overload,no-any-return]


def test_the_process_ends_with_the_code() -> None:
    done = start("config", "explain", "train.stpes", capture_output=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("shardway: there is no key train.stpes;")


INTERRUPTED = """
import os, runpy, signal, sys

for name in [name for name in sys.modules if name.split(".")[0] in ("typer", "shardway")]:
    del sys.modules[name]

class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == "typer":
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)  # what started the tests may have it ignored
sys.meta_path.insert(0, Interrupts())
sys.argv = ["shardway", "--help"]
"""
ENTRIES = ("runpy.run_module('shardway', run_name='__main__')", "from shardway.cli.entry import main; main()")


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_signal_while_the_command_is_imported_ends_it_as_ever(entry: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", f"{INTERRUPTED}\n{entry}"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "shardway: ended at once by a signal\n")
    assert main.EXIT_KILLED == 130


def test_the_command_and_the_module_have_one_entry() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["scripts"] == {"shardway": "shardway.cli.entry:main"}


def test_a_reader_that_went_away_is_no_error() -> None:
    """`shardway config schema | head -1`"""
    reading, writing = os.pipe()
    os.close(reading)
    done = start("config", "schema", stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_error_of_all_ranks_is_told_once(tmp_path: Path, shardway: Shardway) -> None:
    alone = shardway("train", *TINY, "--dir", "alone")
    words = ["train", *TINY, "--nproc", "2", "--dir", "two"]
    together = start(*words, capture_output=True, cwd=tmp_path)
    assert (together.returncode, together.stdout, together.stderr) == (alone.code, "", alone.err)
    assert alone.code == 2


def test_two_ranks_finish_with_0(tmp_path: Path) -> None:
    write_text(tmp_path)
    done = start("train", *TINY, "--nproc", "2", "--dir", "two", "--json", capture_output=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert '"state": "finished"' in done.stdout


LEAVES_A_THREAD = """
import builtins, sys, threading, time
from datetime import timedelta

from torch.distributed import TCPStore

from shardway.cli import main

class Slow:
    def __del__(self):
        time.sleep(2)  # the call of the thread comes back while the interpreter ends

def wait():
    TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False).wait(["never"], timedelta(seconds=1))

def work():
    threading.Thread(target=wait, daemon=True).start()
    time.sleep(0.3)
    builtins.slow = Slow()
    print("done")

main.app = lambda standalone_mode: work()
main.main()
"""


def test_a_thread_that_waits_for_another_node_does_not_change_the_code() -> None:
    """torch's store, and pybind11 around it, end a process with SIGABRT where a call comes back as it ends."""
    ended = subprocess.run([sys.executable, "-c", LEAVES_A_THREAD], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout) == (0, "done\n"), ended.stderr


@pytest.mark.parametrize(("count", "said"), [("0", False), ("2", True)])
def test_what_is_tried_again_is_not_yet_the_end_of_its_job(
    count: str, said: bool, shardway: Shardway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = {VARIABLE: str(tmp_path), "TORCHELASTIC_RESTART_COUNT": count, "TORCHELASTIC_MAX_RESTARTS": "2"}
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    assert shardway("train", "gone.toml").code == 2
    assert (Attempt(tmp_path).read_result() is not None) is said
