"""Seconds of the operators of one layer on one rank: products, attention, and memory-bound operators.

Invariant: an operator takes the longer of its arithmetic and its memory traffic (Williams et al., Roofline, CACM 52
(2009), doi:10.1145/1498765.1498785). Messages and pipelines are priced elsewhere.

Sources: fused attention: Dao, arXiv:2307.08691, sections 3.1 and 4 (its backward pass has 2.5 times the forward FLOPs,
since scores are computed again); products are slower if rows are no multiples of 16 bytes: NVIDIA, Matrix
Multiplication Background User's Guide, section 3.1; moves of norms and activations follow from their definitions.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from shardway.plan.case import Case
from shardway.plan.machine import Machine
from shardway.plan.memory import layer_dense, layer_experts, matrix_split
from shardway.plan.shapes.architecture import AttentionShape, LayerRun, LayerShape, Matrix
from shardway.plan.time.ceilings import Ceilings

FLASH_BACKWARD_FLOPS = 2.5
HEAD_WIDTH = 128
"""Width of a head for which fused kernels are made; narrower heads use their tiles less well."""
HEAD_LOSS = 0.3
PADDED_TO = 128
"""A padded vocabulary is a multiple of this."""
CAST_BYTES = 6
"""Bytes moved to copy a number from fp32 to 16 bits, or back."""
ALIGNED_BYTES = 16
"""Bytes that tensor cores read at once; rows of other multiples take slower kernels."""

EAGER_KERNELS, FUSED_KERNELS, COMPILED_KERNELS = 45, 28, 24
"""Operators of a layer's forward pass, counted in eager GPT blocks, in blocks of fused modules, and compiled."""
SCORE_KERNELS, TENSOR_KERNELS, EXPERT_KERNELS, CAST_KERNELS = 8, 4, 30, 20
"""Operators added by unfused attention, the tensor axis, experts and casts to eight bits."""


@dataclass(frozen=True)
class PassTimes:
    """Seconds of a forward and of a backward pass."""

    forward: float
    backward: float

    def __add__(self, other: PassTimes) -> PassTimes:
        return PassTimes(self.forward + other.forward, self.backward + other.backward)


NOTHING = PassTimes(0.0, 0.0)


@dataclass(frozen=True)
class LayerSeconds:
    """Seconds of one layer and micro-batch by item; `kernels`: operators of a forward pass."""

    products: PassTimes
    attention: PassTimes
    moves: PassTimes
    kernels: int


class Operators:
    """Prices the operators of a case on a machine."""

    def __init__(self, case: Case, machine: Machine, ceilings: Ceilings) -> None:
        self.case, self.machine, self.ceilings = case, machine, ceilings

    @cached_property
    def bandwidth(self) -> float:
        """Bytes per second that memory-bound operators reach."""
        return machine_bandwidth(self.machine) * self.ceilings.memory

    @cached_property
    def rate(self) -> float:
        """FLOP/s of large products in the wider format."""
        wide = "bf16" if self.case.low_bits else self.case.precision
        return self.machine.peak(wide) * self.ceilings.matmul * self._clock

    @cached_property
    def low_rate(self) -> float:
        """FLOP/s of large products in the format of the case, if that has eight bits or less."""
        if self.case.precision == "fp4" and self.machine.accelerator.peak("fp4"):
            return self.machine.peak("fp4") * self.ceilings.matmul_fp4 * self._clock
        return self.machine.peak("fp8") * self.ceilings.matmul_low * self._clock

    @cached_property
    def _clock(self) -> float:
        return float(self.machine.power_share**self.ceilings.power)

    def layer(self, run: LayerRun) -> LayerSeconds:
        """One layer of a run."""
        tokens, seq = self.case.side_tokens(run.side), self.case.model.side_seq(run.side, self.case.seq_len)
        products, attention = NOTHING, NOTHING
        for matrix in run.layer.matrices:
            products = products + self.product(matrix, tokens)
        for each in run.layer.attentions:
            attention = attention + self._attention(each, tokens, seq)
        return LayerSeconds(products, attention, self._moves(run.layer, tokens), self._kernels(run.layer))

    def product(self, matrix: Matrix, tokens: int) -> PassTimes:
        """All products with a matrix: forward, then for the gradients of inputs and of weights."""
        split, copies, rows = matrix_split(matrix, self.case), 1.0, tokens
        if matrix.part == "experts":
            copies, rows = matrix.copies / self.case.degrees.ep, self._expert_rows(matrix, tokens)
            split = self.case.degrees.etp
        elif matrix.split == "none":
            rows = max(1, tokens // self.case.stream_split)
        outputs = max(1, matrix.outputs // split) if matrix.split == "outputs" else matrix.outputs
        inputs = max(1, matrix.inputs // split) if matrix.split == "inputs" else matrix.inputs
        if matrix.part == "head" and split > 1 and self.case.engine.pads_vocab:
            outputs = -(-outputs // PADDED_TO) * PADDED_TO
        low = self.case.low_bits and matrix.part not in ("router", "head")
        if not self._aligned(inputs, outputs):
            copies *= 1 + self.ceilings.misaligned
        back = self._gemm(rows, inputs, outputs, low) + self._gemm(inputs, outputs, rows, low)
        return PassTimes(copies * self._gemm(rows, outputs, inputs, low), copies * back)

    def _expert_rows(self, matrix: Matrix, tokens: int) -> int:
        """Tokens of one expert, from all ranks that it serves, evenly shared."""
        degrees = self.case.degrees
        shared = degrees.tp if degrees.etp == 1 else 1
        return max(1, round(tokens * matrix.met * degrees.ep / matrix.copies / shared))

    def _gemm(self, m: int, n: int, k: int, low: bool) -> float:
        """A product of m x k with k x n."""
        c, wide = self.ceilings, self.case.value_bytes
        ramp = (1 + c.matmul_ramp / k) * (1 + c.narrow_ramp / min(m, n))
        arithmetic = 2.0 * m * n * k / (self.low_rate if low else self.rate) * ramp
        traffic = (1 if low else wide) * (m * k + k * n) + wide * m * n
        return max(arithmetic, traffic / self.bandwidth)

    def _aligned(self, *sizes: int) -> bool:
        """Whether rows of these sizes fill whole units of what tensor cores read."""
        return all(size * self.case.value_bytes % ALIGNED_BYTES == 0 for size in sizes)

    def _attention(self, attention: AttentionShape, tokens: int, seq: int) -> PassTimes:
        """Scores and sums of values."""
        if not self.case.flash:
            return self._plain_attention(attention, tokens, seq)
        flops = tokens * attention.core_flops_per_token(seq, causal=True) / self.case.degrees.tp
        width = attention.qk_width / attention.heads
        ramp = 1 + self.ceilings.flash_ramp / attention.mean_span(seq, True)
        ramp *= 1 + HEAD_LOSS * max(0.0, HEAD_WIDTH / width - 1)
        part: float = getattr(self.ceilings, self.case.attention)
        forward = flops * ramp / (self._wide_peak * part)
        return PassTimes(forward, forward * FLASH_BACKWARD_FLOPS / self.ceilings.flash_backward)

    @cached_property
    def _wide_peak(self) -> float:
        wide = "bf16" if self.case.low_bits else self.case.precision
        return self.machine.peak(wide) * self._clock

    def _plain_attention(self, attention: AttentionShape, tokens: int, seq: int) -> PassTimes:
        """Batched products that ignore the mask, and passes over the scores in memory."""
        case, c = self.case, self.ceilings
        flops = tokens * attention.core_flops_per_token(seq, causal=False) / case.degrees.tp
        width = attention.qk_width // attention.heads
        products = flops / (self._wide_peak * c.batched) * (2 / 3 + 2 / 3 * 64 / width)
        products *= 1.0 if self._aligned(width) else 1 + c.misaligned_batched
        scores = tokens * attention.heads * seq / case.degrees.tp * case.value_bytes
        passes = c.scores_passes * (1 if case.engine.fused_scores else 2)
        forward = products + scores * passes / self.bandwidth
        return PassTimes(forward, 2 * forward)

    def _moves(self, layer: LayerShape, tokens: int) -> PassTimes:
        """Norms, residuals, rotations, activations, dropout, casts: forward, and twice that backward."""
        case, c = self.case, self.ceilings
        size = case.value_bytes
        stream = case.stream_bytes * c.stream * self._stream_moves(layer) / case.stream_split
        moved = tokens * (stream + size * c.gates * self._gate_moves(layer)) + CAST_BYTES * self._casts(layer, tokens)
        if case.low_bits:  # read in 16 bits, write in 8, as it is and transposed
            inputs = sum(matrix.met * self._local_inputs(matrix) for matrix in layer.matrices)
            moved += c.gates * size * tokens * inputs
        forward = moved / self.bandwidth
        return PassTimes(forward, 2 * forward)

    def _casts(self, layer: LayerShape, tokens: int) -> float:
        """Numbers copied to 16 bits if each product makes its own copies; compiled code fuses these copies."""
        case = self.case
        if not case.casts_each or case.compiled:
            return 0.0
        inputs = sum(each.input_products for each in layer.attentions) + layer.gate_products
        weights = layer_dense(layer, case) + layer_experts(layer, case) if case.casts_weights else 0.0
        return tokens * inputs * layer.hidden + weights

    def _stream_moves(self, layer: LayerShape) -> float:
        norm = 2.0 if case_fuses_norms(self.case) else self.ceilings.plain_norm
        return layer.hidden * (layer.norms * norm + 3 * (1 + len(layer.attentions)) + (1 if self.case.dropout else 0))

    def _gate_moves(self, layer: LayerShape) -> float:
        fused = self.case.engine.fused_activations or self.case.compiled
        gate = (3 if fused else 5) if layer.gated else 2
        heads = sum(2 * (each.qk_width + each.kv_width) for each in layer.attentions)
        tp = self.case.degrees.tp
        if layer.experts is None:
            return (gate * layer.ffn + heads) / tp
        mixture = layer.experts
        width = gate * (mixture.dim * mixture.per_token + mixture.shared_dim)
        routed = 8 * mixture.per_token * layer.hidden / (tp if self.case.degrees.etp == 1 else 1)
        return (width + heads) / tp + routed

    def _local_inputs(self, matrix: Matrix) -> float:
        split = matrix.split == "inputs" and matrix.part != "experts"
        return matrix.inputs / (matrix_split(matrix, self.case) if split else 1)

    def _kernels(self, layer: LayerShape) -> int:
        case = self.case
        count = EAGER_KERNELS if case.engine.eager else FUSED_KERNELS
        if case.compiled:
            count = COMPILED_KERNELS
        added = (
            (not case.flash, SCORE_KERNELS),
            (case.degrees.tp > 1, TENSOR_KERNELS),
            (layer.experts is not None, EXPERT_KERNELS),
            (case.low_bits, CAST_KERNELS),
        )
        return count + sum(kernels for present, kernels in added if present)


def case_fuses_norms(case: Case) -> bool:
    """Whether a norm is one kernel."""
    return case.engine.fused_norms or case.compiled


def machine_bandwidth(machine: Machine) -> float:
    """Bytes per second of an accelerator's memory on paper."""
    return machine.accelerator.memory_bandwidth_bytes_per_s or 1e12
