"""Problems of a run file in sentences, the names that other trainers use for keys, and the doc of a key.

Invariants:
- Every key named here is one of the schema's; a peer's name with two meanings has a row for each.
- Every problem names the key, the value, its origin and what is allowed; an unknown key gets its nearest match.
- The doc of a key comes from the schema that enforces it.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pydantic_core import ErrorDetails

from shardway.errors import Problem, UserError
from shardway.runfile.schema import RunFile, all_keys, sections
from shardway.runfile.write import render_value

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
