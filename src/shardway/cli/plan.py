"""`shardway plan`: will it fit, which layout, how long; for a named model, a Hugging Face model or a run file.

Invariants:
- An option that is not given is None, empty or off; `plan.answer` assumes a value for it and reports that.
- Answers on a login node, without torch (but for --trace, which says so).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardway.cli.options import JsonOption, complete_gpu, complete_site
from shardway.errors import SiteError, UserError

if TYPE_CHECKING:
    from shardway.plan.answer import PlanAnswer


def _option(name: str, help_text: str, complete: Callable[[str], list[str]] | None = None) -> Any:
    return typer.Option(name, help=help_text, show_default=False, autocompletion=complete)


Model = Annotated[
    list[str],
    typer.Argument(
        metavar="MODEL [KEY=VALUE]...",
        help="A model by name (llama3-8b), a Hugging Face name or folder, or a run file and keys to set over it.",
        show_default=False,
    ),
]

On = Annotated[str | None, _option("--on", "Site profile, by name or path.", complete_site)]
Gpu = Annotated[str | None, _option("--gpu", "Accelerator, where no site is named.", complete_gpu)]
Nodes = Annotated[int | None, _option("--nodes", "Whole nodes (1 where nothing is said).")]
Gpus = Annotated[int | None, _option("--gpus", "Accelerators, instead of --nodes.")]
Queue = Annotated[str | None, _option("--queue", "Queue of the site, whose wall-time cuts the run into jobs.")]
Price = Annotated[str | None, _option("--price", 'Of a GPU-hour, with its currency: "2.5 EUR".')]

Tokens = Annotated[str | None, _option("--tokens", "Length of the run in tokens: 100e9, 15T.")]
Steps = Annotated[int | None, _option("--steps", "Length of the run in steps.")]
SeqLen = Annotated[int | None, _option("--seq-len", "Tokens of a sequence.")]
GlobalBatch = Annotated[int | None, _option("--global-batch", "Sequences (images) of a step, over all ranks.")]
Precision = Annotated[str, _option("--precision", "Format of products: bf16, fp16, fp8, mxfp8, fp4, tf32, fp32.")]
Optimizer = Annotated[str, _option("--optimizer", "adamw, adamw8bit, adafactor, sgd or muon.")]
Engine = Annotated[str, _option("--engine", "Library that trains: shardway, torchtitan, megatron, deepspeed ...")]

Layout = Annotated[str, _option("--layout", "Degrees to keep, such as tp=8,pp=4; the others are searched.")]
MicroBatch = Annotated[int | None, _option("--micro-batch", "Sequences of one pass, instead of a search.")]
Recompute = Annotated[str | None, _option("--recompute", "none, selective, products, operators or full.")]
Schedule = Annotated[str | None, _option("--schedule", "gpipe, 1f1b, interleaved, zero_bubble or zbv.")]
Zero = Annotated[int | None, _option("--zero", "Stage of ZeRO, 0 to 3, instead of a search.")]
Attention = Annotated[str | None, _option("--attention", "Kernel: plain, flash1, flash2 or flash3.")]
Compiled = Annotated[bool, _option("--compiled", "The model is compiled.")]
Offload = Annotated[
    bool | None, _option("--offload/--no-offload", "Optimizer states in the host's memory, always or never.")
]

Explain = Annotated[str | None, _option("--explain", "Show memory, time or layout in full.")]
Curve = Annotated[str | None, _option("--curve", "Show the scaling over nodes: nodes, or numbers such as 1,2,8.")]
Html = Annotated[Path | None, _option("--html", "Write a page with pictures to this file.")]
Emit = Annotated[
    str | None, _option("--emit", "Print the configuration for torchtitan, megatron, deepspeed, accelerate or nemo.")
]
Out = Annotated[Path | None, _option("--out", "Folder for the files of --emit, instead of printing them.")]
Module = Annotated[str, _option("--module", "What --trace counts instead of the run file's model: file.py:function.")]
Trace = Annotated[
    bool, _option("--trace", "Count the run file's own model with torch, and keep the shape for the next plan.")
]


def plan(
    model: Model,
    on: On = None,
    gpu: Gpu = None,
    nodes: Nodes = None,
    gpus: Gpus = None,
    queue: Queue = None,
    price: Price = None,
    tokens: Tokens = None,
    steps: Steps = None,
    seq_len: SeqLen = None,
    global_batch: GlobalBatch = None,
    precision: Precision = "",
    optimizer: Optimizer = "",
    engine: Engine = "",
    layout: Layout = "",
    micro_batch: MicroBatch = None,
    recompute: Recompute = None,
    schedule: Schedule = None,
    zero: Zero = None,
    attention: Attention = None,
    compiled: Compiled = False,
    offload: Offload = None,
    explain: Explain = None,
    curve: Curve = None,
    html: Html = None,
    emit: Emit = None,
    out: Out = None,
    trace: Trace = False,
    module: Module = "",
    as_json: JsonOption = False,
) -> None:
    """Plan a run: whether it fits, the best layout, the time of a step, days, GPU-hours, and why."""
    from shardway.cli.plan_question import answer_plan, parse_price, parse_question_words, read_length
    from shardway.plan.answer import PlanAnswer, PlanOptions, parse_layout

    if emit and not engine and not model[0].endswith(".toml"):  # a run file names its own engine
        from shardway.plan.export.common import ENGINES

        engine = ENGINES.get(emit, "")
    answer = answer_plan(
        model,
        PlanOptions(
            nodes=nodes,
            gpus=gpus,
            seq_len=seq_len,
            global_batch=global_batch,
            length=read_length(tokens, steps),
            precisions=parse_question_words(precision),
            optimizer=optimizer,
            engine=engine,
            layout=parse_layout(layout),
            micro_batch=micro_batch,
            recompute=recompute,
            schedule=schedule,
            zero=zero,
            attention=attention,
            compiled=compiled,
            offload=offload,
        ),
        on=on,
        gpu=gpu,
        queue=queue,
        price=parse_price(price),
        trace=trace,
        module=module,
    )
    if isinstance(answer, PlanAnswer):
        typer.echo(_render_plan(answer, explain, curve, html, emit, out, as_json=as_json), nl=as_json)
        return
    from shardway.plan.text import render_units, unit_facts

    wanted = {"--explain": explain, "--curve": curve, "--html": html, "--emit": emit}
    named = [option for option, value in wanted.items() if value]
    if named:
        raise UserError(
            f"{', '.join(named)}: {answer.shown.case.model.name} is known by its parts alone, so there is no more to "
            "show than the table.\n  To do: leave it out; --json has every number."
        )
    typer.echo(json.dumps(unit_facts(answer), indent=1) if as_json else render_units(answer), nl=as_json)


def _render_plan(
    answer: PlanAnswer,
    topic: str | None,
    curve: str | None,
    html: Path | None,
    library: str | None,
    out: Path | None,
    *,
    as_json: bool,
) -> str:
    """What is printed of a plan; its page and the files of another library are written."""
    from shardway.plan.search import default_nodes, parse_nodes, scaling_curve
    from shardway.plan.text import answer_facts, explain, render_answer, render_curve

    nodes = default_nodes(answer.question) if curve == "nodes" else parse_nodes(curve) if curve else ()
    points = scaling_curve(answer.question, nodes)
    if html:
        from shardway.plan.answer import answer_curve
        from shardway.plan.page import render_page

        _write(html, render_page(answer, answer_curve(answer)))
        typer.echo(f"written: {html}", err=True)
    if as_json:
        return json.dumps(answer_facts(answer, points), indent=1)
    texts = [explain(topic, answer)] if topic else []
    if curve:
        texts.append(render_curve(points))
    elif not (topic or library):
        texts.append(render_answer(answer))
    if library:
        texts.append(_emit(answer, library, out))
    return "\n".join(texts)


def _emit(answer: PlanAnswer, library: str, folder: Path | None) -> str:
    """The files of a library: written to a folder, with a list of their names; or one after the other as text."""
    from shardway.plan.export.common import emit
    from shardway.plan.text import render_prediction

    if not answer.fits:
        raise UserError(
            f"--emit {library}: no layout fits, so there is none to write.\n"
            "  To do: see what `shardway plan` says without --emit, and change that."
        )
    emitted = emit(library, answer.shown.case, render_prediction(answer))
    if folder:
        for each in emitted.files:
            _write(folder / each.name, each.text)
        notes = [f"to do: {sentence}" for sentence in emitted.notes]
        return "\n".join([*(f"written: {folder / each.name}" for each in emitted.files), *notes]) + "\n"
    if len(emitted.files) == 1:
        return emitted.files[0].text
    return "\n".join(f"# ---- {each.name}\n{each.text}" for each in emitted.files)


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise SiteError(f"{path} cannot be written: {error.strerror}.\n  To do: name another place.") from error
