"""Multiple choice by log-likelihood: which of several answers a model finds likeliest after a question.

Invariants:
- Numbers are those of lm-evaluation-harness (0.4.13) for a task of output type multiple_choice with its defaults: the
  answer follows the question after one space, tokens are those of the joint text, the first of equal scores counts.
- `acc` goes by the log-likelihood of an answer, `acc_norm` by that divided by its characters, and `acc_bytes` by that
  divided by its bytes in UTF-8. Standard errors are those of a mean over questions: the sample's standard deviation
  (n - 1) divided by sqrt(n).
- Nothing is cut off silently: a question that the model has no positions for is an error, where the harness leaves out
  its beginning. All mistakes of a file are reported at once, each with its line.
- The scores do not depend on the number of ranks: answers stand in the same passes whichever rank runs them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardway.errors import Problem, UserError, check_no_problems
from shardway.infer.evaluate import choose_rows, compute_logits
from shardway.infer.inputs import Question
from shardway.infer.model import OpenedModel
from shardway.infer.tokenizer import ModelTokenizer
from shardway.ranks.start import Ranks

DELIMITER = " "
"""Between a question and an answer: the harness's `target_delimiter`."""

# --- tokens of a question with one answer


@dataclass(frozen=True)
class _Scored:
    """Tokens of a question and one answer of it; the last `count` are of the answer."""

    tokens: tuple[int, ...]
    count: int


def encode_answer(tokenizer: ModelTokenizer, text: str, choice: str) -> tuple[tuple[int, ...], int]:
    """The tokens of a question and an answer, and how many of them, at the end, are the answer's.

    Spaces at the end of the question belong to the answer, since they make one token with its first word.
    """
    context = text[: len(text.rstrip())]
    whole, before = tokenizer.encode(text + DELIMITER + choice), tokenizer.encode(context)
    return tuple(whole), len(whole) - len(before)


def _encode_all(opened: OpenedModel, tokenizer: ModelTokenizer, questions: Sequence[Question]) -> list[_Scored]:
    """All answers of all questions, in order. Raises UserError with the lines that the model cannot take."""
    made, problems = list[_Scored](), list[Problem]()
    vocab = opened.model.config.get_text_config().vocab_size
    for question in questions:
        each = [_Scored(*encode_answer(tokenizer, question.text, choice)) for choice in question.choices]
        longest = max(len(answer.tokens) for answer in each)
        largest = max(max(answer.tokens) for answer in each)
        where = f"line {question.line}"
        if opened.positions is not None and longest - 1 > opened.positions:
            what = f"has {longest} tokens with its longest choice"
            problems.append(Problem(where, what, allowed=f"the {opened.positions} positions of the model and one more"))
        elif largest >= vocab:
            what = f"has the token {largest}"
            problems.append(Problem(where, what, allowed=f"0 to {vocab - 1}, the vocabulary of {opened.name}"))
        elif min(answer.count for answer in each) < 1:
            problems.append(Problem(where, "has a choice that adds no token to its question"))
        made += each
    check_no_problems("the questions", problems)
    return made


# --- scores


@dataclass(frozen=True)
class ChoiceScores:
    """Of each question the log-likelihoods (nats) of its answers, and the accuracies over all with standard errors."""

    likelihoods: tuple[tuple[float, ...], ...]
    results: dict[str, float]
    errors: dict[str, float]
    rows: int
    seconds: float


def score_choices(
    opened: OpenedModel, questions: Sequence[Question], ranks: Ranks | None = None, rows: int | None = None
) -> ChoiceScores:
    """The accuracies of a model on questions, the same on every rank; called on all of them together, each of which has
    the whole model. `rows`: answers of a pass (None: by memory). Raises UserError."""
    if opened.tokenizer is None:
        raise UserError(
            f"{opened.name} has no tokenizer, and questions are text.\n"
            '  To do: name one: --tokenizer FOLDER, a tokenizer.json, or "bytes".'
        )
    started = time.monotonic()
    scored = _encode_all(opened, opened.tokenizer, questions)
    order = sorted(range(len(scored)), key=lambda at: -len(scored[at].tokens))  # alike in length, so little padding
    at_once = rows or choose_rows(opened, len(scored[order[0]].tokens), ranks)
    rank, world = (ranks.rank, ranks.world) if ranks is not None else (0, 1)
    own: dict[int, float] = {}

    def run() -> None:
        for number, start in enumerate(range(0, len(order), at_once)):
            if number % world == rank:
                part = order[start : start + at_once]
                own.update(zip(part, _sum_log_likelihoods(opened, [scored[at] for at in part]), strict=True))

    if ranks is None:
        run()
        every = [own]
    else:
        ranks.together(run)
        every = ranks.gather(own)
    found = iter(value for _, value in sorted(item for each in every for item in each.items()))
    likelihoods = tuple(tuple(next(found) for _ in question.choices) for question in questions)
    results, errors = judge_choices(questions, likelihoods)
    return ChoiceScores(likelihoods, results, errors, at_once, time.monotonic() - started)


def _sum_log_likelihoods(opened: OpenedModel, part: Sequence[_Scored]) -> list[float]:
    """The log-likelihood of each answer, given its question; rows are filled up behind their tokens, which see nothing
    later."""
    width = max(len(each.tokens) for each in part) - 1
    inputs = torch.tensor([[*each.tokens[:-1], *[0] * (width + 1 - len(each.tokens))] for each in part])
    logits = compute_logits(opened, inputs.to(opened.device))
    made = []
    for row, each in zip(logits, part, strict=True):
        end, targets = len(each.tokens) - 1, torch.tensor(each.tokens[-each.count :], device=logits.device)
        chances = row[end - each.count : end].float().log_softmax(-1)
        made.append(float(chances.gather(-1, targets[:, None]).double().sum()))
    return made


_LENGTHS: dict[str, Callable[[str], int]] = {
    "acc": lambda choice: 1,
    "acc_norm": len,
    "acc_bytes": lambda choice: len(choice.encode()),
}
"""Accuracy -> what the log-likelihood of an answer is divided by."""


def judge_choices(
    questions: Sequence[Question], likelihoods: Sequence[Sequence[float]]
) -> tuple[dict[str, float], dict[str, float]]:
    """The accuracies by name, and their standard errors (none for a single question)."""
    results, errors = dict[str, float](), dict[str, float]()
    for name, length in _LENGTHS.items():
        right = list(_list_right(questions, likelihoods, length))
        mean = math.fsum(right) / len(right)
        results[name] = mean
        if len(right) > 1:
            deviation = math.sqrt(math.fsum((each - mean) ** 2 for each in right) / (len(right) - 1))
            errors[name] = deviation / math.sqrt(len(right))
    return results, errors


def _list_right(
    questions: Sequence[Question], likelihoods: Sequence[Sequence[float]], length: Callable[[str], int]
) -> Iterator[float]:
    """1 for each question whose right answer has the best score, else 0."""
    for question, found in zip(questions, likelihoods, strict=True):
        scores = [value / length(choice) for value, choice in zip(found, question.choices, strict=True)]
        yield float(scores.index(max(scores)) == question.answer)


def render_answers(questions: Sequence[Question], scores: ChoiceScores) -> list[dict[str, Any]]:
    """Of each question its line, the right answer, and the log-likelihoods, for a file of results."""
    return [
        {"line": question.line, "answer": question.answer, "likelihoods": list(found)}
        for question, found in zip(questions, scores.likelihoods, strict=True)
    ]
