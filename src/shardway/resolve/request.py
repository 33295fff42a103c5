"""From a request to the resolved run: reads the run file, the site profile and this machine, and applies the rules.

Invariants:
- The same request on the same machine gives the same `Resolved` on every rank, so each rank resolves for itself. This
  is the only module of its package that reads files, and it writes none.
- All problems are reported at once, and nothing that the user set is changed.
- A change that would alter the meaning of saved weights, optimizer state or the data position is refused; every other
  change is allowed.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from shardway.errors import Problem, ShardwayError, UserError, check_no_problems
from shardway.hardware import probe
from shardway.hardware.catalogue import DeviceFacts, facts_of_found, facts_of_part, load_accelerators
from shardway.hfconfig import ModelFacts, locate_model, read_facts
from shardway.places import expand_place, list_unset
from shardway.resolve.draft import (
    WEIGHT_KEYS,
    Circumstances,
    DataFacts,
    Derived,
    Draft,
    Resolved,
    Settled,
    accumulation_of,
    ceil_div,
    replicas_of,
    takes_of,
)
from shardway.resolve.rules import OF_WHAT_IS_DESCRIBED, RULES
from shardway.resolve.rules.formats import KEYS as DEVICE_KEYS
from shardway.resolve.rules.formats import leave_short_runs_uncompiled
from shardway.resolve.rules.run import a_run_without_a_name_is_called_after_its_file
from shardway.rundir.directory import RunDir
from shardway.runfile.load import DEFAULT, LoadedRunFile, is_text, load_run
from shardway.runfile.schema import RunFile
from shardway.sites.load import UnknownSite, load_site
from shardway.sites.schema import CPU, SiteProfile
from shardway.units import Scale, Span

if TYPE_CHECKING:
    from shardway.plan.case import Machine
    from shardway.plan.shapes import Shape


# --- the rules applied, the lengths that need the opened data


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
    values, problems = resolved.values, list[Problem]()
    if takes_of(values.model.kind) == "tokens" and facts.vocab is not None:
        if values.model.vocab == "auto":
            resolved = resolved.with_values({"model.vocab": Settled(facts.vocab, "vocabulary of the data")})
            problems += _list_vocabulary_problems(facts.vocab, values.parallel.tp)
        elif int(values.model.vocab) < facts.vocab:
            what = f"{values.model.vocab} is smaller than the vocabulary of the data, {facts.vocab}"
            problems.append(Problem("model.vocab", what, resolved.origins["model.vocab"], f"at least {facts.vocab}"))
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
        shortened = {
            f"optim.{name}": Settled(Span(steps, "steps"), f"at most a tenth of {self._total} steps")
            for name, steps in self._steps.items()
            if self._resolved.origins[f"optim.{name}"] == DEFAULT and self._spans[name] != Span(steps, "steps")
        }
        warmup, decay = self._steps["warmup"], self._steps.get("decay", 0)
        resolved = self._resolved.with_values(shortened)
        lengths = replace(resolved.derived, total_steps=self._total, warmup_steps=warmup, decay_steps=decay)
        return replace(resolved, derived=lengths)


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
    "track",
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


# --- the request of a command or a script

LAPTOP = "laptop"
"""The profile whose node facts are all detected."""

_OVERRIDE = re.compile(r"[A-Za-z_]+\.[A-Za-z0-9_.]+\s*=")


@dataclass(frozen=True)
class ResolveRequest:
    """A run file (None: the default run), `key.path=value` overrides, the run directory (None: root/name).

    A script with its `own_model` does not have to match [model] and [data], and its directory is a default.
    """

    run_file: Path | None = None
    overrides: tuple[str, ...] = ()
    directory: Path | None = None
    fresh: bool = False
    own_model: bool = False


def parse_words(words: Sequence[str]) -> ResolveRequest:
    """The request from words such as `run.toml train.steps=500`. Raises UserError if they name two run files."""
    overrides = tuple(word for word in words if _is_override(word))
    files = [word for word in words if not _is_override(word)]
    if len(files) > 1:
        raise UserError(
            f"a run has one run file, and {len(files)} words could be one: {', '.join(files)}.\n"
            "  allowed: at most one path, and section.key=value for each key to set, such as train.steps=500"
        )
    return ResolveRequest(Path(files[0]) if files else None, overrides)


def _is_override(word: str) -> bool:
    """Whether a word is an override; also `steps=500`, whose missing section is reported, unless a file has that
    name."""
    return bool(_OVERRIDE.match(word)) or ("=" in word and not os.path.exists(word))


def find_folder(path: str | Path) -> Path:
    """A folder that a run writes to, with `~` and `$VARIABLES` filled in (`check_variables` reports unset ones). Raises
    UserError if the system has no such home.

    A folder literally called `~` is dangerous: removing it in a shell would remove the home.
    """
    folder = expand_place(path)
    if str(folder).startswith("~"):
        raise UserError(
            f"the run directory {folder} begins with ~, and this machine knows no such home folder.\n"
            "  To do: write that folder out, with --dir or run.root."
        )
    return folder


@dataclass(frozen=True)
class Resolution:
    """A request, what was read for it, and the result."""

    request: ResolveRequest
    loaded: LoadedRunFile
    resolved: Resolved

    @property
    def directory(self) -> RunDir:
        """The run directory."""
        values = self.resolved.values.run
        return RunDir(find_folder(values.root) / values.name)

    def with_default(self, dotted: str, value: Any, origin: str) -> Resolution:
        """The same resolution with `value` for a key that is not set."""
        loaded = self.loaded.with_default(dotted, value, origin)
        return replace(self, loaded=loaded, resolved=resolve(loaded, self.resolved.circumstances))

    def under(self, **circumstances: Any) -> Resolution:
        """The same resolution under other circumstances; not for a run that the data has completed."""
        known = replace(self.resolved.circumstances, **circumstances)
        return replace(self, resolved=resolve(self.loaded, known))


def check_variables(loaded: LoadedRunFile) -> None:
    """Raise UserError for paths of a new run whose `$VARIABLES` are not set here."""
    problems = []
    for dotted in _PATHS:
        section, name = dotted.split(".")
        value = str(getattr(getattr(loaded.values, section), name))
        if unset := list_unset(value):
            what = f'"{value}": ${unset[0]} is not set here'
            remedy = "set that variable, or write the path out"
            problems.append(Problem(dotted, what, loaded.origins[dotted], remedy=remedy))
    check_no_problems(str(loaded.path or "the command line"), problems)


_PATHS = (
    *("run.root", "data.path", "data.validation", "data.tokenizer", "data.cache", "model.hf", "train.compile_cache"),
)
"""Keys whose value is a path on the machine that trains."""


def resolve_request(
    request: ResolveRequest, ranks: int = 1, ranks_per_node: int = 1, planned: Machine | None = None
) -> Resolution:
    """Read and resolve, for this machine or for one that is `planned`. Raises UserError with every problem."""
    return resolve_loaded(request, load_run(request.run_file, request.overrides), ranks, ranks_per_node, planned)


def resolve_loaded(
    request: ResolveRequest,
    loaded: LoadedRunFile,
    ranks: int = 1,
    ranks_per_node: int = 1,
    planned: Machine | None = None,
) -> Resolution:
    """The same for a run file that is already loaded."""
    if request.directory is not None:
        loaded = _place(loaded, request.directory, by_default=request.own_model)
    values, machine = loaded.values, probe.probe_machine()
    site = site_of(loaded, machine)
    known = planned or (_planned_machine(site, machine) if values.run.device != "cpu" else None)
    circumstances = Circumstances(
        ranks=ranks,
        ranks_per_node=ranks_per_node,
        usable_cores=machine.usable_cores,
        accelerators=planned.per_node if planned else len(machine.accelerators),
        site=site.name,
        hf=_facts_of(values.model.hf),
        machine=known,
        shape=_shape_of(values.model.hf) if known or values.parallel.layout == "auto" else None,
        own_model=request.own_model,
        local_disk=site.node.local_disk or "",
        devices=(facts_of_part(planned.accelerator),) if planned else _list_devices(values.run.device, machine),
    )
    if not request.fresh:
        with contextlib.suppress(ShardwayError, OSError):  # reported when the run begins
            place = RunDir(find_folder(values.run.root) / name_of_run(loaded))
            circumstances = replace(circumstances, before=read_before(place, values))
    return Resolution(request, loaded, resolve(loaded, circumstances))


def read_before(run: RunDir, values: RunFile) -> dict[str, Any]:
    """The values that earlier attempts of a run used for the keys that follow the device.

    Empty if there is no checkpoint to resume from. Raises JobError, OSError if its record cannot be read.
    """
    if not run.checkpoint_steps() and values.checkpoint.local_every == "off":
        return {}
    saved, found = run.read_resolved(), dict[str, Any]()
    for section, name in (key.split(".") for key in DEVICE_KEYS):
        value = saved.get(section, {}).get(name, "auto")
        found |= {f"{section}.{name}": value} if value != "auto" else {}
    return found


def _list_devices(kind: str, machine: probe.LocalMachine) -> tuple[DeviceFacts, ...]:
    """The abilities of this machine's accelerators, each kind once."""
    return tuple(dict.fromkeys(facts_of_found(each) for each in machine.accelerators)) if kind != "cpu" else ()


def site_of(loaded: LoadedRunFile, machine: probe.LocalMachine | None = None) -> SiteProfile:
    """The profile that a run names, seen from this machine. Raises UserError, with the origin of an unknown name."""
    try:
        return load_site(loaded.values.site.name, lambda: machine or probe.probe_machine())
    except UnknownSite as error:
        raise UserError(f"site.name ({loaded.origins['site.name']}): {error}") from None


def _facts_of(hf: str) -> ModelFacts | None:
    """The facts of `model.hf`'s config, if it is set."""
    return read_facts(locate_model(hf, weights=False)) if hf else None


def _shape_of(hf: str) -> Shape | None:
    """The layers of `model.hf`; None if it is not set, or of a family that the planner does not support."""
    if not hf:
        return None
    from shardway.plan.huggingface import read_shape

    try:
        return read_shape(hf)
    except UserError:
        return None


def _planned_machine(site: SiteProfile, found: probe.LocalMachine) -> Machine | None:
    """The machine of the site or, if its profile names no accelerator, nodes like this one."""
    if site.node.accelerator is None:
        own = load_site(LAPTOP, lambda: found).node
        facts = {"accelerator": own.accelerator, "accelerators_per_node": own.accelerators_per_node}
        site = site.model_copy(update={"node": site.node.model_copy(update=facts)})
    return machine_of_known(site)


def machine_of_known(site: SiteProfile) -> Machine | None:
    """The machine of a site; None for nodes without accelerators, and if the catalogue lacks their memory and rates."""
    part = load_accelerators().get(site.node.accelerator or CPU)
    if part is None or not (part.memory_bytes and part.peak_flops and site.node.accelerators_per_node):
        return None
    from shardway.plan.case import machine_of_site

    return machine_of_site(site)


def _place(loaded: LoadedRunFile, directory: Path, *, by_default: bool) -> LoadedRunFile:
    """The run with a directory as its root and name, so that `resolved.toml` leads back to it.

    The directory of `--dir` overrides the keys; that of a script applies only if no key sets it.
    """
    path = find_folder(directory)
    path = path if path.name not in ("", "..") else path.resolve()
    if not path.name:
        raise UserError(f"the run directory {directory} is the root of the file system; name a folder in it.")
    if not is_text(str(path)):
        raise UserError(
            f"the run directory {str(path)!a} is not UTF-8 text, and its name stands in text files.\n"
            "  To do: choose another name with --dir, or run.name in the run file."
        )
    origin = "shardway.start(directory=...)" if by_default else "--dir"
    for dotted, value in (("run.root", str(path.parent)), ("run.name", path.name)):
        put: Callable[[str, str, str], LoadedRunFile] = loaded.with_default if by_default else loaded.with_value
        loaded = put(dotted, value, origin)
    return loaded
