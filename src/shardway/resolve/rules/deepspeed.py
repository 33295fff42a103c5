"""Rules of DeepSpeed as the engine: what ZeRO shards, and what it cannot be combined with.

Invariant: a rule derives an open key or refuses; it never changes what the user set. No files are read.
"""

from __future__ import annotations

from types import MappingProxyType

from shardway.resolve.deepspeed import adds_gradients_in_bf16, find_conflicts, own_settings
from shardway.resolve.draft import Draft
from shardway.resolve.rules.numbers import accumulation_of
from shardway.runfile.write import render_value

OTHERWISE_DECIDED = MappingProxyType(
    {
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
)
"""Setting of DeepSpeed that is not allowed -> the key that decides it in Shardway."""


def zero_shards_over_copies_alone(draft: Draft) -> None:
    if not _is_engine(draft):
        return
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


def zero_updates_parts_without_shape(draft: Draft) -> None:
    """ZeRO gives an optimizer flat pieces that begin and end anywhere in a matrix."""
    name = draft.get("optim.name")
    if _is_engine(draft) and name not in ("adamw", "sgd"):
        draft.refuse(
            "optim.name",
            f'"{name}" needs the shapes of weights, and ZeRO hands it flat parts of them',
            '"adamw", "sgd"; or train.engine = "torch"',
        )


def zero_has_formats_of_its_own(draft: Draft) -> None:
    if not _is_engine(draft):
        return
    if draft.get("precision.compute") == "float8":
        allowed = '"fp32", "bf16", "fp16"; or train.engine = "torch"'
        draft.refuse("precision.compute", '"float8" is not for train.engine = "deepspeed"', allowed)
    if draft.get("precision.weights") == "bf16":
        draft.refuse(
            "precision.weights",
            '"bf16": ZeRO shards an fp32 copy of the weights, which is what its updates work on',
            '"fp32"; or train.engine = "torch"',
        )
    if draft.get("precision.reduce") == "bf16" and draft.get("run.device") == "cpu":
        draft.refuse("precision.reduce", '"bf16": gloo does not add bf16 up', '"fp32"')


def zero_1_does_not_accumulate_in_bf16(draft: Draft) -> None:
    accumulation = accumulation_of(draft) if draft.get("train.micro_batch") != "auto" else 1
    if _is_engine(draft) and adds_gradients_in_bf16(draft.values) and accumulation > 1:
        draft.refuse(
            "deepspeed.stage",
            f"1 would add the bf16 gradients of {accumulation} micro-batches up in bf16, which loses small ones",
            "2 or 3, which add in fp32",
            "or raise train.micro_batch until a rank's share is one",
        )


def zero_3_compiles_blocks(draft: Draft) -> None:
    """It gathers weights in hooks on modules, which one graph of the whole model cannot contain."""
    if _is_engine(draft) and draft.get("deepspeed.stage") == 3 and draft.get("train.compile") == "model":
        draft.refuse("train.compile", '"model": ZeRO 3 gathers weights between modules', '"blocks" or "off"')


def zero_offloads_what_it_shards(draft: Draft) -> None:
    if not _is_engine(draft):
        return
    stage, optimizer, params = (draft.get(f"deepspeed.{name}") for name in ("stage", *_OFFLOADS))
    if params != "none" and stage != 3:
        draft.refuse("deepspeed.offload_params", f'"{params}": ZeRO {stage} does not shard weights', '"none"', _STAGE_3)
    if optimizer == "nvme" and stage != 3:
        what = f'"nvme": ZeRO {stage} keeps optimizer states in memory'
        draft.refuse("deepspeed.offload_optimizer", what, '"none", "cpu"', _STAGE_3)
    if "nvme" in (optimizer, params) and not draft.get("deepspeed.nvme_path"):
        draft.refuse("deepspeed.nvme_path", "is not set", "a folder on a disk of each node")
    elif draft.get("deepspeed.nvme_path") and "nvme" not in (optimizer, params):
        draft.refuse("deepspeed.nvme_path", "has no effect: nothing is offloaded to nvme", "", "remove the key")


_OFFLOADS = ("offload_optimizer", "offload_params")
_STAGE_3 = "set deepspeed.stage = 3"


def settings_of_deepspeed_do_not_contradict_the_run_file(draft: Draft) -> None:
    if not _is_engine(draft) or draft.get("train.micro_batch") == "auto":
        return
    settings = draft.get("deepspeed.settings")
    for name, decided_by in OTHERWISE_DECIDED.items():
        if name in settings:
            draft.refuse("deepspeed.settings", f"{name}: {decided_by} decides it", "", "remove it")
    own = own_settings(draft.values, accumulation_of(draft))
    for name, mine, theirs in find_conflicts(own, settings):
        what = f"{name} = {render_value(theirs)}, but the other keys of this run say {render_value(mine)}"
        draft.refuse("deepspeed.settings", what, "", "remove it")


def _is_engine(draft: Draft) -> bool:
    return bool(draft.get("train.engine") == "deepspeed")
