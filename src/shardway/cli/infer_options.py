"""What `shardway generate` and `shardway chat` share: options, the model that they name, and the ranks that it is on.

Invariants: all mistakes in the options, and in the files that they name, are reported at once, before torch is
imported. Rank 0 reads and prints, the others only compute. A model is opened once, and stderr states which.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from shardway.cli.main import uncollected
from shardway.cli.options import complete_run, find_place, find_run, print_line
from shardway.errors import Problem, SiteError, UserError, check_no_problems, legible
from shardway.hardware.limits import ensure_temporary
from shardway.ranks.launcher import Placement, find_placement, is_in_terminal

if TYPE_CHECKING:
    from shardway.infer.generate import Generated, Sampling
    from shardway.infer.model import ModelRequest, OpenedModel
    from shardway.ranks.start import Ranks

ORIGIN = "command line"
T = TypeVar("T")


class Dtype(StrEnum):
    """Number formats of weights."""

    auto = "auto"
    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


class DeviceKind(StrEnum):
    """Where a model is opened."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class QuantizeKind(StrEnum):
    """Number formats that weights are quantized to."""

    off = "off"
    fp8 = "fp8"
    int8 = "int8"
    int4 = "int4"


class CacheKind(StrEnum):
    """How keys and values of earlier tokens are kept."""

    auto = "auto"
    dynamic = "dynamic"
    static = "static"


ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A run directory, the folder of a checkpoint, a folder with a config.json, or a hub name.",
        show_default=False,
        autocompletion=complete_run,
    ),
]
StepOption = Annotated[int | None, typer.Option("--step", min=0, help="Of a run: the step (default: the newest).")]
BestOption = Annotated[bool, typer.Option("--best", help="Of a run: the checkpoint with the best validation.")]
NprocOption = Annotated[int | None, typer.Option("--nproc", min=1, help="Split the model over so many local ranks.")]
DtypeOption = Annotated[Dtype, typer.Option("--dtype", help="Number format (auto: bf16 on a GPU, fp32 on CPUs).")]
DeviceOption = Annotated[DeviceKind, typer.Option("--device", help="Where (auto: a GPU where there is one).")]
QuantizeOption = Annotated[QuantizeKind, typer.Option("--quantize", help="Weights in fewer bits, by torchao.")]
CacheOption = Annotated[
    CacheKind, typer.Option("--cache", help="Of keys and values (auto: static with CUDA graphs on a GPU).")
]
TokenizerOption = Annotated[
    str, typer.Option("--tokenizer", help='Instead of the model\'s: a folder, a tokenizer file or "bytes".')
]
TemplateOption = Annotated[
    str, typer.Option("--template", help='Chat template instead of the model\'s: "chatml" or a file.')
]
RemoteCodeOption = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run Python code that the model's folder holds.")
]
TopKOption = Annotated[int, typer.Option("--top-k", help="Draw from so many likeliest tokens (0: all).")]
TopPOption = Annotated[
    float | None, typer.Option("--top-p", help="Draw from those that have this probability together.")
]
SeedOption = Annotated[int, typer.Option("--seed", help="What is drawn follows from it.")]
MaxTokensOption = Annotated[int, typer.Option("--max-tokens", help="The most tokens of an answer.")]
StopOption = Annotated[
    list[str] | None, typer.Option("--stop", metavar="TEXT", help="End at this text; may be given again.")
]


class CommandMistakes:
    """What is wrong with a command line and the files that it names, so that all of it is reported at once."""

    def __init__(self) -> None:
        self._problems: list[Problem] = []
        self._files: list[tuple[str, UserError]] = []

    def __bool__(self) -> bool:
        return bool(self._problems or self._files)

    def add(self, option: str, what: str, allowed: str = "", remedy: str = "") -> None:
        """Note what is wrong with an option."""
        self._problems.append(Problem(option, what, ORIGIN, allowed, remedy))

    def add_unless_text(self, option: str, text: str) -> None:
        """Note a text that holds bytes which are no UTF-8, as Python takes them from a command line or stdin."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            self.add(option, f"is not text in UTF-8: a byte that is none at character {error.start + 1}")

    def look(self, option: str, work: Callable[[], object]) -> None:
        """Note what `work` finds wrong with the value of an option, which it may know by another name."""
        try:
            work()
        except UserError as error:
            first, *rest = str(error).splitlines()
            for each in error.problems or [Problem("", first, remedy=" ".join(rest).partition("o do: ")[2])]:
                self.add(option, each.what, each.allowed, each.remedy)

    def read(self, path: Path, work: Callable[[], T]) -> T | None:
        """What `work` reads of a file; None with what is wrong noted."""
        try:
            return work()
        except UserError as error:
            self._files.append((str(path), error))
            return None

    def check(self) -> None:
        """Raise one UserError with all that was noted; of several ranks the first alone states it."""
        if self and find_placement(os.environ).rank > 0:
            raise typer.Exit(UserError.exit_code)
        if not self._problems and len(self._files) == 1:
            raise self._files[0][1]
        of_files = [
            replace(each, where=f"{path}, {each.where}") if not each.origin else each
            for path, error in self._files
            for each in error.problems
        ]
        check_no_problems("the command line", [*self._problems, *of_files])


def look_at_new_file(mistakes: CommandMistakes, option: str, path: Path | None) -> None:
    """Note why a file that is to be written cannot be a new one."""
    if path is None:
        return
    what = ""
    if os.path.lexists(path):
        what = f"{path} exists, and is not overwritten"
    elif not path.parent.is_dir():
        what = f"the folder {path.parent} does not exist"
    elif not os.access(path.parent, os.W_OK | os.X_OK):
        what = f"the folder {path.parent} cannot be written"
    if what:
        mistakes.add(option, what, "a new file in a folder that you may write")


@dataclass(frozen=True)
class ModelOptions:
    """The options of one command line that concern the model."""

    word: str
    step: int | None
    best: bool
    nproc: int | None
    dtype: str
    device: str
    quantize: str
    cache: str
    tokenizer: str
    template: str
    trust_remote_code: bool

    def look(self, mistakes: CommandMistakes) -> None:
        """Note what is wrong with them, as far as it shows without the model."""
        from shardway.data.chat import open_template
        from shardway.data.tokenizers import ByteTokenizer
        from shardway.infer.tokenizer import check_tokenizer

        if not self.word.strip():
            mistakes.add("MODEL", '"" names no model', "a run directory, a folder with a config.json, or a hub name")
        if self.best and self.step is not None:
            mistakes.add("--best", f"and --step {self.step} name two checkpoints", "one of the two")
        if self.quantize != "off" and (self.nproc or 1) > 1:
            mistakes.add(
                "--quantize", f"{self.quantize} works on one rank, and --nproc is {self.nproc}", "one of the two"
            )
        if self.tokenizer:
            mistakes.look("--tokenizer", lambda: check_tokenizer(self.tokenizer))
        if self.template:
            mistakes.look("--template", lambda: open_template(self.template, ByteTokenizer()))

    def make_request(self) -> ModelRequest:
        """The request for `open_model`; a run may be named as elsewhere."""
        from shardway.infer.model import ModelRequest, is_model
        from shardway.launch.runs.find import is_folder_of_runs, is_run

        path = Path(self.word)
        holds_runs = is_folder_of_runs(path) and not is_model(path) and any(map(is_run, path.iterdir()))
        found = find_run(path).path if holds_runs else find_place(path)
        return ModelRequest(
            word=self.word if found == path else str(found),
            step=self.step,
            best=self.best,
            dtype=self.dtype,
            device=self.device,
            quantize=self.quantize,
            trust_remote_code=self.trust_remote_code,
            tokenizer=self.tokenizer,
            template=self.template,
        )


@contextlib.contextmanager
def model_opened(
    options: ModelOptions, mistakes: CommandMistakes, read: Callable[[], T], *, whole: bool = False
) -> Iterator[tuple[OpenedModel, Ranks | None, T]]:
    """The model, on this process, on ranks that are started here, or on those of a launch; these ranks; and what `read`
    reads before on the first of them, which notes mistakes beside those of the options. They split the model, or each
    has the `whole` of it. Raises what `open_model` raises."""

    def read_checked() -> T:
        options.look(mistakes)
        found = read()
        mistakes.check()
        return found

    placement = find_placement(os.environ)
    by_hand = options.nproc is not None and is_in_terminal(os.environ) and sys.stdin.isatty()
    launched = placement.launcher != "none" and placement.world > 1 and not by_hand
    started_here = placement.launcher == "shardway" and options.nproc == placement.world
    if launched and options.nproc is not None and not started_here:
        raise UserError(
            f"--nproc {options.nproc} starts ranks, but this process is already rank {placement.rank} of "
            f"{placement.world}, started by {placement.launcher}: each of these would start {options.nproc}.\n"
            "  To do: leave out --nproc."
        )
    if launched:
        mistakes.check()
    read_once = read_checked if launched else _keep(read_checked())
    ensure_temporary()
    with contextlib.ExitStack() as stack:
        if not launched and (options.nproc or 1) > 1:
            with uncollected():
                from shardway.ranks.beside import ranks_beside
            _check_devices(options)
            placement = stack.enter_context(ranks_beside(options.nproc or 1, sys.argv[1:]))
            launched = True
        with uncollected():
            from shardway.infer.model import open_model
        ranks = _join(placement, options) if launched else None
        try:
            found = ranks.ask_first(read_once) if ranks is not None else read_once()
            request = options.make_request()
            opened = _open_on_each(request, ranks) if whole and ranks is not None else open_model(request, ranks)
            if placement.rank == 0:
                _report(opened, placement.world if launched else 1, whole=whole)
            yield opened, ranks, found
        except UserError as error:
            if placement.rank != 0:  # rank 0 reports what all of them found
                raise typer.Exit(error.exit_code) from None
            raise
        if ranks is not None:
            ranks.end()


def _keep(value: T) -> Callable[[], T]:
    return lambda: value


def _open_on_each(request: ModelRequest, ranks: Ranks) -> OpenedModel:
    """The whole model on every rank, of a run the checkpoint that the first rank has opened: others may find a newer
    one."""
    from shardway.infer.model import open_model

    first = ranks.together(lambda: open_model(request) if ranks.is_first else None)
    run = first.run if first is not None else None
    folder = ranks.gather(str(run.checkpoint_path(first.step)) if run is not None and first is not None else "")[0]
    if first is not None:
        return first
    return open_model(replace(request, word=folder, step=None, best=False) if folder else request)


def _check_devices(options: ModelOptions) -> None:
    """Raise SiteError where ranks that are to be started here would lack a GPU each."""
    import torch

    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if options.device != "cpu" and (visible or options.device == "cuda") and visible < (options.nproc or 1):
        raise SiteError(
            f"{options.nproc} ranks need a GPU each, and torch {torch.__version__} sees {visible} CUDA devices here.\n"
            f"  To do: {f'--nproc {visible} or less, or ' if visible > 1 else ''}--device cpu."
        )


def _join(placement: Placement, options: ModelOptions) -> Ranks:
    """This process as one of the ranks."""
    import torch

    from shardway.ranks.start import StartOptions, start_ranks
    from shardway.ranks.stop import stop_with_agent

    if placement.launcher == "shardway" and placement.rank > 0:
        stop_with_agent(os.environ)
    device = "cuda" if torch.cuda.is_available() and options.device != "cpu" else "cpu"
    named = os.environ.get("OMP_NUM_THREADS", "")
    threads = int(named) if named.isdecimal() and int(named) else 1
    # A person may think for long between two turns, and the other ranks wait for the next one.
    return start_ranks(placement, StartOptions(device, threads, 300.0, 7 * 86_400.0))


def _report(opened: OpenedModel, world: int, *, whole: bool) -> None:
    dtype = str(opened.dtype).removeprefix("torch.")
    over = f", {'on each of' if whole else 'over'} {world} ranks" if world > 1 else ""
    print_line(legible(f"{opened.origin}: {dtype} on {opened.device}{over}"))
    for note in opened.notes:
        print_line(legible(note))


@dataclass(frozen=True)
class SamplingOptions:
    """The options of one command line that choose tokens. `top_p` is None where it is not given: `usual_top_p`."""

    temperature: float
    top_k: int
    top_p: float | None
    seed: int
    max_tokens: int
    stop: tuple[str, ...]
    usual_top_p: float = 1.0

    def look(self, mistakes: CommandMistakes) -> None:
        """Note every value out of range, and those without an effect."""
        top_p = self.usual_top_p if self.top_p is None else self.top_p
        for name, value, holds, allowed in (
            ("--temperature", self.temperature, 0 <= self.temperature <= 100, "0 (greedy) to 100"),
            ("--top-k", self.top_k, self.top_k >= 0, "0 (all tokens) and more"),
            ("--top-p", top_p, 0 < top_p <= 1, "above 0, to 1 (all tokens)"),
            ("--seed", self.seed, 0 <= self.seed < 2**63, "0 to 2**63 - 1"),
            ("--max-tokens", self.max_tokens, self.max_tokens >= 1, "1 and more"),
        ):
            if not holds:
                mistakes.add(name, f"{value} is out of range", allowed)
        for text in self.stop:
            mistakes.add_unless_text("--stop", text)
        if "" in self.stop:
            mistakes.add("--stop", '"" is no text', "at least one character")
        for name, value, changes in (
            ("--top-k", self.top_k, self.top_k > 0),
            ("--top-p", top_p, self.top_p is not None and 0 < self.top_p < 1),
        ):
            if changes and self.temperature == 0:
                mistakes.add(name, f"{value} has no effect at temperature 0", remedy="add --temperature, such as 0.8")

    def make_sampling(self) -> Sampling:
        """How tokens are chosen."""
        from shardway.infer.generate import Sampling

        top_p = self.usual_top_p if self.top_p is None else self.top_p
        return Sampling(self.temperature, self.top_k, top_p, self.seed, self.max_tokens, self.stop)


class ReplyInterrupt:
    """While entered, Ctrl-C only sets `came`: it ends the answer, and a second one the program."""

    def __init__(self) -> None:
        self.came = False

    def __enter__(self) -> ReplyInterrupt:
        self.came = False
        self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.came:
            raise KeyboardInterrupt
        self.came = True


# --- what is shown


def print_piece(piece: str) -> None:
    """Print a piece of generated text at once; on a terminal, control characters as escapes."""
    if sys.stdout.isatty():
        piece = "".join(
            char if char in "\n\t" or unicodedata.category(char) != "Cc" else ascii(char)[1:-1] for char in piece
        )
    sys.stdout.write(piece)
    sys.stdout.flush()


def render_end(made: Generated, max_tokens: int) -> str:
    """How many tokens of `max_tokens` came, how fast, and why no more."""
    from shardway.units import render_plural

    why = {"end": "the model ended it", "stop": "a stop text came", "length": "no more were allowed"}
    if len(made.tokens) < max_tokens:
        why["length"] = "the model has no more positions"
    rate = len(made.tokens) / made.seconds if made.seconds else 0.0
    count = render_plural(len(made.tokens), "token")
    end = why.get(made.finish, "interrupted")
    return f"{count} after {made.prompt_tokens} in {made.seconds:.2f} s ({rate:.1f}/s): {end}"
