"""What the fakes of PBS say, and what job scripts rely on, agrees with what OpenPBS was recorded to do."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest
from job_cases import Cluster, make_job

from shardway.launch.job import JobEnvironment, Program
from shardway.launch.job_script import render_job_script
from shardway.launch.schedulers.pbs import Pbs
from shardway.launch.script import quote
from transcripts import find, read_transcript

LOOKED = find("pbs/qsub-program", "cat looked").done.out
GIVEN = shlex.split(find("pbs/qsub-program", "qsub -N look -j oe -o looked -l").command)


def ask(cluster: Cluster, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, env=cluster.variables("1"), capture_output=True, text=True)


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    """Fakes; job 42 has ended with exit status 254."""
    cluster = Cluster.make(tmp_path / "cluster")
    cluster.write("jobs", "42.pbshead 254\n")
    return cluster


def test_a_job_that_has_ended_is_not_deleted(cluster: Cluster) -> None:
    recorded = find("pbs/qdel", "qdel", 3)
    job = recorded.done.words[1]
    done = ask(cluster, "qdel", "42.pbshead")
    assert (done.returncode, done.stdout) == (recorded.done.code, recorded.done.out)
    assert done.stderr == recorded.done.err.replace(job, "42.pbshead")


def test_a_job_that_runs_is_deleted_without_a_word(cluster: Cluster) -> None:
    recorded = find("pbs/qdel", "qdel", 0)
    done = ask(cluster, "qdel", "43.pbshead")
    assert (done.returncode, done.stdout, done.stderr) == (recorded.done.code, recorded.done.out, recorded.done.err)


def test_an_exit_status_stands_on_a_line_of_its_own(cluster: Cluster) -> None:
    recorded = find("pbs/qsub-program", "qstat -xf").done.out.splitlines()
    done = ask(cluster, "qstat", "-x", "-f", "42.pbshead")
    assert done.stdout.rstrip("\n") in recorded


@pytest.mark.parametrize("words", [("job.sh",), ("--", "/bin/true")])
def test_a_submission_prints_the_id_alone(words: tuple[str, ...], cluster: Cluster) -> None:
    said = {entry.done.out for entry in read_transcript("pbs/qsub-program") if "qsub -N look" in entry.command}
    for text in (*said, ask(cluster, "qsub", *words).stdout):
        assert re.fullmatch(r"\d+\.[\w.-]+\n", text)
        assert Pbs().read_job_id(text) == text.strip()


def test_a_job_of_the_fakes_has_no_variable_that_pbs_does_not_set(cluster: Cluster) -> None:
    recorded = {line.split("=", 1)[0] for line in LOOKED.splitlines() if "=" in line}
    named = {name for name in cluster.variables("1") if name.startswith("PBS_")}
    assert named - {"PBS_CONF_FILE"} <= recorded


# --- pbs_tmrsh NODE WORDS


def test_words_of_a_task_arrive_as_where_a_site_has_a_hook(cluster: Cluster) -> None:
    """Which may change more than PBS alone does: newlines and blanks before a word."""
    script = cluster.path / "words.sh"
    script.write_text(find("pbs/task-words", "cat tasks.sh").done.out.partition("#!")[2].partition("#!")[2])
    given = ("one", "two\nlines", "a  b", '"q"', "it's", "", "c,d", "e\\f", "t\tt", "$X", "ä", " lead", "last")
    assert ask(cluster, "pbs_tmrsh", "n1", "bash", str(script), *given).returncode == 0
    told = (cluster.path / "of-the-job").read_text(encoding="utf-8")
    assert told * 2 == find("pbs/task-words", "cat hooked").done.out  # of two nodes
    assert told * 2 != find("pbs/task-words", "cat plain").done.out


def test_a_task_is_one_line_of_shell(cluster: Cluster, tmp_path: Path) -> None:
    """So that every word of the ranks arrives, whatever is in it."""
    program = Program(("train.py", "two\nlines", " lead", "", "it's $HOME \\"))
    job = make_job("pbs", "torchrun", run=tmp_path / "run", around=JobEnvironment(tmp_path / "run"), program=program)
    cluster.prepare(job)
    assert cluster.run(job).state == "finished"
    tasks = cluster.list_calls("pbs_tmrsh")
    assert [word for words in tasks for word in words if "\n" in word or word != word.lstrip()] == []
    assert [tuple(rank.words[-5:]) for rank in cluster.list_ranks()] == [program.words] * 2


# --- qsub -- PROGRAM WORDS


def test_a_program_gets_its_words_as_they_were_but_for_empty_ones() -> None:
    assert "" in GIVEN
    assert re.findall(r"^word [1-9]\d*: <(.*?)>$", LOOKED, re.MULTILINE | re.DOTALL) == [
        *(
            "plain",
            "two words",
            "a 'quote'",
            'a "double" one',
            "$HOME",
            "*",
            "back\\slash",
            "semi;colon & more",
            "<tag>",
        ),
        *("two\nlines", "tab\there", "ä€"),
    ]


def test_no_word_of_a_submission_is_empty(tmp_path: Path, cluster: Cluster) -> None:
    """PBS would leave it out, and the words after it would mean something else."""
    job = make_job("pbs", "mpirun", run=tmp_path / "a run" / "base", around=JobEnvironment(tmp_path))
    job.folder.make()
    job.folder.job_script.write_text(render_job_script(job))
    script = str(job.folder.job_script)
    assert ask(cluster, *Pbs().submit(script, "", "")).returncode == 0
    (words,) = cluster.list_calls("qsub")
    assert words[words.index("--") :] == ["--", "/bin/bash", "-l", script]
    assert quote(script) != script  # a blank is in it


def test_a_program_starts_in_the_home_and_leads_the_session() -> None:
    """Why a job script says where it works, and may trap what qdel sends."""
    assert "folder /home/alice\n" in LOOKED
    assert "session leader: yes\n" in LOOKED
    assert "session leader: no\n" in find("pbs/qsub-program", "head -4 looked4").done.out
