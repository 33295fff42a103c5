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
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from shardway.errors import Problem, ShardwayError, UserError, check_no_problems
from shardway.hardware import probe
from shardway.hardware.catalogue import facts_of_cuda, facts_of_part, load_accelerators
from shardway.hfconfig import ModelFacts, locate_model, parse_snapshot, read_facts
from shardway.layout import AXES
from shardway.places import expand_place, list_unset
from shardway.resolve.draft import (
    ADAPTER_KEYS,
    WEIGHT_KEYS,
    Circumstances,
    DataFacts,
    Derived,
    Draft,
    Resolved,
    Settled,
    accumulation_of,
    batch_of,
    ceil_div,
    replicas_of,
    takes_of,
    value_of,
)
from shardway.resolve.rules import RULES
from shardway.resolve.rules.formats import KEYS as DEVICE_KEYS
from shardway.resolve.rules.formats import leave_short_runs_uncompiled
from shardway.rundir.directory import RunDir
from shardway.runfile.load import DEFAULT, LoadedRunFile, is_text, load_run
from shardway.runfile.schema import RunFile, all_keys
from shardway.sites.load import UnknownSite, load_site
from shardway.sites.schema import SiteProfile
from shardway.units import Scale, Span

if TYPE_CHECKING:
    from shardway.plan.case import Machine


# --- the rules applied, the lengths that need the opened data


def resolve(loaded: LoadedRunFile, circumstances: Circumstances) -> Resolved:
    """Apply every rule in order. Raises UserError with all problems."""
    draft, title = Draft(loaded, circumstances), str(loaded.path) if loaded.path else "the run"
    for rule in RULES:
        rule(draft)
    check_no_problems(title, draft.problems)
    factor = 1.0
    if draft.get("optim.lr_scaling") == "linear":
        factor = batch_of(draft).largest / draft.get("optim.base_batch")
    peak_lr, per_pass = draft.get("optim.lr") * factor, draft.get("parallel.pp_micro_batches")
    derived = Derived(replicas_of(draft), accumulation_of(draft), peak_lr, per_pass)
    resolved = Resolved(draft.values, MappingProxyType(draft.origins), circumstances, derived)
    lengths = (resolved.values.train.steps, resolved.values.optim.warmup, resolved.values.optim.decay)
    if not {span.unit for span in lengths} <= {"steps", "samples"}:
        return resolved  # until the data is open
    scale = Scale(resolved.values.train.batch, tokens_per_sample=1, samples_per_epoch=1)
    resolved, problems = _settle_lengths(resolved, scale)
    check_no_problems(title, problems)
    return resolved


def resolve_with_data(resolved: Resolved, facts: DataFacts) -> Resolved:
    """Settle the keys that need the opened data: vocabulary, whether there are validations, and spans in steps. Raises
    UserError."""
    values, vocab, problems = resolved.values, facts.vocab, list[Problem]()
    if takes_of(values.model.kind) == "tokens" and vocab is not None:
        tp, padded = values.parallel.tp, ceil_div(vocab, values.parallel.tp) * values.parallel.tp
        if values.model.vocab != "auto" and int(values.model.vocab) < vocab:
            what = f"{values.model.vocab} is smaller than the vocabulary of the data, {vocab}"
            problems.append(Problem("model.vocab", what, resolved.origins["model.vocab"], f"at least {vocab}"))
        elif values.model.vocab == "auto":
            resolved = resolved.with_values({"model.vocab": Settled(vocab, "vocabulary of the data")})
            if vocab % tp:  # that of a run file is checked by a rule
                what = f"{vocab} entries do not split into parallel.tp = {tp} equal parts"
                allowed = f"a multiple of {tp}, such as {padded}"
                remedy = f"set model.vocab = {padded}: it may be larger than that of the data"
                origin = resolved.origins["model.vocab"]
                problems.append(Problem("model.vocab", what, origin, allowed, remedy))
    if not facts.held_out:
        resolved, more = _settle_validations(resolved, facts)
        problems += more
    unknown = [] if facts.samples else list_epoch_keys(resolved.values)
    for key in unknown:
        what = f'"{value_of(values, key)}", and {facts.in_sequence} has no length, so an epoch has no number of steps'
        origin, allowed = resolved.origins[key], "a number of steps, samples or tokens"
        problems.append(Problem(key, what, origin, allowed, f"give {key} in steps, or the dataset a __len__"))
    if not unknown:
        resolved, more = _settle_lengths(resolved, scale_of(resolved, facts))
        problems += more
    check_no_problems("the run file", problems)
    return leave_short_runs_uncompiled(resolved)


def list_epoch_keys(values: RunFile) -> list[str]:
    """The keys whose values are numbers of epochs."""
    found = ((key, value_of(values, key)) for key in all_keys())
    return [key for key, value in found if isinstance(value, Span) and value.unit == "epochs"]


def _settle_validations(resolved: Resolved, facts: DataFacts) -> tuple[Resolved, list[Problem]]:
    """The run without validations, as nothing is held out; and which keys ask for them."""
    values, origins = resolved.values, resolved.origins
    why = "nothing is held out: data.validation_fraction is 0"
    remedy = "name data.validation, or hold out a fraction"
    if facts.in_sequence:
        why = f"{facts.in_sequence} is read in sequence, so nothing is held out at its end"
        remedy = 'let its function take the argument split, and return what is for validation if it is "validation"'
    every, fraction = values.train.validate_every, values.data.validation_fraction
    asked = [
        ("data.validation_fraction", f"{fraction}" if fraction and facts.in_sequence else "", "0.0"),
        ("train.validate_every", "" if every == "off" else f'"{every}"', '"off"'),
        ("checkpoint.keep_best", f"{values.checkpoint.keep_best or ''}", "0"),
        ("train.patience", "" if values.train.patience == "off" else f"{values.train.patience}", '"off"'),
    ]
    problems = [
        Problem(key, f"{value}, and {why}", origins[key], allowed, remedy)
        for key, value, allowed in asked
        if value and origins[key] != DEFAULT and not resolved.is_derived(key)
    ]
    if every != "off" and not problems:
        resolved = resolved.with_values({"train.validate_every": Settled("off", why.partition(":")[0])})
    return resolved, problems


def _settle_lengths(resolved: Resolved, scale: Scale) -> tuple[Resolved, list[Problem]]:
    """The run with its lengths in steps: the whole, the warm-up, the decay at the end; and what is wrong with them. A
    default that is long for a short run is shortened, and recorded as derived; what the user set is never changed."""
    optim, origins = resolved.values.optim, resolved.origins
    total = resolved.values.train.steps.in_steps(scale)
    spans = {"warmup": optim.warmup, **({"decay": optim.decay} if optim.schedule == "wsd" else {})}
    steps = {
        name: span.in_last_steps(scale) if name == "decay" else span.in_steps(scale) for name, span in spans.items()
    }
    shortened = dict[str, Settled]()
    for name, span in spans.items():
        if origins[f"optim.{name}"] == DEFAULT:
            fitting = Span(min(steps[name], total // 10), "steps")
            steps[name] = int(fitting.amount)
            if fitting != span:
                shortened[f"optim.{name}"] = Settled(fitting, f"at most a tenth of {total} steps")
    if total == 0:
        what = f"{resolved.values.train.steps} is no step at all"
        return resolved, [Problem("train.steps", what, origins["train.steps"], "at least 1 step")]
    if (over := sum(steps.values()) - total) > 0:
        longest = max(steps, key=lambda name: steps[name])
        parts = " and ".join(f"{name} {count}" for name, count in steps.items())
        what = f"{parts} steps do not fit into a run of {total} steps"
        allowed = f"at most {max(0, steps[longest] - over)} steps"
        return resolved, [Problem(f"optim.{longest}", what, origins[f"optim.{longest}"], allowed)]
    warmup, decay = steps["warmup"], steps.get("decay", 0)
    lengths = replace(resolved.derived, total_steps=total, warmup_steps=warmup, decay_steps=decay)
    return replace(resolved.with_values(shortened), derived=lengths), []


def scale_of(resolved: Resolved, facts: DataFacts) -> Scale:
    """The conversion of steps, samples, tokens and epochs of this run."""
    return Scale(resolved.values.train.batch, facts.tokens_per_sample, facts.samples)


# --- continuing a run with a changed run file

FIXED_AT_RESUME = (
    *(f"model.{name}" for name in (*WEIGHT_KEYS, *ADAPTER_KEYS)),
    *(f"data.{name}" for name in ("kind", "tokenizer", "include", "seq_len", "pack", "group_tokens", "shuffle")),
    *("data.window", "data.validation_fraction"),
    *("train.engine", "train.seed", "deepspeed.stage", "deepspeed.offload_optimizer", "optim.name"),
    "precision.weights",
)
"""Keys whose change would alter the meaning of the saved weights, optimizer state or data position."""

FREE_AT_RESUME = (
    *("parallel", "recompute", "run", "site", "track", "notify", "pipeline", "train.micro_batch", "train.tune"),
    *("train.compile_cache", "train.profile", "data.workers", "data.prefetch", "data.cache", "data.stage"),
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
            if table[name] == before[name] or f"{section}.{name}" in FREE_AT_RESUME:
                continue
            if (section, name) != ("model", "hf") or not _is_same_model(before[name], table[name]):
                changes[f"{section}.{name}"] = [before[name], table[name]]
    return dict(sorted(changes.items()))


def _is_same_model(before: Any, after: Any) -> bool:
    """Whether one of two values of model.hf is a hub name and the other the folder of its snapshot, or both are folders
    of one snapshot: a job gets the folder for the name."""
    texts = [value for value in (before, after) if isinstance(value, str) and value]
    if len(texts) < 2:
        return False
    named = [parse_snapshot(text) for text in texts]
    if named == [None, None]:
        return False
    if None not in named:
        return named[0] == named[1]
    (folder,) = filter(None, named)
    repo, _, revision = texts[named.index(None)].partition("@")
    kind, name, commit = folder
    return kind == "model" and repo == name and (not revision or len(revision) < len(commit) or revision == commit)


def check_same_run(saved: Mapping[str, Any], resolved: Resolved, directory: str, ways_out: str = WAYS_OUT) -> None:
    """Raise UserError if a key that must not change between attempts differs from the saved resolved run. `ways_out`:
    alternatives to restoring the value; "{directory}" in it is the run's."""
    now = resolved.values.model_dump(mode="json")
    problems = []
    for dotted in FIXED_AT_RESUME:
        section, name = dotted.split(".")
        before, after = saved.get(section, {}).get(name), now[section][name]
        if dotted == "model.hf" and before != after and _is_same_model(before, after):
            continue
        if before not in (None, "auto") and after != "auto" and before != after:
            what = f"{after!r}, but the run in {directory} was started with {before!r}"
            problems.append(Problem(dotted, what, resolved.origins[dotted], repr(before)))
    if problems:
        problems[-1] = replace(problems[-1], remedy=f"restore the value, {ways_out.format(directory=directory)}")
    check_no_problems(f"what has changed since {directory} was started", problems)


# --- the request of a command or a script


@dataclass(frozen=True)
class ResolveRequest:
    """A run file (None: the default run), `key.path=value` overrides, the run directory (None: root/name). A script
    with its `own_model` does not have to match [model] and [data], and its directory is a default. `started_in`: the
    folder that a relative run directory is in, where the process may go to another one later, as a script does (None:
    the one it is in at the time)."""

    run_file: Path | None = None
    overrides: tuple[str, ...] = ()
    directory: Path | None = None
    fresh: bool = False
    own_model: bool = False
    started_in: Path | None = None


def parse_words(words: Sequence[str]) -> ResolveRequest:
    """The request from words such as `run.toml train.steps=500`. Raises UserError if they name two run files."""
    files, overrides = list[str](), list[str]()
    for word in words:  # `steps=500` is an override too, whose missing section is reported, unless a file has that name
        dotted = re.match(r"[A-Za-z_]+\.[A-Za-z0-9_.]+\s*=", word)
        (overrides if dotted or ("=" in word and not os.path.exists(word)) else files).append(word)
    if len(files) > 1:
        raise UserError(
            f"a run has one run file, and {len(files)} words could be one: {', '.join(files)}.\n"
            "  allowed: at most one path, and section.key=value for each key to set, such as train.steps=500"
        )
    return ResolveRequest(Path(files[0]) if files else None, tuple(overrides))


KEYS_VARIABLE = "SHARDWAY_KEYS"
"""Keys over all others of a script that `shardway.start` opens, as a JSON list of "key=value": for what starts a script
of the user's, several times beside one another, and must not edit it."""


def read_keys_variable(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The keys in that variable; none where it is not set. Raises UserError for anything but a list of words."""
    text = environ.get(KEYS_VARIABLE, "")
    if not text:
        return ()
    try:
        words = json.loads(text)
    except (ValueError, RecursionError):
        words = None
    if not isinstance(words, list) or not all(isinstance(word, str) and "=" in word for word in words):
        raise UserError(
            f"{KEYS_VARIABLE} is {text!r}.\n"
            """  allowed: a JSON list of keys, such as ["run.name=b", "train.steps=40"]\n"""
            f"  To do: unset {KEYS_VARIABLE}, or correct it."
        )
    return tuple(words)


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
        values = self.resolved.values.run
        return RunDir((self.request.started_in or Path()) / find_folder(values.root) / values.name)

    def with_default(self, dotted: str, value: Any, origin: str) -> Resolution:
        """The same resolution with `value` for a key that is not set."""
        loaded = self.loaded.with_default(dotted, value, origin)
        if loaded is self.loaded:
            return self
        return replace(self, loaded=loaded, resolved=resolve(loaded, self.resolved.circumstances))

    def under(self, **circumstances: Any) -> Resolution:
        """The same resolution under other circumstances; not for a run that the data has completed."""
        known = replace(self.resolved.circumstances, **circumstances)
        return replace(self, resolved=resolve(self.loaded, known))


def check_variables(loaded: LoadedRunFile) -> None:
    """Raise UserError for paths of a new run whose `$VARIABLES` are not set here."""
    paths = ("run.root", *(f"data.{name}" for name in ("path", "validation", "tokenizer", "chat_template", "cache")))
    problems = []
    blended = (("data.blend", part.path) for part in loaded.values.data.blend)
    keyed = ((dotted, str(value_of(loaded.values, dotted))) for dotted in (*paths, "model.hf", "train.compile_cache"))
    for dotted, value in (*keyed, *blended):
        if unset := list_unset(value):
            what = f'"{value}": ${unset[0]} is not set here'
            remedy = "set that variable, or write the path out"
            problems.append(Problem(dotted, what, loaded.origins[dotted], remedy=remedy))
    check_no_problems(str(loaded.path or "the command line"), problems)


def resolve_request(
    request: ResolveRequest, ranks: int = 1, ranks_per_node: int = 1, planned: Machine | None = None
) -> Resolution:
    """Read and resolve, for this machine or for one that is `planned`. Raises UserError with every problem."""
    return resolve_loaded(request, load_run(request.run_file, request.overrides), ranks, ranks_per_node, planned)


def resolve_loaded(
    request: ResolveRequest, loaded: LoadedRunFile, ranks: int = 1, per_node: int = 1, planned: Machine | None = None
) -> Resolution:
    """The same for a run file that is already loaded."""
    if request.directory is not None:
        # It is the run's root and name, so that `resolved.toml` leads back to it; that of `--dir` overrides the keys,
        # that of a script applies only if no key sets it.
        path = find_folder(request.directory)
        path = path if path.name not in ("", "..") else path.resolve()
        if not path.name:
            raise UserError(
                f"the run directory {request.directory} is the root of the file system; name a folder in it."
            )
        if not is_text(str(path)):
            raise UserError(
                f"the run directory {str(path)!a} is not UTF-8 text, and its name stands in text files.\n"
                "  To do: choose another name with --dir, or run.name in the run file."
            )
        for dotted, value in (("run.root", str(path.parent)), ("run.name", path.name)):
            if not request.own_model:
                loaded = loaded.with_value(dotted, value, "--dir")
            else:
                loaded = loaded.with_default(dotted, value, "shardway.start(directory=...)")
    values, machine = loaded.values, probe.probe_machine()
    site, known, hf, shape = site_of(loaded, machine), planned, values.model.hf, None
    if known is None and values.run.device != "cpu":
        described = site
        if site.node.accelerator is None:  # nodes like this one; the facts of the profile laptop are all detected
            own = load_site("laptop", lambda: machine).node
            facts = {"accelerator": own.accelerator, "accelerators_per_node": own.accelerators_per_node}
            described = site.model_copy(update={"node": site.node.model_copy(update=facts)})
        known = machine_of_known(described)
    if hf and (known or values.parallel.layout == "auto"):
        from shardway.plan.huggingface import read_shape

        with contextlib.suppress(UserError):  # of a family that the planner does not support
            shape = read_shape(hf)
    found = machine.accelerators if values.run.device != "cpu" else ()
    devices = tuple(dict.fromkeys(facts_of_cuda(each.name, each.capability) for each in found))
    before: dict[str, Any] = {}
    if not request.fresh:
        with contextlib.suppress(ShardwayError, OSError):  # reported when the run begins
            name = values.run.name if values.run.name != "auto" else loaded.file_name
            before = read_before(RunDir(find_folder(values.run.root) / name), values)
    circumstances = Circumstances(
        ranks=ranks,
        ranks_per_node=per_node,
        usable_cores=machine.usable_cores,
        accelerators=planned.per_node if planned else len(machine.accelerators),
        site=site.name,
        hf=_find_facts(hf) if hf else None,
        machine=known,
        shape=shape,
        own_model=request.own_model,
        local_disk=site.node.local_disk or "",
        devices=(facts_of_part(planned.accelerator),) if planned else devices,
        before=before,
    )
    return Resolution(request, loaded, resolve(loaded, circumstances))


def _find_facts(hf: str) -> ModelFacts:
    """The facts of model.hf, where its config.json has other names for them too. Raises UserError."""
    folder = locate_model(hf, weights=False)
    try:
        return read_facts(folder)
    except UserError:
        from shardway.plan.huggingface import facts_of_config

        facts = facts_of_config(folder)
        if facts is None:
            raise
        return facts


def read_before(run: RunDir, values: RunFile) -> dict[str, Any]:
    """The values that earlier attempts of a run used for the keys that follow the device. Empty if there is no
    checkpoint to resume from. Raises JobError, OSError if its record cannot be read."""
    if not run.checkpoint_steps() and values.checkpoint.local_every == "off":
        return {}
    saved, found = run.read_resolved(), dict[str, Any]()
    for section, name in (key.split(".") for key in DEVICE_KEYS):
        value = saved.get(section, {}).get(name, "auto")
        found |= {f"{section}.{name}": value} if value != "auto" else {}
    if saved.get("train", {}).get("tune", "off") == "auto":
        keys = (("train", "micro_batch"), *(("parallel", axis) for axis in AXES))
        whole = ((f"{section}.{name}", saved.get(section, {}).get(name)) for section, name in keys)
        found |= {key: value for key, value in whole if isinstance(value, int)}
    return found


def site_of(loaded: LoadedRunFile, machine: probe.LocalMachine | None = None) -> SiteProfile:
    """The profile that a run names, seen from this machine. Raises UserError, with the origin of an unknown name."""
    try:
        return load_site(loaded.values.site.name, lambda: machine or probe.probe_machine())
    except UnknownSite as error:
        raise UserError(f"site.name ({loaded.origins['site.name']}): {error}") from None


def machine_of_known(site: SiteProfile) -> Machine | None:
    """The machine of a site; None for nodes without accelerators, and if the catalogue lacks their memory and rates."""
    if not (site.node.accelerator and site.node.accelerators_per_node):
        return None
    part = load_accelerators().get(site.node.accelerator)
    if part is None or not (part.memory_bytes and part.peak_flops):
        return None
    from shardway.plan.case import machine_of_site

    return machine_of_site(site)
