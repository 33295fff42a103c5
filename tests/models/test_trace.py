"""A traced model has the counts of its sizes and of a real run, takes no memory, and stays as it was."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from saved_per_sample import saved_bytes_per_sample
from shardway.errors import UserError
from shardway.models.build import build_model
from shardway.models.trace import Inputs, trace_module
from shardway.plan.shapes import Architecture, Measured, measured_from_json, shape_of_section
from shardway.runfile.schema import ModelSection

SEQ, IMAGE = 24, (3, 8, 12)
SIZES: dict[str, Any] = {"dim": 16, "layers": 3, "heads": 4, "kv_heads": 2, "head_dim": 4, "ffn_dim": 32, "vocab": 40}
LATENT = {"kv_heads": 4, "kv_rank": 8, "q_rank": 6, "rope_head_dim": 2, "value_head_dim": 6}
GPT = {"norm": "layernorm", "activation": "gelu_tanh", "bias": True, "positions": "learned", "max_positions": SEQ}
TOKENS: dict[str, dict[str, Any]] = {
    "llama": {"tied": False},
    "gpt": {**GPT, "kv_heads": 4},
    "qwen": {"qkv_bias": True, "qk_norm": True},
    "latent": LATENT,
    "encoder_decoder": {"kind": "encoder_decoder"},
}
IMAGES: dict[str, dict[str, Any]] = {
    "vit": {"kind": "vit", "kv_heads": 4, "pooling": "mean"},
    "convnet": {"kind": "convnet", "channels": [8, 5]},
    "mlp": {"kind": "mlp", "hidden": [20, 30]},
}
EVERY = {**TOKENS, **IMAGES}
DROPPED = {"llama": {**TOKENS["llama"], "dropout": 0.1}}


def section(changes: dict[str, Any]) -> ModelSection:
    return ModelSection(**{**SIZES, **changes})


def build(changes: dict[str, Any]) -> tuple[nn.Module, Inputs]:
    """A reference model on meta, and two samples for it."""
    model = section(changes)
    if model.kind in ("transformer", "encoder_decoder"):
        inputs = torch.empty(2, SEQ, dtype=torch.int64, device="meta")
        return build_model(model, vocab=40, sample_shape=(SEQ,)), inputs
    return build_model(model, vocab=None, sample_shape=IMAGE), torch.empty(2, *IMAGE, device="meta")


def run_for_real(module: nn.Module, inputs: torch.Tensor) -> float:
    """Bytes that a forward pass keeps on the CPU of each sample."""
    states = {each.untyped_storage()._cdata for each in (*module.parameters(), *module.buffers())}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in states:
            kept[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = module(inputs)
    assert outputs.requires_grad
    return sum(storage.nbytes() for storage in kept.values()) / len(inputs)


@pytest.mark.parametrize("changes", EVERY.values(), ids=EVERY)
def test_parameters_and_flops_are_those_of_the_sizes(changes: dict[str, Any]) -> None:
    module, inputs = build(changes)
    traced = trace_module(module, inputs)
    shape = shape_of_section(section(changes), IMAGE if changes in IMAGES.values() else (SEQ,))
    assert traced.parameters == shape.parameters == sum(p.numel() for p in module.parameters())
    if isinstance(shape, Measured):
        assert traced.forward_flops_per_sample == shape.forward_flops_per_sample
    else:
        seq = SEQ if changes in TOKENS.values() else 6
        assert traced.forward_flops_per_sample == pytest.approx(seq * shape.forward_flops_per_token(seq, causal=False))


@pytest.mark.parametrize("name", ["convnet", "mlp"])
def test_kept_bytes_are_those_of_the_sizes(name: str) -> None:
    module, inputs = build(IMAGES[name])
    shape = shape_of_section(section(IMAGES[name]), IMAGE)
    assert isinstance(shape, Measured)
    # Statistics of batch norms are of the whole batch, and not in the computed counts.
    traced = trace_module(module, inputs)
    assert saved_bytes_per_sample(traced) == pytest.approx(saved_bytes_per_sample(shape), rel=0.02)


@pytest.mark.parametrize("changes", [*EVERY.values(), *DROPPED.values()], ids=[*EVERY, "dropout"])
def test_kept_bytes_are_those_of_a_run(changes: dict[str, Any]) -> None:
    module, inputs = build(changes)
    assert isinstance(inputs, torch.Tensor)
    traced = saved_bytes_per_sample(trace_module(module, inputs))
    module.to_empty(device="cpu").init_weights(0)  # type: ignore[operator]
    real = torch.zeros(inputs.shape, dtype=inputs.dtype)
    assert traced == pytest.approx(run_for_real(module, real), rel=0.1)


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_blocks_alike_are_one_unit(name: str) -> None:
    module, inputs = build(TOKENS[name])
    traced = trace_module(module, inputs, name="tiny")
    block, rest = traced.units
    assert (traced.name, block.name, block.count, rest.name) == ("tiny", "blocks.0 to blocks.2", 3, "rest")
    assert block.parameters == sum(p.numel() for p in module.blocks["0"].parameters())  # type: ignore[index,union-attr]
    assert traced.source == "traced with int64 [2, 24]"
    # Tokens are what does not follow the format of activations: their ids are kept by the embedding, and learned
    # positions of two samples by theirs.
    kept = 1.5 if name == "gpt" else 1.0
    assert sum(unit.count * unit.fixed_bytes for unit in traced.units) == pytest.approx(8 * SEQ * kept)


def test_counts_are_per_sample() -> None:
    module, _ = build(IMAGES["mlp"])
    two, eight = (trace_module(module, torch.empty(batch, *IMAGE)) for batch in (2, 8))
    assert two.units == eight.units


def test_a_trace_is_read_back_from_its_file() -> None:
    module, inputs = build(TOKENS["llama"])
    traced = trace_module(module, inputs)
    assert measured_from_json(traced.to_json()) == traced


# --- any module


class Mixed(nn.Module):
    """No plan: two lists (one inside another module), a shared weight, unfused attention, something cached."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU())
        self.body = nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(8, 8) for _ in range(2))})
        self.head = nn.Linear(8, 8)
        self.head.weight = self.body["layers"][0].weight  # type: ignore[index]
        self.table = torch.ones(8)
        self.cached: torch.Tensor | None = None

    def forward(self, images: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        x = self.stem(images).flatten(2) * scale
        for layer in self.body["layers"]:  # type: ignore[union-attr]
            x = layer(x)
        self.cached = x.softmax(-1) * self.table
        return self.head(x) @ self.cached.transpose(1, 2)


def test_a_module_without_a_plan() -> None:
    module, images, scale = Mixed(), torch.zeros(2, 3, 2, 4), torch.ones(())
    traced = trace_module(module, (images, scale))
    layers, rest = traced.units
    assert (layers.name, layers.count, rest.name) == ("body.layers.0 to body.layers.1", 2, "rest")
    assert (layers.parameters, rest.parameters) == (72, 108 + 8 + 8)
    assert layers.forward_flops == 2 * 4 * 8 * 8
    assert rest.forward_flops == 2 * 8 * 27 * 4 + 2 * 4 * 8 * 8 + 2 * 4 * 8 * 4
    assert traced == trace_module(module, {"images": images, "scale": scale})


def test_children_are_units_where_there_are_no_lists() -> None:
    traced = trace_module(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Tanh()), torch.zeros(3, 4))
    assert [(unit.name, unit.count) for unit in traced.units] == [("0 to 1", 2), ("2", 1)]


def test_the_module_stays_as_it_was() -> None:
    module = Mixed()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    modes = [each.training for each in module.modules()]
    trace_module(module, (torch.zeros(2, 3, 2, 4), torch.ones(())))
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert [each.training for each in module.modules()] == modes
    assert module.cached is None
    assert not any(each._forward_hooks or each._forward_pre_hooks for each in module.modules())
    assert module.head.weight is module.body["layers"][0].weight  # type: ignore[index]


def test_nothing_takes_memory() -> None:
    """A petabyte of parameters."""
    with torch.device("meta"):
        module = nn.Sequential(*(nn.Linear(2**23, 2**23, bias=False) for _ in range(4)))
    traced = trace_module(module, torch.empty(2**20, 2**23, device="meta"))
    assert traced.parameters == 4 * 2**46
    assert traced.forward_flops_per_sample == 2 * traced.parameters
    assert saved_bytes_per_sample(traced) == 4 * 4 * 2**23


def test_half_precision_keeps_half() -> None:
    single = trace_module(nn.Linear(8, 8), torch.zeros(2, 8))
    half = trace_module(nn.Linear(8, 8).bfloat16(), torch.zeros(2, 8, dtype=torch.bfloat16))
    assert (single.value_bytes, half.value_bytes) == (4, 2)
    assert saved_bytes_per_sample(half) == saved_bytes_per_sample(single, 2)


def test_scores_of_unfused_attention_are_kept_and_counted() -> None:
    class Plain(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x @ x.transpose(1, 2)).softmax(-1) @ x

    class Fused(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], is_causal=True)

    x = torch.zeros(2, 64, 4, requires_grad=True)
    plain, fused = (trace_module(nn.ModuleDict({"core": each}).core, x) for each in (Plain(), Fused()))
    assert plain.forward_flops_per_sample == fused.forward_flops_per_sample == 4 * 64 * 64 * 4
    assert saved_bytes_per_sample(plain) >= 4 * 64 * 64 > saved_bytes_per_sample(fused)


# --- refusals


class LooksAtValues(nn.Module):
    """As a mixture that sends lists of tokens does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[: int(x.sum())]


def test_a_model_that_looks_at_values_is_told() -> None:
    with pytest.raises(UserError) as told:
        trace_module(nn.Sequential(nn.Linear(4, 4), LooksAtValues()), torch.zeros(2, 4))
    message = str(told.value)
    assert message.startswith(
        "the model cannot be counted without numbers: 1 of Sequential failed with DataDependentOutput"
    )
    assert "  to do: give inputs as training does; a model that looks at values" in message


def test_a_mixture_of_the_reference_model_is_told() -> None:
    module, inputs = build({"experts": 4, "expert_dim": 8})
    with pytest.raises(UserError, match=r"blocks\.0 of Transformer failed with"):
        trace_module(module, inputs)


def test_wrong_inputs_are_told() -> None:
    with pytest.raises(UserError, match="0 of Sequential failed with RuntimeError"):
        trace_module(nn.Sequential(nn.Linear(4, 4)), torch.zeros(2, 5))
    with pytest.raises(UserError, match="it was given an input that is no tensor: bool"):
        trace_module(nn.Linear(2, 2), {"input": torch.zeros(1, 2), "flag": True})  # type: ignore[dict-item]
    with pytest.raises(UserError, match="the model cannot be counted: it was given no inputs"):
        trace_module(nn.Linear(4, 4), ())
    for empty in (torch.ones(()), torch.ones(0, 4)):
        with pytest.raises(UserError, match="it was given a first input without samples"):
            trace_module(nn.Linear(4, 4), empty)
    for odd, kind in (
        (3, "int"),
        ("ab", "str"),
        ([torch.zeros(1, 4), "a"], "str"),
        ([4], "int"),
        ({"x": None}, "NoneType"),
    ):
        with pytest.raises(UserError, match=f"it was given an input that is no tensor: {kind}"):
            trace_module(nn.Linear(4, 4), odd)  # type: ignore[arg-type]


def test_what_torch_logs_of_a_failure_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sentence is enough; torch's record of it has a traceback of forty lines."""
    logger, seen = logging.getLogger("torch._subclasses.fake_tensor"), list[logging.LogRecord]()
    handler = logging.Handler()
    handler.emit = seen.append  # type: ignore[method-assign]
    monkeypatch.setattr(logger, "disabled", False)
    logger.addHandler(handler)
    try:
        with pytest.raises(UserError, match="Linear failed with RuntimeError"):
            trace_module(nn.Linear(4, 4), torch.zeros(2, 5))
        assert (seen, logger.disabled) == ([], False)
    finally:
        logger.removeHandler(handler)


def test_a_module_that_cannot_be_copied_is_told() -> None:
    module = nn.Linear(4, 4)
    module.lock = threading.Lock()  # type: ignore[assignment]
    with pytest.raises(UserError, match=r"copy\.deepcopy of Linear failed with TypeError: cannot pickle"):
        trace_module(module, torch.zeros(2, 4))


# --- models of the library


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("qwen3", {}),
        ("qwen3_moe", {}),
        ("mixtral", {}),
        ("olmo", {"clip_qkv": None}),
    ],
)
def test_models_of_the_library(family: str, changes: dict[str, Any]) -> None:
    """bf16: the library's products of experts have no other format without numbers."""
    import transformers

    from shardway.plan.huggingface import shape_of_config
    from tiny_hf import MORE, SIZES

    config = transformers.CONFIG_MAPPING[family](**{**SIZES, **MORE[family], **changes})
    with torch.device("meta"):
        module = transformers.AutoModelForCausalLM.from_config(config).bfloat16()
    traced = trace_module(module, {"input_ids": torch.empty(2, SEQ, dtype=torch.int64, device="meta")})
    shape = shape_of_config(config.to_dict(), family)
    assert isinstance(shape, Architecture)
    assert traced.parameters == shape.parameters
    assert traced.forward_flops_per_sample == pytest.approx(SEQ * shape.forward_flops_per_token(SEQ, causal=False))
