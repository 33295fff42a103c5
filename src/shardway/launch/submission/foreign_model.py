"""The Hugging Face model that a foreign command names, sized before the queue: the least memory that training it takes,
beside what the job asks for.

Invariants:
- Nothing is downloaded, imported or run: a model is a folder here, what the hub's cache has, or one known by name.
- What is found is a line for a person, never a refusal: words may mean something else to the program.
- The figure is a lower bound: all GPUs share the states, and layers are computed again, unless the words say otherwise;
  overheads of devices are left out. So what does not fit by it does not fit.

Sources: memory of states and activations: `plan.memory`; words of the command line: transformers' TrainingArguments
(5.23), TRL's ModelConfig, torchtune, DeepSpeed's configuration (`zero_optimization`), accelerate's files for FSDP.
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardway.errors import ShardwayError, UserError
from shardway.hfconfig import CONFIG, read_config
from shardway.launch.submission.command import CommandRead
from shardway.places import expand_place
from shardway.prefetch.cache import find_cache, find_hub_name
from shardway.sites.schema import SiteProfile
from shardway.units import render_bytes

if TYPE_CHECKING:  # a command that names no model needs nothing of the planner
    from shardway.plan.case import Machine
    from shardway.plan.shapes import Architecture

# --- what the words of a command say about training

_MODEL_OPTIONS = frozenset(
    (
        *("model", "model_name_or_path", "model_name", "model_id", "model_path", "pretrained_model_name_or_path"),
        *("pretrained", "base_model", "base_model_name_or_path", "hf_model", "hf_path", "student_model"),
    )
)
_BATCH_OPTIONS = (
    "per_device_train_batch_size",
    "micro_batch_size",
    "train_batch_size_per_device",
    "batch_size_per_gpu",
)
_LENGTH_OPTIONS = ("max_seq_length", "max_seq_len", "max_length", "seq_length", "seq_len", "block_size", "cutoff_len")
_RANK_OPTIONS = ("lora_r", "lora_rank")
_FILES = (".yaml", ".yml", ".json")
_MOST_FILE_BYTES = 1 << 18
_USUAL_LENGTH = 512
"""Tokens of a sequence where the words name none: short for a training, so that the figure stays a lower bound."""
_USUAL_RANK = 8
_MOST_GPUS = 4096

_OPTIMIZERS = (("8bit", "adamw8bit"), ("adafactor", "adafactor"), ("sgd", "sgd"), ("lion", "sgd"), ("muon", "muon"))
"""What the name of an optimizer contains -> one of the planner with as many bytes of state."""


@dataclass(frozen=True, kw_only=True)
class ForeignTraining:
    """What a command says about the training of one model.

    `named_by`: the option or word that names `model`. `lora`: only adapters of `lora_rank` are trained, beside weights
    of `frozen_bits`. `narrow`: weights are kept in 16 bits, without a copy in 32. `sharding`: "all" (FSDP, ZeRO-3), "2"
    or "1" (ZeRO), "none" where DDP is named, "" where nothing is. `offloads`: states lie in the host's memory.
    """

    model: str
    named_by: str
    optimizer: str = "adamw"
    lora: bool = False
    lora_rank: int = _USUAL_RANK
    frozen_bits: int = 16
    narrow: bool = False
    seq_len: int = 0
    micro_batch: int = 1
    recompute: bool = True
    sharding: str = ""
    offloads: bool = False


def read_training(read: CommandRead, here: Path) -> ForeignTraining | None:
    """What a command in the folder `here` trains; None where no word of it is a model."""
    words = [*read.program.words]
    for _, text in read.texts:
        with contextlib.suppress(ValueError):
            words += shlex.split(text, comments=True)
    files = [text for word in words if (text := _read_settings(word, here))]
    options = dict(_list_options(words))
    for text in files:  # the command line overrides a file
        options = {**dict(_list_keys(text)), **options}
    named = _find_model(words, options, here)
    if named is None:
        return None
    everything = "\n".join([*words, *files]).lower()
    precision = " ".join(options.get(name, "") for name in ("torch_dtype", "dtype", "model_dtype", "bnb_4bit_dtype"))
    optimizer = " ".join(options.get(name, "") for name in ("optim", "optimizer", "optimizer_name")).lower()
    lora = bool(re.search(r"(?<![a-z])q?lora(?![a-z])|(?<![a-z])use_peft(?![a-z])", everything))
    lora &= "false" not in (options.get("use_peft", "").lower(), options.get("use_lora", "").lower())
    four = re.search(r"load_in_4bit|qlora|(?<![a-z0-9])nf4|4-?bit", everything)
    return ForeignTraining(
        model=named[1],
        named_by=named[0],
        optimizer=next((ours for part, ours in _OPTIMIZERS if part in optimizer), "adamw"),
        lora=lora,
        lora_rank=_find_number(options, _RANK_OPTIONS) or _USUAL_RANK,
        frozen_bits=4 if lora and four else 8 if lora and "load_in_8bit" in everything else 16,
        narrow=bool(re.search(r"b?f(loat)?16|half", precision.lower())),
        seq_len=_find_number(options, _LENGTH_OPTIONS),
        micro_batch=_find_number(options, _BATCH_OPTIONS) or 1,
        recompute=options.get("gradient_checkpointing", "true").lower() not in ("false", "0", "no"),
        sharding=_find_sharding(everything),
        offloads=bool(
            re.search(r'offload_optimizer[\s\S]{0,40}?"?device"?\s*:\s*"?cpu|offload_optimizer_device: cpu', everything)
        ),
    )


def _read_settings(word: str, here: Path) -> str:
    """The text of a small settings file that a word names; "" for any other word."""
    path = word.rpartition("=")[2]
    if not path.endswith(_FILES):
        return ""
    try:
        file = here / expand_place(path)
        return file.read_text(encoding="utf-8") if file.stat().st_size <= _MOST_FILE_BYTES else ""
    except (OSError, ValueError):
        return ""


def _list_options(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Options and keys with their values: "--a b", "--a=b", "a.b=c", by the last part of their names; a switch is
    "true"."""
    for at, word in enumerate(words):
        if found := re.fullmatch(r"(--?)?([A-Za-z][\w.-]*)=(.*)", word, re.DOTALL):
            yield _plain_name(found[2]), found[3]
        elif re.fullmatch(r"--[A-Za-z][\w.-]*", word):
            value = words[at + 1] if at + 1 < len(words) else ""
            yield _plain_name(word[2:]), "true" if value.startswith("--") or not value else value


def _list_keys(text: str) -> Iterator[tuple[str, str]]:
    """Keys with plain values of a YAML or JSON text, by their names alone."""
    for found in re.finditer(
        r"^[\s{,]*[\"']?([A-Za-z][\w-]*)[\"']?\s*:\s*[\"']?([^\s\"',#{\[][^\"',#\n]*)", text, re.MULTILINE
    ):
        yield _plain_name(found[1]), found[2].strip()


def _plain_name(name: str) -> str:
    return name.replace("-", "_").rpartition(".")[2].lower()


def _find_number(options: Mapping[str, str], names: Sequence[str]) -> int:
    return next((int(options[name]) for name in names if options.get(name, "").isdecimal()), 0)


def _find_sharding(text: str) -> str:
    if re.search(r"fsdp|zero-?_?3|stage\"?\s*:\s*3|zero_stage\s*:\s*3|fully_shard", text):
        return "all"
    if found := re.search(r"(?:stage\"?\s*:\s*|zero_stage\s*:\s*|zero-?_?)([12])(?!\d)", text):
        return found[1]
    return "none" if re.search(r"(?<![a-z])ddp(?![a-z])", text) else ""


def _find_model(words: Sequence[str], options: Mapping[str, str], here: Path) -> tuple[str, str] | None:
    """What names a model, and the model: the value of an option that is made for one, else a word that is one here."""
    for name, value in options.items():
        if name in _MODEL_OPTIONS and (_is_folder(value, here) or _is_model_name(value)):
            return name, value
    for word in words:
        value = word.rpartition("=")[2]
        if _is_folder(value, here) or ("/" in value and _find_snapshot(value) is not None):
            return "a word", value
    return None


def _is_model_name(value: str) -> bool:
    """Whether a value is a name of the hub; one without an organisation may be that of any library's model, so it has
    to be in the cache or one that the planner knows."""
    from shardway.plan.huggingface import load_named

    if re.fullmatch(r"[\w.-]+/[\w.-]+(@[\w./-]+)?", value):
        return True
    return bool(re.fullmatch(r"[\w.-]+", value)) and (
        value.lower() in load_named() or _find_snapshot(value) is not None
    )


def _is_folder(value: str, here: Path) -> bool:
    """Whether a value is the folder of a model."""
    try:
        config = json.loads((here / expand_place(value) / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(config, dict) and "model_type" in config


def _find_snapshot(value: str) -> Path | None:
    """The folder in the hub's cache with the config of a model; None where it has none."""
    with contextlib.suppress(ShardwayError, OSError):
        if (name := find_hub_name(value)) is not None:
            repo = find_cache().repo(name)
            folder = repo.snapshot(repo.find_commit(name.revision))
            return folder if (folder / CONFIG).is_file() else None
    return None


# --- what it takes


def describe_foreign_model(read: CommandRead, here: Path, profile: SiteProfile, gpus: int) -> str:
    """A line about the model that a command trains on `gpus` GPUs of a site: what it takes at least, what the job has,
    and the smallest number that would do; "" for a command without a model, and a job without GPUs."""
    training = read_training(read, here) if gpus else None
    if training is None:
        return ""
    from shardway.plan.case import machine_of_site

    try:
        machine = machine_of_site(profile)
    except UserError:
        return ""
    head = f"if this trains {training.model} ({training.named_by})"
    try:
        needs, source = _find_needs(training, here)
    except UserError as error:
        return f"{training.model} ({training.named_by}) was not sized: {' '.join(str(error).split())}"
    held, has = needs(gpus), machine.memory_bytes
    device = f"{gpus} x {machine.accelerator.name} ({render_bytes(has)})"
    counted = f"counted: {_describe_assumptions(training, source)}"
    if held <= has:
        alone = needs(1) if not training.sharding else 0.0
        if gpus > 1 and alone > has:
            return (
                f"{head}, it fits {device} only if they share its states (FSDP, ZeRO-3), and no word of the command "
                f"asks for that: at least {_render(held)} on each, else {_render(alone)}; {counted}"
            )
        return f"{head}, it takes at least {_render(held)} on each of {device}; {counted}"
    least = find_least_gpus(needs, machine)
    remedy = f"the least that would do is {least} of them: {_render_request(least, machine)}"
    if training.sharding in ("none", "1", "2") and not least:
        remedy = "no number of them would do: GPUs with more memory, or states that are shared (FSDP, ZeRO-3)"
    elif not least:
        remedy = "no number of them would do: shorter sequences, or a smaller batch on each"
    return f"{head}, it does not fit {device}: at least {_render(held)} on each; {remedy}; {counted}"


def _render(held: float) -> str:
    return f"{held / 1e9:,.0f} GB" if held >= 100e9 else f"{held / 1e9:.3g} GB"


def _render_request(gpus: int, machine: Machine) -> str:
    if gpus <= machine.per_node:
        return f"site.nodes=1 site.ranks_per_node={gpus}" if gpus < machine.per_node else "site.nodes=1"
    return f"site.nodes={gpus // machine.per_node}"


def find_least_gpus(needs: Callable[[int], float], machine: Machine) -> int:
    """The smallest number of GPUs, a divisor of a node's or whole nodes, of which each holds its part; 0 for none."""
    from shardway.plan.case import divisors

    counts = [*divisors(machine.per_node), *range(2 * machine.per_node, _MOST_GPUS + 1, machine.per_node)]
    found = bisect_left(counts, True, key=lambda gpus: needs(gpus) <= machine.memory_bytes)  # more never take more
    return counts[found] if found < len(counts) else 0


def _describe_assumptions(training: ForeignTraining, source: str) -> str:
    states = f"LoRA of rank {training.lora_rank} beside weights in {training.frozen_bits} bits"
    if not training.lora:
        kept = "16" if training.narrow else "32"
        states = f"weights, gradients and {training.optimizer} in {kept} bits"
    length = f"{training.seq_len or _USUAL_LENGTH} tokens" + ("" if training.seq_len else " (assumed)")
    again = "recomputed" if training.recompute else "kept"
    shared = {"": "", "all": "", "none": ", not shared"}.get(training.sharding, f", ZeRO-{training.sharding}")
    return f"{states}{shared}, activations of {training.micro_batch} x {length} {again}; {source}"


def _find_needs(training: ForeignTraining, here: Path) -> tuple[Callable[[int], float], str]:
    """Bytes of each GPU by their number, and where the sizes of the model come from. Raises UserError where it is not
    here, or no family that the planner knows."""
    from shardway.plan.counted import find_kept
    from shardway.plan.huggingface import find_named, load_named, shape_of_config
    from shardway.plan.shapes import Architecture

    folder = here / expand_place(training.model)
    found = folder if _is_folder(training.model, here) else _find_snapshot(training.model)
    if found is None:
        short = training.model.partition("@")[0].rpartition("/")[2].lower()
        near = next(
            (
                name
                for name in (short, short.removesuffix("-hf"), short.removesuffix("-instruct"))
                if name in load_named()
            ),
            "",
        )
        if not near:
            raise UserError(
                "its config.json is not in the cache of this machine, and nothing is downloaded here; before the job: "
                f"`shardway prefetch --model {training.model}`"
            )
        shape: Any = find_named(near)
        source = f"sizes of {near}"
    else:
        config, source = read_config(found), f"sizes of its {CONFIG}"
        try:
            shape = shape_of_config(config, training.model, str(found / CONFIG))
        except UserError:
            shape = find_kept(config)
            if shape is None:
                family = str(config.get("model_type", "without a name"))
                raise UserError(
                    f'its family "{family}" is not among those that the planner knows by itself; `shardway plan '
                    f"{training.model}` has its library count it, once"
                ) from None
    if isinstance(shape, Architecture):
        return lambda gpus: estimate_least_bytes(shape, training, gpus), source
    each = 16.0 if not training.lora else training.frozen_bits / 8
    bytes_of = shape.parameters * each
    whole = training.sharding == "none"
    return lambda gpus: bytes_of / (1 if whole else gpus), f"{source}, without activations"


def estimate_least_bytes(model: Architecture, training: ForeignTraining, gpus: int) -> float:
    """Bytes that each of `gpus` GPUs holds at the peak of a step, without overheads of the device.

    States by the format in which they are kept; activations, logits and what one layer takes meanwhile as the planner
    has them for FSDP2.
    """
    from shardway.plan.case import Case, Degrees, find_engine
    from shardway.plan.memory import estimate_peak, load_overheads
    from shardway.plan.shapes import AdapterShape

    adapter = AdapterShape(training.lora_rank, ("q_proj", "v_proj")) if training.lora else None
    wide = 2 if training.narrow else 4  # no second copy of the weights, which not every library has
    engine = replace(find_engine("fsdp2"), weight_bytes=wide, master_bytes=0, gradient_bytes=wide)
    shards = training.sharding != "none"
    zero = {"none": 0, "1": 1, "2": 2}.get(training.sharding, 3)
    length = training.seq_len or _USUAL_LENGTH
    case = Case(
        model=model.beside(adapter),
        seq_len=min(length, model.longest or length),
        global_batch=gpus * training.micro_batch,
        micro_batch=training.micro_batch,
        degrees=Degrees(dp_shard=gpus) if shards else Degrees(dp_replicate=gpus),
        engine=engine,
        zero=zero if gpus > 1 else 0,
        optimizer=training.optimizer,
        recompute="full" if training.recompute else "none",
        offload=training.offloads,
    )
    peak = estimate_peak(case, load_overheads())
    weights, optimizer = peak.weights, peak.optimizer
    if training.lora:
        weights *= training.frozen_bits / 16
    if training.narrow:  # moments have the format of the weights
        optimizer /= 2
    return peak.allocated - peak.weights - peak.optimizer + weights + optimizer
