"""Continues prompts: how tokens are chosen, where they stop, text as it comes, several prompts at once.

Invariants:
- Tokens are those of transformers' `generate` with the same options. Prompts of one batch are padded on the left and
  get the tokens that each would get alone, up to the rounding of other shapes; in fp32 the greedy ones are the same.
- Text comes in whole characters, and nothing of a stop text is shown. Ranks that share a model decide alike when to
  stop.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardway.errors import JobError, Problem, UserError, check_no_problems
from shardway.infer.inputs import Prompt
from shardway.infer.model import OpenedModel
from shardway.infer.tokenizer import ModelTokenizer, Pieces
from shardway.ranks.start import Ranks, is_out_of_memory

# --- what is asked for and what comes


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen: greedily for `temperature` 0, else drawn by `seed` from the `top_k` likeliest (0: all), of
    which only those that together have the probability `top_p` count. At most `max_tokens`, until one of the texts
    `stop`, which is left out."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    max_tokens: int = 256
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class Generated:
    """What a prompt of `prompt_tokens` was continued by. `tokens` are without the one that ended it, `text` is without
    the stop text. `finish`: "end" (the model ended it), "stop" (a stop text), "length" (`max_tokens`, or the last
    position) or "interrupted"."""

    prompt_tokens: int
    tokens: tuple[int, ...]
    text: str
    finish: str
    seconds: float


# --- prompts


def need_tokenizer(opened: OpenedModel) -> ModelTokenizer:
    """The model's tokenizer. Raises UserError if it has none, or one with more tokens than the model."""
    if opened.tokenizer is None:
        raise UserError(
            f"{opened.name} has no tokenizer, so no text can be given to it.\n  To do: name one with --tokenizer: a "
            'folder that has one, a tokenizer.json or .model file, or "bytes".'
        )
    return opened.tokenizer


# --- generating


class Generator:
    """Continues prompts by one model. `cache`: "static" (of fixed size, with CUDA graphs on a GPU), "dynamic", or
    "auto": static on a GPU. Over several `ranks` all of them call it together, with the same prompts."""

    def __init__(self, opened: OpenedModel, ranks: Ranks | None = None, cache: str = "auto") -> None:
        self.opened = opened
        self._ranks = ranks if ranks is not None and ranks.world > 1 else None
        self._static = cache == "static" or (cache == "auto" and opened.device.type == "cuda")

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        on_text: Callable[[str], None] | None = None,
        is_interrupted: Callable[[], bool] | None = None,
    ) -> list[Generated]:
        """Continue these prompts at once. `on_text` gets the text of a single prompt as it comes; `is_interrupted` is
        asked after each token. Raises UserError for a prompt that has no token or too many."""
        if on_text is not None and len(prompts) != 1:
            raise ValueError("text is passed on of one prompt alone")
        room = self.check_fits(prompts, sampling.max_tokens)
        device, width = self.opened.device, max(len(each.ids) for each in prompts)
        ends, pad = self._find_ends()
        ids = torch.full((len(prompts), width), pad, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt.ids) :] = torch.tensor(prompt.ids)
            mask[row, width - len(prompt.ids) :] = 1
        stops = (*sampling.stop, *(self.opened.tokenizer.stops if self.opened.tokenizer is not None else ()))
        follower = _Follower(self, len(prompts), width, ends, stops, on_text, is_interrupted)
        options = self._list_options(sampling, min(room, sampling.max_tokens), ends, pad)
        if stops or on_text is not None or is_interrupted is not None:
            options["stopping_criteria"] = [follower]
        began, devices = time.perf_counter(), [device] if device.type == "cuda" else []
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.random.fork_rng(devices))  # what a caller draws is not disturbed
            stack.enter_context(_errors_explained(self.opened, self._ranks))
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")  # of the library, about options that the model's own config sets
            torch.manual_seed(sampling.seed)
            made = self.opened.model.generate(ids.to(device), attention_mask=mask.to(device), **options)
        rows, seconds = made[:, width:].tolist(), time.perf_counter() - began
        follower.finish()
        return [
            self._describe(prompt, row, follower.rows[number], ends, seconds)
            for number, (prompt, row) in enumerate(zip(prompts, rows, strict=True))
        ]

    def check_fits(self, prompts: Sequence[Prompt], max_tokens: int) -> int:
        """How many tokens there are positions for behind the longest prompt, `max_tokens` if there is no limit. Raises
        UserError for a prompt without tokens or with too many, or with a token that the model does not have."""
        limit, vocab = self.opened.positions, int(self.opened.model.config.get_text_config().vocab_size)
        problems = []
        for number, prompt in enumerate(prompts, 1):
            where = f"line {prompt.line}" if prompt.line else "the prompt" if len(prompts) == 1 else f"prompt {number}"
            if not prompt.ids:
                problems.append(Problem(where, "is empty, and this tokenizer begins no text by a token of its own"))
            elif limit is not None and len(prompt.ids) >= limit:
                what = f"has {len(prompt.ids)} tokens, and {self.opened.name} has {limit} positions"
                problems.append(Problem(where, what, allowed=f"at most {limit - 1}", remedy="shorten it"))
            elif max(prompt.ids) >= vocab:
                what = f"has the token {max(prompt.ids)}, and {self.opened.name} has a vocabulary of {vocab}"
                problems.append(Problem(where, what, remedy="name the tokenizer of this model with --tokenizer"))
        check_no_problems("what is to be continued", problems)
        return max_tokens if limit is None else limit - max(len(each.ids) for each in prompts)

    def _find_ends(self) -> tuple[frozenset[int], int]:
        """The tokens that end a text, and one to pad with."""
        own = self.opened.model.generation_config
        known = own.eos_token_id if isinstance(own.eos_token_id, list) else [own.eos_token_id]
        if odd := [each for each in (*known, own.pad_token_id) if not isinstance(each, int | None)]:
            raise UserError(
                f"generation_config.json or config.json of {self.opened.name} has {odd[0]!r} as a token that ends or "
                "pads a text.\n  To do: write the number of a token there, or fetch the model again."
            )
        ends = frozenset(int(each) for each in known if each is not None)
        ends |= self.opened.tokenizer.ends if self.opened.tokenizer is not None else frozenset()
        pad = own.pad_token_id if own.pad_token_id is not None else min(ends, default=0)
        return ends, int(pad)

    def _list_options(self, sampling: Sampling, count: int, ends: frozenset[int], pad: int) -> dict[str, Any]:
        """The keywords of the library's `generate`."""
        options: dict[str, Any] = {"max_new_tokens": count, "do_sample": sampling.temperature > 0, "pad_token_id": pad}
        if ends:
            options["eos_token_id"] = sorted(ends)
        if sampling.temperature > 0:
            options |= {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
        if self._static:
            options["cache_implementation"] = "static"
            options["disable_compile"] = self._ranks is not None  # its hooks on modules are not captured
        return options

    def _describe(
        self, prompt: Prompt, row: list[int], followed: _TextRow, ends: frozenset[int], seconds: float
    ) -> Generated:
        end = next((at for at, each in enumerate(row) if each in ends), None)
        if followed.stopped_at is not None and (end is None or followed.stopped_at <= end):
            return Generated(len(prompt.ids), tuple(row[: followed.stopped_at]), followed.text, followed.why, seconds)
        tokens = tuple(row if end is None else row[:end])
        text = self.opened.tokenizer.decode(tokens) if self.opened.tokenizer is not None else ""
        return Generated(len(prompt.ids), tokens, text, "length" if end is None else "end", seconds)

    def agree(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        if self._ranks is None:
            return flag
        return bool(self._ranks.sum(torch.tensor([float(flag)])).item() > 0)


@contextlib.contextmanager
def _errors_explained(opened: OpenedModel, ranks: Ranks | None) -> Iterator[None]:
    """Lost memory and lost ranks as errors that state what can be done."""
    try:
        with ranks.contact("while generating") if ranks is not None else contextlib.nullcontext():
            yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise JobError(
            f"memory ran out while {opened.name} generated on {opened.device}.\n  To do: fewer prompts at once "
            "(--batch), shorter ones, --dtype bf16, --quantize int8, or more ranks (--nproc)."
        ) from error


# --- what is seen of each token


@dataclass
class _TextRow:
    """One text as it comes. `stopped_at`: after how many tokens it was stopped, and `why`; None while it was not."""

    pieces: Pieces | None
    seen: int = 0
    shown: int = 0
    text: str = ""
    stopped_at: int | None = None
    why: str = ""
    done: bool = False


class _Follower:
    """A criterion of the library's `generate`, which it asks after each token: follows the texts, passes them on, and
    stops where a stop text has come, or on demand."""

    def __init__(
        self,
        generator: Generator,
        rows: int,
        width: int,
        ends: frozenset[int],
        stops: Sequence[str],
        on_text: Callable[[str], None] | None,
        is_interrupted: Callable[[], bool] | None,
    ) -> None:
        tokenizer = generator.opened.tokenizer
        self._generator, self._width, self._ends, self._stops = generator, width, ends, tuple(stops)
        self._on_text, self._is_interrupted = on_text, is_interrupted
        self.rows = [_TextRow(Pieces(tokenizer) if tokenizer is not None else None) for _ in range(rows)]

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        interrupted = self._is_interrupted is not None and self._generator.agree(self._is_interrupted())
        for row, ids in zip(self.rows, input_ids[:, self._width :].tolist(), strict=True):
            for token in ids[row.seen :]:
                row.seen += 1
                row.done |= token in self._ends
                if not row.done and row.pieces is not None:
                    row.pieces.add([token])
                    self._look(row)
            if interrupted and not row.done:
                self._stop(row, "interrupted", row.pieces.text if row.pieces is not None else "")
        return torch.tensor([row.stopped_at is not None for row in self.rows], device=input_ids.device)

    def _look(self, row: _TextRow) -> None:
        """Look for a stop text, and pass on what cannot be the beginning of one."""
        whole = row.pieces.text if row.pieces is not None else ""
        found = [at for at in (whole.find(stop, max(0, row.shown - len(stop))) for stop in self._stops) if at >= 0]
        if found:
            self._stop(row, "stop", whole[: min(found)])
            return
        kept = max((_overlap(whole, stop) for stop in self._stops), default=0)
        self._show(row, whole[: len(whole) - kept])

    def _stop(self, row: _TextRow, why: str, text: str) -> None:
        row.done, row.why, row.stopped_at, row.text = True, why, row.seen, text
        self._show(row, text)

    def _show(self, row: _TextRow, text: str) -> None:
        if self._on_text is not None and len(text) > row.shown:
            self._on_text(text[row.shown :])
        row.shown = max(row.shown, len(text))

    def finish(self) -> None:
        """Pass on what was kept back of texts that were not stopped."""
        for row in self.rows:
            if row.stopped_at is None and row.pieces is not None:
                row.pieces.finish()
                self._show(row, row.pieces.text)


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of a text are the beginning of a stop text."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
