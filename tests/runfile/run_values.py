"""Valid values of every key of a run file, for properties: `valid_values()` gives {"train.seed": 7, ...}."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hypothesis import strategies as st

from shardway.runfile.load import render_value
from shardway.runfile.schema import RunFile, all_keys

SMALL = st.integers(1, 64)
FRACTION = st.floats(0.0, 1.0)
POSITIVE = st.floats(1e-12, 1e12)
AUTO_OR_SMALL = st.one_of(st.just("auto"), SMALL)


def texts(min_size: int = 0) -> st.SearchStrategy[str]:
    """Any text that UTF-8 can hold."""
    return st.text(st.characters(codec="utf-8"), min_size=min_size, max_size=12)


def spans() -> st.SearchStrategy[str | int]:
    """An amount of training in each of its forms."""
    numbers = st.sampled_from(["1", "250", "1e3", "0.5k", "2M", "1_000"])
    parts = st.sampled_from(["0.25", "3", "1.5e3"])
    return st.one_of(
        st.integers(1, 10**6),
        st.builds("{} steps".format, numbers),
        st.builds("{} {}".format, parts, st.sampled_from(["samples", "tokens", "epochs"])),
    )


def times() -> st.SearchStrategy[str]:
    """A time in each of its forms."""
    return st.sampled_from(["1s", "90s", "1h30m", "2d", "1.5h", "250ms", "10min", "1m 1s"])


def sizes() -> st.SearchStrategy[str]:
    """A size in each of its forms."""
    return st.sampled_from(["1MiB", "25MiB", "1.5 GB", "100kB", "4096", "1TiB"])


_BY_KEY: dict[str, st.SearchStrategy[Any]] = {
    "data.shuffle": st.sampled_from([True, False, "windows"]),
    "data.window": sizes(),
    "data.decode": st.sampled_from(["pil", "dali"]),
    "data.workers": st.one_of(st.just("auto"), st.integers(0, 64)),
    "model.kind": st.sampled_from(["transformer", "encoder_decoder", "vit", "convnet", "mlp"]),
    "model.head_dim": AUTO_OR_SMALL,
    "model.kv_heads": AUTO_OR_SMALL,
    "model.ffn_dim": AUTO_OR_SMALL,
    "model.vocab": AUTO_OR_SMALL,
    "model.norm": st.sampled_from(["rmsnorm", "layernorm"]),
    "model.activation": st.sampled_from(["swiglu", "gelu", "gelu_tanh"]),
    "model.positions": st.sampled_from(["rope", "learned"]),
    "model.max_positions": AUTO_OR_SMALL,
    "model.expert_dim": AUTO_OR_SMALL,
    "model.router_score": st.sampled_from(["softmax", "sigmoid"]),
    "model.balance": st.sampled_from(["bias", "loss", "none"]),
    "model.rope_head_dim": AUTO_OR_SMALL,
    "model.value_head_dim": AUTO_OR_SMALL,
    "model.pooling": st.sampled_from(["class", "mean"]),
    "model.dropout": st.floats(0.0, 1.0, exclude_max=True),
    "model.channels": st.lists(SMALL, min_size=1, max_size=3),
    "model.hidden": st.lists(SMALL, max_size=3),
    "model.adapter": st.sampled_from(["none", "lora"]),
    "model.lora_alpha": st.one_of(st.just("auto"), POSITIVE),
    "model.lora_dropout": st.floats(0.0, 1.0, exclude_max=True),
    "model.lora_targets": st.lists(texts(), min_size=1, max_size=3),
    "data.kind": st.sampled_from(["text", "tokens", "arrays", "idx", "synthetic"]),
    "data.validation_fraction": st.floats(0.0, 1.0, exclude_max=True),
    "data.token_dtype": st.sampled_from(["uint8", "uint16", "uint32"]),
    "data.path": texts(min_size=1),
    "data.mean": st.floats(-1e6, 1e6),
    "data.blend": st.lists(
        st.builds(
            lambda path, weight, extra: {"path": path, "weight": weight, **extra},
            texts(min_size=1),
            st.one_of(
                SMALL, POSITIVE, st.lists(POSITIVE, min_size=1).map(lambda all_: [list(p) for p in enumerate(all_)])
            ),
            st.sampled_from([{}, {"kind": "tokens"}]),
        ),
        max_size=3,
    ),
    "data.skip": st.lists(
        st.builds(lambda start, length: [start, start + length], st.integers(0, 10**6), SMALL), max_size=4
    ),
    "data.shape": st.lists(SMALL, max_size=3),
    "train.steps": spans(),
    "train.seed": st.integers(0, 2**63 - 1),
    "train.global_batch": st.one_of(
        SMALL, st.lists(SMALL, min_size=1, max_size=3).map(lambda sizes: [list(pair) for pair in enumerate(sizes)])
    ),
    "train.micro_batch": AUTO_OR_SMALL,
    "train.validate_every": st.one_of(st.just("off"), spans()),
    "notify.mail": st.sampled_from(["", "me@example.org"]),
    "notify.webhook": st.sampled_from(["", "SLACK_WEBHOOK"]),
    "notify.form": st.sampled_from(["auto", "slack", "ntfy"]),
    "pipeline.before": st.lists(texts(), max_size=3),
    "pipeline.then": st.lists(texts(), max_size=3),
    "notify.on": st.lists(st.sampled_from(["end", "failure", "no_progress"]), max_size=3),
    "train.profile": st.sampled_from(["", "steps 50-53", "step 7", "steps 2 - 4, rank 3, then finish"]),
    "train.compile": st.sampled_from(["auto", "off", "blocks", "model"]),
    "train.compile_cache": texts(min_size=1),
    "train.tune": st.sampled_from(["off", "auto"]),
    "optim.name": st.sampled_from(["adamw", "sgd", "adafactor", "adamw8bit", "muon"]),
    "optim.kernel": st.sampled_from(["auto", "fused", "foreach"]),
    "optim.state_dtype": st.sampled_from(["fp32", "bf16"]),
    "optim.betas": st.lists(st.floats(0.0, 1.0, exclude_max=True), min_size=2, max_size=2),
    "optim.muon_adjust": st.sampled_from(["match_rms_adamw", "original"]),
    "optim.muon_momentum": st.floats(0.0, 1.0, exclude_max=True),
    "optim.momentum": FRACTION,
    "optim.final_lr": FRACTION,
    "optim.clip": st.one_of(st.just("off"), POSITIVE),
    "site.budget": st.one_of(st.just("off"), POSITIVE),
    "optim.schedule": st.sampled_from(["cosine", "linear", "constant", "wsd"]),
    "optim.warmup": spans(),
    "optim.decay": spans(),
    "optim.lr_scaling": st.sampled_from(["none", "linear"]),
    "parallel.layout": st.sampled_from(["given", "auto"]),
    "parallel.dp_replicate": AUTO_OR_SMALL,
    "parallel.dp_shard": AUTO_OR_SMALL,
    "parallel.bucket": sizes(),
    "parallel.compress": st.sampled_from(["none", "bf16", "fp16", "powersgd"]),
    "parallel.reshard_after_forward": st.one_of(st.booleans(), AUTO_OR_SMALL),
    "parallel.cp_method": st.sampled_from(["ring", "gather"]),
    "parallel.pp_schedule": st.sampled_from(["gpipe", "1f1b", "interleaved", "zero_bubble", "zbv"]),
    "parallel.pp_stages_per_rank": AUTO_OR_SMALL,
    "parallel.pp_split": st.lists(st.integers(0, 5), max_size=4),
    "parallel.pp_micro_batches": AUTO_OR_SMALL,
    "train.engine": st.sampled_from(["torch", "deepspeed"]),
    "deepspeed.stage": st.sampled_from([1, 2, 3]),
    "deepspeed.offload_optimizer": st.sampled_from(["none", "cpu", "nvme"]),
    "deepspeed.offload_params": st.sampled_from(["none", "cpu", "nvme"]),
    "deepspeed.settings": st.dictionaries(texts(), st.one_of(SMALL, texts(), st.lists(FRACTION, max_size=2))),
    "precision.compute": st.sampled_from(["auto", "fp32", "bf16", "fp16", "float8"]),
    "precision.tf32": st.one_of(st.just("auto"), st.booleans()),
    "precision.weights": st.sampled_from(["fp32", "bf16"]),
    "precision.reduce": st.sampled_from(["fp32", "bf16"]),
    "precision.loss_scale_growth": st.floats(1.0, 1e3, exclude_min=True),
    "precision.loss_scale_backoff": st.floats(0.0, 1.0, exclude_min=True, exclude_max=True),
    "precision.float8_recipe": st.sampled_from(["tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8", "blockwise"]),
    "precision.float8_engine": st.sampled_from(["torchao", "transformer_engine"]),
    "precision.float8_all_gather": st.one_of(st.just("auto"), st.booleans()),
    "precision.first_last": st.sampled_from(["same", "bf16"]),
    "recompute.mode": st.sampled_from(["none", "selective", "budget", "full"]),
    "recompute.save_ops": st.lists(texts(), max_size=3),
    "recompute.budget": FRACTION,
    "checkpoint.every": st.one_of(st.just("off"), spans(), times()),
    "checkpoint.keep_every": st.one_of(st.just("off"), spans()),
    "checkpoint.monitor": st.sampled_from(["loss", "accuracy", "bits_per_byte", "max f1", "min rmse", "max max"]),
    "train.sample_every": st.one_of(st.just("off"), spans()),
    "train.sample_prompts": st.lists(texts(min_size=1), max_size=3),
    "train.patience": st.one_of(st.just("off"), st.integers(1, 99)),
    "checkpoint.local_every": st.one_of(st.sampled_from(["off", "auto"]), spans(), times()),
    "guard.non_finite": st.sampled_from(["skip", "stop", "off"]),
    "guard.spike": st.one_of(st.just("off"), POSITIVE),
    "guard.on_spike": st.sampled_from(["warn", "roll_back"]),
    "guard.spike_steps": st.integers(1, 10),
    "guard.probe_every": st.one_of(st.just("off"), spans()),
    "guard.compare_every": st.one_of(st.just("off"), spans()),
    "guard.damaged_data": st.sampled_from(["stop", "skip"]),
    **dict.fromkeys(
        ("model.settings", "data.settings", "optim.settings"),
        st.dictionaries(texts(), st.one_of(SMALL, texts()), max_size=2),
    ),
    "track.to": st.sampled_from([[], ["tensorboard"]]),
    "track.settings": st.dictionaries(texts(), st.dictionaries(texts(), texts(), max_size=2), max_size=2),
    "run.name": texts(min_size=1).filter(lambda name: name.strip(".") and not set(name) & {"/", "\0"}),
    "run.hang_timeout": st.one_of(st.sampled_from(["auto", "off"]), times()),
    "run.max_restarts": AUTO_OR_SMALL,
    "run.elastic": st.one_of(st.just("off"), st.lists(st.integers(1, 9), min_size=2, max_size=2).map(sorted)),
    "run.device": st.sampled_from(["auto", "cpu", "cuda"]),
    "run.threads": AUTO_OR_SMALL,
    "run.display": st.sampled_from(["auto", "off"]),
    "run.start_timeout": times(),
    "run.collective_timeout": times(),
    "run.stop_timeout": times(),
    "run.telemetry": st.one_of(st.just("off"), times()),
    "run.spares": st.one_of(st.sampled_from(["auto", "off"]), times()),
    "run.stop_margin": st.one_of(st.just("auto"), times()),
    "site.ranks_per_node": AUTO_OR_SMALL,
    "site.walltime": st.one_of(st.just("auto"), times()),
    "site.memory": st.one_of(st.just("auto"), sizes()),
    "site.launcher": st.sampled_from(["auto", "torchrun", "srun", "mpirun", "agent", "ft_launcher"]),
    "site.container": st.sampled_from(["auto", "none", "pyxis", "enroot", "apptainer", "podman", "charliecloud"]),
    "site.mounts": st.lists(texts(), max_size=2),
    "site.modules": st.lists(texts(), max_size=2),
    "site.environment": st.dictionaries(texts(), texts(), max_size=2),
    "site.options": st.dictionaries(texts(), st.one_of(SMALL, texts(), st.booleans()), max_size=2),
}
_BY_TYPE: dict[str, st.SearchStrategy[Any]] = {"bool": st.booleans(), "int": SMALL, "float": POSITIVE, "str": texts()}


def strategy_of(dotted: str, default: Any) -> st.SearchStrategy[Any]:
    """Values that the schema takes for a key."""
    return _BY_KEY[dotted] if dotted in _BY_KEY else _BY_TYPE[type(default).__name__]


def valid_values(keys: Iterable[str] | None = None) -> st.SearchStrategy[dict[str, Any]]:
    """Some of these keys (default: all there are), each with a value that it takes."""
    defaults = RunFile().model_dump(mode="json")
    wanted = list(keys) if keys is not None else all_keys()
    optional = {dotted: strategy_of(dotted, defaults[dotted.split(".")[0]][dotted.split(".")[1]]) for dotted in wanted}
    return st.fixed_dictionaries({}, optional=optional)


def overrides_of(values: Mapping[str, Any]) -> list[str]:
    """The same values as words of a command line."""
    return [f"{dotted}={render_value(value)}" for dotted, value in values.items()]
