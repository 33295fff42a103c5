"""`shardway bench step`: a tiny run under its roofline, what its numbers add up to, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import pytest
from command_line import Ended, Shardway

from runs import TINY, TINY_IMAGES
from shardway.bench import kernels
from shardway.bench.step import count_update, find_utilisation, list_formats, read_site_ceilings
from shardway.errors import UserError
from shardway.hardware.catalogue import load_accelerators
from shardway.plan.case import Case
from shardway.resolve.planned import case_of, shape_of_run
from shardway.resolve.request import ResolveRequest, resolve_request
from shardway.runfile.schema import RunFile
from shardway.sites.load import keep_profile, load_site
from shardway.watch.trace.groups import CallWork, GroupTime, measure_groups
from shardway.watch.trace.reader import read_trace
from shardway.watch.trace.timeline import build_timeline

WORDS = ("bench", "step", *TINY, "run.name=my", "--steps", "2", "--after", "3", "--seconds", "0.01")


@pytest.fixture(autouse=True)
def _small_ceilings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Ceilings that are measured at once, and a place of its own for profiles that a test keeps."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(kernels, "PEAK_SIDES", MappingProxyType({"cpu": (64,)}))
    monkeypatch.setattr(kernels, "PEAK_COPY", MappingProxyType({"cpu": 2**20}))


def values_of(*words: str, base: Sequence[str] = TINY) -> RunFile:
    return resolve_request(ResolveRequest(None, (*base, *words)), 1, 1).resolved.values


def case_and_groups(folder: Path) -> tuple[Case, dict[str, GroupTime]]:
    """The planner's case of the tiny run, and the groups of its captured step."""
    values = values_of()
    [trace] = folder.glob("runs/my-step/traces/*.json.gz")
    groups = {each.group: each for each in measure_groups(build_timeline(read_trace(trace)))}
    return case_of(values, shape_of_run(values)), groups


def test_a_tiny_run_under_its_roofline(shardway: Shardway, tmp_path: Path) -> None:
    ended = shardway(*WORDS, "--json", "step.json", "--html", "step.html")
    assert ended.code == 0, ended
    facts = json.loads((tmp_path / "step.json").read_text())
    check_sums(facts)
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["my-step"]
    assert list((tmp_path / "runs/my-step/checkpoints").iterdir()) == []
    assert (facts["format"], facts["steps"], facts["run"]["format"], facts["run"]["device"]) == (1, 2, "fp32", "CPU")
    assert list(facts["ceilings"]["products_flop_per_s"]) == ["fp32"]
    assert facts["ceilings"]["source"].startswith("measured on 1 thread in ")
    names = {each["group"] for each in facts["groups"]}
    assert {"attention", "products", "output", "norms", "elementwise", "optimizer", "other"} <= names
    lines = ended.out.splitlines()
    at = lines.index("Verdict")
    assert " ".join(line.removeprefix("- ").strip() for line in lines[at + 1 : -1]) == " ".join(facts["verdict"])
    assert lines[-1] == "wrote step.html"
    page = (tmp_path / "step.html").read_text()
    assert "<svg" in page
    assert "<script" not in page
    check_model_flop(facts, tmp_path)
    [update] = [each for each in facts["groups"] if each["group"] == "optimizer"]
    parameters = case_and_groups(tmp_path)[0].model.parameters
    assert update["unknown_ms"] == 0.0
    assert 28 * parameters < update["bytes"] < 60 * parameters  # the update, and the norm and scale of gradients


def check_sums(facts: Mapping[str, object]) -> None:
    groups = facts["groups"]
    assert isinstance(groups, list)
    total = sum(each["ms"] for each in groups) + facts["idle_ms"]
    assert total == pytest.approx(facts["step_ms"], rel=1e-6)
    floors = sum(each["floor_ms"] or 0.0 for each in groups)
    assert floors == pytest.approx(facts["floor_ms"], rel=1e-9)
    for each in groups:
        if each["reached"] is not None:
            known = each["busy_ms"] - each["unknown_ms"]
            assert each["reached"] == pytest.approx(each["floor_ms"] / known, rel=1e-9)


def check_model_flop(facts: Mapping[str, object], folder: Path) -> None:
    """Products are the planner's to the last FLOP. Attention is performed 3.5 times where it counts 3, and half of the
    scores where it counts a token's own one too: s / (s + 1)."""
    case, groups = case_and_groups(folder)
    model, seq, tokens = case.model, case.seq_len, case.tokens_per_step
    operators = [each for group in groups.values() for each in group.operators]
    products = sum(each.flop or 0.0 for each in operators if each.kind == "product")
    core = sum(run.count * run.layer.core_flops_per_token(seq, True) for run in model.runs)
    forward = model.forward_flops_per_token(seq, causal=True)
    assert products == 3 * (forward - core) * tokens
    attention = sum(each.flop or 0.0 for each in operators if each.kind == "attention")
    assert attention == pytest.approx(3.5 * core * tokens * seq / (seq + 1), rel=1e-12)
    found = facts["utilisation"]
    assert isinstance(found, dict)
    assert found["model_flop"] == model.flops_per_token(seq, causal=False) * tokens
    assert found["model_flop_causal"] == model.flops_per_token(seq, causal=True) * tokens
    head = 2 * model.hidden * 32 * tokens
    output = sum(each.flop or 0.0 for each in groups["output"].operators if each.kind == "product")
    assert output == 3 * head  # not the products of the blocks, although these are 32 wide too


def test_json_alone_is_on_stdout(shardway: Shardway) -> None:
    ended = shardway(*WORDS, "train.steps=6", "--json", "-")
    assert ended.code == 0, ended
    facts = json.loads(ended.out)
    assert facts["steps"] == 1
    check_sums(facts)


# --- refusals


def refused(ended: Ended, *parts: str) -> None:
    assert (ended.code, ended.out) == (2, ""), ended
    for part in parts:
        assert part in ended.err, ended.err


def test_every_mistake_is_reported_before_a_step(shardway: Shardway, tmp_path: Path) -> None:
    ended = shardway("bench", "step", *TINY, "--seconds", "0", "--html", "gone/step.html", "--json", ".")
    refused(
        ended,
        "3 problems in the command line",
        "--seconds (command line): 0 is no time to measure in\n      allowed: a number above 0",
        "--html (command line): the folder gone does not exist",
        "--json (command line): . is a folder",
    )
    refused(shardway("bench", "step", "train.stepz=3"), "train.stepz")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("more", "allowed"), [((), "0"), (("--nproc", "2"), "0 to 1")])
def test_a_rank_that_the_run_has_not_is_refused_before_a_step(
    more: tuple[str, ...], allowed: str, shardway: Shardway, tmp_path: Path
) -> None:
    for words in (WORDS, ("profile", *TINY)):
        ended = shardway(*words, "--rank", "5", *more)
        refused(ended, "--rank (command line): 5 is no rank of this run, which has", f"allowed: {allowed}\n")
    assert not (tmp_path / "runs").exists()


def test_a_site_without_measured_ceilings_is_refused(shardway: Shardway, tmp_path: Path) -> None:
    ended = shardway(*WORDS, "--site", "leonardo-booster")
    refused(
        ended,
        "--site (command line): the profile leonardo-booster has no measured.matmul and no measured.memory",
        "to do: leave out --site: the ceilings are then measured here",
    )
    assert not (tmp_path / "runs").exists()


def test_a_run_that_ends_before_the_first_step_to_capture_is_refused(shardway: Shardway) -> None:
    ended = shardway(*WORDS, "train.steps=2", "optim.warmup=1 steps")
    assert ended.code == 2, ended
    assert "the run ended before step 4 (train.steps), the first to be captured" in ended.err
    assert "set train.steps to 7 or more, or lower --after (now 3)" in ended.err


# --- parts


OURS = (
    'format = 1\nname = "ours"\ntitle = "Ours"\nextends = "leonardo-booster"\n\n'
    "[measured]\nmatmul = 0.8\nmemory = 0.9\nmatmul_low = 0.7\n"
)


def test_ceilings_of_another_device_are_named(shardway: Shardway) -> None:
    keep_profile("ours", OURS)
    ended = shardway(*WORDS, "train.steps=6", "--site", "ours", "--json", "-")
    facts = json.loads(ended.out)
    assert facts["ceilings"]["source"] == "[measured] of the site ours"
    part = load_site("ours").node.accelerator
    said = f"the ceilings are those of {part}, and the step ran on a CPU; to do: leave out --site"
    assert said in facts["verdict"]


def test_ceilings_of_a_site_are_its_factors_of_the_rated_peaks() -> None:
    keep_profile("ours", OURS)
    ceilings = read_site_ceilings("ours")
    part = load_accelerators()[str(load_site("ours").node.accelerator)]
    assert ceilings.products["bf16"] == pytest.approx(0.8 * part.peak_flops["bf16"], rel=1e-12)
    assert ceilings.bytes_per_s == pytest.approx(0.9 * (part.memory_bandwidth_bytes_per_s or 0.0), rel=1e-12)
    assert ceilings.source == "[measured] of the site ours"
    with pytest.raises(UserError, match=r"no accelerator"):
        read_site_ceilings("generic-slurm")


def test_an_update_moves_28_bytes_a_parameter_of_adamw_in_fp32() -> None:
    stated = {"shardway_updated": "100", "shardway_updated_bytes": "400"}
    assert count_update(stated, values_of()) == CallWork(1400.0, 2800.0)
    assert count_update(stated, values_of("optim.state_dtype=bf16")).bytes == 2000.0
    assert count_update(stated, values_of("optim.name=sgd")).bytes == 2000.0
    assert count_update({}, values_of()) == CallWork()


def test_a_model_without_a_plan_has_no_utilisation() -> None:
    assert find_utilisation(values_of(base=TINY_IMAGES), None) is None


def test_formats_are_those_of_the_run_and_of_its_products() -> None:
    assert list_formats([], values_of()) == ("fp32",)
    assert list_formats([], values_of("precision.compute=bf16")) == ("bf16",)
