"""`shardway checkpoint`: verify, inspect and diff checkpoints, export weights of a run, import weights into a new one.

Invariants:
- An existing run directory is only read; no existing file is changed.
- A damaged checkpoint is an error before any of it is shown.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardway.cli.options import DirOption, JsonOption, Words, complete_run, find_place, print_json, read_request
from shardway.errors import JobError, UserError, legible, list_some
from shardway.installed import check_torch

if TYPE_CHECKING:
    from shardway.checkpoint.catalog import CheckpointHead, TensorEntry
    from shardway.checkpoint.reader import TensorDifference
    from shardway.train.run_weights import Imported

app = typer.Typer(
    help="Whether a run's checkpoints are whole, what is in them, and weights to and from elsewhere.",
    no_args_is_help=True,
)

CheckpointArgument = Annotated[
    Path,
    typer.Argument(
        help="A run directory, or the folder of one checkpoint.", show_default=False, autocompletion=complete_run
    ),
]
StepOption = Annotated[int | None, typer.Option("--step", min=0, help="The step (default: the newest).")]


# --- inspect and diff


class ContentPart(StrEnum):
    """The part of a run that the tensors of a checkpoint belong to."""

    model = "model"
    optimizer = "optimizer"
    random = "random"
    kept = "kept"
    script = "script"


@app.command("inspect")
def inspect(
    run: CheckpointArgument,
    step: StepOption = None,
    head: Annotated[bool, typer.Option("--head", help="What the manifest says alone, without the tensors.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show what is in a checkpoint: step, ranks, counters, files, tensors with shape, dtype and size."""
    from shardway.checkpoint.catalog import find_checkpoint, list_entries, read_head
    from shardway.rundir.file_io import render_json

    known = read_head(find_checkpoint(find_place(run), step))
    entries = [] if head else list_entries(known)
    totals: dict[str, dict[str, int]] = {}
    for each in entries:
        total = totals.setdefault(each.part, {"tensors": 0, "bytes": 0})
        total["tensors"] += 1
        total["bytes"] += each.bytes
    if as_json:
        tensors = {} if head else {"parts": totals, "tensors": [asdict(each) for each in entries]}
        typer.echo(render_json({**known.as_json(), **tensors}, indent=1))
        return
    for line in _render_contents(known, entries, totals):
        typer.echo(legible(line))


def _render_contents(
    head: CheckpointHead, entries: Sequence[TensorEntry], totals: dict[str, dict[str, int]]
) -> Iterator[str]:
    from shardway.units import render_plural
    from shardway.watch.words import render_size

    manifest = head.manifest
    numbers = ", ".join(f"{name} {value}" for name, value in manifest.numbers.items() if name != "step")
    yield f"{head.found.folder}"
    yield f"step {manifest.step}, saved by {render_plural(manifest.world, 'rank')}; {numbers or 'no counters'}"
    yield f"{render_plural(len(manifest.files), 'file')}, {render_size(manifest.total_bytes)}"
    for name, seal in sorted(manifest.files.items()):
        yield f"  {render_size(seal.bytes):>9}  {name}"
    width = max((len(each.name) for each in entries), default=0)
    for part, total in totals.items():
        yield f"{part}: {render_plural(total['tensors'], 'tensor')}, {render_size(total['bytes'])}"
        for each in entries:
            if each.part == part:
                size = render_size(each.bytes)
                yield f"  {each.name:<{width}}  {each.dtype:<9} {size:>9}  {_render_shape(each)}"


def _render_shape(entry: TensorEntry) -> str:
    return " x ".join(map(str, entry.shape)) or "1"


@app.command("diff")
def diff(
    run: CheckpointArgument,
    other: CheckpointArgument,
    step: StepOption = None,
    other_step: Annotated[int | None, typer.Option("--other-step", min=0, help="The step of OTHER.")] = None,
    part: Annotated[
        list[ContentPart] | None, typer.Option("--part", help="Compare only this; may be given again.")
    ] = None,
    as_json: JsonOption = False,
) -> int:
    """Compare two checkpoints tensor by tensor; exit code 1 where they differ, 0 where every bit is the same.

    Every byte of both is compared with its checksum first. Random states are a part: of runs with other numbers of
    ranks, compare `--part model --part optimizer`.
    """
    check_torch("`shardway checkpoint diff`")
    from shardway.checkpoint.catalog import find_checkpoint, verify_found
    from shardway.checkpoint.reader import TensorReader, find_differences, find_other_files
    from shardway.rundir.file_io import render_json
    from shardway.units import render_plural
    from shardway.watch.words import render_size

    found = find_checkpoint(find_place(run), step), find_checkpoint(find_place(other), other_step)
    manifests = [verify_found(each) for each in found]
    readers = TensorReader(found[0].folder), TensorReader(found[1].folder)
    parts = [each.value for each in part or ContentPart]
    tensors = []
    for each in find_differences(*readers, parts):
        tensors.append(each)
        if not as_json:
            typer.echo(_render_difference(each))
    files = find_other_files(*manifests) if part is None else []
    compared = len({name for reader in readers for name, entry in reader.entries.items() if entry.part in parts})
    differs = bool(tensors or files)
    if as_json:
        said = {
            "first": str(found[0].folder),
            "second": str(found[1].folder),
            "equal": not differs,
            "compared": compared,
            "tensors": [each.as_json() for each in tensors],
            "files": [asdict(each) for each in files],
        }
        typer.echo(render_json(said, indent=1))
    elif differs:
        for file in files:
            sizes = (render_size(size) if size is not None else "none" for size in (file.first, file.second))
            typer.echo(f"{file.name}  {' against '.join(sizes)}")
        others = render_plural(len(files), "other file")
        typer.echo(f"{len(tensors)} of {render_plural(compared, 'tensor')} differ, {others}")
    else:
        typer.echo(f"equal: every bit of {render_plural(compared, 'tensor')}")
    return int(differs)  # as diff(1) does


def _render_difference(each: TensorDifference) -> str:
    if each.first is None or each.second is None:
        return f"{each.name}  only in the {'first' if each.second is None else 'second'}"
    if each.values is None:
        one, other = (f"{entry.dtype} {_render_shape(entry)}" for entry in (each.first, each.second))
        return f"{each.name}  {one} against {other}"
    values = each.values
    return (
        f"{each.name}  {values.elements - values.same_bits} of {values.elements} numbers differ, by at most "
        f"{values.max_absolute:.3g} ({values.max_relative:.3g} of the larger)"
    )


# --- import


@app.command("import")
def import_(
    source: Annotated[
        Path,
        typer.Argument(
            help="Safetensors (a folder or a file), a folder of torch.distributed.checkpoint, a file of torch.save, "
            "or a run directory of Shardway or one of its checkpoints.",
            show_default=False,
        ),
    ],
    words: Words = None,
    directory: DirOption = None,
    full: Annotated[
        bool, typer.Option("--full", help="Of a Shardway checkpoint: optimizer, position and random state as well.")
    ] = False,
    step: Annotated[int | None, typer.Option("--step", min=0, help="Of a run: the step (default: the newest).")] = None,
    prefix: Annotated[
        str | None, typer.Option("--prefix", help="What stands before the names of the weights (default: found).")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Make a run directory that begins with weights from elsewhere: `shardway train` then starts from them.

    Name the run file and keys as for `shardway train`. A model that one process cannot hold is imported by several:
    `torchrun --nproc-per-node 8 -m shardway checkpoint import ...`.
    """
    request = read_request(words, directory)
    from shardway.ranks.launcher import find_placement
    from shardway.train.run_weights import ImportRequest, import_run

    imported = import_run(request, ImportRequest(source, step, prefix, full), os.environ)
    if find_placement(os.environ).rank != 0:
        return
    if as_json:
        print_json(asdict(imported))
        return
    for line in _render_imported(imported):
        typer.echo(legible(line))


def _render_imported(imported: Imported) -> Iterator[str]:
    from shardway.units import render_plural

    what = "everything" if imported.full else f"{render_plural(imported.tensors, 'tensor')} of the model"
    yield f"{what} ({imported.parameters} parameters) from {imported.source}, {imported.kind}"
    if imported.prefix and not imported.full:
        yield f"names there begin with {imported.prefix}"
    for conversion, count in imported.converted.items():
        yield f"converted from {conversion}: {render_plural(count, 'tensor')}"
    for part, count in imported.left_out.items():
        yield f"not used: {part} ({render_plural(count, 'tensor')})"
    if imported.initial:
        yield f"not there, so with initial values: {list_some(imported.initial, 8)}"
    begins = f"goes on after step {imported.step}" if imported.full else "begins with them and a fresh optimizer"
    yield f"{imported.directory}: `shardway train` with the same run file and --dir {begins}"


# --- verify and export


@app.command("verify")
def verify(run: CheckpointArgument, as_json: JsonOption = False) -> int:
    """Compare every byte of every checkpoint with its checksum; exit code 4 where one is damaged.

    Nothing is changed: a run that goes on sets damaged ones aside itself.
    """
    from shardway.checkpoint.catalog import find_checkpoints, verify_all
    from shardway.rundir.directory import RunDir
    from shardway.units import render_plural
    from shardway.watch.progress import find_best_checkpoint
    from shardway.watch.words import render_monitored, render_size

    found, best = [], None
    with contextlib.suppress(JobError):  # unreadable events do not make a checkpoint damaged
        best = find_best_checkpoint(RunDir(find_place(run)))
    for each in verify_all(find_checkpoints(find_place(run))):
        found.append(each)
        line = f"{each.name}  damaged: {'; '.join(each.reasons)}"
        if each.manifest is not None and each.is_whole:
            size, ranks = render_size(each.manifest.total_bytes), render_plural(each.manifest.world, "rank")
            line = f"{each.name}  whole  {size} in {render_plural(len(each.manifest.files), 'file')}, saved by {ranks}"
            if best is not None and each.step == best.step:
                line += f", the best: {render_monitored(best.metric, best.value)}"
        if not as_json:
            typer.echo(legible(line))
    if as_json:
        print_json([{**each.as_json(), "best": best is not None and each.step == best.step} for each in found])
    return 0 if all(each.is_whole for each in found) else 4


class Format(StrEnum):
    """Number formats of exported weights."""

    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


@app.command("export")
def export(
    run: Annotated[Path, typer.Argument(help="The run directory.", autocompletion=complete_run)],
    folder: Annotated[Path, typer.Argument(help="The folder to write; it must not exist.")],
    dtype: Annotated[
        Format | None,
        typer.Option(help="Number format of the weights that are written; else fp32, or under own names as saved."),
    ] = None,
    step: StepOption = None,
    best: Annotated[
        bool, typer.Option("--best", help="The one with the best validation by checkpoint.monitor, of those kept.")
    ] = False,
    own_names: Annotated[
        bool, typer.Option("--own-names", help="model.safetensors and model.pt under the model's own names.")
    ] = False,
    merge: Annotated[
        bool, typer.Option("--merge", help="Of an adapter: the whole model, with the adapter added to its weights.")
    ] = False,
    tokenizer: Annotated[
        bool, typer.Option("--tokenizer", help="With the tokenizer of the run's data, as servers of models need it.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Write a checkpoint (by default the newest) as a folder that `from_pretrained` reads; of an adapter, as peft's
    `PeftModel.from_pretrained` does; of a script's model, as `model.safetensors` and `model.pt` (a `state_dict`) under
    its own names.

    A model that one process cannot hold is exported by several: `torchrun --nproc-per-node 8 -m shardway checkpoint
    export ...`.
    """
    from shardway.ranks.launcher import find_placement
    from shardway.rundir.directory import RunDir
    from shardway.train.run_weights import Which, export_run

    if best and step is not None:
        raise UserError(f"--best and --step {step} name two checkpoints.\n  To do: leave one of them out.")
    which = Which(step, best)
    beside = None
    if tokenizer:
        from shardway.infer.model import open_run_tokenizer

        beside = open_run_tokenizer(find_place(run))
    exported = export_run(
        *(RunDir(find_place(run)), folder, dtype and dtype.value, os.environ),
        own_names=own_names,
        merge=merge,
        which=which,
    )
    if exported is None or find_placement(os.environ).rank != 0:
        return
    if beside is not None:
        beside.save_pretrained(str(folder))
    for damaged in exported.passed_over:
        typer.echo(f"step {damaged.step} is damaged and was passed over: {damaged.reason}", err=True)
    for why in exported.left_out:
        typer.echo(why, err=True)
    if as_json:
        facts = asdict(exported)
        print_json({name: facts[name] for name in facts if facts[name] or name not in ("files", "left_out")})
        return
    files = f": {', '.join(exported.files)}" if exported.files else ""
    typer.echo(f"step {exported.step} written to {exported.folder}{files}")
