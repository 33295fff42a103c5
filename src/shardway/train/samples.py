"""Samples: how the model in training continues `train.sample_prompts`, always by the likeliest token.

Invariants:
- Weights, gradients, optimizer and generators are as they were: dropout is off, nothing is drawn at random, and no step
  sees that samples were generated. The losses of a run with samples are those of the run without, bit for bit.
- All ranks run the same passes on the same tokens, since a sharded model waits for all of them; how many follows from
  the run file alone, never from what was generated. Rank 0's texts are those that count.
- A continuation depends on its prompt alone: a row of a pass is filled up behind its tokens, which see nothing later.

There is no cache of keys and values, since the models of training have none: each token is one forward pass over all
tokens so far, at most `data.seq_len` of them. That is slow for long texts, and exact in every layout in which a rank
has whole sequences.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from shardway.data.tokenizers import Tokenizer, open_tokenizer
from shardway.errors import Problem, check_no_problems
from shardway.train.passes import Passes
from shardway.train.session import Session

_MULTIPLE = 16
"""Passes have so many tokens or a multiple: float8 kernels take no others."""


@dataclass(frozen=True)
class Prompts:
    """Texts and their tokens; each is continued by `count` tokens, from the last `window` ones."""

    texts: tuple[str, ...]
    tokens: tuple[tuple[int, ...], ...]
    count: int
    window: int
    tokenizer: Tokenizer
    compiles: bool

    @property
    def width(self) -> int:
        """The tokens of a row of a pass: the same in all passes of the run."""
        needed = max(map(len, self.tokens)) + self.count - 1
        return min(self.window, -(-needed // _MULTIPLE) * _MULTIPLE)


def read_prompts(session: Session) -> Prompts:
    """What `train.sample_prompts` has continued. Raises UserError with all prompts that give no token, or more than a
    sample of training has."""
    values, origins = session.resolved.values, session.resolved.origins
    train, window = values.train, values.data.seq_len
    tokenizer = open_tokenizer(values.data.tokenizer)
    texts = tuple(train.sample_prompts)
    tokens = tuple(tuple(map(int, each)) for each in tokenizer.encode(texts))
    problems = []
    for number, found in enumerate(tokens):
        if not 0 < len(found) <= window:
            what = f"prompt {number + 1} has {len(found)} tokens"
            allowed = f"1 to data.seq_len = {window}"
            origin = origins["train.sample_prompts"]
            problems.append(Problem("train.sample_prompts", what, origin, allowed, "shorten it"))
    check_no_problems("the run file", problems)
    return Prompts(texts, tokens, train.sample_tokens, window, tokenizer, train.compiles)


def continue_prompts(passes: Passes, prompts: Prompts, stops: Callable[[], bool] = lambda: False) -> list[str] | None:
    """The continuation of each prompt, up to the token that ends a document; None if it was broken off, which `stops`
    decides before each token, on all ranks together. The model is to be in evaluation mode."""
    rows = [list(tokens) for tokens in prompts.tokens]
    at_once = passes.batch_split.micro_batch  # as many as fit in training
    with torch.no_grad(), _uncompiled(prompts.compiles):
        for _ in range(prompts.count):
            if stops():
                return None
            for start in range(0, len(rows), at_once):
                part = rows[start : start + at_once]
                for row, token in zip(part, _find_likeliest(passes, part, prompts.width), strict=True):
                    row.append(token)
    made = [row[len(tokens) :] for row, tokens in zip(rows, prompts.tokens, strict=True)]
    return [prompts.tokenizer.decode(_cut_at_end(tokens, prompts.tokenizer.end)) for tokens in made]


def _find_likeliest(passes: Passes, rows: Sequence[Sequence[int]], width: int) -> list[int]:
    """The token that follows each row, of which the last `width` tokens are looked at; of equal ones the first."""
    shown = [row[-width:] for row in rows]
    inputs = torch.tensor([[*row, *[0] * (width - len(row))] for row in shown], device=passes.device)
    logits = passes.predict(passes.parallel.call, inputs)
    last = torch.tensor([len(row) - 1 for row in shown], device=logits.device)
    found: list[int] = logits[torch.arange(len(rows), device=logits.device), last].float().argmax(-1).tolist()
    return found


def _cut_at_end(tokens: Sequence[int], end: int | None) -> Sequence[int]:
    return tokens[: tokens.index(end)] if end is not None and end in tokens else tokens


@contextlib.contextmanager
def _uncompiled(compiles: bool) -> Iterator[None]:
    """Meanwhile compiled blocks run as they were written: rows of samples would have them compiled once more."""
    if not compiles:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield
