"""`shardway submit` as a person sees it: its messages as files under tests/golden/submit, and what it costs."""

from __future__ import annotations

import json
import os
import re
import stat
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from command_line import TINY, Shardway, write_text
from test_login_node import CODE, LIBRARIES, is_quick, run_python

from golden_files import Golden, golden_names
from shardway.launch.hosts import LocalHost
from shardway.launch.runs.find import registry_path
from shardway.launch.submission import submit
from shardway.launch.submission.prepare import read_last_request
from shardway.plugins import GROUPS
from shardway.rundir.attempts import Ending, Result, Submission
from shardway.rundir.directory import RunDir
from shardway.runfile.load import load_run
from shardway.sites.load import list_sites, load_site

Setup = Callable[[Path], object]

JUPITER = ("submit", "--on", "jupiter", "site.account=proj1", "--dry-run")
LEONARDO = ("submit", "--on", "leonardo-booster", "site.account=proj1", "--dry-run")
PBS = ("submit", "--on", "aspire2a-plus", "site.account=proj1", "--dry-run")


def nothing(folder: Path) -> None:
    """No file is needed."""


def file(name: str, text: str) -> Setup:
    """A file with this content."""
    return lambda folder: (folder / name).write_text(text)


def secrets_file(text: str) -> Setup:
    """The person's file of secrets."""

    def write(folder: Path) -> None:
        path = Path(os.environ["HOME"]) / ".config/shardway/secrets.env"
        path.parent.mkdir(parents=True)
        path.write_text(text)

    return write


@dataclass(frozen=True)
class Case:
    """A command that is refused, and what it needs around it."""

    name: str
    words: tuple[str, ...]
    setup: Setup = nothing
    code: int = 2


NUMBERS = [
    Case("no-walltime", ("submit", "--on", "generic-slurm", "--dry-run")),
    Case("walltime-twice", ("submit", "--on", "generic-slurm", "--walltime", "1h", "site.walltime=2h", "--dry-run")),
    Case("walltime-over-limit", (*JUPITER, "--walltime", "25h")),
    Case("too-many-nodes", (*LEONARDO, "--nodes", "65")),
    Case("too-few-nodes", (*LEONARDO, "--nodes", "2", "site.queue=boost_qos_bprod")),
    Case("nodes-of-a-laptop", ("submit", "--nodes", "2", "--dry-run")),
    Case("no-account", ("submit", "--on", "jupiter", "--dry-run")),
    Case("too-many-ranks", (*JUPITER, "site.ranks_per_node=8")),
    Case("more-memory-than-a-node", (*JUPITER, "site.memory=2TiB")),
    Case("srun-of-pbs", (*PBS, "site.launcher=srun")),
    Case("pyxis-and-mpirun", (*JUPITER, "site.launcher=mpirun", "site.container=pyxis", "site.image=/i.sqsh")),
    Case("image-and-no-container", (*JUPITER, "site.container=none", "site.image=/i.sqsh")),
    Case("container-and-no-image", (*JUPITER, "site.container=apptainer")),
    Case("pyxis-of-pbs", (*PBS, "site.container=pyxis", "site.image=/i.sqsh")),
    Case(
        "server-with-all-mistakes",
        (
            *("submit", "--serve", "vlm", "/gone", "--nodes", "2", "--port", "80", "--until-done", "--dry-run"),
            *("--on", "jupiter", "site.account=proj1", "--walltime", "1h", "site.launcher=srun"),
        ),
    ),
    Case("margin-over-walltime", (*JUPITER, "--walltime", "10min", "run.stop_margin=20min")),
]
WORDS = [
    Case("option-that-is-a-key", (*JUPITER, 'site.options={time = "1h"}')),
    Case("memory-in-two-ways", (*JUPITER, "site.memory=8GiB", 'site.options={mem-per-cpu = "4G"}')),
    Case("option-of-the-script", (*JUPITER, 'site.options={"--output" = "x"}')),
    Case(
        "options-of-a-container",
        (*JUPITER, 'site.options={container-image = "/i.sqsh", container-mounts = "/a", container-mount-home = true}'),
    ),
    Case("select-as-an-option", (*PBS, 'site.options={l = "select=4"}')),
    Case("option-of-two-lines", (*JUPITER, 'site.options={comment = "a\\nb"}')),
    Case("variable-without-a-name", (*JUPITER, 'site.environment={"a b" = "1"}')),
    Case(
        "variable-of-a-rank", (*JUPITER, 'site.environment={RANK = "0", SBATCH_TIMELIMIT = "3", SLURM_NETWORK = "x"}')
    ),
    Case("secret-in-the-run-file", (*JUPITER, 'site.environment={HF_TOKEN = "hf_x"}')),
    Case("variable-that-is-a-table", (*JUPITER, "site.environment={A = [1, 2]}")),
    Case("queue-with-a-blank", (*JUPITER, "site.queue=my queue")),
    Case(
        "mount-without-a-source", (*JUPITER, 'site.mounts=[":/data"]', "site.image=/i.sif", "site.container=apptainer")
    ),
    Case("mount-with-a-comma", (*JUPITER, 'site.mounts=["/a,b:/c"]', "site.image=/i.sqsh", "site.container=pyxis")),
    Case(
        "folder-with-a-variable",
        (*JUPITER, "site.container=apptainer", "site.image=/i.sif", "--dir", "of$HOME/r"),
        lambda folder: (folder / "of$HOME").mkdir(),
    ),
    Case("image-that-is-no-file", (*PBS, "site.container=enroot", "site.image=nvcr.io#nvidia/pytorch:25.04-py3")),
    Case("image-that-is-no-name", (*JUPITER, "site.container=pyxis", "site.image=docker://UPPER CASE")),
]
PLACES = [
    Case("run-directory-that-is-no-text", (*JUPITER, "--dir", "caf\udce9")),
    Case("no-such-script", (*JUPITER, "--", "python", "gone.py")),
    Case("script-that-is-no-python", (*JUPITER, "--", "python", "bad.py"), file("bad.py", "x = 1\nif x\n    pass\n")),
    Case("no-such-program", (*JUPITER, "--", "./none.sh")),
    Case("program-that-is-not-executable", (*JUPITER, "--", "./a.sh"), file("a.sh", "true\n")),
    Case("program-not-on-the-path", ("submit", "--dir", "r", "--", "no-such-program-here", "x")),
    Case("script-outside-of-the-host", ("submit", "--dir", "r", "--", "python", "/gone/train.py")),
    Case("no-such-relative-data", ("submit", "--dir", "r", "data.path=gone.txt", "data.validation=gone.val")),
    Case("no-such-venv", ("submit", "site.venv=/gone/venv", "--dir", "r")),
    Case("no-such-image", ("submit", "site.image=/gone.sif", "site.container=podman", "--dir", "r")),
    Case(
        "what-a-container-does-not-see",
        (
            *(
                "submit",
                "site.container=charliecloud",
                "site.image=/proc/version",
                'site.mounts=["/gone"]',
                "--dir",
                "r",
            ),
            *("data.path=/proc/version", "data.validation=/gone/of-the-image", "data.cache=/none/cache"),
            *("data.stage=/none/disk", "site.venv=/gone/venv-of-the-image"),
        ),
    ),
    Case(
        "parts-of-a-blend-that-a-container-does-not-see",
        (
            *("submit", "site.container=charliecloud", "site.image=/proc/version", "site.venv=none", "--dir", "r"),
            'data.blend=[{path = "/proc/version", weight = 1}, {path = "/proc/uptime", weight = 2}]',
        ),
    ),
    Case(
        "image-that-is-no-squashfs",
        (
            *("submit", "site.container=enroot", "site.image=/proc/version", "data.path=~/of-root", "--dir", "r"),
            "data.kind=text",
        ),
    ),
    Case(
        "run-that-one-node-sees",
        ("submit", "--on", "jupiter", "site.account=proj1", "site.venv=none", "--dir", "/tmp/x/run"),
    ),
]
MINI = 'format = 1\nname = "mini"\ntitle = "Mini"\nscheduler = "local"\n[node]\ncores = 4\n[defaults]\nbudget = 50\n'


def ended_run(folder: Path) -> None:
    """A run whose job has ended."""
    attempt = RunDir(folder / "runs/over").attempt(1)
    attempt.make()
    attempt.write_submission(Submission("local", "a1b2c3", "12.34"))
    attempt.write_result(Result(Ending.FINISHED, ended=1.0))


INTERACTIVE = [
    Case("over-budget", ("submit", "--on", "./mini.toml", "--until-done", "--", "true"), file("mini.toml", MINI)),
    Case("when-and-soonest", ("submit", "--when", "--soonest", "--", "true")),
    Case(
        "soonest-of-pbs", ("submit", "--on", "aspire2a-plus", "site.account=proj1", "--soonest", "--", "true"), code=3
    ),
    Case("gpus-of-a-laptop", ("shell", "--gpus", "1")),
    Case("more-gpus-than-a-node", ("shell", "--on", "leonardo-booster", "--gpus", "9", "site.account=proj1")),
    Case("shell-of-pbs-without-a-terminal", ("shell", "--on", "aspire2a-plus", "site.account=proj1")),
    Case("exec-without-a-command", ("exec", "runs/over"), ended_run),
    Case("exec-in-two-places", ("exec", "runs/over", "--all", "--rank", "1", "--", "true"), ended_run),
    Case("exec-of-a-run-that-ended", ("exec", "runs/over", "--", "true"), ended_run),
]
ORDERS = [
    Case("no-command", (*JUPITER, "--")),
    Case("empty-command", (*JUPITER, "--", "")),
    Case("script-as-a-run-file", ("submit", "train.py", "--dry-run"), file("train.py", "x = 1\n")),
    Case(
        "all-in-one-round",
        (
            *("submit", "my.toml", "--on", "jupiter", "--walltime", "99h", "parallel.tp=3", "site.venv=/gone"),
            *("data.kind=text", "data.path=/nope", "site.image=$NOWHERE/i.sif", "site.container=none"),
            *("--dir", "/tmp/x/run"),
        ),
        file("my.toml", "format = 1\n[train]\nglobal_batch = 6\n"),
    ),
    Case(
        "launcher-and-more",
        ("submit", "--on", "jupiter", "site.venv=/gone", "--dir", "/tmp/x/run", "--", "torchrun", "train.py"),
    ),
    Case("wrong-key-and-unknown-site", ("submit", "--on", "jupyter", "train.stps=3", "--dry-run")),
    Case("secrets-that-are-none", JUPITER, secrets_file("HF_TOKEN=a\nhf_verysecret\nA B=hf_verysecret\n")),
    Case("launcher-as-command", (*JUPITER, "--", "torchrun", "--nproc-per-node=4", "train.py")),
    Case("python-without-a-script", (*JUPITER, "--", "python", "-u")),
    Case(
        "launcher-in-a-wrapper",
        (*JUPITER, "--", "uv", "run", "accelerate", "launch", "--num_processes=4", "--mixed_precision", "bf16", "x.py"),
    ),
    Case("attempts-without-a-chain", ("submit", "--max-attempts", "3")),
    Case("many-mistakes", ("submit", "--on", "jupiter", "--walltime", "99h", "site.ranks_per_node=9", "--dry-run")),
    Case("unknown-site", ("submit", "--on", "jupyter", "--dry-run")),
    Case(
        "broken-profile",
        ("submit", "--on", "./mine.toml", "--dry-run"),
        file("mine.toml", 'format = 1\nname = "mine"\ntitle = "M"\nscheduler = "lsf"\n[node]\ncores = 0\n'),
    ),
]
CASES = {case.name: case for case in (*NUMBERS, *INTERACTIVE, *WORDS, *PLACES, *ORDERS)}
REFUSALS = ("refused-account", "no-sbatch", "still-queued")


@pytest.fixture(autouse=True)
def no_state_of_the_person(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A registry and profiles of its own where a test can look, and no environment of Python's."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)


def tell(folder: Path, words: tuple[str, ...], said: str, code: int) -> str:
    """A command as a person sees it: a refusal's text does not say in which folder the test stood."""
    quoted = " ".join(f"'{word}'" if re.search(r"^$|[\s\[{:]", word) else word for word in words)
    quoted = quoted.encode("utf-8", "backslashreplace").decode()
    return f"$ shardway {quoted}\n{said}exit code {code}\n".replace(str(folder), "/home/alice/work")


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_is_told_before_the_queue(name: str, shardway: Shardway, golden: Golden, tmp_path: Path) -> None:
    case = CASES[name]
    case.setup(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    ended = shardway(*case.words)
    assert (ended.code, ended.out) == (case.code, "")
    golden(tell(tmp_path, case.words, ended.err, ended.code), f"submit/{name}.txt")
    assert sorted(tmp_path.rglob("*")) == before  # nothing was made


def test_every_golden_file_has_its_case() -> None:
    assert golden_names("submit") == {f"{name}.txt" for name in (*CASES, *REFUSALS, "idle-and-unknown")}


def test_what_may_be_meant_is_a_sentence(shardway: Shardway, golden: Golden, tmp_path: Path) -> None:
    command = (
        "submit",
        "--on",
        "./whole.toml",
        "site.queue=odd",
        "site.ranks_per_node=2",
        "--walltime",
        "1h",
        "--dry-run",
    )
    (tmp_path / "whole.toml").write_text(WHOLE)
    ended = shardway(*command)
    assert ended.code == 0
    golden(tell(tmp_path, command, ended.err, ended.code), "submit/idle-and-unknown.txt")


# --- a scheduler that answers


SBATCH = "#!/bin/bash\n[ ! -e refuse ] || {{ cat refuse >&2; exit 1; }}\necho x >> {0}/taken\nwc -l < {0}/taken\n"
SQUEUE = '#!/bin/bash\n[ ! -e {0}/taken ] || echo "1|1|PENDING|N/A|N/A||Priority|x"\n'
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
GPUS = 'cores = 64\naccelerator = "a100-sxm4-40gb"\naccelerators_per_node = 4'
WHOLE = PROFILE.replace("cores = 4", GPUS) + "[request]\nwhole_nodes = true\n"
SUBMIT = ("submit", "--on", "./tiny.toml", "site.venv=none", "run.device=cpu", "--dir", "run")


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return make_slurm(tmp_path, monkeypatch)


def make_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with sbatch and squeue, first on the PATH, and a profile of this Slurm."""
    tools = tmp_path / "tools"
    tools.mkdir()
    texts = {"sbatch": SBATCH, "squeue": SQUEUE, "sacct": "#!/bin/bash\n", "stat": "#!/bin/bash\necho lustre\n"}
    for name, text in texts.items():
        (tools / name).write_text(text.format(tmp_path))
        (tools / name).chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")
    monkeypatch.setattr("shardway.launch.submission.host_checks._OF_ONE_NODE", ())  # where tests write
    (tmp_path / "tiny.toml").write_text(PROFILE)
    return tmp_path


def test_it_returns_with_the_job(slurm: Path, shardway: Shardway) -> None:
    ended = shardway(*SUBMIT, "--json")
    assert ended.code == 0
    told = json.loads(ended.out)
    folder = RunDir(slurm / "run").attempt(1)
    assert (told["job"], told["attempt"], told["script"]) == ("1", 1, str(folder.job_script))
    submission = folder.read_submission()
    assert submission is not None
    assert (submission.job, submission.scheduler) == ("1", "slurm")
    assert folder.run_file.is_file()
    registry = registry_path()
    assert json.loads(registry.read_text())["run"] == str(slurm / "run")


def test_the_dry_run_is_the_script(slurm: Path, shardway: Shardway) -> None:
    """To the byte, but for the token in its name; and it makes nothing."""
    dry = shardway(*SUBMIT, "--dry-run")
    assert (dry.code, (slurm / "run").exists()) == (0, False)
    assert shardway(*SUBMIT).code == 0
    kept = RunDir(slurm / "run").attempt(1).job_script.read_text()
    tokens = [re.search(r"\btoken=(\w+)", text) for text in (dry.out, kept)]
    assert all(tokens)
    assert dry.out.replace(tokens[0][1], "TOKEN") == kept.replace(tokens[1][1], "TOKEN")  # type: ignore[index]


def test_the_functions_of_the_script_are_shown_on_demand_and_lie_beside_it(slurm: Path, shardway: Shardway) -> None:
    dry = shardway(*SUBMIT, "--dry-run", "--lib")
    assert (dry.code, dry.err, (slurm / "run").exists()) == (0, shardway(*SUBMIT, "--dry-run").err, False)
    assert shardway(*SUBMIT).code == 0
    assert RunDir(slurm / "run").attempt(1).job_library.read_text() == dry.out
    alone = shardway(*SUBMIT, "--lib")
    assert (alone.code, alone.err.splitlines()[0]) == (
        2,
        "shardway: --lib prints the functions of a job script; it goes with --dry-run.",
    )


def test_a_second_submission_meets_the_first(slurm: Path, shardway: Shardway, golden: Golden) -> None:
    assert shardway(*SUBMIT).code == 0
    ended = shardway(*SUBMIT)
    golden(tell(slurm, SUBMIT, ended.err, ended.code), "submit/still-queued.txt")
    assert (slurm / "taken").read_text() == "x\n"


def test_a_refusal_is_explained(slurm: Path, shardway: Shardway, golden: Golden) -> None:
    said = "sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified\n"
    (slurm / "refuse").write_text(said)
    ended = shardway(*SUBMIT, "site.account=wrong")
    golden(tell(slurm, SUBMIT, ended.err, ended.code), "submit/refused-account.txt")
    assert not RunDir(slurm / "run").attempt(1).path.exists()


def test_no_sbatch_is_told(slurm: Path, shardway: Shardway, golden: Golden, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ls", "mkdir", "rm", "test", "sed", "find"):
        (slurm / "tools" / name).symlink_to(f"/usr/bin/{name}")
    (slurm / "tools/sbatch").unlink()
    monkeypatch.setenv("PATH", str(slurm / "tools"))
    ended = shardway(*SUBMIT)
    assert "refused" not in ended.err  # no scheduler saw the job
    golden(tell(slurm, SUBMIT, ended.err, ended.code), "submit/no-sbatch.txt")
    assert not RunDir(slurm / "run").attempt(1).path.exists()


def test_a_scheduler_that_is_down_is_told_while_it_is_tried_again(
    slurm: Path, shardway: Shardway, monkeypatch: pytest.MonkeyPatch
) -> None:
    (slurm / "refuse").write_text("sbatch: error: Unable to contact slurm controller (connect failure)\n")
    patient = partial(submit.Submitter, pause=lambda seconds: (slurm / "refuse").unlink())
    monkeypatch.setattr(submit, "Submitter", patient)
    ended = shardway(*SUBMIT, "--json")
    said = "slurm on tiny did not take the job: Slurm's controller does not answer. Trying again for about a minute."
    assert (ended.code, ended.err.splitlines()[0]) == (0, f"shardway: {said}")
    assert json.loads(ended.out)["job"] == "1"


def test_two_people_at_once_submit_one_job(slurm: Path) -> None:
    """Two processes; the one that is late is told."""
    ended = []
    shared = "from shardway.launch.submission import host_checks; host_checks._OF_ONE_NODE = ()"
    code = CODE.replace("\nmain()", f"\n{shared}\nmain()")

    def work() -> None:
        ended.append(run_python(slurm, code, *SUBMIT)[0])

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(done.returncode for done in ended) == [0, 2], [done.stderr for done in ended]
    assert (slurm / "taken").read_text() == "x\n"
    assert os.listdir(slurm / "run/attempts") == ["0001"]


# --- on a login node

LIMIT = 2.7
"""What --dry-run may cost, in imports of its libraries: 0.4 CPU seconds where those take 0.15."""
TRIES = 8
ALL = CODE.replace(
    "\nmain()",
    """
import json
from shardway.cli.main import app
for line in json.loads(sys.argv[1]):
    app(line, standalone_mode=False)
""",
)


def without_costs(said: str) -> str:
    """What a dry run reports besides what the job may cost."""
    return re.sub(r"(?m)^shardway: costs at most .*\n", "", said)


def words_for(site: str, runtime: str) -> list[str]:
    image = [] if runtime == "none" else [f"site.container={runtime}", "site.image=/images/torch.sqsh"]
    scheduler = load_site(site).scheduler
    launcher = ["site.launcher=torchrun"] if runtime == "pyxis" else []
    if runtime == "pyxis" and scheduler != "slurm":
        return []
    return ["submit", "--on", site, "--dry-run", "--walltime", "1h", "site.account=proj1", *image, *launcher]


def test_dry_runs_of_every_site_and_container_need_no_torch(tmp_path: Path) -> None:
    lines = [
        line for site in list_sites() for runtime in GROUPS["containers"].own if (line := words_for(site, runtime))
    ]
    done, _ = run_python(tmp_path, ALL, json.dumps(lines))
    assert (done.returncode, without_costs(done.stderr)) == (0, "")
    assert done.stdout.count("#!/bin/bash\n") == len(lines) > 60


@pytest.mark.parametrize(("site", "runtime"), [("jupiter", "none"), ("aspire2a-plus", "enroot")])
def test_a_dry_run_is_quick(site: str, runtime: str, tmp_path: Path) -> None:
    tries, libraries = list[float](), list[float]()
    while len(tries) < TRIES and not is_quick(tries, libraries, LIMIT):
        done, used_s = run_python(tmp_path, CODE, *words_for(site, runtime))
        assert (done.returncode, without_costs(done.stderr)) == (0, "")
        tries.append(used_s)
        libraries.append(run_python(tmp_path, LIBRARIES)[1])
    assert is_quick(tries, libraries, LIMIT)


@pytest.mark.parametrize(
    ("mode", "told"), [(0o600, ""), (0o640, "close it: `chmod 600"), (0o644, "close it: `chmod 600")]
)
def test_secrets_that_others_can_read_are_told(mode: int, told: str, shardway: Shardway) -> None:
    secrets = Path(os.environ["HOME"]) / ".config" / "shardway" / "secrets.env"
    secrets.parent.mkdir(parents=True)
    secrets.write_text("HF_TOKEN=hf_x\n")
    secrets.chmod(mode)
    ended = shardway(*JUPITER)
    assert (ended.code, told in ended.err, bool(without_costs(ended.err))) == (0, True, bool(told))
    assert "hf_x" not in ended.out + ended.err


# --- orders that are damaged


@pytest.fixture
def ordered(shardway: Shardway, slurm: Path) -> RunDir:
    """A run that was submitted."""
    assert shardway(*SUBMIT).code == 0
    return RunDir(Path("run"))


@pytest.mark.parametrize(
    "order",
    ["", "[" * 10**5, "[]", "9" * 5000, '{"here": "/"}', *({"site": 3}, {"here": "\ud800"}, {"command": "python"})],
    ids=lambda order: str(order)[:20],
)
def test_a_damaged_order_is_named(order: str | dict[str, Any], shardway: Shardway, ordered: RunDir) -> None:
    path = ordered.attempt(1).order_path
    changed = order if isinstance(order, str) else json.dumps({**json.loads(path.read_text()), **order})
    path.write_text(changed)
    ended = shardway("resume", "run", "--dry-run")
    assert (ended.code, ended.out) == (2, "")
    assert ended.err == (
        "shardway: run/attempts/0001/order.json is damaged.\n"
        "  To do: submit the run with `shardway submit --dir run`.\n"
    )


def test_a_damaged_run_file_of_an_order_is_named(shardway: Shardway, ordered: RunDir) -> None:
    ordered.attempt(1).run_file.write_text("[train\n")
    ended = shardway("resume", "run", "--dry-run")
    assert ended.code == 2
    assert ended.err.startswith("shardway: run/attempts/0001/run.toml is not valid TOML: ")


# --- resume of what was trained by hand


def test_a_run_that_was_trained_by_hand_is_resumed_as_it_was_started(shardway: Shardway, tmp_path: Path) -> None:
    write_text(tmp_path)
    (tmp_path / "my.toml").write_text("[optim]\nlr = 1e-3\n[run]\nname = 'it'\n")
    assert shardway("train", "my.toml", *TINY).code == 0
    with read_last_request(LocalHost(), Path("runs/it")) as order:
        request = order.run_request
        assert (request.directory, request.run_file) == (Path("runs/it"), Path("runs/it/run.toml"))
        assert set(request.overrides) == {_as_toml(word) for word in TINY}
        assert load_run(request.run_file, request.overrides).values.optim.lr == 1e-3
    ended = shardway("resume", "runs/it", "train.steps=9", "--dry-run")
    assert (ended.code, ended.err) == (0, "")
    assert "runs/it" in ended.out


def _as_toml(word: str) -> str:
    name, _, value = word.partition("=")
    text = {"data.path": f'"{value}"', "train.steps": f'"{value} steps"', "train.validate_every": f'"{value}"'}
    return f"{name}={text.get(name, value)}"


@pytest.mark.parametrize("is_here", [True, False])
def test_a_script_that_was_started_by_hand_is_resumed_where_it_is(
    is_here: bool, shardway: Shardway, tmp_path: Path
) -> None:
    run = RunDir(tmp_path / "run")
    run.create()
    run.write_request("", 'format = 1\n\n[train]\nsteps = "9 steps"         # command line\n')
    with run.event_writer(0) as events:
        events.write("started", step=0, command=["train.py", "--lr", "3e-4", "train.steps=9"])
    if not is_here:
        ended = shardway("resume", "run", "--dry-run")
        assert (ended.code, ended.out) == (2, "")
        assert ended.err.startswith("shardway: run was trained by hand by a script (train.py), which is not here.\n")
        return
    (tmp_path / "train.py").write_text("import shardway\n")
    with read_last_request(LocalHost(), Path("run")) as order:
        assert order.command == ("python", "train.py", "--lr", "3e-4", "train.steps=9")
        assert (order.run_request.directory, order.run_request.overrides) == (Path("run"), ())


JUWELS = ("submit", "--on", "juwels-booster", "--dry-run")


def test_the_account_of_the_shell_is_taken_and_told(shardway: Shardway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SBATCH_ACCOUNT", "proj9")
    monkeypatch.setenv("SBATCH_TIMELIMIT", "3")
    done = shardway(*JUWELS)
    assert "#SBATCH --account=proj9\n" in done.out
    assert "the account is proj9, as SBATCH_ACCOUNT of this shell says" in done.err
    assert "SBATCH_TIMELIMIT=3 of this shell is left out: the job has 86400 s (site.walltime)" in done.err
    own = shardway(*JUWELS, "site.account=mine")
    assert "#SBATCH --account=mine\n" in own.out
    assert "SBATCH_ACCOUNT=proj9 of this shell is left out: the job has mine (site.account)" in own.err


@pytest.mark.parametrize(
    ("words", "cpus"),
    [((), 24), (('site.options={hint = "nomultithread"}',), 12), (("site.options={threads-per-core = 1}",), 12)],
)
def test_threads_are_counted_where_the_job_has_them(shardway: Shardway, words: tuple[str, ...], cpus: int) -> None:
    done = shardway(*JUWELS, "site.account=proj1", "site.launcher=srun", *words)
    assert f"#SBATCH --cpus-per-task={cpus}\n" in done.out, done.err


# --- the dry run as facts


def test_the_facts_of_a_dry_run_have_its_cost_and_a_digest(shardway: Shardway, tmp_path: Path) -> None:
    """Of JUPITER's nodes of four GPUs: 2 nodes x 4 GPUs x 3 h x 2 attempts. The digest is that of what would run."""
    job = (*JUPITER, "--json", "--nodes", "2", "--until-done", "--max-attempts", "2", "run.root=/p/project1/runs")

    def facts(*words: str) -> dict[str, Any]:
        ended = shardway(*job, *words)
        assert (ended.code, ended.err) == (0, "")
        return dict(json.loads(ended.out))

    first = facts("--walltime", "3h")
    counted = {name: first[name] for name in ("nodes", "gpus", "walltime_s", "attempts", "gpu_hours")}
    assert counted == {"nodes": 2, "gpus": 8, "walltime_s": 10800.0, "attempts": 2, "gpu_hours": 48.0}
    assert first["script"].startswith("#!/bin/bash\n")
    assert facts("--walltime", "3h")["digest"] == first["digest"]
    others = [facts("--walltime", "4h"), facts("--walltime", "3h", "optim.lr=1e-4")]
    (tmp_path / "train.py").write_text("import torch.distributed\n")
    command = ("--walltime", "3h", "--", "python", "train.py")
    others.append(facts(*command))
    (tmp_path / "train.py").write_text("import torch.distributed as dist\n")
    others.append(facts(*command))
    assert len({each["digest"] for each in (first, *others)}) == 5


def test_a_model_of_a_foreign_command_is_sized_before_the_queue(shardway: Shardway, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import torch.distributed\n")
    ended = shardway(*LEONARDO, "--walltime", "1h", "--", "python", "train.py", "--model", "Qwen/Qwen3-32B")
    assert ended.code == 0
    assert "if this trains Qwen/Qwen3-32B (model), it does not fit 4 x" in ended.err
