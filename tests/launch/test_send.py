from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

import pytest
from job_cases import Cluster

from shardway.errors import SiteError, UserError
from shardway.launch.hosts.base import Done
from shardway.launch.hosts.local import LocalHost
from shardway.launch.runs.find import Known, read_known
from shardway.launch.runs.job_status import Ledger, LedgerEntry
from shardway.launch.submission import host_checks
from shardway.launch.submission.command import Code
from shardway.launch.submission.job_request import JobRequest
from shardway.launch.submission.prepare import Prepared, SubmitRequest, prepare
from shardway.launch.submission.submit import SentSubmission, Submitter, submit_run
from shardway.resolve.request import ResolveRequest
from shardway.rundir.attempts import Attempt, Ending, Result, Submission
from shardway.rundir.directory import RunDir

PROFILE = """format = 1
name = "tiny"
title = "Tiny"
scheduler = "slurm"
launcher = "torchrun"
[node]
cores = 4
[[queues]]
name = "cpu"
max_walltime = "2h"
"""
STAT = '#!/bin/bash\n[ "$1" != -f ] || { echo lustre; exit; }\nexec /usr/bin/stat "$@"\n'
IDENTITY = {
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_CONFIG_NOSYSTEM": "1",
    **{f"GIT_{who}_{what}": "a@b" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")},
}


class There(LocalHost):
    """A login node whose files lie here; every exchange with it is noted by its commands."""

    name = "alice@login"

    def __init__(self) -> None:
        self.exchanges: list[list[tuple[str, ...]]] = []
        self._inside = False
        self.before_sbatch: Callable[[], object] = lambda: None

    def run(self, words: Sequence[str], *, timeout_s: float = 30.0, stdin: str = "") -> Done:
        if not self._inside:
            self._note(words)
        if words[0] == "sbatch":
            self.before_sbatch()
        return super().run(words, timeout_s=timeout_s, stdin=stdin)

    def run_many(self, commands: Sequence[Sequence[str]], *, timeout_s: float = 60.0) -> list[Done]:
        self._note(*commands)
        self._inside = True
        try:
            return super().run_many(commands, timeout_s=timeout_s)
        finally:
            self._inside = False

    def read_files(self, paths: Sequence[PurePosixPath]) -> dict[PurePosixPath, str]:
        self._note(("read",))
        return super().read_files(paths)

    def write_files(self, files: Mapping[PurePosixPath, str], *, executable: Sequence[PurePosixPath] = ()) -> None:
        self._note(("write",))
        super().write_files(files, executable=executable)

    def copy_tree(self, source: Path, target: PurePosixPath) -> None:
        self._note(("copy",))
        super().copy_tree(source, target)

    def expand(self, path: str) -> PurePosixPath:
        return self.expand_many([path])[0]

    def expand_many(self, paths: Sequence[str]) -> list[PurePosixPath]:
        if any(not path.startswith("/") or "$" in path for path in paths):
            self._note(("expand",))
        return LocalHost.expand_many(self, paths)

    def _note(self, *commands: Sequence[str]) -> None:
        self.exchanges.append([tuple(words) for words in commands])

    def count(self, program: str) -> int:
        """How often a program was run."""
        return sum(words[0] == program for exchange in self.exchanges for words in exchange)


def git(folder: Path, *words: str) -> str:
    words = ("git", "-c", "init.defaultBranch=main", *words)
    done = subprocess.run(words, cwd=folder, env={**os.environ, **IDENTITY}, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@dataclass
class Desk:
    """A project with a change, and a person who submits it to fake commands of Slurm on a login node."""

    path: Path
    cluster: Cluster
    commit: str
    host: There = field(default_factory=There)

    def order(self, *overrides: str, command: tuple[str, ...] = ("python", "train.py")) -> SubmitRequest:
        """The program as it stands."""
        request = ResolveRequest(None, ("site.venv=none", *overrides), self.path / "run")
        return SubmitRequest(request, site=str(self.path / "tiny.toml"), command=command, here=self.path / "project")

    def send(self) -> SentSubmission:
        """Submit it, without pauses."""
        return submit_run(self.order(), self.host, Submitter(self.host, pause=lambda seconds: None))

    def lose(self, *silent: str) -> None:
        """Submit it to a scheduler that takes it and does not answer any more, or that is down."""
        self.cluster.write("answers", "lost\n" if silent else "down\n" * 6)
        for name in silent:
            self.cluster.write(name, "")
        with pytest.raises(SiteError, match="in 6 tries"):
            self.send()
        for name in silent:
            (self.cluster.path / name).unlink()
        self.host.exchanges.clear()

    @property
    def queue(self) -> list[str]:
        """Ids of the jobs that the scheduler has taken."""
        return [line.split("|")[0] for line in (self.cluster.path / "queue").read_text().splitlines()]


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    return make_desk(tmp_path, monkeypatch)


def make_desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    """Fakes first on the PATH, nothing of the person who tests."""
    cluster = Cluster.make(tmp_path / "cluster")
    (cluster.path / "bin/stat").write_text(STAT)
    (cluster.path / "bin/stat").chmod(0o755)
    monkeypatch.setenv("PATH", f"{cluster.path}/bin:/usr/bin:/bin")
    monkeypatch.setenv("FAKES", str(cluster.path))
    monkeypatch.setenv("HOME", f"{cluster.path}/home")
    for name in ("STATE", "CONFIG"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name.lower()))
    monkeypatch.setattr(host_checks, "_OF_ONE_NODE", ())  # where tests write
    (tmp_path / "tiny.toml").write_text(PROFILE)
    project = tmp_path / "project"
    project.mkdir()
    (project / "train.py").write_bytes(b"one = 1\r\n")
    (project / "words.txt").write_bytes(b"x" * 9000 + b"\n")
    git(project, "init", "-q")
    git(project, "add", "-A")
    git(project, "-c", "core.autocrlf=false", "commit", "-q", "-m", "x")
    (project / "train.py").write_bytes(b"two = 2\r\n")
    (project / "words.txt").write_bytes(b"x" * 9000 + b"\nodd: \0\xff it's\n")
    return Desk(tmp_path, cluster, git(project, "rev-parse", "HEAD"))


# --- what arrives


def test_a_snapshot_arrives_with_its_record_and_its_diff(desk: Desk) -> None:
    folder = desk.send().prepared.job.folder
    assert (folder.code / "train.py").read_bytes() == b"two = 2\r\n"
    record = json.loads(folder.snapshot_path.read_text())
    assert (record["commit"], record["dirty"], record["files"]) == (desk.commit, True, 2)
    diff = folder.diff_path.read_bytes()
    assert b"-one = 1\r\n+two = 2\r\n" in diff
    assert "+odd: \ufffd\ufffd it's\n".encode() in diff


def test_all_that_a_snapshot_here_has_is_there_too(desk: Desk) -> None:
    there = desk.send().prepared.job.folder.path
    here = submit_run(
        replace(desk.order(), run_request=ResolveRequest(None, ("site.venv=none",), desk.path / "here")), LocalHost()
    )
    assert list_names(there) == list_names(here.prepared.job.folder.path)


def list_names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


# --- how often


def test_the_attempts_are_listed_once(desk: Desk) -> None:
    assert desk.send().job == "101"
    firsts = [exchange[0][0] for exchange in desk.host.exchanges]
    assert firsts[: firsts.index("find")] == ["expand", "ls", "read", "bash", "stat", "rm"]
    assert desk.host.count("ls") == 1


def test_an_interrupted_submission_is_found_with_one_listing(desk: Desk) -> None:
    desk.lose("silent")
    sent = desk.send()
    assert (sent.job, sent.found, sent.prepared.job.attempt, desk.queue) == ("101", True, 1, ["101"])
    assert (desk.host.count("ls"), desk.host.count("sbatch")) == (1, 0)


def test_one_that_did_not_get_through_is_submitted_under_its_number(desk: Desk) -> None:
    desk.lose()
    dry = prepare(desk.order(), desk.host)
    desk.host.exchanges.clear()
    sent = desk.send()
    assert (sent.job, sent.found, sent.prepared.job.attempt, dry.job.attempt, desk.queue) == (
        "101",
        False,
        1,
        1,
        ["101"],
    )
    assert (desk.host.count("ls"), desk.host.count("sbatch")) == (1, 1)
    submission = sent.prepared.job.folder.read_submission()
    assert submission is not None
    assert (submission.job, submission.token) == ("101", sent.prepared.job.token)


def test_what_is_still_queued_is_not_submitted_again(desk: Desk) -> None:
    desk.send()
    with pytest.raises(UserError, match="has attempt 1 queued as job 101"):
        desk.send()
    assert desk.queue == ["101"]


SENT = Submission("slurm", "a1b2c3", job="17")
UNSENT = Submission("slurm", "a1b2c3")
ENDED = Result(Ending.FINISHED)


@pytest.mark.parametrize(
    ("entries", "number"),
    [
        ([], 1),
        ([(1, SENT, None)], 2),
        ([(1, SENT, ENDED), (2, UNSENT, None)], 2),
        ([(1, SENT, ENDED), (2, None, None)], 2),
        ([(1, SENT, ENDED), (2, UNSENT, ENDED)], 3),
        ([(1, UNSENT, None), (4, SENT, None)], 5),
    ],
)
def test_the_number_of_the_next_attempt(
    entries: list[tuple[int, Submission | None, Result | None]], number: int
) -> None:
    run = RunDir(Path("/r"))
    found = [LedgerEntry(Attempt(run.attempt(n).path), sent, result=result) for n, sent, result in entries]
    assert Ledger(run, tuple(found)).next_number == number


# --- what a refusal leaves


def test_a_refused_run_is_forgotten_and_its_folders_go(desk: Desk) -> None:
    (desk.path / "scratch").mkdir()
    desk.cluster.write("answers", "account\n")
    order = desk.order()
    order = replace(order, run_request=replace(order.run_request, directory=desk.path / "scratch/me/deep/run"))
    seen = list[list[Known]]()
    desk.host.before_sbatch = lambda: seen.append(read_known())
    with pytest.raises(UserError, match="may not charge"):
        submit_run(order, desk.host, Submitter(desk.host, pause=lambda seconds: None))
    assert (list((desk.path / "scratch").iterdir()), read_known()) == ([], [])
    assert [known.run for known in seen[0]] == [str(desk.path / "scratch/me/deep/run")]  # while it was asked


def test_the_folder_of_a_run_is_for_its_owner_and_group(desk: Desk) -> None:
    before = os.umask(0)
    try:
        desk.send()
    finally:
        os.umask(before)
    assert (desk.path / "run").stat().st_mode & 0o777 == 0o750


def test_what_was_there_before_a_refusal_stays(desk: Desk) -> None:
    (desk.path / "run/attempts").mkdir(parents=True)
    (desk.path / "run/notes").touch()
    desk.cluster.write("answers", "account\n")
    with pytest.raises(UserError, match="may not charge"):
        desk.send()
    assert os.listdir(desk.path / "run") == ["notes"]
    assert [known.run for known in read_known()] == [str(desk.path / "run")]


def test_another_command_in_the_folder_of_a_run_is_told(desk: Desk) -> None:
    """It would go on with what the first one wrote."""
    folder = desk.send().prepared.job.folder
    folder.write_result(Result(Ending.FINISHED))
    assert not [told for told in prepare(desk.order(), desk.host).warnings if "another command" in told]
    (told,) = prepare(desk.order(command=("python", "train.py", "--lr=2")), desk.host).warnings
    assert told.startswith(f"{desk.path}/run ran another command, `python train.py`, and this one finds what it wrote")
    assert "another run (run.name, --dir)" in told


def test_a_run_refused_before_its_folder_is_not_remembered(desk: Desk) -> None:
    with pytest.raises(UserError, match="there is no /gone"):
        submit_run(desk.order("site.venv=/gone"), desk.host)
    assert read_known() == []


# --- what is looked at there


def prepare_training(desk: Desk, *overrides: str) -> Prepared:
    return prepare(desk.order("run.device=cpu", *overrides, command=()), LocalHost())


def list_problems(request: JobRequest, host: There) -> list[tuple[str, str]]:
    found = host_checks.list_host_problems(request, host, Code(Path.cwd(), is_there=False))
    return [(problem.where, problem.what) for problem in found]


def test_all_places_are_looked_at_in_one_exchange(desk: Desk) -> None:
    request = prepare_training(desk, "site.venv=/gone/venv", "data.path=/gone/data").request
    assert list_problems(request, desk.host) == [
        ("site.venv", "there is no /gone/venv/bin/activate on alice@login"),
        ("data.path", "there is no /gone/data on alice@login"),
    ]
    [exchange] = desk.host.exchanges
    assert [words[0] for words in exchange] == ["test", "test", "stat", "stat", "timeout"]


def test_paths_with_variables_cost_one_exchange_more(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCRATCH", str(desk.path))
    request = prepare_training(desk, "site.venv=~/venv", "data.path=/$SCRATCH/project/train.py").request
    assert list_problems(request, desk.host) == [("site.venv", "there is no ~/venv/bin/activate on alice@login")]
    assert len(desk.host.exchanges) == 2


class Told(There):
    """A login node that knows folders by their kind, and no others; it may not answer at all."""

    def __init__(self, kinds: Mapping[str, str], *, silent: bool = False) -> None:
        super().__init__()
        self.kinds, self.silent = kinds, silent

    def run_many(self, commands: Sequence[Sequence[str]], *, timeout_s: float = 60.0) -> list[Done]:
        self._note(*commands)
        return [self._answer(tuple(words)) for words in commands]

    def _answer(self, words: tuple[str, ...]) -> Done:
        if self.silent:
            return Done(words, -1, "", "", timed_out=True)
        known = [self.kinds[path] for path in words if path in self.kinds]
        return Done(words, 0 if known else 1, "".join(f"{kind}\n" for kind in known), "")


def test_the_nearest_folder_that_is_there_says_where_a_run_lies(desk: Desk) -> None:
    request = replace(prepare(desk.order(), LocalHost()).request, run=Path("/a/b/run"))
    told = "/a/b/run is on a node's own disk (in memory), which other nodes do not see"
    for kinds in ({"/a": "lustre", "/a/b": "tmpfs"}, {"/a": "tmpfs"}, {"/a/b/run": "ramfs"}):
        assert list_problems(request, Told(kinds)) == [("run.root", told)]
    for kinds in ({"/a": "tmpfs", "/a/b": "lustre"}, {"/": "tmpfs"}, {}):
        assert list_problems(request, Told(kinds)) == []


def test_a_place_that_does_not_answer_is_not_held_against_anybody(desk: Desk) -> None:
    request = prepare_training(desk, "site.venv=/v", "data.path=/d").request
    assert list_problems(request, Told({}, silent=True)) == []
