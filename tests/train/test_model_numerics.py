"""What is left to the device, in whole runs: said in the first lines and in resolved.toml, kept by a resumed run, and
never laid over what a script has set or its model is made for. A CPU stands in for a device that does bf16 fast."""

from __future__ import annotations

import copy
import logging
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from pool import ranks
from runs import (
    TINY,
    layout,
    lone_rank,
    open_tiny,
    pool_ranks,
    read_column,
    read_named,
    train_tiny,
    worst_difference,
)
from shardway.hardware.catalogue import DeviceFacts
from shardway.models.build import build_model
from shardway.models.contract import ModelPlan
from shardway.parallel.blocks import apply_backend_switches, tf32_put_back
from shardway.parallel.precision import autocast_model
from shardway.resolve.draft import Settled, value_of
from shardway.resolve.request import ResolveRequest, resolve_request
from shardway.resolve.rules import formats as decided
from shardway.resolve.rules.formats import KEYS
from shardway.rundir.directory import RunDir
from shardway.runfile.schema import ModelSection, RunFile
from shardway.train.run import LiveRun
from shardway.train.session import RankReport, agree, look_here, read_tf32_of_script
from shardway.watch.words import PlainLines

FAST = DeviceFacts("cuda", "a Testium 9000", (9, 0), True, 16.0, False, "no C compiler is found")
BF16 = "a Testium 9000 multiplies bf16 16 times as fast as fp32"
CUDA = torch.device("cuda")
BF16_ROUNDING = 2**-9
"""Weights that differ in their last digits of fp32 are now and then rounded to another number of bf16."""


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """This CPU is taken for a device that multiplies bf16 fast."""
    monkeypatch.setattr(decided, "A_CPU", FAST)


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The same, and it gains by compiled blocks."""
    monkeypatch.setattr(decided, "A_CPU", replace(FAST, no_compiler=""))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))


def read_keys(directory: Path) -> dict[str, Any]:
    table = tomllib.loads(RunDir(directory).resolved_path.read_text(encoding="utf-8"))
    return {key: table[key.split(".")[0]][key.split(".")[1]] for key in KEYS}


def first_lines(directory: Path) -> list[str]:
    (start, *_) = read_named(directory, "started")[-1:]
    return PlainLines().lines(start)


# --- what is said


def test_a_run_on_a_cpu_says_what_it_computes_in(tmp_path: Path) -> None:
    train_tiny(tmp_path, lone_rank(), "train.steps=6")
    assert read_keys(tmp_path) == dict(zip(KEYS, ("fp32", False, "off"), strict=True))
    assert RunDir(tmp_path).resolved_path.read_text(encoding="utf-8").count("# derived: a CPU") == 3
    assert first_lines(tmp_path)[1] == "computes in fp32, without TF32, not compiled (a CPU)"


def test_a_run_on_a_fast_device_says_why(tmp_path: Path, fast: None) -> None:
    train_tiny(tmp_path / "left", lone_rank())
    text = RunDir(tmp_path / "left").resolved_path.read_text(encoding="utf-8")
    assert f'compute = "bf16"                         # derived: {BF16}\n' in text
    assert 'weights = "fp32"' in text
    assert first_lines(tmp_path / "left")[1] == (
        f"computes in bf16 ({BF16}), without TF32 (a Testium 9000 has no TF32), not compiled (no C compiler is found)"
    )
    train_tiny(tmp_path / "given", lone_rank(), "precision.compute=bf16")
    assert read_column(tmp_path / "left") == read_column(tmp_path / "given")


def test_what_is_set_is_said_with_its_origin(tmp_path: Path, fast: None) -> None:
    train_tiny(tmp_path, lone_rank(), "train.steps=6", "precision.compute=fp32")
    assert first_lines(tmp_path)[1].startswith("computes in fp32 (command line), without TF32")


def test_events_of_an_earlier_version_have_no_such_line(tmp_path: Path) -> None:
    train_tiny(tmp_path, lone_rank(), "train.steps=6")
    (start,) = read_named(tmp_path, "started")
    del start["numerics"]
    assert len(PlainLines().lines(start)) == 1


# --- a run that goes on

HALF = ("train.steps=10", "checkpoint.every=10 steps", "optim.schedule=constant")
WHOLE = ("checkpoint.every=10 steps", "optim.schedule=constant")


def test_a_run_that_began_in_fp32_goes_on_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train_tiny(tmp_path / "whole", lone_rank(), *WHOLE)
    train_tiny(tmp_path / "cut", lone_rank(), *HALF)
    path = RunDir(tmp_path / "cut").resolved_path
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace("# derived: a CPU", "# default"), encoding="utf-8")  # as earlier versions wrote it
    monkeypatch.setattr(decided, "A_CPU", FAST)
    train_tiny(tmp_path / "cut", lone_rank(), *WHOLE)
    assert read_column(tmp_path / "cut") == read_column(tmp_path / "whole")
    assert read_keys(tmp_path / "cut")["precision.compute"] == "fp32"
    assert first_lines(tmp_path / "cut")[1].startswith(
        f'computes in fp32 (as this run computed before (a new run: "bf16", {BF16}))'
    )
    assert read_named(tmp_path / "cut", "started")[-1]["changed"].keys() == {"train.steps"}


def test_a_run_that_goes_on_takes_what_is_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train_tiny(tmp_path, lone_rank(), *HALF)
    train_tiny(tmp_path, lone_rank(), *WHOLE, "precision.compute=bf16")
    assert read_keys(tmp_path)["precision.compute"] == "bf16"
    assert read_named(tmp_path, "started")[-1]["changed"]["precision.compute"] == ["fp32", "bf16"]


def test_a_run_that_saved_nothing_or_starts_over_is_a_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train_tiny(tmp_path / "unsaved", lone_rank(), "train.steps=6")
    assert not RunDir(tmp_path / "unsaved").checkpoint_steps()
    train_tiny(tmp_path / "saved", lone_rank(), *HALF)
    monkeypatch.setattr(decided, "A_CPU", FAST)
    for name in ("unsaved", "saved"):
        with open_tiny(tmp_path / name, lone_rank(), "train.steps=6", fresh=name == "saved") as run:
            assert run.resolved.values.precision.compute == "bf16"


@ranks(2)
def test_all_ranks_keep_what_rank_0_finds(rank: int, tmp_path: Path) -> None:
    train_tiny(tmp_path, pool_ranks(), *HALF)
    before, decided.A_CPU = decided.A_CPU, FAST
    try:
        with open_tiny(tmp_path, pool_ranks(), *WHOLE) as run:
            assert run.resolved.values.precision.compute == "fp32"
            assert run.session.precision.autocast_dtype is None
    finally:
        decided.A_CPU = before


# --- the devices of all ranks


def test_the_weakest_of_all_ranks_decides() -> None:
    resolution = resolve_request(ResolveRequest(overrides=TINY[:-3]), 2, 2)
    with_gpus = replace(resolution, resolved=replace(resolution.resolved))
    slow = replace(FAST, name="an old one", native_bf16=False)
    reports = [RankReport(FAST, {}), RankReport(slow, {}), RankReport(FAST, {})]
    agreed = agree(with_gpus, reports, {})
    assert agreed.resolved.circumstances.devices == (FAST, slow)
    assert agree(agreed, reports, {}) is agreed


def test_a_rank_asks_torch_what_its_device_can_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla V100-SXM2-32GB")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: including_emulation)
    facts = look_here(resolve_request(ResolveRequest()), CUDA).device
    assert facts is not None
    assert (facts.kind, facts.capability, facts.native_bf16, facts.has_tf32) == ("cuda", (7, 0), False, False)
    assert look_here(resolve_request(ResolveRequest()), torch.device("cpu")).device is None


# --- what a script has set


@pytest.fixture
def switches() -> Iterator[None]:
    """Torch's switches of TF32, put back."""
    yield
    torch.backends.cudnn.allow_tf32 = True
    torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize(
    ("precision", "cudnn", "tf32"),
    [("highest", True, None), ("high", True, True), ("medium", True, True), ("highest", False, False)],
)
def test_tf32_is_as_the_script_has_set_it(precision: str, cudnn: bool, tf32: bool | None, switches: None) -> None:
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.allow_tf32 = cudnn
    found = read_tf32_of_script()
    assert (found.value if found else None) == tf32
    if found:
        assert found.reason.startswith("the script has set torch's own switches (torch.get_float32_matmul_precision()")
    apply_backend_switches(RunFile(), CUDA, leaves_tf32=True)
    assert torch.get_float32_matmul_precision() == precision


def test_a_run_leaves_tf32_as_it_was(switches: None) -> None:
    """Otherwise the next run in the process would take it for what its script has set."""
    with tf32_put_back(CUDA):
        apply_backend_switches(RunFile.model_validate({"precision": {"tf32": True}}), CUDA)
        assert torch.get_float32_matmul_precision() == "high"
    assert torch.get_float32_matmul_precision() == "highest"


def test_an_autocast_of_the_script_is_the_only_one() -> None:
    requests = [ResolveRequest(overrides=("run.device=cpu",), own_model=own) for own in (True, False)]
    mine, described = map(resolve_request, requests)
    with torch.autocast("cpu", torch.bfloat16):
        report, other = (look_here(each, torch.device("cpu")) for each in (mine, described))
    assert report.script == {"precision.compute": Settled("fp32", "the script has an autocast of its own")}
    assert other.script == {}
    agreed = agree(mine, [RankReport(None, {}), report], {})
    assert agreed.resolved.origins["precision.compute"] == "derived: the script has an autocast of its own"


# --- a script's model


OURS = ModelSection(dim=16, layers=2, heads=2, head_dim=8, kv_heads=2, ffn_dim=32, vocab=32)


class Blocks(nn.Module):
    """A model with a plan that names its blocks."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Dropout(dropout)) for _ in range(2)])

    def plan(self) -> ModelPlan:
        return ModelPlan(blocks=("blocks.*",))


class Complex(nn.Linear):
    """A model with a table of rotations."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("rotations", torch.ones(4, dtype=torch.complex64))


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize(
    ("make", "dtype", "reason"),
    [
        (lambda: nn.Linear(4, 4), torch.bfloat16, BF16),
        (
            lambda: nn.Linear(4, 4).bfloat16(),
            None,
            "Linear has parameters in bfloat16 (weight) and is computed in its own formats",
        ),
        (lambda: nn.Linear(4, 4).double(), None, "Linear has parameters in float64 (weight) and is computed in"),
        (lambda: nn.Linear(4, 4, dtype=torch.complex64), None, "Linear has parameters in complex64 (weight) and is"),
        (
            lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).half()),
            None,
            "Sequential has parameters in float16 (1.weight) and is computed in",
        ),
        (Complex, None, "Complex has complex buffers (rotations) and is computed in its own formats"),
    ],
    ids=["fp32", "bf16", "fp64", "complex", "mixed", "complex buffer"],
)
def test_a_model_is_computed_in_its_own_formats(
    make: Any, dtype: torch.dtype | None, reason: str, tmp_path: Path
) -> None:
    with open_tiny(tmp_path, lone_rank()) as run:
        run.shard(make())
        assert (run.session.precision.autocast_dtype, run.session.precision.model_dtype) == (None, dtype)
        assert run.resolved.values.precision.compute == ("fp32" if dtype is None else "bf16")
        assert run.resolved.origins["precision.compute"].startswith(f"derived: {reason}")


@pytest.mark.usefixtures("fast")
def test_what_is_set_holds_for_any_model(tmp_path: Path) -> None:
    with open_tiny(tmp_path, lone_rank(), "precision.compute=bf16") as run:
        run.shard(nn.Linear(4, 4).double())
        assert run.resolved.origins["precision.compute"] == "command line"
        assert run.session.precision.autocast_dtype == torch.bfloat16


def is_compiled(model: nn.Module) -> bool:
    return any(module._compiled_call_impl is not None for module in model.modules())


@pytest.mark.filterwarnings("default")  # the compiler's own imports warn
@pytest.mark.usefixtures("compiling")
@pytest.mark.parametrize(
    ("make", "compiled", "reason"),
    [
        (Blocks, True, "a Testium 9000 gains by compiled blocks"),
        (lambda: nn.Sequential(nn.Linear(4, 4)), False, "Sequential has no plan() that names its blocks"),
        (lambda: Blocks(0.1), False, "dropout starts anew from a seed at each block"),
        (
            lambda: build_model(OURS, vocab=32, sample_shape=(12,)),
            True,
            "a Testium 9000 gains by compiled blocks",
        ),
    ],
    ids=["plan", "no plan", "dropout", "ours"],
)
def test_a_model_is_compiled_where_its_plan_names_blocks(
    make: Any, compiled: bool, reason: str, tmp_path: Path
) -> None:
    with open_tiny(tmp_path, lone_rank(), "train.steps=200") as run:
        model = run.shard(make())
        assert is_compiled(model) == compiled
        assert run.resolved.values.train.compile == ("blocks" if compiled else "off")
        assert run.resolved.origins["train.compile"] == f"derived: {reason}"


@pytest.mark.usefixtures("compiling")
def test_a_folder_that_cannot_be_made_leaves_a_run_uncompiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where no default run was trained before
    words = ("train.steps=200", "train.compile_cache=/proc/no/such")
    resolution = resolve_request(ResolveRequest(overrides=(*TINY, *words)))
    assert resolution.resolved.values.train.compile == "blocks"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("shardway.train.session._look_at", lambda device: replace(FAST, no_compiler=""))
        report = look_here(resolution, torch.device("cpu"))
    assert report.device is not None
    assert report.device.no_compiler.startswith("train.compile_cache: the folder /proc/no/such cannot be made")


def points() -> TensorDataset:
    return TensorDataset(torch.randn(64, 4, generator=torch.Generator().manual_seed(3)))


class Net(nn.Module):
    """A small model with a method beside `forward`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 1)

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.first(rows))

    def forward(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"scores": self.second(self.encode(rows))}


def plain_loss(model: nn.Module, rows: Any) -> torch.Tensor:
    """A loss that autocast on CUDA refuses, and that looks whether one is on."""
    assert not torch.is_autocast_enabled("cpu")
    scores = model(rows[0])["scores"]
    assert scores.dtype == torch.float32
    return nn.functional.binary_cross_entropy(torch.sigmoid(scores), (rows[0][:, :1] > 0).float())


def train_net(directory: Path, on: Any, *words: str, loss: Any = plain_loss) -> list[float]:
    with open_tiny(directory, on, "train.steps=6", *words) as run:
        model = run.shard(Net())
        run.optimizer(torch.optim.SGD, model, lr=0.5)
        for batch in run.steps(run.loader(points(), batch_size=8)):
            run.step(model, batch, loss)
    return read_column(directory)


@pytest.mark.usefixtures("fast")
def test_a_loss_of_a_script_is_computed_as_it_is_written(tmp_path: Path) -> None:
    """bf16 that nobody asked for is the model's alone."""
    narrow = train_net(tmp_path / "left", lone_rank())
    exact = train_net(tmp_path / "exact", lone_rank(), "precision.compute=fp32")
    assert narrow != exact
    assert worst_difference(narrow, exact) < 1e-2
    model = Net()
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(torch.ones(2, 4))["scores"].float()
    assert expected.dtype == torch.float32
    end = autocast_model(model, torch.device("cpu"), torch.bfloat16)
    assert torch.equal(model(torch.ones(2, 4))["scores"], expected)
    end()
    assert not torch.equal(model(torch.ones(2, 4))["scores"], expected)


@pytest.mark.usefixtures("fast")
def test_bf16_that_is_asked_for_is_around_the_loss_as_well(tmp_path: Path) -> None:
    def loss(model: nn.Module, rows: Any) -> torch.Tensor:
        assert torch.is_autocast_enabled("cpu")
        return model(rows[0])["scores"].float().square().mean()

    train_net(tmp_path, lone_rank(), "precision.compute=bf16", loss=loss)


def test_a_copy_of_a_model_computes_with_its_own_weights() -> None:
    model = Net()
    end = autocast_model(model, torch.device("cpu"), torch.bfloat16)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    assert copied(torch.ones(2, 4))["scores"].tolist() == [[0.0], [0.0]]
    assert copied(torch.ones(2, 4))["scores"].dtype == torch.float32
    assert bool(model(torch.ones(2, 4))["scores"].abs().sum() > 0)
    end()


def test_an_autocast_of_the_caller_holds() -> None:
    model = Net()
    with torch.autocast("cpu", torch.float16):
        expected = model(torch.ones(2, 4))["scores"]
        end = autocast_model(model, torch.device("cpu"), torch.bfloat16)
        found = model(torch.ones(2, 4))["scores"]
    end()
    assert found.dtype == torch.float16
    assert torch.equal(found, expected)


def test_a_pass_that_fails_leaves_no_autocast_behind() -> None:
    model = Net()
    autocast_model(model, torch.device("cpu"), torch.bfloat16)
    with pytest.raises(RuntimeError):
        model(torch.ones(2, 5))
    assert not torch.is_autocast_enabled("cpu")
    assert model(torch.ones(2, 4))["scores"].dtype == torch.float32


@pytest.mark.usefixtures("fast")
def test_an_error_of_a_step_says_that_its_format_is_a_default(tmp_path: Path) -> None:
    def loss(model: nn.Module, rows: Any) -> torch.Tensor:
        raise RuntimeError("Index put requires the source and destination dtypes match")

    with pytest.raises(RuntimeError) as told:
        train_net(tmp_path, lone_rank(), loss=loss)
    assert told.value.__notes__ == [
        f"precision.compute is bf16 here by default ({BF16}). If the model cannot be computed so: set "
        "precision.compute=fp32."
    ]


@ranks(2)
def test_shards_and_replicas_of_a_script_compute_as_one_rank(rank: int, tmp_path: Path) -> None:
    def loss(model: nn.Module, rows: Any) -> torch.Tensor:
        return plain_loss(model, rows) + model.encode(rows[0]).square().mean()  # type: ignore[operator]

    before, decided.A_CPU = decided.A_CPU, FAST
    try:
        alone = train_net(tmp_path / f"one-{rank}", lone_rank(), loss=loss)
        for name, words in (("replicas", layout(2, 1)), ("shards", layout(1, 2))):
            found = train_net(tmp_path / name, pool_ranks(), *words, loss=loss)
            assert worst_difference(found[:1], alone[:1]) < 1e-6, name
            assert worst_difference(found, alone) < BF16_ROUNDING, name
    finally:
        decided.A_CPU = before


@pytest.mark.usefixtures("fast")
def test_of_several_models_each_is_computed_as_it_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(logging.getLogger("shardway"), "warning", said.append)
    with open_tiny(tmp_path, lone_rank(), "train.steps=6") as run:
        first, second = run.shard(nn.Linear(4, 4)), run.shard(nn.Linear(4, 4).double(), name="second")
        for model, name in ((first, None), (second, "second")):
            run.optimizer(torch.optim.SGD, model, name=name, lr=0.1)
        for batch in run.steps(run.loader(points(), batch_size=8)):
            run.step(first, batch, lambda model, rows: model(rows[0]).square().mean())
            run.step(second, batch, lambda model, rows: model(rows[0].double()).square().mean())
        found = [each.passes.precision.model_dtype for each in run._engines.values()]
    assert found == [torch.bfloat16, None]
    assert read_keys(tmp_path)["precision.compute"] == "bf16"
    assert said == [
        "Linear alone has precision.compute = fp32: Linear has parameters in float64 (weight) and is computed in its "
        "own formats."
    ]


@pytest.mark.usefixtures("compiling")
def test_what_a_model_is_made_for_stays_however_long_the_run_is(tmp_path: Path) -> None:
    """The length that `run.steps` says comes after the model."""

    def train(run: LiveRun) -> None:
        model = run.shard(nn.Linear(4, 4).double())
        run.optimizer(torch.optim.SGD, model, lr=0.1)
        for batch in run.steps(run.loader(points(), batch_size=8), length=6):
            run.step(model, batch, lambda model, rows: model(rows[0].double()).square().mean())

    with open_tiny(tmp_path, lone_rank(), base=[word for word in TINY if not word.startswith("train.steps")]) as run:
        train(run)
    assert read_keys(tmp_path) == dict(zip(KEYS, ("fp32", False, "off"), strict=True))
    assert value_of(run.resolved.values, "precision.compute") == "fp32"
    assert "no plan()" in run.resolved.origins["train.compile"]
