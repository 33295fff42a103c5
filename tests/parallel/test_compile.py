"""Compilation: what becomes a graph, alone and on two ranks, and where compiled code is kept."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from pool import ranks
from shardway.errors import UserError
from shardway.parallel.blocks import apply_compile, set_compile_cache
from small_stack import Stack, build_stack, gradients, token_batch
from speed import picked_pairs

CACHE = "TORCHINDUCTOR_CACHE_DIR"
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),  # torch's own compiler
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated"),
]


@pytest.fixture(autouse=True)
def _leaves_the_cache_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noted first, so that it is put back whatever a test or torch sets it to."""
    monkeypatch.setenv(CACHE, "")
    monkeypatch.delenv(CACHE)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """A compiler that has seen nothing, before and after."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def is_compiled(module: nn.Module) -> bool:
    return module._compiled_call_impl is not None


@pytest.mark.parametrize(
    ("mode", "model_is", "blocks_are"),
    [
        ("off", False, False),
        ("blocks", False, True),
        ("model", True, False),
    ],
)
def test_a_mode_says_what_is_compiled(mode: str, model_is: bool, blocks_are: bool) -> None:
    model = build_stack()
    names = list(model.state_dict())
    apply_compile(model, list(model.blocks), mode)
    assert is_compiled(model) == model_is
    assert {is_compiled(block) for block in model.blocks} == {blocks_are}
    assert list(model.state_dict()) == names


def test_a_model_without_blocks_is_one_block() -> None:
    model = nn.Linear(2, 2)
    apply_compile(model, [], "blocks")
    assert is_compiled(model)


def _graphs_and_errors(model: nn.Module, parts: list[nn.Module], mode: str, expected: Stack) -> tuple[int, float]:
    """Compiled graphs of one step, and the largest difference of a gradient from the model left as it is."""
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    apply_compile(model, parts, mode, counter)
    found, plain = gradients(model, token_batch()), gradients(expected, token_batch())
    return counter.frame_count, max(float((found[name] - plain[name]).abs().max()) for name in plain)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("mode", ["blocks", "model"])
def test_it_is_one_graph_and_the_same_gradients(mode: str) -> None:
    number = 10 if mode == "blocks" else 3  # more blocks than torch would compile of one function for each by itself
    model = build_stack(number)
    assert _graphs_and_errors(model, list(model.blocks), mode, build_stack(number)) == (1, 0.0)


@pytest.mark.usefixtures("fresh_compiler")
def test_blocks_of_torchs_own_classes_are_compiled_too() -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    layers = [nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True) for _ in range(2)]
    x = torch.randn(2, 4, 8, requires_grad=True)
    expected = [layer(x) for layer in layers]
    counter = CompileCounterWithBackend("aot_eager")
    apply_compile(nn.Sequential(*layers), layers, "blocks", counter)
    for layer, output in zip(layers, expected, strict=True):
        torch.testing.assert_close(layer(x), output)
    assert counter.frame_count == 1


@pytest.mark.parametrize("case", picked_pairs(["model", "blocks"], ["replicate", "shard"]), ids="-".join)
@ranks(2, timeout_s=120.0)
def test_compiled_before_it_is_replicated_or_sharded(rank: int, case: tuple[str, str]) -> None:
    """Both ranks take the same batch, so the mean of their gradients is that of one."""
    mode, way = case
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    expected = gradients(build_stack(2), token_batch())
    torch._dynamo.reset()
    model = build_stack(2)
    apply_compile(model, list(model.blocks), mode, "aot_eager")
    if way == "shard":
        for part in (*model.blocks, model):
            fully_shard(part, mesh=mesh)
    called = DistributedDataParallel(model) if way == "replicate" else model
    gradients(called, token_batch())
    for name, parameter in model.named_parameters():
        gradient = parameter.grad.full_tensor() if way == "shard" else parameter.grad
        torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-6)
    torch._dynamo.reset()


# --- where compiled code is kept


def test_a_folder_of_the_run_file_is_made_and_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE, "elsewhere")
    set_compile_cache(str(tmp_path / "a" / "b"))
    assert (tmp_path / "a" / "b").is_dir()
    assert os.environ[CACHE] == str(tmp_path / "a" / "b")


def test_auto_leaves_what_torchs_variable_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE, "elsewhere")
    set_compile_cache("auto")
    assert os.environ[CACHE] == "elsewhere"
    assert not Path("elsewhere").exists()


def test_auto_is_in_the_users_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    set_compile_cache("auto")
    assert os.environ[CACHE] == str(tmp_path / "shardway" / "compiled")


def test_the_folder_that_torch_sets_by_itself_is_no_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CACHE, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "node"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cache_dir()  # as an import of torch.distributed.pipelining does
    assert os.environ[CACHE].startswith(str(tmp_path / "node"))
    set_compile_cache("auto")
    assert os.environ[CACHE] == str(tmp_path / "shardway" / "compiled")


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"train.compile_cache: the folder .*file/a cannot be made \(Not a directory\)"):
        set_compile_cache(str(tmp_path / "file" / "a"))
    assert CACHE not in os.environ


def test_an_account_without_a_home_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setattr("shardway.places.find_home", lambda: None)
    with pytest.raises(UserError, match='"auto" needs a home folder'):
        set_compile_cache("auto")


@pytest.mark.skipif(shutil.which("g++") is None, reason="the compiler's backend for CPUs needs g++")
@pytest.mark.usefixtures("fresh_compiler")
def test_what_was_compiled_is_found_again(tmp_path: Path) -> None:
    set_compile_cache(str(tmp_path))
    hits = []
    for _ in range(2):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        layer = nn.Linear(4, 4)
        apply_compile(layer, [], "blocks")
        assert layer(torch.ones(2, 4)).shape == (2, 4)
        counters = torch._dynamo.utils.counters
        hits.append((counters["inductor"]["fxgraph_cache_hit"], counters["aot_autograd"]["autograd_cache_hit"]))
    assert hits[0] == (0, 0)
    assert sum(hits[1]) >= 1
    assert any(path.is_file() for path in tmp_path.rglob("*"))
