"""`shardway checkpoint`: verify, inspect and diff checkpoints, export weights of a run, import weights into a new one.

Invariants:
- An existing run directory is only read; no existing file is changed.
- A damaged checkpoint is an error before any of it is shown.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardway.cli.options import DirOption, JsonOption, Words, read_request
from shardway.errors import JobError, UserError, legible, list_some

if TYPE_CHECKING:
    from shardway.checkpoint.catalog import CheckpointHead, TensorEntry, Verified
    from shardway.checkpoint.diff import FileDifference, TensorDifference
    from shardway.train.run_weights import Imported
    from shardway.watch.progress import BestCheckpoint


# --- inspect and diff

DIFFERS = 1
"""Exit code of a comparison that found a difference, as in diff(1)."""


class ContentPart(StrEnum):
    """The part of a run that the tensors of a checkpoint belong to."""

    model = "model"
    optimizer = "optimizer"
    random = "random"
    kept = "kept"
    script = "script"


CheckpointArgument = Annotated[
    Path, typer.Argument(help="A run directory, or the folder of one checkpoint.", show_default=False)
]
StepOption = Annotated[int | None, typer.Option("--step", min=0, help="The step (default: the newest).")]
OtherStepOption = Annotated[int | None, typer.Option("--other-step", min=0, help="The step of OTHER.")]
PartOption = Annotated[list[ContentPart] | None, typer.Option("--part", help="Compare only this; may be given again.")]
HeadOption = Annotated[bool, typer.Option("--head", help="What the manifest says alone, without the tensors.")]


def inspect(
    run: CheckpointArgument, step: StepOption = None, head: HeadOption = False, as_json: JsonOption = False
) -> None:
    """Show what is in a checkpoint: step, ranks, counters, files, tensors with shape, dtype and size."""
    from shardway.checkpoint.catalog import find_checkpoint, list_entries, read_head
    from shardway.rundir.file_io import render_json

    known = read_head(find_checkpoint(run, step))
    entries = None if head else list_entries(known)
    if as_json:
        tensors = {} if entries is None else {"parts": _total(entries), "tensors": [asdict(each) for each in entries]}
        typer.echo(render_json({**known.as_json(), **tensors}, indent=1))
        return
    for line in [*_render_head(known), *_render_entries(entries or ())]:
        typer.echo(legible(line))


def diff(
    run: CheckpointArgument,
    other: CheckpointArgument,
    step: StepOption = None,
    other_step: OtherStepOption = None,
    part: PartOption = None,
    as_json: JsonOption = False,
) -> int:
    """Compare two checkpoints tensor by tensor; exit code 1 where they differ, 0 where every bit is the same.

    Every byte of both is compared with its checksum first. Random states are a part: of runs with other numbers of
    ranks, compare `--part model --part optimizer`.
    """
    _check_torch()
    from shardway.checkpoint.catalog import find_checkpoint, verify_found
    from shardway.checkpoint.diff import find_differences, find_other_files
    from shardway.checkpoint.reader import TensorReader
    from shardway.rundir.file_io import render_json

    found = find_checkpoint(run, step), find_checkpoint(other, other_step)
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
    if as_json:
        said = {
            "first": str(found[0].folder),
            "second": str(found[1].folder),
            "equal": not tensors and not files,
            "compared": compared,
            "tensors": [each.as_json() for each in tensors],
            "files": [asdict(each) for each in files],
        }
        typer.echo(render_json(said, indent=1))
    else:
        for line in _render_end(compared, tensors, files):
            typer.echo(line)
    return DIFFERS if tensors or files else 0


def _check_torch() -> None:
    from shardway.errors import SiteError

    try:
        import torch  # noqa: F401
    except ModuleNotFoundError as error:
        raise SiteError(
            f"tensors cannot be compared here: {error}.\n"
            "  To do: run it where torch is installed; `shardway checkpoint inspect` needs none."
        ) from None


def _total(entries: Iterable[TensorEntry]) -> dict[str, dict[str, int]]:
    totals: dict[str, dict[str, int]] = {}
    for each in entries:
        total = totals.setdefault(each.part, {"tensors": 0, "bytes": 0})
        total["tensors"] += 1
        total["bytes"] += each.bytes
    return totals


def _render_head(head: CheckpointHead) -> list[str]:
    from shardway.watch.words import render_plural, render_size

    manifest = head.manifest
    numbers = ", ".join(f"{name} {value}" for name, value in manifest.numbers.items() if name != "step")
    return [
        f"{head.found.folder}",
        f"step {manifest.step}, saved by {render_plural(manifest.world, 'rank')}; {numbers or 'no counters'}",
        f"{render_plural(len(manifest.files), 'file')}, {render_size(manifest.total_bytes)}",
        *(f"  {render_size(seal.bytes):>9}  {name}" for name, seal in sorted(manifest.files.items())),
    ]


def _render_entries(entries: Sequence[TensorEntry]) -> list[str]:
    from shardway.watch.words import render_plural, render_size

    width = max((len(each.name) for each in entries), default=0)
    lines = []
    for part, total in _total(entries).items():
        lines.append(f"{part}: {render_plural(total['tensors'], 'tensor')}, {render_size(total['bytes'])}")
        lines += [
            f"  {each.name:<{width}}  {each.dtype:<9} {render_size(each.bytes):>9}  {_render_shape(each)}"
            for each in entries
            if each.part == part
        ]
    return lines


def _render_shape(entry: TensorEntry) -> str:
    return " x ".join(map(str, entry.shape)) or "1"


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


def _render_end(compared: int, tensors: Sequence[TensorDifference], files: Sequence[FileDifference]) -> list[str]:
    from shardway.watch.words import render_plural, render_size

    if not tensors and not files:
        return [f"equal: every bit of {render_plural(compared, 'tensor')}"]
    sizes = [
        [render_size(size) if size is not None else "none" for size in (each.first, each.second)] for each in files
    ]
    return [
        *(f"{each.name}  {one} against {other}" for each, (one, other) in zip(files, sizes, strict=True)),
        f"{len(tensors)} of {render_plural(compared, 'tensor')} differ, {render_plural(len(files), 'other file')}",
    ]


# --- import

SourceArgument = Annotated[
    Path,
    typer.Argument(
        help="Safetensors (a folder or a file), a folder of torch.distributed.checkpoint, a file of torch.save, or a "
        "run directory of Shardway or one of its checkpoints.",
        show_default=False,
    ),
]
FullOption = Annotated[
    bool, typer.Option("--full", help="Of a Shardway checkpoint: optimizer, position and random state as well.")
]
PrefixOption = Annotated[
    str | None, typer.Option("--prefix", help="What stands before the names of the weights (default: found).")
]
SourceStepOption = Annotated[
    int | None, typer.Option("--step", min=0, help="Of a run: the step (default: the newest).")
]


def import_(
    source: SourceArgument,
    words: Words = None,
    directory: DirOption = None,
    full: FullOption = False,
    step: SourceStepOption = None,
    prefix: PrefixOption = None,
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
        typer.echo(json.dumps(asdict(imported), indent=1))
        return
    for line in _render(imported):
        typer.echo(legible(line))


def _render(imported: Imported) -> Iterator[str]:
    from shardway.watch.words import render_plural

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

app = typer.Typer(
    help="Whether a run's checkpoints are whole, what is in them, and weights to and from elsewhere.",
    no_args_is_help=True,
)


app.command("inspect")(inspect)
app.command("diff")(diff)
app.command("import")(import_)


class Format(StrEnum):
    """Number formats of exported weights."""

    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


_OF_OWN_NAMES = ("files", "left_out")
"""Facts of an export that are reported only if they are not empty."""


@app.command("verify")
def verify(
    run: CheckpointArgument,
    as_json: JsonOption = False,
) -> int:
    """Compare every byte of every checkpoint with its checksum; exit code 4 where one is damaged.

    Nothing is changed: a run that goes on sets damaged ones aside itself.
    """
    from shardway.checkpoint.catalog import find_checkpoints, verify_all
    from shardway.rundir.directory import RunDir
    from shardway.watch.progress import find_best_checkpoint

    found, best = [], None
    with contextlib.suppress(JobError):  # unreadable events do not make a checkpoint damaged
        best = find_best_checkpoint(RunDir(run))
    for each in verify_all(find_checkpoints(run)):
        found.append(each)
        if not as_json:
            typer.echo(legible(_render_verified(each, best)))
    if as_json:
        marked = [{**each.as_json(), "best": best is not None and each.step == best.step} for each in found]
        typer.echo(json.dumps(marked, indent=1))
    return 0 if all(each.is_whole for each in found) else 4


def _render_verified(each: Verified, best: BestCheckpoint | None) -> str:
    from shardway.watch.words import render_monitored, render_size

    if each.manifest is None or not each.is_whole:
        return f"{each.name}  damaged: {'; '.join(each.reasons)}"
    files, ranks = len(each.manifest.files), each.manifest.world
    mark = ""
    if best is not None and each.step == best.step:
        mark = f", the best: {render_monitored(best.metric, best.value)}"
    return (
        f"{each.name}  whole  {render_size(each.manifest.total_bytes)} in {files} file{'s' * (files != 1)}, "
        f"saved by {ranks} rank{'s' * (ranks != 1)}{mark}"
    )


@app.command("export")
def export(
    run: Annotated[Path, typer.Argument(help="The run directory.")],
    folder: Annotated[Path, typer.Argument(help="The folder to write; it must not exist.")],
    dtype: Annotated[
        Format | None,
        typer.Option(help="Number format of the weights that are written; else fp32, or under own names as saved."),
    ] = None,
    step: Annotated[int | None, typer.Option("--step", min=0, help="The step (default: the newest).")] = None,
    best: Annotated[
        bool, typer.Option("--best", help="The one with the best validation by checkpoint.monitor, of those kept.")
    ] = False,
    own_names: Annotated[
        bool, typer.Option("--own-names", help="model.safetensors and model.pt under the model's own names.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Write a checkpoint (by default the newest) as a folder that `from_pretrained` reads; of a script's model, as
    `model.safetensors` and `model.pt` (a `state_dict`) under its own names.

    A model that one process cannot hold is exported by several: `torchrun --nproc-per-node 8 -m shardway checkpoint
    export ...`.
    """
    from shardway.ranks.launcher import find_placement
    from shardway.rundir.directory import RunDir
    from shardway.train.run_weights import Which, export_run

    if best and step is not None:
        raise UserError(f"--best and --step {step} name two checkpoints.\n  To do: leave one of them out.")
    which = Which(step, best)
    exported = export_run(RunDir(run), folder, dtype and dtype.value, os.environ, own_names=own_names, which=which)
    if exported is not None and find_placement(os.environ).rank == 0:
        for damaged in exported.passed_over:
            typer.echo(f"step {damaged.step} is damaged and was passed over: {damaged.reason}", err=True)
        for why in exported.left_out:
            typer.echo(why, err=True)
        facts = {name: value for name, value in asdict(exported).items() if value or name not in _OF_OWN_NAMES}
        files = f": {', '.join(exported.files)}" if exported.files else ""
        told = f"step {exported.step} written to {exported.folder}{files}"
        typer.echo(json.dumps(facts, indent=1) if as_json else told)
