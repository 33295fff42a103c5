"""Megatron-LM: a file of shell that holds its flags in an array, and the environment that they want.

Invariant: sourced, the file starts nothing and changes nothing but MEGATRON_ARGS, EXPECTED_RANKS and one variable of
CUDA's. Megatron derives the data degree from the world, so a comment and EXPECTED_RANKS say what that has to be. This
module must not import megatron.

Source: megatron/training/arguments.py of Megatron Core 0.19.2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardway.plan.case import Case
from shardway.plan.emit import megatron_settings as shared
from shardway.plan.emit import megatron_terms as terms
from shardway.plan.emit.emitted import Emitted, EmittedHeader, gather, write
from shardway.plan.emit.megatron_model import describe_model, model_flags
from shardway.plan.emit.pipeline import render_layout
from shardway.plan.emit.tellings import describe_script
from shardway.plan.emit.texts import Settings, write_flags
from shardway.plan.stages import layers_of_stages

FILE = "megatron.sh"

_PRICED_AS = ("megatron", "megatron-2021")

_PRECISION: Mapping[str, Settings] = {
    "fp16": {"fp16": True},
    "bf16": {"bf16": True},
    "fp8": {"bf16": True, "fp8-format": "hybrid", "fp8-recipe": "tensorwise"},
    "mxfp8": {"bf16": True, "fp8-format": "e4m3", "fp8-recipe": "mxfp8"},
    "fp4": {"bf16": True, "fp4-format": "e2m1", "fp4-recipe": "nvfp4"},
}


def emit(case: Case, prediction_lines: Sequence[str]) -> Emitted:
    """megatron.sh."""
    left = "the data, the tokenizer, the number of iterations, the learning rate, the folders of checkpoints"
    told = gather(
        [*describe_model(case), *terms.describe_megatron(case, "Megatron-LM", _PRICED_AS), *describe_script(case, left)]
    )
    head = EmittedHeader(case, prediction_lines, terms.degrees_of(case), told)
    return Emitted((write(FILE, head, _body(case)),), told)


def _body(case: Case) -> str:
    groups = {
        "model": model_flags(case),
        "layout": {**shared.dashed(shared.degree_settings(case)), **_pipeline(case)},
        "batch": {"micro-batch-size": case.micro_batch, "global-batch-size": case.global_batch},
        "states": _states(case),
        "formats": {**_PRECISION.get(case.precision, {}), **_gradients(case)},
        "kernels": shared.dashed(shared.kernel_settings(case)),
    }
    arrays = "".join(f"  # {name}\n{write_flags(flags)}" for name, flags in groups.items())
    return (
        f'# source {FILE}; torchrun ... pretrain_gpt.py "${{MEGATRON_ARGS[@]}}" and your own flags\n'
        f"EXPECTED_RANKS={case.degrees.world}\n{_connections(case)}\nMEGATRON_ARGS=(\n{arrays})\n"
    )


def _connections(case: Case) -> str:
    """One queue keeps collectives of tp and cp in order with products; Megatron-FSDP refuses it."""
    if terms.uses_fsdp(case):
        return "unset CUDA_DEVICE_MAX_CONNECTIONS\n"
    return "export CUDA_DEVICE_MAX_CONNECTIONS=1\n" if case.degrees.tp * case.degrees.cp > 1 else ""


def _pipeline(case: Case) -> Settings:
    mapping: Settings = {"use-tp-pp-dp-mapping": terms.keeps_mapping(case)}
    if terms.needs_layout(case):
        return {"pipeline-model-parallel-layout": render_layout(case), **mapping}
    if terms.virtual_stages(case):
        return {"num-layers-per-virtual-pipeline-stage": layers_of_stages(case)[0], **mapping}
    return mapping


def _gradients(case: Case) -> Settings:
    """Megatron sums in fp32 beside bf16 and in fp16 beside fp16, unless it is told."""
    if case.value_bytes == 4:
        return {}
    wide = case.gradient_bytes == 4
    return {
        "accumulate-allreduce-grads-in-fp32": wide,
        "grad-reduce-in-bf16": not wide and case.precision != "fp16",
    }


def _states(case: Case) -> Settings:
    checkpoints: Settings = {"ckpt_format": "fsdp_dtensor"} if terms.uses_fsdp(case) else {}
    return shared.dashed({**shared.optimizer_settings(case), **shared.state_settings(case), **checkpoints})
