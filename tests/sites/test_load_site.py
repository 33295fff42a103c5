"""Loading site profiles: the shipped ones, a user's own, and every way in which one can be wrong."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from shardway.errors import UserError
from shardway.hardware.catalogue import load_accelerators, load_links
from shardway.hardware.probe import Device, LocalMachine
from shardway.sites.load import list_shipped, list_sites, load_site
from shardway.sites.problems import GENERIC_SITES, list_problems
from shardway.sites.schema import DETECTABLE, SiteProfile

GIB = 2**30
MACHINE = LocalMachine("here", "CPU 1", 8, 6, 30 * GIB, (), "3.12.0", "Linux 6.1 x86_64")
H100 = Device("NVIDIA H100 80GB HBM3", 80 * GIB)
A40 = Device("NVIDIA A40", 45 * GIB)
STRANGER = Device("NVIDIA Graphics Device", 16 * GIB)

SITES = ", ".join(list_shipped())
REAL_SITES = sorted(set(list_shipped()) - set(GENERIC_SITES))

MINIMAL = 'format = 1\nname = "mine"\ntitle = "My machine"\nscheduler = "slurm"\n'
FULL = """
format = 1
name = "mine"
title = "My machine"
scheduler = "slurm"
launcher = "srun"
container = "apptainer"
environment = { NCCL_DEBUG = "WARN" }

[node]
cores = 48
memory = "480GiB"
accelerator = "a100-sxm4-40gb"
accelerators_per_node = 4
link = "nvlink3-4gpu"
local_disk = "$TMPDIR"

[network]
link = "hdr200"
adapters_per_node = 4

[[queues]]
name = "gpu"
max_walltime = "1d"
max_nodes = 64

[[queues]]
name = "devel"
max_walltime = 7200

[storage]
home = "$HOME"
scratch = "/scratch/$USER"

[sources]
node = { source = "user guide", date = 2026-11-01 }
"queues.gpu.max_walltime" = { source = "sinfo", date = 2026-11-02 }
"""


def never_probe() -> LocalMachine:
    raise AssertionError("the machine was probed without need")


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Writes a profile into an empty working folder and returns its path, which is the same in every message."""
    monkeypatch.chdir(tmp_path)

    def write_profile(text: str) -> str:
        Path("mine.toml").write_text(text, encoding="utf-8")
        return "mine.toml"

    return write_profile


def message_of(path: str) -> str:
    with pytest.raises(UserError) as caught:
        load_site(path, never_probe)
    return str(caught.value)


# ------------------------------------------------------------------------------------------ what is shipped


def test_the_profiles_that_are_shipped() -> None:
    assert list_sites() == (
        "aspire2a-plus",
        "dgx-slurm",
        "generic-pbs",
        "generic-slurm",
        "jupiter",
        "jureca-dc",
        "juwels-booster",
        "laptop",
        "leonardo-booster",
        "lumi-g",
        "marenostrum5-acc",
        "param-rudra",
        "perlmutter",
    )


@pytest.mark.parametrize("name", list_shipped())
def test_a_shipped_profile_loads_and_bears_its_own_name(name: str) -> None:
    assert load_site(name, lambda: MACHINE).name == name


@pytest.mark.parametrize("name", [*REAL_SITES, "dgx-slurm"])
def test_a_described_machine_states_what_a_plan_is_made_from(name: str) -> None:
    profile = load_site(name, never_probe)
    assert None not in (profile.launcher, profile.node.cores, profile.node.memory)
    assert profile.node.accelerators_per_node is not None
    assert profile.node.accelerators_per_node > 1
    part = load_accelerators()[profile.node.accelerator or ""]
    assert part.peak("bf16") or part.peak("fp16")
    assert part.memory_bytes
    assert part.memory_bandwidth_bytes_per_s
    inside = load_links()[profile.node.link or part.link or ""]
    assert inside.bandwidth_bytes_per_s or inside.peer_bandwidth_bytes_per_s
    assert load_links()[profile.network.link or ""].bandwidth_bytes_per_s
    assert profile.network.adapters_per_node


@pytest.mark.parametrize("name", REAL_SITES)
def test_a_real_site_states_its_scheduler_its_first_queue_and_its_storage(name: str) -> None:
    profile = load_site(name, never_probe)
    assert profile.scheduler in {"slurm", "pbs"}
    assert profile.queues[0].max_walltime is not None
    assert profile.storage.home is not None
    assert profile.storage.scratch is not None


# Typed by hand from what the sites publish: bytes/s that a node has towards the network.
NETWORK_OF_A_NODE = [
    ("aspire2a-plus", 400e9),  # eight NDR400
    ("jupiter", 100e9),  # four NDR200
    ("juwels-booster", 100e9),  # four HDR200
    ("leonardo-booster", 50e9),  # two dual-port HDR100
    ("lumi-g", 100e9),  # four Slingshot 11
    ("marenostrum5-acc", 100e9),  # four NDR200
    ("perlmutter", 100e9),  # four Slingshot 11
]


@pytest.mark.parametrize(("name", "bytes_per_s"), NETWORK_OF_A_NODE)
def test_the_adapters_of_a_node_add_up_to_what_its_site_publishes(name: str, bytes_per_s: float) -> None:
    network = load_site(name, never_probe).network
    bandwidth = load_links()[network.link or ""].bandwidth_bytes_per_s
    assert (bandwidth or 0.0) * (network.adapters_per_node or 0) == bytes_per_s


@pytest.mark.parametrize(("name", "scheduler"), [("generic-slurm", "slurm"), ("generic-pbs", "pbs")])
def test_a_generic_profile_states_nothing_about_nodes(name: str, scheduler: str) -> None:
    profile = load_site(name, never_probe)
    assert profile.scheduler == scheduler
    assert set(profile.node.model_dump().values()) == {None}
    assert set(profile.network.model_dump().values()) == {None}
    assert profile.queues == ()


@pytest.mark.parametrize("name", ["generic-slurm", "generic-pbs"])
def test_the_commented_lines_of_a_generic_profile_are_a_valid_profile(name: str, write: Callable[[str], str]) -> None:
    # The profiles are there to be copied: what a user uncomments has to load.
    text = files("shardway.sites").joinpath(f"{name}.toml").read_text(encoding="utf-8")
    head, body = text.split("\n\n", 1)
    assert all(line.startswith("#") for line in head.splitlines())
    profile = load_site(write(body.replace("\n# ", "\n")), never_probe)
    assert profile.node.accelerators_per_node is not None
    assert profile.queues[0].max_walltime == 86400.0
    assert profile.environment == {"NCCL_DEBUG": "WARN"}


# ------------------------------------------------------------------------------------------ what is detected


@pytest.mark.parametrize(
    ("devices", "accelerator", "count"),
    [
        ((), "cpu", 0),
        ((H100, H100), "h100-sxm5-80gb", 2),
        ((H100, A40), None, 2),
        ((STRANGER,), None, 1),
        ((STRANGER, STRANGER), None, 2),
    ],
    ids=["none", "two alike", "two parts", "unknown", "two unknown"],
)
def test_laptop_is_what_the_probe_found(devices: tuple[Device, ...], accelerator: str | None, count: int) -> None:
    node = load_site("laptop", lambda: replace(MACHINE, accelerators=devices)).node
    assert (node.cores, node.memory) == (6, 30 * GIB)
    assert (node.accelerator, node.accelerators_per_node) == (accelerator, count)


def test_what_the_probe_does_not_know_stays_unknown() -> None:
    assert load_site("laptop", lambda: replace(MACHINE, memory_bytes=None)).node.memory is None


def test_this_machine_is_probed_once_and_by_default() -> None:
    calls: list[None] = []

    def probe() -> LocalMachine:
        calls.append(None)
        return MACHINE

    load_site("laptop", probe)
    assert len(calls) == 1
    assert load_site("laptop").node.cores is not None


def test_one_detected_key_beside_written_ones(write: Callable[[str], str]) -> None:
    path = write(f'{MINIMAL}[node]\ncores = "detect"\nmemory = "4GiB"\n')
    node = load_site(path, lambda: MACHINE).node
    assert (node.cores, node.memory, node.accelerator) == (6, 4 * GIB, None)


# ------------------------------------------------------------------------------------------ a user's own profile


def test_a_full_profile_is_read_with_its_units(write: Callable[[str], str]) -> None:
    profile = load_site(write(FULL), never_probe)
    assert profile.node.memory == 480 * GIB
    assert profile.node.accelerator in load_accelerators()
    assert [(queue.name, queue.max_walltime, queue.max_nodes) for queue in profile.queues] == [
        ("gpu", 86400.0, 64),
        ("devel", 7200.0, None),
    ]
    assert profile.storage.project is None
    assert profile.sources["node"].date.isoformat() == "2026-11-01"


def test_what_is_left_out_is_unknown(write: Callable[[str], str]) -> None:
    profile = load_site(write(MINIMAL), never_probe)
    assert (profile.launcher, profile.container) == (None, None)
    assert set(profile.node.model_dump().values()) == {None}


def test_a_profile_cannot_be_changed(write: Callable[[str], str]) -> None:
    profile = load_site(write(MINIMAL), never_probe)
    with pytest.raises(ValueError, match="frozen"):
        profile.name = "other"  # type: ignore[misc]


def test_home_is_expanded_in_the_path_of_a_profile(
    write: Callable[[str], str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write(MINIMAL)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load_site("~/mine.toml", never_probe).name == "mine"


# ------------------------------------------------------------------------------------------ what can be wrong


def test_an_unknown_name() -> None:
    assert message_of("laptpo") == (
        'there is no site "laptpo"\n'
        f"  allowed: {SITES}, or the path of a profile (with a / or ending in .toml)\n"
        '  to do: write "laptop", or write a profile for your site: `shardway sites probe`'
    )


def test_an_unknown_name_that_is_like_no_other() -> None:
    assert message_of("zzz") == (
        'there is no site "zzz"\n'
        f"  allowed: {SITES}, or the path of a profile (with a / or ending in .toml)\n"
        "  to do: choose one of these, or write a profile for your site: `shardway sites probe`"
    )


def test_a_missing_file(write: Callable[[str], str]) -> None:
    write(MINIMAL)
    assert message_of("sites/mine.toml") == (
        "cannot read the site profile sites/mine.toml: No such file or directory\n"
        f"  allowed: a readable TOML file, or one of {SITES}\n"
        "  to do: correct the path"
    )


def test_a_folder_and_a_file_that_is_not_text(write: Callable[[str], str]) -> None:
    Path(write(MINIMAL)).write_bytes(b"\xff\xfe")
    assert message_of("mine.toml").splitlines()[0] == ("cannot read the site profile mine.toml: it is not UTF-8 text")
    assert message_of("./").splitlines()[0] == "cannot read the site profile ./: Is a directory"


def test_a_byte_order_mark_is_no_part_of_a_profile(write: Callable[[str], str]) -> None:
    """As editors on Windows write it; a run file may have one too."""
    path = Path(write(MINIMAL))
    plain = load_site(str(path))
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert load_site(str(path)) == plain


def test_broken_toml(write: Callable[[str], str]) -> None:
    assert message_of(write('format = 1\nname = "mine\n')) == (
        "site profile mine.toml is not valid TOML: Illegal character '\\n' (at line 2, column 13)\n"
        "  to do: correct that line"
    )


@pytest.mark.parametrize("value", ["[" * 5000 + "]" * 5000, "9" * 5000, "{x=" * 5000])
def test_toml_that_python_cannot_hold(value: str, write: Callable[[str], str]) -> None:
    told = message_of(write(f"{MINIMAL}more = {value}\n"))
    assert told.startswith("site profile mine.toml is not valid TOML: ")
    assert told.endswith("\n  to do: correct that line")


def test_a_name_that_no_file_can_have() -> None:
    assert message_of("a\0b.toml").startswith("cannot read the site profile a\0b.toml: embedded null byte\n")


def test_a_newer_format_is_refused_before_its_keys(write: Callable[[str], str]) -> None:
    assert message_of(write("format = 2\nfuture_key = true\n")) == (
        "site profile mine.toml has format 2, which is newer than this version of Shardway\n"
        "  allowed: format 1\n"
        "  to do: update Shardway, or write the profile in the format above"
    )


def test_all_problems_at_once(write: Callable[[str], str]) -> None:
    text = """
title = ""
scheduler = "slrum"
launchers = "srun"

[node]
cores = "8"
memory = "12 parsecs"
accelerators_per_node = true
local_disk = "detect"

[[queues]]
max_walltime = "soon"
max_node = 2

[sources]
"node.cores" = { source = "x", date = "today" }
"""
    keys = ", ".join(SiteProfile.model_fields)
    assert message_of(write(text)) == (
        "13 problems in site profile mine.toml\n"
        "  format: is missing\n"
        "      to do: add format: 1, the schema's version\n"
        "  name: is missing\n"
        "      to do: add name: short name of the site\n"
        '  title: "" is not allowed\n'
        "      allowed: a string that is not empty\n"
        '  scheduler: "slrum" is not allowed\n'
        '      allowed: "local", "slurm", "pbs"\n'
        '  node.cores: "8" is not allowed\n'
        "      allowed: an integer\n"
        '  node.memory: "12 parsecs" is not a size\n'
        "      allowed: a number and one of B, KiB, MiB, GiB, TiB, PiB, kB, KB, MB, GB, TB, PB\n"
        "  node.accelerators_per_node: true is not allowed\n"
        "      allowed: an integer\n"
        '  node.local_disk: "detect" is not allowed\n'
        "      allowed: an absolute path, or one that starts with ~ or $\n"
        "  queues[1].name: is missing\n"
        "      to do: add name: name that the user chooses it by\n"
        '  queues[1].max_walltime: "soon" is not a time\n'
        '      allowed: numbers with d, h, min, m, s or ms, such as "1h30m"\n'
        "  queues[1].max_node: is not a key of a site profile\n"
        "      allowed: name, partition, qos, max_walltime, default_walltime, max_nodes, min_nodes\n"
        '      to do: write "max_nodes"\n'
        '  sources."node.cores".date: "today" is not allowed\n'
        "      allowed: a date such as 2026-11-01\n"
        "  launchers: is not a key of a site profile\n"
        f"      allowed: {keys}\n"
        '      to do: write "launcher"'
    )


def test_a_part_that_the_catalogue_lacks(write: Callable[[str], str]) -> None:
    parts = ", ".join(["cpu", *load_accelerators()])
    assert message_of(write(f'{MINIMAL}[node]\naccelerator = "h100-sxm5-80g"\n')) == (
        "1 problem in site profile mine.toml\n"
        '  node.accelerator: "h100-sxm5-80g" is not in the catalogue of accelerators\n'
        f"      allowed: {parts}\n"
        '      to do: write "h100-sxm5-80gb"'
    )


def test_a_link_that_is_like_no_other(write: Callable[[str], str]) -> None:
    last_line = message_of(write(f'{MINIMAL}[network]\nlink = "detect"\n')).splitlines()[-1]
    assert last_line == "      to do: choose one of these, or leave it out where yours is not there"


def test_contradictions(write: Callable[[str], str]) -> None:
    assert message_of(write(f'{MINIMAL}[node]\naccelerator = "cpu"\naccelerators_per_node = 2\n')) == (
        "1 problem in site profile mine.toml\n"
        '  node: accelerator is "cpu" but accelerators_per_node is 2\n'
        "      allowed: 0 of them, or the key of an accelerator"
    )
    assert message_of(write(f'{MINIMAL}[[queues]]\nname = "gpu"\n[[queues]]\nname = "gpu"\n')) == (
        "1 problem in site profile mine.toml\n  profile: queues has gpu more than once\n      allowed: each name once"
    )


def test_a_source_of_nothing(write: Callable[[str], str]) -> None:
    text = f'{MINIMAL}[sources]\n"node.cores" = {{ source = "sinfo", date = 2026-11-01 }}\n'
    assert message_of(write(text)) == (
        "1 problem in site profile mine.toml\n"
        '  sources."node.cores": names nothing that this profile states\n'
        "      to do: name a key path of the profile, such as node.cores, or remove it"
    )


@pytest.mark.parametrize(
    "line", ["format = true", "format = 0", 'format = "1"', "node = 3", "queues = {}", "environment = []"]
)
def test_a_value_of_the_wrong_kind_is_a_problem_of_that_key(write: Callable[[str], str], line: str) -> None:
    key = line.split(" ")[0]
    text = MINIMAL.replace("format = 1\n", "") if key == "format" else MINIMAL
    assert message_of(write(f"{line}\n{text}")).splitlines()[1].startswith(f"  {key}: ")


WALL_TIMES = st.integers(min_value=1, max_value=3650)  # of days: the longest that units take


@given(WALL_TIMES, st.sampled_from(["s", "min", "h", "d"]))
def test_every_wall_time_is_seconds(amount: int, unit: str) -> None:
    seconds = {"s": 1, "min": 60, "h": 3600, "d": 86400}[unit]
    queue = {"name": "q", "max_walltime": f"{amount}{unit}"}
    profile = SiteProfile.model_validate(
        {"format": 1, "name": "n", "title": "t", "scheduler": "pbs", "queues": [queue]}
    )
    assert profile.queues[0].max_walltime == amount * seconds


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=40)
@given(st.dictionaries(st.sampled_from(sorted(SiteProfile.model_fields)), JUNK))
def test_each_finding_is_one_problem_whatever_the_table_holds(table: dict[str, object]) -> None:
    with pytest.raises(ValidationError) as caught:
        SiteProfile.model_validate({**table, "no such key": 0})
    problems = list_problems(caught.value)
    assert len(problems) == caught.value.error_count()
    assert all(problem.where and problem.what for problem in problems)


def test_every_shipped_profile_and_run_file_is_valid_by_its_schema() -> None:
    """As an editor checks it; a profile that this schema refuses would be marked in an editor."""
    import jsonschema

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(each) for key, each in value.items()}
        if isinstance(value, list):
            return [plain(each) for each in value]
        return value if isinstance(value, str | int | float | bool) else str(value)

    root = Path(__file__).parents[2]
    cases = {"site": sorted(root.glob("src/shardway/sites/*.toml")), "run": sorted(root.glob("examples/*.toml"))}
    for kind, paths in cases.items():
        schema = json.loads((root / "docs/schema" / f"{kind}.json").read_text())
        jsonschema.Draft7Validator.check_schema(schema)
        check = jsonschema.Draft7Validator(schema)
        for file in paths:
            table = plain(tomllib.loads(file.read_text()))
            assert [error.message for error in check.iter_errors(table)] == [], file
            assert not check.is_valid({**table, "formt": 1})


def test_facts_that_can_be_detected_are_those_of_the_schema() -> None:
    from shardway.sites.load import _DETECTORS

    assert {*DETECTABLE} == {*_DETECTORS}
