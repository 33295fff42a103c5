"""One published row as a case that the planner can price: model, layout, machine, and what had to be assumed.

Invariant: reads input columns alone; a column that holds a measurement is never looked at. What a row does not say is
filled in by rules that hold for every row of that kind, and is listed. This module must not know a source's name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace

from rows_standins import find_accelerator, guess_engine, guess_sizes, read_number

from shardway.errors import UserError
from shardway.hardware.catalogue import load_accelerators
from shardway.plan.case import AttentionKernel, Case, Degrees, EngineTraits, Machine, Precision, Recompute, find_engine
from shardway.plan.shapes import Architecture, AttentionShape, ExpertsShape, Latent, LayerRun, LayerShape

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
    "MI355X": "mi355x",
}
"""Names in the rows -> keys of the catalogue."""

BALANCED = 2024
"""Since when DeepSpeed's pipelines no longer fill up all stages but the last (its pull request 4312)."""

CORE = 2023
"""Since when Megatron is Megatron-Core. Its users share optimizer states, split the stream by sequence beside a tensor
axis, and send micro-batches of one sequence through a pipeline: 89 of the 92 rows that state their size."""

BESIDE = 2024
"""Since when NeMo's own recipes let messages of the tensor axis travel beside its products."""

RENEWED = 2025
"""Since when containers have cuDNN's attention of 9.5 and later, which Transformer Engine prefers on Hopper
(NeMo's pull
request 9188)."""

EIGHT = 2024
"""Since when recipes of NeMo gather weights in eight bits (`fp8_params`, later `fp8_param_gather`)."""

GROUPED = 2026
"""Since when torchtitan leaves keys and values as they are (its pull request 2259); before they were repeated for every
query head."""

NETWORK = {"v100": 12.5e9, "a100": 25e9, "h": 50e9, "gh200": 25e9, "b": 50e9, "gb": 100e9, "mi": 50e9}
"""Bytes per second and accelerator of the vendor's own node of that generation, where a row does not say."""


COUNTS = ("layers", "dense_layers", "tp", "pp", "vpp", "cp", "ep", "etp", "n_experts")
FEW, MANY = 10**4, 10**8
"""More than any row can mean: of these columns, and of others."""


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
    machine = reader.machine()
    case = reader.fit(machine)
    return Question(case, machine, tuple(reader.open), tuple(reader.assumed))


class _Reader:
    def __init__(self, row: Row) -> None:
        self.row = {key: value for key, value in row.items() if isinstance(key, str) and isinstance(value, str)}
        self.open: list[str] = []
        self.assumed: list[str] = []
        self.extra = _read_extra(self.row.get("extra", ""))
        told = all(1 <= (read_number(self.row.get(name, "")) or 0) <= MANY for name in ("hidden", "layers"))
        if not told and (sizes := guess_sizes(self.row)):
            self.row |= sizes
            self.assumed.append(f"a model of the usual proportions: {render_sizes(sizes)}")

    def number(self, column: str, default: int | None = None, least: int = 1) -> int:
        """A column's number where it is one that can be meant, else the default."""
        number = read_number(self.row.get(column, ""))
        if number is not None and least <= number <= (FEW if column in COUNTS else MANY):
            return int(number)
        if default is None:
            raise Missing(f"the row has no {column}")
        return default

    def head_dim(self, usual: int) -> int:
        """Of a row whose sizes do not divide, the nearest width that kernels are made for."""
        width = read_number(self.row.get("head_dim", "")) or 0.0
        width = width if 1 <= width <= FEW else float(usual)
        return int(width) if width.is_integer() else max(8, 8 * round(width / 8))

    def flag(self, column: str) -> bool:
        return self.row.get(column, "").strip().lower() in ("1", "1.0", "true", "yes")

    def model(self) -> Architecture:
        hidden, layers = self.number("hidden"), self.number("layers")
        heads = self.number("heads", max(1, hidden // 128))
        kv_heads = self.number("kv_heads", heads)
        arch = self.row.get("arch", "")
        gated = self.flag("glu")
        attention = AttentionShape(
            heads=heads,
            kv_heads=heads if heads % kv_heads else kv_heads,
            head_dim=self.head_dim(hidden // heads),
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
        if self.number("n_experts", 0):
            dense = min(self.number("dense_layers", 0, least=0), layers - 1)
            experts = ExpertsShape(
                count=self.number("n_experts"),
                per_token=min(self.number("topk", 2), self.number("n_experts")),
                dim=self.number("moe_ffn", plain.ffn),
                shared_dim=self.number("shared_ffn", 0, least=0),
            )
            mixed = replace(plain, experts=experts)
            runs = [LayerRun(plain, dense)] * bool(dense) + [LayerRun(mixed, layers - dense)]
        return Architecture(
            name=self.row.get("model") or "model",
            hidden=hidden,
            runs=tuple(runs),
            vocab=self.number("vocab", 50304, least=8),
            tied=self.row.get("tied", "") != "0",
            positions=self.seq() if arch == "gpt" else 0,
            final_norm_parameters=hidden * (2 if arch in ("gpt", "neox") else 1),
        )

    def degrees(self) -> Degrees:
        tp, pp, cp = self.number("tp", 1), self.number("pp", 1), self.number("cp", 1)
        gpus = self.number("n_gpus", self.number("dp", 1) * tp * pp * cp)
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
        return self.number("etp", 1) if self.number("n_experts", 0) else 1

    def zero(self) -> int:
        told = self.row.get("zero_stage", "")
        return min(3, self.number("zero_stage", 0, least=0)) if told or not self.of_core() else 1

    def of_core(self) -> bool:
        """Whether the engine is Megatron-Core, or stands on it."""
        framework = self.row.get("framework", "").lower()
        named = any(word in framework for word in ("megatron", "nemo", "mlperf", "bridge"))
        return named and "deepspeed" not in framework and self.number("year", 2024) >= CORE

    def engine(self) -> EngineTraits:
        framework, year = self.row.get("framework", "").lower(), self.number("year", 2024)
        if "zero-3" in framework:
            return find_engine("deepspeed")
        if "scaling" in framework:
            return self._kernels(find_engine("scaling"))
        if framework.startswith("deepspeed") and self.zero() == 3:
            return find_engine("deepspeed")
        if "deepspeed" in framework or "neox" in framework:
            engine = self._kernels(find_engine("megatron-deepspeed"))
            return replace(engine, cut="filled") if year < BALANCED else engine
        if "fsdp1" in framework:
            return find_engine("fsdp1")
        if "torchtitan" in framework:
            # Without scales per row torchao gathers in float8, as do FSDP's weights in all runs that were published.
            one_scale = "row" not in self.row.get("precision", "").lower()
            return replace(
                find_engine("torchtitan"),
                repeats_keys=year < GROUPED,
                gathers_low_bits=one_scale,
                shards_low_bits=one_scale,
            )
        if "fsdp2" in framework or "fsdp" in framework or "litgpt" in framework or "olmo" in framework:
            return find_engine("fsdp2")
        if "nanotron" in framework:
            return find_engine("nanotron")
        if "nemo" in framework or "mlperf" in framework or "bridge" in framework:
            recipes = "mlperf" not in framework  # submissions have settings of their own
            return replace(
                find_engine("nemo"),
                overlaps_tensor=year >= BESIDE,
                early_attention=year < RENEWED,
                shards_low_bits=recipes and year >= EIGHT,
                replays=bool(self.extra.get("cuda_graphs")),
            )
        return replace(guess_engine(framework, year, self.zero()), early_attention=year < RENEWED)

    def _kernels(self, engine: EngineTraits) -> EngineTraits:
        """Gated models came with unfused norms and activations, unless the row says that they had kernels."""
        kernel = str(self.extra.get("kernel", "")) + self.row.get("notes", "")
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
        kernel, engine = str(self.extra.get("kernel", "")), self.engine()
        if "attentionv1" in kernel or (engine.name == "fsdp1" and year <= 2023) or year <= 2022:
            return "flash1"
        return "flash3" if engine.name in ("megatron", "nemo") and year >= 2023 else "flash2"

    def seq(self) -> int:
        """Tokens of a sequence."""
        return self.number("seq", 2048)

    def fit(self, machine: Machine) -> Case:
        """The case of the row; in 16 bits where a machine has no narrower, over data ranks where nothing else goes."""
        try:
            case = self.case()
        except UserError:
            self.row |= dict.fromkeys(("dp", "tp", "pp", "cp", "ep", "etp", "dp_shard", "vpp"), "")
            self.open, self.assumed = [], [*self.assumed, "data ranks alone: the row's layout does not divide"]
            try:
                case = self.case()
            except UserError as error:
                raise Missing(" ".join(str(error).split())) from error
        if case.precision in machine.accelerator.peak_flops or not case.low_bits:
            return case
        try:
            machine.peak(case.precision)
        except UserError:
            self.assumed.append("products in bf16")
            return replace(case, precision="bf16")
        return case

    def batch(self, degrees: Degrees) -> int:
        """Sequences of a step."""
        told = self.number("gbs", 0)
        if told:
            return told
        local, passes = self.number("mbs", 1), self.engine().passes_per_stage * degrees.pp
        usual = 4 * degrees.pp if degrees.pp > 1 else 1
        if degrees.pp > 1 and passes:  # the engine itself cuts a local batch for a pass, if that is large enough
            usual = 1 if local >= passes else passes
        batch = degrees.data * local * self.number("grad_accum", usual)
        self.assumed.append(f"a global batch of {batch}")
        return batch

    def case(self) -> Case:
        degrees = self.degrees()
        batch = self.batch(degrees)
        if not self.row.get("mbs") and not (self.of_core() and degrees.pp > 1):
            self.open.append("micro_batch")
        micro = self.number("mbs", 1)
        schedule = str(self.extra.get("schedule", "")).lower()
        if degrees.pp > 1 and not self.row.get("vpp") and not schedule and not self.row.get("mbs"):
            self.open.append("stages_per_rank")
        stages = self.number("vpp", 2 if "interleaved" in schedule else 1) if degrees.pp > 1 else 1
        unsaid = not self.row.get("mbs") or not (self.row.get("gbs") or self.row.get("grad_accum"))
        if degrees.pp > 1 and unsaid and self.engine().passes_per_stage:
            self.open = [name for name in self.open if name != "micro_batch"]
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
        sequence = self.row["sp"] == "1" if self.row.get("sp") else self.of_core() and degrees.tp > 1
        return Case(
            model=model,
            seq_len=self.seq(),
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
            async_tensor=any(word in self.row.get("overlap", "").lower() for word in ("async", "tensor")),
        )

    def machine(self) -> Machine:
        gpu = self.row.get("gpu", "")
        key = GPUS.get(gpu)
        if key is None:
            key = find_accelerator(gpu)
            self.assumed.append(f'{key} for "{gpu}"')
        accelerator = load_accelerators()[key]
        per_node = self.number("gpus_per_node", 8)
        gbps = read_number(self.row.get("internode_gbps_per_gpu", "")) or 0.0
        network = gbps / 8 * 1e9 if gbps > 0 else _usual_network(key)
        if gbps <= 0:
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
    known = sorted(NETWORK.items(), key=lambda item: -len(item[0]))
    return next((rate for prefix, rate in known if key.startswith(prefix)), NETWORK["a100"])


def _read_extra(text: str) -> Mapping[str, str]:
    """What the row says beside its columns; nothing where that is no JSON object."""
    try:
        found = json.loads(text or "{}")
    except json.JSONDecodeError:
        return {}
    return found if isinstance(found, dict) else {}


def render_sizes(sizes: Mapping[str, str]) -> str:
    """Sizes in a line: "layers 32, hidden 4096"."""
    return ", ".join(f"{name} {size}" for name, size in sizes.items())


def _latent(hidden: int) -> Latent:
    """DeepSeek's sizes (arXiv:2405.04434 and arXiv:2412.19437): they do not vary with width, but for the lite model."""
    return Latent(kv_rank=512, q_rank=1536 if hidden > 2048 else 0, rope_dim=64, value_dim=128)
