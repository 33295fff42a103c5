"""The file of Python that torchtitan reads since version 0.3: a function that changes one of its own configs.

Invariant: the function starts from torchtitan's config for these sizes and sets everything that the plan decides. This
module must not import torchtitan.

Source: torchtitan 0.3.0 (config/configs.py, models/*/config_registry.py, components/quantization/).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from shardway.plan.case import Case
from shardway.plan.emit.flavors import Flavor
from shardway.plan.emit.texts import Settings, literal, write_call
from shardway.plan.shapes.layer import LayerShape, Part

JOB = "torchtitan_job.py"

_POLICIES = {"products": "SelectiveAC", "operators": "SelectiveAC", "full": "FullAC"}
_LINEAR = {"fp8": "Float8LinearConverter", "mxfp8": "MXFP8LinearConverter", "fp4": "NVFP4LinearConverter"}
_GROUPED = {"fp8": "Float8GroupedExpertsConverter", "mxfp8": "MXFP8GroupedExpertsConverter"}


_PARTS: Mapping[Part, str] = {"attention": "attention", "ffn": "feed_forward", "shared": "shared_experts"}
_FP4_BLOCK = 128
"""What NVFP4LinearConverter wants to divide both sides of a product."""


def render_job(case: Case, flavor: Flavor, training: Settings, parallelism: Settings) -> str:
    """The module without its head."""
    return "\n".join([*_imports(case, flavor), "", "", *_function(case, flavor, training, parallelism), ""])


def _imports(case: Case, flavor: Flavor) -> list[str]:
    policy, converters = _POLICIES.get(case.recompute), sorted(_converters(case))
    package = f"torchtitan.models.{flavor.model}"
    return [
        *([f"from torchtitan.components.quantization import {', '.join(converters)}"] if converters else []),
        "from torchtitan.config import CompileConfig, ParallelismConfig",
        *([f"from torchtitan.distributed.activation_checkpoint import {policy}"] if policy else []),
        f"from {package} import model_registry",
        f"from {package}.config_registry import {flavor.function}",
        "from torchtitan.trainer import Trainer",
    ]


def _function(case: Case, flavor: Flavor, training: Settings, parallelism: Settings) -> list[str]:
    policy = _POLICIES.get(case.recompute)
    split = {**parallelism, "enable_sequence_parallel": case.sequence}
    return [
        "def planned() -> Trainer.Config:",
        f"    # python -m torchtitan.train --module {JOB.removesuffix('.py')} --config planned",
        f"    config = {flavor.function}()",
        *_model(case, flavor),
        *(f"    config.training.{name} = {literal(value)}" for name, value in training.items()),
        "    config.training.disable_cuda_graphs = True",
        f"    config.parallelism = {write_call('ParallelismConfig', split, '    ')}",
        f"    config.activation_checkpoint = {f'{policy}.Config()' if policy else None}",
        f"    config.compile = {write_call('CompileConfig', _compile(case), '    ')}",
        "    return config",
    ]


def _model(case: Case, flavor: Flavor) -> list[str]:
    """Again also where the config has it, whose number format may be another."""
    converters = [
        f"        {write_call(f'{name}.Config', settings, '        ')}," for name, settings in _converters(case).items()
    ]
    if not converters:
        return [f"    config.model_spec = model_registry({literal(flavor.name)})"]
    return [
        "    converters = [",
        *converters,
        "    ]",
        f"    config.model_spec = model_registry({literal(flavor.name)}, converters=converters)",
    ]


def _compile(case: Case) -> Mapping[str, bool]:
    return {"enable": case.compiled, "enable_async_tensor_parallel": case.async_tensor and case.compiled}


def fp4_parts(case: Case) -> tuple[list[str], list[str]]:
    """Parts of a layer by the names of torchtitan: those that its fp4 takes, and those that have an odd width."""
    taken: list[str] = []
    odd: list[str] = []
    for part, name in _PARTS.items():
        widths = [width for run in case.model.runs for width in _widths(run.layer, part, case.degrees.tp)]
        if widths:
            (odd if any(width % _FP4_BLOCK for width in widths) else taken).append(name)
    return taken, odd


def _widths(layer: LayerShape, part: str, tp: int) -> Iterator[float]:
    """Both sides of each product of a part, on one rank; keys and values are two products."""
    for each in layer.matrices:
        if each.part == part:
            yield each.inputs / (tp if each.split == "inputs" else 1)
            yield each.outputs / ((tp if each.split == "outputs" else 1) * (2 if each.kv_heads else 1))


def _products(case: Case) -> Settings:
    """By what their names have in them."""
    if case.precision == "fp8":
        return {"filter_fqns": ["lm_head", "router.gate"]}
    return {"fqns": fp4_parts(case)[0] if case.precision == "fp4" else list(_PARTS.values())}


def _converters(case: Case) -> Mapping[str, Settings]:
    """By name: of products, but for those of the head and of the router, and of experts."""
    compiled = {"model_compile_enabled": case.compiled}
    linear, grouped = _LINEAR.get(case.precision), _GROUPED.get(case.precision)
    if linear is None or (case.precision == "fp4" and not fp4_parts(case)[0]):
        return {}  # a converter without names would take every product
    found: dict[str, Settings] = {linear: {**_products(case), **compiled}}
    if grouped and any(layer.experts for layer in case.model.layers):
        found[grouped] = compiled
    return found
