"""Where a person's program works, and what of it the next attempt finds: newer code comes, what it wrote stays."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from job_cases import Cluster, make_job

from shardway.launch.script import read_block, read_blocks
from shardway.launch.snapshot import plan_snapshot, take_snapshot
from shardway.rundir.attempts import Attempt
from shardway.rundir.directory import RunDir

FUNCTIONS = "\n".join(
    [read_block("lib", name).text for name in ("say", "whole")]
    + [block.text for block in read_blocks("lib").values()]
    + ["fail() { echo failed: $1; exit 1; }"]
)


@dataclass
class Attempts:
    """A project, and the attempts of one run of it, of which only the beginning is played."""

    project: Path
    run: RunDir
    below: str = ""

    @property
    def work(self) -> Path:
        return self.run.work

    def begin(self, *, submitted: bool = True) -> str:
        """The next attempt up to its program, with the code as it is now; what the job says."""
        attempt = self.run.attempt(len(self.run.attempts()) + 1)
        attempt.make()
        if submitted:
            plan = plan_snapshot(self.project / self.below)
            take_snapshot(plan, attempt.code)
            attempt.order_path.write_text("{}")
        return self.enter(attempt, attempt)

    def enter(self, attempt: Attempt, of: Attempt) -> str:
        """The beginning of an attempt with the code of another one, as a link of a chain has."""
        script = f'run={self.run.path}; here={attempt.path}; {FUNCTIONS}\nenter_work "$@" && pwd'
        words = (of.code, self.work / self.below, self.project)
        done = subprocess.run(["bash", "-c", script, "x", *words], capture_output=True, text=True, check=False)
        assert done.stderr == ""
        return done.stdout

    def write(self, **files: str) -> None:
        """Edit the project."""
        for name, text in files.items():
            path = self.project / name.replace("__", "/").replace("_py", ".py").replace("_txt", ".txt")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)


@pytest.fixture
def attempts(tmp_path: Path) -> Attempts:
    project = tmp_path / "project"
    project.mkdir()
    run = RunDir(tmp_path / "runs/mine")
    run.path.mkdir(parents=True)
    made = Attempts(project, run)
    made.write(train_py="one", lib__part_py="part", log_txt="head\n")
    return made


def read(folder: Path) -> dict[str, str]:
    """Every plain file below a folder."""
    return {str(p.relative_to(folder)): p.read_text() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_what_a_program_wrote_is_there_in_the_next_attempt(attempts: Attempts) -> None:
    said = attempts.begin()
    assert said.splitlines()[-1] == str(attempts.work)
    assert f"the program works in {attempts.work}: what it writes there stays" in said
    (attempts.work / "model.pt").write_text("step 5")
    (attempts.work / "lib/checkpoints").mkdir()
    (attempts.work / "lib/checkpoints/5.pt").write_text("beside its own file")
    attempts.begin()
    assert read(attempts.work) == {
        "train.py": "one",
        "lib/part.py": "part",
        "log.txt": "head\n",
        "model.pt": "step 5",
        "lib/checkpoints/5.pt": "beside its own file",
    }


def test_newer_code_wins_and_outputs_stay(attempts: Attempts) -> None:
    attempts.begin()
    (attempts.work / "model.pt").write_text("step 5")
    attempts.write(train_py="two", lib__more_py="more")
    (attempts.project / "lib/part.py").unlink()
    assert "gave way" not in attempts.begin()
    assert read(attempts.work) == {"train.py": "two", "lib/more.py": "more", "log.txt": "head\n", "model.pt": "step 5"}


def test_an_edit_that_kept_the_time_of_its_file_is_seen(attempts: Attempts) -> None:
    """As files from an archive may have it."""
    before = (attempts.project / "train.py").stat()
    attempts.begin()
    attempts.write(train_py="other")
    os.utime(attempts.project / "train.py", ns=(before.st_atime_ns, before.st_mtime_ns))
    attempts.begin()
    assert (attempts.work / "train.py").read_text() == "other"


def test_a_program_that_appends_to_a_file_of_the_code_goes_on_with_it(attempts: Attempts) -> None:
    attempts.begin()
    (attempts.work / "log.txt").write_text("head\n1\n")
    (attempts.work / "lib/part.py").unlink()
    os.utime(attempts.project / "log.txt")  # as a checkout does, which changes nothing
    attempts.begin()
    assert (attempts.work / "log.txt").read_text() == "head\n1\n"
    assert not (attempts.work / "lib/part.py").exists(), "which the program has removed"
    assert read(attempts.project)["log.txt"] == "head\n"


def test_where_both_have_changed_code_the_new_one_is_used_and_the_other_kept(attempts: Attempts) -> None:
    attempts.begin()
    (attempts.work / "lib/part.py").write_text("of the program")
    (attempts.work / "new.py").write_text("of the program")
    attempts.write(lib__part_py="of the person", new_py="of the person")
    said = attempts.begin()
    replaced = attempts.run.attempt(2).path / "replaced"
    assert read(replaced) == dict.fromkeys(("lib/part.py", "new.py"), "of the program")
    assert "2 gave way to newer code (" in said
    assert f"see {replaced}" in said
    assert read(attempts.work) == {
        **dict.fromkeys(("lib/part.py", "new.py"), "of the person"),
        "train.py": "one",
        "log.txt": "head\n",
    }


def test_where_both_have_changed_what_is_no_code_that_of_the_program_stays(attempts: Attempts, tmp_path: Path) -> None:
    """The person has trained at home meanwhile, in a repository that does not ignore what that leaves."""
    subprocess.run(["git", "init", "-q", str(attempts.project)], check=True)
    attempts.begin()
    outputs = ("log.txt", "model.pt", "out/step-5/state.json")
    (attempts.work / "out/step-5").mkdir(parents=True)
    (attempts.project / "out/step-5").mkdir(parents=True)
    for name in outputs:
        (attempts.work / name).write_text("of the run")
        (attempts.project / name).write_text("at home")
    (attempts.project / "out/step-5/more.json").write_text("at home")
    said = attempts.begin()
    assert {(attempts.work / name).read_text() for name in outputs} == {"of the run"}
    assert "3 stay though you have newer ones (" in said
    assert not (attempts.run.attempt(2).path / "replaced").exists()


def test_a_file_that_the_person_removed_stays_where_the_program_has_changed_it(attempts: Attempts) -> None:
    attempts.begin()
    (attempts.work / "log.txt").write_text("head\n1\n")
    (attempts.project / "log.txt").unlink()
    attempts.begin()
    assert (attempts.work / "log.txt").read_text() == "head\n1\n"


def test_a_link_of_a_chain_finds_all_as_it_was_left(attempts: Attempts) -> None:
    attempts.begin()
    (attempts.work / "train.py").write_text("changed by itself")
    (attempts.work / "log.txt").unlink()
    second = attempts.run.attempt(2)
    second.make()
    attempts.enter(second, attempts.run.attempt(1))
    assert read(attempts.work) == {"train.py": "changed by itself", "lib/part.py": "part"}


def test_data_are_linked_and_nothing_of_the_person_is_touched(attempts: Attempts, tmp_path: Path) -> None:
    data = attempts.project / "data"
    data.mkdir()
    (data / "tokens.bin").write_text("tokens")
    big = tmp_path / "big"
    big.mkdir()
    (big / "part.bin").write_text("big")
    (attempts.project / "big").symlink_to(big)
    (attempts.project / "same.py").symlink_to("train.py")
    attempts.begin()
    assert (attempts.work / "data/tokens.bin").read_text() == "tokens"
    assert (attempts.work / "big/part.bin").read_text() == "big"
    assert os.readlink(attempts.work / "same.py") == "train.py"
    before = {**read(attempts.project), **read(big)}
    (attempts.project / "big").unlink()  # the link, and the code becomes a folder of that name
    attempts.write(big__code_py="code")
    shutil.rmtree(data)
    attempts.write(data="a file")
    attempts.begin()
    assert read(attempts.work / "big") == {"code.py": "code"}
    assert read(big) == {"part.bin": "big"}
    assert before["train.py"] == read(attempts.project)["train.py"]


def test_nothing_is_written_through_a_link_of_the_program(attempts: Attempts, tmp_path: Path) -> None:
    """It keeps its outputs elsewhere, behind links in place of a folder and of a file of the code."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    (scratch / "part.py").write_text("mine")
    attempts.begin()
    shutil.rmtree(attempts.work / "lib")
    (attempts.work / "lib").symlink_to(scratch)
    (attempts.work / "log.txt").unlink()
    (attempts.work / "log.txt").symlink_to(scratch / "part.py")
    attempts.write(lib__part_py="new part", log_txt="new head\n")
    attempts.begin()
    assert read(scratch) == {"part.py": "mine"}
    assert (attempts.work / "lib/part.py").read_text() == "new part"
    assert os.readlink(attempts.run.attempt(2).path / "replaced/lib") == str(scratch)
    (attempts.work / "lib/part.py").unlink()
    (attempts.work / "lib").rmdir()
    (attempts.work / "lib").symlink_to(scratch)
    (scratch / "part.py").write_text("new part")
    (attempts.project / "lib/part.py").unlink()
    attempts.begin()
    assert read(scratch) == {"part.py": "new part"}, "though it is what the code had there"


def test_an_output_that_is_linked_by_now_stays(attempts: Attempts) -> None:
    """The person has trained at home meanwhile, and what that left is no code."""
    attempts.begin()
    (attempts.work / "model.pt").write_text("of the run")
    (attempts.work / "out").mkdir()
    (attempts.work / "out/1.pt").write_text("of the run")
    (attempts.project / "model.pt").write_text("at home")
    (attempts.project / "out").mkdir()
    (attempts.project / "out/1.pt").write_text("at home")
    assert os.path.islink(attempts.run.path.parent) is False
    attempts.begin()
    assert (attempts.run.attempt(2).code / "model.pt").is_symlink()
    assert (attempts.work / "model.pt").read_text() == (attempts.work / "out/1.pt").read_text() == "of the run"
    assert (attempts.project / "model.pt").read_text() == "at home"


def test_the_run_itself_is_not_in_its_working_folder(tmp_path: Path, attempts: Attempts) -> None:
    attempts.run = RunDir(attempts.project / "runs/mine")
    other = RunDir(attempts.project / "runs/other").attempt(1)
    other.make()
    attempts.begin()
    attempts.begin()
    assert (attempts.run.attempt(2).code / "runs/mine").is_symlink()
    assert os.listdir(attempts.work / "runs") == ["other"]


def test_an_attempt_that_died_while_the_code_came_loses_nothing(attempts: Attempts) -> None:
    attempts.begin()
    (attempts.work / "log.txt").write_text("head\n1\n")
    (attempts.work / "train.py").write_text("tw")  # half of what the second attempt brought
    (attempts.run.path / "attempts/work.new").mkdir()
    attempts.write(train_py="two")
    attempts.begin()
    assert read(attempts.run.attempt(2).path / "replaced") == {"train.py": "tw"}
    assert ((attempts.work / "train.py").read_text(), (attempts.work / "log.txt").read_text()) == ("two", "head\n1\n")


def test_it_works_in_the_folder_below_and_odd_names_come_along(attempts: Attempts) -> None:
    attempts.write(**{"a b__it's_py": "x", "a b__-n_py": "y", "a b__new\nline_py": "z"})
    subprocess.run(["git", "init", "-q", str(attempts.project)], check=True)
    attempts.below = "a b"
    said = attempts.begin()
    assert said.splitlines()[-1] == str(attempts.work / "a b")
    attempts.write(**{"a b__it's_py": "xx", "a b__-n_py": "yy", "a b__new\nline_py": "zz"})
    attempts.begin()
    assert read(attempts.work / "a b") == {"it's.py": "xx", "-n.py": "yy", "new\nline.py": "zz"}
    assert (attempts.work / "a b/../train.py").read_text() == "one"


def test_by_hand_it_runs_in_the_working_tree(attempts: Attempts) -> None:
    said = attempts.begin(submitted=False)
    assert said.splitlines()[-1] == str(attempts.project)
    assert not attempts.work.exists()
    attempts.begin()
    shutil.rmtree(attempts.run.attempt(2).code)
    assert "failed: there is no folder to run in" in attempts.enter(attempts.run.attempt(2), attempts.run.attempt(2))


def test_ranks_of_a_job_work_there_and_the_next_job_finds_what_they_wrote(tmp_path: Path) -> None:
    """Through the whole script, with a path that shells take apart."""
    cluster = Cluster.make(tmp_path / "cluster")
    cluster.write("program", 'cat out.txt 2>/dev/null; echo "$SLURM_PROCID" >> out.txt')
    run = tmp_path / "my $HOME's runs"
    job = make_job("slurm", "srun", run=run)
    for number in (1, 2):
        attempt = RunDir(run).attempt(number)
        around = replace(job.around, venv="", code=attempt.code, workdir=RunDir(run).work / "a b")
        now = replace(job, attempt=number, around=around)
        cluster.prepare(now)
        (attempt.code / "a b").mkdir(parents=True)
        (attempt.code / "a b/x.py").write_text(str(number))
        ran = cluster.run(now, str(100 + number))
        assert ran.state == "finished", ran.said
    assert {rank.folder for rank in cluster.list_ranks()} == {RunDir(run).work / "a b"}
    assert read(RunDir(run).work)["a b/x.py"] == "2"
    assert len(read(RunDir(run).work)["a b/out.txt"].split()) == 2 * job.shape.ranks
