"""`shardway learn`: lessons, the files of each, what of them is done, and the figures of a learner's own runs.

Invariants:
- Without torch. A lesson's files are placed beside what is there; nothing else is written.
- `learn check` ends with 0 where everything is done, and with 1 where something is missing.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardway.cli.options import JsonOption, complete_gpu, print_json, print_table
from shardway.errors import UserError, legible

if TYPE_CHECKING:
    from shardway.learn.checks import LessonCheck
    from shardway.learn.lessons import Lesson

_WIDEST = 100
"""Columns of a lesson in a terminal; longer lines are hard to read."""


def complete_learn(incomplete: str) -> list[str]:
    """A lesson's number, or what can be done with one."""
    from shardway.learn.lessons import list_lessons

    return [
        word
        for word in ("check", "figures", *(str(each.number) for each in list_lessons()))
        if word.startswith(incomplete)
    ]


def learn(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[N | check N|all | figures N]",
            help="A lesson by number or name; what is missing of one, or of all; the figures of its runs.",
            show_default=False,
            autocompletion=complete_learn,
        ),
    ] = None,
    directory: Annotated[
        Path | None, typer.Option("--dir", help="The folder of the lessons (default: learn, here or above).")
    ] = None,
    gpu: Annotated[
        str, typer.Option("--gpu", help="Of figures: the accelerator of the plan.", autocompletion=complete_gpu)
    ] = "a100-sxm4-80gb",
    as_json: JsonOption = False,
) -> int:
    """Ten lessons, from one device to jobs on a cluster: list them, take one, check it."""
    from shardway.learn.lessons import find_folder, find_lesson, list_lessons

    folder = directory if directory is not None else find_folder(Path.cwd())
    match words or []:
        case []:
            _print_list(folder, as_json=as_json)
            return 0
        case ["check", "all"]:
            return _check(list_lessons(), folder, as_json=as_json)
        case ["check", word]:
            return _check((find_lesson(word),), folder, as_json=as_json)
        case ["figures", word]:
            _print_figures(find_lesson(word), folder, gpu, as_json=as_json)
            return 0
        case ["check" | "figures" as action]:
            raise UserError(
                f"learn {action}: no lesson is named.\n  To do: name one by its number: shardway learn {action} 1"
            )
        case [word]:
            _take(find_lesson(word), folder, as_json=as_json)
            return 0
        case given:
            raise UserError(
                f"learn {' '.join(given)}: these words are no order.\n"
                "      allowed: `learn`, `learn N`, `learn check N`, `learn check all`, `learn figures N`"
            )


def _print_list(folder: Path, *, as_json: bool) -> None:
    """All lessons with what is done of each."""
    from shardway.learn.checks import check_lesson
    from shardway.learn.lessons import list_lessons

    checks = [check_lesson(lesson, folder) for lesson in list_lessons()]
    facts = [
        {
            "number": lesson.number,
            "name": lesson.name,
            "title": lesson.title,
            "minutes": lesson.minutes,
            **_progress(check),
        }
        for lesson, check in zip(list_lessons(), checks, strict=True)
    ]
    if as_json:
        print_json({"folder": str(folder), "lessons": facts})
        return
    rows = [
        {"": str(each["number"]), "lesson": str(each["title"]), "time": f"{each['minutes']} min", "state": _state(each)}
        for each in facts
    ]
    print_table(("", "lesson", "time", "state"), rows)
    following = next((each["number"] for each in facts if each["state"] != "done"), None)
    if following is None:
        typer.echo("\nall lessons are done")
    else:
        typer.echo(f"\nnext: shardway learn {following}")


def _progress(check: LessonCheck) -> dict[str, object]:
    done = sum(bool(each.evidence) for each in check.findings)
    return {"state": check.as_json()["state"], "done": done, "of": len(check.findings)}


def _state(facts: dict[str, object]) -> str:
    return (
        f"{facts['done']} of {facts['of']}"
        if facts["state"] == "begun"
        else {"done": "done"}.get(str(facts["state"]), "-")
    )


def _take(lesson: Lesson, folder: Path, *, as_json: bool) -> None:
    """Place the files of a lesson and print it."""
    from shardway.learn.lessons import place_files

    placed = place_files(lesson, folder)
    text = lesson.text_for(folder, Path.cwd())
    place = folder / lesson.name
    if as_json:
        states = {each.name: each.state for each in placed}
        print_json({"number": lesson.number, "name": lesson.name, "folder": str(place), "files": states, "text": text})
        return
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.markdown import Markdown

        console = Console()
        console.print(Markdown(text), width=min(console.width, _WIDEST))
    else:
        typer.echo(text, nl=False)
    new = [each.name for each in placed if each.state == "new"]
    kept = [each.name for each in placed if each.state == "kept"]
    note = f"files in {place}: {', '.join(new)} written" if new else f"files in {place}: all were there"
    note += f"; kept as you changed them: {', '.join(kept)}" if kept else ""
    typer.echo(legible(note), err=True)


def _check(lessons: tuple[Lesson, ...], folder: Path, *, as_json: bool) -> int:
    from shardway.learn.checks import check_lesson

    checks = [check_lesson(lesson, folder) for lesson in lessons]
    if as_json:
        print_json({"folder": str(folder.absolute()), "lessons": [each.as_json() for each in checks]})
    else:
        for check in checks:
            typer.echo(legible(_render_check(check, short=len(checks) > 1)))
    return 0 if all(each.is_done for each in checks) else 1


def _render_check(check: LessonCheck, *, short: bool) -> str:
    """The result of one check; `short`: a line for each lesson that is not begun."""
    head = f"lesson {check.number} ({check.name}): {'done' if check.is_done else 'not yet'}"
    if short and not check.is_begun:
        return head
    lines = [head]
    for each in check.findings:
        if each.evidence:
            lines.append(f"  done     {each.what}: {each.evidence}")
        else:
            lines += [f"  missing  {each.what}: {each.missing}", f"           To do: {each.remedy}"]
    lines += [f"  not counted  {name}: {why}" for name, why in check.rejected.items()]
    if not check.folder.is_dir():
        lines.append(f"  {check.folder} is not there; `shardway learn {check.number}` makes it")
    return "\n".join(lines)


def _print_figures(lesson: Lesson, folder: Path, gpu: str, *, as_json: bool) -> None:
    from shardway.learn.evidence import gather
    from shardway.learn.figures import find_figures, render_figures
    from shardway.plan.planner import find_machine

    machine, _ = find_machine(None, gpu)
    evidence = gather(folder / lesson.name)
    if not evidence.runs:
        raise UserError(
            f"{folder / lesson.name} has no run with figures yet.\n"
            f"  To do: run the commands of `shardway learn {lesson.number}` first."
        )
    found = find_figures(evidence, machine)
    if as_json:
        print_json({"accelerator": gpu, "runs": [each.as_json() for each in found]})
    else:
        typer.echo(legible(render_figures(found, gpu)))
