"""Exports the weights of a run directory to a folder, and gives the layout of a run over ranks that do not train.

Invariants:
- Keys that decide which weights there are and what they mean are kept; keys that decide how and where they are trained
  are left to their defaults, so that a machine without GPUs can export.
- The run is only read. Each rank holds its share of a model that is built, on as many ranks as were started, whatever
  layout the run had.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardway.checkpoint.catalog import (
    PassedOver,
    find_checkpoint,
    find_checkpoints,
    find_in_run,
    find_tie,
    list_newest,
)
from shardway.checkpoint.export import find_models, no_weights, save_weights, write_state_dicts
from shardway.checkpoint.file_format import Damaged
from shardway.checkpoint.local_tier import SharedShardStore
from shardway.checkpoint.reader import LoadedCheckpoint, load_from, load_latest, nothing_whole
from shardway.checkpoint.state import Trained
from shardway.errors import JobError, UserError
from shardway.hfconfig import locate_model
from shardway.models.build import build_model
from shardway.models.huggingface.build import Form, build_huggingface, form_of
from shardway.parallel.apply import ApplyOptions, apply_parallelism
from shardway.parallel.formats.precision import read_precision
from shardway.parallel.mesh import build_mesh
from shardway.ranks.launcher import find_placement
from shardway.ranks.start import Ranks, StartOptions, start_ranks
from shardway.resolve.request import Resolution, ResolveRequest, resolve_loaded
from shardway.rundir.directory import RunDir
from shardway.runfile.load import DEFAULT, LoadedRunFile, load_run
from shardway.runfile.schema import PrecisionSection, RunFile
from shardway.watch.progress import find_best_checkpoint

# --- the layout over ranks that do not train

_OF_TRAIN = ("micro_batch", "compile", "compile_cache")
"""Keys of [train] that decide how and where a run is trained."""


def lay_evenly(asked: LoadedRunFile) -> LoadedRunFile:
    """The same run with weights shared by all ranks, on CPUs, and without the keys that decide how it is trained."""
    fresh = load_run(None).values
    narrow = asked.values.precision.weights == "bf16"
    updates: dict[str, dict[str, Any]] = {
        "train": {name: getattr(fresh.train, name) for name in _OF_TRAIN},
        "run": {"device": "cpu"},
        "precision": {**dict(fresh.precision), "weights": asked.values.precision.weights},
        "parallel": {**dict(fresh.parallel), "dp_replicate": 1, "dp_shard": "auto"},
        "recompute": dict(fresh.recompute),
    }
    updates["precision"]["compute"] = "bf16" if narrow else "fp32"
    sections = {name: getattr(asked.values, name).model_copy(update=update) for name, update in updates.items()}
    reset = {dotted: DEFAULT for dotted in asked.origins if is_of_layout(dotted)}
    return replace(asked, values=asked.values.model_copy(update=sections), origins={**asked.origins, **reset})


def is_of_layout(dotted: str) -> bool:
    """Whether a key decides how and where a run is trained, and nothing of its weights."""
    section, _, name = dotted.partition(".")
    whole = section in ("parallel", "recompute") or (section == "precision" and name != "weights")
    return whole or dotted == "run.device" or (section == "train" and name in _OF_TRAIN)


# --- the export

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Name of a number format of weights -> torch's."""


@dataclass(frozen=True)
class Which:
    """The chosen checkpoint: that of a step, the best by `checkpoint.monitor`, or else the newest."""

    step: int | None = None
    best: bool = False

    def choose(self, run: RunDir) -> int | None:
        """Its step; None for the newest. Raises UserError if there is no such checkpoint."""
        if not self.best:
            return find_checkpoint(run.path, self.step).step if self.step is not None else None
        found = find_best_checkpoint(run)
        if found is None:
            raise UserError(
                f"no checkpoint in {run.path} is of a step that was validated, so none is the best.\n"
                "  To do: leave out --best for the newest, or name one by --step; checkpoint.keep_best in the run file "
                "keeps the best ones."
            )
        return found.step


NEWEST = Which()


@dataclass(frozen=True)
class Exported:
    """Where a model was written, from which step of the run, and which newer checkpoints are damaged.

    `files`, if names are the model's own: the written files, and in `left_out` why one is missing.
    """

    folder: str
    step: int
    passed_over: tuple[PassedOver, ...] = ()
    files: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()


def export_run(
    run: RunDir,
    folder: Path,
    dtype: str | None,
    environ: Mapping[str, str],
    *,
    own_names: bool = False,
    which: Which = NEWEST,
) -> Exported | None:
    """Write a checkpoint of a run: as a Hugging Face folder, or, for the model of a script and with `own_names`, as
    `model.safetensors` and `model.pt`; None on a rank that has nothing to do.

    Raises UserError for a run without a checkpoint and for a model that the library has no form for, JobError if it
    cannot be written.
    """
    placement = find_placement(environ)
    if not run.checkpoint_steps():
        raise _no_checkpoint(run)
    if own_names or is_of_script(run):
        return export_state_dicts(run, folder, dtype, which) if placement.rank == 0 else None
    resolution = _resolve(run, placement.world, placement.local_world)
    section = resolution.resolved.values.run
    options = StartOptions(section.device, int(section.threads), section.start_timeout, section.collective_timeout)
    ranks = start_ranks(placement, options)
    exported = export_on(ranks, resolution, run, folder, dtype or "fp32", which)
    ranks.end()
    return exported


def _load_chosen(run: RunDir, ranks: Ranks, state: Trained, step: int) -> LoadedCheckpoint:
    loaded = load_from(SharedShardStore(find_in_run(run, step), ranks), ranks, state)
    if isinstance(loaded, PassedOver):
        raise _damaged(loaded)
    return loaded


def _damaged(chosen: PassedOver) -> JobError:
    return JobError(
        f"the checkpoint of step {chosen.step} is damaged: {chosen.reason}\n"
        "  Nothing was written. To do: choose another step; `shardway checkpoint verify` tells which are whole."
    )


def is_of_script(run: RunDir) -> bool:
    """Whether a script trained its own model here: then no [model] is written down."""
    return "model" not in run.read_resolved()


def export_state_dicts(run: RunDir, folder: Path, dtype: str | None, which: Which = NEWEST) -> Exported:
    """Write a checkpoint under the names of its models, in `dtype` or as it was saved; nothing else is needed."""
    passed_over: list[PassedOver] = []
    chosen = which.choose(run)
    for found in find_checkpoints(run.path) if chosen is None else [find_in_run(run, chosen)]:
        step = found.step or 0
        try:
            written = write_state_dicts(found, folder, DTYPES[dtype] if dtype is not None else None)
        except Damaged as damage:
            passed_over.append(PassedOver(step, "; ".join(damage.reasons)))
        else:
            return Exported(str(folder), step, tuple(passed_over), written.files, written.left_out)
    if chosen is not None:
        raise _damaged(passed_over[0])
    raise JobError(nothing_whole(run, passed_over))


def export_on(
    ranks: Ranks, resolution: Resolution, run: RunDir, folder: Path, dtype: str, which: Which = NEWEST
) -> Exported:
    """The same on ranks that have started."""
    values, chosen = resolution.resolved.values, ranks.ask_first(lambda: which.choose(run))
    model = _build(ranks, values, run)
    form = _find_form(model, values.data.seq_len)
    options = ApplyOptions(values.parallel, read_precision(PrecisionSection(weights=values.precision.weights)))
    parallel = apply_parallelism(model, build_mesh(ranks, values.parallel), ranks.device, options)
    ranks.together(lambda: _check_has_weights(run))
    state = Trained(parallel.module, None)
    loaded = load_latest(run, ranks, state) if chosen is None else _load_chosen(run, ranks, state, chosen)
    if loaded is None:
        raise _no_checkpoint(run)
    weights = {name: parameter.detach() for name, parameter in parallel.module.named_parameters()}
    save_weights(weights, form, folder, ranks, dtype=DTYPES[dtype])
    return Exported(str(folder), loaded.step, loaded.passed_over)


def _resolve(run: RunDir, ranks: int, ranks_per_node: int) -> Resolution:
    asked = lay_evenly(load_run(run.resolved_path))
    return resolve_loaded(ResolveRequest(run.resolved_path, directory=run.path), asked, ranks, ranks_per_node)


def _find_form(model: nn.Module, max_positions: int) -> Form:
    try:
        return form_of(model, max_positions=max_positions)
    except UserError as error:
        raise UserError(
            f"{error}\n  `--own-names` writes its weights as model.safetensors and model.pt under its own names."
        ) from None


def _check_has_weights(run: RunDir) -> None:
    """Raise UserError if the newest readable checkpoint holds nothing in Shardway's form."""
    entries = list_newest(run)
    if entries and not find_models(entries):
        raise no_weights(run.path)


def _build(ranks: Ranks, values: RunFile, run: RunDir) -> nn.Module:
    """The model of the run on the meta device; its values come from the checkpoint."""
    section = values.model
    if section.hf:
        source = ranks.first_then_all(lambda: locate_model(section.hf, weights=False))
        tied = ranks.ask_first(lambda: find_tie(run))
        return build_huggingface(source, vocab=0, seq_len=values.data.seq_len, weights=False, tied=tied)
    vocab = section.vocab if isinstance(section.vocab, int) else None
    return build_model(section, vocab=vocab, sample_shape=(values.data.seq_len,))


def _no_checkpoint(run: RunDir) -> UserError:
    return UserError(
        f"{run.path} holds no checkpoint to export.\n"
        "  To do: name a run directory that has one (`shardway status` lists runs and their steps)."
    )
