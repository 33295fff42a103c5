from __future__ import annotations

import math
import os
import random
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardway.telemetry.store import (
    DeviceInfo,
    HostTelemetry,
    NodeInfo,
    TelemetryWriter,
    name_file,
    read_telemetry,
)

GPU = DeviceInfo(0, "NVIDIA H100", "GPU-0", 80 << 30, 700.0, "nvidia")
INFO = NodeInfo("n1", 0, "12", 1, 1e9, 1.0, 4, (0, 1), 1 << 36, None, (GPU,), {"lustre/*": "kept for administrators"})
SERIES = ("gpu/0/use_percent", "gpu/0/memory_bytes", "gpu/0/energy_j", "io/read_bytes_per_s", "cpu/job_cores")


def write(folder: Path, rows: Sequence[Sequence[float]], start: float = 1e9, info: NodeInfo = INFO) -> Path:
    """A file with a block for each ten rows."""
    writer = TelemetryWriter(folder, info, SERIES, block_s=3600)
    for number, row in enumerate(rows):
        writer.append(start + number, row)
        if number % 10 == 9:
            writer.flush()
    writer.close()
    return writer.path


def draw_rows(count: int, seed: int = 0) -> list[list[float]]:
    rng = random.Random(seed)
    rows = [
        [rng.randint(0, 100), rng.uniform(0, 8e10), 700.0 * n, rng.uniform(0, 1e11), rng.uniform(0, 32)]
        for n in range(count)
    ]
    for row in rows[:: max(1, count // 5)]:
        row[rng.randrange(5)] = math.nan
    return rows


def read_one(folder: Path) -> HostTelemetry:
    (host,) = read_telemetry(folder)
    return host


@given(st.lists(st.tuples(*[st.floats(0, 2.0**40, width=32) | st.just(math.nan)] * 5), min_size=1, max_size=40))
def test_values_come_back_within_a_step(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[float, ...]]
) -> None:
    folder = tmp_path_factory.mktemp("store")
    rows = [(min(row[0], 1e6), row[1], min(row[2], 1e9), row[3], min(row[4], 1e5)) for row in rows]
    write(folder, rows)
    found = read_one(folder)
    assert found.times.tolist() == [1e9 + number for number in range(len(rows))]
    for name, column, step in zip(SERIES, zip(*rows, strict=True), (0.1, 0, 1, 0, 0.001), strict=True):
        expected = np.array(column)
        allowed = np.maximum(step / 2, np.abs(expected) * 2.0**-12) + np.abs(expected) * 1e-6 + 1e-35
        assert np.array_equal(np.isnan(found.series[name]), np.isnan(expected)), name
        assert np.all(np.isnan(expected) | (np.abs(found.series[name] - expected) <= allowed)), name


def test_what_the_sampler_knew_comes_back(tmp_path: Path) -> None:
    write(tmp_path, draw_rows(1))
    found = read_one(tmp_path)
    assert replace(found.info, missing=dict(found.info.missing)) == INFO


@pytest.mark.parametrize("folder", ["nowhere", "."])
def test_where_nothing_was_sampled_nothing_is_read(tmp_path: Path, folder: str) -> None:
    (tmp_path / "n1").write_bytes(b"")
    (tmp_path / "n2").write_bytes(b"no telemetry \xf5SWT" * 100)
    assert read_telemetry(tmp_path / folder) == []


@pytest.mark.slow
def test_a_file_torn_at_any_byte_keeps_its_whole_blocks(tmp_path: Path) -> None:
    path = write(tmp_path, draw_rows(30))
    content, counts = path.read_bytes(), []
    for end in range(len(content)):
        path.write_bytes(content[:end])
        counts.append(sum(len(host.times) for host in read_telemetry(tmp_path)))
    assert sorted(counts) == counts
    assert set(counts) == {0, 10, 20}


@pytest.mark.slow
def test_a_flipped_byte_costs_one_block_at_most(tmp_path: Path) -> None:
    rows = draw_rows(40)
    path = write(tmp_path, rows)
    content = path.read_bytes()
    whole = read_one(tmp_path)
    for at in range(len(content)):
        path.write_bytes(content[:at] + bytes([content[at] ^ (1 << at % 8)]) + content[at + 1 :])
        for host in read_telemetry(tmp_path):  # none at all where the one schema was hit
            assert len(host.times) in (30, 40)
            kept = np.isin(whole.times, host.times)
            for name in SERIES:
                assert np.array_equal(host.series[name], whole.series[name][kept], equal_nan=True)


def test_a_schema_is_written_again_for_blocks_before_and_after(tmp_path: Path) -> None:
    path = write(tmp_path, draw_rows(10 * (TelemetryWriter.SCHEMA_EVERY + 1)))
    content = bytearray(path.read_bytes())
    content[40] ^= 1  # in the first schema
    path.write_bytes(content)
    assert len(read_one(tmp_path).times) == 10 * (TelemetryWriter.SCHEMA_EVERY + 1)


def test_two_samplers_of_one_host_share_its_file(tmp_path: Path) -> None:
    writers = [TelemetryWriter(tmp_path, replace(INFO, node=node, started=1e9 + node), SERIES) for node in (0, 1)]
    rows = draw_rows(60, seed=4)
    for number, row in enumerate(rows):
        writer = writers[number % 2]
        writer.append(1e9 + number, row)
        if number % 7 == 0:
            writer.flush()
    for writer in writers:
        writer.close()
    found = read_one(tmp_path)
    assert found.times.tolist() == [1e9 + number for number in range(60)]
    assert [info.node for info in found.infos] == [0, 1]
    assert found.info.node == 1
    assert np.allclose(found.series["cpu/job_cores"], [row[4] for row in rows], atol=1e-3, equal_nan=True)


def test_series_may_change(tmp_path: Path) -> None:
    writer = TelemetryWriter(tmp_path, INFO, ("cpu/load",))
    writer.append(1e9, [1.0])
    writer.describe(replace(INFO, missing={"gpu/*": "gone"}), ("cpu/load", "memory/used_bytes"))
    writer.append(1e9 + 1, [2.0, 4096.0])
    writer.close()
    found = read_one(tmp_path)
    assert found.series["cpu/load"].tolist() == [1.0, 2.0]
    assert np.isnan(found.series["memory/used_bytes"][0])
    assert found.series["memory/used_bytes"][1] == 4096.0
    assert dict(found.info.missing) == {"gpu/*": "gone"}


def test_a_clock_that_was_set_back_or_far_ahead_loses_no_order(tmp_path: Path) -> None:
    writer = TelemetryWriter(tmp_path, INFO, ("cpu/load",))
    for number, unix_s in enumerate((1e9, 1e9 + 1, 1e9 - 50, 1e9 + 1, 1e9 + 1e7)):
        writer.append(unix_s, [float(number)])
    writer.close()
    found = read_one(tmp_path)
    assert found.times.tolist() == [1e9 - 50, 1e9, 1e9 + 1, 1e9 + 1e7]
    assert found.series["cpu/load"].tolist() == [2.0, 0.0, 3.0, 4.0]  # of two at one time, the later


def test_what_was_read_is_held_in_few_bytes(tmp_path: Path) -> None:
    """A core's use is a byte a sample, percent and watts are two, a constant is none; floats would be four each."""
    rng = random.Random(1)
    names = ("core/0/use_percent", "core/1/use_percent", "gpu/0/use_percent", "gpu/0/power_w", "gpu/0/ecc_errors")
    rows = [
        [rng.randint(0, 200) / 2, rng.randint(0, 200) / 2, rng.randint(0, 1000) / 10, rng.randint(0, 7000) / 10, 3.0]
        for _ in range(6000)
    ]
    writer = TelemetryWriter(tmp_path, INFO, names)
    for number, row in enumerate(rows):
        writer.append(1e9 + number, row)
    writer.close()
    read_one(tmp_path)
    tracemalloc.start()
    try:
        found = read_one(tmp_path)
        used = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert used < 6000 * (8 + 6 + 2)  # a time, five series, and what stands around them
    for name, column in zip(names, zip(*rows, strict=True), strict=True):
        assert found.series[name] == pytest.approx(np.array(column), abs=1e-4)
    assert list(found.series) == list(names)
    assert "cpu/load" not in found.series


def test_series_of_samplers_with_other_names_have_gaps(tmp_path: Path) -> None:
    for number, name in enumerate(("cpu/load", "memory/used_bytes", "cpu/load")):
        writer = TelemetryWriter(tmp_path, replace(INFO, started=1e9 + number), (name,))
        writer.append(1e9 + number, [float(number + 1)])
        writer.close()
    found = read_one(tmp_path)
    assert {name: np.nan_to_num(values, nan=-1).tolist() for name, values in found.series.items()} == {
        "cpu/load": [1.0, -1.0, 3.0],
        "memory/used_bytes": [-1.0, 2.0, -1.0],
    }


def test_the_newest_blocks_alone_can_be_read(tmp_path: Path) -> None:
    write(tmp_path, draw_rows(40))
    (host,) = read_telemetry(tmp_path, since=1e9 + 25)
    assert host.times.tolist() == [1e9 + number for number in range(20, 40)]


@pytest.mark.parametrize("host", ["n1.site.org", "a/../b", "..", "", "näme €", "x" * 300, "a b%c"])
def test_any_host_name_has_a_file(tmp_path: Path, host: str) -> None:
    writer = TelemetryWriter(tmp_path / "telemetry", replace(INFO, host=host), ("cpu/load",))
    writer.append(1e9, [1.0])
    writer.close()
    assert [path.name for path in (tmp_path / "telemetry").iterdir()] == [name_file(host)]
    assert read_one(tmp_path / "telemetry").host == host


def test_what_is_refused_is_written_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = TelemetryWriter(tmp_path, INFO, ("cpu/load",))
    write, room = os.write, [False]

    def half(descriptor: int, block: bytes) -> int:
        return write(descriptor, block if room[0] else block[:10])

    monkeypatch.setattr(os, "write", half)
    writer.append(1e9, [1.0])
    with pytest.raises(OSError, match="No space left"):
        writer.flush()
    assert writer.is_failing
    room[0] = True
    writer.append(1e9 + 1, [2.0])
    writer.close()
    assert read_one(tmp_path).series["cpu/load"].tolist() == [1.0, 2.0]


def test_a_folder_that_is_moved_takes_its_file_along(tmp_path: Path) -> None:
    writer = TelemetryWriter(tmp_path / "run/telemetry", INFO, ("cpu/load",))
    (tmp_path / "run").mkdir()
    writer.append(1e9, [1.0])
    writer.flush()
    (tmp_path / "run").rename(tmp_path / "moved")
    writer.append(1e9 + 1, [2.0])
    writer.close()
    assert read_one(tmp_path / "moved/telemetry").times.tolist() == [1e9, 1e9 + 1]
    assert not (tmp_path / "run").exists()


def test_a_day_of_four_gpus_and_64_cores_is_small(tmp_path: Path) -> None:
    """At most 40 MB a day at one sample a second; values are drawn anew each second, which is worse than real ones."""
    rng = random.Random(5)
    names = [f"core/{core}/use_percent" for core in range(64)]
    percent = ("use_percent", "memory_use_percent", "sm_percent", "tensor_percent", "dram_percent", "occupancy_percent")
    rates = [f"{link}_{way}_bytes_per_s" for link in ("pcie", "nvlink") for way in ("rx", "tx")]
    names += [f"gpu/{gpu}/{name}" for gpu in range(4) for name in (*percent, "power_w", "temperature_c", *rates)]
    writer = TelemetryWriter(tmp_path, INFO, names, block_s=3600)
    for second in range(300):
        values = []
        for name in names:
            values.append(rng.uniform(0, 100) if name.endswith("_percent") else 10 ** rng.uniform(8, 11))
        writer.append(1e9 + second, values)
        if second % 20 == 19:
            writer.flush()
    writer.close()
    assert writer.path.stat().st_size / 300 * 86400 <= 40e6
