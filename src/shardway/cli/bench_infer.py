"""`shardway bench infer`: how fast a model answers, in this process or behind a URL, and a table of results.

Invariants:
- Every mistake that can be found without torch is reported before torch is imported; `serve` and `compare` never import
  it, nor does the scripted backend.
- A result is appended as soon as it is measured, and Ctrl-C loses none. Nothing else is written but the files that
  --html and --json name.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardway.cli.bench_options import ORIGIN, BenchOutputs, JsonFileOption, write_facts, write_result
from shardway.cli.main import uncollected
from shardway.cli.options import complete_site, print_json
from shardway.errors import Problem, ShardwayError, UserError, check_no_problems, legible
from shardway.hardware.catalogue import DTYPES, find_accelerator
from shardway.plugins import is_registered, list_names, load_plugin
from shardway.ranks.launcher import find_placement

if TYPE_CHECKING:
    from shardway.bench.inference.backends import EngineRequest, InferenceBackend, OpenedEngine
    from shardway.bench.inference.results import BenchConditions, Row
    from shardway.bench.inference.utilisation import Peaks
    from shardway.bench.roofline import RoofCeilings

app = typer.Typer(help="Measure inference: static batches, offline throughput, a server.", no_args_is_help=True)

_DTYPES = ("auto", "fp32", "bf16", "fp16")
_DEVICES = ("auto", "cpu", "cuda")
_QUANTIZE = ("off", "fp8", "int8", "int4")
_LOADS = ("dummy", "auto")
_KEY_VARIABLE = "OPENAI_API_KEY"

BackendOption = Annotated[
    str, typer.Option("--backend", metavar="NAME", help="transformers, vllm, sglang, scripted, or a plugin's.")
]
ModelOption = Annotated[
    str | None, typer.Option("--model", metavar="MODEL", help="Folder (config.json is enough), run, or hub name.")
]
LoadFormatOption = Annotated[
    str, typer.Option("--load-format", help="dummy: random weights by config.json; auto: the model's own.")
]
DtypeOption = Annotated[str, typer.Option("--dtype", help="auto, fp32, bf16 or fp16.")]
DeviceOption = Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")]
QuantizeOption = Annotated[str, typer.Option("--quantize", help="off, fp8, int8 or int4 (transformers).")]
SettingOption = Annotated[
    list[str] | None, typer.Option("--setting", metavar="NAME=VALUE", help="A setting of the backend's own.")
]
PrefixOption = Annotated[bool, typer.Option("--enable-prefix-caching", help="Let the engine share prefixes.")]
TrustOption = Annotated[bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")]
SeedOption = Annotated[int, typer.Option("--seed", min=0, help="Of weights, lengths, ids and arrivals.")]
RunNameOption = Annotated[str, typer.Option("--run-name", help="Names the results.")]
ResultOption = Annotated[
    str | None, typer.Option("--result-filename", metavar="FILE", help="Append each result as a line of JSON.")
]
SecondsOption = Annotated[
    float, typer.Option("--seconds", help="How long peaks are measured for MBU and MFU; 0: the catalogue's.")
]
SiteOption = Annotated[
    str | None,
    typer.Option("--site", help="Profile whose [measured] has the peaks instead.", autocompletion=complete_site),
]
HtmlOption = Annotated[str | None, typer.Option("--html", metavar="FILE", help="Write the results as one HTML file.")]


# --- what the options ask for


@dataclass(frozen=True)
class InferOutputs:
    """Where results go: a file that each is appended to, a page, and facts ("-": stdout)."""

    rows: str | None
    html: str | None
    json: str | None

    def find_wrong(self) -> Iterable[Problem]:
        """What is wrong with them."""
        yield from BenchOutputs(json=self.json, html=self.html).find_wrong()
        if self.rows is None:
            return
        path = Path(self.rows)
        what = ""
        if path.is_dir():
            what = f"{path} is a folder"
        elif not self.rows or not path.parent.is_dir():
            what = f"the folder {path.parent} does not exist"
        elif not os.access(path if path.exists() else path.parent, os.W_OK):
            what = f"{path} cannot be written"
        elif path.resolve() in {Path(each).resolve() for each in (self.html, self.json) if each and each != "-"}:
            what = f"{path} is also the file of another option"
        if what:
            yield Problem("--result-filename", what, ORIGIN, "a file in a folder that you may write")

    def append(self, row: Row) -> None:
        """Keep a result."""
        from shardway.bench.inference.results import append_row

        if self.rows is not None:
            append_row(Path(self.rows), row)

    def show(self, text: str) -> None:
        """Print, but where stdout is for the facts alone."""
        if self.json != "-":
            typer.echo(legible(text))

    def note(self, text: str) -> None:
        """Print what is no result, in any case."""
        typer.echo(legible(text), err=self.json == "-")

    def finish(self, rows: Sequence[Row]) -> None:
        """Write the facts and the page of what was measured."""
        if not rows:
            return
        from shardway.bench.inference.page import render_page
        from shardway.bench.inference.readers import recognise_row
        from shardway.units import render_plural

        facts, alone = {"format": 1, "results": [dict(row) for row in rows]}, self.json == "-"
        if alone:
            print_json(facts)
        elif self.json is not None:
            write_facts(self.json, facts)
        if self.html is not None:
            write_result(self.html, render_page([recognise_row(row) for row in rows]))
            typer.echo(f"wrote {legible(self.html)}", err=alone)
        if self.rows is not None:
            typer.echo(f"appended {render_plural(len(rows), 'result')} to {legible(self.rows)}", err=alone)


def read_lengths(option: str, text: str, problems: list[Problem]) -> tuple[int, ...]:
    """Numbers above 0 between commas; a mistake is added to `problems`."""
    words = text.replace(",", " ").split()
    numbers = tuple(int(word) for word in words if word.isdecimal() and int(word))
    if not words or len(numbers) != len(words):
        problems.append(Problem(option, f'"{text}" is no list of numbers', ORIGIN, "numbers above 0, such as 1,8,64"))
    return numbers


def _find_other(option: str, value: str, allowed: Sequence[str]) -> Iterable[Problem]:
    if value not in allowed:
        yield Problem(option, f'"{value}" is not known', ORIGIN, ", ".join(allowed))


@contextlib.contextmanager
def stdout_as_stderr() -> Iterator[None]:
    """While entered, what this process writes to stdout goes to stderr, and what it starts keeps it so: engines write
    their logs to stdout, from processes of their own, and stdout is for results."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


@dataclass(frozen=True)
class EngineWords:
    """The words of the command line about an engine."""

    backend: str
    model: str | None
    load: str
    dtype: str
    device: str
    quantize: str
    settings: Sequence[str]
    prefix_caching: bool
    trusts: bool
    seed: int
    ignore_eos: bool = True

    def find_wrong(self) -> Iterable[Problem]:
        """What is wrong with them."""
        yield from _find_other("--load-format", self.load, _LOADS)
        yield from _find_other("--dtype", self.dtype, _DTYPES)
        yield from _find_other("--device", self.device, _DEVICES)
        yield from _find_other("--quantize", self.quantize, _QUANTIZE)
        if not is_registered("inference_backends", self.backend):
            yield Problem(
                "--backend", f'"{self.backend}" is not known', ORIGIN, ", ".join(list_names("inference_backends"))
            )
            return
        from shardway.bench.inference.backends import parse_settings

        if not self._load().opens_model:
            yield from self._find_idle()
        try:
            parse_settings(self.settings, self._load())
        except ValueError as error:
            what, _, allowed = str(error).partition("; allowed: ")
            yield Problem("--setting", what, ORIGIN, allowed)

    def _find_idle(self) -> Iterable[Problem]:
        """The options about a model that were given to a backend without one."""
        for option, given in (
            ("--model", self.model is not None),
            ("--load-format", self.load != "dummy"),
            ("--dtype", self.dtype != "auto"),
            ("--device", self.device != "auto"),
            ("--quantize", self.quantize != "off"),
            ("--enable-prefix-caching", self.prefix_caching),
            ("--trust-remote-code", self.trusts),
        ):
            if given:
                what = f"has no effect: the backend {self.backend} opens no model"
                yield Problem(option, what, ORIGIN, remedy="leave it out, or name another --backend")

    def _load(self) -> type[InferenceBackend]:
        found: type[InferenceBackend] = load_plugin("inference_backends", self.backend)
        return found

    def open(self) -> OpenedEngine:
        """Load the model. Raises UserError where the engine is not installed, or cannot take what is asked for."""
        from shardway.bench.inference.backends import parse_settings

        backend = self._load()
        if lack := backend.describe_lack():
            raise UserError(f"--backend {self.backend}: {lack}")
        with uncollected(), stdout_as_stderr():
            return backend().open(self._request(parse_settings(self.settings, backend)))

    def _request(self, settings: Mapping[str, Any]) -> EngineRequest:
        from shardway.bench.inference.backends import EngineRequest

        return EngineRequest(
            model=self.model,
            random_weights=self.load == "dummy",
            dtype=self.dtype,
            device=self.device,
            quantize=self.quantize,
            seed=self.seed,
            ignore_eos=self.ignore_eos,
            prefix_caching=self.prefix_caching,
            trust_remote_code=self.trusts,
            settings=settings,
        )

    def describe(self, engine: OpenedEngine, run_name: str, warmup: str) -> BenchConditions:
        """Under what conditions it is measured."""
        from shardway.bench.inference.results import BenchConditions

        facts = engine.facts
        return BenchConditions(
            backend=self.backend,
            engine=facts.engine,
            model=facts.model,
            run_name=run_name,
            device=facts.device,
            dtype=facts.dtype,
            load=self.load if facts.device_kind else "n/a",
            ignore_eos=self.ignore_eos,
            prefix_caching=self.prefix_caching,
            warmup=warmup,
            prompts=f"random ids below {facts.vocabulary}",
            seed=self.seed,
            others=facts.settings,
        )


@dataclass(frozen=True)
class PeakWords:
    """The words about peaks: seconds to measure them, or a site."""

    seconds: float
    site: str | None

    def find_wrong(self) -> Iterable[Problem]:
        """What is wrong with them."""
        if not (math.isfinite(self.seconds) and self.seconds >= 0):
            yield Problem("--seconds", f"{self.seconds:g} is no time to measure in", ORIGIN, "0 or more")

    def read_site(self) -> RoofCeilings | None:
        """The ceilings of the site; None where none is named. Raises UserError where it has none."""
        if self.site is None:
            return None
        from shardway.bench.step import read_site_ceilings

        return read_site_ceilings(self.site)

    def find(self, engine: OpenedEngine, ceilings: RoofCeilings | None) -> Peaks | None:
        """The peaks of the engine's devices: of the site, measured now, or rated; None where there are none. Raises
        UserError for a site of another device."""
        from shardway.bench.inference.utilisation import choose_peaks

        facts = engine.facts
        if not facts.device_kind:
            return None
        part = find_accelerator(facts.device)
        if ceilings is not None and (part is None or part.key != ceilings.part):
            raise UserError(
                f"--site {self.site}: its ceilings are those of {ceilings.part}, and the model is on {facts.device}.\n"
                "  To do: leave out --site: peaks are then measured here."
            )
        if ceilings is None and self.seconds > 0:
            from shardway.bench.step import measure_ceilings

            formats = [name for name in DTYPES if name == facts.dtype] or ["fp32"]
            try:
                ceilings = measure_ceilings(formats, facts.device_kind, None, self.seconds)
            except ShardwayError:
                ceilings = None
        return choose_peaks(ceilings, facts.device, facts.dtype, facts.devices)


def _check_alone() -> None:
    placement = find_placement(os.environ)
    if placement.world > 1:
        raise UserError(
            f"bench infer is one process, and this is rank {placement.rank} of {placement.world}, started by "
            f"{placement.launcher}.\n  To do: start it alone; engines start their own ranks (--setting)."
        )


# --- the verbs


@app.command("one-batch")
def one_batch(
    batch_size: Annotated[str, typer.Option("--batch-size", metavar="N,...", help="Sequences of a batch.")] = "1",
    input_len: Annotated[str, typer.Option("--input-len", metavar="N,...", help="Tokens of a prompt.")] = "1024",
    output_len: Annotated[str, typer.Option("--output-len", metavar="N,...", help="Tokens that follow.")] = "16",
    backend: BackendOption = "transformers",
    model: ModelOption = None,
    load_format: LoadFormatOption = "dummy",
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    quantize: QuantizeOption = "off",
    setting: SettingOption = None,
    trust_remote_code: TrustOption = False,
    seed: SeedOption = 42,
    run_name: RunNameOption = "default",
    result_filename: ResultOption = None,
    seconds: SecondsOption = 4.0,
    site: SiteOption = None,
    to_html: HtmlOption = None,
    to_json: JsonFileOption = None,
) -> None:
    """Measure static batches: prefill, median decode step, total. Lists are swept, all combinations."""
    outputs, peaks = InferOutputs(result_filename, to_html, to_json), PeakWords(seconds, site)
    words = EngineWords(
        backend, model, load_format, dtype, device, quantize, setting or (), False, trust_remote_code, seed
    )
    problems: list[Problem] = []
    sizes = read_lengths("--batch-size", batch_size, problems)
    reads, writes = (
        read_lengths(option, text, problems)
        for option, text in (("--input-len", input_len), ("--output-len", output_len))
    )
    check_no_problems("the command line", [*problems, *words.find_wrong(), *peaks.find_wrong(), *outputs.find_wrong()])
    _check_alone()
    ceilings = peaks.read_site()
    engine = words.open()
    from shardway.bench.inference.offline import BatchSweep, measure_batches
    from shardway.bench.inference.report import render_conditions, render_peaks, render_result

    rows: list[Row] = []
    sweep = BatchSweep(sizes, reads, writes, seed)
    try:
        conditions = words.describe(engine, run_name, "the first combination, at most 32 outputs")
        found = peaks.find(engine, ceilings)
        for row in measure_batches(engine, sweep, conditions, found, lambda why: outputs.note(f"left out: {why}")):
            outputs.append(row)
            if not rows:
                outputs.show("\n".join([*render_conditions(row), render_peaks(row)]))
            rows.append(row)
            outputs.show(f"\n{render_result(row)}")
    except KeyboardInterrupt:
        typer.echo(f"interrupted: {len(rows)} of {len(sweep.list_points())} combinations were measured", err=True)
        raise
    finally:
        engine.close()
        outputs.finish(rows)


@app.command("throughput")
def throughput(
    num_prompts: Annotated[int, typer.Option("--num-prompts", min=1, help="How many requests.")] = 1000,
    input_len: Annotated[int, typer.Option("--input-len", min=1, help="Tokens of a prompt, at most.")] = 1024,
    output_len: Annotated[int, typer.Option("--output-len", min=1, help="Tokens that follow, at most.")] = 1024,
    range_ratio: Annotated[
        float, typer.Option("--range-ratio", min=0.0, max=1.0, help="Lengths from so much of these on; 1: all alike.")
    ] = 1.0,
    disable_ignore_eos: Annotated[
        bool, typer.Option("--disable-ignore-eos", help="End a request where the model ends it.")
    ] = False,
    backend: BackendOption = "transformers",
    model: ModelOption = None,
    load_format: LoadFormatOption = "dummy",
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    quantize: QuantizeOption = "off",
    setting: SettingOption = None,
    enable_prefix_caching: PrefixOption = False,
    trust_remote_code: TrustOption = False,
    seed: SeedOption = 42,
    run_name: RunNameOption = "default",
    result_filename: ResultOption = None,
    seconds: SecondsOption = 4.0,
    site: SiteOption = None,
    to_html: HtmlOption = None,
    to_json: JsonFileOption = None,
) -> None:
    """Measure many requests at once: requests/s, and input, output and total tokens/s apart."""
    outputs, peaks = InferOutputs(result_filename, to_html, to_json), PeakWords(seconds, site)
    words = EngineWords(
        *(backend, model, load_format, dtype, device, quantize, setting or ()),
        enable_prefix_caching,
        trust_remote_code,
        seed,
        not disable_ignore_eos,
    )
    check_no_problems("the command line", [*words.find_wrong(), *peaks.find_wrong(), *outputs.find_wrong()])
    _check_alone()
    ceilings = peaks.read_site()
    engine = words.open()
    from shardway.bench.inference.offline import RequestSet, measure_requests_offline
    from shardway.bench.inference.report import render_conditions, render_peaks, render_result

    try:
        conditions = words.describe(engine, run_name, "at most 16 requests of at most 32 outputs")
        asked = RequestSet(num_prompts, input_len, output_len, range_ratio, seed)
        row = measure_requests_offline(engine, asked, conditions, peaks.find(engine, ceilings))
    except KeyboardInterrupt:
        typer.echo("interrupted: there is no result, for all requests are one measurement", err=True)
        raise
    finally:
        engine.close()
    outputs.append(row)
    outputs.show("\n".join([*render_conditions(row), render_peaks(row), "", render_result(row)]))
    outputs.finish([row])


@app.command("serve")
def serve(
    base_url: Annotated[
        str, typer.Option("--base-url", metavar="URL", help="http://HOST:PORT or https://HOST, with or without /v1.")
    ] = "http://127.0.0.1:8000",
    endpoint: Annotated[
        str, typer.Option("--endpoint", help="/v1/completions or /v1/chat/completions.")
    ] = "/v1/completions",
    model: Annotated[
        str | None, typer.Option("--model", help="As the server names it (default: the one that it has).")
    ] = None,
    num_prompts: Annotated[int, typer.Option("--num-prompts", min=1, help="How many requests.")] = 1000,
    input_len: Annotated[int, typer.Option("--input-len", min=1, help="Tokens of a prompt, at most.")] = 1024,
    output_len: Annotated[int, typer.Option("--output-len", min=1, help="Tokens that follow, at most.")] = 128,
    range_ratio: Annotated[
        float, typer.Option("--range-ratio", min=0.0, max=1.0, help="Lengths from so much of these on; 1: all alike.")
    ] = 1.0,
    prompts: Annotated[
        str, typer.Option("--prompts", help="ids, or words for a server that takes only text; auto: words in a chat.")
    ] = "auto",
    request_rate: Annotated[
        str, typer.Option("--request-rate", metavar="RATE,...", help="Requests a second; inf: all at once.")
    ] = "inf",
    burstiness: Annotated[
        float, typer.Option("--burstiness", help="Shape of the gamma distribution of gaps; 1: Poisson.")
    ] = 1.0,
    max_concurrency: Annotated[
        int | None, typer.Option("--max-concurrency", min=1, help="Requests at a time, at most.")
    ] = None,
    goodput: Annotated[
        list[str] | None,
        typer.Option("--goodput", metavar="NAME:MS", help="Limits of ttft, tpot, e2el: ttft:200,tpot:50."),
    ] = None,
    percentiles: Annotated[
        str, typer.Option("--metric-percentiles", metavar="P,...", help="Percentiles of latencies.")
    ] = "50,90,99",
    num_warmups: Annotated[int, typer.Option("--num-warmups", min=1, help="Requests before the load.")] = 1,
    disable_ignore_eos: Annotated[
        bool, typer.Option("--disable-ignore-eos", help="Leave ignore_eos out of the requests.")
    ] = False,
    extra_request_body: Annotated[
        str | None, typer.Option("--extra-request-body", metavar="JSON", help="Merged into each request.")
    ] = None,
    api_key_env: Annotated[
        str, typer.Option("--api-key-env", metavar="NAME", help="Environment variable that holds the key.")
    ] = _KEY_VARIABLE,
    timeout: Annotated[float, typer.Option("--timeout", help="Seconds for one request, at most.")] = 600.0,
    seed: SeedOption = 42,
    run_name: RunNameOption = "default",
    result_filename: ResultOption = None,
    to_html: HtmlOption = None,
    to_json: JsonFileOption = None,
) -> None:
    """Measure a server with OpenAI's interface: TTFT, TPOT, ITL, E2EL, throughput and goodput of a load."""
    import asyncio

    from shardway.bench.inference.client import ENDPOINTS, StreamClient, StreamRequest, parse_address
    from shardway.bench.inference.service import ServiceLoad, list_rates, parse_body, parse_goodput

    outputs = InferOutputs(result_filename, to_html, to_json)
    problems = [*outputs.find_wrong(), *_find_other("--endpoint", endpoint, ENDPOINTS)]
    problems += _find_other("--prompts", prompts, ("auto", "ids", "words"))
    if prompts == "ids" and endpoint == ENDPOINTS[1]:
        problems.append(Problem("--prompts", "a chat has no ids", ORIGIN, "words, or --endpoint /v1/completions"))

    def read(option: str, parse: Any, *given: Any) -> Any:
        try:
            return parse(*given)
        except ValueError as error:
            what, _, allowed = str(error).partition("; allowed: ")
            problems.append(Problem(option, what, ORIGIN, allowed))
            return None

    address = read("--base-url", parse_address, base_url)
    limits = read("--goodput", parse_goodput, goodput or ())
    rates = read("--request-rate", _parse_numbers, request_rate, math.inf)
    percents = read("--metric-percentiles", _parse_numbers, percentiles, 100.0)
    extra = read("--extra-request-body", parse_body, extra_request_body)
    if not api_key_env.isidentifier():  # it may be the key itself, so it is not shown
        what = "is no name of an environment variable"
        problems.append(Problem("--api-key-env", what, ORIGIN, "a name: a key on a command line is seen by others"))
    elif api_key_env != _KEY_VARIABLE and api_key_env not in os.environ:
        problems.append(Problem("--api-key-env", f"${api_key_env} is not set", ORIGIN, f"export {api_key_env}=..."))
    for option, value in (("--burstiness", burstiness), ("--timeout", timeout)):
        if not (math.isfinite(value) and value > 0):
            problems.append(Problem(option, f"{value:g} is too little", ORIGIN, "a number above 0"))
    check_no_problems("the command line", problems)
    _check_alone()
    asked = ServiceLoad(
        *(num_prompts, input_len, output_len, range_ratio),
        burstiness=burstiness,
        most=max_concurrency,
        goodput=limits,
        percents=percents,
        warmups=num_warmups,
        seed=seed,
        run_name=run_name,
        words=prompts == "words",
    )
    loads = list_rates(asked, rates)
    client = StreamClient(address, os.environ.get(api_key_env, ""), timeout)
    common = StreamRequest(model or "", endpoint, not disable_ignore_eos, extra=extra)
    rows: list[Row] = []
    try:
        asyncio.run(_serve_loads(client, common, model, loads, outputs, rows))
    finally:
        outputs.finish(rows)
    if rows and rows[-1]["interrupted"]:
        raise KeyboardInterrupt


async def _serve_loads(
    client: Any, common: Any, model: str | None, loads: Sequence[Any], outputs: InferOutputs, rows: list[Row]
) -> None:
    """Measure each load, one after the other; an interrupt ends them, with a row of what was measured."""
    from dataclasses import replace

    from shardway.bench.inference.report import render_conditions, render_result
    from shardway.bench.inference.service import choose_model, measure_service

    try:
        common = replace(common, model=await choose_model(client, model))
        for load in loads:
            row = await measure_service(client, common, load)
            outputs.append(row)
            if not rows:
                outputs.show("\n".join(render_conditions(row)))
            rows.append(row)
            outputs.show(f"\n{render_result(row)}")
            if row["interrupted"]:
                return
    finally:
        client.close()


@app.command("compare")
def compare(
    files: Annotated[list[str], typer.Argument(metavar="FILE...", help="Results of ours, SGLang's or vLLM's.")],
    to_html: HtmlOption = None,
    to_json: JsonFileOption = None,
) -> None:
    """Put results of several programs into one table."""
    from shardway.bench.inference.readers import read_results

    outputs = BenchOutputs(json=to_json, html=to_html)
    check_no_problems("the command line", [*outputs.find_wrong(files)])
    results = read_results([Path(name) for name in files])
    from shardway.bench.inference.page import render_page
    from shardway.bench.inference.report import render_compared

    facts = {
        "format": 1,
        "results": [{"kind": each.kind, "from": each.origin, "result": each.label, **each.figures} for each in results],
    }
    outputs.write(lambda: render_compared(results), lambda: facts, lambda: render_page(results))


# --- numbers


def _parse_numbers(text: str, most: float) -> tuple[float, ...]:
    """Numbers above 0 and up to `most`, between commas. Raises ValueError with a sentence."""
    found = []
    for word in text.replace(",", " ").split():
        try:
            value = float(word)
        except ValueError:
            value = math.nan
        if not 0 < value <= most:
            end = ", or inf" if math.isinf(most) else f", up to {most:g}"
            raise ValueError(f'"{word}" is none; allowed: numbers above 0{end}')
        found.append(value)
    if not found:
        raise ValueError("names none; allowed: numbers above 0")
    return tuple(found)
