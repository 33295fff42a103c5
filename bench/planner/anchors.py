"""Known estimators on the rows that the planner is measured on: step time, peak memory, whether it fits.

    bench/planner/anchors.sh FOLDER ROWS.csv OUT.csv           # makes a virtual environment in FOLDER and runs this
    PYTHONPATH=src python bench/planner/anchors.py ROWS.csv OUT.csv

Every estimator gets the case that `rows.py` reads, what a row leaves open filled in alike, and peaks and sizes of our
catalogue. A row outside of what an estimator claims to know is counted as not covered, with the reason in OUT.csv. An
error is |predicted / measured - 1|; memory is compared as published (allocated, reserved or the device's), although all
of these estimators add up tensors. Errors are over rows marked `core` of quality A or B, ranks inside sweeps and
running out of memory over all rows of that quality. An efficiency that is "fitted" was chosen on the very rows that it
is scored on, one for each accelerator and number format.
"""

from __future__ import annotations

import argparse
import csv
import importlib.metadata
import importlib.util
import logging
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
from measured import Measured, read_measured
from rows import Missing, Question, read_question

from shardway.errors import UserError

GIB = 2**30
SMALLEST_SWEEP = 5
"""Rows that differ in layout alone, below which an order says little."""
SWEEP = ("source_id", "group", "model", "gpu", "n_gpus", "seq", "gbs")
FAILURES = 20
"""Rows out of memory that a source must have, for its rows to be asked whether they fit."""
UNDER = 0.9
"""A prediction below this part of the measurement is counted as too low: it promises what does not fit."""
COLUMNS = "id source_id core anchor step_s measured_step_s memory_gib measured_gib out_of_memory reason"
HEAD = f"""\
{"":41} | {"step time":41} | in sweeps     | {"peak memory":41} | does it fit
{"":41} | rows      median     p90   macro of  < 0.9 |  rank told    | rows      median     p90   macro of  < 0.9 | \
rows       right  miss alarm"""
DISTRIBUTIONS = ("llm-analysis", "deepspeed", "megatron-bridge", "torch")
ABSENT: Mapping[str, str] = MappingProxyType(
    {
        "Calculon": "does not install here: in no package index (the `calculon` of PyPI is an unrelated program)",
        "EleutherAI cookbook": "does not install here: scripts, in no package index; its formula is in the table",
        "Megatron-LM": "its script is not in megatron-core; megatron-bridge carries a copy, which is in the table",
        "SimuMax": "does not install here: in no package index",
    }
)


class NotCovered(Exception):
    """A row that an estimator does not claim to know."""


@dataclass(frozen=True)
class Prediction:
    """Seconds of a step and bytes of one accelerator at the peak; or why there are none."""

    step_s: float | None = None
    memory_bytes: float | None = None
    reason: str = ""


@dataclass(frozen=True)
class Entry:
    """A row that can be priced."""

    id: str
    source: str
    sweep: tuple[str, ...]
    core: bool
    question: Question
    measured: Measured


@dataclass(frozen=True)
class Anchor:
    """An estimator as it is asked; `fitted`: its seconds are scaled to these very rows."""

    name: str
    predict: Callable[[Question], Prediction]
    fitted: bool = False


Predictions = Mapping[str, Prediction]
"""By the row's id."""


def predict_llm_analysis(question: Question, efficiency: float = 1.0) -> Prediction:
    """llm-analysis, all at its defaults but what the row says.

    It knows no third matrix of a gated layer: the width it gets is 1.5 times the row's, at which its parameters and
    activations are right. Of formats it knows widths alone: seconds are asked for at that of the products, bytes at 16.
    """
    from llm_analysis.analysis import ActivationRecomputation, DSZeRO, LLMAnalysis
    from llm_analysis.config import ParallelismConfig, get_dtype_config_by_name

    logging.getLogger("__name__").setLevel(logging.CRITICAL)  # the name that it gave its logger
    case, degrees = question.case, question.case.degrees
    check_covered(question, context=False, mixed=False)
    data = degrees.dp_shard if case.zero else degrees.data
    ranks = ParallelismConfig(degrees.tp, degrees.pp, data, degrees.ep, case.stream_split)
    recompute = {"none": "NONE", "full": "FULL"}.get(case.recompute, "SELECTIVE")

    def ask(dtype: str) -> Mapping[str, Any]:
        model, gpu, width = _llm_model(question), _llm_gpu(question), get_dtype_config_by_name(dtype)
        return LLMAnalysis(model, gpu, width, ranks, flops_efficiency=efficiency).training(
            batch_size_per_gpu=case.micro_batch,
            gradient_accumulation_steps=case.micro_batches,
            global_batch_size=case.micro_batch * case.micro_batches * data,
            seq_len=case.seq_len,
            activation_recomputation=ActivationRecomputation[recompute],
            ds_zero=DSZeRO(case.zero),
            flash_attn=case.flash,
            softmax_dropout=case.dropout,
        )

    width = {"fp8": "w8a8e16", "fp4": "w4a4e16"}.get(number_format(question), "w16a16e16")
    return Prediction(ask(width)["latency_per_iter"], ask("w16a16e16")["(weight+op_state+grad+act)_memory_per_gpu"])


def _llm_model(question: Question) -> Any:
    from llm_analysis.config import ModelConfig

    model, layer = question.case.model, question.case.model.layers[0]
    heads, kv_heads, experts = layer.attention.heads, layer.attention.kv_heads, layer.experts
    width = (experts.dim if experts else layer.ffn) * (1.5 if layer.gated else 1)
    sizes = (len(model.layers), heads, model.hidden, model.vocab, question.case.seq_len, kv_heads)
    mixture = {"moe_num_experts": experts.count, "moe_top_k": experts.per_token} if experts else {}
    return ModelConfig(model.name, *sizes, ffn_embed_dim=width, expansion_ratio=width / model.hidden, **mixture)


def _llm_gpu(question: Question) -> Any:
    from llm_analysis.config import GPUConfig

    machine, part = question.machine, question.machine.accelerator
    rates = [part.peak("bf16") or part.peak("fp16"), part.peak("fp8"), part.peak("fp4")]  # it doubles one that is None
    tera = [rate and rate / 1e12 for rate in rates]
    bandwidth = (part.memory_bandwidth_bytes_per_s or 1e12) / 1e9  # of no weight in training
    return GPUConfig(part.key, machine.memory_bytes / GIB, bandwidth, machine.link / 1e9, 8e-6, *tera)


def predict_deepspeed(question: Question, instead: Mapping[int, int] = MappingProxyType({})) -> Prediction:
    """DeepSpeed's estimators of ZeRO 2 and 3, without offload: weights, gradients and optimizer states alone.

    They know nothing of tp and pp: each tp x pp-th part of the model is asked for as a model of its own. `instead`
    names the stage that stands in for one without an estimator.
    """
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    case, model = question.case, question.case.model
    check_covered(question, experts=False)
    stage = instead.get(case.zero, case.zero)
    parameters = model.parameters // (case.degrees.tp * case.degrees.pp)
    ranks = {"num_gpus_per_node": case.degrees.shards, "num_nodes": 1, "cpu_offload": False}
    if stage == 2:
        return Prediction(memory_bytes=estimate_zero2_model_states_mem_needs(parameters, **ranks)[1])
    if stage == 3:
        largest = max(each.parameters for layer in model.layers for each in layer.matrices)
        largest = max(largest, model.head.parameters) // case.degrees.tp
        return Prediction(memory_bytes=estimate_zero3_model_states_mem_needs(parameters, largest, **ranks)[1])
    raise NotCovered(f"has no estimator of ZeRO {case.zero}")


def predict_megatron(question: Question) -> Prediction:
    """What megatron-bridge reports as theoretical memory, where it reports a total.

    That is with sequence parallelism and selective recompute, which a fused attention amounts to.
    """
    tool, case = _load_megatron(), question.case
    check_covered(question, context=False, experts=False)
    if case.zero > 1:
        raise NotCovered(f"knows no ZeRO {case.zero}")
    if case.degrees.tp > 1 and not case.sequence:
        raise NotCovered("assumes sequence parallelism")
    if case.recompute in ("full", "operators") or (case.recompute == "none" and not case.flash):
        raise NotCovered("assumes selective recompute")
    config = _megatron_config(question)
    states = tool.compute_weight_and_optimizer_memory(config)
    return Prediction(memory_bytes=states + tool.compute_activation_memory(config, case.micro_batches))


def _megatron_config(question: Question) -> SimpleNamespace:
    from torch.nn import functional

    case, model, layer = question.case, question.case.model, question.case.model.layers[0]
    heads, degrees = layer.attention, case.degrees
    sizes = {"num_layers": len(model.layers), "hidden_size": model.hidden, "ffn_hidden_size": layer.ffn}
    sizes |= {"num_attention_heads": heads.heads, "num_query_groups": heads.kv_heads, "kv_channels": heads.head_dim}
    sizes |= {"vocab_size": model.vocab, "seq_length": case.seq_len}
    kind = {"num_moe_experts": None, "gated_linear_unit": layer.gated, "activation_func": functional.silu}
    kind |= {"should_pad_vocab": False, "share_embeddings_and_output_weights": model.tied}
    split = {"tensor_model_parallel_size": degrees.tp, "pipeline_model_parallel_size": degrees.pp}
    split |= {"virtual_pipeline_model_parallel_size": case.stages_per_rank if case.stages_per_rank > 1 else None}
    ours = SimpleNamespace(**sizes, **kind, **split)
    optimizer = SimpleNamespace(use_distributed_optimizer=case.zero == 1)
    batch = SimpleNamespace(micro_batch_size=case.micro_batch)
    return SimpleNamespace(model=ours, optimizer=optimizer, train=batch, data_parallel_size=degrees.data)


@cache
def _load_megatron() -> Any:
    """Its file alone: the package imports Transformer Engine, and of what the file imports it calls nothing here."""
    found = importlib.metadata.distribution("megatron-bridge")
    path = found.locate_file("megatron/bridge/training/utils/theoretical_memory_utils.py")
    for name, needed in (("training.config", "ConfigContainer"), ("utils.vocab_utils", "calculate_padded_vocab_size")):
        stand_in = ModuleType(f"megatron.bridge.{name}")
        setattr(stand_in, needed, None)
        sys.modules[stand_in.__name__] = stand_in
    spec: Any = importlib.util.spec_from_file_location("theoretical_memory_utils", str(path))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def predict_cookbook(question: Question) -> Prediction:
    """Formula of `calc_transformer_mem` in EleutherAI's cookbook, reimplemented.

    Weights 2, gradients 4 and optimizer 12 bytes a parameter; tp x pp splits weights alone, ZeRO splits over all ranks.
    Activations, split over tp: 34 bytes a token, feature and layer, and 5 for each head and position unless recomputed,
    which a fused attention is here taken for. Buffers of ZeRO: 5e8 values, and 1e9 more of ZeRO 3.
    """
    case, model, layer = question.case, question.case.model, question.case.model.layers[0]
    check_covered(question, context=False, experts=False)
    hidden, layers, world = model.hidden, len(model.layers), case.degrees.world
    attention = 2 * (1 + layer.attention.kv_heads / layer.attention.heads) * hidden**2
    ends = (2 * model.vocab + case.seq_len + 2) * hidden
    parameters = ends + layers * (attention + (3 if layer.gated else 2) * hidden * layer.ffn + 8 * hidden)
    weights = 2 * parameters / case.degrees.tp / case.degrees.pp / (world if case.zero == 3 else 1)
    gradients = 4 * parameters / (world if case.zero >= 2 else 1)
    optimizer = 12 * parameters / (world if case.zero >= 1 else 1)
    buffers = 2 * (5e8 * (case.zero >= 1) + 1e9 * (case.zero == 3)) if world > 1 else 0
    scores = 0 if case.flash or case.recompute != "none" else 5 * layer.attention.heads * case.seq_len / hidden
    activations = case.seq_len * case.micro_batch * hidden * layers * (34 + scores) / case.degrees.tp
    return Prediction(memory_bytes=weights + gradients + optimizer + buffers + activations)


def predict_constant(question: Question) -> Prediction:
    """Model FLOPs (all scores counted) at the dense peak of the format; to be fitted."""
    case, part = question.case, question.machine.accelerator
    peak = part.peak(number_format(question))
    if peak is None:
        raise NotCovered(f"no source states the {number_format(question)} peak of {part.key}")
    flops = case.model.flops_per_token(case.seq_len, causal=False) * case.tokens_per_step
    return Prediction(flops / case.degrees.world / peak)


ANCHORS = (
    Anchor("llm-analysis, its default (efficiency 1)", predict_llm_analysis),
    Anchor("llm-analysis, 0.5 as its guide advises", partial(predict_llm_analysis, efficiency=0.5)),
    Anchor("llm-analysis, fitted", predict_llm_analysis, fitted=True),
    Anchor("one model FLOPs utilisation, fitted", predict_constant, fitted=True),
    Anchor("DeepSpeed's estimators (ZeRO 2, 3)", predict_deepspeed),
    Anchor("the same, ZeRO 2's for ZeRO 1 too", partial(predict_deepspeed, instead=MappingProxyType({1: 2}))),
    Anchor("Megatron's theoretical memory", predict_megatron),
    Anchor("formula of the cookbook, reimplemented", predict_cookbook),
)


def number_format(question: Question) -> Any:
    """Key of a peak: that of matrix products."""
    name = question.case.precision.removeprefix("mx")
    return "fp16" if name == "bf16" and question.machine.accelerator.peak("bf16") is None else name


def check_covered(question: Question, *, context: bool = True, experts: bool = True, mixed: bool = True) -> None:
    """Raises NotCovered of what is not known: context parallelism, experts, layers that are not plain and alike."""
    model = question.case.model
    if not context and question.case.degrees.cp > 1:
        raise NotCovered("knows no context parallelism")
    if not experts and any(layer.experts for layer in model.layers):
        raise NotCovered("knows no layout of experts")
    shared = any(layer.experts and layer.experts.shared_dim for layer in model.layers)
    if not mixed and (len(model.runs) > 1 or shared or model.layers[0].attention.latent):
        raise NotCovered("knows neither latent attention, shared experts nor layers that differ")


def read_entries(path: Path) -> list[Entry]:
    """Rows of quality A or B; says which of them cannot be priced."""
    entries = []
    with path.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["quality"] in ("A", "B")]
    for row in rows:
        try:
            question = read_question(row)
        except (Missing, UserError) as error:
            print(f"left out: {row['id']}: {str(error).splitlines()[0]}")
            continue
        measured = read_measured(row, question.case, question.machine)
        sweep = tuple(row[column] for column in SWEEP)
        entries.append(Entry(row["id"], row["source_id"], sweep, row["core"] == "1", question, measured))
    return entries


def ask(anchor: Anchor, entries: Sequence[Entry]) -> Predictions:
    """All rows; what an estimator refuses is a reason."""
    predictions = {entry.id: _ask_one(anchor, entry.question) for entry in entries}
    return fit(predictions, entries) if anchor.fitted else predictions


def _ask_one(anchor: Anchor, question: Question) -> Prediction:
    try:
        return anchor.predict(question)
    except NotCovered as reason:
        return Prediction(reason=str(reason))
    except (ImportError, AssertionError) as error:
        return Prediction(reason=f"{type(error).__name__}: {error}")


def fit(predictions: Predictions, entries: Sequence[Entry]) -> Predictions:
    """Seconds divided by the efficiency that makes the median ratio of core rows 1, by accelerator and format."""
    ratios = defaultdict[tuple[str, str], list[float]](list)
    rates = {each.id: (each.question.machine.accelerator.key, number_format(each.question)) for each in entries}
    for entry in entries:
        seconds = predictions[entry.id].step_s
        if entry.core and seconds and entry.measured.step_s:
            ratios[rates[entry.id]].append(seconds / entry.measured.step_s)
    efficiency = {rate: statistics.median(values) for rate, values in ratios.items()}
    return {name: _scale(told, efficiency.get(rates[name])) for name, told in predictions.items()}


def _scale(told: Prediction, efficiency: float | None) -> Prediction:
    if efficiency is None:
        return replace(told, step_s=None, reason=told.reason or "no core row to fit an efficiency on")
    return replace(told, step_s=told.step_s and told.step_s / efficiency)


def write_predictions(path: Path, entries: Sequence[Entry], answers: Mapping[str, Predictions]) -> None:
    """A line for each row and estimator."""
    with path.open("w", newline="", encoding="utf-8") as file:
        out = csv.writer(file)
        out.writerow(COLUMNS.split())
        for name, predictions in answers.items():
            for entry in entries:
                told, seen = predictions[entry.id], entry.measured
                sizes = [size and size / GIB for size in (told.memory_bytes, seen.memory_bytes)]
                numbers = ["" if each is None else f"{each:.6g}" for each in (told.step_s, seen.step_s, *sizes)]
                names = [entry.id, entry.source, int(entry.core), name]
                out.writerow([*names, *numbers, int(seen.out_of_memory), told.reason])


def render_errors(what: str, predictions: Predictions, entries: Sequence[Entry]) -> str:
    """Covered core rows of all, median, 90th percentile, mean over sources of mean errors, the part too low."""
    core = [each for each in entries if each.core and getattr(each.measured, what)]
    told = [(each, getattr(predictions[each.id], what)) for each in core]
    ratios = [(each.source, size / getattr(each.measured, what)) for each, size in told if size]
    if not ratios:
        return f"{'-':^41}"
    by_source = defaultdict[str, list[float]](list)
    for source, ratio in ratios:
        by_source[source].append(abs(ratio - 1))
    median, tenth = np.percentile([abs(ratio - 1) for _, ratio in ratios], [50, 90])
    macro = statistics.fmean(statistics.fmean(errors) for errors in by_source.values())
    under = share(ratio < UNDER for _, ratio in ratios)
    return f"{len(ratios):4}/{len(core):<4} {median:6.1%} {tenth:7.1%} {macro:7.1%} {len(by_source):2} {under:6.0%}"


def render_order(predictions: Predictions, entries: Sequence[Entry]) -> str:
    """Mean rank correlation of seconds in a sweep, told to be all alike 0; how many are not, of how many."""
    sweeps = defaultdict[tuple[str, ...], list[list[float]]](list)
    for entry in entries:
        told, seen = predictions[entry.id].step_s, entry.measured.step_s
        if told and seen:
            sweeps[entry.sweep].append([float(f"{told:.6g}"), seen])  # alike is alike, whatever the last bit says
    ranks = [correlate_ranks(*np.array(pairs).T) for pairs in sweeps.values() if len(pairs) >= SMALLEST_SWEEP]
    return f"{statistics.fmean(ranks):5.2f} {sum(map(bool, ranks)):3}/{len(ranks):<3}" if ranks else f"{'-':^13}"


def correlate_ranks(left: np.ndarray, right: np.ndarray) -> float:
    """Spearman's coefficient, ties at their mean rank; 0 where one side is constant."""
    ranks = [np.array([((side < each).sum() + (side <= each).sum()) / 2 for each in side]) for side in (left, right)]
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1]) if min(each.std() for each in ranks) else 0.0


def render_fits(predictions: Predictions, entries: Sequence[Entry]) -> str:
    """Whether bytes are within memory, in sources that list failures: the part right, failures missed, false alarms."""
    failures = Counter(entry.source for entry in entries if entry.measured.out_of_memory)
    asked = [entry for entry in entries if failures[entry.source] >= FAILURES]
    told = [(each, predictions[each.id].memory_bytes) for each in asked]
    says = [(size > each.question.machine.memory_bytes, each.measured.out_of_memory) for each, size in told if size]
    right, missed = share(said == was for said, was in says), share(not said for said, was in says if was)
    alarms = share(said for said, was in says if not was)
    return f"{len(says):4}/{len(asked):<4} {right:6.1%} {missed:5.0%} {alarms:5.0%}" if says else "-"


def share(flags: Iterable[bool]) -> float:
    """The part that is true; not a number where there is none."""
    values = list(flags)
    return sum(values) / len(values) if values else float("nan")


def render_scores(name: str, predictions: Predictions, entries: Sequence[Entry]) -> str:
    """A line of the table."""
    time, memory = (render_errors(what, predictions, entries) for what in ("step_s", "memory_bytes"))
    cells = [f"{name:41}", time, render_order(predictions, entries), memory, render_fits(predictions, entries)]
    return " | ".join(cells)


def render_reasons(name: str, predictions: Predictions, entries: Sequence[Entry]) -> str:
    """Why core rows are not covered, most frequent first."""
    reasons = Counter(predictions[each.id].reason for each in entries if each.core and predictions[each.id].reason)
    return "\n".join(f"  {name}: {count} core rows: {reason}" for reason, count in reasons.most_common())


def main() -> None:
    """Asks all estimators, writes every answer, prints the table."""
    parser = argparse.ArgumentParser(description="Known estimators on published rows.")
    parser.add_argument("rows", type=Path, help="published measurements, a CSV file")
    parser.add_argument("out", type=Path, help="predictions, a CSV file")
    options = parser.parse_args()
    entries = read_entries(options.rows)
    answers = {anchor.name: ask(anchor, entries) for anchor in ANCHORS}
    write_predictions(options.out, entries, answers)
    print(f"{len(entries)} rows of quality A or B, {sum(entry.core for entry in entries)} of them core")
    versions = {each.metadata["Name"]: each.version for each in importlib.metadata.distributions()}
    print(", ".join(f"{name} {versions.get(name, '(not installed)')}" for name in DISTRIBUTIONS), "", HEAD, sep="\n")
    print(*(render_scores(name, answers[name], entries) for name in answers), sep="\n")
    print("\nNot run:", *(f"  {name}: {why}" for name, why in ABSENT.items()), sep="\n")
    reasons = [render_reasons(name, answers[name], entries) for name in answers]
    print("Not covered:", *filter(None, reasons), sep="\n")


if __name__ == "__main__":
    main()
