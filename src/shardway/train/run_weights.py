"""Weights out of a run directory and into a new one: exports to a folder, and imports from another tool or run.

Invariants:
- Keys that decide which weights there are and what they mean are kept; keys that decide how and where they are trained
  are left to their defaults, so that a machine without GPUs can export.
- An exported run is only read. Each rank holds its share of a model that is built, on as many ranks as were started,
  whatever layout the run had.
- An imported run directory appears complete or not at all, and nothing that exists is touched. Its checkpoint is like
  any other, so every layout can read it. This module must not train.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from shardway.checkpoint.catalog import (
    FoundCheckpoint,
    PassedOver,
    check_base,
    choose_best,
    copy_checkpoint,
    find_checkpoint,
    find_checkpoints,
    find_in_run,
    find_tie,
    list_newest,
    verify_checkpoint,
)
from shardway.checkpoint.export import (
    Written,
    find_models,
    no_weights,
    save_weights,
    write_adapter,
    write_state_dicts,
)
from shardway.checkpoint.file_format import Damaged
from shardway.checkpoint.import_weights import ForeignSource, Match, OwnSource, has_own_head, match_source, open_source
from shardway.checkpoint.reader import ShardStore, load_from, load_latest, nothing_whole
from shardway.checkpoint.state import MODEL, Trained, count_bytes
from shardway.checkpoint.writer import Content, shared_place, write_checkpoint
from shardway.data.open import open_resolved
from shardway.errors import Bug, JobError, Problem, UserError, check_no_problems
from shardway.hfconfig import locate_model
from shardway.models.build import build_model
from shardway.models.contract import find_base
from shardway.models.huggingface.lora import (
    is_of_adapter,
    merge_lora,
    name_in_files,
    read_lora,
    render_lora_config,
)
from shardway.models.huggingface.model import build_huggingface, form_of
from shardway.parallel.apply import ApplyOptions, apply_parallelism
from shardway.parallel.mesh import build_mesh
from shardway.parallel.precision import FORMATS, read_precision
from shardway.ranks.launcher import Placement, find_placement
from shardway.ranks.start import Ranks, StartOptions, start_ranks
from shardway.refusals import find_remedy
from shardway.resolve import Resolved, check_same_run, resolve_with_data
from shardway.resolve.draft import WEIGHT_KEYS
from shardway.resolve.request import Resolution, ResolveRequest, resolve_loaded
from shardway.rundir.directory import RunDir
from shardway.rundir.file_io import fsync_folder
from shardway.rundir.names import ensure_run_id
from shardway.runfile.load import DEFAULT, LoadedRunFile, load_run
from shardway.runfile.schema import PrecisionSection, RunFile
from shardway.train.loop_state import Counters

# --- the layout over ranks that do not train

_OF_TRAIN = ("micro_batch", "compile", "compile_cache")
"""Keys of [train] that decide how and where a run is trained."""


def lay_evenly(asked: LoadedRunFile) -> LoadedRunFile:
    """The same run with weights shared by all ranks, on CPUs, and without the keys that decide how it is trained."""
    fresh, weights = load_run(None).values, asked.values.precision.weights
    compute = "bf16" if weights == "bf16" else "fp32"
    updates: dict[str, dict[str, Any]] = {
        "train": {name: getattr(fresh.train, name) for name in _OF_TRAIN},
        "run": {"device": "cpu"},
        "precision": {**dict(fresh.precision), "weights": weights, "compute": compute},
        "parallel": {**dict(fresh.parallel), "dp_replicate": 1, "dp_shard": "auto"},
        "recompute": dict(fresh.recompute),
    }
    sections = {name: getattr(asked.values, name).model_copy(update=update) for name, update in updates.items()}
    reset = {dotted: DEFAULT for dotted in asked.origins if is_of_layout(dotted)}
    return replace(asked, values=asked.values.model_copy(update=sections), origins={**asked.origins, **reset})


def is_of_layout(dotted: str) -> bool:
    """Whether a key decides how and where a run is trained, and nothing of its weights."""
    section, _, name = dotted.partition(".")
    whole = section in ("parallel", "recompute") or (section == "precision" and name != "weights")
    return whole or dotted == "run.device" or (section == "train" and name in _OF_TRAIN)


def _start(resolution: Resolution, placement: Placement) -> Ranks:
    section = resolution.resolved.values.run
    options = StartOptions(section.device, int(section.threads), section.start_timeout, section.collective_timeout)
    return start_ranks(placement, options)


def _build(
    ranks: Ranks,
    values: RunFile,
    vocab: int | None,
    sample_shape: tuple[int, ...],
    find_tied: Callable[[], bool | None],
) -> nn.Module:
    """The model of a run on the meta device; its values come later, but for those beside an adapter, which its
    `init_weights` brings."""
    section, lora = values.model, read_lora(values.model)
    if not section.hf:
        return build_model(section, vocab=vocab, sample_shape=sample_shape)
    reads = lora is not None and section.hf_weights
    folder = ranks.first_then_all(lambda: locate_model(section.hf, weights=reads))
    tied = ranks.ask_first(find_tied)
    model = build_huggingface(folder, vocab=int(vocab or 0), seq_len=sample_shape[0], weights=reads, tied=tied)
    if lora is not None:
        model.base_fingerprint = ranks.ask_first(lambda: model.fingerprint_base(values.train.seed))
        model.add_lora(lora, None)
    return model


# --- the export


@dataclass(frozen=True)
class Which:
    """The chosen checkpoint: that of a step, the best by `checkpoint.monitor`, or else the newest."""

    step: int | None = None
    best: bool = False

    def choose(self, run: RunDir) -> int | None:
        """Its step; None for the newest. Raises UserError if there is no such checkpoint."""
        if not self.best:
            return find_checkpoint(run.path, self.step).step if self.step is not None else None
        return choose_best(run)


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
    merge: bool = False,
    which: Which = NEWEST,
) -> Exported | None:
    """Write a checkpoint of a run: as a Hugging Face folder, or, for the model of a script and with `own_names`, as
    `model.safetensors` and `model.pt`; None on a rank that has nothing to do. An adapter is written as peft reads it,
    or with `merge` as the whole model with the adapter in its weights.

    Raises UserError for a run without a checkpoint and for a model that the library has no form for, JobError if it
    cannot be written.
    """
    placement = find_placement(environ)
    if not run.checkpoint_steps():
        raise _no_checkpoint(run)
    if own_names or "model" not in run.read_resolved():  # a script trained its own model here: no [model] is known
        _check_merges(merge, "the weights are written as the checkpoint holds them")
        return export_state_dicts(run, folder, dtype, which) if placement.rank == 0 else None
    saved = run.read_resolved()["model"]
    if saved.get("adapter", "none") == "none":
        _check_merges(merge, "the run has no adapter (model.adapter), and its weights are whole")
    elif not merge:
        return _export_adapter(run, folder, dtype, which, placement) if placement.rank == 0 else None
    resolution = _resolve(run, placement.world, placement.local_world)
    ranks = _start(resolution, placement)
    exported = export_on(ranks, resolution, run, folder, dtype or "fp32", which)
    ranks.end()
    return exported


def _check_merges(merge: bool, why_not: str) -> None:
    if merge:
        raise UserError(f"--merge: {why_not}.\n  To do: leave it out.")


def _export_adapter(run: RunDir, folder: Path, dtype: str | None, which: Which, placement: Placement) -> Exported:
    """The adapter alone, as `PeftModel.from_pretrained` reads it; of the model its config is enough."""
    values = _resolve(run, placement.world, placement.local_world).resolved.values
    section, lora = values.model, read_lora(values.model)
    model = build_huggingface(
        locate_model(section.hf, weights=False), vocab=0, seq_len=values.data.seq_len, weights=False, tied=None
    )
    if lora is None:
        raise Bug("an adapter is exported of a run that has none")
    model.add_lora(lora, None)
    config = render_lora_config(model, model.targets, lora, section.hf)
    names = {f"{MODEL}.{name}": name_in_files(name) for name, _ in model.named_parameters() if is_of_adapter(name)}
    return _export_first(
        run, folder, which, lambda found: write_adapter(found, folder, names, config, FORMATS[dtype or "fp32"])
    )


def export_state_dicts(run: RunDir, folder: Path, dtype: str | None, which: Which = NEWEST) -> Exported:
    """Write a checkpoint under the names of its models, in `dtype` or as it was saved; nothing else is needed."""
    kept = FORMATS[dtype] if dtype is not None else None
    return _export_first(run, folder, which, lambda found: write_state_dicts(found, folder, kept))


def _export_first(run: RunDir, folder: Path, which: Which, write: Callable[[FoundCheckpoint], Written]) -> Exported:
    """What `write` makes of the chosen checkpoint, or of the newest that is whole."""
    passed_over: list[PassedOver] = []
    chosen = which.choose(run)
    for found in find_checkpoints(run.path) if chosen is None else [find_in_run(run, chosen)]:
        step = found.step or 0
        try:
            written = write(found)
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
    """The same as a Hugging Face folder, on ranks that have started."""
    values, chosen = resolution.resolved.values, ranks.ask_first(lambda: which.choose(run))
    vocab = values.model.vocab if isinstance(values.model.vocab, int) and not values.model.hf else None
    model = _build(ranks, values, vocab, (values.data.seq_len,), lambda: find_tie(run))
    try:
        form = form_of(model, max_positions=values.data.seq_len)
    except UserError as error:
        raise UserError(
            f"{error}\n  `--own-names` writes its weights as model.safetensors and model.pt under its own names."
        ) from None
    precision = read_precision(PrecisionSection(weights=values.precision.weights))
    options = ApplyOptions(values.parallel, precision, seed=values.train.seed)
    parallel = apply_parallelism(model, build_mesh(ranks, values.parallel), ranks.device, options)

    def check_has_weights() -> None:
        entries = list_newest(run)
        if entries and not find_models(entries):  # nothing in Shardway's form
            raise no_weights(run.path)

    ranks.together(check_has_weights)
    state = Trained(parallel.module, None)
    if chosen is None:
        loaded = load_latest(run, ranks, state)
        if loaded is None:
            raise _no_checkpoint(run)
    else:
        found = load_from(ShardStore(find_in_run(run, chosen), ranks), ranks, state)
        if isinstance(found, PassedOver):
            raise _damaged(found)
        loaded = found
    if (lora := read_lora(values.model)) is not None:
        check_base(loaded.numbers, find_base(parallel.module), values.model.hf, "Nothing was written")
        weights = merge_lora(parallel.module, lora)
    else:
        weights = {name: parameter.detach() for name, parameter in parallel.module.named_parameters()}
    save_weights(weights, form, folder, ranks, dtype=FORMATS[dtype])
    return Exported(str(folder), loaded.step, loaded.passed_over)


def _resolve(run: RunDir, ranks: int, ranks_per_node: int) -> Resolution:
    asked = lay_evenly(load_run(run.resolved_path))
    return resolve_loaded(ResolveRequest(run.resolved_path, directory=run.path), asked, ranks, ranks_per_node)


def _no_checkpoint(run: RunDir) -> UserError:
    return UserError(
        f"{run.path} holds no checkpoint to export.\n"
        "  To do: name a run directory that has one (`shardway status` lists runs and their steps)."
    )


def _damaged(chosen: PassedOver) -> JobError:
    return JobError(
        f"the checkpoint of step {chosen.step} is damaged: {chosen.reason}\n"
        "  Nothing was written. To do: choose another step; `shardway checkpoint verify` lists which are whole."
    )


# --- the import: a run directory that `shardway train` continues from weights of another tool or run


@dataclass(frozen=True)
class ImportRequest:
    """What to import: a path, the step of a run (None: its newest), the prefix of the names of the weights (None:
    found), and whether optimizer, position and random state come along (`full`)."""

    source: Path
    step: int | None = None
    prefix: str | None = None
    full: bool = False


@dataclass(frozen=True)
class Imported:
    """The beginning of an imported run: tensors and elements of the model, formats that were converted, parts of the
    source that were left out, buffers that it lacked."""

    directory: str
    step: int
    source: str
    kind: str
    full: bool
    tensors: int
    parameters: int
    converted: Mapping[str, int]
    prefix: str
    left_out: Mapping[str, int]
    initial: tuple[str, ...]


def import_run(request: ResolveRequest, wanted: ImportRequest, environ: Mapping[str, str]) -> Imported:
    """Prepare the run directory of a request. Raises UserError if the source does not fit or the directory exists,
    JobError if it cannot be written."""
    placement = find_placement(environ)
    resolution = resolve_import(request, placement.world, placement.local_world)
    _check_free(resolution.directory.path)
    ranks = _start(resolution, placement)
    imported = import_on(ranks, resolution, wanted)
    ranks.end()
    return imported


def resolve_import(request: ResolveRequest, ranks: int, ranks_per_node: int) -> Resolution:
    """A request, with a layout that shares the weights evenly over the ranks of the import. Raises UserError."""
    asked = load_run(request.run_file, request.overrides)
    if (engine := asked.values.train.engine) != "torch":
        raise UserError(
            f'train.engine ({asked.origins["train.engine"]}): "{engine}" keeps a state of its own, into which nothing '
            'can be imported.\n      allowed: "torch"'
        )
    if (adapter := asked.values.model.adapter) != "none":
        raise UserError(
            f'model.adapter ({asked.origins["model.adapter"]}): "{adapter}" begins beside the weights of model.hf, and '
            'nothing is imported for it.\n  To do: name the model in model.hf and train, or import with "none".'
        )
    return resolve_loaded(request, lay_evenly(asked), ranks, ranks_per_node)


def import_on(ranks: Ranks, resolution: Resolution, wanted: ImportRequest) -> Imported:
    """The same on ranks that have started."""
    target = resolution.directory.path
    ranks.together(lambda: _check_free(target))
    source = ranks.together(lambda: open_source(wanted.source, wanted.step))
    data = ranks.first_then_all(lambda: open_resolved(resolution.resolved))
    resolved = resolve_with_data(resolution.resolved, data.facts)
    ranks.together(lambda: _check_run(source, resolved, wanted))
    facts, values = data.train.facts, resolved.values
    model = _build(ranks, values, facts.vocab, facts.sample_shape, lambda: not has_own_head(source))
    match = ranks.together(lambda: match_source(source, model, wanted.prefix))
    tensors = len(match.fit.arrangements) + len(match.buffers)
    parameters = sum(each.numel() for each in model.parameters())
    # Training decides on layouts and formats of products.
    text = resolved.render(lambda dotted: not is_of_layout(dotted))
    with _appearing(ranks, target) as partial:

        def write_request() -> None:
            if ranks.is_first:
                with _refused(partial.path):
                    partial.write_request(resolution.loaded.text, text)

        ranks.together(write_request)
        step, converted = 0, {}
        if wanted.full and isinstance(source, OwnSource):  # the checkpoint of another run as it is
            copied = ranks.together(lambda: copy_checkpoint(source.found, partial) if ranks.is_first else None)
            step = ranks.gather(copied.step if copied is not None else 0)[0]
        else:
            converted = _write_weights(ranks, partial, match, model, values)
        ranks.together(lambda: verify_checkpoint(partial, step, ranks.rank, ranks.world))

        def write_source() -> None:
            if ranks.is_first:
                with _refused(partial.path):
                    partial.write_import(str(source.path.resolve()), step)

        ranks.together(write_source)
    return Imported(
        directory=str(target),
        step=step,
        source=str(source.path),
        kind=source.kind,
        full=wanted.full,
        tensors=tensors,
        parameters=parameters,
        converted=converted,
        prefix=match.prefix,
        left_out={} if wanted.full else match.unused,
        initial=match.initial,
    )


def _check_free(target: Path) -> None:
    if target.exists() and not (target.is_dir() and next(target.iterdir(), None) is None):
        raise UserError(
            f"{target} exists, and nothing is imported over what exists.\n"
            "  Nothing was changed. To do: name a folder that does not exist with --dir, or move it away."
        )


def _check_run(source: ForeignSource, resolved: Resolved, wanted: ImportRequest) -> None:
    """Raise UserError if the source cannot serve this run, whatever its tensors are."""
    if not isinstance(source, OwnSource):
        if wanted.full:
            raise UserError(
                f"{source.path} is {source.kind}, which has no whole state of a Shardway run.\n"
                "  Nothing was written. To do: leave out --full; the optimizer begins anew then."
            )
        return
    saved = source.resolved
    if wanted.full:
        check_same_run(saved, resolved, str(source.path.resolve().parent.parent))
    before, now = saved.get("model", {}), resolved.values.model.model_dump(mode="json")
    if before.get("hf") or now["hf"]:
        return  # then a config.json and the shapes decide
    differing = [
        Problem(
            f"model.{key}",
            f"{now[key]!r}, and the weights come from a run with {before[key]!r}",
            resolved.origins[f"model.{key}"],
            remedy=f"set it to {before[key]!r}",
        )
        for key in WEIGHT_KEYS
        if key in before and "auto" not in (before[key], now[key]) and before[key] != now[key]
    ]
    check_no_problems(f"{source.path} as the weights of this run", differing)


@contextmanager
def _appearing(ranks: Ranks, target: Path) -> Iterator[RunDir]:
    """A hidden neighbour of the run directory that is renamed to it at the end, or removed."""
    partial = target.with_name(f".{target.name}.unfinished")

    def make() -> None:
        if ranks.is_first:
            with _refused(target):
                shutil.rmtree(partial, ignore_errors=True)
                RunDir(partial).create()
                ensure_run_id(partial)

    def appear() -> None:
        if ranks.is_first:
            with _refused(target):
                fsync_folder(partial)
                os.rename(partial, target)  # refuses what is there, but for an empty folder
                fsync_folder(target.parent)

    ranks.together(make)
    try:
        yield RunDir(partial)
        ranks.together(appear)
    except BaseException:
        if ranks.is_first:
            shutil.rmtree(partial, ignore_errors=True)
        raise


@contextmanager
def _refused(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise JobError(
            f"the run directory {target} cannot be written: {error.strerror or error}.\n"
            f"  Nothing was left there. To do: {find_remedy(error, 'name another folder with --dir')}."
        ) from error


def _write_weights(ranks: Ranks, directory: RunDir, match: Match, model: nn.Module, values: RunFile) -> dict[str, int]:
    """A checkpoint of step 0 that has weights alone; returns how many tensors were converted, by formats."""

    def fill(model: Any) -> None:
        """Before the weights come: initial values, if the source lacks buffers."""
        if match.initial:
            model.init_weights(values.train.seed)

    precision = read_precision(PrecisionSection(weights=values.precision.weights))
    options = ApplyOptions(values.parallel, precision, seed=values.train.seed, fill=fill)
    parallel = apply_parallelism(model, build_mesh(ranks, values.parallel), ranks.device, options)
    ranks.together(lambda: match.fill(parallel.module))
    tensors = Trained(parallel.module, None).collect()
    origin = {"imported_from": f"{match.view.folder.resolve()} ({match.view.kind})"}
    numbers = {**Counters().as_numbers(), **origin}
    write_checkpoint(
        shared_place(directory, ranks), ranks, Content(0, numbers, tensors, count_bytes(tensors), lambda folder: None)
    )
    return match.count_conversions(parallel.module)
