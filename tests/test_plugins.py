"""Doors: how names are looked up, what clashes and breaks, and what each group takes from another package."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from installed_packages import Install, installing
from shardway import plugins
from shardway.errors import UserError
from shardway.hardware.catalogue import find_accelerator, load_accelerators
from shardway.plan.memory import optimizer_bytes
from shardway.plugins import (
    GROUPS,
    describe_state,
    find_plugin,
    is_registered,
    list_installed,
    list_names,
    list_plugins,
    load_plugin,
)
from shardway.resolve.draft import applies
from shardway.resolve.request import ResolveRequest, resolve_request
from shardway.runfile.load import explain_key
from shardway.runfile.schema import RunFile
from shardway.sites.load import find_profile, list_shipped, list_sites, load_site

OPTIMIZER = """
from shardway.train.optim.kinds import OptimizerKind

class Mine(OptimizerKind):
    state_bytes = 12.0
    keys = ("optim.eps",)
    settings = {"rho": 0.5, "betas": [0.9, 0.99], "steps": 3}

    def build(self, section, model, peak_lr):
        raise AssertionError
"""
ENTRY = {"shardway.optimizers": {"mine": "mine_module:Mine"}}
OURS = tuple(GROUPS)


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    yield from installing(tmp_path, monkeypatch)


def refusal(*words: str) -> str:
    with pytest.raises(UserError) as caught:
        resolve_request(ResolveRequest(None, words))
    return str(caught.value)


# --- looking up


@pytest.mark.parametrize("group", OURS)
def test_our_own_entries_load_and_keep_their_contract(group: str) -> None:
    own = [plugin for plugin in list_plugins(group) if plugin.package == "shardway"]
    assert [plugin.name for plugin in own] == list(GROUPS[group].own)
    assert {describe_state(plugin, check=True) for plugin in own} == {"ok"}


def test_a_name_of_our_own_needs_no_look_at_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "_installed", lambda _: pytest.fail("looked"))
    values = resolve_request(ResolveRequest(None, ("optim.name=muon", "site.launcher=srun"))).resolved.values
    assert (values.optim.name, load_site("laptop").name) == ("muon", "laptop")
    assert load_accelerators()["h100-sxm5-80gb"].vendor == "nvidia"


def test_looking_up_and_checking_import_neither_torch_nor_a_plugin(install: Install) -> None:
    site = install("shardway-mine", ENTRY, mine_module="print('imported')\n" + OPTIMIZER)
    code = f"""
import sys
sys.path.insert(0, {str(site)!r})
from shardway.plugins import GROUPS, list_names, load_plugin
print([list_names(group) for group in GROUPS][4], "mine_module" in sys.modules)
for group in {OURS!r}:
    for name in list_names(group):
        load_plugin(group, name)
print({{"torch", "numpy"}} & set(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    names = (*GROUPS["optimizers"].own, "mine")
    assert done.stdout.splitlines() == [f"{names} False", "imported", "set()"]


def test_names_of_other_packages_come_after_ours(install: Install) -> None:
    install("shardway-mine", {"shardway.optimizers": {"zeta": "mine_module:Mine", "beta": "mine_module:Mine"}})
    assert list_names("optimizers") == (*GROUPS["optimizers"].own, "beta", "zeta")
    assert list_installed("optimizers") == ("beta", "zeta")
    assert [is_registered("optimizers", name) for name in ("beta", "gamma")] == [True, False]
    [plugin] = [plugin for plugin in list_plugins("optimizers") if plugin.name == "beta"]
    assert (plugin.package, plugin.version, plugin.target) == ("shardway-mine", "1.2.3", "mine_module:Mine")


def test_a_name_of_ours_cannot_be_replaced(install: Install) -> None:
    install("shardway-mine", {"shardway.optimizers": {"adamw": "mine_module:Mine"}}, mine_module=OPTIMIZER)
    assert load_plugin("optimizers", "adamw").__module__ == "shardway.train.optim.kinds"
    assert list_names("optimizers") == tuple(GROUPS["optimizers"].own)
    [shadowed] = [plugin for plugin in list_plugins("optimizers") if plugin.package != "shardway"]
    assert describe_state(shadowed) == "shadowed by Shardway's own"


def test_a_name_in_two_packages_is_refused(install: Install) -> None:
    install("shardway-mine", ENTRY, mine_module=OPTIMIZER)
    install("shardway-other", {"shardway.optimizers": {"mine": "other:Mine"}}, version="2.0", other=OPTIMIZER)
    with pytest.raises(UserError) as caught:
        find_plugin("optimizers", "mine")
    assert str(caught.value) == (
        'the optimizer "mine" is in two packages, shardway-mine 1.2.3 and shardway-other 2.0\n'
        "  to do: uninstall one of them"
    )
    states = [describe_state(plugin) for plugin in list_plugins("optimizers") if plugin.name == "mine"]
    assert states == ["twice: also in shardway-other", "twice: also in shardway-mine"]


def test_a_name_that_is_not_there_lists_those_that_are(install: Install) -> None:
    install("shardway-mine", ENTRY)
    with pytest.raises(UserError) as caught:
        find_plugin("optimizers", "mien")
    assert str(caught.value) == (
        '"mien" is no optimizer that is registered\n  allowed: adamw, sgd, adafactor, adamw8bit, muon, mine'
    )


@pytest.mark.parametrize(
    ("code", "what"),
    [
        ("import not_there_at_all", "cannot be loaded: ModuleNotFoundError: No module named 'not_there_at_all'"),
        ("1 / 0", "cannot be loaded: ZeroDivisionError: division by zero"),
        ("", "cannot be loaded: AttributeError: module 'mine_module' has no attribute 'Mine'"),
        (
            "class Mine: pass",
            "cannot be used: mine_module:Mine is no class derived from shardway.train.optim.kinds.OptimizerKind",
        ),
        (
            "from shardway.train.optim.kinds import OptimizerKind\nclass Mine(OptimizerKind): pass",
            "cannot be used: mine_module:Mine lacks state_bytes, build, which shardway.train.optim.kinds.OptimizerKind "
            "asks for",
        ),
    ],
)
def test_what_cannot_be_loaded_names_its_package(install: Install, code: str, what: str) -> None:
    install("shardway-mine", ENTRY, mine_module=code)
    with pytest.raises(UserError) as caught:
        load_plugin("optimizers", "mine")
    first, remedy = str(caught.value).splitlines()
    assert first == f'the optimizer "mine" of shardway-mine 1.2.3 {what}'
    assert remedy.endswith("uninstall shardway-mine")
    [plugin] = [plugin for plugin in list_plugins("optimizers") if plugin.name == "mine"]
    assert (describe_state(plugin), describe_state(plugin, check=True)) == ("ok", what)


# --- the keys of a run file


def test_a_key_takes_every_registered_name(install: Install) -> None:
    assert explain_key("optim.name")[0].allowed == '"adamw", "sgd", "adafactor", "adamw8bit", "muon"'
    assert 'optim.name (command line): "mine" is not one of the choices' in refusal("optim.name=mine")
    install("shardway-mine", ENTRY, mine_module=OPTIMIZER)
    assert explain_key("optim.name")[0].allowed == '"adamw", "sgd", "adafactor", "adamw8bit", "muon", "mine"'
    assert RunFile.model_json_schema()["$defs"]["OptimSection"]["properties"]["name"]["enum"][-1] == "mine"
    resolved = resolve_request(ResolveRequest(None, ("optim.name=mine", "optim.eps=1e-3"))).resolved
    assert resolved.values.optim.name == "mine"
    assert [applies(f"optim.{key}", resolved.values) for key in ("lr", "eps", "settings", "betas", "kernel")] == [
        *(True, True, True, False, False)
    ]
    assert refusal("optim.name=mien").endswith('allowed: "adamw", "sgd", "adafactor", "adamw8bit", "muon" or "mine"')


def test_its_facts_reach_rules_and_plan(install: Install) -> None:
    install("shardway-mine", ENTRY, mine_module=OPTIMIZER)
    assert optimizer_bytes("mine") == 12.0
    assert refusal("optim.name=mine", "optim.betas=[0.1, 0.2]") == (
        "1 problem in the run\n"
        '  optim.betas (command line): has no effect with optim.name = "mine"\n'
        "      allowed: only with optim.name = adamw or adamw8bit or muon\n"
        "      to do: remove the key"
    )
    narrow = refusal("optim.name=mine", "precision.weights=bf16", "precision.compute=bf16")
    assert '"mine" does not round stochastically' in narrow
    assert '"mine" needs the shapes of weights' in refusal("optim.name=mine", "train.engine=deepspeed")


def test_settings_are_checked_by_the_class(install: Install) -> None:
    install("shardway-mine", ENTRY, mine_module=OPTIMIZER)
    assert refusal("optim.name=mine", 'optim.settings={rhoo = 1, steps = 2.5, betas = "x"}') == (
        "1 problem in the run\n"
        '  optim.settings (command line): there is no setting "rhoo" (did you mean rho?); steps = 2.5 is no int; '
        "betas = 'x' is no list of optimizer \"mine\"\n"
        "      allowed: rho = 0.5, betas = [0.9, 0.99], steps = 3"
    )
    kind = load_plugin("optimizers", "mine")
    assert kind.read_settings({"rho": 1}) == {"rho": 1.0, "betas": [0.9, 0.99], "steps": 3}
    assert isinstance(kind.read_settings({"rho": 1})["rho"], float)
    assert refusal("optim.settings={rho = 1}") == (
        "1 problem in the run\n"
        '  optim.settings (command line): there is no setting "rho" of optimizer "adamw"\n'
        "      allowed: no setting at all"
    )


# --- accelerators and sites

ACCELERATORS = """
[sources]
sheet = "the vendor's sheet"

[accelerators.x1]
vendor = "xcorp"
name = "X1"
device_names = ["X1 *"]
peak_flops = { bf16 = 1e15 }
memory_bytes = 96e9
source = { "peak_flops.bf16" = "sheet", memory_bytes = "sheet" }
"""


def install_toml(install: Install, group: str, name: str, text: str) -> None:
    site = install("shardway-data", {f"shardway.{group}": {name: "data_package"}})
    (site / "data_package").mkdir()
    (site / "data_package/__init__.py").touch()
    (site / f"data_package/{name}.toml").write_text(text)


def test_accelerators_of_another_package(install: Install) -> None:
    before = list(load_accelerators())
    assert find_accelerator("X1 96GB") is None
    install_toml(install, "accelerators", "xcorp", ACCELERATORS)
    assert list(load_accelerators()) == [*before, "x1"]
    found = load_accelerators()["x1"]
    assert (found.peak("bf16"), found.memory_bytes, found.power_w) == (1e15, 96e9, None)
    assert found.sources == {"peak_flops.bf16": "the vendor's sheet", "memory_bytes": "the vendor's sheet"}
    assert find_accelerator("X1 96GB") is found


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (("[accelerators.x1]", "[accelerators.mi300x]"), "accelerators.mi300x: Shardway has this key"),
        (('vendor = "xcorp"', "colour = 1"), "accelerators.x1: has no field colour"),
        (('vendor = "xcorp"', ""), "accelerators.x1: lacks vendor"),
        (("96e9", '"96GB"'), "accelerators.x1: memory_bytes is no number above 0"),
        (("bf16 = 1e15", "int7 = 1e15"), "peak_flops is no table of fp32, tf32, fp16, bf16, fp8, fp4"),
        ((', memory_bytes = "sheet"', ""), "accelerators.x1: memory_bytes has no source"),
        (('memory_bytes = "sheet"', 'memory_bytes = "shet"'), 'accelerators.x1: source "shet" is not in [sources]'),
        (("[sources]", "[sources"), 'the catalogue of accelerators "xcorp" of shardway-data 1.2.3 is not valid TOML'),
    ],
)
def test_a_wrong_catalogue_names_its_package(install: Install, change: tuple[str, str], what: str) -> None:
    install_toml(install, "accelerators", "xcorp", ACCELERATORS.replace(*change))
    assert load_accelerators()["h100-sxm5-80gb"].vendor == "nvidia"  # what is ours does not need it
    with pytest.raises(UserError) as caught:
        list(load_accelerators())
    assert what in str(caught.value)
    assert 'the catalogue of accelerators "xcorp" of shardway-data 1.2.3' in str(caught.value)


def test_every_shipped_site_is_an_entry() -> None:
    folder = Path(plugins.__file__).parent / "sites"
    assert list_shipped() == tuple(sorted(path.stem for path in folder.glob("*.toml")))


def test_our_names_are_known_without_a_look_at_files(tmp_path: Path) -> None:
    """As from an archive, which Python imports from too."""
    package = Path(plugins.__file__).parent
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        for path in package.glob("*.py"):
            archive.write(path, f"shardway/{path.name}")
    program = "from shardway.plugins import GROUPS; print(*GROUPS['sites'].own)"
    words = [sys.executable, "-c", f"import sys; sys.path.insert(0, 'all.zip'); {program}"]
    told = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True, env={})
    assert told.stdout.split() == [*plugins.GROUPS["sites"].own]


def test_a_site_of_another_package(install: Install) -> None:
    before = list_sites()
    text = 'format = 1\nname = "lab"\ntitle = "The lab"\nscheduler = "local"\nextends = "laptop"\n'
    install_toml(install, "sites", "lab", text)
    assert set(list_sites()) == {*before, "lab"}
    assert (find_profile("lab").origin, load_site("lab").title) == ("installed", "The lab")
    assert resolve_request(ResolveRequest(None, ("site.name=lab",))).resolved.values.site.name == "lab"


def test_a_site_of_another_package_bears_its_name(install: Install) -> None:
    install_toml(install, "sites", "lab", 'name = "labor"\nextends = "laptop"\n')
    with pytest.raises(UserError, match='"labor" is not the name of the file'):
        load_site("lab")
