"""The settings of DeepSpeed that follow from a run: the content of ds_config.json.

Invariant: a pure function of the resolved run. Keys of other sections win over [deepspeed] settings; a rule has refused
settings that contradict them. This module does not import deepspeed, and reads and writes no files.

Names and meanings: https://www.deepspeed.ai/docs/config-json/.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from shardway.resolve.draft import Resolved
from shardway.runfile.schema import DeepspeedSection, RunFile

Settings = dict[str, Any]
"""Values that JSON can hold, by name."""

_FP32_BYTES = 4


def resolve_ds_config(resolved: Resolved) -> Settings:
    """The settings for DeepSpeed: those of the run over those of `deepspeed.settings`."""
    values = resolved.values
    return _lay_over(own_settings(values, resolved.derived.accumulation), values.deepspeed.settings)


def render_ds_config(resolved: Resolved) -> str:
    """`resolve_ds_config` as the text of a ds_config.json."""
    return render_settings(resolve_ds_config(resolved))


def render_settings(settings: Settings) -> str:
    """Settings as the text of a ds_config.json."""
    return json.dumps(settings, indent=2) + "\n"


def own_settings(values: RunFile, accumulation: int) -> Settings:
    """The settings that keys of the run file decide.

    train_batch_size is left to DeepSpeed, which requires the product of the others even if shares are uneven.
    """
    precision, clip = values.precision, values.optim.clip
    settings: Settings = {
        "train_micro_batch_size_per_gpu": values.train.micro_batch,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.0 if clip == "off" else clip,
        "zero_optimization": _zero(values),
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
    """Whether gradients of micro-batches are summed in bf16.

    ZeRO 1 would use another optimizer wrapper for fp32, which cannot scale gradients after the passes.
    """
    return values.precision.compute == "bf16" and values.deepspeed.stage == 1


def _zero(values: RunFile) -> Settings:
    section = values.deepspeed
    zero: Settings = {"stage": section.stage, "reduce_bucket_size": max(1, values.parallel.bucket // _FP32_BYTES)}
    for name, device in (("offload_optimizer", section.offload_optimizer), ("offload_param", section.offload_params)):
        if device != "none":
            zero[name] = _offload(device, section, pinned=values.run.device == "cuda")
    return zero


def _offload(device: str, section: DeepspeedSection, *, pinned: bool) -> Settings:
    path = {"nvme_path": section.nvme_path} if device == "nvme" else {}
    return {"device": device, "pin_memory": pinned, **path}


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
