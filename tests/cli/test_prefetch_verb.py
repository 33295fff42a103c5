"""`shardway prefetch` as a person uses it, what it refuses, and what the job of such a run gets."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
from command_line import Shardway

from golden_files import Golden
from hub_models import FIRST, write_model
from hub_server import COMMIT, HubServer, fill_cache
from page_shell import list_blocks
from shardway.errors import UserError
from shardway.launch.hosts import LocalHost
from shardway.launch.submission.prepare import Prepared, SubmitRequest, prepare
from shardway.prefetch.space import QuotaLimit, Room
from shardway.resolve.request import ResolveRequest

WORDS = (
    'model.hf="org/tiny"',
    "data.seq_len=16",
    "data.path=text.txt",
    "train.steps=2",
    "train.global_batch=4",
    "train.validate_every=off",
    "run.device=cpu",
    "run.threads=1",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("hub") / "tiny")


@pytest.fixture
def hub(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A hub, and a cache of one's own in `hf`."""
    (tmp_path / "text.txt").write_text("To be, or not to be. " * 200)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    for name in ("HF_TOKEN", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_TOKEN_PATH", "/nowhere/token")
    with HubServer({"org/tiny": folder, "datasets/org/text": folder}) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server
        huggingface_hub.close_session()


def list_all(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))


def test_a_dry_run_counts_and_writes_nothing(hub: HubServer, shardway: Shardway, tmp_path: Path) -> None:
    before = list_all(tmp_path)
    ended = shardway("prefetch", *WORDS, "--dry-run")
    assert ended.code == 0, ended.err
    assert list_all(tmp_path) == before
    assert "to fetch: 9 files" in ended.out
    assert "needs " in ended.out
    assert f"{2 * 9 + 8} inodes" in ended.out
    assert "quota" in ended.out


def test_everything_that_was_named_comes_into_the_cache_alone(
    hub: HubServer, shardway: Shardway, tmp_path: Path
) -> None:
    before = list_all(tmp_path)
    words = (*WORDS, "--tokenizer", "org/tiny", "--dataset", "org/text")
    ended = shardway("prefetch", *words, "--json")
    assert ended.code == 0, ended.err
    facts = json.loads(ended.out)
    assert [item["kind"] for item in facts["items"]] == ["model", "model", "dataset"]
    assert all(Path(item["folder"]).is_dir() for item in facts["items"])
    assert all(path.is_relative_to(tmp_path / "hf") for path in list_all(tmp_path) - before)
    again = shardway("prefetch", *words)
    assert again.out.count("all of it was here") == 3
    assert f'data.path = "{tmp_path}/hf/hub/datasets--org--text/snapshots/{COMMIT}"' in again.out
    assert shardway("prefetch", "--check", "--verify", *WORDS).code == 0


def test_the_cache_is_that_of_the_job(hub: HubServer, shardway: Shardway, tmp_path: Path) -> None:
    job = f'site.environment={{HF_HUB_CACHE="{tmp_path}/of-job"}}'
    ended = shardway("prefetch", *WORDS, job)
    assert ended.code == 0, ended.err
    assert f"into the cache of the job, {tmp_path}/of-job" in ended.err
    assert (tmp_path / "of-job" / "models--org--tiny").is_dir()
    assert not (tmp_path / "hf").exists()


def test_what_is_whole_needs_no_hub(
    hub: HubServer, shardway: Shardway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert shardway("prefetch", *WORDS).code == 0
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    ended = shardway("prefetch", *WORDS)
    assert (ended.code, "is whole in the cache; the hub was not asked" in ended.err) == (0, True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert shardway("prefetch", *WORDS).code == 0
    (tmp_path / "org" / "other").mkdir(parents=True)
    ended = shardway("prefetch", "--model", "org/other")
    assert ended.code == 2
    assert "./org/other is here, needs no prefetch and is used as it is; org/other means the hub's" in ended.err
    assert "the hub is not asked: HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set here" in ended.err
    assert "`shardway prefetch --model org/other`, without these variables, where the hub" in ended.err


def test_a_tokenizer_that_is_missing_is_fetched_as_one(hub: HubServer, shardway: Shardway, tmp_path: Path) -> None:
    ended = shardway("prefetch", "--tokenizer", "org/tiny", "--check")
    assert (ended.code, "`shardway prefetch --tokenizer org/tiny`" in ended.err) == (2, True)
    assert shardway("prefetch", "--tokenizer", "org/tiny").code == 0
    (found,) = (tmp_path / "hf").rglob("snapshots/*/tokenizer.json")
    found.unlink()
    ended = shardway("prefetch", "--tokenizer", "org/tiny", "--check")
    assert (ended.code, "--tokenizer org/tiny` fetches it again" in ended.err) == (2, True)


def test_too_little_room_refuses_before_a_byte_comes(
    hub: HubServer, shardway: Shardway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quota = QuotaLimit("user", "quota", 2**30, 2**30, 5, None)
    monkeypatch.setattr("shardway.prefetch.space.find_room", lambda folder: Room(folder, "nfs4", 2**40, None, (quota,)))
    before = list_all(tmp_path)
    for words in (WORDS, (*WORDS, "--dry-run")):
        ended = shardway("prefetch", *words)
        assert ended.code == 2
        assert "the quota of the user" in ended.err
        assert "has 0B left, and" in ended.err
    assert list_all(tmp_path) == before
    assert not [each for each in hub.requests if "/resolve/" in each.path]


REFUSED = {
    "nothing-named": (),
    "no-option": ("org/tiny",),
    "no-name": ("--model", "../x"),
    "not-there": ("--model", "org/none"),
    "no-revision": ("--model", "org/tiny@v9"),
    "gated": ("--model", "org/gated"),
    "pickled": ("--model", "org/pickled"),
    "two-looks": ("--check", "--dry-run", "--model", "org/tiny"),
    "not-in-the-cache": ("--check", "--model", "org/tiny"),
    "damaged": ("--check", "--model", "org/damaged"),
    "lacks-a-file": ("--model", "org/lacks"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str, hub: HubServer, shardway: Shardway, folder: Path, tmp_path: Path, golden: Golden) -> None:
    hub.repos["org/gated"] = folder
    hub.faults.gated = frozenset(("org/gated",))
    (tmp_path / "pickled").mkdir()
    (tmp_path / "pickled" / "config.json").write_text("{}")
    (tmp_path / "pickled" / "pytorch_model.bin").write_text("x")
    hub.repos["org/pickled"] = tmp_path / "pickled"
    if name == "lacks-a-file":
        hub.repos["org/lacks"] = write_model(tmp_path / "lacks")
        (tmp_path / "lacks" / FIRST).unlink()
    if name == "damaged":
        snapshot = fill_cache(tmp_path / "hf" / "hub", "org/damaged", folder)
        (snapshot / FIRST).resolve().write_bytes(b"cut")
        (snapshot / "tokenizer.json").unlink()
    ended = shardway("prefetch", *REFUSED[name])
    assert ended.code == 2
    golden(ended.err.replace(str(tmp_path), "DIR").replace(hub.url, "HUB"), f"prefetch/{name}.txt")


def test_the_folder_of_a_run_is_looked_at_too(hub: HubServer, shardway: Shardway, tmp_path: Path) -> None:
    model = write_model(tmp_path / "own")
    words = ("prefetch", "--check", f'model.hf="{model}"')
    assert shardway(*words).out == f"whole      {model}\n"
    (model / FIRST).unlink()
    ended = shardway(*words)
    assert (ended.code, f"{FIRST} is missing" in ended.err) == (2, True)
    assert shardway("prefetch", "--check", 'model.hf="/not/there"').code == 2


PAGE = Path(__file__).parents[2] / "docs" / "prefetch.md"


def test_the_commands_of_the_page_do_what_it_says(hub: HubServer, shardway: Shardway, folder: Path) -> None:
    hub.repos |= {"Qwen/Qwen3-0.6B": folder, "datasets/org/text": folder}
    page = PAGE.read_text(encoding="utf-8")
    (run_file,) = list_blocks(page, "toml")
    Path("my.toml").write_text(run_file)
    (block,) = list_blocks(page)
    lines = [shlex.split(line, comments=True) for line in block.splitlines()]
    assert len(lines) == 4
    for words in lines:
        assert words[:2] == ["shardway", "prefetch"]
        ended = shardway(*words[1:])
        assert ended.code == 0, ended.err
    assert "for a run  data.path" in ended.out


# --- the job


def order(*words: str, site: str = "jupiter") -> Prepared:
    overrides = (*WORDS, "site.account=proj1", *words)
    return prepare(SubmitRequest(ResolveRequest(None, overrides), site=site), LocalHost())


def test_a_job_gets_the_folder_and_the_variables(
    hub: HubServer, shardway: Shardway, folder: Path, tmp_path: Path
) -> None:
    snapshot = fill_cache(tmp_path / "hf" / "hub", "org/tiny", folder)
    hub.requests.clear()
    prepared = order()
    run_file = next(text for path, text in prepared.files.items() if path.name == "run.toml")
    assert f'hf = "{snapshot}"' in run_file
    assert 'hf = "org/tiny"' not in run_file
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"):
        assert f'export {name}="1"' in prepared.script
    assert f"export HF_HOME={tmp_path}/hf" in prepared.script
    assert hub.requests == []
    unstated = order("site.walltime=1h", site="generic-slurm")  # a profile that does not state whether nodes have one
    assert 'export HF_HUB_OFFLINE="1"' in unstated.script
    reached = order("site.walltime=1h", site="perlmutter")
    assert "HF_HUB_OFFLINE" not in reached.script
    assert f'hf = "{snapshot}"' in next(text for path, text in reached.files.items() if path.name == "run.toml")


def test_a_container_sees_all_of_the_repository(
    hub: HubServer, shardway: Shardway, folder: Path, tmp_path: Path
) -> None:
    fill_cache(tmp_path / "hf" / "hub", "org/tiny", folder)
    prepared = order("site.container=apptainer", "site.image=/i.sif")
    repo = f"{tmp_path}/hf/hub/models--org--tiny"
    assert f"--bind {repo}:{repo}:ro" in prepared.script
    line = next(line for line in prepared.script.splitlines() if "declare -p" in line)
    assert "HF_HUB_OFFLINE TRANSFORMERS_OFFLINE HF_DATASETS_OFFLINE" in line


def test_data_of_the_cache_are_looked_at_and_mounted(
    hub: HubServer, shardway: Shardway, folder: Path, tmp_path: Path
) -> None:
    snapshot = fill_cache(tmp_path / "hf" / "hub", "org/text", folder, kind="dataset")
    words = ('model.hf=""', f'data.path="{snapshot}"', "data.include=*.json")
    prepared = order(*words, "site.container=apptainer", "site.image=/i.sif")
    repo = f"{tmp_path}/hf/hub/datasets--org--text"
    assert f"--bind {repo}:{repo}:ro" in prepared.script
    (snapshot / "tokenizer.json").resolve().unlink()
    with pytest.raises(UserError, match=r"data.path .*tokenizer.json is a link to .* which is not there"):
        order(*words)


def test_a_command_of_ones_own_gets_the_variables(hub: HubServer, shardway: Shardway, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print(1)\n")
    request = SubmitRequest(
        ResolveRequest(None, ("site.account=proj1",)), site="jupiter", command=("python", "train.py"), here=tmp_path
    )
    script = prepare(request, LocalHost()).script
    assert 'export HF_HUB_OFFLINE="1"' in script
    assert f"export HF_HOME={tmp_path}/hf" in script


def test_submit_names_the_files_before_the_queue(
    hub: HubServer, shardway: Shardway, folder: Path, tmp_path: Path, golden: Golden
) -> None:
    snapshot = fill_cache(tmp_path / "hf" / "hub", "org/tiny", folder)
    (snapshot / FIRST).resolve().write_bytes(b"cut")
    (snapshot / "generation_config.json").unlink()
    ended = shardway("submit", "--on", "jupiter", "site.account=proj1", "--dry-run", *WORDS)
    assert ended.code == 2
    golden(ended.err.replace(str(tmp_path), "DIR"), "prefetch/submit.txt")
    assert not (tmp_path / "runs").exists()


def test_the_same_run_without_a_route(hub: HubServer, shardway: Shardway, tmp_path: Path) -> None:
    """What was prefetched is all that a run needs: trained in a network namespace that holds nothing."""
    if subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False).returncode:
        pytest.skip("this account may not make a network namespace")
    assert shardway("prefetch", *WORDS).code == 0
    environ = {name: value for name, value in os.environ.items() if name != "HF_ENDPOINT"}
    words = ["unshare", "--net", sys.executable, "-m", "shardway", "train", *WORDS]
    done = subprocess.run(words, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "finished at step 2" in done.stdout + done.stderr


def test_a_plan_names_what_the_cache_lacks(
    shardway: Shardway, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a line, without a failure; nothing is claimed of a site whose scheduler is not here."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    snapshot = fill_cache(tmp_path / "hub", "org/tiny", folder)
    (tmp_path / "text.txt").write_text("To be, or not to be. " * 200)
    (tmp_path / "my.toml").write_text('[model]\nhf = "org/tiny"\n')
    plan = (
        "plan",
        "my.toml",
        *(word for word in WORDS[1:] if "device" not in word),
        "--gpu",
        "a100-sxm4-40gb",
        "--gpus",
        "1",
    )
    whole = shardway(*plan)
    assert (whole.code, "not whole" in whole.err) == (0, False), whole.err
    next(snapshot.glob("model-00001*")).unlink()
    lacks = shardway(*plan)
    assert (lacks.code, lacks.out) == (0, whole.out), lacks.err
    assert f"model.hf: org/tiny is not whole in the cache {tmp_path}/hub of this machine (model-00001-of" in lacks.err
    assert "is missing" in lacks.err
    assert "before the job: `shardway prefetch my.toml`" in lacks.err
    elsewhere = shardway(*plan, "site.name=jupiter")
    assert (elsewhere.code, "not whole" in elsewhere.err) == (0, False), elsewhere.err
