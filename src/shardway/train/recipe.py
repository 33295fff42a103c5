"""The run that a run file describes, from its data to its report, through the library door.

Invariant: all that it does, a user's script could do with the same calls. This module must not hold a loop of its own
beside the one of `Run.steps`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from shardway.checkpoint.catalog import find_tie
from shardway.data.open import Data, open_described
from shardway.hfconfig import locate_model
from shardway.models.build import build_model
from shardway.resolve.draft import takes_of
from shardway.resolve.request import ResolveRequest
from shardway.train.loss import LossSum, class_cross_entropy, token_cross_entropy
from shardway.train.optim.kinds import build_optimizer
from shardway.train.run import Run, open_run
from shardway.watch.report import render_report

LOSSES: dict[str, Callable[[torch.Tensor, torch.Tensor], LossSum]] = {
    "tokens": token_cross_entropy,
    "images": class_cross_entropy,
}
"""What a model takes -> its loss."""


@dataclass(frozen=True)
class RunOutcome:
    """How a run ended: its directory, and the state and reason of its last event."""

    directory: str
    state: str
    reason: str
    step: int


def train(request: ResolveRequest) -> RunOutcome:
    """Train on this rank until the run is finished or asked to stop, then report. Raises ShardwayError."""
    with open_run(request) as run:
        outcome = train_run(run)
        if run.is_first and run.session.recorder.is_open:
            run.directory.write_report(render_report(run.directory))
    return outcome


def train_run(run: Run) -> RunOutcome:
    """Train what the run file of an open run describes."""
    # The data are opened by rank 0 first, which prepares the files for the others.
    data = run.session.ranks.first_then_all(lambda: open_described(run.resolved.values))
    run.session.settle(data.facts)
    values = run.resolved.values
    wants = takes_of(values.model.kind)
    model = run.shard(_build(run, data))
    peak_lr = run.resolved.derived.peak_lr
    run.optimizer(lambda parameters: build_optimizer(values.optim, model, peak_lr), model)
    validation = run.validation(data.validation, LOSSES[wants]) if data.validation is not None else None
    for batch in run.steps(run.loader(data.train), validation=validation):
        run.step(model, batch, LOSSES[wants])
    status = run.directory.read_status() if run.is_first else {}
    return RunOutcome(
        str(run.directory.path), status.get("state", ""), status.get("reason", ""), int(status.get("step", 0))
    )


def _build(run: Run, data: Data) -> nn.Module:
    """The model of the run file, on the meta device."""
    section, facts, session = run.resolved.values.model, data.train.facts, run.session
    if not section.hf:
        return build_model(section, vocab=facts.vocab, sample_shape=facts.sample_shape)
    from shardway.models.huggingface.model import build_huggingface  # needs the extra `hf`

    folder = session.ranks.first_then_all(lambda: locate_model(section.hf, weights=section.hf_weights))
    # Whether the run has a checkpoint, and whether that ties the output layer to the embedding.
    has_checkpoint, tied = session.ranks.ask_first(lambda: (bool(session.list_saved()), find_tie(session.directory)))
    looks = section.hf_weights and (not has_checkpoint or tied is None)  # else they are random, or in the checkpoint
    size = int(facts.vocab or 0)
    model = build_huggingface(folder, vocab=size, seq_len=facts.sample_shape[0], weights=looks, tied=tied)
    if has_checkpoint:
        model.fit = None
    for note in model.notes if run.is_first and not has_checkpoint else ():
        logging.getLogger("shardway").warning(note)
    return model
