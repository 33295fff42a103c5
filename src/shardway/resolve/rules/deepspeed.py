"""[deepspeed]: the settings that follow from a run, the content of ds_config.json; what ZeRO cannot be combined with.

Invariants:
- Settings are a pure function of the resolved run. Keys of other sections win over [deepspeed] settings; a rule has
  refused settings that contradict them. This module does not import deepspeed, and reads and writes no files.
- A rule derives an open key or refuses; it never changes what the user set.

Names and meanings: https://www.deepspeed.ai/docs/config-json/.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from shardway.resolve.draft import Draft, Resolved, Rule, accumulation_of, batch_of, fact_of, list_rules, of_engine
from shardway.resolve.rules.formats import list_own
from shardway.runfile.load import render_value
from shardway.runfile.schema import RunFile

# --- the settings of DeepSpeed

Settings = dict[str, Any]
"""Values that JSON can hold, by name."""


def resolve_ds_config(resolved: Resolved) -> Settings:
    """The settings for DeepSpeed: those of the run over those of `deepspeed.settings`."""
    values = resolved.values
    return _lay_over(own_settings(values, resolved.derived.accumulation), values.deepspeed.settings)


def render_settings(settings: Settings) -> str:
    return json.dumps(settings, indent=2) + "\n"


def own_settings(values: RunFile, accumulation: int) -> Settings:
    """The settings that keys of the run file decide. train_batch_size is left to DeepSpeed, which requires the product
    of the others even if shares are uneven."""
    precision, clip, section = values.precision, values.optim.clip, values.deepspeed
    bucket = max(1, values.parallel.bucket // 4)  # in numbers of fp32
    zero: Settings = {"stage": section.stage, "reduce_bucket_size": bucket}
    for name, device in (("offload_optimizer", section.offload_optimizer), ("offload_param", section.offload_params)):
        if device != "none":
            path = {"nvme_path": section.nvme_path} if device == "nvme" else {}
            zero[name] = {"device": device, "pin_memory": values.run.device == "cuda", **path}
    settings: Settings = {
        "train_micro_batch_size_per_gpu": values.train.micro_batch,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.0 if clip == "off" else clip,
        "zero_optimization": zero,
        # Shardway's optimizers are plain torch.optim ones, also with offload: nothing is compiled for them.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "communication_data_type": precision.reduce,
        "data_types": {"grad_accum_dtype": "bf16" if adds_gradients_in_bf16(values) else "fp32"},
    }
    if precision.compute == "bf16":
        settings["bf16"] = {"enabled": True}
    if precision.compute == "fp16":
        # Shardway applies the factor of [precision] loss_scale and removes it, the same for every engine.
        settings["fp16"] = {"enabled": True, "loss_scale": 1.0}
    return settings


def adds_gradients_in_bf16(values: RunFile) -> bool:
    """Whether gradients of micro-batches are summed in bf16. ZeRO 1 would use another optimizer wrapper for fp32, which
    cannot scale gradients after the passes."""
    return values.precision.compute == "bf16" and values.deepspeed.stage == 1


def find_conflicts(own: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Dotted name, own value and other value of each setting on which the two differ."""
    for name in own.keys() & other.keys():
        mine, theirs = own[name], other[name]
        if isinstance(mine, Mapping) and isinstance(theirs, Mapping):
            yield from ((f"{name}.{inner}", a, b) for inner, a, b in find_conflicts(mine, theirs))
        elif mine != theirs:
            yield name, mine, theirs


def _lay_over(own: Mapping[str, Any], other: Mapping[str, Any]) -> Settings:
    merged = {**other, **own}
    for name in own.keys() & other.keys():
        if isinstance(own[name], Mapping) and isinstance(other[name], Mapping):
            merged[name] = _lay_over(own[name], other[name])
    return merged


# --- rules of DeepSpeed as the engine

OTHERWISE_DECIDED: Mapping[str, str] = {
    "train_batch_size": "train.global_batch",
    "optimizer": "[optim]",
    "scheduler": "optim.schedule",
    "amp": "precision.compute",
    "torch_autocast": "precision.compute",
    "tensor_parallel": "[parallel]",
    "expert_parallel": "[parallel]",
    "sequence_parallel_size": "[parallel]",
    "data_parallel_size": "[parallel]",
    "compile": "train.compile",
    "checkpoint": "[checkpoint]",
    "gradient_allreduce_op": "the mean over the global batch",
    "managed_gradient_accumulation": "train.micro_batch",
}
"""Setting of DeepSpeed that is not allowed -> the key that decides it in Shardway."""


def zero_shards_over_copies_alone(draft: Draft) -> None:
    for axis in ("dp_shard", "cp", "tp", "pp", "ep"):
        degree = draft.get(f"parallel.{axis}")
        if degree not in (1, "auto"):
            draft.refuse(
                f"parallel.{axis}",
                f'{degree}: with train.engine = "deepspeed" the axes do not split the model, ZeRO does',
                "1",
                f"let parallel.dp_replicate take the ranks, and say in deepspeed.stage what is sharded over them; or "
                f'use train.engine = "torch" for {axis}',
            )


def zero_takes_steps_of_one_size(draft: Draft) -> None:
    """Its train_batch_size is fixed when it starts."""
    ramp = batch_of(draft)
    if not ramp.is_constant:
        what = f"{ramp}: DeepSpeed takes steps of one size"
        remedy = f'set train.global_batch = {ramp.largest}, or train.engine = "torch"'
        draft.refuse("train.global_batch", what, "one number of samples", remedy)


def zero_updates_parts_without_shape(draft: Draft) -> None:
    """ZeRO gives an optimizer flat pieces that begin and end anywhere in a matrix."""
    name = draft.get("optim.name")
    if not fact_of("optim.name", name, "takes_flat_parts"):
        what = f'"{name}" needs the shapes of weights, and ZeRO hands it flat parts of them'
        draft.refuse("optim.name", what, f'{list_own("takes_flat_parts")}; or train.engine = "torch"')


def zero_has_formats_of_its_own(draft: Draft) -> None:
    if draft.get("precision.compute") == "float8":
        allowed = '"fp32", "bf16", "fp16"; or train.engine = "torch"'
        draft.refuse("precision.compute", '"float8" is not for train.engine = "deepspeed"', allowed)
    if draft.get("precision.weights") == "bf16":
        what = '"bf16": ZeRO shards an fp32 copy of the weights, which is what its updates work on'
        draft.refuse("precision.weights", what, '"fp32"; or train.engine = "torch"')
    if draft.get("precision.reduce") == "bf16" and draft.get("run.device") == "cpu":
        draft.refuse("precision.reduce", '"bf16": gloo does not add bf16 up', '"fp32"')


def zero_1_does_not_accumulate_in_bf16(draft: Draft) -> None:
    accumulation = accumulation_of(draft) if draft.get("train.micro_batch") != "auto" else 1
    if adds_gradients_in_bf16(draft.values) and accumulation > 1:
        what = f"1 would add the bf16 gradients of {accumulation} micro-batches up in bf16, which loses small ones"
        allowed = "2 or 3, which add in fp32"
        draft.refuse("deepspeed.stage", what, allowed, "or raise train.micro_batch until a rank's share is one")


def zero_3_compiles_blocks(draft: Draft) -> None:
    """It gathers weights in hooks on modules, which one graph of the whole model cannot contain."""
    if draft.get("deepspeed.stage") == 3 and draft.get("train.compile") == "model":
        draft.refuse("train.compile", '"model": ZeRO 3 gathers weights between modules', '"blocks" or "off"')


def zero_offloads_what_it_shards(draft: Draft) -> None:
    stage, optimizer = draft.get("deepspeed.stage"), draft.get("deepspeed.offload_optimizer")
    params, remedy = draft.get("deepspeed.offload_params"), "set deepspeed.stage = 3"
    if params != "none" and stage != 3:
        draft.refuse("deepspeed.offload_params", f'"{params}": ZeRO {stage} does not shard weights', '"none"', remedy)
    if optimizer == "nvme" and stage != 3:
        what = f'"nvme": ZeRO {stage} keeps optimizer states in memory'
        draft.refuse("deepspeed.offload_optimizer", what, '"none", "cpu"', remedy)
    if "nvme" in (optimizer, params) and not draft.get("deepspeed.nvme_path"):
        draft.refuse("deepspeed.nvme_path", "is not set", "a folder on a disk of each node")
    elif draft.get("deepspeed.nvme_path") and "nvme" not in (optimizer, params):
        draft.refuse("deepspeed.nvme_path", "has no effect: nothing is offloaded to nvme", "", "remove the key")


def settings_of_deepspeed_do_not_contradict_the_run_file(draft: Draft) -> None:
    if draft.get("train.micro_batch") == "auto":
        return
    settings = draft.get("deepspeed.settings")
    for name, decided_by in OTHERWISE_DECIDED.items():
        if name in settings:
            draft.refuse("deepspeed.settings", f"{name}: {decided_by} decides it", "", "remove it")
    own = own_settings(draft.values, accumulation_of(draft))
    for name, mine, theirs in find_conflicts(own, settings):
        what = f"{name} = {render_value(theirs)}, but the other keys of this run say {render_value(mine)}"
        draft.refuse("deepspeed.settings", what, "", "remove it")


RULES: tuple[Rule, ...] = tuple(of_engine("deepspeed", rule) for rule in list_rules(globals()))
