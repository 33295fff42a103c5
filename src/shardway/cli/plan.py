"""`shardway plan`: will it fit, which layout, how long; for a named model, a Hugging Face model or a run file.

Invariants:
- An option that is not given is None, empty or off; `plan.result` assumes a value for it and reports that. An option
  that the run file already sets is refused.
- Run files and their data are read here; the planner behind reads none.
- Answers on a login node, without torch (but for --trace, whose result is kept beside the run file, so that the next
  plan needs no torch).
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardway.cli.options import JsonOption, complete_gpu, complete_model, complete_site, print_json
from shardway.errors import SiteError, UserError, check_no_problems, legible
from shardway.installed import describe_missing, is_installed
from shardway.units import Scale, Span

if TYPE_CHECKING:
    from shardway.data.stage_forecast import StagingForecast
    from shardway.plan.case import Machine
    from shardway.plan.data_parallel_estimate import UnitPlanResult
    from shardway.plan.planner import JobTerms, PlanOptions, PlanResult
    from shardway.plan.shapes import Shape
    from shardway.resolve.draft import Resolved
    from shardway.runfile.load import LoadedRunFile
    from shardway.runfile.schema import RunFile
    from shardway.sites.schema import SiteProfile


def _opt(name: str, help_text: str, complete: Callable[[str], list[str]] | None = None) -> Any:
    return typer.Option(name, help=help_text, show_default=False, autocompletion=complete)


Model = Annotated[
    list[str],
    typer.Argument(
        metavar="MODEL [KEY=VALUE]...",
        help="A model by name (llama3-8b), a Hugging Face name or folder, or a run file and keys to set over it.",
        show_default=False,
        autocompletion=complete_model,
    ),
]


def plan(
    model: Model,
    on: Annotated[str | None, _opt("--on", "Site profile, by name or path.", complete_site)] = None,
    gpu: Annotated[str | None, _opt("--gpu", "Accelerator, where no site is named.", complete_gpu)] = None,
    nodes: Annotated[int | None, _opt("--nodes", "Whole nodes (1 where nothing is said).")] = None,
    gpus: Annotated[int | None, _opt("--gpus", "Accelerators, instead of --nodes.")] = None,
    queue: Annotated[str | None, _opt("--queue", "Queue of the site, whose wall-time cuts the run into jobs.")] = None,
    price: Annotated[str | None, _opt("--price", 'Of a GPU-hour, with its currency: "2.5 EUR".')] = None,
    tokens: Annotated[str | None, _opt("--tokens", "Length of the run in tokens: 100e9, 15T.")] = None,
    steps: Annotated[int | None, _opt("--steps", "Length of the run in steps.")] = None,
    seq_len: Annotated[int | None, _opt("--seq-len", "Tokens of a sequence.")] = None,
    global_batch: Annotated[int | None, _opt("--global-batch", "Sequences (images) of a step, over all ranks.")] = None,
    precision: Annotated[str, _opt("--precision", "Format of products: bf16, fp16, fp8, mxfp8, fp4, tf32, fp32.")] = "",
    optimizer: Annotated[str, _opt("--optimizer", "adamw, adamw8bit, adafactor, sgd or muon.")] = "",
    engine: Annotated[str, _opt("--engine", "Library that trains: shardway, torchtitan, megatron, deepspeed ...")] = "",
    layout: Annotated[str, _opt("--layout", "Degrees to keep, such as tp=8,pp=4; the others are searched.")] = "",
    micro_batch: Annotated[int | None, _opt("--micro-batch", "Sequences of one pass, instead of a search.")] = None,
    recompute: Annotated[str | None, _opt("--recompute", "none, selective, products, operators or full.")] = None,
    schedule: Annotated[str | None, _opt("--schedule", "gpipe, 1f1b, interleaved, zero_bubble or zbv.")] = None,
    zero: Annotated[int | None, _opt("--zero", "Stage of ZeRO, 0 to 3, instead of a search.")] = None,
    attention: Annotated[str | None, _opt("--attention", "Kernel: plain, flash1, flash2 or flash3.")] = None,
    compiled: Annotated[bool, _opt("--compiled", "The model is compiled.")] = False,
    offload: Annotated[
        bool | None, _opt("--offload/--no-offload", "Optimizer states in the host's memory, always or never.")
    ] = None,
    explain: Annotated[str | None, _opt("--explain", "Show memory, time or layout in full.")] = None,
    curve: Annotated[
        str | None, _opt("--curve", "Show the scaling over nodes: nodes, or numbers such as 1,2,8.")
    ] = None,
    html: Annotated[Path | None, _opt("--html", "Write a page with pictures to this file.")] = None,
    emit: Annotated[
        str | None,
        _opt("--emit", "Print the configuration for torchtitan, megatron, deepspeed, accelerate or nemo."),
    ] = None,
    out: Annotated[Path | None, _opt("--out", "Folder for the files of --emit, instead of printing them.")] = None,
    trace: Annotated[
        bool, _opt("--trace", "Count the run file's own model with torch, and keep the shape for the next plan.")
    ] = False,
    module: Annotated[
        str, _opt("--module", "What --trace counts instead of the run file's model: file.py:function.")
    ] = "",
    as_json: JsonOption = False,
) -> None:
    """Plan a run: whether it fits, the best layout, the time of a step, days, GPU-hours, and why."""
    from shardway.plan.economy import terms_of
    from shardway.plan.planner import PlanOptions, PlanResult, parse_layout, parse_length, parse_price, refuse

    if out and not emit:
        raise refuse(
            "--out", f"{out} is a folder for the files of --emit, which is not said", "--emit LIBRARY --out FOLDER"
        )
    emits = ""
    if emit and not engine and not model[0].endswith(".toml"):  # a run file names its own engine
        from shardway.plan.export.common import ENGINES

        emits = ENGINES.get(emit, "")
    options = PlanOptions(
        nodes=nodes,
        gpus=gpus,
        seq_len=seq_len,
        global_batch=global_batch,
        optimizer=optimizer,
        micro_batch=micro_batch,
        recompute=recompute,
        schedule=schedule,
        zero=zero,
        attention=attention,
        compiled=compiled,
        offload=offload,
        length=parse_length(tokens, steps),
        precisions=tuple(filter(None, (part.strip() for part in precision.split(",")))),
        engine=engine or emits,
        layout=parse_layout(layout),
    )
    paid = parse_price(price)
    machine, site = _find_machine(model, on, gpu)
    terms_on = partial(terms_of, site, queue, paid)
    traces, more = trace or bool(module), dict[str, Any]()
    if model[0].endswith(".toml"):
        result, staging, loaded = _plan_run_file(model, options, machine, terms_on, traces=traces, module=module)
        more = {} if staging is None else {"staging": staging.as_json()}
        _warn_of_uncached(loaded, model[0], on)
    else:
        result = _plan_named(model, options, machine, terms_on, traces=traces, emits=bool(emits))
    if not isinstance(result, PlanResult):
        from shardway.plan.data_parallel_estimate import render_units, unit_plan_facts

        wanted = {"--explain": explain, "--curve": curve, "--html": html, "--emit": emit}
        if named := [option for option, value in wanted.items() if value]:
            raise UserError(
                f"{', '.join(named)}: {result.shown.case.model.name} is known by its parts alone, so there is no more "
                "to show than the table.\n  To do: leave it out; --json has every number."
            )
        facts = json.dumps({**unit_plan_facts(result), **more}, indent=1) if as_json else ""
        typer.echo(facts or render_units(result), nl=as_json)
        return
    from shardway.plan.planner import default_nodes, parse_nodes, scaling_curve
    from shardway.plan.text import explain as explain_topic
    from shardway.plan.text import plan_facts, render_curve, render_plan

    counts = default_nodes(result.request) if curve == "nodes" else parse_nodes(curve) if curve else ()
    points = scaling_curve(result.request, counts)
    if html:
        from shardway.plan.page import render_page
        from shardway.plan.planner import curve_around

        _write(html, render_page(result, curve_around(result)))
        typer.echo(f"written: {html}", err=True)
    if as_json:
        print_json({**plan_facts(result, points), **more})
        return
    texts = [explain_topic(explain, result)] if explain else []
    if curve:
        texts.append(render_curve(points))
    elif not (explain or emit):
        texts.append(render_plan(result))
    if emit:
        texts.append(_emit(result, emit, out))
    typer.echo("\n".join(texts), nl=False)


def _warn_of_uncached(loaded: LoadedRunFile, run_file: str, on: str | None) -> None:
    """A line on stderr where the cache of this machine lacks files of the model that a run file names."""
    from shardway.launch.submission.hub_files import describe_uncached
    from shardway.sites.load import load_site

    if not loaded.values.model.hf:
        return
    try:
        profile = load_site(on or loaded.values.site.name)
    except UserError:
        return  # --on names a machine without a profile
    if what := describe_uncached(loaded, profile):
        typer.echo(legible(f"{what}; before the job: `shardway prefetch {shlex.quote(str(run_file))}`"), err=True)


def _emit(result: PlanResult, library: str, folder: Path | None) -> str:
    """The files of a library: written to a folder, with a list of their names; or one after the other as text."""
    from shardway.plan.export.common import emit
    from shardway.plan.text import render_prediction

    if not result.fits:
        raise UserError(
            f"--emit {library}: no layout fits, so there is none to write.\n"
            "  To do: see what `shardway plan` says without --emit, and change that."
        )
    emitted = emit(library, result.shown.case, render_prediction(result))
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


# --- the plan of a named model or of a run file


def _find_machine(words: list[str], on: str | None, gpu: str | None) -> tuple[Machine, SiteProfile | None]:
    """The machine of a site (`on`), of an accelerator (`gpu`), or of the site that a run file names."""
    from shardway.plan.huggingface import name_problems
    from shardway.plan.planner import find_machine

    if words[0].endswith(".toml") and not on and not gpu:
        from shardway.resolve.request import parse_words, site_of
        from shardway.runfile.load import load_run

        run = parse_words(words)
        loaded = load_run(run.run_file, run.overrides)
        site_of(loaded)
        on = loaded.values.site.name
    try:
        return find_machine(on, gpu)
    except UserError as error:
        check_no_problems("the plan", [*found, *error.problems] if (found := name_problems(words[0])) else [])
        raise


def _plan_named(
    words: list[str],
    options: PlanOptions,
    machine: Machine,
    terms_on: Callable[[int], JobTerms],
    *,
    traces: bool,
    emits: bool,
) -> PlanResult | UnitPlanResult:
    """The plan of a model that is named; `emits`: the engine is that of `--emit`."""
    from shardway.plan.counted import CountedModel
    from shardway.plan.huggingface import find_shape
    from shardway.plan.planner import assume_seq_len_of, describe_stray_key, find_excess, make_plan, refuse, request_of
    from shardway.plan.shapes import Architecture

    name, *keys = words
    check_no_problems("the plan", [describe_stray_key(key) for key in keys])
    if traces:
        raise refuse("--trace", f'"{name}" is no run file', "the path of a run file (.toml) whose model is counted")
    shape, seq_len, assumed = find_shape(name, _announce), 0, list[str]()
    if isinstance(shape, Architecture):
        request = request_of(options, shape, machine)
        return make_plan(request, terms_on(request.nodes))
    from shardway.plan.data_parallel_estimate import find_plan_of_units
    from shardway.plan.planner import count_ranks

    if isinstance(shape, CountedModel):
        if shape.lengths and shape.learned:
            check_no_problems("the plan", [*find_excess(options, shape.longest, "a sequence")])
        usual = assume_seq_len_of(shape.longest)
        seq_len = (options.seq_len or usual.value) if shape.lengths else 0
        assumed += [usual.note] if seq_len and not options.seq_len else []
        if seq_len > shape.longest > 0:
            assumed.append(f"more positions than the {shape.longest:,} that its config states")
        shape = shape.at_length(name, seq_len)
        assumed.append(shape.source)
    if options.seq_len and not seq_len:
        raise refuse("--seq-len", f"{shape.name} takes no sequences of tokens", "leave it out")
    terms = terms_on(-(-count_ranks(options, machine) // machine.per_node))
    if emits:  # its library, which nothing is written for
        options = replace(options, engine="")
    return find_plan_of_units(options, shape, machine, terms, seq_len=seq_len, assumed=assumed)


def _plan_run_file(
    words: list[str],
    options: PlanOptions,
    machine: Machine,
    terms_on: Callable[[int], JobTerms],
    *,
    traces: bool,
    module: str,
) -> tuple[PlanResult | UnitPlanResult, StagingForecast | None, LoadedRunFile]:
    """The plan of a run file on a machine, what it copies to each node, and the file as it was loaded; `terms_on` so
    many nodes. `traces`: count its model with torch; `module` ("file.py:function") makes it where the run file does
    not. Raises UserError with all problems."""
    from shardway.plan.planner import (
        AXES,
        SETTINGS,
        PlanRequest,
        assume_nodes,
        count_ranks,
        find_doubles,
        find_problems,
        make_plan,
    )
    from shardway.plan.shapes import Measured
    from shardway.resolve.draft import takes_of
    from shardway.resolve.planned import case_of, describe_ramp, list_assumptions, precision_of, sequences_of
    from shardway.resolve.request import parse_words, resolve_request

    check_no_problems("the plan", [*find_problems(options, machine), *find_doubles(options)])
    ranks = count_ranks(options, machine)
    resolution = resolve_request(parse_words(words), ranks, min(ranks, machine.per_node), machine)
    resolved = resolution.resolved
    values, path, samples = resolved.values, Path(words[0]), None
    if traces:
        shape, note = _trace(values, path, module)
    else:
        shape, note, samples = _find_shape(resolved, path)
    staging = None
    if values.data.stage != "off":
        from shardway.data.stage_forecast import forecast_staging

        tokens_taken = takes_of(values.model.kind) == "tokens" or bool(values.model.hf)
        chosen = not resolved.is_derived("data.stage")
        per_node = resolved.circumstances.ranks_per_node
        staging = forecast_staging(
            values, per_node, takes_tokens=tokens_taken, chosen=chosen, data_here=True, disk_here=False
        )
    shown = "" if staging is None else str(staging)
    assumed = (*machine.assumed, *filter(None, [note, shown]), *assume_nodes(options))
    length = options.length
    if length is None:
        length = values.train.steps
        if resolved.derived.total_steps:
            length = Span(float(resolved.derived.total_steps), "steps")
        elif length.unit == "epochs":  # whose number of steps depends on the data
            length = Span(length.amount * samples, "samples") if samples else None
    ramp = values.train.batch
    if (
        length is not None and length.unit == "steps" and not ramp.is_constant
    ):  # the plan's steps are of the largest size
        length = Span(float(ramp.find_start(length.in_steps(Scale(ramp, 1, 1)))), "samples")
    sequences = sequences_of(values)
    if length is not None and length.unit == "samples":  # the plan counts sequences
        length = Span(length.amount * sequences, "samples")
    terms = terms_on(-(-ranks // machine.per_node))
    if isinstance(shape, Measured):
        from shardway.plan.data_parallel_estimate import UnitCase, plan_units

        case = UnitCase(
            model=shape,
            global_batch=ramp.largest * sequences,
            micro_batch=int(values.train.micro_batch) * sequences,
            dp_replicate=int(values.parallel.dp_replicate),
            dp_shard=int(values.parallel.dp_shard),
            precision=precision_of(values.precision),
            optimizer=values.optim.name,
        )
        tokens = values.data.seq_len if takes_of(values.model.kind) == "tokens" or values.model.hf else 1
        more = {"length": length, "tokens_per_sample": tokens, "assumed": (*assumed, *describe_ramp(values))}
        return plan_units(case, machine, ranks, terms, **more), staging, resolution.loaded  # type: ignore[arg-type]
    fixed, notes = frozenset((*AXES, *SETTINGS, "offload", "sequence")), (*assumed, *list_assumptions(values))
    request = PlanRequest(case_of(values, shape, machine=machine), machine, ranks, fixed, length=length, assumed=notes)
    return make_plan(request, terms), staging, resolution.loaded


def _announce(sentence: str) -> None:
    typer.echo(f"shardway: {sentence}", err=True)


def _find_shape(resolved: Resolved, path: Path) -> tuple[Shape, str, int | None]:
    """The traced shape if there is one, else that of the run file's model section; its origin if that is not the run
    file, and the samples of an epoch if the data can be opened."""
    from shardway.plan.shapes import find_traced, shape_of_section
    from shardway.resolve.draft import takes_of
    from shardway.resolve.planned import shape_of_run

    values = resolved.values
    if values.model.adapter != "none":  # what is counted says nothing of what is frozen
        return shape_of_run(values, resolved.circumstances.shape), "", None
    traced = find_traced(values, path)
    if traced:
        return *traced, None
    if values.model.hf and resolved.circumstances.shape is None:
        from shardway.plan.counted import CountedModel
        from shardway.plan.huggingface import find_shape

        found = find_shape(values.model.hf, _announce)
        if isinstance(found, CountedModel):
            counted = found.at_length(values.model.hf, values.data.seq_len)
            return counted, counted.source, None
    if takes_of(values.model.kind) == "tokens" or values.model.hf:
        return shape_of_run(values, resolved.circumstances.shape), "", None
    # An image model has the image size of the data.
    from shardway.data.open import are_there, find_sample, open_described

    if not are_there(values):
        return shape_of_section(values.model, find_sample(values)[0]), _describe_no_data(values), None
    data = open_described(values)
    return shape_of_section(values.model, data.train.facts.sample_shape), "", data.facts.samples


def _trace(values: RunFile, path: Path, module: str) -> tuple[Shape, str]:
    """The model of the run file, counted with torch and kept for the next plan; a note on that."""
    from shardway.plan.shapes import digest_of, traced_path

    if not is_installed("torch"):
        raise UserError(
            f"{describe_missing('torch', '`shardway plan --trace`')}\n"
            f"  Or count it once where PyTorch is, and take {traced_path(path)} along."
        )
    from shardway.data.open import are_there
    from shardway.train.param_count import count_model

    if values.model.adapter != "none":
        raise UserError(
            "--trace counts a model of which all weights are trained, and model.adapter freezes them.\n"
            "  To do: leave --trace out; the planner knows the layers of model.hf."
        )
    counted, stored = count_model(values, module), traced_path(path)
    counted = replace(counted, source=f"{counted.source}; of {digest_of(values)}")
    try:
        stored.write_text(counted.to_json(), encoding="utf-8")
    except OSError as error:
        raise SiteError(f"{stored} cannot be written: {error.strerror}.") from error
    note = f"the model as it was counted now, kept in {stored}"
    return counted, note if are_there(values) else f"{note}; {_describe_no_data(values)}"


def _describe_no_data(values: RunFile) -> str:
    """A note about what is assumed for data that do not exist yet."""
    from shardway.data.open import find_missing
    from shardway.resolve.draft import takes_of

    what = "samples of data.seq_len tokens"
    if takes_of(values.model.kind) == "images" and not values.model.hf:
        what = f"images of {list(values.data.shape)} (others: data.kind=synthetic data.shape=[...])"
    return f"{what}, since {find_missing(values.data)} is not there yet"
