"""What a written file says, read by the standard parser of its format and not by the code that wrote it."""

from __future__ import annotations

import ast
import json
import math
import re
import shlex
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from shardway.plan.case import Case
from shardway.plan.export.common import Emitted


@dataclass(frozen=True)
class Read:
    """The layout and the batch of a file; what its library leaves to a script is left out."""

    degrees: Mapping[str, int]
    """By the axes of a plan; `dp` where the library does not tell copies from shards."""
    ranks: int
    micro_batch: int = 0
    accumulation: int = 0
    whole: int | None = None
    """Sequences of a step."""
    stages: tuple[int, ...] = ()
    """Layers of each stage."""


def texts_of(emitted: Emitted) -> dict[str, str]:
    """Every file by its name."""
    return {file.name: file.text for file in emitted.files}


def head_of(emitted: Emitted) -> str:
    """The comment that the files start with, as one line."""
    texts = texts_of(emitted)
    comment = texts.get("ds_config.txt") or next(iter(texts.values())).split("\n\n")[0]
    return re.sub(r"\s*\n(# ?)?\s*", " ", comment).removeprefix("# ")


# --- torchtitan

TITAN_AXES = {
    "dp_replicate": "data_parallel_replicate_degree",
    "dp_shard": "data_parallel_shard_degree",
    "cp": "context_parallel_degree",
    "tp": "tensor_parallel_degree",
    "pp": "pipeline_parallel_degree",
    "ep": "expert_parallel_degree",
}


def read_toml(text: str, case: Case) -> Read:
    tables = tomllib.loads(text)
    etp = {"etp": tables["parallelism"]["expert_tensor_parallel_degree"]}
    return read_titan(tables["training"], tables["parallelism"], case, etp)


def read_job(text: str, case: Case) -> Read:
    """Only what is assigned: nothing of the module is run."""
    planned = next(node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef))
    said: dict[str, Any] = {}
    for node in planned.body:
        if isinstance(node, ast.Assign):
            said[ast.unparse(node.targets[0])] = node.value
    split = said["config.parallelism"]
    keywords = {each.arg: ast.literal_eval(each.value) for each in split.keywords}
    training = {
        name.removeprefix("config.training."): ast.literal_eval(value)
        for name, value in said.items()
        if name.startswith("config.training.")
    }
    return read_titan(training, keywords, case, {})


def read_titan(training: Mapping[str, Any], split: Mapping[str, Any], case: Case, more: Mapping[str, int]) -> Read:
    degrees = {axis: split[name] for axis, name in TITAN_AXES.items()}
    whole, local = training["global_batch_size"], training["local_batch_size"]
    piece = split["pipeline_parallel_microbatch_size"] if degrees["pp"] > 1 else local
    sums = whole // (degrees["dp_replicate"] * degrees["dp_shard"] * local)
    ranks = math.prod(degrees[axis] for axis in degrees if axis != "ep")
    stages = titan_stages(split, case.model.depth) if degrees["pp"] > 1 else ()
    return Read({**degrees, **more}, ranks, piece, sums * local // piece, whole, stages)


def titan_stages(split: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """By name, or as torchtitan cuts: the ends weigh as much as some layers, and the first stages get what is left."""
    if "module_fqns_per_model_part" in split:
        parts = split["module_fqns_per_model_part"]
        assert parts[0][0] == "tok_embeddings"
        assert [name for part in parts for name in part if "layers" in name] == [f"layers.{n}" for n in range(layers)]
        return tuple(sum(name.startswith("layers.") for name in part) for part in parts)
    first = split["pipeline_parallel_first_stage_less_layers"]
    last = split["pipeline_parallel_last_stage_less_layers"]
    weighed = layers + first + last
    stages = -(-weighed // split["pipeline_parallel_layers_per_stage"])
    sizes = [weighed // stages + (stage < weighed % stages) for stage in range(stages)]
    return (sizes[0] - first, *sizes[1:-1], sizes[-1] - last)


# --- Megatron Core


def read_megatron(text: str, case: Case) -> Read:
    body = text.split("MEGATRON_ARGS=(\n")[1].rsplit(")", 1)[0]
    words = shlex.split(body, comments=True)
    flags = {words[place]: words[place + 1 : place + 2] for place in range(len(words)) if words[place].startswith("--")}
    found = re.search(r"^EXPECTED_RANKS=(\d+)$", text, re.MULTILINE)
    assert found
    said = {name.removeprefix("--").replace("-", "_"): value[0] for name, value in flags.items() if value}
    layout = said.get("pipeline_model_parallel_layout")
    each = int(said.get("num_layers_per_virtual_pipeline_stage", 0))
    return read_core(said, int(found[1]), core_stages(layout, each, case))


def read_bridge(text: str, case: Case) -> Read:
    tables = yaml.safe_load(text)
    model = tables["model"]
    virtual = model["virtual_pipeline_model_parallel_size"]
    each = model["num_layers"] // (model["pipeline_model_parallel_size"] * virtual) if virtual else 0
    stages = core_stages(model["pipeline_model_parallel_layout"], each, case)
    return read_core({**model, **tables["train"]}, case.degrees.world, stages)


def read_core(said: Mapping[str, Any], ranks: int, stages: tuple[int, ...]) -> Read:
    degrees = {axis: int(said[f"{word}_parallel_size"]) for axis, word in CORE_AXES.items()}
    data = ranks // math.prod(degrees.values())
    experts = {axis: int(said.get(f"expert_{word}_parallel_size", 1)) for axis, word in EXPERT_AXES.items()}
    whole, micro_batch = int(said["global_batch_size"]), int(said["micro_batch_size"])
    return Read({"dp": data, **degrees, **experts}, ranks, micro_batch, whole // (micro_batch * data), whole, stages)


def core_stages(layout: str | None, each: int, case: Case) -> tuple[int, ...]:
    """As written out, or alike: `each` of a stage, 0 = one stage a rank."""
    if layout:
        assert (layout[0], layout[-1]) == ("E", "L")
        return tuple(map(len, layout[1:-1].split("|")))
    count = case.model.depth // each if each else case.degrees.pp
    return (case.model.depth // count,) * count


EXPERT_AXES = {"ep": "model", "etp": "tensor"}
CORE_AXES = {"cp": "context", "tp": "tensor_model", "pp": "pipeline_model"}


# --- DeepSpeed, Accelerate


def read_deepspeed(text: str, case: Case) -> Read:
    said = json.loads(text)
    degrees = {
        "cp": said.get("sequence_parallel_size", 1),
        "tp": said.get("tensor_parallel", {}).get("autotp_size", 1),
    }
    experts = said.get("expert_parallel", {"autoep_size": 1, "expert_tensor_parallel_size": 1})
    more = {"ep": experts["autoep_size"], "etp": experts["expert_tensor_parallel_size"]}
    micro_batch, sums = said["train_micro_batch_size_per_gpu"], said["gradient_accumulation_steps"]
    data = said.get("data_parallel_size", case.degrees.data)
    whole = said.get("train_batch_size")
    return Read({"dp": data, **degrees, **more}, data * math.prod(degrees.values()), micro_batch, sums, whole)


def read_accelerate(text: str, case: Case) -> Read:
    said = yaml.safe_load(text)
    axes = ("dp_replicate", "dp_shard", "cp", "tp")
    sizes = said.get("parallelism_config")
    if sizes is None:
        return Read({"dp_replicate": said["num_processes"]}, said["num_processes"])
    degrees = {axis: sizes[f"parallelism_config_{axis}_size"] for axis in axes}
    return Read(degrees, math.prod(degrees.values()))


READERS: Mapping[str, Callable[[str, Case], Read]] = {
    "torchtitan.toml": read_toml,
    "torchtitan_job.py": read_job,
    "megatron.sh": read_megatron,
    "megatron_bridge.yaml": read_bridge,
    "ds_config.json": read_deepspeed,
    "accelerate.yaml": read_accelerate,
}
