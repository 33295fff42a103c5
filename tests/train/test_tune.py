"""`train.tune = "auto"`: what is chosen from invented times; and in whole runs, by an invented clock, that the choice
is used, said, kept and resumed, and that nothing else of the tries is left."""

from __future__ import annotations

import contextlib
import gc
import html
import json
import random
import tomllib
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo.utils

from pool import ranks
from runs import COMMON, Signalled, layout, lone_rank, open_tiny, pool_ranks, read_column, read_named, train_tiny
from shardway.data.open import open_described
from shardway.errors import UserError
from shardway.hardware.catalogue import facts_of_cuda
from shardway.parallel import apply
from shardway.parallel.blocks import apply_compile
from shardway.plan.case import machine_of_site
from shardway.ranks.start import Ranks
from shardway.resolve import Circumstances, resolve
from shardway.resolve.draft import Draft
from shardway.resolve.request import Resolution, ResolveRequest, resolve_request
from shardway.resolve.rules import formats
from shardway.resolve.rules import tuning as rules
from shardway.resolve.rules.formats import COMPILE, COMPUTE
from shardway.resolve.rules.tuning import MICRO, explain_untried
from shardway.rundir.directory import RunDir
from shardway.runfile.load import load_run
from shardway.runfile.schema import RunFile
from shardway.sites.load import load_site
from shardway.train import tune as tuning
from shardway.train.run import RunOutcome, _build_timed, train_run
from shardway.train.tune import TrialSteps, TuneCache, is_enough, list_sizes
from shardway.train.tune_choice import TrialResult, TuneChoice, TuneSpace, search
from shardway.watch.report import render_report
from shardway.watch.words import PlainLines

# --- the choice, from invented times

LOSSES = (4.0, 3.5, 3.0, 2.7, 2.5, 2.4, 2.3)
SPACE = TuneSpace(
    {COMPILE: "off", MICRO: 4, COMPUTE: "bf16"},
    [(COMPILE, [["blocks"]]), (MICRO, [[8, 16], [2, 1]]), (COMPUTE, [["float8"]])],
    {COMPILE: "blocks", MICRO: 4, COMPUTE: "bf16"},
)
Invented = Mapping[tuple[Any, ...], float | str | TrialResult]


def choose(times: Invented, space: TuneSpace = SPACE) -> tuple[TuneChoice, list[tuple[Any, ...]]]:
    """The choice, and the values that were tried, in order. A number is seconds, a text why it failed."""
    trials, asked = search(space), list[tuple[Any, ...]]()
    try:
        values = next(trials)
        while True:
            asked.append(tuple(values.values()))
            found = times[asked[-1]]
            if isinstance(found, str):
                found = TrialResult(values, failure=found)
            elif not isinstance(found, TrialResult):
                found = TrialResult(values, found, steps=9, losses=LOSSES)
            values = trials.send(found)
    except StopIteration as stop:
        return stop.value, asked


def test_each_axis_is_tried_against_the_fastest_so_far() -> None:
    choice, asked = choose(
        {
            ("off", 4, "bf16"): 1.0,
            ("blocks", 4, "bf16"): 0.8,
            ("blocks", 8, "bf16"): 0.7,
            ("blocks", 16, "bf16"): 0.69,
            ("blocks", 8, "float8"): 0.5,
        }
    )
    assert [each[0] for each in asked] == ["off", *["blocks"] * 4]
    assert choice.values == {COMPILE: "blocks", MICRO: 8, COMPUTE: "float8"}
    assert (
        choice.describe()
        == "compiled blocks (1.25 times eager), micro-batch 8 (1.14 times 4), float8 (1.40 times bf16)"
    )


def test_what_wins_by_no_more_than_the_margin_does_not_count() -> None:
    """And of two directions the second is tried where the first has not won."""
    choice, asked = choose(
        {
            ("off", 4, "bf16"): 1.0,
            ("blocks", 4, "bf16"): 0.985,
            ("off", 8, "bf16"): 1.2,
            ("off", 2, "bf16"): 0.9,
            ("off", 1, "bf16"): 0.95,
            ("off", 2, "float8"): 0.95,
        }
    )
    assert choice.values == {COMPILE: "off", MICRO: 2, COMPUTE: "bf16"}
    assert choice.describe() == (
        "eager (compiled blocks: 1.02 times as fast), micro-batch 2 (1.11 times 4), bf16 (float8: 0.95 times as fast)"
    )
    assert len(asked) == 6


@pytest.mark.parametrize(("spread", "chosen"), [(0.01, "blocks"), (0.06, "off")])
def test_what_wins_by_no_more_than_the_times_vary_does_not_count(spread: float, chosen: str) -> None:
    space = TuneSpace({COMPILE: "off"}, [(COMPILE, [["blocks"]])])
    noisy = TrialResult({COMPILE: "blocks"}, 0.9, spread, 9, 0.0, LOSSES)
    first = TrialResult({COMPILE: "off"}, 1.0, spread, 9, 0.0, LOSSES)
    choice = choose({("off",): first, ("blocks",): noisy}, space)[0]
    assert choice.values == {COMPILE: chosen}
    assert choice.decided == (chosen == "blocks")
    if not choice.decided:
        why = "eager (compiled blocks: 1.11 times as fast, which is not sure: the times vary by 12 %)"
        assert choice.describe() == why
    slower = replace(noisy, seconds=1.1)
    assert choose({("off",): first, ("blocks",): slower}, space)[0].decided


def test_a_choice_that_is_not_sure_is_measured_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "spread_of", lambda rounds: 0.9)
    with invented(lambda values: 0.5 if values.train.compile == "blocks" else 0.87) as tried:
        for folder in ("first", "second"):
            train_tuned(tmp_path / folder, lone_rank(), FEW)
            assert (
                "eager (compiled blocks: 1.74 times as fast, which is not sure"
                in read_tuned(tmp_path / folder)["reason"]
            )
            assert tried
            tried.clear()


@pytest.mark.parametrize(
    ("key", "value", "losses", "failure"),
    [
        (COMPILE, "blocks", (4.0, 3.6), "the loss of step 2 is 3.6 in place of 3.5"),
        (COMPILE, "blocks", (4.03, 3.51), ""),
        (COMPILE, "blocks", (4.0, float("nan")), "the loss of step 2 is not finite"),
        (COMPUTE, "float8", (4.0, 3.6), ""),
        (COMPUTE, "float8", (4.0, 3.7), "the loss of step 2 is 3.7 in place of 3.5"),
        (COMPILE, "blocks", (*LOSSES[:6], 9.9), ""),  # chaos after some steps is no error
    ],
)
def test_what_has_other_losses_is_left_out_and_named(
    key: str, value: str, losses: tuple[float, ...], failure: str
) -> None:
    first = {COMPILE: "off", COMPUTE: "bf16"}
    other = TrialResult({**first, key: value}, 0.1, losses=losses)
    space = TuneSpace(first, [(key, [[value]])], first)
    choice, _ = choose({("off", "bf16"): 1.0, tuple(other.values.values()): other}, space)
    assert choice.comparisons[-1].tried.failure == failure
    assert choice.values == ({**first, key: value} if not failure else first)
    assert failure in choice.describe()


def test_where_the_first_fails_the_next_that_can_be_measured_counts() -> None:
    choice, asked = choose(
        {
            ("off", 4, "bf16"): "out of memory",
            ("blocks", 4, "bf16"): "out of memory",
            ("off", 2, "bf16"): 1.0,
            ("off", 1, "bf16"): 0.7,
            ("off", 1, "float8"): "out of memory",
        }
    )
    assert choice.values == {COMPILE: "off", MICRO: 1, COMPUTE: "bf16"}
    assert choice.describe() == (
        "eager: out of memory, eager (compiled blocks: out of memory), micro-batch 1 (the first that could be "
        "measured), bf16 (float8: out of memory)"
    )
    assert len(asked) == 5


def test_what_there_was_no_time_for_stays_as_it_was() -> None:
    late = TrialResult({**SPACE.first, COMPILE: "blocks"}, untried="90 s were over")
    over = {
        ("off", size, kind): TrialResult({MICRO: size, COMPUTE: kind}, untried="90 s were over")
        for size, kind in ((8, "bf16"), (2, "bf16"), (4, "float8"))
    }
    choice, _ = choose({("off", 4, "bf16"): 1.0, ("blocks", 4, "bf16"): late, **over})
    assert choice.values == SPACE.usual
    assert choice.list_untried() == dict.fromkeys(
        ("compiled blocks", "micro-batch 8", "micro-batch 2", "float8"), "90 s were over"
    )
    assert choice.describe() == ""


def test_sizes_cut_a_share_evenly_and_double_or_halve() -> None:
    assert list_sizes(16, 4) == ([8, 16], [2, 1])
    assert list_sizes(12, 3) == ([6, 12], [1])
    assert list_sizes(7, 7) == ([], [1])


def test_a_try_ends_when_its_median_is_known_or_after_some_seconds() -> None:
    assert not is_enough([0.5] * 4, 1)
    assert is_enough([0.5] * 5, 1)
    assert not is_enough([0.1, 0.2, 0.1, 0.2, 0.1], 2)
    assert is_enough([1.0, 2.0, 1.0, 2.0, 1.0], 1)


# --- what is tried at all

LONG = "train.steps=1000"


def untried(key: str, *words: str, **circumstances: Any) -> str:
    """Why a key is not tried in a run of a command line."""
    loaded = load_run(None, ("run.device=cpu", "train.tune=auto", LONG, *words))
    resolved = resolve(loaded, Circumstances(**circumstances))
    return explain_untried(
        Draft(replace(loaded, values=resolved.values, origins=resolved.origins), resolved.circumstances), key
    )


@pytest.mark.parametrize(
    ("key", "words", "why"),
    [
        (COMPILE, (), ""),
        (COMPILE, ("train.compile=off",), "train.compile is set"),
        (COMPILE, ("train.steps=50",), "compiling takes longer than it saves in 50 steps"),
        (COMPILE, ("train.deterministic=true",),
         "train.deterministic: a compiler may choose other kernels in each run"),
        (COMPILE, ("data.kind=text", "data.path=x", "data.pack=true"),
         "each batch has another shape or other documents (data.pack), which made-up ones lack"),
        (MICRO, (), ""),
        (MICRO, ("train.micro_batch=2",), "train.micro_batch is set"),
        (MICRO, ("train.global_batch=1",), "a rank has one sample of a step"),
        (MICRO, ("model.dropout=0.1",), "masks of dropout follow the micro-batch"),
        (MICRO, ("model.experts=4",), "experts are balanced in each micro-batch"),
        (MICRO, ("model.kind=convnet", "data.kind=synthetic"), "batch norms look at one micro-batch"),
        (COMPUTE, (), "a CPU has no float8 products"),
        (COMPUTE, ("precision.compute=bf16",), "precision.compute is set"),
    ],
)  # fmt: skip
def test_why_a_key_is_not_tried(key: str, words: tuple[str, ...], why: str) -> None:
    assert untried(key, *words) == why


def test_a_layout_that_the_planner_has_chosen_stays() -> None:
    """The ranks are laid out when values are tried, and the fastest layout may be another one with them."""
    words = (
        "run.device=cuda",
        "train.tune=auto",
        "parallel.layout=auto",
        LONG,
        "model.vocab=512",
        "train.global_batch=64",
    )
    h100 = replace(facts_of_cuda("NVIDIA H100", (9, 0)), no_compiler="")
    ranks_of = {"ranks": 8, "ranks_per_node": 8, "accelerators": 8}
    facts = Circumstances(**ranks_of, machine=machine_of_site(load_site("dgx-slurm")), devices=(h100,))
    loaded = load_run(None, words)
    resolved = resolve(loaded, facts)
    resolution = Resolution(ResolveRequest(overrides=words), loaded, resolved)
    space, _ = tuning.find_space(resolution, resolved)
    assert space.first == {**space.usual, COMPILE: "off"}
    assert space.usual[COMPILE] == "blocks"
    pinned = tuning.pin_layout(resolution, resolved).loaded
    for key, value in {COMPILE: "off", MICRO: 2}.items():
        pinned = pinned.with_value(key, value, "measured: tried")
    tried = resolve(pinned, facts)
    assert tried.values.parallel == resolved.values.parallel
    assert (tried.values.train.micro_batch, tried.derived.accumulation) == (2, 64 // 8 // 2)
    assert tried.is_derived(MICRO)


# --- whole runs, by an invented clock

SHORT = "train.steps=12"
FEW = "train.micro_batch=8"
"""So that blocks alone are tried."""
SECONDS = {"off": 0.5, "blocks": 0.4}


def cost(values: RunFile) -> float:
    """Invented seconds of a step: compiled blocks are faster, and so are micro-batches of 4 samples."""
    return SECONDS[str(values.train.compile)] * (1.0 if values.train.micro_batch == 4 else 1.2)


@contextlib.contextmanager
def invented(
    seconds: Callable[[RunFile], float] = cost,
    before: Callable[[Any], None] | None = None,
    backend: str = "",
    cache: Path | None = None,
) -> Iterator[list[Any]]:
    """Time goes by in the steps of tries alone; gives the values that were tried. Blocks are compiled by a backend
    without generated code, or else run as they are. `cache`: of ranks of the pool, which have one home for all
    tests."""
    now, tried, take = [0.0], list[Any](), TrialSteps.take

    def timed(self: TrialSteps, count: int) -> list[float]:
        if self._done == 0:
            tried.append((self.values.train.compile, self.values.train.micro_batch))
        losses = take(self, count)
        if before is not None:
            before(self)
        now[0] += seconds(self.values) * count
        return losses

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrialSteps, "take", timed)
        patch.setattr(tuning, "tune", partial(tuning.tune, clock=lambda: now[0]))
        compiling = partial(apply_compile, backend=backend) if backend else lambda *_: None
        patch.setattr(apply, "apply_compile", compiling)
        if cache is not None:
            patch.setenv("XDG_CACHE_HOME", str(cache))
        for module in (formats, rules):
            patch.setattr(module, "SHORT_RUN", 10)
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(Path.home() / "compiled"))
        yield tried


def train_tuned(directory: Path, on: Ranks, *words: str) -> RunOutcome:
    return train_tiny(directory, on, SHORT, "train.tune=auto", "run.telemetry=off", *words)


def read_origins(directory: Path) -> dict[str, str]:
    """The values and origins of what may be tuned, as resolved.toml has them."""
    lines = RunDir(directory).resolved_path.read_text(encoding="utf-8").splitlines()
    named = {line.partition(" = ")[0]: line.partition(" = ")[2] for line in lines if " = " in line}
    return {name: " ".join(named[name].split()) for name in ("compile", "micro_batch")}


def read_tuned(directory: Path) -> dict[str, Any]:
    (event,) = read_named(directory, "tuned")[-1:]
    return event


def check_as_by_hand(directory: Path, on: Ranks, *words: str, backend: str = "") -> None:
    """A tuned run has the bits of one with the same values by hand, and says what it has chosen."""
    with invented(backend=backend, cache=directory / "cache") as tried:
        train_tuned(directory / "tuned", on, *words)
        train_tiny(directory / "by hand", on, SHORT, "train.compile=blocks", "train.micro_batch=4", *words)
    if not on.is_first:
        return
    assert ("off", 8 // on.world) in tried
    for name in ("loss", "grad_norm", "position"):
        assert read_column(directory / "tuned", name) == read_column(directory / "by hand", name)
    event = read_tuned(directory / "tuned")
    assert event["values"] == {COMPILE: "blocks", MICRO: 4}
    assert [each["values"][COMPILE] for each in event["candidates"]][:2] == ["off", "blocks"]
    assert PlainLines().lines(event) == [event["reason"]]


@pytest.mark.filterwarnings("default")  # the compiler's own imports and graphs warn
def test_a_tuned_run_is_the_one_with_these_values_by_hand(tmp_path: Path) -> None:
    check_as_by_hand(tmp_path, lone_rank(), backend="aot_eager")
    found = read_origins(tmp_path / "tuned")
    assert found["compile"].startswith('"blocks" # measured: 1.25 times eager on ')
    assert found["micro_batch"].startswith("4 # measured: 1.20 times 8 on ")
    assert found["micro_batch"].endswith("(train.tune)")
    (reason,) = PlainLines().lines(read_tuned(tmp_path / "tuned"))
    assert reason == (
        "tuned in 16 s: compiled blocks (1.25 times eager), micro-batch 4 (1.20 times 8); "
        "not tried: float8 (a CPU has no float8 products)"
    )


@ranks(2)
def test_shards_are_tuned_alike_on_all_ranks(rank: int, tmp_path: Path) -> None:
    check_as_by_hand(tmp_path, pool_ranks(), *layout(1, 2))


@ranks(2)
def test_the_slowest_rank_counts(rank: int, tmp_path: Path) -> None:
    slow = {"off": 0.5, "blocks": 0.5 if rank == 0 else 0.6}
    with invented(lambda values: slow[str(values.train.compile)], cache=tmp_path / "cache"):
        train_tuned(tmp_path, pool_ranks(), *layout(2, 1), "train.micro_batch=4")
    if rank == 0:
        assert read_tuned(tmp_path)["reason"].startswith("tuned in 8 s: eager (compiled blocks: 0.83 times as fast); ")


@ranks(2)
def test_a_rank_without_memory_ends_the_try_of_all(rank: int, tmp_path: Path) -> None:
    def fail(trial: TrialSteps) -> None:
        if rank == 1 and trial.values.train.compile == "blocks":
            raise torch.OutOfMemoryError("CUDA out of memory")

    with invented(before=fail, cache=tmp_path / "cache"):
        train_tuned(tmp_path, pool_ranks(), *layout(2, 1), "train.micro_batch=4")
    if rank == 0:
        assert read_tuned(tmp_path)["reason"].startswith("tuned in 4 s: eager (compiled blocks: out of memory); ")
        assert len(read_column(tmp_path)) == 12


def test_images_are_tuned_too(tmp_path: Path) -> None:
    words = (
        "model.kind=vit",
        "data.shape=[1, 8, 8]",
        "model.patch=4",
        "model.classes=4",
        "model.dim=16",
        "model.heads=2",
    )
    with invented():
        train_tiny(tmp_path, lone_rank(), SHORT, "train.tune=auto", *words, base=COMMON)
    assert read_tuned(tmp_path)["values"] == {COMPILE: "blocks", MICRO: 4}


@ranks(2)
def test_a_pipeline_is_tuned(rank: int, tmp_path: Path) -> None:
    with invented(lambda values: 0.5 if values.train.micro_batch == 2 else 0.8, cache=tmp_path / "cache"):
        train_tuned(tmp_path, pool_ranks(), "parallel.pp=2", "parallel.dp_replicate=1", "model.tied=false")
    if rank == 0:
        assert read_tuned(tmp_path)["values"] == {COMPILE: "off", MICRO: 2}


def test_a_second_start_takes_what_the_first_has_measured(tmp_path: Path) -> None:
    with invented() as tried:
        train_tuned(tmp_path / "first", lone_rank(), FEW)
        assert len(tried) == 2
        train_tuned(tmp_path / "second", lone_rank(), FEW, "optim.lr=1e-3")
        assert len(tried) == 2
        (path,) = list_kept()
        path.write_text(path.read_text().replace(f'"{COMPILE}": "blocks"', f'"{COMPILE}": "bricks"'))
        train_tuned(tmp_path / "damaged", lone_rank(), FEW)
        assert len(tried) == 4
    first, second = read_tuned(tmp_path / "first"), read_tuned(tmp_path / "second")
    assert second["values"] == first["values"] == {COMPILE: "blocks"}
    assert first["reason"] in html.unescape(render_report(RunDir(tmp_path / "first")))
    assert second["reason"].startswith("tuned on 2")
    assert second["reason"].endswith(first["reason"].partition(": ")[2])
    assert read_origins(tmp_path / "second") == read_origins(tmp_path / "first")
    assert read_tuned(tmp_path / "damaged")["reason"].endswith(f"({path} does not fit here, and is written anew)")


def test_another_run_has_another_choice(tmp_path: Path) -> None:
    def name(*words: str) -> str:
        with open_tiny(tmp_path, lone_rank(), "train.tune=auto", "train.steps=120", *words) as run:
            found = tuning.Tuning(run.session, data := open_described(run.resolved.values), _build_timed, float)
            facts = tuning.list_facts(["a CPU"], found.space, found.resolved, data)
            return str(TuneCache(tmp_path, facts, tmp_path).path)

    assert name() == name("train.steps=140", "optim.lr=1e-3", "data.samples=90", "train.validate_every=5")
    others = (
        "model.layers=3",
        "data.seq_len=14",
        "train.global_batch=4",
        "optim.name=sgd",
        "train.compile=off",
        "run.threads=2",
    )
    assert len({name(), *map(name, others)}) == 1 + len(others)


def test_a_resumed_run_keeps_what_it_computed_with(tmp_path: Path) -> None:
    words = ("checkpoint.every=6 steps", "optim.schedule=constant")
    with invented() as tried:
        train_tiny(tmp_path / "run", lone_rank(), "train.tune=auto", SHORT, *words)
        assert len(tried) == 4
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))
            train_tiny(tmp_path / "run", lone_rank(), "train.tune=auto", "train.steps=18", *words)
        train_tiny(tmp_path / "whole", lone_rank(), "train.steps=18", "train.compile=blocks", "train.micro_batch=4",
                   *words)  # fmt: skip
        assert len(tried) == 4
    assert read_column(tmp_path / "run") == read_column(tmp_path / "whole")
    assert read_tuned(tmp_path / "run")["reason"] == (
        "train.tune measures nothing; not tried: compiled blocks (as this run computed before), other micro-batches "
        "(as this run computed before), float8 (as this run computed before)"
    )
    with invented(), open_tiny(tmp_path / "run", lone_rank(), "train.tune=auto", "train.micro_batch=2", SHORT) as run:
        assert run.resolved.values.train.micro_batch == 2


def test_a_run_that_is_asked_to_stop_tries_nothing_more(tmp_path: Path) -> None:
    with invented() as tried, open_tiny(tmp_path, lone_rank(), SHORT, "train.tune=auto") as run:
        run.session.signals = Signalled()
        assert train_run(run).state == "stopped"
    assert tried == []
    assert "the run was asked to stop" in read_tuned(tmp_path)["reason"]
    assert not list_kept()


def test_the_budget_ends_the_tries(tmp_path: Path) -> None:
    with invented(lambda values: 7.0):
        train_tuned(tmp_path, lone_rank())
    event = read_tuned(tmp_path)
    assert event["reason"].startswith(
        "tuned in 91 s: nothing was compared; not tried: compiled blocks (90 s were over), "
    )
    assert [each["untried"] for each in event["candidates"]] == ["", *["90 s were over"] * 2]
    assert read_origins(tmp_path)["compile"] == '"off" # measured: not tried, 90 s were over: a CPU'
    assert not list_kept()


# --- what a start leaves behind


def list_kept() -> list[Path]:
    """The files of the cache."""
    return sorted((Path.home() / ".cache" / "shardway" / "tuned").glob("*"))


def take_random() -> tuple[list[int], object, list[int]]:
    """The states of the generators of this process."""
    state: Any = np.random.get_state()
    return torch.get_rng_state().tolist(), random.getstate(), state[1].tolist()


def test_nothing_of_the_tries_is_left_in_the_process(tmp_path: Path) -> None:
    made = list[weakref.ref[Any]]()

    def look(trial: TrialSteps) -> None:
        made.append(weakref.ref(trial._model))
        random.random()
        np.random.seed(torch.randint(99, ()).item())

    with invented(before=look), open_tiny(tmp_path, lone_rank(), SHORT, "train.tune=auto") as run:
        before = take_random()
        tuning.tune(run.session, open_described(run.resolved.values), _build_timed)
        assert take_random() == before
        gc.collect()
        assert len(made) > 20
        assert {each() for each in made} == {None}
        assert not torch._dynamo.utils.counters
        assert not run.session.recorder.is_open
        assert run.session.to_write == []


def test_a_try_that_ended_a_start_is_not_tried_again(tmp_path: Path) -> None:
    """As long as the run goes on from no checkpoint; another run tries it."""

    class Killed(BaseException):
        """The end of the process."""

    def die(trial: TrialSteps) -> None:
        if trial.values.train.compile == "blocks":
            raise Killed

    with invented(before=die), pytest.raises(Killed):
        train_tuned(tmp_path / "run", lone_rank(), FEW)
    assert json.loads(list_kept()[0].read_text())["tried"] == [{COMPILE: "blocks"}]
    with invented() as tried:
        train_tuned(tmp_path / "run", lone_rank(), FEW)
        assert tried == [("off", 8)]
        failure = "eager (compiled blocks: an earlier start of this run ended in it)"
        assert failure in read_tuned(tmp_path / "run")["reason"]
        assert json.loads(list_kept()[0].read_text())["tried"] == [{COMPILE: "blocks"}]
        train_tuned(tmp_path / "another", lone_rank(), FEW)
        assert ("blocks", 8) in tried


FACTS = {"devices": ["a CPU"]}
CHOICE = {"values": {COMPILE: "off"}, "origins": {COMPILE: "1.2 times"}, "text": "eager", "date": "2026-11-27"}


def test_a_choice_is_kept_for_the_same_facts_alone(tmp_path: Path) -> None:
    cache = TuneCache(tmp_path / "tuned", FACTS, tmp_path / "run")
    assert cache.read() is None
    cache.write(CHOICE)
    kept = TuneCache(tmp_path / "tuned", FACTS, tmp_path / "elsewhere").read()
    assert kept is not None
    assert kept["values"] == {COMPILE: "off"}
    assert TuneCache(tmp_path / "tuned", {"devices": ["another"]}, tmp_path / "run").read() is None


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "null", '{"values": 3}', '{"facts": {"devices": ["a CPU"]}}', "\0\xff"]
)
def test_a_damaged_file_is_written_anew(content: str, tmp_path: Path) -> None:
    cache = TuneCache(tmp_path, FACTS, tmp_path / "run")
    cache.write(CHOICE)
    assert cache.path is not None
    cache.path.write_text(content, encoding="latin-1")
    assert cache.read() is None
    assert cache.trouble == f"{cache.path} is damaged, and is written anew"
    cache.write(CHOICE)
    assert cache.read() is not None


def test_a_folder_that_takes_no_files_costs_nothing_but_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with invented():
        train_tuned(tmp_path / "run", lone_rank(), FEW)
    assert read_tuned(tmp_path / "run")["values"] == {COMPILE: "blocks"}
    assert "the choice is not kept: " in read_tuned(tmp_path / "run")["reason"]


def test_a_script_measures_nothing() -> None:
    with pytest.raises(UserError, match="a script builds its model itself"):
        resolve_request(ResolveRequest(overrides=("train.tune=auto",), own_model=True))


@pytest.mark.parametrize(
    ("name", "capability", "why"),
    [
        ("NVIDIA H100 80GB HBM3", (9, 0), "torchao is not installed"),
        ("NVIDIA A100-SXM4-80GB", (8, 0), "NVIDIA A100-SXM4-80GB has no float8 products"),
        ("Tesla V100-SXM2-32GB", (7, 0), "Tesla V100-SXM2-32GB has no float8 products"),
    ],
)
def test_float8_is_tried_where_device_and_library_have_it(
    name: str, capability: tuple[int, int], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "find_spec", lambda name: None)
    devices = (facts_of_cuda(name, capability),)
    assert untried(COMPUTE, "run.device=cuda", devices=devices, accelerators=1) == why
    monkeypatch.setattr(rules, "find_spec", lambda name: name)
    assert (untried(COMPUTE, "run.device=cuda", devices=devices, accelerators=1) == "") == (capability == (9, 0))


def test_what_a_command_shows_says_that_it_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where no default run was trained before
    text = resolve_request(ResolveRequest(overrides=("run.device=cpu", "train.tune=auto", LONG))).resolved.render()
    assert tomllib.loads(text)["train"]["tune"] == "auto"
    assert text.count("; measured at the start (train.tune)") == 2
