"""The estimate of a whole run against its formulas taken as they are printed, a simulation, and published runs."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from shardway.batch_ramp import BatchRamp
from shardway.errors import UserError
from shardway.plan.economy import (
    Amount,
    Faults,
    Power,
    Price,
    RunEstimate,
    RunRequest,
    Slot,
    daly_interval,
    estimate_run,
)
from shardway.units import Scale, Span
from workshop_formulas import young_interval

NEVER = Faults(save_seconds=0, restart_seconds=0, node_mtbf_seconds=math.inf)
HOUR, DAY = 3600.0, 86400.0


def request(**changes: Any) -> RunRequest:
    values: Mapping[str, Any] = {
        "step_seconds": 2.0,
        "length": Span(100_000, "steps"),
        "gpus": 64,
        "gpus_per_node": 8,
        "faults": NEVER,
    }
    return RunRequest(**{**values, **changes})


def estimate(**changes: Any) -> RunEstimate:
    return estimate_run(request(**changes))


def parts(found: RunEstimate) -> Mapping[str, float]:
    return {name.removesuffix("_seconds"): value for name, value in asdict(found.wall).items()}


# --- the interval between checkpoints


@pytest.mark.parametrize(("mtbf_minutes", "interval_minutes"), [(24 * 60, 117), (6 * 60, 57), (15, 9.1)])
def test_intervals_that_daly_prints(mtbf_minutes: float, interval_minutes: float) -> None:
    """Figures 3 to 5, with saves of 5 minutes."""
    digits = 1 if interval_minutes < 10 else 0
    assert round(daly_interval(5, mtbf_minutes), digits) == interval_minutes


def daly_cost(interval: float, save: float, mtbf: float) -> float:
    """Seconds for one second of training; restarts multiply it, whatever the interval."""
    return mtbf * math.expm1((interval + save) / mtbf) / interval


@given(st.floats(1e-6, 100), st.floats(0.01, 100))
def test_no_other_interval_costs_less(share: float, factor: float) -> None:
    """Within the 0.2 % that Daly promises for the solution time."""
    best = daly_cost(daly_interval(share, 1), share, 1)
    assume(factor * daly_interval(share, 1) < 500)
    assert best <= 1.002 * daly_cost(factor * daly_interval(share, 1), share, 1)


@given(st.floats(1e-6, 0.02))
def test_young_is_close_while_saves_are_short(share: float) -> None:
    assert daly_cost(young_interval(share, 1), share, 1) == pytest.approx(
        daly_cost(daly_interval(share, 1), share, 1), rel=0.005
    )


@given(st.floats(0.5, 2000), st.floats(60, 1e6), st.floats(0.01, 100))
def test_the_chosen_interval_is_the_best_in_whole_steps(save: float, mtbf: float, factor: float) -> None:
    assume(mtbf > 5 * save)
    faults = Faults(save_seconds=save, restart_seconds=60, node_mtbf_seconds=mtbf)
    one = {"step_seconds": 0.5, "gpus": 1}
    chosen = request(faults=faults, **one)
    other = chosen.interval_steps * 0.5 * factor
    assume((other + save) / mtbf < 6)
    found, compared = (
        estimate(faults=each, **one).wall.total_seconds for each in (faults, replace(faults, interval_seconds=other))
    )
    assert found <= 1.01 * compared


def test_an_interval_is_whole_steps_no_longer_than_the_run_or_the_job() -> None:
    def steps(seconds: float, **changes: Any) -> int:
        return request(faults=replace(NEVER, interval_seconds=seconds), **changes).interval_steps

    slot = Slot(seconds=1000, start_seconds=100, resume_seconds=50, margin_seconds=50)
    assert steps(600) == 300
    assert steps(601.9) == 300
    assert steps(0.1) == 1
    assert steps(1e9) == 100_000
    assert steps(1e9, slot=slot) == 400
    assert steps(600, step_seconds=0.6) == 1000
    assert request().interval_steps == 100_000
    assert request(faults=Faults(save_seconds=0, restart_seconds=0)).interval_steps == 1


# --- where the time goes

FAULTS = st.builds(
    Faults,
    save_seconds=st.floats(0, 600),
    restart_seconds=st.floats(0, 3600),
    node_mtbf_seconds=st.none() | st.floats(1e6, 1e9) | st.just(math.inf),
    interval_seconds=st.none() | st.floats(1, 1e5),
)
SLOTS = st.none() | st.builds(
    Slot,
    seconds=st.floats(2 * HOUR, 48 * HOUR),
    start_seconds=st.floats(0, 1200),
    resume_seconds=st.floats(0, 1200),
    margin_seconds=st.floats(0, 1200),
)
REQUESTS = st.builds(
    RunRequest,
    step_seconds=st.floats(0.01, 120),
    length=st.builds(Span, st.integers(1, 10**6).map(float), st.just("steps")),
    gpus=st.integers(1, 64),
    gpus_per_node=st.integers(1, 16),
    faults=FAULTS,
    slot=SLOTS,
)


@given(REQUESTS)
def test_the_parts_add_up(asked: RunRequest) -> None:
    found = estimate_run(asked)
    seconds = parts(found)
    assert all(each >= 0 for each in seconds.values())
    assert sum(seconds.values()) == pytest.approx(found.wall.total_seconds)
    assert found.days * DAY == pytest.approx(found.wall.total_seconds)
    assert 0 < found.goodput <= 1
    assert found.goodput * found.days == pytest.approx(found.ideal_days)
    assert found.gpu_hours == pytest.approx(asked.gpus * found.days * 24)


@given(REQUESTS)
def test_the_parts_are_dalys_whole(asked: RunRequest) -> None:
    """M e^(R/M) (e^((interval + save)/M) - 1) T/interval, in one piece."""
    found, mtbf = estimate_run(asked), asked.mtbf_seconds
    interval, save = asked.interval_steps * asked.step_seconds, asked.faults.save_seconds
    whole = (interval + save) * found.wall.ideal_seconds / interval
    if not math.isinf(mtbf):
        whole = daly_cost(interval, save, mtbf) * math.exp(asked.faults.restart_seconds / mtbf)
        whole *= found.wall.ideal_seconds
    assert found.wall.total_seconds - found.wall.slot_seconds == pytest.approx(whole, rel=1e-6)
    assert found.failures == pytest.approx(whole / mtbf, rel=1e-6)


def simulate(asked: RunRequest, intervals: int, seed: int) -> Mapping[str, float]:
    """Runs interval after interval with failures drawn at random; seconds of each part, and the failures."""
    draw, mtbf, restart = random.Random(seed), asked.mtbf_seconds, asked.faults.restart_seconds
    length = asked.interval_steps * asked.step_seconds + asked.faults.save_seconds
    lost = restarting = failures = 0.0
    for _ in range(intervals):
        while (until := draw.expovariate(1 / mtbf)) < length:
            lost, failures = lost + until, failures + 1
            while (until := draw.expovariate(1 / mtbf)) < restart:
                restarting, failures = restarting + until, failures + 1
            restarting += restart
    return {"lost": lost, "restart": restarting, "failures": failures}


def test_the_parts_are_those_of_a_simulated_run() -> None:
    faults = Faults(save_seconds=120, restart_seconds=900, node_mtbf_seconds=64 * HOUR, interval_seconds=1800)
    asked = request(faults=faults, length=Span(9_000_000, "steps"), gpus=512)
    found = estimate_run(asked)
    seen = simulate(asked, intervals=10_000, seed=1)
    assert parts(found)["save"] == 10_000 * 120
    assert {name: parts(found)[name] for name in ("lost", "restart")} == pytest.approx(
        {name: seen[name] for name in ("lost", "restart")}, rel=0.03
    )
    assert found.failures == pytest.approx(seen["failures"], rel=0.03)


def test_where_nothing_fails_and_nothing_is_saved_time_is_steps() -> None:
    found = estimate()
    assert parts(found) == {"ideal": 200_000, "save": 0, "lost": 0, "restart": 0, "slot": 0}
    assert (found.goodput, found.failures, found.slots, found.nodes) == (1, 0, 1, 8)
    assert found.days == found.ideal_days == 200_000 / DAY


@given(st.floats(1e3, 1e9), st.integers(1, 10**6), st.integers(1, 64), st.integers(1, 4), SLOTS, st.floats(0, 600))
def test_where_nothing_fails_more_nodes_never_take_longer(
    work: float, steps: int, nodes: int, more: int, slot: Slot | None, save: float
) -> None:
    """The same steps, in steps that are shorter by as much as there are more nodes."""
    assume(slot is None or work / steps / nodes <= slot.training_seconds)
    fewer, many = (
        estimate(
            step_seconds=work / steps / count,
            length=Span(steps, "steps"),
            gpus=8 * count,
            faults=replace(NEVER, save_seconds=save),
            slot=slot,
        )
        for count in (nodes, nodes + more)
    )
    assert many.days <= fewer.days * (1 + 1e-9)


def test_more_nodes_fail_more() -> None:
    faults = Faults(save_seconds=60, restart_seconds=600)
    shares = [estimate(gpus=gpus, faults=faults).goodput for gpus in (8, 64, 1024, 16384)]
    assert shares == sorted(shares, reverse=True)


def test_tokens_become_steps() -> None:
    scale = Scale(batch=BatchRamp.of(512), tokens_per_sample=4096, samples_per_epoch=1)
    assert request(length=Span(2e12, "tokens"), scale=scale).steps == math.ceil(2e12 / (512 * 4096))


# --- jobs in a queue

QUEUE = Slot(seconds=24 * HOUR, start_seconds=600, resume_seconds=300, margin_seconds=900)


def test_jobs_of_a_day() -> None:
    """100 hours of work, 23.5 of which fit into a job that resumes and is continued."""
    found = estimate(length=Span(180_000, "steps"), slot=QUEUE)
    assert found.slots == 5
    assert found.wall.slot_seconds == 5 * 600 + 4 * (300 + 900)


def test_the_first_job_does_not_resume() -> None:
    """It has room for what a resume would take; a step more takes a second job."""
    room = (QUEUE.training_seconds + QUEUE.resume_seconds) / 2
    assert estimate(length=Span(room, "steps"), slot=QUEUE).slots == 1
    assert estimate(length=Span(room + 1, "steps"), slot=QUEUE).slots == 2


@given(st.floats(1, 1e7), SLOTS)
def test_jobs_are_the_fewest_that_hold_the_work(seconds: float, slot: Slot | None) -> None:
    found = estimate(step_seconds=1.0, length=Span(math.ceil(seconds), "steps"), slot=slot)
    if slot is None:
        assert (found.slots, found.wall.slot_seconds) == (1, 0)
        return
    work = found.wall.total_seconds - found.wall.slot_seconds - slot.resume_seconds
    assert found.slots * slot.training_seconds >= work - 0.01
    assert found.slots == 1 or (found.slots - 1) * slot.training_seconds < work + 0.01
    assert found.wall.total_seconds <= found.slots * slot.seconds + 0.01


# --- energy, money, allocation


@pytest.mark.parametrize(
    ("gpus", "days", "power", "kwh"),
    [
        # MLPerf Training v4.0, GPT-3 on 64 nodes of Supermicro, measured at the wall for 56.87 minutes.
        pytest.param(512, 56.87 / 1440, Power(tdp_watts=700, pue=1.0), 415.2, id="MLPerf, measured"),
        # Patterson et al., arXiv:2104.10350, table 4: 330 W a V100 with its share of the node, PUE 1.1.
        pytest.param(10_000, 14.8, Power(tdp_watts=300, node_factor=1.1, pue=1.1), 1_287_000, id="GPT-3"),
        # Touvron et al., arXiv:2302.13971, table 15: 1,022,362 GPU-hours at 400 W, PUE 1.1.
        pytest.param(
            2048, 1_022_362 / 2048 / 24, Power(tdp_watts=400, node_factor=1, pue=1.1), 449_000, id="LLaMA-65B"
        ),
        # Luccioni et al., arXiv:2211.02001: 1,082,990 GPU-hours at 400 W.
        pytest.param(384, 1_082_990 / 384 / 24, Power(tdp_watts=400, node_factor=1, pue=1), 433_196, id="BLOOM"),
    ],
)
def test_energy_of_published_runs(gpus: int, days: float, power: Power, kwh: float) -> None:
    found = estimate(step_seconds=days * DAY / 1000, length=Span(1000, "steps"), gpus=gpus, power=power)
    assert found.energy_kwh == pytest.approx(kwh, rel=0.003)


@given(st.floats(50, 2000), st.floats(0.5, 2), st.floats(1, 2), st.integers(1, 9))
def test_energy_grows_with_each_of_its_factors(watts: float, factor: float, pue: float, times: int) -> None:
    def kwh(gpus: int = 8, **changes: float) -> float:
        power = {"tdp_watts": watts, "node_factor": factor, "pue": pue} | changes
        return estimate(gpus=gpus, power=Power(**power)).energy_kwh or 0

    for more in (
        kwh(gpus=8 * times),
        kwh(tdp_watts=times * watts),
        kwh(node_factor=times * factor),
        kwh(pue=times * pue),
    ):
        assert more == pytest.approx(times * kwh())


def test_an_allocation_counts_nodes_whole() -> None:
    found = estimate(length=Span(180_000, "steps"), gpus=10, gpus_per_node=4, cores_per_node=48)
    assert (found.gpu_hours, found.node_hours) == (10 * 100, 3 * 100)
    assert found.charge == Amount(3 * 48 * 100, "core-hours")


def test_cost_is_that_of_the_gpu_hours() -> None:
    found = estimate(length=Span(180_000, "steps"), gpus=10, price=Price(per_gpu_hour=2.5, currency="EUR"))
    assert found.cost == Amount(2500.0, "EUR")


def test_what_is_not_asked_is_not_estimated() -> None:
    found = estimate()
    assert (found.energy_kwh, found.cost, found.charge) == (None, None, None)


# --- published runs


def test_failures_of_llama_3() -> None:
    """arXiv:2407.21783, section 3.3.4: 419 in 54 days on 16,384 H100, one in three hours, over 90 % of the time
    effective. It does not say how long saves and restarts took: these are quick ones."""
    faults = Faults(save_seconds=10, restart_seconds=300)
    found = estimate(step_seconds=DAY / 10_000, length=Span(500_000, "steps"), gpus=16_384, faults=faults)
    assert found.failures / found.days == pytest.approx(419 / 54)
    assert found.goodput > 0.9


def test_days_and_hours_of_llama_65b() -> None:
    """arXiv:2302.13971, section 2.4 and table 15: 380 tokens per second and GPU on 2,048 A100 for 1.4 T tokens, in
    batches of 4 M: 21 days, 1,022,362 GPU-hours."""
    scale = Scale(batch=BatchRamp.of(2048), tokens_per_sample=2048, samples_per_epoch=1)
    step_seconds = 2048 * 2048 / (380 * 2048)
    found = estimate(step_seconds=step_seconds, length=Span(1.4e12, "tokens"), scale=scale, gpus=2048)
    assert round(found.days) == 21
    assert found.gpu_hours == pytest.approx(1_022_362, rel=0.01)


# --- what is refused


def told(**changes: Any) -> str:
    with pytest.raises(UserError) as refused:
        request(**changes)
    return str(refused.value)


def test_a_job_too_short_for_a_step() -> None:
    assert told(slot=replace(QUEUE, seconds=1801)) == (
        "1 problem in the run to estimate\n"
        "  slot.seconds: 1801 s, of which start, resume and margin leave 1 s, are too short for a step of 2 s\n"
        "      to do: choose a queue with a longer wall-time, or a smaller margin"
    )


@pytest.mark.parametrize(
    "faults",
    [
        Faults(save_seconds=1, restart_seconds=1, node_mtbf_seconds=8000, interval_seconds=7000),
        Faults(save_seconds=1, restart_seconds=7000, node_mtbf_seconds=8000),
        Faults(save_seconds=7000, restart_seconds=0, node_mtbf_seconds=8000),
        Faults(save_seconds=1, restart_seconds=1, node_mtbf_seconds=1e-300),
    ],
)
def test_a_run_that_fails_before_it_gets_on(faults: Faults) -> None:
    assert "in which nothing fails\n      to do: save more often or faster" in told(faults=faults)
