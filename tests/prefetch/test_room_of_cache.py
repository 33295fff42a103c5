"""Where the cache is, how a name is read, and how much may be written there."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardway.errors import UserError
from shardway.hardware.command import CommandResult
from shardway.hardware.mounts import MountedFileSystem
from shardway.hfconfig import HUB_CACHES
from shardway.prefetch import space
from shardway.prefetch.cache import (
    HubName,
    find_cache,
    find_hub_name,
    name_of_snapshot,
    parse_hub_name,
)
from shardway.prefetch.space import QuotaLimit, Room, find_room, parse_quotas, render_amount
from shardway.prefetch.wanted import list_wanted
from shardway.runfile.load import load_run
from shardway.sites.load import load_site


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A home without any variable of a cache."""
    for name in HUB_CACHES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_the_place_is_that_of_the_hubs_own_library(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_cache().folder == bare / ".cache/huggingface/hub"
    for name, value, folder in (
        ("XDG_CACHE_HOME", "/x", "/x/huggingface/hub"),
        ("HF_HOME", "/h", "/h/hub"),
        ("HUGGINGFACE_HUB_CACHE", "/old", "/old"),
        ("HF_HUB_CACHE", "$SCRATCH/new", "/s/new"),
    ):
        monkeypatch.setenv("SCRATCH", "/s")
        monkeypatch.setenv(name, value)
        assert str(find_cache().folder) == folder
        assert find_cache().origin == name


def test_the_variables_of_the_job_come_first(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", "/mine")
    monkeypatch.setenv("SCRATCH", "/s")
    assert str(find_cache({"HF_HOME": "$SCRATCH/hf"}).folder) == "/s/hf/hub"
    monkeypatch.delenv("SCRATCH")
    with pytest.raises(UserError, match=r"HF_HOME of the job's environment is \$SCRATCH/hf, and \$SCRATCH is not set"):
        find_cache({"HF_HOME": "$SCRATCH/hf"})


@pytest.mark.parametrize("text", ["", "a/b/c", "/abs/x", "../x", "org/na me", "org/x@", "org/x@../y", "a--b/c", "-x/y"])
def test_what_is_no_name_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"--model: .* is no name of the hub"):
        parse_hub_name(text, "--model")


def test_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_hub_name("gpt2", "--model") == HubName("gpt2")
    assert parse_hub_name("org/n.a_me-1@refs/pr/2", "--model") == HubName("org/n.a_me-1", "refs/pr/2")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "here").mkdir(parents=True)
    assert find_hub_name("org/here") is None  # a folder
    assert find_hub_name("org/there") == HubName("org/there")
    assert [find_hub_name(text) for text in ("", "./a/b", "$X/y", "~/a", "a/b/c")] == [None] * 5
    commit = "0123456789" * 4
    assert name_of_snapshot(f"/c/models--org--na--me/snapshots/{commit}") == HubName("org/na--me", commit)
    assert name_of_snapshot("/c/models--org--name/snapshots/main") is None


def test_what_a_run_needs() -> None:
    loaded = load_run(
        None,
        [
            'model.hf="org/x@v1"',
            "model.hf_weights=false",
            'data.path="s3://b/x"',
            'site.image="docker://a/b:1"',
            'site.environment={HF_HOME="/p"}',
        ],
    )
    wanted = list_wanted(loaded, load_site("marenostrum5-acc"))
    (repo,) = wanted.repos
    assert (repo.name, repo.where, repo.needs.weights) == (HubName("org/x", "v1"), "model.hf", False)
    assert not any("safetensors" in pattern for pattern in repo.patterns)
    assert wanted.variables["HF_HOME"] == "/p"
    assert [note.split(":")[0] for note in wanted.notes] == [
        "s3",
        "site.image is docker",
        "the login nodes of marenostrum5-acc have no internet",
    ]


def test_the_proxy_of_a_site_is_named_where_none_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    site = load_site("aspire2a-plus")
    site = site.model_copy(update={"internet": site.internet.model_copy(update={"login": "proxy"})})
    for name in ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    loaded = load_run(None, ['model.hf="org/x"'])
    assert site.internet.proxy
    assert [f"export https_proxy={site.internet.proxy}" in note for note in list_wanted(loaded, site).notes] == [True]
    monkeypatch.setenv("https_proxy", "http://p:1")
    assert list_wanted(loaded, site).notes == ()


# --- quotas

QUOTA = """\
Disk quotas for user alice (uid 1000):
     Filesystem  blocks   quota   limit   grace   files   quota   limit   grace
      /dev/sdb1 1048576* 1000000 2097152 1730000000   5000       0   10000       0
nas:/home         40       0       0       0       9       0       0       0
"""
LFS = """\
/lustre/project
                      512      0    1024       -     100     200     300       -
"""
WITHOUT = "Disk quotas for user root (uid 0): none\n"


def test_quotas_are_read() -> None:
    (quota,) = parse_quotas(QUOTA, "user", "quota")
    assert quota == QuotaLimit("user", "quota", 2**30, 2**31, 5000, 10000)
    assert (quota.free_bytes, quota.free_files) == (2**30, 5000)
    assert parse_quotas(QUOTA, "user", "quota", {"/dev/sdc1"}) == []
    (lustre,) = parse_quotas(LFS, "group", "lfs quota")
    assert (lustre.used_bytes, lustre.limit_bytes, lustre.used_files, lustre.limit_files) == (2**19, 2**20, 100, 300)
    for text in ("", WITHOUT, "quota: error while getting quota from nas: Connection refused\n", "a b c d e f g h i\n"):
        assert parse_quotas(text, "user", "quota") == []


def test_what_does_not_fit_is_counted_against_each_limit() -> None:
    quota = QuotaLimit("user", "quota", 900, 1000, 10, 12)
    room = Room(Path("/c"), "ext4", 10_000, None, (quota,))
    assert room.list_lacks(100, 2) == []
    assert room.list_lacks(101, 3) == [
        "the quota of the user at /c has 100B left, and 101B are needed",
        "the quota of the user at /c takes 2 more files, and 3 are needed",
    ]
    assert len(Room(Path("/c"), "ext4", 10, 5).list_lacks(11, 6)) == 2
    assert render_amount(3 * 2**40) == "3TiB"


@pytest.mark.parametrize(("kind", "command"), [("lustre", "lfs"), ("nfs4", "quota")])
def test_quotas_are_asked_of_the_file_system(
    kind: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, ...]] = []

    def answer(commands: list[tuple[str, ...]], limit_s: float) -> list[CommandResult]:
        asked.extend(commands)
        text = LFS if kind == "lustre" else QUOTA
        return [CommandResult(0, text), CommandResult(127, hung=False)]

    monkeypatch.setattr(space, "read_mounts", lambda: (MountedFileSystem(tmp_path.parents[-1], kind, "/dev/sdb1"),))
    monkeypatch.setattr(space, "run_commands", answer)
    room = find_room(tmp_path / "not" / "there")
    assert {words[0] for words in asked} == {command}
    assert [quota.subject for quota in room.quotas] == ["user"]
    assert room.free_bytes > 0
