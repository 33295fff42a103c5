from __future__ import annotations

from pathlib import Path

import pytest

from shardway.errors import UserError
from shardway.sites.load import (
    find_profile,
    keep_profile,
    list_profiles,
    list_shipped,
    list_sites,
    load_site,
    own_folder,
)
from shardway.sites.problems import describe_facts, list_stray_sources
from unsourced import list_unsourced

SOURCE = '{ source = "sinfo", date = 2026-11-01 }'
LAB = """
format = 1
name = "lab"
title = "Our lab"
scheduler = "slurm"
environment = { A = "1", B = "2" }
[node]
cores = 48
memory = "100GiB"
[[queues]]
name = "gpu"
max_walltime = "24h"
max_nodes = 8
[[queues]]
name = "devel"
[start]
srun_options = ["--cpu-bind=none"]
[sources]
scheduler = { source = "guide", date = 2026-10-01 }
node = { source = "guide", date = 2026-10-01 }
queues = { source = "guide", date = 2026-10-01 }
environment = { source = "guide", date = 2026-10-01 }
start = { source = "guide", date = 2026-10-01 }
"""


def put(folder: Path, name: str, text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.toml").write_text(text, encoding="utf-8")


def head(name: str, parent: str = "") -> str:
    return f'format = 1\nname = "{name}"\n' + (f'extends = "{parent}"\n' if parent else "")


def message_of(name: str) -> str:
    with pytest.raises(UserError) as caught:
        load_site(name)
    return str(caught.value)


# --- where profiles are


def test_own_profiles_are_listed_with_the_shipped_ones(own_profiles: Path) -> None:
    assert list_sites() == list_shipped()
    put(own_profiles, "lab", LAB)
    put(own_profiles, ".hidden", LAB)
    assert list_sites() == tuple(sorted([*list_shipped(), "lab"]))
    [lab] = [profile for profile in list_profiles() if profile.origin == "yours"]
    assert (lab.name, lab.path, lab.shadows) == ("lab", own_profiles / "lab.toml", False)
    assert load_site("lab").node.cores == 48


@pytest.mark.parametrize("value", ["", "relative/folder"])
def test_without_a_configured_folder_it_is_below_home(
    value: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # A relative path is to be ignored (XDG Base Directory Specification).
    monkeypatch.setenv("XDG_CONFIG_HOME", value)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert own_folder() == tmp_path / ".config/shardway/sites"


def test_the_name_is_that_of_the_file(own_profiles: Path) -> None:
    put(own_profiles, "cluster", LAB)
    assert message_of("cluster").splitlines()[1] == '  name: "lab" is not the name of the file'


def test_a_misspelt_own_site_is_suggested(own_profiles: Path) -> None:
    put(own_profiles, "physics-lab", LAB.replace('"lab"', '"physics-lab"'))
    assert 'to do: write "physics-lab"' in message_of("physic-lab")


# --- in place of a shipped one


def test_a_shipped_name_is_never_taken_silently(own_profiles: Path) -> None:
    put(own_profiles, "lumi-g", LAB.replace('"lab"', '"lumi-g"'))
    assert find_profile("lumi-g").shadows
    assert message_of("lumi-g") == (
        f"1 problem in site profile {own_profiles}/lumi-g.toml\n"
        '  name: a shipped profile is called "lumi-g" too\n'
        '      to do: rename the file, or write extends = "lumi-g" to build on the shipped one, or replaces = true'
    )


def test_a_shipped_name_is_taken_on_purpose(own_profiles: Path) -> None:
    put(own_profiles, "lumi-g", "replaces = true\n" + LAB.replace('"lab"', '"lumi-g"'))
    assert load_site("lumi-g").node.cores == 48


def test_a_profile_that_extends_its_own_name_builds_on_the_shipped_one(own_profiles: Path) -> None:
    put(own_profiles, "lumi-g", head("lumi-g", "lumi-g") + '[defaults]\naccount = "project_1"\n')
    profile = load_site("lumi-g")
    assert profile.node.cores == 56
    assert profile.defaults["account"] == "project_1"
    assert [name for name in list_sites() if name == "lumi-g"] == ["lumi-g"]


# --- extends


def test_tables_are_merged_key_by_key_and_lists_are_replaced(own_profiles: Path) -> None:
    put(own_profiles, "lab", LAB)
    put(
        own_profiles,
        "ours",
        head("ours", "lab")
        + 'environment = { B = "3" }\n[node]\ncores = 32\n[start]\nsrun_options = ["-v"]\n'
        + '[[queues]]\nname = "gpu"\nmax_nodes = 2\n[[queues]]\nname = "long"\n',
    )
    ours = load_site("ours")
    assert (ours.name, ours.title, ours.extends) == ("ours", "Our lab", "lab")
    assert (ours.node.cores, ours.node.memory) == (32, 100 * 2**30)
    assert ours.environment == {"A": "1", "B": "3"}
    assert ours.start.srun_options == ("-v",)
    assert [(queue.name, queue.max_walltime, queue.max_nodes) for queue in ours.queues] == [
        ("gpu", 86400.0, 2),
        ("devel", None, None),
        ("long", None, None),
    ]


def test_a_changed_fact_loses_the_source_of_the_old_value(own_profiles: Path) -> None:
    put(own_profiles, "lab", LAB)
    put(
        own_profiles,
        "ours",
        head("ours", "lab")
        + '[node]\ncores = 32\nmemory = "100GiB"\n[[queues]]\nname = "gpu"\nmax_nodes = 2\n'
        + f'[sources]\n"queues.gpu.max_nodes" = {SOURCE}\n',
    )
    ours = load_site("ours")
    assert list_unsourced(ours) == ("node.cores",)  # the memory is the same as before
    assert list_stray_sources(ours) == ()
    sources = {fact.path: fact.source.source for fact in describe_facts(ours) if fact.source}
    assert (sources["queues.gpu.max_nodes"], sources["queues.gpu.max_walltime"]) == ("sinfo", "guide")


def test_a_chain_of_profiles_and_a_parent_by_path(own_profiles: Path) -> None:
    put(own_profiles, "lab", LAB)
    put(own_profiles, "ours", head("ours", "lab.toml") + "[node]\ncores = 32\n")
    put(own_profiles, "mine", head("mine", "ours") + 'title = "Mine"\n')
    mine = load_site("mine")
    assert (mine.title, mine.node.cores, mine.node.memory) == ("Mine", 32, 100 * 2**30)


def test_a_circle_is_told(own_profiles: Path) -> None:
    put(own_profiles, "a", head("a", "b"))
    put(own_profiles, "b", head("b", "./a.toml"))
    assert "extends itself: a -> b -> ./a.toml" in message_of("a")
    put(own_profiles, "c", head("c", "c"))
    assert "extends itself: c -> c" in message_of("c")


def test_an_unknown_parent_offers_the_nearest(own_profiles: Path) -> None:
    put(own_profiles, "mine", head("mine", "jureca"))
    assert 'there is no site "jureca"' in message_of("mine")
    assert 'to do: write "jureca-dc"' in message_of("mine")


def test_problems_of_a_parent_are_told_as_the_parents(own_profiles: Path) -> None:
    put(own_profiles, "lab", LAB.replace("cores = 48", 'cores = "48"'))
    put(own_profiles, "mine", head("mine", "lab") + "[node]\ncores = 3\n")
    assert message_of("mine").startswith(
        f"1 problem in site profile {own_profiles}/lab.toml, which site profile {own_profiles}/mine.toml extends\n"
    )


@pytest.mark.parametrize("line", ["queues = {}", "queues = [1]", "node = 3", "sources = 1", "extends = 3"])
def test_a_value_of_the_wrong_kind_survives_the_merge(own_profiles: Path, line: str) -> None:
    put(own_profiles, "lab", LAB)
    text = head("mine", "" if line.startswith("extends") else "lab")
    put(own_profiles, "mine", f"{text}{line}\n")
    assert f"  {line.split()[0]}" in message_of("mine")


def test_what_a_parent_detects_is_detected_once(own_profiles: Path) -> None:
    put(own_profiles, "mine", head("mine", "laptop") + "[node]\ncores = 2\n")
    profile = load_site("mine")
    assert profile.node.cores == 2
    assert profile.node.accelerators_per_node is not None


# --- keep


def test_a_profile_is_kept_and_never_written_over(own_profiles: Path) -> None:
    path = keep_profile("lab", LAB)
    assert path == own_profiles / "lab.toml"
    assert load_site("lab").node.cores == 48
    with pytest.raises(UserError, match=r"is there and is not written over"):
        keep_profile("lab", "")
    assert path.read_text(encoding="utf-8") == LAB
    assert [entry.name for entry in own_profiles.iterdir()] == ["lab.toml"]


@pytest.mark.parametrize("name", ["", "a b", "../a", ".a", "a/b", "a.toml", "-a"])
def test_a_name_that_no_file_can_have(name: str) -> None:
    with pytest.raises(UserError, match="no name of a site"):
        keep_profile(name, LAB)


def test_a_shipped_name_is_not_kept(own_profiles: Path) -> None:
    with pytest.raises(UserError, match='extends = "lumi-g"'):
        keep_profile("lumi-g", LAB)
    assert not own_profiles.exists()


def test_a_folder_that_cannot_be_made_is_told(own_profiles: Path) -> None:
    own_profiles.parent.mkdir(parents=True)
    own_profiles.write_text("a file", encoding="utf-8")
    with pytest.raises(UserError, match=r"cannot write .*lab\.toml: "):
        keep_profile("lab", LAB)
