"""One published row as a case that the planner can price: model, layout, machine, and what had to be assumed.

Invariant: reads input columns alone; a column that holds a measurement is never looked at. What a row does not say is
filled in by rules that hold for every row of that kind, and is listed. This module must not know a source's name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace

from shardway.hardware.catalogue import load_accelerators
from shardway.plan.case import AttentionKernel, Case, Degrees, Precision, Recompute
from shardway.plan.engines import Engine, find_engine
from shardway.plan.machine import Machine
from shardway.plan.shapes.architecture import Architecture, LayerRun
from shardway.plan.shapes.layer import Attention, Experts, Latent, LayerShape

Row = Mapping[str, str]

GPUS = {
    "V100-SXM2-32GB": "v100-sxm2-32gb",
    "V100-SXM2-16GB": "v100-sxm2-16gb",
    "A100-SXM-40GB": "a100-sxm4-40gb",
    "A100-SXM-80GB": "a100-sxm4-80gb",
    "A100-SXM(memory?)": "a100-sxm4-80gb",
    "Ampere-80GB(unnamed)": "a100-sxm4-80gb",
    "A100-PCIe-80GB": "a100-pcie-80gb",
    "A100-PCIe-40GB": "a100-pcie-40gb",
    "H100-SXM-80GB": "h100-sxm5-80gb",
    "H100-PCIe-80GB": "h100-pcie-80gb",
    "H100-SXM-96GB-HBM2e-500W": "h100-sxm5-96gb",
    "H200-SXM": "h200-sxm-141gb",
    "H800-SXM": "h800-sxm5-80gb",
    "GH200": "gh200-96gb",
    "B200-SXM": "b200-sxm-180gb",
    "B200-SXM(power limited)": "b200-sxm-180gb",
    "B300-SXM": "b300-sxm-288gb",
    "GB200": "gb200",
    "GB300": "gb300",
    "MI250X(GCD)": "mi250x-gcd",
    "MI300X": "mi300x",
    "MI325X": "mi325x",
    "MI350X": "mi350x",
    "MI355X": "mi355x",
}
"""Names in the rows -> keys of the catalogue."""

NETWORK = {"v100": 12.5e9, "a100": 25e9, "h": 50e9, "gh200": 25e9, "b": 50e9, "gb": 100e9, "mi": 50e9}
"""Bytes per second and accelerator of the vendor's own node of that generation, where a row does not say."""


class Missing(Exception):
    """A row lacks something that no rule can fill in."""


@dataclass(frozen=True)
class Question:
    """A row as the planner sees it; `open` names what the planner itself has to choose."""

    case: Case
    machine: Machine
    open: tuple[str, ...]
    assumed: tuple[str, ...]


def read_question(row: Row) -> Question:
    """Raises Missing where a row cannot be priced."""
    reader = _Reader(row)
    return Question(reader.case(), reader.machine(), tuple(reader.open), tuple(reader.assumed))


class _Reader:
    def __init__(self, row: Row) -> None:
        self.row = row
        self.open: list[str] = []
        self.assumed: list[str] = []
        self.extra = json.loads(row.get("extra") or "{}")

    def number(self, column: str, default: int | None = None) -> int:
        text = (self.row.get(column) or "").strip()
        if text:
            return int(float(text))
        if default is None:
            raise Missing(f"the row has no {column}")
        return default

    def flag(self, column: str) -> bool:
        return self.row.get(column, "") == "1"

    def model(self) -> Architecture:
        hidden, layers, heads = self.number("hidden"), self.number("layers"), self.number("heads")
        arch = self.row.get("arch", "")
        gated = self.flag("glu")
        attention = Attention(
            heads=heads,
            kv_heads=self.number("kv_heads", heads),
            head_dim=self.number("head_dim", hidden // heads),
            latent=_latent(hidden) if arch == "moe-mla" else None,
            bias=arch in ("gpt", "neox"),
            output_bias=arch in ("gpt", "neox"),
        )
        plain = LayerShape(
            hidden=hidden,
            attention=attention,
            ffn=self.number("ffn", 4 * hidden),
            gated=gated,
            ffn_bias=arch in ("gpt", "neox"),
            norm_bias=arch in ("gpt", "neox"),
        )
        runs = [LayerRun(plain, layers)]
        if self.row.get("n_experts"):
            dense = min(self.number("dense_layers", 0), layers - 1)
            experts = Experts(
                count=self.number("n_experts"),
                per_token=self.number("topk", 2),
                dim=self.number("moe_ffn", plain.ffn),
                shared_dim=self.number("shared_ffn", 0),
            )
            mixed = replace(plain, experts=experts)
            runs = [LayerRun(plain, dense)] * bool(dense) + [LayerRun(mixed, layers - dense)]
        return Architecture(
            name=self.row.get("model") or "model",
            hidden=hidden,
            runs=tuple(runs),
            vocab=self.number("vocab", 50304),
            tied=self.row.get("tied", "") != "0",
            positions=self.number("seq") if arch == "gpt" else 0,
            final_norm_parameters=hidden * (2 if arch in ("gpt", "neox") else 1),
        )

    def degrees(self) -> Degrees:
        gpus = self.number("n_gpus")
        tp, pp, cp = self.number("tp", 1), self.number("pp", 1), self.number("cp", 1)
        data = self.number("dp", max(1, gpus // (tp * pp * cp)))
        zero = self.zero()
        shards = self.number("dp_shard", data if zero else 1) if zero else 1
        if data % shards:
            shards = data
        if zero == 0:
            return Degrees(
                dp_replicate=1, dp_shard=data, tp=tp, pp=pp, cp=cp, ep=self.number("ep", 1), etp=self.expert_split(tp)
            )
        return Degrees(
            dp_replicate=data // shards,
            dp_shard=shards,
            tp=tp,
            pp=pp,
            cp=cp,
            ep=self.number("ep", 1),
            etp=self.expert_split(tp),
        )

    def expert_split(self, tp: int) -> int:
        return self.number("etp", 1) if self.row.get("n_experts") else 1

    def zero(self) -> int:
        return self.number("zero_stage", 0)

    def engine(self) -> Engine:
        framework, year = self.row.get("framework", "").lower(), self.number("year", 2024)
        if "zero-3" in framework:
            return find_engine("deepspeed")
        if "scaling" in framework:
            return self._kernels(find_engine("scaling"))
        if "deepspeed" in framework or "neox" in framework:
            return self._kernels(find_engine("megatron-deepspeed"))
        if "fsdp1" in framework:
            return find_engine("fsdp1")
        if "torchtitan" in framework:
            return find_engine("torchtitan")
        if "fsdp2" in framework or "fsdp" in framework or "litgpt" in framework or "olmo" in framework:
            return find_engine("fsdp2")
        if "nanotron" in framework:
            return find_engine("nanotron")
        if "nemo" in framework or "mlperf" in framework or "bridge" in framework:
            return find_engine("nemo")
        return find_engine("megatron-2021" if year < 2023 and "megatron" in framework else "megatron")

    def _kernels(self, engine: Engine) -> Engine:
        """Gated models came with unfused norms and activations, unless the row says that they had kernels."""
        kernel = self.extra.get("kernel", "") + self.row.get("notes", "")
        gated = self.flag("glu")
        return replace(
            engine,
            fused_norms=not gated or "RMS kernel" in kernel,
            fused_activations=not gated,
            fused_scores="torch" not in kernel,
        )

    def precision(self) -> Precision:
        text, gpu = self.row.get("precision", "").lower(), self.row.get("gpu", "")
        if "fp4" in text:
            return "fp4" if gpu.startswith(("B", "GB", "MI35")) else "fp8"
        if "mx" in text and "fp8" in text:
            return "mxfp8"
        if "fp8" in text or "float8" in text:
            return "fp8"
        if "fp16" in text or "16-bit" in text:
            return "fp16"
        if text == "fp32":
            return "fp32"
        if not text:
            self.assumed.append("precision bf16")
        return "bf16"

    def recompute(self) -> Recompute:
        text = self.row.get("recompute", "").lower()
        if text.startswith("full"):
            return "full"
        if "per-op" in text:
            return "operators"
        if text.startswith("selective"):
            return "selective"
        if not text:
            self.open.append("recompute")
        return "none"

    def attention(self, year: int) -> AttentionKernel:
        """Which kernels there were when it was measured, where the row does not name one."""
        told = self.row.get("flash_attn", "")
        if told == "0" or (not told and year < 2023):
            return "plain"
        kernel, engine = self.extra.get("kernel", ""), self.engine()
        if "attentionv1" in kernel or (engine.name == "fsdp1" and year <= 2023) or year <= 2022:
            return "flash1"
        return "flash3" if engine.name in ("megatron", "nemo") and year >= 2023 else "flash2"

    def case(self) -> Case:
        degrees = self.degrees()
        batch = self.number("gbs", 0)
        if not batch:
            raise Missing("the row has no gbs")
        if not self.row.get("mbs"):
            self.open.append("micro_batch")
        micro = self.number("mbs", 1)
        schedule = self.extra.get("schedule", "").lower()
        if degrees.pp > 1 and not self.row.get("vpp") and not schedule and not self.row.get("mbs"):
            self.open.append("stages_per_rank")
        stages = self.number("vpp", 2 if "interleaved" in schedule else 1) if degrees.pp > 1 else 1
        if degrees.pp > 1 and not self.row.get("mbs") and self.engine().passes_per_stage:
            self.open.remove("micro_batch")
            micro = max(1, batch // degrees.data // (degrees.pp * stages))
            self.assumed.append("as many micro-batches as there are stages")
        year = self.number("year", 2024)
        attention = self.attention(year)
        arch = self.row.get("arch", "")
        model = self.model()
        if len(model.layers) < degrees.pp * stages:
            stages = 1
        if batch % (degrees.data * micro):
            batch = max(1, round(batch / (degrees.data * micro))) * degrees.data * micro
            self.assumed.append(f"a global batch of {batch}")
        sequence = self.row.get("sp", "") == "1"
        return Case(
            model=model,
            seq_len=self.number("seq"),
            global_batch=batch,
            micro_batch=micro,
            degrees=degrees,
            precision=self.precision(),
            engine=self.engine(),
            zero=self.zero(),
            sequence=sequence,
            recompute=self.recompute(),
            reshard=degrees.pp == 1,
            attention=attention,
            dropout=arch == "gpt" and attention == "plain",
            compiled=self.flag("compile"),
            schedule="interleaved" if stages > 1 else "1f1b",
            stages_per_rank=stages,
            fused_loss=bool(self.extra.get("ce_fusion", False)),
            async_tensor="async" in self.row.get("overlap", "").lower(),
        )

    def machine(self) -> Machine:
        gpu = self.row.get("gpu", "")
        key = GPUS.get(gpu)
        accelerators = load_accelerators()
        if key is None or key not in accelerators:
            raise Missing(f'the accelerator "{gpu}" is not known')
        accelerator = accelerators[key]
        per_node = self.number("gpus_per_node", 8)
        gbps = self.row.get("internode_gbps_per_gpu", "")
        network = float(gbps) / 8 * 1e9 if gbps else _usual_network(key)
        if not gbps:
            self.assumed.append(f"{network * 8 / 1e9:g} Gb/s per accelerator between nodes")
        link, peer = _links(accelerator.link)
        return Machine(
            name=gpu,
            accelerator=accelerator,
            per_node=per_node,
            link=link,
            peer=peer,
            network=network,
            domain=72 if key.startswith("gb") else per_node,
            memory_bytes=accelerator.memory_bytes or 80 * 10**9,
        )


def _links(key: str | None) -> tuple[float, float]:
    from shardway.hardware.catalogue import load_links

    link = load_links().get(key or "nvlink4")
    if link is None:
        return 450e9, 450e9
    peer = link.peer_bandwidth_bytes_per_s or link.bandwidth_bytes_per_s or 450e9
    return link.bandwidth_bytes_per_s or peer * 7, peer


def _usual_network(key: str) -> float:
    return next(
        rate for prefix, rate in sorted(NETWORK.items(), key=lambda item: -len(item[0])) if key.startswith(prefix)
    )


def _latent(hidden: int) -> Latent:
    """DeepSeek's sizes (arXiv:2405.04434 and arXiv:2412.19437): they do not vary with width, but for the lite model."""
    return Latent(kv_rank=512, q_rank=1536 if hidden > 2048 else 0, rope_dim=64, value_dim=128)
