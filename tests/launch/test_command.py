"""How the first words of a command are read: each row of the table, as a person would type it."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from shardway.errors import UserError
from shardway.launch.hosts.local import LocalHost
from shardway.launch.job import Program
from shardway.launch.submission.command import FORMS, Role, find_launcher, read_command
from shardway.launch.submission.prepare import Prepared, SubmitRequest, prepare
from shardway.resolve.request import ResolveRequest

Submit = Callable[..., Prepared]


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A folder with the programs that the rows name."""
    (tmp_path / "x.py").write_text("print(1)\n")
    for name, text in {
        "itself.py": "#!/opt/python\n",
        "run.sh": "#!/bin/sh\n# torchrun is not used here\npython x.py\n",
        "many.sh": "set -e\ntorchrun --nproc-per-node 4 x.py\n",
        "a.out": "\x7fELF",
        ".venv/bin/python": "",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return tmp_path


PYTHON = {
    "python x.py --lr 1": Program(("x.py", "--lr", "1")),
    "python3 -m pkg.train -x": Program(("-m", "pkg.train", "-x")),
    "x.py a": Program(("x.py", "a")),
    "python -u x.py": Program(("python3", "-u", "x.py"), python=False),
    "python -W ignore -Xdev x.py": Program(("python3", "-W", "ignore", "-Xdev", "x.py"), python=False),
    "python -um pkg": Program(("python3", "-um", "pkg"), python=False),
    "python -c 1+1 a": Program(("python3", "-c", "1+1", "a"), python=False),
    "python3.12 x.py": Program(("python3.12", "x.py"), python=False, interpreter="python3.12"),
    "pypy3 x.py": Program(("pypy3", "x.py"), python=False, interpreter="pypy3"),
    "/opt/a/bin/python x.py": Program(("/opt/a/bin/python", "x.py"), python=False, interpreter="/opt/a/bin/python"),
    "/opt/a/bin/python3.12 -m pkg": Program(
        ("/opt/a/bin/python3.12", "-m", "pkg"), python=False, interpreter="/opt/a/bin/python3.12"
    ),
    "nice /opt/a/bin/python x.py": Program(
        ("nice", "/opt/a/bin/python", "x.py"), python=False, interpreter="/opt/a/bin/python"
    ),
}


@pytest.mark.parametrize("typed", PYTHON)
def test_the_python_that_was_named_runs(typed: str, here: Path) -> None:
    assert read_command(typed.split(), here).program == PYTHON[typed]


def test_an_interpreter_beside_the_code_is_the_one_where_it_was_typed(here: Path) -> None:
    for typed in (".venv/bin/python", "./.venv/bin/python", f"../{here.name}/.venv/bin/python"):
        program = read_command([typed, "x.py"], here).program
        assert program.interpreter == program.words[0] == f"{here}/.venv/bin/python"


AS_TYPED = {
    "env python x.py": "x.py",
    "env A=1 B='2 3' python x.py": "x.py",
    "env -u A python x.py": "x.py",
    "uv run x.py": "x.py",
    "uv run --with numpy python x.py": "x.py",
    "uv run --directory sub python x.py": "",
    "conda run -n e --no-capture-output python x.py": "x.py",
    "poetry run python x.py": "x.py",
    "pixi run -e gpu python x.py": "x.py",
    "nsys profile -o out --capture-range cudaProfilerApi python x.py": "x.py",
    "numactl -C 0-3 python x.py": "x.py",
    "timeout -k 5 1h python x.py": "x.py",
    "./itself.py a": "./itself.py",
    "bash -c 'python x.py && echo done'": "",
    "bash -eo pipefail run.sh": "",
    "./run.sh": "",
    "./a.out -x": "",
    "env": "",
    "uv run": "",
}


@pytest.mark.parametrize("typed", AS_TYPED)
def test_a_program_runs_as_it_was_typed(typed: str, here: Path) -> None:
    words = [word.strip("'") for word in re.findall(r"(?:[^\s']|'[^']*')+", typed)]
    read = read_command(words, here)
    assert (read.program, read.script) == (Program(tuple(words), python=False), AS_TYPED[typed])


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("shardway bench comm --seconds 5", ("-m", "shardway", "bench", "comm", "--seconds", "5")),
        ("python -m shardway bench comm", ("-m", "shardway", "bench", "comm")),
        ("shardway evaluate /runs/x --best", ("-m", "shardway", "evaluate", "/runs/x", "--best")),
        ("shardway generate runs/x --file a.txt", ("-m", "shardway", "generate", "runs/x", "--file", "a.txt")),
    ],
)
def test_a_verb_that_ranks_can_be_is_one_of_each_rank(typed: str, words: tuple[str, ...], here: Path) -> None:
    read = read_command(typed.split(), here)
    assert (read.program, read.module) == (Program(words), "shardway")


def test_what_a_shell_runs_is_known(here: Path) -> None:
    texts = {
        typed: dict(read_command(typed, here).texts) for typed in [("./run.sh",), ("bash", "many.sh"), ("./a.out",)]
    }
    assert [set(found) for found in texts.values()] == [{"./run.sh"}, {"many.sh"}, set()]
    assert read_command(("bash", "-lc", "torchrun x.py"), here).texts == (("bash -c", "torchrun x.py"),)
    assert [find_launcher(text) for found in texts.values() for text in found.values()] == ["", "torchrun"]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("cd x && /opt/bin/torchrun a.py", "torchrun"),
        ("exec python -m  torch.distributed.run a.py", "-m torch.distributed.run"),
        ("accelerate   launch a.py", "accelerate launch"),
        ("accelerate test", ""),
        ("echo deepspeed_config; python a.py --deepspeed ds.json", ""),
        ("python torchrun.py", ""),
        ("it's torchrun", "torchrun"),
    ],
)
def test_launchers_are_found_in_shell(text: str, found: str) -> None:
    assert find_launcher(text) == found


INSTEAD = {
    "torchrun x.py --lr 1": "-- python x.py --lr 1",
    "torchrun --nproc-per-node 4 x.py": "site.ranks_per_node=4 -- python x.py",
    "torchrun --nproc_per_node=gpu --nnodes=2 --rdzv_backend c10d -m pkg a": "site.nodes=2 -- python -m pkg a",
    "/opt/a/bin/torchrun --standalone x.py": "-- /opt/a/bin/python x.py",
    "torchrun --no-python ./a.out": "-- ./a.out",
    "python -m torch.distributed.run --nproc-per-node 2 x.py": "site.ranks_per_node=2 -- python x.py",
    "python -m torch.distributed.launch --nproc_per_node=2 --use_env x.py": "site.ranks_per_node=2 -- python x.py",
    "/opt/a/bin/python -m torch.distributed.launch x.py": "-- /opt/a/bin/python x.py",
    "accelerate launch x.py": "-- python x.py",
    "accelerate launch --multi_gpu --num_processes 8 --num_machines 2 x.py": (
        "site.nodes=2 site.ranks_per_node=4 -- python x.py"
    ),
    "deepspeed --num_gpus=4 x.py --deepspeed ds.json": "site.ranks_per_node=4 -- python x.py --deepspeed ds.json",
    "mpirun -n 4 python x.py": "site.ranks_per_node=4 site.launcher=mpirun -- python x.py",
    "mpirun --mca btl tcp,self -np 4 -x A ./a.out b": "site.ranks_per_node=4 site.launcher=mpirun -- ./a.out b",
    "srun python x.py": "site.launcher=srun -- python x.py",
    "srun -N2 -n 8 --mpi=none python x.py": "site.nodes=2 site.ranks_per_node=4 site.launcher=srun -- python x.py",
    "uv run torchrun --nproc-per-node 2 x.py": "site.ranks_per_node=2 -- uv run python x.py",
    "env A=1 accelerate launch x.py": "-- env A=1 python x.py",
    "nsys profile --capture-range cudaProfilerApi torchrun x.py": (
        "-- nsys profile --capture-range cudaProfilerApi python x.py"
    ),
}


def refused(typed: str, here: Path, nodes: int = 1) -> str:
    with pytest.raises(UserError) as told:
        read_command(typed.split(), here, nodes)
    return str(told.value)


@pytest.mark.parametrize("typed", INSTEAD)
def test_a_launcher_is_refused_with_the_line_to_type(typed: str, here: Path) -> None:
    told = refused(typed, here)
    assert f"to do: `shardway submit ... {INSTEAD[typed]}`" in told
    assert "and the job script starts the ranks itself" in told
    line = INSTEAD[typed].partition("-- ")[2]
    read_command(line.split(), here)  # which is taken


def test_what_a_line_leaves_out_is_told(here: Path) -> None:
    told = refused("accelerate launch --mixed_precision bf16 --config_file c.yaml x.py", here)
    assert "left out: --mixed_precision, --config_file; `Accelerator()` finds its rank by itself" in told
    assert "left out: --map-by" in refused("mpirun --map-by core -n 2 ./a.out", here)
    assert "LOCAL_RANK" in refused("deepspeed x.py", here)
    assert "site.ranks_per_node=4 site.launcher" in refused("mpirun -n 8 ./a.out", here, nodes=2)
    assert "site.ranks_per_node" not in refused("mpirun -n 7 ./a.out", here, nodes=2)


@pytest.mark.parametrize(
    ("typed", "what", "remedy"),
    [
        ("A=1 python x.py", "it begins with A=1, which only a shell sets", "`-- env A=1 python x.py`"),
        ("module load CUDA", "module is a word of the shell", "`-- bash -c 'module load CUDA'`"),
        (". venv/bin/activate", ". is a word of the shell", "bash -c"),
        ("sbatch job.sh", "sbatch submits a job of its own", "name what its script starts"),
        ("shardway train my.toml --nproc 2", "it begins with shardway", "`shardway submit my.toml --nproc 2`"),
        ("python -m shardway status", "it begins with shardway", "`shardway submit my.toml`"),
        ("env -i python x.py", "takes from each rank what says which rank it is", "leave -i out"),
        ("python", "python names no script", ""),
        ("python -", "names no script", ""),
        ("python -m", "names no script", ""),
        ("python --version", "names no script", ""),
        ("torchrun", "it begins with torchrun", "leave torchrun and its options out"),
        ("mpirun -n 1 ./a : -n 2 ./b", "it begins with mpirun", "leave mpirun and its options out"),
    ],
)
def test_what_cannot_run_as_a_rank_is_told(typed: str, what: str, remedy: str, here: Path) -> None:
    told = refused(typed, here)
    assert what in told
    assert remedy in told


def test_a_command_in_quotes_is_told(here: Path) -> None:
    with pytest.raises(UserError, match=r'"python x\.py" is one word\n.*leave its quotes out: `-- python x\.py`'):
        read_command(("python x.py",), here)


def test_every_row_is_tested() -> None:
    typed = [*PYTHON, *AS_TYPED, *INSTEAD, "bash", "sbatch", "shardway"]
    untested = [
        form.names
        for form in FORMS
        if not any(re.search(rf"(^|[ /]){re.escape(name)}( |$)", line) for name in form.names for line in typed)
    ]
    assert [names for names in untested if names[0] not in ("ft_launcher", "aprun")] == []
    assert {form.role for form in FORMS} == set(Role)


# --- through job scripts


@pytest.fixture
def submit(here: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Submit:
    monkeypatch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    for name in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        monkeypatch.delenv(name, raising=False)
    run = tmp_path_factory.mktemp("runs") / "mine"

    def prepare_it(
        *command: str, keys: tuple[str, ...] = (), site: str = "generic-slurm", look: bool = False
    ) -> Prepared:
        walltime = ("site.walltime=1h", *keys)
        order = SubmitRequest(ResolveRequest(None, walltime, run), site=site, command=command, here=here)
        return prepare(order, LocalHost(), look=look)

    return prepare_it


@pytest.mark.parametrize("launcher", ["torchrun", "srun", "mpirun", "ft_launcher"])
@pytest.mark.parametrize("container", ["none", "apptainer", "pyxis"])
def test_the_interpreter_that_was_named_is_in_every_script(launcher: str, container: str, submit: Submit) -> None:
    if (launcher, container) == ("mpirun", "pyxis"):
        return
    image = () if container == "none" else ("site.image=/i.sif", f"site.container={container}")
    script = submit("/opt/a/bin/python", "x.py", keys=(f"site.launcher={launcher}", *image)).script
    main = script.partition("# --- run\n")[2].partition("# --- end")[0]
    main = " ".join(main.replace("\\\n", " ").split())
    if launcher in ("torchrun", "ft_launcher"):
        assert "python=/opt/a/bin/python; " in main
        assert 'exec "$python" -m ' in main
        assert "agent --no-python /opt/a/bin/python x.py" in main
    else:
        assert "rank /opt/a/bin/python x.py" in main
    assert "exec python3" not in main


def test_local_jobs_run_it_too(submit: Submit) -> None:
    script = submit("/opt/a/bin/python", "x.py", site="laptop").script
    assert "agent --no-python /opt/a/bin/python x.py" in script
    assert submit("python", "x.py", site="laptop").script.count("agent x.py") == 1


def test_the_agent_starts_trainings_alone(submit: Submit) -> None:
    with pytest.raises(UserError, match='"agent" starts the training of a run file alone'):
        submit("/opt/a/bin/python", "x.py", keys=("site.launcher=agent",))


def test_a_shell_that_starts_ranks_in_each_of_several_is_refused(submit: Submit) -> None:
    for command in (
        ("bash", "many.sh"),
        ("./many.sh",),
        ("bash", "-c", "torchrun x.py"),
        ("env", "A=1", "sh", "many.sh"),
    ):
        with pytest.raises(UserError, match="starts torchrun, and the job script would do so in each of 4 ranks"):
            submit(*command, keys=("site.ranks_per_node=4",))
        submit(*command, keys=("site.ranks_per_node=1",))


def test_an_interpreter_of_the_host_is_not_in_the_image(
    submit: Submit, here: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    keys = ("site.container=podman", "site.image=docker.io/library/torch:2")
    python = tmp_path_factory.mktemp("elsewhere") / "bin/python"
    python.parent.mkdir()
    python.touch()
    with pytest.raises(UserError, match="which the container does not see: it is in none of its mounts") as told:
        submit(str(python), "x.py", keys=keys, site="laptop", look=True)
    assert f'site.mounts=["{python.parent}"]' in str(told.value)
    mounted = (*keys, f'site.mounts=["{python.parent.parent}"]')
    submit(str(python), "x.py", keys=mounted, site="laptop", look=True)
    for seen in (f"{here}/.venv/bin/python", "/opt/conda/bin/python", "/of-the-image/python"):
        submit(seen, "x.py", keys=keys, site="laptop", look=True)


def test_an_activated_environment_that_the_job_does_not_take_is_told(
    submit: Submit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other/bin"
    other.mkdir(parents=True)
    (other / "python").write_text("")
    (other / "python").chmod(0o755)
    monkeypatch.setenv("PATH", f"{other}:/usr/bin:/bin")
    monkeypatch.setenv("VIRTUAL_ENV", str(other.parent))
    told = "\n".join(submit("python", "x.py", site="laptop").warnings)
    assert f"`python` is {other}/python in this shell" in told
    keys = (f"site.venv={other.parent}",)
    assert "in this shell" not in "".join(submit("python", "x.py", site="laptop", keys=keys).warnings)
    assert "in this shell" not in "".join(submit(f"{other}/python", "x.py", site="laptop").warnings)


def test_the_interpreter_is_a_part_of_what_is_asked(here: Path) -> None:
    read = read_command(("/opt/a/bin/python", "-m", "pkg"), here)
    assert (read.module, read.script) == ("pkg", "")
    assert replace(read.program, interpreter="") != read.program
