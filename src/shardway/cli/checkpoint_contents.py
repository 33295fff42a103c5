"""`shardway checkpoint inspect` and `diff`: what is in a checkpoint, and in what two differ.

Invariant: nothing is written; what is damaged is an error before anything of it is shown. This module must not compare:
`shardway.checkpoint` does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardway.cli.options import JsonOption
from shardway.errors import legible

if TYPE_CHECKING:
    from shardway.checkpoint.contents import CheckpointHead, TensorEntry
    from shardway.checkpoint.diff import FileDifference, TensorDifference

DIFFERS = 1
"""Exit code of a comparison that found a difference, as that of diff(1)."""


class ContentPart(StrEnum):
    """What of a run the tensors of a checkpoint belong to."""

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
    from shardway.checkpoint.contents import list_entries, read_head
    from shardway.checkpoint.find import find_checkpoint
    from shardway.rundir.atomic import render_json

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
    from shardway.checkpoint.diff import find_differences, find_other_files
    from shardway.checkpoint.find import find_checkpoint
    from shardway.checkpoint.tensors import TensorReader
    from shardway.checkpoint.verify import verify_found
    from shardway.rundir.atomic import render_json

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
