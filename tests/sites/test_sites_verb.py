from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from shardway.cli import sites
from shardway.cli.main import app, run_guarded
from shardway.hardware import probe
from shardway.launch.hosts import local
from shardway.launch.hosts.base import Done

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """`shardway sites ...`: exit code, stdout, stderr."""
    monkeypatch.setattr(probe, "_list_nvidia_devices", tuple)

    def run_words(*words: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = run_guarded(lambda: app(["sites", *words], standalone_mode=False, prog_name="shardway"))
        said = capsys.readouterr()
        assert "Traceback" not in said.err
        return code, said.out, said.err

    return run_words


def put(folder: Path, name: str, text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.toml").write_text(text, encoding="utf-8")


def test_list_names_every_site_with_its_origin(run: Run, own_profiles: Path) -> None:
    put(own_profiles, "mine", 'format = 1\nname = "mine"\nextends = "lumi-g"\n')
    put(own_profiles, "jupiter", 'format = 1\nname = "jupiter"\nextends = "jupiter"\ntitle = "Ours"\n')
    put(own_profiles, "broken", "format = 1\n")
    code, out, _ = run("list", "--json")
    rows = {row["name"]: row for row in json.loads(out)}
    assert code == 0
    assert rows["lumi-g"]["origin"] == "shipped"
    assert rows["mine"] == {**rows["lumi-g"], "name": "mine", "origin": "yours"}
    assert rows["mine"]["node"] == "8 x mi250x-gcd"
    assert (rows["jupiter"]["origin"], rows["jupiter"]["title"]) == ("yours, in place of the shipped one", "Ours")
    where = own_profiles / "broken.toml"
    told = f"cannot be used: 3 problems in site profile {where}; `shardway sites show broken` shows why"
    assert rows["broken"]["title"] == told
    assert rows["laptop"]["node"] == "no accelerators"
    assert rows["generic-pbs"]["node"] == "not said"
    _, table, _ = run("list")
    assert table.splitlines()[0].split() == ["NAME", "SCHEDULER", "NODE", "ORIGIN", "TITLE"]
    assert len(table.splitlines()) == len(rows) + 3
    assert table.endswith(f"Your own profiles: {own_profiles}\n")


def test_show_says_where_each_fact_comes_from(run: Run) -> None:
    code, out, _ = run("show", "perlmutter")
    lines = out.splitlines()
    assert (code, lines[:2]) == (0, ["Perlmutter, nodes with GPUs (NERSC)", "shipped with Shardway"])
    [walltime] = [line for line in lines if "queues.debug.max_walltime" in line]
    assert walltime.split() == ["queues.debug.max_walltime", "30m"]
    assert [line for line in lines if line.startswith("? internet.nodes")]
    assert "https://docs.nersc.gov/systems/perlmutter/architecture" in out
    assert all(len(line) <= 130 for line in lines)


def test_show_as_json_has_values_in_bytes_and_seconds(run: Run, own_profiles: Path) -> None:
    put(own_profiles, "mine", 'format = 1\nname = "mine"\nextends = "lumi-g"\n[node]\ncores = 60\n')
    _, out, _ = run("show", "mine", "--json")
    shown = json.loads(out)
    assert (shown["origin"], shown["extends"], shown["shadows"]) == ("yours", "lumi-g", False)
    assert shown["path"] == str(own_profiles / "mine.toml")
    facts = {fact["path"]: fact for fact in shown["facts"]}
    assert facts["node.memory"]["value"] == 480 * 2**30
    assert facts["queues.dev-g.max_walltime"]["value"] == 10800.0
    assert (facts["node.cores"]["source"], facts["node.cores"]["unsure"]) == (None, True)
    assert facts["node.memory"]["date"] == "2026-11-26"


def test_show_of_an_unknown_site(run: Run) -> None:
    code, out, err = run("show", "lumi")
    assert (code, out) == (2, "")
    assert 'write "lumi-g"' in err


@pytest.fixture
def quiet_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine, on which no command is found but `hostname`."""

    def answer(self: object, words: list[str], **_: object) -> Done:
        return (
            Done(tuple(words), 0, "box\n", "") if words[0] == "hostname" else Done(tuple(words), 127, "", "missing\n")
        )

    monkeypatch.setattr(local.LocalHost, "run", answer)


@pytest.mark.usefixtures("quiet_host")
def test_probe_prints_a_profile_and_writes_nothing(run: Run, own_profiles: Path, tmp_path: Path) -> None:
    code, out, _ = run("probe")
    assert (code, own_profiles.exists()) == (0, False)
    (tmp_path / "box.toml").write_text(out, encoding="utf-8")
    _, shown, _ = run("show", str(tmp_path / "box.toml"), "--json")
    facts = {fact["path"]: fact["value"] for fact in json.loads(shown)["facts"]}
    assert (facts["scheduler"], facts["node.accelerators_per_node"]) == ("local", 0)


@pytest.mark.usefixtures("quiet_host")
def test_probe_keeps_a_profile_once(run: Run, own_profiles: Path) -> None:
    code, out, _ = run("probe", "--write", "box")
    assert (code, out) == (0, f"wrote {own_profiles / 'box.toml'}: `shardway sites show box`\n")
    before = (own_profiles / "box.toml").read_bytes()
    code, out, err = run("probe", "--write", "box")
    assert (code, out) == (2, "")
    assert "is there and is not written over" in err
    assert (own_profiles / "box.toml").read_bytes() == before


@pytest.mark.usefixtures("quiet_host")
def test_probe_as_json_keeps_stdout_for_facts(run: Run) -> None:
    _, out, err = run("probe", "--write", "box", "--json")
    facts = {fact["path"]: fact for fact in json.loads(out)["facts"]}
    assert facts["scheduler"]["value"] == "local"
    assert err.startswith("wrote ")


@pytest.mark.parametrize(("site", "name"), [("hpc", "hpc"), ("lumi-g", "my-lumi-g"), ("ü b", "b"), ("", "my-site")])
def test_a_printed_profile_has_a_name_of_its_own(site: str, name: str) -> None:
    assert sites._free_name(site) == name


def test_sites_are_shown_without_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; from shardway.cli.main import main; main()"
    words = [sys.executable, "-c", code, "sites", "list"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert "leonardo-booster" in done.stdout
