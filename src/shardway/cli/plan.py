"""`shardway plan`: will it fit, which layout, how long; for a named model, a Hugging Face model or a run file.

Invariant: answers on a login node, without torch (but for --trace, which says so). This module must not compute: it
turns options into a question, and the answer into what is printed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from shardway.cli import plan_options as options
from shardway.cli.options import JsonOption
from shardway.errors import SiteError, UserError

if TYPE_CHECKING:
    from shardway.plan.answer import PlanAnswer
    from shardway.plan.data_parallel_estimate import UnitAnswer
    from shardway.plan.emit.common import Emitted
    from shardway.plan.search import ScalingPoint


def plan(
    model: options.Model,
    on: options.On = None,
    gpu: options.Gpu = None,
    nodes: options.Nodes = None,
    gpus: options.Gpus = None,
    queue: options.Queue = None,
    price: options.Price = None,
    tokens: options.Tokens = None,
    steps: options.Steps = None,
    seq_len: options.SeqLen = None,
    global_batch: options.GlobalBatch = None,
    precision: options.Precision = "",
    optimizer: options.Optimizer = "",
    engine: options.Engine = "",
    layout: options.Layout = "",
    micro_batch: options.MicroBatch = None,
    recompute: options.Recompute = None,
    schedule: options.Schedule = None,
    zero: options.Zero = None,
    attention: options.Attention = None,
    compiled: options.Compiled = False,
    offload: options.Offload = None,
    explain: options.Explain = None,
    curve: options.Curve = None,
    html: options.Html = None,
    emit: options.Emit = None,
    out: options.Out = None,
    trace: options.Trace = False,
    module: options.Module = "",
    as_json: JsonOption = False,
) -> None:
    """Plan a run: whether it fits, the best layout, the time of a step, days, GPU-hours, and why."""
    from shardway.cli.plan_question import MachineQuestion, answer_of, parse_price, parse_question_words, read_length
    from shardway.plan.answer import PlanOptions, parse_layout

    said = PlanOptions(
        nodes=nodes,
        gpus=gpus,
        seq_len=seq_len,
        global_batch=global_batch,
        length=read_length(tokens, steps),
        precisions=parse_question_words(precision),
        optimizer=optimizer,
        engine=engine or _engine_for(model, emit),
        layout=parse_layout(layout),
        micro_batch=micro_batch,
        recompute=recompute,
        schedule=schedule,
        zero=zero,
        attention=attention,
        compiled=compiled,
        offload=offload,
    )
    shown = _ShownParts(explain, curve, html, emit, out, as_json)
    _show(
        answer_of(model, MachineQuestion(on, gpu, queue, parse_price(price)), said, options.Counting(trace, module)),
        shown,
    )


def _engine_for(model: list[str], library: str | None) -> str:
    """The one that is priced for another library's file; a run file names its own."""
    if not library or model[0].endswith(".toml"):
        return ""
    from shardway.plan.emit.table import ENGINES

    return ENGINES.get(library, "")


@dataclass(frozen=True)
class _ShownParts:
    """What of an answer is asked for."""

    explain: str | None
    curve: str | None
    html: Path | None
    emit: str | None
    out: Path | None
    as_json: bool

    @property
    def table(self) -> bool:
        """Nothing else is asked for on stdout."""
        return not (self.explain or self.curve or self.emit)


def _show(answer: PlanAnswer | UnitAnswer, shown: _ShownParts) -> None:
    from shardway.plan.answer import PlanAnswer

    if isinstance(answer, PlanAnswer):
        _show_layout(answer, shown)
    else:
        _show_units(answer, shown)


def _show_layout(answer: PlanAnswer, shown: _ShownParts) -> None:
    points = _curve_of(answer, shown)
    if shown.html:
        _write_page(answer, shown.html)
    if shown.as_json:
        from shardway.plan.facts import answer_facts

        typer.echo(json.dumps(answer_facts(answer, points), indent=1))
        return
    texts = []
    if shown.explain:
        from shardway.plan.text import explain

        texts.append(explain(shown.explain, answer))
    if shown.table or shown.curve:
        from shardway.plan.text import render_answer, render_curve

        texts.append(render_curve(points) if shown.curve else render_answer(answer))
    if shown.emit:
        texts.append(_emit(answer, shown.emit, shown.out))
    typer.echo("\n".join(texts), nl=False)


def _show_units(answer: UnitAnswer, shown: _ShownParts) -> None:
    from shardway.plan.facts import render_units, unit_facts

    wanted = {"--explain": shown.explain, "--curve": shown.curve, "--html": shown.html, "--emit": shown.emit}
    named = [option for option, value in wanted.items() if value]
    if named:
        raise UserError(
            f"{', '.join(named)}: {answer.shown.case.model.name} is known by its parts alone, so there is no more to "
            "show than the table.\n  To do: leave it out; --json has every number."
        )
    typer.echo(json.dumps(unit_facts(answer), indent=1) if shown.as_json else render_units(answer), nl=shown.as_json)


def _curve_of(answer: PlanAnswer, shown: _ShownParts) -> tuple[ScalingPoint, ...]:
    from shardway.plan.search import default_nodes, parse_nodes, scaling_curve

    if not shown.curve:
        return ()
    nodes = default_nodes(answer.question) if shown.curve == "nodes" else parse_nodes(shown.curve)
    return scaling_curve(answer.question, nodes)


def _write_page(answer: PlanAnswer, path: Path) -> None:
    from shardway.plan.answer import answer_curve
    from shardway.plan.page.page import render_page

    _write(path, render_page(answer, answer_curve(answer)))
    typer.echo(f"written: {path}", err=True)


def _emit(answer: PlanAnswer, library: str, folder: Path | None) -> str:
    """The files of a library: in a folder, told by their names, or one after the other as text."""
    from shardway.plan.emit.table import emit
    from shardway.plan.text import render_prediction

    if not answer.fits:
        raise UserError(
            f"--emit {library}: no layout fits, so there is none to write.\n"
            "  To do: see what `shardway plan` says without --emit, and change that."
        )
    emitted = emit(library, answer.shown.case, render_prediction(answer))
    return _write_files(emitted, folder) if folder else _render_files(emitted)


def _write_files(emitted: Emitted, folder: Path) -> str:
    for each in emitted.files:
        _write(folder / each.name, each.text)
    told = [f"to do: {sentence}" for sentence in emitted.told]
    return "\n".join([*(f"written: {folder / each.name}" for each in emitted.files), *told]) + "\n"


def _render_files(emitted: Emitted) -> str:
    """One file as it is; of several, each behind its name."""
    if len(emitted.files) == 1:
        return emitted.files[0].text
    return "\n".join(f"# ---- {each.name}\n{each.text}" for each in emitted.files)


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise SiteError(f"{path} cannot be written: {error.strerror}.\n  To do: name another place.") from error
