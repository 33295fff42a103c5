"""Advice: the first finding names what is wrong, and a healthy job, a damaged one and unknown hardware get none."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from outside import modules_of
from page_tables import check_part
from shardway.hardware.probe import find_other_cudnn
from shardway.rundir.directory import RunDir
from shardway.telemetry.store import HostTelemetry
from shardway.watch.advice.advise import advise, advise_on, judge_gpus
from shardway.watch.advice.events import MOST_STRETCHES, FoldedEvents, fold
from shardway.watch.advice.evidence import gather
from shardway.watch.advice.findings import Advice, describe_coverage
from shardway.watch.advice.rules import ADVICE_RULES

with modules_of("bench/watch"):
    import scenarios


def _job(seed: int = 1, kind: str = "NVIDIA H100 80GB HBM3", *, foreign: bool = False) -> scenarios.Job:
    job = scenarios.draw_healthy(np.random.default_rng(seed))
    job.kind, job.foreign, job.nodes, job.per_node, job.length_s, job.period_s = kind, foreign, 1, 4, 900, 1.0
    job.cores = job.allowed = 64
    job.numerics["precision.compute"], job.asked_share = "bf16", None
    job.save_every_s, job.validate_every_s = 300.0, 200.0
    return job


def _look(job: scenarios.Job, folder: Path) -> tuple[RunDir, list[HostTelemetry], list[Advice]]:
    run, hosts = scenarios.simulate(job, folder)
    return run, hosts, advise_on(gather(run, hosts))


@pytest.mark.parametrize("scenario", scenarios.SCENARIOS[::3], ids=lambda each: each.name)
def test_the_first_advice_is_the_right_one(scenario: scenarios.Scenario) -> None:
    results = [scenarios.run_one(scenario.name, seed, scenario.spoil)[0] for seed in (11, 12)]
    assert any(found and found[0] in scenario.right for found in results), results


def test_a_healthy_job_with_saves_and_validations_gets_none(tmp_path: Path) -> None:
    for seed, foreign in ((1, False), (2, True)):
        job = _job(seed, foreign=foreign)
        _, hosts, found = _look(job, tmp_path / str(seed))
        assert found == []
        assert {each.verdict for each in judge_gpus(hosts)} == {"used"}


def test_idle_accelerators_are_named_with_what_to_change(tmp_path: Path) -> None:
    job = _job()
    job.idle = {(0, 1), (0, 2), (0, 3)}
    _, hosts, found = _look(job, tmp_path / "run")
    assert found[0].rule == "idle-gpus"
    assert "3 of 4" in found[0].evidence
    assert "GPU 1, 2 and 3 of node01" in found[0].evidence
    assert "--nproc 4" in found[0].do
    assert found[0].ceiling_percent == 75.0
    assert found[0].ceiling_ms == pytest.approx(750, rel=0.1)
    assert [each.verdict for each in judge_gpus(hosts)][1:] == ["idle", "idle", "idle"]


def test_waiting_for_data_is_what_passes_between_steps(tmp_path: Path) -> None:
    job = _job()
    job.data = 0.4
    job.values["data"]["workers"] = 0
    _, _, found = _look(job, tmp_path / "run")
    assert found[0].rule == "data-wait"
    assert found[0].ceiling_percent == pytest.approx(40, abs=3)
    assert 'data.workers = "auto"' in found[0].do


def test_the_slow_start_of_a_loader_is_no_waiting(tmp_path: Path) -> None:
    run, hosts = scenarios.simulate(_job(), tmp_path / "run")
    path = tmp_path / "run/events/rank-00000.jsonl"
    events = [json.loads(line) for line in path.read_text().splitlines()]
    for event in events[1:]:  # the first batch is waited for, for two minutes
        if "spent" in event:
            event["spent"]["data"] += 120.0
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    assert [each.rule for each in advise_on(gather(run, hosts))] == []


def test_cores_that_other_programs_keep_busy_are_not_the_jobs_threads(tmp_path: Path) -> None:
    """On a machine that others use as well, a job that sleeps in its loader is not one of too many threads."""
    job = _job()
    job.data, job.values["data"]["workers"] = 0.5, 0
    run, hosts = scenarios.simulate(job, tmp_path / "run")
    series = {name: values for name, values in hosts[0].series.items() if not name.startswith(("gpu/", "core/"))}
    count = len(hosts[0].times)
    series |= {"cpu/use_percent": np.full(count, 100.0), "cpu/load": np.full(count, 200.0)}
    series |= {"cpu/job_cores": np.full(count, 0.5)}
    host = replace(hosts[0], series=series, infos=(replace(hosts[0].info, devices=()),))
    found = advise_on(gather(run, [host]))
    assert found[0].rule == "data-wait"
    assert "busy, mostly with other programs" in found[0].evidence
    assert "workers" in found[0].do
    many = {"cpu/job_cores": np.full(count, 60.0), "cpu/runnable_threads": np.full(count, 190.0)}
    crowded = replace(host, series=series | many)
    assert advise_on(gather(run, [crowded]))[0].rule == "too-few-cores"
    few = replace(crowded, series={**crowded.series, "cpu/runnable_threads": np.full(count, 1.0)})
    assert [each.rule for each in advise_on(gather(run, [few]))] == ["data-wait"]  # one thread, whatever the load


def test_a_job_of_this_machine_waits_in_no_queue(tmp_path: Path) -> None:
    job = _job()
    job.asked_share = 0.05
    run, hosts = scenarios.simulate(job, tmp_path / "run")
    assert [each.rule for each in advise_on(gather(run, hosts))] == ["over-asked-time"]
    written = run.attempt(1).path / "submission.json"
    written.write_text(written.read_text().replace("slurm", "local"))
    assert advise_on(gather(run, hosts)) == []


def test_a_device_that_no_catalogue_knows_gets_no_guess(tmp_path: Path) -> None:
    job = _job(kind="NVIDIA Q77 Prototype")
    job.numerics |= {"precision.compute": "fp32", "precision.tf32": False}
    job.values["model"]["vocab"] = 50257
    assert _look(job, tmp_path / "run")[2] == []
    known = replace(job, kind="NVIDIA H100 80GB HBM3", rng=np.random.default_rng(3))
    assert _look(known, tmp_path / "known")[2][0].rule == "no-tensor-cores"


def test_cores_that_others_keep_busy_are_not_too_few(tmp_path: Path) -> None:
    job = _job()
    job.bound, job.allowed, job.data, job.load = 2, 2, 0.4, 13.0
    run, (host,) = scenarios.simulate(job, tmp_path / "run")
    assert advise_on(gather(run, [host]))[0].rule == "too-few-cores"
    shared = {**host.series, "cpu/job_cores": np.full(len(host.times), 0.3, np.float32)}
    assert advise_on(gather(run, [replace(host, series=shared)]))[0].rule == "data-wait"


def test_thermal_slowdown_counts_and_a_power_cap_at_full_clock_does_not(tmp_path: Path) -> None:
    run, hosts = scenarios.simulate(_job(), tmp_path / "run")
    bits = np.full(len(hosts[0].times), 4.0, np.float32)
    hosts[0].series["gpu/2/throttle_bits"] = bits  # type: ignore[index]
    assert advise_on(gather(run, hosts)) == []
    bits[300:600] = 0x20
    found = advise_on(gather(run, hosts))
    assert found[0].rule == "throttling"
    assert "GPU 2 of node01: thermal slowdown by the driver" in found[0].evidence
    assert judge_gpus(hosts)[2].verdict == "throttled"


def test_a_run_that_holds_nothing_or_damage_gets_none_and_never_raises(tmp_path: Path) -> None:
    assert advise(RunDir(tmp_path / "none")) == []
    run, _ = scenarios.simulate(_job(), tmp_path / "run")
    (run.path / "resolved.toml").write_text("[train\n")
    (run.path / "events/rank-00000.jsonl").write_bytes(b'{"event": "step"}\n\xff\xfe\n{"event": "step", "time": "x"}\n')
    (run.path / "attempts/0001/submission.json").write_text("[]")
    (run.path / "telemetry").mkdir()
    (run.path / "telemetry/node01").write_bytes(b"\xf5SWT damaged")
    assert advise(run) == []
    assert judge_gpus([]) == []


def test_an_accelerator_without_samples_of_its_use_is_unknown(tmp_path: Path) -> None:
    _, hosts = scenarios.simulate(_job(), tmp_path / "run")
    series = {name: values for name, values in hosts[0].series.items() if name != "gpu/1/use_percent"}
    verdicts = judge_gpus([replace(hosts[0], series=series)])
    assert [each.verdict for each in verdicts] == ["used", "unknown", "used", "used"]
    assert verdicts[1].use_mean is None


def test_a_consequence_is_left_out(tmp_path: Path) -> None:
    job = _job()
    job.hot, job.late = {(0, 1): 0.8}, {(0, 1): 0.6}
    rules = [each.rule for each in _look(job, tmp_path / "run")[2]]
    assert rules == ["throttling"]


def test_a_cudnn_of_a_module_is_in_the_machines_record(tmp_path: Path) -> None:
    own, module = tmp_path / "site-packages/nvidia/cudnn/lib", tmp_path / "apps/cudnn/8.9"
    for folder in (own, module):
        folder.mkdir(parents=True)
        (folder / "libcudnn.so.8").touch()
    assert find_other_cudnn(f"{tmp_path / 'none'}:{own}") == ""
    job = _job()
    job.machine = {"cudnn": find_other_cudnn(f"{own}:{module}")}
    assert f"libcudnn.so.8 in {module}" in _look(job, tmp_path / "run")[2][0].evidence


def _fail(_: object) -> Iterator[Advice]:
    raise ZeroDivisionError


def test_a_rule_that_fails_does_not_hide_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken: list[Callable[..., object]] = [_fail]
    monkeypatch.setattr(
        "shardway.watch.advice.advise.ADVICE_RULES", [replace(ADVICE_RULES[0], find=broken[0]), *ADVICE_RULES]
    )
    job = _job()
    job.idle = {(0, 3)}
    assert _look(job, tmp_path / "run")[2][0].rule == "idle-gpus"


def test_the_page_has_every_rule(request: pytest.FixtureRequest) -> None:
    parts = []
    for rule in ADVICE_RULES:
        said = (("When", rule.when), ("Why", rule.why), ("What to do", rule.do))
        lines = [textwrap.fill(f"- {head}: {text}.", 140, subsequent_indent="  ") for head, text in said]
        parts.append("\n".join((f"## {rule.name}", "", *lines, "", "")))
    check_part(request, "advice.md", "rules", "".join(parts))
    names = [rule.name for rule in ADVICE_RULES]
    assert len(set(names)) == len(names)
    assert {name for rule in ADVICE_RULES for name in rule.hides} <= set(names)


def test_a_first_look_at_a_long_run_finds_what_all_events_show(tmp_path: Path) -> None:
    """Most steps are left out, and memory does not grow with them."""
    job = _job()
    job.length_s, job.period_s, job.data, job.save_every_s = 3600, 0.1, 0.2, 120.0
    run, hosts = scenarios.simulate(job, tmp_path / "run")
    path = tmp_path / "run/events/rank-00000.jsonl"
    read = list(run.follow_events().catch_up(most_steps=200))
    assert 4 * len(read) < len(path.read_text().splitlines())
    quick, whole = fold(read), fold(run.all_events())
    shares = [gather(run, hosts, each).data_share for each in (quick, whole)]
    periods = [gather(run, hosts, each).step_ms for each in (quick, whole)]
    assert shares == pytest.approx([0.2, 0.2], abs=0.01)
    assert periods == pytest.approx([100, 100], rel=0.02)
    assert advise_on(gather(run, hosts, quick))[0].rule == "data-wait"
    steps = FoldedEvents()
    for number in range(1, 3 * MOST_STRETCHES):
        steps.update({"event": "step", "step": number, "seconds": 0.8, "time": 1e9 + number})
    found = steps.list_steps()
    assert found is not None
    assert len(found.count) <= MOST_STRETCHES
    assert (found.last, found.period_s, found.between_share) == (1e9 + 3 * MOST_STRETCHES - 1, 1.0, pytest.approx(0.2))


def test_a_job_that_ended_for_memory_is_no_news_once_the_next_one_runs(tmp_path: Path) -> None:
    run, hosts = scenarios.simulate(_job(), tmp_path / "run")
    attempt = tmp_path / "run/attempts/0001"
    (attempt / "result.json").write_text(
        json.dumps({"state": "out_of_memory", "reason": "", "job": "101", "ended": 9.0})
    )
    assert [each.rule for each in advise_on(gather(run, hosts))] == ["out-of-memory"]
    following = tmp_path / "run/attempts/0002"
    following.mkdir()
    for name in ("submission.json", "started.json"):
        assert advise_on(gather(run, hosts)) != []
        (following / name).write_text((attempt / name).read_text())
    assert advise_on(gather(run, hosts)) == []


def test_a_verdict_is_about_one_start_and_names_it(tmp_path: Path) -> None:
    """All four worked in the first start; in the second, one of them does."""
    first, second = _job(1), _job(2)
    second.idle = {(0, 1), (0, 2), (0, 3)}
    found = []
    for job, later_s in ((first, 0.0), (second, 5000.0)):
        (host,) = scenarios.simulate(job, tmp_path / str(later_s))[1]
        info = replace(host.info, started=host.info.started + later_s)
        found.append(replace(host, infos=(info,), times=host.times + later_s))
    names = found[0].series.keys() & found[1].series.keys()
    series = {name: np.append(found[0].series[name], found[1].series[name]) for name in names}
    infos, times = (*found[0].infos, *found[1].infos), np.append(found[0].times, found[1].times)
    (alone, both) = (
        judge_gpus([each]) for each in (found[1], replace(found[0], infos=infos, times=times, series=series))
    )
    assert [each.verdict for each in both] == ["used", "idle", "idle", "idle"]
    assert [each.use_mean for each in both] == [each.use_mean for each in alone]
    assert {(each.start, each.starts) for each in both} == {(2, 2)}
    assert (both[0].since, both[0].until) == (found[1].times[0], found[1].times[-1])
    assert describe_coverage(alone) == ""
    assert describe_coverage(both) == "start 2 of 2, 14:59"
