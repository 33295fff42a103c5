"""`shardway generate`: continues a text, or each line of a file, by a run, a folder or a model of the hub.

Invariants: stdout holds what was generated, or the facts, and nothing else. A file that exists is not overwritten; a
line is written when it is done, so that what was generated before an error is there.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer

from shardway.cli.infer_options import (
    ORIGIN,
    BestOption,
    CacheKind,
    CacheOption,
    DeviceKind,
    DeviceOption,
    Dtype,
    DtypeOption,
    MaxTokensOption,
    ModelArgument,
    ModelOptions,
    NprocOption,
    QuantizeKind,
    QuantizeOption,
    RemoteCodeOption,
    ReplyInterrupt,
    SeedOption,
    StepOption,
    StopOption,
    TemplateOption,
    TokenizerOption,
    TopKOption,
    TopPOption,
    model_opened,
    print_piece,
    read_sampling,
    render_end,
)
from shardway.cli.options import JsonOption, print_json, print_line
from shardway.errors import Problem, UserError, check_no_problems

if TYPE_CHECKING:
    from shardway.infer.generate import Generated, Generator, Prompt, Sampling
    from shardway.infer.model import OpenedModel


def generate(
    model: ModelArgument,
    prompt: Annotated[
        str | None, typer.Option("--prompt", help="The text to continue (default: what stdin holds).")
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option("--file", help='Lines of text, or .jsonl with "prompt" or "messages"; gives lines of JSON.'),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Where --file's lines go; a new file (else stdout).")
    ] = None,
    batch: Annotated[int, typer.Option("--batch", min=1, help="How many of --file's prompts at once.")] = 8,
    chat: Annotated[bool, typer.Option("--chat", help="The text is a user's turn: apply the chat template.")] = False,
    system: Annotated[str, typer.Option("--system", help="The system prompt before it; with --chat.")] = "",
    max_tokens: MaxTokensOption = 256,
    temperature: Annotated[float, typer.Option("--temperature", help="0: always the likeliest token.")] = 0.0,
    top_k: TopKOption = 0,
    top_p: TopPOption = 1.0,
    seed: SeedOption = 0,
    stop: StopOption = None,
    step: StepOption = None,
    best: BestOption = False,
    nproc: NprocOption = None,
    dtype: DtypeOption = Dtype.auto,
    device: DeviceOption = DeviceKind.auto,
    quantize: QuantizeOption = QuantizeKind.off,
    cache: CacheOption = CacheKind.auto,
    tokenizer: TokenizerOption = "",
    template: TemplateOption = "",
    trust_remote_code: RemoteCodeOption = False,
    as_json: JsonOption = False,
) -> None:
    """Continue a text as it comes, or the prompts of a file; greedily unless --temperature is above 0."""
    _check_words(prompt, file, out, chat, system)
    sampling = read_sampling(temperature, top_k, top_p, seed, max_tokens, stop)
    _check_draws(sampling)
    words = (model, step, best, nproc, dtype.value, device.value, quantize.value, cache.value)
    with model_opened(ModelOptions(*words, tokenizer, template, trust_remote_code)) as (opened, ranks):
        from shardway.infer.generate import Generator, make_prompt, read_prompts

        def read() -> list[Prompt]:
            if file is not None:
                return read_prompts(opened, file, chat=chat, system=system)
            text = prompt if prompt is not None else sys.stdin.read()
            return [make_prompt(opened, text, chat=chat, system=system)]

        prompts = ranks.ask_first(read) if ranks is not None else read()
        generator = Generator(opened, ranks, cache.value)
        leads = ranks is None or ranks.is_first
        if file is not None:
            _generate_file(generator, prompts, sampling, batch, out, leads=leads, as_json=as_json)
            return
        _generate_one(generator, prompts, sampling, leads=leads, split=ranks is not None, as_json=as_json)


def _check_words(prompt: str | None, file: Path | None, out: Path | None, chat: bool, system: str) -> None:
    """Raise UserError where options do not go together."""
    if prompt is not None and file is not None:
        raise UserError("--prompt and --file name two things to continue.\n  To do: leave one of them out.")
    if out is not None and file is None:
        raise UserError("--out is for the lines of --file.\n  To do: leave it out, or redirect stdout: > FILE")
    if system and not chat:
        raise UserError("--system is part of a conversation.\n  To do: give --chat as well.")
    if out is not None and out.exists():
        raise UserError(f"--out: {out} exists, and is not overwritten.\n  To do: name a new file, or move it away.")
    if prompt is None and file is None and sys.stdin.isatty():
        raise UserError(
            "there is nothing to continue.\n  To do: --prompt TEXT, --file FILE, or a text on stdin: echo TEXT | ...; "
            "`shardway chat` holds a conversation."
        )


def _check_draws(sampling: Sampling) -> None:
    """Raise UserError where options of drawing are given and nothing is drawn."""
    given = (("--top-k", sampling.top_k, sampling.top_k > 0), ("--top-p", sampling.top_p, sampling.top_p < 1))
    check_no_problems(
        "the command line",
        [
            Problem(name, f"{value} has no effect at temperature 0", ORIGIN, remedy="add --temperature, such as 0.8")
            for name, value, changes in given
            if changes and sampling.temperature == 0
        ],
    )


def _generate_one(
    generator: Generator, prompts: Sequence[Prompt], sampling: Sampling, *, leads: bool, split: bool, as_json: bool
) -> None:
    """Continue one prompt; its text is shown as it comes, but in the output of a launcher, which marks each piece."""
    generator.check_fits(prompts, sampling.max_tokens)
    streams = leads and not as_json and (not split or sys.stdout.isatty())
    begin = str(prompts[0].given.get("prompt", ""))
    if streams:
        print_piece(begin)
    with ReplyInterrupt() as interrupt:
        shown = print_piece if streams else _ignore
        (made,) = generator.generate(prompts, sampling, shown, lambda: interrupt.came)
    if not leads:
        return
    if as_json:
        print_json({**_describe_model(generator.opened), **_make_line(prompts[0], made), "seconds": made.seconds})
        return
    rest = "" if streams else begin + made.text
    print_piece(rest if made.text.endswith("\n") else f"{rest}\n")
    print_line(render_end(made, sampling.max_tokens))


def _ignore(piece: str) -> None:
    """Text that another rank shows."""


def _generate_file(
    generator: Generator,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    batch: int,
    out: Path | None,
    *,
    leads: bool,
    as_json: bool,
) -> None:
    """Continue the prompts of a file, several at once; a line of JSON for each, in their order."""
    for prompt in prompts:
        generator.check_fits([prompt], sampling.max_tokens)
    target: IO[str] | None = None
    if leads and out is not None:
        try:
            target = open(out, "x", encoding="utf-8")  # noqa: SIM115 - closed below
        except OSError as error:
            raise UserError(f"--out: {out} cannot be written: {error.strerror}.\n  To do: name another file.") from None
    write: Callable[[str], Any] = _ignore if not leads else target.write if target is not None else sys.stdout.write
    seconds, tokens = 0.0, 0
    try:
        for first in range(0, len(prompts), batch):
            some = prompts[first : first + batch]
            for prompt, made in zip(some, (found := generator.generate(some, sampling)), strict=True):
                write(json.dumps({**prompt.given, **_make_line(prompt, made)}, ensure_ascii=False) + "\n")
                tokens += len(made.tokens)
            seconds += found[0].seconds
            (target or sys.stdout).flush()
    finally:
        if target is not None:
            target.close()
    if not leads:
        return
    if as_json and out is not None:
        facts = {"prompts": len(prompts), "tokens": tokens, "seconds": seconds, "out": str(out)}
        print_json({**_describe_model(generator.opened), **facts})
        return
    print_line(f"{len(prompts)} prompts, {tokens} tokens in {seconds:.2f} s ({tokens / max(seconds, 1e-9):.1f}/s)")


def _make_line(prompt: Prompt, made: Generated) -> dict[str, Any]:
    """What is known of one answer."""
    facts = {name: value for name, value in asdict(made).items() if name != "seconds"}
    return {**dict(prompt.given), **facts, "tokens": list(made.tokens)}


def _describe_model(opened: OpenedModel) -> dict[str, Any]:
    return {
        "model": opened.name,
        "origin": opened.origin,
        "device": str(opened.device),
        "dtype": str(opened.dtype).removeprefix("torch."),
    }
