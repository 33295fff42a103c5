from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from fake_ssh import make_fake
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardway.errors import UserError
from shardway.launch.hosts import Host, LocalHost, find_host, local
from shardway.launch.hosts.base import MISSING
from shardway.launch.hosts.ssh import SshHost

WORDS = st.text(st.characters(blacklist_characters="\0", blacklist_categories=["Cs"]), max_size=12)
ODD = [
    "",
    "a b",
    "'",
    '"',
    "$(id)",
    "`id`",
    "$HOME",
    "\\",
    "\n",
    "a\n\nb\n",
    "\t",
    "*",
    "~",
    "!x",
    "é ☃",
    "-n",
    "\x1b[0m",
    "&;|",
]


@pytest.fixture(params=["local", "ssh"])
def host(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    """This machine, and this machine behind a fake ssh; the home folder has no profile."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    return LocalHost() if request.param == "local" else SshHost("there", make_fake(tmp_path / "fake").surroundings)


def pure(path: Path) -> PurePosixPath:
    return PurePosixPath(path)


def test_an_attached_command_has_its_words_its_input_and_its_code(host: Host) -> None:
    words = host.attach(["bash", "-c", 'cat; printf "%s\\0" "$@"; exit 7', "bash", *ODD], terminal=False)
    done = subprocess.run(words, input="typed\n", capture_output=True, text=True, check=False)
    assert done.stdout.removeprefix("typed\n").split("\0")[:-1] == ODD
    assert (done.returncode, done.stderr) == (7, "")
    if host.name:
        assert "-t" in host.attach(["true"], terminal=True)


def test_words_arrive_unchanged(host: Host) -> None:
    done = host.run(["printf", "%s\\0", *ODD])
    assert done.out.split("\0")[:-1] == ODD
    assert (done.code, done.ok, done.words) == (0, True, ("printf", "%s\\0", *ODD))


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lists=st.lists(st.lists(WORDS, min_size=1, max_size=4), min_size=1, max_size=6))
def test_any_words_arrive_unchanged(host: Host, lists: list[list[str]]) -> None:
    done = host.run_many([["printf", "%s\\0", *words] for words in lists])
    assert [one.out.split("\0")[:-1] for one in done] == lists


@pytest.mark.parametrize("text", ["", "x", "two\nlines", "no $(end)\n\n", "-e\\n'\"é\x01"])
def test_a_text_arrives_on_standard_input(host: Host, text: str) -> None:
    assert host.run(["cat"], stdin=text).out == text


def test_outputs_and_codes_are_kept_apart(host: Host) -> None:
    commands = [
        ["sh", "-c", "printf out; printf err >&2; exit 255"],
        ["no-such-program-here"],
        ["sh", "-c", "cat; kill -9 $$"],
        ["printf", "a\n\n"],
        ["true"],
    ]
    done = host.run_many(commands)
    assert [one.words for one in done] == [tuple(words) for words in commands]
    assert [one.code for one in done] == [255, MISSING, 137, 0, 0]
    assert [one.out for one in done] == ["out", "", "", "a\n\n", ""]
    assert (done[0].err, done[3].err) == ("err", "")
    assert "no-such-program-here" in done[1].err
    assert [one.ok for one in done] == [False, False, False, True, True]
    assert host.run_many([]) == []


def test_bytes_that_are_no_utf_8_are_replaced(host: Host) -> None:
    assert host.run(["printf", "a\\377b"]).out == "a\N{REPLACEMENT CHARACTER}b"


def test_a_first_word_is_never_an_assignment_or_a_keyword(host: Host) -> None:
    assert [host.run([word, "x"]).code for word in ("A=B", "if")] == [MISSING] * 2


def test_a_command_out_of_time_is_ended(host: Host, tmp_path: Path) -> None:
    for limit_s in (1.0, 5.0, 25.0):  # a busy machine may not begin in the first of them
        begin = time.monotonic()
        done, took_s = host.run(["sh", "-c", "printf begun; sleep 300"], timeout_s=limit_s), time.monotonic() - begin
        if done.out:
            break
    assert (done.timed_out, done.ok, done.out) == (True, False, "begun")
    assert took_s < limit_s + 30
    assert host.run(["sh", "-c", "exit 124"], timeout_s=60).timed_out is False


@pytest.fixture
def undying(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Processes that no signal ends, as those are which hang in the kernel on a mount that is gone; their time counts
    from when they have made this file."""
    started, begun = list[subprocess.Popen[bytes]](), tmp_path / "begun"

    class Noted(subprocess.Popen[bytes]):
        def __init__(self, *words: Any, **options: Any) -> None:
            super().__init__(*words, **options)
            started.append(self)

        def communicate(self, *words: Any, **options: Any) -> Any:
            while not begun.exists():
                assert self.poll() is None
                time.sleep(0.01)
            return super().communicate(*words, **options)

    monkeypatch.setattr(local.subprocess, "Popen", Noted)
    monkeypatch.setattr(local.os, "killpg", lambda group, number: None)
    monkeypatch.setattr(local, "_GRACE_S", 0.05)
    yield begun
    for process in started:
        process.kill()
        process.wait()


def test_a_command_that_nothing_ends_is_left_behind(undying: Path) -> None:
    begin = time.monotonic()
    done = LocalHost().run(["sh", "-c", f"printf begun; touch {undying}; exec sleep 300"], timeout_s=0.2)
    assert (done.timed_out, done.ok, done.code, done.out) == (True, False, 128 + 9, "begun")
    lines = LocalHost().follow(["sh", "-c", "echo begun; exec sleep 300"])
    assert next(iter(lines)) == "begun"
    lines.close()  # type: ignore[attr-defined]
    assert time.monotonic() - begin < 60


def test_files_are_written_whole_and_read_back(host: Host, tmp_path: Path) -> None:
    texts = {
        "a b/job.sh": "#!/bin/sh\necho 'x' \"$1\" `y` \\ é\n",
        "a b/it's": "",
        "c": "no newline",
        "$(x)/*": "\t\r\n",
    }
    files = {pure(tmp_path / name): text for name, text in texts.items()}
    host.write_files(files, executable=[pure(tmp_path / "a b" / "job.sh")])
    assert {name: (tmp_path / name).read_bytes().decode() for name in texts} == texts
    assert os.access(tmp_path / "a b" / "job.sh", os.X_OK)
    assert not os.access(tmp_path / "c", os.X_OK)
    assert sorted(os.listdir(tmp_path / "a b")) == ["it's", "job.sh"]
    assert host.read_files([*files, pure(tmp_path / "none"), pure(tmp_path)]) == files


def test_a_file_that_cannot_be_written_is_told_with_its_path(host: Host, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    for bad, reason in (
        (tmp_path / "file" / "below", "Not a directory|File exists"),
        (Path("/proc/none/x"), "No such file"),
    ):
        with pytest.raises(UserError, match=rf"{bad}( on there)? cannot be written: ({reason})"):
            host.write_files({pure(bad): "new"})
    assert (tmp_path / "file").read_text() == "old"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", disk], capture_output=True, text=True)
    if mounted.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", disk], check=True)


def test_a_full_disk_leaves_the_old_file_and_nothing_else(host: Host, small_disk: Path, tmp_path: Path) -> None:
    (small_disk / "job.sh").write_text("old")
    with pytest.raises(UserError, match=r"job.sh( on there)? cannot be written: No space left on device"):
        host.write_files({pure(small_disk / "job.sh"): "x" * 100_000})
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "large").write_bytes(os.urandom(200_000))
    with pytest.raises(UserError, match=r"copy( on there)? cannot be written: [Nn]o space left"):
        host.copy_tree(tmp_path / "source", pure(small_disk / "copy"))
    assert os.listdir(small_disk) == ["job.sh"]
    assert (small_disk / "job.sh").read_text() == "old"


def test_a_folder_is_copied_with_links_and_modes(host: Host, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "deep er").mkdir(parents=True)
    (source / "deep er" / "run.sh").write_text("x")
    (source / "deep er" / "run.sh").chmod(0o755)
    (source / ("long" * 40)).write_bytes(os.urandom(100_000))
    (source / "link").symlink_to("deep er/run.sh")
    (source / "dangling").symlink_to("/nowhere")
    target = tmp_path / "new" / "folder's"
    host.copy_tree(source, pure(target))
    assert (target / "deep er" / "run.sh").stat().st_mode & 0o777 == 0o755
    assert (target / ("long" * 40)).read_bytes() == (source / ("long" * 40)).read_bytes()
    assert [os.readlink(target / name) for name in ("link", "dangling")] == ["deep er/run.sh", "/nowhere"]
    assert os.listdir(tmp_path / "new") == ["folder's"]
    with pytest.raises(UserError, match="it exists already"):
        host.copy_tree(source, pure(target))
    assert os.listdir(tmp_path / "new") == ["folder's"]
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot be written: (Not a directory|File exists)"):
        host.copy_tree(source, pure(tmp_path / "file" / "x"))


def test_lines_are_followed_as_they_come(host: Host, tmp_path: Path) -> None:
    assert list(host.follow(["printf", "1\n\n2"])) == ["1", "", "2"]
    assert list(host.follow(["sh", "-c", "echo x; echo y >&2; exit 3"])) == ["x"]
    assert list(host.follow(["no-such-program-here"])) == []
    assert list(host.follow(["true"])) == []


def test_what_is_no_longer_followed_is_ended(host: Host, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    lines = host.follow(["sh", "-c", f"sleep 300 & echo $! >{pid}; echo begun; wait"])
    assert next(lines) == "begun"
    lines.close()  # type: ignore[attr-defined]
    end = time.monotonic() + 60
    while is_running(int(pid.read_text())) and time.monotonic() < end:
        time.sleep(0.01)
    assert not is_running(int(pid.read_text()))


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_paths_are_filled_in_with_the_host_s_values(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    monkeypatch.setenv("SCRATCH", "/scratch/a b")
    monkeypatch.delenv("NOT_SET", raising=False)
    base = home if host.name else Path.cwd()
    expected = {
        "~": home,
        "~/runs": home / "runs",
        "$SCRATCH/x/../y": Path("/scratch/a b/y"),
        "${SCRATCH}2": Path("/scratch/a b2"),
        "//a//b/": Path("/a/b"),
        "/x/$(id)/`y`/*": Path("/x/$(id)/`y`/*"),
        "runs/a": base / "runs" / "a",
    }
    assert {path: host.expand(path) for path in expected} == {path: pure(there) for path, there in expected.items()}
    assert host.expand_many(list(expected)) == [pure(there) for there in expected.values()]
    for bad, reason in (
        ("$NOT_SET/x", r"\$NOT_SET is not set on (there|this machine)"),
        ("~bob/x", "write that folder"),
    ):
        with pytest.raises(UserError, match=reason):
            host.expand(bad)


def test_a_host_is_found_by_name() -> None:
    assert find_host("").name == ""
    assert find_host("alice@login").name == "alice@login"


def test_commands_see_no_variables_of_another_job(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for where its scheduler is; what stands there for sbatch is known."""
    for name in ("SLURM_JOB_ID", "SBATCH_TIMELIMIT", "RANK", "SLURM_CONF", "SBATCH_ACCOUNT"):
        monkeypatch.setenv(name, f"of {name}")
    seen = host.run(["env"]).out
    assert [line for line in seen.splitlines() if line.startswith(("SLURM_", "SBATCH_", "RANK="))] == [
        "SLURM_CONF=of SLURM_CONF"
    ]
    assert host.read_options() == {
        "SBATCH_TIMELIMIT": "of SBATCH_TIMELIMIT",
        "SBATCH_ACCOUNT": "of SBATCH_ACCOUNT",
    }
