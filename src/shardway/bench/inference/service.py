"""The measurement of a server that speaks OpenAI's interface: what is asked of it, the load, and the row of the result.

Invariants:
- Before a load the server is asked for its models and answers one request, so that a wrong URL, key, model or endpoint
  is one sentence and no load of errors.
- Prompts are rendered before the load begins.
"""

from __future__ import annotations

import json
import math
import resource
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from shardway.bench.inference.client import (
    ENDPOINTS,
    LoadResult,
    StreamClient,
    StreamRequest,
    check_access,
    list_models,
    send_load,
)
from shardway.bench.inference.load import LEAST_VOCABULARY, draw_arrivals, draw_lengths, draw_prompts, draw_words
from shardway.bench.inference.offline import check_some_succeeded
from shardway.bench.inference.results import (
    SERVE,
    BenchConditions,
    Row,
    interpolate,
    make_row,
    measure_requests,
)
from shardway.errors import UserError, list_some
from shardway.units import render_plural

# --- limits


def parse_goodput(words: Sequence[str]) -> dict[str, float]:
    """Limits in milliseconds from "ttft:200", "tpot:50" (vLLM's --goodput), also several in a word. Raises ValueError
    with all that is wrong."""
    limits: dict[str, float] = {}
    wrong = []
    for word in " ".join(words).replace(",", " ").split():
        name, colon, text = word.partition(":")
        try:
            limit = float(text)
        except ValueError:
            limit = math.nan
        if name not in ("ttft", "tpot", "e2el") or not colon or not (limit > 0 and math.isfinite(limit)):
            wrong.append(word)
        elif name in limits:
            raise ValueError(f"{name} has two limits, {limits[name]:g} and {limit:g} ms; allowed: one for each")
        limits[name] = limit
    if wrong:
        raise ValueError(f"{', '.join(wrong)}: no limit; allowed: ttft:MS, tpot:MS, e2el:MS, each above 0")
    return limits


# --- what each request has beside


_OWNED = {
    "model": "--model",
    "prompt": "--prompts and --input-len",
    "messages": "--endpoint /v1/chat/completions and --input-len",
    "max_tokens": "--output-len",
    "ignore_eos": "--disable-ignore-eos",
    "stream": "always true: TTFT and ITL are of a stream",
    "n": "1: tokens of several answers would be taken for those of one",
}


def parse_body(text: str | None) -> dict[str, Any]:
    """What is merged into each request: a JSON object that changes nothing of what the result states. null takes a key
    out for a server that does not know it. Raises ValueError with a sentence."""
    if text is None:
        return {}
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ValueError(f"is no JSON: {error}; allowed: an object, such as {{}}") from None
    if not isinstance(found, dict):
        raise ValueError("is no object; allowed: an object, such as {}")
    taken = [f'"{key}" ({_OWNED[key]})' for key in found if key in _OWNED and found[key] is not None]
    if taken:
        raise ValueError(f"has {', '.join(taken)}; allowed: keys that no option has")
    return found


# --- a measurement

MOST_OPENED = 1024
"""The most connections that are opened before a load of any concurrency."""


@dataclass(frozen=True)
class ServiceLoad:
    """What is sent. `rate` in requests a second (inf: all at once), `most` at a time (None: any number), `percents`
    are reported, `warmups` sent before, one after the other."""

    count: int
    input_len: int
    output_len: int
    range_ratio: float = 1.0
    rate: float = math.inf
    burstiness: float = 1.0
    most: int | None = None
    goodput: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    percents: tuple[float, ...] = (50.0, 90.0, 99.0)
    warmups: int = 1
    seed: int = 0
    run_name: str = "default"
    words: bool = False
    """Whether prompts are words also where ids could be sent; a chat has words in any case."""


async def choose_model(client: StreamClient, wanted: str | None) -> str:
    """The model that requests name. Raises UserError where the server does not have it, or has several and none is
    wanted."""
    found = await list_models(client)
    if isinstance(found, str):
        if wanted is None:
            raise UserError(
                f"{client.address.url} does not list its models (GET /v1/models: {found}).\n"
                "  To do: --model NAME; --base-url if that is another address than the server's."
            )
        return wanted
    if wanted in found:
        return str(wanted)
    has = list_some(found, 8) or "no model"
    if wanted is not None:
        raise UserError(f'{client.address.url} has no model "{wanted}"\n  allowed: {has}')
    if len(found) != 1:
        raise UserError(f"{client.address.url} has several models, and --model names none\n  allowed: {has}")
    return found[0]


async def measure_service(
    client: StreamClient, request: StreamRequest, asked: ServiceLoad, progress: Callable[[int], None] = lambda _: None
) -> Row:
    """Send a load to a server and return its row. Raises UserError for what the first request shows to be wrong,
    JobError where none of the load succeeds."""
    reads = draw_lengths(asked.count, asked.input_len, asked.range_ratio, asked.seed)
    writes = draw_lengths(asked.count, asked.output_len, asked.range_ratio, asked.seed + 1)
    as_words = asked.words or request.endpoint != ENDPOINTS[0]
    prompts = _draw(as_words, reads, asked.seed)
    requests = [
        (client.render("POST", request.endpoint, request.render_body(prompt, write)), read)
        for prompt, write, read in zip(prompts, writes, reads, strict=True)
    ]
    for prompt in _draw(as_words, [asked.input_len] * asked.warmups, asked.seed + 2):
        body = request.render_body(prompt, asked.output_len)
        await _check_first(client, client.render("POST", request.endpoint, body), request)
    _allow_connections(min(asked.count, asked.most or asked.count))
    await client.open_idle(min(asked.count, asked.most or MOST_OPENED))
    due = draw_arrivals(asked.count, asked.rate, asked.burstiness, asked.seed)
    result = await send_load(client, requests, due, asked.most, progress)
    if result.requests:
        check_some_succeeded(result.requests, client.address.url)
    return _make_service_row(client, request, asked, result)


_OTHER_FILES = 64


def _allow_connections(count: int) -> None:
    """Raise this process's soft limit of open files to what so many connections need. Raises UserError where the hard
    limit is less, rather than have requests fail one by one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + _OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    if hard != resource.RLIM_INFINITY and hard < wanted:
        raise UserError(
            f"{count} requests at a time are {count} connections, and {hard} files may be open here.\n"
            f"  To do: --max-concurrency {max(1, hard - _OTHER_FILES)}, or a higher `ulimit -n`."
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _draw(as_words: bool, lengths: Sequence[int], seed: int) -> Sequence[Sequence[int] | str]:
    return draw_words(lengths, seed) if as_words else draw_prompts(lengths, LEAST_VOCABULARY, seed)


async def _check_first(client: StreamClient, request: bytes, common: StreamRequest) -> None:
    """Raises UserError where a request by itself does not succeed."""
    exchange = await client.send(request)
    check_access(exchange, client.address.url)
    error = exchange.read().error
    if not error:
        return
    where = f"{client.address.url}{common.endpoint}"
    status = exchange.response.status
    if status == 404:
        other = ENDPOINTS[1] if common.endpoint == ENDPOINTS[0] else ENDPOINTS[0]
        remedy = f"--endpoint {other}, or another --model"
    elif 300 <= status < 400:
        remedy = f"--base-url with what it redirects to: {exchange.response.headers.get('location', 'n/a')}"
    elif status in (400, 422):
        remedy = _find_remedy(error)
    elif status == 200 and not exchange.is_stream:
        remedy = 'a server that streams ("stream": true): without it there is no TTFT and no ITL'
    elif status == 200:
        remedy = "see the log of the server; --timeout if it is only slow"
    else:
        remedy = "see the log of the server"
    raise UserError(f"a first request to {where} failed: {error.rstrip('.')}.\n  To do: {remedy}.")


_REMEDIES = (
    ("ignore_eos", "--disable-ignore-eos: this server does not know ignore_eos"),
    ("must be a string", "--prompts words: this server takes text alone"),
    ("vocab", "--prompts words: the model has fewer ids than the prompts draw from"),
    ("context length", "smaller --input-len, --output-len"),
    ("max_model_len", "smaller --input-len, --output-len"),
    ("stream_options", "--extra-request-body '{\"stream_options\": null}': pieces are then counted as tokens"),
)
"""What servers state as the reason of a bad request (vLLM 0.32, transformers serve 5.19), and what helps."""


def _find_remedy(error: str) -> str:
    """What helps against a reason; all of it for one that is not known."""
    found = dict.fromkeys(remedy for sign, remedy in _REMEDIES if sign in error)
    return "; ".join(found) or (
        "--disable-ignore-eos for a server that does not know ignore_eos; --prompts words for one that takes no ids; "
        "smaller --input-len, --output-len; another --model"
    )


def _make_service_row(client: StreamClient, request: StreamRequest, asked: ServiceLoad, result: LoadResult) -> Row:
    errors: dict[str, int] = {}
    for each in result.requests:
        if each.error:
            errors[each.error] = errors.get(each.error, 0) + 1
    is_text = request.endpoint != ENDPOINTS[0]
    conditions = BenchConditions(
        backend="openai" + ("-chat" if is_text else ""),
        engine=f"server at {client.address.url}",
        model=request.model,
        run_name=asked.run_name,
        ignore_eos=request.ignore_eos,
        warmup=render_plural(asked.warmups, "request") + (", one after the other" if asked.warmups > 1 else ""),
        prompts="random words" if is_text or asked.words else f"random ids below {LEAST_VOCABULARY}",
        seed=asked.seed,
        others={"endpoint": request.endpoint, "temperature": request.temperature, **request.extra},
    )
    late = [1e3 * each for each in result.lag_s]
    figures: dict[str, Any] = {
        "request_rate": "inf" if math.isinf(asked.rate) else asked.rate,
        "burstiness": asked.burstiness,
        "max_concurrency": asked.most,
        "num_prompts": asked.count,
        "input_len": asked.input_len,
        "output_len": asked.output_len,
        "range_ratio": asked.range_ratio,
        "goodput": dict(asked.goodput),
        **measure_requests(result.requests, result.duration_s, asked.goodput, asked.percents),
        "errors": errors,
        "interrupted": result.was_interrupted,
        "client_cpu_s": result.cpu_s,
        "client_lag_p99_ms": interpolate(late, 99) if late else None,
        "arrivals_stamped_by": "client" if result.own_stamps else "kernel",
    }
    return make_row(SERVE, conditions, figures)


def list_rates(asked: ServiceLoad, rates: Sequence[float]) -> list[ServiceLoad]:
    """The same load at each rate."""
    return [replace(asked, rate=rate) for rate in rates]
