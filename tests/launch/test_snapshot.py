from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardway.errors import UserError
from shardway.launch.snapshot import (
    SnapshotLimits,
    SnapshotPlan,
    is_secret,
    is_source,
    parse_stage,
    parse_status,
    plan_snapshot,
    take_snapshot,
)

IDENTITY = {
    **{
        f"GIT_{who}_{what}": text for who in ("AUTHOR", "COMMITTER") for what, text in (("NAME", "A"), ("EMAIL", "a@b"))
    },
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_CONFIG_NOSYSTEM": "1",
}


def git(folder: Path, *words: str) -> str:
    settings = ("-c", "init.defaultBranch=main", "-c", "protocol.file.allow=always", "-c", "gc.auto=0")
    done = subprocess.run(
        ["git", *settings, *words], cwd=folder, env={**os.environ, **IDENTITY}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        put(folder / name.replace("__", "/"), text)


def put(path: Path, text: str = "x\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def commit_all(folder: Path) -> str:
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "x")
    return git(folder, "rev-parse", "HEAD")


@pytest.fixture(scope="module")
def committed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with one commit: two files of code, and data/ ignored."""
    root = tmp_path_factory.mktemp("committed") / "project"
    put(root / "train.py", "one\n")
    put(root / "pkg" / "model.py")
    put(root / ".gitignore", "data/\n*.log\n__pycache__/\n")
    git(root, "init", "-q", "--template=")
    commit_all(root)
    return root


@pytest.fixture
def project(committed: Path, tmp_path: Path) -> Path:
    """One of its own for each test."""
    return Path(shutil.copytree(committed, tmp_path / "project", symlinks=True))


def files(plan: SnapshotPlan) -> set[str]:
    return set(plan.files)


def links(plan: SnapshotPlan) -> dict[str, str]:
    return {link.path: link.reason for link in plan.links}


def left_out(plan: SnapshotPlan) -> dict[str, str]:
    return dict(plan.left_out)


CODE = {"train.py", "pkg/model.py", ".gitignore"}


# --- a git repository


def test_the_working_tree_is_copied_as_it_is_now(project: Path, tmp_path: Path) -> None:
    put(project / "train.py", "two\n")
    put(project / "new file.py")
    (project / "pkg" / "model.py").unlink()
    plan = plan_snapshot(project)
    take_snapshot(plan, tmp_path / "0001" / "code")
    code = tmp_path / "0001" / "code"
    assert {str(path.relative_to(code)) for path in code.rglob("*")} == {"train.py", "new file.py", ".gitignore"}
    assert (code / "train.py").read_text() == "two\n"
    record = json.loads((tmp_path / "0001" / "snapshot.json").read_text())
    assert record["format"] == 1
    assert (record["commit"], record["branch"]) == (git(project, "rev-parse", "HEAD"), "main")
    assert (record["dirty"], record["untracked"], record["files"]) == (True, 1, 3)
    assert record["bytes"] == sum(path.stat().st_size for path in code.rglob("*"))
    diff = (tmp_path / "0001" / "code.diff").read_text()
    assert "-one\n+two" in diff
    assert "deleted file" in diff


def test_a_clean_tree_is_its_commit(project: Path, tmp_path: Path) -> None:
    plan = plan_snapshot(project)
    assert plan.revision
    assert (plan.revision.dirty, plan.revision.diff, files(plan), plan.links) == (False, "", CODE, ())
    take_snapshot(plan, tmp_path / "1" / "code")
    put(project / "train.py", "edited while it is queued\n")
    assert (tmp_path / "1" / "code" / "train.py").read_text() == "one\n"


def test_the_index_is_not_touched(project: Path) -> None:
    os.utime(project / "train.py", (1, 1))
    before = (project / ".git" / "index").read_bytes()
    plan_snapshot(project)
    assert (project / ".git" / "index").read_bytes() == before


def test_a_folder_below_is_the_start_folder(project: Path) -> None:
    plan = plan_snapshot(project / "pkg")
    assert (plan.root, plan.below, files(plan)) == (project, "pkg", CODE)
    assert plan.start_folder(Path("/x/code")) == Path("/x/code/pkg")
    assert plan_snapshot(project).start_folder(Path("/x/code")) == Path("/x/code")


def test_folders_with_nothing_in_them_come_along(project: Path, tmp_path: Path) -> None:
    """A program that writes into one of them does not make it first."""
    for name in ("checkpoints", "pkg/out", "data", "data/cache"):
        (project / name).mkdir()
    put(project / "full" / "a.txt")
    plan = plan_snapshot(project)
    assert (set(plan.folders), set(links(plan))) == ({"checkpoints", "pkg/out"}, {"data"})
    take_snapshot(plan, tmp_path / "0001" / "code")
    assert list((tmp_path / "0001/code/checkpoints").iterdir()) == []
    assert (tmp_path / "0001/code/pkg/out").is_dir()


def test_what_git_ignores_is_linked_and_caches_are_not(project: Path, tmp_path: Path) -> None:
    put(project / "data" / "deep" / "a.bin", "data\n")
    put(project / "pkg" / "run.log")
    put(project / "pkg" / "__pycache__" / "model.pyc")
    plan = plan_snapshot(project)
    assert links(plan) == {"data": "ignored by git", "pkg/run.log": "ignored by git"}
    take_snapshot(plan, tmp_path / "1" / "code")
    assert (tmp_path / "1" / "code" / "data" / "deep" / "a.bin").read_text() == "data\n"
    assert not (tmp_path / "1" / "code" / "pkg" / "__pycache__").exists()


def test_a_tracked_file_in_an_ignored_folder_is_copied_beside_links(project: Path, tmp_path: Path) -> None:
    put(project / "data" / "README")
    put(project / "data" / "a.bin")
    put(project / "data" / "deep" / "b.bin")
    git(project, "add", "-f", "data/README")
    plan = plan_snapshot(project)
    assert files(plan) == CODE | {"data/README"}
    assert set(links(plan)) == {"data/a.bin", "data/deep"}
    take_snapshot(plan, tmp_path / "1" / "code")
    assert not (tmp_path / "1" / "code" / "data").is_symlink()


def test_nothing_is_linked_for_another_host(project: Path) -> None:
    put(project / "data" / "a.bin")
    plan = plan_snapshot(project, links=False)
    assert plan.links == ()
    assert left_out(plan) == {"data": "ignored by git; not carried to another host"}


def test_large_files_are_linked(project: Path) -> None:
    put(project / "big.py", "x" * 2000)
    plan = plan_snapshot(project, SnapshotLimits(file_bytes=1024))
    assert files(plan) == CODE
    assert "more than 1KiB" in links(plan)["big.py"]


@pytest.mark.parametrize(
    ("here", "told"),
    [
        (True, "linked, not copied: 2 files over 1MiB (5.0 MiB, the largest w/b.bin with 3.0 MiB); to edit them while"),
        (False, "not carried to the other host: 2 files over 1MiB (5.0 MiB, the largest w/b.bin with 3.0 MiB)."),
    ],
)
def test_large_files_are_told_with_the_largest(here: bool, told: str, project: Path) -> None:
    """What git ignores is data, and no news; nor is a file of just the limit."""
    for name, mebibytes in (("a.bin", 2), ("w/b.bin", 3), ("data/c.bin", 4), ("small.bin", 1)):
        put(project / name, "x" * (mebibytes << 20))
    (note,) = plan_snapshot(project, SnapshotLimits(file_bytes=1 << 20), links=here).notes
    assert note.startswith(told)
    (project / "a.bin").unlink()
    (project / "w/b.bin").unlink()
    assert plan_snapshot(project, SnapshotLimits(file_bytes=1 << 20), links=here).notes == ()


@pytest.mark.parametrize("limits", [SnapshotLimits(files=4), SnapshotLimits(total_bytes=1024)])
def test_a_project_over_the_limits_is_refused_with_its_largest_folders(project: Path, limits: SnapshotLimits) -> None:
    write(project, results__a__one="x" * 600, results__a__two="x" * 600, results__a__three="x")
    with pytest.raises(UserError) as told:
        plan_snapshot(project, limits)
    lines = str(told.value).splitlines()
    assert "6 files" in lines[0]
    assert lines[2].startswith("    results/a: 3 files")
    assert ".gitignore" in lines[-1]


def test_further_links_than_allowed_are_left_out_and_told(project: Path) -> None:
    write(project, **{"pkg__a.log": "", "pkg__b.log": "", "c.log": ""})
    plan = plan_snapshot(project, SnapshotLimits(links=2))
    assert set(links(plan)) == {"c.log", "pkg/a.log"}
    assert left_out(plan) == {"pkg/b.log": "ignored by git; more than 2 links"}


def test_modes_and_links_are_kept(project: Path, tmp_path: Path) -> None:
    put(project / "run.sh").chmod(0o755)
    (project / "inside").symlink_to("pkg/model.py")
    (project / "dangling").symlink_to("nowhere")
    (project / "outside").symlink_to("../elsewhere")
    (project / "absolute").symlink_to(tmp_path)
    plan = plan_snapshot(project)
    take_snapshot(plan, tmp_path / "1" / "code")
    code = tmp_path / "1" / "code"
    assert (code / "run.sh").stat().st_mode & 0o777 == 0o755
    assert (code / "train.py").stat().st_mode & 0o111 == 0
    assert (code / "train.py").stat().st_mtime_ns == (project / "train.py").stat().st_mtime_ns
    read = {name: os.readlink(code / name) for name in ("inside", "dangling", "outside", "absolute")}
    elsewhere = str(tmp_path / "elsewhere")
    assert read == {
        "inside": "pkg/model.py",
        "dangling": "nowhere",
        "outside": elsewhere,
        "absolute": str(tmp_path),
    }


def test_a_folder_that_became_a_link_is_never_written_through(project: Path, tmp_path: Path) -> None:
    elsewhere = put(tmp_path / "elsewhere" / "model.py", "theirs\n").parent
    (project / "pkg" / "model.py").unlink()
    (project / "pkg").rmdir()
    (project / "pkg").symlink_to(elsewhere)
    plan = plan_snapshot(project)
    assert files(plan) == {"train.py", ".gitignore"}
    take_snapshot(plan, tmp_path / "1" / "code")
    assert os.listdir(elsewhere) == ["model.py"]
    assert (elsewhere / "model.py").read_text() == "theirs\n"


def test_secrets_are_left_out_of_files_and_of_the_diff(project: Path, tmp_path: Path) -> None:
    put(project / ".env", "KEY=old-secret\n")
    commit_all(project)
    put(project / ".env", "KEY=new-secret\n")
    put(project / "hf_token.txt", "fresh-secret")
    put(project / "train.py", "changed\n")
    plan = plan_snapshot(project)
    assert left_out(plan) == {".env": "secret by its name", "hf_token.txt": "secret by its name"}
    take_snapshot(plan, tmp_path / "1" / "code")
    assert plan.revision
    assert "+changed" in plan.revision.diff
    kept = b"".join(path.read_bytes() for path in (tmp_path / "1").rglob("*") if path.is_file())
    assert [word for word in (b"old-secret", b"new-secret", b"fresh-secret") if word in kept] == []
    git(project, "rm", "-q", "-f", ".env")
    assert "old-secret" not in (plan_snapshot(project).revision or plan.revision).diff


def test_run_directories_are_linked_and_never_copied(project: Path) -> None:
    put(project / "runs" / "first" / "resolved.toml")
    put(project / "runs" / "first" / "attempts" / "0001" / "code" / "train.py")
    put(project / "runs" / "second" / "attempts" / "0001" / "job.sh")
    put(project / "events" / "handler.py")
    plan = plan_snapshot(project)
    assert files(plan) == CODE | {"events/handler.py"}
    assert links(plan) == {"runs/first": "run directory", "runs/second": "run directory"}


def test_submodules_and_clones_inside_are_copied(project: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    put(other / "lib.py")
    put(other / ".gitignore", "*.so\n")
    git(other, "init", "-q")
    commit = commit_all(other)
    git(project, "submodule", "-q", "add", str(other), "ext/lib")
    git(project, "submodule", "-q", "add", str(other), "ext/gone")
    commit_all(project)
    git(project, "submodule", "-q", "deinit", "-f", "ext/gone")
    git(project, "clone", "-q", str(other), "clone")
    put(project / "ext" / "lib" / "lib.py", "changed\n")
    put(project / "ext" / "lib" / "fast.so")
    plan = plan_snapshot(project)
    lib = {f"{place}/{name}" for place in ("ext/lib", "clone") for name in ("lib.py", ".gitignore")}
    assert files(plan) == CODE | lib | {".gitmodules"}
    assert links(plan) == {"ext/lib/fast.so": "ignored by git"}
    assert left_out(plan) == {"ext/gone": "submodule that is not checked out"}
    assert plan.revision
    found = {entry.path: (entry.commit, entry.dirty) for entry in plan.revision.submodules}
    assert found == {"ext/lib": (commit, True), "clone": (commit, False)}


def test_a_repository_without_a_commit_has_none(tmp_path: Path) -> None:
    put(tmp_path / "p" / "train.py")
    git(tmp_path / "p", "init", "-q")
    revision = plan_snapshot(tmp_path / "p").revision
    assert revision
    assert (revision.commit, revision.branch, revision.dirty, revision.diff) == ("", "main", True, "")


def test_a_long_diff_is_cut(project: Path) -> None:
    put(project / "train.py", "line\n" * 10_000)
    revision = plan_snapshot(project, SnapshotLimits(diff_bytes=500)).revision
    assert revision
    assert revision.diff_cut
    assert len(revision.diff.encode()) == 500


def test_a_hook_of_git_does_not_lead_elsewhere(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "nowhere"))
    assert files(plan_snapshot(project)) == CODE


def test_odd_names_are_kept(project: Path, tmp_path: Path) -> None:
    names = ["a b.py", "new\nline.py", 'q"uote.py', "ünïcode.py", "tab\t.py", os.fsdecode(b"latin\xe9.py")]
    for name in names:
        put(project / name)
    git(project, "add", names[1])
    plan = plan_snapshot(project)
    assert files(plan) == CODE | set(names)
    take_snapshot(plan, tmp_path / "1" / "code")
    assert set(os.listdir(tmp_path / "1" / "code")) == {*names, "train.py", "pkg", ".gitignore"}


# --- what git prints


def test_the_status_is_read_with_renames_and_conflicts() -> None:
    output = (
        "# branch.oid 12ab\0# branch.head feature/x\0# branch.upstream o/x\0"
        "2 R. N... 100644 100644 100644 a a R100 new name.py\0? old.py\0u UU N... 1 2 3 4 a b c c.py\0"
        "? un tracked.py\0? clone/\0! data/\0! a.log\0"
    )
    status = parse_status(output)
    assert (status.commit, status.branch, status.changed) == ("12ab", "feature/x", True)
    assert status.untracked == ("un tracked.py", "clone/")  # "? old.py" is the name before the rename
    assert status.ignored == ("data/", "a.log")
    bare = parse_status("# branch.oid (initial)\0# branch.head (detached)\0")
    assert (bare.commit, bare.branch, bare.changed) == ("", "", False)


def test_the_index_is_read_with_conflicts_and_submodules() -> None:
    output = "100644 a 1\tx.py\x00100644 b 2\tx.py\x00160000 c 0\text\x00120000 d 0\ttab\there\0"
    assert parse_stage(output) == (("x.py", "tab\there"), ("ext",))


# --- no git


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A project without git."""
    root = tmp_path / "folder"
    write(
        root, **{"train.py": "one\n", "run.toml": "", "conf__a.yaml": "", "weights.bin": "", ".hidden": "", ".env": ""}
    )
    write(root, **{"data__a.jpg": "", "data__deep__b.jpg": "", "outputs__x.pt": "", "conf__table.parquet": ""})
    write(root, **{".venv__pyvenv.cfg": "", ".venv__lib__a.py": "", "env__conda-meta__history": "", "env__x.py": ""})
    write(root, **{"pkg____pycache____a.pyc": "", "pkg__a.py": "", "node_modules__a__index.js": "", ".idea__a.xml": ""})
    return root


def test_without_git_what_looks_like_source_is_copied(folder: Path) -> None:
    plan = plan_snapshot(folder)
    assert (plan.root, plan.below, plan.revision, plan.notes) == (folder, "", None, ())
    assert {name.replace("pkg/__pycache__", "") for name in files(plan)} >= {"train.py", "run.toml", "conf/a.yaml"}
    assert set(links(plan)) >= {"weights.bin", "data", "outputs", "conf/table.parquet", ".venv", "env", "node_modules"}
    assert left_out(plan) == {".hidden": "hidden", ".idea": "hidden", ".env": "secret by its name"}


def test_a_folder_with_many_entries_is_data(folder: Path) -> None:
    for number in range(8):
        put(folder / "lists" / f"{number}.txt")
    plan = plan_snapshot(folder, SnapshotLimits(entries=16))
    assert "lists/7.txt" in files(plan)
    for number in range(8, 17):
        put(folder / "lists" / f"{number}.txt")
    plan = plan_snapshot(folder, SnapshotLimits(entries=16))
    assert links(plan)["lists"] == "folder that holds more than 16 entries"


def test_without_the_program_git_the_other_rule_holds(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(project / "weights.bin")
    monkeypatch.setenv("PATH", str(project))
    plan = plan_snapshot(project)
    assert plan.revision is None
    assert files(plan) == {"train.py", "pkg/model.py"}
    assert set(links(plan)) == {"weights.bin"}
    assert "git is not installed" in plan.notes[0]


def test_a_repository_of_somebody_else_is_told(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    plan = plan_snapshot(project)
    assert files(plan) == {"train.py", "pkg/model.py"}
    assert f"git config --global --add safe.directory {project}" in plan.notes[0]


@pytest.mark.parametrize("with_git", [False, True])
def test_a_home_folder_is_no_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_git: bool) -> None:
    home = tmp_path / "homes" / "alice"
    put(home / "work" / "train.py")
    monkeypatch.setenv("HOME", str(home))
    if with_git:
        git(home, "init", "-q")
    for place in (home, home.parent, Path("/")):
        with pytest.raises(UserError, match="no project folder"):
            plan_snapshot(place)
    plan = plan_snapshot(home / "work")
    assert (files(plan), plan.revision) == ({"train.py"}, None)
    assert len(plan.notes) == with_git


def test_a_missing_project_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read: No such file"):
        plan_snapshot(tmp_path / "nowhere")


# --- the effect


def test_what_vanished_since_the_plan_is_told(project: Path, tmp_path: Path) -> None:
    plan = plan_snapshot(project)
    (project / "pkg" / "model.py").unlink()
    (project / "train.py").unlink()
    os.mkfifo(project / "train.py")
    take_snapshot(plan, tmp_path / "1" / "code")
    taken = json.loads((tmp_path / "1" / "snapshot.json").read_text())
    assert taken["files"] == 1
    told = {entry["path"]: entry["reason"] for entry in taken["left_out"]}
    assert told["pkg/model.py"] == "could not be read when it was copied: No such file or directory"
    assert told["train.py"] == "not a plain file any more"
    assert taken["left_out_count"] == 2


def test_a_snapshot_is_never_written_over(project: Path, tmp_path: Path) -> None:
    plan = plan_snapshot(project)
    put(tmp_path / "1" / "code" / "mine")
    with pytest.raises(UserError, match="holds a snapshot already"):
        take_snapshot(plan, tmp_path / "1" / "code")
    assert os.listdir(tmp_path / "1" / "code") == ["mine"]


def test_a_full_disk_leaves_no_half_snapshot(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(source: int, target: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("shardway.launch.snapshot._pump", fail)
    with pytest.raises(UserError, match="No space left on device"):
        take_snapshot(plan_snapshot(project), tmp_path / "1" / "code")
    assert not (tmp_path / "1" / "code").exists()


@pytest.mark.parametrize("code", [errno.EXDEV, errno.ENOSYS])
def test_files_are_copied_where_bytes_cannot_be_shared(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def fail(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "copy_file_range", fail, raising=False)
    put(project / "train.py", "text\n" * 250_000)
    take_snapshot(plan_snapshot(project), tmp_path / "1" / "code")
    assert (tmp_path / "1" / "code" / "train.py").read_bytes() == (project / "train.py").read_bytes()


def test_five_thousand_files_take_no_longer_than_a_copy_of_their_repository(project: Path, tmp_path: Path) -> None:
    """In processor time of this process and of git: half of it. Other work that shares a core makes both slower."""
    for number in range(5000):
        put(project / f"d{number % 50}" / f"{number}.py", f"{number}\n" * 200)
    commit_all(project)
    assert len(plan_snapshot(project).files) == 5003
    costs, copies = list[float](), list[float]()
    while len(costs) < 5 and (not costs or min(costs) >= min(copies)):
        target = tmp_path / str(len(costs))
        costs.append(processor_s(lambda to=target: take_snapshot(plan_snapshot(project), to / "code")))
        copies.append(processor_s(lambda to=target: shutil.copytree(project, to / "copy")))
    assert min(costs) < min(copies)


def processor_s(work: Callable[[], object]) -> float:
    """What this process and those that it waits for have worked meanwhile."""
    before = sum(os.times()[:4])
    work()
    return sum(os.times()[:4]) - before


# --- names


@pytest.mark.parametrize(
    "name",
    [
        *(
            ".env",
            ".env.local",
            "server.pem",
            "id_rsa",
            "id_ed25519",
            "hf_token",
            "token.txt",
            ".hf-token",
            "API_TOKEN.json",
        ),
        *("credentials", "credentials.json", "aws-credentials.yaml", ".netrc", "secrets.toml", "openai_api_key.txt"),
    ],
)
def test_secrets_are_known_by_name(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize(
    "name",
    [
        *(
            "tokenizer.json",
            "tokenizer.py",
            "tokens.bin",
            "train_tokens.txt",
            "token.py",
            "credentials.py",
            "id_map.json",
        ),
        *(
            ".env.example",
            "environment.yaml",
            "special_tokens_map.json",
            "text-as-token-file.txt",
            "model.pt",
            "secrets.py",
        ),
        "token.npy",
    ],
)
def test_code_and_data_about_tokens_are_no_secrets(name: str) -> None:
    assert not is_secret(name)


def test_source_is_known_by_name() -> None:
    assert all(map(is_source, ("a.py", "a.YAML", "Makefile", "Dockerfile.gpu", "a.b.toml")))
    assert not any(map(is_source, ("a.jpg", "a", ".py", "a.pt", "a.parquet", "py")))


@settings(settings.get_profile("brief"))
@given(st.text(st.characters(codec="utf-8"), max_size=30))
def test_any_name_gets_an_answer(name: str) -> None:
    assert is_secret(name) in (True, False)
    assert not (is_secret(name) and name.endswith(".py"))
