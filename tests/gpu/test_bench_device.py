"""`shardway bench device` on a CUDA device: all kinds are measured, and no rate is above what is rated."""

from __future__ import annotations

import pytest
import torch

from shardway.bench.device import DeviceRequest, measure_device
from shardway.bench.kernels import list_formats

pytestmark = pytest.mark.gpu


def test_all_of_a_device_is_measured_and_nothing_exceeds_what_is_rated() -> None:
    device = torch.device("cuda", 0)
    report = measure_device(device, DeviceRequest(seconds=10.0))
    assert tuple(each.best.format for each in report.searches) == list_formats(device)
    assert {(each.direction, each.pinned) for each in report.transfers} == {
        (direction, pinned) for direction in ("to", "from") for pinned in (True, False)
    }
    assert {each.what for each in report.launches} == {"kernel", "operator", "operator and wait"}
    assert report.attention, report.refused
    assert report.memory_copy is not None
    for search in report.searches:
        rated = report.rate_product(search.best.format)
        assert rated is None or search.best.flops_per_s < 1.02 * rated, search
    assert report.rated_memory is None or report.memory_copy.bytes_per_s < 1.02 * report.rated_memory
