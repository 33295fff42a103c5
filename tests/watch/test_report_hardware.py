"""Samples in bins, energy, the time axis, and what is left out."""

from __future__ import annotations

import base64
import struct
import zlib
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_runs import BEGIN, make_host

from shardway.watch.advice.advise import judge_gpus
from shardway.watch.report.axis import make_axis
from shardway.watch.report.colour_map import MISSING, find_levels, render_png
from shardway.watch.report.hardware import COUNTER, INTEGRAL, bin_samples, make_panels, total_gpus, total_traffic

spans = st.lists(st.tuples(st.floats(1e9, 1.0001e9), st.floats(0, 5000)), min_size=1, max_size=8)


@given(spans, st.lists(st.floats(1e9, 1.0001e9), min_size=2, max_size=20))
def test_the_axis_keeps_the_order_of_time(found: list[tuple[float, float]], times: list[float]) -> None:
    axis = make_axis([(first, first + length) for first, length in found])
    assert axis is not None
    places = axis.place(np.sort(times))
    assert ((places >= 0) & (places <= 1)).all()
    assert (np.diff(places) >= 0).all()
    assert axis.time(axis.place(axis.spans[-1][0])) == pytest.approx(axis.spans[-1][0], abs=1)
    assert all(0 <= tick.place <= 1 for tick in axis.ticks())


def test_a_long_wait_is_short_and_time_alive_has_one_scale() -> None:
    axis = make_axis([(BEGIN, BEGIN + 3600), (BEGIN + 90_000, BEGIN + 93_600)])
    assert axis is not None
    [(start, end, wait)] = axis.breaks()
    assert wait == 86_400
    assert end - start == pytest.approx(0.025 / 1.025)
    assert start == pytest.approx(1 - end)  # both attempts took an hour
    assert [tick.label for tick in axis.ticks()][:2] == ["0", "15 min"]
    assert make_axis([(0.0, 5.0), (float("nan"), 1.0)]) is None


@given(st.lists(st.floats(-1e6, 1e6, width=32) | st.just(float("nan")), max_size=200), st.integers(1, 20))
def test_bins_keep_extremes_and_gaps(values: list[float], count: int) -> None:
    samples = np.array(values, dtype=np.float64)
    times = np.arange(len(values), dtype=np.float64)
    least, means, most = bin_samples(times, samples, np.linspace(0, max(1, len(values)), count + 1))
    edges = np.linspace(0, max(1, len(values)), count + 1)
    for place, (low, high) in enumerate(pairwise(edges)):
        inside = samples[(times >= low) & (times < high)]
        known = inside[np.isfinite(inside)]
        if not len(known):
            assert np.isnan([least[place], means[place], most[place]]).all()
        else:
            assert (least[place], most[place]) == (known.min(), known.max())
            assert means[place] == pytest.approx(known.mean(), rel=1e-6, abs=1e-6)


def test_energy_is_of_the_counter_or_of_power() -> None:
    power = [100.0] * 61
    counted = make_host({"gpu/0/energy_j": [5.0 + 120 * at for at in range(61)], "gpu/0/power_w": power})
    gpu = total_gpus([counted], [])[0]
    assert (gpu.energy_j, gpu.energy_from) == (7200.0, COUNTER)
    [first, second] = total_gpus([make_host({"gpu/0/power_w": power})], [])
    assert (first.energy_j, first.energy_from) == (pytest.approx(6100.0), INTEGRAL)
    assert (second.energy_j, second.energy_from, second.verdict) == (None, "", "unknown")
    broken = make_host({"gpu/0/power_w": [100.0, 100.0]}, times=[BEGIN, BEGIN + 5000])
    assert total_gpus([broken], [])[0].energy_j == pytest.approx(200.0)  # a gap takes no energy
    restarted = make_host({"gpu/0/energy_j": [100.0, 200.0, 10.0, 60.0]})
    assert total_gpus([restarted], [])[0].energy_j == 150.0


def test_totals_are_over_all_starts_and_the_verdict_is_of_the_one_it_names() -> None:
    early, late = (
        make_host({"gpu/0/use_percent": [use] * 100}, started=BEGIN + at, gpus=1) for use, at in ((90.0, 0), (0.0, 999))
    )
    series = {"gpu/0/use_percent": np.append(early.series["gpu/0/use_percent"], late.series["gpu/0/use_percent"])}
    both = replace(
        early, infos=(*early.infos, *late.infos), times=np.append(early.times, late.times + 999), series=series
    )
    [gpu] = total_gpus([both], judge_gpus([both]))
    assert (gpu.use_mean, gpu.verdict, gpu.start, gpu.starts) == (45.0, "idle", 2, 2)
    elsewhere = replace(early, host="n2", infos=(replace(early.info, host="n2"),))
    assert [(each.verdict, each.start) for each in total_gpus([both, elsewhere], judge_gpus([both, elsewhere]))] == [
        ("idle", 2),
        ("unknown", None),
    ]


def test_what_never_moved_is_left_out_and_idle_is_shown() -> None:
    still = {"gpu/0/use_percent": [0.0] * 100, "gpu/0/throttle_bits": [1.0] * 100, "io/read_bytes_per_s": [0.0] * 100}
    host = make_host({**still, "gpu/1/use_percent": [50.0] * 100, "gpu/1/throttle_bits": [0.0] * 99 + [float("nan")]})
    axis = make_axis([(BEGIN, BEGIN + 99)])
    assert axis is not None
    panels, left_out = make_panels([host], axis)
    assert [panel.name for panel in panels] == ["use"]
    assert left_out == ["Clocks held back", "Read from storage"]
    assert panels[0].rows == ("n1:0", "n1:1")
    assert panels[0].row_means.tolist() == [0.0, 50.0]
    hot = make_host({"gpu/0/throttle_bits": [0x20 | 1] * 50 + [1.0] * 50})
    [panel], _ = make_panels([hot], axis)
    assert (panel.title, panel.mean) == ("Clocks held back", 50.0)


def test_traffic_is_summed_without_the_loop_back() -> None:
    rates = {f"net/{name}/rx_bytes_per_s": [rate] * 10 for name, rate in (("lo", 1e9), ("eth0", 1e3), ("eth1", 5e2))}
    [found] = total_traffic([make_host({**rates, "lustre/work/read_bytes_per_s": [0.0] * 10})])
    assert (found.what, found.read_bytes, found.read_most) == ("network, in and out", 15_000.0, 1_500.0)


def test_what_is_read_with_each_fifth_sample_has_no_gaps_and_its_whole_total() -> None:
    rate = np.full(101, np.nan)
    rate[::5] = 4e6
    host = make_host({"io/read_bytes_per_s": rate, "cpu/load": [20.0] * 101})
    [found] = total_traffic([host])
    assert (found.what, found.read_bytes, found.read_most) == ("storage", pytest.approx(21 * 5 * 4e6), 4e6)
    axis = make_axis([(BEGIN, BEGIN + 100)])
    assert axis is not None
    panels = {panel.name: panel for panel in make_panels([host], axis)[0]}
    assert panels["read"].means.tolist() == [[4.0] * 10]
    assert panels["load"].means.shape == (1, 50)
    rate[40:80] = np.nan
    [found] = total_traffic([make_host({"io/read_bytes_per_s": rate})])
    assert found.read_bytes == pytest.approx(13 * 5 * 4e6), "a gap takes nothing"


def test_a_colour_map_is_a_png_with_its_levels() -> None:
    levels = find_levels(np.array([[0.0, 50.0, 100.0], [float("nan"), 200.0, -1.0]]), 100.0)
    assert levels.tolist() == [[0, 127, 254], [MISSING, 254, 0]]
    png = base64.b64decode(render_png(levels).partition(",")[2])
    chunks, at = {}, 8
    while at < len(png):
        (size,) = struct.unpack(">I", png[at : at + 4])
        kind, content = png[at + 4 : at + 8], png[at + 8 : at + 8 + size]
        assert struct.unpack(">I", png[at + 8 + size : at + 12 + size]) == (zlib.crc32(kind + content),)
        chunks[kind], at = content, at + 12 + size
    assert struct.unpack(">II", chunks[b"IHDR"][:8]) == (3, 2)
    assert zlib.decompress(chunks[b"IDAT"]) == b"\0" + bytes([0, 127, 254]) + b"\0" + bytes([255, 254, 0])
    assert (len(chunks[b"PLTE"]), chunks[b"tRNS"]) == (768, b"\xff" * 255 + b"\0")
    colours = np.frombuffer(chunks[b"PLTE"], np.uint8).reshape(256, 3)[:255]
    assert (np.diff(colours @ [0.2126, 0.7152, 0.0722]) >= -0.5).all()  # rounded, lighter with the value
