"""`shardway chat`: a conversation with a run, a folder or a model of the hub.

Invariants: stdout holds the answers alone, so that it can be piped. Ctrl-C ends an answer, not the chat; the end of the
input ends the chat. A turn that is refused is reported and changes nothing.
"""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
    model_opened,
    print_piece,
    render_end,
)
from shardway.cli.options import print_line, report
from shardway.errors import UserError, legible

if TYPE_CHECKING:
    from shardway.infer.chat import Conversation
    from shardway.infer.generate import Generator, Sampling
    from shardway.infer.inputs import Prompt
    from shardway.ranks.start import Ranks


def chat(
    model: ModelArgument,
    system: Annotated[str, typer.Option("--system", help="The system prompt.")] = "",
    history: Annotated[
        Path | None, typer.Option("--history", help="Go on with a conversation that /save has written.")
    ] = None,
    max_tokens: MaxTokensOption = 512,
    temperature: Annotated[float, typer.Option("--temperature", help="0: always the likeliest token.")] = 0.7,
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
) -> None:
    """Hold a conversation; a turn is a line, and /help lists the commands."""
    mistakes = CommandMistakes()
    draws = SamplingOptions(temperature, top_k, top_p, seed, max_tokens, tuple(stop or ()), usual_top_p=0.95)
    draws.look(mistakes)
    mistakes.add_unless_text("--system", system)

    def read() -> Conversation:
        from shardway.infer.chat import Conversation, read_conversation

        found = mistakes.read(history, lambda: read_conversation(history)) if history is not None else None
        conversation = found or Conversation()
        conversation.system = system or conversation.system
        return conversation

    words = (model, step, best, nproc, dtype.value, device.value, quantize.value, cache.value)
    options = ModelOptions(*words, tokenizer, template, trust_remote_code)
    with model_opened(options, mistakes, read) as (opened, ranks, conversation):
        from shardway.infer.generate import Generator, need_tokenizer

        generator, sampling = Generator(opened, ranks, cache.value), draws.make_sampling()
        if ranks is not None and not ranks.is_first:
            _follow(generator, ranks, sampling)
            return
        dialogue = _Dialogue(generator, ranks, sampling)
        try:
            need_tokenizer(opened).render_chat(conversation.list_messages("?"))  # so that it is refused now
            dialogue.hold(conversation)
        finally:
            dialogue.end()


def _follow(generator: Generator, ranks: Ranks, sampling: Sampling) -> None:
    """On the ranks that are not the first: compute what that one asks for, until it asks for nothing."""
    while (prompt := ranks.gather(None)[0]) is not None:
        generator.generate([prompt], sampling, lambda piece: None, lambda: False)


class _Dialogue:
    """The first rank's side of a conversation."""

    def __init__(self, generator: Generator, ranks: Ranks | None, sampling: Sampling) -> None:
        self._generator, self._ranks, self._sampling = generator, ranks, sampling
        self._is_person = sys.stdin.isatty()
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors="surrogateescape")  # a line that is no text is refused alone

    def end(self) -> None:
        """Let the other ranks end."""
        if self._ranks is not None:
            self._ranks.gather(None)

    def hold(self, conversation: Conversation) -> None:
        """Read turns and answer them, until the input ends."""
        if self._is_person:
            print_line("A line is a turn; /help lists the commands, Ctrl-D ends.")
        left = False
        while True:
            try:
                line = self._read()
            except KeyboardInterrupt:
                if left:
                    return
                left = True
                print_line("\nCtrl-C again, or Ctrl-D, ends the chat.")
                continue
            left = False
            if line is None or line.strip() in ("/quit", "/exit"):
                return
            if not line.strip():
                continue
            try:
                _check_text(line)
                if line.startswith("/"):
                    _obey(conversation, line.strip())
                else:
                    self._answer(conversation, line)
            except UserError as error:
                report(legible(str(error)))

    def _read(self) -> str | None:
        """The next line; None at the end of the input."""
        if self._is_person:
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        return line.rstrip("\n") if line else None

    def _answer(self, conversation: Conversation, text: str) -> None:
        opened = self._generator.opened
        if opened.tokenizer is None:
            return
        prompt, dropped = conversation.make_prompt(opened.tokenizer, text, opened.positions)
        if dropped:
            exchanges = "the oldest exchange" if dropped == 1 else f"the {dropped} oldest exchanges"
            print_line(f"({exchanges} did not fit into {opened.positions} positions and was left out)")
        self._send(prompt)
        with ReplyInterrupt() as interrupt:
            (made,) = self._generator.generate([prompt], self._sampling, print_piece, lambda: interrupt.came)
        if not made.text.endswith("\n"):
            print_piece("\n")
        if self._is_person:
            print_line(f"({render_end(made, self._sampling.max_tokens)})")
        conversation.answer(text, made.text)

    def _send(self, prompt: Prompt) -> None:
        """Give the other ranks the prompt."""
        if self._ranks is not None:
            self._ranks.gather(prompt)


def _check_text(line: str) -> None:
    """Raise UserError for a line with bytes that are no text, which Python reads as lone surrogates."""
    try:
        line.encode()
    except UnicodeEncodeError:
        raise UserError("this line holds bytes that are no text in UTF-8, and was left out.") from None


def _obey(conversation: Conversation, line: str) -> None:
    """Follow a command. Raises UserError for one that there is not, and for a file that cannot be written."""
    from shardway.infer.chat import COMMANDS

    name, _, rest = line.partition(" ")
    if name == "/help":
        for command, what in COMMANDS.items():
            print_line(f"{command:<14} {what}")
    elif name == "/reset":
        conversation.reset()
        print_line("The conversation begins anew.")
    elif name == "/system":
        conversation.system = rest.strip()
        conversation.reset()
        print_line("The conversation begins anew, " + ("with this system prompt." if rest.strip() else "without one."))
    elif name == "/undo":
        print_line("The last exchange is taken back." if conversation.undo() else "There is no exchange yet.")
    elif name == "/save":
        if not rest.strip():
            raise UserError("/save needs the name of a new file: /save FILE")
        conversation.save(Path(rest.strip()))
        print_line(f"wrote {legible(rest.strip())}")
    else:
        raise UserError(f"{legible(name)} is no command.\n      allowed: {', '.join(COMMANDS)}")
