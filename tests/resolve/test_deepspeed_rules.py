"""What goes with train.engine = "deepspeed", in which words the rest is refused, and the ds_config.json of a run."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from resolving import refusal_of, resolve_words, value_of

from shardway.errors import UserError
from shardway.resolve.rules.deepspeed import OTHERWISE_DECIDED, find_conflicts, render_settings, resolve_ds_config
from shardway.runfile.load import load_run

ZERO = "train.engine=deepspeed"
NVME = ("deepspeed.stage=3", "deepspeed.nvme_path=/local")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("parallel.dp_shard=2", "parallel.dp_replicate=1"), 'dp_shard (command line): 2: with train.engine = "'),
        (("parallel.dp_shard=auto",), "parallel.dp_shard (derived: 2 ranks): 2: with train.engine"),
        (("parallel.tp=2",), "the axes do not split the model, ZeRO does\n      allowed: 1\n      to do: let"),
        (("parallel.pp=2",), "parallel.pp (command line): 2: with train.engine"),
        (("parallel.cp=2",), "parallel.cp (command line): 2: with train.engine"),
        (
            ("train.global_batch=[[0, 8], [99, 16]]",),
            "8 samples, 16 from position 99 on: DeepSpeed takes steps of one size\n"
            "      allowed: one number of samples\n"
            '      to do: set train.global_batch = 16, or train.engine = "torch"',
        ),
        (("optim.name=muon",), '"muon" needs the shapes of weights, and ZeRO hands it flat parts of them'),
        (("optim.name=adafactor",), '"adafactor" needs the shapes'),
        (("optim.name=adamw8bit",), '"adamw8bit" needs the shapes'),
        (("optim.state_dtype=bf16",), 'has no effect with train.engine = "deepspeed"'),
        (("parallel.compress=fp16",), 'has no effect with train.engine = "deepspeed"'),
        (("precision.compute=float8", "precision.float8_emulate=true"), '"float8" is not for train.engine = "deepsp'),
        (("precision.compute=bf16", "precision.weights=bf16"), "ZeRO shards an fp32 copy of the weights"),
        (("precision.reduce=bf16",), '"bf16": gloo does not add bf16 up'),
        (
            ("precision.compute=bf16", "deepspeed.stage=1", "train.micro_batch=2"),
            "1 would add the bf16 gradients of 4 micro-batches up in bf16",
        ),
        (("deepspeed.stage=3", "train.compile=model"), '"model": ZeRO 3 gathers weights between modules'),
        (("deepspeed.offload_params=cpu",), '"cpu": ZeRO 2 does not shard weights'),
        (("deepspeed.offload_optimizer=nvme", "deepspeed.nvme_path=/x"), '"nvme": ZeRO 2 keeps optimizer states'),
        (("deepspeed.stage=3", "deepspeed.offload_optimizer=nvme"), "deepspeed.nvme_path (default): is not set"),
        (("checkpoint.local_every=9 steps", "checkpoint.local_dir=/x"), "DeepSpeed writes its files into one folder"),
        (("deepspeed.nvme_path=/x",), "has no effect: nothing is offloaded to nvme"),
        (("deepspeed.settings={zero_optimization={stage=3}}",), "zero_optimization.stage = 3, but the other"),
        (("deepspeed.settings={gradient_clipping=2.0}",), "gradient_clipping = 2.0, but the other keys"),
    ],
)
def test_what_is_refused(words: tuple[str, ...], told: str) -> None:
    assert told in refusal_of(ZERO, *words, ranks=2)


@pytest.mark.parametrize(("value", "told"), [("3", "3 is not a table"), ("{a = nan}", "what JSON has no form for")])
def test_settings_are_a_table_that_json_can_hold(value: str, told: str) -> None:
    with pytest.raises(UserError, match=told):
        load_run(None, (f"deepspeed.settings={value}",))


@pytest.mark.parametrize("name", OTHERWISE_DECIDED)
def test_settings_that_shardway_decides_are_refused(name: str) -> None:
    told = refusal_of(ZERO, f"deepspeed.settings={{{name} = {{a = 1}}}}")
    assert f"deepspeed.settings (command line): {name}: {OTHERWISE_DECIDED[name]} decides it" in told


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("deepspeed.stage=3", "deepspeed.offload_optimizer=cpu", "deepspeed.offload_params=cpu"),
        (*NVME, "deepspeed.offload_params=nvme"),
        ("precision.compute=bf16", "train.micro_batch=2"),
        ("precision.compute=bf16", "deepspeed.stage=1"),
        ("deepspeed.settings={zero_optimization={stage=2, overlap_comm=true}}",),
        ("optim.name=sgd",),
        ("deepspeed.stage=3", "train.compile=blocks"),
        ("train.compile=model",),
        ("model.kind=convnet", "data.kind=synthetic"),
    ],
)
def test_what_goes(words: tuple[str, ...]) -> None:
    assert value_of(resolve_words(ZERO, *words, ranks=2), "parallel.dp_replicate") == 2


def test_a_key_of_deepspeed_is_refused_without_it() -> None:
    assert 'has no effect with train.engine = "torch"' in refusal_of("deepspeed.stage=3")


def config(*words: str, **circumstances: Any) -> dict[str, Any]:
    return resolve_ds_config(resolve_words(ZERO, *words, **circumstances))


def test_the_settings_of_a_run() -> None:
    words = ("train.global_batch=64", "train.micro_batch=8", "optim.clip=0.5", "parallel.bucket=40MiB")
    assert config(*words, ranks=2) == {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 10 * 2**20},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
    }


def test_what_is_offloaded() -> None:
    words = (*NVME, "deepspeed.offload_optimizer=nvme", "deepspeed.offload_params=cpu")
    zero = config(*words)["zero_optimization"]
    assert zero["offload_optimizer"] == {"device": "nvme", "pin_memory": False, "nvme_path": "/local"}
    assert zero["offload_param"] == {"device": "cpu", "pin_memory": False}
    assert config("deepspeed.offload_optimizer=cpu", "run.device=cuda", accelerators=1)["zero_optimization"][
        "offload_optimizer"
    ] == {"device": "cpu", "pin_memory": True}


def test_formats() -> None:
    assert config("precision.compute=bf16")["bf16"] == {"enabled": True}
    assert config("precision.compute=fp16")["fp16"] == {"enabled": True, "loss_scale": 1.0}
    assert config("precision.compute=bf16", "deepspeed.stage=1")["data_types"] == {"grad_accum_dtype": "bf16"}
    assert config("precision.reduce=bf16", "run.device=cuda", accelerators=1)["communication_data_type"] == "bf16"
    assert config("optim.clip=off")["gradient_clipping"] == 0.0


def test_other_settings_lie_below() -> None:
    made = config("deepspeed.settings={aio={block_size=4096}, zero_optimization={sub_group_size=9, stage=2}}")
    assert made["aio"] == {"block_size": 4096}
    assert made["zero_optimization"] == {"stage": 2, "reduce_bucket_size": 25 * 2**20 // 4, "sub_group_size": 9}


def test_the_text_is_json() -> None:
    resolved = resolve_words(ZERO, "deepspeed.settings={steps_per_print=5}")
    assert json.loads(render_settings(resolve_ds_config(resolved))) == resolve_ds_config(resolved)


def test_settings_survive_the_resolved_file(tmp_path: Any) -> None:
    resolved = resolve_words(ZERO, 'deepspeed.settings={a={b=[1, 2.5, "x"], "c d"=true}}')
    (tmp_path / "again.toml").write_text(resolved.render())
    assert load_run(tmp_path / "again.toml").values.deepspeed == resolved.values.deepspeed


TREES = st.recursive(
    st.integers(0, 2), lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3), max_leaves=8
).filter(lambda tree: isinstance(tree, dict))


@given(TREES, TREES)
def test_conflicts_are_the_leaves_that_differ(own: dict[str, Any], other: dict[str, Any]) -> None:
    found = {name for name, _, _ in find_conflicts(own, other)}
    assert {name for name, _, _ in find_conflicts(other, own)} == found
    assert list(find_conflicts(own, own)) == []
    for name in found:
        mine, theirs = own, other
        for part in name.split("."):
            mine, theirs = mine[part], theirs[part]
        assert mine != theirs
