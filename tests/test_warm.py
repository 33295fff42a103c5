"""A process that starts warm is what exec would have made of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import warm

TELL = """
import json, os, sys
def lines(name):
    return open(f"/proc/self/{name}").read().split(chr(0))
print(json.dumps({
    "pid": os.getpid(), "parent": os.getppid(), "leads": os.getsid(0) == os.getpid(), "folder": os.getcwd(),
    "argv": sys.argv, "command": lines("cmdline")[:-1], "shown": "COLOUR=blue" in lines("environ"),
    "environ": dict(os.environ), "first": sys.path[0], "main": sys.modules["__main__"].__name__,
    "open": sorted(int(each) for each in os.listdir("/proc/self/fd")), "warm": "torch" in sys.modules,
    "shardway": "shardway" in sys.modules, "name": __name__, "file": globals().get("__file__"),
    "handler": str(__import__("signal").getsignal(2)),
}))
"""
NESTED = f"import subprocess, sys; print(subprocess.run([sys.executable, '-c', {TELL!r}, 'inner']).args[1])"


@pytest.fixture(autouse=True)
def warm_starts() -> Iterator[None]:
    if warm.COLD in os.environ:
        pytest.skip(f"{warm.COLD} is set")
    with warm.starts():
        yield


def tell(*words: str, **options: Any) -> dict[str, Any]:
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=120, check=True, **options)
    return dict(json.loads(done.stdout.splitlines()[0]))


def test_it_is_a_child_with_its_own_words_folder_and_variables(tmp_path: Path) -> None:
    environ = {**os.environ, "COLOUR": "blue"}
    told = tell("-c", TELL, "a b", "", cwd=tmp_path, env=environ, start_new_session=True)
    assert told["warm"]
    assert not told["shardway"]
    assert told["parent"] == os.getpid()
    assert told["leads"]
    assert told["folder"] == str(tmp_path)
    assert told["argv"] == ["-c", "a b", ""]
    assert told["command"] == [sys.executable, "-c", TELL, "a b", ""]
    assert told["shown"]
    assert told["environ"] == environ
    assert (told["first"], told["main"], told["name"]) == ("", "__main__", "__main__")


def test_it_has_no_descriptors_but_those_it_was_given(tmp_path: Path) -> None:
    with open(tmp_path / "kept", "w") as kept, open(tmp_path / "other", "w"):
        told, own = tell("-c", TELL, pass_fds=[kept.fileno()]), {0, 1, 2, kept.fileno()}
    assert own < set(told["open"])
    assert len(told["open"]) == len(own) + 2, "the list of them is one, the wire to its template another"


def test_cold_and_warm_say_the_same(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(TELL)
    varying = {"pid", "warm", "open", "environ", "shardway"}  # of the last, see below
    for words in (("-c", TELL, "x"), (str(script), "x"), ("script.py",), ("-m", "script", "x"), ("-u", "script.py")):
        told = tell(*words, cwd=tmp_path, env={**os.environ, "COLOUR": "blue"})
        cold = tell(*words, cwd=tmp_path, env={**os.environ, "COLOUR": "blue", warm.COLD: "1"})
        assert told["warm"]
        assert not cold["warm"]
        assert {name: told[name] for name in told.keys() - varying} == {
            name: cold[name] for name in cold.keys() - varying
        }


OWN = f"""
import json, sys
early = [name for name in {warm.NOT_OWN} if name in sys.modules]
kept = "shardway.runfile.load" in sys.modules
import shardway.runfile.load as load, shardway.train.run as run, shardway
print(json.dumps([early, kept, load.__file__, run.__file__, shardway.train.run is run, load.load_run.__module__]))
"""


def test_shardway_is_imported_by_then_and_what_is_asked_for_by_name_is_not(tmp_path: Path) -> None:
    script, own = tmp_path / "script.py", Path(__file__).parents[1] / "src" / "shardway"
    script.write_text(OWN)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    files = [str(own / "runfile" / "load.py"), str(own / "train" / "run.py")]
    assert json.loads(done.stdout) == [[], True, *files, True, "shardway.runfile.load"], done.stderr


def test_what_is_put_into_shardway_before_it_is_imported_is_everywhere(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(
        "import shardway.errors as errors\nerrors.UserError = type('Injected', (errors.UserError,), {})\n"
    )
    (tmp_path / "user.py").write_text("import shardway.cli.main as main\nprint(main.UserError.__name__)\n")
    done = subprocess.run(
        [sys.executable, str(tmp_path / "user.py")],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
    )
    assert done.stdout == "Injected\n", done.stderr


@pytest.mark.parametrize("where", ["beside the program", "in PYTHONPATH"])
def test_another_shardway_is_imported_where_python_would(where: str, tmp_path: Path) -> None:
    here, beside = tmp_path / "other", where == "beside the program"
    (here / "shardway").mkdir(parents=True)
    (here / "shardway" / "__init__.py").write_text("")
    (here / "shardway" / "__main__.py").write_text("print('another')")
    environ = dict(os.environ) if beside else {**os.environ, "PYTHONPATH": str(here)}
    done = subprocess.run(
        [sys.executable, "-m", "shardway"],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=here if beside else tmp_path,
        env=environ,
    )
    assert done.stdout == "another\n", done.stderr


def test_what_it_starts_is_its_child_and_warm_as_well() -> None:
    with subprocess.Popen([sys.executable, "-c", NESTED], stdout=subprocess.PIPE, text=True) as outer:
        told = json.loads(outer.communicate(timeout=120)[0].splitlines()[0])
    assert told["parent"] == outer.pid
    assert told["warm"]
    assert told["argv"] == ["-c", "inner"]


@pytest.mark.parametrize(
    ("code", "expected"),
    [("raise SystemExit(7)", 7), ("raise KeyError(3)", 1), ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL)],
)
def test_how_it_ends_is_seen(code: str, expected: int) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == expected
    assert ("KeyError: 3" in done.stderr) is (expected == 1)


ENDS = (
    "import atexit, sys, threading, time\n"
    "atexit.register(print, 'at exit', file=sys.stderr)\n"
    "threading.Thread(target=lambda: (time.sleep(0.1), print('thread'))).start()\n"
    "held = open('held', 'w'); held.write('kept by nobody who closes it'); sys.stdout.write('no newline')\n"
)


@pytest.mark.parametrize(
    "end",
    [
        "",
        *("raise SystemExit", "raise SystemExit('words')", "raise SystemExit(256 + 9)", "raise SystemExit(-1)"),
        *(
            "raise KeyError(3)",
            "raise KeyboardInterrupt",
            "import os; os.close(1)",
            "sys.stdout = None",
            "held.close()",
        ),
    ],
)
def test_cold_and_warm_end_the_same(end: str, tmp_path: Path) -> None:
    started, found = {}, []
    for name, environ in (("warm", {}), ("cold", {warm.COLD: "1"})):
        (tmp_path / name).mkdir()
        started[name] = subprocess.Popen(
            [sys.executable, "-c", ENDS + end],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path / name,
            env={**os.environ, **environ},
        )
    for name, process in started.items():
        out, err = process.communicate(timeout=120)
        said = [line for line in err.splitlines() if not line.startswith(("  ", "Exception ignored in"))]
        found.append((process.returncode, out, said, (tmp_path / name / "held").read_text()))
    assert found[0] == found[1]
    assert found[0][3]


def test_what_it_reads_and_prints_goes_through_pipes() -> None:
    code = "import sys; print(sys.stdin.read().upper()); print('err', file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], input="é\n", capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr) == ("É\n\n", "err\n")


def test_variables_that_python_reads_when_it_starts_make_it_cold() -> None:
    told = tell("-c", TELL, env={**os.environ, "PYTHONHASHSEED": "3"})
    assert not told["warm"]
    assert told["parent"] == os.getpid()


def test_no_template_outlives_the_process_that_it_serves() -> None:
    code = "import time; print(1, flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        children = psutil.Process(process.pid).children(recursive=True)
        process.kill()
    assert len(children) == 1
    deadline = time.monotonic() + 30
    while psutil.wait_procs(children, timeout=0.1)[1]:
        assert time.monotonic() < deadline


KILLED_EARLY = """
import os, select, socket, subprocess, sys, warm
class Wire(socket.socket):
    def recv(self, *given):
        select.select([self], [], [])
        os.kill(os.getpid(), 9)
warm._template.wire = Wire(fileno=warm._template.wire.detach())
subprocess.run([sys.executable, "-c", ""])
"""


def test_a_template_ends_without_a_word_when_what_it_serves_is_killed_before_it_has_read_the_answer() -> None:
    done = subprocess.run([sys.executable, "-c", KILLED_EARLY], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGKILL, "", "")


def test_a_kernel_that_refuses_names_makes_it_cold(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse = "warm._libc.prctl = lambda *given: -1; "
    monkeypatch.setattr(warm, "_TEMPLATE_CODE", warm._TEMPLATE_CODE.replace("warm.serve", f"{refuse}warm.serve"))
    monkeypatch.setattr(warm, "_template", None)
    monkeypatch.setattr(warm, "_is_refused", False)
    with warm.starts():
        told = tell("-c", TELL)
        assert warm._is_refused
    assert not told["warm"]
    assert told["parent"] == os.getpid()
