"""What a forward and backward pass of a transformer moves beside products and attention, counted on fake tensors: the
kernels of a device without a device."""

from __future__ import annotations

import collections
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from shardway.models.transformer import Transformer, TransformerShape
from shardway.train.loss import token_cross_entropy

LAYERS, DIM, BATCH, SEQ, VOCAB = 4, 512, 4, 512, 8192
SHAPE = TransformerShape(
    layers=LAYERS, dim=DIM, heads=8, kv_heads=2, ffn_dim=2048, vocab=VOCAB, tied=False, head_dim=64
)
WEIGHTS = LAYERS * 7 + 1
"""Matrices that products read."""
VIEWS = frozenset(
    re.findall(
        r"\w+",
        "device view transpose t expand unsqueeze squeeze slice select split unbind permute as_strided detach alias "
        "_unsafe_view reshape _reshape_alias lift_fresh split_with_sizes empty empty_like empty_strided new_empty "
        "new_empty_strided chunk",
    )
)
ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
PRODUCTS = frozenset(("mm", "addmm", "bmm", "linear", ATTENTION, f"{ATTENTION}_backward"))


class Counter(TorchDispatchMode):
    """Kernels, bytes that they read and write, and casts by the shape of what is cast."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels = 0
        self.bytes = collections.Counter[str]()
        self.casts = collections.Counter[tuple[tuple[int, ...], torch.dtype]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in VIEWS:
            return result
        self.kernels += 1
        tensors = [each for each in pytree.tree_leaves((args, kwargs, result)) if isinstance(each, torch.Tensor)]
        self.bytes[name] += sum(each.numel() * each.element_size() for each in tensors)
        if name == "_to_copy":
            self.casts[tuple(args[0].shape), result.dtype] += 1
        return result

    @property
    def outside(self) -> int:
        """Bytes beside products and attention."""
        return sum(count for name, count in self.bytes.items() if name not in PRODUCTS)


@torch.library.custom_op("shardway_tests::norm", mutates_args=())
def norm(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    """A norm as one kernel, as devices have it; a CPU takes it apart."""
    return torch.empty_like(x)


@torch.library.custom_op("shardway_tests::norm_backward", mutates_args=())
def norm_backward(x: torch.Tensor, gain: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(gain)


norm.register_fake(lambda x, gain: torch.empty_like(x))
norm_backward.register_fake(lambda x, gain, grad: (torch.empty_like(x), torch.empty_like(gain)))
norm.register_autograd(
    lambda ctx, grad: norm_backward(*ctx.saved_tensors, grad),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


@pytest.fixture(name="counted", scope="module")
def _counted() -> Iterator[Counter]:
    with pytest.MonkeyPatch.context() as patch, FakeTensorMode():
        patch.setattr(F, "rms_norm", lambda x, shape, weight=None, eps=None: norm(x, weight))
        model, counter = Transformer(SHAPE), Counter()
        with counter:
            inputs, targets = (torch.randint(0, VOCAB, (BATCH, SEQ)) for _ in "xy")
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = token_cross_entropy(model(inputs), targets)
            loss.total.backward()
        yield counter


def test_each_weight_is_cast_once(counted: Counter) -> None:
    matrices = {tuple(p.shape) for p in Transformer(SHAPE).parameters() if p.dim() == 2} - {(VOCAB, DIM)}
    casts = sum(
        count for (shape, dtype), count in counted.casts.items() if dtype == torch.bfloat16 and shape in matrices
    )
    assert casts == WEIGHTS - 1
    assert counted.casts[(VOCAB, DIM), torch.bfloat16] == 1


def test_the_stream_is_cast_where_it_begins_and_nowhere_else(counted: Counter) -> None:
    """To bf16 behind the embedding, and its gradient back."""
    stream = (BATCH, SEQ, DIM)
    assert {key: count for key, count in counted.casts.items() if key[0] == stream} == {
        (stream, torch.bfloat16): 1,
        (stream, torch.float32): 1,
    }


def test_rotations_are_made_once_for_all_blocks(counted: Counter) -> None:
    width = SHAPE.head_width
    assert counted.casts[(SEQ, 1, width), torch.bfloat16] == 2
    assert counted.bytes["cos"] == 2 * 4 * SEQ * width // 2


def test_what_is_moved_does_not_grow(counted: Counter) -> None:
    """As counted on 2026-11-26. With a stream in fp32 it was 423 kernels."""
    assert counted.kernels <= 330
    assert counted.outside <= 1.96e9
