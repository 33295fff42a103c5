"""What is left to the device: what each kind of device does fast, what the other keys leave of it, what a resumed run
keeps; and that nothing of it is ever refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from planned_runs import H100 as DGX
from planned_runs import SMALL
from resolving import refusal_of, resolve_or_refuse, resolve_words, value_of
from test_rules_hold import RANKS, VALUES, text_of

from shardway.hardware.catalogue import A_CPU, DeviceFacts, facts_of_cuda, facts_of_part, load_accelerators
from shardway.resolve import DataFacts, Resolved, resolve_with_data
from shardway.resolve.draft import Settled
from shardway.resolve.request import ResolveRequest, resolve_request
from shardway.resolve.rules.formats import KEYS, choose_for


def cuda(name: str, *capability: int, no_compiler: str = "", native: bool | None = None) -> DeviceFacts:
    """A CUDA device on a machine with a compiler, unless it is said why not."""
    return replace(facts_of_cuda(name, capability or None, native), no_compiler=no_compiler)  # type: ignore[arg-type]


H100 = cuda("NVIDIA H100 80GB HBM3", 9, 0)
A100 = cuda("NVIDIA A100-SXM4-80GB", 8, 0)
V100 = cuda("Tesla V100-SXM2-32GB", 7, 0)
MI300X = facts_of_part(load_accelerators()["mi300x"])
GTX1080 = cuda("NVIDIA GeForce GTX 1080", 6, 1)
RTX = cuda("NVIDIA GeForce RTX 4070", 8, 9)
UNKNOWN = facts_of_cuda("Accelerator 9000", None)
BARE = cuda("NVIDIA H100 80GB HBM3", 9, 0, no_compiler="Triton is not installed")

FAST = {"accelerators": 8, "devices": (H100,)}
LONG = ("train.steps=1000",)


@pytest.mark.parametrize(
    ("device", "compute", "tf32", "compiled"),
    [
        (H100, "bf16", True, "blocks"),
        (A100, "bf16", True, "blocks"),
        (RTX, "bf16", True, "blocks"),
        (V100, "fp32", False, "blocks"),
        (MI300X, "bf16", False, "off"),
        (GTX1080, "fp32", False, "off"),
        (A_CPU, "fp32", False, "off"),
        (UNKNOWN, "fp32", False, "off"),
        (BARE, "bf16", True, "off"),
        (DeviceFacts("mps", "an Apple GPU"), "fp32", False, "off"),
        (cuda("NVIDIA H100 80GB HBM3", 9, 0, native=False), "fp32", True, "blocks"),
    ],
    ids=lambda value: value.name if isinstance(value, DeviceFacts) else str(value),
)
def test_what_a_device_does_fast(device: DeviceFacts, compute: str, tf32: bool, compiled: str) -> None:
    assert [choose_for(key, [device]).value for key in KEYS] == [compute, tf32, compiled]


@pytest.mark.parametrize(
    ("device", "reasons"),
    [
        (
            H100,
            [
                "NVIDIA H100 80GB HBM3 multiplies bf16 14.8 times as fast as fp32",
                "NVIDIA H100 80GB HBM3 has TF32",
                "NVIDIA H100 80GB HBM3 gains by compiled blocks",
            ],
        ),
        (
            V100,
            [
                "Tesla V100-SXM2-32GB has no bf16 products of its own",
                "Tesla V100-SXM2-32GB has no TF32",
                "Tesla V100-SXM2-32GB gains by compiled blocks",
            ],
        ),
        (RTX, ["NVIDIA GeForce RTX 4070 has bf16 products of its own"]),
        (
            UNKNOWN,
            [
                "what Accelerator 9000 multiplies fast is not known",
                "whether Accelerator 9000 has TF32 is not known",
                "what compiled blocks gain on Accelerator 9000 is not known",
            ],
        ),
        (A_CPU, ["a CPU"] * 3),
    ],
    ids=["H100", "V100", "RTX", "unknown", "CPU"],
)
def test_a_device_says_why(device: DeviceFacts, reasons: list[str]) -> None:
    assert [choose_for(key, [device]).reason for key in KEYS][: len(reasons)] == reasons
    if device is not A_CPU:
        resolved = resolve_words(*LONG, accelerators=1, devices=(device,))
        assert [resolved.origins[key] for key in KEYS][: len(reasons)] == [f"derived: {each}" for each in reasons]


def test_of_several_devices_the_weakest_decides() -> None:
    mixed = resolve_words(*LONG, accelerators=2, devices=(H100, V100, BARE))
    assert [value_of(mixed, key) for key in KEYS] == ["fp32", False, "off"]
    assert mixed.origins["precision.compute"] == "derived: Tesla V100-SXM2-32GB has no bf16 products of its own"
    assert mixed.origins["train.compile"] == "derived: Triton is not installed"


def test_what_accelerators_are_is_not_known() -> None:
    resolved = resolve_words(*LONG, accelerators=2)
    assert [value_of(resolved, key) for key in KEYS] == ["fp32", False, "off"]
    assert resolved.origins["precision.compute"] == "derived: what this accelerator multiplies fast is not known"


# --- what the other keys leave


@pytest.mark.parametrize("key", KEYS)
def test_what_is_set_holds(key: str) -> None:
    other = {"precision.compute": "fp32", "precision.tf32": "false", "train.compile": "off"}[key]
    resolved = resolve_words(f"{key}={other}", *LONG, **FAST)
    assert resolved.origins[key] == "command line"
    assert str(value_of(resolved, key)).lower() == other


def test_auto_may_be_written_out() -> None:
    words = ("precision.compute=auto", "precision.tf32=auto", "train.compile=auto")
    written = resolve_words(*words, *LONG, **FAST)
    assert written.values == resolve_words(*LONG, **FAST).values
    assert all(written.is_derived(key) for key in KEYS)


@pytest.mark.parametrize(
    ("words", "key", "value", "reason"),
    [
        (("train.steps=99",), "train.compile", "off", "compiling takes longer than it saves in 99 steps"),
        (("train.steps=1000 samples",), "train.compile", "off", "compiling takes longer than it saves in 63 steps"),
        (("train.steps=100",), "train.compile", "blocks", "NVIDIA H100 80GB HBM3 gains by compiled blocks"),
        (("train.deterministic=true",), "train.compile", "off", "train.deterministic: a compiler may choose other"),
        (("model.dropout=0.1",), "train.compile", "off", "dropout starts anew from a seed at each block"),
        (("model.experts=4",), "train.compile", "off", "experts take another number of tokens at each step"),
        (("train.engine=deepspeed",), "train.compile", "off", 'train.engine = "deepspeed" runs the model'),
        (("parallel.cp=2",), "train.compile", "off", "the ring of parallel.cp cuts each block into several graphs"),
        (("recompute.mode=budget",), "train.compile", "blocks", 'recompute.mode = "budget" is the compiler\'s'),
        (
            ("parallel.pp=2", "parallel.pp_schedule=zbv", "model.tied=false"),
            "train.compile",
            "off",
            'parallel.pp_schedule = "zbv" splits backward passes',
        ),
        (("precision.weights=bf16",), "precision.compute", "bf16", 'precision.weights = "bf16" is multiplied as it is'),
        (
            ("train.engine=deepspeed", "deepspeed.stage=1"),
            "precision.compute",
            "fp32",
            "ZeRO 1 adds bf16 gradients up in bf16, which loses small ones",
        ),
        (
            ("train.engine=deepspeed", "deepspeed.settings={bf16 = {enabled = false}}"),
            "precision.compute",
            "fp32",
            "deepspeed.settings has bf16",
        ),
        (("train.engine=deepspeed",), "precision.compute", "bf16", "NVIDIA H100 80GB HBM3 multiplies bf16"),
        (("precision.compute=fp32",), "precision.tf32", True, "NVIDIA H100 80GB HBM3 has TF32"),
    ],
    ids=str,
)
def test_what_the_other_keys_leave(words: tuple[str, ...], key: str, value: object, reason: str) -> None:
    ranks = 2 if any(word.startswith(("parallel.cp", "parallel.pp")) for word in words) else 1
    resolved = resolve_words(*words, ranks=ranks, **FAST)
    assert value_of(resolved, key) == value
    assert resolved.origins[key].startswith(f"derived: {reason}")


def test_narrow_weights_are_multiplied_as_they_are_on_a_cpu_too() -> None:
    assert value_of(resolve_words("precision.weights=bf16"), "precision.compute") == "bf16"


def test_a_folder_for_compiled_code_is_no_mistake_where_nothing_is_compiled() -> None:
    assert value_of(resolve_words("train.compile_cache=there"), "train.compile") == "off"
    told = refusal_of("train.compile_cache=there", "train.compile=off")
    assert 'train.compile_cache (command line): has no effect with train.compile = "off"' in told


def test_an_epoch_that_turns_out_short_is_not_compiled() -> None:
    resolved = resolve_words("train.steps=3 epochs", "data.kind=synthetic", **FAST)
    assert value_of(resolved, "train.compile") == "blocks"
    short = resolve_with_data(resolved, DataFacts(96, 128, 256))
    assert value_of(short, "train.compile") == "off"
    assert short.origins["train.compile"] == "derived: compiling takes longer than it saves in 18 steps"
    assert value_of(resolve_with_data(resolved, DataFacts(9600, 128, 256)), "train.compile") == "blocks"
    asked = resolve_words("train.steps=3 epochs", "data.kind=synthetic", "train.compile=blocks", **FAST)
    assert value_of(resolve_with_data(asked, DataFacts(96, 128, 256)), "train.compile") == "blocks"


def test_a_planned_machine_decides_as_its_devices_would(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[data]\nkind = "synthetic"\n')
    here = resolve_request(ResolveRequest(path)).resolved
    there = resolve_request(ResolveRequest(path), 8, 8, planned=DGX).resolved
    assert [value_of(here, key) for key in KEYS] == ["fp32", False, "off"]
    assert [value_of(there, key) for key in KEYS] == ["bf16", True, "blocks"]
    assert there.origins["precision.compute"].startswith(f"derived: {DGX.accelerator.name} multiplies bf16")


# --- never refused


DEVICES = st.lists(st.sampled_from([H100, V100, GTX1080, UNKNOWN, BARE]), max_size=2, unique=True).map(tuple)
BEFORE = st.fixed_dictionaries(
    {},
    optional={
        "precision.compute": st.sampled_from(["fp32", "bf16", "fp16", "float8"]),
        "precision.tf32": st.booleans(),
        "train.compile": st.sampled_from(["off", "blocks", "model"]),
    },
)
MORE: dict[str, st.SearchStrategy[Any]] = {
    **{key: values for key, values in VALUES.items() if key not in KEYS},
    "model.dim": st.sampled_from([64, 128]),
    "model.heads": st.sampled_from([2, 4]),
    "model.layers": st.sampled_from([4, 8]),
    "train.engine": st.sampled_from(["torch", "deepspeed"]),
    "train.steps": st.sampled_from(["10 steps", "1000 steps", "2 epochs"]),
    "train.deterministic": st.booleans(),
    "train.compile_cache": st.just("there"),
    "deepspeed.stage": st.sampled_from([1, 2, 3]),
    "deepspeed.settings": st.sampled_from([{}, {"bf16": {"enabled": False}}, {"fp16": {"enabled": True}}]),
    "precision.weights": st.sampled_from(["fp32", "bf16"]),
    "precision.reduce": st.sampled_from(["fp32", "bf16"]),
    "recompute.mode": st.sampled_from(["none", "selective", "budget", "full"]),
    "optim.name": st.sampled_from(["adamw", "sgd", "muon", "adafactor"]),
    "run.device": st.sampled_from(["auto", "cpu"]),
}
SAFE = {"precision.compute": ("fp32", "bf16"), "precision.tf32": ("false",), "train.compile": ("off", "blocks")}


@given(st.fixed_dictionaries({}, optional=MORE), RANKS, DEVICES, BEFORE)
@example({"precision.weights": "bf16"}, 1, (), {"precision.compute": "fp32"})
@example({"train.engine": "deepspeed", "deepspeed.stage": 1, "train.micro_batch": 1}, 1, (H100,), {})
@example({"parallel.pp": 2, "parallel.pp_schedule": "zbv", "model.tied": False}, 2, (H100,), {"train.compile": "model"})
@example({"recompute.mode": "budget"}, 1, (), {"train.compile": "off"})
@example({"train.compile_cache": "there"}, 1, (V100,), {"precision.tf32": True})
def test_what_is_left_open_is_never_refused(
    values: dict[str, Any], ranks: int, devices: tuple[DeviceFacts, ...], before: dict[str, Any]
) -> None:
    """Where the run is refused, it is so with whatever these keys could be set to."""
    words = [f"{dotted}={text}" for dotted, text in text_of(values).items()]
    machine = {"ranks": ranks, "accelerators": len(devices), "devices": devices, "before": before}
    left_open = resolve_or_refuse(*words, **machine)
    if isinstance(left_open, Resolved):
        assert all(left_open.is_derived(key) for key in KEYS)
        return
    words = [word for word in words if not word.startswith("train.compile_cache")]  # no mistake where it is left open
    for compute in SAFE["precision.compute"]:
        for compiled in SAFE["train.compile"]:
            settled = (f"precision.compute={compute}", "precision.tf32=false", f"train.compile={compiled}")
            assert isinstance(resolve_or_refuse(*words, *settled, **machine), str), (left_open, settled)


@given(st.sampled_from([H100, V100, GTX1080, UNKNOWN]), st.sampled_from([1, 2, 8]))
def test_an_open_layout_is_found_with_what_is_left_open(device: DeviceFacts, ranks: int) -> None:
    words = [word for word in SMALL if not word.startswith("precision.compute")]
    resolved = resolve_words(
        *words, "parallel.layout=auto", machine=DGX, ranks=ranks, accelerators=8, devices=(device,)
    )
    assert value_of(resolved, "precision.compute") == choose_for("precision.compute", [device]).value


# --- a run that goes on


def test_a_resumed_run_keeps_what_it_computed_with() -> None:
    old = {"precision.compute": "fp32", "precision.tf32": False, "train.compile": "off"}
    resolved = resolve_words(*LONG, before=old, **FAST)
    assert {key: value_of(resolved, key) for key in KEYS} == old
    assert resolved.origins["precision.compute"] == (
        'derived: as this run computed before (a new run: "bf16", NVIDIA H100 80GB HBM3 multiplies bf16 14.8 times as '
        "fast as fp32)"
    )


def test_a_resumed_run_takes_what_the_user_sets() -> None:
    resolved = resolve_words("precision.compute=bf16", before={"precision.compute": "fp32"}, **FAST)
    assert value_of(resolved, "precision.compute") == "bf16"
    assert resolved.origins["precision.compute"] == "command line"


def test_a_resumed_run_keeps_what_a_cpu_can_do() -> None:
    fast = {"precision.compute": "bf16", "precision.tf32": True, "train.compile": "blocks"}
    resolved = resolve_words(*LONG, before=fast)
    assert [value_of(resolved, key) for key in KEYS] == ["bf16", False, "off"]


def test_a_run_that_was_fast_already_says_why_it_is() -> None:
    fast = {"precision.compute": "bf16", "precision.tf32": True, "train.compile": "blocks"}
    assert resolve_words(*LONG, before=fast, **FAST).origins == resolve_words(*LONG, **FAST).origins


def test_a_short_run_that_was_compiled_stays_so() -> None:
    resolved = resolve_words("train.steps=20", before={"train.compile": "blocks"}, **FAST)
    assert value_of(resolved, "train.compile") == "blocks"
    assert value_of(resolve_with_data(resolved, DataFacts(96, 128, 256)), "train.compile") == "blocks"


# --- what a script has settled


def test_what_a_script_has_settled_stands_before_the_device() -> None:
    script = {"precision.tf32": Settled(False, "the script"), "precision.compute": Settled("fp32", "its autocast")}
    resolved = resolve_words(*LONG, settled=script, own_model=True, **FAST)
    assert [value_of(resolved, key) for key in KEYS] == ["fp32", False, "blocks"]
    assert resolved.origins["precision.compute"] == "derived: its autocast"
    assert value_of(resolve_words("precision.tf32=true", settled=script, **FAST), "precision.tf32") is True
