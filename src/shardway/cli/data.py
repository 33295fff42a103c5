"""`shardway data`: look into data of any format, prepare, index, verify, repair and convert it, and say which samples
a step had.

Invariants:
- Data are only read, except by prepare, convert and repair, which write to the path that is given, and index, which
  keeps what it makes beside the data or in the user's cache.
- An existing folder is never written over, and nothing is written into the data that are read.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardway.cli.options import JsonOption, RunName, print_json, report
from shardway.errors import SiteError, UserError, legible, render_problems

if TYPE_CHECKING:
    from shardway.data.formats.base import Records
    from shardway.data.ledger import SampleLedger

app = typer.Typer(
    help="Look into data of any format; prepare, index, verify, repair, convert it; which samples a step had.",
    no_args_is_help=True,
)

PathArgument = Annotated[
    str, typer.Argument(metavar="PATH", help="A file, a folder, or a pattern in quotes such as 'train-{000..127}.tar'.")
]
KindOption = Annotated[
    str, typer.Option("--kind", help="The format, as data.kind names it (default: what lies there).")
]


# --- what is there


@app.command("info")
def info(path: PathArgument, kind: KindOption = "", as_json: JsonOption = False) -> None:
    """Say which format it is, and how many samples, files and bytes it has; nothing of it is read but its index."""
    from shardway.units import render_plural
    from shardway.watch.words import render_size

    facts = _describe(_open(path, kind))
    if as_json:
        print_json({"path": path, **facts})
        return
    typer.echo(legible(f"{path}: {facts['kind']}"))
    typer.echo(
        f"{render_plural(facts['samples'], 'sample')}, {render_plural(facts['files'], 'file')}, "
        f"{render_size(facts['bytes'])}" + (f", {facts['tokens']} tokens" if "tokens" in facts else "")
    )
    for name, value in facts["fields"].items():
        typer.echo(legible(f"  {name}: {value}"))
    typer.echo(f"checksums: {facts['checksums']}")
    typer.echo(f"fingerprint: {facts['fingerprint']}")


def _open(path: str, kind: str = "") -> Records:
    from shardway.data.detect import open_records, place_of

    return open_records(place_of(path), kind)


def _describe(records: Records) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "kind": records.format,
        "samples": len(records),
        "files": len(records.parts.files),
        "bytes": records.parts.size,
        "fingerprint": records.fingerprint,
        "fields": records.fields,
        "checksums": records.describe_checks(),
    }
    return facts | records.more_facts()


@app.command("head")
def head(
    path: PathArgument,
    number: Annotated[int, typer.Option("-n", min=1, help="How many samples.")] = 3,
    first: Annotated[int, typer.Option("--from", min=0, help="The number of the first of them.")] = 0,
    kind: KindOption = "",
    as_json: JsonOption = False,
) -> None:
    """Show the first samples, or those from a number on; with --json a line a sample, whole but for bytes."""
    records = _open(path, kind)
    if first >= len(records):
        raise UserError(
            f"--from: {first} is beyond the last of {len(records)} samples\n  allowed: 0 to {len(records) - 1}"
        )
    for at in range(first, min(first + number, len(records))):
        shown = {name: _show(value, whole=as_json, name=name) for name, value in records.read([at])[0].items()}
        if as_json:
            typer.echo(json.dumps({"sample": at, "at": str(records.extent(at)), **shown}))
            continue
        typer.echo(legible(f"{at}  {records.extent(at)}"))
        for name, value in shown.items():
            typer.echo(legible(f"    {name}: {_in_words(value)}"))


_SHOWN = 120


def _in_words(shown: Any) -> str:
    """What `_show` gives as one line for a person."""
    from shardway.units import render_plural

    if isinstance(shown, dict) and shown.keys() >= {"bytes", "begins"}:
        return f"{render_plural(shown['bytes'], 'byte')}, " + (
            repr(shown["text"]) if "text" in shown else shown["begins"]
        )
    if isinstance(shown, dict) and shown.keys() == {"dtype", "shape", "begins"}:
        return f"{shown['dtype']} {shown['shape']}, begins with {', '.join(map(str, shown['begins']))}"
    return shown.replace("\n", "\\n") if isinstance(shown, str) else json.dumps(shown, ensure_ascii=False)


def _show(value: Any, *, whole: bool, name: str = "") -> Any:
    """A value as JSON has it: bytes by their number and beginning, arrays by type and shape, rows of integers whole."""
    import numpy as np

    if isinstance(value, bytes | bytearray):
        shown = {"bytes": len(value), "begins": value[:16].hex(" ")}
        with contextlib.suppress(UnicodeDecodeError):
            if len(value) <= _SHOWN and (text := value.decode()).isprintable():
                shown["text"] = text
        return shown
    if isinstance(value, np.ndarray):
        if (
            value.ndim == 1
            and value.dtype.kind in "iu"
            and ((whole and (value.dtype != np.uint8 or name == "tokens")) or value.size <= 16)
        ):
            return value.tolist()
        begins = _show(value.reshape(-1)[:8].tolist(), whole=whole)
        return {"dtype": str(value.dtype), "shape": list(value.shape), "begins": begins}
    if isinstance(value, np.generic):
        return _show(value.item(), whole=whole)
    if isinstance(value, dict):
        return {str(name): _show(each, whole=whole) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_show(each, whole=whole) for each in value]
    if isinstance(value, str):
        return value if whole or len(value) <= _SHOWN else f"{value[:_SHOWN]}... ({len(value)} characters)"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no such number
    return value if value is None or isinstance(value, int | float | bool) else str(value)


@app.command("stats")
def stats(
    path: PathArgument,
    kind: KindOption = "",
    field: Annotated[str, typer.Option("--field", help="The field to look at (default: all bytes of a sample).")] = "",
    seq_len: Annotated[int, typer.Option("--seq-len", min=0, help="Say how full sequences of so many tokens are.")] = 0,
    group_tokens: Annotated[
        int,
        typer.Option("--group-tokens", min=0, help="Also how full groups of so many tokens are (data.group_tokens)."),
    ] = 0,
    samples: Annotated[int, typer.Option("--samples", min=0, help="Look at so many, evenly spread; 0 = at all.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Read samples and say how long they are and how many are there twice; of tokens, how full sequences would be."""
    from shardway.data.statistics import gather_statistics

    found = gather_statistics(_open(path, kind), field, samples, seq_len, group_tokens)
    if as_json:
        print_json(found)
        return
    for name, value in found.items():
        shown = ", ".join(f"{key} {each}" for key, each in value.items()) if isinstance(value, dict) else value
        typer.echo(f"{name}: {shown}")


# --- indexes and damage


@app.command("index")
def index(
    path: PathArgument,
    kind: KindOption = "",
    checksum: Annotated[
        bool, typer.Option("--checksum", help="Also keep a checksum of every MiB, so that damage is found and placed.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Make the index of a format that has none, so that the first run need not; with --checksum, checksums too."""
    from shardway.data.verification import make_checksums
    from shardway.units import render_plural

    records = _open(path, kind)
    kept = make_checksums(records) if checksum else None
    if as_json:
        print_json({"samples": len(records), "checksums": str(kept) if kept else None})
        return
    typer.echo(legible(f"indexed: {render_plural(len(records), 'sample')}" + (f"; checksums: {kept}" if kept else "")))


@app.command("verify")
def verify(path: PathArgument, kind: KindOption = "", as_json: JsonOption = False) -> int:
    """Read all, compare it with its checksums, and name what is damaged, with file and offset.

    Exit code 0 if all is whole, 4 if something is damaged.
    """
    from shardway.data.detect import place_of
    from shardway.data.verification import verify_data
    from shardway.units import render_plural

    began = time.monotonic()
    damage: list[str] = []

    def show(sentence: str) -> None:
        damage.append(sentence)
        if not as_json:
            typer.echo(legible(sentence))

    records = verify_data(place_of(path), kind, show)
    checks = "" if records is None else records.describe_checks()
    if as_json:
        print_json({"whole": not damage, "damage": damage, "checked": checks, "seconds": time.monotonic() - began})
    elif records is not None and not damage:
        size = f"{render_plural(len(records), 'sample')} in {render_plural(len(records.parts.files), 'file')}"
        typer.echo(f"whole: {size}; checksums: {checks}")
    return 4 if damage else 0


@app.command("repair")
def repair(
    path: PathArgument,
    source: Annotated[
        str, typer.Option("--from", help="Another copy of the same data; without, what can be made anew is.")
    ] = "",
    as_json: JsonOption = False,
) -> int:
    """Mend data that Shardway has written: copy damaged blocks from another copy, make a lost manifest anew.

    Exit code 0 if all is whole then, 4 if damage is left.
    """
    from shardway.data.formats.shard_repair import repair_shards

    done, left = repair_shards(_find_shards("PATH", path), _find_shards("--from", source) if source else None)
    if as_json:
        print_json({"mended": done, "left": left})
    else:
        for each in (*done, *left):
            typer.echo(legible(each))
        if not done and not left:
            typer.echo("whole: there is nothing to mend")
    return 4 if left else 0


def _find_shards(key: str, text: str) -> Path:
    """A folder of shards, however damaged. Raises UserError for anything else."""
    from shardway.data.content import DataPath
    from shardway.data.formats.shard_file import SHARD_SUFFIX
    from shardway.data.formats.shard_manifest import MANIFEST

    place, allowed = DataPath(key, text), "a folder that `shardway data prepare` or `convert --to shards` has written"
    if not place.path.exists():
        raise place.error("does not exist", allowed=allowed)
    folder = place.path if place.path.is_dir() else place.path.parent
    if not (folder / MANIFEST).exists() and not any(folder.glob(f"*{SHARD_SUFFIX}")):
        raise place.error("holds no shards", allowed=allowed, remedy="copy data of another format again")
    return folder


# --- writing


def _check_apart(source: str, out: Path, option: str = "OUT") -> None:
    """Raise UserError if what is to be written lies within the data that are read: it would be taken for data."""
    from shardway.data.content import DataPath

    read = DataPath("SOURCE", source).path
    if source and "://" not in source and read.is_dir() and out.resolve().is_relative_to(read.resolve()):
        raise DataPath(option, str(out)).error(
            f'lies within the data that are read, "{source}"', allowed="a path outside of them"
        )


@contextlib.contextmanager
def _options_named() -> Iterator[None]:
    """Problems with keys of a run file name the options that stand for them."""
    names = {"data.tokenizer": "--tokenizer", "data.chat_template": "--chat-template", "data.inputs": "--field"}
    try:
        yield
    except UserError as error:
        if not any(problem.where in names for problem in error.problems):
            raise
        problems = [replace(problem, where=names.get(problem.where, problem.where)) for problem in error.problems]
        raise UserError(render_problems("the data", problems), problems) from None


@app.command("prepare")
def prepare(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="Data of any format, also s3:// or https://.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write; it may not hold other data.")],
    tokenizer: Annotated[
        str,
        typer.Option("--tokenizer", help='"bytes", a tokenizer.json, a .model file; none: records stay as they are.'),
    ] = "",
    field: Annotated[str, typer.Option("--field", help="The field with text, tokens or a conversation.")] = "auto",
    seq_len: Annotated[int, typer.Option("--seq-len", min=0, help="Tokens in a sequence, kept with the data.")] = 0,
    pack: Annotated[bool, typer.Option("--pack", help="Make the bins for sequences of whole documents now.")] = False,
    chat_template: Annotated[str, typer.Option("--chat-template", help='"chatml", or a Jinja file.')] = "chatml",
    shard_size: Annotated[
        str, typer.Option("--shard-size", help="About how large a shard gets: 64MB to 256MB.")
    ] = "128MiB",
    processes: Annotated[int, typer.Option("--processes", min=0, help="Processes that work; 0 = one a core.")] = 0,
    kind: KindOption = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be written: bytes and files.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Write any data as shards with checksums: texts and conversations as tokens, other records as they are.

    Every core works. What is finished stays after a kill, and the same command goes on with the rest.
    """
    from shardway.data.detect import open_records, place_of
    from shardway.data.prepare import run_prepare
    from shardway.data.prepare_plan import PrepareOptions, plan_prepare
    from shardway.data.remote import fetched
    from shardway.units import parse_bytes, render_plural
    from shardway.watch.words import render_size

    try:
        size = parse_bytes(shard_size)
    except ValueError as error:
        raise UserError(f"--shard-size: {error}") from None
    if pack and not seq_len:
        raise UserError("--pack needs the length of a sequence.\n  To do: add --seq-len, such as --seq-len 2048.")
    _check_apart(source, out)
    options = PrepareOptions(
        tokenizer=tokenizer,
        field=field,
        seq_len=seq_len or None,
        pack=pack,
        chat_template=chat_template,
        shard_bytes=size,
    )
    with _options_named(), fetched(source, out, report) as local:
        place = place_of(local)
        plan = plan_prepare(open_records(place, kind), place, out, options)
        facts = {
            "out": str(out),
            "kind": plan.kind,
            "samples": plan.samples,
            "bytes": plan.estimated_bytes,
            "files": plan.files,
        }
        if dry_run:
            if as_json:
                print_json(facts)
            else:
                typer.echo(
                    f"{out}: {render_plural(plan.samples, 'sample')} as {plan.kind}, about "
                    f"{render_size(plan.estimated_bytes)} in {render_plural(plan.files, 'file')}"
                )
            return
        with _progress("preparing") as advance:
            run_prepare(plan, advance, processes or None)
    made = _describe(_open(str(out)))
    if as_json:
        print_json({"out": str(out), **made})
    else:
        typer.echo(f"{out}: {render_plural(made['samples'], 'sample')}, {render_size(made['bytes'])}")


@contextlib.contextmanager
def _progress(title: str) -> Iterator[Callable[[int, int], None]]:
    """A bar with the time left on stderr, if that is a terminal; what is given moves it: (done, total)."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@app.command("convert")
def convert(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="Data of any format.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder or file to write; it may not be there.")],
    to: Annotated[str, typer.Option("--to", help="The format to write, as data.kind names it, or squashfs.")],
    kind: KindOption = "",
    field: Annotated[list[str] | None, typer.Option("--field", help="Only this field; may be given again.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Write data in another format: every sample with its fields, in the same order."""
    from shardway.data.convert import convert_records, pack_squashfs
    from shardway.units import render_plural
    from shardway.watch.words import render_size

    _check_apart(source, out)
    with _progress("converting") as advance:
        if to == "squashfs":
            written = pack_squashfs(Path(source), out)
        else:
            written = convert_records(_open(source, kind), out, to, field or (), advance)
    if as_json:
        print_json({"out": str(out), **written})
        return
    typer.echo(
        f"{out}: {render_plural(written['samples'], 'sample')}, {render_size(written['bytes'])} in "
        f"{render_plural(written['files'], 'file')}"
    )


@app.command("bench")
def bench(
    path: PathArgument,
    kind: KindOption = "",
    images: Annotated[
        bool | None,
        typer.Option("--images/--tokens", help="As a model of images or of tokens reads it (default: by the samples)."),
    ] = None,
    keys: Annotated[
        list[str] | None, typer.Option("--set", help='A key of [data], such as "shape=[3,64,64]"; may be given again.')
    ] = None,
    seconds: Annotated[float, typer.Option("--seconds", min=0.01, help="About so long for each layer.")] = 2.0,
    as_json: JsonOption = False,
) -> None:
    """Measure samples per second of each layer on this machine, and say which one limits."""
    from dataclasses import asdict

    from shardway.data.benchmark import find_wanted, measure_data
    from shardway.runfile.load import load_run

    records = _open(path, kind)
    own = [f"data.kind={records.format}", f"data.path={json.dumps(path)}"]
    own += ["data.include=*"] if records.format == "text" else []
    section = load_run(None, [*own, *(f"data.{each}" for each in keys or ())]).values.data
    wants = find_wanted(records) if images is None else "images" if images else "tokens"
    found = measure_data(records, section, wants, seconds)
    if as_json:
        print_json(asdict(found))
        return
    for name, rate in (*found.layers.items(), ("all together", found.whole)):
        shown = ", ".join(
            f"{value:,.0f} samples/{unit}" for value, unit in ((rate.per_s, "s"), (rate.per_cpu_s, "CPU s")) if value
        )
        typer.echo(f"{name:>12}: {shown or 'too little to measure'}")
    for name, bound in found.bounds.items():
        typer.echo(f"{'bound':>12}: {bound:,.0f} samples/CPU s ({name})")
    typer.echo(f"limits: {found.limits}")
    if slow := records.slow_in_random_order():
        typer.echo(f"in a random order {slow}: `shardway data prepare` makes this fast")


@app.command("stage")
def stage(
    path: PathArgument,
    to: Annotated[Path, typer.Option("--to", help="A folder of this machine's own disk.")],
    kind: KindOption = "",
    as_json: JsonOption = False,
) -> None:
    """Copy data to this machine's own disk, where runs with data.stage find them; verified while they are copied."""
    from shardway.data.stage import StageFolder
    from shardway.units import render_bytes

    began = time.monotonic()
    _check_apart(path, to, "--to")
    try:
        staged = StageFolder.below(to).hold(_open(path, kind).parts, report)
    except SiteError as error:
        raise SiteError(str(error).replace("data.stage:", "--to:", 1)) from error
    facts = {"root": str(staged.root), "copied_bytes": staged.copied_bytes, "seconds": time.monotonic() - began}
    if as_json:
        print_json(facts)
    else:
        typer.echo(legible(f"{staged.root}: {render_bytes(staged.copied_bytes)} copied in {facts['seconds']:.1f} s"))


# --- the samples of a run


@app.command("at")
def at(
    step: Annotated[int, typer.Argument(metavar="STEP", min=1, help="The number of a step, from 1 on.")],
    run: RunName,
    as_json: JsonOption = False,
) -> None:
    """Say which samples a step of a run had, or will have, and where each of them lies."""
    from shardway.units import render_plural

    entry = _find_ledger(run).at(step)
    if as_json:
        print_json(entry.as_json())
        return
    typer.echo(f"step {step}{'' if entry.taken else ' (not taken yet)'}: {render_plural(len(entry.ids), 'sample')}")
    for number, place in zip(entry.ids, entry.sources, strict=True):
        typer.echo(legible(f"  {number}  {place}"))


@app.command("where")
def where(
    sample: Annotated[int, typer.Argument(metavar="SAMPLE", min=0, help="The number of a sample.")],
    run: RunName,
    as_json: JsonOption = False,
) -> None:
    """Say in which steps of a run a sample was, and in which it comes next."""
    ledger = _find_ledger(run)
    seen, coming = ledger.where(sample)
    if as_json:
        print_json({"sample": sample, "source": ledger.locate(sample), "steps": seen, "next": coming})
        return
    typer.echo(legible(f"sample {sample}: {ledger.locate(sample)}"))
    typer.echo(f"  taken in {'step ' + ', '.join(map(str, seen)) if seen else 'no step yet'}")
    typer.echo(f"  comes next in step {coming}" if coming else "  does not come again, as far as is known")


def _find_ledger(run: str) -> SampleLedger:
    from shardway.data.ledger import open_ledger
    from shardway.launch.runs.find import find_known

    known = find_known(run)
    if known.host:
        raise UserError(f"{run} is on another host\n  to do: run `shardway data` there")
    return open_ledger(Path(known.run))
