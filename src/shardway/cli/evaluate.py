"""`shardway evaluate`: perplexity, multiple choice and tasks of lm-evaluation-harness, of a run or another model.

Invariants:
- Options that do not go together, and mistakes in the files that they name, are reported before the model is opened.
- Of a run, its result is kept in its directory, in a file of its own, also while the run goes on; nothing else of it is
  written. Rank 0 prints and writes.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from shardway import __version__
from shardway.cli.bench_options import reported_once
from shardway.cli.infer_options import (
    BestOption,
    CommandMistakes,
    DeviceKind,
    DeviceOption,
    Dtype,
    DtypeOption,
    ModelArgument,
    ModelOptions,
    QuantizeKind,
    QuantizeOption,
    RemoteCodeOption,
    StepOption,
    TokenizerOption,
    look_at_new_file,
    model_opened,
)
from shardway.cli.main import uncollected
from shardway.cli.options import JsonOption, find_place, print_json
from shardway.errors import JobError, UserError, legible
from shardway.ranks.launcher import find_placement
from shardway.refusals import find_remedy
from shardway.rundir.file_io import write_json

if TYPE_CHECKING:
    from shardway.infer.evaluate import TokenData
    from shardway.infer.inputs import Question
    from shardway.infer.model import OpenedModel
    from shardway.ranks.start import Ranks

T = TypeVar("T")


@dataclass(frozen=True)
class EvaluateOptions:
    """What is evaluated: keys of [data] as words of the command line, among them what --data names (`data`), a file of
    questions, tasks of the harness and a folder with more of them; and how. None: not asked for, or chosen."""

    words: tuple[str, ...]
    data: str | None
    choices: Path | None
    tasks: tuple[str, ...]
    task_path: Path | None
    limit: int | None
    rows: int | None

    @property
    def wants_perplexity(self) -> bool:
        """Whether tokens are predicted: if data are named, or nothing else is asked for."""
        return bool(self.words) or (self.choices is None and not self.tasks)


def evaluate(
    model: ModelArgument,
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[data.KEY=VALUE]...", help="Keys of [data], as in a run file.", show_default=False),
    ] = None,
    data: Annotated[
        str | None, typer.Option("--data", metavar="PATH", help="Text or tokens (of a run: what it holds out).")
    ] = None,
    choices: Annotated[
        Path | None, typer.Option("--choices", metavar="FILE", help="JSON lines: question, choices, answer (from 0).")
    ] = None,
    task: Annotated[
        str | None, typer.Option("--task", metavar="NAME,...", help="Tasks of lm-evaluation-harness, if installed.")
    ] = None,
    task_path: Annotated[
        Path | None, typer.Option("--task-path", metavar="FOLDER", help="With tasks of your own, as YAML.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help="At most so many samples, questions, documents of a task.")
    ] = None,
    batch: Annotated[
        int | None, typer.Option("--batch", min=1, help="Samples or answers in a pass (default: by memory).")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="A new file for everything as JSON.")] = None,
    step: StepOption = None,
    best: BestOption = False,
    nproc: Annotated[
        int | None, typer.Option("--nproc", min=1, help="Local ranks that share the samples; each has the model.")
    ] = None,
    dtype: DtypeOption = Dtype.auto,
    device: DeviceOption = DeviceKind.auto,
    quantize: QuantizeOption = QuantizeKind.off,
    tokenizer: TokenizerOption = "",
    trust_remote_code: RemoteCodeOption = False,
    as_json: JsonOption = False,
) -> None:
    """Measure perplexity on data, multiple choice, or tasks of lm-evaluation-harness; a run keeps the result."""
    mistakes = CommandMistakes()
    options = _read_options(mistakes, words, data, choices, task, task_path, limit, batch, tokenizer)
    if options.tasks and max(nproc or 1, find_placement(os.environ).world) > 1:
        mistakes.add("--task", "works on one rank alone", remedy="leave out --nproc, and start it without a launcher")

    def read() -> list[Question]:
        look_at_new_file(mistakes, "--out", out)
        _look_at_data(mistakes, model, options)
        found: list[Question] = []
        if choices is not None:
            from shardway.infer.inputs import read_questions

            found = mistakes.read(choices, lambda: read_questions(choices)) or []
        if options.tasks and not mistakes:
            with uncollected():
                from shardway.infer.lm_eval import find_tasks
            find_tasks(options.tasks, options.task_path)
        return found[:limit]

    named = (model, step, best, nproc, dtype.value, device.value, quantize.value, "auto", tokenizer, "")
    chosen = ModelOptions(*named, trust_remote_code)
    with model_opened(chosen, mistakes, read, whole=True) as (opened, ranks, questions):
        with reported_once(ranks.rank if ranks is not None else 0):
            found = list(_evaluate(opened, ranks, options, questions))
        if ranks is None or ranks.is_first:
            _report(opened, found, out, as_json=as_json)


def _read_options(
    mistakes: CommandMistakes,
    words: list[str] | None,
    data: str | None,
    choices: Path | None,
    task: str | None,
    task_path: Path | None,
    limit: int | None,
    batch: int | None,
    tokenizer: str,
) -> EvaluateOptions:
    """What the options ask for; mistakes are noted."""
    given = list(words or [])
    for word in given:
        if not word.startswith("data.") or "=" not in word:
            mistakes.add(word, "is no key of [data]", "data.KEY=VALUE, such as data.seq_len=512")
    if data is not None:
        given.append(f"data.path={json.dumps(data)}")
        if any(word.startswith("data.path=") for word in words or ()):
            mistakes.add("--data", "and data.path name two paths", "one of the two")
    if tokenizer and given and not any(word.startswith("data.tokenizer=") for word in given):
        given.append(f"data.tokenizer={json.dumps(tokenizer)}")
    tasks = tuple(dict.fromkeys((task or "").replace(",", " ").split()))
    if task is not None and not tasks:
        mistakes.add("--task", "names none", "names such as hellaswag,arc_easy")
    if task_path is not None and not tasks:
        mistakes.add("--task-path", "has no effect without --task", "--task NAME --task-path PATH")
    if task_path is not None and not task_path.is_dir():
        mistakes.add("--task-path", f"{task_path} is no folder", "a folder with tasks as YAML")
    return EvaluateOptions(tuple(given), data, choices, tasks, task_path, limit, batch)


def _look_at_data(mistakes: CommandMistakes, model: str, options: EvaluateOptions) -> None:
    """Note what is wrong with keys of [data] and with the path, and where nothing names data, before the model is
    opened."""
    from shardway.data.content import DataPath
    from shardway.data.detect import detect_kind
    from shardway.launch.runs.find import is_run
    from shardway.runfile.load import load_run

    names = {word.partition("=")[0].strip() for word in options.words}
    if options.wants_perplexity and "data.path" not in names:
        place = find_place(Path(model))
        is_name = not os.path.lexists(place) and not place.parent.is_dir()
        if is_name or ((place / "config.json").is_file() and not is_run(place)):
            mistakes.add("--data", f"is not given, and {model} is no run, which alone holds data out", _DATA)
    keys = tuple([word for word in options.words if word.startswith("data.") and "=" in word])  # others were noted
    try:
        load_run(None, keys)
    except UserError as error:
        for each in error.problems:
            mistakes.add(_name_as_typed(each.where, options), each.what, each.allowed, each.remedy)
    if options.data is not None and "data.kind" not in names:
        mistakes.look("--data", lambda: detect_kind(DataPath("--data", options.data or "")))


_DATA = "a text or tokens, such as --data held-out.txt; or questions with --choices"


def _name_as_typed(text: str, options: EvaluateOptions) -> str:
    """A message that names a key, with the option that was typed."""
    return text.replace("data.path", "--data") if options.data is not None else text


# --- what is measured, as facts


def _evaluate(
    opened: OpenedModel, ranks: Ranks | None, options: EvaluateOptions, questions: list[Question]
) -> Iterator[dict[str, Any]]:
    """The facts of each evaluation that is asked for, on every rank."""
    world = ranks.world if ranks is not None else 1
    common = {
        "model": opened.origin,
        "dtype": str(opened.dtype).removeprefix("torch."),
        "device": str(opened.device),
        "ranks": world,
        "shardway": __version__,
    }
    if options.wants_perplexity:
        yield {**_measure_perplexity(opened, ranks, options), **common, "time": time.time()}
    if options.choices is not None:
        from shardway.infer.choices import render_answers, score_choices

        scores = score_choices(opened, questions, ranks, options.rows)
        facts = {"results": scores.results, "errors": scores.errors, "questions": len(questions), "batch": scores.rows}
        answers = render_answers(questions, scores)
        named = {"kind": "choices", "data": str(options.choices)}
        yield {**named, **facts, "seconds": scores.seconds, **common, "time": time.time(), "answers": answers}
    if options.tasks:
        from shardway.infer.lm_eval import run_tasks

        found = run_tasks(opened, options.tasks, folder=options.task_path, limit=options.limit, rows=options.rows or 8)
        named = {"kind": "lm_eval", "data": ", ".join(options.tasks)}
        facts = {"results": found.results, "errors": found.errors, "lm_eval": found.version}
        yield {**named, **facts, "limit": options.limit, "seconds": found.seconds, **common, "time": time.time()}


def _measure_perplexity(opened: OpenedModel, ranks: Ranks | None, options: EvaluateOptions) -> dict[str, Any]:
    from dataclasses import replace

    from shardway.infer.evaluate import measure_perplexity

    try:
        tokens = _first_then_all(ranks, lambda: _open_data(opened, options.words))
    except UserError as error:
        raise UserError(_name_as_typed(str(error), options)) from error
    if options.limit is not None and options.limit < tokens.samples:
        tokens = replace(tokens, samples=options.limit, tail=False)
    found = measure_perplexity(opened, tokens, ranks, options.rows)
    return {
        "kind": "perplexity",
        "data": tokens.name,
        "results": found.results,
        "tokens": found.tokens,
        "samples": found.samples,
        "seq_len": found.length,
        "batch": found.rows,
        "seconds": found.seconds,
    }


def _first_then_all(ranks: Ranks | None, work: Callable[[], T]) -> T:
    return ranks.first_then_all(work) if ranks is not None else work()


def _open_data(opened: OpenedModel, words: tuple[str, ...]) -> TokenData:
    """What the words name: keys over those of the model's run, or over the defaults. Raises UserError."""
    from shardway.data.content import DataPath
    from shardway.data.detect import detect_kind
    from shardway.infer.evaluate import open_validation, open_whole
    from shardway.runfile.load import load_run

    names = {word.partition("=")[0].strip() for word in words}
    if opened.run is not None and "data.path" not in names:
        return open_validation(load_run(opened.run.resolved_path, words).values, str(opened.run.path))
    if "data.path" not in names:
        raise UserError(
            f"{opened.name} is no run, which alone holds data out, so nothing says what to evaluate on.\n"
            "  To do: name data, such as --data held-out.txt; or questions with --choices."
        )
    section = load_run(opened.run.resolved_path if opened.run is not None else None, words).values.data
    changed: dict[str, Any] = {"blend": [], "stage": "off"}
    if "data.kind" not in names:
        changed["kind"] = detect_kind(DataPath("data.path", section.path))
    if opened.run is None and "data.tokenizer" not in names and (own := _find_own_tokenizer(opened)):
        changed["tokenizer"] = own
    return open_whole(section.model_copy(update=changed), opened.model.config.get_text_config().vocab_size)


def _find_own_tokenizer(opened: OpenedModel) -> str:
    """The folder of a model that has a tokenizer's file, which its data are read with."""
    from shardway.data.tokenizers import find_tokenizer
    from shardway.hfconfig import locate_model

    folder = locate_model(opened.name, weights=False)
    try:
        return str(find_tokenizer(str(folder)))
    except UserError:
        raise UserError(
            f"{opened.name} has no tokenizer.json or tokenizer.model, so text cannot be read as its tokens.\n"
            '  To do: name one with --tokenizer (a file, a folder, or "bytes"), or prepared tokens with --data.'
        ) from None


# --- what is printed and kept


def _report(opened: OpenedModel, found: list[dict[str, Any]], out: Path | None, *, as_json: bool) -> None:
    """Print and keep what was measured."""
    from shardway.watch.facts import read_evaluation
    from shardway.watch.words import render_evaluation

    kept = [_keep(opened, facts) for facts in found] if opened.run is not None else []
    if out is not None:
        write_json(out, {"format": 1, "step": opened.step, "evaluations": found}, durable=False)
    if as_json:
        print_json(
            {
                "step": opened.step if opened.run is not None else None,
                "evaluations": found,
                "kept": [str(path) for path in kept],
            }
        )
        return
    for facts in found:
        typer.echo(legible(render_evaluation(read_evaluation(facts))))
        typer.echo(legible(f"  {_describe_size(facts)}"))
    for path in kept:
        typer.echo(legible(f"kept in {path}"), err=True)


def _keep(opened: OpenedModel, facts: Mapping[str, Any]) -> Path:
    """Keep one result in the directory of the run. Raises JobError where the file system refuses."""
    run = opened.run
    if run is None:
        raise JobError(f"{opened.name} is no run")
    shown = {name: value for name, value in facts.items() if name not in ("kind", "answers")}
    try:
        return run.write_evaluation(opened.step, str(facts["kind"]), shown)
    except OSError as error:
        raise JobError(
            f"the result cannot be kept in {run.path}: {error.strerror}.\n"
            f"  It is {json.dumps(facts['results'])}. To do: {find_remedy(error)}; --out FILE writes it elsewhere."
        ) from error


def _describe_size(facts: Mapping[str, Any]) -> str:
    """Of what the numbers are, and how long they took."""
    from shardway.units import render_plural
    from shardway.watch.words import render_time

    parts = [
        render_plural(facts["tokens"], "token", ",") if "tokens" in facts else "",
        f"{render_plural(facts['samples'], 'sample')} of {facts['seq_len']} tokens" if "samples" in facts else "",
        render_plural(facts["questions"], "question") if "questions" in facts else "",
        f"{facts['batch']} in a pass" if "batch" in facts else "",
        f"lm_eval {facts['lm_eval']}" if "lm_eval" in facts else "",
        f"on {render_plural(facts['ranks'], 'rank')}",
        render_time(facts["seconds"]),
    ]
    return ", ".join(filter(None, parts))
