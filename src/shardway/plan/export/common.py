"""What configurations of other libraries share: text formats, files with comments, sizes, pipelines, notes on losses.

Invariants:
- Settings are written so that each format reads back the same values.
- A file states how many ranks its degrees make and how many the plan has.
- One set of sizes stands for all layers; any further difference between layers is noted.
- The layers of each stage are those for which memory and time were estimated.
- A note names the setting, what the file does instead, and the effect on the prediction.
"""

from __future__ import annotations

import json
import math
import re
import shlex
import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import groupby
from typing import TypeAlias

from shardway.errors import Problem, UserError, render_problems
from shardway.plan.case import Case, Schedule, layers_of_stages
from shardway.plan.shapes import Architecture, ExpertsShape, LayerShape

# --- settings as TOML, YAML, shell arrays and Python calls

Scalar: TypeAlias = str | int | float | bool
Value: TypeAlias = Scalar | Sequence["Value"] | Mapping[str, "Value"] | None
Settings: TypeAlias = Mapping[str, Value]

_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]*")
_UNSAFE = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")
"""Characters that JSON does not escape, but TOML or YAML reject or read as the end of a line."""
_WORDS = {"yes", "no", "on", "off", "true", "false", "null", "y", "n"}  # words that YAML does not read as strings


def write_toml(tables: Mapping[str, Settings]) -> str:
    """Tables with their settings; settings that are None and empty tables are left out."""
    parts = []
    for name, settings in tables.items():
        lines = [f"{key} = {_toml(value)}" for key, value in settings.items() if value is not None]
        if lines:
            parts.append("\n".join([f"[{name}]", *lines, ""]))
    return "\n".join(parts)


def _toml(value: Value) -> str:
    if isinstance(value, list | tuple):
        inner = [_toml(each) for each in value]
        long = any(isinstance(each, list | tuple) for each in value)
        return "[\n  " + ",\n  ".join(inner) + ",\n]" if long else f"[{', '.join(inner)}]"
    return quote(value) if isinstance(value, str) else json.dumps(value)


def quote(text: str) -> str:
    """A string in double quotes that TOML, YAML and Python read alike."""
    return _UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(text, ensure_ascii=False))


def write_yaml(settings: Settings, indent: str = "") -> str:
    """Settings, nested ones indented; lists on one line."""
    lines = []
    for key, value in settings.items():
        if isinstance(value, Mapping):
            lines.append(f"{indent}{_yaml(key)}:\n{write_yaml(value, indent + '  ')}")
        else:
            lines.append(f"{indent}{_yaml(key)}: {_yaml(value)}\n")
    return "".join(lines)


def _yaml(value: Value) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(_yaml(each) for each in value)}]"
    if isinstance(value, str):
        return value if _PLAIN.fullmatch(value) and value.lower() not in _WORDS else quote(value)
    return re.sub(r"^(-?\d+)e", r"\1.0e", json.dumps(value))  # YAML 1.1 reads 1e-05 as a string


def write_flags(flags: Settings) -> str:
    """Options as words of a shell array, one per line; True is an option without value, None and False are left out."""
    lines = []
    for name, value in flags.items():
        if value is not None and value is not False:
            values = value if isinstance(value, list | tuple) else [] if value is True else [value]
            lines.append("  " + " ".join(shlex.quote(word) for word in [f"--{name}", *map(str, values)]) + "\n")
    return "".join(lines)


def write_call(callee: str, settings: Settings, indent: str = "") -> str:
    """A Python call with keywords, one per line."""
    lines = [f"{indent}    {key}={literal(value)},\n" for key, value in settings.items()]
    return f"{callee}(\n{''.join(lines)}{indent})" if lines else f"{callee}()"


def literal(value: Value) -> str:
    """A value as a Python literal, strings in double quotes."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(literal(each) for each in value)}]"
    return quote(value) if isinstance(value, str) else repr(value)


# --- files and their header comment

_WIDTH = 112


@dataclass(frozen=True)
class EmittedFile:
    """The text of a file and its name."""

    name: str
    text: str


@dataclass(frozen=True)
class Emitted:
    """The files of one library; `notes` are sentences on what it cannot express and what the user still has to set."""

    files: tuple[EmittedFile, ...]
    notes: tuple[str, ...]


ENGINES: Mapping[str, str] = {
    "torchtitan": "torchtitan",
    "megatron": "megatron",
    "deepspeed": "deepspeed",
    "accelerate": "fsdp2",
    "nemo": "nemo",
}
"""The libraries that a plan can be exported to, each with the engine whose prediction goes with its configuration.

Each has a module of its name with `describe(case)`, notes on what it cannot express; `degrees_of(case)`, the degrees of
its files; `render(case, head)`, the files.
"""


def emit(library: str, case: Case, prediction_lines: Sequence[str]) -> Emitted:
    """A case as that library's configuration, with its prediction. Raises UserError with the known libraries."""
    if library not in ENGINES:
        problem = Problem("--emit", f'"{library}" is not known', allowed=", ".join(ENGINES))
        raise UserError(render_problems("the plan", [problem]))
    module = import_module(f"{__package__}.{library}")
    notes = gather(module.describe(case))
    head = head_lines(case, prediction_lines, module.degrees_of(case), notes)
    return Emitted(tuple(module.render(case, head)), notes)


def head_lines(case: Case, prediction: Sequence[str], made: Mapping[str, int], notes: Sequence[str]) -> list[str]:
    """The header of a file without comment marks: the prediction, the degrees that the file makes, what it lacks."""
    product = " x ".join(f"{name} {size}" for name, size in made.items() if size > 1) or "1"
    there, wanted = math.prod(made.values()), case.degrees.world
    compared = f"but the plan has {wanted}: what is missing is listed below."
    compared = "as many as in the plan." if there == wanted else compared
    degrees = _wrapped(f"{case.model.name}: degrees {product} = {there} ranks, {compared}")
    heading = ["Still to do, or different from the plan:"] if notes else []
    below = [f"{'  ' if place else '- '}{line}" for note in notes for place, line in enumerate(_wrapped(note))]
    return [*prediction, *degrees, *heading, *below]


def write(name: str, head: Sequence[str], body: str) -> EmittedFile:
    """A file in a format whose comments start with #."""
    comment = "".join(f"# {line}".rstrip() + "\n" for line in head)
    return EmittedFile(name, f"{comment}\n{body}")


def gather(sentences: Iterable[str]) -> tuple[str, ...]:
    """Each sentence once, in the order of its first occurrence."""
    return tuple(dict.fromkeys(sentences))


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, break_long_words=False, break_on_hyphens=False)


# --- uniform layers


@dataclass(frozen=True, kw_only=True)
class UniformSizes:
    """One layer that stands for all; what may differ between layers has one entry per layer."""

    layer: LayerShape
    ffn: int
    experts: ExpertsShape | None
    mixed: tuple[bool, ...]  # which layers have experts
    window: int
    windowed: tuple[bool, ...]  # which layers have a sliding window

    @property
    def count(self) -> int:
        return len(self.mixed)


def read_sizes(model: Architecture) -> UniformSizes:
    """The sizes of the decoder; the first layer of a kind stands for those that differ."""
    layers = _decoder(model)
    dense = [layer for layer in layers if layer.experts is None]
    return UniformSizes(
        layer=layers[0],
        ffn=(dense or layers)[0].ffn,
        experts=next((layer.experts for layer in layers if layer.experts), None),
        mixed=tuple(layer.experts is not None for layer in layers),
        window=next((layer.attention.window for layer in layers if layer.attention.window), 0),
        windowed=tuple(bool(layer.attention.window) for layer in layers),
    )


def describe_irregular(model: Architecture) -> Iterator[str]:
    """Properties of a model that one set of sizes cannot express."""
    layers = _decoder(model)
    if any(run.side == "encoder" for run in model.runs):
        yield "The encoder of the model is not in these sizes: they are those of its decoder."
    if model.patch_features:
        yield "The model reads patches of images, and these sizes are those of a decoder of tokens."
    if not all(layer.attention.causal for layer in layers):
        yield "Attention of the model looks ahead, and these sizes are those of a causal decoder."
    kinds: dict[str, set[object]] = {
        "attention": {replace(layer.attention, window=0) for layer in layers},
        "the window of attention": {layer.attention.window for layer in layers if layer.attention.window},
        "experts": {layer.experts for layer in layers if layer.experts},
        "the feed-forward layer": {(layer.ffn, layer.gated, layer.ffn_bias) for layer in layers if not layer.experts},
        "norms": {(layer.norms, layer.norm_bias) for layer in layers},
    }
    for what, found in kinds.items():
        if len(found) > 1:
            yield f"Layers differ in {what}; the sizes written are those of the first layer of the kind."


def _decoder(model: Architecture) -> Sequence[LayerShape]:
    return [run.layer for run in model.runs for _ in range(run.count) if run.side == "decoder"] or model.layers


def render_pattern(flags: Sequence[bool]) -> str:
    """One entry per layer as an expression: "([0]*3+[1]*58)"."""
    runs = [f"[{int(flag)}]*{len(list(group))}" for flag, group in groupby(flags)]
    return f"({'+'.join(runs)})"


# --- pipelines


def schedule_of(case: Case) -> Schedule:
    """The schedule of the stages: 1F1B with several stages per rank is the interleaved one, and vice versa."""
    if case.schedule in ("1f1b", "interleaved"):
        return "interleaved" if case.stages_per_rank > 1 else "1f1b"
    return case.schedule


def is_even(case: Case) -> bool:
    """Whether all stages have the same number of layers."""
    return len(set(layers_of_stages(case))) == 1


def name_schedule(case: Case) -> str:
    """The schedule in words: "interleaved with 3 stages a rank"."""
    stages = "one stage" if case.stages_per_rank == 1 else f"{case.stages_per_rank} stages"
    return f"{case.schedule} with {stages} a rank"


def render_layout(case: Case) -> str:
    """One letter per layer, stages separated by bars, embedding and loss at the ends: "Ett|ttt|ttL"."""
    return f"E{'|'.join('t' * count for count in layers_of_stages(case))}L"


# --- notes that several libraries share

_OPTIMIZERS = {
    "adamw": "AdamW",
    "adamw8bit": "AdamW with states of 8 bits",
    "adafactor": "Adafactor",
    "sgd": "SGD",
    "muon": "Muon",
}


def describe_engine(case: Case, library: str, priced_as: Collection[str]) -> Iterator[str]:
    """A note if the prediction is that of another library."""
    if case.engine.name not in priced_as:
        others = " or ".join(f'"{name}"' for name in priced_as)
        yield f'The prediction is that of the engine "{case.engine.name}"; for {library} ask for that of {others}.'


def describe_order(case: Case, library: str) -> Iterator[str]:
    """A note if a library puts pipeline ranks outermost, where the plan puts copies."""
    if case.degrees.pp > 1 and case.degrees.dp_replicate > 1:
        yield (
            f"{library} places pipeline ranks furthest apart and copies of the model within; the plan has it the other "
            "way round, so other messages leave the node."
        )


def describe_optimizer(case: Case, library: str, known: Collection[str]) -> Iterator[str]:
    """A note if a library lacks the optimizer."""
    if case.optimizer not in known:
        wanted = _OPTIMIZERS.get(case.optimizer, case.optimizer)
        yield f"{library} has no {wanted}: the file says AdamW, whose states take other memory than the prediction."


def describe_zero(case: Case, library: str) -> Iterator[str]:
    """A note if a library has only the third stage of ZeRO."""
    if case.zero in (1, 2):
        yield (
            f"{library} shards weights, gradients and optimizer states alike, and the plan shares them as "
            f"ZeRO-{case.zero}. Weights stay gathered from the forward to the backward pass, which comes nearest."
        )


def describe_kernel(case: Case, library: str) -> Iterator[str]:
    """A note if the library itself chooses the kernel of attention."""
    yield f"{library} chooses the kernel of attention by itself; the prediction is for {case.attention}."


def describe_own_model(case: Case) -> Iterator[str]:
    """A note if the script provides the model, and with it the kernel of attention, dropout and the loss."""
    yield from describe_kernel(case, "Your model")
    if case.dropout:
        yield "Dropout is the model's; the plan has it."
    if case.fused_loss:
        yield "The loss of the plan is computed without a full copy of the logits: your script has to do the same."


def describe_tf32(case: Case, instead: str) -> Iterator[str]:
    """A note if tf32 is a setting of PyTorch alone; `instead` is what the files have instead."""
    if case.precision == "tf32":
        yield f'{instead}: set torch.set_float32_matmul_precision("high") for tf32.'


def describe_offload(case: Case, library: str) -> Iterator[str]:
    """A note if offload also moves weights and gradients; a plan does so only if it shards them (ZeRO 3)."""
    if case.offload and case.zero < 3:
        yield (
            f"{library} keeps weights and gradients in CPU memory too, the plan optimizer states alone: slower steps, "
            "and less memory than predicted."
        )


def describe_script(what: str) -> str:
    """What a file always leaves to the user."""
    return f"Set in your own script or on the command line: {what}."
