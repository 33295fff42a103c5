"""Applies the rules to a loaded run file, completes it with the opened data, and checks changes of a continued run.

Invariants:
- All problems are reported at once, and nothing that the user set is changed.
- A change that would alter the meaning of saved weights, optimizer state or the data position is refused; every other
  change is allowed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, cast

from shardway.errors import Problem, check_no_problems
from shardway.resolve.applies import TOKEN_MODELS, WEIGHT_KEYS
from shardway.resolve.device_defaults import leave_short_runs_uncompiled
from shardway.resolve.draft import Circumstances, DataFacts, Derived, Draft, Resolved
from shardway.resolve.rules import OF_WHAT_IS_DESCRIBED, RULES
from shardway.resolve.rules.numbers import accumulation_of, ceil_div, replicas_of
from shardway.resolve.rules.run import a_run_without_a_name_is_called_after_its_file
from shardway.runfile.load import DEFAULT, LoadedRunFile
from shardway.units import Scale, Span


def resolve(loaded: LoadedRunFile, circumstances: Circumstances) -> Resolved:
    """Apply every rule in order. Raises UserError with all problems."""
    draft = Draft(loaded, circumstances)
    for rule in (a_run_without_a_name_is_called_after_its_file(_name_of_file(loaded)), *RULES):
        if not (circumstances.own_model and rule in OF_WHAT_IS_DESCRIBED):
            rule(draft)
    resolved = draft.finish(_derive(draft)) if not draft.problems else None
    spans = _spans_without_data(resolved) if resolved else None
    check_no_problems(_title(loaded), [*draft.problems, *(spans.find_problems() if spans else [])])
    return spans.settle() if spans else cast(Resolved, resolved)


def name_of_run(loaded: LoadedRunFile) -> str:
    """The name of a run: its run.name, or its file's."""
    name = loaded.values.run.name
    return name if name != "auto" else _name_of_file(loaded)


def _name_of_file(loaded: LoadedRunFile) -> str:
    return loaded.path.stem if loaded.path else "default"


def _spans_without_data(resolved: Resolved) -> _Spans | None:
    """The lengths of a run if none of them depends on the data."""
    optim = resolved.values.optim
    units = {span.unit for span in (resolved.values.train.steps, optim.warmup, optim.decay)}
    if units <= {"steps", "samples"}:
        return _Spans(resolved, Scale(resolved.values.train.global_batch, tokens_per_sample=1, samples_per_epoch=1))
    return None


def _derive(draft: Draft) -> Derived:
    factor = 1.0
    if draft.get("optim.lr_scaling") == "linear":
        factor = draft.get("train.global_batch") / draft.get("optim.base_batch")
    return Derived(
        replicas=replicas_of(draft),
        accumulation=accumulation_of(draft),
        peak_lr=draft.get("optim.lr") * factor,
        per_pass=draft.get("parallel.pp_micro_batches"),
    )


def resolve_with_data(resolved: Resolved, facts: DataFacts) -> Resolved:
    """Settle the keys that need the opened data: vocabulary, and spans in steps. Raises UserError."""
    values, origins, problems = resolved.values, dict(resolved.origins), []
    if values.model.kind in TOKEN_MODELS and facts.vocab is not None:
        if values.model.vocab == "auto":
            model = values.model.model_copy(update={"vocab": facts.vocab})
            values = values.model_copy(update={"model": model})
            origins["model.vocab"] = "derived: vocabulary of the data"
            problems += _list_vocabulary_problems(facts.vocab, values.parallel.tp)
        elif int(values.model.vocab) < facts.vocab:
            what = f"{values.model.vocab} is smaller than the vocabulary of the data, {facts.vocab}"
            problems.append(Problem("model.vocab", what, origins["model.vocab"], f"at least {facts.vocab}"))
    resolved = replace(resolved, values=values, origins=MappingProxyType(origins))
    spans = _Spans(resolved, scale_of(resolved, facts))
    check_no_problems("the run file", [*problems, *spans.find_problems()])
    return leave_short_runs_uncompiled(spans.settle())


def _list_vocabulary_problems(vocab: int, tp: int) -> list[Problem]:
    """Problems of a vocabulary that comes from the data; that of a run file is checked by a rule."""
    if vocab % tp == 0:
        return []
    what, padded = f"{vocab} entries do not split into parallel.tp = {tp} equal parts", ceil_div(vocab, tp) * tp
    return [
        Problem(
            "model.vocab",
            what,
            "derived: vocabulary of the data",
            f"a multiple of {tp}, such as {padded}",
            f"set model.vocab = {padded}: it may be larger than that of the data",
        )
    ]


class _Spans:
    """The lengths of a run in steps: the whole, the warm-up, the decay at the end."""

    def __init__(self, resolved: Resolved, scale: Scale) -> None:
        self._resolved = resolved
        optim = resolved.values.optim
        self._total = resolved.values.train.steps.in_steps(scale)
        self._spans: dict[str, Span] = {"warmup": optim.warmup}
        if optim.schedule == "wsd":
            self._spans["decay"] = optim.decay
        self._steps = {name: self._fit(name, span.in_steps(scale)) for name, span in self._spans.items()}

    def _fit(self, name: str, steps: int) -> int:
        """A default that is long for a short run is shortened; what the user set is never changed."""
        is_default = self._resolved.origins[f"optim.{name}"] == DEFAULT
        return min(steps, self._total // 10) if is_default else steps

    def find_problems(self) -> list[Problem]:
        """Problems of these lengths."""
        origins = self._resolved.origins
        if self._total == 0:
            what = f"{self._resolved.values.train.steps} is no step at all"
            return [Problem("train.steps", what, origins["train.steps"], "at least 1 step")]
        over = sum(self._steps.values()) - self._total
        longest = max(self._steps, key=lambda name: self._steps[name])
        if over <= 0:
            return []
        parts = " and ".join(f"{name} {steps}" for name, steps in self._steps.items())
        what = f"{parts} steps do not fit into a run of {self._total} steps"
        return [
            Problem(
                f"optim.{longest}",
                what,
                origins[f"optim.{longest}"],
                f"at most {max(0, self._steps[longest] - over)} steps",
            )
        ]

    def settle(self) -> Resolved:
        """The resolved run with its lengths in steps; a shortened default is recorded as derived."""
        optim, origins = self._resolved.values.optim, dict(self._resolved.origins)
        for name, steps in self._steps.items():
            if origins[f"optim.{name}"] == DEFAULT and self._spans[name] != Span(steps, "steps"):
                optim = optim.model_copy(update={name: Span(steps, "steps")})
                origins[f"optim.{name}"] = f"derived: at most a tenth of {self._total} steps"
        return replace(
            self._resolved,
            values=self._resolved.values.model_copy(update={"optim": optim}),
            origins=MappingProxyType(origins),
            derived=replace(
                self._resolved.derived,
                total_steps=self._total,
                warmup_steps=self._steps["warmup"],
                decay_steps=self._steps.get("decay", 0),
            ),
        )


def scale_of(resolved: Resolved, facts: DataFacts) -> Scale:
    """The conversion of steps, samples, tokens and epochs of this run."""
    return Scale(resolved.values.train.global_batch, facts.tokens_per_sample, facts.samples)


def _title(loaded: LoadedRunFile) -> str:
    return str(loaded.path) if loaded.path else "the run"


# --- continuing a run with a changed run file

FIXED_AT_RESUME = (
    *(f"model.{name}" for name in WEIGHT_KEYS),
    *(f"data.{name}" for name in ("kind", "tokenizer", "include", "seq_len", "shuffle", "validation_fraction")),
    "train.engine",
    "train.seed",
    "deepspeed.stage",
    "deepspeed.offload_optimizer",
    "optim.name",
    "precision.weights",
)
"""Keys whose change would alter the meaning of the saved weights, optimizer state or data position."""


FREE_AT_RESUME = (
    "parallel",
    "recompute",
    "run",
    "site",
    "train.micro_batch",
    "train.compile_cache",
    "data.workers",
    "data.prefetch",
    "data.cache",
)
"""Sections and keys that change where a run continues, and nothing that it computes."""


WAYS_OUT = "choose another directory with --dir, or start {directory} over with --fresh, which sets it aside"
"""The ways out that `shardway train` offers."""


def find_changes(saved: Mapping[str, Any], resolved: Resolved) -> dict[str, list[Any]]:
    """Keys that changed since the saved resolved run: key -> [before, now]."""
    changes = {}
    for section, table in resolved.values.model_dump(mode="json").items():
        before = saved.get(section, {}) if section not in FREE_AT_RESUME else {}
        for name in table.keys() & before.keys() if isinstance(table, dict) else ():
            if f"{section}.{name}" not in FREE_AT_RESUME and table[name] != before[name]:
                changes[f"{section}.{name}"] = [before[name], table[name]]
    return dict(sorted(changes.items()))


def check_same_run(saved: Mapping[str, Any], resolved: Resolved, directory: str, ways_out: str = WAYS_OUT) -> None:
    """Raise UserError if a key that must not change between attempts differs from the saved resolved run.

    `ways_out`: alternatives to restoring the value; "{directory}" in it is the run's.
    """
    now = resolved.values.model_dump(mode="json")
    problems = []
    for dotted in FIXED_AT_RESUME:
        section, name = dotted.split(".")
        before, after = saved.get(section, {}).get(name), now[section][name]
        if before not in (None, "auto") and after != "auto" and before != after:
            what = f"{after!r}, but the run in {directory} was started with {before!r}"
            problems.append(Problem(dotted, what, resolved.origins[dotted], repr(before)))
    if problems:
        problems[-1] = replace(
            problems[-1],
            remedy=f"restore the value, {ways_out.format(directory=directory)}",
        )
    check_no_problems(f"what has changed since {directory} was started", problems)
