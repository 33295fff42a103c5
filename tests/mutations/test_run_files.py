"""A damaged run file or site profile is refused as a whole, with its name, or taken for what it says now."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from cases import Case, cases, check_all, few_and_many
from mutate import remove
from verbs import call, picture

from shardway.runfile.load import render_commented
from shardway.runfile.schema import RunFile, all_keys
from shardway.sites.load import list_shipped

ROOT = Path(__file__).parents[2]

EXAMPLES = ("default", "mnist", "wikitext2")
SITE_TOML = b"""format = 1
extends = "default.toml"
[site]
name = "leonardo-booster"
nodes = 2
ranks_per_node = "auto"
walltime = "1h30m"
queue = "boost_usr_prod"
account = "ABC_123"
memory = "100GiB"
mounts = ["/data:/data:ro", "$HOME/x:/x"]
modules = ["cuda/12.1"]
environment = {NAME = "value", NUMBER = 3}
options = {reservation = "x", exclusive = true}
[parallel]
tp = 2
dp_shard = 2
"""


def run_files() -> dict[str, bytes]:
    """Name -> content: the examples, one that sets [site] and has a parent, one with every key."""
    found = {f"{name}.toml": (ROOT / "examples" / f"{name}.toml").read_bytes() for name in EXAMPLES}
    every = render_commented(RunFile(), {}).replace("\n# ", "\n")
    return {**found, "site.toml": SITE_TOML, "every.toml": every.encode()}


VERBS: tuple[tuple[str, ...], ...] = (
    ("config", "show", "FILE"),
    ("config", "show", "FILE", "--json", "--nproc", "4"),
    ("config", "show", "FILE", "--mesh", "--nproc", "8", "--nodes", "2"),
    ("train", "FILE", "--dry-run", "--nproc", "2"),
    ("plan", "FILE", "--gpu", "h100-sxm5-80gb"),
    ("plan", "FILE", "--on", "leonardo-booster"),
)


@few_and_many(few=5, many=90)
def test_run_files(numbers: Sequence[int], here: Path) -> None:
    files = run_files()
    for name, content in files.items():
        (here / name).write_bytes(content)

    def complain(case: Case) -> list[str]:
        path = here / case.name
        mutant = case.mutant(files[case.name], "toml")
        mutant.put(path)
        before = picture(here)
        answer = call(*(str(path.name) if word == "FILE" else word for word in case.dice().choice(VERBS)))
        found = answer.complaints((0, 2), path.name, *all_keys())
        if picture(here) != before:
            found.append("files are not as they were")
        remove(path)
        path.write_bytes(files[case.name])
        return [mutant.what, *found, str(answer)] if found else []

    check_all(cases(files, numbers), complain)


SITE_VERBS: tuple[tuple[str, ...], ...] = (
    ("sites", "show", "mine"),
    ("sites", "show", "mine", "--json"),
    ("sites", "list"),
    ("plan", "llama3-8b", "--on", "mine", "--nodes", "2"),
    ("config", "show", "site.name=mine"),
    ("config", "show", "site.name=mine", "--nodes", "2", "--mesh"),
)


@few_and_many(few=1, many=20)
def test_site_profiles(numbers: Sequence[int], here: Path) -> None:
    folder = here / "config/shardway/sites"
    folder.mkdir(parents=True)
    files = {name: (ROOT / f"src/shardway/sites/{name}.toml").read_bytes() for name in list_shipped()}
    path = folder / "mine.toml"

    def complain(case: Case) -> list[str]:
        content = files[case.name].replace(f'name = "{case.name}"'.encode(), b'name = "mine"', 1)
        mutant = case.mutant(content, "toml")
        mutant.put(path)
        before = picture(here)
        answer = call(*case.dice().choice(SITE_VERBS))
        found = answer.complaints((0, 2), "mine")
        if picture(here) != before:
            found.append("files are not as they were")
        return [mutant.what, *found, str(answer)] if found else []

    check_all(cases(files, numbers), complain)


LLAMA = json.dumps(
    {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 1024,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 128,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "rope_scaling": {"factor": 8.0, "rope_type": "llama3"},
        "torch_dtype": "bfloat16",
    },
    indent=1,
).encode()
MODEL_VERBS: tuple[tuple[str, ...], ...] = (
    ("plan", "./model", "--gpu", "h100-sxm5-80gb"),
    ("plan", "./model/config.json", "--gpu", "a100-sxm4-80gb", "--json"),
    ("config", "show", "model.hf=./model", "data.seq_len=32"),
)


@few_and_many(few=5, many=100)
def test_configs_of_models(numbers: Sequence[int], here: Path) -> None:
    """Those of Hugging Face folders."""
    path = here / "model/config.json"
    path.parent.mkdir()

    def complain(case: Case) -> list[str]:
        mutant = case.mutant(LLAMA, "json")
        mutant.put(path)
        answer = call(*case.dice().choice(MODEL_VERBS))
        found = answer.complaints((0, 2), "model")
        return [mutant.what, *found, str(answer)] if found else []

    check_all(cases(["config.json"], numbers), complain)
