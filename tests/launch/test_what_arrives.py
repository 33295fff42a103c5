"""Names, paths, arguments and values go through real job scripts in a real bash, with fake commands of a cluster."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from job_cases import Cluster, Ran, Rank, list_combinations, make_job

from shardway.launch.hosts.local import LocalHost
from shardway.launch.job import ContainerMount, ContainerUse, Job, Program
from shardway.launch.script import quote, quote_expanding, quote_place, read_block
from shardway.launch.submission.prepare import Secrets, read_secrets
from speed import picked

AWKWARD = (
    "",
    " ",
    "two words",
    "it's",
    'say "hi"',
    "$(touch hurt)",
    "`touch hurt`",
    "$HOME ${HOME} $0",
    "; touch hurt &",
    "back\\slash\\",
    "a\nattempt=0001\nafter=0000",
    "#SBATCH --exclusive",
    "#PBS -q other",
    "\ttab\rreturn\x07bell\x7f",
    "*",
    "~",
    "{a,b}",
    "!!",
    "a,b=c",
    "-x",
    "--nodes=5",
    "é 漢字 🚀",
    "next\x85line\u2028separator",
    "%j",
)
SECRET = "hf_verysecret'\"$x $HOME cd&;word $(touch hurt) `touch hurt`"
TEXTS = st.text(st.characters(blacklist_characters="\x00", blacklist_categories=("Cs",)), max_size=20)
WORDS = st.lists(TEXTS | st.sampled_from(AWKWARD), max_size=6)
LOOP = settings(
    phases=[Phase.explicit, Phase.generate],  # a script is too slow for shrinking
    max_examples=6,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
COMBINATIONS = {f"{s}-{launcher}-{runtime}": (s, launcher, runtime) for s, launcher, runtime in list_combinations()}


def cases() -> list[Any]:
    """All combinations; for `make test` each scheduler with each launcher, and each container with one of them."""
    usual = ("slurm-srun-", "pbs-mpirun-", "local-agent-")
    return picked(COMBINATIONS, *(name for name in COMBINATIONS if name.endswith("-none") or name.startswith(usual)))


Run = Callable[..., tuple[Ran, list[Rank], Cluster]]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """Run a job's script among fakes of its own; nothing that a word says may be done."""
    numbers = count()

    def run_job(
        job: Job, run: str = "runs/base", secrets: str = "", **variables: str
    ) -> tuple[Ran, list[Rank], Cluster]:
        cluster = Cluster.make(tmp_path / f"cluster{next(numbers)}")
        if secrets:
            cluster.secrets.write_text(secrets)
        path = cluster.path / run
        job = replace(job, run=path, around=replace(job.around, workdir=path / "attempts/0001/code", venv=""))
        cluster.prepare(job)
        return cluster.run(job, variables=variables), cluster.list_ranks(), cluster

    yield run_job
    assert not list(tmp_path.rglob("hurt"))


@example(list(AWKWARD))
@given(WORDS)
@settings(max_examples=20, deadline=None)
def test_quoted_words_arrive_unchanged(words: list[str]) -> None:
    script = f"printf '%s\\0' {' '.join(map(quote, words))}" if words else ":"
    done = subprocess.run(["bash", "-c", script], capture_output=True, check=True)
    assert done.stdout.decode().split("\0")[:-1] == words


def test_a_nul_is_refused() -> None:
    with pytest.raises(ValueError, match="NUL"):
        quote("a\0b")


@pytest.mark.parametrize("text", ["$HOME/$(id)`id`\"'\\", "${HOME}", "~/x y", "a$1b$$", "$NONE."])
def test_only_names_are_replaced(text: str) -> None:
    done = subprocess.run(
        ["bash", "-c", f"printf %s {quote_expanding(text)}"], env={"HOME": "/h"}, capture_output=True, check=True
    )
    expected = text.replace("${HOME}", "/h").replace("$HOME", "/h").replace("$NONE", "")
    assert done.stdout.decode() == ("/h" + expected[1:] if expected.startswith("~/") else expected)


@pytest.mark.parametrize(
    ("path", "seen"),
    [
        ("~/a b", "/h/a b"),
        ("$HOME/x:/y", "/h/x:/y"),
        ("/a/$HOME/b", "/a//h/b"),
        ("/a$1/$", "/a$1/$"),
        ("a~", "a~"),
        ("~x", "~x"),
    ],
)
def test_a_place_may_hold_names(path: str, seen: str) -> None:
    done = subprocess.run(
        ["bash", "-c", f"printf %s {quote_place(path)}"], env={"HOME": "/h"}, capture_output=True, check=True
    )
    assert done.stdout.decode() == seen


# --- through whole scripts


def arrived(ranks: list[Rank], job: Job, words: list[str], values: dict[str, str]) -> None:
    """Every rank (or agent) has the words and the values, where the code is."""
    assert len(ranks) == (job.shape.nodes if job.one_agent_a_node else job.shape.ranks)
    for rank in ranks:
        own = ["python3", "train.py", *words]
        assert rank.words[: len(own)] == own
        assert bool(rank.words[len(own) :]) == (job.launcher == "agent")
        assert {name: rank.variables.get(name) for name in values} == values


def agents_know_each_other(ranks: list[Rank], job: Job) -> None:
    """Each of our own agents is told of all nodes, and which one it is."""
    told = [rank.words[-8:] for rank in ranks]
    numbers = [words[5] for words in told]
    assert sorted(numbers) == [str(node) for node in range(job.shape.nodes)]
    for rank, words in zip(ranks, told, strict=True):
        place = ["--nproc", "4", "--nodes", rank.variables["SHARDWAY_NODES"], "--node", words[5], "--port"]
        assert words == [*place, rank.variables["MASTER_PORT"]]
        assert len(words[3].split()) == job.shape.nodes


@pytest.mark.parametrize("name", cases())
def test_words_and_values_arrive_everywhere_and_a_secret_reaches_the_ranks_and_nobody_else(name: str, run: Run) -> None:
    """The secret is in no file of the run and in no word of a process, also where the run names the same variable."""
    words, values = list(AWKWARD), {f"VALUE_{number}": value for number, value in enumerate(AWKWARD)}
    job = make_job(*COMBINATIONS[name])
    around = replace(job.around, secret_names=("HF_TOKEN",), literal={**values, "HF_TOKEN": "of the run"})
    job = replace(job, program=Program(("train.py", *words)), around=around)
    folder = 'my runs/it\'s $HOME 100%, "x"'
    ran, ranks, cluster = run(job, run=folder, secrets=f"HF_TOKEN={SECRET}\n")
    assert ran.state == "finished", ran.said
    path = cluster.path / folder
    arrived(ranks, job, words, {**values, "HF_TOKEN": SECRET, "SHARDWAY_STOP_FILE": f"{path}/stop"})
    if job.launcher == "agent":
        agents_know_each_other(ranks, job)
    elif not job.one_agent_a_node:
        assert sorted(int(rank.variables["RANK"]) for rank in ranks) == list(range(job.shape.ranks))
    assert {rank.variables["MASTER_ADDR"] for rank in ranks} == {"127.0.0.1" if job.shape.nodes == 1 else "localhost"}
    if job.container.runtime != "pyxis":  # which changes the folder in the container, not here
        assert {rank.folder for rank in ranks} == {path / "attempts/0001/code"}
    assert not [words for words in cluster.list_calls() if any("verysecret" in word for word in words)]
    kept = [file for file in path.rglob("*") if file.is_file() and "verysecret" in file.read_text()]
    assert (kept, "verysecret" in ran.said) == ([], False)


@pytest.mark.parametrize("scheduler", ["slurm", "pbs", "local"])
@LOOP
@given(words=WORDS, values=st.lists(TEXTS, max_size=4), folder=TEXTS, program=st.booleans())
def test_any_word_arrives(
    scheduler: str, run: Run, words: list[str], values: list[str], folder: str, program: bool
) -> None:
    named = {f"V{number}": value for number, value in enumerate(values)}
    job = make_job(scheduler)
    words = ["./a.out", *words] if program else ["train.py", *words]
    job = replace(job, program=Program(tuple(words), python=not program), around=replace(job.around, literal=named))
    plain = folder.encode()[:40].decode(errors="ignore").replace("/", "_").strip("\n")
    ran, ranks, _ = run(job, run=f"runs/{'_' + plain}")
    assert ran.state == "finished", ran.said
    for rank in ranks:
        assert rank.words == (words if program else ["python3", *words])
        assert {name: rank.variables[name] for name in named} == named


@pytest.mark.parametrize("runtime", ["pyxis", "apptainer", "podman", "charliecloud", "enroot"])
def test_mounts_and_images_arrive(runtime: str, run: Run) -> None:
    image = "/my images/it's.sqsh"
    use = ContainerUse(
        runtime, image, (ContainerMount("/a b", "/c;d", read_only=True), ContainerMount("$HOME/x", "/y"))
    )
    ran, _, cluster = run(make_job("slurm", "srun", runtime, container=use))
    assert ran.state == "finished", ran.said
    calls = [words for command in ("srun", "podman", "enroot") for words in cluster.list_calls(command)]
    said = "\n".join(word for words in calls for word in words)
    assert image in said
    assert "/a b:/c;d" in said
    assert bool(re.search(r"/a b:/c;d:(.*,)?ro\b", said)) is (runtime != "charliecloud")  # which has no such mounts
    assert f"{cluster.path}/home/x:/y" in said


# --- secrets

AWKWARD_SECRETS = tuple(value for value in AWKWARD if "\n" not in value)
SECRET_VALUES = st.text(
    st.characters(blacklist_characters="\x00\n", blacklist_categories=("Cs",)), max_size=20
) | st.sampled_from(AWKWARD_SECRETS)


def test_a_traced_job_shows_no_secret(run: Run) -> None:
    ran, ranks, _ = run(make_job("pbs"), secrets=f"HF_TOKEN={SECRET}\n", SHELLOPTS="xtrace")
    assert ("read_secrets" in ran.said, "verysecret" in ran.said) == (True, False)
    assert {rank.variables.get("HF_TOKEN") for rank in ranks} == {SECRET}


def read_by_bash(text: bytes, folder: Path) -> tuple[dict[str, str], Secrets]:
    """What the job's own function exports, and what a submission is told of the file."""
    path = folder / "secrets.env"
    path.write_bytes(text)
    script = f'{read_block("lib", "read_secrets").text}\nnodes=(a b)\nread_secrets "$0"\nexec env -0'
    words = ["env", "-i", "PATH=/usr/bin:/bin", "bash", "-c", script, str(path)]
    done = subprocess.run(words, capture_output=True, check=True, cwd=folder)
    entries = done.stdout.decode(errors="surrogateescape").split("\0")[:-1]
    return dict(entry.split("=", 1) for entry in entries), read_secrets(LocalHost(), PurePosixPath(path))


@example(list(AWKWARD_SECRETS))
@given(st.lists(SECRET_VALUES, max_size=6))
@settings(LOOP, max_examples=10)
def test_any_secret_is_read_as_it_stands(tmp_path: Path, values: list[str]) -> None:
    """But for quotes around all of it, and a carriage return that ends the line."""
    named = {f"S_{number}": value for number, value in enumerate(values)}
    plain = "".join(f"{name}={value}\n" for name, value in named.items())
    quoted = "".join(f"export Q{name}='{value}'\nD{name}=\"{value}\"\r\n" for name, value in named.items())
    found, told = read_by_bash((plain + quoted).encode(), tmp_path)
    for name, value in named.items():
        bare = value.removesuffix("\r")
        inner = bare[1:-1] if len(bare) > 1 and bare[0] == bare[-1] and bare[0] in "'\"" else bare
        assert (found[name], found[f"Q{name}"], found[f"D{name}"]) == (inner, value, value)
    assert (set(told.names), told.faults) == ({*named, *(f"{q}{name}" for q in "QD" for name in named)}, ())
    assert not (tmp_path / "hurt").exists()


def test_the_last_of_a_name_counts_and_lines_that_are_none_are_named(tmp_path: Path) -> None:
    text = b"""# a comment
  # and one

A=1
 export A="2"
A='3
HALF="
NO EQUALS s3cr3t
1A=s3cr3t
B =s3cr3t
nodes=($(touch hurt))
BASH_REMATCH=($(touch hurt))
X[$(touch hurt)]=s3cr3t
UID=5
BYTES=\xff\xfe
END=no newline"""
    found, told = read_by_bash(text, tmp_path)
    assert (found["A"], found["HALF"], found["BYTES"], found["END"]) == ("'3", '"', "\udcff\udcfe", "no newline")
    assert told.names == ("A", "HALF", "nodes", "BYTES", "END")  # that nodes is its own variable, only the job knows
    assert told.faults == (8, 9, 10, 12, 13, 14)
    assert "nodes" not in found
    assert not (tmp_path / "hurt").exists()
    assert "s3cr3t" not in "".join(problem.render() for problem in told.list_problems())
