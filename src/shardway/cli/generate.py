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
    BestOption,
    CacheKind,
    CacheOption,
    CommandMistakes,
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
    SamplingOptions,
    SeedOption,
    StepOption,
    StopOption,
    TemplateOption,
    TokenizerOption,
    TopKOption,
    TopPOption,
    look_at_new_file,
    model_opened,
    print_piece,
    render_end,
)
from shardway.cli.options import JsonOption, print_json, print_line
from shardway.errors import UserError
from shardway.units import render_plural

if TYPE_CHECKING:
    from shardway.infer.generate import Generated, Generator, Sampling
    from shardway.infer.inputs import Prompt, PromptText
    from shardway.infer.model import OpenedModel


BATCH = 8
"""Prompts of a file that are continued at once, where no other number is asked for."""


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
    batch: Annotated[
        int | None, typer.Option("--batch", min=1, help=f"How many of --file's prompts at once ({BATCH}).")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="The text is a user's turn: apply the chat template.")] = False,
    system: Annotated[str, typer.Option("--system", help="The system prompt before it; with --chat.")] = "",
    max_tokens: MaxTokensOption = 256,
    temperature: Annotated[float, typer.Option("--temperature", help="0: always the likeliest token.")] = 0.0,
    top_k: TopKOption = 0,
    top_p: TopPOption = None,
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
    mistakes = CommandMistakes()
    draws = SamplingOptions(temperature, top_k, top_p, seed, max_tokens, tuple(stop or ()))
    draws.look(mistakes)
    _look_at_words(mistakes, prompt, file, out, batch, chat, system)

    def read() -> list[PromptText]:
        from shardway.infer.inputs import make_prompt, read_prompts

        look_at_new_file(mistakes, "--out", out)
        if file is not None:
            return mistakes.read(file, lambda: read_prompts(file, chat=chat, system=system)) or []
        text = prompt if prompt is not None else _read_stdin(mistakes)
        return [make_prompt(text, chat=chat, system=system)]

    words = (model, step, best, nproc, dtype.value, device.value, quantize.value, cache.value)
    options = ModelOptions(*words, tokenizer, template, trust_remote_code)
    with model_opened(options, mistakes, read) as (opened, ranks, texts):
        from shardway.infer.generate import Generator, need_tokenizer

        def encode() -> list[Prompt]:
            return [each.encode(need_tokenizer(opened)) for each in texts]

        prompts = ranks.ask_first(encode) if ranks is not None else encode()
        generator, sampling = Generator(opened, ranks, cache.value), draws.make_sampling()
        leads = ranks is None or ranks.is_first
        if file is not None:
            _generate_file(generator, prompts, sampling, batch or BATCH, out, leads=leads, as_json=as_json)
            return
        _generate_one(generator, prompts, sampling, leads=leads, split=ranks is not None, as_json=as_json)


def _look_at_words(
    mistakes: CommandMistakes,
    prompt: str | None,
    file: Path | None,
    out: Path | None,
    batch: int | None,
    chat: bool,
    system: str,
) -> None:
    """Note options that do not go together."""
    if prompt is not None and file is not None:
        mistakes.add("--prompt", "and --file name two things to continue", "one of the two")
    if out is not None and file is None:
        mistakes.add("--out", "is for the lines of --file", remedy="leave it out, or redirect stdout: > FILE")
    if batch is not None and file is None:
        mistakes.add("--batch", "is for the prompts of --file", remedy="leave it out")
    for option, given in (("--prompt", prompt), ("--system", system)):
        mistakes.add_unless_text(option, given or "")
    if system and not chat:
        mistakes.add("--system", "is part of a conversation", remedy="give --chat as well")
    if prompt is None and file is None and sys.stdin.isatty():
        mistakes.add(
            "--prompt",
            "is not given: there is nothing to continue",
            "--prompt TEXT, --file FILE, or a text on stdin: echo TEXT | shardway generate MODEL",
            "`shardway chat` holds a conversation",
        )


def _read_stdin(mistakes: CommandMistakes) -> str:
    """What stdin holds; not waited for where the command is refused anyway."""
    if mistakes:
        return ""
    try:
        text = sys.stdin.read()
    except UnicodeDecodeError as error:
        mistakes.add("stdin", f"is not text in UTF-8: {error.reason} at byte {error.start}")
        return ""
    mistakes.add_unless_text("stdin", text)
    return text


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
    generator.check_fits(prompts, sampling.max_tokens)
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
    left_out = prompts[-1].line - len(prompts)
    blank = f"; left out: {render_plural(left_out, 'empty line')} between them" if left_out else ""
    count = render_plural(len(prompts), "prompt")
    print_line(f"{count}, {tokens} tokens in {seconds:.2f} s ({tokens / max(seconds, 1e-9):.1f}/s){blank}")


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
