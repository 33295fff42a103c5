"""The calculators of workshops on large models: one line of arithmetic each, with its source.

Invariant: a rule is exactly what its source says, with its simplifications; arguments are above 0, peaks are dense.
This module must not be used by a plan, which counts the layers of a model: it is for people who check one by hand.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

_DAY = 86400.0

PF_DAY = 1e15 * _DAY
"""FLOPs of a petaflop/s-day (Brown et al., GPT-3, arXiv:2005.14165, table D.1)."""

CHINCHILLA_TOKENS = 20
"""Tokens per parameter that use compute best, roughly (Hoffmann et al., arXiv:2203.15556, table 3)."""


# --- how large a model is and what it computes


def gpt_parameters(layers: int, hidden: int, vocab: int, seq_len: int) -> float:
    """P = 12 l h² (1 + 13/12h + (V + s)/12lh) of a GPT (Narayanan et al., arXiv:2104.04473, eq. 2)."""
    return 12 * layers * hidden**2 * (1 + 13 / (12 * hidden) + (vocab + seq_len) / (12 * layers * hidden))


def gpt_step_flops(batch: int, seq_len: int, layers: int, hidden: int, vocab: int) -> float:
    """F = 96 B s l h² (1 + s/6h + V/16lh) of one step of a GPT with all activations recomputed (Narayanan et al.,
    arXiv:2104.04473, eq. 3): matrix products alone, attention not halved by its mask."""
    brackets = 1 + seq_len / (6 * hidden) + vocab / (16 * layers * hidden)
    return 96 * batch * seq_len * layers * hidden**2 * brackets


def training_flops(parameters: float, tokens: float, active: float = 1.0) -> float:
    """C = 6 N D: a product and a sum per parameter and token, forwards once and backwards twice, without attention
    (Kaplan et al., arXiv:2001.08361, section 2.1; Brown et al., GPT-3, arXiv:2005.14165, appendix D).

    `active` is the share of the parameters that a token meets: half of an encoder-decoder's, there.
    """
    return 6 * parameters * active * tokens


def training_tokens(parameters: float) -> float:
    """Tokens for which this many parameters are the best choice (Hoffmann et al., arXiv:2203.15556, table 3)."""
    return CHINCHILLA_TOKENS * parameters


# --- how long it takes


def recompute_days(parameters: float, tokens: float, gpus: int, flops_per_gpu: float) -> float:
    """8 T P / (n X), with all activations recomputed: two FLOPs more a parameter and token than C = 6 N D; X is what a
    GPU reaches, those two included (Narayanan et al., arXiv:2104.04473, eq. 4)."""
    return 8 * tokens * parameters / (gpus * flops_per_gpu) / _DAY


def utilised_days(parameters: float, tokens: float, gpus: int, peak_flops: float, mfu: float) -> float:
    """6 P D / (n · peak · MFU): model FLOPs utilisation counts no FLOP twice (Chowdhery et al., PaLM, arXiv:2204.02311,
    section 4.1, without its term for attention)."""
    return training_flops(parameters, tokens) / (gpus * peak_flops * mfu) / _DAY


def flops_utilisation(
    tokens_per_second: float, peak_flops: float, parameters: float, layers: int, attention_width: int, seq_len: int
) -> float:
    """MFU: observed tokens per second over those at peak, peak / (6 N + 12 L H Q T), both of all GPUs; attention is as
    wide as its H heads of Q together (Chowdhery et al., PaLM, arXiv:2204.02311, appendix B)."""
    return tokens_per_second * (6 * parameters + 12 * layers * attention_width * seq_len) / peak_flops


def bubble_share(stages: int, micro_batches: int, stages_per_rank: int = 1) -> float:
    """(p - 1) / (m v): time that a pipeline idles, over that in which it works (Narayanan et al., arXiv:2104.04473,
    section 2.2)."""
    return (stages - 1) / (micro_batches * stages_per_rank)


def young_interval(save_seconds: float, mtbf_seconds: float) -> float:
    """√(2 δ M): seconds between checkpoints that each take δ, with a failure every M (Young, Commun. ACM 17 (1974),
    doi:10.1145/361147.361115)."""
    return math.sqrt(2 * save_seconds * mtbf_seconds)


# --- what it keeps


@dataclass(frozen=True)
class StateRule:
    """Bytes per parameter in mixed precision, without activations."""

    weights: int
    gradients: int
    master: int
    optimizer: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.weights + self.gradients + self.master + self.optimizer


STATE_RULES: Mapping[str, StateRule] = MappingProxyType(
    {
        "adamw": StateRule(weights=2, gradients=2, master=4, optimizer=8),
        "adamw8bit": StateRule(weights=2, gradients=2, master=4, optimizer=2),
        "adafactor": StateRule(weights=2, gradients=2, master=4, optimizer=4),
        "sgd": StateRule(weights=2, gradients=2, master=4, optimizer=4),
    }
)
"""Weights and gradients in 16 bits, master weights and two moments in 32 (Rajbhandari et al., ZeRO, arXiv:1910.02054,
section 3.1). 8-bit: each moment takes one byte (Dettmers et al., arXiv:2110.02861, section 2). SGD: its momentum alone.
Adafactor: its momentum; the second moment is kept by rows and columns, next to nothing, and without momentum (Shazeer
and Stern, arXiv:1804.04235, sections 3 and 4) the 4 bytes go too."""


def state_bytes(parameters: float, optimizer: str = "adamw") -> float:
    """Bytes of weights, gradients and optimizer, one of `STATE_RULES`."""
    return parameters * STATE_RULES[optimizer].total


def layer_activation_bytes(seq_len: int, micro_batch: int, hidden: int, heads: int) -> float:
    """s b h (34 + 5 a s / h): kept by a GPT's layer in 16 bits for the backward pass, with the scores of attention
    (Korthikanti et al., arXiv:2205.05198, eq. 1)."""
    return seq_len * micro_batch * hidden * (34 + 5 * heads * seq_len / hidden)


# --- what a GPU can do


def ridge_intensity(peak_flops: float, bytes_per_second: float) -> float:
    """FLOPs per byte of memory traffic from which on a GPU can reach its peak: the ridge of the roofline (Williams et
    al., Commun. ACM 52 (2009), section 3, doi:10.1145/1498765.1498785)."""
    return peak_flops / bytes_per_second


def matmul_intensity(m: int, n: int, k: int, value_bytes: int = 2) -> float:
    """2 m n k FLOPs over the bytes of both factors and the product, each moved once (NVIDIA, Matrix Multiplication
    Background User's Guide, section 2)."""
    return 2 * m * n * k / (value_bytes * (m * k + k * n + m * n))


def roofline_flops(intensity: float, peak_flops: float, bytes_per_second: float) -> float:
    """FLOP/s that a kernel can reach at most: min(peak, intensity · bandwidth) (Williams et al., Commun. ACM 52 (2009),
    section 3, doi:10.1145/1498765.1498785)."""
    return min(peak_flops, intensity * bytes_per_second)
