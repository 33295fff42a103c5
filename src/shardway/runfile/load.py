"""Reads a run file, its parent and overrides with the origin of each key, states its problems in sentences, and writes
run files.

Invariants:
- What is written here loads again to the same values.
- `key_lines` is never wrong for text that `tomllib` accepts: keys in a form that it does not parse (quoted, in an
  inline table, in an array of tables) are left out rather than guessed. It reads no values.
- No file is changed, and all problems of a run file are reported at once.
- Every key named here is one of the schema's; a peer's name with two meanings has a row for each.
- Every problem names the key, the value, its origin and what is allowed; an unknown key gets its nearest match.
- The doc of a key comes from the schema that enforces it.
"""

from __future__ import annotations

import difflib
import json
import re
import textwrap
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import date, time
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from shardway.earlier_names import EARLIER_KEYS, rename_entry
from shardway.errors import Problem, UserError, check_no_problems
from shardway.runfile.schema import RunFile, Section, all_keys, open_tables, sections

# --- Writes run files: the commented one of `shardway init` and the resolved one of a run directory


def render_value(value: Any) -> str:
    """One value as TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _escape(json.dumps(value, ensure_ascii=False))
    if isinstance(value, list):
        return f"[{', '.join(map(render_value, value))}]"
    if isinstance(value, dict):
        pairs = (f"{_render_key(name)} = {render_value(entry)}" for name, entry in value.items())
        return f"{{{', '.join(pairs)}}}"
    return repr(value)


def render_run(values: RunFile, origins: Mapping[str, str], keep: Callable[[str], bool]) -> str:
    """A run file with every key that `keep` wants, each with its origin beside it."""
    lines = [f"format = {values.format}"]
    for section, table in _tables(values):
        kept = {name: value for name, value in table.items() if keep(f"{section}.{name}")}
        lines += ["", f"[{section}]"] if kept else []
        for name, value in kept.items():
            origin = _escape(origins[f"{section}.{name}"])  # of a file whose name may hold any byte
            lines.append(f"{f'{name} = {render_value(value)}':<40} # {origin}")
    return "\n".join(lines) + "\n"


def render_commented(values: RunFile, chosen: Mapping[str, Any]) -> str:
    """A run file for a newcomer: the `chosen` keys set, every other key as a comment with its default."""
    lines = [
        "# A Shardway run file. Keys that are commented out stand at their defaults.",
        "# `shardway config explain KEY` says more of a key; `shardway train THIS_FILE` runs it.",
        f"format = {values.format}",
    ]
    for section, table in _tables(values):
        model: Section = getattr(values, section)
        lines += ["", *_comment((type(model).__doc__ or "").strip()), f"[{section}]"]
        for name, default in table.items():
            lines += _comment(type(model).model_fields[name].description or "")
            dotted = f"{section}.{name}"
            entry = f"{name} = {render_value(chosen.get(dotted, default))}"
            lines.append(entry if dotted in chosen else f"# {entry}")
    return "\n".join(lines) + "\n"


def _escape(text: str) -> str:
    """A text without characters that a terminal would obey, or that are none in UTF-8: as TOML writes them."""
    return "".join(char if char.isprintable() else _escape_one(char) for char in text)


def _escape_one(char: str) -> str:
    return f"\\u{ord(char):04X}" if ord(char) < 0x10000 else f"\\U{ord(char):08X}"


def _render_key(name: str) -> str:
    return name if re.fullmatch("[A-Za-z0-9_-]+", name) else render_value(name)


def _tables(values: RunFile) -> list[tuple[str, dict[str, Any]]]:
    dump = values.model_dump(mode="json")
    return [(name, table) for name, table in dump.items() if isinstance(table, dict)]


def _comment(text: str) -> list[str]:
    return [f"## {line}" for line in textwrap.wrap(text, 100)]


# --- Reads a run file, its parent and the overrides into one typed value with the line or option of each key

# --- the line of each key

_TABLE = re.compile(r"\s*\[\s*([A-Za-z0-9_.\-\s]+?)\s*\]\s*(#.*)?")
_KEY = re.compile(r"\s*([A-Za-z0-9_.\-]+)\s*=.*")
_TOKEN = re.compile(
    r"""
      \"{3} (?: \\. | [^\\] )*? \"{3} \"{0,2}   # strings over several lines
    | '{3} .*? '{3} '{0,2}
    | " (?: \\. | [^"\\] )* "                   # strings on one line
    | ' [^']* '
    | \# [^\n]*
    | [\[\]{}\n]
    """,
    re.VERBOSE | re.DOTALL,
)


def key_lines(text: str) -> dict[str, int]:
    """Dotted key -> line number (from 1) of every key and table head in a valid TOML text."""
    found: dict[str, int] = {}
    lines, table = text.split("\n"), ""
    for number in _statement_lines(text):
        line = lines[number - 1]
        if head := _TABLE.fullmatch(line):
            table = re.sub(r"\s", "", head[1])
            found.setdefault(table, number)
        elif line.lstrip().startswith("["):
            table = "?"  # a head of another form: its keys get a name that no key has
        elif (pair := _KEY.fullmatch(line)) and table != "?":
            found.setdefault(f"{table}.{pair[1]}".lstrip("."), number)
    return found


def _statement_lines(text: str) -> Iterator[int]:
    """The lines that no string and no bracket of an earlier line reaches into."""
    number, depth = 1, 0
    yield number
    for token in _TOKEN.finditer(text):
        depth += (token[0] in "[{") - (token[0] in "]}")
        number += token[0].count("\n")
        if token[0] == "\n" and depth == 0:
            yield number


# --- files, parents and overrides

COMMAND_LINE = "command line"
DEFAULT = "default"


@dataclass(frozen=True)
class LoadedRunFile:
    """A run file as asked for: its values, the origin of each key, the user's own text and file name."""

    values: RunFile
    origins: Mapping[str, str]
    text: str
    path: Path | None = None

    def with_default(self, dotted: str, value: Any, origin: str) -> LoadedRunFile:
        """The same run with `value` for a key that is not set. Raises UserError for a wrong value."""
        return self if self.origins[dotted] != DEFAULT else self.with_value(dotted, value, origin)

    def with_value(self, dotted: str, value: Any, origin: str) -> LoadedRunFile:
        """The same run with another value of one key. Raises UserError for a wrong value."""
        section, name = dotted.split(".")
        raw = {**self.values.model_dump(mode="json")[section], name: value}
        try:
            table = type(getattr(self.values, section)).model_validate(raw)
        except ValidationError as error:
            found = [{**problem, "loc": (section, *problem["loc"])} for problem in error.errors()]
            check_no_problems(origin, find_problems(cast("list[ErrorDetails]", found), {dotted: origin}, origin))
            raise
        values = self.values.model_copy(update={section: table})
        return replace(self, values=values, origins=MappingProxyType({**self.origins, dotted: origin}))

    def with_origin(self, dotted: str, origin: str) -> LoadedRunFile:
        """The same run, where an option stands in for the value of a key."""
        return replace(self, origins=MappingProxyType({**self.origins, dotted: origin}))


@dataclass
class _Draft:
    """Raw values and origins while files are merged."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)

    def lay_over(self, dotted: str, value: Any, origin: str) -> None:
        dotted, value = rename_entry(dotted, value)
        section, _, name = dotted.partition(".")
        if not name:
            self.values[section] = value
        else:
            table = self.values.setdefault(section, {})
            if isinstance(table, dict):  # anything else is a problem that the schema reports
                name, value = _into_table(table, section, name, value)
                table[name] = value
            dotted = f"{section}.{name}"
        self.origins[dotted] = origin


def _into_table(section: Mapping[str, Any], of: str, name: str, value: Any) -> tuple[str, Any]:
    """Key and value of `site.environment.NAME=value`: an entry of a table with names of the user's own."""
    key, _, entry = name.partition(".")
    held = section.get(key, {})
    if not entry or f"{of}.{key}" not in open_tables() or not isinstance(held, dict):
        return name, value
    return key, {**held, entry: value}


def load_run(path: Path | None, overrides: Sequence[str] = ()) -> LoadedRunFile:
    """The run of a file (None: all defaults) with `key.path=value` overrides laid over it.

    Raises UserError with every problem of the file, its parent and the overrides.
    """
    draft = _Draft()
    text = _merge_file(draft, path) if path else ""
    problems = _lay_overrides(draft, overrides)
    title = str(path) if path else "the command line"
    try:
        values = RunFile.model_validate(draft.values)
    except ValidationError as error:
        problems += find_problems(error.errors(), draft.origins, title)
        check_no_problems(title, problems)
        raise
    check_no_problems(title, problems)
    origins = {name: draft.origins.get(name, DEFAULT) for name in all_keys()}
    return LoadedRunFile(values, MappingProxyType(origins), text, path)


def _merge_file(draft: _Draft, path: Path) -> str:
    """Lay a file over its parent; returns the file's own text."""
    text = _read_text(path)
    table = _parse(text, path)
    parent = table.pop("extends", None)
    if parent is not None:
        _merge_parent(draft, path, parent)
    lines, keys = key_lines(text), dict(_flatten(table))
    for earlier in EARLIER_KEYS.keys() & keys.keys():
        if EARLIER_KEYS[earlier] in keys:
            raise UserError(
                f"{path} sets {earlier} (line {lines.get(earlier, '?')}), the earlier name of {EARLIER_KEYS[earlier]}, "
                f"which it sets too.\n  To do: remove {earlier}."
            )
    for dotted, value in keys.items():
        line = lines.get(dotted) or lines.get(dotted.split(".")[0])
        draft.lay_over(dotted, value, f"{path.name}:{line}" if line else path.name)
    return text


def _merge_parent(draft: _Draft, path: Path, parent: Any) -> None:
    if not isinstance(parent, str):
        raise UserError(f"extends in {path} is {parent!r}; allowed: the path of one run file as a string.")
    parent_path = path.parent / parent
    parent_text = _read_text(parent_path, wanted_by=f"extends in {path}")
    if parent_path.resolve() == path.resolve():
        raise UserError(f"{path} extends itself; allowed: the path of another run file.")
    if "extends" in _parse(parent_text, parent_path):
        raise UserError(
            f"{path} extends {parent_path}, which extends another file itself; allowed: one parent.\n"
            f"  To do: copy the keys that you need from {parent_path}'s parent into {path}."
        )
    _merge_file(draft, parent_path)


def _read_text(path: Path, wanted_by: str = "") -> str:
    try:
        return path.read_text(encoding="utf-8-sig")  # some editors put a byte order mark first
    except UnicodeDecodeError as error:
        raise UserError(
            f"the run file {path} is not UTF-8 text (byte {error.start}): is it a run file?\n"
            "  To do: name a run file; where it is one, save it as UTF-8 in your editor."
        ) from None
    except (OSError, ValueError) as error:  # a ValueError for a name that no file can have
        source = f" ({wanted_by})" if wanted_by else ""
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(
            f"the run file {path}{source} cannot be read: {reason}.\n"
            "  To do: check the path, or write a new run file with `shardway init`."
        ) from None


def _parse(text: str, path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also for a number or a nesting that Python cannot hold
        raise UserError(
            f"{path} is not valid TOML: {error}.\n"
            "  To do: correct it there: strings stand in quotes, keys below their [section]; `shardway init` writes a "
            "file with every key."
        ) from None


def _flatten(table: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    """Dotted key and value of each entry; only sections are taken apart, and an empty one says nothing."""
    for name, value in table.items():
        if isinstance(value, dict) and name in sections():
            yield from ((f"{name}.{inner}", entry) for inner, entry in value.items())
        else:
            yield name, value


def _lay_overrides(draft: _Draft, overrides: Sequence[str]) -> list[Problem]:
    """Lay `key.path=value` texts over the draft; those without this form are problems."""
    problems = []
    for override in overrides:
        dotted, equals, text = override.partition("=")
        if not equals or "." not in dotted:
            problems.append(
                Problem(override, "is not an override", COMMAND_LINE, "section.key=value, such as train.steps=500")
            )
            continue
        if not is_text(override):
            what = f"{text!a} is not UTF-8 text"
            problems.append(Problem(ascii(dotted)[1:-1], what, COMMAND_LINE, "text in UTF-8"))
            continue
        is_variable = dotted.strip().startswith("site.environment.")  # whose value is a text, whatever it looks like
        value = _unquote(text.strip()) if is_variable else parse_override_value(text.strip())
        draft.lay_over(dotted.strip(), value, COMMAND_LINE)
    return problems


def _unquote(text: str) -> str:
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'" else text


def is_text(word: str) -> bool:
    """Whether a word is text in UTF-8: stray bytes come from Python as lone surrogates."""
    try:
        word.encode()
    except UnicodeEncodeError:
        return False
    return True


def parse_override_value(text: str) -> Any:
    """A value as TOML reads it (`3`, `true`, `[1, 2]`, `"x"`), or else the text itself (`500 steps`, `2026-01-31`)."""
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text
    return text if isinstance(value, date | time) else value


# --- Problems of a run file in sentences, the names that other trainers use for keys, and the doc of a key

# --- names in other trainers

HF, LIGHTNING, DEEPSPEED, FSDP = "transformers, accelerate", "Lightning", "DeepSpeed", "PyTorch's FSDP"
MEGATRON, TITAN, SLURM = "Megatron-LM", "torchtitan", "Slurm"


@dataclass(frozen=True)
class PeerName:
    """A name in `peer` for `keys`; `note` is the difference."""

    name: str
    peer: str
    keys: tuple[str, ...]
    note: str = ""

    def render(self) -> str:
        """ "learning_rate (transformers) is optim.lr here"."""
        note = f"; {self.note}" if self.note else ""
        return f"{self.name} ({self.peer}) is {', '.join(self.keys)} here{note}"


_BATCH = "all samples of a step over all ranks; accumulation follows from it and train.micro_batch"

_BEST = "`shardway checkpoint export RUN FOLDER --best` takes the best one out"
_DIRECTION = 'a word before the metric, as in "max f1" or "min rmse"'

PEERS: tuple[PeerName, ...] = (
    # --- transformers' TrainingArguments
    PeerName("learning_rate", HF, ("optim.lr",)),
    PeerName("gradient_accumulation_steps", f"{HF}, DeepSpeed", ("train.global_batch", "train.micro_batch"), _BATCH),
    PeerName("per_device_train_batch_size", HF, ("train.micro_batch", "train.global_batch"), _BATCH),
    PeerName("per_device_eval_batch_size", HF, ("train.micro_batch",)),
    PeerName("auto_find_batch_size", HF, ("train.micro_batch",), 'what "auto" does'),
    PeerName("max_steps", f"{HF}, Lightning", ("train.steps",)),
    PeerName("num_train_epochs", HF, ("train.steps",), 'as in "3 epochs"'),
    PeerName("save_total_limit", HF, ("checkpoint.keep",)),
    PeerName("load_best_model_at_end", HF, ("checkpoint.keep_best",), _BEST),
    PeerName("metric_for_best_model", HF, ("checkpoint.monitor",), 'as in "accuracy" or "max f1"'),
    PeerName("greater_is_better", HF, ("checkpoint.monitor",), _DIRECTION),
    PeerName("early_stopping_patience", HF, ("train.patience",), "counted in validations"),
    PeerName("save_steps", HF, ("checkpoint.every",), 'as in "500 steps"'),
    PeerName("save_strategy", HF, ("checkpoint.every",)),
    PeerName("eval_steps", HF, ("train.validate_every",)),
    PeerName("eval_strategy", HF, ("train.validate_every",)),
    PeerName("evaluation_strategy", HF, ("train.validate_every",)),
    PeerName("fp16", HF, ("precision.compute",), 'as "fp16"'),
    PeerName("bf16", HF, ("precision.compute",), 'as "bf16"'),
    PeerName("tf32", HF, ("precision.tf32",)),
    PeerName("gradient_checkpointing", HF, ("recompute.mode",)),
    PeerName("max_grad_norm", HF, ("optim.clip",)),
    PeerName("warmup_ratio", HF, ("optim.warmup",), 'as a length, such as "100 steps"'),
    PeerName("warmup_steps", HF, ("optim.warmup",)),
    PeerName("lr_scheduler_type", HF, ("optim.schedule",)),
    PeerName("adam_beta1", HF, ("optim.betas",)),
    PeerName("adam_beta2", HF, ("optim.betas",)),
    PeerName("adam_epsilon", HF, ("optim.eps",)),
    PeerName("optim", HF, ("optim.name",)),
    PeerName("output_dir", HF, ("run.root", "run.name"), "or --dir"),
    PeerName("run_name", HF, ("run.name",)),
    PeerName("resume_from_checkpoint", HF, ("checkpoint.every",), "a run goes on by itself; --fresh starts over"),
    PeerName("dataloader_num_workers", HF, ("data.workers",)),
    PeerName("dataloader_prefetch_factor", HF, ("data.prefetch",)),
    PeerName("torch_compile", HF, ("train.compile",)),
    PeerName("data_seed", HF, ("train.seed",)),
    PeerName("full_determinism", HF, ("train.deterministic",)),
    PeerName("model_name_or_path", HF, ("model.hf",)),
    PeerName("model_max_length", HF, ("data.seq_len",)),
    PeerName("block_size", f"{HF}, nanoGPT", ("data.seq_len",)),
    PeerName("ddp_bucket_cap_mb", HF, ("parallel.bucket",)),
    PeerName("deepspeed", HF, ("train.engine", "deepspeed.settings")),
    PeerName("mixed_precision", HF, ("precision.compute",)),
    PeerName("num_processes", HF, ("site.ranks_per_node",), "or --nproc"),
    PeerName("num_machines", HF, ("site.nodes",)),
    # --- Lightning's Trainer
    PeerName("devices", LIGHTNING, ("site.ranks_per_node",), "or --nproc; run.device says which kind"),
    PeerName("num_nodes", LIGHTNING, ("site.nodes",)),
    PeerName("accelerator", LIGHTNING, ("run.device",)),
    PeerName("strategy", LIGHTNING, ("parallel.layout", "train.engine")),
    PeerName("precision", LIGHTNING, ("precision.compute", "precision.weights")),
    PeerName("max_epochs", LIGHTNING, ("train.steps",), 'as in "3 epochs"'),
    PeerName("accumulate_grad_batches", LIGHTNING, ("train.global_batch", "train.micro_batch"), _BATCH),
    PeerName("gradient_clip_val", LIGHTNING, ("optim.clip",)),
    PeerName("val_check_interval", LIGHTNING, ("train.validate_every",)),
    PeerName("limit_val_batches", LIGHTNING, ("train.validation_samples",)),
    PeerName("save_top_k", LIGHTNING, ("checkpoint.keep_best",), _BEST),
    PeerName("save_last", LIGHTNING, ("checkpoint.keep",), "the newest are always kept"),
    PeerName("monitor", LIGHTNING, ("checkpoint.monitor",), 'as in "accuracy" or "max f1"'),
    PeerName("mode", LIGHTNING, ("checkpoint.monitor",), _DIRECTION),
    PeerName(
        "EarlyStopping", f"{LIGHTNING}, Keras", ("train.patience", "checkpoint.monitor"), "counted in validations"
    ),
    PeerName("patience", f"{LIGHTNING}, Keras", ("train.patience",), "counted in validations"),
    PeerName("every_n_train_steps", LIGHTNING, ("checkpoint.every",)),
    PeerName("deterministic", LIGHTNING, ("train.deterministic",)),
    PeerName("benchmark", LIGHTNING, ("train.cudnn_benchmark",)),
    PeerName("max_time", LIGHTNING, ("site.walltime",)),
    PeerName("default_root_dir", LIGHTNING, ("run.root",)),
    # --- DeepSpeed's ds_config.json
    PeerName("zero_optimization.stage", DEEPSPEED, ("deepspeed.stage", "parallel.dp_shard")),
    PeerName("zero_stage", DEEPSPEED, ("deepspeed.stage", "parallel.dp_shard")),
    PeerName("train_batch_size", DEEPSPEED, ("train.global_batch",)),
    PeerName("train_micro_batch_size_per_gpu", DEEPSPEED, ("train.micro_batch",)),
    PeerName("gradient_clipping", DEEPSPEED, ("optim.clip",)),
    PeerName("offload_optimizer", DEEPSPEED, ("deepspeed.offload_optimizer", "parallel.cpu_offload")),
    PeerName("offload_param", DEEPSPEED, ("deepspeed.offload_params",)),
    PeerName("initial_scale_power", DEEPSPEED, ("precision.loss_scale",)),
    PeerName("activation_checkpointing", DEEPSPEED, ("recompute.mode",)),
    # --- FSDP, DDP
    PeerName("fsdp", f"{FSDP}, transformers", ("parallel.dp_shard",)),
    PeerName("ddp", "PyTorch's DDP", ("parallel.dp_replicate",)),
    PeerName("sharding_strategy", FSDP, ("parallel.dp_shard", "parallel.reshard_after_forward")),
    PeerName("reshard_after_forward", FSDP, ("parallel.reshard_after_forward",)),
    PeerName("cpu_offload", FSDP, ("parallel.cpu_offload",)),
    PeerName("backward_prefetch", FSDP, ("parallel.prefetch",)),
    PeerName("bucket_cap_mb", "PyTorch's DDP", ("parallel.bucket",)),
    PeerName(
        "find_unused_parameters", "PyTorch's DDP", ("parallel.static_graph",), "unused ones are found by themselves"
    ),
    # --- Megatron-LM's flags
    PeerName("tensor_model_parallel_size", MEGATRON, ("parallel.tp",)),
    PeerName("pipeline_model_parallel_size", MEGATRON, ("parallel.pp",)),
    PeerName("context_parallel_size", MEGATRON, ("parallel.cp",)),
    PeerName("expert_model_parallel_size", MEGATRON, ("parallel.ep",)),
    PeerName("sequence_parallel", MEGATRON, ("parallel.tp_sequence",)),
    PeerName("use_distributed_optimizer", MEGATRON, ("parallel.dp_shard",)),
    PeerName("num_layers_per_virtual_pipeline_stage", MEGATRON, ("parallel.pp_stages_per_rank",)),
    PeerName("micro_batch_size", MEGATRON, ("train.micro_batch",)),
    PeerName("global_batch_size", f"{MEGATRON}, {TITAN}", ("train.global_batch",)),
    PeerName("train_iters", MEGATRON, ("train.steps",)),
    PeerName("train_samples", MEGATRON, ("train.steps",), 'as in "1e6 samples"'),
    PeerName("lr_decay_style", MEGATRON, ("optim.schedule",)),
    PeerName("lr_warmup_iters", MEGATRON, ("optim.warmup",)),
    PeerName("min_lr", MEGATRON, ("optim.final_lr",), "as a part of optim.lr"),
    PeerName("clip_grad", MEGATRON, ("optim.clip",)),
    PeerName("save_interval", MEGATRON, ("checkpoint.every",)),
    PeerName("eval_interval", f"{MEGATRON}, nanoGPT", ("train.validate_every",)),
    PeerName("recompute_granularity", MEGATRON, ("recompute.mode",)),
    PeerName("recompute_activations", MEGATRON, ("recompute.mode",)),
    PeerName("num_layers", MEGATRON, ("model.layers",)),
    PeerName("hidden_size", f"{MEGATRON}, transformers", ("model.dim",)),
    PeerName("num_attention_heads", f"{MEGATRON}, transformers", ("model.heads",)),
    PeerName("num_query_groups", MEGATRON, ("model.kv_heads",)),
    PeerName("num_key_value_heads", "transformers", ("model.kv_heads",)),
    PeerName("num_hidden_layers", "transformers", ("model.layers",)),
    PeerName("intermediate_size", "transformers", ("model.ffn_dim",)),
    PeerName("vocab_size", "transformers, nanoGPT", ("model.vocab",)),
    PeerName("ffn_hidden_size", MEGATRON, ("model.ffn_dim",)),
    PeerName("seq_length", MEGATRON, ("data.seq_len",)),
    PeerName("num_experts", MEGATRON, ("model.experts",)),
    PeerName("moe_router_topk", MEGATRON, ("model.experts_per_token",)),
    PeerName("distributed_timeout_minutes", MEGATRON, ("run.collective_timeout",)),
    # --- torchtitan's job config
    PeerName("data_parallel_replicate_degree", TITAN, ("parallel.dp_replicate",)),
    PeerName("data_parallel_shard_degree", TITAN, ("parallel.dp_shard",)),
    PeerName("tensor_parallel_degree", TITAN, ("parallel.tp",)),
    PeerName("pipeline_parallel_degree", TITAN, ("parallel.pp",)),
    PeerName("context_parallel_degree", TITAN, ("parallel.cp",)),
    PeerName("expert_parallel_degree", TITAN, ("parallel.ep",)),
    PeerName("pipeline_parallel_schedule", TITAN, ("parallel.pp_schedule",)),
    PeerName("local_batch_size", TITAN, ("train.micro_batch",)),
    PeerName("activation_checkpoint.mode", TITAN, ("recompute.mode",)),
    PeerName("activation_checkpoint", TITAN, ("recompute.mode",)),
    PeerName("checkpoint.interval", TITAN, ("checkpoint.every",)),
    PeerName("keep_latest_k", TITAN, ("checkpoint.keep",)),
    PeerName("async_mode", TITAN, ("checkpoint.background",)),
    PeerName("training.seq_len", TITAN, ("data.seq_len",)),
    PeerName("training.steps", TITAN, ("train.steps",)),
    PeerName("dump_folder", TITAN, ("run.root",)),
    PeerName("lr_scheduler.warmup_steps", TITAN, ("optim.warmup",)),
    PeerName("decay_ratio", TITAN, ("optim.decay",)),
    # --- plain PyTorch, nanoGPT, Slurm
    PeerName("batch_size", "PyTorch", ("train.global_batch",), _BATCH),
    PeerName("epochs", "PyTorch", ("train.steps",), 'as in "3 epochs"'),
    PeerName("num_workers", "PyTorch", ("data.workers",)),
    PeerName("prefetch_factor", "PyTorch", ("data.prefetch",)),
    PeerName("weight_decay", "PyTorch", ("optim.weight_decay",)),
    PeerName("max_iters", "nanoGPT", ("train.steps",)),
    PeerName("grad_clip", "nanoGPT", ("optim.clip",)),
    PeerName("n_layer", "nanoGPT, transformers", ("model.layers",)),
    PeerName("n_head", "nanoGPT, transformers", ("model.heads",)),
    PeerName("n_embd", "nanoGPT, transformers", ("model.dim",)),
    PeerName("time", SLURM, ("site.walltime",)),
    PeerName("partition", SLURM, ("site.queue",)),
    PeerName("account", SLURM, ("site.account",)),
    PeerName("ntasks_per_node", SLURM, ("site.ranks_per_node",)),
    PeerName("nodes", SLURM, ("site.nodes",)),
)
"""Names that users may be familiar with."""


def plain_name(word: str) -> str:
    """A name in the table's form: "--tensor-model-parallel-size" -> "tensor_model_parallel_size"."""
    return word.strip().lstrip("-").replace("-", "_").lower()


def find_peers(word: str) -> list[PeerName]:
    """The rows of a name, with or without the section that the peer has it in, or a person has put it in here; of such
    a section alone those of its names."""
    name = plain_name(word)
    name = name.partition("(")[0]  # EarlyStopping(patience=3)
    exact = [row for row in PEERS if row.name.lower() == name]
    exact = exact or [row for row in PEERS if row.name.startswith(f"{name}.")]
    return exact or [row for row in PEERS if "." in name and row.name == name.rpartition(".")[2]]


# --- problems found by pydantic

_WORDS = {
    "int_type": ("is not an integer", "an integer"),
    "float_type": ("is not a number", "a number"),
    "bool_type": ("is neither true nor false", "true or false"),
    "string_type": ("is not a string", "a string in quotes"),
    "list_type": ("is not a list", "a list such as [1, 2]"),
    "finite_number": ("is not a finite number", "a finite number"),
}


def find_problems(errors: Sequence[ErrorDetails], origins: Mapping[str, str], default_origin: str) -> list[Problem]:
    """One problem per key, in pydantic's order."""
    problems: dict[str, Problem] = {}
    for error in errors:
        location = [str(part) for part in error["loc"]]
        dotted = ".".join(location[:2])
        origin = origins.get(dotted) or _origin_of_section(location[0], origins) or default_origin
        problem = _problem(error, dotted, origin)
        before = problems.get(dotted)
        problems[dotted] = problem if before is None else _merge(before, problem)
    return list(problems.values())


def _origin_of_section(section: str, origins: Mapping[str, str]) -> str:
    """Where the first key of a section stands, for a problem with the section as a whole."""
    return next((origin for name, origin in origins.items() if name.split(".")[0] == section), "")


def _problem(error: ErrorDetails, dotted: str, origin: str) -> Problem:
    if error["type"] == "extra_forbidden":
        return unknown_key(dotted, origin)
    if error["type"] == "model_type":
        names = ", ".join(sections()[dotted].model_fields)
        return Problem(dotted, f"{error['input']!r} is not a section", origin, f"a table [{dotted}] with {names}")
    what, allowed = _describe(error)
    return Problem(dotted, what, origin, allowed)


def unknown_key(dotted: str, origin: str) -> Problem:
    """The problem of a key that does not exist; its nearest match stands before the full list."""
    section, _, name = dotted.partition(".")
    known = list(sections()[section].model_fields) if section in sections() and name else [*sections(), "format"]
    near = difflib.get_close_matches(name or section, known, n=1, cutoff=0.6)
    elsewhere = [other for other in all_keys() if name and other.split(".")[1] == name]
    if not name:
        elsewhere = [other for other in all_keys() if other.split(".")[1] == section]
        near = [] if elsewhere else near
    guess = f"{section}.{near[0]}" if near and name else near[0] if near else next(iter(elsewhere), "")
    kind = "key" if name else "section"
    match = f"; did you mean {guess}?" if guess else ""
    if rows := find_peers(dotted) or find_peers(name or section):
        match = "".join(f"; {row.render()}" for row in rows[:2])
    within = f"in [{section}]: " if name and section in sections() else ""
    return Problem(dotted, f"there is no {kind} of this name{match}", origin, f"{within}{', '.join(known)}")


def _describe(error: ErrorDetails) -> tuple[str, str]:
    value, context = error["input"], error.get("ctx", {})
    kind = error["type"]
    if kind == "literal_error":
        return f"{_show(value)} is not one of the choices", str(context["expected"]).replace("'", '"')
    if kind == "value_error":
        sentence, _, allowed = str(context["error"]).partition("; allowed: ")
        return sentence, allowed
    if kind in ("greater_than_equal", "greater_than"):
        bound = context.get("ge", context.get("gt"))
        return f"{_show(value)} is too small", f"{'at least' if 'ge' in context else 'more than'} {render_bound(bound)}"
    if kind in ("less_than_equal", "less_than"):
        bound = context.get("le", context.get("lt"))
        return f"{_show(value)} is too large", f"{'at most' if 'le' in context else 'less than'} {render_bound(bound)}"
    if kind == "string_pattern_mismatch":
        return f"{_show(value)} is not the name of a folder", "a string without / that is more than dots"
    if kind == "string_too_short":
        return f"{_show(value)} is too short", f"a string of at least {context['min_length']} character"
    if kind in ("too_short", "too_long"):
        bound = f"at least {context['min_length']}" if kind == "too_short" else f"at most {context['max_length']}"
        return f"{_show(value)} has {context['actual_length']} entries", f"{bound} entries"
    what, allowed = _WORDS.get(kind, (error["msg"], ""))
    return f"{_show(value)} {what}" if allowed else what, allowed


def _show(value: Any) -> str:
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value) if isinstance(value, list | dict) else str(value)


def render_bound(bound: Any) -> str:
    """A bound as a user writes it: 1.0 -> "1"."""
    return f"{bound:g}" if isinstance(bound, float) else str(bound)


def _merge(first: Problem, second: Problem) -> Problem:
    """One problem of a key whose type is a choice: what one branch says is allowed, or what the other says."""
    both = [text for text in dict.fromkeys((first.allowed, second.allowed)) if text]
    return Problem(first.where, first.what, first.origin, " or ".join(both), first.remedy)


# --- the doc of a key

_MOST = 12


@dataclass(frozen=True)
class KeyDoc:
    """What a key means, what it allows, and its default as it stands in TOML."""

    key: str
    doc: str
    allowed: str
    default: str

    def render(self) -> str:
        """A few lines for a terminal."""
        return f"{self.key}\n  {self.doc}\n  allowed: {self.allowed}\n  default: {self.default}"

    def as_json(self) -> dict[str, str]:
        """Plain data."""
        return asdict(self)


@dataclass(frozen=True)
class KeyMatches:
    """What a word led to: the docs of keys, and in a line each what other trainers call by it."""

    docs: list[KeyDoc]
    peers: tuple[PeerName, ...] = ()

    def render(self) -> str:
        """What a terminal shows."""
        return "\n\n".join([*(row.render() for row in self.peers), *(doc.render() for doc in self.docs)])


def search_keys(word: str) -> KeyMatches:
    """The key or section of that name; else what other trainers call so; else keys whose name or doc has the word.

    Raises UserError where there is none.
    """
    name = plain_name(word)
    if name in all_keys() or name in sections():
        return KeyMatches(explain_key(name))
    if rows := find_peers(word):
        keys = dict.fromkeys(key for row in rows for key in row.keys)
        return KeyMatches([doc for key in keys for doc in explain_key(key)], tuple(rows))
    docs = [doc for section in sections() for doc in _explain_section(section)]
    by_name = [doc for doc in docs if name in doc.key]
    text = " ".join(word.lower().split())
    by_doc = [doc for doc in docs if doc not in by_name and len(text) > 1 and text in doc.doc.lower()]
    near = [row for row in PEERS if len(name) > 3 and name in row.name][:_MOST]
    if by_name or by_doc or near:
        return KeyMatches([*by_name, *by_doc], tuple(near))
    return KeyMatches(explain_key(word))


def explain_key(name: str) -> list[KeyDoc]:
    """The docs of a key, or of all keys of a section. Raises UserError for a name that is neither."""
    keys = [dotted for dotted in all_keys() if dotted == name or dotted.split(".")[0] == name]
    if not keys:
        near = difflib.get_close_matches(name, [*all_keys(), *sections()], n=3, cutoff=0.5)
        guess = f"; did you mean {' or '.join(near)}?\n  " if near else "; "
        raise UserError(f"there is no key {name}{guess}allowed: a section ({', '.join(sections())}) or section.key.")
    named = dict.fromkeys(dotted.partition(".")[0] for dotted in keys)
    return [doc for section in named for doc in _explain_section(section) if doc.key in keys]


def _explain_section(section: str) -> list[KeyDoc]:
    model = sections()[section]
    allowed = model.model_json_schema()["properties"]
    defaults = RunFile().model_dump(mode="json")[section]
    return [
        KeyDoc(f"{section}.{name}", field.description or "", _allowed(allowed[name]), render_value(defaults[name]))
        for name, field in model.model_fields.items()
    ]


def _allowed(prop: dict[str, Any]) -> str:
    if "anyOf" in prop:
        return " or ".join(_allowed(choice) for choice in prop["anyOf"])
    if "enum" in prop:
        return ", ".join(render_value(choice) for choice in prop["enum"])
    if "const" in prop:
        return render_value(prop["const"])
    if "examples" in prop:
        return f"such as {', '.join(render_value(example) for example in prop['examples'])}"
    if prop.get("type") == "array":
        return f"a list of {_allowed(prop['items'])}"
    words = {"integer": "an integer", "number": "a number", "boolean": "true or false", "string": "a string"}
    words["object"] = "a table"
    return words[prop["type"]] + _bounds(prop)


def _bounds(prop: dict[str, Any]) -> str:
    names = {
        "minimum": "at least",
        "exclusiveMinimum": "more than",
        "maximum": "at most",
        "exclusiveMaximum": "less than",
    }
    said = [f"{words} {render_bound(prop[bound])}" for bound, words in names.items() if bound in prop]
    return f", {' and '.join(said)}" if said else ""
