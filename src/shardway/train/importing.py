"""Makes a run directory that `shardway train` continues from weights of another tool or run.

Invariant: the run directory appears complete or not at all, and nothing that exists is touched. Its checkpoint is like
any other, so every layout can read it. Each rank holds its share of the model. This module must not train.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from shardway.checkpoint.catalog import copy_checkpoint, verify_checkpoint
from shardway.checkpoint.folders import shared_place
from shardway.checkpoint.import_match import Match, has_own_head, match_source, open_source
from shardway.checkpoint.import_sources import ForeignSource, OwnSource
from shardway.checkpoint.state import Trained, count_bytes
from shardway.checkpoint.writer import Content, write_checkpoint
from shardway.data.open import Data, open_described
from shardway.errors import JobError, Problem, UserError, check_no_problems
from shardway.hfconfig import locate_model
from shardway.models.build import build_model
from shardway.models.huggingface.build import build_huggingface
from shardway.parallel.apply import ApplyOptions, apply_parallelism
from shardway.parallel.formats.precision import read_precision
from shardway.parallel.mesh import build_mesh
from shardway.ranks.launcher import find_placement
from shardway.ranks.start import Ranks, StartOptions, start_ranks
from shardway.refusals import find_remedy
from shardway.resolve import Resolved, check_same_run, resolve_with_data
from shardway.resolve.draft import WEIGHT_KEYS
from shardway.resolve.request import Resolution, ResolveRequest, resolve_loaded
from shardway.rundir.directory import RunDir
from shardway.rundir.file_io import fsync_folder
from shardway.rundir.names import ensure_run_id
from shardway.runfile.load import load_run
from shardway.runfile.schema import PrecisionSection, RunFile
from shardway.train.export import is_of_layout, lay_evenly
from shardway.train.loop_state import Counters


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
    section = resolution.resolved.values.run
    options = StartOptions(section.device, int(section.threads), section.start_timeout, section.collective_timeout)
    ranks = start_ranks(placement, options)
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
    return resolve_loaded(request, lay_evenly(asked), ranks, ranks_per_node)


def import_on(ranks: Ranks, resolution: Resolution, wanted: ImportRequest) -> Imported:
    """The same on ranks that have started."""
    target = resolution.directory.path
    ranks.together(lambda: _check_free(target))
    source = ranks.together(lambda: open_source(wanted.source, wanted.step))
    data = ranks.first_then_all(lambda: open_described(resolution.resolved.values))
    resolved = resolve_with_data(resolution.resolved, data.facts)
    ranks.together(lambda: _check_run(source, resolved, wanted))
    model = _build(ranks, resolved.values, data, source)
    match = ranks.together(lambda: match_source(source, model, wanted.prefix))
    counts = len(match.fit.arrangements) + len(match.buffers), sum(each.numel() for each in model.parameters())
    with _appearing(ranks, target) as partial:
        ranks.together(lambda: _begin(partial, resolution, resolved) if ranks.is_first else None)
        write = _write_full if wanted.full else _write_weights
        step, converted = write(ranks, partial, match, _Target(model, resolved.values))
        ranks.together(lambda: verify_checkpoint(partial, step, ranks.rank, ranks.world))
    return Imported(
        directory=str(target),
        step=step,
        source=str(source.path),
        kind=source.kind,
        full=wanted.full,
        tensors=counts[0],
        parameters=counts[1],
        converted=converted,
        prefix=match.prefix,
        left_out={} if wanted.full else match.unused,
        initial=match.initial,
    )


# --- what is checked


def _check_free(target: Path) -> None:
    if target.exists() and not (target.is_dir() and next(target.iterdir(), None) is None):
        raise UserError(
            f"{target} exists, and nothing is imported over what exists.\n"
            "  Nothing was changed. To do: name a folder that does not exist with --dir, or move it away."
        )


def _check_run(source: ForeignSource, resolved: Resolved, wanted: ImportRequest) -> None:
    """Raise UserError if the source cannot serve this run, whatever its tensors are."""
    if wanted.full and not isinstance(source, OwnSource):
        raise UserError(
            f"{source.path} is {source.kind}, which has no whole state of a Shardway run.\n"
            "  Nothing was written. To do: leave out --full; the optimizer begins anew then."
        )
    if not isinstance(source, OwnSource):
        return
    saved = source.resolved
    if wanted.full:
        check_same_run(saved, resolved, str(source.path.resolve().parent.parent))
    check_no_problems(f"{source.path} as the weights of this run", _list_other_keys(saved, resolved))


def _list_other_keys(saved: Mapping[str, Any], resolved: Resolved) -> list[Problem]:
    """Keys of [model] that decide what weights mean and differ from those of the source's run."""
    before, now = saved.get("model", {}), resolved.values.model.model_dump(mode="json")
    if before.get("hf") or now["hf"]:
        return []  # then a config.json and the shapes decide
    return [
        Problem(
            f"model.{key}",
            f"{now[key]!r}, and the weights come from a run with {before[key]!r}",
            resolved.origins[f"model.{key}"],
            remedy=f"set it to {before[key]!r}",
        )
        for key in WEIGHT_KEYS
        if key in before and "auto" not in (before[key], now[key]) and before[key] != now[key]
    ]


# --- what is written


@dataclass(frozen=True)
class _Target:
    """The model of the run on the meta device, and the run."""

    model: nn.Module
    values: RunFile


@contextmanager
def _appearing(ranks: Ranks, target: Path) -> Iterator[RunDir]:
    """A hidden neighbour of the run directory that is renamed to it at the end, or removed."""
    partial = target.with_name(f".{target.name}.unfinished")
    ranks.together(lambda: _refused(target, lambda: _make(partial)) if ranks.is_first else None)
    try:
        yield RunDir(partial)
        ranks.together(lambda: _refused(target, lambda: _appear(partial, target)) if ranks.is_first else None)
    except BaseException:
        if ranks.is_first:
            shutil.rmtree(partial, ignore_errors=True)
        raise


def _make(partial: Path) -> None:
    shutil.rmtree(partial, ignore_errors=True)
    RunDir(partial).create()
    ensure_run_id(partial)


def _appear(partial: Path, target: Path) -> None:
    fsync_folder(partial)
    os.rename(partial, target)  # refuses what is there, but for an empty folder
    fsync_folder(target.parent)


def _refused(target: Path, work: Callable[[], None]) -> None:
    try:
        work()
    except OSError as error:
        raise JobError(
            f"the run directory {target} cannot be written: {error.strerror or error}.\n"
            f"  Nothing was left there. To do: {find_remedy(error, 'name another folder with --dir')}."
        ) from error


def _begin(directory: RunDir, resolution: Resolution, resolved: Resolved) -> None:
    """Write the request; training decides on layouts and formats of products."""
    text = resolved.render(lambda dotted: not is_of_layout(dotted))
    _refused(directory.path, lambda: directory.write_request(resolution.loaded.text, text))


def _write_full(ranks: Ranks, directory: RunDir, match: Match, target: _Target) -> tuple[int, dict[str, int]]:
    """The checkpoint of another run as it is."""
    source = match.view.source
    if not isinstance(source, OwnSource):
        raise UserError(f"{source.path} is no Shardway checkpoint.")
    copied = ranks.together(lambda: copy_checkpoint(source.found, directory) if ranks.is_first else None)
    return ranks.gather(copied.step if copied is not None else 0)[0], {}


def _write_weights(ranks: Ranks, directory: RunDir, match: Match, target: _Target) -> tuple[int, dict[str, int]]:
    """A checkpoint of step 0 that has weights alone."""
    values = target.values
    precision = read_precision(PrecisionSection(weights=values.precision.weights))
    options = ApplyOptions(values.parallel, precision, seed=values.train.seed, fill=_filler(match, values.train.seed))
    parallel = apply_parallelism(target.model, build_mesh(ranks, values.parallel), ranks.device, options)
    ranks.together(lambda: match.fill(parallel.module))
    tensors = Trained(parallel.module, None).collect()
    origin = {"imported_from": f"{match.view.folder.resolve()} ({match.view.source.kind})"}
    numbers = {**Counters().as_numbers(), **origin}
    write_checkpoint(
        shared_place(directory, ranks), ranks, Content(0, numbers, tensors, count_bytes(tensors), lambda folder: None)
    )
    return 0, match.count_conversions(parallel.module)


def _filler(match: Match, seed: int) -> Callable[[nn.Module], None]:
    """The function that runs before the weights come: none, or initial values if the source lacks buffers."""

    def fill(model: Any) -> None:
        if match.initial:
            model.init_weights(seed)

    return fill


def _build(ranks: Ranks, values: RunFile, data: Data, source: ForeignSource) -> nn.Module:
    """The model of the run file on the meta device, as training builds it with the weights of this source."""
    section, facts = values.model, data.train.facts
    if not section.hf:
        return build_model(section, vocab=facts.vocab, sample_shape=facts.sample_shape)
    folder = ranks.first_then_all(lambda: locate_model(section.hf, weights=False))
    tied = not ranks.ask_first(lambda: has_own_head(source))
    size = int(facts.vocab or 0)
    return build_huggingface(folder, vocab=size, seq_len=facts.sample_shape[0], weights=False, tied=tied)
