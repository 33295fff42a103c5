"""What `shardway generate` and `shardway chat` share: options, the model that they name, and the ranks that it is on.

Invariants: every mistake in the options is reported before torch is imported. Rank 0 reads and prints, the others only
compute. A model is opened once, and stderr states which.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

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
TopPOption = Annotated[float, typer.Option("--top-p", help="Draw from those that have this probability together.")]
SeedOption = Annotated[int, typer.Option("--seed", help="What is drawn follows from it.")]
MaxTokensOption = Annotated[int, typer.Option("--max-tokens", help="The most tokens of an answer.")]
StopOption = Annotated[
    list[str] | None, typer.Option("--stop", metavar="TEXT", help="End at this text; may be given again.")
]


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
def model_opened(options: ModelOptions, *, whole: bool = False) -> Iterator[tuple[OpenedModel, Ranks | None]]:
    """The model, on this process, on ranks that are started here, or on those of a launch; and these ranks. They split
    it, or each has the `whole` of it. Raises what `open_model` raises."""
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
            if whole and ranks is not None:
                opened = ranks.first_then_all(lambda: open_model(options.make_request()))
            else:
                opened = open_model(options.make_request(), ranks)
            if placement.rank == 0:
                _report(opened, placement.world if launched else 1, whole=whole)
            yield opened, ranks
        except UserError as error:
            if placement.rank != 0:  # rank 0 reports what all of them found
                raise typer.Exit(error.exit_code) from None
            raise
        if ranks is not None:
            ranks.end()


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


def read_sampling(
    temperature: float, top_k: int, top_p: float, seed: int, max_tokens: int, stop: list[str] | None
) -> Sampling:
    """How tokens are chosen. Raises UserError that names every value out of range."""
    problems = [
        *_list_out_of_range("--temperature", temperature, 0 <= temperature <= 100, "0 (greedy) to 100"),
        *_list_out_of_range("--top-k", top_k, top_k >= 0, "0 (all tokens) and more"),
        *_list_out_of_range("--top-p", top_p, 0 < top_p <= 1, "above 0, to 1 (all tokens)"),
        *_list_out_of_range("--seed", seed, 0 <= seed < 2**63, "0 to 2**63 - 1"),
        *_list_out_of_range("--max-tokens", max_tokens, max_tokens >= 1, "1 and more"),
        *([Problem("--stop", '"" is no text', ORIGIN, "at least one character")] if "" in (stop or ()) else []),
    ]
    check_no_problems("the command line", problems)
    with uncollected():
        from shardway.infer.generate import Sampling

    return Sampling(temperature, top_k, top_p, seed, max_tokens, tuple(stop or ()))


def _list_out_of_range(name: str, value: Any, holds: bool, allowed: str) -> list[Problem]:
    return [] if holds else [Problem(name, f"{value} is out of range", ORIGIN, allowed)]


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
    from shardway.watch.words import render_plural

    why = {"end": "the model ended it", "stop": "a stop text came", "length": "no more were allowed"}
    if len(made.tokens) < max_tokens:
        why["length"] = "the model has no more positions"
    rate = len(made.tokens) / made.seconds if made.seconds else 0.0
    count = render_plural(len(made.tokens), "token")
    end = why.get(made.finish, "interrupted")
    return f"{count} after {made.prompt_tokens} in {made.seconds:.2f} s ({rate:.1f}/s): {end}"
