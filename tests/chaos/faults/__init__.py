"""What can happen to ranks and their agent, each at a moment that a seed chooses."""

from faults import devices, disks, machines, numbers, pauses, processes, saves, server, stops, tiers, worlds
from faults.strike import Fault

FAULTS: tuple[Fault, ...] = (
    *processes.FAULTS,
    *pauses.FAULTS,
    *stops.FAULTS,
    *disks.FAULTS,
    *server.FAULTS,
    *saves.FAULTS,
    *tiers.FAULTS,
    *machines.FAULTS,
    *devices.FAULTS,
    *numbers.FAULTS,
    *worlds.FAULTS,
)
