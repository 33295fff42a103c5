"""`shardway scale`: how much faster the steps of a run get on more ranks or nodes, with a sheet for a proposal.

Invariants:
- Runs are those of `shardway train` and `shardway submit`, in directories of their own; the same command goes on where
  it was left.
- The word weak, or strong, is given to no runs that are something else.
- Without torch in this process; figures go to stdout, progress to stderr.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardway.cli.main import CommandWithProgram, read_program_words
from shardway.cli.options import (
    DirOption,
    JsonOption,
    Words,
    explained_write,
    find_run,
    print_json,
    read_request,
    report,
)
from shardway.cli.submit import YesOption
from shardway.errors import JobError, Problem, UserError, check_no_problems, legible

if TYPE_CHECKING:
    from shardway.cli.scale_runs import RunsAsJobs, RunsHere, StudyRequest
    from shardway.watch.scaling.runs import ScaleRun
    from shardway.watch.scaling.study import ScaleStudy

COMMANDS = {"scale": CommandWithProgram}

STEPS = 40
"""Steps of a run where --steps names no number: compilation settles, and a median is known to a few percent."""

_SIZES = re.compile(r"[1-9]\d*(,[1-9]\d*)*")


def scale(
    ctx: typer.Context,
    words: Words = None,
    ranks: Annotated[
        str, typer.Option("--ranks", metavar="1,2,4", help="Ranks of this machine, a run after another.")
    ] = "",
    nodes: Annotated[str, typer.Option("--nodes", metavar="1,2,4", help="Nodes of jobs that are submitted.")] = "",
    runs: Annotated[bool, typer.Option("--runs", help="The words are runs that exist: RUN RUN ...")] = False,
    strong: Annotated[bool, typer.Option("--strong", help="The global batch stays the same.")] = False,
    weak: Annotated[bool, typer.Option("--weak", help="The work of a rank stays the same: the batch grows.")] = False,
    on: Annotated[
        str, typer.Option("--on", metavar="[USER@HOST:]SITE", help="The site of --nodes (default: site.name).")
    ] = "",
    steps: Annotated[int | None, typer.Option("--steps", min=1, help=f"Steps of each run (default: {STEPS}).")] = None,
    warmup: Annotated[
        int | None, typer.Option("--warmup", min=0, help="First steps left out (default: as many as the times show).")
    ] = None,
    repeats: Annotated[int, typer.Option("--repeats", min=1, max=99, help="Runs of each size.")] = 1,
    sheet: Annotated[
        list[Path] | None, typer.Option("--sheet", metavar="FILE", help="Write it as .html or .csv (may repeat).")
    ] = None,
    directory: DirOption = None,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait for jobs, or show what is there.")] = True,
    yes: YesOption = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the runs, and do nothing.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Measure how a run scales: speed-up, efficiency, what does not shrink, and a sheet for a proposal."""
    command, sheets = read_program_words(ctx), sheet or []
    _check_options(
        {"--ranks": ranks, "--nodes": nodes},
        kinds=(strong, weak),
        sheets=sheets,
        existing=runs,
        counted=(STEPS if steps is None else steps, warmup or 0),
        given={"--on": on, "--steps": steps, "--dir": directory, "-- COMMAND": command},
    )
    if runs:
        if dry_run:
            raise UserError("--dry-run lists runs that would be made, and --runs makes none.")
        _analyse(words or [], weak=weak, warm_up=warmup, sheets=sheets, as_json=as_json)
        return
    unit = "ranks" if ranks else "nodes"
    sizes = tuple(sorted({int(size) for size in (ranks or nodes).split(",")}))
    asked = _read_request(words, sizes, unit, steps, repeats, command, weak=weak)
    made, name = _open_study(asked, directory, on)
    made.check()
    if dry_run:
        _print_plan(asked, made, as_json=as_json)
        return
    left = made.carry_out(wait=wait, agreed=yes)
    found = _read_runs(made, unit, warmup)
    if not found:
        raise JobError("no run of the study is finished yet.\n  To do: give the same command again later.")
    typed = _render_command(words or [], asked, on, warmup, directory)
    study = _make_study(name, found, weak=weak, unit=unit, command=typed)
    _output(study, sheets, as_json=as_json, left=left)


def _read_runs(made: RunsHere | RunsAsJobs, unit: str, warm_up: int | None) -> list[ScaleRun]:
    from shardway.watch.scaling.runs import read_scale_run

    return [
        replace(read_scale_run(directory, run.size, warm_up, unit), path=str(run.path))
        for run, directory in made.list_read()
    ]


# --- what was asked for


def _check_options(
    sizes: dict[str, str],
    *,
    kinds: tuple[bool, bool],
    sheets: Sequence[Path],
    existing: bool,
    counted: tuple[int, int],
    given: dict[str, Any],
) -> None:
    """All that is wrong with the options at once. `counted`: the steps of a run, and how many of them are left out."""
    from shardway.watch.scaling.runs import FEWEST_STEPS

    problems: list[Problem] = []

    def add(where: str, what: str, remedy: str, allowed: str = "") -> None:
        problems.append(Problem(where, what, "command line", allowed, remedy))

    named = [name for name, text in sizes.items() if text]
    if existing and (alone := [*named, *(name for name, value in given.items() if value)]):
        add("--runs", f"it analyses runs that exist, and {', '.join(alone)} is for new ones", "leave one of them out")
    if not existing and len(named) != 1:
        what = "both are given" if named else "neither is given"
        add("--ranks, --nodes", what, "name the sizes: --ranks 1,2,4 on this machine, or --nodes 1,2,4 for jobs")
    if sizes["--ranks"] and given["--on"]:
        add("--on", f"{given['--on']}, and --ranks are of this machine", "count by --nodes there")
    for name, text in sizes.items():
        if text and not _SIZES.fullmatch(text):
            add(name, f'"{text}" is no list of sizes', "write them with commas", "such as 1,2,4,8")
        elif text and len({*text.split(",")}) == 1:
            add(name, f"{text} is one size, and a speed-up needs another", "add one", "such as 1,2,4,8")
    if sum(kinds) != 1:
        add(
            "--strong, --weak",
            "both are given" if all(kinds) else "neither is given",
            "choose: --strong keeps the global batch, --weak the work of a rank",
        )
    taken, left_out = counted
    if not existing and taken - left_out < FEWEST_STEPS:
        what = f"{taken}, of which --warmup leaves out {left_out}" if left_out else f"{taken} in a run"
        allowed = f"{FEWEST_STEPS + left_out} or more"
        add("--steps", what, f"take more: a step's time is found from {FEWEST_STEPS}", allowed)
    for path in sheets:
        if path.suffix not in (".html", ".csv"):
            add("--sheet", f"{path} is no sheet that can be written", "choose an ending", ".html, .csv")
        elif not path.parent.is_dir():
            add("--sheet", f"{path}: there is no folder {path.parent}", "make it, or choose another")
    check_no_problems("the command line", problems)


def _read_request(
    words: list[str] | None,
    sizes: tuple[int, ...],
    unit: str,
    steps: int | None,
    repeats: int,
    command: tuple[str, ...],
    *,
    weak: bool,
) -> StudyRequest:
    from shardway.cli.scale_runs import StudyRequest

    request = read_request(words, None)
    own = {"train.steps": "--steps", "site.nodes": "--nodes"}
    for word in request.overrides:
        if option := own.get(word.partition("=")[0].strip()):
            raise UserError(f"{word}: a study sets this key itself.\n  To do: leave it out; {option} is for that.")
    if command and unit == "ranks" and request.run_file is not None:
        raise UserError(
            f"{request.run_file} stands before `--`, where only keys may stand: a script names its run file itself."
        )
    return StudyRequest(request, sizes, unit, weak, steps or STEPS, repeats, command)


def _open_study(asked: StudyRequest, directory: Path | None, on: str) -> tuple[RunsHere | RunsAsJobs, str]:
    """The runs of the study, here or as jobs, and its name. Its folder stands beside the run directory of the run that
    is scaled."""
    from shardway.cli.scale_runs import RunsAsJobs, RunsHere, plan_runs

    if asked.unit == "ranks":
        if asked.command:
            script = next((word for word in asked.command if word.endswith(".py")), asked.command[-1])
            own = Path("runs") / Path(script).stem
        else:
            from shardway.resolve.request import resolve_request

            own = resolve_request(asked.run_request, asked.sizes[0], asked.sizes[0]).directory.path
        folder = directory or own.with_name(f"{own.name}-scale")
        return RunsHere(asked, folder, plan_runs(asked, folder)), _name(folder)
    from shardway.launch.hosts import find_host, parse_target
    from shardway.launch.submission.prepare import SubmitRequest, find_run_directory

    target = parse_target(on) if on else None
    host, site = find_host(target.host if target else ""), target.site if target else ""
    whole = replace(asked.run_request, directory=directory)
    own = find_run_directory(SubmitRequest(whole, site, asked.command), host)
    folder = own if directory else own.with_name(f"{own.name}-scale")
    return RunsAsJobs(asked, folder, plan_runs(asked, folder), host, site), _name(folder)


def _name(folder: Path) -> str:
    return folder.name.removesuffix("-scale") or folder.name


def _render_command(
    words: Sequence[str], asked: StudyRequest, on: str, warm_up: int | None, directory: Path | None
) -> str:
    """The command as it can be typed again."""
    from shardway.launch.script import quote_all

    parts = ["shardway", "scale", *words, f"--{asked.unit}", ",".join(map(str, asked.sizes)), f"--{asked.kind}"]
    parts += ["--on", on] if on else []
    parts += ["--steps", str(asked.steps), "--repeats", str(asked.repeats)]
    parts += ["--warmup", str(warm_up)] if warm_up is not None else []
    parts += ["--dir", str(directory)] if directory else []
    return quote_all([*parts, *(["--", *asked.command] if asked.command else [])])


# --- runs that exist


def _analyse(words: Sequence[str], *, weak: bool, warm_up: int | None, sheets: Sequence[Path], as_json: bool) -> None:
    """The study of runs that were made before, by their ranks; by their nodes where those differ and each has as many
    ranks."""
    if len(words) < 2:
        raise UserError("--runs: a study needs two runs or more.\n  To do: name them: --runs RUN RUN ...")
    from shardway.launch.script import quote_all
    from shardway.watch.scaling.runs import read_scale_run

    found, known = [], dict[Path, str]()
    for word in words:
        run = find_run(Path(word))
        if (before := known.setdefault(run.path.absolute(), word)) is not word:
            raise UserError(f"--runs: {before} and {word} are one run.\n  To do: name each run once.")
        run.check_format()
        run.check_readable()
        found.append(read_scale_run(run, warm_up=warm_up))
    per_node = {run.work.world / run.nodes for run in found}
    unit = "nodes" if len({run.nodes for run in found}) > 1 and len(per_node) == 1 else "ranks"
    sized = [replace(run, size=run.nodes if unit == "nodes" else run.work.world) for run in found]
    kind = "--weak" if weak else "--strong"
    typed = quote_all(["shardway", "scale", "--runs", *words, kind])
    study = _make_study(_name(Path(words[0]).absolute().parent), sized, weak=weak, unit=unit, command=typed)
    _output(study, sheets, as_json=as_json, left=[])


# --- output


def _make_study(name: str, found: Sequence[ScaleRun], *, weak: bool, unit: str, command: str) -> ScaleStudy:
    from shardway.watch.scaling.study import make_study

    return make_study(name, found, weak=weak, unit=unit, command=command)


def _print_plan(asked: StudyRequest, made: RunsHere | RunsAsJobs, *, as_json: bool) -> None:
    rows = []
    for run in made.planned:
        keys = dict(key.partition("=")[::2] for key in run.keys)
        batch = keys.get("train.global_batch", "")
        rows.append((asked.count(run.size), str(run.repeat), batch or "as set", made.describe(run), str(run.path)))
    if as_json:
        names = ("size", "repeat", "global_batch", "state", "run")
        print_json(
            {"kind": asked.kind, "steps": asked.steps, "runs": [dict(zip(names, row, strict=True)) for row in rows]}
        )
        return
    from shardway.watch.words import align_cells

    for line in align_cells([("size", "repeat", "global batch", "state", "run directory"), *rows]):
        typer.echo(legible(line))


def _output(study: ScaleStudy, sheets: Sequence[Path], *, as_json: bool, left: Sequence[str]) -> None:
    """The study on stdout, its sheets, and what is not finished on stderr."""
    from shardway.watch.scaling.sheet import render_sheet
    from shardway.watch.scaling.study import render_csv, render_study

    for line in left:
        report(f"not finished, so not in it: {line}")
    if not as_json:  # before the sheets, which may have no place
        typer.echo(legible(render_study(study)))
    for path in sheets:
        with explained_write(path, "write the sheet elsewhere: --sheet FILE"):
            path.write_text(render_csv(study) if path.suffix == ".csv" else render_sheet(study), encoding="utf-8")
    if as_json:
        print_json({**study.as_json(), "not_finished": list(left), "sheets": [str(path) for path in sheets]})
    elif sheets:
        typer.echo(f"\nsheet  {', '.join(map(str, sheets))}")
