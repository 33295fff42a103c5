"""Measures copies between the GPUs of this node, and from the host to each: bandwidth in one direction, and latency.

Invariants:
- One copy runs at a time, so that no two share a link. Buffers are freed before the next pair.
- A pair that cannot be measured (no memory left) is left out.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping

import torch

from shardway.bench.kernels import DeviceTimer
from shardway.bench.topology import NodeTopology
from shardway.bench.topology_report import CopyRates

SIZE, LITTLE = 1 << 28, 4
"""Bytes of a copy: large enough for full bandwidth, and small enough to be all latency."""
_REPEATS, _WARM_UP = 10, 2

CopyTimer = Callable[[int | None, int, int], float]
"""Seconds of one copy of so many bytes, from a device (None: pinned memory of the host) to one, by torch's indices."""


def measure_copies(indices: Mapping[int, int], time_copy: CopyTimer) -> CopyRates:
    """Copies between all devices in both directions and from the host; `indices` maps torch's index of a device to its
    index in the topology."""
    pairs, latencies, from_host = {}, {}, {}
    for target, target_index in indices.items():
        for source, source_index in indices.items():
            if source != target:
                seconds = _try(time_copy, source, target, SIZE)
                late = _try(time_copy, source, target, LITTLE)
                if seconds and late:
                    pairs[source_index, target_index] = SIZE / seconds
                    latencies[source_index, target_index] = late
        seconds = _try(time_copy, None, target, SIZE)
        if seconds:
            from_host[target_index] = SIZE / seconds
    return CopyRates(pairs, latencies, from_host)


def _try(time_copy: CopyTimer, source: int | None, target: int, size: int) -> float | None:
    try:
        return time_copy(source, target, size)
    except (RuntimeError, MemoryError):  # no memory left on a device or in the host
        gc.collect()
        return None


def time_cuda_copy(source: int | None, target: int, size: int) -> float:
    """The fastest of several copies, by events in the target's stream. Raises RuntimeError where memory is short."""
    to = torch.empty(size, dtype=torch.uint8, device=f"cuda:{target}")
    if source is None:
        data = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    else:
        data = torch.empty(size, dtype=torch.uint8, device=f"cuda:{source}")
        torch.cuda.synchronize(source)
    with torch.cuda.device(target if source is None else source):
        times = DeviceTimer().seconds(lambda: to.copy_(data, non_blocking=True), lambda: None, _WARM_UP + _REPEATS)
    return min(times[_WARM_UP:])


def map_devices(topology: NodeTopology, uuids: Mapping[int, str]) -> dict[int, int]:
    """torch's index of each visible device -> its index in the topology, by their UUIDs; by their order where one is
    not known there."""
    of_uuid = {device.uuid: device.index for device in topology.devices if device.uuid}
    if uuids and all(uuid in of_uuid for uuid in uuids.values()):
        return {index: of_uuid[uuid] for index, uuid in uuids.items()}
    return {index: device.index for index, device in zip(uuids, topology.devices, strict=False)}


def list_cuda_uuids() -> dict[int, str]:
    """torch's index of each visible device -> its UUID, as NVML writes it."""
    count = torch.cuda.device_count()
    return {index: f"GPU-{torch.cuda.get_device_properties(index).uuid}" for index in range(count)}
