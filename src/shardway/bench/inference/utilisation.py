"""How far a figure is from what the device can do: MBU and MFU against peaks that were measured, where there are some.

MBU (model bandwidth utilisation): bytes that a decode step has to read, over its time and the bandwidth of a copy. A
step reads every weight that its tokens meet once, and the keys and values of every sequence (Databricks, LLM Inference
Performance Engineering, 2023; gpt-fast's "Bandwidth achieved"). MFU: the FLOP of the model over time and the best
product.

Invariants:
- FLOP and bytes are those of the planner's shape of the model; a model without a shape has none, and its shares are
  None. Nothing is guessed of a device: without a measured or a rated peak a share is None.
- Where peaks are from stands beside them: measured here, [measured] of a site, or rated (the catalogue).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardway.hardware.catalogue import DTYPES, Dtype, find_accelerator
from shardway.plan.shapes import Architecture

if TYPE_CHECKING:
    from shardway.bench.roofline import RoofCeilings

BYTES_OF_FORMAT: Mapping[str, float] = {
    "fp32": 4.0,
    "tf32": 4.0,
    "bf16": 2.0,
    "fp16": 2.0,
    "fp8": 1.0,
    "int8": 1.0,
    "int4": 0.5,
}
"""Bytes of a weight by the name of its format."""


@dataclass(frozen=True)
class DecoderWork:
    """What a decoder computes and reads: its shape, the bytes of a weight, and of a key or value that is kept."""

    shape: Architecture
    weight_bytes: float
    kv_bytes: float

    def count_prefill_flops(self, batch: int, length: int) -> float:
        """Of reading prompts of `length` tokens; the output layer has only the last token of each."""
        runs = self.shape.runs
        each = sum(
            run.count * (run.layer.matmul_flops_per_token + run.layer.core_flops_per_token(length, True))
            for run in runs
        )
        return batch * (length * each + self._count_head_flops())

    def count_decode_flops(self, batch: int, context: int) -> float:
        """Of one step that adds a token to each sequence, which then has `context` tokens."""
        total = 0.0
        for run in self.shape.runs:
            attention = run.layer.attention
            span = min(attention.window or context, context)
            scores = 2 * span * (attention.qk_width + attention.value_width)
            total += run.count * (run.layer.matmul_flops_per_token + scores)
        return batch * (total + self._count_head_flops())

    def count_decode_bytes(self, batch: int, context: int) -> float:
        """Bytes that such a step has to read. Of experts those that some token of the batch is expected to meet, if
        each choice is as likely: 1 - (1 - met / copies)^batch of them."""
        weights = float(self.shape.head.inputs * self.shape.head.outputs)
        values = 0.0
        for run in self.shape.runs:
            for each in run.layer.matrices:
                part = 1.0 if each.copies == 1 else 1 - (1 - each.met / each.copies) ** batch
                weights += run.count * part * each.parameters
            weights += run.count * run.layer.norm_parameters
            attention = run.layer.attention
            values += run.count * min(attention.window or context, context) * attention.kv_width
        return weights * self.weight_bytes + batch * values * self.kv_bytes

    def _count_head_flops(self) -> float:
        return sum(each.flops_per_token for each in (*self.shape.before_head, self.shape.head))


@dataclass(frozen=True)
class Peaks:
    """FLOP/s in the format of the products, and bytes a second, of all devices together. `basis`: "measured" or
    "rated"; `source`: where exactly."""

    flops_per_s: float | None
    bytes_per_s: float | None
    basis: str
    source: str


def choose_peaks(ceilings: RoofCeilings | None, device: str, dtype: str, devices: int) -> Peaks | None:
    """The measured ceilings where there are some, else what the catalogue rates the device at; None where it has no
    such device."""
    if ceilings is not None:
        return Peaks(devices * ceilings.peak(dtype), devices * ceilings.bytes_per_s, "measured", ceilings.source)
    part = find_accelerator(device)
    if part is None:
        return None
    known: dict[str, Dtype] = {name: name for name in DTYPES}
    flops = part.peak(known[dtype]) if dtype in known else None
    memory = part.memory_bandwidth_bytes_per_s
    return Peaks(
        None if flops is None else devices * flops,
        None if memory is None else devices * memory,
        "rated",
        f"the catalogue's {part.name}, which no program reaches",
    )


def rate_one_batch(work: DecoderWork | None, peaks: Peaks | None, figures: Mapping[str, Any]) -> dict[str, Any]:
    """MFU of the prefill, MFU and MBU of the median decode step, whose context is the prompt and half of the output."""
    batch, read, write = (figures[name] for name in ("batch_size", "input_len", "output_len"))
    prefill_s, decode_s = figures["prefill_latency"], figures["median_decode_latency"]
    context = read + write // 2
    known = work is not None and peaks is not None
    found: dict[str, Any] = dict.fromkeys(("prefill_mfu", "decode_mfu", "decode_mbu"))
    if work is not None and peaks is not None:
        found["prefill_mfu"] = _share(work.count_prefill_flops(batch, read), prefill_s, peaks.flops_per_s)
        found["decode_mfu"] = _share(work.count_decode_flops(batch, context), decode_s, peaks.flops_per_s)
        found["decode_mbu"] = _share(work.count_decode_bytes(batch, context), decode_s, peaks.bytes_per_s)
    return found | describe_peaks(peaks if known else None)


def rate_throughput(
    work: DecoderWork | None, peaks: Peaks | None, lengths: list[tuple[int, int]], latency_s: float
) -> dict[str, Any]:
    """MFU of requests with (input, output) tokens over the time of all. Which steps read the weights is the engine's
    matter, so there is no MBU."""
    if work is None or peaks is None:
        return {"mfu": None, **describe_peaks(None)}
    flops = 0.0
    for read, written in lengths:
        flops += work.count_prefill_flops(1, read)
        flops += max(0, written - 1) * work.count_decode_flops(1, read + written // 2)
    return {"mfu": _share(flops, latency_s, peaks.flops_per_s), **describe_peaks(peaks)}


def describe_peaks(peaks: Peaks | None) -> dict[str, Any]:
    """The peaks as fields of a row."""
    return {
        "peak_flops_per_s": peaks.flops_per_s if peaks else None,
        "peak_bytes_per_s": peaks.bytes_per_s if peaks else None,
        "peaks": peaks.basis if peaks else "n/a",
        "peaks_source": peaks.source if peaks else "n/a",
    }


def _share(amount: float, seconds: float | None, peak: float | None) -> float | None:
    return amount / seconds / peak if seconds and peak else None
