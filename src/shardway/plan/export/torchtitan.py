"""torchtitan: a job config in TOML (up to 0.2) and as a Python function (since 0.3), with notes on what is lost.

Invariants:
- A flavor matches only if hidden size, layers, heads, vocabulary and the width of its feed-forward layers (of its
  experts, if it has any) are all equal.
- The function starts from torchtitan's config for these sizes and sets everything that the plan decides.
- Every field of a case that the files do not carry over unchanged has its sentence here.
- Both files agree on what both versions have; what only one lacks is noted with its name. The plan's layout is written
  degree by degree; nothing is left for torchtitan to derive.

Sources: torchtitan 0.2.2 (config/job_config.py, distributed/pipeline_parallel.py) and 0.3.0 (config/configs.py,
models/*/config_registry.py, components/quantization/); the registries of both (torchtitan/models/*/__init__.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from shardway.plan.case import Case, layers_of_stages
from shardway.plan.export import common
from shardway.plan.export.common import EmittedFile, Settings
from shardway.plan.shapes import Architecture, Part

# --- torchtitan's own models by their sizes


@dataclass(frozen=True)
class Flavor:
    """torchtitan's names: the model, the flavor, and since 0.3 the function of its config_registry ("" none)."""

    model: str
    name: str
    function: str = ""


_FLAVORS = {
    (4096, 32, 32, 8, 14336, 0, 128256): Flavor("llama3", "8B", "llama3_8b"),
    (8192, 80, 64, 8, 28672, 0, 128256): Flavor("llama3", "70B", "llama3_70b"),
    (16384, 126, 128, 8, 53248, 0, 128256): Flavor("llama3", "405B", "llama3_405b"),
    (1024, 28, 16, 8, 3072, 0, 151936): Flavor("qwen3", "0.6B", "qwen3_0_6b"),
    (2048, 28, 16, 8, 6144, 0, 151936): Flavor("qwen3", "1.7B", "qwen3_1_7b"),
    (2560, 36, 32, 8, 9728, 0, 151936): Flavor("qwen3", "4B"),
    (4096, 36, 32, 8, 12288, 0, 151936): Flavor("qwen3", "8B"),
    (5120, 40, 40, 8, 17408, 0, 151936): Flavor("qwen3", "14B", "qwen3_14b"),
    (5120, 64, 64, 8, 25600, 0, 151936): Flavor("qwen3", "32B", "qwen3_32b"),
    (2048, 48, 32, 4, 768, 128, 151936): Flavor("qwen3", "30B-A3B", "qwen3_30b_a3b"),
    (4096, 94, 64, 4, 1536, 128, 151936): Flavor("qwen3", "235B-A22B"),
    (2048, 27, 16, 0, 1408, 64, 102400): Flavor("deepseek_v3", "16B", "deepseek_v3_16b"),
    (5120, 60, 128, 0, 1536, 160, 102400): Flavor("deepseek_v3", "236B"),
    (7168, 61, 128, 0, 2048, 256, 129280): Flavor("deepseek_v3", "671B", "deepseek_v3_671b"),
}
"""(Width, layers, heads, heads of keys and values (0 with latent attention, where they have no meaning), width of the
feed-forward layer or of an expert, experts, vocabulary) -> torchtitan's names."""


def find_flavor(model: Architecture) -> Flavor | None:
    """The flavor of these sizes, if torchtitan has one."""
    sizes = common.read_sizes(model)
    attention, experts = sizes.layer.attention, sizes.experts
    width, count = (experts.dim, experts.count) if experts else (sizes.ffn, 0)
    kv_heads = 0 if attention.latent else attention.kv_heads
    return _FLAVORS.get((model.hidden, sizes.count, attention.heads, kv_heads, width, count, model.vocab))


# --- the Python file, since 0.3

JOB = "torchtitan_job.py"

_POLICIES = {"products": "SelectiveAC", "operators": "SelectiveAC", "full": "FullAC"}
_LINEAR = {"fp8": "Float8LinearConverter", "mxfp8": "MXFP8LinearConverter", "fp4": "NVFP4LinearConverter"}
_GROUPED = {"fp8": "Float8GroupedExpertsConverter", "mxfp8": "MXFP8GroupedExpertsConverter"}


_PARTS: Mapping[Part, str] = {"attention": "attention", "ffn": "feed_forward", "shared": "shared_experts"}
_FP4_BLOCK = 128  # NVFP4LinearConverter requires both sides of a product to be multiples of this


def _render_job(case: Case, flavor: Flavor) -> str:
    policy, made = _POLICIES.get(case.recompute), _job_converters(case)
    package = f"torchtitan.models.{flavor.model}"
    lines = [
        *([f"from torchtitan.components.quantization import {', '.join(sorted(made))}"] if made else []),
        "from torchtitan.config import CompileConfig, ParallelismConfig",
        *([f"from torchtitan.distributed.activation_checkpoint import {policy}"] if policy else []),
        f"from {package} import model_registry",
        f"from {package}.config_registry import {flavor.function}",
        "from torchtitan.trainer import Trainer",
        "",
        "",
        "def planned() -> Trainer.Config:",
        f"    # python -m torchtitan.train --module {JOB.removesuffix('.py')} --config planned",
        f"    config = {flavor.function}()",
    ]
    if made:
        calls = (f"{common.write_call(f'{name}.Config', settings, ' ' * 8)}" for name, settings in made.items())
        lines += ["    converters = [", *(f"        {call}," for call in calls), "    ]"]
    given = f"{common.literal(flavor.name)}, converters=converters" if made else common.literal(flavor.name)
    split = {**_parallelism(case, head="lm_head"), "enable_sequence_parallel": case.sequence}
    compiled = {"enable": case.compiled, "enable_async_tensor_parallel": case.async_tensor and case.compiled}
    lines += [
        # The model is set even if the config has it, whose number format may differ.
        f"    config.model_spec = model_registry({given})",
        *(f"    config.training.{name} = {common.literal(value)}" for name, value in _training(case).items()),
        "    config.training.disable_cuda_graphs = True",
        f"    config.parallelism = {common.write_call('ParallelismConfig', split, '    ')}",
        f"    config.activation_checkpoint = {f'{policy}.Config()' if policy else None}",
        f"    config.compile = {common.write_call('CompileConfig', compiled, '    ')}",
        "    return config",
    ]
    return "\n".join([*lines, ""])


def fp4_parts(case: Case) -> tuple[list[str], list[str]]:
    """Parts of a layer by torchtitan's names: those that its fp4 takes, and those with an unsuitable width."""
    taken: list[str] = []
    odd: list[str] = []
    tp, matrices = case.degrees.tp, [each for run in case.model.runs for each in run.layer.matrices]
    for part, name in _PARTS.items():
        # Both sides of each product, on one rank; keys and values are two products.
        own = [each for each in matrices if each.part == part]
        widths = [each.inputs / (tp if each.split == "inputs" else 1) for each in own]
        widths += [
            each.outputs / ((tp if each.split == "outputs" else 1) * (2 if each.kv_heads else 1)) for each in own
        ]
        if widths:
            (odd if any(width % _FP4_BLOCK for width in widths) else taken).append(name)
    return taken, odd


def _job_converters(case: Case) -> Mapping[str, Settings]:
    """Converters by name: of products, except those of the head and of the router, and of experts."""
    compiled = {"model_compile_enabled": case.compiled}
    linear, grouped = _LINEAR.get(case.precision), _GROUPED.get(case.precision)
    if linear is None or (case.precision == "fp4" and not fp4_parts(case)[0]):
        return {}  # a converter without names would convert every product
    products: Settings = {"fqns": fp4_parts(case)[0] if case.precision == "fp4" else list(_PARTS.values())}
    if case.precision == "fp8":
        products = {"filter_fqns": ["lm_head", "router.gate"]}
    found: dict[str, Settings] = {linear: {**products, **compiled}}
    if grouped and any(layer.experts for layer in case.model.layers):
        found[grouped] = compiled
    return found


# --- notes


def describe(case: Case) -> Iterator[str]:
    """All notes, the model first."""
    yield from common.describe_irregular(case.model)
    degrees, (copies, shards) = case.degrees, _replicas_and_shards(case)
    flavor = find_flavor(case.model)
    if flavor is None:
        yield (
            f"torchtitan takes sizes from a flavor of its own, and has none of {case.model.name}: add one called "
            f'"{case.model.name}" to the registry of a model, and say that model under [model] name.'
        )
    if flavor is None or not flavor.function:
        yield "torchtitan 0.3 reads no TOML and has no config of these sizes: write one for its config_registry."
    yield from common.describe_engine(case, "torchtitan", ("fsdp2", "torchtitan"))
    alone = shards * degrees.cp == 1
    if not alone:
        yield from common.describe_zero(case, "torchtitan")
    if case.zero == 0 and not alone:
        yield "The plan shares no states, and torchtitan shards them over dp_shard x cp in this layout: less memory."
    if copies > 1 and alone and degrees.tp * degrees.pp > 1:
        yield "torchtitan 0.2 refuses copies of a model that is split by tp or pp; shard over some of the data ranks."
    yield from common.describe_order(case, "torchtitan")
    if degrees.tp > 1 and not case.sequence:
        yield "torchtitan 0.2 always splits norms and the residual stream with tp: less memory than predicted."
    whole = degrees.tp * (2 * degrees.cp if degrees.cp > 1 else 1)
    if case.seq_len % whole:
        yield f"torchtitan refuses sequences that are no multiple of {whole} here, and the plan has {case.seq_len}."
    if case.async_tensor and not case.compiled:
        yield "torchtitan overlaps the collectives of tp only where it compiles, and the plan does not: it is off."
    if degrees.pp > 1:
        schedule, per_rank = common.schedule_of(case), case.stages_per_rank
        if schedule == "zero_bubble" and per_rank == 1:
            yield "torchtitan has zero bubble for two stages a rank or more, and the plan has one: the files say 1F1B."
        if schedule == "gpipe" and per_rank > 1:
            here = f"and the plan has {per_rank}: the files say Interleaved1F1B"
            yield f"GPipe has one stage a rank in torchtitan, {here}."
        if schedule == "zbv" and per_rank != 2:
            yield f"ZBV has two stages a rank, and the plan has {per_rank}: torchtitan refuses that."
    if degrees.ep > 1 and degrees.etp not in (1, degrees.tp):
        yield f"torchtitan splits an expert over 1 or over {degrees.tp} ranks (tp), and the plan says {degrees.etp}."
    if degrees.etp > 1:
        yield "torchtitan 0.3 keeps each expert whole on a rank, and the plan splits it."
    if any(layer.experts for layer in case.model.layers) and degrees.ep == 1 and degrees.tp != degrees.etp:
        yield "Without ep, torchtitan splits each expert over the tensor axis, and the plan does not."
    if case.precision == "fp16":
        yield "torchtitan computes in bf16 or fp32; the files say bf16 where the plan says fp16."
    yield from common.describe_tf32(case, "The files say fp32")
    if case.precision == "fp4":
        yield "torchtitan.toml says bf16 where the plan says fp4: torchtitan 0.2 has none."
        odd = fp4_parts(case)[1]
        if odd:
            yield f"torchtitan has fp4 for widths of whole 128s: {' and '.join(odd)} are computed in bf16."
        if any(run.layer.experts for run in case.model.runs):
            yield "torchtitan has fp4 for linear layers alone: experts are computed in bf16."
    if case.low_bits and not case.compiled:
        yield f"torchtitan wants the model compiled for {case.precision} to be fast, and the plan does not compile."
    yield from common.describe_optimizer(case, "torchtitan", ("adamw",))
    if case.recompute == "selective":
        yield "torchtitan cannot recompute the scores of attention alone; with a fused kernel none are kept anyway."
    if case.recompute == "products":
        yield "torchtitan recomputes every second product as well: less memory and slower steps than predicted."
    yield from common.describe_kernel(case, "torchtitan")
    if case.dropout:
        yield "The plan has dropout, and the models of torchtitan have none."
    yield from common.describe_offload(case, "torchtitan")
    effect = "as the plan says" if case.fused_loss else "which takes less memory than predicted"
    yield (
        "The loss is computed with a full copy of the logits in torchtitan.toml; torchtitan_job.py computes it in "
        f"parts, {effect}."
    )
    yield common.describe_script("the data set, the number of steps, the learning rate, the folder of the tokenizer")


# --- the files

TOML = "torchtitan.toml"

_SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "zero_bubble": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
}
_QUANTIZED: Mapping[str, Settings] = {
    "linear.float8": {"recipe_name": "rowwise", "filter_fqns": ["output"]},
    "grouped_mm.float8": {"fqns": ["experts"]},
    "linear.mx": {"recipe_name": "mxfp8_cublas", "filter_fqns": ["output"]},
    "grouped_mm.mx": {"recipe_name": "mxfp8", "fqns": ["experts"]},
}
_RECOMPUTE = {"none": "none", "selective": "none", "products": "selective", "operators": "selective", "full": "full"}


def render(case: Case, head: Sequence[str]) -> Iterator[EmittedFile]:
    """torchtitan.toml, and torchtitan_job.py if torchtitan has a model of these sizes to start from."""
    yield common.write(TOML, head, common.write_toml(_tables(case)))
    flavor = find_flavor(case.model)
    if flavor and flavor.function:
        yield common.write(JOB, head, _render_job(case, flavor))


def degrees_of(case: Case) -> Mapping[str, int]:
    """The degrees of the files."""
    copies, shards = _replicas_and_shards(case)
    degrees = case.degrees
    return {"dp_replicate": copies, "dp_shard": shards, "cp": degrees.cp, "tp": degrees.tp, "pp": degrees.pp}


def _replicas_and_shards(case: Case) -> tuple[int, int]:
    """Ranks that share nothing are copies; torchtitan has copies only on an axis of their own."""
    degrees = case.degrees
    if case.zero == 0 and degrees.cp * degrees.tp * degrees.pp * degrees.ep == 1:
        return degrees.data, 1
    return degrees.dp_replicate, degrees.dp_shard


def _tables(case: Case) -> Mapping[str, Settings]:
    flavor = find_flavor(case.model)
    return {
        "job": {"description": f"{case.model.name}, {case.degrees.render()}"},
        "model": {
            "name": flavor.model if flavor else "llama3",
            "flavor": flavor.name if flavor else case.model.name,
            "converters": [f"quantize.{name}" for name in _converters(case)],
        },
        "optimizer": {"name": "AdamW"},
        "training": _training(case),
        "parallelism": {
            **_parallelism(case, head="output"),
            "expert_tensor_parallel_degree": case.degrees.etp,
            "enable_async_tensor_parallel": case.async_tensor and case.compiled,
        },
        "activation_checkpoint": {"mode": _RECOMPUTE[case.recompute], "selective_ac_option": "op"},
        "compile": {"enable": case.compiled, "components": ["model", "loss"]},
        **{f"quantize.{name}": _QUANTIZED[name] for name in _converters(case)},
    }


def _training(case: Case) -> Settings:
    """Batch settings; a pipeline takes all of a rank's sequences at once and cuts them itself."""
    single = case.degrees.pp == 1
    return {
        "local_batch_size": case.micro_batch if single else case.micro_batch * case.micro_batches,
        "global_batch_size": case.global_batch,
        "seq_len": case.seq_len,
        "mixed_precision_param": "float32" if case.precision in ("fp32", "tf32") else "bfloat16",
        "enable_cpu_offload": case.offload,
    }


def _parallelism(case: Case, head: str) -> Settings:
    degrees = case.degrees
    copies, shards = _replicas_and_shards(case)
    return {
        "data_parallel_replicate_degree": copies,
        "data_parallel_shard_degree": shards,
        "fsdp_reshard_after_forward": "always" if case.zero == 3 and case.reshard else "never",
        "context_parallel_degree": degrees.cp,
        "tensor_parallel_degree": degrees.tp,
        "pipeline_parallel_degree": degrees.pp,
        **(_pipeline(case, head) if degrees.pp > 1 else {}),
        "expert_parallel_degree": degrees.ep,
    }


def _pipeline(case: Case, head: str) -> Settings:
    # 1F1B replaces a schedule that torchtitan does not have for this number of stages per rank.
    schedule, several = common.schedule_of(case), case.stages_per_rank > 1
    if (schedule, several) in (("zero_bubble", False), ("gpipe", True)):
        schedule = "interleaved" if several else "1f1b"
    always: Settings = {
        "pipeline_parallel_schedule": _SCHEDULES[schedule],
        "pipeline_parallel_microbatch_size": case.micro_batch,
    }
    for first, last in ((1, 1), (0, 0), (1, 0), (0, 1)):
        if _their_cut(case, first, last) == layers_of_stages(case):
            weighed = len(case.model.layers) + first + last
            return {
                **always,
                "pipeline_parallel_first_stage_less_layers": first,
                "pipeline_parallel_last_stage_less_layers": last,
                "pipeline_parallel_layers_per_stage": math.ceil(weighed / case.stages),
            }
    # The module names of each stage, as no rule of torchtitan's cuts as the plan does
    edges = pairwise(accumulate(layers_of_stages(case), initial=0))
    parts = [[f"layers.{layer}" for layer in range(start, end)] for start, end in edges]
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", head]
    return {**always, "module_fqns_per_model_part": parts}


def _their_cut(case: Case, first: int, last: int) -> tuple[int, ...]:
    """Layers of each stage as torchtitan cuts them: the remainder goes to the first stages, the ends have a weight."""
    weighed = len(case.model.layers) + first + last
    if math.ceil(weighed / math.ceil(weighed / case.stages)) != case.stages:
        return ()
    base, more = divmod(weighed, case.stages)
    sizes = [base + (stage < more) for stage in range(case.stages)]
    sizes[0] -= first
    sizes[-1] -= last
    return tuple(sizes)


def _converters(case: Case) -> list[str]:
    kind = {"fp8": "float8", "mxfp8": "mx"}.get(case.precision)
    if kind is None:
        return []
    places = ["linear", "grouped_mm"] if any(layer.experts for layer in case.model.layers) else ["linear"]
    return [f"{place}.{kind}" for place in places]
