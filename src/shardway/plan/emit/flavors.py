"""The models that torchtitan has of its own, by the sizes that a plan knows.

Invariant: a flavor is found only where hidden size, layers, heads, vocabulary and the width of its feed-forward layers
(of its experts, where it has any) are all the same. This module must not guess a nearest one.

Source: the registries of torchtitan 0.2.2 and 0.3.0 (torchtitan/models/*/__init__.py, config_registry.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from shardway.plan.emit.sizes import read_sizes
from shardway.plan.shapes.architecture import Architecture


@dataclass(frozen=True)
class Flavor:
    """A name of torchtitan's: the model, the flavor, and since 0.3 the function of its config_registry ("" none)."""

    model: str
    name: str
    function: str = ""


@dataclass(frozen=True)
class _Key:
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    """0 with latent attention, where it has no meaning."""
    width: int
    experts: int
    vocab: int


def _llama(*sizes: int) -> _Key:
    hidden, layers, heads, width = sizes
    return _Key(hidden, layers, heads, 8, width, 0, 128256)


def _qwen(hidden: int, layers: int, heads: int, width: int, kv_heads: int = 8, experts: int = 0) -> _Key:
    return _Key(hidden, layers, heads, kv_heads, width, experts, 151936)


_FLAVORS = {
    _llama(4096, 32, 32, 14336): Flavor("llama3", "8B", "llama3_8b"),
    _llama(8192, 80, 64, 28672): Flavor("llama3", "70B", "llama3_70b"),
    _llama(16384, 126, 128, 53248): Flavor("llama3", "405B", "llama3_405b"),
    _qwen(1024, 28, 16, 3072): Flavor("qwen3", "0.6B", "qwen3_0_6b"),
    _qwen(2048, 28, 16, 6144): Flavor("qwen3", "1.7B", "qwen3_1_7b"),
    _qwen(2560, 36, 32, 9728): Flavor("qwen3", "4B"),
    _qwen(4096, 36, 32, 12288): Flavor("qwen3", "8B"),
    _qwen(5120, 40, 40, 17408): Flavor("qwen3", "14B", "qwen3_14b"),
    _qwen(5120, 64, 64, 25600): Flavor("qwen3", "32B", "qwen3_32b"),
    _qwen(2048, 48, 32, 768, 4, 128): Flavor("qwen3", "30B-A3B", "qwen3_30b_a3b"),
    _qwen(4096, 94, 64, 1536, 4, 128): Flavor("qwen3", "235B-A22B"),
    _Key(2048, 27, 16, 0, 1408, 64, 102400): Flavor("deepseek_v3", "16B", "deepseek_v3_16b"),
    _Key(5120, 60, 128, 0, 1536, 160, 102400): Flavor("deepseek_v3", "236B"),
    _Key(7168, 61, 128, 0, 2048, 256, 129280): Flavor("deepseek_v3", "671B", "deepseek_v3_671b"),
}


def find_flavor(model: Architecture) -> Flavor | None:
    """The flavor of these sizes, where torchtitan has one."""
    sizes = read_sizes(model)
    attention, experts = sizes.layer.attention, sizes.experts
    key = _Key(
        hidden=model.hidden,
        layers=sizes.count,
        heads=attention.heads,
        kv_heads=0 if attention.latent else attention.kv_heads,
        width=experts.dim if experts else sizes.ffn,
        experts=experts.count if experts else 0,
        vocab=model.vocab,
    )
    return _FLAVORS.get(key)
