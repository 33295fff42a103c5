from __future__ import annotations

from pathlib import Path

import pytest

from shardway.errors import UserError
from shardway.sites.load import load_site

TOP = 'format = 1\nname = "mine"\ntitle = "Mine"\n'
SLURM = f'{TOP}scheduler = "slurm"\n'
PBS = f'{TOP}scheduler = "pbs"\n'


def message_of(tmp_path: Path, text: str) -> str:
    path = tmp_path / "mine.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError) as caught:
        load_site(str(path))
    return str(caught.value).replace(str(tmp_path) + "/", "")


ONE_PROBLEM = [
    (f"{SLURM}node = {{ cores = 100000 }}", "node.cores: 100000 is more than any node has"),
    (f"{SLURM}node = {{ accelerators_per_node = 100 }}", "node.accelerators_per_node: 100 is more than any node has"),
    (f'{SLURM}node = {{ memory = "512KiB" }}', "node.memory: 512KiB is no memory of a node"),
    (f'{SLURM}queues = [{{ name = "q", max_walltime = "2s" }}]', "queues.q.max_walltime: 2s is no wall-time"),
    (
        f'{PBS}queues = [{{ name = "q", qos = "x" }}]',
        'queues.q.qos: is for scheduler "slurm" only, and here it is "pbs"',
    ),
    (
        f'{SLURM}queues = [{{ name = "q", max_nodes = 2, min_nodes = 3 }}]',
        "queues[1]: min_nodes is 3\n      allowed: max_nodes, 2, or fewer",
    ),
    (
        f'{SLURM}queues = [{{ name = "q", max_walltime = "1h", default_walltime = "2h" }}]',
        "queues[1]: default_walltime is 2h\n      allowed: max_walltime, 1h, or less",
    ),
    (
        f'{PBS}request = {{ accelerators = "gres" }}',
        'request.accelerators: "gres" is no request of pbs\n      allowed: "ngpus", "none"',
    ),
    (f'{PBS}request = {{ constraint = "gpu" }}', 'request.constraint: is for scheduler "slurm" only'),
    (f"{SLURM}request = {{ options = {{ x = 1.5 }} }}", "request.options.x: 1.5 is no value of an option"),
    (f'{PBS}launcher = "srun"', 'launcher: "srun" needs scheduler "slurm", and here it is "pbs"'),
    (f'{PBS}container = "pyxis"', 'container: "pyxis" needs scheduler "slurm"'),
    (f"{SLURM}containers = {{ by_scheduler = true }}", 'containers.by_scheduler: is for scheduler "pbs" only'),
    (f'{SLURM}containers = {{ mounts = ["/a"] }}', 'containers.mounts[1]: "/a" is no mount'),
    (f'{SLURM}containers = {{ mounts = ["/a:/b", "/a:b:ro"] }}', 'containers.mounts[2]: "/a:b:ro" is no mount'),
    (f'{SLURM}environment = {{ "A B" = "1" }}', 'environment.A B: "A B" is no name of a variable'),
    (f'{SLURM}start = {{ bind = "0xff" }}', 'start.bind: "0xff" is no list of CPU masks'),
    (f'{SLURM}start = {{ bind = "mask_cpu:0x3,0x6" }}', "start.bind: two masks share a core, or a mask has none"),
    (
        f'{SLURM}start = {{ bind = "mask_cpu:0x1,0x2" }}\nnode = {{ accelerators_per_node = 4 }}',
        "start.bind: 2 masks for 4 accelerators of a node",
    ),
    (f'{SLURM}internet = {{ nodes = "proxy" }}', "internet.proxy: is missing"),
    (
        f'{SLURM}internet = {{ proxy = "http://me:secret@proxy.example.org:3128" }}',
        'internet.proxy: "http://me:secret@proxy.example.org:3128" is no proxy',
    ),
    (f'{SLURM}defaults = {{ acount = "x" }}', "defaults.acount: is not a key of [site] in a run file"),
    (f'{SLURM}defaults = {{ name = "x" }}', "defaults.name: is not a key of [site] in a run file"),
    (f'{SLURM}defaults = {{ nodes = "two" }}', "defaults.nodes: "),
    (f'{SLURM}defaults = {{ walltime = "soon" }}', "defaults.walltime: "),
    (
        f'{SLURM}defaults = {{ queue = "p" }}\nqueues = [{{ name = "q" }}]',
        'defaults.queue: "p" is no queue of this profile\n      allowed: q',
    ),
]


@pytest.mark.parametrize(("text", "problem"), ONE_PROBLEM)
def test_what_cannot_be_is_one_problem(tmp_path: Path, text: str, problem: str) -> None:
    message = message_of(tmp_path, text)
    assert message.startswith(f"1 problem in site profile mine.toml\n  {problem}")


def test_a_misspelt_default_offers_the_nearest_key(tmp_path: Path) -> None:
    assert message_of(tmp_path, f'{SLURM}defaults = {{ acount = "x" }}').endswith('      to do: write "account"')


def test_all_that_is_plausible(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        f'{SLURM}[[queues]]\nname = "q"\nmin_nodes = 2\nmax_nodes = 2\n'
        'default_walltime = "1h"\nmax_walltime = "1h"\n'
        '[containers]\nmounts = ["/a:/b", "$HOME:/home:ro", "~/data:/data"]\n'
        '[request.options]\nexclusive = true\nnice = 3\ncomment = "x"\nlicenses = ["a", "b"]\n'
        '[defaults]\nqueue = "q"\nwalltime = "30min"\nnodes = 2\naccount = "a"\n'
        '[internet]\nnodes = "proxy"\nproxy = "http://proxy:3128"\n'
        '[start]\nbind = "mask_cpu:0x1,2"\n'
        '[environment]\n_A1 = ""\n',
        encoding="utf-8",
    )
    profile = load_site(str(path))
    assert profile.request.options == {"exclusive": True, "nice": 3, "comment": "x", "licenses": ("a", "b")}
    assert profile.defaults["walltime"] == "30min"


def test_wrong_keys_and_contradictions_are_told_at_once(tmp_path: Path) -> None:
    text = (
        f'{PBS}container = "pyxis"\nnode = {{ cores = "8" }}\ndefaults = {{ acount = "x" }}\n'
        '[sources]\n"node.cores" = { source = "x", date = 2026-11-01 }\n"nod" = { source = "x", date = 2026-11-01 }\n'
    )
    lines = message_of(tmp_path, text).splitlines()
    assert lines[0] == "4 problems in site profile mine.toml"
    found = [line for line in lines if line.startswith("  ") and not line.startswith("      ")]
    # The source of node.cores is none: what it names stands there, wrong as it is.
    assert found == [
        '  node.cores: "8" is not allowed',
        '  container: "pyxis" needs scheduler "slurm", and here it is "pbs"',
        '  sources."nod": names nothing that this profile states',
        "  defaults.acount: is not a key of [site] in a run file",
    ]


def test_a_profile_without_a_name_is_still_checked(tmp_path: Path) -> None:
    message = message_of(tmp_path, 'format = 1\ntitle = "x"\nscheduler = "pbs"\ncontainer = "pyxis"\n')
    assert message.splitlines()[0] == "2 problems in site profile mine.toml"
