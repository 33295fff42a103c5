"""Perplexity of a model on tokens: every token but the first of a document, or of the data, is predicted once.

Invariants:
- Samples are those of training (`shardway.data`): windows that share one token, bins of whole documents that do not see
  each other (data.pack), or groups of documents (data.group_tokens). No target counts twice. So the loss on the samples
  that a run was validated on is the loss of its own validation.
- What a rank computes of a sample does not depend on the number of ranks: samples stand in the same passes whichever
  rank runs them, and sums are added in the order of the samples. Any number of ranks gives the same result.
- Losses are taken from logits in fp32, in nats; sums are in float64.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from shardway.data.formats.token_store import check_tokens
from shardway.data.open import find_kind, find_missing, open_data, open_described
from shardway.data.sources.base import Arrays, DataSource, StreamSource
from shardway.data.sources.packed import NOT_COUNTED
from shardway.data.sources.tokens import TokenWindows
from shardway.errors import JobError, UserError
from shardway.infer.model import OpenedModel
from shardway.models.documents import mark_documents
from shardway.ranks.start import Ranks
from shardway.runfile.schema import DataSection, RunFile

# --- batches by memory

MOST_TOKENS = {"cpu": 4096, "cuda": 65536}
"""Tokens of one pass at most: more of them make it no faster."""
MEMORY_SHARE = 0.4
"""The part of the free memory that a pass may take, by what is estimated for it."""


def estimate_pass_bytes(opened: OpenedModel, length: int) -> int:
    """Bytes that one row of `length` tokens takes in a pass without gradients: its logits, in the format of the model
    and twice in fp32, and some streams of a block."""
    config, size = opened.model.config.get_text_config(), opened.dtype.itemsize
    return length * (config.vocab_size * (size + 8) + 24 * config.hidden_size * size)


def choose_rows(opened: OpenedModel, length: int, ranks: Ranks | None = None) -> int:
    """How many rows of `length` tokens a pass takes, the same on all ranks: what fits in the memory that is free."""
    if opened.device.type == "cuda":
        free = torch.cuda.mem_get_info(opened.device)[0]
    else:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    free = min(ranks.gather(free)) if ranks is not None else free
    fit = int(MEMORY_SHARE * free / estimate_pass_bytes(opened, length))
    return max(1, min(fit, MOST_TOKENS.get(opened.device.type, MOST_TOKENS["cpu"]) // length))


# --- what is evaluated on


@dataclass(frozen=True)
class TokenBlock:
    """Rows of one pass: int64 inputs, targets (-100: does not count) and positions [rows, length]; positions are None
    unless a row holds several documents, each of which begins at position 0."""

    inputs: npt.NDArray[np.int64]
    targets: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64] | None = None


@dataclass(frozen=True)
class TokenData:
    """Samples of tokens: the first `samples` of a source. `tail`: whether the tokens behind the last whole window are
    predicted as well. `name` is for people."""

    source: DataSource
    samples: int
    name: str
    tail: bool = False

    @property
    def bytes_per_token(self) -> float | None:
        return self.source.facts.bytes_per_token

    @cached_property
    def _form(self) -> Arrays:
        """Arrays as of samples, without any."""
        return self.source.batch(np.empty(0, np.int64))

    @property
    def is_packed(self) -> bool:
        """Whether a row holds several documents."""
        return "positions" in self._form

    @property
    def length(self) -> int:
        """The most tokens of a row."""
        return int(self.source.facts.sample_shape[0])

    def read_blocks(self, rows: int) -> Iterator[Callable[[], TokenBlock]]:
        """What reads each block, in order: so many rows, or one group of documents."""
        at_once = 1 if self._form["inputs"].dtype == object else rows
        for start in range(0, self.samples, at_once):
            yield partial(self._read, np.arange(start, min(start + at_once, self.samples)))
        if self.tail and isinstance(self.source, TokenWindows) and self._count_rest():
            yield self._read_tail

    def _read(self, ids: npt.NDArray[np.int64]) -> TokenBlock:
        arrays = self.source.batch(ids)
        if arrays["inputs"].dtype == object:  # groups of documents, each of a shape of its own
            return TokenBlock(arrays["inputs"][0], arrays["targets"][0])
        return TokenBlock(arrays["inputs"], arrays["targets"], arrays.get("positions"))

    def _count_rest(self) -> int:
        source = self.source
        return (len(source.store) - 1) % source.seq_len if isinstance(source, TokenWindows) else 0

    def _read_tail(self) -> TokenBlock:
        """The tokens behind the last whole window, as one shorter row."""
        source, rest = cast(TokenWindows, self.source), self._count_rest()
        start = np.array([len(source) * source.seq_len])
        row = source.store.rows(start, rest + 1)
        check_tokens(row, source.facts.vocab, source.place)
        targets = row[:, 1:].astype(np.int64)
        counted = source.store.count_rows(start + 1, rest) if source.store.counted else None
        if counted is not None:
            targets[~counted] = NOT_COUNTED
        return TokenBlock(row[:, :-1].astype(np.int64), targets)


def open_validation(values: RunFile, name: str) -> TokenData:
    """What a run validates on: the samples that it holds out, at most train.validation_samples of them. Raises
    UserError where it holds nothing out, or its data are not there."""
    if missing := find_missing(values.data):
        relative = not Path(missing).is_absolute()
        raise UserError(
            f'{name} was trained on "{missing}", which is not there'
            f"{f' from this folder ({Path.cwd()})' if relative else ''}.\n"
            f"  To do: {'run the command where it was trained, or ' if relative else ''}name data with --data PATH."
        )
    found = open_described(values).validation
    if found is None:
        raise UserError(
            f"{name} holds nothing out to validate on (data.validation_fraction = 0), so nothing says what to evaluate "
            "on.\n  To do: name data, such as --data held-out.txt."
        )
    source = _check_numbered(found, name)
    return TokenData(source, min(len(source), values.train.validation_samples), f"validation data of {name}")


def open_whole(section: DataSection, vocab: int) -> TokenData:
    """All samples of a [data] section, for a model with so many tokens. Raises UserError for data that are not there,
    are empty, or have tokens that the model does not know."""
    whole = section.model_copy(update={"validation": "", "validation_fraction": 0.0, "shuffle": False})
    if not find_kind(whole).exists(whole):
        raise UserError(f'data.path "{section.path}" does not exist.\n  To do: name a file or folder with --data.')
    source = _check_numbered(open_data(whole, 0, "tokens", vocab=vocab).train, section.path)
    return TokenData(source, len(source), section.path, tail=True)


def _check_numbered(source: DataSource | StreamSource, name: str) -> DataSource:
    if isinstance(source, StreamSource):
        raise UserError(
            f"{name} gives its samples in sequence alone, and evaluate takes them by number.\n"
            "  To do: name data with numbered samples, such as text, JSON lines or token shards."
        )
    if source.batch(np.empty(0, np.int64)).get("inputs", np.empty(0)).dtype.kind not in "iuO":
        raise UserError(f"{name} holds no tokens.\n  To do: name text, JSON lines or prepared tokens with --data.")
    return source


# --- the passes


def check_length(opened: OpenedModel, length: int, key: str) -> None:
    """Raise UserError if rows are longer than the positions that the model knows."""
    if opened.positions is not None and length > opened.positions:
        raise UserError(
            f"{key} = {length} is more than the {opened.positions} positions that {opened.name} knows.\n"
            f"      allowed: at most {opened.positions}"
        )


def compute_logits(opened: OpenedModel, inputs: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
    """Logits [rows, length, vocabulary] in the model's format for int64 tokens [rows, length]; with `positions`, no
    token sees those of another document."""
    named: dict[str, torch.Tensor] = {}
    if positions is not None:
        mask = mark_documents(positions.cpu(), torch.float32, 1).to(opened.device)  # where a query sees a key
        least = torch.finfo(opened.dtype).min
        added = torch.zeros(mask.shape, dtype=opened.dtype, device=opened.device).masked_fill(~mask, least)
        named = {"position_ids": positions, "attention_mask": added}
    with torch.no_grad():
        logits: torch.Tensor = opened.model(input_ids=inputs, use_cache=False, **named).logits
    return logits


def _sum_losses(opened: OpenedModel, block: TokenBlock) -> list[tuple[float, int]]:
    """For each row the sum of its losses in nats, and how many targets it counts. Where the device has not enough
    memory the rows are halved; raises JobError for one row that does not fit."""
    try:
        inputs, targets = (torch.from_numpy(each).to(opened.device) for each in (block.inputs, block.targets))
        positions = None if block.positions is None else torch.from_numpy(block.positions).to(opened.device)
        logits = compute_logits(opened, inputs, positions)
        losses = F.cross_entropy(
            logits.flatten(0, 1).float(), targets.flatten(), ignore_index=NOT_COUNTED, reduction="none"
        )
        totals = losses.view_as(targets).double().sum(1).tolist()
        return list(zip(totals, (targets != NOT_COUNTED).sum(1).tolist(), strict=True))
    except torch.OutOfMemoryError as error:
        rows = len(block.inputs)
        if rows == 1:
            raise JobError(
                f"one sample of {block.inputs.shape[1]} tokens does not fit in the memory of {opened.device}.\n"
                "  To do: set a smaller data.seq_len, or --dtype bf16."
            ) from error
    torch.cuda.empty_cache()
    halves = (slice(0, rows // 2), slice(rows // 2, rows))
    return [each for half in halves for each in _sum_losses(opened, _cut(block, half))]


def _cut(block: TokenBlock, part: slice) -> TokenBlock:
    return TokenBlock(
        block.inputs[part], block.targets[part], None if block.positions is None else block.positions[part]
    )


# --- the result


@dataclass(frozen=True)
class Perplexity:
    """Mean loss in nats over `tokens` targets, of so many samples of so many tokens at most; `rows` stood in a pass."""

    loss: float
    tokens: int
    samples: int
    length: int
    rows: int
    seconds: float
    bytes_per_token: float | None = None

    @property
    def perplexity(self) -> float:
        """exp(loss); infinite where that is more than a number holds."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def bits_per_byte(self) -> float | None:
        """Nats a token / ln 2 are bits a token, spread over the bytes that a token stands for (Shannon)."""
        return self.loss / math.log(2) / self.bytes_per_token if self.bytes_per_token else None

    @property
    def results(self) -> dict[str, float]:
        """The numbers by name."""
        bits = {} if self.bits_per_byte is None else {"bits_per_byte": self.bits_per_byte}
        return {"loss": self.loss, "perplexity": self.perplexity, **bits}


def measure_perplexity(
    opened: OpenedModel, data: TokenData, ranks: Ranks | None = None, rows: int | None = None
) -> Perplexity:
    """The perplexity of a model on samples, the same on every rank; called on all of them together, each of which has
    the whole model. `rows`: how many samples stand in a pass (None: by memory). Raises UserError, JobError."""
    check_length(opened, data.length, "data.seq_len")
    _check_documents_fit(opened, data)
    started, at_once = time.monotonic(), rows or choose_rows(opened, data.length, ranks)
    rank, world = (ranks.rank, ranks.world) if ranks is not None else (0, 1)
    own: dict[int, list[tuple[float, int]]] = {}

    def run() -> None:
        for number, read in enumerate(data.read_blocks(at_once)):
            if number % world == rank:
                own[number] = _sum_losses(opened, read())

    if ranks is None:
        run()
        every = [own]
    else:
        ranks.together(run)
        every = ranks.gather(own)
    sums = [pair for _, pairs in sorted(item for each in every for item in each.items()) for pair in pairs]
    tokens = sum(count for _, count in sums)
    if not tokens:
        raise UserError(f"{data.name} has no token that counts as a target.\n  To do: name other data.")
    loss = math.fsum(total for total, _ in sums) / tokens
    seconds = time.monotonic() - started
    return Perplexity(loss, tokens, data.samples, data.length, at_once, seconds, data.bytes_per_token)


def _check_documents_fit(opened: OpenedModel, data: TokenData) -> None:
    """Raise UserError for documents in one row (data.pack) where some layers look back over a window alone, which the
    mask of documents would take the place of."""
    window = getattr(opened.model.config.get_text_config(), "sliding_window", None)
    if data.is_packed and isinstance(window, int) and window < data.length:
        raise UserError(
            f"data.pack = true cannot go with {opened.name}, whose layers look back over {window} tokens, fewer than "
            f"data.seq_len = {data.length}.\n  To do: set data.pack = false, or data.seq_len = {window}."
        )
